"""Checkpoints that can be trusted: killed at any instant, a run loses nothing that `save` has acknowledged.

A checkpoint is a folder `step-00000123`: tensors in safetensors files, `state.json`, and `manifest.json`,
written last, with size and SHA-256 of each file and of itself. It is written under a `.partial-` name, synced,
read back, and only then renamed, so a folder without that suffix is whole unless the disk damaged it; that is
checked before anything is loaded or counted. The manifest also names the lineage (a digest of all that
determines the run's course): checkpoints of another lineage are left alone. Pickle is not used anywhere.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import safetensors
import torch

from tunesmith import disk
from tunesmith.checkpoint.files import (
    NO_LOCKS,
    free_lock,
    is_alive,
    make_folder,
    remove,
    sha256_file,
    sync_folder,
    take_lock,
    unique,
    write_new,
)
from tunesmith.checkpoint.room import with_slack
from tunesmith.errors import UserError, listed

Room = Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]
Copy = Callable[[torch.Tensor], torch.Tensor]
JSON = None | bool | int | float | str | list[Any] | tuple[Any, ...] | dict[str, Any]

FORMAT = 1
SHARD_BYTES = 4 * 2**30
CHUNK_BYTES = 16 * 2**20
ROWS = "rows"
"""In a file's header: which rows of its tensors it holds, where that is not all."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    step: int
    path: Path
    lineage: str
    metric: float | None
    """Held-out loss at this step, where it was measured; lower is better."""


@dataclass(frozen=True)
class Rows:
    """Rows of a tensor: those from `start` on, of `total`, along its first dimension; all of a number (total None)."""

    tensor: torch.Tensor
    start: int = 0
    total: int | None = None


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
    PyTorch keeps the memory for the next one."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor.detach())


