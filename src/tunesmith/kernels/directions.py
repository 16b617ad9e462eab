"""The largest singular directions of a matrix, for methods that look at a gradient through a few of them.

Small matrices get all their singular values. Of larger ones a basis of the largest directions is found by iteration,
and turned to the directions by the eigenvectors of a small matrix: a decomposition of the whole takes a GPU seconds.

Legend: M rows, N columns, R rank.
"""

from __future__ import annotations

import torch

EXACT = 256
"""Matrices with a smaller side get all their singular values."""
PASSES = 4
"""Over a larger one, each way. What is found keeps 0.9996 of the norm that the exact directions keep, at 768 x 2048 for
a quarter of them, where singular values fall as n^-0.7, and 0.98 where the matrix is nothing but noise."""


def right_directions(matrix_mn: torch.Tensor, rank: int, generator: torch.Generator) -> torch.Tensor:
    """The largest right singular directions, orthonormal rows [R, N]; zeros where the matrix has fewer.

    `generator` is one of the host, so that the iteration begins alike on every device.
    """
    matrix_mn = matrix_mn.float()
    found = matrix_mn.new_zeros(rank, matrix_mn.shape[1])
    kept = min(rank, *matrix_mn.shape)
    if min(matrix_mn.shape) <= EXACT:
        found[:kept] = torch.linalg.svd(matrix_mn, full_matrices=False)[2][:kept]
        return found
    basis_nr = torch.randn(matrix_mn.shape[1], kept, generator=generator).to(matrix_mn.device)
    for _ in range(PASSES):
        basis_mr = torch.linalg.qr(matrix_mn @ basis_nr)[0]
        basis_nr = torch.linalg.qr(matrix_mn.t() @ basis_mr)[0]
    seen_mr = matrix_mn @ basis_nr
    turn_rr = torch.linalg.eigh(seen_mr.t() @ seen_mr)[1].flip(1)  # largest first
    found[:kept] = (basis_nr @ turn_rr).t()
    return found
