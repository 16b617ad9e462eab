"""A folder of runs: which there are, by ids, and what is known of each; read again only where files have changed.

An id is a hash of where a run lies below the folder. Whatever a browser asks for is looked up among the runs that were
found, so that no path of its making is ever opened.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.evaluate import verdicts
from tunesmith.train import events
from tunesmith.ui.labels import FILE as LABELS
from tunesmith.ui.labels import read_labels
from tunesmith.ui.log import Digest, GrowingLog, digest, glance
from tunesmith.ui.read import PROFILE, Settled, differences, is_held, overview, page, read_settled, text
from tunesmith.ui.walk import is_run, walk

DEPTH = 4
"""Folders below the folder of runs in which runs are looked for."""
MOST_FOLDERS = 20_000
"""That are looked at, should somebody name a whole disk."""
FRESH = 1.0
"""Seconds for which the runs that were found count as all there are."""
OPEN_LOGS = 16
"""Histories that are kept in memory."""

Signature = tuple[Any, ...]


@dataclass(frozen=True)
class FoundRun:
    name: str
    folder: Path


class Runs:
    """Safe to use from several threads."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self._lock = threading.Lock()
        self._found: dict[str, FoundRun] = {}
        self._found_at = float("-inf")
        self._known: dict[str, tuple[Signature, Digest, Settled]] = {}
        self._logs: OrderedDict[str, GrowingLog] = OrderedDict()
        self._incomplete: deque[str] = deque()
        self._is_completing = False
        self._completed = 0
        self._labelled: dict[str, tuple[Any, dict[str, Any]]] = {}

    def find(self) -> dict[str, FoundRun]:
        """The runs that there are now, by id."""
        with self._lock:
            if time.monotonic() - self._found_at > FRESH:
                self._found = {run_id(one.name): one for one in find_runs(self.folder)}
                self._found_at = time.monotonic()
                for gone in set(self._known.copy()) - self._found.keys():  # in place: another thread may add
                    self._known.pop(gone, None)
            return self._found

    def get(self, run: str) -> FoundRun | None:
        found = self.find().get(run)
        return found if found is not None and (found.folder / "run.json").exists() else None  # deleted a moment ago

    def listing(self) -> list[dict[str, Any]]:
        """What the list says of each run; those that run first, then the newest."""
        rows = [
            {"id": run, "name": text(found.name), **self._overview(run, found), **self._labels(run, found)}
            for run, found in self.find().items()
        ]
        self._begin_completing()
        return sorted(
            rows, key=lambda row: (row["state"] not in ("running", "stopping"), -(row["last"] or 0.0), row["name"])
        )

    def page(self, run: str, *, steps: tuple[int, int] | None = None) -> dict[str, Any] | None:
        found = self.get(run)
        if found is None:
            return None
        with self._lock:
            log = self._logs.pop(run, None) or GrowingLog(found.folder)
            self._logs[run] = log
            while len(self._logs) > OPEN_LOGS:
                self._logs.popitem(last=False)
            log.update()
            shown = page(found.folder, log, steps=steps) | _as_text(read_labels(found.folder))
            return {"id": run, "name": text(found.name), **shown}

    def compare(self, runs: list[str]) -> dict[str, Any] | None:
        pages = [self.page(run) for run in runs]
        if any(one is None for one in pages):
            return None
        return {
            "runs": pages,
            "differences": differences({one["id"]: one["settings"] for one in pages if one is not None}),
        }

    def signature(self, run: str | None = None) -> Signature:
        """Differs from an earlier one when there is something new to show, of one run or of any."""
        found = self.find()
        wanted = found if run is None else {run: found[run]} if run in found else {}
        seen = tuple((one, signature_of(its.folder), is_held(its.folder)) for one, its in wanted.items())
        return (self._completed, *seen) if run is None else seen

    def _overview(self, run: str, found: FoundRun) -> dict[str, Any]:
        now = signature_of(found.folder)
        known = self._known.get(run)
        if known is None or known[0] != now:
            read = glance if known is None else digest  # a run that is known changes by itself, not with 200 others
            known = (now, read(found.folder), read_settled(found.folder))
            self._known[run] = known
            if not known[1].is_exact:
                self._incomplete.append(run)
        return overview(found.folder, known[1], known[2])

    def _labels(self, run: str, found: FoundRun) -> dict[str, Any]:
        now = _status(found.folder / LABELS)
        known = self._labelled.get(run)
        if known is None or known[0] != now:
            known = (now, _as_text(read_labels(found.folder)) if now else {"tags": [], "is_archived": False})
            self._labelled[run] = known
        return known[1]

    def _begin_completing(self) -> None:
        with self._lock:
            if self._incomplete and not self._is_completing:
                self._is_completing = True
                threading.Thread(target=self._complete, name="digests", daemon=True).start()

    def _complete(self) -> None:
        """Read whole what was only glanced at."""
        while True:
            with self._lock:
                if not self._incomplete:
                    self._is_completing = False
                    return
                run = self._incomplete.popleft()
                found = self._found.get(run)
            if found is not None:
                self._known[run] = (signature_of(found.folder), digest(found.folder), read_settled(found.folder))
                self._completed += 1


def _as_text(labels: dict[str, Any]) -> dict[str, Any]:
    return labels | {"tags": [text(one) for one in labels["tags"]]}


def run_id(name: str) -> str:
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:16]


def signature_of(folder: Path) -> Signature:
    """The signature of the files that a page is made from, which changes with them."""
    names = (events.FILE, "run.json", "plan.json", "summary.json", f"evaluations/{verdicts.FILE}", PROFILE, LABELS)
    return tuple(_status(folder / name) for name in names)


def _status(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def find_runs(folder: Path) -> list[FoundRun]:
    """Every folder with a run.json in or below `folder`; those that symbolic links lead to are not looked at."""
    found = []
    for here, entries in walk(folder, depth=DEPTH, folders=MOST_FOLDERS, ends=is_run):
        if is_run(entries):
            name = here.resolve().name if here == Path(folder) else os.path.relpath(here, folder)
            found.append(FoundRun(name, here))
    return found
