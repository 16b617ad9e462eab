"""Trackers: TensorBoard, Weights & Biases, MLflow and trackio as further readers of a run's events.

The event log stays the record of a run; a tracker is given what stands there, by a thread of its own. One that fails,
or that is too slow for the run, is left out from then on and said so once: no run stops or waits for it. Their packages
are imported only where they are asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import queue
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

from tunesmith.errors import UserError, first_line, listed
from tunesmith.train import events

FILE = "trackers.json"
"""In the run's folder: under which names trackers know the run, so that later sittings go on with the same."""
PROJECT = "tunesmith"
WAITING = 10_000
"""Events that may wait for a slow tracker."""
END_S = 60.0
"""That trackers are given at the end of a run to write what they have."""
GIB = 2**30
State = Literal["finished", "stopped", "failed"]


class Tracker(Protocol):
    def begin(self, folder: Path, settings: Mapping[str, Any], id: str, purge: int | None) -> None:
        """`id`: the run's own, the same in each sitting. `purge`: the step after which an earlier sitting's figures are
        replaced, where the run goes on from a checkpoint."""
        ...

    def log(self, step: int, figures: Mapping[str, float]) -> None: ...

    def say(self, step: int, title: str, text: str) -> None: ...

    def end(self, state: State) -> None: ...


class TensorBoard:
    def begin(self, folder: Path, settings: Mapping[str, Any], id: str, purge: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(
            str(folder / "tensorboard"), purge_step=None if purge is None else purge + 1, flush_secs=10
        )
        if purge is None:
            rows = [f"| {name} | {json.dumps(value)} |" for name, value in settings.items()]
            self._writer.add_text("settings", "\n".join(["| setting | |", "| --- | --- |", *rows]))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def say(self, step: int, title: str, text: str) -> None:
        self._writer.add_text(title, text, step)

    def end(self, state: State) -> None:
        self._writer.close()


class WeightsAndBiases:
    def begin(self, folder: Path, settings: Mapping[str, Any], id: str, purge: int | None) -> None:
        wandb: Any = importlib.import_module("wandb")

        has_key = bool(os.environ.get("WANDB_API_KEY") or wandb.api.api_key)
        mode = os.environ.get("WANDB_MODE") or (
            "online" if has_key else "offline"
        )  # without a key it would ask for one
        self._wandb = wandb
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.absolute().name,
            id=id,
            resume="allow",
            dir=str(folder),
            config=dict(settings),
            mode=mode,
            settings=wandb.Settings(silent=True, console="off"),
        )
        # A run that goes on repeats some steps, which its own count of steps would refuse.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({"step": step, **figures})

    def say(self, step: int, title: str, text: str) -> None:
        self._run.alert(title=title, text=f"step {step}: {text}")

    def end(self, state: State) -> None:
        self._run.finish(exit_code=1 if state == "failed" else 0)


class MLflow:
    def begin(self, folder: Path, settings: Mapping[str, Any], id: str, purge: int | None) -> None:
        mlflow: Any = importlib.import_module("mlflow")

        # Beside the runs, unless somebody says where: the default would be wherever this process stands.
        where = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.absolute().parent / 'mlflow.db'}"
        self._client: Any = mlflow.MlflowClient(where)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        same = self._client.search_runs([experiment], f"tags.tunesmith_run = '{id}'", max_results=1)
        if same:
            self._id: str = same[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = {"tunesmith_run": id}
        self._id = self._client.create_run(experiment, tags=tags, run_name=folder.absolute().name).info.run_id
        for key, value in settings.items():
            self._client.log_param(self._id, _plain(key), str(value)[:500])

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._client.log_metric(self._id, _plain(name), value, step=step)

    def say(self, step: int, title: str, text: str) -> None:
        self._client.set_tag(self._id, _plain(f"{title} at step {step}"), text[:5000])

    def end(self, state: State) -> None:
        status = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[state]
        self._client.set_terminated(self._id, status)


class Trackio:
    def begin(self, folder: Path, settings: Mapping[str, Any], id: str, purge: int | None) -> None:
        trackio: Any = importlib.import_module("trackio")

        self._trackio = trackio
        name = f"{folder.absolute().name}-{id}"
        self._run: Any = trackio.init(project=PROJECT, name=name, resume="allow", config=dict(settings))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def say(self, step: int, title: str, text: str) -> None:
        if hasattr(self._run, "alert"):
            self._run.alert(title=title, text=text)

    def end(self, state: State) -> None:
        self._run.finish()


TRACKERS: dict[str, tuple[type[Tracker], str]] = {
    "tensorboard": (TensorBoard, "tensorboard"),
    "wandb": (WeightsAndBiases, "wandb"),
    "mlflow": (MLflow, "mlflow"),
    "trackio": (Trackio, "trackio"),
}
"""By name: the tracker, and the package it needs."""


def read_names(asked: Sequence[str]) -> tuple[str, ...]:
    """The trackers asked for, with commas between them; UserError where one is unknown or not installed."""
    names = tuple(dict.fromkeys(name.strip() for text in asked for name in text.split(",") if name.strip()))
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"--track: {name} is no tracker known here; it can be {listed(TRACKERS)}.")
        package = TRACKERS[name][1]
        if importlib.util.find_spec(package) is None:
            raise UserError(f"--track {name} needs the package {package}; install it with `pip install {package}`.")
        if (
            name == "mlflow"
            and not os.environ.get("MLFLOW_TRACKING_URI")
            and not importlib.util.find_spec("sqlalchemy")
        ):
            raise UserError(
                "--track mlflow: mlflow-skinny has no database; set MLFLOW_TRACKING_URI, or install mlflow."
            )
    return names


