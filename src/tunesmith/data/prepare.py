"""From a run's data sets to token stores: recognise, tokenize, guard, cut to length; cached by content.

What can be known early is asked first: all files are found and all formats recognised before the first record
is tokenized, so that a mistyped second path does not cost an hour of work on the first.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tunesmith.data import build, chat, excluded, guard, preferences, source, types
from tunesmith.data.build import Progress
from tunesmith.data.chat_template import read_template
from tunesmith.data.convert import convert, unread
from tunesmith.data.files import data_files, searched_folder
from tunesmith.data.formats import FORMATS
from tunesmith.data.held_out import split
from tunesmith.data.paired import PairEncoder
from tunesmith.data.recognise import recognise
from tunesmith.data.store import TokenStore, Whole, cut
from tunesmith.data.token_cache import stored
from tunesmith.data.types import Example, Record, RecordError
from tunesmith.disk import expanded
from tunesmith.errors import UserError, UserErrors
from tunesmith.objectives import objective_of
from tunesmith.objectives.base import Records
from tunesmith.plan.defaults import DataSize, held_out_records

if TYPE_CHECKING:
    from tunesmith.config.schema import Dataset, FormatName, Run

SAMPLE = 64
"""Records that a format is recognised from."""
SAMPLE_BYTES = 1 << 24
"""Bytes of records that a format is recognised from: of long ones, fewer."""
UNREAD_SAMPLE = 20
"""Records that are looked at for fields which nothing is made of."""
HOPELESS = 1000
"""Bad records without a good one, after which nothing more is read."""
SHOWN = 20
"""Bad records that a message names; the rest are counted."""

T = TypeVar("T")


class BadRecords(UserErrors):
    """Records that cannot be trained on: how many of each kind, and the first of them."""

    def __init__(self, bad: Sequence[RecordError], records: int | None = None):
        self.bad = tuple(bad)
        of = f" of {records:,}" if records else ""
        if len(bad) == 1:
            super().__init__([f"{bad[0]} Mend it, or leave it out with `bad_records: skip`."])
            return
        more = [f"... and {len(bad) - SHOWN:,} more."] if len(bad) > SHOWN else []
        super().__init__(
            [
                f"{len(bad):,}{of} records cannot be trained on ({kinds(bad)}).",
                *(str(error) for error in bad[:SHOWN]),
                *more,
                "Mend them, or leave them out with `bad_records: skip`.",
            ]
        )


def kinds(bad: Iterable[RecordError]) -> str:
    """`200 empty answer, 80 no answer`"""
    return ", ".join(f"{count:,} {kind}" for kind, count in Counter(error.kind for error in bad).most_common())


@dataclass(frozen=True)
class Prepared:
    """The data of a run, ready for the loader."""

    train: tuple[TokenStore, ...]
    weights: tuple[float, ...]
    """Weights of the training data sets, as the run gives them."""
    evals: tuple[TokenStore, ...]
    warnings: list[str]
    fingerprint: str
    """A hash of the training data and its weights: what must be the same for a run to be continued."""
    encoder: chat.Encoder
    """What made the examples; prompts of the trained model are made by one like it."""
    bad: tuple[RecordError, ...] = ()
    """Records that were left out (`bad_records: skip`)."""
    held_out: int = 0
    """Records of the training data that were to be among `evals` instead; duplicates go with them."""
    leaks: tuple[str, ...] = ()
    """The warnings that say of held-out examples that they are trained on."""

    def sharing(self) -> Prepared:
        """The same data with the prompts of pairs once (`TokenStore.sharing`)."""
        train, evals = (tuple(store.sharing() for store in some) for some in (self.train, self.evals))
        return replace(self, train=train, evals=evals, fingerprint=_fingerprint_of(train, self.weights))

    @property
    def size(self) -> DataSize:
        """The size of what is trained on in an epoch; no example of it, or of what is evaluated, is longer than
        `longest`."""
        weighed = list(zip(self.train, self.weights, strict=True))
        return DataSize(
            examples=sum(weight * len(store) for store, weight in weighed),
            tokens=sum(weight * int(store.lengths.sum()) for store, weight in weighed),
            longest=max(int(store.lengths.max()) for store in (*self.train, *self.evals)),
            is_exact=True,
            shared=sum(weight * store.shared_tokens for store, weight in weighed),
        )


def prepare(
    run: Run,
    tokenizer: Any,
    vocab_size: int,
    *,
    max_length: int | None = None,
    held_out: int | None = None,
    eval_length: int | None = None,
    decoder_start: tuple[int | None] | None = None,
    progress: Progress | None = None,
    workers: int | None = None,
) -> Prepared:
    """Tokenize, or find in the cache, all data of the run; raise UserError for what would train wrong.

    `vocab_size` and `max_length` (its number of positions) are the model's. Of the training records so many are
    `held_out`; as many as the settings, or the size of the data, say where that is None. Held-out data sets are cut to
    `eval_length`, where that is less. Of an encoder-decoder, `decoder_start` has the token that its decoder begins with
    (`PairEncoder.start`).
    """
    length = run.sequence_length
    if max_length is not None and length > max_length:
        raise UserError(
            f"sequence_length {length} is beyond the model's {max_length} positions; set it to {max_length} or less."
        )
    encoder = _encoder_of(run, tokenizer, decoder_start)
    warnings = list(guard.check_encoder(encoder, tokenizer, vocab_size))

    records_of = objective_of(run).records
    works = [_Work(dataset, encoder, vocab_size, records_of) for dataset in (*run.data, *run.eval_texts)]
    titles = [*unique([d.title for d in run.data]), *unique([d.title for d in run.eval_texts])]
    _each(works, _Work.look)
    check_output(run)
    wholes, bad = _tokenized(run, works, titles, progress, workers)
    stores = _stores_of(run, wholes, titles, eval_length=eval_length, is_paired=decoder_start is not None)
    train, evals = tuple(stores[: len(run.data)]), tuple(stores[len(run.data) :])
    if run.exclude is not None:
        train, warning = excluded.leave_out(train, Path(run.exclude))
        warnings.append(warning)
    for store in stores:
        warnings += [text for text in (*store.warnings, *_losses(store, records_of)) if text not in warnings]
    if held_out is None:
        held_out = held_out_records(run, [store.record_count for store in train])
    kept, held = split(train, held_out)
    train, evals = tuple(kept), (*evals, *held)
    warnings += guard.missing_kinds(run.objective, run.labels, [store.single_values for store in train])
    leaks = guard.overlap_warnings({s.title: s.hashes for s in train}, {s.title: s.hashes for s in evals})
    warnings += leaks
    weights = tuple(dataset.weight for dataset in run.data)
    fingerprint = _fingerprint_of(train, weights)
    return Prepared(train, weights, evals, warnings, fingerprint, encoder, tuple(bad), held_out, tuple(leaks))


def _encoder_of(run: Run, tokenizer: Any, decoder_start: tuple[int | None] | None) -> chat.Encoder:
    template = read_template(run.chat_template) if run.chat_template else None
    if decoder_start is None:
        encoder = chat.Encoder(tokenizer, template=template, train_on=run.train_on, special_tokens=run.special_tokens)
    else:
        encoder = PairEncoder(
            tokenizer,
            start=decoder_start[0],
            template=template,
            train_on=run.train_on,
            special_tokens=run.special_tokens,
        )
    encoder.labels = tuple(run.labels)
    return encoder


def _stores_of(
    run: Run, wholes: Sequence[Whole], titles: Sequence[str], *, eval_length: int | None, is_paired: bool
) -> list[TokenStore]:
    """The data sets cut to the length of a sequence; the held-out ones, which come last, to `eval_length`."""
    length, records_of = run.sequence_length, objective_of(run).records
    stores = []
    for number, (whole, title) in enumerate(zip(wholes, titles, strict=True)):
        longest = length if number < len(run.data) else min(length, eval_length or length)
        if records_of == "prompts":
            stores.append(_cut_prompts(whole, title, run))
            continue
        # A chat's beginning is a whole turn or two; of a text, all is as good as its beginning.
        too_long = run.too_long or ("split" if whole.format == "text" else "truncate")
        store = cut(whole, title, sequence_length=longest, too_long=too_long)
        stores.append(_with_sources(store, longest) if is_paired else store)
    return stores


def _fingerprint_of(stores: Sequence[TokenStore], weights: Sequence[float]) -> str:
    return _hash([store.fingerprint for store in stores], [float(weight) for weight in weights])


def _tokenized(
    run: Run, works: Sequence[_Work], titles: Sequence[str], progress: Progress | None, workers: int | None
) -> tuple[list[Whole], list[RecordError]]:
    """All data sets, and the records that were left out; BadRecords with those of all of them where any is too many."""
    wholes, bad = [], []
    for work, title in zip(works, titles, strict=True):
        try:
            wholes.append(work.whole(title, progress, workers))
        except BadRecords as errors:
            bad += errors.bad
            continue
        bad += [error for error in wholes[-1].bad if error not in bad]
    is_whole = len(wholes) == len(works)
    if bad and (run.bad_records == "stop" or not is_whole):
        raise BadRecords(bad, sum(whole.records for whole in wholes) if is_whole else None)
    return wholes, bad


def _cut_prompts(whole: Whole, title: str, run: Run) -> TokenStore:
    """Prompts cut so that answers have room behind them; long ones are dropped unless asked for, since a part of a
    question is another question."""
    _check_room(whole, title, run)
    room = run.sequence_length - run.rollout.max_answer_tokens
    return cut(whole, title, sequence_length=room, too_long=run.too_long or "drop")


def _check_room(whole: Whole, title: str, run: Run) -> None:
    """UserError where no prompt leaves room for an answer."""
    shortest, answer = int(np.diff(whole.offsets).min()), run.rollout.max_answer_tokens
    length = run.sequence_length
    if shortest + answer > length and run.too_long != "truncate":
        raise UserError(
            f"{title}: no prompt is left: the shortest has {shortest:,} tokens, and rollout.max_answer_tokens "
            f"({answer:,}) leaves {length - answer:,} of sequence_length {length:,} for it; raise sequence_length, or "
            "lower rollout.max_answer_tokens."
        )


def _with_sources(store: TokenStore, longest: int) -> TokenStore:
    """The examples whose target leaves room for a source, as pairs; UserError where none does."""
    store = replace(store, is_paired=True)
    has_source = store.widths[:, 0] >= 1
    if not has_source.any():
        raise UserError(
            f"{store.title}: the targets of all examples have {longest:,} tokens or more, which leaves no room for "
            "their sources; raise sequence_length."
        )
    if has_source.all():
        return store
    lost = int((~has_source).sum())
    said = f"{store.title}: {lost} examples were left out, whose targets alone have {longest:,} tokens or more."
    return replace(store.part(has_source, store.title), warnings=(*store.warnings, said))


def check_output(run: Run) -> None:
    """Refuse an output below a folder of data: the run's own files would be trained on."""
    output = expanded(run.output).resolve()
    for dataset in (*run.data, *run.eval):
        folder = searched_folder(dataset)
        if folder is not None and output.is_relative_to(folder.resolve()):
            raise UserError(
                f"output: {run.output} lies inside the data {dataset.path}, so the run's own files would be trained "
                "on; choose an output elsewhere."
            )


