from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.measure import bench
from tunesmith.optim import fused, offload, scratch
from tunesmith.optim.build import Optimizer
from tunesmith.optim.fused import Fused
from tunesmith.optim.offload import FromDisk, Offload, visit_bytes


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Where runs write, and states on disk are."""
    monkeypatch.chdir(tmp_path)


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


HOW = [
    {"in_backward": True},
    *({"offload": home, "in_backward": once} for home in ("host", "disk") for once in (False, True)),
]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("kind", "masters"),
    [("adamw", True), ("adamw_8bit", True), ("adamw_4bit", False), ("adamw", False), ("lion", True)],
)
def test_in_host_memory_on_disk_and_released_at_once_the_result_is_the_same(kind, masters, how, monkeypatch):
    small_pieces(monkeypatch)
    plain_model, plain = make(kind, masters=masters)
    model, other = make(kind, masters=masters, **how)
    assert advance(model, other, range(4)) == advance(plain_model, plain, range(4))
    assert_equal(other, plain)


@pytest.mark.parametrize("home", ["host", "disk"])
def test_saved_from_one_and_continued_with_the_other(home, monkeypatch):
    small_pieces(monkeypatch)
    plain_model, plain = make("adamw_8bit")
    advance(plain_model, plain, range(2))
    model, other = make("adamw_8bit", seed=1, offload=home, in_backward=True)
    other.restore(plain.tensors())
    assert_equal(other, plain)
    assert advance(model, other, range(2, 4)) == advance(plain_model, plain, range(2, 4))
    assert_equal(other, plain)
    back_model, back = make("adamw_8bit", seed=2)
    back.restore(other.tensors())
    assert advance(back_model, back, range(4, 6)) == advance(plain_model, plain, range(4, 6))
    assert_equal(back, plain)


def test_what_is_saved_is_read_into_its_place_on_disk():
    model, one = make(offload="disk")
    advance(model, one, range(2))
    saved = {name: tensor.clone() for name, tensor in one.tensors().items()}
    _, other = make(offload="disk", seed=1)
    rooms = {name: other.room(name, tuple(tensor.shape), tensor.dtype) for name, tensor in saved.items()}
    for name, tensor in other.tensors().items():
        assert rooms[name].data_ptr() == tensor.data_ptr(), name
        rooms[name].copy_(saved[name])
    other.restore(rooms)
    assert_equal(other, one)
    assert other.room("optimizer/exp_avg/0.weight", (2, 2), torch.float32).shape == (2, 2)
    _, another = make("lion", offload="disk")
    for name, tensor in saved.items():
        another.room(name, tuple(tensor.shape), tensor.dtype).copy_(tensor)
    another.restore(saved)
    assert not any(value.any() for state in another.states() for value in state.values())  # it starts afresh


def test_adamw_of_torch_and_the_one_that_offloads_go_on_from_each_other():
    whole_model, whole = make(dtype=torch.float32, masters=False)
    norms = advance(whole_model, whole, range(6))
    model, one = make(dtype=torch.float32, masters=False)
    found = advance(model, one, range(2))
    for steps, how in ((range(2, 4), {"offload": "disk"}), (range(4, 6), {})):
        saved = {name: tensor.clone() for name, tensor in one.tensors().items()}
        model, one = make(dtype=torch.float32, masters=False, seed=3, **how)
        assert isinstance(one.parts[0], Fused) == bool(how)
        one.restore(saved)
        found += advance(model, one, steps)
    assert found == pytest.approx(norms, rel=1e-5)


def test_a_file_of_states_has_no_name_and_ends_with_its_process(tmp_path):
    model, optimizer = make(offload="disk")
    advance(model, optimizer, range(1))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    (part,) = optimizer.parts
    held = sum(tensor.nbytes for name, tensor in optimizer.tensors().items() if "/step/" not in name)
    size = os.fstat(part.scratch._file).st_size
    assert held <= size <= held + 3 * 256 * len(optimizer.weights)


def test_a_disk_without_room_is_one_sentence(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def go_on():
        advance(model, optimizer, range(2))
        optimizer.tensors()

    with monkeypatch.context() as patch:
        patch.setattr(scratch.shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
        with pytest.raises(UserError, match=r"iB for each rank, and .* has 100 bytes free; make room there"):
            make(offload="disk")
    with monkeypatch.context() as patch:
        patch.setattr(scratch.os, "posix_fallocate", full)
        with pytest.raises(UserError, match="cannot hold them: No space left on device; make room there"):
            make(offload="disk")
    model, optimizer = make(offload="disk")
    monkeypatch.setattr(scratch.os, "pwrite", full)
    with pytest.raises(UserError, match="could not be written: No space left on device; when that is put right"):
        go_on()


def test_a_released_gradient_is_gone_when_backward_is_done():
    model, optimizer = make(in_backward=True)
    optimizer.begin(1e-2)
    model(torch.ones(1, 4, dtype=torch.bfloat16)).float().sum().backward()
    assert all(weight.grad is None for weight in model.parameters())
    assert optimizer.gradient_norm() > 0


def small_pieces(monkeypatch):
    """So that matrices visit in several pieces, one of them smaller."""
    monkeypatch.setattr(fused, "PIECE", 700)
    monkeypatch.setattr(fused, "DISK_PIECE", 500)


@pytest.mark.parametrize("home", ["host", "disk"])
def test_weights_without_a_gradient_are_left_out_of_the_round(home):
    _, optimizer = make(offload=home)
    _, plain = make()
    for step, absent in enumerate(("", "2.weight", "", "0.bias", "1.weight")):
        for one in (optimizer, plain):
            for name, weight in one.weights.items():
                generator = torch.Generator().manual_seed(step)
                weight.grad = torch.randn(weight.shape, generator=generator).bfloat16() if name != absent else None
            one.step(1e-2)
    assert_equal(optimizer, plain)


def test_no_more_than_the_buffers_is_on_the_device(monkeypatch):
    small_pieces(monkeypatch)
    model, optimizer = make(offload="host")
    advance(model, optimizer, range(2))
    (part,) = optimizer.parts
    assert isinstance(part, Fused)
    assert part.offload is not None
    held = sum(buffer.memory.nbytes for buffer in part.offload.buffers)
    assert held == 4 * 3 * 2816  # two moments and the master of 700 values in fp32, each aligned
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


def test_from_disk_by_way_of_other_buffers_as_on_a_gpu(tmp_path):
    file = scratch.Scratch(tmp_path, 5 * 2 * 256)
    home = [{"a": file.zeros((4,), torch.float32), "b": file.zeros((2, 3), torch.uint8)} for _ in range(5)]
    offload = FromDisk(torch.device("cpu"), max(map(visit_bytes, home)), file)
    for buffer in offload.buffers:
        buffer.staging = torch.empty_like(buffer.memory)
    for _ in range(3):
        for number, tensors in enumerate(home):
            if number != 2:  # which has no gradient
                with offload.visit(number, tensors) as here:
                    here["a"] += number
                    here["b"] += 1
        offload.end_step()
    offload.wait()
    for number, tensors in enumerate(home):
        assert torch.equal(tensors["a"], torch.full((4,), 3.0 * number if number != 2 else 0.0))
        assert torch.equal(tensors["b"], torch.full((2, 3), 3 if number != 2 else 0, dtype=torch.uint8))


class Late:
    """What a device has queued beside its own work, done as late as may be: when something waits for it."""

    def __init__(self, monkeypatch):
        self.queue: list[Callable[[], object]] = []
        self.done = 0
        monkeypatch.setattr(offload, "_copy", self.later(offload._copy))
        monkeypatch.setattr(fused, "update_", self.later(fused.update_))
        monkeypatch.setattr(Offload, "mark", lambda _: len(self.queue))
        monkeypatch.setattr(Offload, "let_wait", lambda _, event: self.catch_up(event or 0))

    def later(self, function):
        return lambda *arguments, **named: self.queue.append(partial(function, *arguments, **named))

    def catch_up(self, until: int) -> None:
        while self.done < until:
            self.queue[self.done]()
            self.done += 1

    @property
    def waiting(self) -> int:
        return len(self.queue) - self.done


@pytest.mark.parametrize("masters", [True, False])
def test_a_forward_pass_begins_while_weights_are_updated_and_finds_each_updated(masters, monkeypatch):
    workload = bench.Workload("tiny", "full", 2, 32)
    plan = bench.plan_for(workload, device="cpu", matmul_dtype="plain", checkpointed_layers=1, compiled=False)
    plan = plan.changed(precision="bf16", master_weights=masters, optimizer_states="fp32")
    expected_step = bench.build(workload, plan)
    expected = [expected_step(batch, 1e-2).loss for batch in bench.batches(workload, 4)]
    late = Late(monkeypatch)
    step = bench.build(workload, plan.changed(offload_optimizer="host"))
    waiting, held = [], []

    def look(*_) -> None:
        waiting.append(late.waiting)
        held.append(step.optimizer.held_over())

    for layer in step.model.model.layers:
        layer.register_forward_pre_hook(look)
    found = [step(batch, 1e-2).loss for batch in bench.batches(workload, 4)]
    assert found == expected
    layer = sum(weight.nbytes for weight in step.model.model.layers[0].parameters())
    assert held == [0, 0, *[layer, 0] * 3]
    assert all(waiting[2::2])
    assert not any(waiting[3::2])
    step.optimizer.finish_update()
    assert not late.waiting
    assert_equal(step.optimizer, expected_step.optimizer)


@pytest.mark.parametrize("how", [{"offload": "host"}, {"offload": "disk"}, {"in_backward": True}])
def test_only_optimizers_that_go_weight_by_weight_can(how):
    with pytest.raises(UserError, match="choose adamw or lion"):
        make("muon", **how)
