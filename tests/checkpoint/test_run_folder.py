"""A run folder tells what matters for continuing from what does not."""

from __future__ import annotations

import pytest

from tunesmith.checkpoint.run_folder import plan_differences, read_summary
from tunesmith.errors import UserError
from tunesmith.plan.plan import Memory, Plan, Time

PLAN = Plan(
    device="cpu",
    threads=2,
    precision="fp32",
    attention="sdpa",
    is_compiled=False,
    master_weights=False,
    sequence_length=64,
    sequences_per_step=2,
    micro_batch=1,
    learning_rate=1e-3,
    deterministic=True,
    memory=Memory(),
    memory_limit=1,
)


def test_other_predictions_are_no_other_plan():
    predictions = {"memory": Memory(weights=5), "time": Time(products=1.0), "peak": "loss", "host_memory": 7}
    assert plan_differences(PLAN, PLAN.model_copy(update=predictions)) == []
    assert plan_differences(PLAN, PLAN.model_copy(update={"offload_optimizer": "disk"})) == []
    assert plan_differences(PLAN, PLAN.model_copy(update={"micro_batch": 2})) == [
        "the plan's micro_batch was 1 and is now 2"
    ]


def test_an_output_that_is_a_file_is_named(tmp_path):
    (tmp_path / "data.json").write_text("[]")
    with pytest.raises(UserError, match=r"data\.json is a file, and a run needs a folder"):
        read_summary(tmp_path / "data.json")
