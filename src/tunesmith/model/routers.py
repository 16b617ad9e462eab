"""Routers of an MoE model: how evenly they deal out tokens, recorded now and then, and their load-balancing loss.

transformers' own class says which modules are its routers, and its own module whether the family has the loss (families
whose routers are kept even by a bias, such as DeepSeek-V3, have none). The loss is that of a micro-batch, over its
tokens without padding and over all layers; the loss of a step is the mean over its micro-batches, each weighted by its
tokens, whichever rank has it. That is no sum over tokens: it depends on how a step is cut into micro-batches, as it
does in transformers.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tunesmith.kernels.routing import RoutingRecord, routed
from tunesmith.model.forward import Inputs, moved
from tunesmith.model.structure import body, decoder_layers, is_encoder_decoder
from tunesmith.plan.plan import ForwardSpec

LOSS_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]
"""Of the function that thirty families of transformers share, word for word."""
DIGITS = 5
"""Of an expert's share, as it is recorded."""


@dataclass(frozen=True)
class Balance:
    """How evenly one router has dealt out a step's tokens."""

    shares: list[float]
    """Of its choices, by expert."""
    busiest: float
    """The busiest expert's share, in times the mean."""
    entropy: float
    """Of the shares: 1 where all are equal, 0 where one expert has all."""
    idle: int
    """Experts without a token."""


def balance_of(counts: Sequence[float]) -> Balance:
    total = sum(counts) or 1.0
    shares = [count / total for count in counts]
    entropy = -sum(share * math.log(share) for share in shares if share > 0)
    return Balance(
        [round(share, DIGITS) for share in shares],
        max(shares) * len(shares),
        entropy / math.log(len(shares)) if len(shares) > 1 else 1.0,
        sum(not count for count in counts),
    )


def router_loss_of(model: nn.Module) -> tuple[int, int] | None:
    """Experts, and experts of a token, in the load-balancing loss that this model's own class can add to its own; None
    where it has none, or its routers are not found."""
    function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    takes = inspect.signature(type(model).forward).parameters
    sizes = getattr(model, "num_experts", None), getattr(model, "num_experts_per_tok", None)
    if function is None or "output_router_logits" not in takes or not find_routers(model):
        return None
    if list(inspect.signature(function).parameters) != LOSS_ARGUMENTS or not all(isinstance(one, int) for one in sizes):
        return None
    return sizes


def find_routers(model: nn.Module) -> dict[str, tuple[nn.Module, int]]:
    """By name, the routers of a decoder and where in what they return the logits are."""
    if is_encoder_decoder(model):
        return {}
    named = [
        found
        for one in model.modules()
        if (found := (getattr(type(one), "_can_record_outputs", None) or {}).get("router_logits")) is not None
    ]
    kinds = {one.target_class: one.index for one in named if hasattr(one, "target_class")}
    inside = set(body(model).modules())
    return {
        name: (module, kinds[type(module)])
        for name, module in model.named_modules()
        if type(module) in kinds and module in inside and not _has_experts(module)
    }


def _has_experts(module: nn.Module) -> bool:
    """Some families name the whole block with its experts as what gives the logits."""
    return any(hasattr(one, "experts") for one in module.modules())


