"""Models that get their weights tensor by tensor, their frozen linears and experts in nf4 or int8 where asked.

The model is built without weights. Each tensor is read from its file, moved to the device and, where it belongs to a
linear or to experts that are held in fewer bits, quantized there before the next one is used: such a model never exists
in full precision, and the host holds a few tensors at a time, read ahead. What becomes nf4 or int8 is the file's own
value, whatever the precision it is computed in. Embeddings, norms and the output head stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tunesmith.kernels import int8, nf4
from tunesmith.model.experts import STACKS, QuantizedExperts, experts_of_layers
from tunesmith.model.files import Block, Codes, Read, own_copy
from tunesmith.model.finite import Finite
from tunesmith.model.source import WeightSource
from tunesmith.model.structure import is_transposed, linears_of_layers, replace_module
from tunesmith.plan.plan import Storage


class Reading:
    """How much of each tensor a process reads, and what it makes of it on the device: all, and nothing else.

    `parallel.prepare` has one for processes that share the reading."""

    def part(self, name: str, shape: tuple[int, ...]) -> Block:
        return ()

    def assemble(self, name: str, part: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return part


class QuantizedLinear(nn.Module):
    """A frozen linear in few bits a weight; computes in the precision of its input."""

    weight = None
    """Models that look at its type before they call it (T5) find none."""

    def __init__(self, shape_nk: tuple[int, int], bias_n: torch.Tensor | None, *, is_transposed: bool):
        super().__init__()
        self.out_features, self.in_features = shape_nk
        self.is_transposed = is_transposed
        """Whether the model's own module stores its weight [inputs, outputs], as GPT-2's does."""
        self.register_buffer("bias", bias_n, persistent=False)

    def dequantize(self) -> torch.Tensor:
        """The weight [outputs, inputs] in fp32."""
        raise NotImplementedError


class Nf4Linear(QuantizedLinear):
    """In 4.127 bits a weight."""

    def __init__(
        self,
        weight4: torch.Tensor,
        shape_nk: tuple[int, int],
        bias_n: torch.Tensor | None,
        *,
        is_transposed: bool = False,
    ):
        super().__init__(shape_nk, bias_n, is_transposed=is_transposed)
        self.register_buffer("weight4", weight4, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nf4.nf4_linear(x, self.weight4, self.out_features, self.bias)

    def dequantize(self) -> torch.Tensor:
        return nf4.dequantize(self.weight4, [self.out_features], self.in_features, torch.float32)


class Int8Linear(QuantizedLinear):
    """In 8 bits a weight, with a scale for each output."""

    def __init__(
        self,
        weight8: torch.Tensor,
        scale_n: torch.Tensor,
        bias_n: torch.Tensor | None,
        *,
        is_transposed: bool = False,
    ):
        super().__init__(tuple(weight8.shape), bias_n, is_transposed=is_transposed)
        self.register_buffer("weight8", weight8, persistent=False)
        self.register_buffer("scale_n", scale_n, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return int8.int8_linear(x, self.weight8, self.scale_n, self.bias)

    def dequantize(self) -> torch.Tensor:
        return int8.dequantize(self.weight8, self.scale_n, torch.float32)


def build_empty(build: Callable[[], nn.Module]) -> nn.Module:
    """The model that `build` makes, its large weights on the meta device; what it computes by itself is real."""
    with _EmptyOnMeta():
        return build()


@torch.no_grad()
def put_weights(
    model: nn.Module,
    reads: Iterable[Read],
    *,
    dtype: torch.dtype,
    device: torch.device,
    storage: Storage,
    linears: Mapping[str, nn.Module],
    source: WeightSource,
    reading: Reading | None = None,
) -> None:
    """Give a model built by `build_empty` these tensors of a source, as they come: `linears` (and experts) as `storage`
    says, all else in `dtype`. UserError where they are not finite."""
    reading = reading or Reading()
    finite = Finite(torch.float32 if storage != "plain" else dtype)
    experts = experts_of_layers(model) if storage != "plain" else {}
    for name, part, shape in reads:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if owner in experts and module is experts[owner]:
            module = QuantizedExperts(module, storage)
            replace_module(model, owner, module)
        if isinstance(part, Codes):
            replace_module(model, owner, _taken_over(linears[owner], part.to(device), _bias_of(module)))
            finite.look(name, _scales_of(model.get_submodule(owner)))
            continue
        moved = part.to(device, non_blocking=True)
        if leaf in module._parameters or isinstance(module, QuantizedLinear | QuantizedExperts):
            finite.look(name, moved)
        value = reading.assemble(name, moved, shape)
        is_quantized = isinstance(module, QuantizedExperts) or (owner in linears and leaf == "weight")
        if is_quantized and value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            value = value.float()
        if isinstance(module, QuantizedExperts):
            module.hold(leaf, value)
        elif is_quantized:
            replace_module(model, owner, _quantized(linears[owner], value, _bias_of(module), storage))
        else:
            value = value.to(dtype) if value.is_floating_point() and not source.knows_dtypes else value
            value = own_copy(value) if value is part and source.is_lent else value  # not the file itself
            if leaf in module._parameters:
                module._parameters[leaf] = nn.Parameter(value, requires_grad=value.is_floating_point())
            else:
                module._buffers[leaf] = value
    finite.say(source.files)


def _bias_of(linear: nn.Module) -> torch.Tensor | None:
    return None if linear.bias is None else linear.bias.detach()


@torch.no_grad()
def quantize_linears(model: nn.Module, *, dtype: torch.dtype, device: torch.device, storage: Storage = "nf4") -> None:
    """Move a model to the device linear by linear, each quantized there, and experts so; the rest goes in `dtype`."""
    for name, linear in linears_of_layers(model).items():
        bias = None if linear.bias is None else linear.bias.detach().to(device, dtype)
        replace_module(model, name, _quantized(linear, linear.weight.detach().to(device), bias, storage))
    for name, experts in experts_of_layers(model).items():
        quantized = QuantizedExperts(experts, storage)
        for leaf in STACKS:
            quantized.hold(leaf, getattr(experts, leaf).detach().to(device))
        replace_module(model, name, quantized)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device, dtype)
    model.to(device)


class _EmptyOnMeta(TorchFunctionMode):
    """`torch.empty`, by which modules make room for their weights, makes none. What is computed while building, such
    as rotary frequencies that no file holds, stays real: on the meta device it would be lost."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _quantized(
    linear: nn.Module, weight: torch.Tensor, bias_n: torch.Tensor | None, storage: Storage
) -> QuantizedLinear:
    transposed = is_transposed(linear)
    weight_nk = weight.t().contiguous() if transposed else weight
    if storage == "int8":
        return Int8Linear(*int8.quantize(weight_nk), bias_n, is_transposed=transposed)
    assert storage == "nf4"
    return Nf4Linear(nf4.quantize(weight_nk), tuple(weight_nk.shape), bias_n, is_transposed=transposed)


