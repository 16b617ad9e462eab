"""Objectives on one GPU: what the plan predicts of each and what is measured, and preferences against TRL's trainer.

    python benchmarks/objectives.py FOLDER [--out FOLDER] [--deadline SECONDS] [--only TEXT ...] [--skip TEXT ...]
        [--list] [--tiny]
    python benchmarks/objectives.py --collect FOLDER/forecast.jsonl ...

FOLDER holds `tokenizer/` and `lf_dpo_en_demo.json` (preferences as LLaMA-Factory has them). Weights are random at
published shapes. Each objective trains through `tunesmith train`, adapters and all weights; the 8B model with adapters
trains by DPO here and in TRL, as its own trainer does it when nothing is said (gradient checkpointing, padded pairs),
one after the other, on the same pairs. Tokens are those of documents: padding does not count, and a prompt counts with
each of its answers.

Groups of cases, for --only: `third draw` (20 configurations over all objectives and adapters, drawn by a seed that no
constant of the planner has seen; rows named `drawn` and `drawn again` are those of the seeds before), `8B into 1B`
(distillation from a live teacher, from what it was asked once, and the student alone), `sweep of four` (the memory of
four adapters over one 8B base against one's), `against TRL`. The second form puts what was measured into
benchmarks/results/objectives.json, beside rows that are there already.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forecast
from forecast import GIB, Case, Forecast, words
from results import read_rows, write_result

from tunesmith.measure.bench import SHAPES as BENCH_SHAPES

WHAT = "Objectives as planned and as measured in `tunesmith train`; DPO (8B) and GRPO (1B) beside TRL"
SMALL, LARGE = "Llama-3.2-1B", "Llama-3-8B"
SEED = 20261203
"""Of the 20 configurations: another than those by which anything was measured before."""
PEFT_TYPES = ("IA3", "VERA", "OFT", "BOFT", "LOHA", "LOKR", "ADALORA", "FOURIERFT", "LN_TUNING", "RANDLORA", "HRA")
DECODERS = (SMALL, "Qwen3-1.7B", "OLMo-2-1B")
PAIR = "T5-large"
SWEEP = {"learning_rate": [1e-4, 2e-4], "lora.rank": [8, 16]}
SWEEP_STEPS = 6
PAIRS = 8
"""A step of TRL's; ours takes as many tokens as these have on average."""
LITTLE_GIB = 18.0
"""About half of what TRL takes."""
ROLLOUT = {"prompts": 8, "answers": 8, "max_answer_tokens": 256}
STEPS = {"dpo": (3, 6), "grpo": (1, 3)}
"""Of TRL, until it is timed and while it is: rollouts take it long."""
forecast.SHAPES[LARGE] = {"model_type": "llama", **BENCH_SHAPES["llama3-8b"]}
forecast.SHAPES[LARGE].pop("max_position_embeddings")
forecast.SHAPES[PAIR] = {
    "model_type": "t5", "d_model": 1024, "d_ff": 2816, "d_kv": 64, "num_layers": 24, "num_decoder_layers": 24,
    "num_heads": 16, "vocab_size": 49152, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    "pad_token_id": 0, "decoder_start_token_id": 0,
}  # fmt: skip
TINY_PAIR = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("given", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, default=Path("objectives"))
    parser.add_argument("--deadline", type=float, default=540.0)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--skip", nargs="*", default=[])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--list", action="store_true", help="only say what would be measured")
    parser.add_argument("--collect", type=Path, nargs="+")
    options = parser.parse_args()
    if options.collect:
        print(f"wrote {collect(options.collect)}")
        return
    if options.list:
        print(*(case.name for case in every_case(Path(), options)), sep="\n")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tunesmith-objectives-") as folder:
        Objectives(Path(folder), options).run()


