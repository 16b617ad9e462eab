"""Quantization-aware training: linears of the decoder layers compute with the weights that the exported file will hold,
rounded exactly as there (`kernels.rounding`), an adapter merged into them first.

What is trained and saved stays in full precision: rounding it is the export's part, and gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from tunesmith.errors import UserError
from tunesmith.kernels.fake_quantize import fake_quantized_linear
from tunesmith.kernels.rounding import BITS, Rounding, group_of, q8_0
from tunesmith.model.experts import experts_of_layers
from tunesmith.model.lora_modules import LoraLinear
from tunesmith.model.structure import is_transposed, linears_for_text, replace_module


class FakeQuantizedLinear(nn.Linear):
    """An `nn.Linear` whose weight is rounded when it is used; takes over the parameters of the one it replaces."""

    def __init__(self, linear: nn.Linear, rounding: Rounding):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.rounding = rounding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fake_quantized_linear(x, self.weight, self.bias, self.rounding)


@dataclass(frozen=True)
class FakeQuantization:
    """Which linears of a model are rounded, and how; found before it is cut or adapted, so that groups are those of the
    whole model's export."""

    rounding: Rounding
    names: frozenset[str]
    round_inputs: Callable[[torch.Tensor], torch.Tensor] | None = None
    """What engines do before each matmul with weights in q8_0 (llama.cpp) or fp8."""

    @classmethod
    def of(cls, model: nn.Module, kind: str, *, with_inputs: bool = False) -> FakeQuantization:
        """`q8_0`, which nothing is trained for, is what llama.cpp does: every matrix with whole blocks is rounded, and
        what goes into it. `with_inputs`: the same of fp8, as engines run what is exported."""
        linears = linears_for_text(model)
        if experts_of_layers(model) or any(is_transposed(one) for one in linears.values()):
            raise UserError(
                f"quantization_aware: {kind} rounds linears, and {type(model).__name__} has experts or transposed "
                "weights, which are none; leave it out."
            )
        if not any(type(one) is nn.Linear for one in linears.values()):
            raise UserError(
                f"quantization_aware: {kind} rounds linears, and the layers of {type(model).__name__} have none that "
                "are plain ones; leave it out."
            )
        if kind == "q8_0":
            rounding = Rounding(kind)
            matrices = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear | nn.Embedding)}
            whole = {name for name, one in matrices.items() if one.weight.shape[-1] % rounding.divisor == 0}
            return cls(rounding, frozenset(whole), q8_0)
        widths = {linear.weight.shape[1] for linear in linears.values()}
        rounding = Rounding(kind, (group_of(widths) or 32) if kind in BITS else 0)
        if odd := [width for width in sorted(widths) if width % rounding.divisor]:
            raise UserError(
                f"quantization_aware: {kind} rounds {rounding.divisor} weights together, which do not divide the rows "
                f"of {odd[0]} weights of this model; use fp8, or leave it out."
            )
        adapted = {name for name, module in model.named_modules() if isinstance(module, LoraLinear)}
        owners = (name.removesuffix(".base") if name.removesuffix(".base") in adapted else name for name in linears)
        return cls(rounding, frozenset(owners), _fp8_inputs if with_inputs and kind == "fp8" else None)

    @torch.no_grad()
    def put_on(self, model: nn.Module, owns: Callable[[str], bool] = lambda _: True) -> None:
        """On those that are there. What is frozen, and there already, is rounded once."""
        modules = dict(model.named_modules())
        for name in sorted(filter(owns, self.names)):
            module = modules.get(name)
            if isinstance(module, LoraLinear):
                module.rounding = self.rounding
                self._watch(module)
            elif isinstance(module, nn.Embedding):
                module.weight.copy_(self.rounding(module.weight))
            elif isinstance(module, nn.Linear):
                if module.weight.requires_grad or module.weight.is_meta:
                    replace_module(model, name, FakeQuantizedLinear(module, self.rounding))
                else:
                    module.weight.copy_(self.rounding(module.weight))

    def watch_inputs(self, model: nn.Module) -> None:
        """Once, before anything is called."""
        modules = dict(model.named_modules())
        for name in self.names:
            if isinstance(modules[name], nn.Linear):
                self._watch(modules[name])

    def _watch(self, module: nn.Module) -> None:
        if (round_inputs := self.round_inputs) is not None:
            module.register_forward_pre_hook(lambda _, args: (round_inputs(args[0]), *args[1:]))


def _fp8_inputs(x: torch.Tensor) -> torch.Tensor:
    """Each token with a scale of its own."""
    return Rounding("fp8")(x.flatten(0, -2)).view(x.shape)
