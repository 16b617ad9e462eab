"""Merging an adapter into a large sharded model: host memory, and time against what the disk takes for the same bytes.

    python benchmarks/merge.py FOLDER [--shape llama3-8b] [--rank 16]

FOLDER needs room for the model twice; what is written there is removed at the end. The model has random weights in
bf16 in files of 5 GB, the adapter random factors on all linears. `tunesmith merge` runs in a process of its own, whose
largest resident memory (mapped pages of files counted) the kernel tells. Before and after it, the base's files are
copied, in pieces of 16 MiB by one thread: through the page cache with a sync at the end, as `cp` does, and past the
cache, which is as fast as the disk itself is. Files leave the page cache before each reading. The result is
benchmarks/results/merge.json.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from results import write_result

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
FILE_BYTES = 5 * 10**9
PIECE, BLOCK = 16 << 20, 4096
SMALL = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip


def make_base(folder: Path, shape: dict[str, Any], tokenizer: Path) -> dict[str, tuple[int, ...]]:
    """Sharded, as the hub has such models; returns the shape of each tensor."""
    import torch
    import transformers
    from safetensors.torch import save_file

    shutil.copytree(tokenizer, folder)
    for old in folder.glob("*.safetensors"):
        old.unlink()
    config = transformers.LlamaConfig(**shape, tie_word_embeddings=False, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tuple(one.shape) for name, one in transformers.LlamaForCausalLM(config).named_parameters()}
    generator, held, files, size = torch.Generator().manual_seed(0), {}, [], 0

    def put() -> None:
        files.append((f"model-{len(files) + 1:05d}.safetensors", list(held)))
        save_file(held, folder / files[-1][0], metadata={"format": "pt"})
        held.clear()

    noise = 0.02 * torch.randn(1 << 24, generator=generator).bfloat16()
    for name, dims in shapes.items():
        count = torch.Size(dims).numel()
        if size + 2 * count > FILE_BYTES:
            put()
            size = 0
        start = int(torch.randint(1 << 23, (1,), generator=generator))  # random enough, and fast to make
        flat = noise[start : start + (1 << 23)].repeat(-(-count // (1 << 23)))[:count]
        held[name] = torch.ones(dims, dtype=torch.bfloat16) if len(dims) == 1 else flat.reshape(dims).clone()
        size += 2 * count
    put()
    index = {"metadata": {}, "weight_map": {name: file for file, names in files for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return shapes


def make_run(folder: Path, base: Path, shapes: dict[str, tuple[int, ...]], tiny: Path, rank: int) -> Path:
    """A finished run over a tiny model, with the large one put in its place."""
    import torch
    from safetensors.torch import load_file, save_file

    from export.models import make_run as train_run

    run = train_run(folder, tiny, steps=1, lora={"rank": rank})
    content = json.loads((run / "run.json").read_text())
    content["settings"]["model"] = str(base)
    (run / "run.json").write_text(json.dumps(content))
    (run / "base.json").unlink()
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    shutil.copy(base / "config.json", run / "side_files" / "config.json")
    file = run / "adapter" / "adapter_model.safetensors"
    generator, made = torch.Generator().manual_seed(1), {}
    first = [name for name in load_file(file) if re.search(r"\.layers\.0\.", name)]
    layers = 1 + max(int(match[1]) for name in shapes if (match := re.search(r"\.layers\.(\d+)\.", name)))
    for layer in range(layers):
        for name in (one.replace(".layers.0.", f".layers.{layer}.") for one in first):
            linear, factor = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", name).groups()
            rows, columns = shapes[f"{linear}.weight"]
            size = (rank, columns) if factor == "A" else (rows, rank)
            made[name] = 0.02 * torch.randn(size, generator=generator)
    save_file(made, file, metadata={"format": "pt"})
    return run


def leave_cache(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def plain_rate(base: Path, folder: Path) -> dict[str, float]:
    """Seconds to read the base's files, to copy them as `cp` does, and to copy them past the page cache."""
    leave_cache(base)
    room, began, size = bytearray(PIECE), time.monotonic(), 0
    for file in sorted(base.glob("*.safetensors")):
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(room):
                size += count
    read = time.monotonic() - began
    leave_cache(base)
    began = time.monotonic()
    with (folder / "copy").open("wb", buffering=0) as to:
        for file in sorted(base.glob("*.safetensors")):
            with file.open("rb", buffering=0) as stream:
                while count := stream.readinto(room):
                    to.write(memoryview(room)[:count])
        os.fsync(to.fileno())
    copied = time.monotonic() - began
    (folder / "copy").unlink()
    direct = direct_copy(base, folder / "copy")
    seconds = {"read_s": round(read, 1), "copy_s": round(copied, 1), "direct_copy_s": round(direct, 1)}
    return {"gigabytes": size / 1e9, **seconds}


