"""Records -> conversations, documents, completions, tokens or preferences, in the formats people have.

A format is recognised by the names of its fields, over many records; `format:` and `fields:` of the data set
insist and rename. Converting is strict where leniency would train something else than meant: an answer that is
missing, a part that is no text, a label that is no token. How things become tokens is the business of `chat`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tunesmith.data.messages import asked_as_turns, turns_of
from tunesmith.data.turns import (
    ROLES,
    answer_turn,
    checked,
    is_written_as_turns,
    messages_of,
    system_turns,
    tools_of,
    turns_in_column,
    user_turn,
)
from tunesmith.data.types import (
    Asked,
    Completion,
    Conversation,
    Document,
    Judged,
    Labelled,
    Message,
    Origin,
    Preference,
    Record,
    RecordError,
    Related,
    Tagged,
    Tokens,
)
from tunesmith.data.values import (
    as_integers,
    as_list,
    as_number,
    as_text,
    described,
    first_of,
    lack_of,
    names_of,
    present,
    shown,
    without_nulls,
)
from tunesmith.errors import UserError, listed

if TYPE_CHECKING:
    from tunesmith.config.schema import Dataset, FormatName
    from tunesmith.objectives.base import Records

Item = Conversation | Document | Completion | Tokens | Preference | Judged | Labelled | Asked | Related | Tagged

# What a record must have, in the order in which formats are tried; alternatives in one tuple.
WANTED: dict[str, tuple[tuple[str, ...], ...]] = {
    "tokens": (("input_ids",),),
    "messages": (("messages",),),
    "sharegpt": (("conversations", "conversation", "messages"),),
    "alpaca": (("instruction",), ("output", "response")),
    "prompt_completion": (("prompt",), ("completion", "response")),
    "question_answer": (("question",), ("answer", "answers", "response")),
    "text": (("text",),),
    "preference": (("chosen",), ("rejected",)),
    "judged": (("label",), ("completion", "response", "messages", "conversations", "conversation")),
    "scored": (("score",), ("text", "completion", "response", "messages", "conversations", "conversation")),
    "labelled": (("label",), ("text", "completion", "response", "messages", "conversations", "conversation")),
    "labelled_pair": (
        ("label",),
        ("sentence1", "premise", "question1", "text1", "text_a", "question", "query"),
        ("sentence2", "hypothesis", "question2", "text2", "text_b", "sentence", "passage", "context", "answer"),
    ),
    "prompts": (
        ("prompt", "question", "messages", "conversations", "conversation", "instruction", "query", "problem"),
    ),
    "similar": (("sentence1", "anchor"), ("sentence2", "positive"), ("score", "similarity_score", "similarity")),
    "tagged": (
        ("tokens", "words"),
        ("tags", "ner_tags", "labels", "ner", "pos_tags", "pos", "upos", "chunk_tags"),
    ),
    "anchors": (
        ("anchor", "query", "question", "sentence1"),
        ("positive", "pos", "positives", "positive_passages", "answer", "answers", "document", "passage", "sentence2"),
    ),
}
FORMATS: dict[Records, tuple[str, ...]] = {
    "texts": ("tokens", "messages", "sharegpt", "alpaca", "prompt_completion", "question_answer", "text"),
    "pairs": ("preference",),
    "judged": ("judged", "preference"),
    "ranked": ("preference", "scored"),
    "labelled": ("labelled", "labelled_pair"),
    "prompts": ("prompts",),
    "related": ("similar", "anchors"),
    "tagged": ("tagged",),
}
"""Of the records that objectives are trained on (`Objective.records`)."""
NEEDED: dict[Records, str] = {
    "texts": "texts or conversations",
    "pairs": "pairs of answers (`chosen` and `rejected`, with or without a `prompt`)",
    "judged": "answers with a `label` that is true or false, or pairs of answers (`chosen` and `rejected`)",
    "ranked": "pairs of answers (`chosen` and `rejected`), or answers with a `score`",
    "labelled": "texts, pairs of texts or conversations (`text`, `sentence1` and `sentence2`, or `messages`) with a "
    "`label`",
    "prompts": "prompts (`prompt`, `question` or `messages`), with an `answer` or what else rewards check answers by",
    "tagged": "words with a label each (`tokens` and `tags` or `ner_tags`, or `words` and `labels`)",
    "related": "texts that belong together (`anchor` and `positive`, or `query` and `pos`), or two with a `score`",
}
MOST = 0.8
"""Share of the records that must fit a format for it to be theirs."""
OPTIONAL = {
    "labels", "attention_mask", "tools", "functions", "system", "system_prompt", "input", "history", "context",
    "choices", "role", "content", "prompt", "answer", "tests", "entry_point", "negative", "negatives",
    "reasoning_content", "label_name",
}  # fmt: skip
ONE_ANSWER = ("alpaca", "prompt_completion", "question_answer")
"""Formats whose records have one answer, to which a field with its reasoning belongs."""


class OtherRecordsError(UserError):
    """Records that are not what is learned from, as they were `found`; and by which settings they would be."""

    def __init__(self, found: str, advice: str):
        super().__init__(f"{found}{advice}")
        self.found = found


@contextmanager
def given_by_option(option: str, records: Records) -> Iterator[None]:
    """Of records that an option of a command names, which has no settings to take them by."""
    try:
        yield
    except OtherRecordsError as error:
        raise UserError(f"{option}: {error.found}; give files with {NEEDED[records]} here.") from error


def recognise(sample: Sequence[Record], dataset: Dataset, records: Records = "texts") -> FormatName:
    """The format of these records: the first in `WANTED` that fits all of them, or most; the others are bad records.
    Of the formats, those that an objective with such `records` is trained on."""
    assert sample
    rows = [(_renamed(record, dataset), record.origin) for record in sample]
    _check_mapping(sample, dataset)
    if dataset.format:
        if dataset.format not in FORMATS[records]:
            raise UserError(
                f"{rows[0][1]}: `format: {dataset.format}` does not suit the objective, which is trained on "
                f"{NEEDED[records]}; change `objective` or `format`."
            )
        for fields, origin in rows:
            missing = _missing(fields, dataset.format)
            if missing:
                raise UserError(
                    f"{origin}: `format: {dataset.format}` wants the field {missing}, but the record has "
                    f"{names_of(fields)}{_suggestion(rows)}."
                )
        return dataset.format
    if records == "texts":
        _refuse_preferences(rows, dataset)
    fits = Counter(name for fields, _ in rows for name in FORMATS[records] if not _missing(fields, name))
    most = max(fits.values(), default=0)
    for name in FORMATS[records]:
        if fits[name] == most >= MOST * len(rows):
            return name  # type: ignore[return-value]
    if fits:
        name, count = fits.most_common(1)[0]
        fields, origin = next(row for row in rows if _missing(row[0], name))
        raise UserError(
            f"{origin}: {count} of the first {len(rows)} records are in the {name} format, but this one lacks "
            f"the field {_missing(fields, name)}: it has {names_of(fields)}."
        )
    if records != "texts":
        raise OtherRecordsError(
            f"{rows[0][1]}: found {names_of(rows[0][0])}",
            f", but the objective is trained on {NEEDED[records]}; say which is which, e.g. `fields: "
            f"{_fields_for(records, rows[0][0])}`, or change `objective`.",
        )
    wanted_of = {name: WANTED[name] for name in FORMATS[records]}
    known = "; ".join(f"{name}: {', '.join(' or '.join(some) for some in all)}" for name, all in wanted_of.items())
    raise OtherRecordsError(
        f"{rows[0][1]}: found {names_of(rows[0][0])}, which fits no known format ({known})", f"{_suggestion(rows)}."
    )


def _fields_for(records: Records, fields: dict[str, Any]) -> str:
    """A mapping that would fit, with the names that the record has where they tell what they are."""
    names = {
        "tagged": ("tokens", "tags"),
        "prompts": ("prompt", "answer"),
        "related": ("anchor", "positive"),
        "labelled": ("text", "label"),
        "judged": ("prompt", "completion", "label"),
        "ranked": ("prompt", "completion", "score"),
    }.get(records, ("prompt", "chosen", "rejected"))
    if records == "ranked" and any(re.search(_LIKE["chosen"], name.lower()) for name in fields):
        names = ("prompt", "chosen", "rejected")
    if records in ("pairs", "judged", "ranked") and fields.keys() & set(_PROMPTS):
        names = names[1:]
    if records == "labelled" and all(fields.keys() & set(some) for some in WANTED["labelled_pair"][1:]):
        names = ("label",)
    known = ("text", "label") if records == "labelled" else ("prompt", "chosen", "rejected")
    wanted = {name: (name in known and _like(name, fields)) or "NAME" for name in names if name not in fields}
    return "{" + ", ".join(f"{name}: {found}" for name, found in wanted.items()) + "}"


_LIKE = {
    "text": r"(?<!label_)text|sentence|review|content|body|document|comment|tweet|utterance|question|query|prompt",
    "label": r"label|sentiment|intent|emotion|class|category|topic|stars|rating|target",
    "prompt": r"^(prompt|input|question|instruction|query|problem|request|user)",
    "chosen": r"chosen|accepted|better|(?<!dis)preferred|response_j$",
    "rejected": r"reject|worse|dispreferred|response_k$",
}


def _like(name: str, fields: dict[str, Any]) -> str | None:
    """A field whose own name says that it is what a format calls `name`, and which holds what that can be."""
    kinds = {"text": (str,), "label": (str, int, list)}.get(name, (str, list, dict))
    likely = [found for found, value in fields.items() if isinstance(value, kinds)]
    pattern = _LIKE.get(name)
    return next((found for found in likely if pattern and re.search(pattern, found.lower())), None)


def convert(record: Record, format: FormatName, dataset: Dataset) -> Item:
    """What the record means, or a UserError that names its file and line."""
    fields = _renamed(record, dataset)
    if record.is_filled:  # what is JSON text in a column keeps its nulls: it was written so
        fields = {name: without_nulls(value) for name, value in fields.items()}
    missing = _missing(fields, format)
    if missing:
        raise RecordError(
            "missing field", record.origin, f"the field {missing} is missing: the record has {names_of(fields)}"
        )
    asked = fields.get("prompt")
    if not isinstance(asked, str) or is_written_as_turns(asked):  # else an answer may well be such a text
        fields = {name: turns_in_column(value, name, record.origin) for name, value in fields.items()}
    made = _CONVERTERS[format](fields, record.origin, dataset)
    if format in ONE_ANSWER and (thoughts := present(fields.get("reasoning_content"))):
        made = _with_thoughts(made, as_text(thoughts, "reasoning_content", record.origin))
    _check_media(fields, made, record.origin)
    return made


def unread(sample: Sequence[Record], format: FormatName, dataset: Dataset) -> list[str]:
    """Names of fields that hold something, but nothing that is made of a record depends on: what changes nothing when
    it is left out. A field of messages is called `messages.thought`."""
    names: dict[str, bool] = {}
    for record in sample:
        try:
            made = convert(record, format, dataset)
        except RecordError:
            continue
        for name in _held(record.fields):
            if not names.get(name):
                less = _without(record.fields, name)
                names[name] = _converted(replace(record, fields=less), format, dataset) != made
    return [name for name, is_read in names.items() if not is_read and names.get(name.rpartition(".")[0], True)]


def _held(fields: dict[str, Any]) -> list[str]:
    """Names of what holds something: of fields, and of those in their messages. An index of pandas has none."""
    found = [name for name, value in fields.items() if name and present(value) not in (None, "", [], {})]
    for name, value in fields.items():
        messages = [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
        inner = {key for one in messages for key, held in one.items() if present(held) not in (None, "", [], {})}
        found += [f"{name}.{key}" for key in sorted(inner)]
    return found


def _without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    outer, _, inner = name.partition(".")
    if name in fields or not inner:
        return {other: value for other, value in fields.items() if other != name}
    less = [{k: v for k, v in one.items() if k != inner} if isinstance(one, dict) else one for one in fields[outer]]
    return {**fields, outer: less}


def _with_thoughts(item: Item, thoughts: str) -> Conversation:
    if isinstance(item, Completion):
        item = Conversation((user_turn(item.prompt), Message("assistant", item.completion)))
    assert isinstance(item, Conversation)
    *before, answer = item.messages
    answer = replace(answer, extra={**answer.extra, "reasoning_content": thoughts})
    return replace(item, messages=(*before, answer))


def _converted(record: Record, format: FormatName, dataset: Dataset) -> Item | None:
    try:
        return convert(record, format, dataset)
    except RecordError:
        return None


_MEDIA = {"image": "<image>", "images": "<image>", "video": "<video>", "videos": "<video>", "audio": "<audio>"}
_MEDIA |= {"audios": "<audio>"}


def _check_media(fields: dict[str, Any], item: Item, origin: Origin) -> None:
    """A text that speaks of a picture beside it would be learned blind."""
    if not isinstance(item, Conversation | Completion | Document):
        return
    texts = texts_of(item)
    for name, mark in _MEDIA.items():
        if fields.get(name) and any(mark in text for text in texts):
            raise RecordError("not text", origin, f"the text holds {mark}, for `{name}` beside it; only text is read")


def texts_of(item: Conversation | Document | Completion | Tokens) -> list[str]:
    if isinstance(item, Conversation):
        return [message.content for message in item.messages]
    if isinstance(item, Completion):
        return [item.prompt, item.completion]
    return [item.text] if isinstance(item, Document) else []


def conversation_of(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, origin: Origin
) -> tuple[list[Message], tuple[dict[str, Any], ...]]:
    """Messages and tools as training reads them from records of the format `messages`; nothing in them is a target."""
    from tunesmith.config.schema import Dataset

    listed = [{**item, "weight": 0} if item.get("role") == "assistant" else item for item in messages]
    made = messages_of(listed, "messages", origin, Dataset(path=origin.file))
    return [replace(message, weight=None) for message in made], tools_of({"tools": tools}, origin)


# One function a format


def _convert_messages(fields: dict[str, Any], origin: Origin, dataset: Dataset) -> Conversation:
    key = next(k for k in ("messages", "conversations", "conversation") if k in fields)
    messages = messages_of(fields[key], key, origin, dataset)
    return checked([*system_turns(fields, messages, origin), *messages], origin, tools_of(fields, origin))


def _convert_alpaca(fields: dict[str, Any], origin: Origin, dataset: Dataset) -> Conversation:
    messages: list[Message] = []
    for turn in as_list(present(fields.get("history")) or [], "history", origin):
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise RecordError("wrong type", origin, "`history` must be a list of [question, answer] pairs")
        messages += [user_turn(as_text(turn[0], "history", origin)), answer_turn(turn[1], "history", origin)]
    question = _question(fields, "instruction", origin)
    if not question:
        raise RecordError("empty question", origin, "`instruction` is empty")
    messages += [user_turn(question), answer_turn(*first_of(fields, "output", "response"), origin)]
    messages = asked_as_turns([*system_turns(fields, messages, origin), *messages])
    return checked(messages, origin, tools_of(fields, origin))


def _convert_prompt_completion(fields: dict[str, Any], origin: Origin, dataset: Dataset) -> Conversation | Completion:
    completion, name = first_of(fields, "completion", "response")
    prompt = fields["prompt"]
    if isinstance(prompt, list | dict) or isinstance(completion, list | dict):
        asked = (
            [user_turn(as_text(prompt, "prompt", origin))]
            if isinstance(prompt, str)
            else messages_of(prompt, "prompt", origin, dataset)
        )
        # Answers in the prompt are context: only the completion is trained.
        asked = [replace(m, weight=0.0) if m.role == "assistant" else m for m in asked]
        answered = (
            messages_of(completion, name, origin, dataset)
            if isinstance(completion, list | dict)
            else [answer_turn(completion, name, origin)]
        )
        messages = [*asked, *answered]
        messages = asked_as_turns([*system_turns(fields, messages, origin), *messages])
        return checked(messages, origin, tools_of(fields, origin))
    if present(prompt) is None:
        reason = f'`prompt` is {described(prompt)}; write "" where the completion stands alone'
        raise RecordError(lack_of(prompt), origin, reason)
    prompt = as_text(prompt, "prompt", origin)
    answer = answer_turn(completion, name, origin)
    system, tools = system_turns(fields, [], origin), tools_of(fields, origin)
    if system or tools:
        return checked(asked_as_turns([*system, user_turn(prompt), answer]), origin, tools)
    return Completion(prompt, answer.content)


def _convert_question_answer(fields: dict[str, Any], origin: Origin, dataset: Dataset) -> Conversation:
    if choices := next((name for name in ("choices", "options") if isinstance(fields.get(name), list | dict)), None):
        raise RecordError(
            "multiple choice",
            origin,
            f"a multiple-choice question, whose `{choices}` would not be read; write the choices into the question and "
            "the answer as text",
        )
    answer, name = first_of(fields, "answer", "answers", "response")
    if isinstance(answer, dict):
        answer = answer.get("text")
    if isinstance(answer, list):
        answer = answer[0] if answer else None
    messages = [user_turn(_question(fields, "question", origin)), answer_turn(answer, name, origin)]
    messages = asked_as_turns([*system_turns(fields, messages, origin), *messages])
    return checked(messages, origin, tools_of(fields, origin))


def _convert_text(fields: dict[str, Any], origin: Origin, dataset: Dataset) -> Document:
    return Document(as_text(fields["text"], "text", origin))


def _convert_tokens(fields: dict[str, Any], origin: Origin, dataset: Dataset) -> Tokens:
    ids = as_integers(fields["input_ids"], "input_ids", origin)
    labels = present(fields.get("labels"))
    labels = ids if labels is None else as_integers(labels, "labels", origin)
    if len(labels) != len(ids):
        raise RecordError("wrong labels", origin, f"{len(ids)} `input_ids` but {len(labels)} `labels`")
    mask = present(fields.get("attention_mask"))
    if mask is not None:
        mask = as_integers(mask, "attention_mask", origin)
        if len(mask) != len(ids):
            raise RecordError("wrong labels", origin, f"{len(ids)} `input_ids` but an `attention_mask` of {len(mask)}")
        seen = [i for i, value in enumerate(mask) if value]
        if seen and seen[-1] - seen[0] + 1 != len(seen):
            raise RecordError(
                "wrong labels", origin, "`attention_mask` hides tokens in the middle, which is not supported"
            )
        padding_free = slice(seen[0], seen[-1] + 1) if seen else slice(0)
        ids, labels = ids[padding_free], labels[padding_free]
    if not ids:
        raise RecordError("empty tokens", origin, "`input_ids` is empty")
    if min(ids) < 0 or max(ids) >= 2**31:
        bad = min(ids) if min(ids) < 0 else max(ids)
        raise RecordError("token id out of range", origin, f"`input_ids` holds {bad}, which is no token id")
    for place, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (-100, token):
            shifted = labels[:-1] == ids[1:]
            hint = "they are shifted by one already; give them unshifted" if shifted else "each must be -100 or the id"
            raise RecordError(
                "wrong labels", origin, f"`labels` and `input_ids` differ at place {place} ({label}, {token}): {hint}"
            )
    return Tokens(tuple(ids), tuple(label != -100 for label in labels))


def _convert_preference(fields: dict[str, Any], origin: Origin, dataset: Dataset) -> Preference:
    values = [fields["chosen"], fields["rejected"]]
    asked = _asked(fields, origin, dataset)
    are_texts = all(isinstance(value, str) for value in values)
    if are_texts and (asked is None or (isinstance(asked, str) and all(map(turns_of, values)))):
        turns = [_dialogue(value, name, fields, origin) for value, name in zip(values, ANSWERS, strict=True)]
        before = turns_of(asked) if asked else None
        _check_prompt(asked if before is None else [one for one in before if one.content], turns, origin)
        made = _with_common_prompt(*turns, origin)
    elif isinstance(asked, str) and all(isinstance(value, str | int | float) for value in values):
        answers = [answer_turn(value, name, origin) for value, name in zip(values, ANSWERS, strict=True)]
        if tools := tools_of(fields, origin):
            both = (asked_as_turns([user_turn(asked), answer]) for answer in answers)
            made = Preference(*(checked(messages, origin, tools) for messages in both))
        else:
            made = Preference(*(Completion(asked, answer.content) for answer in answers))
    else:
        turns = [_turns(value, name, origin, dataset) for value, name in zip(values, ANSWERS, strict=True)]
        if asked is None or all(some[0].role != "assistant" for some in turns):
            if isinstance(asked, list) and asked[0].role == "system":  # which the answers may leave out
                turns = [some if some[0].role == "system" else [asked[0], *some] for some in turns]
            _check_prompt(asked, turns, origin)
            made = _with_common_prompt(*turns, origin, system_turns(fields, turns[0], origin), tools_of(fields, origin))
        else:
            before = [user_turn(asked)] if isinstance(asked, str) else asked
            before = [replace(m, weight=0.0) if m.role == "assistant" else m for m in before]
            before, tools = [*system_turns(fields, before, origin), *before], tools_of(fields, origin)
            made = Preference(*(checked(asked_as_turns([*before, *some]), origin, tools) for some in turns))
    if made.chosen == made.rejected:
        raise RecordError("same answers", origin, "`chosen` and `rejected` are the same, which prefers nothing")
    margin = present(fields.get("margin"))
    return made if margin is None else replace(made, margin=as_number(margin, "margin", origin))


ANSWERS = ("chosen", "rejected")
_PROMPTS = ("prompt", "conversations", "conversation", "messages", "question", "instruction", "query")


def _asked(
    fields: dict[str, Any], origin: Origin, dataset: Dataset, names: Sequence[str] = _PROMPTS
) -> list[Message] | str | None:
    """What both answers answer, where the record has it apart from them."""
    value, name = first_of(fields, *names)
    if present(value) is None:
        return None
    if isinstance(value, list | dict):
        return messages_of(value, name, origin, dataset)
    question = _question(fields, name, origin)
    if not question:
        raise RecordError("empty question", origin, f"`{name}` is empty")
    return [*system_turns(fields, [], origin), user_turn(question)] if system_turns(fields, [], origin) else question


def _question(fields: dict[str, Any], name: str, origin: Origin) -> str:
    """What a field asks, with what belongs to it: the input of an instruction, the context of a question."""
    asked = "" if present(fields[name]) is None else as_text(fields[name], name, origin)
    parts = [asked]
    if name == "instruction":
        more, other = first_of(fields, "input", "context")
        parts = [asked, "" if present(more) is None else as_text(more, other, origin)]
    elif name == "question" and isinstance(fields.get("context"), str):
        parts = [fields["context"], asked]
    return "\n\n".join(part for part in parts if part.strip())


def _check_prompt(asked: list[Message] | str | None, turns: Sequence[list[Message]], origin: Origin) -> None:
    """Answers that are whole conversations must be answers to the prompt that is given beside them."""
    for name, messages in zip(ANSWERS, turns, strict=True):
        if isinstance(asked, str):
            is_there = any(m.role == "user" and m.content.strip() == asked.strip() for m in messages)
        else:
            is_there = asked is None or messages[: len(asked)] == asked
        if not is_there:
            raise RecordError(
                "no common prompt",
                origin,
                f"`{name}` is a whole conversation, but not one that begins with the prompt beside it; leave one out",
            )


def _turns(value: Any, name: str, origin: Origin, dataset: Dataset) -> list[Message]:
    """An answer: a text, a message or several."""
    if isinstance(value, list | dict):
        return messages_of(value, name, origin, dataset)
    return [answer_turn(value, name, origin)]


def _with_common_prompt(
    chosen: list[Message],
    rejected: list[Message],
    origin: Origin,
    system: Sequence[Message] = (),
    tools: tuple[dict[str, Any], ...] = (),
) -> Preference:
    """Of two whole conversations, what they have in common is the prompt, and what differs are the answers."""
    common = 0
    while common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]:
        common += 1
    if common == len(chosen) == len(rejected):
        raise RecordError("same answers", origin, "`chosen` and `rejected` are the same, which prefers nothing")
    both = []
    for name, messages in zip(ANSWERS, (chosen, rejected), strict=True):
        if common == len(messages) or messages[common].role != "assistant" or common == 0:
            raise RecordError(
                "no common prompt",
                origin,
                "`chosen` and `rejected` must be the same up to an assistant turn, or answer a `prompt` of their own; "
                f"`{name}` does not",
            )
        before = [replace(m, weight=0.0) if m.role == "assistant" else m for m in messages[:common]]
        both.append(checked([*system, *before, *messages[common:]], origin, tools))
    return Preference(*both)


def _dialogue(text: str, name: str, fields: dict[str, Any], origin: Origin) -> list[Message]:
    """A whole conversation as one text."""
    messages = turns_of(text)
    if messages is None:
        mapping = f"{{prompt: {_like('prompt', fields) or 'NAME'}}}"
        raise RecordError(
            "no prompt",
            origin,
            f"`{name}` is a text without a `prompt` before it; say `fields: {mapping}` where another field has it, "
            "give whole conversations as messages, or move what both texts begin with into a `prompt`",
        )
    if not messages[-1].content:
        raise RecordError("empty answer", origin, f"`{name}` is empty, which would teach the model to be silent")
    return messages


_JUDGEMENTS = {"true": True, "1": True, "desirable": True, "false": False, "0": False, "undesirable": False}
"""As columns of text hold them."""


def _convert_judged(fields: dict[str, Any], origin: Origin, dataset: Dataset) -> Judged:
    label = fields["label"]
    if isinstance(label, str):
        label = _JUDGEMENTS.get(label.strip().lower(), label)
    if not isinstance(label, bool) and label not in (0, 1):
        raise RecordError("wrong label", origin, f"`label` must be true or false, found {shown(label)}")
    if "completion" in fields or "response" in fields:
        return Judged(_answered(fields, origin, dataset), bool(label))
    conversation = _convert_messages(fields, origin, dataset)
    last = max((n for n, m in enumerate(conversation.messages) if m.role != "assistant"), default=-1)
    if last == len(conversation.messages) - 1:
        raise RecordError("no answer", origin, "the conversation does not end with an answer, which `label` is about")
    messages = (
        replace(m, weight=0.0) if n < last and m.role == "assistant" else m for n, m in enumerate(conversation.messages)
    )
    return Judged(replace(conversation, messages=tuple(messages)), bool(label))


def _answered(fields: dict[str, Any], origin: Origin, dataset: Dataset) -> Conversation | Completion:
    """A completion of what the record asks, by whatever name, or of nothing."""
    value, name = first_of(fields, *_PROMPTS)
    if name == "prompt" or present(value) is None:
        return _convert_prompt_completion({"prompt": "", **fields}, origin, dataset)
    prompt = value if isinstance(value, list | dict) else _question(fields, name, origin)
    return _convert_prompt_completion({**fields, "prompt": prompt}, origin, dataset)


def _convert_labelled(fields: dict[str, Any], origin: Origin, dataset: Dataset) -> Labelled:
    label = _label_of(fields, origin)
    beside = _label_name(label, fields, dataset)
    if "completion" in fields or "response" in fields:
        if present(fields.get("text")) is not None:
            name = "label" if "label" in fields else "score"
            reason = f"has a `text` and an answer, and the `{name}` is of one: remove the other, or give both as "
            raise RecordError("several texts", origin, reason + "`prompt` and `completion`")
        return Labelled(_answered(fields, origin, dataset), label, beside)
    if "text" in fields:
        names = [name for name in ("text", "text_pair") if name == "text" or present(fields.get(name)) is not None]
        return Labelled(_to_label(fields, names, origin), label, beside)
    key = next(k for k in ("messages", "conversations", "conversation") if k in fields)
    messages = messages_of(fields[key], key, origin, dataset)
    asked = Conversation((*system_turns(fields, messages, origin), *messages), tools_of(fields, origin))
    return Labelled(asked, label, beside)


def _convert_labelled_pair(fields: dict[str, Any], origin: Origin, dataset: Dataset) -> Labelled:
    """Two texts as one, with an empty line between them."""
    there = [[name for name in names if name in fields] for names in WANTED["labelled_pair"][1:]]
    if there[0][0] == "sentence1" and there[1][0] == "sentence2":  # the format's own names go before others
        there = [names[:1] for names in there]
    names = [name for some in there for name in some]
    if len(names) != 2:
        reason = f"{listed([f'`{name}`' for name in names])} are more than two texts with a `label`; say which two are "
        raise RecordError("several texts", origin, reason + "meant, `fields: {sentence1: NAME, sentence2: NAME}`")
    label = _label_of(fields, origin)
    return Labelled(_to_label(fields, names, origin), label, _label_name(label, fields, dataset))


def _to_label(fields: dict[str, Any], names: Sequence[str], origin: Origin) -> Document:
    texts = [as_text(fields[name], name, origin) for name in names]
    for name, text in zip(names, texts, strict=True):
        if not text.strip():
            raise RecordError("empty text", origin, f"`{name}` is empty, so there is nothing to label")
    return Document("\n\n".join(texts))


def _label_of(fields: dict[str, Any], origin: Origin) -> str | float:
    name = "score" if "score" in fields and "label" not in fields else "label"
    label = fields[name]
    if name == "score":
        return as_number(label, name, origin)
    if isinstance(label, bool):
        return int(label)
    if isinstance(label, str):
        if not label.strip():
            raise RecordError("wrong label", origin, "`label` is empty")
        return label.strip()
    if isinstance(label, list):
        reason = f"found {shown(label)}; a text has one label here, so train a run for each of several"
        raise RecordError("wrong label", origin, f"`label` must be a name or a number, {reason}")
    if not isinstance(label, int | float) or (isinstance(label, float) and not label.is_integer()):
        raise RecordError("wrong label", origin, f"`label` must be a name or a number, found {shown(label)}")
    return label


def _label_name(label: str | float, fields: dict[str, Any], dataset: Dataset) -> str | None:
    """Of a label that is a number: what a field beside it calls it (`label_text`, or as `fields` says)."""
    if isinstance(label, str) and not label.isdecimal():
        return None
    own = dataset.fields.get("label", "label")
    found, _ = first_of(fields, "label_name", *(f"{own}_{end}" for end in ("name", "text", "str")), f"text_{own}")
    if isinstance(found, str) and found.strip():
        return found.strip()
    return json.dumps(fields["label"]) if isinstance(fields.get("label"), bool) else None


def _convert_tagged(fields: dict[str, Any], origin: Origin, dataset: Dataset) -> Tagged:
    given, name = first_of(fields, *WANTED["tagged"][0])
    words = [as_text(one, name, origin) for one in _split(given, name, origin)]
    given, tags_name = first_of(fields, *WANTED["tagged"][1])
    tags = [_tag(one, tags_name, origin) for one in _split(given, tags_name, origin)]
    if len(words) != len(tags):
        reason = f"`{name}` has {len(words)} words, but `{tags_name}` has {len(tags)}; each word needs its own"
        raise RecordError("wrong length", origin, reason)
    if not any(word.strip() for word in words):
        raise RecordError("empty text", origin, f"`{name}` has no words, so there is nothing to label")
    return Tagged(tuple(words), tuple(tags))


def _split(value: Any, name: str, origin: Origin) -> list[Any]:
    """A list, or as files of columns have it: JSON text, or words with spaces between them."""
    if isinstance(value, str) and not value.lstrip().startswith("["):
        return value.split()
    return as_list(value, name, origin)


def _tag(value: Any, name: str, origin: Origin) -> str | int | None:
    """A label's name or number; None where there is none, which -100 says in data made for transformers."""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,9}", value):
        value = int(value)
    if value is None or value == -100:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or (isinstance(value, str) and not value.strip()):
        raise RecordError("wrong label", origin, f"`{name}` must hold names or numbers, found {shown(value)}")
    return value


