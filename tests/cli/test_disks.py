"""Every place where a verb writes a file ends in one sentence when the disk is full or read-only, or when a file is
where a folder is needed: what could not be written, why, and what to do."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tiny import SETTINGS, write_data
from tunesmith import disk
from tunesmith.cli.main import main
from tunesmith.errors import UserError


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


_read_only: list[Path] = []


def _refuse(event: str, arguments: tuple) -> None:
    """Python asks this before it opens, makes, renames or removes anything."""
    if not _read_only or event not in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"):
        return
    if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        return
    name = arguments[0]
    if isinstance(name, str | bytes | os.PathLike):
        path = Path(os.path.abspath(os.fsdecode(name)))
        if any(path.is_relative_to(folder) for folder in _read_only):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fsdecode(name))


sys.addaudithook(_refuse)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """As a disk that was mounted so; for root as for anybody."""
    _read_only.append(folder.absolute())
    try:
        yield
    finally:
        _read_only.clear()


@contextmanager
def full(_: Path) -> Iterator[None]:
    """The kernel refuses each byte written to any file, whatever library writes it; names can still be made."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def file_in_the_way(folder: Path) -> Iterator[None]:
    shutil.rmtree(folder, ignore_errors=True)
    folder.write_text("in the way")
    yield


FAULTS = [read_only, full, file_in_the_way]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_model) -> Path:
    """A folder with a run of two steps that is finished."""
    folder = tmp_path_factory.mktemp("finished")
    write_data(folder / "train.jsonl", 8)
    settings = SETTINGS | {"model": str(tiny_model), "eval": [], "steps": 2, "output": str(folder / "run")}
    settings["data"] = [{"path": str(folder / "train.jsonl")}]
    (folder / "run.yaml").write_text(json.dumps(settings))
    with pytest.raises(SystemExit) as ended:
        main(["train", str(folder / "run.yaml")])
    assert not ended.value.code
    return folder


@pytest.fixture
def tunesmith(tmp_path, monkeypatch, capsys) -> Callable[..., Ended]:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Ended:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        return Ended(ended.value.code or 0, captured.out, captured.err)

    return run


def assert_one_sentence(ended: Ended, *words: str) -> None:
    assert ended.code == 1, ended
    errors = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, ended.err
    assert "unexpected" not in errors[0]
    assert "Traceback" not in ended.err + ended.out
    assert "cannot be written" in errors[0], errors
    assert any(why in errors[0] for why in disk.REASONS.values()), errors
    assert errors[0].count(";") >= 1, "and what to do"
    for word in words:
        assert word in errors[0], errors[0]


