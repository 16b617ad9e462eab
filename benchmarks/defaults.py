"""Do the defaults teach? What is proposed for a data set against a sweep over batch, learning rate and epochs.

    python benchmarks/defaults.py --make FOLDER --sources FOLDER      (the five data sets, from files of public ones)
    python benchmarks/defaults.py --model MODEL --data FOLDER [--workers 12] [--minutes 8.5] [--only TEXT ...]

Five sets of 50 to 20,000 records, LoRA and all weights. Each run trains by the ordinary path and is measured on records
held out from its set, before and after; nothing is saved. The defaults are given the model, the method and the data,
and decide the rest. Runs that share a shape follow each other in a process, which compiles once; several processes
share the GPU. What is in the result file already is not measured again, so a call that ran out of time can be repeated.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from results import read_rows, write_result

from tunesmith.measure.results import document

NAME = "defaults"
WHAT = "Defaults against a sweep over batch, learning rate and epochs: {model}, held-out loss"
MARK = "@@"
"""Begins the line in which a process says what it found."""
METHODS = {"lora": (1e-4, 3e-4, 1e-3, 3e-3), "full": (1e-5, 3e-5, 1e-4, 3e-4)}
"""Learning rates of the sweep."""
MICRO_BATCH_TOKENS = 16384
"""So that many processes fit onto a GPU; results do not depend on it."""


@dataclass(frozen=True)
class Sweep:
    """A data set, and what is swept over beside the learning rate."""

    name: str
    batches: tuple[int, ...]
    epochs: tuple[float, ...]
    without: int = 0
    """Of the learning rates of a method, so many of the lowest are left out."""


SWEEPS = (
    Sweep("identity-50", (512, 1024, 4096), (3, 10)),
    Sweep("conversations-440", (512, 2048, 8192), (1, 3)),
    Sweep("alpaca-886", (1024, 4096, 16384), (1, 3)),
    Sweep("gsm8k-7473", (4096, 16384), (1, 2), 1),
    Sweep("mix-20000", (8192, 32768), (1, 2), 1),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make", type=Path, help="write the data sets here, and do nothing else")
    parser.add_argument("--sources", type=Path, help="where the files lie that they are made from")
    parser.add_argument("--model")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--only", nargs="*", default=[], help="groups whose name contains one of these")
    parser.add_argument("--again", action="store_true", help="measure the defaults again, as they are now")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of all runs")
    options = parser.parse_args()
    if options.make:
        make_sets(options.sources, options.make)
        return
    if not (options.model and options.data):
        parser.error("--model and --data are needed")
    deadline = time.monotonic() + 60 * options.minutes
    rows = [row for row in read_rows(NAME) if not (options.again and row["kind"] == "defaults")]
    _convert(options.model)
    os.environ.update({"TORCHINDUCTOR_COMPILE_THREADS": "1", **os.environ})
    groups = [one for one in work_list(rows) if not options.only or any(text in one["group"] for text in options.only)]
    print(json.dumps(document(WHAT.format(model=Path(options.model).stem), {})), flush=True)
    print(f"{sum(len(one['runs']) for one in groups)} runs in {len(groups)} groups", flush=True)
    lock = threading.Lock()

    def found(row: dict[str, Any]) -> None:
        with lock:
            rows.append(row)
            write_result(NAME, WHAT.format(model=Path(options.model).stem), sorted(rows, key=_place))
            print(json.dumps(row), flush=True)

    with ThreadPoolExecutor(options.workers) as pool:
        left = list(pool.map(lambda one: in_process(one, options, deadline, found), groups))
    if any(left):
        print(f"out of time or failed: {sum(left)} runs are left; call again", flush=True)
    for line in summary(rows):
        print(line)


def work_list(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is still to be measured: runs by what they share, those that take long first, the defaults before all."""
    done = {_key(row) for row in rows}
    groups = []
    for sweep in SWEEPS:
        for method in METHODS:
            runs = [{"kind": "defaults", "set": sweep.name, "method": method}]
            groups.append({"group": f"{sweep.name} {method} defaults", "runs": runs})
    for sweep in reversed(SWEEPS):
        for method, rates in METHODS.items():
            for batch in sweep.batches:
                shared = {"kind": "sweep", "set": sweep.name, "method": method, "batch_tokens": batch}
                runs = [
                    {**shared, "learning_rate": rate, "epochs": epochs}
                    for epochs in sweep.epochs
                    for rate in rates[sweep.without :]
                ]
                groups.append({"group": f"{sweep.name} {method} {batch}", "runs": runs})
    for group in groups:
        group["runs"] = [run for run in group["runs"] if _key(run) not in done]
    return [group for group in groups if group["runs"]]


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    if row["kind"] == "defaults":
        return row["kind"], row["set"], row["method"]
    return tuple(row[name] for name in ("kind", "set", "method", "batch_tokens", "learning_rate", "epochs"))


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    names = [sweep.name for sweep in SWEEPS]
    return names.index(row["set"]), row["method"], row["kind"], row["batch_tokens"], row["epochs"], row["learning_rate"]