_ANSWERS = (
    "answer", "answers", "solution", "ground_truth", "final_answer", "target", "completion", "response", "output",
    "label",
)  # fmt: skip
_TESTS = ("tests", "test", "test_list", "test_cases", "unit_tests")


def _convert_prompts(fields: dict[str, Any], origin: Origin, dataset: Dataset) -> Asked:
    names = (*_PROMPTS, "problem")
    asked = _asked(fields, origin, dataset, names)
    if asked is None:
        raise RecordError("missing value", origin, "the prompt is empty")
    messages, answered = _without_answer([user_turn(asked)] if isinstance(asked, str) else asked)
    used = {*names, "input", "context", "system", "system_prompt", "tools", "functions"}
    facts = answered | {name: value for name, value in fields.items() if name not in used}
    while messages and messages[-1].role == "assistant":  # a conversation with its answer, which is not shown
        facts = {"answer": messages[-1].content, **facts}
        messages = messages[:-1]
    if not any(message.role in ("user", "tool") for message in messages):
        raise RecordError("no question", origin, "the prompt has no user turn, so there is nothing to answer")
    for wanted, others in (("answer", _ANSWERS), ("tests", _TESTS)):
        value, _ = first_of(facts, wanted, *others)
        if present(value) is not None:
            facts[wanted] = value
    if "answer" not in facts and (inner := _at(facts, "reward_model.ground_truth")):  # as verl has it
        facts["answer"] = inner[0]
    if isinstance(facts.get("answer"), dict):  # {"text": [...]} of SQuAD
        facts["answer"] = facts["answer"].get("text")
    messages = [*system_turns(fields, messages, origin), *messages]
    before = (replace(m, weight=0.0) if m.role == "assistant" else m for m in messages)
    return Asked(tuple(before), tools_of(fields, origin), facts)