def draw(folder: Path, *, tiny: bool) -> list[Case]:
    """Each objective with adapters, and with all weights where that is another kind of step."""
    kinds: dict[str, dict[str, Any]] = {
        "dpo": {"data": "pairs.jsonl"},
        "kto": {"data": "judged.jsonl"},
        "orpo": {"data": "pairs.jsonl"},
        "simpo": {"data": "pairs.jsonl"},
        "reward": {"data": "pairs.jsonl"},
        "classify": {"data": "labelled.jsonl", "labels": ["a", "b", "c"]},
        "distill": {"data": "texts.jsonl", "distillation": {"teacher": str(folder / SMALL)}},
    }
    chance, cases = random.Random(20261118), []
    for objective, settings in kinds.items():
        for method in ("lora", "full"):
            length = chance.choice((2048, 4096))
            sizes = {"sequence_length": length, "batch_tokens": chance.choice((8192, 16384))}
            if tiny:
                sizes = {"sequence_length": 512, "batch_tokens": 1024}
            more = {"data": str(folder / settings["data"])}
            name = ", ".join([SMALL, objective, method, *map(str, sizes.values())])
            cases.append(Case(name, SMALL, {"objective": objective, "method": method, **settings, **more, **sizes}))
    pairs = {"objective": "dpo", "method": "lora", "data": str(folder / "demo.json"), "lora": {"rank": 16}}
    sizes = {"sequence_length": 512, "batch_tokens": 1024} if tiny else {"sequence_length": 4096}
    cases.append(Case(f"{LARGE}, dpo, lora, against TRL", LARGE, pairs | sizes | {"batch_tokens": PAIRS * 1600}))
    cases.append(
        Case(
            f"{LARGE}, dpo, lora, in {LITTLE_GIB} GiB",
            LARGE,
            pairs | sizes | {"batch_tokens": PAIRS * 1600},
            LITTLE_GIB,
        )
    )
    rollout = {"prompts": 2, "answers": 8, "max_answer_tokens": 16} if tiny else ROLLOUT
    asked = {"objective": "grpo", "method": "lora", "data": str(folder / "asked.jsonl"), "lora": {"rank": 16}}
    asked |= {"rewards": [{"kind": "regex", "pattern": "e"}], "rollout": rollout, "sequence_length": 1024}
    cases.append(Case(f"{SMALL}, grpo, lora, against TRL", SMALL, asked))
    return cases


def draw_new(folder: Path, *, tiny: bool) -> list[Case]:
    """20 configurations: two objectives of preferences, each other objective, and methods that train few weights or
    keep little of them. Shape, method where an objective leaves it open, and lengths by chance."""
    chance = random.Random(SEED)
    common = ({"method": "lora"}, {"method": "qlora"}, {"method": "full"}, {"method": "lora", "lora": {"dora": True}})
    asks, own = {"teacher": str(folder / SMALL)}, {"objective": "distill"}
    answers = 8 if tiny else 64
    objectives: dict[str, dict[str, Any]] = {
        **{name: {"objective": name, "data": "pairs.jsonl"} for name in chance.sample(("orpo", "simpo", "cpo"), 1)},
        "kto": {"objective": "kto", "data": "judged.jsonl"},
        "reward": {"objective": "reward", "data": "pairs.jsonl"},
        "classify": {"objective": "classify", "data": "labelled.jsonl", "labels": ["a", "b", "c"]},
        "classify_tokens": {"objective": "classify_tokens", "data": "tagged.jsonl", "labels": ["a", "b", "c"]},
        "embed": {"objective": "embed", "data": "anchors.jsonl"},
        "distill": {**own, "data": "texts.jsonl", "distillation": asks},
        "distill, top_k": {**own, "data": "some.jsonl", "distillation": {**asks, "top_k": 32}},
        "distill, on_policy": {
            **own, "data": "asked.jsonl", "distillation": {**asks, "on_policy": 1.0},
            "rollout": {"max_answer_tokens": answers},
        },
        "grpo": {
            "objective": "grpo", "data": "asked.jsonl", "rewards": [{"kind": "regex", "pattern": "e"}],
            "rollout": {"prompts": 4, "answers": 8, "max_answer_tokens": answers},
        },
    }  # fmt: skip
    adapters: dict[str, dict[str, Any]] = {
        **{name: {"method": "peft", "peft": {"peft_type": name}} for name in chance.sample(PEFT_TYPES, 3)},
        **{name: {"method": "full", "optimizer": name} for name in ("galore", "apollo", "lisa", "badam")},
        **{name: {"method": name} for name in ("relora", "loqt")},
    }
    drawn = [(name, chance.choice(DECODERS), {**chance.choice(common), **one}) for name, one in objectives.items()]
    drawn += [("encoder-decoder", PAIR, {**chance.choice(common[:3]), "data": "sources.jsonl"})]
    drawn += [(name, chance.choice(DECODERS), {**one, "data": "texts.jsonl"}) for name, one in adapters.items()]
    cases = []
    for name, shape, settings in drawn:
        sizes = {"sequence_length": chance.choice((1024, 2048)), "batch_tokens": chance.choice((8192, 16384))}
        if tiny:
            sizes = {"sequence_length": 512, "batch_tokens": 1024}
        if name == "grpo":
            sizes.pop("batch_tokens")
        method = "dora" if settings.get("lora", {}).get("dora") else settings["method"]
        said = ", ".join(["third draw", shape, *dict.fromkeys((name, method)), *map(str, sizes.values())])
        cases.append(Case(said, shape, settings | {"data": str(folder / settings["data"])} | sizes))
    return cases


