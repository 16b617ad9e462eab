"""A decoder as an ONNX graph without tracing each of its layers: torch's exporter takes three seconds for one, and most
of them do the same.

What surrounds the layers is traced with a stand-in for each of them, and of each kind of layer one by itself. Layers
are of a kind where they are called alike and run the same operators on tensors of the same shapes. The graph of a kind
is then put in for each of its layers, with that one's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tunesmith.model.structure import decoder_layers, replace_module

Export = Callable[..., Any]
"""torch's exporter, of a module, its inputs, their names, those of the outputs, and the dynamic shapes."""
PAST, PRESENT = "past_key_values.{}.{}", "present.{}.{}"
LEAVES = ("key", "value")
AFTER, WEIGHT = "after_layers", "layer."


class NotAlike(Exception):
    """The layers are called in a way for which there is no stand-in."""


@dataclass(frozen=True)
class Inputs:
    """Of the whole decoder, to trace it with."""

    tokens: torch.Tensor
    mask: torch.Tensor
    past: list[torch.Tensor]
    """Keys and values of each layer."""
    dynamic: dict[str, Any]


def cache_of(past: Sequence[torch.Tensor], first: int = 0) -> Any:
    """Keys and values of layers from `first` on."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for number, (keys, values) in enumerate(zip(past[::2], past[1::2], strict=True), start=first):
        cache.update(keys, values, number)
    return cache


def by_layers(model: nn.Module, inputs: Inputs, export: Export) -> Any:
    """The program that torch's exporter would make of all of it. NotAlike, or an error of the exporter's, where this
    model needs to be traced as a whole."""
    layers = decoder_layers(model)
    calls = _watch(model, layers, inputs)
    traced = {kind: _trace_layer(calls[kind], inputs, export) for kind in sorted({call.kind for call in calls})}
    program = _trace_surroundings(model, calls, inputs, export)
    _assemble(program.model.graph, calls, traced)
    return program


# How layers are called


@dataclass(frozen=True)
class _Call:
    number: int
    kind: int
    """The first layer that is called alike and does the same."""
    layer: nn.Module
    hidden: torch.Tensor
    rest: tuple[tuple, dict[str, Any]]
    past: list[torch.Tensor]
    given: list[torch.Tensor]
    """Tensors in `rest`."""
    places: tuple[int, ...]
    """Of these among all that the layers are given."""


class _Operators(TorchDispatchMode):
    """What a layer runs: operators, and on which of its tensors."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.names = {id(tensor): name for name, tensor in (*layer.named_parameters(), *layer.named_buffers())}
        self.kept: list[torch.Tensor] = []  # an identity may be taken again
        self.log: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.log.append(f"{func} {self.told(args)} {self.told(kwargs or {})} {self.told(found)}")
        return found

    def told(self, tree: Any) -> str:
        return repr(_mapped(tree, self._name))

    def _name(self, tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return type(tensor).__name__
        self.kept.append(tensor)
        return self.names.setdefault(id(tensor), str(len(self.names))), tuple(tensor.shape), str(tensor.dtype)


@torch.no_grad()
def _watch(model: nn.Module, layers: list[nn.Module], inputs: Inputs) -> list[_Call]:
    calls: list[_Call] = []
    seen: dict[str, int] = {}
    all_given: list[torch.Tensor] = []

    def before(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        running.append(_Operators(layer))
        running[-1].__enter__()

    def after(layer: nn.Module, args: tuple, kwargs: dict[str, Any], found: Any) -> None:
        operators = running.pop()
        operators.__exit__(None, None, None)
        if not args or not isinstance(found, torch.Tensor):
            raise NotAlike(type(layer).__name__)
        rest, given = (args[1:], kwargs), _tensors_of((args[1:], kwargs))
        places = tuple(_place(tensor, all_given) for tensor in given)
        told = "\n".join([str(places), _Operators(layer).told((args, kwargs)), *operators.log])
        kind = seen.setdefault(told, len(calls))
        past = inputs.past[2 * len(calls) : 2 * len(calls) + 2]
        calls.append(_Call(len(calls), kind, layer, args[0], rest, past, given, places))

    running: list[_Operators] = []
    hooks = [one.register_forward_pre_hook(before, with_kwargs=True) for one in layers]
    hooks += [one.register_forward_hook(after, with_kwargs=True) for one in layers]
    try:
        model(
            input_ids=inputs.tokens, attention_mask=inputs.mask, past_key_values=cache_of(inputs.past), use_cache=True
        )
    finally:
        for hook in hooks:
            hook.remove()
    if [call.layer for call in calls] != layers:
        raise NotAlike(type(model).__name__)
    return calls


def _place(tensor: torch.Tensor, among: list[torch.Tensor]) -> int:
    found = next((number for number, one in enumerate(among) if one is tensor), len(among))
    if found == len(among):
        among.append(tensor)
    return found


def _mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Arguments with their tensors and caches changed."""
    from transformers import Cache

    if isinstance(tree, torch.Tensor | Cache):
        return change(tree)
    if isinstance(tree, tuple | list):
        return type(tree)([_mapped(one, change) for one in tree])
    if isinstance(tree, dict):
        return {name: _mapped(one, change) for name, one in tree.items()}
    return tree


def _tensors_of(tree: Any) -> list[torch.Tensor]:
    found: list[Any] = []
    _mapped(tree, found.append)
    return [one for one in found if isinstance(one, torch.Tensor)]


# What is traced


class _StandIn(nn.Module):
    """In the place of a layer: what it is called with is heard, and goes on as it came."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.__dict__["of"] = layer  # which is no part of this
        self.heard: Any = None
        self.says: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["of"], name)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.heard = (hidden, (args, kwargs))
        return hidden if self.says is None else self.says


class _Surroundings(nn.Module):
    """All but the layers: what the first is given, what all are given beside that, and the logits of what the last
    gives."""

    def __init__(self, model: nn.Module, stand_ins: list[_StandIn]):
        super().__init__()
        self.model, self.stand_ins = model, stand_ins

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, past: list[torch.Tensor], after: torch.Tensor
    ) -> Any:
        self.stand_ins[-1].says = after
        found = self.model(
            input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache_of(past), use_cache=True
        )
        given: list[torch.Tensor] = []
        for one in self.stand_ins:
            for tensor in _tensors_of(one.heard[1]):
                _place(tensor, given)
        return found.logits, self.stand_ins[0].heard[0], *given


