"""Starting, resuming, tags, archive and plans from the pages: each a POST from them, by ids, and in sentences."""

from __future__ import annotations

import json
import time
from pathlib import Path
from urllib.parse import quote

import pytest

from recorded_runs import record_run
from tiny import write_all
from tunesmith.ui.explore import Explorer
from tunesmith.ui.runs import run_id
from tunesmith.ui.start import Starter
from tunesmith.ui.walk import file_id

from .test_server import ask, own, serving

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record_run(tmp_path / "runs" / "first", steps=5)
    second = record_run(tmp_path / "runs" / "second", steps=5, ends="stopped") / "run.json"
    content = json.loads(second.read_text())
    content["settings"]["output"] = "elsewhere"
    second.write_text(json.dumps(content))
    (tmp_path / "a.yaml").write_text("model: none\ndata: none.jsonl\nmethod: lorra\n")
    (tmp_path / "other.yaml").write_text("services: {}\n")
    with serving(tmp_path / "runs") as made:
        yield made


def post(server, path):
    status, _, content = ask(server, path, method="POST", Origin=own(server))
    return status, json.loads(content) if content.startswith(b"{") else content


def listed(server, name):
    return next(run for run in json.loads(ask(server, "/api/runs")[2])["runs"] if run["name"] == name)


CHANGES = [
    f"/api/runs/{run_id('first')}/tags?tags=a",
    f"/api/runs/{run_id('first')}/archive?archived=yes",
    f"/api/runs/{run_id('second')}/resume",
    f"/api/configs/{'0' * 16}/start",
    "/api/plan?model=known-0",
]


@pytest.mark.parametrize("path", CHANGES)
def test_every_change_needs_a_post_from_these_pages_and_the_cookie(server, tmp_path, path):
    before = sorted(str(one) for one in tmp_path.rglob("*"))
    assert ask(server, path)[0] == 404
    assert ask(server, path, method="POST")[0] == 403
    assert ask(server, path, method="POST", Origin="http://evil.example")[0] == 403
    assert ask(server, path, method="POST", Origin="null")[0] == 403
    assert ask(server, path, method="POST", Origin=own(server), cookie=False)[0] == 401
    assert ask(server, path, method="POST", Origin=own(server), host="evil.example")[0] == 421
    assert sorted(str(one) for one in tmp_path.rglob("*")) == before


def test_tags_and_archive_are_kept_and_nothing_is_deleted(server, tmp_path):
    run = run_id("first")
    before = {one: one.read_bytes() for one in (tmp_path / "runs").rglob("*") if one.is_file()}
    tags = quote(f"good,  good ,{HOSTILE}")
    assert post(server, f"/api/runs/{run}/tags?tags={tags}")[1]["tags"] == ["good", HOSTILE]
    assert post(server, f"/api/runs/{run}/archive?archived=yes")[1]["is_archived"]
    found = listed(server, "first")
    assert (found["tags"], found["is_archived"]) == (["good", HOSTILE], True)
    page = json.loads(ask(server, f"/api/runs/{run}")[2])
    assert page["tags"] == ["good", HOSTILE]
    assert all(one.read_bytes() == content for one, content in before.items())
    assert post(server, f"/api/runs/{run}/archive?archived=no")[0] == 200
    assert post(server, f"/api/runs/{run}/tags")[0] == 200
    found = listed(server, "first")
    assert (found["tags"], found["is_archived"]) == ([], False)


def test_tags_that_are_none_are_refused(server):
    run = run_id("first")
    for tags in ("x" * 41, "a%00b", ",".join(map(str, range(13)))):
        assert post(server, f"/api/runs/{run}/tags?tags={tags}")[0] == 409
    assert post(server, f"/api/runs/{run}/archive?archived=maybe")[0] == 400
    assert post(server, f"/api/runs/{'a' * 16}/tags?tags=x")[0] == 404


def test_labels_of_a_damaged_file_are_none(server, tmp_path):
    (tmp_path / "runs" / "first" / "labels.json").write_text('{"tags": [3, "ok"], "is_archived": "yes"}')
    assert listed(server, "first")["tags"] == ["ok"]
    assert listed(server, "first")["is_archived"] is False


def test_settings_files_go_by_id_and_say_what_is_wrong(server, tmp_path):
    found = json.loads(ask(server, "/api/configs")[2])["configs"]
    assert [one["name"] for one in found] == ["a.yaml"]
    assert "lorra" in found[0]["problem"]
    assert "(a.yaml, line" in found[0]["problem"]
    status, said = post(server, f"/api/configs/{file_id(tmp_path / 'a.yaml')}/start")
    assert status == 409
    assert "lorra" in said["problem"]
    assert post(server, f"/api/configs/{file_id(tmp_path / 'other.yaml')}/start")[0] == 409
    assert post(server, "/api/configs/..%2fa.yaml/start")[0] == 404


