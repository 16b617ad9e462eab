"""Records of texts, conversations and tokens, format by format -> what a model learns to write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunesmith.data.formats import PROMPTS
from tunesmith.data.messages import as_context, asked_as_turns
from tunesmith.data.questions import question_of
from tunesmith.data.turns import (
    answer_turn,
    checked,
    messages_of,
    system_turns,
    tools_of,
    user_turn,
)
from tunesmith.data.types import (
    Completion,
    Conversation,
    Document,
    Message,
    Origin,
    RecordError,
    Tokens,
)
from tunesmith.data.values import (
    as_integers,
    as_list,
    as_text,
    described,
    first_of,
    lack_of,
    present,
)

if TYPE_CHECKING:
    from tunesmith.config.schema import Dataset


def convert_messages(fields: dict[str, Any], origin: Origin, dataset: Dataset) -> Conversation:
    key = next(k for k in ("messages", "conversations", "conversation") if k in fields)
    messages = messages_of(fields[key], key, origin, dataset)
    return checked([*system_turns(fields, messages, origin), *messages], origin, tools_of(fields, origin))


def convert_alpaca(fields: dict[str, Any], origin: Origin, dataset: Dataset) -> Conversation:
    messages: list[Message] = []
    for turn in as_list(present(fields.get("history")) or [], "history", origin):
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise RecordError("wrong type", origin, "`history` must be a list of [question, answer] pairs")
        messages += [user_turn(as_text(turn[0], "history", origin)), answer_turn(turn[1], "history", origin)]
    question = question_of(fields, "instruction", origin)
    if not question:
        raise RecordError("empty question", origin, "`instruction` is empty")
    messages += [user_turn(question), answer_turn(*first_of(fields, "output", "response"), origin)]
    messages = asked_as_turns([*system_turns(fields, messages, origin), *messages])
    return checked(messages, origin, tools_of(fields, origin))


def convert_prompt_completion(fields: dict[str, Any], origin: Origin, dataset: Dataset) -> Conversation | Completion:
    completion, name = first_of(fields, "completion", "response")
    prompt = fields["prompt"]
    if isinstance(prompt, list | dict) or isinstance(completion, list | dict):
        if isinstance(prompt, str):
            asked = [user_turn(as_text(prompt, "prompt", origin))]
        else:
            asked = messages_of(prompt, "prompt", origin, dataset)
        if isinstance(completion, list | dict):
            answered = messages_of(completion, name, origin, dataset)
        else:
            answered = [answer_turn(completion, name, origin)]
        messages = [*as_context(asked), *answered]  # only the completion is trained
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


def convert_question_answer(fields: dict[str, Any], origin: Origin, dataset: Dataset) -> Conversation:
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
    messages = [user_turn(question_of(fields, "question", origin)), answer_turn(answer, name, origin)]
    messages = asked_as_turns([*system_turns(fields, messages, origin), *messages])
    return checked(messages, origin, tools_of(fields, origin))


def completion_of(fields: dict[str, Any], origin: Origin, dataset: Dataset) -> Conversation | Completion:
    """The record's completion of what it asks, by whatever name, or of nothing."""
    value, name = first_of(fields, *PROMPTS)
    if name == "prompt" or present(value) is None:
        return convert_prompt_completion({"prompt": "", **fields}, origin, dataset)
    prompt = value if isinstance(value, list | dict) else question_of(fields, name, origin)
    return convert_prompt_completion({**fields, "prompt": prompt}, origin, dataset)


def convert_text(fields: dict[str, Any], origin: Origin, dataset: Dataset) -> Document:
    return Document(as_text(fields["text"], "text", origin))


def convert_tokens(fields: dict[str, Any], origin: Origin, dataset: Dataset) -> Tokens:
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