class OneLayer(nn.Module):
    def __init__(self, call: _Call):
        super().__init__()
        self.layer, self.call = call.layer, call

    def forward(self, hidden: torch.Tensor, past: list[torch.Tensor], given: list[torch.Tensor]) -> Any:
        cache, coming = cache_of(past, self.call.number), iter(given)
        args, kwargs = _mapped(self.call.rest, lambda one: next(coming) if isinstance(one, torch.Tensor) else cache)
        made = self.layer(hidden, *args, **kwargs)
        kept = cache.layers[self.call.number]
        return made, kept.keys, kept.values


def _trace_surroundings(model: nn.Module, calls: list[_Call], inputs: Inputs, export: Export) -> Any:
    given = max(place for call in calls for place in (-1, *call.places)) + 1
    names = ["input_ids", "attention_mask", *named(PAST, len(calls)), AFTER]
    told = ["logits", "before_layers", *(f"given.{place}" for place in range(given))]
    batch, new = inputs.dynamic["attention_mask"][0], inputs.dynamic["input_ids"][1]
    dynamic = {**inputs.dynamic, "after": {0: batch, 1: new}}
    places = {module: name for name, module in model.named_modules()}
    stand_ins = [_StandIn(call.layer) for call in calls]
    try:
        for one, call in zip(stand_ins, calls, strict=True):
            replace_module(model, places[call.layer], one)
        taken = (inputs.tokens, inputs.mask, inputs.past, calls[-1].hidden)
        return export(_Surroundings(model, stand_ins), taken, names, told, dynamic)
    finally:
        for call in calls:
            replace_module(model, places[call.layer], call.layer)


def _dynamic_of(given: torch.Tensor, inputs: Inputs) -> dict[int, Any]:
    """By its sizes, which are those of nothing else."""
    (batch, new), total = inputs.tokens.shape, inputs.mask.shape[1]
    known = {new: inputs.dynamic["input_ids"][1], total: inputs.dynamic["attention_mask"][1]}
    found = {axis: known[size] for axis, size in enumerate(given.shape) if size in known}
    return found | ({0: inputs.dynamic["input_ids"][0]} if given.shape[0] == batch else {})


