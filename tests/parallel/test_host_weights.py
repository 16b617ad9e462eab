"""Frozen weights that come from host memory: when they come, when they leave, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tunesmith.parallel import host_weights
from tunesmith.parallel.activation import checkpointed
from tunesmith.parallel.host_weights import HostWeights

LAYERS, WIDTH = 4, 8


class Layer(nn.Module):
    """A frozen linear, and one that is trained."""

    def __init__(self, said: list[str] | None, number: int):
        super().__init__()
        self.base, self.own = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH)
        self.said, self.number = said, number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.said is not None:
            self.said.append(f"compute {self.number}")
        return x + self.base(torch.tanh(self.base(x) + self.own(x)))


def model(said: list[str] | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(said, number) for number in range(LAYERS)))


def step(layers: nn.Sequential) -> list[torch.Tensor]:
    layers(torch.ones(2, WIDTH)).square().sum().backward()
    found = [weight.grad for weight in layers.parameters() if weight.grad is not None]
    layers.zero_grad()
    return found


@pytest.mark.parametrize("way", ["plain", "checkpointed", "compiled", "checkpointed and compiled"])
def test_gradients_are_those_of_weights_on_the_device(way):
    every = []
    for has_host in (False, True):
        layers = model()
        for layer in layers:
            layer.forward = checkpointed(layer.forward) if "checkpointed" in way else layer.forward
            layer.forward = torch.compile(layer.forward, backend="aot_eager") if "compiled" in way else layer.forward
        if has_host:
            HostWeights(torch.device("cpu")).take(list(layers))
        first = step(layers)
        with torch._dynamo.config.patch(error_on_recompile=True):
            every.append([first, step(layers)])
    for expected, found in zip(*every, strict=True):
        assert len(found) == 2 * LAYERS
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_the_next_layer_comes_while_one_computes_and_two_are_there_at_a_time(monkeypatch):
    said: list[str] = []
    layers, weights = model(said), HostWeights(torch.device("cpu"))
    weights.take(list(layers))
    number_of = {id(one): number for number, one in enumerate(weights.layers)}
    for what in ("come", "leave"):
        real = getattr(host_weights._Weights, what)

        def noted(one, *arguments, real=real, what=what):
            said.append(f"{what} {number_of[id(one)]}")
            real(one, *arguments)

        monkeypatch.setattr(host_weights._Weights, what, noted)
    step(layers)
    assert said == [
        *("come 0", "come 1", "compute 0"),
        *("leave 0", "come 2", "compute 1"),
        *("leave 1", "come 3", "compute 2"),
        "compute 3",  # the last one and the one before it stay for the backward pass
        *("leave 3", "come 1"),
        *("leave 2", "come 0"),
    ]
    said.clear()
    step(layers)  # which begins with the layers that the backward pass has ended with
    assert said[:3] == ["compute 0", "leave 0", "come 2"]


def test_what_is_not_on_the_device_cannot_be_read_there():
    layers, weights = model(), HostWeights(torch.device("cpu"))
    before = layers[3].base.weight.clone()
    weights.take(list(layers))
    weights.use(0, 1)
    assert weights.layers[3].block.untyped_storage().size() == 0
    assert layers[3].base.weight.untyped_storage().data_ptr() == weights.layers[3].home.untyped_storage().data_ptr()
    assert torch.equal(layers[3].base.weight, before)
    assert layers[0].base.weight.untyped_storage().data_ptr() == weights.layers[0].block.untyped_storage().data_ptr()
    assert not layers[0].base.weight.requires_grad
    assert "own.weight" in dict(layers[0].named_parameters())


def test_a_weight_that_layers_share_stays_where_it_is():
    layers, weights = model(), HostWeights(torch.device("cpu"))
    layers[1].base = layers[0].base
    weights.take(list(layers))
    assert (weights.layers[0].size, weights.layers[1].size) == (0, 0)
    assert weights.layers[2].size > 0
    step(layers)


class Stream:
    """Notes what it is told."""

    def __init__(self, said: list[str]):
        self.said = said

    def __str__(self) -> str:
        return "a stream"

    def wait_stream(self, other: object) -> None:
        self.said.append(f"wait for what {other} has been given")

    def wait_event(self, event: str) -> None:
        self.said.append(f"compute waits for {event}")

    def record_event(self) -> str:
        self.said.append("mark")
        return "the copy"


def test_a_copy_waits_for_the_layers_before_and_a_layer_for_its_own_copy(monkeypatch):
    said: list[str] = []
    layers, weights = model(), HostWeights(torch.device("cpu"))
    weights.take(list(layers))
    compute, copies = Stream(said), Stream(said)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: torch.no_grad())
    weights.stream = copies
    weights.use(0, 1)
    waits = "wait for what a stream has been given"
    assert said == [waits, "mark", waits, "mark", "compute waits for the copy"]
    said.clear()
    weights.use(1, 2)  # the second is on its way since the first was called: one new copy, and one wait
    assert said == [waits, "mark", "compute waits for the copy"]
