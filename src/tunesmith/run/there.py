"""Which model is opened of a run, and whether it is there: asked before anything is imported that takes seconds."""

from __future__ import annotations

from pathlib import Path

from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.plan.models import check_there
from tunesmith.run.folder import read_run


def run_to_open(folder: Path) -> Run:
    """The settings of the run in `folder` with the model that is opened: its own where it gave a whole one, else its
    base, which must be there."""
    run = read_run(folder)
    own = with_own_model(folder, run)
    if own is run:
        check_base_there(folder, run)
    return own


def with_own_model(folder: Path, run: Run) -> Run:
    """The same with the whole model that the run in `folder` gave as its model, if it gave one: what it was trained
    from may be gone then."""
    is_whole = (folder / "model" / "config.json").exists()
    return run.model_copy(update={"model": str(folder / "model")}) if is_whole else run


def check_base_there(folder: Path, run: Run) -> None:
    """UserError where the model that the run in `folder` was trained over is not to be had any more."""
    try:
        check_there(run.model)
    except UserError as error:
        why = str(error).removeprefix("model: ").partition("; ")[0].rstrip(".")
        raise UserError(
            f"The run in {folder} needs the model that it was trained over, but {why}; put it back, or write where it "
            f"is as `model` in {folder / 'run.json'}."
        ) from error
