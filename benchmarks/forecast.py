"""A forecast over families that no constant of the planner was chosen by: predicted, and measured in training.

    python benchmarks/forecast.py [--seed N] [--layers N] [--count N] [--out FOLDER] [--deadline SECONDS] [--list]
    python benchmarks/forecast.py --collect FOLDER/forecast.jsonl ...

The first draws configurations by a seed that was not used before (the one in the result file is spent), makes their
plans while nothing else uses the GPU, and trains by them: each with random weights at a published shape, read from
files, on documents of many lengths. Several start and compile at once; each is timed alone, the others being stopped.
Predictions are those that stand in the plans, and are kept beside what was measured: they are not made again when the
planner changes. The second makes benchmarks/results/forecast.json.

Where time is short, models are cut to their first `--layers`, and `--count` configurations are drawn of all: plans are
made for the models as they are cut, so their predictions are as hard. On an H200 with 16 cores

    python benchmarks/forecast.py --layers 8 --count 28 --workers 12 --out forecast --deadline 500

takes 6 to 8 minutes for 28 configurations of 14 families (36 of whole models took more than 9).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from results import write_result
from shapes import FORECAST, shapes_of

from tunesmith.measure.results import document

GIB = 2**30
WHAT = "Predicted by the plan and measured in `tunesmith train`, configurations drawn by a new seed"
WARM_STEPS, TIMED_STEPS = 6, 10
MOST_STEPS = 200
POLL_SECONDS = 0.02
ALONE_SECONDS = 45.0
"""The most that one may take to be timed."""
PLAN_SECONDS, START_SECONDS = 150.0, 240.0
"""The most that a plan may take, and a run until it can be timed; then it is ended, and costs its own row alone."""
USABLE_GIB = 128
DOCUMENT = 900
"""Tokens that the mean token's document has, about."""
SHAPES = shapes_of(FORECAST)
SMALL = {
    "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
}  # fmt: skip
"""What `--tiny` makes of a shape, to try all of this on a CPU."""


@dataclass
class Case:
    name: str
    shape: str
    settings: dict[str, Any]
    limit_gib: float | None = None
    """Of the GPU's memory, what the plan may use; None: all that is free."""
    layers: int | None = None
    """Of its model; None: all."""
    folder: str = ""
    predicted: dict[str, Any] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("forecast"))
    parser.add_argument("--seed", type=int, default=20270119)
    parser.add_argument("--deadline", type=float, default=540.0)
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--layers", type=int, help="of each model; all where nothing is said")
    parser.add_argument("--count", type=int, help="configurations; three of each shape where nothing is said")
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name contains one of these")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the benchmark itself")
    parser.add_argument("--list", action="store_true", help="only say what would be measured")
    parser.add_argument("--collect", type=Path, nargs="+", help="files to make the result of")
    options = parser.parse_args()
    if options.collect:
        print(f"wrote {collect(options.collect)}")
        return
    cases = [
        case
        for case in draw(options.seed, tiny=options.tiny, layers=options.layers, count=options.count)
        if any(one in case.name for one in options.only or [""])
    ]
    if options.list:
        print(*(case.name for case in cases), sep="\n")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tunesmith-forecast-") as folder:
        Forecast(cases, Path(folder), options).run()


