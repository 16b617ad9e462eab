"""The moments of a step are told apart on the trainer's own step, and compared with what the plan says of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tunesmith.measure import bench
from tunesmith.plan.plan import Memory, Moment
from tunesmith.train.moments import Moments

WORKLOAD = dataclasses.replace(bench.WORKLOADS["tiny"], rounds=2)


@pytest.fixture
def watched():
    plan = bench.plan_for(WORKLOAD, device="cpu", products="plain", recompute_layers=0, compiled=False)
    step = bench.build(WORKLOAD, plan)
    return plan, step, Moments(step.model, step.optimizer)


def test_every_moment_of_a_step_is_noted(watched):
    _, step, moments = watched
    assert moments.held == {}
    step(bench.batches(WORKLOAD, 1)[0], 1e-5)
    assert list(moments.held) == list(moments.peaks) == ["start", "before forward", "after forward", "before update"]
    assert moments.steps == 1


def test_categories_are_what_lies_between_the_moments(watched, monkeypatch):
    plan, step, moments = watched
    # start 100; the first micro-batch keeps 50 for backward, and leaves 30 of gradients behind; then the second
    counts = iter([100, 100, 150, 130, 180, 131] * 2)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(counts))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)
    moments._is_told = True
    forward = Memory(weights=60, adapter=10, master=11, optimizer=20, activations=51)
    plan = plan.changed(
        moments=(
            Moment(name="end of the forward pass", memory=forward),
            Moment(name="optimizer step", memory=forward.changed(activations=0, gradients=29)),
        )
    )
    batch = bench.batches(WORKLOAD, 1)[0]
    step(batch, 1e-5)
    assert moments.by_category(plan) == {}  # the optimizer had no states yet
    step(batch, 1e-5)
    assert moments.by_category(plan) == {
        "weights and states": (101, 100),
        "activations": (51, 50),
        "gradients": (29, 31),
    }


def test_evaluation_is_no_moment_of_a_step(watched):
    _, step, moments = watched
    step.model.eval()
    step.model.base_model(torch.zeros(1, 4, dtype=torch.int64), **_packed(4))
    assert moments.held == {}


def _packed(tokens: int) -> dict:
    bounds = torch.tensor([0, tokens], dtype=torch.int32)
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": tokens, "max_length_k": tokens}
