"""From a spike to its records, and a run that goes on without them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tiny import SETTINGS
from tunesmith.config.load import from_mapping, load
from tunesmith.data import excluded
from tunesmith.errors import UserError
from tunesmith.run.assemble import assemble
from tunesmith.run.branch import branch
from tunesmith.run.start import prepare_run
from tunesmith.train import documents, events
from tunesmith.train.loop import train
from tunesmith.ui.documents import Documents, outliers
from tunesmith.ui.read import open_log, page

BAD = (0.085, 0.215, 0.45, 0.6665, 0.9)
"""Where the corrupt records are: 5 among 2,000, or for a quick look among 240."""


def bad_lines(count: int) -> list[int]:
    return [int(count * place) for place in BAD]


def write_records(path: Path, count: int, *, leave_out: tuple[int, ...] = ()) -> Path:
    chance = random.Random(0)
    lines = []
    for line in range(1, count + 1):
        answer = " ".join(["the sun is red and the tree is blue"] * chance.randint(1, 2))
        if line in bad_lines(count):
            answer = "".join(chance.choices("QZXJ%#@7&", k=30))
        said = [("user", f"what is it {line}"), ("assistant", answer)]
        record = {"messages": [{"role": role, "content": content} for role, content in said]}
        if line not in leave_out:
            lines.append(json.dumps(record) + "\n")
    path.write_text("".join(lines))
    return path


def trained(run, **how) -> list[events.Event]:
    folder, seen = Path(run.output), []
    folder.mkdir(exist_ok=True)
    job = assemble(prepare_run(run, warn=lambda _: None, **how))
    log = events.EventLog(folder)

    def observe(event):
        seen.append(event)
        log.write(event)

    assert train(job, observe).is_finished
    log.close()
    return seen


@pytest.fixture(scope="module", params=[240, pytest.param(2000, marks=pytest.mark.slow)])
def run(request, tiny_model, tmp_path_factory):
    folder, count = tmp_path_factory.mktemp("spike"), request.param
    data = write_records(folder / "train.jsonl", count)
    given = {"model": str(tiny_model), "data": [{"path": str(data)}], "eval": [], "held_out": 0, "epochs": 1}
    given |= {
        "batch_tokens": 512 if count < 500 else 4096,
        "learning_rate": 2e-2,
        "save_every": 10,
        "keep": 9,
        "output": str(folder / "run"),
        "eval_every": 1000,
    }
    made = from_mapping(SETTINGS | given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNESMITH_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        trained(made)
    return made


def records_of(run) -> int:
    return len(Path(run.data[0].path).read_text().splitlines())


def test_a_step_leads_to_the_corrupt_records_of_the_run(run):
    folder = Path(run.output)
    kept = documents.read(folder)
    assert sum(len(rows) for rows in kept.values()) == records_of(run)
    steps = [one for one in events.read(folder) if one["event"] == "step"]
    for step in steps:
        rows = kept[step["step"]]
        mean = np.average(rows["loss"].astype(np.float64), weights=rows["weight"].astype(np.float64))
        assert mean == pytest.approx(step["loss"], rel=2e-3)
    later = [step for step, rows in kept.items() if step > 10 and (rows["loss"] > 2 * np.median(rows["loss"])).any()]
    found = Documents().of_step(folder, later[0])
    told = {one["where"] for one in (*found["documents"][:3], *found["outliers"])}
    assert sum(f"{folder.parent / 'train.jsonl'}, line {line}" in told for line in bad_lines(records_of(run))) >= 4
    worst = found["documents"][0]
    assert "what is it" in worst["text"]
    assert worst["loss"] == max(one["loss"] for one in found["documents"])
    assert [step for step, _ in worst["seen"]] == [later[0]]
    assert found["checkpoint"] < later[0]


def test_branching_without_them_gives_the_bytes_of_a_run_that_never_had_them_after_that_checkpoint(run, tmp_path):
    folder = Path(run.output)
    pages, count = Documents(), records_of(run)
    lines = bad_lines(count)
    found = pages.of_step(folder, 25)
    bad = [one["id"] for one in found["outliers"] if any(one["where"].endswith(f"line {n}") for n in lines)]
    assert f"branch {folder} --before 25" in pages.exclude(folder, bad, 25)["command"]
    made = branch(folder, 25, tmp_path / "without", folder / excluded.FILE)
    assert made.step == 20
    lines = [json.loads(one)["line"] for one in (folder / excluded.FILE).read_text().splitlines()]
    with pytest.raises(UserError, match="was started differently: the training data are not the same"):
        prepare_run(load(made.settings).run, warn=print)
    seen = trained(load(made.settings).run, accept_changes=True)
    assert next(event.step for event in seen if isinstance(event, events.Resumed)) == made.step

    other = branch(folder, 25, tmp_path / "never")
    clean = write_records(tmp_path / "clean.jsonl", count, leave_out=tuple(lines))
    trained(load(other.settings, [f"data.0.path={clean}"]).run, accept_changes=True)
    one, two = (load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("without", "never"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(
        not torch.equal(one[name], value)
        for name, value in load_file(folder / "adapter" / "adapter_model.safetensors").items()
    )
    assert page(tmp_path / "without", open_log(tmp_path / "without"))["curves"]["step"][-1] >= 28
    with pytest.raises(UserError, match="is there already"):
        branch(folder, 25, tmp_path / "without")
    with pytest.raises(UserError, match="no checkpoint from before step 3 "):
        branch(folder, 3, tmp_path / "early")


def test_marking_twice_names_a_record_once_and_a_foreign_file_is_refused(run, tmp_path):
    path = tmp_path / "excluded.jsonl"
    assert excluded.add(path, [{"hash": "00000000000000ff"}, {"hash": "00000000000000ff"}]) == 1
    assert excluded.add(path, [{"hash": "0000000000000001"}]) == 2
    assert excluded.read(path).tolist() == [1, 255]
    path.write_text('{"line": 3}\n')
    with pytest.raises(UserError, match="line 1 is not of the kind"):
        excluded.read(path)
    with pytest.raises(UserError, match="cannot be marked"):
        Documents().exclude(Path(run.output), ["0-99999999"], 5)


def test_a_log_survives_a_kill_forgets_the_oldest_and_takes_what_was_done_again(tmp_path, monkeypatch):
    def rows(*losses):
        many = np.arange(len(losses))
        return documents.rows_of(np.zeros_like(many), many, np.array(losses, float), np.ones(len(losses)))

    log = documents.DocumentLog(tmp_path, 0, [("a", "k")])
    log.write(1, rows(1.0, 2.0))
    log.write(2, rows(3.0))
    with log.path.open("ab") as stream:
        stream.write(b"\x31\x44\x53")
    log = documents.DocumentLog(tmp_path, 0, [("a", "k")])
    log.write(2, rows(5.0, np.inf))
    found = documents.read(tmp_path)
    assert found[1]["loss"].tolist() == [1.0, 2.0]
    assert found[2]["loss"].tolist() == [5.0, documents.LARGEST]
    documents.DocumentLog(tmp_path, 1, []).write(2, rows(9.0))  # a part of the same document on another rank
    assert documents.read(tmp_path)[2]["loss"].tolist() == [7.0, documents.LARGEST]
    monkeypatch.setattr(documents, "MOST", 200)
    for step in range(3, 60):
        log.write(step, rows(*[1.0] * 5))
    assert sum(path.stat().st_size for path in (tmp_path / "documents").glob("rank-0*.bin")) < 1000
    assert max(documents.read(tmp_path)) == 59
    assert documents.read_sets(tmp_path) == [("a", "k")]


def test_what_stands_out_is_told_against_the_others_of_its_step():
    def step(losses, first):
        many = np.arange(first, first + len(losses))
        return documents.rows_of(np.zeros_like(many), many, np.array(losses), np.ones(len(losses)))

    chance = np.random.default_rng(0)
    kept = {n: step(np.r_[5.0 / n + chance.normal(0, 0.1, 20), [12.0] * (n == 3)], 100 * n) for n in range(1, 6)}
    assert outliers(kept) == [((0, 320), 3)]
