"""Frozen weights in 4 bits (nf4) with quantized scales, the values that bitsandbytes has.

Blocks of 64 weights share a scale, their largest magnitude; each weight becomes the nearest of 16 values on [-1, 1].
Of the scales, less their mean (`offset`), blocks of 256 share a scale again and become 8-bit codes. All of it lies in
one uint8 tensor, so that whatever carries a weight carries this: 4.127 bits a weight. The weights of several linears
may lie one behind the other; each is quantized by itself. Of a weight that is cut over ranks, the blocks of a part may
have scales in fp32 instead, in the place of scales of scales: 4.625 bits, and the same values. A weight is made whole
just before it is multiplied, in the forward pass and again in the backward pass, and is not kept.

Legend: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F

from tunesmith.kernels.nf4_format import BLOCK, NESTED, Parts, scale_values, size, split, values
from tunesmith.kernels.operator import operator

CHUNK = BLOCK << 18
"""Weights quantized at a time: what is needed for it on the way stays below 300 MB, however large the matrix."""
TINY = 1e-38
SHARDED = torch.float8_e5m2
"""What the bytes of a weight in nf4 or int8 are called in the hands of FSDP, which in torch 2.11 takes parameters of
floating types only."""


def quantize(weight: torch.Tensor) -> torch.Tensor:
    """Any tensor of weights, in the order it lies in, as a uint8 vector; `dequantize` gives the weights back."""
    flat = weight.detach().reshape(-1)
    count = flat.numel()
    found = flat.new_zeros(size(count), dtype=torch.uint8)
    parts = split(found, count)
    scales = torch.empty(parts.scales.shape, dtype=torch.float32, device=flat.device)
    for start in range(0, count, CHUNK):
        codes, chunk_scales = _to_nearest(flat[start : start + CHUNK].float())
        scales[start // BLOCK :][: chunk_scales.shape[0]] = chunk_scales
        parts.packed[start // 2 :][: codes.shape[0] // 2] = (codes[::2] << 4) | codes[1::2]
    parts.offset.copy_(scales.mean())
    _quantize_scales(scales - parts.offset, parts)
    return found


def from_codes(
    packed: torch.Tensor, count: int, scales: torch.Tensor, nested: torch.Tensor, offset: float
) -> torch.Tensor:
    """Weights that were quantized elsewhere in just this way: their codes, taken over."""
    found = packed.new_zeros(size(count))
    parts = split(found, count)
    parts.nested.copy_(nested)
    parts.offset.fill_(offset)
    parts.scales.copy_(scales)
    parts.packed.copy_(packed.reshape(-1))
    return found


def from_plain_scales(packed: torch.Tensor, count: int, scales: torch.Tensor) -> torch.Tensor:
    """Weights that were quantized elsewhere, with an fp32 scale for each block."""
    return _with_plain_scales(packed.reshape(-1), scales, count)


@operator("nf4_dequantize")
def dequantize(
    weight4: torch.Tensor,
    rows: Sequence[int],
    columns: int,
    dtype: torch.dtype,
    scale_n: torch.Tensor | None = None,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weights [sum of rows, columns], of one or several linears that lie one behind the other.

    `scale_n` divides each row (for fp8, which has little range of its own). `after` is not looked at: a weight made
    after the gradient that it is multiplied with cannot be made earlier and kept, as the compiler otherwise would.
    """
    weight4 = weight4.view(torch.uint8)
    out = weight4.new_empty(sum(rows), columns, dtype=dtype)
    nested = NESTED if weight4.shape[0] == sum(size(height * columns) for height in rows) else 1
    flat, place, first = out.view(-1), 0, 0
    for height in rows:
        count = height * columns
        bytes_here = size(count, nested)
        parts = split(weight4[place : place + bytes_here], count, nested)
        scales = None if scale_n is None else scale_n[first // columns :][:height]
        target = flat[first : first + count]
        if weight4.is_cuda:
            from tunesmith.kernels.nf4_dequantize import dequantize_into

            dequantize_into(target, parts, scales, columns)
        else:
            weights = dequantize_plainly(parts, count)
            target.copy_(weights if scales is None else (weights.view(height, columns) / scales[:, None]).view(-1))
        place, first = place + bytes_here, first + count
    return out


@torch.library.register_fake(dequantize)
def _(weight4, rows, columns, dtype, scale_n=None, after=None):
    return weight4.new_empty(sum(rows), columns, dtype=dtype)


def dequantized(
    held: torch.Tensor, rows: Sequence[int], columns: int, like: torch.Tensor, scale_n: torch.Tensor | None = None
) -> torch.Tensor:
    """The weight to multiply `like` with: made from nf4 where it is held so, else the tensor itself. In fp8, with
    `scale_n` for its rows, or in the precision of `like`."""
    if held.dtype not in (torch.uint8, SHARDED):
        return held
    dtype = like.dtype if scale_n is None else torch.float8_e4m3fn
    return dequantize(held, rows, columns, dtype, scale_n, like)


def nf4_linear(x: torch.Tensor, weight4: torch.Tensor, outputs: int, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ W.T + bias` with a frozen W, for inputs of any shape [..., K]."""
    return _Nf4Linear.apply(x, weight4, outputs, bias)


class _Nf4Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight4, outputs, bias):
        ctx.save_for_backward(weight4)
        ctx.outputs, ctx.columns = outputs, x.shape[-1]
        return F.linear(x, dequantized(weight4, [outputs], x.shape[-1], x), bias)

    @staticmethod
    def backward(ctx, g):
        (weight4,) = ctx.saved_tensors
        return g @ dequantized(weight4, [ctx.outputs], ctx.columns, g), None, None, None


def cut_rows(weight4: torch.Tensor, shape_nk: tuple[int, int], rank: int, ranks: int) -> torch.Tensor:
    """The rows of one of several ranks, as bytes of the same values. They must hold whole blocks."""
    rows, columns = shape_nk[0] // ranks, shape_nk[1]
    whole_parts = _parts(weight4, shape_nk[0] * columns)
    first, count = rank * rows * columns, rows * columns
    assert count % BLOCK == 0
    packed = whole_parts.packed[first // 2 :][: count // 2]
    blocks = slice(first // BLOCK, (first + count) // BLOCK)
    is_nested = weight4.shape[0] == size(shape_nk[0] * columns)
    if is_nested and first % (BLOCK * NESTED) == 0 and count % (BLOCK * NESTED) == 0:
        found = weight4.new_zeros(size(count))
        parts = split(found, count)
        parts.nested.copy_(whole_parts.nested[blocks.start // NESTED :][: parts.nested.shape[0]])
        parts.offset.copy_(whole_parts.offset)
        parts.scales.copy_(whole_parts.scales[blocks])
        parts.packed.copy_(packed)
        return found
    return _with_plain_scales(packed, _scales(whole_parts)[blocks], count)


def cut_columns(weight4: torch.Tensor, shape_nk: tuple[int, int], rank: int, ranks: int) -> torch.Tensor:
    """The columns of one of several ranks, as bytes of the same values. They must be whole blocks in each row."""
    rows, columns = shape_nk[0], shape_nk[1] // ranks
    assert columns % BLOCK == 0
    parts = _parts(weight4, rows * shape_nk[1])
    packed = parts.packed.view(rows, ranks, columns // 2)[:, rank]
    scales = _scales(parts).view(rows, ranks, columns // BLOCK)[:, rank]
    return _with_plain_scales(packed.reshape(-1), scales.reshape(-1), rows * columns)


def join(weights4: Sequence[torch.Tensor], counts: Sequence[int]) -> torch.Tensor:
    """Weights one behind the other. Where one of them was cut so that it has scales in fp32, all get them."""
    if len({weight4.shape[0] == size(count) for weight4, count in zip(weights4, counts, strict=True)}) > 1:
        weights4 = [
            _with_plain_scales(parts.packed, _scales(parts), count) if weight4.shape[0] == size(count) else weight4
            for weight4, count in zip(weights4, counts, strict=True)
            for parts in [split(weight4, count)]
        ]
    return torch.cat(list(weights4))


def _with_plain_scales(packed: torch.Tensor, scales: torch.Tensor, count: int) -> torch.Tensor:
    assert count <= BLOCK or size(count, 1) != size(count)  # by which `dequantize` tells them apart
    found = packed.new_zeros(size(count, 1))
    parts = split(found, count, 1)
    parts.nested.copy_(scales)
    parts.scales.fill_(255)  # the code of 1
    parts.packed.copy_(packed)
    return found


def _parts(weight4: torch.Tensor, count: int) -> Parts:
    """Of a weight with either kind of scales."""
    return split(weight4, count, NESTED if weight4.shape[0] == size(count) else 1)


def dequantize_plainly(parts: Parts, count: int) -> torch.Tensor:
    """In torch alone, in fp32: the truth the kernel is held against."""
    device = parts.packed.device
    scales = _scales(parts)
    codes = torch.stack([parts.packed >> 4, parts.packed & 15], dim=1).view(-1)
    codes = F.pad(codes, (0, scales.shape[0] * BLOCK - codes.shape[0]))
    return (values(device)[codes.int()].view(-1, BLOCK) * scales[:, None]).view(-1)[:count]


def block_scales(weight4: torch.Tensor, count: int) -> torch.Tensor:
    """Of the blocks of a weight of so many elements, in fp32."""
    return _scales(_parts(weight4, count))


def _scales(parts: Parts) -> torch.Tensor:
    """Of the blocks, in fp32."""
    blocks = parts.scales.shape[0]
    each = 1 if parts.nested.shape[0] == blocks else NESTED  # one block has one of either
    nested = parts.nested.repeat_interleave(each)[:blocks]
    return scale_values(parts.packed.device)[parts.scales.int()] * nested + parts.offset


def _to_nearest(chunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An even number of codes, and the scale of each block. A block that is not full is divided by its scale, full
    ones are multiplied by its inverse: bitsandbytes does so, and the last bit decides where a weight lies between two
    values."""
    full = chunk.shape[0] // BLOCK * BLOCK
    blocks, rest = chunk[:full].view(-1, BLOCK), chunk[full:]
    scales = blocks.abs().amax(1)
    normed = (blocks * (1.0 / scales.clamp(min=TINY))[:, None]).view(-1)
    if rest.shape[0]:
        scale = rest.abs().max().clamp(min=TINY)
        scales = torch.cat([scales, scale[None]])
        normed = torch.cat([normed, rest / scale])
    if normed.shape[0] % 2:
        normed = F.pad(normed, (0, 1))
    between = (values(chunk.device)[1:] + values(chunk.device)[:-1]) / 2
    return torch.bucketize(normed.clamp(-1, 1), between, out_int32=True).to(torch.uint8), scales


def _quantize_scales(centred: torch.Tensor, parts: Parts) -> None:
    blocks = F.pad(centred, (0, parts.nested.shape[0] * NESTED - centred.shape[0])).view(-1, NESTED)
    largest = blocks.abs().amax(1)
    parts.nested.copy_(largest)
    normed = (blocks * (1.0 / largest)[:, None]).clamp(-1, 1)
    # bitsandbytes looks the nearest code up in a table of 65,536 steps over [-1, 1], with one rounding of the step's
    # number; in fp64 the product is exact, so that the conversion to fp32 is that rounding.
    step = ((normed + 1).double() * (0.5 * 65535) + 0.5).float().nan_to_num().long()
    codes = torch.where(largest[:, None] == 0, 0, _nearest_scale(centred.device)[step])
    parts.scales.copy_(codes.view(-1)[: centred.shape[0]])


@cache
def _nearest_scale(device: torch.device) -> torch.Tensor:
    numbers = scale_values(torch.device("cpu"))
    between = 0.5 * (numbers[1:] + numbers[:-1])
    steps = -1.0 + (2.0 * torch.arange(65536, dtype=torch.float32)) / 65535.0
    return torch.bucketize(steps, between).to(torch.uint8).to(device)
