"""What a model is evaluated on: files of records, each with a shape that says how its records are scored.

    loss           texts, conversations, questions with answers: how likely the answers are
    choices        question, choices, answer: which choice is likeliest, by its text
    letters        the same, asked with the choices listed, by their letters (how MMLU is published)
    answers        question and answer, problem and solution: the answer is generated, and compared by a rule
    instructions   prompt, instruction_id_list, kwargs: the answer is generated, and checked (IFEval)
    judge          turns: the answers are generated, and judged by another model (MT-bench)
    lm-eval        tasks of lm-eval, by their names

`FILE` takes the shape of its records; `KIND:FILE` insists. Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tunesmith.config.schema import TASK_FORMATS, Dataset
from tunesmith.data import source
from tunesmith.data.recognise import recognise as recognise_format
from tunesmith.data.types import Origin, Record, RecordError
from tunesmith.errors import UserError, listed
from tunesmith.evaluate import instructions

Kind = Literal["loss", "choices", "letters", "answers", "instructions", "judge", "lm-eval", "samples"]
KINDS: tuple[Kind, ...] = ("loss", "choices", "letters", "answers", "instructions", "judge", "lm-eval")
Rule = Literal["gsm8k", "math", "exact"]
OWN = {"general": "choices"}
"""Tasks that come with this package, and their kinds."""
GROUPS = ("group", "subject", "category")
"""Fields that say to which group a record belongs, the first that is there."""
VERSION = 1
"""Version of prompts and scores: raise it when the same record and model give other results."""


@dataclass(frozen=True)
class Choices:
    """A question with its choices: the model continues `context` with each of the `continuations`."""

    context: str
    continuations: tuple[str, ...]
    lengths: tuple[int, ...]
    """Characters of each choice, by which its log-likelihood is divided for `acc_norm`."""
    gold: int
    has_equal: bool = False
    """Two of the choices are the same, so that one of them is right and the other is not."""


@dataclass(frozen=True)
class Question:
    """What is answered in words: the user's turns, and what the answers are held against."""

    turns: tuple[str, ...]
    target: Any = None
    """The reference answer, a tuple of those that are as right, or the instructions; None where a judge decides."""


@dataclass(frozen=True)
class Text:
    """What is scored by its own likelihood."""

    record: Record
    format: str


@dataclass(frozen=True)
class Item:
    id: str
    """A hash of the record's content, by which results are found again."""
    content: Choices | Question | Text
    origin: Origin
    group: str | None = None

    @property
    def question(self) -> Question:
        assert isinstance(self.content, Question)
        return self.content


@dataclass(frozen=True)
class Task:
    kind: Kind
    title: str
    items: tuple[Item, ...] = ()
    rule: Rule | None = None
    """The rule by which answers are compared."""
    dataset: Dataset | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What decides about scores besides the records and the model, such as the longest answer."""

    @property
    def key(self) -> str:
        """A hash of everything that decides about an item's scores but the item and the model."""
        known = [VERSION, self.kind, self.rule, dict(self.settings)]
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]

    def with_settings(self, **settings: Any) -> Task:
        return replace(self, settings={**self.settings, **settings})


def read_tasks(given: Sequence[str], *, limit: int | None = None) -> list[Task]:
    """The tasks behind `--tasks`: files, names, or `KIND:` before either, with commas between them."""
    tasks = []
    for one in _separated(given):
        kind, name = _kind_and_name(one)
        if kind == "lm-eval":
            tasks.append(Task(kind, name, settings={"limit": limit} if limit else {}))
        else:
            tasks.append(read_task(name, kind, limit=limit))
    seen = Counter(task.title for task in tasks)
    for number, task in enumerate(tasks):
        if seen[task.title] > 1:
            tasks[number] = replace(task, title=f"{task.title} ({task.kind})")
    titles = [task.title for task in tasks]
    if len(set(titles)) < len(titles):
        twice = next(title for title in titles if titles.count(title) > 1)
        raise UserError(f"--tasks: {twice} is there twice; name each task once.")
    return tasks


