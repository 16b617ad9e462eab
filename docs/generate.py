"""Writes the pages of docs/ that are made from the code; `--check` only says whether they are up to date.

    python docs/generate.py [--check]

A new page is a function that returns its text, and a line in `PAGES`.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunesmith.config.schema import json_schema

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
REPLACED = {"gpu_speed": "gpu"}
"""Older results, and the file whose numbers took their place."""


def main() -> int:
    stale = []
    for name, make in PAGES.items():
        page, text = DOCS / name, make()
        if page.exists() and page.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if "--check" not in sys.argv[1:]:
            page.write_text(text, encoding="utf-8")
            print(f"wrote docs/{name}")
    if stale and "--check" in sys.argv[1:]:
        print(f"out of date: {', '.join('docs/' + name for name in stale)}; run `make docs`", file=sys.stderr)
        return 1
    return 0


def settings_page() -> str:
    schema = json_schema()
    parts = schema["$defs"]
    lines = [
        "# Settings",
        "",
        "<!-- made by docs/generate.py from src/tunesmith/config/schema.py; do not edit -->",
        "",
        "Everything that may stand in run.yaml. Only `model` and `data` are needed; the rest has defaults.",
        "An unknown key is an error, and so is a value of the wrong type.",
        "",
        "- Each setting can be given on the command line too, and wins there:",
        "  `tunesmith train run.yaml epochs=3 lora.rank=8 data.0.weight=2 eval=[]`.",
        "  Lists count from 0; `key=` and `key=null` take a value away. Without a file's name `run.yaml` is read, and",
        "  where there is none the command line is enough: `tunesmith train model=FOLDER data=FILE`.",
        "- Paths are relative to the folder in which `tunesmith` is started, as on any command line.",
        "- `tunesmith schema` prints all this as JSON Schema, which editors use to complete and check.",
        "",
        "## The run",
        "",
        *_table(schema),
        "",
        "## Data sets: items of `data` and `eval`",
        "",
        f"{parts['Dataset']['description']} A file name alone stands for `path`: `data: support.jsonl`.",
        "",
        *_table(parts["Dataset"]),
        "",
        "## Adapters: `lora`",
        "",
        parts["Lora"]["description"],
        "",
        *_table(parts["Lora"], "lora."),
        "",
        "## Preferences: `preference`",
        "",
        f"{parts['Preference']['description']} [Objectives](objectives.md) says what each is good for.",
        "",
        *_table(parts["Preference"], "preference."),
        "",
        "## Distillation: `distillation`",
        "",
        f"{parts['Distillation']['description']} See [objectives](objectives.md#distill).",
        "",
        *_table(parts["Distillation"], "distillation."),
        "",
        "## Embeddings: `embedding`",
        "",
        f"{parts['Embedding']['description']} See [objectives](objectives.md#embed).",
        "",
        *_table(parts["Embedding"], "embedding."),
        "",
        "## The model's own answers: `rollout`",
        "",
        f"{parts['Rollout']['description']} See [objectives](objectives.md#grpo).",
        "",
        *_table(parts["Rollout"], "rollout."),
        "",
        "## Checks of answers: items of `rewards`",
        "",
        parts["Reward"]["description"],
        "",
        *_table(parts["Reward"]),
    ]
    return "\n".join(lines) + "\n"


def planner_page() -> str:
    from tunesmith.plan.catalogue import GPUS
    from tunesmith.plan.families import FAMILIES
    from tunesmith.plan.memory import LOGITS
    from tunesmith.plan.plan import Memory
    from tunesmith.plan.ranking import CAPTURED
    from tunesmith.plan.refusals import REFUSALS

    parts = [
        f"| {name} | {field.description or ''} |".replace("  ", " ") for name, field in Memory.model_fields.items()
    ]
    gpus = [
        f"| {gpu.name} | {gpu.mib / 1024:.1f} | {gpu.capability[0]}.{gpu.capability[1]} | {gpu.half:g} | "
        f"{gpu.fp8 or '-'} | {gpu.bandwidth:g} | {gpu.link:g} |"
        for gpu in GPUS
    ]
    lines = [
        "# The planner",
        "",
        "<!-- made by docs/generate.py from src/tunesmith/plan and benchmarks/results; do not edit -->",
        "",
        "`tunesmith plan` says what a run will need and how it will be done, before anything is loaded. It reads the",
        "model's config.json (or a GGUF's header), looks at this machine or takes a named one, and predicts memory and",
        "time by formulas. `train` uses the same plan, and at the end compares it with what was measured.",
        "",
        '    tunesmith plan run.yaml --hardware "2 nodes of 4 x A100-80G, nvlink, 50 Gbit/s"',
        "    tunesmith plan run.yaml --what-if sequence_length=16384 --what-if storage=nf4",
        "    tunesmith plan run.yaml --solve sequence_length        # or batch, model, gpus",
        "    tunesmith plan run.yaml --price 2.5 --tokens 1e9",
        "    tunesmith plan --calibrate                             # measure this machine once",
        "",
        "## How it chooses",
        "",
        "The planner goes through tiers of choices, and enters one only when nothing in those before it fits:",
        "",
        "1. what changes nothing but speed: micro-batch, activation checkpointing of as many layers as needed (over a",
        "   frozen base also with their inputs in host memory), replication or sharding;",
        "2. layers and sequences split over GPUs;",
        "3. quantization: the frozen base in 8 or 4 bits, optimizer states in 8;",
        "4. whatever else can be offloaded.",
        "",
        "Within a tier the fastest choice wins; choices within 5% count as equally fast, and the simplest of them is",
        "taken. On one GPU the layers' passes are captured as CUDA graphs and replayed where the GPU would wait for",
        f"the CPU in {CAPTURED:.0%} of a step or more, and the memory that graphs hold is free. Each choice comes with",
        "its reason, the alternatives with what they would cost.",
        "",
        "What is refused, and why:",
        "",
        *(f"- {refusal.why}" for refusal in REFUSALS),
        "",
        "## What is predicted",
        "",
        "The memory of one rank by what it is for, while loading and in each phase of a step that can be the peak.",
        f"The loss holds at most {LOGITS['cuda']:,} logits at a time on a GPU.",
        "",
        "| part | what it is |",
        "| --- | --- |",
        *parts,
        "",
        "Parameter counts are exact for the families below. Models of other architectures are built on meta tensors to",
        "count them, which takes seconds, and the plan leaves them a larger margin of memory.",
        "",
        f"`{'`, `'.join(sorted(FAMILIES))}`",
        "",
        "## Predicted against measured",
        "",
        "Two tables: the constants of the formulas were chosen with the *fitted* configurations in view; those of the",
        "*forecast* were drawn by a new seed and measured after the constants were frozen.",
        "",
        "### Forecast",
        "",
        *_forecast(RESULTS / "forecast.json"),
        "",
        "### Fitted",
        "",
        *_measured(RESULTS / "planner.json"),
        "",
        "## GPUs that are known by name",
        "",
        "| name | GiB | capability | half, TFLOP/s | fp8 | memory, GB/s | link, GB/s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *gpus,
    ]
    return "\n".join(lines) + "\n"


def _measured(path: Path) -> list[str]:
    """The captured runs beside what the present model predicts for them, with the errors in the median and at worst."""
    if not path.exists():
        return ["Not measured yet: `python benchmarks/planner.py` on a GPU writes the table."]
    sys.path.insert(0, str(DOCS.parent / "benchmarks"))
    from planner_results import compare

    content = json.loads(path.read_text(encoding="utf-8"))
    rows = sorted(compare(content["numbers"]["rows"]), key=lambda row: row.name)
    near = [row for row in rows if row.limit is not None]
    too_sure = sum(row.is_said_to_fit and not row.does_fit for row in near)
    too_careful = sum(row.does_fit and not row.is_said_to_fit for row in near)
    new = [row for row in rows if row.is_held_out]
    in_view = [row for row in rows if not row.is_held_out]
    of_file = content["commit"]
    commits = sorted({row.commit or of_file for row in rows})
    timed = [row for row in rows if row.measured_speed]
    timed_at = sorted({row.commit or of_file for row in timed})
    apart = [
        "Rows marked * are a forecast: no constant of the speed model was chosen with them in view. The others show",
        "how well it describes what it was fitted to.",
    ]
    lines = [
        f"{content['device']}; configurations drawn by a seeded generator, each run through the real training step:",
        f"memory by the code of {', '.join(commits)}, times by that of {', '.join(timed_at) or 'none'}.",
        "The predictions are those of the present model.",
        *(apart if new else ["Its constants were chosen with all of these in view."]),
        f"{sum(row.timed == 1 for row in timed)} of the {len(timed)} times are of a single step after three warm-up",
        "steps; the others are medians over the later half of several. Where passes are not captured, the CPU bounds",
        "small models and batches: with other jobs running it took 3 to 9 ms to launch the kernels of a layer; other",
        "CPUs may be faster.",
        "",
        "| | configurations | off by, median | worst |",
        "| --- | --- | --- | --- |",
        _summary("peak memory of a step", [row.memory_error for row in in_view]),
        _summary("tokens a second", [row.speed_error for row in in_view]),
        *([_summary("peak memory of a step *", [row.memory_error for row in new])] if new else []),
        *([_summary("tokens a second *", [row.speed_error for row in new])] if new else []),
        "",
        f"{len(near)} configurations ran with a memory limit close to their need, as on a smaller GPU: {too_sure} were",
        f"predicted to fit and ran out of memory, {too_careful} were predicted not to fit and did.",
        "",
        "| configuration | GiB predicted | measured | error | tokens/s predicted | measured | error |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in (row for row in rows if row.limit is None):
        name = f"{row.name} *" if row.is_held_out else row.name
        cells = [name, f"{row.predicted_step.memory.allocated / 2**30:.2f}"]
        cells += [f"{(row.measured_bytes or 0) / 2**30:.2f}", _percent(row.memory_error)]
        if row.measured_speed:
            cells += [f"{row.predicted_speed:,.0f}", f"{row.measured_speed:,.0f}", _percent(row.speed_error)]
        else:
            cells += ["", row.time_left_out or "not steady", ""]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| configuration | GiB of the GPU | GiB predicted, everything | said to fit | fits |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    for row in near:
        cells = [row.name, f"{(row.limit or 0) / 2**30:.2f}", f"{row.predicted.memory.total / 2**30:.2f}"]
        cells += ["yes" if row.is_said_to_fit else "no", "yes" if row.does_fit else "no"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _forecast(path: Path) -> list[str]:
    """What plans said, and what `tunesmith train` then measured: kept as it was, whatever the model says now."""
    if not path.exists():
        return ["Not measured yet: `python benchmarks/forecast.py` on a GPU writes the table."]
    sys.path.insert(0, str(DOCS.parent / "benchmarks"))
    from forecast import errors, predicted_now

    content = json.loads(path.read_text(encoding="utf-8"))
    rows = sorted((row for row in content["numbers"] if "failed" not in row), key=lambda row: row["name"])
    found = [errors(row) for row in rows]
    now = [predicted_now(row) for row in rows]
    sizes = [size / row["peak_bytes"] - 1 for row, (size, _) in zip(rows, now, strict=True)]
    speeds = [speed / row["tokens_per_second"] - 1 for row, (_, speed) in zip(rows, now, strict=True)]
    families = {row["shape"] for row in rows}
    lines = [
        f"{content['device']}, {content['date']}, commit {content['commit']}: {len(rows)} configurations of",
        f"{len(families)} families through `tunesmith train`, random weights at published shapes, documents of many",
        "lengths. Name: shape, method, sequence_length, batch_tokens, precision, optimizer or rank.",
        "",
        "| | configurations | off by, median | worst |",
        "| --- | --- | --- | --- |",
        _summary("peak memory", [memory for memory, _ in found]),
        _summary("tokens a second", [speed for _, speed in found]),
        _summary("peak memory, by today's formulas", sizes),
        _summary("tokens a second, by today's formulas", speeds),
        "",
        "The table below has the predictions made before anything was measured, by formulas that had seen none of its",
        "rows. Today's formulas are compared with the same rows, so that a change for the worse shows.",
        "",
        f"Peak memory was predicted more than 2% too small for {sum(memory < -0.02 for memory, _ in found)} of them.",
        "",
        "| configuration | GiB predicted | measured | error | tokens/s predicted | measured | error |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    notes = {row["shape"]: row["note"] for row in rows if "note" in row}
    return [*lines, *_predicted_rows(rows), "", *(f"{shape}: {note}." for shape, note in notes.items())]


def _objectives(rows: list[dict[str, Any]]) -> list[str]:
    """Objectives as planned and as measured, and what was seen of TRL beside them."""
    lines = [
        "Random weights at published shapes, documents as long as those of a set of preferences. Name: shape,",
        "objective, method, sequence_length, batch_tokens.",
        "",
        "| configuration | GiB predicted | measured | error | tokens/s predicted | measured | error |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += _predicted_rows([row for row in rows if "failed" not in row and "predicted" in row])
    told = ("failed", "note", "speed_to_trl", "share_of_teacher", "time_to_live", "memory_to_one")
    others = [row for row in rows if any(row.get(name) is not None for name in told)]
    return [*lines, "", *(f"- {row['name']}: {_remark(row)}." for row in others)]


def _decoding(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "Random weights, prompts of 128 tokens, answers of 256, one process; prefill included in tokens/s. The last",
        "two: from token to token, and the captured step alone, over the time in which the weights can be read once.",
        "",
        "| shape | batch | tokens/s | transformers' generate | ratio | token / read | step / read |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        ratios = [row[name] / row["reading_seconds"] for name in ("token_seconds", "replay_seconds")]
        speeds = [f"{row[name]:,.0f}" for name in ("tokens_per_second", "generate_tokens_per_second")]
        cells = [row["shape"], str(row["batch"]), *speeds, f"{row['speed_to_generate']:.1f}"]
        lines.append(f"| {' | '.join([*cells, *(f'{one:.1f}' for one in ratios)])} |")
    for row in (row for row in rows if "note" in row):
        seconds = row["chosen_step_seconds"]
        step = f"{seconds * 1e6:.0f} us, {seconds / row['reading_seconds']:.2f} times reading"
        lines += ["", f"{row['shape']} at batch {row['batch']} (commit {row['commit']}): {row['note']}: {step}."]
    return lines


def _remark(row: dict[str, Any]) -> str:
    if "failed" in row:
        return row["failed"]
    told = [f"{row['median_seconds']} s a step"] if "median_seconds" in row else []
    if "speed_to_trl" in row:
        ratios = f"{row['speed_to_trl']} times TRL's speed at {row['memory_to_trl']} of its peak memory"
        told.append(f"{ratios}, in the same run")
    if "share_of_teacher" in row:
        told.append(f"of which the teacher has {row['share_of_teacher']:.0%}")
    if "time_to_live" in row:
        told.append(f"{row['time_to_live']:.0%} of a step that asks the teacher")
    if row.get("memory_to_one") is not None:
        told.append(f"{row['peak_bytes'] / 2**30:.1f} GiB at the peak, {row['memory_to_one']} times one adapter's")
    return "; ".join(filter(None, [", ".join(told), row.get("note")]))


def _predicted_rows(rows: list[dict[str, Any]]) -> list[str]:
    from forecast import errors

    lines = []
    for row in rows:
        said, (memory, speed) = row["predicted"], errors(row)
        cells = [row["name"], f"{said['allocated'] / 2**30:.1f}", f"{row['peak_bytes'] / 2**30:.1f}", _percent(memory)]
        cells += [f"{said['tokens_per_second']:,.0f}", f"{row['tokens_per_second']:,.0f}", _percent(speed)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _summary(name: str, errors: list[float | None]) -> str:
    sizes = [abs(error) for error in errors if error is not None]
    median, worst = (f"{statistics.median(sizes):.1%}", f"{max(sizes):.1%}") if sizes else ("", "")
    return f"| {name} | {len(sizes)} | {median} | {worst} |"


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:+.1%}"


def benchmarks_page() -> str:
    """A section for each file of benchmarks/results, whatever was measured."""
    lines = [
        "# Benchmarks",
        "",
        "<!-- made by docs/generate.py from benchmarks/results; do not edit -->",
        "",
        "Every number here is read from a file in benchmarks/results, which also says how it came about.",
        "`tunesmith bench` measures the standard workloads on your machine.",
    ]
    paths = sorted(RESULTS.glob("*.json"))
    for path in paths:
        if any(other.stem == REPLACED.get(path.stem) for other in paths):
            continue
        content = json.loads(path.read_text(encoding="utf-8"))
        versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
        lines += ["", f"## {content['what']}", ""]
        lines += [f"{content['device']}, {content['date']}, commit {content['commit']}; {versions}.", ""]
        if path.stem == "planner":
            lines.append("The tables are on the [planner's page](planner.md).")
        elif path.stem in ("gpu_strategies", "gpu_ranks"):
            lines.append("The table is on the page about [several GPUs](distributed.md).")
        elif path.stem == "forecast":
            lines.append("The table is on the [planner's page](planner.md).")
        elif path.stem == "adapters":
            lines.append("The table is on the page about [adapters](adapters.md).")
        elif path.stem in ("families", "families_named"):
            lines.append("The table is on the page about [models](models.md).")
        elif path.stem == "families_gpu":
            lines += _families_gpu(content["numbers"])
        elif path.stem == "gpu":
            lines += _gpu_tables(content["numbers"])
        elif path.stem == "objectives":
            lines += _objectives(content["numbers"])
        elif path.stem == "decode":
            lines += _decoding(content["numbers"])
        elif path.stem == "attention":
            lines += attention_table(content["numbers"])
        elif path.stem == "defaults":
            lines += defaults_table(content["numbers"])
        else:
            lines += _number_tables(content["numbers"])
    return "\n".join(lines) + "\n"


def _families_gpu(rows: list[dict[str, Any]]) -> list[str]:
    """Ours and others' at published shapes, with what the plan said."""
    sys.path.insert(0, str(DOCS.parent / "benchmarks"))
    from families_gpu import OTHERS, ratio

    lines = [
        "16,384 tokens a step, packed documents, bf16, rank 16. *Busy*: share of our steps with a kernel running.",
        "*Times*: ours over the fastest other; of others the best of all runs stands. GiB and tokens/s of plans stand",
        "last. `full`: ours has master weights and states in fp32, others have theirs in bf16.",
        "",
        "| case | ours, tokens/s | transformers | Liger | Unsloth | times | busy | GiB, ours | GiB planned | planned |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in (row for row in rows if "failed" not in row):
        said = [row.get(name, {}) for name in ("ours", "transformers", "liger", "unsloth")]
        speeds = [f"{one['tokens_per_second']:,.0f}" if "failed" not in one and one else "-" for one in said]
        times, ours, plan = ratio(row), said[0], row["predicted"]
        cells = [row["name"], *speeds, f"{times:.2f}" if times else "", f"{ours['busy']:.1%}" if "busy" in ours else ""]
        cells += [f"{ours['peak_bytes'] / 2**30:.1f}" if "peak_bytes" in ours else ours.get("failed", "")]
        cells += [f"{plan['peak_bytes'] / 2**30:.1f}", f"{plan['tokens_per_second']:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    failed = [
        (row["name"], name, row[name]["failed"]) for row in rows for name in OTHERS if "failed" in row.get(name, {})
    ]
    lines += ["", *(f"- {case}: {name} failed with {why.strip(' :')}." for case, name, why in failed)]
    return [*lines, *(f"- {row['name']}: {row['note']}." for row in rows if "note" in row)]


def attention_table(rows: list[dict[str, Any]]) -> list[str]:
    """A row for each path of each head shape."""
    lines = [
        "16,384 packed tokens, bf16, forward and backward: documents of mixed lengths, and four of 4,096. Operations:",
        "those of the scores that are needed. Error: the largest of output and gradients, against fp32.",
        "",
        "| heads | path | error | mixed, ms | TFLOP/s | four, ms | TFLOP/s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        case = row["case"]
        sizes = f"{case['head_dim']}" + (f"/{case['value_dim']}" if case["value_dim"] != case["head_dim"] else "")
        said = [f"{case['heads']} x {sizes} over {case['kv_heads']}"]
        said += ["soft-capped"] * bool(case["softcap"]) + ["sinks"] * case["has_sinks"] + ["ALiBi"] * case["has_alibi"]
        for path, found in row["paths"].items():
            cells = [f"{row['name']} ({', '.join(said)})", path]
            if "failed" in found:
                cells += [found["failed"], "", "", "", ""]
            else:
                cells.append(f"{max(found['errors'].values()):.4f}")
                for time in found["times"].values():
                    cells += [f"{time['ms']:.2f}", f"{time['tflops']:.0f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def defaults_table(rows: list[dict[str, Any]]) -> list[str]:
    """What was proposed for each set and method beside the best of its sweep."""
    lines = [
        "Each set was trained with the defaults, given model, method and data alone, and with all of a sweep.",
        "Gain: what the held-out loss fell by with the defaults, of what it fell by with the best of the sweep.",
        "In brackets: tokens a step, learning rate, epochs, steps.",
        "",
        "| set | method | tokens | before | defaults | best of the sweep | swept | gain |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]

    def shown(row: dict[str, Any]) -> str:
        chosen = f"{row['batch_tokens']:,}; {row['learning_rate']:g}; {row['epochs']:g}; {row['steps']:,}"
        return f"{row['after']:.3f} ({chosen})"

    for name, method in dict.fromkeys((row["set"], row["method"]) for row in rows):
        mine = [row for row in rows if (row["set"], row["method"]) == (name, method)]
        swept = [row for row in mine if row["kind"] == "sweep"]
        for ours in (row for row in mine if row["kind"] == "defaults"):
            cells = [name, method, f"{ours['tokens']:,.0f}", f"{ours['before']:.3f}", shown(ours)]
            if swept:
                best = min(swept, key=lambda row: row["after"])
                gain = (ours["before"] - ours["after"]) / (best["before"] - best["after"])
                cells += [shown(best), str(len(swept)), f"{gain:.1%}"]
            else:
                cells += ["", "0", ""]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _gpu_tables(rows: list[dict[str, Any]]) -> list[str]:
    """Ours beside other systems on the same workload, and where the time of a step goes."""
    from tunesmith.measure.bench import WORKLOADS

    names = list(dict.fromkeys(row["workload"] for row in rows))
    lines = ["Throughput: with what memory it takes; low memory: every layer checkpointed, and what else saves memory."]
    lines += ["Busy: the share of a step in which a kernel ran.", ""]
    for name in names:
        one = WORKLOADS[name]
        what = "packed documents of chat lengths in " if one.is_packed else ""
        lines.append(f"- {name}: {one.method}, {one.shape}, {what}{one.sequences} x {one.length:,} tokens a step")
    commits = {row["commit"] for row in rows}
    head = ["workload", "goal", "system", "matmul_dtype", "tokens/s", "to the fastest other", "peak GiB", "busy"]
    head += ["tokens/s in earlier calls"] if any("earlier" in row for row in rows) else []
    head += ["commit"] if len(commits) > 1 else []
    lines += ["", f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for row in rows:
        cells = [row["workload"], row["goal"], row["system"], row["matmul_dtype"]]
        if "failed" in row:
            cells += [_figure("failed", row["failed"]), "", "", ""]
        else:
            ratio, busy = row.get("to_best_peer"), row.get("busy")
            cells += [f"{row['tokens_per_second']:,.0f}", f"{ratio:.2f}" if ratio else ""]
            cells += [f"{row['peak_bytes'] / 2**30:.1f}", f"{busy:.1%}" if busy else ""]
        if "tokens/s in earlier calls" in head:
            cells.append("; ".join(f"{speed:,}" for speed in row.get("earlier", [])))
        lines.append(f"| {' | '.join([*cells, *([row['commit']] if len(commits) > 1 else [])])} |")
    return lines + _time_table(rows)


def _time_table(rows: list[dict[str, Any]]) -> list[str]:
    """Of the first of our rows that was captured under the profiler."""
    row = next((row for row in rows if row["system"] == "tunesmith" and "profile" in row), None)
    if row is None:
        return []
    kinds, total = row["profile"]["kinds"], row["profile"]["kernel_ms"]
    lines = ["", f"Where the time of a step goes, {row['workload']}, {row['goal']}, {row['matmul_dtype']}:", ""]
    lines += ["| kernels | ms | share |", "| --- | --- | --- |"]
    lines += [f"| {kind} | {time:.1f} | {time / total:.1%} |" for kind, time in kinds.items()]
    step = row["step_seconds"] * 1000
    return [*lines, f"| none runs | {max(0.0, step - total):.1f} | |", f"| the step | {step:.1f} | |"]


def _number_tables(numbers: Any) -> list[str]:
    """Single figures as one table, then each list of rows as a table of its own."""
    if isinstance(numbers, list):
        return _row_table(numbers)
    numbers = _flat(numbers)
    tables = {name: value for name, value in numbers.items() if isinstance(value, list)}
    single = {name: value for name, value in numbers.items() if name not in tables}
    lines = []
    if single:
        lines += ["| figure | value |", "| --- | --- |"]
        lines += [f"| {_words(name)} | {_figure(name, value)} |" for name, value in single.items()]
    for rows in tables.values():
        lines += ["", *_row_table(rows)] if lines else _row_table(rows)
    return lines


def _row_table(rows: list[Any]) -> list[str]:
    flat = [_flat(row) if isinstance(row, dict) else {"value": row} for row in rows]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    lines = [f"| {' | '.join(map(_words, columns))} |", "| --- " * len(columns) + "|"]
    return lines + [f"| {' | '.join(_figure(name, row.get(name)) for name in columns)} |" for row in flat]


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, part in value.items():
        found |= _flat(part, f"{prefix}{name}_") if isinstance(part, dict) else {prefix + name: part}
    return found


def _words(name: str) -> str:
    name = name.removesuffix("_bytes") + "_GiB" if name.endswith("_bytes") else name
    return name.replace("tokens_per_second", "tokens/s").replace("_", " ")


def _figure(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_bytes"):
        return f"{value / 2**30:.2f}"
    if isinstance(value, list):
        return ", ".join(str(one) for one in value)
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return str(value).replace("|", "\\|")


MODELS = """\
# Models

<!-- made by docs/generate.py from benchmarks/results/families.json; do not edit -->

Tunesmith has no list of models that it knows. It tries each one before it is loaded, on a small proxy of the same
code in fp32, and finds out how it is called, which of its linears carry adapters, and whether it can be trained at
all.

The tables below show what comes of that. For each causal family of transformers a tiny model was built from the
family's own config class, with random weights, and trained for three steps twice: by Tunesmith, and by a plain loop
(transformers' model as it is, peft's adapters, torch's AdamW, one document at a time). *Right* means that the two
losses differ by 1e-5 at most in every step.

Of the {all} families {families} were measured so far. {tried} of these could be tried; {right} are right with LoRA
and with all weights, {packed} of them with documents packed into one sequence. Most others are refused before
anything is loaded; the table quotes the sentence. Rows that say *different* or *traceback* are faults. *Random*: the
model draws random numbers while it trains, so that even two plain loops differ.

Measured with {versions};
the newest rows on {date} at commit {commit}, the others earlier. Measure one again with
`python benchmarks/families.py --again FAMILY`; `make test-slow` tries every row.

## How to add a family

Most need no work: a folder with config.json and safetensors trains when transformers has its class, or when it brings
Python code of its own (`trust_remote_code: true`). The probe finds the following by itself, in this order:

| what | how it is found | where it is said |
| --- | --- | --- |
| whether it is a causal language model | its config, then its logits on the proxy | a refusal in one sentence |
| how documents are called: packed or padded | losses against one document at a time | `forward` in the plan |
| scale and soft cap of the logits | the proxy's logits against its hidden states, large ones too | `forward` |
| which linears carry adapters, fused or not | an adapter against a changed weight | `adapted`, `fuse_adapters` |
| the attention path of each kind of layer | its heads; tried on the GPU | `attention_paths`, with a reason |
| fused RoPE: all or a part of a head, halves or neighbours | our module against the model's own | `kernels` |
| gated MLPs (`swiglu`, `geglu`, `clamped_swiglu`) | the same | `kernels` |
| the scan of Mamba-2 mixers (`scan`) | with the layout: losses, and no leak between documents | `kernels` |
| sizes | the model built without weights | `memory`, `time` |
| what its layers keep for backward | counted at their own widths, on meta tensors | `memory` |

For each attention path the plan says what is slow about it and what a faster one would need.

Mamba-2 mixers (Granite 4, Bamba, Falcon-H1, Nemotron-H, Zamba2) are recognised by their modules. Where the proxy
shows it equal, Tunesmith packs their documents with a [scan of its own](../src/tunesmith/model/state_space.py),
without other libraries; on a GPU with mamba-ssm and causal-conv1d installed it uses their kernels. The plan names the
one in use (`state spaces`). Other convolutions (LFM2), linear attention (Qwen3-Next, Kimi-Linear) and Mamba-1 are
packed where their kernels (causal-conv1d, mamba-ssm, flash-linear-attention) are installed and keep documents apart
by `seq_idx`, in evaluation and in training; elsewhere documents are padded, and a note names the missing libraries.
BLOOM, MPT and Falcon compute attention inside their own modules;
[inline_attention.py](../src/tunesmith/model/inline_attention.py) makes these call packed attention instead (except
Falcon with ALiBi, which rounds its position biases to bf16).

The only file you may have to change is [families.py](../src/tunesmith/plan/families.py), and only for plans on
machines where the model is not tried, or to save the seconds that counting takes. A function there turns config.json
into `ModelFacts`: which linears a layer has, its norms (before matmuls, after them, of queries and keys), whether
queries, keys and values are one linear, whether the MLP has a gate, and its windows. Add the family to `FAMILIES`, to
`VARIANTS` in tests/plan/test_facts.py, which compares parameters and adapters with the built model, and to `FAMILIES`
in tests/plan/test_memory.py, which compares what a layer keeps with what autograd saves.

## Models that see images

They are trained on text, as the rest: those that transformers has as causal language models (Gemma 3, Llama 4), and
those that it has for images and text alone (Qwen2.5-VL, Qwen3-VL, Mistral 3, LLaVA, InternVL, SmolVLM). The encoder of
images gets no adapter and no gradient, since no text passes through it, and is in the merged model as it was, beside
the base's `preprocessor_config.json`. A model that cannot be called without an image is refused. What is written is
loaded by `AutoModelForImageTextToText`, and an adapter by `peft.PeftModel` over that; the model cards say which.

## Mixtures of experts

LoRA adapters go on the linears around the experts: not on the experts, which are stacked matrices, and not on routers
([adapters](adapters.md#any-method-of-peft) has LoRA on experts, by peft).

**The load-balancing loss of the routers** is added where the model's config has `output_router_logits: true`,
weighted by its `router_aux_loss_coef`, as transformers' own class does; few published configs ask for it. The setting
`router_aux_loss_coef` overrides the config: a number adds the loss with that weight, 0 leaves it out. The plan shows
the weight (`router_loss`). The definition is that of transformers: over all layers and tokens of a micro-batch,
padding excluded. A step takes the mean over its micro-batches on all ranks, weighted by their tokens. It is not a sum
over tokens, so it depends on the size of the micro-batches, but not on how many ranks share them. A step's `loss`
covers the targets alone; its `figures` have the unweighted `router_loss` beside it. The loss is computed in the
layers' own forward passes, compiled and checkpointed ones too, and keeps the routers' logits in memory. With tensor,
context and pipeline parallelism it is refused. Families whose routers are balanced by a bias (DeepSeek-V3, GLM-4.5),
and others for which transformers has no such loss, refuse the setting in a sentence.

**How evenly routers deal out tokens** is recorded in every run: `events.jsonl` has a `routers` event for the first
step and every 16 steps after it, or less often in long runs (33 events at most). By layer it holds the share of each
expert, that of the busiest one relative to the mean, the entropy of the shares (1: even) and the number of experts
without a token, over the whole step and all ranks. The run's page and report show them; *collapsed routers* is an
[alert](ui.md). Nothing is recorded with context and pipeline parallelism.

With `method: qlora` experts are held in nf4 and dequantized one layer at a time. For Qwen3-30B-A3B with 16,384 tokens
a step the plan predicts 21.7 GiB on a GPU with 24 GiB, and 10.4 GiB on one with 12 GiB, where the frozen weights are
in host memory and each layer's are copied to the GPU while the layer before it computes. An H200 limited to 24 and 12
GiB measured 21.1 and 10.0 GiB, at 20,188 and 20,102 tokens a second ([benchmarks](benchmarks.md)). Whole layers are
copied, not single experts: each of a layer's 128 experts gets 1,024 of 131,072 choices on average, so a step needs
all of them unless the router gives one less than a thousandth of its share. At most 0.6 GiB of them is on the GPU at
a time. A micro-batch leaves experts unused only when it has about a hundred tokens or fewer, as in decoding.
"""


def models_page() -> str:
    """Every causal family, with what came of training it beside a plain loop."""
    results = RESULTS / "families.json"
    if not results.exists():  # nothing was measured
        return "# Models\n"
    content = json.loads(results.read_text(encoding="utf-8"))
    rows = {(row["family"], row["method"]): row for row in content["numbers"]}
    both = {family: [rows[family, method] for method in ("lora", "full")] for family, _ in sorted(rows)}
    tried = [pair for pair in both.values() if all(row["outcome"] != "not built" for row in pair)]
    right = [pair for pair in tried if all(row["outcome"] == "right" for row in pair)]
    packed = [pair for pair in right if all(row["layout"] == "packed" for row in pair)]
    head = MODELS.format(
        all=content["families"],
        families=len(both),
        tried=len(tried),
        right=len(right),
        packed=len(packed),
        versions=", ".join(f"{name} {content['versions'][name]}" for name in ("transformers", "peft", "torch")),
        date=content["date"],
        commit=content["commit"],
    )
    lines = [
        "| family | LoRA | all weights | documents | adapters in peft | remarks |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for family, pair in both.items():
        layouts = dict.fromkeys(row["layout"] for row in pair if "layout" in row)
        said = dict.fromkeys(row["reason"].replace("|", "\\|") for row in pair if "reason" in row)
        cells = [family, *map(_outcome, pair), ", ".join(layouts), pair[0].get("in_peft", ""), " ".join(said)]
        lines.append(f"| {' | '.join(cells)} |")
    named = _named_families()
    return head + "\n" + "\n".join([*named, "## All families", "", *lines] if named else lines) + "\n"


NAMED = """\
## What each can do

The families that people tune most, tiny and on the CPU (`python benchmarks/families.py --named`): {count} of {all} so
far. A number is the largest difference between the losses of a step by Tunesmith and by the plain loop, over ten
steps; *unpacked* has one document a row, the column before it packed documents where the model takes them. For QLoRA
the plain loop trains over the weights as nf4 holds them; for *merged* the number is the difference of the merged
model's logits. *Fused*: what the probe found equal, some of which is used on a GPU only. *Compiled*: torch's compiler
traces each layer as one graph. *Tensor*: two ranks compute what one does. *GGUF*: written, and read by llama.cpp's
own package. *On a GPU*: how far predicted memory and speed were off what an H200 measured, in how many runs, with fp8
among them where it says so ([Benchmarks](benchmarks.md)). A number in brackets is a remark below. Cells that the
result file names as `apart` were measured later, those of GGUF with configs as published.
"""
CELLS = {
    "lora": "LoRA", "lora_unpacked": "unpacked", "full": "full", "full_unpacked": "unpacked", "qlora": "QLoRA",
    "merge": "merged", "compiled": "compiled", "tensor": "tensor", "gguf": "GGUF",
}  # fmt: skip


def _named_families() -> list[str]:
    """The families that people tune most, with what came of each try, and remarks."""
    results = RESULTS / "families_named.json"
    if not results.exists():
        return []
    content = json.loads(results.read_text(encoding="utf-8"))
    measured, remarks = _forecast_by_family(), []
    lines = [NAMED.format(count=len(content["numbers"]), all=content["named"])]
    lines += [f"| family | documents | {' | '.join(CELLS.values())} | fused | on a GPU |"]
    lines += ["| --- " * (len(CELLS) + 4) + "|"]
    for row in content["numbers"]:
        cells = [_support_cell(row.get(cell), remarks) for cell in CELLS]
        around = (", ".join(row.get("fused", ())), measured.get(row["family"], ""))
        lines.append(f"| {row['family']} | {row.get('layout', '')} | {' | '.join([*cells, *around])} |")
    return [*lines, "", *(f"{number}. {said}" for number, said in enumerate(remarks, start=1)), ""]


def _support_cell(found: str | float | None, remarks: list[str]) -> str:
    if found is None or found == "yes":
        return found or "-"
    if isinstance(found, float):
        return f"{found:.0e}"
    said = found.removeprefix("no: ").partition(", only ")[0].replace("|", "\\|").rstrip(".") + "."
    if said not in remarks:
        remarks.append(said)
    shown = "not known" if found.startswith("not traced") else "no"
    return f"{shown} ({remarks.index(said) + 1})"


def _forecast_by_family() -> dict[str, str]:
    """How predictions were off in each family's runs on a GPU."""
    results = RESULTS / "forecast.json"
    rows = json.loads(results.read_text(encoding="utf-8"))["numbers"] if results.exists() else []
    families: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "peak_bytes" in row and row["shape"] in SHAPES:
            families.setdefault(SHAPES[row["shape"]], []).append(row)
    return {family: _off(some) for family, some in families.items()}


def _off(rows: list[dict[str, Any]]) -> str:
    memory = [row["predicted"]["allocated"] / row["peak_bytes"] - 1 for row in rows]
    speed = [row["predicted"]["tokens_per_second"] / row["tokens_per_second"] - 1 for row in rows]
    said = [f"{name} {min(off):+.0%} to {max(off):+.0%}" for name, off in (("memory", memory), ("speed", speed))]
    has_fp8 = any(row["predicted"].get("matmul_dtype") == "fp8" for row in rows)
    return f"{', '.join(said)} ({len(rows)} runs{', fp8' if has_fp8 else ''})"


SHAPES = {
    "Llama-3.2-1B": "llama", "OLMo-2-1B": "olmo2", "Qwen3-1.7B": "qwen3", "StarCoder2-3B": "starcoder2",
    "Granite-3-2B": "granite", "Phi-3-mini": "phi3", "SmolLM3-3B": "smollm3", "Gemma-2-2B": "gemma2",
    "GLM-Edge-1.5B": "glm", "Cohere2-2B": "cohere2", "Gemma-3-1B": "gemma3_text", "Pythia-1.4B": "gpt_neox",
}  # fmt: skip
"""The family of each shape of benchmarks/forecast.py that was measured."""


def _outcome(row: dict[str, Any]) -> str:
    return f"{row['outcome']} ({row['difference']:.0e})" if "difference" in row else row["outcome"]


def distributed_page() -> str:
    """Written by hand, but for the tables of two hosts and of strategies on one GPU."""
    page = DOCS / "distributed.md"
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    for name, table in (("two_hosts", _two_hosts), ("gpu_strategies", _strategies), ("gpu_ranks", _shared_gpu)):
        before, start, rest = text.partition(f"<!-- made from benchmarks/results/{name}.json -->\n")
        _, end, after = rest.partition("<!-- end -->\n")
        results = RESULTS / f"{name}.json"
        if start and end and results.exists():
            lines = table(json.loads(results.read_text(encoding="utf-8")))
            text = before + start + "\n".join(lines) + "\n" + end + after
    return text


def adapters_page() -> str:
    """Written by hand, but for the table of what was tried."""
    page, results = DOCS / "adapters.md", RESULTS / "adapters.json"
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    before, start, rest = text.partition("<!-- made from benchmarks/results/adapters.json -->\n")
    _, end, after = rest.partition("<!-- end -->\n")
    if not (start and end and results.exists()):
        return text
    content = json.loads(results.read_text(encoding="utf-8"))
    cells = ("trained", "read_by_peft", "continued", "resumed", "chatted", "merged", "half", "ddp", "zero3")
    heads = ("learns", "in peft", "from peft", "resumed", "chat", "merged", "bf16", "ddp", "zero3")
    lines = [f"| adapter | {' | '.join(heads)} |", f"| --- |{' --- |' * len(heads)}"]
    remarks: list[str] = []
    for row in content["numbers"]:
        shown = [_adapter_cell(row.get(cell), row["adapter"], cell, remarks) for cell in cells]
        lines.append(f"| {row['adapter']} | {' | '.join(shown)} |")
    versions = ", ".join(f"{name} {content['versions'][name]}" for name in ("peft", "transformers", "torch"))
    lines += ["", f"{versions}; {content['date']}, commit {content['commit']}.", "", *remarks]
    return before + start + "\n".join(lines) + "\n" + end + after


def _adapter_cell(found: object, adapter: str, cell: str, remarks: list[str]) -> str:
    """yes, no, nothing to try, or a refusal, whose sentence is said below the table."""
    if found is None:
        return "-"
    if isinstance(found, bool):
        return "yes" if found else "**no**"
    said = str(found).partition(": ")[2].removeprefix("error: ") or str(found)
    remarks.append(f"{len(remarks) + 1}. {adapter}, {cell.replace('_', ' ')}: {said}")
    return f"no ({len(remarks)})"


def _two_hosts(content: dict[str, Any]) -> list[str]:
    rows = content["numbers"]
    ways = [name.removesuffix("_seconds") for name in rows[0] if name.endswith("_seconds")]
    head = ["link, Mbit/s", "measured", *(f"{way}: s (MB)" for way in ways), "the planner takes", "without stages"]
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for row in rows:
        cells = [f"{row[f'{way}_seconds']:.3g} ({row[f'{way}_megabytes']:.3g})" for way in ways]
        taken = f"{row['planner']} | {row['planner_whole']}"
        lines.append(f"| {row['megabits']:g} | {row['measured_megabits']:g} | {' | '.join(cells)} | {taken} |")
        predicted = " | ".join(f"{row[f'{way}_predicted']:.3g}" for way in ways)
        lines.append(f"| | predicted | {predicted} | | |")
    return lines


def _shared_gpu(content: dict[str, Any]) -> list[str]:
    lines = [f"{content['what']}. {content['device']}, {content['date']}, commit {content['commit']}.", ""]
    lines += ["| way | first loss | last loss | losses differ by | gradient norms |", "| --- | --- | --- | --- | --- |"]
    for row in content["numbers"]:
        cells = [row["way"], row.get("failed", ""), "", "", ""]
        if "failed" not in row:
            cells = [row["way"], f"{row['losses'][0]:.4f}", f"{row['losses'][-1]:.4f}"]
            cells += [f"{row[f'{name}_difference']:.1e}" for name in ("losses", "norms")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _strategies(content: dict[str, Any]) -> list[str]:
    lines = [f"{content['what']}. {content['device']}, {content['date']}.", ""]
    columns = [
        "method",
        "strategy",
        "tokens a step",
        "tokens/s",
        "of the plain path",
        "peak GiB",
        "loss",
        "commit",
        "note",
    ]
    lines += [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for row in content["numbers"]:
        cells = [row["method"], row["way"], f"{row.get('tokens', 16384):,}"]
        if "failed" in row:
            cells += ["", "", "", "", "", _figure("failed", row["failed"])]
        else:
            earlier = ", ".join(f"{share:.1%}" for share in row.get("earlier", ()))
            share = f"{row['share_of_plain']:.1%}" + (f" ({earlier} in earlier calls)" if earlier else "")
            cells += [f"{row['tokens_per_second']:,.0f}", share]
            cells += [f"{row['peak_bytes'] / 2**30:.1f}", f"{row['loss']:.4f}"]
            cells += [row.get("commit", content["commit"]), _moved(row)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _moved(row: dict[str, Any]) -> str:
    if "link_seconds" not in row:
        return ""
    moved, step, link = row["moved_bytes"] / 1e9, row["step_seconds"], row["link_seconds"]
    return f"{moved:.0f} GB each way in {step:.2f} s; the link alone takes {link:.2f}"


PAGES: dict[str, Callable[[], str]] = {
    "adapters.md": adapters_page,
    "distributed.md": distributed_page,
    "models.md": models_page,
    "settings.md": settings_page,
    "planner.md": planner_page,
    "benchmarks.md": benchmarks_page,
}


def _table(model: dict[str, Any], prefix: str = "") -> list[str]:
    rows = ["| setting | value | default | meaning |", "| --- | --- | --- | --- |"]
    for name, spec in model["properties"].items():
        default = "needed" if name in model.get("required", ()) else _default(spec)
        meaning = spec["description"].replace("|", r"\|")
        rows.append(f"| `{prefix}{name}` | {_kind(spec)} | {default} | {meaning} |".replace("  ", " "))
    return rows


def _default(spec: dict[str, Any]) -> str:
    value = spec.get("default")
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if value is None or isinstance(value, list | dict):
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _kind(spec: dict[str, Any]) -> str:
    if "$ref" in spec:
        return {"Dataset": "data set", "Reward": "check"}.get(spec["$ref"].rsplit("/", 1)[-1], "see below")
    if "anyOf" in spec:
        kinds = [_kind(branch) for branch in spec["anyOf"] if branch.get("type") != "null"]
        if named := next((one for one in ("list of data sets", "list of checks") if one in kinds), None):
            return named
        if "list of texts" in kinds:
            return "`all-linear` or list"
        return " or ".join(kinds)
    if "enum" in spec or "const" in spec:
        return ", ".join(f"`{choice}`" for choice in spec.get("enum", [spec.get("const")]))
    kind = spec["type"]
    if kind == "array":
        return f"list of {_kind(spec['items']).split(' or ')[0]}s"
    plain = {"string": "text", "boolean": "true or false", "object": "mapping", "integer": "whole number"}
    return plain.get(kind, kind) + _bounds(spec)


def _bounds(spec: dict[str, Any]) -> str:
    words = []
    for key, word in (
        ("minimum", "from"),
        ("exclusiveMinimum", "above"),
        ("maximum", "to"),
        ("exclusiveMaximum", "below"),
    ):
        # 1 as the least whole number says nothing, nor does the largest seed.
        if key in spec and not (key == "minimum" and spec[key] == 1) and spec[key] < 2**53:
            words.append(f"{word} {spec[key]:g}")
    return " " + " ".join(words) if words else ""


if __name__ == "__main__":
    sys.exit(main())
