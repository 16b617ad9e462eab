"""A run that goes on from a checkpoint of another, in a folder of its own: with other data, or other settings.

What is copied is what a run is continued from: the checkpoint, the plan, what it was begun with, and its history up to
there. `tunesmith train --accept-changes` then does the rest; the run that was branched from stays as it is.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from tunesmith.checkpoint.files import write_atomic
from tunesmith.data import excluded
from tunesmith.disk import sync_folder, writing
from tunesmith.errors import UserError, listed
from tunesmith.run.folder import read_identity, read_plan, write_identity
from tunesmith.train import events, samples

COPIED = ("plan.json", "base.json", "start", "grown_base")
ADVICE = "make room there or choose another output"


@dataclass(frozen=True)
class Branch:
    step: int
    """After which it goes on."""
    settings: Path
    """Its run.yaml."""


def checkpoint_before(folder: Path, step: int) -> int:
    """The last checkpoint that is kept of what the run was before a step; UserError where there is none."""
    names = [path.name for path in (folder / "checkpoints").glob("step-*") if path.is_dir()]
    kept = sorted(int(numbered[1]) for name in names if (numbered := re.fullmatch(r"step-(\d{8,})", name)))
    before = [saved for saved in kept if saved < step]
    if not before:
        there = f"kept are those of steps {listed(kept)}" if kept else "none is kept"
        raise UserError(
            f"{folder} has no checkpoint from before step {step} ({there}); a run keeps more of them with `keep` and "
            "`save_every`. To train without some records from the beginning, set exclude and another output."
        )
    return before[-1]


def branch(folder: Path, before: int, output: Path, exclude: Path | None = None) -> Branch:
    """A new run in `output`, to go on from the last checkpoint before step `before`, without the records that a file
    names."""
    identity, plan = read_identity(folder), read_plan(folder)
    if identity is None or plan is None:
        raise UserError(f"{folder} holds no run that can be branched (run.json or plan.json is missing).")
    if output.exists() and any(output.iterdir() if output.is_dir() else [output]):
        raise UserError(f"{output} is there already; choose another output.")
    if exclude is not None:
        excluded.read(exclude)
    step = checkpoint_before(folder, before)
    settings = {**identity.settings, "output": str(output)}
    with writing(output, ADVICE):
        (output / "checkpoints").mkdir(parents=True, exist_ok=True)
        name = f"step-{step:08}"
        partial = output / "checkpoints" / f".partial-{name}"
        shutil.copytree(folder / "checkpoints" / name, partial)
        for part in COPIED:
            if (folder / part).is_dir():
                shutil.copytree(folder / part, output / part)
            elif (folder / part).is_file():
                shutil.copy2(folder / part, output / part)
        history = [record for record in events.read(folder) if record.get("step", 0) <= step]
        write_atomic(output / events.FILE, "".join(json.dumps(record) + "\n" for record in history).encode())
        kept = [{"step": at, **sample} for at, sample in samples.read(folder).items() if at <= step]
        if kept:
            write_atomic(output / samples.FILE, "".join(json.dumps(sample) + "\n" for sample in kept).encode())
        partial.rename(output / "checkpoints" / name)
        sync_folder(output / "checkpoints")
        if exclude is not None:
            shutil.copy2(exclude, output / excluded.FILE)
            settings["exclude"] = str(output / excluded.FILE)
        said = f"# {folder}, from step {step} on. `tunesmith train {output / 'run.yaml'} --accept-changes` trains it.\n"
        text = said + yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
        write_atomic(output / "run.yaml", text.encode())
    write_identity(output, replace(identity, settings={**identity.settings, "output": str(output)}))
    return Branch(step, output / "run.yaml")