def read_task(name: str, kind: Kind | None = None, *, limit: int | None = None) -> Task:
    """One file of records, or a task of this package's own."""
    path = Path(__file__).with_name(f"{name}.jsonl") if name in OWN and not Path(name).exists() else Path(name)
    dataset = Dataset(path=str(path), limit=limit)
    try:
        records = list(source.read(dataset))
    except UserError as error:
        if path.exists() or isinstance(error, RecordError):
            raise
        raise UserError(
            f"--tasks: {name} is neither a file nor a task known here ({', '.join(OWN)}; lm-eval:NAME for those of "
            "lm-eval)."
        ) from error
    return _task_of(records, dataset, kind or recognise(records))


def task_of(dataset: Dataset) -> Task:
    """A data set of `eval` whose `format` is a task's."""
    assert dataset.format in TASK_FORMATS
    if dataset.fields:
        raise UserError(f"eval: {dataset.title}: tasks know their fields by name; leave `fields` out.")
    if dataset.path in OWN and not Path(dataset.path).exists():
        named = {"path": str(Path(__file__).with_name(f"{dataset.path}.jsonl")), "name": dataset.title}
        dataset = dataset.model_copy(update=named)
    return _task_of(list(source.read(dataset)), dataset, dataset.format)


def _task_of(records: Sequence[Record], dataset: Dataset, found: Kind) -> Task:
    rule: Rule | None = None
    if found == "loss":
        make = _texts(records, dataset)
    elif found == "answers":
        rule, make = _rule_of(records)
    else:
        asked = {"instructions": _instructed, "judge": _asked, "samples": _asked}
        make = ({"choices": _by_text, "letters": _by_letter} | asked)[found]
    return Task(found, dataset.title, tuple(_items(records, make)), rule, dataset)


def recognise(records: Sequence[Record]) -> Kind:
    """The kind of task, by the fields of the first record; that the others have them, too, is seen when they are
    read."""
    names = records[0].fields.keys()
    if "instruction_id_list" in names:
        return "instructions"
    if "turns" in names:
        return "judge"
    if _first(names, CHOICES) and (_first(names, QUESTIONS) or _first(names, GOLD)):
        return "choices"
    if {"problem", "solution"} <= names:
        return "answers"
    if {"question", "answer"} <= names and isinstance(records[0].fields["answer"], str | int | float | list | tuple):
        return "answers"
    return "loss"


# Multiple choice

QUESTIONS = ("question", "query", "ctx")
CHOICES = ("choices", "options", "endings")
GOLD = ("answer", "answerKey", "label", "gold")


def _by_text(record: Record) -> Choices:
    """Choices as lm-eval asks ARC and its like: the text of each after `Answer:`."""
    question, choices, gold, name = _choices_of(record)
    context = question.strip() if name == "ctx" else f"Question: {question.strip()}\nAnswer:"
    return Choices(
        context, tuple(f" {one}" for one in choices), tuple(len(one) for one in choices), gold, _has_equal(choices)
    )


def _by_letter(record: Record) -> Choices:
    """Choices as lm-eval asks MMLU: all listed, the letter of each after `Answer:`."""
    question, choices, gold, _ = _choices_of(record)
    if len(choices) > 26:
        raise RecordError("too many choices", record.origin, f"{len(choices)} choices are more than there are letters")
    subject = record.fields.get("subject")
    about = f" about {subject.replace('_', ' ')}" if isinstance(subject, str) and subject else ""
    description = f"The following are multiple choice questions (with answers){about}.\n\n" if about else ""
    letters = [chr(ord("A") + number) for number in range(len(choices))]
    lines = [question.strip(), *(f"{letter}. {one}" for letter, one in zip(letters, choices, strict=True)), "Answer:"]
    return Choices(
        description + "\n".join(lines),
        tuple(f" {one}" for one in letters),
        (1,) * len(letters),
        gold,
        _has_equal(choices),
    )


def equal_choices(task: Task) -> str | None:
    """What to say of items with two choices that are the same; some published tasks have a few."""
    found = [item for item in task.items if isinstance(item.content, Choices) and item.content.has_equal]
    if not found:
        return None
    return (
        f"{task.title}: {len(found):,} of {len(task.items):,} questions have two choices that are the same, of which "
        f"one counts as wrong; the first is {found[0].origin}."
    )


