"""The kernel of `update.py`: weight, gradient and states are read once and written once, whatever they are held in.

A program takes some blocks of one parameter, each a stretch of a row, so that scales are found within a program.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
# Of Triton: launches take more than the kernel names, and constants are numbers.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tunesmith.kernels.update_states import BLOCK, FP8_LARGEST, FP8_SMALLEST, Algorithm, State, States

VALUES = 2048
"""Of one program."""
FORMATS = {"fp32": 0, "bf16": 1, "int8": 2, "fp8": 3, "int4": 4}


def update_fused_(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    state: State,
    copy: torch.Tensor | None,
    factor: torch.Tensor | None,
    *,
    kind: States,
    algorithm: Algorithm,
    seed: int,
    start: int,
    prerounded: bool,
    keep: float,
    rate: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    unbias: float,
) -> None:
    columns = weight.numel() if kind in ("fp32", "bf16") else weight[0].numel()
    block = BLOCK.get(kind, VALUES)
    row_blocks = triton.cdiv(columns, block)
    blocks = weight.numel() // columns * row_blocks
    first = state["exp_avg"]
    second = state.get("root", first)
    first_scale = state.get("exp_avg_scale", first)
    _kernel[(triton.cdiv(blocks, VALUES // block),)](
        weight,
        gradient,
        copy if copy is not None else weight,
        factor if factor is not None else weight,
        first,
        first_scale,
        second,
        state.get("root_scale", first_scale),
        columns,
        row_blocks,
        blocks,
        seed,
        start & 0xFFFFFFFF,
        keep,
        rate,
        beta1,
        beta2,
        epsilon,
        unbias,
        FP8_LARGEST,
        FP8_SMALLEST,
        FORMAT=FORMATS[kind],
        IS_LION=algorithm == "lion",
        IS_RANDOM=weight.dtype == torch.bfloat16,
        IS_PREROUNDED=prerounded,
        HAS_COPY=copy is not None,
        HAS_FACTOR=factor is not None,
        TILE=VALUES // block,
        BLOCK=block,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["seed", "start"])
def _kernel(
    weight,
    gradient,
    copy,
    factor,
    first,
    first_scale,
    second,
    second_scale,
    columns,
    row_blocks,
    blocks,
    seed,
    start,
    keep,
    rate,
    beta1,
    beta2,
    epsilon,
    unbias,
    fp8_largest,
    fp8_smallest,
    FORMAT: tl.constexpr,
    IS_LION: tl.constexpr,
    IS_RANDOM: tl.constexpr,
    IS_PREROUNDED: tl.constexpr,
    HAS_COPY: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    row = (block // row_blocks)[:, None]
    column = (block % row_blocks)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (block < blocks)[:, None] & (column < columns)
    at = row * columns + column
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if IS_PREROUNDED:
        held = w.to(tl.uint32, bitcast=True)
        w = (held - _way(held, at, start)).to(tl.float32, bitcast=True)
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        g *= tl.load(factor)
    draw = _hash((at + start).to(tl.uint32), seed)
    again = _hash(draw, seed)
    m = _decode(first, first_scale, at, block, blocks, inside, fp8_largest, FORMAT, False)
    if IS_LION:
        direction = m + (g - m) * (1.0 - beta1)
        w = w * keep - rate * tl.where(direction > 0, 1.0, tl.where(direction < 0, -1.0, 0.0))
        m = m + (g - m) * (1.0 - beta2)
    else:
        m = m + (g - m) * (1.0 - beta1)
        root = _decode(second, second_scale, at, block, blocks, inside, fp8_largest, FORMAT, True)
        root = tl.sqrt(beta2 * root * root + (1.0 - beta2) * g * g)
        w = w * keep - rate * (m / (root * unbias + epsilon))
        _encode(
            second, second_scale, root, again & 0xFFFF, at, row, columns, row_blocks, block, blocks, inside,
            fp8_largest, fp8_smallest, FORMAT, True, TILE, BLOCK,
        )  # fmt: skip
    _encode(
        first, first_scale, m, again >> 16, at, row, columns, row_blocks, block, blocks, inside,
        fp8_largest, fp8_smallest, FORMAT, False, TILE, BLOCK,
    )  # fmt: skip
    rounded = w
    if IS_RANDOM:
        rounded = _round_stochastically(w, draw >> 16)
    if IS_PREROUNDED:
        held = w.to(tl.uint32, bitcast=True)
        held += tl.where((held & 0xFFFF) == 0x8000, 1, 0).to(tl.uint32)
        held = tl.where((held & 0x7FFF0000) == 0, 0, held)
        rounded = (held + _way(held, at, start)).to(tl.float32, bitcast=True)
    tl.store(weight + at, rounded.to(weight.dtype.element_ty), mask=inside)
    if HAS_COPY:
        _copy(copy, w, at, start, inside)


def copy_fused_(copy: torch.Tensor, values: torch.Tensor, *, start: int) -> None:
    grid = (triton.cdiv(values.numel(), VALUES),)
    _copy_kernel[grid](copy, values, values.numel(), start & 0xFFFFFFFF, SIZE=VALUES)


@triton.jit(do_not_specialize=["start"])
def _copy_kernel(copy, values, count, start, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    _copy(copy, tl.load(values + at, mask=inside, other=0.0), at, start, inside)


@triton.jit
def _copy(copy, values, at, start, inside):
    if copy.dtype.element_ty == tl.bfloat16:
        values = _round_stochastically(values, _draw(values.to(tl.uint32, bitcast=True), at, start))
    tl.store(copy + at, values.to(copy.dtype.element_ty), mask=inside)


@triton.jit
def _way(bits, at, start):
    """By what a number is prerounded, as integers."""
    lower = bits & 0xFFFF
    at_random = (lower + _draw(bits, at, start)) >> 16
    to_nearest = tl.where(lower > 0x8000, 1, 0).to(tl.uint32)
    is_number = (bits & 0x7F800000) != 0x7F800000
    return tl.where(is_number, (at_random - to_nearest) << 16, 0)


@triton.jit
def _draw(bits, at, start):
    """16 random bits, by a value's place and its own lower bits."""
    return _hash((at + start).to(tl.uint32), (bits & 0xFFFF) * 0x9E3779B9) >> 16


