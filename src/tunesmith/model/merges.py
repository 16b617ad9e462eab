"""ReLoRA and LoQT: low-rank factors that are merged into the base at intervals, so that what is learned has full rank.

ReLoRA (arXiv 2307.05695): the factors are added to the base's weights and drawn anew, the optimizer begins with new
states, and the learning rate warms up again. LoQT (arXiv 2405.16528): the base is in 4 or 8 bits. The first factor is
not trained: its rows are the largest right singular directions of the weight's gradient, found anew at each interval on
the first micro-batch of the step; the second is, and begins with what rounding the merged weight has lost within those
directions. When and how is a function of step and seed.

Legend: T tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from tunesmith.config.schema import Run
from tunesmith.kernels import int8, nf4
from tunesmith.kernels.directions import right_directions
from tunesmith.kernels.update import copy_half_
from tunesmith.model.lora_modules import LoraLinear, generator_of
from tunesmith.model.quantized import Int8Linear, Nf4Linear, QuantizedLinear
from tunesmith.model.structure import is_transposed

RELORA = (4, 1000)
"""ReLoRA: a run has at least so many intervals, where it has as many steps; and one has at most so many steps."""
LOQT = (10, 100, 1.2)
"""LoQT: the first interval is at most this part of the run, and so many steps; each is so many times as long as the one
before, since directions change less and less."""
REWARM = (10, 10)
"""ReLoRA: after a merge the rate warms up for so many steps, and for at most this part of the interval."""
AT = "at"


def merge_steps(method: str, steps: int) -> tuple[int, ...]:
    """Steps (from 0) before which factors are merged, or LoQT's first directions found, in a run of so many."""
    if method == "relora":
        every = max(1, min(RELORA[1], steps // RELORA[0]))
        return tuple(range(every, steps, every))
    share, most, growth = LOQT
    length = float(max(1, min(most, steps // share)))
    lengths = (length * growth**number for number in itertools.count())
    starts = itertools.accumulate(map(round, lengths), initial=0)
    return tuple(itertools.takewhile(lambda start: start < steps, starts))


@dataclass
class Merges:
    """The share of a step in them. All that it changes besides what is trained is saved with the run."""

    method: str
    seed: int
    adapters: dict[str, LoraLinear]
    steps: tuple[int, ...]
    last: int | None = None
    """The step before which there was a merge last."""
    _found: dict[str, torch.Tensor] = field(default_factory=dict)
    """LoQT: new directions [R, I]."""

    @classmethod
    def of(cls, model: nn.Module, run: Run, steps: int) -> Merges | None:
        """For a run of so many steps; None where factors are the result. LoQT's first factors are frozen by it."""
        if not run.is_merged:
            return None
        adapters = {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}
        for adapter in adapters.values() if run.method == "loqt" else ():
            adapter.lora_a.requires_grad_(False)
        return cls(run.method, run.seed, adapters, merge_steps(run.method, steps))

    def factors(self) -> list[torch.Tensor]:
        """Both of each adapter: second factors alone grow from 0, which looks like weights that explode."""
        return [factor for adapter in self.adapters.values() for factor in (adapter.lora_a, adapter.lora_b)]

    @property
    def needs_gradient(self) -> bool:
        return self.method == "loqt"

    def is_due(self, step: int) -> bool:
        return step in self.steps and self.last != step

    def warmth(self, step: int) -> float:
        """By which the rate of a step is multiplied: ReLoRA's new warm-up after each merge."""
        done = [at for at in self.steps if at <= step]
        if self.method != "relora" or not done:
            return 1.0
        length = min(REWARM[0], self.steps[0] // REWARM[1])
        return min(1.0, (step - done[-1] + 1) / (length + 1))

    @contextmanager
    def looking(self, step: int) -> Iterator[None]:
        """Around a forward and backward pass, from which directions are found."""
        hooks = [
            adapter.register_forward_hook(partial(self._look, name, step)) for name, adapter in self.adapters.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def merge(self, step: int) -> None:
        for name, adapter in self.adapters.items():
            if self.method == "relora":
                weight = adapter.base.weight
                copy_half_(weight.detach(), adapter.merged(weight).contiguous())
                adapter.reset(generator_of(self.seed, f"{name}:{step}"))
            else:
                self._merge_quantized(name, adapter, is_first=step == 0)
        self._found.clear()
        self.last = step

    def tensors(self) -> dict[str, torch.Tensor]:
        if self.last is None:
            return {}
        found = {AT: torch.tensor(float(self.last))}
        for name, adapter in self.adapters.items():
            if self.method == "relora":
                found[f"weight/{name}"] = adapter.base.weight.detach()
                continue
            found[f"lora_a/{name}"] = adapter.lora_a.detach()
            found |= {f"{leaf}/{name}": value for leaf, value in _codes(adapter.base).items()}
        return found

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if AT not in tensors:
            return
        self.last = int(tensors[AT])
        for full_name, value in tensors.items():
            leaf, _, name = full_name.partition("/")
            if leaf == AT:
                continue
            adapter = self.adapters[name]
            own = {"weight": adapter.base.weight} if leaf == "weight" else {"lora_a": adapter.lora_a}
            (own if leaf in own else _codes(adapter.base))[leaf].detach().copy_(value)

    def _look(self, name: str, step: int, _: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(partial(self._find, name, step, given[0].detach()))

    @torch.no_grad()
    def _find(self, name: str, step: int, x: torch.Tensor, gradient: torch.Tensor) -> None:
        gradient_to, x_ti = gradient.flatten(0, -2), x.flatten(0, -2)
        if gradient.dtype == torch.float16:  # sums over tokens could be too large for it
            gradient_to, x_ti = gradient_to.float(), x_ti.float()
        gradient_oi = (gradient_to.t() @ x_ti.to(gradient_to.dtype)).float()
        if gradient_oi.isfinite().all() and gradient_oi.any():
            rank = self.adapters[name].rank
            self._found[name] = right_directions(gradient_oi, rank, generator_of(self.seed, f"{name}:{step}"))

    def _merge_quantized(self, name: str, adapter: LoraLinear, *, is_first: bool) -> None:
        base = adapter.base
        assert isinstance(base, QuantizedLinear)
        a_ri = self._found.get(name, adapter.lora_a)
        lost_oi = None
        if not is_first:
            merged_oi = base.dequantize() + adapter.scale * (adapter.lora_b @ adapter.lora_a)
            _requantize(base, merged_oi)
            lost_oi = merged_oi - base.dequantize()
        adapter.lora_a.copy_(a_ri)
        adapter.lora_b.copy_(lost_oi @ a_ri.t() / adapter.scale if lost_oi is not None else 0.0)


def _codes(base: nn.Module) -> dict[str, torch.Tensor]:
    """What a linear in few bits is held by."""
    assert isinstance(base, Nf4Linear | Int8Linear)
    return (
        {"weight4": base.weight4} if isinstance(base, Nf4Linear) else {"weight8": base.weight8, "scale_n": base.scale_n}
    )


def _requantize(base: QuantizedLinear, weight_oi: torch.Tensor) -> None:
    made = (nf4.quantize(weight_oi),) if isinstance(base, Nf4Linear) else int8.quantize(weight_oi)
    for own, new in zip(_codes(base).values(), made, strict=True):
        own.copy_(new)


@torch.no_grad()
def merged_weights(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All weights of a model with adapters, by the names they have without: merged, dequantized, in `dtype`."""
    found: dict[str, torch.Tensor] = {}
    inside: list[str] = []
    for name, module in model.named_modules():
        base = module.base if isinstance(module, LoraLinear) else module
        if not isinstance(module, LoraLinear) and (not isinstance(base, QuantizedLinear) or name.endswith(".base")):
            continue
        inside.append(f"{name}.")
        transposed = base.is_transposed if isinstance(base, QuantizedLinear) else is_transposed(base)
        if isinstance(base, QuantizedLinear):
            weight = base.dequantize().t() if transposed else base.dequantize()
        else:
            weight = base.weight.float()
        value = module.merged(weight) if isinstance(module, LoraLinear) else weight
        found[f"{name}.weight"] = torch.empty(value.shape, dtype=dtype, device=value.device)
        copy_half_(found[f"{name}.weight"], value.contiguous())
        if base.bias is not None:
            found[f"{name}.bias"] = base.bias.detach().to(dtype)
    others = {name: one.detach() for name, one in model.named_parameters() if not name.startswith(tuple(inside))}
    return {name: value.cpu() for name, value in {**others, **found}.items()}
