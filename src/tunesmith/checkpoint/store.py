"""Checkpoints that can be trusted: killed at any instant, a run loses nothing that `save` has acknowledged.

A checkpoint is a folder `step-00000123`: tensors in safetensors files, `state.json`, and `manifest.json`,
written last, with size and checksum of each file and of itself. It is written under a `.partial-` name, synced,
read back from the disk, and only then renamed, so a folder without that suffix is whole unless the disk damaged it;
that is checked before anything is loaded or counted. The manifest also names the lineage (a digest of all that
determines the run's course): checkpoints of another lineage are left alone. Pickle is not used anywhere.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import mmap
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from tunesmith import disk
from tunesmith.checkpoint.codec import (
    FORMAT,
    JSON,
    CheckedFile,
    Damaged,
    Room,
    ShardSlice,
    encode_manifest,
    encode_state,
    holds_any,
    is_finite,
    read_manifest,
    take_rows,
    uncovered,
    verify,
    write_tensors,
)
from tunesmith.checkpoint.files import DIGEST, describe, make_folder, remove, unique, write_new
from tunesmith.checkpoint.lock import free_lock, is_abandoned, take_folder_lock
from tunesmith.checkpoint.room import with_slack
from tunesmith.disk import sync_folder
from tunesmith.errors import UserError, listed

Copy = Callable[[torch.Tensor], torch.Tensor]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    step: int
    path: Path
    lineage: str
    metric: float | None
    """Held-out loss at this step, where it was measured; lower is better."""
    measured_on: str = ""
    """Which data it was measured on; metrics of other data are not compared. Empty: nobody said."""


Measured = tuple[float | None, str]
"""A checkpoint's metric, and what it was measured on."""


