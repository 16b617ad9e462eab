"""How fast checkpoints are written, beside what the disk itself takes, and how many training steps go on meanwhile.

    python benchmarks/checkpoint.py [--sizes 2 20] [--repeats 3] [--folder FOLDER]

The disk's own rate is that of the same bytes in a plain file, synced at the end: through the page cache as `dd
conv=fsync` does, and past it as `dd oflag=direct`; the faster counts. A checkpoint's rate is that of the same: until
all of its tensors are on the disk, synced. Then it is read back from there and renamed, which is timed, too. Training
steps go on all the while, in another thread. All in turn, so that what else uses the disk meets all; medians. The state
lies in memory as copies of a GPU's do, from the beginning of a page; of one larger than 4 GB, names share memory, and
the bytes of all are written.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from results import write_result

from tunesmith.checkpoint import store
from tunesmith.checkpoint.store import CheckpointStore

GB = 10**9
TENSOR_BYTES = 62_500 * 4096  # 0.256 GB
DISTINCT_GB = 4
"""Of a state, in memory."""
PIECE_BYTES = 16 * 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 20], metavar="GB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("checkpoint-benchmark"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for size in options.sizes:
        options.folder.mkdir(parents=True)
        try:
            rows.append(measure(size, options.repeats, options.folder))
        finally:
            shutil.rmtree(options.folder)
        print(rows[-1], flush=True)
    what = "Checkpoints beside the disk's own rate; rates in GB/s"
    print(f"wrote {write_result('checkpoint', what, rows)}")


def measure(size: int, repeats: int, folder: Path) -> dict[str, Any]:
    tensors = state_of(size)
    size_in_gb = sum(tensor.nbytes for tensor in tensors.values()) / GB
    rows = []
    for _ in range(repeats):
        row = {
            "disk_through_the_cache": size_in_gb / write_plain(folder / "plain", size_in_gb, direct=False),
            "disk_past_the_cache": size_in_gb / write_plain(folder / "plain", size_in_gb, direct=True),
        }
        saved = save(folder, tensors, is_copied=size <= DISTINCT_GB)
        row["written"] = size_in_gb / saved["write_seconds"]
        row["written_and_read_back"] = size_in_gb / saved["seconds"]
        rows.append(row | saved)
        print(rows[-1], flush=True)
    alone = steps_a_second(10.0)
    median = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    disk = max(median["disk_through_the_cache"], median["disk_past_the_cache"])
    return {
        "gigabytes": round(size_in_gb, 2),
        "of_the_disks_own_rate": round(median["written"] / disk, 3),
        "read_back_too": round(median["written_and_read_back"] / disk, 3),
        **{name: round(value, 3) for name, value in median.items()},
        "steps_a_second_alone": round(alone, 2),
        "repeats": "; ".join(f"{row['written']:.2f} of {row['disk_past_the_cache']:.2f}" for row in rows),
    }


def state_of(size: int) -> dict[str, torch.Tensor]:
    count = round(size * GB / TENSOR_BYTES)
    distinct = [
        store.copy_to_host(torch.randn(TENSOR_BYTES // 4)) for _ in range(min(count, DISTINCT_GB * GB // TENSOR_BYTES))
    ]
    return {f"weight.{i}": distinct[i % len(distinct)] for i in range(count)}


def write_plain(file: Path, size: float, *, direct: bool) -> float:
    memory = mmap.mmap(-1, PIECE_BYTES)
    memory.write(os.urandom(PIECE_BYTES))
    began = time.monotonic()
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0))
    for _ in range(round(size * GB / PIECE_BYTES)):
        assert os.write(fd, memory) == PIECE_BYTES
    os.fsync(fd)
    seconds = time.monotonic() - began
    os.close(fd)
    file.unlink()
    return seconds


def save(folder: Path, tensors: dict[str, torch.Tensor], *, is_copied: bool) -> dict[str, float]:
    """As the training loop does: copied, then written and read back by a thread while steps go on."""
    checkpoints = CheckpointStore(folder / "checkpoints", "benchmark", keep=1)
    all_written: list[float] = []
    real = store.digest_file

    def read_back(*arguments: Any, **options: Any) -> str:
        all_written.append(time.monotonic())
        return real(*arguments, **options)

    step = training_step()
    began = time.monotonic()
    saving = checkpoints.begin(1, tensors, {}, **({"copy": store.copy_to_host} if is_copied else {}))
    begun = time.monotonic()
    store.digest_file = read_back
    thread = threading.Thread(target=saving.write, daemon=True)
    thread.start()
    count = 0
    while thread.is_alive():
        step()
        count += 1
    ended = time.monotonic()
    store.digest_file = real
    assert saving.finish() is not None
    shutil.rmtree(checkpoints.folder)
    return {
        "begin_seconds": begun - began,
        "write_seconds": all_written[0] - begun,
        "seconds": ended - begun,
        "steps_meanwhile": count,
        "steps_a_second_meanwhile": count / (ended - begun),
    }


def training_step() -> Callable[[], None]:
    """Forward, backward and update of a small model, all on the CPU."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 512) for _ in range(4)]
    model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.GELU())))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(256, 512)

    def step() -> None:
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step


def steps_a_second(seconds: float) -> float:
    step, count, began = training_step(), 0, time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        step()
        count += 1
    return count / passed


if __name__ == "__main__":
    main()
