"""Messages, tools and answers of a record, in the ways in which people write them; what none of them is, is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tunesmith.data.types import Conversation, Message, Origin, RecordError
from tunesmith.data.values import (
    ODD,
    as_json,
    as_list,
    as_text,
    check_numbers,
    described,
    first_of,
    is_odd,
    key_of,
    lack_of,
    names_of,
    present,
)

if TYPE_CHECKING:
    from tunesmith.config.schema import Dataset

ROLES = {
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "bot": "assistant", "model": "assistant", "ai": "assistant",
    "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "system": "system", "developer": "system",
    "tool": "tool", "observation": "tool", "function": "tool", "function_response": "tool", "ipython": "tool",
    "tool_response": "tool",
    "function_call": "function_call", "tool_call": "function_call",
}  # fmt: skip
TURNS = ("prompt", "completion", "response", "chosen", "rejected")
"""Fields that hold text, or messages."""
MOST_WEIGHT = 1000
"""The largest weight of a message, as of a data set."""
_WRITTEN = re.compile(r"""\s*\[\s*\{\s*["'](role|content|from|value)["']\s*:""")


def checked(messages: list[Message], origin: Origin, tools: tuple[dict[str, Any], ...] = ()) -> Conversation:
    """A conversation in which something is answered. An assistant's turn that nobody asked for (a greeting at the
    start) is context, never a target."""
    if not any(message.role == "assistant" for message in messages):
        raise RecordError(
            "no answer", origin, "the conversation has no assistant turn, so there is nothing to learn from it"
        )
    asked = answered = False
    for place, message in enumerate(messages):
        asked = asked or message.role in ("user", "tool")
        answered = answered or (asked and message.role == "assistant")
        if message.role == "assistant" and not asked and message.weight is None:
            messages[place] = replace(message, weight=0.0)
    if not answered:
        raise RecordError("no answer", origin, "no assistant turn of the conversation answers a user turn")
    return Conversation(tuple(messages), tools)


def messages_of(value: Any, name: str, origin: Origin, dataset: Dataset) -> list[Message]:
    listed = [value] if isinstance(value, dict) else as_list(value, name, origin)
    if not listed:
        raise RecordError("empty conversation", origin, f"`{name}` is empty")
    if all(isinstance(item, dict) and item.keys() == {"input", "output"} for item in listed):
        turns = (("user", "input"), ("assistant", "output"))
        listed = [{"role": role, "content": pair[side]} for pair in listed for role, side in turns]
    messages = [_message(item, f"`{name}` {n}", origin, dataset) for n, item in enumerate(listed, start=1)]
    if messages and messages[0].role == "system" and not messages[0].content.strip():
        messages = messages[1:]
    return messages


def conversation_of(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, origin: Origin
) -> tuple[list[Message], tuple[dict[str, Any], ...]]:
    """Messages and tools of a request, read as training reads records of the format `messages`; without weights."""
    from tunesmith.config.schema import Dataset

    unweighted = [{**item, "weight": 0} if item.get("role") == "assistant" else item for item in messages]
    turns = messages_of(unweighted, "messages", origin, Dataset(path=origin.file))
    return [replace(turn, weight=None) for turn in turns], tools_of({"tools": tools}, origin)


def _message(item: Any, where: str, origin: Origin, dataset: Dataset) -> Message:
    if not isinstance(item, dict):
        raise RecordError("wrong type", origin, f"{where} is not an object with `role` and `content`")
    role_key = key_of(item, dataset.fields.get("role", "role"), "role", "from")
    content_key = key_of(item, dataset.fields.get("content", "content"), "content", "value", "text")
    if role_key is None:
        raise RecordError(
            "missing field",
            origin,
            f"{where} has no `role`: it has {names_of(item)}; if a field of another name holds it, "
            "say `fields: {role: NAME, content: NAME}`",
        )
    role = ROLES.get(str(item[role_key]).strip().lower())
    if role is None:
        raise RecordError(
            "unknown role", origin, f"{where} has the unknown role `{item[role_key]}`; known are {', '.join(ROLES)}"
        )
    given = item.get(content_key) if content_key else None
    content, extra = _content(present(given), where, origin)
    for key in ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking"):
        if isinstance(item.get(key), str) and item[key]:
            extra["reasoning_content" if key in ("reasoning", "thinking") else key] = item[key]
    calls = present(item.get("tool_calls")) or present(item.get("function_call"))
    if role == "function_call":
        role, calls, content = "assistant", content, ""
    if calls:
        extra["tool_calls"] = _tool_calls(calls, where, origin)
    elif is_odd(given):
        raise RecordError(ODD, origin, f"{where} must be text, found {described(given)}")
    weight = _weight(item, where, origin)
    if role == "assistant" and not content.strip() and "tool_calls" not in extra and weight != 0:
        raise RecordError(
            "empty answer", origin, f"{where} is an empty answer, which would teach the model to be silent"
        )
    return Message(role, content, weight, extra)


def _content(value: Any, where: str, origin: Origin) -> tuple[str, dict[str, Any]]:
    """Text, or a list of parts; reasoning and tool calls among the parts go where templates look for them."""
    extra: dict[str, Any] = {}
    if value is None:
        return "", extra
    if isinstance(value, dict) and "type" in value:
        value = [value]
    if not isinstance(value, list):
        return as_text(value, where, origin), extra
    texts = []
    for part in value:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if kind in ("text", "input_text", "output_text"):
            texts.append(as_text(first_of(part, "text", "value", "content")[0], where, origin))
        elif kind in ("reasoning", "thinking"):
            extra["reasoning_content"] = as_text(first_of(part, kind, "value", "text")[0], where, origin)
        elif kind in ("tool_call", "function_call"):
            calls = _tool_calls(first_of(part, "value", kind)[0] or part, where, origin)
            extra["tool_calls"] = [*extra.get("tool_calls", []), *calls]
        else:
            raise RecordError("not text", origin, f"{where} holds a part of type `{kind}`; only text is read")
    return "".join(texts), extra


def _tool_calls(value: Any, where: str, origin: Origin) -> list[dict[str, Any]]:
    """[{"type": "function", "function": {"name": ..., "arguments": {...}}}], as templates expect them."""
    value = as_json(value, f"tool call in {where}", origin)
    calls = []
    for call in value if isinstance(value, list) else [value]:
        call = as_json(call, f"tool call in {where}", origin)
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RecordError("wrong tool call", origin, f"the tool call in {where} has no function `name`")
        arguments = function.get("arguments", function.get("parameters"))
        if isinstance(arguments, str):
            arguments = arguments.strip()
        if isinstance(arguments, str) and arguments:
            arguments = as_json(arguments, f"arguments of the tool call in {where}", origin)
        made = {
            "type": "function",
            "function": {"name": function["name"], "arguments": {} if arguments in (None, "") else arguments},
        }
        check_numbers(arguments, f"arguments of the tool call in {where}", origin)
        calls.append({"id": call["id"], **made} if call.get("id") else made)
    return calls


def tools_of(fields: dict[str, Any], origin: Origin) -> tuple[dict[str, Any], ...]:
    name = "functions" if isinstance(fields.get("functions"), list) and not fields.get("tools") else "tools"
    value = present(fields.get(name))
    if not value:
        return ()
    value = as_json(value, f"`{name}`", origin)
    tools = []
    for tool in value if isinstance(value, list) else [value]:
        tool = as_json(tool, f"`{name}`", origin)
        check_numbers(tool, f"description in `{name}`", origin)
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RecordError("wrong tool call", origin, f"an entry of `{name}` has no `name`")
        tools.append(tool if "function" in tool else {"type": "function", "function": tool})
    return tuple(tools)


def _weight(item: dict[str, Any], where: str, origin: Origin) -> float | None:
    for key in ("weight", "loss_weight", "train"):
        value = item.get(key)
        if value is None:
            continue
        if not isinstance(value, bool | int | float) or not 0 <= value <= MOST_WEIGHT:
            found = described(value) if is_odd(value) else repr(value)
            raise RecordError(
                ODD if is_odd(value) else "wrong weight",
                origin,
                f"`{key}` of {where} must be a number from 0 to {MOST_WEIGHT:,} or true/false, not {found}",
            )
        return float(value)
    return None


def system_turns(fields: dict[str, Any], messages: list[Message], origin: Origin) -> list[Message]:
    """The record's system text as a message; joined with the one that the messages begin with, if any."""
    value, name = first_of(fields, "system", "system_prompt")
    text = "" if present(value) is None else as_text(value, name, origin)
    if not text.strip():
        return []
    if messages and messages[0].role == "system":
        own = messages.pop(0)
        text = own.content if own.content == text else f"{text}\n\n{own.content}"
    return [Message("system", text)]


def user_turn(text: str) -> Message:
    return Message("user", text)


def answer_turn(value: Any, name: str, origin: Origin) -> Message:
    if present(value) is None:
        raise RecordError(lack_of(value), origin, f"`{name}` is {described(value)}; an answer is needed")
    text = as_text(value, name, origin)
    if not text.strip():
        raise RecordError("empty answer", origin, f"`{name}` is empty, which would teach the model to be silent")
    return Message("assistant", text)


def is_written_as_turns(text: str) -> bool:
    return _WRITTEN.match(text) is not None


def turns_in_column(value: Any, name: str, origin: Origin) -> Any:
    """Messages where a column of text holds them as JSON, which would be learned letter by letter."""
    if name not in TURNS or not isinstance(value, str) or not (found := _WRITTEN.match(value)):
        return value
    try:
        listed = json.loads(value)
    except (ValueError, RecursionError) as error:
        if "'" in found[0]:  # as pandas writes lists
            reason = f"`{name}` holds messages as Python writes them, and not JSON; save the data as .jsonl or .parquet"
            raise RecordError("not valid JSON", origin, reason) from error
        return value
    are_turns = all(isinstance(one, dict) and {"role", "from"} & one.keys() for one in listed)
    return listed if are_turns else value