def draw(seed: int, *, tiny: bool = False, layers: int | None = None, count: int | None = None) -> list[Case]:
    """Each shape with each method once, or with so many methods as make up `count`; the rest by chance."""
    chance = random.Random(seed)
    cases = []
    for number, shape in enumerate(SHAPES):
        most = 3 if count is None else count // len(SHAPES) + (number < count % len(SHAPES))
        for method in chance.sample(("full", "lora", "qlora"), most) if most < 3 else ("full", "lora", "qlora"):
            length = chance.choice((1024, 2048, 4096, 8192))
            settings: dict[str, Any] = {
                "method": method,
                "sequence_length": length,
                "batch_tokens": max(length, chance.choice((8192, 16384))),
                "precision": chance.choice(("auto", "fp8")),
            }
            if method == "full":
                settings["optimizer"] = chance.choice(("adamw", "adamw_8bit", "lion"))
            else:
                settings["lora"] = {"rank": chance.choice((8, 16, 64))}
            if tiny:
                settings |= {"sequence_length": 64, "batch_tokens": 128, "precision": "auto"}
            said = [f"{value['rank']}" if name == "lora" else str(value) for name, value in settings.items()]
            said += [f"{layers} layers"] if layers else []
            cases.append(Case(", ".join([shape, *said]), shape, settings, layers=layers))
    return cases