def answers_reason(encoder: chat.Encoder, stores: Sequence[TokenStore]) -> bool:
    """Whether most examples ask for their answers as the template asks for answers that begin with reasoning, where it
    asks for these and for others in different words."""
    try:
        endings = [
            _common_end(*(encoder.prompt([types.Message("user", word)], reasons=r) for word in ("vwkya", "qxzjb")))
            for r in (False, True)
        ]
    except UserError:
        return False
    votes = 0
    for one in stores if endings[0] != endings[1] else ():
        for i in range(min(len(one), SAMPLE)):
            ids, weights, _ = one.example(i)
            asked = ids[: int((weights > 0).argmax())].tolist()
            fits = [asked[len(asked) - len(ending) :] == ending for ending in endings]
            if any(fits):  # both, where one ends as the other does: it is the longer one
                longer = len(endings[1]) > len(endings[0])
                votes += 1 if fits[1] and (longer or not fits[0]) else -1
    return votes > 0


def _common_end(a: list[int], b: list[int]) -> list[int]:
    size = next((i for i, (x, y) in enumerate(zip(reversed(a), reversed(b), strict=False)) if x != y), 0)
    return a[len(a) - size :]


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

    def __init__(self, dataset: Dataset, encoder: chat.Encoder, vocab_size: int, records: Records):
        self._dataset, self._encoder, self._vocab_size, self._records = dataset, encoder, vocab_size, records
        self._stored: Whole | None = None
        self._format: FormatName | None = None
        self._key = ""

    def look(self) -> None:
        """Find the files and, unless the cache has them already, recognise their format."""
        dataset = self._dataset
        # Examples know the file they came from, so the files' names belong here too.
        names = [str(path) for path in data_files(dataset)] if dataset.path else [dataset.hub]
        self._key = _hash(
            names,
            source.fingerprint(dataset),
            self._encoder.fingerprint,
            dataset.format,
            dict(sorted(dataset.fields.items())),
            self._vocab_size,
            _code(),
            *([] if self._records == "texts" else [self._records]),
            *self._encoder.labels,
        )
        self._stored = stored(self._key)
        if self._stored is None:
            is_other = dataset.format not in (None, *FORMATS[self._records])
            if dataset.format and not is_other:
                self._format = dataset.format
            else:
                self._format = recognise(sample(dataset), dataset, self._records)

    def whole(self, title: str, progress: Progress | None, workers: int | None) -> Whole:
        # Looked up again: a data set may be used twice in a run.
        if found := self._stored or stored(self._key):
            return found
        assert self._format
        watch = guard.Watch(self._encoder.end_ids, self._vocab_size)
        unreadable: list[RecordError] = []

        def bad() -> list[RecordError]:
            return sorted((*unreadable, *watch.bad), key=lambda error: (error.origin.file, error.origin.line))

        def notice(noticed: guard.Watch) -> None:
            watch.merge(noticed)
            if not watch.examples and len(unreadable) + len(watch.bad) >= HOPELESS:
                raise BadRecords(bad())

        def judge() -> list[str]:
            if not watch.examples and (unreadable or watch.bad):
                raise BadRecords(bad())
            guard.check_dataset(title, watch)
            return watch.warnings()

        return build.build(
            self._key,
            title,
            source.read(self._dataset, unreadable.append),
            _Encode(self._encoder, self._format, self._dataset, self._vocab_size, self._records),
            format=self._format,
            vocab_size=self._vocab_size,
            notice=notice,
            warnings=judge,
            bad=bad,
            workers=workers,
            progress=progress,
        )


