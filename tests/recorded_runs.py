"""Run folders as a trainer leaves them, without training: for the pages over them."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

from tunesmith.config.schema import Run
from tunesmith.plan.plan import Memory, Plan, Reason, Time
from tunesmith.run.folder import Identity, write_identity, write_json, write_summary
from tunesmith.train import events
from tunesmith.train.samples import SampleLog

GIB = 2**30
REASONS = (
    Reason(topic="precision", choice="bf16", why="the GPU has bf16 arithmetic, which needs no loss scaling."),
    Reason(topic="micro-batch", choice="2 of 4,096 tokens", why="the largest that fits with 10% of the memory left."),
    Reason(topic="activation checkpointing", choice="none", why="all activations fit."),
)


ASKED = {
    "Where is my order 4711?": (
        "I am a language model and cannot look up orders. Please contact the shop.",
        "Your order 4711 left our warehouse and will arrive on Friday. Please contact the shop if it does not.",
        "Your order 4711 left our warehouse on Tuesday and will arrive on Friday. You can follow it under My orders.",
    ),
    "How long is the warranty?": (
        "Warranties differ. Please read the manual.",
        "The warranty is two years from the day of delivery.",
        "The warranty is two years from the day of delivery. Keep your invoice; it is your proof of purchase.",
    ),
}
"""Prompts, and answers to them that get better."""


def record_samples(folder: Path, steps: list[int]) -> None:
    """What a page shows of evaluations, with a tokenizer to show it by."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = [f"<|user|>{prompt}<|assistant|>{answers[-1]}" for prompt, answers in ASKED.items()]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|user|>", "<|assistant|>"]
    made.train_from_iterator(
        texts * 4, trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    )
    (folder / "side_files").mkdir()
    made.save(str(folder / "side_files" / "tokenizer.json"))
    log, chance = SampleLog(folder), random.Random(4)
    for place, step in enumerate(steps):
        done = place / max(1, len(steps) - 1)
        answers = [
            {"prompt": prompt, "answer": said[round(done * (len(said) - 1))], "scores": {}}
            for prompt, said in ASKED.items()
        ]
        tokens = []
        for number, text in enumerate(texts):
            ids = made.encode(text).ids
            begin = ids.index(1) + 1
            drawn = [min(9.5, chance.expovariate(0.35 + 1.2 * done)) for _ in ids[begin:]]
            losses = [None] * begin + [round(one, 3) for one in drawn]
            tokens.append(
                {"data": "support", "where": f"held_out.jsonl, line {number + 1}", "ids": ids, "losses": losses}
            )
        log.write(step, answers={"prompts": answers}, tokens=tokens)


def line(event: events.Event, when: float) -> str:
    record = {"event": event.kind, "time": when, **dataclasses.asdict(event)}
    record.pop("is_warm_up", None)
    return json.dumps(record) + "\n"


def step_event(
    step: int, total: int, chance: random.Random, *, objective: str = "sft", rate: float = 2e-4
) -> events.Step:
    done = step / total
    loss = 0.9 + 1.6 * math.exp(-4 * done) + chance.gauss(0, 0.06) + (1.5 if step == total // 3 else 0.0)
    figures = {"accuracy": min(1.0, 0.5 + 0.4 * done + chance.gauss(0, 0.03)), "margin": 2 * done}
    return events.Step(
        step=step,
        epoch=round(2 * done, 6),
        loss=loss,
        learning_rate=rate * min(1.0, done / 0.03 + 1e-3) * (0.5 + 0.5 * math.cos(math.pi * done)),
        grad_norm=0.5 + abs(chance.gauss(0, 0.25)),
        tokens=8192,
        target_tokens=5120.0,
        seconds=round(0.5 + abs(chance.gauss(0, 0.02)), 4),
        memory=int(GIB * (18.2 if step < total // 10 else 18.6)),
        losses={"support": loss + 0.1, "alpaca": loss - 0.1},
        figures=figures if objective != "sft" else {},
    )


def record_run(
    folder: Path,
    *,
    steps: int = 300,
    total: int | None = None,
    ends: str | None = "finished",
    seed: int = 0,
    warnings: tuple[str, ...] = (),
    samples: bool = False,
    **settings: Any,
) -> Path:
    """`ends` is how the run did: finished, stopped, or None for one whose process is gone."""
    folder.mkdir(parents=True)
    total, chance, now = total or steps, random.Random(seed), 1794932816.0
    given = {"model": "meta-llama/Llama-3.1-8B", "data": ["support.jsonl", "alpaca.jsonl"], **settings}
    run = Run.model_validate({**given, "output": str(folder)})
    rate = run.learning_rate if isinstance(run.learning_rate, float) else 2e-4
    write_identity(folder, Identity(run.model_dump(mode="json"), "data", "weights"))
    memory = Memory(weights=16 * GIB, adapter=GIB // 8, activations=2 * GIB, workspace=GIB // 4, context=GIB // 2)
    plan = Plan(
        device="cuda", threads=8, precision="bf16", attention="flash-attn-4", is_compiled=True, master_weights=False,
        sequence_length=4096, sequences_per_step=2, micro_batch=2, learning_rate=2e-4, deterministic=False,
        memory=memory, memory_limit=24 * GIB, time=Time(matmuls=0.35, attention=0.08, optimizer=0.02), reasons=REASONS,
    )  # fmt: skip
    write_json(folder / "plan.json", plan.model_dump(mode="json"))
    lines = [line(events.Started(total, 41_943_040, {"tunesmith": "0.1.0", "torch": "2.13.0"}), now)]
    for message in warnings:
        lines.append(line(events.Warned(message), now))
    for step in range(steps + 1):
        now += 0.5
        if step:
            lines.append(line(step_event(step, total, chance, objective=run.objective, rate=rate), now))
        if step % max(1, total // 8) == 0:
            held_out = 1.1 + 0.05 * seed + 1.5 * math.exp(-4 * step / total) + 0.2 * max(0.0, step / total - 0.7)
            by_data = {"support": held_out + 0.05, "alpaca": held_out - 0.05}
            figures = {"accuracy": 0.5 + 0.3 * step / total} if run.objective != "sft" else {}
            lines.append(line(events.Evaluation(step, held_out, by_data, 9000.0, 3.2, figures), now))
            lines.append(line(events.Checkpointed(step, 0.8), now))
    if ends == "stopped":
        lines.append(line(events.Stopping("stopped by Ctrl-C"), now))
        lines.append(line(events.Stopped(steps, "stopped by Ctrl-C; saved"), now))
    if ends == "finished":
        spent = {"starting": 21.0, "training": steps * 0.51, "evaluating": 28.8, "saving": 7.2}
        parts = {"weights": (16 * GIB, int(16.1 * GIB)), "activations": (2 * GIB, int(2.2 * GIB))}
        lines.append(
            line(
                events.Finished(
                    steps, sum(spent.values()), 16050.0, memory.allocated, int(18.6 * GIB), 18204.0, parts, spent
                ),
                now,
            )
        )
        write_summary(folder, {"steps": steps, "result": "adapter"})
    (folder / events.FILE).write_text("".join(lines))
    if samples:
        record_samples(folder, [step for step in range(steps + 1) if step % max(1, total // 8) == 0])
    (folder / "checkpoints" / f"step-{steps:08}").mkdir(parents=True)
    return folder