class Forecast:
    def __init__(self, cases: list[Case], folder: Path, options: argparse.Namespace):
        self.cases, self.folder, self.options = cases, folder, options
        self.began = time.monotonic()
        self.running: dict[str, Training] = {}
        self.rows = (options.out / "forecast.jsonl").open("a")
        self.environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "TUNESMITH_CACHE": str(folder / "cache"),
            "TORCHINDUCTOR_COMPILE_THREADS": "2",
        }

    @property
    def left(self) -> float:
        return self.options.deadline - (time.monotonic() - self.began)

    def run(self) -> None:
        self.write({"document": document(WHAT, [])})
        self.make_models()
        with ThreadPoolExecutor(self.options.workers) as threads:
            list(threads.map(self.plan, self.cases))
        self.say(f"planned {sum(bool(case.predicted) for case in self.cases)} of {len(self.cases)}")
        waiting = sorted((case for case in self.cases if case.predicted), key=lambda case: case.predicted["total"])
        try:
            while (waiting or self.running) and self.left > 0:
                self.start(waiting)
                ready = [one for one in self.running.values() if one.is_warm()]
                for one in ready:
                    self.measure(one)
                for one in [one for one in self.running.values() if one.process.poll() is not None]:
                    self.end(one, {"failed": one.last_words()})
                for one in [one for one in self.running.values() if one.is_late()]:
                    self.end(one, {"failed": f"at step {one.steps()} after {START_SECONDS:.0f} s"})
                time.sleep(POLL_SECONDS)
        finally:
            for case in waiting:
                self.write({**asdict(case), "failed": "out of time"})
            for one in list(self.running.values()):
                self.end(one, {"failed": f"out of time at step {one.steps()}"})

    def start(self, waiting: list[Case]) -> None:
        """What there is memory for, the smallest first."""
        used = sum(one.case.predicted["total"] for one in self.running.values())
        while waiting and len(self.running) < self.options.workers:
            if self.running and used + waiting[0].predicted["total"] > USABLE_GIB * GIB:
                break
            case = waiting.pop(0)
            used += case.predicted["total"]
            self.running[case.name] = Training(case, self.environment)

    def measure(self, one: Training) -> None:
        """Time the steps of one while the others are stopped."""
        others = [other for other in self.running.values() if other is not one]
        for other in others:
            other.signal(signal.SIGSTOP)
        time.sleep(0.3)  # what they had queued runs out
        one.signal(signal.SIGCONT)
        first, until = one.steps(), time.monotonic() + ALONE_SECONDS
        while one.steps() < first + 2 + TIMED_STEPS and one.process.poll() is None and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        steps = one.events("step")[first + 1 :]
        for other in others:
            if not other.is_waiting:
                other.signal(signal.SIGCONT)
        if len(steps) < 3:
            self.end(one, {"failed": one.last_words() or "too slow to be timed"})
            return
        seconds = [after["time"] - before["time"] for before, after in itertools.pairwise(steps)]
        speed = sum(step["tokens"] for step in steps[1:]) / sum(seconds)
        found = {"peak_bytes": max(step["memory"] for step in steps), "tokens_per_second": round(speed, 1)}
        self.end(one, found | {"steps": len(seconds), "median_seconds": round(statistics.median(seconds), 4)})

    def end(self, one: Training, found: dict[str, Any]) -> None:
        one.signal(signal.SIGKILL)
        del self.running[one.case.name]
        self.write({**asdict(one.case), **found})

    def write(self, row: dict[str, Any]) -> None:
        row.pop("folder", None)
        self.rows.write(json.dumps(row) + "\n")
        self.rows.flush()
        if "name" in row:
            self.say(f"{row['name']}: {words(row)}")

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:4.0f} s {text}", flush=True)

    def make_models(self) -> None:
        shapes = list(dict.fromkeys(case.shape for case in self.cases))
        size = "tiny" if self.options.tiny else str(self.options.layers or "whole")
        command = [sys.executable, __file__, "--make", str(self.folder), size]
        groups = [shapes[start::4] for start in range(4)]
        with (self.options.out / "make.log").open("w") as log:
            for process in [subprocess.Popen([*command, *group], stderr=log, stdout=log) for group in groups if group]:
                process.wait()
        self.say("models made")

    def plan(self, case: Case) -> None:
        folder = self.folder / "runs" / str(self.cases.index(case))
        folder.mkdir(parents=True)
        case.folder = str(folder)
        settings = {
            "model": str(self.folder / case.shape),
            "data": str(self.folder / "train.jsonl"),
            "steps": MOST_STEPS,
            "held_out": 0,
            "output": str(folder / "run"),
            **case.settings,
        }
        (folder / "run.yaml").write_text(json.dumps(settings))
        try:
            done = subprocess.run(
                [sys.executable, __file__, "--plan-one", str(folder), str(case.limit_gib or 0)],
                env=self.environment, capture_output=True, text=True, timeout=PLAN_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            self.write({**asdict(case), "failed": f"no plan after {PLAN_SECONDS:.0f} s"})
            return
        if done.returncode:
            self.write({**asdict(case), "failed": f"no plan: {done.stderr.strip()[-400:]}"})
            return
        case.predicted = json.loads(done.stdout.splitlines()[-1])


class Training:
    """One `tunesmith train`."""

    def __init__(self, case: Case, environment: dict[str, str]):
        self.case, self.is_waiting = case, False
        self.began = time.monotonic()
        folder = Path(case.folder)
        self.log, self.file = folder / "log", folder / "run" / "events.jsonl"
        command = [sys.executable, "-m", "tunesmith", "train", "run.yaml", "--plan", "plan.json"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def events(self, kind: str) -> list[dict[str, Any]]:
        try:
            lines = self.file.read_text().splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return [one for one in found if one["event"] == kind]

    def steps(self) -> int:
        return len(self.events("step"))

    def is_warm(self) -> bool:
        """Whether it can be timed; if so it is stopped until it is its turn."""
        if not self.is_waiting and self.steps() >= WARM_STEPS:
            self.signal(signal.SIGSTOP)
            self.is_waiting = True
        return self.is_waiting and self.process.poll() is None

    def is_late(self) -> bool:
        return not self.is_waiting and time.monotonic() - self.began > START_SECONDS

    def last_words(self) -> str:
        return self.log.read_text(errors="replace").strip()[-600:]


def make(folder: Path, size: str, shapes: list[str]) -> None:
    """Models of random weights, and data whose documents have many lengths."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    write_documents(folder, size)
    for name in shapes:
        try:
            make_one(folder, size, name, device)
        except Exception:
            traceback.print_exc()  # its plans fail for themselves


def make_one(folder: Path, size: str, name: str, device: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tunesmith.measure.peers import tokenizer_of

    shape = dict(SHAPES[name])
    if size == "tiny":
        shape = {key: SMALL.get(key, value) for key, value in shape.items()}
        if "num_key_value_heads" in shape:
            shape["num_key_value_heads"] = min(2, shape["num_key_value_heads"])
    if size.isdecimal():
        shape["num_hidden_layers"] = min(int(size), shape["num_hidden_layers"])
    shape |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    config = AutoConfig.for_model(**shape, max_position_embeddings=16384)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / name, max_shard_size="2GB")
    tokenizer_of(shape["vocab_size"]).save_pretrained(folder / name)


def write_documents(folder: Path, size: str) -> None:
    chance, texts = random.Random(0), []
    known = range(40, 100) if size == "tiny" else range(4000, 10000)  # not those that begin as special tokens do
    for _ in range(40 if size == "tiny" else 1500):
        length = min(6000, max(20, int(chance.lognormvariate(5.8, 0.9))))
        texts.append(" ".join(f"t{number}" for number in chance.choices(known, k=length)))
    path = folder / f"train.{os.getpid()}"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    path.replace(folder / "train.jsonl")


def plan_one(folder: Path, limit_gib: float) -> None:
    """The plan that `tunesmith train` would make, on a GPU with so much memory where a limit is given; and what it
    predicts."""
    import torch

    from tunesmith.config.load import load
    from tunesmith.model import attention
    from tunesmith.model.probe import probe_run
    from tunesmith.plan.hardware import probe
    from tunesmith.run.choose import new_plan, plan_and_data

    run = load(folder / "run.yaml").run
    attention.register()
    probed = probe_run(run, device="cuda" if torch.cuda.is_available() else "cpu")[1]
    limited = None
    if limit_gib:
        hardware = probe()
        gpus = tuple(gpu.changed(free=int(limit_gib * GIB)) for gpu in hardware.gpus)
        limited = new_plan(run, hardware.changed(gpus=gpus), probed=probed)
    plan, _ = plan_and_data(run, probed=probed, plan=limited)
    (folder / "plan.json").write_text(plan.model_dump_json())
    kept = ("attention", "is_compiled", "cuda_graphs", "by_length", "micro_batch", "checkpointed_layers",
            "matmul_dtype", "optimizer_states", "master_weights", "sequences_per_step", "kernels")  # fmt: skip
    said = {
        "total": plan.memory.total,
        "allocated": plan.memory.allocated if plan.device == "cuda" else plan.memory.total,
        "tokens_per_second": round(plan.tokens_per_second, 1),
        "memory": {name: size for name, size in plan.memory.model_dump().items() if size},
        "time": {name: round(seconds, 5) for name, seconds in plan.time.model_dump().items() if seconds},
        **{name: getattr(plan, name) for name in kept},
    }
    print(json.dumps(said))


def words(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"failed: {row['failed']}"
    said = row["predicted"]
    memory, speed = errors(row)
    return (
        f"{said['allocated'] / GIB:.1f} GiB predicted, {row['peak_bytes'] / GIB:.1f} measured ({memory:+.1%}); "
        f"{said['tokens_per_second']:,.0f} tokens/s predicted, {row['tokens_per_second']:,.0f} measured ({speed:+.1%})"
    )


def errors(row: dict[str, Any]) -> tuple[float, float]:
    """By how much the predictions of memory and speed were above what was measured."""
    said = row["predicted"]
    return said["allocated"] / row["peak_bytes"] - 1, said["tokens_per_second"] / row["tokens_per_second"] - 1


def _as_it_was(facts: Any, said: dict[str, Any]) -> Any:
    """The model's facts with the rotations and gated MLPs that were fused when the row was measured: by its plan's
    kernels, or, where it does not name them, the rotations that are fused now, and MLPs with SiLU and three linears.
    Heads of 256 were computed by torch's attention, for which keys and values were repeated for each of the queries'
    heads then, and kept so."""

    def changed(kind: Any) -> Any:
        is_joint = any(linear.name.endswith("gate_up_proj") for linear in kind.linears)
        fused = said.get("kernels", () if is_joint else ("swiglu",))
        is_repeated = "kernels" not in said and facts.head_dim > 128
        key = kind.query if is_repeated else kind.key
        is_rotated_so = kind.is_rope_fused and "rope" in said.get("kernels", ("rope",))
        return kind.changed(gate=kind.gate if kind.gate in fused else None, key=key, is_rope_fused=is_rotated_so)

    return facts.changed(kinds=tuple(map(changed, facts.kinds)))


def config_of(row: dict[str, Any]) -> dict[str, Any]:
    """The model's config as its folder had it, with what transformers adds."""
    from transformers import AutoConfig

    shape = SHAPES[row["shape"]]
    layers = min(row.get("layers") or math.inf, shape["num_hidden_layers"])
    return AutoConfig.for_model(**shape | {"num_hidden_layers": layers, "max_position_embeddings": 16384}).to_dict()


def _with_rounded_head(phases: list[Any], task: Any) -> list[Any]:
    """As memory was when the rows were measured: the part of a head's gradient was made in half precision beside the
    logits, before it was added."""
    from tunesmith.plan.memory import _logits

    if task.has_adapters:
        return phases
    head = task.facts.embedding
    more = round(min(task.width * head, _logits(task, task.step_tokens, in_fp8=False)))
    found = {phase.name: phase for phase in phases}
    loss = found["loss"].memory
    found["loss"] = found["loss"].changed(memory=loss.changed(loss=loss.loss + more))
    return list(found.values())


def predicted_now(row: dict[str, Any]) -> tuple[int, float]:
    """Bytes and tokens a second that the formulas say today of a row's configuration, by the plan that it was run by.
    Which weights in fp8 had a transposed copy, and how long documents were, is not in the row."""
    from tunesmith.config.schema import Lora
    from tunesmith.plan import memory, speed
    from tunesmith.plan.choice import Choice, Task
    from tunesmith.plan.families import from_config
    from tunesmith.plan.hardware import named

    said, settings = row["predicted"], row["settings"]
    full, lora = settings["method"] == "full", settings.get("lora", {})
    task = Task(
        facts=_as_it_was(from_config(config_of(row)), said),
        hardware=named("H200"),
        device="cuda",
        precision="bf16",
        method=settings["method"],
        lora=Lora(**lora),
        optimizer=settings.get("optimizer", "adamw").removesuffix("_8bit") if full else "adamw",
        sequence_length=settings["sequence_length"],
        sequences=said["sequences_per_step"],
        document_length=min(DOCUMENT, settings["sequence_length"]),
    )
    kept = ("attention", "is_compiled", "cuda_graphs", "micro_batch", "checkpointed_layers", "matmul_dtype",
            "optimizer_states", "master_weights")  # fmt: skip
    storage = "nf4" if settings["method"] == "qlora" else "plain"
    way = Choice(storage=storage, **{name: said[name] for name in kept})
    ways = [replace(way, cache_transposed=has) for has in (False, True)]
    peaks = [memory.peak(_with_rounded_head(memory.timeline(task, one), task)).memory for one in ways]
    off = [abs(one.weights - said["memory"]["weights"]) for one in peaks]
    at = off.index(min(off))
    seconds = speed.step_time(task, ways[at]).total
    return peaks[at].allocated, task.step_tokens / seconds


def collect(files: list[Path]) -> Path:
    lines = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    about = next(line["document"] for line in lines if "document" in line)
    rows: dict[str, dict[str, Any]] = {}
    for line in lines:
        if "name" in line and ("failed" not in line or line["name"] not in rows):
            rows[line["name"]] = line
    for row in rows.values():
        print(f"{row['name']}: {words(row)}")
    return write_result("forecast", WHAT, list(rows.values()), about=about)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--make"]:
        make(Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
    elif sys.argv[1:2] == ["--plan-one"]:
        plan_one(Path(sys.argv[2]), float(sys.argv[3]))
    else:
        main()
