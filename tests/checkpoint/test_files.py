import hashlib
import os

import pytest
import xxhash

from tunesmith.checkpoint import files


def test_an_atomic_write_replaces_the_whole_file_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "plan.json"
    files.write_atomic(path, b"old" * 100)
    files.write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_failed_atomic_write_keeps_the_old_file(tmp_path, monkeypatch, broken):
    path = tmp_path / "plan.json"
    files.write_atomic(path, b"old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(OSError):
        files.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_written_size_and_checksum_are_those_of_the_file(tmp_path):
    path = tmp_path / "file"
    size, digest = files.write_new(path, [b"a" * 1000, memoryview(b"bc"), b""])
    assert (size, digest) == (path.stat().st_size, xxhash.xxh3_128_hexdigest(path.read_bytes()))
    assert files.digest_file(path) == files.digest_file(path, from_disk=True) == digest
    assert files.digest_file(path, "sha256") == hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(FileExistsError):
        files.write_new(path, [b"again"])


def test_folders_are_made_with_their_parents(tmp_path):
    files.make_folder(tmp_path / "a" / "b" / "c")
    files.make_folder(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        files.make_folder(tmp_path / "file" / "below")
