"""The folder of a sweep: its variants, each an ordinary run in a folder of its own, and what came of them side by side.

runs/NAME/  VARIANT/      a run for each variant
            sweep.json    what makes each variant different, and what came of it
            sweep.md      the same as a table
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tunesmith.checkpoint.files import write_atomic
from tunesmith.config.sweep import Variant
from tunesmith.disk import writing
from tunesmith.errors import UserError
from tunesmith.run import folder as run_folder
from tunesmith.train import events

TABLE = "sweep.md"
FORMAT = 1
LAST = 10
"""The loss of training is the mean over the last of so many parts of the steps: one step's alone says little."""
COLUMNS = ("variant", "held-out loss", "before", "training loss", "steps", "time", "")


@dataclass(frozen=True)
class Row:
    """What came of a variant, as far as it has got."""

    name: str
    settings: Mapping[str, Any]
    state: str
    """finished, unfinished, failed"""
    steps: int = 0
    before: float | None = None
    held_out: float | None = None
    training: float | None = None
    seconds: float = 0.0
    """What its steps and evaluations took."""
    evaluated: tuple[Any, ...] = ()
    """What it was evaluated on: names and target tokens."""
    preference: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the loss that it was evaluated by."""
    is_best: bool = False
    why: str = ""
    """Why it failed, where it did."""


def check_folder(folder: Path) -> None:
    """UserError where the folder of a sweep is that of a single run."""
    if (folder / "run.json").exists():
        raise UserError(f"output: {folder} holds a single run; set output to another folder for the sweep.")


def is_finished(variant: Variant) -> bool:
    folder = Path(variant.run.output)
    return run_folder.read_summary(folder) is not None and run_folder.lost_of_result(folder) is None


def rows_of(variants: Sequence[Variant], failures: Mapping[str, str] | None = None) -> list[Row]:
    """A row for each variant, by what its folder holds; the best by held-out loss is marked where all have the same
    loss of the same data."""
    rows = [_row(variant, (failures or {}).get(variant.name)) for variant in variants]
    done = [row for row in rows if row.state == "finished" and row.held_out is not None]
    if len(done) < 2 or note_on(rows):
        return rows
    best = min(done, key=lambda row: row.held_out or 0.0)
    return [replace(row, is_best=row is best) for row in rows]


def cells(row: Row) -> tuple[str, ...]:
    """What a table shows of a row, by `COLUMNS`."""
    losses = ("-" if loss is None else f"{loss:.4f}" for loss in (row.held_out, row.before, row.training))
    minutes, seconds = divmod(round(row.seconds), 60)
    remark = "best" if row.is_best else "" if row.state == "finished" else row.state
    return (row.name, *losses, str(row.steps), f"{minutes}:{seconds:02}", remark)


def note_on(rows: Sequence[Row]) -> str | None:
    """Why no variant is the best, where some are finished."""
    done = [row for row in rows if row.state == "finished" and row.held_out is not None]
    if len({row.evaluated for row in done}) > 1:
        return (
            "The variants were not evaluated on the same held-out examples, so no loss is marked as the best; set eval."
        )
    if any(row.preference != done[0].preference for row in done):
        return (
            "The variants' losses are not the same function of a model (their `preference` differs), so none is marked "
            "as the best; compare their accuracy."
        )
    return None


def write(folder: Path, rows: Sequence[Row]) -> None:
    run_folder.write_json(folder / run_folder.SWEEP, {"format": FORMAT, "variants": [asdict(row) for row in rows]})
    lines = [
        f"| {' | '.join(cells_of_row)} |" for cells_of_row in (COLUMNS, ("---",) * len(COLUMNS), *map(cells, rows))
    ]
    failed = [f"{row.name} failed: {row.why}" for row in rows if row.why]
    said = [sentence for sentence in (note_on(rows), *failed) if sentence]
    text = "\n".join([f"# Sweep: {folder.name}", "", *lines, *(f"\n{sentence}" for sentence in said)]) + "\n"
    with writing(folder / TABLE, "make room there or choose another output"):
        write_atomic(folder / TABLE, text.encode())


def _row(variant: Variant, why: str | None) -> Row:
    folder = Path(variant.run.output)
    steps: dict[int, dict[str, Any]] = {}
    evaluations: dict[int, dict[str, Any]] = {}
    for record in events.read(folder):
        if record["event"] == events.Step.kind:
            steps[record["step"]] = record
        elif record["event"] == events.Evaluation.kind:
            evaluations[record["step"]] = record
    last = max(steps, default=0)
    late = [record for step, record in steps.items() if step > last - max(1, last // LAST)]
    weight = sum(record["target_tokens"] for record in late)
    training = sum(record["loss"] * record["target_tokens"] for record in late) / weight if weight else None
    final = evaluations.get(last)
    return Row(
        variant.name,
        variant.changes,
        "failed" if why else "finished" if is_finished(variant) else "unfinished",
        steps=last,
        before=evaluations[0]["loss"] if 0 in evaluations else None,
        held_out=final["loss"] if final else None,
        training=training,
        seconds=round(sum(record["seconds"] for record in (*steps.values(), *evaluations.values())), 3),
        evaluated=(*sorted(final["losses"]), final["target_tokens"]) if final else (),
        preference=variant.run.preference.model_dump(),
        why=why or "",
    )
