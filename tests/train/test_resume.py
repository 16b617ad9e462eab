"""Continuing a run whose folder, disk or settings are not as they were."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tiny import SETTINGS, Die, Runs, assert_same, wait_until_stopped, write_all, write_data
from tunesmith.checkpoint.store import CheckpointStore
from tunesmith.cli.main import main
from tunesmith.run.folder import read_identity
from tunesmith.train import events

TRAIN = ("train", "run.yaml", "--plan", "plan.json")
STEP = "tunesmith.train.step:TrainStep._forward_backward"
SAVE = "tunesmith.checkpoint.store:CheckpointStore.begin"
AT_ONCE = {"tunesmith.train.loop:RETRY_SECONDS": 0.0}


@pytest.fixture(scope="module")
def reference(runs: Runs, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never interrupted."""
    folder = write_all(tmp_path_factory.mktemp("reference"), tiny_model)
    assert runs(folder, *TRAIN).code == 0
    return folder / "run"


@pytest.fixture(scope="module")
def half(runs: Runs, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run killed in step 9, with checkpoints of steps 6 and 8; to be copied."""
    folder = write_all(tmp_path_factory.mktemp("half"), tiny_model)
    assert runs(folder, *TRAIN, die=Die(STEP, 35)).code == -signal.SIGKILL
    assert checkpoints(folder) == ["step-00000006", "step-00000008"]
    return folder


@pytest.fixture
def folder(half: Path, tmp_path: Path) -> Path:
    """A copy of the half-done run, to do with as one likes."""
    return Path(shutil.copytree(half, tmp_path / "copy"))


def checkpoints(folder: Path) -> list[str]:
    return sorted(entry.name for entry in (folder / "run" / "checkpoints").iterdir())


def assert_one_sentence(ended, *words: str) -> None:
    assert ended.code == 1, ended
    lines = ended.err.splitlines()
    assert len(lines) == 1, ended.err
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]


# Damaged checkpoints


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "flipped": flip,
    "empty": lambda file: os.truncate(file, 0),
    "missing": lambda file: file.unlink(),
}


USUAL = [
    ("truncated", "tensors.safetensors"),
    ("flipped", "tensors.safetensors"),
    ("empty", "state.json"),
    ("missing", "manifest.json"),
]
"""The store's own tests find each damage of each file."""
FILES = ("tensors.safetensors", "state.json", "manifest.json")
REST = [(damage, name) for damage in DAMAGES for name in FILES if (damage, name) not in USUAL]


@pytest.mark.parametrize(("damage", "name"), [*USUAL, *(pytest.param(*one, marks=pytest.mark.slow) for one in REST)])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_leads_to_the_same_end(
    runs, reference, folder, damage, name
):
    DAMAGES[damage](folder / "run" / "checkpoints" / "step-00000008" / name)
    ended = runs(folder, *TRAIN)
    assert ended.code == 0, ended.err
    assert "step-00000008 is damaged and not used" in ended.err
    assert "Continuing after step 6" in ended.out
    assert_same(folder / "run", reference)


def test_when_every_checkpoint_is_damaged_the_run_begins_anew_and_says_so(runs, reference, folder):
    for step in (6, 8):
        flip(folder / "run" / "checkpoints" / f"step-{step:08d}" / "tensors.safetensors")
    ended = runs(folder, *TRAIN)
    assert ended.code == 0, ended.err
    assert ended.err.count("is damaged and not used") == 2
    assert "Continuing" not in ended.out
    assert_same(folder / "run", reference)


def test_stale_folders_with_higher_numbers_are_not_used(runs, reference, tiny_model, folder, tmp_path):
    there = folder / "run" / "checkpoints"
    (there / "step-00000099").mkdir()
    shutil.copytree(there / "step-00000008", there / "step-00000050")
    shutil.copytree(there / "step-00000008", there / "step-00000012.partial-999999-00000000")
    other = write_all(tmp_path / "other", tiny_model, seed=1)
    assert runs(other, *TRAIN, die=Die(STEP, 45)).code == -signal.SIGKILL
    foreign = other / "run" / "checkpoints" / "step-00000010"
    shutil.copytree(foreign, there / foreign.name)
    ended = runs(folder, *TRAIN)
    assert ended.code == 0, ended.err
    assert "Continuing after step 8" in ended.out
    assert "step-00000099 is damaged and not used" in ended.err
    assert "it is a copy of step 8" in ended.err
    assert "left alone" in ended.err
    for name in ("step-00000099", "step-00000050"):
        shutil.rmtree(there / name)  # left where they were: nobody's work is deleted
    assert_same(folder / "run", reference)


def test_an_event_log_cut_short_or_gone_does_not_matter_to_the_result(runs, reference, folder):
    log = folder / "run" / "events.jsonl"
    os.truncate(log, log.stat().st_size - 30)
    assert runs(folder, *TRAIN).code == 0
    assert_same(folder / "run", reference)


def test_a_damaged_run_json_is_a_sentence(runs, folder):
    for content in ("", "{", "[]", '{"settings": 1}', "\\x00"):
        (folder / "run" / "run.json").write_text(content)
        assert_one_sentence(runs(folder, *TRAIN), "run.json")


def test_a_damaged_plan_or_summary_is_a_sentence(runs, folder):
    for name in ("plan.json", "summary.json"):
        for content in ("", '{"steps"', "[1]", "{}", '{"version": 2}'):
            (folder / "run" / name).write_text(content)
            assert_one_sentence(runs(folder, "train", "run.yaml"), name)
        (folder / "run" / name).unlink()


# Disks


@contextmanager
def mounted(folder: Path, options: str):
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a file system needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def standing_still(runs: Runs, folder: Path, *stops: Die, **options):
    """A run that stops itself (SIGSTOP) and goes on when the block ends."""
    pid = runs.start(folder, *TRAIN, die=stops, **options)
    wait_until_stopped(pid)
    yield pid
    os.kill(pid, signal.SIGCONT)


def fill(filler: Path) -> None:
    """Take all the room there is."""
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 12))