def direct_copy(base: Path, to: Path) -> float:
    """Seconds to copy whole blocks of the base's files past the page cache."""
    leave_cache(base)
    room, began = mmap.mmap(-1, PIECE), time.monotonic()
    target = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    for file in sorted(base.glob("*.safetensors")):
        source = os.open(file, os.O_RDONLY | os.O_DIRECT)
        while count := os.readv(source, [room]) // BLOCK * BLOCK:
            os.write(target, memoryview(room)[:count])
        os.close(source)
    os.fsync(target)
    os.close(target)
    seconds = time.monotonic() - began
    to.unlink()
    return seconds


def peak() -> float:
    """Gigabytes of resident memory, at most so far. (What getrusage tells begins with that of the parent.)"""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024 / 1e9


def worker(run: Path, to: Path, *, with_proof: bool) -> None:
    from tunesmith.run import merge

    seconds = {}

    def timed(name: str) -> None:
        work = getattr(merge._Streamed, name)

        def call(*given, **named):
            began, busy = time.monotonic(), time.process_time()
            try:
                return work(*given, **named)
            finally:
                seconds[f"{name}_s"] = round(time.monotonic() - began, 1)
                seconds[f"{name}_cpu_s"] = round(time.process_time() - busy, 1)
                seconds[f"after_{name}_peak_gb"] = peak()
                print(json.dumps(seconds), flush=True)

        setattr(merge._Streamed, name, call)

    timed("write")
    timed("prove")
    if not with_proof:
        merge._writer(run).write(to, precision="bf16", card="", progress=None)
        print(json.dumps({**seconds, "peak_gb": peak()}))
        return
    began = time.monotonic()
    merged = merge.merge_run(run, to)
    seconds["all_s"] = round(time.monotonic() - began, 1)
    seconds["peak_gb"] = peak()
    print(json.dumps({**seconds, "difference": merged.difference, "effect": merged.effect}))


def main() -> None:
    from tiny_model import make_tiny_model
    from tunesmith.measure.bench import SHAPES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="llama3-8b")
    parser.add_argument("--layers", type=int, help="fewer than the shape has: memory is that of the widest unit")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--without-proof", action="store_true", help="the writing alone")
    parser.add_argument("--worker", type=Path, nargs=2)
    chosen = parser.parse_args()
    if chosen.worker:
        worker(*chosen.worker, with_proof=not chosen.without_proof)
        return
    folder = chosen.folder / "merge"
    folder.mkdir(parents=True)
    try:
        tiny = make_tiny_model(folder / "tiny")
        shape = SMALL if chosen.shape == "1b" else SHAPES[chosen.shape]
        shape = {**shape, "num_hidden_layers": chosen.layers or shape["num_hidden_layers"]}
        shapes = make_base(folder / "base", shape, tiny)
        run = make_run(folder / "made", folder / "base", shapes, tiny, chosen.rank)
        before = plain_rate(folder / "base", folder)
        print(json.dumps(before), flush=True)
        leave_cache(folder / "base")
        command = [sys.executable, __file__, str(folder), "--worker", str(run), str(folder / "merged")]
        command += ["--without-proof"] if chosen.without_proof else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
        merged = json.loads(done.stdout.splitlines()[-1])
        print(json.dumps(merged), flush=True)
        shutil.rmtree(folder / "merged")
        after = plain_rate(folder / "base", folder)
        rates = {
            f"of_{name}_rate": (before[f"{name}_s"] + after[f"{name}_s"]) / 2 / merged["write_s"]
            for name in ("copy", "direct_copy")
        }
        numbers = {
            "shape": chosen.shape, "layers": shape["num_hidden_layers"], "rank": chosen.rank,
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "disk": {"before": before, "after": after}, "merge": merged, **rates,
        }  # fmt: skip
        print(json.dumps(numbers, indent=1))
        if chosen.shape != "1b":
            write_result(
                "merge", "`tunesmith merge` of a sharded random model: memory, and time against the disk", numbers
            )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
