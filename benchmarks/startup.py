"""Seconds from `tunesmith train` to the end of its first step, cold and warm, for a model on the local disk.

    python benchmarks/startup.py [--shape llama3-8b] [--folder FOLDER] [--warm 3] [key=value ...]

Weights are random at a published shape, a file for each layer. Cold: nothing compiled, no tokens, no files in the
system's memory (where the system lets us drop them). Warm: the same command again, so many times.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

from results import write_result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama3-8b")
    parser.add_argument("--folder", type=Path, default=Path("startup"))
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, __file__, "--make", options.shape, str(folder)], check=True)
    cache = folder / "cache"
    caches = {"TUNESMITH_CACHE": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    environment = os.environ | caches | {"HF_HUB_OFFLINE": "1"}
    shutil.rmtree(cache, ignore_errors=True)
    rows = []
    for name in ("cold", *["warm"] * options.warm):
        if name == "cold":
            drop_files_from_memory(folder / options.shape)
        rows.append({"start": name, **run(folder, options.shape, environment, options.overrides)})
        print(rows[-1], flush=True)
        print((folder / "run.log").read_text()[-3000:], flush=True)
    print(f"wrote {write_result('startup', f'From the command to the end of the first step, {options.shape}', rows)}")


def make(shape: str, folder: Path) -> None:
    """The model and its data, where they are not there yet; in a process of its own, whose memory is then free."""
    import torch

    from tunesmith.measure import bench, peers

    peers.saved(bench.Workload(shape, "lora", 1, 1), folder, "cuda" if torch.cuda.is_available() else "cpu")
    chance, words = random.Random(0), bench.SHAPES[shape]["vocab_size"]
    texts = [" ".join(f"t{chance.randint(4, words - 1)}" for _ in range(400)) for _ in range(200)]
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def run(folder: Path, shape: str, environment: dict[str, str], overrides: list[str]) -> dict[str, float]:
    output, said = folder / "run", folder / "run.log"
    shutil.rmtree(output, ignore_errors=True)
    settings = {
        "model": str(folder / shape),
        "data": str(folder / "train.jsonl"),
        "method": "lora",
        "sequence_length": 4096,
        "batch_tokens": 16384,
        "steps": 1,
        "output": str(output),
    }
    (folder / "run.yaml").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "tunesmith", "train", str(folder / "run.yaml"), *overrides]
    began = time.time()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with said.open("w") as file, subprocess.Popen(command, env=environment, **pipes) as process:
        assert process.stdout
        for line in process.stdout:
            file.write(f"{time.time() - began:6.1f} {line}")
    if process.returncode:
        sys.exit(said.read_text()[-2000:])
    events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    times = {event["event"]: event["time"] - began for event in events}
    compiling = sum(event["seconds"] for event in events if event["event"] == "compiled")
    return {
        **{f"seconds_until_{kind}": round(times[kind], 2) for kind in ("started", "step")},
        "compile_seconds": round(compiling, 2),
    }


def drop_files_from_memory(folder: Path) -> None:
    for file in folder.glob("*"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--make"]:
        make(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