def test_a_disk_that_fills_up_costs_a_warning_and_a_later_retry(runs, reference, tiny_model, tmp_path):
    with mounted(tmp_path / "small", "size=6m"):
        write_all(tmp_path, tiny_model, output="small/run")
        filler = tmp_path / "small" / "filler"
        stops = (Die(STEP, 10, signal=signal.SIGSTOP), Die(STEP, 22, signal=signal.SIGSTOP))
        with standing_still(runs, tmp_path, *stops, constants=AT_ONCE) as pid:
            fill(filler)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.1)
            wait_until_stopped(pid)
            filler.unlink()
        ended = runs.wait()
        assert ended.code == 0, ended.err
        assert "No checkpoint was written at step 4" in ended.err
        assert "the one of step 2 is kept" in ended.err
        assert "step 6: saved" in ended.out
        shutil.copytree(tmp_path / "small" / "run", tmp_path / "run")
    same_but_history = tmp_path / "run" / "events.jsonl"
    shutil.copy(reference / "events.jsonl", same_but_history)  # a full disk may cost lines of the log
    assert_same(tmp_path / "run", reference)


def test_checkpoints_that_cannot_be_written_cost_warnings_and_not_the_run(runs, reference, tiny_model, tmp_path):
    write_all(tmp_path, tiny_model)
    there = tmp_path / "run" / "checkpoints"
    with mounted(there, "size=6m"):
        stops = (Die(STEP, 10, signal=signal.SIGSTOP), Die(STEP, 30, signal=signal.SIGSTOP))
        with standing_still(runs, tmp_path, *stops, constants=AT_ONCE) as pid:
            subprocess.run(["mount", "-o", "remount,ro", str(there)], check=True)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.1)
            wait_until_stopped(pid)
            subprocess.run(["mount", "-o", "remount,rw", str(there)], check=True)
        ended = runs.wait()
        assert ended.code == 0, ended.err
        assert "No checkpoint was written at step 4" in ended.err
        assert "Read-only file system" in ended.err
        assert "step 8: saved" in ended.out
        assert_same(tmp_path / "run", reference)


def test_a_disk_that_stays_full_to_the_end_is_a_sentence_and_room_made_later_is_enough(
    runs, reference, tiny_model, tmp_path
):
    with mounted(tmp_path / "small", "size=6m"):
        write_all(tmp_path, tiny_model, output="small/run")
        filler = tmp_path / "small" / "filler"
        with standing_still(runs, tmp_path, Die(STEP, 10, signal=signal.SIGSTOP)):
            fill(filler)
        ended = runs.wait()
        assert ended.code == 1, ended
        last = ended.err.splitlines()[-1]
        assert "Training is done, but neither its last checkpoint nor its result could be written" in last
        assert "it continues from step 2" in last
        (kept,) = re.findall(r"The trained weights are in (\S+) instead", last)
        assert (Path(kept) / "adapter_model.safetensors").read_bytes() == (
            reference / "adapter" / "adapter_model.safetensors"
        ).read_bytes()
        shutil.rmtree(kept)
        assert "Traceback" not in ended.err
        ended = runs(tmp_path, *TRAIN)  # still no room: told at once
        assert ended.code == 1
        assert "the disk is full" in ended.err or "The result of this run needs" in ended.err, ended.err
        filler.unlink()
        ended = runs(tmp_path, *TRAIN)
        assert ended.code == 0, ended.err
        assert "Continuing after step 2" in ended.out
        shutil.copytree(tmp_path / "small" / "run", tmp_path / "run")
    shutil.copy(reference / "events.jsonl", tmp_path / "run" / "events.jsonl")
    assert_same(tmp_path / "run", reference)


