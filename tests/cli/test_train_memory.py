"""Memory that runs out: a sentence with what was expected and what can be done, not a fault to be reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tunesmith.cli.training import _memory_errors_in_words
from tunesmith.errors import UserError
from tunesmith.measure.bench import Workload, plan_for

PLAN = plan_for(
    Workload("tiny", "lora", 1, 64), device="cpu", matmul_dtype="plain", checkpointed_layers=0, compiled=False
)


@pytest.mark.parametrize(
    ("error", "owner"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "the GPU"),
        (MemoryError(), "this machine"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."), "this machine"),
    ],
)
def test_it_says_whose_memory_and_what_to_do(error, owner):
    plan = PLAN.changed(memory=PLAN.memory.changed(weights=3 << 30), memory_limit=4 << 30)
    words = rf"memory of {owner} ran out, though [34]\.\d GiB of 4\.0 GiB .* in runs/a/plan\.json"
    with pytest.raises(UserError, match=words), _memory_errors_in_words(plan, Path("runs/a")):
        raise error


def test_other_errors_are_left_as_they_are():
    with pytest.raises(RuntimeError, match="something else"), _memory_errors_in_words(PLAN, Path("runs/a")):
        raise RuntimeError("something else")
