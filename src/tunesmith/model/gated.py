"""Gated MLPs, found by what they compute; memory-efficient SwiGLU (and GeGLU, and clamped gates): those with trained
weights compute their activation again in the backward pass instead of keeping it, in the place of a model's own.

Which modules these are is tried, not known. A module that holds three linears, or two of which the first gives gate and
up side by side, and nothing else with weights, is called with small linears in their place; what comes out must be
`down(act(gate(x)) * up(x))` with one of the activations of `kernels.gating`. Names of modules do not matter.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import skip_init

from tunesmith.kernels.gated import gated_matmul, joint_gated_matmul
from tunesmith.kernels.gating import GELU, GELU_TANH, SILU, Gating
from tunesmith.plan.plan import GATES, Gate

INPUTS, WIDTH = 8, 12
"""Of the linears a module is tried with."""
SIZES = (0.3, 1.0, 10.0)
"""Of the inputs it is tried with: those that tell the curves apart, and those that reach a clamp."""
QUICK_GELU = 1.702
"""Its sigmoid's slope, which gpt-oss has, too."""


@dataclass(frozen=True)
class GatedLinears:
    """A gated MLP: the names of its linears, and what it does with its gate."""

    first: tuple[str, ...]
    """Gate and up; or one linear that gives both, gate before up."""
    down: str
    gating: Gating

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.first, self.down)

    @property
    def gate(self) -> Gate:
        """As plans call it."""
        if self.gating.limit:
            return "clamped_swiglu"
        return "swiglu" if self.gating.curve == "sigmoid" and self.gating.slope == 1.0 else "geglu"


def use_memory_efficient_gates(model: nn.Module, gates: Collection[str] = GATES) -> list[Gate]:
    """Put our module in the place of each MLP that it equals, of these gates; returns that of each. The names of
    linears do not change."""
    taken: list[Gate] = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (found := find_gated(child)) is None or found.gate not in gates:
                continue
            if all(type(child.get_submodule(one)) is nn.Linear for one in found.names):
                setattr(parent, name, GatedMlp(child, found))
                taken.append(found.gate)
    return taken


class GatedMlp(nn.Module):
    def __init__(self, mlp: nn.Module, found: GatedLinears):
        super().__init__()
        for name, child in mlp.named_children():
            if name in found.names:
                self.add_module(name, child)
        self.first, self.down, self.gating = found.first, found.down, found.gating.text

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_th = x.flatten(0, -2)
        down = getattr(self, self.down)
        first = [getattr(self, name)(x_th) for name in self.first]
        product = gated_matmul if len(first) == 2 else joint_gated_matmul
        y = product(*first, down.weight, self.gating)
        y = y if down.bias is None else y + down.bias
        return y.view(*x.shape[:-1], -1)


def find_gated(module: nn.Module) -> GatedLinears | None:
    """What a module is found to be by calling it; None where it is no gated MLP. Its weights need not be there yet."""
    linears = {name: sizes for name, child in module.named_children() if (sizes := _sizes(child)) is not None}
    if len(linears) not in (2, 3) or _has_other_weights(module, linears):
        return None
    for first, down in _roles(linears):
        gating = _gating(module, first, down)
        if gating is not None:
            return GatedLinears(first, down, gating)
    return None


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """Inputs and outputs of a linear, adapted or not."""
    base = getattr(module, "base", module)
    sizes = getattr(base, "in_features", None), getattr(base, "out_features", None)
    return sizes if all(isinstance(size, int) for size in sizes) else None  # pyright: ignore


def _has_other_weights(module: nn.Module, linears: Collection[str]) -> bool:
    others = [child for name, child in module.named_children() if name not in linears]
    held = itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False))
    return any(True for _ in held) or any(
        True for child in others for _ in itertools.chain(child.parameters(), child.buffers())
    )


def _roles(linears: dict[str, tuple[int, int]]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Which of the linears may be gate, up and down, by their sizes."""
    for *first, down in itertools.permutations(linears):
        inputs, width = linears[first[0]]
        outward = (width if len(first) == 2 else width / 2, inputs)
        if all(linears[name] == (inputs, width) for name in first) and linears[down] == outward:
            yield tuple(first), down


def _gating(module: nn.Module, first: tuple[str, ...], down: str) -> Gating | None:
    generator = torch.Generator().manual_seed(0)
    wide = WIDTH if len(first) == 2 else 2 * WIDTH
    sizes = dict.fromkeys(first, (INPUTS, wide)) | {down: (WIDTH, INPUTS)}
    linears = {  # without their usual weights, which would take from the random numbers of others
        name: skip_init(nn.Linear, *sizes[name], bias=False, device="cpu", dtype=torch.float32) for name in sizes
    }
    # As it is trained, so that dropout, if it has any, is seen.
    others = {name: copy.deepcopy(child).train() for name, child in module.named_children() if name not in linears}
    small = copy.copy(module)
    small.__dict__ |= {"_modules": {**module._modules, **others, **linears}, "training": True}
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        for linear in linears.values():
            linear.weight.normal_(generator=generator)
        x = torch.cat([torch.randn(1, 16, INPUTS, generator=generator, device="cpu") * size for size in SIZES], dim=1)
        made = [linears[name](x) for name in first]
        gate, up = made if len(made) == 2 else made[0].chunk(2, dim=-1)
        try:
            found = small(x)
        except Exception:  # the module's own code, called in a way it may not expect
            return None
        if not isinstance(found, torch.Tensor) or found.shape != x.shape or found.dtype != x.dtype:
            return None
        for gating in _gatings(module):
            expected = linears[down](gating(gate, up))
            allowed = 1e-5 * expected.abs().amax(-1, keepdim=True)
            if bool(((found - expected).abs() <= allowed).all()):
                return gating
    return None


def _gatings(module: nn.Module) -> Iterator[Gating]:
    """Those to try: clamps are where the module says, by some number that it holds."""
    yield from (SILU, GELU, GELU_TANH, Gating("sigmoid", QUICK_GELU))
    held = vars(module).values()
    numbers = sorted({float(one) for one in held if isinstance(one, int | float) and not isinstance(one, bool)})
    limits = [one for one in numbers if one > 0]
    slopes, shifts = dict.fromkeys([1.0, QUICK_GELU, *limits]), dict.fromkeys([0.0, 1.0, *numbers])
    for limit, shift in itertools.product(limits, shifts):
        yield from (Gating("sigmoid", slope, limit, shift) for slope in slopes)
        yield from (Gating(curve, 1.0, limit, shift) for curve in ("erf", "tanh"))