def draw_teachers(folder: Path, *, tiny: bool) -> list[Case]:
    """The same steps of a 1B student with an 8B teacher beside it, with its kept answers, and without one."""
    sizes = {"sequence_length": 512, "batch_tokens": 1024} if tiny else {"sequence_length": 2048, "batch_tokens": 8192}
    common = {"method": "full", "data": str(folder / "some.jsonl"), **sizes}
    teacher = {"objective": "distill", "distillation": {"teacher": str(folder / LARGE)}}
    kept = {"objective": "distill", "distillation": {"teacher": str(folder / LARGE), "top_k": 64}}
    kinds = {"teacher in each step": teacher, "teacher asked once": kept, "no teacher": {}}
    return [Case(f"8B into 1B, {name}", SMALL, common | settings) for name, settings in kinds.items()]


def draw_sweep(folder: Path, *, tiny: bool) -> list[Case]:
    sizes = {"sequence_length": 512, "batch_tokens": 1024} if tiny else {"sequence_length": 2048, "batch_tokens": 8192}
    common = {"method": "lora", "data": str(folder / "some.jsonl"), "steps": SWEEP_STEPS, **sizes}
    alone = {"learning_rate": 2e-4, "lora": {"rank": 16}}
    named = {"sweep of four": {"sweep": SWEEP}, "sweep of four, one alone": alone}
    return [Case(f"{LARGE}, lora, {name}", LARGE, common | settings) for name, settings in named.items()]


def every_case(folder: Path, options: argparse.Namespace) -> list[Case]:
    groups = (draw, draw_new, draw_teachers, draw_sweep)
    cases = [case for group in groups for case in group(folder, tiny=options.tiny)]
    cases = [case for case in cases if any(text in case.name for text in options.only or [""])]
    return [case for case in cases if not any(text in case.name for text in options.skip)]


