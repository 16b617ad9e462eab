"""Models filled from their files tensor by tensor, their frozen linears and experts in nf4, int8 or fp8 where asked.

The model is built without weights. Each tensor is read from its file, moved to the device and, where it belongs to a
linear or to experts that are held in fewer bits, quantized there before the next one is used: such a model never exists
in full precision, and the host holds a few tensors at a time, read ahead. What becomes nf4 or int8 is the file's own
value, whatever the precision it is computed in. Embeddings, norms and the output head stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from tunesmith.kernels import int8, nf4
from tunesmith.kernels.lowrank import quantize_rows
from tunesmith.model.content import Content
from tunesmith.model.experts import STACKS, QuantizedExperts, experts_of_layers
from tunesmith.model.files import Block, Codes, Held, alone, check_rounding, find, read_ahead, read_tensors
from tunesmith.model.finite import Finite
from tunesmith.plan.plan import Storage


class Reading:
    """How much of each tensor a process reads, and what it makes of it on the device: all, and nothing else.

    `parallel.fill` has one for processes that share the reading."""

    def part(self, name: str, shape: tuple[int, ...]) -> Block:
        return ()

    def whole(self, name: str, part: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return part


class QuantizedLinear(nn.Module):
    """A frozen linear in few bits a weight; computes in the precision of its input."""

    def __init__(self, shape_nk: tuple[int, int], bias_n: torch.Tensor | None, *, is_transposed: bool):
        super().__init__()
        self.out_features, self.in_features = shape_nk
        self.is_transposed = is_transposed
        """Whether the model's own module stores its weight [inputs, outputs], as GPT-2's does."""
        self.register_buffer("bias", bias_n, persistent=False)

    def whole(self) -> torch.Tensor:
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

    def whole(self) -> torch.Tensor:
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

    def whole(self) -> torch.Tensor:
        return int8.dequantize(self.weight8, self.scale_n, torch.float32)


class Fp8Base(nn.Linear):
    """A frozen linear in fp8, each row with its scale: as it came from its file, until adapters' products take it over.
    Until then it computes in the precision of its input."""

    def __init__(self, weight_nk: torch.Tensor, bias_n: torch.Tensor | None):
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight_nk.shape
        values, scale_n1 = quantize_rows(weight_nk)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.bias = None if bias_n is None else nn.Parameter(bias_n, requires_grad=False)
        self.register_buffer("scale_n", scale_n1.squeeze(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, (self.weight.float() * self.scale_n[:, None]).to(x.dtype), self.bias)


def is_transposed(module: nn.Module) -> bool:
    """GPT-2's Conv1D: a linear whose weight is stored [inputs, outputs]."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def linears_of_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The linears that are held in few bits: those of the decoder layers, by name."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or is_transposed(module))
        and module is not head
        and any(part.isdigit() for part in name.split("."))
    }


def build_empty(build: Callable[[], nn.Module]) -> nn.Module:
    """The model that `build` makes, its large weights on the meta device; what it computes by itself is real."""
    with _EmptyOnMeta():
        return build()


@torch.no_grad()
def fill(
    model: nn.Module,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    storage: Storage = "nf4",
    fp8: Collection[str] = (),
    content: Content | None = None,
) -> bool:
    """Give a model built by `build_empty` the weights in `folder`: linears as `storage` says, those named in fp8, all
    else in `dtype`.

    False when the files hold their tensors in other ways than the model, which transformers would translate; the
    model is of no use then.
    """
    files = files_of(model, folder)
    if files is None:
        return False
    fill_part(model, files, dtype=dtype, device=device, storage=storage, fp8=fp8, content=content)
    model.tie_weights()
    if not _is_filled(model, set(files)):
        return False
    model.to(device)
    return True


def files_of(model: nn.Module, folder: Path) -> dict[str, Held] | None:
    """Where files hold each tensor of a model built by `build_empty`, in the order they are to be read.

    None when they hold their tensors in other ways than the model, which transformers would translate. A tied weight
    is the embedding's, whichever of its names they have it under.
    """
    turned = {f"{name}.weight" for name, module in model.named_modules() if is_transposed(module)}
    tensors = read_tensors(folder)
    found = None if _has_fp32_parts(model) else find(tensors, model.state_dict(), turned)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return found and {
        tied[name] if name in tied and tied[name] not in found else name: held for name, held in found.items()
    }


