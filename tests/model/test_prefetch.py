"""Files are in the system's memory before they are asked for; work beside the loading of a model is done by its end."""

from __future__ import annotations

import os
import threading

import pytest

from tunesmith.model import prefetch
from tunesmith.plan.models import files_of

PIECES = 3
SIZE = PIECES * prefetch.PIECE - 5


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for name in ("model-2.safetensors", "model-1.safetensors", "notes.bin"):
        (folder / name).write_bytes(os.urandom(SIZE))
    return folder


pytestmark = pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="only Linux tells what is in memory")


def test_all_of_the_weights_are_read(model, monkeypatch):
    read, preadv = [], os.preadv

    def watched(descriptor, buffers, start, *flags):
        if not flags:
            read.append((os.readlink(f"/proc/self/fd/{descriptor}"), start))
        return preadv(descriptor, buffers, start, *flags)

    monkeypatch.setattr(os, "preadv", watched)
    asked = []
    monkeypatch.setattr(prefetch, "_is_in_memory", lambda _, place: asked.append(place))
    for reader in prefetch.read_files(str(model)):
        reader.join()
    # The system reads a little further than it is asked to: the last byte of a piece tells.
    last = [min((part + 1) * prefetch.PIECE, SIZE) - 1 for part in range(PIECES)]
    assert sorted(asked) == sorted(2 * last)
    wanted = [str(model / f"model-{number}.safetensors") for number in (1, 2)]
    assert sorted(read) == [(name, part * prefetch.PIECE) for name in wanted for part in range(PIECES)]


def test_nothing_is_read_twice(model, monkeypatch):
    read = []
    monkeypatch.setattr(prefetch, "_is_in_memory", lambda *_: True)
    monkeypatch.setattr(os, "preadv", lambda *arguments: read.append(arguments))
    for reader in prefetch.read_files(str(model)):
        reader.join()
    assert read == []


def test_what_was_read_is_in_memory(model):
    file = files_of(str(model))[0]
    with file.open("rb") as stream:
        stream.read()
        try:
            os.preadv(stream.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except OSError:
            pytest.skip("this file system cannot tell")
        assert prefetch._is_in_memory(stream.fileno(), 0)


def test_nothing_is_read_where_memory_is_short(model, monkeypatch):
    monkeypatch.setattr(prefetch, "host_memory", lambda: (1 << 40, 2 * PIECES * prefetch.PIECE))
    assert prefetch.read_files(str(model)) == []


def test_a_file_that_goes_away_ends_the_reading_only(model):
    files = files_of(str(model))
    files[0].unlink()
    prefetch._read(files)


def test_a_file_that_others_wrote_beside_the_weights_is_not_read(model):
    (model / "consolidated.safetensors").write_bytes(b"the same once more")
    assert [file.name for file in files_of(str(model))] == ["model-1.safetensors", "model-2.safetensors"]


def test_files_of_a_gguf_are_none(tmp_path):
    (tmp_path / "one.gguf").write_bytes(b"GGUF")
    assert files_of(str(tmp_path / "one.gguf")) == []


def test_files_of_a_model_in_the_hubs_cache(model, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert files_of("some/one") == []
    there = tmp_path / "models--some--one"
    (there / "refs").mkdir(parents=True)
    (there / "refs" / "main").write_text("a" * 40)
    (there / "snapshots").mkdir()
    model.rename(there / "snapshots" / ("a" * 40))
    assert len(files_of("some/one")) == 2
    (there / "snapshots" / ("a" * 40) / "model-3.safetensors").symlink_to(tmp_path / "nowhere")
    assert prefetch.read_files("some/one") == []  # loading says what is missing


def test_a_model_that_is_nowhere_is_left_to_loading(tmp_path):
    assert prefetch.read_files(str(tmp_path / "nothing")) == []


def test_work_beside_is_done_at_the_end():
    begun, done = threading.Event(), []

    def work():
        begun.wait()
        done.append(True)

    with prefetch.beside(work):
        assert not done
        begun.set()
    assert done


def test_work_that_fails_beside_is_no_failure_of_the_rest():
    with prefetch.beside(lambda: 1 / 0):
        pass
