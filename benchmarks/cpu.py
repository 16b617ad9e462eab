"""The small benchmark for a CPU: one epoch of 64 questions, Tunesmith against transformers' Trainer with peft.

    python benchmarks/cpu.py [--data FOLDER] [--questions 64]

Both fine-tune SmolLM2-135M-Instruct with the same adapters, learning rate and schedule on the very same tokens, see
each target token once (Tunesmith in no more steps), and are measured on the same held-out questions by the same code.
Each runs in a process of its own; the time is that of the training steps alone, without imports, loading and
tokenizing. Trainer runs in fp32 and, where the CPU has bf16 arithmetic, in bf16 too; the faster one counts.
Prints the ratio and
writes benchmarks/results/cpu.json. FOLDER holds gsm8k_train.jsonl and gsm8k_test.jsonl; without it, and without the
hub, sums in words are made up instead.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples" / "demo")]

HELD_OUT = 32
EXAMPLES_A_STEP = 8
SEQUENCE_LENGTH = 512
BATCH_TOKENS = 4 * SEQUENCE_LENGTH
"""Holds `EXAMPLES_A_STEP` questions or a few more, so that Tunesmith takes no more steps than Trainer."""
LEARNING_RATE = 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder with GSM8K")
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2, help="each system runs so often; its fastest counts")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print("RESULT " + json.dumps(work(json.loads(arguments.worker))))
        return
    from demo import find_model
    from results import write_result

    from tunesmith.plan.hardware import has_fast_bf16

    folder = Path(tempfile.mkdtemp(prefix="tunesmith-bench-"))
    source = write_data(arguments.data, arguments.questions, folder)
    common = {"model": find_model(), "folder": str(folder)}
    systems = [("tunesmith", "auto"), ("trainer", "fp32"), *([("trainer", "bf16")] if has_fast_bf16() else [])]
    rows: dict[tuple[str, str], dict] = {}
    for number in range(arguments.accumulation_steps):
        for system, precision in systems:
            row = in_process(common | {"system": system, "precision": precision, "number": number})
            best = rows.get((system, precision))
            if best is None or row["seconds"] < best["seconds"]:
                rows[system, precision] = row
            print(f"{system:10} {precision:5} {row['seconds']:7.1f} s  held-out loss {row['held_out']:.4f}", flush=True)
    ours = rows["tunesmith", "auto"]
    peer = min((row for (system, _), row in rows.items() if system == "trainer"), key=lambda row: row["seconds"])
    assert ours["target_tokens"] == peer["target_tokens"], "both must learn from the same tokens"
    ratio = peer["seconds"] / ours["seconds"]
    print(
        f"\nTunesmith {ours['seconds']:.1f} s, Trainer + peft {peer['seconds']:.1f} s ({peer['precision']}): "
        f"{ratio:.2f} times as fast; held-out loss {ours['held_out']:.4f} against {peer['held_out']:.4f} "
        f"({ours['target_tokens']:,} target tokens, {source})"
    )
    numbers = {"data": source, "ratio": round(ratio, 2), "rows": list(rows.values())}
    write_result("cpu", "LoRA on SmolLM2-135M, one epoch, CPU: Tunesmith against Trainer + peft", numbers)


def in_process(order: dict) -> dict:
    command = [sys.executable, __file__, "--worker", json.dumps(order)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    results = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not results:
        sys.exit(f"{order['system']} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(results[0])


def work(order: dict) -> dict:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    train = train_tunesmith if order["system"] == "tunesmith" else train_trainer
    result = train(Path(order["folder"]), order)
    return {"system": order["system"], **result, "held_out": round(result["held_out"], 5)}


def settings(folder: Path, order: dict):
    """The run, of which Trainer takes the tokens, too."""
    from tunesmith.config.load import from_mapping

    return from_mapping(
        {
            "model": order["model"],
            "data": [{"path": str(folder / "train.jsonl")}],
            "eval": [{"path": str(folder / "held_out.jsonl")}],
            "sequence_length": SEQUENCE_LENGTH,
            "batch_tokens": BATCH_TOKENS,
            "learning_rate": LEARNING_RATE,
            "precision": order["precision"],
            "eval_every": 1_000_000,
            "output": str(folder / f"{order['system']}-{order['precision']}-{order['number']}"),
        }
    )


def train_tunesmith(folder: Path, order: dict) -> dict:
    from tunesmith.run.assemble import assemble
    from tunesmith.run.start import prepare_run
    from tunesmith.train import events
    from tunesmith.train.loop import train

    run = settings(folder, order)
    Path(run.output).mkdir(exist_ok=True)
    job = assemble(prepare_run(run, warn=lambda message: None))
    steps: list[events.Step] = []
    held_out: list[float] = []

    def observe(event: events.Event) -> None:
        if isinstance(event, events.Step):
            steps.append(event)
        elif isinstance(event, events.Evaluation):
            held_out.append(event.loss)

    train(job, observe)
    return {
        "precision": job.plan.precision,
        "seconds": round(sum(step.seconds for step in steps), 2),
        "steps": len(steps),
        "target_tokens": int(sum(step.target_tokens for step in steps)),
        "held_out": held_out[-1],
    }


def train_trainer(folder: Path, order: dict) -> dict:
    """As its users would: LoRA by peft on all linears, padded batches, labels on the answers alone."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

    from tunesmith.evaluate.loss import held_out_losses
    from tunesmith.model import attention, load
    from tunesmith.model.forward_spec import find_forward_spec
    from tunesmith.parallel.prepare import load_model
    from tunesmith.run.start import prepare_run

    run = settings(folder, order | {"precision": "fp32"})
    Path(run.output).mkdir(exist_ok=True)
    data = prepare_run(run, warn=lambda message: None).data
    tokenizer = load.load_tokenizer(run)
    model = load_model(run, dtype="fp32", device="cpu")
    model.config.use_cache = False
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    rows = [to_row(*data.train[0].example(index)[:2]) for index in range(len(data.train[0]))]
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=EXAMPLES_A_STEP,
        num_train_epochs=1,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="cosine",
        warmup_steps=1,
        bf16=order["precision"] == "bf16",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Trainer(
        model=model, args=arguments, train_dataset=rows, data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True)
    )
    outcome = trainer.train()
    attention.register()
    merged = model.merge_and_unload().eval()
    spec, _ = find_forward_spec(merged, vocabulary=load.vocabulary_size(merged.config))
    device = torch.device("cpu")
    results = held_out_losses(merged, spec, data.evals, device=device, sequence_length=SEQUENCE_LENGTH)
    return {
        "precision": order["precision"],
        "seconds": round(outcome.metrics["train_runtime"], 2),
        "steps": outcome.global_step,
        "target_tokens": sum(label != -100 for row in rows for label in row["labels"][1:]),
        "held_out": results[0].loss,
    }


