"""Frozen weights that come from host memory: when they come, when they leave, and that nothing else changes."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from tunesmith.measure import bench
from tunesmith.model.quantized import build_empty
from tunesmith.parallel import host_weights
from tunesmith.parallel.activation import checkpointed
from tunesmith.parallel.host_weights import HostWeights
from tunesmith.parallel.prepare import Preparation, _move_buffers

LAYERS, WIDTH = 4, 8
CONFIG = Qwen3MoeConfig(
    hidden_size=256, intermediate_size=256, moe_intermediate_size=256, num_hidden_layers=6, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, num_experts=16, num_experts_per_tok=2, vocab_size=512,
)  # fmt: skip
QLORA = dataclasses.replace(bench.WORKLOADS["tiny"], method="qlora")


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


def test_what_surrounds_the_layers_leaves_them_where_they_are():
    """Its turn is the last, when the layers' weights are in host memory already."""
    model = build_empty(lambda: AutoModelForCausalLM.from_config(CONFIG))
    units = Preparation(model, bench.run_of(QLORA), torch.device("cpu"), torch.float32).units
    layer = model.model.layers[0]
    layer.register_buffer("base", torch.zeros(2))
    _move_buffers(units[-1], torch.device("meta"))
    assert model.model.rotary_emb.inv_freq.is_meta
    assert not layer.base.is_meta
    _move_buffers(units[0], torch.device("meta"))
    assert layer.base.is_meta


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_steps_on_a_gpu_are_the_same_and_the_weights_are_not_there(is_compiled):
    plan = bench.plan_for(QLORA, device="cuda", matmul_dtype="plain", checkpointed_layers=6, compiled=is_compiled)
    made, found = bench.batches(QLORA, 3), []
    for is_on_host in (False, True):
        before = torch.cuda.memory_allocated()
        step = bench.build_step(CONFIG, bench.run_of(QLORA), plan.changed(offload_parameters=is_on_host))
        held = torch.cuda.memory_allocated() - before
        losses = [step(batch, 1e-3).loss for batch in made]
        found.append((losses, held, torch.cuda.memory_allocated() - before))
        del step
        gc.collect()
    (losses, held, _), (losses_host, held_host, held_then) = found
    assert losses_host == pytest.approx(losses, rel=1e-3)  # atomic additions are in no order
    experts = 16 * 3 * 256 * 256 // 2  # bytes of a layer
    assert held - held_host > 6 * experts
    assert held_then - held_host < 4 * experts