class Together(Protocol):
    """The processes that write one checkpoint; `parallel.ranks.Ranks` is one."""

    @property
    def rank(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def is_first(self) -> bool: ...
    def gather(self, text: str) -> list[str]: ...


class Saving(NamedTuple):
    """A checkpoint that has begun. `write` speaks to nobody and may run in a thread of its own; then `finish`, by all
    processes that take part, says whether it is on the disk."""

    write: Callable[[], None]
    finish: Callable[[], Checkpoint | bool | None]


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that training does not change, pinned where it comes from a GPU: that is as fast as the link allows, and
    PyTorch keeps the memory for the next one. It begins at a page, so that it is written without a further copy."""
    if tensor.is_cuda:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    else:
        memory = torch.empty(tensor.nbytes + mmap.PAGESIZE, dtype=torch.uint8)
        start = -memory.data_ptr() % mmap.PAGESIZE
        copy = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor.detach())


def itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class CheckpointStore:
    """The checkpoints of one lineage in `folder`: the newest `keep`, and the best one by metric.

    Those of other lineages are left alone, which a warning says unless they are `relatives`.
    """

    def __init__(
        self,
        folder: Path,
        lineage: str,
        *,
        keep: int = 2,
        warn: Callable[[str], None] = log.warning,
        relatives: Collection[str] = (),
        leave: int = 0,
    ):
        """`leave`: bytes of the disk that checkpoints leave free, for the result."""
        if keep < 1:
            raise ValueError(f"keep is {keep}, but at least one checkpoint must be kept")
        self.folder = Path(folder)
        self.lineage = lineage
        self._keep = keep
        self._relatives = relatives
        self._leave = leave
        self._warn = warn
        self._warned: set[str] = set()
        self._verified: dict[Path, tuple] = {}

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        state: Mapping[str, JSON],
        *,
        metric: float | None = None,
        measured_on: str = "",
    ) -> Checkpoint | None:
        """Write a checkpoint; when this returns one, it is on the disk, read back and found right.

        What the file system refuses (no room, read-only, no permission) costs a warning and gives None: try
        again later. NaN and infinity, in the tensors, the state or the metric, are a UserError.
        """
        saving = self.begin(step, tensors, state, metric=metric, measured_on=measured_on)
        saving.write()
        return saving.finish()

    def begin(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        state: Mapping[str, JSON],
        *,
        metric: float | None = None,
        measured_on: str = "",
        copy: Copy = itself,
    ) -> Saving:
        """`save` in two parts, of which the first may run beside other work on tensors that are copied by `copy`."""
        if bad := _first_not_finite(tensors):
            raise UserError(_not_finite(bad, step))
        if metric is not None and not math.isfinite(metric):
            raise UserError(f"the metric is {metric} at step {step}, so this state was not saved")
        metric = None if metric is None else float(metric)
        copies, text = {name: copy(tensor) for name, tensor in tensors.items()}, encode_state(state)
        outcome: list[Checkpoint | Exception] = []

        def write() -> None:
            try:
                outcome.append(self._write(step, copies, text, (metric, measured_on)))
            except (OSError, Damaged) as error:
                outcome.append(error)

        def finish() -> Checkpoint | None:
            (found,) = outcome
            if isinstance(found, Checkpoint):
                self._tidy_up(found)
                return found
            self._warn_unwritten(step, describe(found))
            return None

        return Saving(write, finish)

    def begin_on_all_ranks(
        self,
        step: int,
        parts: Mapping[str, ShardSlice],
        names: Collection[str],
        state: Mapping[str, JSON],
        together: Together,
        *,
        metric: float | None = None,
        measured_on: str = "",
        copy: Copy = itself,
    ) -> Saving:
        """Like `begin`, by several processes, each with its own rows of the tensors `names`, into a file of its own.

        The first one makes the folder, and moves it into place when all have written and read back their files.
        `finish` says whether the checkpoint is on the disk, the same to all; the folder must be one for all of them.
        """
        tensors = {key: rows.tensor for key, rows in parts.items()}
        if bad := next(filter(None, together.gather(_first_not_finite(tensors))), ""):
            raise UserError(_not_finite(bad, step))
        sizes = together.gather(str(sum(tensor.nbytes for tensor in tensors.values())))
        partial, lock, problem = None, None, ""
        text = encode_state(state)
        try:
            if together.is_first:
                partial, lock = self._begin(step, sum(map(int, sizes)) + len(text))
        except OSError as error:
            problem = describe(error)
        name = together.gather(partial.name if partial else "")[0]
        copies = {key: copy(tensor) for key, tensor in tensors.items()} if name else {}
        places = {key: [rows.start, rows.total] for key, rows in parts.items() if rows.total is not None}
        held = {key: [len(rows.tensor) if rows.total is not None else 1, rows.total] for key, rows in parts.items()}
        files: dict[str, tuple[int, str]] = {}

        def write() -> None:
            nonlocal problem
            if not name:
                return
            try:
                stem = f"rank-{together.rank:05d}-of-{together.count:05d}"
                files.update(write_tensors(self.folder / name, stem, copies, places))
            except (OSError, Damaged) as error:
                problem = describe(error)

        def finish() -> bool:
            said = [json.loads(one) for one in together.gather(json.dumps([problem, files, held]))]
            is_saved = False
            if together.is_first:
                problems, theirs, rows = zip(*said, strict=True)
                trouble = next(filter(None, problems), "") or uncovered(set(names), rows)
                written = {key: tuple(value) for one in theirs for key, value in one.items()}
                is_saved = self._commit_or_warn(step, partial, lock, trouble, written, text, (metric, measured_on))
            return together.gather("saved" if is_saved else "")[0] == "saved"

        return Saving(write, finish)

    def _commit_or_warn(
        self,
        step: int,
        partial: Path | None,
        lock: int | None,
        trouble: str,
        tensors: dict[str, tuple[int, str]],
        state: bytes,
        measured: Measured,
    ) -> bool:
        """By the first of several processes, when all have written: whether there is a checkpoint now. `trouble`: why
        there can be none."""
        checkpoint = None
        try:
            if partial is not None and not trouble:
                checkpoint = self._commit(step, partial, tensors, state, measured)
        except (OSError, Damaged) as error:
            trouble = describe(error)
        finally:
            if partial is not None and checkpoint is None:
                shutil.rmtree(partial, ignore_errors=True)
            free_lock(lock)
        if checkpoint is None:
            self._warn_unwritten(step, trouble)
            return False
        self._tidy_up(checkpoint)
        return True

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole, every byte of it read; damaged ones are named in a warning."""
        self._clean()
        self._verified.clear()
        return next((found for found in self._find() if self._is_whole(found)), None)

    def newest_step(self) -> int | None:
        """Of the checkpoints that the run may continue from, by their manifests alone."""
        steps = []
        with contextlib.suppress(UnreadableFolder):
            for path in self._entries():
                with contextlib.suppress(OSError, Damaged):
                    if match := _NAME.fullmatch(path.name):
                        manifest = read_manifest(path, int(match[1]))
                        if manifest["lineage"] in (self.lineage, *self._relatives):
                            steps.append(manifest["step"])
        return max(steps, default=None)

    def all(self) -> list[Checkpoint]:
        """The whole checkpoints of this lineage, oldest first."""
        by_step: dict[int, Checkpoint] = {}
        for found in self._find():
            if found.step not in by_step and self._is_whole(found):
                by_step[found.step] = found
        return [by_step[step] for step in sorted(by_step)]

    def best(self) -> Checkpoint | None:
        """The whole checkpoint with the lowest metric on the data that the newest one was measured on; of equals the
        earliest."""
        return next((found for found in _by_metric(self._find()) if self._is_whole(found)), None)

    def load(self, checkpoint: Checkpoint) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors (on the CPU) and state; exactly the bytes that are checked are the bytes that are used."""
        found, state = self.load_rows(checkpoint, lambda _: None)
        return {name: rows.tensor for name, rows in found.items()}, state

    def load_rows(
        self,
        checkpoint: Checkpoint,
        wanted: Callable[[str], tuple[int, int] | None],
        room: Room = lambda _, shape, dtype: torch.empty(shape, dtype=dtype),
    ) -> tuple[dict[str, ShardSlice], dict[str, Any]]:
        """Like `load`, but of each tensor the rows from one number to another that are `wanted`, or all (None), read
        into the tensor that `room` gives for its name, shape and dtype.

        Files that hold none of them are not read; of the others, nothing but these rows is in memory. Where this fails,
        rooms may hold what is damaged.
        """
        found: dict[str, ShardSlice] = {}
        missing: dict[str, int] = {}
        state: dict[str, Any] = {}
        try:
            manifest = read_manifest(checkpoint.path, checkpoint.step)
            if manifest["lineage"] != self.lineage:
                raise Damaged("it belongs to a run with other settings, data or model")
            for name, expected in manifest["files"].items():
                file = checkpoint.path / name
                if name == "state.json":
                    with CheckedFile(file, expected) as opened:
                        text = opened.read()
                    state = json.loads(text)
                elif holds_any(file, wanted):
                    with CheckedFile(file, expected) as opened:
                        take_rows(opened, wanted, room, found, missing)
            if absent := [name for name, count in missing.items() if count > 0]:
                raise Damaged(f"rows of {absent[0]} are missing")
        except (OSError, Damaged) as error:
            raise UserError(
                f"the checkpoint {checkpoint.path} cannot be loaded: {describe(error)}; "
                "`tunesmith train` again continues from the newest one that is whole"
            ) from error
        return found, state

    def _write(self, step: int, tensors: Mapping[str, torch.Tensor], state: bytes, measured: Measured) -> Checkpoint:
        partial, lock = self._begin(step, sum(tensor.nbytes for tensor in tensors.values()) + len(state))
        try:
            return self._commit(step, partial, write_tensors(partial, "tensors", tensors), state, measured)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        finally:
            free_lock(lock)

    def _begin(self, step: int, size: int) -> tuple[Path, int | None]:
        """A folder to write a checkpoint of so many bytes into, and the lock that shows that somebody does."""
        make_folder(self.folder)
        self._clean()
        need, free = with_slack(size), disk.free(self.folder)
        if free is not None and free < need + self._leave:
            besides = f", the result {disk.size(self._leave)}" if self._leave else ""
            raise OSError(errno.ENOSPC, f"it needs {disk.size(need)}{besides}, and {disk.size(free)} are free")
        partial = self.folder / f"step-{step:08d}.partial-{unique()}"
        partial.mkdir()
        try:
            return partial, take_folder_lock(partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def _commit(
        self, step: int, partial: Path, tensors: dict[str, tuple[int, str]], state: bytes, measured: Measured
    ) -> Checkpoint:
        """Complete a folder whose tensors are written and read back, and move it into place."""
        target = self.folder / f"step-{step:08d}"
        files = {**tensors, "state.json": write_new(partial / "state.json", [state])}
        manifest = {
            "format": FORMAT,
            "step": step,
            "lineage": self.lineage,
            "metric": measured[0],
            "measured_on": measured[1],
            "files": {name: {"size": size, DIGEST: digest} for name, (size, digest) in files.items()},
        }
        write_new(partial / "manifest.json", [encode_manifest(manifest)])
        sync_folder(partial)
        verify(partial, step, known=tensors)
        if os.path.lexists(target):
            # Whatever is in the way stays whole, and findable by its lineage, until ours is in place.
            target.rename(self.folder / f"{target.name}.aside-{secrets.token_hex(4)}")
        partial.rename(target)
        sync_folder(self.folder)
        self._verified[target] = _signature(target)
        return Checkpoint(step, target, self.lineage, *measured)

    def _warn_unwritten(self, step: int, problem: str) -> None:
        older = self.newest_step()
        kept = "there is none before it" if older is None else f"the one of step {older} is kept"
        self._warn(f"No checkpoint was written at step {step} in {self.folder}: {problem}; {kept}.")

    def _tidy_up(self, new: Checkpoint) -> None:
        try:
            self._retain(new)
        except OSError as error:
            self._warn(f"Old checkpoints in {self.folder} could not be tidied up: {describe(error)}.")

    def _retain(self, new: Checkpoint) -> None:
        """Remove what is older than the newest `keep` whole ones, neither the best nor just written."""
        found = self._find()
        newest: list[Checkpoint] = []
        for candidate in found:
            if len(newest) == self._keep:
                break
            if all(candidate.step != other.step for other in newest) and self._problem(candidate) is None:
                newest.append(candidate)
        best = next((c for c in _by_metric(found) if self._problem(c) is None), new)
        kept = [new, best, *newest]
        oldest = newest[-1].step if len(newest) == self._keep else 0
        for candidate in found:
            is_surplus = candidate.step < oldest or any(candidate.step == other.step for other in kept)
            if is_surplus and all(candidate.path != other.path for other in kept):
                trash = self.folder / f".trash-{unique()}"
                candidate.path.rename(trash)  # half-removed, it must not bear a checkpoint's name
                sync_folder(self.folder)
                remove(trash)

    def _find(self) -> list[Checkpoint]:
        """Checkpoints of this lineage, newest first, by their manifests alone."""
        found, others = [], []
        for path in self._entries():
            match = _NAME.fullmatch(path.name)
            if not match or path.name.split(".")[0] != f"step-{int(match[1]):08d}":
                continue
            try:
                manifest = read_manifest(path, int(match[1]))
            except (OSError, Damaged) as error:
                self._report(path, error)
                continue
            if manifest["lineage"] == self.lineage:
                measured = manifest["metric"], manifest.get("measured_on", "")
                found.append(Checkpoint(manifest["step"], path, self.lineage, *measured))
            elif manifest["lineage"] not in self._relatives:
                others.append(path.name)
        if others:
            self._warn_once(
                f"Checkpoints of a run with other settings, data or model are left alone in {self.folder}: "
                f"{listed(sorted(others))}."
            )
        # Of two for one step, the one set aside is the older.
        return sorted(found, key=lambda c: (-c.step, ".aside-" in c.path.name, c.path.name))

    def _entries(self) -> list[Path]:
        try:
            return list(self.folder.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UnreadableFolder(f"the checkpoints in {self.folder} cannot be listed: {describe(error)}") from error

    def _problem(self, checkpoint: Checkpoint) -> str | None:
        """What is wrong with a checkpoint, read in full once for each state of its files."""
        try:
            signature = _signature(checkpoint.path)
            if self._verified.get(checkpoint.path) != signature:
                verify(checkpoint.path, checkpoint.step)
                self._verified[checkpoint.path] = signature
        except Damaged as error:
            self._report(checkpoint.path, error)
            return str(error)
        return None

    def _is_whole(self, checkpoint: Checkpoint) -> bool:
        try:
            return self._problem(checkpoint) is None
        except OSError as error:
            self._report(checkpoint.path, error)
            return False

    def _report(self, path: Path, error: Exception) -> None:
        if os.path.lexists(path):  # else another process has just removed or renamed it
            self._warn_once(f"The checkpoint {path} is damaged and not used: {describe(error)}.")

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            self._warn(message)

    def _clean(self) -> None:
        """Remove what killed processes have left half written or half removed."""
        for path in self._entries():
            partial = _PARTIAL.fullmatch(path.name)
            if _TRASH.fullmatch(path.name) or (partial and is_abandoned(path, int(partial[1]))):
                try:
                    remove(path)
                except OSError as error:
                    self._warn_once(f"The leftover {path} could not be removed: {describe(error)}.")


class UnreadableFolder(UserError, OSError):
    """The folder is there and cannot be listed: `save` treats it as a failed write, resuming must not."""


_NAME = re.compile(r"step-(\d{8,})(?:\.aside-[0-9a-f]{8})?", re.ASCII)
_PARTIAL = re.compile(r"step-\d{8,}\.partial-([1-9]\d{0,8})-[0-9a-f]{8}", re.ASCII)
_TRASH = re.compile(r"\.trash-[1-9]\d{0,8}-[0-9a-f]{8}", re.ASCII)


def _first_not_finite(tensors: Mapping[str, torch.Tensor]) -> str:
    """The name of the first tensor with NaN or infinity; empty where there is none."""
    return next((name for name, tensor in tensors.items() if not is_finite(tensor)), "")


def _not_finite(name: str, step: int) -> str:
    return (
        f"{name} holds NaN or infinite values at step {step}, so this state was not saved; continue from the last "
        "checkpoint with a lower learning rate or other data"
    )


def _signature(path: Path) -> tuple:
    """Changes whenever a file of the folder is written or replaced."""
    stats = [(entry.name, entry.stat()) for entry in sorted(path.iterdir())]
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)


def _by_metric(checkpoints: list[Checkpoint]) -> list[Checkpoint]:
    """From the best one on; those that were measured on the data of the newest that was measured. Of those that do not
    say on what, as older versions wrote them, it is taken that the data were the same."""
    measured = [c for c in checkpoints if c.metric is not None]
    present = max(measured, key=lambda c: c.step).measured_on if measured else ""
    measured = [c for c in measured if c.measured_on in (present, "")]
    return sorted(measured, key=lambda c: (c.metric, c.step))