class Objectives(Forecast):
    def __init__(self, folder: Path, options: argparse.Namespace):
        cases = every_case(folder, options)
        self.sweeps = [case for case in cases if "sweep of four" in case.name]
        super().__init__([case for case in cases if case not in self.sweeps], folder, options)

    def run(self) -> None:
        self.whole = ThreadPoolExecutor(1)
        super().run()
        for case in self.cases:
            if case.name.endswith("against TRL") and self.left > 0:
                self.measure_trl(case)
        self.whole.shutdown()

    def measure_whole(self, case: Case) -> None:
        """The peak of a run from its start to its end, or of all variants of a sweep, which are one process."""
        if self.left <= 0:
            return
        folder = self.folder / case.name.replace(" ", "-").replace(",", "")
        folder.mkdir()
        settings = {"model": str(self.folder / case.shape), "held_out": 0, "output": "run", **case.settings}
        (folder / "run.yaml").write_text(json.dumps(settings))
        log, began = self.options.out / f"{folder.name}.log", time.monotonic()
        command = [sys.executable, "-m", "tunesmith", "train", "run.yaml"]
        with log.open("w") as file:
            done = subprocess.run(command, cwd=folder, env=self.environment, stdout=file, stderr=file)
        row: dict[str, Any] = {"name": case.name, "shape": case.shape, "system": "whole"}
        if done.returncode:
            self.write({**row, "failed": log.read_text(errors="replace").strip()[-600:]})
            return
        found = sorted((folder / "run").glob("**/events.jsonl"))
        last = [json.loads(file.read_text(encoding="utf-8").splitlines()[-1]) for file in found]
        row |= {"variants": len(last), "seconds": round(time.monotonic() - began, 1)}
        self.write({**row, "peak_bytes": max(one["measured_memory"] for one in last)})

    def make_models(self) -> None:
        size = "tiny" if self.options.tiny else "whole"
        every = [*self.cases, *self.sweeps]
        teachers = {Path(one["teacher"]).name for case in every if (one := case.settings.get("distillation"))}
        making = []
        for shape in sorted({case.shape for case in every} | teachers):
            given = [str(self.folder / shape), shape, str(self.options.given / "tokenizer"), size]
            making.append(subprocess.Popen([sys.executable, __file__, "--make", *given]))
        if any(process.wait() for process in making):
            raise SystemExit("a model could not be made")
        self.say("models made")
        demo = json.loads((self.options.given / "lf_dpo_en_demo.json").read_text(encoding="utf-8"))
        (self.folder / "demo.json").write_text(json.dumps(demo[:40] if self.options.tiny else demo))
        self.write_data(demo[:40] if self.options.tiny else demo)
        for case in self.sweeps:  # while others plan, compile and load: their memory is what is wanted, not their time
            self.whole.submit(self.measure_whole, case)

    def write_data(self, demo: list[dict[str, Any]]) -> None:
        """The same texts as each objective takes them."""

        def write(name: str, rows: list[dict[str, Any]]) -> None:
            (self.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

        pairs = [
            {
                "prompt": one["conversations"][-1]["value"],
                "chosen": one["chosen"]["value"],
                "rejected": one["rejected"]["value"],
            }
            for one in demo
        ]
        write("pairs.jsonl", pairs * 6)
        judged = [(one, kind) for one in pairs for kind in ("chosen", "rejected")]
        write(
            "judged.jsonl",
            [{"prompt": p["prompt"], "completion": p[k], "label": k == "chosen"} for p, k in judged] * 6,
        )
        write("labelled.jsonl", [{"text": p[k], "label": "abc"[n % 3]} for n, (p, k) in enumerate(judged)] * 6)
        write("texts.jsonl", [{"text": p[k]} for p, k in judged] * 6)
        write("some.jsonl", [{"text": p[k]} for p, k in judged])
        # an answer says where a prompt ends, for distillation on the student's own answers
        write("asked.jsonl", [{"prompt": p["prompt"][:600], "completion": p["chosen"][:100]} for p in pairs] * 6)
        write("anchors.jsonl", [{"anchor": p["prompt"], "positive": p["chosen"]} for p in pairs] * 6)
        write("sources.jsonl", [{"source": p["prompt"], "target": p["chosen"]} for p in pairs] * 6)
        words = [p[k].split()[:400] for p, k in judged]
        write("tagged.jsonl", [{"tokens": w, "tags": [len(one) % 3 for one in w]} for w in words if w] * 6)

    def measure_trl(self, case: Case) -> None:
        objective = case.settings["objective"]
        command = [sys.executable, __file__, "--trl", objective, str(self.folder / case.shape), case.settings["data"]]
        log = self.options.out / f"trl-{objective}.log"
        with log.open("w") as file:
            done = subprocess.run(
                [*command, "tiny" if self.options.tiny else "whole"],
                env=self.environment, stdout=subprocess.PIPE, stderr=file, text=True, timeout=max(30.0, self.left),
            )  # fmt: skip
        found = [line for line in done.stdout.splitlines() if line.startswith("{")]
        row = json.loads(found[-1]) if found else {"failed": log.read_text()[-400:]}
        self.write({"name": case.name.replace("against TRL", "TRL"), "system": "trl", **row})

    def end(self, one: forecast.Training, found: dict[str, Any]) -> None:
        if "tokens_per_second" in found and one.case.name.endswith("against TRL"):
            found["tokens_per_second"] = round(found["tokens_per_second"] * (1 + shared_of(Path(one.case.folder))), 1)
        super().end(one, found)

    def write(self, row: dict[str, Any]) -> None:
        if row.get("system") not in ("trl", "whole"):
            super().write(row)
            return
        self.rows.write(json.dumps(row) + "\n")
        self.rows.flush()
        self.say(f"{row['name']}: {row}")


def shared_of(folder: Path) -> float:
    """Tokens of prompts that pairs have once and others twice, for each token that the run in this folder computes."""
    from tunesmith.run.choose import tokenize_as_called
    from tunesmith.run.folder import read_plan, read_run

    with contextlib.chdir(folder):
        plan = read_plan(Path("run"))
        assert plan is not None
        size = tokenize_as_called(read_run(Path("run")), plan, plan.forward).size
    return size.shared / size.tokens


def make(folder: str, name: str, tokenizer: str, size: str) -> None:
    """A model of random weights with this tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    shape, is_pair = dict(forecast.SHAPES[name]), name == PAIR
    if size == "tiny":
        small = TINY_PAIR if is_pair else forecast.SMALL
        shape = {key: small.get(key, value) for key, value in shape.items()} | {"vocab_size": 49152}
    ends = {"eos_token_id": 2} if is_pair else {"max_position_embeddings": 16384, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(**shape, **ends)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = (AutoModelForSeq2SeqLM if is_pair else AutoModelForCausalLM).from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="2GB")
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)


def train_by_trl(objective: str, model: str, data: str, size: str) -> None:
    """A few steps of TRL's own trainer, as it is when little is said; prints one line of JSON."""
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    on_gpu = torch.cuda.is_available()
    warm, timed = STEPS[objective]
    times: list[float] = []
    tokens: list[int] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            times.append(time.monotonic())

    def counted(collate: Any) -> Any:
        def counting(examples: list[Any]) -> Any:
            batch = collate(examples)
            masks = [value for key, value in batch.items() if key.endswith("attention_mask")]
            tokens.append(int(sum(int(mask.sum()) for mask in masks)))
            return batch

        return counting

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    with tempfile.TemporaryDirectory() as folder:
        common = {
            "output_dir": folder, "max_steps": warm + timed, "learning_rate": 1e-5, "report_to": [],
            "save_strategy": "no", "bf16": on_gpu, "use_cpu": not on_gpu, "logging_strategy": "no",
        }  # fmt: skip
        given = {
            "model": AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16 if on_gpu else torch.float32),
            "peft_config": LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM"),
            "processing_class": AutoTokenizer.from_pretrained(model),
            "callbacks": [Clock()],
        }
        make_trainer = _dpo_trainer if objective == "dpo" else _grpo_trainer
        trainer = make_trainer(Path(data), size, common, given)
        if objective == "dpo":
            trainer.data_collator = counted(trainer.data_collator)
        trainer.train()
    seconds = [after - before for before, after in zip(times[warm - 1 :], times[warm:], strict=False)]
    found = {"peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0, "steps": len(seconds)}
    found |= {"median_seconds": round(statistics.median(seconds), 4)}
    if tokens:
        found["tokens_per_second"] = round(sum(tokens[warm : warm + len(seconds)]) / sum(seconds), 1)
    print(json.dumps(found), flush=True)


def _dpo_trainer(data: Path, size: str, common: dict[str, Any], given: dict[str, Any]) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    roles = {"human": "user", "gpt": "assistant", "system": "system"}

    def message(one: dict[str, str]) -> dict[str, str]:
        return {"role": roles[one["from"]], "content": one["value"]}

    rows = [
        {
            "prompt": [message(m) for m in one["conversations"]],
            "chosen": [message(one["chosen"])],
            "rejected": [message(one["rejected"])],
        }
        for one in json.loads(data.read_text(encoding="utf-8"))
    ]
    tiny = size == "tiny"
    settings = DPOConfig(
        **common, per_device_train_batch_size=2 if tiny else PAIRS, max_length=512 if tiny else 2048
    )  # fmt: skip
    return DPOTrainer(args=settings, train_dataset=Dataset.from_list(rows), **given)


def _grpo_trainer(data: Path, size: str, common: dict[str, Any], given: dict[str, Any]) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rollout = {"prompts": 2, "answers": 8, "max_answer_tokens": 16} if size == "tiny" else ROLLOUT
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    asked = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    settings = GRPOConfig(
        **common,
        per_device_train_batch_size=rollout["prompts"] * rollout["answers"],
        num_generations=rollout["answers"],
        max_completion_length=rollout["max_answer_tokens"],
    )

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [float("e" in str(one)) for one in completions]

    return GRPOTrainer(args=settings, train_dataset=Dataset.from_list(asked), reward_funcs=reward, **given)


def collect(files: list[Path]) -> Path:
    rows = {row["name"]: row for row in read_rows("objectives")}
    about: dict[str, Any] = {}
    for file in files:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        about = next(line["document"] for line in lines if "document" in line) | {"what": WHAT}
        rows |= {line["name"]: line | {"commit": about["commit"]} for line in lines if "name" in line}
    for row in rows.values():
        _compare(row, rows)
        print(f"{row['name']}: {words(row) if 'predicted' in row else row.get('peak_bytes', 0) / GIB}")
    return write_result("objectives", WHAT, list(rows.values()), about=about | {"commit": "by row"})


def _compare(row: dict[str, Any], rows: dict[str, dict[str, Any]]) -> None:
    """What a row means beside others: TRL's, the student without a teacher, one adapter instead of four."""

    def measured(name: str) -> dict[str, Any] | None:
        return rows[name] if name in rows and "failed" not in rows[name] else None

    if "failed" in row:
        return
    if row["name"].endswith("against TRL") and (theirs := measured(row["name"].replace("against TRL", "TRL"))):
        has_rates = "tokens_per_second" in theirs
        speed = row["tokens_per_second"] / theirs["tokens_per_second"] if has_rates else None
        row["speed_to_trl"] = round(speed or theirs["median_seconds"] / row["median_seconds"], 3)
        if theirs.get("peak_bytes"):
            row["memory_to_trl"] = round(row["peak_bytes"] / theirs["peak_bytes"], 3)
    if row["name"].endswith("teacher in each step") and (alone := measured("8B into 1B, no teacher")):
        row["share_of_teacher"] = round(1 - alone["median_seconds"] / row["median_seconds"], 3)
    if row["name"].endswith("teacher asked once") and (live := measured("8B into 1B, teacher in each step")):
        row["time_to_live"] = round(row["median_seconds"] / live["median_seconds"], 3)
    if row["name"].endswith("sweep of four") and (alone := measured(f"{row['name']}, one alone")):
        row["memory_to_one"] = round(row["peak_bytes"] / alone["peak_bytes"], 3) if alone["peak_bytes"] else None


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trl"]:
        train_by_trl(*sys.argv[2:6])
    elif sys.argv[1:2] == ["--make"]:
        make(*sys.argv[2:6])
    else:
        main()
