from __future__ import annotations

import pytest
import torch

from tunesmith.kernels.directions import right_directions


def falling(rows: int, columns: int) -> torch.Tensor:
    """A matrix whose singular values fall as a gradient's do."""
    generator = torch.Generator().manual_seed(3)
    short = min(rows, columns)
    left = torch.linalg.qr(torch.randn(rows, short, generator=generator))[0]
    right = torch.linalg.qr(torch.randn(columns, short, generator=generator))[0]
    return left * torch.arange(1, short + 1).pow(-0.7) @ right.t()


@pytest.mark.parametrize(("rows", "columns"), [(40, 96), (320, 400), (400, 320)])
def test_the_directions_keep_as_much_of_a_matrix_as_the_exact_ones(rows, columns):
    matrix, rank = falling(rows, columns), rows // 4
    exact = torch.linalg.svd(matrix)[2][:rank]
    found = right_directions(matrix, rank, torch.Generator().manual_seed(0))
    torch.testing.assert_close(found @ found.t(), torch.eye(rank), rtol=0, atol=1e-5)
    assert (matrix @ found.t()).norm() > 0.999 * (matrix @ exact.t()).norm()
    # One by one, and not only as a space: the first ones point where the exact ones do.
    assert (found[:4] * exact[:4]).sum(1).abs().min() > 0.999


def test_a_matrix_with_fewer_directions_leaves_zeros():
    found = right_directions(falling(5, 12), 8, torch.Generator())
    assert found[:5].norm(dim=1).min() > 0.99
    assert not found[5:].any()
