"""From a run's data sets to token stores: recognise, tokenize, guard, cut to length; cached by content.

What can be known early is asked first: all files are found and all formats recognised before the first record
is tokenized, so that a mistyped second path does not cost an hour of work on the first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tunesmith.data import chat, formats, guard, source, store, types
from tunesmith.data.store import Progress, TokenStore
from tunesmith.data.types import Example, Record
from tunesmith.errors import UserError, UserErrors

if TYPE_CHECKING:
    from tunesmith.config.schema import Dataset, FormatName, Run

SAMPLE = 64
"""Records that a format is recognised from."""

T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """The data of a run, ready for the loader."""

    train: tuple[TokenStore, ...]
    weights: tuple[float, ...]
    """Of the training data sets, as the run gives them."""
    evals: tuple[TokenStore, ...]
    warnings: list[str]
    fingerprint: str
    """Of the training data and its weights: what must be the same for a run to be continued."""


def prepare(
    run: Run,
    tokenizer: Any,
    vocab_size: int,
    *,
    max_length: int | None = None,
    progress: Progress | None = None,
    workers: int | None = None,
) -> Prepared:
    """Tokenize, or find in the cache, all data of the run; raise UserError for what would train wrong.

    `vocab_size` and `max_length` (its number of positions) are the model's.
    """
    length = run.sequence_length
    if max_length is not None and length > max_length:
        raise UserError(
            f"sequence_length {length} is beyond the model's {max_length} positions; set it to {max_length} or less."
        )
    template = chat.read_template(run.chat_template) if run.chat_template else None
    encoder = chat.Encoder(tokenizer, template=template, train_on=run.train_on)
    warnings = list(guard.check_encoder(encoder, tokenizer, vocab_size))

    works = [_Work(dataset, encoder, vocab_size) for dataset in (*run.data, *run.eval)]
    titles = [*unique([d.title for d in run.data]), *unique([d.title for d in run.eval])]
    _each(works, _Work.look)
    stores = []
    for work, title in zip(works, titles, strict=True):
        whole = work.whole(title, progress, workers)
        stores.append(store.cut(whole, title, sequence_length=length, too_long=run.too_long))
    train, evals = tuple(stores[: len(run.data)]), tuple(stores[len(run.data) :])
    for one in stores:
        warnings += [warning for warning in (*one.warnings, *_losses(one)) if warning not in warnings]
    warnings += guard.overlap_warnings({s.title: s.hashes for s in train}, {s.title: s.hashes for s in evals})
    weights = tuple(dataset.weight for dataset in run.data)
    return Prepared(train, weights, evals, warnings, _hash([s.fingerprint for s in train], [float(w) for w in weights]))


def unique(titles: Sequence[str]) -> list[str]:
    """The titles, with a number behind those that were there before: `train`, `train (2)`."""
    taken: list[str] = []
    for title in titles:
        numbered, n = title, 1
        while numbered in taken:
            n += 1
            numbered = f"{title} ({n})"
        taken.append(numbered)
    return taken


class _Work:
    """One data set on its way into a store."""

    def __init__(self, dataset: Dataset, encoder: chat.Encoder, vocab_size: int):
        self._dataset, self._encoder, self._vocab_size = dataset, encoder, vocab_size
        self._stored: store.Whole | None = None
        self._format: FormatName | None = None
        self._key = ""

    def look(self) -> None:
        """Find the files and, unless the cache has them already, recognise their format."""
        dataset = self._dataset
        # Examples know the file they came from, so the files' names belong here too.
        names = [str(path) for path in source.files(dataset)] if dataset.path else [dataset.hub]
        self._key = _hash(
            names,
            source.fingerprint(dataset),
            self._encoder.fingerprint,
            dataset.format,
            dict(sorted(dataset.fields.items())),
            self._vocab_size,
            _code(),
        )
        self._stored = store.stored(self._key)
        if self._stored is None:
            sample = list(islice(source.read(dataset), SAMPLE))
            self._format = dataset.format or formats.recognise(sample, dataset)

    def whole(self, title: str, progress: Progress | None, workers: int | None) -> store.Whole:
        # Looked up again: a data set may be used twice in a run.
        if found := self._stored or store.stored(self._key):
            return found
        assert self._format
        watch = guard.Watch(self._encoder.end_ids, self._vocab_size)

        def judge() -> list[str]:
            guard.check_dataset(title, watch)
            return watch.warnings()

        return store.build(
            self._key,
            title,
            source.read(self._dataset),
            _Encode(self._encoder, self._format, self._dataset, self._vocab_size),
            format=self._format,
            vocab_size=self._vocab_size,
            notice=watch.merge,
            warnings=judge,
            workers=workers,
            progress=progress,
        )


@dataclass(frozen=True)
class _Encode:
    """Runs in the workers."""

    encoder: chat.Encoder
    format: FormatName
    dataset: Dataset
    vocab_size: int

    def __call__(self, records: list[Record]) -> tuple[list[Example], guard.Watch]:
        watch = guard.Watch(self.encoder.end_ids, self.vocab_size)
        examples = []
        for record in records:
            item = formats.convert(record, self.format, self.dataset)
            for example in self.encoder.encode_all(item, record.origin):
                watch.see(record, item, example)
                examples.append(example)
        return examples, watch


def _losses(one: TokenStore) -> list[str]:
    """What cutting to length cost is said, not only counted."""
    report, lines = one.report, []
    if report.dropped_targets_cut_off:
        count = report.dropped_targets_cut_off
        lines.append(
            f"{one.title}: dropped for having no target left within sequence_length: {count} examples or pieces."
        )
    if report.dropped_too_long:
        count = report.dropped_too_long
        lines.append(
            f"{one.title}: dropped for being longer than sequence_length: {count} (of {report.records} records)."
        )
    if report.truncated:
        lines.append(
            f"{one.title}: {report.truncated} examples (of {report.records} records) were truncated; the longest has "
            f"{report.longest_uncut} tokens."
        )
    return lines


def _each(items: Sequence[T], look: Callable[[T], None]) -> None:
    """Do it for all, then raise all errors for people at once."""
    messages = []
    for item in items:
        try:
            look(item)
        except UserErrors as errors:
            messages += errors.messages
        except UserError as error:
            messages.append(str(error))
    if len(messages) == 1:
        raise UserError(messages[0])
    if messages:
        raise UserErrors(messages)


def _hash(*parts: Any) -> str:
    return sha256(json.dumps(parts).encode()).hexdigest()


@cache
def _code() -> str:
    """Of the code that turns records into examples: what another version made is not taken for ours."""
    modules = (types, source, formats, chat, guard, store)
    return sha256(b"".join(Path(module.__file__ or "").read_bytes() for module in modules)).hexdigest()