def in_process(group: dict[str, Any], options: argparse.Namespace, deadline: float, found: Any) -> int:
    """The runs of a group, one after the other in a process of their own; how many were not done."""
    if time.monotonic() > deadline:
        return len(group["runs"])
    job = {**group, "model": options.model, "data": str(options.data.resolve()), "overrides": options.overrides}
    done = 0
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, __file__, "--work", json.dumps(job)]
        pipes = {"stdout": subprocess.PIPE, "stderr": log, "text": True, "errors": "replace"}
        process = subprocess.Popen(command, **pipes)
        timer = threading.Timer(max(1.0, deadline - time.monotonic()), process.kill)
        timer.start()
        assert process.stdout
        for line in process.stdout:
            if line.startswith(MARK):
                found(json.loads(line.removeprefix(MARK)))
                done += 1
        timer.cancel()
        if process.wait() and time.monotonic() < deadline:
            log.seek(0)
            print(f"{group['group']} failed: {log.read().strip()[-800:]}", flush=True)
    return len(group["runs"]) - done


def work(job: dict[str, Any]) -> None:
    for wanted in job["runs"]:
        row = measure(job["model"], Path(job["data"]) / wanted["set"], wanted, job["overrides"])
        print(f"\n{MARK}{json.dumps(row)}", flush=True)


