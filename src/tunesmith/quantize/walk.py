"""One pass over a model, a decoder layer at a time: each is quantized with what calibration has put into it, and all
that is to be measured goes along.

The model is called once, with these rows of tokens one below the other, and each layer treats them differently:

    calibration    through quantized layers, so that a layer makes good what those before it have lost
    full           through the layers as they were
    quantized      through quantized layers
    one by one     a few of the measured rows for each layer, through full layers and that one quantized

So weights are read once, no more than a layer of them is in memory, and perplexities before, after and by layer come
out of the same pass. The head is applied a few rows at a time, by the model itself, with layers that hand over what
they are given.

Legend: B rows, T places, K inputs of a linear.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tunesmith.errors import UserError
from tunesmith.model import load
from tunesmith.model.content import Content
from tunesmith.model.source import find_source
from tunesmith.model.structure import decoder_layers, linears_of_layers, put_tensor, replace_module
from tunesmith.quantize.rows import Rows
from tunesmith.run.base import check_base
from tunesmith.run.streamed import StreamedModel, Weights

CALL_TOKENS = 2048
"""That a layer, or the head, is given at once."""


@dataclass
class Inputs:
    """What calibration has put into a linear."""

    hessian_kk: torch.Tensor
    """X.T @ X, over tokens."""
    largest_k: torch.Tensor
    tokens: int = 0

    def add(self, x_tk: torch.Tensor) -> None:
        self.hessian_kk.addmm_(x_tk.t(), x_tk)
        self.largest_k = torch.maximum(self.largest_k, x_tk.abs().amax(0))
        self.tokens += x_tk.shape[0]


@dataclass(frozen=True)
class LayerWork:
    """A layer whose weights are there, for a method to quantize in place."""

    number: int
    name: str
    module: nn.Module
    linears: dict[str, nn.Linear]
    """By their names in the model."""
    inputs: dict[str, Inputs]
    """Of those linears; empty without calibration."""
    call: Callable[[], torch.Tensor]
    """The layer on a little data."""


@dataclass(frozen=True)
class LayerError:
    name: str
    weight_error: float
    """Of its linears, relative to them."""
    output_error: float
    """Of what the layer adds to its input, for the same input."""
    perplexity: float
    """With this layer alone quantized."""


@dataclass(frozen=True)
class Measured:
    layers: list[LayerError]
    full: float
    """Perplexity of the model as it was."""
    quantized: float
    sample: float
    """Of the model as it was, on the rows of which each layer's is told."""
    logits: torch.Tensor
    """Of the quantized model on the first measured rows."""


class _Passed(Exception):
    """All layers are done; the head is called apart."""


