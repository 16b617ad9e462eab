"""The script that `tunesmith launch slurm` writes, on a real Slurm of one machine: pre-empted, it continues.

Needs Slurm's daemons and munge (Debian: slurm-wlm, munge) and root; `make test-slurm`.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tiny import write_all
from tunesmith.cli.main import main
from tunesmith.train import events

pytestmark = [pytest.mark.slurm, pytest.mark.distributed]
MISSING = [
    name for name in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(name, path="/usr/sbin:/usr/bin")
]
CONFIG = """
ClusterName=here
SlurmctldHost={host}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={port}
SlurmdPort={next_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_interval=2
ReturnToService=2
NodeName={host} CPUs=2 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A Slurm of its own: its folder."""
    if MISSING or os.geteuid() != 0:
        pytest.skip(f"needs root and Slurm here; missing: {', '.join(MISSING) or 'root'}")
    folder = tmp_path / "slurm"
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    monkeypatch.setenv("PATH", f"/usr/sbin:/usr/bin:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o600)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    numbers = {"host": socket.gethostname(), "folder": folder, "port": port, "next_port": port + 1}
    (folder / "slurm.conf").write_text(CONFIG.format(**numbers))
    files = [f"--{name}-file={folder / name}" for name in ("key", "pid", "log", "seed")]
    daemons = [
        ["munged", "--force", "--foreground", f"--socket={folder / 'munge.socket'}", *files],
        ["slurmctld", "-D"],
        ["slurmd", "-D"],
    ]
    started = []
    try:
        for command in daemons:
            started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            time.sleep(1)
        wait_until(lambda: "idle" in told("sinfo"), 30)
        yield folder
    finally:
        subprocess.run(["scancel", "--user=root"], capture_output=True)
        for daemon in reversed(started):
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(20)


def told(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout


def wait_until(holds: Callable[[], bool], seconds: float) -> None:
    give_up = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < give_up, told("squeue") + told("sinfo")
        time.sleep(0.5)


def steps_of(run: Path) -> int:
    return sum(record["event"] == "step" for record in events.read(run)) if (run / "events.jsonl").exists() else 0


def test_a_preempted_run_saves_is_queued_again_and_ends_as_an_undisturbed_one(slurm, tiny_model, tmp_path, monkeypatch):
    ends = []
    settings = {"epochs": 40, "save_every": 1000, "eval_every": 1000}
    for name, is_disturbed in (("alone", False), ("disturbed", True)):
        folder = write_all(tmp_path / name, tiny_model, **settings)
        monkeypatch.chdir(folder)
        with pytest.raises(SystemExit) as ended:
            main(["launch", "slurm", "run.yaml", "--cpu", "--ranks", "2", "--hours", "1", "--submit"])
        assert ended.value.code == 0
        if is_disturbed:
            wait_until(lambda folder=folder: steps_of(folder / "run") > 3, 120)
            urgent = ["sbatch", "--partition=high", "--ntasks=2", "--output=/dev/null", "--wrap", "sleep 5"]
            assert subprocess.run(urgent, capture_output=True).returncode == 0
        wait_until(lambda folder=folder: (folder / "run" / "summary.json").exists(), 300)
        wait_until(lambda: not told("squeue", "--noheader"), 60)
        log = (folder / "run" / "slurm.log").read_text()
        kinds = [record["event"] for record in events.read(folder / "run")]
        assert kinds.count("stopped") == is_disturbed, log
        assert kinds.count("resumed") == is_disturbed, log
        losses = [record["loss"] for record in events.read(folder / "run") if record["event"] == "step"]
        ends.append((losses, (folder / "run" / "adapter" / "adapter_model.safetensors").read_bytes()))
    assert ends[0] == ends[1]