def measure(model: str, data: Path, wanted: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Train as `tunesmith train` does, and write nothing."""
    from tunesmith.checkpoint.store import Saving
    from tunesmith.config.load import from_mapping
    from tunesmith.measure.results import _commit
    from tunesmith.run.assemble import assemble
    from tunesmith.run.start import prepare_run
    from tunesmith.train import events
    from tunesmith.train.loop import train

    began = time.monotonic()
    given = {name: wanted[name] for name in ("batch_tokens", "learning_rate", "epochs") if name in wanted}
    with tempfile.TemporaryDirectory(prefix="tunesmith-defaults-") as folder:
        settings = {
            "model": model,
            "method": wanted["method"],
            "data": str(data / "train.jsonl"),
            "eval": str(data / "held_out.jsonl"),
            "eval_every": 10**9,
            "output": folder,
            **given,
            **dict(one.split("=", 1) for one in overrides),
        }
        setting = prepare_run(from_mapping(settings), warn=lambda message: print(message, file=sys.stderr))
        plan = setting.plan
        smaller = max(1, min(plan.micro_batch, MICRO_BATCH_TOKENS // plan.sequence_length))
        setting = dataclasses.replace(setting, plan=plan.model_copy(update={"micro_batch": smaller}))
        job = assemble(setting)
        nothing = Saving(lambda: None, lambda: True)
        job = dataclasses.replace(job, save=lambda *_, **__: nothing, write_result=lambda *_: Path(folder))
        losses: list[float] = []

        def observe(event: events.Event) -> None:
            if isinstance(event, events.Evaluation):
                losses.append(event.loss)

        outcome = train(job, observe)
    size = setting.data.size
    return {
        **wanted,
        "records": size.examples,
        "tokens": size.tokens,
        "batch_tokens": plan.sequence_length * plan.sequences_per_step,
        "learning_rate": plan.learning_rate,
        "epochs": plan.epochs,
        "steps": outcome.step,
        "before": round(losses[0], 4),
        "after": round(losses[-1], 4),
        "seconds": round(time.monotonic() - began, 1),
        "commit": _commit(),
    } | ({"batch_tokens": wanted["batch_tokens"]} if "batch_tokens" in wanted else {})


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    for sweep in SWEEPS:
        for method in METHODS:
            mine = [row for row in rows if (row["set"], row["method"]) == (sweep.name, method)]
            swept = [row for row in mine if row["kind"] == "sweep"]
            ours = next((row for row in mine if row["kind"] == "defaults"), None)
            if swept and ours:
                best = min(swept, key=lambda row: row["after"])
                share = (ours["before"] - ours["after"]) / (best["before"] - best["after"])
                at = f"{best['batch_tokens']}, {best['learning_rate']:g}, {best['epochs']:g}"
                yield (
                    f"{sweep.name} {method}: {ours['before']:.3f} to {ours['after']:.3f} by default, "
                    f"{best['after']:.3f} at best ({at}): {share:.1%}"
                )


def _convert(model: str) -> None:
    """Once, before many processes want it."""
    from tunesmith.config.schema import Run
    from tunesmith.model.load import load_config, load_tokenizer

    run = Run.model_validate({"model": model, "data": "-"})
    load_config(run)
    load_tokenizer(run)


# the data sets


def make_sets(sources: Path, folder: Path) -> None:
    """Each as train.jsonl and held_out.jsonl, of conversations alone; shuffled by a fixed seed."""
    identity = list(_alpaca(sources / "lf_identity.json"))
    talk = list(_sharegpt(sources / "fastchat_dummy_conversation.json"))
    alpaca = list(_alpaca(sources / "lf_alpaca_en_demo.json"))
    gsm, test = (list(_questions(sources / f"gsm8k_{name}.jsonl")) for name in ("train", "test"))
    rest = [*_alpaca(sources / "rasbt_instruction.json"), *test]
    rest += [*_choices(sources / "mmlu_dev.jsonl"), *_choices(sources / "mmlu_validation.jsonl")]
    play = list(_speeches(sources / "tinyshakespeare.txt"))
    _write(folder / "identity-50", identity, 50, 41)
    _write(folder / "conversations-440", talk, 440, 60)
    _write(folder / "alpaca-886", alpaca, 886, 99)
    _write(folder / "gsm8k-7473", gsm, 7473, 200, test)
    _write(folder / "mix-20000", [*gsm, *alpaca, *talk, *rest, *play], 20000, 300)


def _write(folder: Path, records: list[Any], train: int, held_out: int, other: list[Any] | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = list(dict.fromkeys(json.dumps({"messages": record}, ensure_ascii=False) for record in records))
    random.Random(0).shuffle(lines)
    if other is None:
        assert len(lines) > held_out, (folder, len(lines))
        held = lines[:held_out]
        lines = lines[held_out:]
    else:
        held = [json.dumps({"messages": record}, ensure_ascii=False) for record in other[:held_out]]
    print(f"{folder.name}: {min(train, len(lines)):,} of {len(lines):,} records, {len(held)} held out")
    (folder / "train.jsonl").write_text("\n".join(lines[:train]) + "\n", encoding="utf-8")
    (folder / "held_out.jsonl").write_text("\n".join(held) + "\n", encoding="utf-8")


def _pair(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _alpaca(path: Path) -> Iterator[list[dict[str, str]]]:
    text = path.read_text(encoding="utf-8").replace("{{name}}", "Smithy").replace("{{author}}", "the Tunesmith project")
    for record in json.loads(text):
        yield _pair("\n\n".join(filter(None, (record["instruction"], record.get("input")))), record["output"])


def _sharegpt(path: Path) -> Iterator[list[dict[str, str]]]:
    roles = {"human": "user", "gpt": "assistant"}
    for record in json.loads(path.read_text(encoding="utf-8")):
        yield [{"role": roles[turn["from"]], "content": turn["value"]} for turn in record["conversations"]]


def _questions(path: Path) -> Iterator[list[dict[str, str]]]:
    for line in path.read_text(encoding="utf-8").strip().split("\n"):
        record = json.loads(line)
        yield _pair(record["question"], record["answer"])


def _choices(path: Path) -> Iterator[list[dict[str, str]]]:
    for line in path.read_text(encoding="utf-8").strip().split("\n"):
        record = json.loads(line)
        choices = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCD", record["choices"], strict=True))
        answer = record["answer"] if isinstance(record["answer"], int) else "ABCD".index(record["answer"])
        yield _pair(f"{record['question']}\n{choices}", f"{'ABCD'[answer]}. {record['choices'][answer]}")


def _speeches(path: Path) -> Iterator[list[dict[str, str]]]:
    """What is said after what, in a play."""
    speeches = [one for one in re.split(r"\n\n+", path.read_text(encoding="utf-8")) if one.strip()]
    for before, after in pairwise(speeches):
        yield _pair(f"Continue the play:\n\n{before[-1000:]}", after[:1000])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(json.loads(sys.argv[2]))
    else:
        main()