def test_a_run_is_resumed_only_where_its_settings_mean_the_same(server):
    status, said = post(server, f"/api/runs/{run_id('second')}/resume")
    assert (status, "another directory" in said["problem"]) == (409, True)
    assert post(server, f"/api/runs/{run_id('first')}/resume") == (409, {"problem": "This run is finished."})


def wait(starter: Starter, seconds: float = 120) -> dict:
    until = time.monotonic() + seconds
    while starter.starts()[0]["phase"] not in ("ended", "refused"):
        assert time.monotonic() < until
        time.sleep(0.1)
    return starter.starts()[0]


def test_a_run_that_cannot_be_checked_is_refused_before_it_trains(tmp_path):
    (tmp_path / "run.yaml").write_text("model: nowhere/at-all\ndata: none.jsonl\noutput: runs/x\n")
    starter = Starter(tmp_path / "runs", tmp_path)
    starter.start(file_id(tmp_path / "run.yaml"))
    found = wait(starter)
    assert found["phase"] == "refused"
    assert "none" in found["said"] or "nowhere" in found["said"]
    assert not (tmp_path / "runs" / "x").exists()


@pytest.mark.slow
def test_a_run_is_started_stopped_and_resumed_from_the_pages(tmp_path, tiny_model, monkeypatch):
    write_all(tmp_path, tiny_model, output="runs/x", epochs=400)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path / "cache"))
    with serving(tmp_path / "runs") as server:
        (tmp_path / "runs").mkdir(exist_ok=True)
        start = f"/api/configs/{file_id(tmp_path / 'run.yaml')}/start"
        assert post(server, start)[0] == 200
        assert post(server, start) == (409, {"problem": "This run is starting already."})
        for turn in range(2):
            until = time.monotonic() + 120
            while not (runs := json.loads(ask(server, "/api/runs")[2])["runs"]) or not (
                runs[0]["state"] == "running" and runs[0]["step"] > 4 * turn
            ):
                assert time.monotonic() < until, server.starter.starts()
                time.sleep(0.1)
            assert post(server, f"/api/runs/{run_id('x')}/stop")[0] == 200
            found = wait(server.starter)
            assert "Stopped after step" in found["said"]
            if not turn:
                assert listed(server, "x")["state"] == "stopped"
                assert post(server, f"/api/runs/{run_id('x')}/resume")[0] == 200
    assert "Continuing after step" in found["said"]


def test_the_plan_explorer_tells_what_fits(tmp_path, tiny_model):
    (tmp_path / "mine").symlink_to(tiny_model)  # links are not followed
    explorer = Explorer(tmp_path)
    choices = explorer.choices()
    assert all("(catalogue)" in one["name"] for one in choices["models"])
    large = next(one["id"] for one in choices["models"] if "8B" in one["name"])
    asked = {"model": large, "hardware": "RTX 4090", "gpus": "2", "price": "1.5", "tokens": "1e6"}
    found = explorer.plan(asked | {"method": "qlora"})
    assert found["fits"]
    assert sum(found["memory"].values()) < found["memory_limit"]
    assert found["tokens_per_second"] > 100
    assert found["run"]["money"] == pytest.approx(1.5 * found["run"]["gpu_hours"])
    assert "method: qlora" in found["yaml"]
    assert "tmp" not in found["yaml"]


@pytest.mark.slow
def test_the_plan_explorer_tells_what_would_fit(tmp_path):
    asked = {"model": "known-5", "hardware": "RTX 4090", "method": "full"}
    found = Explorer(tmp_path).plan(asked)
    assert not found["fits"]
    assert found["changes_that_fit"]


@pytest.mark.parametrize(
    "given",
    [
        {"model": "known-99"},
        {"model": "../../etc"},
        {"model": "known-0", "method": "--help"},
        {"model": "known-0", "hardware": "1 x H100; rm -rf"},
        {"model": "known-0", "gpus": "65"},
        {"model": "known-0", "tokens": "nan"},
        {"model": "known-0", "sequence_length": "4"},
    ],
)
def test_a_choice_that_is_none_is_refused(server, given):
    asked = "&".join(f"{name}={quote(value)}" for name, value in given.items())
    status, said = post(server, f"/api/plan?{asked}")
    assert status == 409
    assert said["problem"].endswith(".")


def test_local_models_are_found_by_their_files(tmp_path):
    for name in ("models/a", "runs/x/model", "half"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "models" / "a" / "model.safetensors").write_bytes(b"")
    (tmp_path / "runs" / "x" / "run.json").write_text("{}")
    names = [one["name"] for one in Explorer(tmp_path).choices()["models"]]
    assert names[0] == str(Path("models/a"))
    assert "half" not in names
    assert not any("runs" in name for name in names)
