"""The names of the classes where the settings give none: the distinct labels of the training data, sorted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from tunesmith.config.schema import Dataset, Run
from tunesmith.data import source
from tunesmith.data.convert import convert
from tunesmith.data.formats import FORMATS, WANTED
from tunesmith.data.prepare import sample
from tunesmith.data.recognise import recognise
from tunesmith.data.types import Labelled, RecordError, Tagged
from tunesmith.errors import UserError, listed
from tunesmith.objectives import objective_of

MOST = 1000
"""Distinct values of more than so many are no classes."""
FEW = 20
"""Up to so many distinct values may be classes even where most records have one of their own."""
GIVE = "Name the classes in `labels`"
FoundLabel = tuple[str | float, str | None]
"""A label, and what its record calls it beside."""


def needs_labels(run: Run) -> bool:
    return run.objective in ("classify", "classify_tokens") and not run.labels


def with_labels(run: Run) -> Run:
    """The run with the labels that its training data have; the run itself where they are given, or it needs none."""
    if not needs_labels(run):
        return run
    labels = Counter(label for dataset in run.data for label in _labels_in(dataset, run))
    class_names = [names for dataset in run.data if (names := _class_names(dataset, run))]
    return run.model_copy(update={"labels": _common_names(class_names, labels) or _names(labels)})


def _labels_in(dataset: Dataset, run: Run) -> Iterator[FoundLabel]:
    """The label of each record, or of each word. Records that cannot be read are left out here: preparing the data
    names them all."""
    records = objective_of(run).records
    known = dataset.format if dataset.format in FORMATS[records] else None
    format = known or recognise(sample(dataset), dataset, records)
    first, is_any = None, False
    for record in source.read(dataset, lambda _: None):
        try:
            item = convert(record, format, dataset)
        except RecordError as error:
            is_score = isinstance(record.fields.get(dataset.fields.get("label", "label")), float)
            if error.kind == "wrong label" and is_score and run.bad_records == "stop":
                raise UserError(f"{str(error).rstrip('.')}; scores are for `objective: reward`.") from None
            first = first or error
            continue
        is_any = True
        if isinstance(item, Labelled):
            yield item.label, item.name
        elif isinstance(item, Tagged):
            yield from ((tag, None) for tag in item.tags if tag is not None)
    if first is not None and not is_any:  # none has a label: why the first has not says more than that
        raise first


def _class_names(dataset: Dataset, run: Run) -> list[str]:
    """The classes of a data set whose columns name them."""
    names = WANTED["tagged"][1] if run.objective == "classify_tokens" else ("label",)
    mapped = [dataset.fields[name] for name in names if name in dataset.fields]
    return source.class_names(dataset, mapped or names)


def _common_names(class_names: list[list[str]], labels: Iterable[FoundLabel]) -> list[str]:
    """The names that the columns give their classes, or none where a label is another. UserError where a number is one
    class in one data set and another in the next."""
    names = max(class_names, key=len, default=[])
    if other := next((others for others in class_names if others != names[: len(others)]), None):
        raise UserError(
            f"The data sets' columns give numbers to their classes in different orders ({listed(names, most=3)}; "
            f"{listed(other, most=3)}), so that a number means two; write them alike, or the names in their place."
        )
    if len(set(names)) < max(2, len(names)):
        return []
    known = set(names)
    fits = all(label in known if isinstance(label, str) else label in range(len(names)) for label, _ in labels)
    return names if fits else []


def _names(labels: Counter[FoundLabel]) -> list[str]:
    """The distinct labels as names of classes, sorted; UserError where they are no classes."""
    distinct = {value for value, _ in labels}
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
        only = listed([f"`{label}`" for label in few]) or "nothing"
        raise UserError(f"The data have {only} for a label, and classes are two or more. {GIVE}.")
    total = labels.total()
    if len(distinct) > MOST or (len(distinct) > FEW and 2 * len(distinct) > total):
        raise UserError(
            f"The data's {total:,} labels have {len(distinct):,} different values ({listed(few, most=3)}), which "
            f"are too many to be classes. {GIVE}, or look at `fields`."
        )
    if numbers and numbers != set(range(len(numbers))):
        raise UserError(
            f"The data's labels are the numbers {listed(sorted(map(int, numbers)))}, not all from 0. {GIVE}, or say "
            "`fields: {label: NAME}` where another field has their names."
        )
    _check_spelling(names)
    ordered = sorted(names, key=_place) or [str(number) for number in range(len(numbers))]
    return _called(ordered, labels) or ordered


def _check_spelling(names: set[str]) -> None:
    """UserError where two names are one but for capitals or spaces."""
    spelled: dict[str, str] = {}
    for name in sorted(names):
        other = spelled.setdefault(" ".join(name.casefold().split()), name)
        if other != name:
            raise UserError(
                f"The data's labels {other!r} and {name!r} differ in capitals or spaces alone. Mend them, or name both "
                "classes in `labels`."
            )


def _called(ordered: list[str], labels: Iterable[FoundLabel]) -> list[str]:
    """What records call their labels beside numbers all from 0, where each number has a name of its own."""
    beside: dict[str, set[str]] = {number: set() for number in ordered}
    for label, name in labels:
        if name is not None:
            beside[label if isinstance(label, str) else str(int(label))].add(name)
    has_one_name = all(len(beside[number]) == 1 for number in ordered)
    are_all = [str(number) for number in range(len(ordered))] == ordered
    names = [name for number in ordered for name in beside[number]]
    return names if has_one_name and are_all and len(set(names)) == len(ordered) else []


def _place(name: str) -> tuple[bool, int, str]:
    """Numbers by their size, before other names."""
    is_number = name.isascii() and name.isdigit() and len(name) < 10
    return not is_number, int(name) if is_number else 0, name
