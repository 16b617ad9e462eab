from __future__ import annotations

import pytest
import torch
from torch import nn

from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.optim import fused
from tunesmith.optim.build import Optimizer
from tunesmith.optim.fused import Fused
from tunesmith.optim.offload import Offload, visit_bytes


def make(kind: str = "adamw", *, dtype=torch.bfloat16, masters: bool = True, seed: int = 0, **how):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 300), nn.LayerNorm(300), nn.Linear(300, 3)).to(dtype)
    run = Run(model="x", data="x", optimizer=kind, weight_decay=0.1)
    states = run.optimizer_states or "fp32"
    return model, Optimizer(model.named_parameters(), run, master_weights=masters, states=states, **how)


def advance(model, optimizer, steps: range) -> list[float]:
    norms = []
    for step in steps:
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        optimizer.begin(1e-2)
        model(x).float().square().mean().backward()
        norms.append(optimizer.gradient_norm().item())
        optimizer.step(1e-2)
        optimizer.zero_grad()
    return norms


def assert_equal(one: Optimizer, other: Optimizer) -> None:
    found, expected = one.tensors(), other.tensors()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    for name, weight in one.weights.items():
        assert torch.equal(weight, other.weights[name]), name


@pytest.mark.parametrize("how", [{"offload": True}, {"release": True}, {"offload": True, "release": True}])
@pytest.mark.parametrize(
    ("kind", "masters"),
    [("adamw", True), ("adamw_8bit", True), ("adamw_4bit", False), ("adamw", False), ("lion", True)],
)
def test_in_host_memory_and_released_at_once_the_result_is_the_same(kind, masters, how, monkeypatch):
    monkeypatch.setattr(fused, "PIECE", 700)  # so that matrices visit in several pieces, one of them smaller
    plain_model, plain = make(kind, masters=masters)
    model, other = make(kind, masters=masters, **how)
    assert advance(model, other, range(4)) == advance(plain_model, plain, range(4))
    assert_equal(other, plain)


def test_saved_from_one_and_continued_with_the_other(monkeypatch):
    monkeypatch.setattr(fused, "PIECE", 700)
    plain_model, plain = make("adamw_8bit")
    advance(plain_model, plain, range(2))
    model, other = make("adamw_8bit", seed=1, offload=True, release=True)
    other.restore(plain.tensors())
    assert_equal(other, plain)
    assert advance(model, other, range(2, 4)) == advance(plain_model, plain, range(2, 4))
    assert_equal(other, plain)


def test_a_released_gradient_is_gone_when_backward_is_done():
    model, optimizer = make(release=True)
    optimizer.begin(1e-2)
    model(torch.ones(1, 4, dtype=torch.bfloat16)).float().sum().backward()
    assert all(weight.grad is None for weight in model.parameters())
    assert optimizer.gradient_norm() > 0


def test_weights_without_a_gradient_are_left_out_of_the_round():
    _, optimizer = make(offload=True)
    _, plain = make()
    for step, absent in enumerate(("", "2.weight", "", "0.bias", "1.weight")):
        for one in (optimizer, plain):
            for name, weight in one.weights.items():
                generator = torch.Generator().manual_seed(step)
                weight.grad = torch.randn(weight.shape, generator=generator).bfloat16() if name != absent else None
            one.step(1e-2)
    assert_equal(optimizer, plain)


def test_no_more_than_the_buffers_is_on_the_device(monkeypatch):
    monkeypatch.setattr(fused, "PIECE", 700)
    model, optimizer = make(offload=True)
    advance(model, optimizer, range(2))
    (part,) = optimizer.parts
    assert isinstance(part, Fused)
    assert part.offload is not None
    held = sum(buffer.memory.nbytes for buffer in part.offload.buffers)
    assert held == 3 * 3 * 2816  # two moments and the master of 700 values in fp32, each aligned
    assert all(state["exp_avg"].device.type == "cpu" for state in optimizer.states())


def test_what_visits_comes_back_changed_and_the_next_is_there_before_it_is_asked_for():
    host = [{"a": torch.full((4,), float(n)), "b": torch.full((2, 2), n, dtype=torch.uint8)} for n in range(5)]
    offload = Offload(torch.device("cpu"), max(map(visit_bytes, host)))
    for step in range(3):
        for number, tensors in enumerate(host):
            if step and number:
                assert number in offload.arrived
            with offload.visit(number, tensors) as here:
                here["a"] += 1
                here["b"] += 1
        offload.end_step()
    for number, tensors in enumerate(host):
        assert torch.equal(tensors["a"], torch.full((4,), number + 3.0))
        assert torch.equal(tensors["b"], torch.full((2, 2), number + 3, dtype=torch.uint8))


@pytest.mark.parametrize("how", ["offload", "release"])
def test_only_optimizers_that_go_weight_by_weight_can(how):
    with pytest.raises(UserError, match="choose adamw or lion"):
        make("muon", **{how: True})
