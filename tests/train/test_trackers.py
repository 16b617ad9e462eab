"""Trackers are told what the events say, go on with the same run after a kill, and can never stop it."""

from __future__ import annotations

import importlib.util
import json
import threading

import pytest

from tiny import write_all
from tunesmith.errors import UserError
from tunesmith.train import events, trackers
from tunesmith.train.trackers import Trackers, figures_of, read_names


def step(number: int, loss: float = 2.0) -> events.Step:
    return events.Step(
        number, 0.5, loss, 1e-3, 0.7, 100, 50.0, 0.5, 2**30, {"a": 1.0, "b": 3.0}, figures={"margin": 0.2}
    )


EVALUATION = events.Evaluation(2, 1.5, {"held": 1.5}, 10.0, 0.1, tasks={"quiz: a": {"acc": (0.25, 0.1, 0.4)}})


def tell(names, folder, given, warn=lambda _: None):
    with Trackers(names, folder, {"model": "m", "lora": {"rank": 4}, "eval": []}, warn) as told:
        for event in given:
            told.see(event)


class Kept:
    """A tracker that keeps what it is told."""

    def __init__(self):
        self.said = []

    def begin(self, folder, settings, id, purge):
        self.said.append(("begin", dict(settings), id, purge))

    def log(self, step, figures):
        self.said.append(("log", step, dict(figures)))

    def say(self, step, title, text):
        self.said.append(("say", step, title, text))

    def end(self, state):
        self.said.append(("end", state))


class Failing(Kept):
    def log(self, step, figures):
        raise RuntimeError("no network\nlong trace")


class Slow(Kept):
    def log(self, step, figures):
        RELEASED.wait(10)


RELEASED = threading.Event()


@pytest.fixture
def kept(monkeypatch):
    made = {name: kind() for name, kind in (("kept", Kept), ("failing", Failing), ("slow", Slow))}
    monkeypatch.setattr(trackers, "TRACKERS", {name: (lambda one=one: one, "json") for name, one in made.items()})
    return made["kept"].said


def test_what_trackers_are_told(kept, tmp_path):
    alert = events.Alert(1, "loss spike", "It rose.", "Look.")
    finished = events.Finished(2, 3.0, 120.0, 2**30, 2**30)
    tell(["kept"], tmp_path, [step(1), alert, EVALUATION, finished])
    kinds = [one[0] for one in kept]
    assert kinds == ["begin", "log", "say", "log", "log", "end"]
    assert kept[0][1] == {"model": "m", "lora.rank": 4}
    assert kept[1][2]["train/loss"] == 2.0
    assert kept[1][2]["train/loss/b"] == 3.0
    assert kept[1][2]["train/margin"] == 0.2
    assert kept[1][2]["speed/tokens_per_second"] == 200.0
    assert kept[3] == ("log", 2, {"eval/loss": 1.5, "tasks/quiz: a/acc": 0.25})
    assert kept[-1] == ("end", "finished")
    tell(["kept"], tmp_path, [events.Resumed(1), step(2), events.Stopped(2, "Ctrl-C")])
    assert kept[len(kinds)][2:] == (kept[0][2], 1)  # the same run, and from where it goes on
    assert kept[-1] == ("end", "stopped")


def test_no_figure_is_infinite():
    assert "train/loss" not in dict(figures_of(step(1, float("nan"))))


def test_a_tracker_that_fails_is_said_once_and_the_others_go_on(kept, tmp_path):
    said = []
    tell(["failing", "kept"], tmp_path, [step(1), step(2), step(3)], said.append)
    assert said == ["The tracker failing failed and is told no more, while the run goes on: no network"]
    assert [one[1] for one in kept if one[0] == "log"] == [1, 2, 3]
    assert kept[-1] == ("end", "failed")  # it neither finished nor stopped


def test_a_tracker_that_is_slow_does_not_hold_up_the_run(kept, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "WAITING", 3)
    monkeypatch.setattr(trackers, "END_S", 0.05)
    said = []
    tell(["slow"], tmp_path, [step(number) for number in range(1, 10)], said.append)
    RELEASED.set()
    assert len(said) == 2
    assert "slower than the run" in said[0]
    assert "did not end in time" in said[1]


def test_a_run_that_is_refused_leaves_no_trace(kept, tmp_path):
    tell(["kept"], tmp_path, [events.Warned("no")])
    assert kept == []
    assert not list(tmp_path.iterdir())


def test_unknown_and_missing_trackers_are_refused_before_training(monkeypatch):
    with pytest.raises(UserError, match="--track: neptune is no tracker"):
        read_names(["neptune"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="needs the package mlflow; install it with `pip install mlflow`"):
        read_names(["mlflow"])
    assert read_names([]) == ()


# The packages themselves, where they are installed


def check_tensorboard(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    assert [(one.step, one.value) for one in found.Scalars("train/loss")] == [(1, 2.0), (2, 4.0), (3, 2.0)]
    assert [one.value for one in found.Scalars("tasks/quiz: a/acc")] == [0.25]


def check_mlflow(folder):
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("tunesmith")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["lora.rank"] == "4"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted({(one.step, one.value) for one in history}) == [(1, 2.0), (2, 2.0), (2, 4.0), (3, 2.0)]


def check_wandb(folder):
    files = list(folder.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2  # a file a sitting, of one run
    assert len({one.name for one in files}) == 1
    assert all(b"train/loss" in one.read_bytes() for one in files)


def check_trackio(folder):
    import sqlite3

    (file,) = (folder / "trackio").glob("tunesmith*.db")
    with sqlite3.connect(file) as found:
        rows = found.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert len({one[0] for one in rows}) == 1
    assert {one[1] for one in rows} == {1, 2, 3}
    assert json.loads(rows[0][2])["train/loss"] == 2.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb", "trackio"])
def test_the_package_itself_is_told(name, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    for variable in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(folder / "trackio"))
    pytest.importorskip(name)
    said = []
    tell([name], folder, [step(1), step(2)], said.append)
    last = [events.Resumed(1), step(2, 4.0), EVALUATION, step(3), events.Alert(3, "loss spike", "It rose.", "Look.")]
    tell([name], folder, [*last, events.Finished(3, 3.0, 120.0, 2**30, 2**30)], said.append)
    assert said == []
    globals()[f"check_{name}"](folder)


@pytest.mark.slow
def test_a_whole_run_is_told_to_tensorboard(runs, tiny_model, tmp_path):
    pytest.importorskip("tensorboard")
    write_all(tmp_path, tiny_model)
    done = runs(tmp_path, "train", "run.yaml", "--track", "tensorboard")
    assert done.code == 0, done.err
    assert list((tmp_path / "run" / "tensorboard").glob("events.out.*"))