def to_row(ids, weights) -> dict[str, list[int]]:
    labels = [int(token) if weight > 0 else -100 for token, weight in zip(ids, weights, strict=True)]
    return {"input_ids": [int(token) for token in ids], "attention_mask": [1] * len(ids), "labels": labels}


def write_data(folder: Path, questions: int, to: Path) -> str:
    """The first questions of GSM8K where it is to be had; else sums in words."""
    if (folder / "gsm8k_train.jsonl").exists():
        train = (folder / "gsm8k_train.jsonl").read_text().splitlines()[:questions]
        held_out = (folder / "gsm8k_test.jsonl").read_text().splitlines()[:HELD_OUT]
        source = "GSM8K"
    else:
        rows = made_up(questions + HELD_OUT)
        train, held_out, source = rows[:questions], rows[questions:], "made-up sums"
    (to / "train.jsonl").write_text("\n".join(train) + "\n")
    (to / "held_out.jsonl").write_text("\n".join(held_out) + "\n")
    return f"{source}, {questions} questions"


def made_up(count: int) -> list[str]:
    draw = random.Random(0)
    rows = []
    for _ in range(count):
        name, thing = draw.choice(["Ada", "Ben", "Cleo", "Dan"]), draw.choice(["apples", "books", "coins", "stamps"])
        have, more, lost = draw.randint(10, 90), draw.randint(5, 60), draw.randint(1, 9)
        left = have + more - 3 * lost
        question = (
            f"{name} has {have} {thing}. On Monday {name} gets {more} more, and on each of the next three days {name} "
            f"gives {lost} away. How many {thing} are left?"
        )
        answer = (
            f"After Monday there are {have} + {more} = {have + more} {thing}. Three days of giving away {lost} each "
            f"take 3 * {lost} = {3 * lost}. So {have + more} - {3 * lost} = {left} {thing} are left.\n#### {left}"
        )
        rows.append(json.dumps({"question": question, "answer": answer}))
    return rows


if __name__ == "__main__":
    main()
