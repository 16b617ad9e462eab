"""Starting and resuming runs: `tunesmith check`, then `plan`, then `train`, each a process of its own.

Settings files go by ids, as runs do: those that lie below the folder in which the pages were started are found, and
nothing else can be started. A run that was started here goes on when the pages end.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from tunesmith.checkpoint.files import write_atomic
from tunesmith.config.load import load
from tunesmith.disk import writing
from tunesmith.errors import UserError
from tunesmith.ui.read import is_held, read_settled, text
from tunesmith.ui.walk import file_id, walk

DEPTH = 3
"""Folders below the one the pages were started in, in which settings files are looked for."""
MOST_FOLDERS, MOST_FILES, LARGEST = 2_000, 200, 1 << 16
TAIL = 4_000
"""Characters that are shown of what a process has said."""
LOGS = ".tunesmith-ui"
"""Below the folder of runs: what processes have said."""
UNDER_WAY = 4
"""Runs that may be on their way to starting at once."""
Phase = Literal["checking", "planning", "training", "ended", "refused"]


@dataclass
class Start:
    """A run on its way, or what came of it."""

    id: str
    name: str
    log: Path
    output: Path
    phase: Phase = "checking"
    said: str = ""
    code: int | None = None
    began: float = field(default_factory=time.time)

    @property
    def is_under_way(self) -> bool:
        return self.phase in ("checking", "planning", "training")

    def shown(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": text(self.name),
            "phase": self.phase,
            "said": text(self.said or _tail(self.log)),
            "code": self.code,
            "began": self.began,
        }


class Starter:
    """Safe to use from several threads."""

    def __init__(self, runs: Path, here: Path | None = None):
        self.here, self._logs = Path(here or Path.cwd()), Path(runs) / LOGS
        self._lock = threading.Lock()
        self._starts: dict[str, Start] = {}
        self._changes = 0

    @property
    def signature(self) -> int:
        """Differs when a start has come further."""
        return self._changes

    def configs(self) -> list[dict[str, Any]]:
        """The settings files that can be started, with what is wrong with them."""
        found = []
        for path in self._files():
            shown = {"id": file_id(path), "name": text(os.path.relpath(path, self.here))}
            try:
                run = load(path).run
                more = {"model": text(run.model), "method": run.method, "output": text(run.output), "problem": None}
            except UserError as error:
                more = {"model": "", "method": "", "output": "", "problem": text(self._named(error))}
            found.append(shown | more)
        return found

    def starts(self) -> list[dict[str, Any]]:
        """The newest first."""
        with self._lock:
            made = sorted(self._starts.values(), key=lambda one: -one.began)
        return [one.shown() for one in made[:20]]

    def start(self, config: str) -> dict[str, Any]:
        """Check, plan and train what is in a settings file."""
        path = next((one for one in self._files() if file_id(one) == config), None)
        if path is None:
            raise UserError("There is no such settings file any more.")
        run = load(path).run
        return self._begin(path, self.here / run.output, os.path.relpath(path, self.here))

    def resume(self, folder: Path, name: str) -> dict[str, Any]:
        """Go on with a run by the settings that it has kept."""
        settled = read_settled(folder)
        if settled.summary:
            raise UserError("This run is finished.")
        settings = settled.settings
        output = settings.get("output")
        if not isinstance(output, str) or not _is_same(self.here / output, folder):
            raise UserError(
                "This run was started from another directory, by which its settings name files; continue it there, by "
                "`tunesmith train`, or start `tunesmith ui` there."
            )
        path = folder / "resumed.yaml"
        with writing(path, "make room there"):
            write_atomic(path, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).encode())
        load(path)
        return self._begin(path, folder, name)

    def _begin(self, path: Path, output: Path, name: str) -> dict[str, Any]:
        if output.exists() and is_held(output):
            raise UserError("This run is running already.")
        with self._lock:
            under_way = [one for one in self._starts.values() if one.is_under_way]
            if any(_is_same(one.output, output) for one in under_way):
                raise UserError("This run is starting already.")
            if sum(one.phase != "training" for one in under_way) >= UNDER_WAY:
                raise UserError("Other runs are starting; wait until they train.")
            id = f"{len(self._starts):06}"
            with writing(self._logs, "make room there"):
                self._logs.mkdir(parents=True, exist_ok=True)
            made = Start(id, name, self._logs / f"{int(time.time())}-{id}.log", output)
            self._starts[id] = made
        threading.Thread(target=self._work, args=(made, path), name="start", daemon=True).start()
        return made.shown()

    def _work(self, start: Start, path: Path) -> None:
        try:
            self._enter(start, "checking")
            if self._run(start, ["check", str(path), "--examples", "0"]):
                self._enter(start, "refused")
                return
            self._enter(start, "planning")
            if self._run(start, ["plan", str(path), "--json"], shows=False):
                self._enter(start, "refused")
                return
            planned = json.loads(start.log.with_suffix(".json").read_text(encoding="utf-8"))
            if not planned.get("fits"):
                more = " ".join(planned.get("changes_that_fit", [])[:3])
                start.said = f"It does not fit into the memory of this machine. {more}"
                self._enter(start, "refused")
                return
            self._enter(start, "training")
            start.code = self._run(start, ["train", str(path)])
            self._enter(start, "ended")
        except (OSError, ValueError) as error:
            start.said = f"It could not be started: {error}"
            self._enter(start, "refused")

    def _enter(self, start: Start, phase: Phase) -> None:
        start.phase = phase
        self._changes += 1

    def _run(self, start: Start, arguments: Sequence[str], *, shows: bool = True) -> int:
        """Runs a command in a session of its own, so that Ctrl-C in the terminal of the pages ends the pages alone."""
        out = start.log if shows else start.log.with_suffix(".json")
        with out.open("ab") as said, start.log.open("ab") as complaints:
            process = subprocess.Popen(
                [sys.executable, "-m", "tunesmith", *arguments],
                cwd=self.here,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=complaints,
                start_new_session=True,
            )
            return process.wait()

    def _named(self, error: UserError) -> str:
        """The error with files named as in the list, by where they lie below the folder."""
        return str(error).replace(f"{self.here}{os.sep}", "")

    def _files(self) -> list[Path]:
        below = walk(self.here, depth=DEPTH, folders=MOST_FOLDERS)
        named = (
            Path(one.path)
            for _, entries in below
            for one in entries
            if one.name.endswith((".yaml", ".yml")) and not one.name.startswith(".") and not one.is_symlink()
        )
        return list(itertools.islice(filter(_is_settings, named), MOST_FILES))


def _is_settings(path: Path) -> bool:
    """It names a model and data, as other YAML files do not."""
    try:
        if path.stat().st_size > LARGEST:
            return False
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    keys = {line.split(":")[0].strip(' "{') for line in lines if ":" in line and not line.startswith("  ")}
    return {"model", "data"} <= keys


def _is_same(a: Path, b: Path) -> bool:
    return os.path.realpath(a) == os.path.realpath(b)


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - 2 * TAIL))
            return stream.read().decode(errors="replace")[-TAIL:]
    except OSError:
        return ""
