"""GPTQ: columns are rounded one after the other, and what each loses is made good by those that are not rounded yet,
as far as the inputs of calibration allow.

Scales are those of the weights as they were ("static groups"), so that columns may be taken in the order of their
inputs' size ("act order") and files need no order of their own.

Legend: N outputs, K inputs, G weights of a group; H = X.T @ X of the inputs.
"""

from __future__ import annotations

import torch

from tunesmith.errors import UserError
from tunesmith.kernels.rounding import int_scales, to_int

DAMPING = 0.01
"""Of the mean of H's diagonal, added to it."""
MOST_DAMPING = 1.0
BLOCK = 128
"""Columns whose corrections of later ones are made together."""
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6)
"""Of a group's largest weight, at which its numbers may end."""


def gptq(
    weight_nk: torch.Tensor,
    hessian_kk: torch.Tensor,
    *,
    bits: int,
    group: int,
    act_order: bool = True,
    damping: float = DAMPING,
    name: str = "a linear",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounded weights and their scales [N, K / G]."""
    scale = best_scales(weight_nk, hessian_kk, bits=bits, group=group)
    inverse_kk, order = _inverse(hessian_kk, damping, act_order, name)
    weight = weight_nk[:, order].clone()
    step_nk = scale.repeat_interleave(group, 1)[:, order]
    last = 2 ** (bits - 1)
    rounded = torch.empty_like(weight)
    columns = weight.shape[1]
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        errors = torch.empty(weight.shape[0], stop - start)
        for column in range(start, stop):
            value, step = weight[:, column], step_nk[:, column]
            nearest = (value / step).round().clamp(-last, last - 1) * step
            rounded[:, column] = nearest
            error = (value - nearest) / inverse_kk[column, column]
            errors[:, column - start] = error
            weight[:, column:stop].addr_(error, inverse_kk[column, column:stop], alpha=-1)
        weight[:, stop:].addmm_(errors, inverse_kk[start:stop, stop:], alpha=-1)
    found = torch.empty_like(rounded)
    found[:, order] = rounded
    return found, scale


def best_scales(weight_nk: torch.Tensor, hessian_kk: torch.Tensor, *, bits: int, group: int) -> torch.Tensor:
    """For each group of each row the scale, of some, by which what the group adds to outputs changes least."""
    own = hessian_kk.unflatten(0, (-1, group)).unflatten(2, (-1, group))
    blocks = torch.stack([own[number, :, number] for number in range(own.shape[0])])
    best = int_scales(weight_nk, bits, group)
    least = _group_errors(weight_nk, best, blocks, bits)
    for share in SHARES[1:]:
        scale = int_scales(weight_nk, bits, group, share=share)
        errors = _group_errors(weight_nk, scale, blocks, bits)
        better = errors < least
        best, least = torch.where(better, scale, best), torch.where(better, errors, least)
    return best


def _group_errors(weight_nk: torch.Tensor, scale: torch.Tensor, blocks: torch.Tensor, bits: int) -> torch.Tensor:
    difference = (weight_nk - to_int(weight_nk, scale, bits)).unflatten(1, (scale.shape[1], -1)).transpose(0, 1)
    return ((difference @ blocks) * difference).sum(-1).t()


def _inverse(hessian_kk: torch.Tensor, damping: float, act_order: bool, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper Cholesky factor of H's inverse, and the order of its columns."""
    diagonal = hessian_kk.diagonal()
    mean = diagonal.mean()
    if not torch.isfinite(hessian_kk).all() or mean <= 0:
        raise UserError(
            f"The inputs of {name} in calibration are zero or not finite, so that GPTQ cannot weigh its columns; give "
            "other data with --data FILE, or use --method rtn."
        )
    order = diagonal.argsort(descending=True) if act_order else torch.arange(len(diagonal))
    ordered = hessian_kk[order][:, order]
    added = damping
    while added <= MOST_DAMPING:
        damped = ordered + torch.eye(len(order)) * (added * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and torch.isfinite(upper).all():
                return upper, order
        added *= 10
    raise UserError(
        f"The Hessian of {name} is singular, even with damping {MOST_DAMPING:g}: its inputs in calibration hardly "
        "differ; give more data with --data FILE, or use --method rtn."
    )
