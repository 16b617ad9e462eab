"""The base of a run, as it was read when training began: by this, what comes later knows it again.

runs/NAME/base.json has the base's config and a hash of each of its tensors. Resuming, evaluating, talking and merging
read the base anyway; they compare what they have read, whole, with what was trained over.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.model.content import Content, differences
from tunesmith.plan.models import read_config
from tunesmith.run.folder import read_json, write_json

FILE = "base.json"


def check_base(folder: Path, run: Run, content: Content) -> None:
    """UserError where what was read of the run's model is not what the run in `folder` was trained over."""
    before = _kept(folder)
    if before is None:  # of a version that kept nothing
        return
    if found := differences(before, _described(run, content), content.files):
        raise UserError(
            f"model: {run.model} is not the base that the run in {folder} was trained over: {'; '.join(found)}. Put "
            "that base back; over another one the trained weights mean nothing."
        )


def keep_base(folder: Path, run: Run, content: Content, *, is_continued: bool, accept_changes: bool) -> None:
    """Have the run in `folder` remember its base. UserError where it is continued over another one, unless that is
    accepted."""
    now = _described(run, content)
    before = _kept(folder) if is_continued else None
    if before is not None and not accept_changes and (found := differences(before, now, content.files)):
        raise UserError(
            f"The run in {folder} was started over another base: {'; '.join(found)}. Put it back, choose another "
            "output, or go on with the changes by `tunesmith train --accept-changes`."
        )
    if before != now:
        write_json(folder / FILE, now)


def _described(run: Run, content: Content) -> dict[str, Any]:
    config = json.loads(json.dumps(read_config(run.model), default=str), parse_constant=str)
    return {"config": config, "tensors": content.tensors()}


def _kept(folder: Path) -> dict[str, Any] | None:
    found = read_json(folder / FILE)
    match found:
        case None | {"config": dict(), "tensors": dict()}:
            return found
    raise UserError(f"{folder / FILE} is damaged; remove it, and the base is not compared with what it was.")
