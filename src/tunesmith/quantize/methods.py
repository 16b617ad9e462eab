"""How the linears of a layer are quantized, by each method, and what is stored of them.

| method | what it does | stored as |
| --- | --- | --- |
| rtn | each weight to the nearest number of its group | compressed-tensors int4, int8 |
| gptq | what a column loses is made good by later ones | the same |
| awq | channels that carry much are scaled up before rounding | the same |
| fp8 | each weight to the nearest e4m3 number of its row | compressed-tensors fp8 |
| int8-outliers | LLM.int8(): rows in 8 bits; inputs beyond a threshold are multiplied in 16 | bitsandbytes int8 |
| kmeans | each weight to the nearest of its row's codebook | 16-bit weights, and codebooks beside them |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tunesmith.errors import UserError
from tunesmith.export.quantized import compressed_config, half_of, pack, rounding_of, skipped, widths_of
from tunesmith.export.source import Source, needs
from tunesmith.kernels import int8
from tunesmith.kernels.rounding import GROUPS, fp8_scales, int_scales, to_int
from tunesmith.quantize.awq import best_factors, find_folds
from tunesmith.quantize.clusters import cluster
from tunesmith.quantize.gptq import best_scales, gptq
from tunesmith.quantize.walk import LayerWork

METHODS = ("rtn", "gptq", "awq", "int8-outliers", "kmeans", "fp8")
CALIBRATED = ("gptq", "awq")
"""Cannot do without data."""
THRESHOLD = 6.0
"""LLM.int8(): inputs beyond it are not rounded."""
ROUNDS_INPUTS = ("fp8", "int8-outliers")
"""Methods whose engines round what enters linears, too."""


@dataclass(frozen=True)
class Options:
    """How a model is quantized, as the command line asks for it."""

    method: str
    bits: int
    group: int
    act_order: bool = True

    @classmethod
    def of(cls, source: Source, method: str, bits: int | None, group: int | None, act_order: bool = True) -> Options:
        """UserError for what does not go together."""
        only = {"fp8": 8, "int8-outliers": 8}.get(method)
        if method not in METHODS:
            raise UserError(f"--method is {method}; it can be {', '.join(METHODS)}.")
        if bits not in (None, 4, 8) or (only and bits not in (None, only)):
            raise UserError(f"--bits is {bits}; for --method {method} it can be {'8' if only else '4 or 8'}.")
        has_groups = method in ("rtn", "gptq", "awq")
        if group is not None and not has_groups:
            raise UserError(f"--group is for rtn, gptq and awq; {method} has a scale or codebook for each row.")
        widths = widths_of(source)
        usual = next((one for one in GROUPS if all(width % one == 0 for width in widths)), None)
        if has_groups and (
            odd := [width for width in sorted(widths) if group is not None and (group < 16 or width % group)]
        ):
            known = ", ".join(str(one) for one in GROUPS if all(width % one == 0 for width in widths)) or "none"
            raise UserError(
                f"--group is {group}, which does not suit rows of {odd[0]} weights; of the usual {known} do."
            )
        if has_groups and group is None and usual is None:
            raise UserError(
                f"The rows of this model's linears ({', '.join(map(str, sorted(widths)))} weights) have no common "
                "divisor of 32; use --method fp8, int8-outliers or kmeans."
            )
        return cls(method, bits or only or 4, (group or usual or 0) if has_groups else 0, act_order)

    @property
    def precision(self) -> str:
        """By which bound of the proof it is judged."""
        return "fp8" if self.method in ROUNDS_INPUTS else f"{self.bits} bits"

    @property
    def title(self) -> str:
        groups = f", groups of {self.group}" if self.group else ""
        return f"{self.method}, {self.bits} bits{groups}"


@dataclass
class Recipe:
    """A method for one model; `stored` has what the layer that was quantized last is stored as."""

    source: Source
    asked: Options
    stored: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """By linear: the tensors that its weight becomes."""
    beside: dict[str, torch.Tensor] = field(default_factory=dict)
    """For a file of its own."""
    outliers: int = 0
    """Inputs of linears beyond the threshold in calibration, over the model."""

    def __post_init__(self) -> None:
        package = {"kmeans": None, "int8-outliers": "bitsandbytes"}.get(self.asked.method, "compressed_tensors")
        if package:
            needs(package, "export")
        self.half = getattr(torch, half_of(self.source))
        kind = "fp8" if self.asked.method == "fp8" else f"int{self.asked.bits}"
        self.rounding = rounding_of(self.source, kind, self.asked.group or None)

    def config(self) -> dict[str, Any] | None:
        if self.asked.method == "kmeans":
            return None
        if self.asked.method == "int8-outliers":
            return {
                "quant_method": "bitsandbytes",
                "load_in_8bit": True,
                "llm_int8_threshold": THRESHOLD,
                "llm_int8_skip_modules": skipped(self.source),
            }
        return compressed_config(self.source, self.rounding)

    @torch.no_grad()
    def __call__(self, work: LayerWork) -> float:
        """Quantize a layer in place; how far its weights are from what they were, relative to them."""
        self.stored, self.beside = {}, {}
        hessians = {name: inputs.hessian_kk / inputs.tokens for name, inputs in work.inputs.items()}
        if self.asked.method == "awq":
            hessians = self._fold(work, hessians)
        for module in work.module.modules():  # the rest is stored in 16 bits
            for leaf, weight in module.named_parameters(recurse=False):
                if not (leaf == "weight" and any(module is linear for linear in work.linears.values())):
                    weight.copy_(weight.to(self.half))
        lost = size = 0.0
        quantize = _QUANTIZE[self.asked.method]
        for name, linear in work.linears.items():
            weight = linear.weight.detach().clone()
            rounded = quantize(self, name, weight, hessians.get(name), work)
            linear.weight.copy_(rounded)
            lost += (rounded - weight).double().square().sum().item()
            size += weight.double().square().sum().item()
        return math.sqrt(lost / max(size, 1e-300))

    def _rtn(self, name: str, weight: torch.Tensor, hessian: torch.Tensor | None, work: LayerWork) -> torch.Tensor:
        return self._in_groups(name, weight, int_scales(weight, self.asked.bits, self.asked.group))

    def _gptq(self, name: str, weight: torch.Tensor, hessian: torch.Tensor, work: LayerWork) -> torch.Tensor:
        sizes = {"bits": self.asked.bits, "group": self.asked.group, "act_order": self.asked.act_order}
        rounded, scale = gptq(weight, hessian, **sizes, name=name)
        self.stored[name] = pack(rounded, self.rounding, weight_scale=scale)
        return rounded

    def _awq(self, name: str, weight: torch.Tensor, hessian: torch.Tensor, work: LayerWork) -> torch.Tensor:
        sizes = {"bits": self.asked.bits, "group": self.asked.group}
        return self._in_groups(name, weight, best_scales(weight, hessian, **sizes))

    def _fold(self, work: LayerWork, hessians: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Scale channels of the layer's linears; what then comes into them."""
        found = dict(hessians)
        for fold in find_folds(work.module, work.linears, work.call, self.half):
            weights = [work.linears[name].weight for name in fold.linears]
            hessian = hessians[fold.linears[0]]
            factors = best_factors(weights, hessian, bits=self.asked.bits, group=self.asked.group)
            done = fold.divide(factors)
            for name, weight in zip(fold.linears, weights, strict=True):
                weight.mul_(done)
                found[name] = hessian / (done[:, None] * done[None, :])
        return found

    def _in_groups(self, name: str, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        rounded = to_int(weight, scale, self.asked.bits)
        self.stored[name] = pack(rounded, self.rounding, weight_scale=scale)
        return rounded

    def _fp8(self, name: str, weight: torch.Tensor, hessian: torch.Tensor | None, work: LayerWork) -> torch.Tensor:
        self.stored[name] = pack(weight, self.rounding, weight_scale=fp8_scales(weight))
        return self.rounding(weight)

    def _int8(self, name: str, weight: torch.Tensor, hessian: torch.Tensor | None, work: LayerWork) -> torch.Tensor:
        codes, scale = int8.quantize(weight)
        largest = (scale * int8.LARGEST).float()
        format_ = torch.zeros((), dtype=torch.uint8)  # rows, one after the other
        self.stored[name] = {"weight": codes, "SCB": largest, "weight_format": format_}
        if name in work.inputs:
            self.outliers += int((work.inputs[name].largest_k > THRESHOLD).sum())
        return int8.dequantize(codes, scale, torch.float32)

    def _kmeans(self, name: str, weight: torch.Tensor, hessian: torch.Tensor | None, work: LayerWork) -> torch.Tensor:
        importance = None if hessian is None else hessian.diagonal()
        rounded, book, codes = cluster(weight, importance, bits=self.asked.bits, dtype=self.half)
        self.stored[name] = {"weight": rounded.to(self.half)}
        packed = codes[:, ::2] | (codes[:, 1::2] << 4) if self.asked.bits == 4 and codes.shape[1] % 2 == 0 else codes
        self.beside |= {f"{name}.codebook": book, f"{name}.codes": packed.contiguous()}
        return rounded


_QUANTIZE: dict[str, Callable[..., torch.Tensor]] = {
    "rtn": Recipe._rtn,
    "gptq": Recipe._gptq,
    "awq": Recipe._awq,
    "fp8": Recipe._fp8,
    "int8-outliers": Recipe._int8,
    "kmeans": Recipe._kmeans,
}
