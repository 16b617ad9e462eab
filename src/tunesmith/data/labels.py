"""The names of the classes where the settings give none: the distinct labels of the training data, sorted."""

from __future__ import annotations

from collections.abc import Iterator

from tunesmith.config.schema import Dataset, Run
from tunesmith.data import formats, source
from tunesmith.data.prepare import sample
from tunesmith.data.types import Labelled, RecordError, Tagged
from tunesmith.errors import UserError, listed
from tunesmith.objectives import objective_of

MOST = 1000
"""Distinct values of more than so many are no classes."""
FEW = 20
"""So many may be classes even where most records have one of their own."""
GIVE = "Name the classes in `labels`"


def needs_labels(run: Run) -> bool:
    return run.objective in ("classify", "classify_tokens") and not run.labels


def with_labels(run: Run) -> Run:
    """The run with the labels that its training data have; the run itself where they are given, or it needs none."""
    if not needs_labels(run):
        return run
    values: list[str | float] = [value for dataset in run.data for value in _values(dataset, run)]
    return run.model_copy(update={"labels": _names(values)})


def _values(dataset: Dataset, run: Run) -> Iterator[str | float]:
    """Records that cannot be read are left out here: preparing the data names them all."""
    records = objective_of(run).records
    known = dataset.format if dataset.format in formats.FORMATS[records] else None
    format = known or formats.recognise(sample(dataset), dataset, records)
    for record in source.read(dataset, lambda _: None):
        try:
            item = formats.convert(record, format, dataset)
        except RecordError as error:
            is_score = isinstance(record.fields.get(dataset.fields.get("label", "label")), float)
            if error.kind == "wrong label" and is_score and run.bad_records == "stop":
                raise UserError(f"{str(error).rstrip('.')}; scores are for `objective: reward`.") from None
            continue
        if isinstance(item, Labelled):
            yield item.label
        elif isinstance(item, Tagged):
            yield from (tag for tag in item.tags if tag is not None)


def _names(values: list[str | float]) -> list[str]:
    """UserError where the distinct values are no classes."""
    distinct = set(values)
    names = {value for value in distinct if isinstance(value, str)}
    numbers = {value for value in distinct if not isinstance(value, str)}
    few = sorted(map(str, distinct))
    if names and numbers:
        raise UserError(f"The data's labels are names and numbers ({listed(few)}). {GIVE}, in the numbers' order.")
    if any(not float(value).is_integer() for value in numbers):
        raise UserError(
            f"The data's labels are numbers with fractions ({listed(few)}): scores, for `objective: reward`."
        )
    if len(distinct) < 2:
        raise UserError(f"The data have {listed(few) or 'nothing'} for a label, and classes are two or more. {GIVE}.")
    if len(distinct) > MOST or (len(distinct) > FEW and 2 * len(distinct) > len(values)):
        raise UserError(
            f"The data's {len(values):,} labels have {len(distinct):,} different values ({listed(few, most=3)}), which "
            f"are too many to be classes. {GIVE}, or look at `fields`."
        )
    if numbers and numbers != set(range(len(numbers))):
        raise UserError(
            f"The data's labels are the numbers {listed(sorted(map(int, numbers)))}, not all from 0. {GIVE}."
        )
    if any(not name.strip() for name in names):
        raise UserError(f"A label in the data is empty. {GIVE}, or mend it.")
    return sorted(names, key=_place) or [str(number) for number in range(len(numbers))]


def _place(name: str) -> tuple[bool, int, str]:
    """Numbers by their size, before other names."""
    is_number = name.isascii() and name.isdigit() and len(name) < 10
    return not is_number, int(name) if is_number else 0, name
