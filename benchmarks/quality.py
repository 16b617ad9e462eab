"""Does saving cost quality? The same fine-tune in each precision, storage and optimizer, by held-out loss.

    python benchmarks/quality.py --model MODEL --train FILE --held-out FILE [--seeds 3] [--workers 16] [key=value ...]
    python benchmarks/quality.py --collect FILE ...

Runs are independent, so several share the device; those of a variant follow each other in one process. A variant
passes when its mean lies within the spread of its baselines' runs (the same method in fp32 and bf16), or below.
Everything goes through `tunesmith plan` and `train`. The second form makes the result of what several calls printed, or
one that was cut short.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results import write_result

from tunesmith.measure.results import document

FULL_RATE, LORA_RATE = "5e-5", "5e-4"
MARK = "@@"
"""Begins the line in which a process says what it found."""


@dataclass(frozen=True)
class Variant:
    name: str
    settings: tuple[str, ...]
    baseline: str
    """Which group's spread it is held against."""
    is_baseline: bool = False
    without_masters: bool = False

    def in_processes(self, seeds: int) -> list[list[int]]:
        """Which seeds follow each other in a process. Runs in fp32 take the longest and compile nothing."""
        every = list(range(seeds))
        return [[seed] for seed in every] if "precision=fp32" in self.settings else [every]


