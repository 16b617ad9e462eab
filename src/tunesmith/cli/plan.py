"""`tunesmith plan`: what would happen, what it needs, why, and what else is possible, without loading the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.text import Text

    from tunesmith.config.schema import Run
    from tunesmith.plan.facts import ModelFacts
    from tunesmith.plan.hardware import Hardware
    from tunesmith.plan.plan import Memory, Plan
    from tunesmith.plan.search import Search

BAR = 60
"""Columns of the memory bar."""
MARKS = {
    "weights": ("W", "blue"),
    "adapter": ("a", "bright_blue"),
    "master": ("M", "cyan"),
    "gradients": ("G", "green"),
    "optimizer": ("O", "yellow"),
    "activations": ("A", "magenta"),
    "loss": ("L", "red"),
    "gathered": ("g", "bright_green"),
    "quantization": ("q", "bright_cyan"),
    "workspace": ("w", "bright_magenta"),
    "context": ("C", "white"),
    "fragmentation": ("F", "bright_black"),
}
"""Letter and colour of each category in the bar."""


def command(
    config: Annotated[Path, typer.Argument(help="The run's settings; KEY=VALUE alone need no file.")] = Path(
        "run.yaml"
    ),
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the file's.")
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help='Plan for this instead: "2 nodes of 4 x A100-80G, 50 Gbit/s", or a YAML file.')
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="Plan for this many ranks on this machine, as `train --ranks`.")
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Compare with this setting, plan field or hardware instead."),
    ] = None,
    solve: Annotated[
        str | None, typer.Option(help="Find the largest sequence_length, batch or model that fits, or the fewest gpus.")
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="Price of one GPU for one hour; shows what the run costs.")
    ] = None,
    tokens: Annotated[float | None, typer.Option(help="Tokens of the whole run, if the files do not tell.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the plan here, for `train --plan`.")] = None,
    calibrate: Annotated[bool, typer.Option(help="Measure this machine first, and keep its rates.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show how the run would be done, what memory and time it needs, why, and what else is possible."""
    from tunesmith.cli import output

    output.stage("Measuring this machine" if calibrate else f"Reading {config}")
    from tunesmith.checkpoint.files import write_atomic
    from tunesmith.config.load import load
    from tunesmith.disk import writing
    from tunesmith.errors import UserError
    from tunesmith.plan import documents, explain
    from tunesmith.plan.documents import guess_held_out, missing, sample_lengths, total_tokens
    from tunesmith.plan.hardware import named, probe, shared
    from tunesmith.plan.search import search
    from tunesmith.run.choose import facts_before

    if calibrate:
        from tunesmith.plan.calibrate import calibrate as measure

        output.note(measure())
    run = load(config, overrides or ()).run
    if run.sweep:
        _sweep(run, hardware, as_json=as_json, other=bool(what_if or solve or save or ranks))
        return
    if ranks and hardware:
        raise UserError("--ranks counts those of this machine, and --hardware names another; leave one of the two out.")
    where = named(hardware) if hardware else shared(probe(), ranks) if ranks else probe()
    facts = facts_before(run, where, output.stage)
    _check_teacher(run)
    for path in missing(run):
        output.warn(f"{path}: no such file or folder; documents are taken to be as long as sequences.")

    def searched(run: Run, facts: ModelFacts, where: Hardware, pins: dict[str, Any] | None = None) -> Search:
        size = documents.measure(run)
        data = {"lengths": sample_lengths(run), "size": size, "held_out": guess_held_out(run, size)}
        return search(run, facts, where, pins=pins, **data)

    found = searched(run, facts, where)
    if run.objective.startswith("classify") and not run.labels and not missing(run):
        found = _labelled(found, run)
    plan = found.plan
    if solve:
        answer = explain.solve(solve, run, facts, where)
        output.print_json({"answer": answer}) if as_json else output.say(answer)
        return
    if save is not None:
        with writing(save, "give --save another file"):
            write_atomic(save, (plan.model_dump_json(indent=2) + "\n").encode())
    if what_if:
        settings, pins, other = explain.apart(_pairs(what_if))
        changed = load(config, [*(overrides or ()), *settings]).run if settings else run
        there = named(other) if other else where
        _differences(plan, searched(changed, facts_before(changed, there, output.stage), there, pins).plan, as_json)
        return
    length = (round(tokens), "as given") if tokens else total_tokens(run, plan, documents.measure(run))
    if as_json:
        output.print_json(_document(run, facts, where, found, length, price))
    else:
        _page(run, facts, where, found, length, price)


