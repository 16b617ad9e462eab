"""`tunesmith eval --tasks`: tasks asked of one model, or of two and a verdict between them; tables and JSON."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.cli import output

if TYPE_CHECKING:
    from tunesmith.evaluate.compare import Difference
    from tunesmith.evaluate.figures import Figure, Measure
    from tunesmith.evaluate.judge import Judge, Wins
    from tunesmith.evaluate.tasks import Task
    from tunesmith.run.targets import Target

ByTask = dict[str, list[dict[str, Any]]]
"""The results of a model's items, by the tasks' titles."""


@dataclass(frozen=True)
class TaskOptions:
    """What the command line asks for."""

    target: str
    tasks: Sequence[str]
    against: str | None
    limit: int | None
    max_tokens: int
    folder: Path | None
    as_json: bool
    judge: str | None = None
    judge_model: str | None = None


def evaluate_tasks(asked: TaskOptions) -> None:
    """On every rank; the first one shows what was found."""
    from tunesmith.errors import UserError
    from tunesmith.evaluate.tasks import read_tasks
    from tunesmith.launch.rank_environment import read_rank_environment

    output.stage("Reading the tasks")
    tasks = [_with_settings(task, asked) for task in read_tasks(asked.tasks, limit=asked.limit)]
    judge = _judge(asked)
    for task in tasks:
        if task.kind == "judge" and judge is None:
            raise UserError(f"{task.title} has questions for a judge; name one with --judge URL --judge-model NAME.")
        if task.kind == "lm-eval":
            from tunesmith.evaluate.harness import check_installed

            check_installed()
    output.stage(f"Reading {asked.target}")
    from tunesmith.parallel.ranks import connected
    from tunesmith.run.targets import BASE, base_of, find_target
    from tunesmith.run.tasks import evaluate, results_of
    from tunesmith.serve.batch import generate

    targets = [find_target(asked.target)]
    if asked.against is not None:
        targets.append(base_of(asked.target) if asked.against == BASE else find_target(asked.against))
    environment = read_rank_environment()
    is_first = environment.rank == 0
    found: list[ByTask] = []
    with connected(environment) as ranks:
        for target in targets:
            options = {"progress": output.progress, "warn": output.warn} if is_first else {}
            made = evaluate(target, tasks, generate=generate, folder=asked.folder, ranks=ranks, **options)
            found.append({task.title: results_of(task, made[task.title]) for task in tasks})
    if is_first and judge is not None:
        from tunesmith.run.judged import judge_tasks

        judge_tasks(judge, tasks, targets, found, folder=asked.folder, progress=output.progress)
    if is_first:
        show(tasks, targets, found, as_json=asked.as_json)


def _judge(asked: TaskOptions) -> Judge | None:
    """The key comes from the environment alone: what stands in a command is seen by others."""
    from tunesmith.errors import UserError

    if asked.judge is None and asked.judge_model is None:
        return None
    if asked.judge is None or asked.judge_model is None:
        raise UserError("--judge URL and --judge-model NAME go together: where the judge is asked, and which it is.")
    from tunesmith.evaluate.judge import Judge

    key = os.environ.get("TUNESMITH_JUDGE_KEY") or os.environ.get("OPENAI_API_KEY")
    return Judge(asked.judge, asked.judge_model, key or None)


def _with_settings(task: Task, asked: TaskOptions) -> Task:
    is_generated = task.kind in ("answers", "instructions", "judge")
    return task.with_settings(max_tokens=asked.max_tokens) if is_generated else task


def show(tasks: Sequence[Task], targets: Sequence[Target], found: Sequence[ByTask], *, as_json: bool) -> None:
    if len(targets) == 1:
        _show_one(tasks, targets[0], found[0], as_json)
    else:
        _show_verdict(tasks, targets, found, as_json)


# One model


def _show_one(tasks: Sequence[Task], target: Target, found: ByTask, as_json: bool) -> None:
    from tunesmith.evaluate.figures import figure, measures_of

    rows, groups = [], []
    for task in tasks:
        results = found[task.title]
        for measure in measures_of(task, results):
            if (one := figure(measure, results)) is not None:
                rows.append((task, one))
        groups += _by_group(task, results)
    if as_json:
        output.print_json(
            {
                "model": target.name,
                "results": [_figure_json(task.title, one) for task, one in rows],
                "groups": [{"group": group, **_figure_json(task.title, one)} for task, group, one in groups],
            }
        )
        return
    columns = ("task", "measure", "value", "95% interval", "items")
    shown = [(task.title, one.measure.name, *_cells(one)) for task, one in _with_perplexity(rows)]
    output.say(output.table(columns, shown, right=columns[2:]))
    if groups:
        columns = ("task", "group", "measure", "value", "95% interval", "items")
        shown = [(task.title, group, one.measure.name, *_cells(one)) for task, group, one in groups]
        output.say()
        output.say(output.table(columns, shown, right=columns[3:]))


def _by_group(task: Task, results: Sequence[dict[str, Any]]) -> list[tuple[Task, str, Figure]]:
    """The first measure of each group, where records name at least two."""
    from tunesmith.evaluate.figures import figure, measures_of

    named: dict[str, list[dict[str, Any]]] = {}
    for item, result in zip(task.items, results, strict=False):
        if item.group is not None:
            named.setdefault(item.group, []).append(result)
    measures = measures_of(task, results)
    if len(named) < 2 or not measures:
        return []
    made = [(group, figure(measures[0], some)) for group, some in sorted(named.items())]
    return [(task, group, one) for group, one in made if one is not None]


def _with_perplexity(rows: Sequence[tuple[Task, Figure]]) -> list[tuple[Task, Figure]]:
    """The loss once more, as people know it."""
    from dataclasses import replace

    made = []
    for task, one in rows:
        made.append((task, one))
        if one.measure.name == "loss":
            raised = [math.exp(min(value, 50)) for value in (one.value, one.low, one.high)]
            measure = replace(one.measure, name="perplexity")
            made.append((task, replace(one, measure=measure, value=raised[0], low=raised[1], high=raised[2])))
    return made


def _cells(one: Figure) -> tuple[str, str, str]:
    return _number(one.measure, one.value), _interval(one.measure, one.low, one.high), f"{one.items:,}"


def _figure_json(title: str, one: Figure) -> dict[str, Any]:
    from tunesmith.evaluate.figures import finite

    made = {"task": title, "measure": one.measure.name, "value": one.value, "items": one.items}
    made |= {"low": finite(one.low), "high": finite(one.high)}
    return made | ({"perplexity": math.exp(min(one.value, 50))} if one.measure.name == "loss" else {})


# Two models


def _show_verdict(tasks: Sequence[Task], targets: Sequence[Target], found: Sequence[ByTask], as_json: bool) -> None:
    from tunesmith.errors import UserError
    from tunesmith.evaluate import verdicts

    rows, wins = verdict_rows(tasks, found), wins_by_task(tasks, found)
    first, second = (target.name for target in targets)
    second = second if second != first else f"{second} (against)"
    made = {"model": targets[0].name, "against": targets[1].name}
    made |= {"results": [_difference_json(*row) for row in rows]}
    if (targets[0].folder.parent / "run.json").is_file():  # a run, whose pages show it
        said = [summary(first, second, rows), *(wins_sentence(first, second, *one) for one in wins.items())]
        with suppress(UserError):  # a run that may only be read
            verdicts.write(targets[0].folder, made | {"summary": " ".join(said).strip()})
    if as_json:
        judged = [{"task": title, **asdict(one)} for title, one in wins.items()]
        output.print_json(made | ({"wins": judged} if judged else {}))
        return
    columns = ("task", "measure", second, first, "difference", "95% interval", "p", "verdict", "items", "to tell")
    shown = [
        (
            title,
            measure.name,
            _number(measure, row.second),
            _number(measure, row.first),
            _signed(measure, row.value),
            _interval(measure, row.low, row.high, signed=True),
            f"{row.p:.4f}" if row.p >= 1e-4 else "<0.0001",
            row.verdict,
            f"{row.items:,}",
            f"{row.needed:,}" if row.needed else "",
        )
        for title, measure, row in rows
    ]
    if shown:
        output.say(output.table(columns, shown, right=(*columns[2:7], *columns[8:])))
        output.say()
        output.say(summary(first, second, rows))
    for title, one in wins.items():
        output.say(wins_sentence(first, second, title, one))


def verdict_rows(tasks: Sequence[Task], found: Sequence[ByTask]) -> list[tuple[str, Measure, Difference]]:
    """A row for each measure, with verdicts that hold for the table as a whole."""
    from tunesmith.evaluate.compare import compare, corrected
    from tunesmith.evaluate.figures import measures_of

    rows = []
    for task in tasks:
        if task.kind == "judge":  # pairs are judged, not compared
            continue
        mine, theirs = (results[task.title] for results in found)
        for measure in measures_of(task, mine):
            if (row := compare(measure, mine, theirs)) is not None:
                rows.append((task.title, measure, row))
    fixed = corrected([(measure, row) for _, measure, row in rows])
    return [(title, measure, row) for (title, measure, _), row in zip(rows, fixed, strict=True)]


def wins_by_task(tasks: Sequence[Task], found: Sequence[ByTask]) -> dict[str, Wins]:
    """What a judge says of pairs, which is kept with the first model's results."""
    from tunesmith.evaluate.judge import wins_of

    judged = {task.title: wins_of(found[0][task.title]) for task in tasks if task.kind == "judge"}
    return {title: one for title, one in judged.items() if one is not None}