def _has_equal(choices: Sequence[str]) -> bool:
    return len({one.strip() for one in choices}) < len(choices)


def _choices_of(record: Record) -> tuple[str, list[str], int, str]:
    fields = record.fields
    names = [_first(fields, wanted) for wanted in (QUESTIONS, CHOICES, GOLD)]
    for name, wanted in zip(names, (QUESTIONS, CHOICES, GOLD), strict=True):
        if name is None:
            raise RecordError("missing field", record.origin, f"the field {' or '.join(wanted)} is missing")
    asked, offered, right = (str(name) for name in names)
    question = _text_of(record, asked)
    listed_choices, labels = fields[offered], None
    if isinstance(listed_choices, Mapping):  # ARC: {"text": [...], "label": [...]}
        listed_choices, labels = listed_choices.get("text"), listed_choices.get("label")
    is_text = isinstance(listed_choices, str) or not isinstance(listed_choices, Sequence)
    if is_text or len(listed_choices) < 2 or not all(isinstance(one, str | int | float) for one in listed_choices):
        raise RecordError("wrong type", record.origin, f"`{offered}` is no list of at least two texts")
    choices = [str(one) for one in listed_choices]
    if not all(one.strip() for one in choices):
        raise RecordError("empty choice", record.origin, f"one of its `{offered}` is empty")
    return question, choices, _gold_of(record, right, choices, labels), asked


def _gold_of(record: Record, name: str, choices: list[str], labels: Any) -> int:
    """Which choice is right: by its number from 0, its label, its text or its letter."""
    gold = record.fields[name]
    found: int | None = None
    if isinstance(gold, float) and gold.is_integer():  # as columns with gaps hold numbers
        gold = int(gold)
    if isinstance(gold, bool) or not isinstance(gold, int | str):
        raise RecordError("wrong type", record.origin, f"`{name}` is no number, letter or text of a choice")
    if isinstance(gold, int):
        found = gold if 0 <= gold < len(choices) else None
    elif isinstance(labels, Sequence) and gold in labels:
        found = list(labels).index(gold)
    elif choices.count(gold) == 1:
        found = choices.index(gold)
    else:
        text = gold.strip().strip("().").strip()
        if len(text) == 1 and text.isalpha() and text.isascii():
            found = ord(text.upper()) - ord("A")
        elif text.isdecimal():
            found = int(text)
        elif [one.strip() for one in choices].count(gold.strip()) == 1:
            found = [one.strip() for one in choices].index(gold.strip())
    if found is None or not 0 <= found < len(choices):
        raise RecordError(
            "no such choice",
            record.origin,
            f"`{name}` is {json.dumps(gold, ensure_ascii=False)}, which is none of its {len(choices)} choices (numbers "
            "count from 0)",
        )
    return found


# Answers that are generated


def _rule_of(records: Sequence[Record]) -> tuple[Rule, Callable[[Record], Question]]:
    """How answers are compared, by what the first record's reference looks like."""
    fields = records[0].fields
    asked = "problem" if "problem" in fields else "question" if "question" in fields else "prompt"
    wanted = next((name for name in ("answer", "solution", "completion", "response") if name in fields), None)
    if asked not in fields or wanted is None:
        raise UserError(
            f"{records[0].origin}: answers need a `question` with an `answer`, or a `problem` with a `solution`; found "
            f"{listed(f'`{name}`' for name in fields)}."
        )
    reference = " ".join(map(str, _references(fields[wanted])))
    if "solution" in fields and "\\boxed" in str(fields["solution"]):
        rule, wanted = "math", "solution"
    else:
        rule = "math" if "\\boxed" in reference else "gsm8k" if "####" in reference else "exact"

    def make(record: Record) -> Question:
        target = record.fields.get(wanted)
        each = _references(target)
        if not each or not all(_is_reference(one) for one in each):
            reason = f"the field `{wanted}` is missing, or no text or number, nor a list of such"
            raise RecordError("missing field", record.origin, reason)
        if rule == "gsm8k" and not all("####" in str(one) for one in each):
            raise RecordError("no final answer", record.origin, f"`{wanted}` has no `####` before its final answer")
        if rule == "math" and wanted == "solution" and not all("\\boxed" in str(one) for one in each):
            raise RecordError("no final answer", record.origin, f"`{wanted}` has no \\boxed final answer")
        is_list = isinstance(target, list | tuple)
        return Question((_text_of(record, asked),), tuple(map(str, each)) if is_list else str(target))

    return rule, make