def rounded(weight_nk: torch.Tensor, storage: Storage) -> torch.Tensor:
    """A linear's weight as it is while it is held in few bits, in fp32."""
    if storage == "int8":
        return int8.dequantize(*int8.quantize(weight_nk), torch.float32)
    return nf4.dequantize(nf4.quantize(weight_nk), [weight_nk.shape[0]], weight_nk.shape[1], torch.float32)


@torch.no_grad()
def round_weights(model: nn.Module, storage: Storage) -> None:
    """Give the linears and experts that would be held in few bits the values that they would have so."""
    for linear in linears_of_layers(model).values():
        weight = linear.weight
        weight_nk = weight.t().contiguous() if is_transposed(linear) else weight
        value = rounded(weight_nk, storage).to(weight.dtype)
        weight.copy_(value.t() if is_transposed(linear) else value)
    for experts in experts_of_layers(model).values():
        for leaf in STACKS:
            stack_enk = getattr(experts, leaf)
            stack_enk.copy_(rounded(stack_enk.reshape(-1, stack_enk.shape[-1]), storage).view(stack_enk.shape))


def _taken_over(linear: nn.Module, held: Codes, bias_n: torch.Tensor | None) -> QuantizedLinear:
    """A linear that was quantized before, by the same codes."""
    transposed = is_transposed(linear)
    if held.scales is not None:
        return Int8Linear(held.codes, held.scales, bias_n, is_transposed=transposed)
    shape_nk = tuple(reversed(linear.weight.shape)) if transposed else tuple(linear.weight.shape)
    return Nf4Linear(held.codes, shape_nk, bias_n, is_transposed=transposed)


def _scales_of(linear: QuantizedLinear) -> torch.Tensor:
    """What would tell that codes stand for something that is no number."""
    if isinstance(linear, Int8Linear):
        return linear.scale_n
    return nf4.block_scales(linear.weight4, linear.out_features * linear.in_features)