class Routing:
    """The routers of a model that is trained."""

    def __init__(self, model: nn.Module, coefficient: float = 0.0):
        """`coefficient`: what their loss counts; 0 where there is none."""
        sizes = router_loss_of(model) if coefficient else None
        assert not coefficient or sizes is not None
        self.coefficient = coefficient
        self.record = RoutingRecord(*sizes) if sizes is not None else RoutingRecord()
        self.every = 0
        """Steps between those in which choices are counted; 0: never."""
        self.counts: dict[int, torch.Tensor] = {}
        """By router, over the step so far."""
        self._loss: torch.Tensor | None = None
        self._counts_choices = False
        self._share = 0.0
        self.routers = find_routers(model)
        self.layers = _numbers(model, list(self.routers))
        """Of the decoder layer that each router is in."""

    def watch(self, name: str) -> None:
        """From now on the router of this name tells what it does."""
        router, at = self.routers[name]
        place, inner = self.record.place_of(list(self.routers).index(name)), router.forward
        top_k = getattr(router, "top_k", None) or self.record.top_k or 1
        has_loss = self.record.has_loss

        def forward(*arguments: Any, **named: Any) -> Any:
            out = inner(*arguments, **named)
            if not router.training:
                return out
            given = list(out) if isinstance(out, tuple) else [out]
            logits = given[at]
            choice = next((one for one in given if not one.is_floating_point()), None)
            choice = logits.detach().topk(top_k, dim=-1).indices if choice is None else choice
            used = next((place for place, one in enumerate(given) if place != at and one.is_floating_point()), at)
            given[used] = routed(given[used], logits, choice, place, has_loss=has_loss)
            return tuple(given) if isinstance(out, tuple) else given[0]

        router.forward = forward
        router.routing = self

    def begin_step(self, step: int) -> None:
        """`step`: counted from 0."""
        self._counts_choices = bool(self.every) and (step == 0 or (step + 1) % self.every == 0)
        self._loss, self.counts = None, {}

    def begin(self, inputs: Inputs, spec: ForwardSpec, tokens: int, share: float) -> None:
        """Before a micro-batch of so many tokens (0: one that counts nothing), which are `share` of the step's."""
        self._share = share if tokens else 0.0
        if self._counts_choices or self.coefficient:
            self.record.open(_live_rows(inputs, spec, tokens), counts=self._counts_choices)

    def end_forward(self, scale: float) -> None:
        """Between the passes of the micro-batch; `scale` is that of fp16's loss."""
        loss, counts = self.record.close(self.coefficient * self._share * scale)
        if loss is not None:
            self._loss = loss * self._share if self._loss is None else self._loss + loss * self._share
        for router, counts_e in counts.items():
            self.counts[router] = self.counts[router] + counts_e if router in self.counts else counts_e

    def told(self, device: torch.device) -> torch.Tensor:
        """This rank's part of the step's loss, where there is one, and its choices, where they were counted: to be
        summed over ranks and read by `read`."""
        parts = [self._loss.double().view(1)] if self._loss is not None else []
        parts += [self.counts[router].double() for router in sorted(self.counts)]
        return torch.cat(parts).to(device) if parts else torch.zeros(0, dtype=torch.float64, device=device)

    def reader(self) -> _Told:
        """What reads the numbers of `told`, of this step."""
        return _Told(self._loss is not None, [self.counts[router].numel() for router in sorted(self.counts)])


@dataclass(frozen=True)
class _Told:
    has_loss: bool
    widths: list[int]

    def __call__(self, numbers: list[float]) -> tuple[float | None, list[Balance]]:
        """The step's loss, and how even each router was, where that was counted."""
        loss = numbers[0] if self.has_loss else None
        rest = iter(numbers[self.has_loss :])
        return loss, [balance_of([next(rest) for _ in range(width)]) for width in self.widths]


def routing_of(model: nn.Module) -> Routing | None:
    """Of a model whose routers are watched."""
    return next((one.routing for one in model.modules() if isinstance(getattr(one, "routing", None), Routing)), None)


def _numbers(model: nn.Module, names: Sequence[str]) -> list[int]:
    known = {module: name for name, module in model.named_modules()}
    layers = [f"{known[layer]}." for layer in decoder_layers(model)]
    return [next((n for n, layer in enumerate(layers) if name.startswith(layer)), 0) for name in names]


def _live_rows(inputs: Inputs, spec: ForwardSpec, tokens: int) -> torch.Tensor:
    """Of the rows that routers see, 1 for tokens and 0 for padding."""
    if spec.layout == "packed" or not tokens:
        rows = inputs.tokens.shape[0] if spec.layout == "packed" else (inputs.boundaries.shape[0] - 1) * inputs.longest
        return moved((torch.arange(rows) < tokens).float(), inputs.tokens.device)
    along = torch.arange(inputs.longest, device=inputs.tokens.device)
    return (along < inputs.boundaries.diff()[:, None]).reshape(-1).float()
