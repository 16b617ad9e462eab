"""Does saving cost quality? The same fine-tune in each precision, storage and optimizer, by held-out loss.

    python benchmarks/quality.py --model MODEL --train FILE --held-out FILE [--seeds 3] [--workers 8] [key=value ...]

Runs are independent, so several share the device. A variant passes when its mean lies within the spread of its
baselines' runs (the same method in fp32 and bf16), or below. Everything goes through `tunesmith plan` and `train`.
"""

from __future__ import annotations

import argparse
import json
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

FULL_RATE, LORA_RATE = "2e-5", "5e-4"


@dataclass(frozen=True)
class Variant:
    name: str
    settings: tuple[str, ...]
    baseline: str
    """Which group's spread it is held against."""
    is_baseline: bool = False
    without_masters: bool = False


VARIANTS = (
    Variant("LoRA fp32", ("method=lora", "precision=fp32"), "lora", is_baseline=True),
    Variant("LoRA bf16", ("method=lora", "precision=bf16"), "lora", is_baseline=True),
    Variant("LoRA fp8 products", ("method=lora", "precision=fp8"), "lora"),
    Variant("QLoRA, nf4", ("method=qlora", "precision=bf16"), "lora"),
    Variant("QLoRA, nf4, fp8 products", ("method=qlora", "precision=fp8"), "lora"),
    Variant("LoRA, 8-bit AdamW", ("method=lora", "precision=bf16", "optimizer=adamw_8bit"), "lora"),
    Variant("full fp32", ("method=full", "precision=fp32"), "full", is_baseline=True),
    Variant("full bf16, fp32 masters", ("method=full", "precision=bf16"), "full", is_baseline=True),
    Variant("full fp8 products", ("method=full", "precision=fp8"), "full"),
    Variant("full, 8-bit AdamW", ("method=full", "precision=bf16", "optimizer=adamw_8bit"), "full"),
    Variant("full bf16, rounded at random", ("method=full", "precision=bf16"), "full", without_masters=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--only", nargs="*", default=[], help="variants whose name contains one of these")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of all runs")
    options = parser.parse_args()
    chosen = [one for one in VARIANTS if not options.only or any(text in one.name for text in options.only)]
    with (
        tempfile.TemporaryDirectory(prefix="tunesmith-quality-") as folder,
        ThreadPoolExecutor(options.workers) as pool,
    ):
        settings = write_settings(Path(folder), options)
        jobs = [(one, seed) for one in chosen for seed in range(options.seeds)]
        found = list(pool.map(lambda job: train(settings, *job, options.overrides), jobs))
    rows = summarize(chosen, [(one, loss) for (one, _), loss in zip(jobs, found, strict=True)])
    what = f"Held-out loss by precision, storage and optimizer: {Path(options.model).stem}, {options.seeds} seeds each"
    print(f"wrote {write_result('quality', what, rows)}")


def write_settings(folder: Path, options: argparse.Namespace) -> Path:
    content = {
        "model": str(Path(options.model).resolve()) if Path(options.model).exists() else options.model,
        "data": str(options.train.resolve()),
        "eval": str(options.held_out.resolve()),
        "sequence_length": 512,
        "batch_tokens": 8192,
        "epochs": 2,
        "lora": {"rank": 16},
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(content))
    return path


def train(settings: Path, variant: Variant, seed: int, overrides: list[str]) -> float | None:
    """The held-out loss at the end; None, with the reason on stderr, where the run failed."""
    began = time.monotonic()
    output = settings.parent / f"{variant.name} {seed}".replace(",", "").replace(" ", "-")
    rate = LORA_RATE if variant.baseline == "lora" else FULL_RATE
    given = [f"learning_rate={rate}", *variant.settings, f"seed={seed}", f"output={output}", *overrides]
    extra: list[str] = []
    try:
        if variant.without_masters:
            plan = settings.parent / f"{output.name}.json"
            call("plan", str(settings), *given, "--save", str(plan))
            plan.write_text(json.dumps(json.loads(plan.read_text()) | {"master_weights": False}))
            extra = ["--plan", str(plan)]
        call("train", str(settings), *given, *extra)
        loss = json.loads((output / "summary.json").read_text())["held_out_after"]
    except subprocess.CalledProcessError as error:
        print(f"{variant.name}, seed {seed} failed: {error.stderr.strip()[-500:]}", file=sys.stderr, flush=True)
        return None
    print(f"{variant.name}, seed {seed}: {loss:.4f} ({time.monotonic() - began:.0f} s)", flush=True)
    return loss


def call(*arguments: str) -> None:
    command = [sys.executable, "-m", "tunesmith", *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")


def summarize(variants: list[Variant], found: list[tuple[Variant, float | None]]) -> list[dict[str, Any]]:
    rows = []
    for variant in variants:
        losses = [loss for one, loss in found if one is variant and loss is not None]
        base = [
            loss for one, loss in found if one.baseline == variant.baseline and one.is_baseline and loss is not None
        ]
        row: dict[str, Any] = {"variant": variant.name, "losses": [round(loss, 4) for loss in losses]}
        if losses:
            mean = statistics.fmean(losses)
            row |= {"mean": round(mean, 4)}
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
    main()
