"""Our single-host launcher beside torch's elastic agent (`torchrun --standalone`), with two ranks that do nothing.

    python benchmarks/launcher.py [--repeats 5]

Seconds until both ranks run; from the death of one (kill -9) until the other is gone; what is said about it; how long
ranks may save after SIGTERM; seconds from a death until both run again; memory of the process that launches. All in
turn, so that what else the machine does meets all; medians.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from results import write_result

PATIENT = "torchrun, shutdown timeout 600 s"
OURS = """
import sys
from tunesmith.launch import local
restarts, *command = sys.argv[1:]
failure = local.run_ranks(command, 2)
for _ in range(int(restarts)):
    if failure is None or failure.is_final:
        break
    failure = local.run_ranks(command, 2)
if failure:
    for line in failure.report(2):
        print(line, file=sys.stderr)
    sys.exit(failure.exit_code)
"""
RANK = """
import os, signal, sys, time
from pathlib import Path
folder, way, rank, seconds = Path(sys.argv[1]), sys.argv[2], os.environ["RANK"], float(sys.argv[3])
asked = []
if way != "plain":
    signal.signal(signal.SIGTERM, lambda *_: asked.append(time.time()))
(folder / f"{time.time()}-{rank}-{os.getpid()}").touch()
while True:
    time.sleep(0.005)
    if way == "ends" and len(list(folder.glob("*-0-*"))) and len(list(folder.glob("*-1-*"))):
        break
    if way == "notices" and (folder / "killed").exists():  # as gloo does, at once
        from tunesmith.launch.local import write_failure
        write_failure("the connection was closed by the peer", "Traceback of the other rank")
        sys.exit(70)
    if way == "saves" and asked and time.time() - asked[0] > seconds:
        (folder / f"saved-{rank}").touch()
        sys.exit(143)
"""
"""plain: SIGTERM ends it. ends: when both run. waits: SIGTERM is noted, but a collective does not return. notices:
fails because the other is gone. saves: so many seconds after SIGTERM it is saved."""
LAUNCHERS = {"ours": [], "torchrun": [], PATIENT: ["--shutdown-timeout=600"]}
SAVE_SECONDS = 40.0
"""A checkpoint of 60 GB on a disk that takes 1.5 GB/s."""


class Launched:
    """Two ranks under one of the launchers."""

    def __init__(self, launcher: str, way: str, *, restarts: int = 0):
        self.folder = Path(tempfile.mkdtemp(prefix="launcher-"))
        (self.folder / "rank.py").write_text(RANK)
        program = [str(self.folder / "rank.py"), str(self.folder), way, str(SAVE_SECONDS)]
        if launcher == "ours":
            command = [sys.executable, "-c", OURS, str(restarts), sys.executable, *program]
        else:
            options = ["--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}", *LAUNCHERS[launcher]]
            command = [sys.executable, "-m", "torch.distributed.run", *options, *program]
        self.began = time.time()
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def started(self, count: int) -> list[tuple[float, str, int]]:
        """When, which rank and which process, of the first so many that ran."""
        while len(names := sorted(path.name for path in self.folder.glob("*.*-*-*"))) < count:
            assert time.time() < self.began + 120
            time.sleep(0.005)
        return [(float(at), rank, int(pid)) for at, rank, pid in (name.split("-") for name in names[:count])]

    def kill_rank_1(self) -> float:
        pid = next(pid for _, rank, pid in self.started(2) if rank == "1")
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        at = time.time()
        (self.folder / "killed").touch()
        return at

    def end(self) -> tuple[float, str]:
        """When the launcher has ended, and what it had to say."""
        _, said = self.process.communicate(timeout=180)
        return time.time(), said


def start(launcher: str) -> dict[str, Any]:
    run = Launched(launcher, "ends")
    found = run.started(2)[-1][0] - run.began
    end, _ = run.end()
    assert run.process.returncode == 0
    return {"start_seconds": found, "start_to_end_seconds": end - run.began}


def death(launcher: str, way: str) -> dict[str, Any]:
    run = Launched(launcher, way)
    pids = {rank: pid for _, rank, pid in run.started(2)}
    memory = psutil.Process(run.process.pid).memory_info().rss
    at = run.kill_rank_1()
    while psutil.pid_exists(pids["0"]):
        time.sleep(0.005)
    gone = time.time() - at
    end, said = run.end()
    lines = [line for line in said.splitlines() if line.strip()]
    found = {"others_gone_seconds": gone, "launcher_gone_seconds": end - at, "lines_on_stderr": len(lines)}
    return {f"{way}_{name}": value for name, value in found.items()} | {"launcher_bytes": memory, "said": said}


def waiting(launcher: str) -> dict[str, Any]:
    return death(launcher, "waits")


def cause(launcher: str) -> dict[str, Any]:
    """Whether the rank that was killed is named, where the other says at once that its connection was closed."""
    said = death(launcher, "notices")["said"]
    if launcher == "ours":
        return {"names_the_cause": "rank 1 of 2 failed first: it was ended by signal 9" in said}
    first = said.partition("Root Cause")[2].partition("rank")[2].strip(" :").split()
    return {"names_the_cause": first[:1] == ["1"]}


def stop(launcher: str) -> dict[str, Any]:
    run = Launched(launcher, "saves")
    run.started(2)
    time.sleep(0.5)
    run.process.send_signal(signal.SIGTERM)
    at = time.time()
    end, said = run.end()
    saved = len(list(run.folder.glob("saved-*")))
    found = {"ranks_that_saved": saved, "stop_seconds": end - at, "stop_exit_code": run.process.returncode}
    return found | {"stop_lines_on_stderr": len([line for line in said.splitlines() if line.strip()])}


def restart(launcher: str) -> dict[str, Any]:
    run = Launched(launcher, "waits", restarts=1)
    at = run.kill_rank_1()
    again = run.started(4)[-1][0] - at
    for _, _, pid in run.started(4)[2:]:
        os.kill(pid, signal.SIGKILL)
    run.end()
    return {"running_again_seconds": again}


SCENARIOS: list[tuple[Callable[[str], dict[str, Any]], int | None]] = [
    (start, None),
    (lambda launcher: death(launcher, "plain"), None),
    (waiting, None),
    (cause, None),
    (restart, 3),
    (stop, 1),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    found: dict[str, dict[str, list[Any]]] = {launcher: {} for launcher in LAUNCHERS}
    for scenario, most in SCENARIOS:
        for repeat in range(min(options.repeats, most or options.repeats)):
            for launcher, values in found.items():
                if launcher == PATIENT and not (scenario in (stop, waiting) and repeat == 0):
                    continue
                for name, value in scenario(launcher).items():
                    values.setdefault(name, []).append(value)
        print(
            {launcher: {k: v for k, v in values.items() if k != "said"} for launcher, values in found.items()},
            flush=True,
        )
    for launcher, values in found.items():
        print(f"--- {launcher}, of a rank that was killed:\n{values.pop('said')[0]}")
    rows = [{"launcher": launcher} | {k: middle(v) for k, v in values.items()} for launcher, values in found.items()]
    what = "The single-host launcher beside torch's elastic agent: two ranks; medians"
    print(f"wrote {write_result('launcher', what, rows)}")


def middle(values: list[Any]) -> Any:
    if isinstance(values[0], bool):
        return f"{sum(values)} of {len(values)}"
    value = statistics.median(values)
    return round(value, 3) if isinstance(value, float) and not value.is_integer() else int(value)


if __name__ == "__main__":
    main()
