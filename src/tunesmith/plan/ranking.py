"""Which of the candidates is best: the least time, and among equals the simplest, then the least memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tunesmith.plan import memory, model_states, rules, speed
from tunesmith.plan.candidates import Candidate, make_candidate
from tunesmith.plan.choice import Choice, Task

EQUAL = 0.05
"""Choices whose times differ by less than this are equals: predictions are no better."""
SAME = 0.01
"""Among choices of the same kind, more memory must bring more than this."""
CAPTURED = 0.03
"""Of the time of a step, what captured passes must save."""
WORTH = 1.2
"""A pipeline must be this much faster than anything without, and what is in quantized collectives than anything
exact."""


def best_of(task: Task, fitting: list[Candidate]) -> Candidate | None:
    """The quickest; among those that are as quick, the simplest, then the one that needs the least memory."""
    if not fitting:
        return None
    kept, least = [], float("inf")
    for effort in sorted({_effort(candidate) for candidate in fitting}):
        kind = [candidate for candidate in fitting if _effort(candidate) == effort]
        quickest = min(candidate.time.total for candidate in kind)
        if WORTH * quickest < least:
            kept, least = kind, quickest
    equals = [candidate for candidate in kept if candidate.time.total <= least * (1 + EQUAL)]
    simplest = min(rules.complexity(candidate.choice) for candidate in equals)
    simple = [candidate for candidate in equals if rules.complexity(candidate.choice) == simplest]
    least = min(candidate.time.total for candidate in simple)
    return min(
        (candidate for candidate in simple if candidate.time.total <= least * (1 + SAME)),
        key=lambda candidate: candidate.bytes,
    )


def should_capture(task: Task, choice: Choice) -> bool:
    """Whether the GPU would wait for the CPU so long that captured passes are worth their memory."""
    captured = dataclasses.replace(choice, cuda_graphs=True)
    return rules.may_capture(task, captured) and saved_by_graphs(task, choice) >= CAPTURED


def saved_by_graphs(task: Task, choice: Choice) -> float:
    """The part of a step's time that the GPU would wait for the CPU, and does not if passes are captured."""
    waiting, captured = (
        speed.step_time(task, dataclasses.replace(choice, cuda_graphs=cuda_graphs)).total
        for cuda_graphs in (False, True)
    )
    return 1 - captured / waiting


def fits_host(task: Task, choice: Choice) -> bool:
    """Whether host memory and disk hold what is offloaded; loading alone is warned about, since it can go well."""
    is_offloaded = choice.offload_optimizer != "none" or choice.offload_parameters or choice.offload_activations
    fits_memory = task.device == "cpu" or memory.host_memory(task, choice) <= task.hardware.available
    return not is_offloaded or (fits_memory and model_states.disk(task, choice) <= task.hardware.disk)


def with_transposed(task: Task, chosen: Candidate, pins: Mapping[str, Any], limit: int) -> Candidate:
    """With memory that is left over, frozen weights are kept transposed, too."""
    choice = dataclasses.replace(chosen.choice, cache_transposed=True)
    if chosen.choice.checkpointed_layers or "cache_transposed" in pins or not rules.may_cache_transposed(task, choice):
        return chosen
    transposed = make_candidate(task, choice, 0)
    return transposed if transposed.bytes <= limit else chosen


def _effort(candidate: Candidate) -> int:
    """Shards alone; stages, which need many micro-batches to be worth it; quantized collectives, which is lossy."""
    return 2 if candidate.choice.is_lossy else int(candidate.choice.pipeline > 1)