def test_an_output_folder_that_cannot_be_written_is_a_sentence(runs, tiny_model, tmp_path):
    write_all(tmp_path, tiny_model, output="/proc/run")
    assert_one_sentence(runs(tmp_path, *TRAIN), "/proc/run", "output")
    write_all(tmp_path, tiny_model, output="train.jsonl")
    assert_one_sentence(runs(tmp_path, *TRAIN), "train.jsonl", "output")


# Changed settings


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("learning_rate=0.001", ["learning_rate was 0.005 and is now 0.001"]),
        ("lora.rank=8", ["lora.rank was 4 and is now 8"]),
        ("batch_tokens=128", ["batch_tokens was 256 and is now 128"]),
        ("data=held_out.jsonl", ["the training data are not the same"]),
        ("seed=3", ["seed was 0 and is now 3"]),
    ],
)
def test_a_run_is_not_continued_with_other_settings(runs, reference, folder, change, words):
    before = checkpoints(folder)
    ended = runs(folder, "train", "run.yaml", change)
    assert_one_sentence(ended, "was started differently", "--accept-changes", *words)
    assert checkpoints(folder) == before
    ended = runs(folder, "train", "run.yaml")
    assert ended.code == 0, "put back, it goes on"
    assert_same(folder / "run", reference)


def test_changed_records_in_the_same_file_are_noticed(runs, folder):
    write_data(folder / "train.jsonl", 20, seed=5)
    assert_one_sentence(runs(folder, *TRAIN), "the training data are not the same")


def test_losses_of_other_held_out_data_are_not_compared(runs, folder):
    """The result would say that the loss fell from that of one set to that of another."""
    write_data(folder / "held_out.jsonl", 6, seed=7)
    ended = runs(folder, *TRAIN)
    assert ended.code == 0, ended.err
    assert "held-out losses from here cannot be compared with earlier ones" in ended.err
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["held_out_before"] is None
    assert summary["held_out_after"] > 0
    assert "before training" not in (folder / "run" / "adapter" / "README.md").read_text()
    records = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    change = next(n for n, one in enumerate(records) if one.get("has_other_held_out"))
    kept = [one for n, one in enumerate(events.comparable(records)) if one["event"] == "evaluation"]
    assert kept == [one for one in records[change:] if one["event"] == "evaluation"]
    found = CheckpointStore(folder / "run" / "checkpoints", read_identity(folder / "run").lineage)
    assert found.best().metric in [one["loss"] for one in kept]


def test_where_the_data_lie_and_how_often_is_saved_may_change(runs, reference, folder):
    (folder / "train.jsonl").rename(folder / "elsewhere.jsonl")
    changes = ["data=[{path: elsewhere.jsonl, name: train}]", "save_every=3", "keep=5", "eval_every=4"]
    ended = runs(folder, *TRAIN, *changes)
    assert ended.code == 0, ended.err
    assert_same(folder / "run", reference)


def test_accepted_changes_go_on_from_where_the_run_was_and_survive_kills(runs, half, tmp_path):
    changed = ("train", "run.yaml", "learning_rate=0.001", "save_every=100")
    ends = []
    for name, kills in (("whole", []), ("killed", [Die(STEP, 1), Die(STEP, 3)])):
        folder = Path(shutil.copytree(half, tmp_path / name))
        if kills:
            assert runs(folder, *changed, "--accept-changes", die=kills[0]).code == -signal.SIGKILL
            for die in kills[1:]:
                assert runs(folder, *changed, die=die).code == -signal.SIGKILL  # accepted once is accepted
            ended = runs(folder, *changed)
        else:
            ended = runs(folder, *changed, "--accept-changes")
        assert ended.code == 0, ended.err
        assert "Continuing after step 8" in ended.out
        ends.append(folder / "run")
    assert_same(*ends)
    rates = [record["learning_rate"] for record in events.read(ends[0]) if record["event"] == "step"]
    assert max(rates[:8]) > 0.001 >= max(rates[8:])


def test_a_plan_that_contradicts_the_settings_is_refused(runs, folder):
    for change in ("learning_rate=0.001", "batch_tokens=512", "sequence_length=32"):
        assert_one_sentence(runs(folder, *TRAIN, change), "The plan's", change.partition("=")[0], "--plan")


def test_another_plan_is_a_change_too(runs, folder):
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(plan | {"micro_batch": 2}))
    ended = runs(folder, *TRAIN)
    assert_one_sentence(ended, "the plan's micro_batch was 1 and is now 2", "--accept-changes")
    ended = runs(folder, *TRAIN, "--accept-changes")
    assert ended.code == 0, ended.err
    assert "Continuing after step 8" in ended.out


