"""The files of a data set: found by a path, in a folder or by a glob, of the split that is asked for.

Which endings can be read stands here (`KINDS`); how a file of each kind is read is the business of `source`.
"""

from __future__ import annotations

import difflib
import fnmatch
import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.disk import expanded
from tunesmith.errors import UserError, listed

if TYPE_CHECKING:
    from tunesmith.config.schema import Dataset

KINDS = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
COMPRESSED = (".gz", ".zst", ".zstd")
SPLITS = {"train": "train|training", "validation": "validation|valid|val|dev|eval|evaluation", "test": "test|testing"}
"""What files of a data set's splits are called, between hyphens, dots, underscores, blanks or digits, as on the hub."""


def data_files(dataset: Dataset) -> list[Path]:
    """The files behind `path` (a file, a folder with all below it, or a glob), sorted.

    In a folder or glob, files with other endings are left out, and so are texts (a README, a licence) that lie
    beside record files; in a folder also those of other splits than the one that is asked for. Symbolic links are
    followed; a file that several of them lead to is there once.
    """
    assert dataset.path
    path = expanded(dataset.path)
    try:
        if path.is_file():
            found = [path]
            if kind_of(path) is None:
                ending = f"that end in `{path.suffix}`" if path.suffix else "without an ending"
                raise UserError(f"{path}: cannot read files {ending}; {_known_endings()}.")
        elif path.is_dir():
            found = _of_split(_readable(_walk(path), path), path, dataset.split)
        elif glob.has_magic(str(path)):
            found = _readable(_matching(path), path)
        else:
            raise UserError(f"{path}: no such file or folder{_near_miss(path)}")
        if all(file.stat().st_size == 0 for file in found):
            raise UserError(f"{path}: {'the file is' if len(found) == 1 else 'all files are'} empty.")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error
    return found


def searched_folder(dataset: Dataset) -> Path | None:
    """The folder of which everything below is read, where the data are given so."""
    path = expanded(dataset.path or "")
    if dataset.path is None or path.is_file():
        return None
    if path.is_dir():
        return path
    return _fixed_part(path) if "**" in path.parts else None


def kind_of(path: Path) -> str | None:
    """What `KINDS` calls the file by its ending, compressed or not; None for one that cannot be read."""
    name = path.name.lower()
    for ending in COMPRESSED:
        if name.endswith(ending):
            kind = KINDS.get(Path(name.removesuffix(ending)).suffix)
            return None if kind in ("parquet", "arrow") else kind
    return KINDS.get(path.suffix.lower())


def _known_endings() -> str:
    return f"known are {', '.join(KINDS)}, all but Parquet and Arrow also with {' or '.join(COMPRESSED[:2])}"


def _walk(folder: Path) -> Iterator[Path]:
    """All files below the folder. A folder that links lead back to is entered once."""
    entered = set()
    for name, below, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(name)
        if real in entered:
            below.clear()
            continue
        entered.add(real)
        below[:] = sorted((inner for inner in below if not inner.startswith(".")), key=_links_last(name))
        yield from (Path(name, file) for file in names)


def _links_last(folder: str) -> Callable[[str], Any]:
    """A sorting key that puts links last, so that a file is known by its own name where it has one below the folder."""
    return lambda name: (os.path.islink(os.path.join(folder, name)), name)


def _matching(pattern: Path) -> Iterator[Path]:
    """The files that a glob matches, as `glob` finds them; but not for `**`, with which `glob` goes round and round
    where links lead back."""
    if "**" not in pattern.parts:
        return (Path(name) for name in glob.iglob(str(pattern)))
    root = _fixed_part(pattern)
    wanted = "".join(
        "(?:[^/]+/)*" if part == "**" else f"{_END.sub('', fnmatch.translate(part)).replace('.*', '[^/]*')}/"
        for part in pattern.parts[len(root.parts) :]
    )
    matches = re.compile(wanted).fullmatch
    return (path for path in _walk(root) if matches(f"{path.relative_to(root).as_posix()}/"))


def _fixed_part(pattern: Path) -> Path:
    fixed = next(n for n, part in enumerate(pattern.parts) if glob.has_magic(part))
    return Path(*pattern.parts[:fixed])


_END = re.compile(r"\\[zZ]$")


def _readable(candidates: Iterable[Path], where: Path) -> list[Path]:
    side_files = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
    here: dict[str, Path] = {}  # by what they really are: a file that links lead to as well is there once
    for p in sorted(candidates, key=lambda p: (p.is_symlink(), p)):
        is_hidden = any(part.startswith(".") for part in _parts_below(p, where))
        if not is_hidden and p.is_file() and p.name not in side_files:
            here.setdefault(os.path.realpath(p), p)
    if not here:
        raise UserError(f"{where}: no files there{_near_miss(where)}")
    found = sorted(p for p in here.values() if kind_of(p))
    for path in found:
        _check_name(path)
    if not found:
        endings = listed(sorted({f"`{p.suffix or p.name}`" for p in here.values()}), most=5)
        raise UserError(f"{where}: only files that cannot be read ({endings}); {_known_endings()}.")
    return [p for p in found if kind_of(p) != "text"] or found


def _of_split(found: list[Path], folder: Path, asked: str) -> list[Path]:
    """The files of the split that is asked for, and those of no split; all of them, where there are not several
    splits."""
    by_file = {path: _split_of(path, folder) for path in found}
    there = {split for split in by_file.values() if split is not None}
    if len(there) < 2:
        return found
    wanted = _split_named(asked) or asked
    if wanted not in there:
        raise UserError(f"{folder}: has the splits {listed(sorted(there))}, but not `{asked}`; say which by `split:`.")
    return [path for path, split in by_file.items() if split in (None, wanted)]


def _split_of(path: Path, folder: Path) -> str | None:
    """The split a file belongs to by its name, or by that of a folder it is in; None where neither says one."""
    *parents, name = _parts_below(path, folder)
    names = (_split_named(part) for part in (name.partition(".")[0], *reversed(parents)))
    return next((split for split in names if split is not None), None)


def _split_named(name: str) -> str | None:
    between = r"(?:^|[-._ 0-9]|$)"
    return next((key for key, words in SPLITS.items() if re.search(f"(?i){between}(?:{words}){between}", name)), None)


def _check_name(path: Path) -> None:
    """UserError for a name that is not UTF-8, in which what is kept of a run names its files."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        shown = os.fsencode(path).decode(errors="backslashreplace")
        raise UserError(f"{shown}: the name of this data file is not UTF-8; rename it.") from error


def _parts_below(path: Path, folder: Path) -> tuple[str, ...]:
    return path.relative_to(folder).parts if path.is_relative_to(folder) else (path.name,)


def _near_miss(path: Path) -> str:
    """The end of a sentence about a path that is not there: which paths are, whose names are like it."""
    if path.exists():
        return "."
    folder = path.parent
    while not folder.is_dir() and folder != folder.parent:
        folder, path = folder.parent, folder
    try:
        names = [p.name for p in folder.iterdir() if not p.name.startswith(".")]
    except OSError:
        return "."
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)
    near = near or [n for n in names if Path(n).stem.lower() == path.stem.lower()][:3]
    return f"; did you mean {' or '.join(str(folder / name) for name in near)}?" if near else "."