@triton.jit
def _hash(x, seed):
    x = x ^ seed.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _round_stochastically(x, bits):
    noisy = x.to(tl.uint32, bitcast=True) + bits
    rounded = (noisy & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)  # whose bits may have overflowed


@triton.jit
def _decode(state, scales, at, block, blocks, inside, fp8_largest, FORMAT: tl.constexpr, IS_ROOT: tl.constexpr):
    if FORMAT <= 1:
        values = tl.load(state + at, mask=inside, other=0.0).to(tl.float32)
    else:
        scale = tl.load(scales + block, mask=block < blocks, other=0.0)[:, None]
        if FORMAT == 3:
            code = tl.load(state + at, mask=inside, other=0).to(tl.float8e4nv, bitcast=True)
            values = code.to(tl.float32) * (scale / fp8_largest)
        elif FORMAT == 2:
            code = tl.load(state + at, mask=inside, other=0).to(tl.float32)
            if IS_ROOT:
                x = (code + 1.0) / 256.0
            else:
                x = (code - 127.0) / 127.0
            values = x * x * x * scale
        else:
            pair = tl.load(state + at // 2, mask=inside, other=0).to(tl.int32)
            code = ((pair >> ((at % 2) * 4).to(tl.int32)) & 15).to(tl.float32)
            if IS_ROOT:
                values = (code + 1.0) / 16.0 * scale
            else:
                x = (code - 7.0) / 7.0
                values = x * tl.abs(x) * scale
    return values


@triton.jit
def _encode(
    state, scales, values, bits, at, row, columns, row_blocks, block, blocks, inside, fp8_largest, fp8_smallest,
    FORMAT: tl.constexpr, IS_ROOT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if FORMAT == 0:
        tl.store(state + at, values, mask=inside)
    elif FORMAT == 1:
        tl.store(state + at, _round_stochastically(values, bits).to(tl.bfloat16), mask=inside)
    else:
        values = tl.where(inside, values, 0.0)
        scale = tl.max(tl.abs(values), 1)
        tl.store(scales + block, scale, mask=block < blocks)
        part = values / tl.maximum(scale, 1e-30)[:, None]
        size = tl.abs(part)
        sign = tl.where(part < 0, -1.0, 1.0)
        if FORMAT == 3:
            part = part * fp8_largest
            if IS_ROOT:
                part = tl.maximum(part, fp8_smallest)
            tl.store(state + at, part.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=inside)
        elif FORMAT == 2:
            root = tl.exp2(tl.log2(size) / 3.0)
            if IS_ROOT:
                code = _nearest(root * 256.0 - 1.0, 255.0)
            else:
                code = sign * _nearest(root * 127.0, 127.0) + 127.0
            tl.store(state + at, code.to(tl.uint8), mask=inside)
        else:
            if IS_ROOT:
                code = _nearest(size * 16.0 - 1.0, 15.0)
            else:
                code = sign * _nearest(tl.sqrt(size) * 7.0, 7.0) + 7.0
            shifted = code.to(tl.int32) << (tl.arange(0, BLOCK)[None, :] % 2 * 4)
            pair = tl.sum(tl.reshape(shifted, (TILE, BLOCK // 2, 2)), 2)
            pair_column = (block % row_blocks)[:, None] * BLOCK + tl.arange(0, BLOCK // 2)[None, :] * 2
            pair_inside = (block < blocks)[:, None] & (pair_column < columns)
            tl.store(state + (row * columns + pair_column) // 2, pair.to(tl.uint8), mask=pair_inside)


@triton.jit
def _nearest(x, most):
    return tl.minimum(tl.maximum(tl.floor(x + 0.5), 0.0), most)