def _itself(tensor: torch.Tensor) -> torch.Tensor:
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
    ) -> Checkpoint | None:
        """Write a checkpoint; when this returns one, it is on the disk, read back and found right.

        What the file system refuses (no room, read-only, no permission) costs a warning and gives None: try
        again later. NaN and infinity, in the tensors, the state or the metric, are a UserError.
        """
        saving = self.begin(step, tensors, state, metric=metric)
        saving.write()
        return saving.finish()

    def begin(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        state: Mapping[str, JSON],
        *,
        metric: float | None = None,
        copy: Copy = _itself,
    ) -> Saving:
        """`save` in two parts, of which the first may run beside other work on tensors that are copied by `copy`."""
        for name, tensor in tensors.items():
            if not _is_finite(tensor):
                raise UserError(
                    f"{name} holds NaN or infinite values at step {step}, so this state was not saved; "
                    "continue from the last checkpoint with a lower learning rate or other data"
                )
        if metric is not None and not math.isfinite(metric):
            raise UserError(f"the metric is {metric} at step {step}, so this state was not saved")
        metric = None if metric is None else float(metric)
        copies, text = {name: copy(tensor) for name, tensor in tensors.items()}, _encode_state(state)
        outcome: list[Checkpoint | Exception] = []

        def write() -> None:
            try:
                outcome.append(self._write(step, copies, text, metric))
            except (OSError, Damaged) as error:
                outcome.append(error)

        def finish() -> Checkpoint | None:
            (found,) = outcome
            if isinstance(found, Checkpoint):
                self._tidy_up(found)
                return found
            self._warn_unwritten(step, _describe(found))
            return None

        return Saving(write, finish)

    def begin_together(
        self,
        step: int,
        parts: Mapping[str, Rows],
        names: Collection[str],
        state: Mapping[str, JSON],
        together: Together,
        *,
        metric: float | None = None,
        copy: Copy = _itself,
    ) -> Saving:
        """Like `begin`, by several processes, each with its own rows of the tensors `names`, into a file of its own.

        The first one makes the folder, and moves it into place when all have written and read back their files.
        `finish` says whether the checkpoint is on the disk, the same to all; the folder must be one for all of them.
        """
        bad = [name for name, rows in parts.items() if not _is_finite(rows.tensor)]
        if any(found := together.gather(bad[0] if bad else "")):
            raise UserError(
                f"{next(filter(None, found))} holds NaN or infinite values at step {step}, so this state was not "
                "saved; continue from the last checkpoint with a lower learning rate or other data"
            )
        sizes = together.gather(str(sum(rows.tensor.nbytes for rows in parts.values())))
        partial, lock, problem = None, None, ""
        text = _encode_state(state)
        try:
            if together.is_first:
                partial, lock = self._begin(step, sum(map(int, sizes)) + len(text))
        except OSError as error:
            problem = _describe(error)
        name = together.gather(partial.name if partial else "")[0]
        copies = {key: copy(rows.tensor) for key, rows in parts.items()} if name else {}
        places = {key: [rows.start, rows.total] for key, rows in parts.items() if rows.total is not None}
        held = {key: [len(rows.tensor) if rows.total is not None else 1, rows.total] for key, rows in parts.items()}
        files: dict[str, tuple[int, str]] = {}

        def write() -> None:
            nonlocal problem
            if not name:
                return
            try:
                file = f"rank-{together.rank:05d}-of-{together.count:05d}.safetensors"
                files[file] = write_new(self.folder / name / file, _encode_tensors(copies, places))
                if sha256_file(self.folder / name / file) != files[file][1]:
                    raise Damaged(f"{file} was not read back as it was written")
            except (OSError, Damaged) as error:
                problem = _describe(error)

        def finish() -> bool:
            said = [json.loads(one) for one in together.gather(json.dumps([problem, files, held]))]
            trouble = next((one for one, _, _ in said if one), "") or _uncovered(set(names), [one[2] for one in said])
            checkpoint = None
            if together.is_first:
                try:
                    if partial is not None and not trouble:
                        written = {key: tuple(value) for _, theirs, _ in said for key, value in theirs.items()}
                        checkpoint = self._commit(step, partial, written, text, metric)
                except (OSError, Damaged) as error:
                    trouble = _describe(error)
                finally:
                    if partial is not None and checkpoint is None:
                        shutil.rmtree(partial, ignore_errors=True)
                    free_lock(lock)
                if checkpoint is None:
                    self._warn_unwritten(step, trouble)
                else:
                    self._tidy_up(checkpoint)
            return together.gather("saved" if checkpoint else "")[0] == "saved"

        return Saving(write, finish)

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
                        manifest = _read_manifest(path, int(match[1]))
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
        """The whole checkpoint with the lowest metric; of equals the earliest."""
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
    ) -> tuple[dict[str, Rows], dict[str, Any]]:
        """Like `load`, but of each tensor the rows from one number to another that are `wanted`, or all (None), read
        into the tensor that `room` gives for its name, shape and dtype.

        Files that hold none of them are not read; of the others, nothing but these rows is in memory. Where this fails,
        rooms may hold what is damaged.
        """
        found: dict[str, Rows] = {}
        missing: dict[str, int] = {}
        state: dict[str, Any] = {}
        try:
            manifest = _read_manifest(checkpoint.path, checkpoint.step)
            if manifest["lineage"] != self.lineage:
                raise Damaged("it belongs to a run with other settings, data or model")
            for name, expected in manifest["files"].items():
                file = checkpoint.path / name
                if name == "state.json":
                    with _Checked(file, expected) as opened:
                        text = opened.read()
                    state = json.loads(text)
                elif _holds_any(file, wanted):
                    with _Checked(file, expected) as opened:
                        _take_rows(opened, wanted, room, found, missing)
            if absent := [name for name, count in missing.items() if count > 0]:
                raise Damaged(f"rows of {absent[0]} are missing")
        except (OSError, Damaged) as error:
            raise UserError(
                f"the checkpoint {checkpoint.path} cannot be loaded: {_describe(error)}; "
                "`tunesmith train` again continues from the newest one that is whole"
            ) from error
        return found, state

    def _write(self, step: int, tensors: Mapping[str, torch.Tensor], state: bytes, metric: float | None) -> Checkpoint:
        shards = _shards(tensors)
        partial, lock = self._begin(step, sum(tensor.nbytes for tensor in tensors.values()) + len(state))
        try:
            files = {name: write_new(partial / name, _encode_tensors(shard)) for name, shard in shards.items()}
            return self._commit(step, partial, files, state, metric, reads_back=True)
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
            return partial, _take_folder_lock(partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def _commit(
        self,
        step: int,
        partial: Path,
        files: dict[str, tuple[int, str]],
        state: bytes,
        metric: float | None,
        *,
        reads_back: bool = False,
    ) -> Checkpoint:
        """Complete a folder whose tensors are written, and move it into place."""
        target = self.folder / f"step-{step:08d}"
        files = {**files, "state.json": write_new(partial / "state.json", [state])}
        manifest = {
            "format": FORMAT,
            "step": step,
            "lineage": self.lineage,
            "metric": metric,
            "files": {name: {"size": size, "sha256": sha256} for name, (size, sha256) in files.items()},
        }
        write_new(partial / "manifest.json", [_encode_manifest(manifest)])
        sync_folder(partial)
        if reads_back:
            _verify(partial, step)
        if os.path.lexists(target):
            # Whatever is in the way stays whole, and findable by its lineage, until ours is in place.
            target.rename(self.folder / f"{target.name}.aside-{secrets.token_hex(4)}")
        partial.rename(target)
        sync_folder(self.folder)
        self._verified[target] = _signature(target)
        return Checkpoint(step, target, self.lineage, metric)

    def _warn_unwritten(self, step: int, problem: str) -> None:
        older = self.newest_step()
        kept = "there is none before it" if older is None else f"the one of step {older} is kept"
        self._warn(f"No checkpoint was written at step {step} in {self.folder}: {problem}; {kept}.")

    def _tidy_up(self, new: Checkpoint) -> None:
        try:
            self._retain(new)
        except OSError as error:
            self._warn(f"Old checkpoints in {self.folder} could not be tidied up: {_describe(error)}.")

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
                manifest = _read_manifest(path, int(match[1]))
            except (OSError, Damaged) as error:
                self._report(path, error)
                continue
            if manifest["lineage"] == self.lineage:
                found.append(Checkpoint(manifest["step"], path, self.lineage, manifest["metric"]))
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
            raise UnreadableFolder(f"the checkpoints in {self.folder} cannot be listed: {_describe(error)}") from error

    def _problem(self, checkpoint: Checkpoint) -> str | None:
        """What is wrong with a checkpoint, read in full once for each state of its files."""
        try:
            signature = _signature(checkpoint.path)
            if self._verified.get(checkpoint.path) != signature:
                _verify(checkpoint.path, checkpoint.step)
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
            self._warn_once(f"The checkpoint {path} is damaged and not used: {_describe(error)}.")

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            self._warn(message)

    def _clean(self) -> None:
        """Remove what killed processes have left half written or half removed."""
        for path in self._entries():
            partial = _PARTIAL.fullmatch(path.name)
            if _TRASH.fullmatch(path.name) or (partial and _is_abandoned(path, int(partial[1]))):
                try:
                    remove(path)
                except OSError as error:
                    self._warn_once(f"The leftover {path} could not be removed: {_describe(error)}.")


class RunLock:
    """Held while a process writes a run folder; a second one is told who holds it. A kill frees it."""

    def __init__(self, folder: Path, *, wait_s: float = 2.0, warn: Callable[[str], None] = log.warning):
        self.folder = Path(folder)
        self._wait_s = wait_s
        self._warn = warn
        self._fd: int | None = None

    def __enter__(self) -> RunLock:
        path = self.folder / ".lock"
        try:
            make_folder(self.folder)
            give_up = time.monotonic() + self._wait_s  # a killed process holds it until its memory is freed
            while (fd := take_lock(path, os.O_RDWR | os.O_CREAT)) is None and time.monotonic() < give_up:
                time.sleep(0.05)
            self._fd = fd
        except OSError as error:
            if error.errno in NO_LOCKS:
                self._warn(f"The file system of {self.folder} has no locks: let only one process train there.")
                return self
            why = disk.reason(error) or _describe(error)
            raise UserError(
                f"the run folder {self.folder} cannot be written: {why}; set `output` to another one"
            ) from error
        if self._fd is None:
            holder = path.read_text(errors="replace").strip()
            who = f"process {holder}" if holder.isdecimal() else "another process"
            raise UserError(
                f"{self.folder} is being written by {who}; wait until it is done, stop it, "
                "or set `output` to another folder"
            )
        try:
            os.truncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            pass  # a full disk: the lock holds all the same, only without a name on it
        return self

    def __exit__(self, *_: object) -> None:
        free_lock(self._fd)
        self._fd = None


class Damaged(Exception):
    """What is wrong with a checkpoint, in words."""


class UnreadableFolder(UserError, OSError):
    """The folder is there and cannot be listed: `save` treats it as a failed write, resuming must not."""


_NAME = re.compile(r"step-(\d{8,})(?:\.aside-[0-9a-f]{8})?", re.ASCII)
_PARTIAL = re.compile(r"step-\d{8,}\.partial-([1-9]\d{0,8})-[0-9a-f]{8}", re.ASCII)
_TRASH = re.compile(r"\.trash-[1-9]\d{0,8}-[0-9a-f]{8}", re.ASCII)

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}


