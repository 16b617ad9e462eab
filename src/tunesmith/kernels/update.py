"""One parameter's step of AdamW or Lion, its states held in 32, 16, 8 or 4 bits and decoded, used and encoded in one
pass, bf16 weights by stochastic rounding; on a GPU by a Triton kernel (`update_fused.py`), elsewhere by the same
arithmetic in torch.

Moments are held as the optimizer's first moment and the *root* of its second one, which is what AdamW divides by and
has half the range. In 8 and 4 bits each row of a matrix is cut into blocks with an fp32 scale, their largest value;
codes are powers of evenly spaced numbers, so that small values keep small steps:

    int8   m: scale (k/127)^3, signed     root: scale ((k+1)/256)^3     blocks of 256
    int4   m: scale (k/7)^2, signed       root: scale (k+1)/16          blocks of 128, two codes a byte
    fp8    m, root: e4m3 numbers up to 448, times scale/448             blocks of 256

No code of the root means zero: a divisor that was rounded to nothing is what makes such optimizers explode. Weights in
bf16 are rounded up or down stochastically with the exact value as the mean, and so are states in bf16; the draw is a
hash of (seed, index), so a step done again gives the same bits. Vectors and narrow matrices keep fp32 states.

Copies of fp32 weights in bf16 are rounded stochastically too: most weights of a short fine-tune move by less than half
the way to the next bf16 number, and rounded to the nearest they would stay where they are. Here the draw is a hash of
(index, lower 16 bits), so that a copy is a function of what it is made from, and a weight that rests does not flicker.

Shards in fp32 are rounded by FSDP when it gathers them, and to the nearest. They are held `prerounded`: moved up or
down by one bf16 number wherever chance and the nearest disagree, so that the nearest to what is held is what chance
wanted. The lower bits, which decide both, stay what they are, so a prerounded weight can be put down again, exactly:

    held  = weight + (at_random(index, lower) - to_nearest(lower)) << 16        as integers

Legend: R rows, C columns, K blocks of a row.
"""

from __future__ import annotations

import functools
import random

import torch
import torch.nn.functional as F

from tunesmith.kernels.update_states import BLOCK, FP8_LARGEST, FP8_SMALLEST, Algorithm, State, States, format_of

PIECE = 1 << 16
"""Values that are rounded at a time on a CPU, few enough for its cache."""
HALF, EXPONENT = 0x8000, 0x7F800000
SPREAD = 0x9E3779B9 - 2**32
"""By which few bits become many, so that neighbours draw apart."""
TABLE = 1 << 20
"""Random bits for weights that are rounded once: more than the longest rows have."""
VISIT = 1 << 22
"""Values that are rounded at a time on a device where there is no kernel for it."""


@torch.no_grad()
def update_(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    state: State,
    *,
    algorithm: Algorithm,
    states: States,
    rate: float,
    decay: float,
    betas: tuple[float, float],
    epsilon: float,
    step: int,
    seed: int,
    copy: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
    start: int = 0,
    prerounded: bool = False,
) -> None:
    """Step `step` (from 1) of `weight` and its `state`, both in place. `seed` is below 2^31 and new at each step.
    `copy` gets the new weight as `copy_half_` makes it, where the weight is the master of another. `factor` is an fp32
    number on the weight's device by which the gradient is multiplied. `start` is where the weight begins within a
    larger one, so that rows done apart draw what they would draw together. `prerounded`: the fp32 weight is held so."""
    assert weight.is_contiguous()
    assert 0 <= seed < 2**31
    numbers = {
        "keep": 1.0 - rate * decay,
        "beta1": betas[0],
        "beta2": betas[1],
        "epsilon": epsilon,
        # rate / (1 - beta1^t) and 1 / sqrt(1 - beta2^t): the corrections of moments that start at zero
        "rate": rate if algorithm == "lion" else rate / (1.0 - betas[0] ** step),
        "unbias": 1.0 if algorithm == "lion" else (1.0 - betas[1] ** step) ** -0.5,
    }
    kind = format_of(weight, states)
    gradient = gradient.contiguous()
    if weight.is_cuda:
        from tunesmith.kernels.update_fused import update_fused_

        update = update_fused_
    else:
        update = update_plainly_
    how = {"kind": kind, "algorithm": algorithm, "seed": seed, "start": start, "prerounded": prerounded}
    update(weight, gradient, state, copy, factor, **how, **numbers)


