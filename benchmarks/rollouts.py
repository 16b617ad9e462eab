"""GRPO on a task whose answers can be checked, with a real model: held-out reward before and after.

    python benchmarks/rollouts.py MODEL [--steps 60] [--seed 0] [--objective grpo] [--output DIR]

Sums of two numbers up to nine, to be answered by the number alone. An instruct model says it in a sentence: it knows
most of the sums, and has to find out what is rewarded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--objective", default="grpo", choices=("grpo", "rloo"))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    folder = options.output or Path(tempfile.mkdtemp(prefix="rollouts-"))
    folder.mkdir(parents=True, exist_ok=True)
    write_sums(folder)
    settings = {
        "model": options.model,
        "objective": options.objective,
        "rewards": [{"kind": "exact", "extract": r"^\W*(\d+)\W*$"}],
        "rollout": {"prompts": 4, "answers": 8, "max_answer_tokens": 10},
        "lora": {"rank": 8},
        "data": [{"path": str(folder / "train.jsonl")}],
        "eval": [{"path": str(folder / "held_out.jsonl")}],
        "sequence_length": 512,
        "learning_rate": 5e-4,
        "schedule": "constant",
        "steps": options.steps,
        "eval_every": max(1, options.steps // 4),
        "seed": options.seed,
        "output": str(folder / "run"),
    }
    (folder / "run.yaml").write_text(json.dumps(settings, indent=1))
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "tunesmith", "train", str(folder / "run.yaml")], check=True)
    records = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    rewards = [(one["step"], one["figures"]["reward"]) for one in records if one["event"] == "evaluation"]
    print(json.dumps({"seconds": round(time.monotonic() - began), "held_out_reward": rewards, "seed": options.seed}))


def write_sums(folder: Path) -> None:
    sums = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    held_out = [one for place, one in enumerate(sums) if place % 5 == 2]
    for name, some in (("train", [one for one in sums if one not in held_out]), ("held_out", held_out)):
        lines = [{"question": f"What is {a} + {b}?", "answer": a + b} for a, b in some]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
