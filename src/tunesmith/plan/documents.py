"""What the data files tell before they are tokenized: about how many tokens there are, and how long documents are.

A plan is made before the tokenizer runs, so both are estimates from bytes. Attention costs by the length of the
documents, not of the sequences they are packed into; memory depends on neither.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path

from tunesmith.config.schema import Dataset, Run

TOKEN_BYTES = 4.5
"""Bytes of text a token stands for, roughly, with the file's own syntax."""
SAMPLE = 1 << 20
"""Bytes of each data set that are looked at."""
LINES = (".jsonl", ".ndjson")
"""Files with a document a line; of others nobody knows where a document ends without reading them."""


def total_tokens(run: Run) -> tuple[int, str] | None:
    """Tokens of the whole run and how that is known: its steps, or the size of its files, roughly."""
    if run.steps is not None:
        return run.steps * run.batch_tokens, f"{run.steps:,} steps"
    size = 0.0
    for dataset in run.data:
        files = _files(dataset)
        if not files:
            return None
        for file in files:
            packed = 3 if file.suffix in (".gz", ".zst", ".parquet") else 1
            size += packed * file.stat().st_size * dataset.weight
    return round(size / TOKEN_BYTES * run.epochs), "the size of the files, roughly"


def sample_lengths(run: Run) -> tuple[int, ...]:
    """Tokens of some of the run's documents, roughly; none where the files do not tell."""
    lengths: list[int] = []
    for dataset in run.data:
        found = [max(1, round(size / TOKEN_BYTES)) for size in _sizes(_files(dataset))]
        if not found:
            return ()
        lengths += found
    return tuple(lengths)


def missing(run: Run) -> list[str]:
    """Paths of the run's data at which there is nothing."""
    return [dataset.path for dataset in run.data if dataset.path is not None and not _files(dataset)]


def mean_length(lengths: Sequence[int], sequence_length: int) -> int:
    """Of the document that a token is in, on average over tokens; documents are cut at the sequence length."""
    cut = [min(length, sequence_length) for length in lengths]
    return round(sum(length**2 for length in cut) / sum(cut)) if cut else sequence_length


def _files(dataset: Dataset) -> list[Path]:
    if dataset.path is None:
        return []
    path = Path(dataset.path).expanduser()
    names = [path] if path.is_file() else [*path.rglob("*")] if path.is_dir() else glob.glob(dataset.path)
    return sorted(Path(name) for name in names if Path(name).is_file())


def _sizes(files: list[Path]) -> Iterator[int]:
    left = SAMPLE
    for file in files:
        if file.suffix not in LINES:
            continue
        with file.open("rb") as stream:
            while left > 0 and (line := stream.readline(left)):
                left -= len(line)
                if line.strip():
                    yield len(line)
