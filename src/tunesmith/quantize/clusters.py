"""Weight clustering: the weights of each row are replaced by the nearest of a few values of its own, found by k-means,
where inputs that are large count for more.

Legend: N outputs, K inputs, C values of a row's codebook.
"""

from __future__ import annotations

import torch

ITERATIONS = 12


def cluster(
    weight_nk: torch.Tensor, importance_k: torch.Tensor | None, *, bits: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights of which each row has at most 2 ** bits values, the codebooks [N, C] in `dtype`, and the codes [N, K]."""
    count = 2**bits
    importance = torch.ones(weight_nk.shape[1]) if importance_k is None else importance_k / importance_k.mean()
    importance_nk = importance.clamp(min=1e-6).expand_as(weight_nk).contiguous()
    places = torch.linspace(0, 1, 2 * count + 1)[1::2]
    ordered = weight_nk.sort(dim=1).values
    centres = ordered[:, (places * (weight_nk.shape[1] - 1)).round().long()].contiguous()
    for _ in range(ITERATIONS):
        codes = _nearest(weight_nk, centres)
        sums = torch.zeros_like(centres).scatter_add_(1, codes, weight_nk * importance_nk)
        weights = torch.zeros_like(centres).scatter_add_(1, codes, importance_nk)
        centres = torch.where(weights > 0, sums / weights.clamp(min=1e-30), centres).sort(dim=1).values
    book = centres.to(dtype).sort(dim=1).values
    codes = _nearest(weight_nk, book.float())
    return book.float().gather(1, codes), book, codes.to(torch.uint8)


def _nearest(weight_nk: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    return torch.searchsorted(((centres[:, 1:] + centres[:, :-1]) / 2).contiguous(), weight_nk)
