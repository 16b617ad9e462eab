"""Messages as a chat template has a place for them: tools as text, thoughts apart from the answer, no system role."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from tunesmith.data.types import Completion, Conversation, Message, Origin, RecordError
from tunesmith.errors import UserError

REFUSED = "refused by the chat template"
_THOUGHTS = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)
_TOOLS = (
    "You can call these functions:\n{lines}\n\nTo call one, answer with its name and arguments as JSON:\n<tool_call>\n"
    '{{"name": NAME, "arguments": ARGUMENTS}}\n</tool_call>'
)


_TURN = re.compile(r"\n\n(Human|Assistant): ?")


def turns_of(text: str) -> list[Message] | None:
    """The turns of a text in the form of Anthropic's, "\\n\\nHuman: ...\\n\\nAssistant: ..."; None of any other text. A
    prompt in this form ends with an empty answer."""
    found = _TURN.split(text if text.startswith("\n\n") else f"\n\n{text}")
    if found[0].strip() or len(found) < 5:
        return None
    turns = zip(found[1::2], found[2::2], strict=True)
    return [Message("user" if who == "Human" else "assistant", said.strip()) for who, said in turns]


def as_conversation(item: Completion) -> Conversation:
    """A completion as a model with a chat template is given it: a question and its answer, or the turns that the prompt
    is the text of."""
    both = [Message("user", item.prompt), Message("assistant", item.completion)]
    return Conversation(tuple(asked_as_turns(both)))


def as_context(messages: Iterable[Message]) -> list[Message]:
    """The same messages with the weight 0 for answers: what is asked, of which nothing is a target."""
    return [replace(message, weight=0.0) if message.role == "assistant" else message for message in messages]


def asked_as_turns(messages: Sequence[Message]) -> list[Message]:
    """The same messages; where the first question is a dialogue in one text that ends with an empty answer, its turns,
    of which the answers are context."""
    before = 1 if messages and messages[0].role == "system" else 0
    asked = messages[before] if len(messages) > before else None
    turns = turns_of(asked.content) if asked is not None and asked.role == "user" else None
    if not turns or turns[0].role != "user" or turns[-1] != Message("assistant", ""):
        return list(messages)
    after = list(messages[before + 1 :])
    if after and after[0].role == "assistant":  # what stands behind "Assistant:" has a space before it
        after[0] = replace(after[0], content=after[0].content.strip())
    return [*messages[:before], *as_context(turns[:-1]), *after]


def tool_parts_of(messages: Sequence[Message], tools: Sequence[Any]) -> set[str]:
    """What these messages need a template to write of tools: descriptions, calls, arguments, results."""
    calls = [call for message in messages for call in message.extra.get("tool_calls", ())]
    needs = {
        "descriptions": bool(tools),
        "calls": bool(calls),
        "arguments": any(call["function"]["arguments"] for call in calls),
        "results": any(message.role == "tool" for message in messages),
    }
    return {part for part, is_needed in needs.items() if is_needed}


def write_tools(
    messages: list[Message], tools: tuple[dict[str, Any], ...]
) -> tuple[list[Message], tuple[dict[str, Any], ...]]:
    """The messages with tools, calls and results as text, in the form that most models know (Hermes), for a template
    that has no place for tools."""
    made: list[Message] = []
    if tools:
        lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        text = _TOOLS.format(lines=lines)
        if messages and messages[0].role == "system":
            text, messages = f"{messages[0].content}\n\n{text}", messages[1:]
        made.append(Message("system", text))
    for message in messages:
        extra = {k: v for k, v in message.extra.items() if k not in ("tool_calls", "tool_call_id", "name")}
        if message.role == "tool":
            text = f"<tool_response>\n{message.content}\n</tool_response>"
            if made and made[-1].role == "user":
                made[-1] = replace(made[-1], content=f"{made[-1].content}\n{text}")
            else:
                made.append(Message("user", text, message.weight))
            continue
        calls = [
            f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
            for call in message.extra.get("tool_calls", ())
        ]
        content = "\n".join([*([message.content] if message.content or not calls else []), *calls])
        if message.role == "user" and made and made[-1].role == "user" and "<tool_response>" in made[-1].content:
            made[-1] = replace(made[-1], content=f"{made[-1].content}\n{content}")
        else:
            made.append(replace(message, content=content, extra=extra))
    return made, ()


CALL_IDS = {
    "none": "", "any": ".+", "short": "[A-Za-z0-9]{9}", "named": r"functions\.NAME:[0-9]+", "counted": "(?!)",
}  # fmt: skip
"""Which ids of tool calls templates ask for: none, any, nine letters and digits (Mistral's), or the name of the
function with the number of the call (Kimi's, whose templates write the name nowhere else). `counted` are those that a
template makes itself, from the number of the call in its message (Kimi-K2's older one): results must name the same."""


def with_call_ids(messages: list[Message], kind: str) -> list[Message]:
    """The messages with calls that have an id of the kind, and with it in their results. An id that is not such, or is
    missing, is made from the call, so that the same data give the same tokens."""
    made: list[Message] = []
    new: dict[str, str] = {}
    waiting: list[str] = []  # calls without a result as yet, for results that do not say which they are of
    count = 0
    for message in messages:
        extra = dict(message.extra)
        if calls := extra.get("tool_calls"):
            extra["tool_calls"] = []
            count = 0 if kind == "counted" else count
            for call in calls:
                own = call.get("id", "")
                new[own] = _call_id(call, kind, count)
                waiting.append(new[own])
                extra["tool_calls"].append({**call, "id": new[own]})
                count += 1
        elif message.role == "tool":
            own = extra.get("tool_call_id", "")
            found = new.get(own) if own else next(iter(waiting), None)
            if found is not None:
                extra["tool_call_id"] = found
                waiting = [one for one in waiting if one != found]
        made.append(replace(message, extra=extra))
    return made


def _call_id(call: dict[str, Any], kind: str, number: int) -> str:
    own, name = str(call.get("id", "")), call["function"]["name"]
    if re.fullmatch(CALL_IDS[kind].replace("NAME", re.escape(name)), own):
        return own
    if kind in ("named", "counted"):
        return f"functions.{name}:{number}"
    told = own or json.dumps([number, call["function"]], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(told.encode(errors="surrogatepass")).hexdigest()[:9]


def with_thoughts_apart(message: Message) -> Message:
    """An answer that begins with its thoughts, for a template that writes thoughts itself: it would write them
    twice, or none and then ours."""
    match = _THOUGHTS.match(message.content) if message.role == "assistant" else None
    if match is None or "reasoning_content" in message.extra:
        return message
    extra = {**message.extra, "reasoning_content": match[1].strip("\n")} if match[1].strip() else message.extra
    return replace(message, content=message.content[match.end() :].lstrip("\n"), extra=extra)


def fold_system(messages: list[Message], origin: Origin | None = None) -> list[Message]:
    """The messages with system messages at the beginning written in front of the first user message, for a template
    that has no system role."""
    before = list(itertools.takewhile(lambda message: message.role == "system", messages))
    if not before:
        return messages
    after = messages[len(before) :]
    if not after or after[0].role != "user":
        reason = "the chat template has no system role, and no user message follows that could hold the system message"
        raise RecordError(REFUSED, origin, reason) if origin else UserError(f"{reason}.")
    first, *rest = after
    return [replace(first, content="\n\n".join(message.content for message in [*before, first])), *rest]


def joined(messages: list[Message], roles: Collection[str], origin: Origin | None = None) -> list[Message]:
    """The messages with neighbours of one of these roles joined, a blank line between them, for a template in which
    turns must alternate. What only an answer by itself can hold (calls, reasoning) stays apart."""
    made: list[Message] = []
    for number, message in enumerate(messages, start=1):
        before = made[-1] if made else None
        if before is None or not _can_join(before, message, roles):
            made.append(message)
            continue
        if before.weight != message.weight:
            reason = (
                f"messages {number - 1} and {number} are both of the {message.role}, which the chat template refuses, "
                "and cannot be written as one, since their weights differ; give both the same weight"
            )
            raise RecordError(REFUSED, origin, reason) if origin else UserError(f"{reason}.")
        content = "\n\n".join(text for text in (before.content, message.content) if text.strip())
        made[-1] = replace(before, content=content, extra=message.extra)
    return made


def _can_join(before: Message, message: Message, roles: Collection[str]) -> bool:
    """Whether two neighbours of one role may be written as one: calls may follow what was said before them, reasoning
    not."""
    own = message.extra.keys() - {"tool_calls"} if message.role == "assistant" else message.extra.keys()
    return message.role == before.role and message.role in roles and not before.extra and not own


def as_dict(message: Message, text_arguments: bool = False) -> dict[str, Any]:
    made = {"role": message.role, "content": message.content, **message.extra}
    if "reasoning_content" in made:  # templates disagree on the name
        made["reasoning"] = made["thinking"] = made["reasoning_content"]
    if text_arguments and "tool_calls" in made:
        functions = [(call, call["function"]) for call in made["tool_calls"]]
        made["tool_calls"] = [
            {**call, "function": {**f, "arguments": json.dumps(f["arguments"], ensure_ascii=False)}}
            for call, f in functions
        ]
    return made