@dataclass(frozen=True)
class _Encode:
    """Turns records into examples, in the workers; what it sees of them goes into a `Watch`."""

    encoder: chat.Encoder
    format: FormatName
    dataset: Dataset
    vocab_size: int
    records: Records

    def __call__(self, records: list[Record]) -> tuple[list[Example], guard.Watch]:
        watch = guard.Watch(self.encoder.end_ids, self.vocab_size)
        examples = []
        for record in records:
            try:
                item = convert(record, self.format, self.dataset)
                made, documents = preferences.encode(item, self.encoder, record.origin, self.records)
                for part, document in documents:
                    watch.see(record, part, document, self.encoder)
                examples += made
            except RecordError as error:
                error.is_read = True
                watch.bad.append(error)
        return examples, watch


def sample(dataset: Dataset) -> list[Record]:
    """The first records, as many as there are reason to look at."""
    bad: list[RecordError] = []
    sample, size = [], 0
    for record in source.read(dataset, bad.append):
        sample.append(record)
        size += record.size
        if len(sample) == SAMPLE or size >= SAMPLE_BYTES:
            break
    if not sample:
        raise BadRecords(bad)
    return sample


def unread_fields(dataset: Dataset, records: Records) -> list[str]:
    """Fields of the first records that nothing is made of."""
    first = sample(dataset)
    return unread(first[:UNREAD_SAMPLE], recognise(first, dataset, records), dataset)