@torch.no_grad()
def fill_part(
    model: nn.Module,
    files: Mapping[str, Held],
    *,
    dtype: torch.dtype,
    device: torch.device,
    storage: Storage,
    fp8: Collection[str] = (),
    reading: Reading | None = None,
    content: Content | None = None,
) -> None:
    """Read these tensors into the model, as `fill` does with all. UserError where they are not finite."""
    reading = reading or Reading()
    finite = Finite(torch.float32 if storage != "plain" else dtype)
    linears = linears_of_layers(model) if storage != "plain" else {}
    taken_over = {f"{name}.weight": str(storage) for name in linears}
    few = {*taken_over, *(f"{name}.{leaf}" for name in experts_of_layers(model) for leaf in STACKS)}
    if storage != "plain":
        check_rounding({name: files[name] for name in few & files.keys()}, storage)
    for name in experts_of_layers(model) if storage != "plain" else ():
        if any(f"{name}.{leaf}" in files for leaf in STACKS):
            _replace(model, name, QuantizedExperts(model.get_submodule(name), storage))
    ways = {"part": reading.part, "codes": taken_over, "content": content}
    for name, part, shape in read_ahead(files, pin=device.type == "cuda", **ways):
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if isinstance(part, Codes):
            bias = None if module.bias is None else module.bias.detach()
            _replace(model, owner, _taken_over(linears[owner], part.to(device), bias))
            finite.look(name, _scales_of(model.get_submodule(owner)))
            continue
        moved = part.to(device, non_blocking=True)
        if leaf in module._parameters or isinstance(module, QuantizedLinear | QuantizedExperts):
            finite.look(name, moved)
        value = reading.whole(name, moved, shape)
        is_quantized = isinstance(module, QuantizedExperts) or (owner in linears and leaf == "weight")
        if is_quantized and value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            value = value.float()
        if isinstance(module, QuantizedExperts):
            module.hold(leaf, value)
        elif is_quantized:
            bias = None if module.bias is None else module.bias.detach()
            _replace(model, owner, _quantized(linears[owner], value, bias, storage))
        elif owner in fp8 and leaf == "weight":
            _replace(model, owner, Fp8Base(value.to(dtype), None if module.bias is None else module.bias.detach()))
        else:
            value = value.to(dtype) if value.is_floating_point() else value
            value = alone(value) if value is part else value  # not the mapped file itself
            if leaf in module._parameters:
                module._parameters[leaf] = nn.Parameter(value)
            else:
                module._buffers[leaf] = value
    finite.say({name: held.entries[0].path.name for name, held in files.items()})


@torch.no_grad()
def quantize_linears(model: nn.Module, *, dtype: torch.dtype, device: torch.device, storage: Storage = "nf4") -> None:
    """Move a model to the device linear by linear, each quantized there, and experts so; the rest goes in `dtype`."""
    for name, linear in linears_of_layers(model).items():
        bias = None if linear.bias is None else linear.bias.detach().to(device, dtype)
        _replace(model, name, _quantized(linear, linear.weight.detach().to(device), bias, storage))
    for name, experts in experts_of_layers(model).items():
        quantized = QuantizedExperts(experts, storage)
        for leaf in STACKS:
            quantized.hold(leaf, getattr(experts, leaf).detach().to(device))
        _replace(model, name, quantized)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device, dtype)
    model.to(device)


@torch.no_grad()
def fill_randomly(model: nn.Module, *, dtype: torch.dtype, device: torch.device) -> None:
    """Give a model built by `build_empty` random weights, those of linears made in nf4: a 70B model in seconds."""
    for name, linear in linears_of_layers(model).items():
        outputs, inputs = reversed(linear.weight.shape) if is_transposed(linear) else linear.weight.shape
        bias = None if linear.bias is None else torch.zeros(outputs, dtype=dtype, device=device)
        weight4 = nf4.draw(outputs * inputs, device)
        _replace(model, name, Nf4Linear(weight4, (outputs, inputs), bias, is_transposed=is_transposed(linear)))
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                fill = torch.ones if parameter.ndim == 1 else torch.randn
                value = fill(parameter.shape, dtype=dtype, device=device)
                module._parameters[leaf] = nn.Parameter(value if parameter.ndim == 1 else value.mul_(0.02))
    model.tie_weights()
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


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module.train(model.training))


def _has_fp32_parts(model: nn.Module) -> bool:
    """Some models keep chosen modules in fp32 whatever they are loaded in; transformers knows which."""
    names = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return any(getattr(module, name, None) for module in model.modules() for name in names)


def _is_filled(model: nn.Module, names: set[str]) -> bool:
    """Whether every tensor came from a file, or shares its memory with one that did."""
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return False
    state = model.state_dict()
    filled = {state[name].data_ptr() for name in names if name in state}
    return all(tensor.data_ptr() in filled for tensor in state.values())
