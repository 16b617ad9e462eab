"""What a checkpoint's files hold: tensors, state and manifest as bytes, and read back with every byte checked.

Tensors are written in safetensors files one at a time, and read by rows, so that no process has more in memory than it
asks for. Nothing here knows where checkpoints lie or which are kept; `store.py` does.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch

from tunesmith.checkpoint.direct import run_in_threads
from tunesmith.checkpoint.files import DIGEST, digest_file, new_digest, write_new
from tunesmith.disk import BLOCK_BYTES
from tunesmith.errors import UserError

JSON = None | bool | int | float | str | list[Any] | tuple[Any, ...] | dict[str, Any]

Room = Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]

FORMAT = 2
READABLE = (1, FORMAT)
"""Format 1 has SHA-256 as its files' checksum."""
SHARD_BYTES = 256 * 2**20
"""Of a file, unless that makes more than MAX_SHARDS."""
MAX_SHARDS = 64
WRITERS = 3
"""Files at a time: while one waits for the disk, checksums of others are made."""
CHUNK_BYTES = 16 * 2**20
ROWS = "rows"
"""In a file's header: which rows of its tensors it holds, where that is not all."""


@dataclass(frozen=True)
class ShardSlice:
    """Rows of a tensor: those from `start` on, of `total`, along its first dimension; all of a number (total None)."""

    tensor: torch.Tensor
    start: int = 0
    total: int | None = None


class Damaged(Exception):
    """What is wrong with a checkpoint, in words."""


