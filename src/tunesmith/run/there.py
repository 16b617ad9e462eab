"""Which model is opened of a run, and whether it is there: asked before anything is imported that takes seconds."""

from __future__ import annotations

from pathlib import Path

from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.plan.models import check_there
from tunesmith.run.folder import has_result, lost_of_result, read_run


def run_to_open(folder: Path) -> Run:
    """The settings of the run in `folder` with the model that is opened: its own where it gave a whole one, else its
    base, which must be there."""
    run = read_run(folder)
    own = with_own_model(folder, run)
    if own is run:
        check_base_there(folder, run)
    return own


def with_own_model(folder: Path, run: Run) -> Run:
    """The settings with the whole model that the run in `folder` gave as their model, if it gave one: what it was
    trained from may be gone then."""
    return run.model_copy(update={"model": str(folder / "model")}) if has_result(folder, "model") else run


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


def why_checkpoint(folder: Path, step: int) -> str:
    """What to say where the run in `folder` is opened as its checkpoint of this step, and not as its result."""
    if (lost := lost_of_result(folder)) is None:
        return f"The run is not finished; this is its checkpoint of step {step}."
    return (
        f"The run was finished, but {lost} is gone; this is its checkpoint of step {step}, and `tunesmith train` makes "
        "the result again."
    )


def no_result(folder: Path, what: str = "trained weights") -> UserError:
    """What to say where nothing that the run in `folder` has trained can be opened."""
    if (lost := lost_of_result(folder)) is None:
        return UserError(f"{folder} holds no {what} yet; run `tunesmith train` first.")
    return UserError(
        f"The run in {folder} was finished, but {lost} is gone; put it back, or `tunesmith train` makes it again."
    )