VARIANTS = (
    Variant("LoRA fp32", ("method=lora", "precision=fp32"), "lora", is_baseline=True),
    Variant("LoRA bf16", ("method=lora", "precision=bf16"), "lora", is_baseline=True),
    Variant("LoRA fp8 matmuls", ("method=lora", "precision=fp8"), "lora"),
    Variant("QLoRA, nf4", ("method=qlora", "precision=bf16"), "lora"),
    Variant("QLoRA, nf4, fp8 matmuls", ("method=qlora", "precision=fp8"), "lora"),
    Variant("LoRA, 8-bit AdamW", ("method=lora", "precision=bf16", "optimizer=adamw_8bit"), "lora"),
    Variant("full fp32", ("method=full", "precision=fp32"), "full", is_baseline=True),
    Variant("full bf16, fp32 masters", ("method=full", "precision=bf16"), "full", is_baseline=True),
    Variant("full fp8 matmuls", ("method=full", "precision=fp8"), "full"),
    Variant("full, 8-bit AdamW", ("method=full", "precision=bf16", "optimizer=adamw_8bit"), "full"),
    Variant("full bf16, rounded stochastically", ("method=full", "precision=bf16"), "full", without_masters=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--train", type=Path)
    parser.add_argument("--held-out", type=Path)
    parser.add_argument("--collect", type=Path, nargs="+", help="what calls printed, instead of running anything")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--only", nargs="*", default=[], help="variants whose name contains one of these")
    parser.add_argument("--log", type=Path, default=None, help="where a file of what each process said is kept")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of all runs")
    options = parser.parse_args()
    if options.collect:
        print(f"wrote {collect(options.collect)}")
        return
    if not (options.model and options.train and options.held_out):
        parser.error("--model, --train and --held-out are needed")
    what = f"Held-out loss by precision, storage and optimizer: {Path(options.model).stem}, {options.seeds} seeds each"
    print(json.dumps(document(what, {})), flush=True)
    # A process has little to do for the CPU but to compile and to launch kernels.
    os.environ.update({"TORCHINDUCTOR_COMPILE_THREADS": "1", **os.environ})
    chosen = [one for one in VARIANTS if not options.only or any(text in one.name for text in options.only)]
    with (
        tempfile.TemporaryDirectory(prefix="tunesmith-quality-") as folder,
        ThreadPoolExecutor(options.workers) as pool,
    ):
        settings = write_settings(Path(folder), options)
        logs = options.log or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        jobs = [(one, seeds) for one in chosen for seeds in one.in_processes(options.seeds)]
        done = list(pool.map(lambda job: in_process(settings, *job, options.overrides, logs), jobs))
    found = [(one, run) for (one, _), runs in zip(jobs, done, strict=True) for run in runs]
    print(f"wrote {write_result('quality', what, summarize(chosen, found))}")


def collect(files: list[Path]) -> Path:
    """The runs that are named in what was printed, of each seed the newest; the document of the first file tells where
    they ran, and each row has the commit of its own."""
    named = {variant.name: variant for variant in VARIANTS}
    documents: list[dict[str, Any]] = []
    newest: dict[tuple[str, int], dict[str, Any]] = {}
    for line in (line for file in files for line in file.read_text(encoding="utf-8").splitlines()):
        name, _, told = line.partition(": {")
        if line.startswith("{"):
            documents.append(json.loads(line))
        elif name in named and told:
            run = ast.literal_eval("{" + told)
            newest[name, run["seed"]] = run | {"commit": documents[-1]["commit"]}
    found = [(named[name], run) for (name, _), run in newest.items()]
    chosen = [variant for variant in VARIANTS if any(one is variant for one, _ in found)]
    rows = summarize(chosen, found)
    for variant, row in zip(chosen, rows, strict=True):
        row["commit"] = ", ".join(sorted({run["commit"] for one, run in found if one is variant}))
    return write_result("quality", documents[0]["what"], rows, about=documents[0])


def write_settings(folder: Path, options: argparse.Namespace) -> Path:
    content = {
        "model": str(Path(options.model).resolve()) if Path(options.model).exists() else options.model,
        "data": str(options.train.resolve()),
        "eval": str(options.held_out.resolve()),
        "sequence_length": 512,
        "batch_tokens": 4096,
        "steps": 60,
        "eval_every": 1000,
        "lora": {"rank": 16},
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(content))
    return path


def in_process(
    settings: Path, variant: Variant, seeds: list[int], overrides: list[str], logs: Path
) -> list[dict[str, float]]:
    """The runs that succeeded, of a process that does these one after the other; says why the others did not."""
    name = f"{variant.name} {seeds[0]}".replace(",", "").replace(" ", "-")
    job = {"settings": str(settings), "variant": variant.name, "seeds": seeds, "overrides": overrides}
    log = logs / f"{name}.log"
    with log.open("w") as file:
        command = [sys.executable, __file__, "--work", json.dumps(job)]
        pipes = {"stdout": subprocess.PIPE, "stderr": file, "text": True, "errors": "replace"}
        process = subprocess.Popen(command, **pipes)
        assert process.stdout
        found = []
        for line in process.stdout:
            if line.startswith(MARK):
                found.append(json.loads(line.removeprefix(MARK)))
                print(f"{variant.name}: {found[-1]}", flush=True)
    if process.wait() or len(found) < len(seeds):
        print(f"{variant.name} failed: {log.read_text().strip()[-500:]}", file=sys.stderr, flush=True)
    return found


def work(job: dict[str, Any]) -> None:
    """Train with one seed after the other by the ordinary commands, in one process, which compiles once."""
    settings = Path(job["settings"])
    variant = next(one for one in VARIANTS if one.name == job["variant"])
    rate = LORA_RATE if variant.baseline == "lora" else FULL_RATE
    for seed in job["seeds"]:
        began = time.monotonic()
        output = settings.parent / f"{variant.name} {seed}".replace(",", "").replace(" ", "-")
        given = [f"learning_rate={rate}", *variant.settings, f"seed={seed}", f"output={output}", *job["overrides"]]
        extra: list[str] = []
        if variant.without_masters:
            plan = output.with_suffix(".json")
            call("plan", str(settings), *given, "--save", str(plan))
            plan.write_text(json.dumps(json.loads(plan.read_text()) | {"master_weights": False}))
            extra = ["--plan", str(plan)]
        call("train", str(settings), *given, *extra)
        summary = json.loads((output / "summary.json").read_text())
        run = {"before": summary["held_out_before"], "loss": summary["held_out_after"]}
        seconds = round(time.monotonic() - began, 1)
        print(f"\n{MARK}{json.dumps({'seed': seed, **run, 'seconds': seconds})}", flush=True)


def call(*arguments: str) -> None:
    """A command of tunesmith, in this process; ends it where the command fails."""
    from tunesmith.cli.main import main as tunesmith

    try:
        tunesmith(arguments)
    except SystemExit as end:
        if end.code:
            raise


def summarize(variants: list[Variant], found: list[tuple[Variant, dict[str, Any]]]) -> list[dict[str, Any]]:
    rows = []
    for variant in variants:
        losses = [run["loss"] for one, run in found if one is variant]
        base = [run["loss"] for one, run in found if one.baseline == variant.baseline and one.is_baseline]
        row: dict[str, Any] = {"variant": variant.name, "losses": [round(loss, 4) for loss in losses]}
        if losses:
            mean = statistics.fmean(losses)
            before = statistics.fmean(run["before"] for one, run in found if one is variant)
            row |= {"before": round(before, 4), "mean": round(mean, 4)}
            if base:
                row |= {
                    "to_baseline_mean": round(mean - statistics.fmean(base), 4),
                    "baseline_lowest": round(min(base), 4),
                    "baseline_highest": round(max(base), 4),
                    "within": mean <= max(base),
                }
        rows.append(row)
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(json.loads(sys.argv[2]))
    else:
        main()
