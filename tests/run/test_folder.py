"""A run folder tells what matters for continuing from what does not."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tunesmith.cli.display import read_plan_file
from tunesmith.config.schema import Run
from tunesmith.data.types import Origin, RecordError
from tunesmith.errors import UserError
from tunesmith.plan.plan import Memory, Plan, Time
from tunesmith.run.folder import (
    Identity,
    plan_differences,
    read_identity,
    read_plan,
    read_run,
    read_summary,
    write_bad_records,
    write_identity,
)
from tunesmith.run.there import run_to_open

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
    with pytest.raises(UserError, match=r"data\.json is a file where the output folder of a run is needed"):
        read_summary(tmp_path / "data.json")


def test_bad_records_are_written_one_a_line(tmp_path):
    bad = [RecordError("empty answer", Origin("a.jsonl", 3), "`output` is empty")]
    path = write_bad_records(tmp_path / "run", bad)
    line = {"file": "a.jsonl", "line": 3, "kind": "empty answer", "reason": "`output` is empty"}
    assert [json.loads(text) for text in path.read_text().splitlines()] == [line]


def written_run(root: Path, output: str, **settings) -> Path:
    """The folder of a run that was started in `root`."""
    folder = root / output
    folder.mkdir(parents=True)
    run = Run(model="model", data="train*.jsonl", eval="held.jsonl", output=output, **settings)
    write_identity(folder, Identity(run.model_dump(mode="json"), {}, ""))
    for name in ("train-1.jsonl", "held.jsonl"):
        (root / name).write_text("{}\n")
    (root / "model").mkdir(exist_ok=True)
    (root / "model" / "config.json").write_text("{}")
    return folder


def paths_of(run: Run) -> list[str]:
    return [run.model, *(one.path for one in run.data), *(one.path for one in run.eval)]


@pytest.mark.parametrize("output", ["runs/one", "one"])
def test_a_run_is_read_from_any_folder_and_after_it_was_renamed_or_moved_with_its_model(tmp_path, monkeypatch, output):
    root = tmp_path / "here"
    folder = written_run(root, output)
    monkeypatch.chdir(root)
    assert paths_of(read_run(Path(output))) == ["model", "train*.jsonl", "held.jsonl"]
    monkeypatch.chdir(folder)
    assert paths_of(read_run(Path())) == [str(root / name) for name in ("model", "train*.jsonl", "held.jsonl")]
    folder = folder.rename(folder.parent / "other name")
    there = root.rename(tmp_path / "there")
    monkeypatch.chdir(tmp_path)
    moved = there / folder.relative_to(root)
    assert paths_of(read_run(moved)) == [str(there / name) for name in ("model", "train*.jsonl", "held.jsonl")]
    (tmp_path / "model").mkdir()  # what is there from here is what is meant
    assert read_run(moved).model == "model"


def test_settings_of_another_version_are_a_sentence(tmp_path):
    folder = written_run(tmp_path, "runs/one")
    content = json.loads((folder / "run.json").read_text())
    for changes, said in (({"from_the_future": 1}, "from_the_future"), ({"method": "magic"}, "method")):
        changed = {**content, "settings": {**content["settings"], **changes}}
        (folder / "run.json").write_text(json.dumps(changed))
        with pytest.raises(
            UserError, match=rf"run\.json holds settings that this version does not have: .*{said}"
        ) as told:
            read_run(folder)
        assert "\n" not in str(told.value)


def test_what_is_nowhere_and_hub_names_stay_as_they_are(tmp_path, monkeypatch):
    folder = written_run(tmp_path, "runs/one")
    shutil.rmtree(tmp_path / "model")
    monkeypatch.chdir(folder)
    assert read_run(folder).model == "model"
    assert read_run(folder.rename(tmp_path / "elsewhere")).data[0].path == "train*.jsonl"


def test_a_base_with_new_tokens_is_found_in_the_run_s_own_folder_wherever_that_is(tmp_path):
    folder = written_run(tmp_path, "runs/one", new_tokens=["<tool>"])
    identity = read_identity(folder)
    write_identity(folder, replace(identity, settings={**identity.settings, "model": str(folder / "grown_base")}))
    (folder / "grown_base").mkdir()
    (folder / "grown_base" / "config.json").write_text("{}")
    moved = folder.rename(tmp_path / "moved")
    assert read_run(moved).model == str(moved / "grown_base")


def test_a_base_that_is_gone_is_missed_in_one_sentence_but_by_a_run_that_gave_a_whole_model(tmp_path, monkeypatch):
    folder = written_run(tmp_path, "runs/one", method="full")
    monkeypatch.chdir(tmp_path)
    shutil.rmtree("model")
    with pytest.raises(
        UserError, match=r"^The run in .* needs the model that it was trained over, but [^;]*; put it b"
    ):
        run_to_open(folder)
    (folder / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / "model" / name).write_text("{}")
    assert run_to_open(folder).model == str(folder / "model")
