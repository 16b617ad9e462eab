"""What several ranks write together is, byte for byte, what one would write; or nothing, and all of them say why."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file

from tunesmith.checkpoint import result
from tunesmith.checkpoint.codec import ShardSlice
from tunesmith.parallel.ranks import Ranks

TENSORS = {
    "a.weight": torch.randn(10, 6).bfloat16(),
    "b.weight": torch.randn(7, 3, 2).bfloat16(),
    "c.bias": torch.randn(5).bfloat16(),
    "d.mask": torch.randn(2, 2),
    "e.scale": torch.tensor(3.0).bfloat16(),
}
RANKS = 3


class Threads:
    """Ranks that are threads of one process."""

    def __init__(self, rank: int, shared: dict):
        self.rank, self.count, self.is_first, self.shared = rank, RANKS, rank == 0, shared

    def gather(self, text: str) -> list[str]:
        self.shared["said"][self.rank] = text
        self.shared["all here"].wait(10)
        found = list(self.shared["said"])
        self.shared["all here"].wait(10)
        return found


def rows_of(rank: int):
    """Rows of matrices in shares of unequal size, the rest on the first rank."""
    for name, tensor in TENSORS.items():
        if tensor.ndim > 1:
            each = -(-len(tensor) // RANKS)
            mine = tensor.float()[rank * each : (rank + 1) * each]  # ranks hold them in fp32
            if len(mine):
                yield name, ShardSlice(mine, rank * each, len(tensor))
        elif rank == 0:
            yield name, ShardSlice(tensor, 0, len(tensor) if tensor.ndim else None)


def write(target, describe=lambda _: None) -> list[str]:
    """What each rank failed of, in their order."""
    shared = {"said": [""] * RANKS, "all here": threading.Barrier(RANKS)}
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in TENSORS.items()}

    def be(rank: int) -> str:
        # Of a pipeline, say: nobody knows all tensors.
        known = {name: kind for name, kind in shapes.items() if rank == 0 or name != "c.bias"}
        options = {"pattern": "model{suffix}.safetensors", "describe": describe}
        try:
            result.write_on_all_ranks(target, known, rows_of(rank), Threads(rank, shared), **options)
        except OSError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(be, range(RANKS)))


def test_ranks_write_the_bytes_of_one_process(tmp_path):
    assert write(tmp_path / "model", lambda folder: (folder / "config.json").write_text("{}") and None) == [""] * RANKS
    save_file(TENSORS, tmp_path / "whole.safetensors", metadata={"format": "pt"})
    written = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    assert written.keys() == {"model.safetensors", "config.json"}
    assert written["model.safetensors"] == (tmp_path / "whole.safetensors").read_bytes()


def test_large_models_are_several_files_with_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr(result, "LARGEST_FILE", 130)
    assert write(tmp_path / "model") == [""] * RANKS
    index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())
    files = {file.name: load_file(file) for file in (tmp_path / "model").glob("*.safetensors")}
    assert len(files) > 1
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
    for name, file in index["weight_map"].items():
        assert torch.equal(files[file][name], TENSORS[name])


@pytest.mark.parametrize("is_refused", [False, True])
def test_large_files_go_past_the_page_cache_where_the_disk_takes_it(tmp_path, monkeypatch, is_refused):
    monkeypatch.setattr(result, "LARGE_FILE", 0)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a.odd": torch.randn(1000, 3, generator=generator),
        "b.weight": torch.randn(2**19 + 16, generator=generator)[16:].view(512, 1024),  # beside blocks of memory
        "c.weight": torch.randn(300, 4096, generator=generator),
    }
    asked, real = [], result.os.pwrite

    def pwrite(file, view, start):
        is_direct = bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)
        asked.append((is_direct, len(view)))
        if is_direct and is_refused:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(file, view, start)

    monkeypatch.setattr(result.os, "pwrite", pwrite)
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    parts = ((name, ShardSlice(tensor, 0, len(tensor))) for name, tensor in tensors.items())
    options = {"pattern": "model{suffix}.safetensors", "describe": lambda _: None}
    result.write_on_all_ranks(tmp_path / "model", shapes, parts, Ranks(), **options)
    file = tmp_path / "model" / "model.safetensors"
    found = load_file(file)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert (8 + int.from_bytes(file.read_bytes()[:8], "little")) % 4096 == 0
    direct = sum(size for is_direct, size in asked if is_direct)
    assert direct == (2**21 if is_refused else 2**21 + 300 * 4096 * 4) or not direct  # a disk that refuses is not asked


@pytest.mark.parametrize("fails", ["describing", "writing", "syncing"])
def test_where_one_cannot_write_all_fail_and_nothing_is_left(tmp_path, monkeypatch, fails):
    def full(*_) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if fails == "writing":
        calls = iter(range(100))
        real = result._write_at
        monkeypatch.setattr(result, "_write_at", lambda *more: full() if next(calls) == 2 else real(*more))
    if fails == "syncing":  # of what was written a while ago
        monkeypatch.setattr(result, "WRITE_BACK", 1)
        monkeypatch.setattr(result.os, "fdatasync", full)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/old").touch()
    found = write(tmp_path / "model", full if fails == "describing" else lambda _: None)
    assert found == ["[Errno 28] No space left on device"] * RANKS
    assert [file.name for file in tmp_path.rglob("*")] == ["model", "old"]