def _without_answer(messages: list[Message]) -> tuple[list[Message], dict[str, str]]:
    """A question that is a dialogue in one text up to its last answer, and that answer."""
    *before, asked = messages
    turns = turns_of(asked.content) if asked.role == "user" and all(one.role == "system" for one in before) else None
    if not turns or turns[-1].role == "user" or not turns[-1].content:
        return messages, {}
    end = asked.content.rindex("\n\nAssistant:") + len("\n\nAssistant:")
    return [*before, replace(asked, content=asked.content[:end])], {"answer": turns[-1].content}


_NEGATIVE = re.compile(r"(?:hard_?)?neg(?:atives?)?(?:_?\d+)?|negative_passages")


def _convert_anchors(fields: dict[str, Any], origin: Origin, dataset: Dataset) -> Related:
    anchor, name = first_of(fields, *WANTED["anchors"][0])
    anchors = _passages(anchor, name, origin)
    if "label" in fields:
        raise RecordError(
            "wrong label",
            origin,
            "a `label` beside two texts: keep the records whose texts belong together and remove it, or say `fields: "
            "{score: label}` where it is a similarity from -1 to 1",
        )
    if len(anchors) != 1:
        raise RecordError("wrong type", origin, f"`{name}` must be one text")
    positives = _passages(*first_of(fields, *WANTED["anchors"][1]), origin)
    if not positives:
        raise RecordError("no positive", origin, "there is no text that belongs to it")
    negatives = [text for one in _negatives(fields) for text in _passages(fields[one], one, origin)]
    return Related(anchors[0], tuple(positives), tuple(negatives))