def _trace_layer(call: _Call, inputs: Inputs, export: Export) -> Any:
    """As a graph that takes its weights as inputs, after the others."""
    from onnxscript import optimizer

    given = [one.clone(memory_format=torch.contiguous_format) for one in call.given]  # an expanded one has strides of 0
    dynamic = {
        "hidden": inputs.dynamic["input_ids"],
        "past": inputs.dynamic["past"][:2],
        "given": [_dynamic_of(one, inputs) for one in given],
    }
    names = ["hidden", *LEAVES, *(f"given.{n}" for n in range(len(call.given)))]
    told = ["hidden_after", *(f"{leaf}_after" for leaf in LEAVES)]
    layer = OneLayer(call)
    model = export(layer, (call.hidden, call.past, given), names, told, dynamic, optimize=False).model
    for name, value in list(model.graph.initializers.items()):
        if name.startswith(WEIGHT):  # constants would be folded
            del model.graph.initializers[name]
            value.const_value = None
            model.graph.inputs.append(value)
    optimizer.optimize(model)
    return model.graph


# One graph of them all


def _assemble(graph: Any, calls: list[_Call], traced: dict[int, Any]) -> None:
    """The layers' graphs into that of what surrounds them."""
    import onnx_ir as ir

    inputs = {value.name: value for value in graph.inputs}
    logits, hidden, *given = graph.outputs
    outputs = [logits]
    constants = {kind: _constants(graph, one, f"kind_{kind}") for kind, one in traced.items()}
    for call in calls:
        own, weights = traced[call.kind], _Weights(graph, call)
        past = [inputs[PAST.format(call.number, leaf)] for leaf in LEAVES]
        begins = [hidden, *past, *(given[place] for place in call.places)]
        values = {**constants[call.kind], **dict(zip(own.inputs, begins, strict=False))}
        names = {value: value.name.removeprefix(WEIGHT) for value in own.inputs[len(begins) :]}
        for node in own:
            transposed = names.get(node.inputs[0]) if node.op_type == "Transpose" else None
            if transposed is not None and weights.tensors[transposed].ndim == 2:
                values[node.outputs[0]] = weights.take(transposed, is_transposed=True)
                continue
            taken = [weights.take(names[one]) if one in names else values.get(one) for one in node.inputs]
            made = [ir.Value(name=f"layer_{call.number}.{one.name}", type=one.type) for one in node.outputs]
            values |= dict(zip(node.outputs, made, strict=True))
            attributes = list(node.attributes.values())
            graph.append(ir.Node(node.domain, node.op_type, taken, attributes, outputs=made, name=made[0].name))
        hidden, *kept = (values[one] for one in own.outputs)
        for leaf, value, before in zip(LEAVES, kept, past, strict=True):
            value.name = PRESENT.format(call.number, leaf)
            value.shape = ir.Shape(["batch", before.shape[1], "total_sequence", before.shape[3]])
            outputs.append(value)
    last = inputs[AFTER]
    for node, place in list(last.uses()):
        if node.op_type == "Shape" and node.attributes.get_int("end", 3) <= 2:  # of batch and tokens
            node.replace_input_with(place, inputs["input_ids"])
    last.replace_all_uses_with(hidden)
    graph.inputs.remove(last)
    graph.outputs[:] = outputs
    graph.sort()


def _constants(graph: Any, own: Any, prefix: str) -> dict[Any, Any]:
    """Those of a layer's graph, in that of all."""
    import onnx_ir as ir

    found = {}
    for value in own.initializers.values():
        held = {"type": value.type, "shape": value.shape, "const_value": value.const_value}
        found[value] = ir.Value(name=f"{prefix}.{value.name}", **held)
        graph.register_initializer(found[value])
    return found


class _Weights:
    """Of a layer, into a graph as they are taken; those of linears transposed, as matmuls want them."""

    def __init__(self, graph: Any, call: _Call):
        self.graph, self.prefix = graph, f"layer_{call.number}"
        self.tensors = {**dict(call.layer.named_parameters()), **dict(call.layer.named_buffers())}
        self.put: dict[tuple[str, bool], Any] = {}

    def take(self, name: str, *, is_transposed: bool = False) -> Any:
        import onnx_ir as ir

        if (name, is_transposed) not in self.put:
            tensor = self.tensors[name].detach()
            held = ir.tensor((tensor.t() if is_transposed else tensor).contiguous().numpy())
            made = ir.Value(name=f"{self.prefix}.{name}{'.transposed' if is_transposed else ''}", const_value=held)
            made.type, made.shape = ir.TensorType(held.dtype), held.shape
            self.graph.register_initializer(made)
            self.put[name, is_transposed] = made
        return self.put[name, is_transposed]


def named(pattern: str, layers: int) -> list[str]:
    return [pattern.format(number, leaf) for number in range(layers) for leaf in LEAVES]