def update_plainly_(
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
    if prerounded:
        undo_preround_(weight, start=start)
    w, g = weight.float(), gradient.float()
    if factor is not None:
        g = g * factor
    draw = again = torch.zeros((), dtype=torch.int32)
    if kind == "bf16" or weight.dtype == torch.bfloat16:
        draw = _hash(_places(w, start), seed).view_as(w)
        again = _hash(draw, seed)
    m = _decode(state, "exp_avg", w, kind)
    if algorithm == "lion":
        w = w * keep - rate * (m + (g - m) * (1 - beta1)).sign()
        m = m + (g - m) * (1 - beta2)
    else:
        m = m + (g - m) * (1 - beta1)
        root = _decode(state, "root", w, kind)
        v = beta2 * root.square() + (1 - beta2) * g.square()
        w = w * keep - rate * (m / (v.sqrt() * unbias + epsilon))
        _encode_(state, "root", v.sqrt(), kind, again & 0xFFFF)
    _encode_(state, "exp_avg", m, kind, _upper(again))
    weight.copy_(round_stochastically(w, _upper(draw)) if weight.dtype == torch.bfloat16 else w)
    if prerounded:
        preround_(weight, start=start)
    if copy is not None:
        copy_half_(copy, w, start=start)


def halved(values: torch.Tensor, dtype: torch.dtype, *, start: int = 0) -> torch.Tensor:
    """Weights in the precision of a model, as `copy_half_` makes them; themselves, where they have it."""
    if values.dtype == dtype:
        return values
    copy = torch.empty(values.shape, dtype=dtype, device=values.device)
    copy_half_(copy, values.contiguous(), start=start)
    return copy


@torch.no_grad()
def copy_half_(copy: torch.Tensor, values: torch.Tensor, *, start: int = 0) -> None:
    """Fill `copy` from fp32 `values`: to bf16 at random with the exact value as the mean, else to the nearest. `start`
    is where the values begin within a larger tensor, so that rows done apart are what they would be together."""
    if copy.dtype != torch.bfloat16 or values.dtype != torch.float32:
        copy.copy_(values)
        return
    assert copy.is_contiguous()
    assert values.is_contiguous()
    if copy.is_cuda and values.is_cuda:
        from tunesmith.kernels.update_fused import copy_fused_

        copy_fused_(copy, values, start=start)
        return
    size = VISIT if copy.is_cuda else PIECE
    for to, piece in zip(copy.view(-1).split(size), values.view(-1).split(size), strict=True):
        if copy.is_cuda:
            copy_half_(to, piece.to(copy.device), start=start)
        else:
            to.copy_(round_stochastically(piece, _draw(piece, start)))
        start += size


@torch.no_grad()
def halve_into(to: torch.Tensor, values: torch.Tensor, chance: random.Random, *, has_nan: bool = True) -> None:
    """fp32 to bf16 on a CPU, stochastically, with the exact value as the mean: for weights that are rounded once, in
    a fifth of `halved`'s time (3 ns a weight on one core, not 16). Random bits are those of a table, from another place
    of it for each piece. `values` are overwritten. `has_nan`: one of them may be NaN."""
    if has_nan and values.sum().isnan():  # adding bits to a NaN may make a number of it
        to.copy_(halved(values, torch.bfloat16))
        return
    pieces = values.view(-1).view(torch.int32).split(PIECE), to.view(-1).view(torch.int16).split(PIECE)
    for bits, half in zip(*pieces, strict=True):
        start = chance.randrange(TABLE)
        half.copy_(bits.add_(_table()[start : start + bits.numel()]).bitwise_right_shift_(16))


@functools.cache
def _table() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1 << 16, (TABLE + PIECE,), generator=generator, dtype=torch.int32)


@torch.no_grad()
def preround_(weight: torch.Tensor, *, start: int = 0) -> None:
    """Hold fp32 values so that the nearest bf16 number to each is what `copy_half_` would give. Changed for good is the
    last bit of one in 65,536, and what is next to nothing becomes zero."""
    for bits in _pieces(weight):
        bits += (bits & 0xFFFF == HALF).int()  # in the middle: neither is the nearest
        bits *= (bits & 0x7FFF0000 != 0).int()
        bits += _way(bits, start)
        start += bits.numel()


@torch.no_grad()
def undo_preround_(weight: torch.Tensor, *, start: int = 0) -> None:
    """What was prerounded, as it was."""
    for bits in _pieces(weight):
        bits -= _way(bits, start)
        start += bits.numel()