def _negatives(fields: dict[str, Any]) -> list[str]:
    return [one for one in fields if _NEGATIVE.fullmatch(one) and present(fields[one])]


def _convert_similar(fields: dict[str, Any], origin: Origin, dataset: Dataset) -> Related:
    both = [_passages(*first_of(fields, *names), origin) for names in WANTED["similar"][:2]]
    if any(len(texts) != 1 for texts in both):
        raise RecordError("wrong type", origin, "two texts with a score must each be one text")
    if negatives := _negatives(fields):
        reason = f"`{negatives[0]}` beside two texts with a score is not read; remove it, or the score"
        raise RecordError("wrong type", origin, reason)
    given, name = first_of(fields, *WANTED["similar"][2])
    score = as_number(given, name, origin)
    if not -1 <= score <= 1:
        reason = f"`{name}` is {score:g}, but a cosine lies from -1 to 1; divide the scores by their largest"
        raise RecordError("wrong number", origin, reason)
    return Related(both[0][0], (both[1][0],), score=score)


def _passages(value: Any, name: str, origin: Origin) -> list[str]:
    """A text or several, each as it is or as {"title": ..., "text": ...}; none where nothing is given."""
    texts = []
    for one in value if isinstance(value, list) else [] if present(value) is None else [value]:
        if isinstance(one, dict):
            parts = [one.get("title"), first_of(one, "text", "content", "passage")[0]]
            one = " ".join(part for part in parts if isinstance(part, str) and part.strip())
        text = as_text(one, name, origin)
        if not text.strip():
            raise RecordError("empty text", origin, f"`{name}` is empty, so there is nothing to embed")
        texts.append(text)
    return texts