def _references(target: Any) -> tuple[Any, ...]:
    """All answers that are right: one, or those of a list."""
    return tuple(target) if isinstance(target, list | tuple) else (target,)


def _is_reference(one: Any) -> bool:
    return isinstance(one, str | int | float) and not isinstance(one, bool) and bool(str(one).strip())


def _instructed(record: Record) -> Question:
    ids, options = record.fields.get("instruction_id_list"), record.fields.get("kwargs")
    if not isinstance(ids, Sequence) or isinstance(ids, str) or not ids or not all(isinstance(one, str) for one in ids):
        raise RecordError("wrong type", record.origin, "`instruction_id_list` is no list of names")
    options = [{}] * len(ids) if options is None else options
    if not isinstance(options, Sequence) or len(options) != len(ids):
        raise RecordError("wrong type", record.origin, "`kwargs` has not one entry for each of its instructions")
    given = tuple(
        instructions.Instruction(name, {key: value for key, value in (some or {}).items() if value is not None})
        for name, some in zip(ids, options, strict=True)
    )
    for one in given:
        if problem := instructions.problem_of(one):
            raise RecordError("unknown instruction", record.origin, problem)
    return Question((_text_of(record, "prompt"),), given)


def _asked(record: Record) -> Question:
    turns = record.fields.get("turns")
    if turns is None:
        return Question((_text_of(record, _first(record.fields, ("prompt", "instruction", "question")) or "turns"),))
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise RecordError("wrong type", record.origin, "`turns` is no list of texts")
    if not all(isinstance(one, str) and one.strip() for one in turns):
        raise RecordError("wrong type", record.origin, "`turns` holds what is no text")
    reference = record.fields.get("reference")
    return Question(tuple(turns), reference if isinstance(reference, list | tuple) else None)


# Texts


def _texts(records: Sequence[Record], dataset: Dataset) -> Callable[[Record], Text]:
    format = recognise_format(records[:64], dataset)
    return lambda record: Text(record, format)


# What all share


def _items(records: Iterable[Record], make: Callable[[Record], Any]) -> Iterable[Item]:
    seen: Counter[str] = Counter()
    for record in records:
        content = json.dumps(record.fields, sort_keys=True, ensure_ascii=False, default=str)
        digest = hashlib.sha256(content.encode(errors="replace")).hexdigest()[:20]
        seen[digest] += 1
        id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
        group = next((value for name in GROUPS if isinstance(value := record.fields.get(name), str) and value), None)
        yield Item(id, make(record), record.origin, group)


def _text_of(record: Record, name: str) -> str:
    value = record.fields.get(name)
    if not isinstance(value, str) or not value.strip():
        raise RecordError("missing field", record.origin, f"the field `{name}` is missing, or no text")
    return value


def _first(fields: Iterable[str], wanted: Sequence[str]) -> str | None:
    return next((name for name in wanted if name in fields), None)


def _separated(given: Sequence[str]) -> list[str]:
    parts = []
    for one in given:
        parts += [one] if Path(one).exists() else [part.strip() for part in one.split(",")]
    if not parts or not all(parts):
        raise UserError("--tasks: name files or tasks, with commas between them.")
    return parts


def _kind_and_name(one: str) -> tuple[Kind | None, str]:
    before, colon, name = one.partition(":")
    if not colon or Path(one).exists():
        return None, one
    for kind in KINDS:
        if before == kind and name:
            return kind, name
    raise UserError(f"--tasks: {one}: before the colon stands one of {', '.join(KINDS)}.")
