"""GRPO on a task whose answers can be checked, with a real model: held-out reward before and after.

    python benchmarks/rollouts.py MODEL [--steps 14] [--seed 0] [--objective grpo] [--engine own] [--output DIR]

Questions that are to be answered in three words at most, which nobody tells the model: it has to find out what is
rewarded. Instruct models answer in sentences, and a few percent of their samples are short enough.
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
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--objective", default="grpo", choices=("grpo", "rloo"))
    parser.add_argument("--engine", default="own", choices=("own", "vllm"))
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    folder = options.output or Path(tempfile.mkdtemp(prefix="rollouts-"))
    folder.mkdir(parents=True, exist_ok=True)
    write_questions(folder)
    settings = {
        "model": options.model,
        "objective": options.objective,
        "rewards": [{"kind": "regex", "name": "short", "pattern": r"^\W*\w+(\W+\w+){0,2}\W*$"}],
        "rollout": {"engine": options.engine, "prompts": 3, "answers": 8, "max_answer_tokens": 12},
        "precision": options.precision,
        "lora": {"rank": 8},
        "data": [{"path": str(folder / "train.jsonl")}],
        "eval": [{"path": str(folder / "held_out.jsonl")}],
        "sequence_length": 512,
        "learning_rate": 2e-3,
        "schedule": "constant",
        "steps": options.steps,
        "eval_every": max(1, options.steps // 2),
        "seed": options.seed,
        "output": str(folder / "run"),
    }
    (folder / "run.yaml").write_text(json.dumps(settings, indent=1))
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "tunesmith", "train", str(folder / "run.yaml")], check=True)
    records = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    rewards = [(one["step"], one["figures"]["reward"]) for one in records if one["event"] == "evaluation"]
    said = {"seconds": round(time.monotonic() - began), "held_out_reward": rewards, "seed": options.seed}
    steps = [one for one in records if one["event"] == "step"]
    said["seconds_a_step"] = sorted(one["seconds"] for one in steps)[len(steps) // 2]
    if options.engine == "vllm":
        said["sampler_gap"] = max(one["figures"]["sampler_gap"] for one in steps)
        said["sampler_gap_largest"] = max(one["figures"]["sampler_gap_largest"] for one in steps)
    print(json.dumps(said))


def write_questions(folder: Path) -> None:
    things = ["France", "Japan", "Egypt", "Brazil", "Canada", "Norway", "Kenya", "India", "Chile", "Poland"]
    asked = [f"What is the {what} of {one}?" for what in ("capital", "language", "currency", "flag") for one in things]
    asked += [f"What is {a} + {b}?" for a in range(1, 6) for b in range(1, 6)]
    held_out = asked[2::5]
    for name, some in (("train", [one for one in asked if one not in held_out]), ("held_out", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"question": one}) + "\n" for one in some))


if __name__ == "__main__":
    main()