def test_a_shorter_sequence_length_can_be_accepted(runs, folder):
    ended = runs(folder, "train", "run.yaml", "sequence_length=32", "--accept-changes")
    assert ended.code == 0, ended.err
    assert "Continuing after step 8" in ended.out


def test_before_the_first_checkpoint_settings_may_change_since_there_is_nothing_to_continue(
    runs, reference, tiny_model, tmp_path
):
    write_all(tmp_path, tiny_model)
    other = ("train", "run.yaml", "sequence_length=32", "learning_rate=0.1", "lora.rank=2")
    assert runs(tmp_path, *other, die=Die(SAVE)).code == -signal.SIGKILL
    ended = runs(tmp_path, *TRAIN)
    assert ended.code == 0, ended.err
    assert_same(tmp_path / "run", reference)


def test_changes_that_no_checkpoint_can_follow_are_refused_in_a_sentence(runs, folder):
    ended = runs(folder, "train", "run.yaml", "lora.rank=8", "--accept-changes")
    assert_one_sentence(ended, "lora.rank", "shape")


def test_another_method_cannot_be_gone_on_with(runs, folder):
    assert_one_sentence(runs(folder, "train", "run.yaml", "method=full", "--accept-changes"), "other trained weights")


def test_fewer_steps_than_are_done_already_are_refused(runs, folder):
    assert_one_sentence(runs(folder, "train", "run.yaml", "epochs=1", "--accept-changes"), "at step 8 already")


def test_another_optimizer_goes_on_with_a_state_of_its_own(runs, folder):
    ended = runs(folder, "train", "run.yaml", "optimizer=sgd", "--accept-changes")
    assert ended.code == 0, ended.err
    assert "Continuing after step 8" in ended.out


def test_a_finished_run_can_be_given_more_epochs(runs, folder):
    assert runs(folder, *TRAIN).code == 0
    ended = runs(folder, *TRAIN, "epochs=4", "--accept-changes")
    assert ended.code == 0, ended.err
    assert "Continuing after step 13" in ended.out
    assert json.loads((folder / "run" / "summary.json").read_text())["steps"] == 17


# The same folder twice


def test_a_finished_run_says_so_and_stays_as_it_is(runs, reference):
    before = {file: file.stat().st_mtime_ns for file in reference.rglob("*")}
    ended = runs(reference.parent, *TRAIN)
    assert ended.code == 0
    assert "is finished (13 steps)" in ended.out
    assert "run/adapter" in ended.out
    assert {file: file.stat().st_mtime_ns for file in reference.rglob("*")} == before


def test_a_second_train_on_a_folder_in_use_is_refused(runs, reference, tiny_model, tmp_path, monkeypatch, capsys):
    write_all(tmp_path, tiny_model)
    monkeypatch.chdir(tmp_path)
    with standing_still(runs, tmp_path, Die(STEP, 10, signal=signal.SIGSTOP)) as pid:
        with pytest.raises(SystemExit) as ended:
            main(TRAIN)
        assert ended.value.code == 1
        assert f"error: run is being written by process {pid}" in capsys.readouterr().err
    assert runs.wait().code == 0
    assert_same(tmp_path / "run", reference)


def test_the_same_settings_and_seed_give_the_same_bytes_and_another_seed_does_not(
    runs, reference, tiny_model, tmp_path
):
    for name, seed in (("same", 0), ("other", 1)):
        write_all(tmp_path / name, tiny_model, seed=seed)
        assert runs(tmp_path / name, *TRAIN).code == 0
    assert_same(tmp_path / "same" / "run", reference)
    with pytest.raises(AssertionError):
        assert_same(tmp_path / "other" / "run", reference)
    assert SETTINGS.get("seed") is None


# Launched ahead, as on a GPU: a step is queued before the result of the one before is asked for

AHEAD = {"tunesmith.train.step:TrainStep.checks_before_update": False}


def test_steps_launched_ahead_lead_to_the_same_bytes_through_a_kill(runs, reference, tiny_model, tmp_path):
    folder = write_all(tmp_path, tiny_model)
    assert runs(folder, *TRAIN, die=Die(STEP, 35), constants=AHEAD).code == -signal.SIGKILL
    assert runs(folder, *TRAIN, constants=AHEAD).code == 0
    assert_same(folder / "run", reference)


def test_nothing_is_saved_of_a_step_launched_ahead_of_a_loss_that_is_not_finite(runs, tiny_model, tmp_path):
    sgd = {"optimizer": "sgd", "learning_rate": 1e30}  # the one that may have any rate
    folder = write_all(tmp_path, tiny_model, **sgd, save_every=3, eval_every=3)
    ended = runs(folder, "train", "run.yaml", constants=AHEAD)
    assert_one_sentence(ended, "is not a finite number")
    kept = folder / "run" / "checkpoints"
    assert not kept.exists() or not any(kept.iterdir())
