"""On a GPU: the same run.yaml trains in bf16, is killed twice and resumed to the same bytes, and merges.

    python benchmarks/gpu_resume.py MODEL TRAIN.jsonl HELD_OUT.jsonl

Writes benchmarks/results/gpu_resume.json (or into the folder that RESULTS names).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results import write_result

SETTINGS = """
model: {model}
data: {train}
eval: {held_out}
sequence_length: 1024
batch_tokens: 8192
epochs: 3
learning_rate: 1e-3
lora: {{dropout: 0.1}}
deterministic: true
save_every: 5
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "train", "held_out"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gpu-resume-"))
    config = folder / "run.yaml"
    config.write_text(SETTINGS.format(**{name: path.resolve() for name, path in vars(arguments).items()}))

    began = time.monotonic()
    tunesmith("train", config, f"output={folder / 'whole'}")
    whole_seconds = time.monotonic() - began
    for steps in (7, 12):
        train_and_kill(config, folder / "killed", after_steps=steps)
    tunesmith("train", config, f"output={folder / 'killed'}")
    merged = tunesmith("merge", folder / "whole", "--to", folder / "merged")
    evaluation = json.loads(tunesmith("eval", folder / "whole", "--base", "--json"))
    plan = json.loads((folder / "whole" / "plan.json").read_text())
    numbers = {
        "precision": plan["precision"],
        "device": plan["device"],
        "steps": json.loads((folder / "whole" / "summary.json").read_text())["steps"],
        "kills": 2,
        "same_adapter_bytes_after_kills": digest(folder / "whole") == digest(folder / "killed"),
        "same_step_losses_after_kills": losses(folder / "whole") == losses(folder / "killed"),
        "held_out_before": evaluation["results"][0]["before"],
        "held_out_after": evaluation["results"][0]["loss"],
        "merge": merged.strip().splitlines()[-1],
        "train_seconds": round(whole_seconds, 1),
    }
    print(json.dumps(numbers, indent=2))
    write_result("gpu_resume", "bf16 LoRA run on one GPU, killed twice, resumed, merged", numbers)
    if not (numbers["same_adapter_bytes_after_kills"] and numbers["same_step_losses_after_kills"]):
        sys.exit("the resumed run differs from the uninterrupted one")


def tunesmith(*words: object) -> str:
    command = [sys.executable, "-m", "tunesmith", *(str(word) for word in words)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def train_and_kill(config: Path, output: Path, *, after_steps: int) -> None:
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tunesmith", "train", str(config), f"output={output}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    while process.poll() is None and steps_done(output) < after_steps:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()


def steps_done(output: Path) -> int:
    path = output / "events.jsonl"
    return max((record["step"] for record in records(path) if record["event"] == "step"), default=0)


def losses(output: Path) -> list[float]:
    """By step; what was done again after a kill replaces what was done before."""
    found = {record["step"]: record["loss"] for record in records(output / "events.jsonl") if record["event"] == "step"}
    return [found[step] for step in sorted(found)]


def records(path: Path) -> list[dict]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def digest(output: Path) -> str:
    return hashlib.sha256((output / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
