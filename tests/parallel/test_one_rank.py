"""Strategies on one rank, which shares with itself: the same steps, and no copy of gradients that says nothing."""

from __future__ import annotations

import atexit

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tunesmith.measure import bench
from tunesmith.model.forward import Shape
from tunesmith.model.structure import decoder_layers

WORKLOAD = bench.Workload("tiny", "full", 2, 64)


@pytest.fixture(autouse=True)
def leave_group():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    atexit.unregister(dist.destroy_process_group)  # as it would be at the end


class Copies(TorchDispatchMode):
    """How many values each copy was of, from one flat fp32 tensor to another. Weights are gathered one by one."""

    def __init__(self):
        super().__init__()
        self.sizes = set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function is torch.ops.aten.copy_.default:
            target, source = arguments[:2]
            if target.ndim == source.ndim == 1 and source.dtype == torch.float32 and target is not source:
                self.sizes.add(source.numel())
        return function(*arguments, **(options or {}))


def steps_of(sharding: str, count: int = 2):
    plan = bench.plan_for(WORKLOAD, device="cpu", matmul_dtype="plain", checkpointed_layers=0, compiled=False)
    step = bench.build(WORKLOAD, plan.changed(sharding=sharding, optimizer_states="fp32"))
    step.shape = Shape(WORKLOAD.sequences * WORKLOAD.length, WORKLOAD.length)
    with Copies() as copies:
        found = [step(batch, 1e-3) for batch in bench.batches(WORKLOAD, count)]
    return step, found, copies.sizes


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero2", "zero3", "hybrid", "hierarchical"])
def test_a_rank_alone_trains_as_without_and_copies_no_gradients(sharding):
    _, expected, _ = steps_of("none")
    step, found, copied = steps_of(sharding)
    for one, other in zip(found, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-6)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
    layer = decoder_layers(step.model.model)[0]
    assert sum(weight.numel() for weight in layer.parameters()) not in copied
