"""Weights held in nf4 made whole on a GPU, in one pass: 4.127 bits read and a half or single precision number written
for each. Legend as in `nf4.py`."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
# Of Triton: launches take more than the kernel names, and constants are numbers.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tunesmith.kernels.nf4_format import BLOCK, NESTED, Parts, scale_values, values

BYTES = 1024
"""Packed bytes of one program."""


def dequantize_into(out: torch.Tensor, parts: Parts, row_scales: torch.Tensor | None = None, columns: int = 1) -> None:
    """Fill the vector `out`, a matrix of so many `columns`; each row is divided by its scale where there are any."""
    count = out.shape[0]
    _kernel[(triton.cdiv(parts.packed.shape[0], BYTES),)](
        parts.packed,
        parts.scales,
        parts.nested,
        parts.offset,
        values(out.device),
        scale_values(out.device),
        parts.offset if row_scales is None else row_scales,
        out,
        count,
        columns,
        HAS_ROW_SCALES=row_scales is not None,
        BYTES=BYTES,
        BLOCK=BLOCK,
        NESTED=1 if parts.nested.shape[0] == parts.scales.shape[0] else NESTED,
        num_warps=4,
        enable_fp_fusion=False,  # the scale is a product, rounded, and then a sum: fused it would be another number
    )


@triton.jit
def _kernel(
    packed,
    scales,
    nested,
    offset,
    values,
    scale_values,
    row_scales,
    out,
    COUNT,
    COLUMNS,
    HAS_ROW_SCALES: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    NESTED: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BYTES
    place = first + tl.arange(0, BYTES)
    is_there = place * 2 < COUNT
    both = tl.load(packed + place, mask=is_there, other=0).to(tl.int32)
    block = place // (BLOCK // 2)
    code = tl.load(scales + block, mask=is_there, other=0).to(tl.int32)
    scale = tl.load(scale_values + code) * tl.load(nested + block // NESTED, mask=is_there, other=0.0)
    scale = scale + tl.load(offset)
    upper = tl.load(values + (both >> 4)) * scale
    lower = tl.load(values + (both & 15)) * scale
    weights = tl.interleave(upper, lower)
    target = first * 2 + tl.arange(0, 2 * BYTES)
    if HAS_ROW_SCALES:
        weights /= tl.load(row_scales + target // COLUMNS, mask=target < COUNT, other=1.0)
    tl.store(out + target, weights.to(out.dtype.element_ty), mask=target < COUNT)