class Trackers:
    """All trackers of a run. `see` is told of each event and never waits; `warn` is told of a tracker that failed."""

    def __init__(self, names: Sequence[str], folder: Path, settings: Mapping[str, Any], warn: Callable[[str], None]):
        self._queue: queue.Queue[events.Event | None] = queue.Queue(WAITING)
        self._warn, self._folder = warn, folder
        self._settings = dict(flat(settings))
        self._open: dict[str, Tracker] = {name: TRACKERS[name][0]() for name in names}
        self._has_begun = False
        self._state: State = "failed"
        self._is_full = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def see(self, event: events.Event) -> None:
        if not self._open or self._is_full:
            return
        if self._thread is None:  # not before data are tokenized, by processes that are forked
            self._thread = threading.Thread(target=self._work, name="trackers", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            self._is_full = True
            self._warn("The trackers are slower than the run, so they are told no more; events.jsonl has everything.")

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever waits is written, for as long as may be waited for."""
        if self._thread is None:
            return
        with suppress(queue.Full):
            self._queue.put(None, timeout=END_S)
        if not self._ended.wait(END_S):
            self._warn("The trackers did not end in time; events.jsonl has everything.")

    # In a thread of its own

    def _work(self) -> None:
        purge: int | None = None
        while (event := self._queue.get()) is not None:
            if isinstance(event, events.Resumed):
                purge = event.step
            self._note(event)
            if figures := dict(figures_of(event)):
                step = event.step  # pyright: ignore[reportAttributeAccessIssue]
                self._begin(purge)
                self._each(lambda tracker, step=step, figures=figures: tracker.log(step, figures))
            elif isinstance(event, events.Alert):
                self._begin(purge)
                text = f"{event.evidence} {event.advice}"
                self._each(lambda tracker, event=event, text=text: tracker.say(event.step, event.name, text))
        if self._has_begun:
            self._each(lambda tracker: tracker.end(self._state))
        self._ended.set()

    def _note(self, event: events.Event) -> None:
        if isinstance(event, events.Finished):
            self._state = "finished"
        elif isinstance(event, events.Stopped):
            self._state = "stopped"

    def _begin(self, purge: int | None) -> None:
        """With the first figures: a run that is refused leaves no trace."""
        if self._has_begun:
            return
        self._has_begun = True
        id = id_of(self._folder)
        self._each(lambda tracker: tracker.begin(self._folder, self._settings, id, purge))

    def _each(self, work: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                work(tracker)
            except (Exception, SystemExit) as error:  # of any library: none of them may stop a run
                del self._open[name]
                why = first_line(error)[:300]
                self._warn(f"The tracker {name} failed and is told no more, while the run goes on: {why}")


def id_of(folder: Path) -> str:
    """Of the run, made with the first sitting."""
    path = folder / FILE
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(path.read_text(encoding="utf-8"))["id"])
    id = secrets.token_hex(8)
    with suppress(OSError):
        path.write_text(json.dumps({"id": id}) + "\n", encoding="utf-8")
    return id


def figures_of(event: events.Event) -> Iterator[tuple[str, float]]:
    """What a tracker draws of an event, by names that say where it belongs; finite numbers alone."""
    return ((name, float(value)) for name, value in _figures(event) if math.isfinite(value))


def _figures(event: events.Event) -> Iterator[tuple[str, float]]:
    if isinstance(event, events.Step):
        yield "train/loss", event.loss
        yield "train/learning_rate", event.learning_rate
        yield "train/grad_norm", event.grad_norm
        yield "train/epoch", event.epoch
        if event.seconds > 0 and not event.is_warm_up:
            yield "speed/tokens_per_second", event.tokens / event.seconds
        yield "memory/peak_gib", event.memory / GIB
        yield from ((f"memory/{name}_gib", size / GIB) for name, size in event.memory_by.items())
        yield from ((f"train/{name}", value) for name, value in event.figures.items())
        if len(event.losses) > 1:
            yield from ((f"train/loss/{name}", value) for name, value in event.losses.items())
    elif isinstance(event, events.Evaluation):
        yield "eval/loss", event.loss
        yield from ((f"eval/{name}", value) for name, value in event.figures.items())
        if len(event.losses) > 1:
            yield from ((f"eval/loss/{name}", value) for name, value in event.losses.items())
        for title, found in event.tasks.items():
            yield from ((f"tasks/{title}/{name}", score[0]) for name, score in found.items())
    elif isinstance(event, events.Routers):
        yield "routers/busiest", max(event.busiest)
        yield "routers/entropy", min(event.entropy)
        yield "routers/idle", max(event.idle)
    elif isinstance(event, events.Finished):
        yield "speed/overall_tokens_per_second", event.tokens_per_second
        yield "memory/predicted_gib", event.predicted_memory / GIB


def flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by one name each, such as `lora.rank`."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{before}{name}.")
        elif value not in (None, [], {}):
            yield f"{before}{name}", value if isinstance(value, str | int | float | bool) else json.dumps(value)


def _plain(name: str) -> str:
    """With the characters that MLflow allows."""
    return "".join(char if char.isalnum() or char in "_-. /" else "_" for char in name)
