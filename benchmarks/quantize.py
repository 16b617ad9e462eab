"""What few bits cost a small language model, by method, and how much of it quantization-aware training wins back.

    python benchmarks/quantize.py --model SmolLM2-135M-Instruct.Q4_1.gguf --data gsm8k_train.jsonl

Each method is run by `tunesmith quantize` itself: the same held-out documents, calibration on others of the same file,
and the proof by transformers. Then a LoRA run is trained twice on the same data in the same order, once for the file in
4 bits; both are exported and measured as exported. The result is benchmarks/results/quantize.json.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from results import read_rows, write_result

METHODS = [
    ("rtn", 4), ("gptq", 4), ("awq", 4), ("kmeans", 4), ("rtn", 8), ("gptq", 8), ("fp8", 8), ("int8-outliers", 8)
]  # fmt: skip
LENGTH = 256


def quantized(model: str, data: str, folder: Path, samples: int, measured: int, only: list[str]) -> list[dict]:
    from tunesmith.quantize.quantize import quantize_model

    rows = []
    for method, bits in METHODS:
        if only and f"{method}-{bits}" not in only:
            continue
        began = time.monotonic()
        sizes = {"samples": samples, "measured": measured, "length": LENGTH}
        made = quantize_model(model, folder / f"{method}-{bits}", method=method, bits=bits, data=[data], **sizes)
        report = made.report
        rows.append(
            {
                "method": method, "bits": bits, "group": report.group, "before": report.before, "after": report.after,
                "target_tokens": report.target_tokens, "calibration_tokens": report.calibration_tokens,
                "agreement": made.proof.agreement if made.proof else None,
                "seconds": round(time.monotonic() - began, 1), "measured": where(),
            }
        )  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return rows


def trained_for_it(model: str, data: str, folder: Path, settings: dict) -> dict:
    """Held-out perplexities: trained as usual, the same rounded to int4, and trained for int4."""
    from tunesmith.config.load import from_mapping
    from tunesmith.run.assemble import assemble
    from tunesmith.run.folder import write_json
    from tunesmith.run.start import prepare_run
    from tunesmith.train.loop import train

    found, seconds = {}, {}
    for kind in (None, "int4"):
        output = folder / f"run-{kind}"
        run = from_mapping(
            {"model": model, "data": data, "output": str(output), **settings, "quantization_aware": kind}
        )
        began = time.monotonic()
        output.mkdir(parents=True, exist_ok=True)
        train(assemble(prepare_run(run, warn=lambda _: None)), lambda event: print(event, flush=True))
        seconds[kind] = round(time.monotonic() - began, 1)
        found[kind] = perplexity(output)
        print(kind, found[kind], seconds[kind], flush=True)
    plain = folder / "run-None"
    content = json.loads((plain / "run.json").read_text())
    content["settings"]["quantization_aware"] = "int4"  # opened so, what was trained as usual is rounded
    write_json(plain / "run.json", content)
    full, rounded, aware = found[None], perplexity(plain), found["int4"]
    result = {
        "settings": settings, "full": full, "rounded": rounded, "quantization_aware": aware,
        "recovered": (rounded - aware) / (rounded - full),
        "seconds": {"usual": seconds[None], "aware": seconds["int4"]},
    }  # fmt: skip
    print(json.dumps(result), flush=True)
    return result


def where() -> str:
    """Rows of several days lie in one file: each says what it was measured on."""
    from tunesmith.measure.results import document

    return f"{platform.machine()}, {document('', [])['commit']}"


def perplexity(folder: Path) -> float:
    """Of a run's model on all of its held-out data."""
    from tunesmith.evaluate.loss import overall
    from tunesmith.run.evaluate import evaluate_run
    from tunesmith.run.folder import read_run

    _, after, _ = evaluate_run(folder, read_run(folder))
    return math.exp(overall(after))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--measured", type=int, default=12)
    parser.add_argument("--aware-data", help="what the two runs learn, where it is not --data")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--batch-tokens", type=int, default=512)
    parser.add_argument("--only", nargs="*", default=[], help="such as gptq-4; or `aware`")
    chosen = parser.parse_args()
    kept = read_rows("quantize") or {}
    settings = {
        "method": "lora", "lora": {"rank": 16}, "sequence_length": 256, "batch_tokens": chosen.batch_tokens,
        "steps": chosen.steps, "learning_rate": 1e-3, "held_out": 32,
        "precision": "fp32", "device": "cpu", "save_every": 1000,
    }  # fmt: skip
    with TemporaryDirectory() as folder:
        if chosen.only != ["aware"]:
            sizes = (chosen.samples, chosen.measured)
            rows = quantized(chosen.model, chosen.data, Path(folder), *sizes, chosen.only)
            names = {(row["method"], row["bits"]) for row in rows}
            before = [row for row in kept.get("methods", []) if (row["method"], row["bits"]) not in names]
            kept["methods"] = sorted([*before, *rows], key=lambda row: METHODS.index((row["method"], row["bits"])))
        if not chosen.only or "aware" in chosen.only:
            data = chosen.aware_data or chosen.data
            made = trained_for_it(chosen.model, data, Path(folder), settings)
            kept["quantization_aware"] = {"measured": where(), "data": Path(data).name, **made}
    kept["model"] = Path(chosen.model).name
    if chosen.only != ["aware"]:
        kept["data"] = Path(chosen.data).name
    write_result("quantize", "What 4 and 8 bits cost a small language model: held-out perplexity, CPU", kept)


if __name__ == "__main__":
    main()
