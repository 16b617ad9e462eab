"""What the files of a model folder hold, from their headers alone: names, shapes, precision, and where the bytes lie.

Everything that files say about themselves is checked here, before anything is read by it: damaged headers, files that
were cut off, and names that lead out of the folder end in one sentence. No torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from tunesmith.errors import UserError

BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
}
"""Of a value, by safetensors' name for its type."""
LARGEST_HEADER = 100_000_000
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class Entry:
    """A tensor of a file."""

    path: Path
    name: str
    dtype: str
    """As safetensors calls it: F32, BF16, U8, ..."""
    shape: tuple[int, ...]
    start: int
    """Its first byte in the file."""
    size: int
    """Bytes."""


def read_headers(folder: Path) -> dict[str, Entry]:
    """The tensors of the model in `folder`, by name, in the order they are to be read. UserError where its files cannot
    be what they say."""
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise UserError(f"model: {_no_weights(folder)}")
        return _entries(folder / SINGLE)
    weight_map = _weight_map(index)
    files = {file: inside(folder, file, index) for file in sorted(set(weight_map.values()))}
    if gone := [file for file, path in files.items() if not path.is_file()]:
        raise UserError(f"model: {index} names files that are not there: {shortened(gone)}; download the model again.")
    held = {file: _entries(path) for file, path in files.items()}
    lacking = [name for name, file in weight_map.items() if name not in held[file]]
    if lacking:
        raise UserError(
            f"model: {index} names tensors that its files do not hold: {shortened(lacking)}; download the model again."
        )
    found = {}
    for file in held:  # what the index does not name is read, too, as by transformers
        found |= {name: one for name, one in held[file].items() if weight_map.get(name, file) == file}
    return found


def inside(folder: Path, name: str, where: Path) -> Path:
    """The file called `name` in `folder`; UserError where that name leads out of it."""
    parts = (*PurePosixPath(name).parts, *PureWindowsPath(name).parts)
    is_rooted = PurePosixPath(name).is_absolute() or PureWindowsPath(name).anchor != ""
    if not name or is_rooted or ".." in parts or "\0" in name:
        raise UserError(
            f"model: {where} names the file {name!r}, which does not lie in the model's folder; it is not read."
        )
    return folder / name


def shortened(names: Iterable[str], most: int = 3) -> str:
    """The first of these names, and how many more there are."""
    every = list(names)
    more = f" and {len(every) - most:,} more" if len(every) > most else ""
    return ", ".join(name if len(name) <= 120 else f"{name[:80]}...{name[-37:]}" for name in every[:most]) + more


def _weight_map(index: Path) -> dict[str, str]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        found = content["weight_map"]
        if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
            raise TypeError("weight_map")
    except OSError as error:
        raise UserError(f"model: {index} cannot be read: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"model: {index} is damaged: it does not say which file holds which tensor; download it again."
        ) from error
    if not found:
        raise UserError(f"model: {index} names no tensors; download it again.")
    return found


def _entries(path: Path) -> dict[str, Entry]:
    """The tensors of one file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            is_whole = size >= 8 and length <= min(size - 8, LARGEST_HEADER)
            header = json.loads(stream.read(length)) if is_whole else {}
    except OSError as error:
        raise UserError(f"model: {path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(_damaged(path, "its header cannot be read")) from error
    if not is_whole:
        raise UserError(_damaged(path, "it is cut off, or is no safetensors file"))
    if not isinstance(header, dict):
        raise UserError(_damaged(path, "its header cannot be read"))
    first, found = 8 + length, {}
    for name, said in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, begin, end = _described(said)
        count = math.prod(shape)
        if dtype in BITS and 8 * (end - begin) != count * BITS[dtype]:
            raise UserError(_damaged(path, f"its header contradicts itself about {shortened([name])}"))
        if dtype not in BITS:
            raise UserError(_damaged(path, f"{shortened([name])} is of an unknown type"))
        if first + end > size:
            missing = f"it has {size:,} bytes, and {shortened([name])} would end at byte {first + end:,}"
            raise UserError(_damaged(path, f"it is cut off: {missing}"))
        found[name] = Entry(path, name, dtype, shape, first + begin, end - begin)
    if not found:
        raise UserError(_damaged(path, "it holds no tensors"))
    return found


def _described(said: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Type, shape, first and last byte that a header gives for a tensor; an empty type where it gives none."""
    match said:
        case {"dtype": str() as dtype, "shape": list() as shape, "data_offsets": [int() as begin, int() as end]} if (
            0 <= begin <= end and all(type(length) is int and 0 <= length < 1 << 40 for length in shape)
        ):
            return dtype, tuple(shape), begin, end
    return "", (), 0, 0


def _damaged(path: Path, what: str) -> str:
    return f"model: {path} is damaged: {what}; download it again."


def _no_weights(folder: Path) -> str:
    """Why a folder without the usual files cannot be read."""
    try:
        names = sorted(file.name for file in folder.iterdir())
    except OSError as error:
        return f"{folder} cannot be read: {error.strerror or error}."
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack"))]
    others = [name for name in names if name.endswith(".safetensors")]
    if others:
        return f"{folder} holds {shortened(others)}, but no {SINGLE} and no {INDEX} that says what is in them."
    if pickled:
        return (
            f"{folder} holds its weights as {shortened(pickled)}, which only safetensors files can replace safely; "
            "save the model with transformers' save_pretrained once, and give that folder."
        )
    return f"{folder} holds no weights (no {SINGLE})."
