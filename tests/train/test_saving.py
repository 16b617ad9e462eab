"""Checkpoints are written beside training: steps go on, one at a time is on its way, and it holds what was copied."""

from __future__ import annotations

import errno
import threading

import pytest
from safetensors.torch import load_file

from parallel.on_ranks import job_of
from tiny import write_all
from tunesmith.checkpoint import store
from tunesmith.errors import UserError
from tunesmith.parallel.ranks import Ranks
from tunesmith.train import events
from tunesmith.train.loop import train


@pytest.fixture
def job(tiny_model, tmp_path):
    def of(name: str, *, is_async: bool):
        folder = write_all(
            tmp_path / name, tiny_model, method="full", learning_rate=1e-3, eval=[], save_every=3, keep=9
        )
        data = [{"path": str(folder / "train.jsonl")}]
        options = {"wire": {"async_checkpoint": is_async}, "data": data, "output": str(folder / "run"), "steps": 8}
        return job_of(Ranks(), str(folder), {}, "none", **options)

    return of


def test_steps_go_on_while_a_checkpoint_is_written_and_it_holds_what_was_there_before_them(job, monkeypatch):
    seen: list[events.Event] = []
    go_on = threading.Event()
    real, underway = store.write_new, []

    def write(path, chunks):
        assert threading.current_thread() is not threading.main_thread() or "step-00000008" in str(path)
        underway.append(path.parent)
        assert len(set(underway)) == 1, "two checkpoints at a time"
        assert go_on.wait(30)
        written = real(path, chunks)
        if path.name == "manifest.json":
            underway.clear()
        return written

    def observe(event: events.Event) -> None:
        seen.append(event)
        if isinstance(event, events.Step) and event.step == 5:  # two steps after the first checkpoint began
            assert not any(isinstance(one, events.Checkpointed) for one in seen)
            go_on.set()

    beside = job("beside", is_async=True)
    with monkeypatch.context() as patch:
        patch.setattr(store, "write_new", write)
        assert train(beside, observe).is_finished
    between = job("between", is_async=False)
    assert train(between, lambda _: None).is_finished
    assert [event.step for event in seen if isinstance(event, events.Checkpointed)] == [3, 6, 8]
    for step in (3, 6, 8):
        name = f"checkpoints/step-{step:08d}/tensors.safetensors"
        assert (beside.folder / name).read_bytes() == (between.folder / name).read_bytes()
    ours, theirs = (load_file(one.folder / "model/model.safetensors") for one in (beside, between))
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_what_goes_wrong_beside_training_is_said_and_tried_again(job, monkeypatch):
    warned, seen = [], []
    one = job("full", is_async=True)
    monkeypatch.setattr(one.checkpoints, "_warn", warned.append)
    monkeypatch.setattr("tunesmith.train.loop.RETRY_SECONDS", 0.0)
    real, calls = store.write_new, iter(range(100))

    def write(path, chunks):
        if next(calls) == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, chunks)

    monkeypatch.setattr(store, "write_new", write)
    assert train(one, seen.append).is_finished
    (warning,) = warned
    assert warning.startswith("No checkpoint was written at step 3")
    assert "No space left on device" in warning
    assert next(event.step for event in seen if isinstance(event, events.Checkpointed)) in (4, 5, 6)


def test_an_error_that_is_no_disk_s_ends_the_run(job, monkeypatch):
    def broken(path, chunks):
        raise RuntimeError("not of the disk")

    monkeypatch.setattr(store, "write_new", broken)
    with pytest.raises(RuntimeError, match="not of the disk"):
        train(job("broken", is_async=True), lambda _: None)


def test_weights_that_are_not_finite_are_refused_before_they_are_copied(job):
    one = job("infinite", is_async=True)
    next(iter(one.optimizer.weights.values())).data[0] = float("inf")
    with pytest.raises(UserError, match="holds NaN or infinite values at step 3"):
        one.save(3, {}, None, is_async=True)
