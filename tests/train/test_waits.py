"""A step is queued on the device without the host waiting for it once: only reading the loss waits."""

from __future__ import annotations

import dataclasses

import plain_flash4
import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from tunesmith.measure import bench
from tunesmith.model import forward
from tunesmith.parallel import compile
from tunesmith.train import step as train_step
from tunesmith.train.vitals import Sample

WORKLOAD = dataclasses.replace(bench.WORKLOADS["tiny"], accumulation_steps=2)
ASKS = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "is_nonzero", "equal", "bincount")
"""Operators whose result, or its size, is only known on the host once the device has computed it."""


class Waits(TorchDispatchMode):
    """Counts what would make a host wait, on a machine without a device: a value is on the device when it was put
    there, or computed from such a value."""

    def __init__(self, *tensors: torch.Tensor):
        super().__init__()
        self.on_device = WeakIdKeyDictionary(dict.fromkeys(tensors, True))
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        named = named or {}
        inputs = [leaf for leaf in tree_leaves((arguments, named)) if isinstance(leaf, torch.Tensor)]
        if any(tensor in self.on_device for tensor in inputs):
            name = function._schema.name.removeprefix("aten::").lstrip("_")
            has_mask = name == "index" and any(tensor.dtype == torch.bool for tensor in inputs[1:])
            if has_mask or any(name.startswith(ask.lstrip("_")) for ask in ASKS):
                self.found.append(name)
        out = function(*arguments, **named)
        if any(tensor in self.on_device for tensor in inputs):
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    self.on_device[tensor] = True
        return out


@pytest.fixture
def build(monkeypatch):
    """A step as on a GPU: attention by an operator, and the loss looked at when it is asked for."""
    plain_flash4.install(monkeypatch)
    monkeypatch.setattr(train_step.TrainStep, "checks_before_update", False)

    def make(method: str = "lora", **changes):
        workload = dataclasses.replace(WORKLOAD, method=method)
        plan = bench.plan_for(workload, device="cpu", matmul_dtype="plain", checkpointed_layers=0, compiled=False)
        step = bench.build(workload, plan.changed(attention="flash-attn-4", **changes))
        step.sample = Sample(step.optimizer.weights.values())
        waits = Waits(*step.model.parameters(), *step.model.buffers())

        def to_device(*arguments):
            inputs = move(*arguments)
            values = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
            moved = {name: value.clone() for name, value in values.items() if isinstance(value, torch.Tensor)}
            waits.on_device.update(dict.fromkeys(moved.values(), True))
            return dataclasses.replace(inputs, **moved)

        monkeypatch.setattr(train_step, "to_device", to_device)
        return step, waits

    move = forward.to_device
    return make


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("lora", {}),
        ("lora", {"checkpointed_layers": 2, "offload_activations": True, "mlp_slice": 50}),
        ("lora", {"checkpointed_layers": 1, "save_attention": True}),
        ("qlora", {}),
        ("full", {}),
    ],
    ids=str,
)
def test_nothing_waits_inside_a_step(build, method, changes):
    step, waits = build(method, **changes)
    made = bench.batches(WORKLOAD, 2)
    step(made[0], 1e-3)
    with waits:
        result = step.launch(made[1], 1e-3)
        assert waits.found == []
        assert result().loss > 0
        assert result().weights.moved > 0


def test_one_question_inside_a_step_is_found(build):
    step, waits = build()
    step.model.model.norm.register_forward_hook(lambda _module, _inputs, output: output.sum().item() and None)
    with waits:
        step.launch(bench.batches(WORKLOAD, 1)[0], 1e-3)
    assert waits.found == ["local_scalar_dense"] * 2  # one for each micro-batch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("saves", [False, True])
def test_nothing_waits_inside_a_step_on_a_gpu(method, saves):
    workload = dataclasses.replace(WORKLOAD, method=method)
    plan = bench.plan_for(
        workload, device="cuda", matmul_dtype="plain", checkpointed_layers=2 if saves else 0, compiled=True
    )
    step = bench.build(workload, plan.changed(offload_activations=saves, save_attention=saves))
    made = bench.batches(workload, 4)
    counters.clear()
    for batch in made[:3]:
        step(batch, 1e-3)
    assert not counters["graph_break"], "a layer is one graph"
    assert not compile.news().notes
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = step.launch(made[3], 1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result().loss > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_is_launched_while_the_gpu_is_busy():
    """With tokens that fill more pages than a copy takes along at once."""
    workload = dataclasses.replace(WORKLOAD, sequences=5, length=4096, accumulation_steps=1)
    plan = bench.plan_for(workload, device="cuda", matmul_dtype="plain", checkpointed_layers=0, compiled=True)
    step = bench.build(workload, plan)
    made = bench.batches(workload, 3)
    for batch in made[:2]:
        step(batch, 1e-3)
    torch.cuda._sleep(4_000_000_000)  # two seconds
    asleep = torch.cuda.Event()
    asleep.record()
    result = step.launch(made[2], 1e-3)
    assert not asleep.query()
    assert result().loss > 0