_CONVERTERS: dict[str, Callable[[dict[str, Any], Origin, Any], Item]] = {
    "messages": _convert_messages,
    "sharegpt": _convert_messages,
    "alpaca": _convert_alpaca,
    "prompt_completion": _convert_prompt_completion,
    "question_answer": _convert_question_answer,
    "text": _convert_text,
    "tokens": _convert_tokens,
    "preference": _convert_preference,
    "judged": _convert_judged,
    "scored": _convert_labelled,
    "labelled": _convert_labelled,
    "labelled_pair": _convert_labelled_pair,
    "prompts": _convert_prompts,
    "anchors": _convert_anchors,
    "similar": _convert_similar,
    "tagged": _convert_tagged,
}


# Names


def _renamed(record: Record, dataset: Dataset) -> dict[str, Any]:
    if not dataset.fields:
        return _with_prompt(record.fields)
    kept = {k: v for k, v in record.fields.items() if k not in dataset.fields.values()}
    found = {w: value[0] for w, f in dataset.fields.items() if (value := _at(record.fields, f))}
    return {**kept, **found}


def _with_prompt(fields: dict[str, Any]) -> dict[str, Any]:
    """A source and a target, as records of encoder-decoders call them, are a prompt and its completion; but where
    there is more to learn from, a `source` is where a text is from."""
    if not ({"source", "target"} <= fields.keys()) or fields.keys() & _LEARNED:
        return fields
    others = {name: value for name, value in fields.items() if name not in ("source", "target")}
    return {**others, "prompt": fields["source"], "completion": fields["target"]}