def _labelled(found: Search, run: Run) -> Search:
    from dataclasses import replace

    from tunesmith.cli import output
    from tunesmith.data.labels import with_labels
    from tunesmith.run.choose import with_label_reason

    output.stage("Reading the data's labels")
    return replace(found, plan=with_label_reason(found.plan, with_labels(run)))


def _check_teacher(run: Run) -> None:
    if run.objective == "distill":
        from tunesmith.run.teacher import check_planned_teacher

        check_planned_teacher(run)


def _differences(plan: Plan, after: Plan, as_json: bool) -> None:
    from tunesmith.cli import output
    from tunesmith.plan import explain

    if as_json:
        output.print_json({"before": plan.model_dump(mode="json"), "after": after.model_dump(mode="json")})
        return
    rows = explain.differences(plan, after)
    output.say(output.table(("what if", "as it is", "then"), rows, right=("as it is", "then")))


def _sweep(run: Run, hardware: str | None, *, as_json: bool, other: bool) -> None:
    """The variants of a sweep, each with its plan."""
    from tunesmith.cli import output
    from tunesmith.cli.sweep import show_plans
    from tunesmith.config.sweep import variants
    from tunesmith.errors import UserError
    from tunesmith.plan.hardware import named, probe, shared
    from tunesmith.run.choose import new_plan

    if other:
        raise UserError("--what-if, --solve, --save and --ranks are for one run; leave `sweep` out (sweep=null).")
    where = named(hardware) if hardware else probe()
    where = shared(where, 1) if where.gpu_count > 1 else where
    for variant in variants(run):
        _check_teacher(variant.run)
    plans = {variant.name: new_plan(variant.run, where) for variant in variants(run)}
    if as_json:
        output.print_json({name: plan.model_dump(mode="json") for name, plan in plans.items()})
    else:
        show_plans(plans)


def _page(
    run: Run, facts: ModelFacts, where: Hardware, found: Search, length: tuple[int, str] | None, price: float | None
) -> None:
    from tunesmith.cli import output
    from tunesmith.errors import listed
    from tunesmith.plan import explain

    plan = found.plan
    trained = found.task.trained
    output.say(f"{facts.architecture}: {facts.parameters:,} parameters, {trained:,} trained ({run.method})")
    output.say()
    output.say(output.table(("plan", "", "why"), [(r.topic, r.choice, r.why) for r in plan.reasons]))
    output.say()
    words = "fits into" if plan.fits else "does not fit into"
    size, limit = output.readable_bytes(plan.memory.total), output.readable_bytes(plan.memory_limit)
    output.say(f"Memory of each rank at the peak ({plan.peak}): {size}, {words} {limit}")
    output.say(_bar(plan))
    parts = [(MARKS[name][0], name, output.readable_bytes(size)) for name, size in _parts(plan.memory)]
    output.say(output.table(("", "memory", "bytes"), parts, right=("bytes",)))
    if plan.device == "cuda":
        output.say(f"Host memory of each node: about {output.readable_bytes(plan.host_memory)}")
    if plan.disk:
        output.say(f"Disk of each node while it trains: about {output.readable_bytes(plan.disk)}")
    output.say()
    shares = sorted(plan.time.model_dump().items(), key=lambda item: -item[1])
    largest = ", ".join(f"{name} {seconds / plan.time.total:.0%}" for name, seconds in shares[:4] if seconds > 0)
    output.say(
        f"Speed: about {plan.tokens_per_second:,.0f} tokens a second, {plan.time.total:.2f} s a step ({largest})"
    )
    if length is not None:
        output.say(_duration(plan, length, price))
    output.say()
    others = explain.alternatives(found)[:8]
    if others:
        rows = [(a.what, f"{a.tokens_per_second:,.0f}", output.readable_bytes(a.bytes), a.remark) for a in others]
        right = ("tokens/s", "memory")
        output.say(output.table(("alternatives", "tokens/s", "memory", ""), rows, right=right))
    if not plan.fits:
        answers = explain.changes_that_fit(run, facts, where)
        output.say("What would make it fit, the smallest change first:" if answers else "No small change makes it fit.")
        for answer in answers:
            output.say(f"  {answer}")
    if plan.beyond:
        output.say(f"This version of Tunesmith cannot run this plan yet: {listed(plan.beyond)}.")


