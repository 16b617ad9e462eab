"""Weights rounded to the nearest, exactly as the files of each format hold them; all in fp32, so that what is trained
for, what is measured and what is written are the same bits.

int4 and int8: groups of a row share a scale, which is a bf16 number, so that engines that hold scales in 16 bits lose
nothing. fp8 (e4m3): a scale for each row. nvfp4 (e2m1): groups of 16 with a scale in fp8, times one for the whole
matrix. q4_0 and q8_0: llama.cpp's blocks of 32, bit for bit those of the gguf package.

Legend: N outputs (rows), K inputs, G weights of a group.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

GROUPS = (128, 64, 32)
"""Weights that share a scale: as many as divide the rows of every linear."""
FP8_LARGEST = 448.0
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NVFP4_GROUP = 16
LLAMA_CPP_BLOCK = 32
BITS = {"int4": 4, "int8": 8}


@dataclass(frozen=True)
class Rounding:
    """A format, and how many weights share a scale where it leaves that open."""

    kind: str
    group: int = 0

    @property
    def divisor(self) -> int:
        """Of the rows that this can round."""
        blocks = {"nvfp4": NVFP4_GROUP, "q4_0": LLAMA_CPP_BLOCK, "q8_0": LLAMA_CPP_BLOCK, "fp8": 1}
        return blocks.get(self.kind) or self.group

    def __call__(self, weight_nk: torch.Tensor) -> torch.Tensor:
        """The weights that the format's files hold of these, in fp32."""
        weight_nk = weight_nk.float()
        if self.kind in BITS:
            bits = BITS[self.kind]
            return to_int(weight_nk, int_scales(weight_nk, bits, self.group), bits)
        return {"fp8": _fp8, "nvfp4": _nvfp4, "q4_0": _q4_0, "q8_0": q8_0}[self.kind](weight_nk)


def group_of(widths: Iterable[int]) -> int | None:
    """The usual size of groups that divides all these rows; None where none does."""
    widths = set(widths)
    return next((group for group in GROUPS if all(width % group == 0 for width in widths)), None)


def int_scales(weight_nk: torch.Tensor, bits: int, group: int, *, share: float | torch.Tensor = 1.0) -> torch.Tensor:
    """[N, K / G]: such that `share` of a group's largest weight is half a step beyond the last number."""
    largest = weight_nk.unflatten(1, (-1, group)).abs().amax(-1) * share
    scale = (largest / (2 ** (bits - 1) - 0.5)).to(torch.bfloat16).float()
    return scale.clamp(min=torch.finfo(torch.float32).tiny)


def to_int(weight_nk: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    """Each weight to the nearest whole number of its group's scale, dequantized."""
    step_nk = scale.repeat_interleave(weight_nk.shape[1] // scale.shape[1], 1)
    last = 2 ** (bits - 1)
    return (weight_nk / step_nk).round().clamp(-last, last - 1) * step_nk


def fp8_scales(weight_nk: torch.Tensor) -> torch.Tensor:
    return (weight_nk.abs().amax(1, keepdim=True) / FP8_LARGEST).clamp(min=torch.finfo(torch.float32).tiny)


def _fp8(weight_nk: torch.Tensor) -> torch.Tensor:
    scale = fp8_scales(weight_nk)
    return (weight_nk / scale).clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn).float() * scale


def nvfp4_scales(weight_nk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K / 16] of fp8 numbers, and what they are to be divided by, [1]."""
    largest = weight_nk.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    whole = torch.nan_to_num(FP8_LARGEST * FP4_VALUES[-1] / largest, posinf=1.0).reshape(1)
    groups = weight_nk.unflatten(1, (-1, NVFP4_GROUP)).abs().amax(-1) / FP4_VALUES[-1] * whole
    scale = groups.clamp(max=FP8_LARGEST).to(torch.float8_e4m3fn).float()
    return torch.where(scale == 0, torch.finfo(torch.float8_e4m3fn).tiny, scale), whole


def _nvfp4(weight_nk: torch.Tensor) -> torch.Tensor:
    scale, whole = nvfp4_scales(weight_nk)
    step_nk = (scale / whole).repeat_interleave(NVFP4_GROUP, 1)
    values = torch.tensor(FP4_VALUES, device=weight_nk.device)
    nearest = torch.bucketize((weight_nk / step_nk).abs(), (values[1:] + values[:-1]) / 2)
    return values[nearest] * weight_nk.sign() * step_nk


def _q4_0(weight_nk: torch.Tensor) -> torch.Tensor:
    blocks = weight_nk.unflatten(1, (-1, LLAMA_CPP_BLOCK))
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))  # with its sign
    step = largest / -8
    inverse = torch.where(step == 0, 0.0, 1 / step)
    codes = (blocks * inverse + 8.5).trunc().clamp(0, 15) - 8
    return (codes * step.to(torch.float16).float()).flatten(1)


def q8_0(x: torch.Tensor) -> torch.Tensor:
    """Weights, or what goes into a matmul, which llama.cpp rounds in the same way: [..., K]."""
    blocks = x.unflatten(-1, (-1, LLAMA_CPP_BLOCK))
    step = blocks.abs().amax(-1, keepdim=True) / 127
    scaled = blocks * torch.where(step == 0, 0.0, 1 / step)
    codes = scaled.sign() * (scaled.abs() + 0.5).floor()  # halves away from zero
    return (codes * step.to(torch.float16).float()).flatten(-2)
