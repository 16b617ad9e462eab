"""Do the objectives teach? Real runs with a small real model, three seeds each, judged by what was held out.

    python benchmarks/learning.py --model FOLDER --data FOLDER [--out FOLDER] [--jobs 6] [--seeds 0 1 2]
                                  [--only TEXT ...] [--tiny] [key=value ...]
    python benchmarks/learning.py --collect FOLDER/learning.jsonl ...

--model is a folder of safetensors with a chat template (SmolLM2-135M-Instruct), --data one with `lf_dpo_en_demo.json`,
`lf_alpaca_en_demo.json`, `rasbt_instruction.json`, `gsm8k_train.jsonl`, `gsm8k_test.jsonl`, `mmlu_dev.jsonl` and
`mmlu_validation.jsonl`. Nothing else is read, and no hub is asked. Every run is `tunesmith train` on a run.yaml of its
own, on the GPU where there is one; several share it (`--jobs`). Each line of learning.jsonl is a run; the second form
makes benchmarks/results/learning.json of one file or several. A seed decides the order of data and the first adapters,
and which part is held out where the data have no held-out part of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from results import write_result
from rollouts import write_questions

from tunesmith.measure.results import document

WHAT = "Real learning with SmolLM2-135M-Instruct, judged by held-out data: three seeds of each objective"
DPO_PARTS = 3
"""Each seed holds out another part of the pairs, so that three seeds judge each pair once."""
STUDENT = "student"
"""The model with every second layer left out."""
FIELDS = {
    "law": ("professional_law", "international_law", "jurisprudence"),
    "mathematics": (
        "elementary_mathematics", "high_school_mathematics", "college_mathematics", "abstract_algebra",
        "high_school_statistics",
    ),
    "medicine": (
        "professional_medicine", "clinical_knowledge", "college_medicine", "anatomy", "virology", "medical_genetics",
        "nutrition", "human_aging",
    ),
    "psychology": ("professional_psychology", "high_school_psychology"),
    "economics": ("high_school_macroeconomics", "high_school_microeconomics", "econometrics"),
    "history": (
        "high_school_world_history", "high_school_us_history", "high_school_european_history", "prehistory",
    ),
    "physics": ("high_school_physics", "college_physics", "conceptual_physics", "astronomy"),
}  # fmt: skip
"""Subjects of MMLU by what they are about; the classes of `classify`."""


@dataclass(frozen=True)
class Task:
    """One row of the table: what is trained, and what is read off."""

    name: str
    settings: dict[str, Any]
    data: Callable[[Path, Path, int], None]
    """Writes train.jsonl and held_out.jsonl for a seed: from the folder of data, into a folder."""
    figure: str = "loss"
    """Of the held-out evaluations: `loss`, or one of their figures."""
    wanted: str = ""
    """What is promised, in words."""
    is_met: Callable[[dict[str, Any], dict[str, dict[str, Any]]], bool] | None = field(default=None, repr=False)
    """Whether it is, by this row and all rows."""
    tiny: dict[str, Any] = field(default_factory=dict)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def write(folder: Path, train: list[Any], held_out: list[Any]) -> None:
    for name, records in (("train", train), ("held_out", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")


def preferences(data: Path, folder: Path, seed: int) -> None:
    pairs = json.loads((data / "lf_dpo_en_demo.json").read_text(encoding="utf-8"))
    asked = {json.dumps(one["conversations"]): one for one in pairs}  # some stand there twice
    pairs = list(asked.values())
    random.Random(0).shuffle(pairs)
    part = seed % DPO_PARTS
    write(folder, [one for number, one in enumerate(pairs) if number % DPO_PARTS != part], pairs[part::DPO_PARTS])


def questions(data: Path, folder: Path, seed: int) -> None:
    write_questions(folder)


def instructions(data: Path, folder: Path, seed: int) -> None:
    records = [
        one
        for name in ("lf_alpaca_en_demo.json", "rasbt_instruction.json")
        for one in json.loads((data / name).read_text(encoding="utf-8"))
    ]
    records = list({(one["instruction"], one["input"]): one for one in records}.values())
    random.Random(seed).shuffle(records)
    write(folder, records[200:], records[:200])


def sums(data: Path, folder: Path, seed: int) -> None:
    write(folder, lines(data / "gsm8k_train.jsonl")[:3000], lines(data / "gsm8k_test.jsonl")[:200])


def subjects(data: Path, folder: Path, seed: int) -> None:
    named = {subject: name for name, subjects in FIELDS.items() for subject in subjects}
    asked = [one for file in ("mmlu_dev.jsonl", "mmlu_validation.jsonl") for one in lines(data / file)]
    texts = {"\n".join([one["question"], *map(str, one["choices"])]): one["subject"] for one in asked}
    records = [{"text": text, "label": named[subject]} for text, subject in texts.items() if subject in named]
    random.Random(seed).shuffle(records)
    write(folder, records[200:], records[:200])


def _above(least: float) -> Callable[[dict[str, Any], dict[str, dict[str, Any]]], bool]:
    return lambda row, _: min(row["after"]) > least


def _within(share: float, other: str) -> Callable[[dict[str, Any], dict[str, dict[str, Any]]], bool]:
    return lambda row, rows: other in rows and row["mean_after"] <= (1 + share) * rows[other]["mean_after"]


def _below_each(other: str) -> Callable[[dict[str, Any], dict[str, dict[str, Any]]], bool]:
    def is_met(row: dict[str, Any], rows: dict[str, dict[str, Any]]) -> bool:
        theirs = dict(zip(rows[other]["seeds"], rows[other]["after"], strict=True)) if other in rows else {}
        return all(after < theirs.get(seed, 0.0) for seed, after in zip(row["seeds"], row["after"], strict=True))

    return is_met


SHORT = {"kind": "regex", "name": "short", "pattern": r"^\W*\w+(\W+\w+){0,2}\W*$"}
SMALL = {"sequence_length": 512, "batch_tokens": 4096}
FULL, ALONE = "all weights, AdamW, GSM8K", "half the layers, without a teacher"
TASKS = (
    Task(
        "DPO, LoRA, a third of the pairs held out",
        {
            "objective": "dpo", "method": "lora", "lora": {"rank": 16}, "learning_rate": 5e-4, "steps": 60,
            "sequence_length": 4096, "batch_tokens": 8192,
        },
        preferences, "accuracy", "above 60% in the mean", lambda row, _: row["mean_after"] > 0.6,
    ),
    Task(
        "GRPO, LoRA, answers of three words at most",
        {
            "objective": "grpo", "method": "lora", "lora": {"rank": 8}, "learning_rate": 2e-3, "schedule": "constant",
            "rewards": [SHORT], "rollout": {"prompts": 3, "answers": 8, "max_answer_tokens": 12}, "steps": 24,
            "sequence_length": 512,
        },
        questions, "reward", "from below 20% to above 60%",
        lambda row, _: max(row["before"]) < 0.2 and min(row["after"]) > 0.6,
        {"rollout": {"prompts": 2, "answers": 2, "max_answer_tokens": 4}},
    ),
    Task(
        ALONE,
        {"model": STUDENT, "method": "full", "learning_rate": 3e-4, "steps": 60, **SMALL},
        instructions, "loss", "",
    ),
    Task(
        "half the layers, with the whole model as teacher",
        {
            "model": STUDENT, "method": "full", "objective": "distill", "learning_rate": 3e-4, "steps": 60,
            "distillation": {"teacher": "MODEL", "weight": 0.7}, **SMALL,
        },
        instructions, "loss", "below the same student without a teacher, each seed", _below_each(ALONE),
    ),
    Task(
        "classify, LoRA, seven fields of MMLU",
        {
            "objective": "classify", "method": "lora", "lora": {"rank": 16}, "labels": list(FIELDS), "steps": 60,
            "learning_rate": 1e-3, **SMALL,
        },
        subjects, "accuracy", "above 80%", _above(0.8),
    ),
    Task(FULL, {"method": "full", "learning_rate": 5e-5, "steps": 100, **SMALL}, sums),
    Task(
        "all weights, GaLore, GSM8K",
        {"method": "full", "optimizer": "galore", "learning_rate": 3e-4, "steps": 100, **SMALL},
        sums, "loss", "within 5% of AdamW's", _within(0.05, FULL),
    ),
    Task(
        "LoQT, 8 bits, GSM8K",
        {"method": "loqt", "lora": {"rank": 64, "bits": 8}, "learning_rate": 3e-4, "steps": 100, **SMALL},
        sums, "loss", "within 5% of AdamW's", _within(0.05, FULL), {"lora": {"rank": 4, "bits": 8}},
    ),
    Task(
        "LoQT, 4 bits, GSM8K",
        {"method": "loqt", "lora": {"rank": 64, "bits": 4}, "learning_rate": 3e-4, "steps": 100, **SMALL},
        sums, "loss", "", None, {"lora": {"rank": 4, "bits": 4}},
    ),
)  # fmt: skip
TINY = {"steps": 2, "sequence_length": 256, "batch_tokens": 512}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("learning"))
    parser.add_argument("--jobs", type=int, default=6, help="runs at a time")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", default=[], help="rows whose name contains one of these")
    parser.add_argument("--tiny", action="store_true", help="two small steps of each, to try the benchmark itself")
    parser.add_argument("--deadline", type=float, default=540.0, help="seconds after which no run begins")
    parser.add_argument("--collect", type=Path, nargs="+", help="files to make the result of")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of all runs")
    options = parser.parse_args()
    if options.collect:
        print(f"wrote {collect(options.collect)}")
        return
    if not (options.model and options.data):
        parser.error("--model and --data are needed")
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tunesmith-learning-") as folder:
        Learning(Path(folder), options).run()


class Learning:
    def __init__(self, folder: Path, options: argparse.Namespace):
        self.folder, self.options = folder, options
        self.began = time.monotonic()
        self.rows = (options.out / "learning.jsonl").open("a")
        self.environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "TUNESMITH_CACHE": str(folder / "cache"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }

    def run(self) -> None:
        self.keep({"document": document(WHAT, [])})
        make_student(self.options.model, self.folder / STUDENT)
        chosen = [one for one in TASKS if any(text in one.name for text in self.options.only or [""])]
        jobs = [(task, seed) for seed in self.options.seeds for task in chosen]
        with ThreadPoolExecutor(self.options.jobs) as threads:
            list(threads.map(lambda job: self.train(*job), jobs))
        print(f"{time.monotonic() - self.began:.0f} s in all; {self.options.out / 'learning.jsonl'}", flush=True)

    def train(self, task: Task, seed: int) -> None:
        began = time.monotonic()
        row: dict[str, Any] = {"name": task.name, "seed": seed}
        if began - self.began > self.options.deadline:
            self.keep({**row, "failed": "out of time"})
            return
        folder = self.folder / f"{TASKS.index(task)}-{seed}"
        folder.mkdir()
        task.data(self.options.data, folder, seed)
        (folder / "run.yaml").write_text(json.dumps(self.settings(task, folder, seed), indent=1))
        command = [sys.executable, "-m", "tunesmith", "train", "run.yaml", *self.options.overrides]
        log = self.options.out / f"{re.sub(r'[^A-Za-z0-9]+', '-', task.name)}-{seed}.log"
        with log.open("w") as file:
            done = subprocess.run(command, cwd=folder, env=self.environment, stdout=file, stderr=file)
        if done.returncode:
            self.keep({**row, "failed": log.read_text(errors="replace").strip()[-400:]})
            return
        events = lines(folder / "run" / "events.jsonl")
        found = [one for one in events if one["event"] == "evaluation"]
        values = [one["loss"] if task.figure == "loss" else one["figures"][task.figure] for one in found]
        steps = [one for one in events if one["event"] == "step"]
        row |= {"figure": task.figure, "before": round(values[0], 4), "after": round(values[-1], 4)}
        row |= {"steps": len(steps), "tokens": sum(one["tokens"] for one in steps)}
        self.keep({**row, "seconds": round(time.monotonic() - began, 1)})

    def settings(self, task: Task, folder: Path, seed: int) -> dict[str, Any]:
        settings = {"model": "MODEL", **task.settings, **(TINY | task.tiny if self.options.tiny else {})}
        if settings.get("objective") == "grpo":
            settings.pop("batch_tokens", None)
        places = {"MODEL": str(self.options.model.resolve()), STUDENT: str(self.folder / STUDENT)}
        settings["model"] = places[settings["model"]]
        if "distillation" in settings:
            settings["distillation"] = settings["distillation"] | {"teacher": places["MODEL"]}
        paths = {"data": str(folder / "train.jsonl"), "eval": str(folder / "held_out.jsonl")}
        return settings | paths | {"eval_every": settings["steps"], "seed": seed, "output": str(folder / "run")}

    def keep(self, row: dict[str, Any]) -> None:
        self.rows.write(json.dumps(row) + "\n")
        self.rows.flush()
        if "name" in row:
            print(f"{time.monotonic() - self.began:4.0f} s {json.dumps(row)}", flush=True)


def make_student(model: Path, folder: Path) -> None:
    """The model without every second layer, the last of each two: a student that has much to learn again."""
    from safetensors.torch import load_file, save_file

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    kept = list(range(0, config["num_hidden_layers"], 2))
    tensors = {}
    for name, value in {
        key: one for file in model.glob("*.safetensors") for key, one in load_file(file).items()
    }.items():
        if found := re.search(r"\blayers\.(\d+)\.", name):
            if int(found[1]) not in kept:
                continue
            name = name.replace(found[0], f"layers.{kept.index(int(found[1]))}.", 1)
        tensors[name] = value.contiguous()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    changed = {"num_hidden_layers": len(kept)}
    if "layer_types" in config:
        changed["layer_types"] = [config["layer_types"][number] for number in kept]
    (folder / "config.json").write_text(json.dumps(config | changed, indent=1))
    for file in model.iterdir():
        is_beside = file.is_file() and not file.name.endswith((".safetensors", ".index.json", ".bin"))
        if is_beside and file.name != "config.json":
            (folder / file.name).write_bytes(file.read_bytes())


def collect(files: list[Path]) -> Path:
    """A row for each task, of each seed the newest run that was finished."""
    about: dict[str, Any] = {}
    runs: dict[tuple[str, int], dict[str, Any]] = {}
    for line in (line for file in files for line in lines(file)):
        about = line.get("document", about)
        if "after" in line:
            runs[line["name"], line["seed"]] = line | {"commit": about["commit"]}
    rows: dict[str, dict[str, Any]] = {}
    for task in TASKS:
        own = [runs[key] for key in sorted(runs) if key[0] == task.name]
        if own:
            row: dict[str, Any] = {"what": task.name, "held_out": task.figure, "seeds": [one["seed"] for one in own]}
            row |= {name: [one[name] for one in own] for name in ("before", "after")}
            row |= {f"mean_{name}": round(statistics.fmean(row[name]), 4) for name in ("before", "after")}
            rows[task.name] = row | {name: own[0][name] for name in ("steps", "tokens", "commit")}
            rows[task.name]["learning_rate"] = task.settings.get("learning_rate")
    for task in TASKS:
        if task.name in rows and task.is_met:
            rows[task.name] |= {"wanted": task.wanted, "is_met": task.is_met(rows[task.name], rows)}
    for row in rows.values():
        print(row)
    return write_result("learning", WHAT, list(rows.values()), about=about | {"what": WHAT, "commit": "by row"})


if __name__ == "__main__":
    main()