WRITERS = {
    "init": ("init", "there/run.yaml", "--model", "org/name", "--data", "train.jsonl"),
    "plan --save": ("plan", "run.yaml", "--save", "there/plan.json"),
    "launch slurm --out": ("launch", "slurm", "run.yaml", "--out", "there/job.sh"),
    "launch slurm": ("launch", "slurm", "run.yaml", "output=there/run", "--out", "job.sh"),
    "launch kubernetes --out": ("launch", "kubernetes", "run.yaml", "--out", "there/job.yaml"),
    "launch ray --out": ("launch", "ray", "run.yaml", "--out", "there/job.py"),
    "merge": ("merge", "run", "--to", "there/merged"),
    "bench --to": ("bench", "tiny", "--to", "there/bench.json"),
    "profile": ("profile", "run.yaml", "output=there/run"),
    "train": ("train", "run.yaml", "output=there/run"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("verb", WRITERS)
def test_what_a_verb_cannot_write_is_one_sentence(verb, fault, finished, tunesmith, tmp_path, monkeypatch):
    if verb == "launch slurm" and fault is full:
        pytest.skip("it makes a folder, which takes no byte")
    monkeypatch.setattr("tunesmith.measure.compare.carry_out", lambda _: pytest.fail("it was measured in vain"))
    shutil.copy(finished / "run.yaml", "run.yaml")
    shutil.copy(finished / "train.jsonl", "train.jsonl")
    shutil.copytree(finished / "run", "run")
    Path("there").mkdir()
    before = sorted(Path("there").rglob("*"))
    with fault(Path("there")):
        ended = tunesmith(*WRITERS[verb])
    if fault is file_in_the_way and verb in ("bench --to", "train"):
        assert ended.code == 1
        assert ended.err.count("\n") == 1
        assert "there is no folder" in ended.err or "is a file where the output folder of a run is needed" in ended.err
    else:
        assert_one_sentence(ended, "there")
        assert not re.search(r"/\.|trial|partial", ended.err), "names that the user gave, not ours"
    if verb not in ("train", "profile") and fault is not file_in_the_way:
        assert sorted(Path("there").rglob("*")) == before, "nothing half written is left"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("verb", ["check", "plan --calibrate", "train", "eval"])
def test_a_cache_that_cannot_be_made_is_one_sentence(verb, fault, finished, tunesmith, tmp_path, monkeypatch):
    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tunesmith.plan.calibrate.DISK_BYTES", 1 << 24)
    settings = str(finished / "run.yaml")
    held_out = write_data(tmp_path / "held_out.jsonl", 3, seed=3)
    commands = {
        "check": ("check", settings),
        "plan --calibrate": ("plan", settings, "--calibrate"),
        "train": ("train", settings, f"output={tmp_path / 'run'}"),
        "eval": ("eval", str(finished / "run"), "--data", str(held_out)),
    }
    (tmp_path / "cache").mkdir()
    (tmp_path / "run").mkdir()
    with fault(tmp_path / "cache"):
        ended = tunesmith(*commands[verb])
    if verb == "train" and fault is full:
        assert_one_sentence(ended)  # nor can the run's own folder be written
    else:
        assert_one_sentence(ended, "cache", "TUNESMITH_CACHE")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_converted_model_that_cannot_be_kept_is_one_sentence(fault, tmp_path):
    from safetensors.torch import save_file
    from torch import zeros

    from tunesmith.model import gguf

    def convert(_: Path, folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        save_file({"a": zeros(9)}, str(folder.parent / "model.safetensors"))  # Rust's words for a full disk

    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    (tmp_path / "cache").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "_convert", convert)
        if fault is read_only:
            pytest.skip("only Python's own calls can be made to fail so")
        with (
            fault(tmp_path / "cache"),
            pytest.raises(UserError, match=r"cache/models/.* cannot be written: .*TUNESMITH"),
        ):
            gguf.converted_folder(tmp_path / "a.gguf", tmp_path / "cache")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_measured_speeds_that_cannot_be_kept_are_one_sentence_and_leave_the_old_ones(fault, tmp_path, monkeypatch):
    from tunesmith.plan.hardware import keep_measured, measured_links, measured_links_file

    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path / "cache"))
    keep_measured(measured_links_file(), {"disk": 1.0})
    with (
        fault(tmp_path / "cache"),
        pytest.raises(UserError, match=r"network.json cannot be written: .*TUNESMITH_CACHE"),
    ):
        keep_measured(measured_links_file(), {"disk": 2.0})
    if fault is not file_in_the_way:
        assert measured_links() == {"disk": 1.0}
        assert os.listdir(tmp_path / "cache") == ["network.json"]


def test_what_cannot_be_printed_is_one_sentence():
    with open("/dev/full", "w") as out:
        done = subprocess.run(
            [sys.executable, "-m", "tunesmith", "schema"], stdout=out, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert re.fullmatch(r"error: .* cannot be written: the disk is full; .*\n", done.stderr), done.stderr


def test_no_temporary_folder_is_one_sentence(finished, tunesmith, monkeypatch):
    def nowhere(*_: object, **__: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", nowhere)
    monkeypatch.setattr("tempfile._gettempdir", nowhere, raising=False)
    ended = tunesmith("profile", str(finished / "run.yaml"))
    assert ended.code == 1
    assert ended.err.splitlines()[-1].startswith("error: No temporary folder can be written")
    assert "TMPDIR" in ended.err


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "a/b"), "a/b cannot be written: the disk is full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "a/b"), "a/b cannot be written: the disk quota is used up"),
        (OSError(errno.EROFS, "Read-only file system", "a/b"), "a/b cannot be written: the disk is read-only"),
        (PermissionError(errno.EACCES, "Permission denied", "a/b"), "a/b cannot be opened: there is no permission"),
        (OSError(errno.ENOSPC, "No space left on device"), "cannot be written: the disk is full"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "cannot be written: the disk is full"),
        (RuntimeError("broken"), None),
        (ConnectionError("refused"), None),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), None),
    ],
)
def test_an_error_of_the_disk_is_known_by_its_number_and_others_stay_ours(error, words):
    found = disk.sentence(error)
    assert found is None if words is None else words in found


def test_a_disk_that_cannot_say_how_much_is_free_is_not_taken_for_full(tmp_path, monkeypatch):
    assert disk.free(tmp_path / "not" / "yet" / "there") > 0
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 0))
    assert disk.free(tmp_path) is None
