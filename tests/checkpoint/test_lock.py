import errno
import os
import signal
import subprocess
import sys

import pytest
import torch

from tunesmith.checkpoint import lock
from tunesmith.checkpoint.lock import RunLock
from tunesmith.checkpoint.store import CheckpointStore
from tunesmith.errors import UserError

HOLD = """
import os, sys, time
from pathlib import Path
from tunesmith.checkpoint.lock import RunLock
with RunLock(Path(sys.argv[1])):
    if os.fork() == 0:
        time.sleep(60)  # a data worker that outlives its parent must not keep the lock
        os._exit(0)
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_told_who_holds_the_run_and_a_kill_frees_it(tmp_path):
    folder = tmp_path / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"written by process {holder.pid};"), RunLock(folder, wait_s=0.2):
            pass
        holder.kill()
        holder.wait()
        with RunLock(folder):
            assert (folder / ".lock").read_text() == f"{os.getpid()}\n"
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.wait()
        holder.stdout.close()


def test_the_lock_is_free_after_use_and_after_an_error(tmp_path):
    with pytest.raises(KeyError), RunLock(tmp_path):
        raise KeyError
    with RunLock(tmp_path), pytest.raises(UserError, match=str(os.getpid())), RunLock(tmp_path, wait_s=0):
        pass
    with RunLock(tmp_path):
        pass


def test_a_file_system_without_locks_is_said_and_does_not_stop_the_run(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    warnings = []
    monkeypatch.setattr("fcntl.flock", refuse)
    with RunLock(tmp_path, warn=warnings.append):
        pass
    assert "no locks" in warnings[0]
    store = CheckpointStore(tmp_path / "checkpoints", "x", warn=warnings.append)
    assert store.save(1, {"weight": torch.ones(3)}, {"step": 1}) == store.latest()
    assert len(warnings) == 1


def test_a_process_is_alive_or_not():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert not lock.is_alive(child)
    assert lock.is_alive(os.getpid())
    assert lock.is_alive(1)
