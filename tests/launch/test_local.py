"""Ranks that are started together end together: well, at a failure within seconds, or when they are asked to stop."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tiny import write_all
from tunesmith.launch.local import Failure, run_ranks, run_tunesmith
from tunesmith.train import events
from tunesmith.train.hang import stacks

pytestmark = pytest.mark.distributed


def as_ranks(code: str) -> list[str]:
    """A rank that does `code`, without torch, so that it starts at once."""
    head = "import os, time, sys\nfrom tunesmith.launch.local import write_failure\nrank = int(os.environ['RANK'])\n"
    return [sys.executable, "-c", head + code]


def test_ranks_know_their_places_and_end_well(tmp_path):
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    code = f"open(r'{tmp_path}/' + str(rank), 'w').write(' '.join(os.environ[name] for name in {names}))"
    assert run_ranks(as_ranks(code), 3) is None
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == [f"{r} {r} 3 3 127.0.0.1" for r in range(3)]


def test_the_first_failure_ends_all_within_seconds_and_is_the_one_told(tmp_path):
    code = f"""
over = r"{tmp_path / "over"}"
if rank == 2:
    write_failure("it broke", "Traceback: here")
    open(over, "w").close()
    sys.exit(70)
if rank == 1:
    while not os.path.exists(over):
        time.sleep(0.01)
    write_failure("the connection was closed by rank 2", "Traceback: there")
    sys.exit(70)
time.sleep(60)
"""
    began = time.monotonic()
    failure = run_ranks(as_ranks(code), 4)
    assert time.monotonic() - began < 30
    assert (failure.rank, failure.code, failure.message, failure.traceback) == (2, 70, "it broke", "Traceback: here")


def test_a_rank_that_is_killed_is_the_cause_whatever_others_say(tmp_path):
    code = f"""
over = r"{tmp_path / "over"}"
if rank == 1:
    open(over, "w").close()
    os.kill(os.getpid(), 9)
while not os.path.exists(over):
    time.sleep(0.01)
