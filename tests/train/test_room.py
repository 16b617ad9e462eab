"""Room on the disk: known beforehand, the result before the checkpoints, and nothing trained is thrown away."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from checkpoint.test_store import mounted
from parallel.on_ranks import job_of
from tiny import write_all
from tunesmith.checkpoint import codec
from tunesmith.checkpoint.room import check_room, result_bytes
from tunesmith.cli.main import main
from tunesmith.config.load import from_mapping
from tunesmith.errors import UserError
from tunesmith.parallel.ranks import Ranks
from tunesmith.plan.search import Written
from tunesmith.run.choose import will_write
from tunesmith.train import events
from tunesmith.train.loop import train

MIB = 2**20


@pytest.fixture
def job(tiny_model, tmp_path):
    def of(**changes):
        folder = write_all(tmp_path, tiny_model, eval=[], save_every=2)
        settings = {"data": [{"path": str(folder / "train.jsonl")}], "output": str(folder / "run"), "steps": 4}
        return job_of(Ranks(), str(folder), {}, "none", **settings | changes)

    return of


@pytest.fixture
def no_checkpoints(monkeypatch):
    """A disk that has room for less than a checkpoint."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(codec, "encode_tensors", full)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "lora"},
        {"method": "lora", "lora": {"rank": 4, "dora": True}},
        {"method": "full", "learning_rate": 1e-3},
        {"method": "full", "learning_rate": 1e-3, "optimizer": "lion"},
        {"method": "full", "learning_rate": 1e-3, "optimizer": "muon"},
        {"method": "full", "learning_rate": 1e-3, "optimizer": "sgd"},
    ],
    ids=str,
)
def test_the_sizes_of_checkpoint_and_result_are_known_before_anything_is_loaded(job, changes):
    one = job(**changes, steps=1)
    expected = will_write(one.run, one.plan)
    assert train(one, lambda _: None).is_finished
    (checkpoint,) = (one.folder / "checkpoints").iterdir()
    tensors = load_file(checkpoint / "tensors.safetensors")
    assert sum(tensor.nbytes for tensor in tensors.values()) == pytest.approx(expected.checkpoint, rel=0.05)
    (result,) = (folder for name in ("adapter", "model") if (folder := one.folder / name).exists())
    weights = load_file(next(result.glob("*.safetensors")))
    assert sum(tensor.nbytes for tensor in weights.values()) == pytest.approx(expected.result, rel=0.02)
    assert sum(file.stat().st_size for file in result.iterdir()) <= result_bytes(one.run, expected)


def said(free: int, *, there: int = 0, eval: bool = False, keep: int = 2, tmp_path: Path, monkeypatch) -> list[str]:
    run = from_mapping({"model": "m", "data": "d", "output": str(tmp_path / "run"), "keep": keep})
    run = run.model_copy(update={"eval": run.data} if eval else {})
    for step in range(there):
        (tmp_path / "run" / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))

    class Plan:
        disk = 0

    warned: list[str] = []
    check_room(run, Plan(), Written(checkpoint=100 * MIB, result=10 * MIB), warned.append)
    return warned


def test_without_room_for_its_result_a_run_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError) as error:
        said(8 * MIB, tmp_path=tmp_path, monkeypatch=monkeypatch)
    expected = f"The result of this run needs 11.1 MiB, and the disk of {tmp_path / 'run'} has 8.0 MiB free; make room"
    assert str(error.value).startswith(expected)


def test_without_room_for_checkpoints_a_run_is_told_what_a_kill_would_cost(tmp_path, monkeypatch):
    (warning,) = said(50 * MIB, tmp_path=tmp_path, monkeypatch=monkeypatch)
    assert warning.startswith("There is no room for checkpoints")
    assert "all that was trained is lost" in warning
    (warning,) = said(50 * MIB, there=1, tmp_path=tmp_path, monkeypatch=monkeypatch)
    assert "what comes after the last one is lost" in warning


def test_room_for_fewer_checkpoints_than_are_to_be_kept_is_said_with_what_would_fit(tmp_path, monkeypatch):
    (warning,) = said(250 * MIB, tmp_path=tmp_path, monkeypatch=monkeypatch)
    assert "has room for 2 more checkpoints, and keep 2 needs up to 3" in warning
    assert "set keep to 1, make room" in warning
    (warning,) = said(250 * MIB, eval=True, tmp_path=tmp_path, monkeypatch=monkeypatch)
    assert "keep 2 needs up to 4" in warning
    assert "set keep" not in warning  # the best one and the one being written take them


