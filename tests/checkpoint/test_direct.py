import errno
import fcntl
import mmap
import os
import random
import threading
import time

import numpy as np
import pytest

from tunesmith.checkpoint import direct, files


@pytest.fixture
def small(monkeypatch):
    """Pieces of four blocks, so that little data makes many."""
    monkeypatch.setattr(direct, "PIECE_BYTES", 4 * direct.BLOCK_BYTES)
    monkeypatch.setattr(direct, "DIRECT_BYTES", direct.BLOCK_BYTES)
    monkeypatch.setattr(files, "DIRECT_BYTES", 1)


def chunks_of(sizes, begins_at):
    """Random bytes in chunks, each so many bytes after a page's beginning."""
    made = []
    for size in sizes:
        memory = mmap.mmap(-1, size + begins_at + 1)
        memory.write(random.Random(size).randbytes(size + begins_at))
        made.append(memoryview(memory)[begins_at : begins_at + size])
    return made


@pytest.mark.parametrize("begins_at", [0, 64, 1])
@pytest.mark.parametrize(
    "sizes",
    [[], [1], [4096], [4095, 1], [4096, 8192, 40960, 5], [5, 4096, 16384], [16384, 16385, 100_000], [0, 65536, 0, 3]],
)
def test_what_is_written_is_read_again_whatever_the_chunks_and_their_memory(tmp_path, small, sizes, begins_at):
    chunks = chunks_of(sizes, begins_at)
    size, digest = files.write_new(tmp_path / "file", chunks)
    assert (tmp_path / "file").read_bytes() == b"".join(chunks)
    assert size == sum(sizes)
    assert files.digest_file(tmp_path / "file", from_disk=True) == files.digest_file(tmp_path / "file") == digest


@pytest.mark.parametrize("where", ["everywhere", "as it lies", "when asked for"])
def test_a_file_system_that_refuses_is_written_and_read_in_the_usual_way(tmp_path, small, monkeypatch, where):
    real_write, real_fcntl, refused = os.write, fcntl.fcntl, []
    flag = getattr(os, "O_DIRECT", 0)
    chunks = chunks_of([65536, 10_000], 0)
    mine = {np.frombuffer(chunk, np.uint8).ctypes.data for chunk in chunks}

    def write(fd, data):
        lies = np.frombuffer(data, np.uint8).ctypes.data in mine
        if real_fcntl(fd, fcntl.F_GETFL) & flag and (where == "everywhere" or (where == "as it lies" and lies)):
            refused.append(len(data))
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_write(fd, data)

    def control(fd, command, *value):
        if where == "when asked for" and value and value[0] & flag:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_fcntl(fd, command, *value)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(fcntl, "fcntl", control)
    _, digest = files.write_new(tmp_path / "file", chunks)
    assert (tmp_path / "file").read_bytes() == b"".join(chunks)
    assert files.digest_file(tmp_path / "file", from_disk=True) == digest
    assert bool(refused) == (where != "when asked for")


def test_a_full_disk_is_an_error_past_the_cache_too(tmp_path, small, monkeypatch):
    def full(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_new(tmp_path / "file", chunks_of([65536], 0))


def test_jobs_run_so_many_at_a_time_and_their_results_keep_their_order():
    running, most = set(), []

    def job(number):
        running.add(number)
        most.append(len(running))
        time.sleep(0.01)
        running.remove(number)
        return number

    assert direct.run_in_threads([lambda n=n: job(n) for n in range(9)], 3) == list(range(9))
    assert max(most) <= 3
    assert direct.run_in_threads([], 3) == []


def test_after_a_failure_no_job_begins_and_none_runs_any_more():
    begun, ended = [], []
    failed = threading.Event()

    def slow(number):
        begun.append(number)
        failed.wait(10)
        time.sleep(0.05)
        ended.append(number)

    def fails():
        failed.set()
        raise IndexError("this one")

    with pytest.raises(IndexError, match="this one"):
        direct.run_in_threads([lambda: slow(0), fails, *(lambda n=n: slow(n) for n in range(2, 20))], 2)
    assert begun == ended
    assert len(begun) <= 2