class Walk(StreamedModel):
    def __init__(
        self,
        weights: Weights,
        quantize: Callable[[LayerWork], float],
        *,
        calibration: Rows | None,
        measured: Rows,
        sample: int,
        kept: tuple[int, int],
        progress: Callable[[str, int, int | None], None],
    ):
        """`quantize` changes a layer in place, and tells how far its weights are from what they were.
        `sample`: rows of which each layer's perplexity is told; `kept`: rows and places of which the quantized model's
        logits are returned."""
        super().__init__(weights)
        self.content = Content()
        with load.reading(weights.run, "weights"), load.quiet():
            form = {"dtype": torch.float32, "storage": "plain"}
            self.source = find_source(self.model, weights.base, **form, content=self.content)
        self.quantize, self.progress, self.kept = quantize, progress, kept
        self.names = {module: name for name, module in self.model.named_modules()}
        self.layers = decoder_layers(self.model)
        if not self.layers or self._layers_share_weights(self.layers):
            raise UserError("Layers of this model share weights, so that none can be quantized by itself.")
        linears = linears_of_layers(self.model)
        self.linears = [
            {name: one for name, one in linears.items() if name.startswith(f"{self.names[layer]}.")}
            for layer in self.layers
        ]
        self.measured, self.sample = measured, min(sample, len(measured))
        self._arrange(calibration)
        self.errors: list[tuple[str, float, float]] = []
        self.is_passed = False
        self.is_tuple = False

    def _arrange(self, calibration: Rows | None) -> None:
        """All rows in one batch; `calibrated`, `full`, `done` and `alone[layer]` say where in it each kind is."""
        length = max(self.measured.ids_bt.shape[1], calibration.ids_bt.shape[1] if calibration else 0)
        measured = self.measured.filled(length)
        parts = [calibration.filled(length)] if calibration else []
        parts += [measured, measured, *[measured[: self.sample]] * len(self.layers)]
        edges = [0]
        for part in parts:
            edges.append(edges[-1] + len(part))
        places = [range(*pair) for pair in itertools.pairwise(edges)]
        self.calibrated = places.pop(0) if calibration else range(0)
        self.full, self.done, *self.alone = places
        ids = torch.cat([part.ids_bt for part in parts])
        self.is_text_bt = torch.cat([part.is_text_bt for part in parts])
        if ids.shape[0] == ids.shape[1]:  # a first dimension must tell rows from places
            ids, self.is_text_bt = (nn.functional.pad(one, (0, 1)) for one in (ids, self.is_text_bt))
        self.ids_bt = ids

    @torch.no_grad()
    def run(self) -> Measured:
        for number, layer in enumerate(self.layers):
            layer.forward = functools.partial(self._layer, number, layer.forward)
        with self._streaming(), load.quiet():
            with contextlib.suppress(_Passed):
                self.model(input_ids=self.ids_bt, use_cache=False)
            self.is_passed = True
            full, quantized = (self._perplexity(rows, self.measured) for rows in (self.full, self.done))
            few = self.measured[: self.sample]
            sample = self._perplexity(self.full[: self.sample], few)
            alone = []
            for number, rows in enumerate(self.alone):
                self.progress("Measuring layers", number, len(self.alone))
                alone.append(self._perplexity(rows, few))
            logits = self._logits(self.done[: self.kept[0]])[:, : self.kept[1]].clone()
        layers = [LayerError(*error, perplexity) for error, perplexity in zip(self.errors, alone, strict=True)]
        return Measured(layers, full, quantized, sample, logits)

    # Layers

    def _layer(self, number: int, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        if self.is_passed:
            return (self.given,) if self.is_tuple else self.given
        self.progress("Quantizing layers", number, len(self.layers))
        call = _Call(forward, args, kwargs, self.ids_bt.shape[0], self.ids_bt.shape[1])
        layer, linears = self.layers[number], self.linears[number]
        out_bth = torch.empty_like(call.hidden)

        def through(rows: range) -> None:
            for some, found in call.on(rows):
                out_bth[some.start : some.stop] = found

        through(self.full)
        for earlier in self.alone[:number]:
            through(earlier)
        inputs = self._calibrated(call, linears)
        first = self.full[:1]
        work = LayerWork(number, self.names[layer], layer, linears, inputs, lambda: call.all(first))
        weight_error = self.quantize(work)
        through(self.calibrated)
        through(self.done)
        through(self.alone[number])
        same = slice(self.full.start, self.full.start + self.sample)
        for later in self.alone[number + 1 :]:
            out_bth[later.start : later.stop] = out_bth[same]
        text = self.is_text_bt[same]
        mine, full = out_bth[self.alone[number].start : self.alone[number].stop][text], out_bth[same][text]
        added = (full - call.hidden[same][text]).norm().clamp(min=1e-30)
        self.errors.append((self.names[layer], weight_error, ((mine - full).norm() / added).item()))
        self.is_tuple = call.is_tuple
        if number == len(self.layers) - 1:
            self.hidden = out_bth
            raise _Passed
        return (out_bth, *call.rest) if call.is_tuple else out_bth

    def _calibrated(self, call: _Call, linears: dict[str, nn.Linear]) -> dict[str, Inputs]:
        """What the calibration rows put into the linears; those that share an input share this."""
        found: dict[str, Inputs] = {}
        if not self.calibrated:
            return found
        leaders: dict[str, str] = {}
        seen: list[tuple[str, torch.Tensor]] = []
        text: list[torch.Tensor] = []

        def look(name: str, _: nn.Module, args: tuple) -> None:
            x = args[0]
            if name not in leaders:
                leaders[name] = next((other for other, one in seen if one is x), name)
            seen.append((name, x))
            if leaders[name] != name:
                return
            flat, is_text = x.reshape(-1, x.shape[-1]), text[0].reshape(-1)
            width = x.shape[-1]
            own = found.setdefault(name, Inputs(torch.zeros(width, width), torch.zeros(width)))
            own.add(flat[is_text] if len(flat) == len(is_text) else flat)

        hooks = [one.register_forward_pre_hook(functools.partial(look, name)) for name, one in linears.items()]
        try:
            for some in call.pieces(self.calibrated):
                seen.clear()
                text[:] = [self.is_text_bt[some.start : some.stop]]
                call.all(some)
        finally:
            for hook in hooks:
                hook.remove()
        return {name: found[leader] for name, leader in leaders.items()}

    # What surrounds them

    def _read(self, name: str, module: nn.Module, args: Any) -> None:
        if not (self.is_passed and module in self.layers):
            super()._read(name, module, args)
            self._merge(name)

    def _free(self, name: str, module: nn.Module, *rest: Any) -> None:
        if self.is_passed and module in self.layers:
            return
        for leaf, parameter in list(module.named_parameters(remove_duplicate=False)):
            put_tensor(module, leaf, torch.empty(parameter.shape, device="meta"))

    def _merge(self, name: str) -> None:
        """Adapters into the weights of the unit that was read."""
        for linear in self.weights.adapted:
            if linear.startswith(f"{name}."):
                adapter = self.model.get_submodule(linear)
                merged = adapter.merged(adapter.base.weight)
                adapter.base.weight = nn.Parameter(merged, requires_grad=False)
                replace_module(self.model, linear, adapter.base)

    def others(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors as the files have them. Then it is known whether all was of the base that was trained over."""
        for name, tensor, _ in self._from_files([name for name in names if name in self.source.names]):
            yield name, tensor
        if self.weights.run.has_adapters:
            check_base(self.weights.folder, self.weights.run, self.content)

    def _logits(self, rows: range) -> torch.Tensor:
        self.given = self.hidden[rows.start : rows.stop]
        return self.model(input_ids=self.ids_bt[rows.start : rows.stop], use_cache=False).logits.float()

    def _perplexity(self, rows: range, targets: Rows) -> float:
        total, count = 0.0, 0.0
        step = max(1, CALL_TOKENS // self.ids_bt.shape[1])
        width = targets.ids_bt.shape[1]
        for start in range(0, len(rows), step):
            some = targets[start : start + step]
            logits = self._logits(rows[start : start + step])[:, : width - 1]
            labels, weights = some.ids_bt[:, 1:], some.weights_bt[:, 1:]
            losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            total += (losses.double() * weights.flatten()).sum().item()
            count += weights.double().sum().item()
        return math.exp(min(50.0, total / max(count, 1e-30)))


class _Call:
    """A call of a layer with all rows, to be made with some of them at a time."""

    def __init__(self, forward: Callable, args: tuple, kwargs: dict[str, Any], rows: int, places: int):
        self.forward, self.args, self.kwargs, self.rows, self.places = forward, args, kwargs, rows, places
        self.hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        self.is_tuple, self.rest = False, ()

    def pieces(self, rows: range) -> Iterator[range]:
        step = max(1, CALL_TOKENS // self.places)
        for start in range(0, len(rows), step):
            yield rows[start : start + step]

    def on(self, rows: range) -> Iterator[tuple[range, torch.Tensor]]:
        for some in self.pieces(rows):
            yield some, self.all(some)

    def all(self, rows: range) -> torch.Tensor:
        found = self.forward(*self._of(self.args, rows), **self._of(self.kwargs, rows))
        self.is_tuple = isinstance(found, tuple)
        if self.is_tuple:
            found, *rest = found
            self.rest = tuple(rest)
        return found

    def _of(self, value: Any, rows: range) -> Any:
        """What of an argument belongs to these rows: of tensors, and of those within others."""
        if isinstance(value, torch.Tensor):
            has_rows = value.ndim > 1 and value.shape[0] == self.rows
            return value[rows.start : rows.stop] if has_rows else value
        if isinstance(value, dict):
            return {name: self._of(one, rows) for name, one in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(self._of(one, rows) for one in value)
        return value
