"""What else was possible and what it would cost; what would make a run fit; the largest that fits; hours and money.

Everything here asks the same two models as the search, so an alternative's numbers are those its plan would have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from tunesmith.config.schema import Run
from tunesmith.disk import gib
from tunesmith.errors import UserError
from tunesmith.plan import memory, refusals, rules, speed
from tunesmith.plan.candidates import Candidate
from tunesmith.plan.catalogue import MODELS
from tunesmith.plan.choice import Choice
from tunesmith.plan.defaults import UNKNOWN_BATCH
from tunesmith.plan.facts import ModelFacts
from tunesmith.plan.families import from_config
from tunesmith.plan.hardware import Hardware
from tunesmith.plan.plan import Plan
from tunesmith.plan.ranking import should_capture
from tunesmith.plan.reasons import GIVES_UP
from tunesmith.plan.search import Search, search

PINNABLE = tuple(field.name for field in dataclasses.fields(Choice))
"""Parts of a plan that `--what-if` can fix."""
SOLVABLE = ("sequence_length", "batch", "model", "gpus")
LONGEST = 1 << 22


@dataclass(frozen=True)
class Alternative:
    what: str
    tokens_per_second: float
    bytes: int
    fits: bool
    remark: str


def alternatives(searched: Search) -> list[Alternative]:
    """Other ways of doing it, with what they cost or bring against the plan; the best first."""
    task, chosen = searched.task, searched.chosen
    rows: dict[Choice, Alternative] = {}
    for what, choice, remark in _variants(searched):
        if choice.cuda_graphs and not rules.may_capture(task, choice):
            choice = dataclasses.replace(choice, cuda_graphs=False)
        if choice == chosen.choice or choice in rows or refusals.refused(task, choice):
            continue
        time = speed.step_time(task, choice)
        size = memory.peak(memory.timeline(task, choice)).memory.total
        fits = size <= searched.plan.memory_limit
        ratio = chosen.time.total / time.total
        words = [f"{ratio:.2f} times as fast" if ratio >= 1 else f"{1 - ratio:.0%} slower"]
        difference = size - chosen.bytes
        words.append(f"{gib(abs(difference))} {'more' if difference > 0 else 'less'}")
        if not fits:
            words.append("does not fit")
        words += [remark] if remark else []
        if missing := [part for part in rules.beyond(task, choice) if part not in searched.plan.beyond]:
            words.append(f"not in this version: {', '.join(missing)}")
        rows[choice] = Alternative(what, task.step_tokens / time.total, size, fits, "; ".join(words))
    return sorted(rows.values(), key=lambda row: (not row.fits, -row.tokens_per_second))


def _variants(searched: Search) -> Iterator[tuple[str, Choice, str]]:
    task, choice = searched.task, searched.chosen.choice
    layers = task.facts.layers
    if choice.matmul_dtype == "plain" and task.width == 2:
        kept = "the frozen base is rounded to 8 bits" if task.has_adapters else "masters and gradients stay as they are"
        yield "precision: fp8", dataclasses.replace(choice, matmul_dtype="fp8"), f"matmuls in 8 bits, {kept}"
    if choice.checkpointed_layers < layers:
        yield "checkpoint all layers", dataclasses.replace(choice, checkpointed_layers=layers), ""
    if choice.checkpointed_layers:
        nothing = dataclasses.replace(choice, checkpointed_layers=0, save_attention=False, offload_activations=False)
        yield "checkpoint nothing", nothing, ""
    if task.device == "cuda" and not choice.offload_activations:
        sent = dataclasses.replace(choice, checkpointed_layers=layers, offload_activations=True)
        yield "layer inputs in host memory", sent, "all layers are checkpointed"
    if choice.cuda_graphs:
        yield "passes not captured", dataclasses.replace(choice, cuda_graphs=False), "the CPU starts each kernel"
    elif should_capture(task, choice):
        yield "passes captured", dataclasses.replace(choice, cuda_graphs=True), "the GPU waits less for the CPU"
    if choice.micro_batch > 1:
        half = dataclasses.replace(choice, micro_batch=choice.micro_batch // 2)
        yield f"micro-batch {half.micro_batch}", half, ""
    if task.has_adapters and choice.storage == "plain":
        yield "base in 8 bits", dataclasses.replace(choice, storage="int8"), "method: qlora and lora.bits: 8"
        yield "base in 4 bits", dataclasses.replace(choice, storage="nf4"), "method: qlora; the base is rounded"
    if task.has_adapters and choice.storage == "nf4" and task.method != "qlora":
        yield "base in 8 bits", dataclasses.replace(choice, storage="int8"), ""
    if not task.has_adapters and choice.optimizer_states == "fp32":
        yield "optimizer states in 8 bits", dataclasses.replace(choice, optimizer_states="int8"), ""
    if not task.has_adapters and choice.offload_optimizer == "none":
        yield "optimizer in host memory", dataclasses.replace(choice, offload_optimizer="host"), ""
        yield "optimizer on disk", dataclasses.replace(choice, offload_optimizer="disk"), ""
    if not choice.offload_parameters and choice.offload_optimizer == "none" and choice.sharding in ("none", "zero3"):
        stays = task.has_adapters and choice.ranks == 1
        moved = dataclasses.replace(
            choice,
            offload_parameters=True,
            sharding="none" if stays else "zero3",
            optimizer_in_backward=False,
            cuda_graphs=False,
        )
        yield "parameters in host memory", moved, "" if stays else "the CPU does the update"
    for way, best in _best_by_way(searched).items():
        yield way, best.choice, ""


def _best_by_way(searched: Search) -> dict[str, Candidate]:
    """Of sharing the work out over ranks; the way of the plan itself is none of them."""
    limit = searched.plan.memory_limit
    best: dict[str, Candidate] = {}
    for candidate in searched.tiers[-1]:
        kind = _way(candidate.choice)
        key = (candidate.bytes > limit, candidate.time.total if candidate.bytes <= limit else candidate.bytes)
        now = best.get(kind)
        if now is None or key < (now.bytes > limit, now.time.total if now.bytes <= limit else now.bytes):
            best[kind] = candidate
    best.pop(_way(searched.chosen.choice), None)
    return best


def _way(choice: Choice) -> str:
    axes = {"tensor": choice.tensor, "context": choice.context, "pipeline": choice.pipeline, "expert": choice.expert}
    words = [f"sharding: {choice.sharding}", *(f"{axis} {size}" for axis, size in axes.items() if size > 1)]
    return ", ".join([*words, *(["in quantized collectives"] if choice.is_lossy else [])])


def changes_that_fit(run: Run, facts: ModelFacts, hardware: Hardware, *, most: int = 8) -> list[str]:
    """The smallest changes that would make a run fit, in order, where nothing fits as it is."""
    answers: list[str] = []
    for words, changed_run, changed_hardware in _changes(run, facts, hardware):
        try:
            plan = search(changed_run, facts, changed_hardware).plan
        except UserError:
            continue
        if plan.fits:
            answers.append(f"{words} ({gib(plan.memory.total)} of {gib(plan.memory_limit)})")
        if len(answers) == most:
            break
    return answers


def _changes(run: Run, facts: ModelFacts, hardware: Hardware) -> Iterator[tuple[str, Run, Hardware]]:
    def changed(**settings: Any) -> Run:
        return run.model_copy(update=settings)

    if run.precision == "fp32":
        yield "precision: auto instead of fp32", changed(precision="auto"), hardware
    length = min(run.sequence_length, facts.positions or run.sequence_length)
    shorter = length // 2
    while shorter >= 256:
        shortened = changed(sequence_length=shorter)
        if search(shortened, facts, hardware).plan.fits:
            yield f"sequence_length: {shorter}", shortened, hardware
            break
        shorter //= 2
    if run.method == "full":
        if run.optimizer == "adamw":
            yield "optimizer: adafactor", changed(optimizer="adafactor"), hardware
            for optimizer, gives_up in GIVES_UP.items():
                yield f"optimizer: {optimizer}, where {gives_up}", changed(optimizer=optimizer), hardware
            merged = "adapters are trained and merged into the base at intervals"
            yield f"method: relora, where {merged}", changed(method="relora"), hardware
            yield f"method: loqt, where {merged}, which is in 4 bits", changed(method="loqt"), hardware
        yield "method: lora", changed(method="lora"), hardware
    if run.method != "qlora":
        yield "method: qlora", changed(method="qlora"), hardware
    if hardware.gpus:
        for count in (2, 4, 8):
            if count > len(hardware.gpus):
                yield f"{count} x {hardware.gpus[0].name}", run, _with_gpus(hardware, count)


def solve(what: str, run: Run, facts: ModelFacts, hardware: Hardware) -> str:
    """The largest that fits, or the fewest GPUs, in a sentence."""
    if what not in SOLVABLE:
        raise UserError(f"--solve: '{what}' is not one of {', '.join(SOLVABLE)}.")

    def plan(changed: Run = run, on: Hardware = hardware, of: ModelFacts = facts, **pins: Any) -> Plan:
        return search(changed, of, on, pins=pins or None).plan

    if what == "sequence_length":
        most = min(facts.positions or LONGEST, LONGEST) // 256

        def of_length(count: int) -> Run:
            length = 256 * count
            return run.model_copy(
                update={"sequence_length": length, "batch_tokens": max(run.batch_tokens or UNKNOWN_BATCH, length)}
            )

        best = _largest(most, lambda count: plan(of_length(count)).fits)
        if not best:
            return "Not even sequences of 256 tokens fit."
        chosen = plan(of_length(best))
        limit = ", the most the model was made for" if best == most and facts.positions else ""
        return f"The longest sequence that fits is {256 * best:,} tokens{limit} ({_numbers(chosen)})."
    if what == "batch":
        ranks = plan().mesh.data_ranks
        length = plan().sequence_length

        def of_batch(count: int) -> Plan:
            changed = run.model_copy(update={"batch_tokens": count * length * ranks})
            return plan(changed, micro_batch=count)

        best = _largest(4096, lambda count: of_batch(count).fits)
        if not best:
            return "Not even one sequence fits."
        return (
            f"The largest micro-batch that fits is {best} sequences of {length:,} tokens on each rank "
            f"({_numbers(of_batch(best))})."
        )
    if what == "model":
        fitting = [known for known in MODELS if plan(of=from_config(known.config())).fits]
        if not fitting:
            return f"Not even {MODELS[0].name} fits."
        largest = fitting[-1]
        chosen = plan(of=from_config(largest.config()))
        size = from_config(largest.config()).parameters / 1e9
        return f"The largest of the usual models that fits is {largest.name}, {size:.1f}B ({_numbers(chosen)})."
    if not hardware.gpus:
        raise UserError("--solve gpus needs GPUs: name the kind with --hardware.")
    for count in (1, 2, 4, 8):
        chosen = plan(on=_with_gpus(hardware, count))
        if chosen.fits:
            return f"The fewest that do: {count} x {hardware.gpus[0].name} ({_numbers(chosen)})."
    return f"It does not fit on 8 x {hardware.gpus[0].name} in one node."


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` for which it still holds; 0 when it never does."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= most and fits(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _with_gpus(hardware: Hardware, count: int) -> Hardware:
    gpu = hardware.gpus[0]
    link = hardware.link or (24e9 if count > 1 else 0.0)
    memory_here = max(hardware.memory, 2 * count * gpu.memory)
    return hardware.changed(
        gpus=(gpu,) * count, nodes=1, link=link, memory=memory_here, available=memory_here, is_named=True
    )


def apart(changes: Mapping[str, str]) -> tuple[list[str], dict[str, Any], str | None]:
    """`--what-if` values, taken apart: settings of the run, parts of the plan, and the hardware."""
    settings, pins, hardware = [], {}, None
    kinds = {field.name: field.default for field in dataclasses.fields(Choice)}
    for key, text in changes.items():
        if key == "hardware":
            hardware = text
        elif key in PINNABLE:
            default = kinds[key]
            if isinstance(default, bool):
                if text.lower() not in ("true", "false"):
                    raise UserError(f"--what-if {key}={text}: say true or false.")
                pins[key] = text.lower() == "true"
            elif isinstance(default, int):
                if not text.isdigit():
                    raise UserError(f"--what-if {key}={text}: it needs a whole number.")
                pins[key] = int(text)
            else:
                known = get_args(get_type_hints(Choice)[key])
                if text not in known:
                    raise UserError(f"--what-if {key}={text}: say {', '.join(known[:-1])} or {known[-1]}.")
                pins[key] = text
        else:
            settings.append(f"{key}={text}")
    return settings, pins, hardware


def differences(before: Plan, after: Plan) -> list[tuple[str, str, str]]:
    """What differs between two plans, as rows: what, before, after."""
    rows = [
        ("fits", "yes" if before.fits else "no", "yes" if after.fits else "no"),
        ("memory at the peak", gib(before.memory.total), gib(after.memory.total)),
        ("tokens a second", f"{before.tokens_per_second:,.0f}", f"{after.tokens_per_second:,.0f}"),
    ]
    names = (
        "sequence_length", "sequences_per_step", "micro_batch", "checkpointed_layers", "precision",
        "matmul_dtype", "storage", "master_weights", "optimizer_states", "offload_optimizer", "offload_parameters",
        "cuda_graphs", "cache_transposed", "save_attention", "mlp_slice", "offload_activations",
        "sharding", "attention", "epochs", "learning_rate", "held_out",
    )  # fmt: skip
    for name in names:
        rows.append((name.replace("_", " "), str(getattr(before, name)), str(getattr(after, name))))
    rows.append(("ranks", str(before.mesh.ranks), str(after.mesh.ranks)))
    return rows[:3] + [row for row in rows[3:] if row[1] != row[2]]


def _numbers(plan: Plan) -> str:
    return f"{gib(plan.memory.total)} of {gib(plan.memory_limit)}, {plan.tokens_per_second:,.0f} tokens a second"
