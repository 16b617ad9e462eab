"""A task whose answers can be checked, so small that a tiny model learns it in seconds."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tiny import SETTINGS

REWARDS = '''
def letters(answer, record):
    """Share of the answer's characters that are of the kind the record asks for."""
    return sum(char in record["letters"] for char in answer) / max(4, len(answer))
'''


def write_prompts(path: Path, count: int, *, seed: int = 0) -> Path:
    chance = random.Random(seed)
    words = ["red", "blue", "seven", "ten", "cat", "tree", "sun"]
    prompts = [f"{n} {' '.join(chance.choices(words, k=chance.randint(1, 3)))}" for n in range(count)]
    records = [{"prompt": prompt, "letters": "abcdefghijklmnop"} for prompt in prompts]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def settings_of(model: Path, **changes: Any) -> dict[str, Any]:
    """Of a run in a folder with `train.jsonl`, `held_out.jsonl` and `rewards.py`."""
    settings = {name: value for name, value in SETTINGS.items() if name != "batch_tokens"}
    rollout = {"prompts": 4, "answers": 4, "max_answer_tokens": 8} | changes.pop("rollout", {})
    own = {"objective": "grpo", "rewards": ["rewards.py:letters"], "lora": {"rank": 4}, "learning_rate": 2e-2}
    own |= {"sequence_length": 128, "epochs": 1, "warmup": 0, "schedule": "constant"}
    return {"model": str(model), **settings, **own, "rollout": rollout, **changes}


def write_run(folder: Path, model: Path, **changes: Any) -> Path:
    """With a plan of one thread, for `tunesmith train --plan plan.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_prompts(folder / "train.jsonl", 24)
    write_prompts(folder / "held_out.jsonl", 4, seed=1)
    (folder / "rewards.py").write_text(REWARDS)
    settings = settings_of(model, **changes)
    (folder / "run.yaml").write_text(json.dumps(settings))
    from tunesmith.config.load import from_mapping
    from tunesmith.run.choose import new_plan

    plan = new_plan(from_mapping(settings)).model_copy(update={"threads": 1, "async_checkpoint": False})
    (folder / "plan.json").write_text(plan.model_dump_json())
    return folder