def is_finite(tensor: torch.Tensor) -> bool:
    """One pass without a mask in memory: NaN and infinity show in the smallest or the largest value."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    tensor = tensor.detach()
    if tensor.element_size() == 1:  # fp8 has no comparisons
        tensor = tensor.float()
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def encode_state(state: Mapping[str, JSON]) -> bytes:
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


def write_tensors(
    folder: Path, stem: str, tensors: Mapping[str, torch.Tensor], places: Mapping[str, list[int]] | None = None
) -> dict[str, tuple[int, str]]:
    """Into files that begin with `stem`, several at a time, read back when all are on the disk: sizes and checksums."""

    def write(name: str, shard: Mapping[str, torch.Tensor]) -> tuple[int, str]:
        rows = None if places is None else {key: places[key] for key in shard if key in places}
        return write_new(folder / name, encode_tensors(shard, rows))

    def read_back(name: str, digest: str) -> None:
        if digest_file(folder / name, from_disk=True) != digest:
            raise Damaged(f"{name} does not match its checksum, read back after it was written")
        _check_header(folder / name)

    shards = _into_shards(tensors, stem)
    sizes = run_in_threads([functools.partial(write, name, shard) for name, shard in shards.items()], WRITERS)
    written = dict(zip(shards, sizes, strict=True))
    run_in_threads([functools.partial(read_back, name, digest) for name, (_, digest) in written.items()], WRITERS)
    return written


def _into_shards(tensors: Mapping[str, torch.Tensor], stem: str) -> dict[str, dict[str, torch.Tensor]]:
    """File name -> its tensors, each file of at most SHARD_BYTES unless one tensor alone is larger."""
    most = max(SHARD_BYTES, sum(tensor.nbytes for tensor in tensors.values()) // MAX_SHARDS)
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {tensor.dtype}, which a checkpoint cannot hold")
        if shards[-1] and size + tensor.nbytes > most:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        return {f"{stem}.safetensors": shards[0]}
    return {f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}


def encode_tensors(
    tensors: Mapping[str, torch.Tensor], places: Mapping[str, list[int]] | None = None
) -> Iterator[bytes | memoryview]:
    """A safetensors file in pieces, of which one at a time is in host memory, where the library wants all tensors.

    `places`: of tensors that are rows of a larger one, the first row and how many there are in all.
    """
    # Whole blocks first, so that these begin at blocks of the file, then by size of elements: all stay aligned.
    sizes = {name: (tensor.nbytes % BLOCK_BYTES > 0, -tensor.element_size()) for name, tensor in tensors.items()}
    order = sorted(tensors, key=lambda name: (sizes[name], name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    if places is not None:
        header["__metadata__"][ROWS] = json.dumps(places, separators=(",", ":"))
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    has_blocks = any(not is_odd for is_odd, _ in sizes.values())
    text += b" " * (-(len(text) + 8) % (BLOCK_BYTES if has_blocks else 8))
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        tensor = tensors[name].detach()
        flat = (tensor if tensor.is_contiguous() else tensor.cpu().contiguous()).reshape(-1).view(torch.uint8)
        staging = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) if flat.is_cuda else None
        for start in range(0, len(flat), CHUNK_BYTES):
            piece = flat[start : start + CHUNK_BYTES]
            yield memoryview((piece if staging is None else staging[: len(piece)].copy_(piece)).numpy())


def uncovered(names: set[str], held: Sequence[Mapping[str, list[int | None]]]) -> str:
    """What is wrong where the rows that processes write do not make up each tensor; else empty."""
    rows: dict[str, int] = {}
    totals: dict[str, int] = {}
    for theirs in held:
        for name, (count, total) in theirs.items():
            rows[name] = rows.get(name, 0) + (count or 0)
            totals[name] = 1 if total is None else total
    bad = sorted(names - totals.keys()) + sorted(name for name, total in totals.items() if rows[name] < total)
    return f"the ranks hold {bad[0]} in parts that do not make a whole" if bad else ""


class CheckedFile:
    """A file that is read once, from its beginning; at the end it was what `expected` says, or Damaged is raised."""

    def __init__(self, file: Path, expected: Mapping[str, Any]):
        self.name = file.name
        self.expected = expected
        self.kind = _checksum_of(expected)
        self.digest = new_digest(self.kind)
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

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            if kind is None:
                self.skip(self.left)
                if self._file.read(1) or self.digest.hexdigest() != self.expected[self.kind]:
                    raise self.damage
        finally:
            self._file.close()


def holds_any(file: Path, wanted: Callable[[str], tuple[int, int] | None]) -> bool:
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


def take_rows(
    file: CheckedFile,
    wanted: Callable[[str], tuple[int, int] | None],
    room: Room,
    found: dict[str, ShardSlice],
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
            found[name] = ShardSlice(room(name, shape, dtype))
            file.read_into(_bytes_of(found[name].tensor))
            continue
        first, last, start, (since, until) = _overlap(places.get(name), shape[0], wanted(name))
        if name not in found:
            total = (places.get(name) or (0, shape[0]))[1]
            found[name] = ShardSlice(room(name, (until - since, *shape[1:]), dtype), since, total)
            missing[name] = until - since
        row = (end - begin) // max(1, shape[0])
        taken = max(0, last - first)
        file.skip(row * (first - start) if taken else end - begin)
        if taken:
            file.read_into(_bytes_of(found[name].tensor[first - since : last - since]))
            file.skip(row * (start + shape[0] - last))
            missing[name] -= taken


def encode_manifest(manifest: Mapping[str, Any]) -> bytes:
    """The one rendering of a manifest, with a checksum of itself: any other byte sequence is damage."""
    body = json.dumps(manifest, indent=1, sort_keys=True)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return (json.dumps({**manifest, "sha256": digest}, indent=1, sort_keys=True) + "\n").encode()


def read_manifest(path: Path, step: int) -> dict[str, Any]:
    try:
        data = (path / "manifest.json").read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise Damaged("manifest.json is missing") from None
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError):
        raise Damaged("manifest.json is truncated or garbled") from None
    if not isinstance(manifest, dict) or not manifest.pop("sha256", None) or encode_manifest(manifest) != data:
        raise Damaged("manifest.json does not match its checksum")
    if manifest.get("format") not in READABLE:
        raise Damaged(f"its format is {manifest.get('format')}, and this version of tunesmith reads {FORMAT}")
    if manifest["step"] != step:
        raise Damaged(f"it is a copy of step {manifest['step']}")
    return manifest


def _checksum_of(expected: Mapping[str, Any]) -> str:
    """Which checksum a manifest has for a file."""
    return "sha256" if "sha256" in expected else DIGEST


def verify(path: Path, step: int, known: Collection[str] = ()) -> None:
    """Read every byte of a checkpoint, but for files that are `known` to be right; raises Damaged, or OSError where
    reading itself fails."""
    for name, expected in read_manifest(path, step)["files"].items():
        if name in known:
            continue
        file, kind = path / name, _checksum_of(expected)
        try:
            size = file.stat().st_size
        except FileNotFoundError:
            raise Damaged(f"{name} is missing") from None
        if size != expected["size"]:
            change = "truncated" if size < expected["size"] else "too long"
            raise Damaged(f"{name} is {change}: {size} bytes instead of {expected['size']}")
        if digest_file(file, kind) != expected[kind]:
            raise Damaged(f"{name} does not match its checksum")
        if name.endswith(".safetensors"):
            _check_header(file)


def _check_header(file: Path) -> None:
    try:
        with safetensors.safe_open(file, framework="numpy"):
            pass
    except safetensors.SafetensorError as error:
        raise Damaged(f"{file.name} is not a safetensors file ({error})") from None


def _places(metadata: Mapping[str, str] | None) -> dict[str, list[int]]:
    return json.loads((metadata or {}).get(ROWS, "{}"))


def _overlap(place: list[int] | None, rows: int, span: tuple[int, int] | None) -> tuple[int, int, int, tuple[int, int]]:
    """First and last row of a piece that are wanted, in the whole tensor's numbers, where the piece begins there, and
    all that is wanted of the tensor."""
    start, total = place or (0, rows)
    begin, end = span or (0, total)
    return max(start, begin), min(start + rows, end), start, (begin, end)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Its memory, in which it must lie end to end."""
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())


DTYPES = {
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
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
