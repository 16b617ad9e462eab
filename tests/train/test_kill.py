"""Killed at any instant and continued any number of times, a run ends with the bytes of one never interrupted."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiny import Die, Runs, assert_same, outcome, wait_until_stopped, write_all

TRAIN = ("train", "run.yaml", "--plan", "plan.json")
STEP = "tunesmith.train.step:TrainStep._forward_backward"
UPDATE = "tunesmith.optim.build:Optimizer.step"
TENSORS = "tunesmith.checkpoint.codec:write_new"
WRITE = "tunesmith.checkpoint.store:write_new"
SAVE = "tunesmith.checkpoint.store:CheckpointStore._write"
RENAME = "pathlib:Path.rename"
SYNC = "os:fsync"
RETAIN = "tunesmith.checkpoint.store:CheckpointStore._retain"
EVALUATE = "tunesmith.train.loop:_Loop._evaluate"
LOG = "tunesmith.train.events:EventLog.write"
RESULT = "tunesmith.run.result:write_adapter"
SUMMARY = "tunesmith.run.folder:write_summary"

KILLS = [
    Die("tunesmith.run.folder:write_identity"),
    Die("tunesmith.run.folder:write_identity", after=True),
    Die("tunesmith.run.assemble:prepare"),
    Die(EVALUATE),  # before the first step
    Die(STEP, 3),  # in the middle of the first accumulation
    Die(STEP, 3),  # twice in a row at the same place, without a checkpoint
    Die(TENSORS, 1),  # nothing of the first checkpoint is there
    Die(WRITE, 1),  # its tensors are, its state is not
    Die(SYNC, 5),  # written, but not synced
    Die(WRITE, 2),  # all but the manifest
    Die("tunesmith.checkpoint.store:verify"),  # all of it, not yet renamed
    Die(SAVE, 1, after=True),  # renamed, but nobody was told
    Die(UPDATE, 1, after=True),  # weights updated, step not logged
    Die(STEP, 7),  # in the middle of an accumulation, after a step
    Die(LOG, 4),
    Die(TENSORS, 2, after=True),
    Die(STEP, 19),  # after epoch 1
    Die(RENAME, 1),
    Die(RENAME, 1, after=True),
    Die(RETAIN, 1),
    Die(EVALUATE, 1, after=True),
    Die(RESULT),
    Die("tunesmith.model.save:save_file", after=True),
    Die(SUMMARY),
]
"""In this order each comes a little further than those before it."""


def write_beside(folder: Path, model: Path, **changes) -> Path:
    return write_all(folder, model, beside=True, **changes)


@pytest.fixture(scope="module")
def reference(runs: Runs, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never interrupted."""
    folder = write_beside(tmp_path_factory.mktemp("reference"), tiny_model)
    ended = runs(folder, *TRAIN)
    assert ended.code == 0, ended.err
    history = outcome(folder / "run")["history"]
    steps = [record for record in history if record["event"] == "step"]
    assert [record["step"] for record in steps] == list(range(1, len(steps) + 1))
    assert steps[-1]["epoch"] == 3
    assert len({record["loss"] for record in steps}) == len(steps) > 10
    return folder / "run"


def test_killed_everywhere_the_result_is_the_same(runs, reference, tiny_model, tmp_path):
    assert len(KILLS) >= 20
    write_beside(tmp_path, tiny_model)
    for die in KILLS:
        ended = runs(tmp_path, *TRAIN, die=die)
        assert ended.code == -signal.SIGKILL, (die, ended)
        assert ended.err == ""
    ended = runs(tmp_path, *TRAIN)
    assert ended.code == 0, ended.err
    assert_same(tmp_path / "run", reference)
    names = {entry.name for entry in (tmp_path / "run").iterdir()}
    assert names == {entry.name for entry in reference.iterdir()}, "killed runs left something behind"


@pytest.mark.parametrize("times", [6, pytest.param(24, marks=pytest.mark.slow)])
def test_killed_at_random_moments_the_result_is_the_same(runs, reference, tiny_model, tmp_path, times):
    write_beside(tmp_path, tiny_model, save_every=1)
    chance = random.Random(0)
    kills = 0
    for _ in range(times):
        ended = runs(tmp_path, *TRAIN, kill_after=chance.uniform(0.15, 0.6))
        assert ended.code in (0, -signal.SIGKILL), ended.err
        kills += ended.code != 0
    ended = runs(tmp_path, *TRAIN)
    assert ended.code == 0, ended.err
    assert kills >= 1
    assert_same(tmp_path / "run", reference)


DIES = st.builds(
    Die, st.sampled_from([STEP, UPDATE, WRITE, RENAME, SYNC, LOG, RETAIN]), st.integers(1, 12), st.booleans()
)