def wins_sentence(first: str, second: str, title: str, one: Wins) -> str:
    told = "better" if one.low > 0.5 else "worse" if one.high < 0.5 else None
    verdict = f"{first} is {told} than {second}" if told else f"no difference between {first} and {second} can be told"
    more = ""
    if not told and one.rate != 0.5:
        half = (one.high - one.low) / 2
        needed = math.ceil(one.items * ((1.96 + 0.84) / 1.96 * half / abs(one.rate - 0.5)) ** 2)
        more = f" About {max(1, needed - one.items):,} more questions would tell."
    odd = f" {one.malformed} judgements could not be read." if one.malformed else ""
    rate, equal = (
        f"{100 * value:.1f}% ({100 * low:.1f}% to {100 * high:.1f}%)"
        for value, low, high in (
            (one.rate, one.low, one.high),
            (one.controlled, one.controlled_low, one.controlled_high),
        )
    )
    return (
        f"{title}, by the judge: {first} wins {rate} of {one.items:,} pairs, ties half; at equal length {equal}. Both "
        f"orders agree on {100 * one.consistent:.0f}%. So {verdict}.{more}{odd}"
    )


def summary(first: str, second: str, rows: Sequence[tuple[str, Measure, Difference]]) -> str:
    """The verdict in sentences: what was gained, what was lost, what cannot be told."""
    kinds: dict[str, list[str]] = {}
    for title, measure, row in rows:
        kinds.setdefault(row.verdict, []).append(f"{title} {measure.name}")
    parts = []
    if gained := kinds.get("better"):
        parts.append(f"{first} is better than {second} on {', '.join(gained)}.")
    if lost := kinds.get("worse"):
        parts.append(f"{first} is worse than {second} on {', '.join(lost)}.")
    open_rows = [(title, measure, row) for title, measure, row in rows if row.verdict == "no difference told"]
    if open_rows:
        named = ", ".join(f"{title} {measure.name}" for title, measure, _ in open_rows)
        parts.append(f"No difference can be told on {named}.")
        if more := [(row.needed - row.items, title) for title, _, row in open_rows if row.needed]:
            fewest, title = min(more)
            parts.append(f"If the difference seen is the true one, {fewest:,} more items of {title} would tell it.")
    if same := kinds.get("equal"):
        parts.append(f"Every item came out the same on {', '.join(same)}.")
    return " ".join(parts)


def _difference_json(title: str, measure: Measure, row: Difference) -> dict[str, Any]:
    from tunesmith.evaluate.figures import finite

    return {
        "task": title,
        "measure": measure.name,
        "value": row.first,
        "against": row.second,
        "difference": row.value,
        "low": finite(row.low),
        "high": finite(row.high),
        "p": row.p,
        "verdict": row.verdict,
        "items": row.items,
        "items_to_tell": row.needed,
    }


def _number(measure: Measure, value: float) -> str:
    return f"{100 * value:.1f}%" if measure.is_percentage else f"{value:.4f}"


def _signed(measure: Measure, value: float) -> str:
    return f"{100 * value:+.1f}" if measure.is_percentage else f"{value:+.4f}"


def _interval(measure: Measure, low: float, high: float, *, signed: bool = False) -> str:
    if not math.isfinite(low) or not math.isfinite(high):
        return "-"
    write = _signed if signed else _number
    return f"{write(measure, low)} to {write(measure, high)}"
