"""AWQ: input channels that carry much are made larger in the weights and smaller before them, so that rounding costs
them less; then each group's numbers end where the error of what it adds is least.

What comes before a linear is found by looking, not by names: a norm whose output is the linear's input, or another
linear whose outputs, scaled, come out scaled at the linear's input. A change that does not leave the layer's output as
it was is taken back.

Legend: N outputs, K inputs; H = X.T @ X of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from tunesmith.kernels.rounding import int_scales, to_int

RATIOS = tuple(number / 10 for number in range(11))
UNCHANGED = 2e-3
"""Largest relative difference of outputs that counts as none."""


@dataclass(frozen=True)
class Fold:
    """Linears that share an input, and what it is divided in."""

    linears: tuple[str, ...]
    divide: Callable[[torch.Tensor], torch.Tensor]
    """By factors [K]: divides, and returns by how much it was, after rounding."""
    undo: Callable[[], None]


def find_folds(
    layer: nn.Module, linears: dict[str, nn.Linear], call: Callable[[], torch.Tensor], half: torch.dtype
) -> list[Fold]:
    """The folds of a layer; `call` runs it on a little data. Linears without one are rounded as they are."""
    seen = _Seen(layer, linears)
    with seen.looking():
        expected = call()
    folds = []
    for leader, members in seen.groups().items():
        norm = seen.norm_before(leader)
        fold = _norm_fold(norm, members, half) if norm is not None else None
        if fold is None and len(members) == 1:
            fold = _linear_fold(leader, linears, seen, call)
        if fold is not None and _leaves_all(fold, linears, call, expected):
            folds.append(fold)
    return folds


def best_factors(weights: Sequence[torch.Tensor], hessian_kk: torch.Tensor, *, bits: int, group: int) -> torch.Tensor:
    """[K]: by which inputs are divided and weights multiplied, of those in question the ones with the least error."""
    size_k = hessian_kk.diagonal().clamp(min=0).sqrt()
    size_k = (size_k / size_k.mean().clamp(min=1e-30)).clamp(min=1e-4)
    best, least = torch.ones_like(size_k), None
    for ratio in RATIOS:
        factors = size_k.pow(ratio)
        factors = factors / (factors.max() * factors.min()).sqrt()
        error = 0.0
        for weight in weights:
            scaled = weight * factors
            difference = weight - to_int(scaled, int_scales(scaled, bits, group), bits) / factors
            error += ((difference @ hessian_kk) * difference).sum().item()
        if least is None or error < least:
            best, least = factors, error
    return best


class _Seen:
    """What went into and out of the modules of a layer in one call."""

    def __init__(self, layer: nn.Module, linears: dict[str, nn.Linear]):
        self.layer, self.linears = layer, linears
        self.inputs: dict[str, torch.Tensor] = {}
        self.norms: list[tuple[nn.Module, torch.Tensor, torch.Tensor]] = []

    @contextmanager
    def looking(self) -> Iterator[None]:
        hooks = [
            linear.register_forward_pre_hook(lambda _, args, name=name: self.inputs.update({name: args[0]}))
            for name, linear in self.linears.items()
        ]
        for module in self.layer.modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, nn.Parameter) and weight.ndim == 1:
                hooks.append(module.register_forward_hook(lambda m, args, out: self.norms.append((m, args[0], out))))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def groups(self) -> dict[str, tuple[str, ...]]:
        """Linears that have one tensor as their input, by the first of them."""
        found: dict[str, list[str]] = {}
        for name, x in self.inputs.items():
            leader = next((one for one in found if self.inputs[one] is x), name)
            found.setdefault(leader, []).append(name)
        return {leader: tuple(names) for leader, names in found.items()}

    def norm_before(self, name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor] | None:
        x = self.inputs[name]
        return next(((module, before, out) for module, before, out in self.norms if out is x), None)


def _norm_fold(norm, members: tuple[str, ...], half: torch.dtype) -> Fold | None:
    """Dividing what a norm multiplies by; Gemma's norms multiply by one more than their weight."""
    module, before, out = norm
    kept = {leaf: weight.detach().clone() for leaf, weight in module.named_parameters(recurse=False)}

    def undo() -> None:
        with torch.no_grad():
            for leaf, value in kept.items():
                getattr(module, leaf).copy_(value)

    def dividing(offset: float) -> Callable[[torch.Tensor], torch.Tensor]:
        @torch.no_grad()
        def divide(factors_k: torch.Tensor) -> torch.Tensor:
            old = kept["weight"] + offset
            made = ((old / factors_k - offset).to(half).float() + offset).detach()
            done = torch.where((made == 0) | (old == 0), 1.0, old / made)
            module.weight.copy_(torch.where(done == 1.0, old, made) - offset)
            if "bias" in kept:
                module.bias.copy_(kept["bias"] / done)
            return done

        return divide

    trial = torch.linspace(0.5, 2.0, out.shape[-1])
    for offset in (0.0, 1.0):
        divide = dividing(offset)
        done = divide(trial)
        with torch.no_grad():
            is_divided = _distance(module(before) * done, out) < UNCHANGED and (done - trial).abs().mean() < 0.1
        undo()
        if is_divided:
            return Fold(members, divide, undo)
    return None


def _linear_fold(name: str, linears: dict[str, nn.Linear], seen: _Seen, call) -> Fold | None:
    """Dividing the outputs of another linear of the layer."""
    width, x = linears[name].in_features, seen.inputs[name]
    trial = torch.linspace(0.5, 2.0, width)
    for other, linear in linears.items():
        if other == name or linear.out_features != width:
            continue
        fold = _output_fold(linear, name)
        fold.divide(trial)
        again = _Seen(seen.layer, {name: linears[name]})
        with again.looking():
            call()
        fold.undo()
        if _distance(again.inputs[name] * trial, x) < UNCHANGED:
            return fold
    return None


def _output_fold(linear: nn.Linear, name: str) -> Fold:
    kept: list[torch.Tensor] = []

    @torch.no_grad()
    def divide(factors_k: torch.Tensor) -> torch.Tensor:
        kept[:] = [one.detach().clone() for one in (linear.weight, linear.bias) if one is not None]
        linear.weight.div_(factors_k[:, None])
        if linear.bias is not None:
            linear.bias.div_(factors_k)
        return factors_k

    @torch.no_grad()
    def undo() -> None:
        linear.weight.copy_(kept[0])
        if linear.bias is not None:
            linear.bias.copy_(kept[1])

    return Fold((name,), divide, undo)


@torch.no_grad()
def _leaves_all(fold: Fold, linears: dict[str, nn.Linear], call, expected: torch.Tensor) -> bool:
    """Whether the layer gives what it gave when the linears make good what their input was divided by."""
    kept = {name: linears[name].weight.detach().clone() for name in fold.linears}
    done = fold.divide(torch.linspace(0.5, 2.0, linears[fold.linears[0]].in_features))
    for name in fold.linears:
        linears[name].weight.mul_(done)
    same = _distance(call(), expected) < UNCHANGED
    for name, weight in kept.items():
        linears[name].weight.copy_(weight)
    fold.undo()
    return same


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()