def test_enough_room_is_not_worth_a_word(tmp_path, monkeypatch):
    assert said(330 * MIB, tmp_path=tmp_path, monkeypatch=monkeypatch) == []
    assert said(120 * MIB, there=2, tmp_path=tmp_path, monkeypatch=monkeypatch) == []


def test_the_result_is_written_though_no_checkpoint_could_be(job, no_checkpoints):
    seen: list[events.Event] = []
    one = job(method="full", learning_rate=1e-3)
    outcome = train(one, seen.append)
    assert outcome.is_finished
    assert (one.folder / "model" / "model.safetensors").exists()
    assert (one.folder / "summary.json").exists()
    assert isinstance(seen[-1], events.Finished)
    (warning,) = (event.message for event in seen if isinstance(event, events.Warned))
    assert "the result is whole" in warning
    assert "at step 0, since no checkpoint was ever written" in warning


def test_a_result_that_fits_is_written_to_a_real_disk_where_a_checkpoint_does_not_fit(
    tiny_model, tmp_path, monkeypatch, capsys
):
    """A model of 4 MiB, whose checkpoint has 12, on a disk of 8."""
    from tiny_model import make_tiny_model

    model = make_tiny_model(tmp_path / "model", hidden_size=128, intermediate_size=1024)
    monkeypatch.chdir(tmp_path)
    with mounted(tmp_path / "small", "size=8m"):
        write_all(tmp_path, model, method="full", learning_rate=1e-3, eval=[], steps=3, output="small/run")
        with pytest.raises(SystemExit) as ended:
            main(["train", "run.yaml"])
        said = capsys.readouterr()
        assert not ended.value.code, said.err
        assert "warning: There is no room for checkpoints" in said.err
        assert "the result is whole" in said.err
        assert "checkpoint before" not in said.err
        assert not list(Path("small/run/checkpoints").glob("step-*"))
        weights = load_file("small/run/model/model.safetensors")
        assert sum(weight.nbytes for weight in weights.values()) > 3 * MIB


def test_a_run_whose_result_does_not_fit_a_real_disk_is_refused_before_weights_are_loaded(
    tmp_path, monkeypatch, capsys
):
    from tiny_model import make_tiny_model

    monkeypatch.setattr("tunesmith.run.assemble.prepare", lambda *_, **__: pytest.fail("the weights were loaded"))
    model = make_tiny_model(tmp_path / "model", hidden_size=128, intermediate_size=1024)
    monkeypatch.chdir(tmp_path)
    with mounted(tmp_path / "small", "size=4m"):
        write_all(tmp_path, model, method="full", learning_rate=1e-3, eval=[], steps=3, output="small/run")
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["train", "run.yaml"])
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: The result of this run needs")
    assert "set output to a folder on another disk" in line


def test_stopped_without_room_for_a_checkpoint_the_weights_are_kept(job, no_checkpoints):
    seen: list[events.Event] = []

    def observe(event: events.Event) -> None:
        seen.append(event)
        if isinstance(event, events.Step) and event.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    one = job()
    outcome = train(one, observe)
    assert not outcome.is_finished
    assert outcome.resumes_at == 0
    assert (one.folder / "adapter-step-3" / "adapter_model.safetensors").exists()
    assert not (one.folder / "adapter").exists()  # nobody may take it for the finished one
    (stopped,) = (event.reason for event in seen if isinstance(event, events.Stopped))
    assert "could not be saved, but the weights are kept in" in stopped
    assert "again continues at step 0, since no checkpoint was ever written" in stopped


def test_what_fits_nowhere_in_the_output_is_kept_on_another_disk(job, no_checkpoints, monkeypatch, tmp_path):
    from tunesmith.run import result

    real, one = result.write_adapter, job()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))

    def write(model, run, target, describe):
        if target.parent == one.folder:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(model, run, target, describe)

    monkeypatch.setattr(result, "write_adapter", write)
    with pytest.raises(UserError) as error:
        train(one, lambda _: None)
    (kept,) = (tmp_path / "elsewhere").glob("tunesmith-run-adapter-*")
    assert (kept / "adapter_model.safetensors").exists()
    assert "neither its last checkpoint nor its result could be written" in str(error.value)
    assert "the disk is full" in str(error.value)
    assert f"The trained weights are in {kept} instead" in str(error.value)
    assert "at step 0, since no checkpoint was ever written" in str(error.value)
    assert not (one.folder / "summary.json").exists()
