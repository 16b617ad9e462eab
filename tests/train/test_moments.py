"""The moments of a step are told apart on the trainer's own step."""

from __future__ import annotations

from tunesmith.measure import bench
from tunesmith.train.moments import Moments


def test_every_moment_of_a_step_is_noted():
    workload = bench.WORKLOADS["tiny"]
    plan = bench.plan_for(workload, device="cpu", products="plain", recompute_layers=0, compiled=False)
    step = bench.build(workload, plan)
    watched = Moments(step.model, step.optimizer)
    assert watched.held == {}
    step(bench.batches(workload, 1)[0], 1e-5)
    assert list(watched.held) == list(watched.peaks) == ["before forward", "after forward", "before update"]