def _pieces(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    assert weight.is_contiguous()
    return weight.view(-1).view(torch.int32).split(VISIT if weight.is_cuda else PIECE)


def _way(bits: torch.Tensor, start: int) -> torch.Tensor:
    """By what a number is prerounded, as integers; the same for one that was prerounded already. Inf and NaN stay."""
    lower = bits & 0xFFFF
    way = (lower + _draw(bits, start)).bitwise_right_shift_(16).sub_((lower > HALF).int())
    return way.mul_(bits & EXPONENT != EXPONENT).bitwise_left_shift_(16)


def _draw(values: torch.Tensor, start: int) -> torch.Tensor:
    """16 random bits for each, by its place and its own lower bits."""
    return _upper(_hash(_places(values, start), (values.view(torch.int32) & 0xFFFF) * SPREAD))


def round_stochastically(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """fp32 to bf16, up with the probability that makes the mean exact. `bits`: 16 random ones for each value."""
    noisy = values.view(torch.int32) + bits.to(torch.int32)
    rounded = (noisy & -0x10000).view(torch.float32)
    return torch.where(values.isnan(), values, rounded).bfloat16()  # whose bits may have overflowed


def _hash(x: torch.Tensor, seed: int | torch.Tensor) -> torch.Tensor:
    """32 bits that look random, in int32, of which a CPU does many at a time: two multiply-and-fold rounds."""
    x = x ^ seed
    x ^= _upper(x)
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - 2**32
    x ^= _upper(x)
    return x


def _upper(x: torch.Tensor) -> torch.Tensor:
    """The upper 16 bits; a shift alone would repeat the sign."""
    return (x >> 16) & 0xFFFF


def _places(values: torch.Tensor, start: int) -> torch.Tensor:
    """Of each within the larger tensor that begins `start` before them."""
    return torch.arange(start, start + values.numel(), device=values.device).int()


def _decode(state: State, name: str, like: torch.Tensor, kind: States) -> torch.Tensor:
    """In fp32, shaped as the weight."""
    held, is_root = state[name], name == "root"
    if kind in ("fp32", "bf16"):
        return held.float()
    columns = like[0].numel()
    scale = state[f"{name}_scale"].repeat_interleave(BLOCK[kind], 1)[:, :columns]
    if kind == "fp8":
        return (held.view(torch.float8_e4m3fn).float() * (scale / FP8_LARGEST)).view_as(like)
    if kind == "int4":
        held = torch.stack([held & 15, held >> 4], 2).view(-1, columns)
    code = held.float()
    if kind == "int8":
        value = ((code + 1) / 256) ** 3 if is_root else ((code - 127) / 127) ** 3
    else:
        x = (code - 7) / 7
        value = (code + 1) / 16 if is_root else x * x.abs()
    return (value * scale).view_as(like)


def _encode_(state: State, name: str, values: torch.Tensor, kind: States, bits: torch.Tensor) -> None:
    is_root = name == "root"
    if kind in ("fp32", "bf16"):
        state[name].copy_(values if kind == "fp32" else round_stochastically(values, bits))
        return
    rows, columns = values.shape[0], values[0].numel()
    values = values.view(rows, columns)
    blocks = F.pad(values, (0, -columns % BLOCK[kind])).view(rows, -1, BLOCK[kind])
    scale = blocks.abs().amax(2)
    state[f"{name}_scale"].copy_(scale)
    part = (blocks / scale.clamp_min(1e-30).unsqueeze(2)).view(rows, -1)[:, :columns]
    if kind == "fp8":
        part = part * FP8_LARGEST
        part = part.clamp_min(FP8_SMALLEST) if is_root else part
        state[name].copy_(part.to(torch.float8_e4m3fn).view(torch.uint8))
        return
    size = part.abs()
    if kind == "int8":
        root = size.pow(1 / 3)
        code = _nearest(root * 256 - 1, 0, 255) if is_root else part.sign() * _nearest(root * 127, 0, 127) + 127
        state[name].copy_(code.to(torch.uint8))
        return
    code = _nearest(size * 16 - 1, 0, 15) if is_root else part.sign() * _nearest(size.sqrt() * 7, 0, 7) + 7
    low, high = code.to(torch.uint8).view(rows, -1, 2).unbind(2)
    state[name].copy_(low | (high << 4))


def _nearest(x: torch.Tensor, least: int, most: int) -> torch.Tensor:
    return (x + 0.5).floor().clamp(least, most)
