"""A process that saves checkpoints until it is killed; started once, it forks a writer for each line it reads.

    python writer.py FOLDER [BYTES_OF_A_FILE]

A line is `FIRST_STEP DIES_AT`: the writer kills itself at its DIES_AT-th file-system operation, or, with 0,
waits to be killed. It prints `pid N`, `saved N` after each acknowledged save, and `dead` when it is gone.
"""

import os
import signal
import sys
from pathlib import Path

import torch

from tunesmith.checkpoint import store

LINEAGE = "killed"
KEEP = 2


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {
        "weight": torch.full((64, 33), float(step)) + torch.arange(33),
        "phase": torch.arange(5000, dtype=torch.bfloat16) + step,
        "count": torch.tensor(step),
    }


def state(step: int) -> dict:
    return {"step": step, "rates": [0.1 * step, 1 / (step + 3)]}


def metric(step: int) -> float:
    return float((step * 7) % 11)


def write(folder: Path, step: int, dies_at: int) -> None:
    if dies_at:
        _die_at(dies_at)
    checkpoints = store.CheckpointStore(folder, LINEAGE, keep=KEEP, warn=lambda text: None)
    checkpoints.latest()
    while True:
        if checkpoints.save(step, tensors(step), state(step), metric=metric(step)):
            os.write(1, f"saved {step}\n".encode())
        step += 1


def _die_at(count: int) -> None:
    seen = 0

    def count_operation(event: str, args: tuple) -> None:
        nonlocal seen
        if event in ("open", "write", "fsync") or event.startswith("os."):
            seen += 1
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)

    real_sync = os.fsync

    def sync(fd: int) -> None:
        count_operation("fsync", ())
        real_sync(fd)

    real_new = store.write_new

    def write_in_halves(path: Path, chunks) -> tuple[int, str]:
        def halves():
            for chunk in chunks:
                yield chunk[: len(chunk) // 2]
                count_operation("write", ())
                yield chunk[len(chunk) // 2 :]

        return real_new(path, halves())

    os.fsync = sync
    store.write_new = write_in_halves
    sys.addaudithook(count_operation)


def main() -> None:
    folder = Path(sys.argv[1])
    if len(sys.argv) > 2:
        store.SHARD_BYTES = int(sys.argv[2])
    torch.set_num_threads(1)
    for line in sys.stdin:
        step, dies_at = map(int, line.split())
        child = os.fork()
        if child == 0:
            try:
                write(folder, step, dies_at)
            finally:
                os._exit(1)
        os.write(1, f"pid {child}\n".encode())
        os.waitpid(child, 0)
        os.write(1, b"dead\n")


if __name__ == "__main__":
    main()