write_failure("the connection was closed", "")
time.sleep(0.2)
sys.exit(70)
"""
    failure = run_ranks(as_ranks(code), 3)
    assert (failure.rank, failure.code, failure.message) == (1, -9, "")


def run(folder: Path, *command: str, **options) -> subprocess.Popen:
    environment = {**os.environ, "TUNESMITH_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", *command], cwd=folder, env=environment, **pipes, **options)


def wait_for_steps(folder: Path, count: int) -> None:
    give_up = time.monotonic() + 300
    while len([one for one in events.read(folder / "run") if one["event"] == "step"]) < count:
        assert time.monotonic() < give_up
        time.sleep(0.05)


def wait_for_event(folder: Path, kind: str) -> None:
    give_up = time.monotonic() + 300
    while not any(one["event"] == kind for one in events.read(folder / "run")):
        assert time.monotonic() < give_up
        time.sleep(0.05)


def losses(folder: Path) -> list[float]:
    return [one["loss"] for one in events.read(folder / "run") if one["event"] == "step"]


def kill_a_rank(launcher: int, rank: int) -> None:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    os.kill(int(children[rank]), signal.SIGKILL)  # they are in the order in which they were started


def test_a_run_on_two_ranks_survives_a_kill_stops_when_asked_and_goes_on_on_one_with_the_losses_of_one(
    tiny_model, tmp_path, runs
):
    changes = {"steps": 24, "save_every": 2, "eval_every": 12, "lora": {"rank": 4}}
    one = write_all(tmp_path / "one", tiny_model, **changes)
    two = write_all(tmp_path / "two", tiny_model, **changes)
    launcher = runs.start(two, "train", "run.yaml", "--ranks", "2", "--restarts", "1", forks_ranks=True)
    wait_for_event(two, "checkpoint")
    kill_a_rank(launcher, 1)
    wait_for_event(two, "resumed")
    wait_for_steps(two, len(losses(two)) + 2)
    os.kill(launcher, signal.SIGTERM)
    stopped = runs.wait()
    assert stopped.code == 143, stopped
    assert "Continuing after step" in stopped.out
    assert "stopped by SIGTERM; everything is saved" in stopped.out
    assert stopped.err == f"warning: {KILLED}; all ranks are started again from the last checkpoint (1 of 1)\n"
    steps = [one["step"] for one in events.read(two / "run") if one["event"] == "step"]
    assert steps == list(range(1, len(steps) + 1))
    assert runs(one, "train", "run.yaml").code == 0
    ended = runs(two, "train", "run.yaml", "--ranks", "1")
    assert ended.code == 0, ended
    assert "Continuing after step" in ended.out
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    assert json.loads((two / "run" / "summary.json").read_text())["steps"] == 24


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_by_torchrun(tiny_model, tmp_path, runs):
    changes = {"steps": 40, "save_every": 2, "eval_every": 20, "lora": {"rank": 4}}
    one = write_all(tmp_path / "one", tiny_model, **changes)
    assert runs(one, "train", "run.yaml").code == 0
    two = write_all(tmp_path / "two", tiny_model, **changes)
    started = run(two, "tunesmith", "train", "run.yaml", "--ranks", "2")
    wait_for_event(two, "checkpoint")
    started.send_signal(signal.SIGTERM)
    assert started.wait(300) == 143
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    again = run(two, *torchrun, "tunesmith", "train", "run.yaml")
    out, err = again.communicate(timeout=300)
    assert again.returncode == 0, err
    assert "Continuing after step" in out
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)


KILLED = "rank 1 of 2 failed first: it was ended by signal 9"


def test_ranks_are_started_again_so_many_times_and_then_the_failure_is_told(monkeypatch):
    commands, warnings = [], []

    def fails(command: list[str], count: int) -> Failure:
        commands.append(command)
        return Failure(rank=1, code=-9, message="", traceback="")

    monkeypatch.setattr("tunesmith.launch.local.run_ranks", fails)
    failure = run_tunesmith(["train", "run.yaml"], 2, restarts=1, warn=warnings.append, once=["--accept-changes"])
    assert warnings == [f"{KILLED}; all ranks are started again from the last checkpoint (1 of 1)"]
    assert failure.exit_code == 70
    assert list(failure.report(2)) == [f"error: {KILLED}"]
    train = [sys.executable, "-m", "tunesmith", "train", "run.yaml"]
    assert commands == [[*train, "--accept-changes"], train]  # changes are accepted once


@pytest.mark.parametrize(
    "failure", [Failure(0, 143, "", ""), Failure(1, 130, "", ""), Failure(0, 1, "no such file", "")]
)
def test_ranks_that_would_end_the_same_way_are_not_started_again(monkeypatch, failure):
    commands = []
    monkeypatch.setattr("tunesmith.launch.local.run_ranks", lambda command, _: commands.append(command) or failure)
    assert run_tunesmith(["train"], 2, restarts=3, warn=pytest.fail) is failure
    assert len(commands) == 1


def test_a_failure_is_told_by_what_the_user_can_do_about_it(tmp_path):
    said = Failure(rank=0, code=1, message="run.yaml is missing", traceback="")
    assert list(said.report(2)) == ["error: run.yaml is missing"]
    assert list(Failure(rank=1, code=143, message="", traceback="").report(2)) == []
    (hung,) = Failure(rank=1, code=1, message="", traceback="").report(2, [tmp_path / "rank-1.txt"])
    assert hung.endswith(f"what each of them was doing is in {tmp_path}")
    trace, last = Failure(rank=1, code=70, message="it broke", traceback="Traceback").report(2)
    assert (trace, last) == ("rank 1 of 2:\nTraceback", "error: rank 1 of 2 failed first: it broke")


@pytest.mark.slow
def test_killed_at_random_twenty_times_a_run_on_two_ranks_ends_with_the_same_bytes(tiny_model, tmp_path):
    kills = int(os.environ.get("TUNESMITH_TEST_KILLS", "20"))
    changes = {"steps": 40 * kills, "save_every": 3, "eval": [], "method": "full"}
    expected = write_all(tmp_path / "expected", tiny_model, **changes)
    whole = run(expected, "tunesmith", "train", "run.yaml", "--ranks", "2")
    assert whole.wait(900) == 0
    folder = write_all(tmp_path / "killed", tiny_model, **changes)
    started = run(folder, "tunesmith", "train", "run.yaml", "--ranks", "2", "--restarts", str(kills))
    chance = random.Random(0)
    for kill in range(kills):
        wait_for_steps(folder, min(40 * kills - 5, 30 * kill + chance.randint(1, 25)))
        kill_a_rank(started.pid, chance.randint(0, 1))
        time.sleep(2)  # for the launcher to notice
    _, err = started.communicate(timeout=900)
    assert started.returncode == 0, err
    assert err.count("all ranks are started again") == kills
    assert losses(folder) == losses(expected)
    result = "run/model/model.safetensors"
    assert (folder / result).read_bytes() == (expected / result).read_bytes()


def test_a_step_that_hangs_ends_the_rank_and_leaves_its_stacks(tmp_path):
    code = f"""
import time
from pathlib import Path
from tunesmith.parallel.ranks import Ranks
from tunesmith.launch.rank_environment import RankEnvironment
from tunesmith.train import hang
hang.HANG_SECONDS = 1.0
def waiting_for_the_others():
    time.sleep(60)
watch = hang.HangWatch(Path({str(tmp_path)!r}), Ranks(RankEnvironment(rank=1, ranks=2)))
with watch():
    pass
with watch():
    waiting_for_the_others()
"""
    began = time.monotonic()
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 1
    assert time.monotonic() - began < 50
    (file,) = stacks(tmp_path)
    assert file.name == "rank-1.txt"
    assert "in waiting_for_the_others" in file.read_text()
