"""`tunesmith eval`: held-out loss of a trained run, by data set; or tasks, of a run or any model."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunesmith.cli.ranks import RanksOption, ranks_to_start, start_ranks

if TYPE_CHECKING:
    from tunesmith.cli.tasks import TaskOptions
    from tunesmith.evaluate.loss import HeldOut


def command(
    folder: Annotated[
        Path, typer.Argument(metavar="TARGET", help="Folder of a run; with --tasks also a model folder or GGUF file.")
    ],
    data: Annotated[
        list[str] | None, typer.Option("--data", help="Evaluate on these files instead of the run's own `eval`.")
    ] = None,
    base: Annotated[bool, typer.Option("--base", help="Also measure the model as it was before training.")] = False,
    tasks: Annotated[
        list[str] | None,
        typer.Option("--tasks", metavar="FILE,...", help="Tasks: files of records, `general`, or lm-eval:NAME."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="TARGET", help="With --tasks: compare with this model, or with `base`."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="With --tasks: at most this many items of each.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="With --tasks: longest generated answer, in tokens.")] = 512,
    judge: Annotated[
        str | None, typer.Option(metavar="URL", help="With --tasks: OpenAI-compatible API of a judge, up to /v1.")
    ] = None,
    judge_model: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the judge's model.")] = None,
    output_folder: Annotated[
        Path | None, typer.Option("--output", metavar="FOLDER", help="With --tasks: folder for the results of items.")
    ] = None,
    certificate: Annotated[
        bool, typer.Option("--certificate", help="Instead, check what training did, and write RUN/certificate.json.")
    ] = False,
    ranks: RanksOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a run's held-out loss by data set, score any model on tasks, or certify a run."""
    from tunesmith.errors import UserError

    if tasks:
        if data or certificate:
            raise UserError("--tasks goes without --data and --certificate; a data set is a task, as loss:FILE.")
        against = against or ("base" if base else None)
        from tunesmith.cli.tasks import TaskOptions

        asked = TaskOptions(str(folder), tasks, against, limit, max_tokens, output_folder, as_json, judge, judge_model)
        _tasks(asked, ranks)
        return
    if against is not None:
        raise UserError("--against compares two models on tasks; name some with --tasks.")
    _held_out(folder, data, base, certificate, ranks, as_json)


def _tasks(asked: TaskOptions, ranks: int | None) -> None:
    from tunesmith.cli.tasks import evaluate_tasks

    if (count := ranks_to_start(ranks)) == 1:
        evaluate_tasks(asked)
        return
    given = {
        "against": asked.against,
        "limit": asked.limit,
        "max-tokens": asked.max_tokens,
        "output": asked.folder,
        "judge": asked.judge,
        "judge-model": asked.judge_model,
    }
    options = [f"--{name}={value}" for name, value in given.items() if value is not None]
    options += [*(f"--tasks={one}" for one in asked.tasks), *(["--json"] if asked.as_json else [])]
    start_ranks(["eval", asked.target, *options], count)


def _held_out(
    folder: Path, data: list[str] | None, base: bool, certificate: bool, ranks: int | None, as_json: bool
) -> None:
    from tunesmith.cli import output

    output.stage(f"Reading {folder}")
    from tunesmith.config.schema import Dataset
    from tunesmith.errors import UserError
    from tunesmith.run.folder import read_run
    from tunesmith.run.there import check_base_there, run_to_open

    run = read_run(folder)
    if certificate:
        _certify(folder, as_json)
        return
    if data:
        run = run.model_copy(update={"eval": [Dataset(path=path) for path in data], "held_out": 0})
    if not run.eval_texts and not run.held_out:
        raise UserError(f"The run in {folder} has no held-out data; name some with --data FILE.")
    if base:
        check_base_there(folder, run)
    else:
        run_to_open(folder)
    if (count := ranks_to_start(ranks, run.device)) > 1:
        flags = [*(["--base"] if base else []), *(["--json"] if as_json else [])]
        start_ranks(["eval", str(folder), *(f"--data={path}" for path in data or ()), *flags], count)
        return
    from tunesmith.launch.rank_environment import read_rank_environment

    environment = read_rank_environment()
    progress = output.progress if environment.rank == 0 else None
    output.stage("Loading the model")
    from tunesmith.data.recognise import given_by_option
    from tunesmith.objectives import objective_of
    from tunesmith.parallel.ranks import connected
    from tunesmith.run.evaluate import evaluate_run

    named = given_by_option("--data", objective_of(run).records) if data else nullcontext()
    with connected(environment) as others, named:
        before, after, step = evaluate_run(folder, run, with_base=base, progress=progress, ranks=others)
    if environment.rank == 0:
        _show(folder, before, after, step, as_json)


def _show(folder: Path, before: list[HeldOut] | None, after: list[HeldOut], step: int | None, as_json: bool) -> None:
    import math

    from tunesmith.cli import output
    from tunesmith.run.there import why_checkpoint

    base = before is not None
    rows = []
    for index, result in enumerate(after):
        first = before[index].loss if before else None
        row = {"data": result.title, "before": first, "loss": result.loss, "target_tokens": result.target_tokens}
        if result.figures:
            row |= {"figures_before": dict(before[index].figures) if before else None, "figures": dict(result.figures)}
        rows.append(row)
    if as_json:
        output.print_json({"run": str(folder), "checkpoint_step": step, "results": rows})
        return
    if step is not None:
        output.note(why_checkpoint(folder, step))
    figures = [name for name in rows[0].get("figures", ()) if name != "loss"]

    def perplexity(row: dict[str, Any]) -> float:
        return math.exp(min(row["loss"], 50))

    shown = [
        (
            row["data"],
            *([f"{row['before']:.4f}"] if base else []),
            f"{row['loss']:.4f}",
            *(
                [f"{row['figures'][name]:.4f}" if name in row["figures"] else "-" for name in figures]
                or [f"{perplexity(row):.3f}"]
            ),
            f"{row['target_tokens']:,.0f}",
        )
        for row in rows
    ]
    measures = [name.replace("_", " ") for name in figures] or ["perplexity"]
    columns = ("data", *(["before"] if base else []), "loss", *measures, "target tokens")
    output.say(output.table(columns, shown, right=columns[1:]))


def _certify(folder: Path, as_json: bool) -> None:
    from tunesmith.cli import output
    from tunesmith.run.certificate import certify

    made = certify(folder, progress=output.progress)
    checks = made["checks"].items()
    if as_json:
        output.print_json(made)
    else:
        rows = [(name.replace("_", " "), one["verdict"], one["found"]) for name, one in checks]
        output.say(output.table(("check", "verdict", "found"), rows))
    if any(one["verdict"] == "failed" for _, one in checks):
        raise typer.Exit(1)