@settings(max_examples=2, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(kills=st.lists(DIES, min_size=2, max_size=4))
def test_no_sequence_of_kills_changes_the_result(runs, reference, tiny_model, tmp_path_factory, kills):
    kill_and_continue(runs, reference, tiny_model, tmp_path_factory, kills)


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(kills=st.lists(DIES, max_size=6))
def test_no_longer_sequence_of_kills_changes_the_result(runs, reference, tiny_model, tmp_path_factory, kills):
    kill_and_continue(runs, reference, tiny_model, tmp_path_factory, kills)


def kill_and_continue(runs, reference, tiny_model, tmp_path_factory, kills) -> None:
    folder = write_beside(tmp_path_factory.mktemp("killed"), tiny_model)
    for die in kills:
        ended = runs(folder, *TRAIN, die=die)
        assert ended.code in (0, -signal.SIGKILL), ended.err
    ended = runs(folder, *TRAIN)
    assert ended.code == 0, ended.err
    assert_same(folder / "run", reference)


def test_killed_while_a_checkpoint_is_written_beside_training_the_one_before_is_there(
    runs, reference, tiny_model, tmp_path
):
    write_beside(tmp_path, tiny_model)  # saves after steps 2 and 4, of four micro-batches each
    for die in (Die(STEP, 19), Die(STEP, 19, signal=signal.SIGTERM)):
        stalled = Die(WRITE, 3, seconds=1.0 if die.signal == signal.SIGTERM else 60.0)  # the second one's state
        ended = runs(tmp_path, *TRAIN, die=[stalled, die])
        assert ended.code == (143 if die.signal == signal.SIGTERM else -signal.SIGKILL), ended
        assert ended.seconds < 30
        found = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step-????????"))
        assert found[-1] == "step-00000002" if die.signal == signal.SIGKILL else len(found) > 1
    ended = runs(tmp_path, *TRAIN)
    assert ended.code == 0, ended.err
    assert_same(tmp_path / "run", reference)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "sgd"])
def test_all_weights_and_mixed_data_are_continued_exactly_too(runs, tiny_model, tmp_path, optimizer):
    changes = {
        "method": "full",
        "optimizer": optimizer,
        "learning_rate": 1e-3,
        "data": [{"path": "train.jsonl", "weight": 0.5}, {"path": "held_out.jsonl", "name": "more", "weight": 1.5}],
        "steps": 8,
        "save_every": 1,
        "schedule": "wsd",
    }
    expected = write_beside(tmp_path / "expected", tiny_model, **changes)
    assert runs(expected, *TRAIN).code == 0
    folder = write_beside(tmp_path / "killed", tiny_model, **changes)
    for die in (Die(STEP, 2), Die(WRITE, 5), Die(STEP, 8), Die("tunesmith.run.result:write_model", after=True)):
        assert runs(folder, *TRAIN, die=die).code == -signal.SIGKILL
    assert runs(folder, *TRAIN).code == 0
    assert_same(folder / "run", expected / "run")


def test_asked_to_stop_it_saves_and_stops_and_goes_on_exactly(runs, reference, tiny_model, tmp_path):
    write_beside(tmp_path, tiny_model, save_every=100)
    ended = runs(tmp_path, *TRAIN, die=Die(STEP, 10, signal=signal.SIGINT))
    assert ended.code == 130
    assert ended.err == ""
    assert "stopped by Ctrl-C; everything is saved" in ended.out
    assert "Stopped after step 2 of 13; `tunesmith train` again continues." in ended.out
    ended = runs(tmp_path, *TRAIN, die=Die(STEP, 12, signal=signal.SIGTERM, after=True))
    assert ended.code == 143
    assert "Continuing after step 2" in ended.out
    assert "Stopped after step 5 of 13" in ended.out
    twice = [Die(STEP, 6, signal=signal.SIGINT), Die(WRITE, 1, signal=signal.SIGINT)]
    ended = runs(tmp_path, *TRAIN, die=twice)  # the second time while it saves: at once, and not saved
    assert ended.code == 130
    assert "interrupted" in ended.err
    ended = runs(tmp_path, *TRAIN)
    assert ended.code == 0, ended.err
    assert "Continuing after step 5" in ended.out
    assert_same(tmp_path / "run", reference)


def test_asked_to_stop_before_anything_was_done_it_can_be_started_again(runs, reference, tiny_model, tmp_path):
    write_beside(tmp_path, tiny_model)
    ended = runs(tmp_path, *TRAIN, die=Die("tunesmith.run.assemble:prepare", signal=signal.SIGINT))
    assert ended.code == 130
    assert ended.err == "interrupted\n"
    assert runs(tmp_path, *TRAIN, die=Die(EVALUATE, signal=signal.SIGINT)).code == 130
    assert runs(tmp_path, *TRAIN).code == 0
    assert_same(tmp_path / "run", reference)


def test_it_stops_within_max_minutes_and_goes_on_exactly(runs, reference, tiny_model, tmp_path):
    write_beside(tmp_path, tiny_model)
    limited = (*TRAIN, "max_minutes=0.07")
    pid = runs.start(tmp_path, *limited, die=Die(STEP, 17, signal=signal.SIGSTOP))
    wait_until_stopped(pid)
    time.sleep(2.3)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    ended = runs.wait()
    assert ended.code == 0, ended.err
    assert "max_minutes 0.07 is nearly used up; everything is saved" in ended.out
    assert "again continues" in ended.out
    assert runs(tmp_path, *TRAIN).code == 0
    assert_same(tmp_path / "run", reference)
