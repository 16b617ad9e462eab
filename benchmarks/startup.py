"""Seconds from `tunesmith train` to the end of its first step, cold and warm, for a model on the local disk.

    python benchmarks/startup.py [--shape llama3-8b] [--folder FOLDER] [key=value ...]

Weights are random at a published shape, in safetensors of several gigabytes. Cold: nothing compiled, no tokens, no
files in the system's memory (where the system lets us drop them). Warm: the same command once more.
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
from typing import Any

from results import write_result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama3-8b")
    parser.add_argument("--folder", type=Path, default=Path("startup"))
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, __file__, "--make", options.shape, str(folder)], check=True)
    environment = os.environ | {"TUNESMITH_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    shutil.rmtree(folder / "cache", ignore_errors=True)
    rows = []
    for name in ("cold", "warm"):
        if name == "cold":
            drop_files_from_memory(folder / "model")
        rows.append({"start": name, **run(folder, environment, options.overrides)})
        print(rows[-1], flush=True)
    print(f"wrote {write_result('startup', f'From the command to the end of the first step, {options.shape}', rows)}")


def make(shape: str, folder: Path) -> None:
    """The model and its data, where they are not there yet; in a process of its own, whose memory is then free."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from tunesmith.measure.bench import SHAPES
    from tunesmith.measure.peers import tokenizer_of

    if not (folder / "model" / "tokenizer.json").exists():
        config = LlamaConfig(**SHAPES[shape], use_cache=False)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder / "model", max_shard_size="5GB")
        tokenizer_of(SHAPES[shape]["vocab_size"]).save_pretrained(folder / "model")
    chance = random.Random(0)
    texts = [" ".join(f"t{chance.randint(4, SHAPES[shape]['vocab_size'] - 1)}" for _ in range(400)) for _ in range(200)]
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def run(folder: Path, environment: dict[str, str], overrides: list[str]) -> dict[str, Any]:
    output = folder / "run"
    shutil.rmtree(output, ignore_errors=True)
    settings = {
        "model": str(folder / "model"),
        "data": str(folder / "train.jsonl"),
        "method": "lora",
        "sequence_length": 4096,
        "batch_tokens": 16384,
        "steps": 3,
        "output": str(output),
    }
    (folder / "run.yaml").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "tunesmith", "train", str(folder / "run.yaml"), *overrides]
    began = time.monotonic()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    found: dict[str, float] = {}
    while process.poll() is None:
        log = output / "events.jsonl"
        kinds = [json.loads(line)["event"] for line in log.read_text().splitlines()] if log.exists() else []
        for kind in ("started", "step"):
            if kind in kinds:
                found.setdefault(f"seconds_until_{kind}", round(time.monotonic() - began, 2))
        time.sleep(0.05)
    assert process.stdout
    said = process.stdout.read()
    if process.returncode:
        sys.exit(said[-2000:])
    return found


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
