"""The memory phases of a step are told apart on the trainer's own step, and compared with what the plan says of
them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tunesmith.measure import bench
from tunesmith.plan.plan import Memory, Phase
from tunesmith.train.phases import PhaseMemory

WORKLOAD = dataclasses.replace(bench.WORKLOADS["tiny"], accumulation_steps=2)


@pytest.fixture
def watched():
    plan = bench.plan_for(WORKLOAD, device="cpu", matmul_dtype="plain", checkpointed_layers=0, compiled=False)
    step = bench.build(WORKLOAD, plan)
    return plan, step, PhaseMemory(step.model, step.optimizer)


def test_every_moment_of_a_step_is_noted(watched):
    _, step, phases = watched
    assert phases.held == {}
    step(bench.batches(WORKLOAD, 1)[0], 1e-5)
    assert list(phases.held) == list(phases.peaks) == ["start", "before forward", "after forward", "before update"]
    assert phases.steps == 1


def test_categories_are_what_lies_between_the_moments(watched, monkeypatch):
    plan, step, phases = watched
    # start 100; the first micro-batch keeps 50 for backward, and leaves 30 of gradients behind; then the second
    counts = iter([100, 100, 150, 130, 180, 131] * 2)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(counts))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)
    phases._is_told = True
    forward = Memory(weights=60, adapter=10, master=11, optimizer=20, activations=51)
    plan = plan.changed(
        phases=(
            Phase(name="end of the forward pass", memory=forward),
            Phase(name="optimizer step", memory=forward.changed(activations=0, gradients=29)),
        )
    )
    batch = bench.batches(WORKLOAD, 1)[0]
    step(batch, 1e-5)
    assert phases.by_category(plan) == {}  # the optimizer had no states yet
    step(batch, 1e-5)
    assert phases.by_category(plan) == {
        "weights and states": (101, 100),
        "activations": (51, 50),
        "gradients": (29, 31),
    }


def test_evaluation_is_no_moment_of_a_step(watched):
    _, step, phases = watched
    step.model.eval()
    step.model.base_model(torch.zeros(1, 4, dtype=torch.int64), **_packed(4))
    assert phases.held == {}


def _packed(tokens: int) -> dict:
    bounds = torch.tensor([0, tokens], dtype=torch.int32)
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": tokens, "max_length_k": tokens}