def _document(
    run: Run, facts: ModelFacts, where: Hardware, found: Search, length: tuple[int, str] | None, price: float | None
) -> dict[str, Any]:
    import dataclasses

    from tunesmith.plan import explain, speed

    plan = found.plan
    document = {
        "plan": plan.model_dump(mode="json"),
        "fits": plan.fits,
        "tokens_per_second": round(plan.tokens_per_second, 1),
        "step_seconds": round(plan.time.total, 6),
        "model": {
            "architecture": facts.architecture,
            "parameters": facts.parameters,
            "by_kind": facts.by_kind,
            "trained": found.task.trained,
            "note": facts.note,
        },
        "hardware": where.model_dump(mode="json"),
        "timeline": [phase.model_dump(mode="json") for phase in found.timeline],
        "alternatives": [dataclasses.asdict(row) for row in explain.alternatives(found)],
    }
    if not plan.fits:
        document["changes_that_fit"] = explain.changes_that_fit(run, facts, where)
    if length is not None:
        seconds = length[0] / plan.tokens_per_second
        cost = speed.cost(seconds, plan.mesh.ranks, price)
        document["run"] = {"tokens": length[0], "known_from": length[1], **dataclasses.asdict(cost)}
    return document


def _duration(plan: Plan, length: tuple[int, str], price: float | None) -> str:
    from tunesmith.plan import speed

    tokens, how = length
    cost = speed.cost(tokens / plan.tokens_per_second, plan.mesh.ranks, price)
    if cost.hours < 1:
        minutes = round(60 * cost.hours)
        time = f"{minutes} minute{'s' if minutes > 1 else ''}" if minutes else "less than a minute"
    else:
        time = f"{cost.hours:.1f} hours"
    words = f"The run: about {tokens:,} tokens ({how}), {time}"
    if plan.device == "cuda":
        words += f", {cost.gpu_hours:.2f} GPU hours"
    return words + (f", {cost.money:,.2f} at {price:g} an hour" if cost.money is not None else "")


def _parts(memory: Memory) -> list[tuple[str, int]]:
    return [(name, size) for name, size in memory.model_dump().items() if size]


def _bar(plan: Plan) -> Text:
    """The categories as one bar, to scale with what may be used."""
    from rich.text import Text

    scale = BAR / max(plan.memory_limit, plan.memory.total)
    bar, used = Text("["), 0
    for name, size in _parts(plan.memory):
        wide = round(size * scale)
        letter, colour = MARKS[name]
        bar.append(letter * wide, style=colour)
        used += wide
    bar.append("." * max(0, BAR - used) + "]")
    return bar


def _pairs(texts: list[str]) -> dict[str, str]:
    from tunesmith.errors import UserError

    for text in texts:
        if "=" not in text:
            raise UserError(
                f"--what-if {text}: write KEY=VALUE, for example sequence_length=8192 or hardware='8 x H100'."
            )
    return {key.strip(): value.strip() for key, _, value in (text.partition("=") for text in texts)}