def _at(fields: dict[str, Any], name: str) -> tuple[Any] | tuple[()]:
    """The value of a field, if there is one; `translation.en` is one within another."""
    if name in fields:
        return (fields[name],)
    outer, _, inner = name.partition(".")
    within = fields.get(outer)
    return _at(within, inner) if inner and isinstance(within, dict) else ()


_LEARNED = frozenset(name for wanted in WANTED.values() for names in wanted for name in names)


def _missing(fields: dict[str, Any], format: str) -> str:
    for names in WANTED[format]:
        if not any(name in fields for name in names):
            return " or ".join(f"`{name}`" for name in names)
    return ""


def _check_mapping(sample: Sequence[Record], dataset: Dataset) -> None:
    known = {name for wanted in WANTED.values() for names in wanted for name in names} | OPTIONAL
    for wanted, found in dataset.fields.items():
        if wanted not in known:
            near = difflib.get_close_matches(wanted, known, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"known are {listed(sorted(known))}."
            raise UserError(f"fields of {dataset.title}: no format wants a field `{wanted}`; {hint}")
        if wanted not in ("role", "content") and not any(_at(record.fields, found) for record in sample):
            raise UserError(
                f"{sample[0].origin}: `fields` maps {wanted} to `{found}`, but the record has "
                f"{names_of(sample[0].fields)}."
            )


def _refuse_preferences(rows: list[tuple[dict[str, Any], Origin]], dataset: Dataset) -> None:
    fields, origin = rows[0]
    if "chosen" in fields and "rejected" in fields:
        chosen = fields["chosen"]
        context = next((name for name in ("prompt", "conversations", "messages", "question") if name in fields), None)
        if isinstance(chosen, list) and len(chosen) > 1:
            mapping = "{messages: chosen}"
        elif context:
            mapping = f"{{prompt: {context}, completion: chosen}}"
        else:
            mapping = "{text: chosen}"
        raise OtherRecordsError(
            f"{origin}: `chosen` and `rejected` are preference data",
            "; say `objective: dpo` (or orpo, simpo, cpo, kto), or to train on the preferred answers alone "
            f"`fields: {mapping}`.",
        )
    is_chat = any(not _missing(fields, name) for name in ("messages", "sharegpt", "prompt_completion"))
    if is_chat and "labels" not in fields and isinstance(fields.get("label"), bool):
        raise OtherRecordsError(
            f"{origin}: `label` is true or false for good and bad answers: preference data",
            "; say `objective: kto`, or keep the good answers and remove `label`.",
        )


_LIKE_PROMPT = (
    "prompt", "query", "question", "instruction", "input", "inputs", "problem", "user", "request", "human",
    "source", "ask", "q", "context", "article", "document", "dialogue",
)  # fmt: skip
_LIKE_COMPLETION = (
    "completion", "reply", "answer", "response", "output", "outputs", "solution", "assistant", "target",
    "targets", "answers", "bot", "gpt", "result", "a", "summary", "highlights", "label_text",
)  # fmt: skip
_BESIDE = ("system", "system_prompt", "tools", "functions")
"""Read whatever the others are called."""
_LIKE_TEXT = ("content", "body", "document", "article", "passage", "raw", "code", "story")


def _suggestion(rows: list[tuple[dict[str, Any], Origin]]) -> str:
    fields = rows[0][0]
    chats = [k for k, v in fields.items() if isinstance(v, list) and v and isinstance(v[0], dict) and len(v[0]) > 1]
    texts = [k for k, v in fields.items() if isinstance(v, str) and k not in _BESIDE]
    by_name = {name.lower(): name for name in texts}
    prompt = next((by_name[n] for n in _LIKE_PROMPT if n in by_name), None)
    completion = next((by_name[n] for n in _LIKE_COMPLETION if n in by_name), None)
    text = next((by_name[n] for n in _LIKE_TEXT if n in by_name), None)
    if chats:
        mapping = f"messages: {chats[0]}"
        role = next((k for k, v in fields[chats[0]][0].items() if str(v).lower() in ROLES), None)
        content = next((k for k, v in fields[chats[0]][0].items() if isinstance(v, str) and k != role), None)
        if role and content and (role not in ("role", "from") or content not in ("content", "value", "text")):
            mapping += f", role: {role}, content: {content}"
    elif prompt and completion:
        mapping = f"prompt: {prompt}, completion: {completion}"
    elif len(texts) == 2 and not text:
        first, second = (prompt, next(t for t in texts if t != prompt)) if prompt else texts
        if completion == first:
            first, second = second, first
        mapping = f"prompt: {first}, completion: {second}"
    elif text or (len(texts) == 1 and (len(fields) == 1 or len(fields[texts[0]]) > 100)):
        mapping = f"text: {text or texts[0]}"
    elif nested := [(k, [i for i in v if isinstance(v[i], str)]) for k, v in fields.items() if isinstance(v, dict)]:
        name, inner = nested[0]
        first, second = inner if len(inner) == 2 else ("NAME", "NAME")
        mapping = f"prompt: {name}.{first}, completion: {name}.{second}"
    else:
        return "; say which is which, e.g. `fields: {prompt: NAME, completion: NAME}`"
    return f"; say `fields: {{{mapping}}}`"