def _is_finite(tensor: torch.Tensor) -> bool:
    """One pass without a mask in memory: NaN and infinity show in the smallest or the largest value."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    tensor = tensor.detach()
    if tensor.element_size() == 1:  # fp8 has no comparisons
        tensor = tensor.float()
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def _encode_state(state: Mapping[str, JSON]) -> bytes:
    """JSON text from which the same values are read again; what JSON would change is refused."""

    def check(value: object, where: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                if not isinstance(key, str):
                    raise TypeError(f"{where} has the key {key!r}, which JSON would turn into text")
                check(inner, f"{where}.{key}")
        elif isinstance(value, list | tuple):
            for index, inner in enumerate(value):
                check(inner, f"{where}[{index}]")
        elif isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{where} is {value}, so this state was not saved")

    plain = dict(state)
    check(plain, "state")
    return json.dumps(plain, allow_nan=False).encode()


def _shards(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """File name -> its tensors, each file of at most SHARD_BYTES unless one tensor alone is larger."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"{name} has dtype {tensor.dtype}, which a checkpoint cannot hold")
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        return {"tensors.safetensors": shards[0]}
    return {f"tensors-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}


def _encode_tensors(
    tensors: Mapping[str, torch.Tensor], places: Mapping[str, list[int]] | None = None
) -> Iterator[bytes | memoryview]:
    """A safetensors file in pieces: one tensor at a time in host memory, where the library wants them all.

    `places`: of tensors that are rows of a larger one, the first row and how many there are in all.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # keeps tensors aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    if places is not None:
        header["__metadata__"][ROWS] = json.dumps(places, separators=(",", ":"))
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        flat = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        view = memoryview(flat.numpy())
        for start in range(0, len(view), CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]


class _Checked:
    """A file that is read once, from its beginning; at the end it was what `expected` says, or Damaged is raised."""

    def __init__(self, file: Path, expected: Mapping[str, Any]):
        self.name = file.name
        self.expected = expected
        self.digest = hashlib.sha256()
        self.left: int = expected["size"]
        self._file = open(file, "rb")  # noqa: SIM115 (closed by __exit__)

    def read_into(self, memory: memoryview) -> None:
        for start in range(0, len(memory), CHUNK_BYTES):
            chunk = memory[start : start + CHUNK_BYTES]
            if self._file.readinto(chunk) != len(chunk):
                raise self.damage
            self.digest.update(chunk)
        self.left -= len(memory)

    def read(self, size: int | None = None) -> bytearray:
        """So many bytes, or all that are left."""
        size = self.left if size is None else size
        if not 0 <= size <= self.left:
            raise self.damage
        content = bytearray(size)
        self.read_into(memoryview(content))
        return content

    def skip(self, size: int) -> None:
        while size > 0:
            size -= len(self.read(min(size, CHUNK_BYTES)))

    @property
    def damage(self) -> Damaged:
        return Damaged(f"{self.name} does not match its checksum")

    def __enter__(self) -> _Checked:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            if kind is None:
                self.skip(self.left)
                if self._file.read(1) or self.digest.hexdigest() != self.expected["sha256"]:
                    raise self.damage
        finally:
            self._file.close()


def _places(metadata: Mapping[str, str] | None) -> dict[str, list[int]]:
    return json.loads((metadata or {}).get(ROWS, "{}"))


def _overlap(place: list[int] | None, rows: int, span: tuple[int, int] | None) -> tuple[int, int, int, tuple[int, int]]:
    """First and last row of a piece that are wanted, in the whole tensor's numbers, where the piece begins there, and
    all that is wanted of the tensor."""
    start, total = place or (0, rows)
    begin, end = span or (0, total)
    return max(start, begin), min(start + rows, end), start, (begin, end)


def _uncovered(names: set[str], held: list[dict[str, list[int | None]]]) -> str:
    """What is wrong where the rows that processes write do not make up each tensor; else empty."""
    rows: dict[str, int] = {}
    totals: dict[str, int] = {}
    for theirs in held:
        for name, (count, total) in theirs.items():
            rows[name] = rows.get(name, 0) + (count or 0)
            totals[name] = 1 if total is None else total
    bad = sorted(names - totals.keys()) + sorted(name for name, total in totals.items() if rows[name] < total)
    return f"the ranks hold {bad[0]} in parts that do not make a whole" if bad else ""


def _holds_any(file: Path, wanted: Callable[[str], tuple[int, int] | None]) -> bool:
    """By the file's header, which is read again with the file and checked then."""
    try:
        with safetensors.safe_open(file, framework="numpy") as opened:
            places = _places(opened.metadata())
            for name in opened.keys():  # noqa: SIM118 (it is no dict)
                shape = opened.get_slice(name).get_shape()
                first, last, _, _ = _overlap(places.get(name), shape[0] if shape else 1, wanted(name))
                if first < last or not shape:
                    return True
    except (safetensors.SafetensorError, ValueError):
        return True  # the checksum will tell
    return False


def _take_rows(
    file: _Checked,
    wanted: Callable[[str], tuple[int, int] | None],
    room: Room,
    found: dict[str, Rows],
    missing: dict[str, int],
) -> None:
    """Read what is wanted out of a file; `missing` counts the rows that are still to come."""
    try:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        places = _places(header.pop("__metadata__", None))
        entries = sorted(
            (*map(int, entry["data_offsets"]), name, tuple(map(int, entry["shape"])), _BY_NAME[entry["dtype"]])
            for name, entry in header.items()
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise file.damage from None
    at = 0
    for begin, end, name, shape, dtype in entries:
        if begin != at or end - begin != math.prod(shape) * dtype.itemsize or end > at + file.left:
            raise file.damage
        at = end
        if not shape:
            found[name] = Rows(room(name, shape, dtype))
            file.read_into(_bytes_of(found[name].tensor))
            continue
        first, last, start, (since, until) = _overlap(places.get(name), shape[0], wanted(name))
        if name not in found:
            total = (places.get(name) or (0, shape[0]))[1]
            found[name] = Rows(room(name, (until - since, *shape[1:]), dtype), since, total)
            missing[name] = until - since
        row = (end - begin) // max(1, shape[0])
        taken = max(0, last - first)
        file.skip(row * (first - start) if taken else end - begin)
        if taken:
            file.read_into(_bytes_of(found[name].tensor[first - since : last - since]))
            file.skip(row * (start + shape[0] - last))
            missing[name] -= taken


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Its memory, in which it must lie end to end."""
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())


def _encode_manifest(manifest: Mapping[str, Any]) -> bytes:
    """The one rendering of a manifest, with a checksum of itself: any other byte sequence is damage."""
    body = json.dumps(manifest, indent=1, sort_keys=True)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return (json.dumps({**manifest, "sha256": digest}, indent=1, sort_keys=True) + "\n").encode()


def _read_manifest(path: Path, step: int) -> dict[str, Any]:
    try:
        data = (path / "manifest.json").read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise Damaged("manifest.json is missing") from None
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError):
        raise Damaged("manifest.json is truncated or garbled") from None
    if not isinstance(manifest, dict) or not manifest.pop("sha256", None) or _encode_manifest(manifest) != data:
        raise Damaged("manifest.json does not match its checksum")
    if manifest.get("format") != FORMAT:
        raise Damaged(f"its format is {manifest.get('format')}, and this version of tunesmith reads {FORMAT}")
    if manifest["step"] != step:
        raise Damaged(f"it is a copy of step {manifest['step']}")
    return manifest


def _verify(path: Path, step: int) -> None:
    """Read every byte of a checkpoint; raises Damaged, or OSError where reading itself fails."""
    for name, expected in _read_manifest(path, step)["files"].items():
        file = path / name
        try:
            size = file.stat().st_size
        except FileNotFoundError:
            raise Damaged(f"{name} is missing") from None
        if size != expected["size"]:
            change = "truncated" if size < expected["size"] else "too long"
            raise Damaged(f"{name} is {change}: {size} bytes instead of {expected['size']}")
        if sha256_file(file) != expected["sha256"]:
            raise Damaged(f"{name} does not match its checksum")
        if name.endswith(".safetensors"):
            try:
                with safetensors.safe_open(file, framework="numpy"):
                    pass
            except safetensors.SafetensorError as error:
                raise Damaged(f"{name} is not a safetensors file ({error})") from None


def _signature(path: Path) -> tuple:
    """Changes whenever a file of the folder is written or replaced."""
    stats = [(entry.name, entry.stat()) for entry in sorted(path.iterdir())]
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)


def _by_metric(checkpoints: list[Checkpoint]) -> list[Checkpoint]:
    measured = [c for c in checkpoints if c.metric is not None]
    return sorted(measured, key=lambda c: (c.metric, c.step))


def _take_folder_lock(folder: Path) -> int | None:
    """Shows other processes that this folder is being written; without locks they go by the pid in its name."""
    try:
        return take_lock(folder)
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        raise


def _is_abandoned(partial: Path, pid: int) -> bool:
    """Whether its writer is dead. Containers give the next process the same pid, so ours proves nothing."""
    if pid != os.getpid() and is_alive(pid):
        return False
    try:
        lock = take_lock(partial)
    except OSError as error:
        return error.errno in NO_LOCKS
    free_lock(lock)
    return lock is not None


def _describe(error: Exception) -> str:
    if isinstance(error, UnreadableFolder) or not isinstance(error, OSError):
        return str(error)
    reason = error.strerror or str(error)
    return f"{reason} ({error.filename})" if error.filename else reason
