"""A run folder tells what matters for continuing from what does not."""

from __future__ import annotations

import json

import pytest

from tunesmith.cli.display import read_plan_file
from tunesmith.data.types import Origin, RecordError
from tunesmith.errors import UserError
from tunesmith.plan.plan import Memory, Plan, Time
from tunesmith.run.folder import plan_differences, read_plan, read_summary, write_bad_records

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
    predictions = {"memory": Memory(weights=5), "time": Time(matmuls=1.0), "peak": "loss", "host_memory": 7}
    assert plan_differences(PLAN, PLAN.model_copy(update=predictions)) == []
    assert plan_differences(PLAN, PLAN.model_copy(update={"offload_optimizer": "disk"})) == []
    assert plan_differences(PLAN, PLAN.model_copy(update={"micro_batch": 2})) == [
        "the plan's micro_batch was 1 and is now 2"
    ]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"micro_batch": 0}, "micro_batch is 0, but it should be greater than or equal to 1"),
        ({"storage": "nf5"}, "storage is \"nf5\", but it should be 'plain', 'nf4' or 'int8'"),
        ({"mesh": {"shards": 2}}, "plans know no mesh.shards"),
        ({"memory_limit": ...}, "memory_limit is missing"),
        (None, "all of it is [], but it should be a valid dictionary or instance of Plan"),
    ],
)
def test_what_is_wrong_with_an_edited_plan_is_said(tmp_path, changes, why):
    content = PLAN.model_dump(mode="json") | (changes or {})
    kept = {name: value for name, value in content.items() if value is not ...}
    (tmp_path / "plan.json").write_text(json.dumps([] if changes is None else kept))
    for read, file in ((read_plan, tmp_path), (read_plan_file, tmp_path / "plan.json")):
        with pytest.raises(UserError) as found:
            read(file)
        assert f": {why}." in str(found.value)


def test_an_output_that_is_a_file_is_named(tmp_path):
    (tmp_path / "data.json").write_text("[]")
    with pytest.raises(UserError, match=r"data\.json is a file, and a run needs a folder"):
        read_summary(tmp_path / "data.json")


def test_bad_records_are_written_one_a_line(tmp_path):
    bad = [RecordError("empty answer", Origin("a.jsonl", 3), "`output` is empty")]
    path = write_bad_records(tmp_path / "run", bad)
    line = {"file": "a.jsonl", "line": 3, "kind": "empty answer", "reason": "`output` is empty"}
    assert [json.loads(text) for text in path.read_text().splitlines()] == [line]