def _losses(store: TokenStore, records_of: Records) -> list[str]:
    """Sentences about what was left out, dropped and truncated."""
    report, lines = store.report, []
    is_grouped = store.document_count > len(store)
    both = " A sequence must hold both answers of a pair with their prompts: a longer sequence_length may help."
    more = both if is_grouped else ""
    if records_of == "prompts":
        more = " A prompt must leave room for an answer of rollout.max_answer_tokens."
    if store.bad:
        lines.append(f"{store.title}: left out {len(store.bad):,} of {report.records:,} records ({kinds(store.bad)}).")
    if report.dropped_targets_cut_off:
        count = report.dropped_targets_cut_off
        lines.append(
            f"{store.title}: dropped for having no target left within sequence_length: {count} examples or pieces."
            f"{more}"
        )
    if report.dropped_too_long:
        count = report.dropped_too_long
        lines.append(
            f"{store.title}: dropped for being longer than sequence_length: {count} (of {report.records} records)."
            f"{more}"
        )
    if report.truncated:
        lines.append(
            f"{store.title}: {report.truncated} examples (of {report.records} records) were truncated; the longest has "
            f"{report.longest_uncut} tokens."
        )
    return lines


def _each(items: Sequence[T], look: Callable[[T], None]) -> None:
    """Looks at all items, then raises all errors for people at once."""
    errors: list[UserError] = []
    for item in items:
        try:
            look(item)
        except UserError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise UserErrors([text for error in errors for text in getattr(error, "messages", [str(error)])])


def _hash(*parts: Any) -> str:
    return sha256(json.dumps(parts).encode()).hexdigest()


@cache
def _code() -> str:
    """A hash of this package's code, which turns records into examples: what another version made is not taken for
    ours."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
