"""What several runs over one base share of their forward passes: the layers below the first adapter.

Without a gradient and without chance, such layers are a function of what the first of them is given. So what the last
of them gave for some input is kept, and taken when the same input comes again, in another run or another evaluation;
the layers in between let it pass. On a CPU that is the same to the last bit. Whether a model's layers tell each other
nothing besides is found by trying.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import xxhash
from torch import nn

from tunesmith.model.forward import packed_hidden_states, trial_inputs


class SharedPrefix:
    """Hidden states behind the frozen layers, by what went into them. Once its room is full, no more is kept: runs see
    their data in the same order, and what was kept first is asked for first."""

    def __init__(self) -> None:
        self.hits = 0
        self._room = 0
        self._kept: dict[bytes, torch.Tensor] = {}
        self._key: bytes | None = None
        """Of the pass that is under way, where it is new."""
        self._found: torch.Tensor | None = None
        """What the pass that is under way will give, where that is known."""
        self._chance: torch.Tensor | None = None

    @torch.no_grad()
    def put_on(self, model: nn.Module, layers: list[nn.Module], *, vocabulary: int, room: int) -> int:
        """Have the first of the model's layers, up to the first that is trained, use what is kept, in `room` bytes at
        most; returns how many they are, 0 where that would change what the model gives."""
        trained = (any(weight.requires_grad for weight in layer.parameters()) for layer in layers)
        count = next((number for number, is_trained in enumerate(trained) if is_trained), 0)
        if count == 0:
            return 0
        self._room = room - sum(kept.nbytes for kept in self._kept.values())
        chosen = layers[:count]
        own = [layer.forward for layer in chosen]
        for number, layer in enumerate(chosen):
            layer.forward = self._wrapped(layer, is_first=number == 0, is_last=number == count - 1)
        if self._is_equal(model, vocabulary):
            return count
        for layer, forward in zip(chosen, own, strict=True):
            layer.forward = forward
        return 0

    def _is_equal(self, model: nn.Module, vocabulary: int) -> bool:
        """Whether the model gives the same with what is kept of an input as without."""
        inputs = trial_inputs(vocabulary, next(model.parameters()).device)
        kept, room, hits, was_training = self._kept, self._room, self.hits, model.training
        self._kept, self._room = {}, 2**30
        model.eval()
        try:
            first = packed_hidden_states(model, inputs)
            try:
                second = packed_hidden_states(model, inputs)
            except Exception:  # layers that miss what others would have left for them fail in ways of their own
                return False
        finally:
            was_hit, self.hits = self.hits > hits, hits
            self._kept, self._room = kept, room
            self._key = self._found = None
            model.train(was_training)
        return was_hit and torch.equal(first, second)

    def _wrapped(self, layer: nn.Module, *, is_first: bool, is_last: bool) -> Callable[..., Any]:
        forward = layer.forward

        def shared(hidden: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            if is_first:
                self._begin(layer, hidden, arguments, named)
            if self._found is not None:
                if not is_last:
                    return hidden
                found, self._found = self._found, None
                return found.clone()
            given = forward(hidden, *arguments, **named)
            if not isinstance(given, torch.Tensor) or given.requires_grad:
                self._key = None
            if is_last:
                self._keep(given)
            return given

        return shared

    def _begin(self, layer: nn.Module, hidden: torch.Tensor, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._key = self._found = None
        if hidden.requires_grad or named.get("cu_seq_lens_q") is None:
            return
        digest = xxhash.xxh3_128(f"{layer.training} {torch.get_num_threads()}".encode())
        for value in (hidden, *arguments, *(one for pair in sorted(named.items()) for one in pair)):
            _add(digest, value)
        self._key = digest.digest()
        self._found = self._kept.get(self._key)
        self.hits += self._found is not None
        self._chance = torch.get_rng_state() if self._found is None else None

    def _keep(self, given: Any) -> None:
        key, self._key = self._key, None
        if key is None or given.nbytes > self._room:
            return
        if not torch.equal(torch.get_rng_state(), self._chance):  # dropout
            return
        self._kept[key] = given.detach().clone()
        self._room -= given.nbytes


def _add(digest: xxhash.xxh3_128, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {list(value.shape)}".encode())
        digest.update(value.detach().reshape(-1).contiguous().view(torch.uint8).numpy())
    elif isinstance(value, list | tuple):
        for one in value:
            _add(digest, one)
    elif isinstance(value, Mapping):
        for pair in value.items():
            _add(digest, pair)
    else:
        digest.update(repr(value).encode())
