"""What a chat template does, found out by asking it, with words that no template has in its own text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tunesmith.data.marked import TextTokenizer
from tunesmith.data.template import TemplateRefusal

Render = Callable[..., str]
"""The template's text for messages, and for tools where they are given; raises TemplateRefusal."""


def turn_end(render: Render, text_tokenizer: TextTokenizer, special: set[int]) -> int | None:
    """The last special token that follows an answer both in the middle and at the end of a conversation.

    Found with words that no template has in its own text. (In the middle the next question comes after it; at the
    end, some templates add an end-of-text token of their own.)
    """
    tokenizer = text_tokenizer.tokenizer
    words = ("vwkya", "qxzja", "vwkyb", "qxzjb")
    messages = [{"role": "assistant" if n % 2 else "user", "content": word} for n, word in enumerate(words)]
    try:
        text = render(messages)
    except TemplateRefusal:
        return None  # the guard looks closer and says why
    places = [text.find(word) for word in words]
    if min(places) < 0 or places != sorted(places):
        return None
    middle = text_tokenizer.start(text[places[1] + 5 : places[2]])[0]
    end = text_tokenizer.start(text[places[3] + 5 :])[0]
    added = special | set(tokenizer.added_tokens_decoder)
    common = [a for n, a in enumerate(end) if middle[: n + 1] == end[: n + 1] and a in added]
    if tokenizer.eos_token_id in common:
        return tokenizer.eos_token_id
    return next(iter((common or [i for i in end if i in added])[::-1]), None)


def wants_parts(render: Render) -> bool:
    """Whether a message's content has to be a list of parts, as many models that see images have it: of a text, their
    templates write nothing."""

    def writes(content: str | list[dict[str, str]]) -> bool:
        try:
            return "vwkya" in render([{"role": "user", "content": content}])
        except TemplateRefusal:
            return False

    return not writes("vwkya") and writes(as_parts("vwkya"))


def as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def next_turns(render: Render, text_tokenizer: TextTokenizer) -> dict[str, tuple[str, int]]:
    """What a template that writes nothing after an answer (GLM's) begins the next turn with, a user's or the result of
    a tool, as text and token: it is what the model says when it is done."""
    tokenizer = text_tokenizer.tokenizer
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "vwkyt", "arguments": {"qxzjp": "qxzjv"}}}
    answers = {"user": {"content": "qxzja"}, "tool": {"content": "", "tool_calls": [call]}}
    more = {"user": {"content": "vwkyb"}, "tool": {"content": "qxzjr", "name": "vwkyt", "tool_call_id": "abcdefghi"}}
    found = {}
    for role, answer in answers.items():
        messages = [{"role": "user", "content": "vwkya"}, {"role": "assistant", **answer}]
        try:
            before, after = render(messages), render([*messages, {"role": role, **more[role]}])
        except TemplateRefusal:
            continue
        if not after.startswith(before):
            continue
        ids, offsets = text_tokenizer.start(after[len(before) :])
        if ids and ids[0] in tokenizer.added_tokens_decoder and ids[0] != tokenizer.bos_token_id:
            found[role] = (after[len(before) :][: offsets[0][1]], ids[0])
    return found if "user" in found else {}


def between_turns(render: Render, text_tokenizer: TextTokenizer) -> set[int]:
    """Tokens that the template writes between an answer and the next question."""
    words = ("vwkya", "qxzja", "vwkyb", "qxzjb")
    try:
        text = render([{"role": "assistant" if n % 2 else "user", "content": word} for n, word in enumerate(words)])
    except TemplateRefusal:
        return set()
    if words[1] not in text or words[2] not in text:
        return set()
    return set(text_tokenizer.start(text[text.index(words[1]) + 5 : text.index(words[2])])[0])


def has_no_system_role(render: Render) -> bool:
    """Looked for in a finished conversation: some templates write the system message in prompts alone."""
    chat = [{"role": "user", "content": "vwkya"}, {"role": "assistant", "content": "qxzja"}]
    try:
        render(chat)
    except TemplateRefusal:
        return False
    try:
        return "qxzjb" not in render([{"role": "system", "content": "qxzjb"}, *chat])
    except TemplateRefusal:
        return True


MODES: tuple[tuple[dict[str, Any], bool | None], ...] = (
    ({}, None),
    ({"enable_thinking": False, "thinking": False}, False),
    ({"enable_thinking": True, "thinking": True}, True),
    ({"reasoning": False}, False),
    ({"reasoning_effort": "high"}, True),
)
"""Variables with which templates are asked for an answer without reasoning, or with it; without variables, for either.
Which of them a finished turn fits, shows."""
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Templates disagree on the name."""


def modes_for(reasons: bool) -> list[dict[str, Any]]:
    return [mode for mode, thinks in MODES if thinks in (None, reasons)]


def writes_reasoning(render: Render) -> bool:
    """Whether thoughts that are given apart from the answer are written once, before it; in whatever marks, and be it
    only where the template is asked to think."""
    answer = {"role": "assistant", "content": "qxzjb", **dict.fromkeys(_THOUGHTS, "qxzja")}
    for mode in modes_for(True):
        try:
            text = render([{"role": "user", "content": "vwkya"}, answer], mode=mode)
        except TemplateRefusal:
            continue
        if text.count("qxzja") == 1 and text.index("qxzja") < text.find("qxzjb"):
            return True
    return False


def leaves_out_thoughts(render: Render) -> bool:
    """Whether finished turns hold none of the thoughts that were given with them, and show where they stood: prompts
    open an answer for them (DeepSeek-R1's), be it in one mode, or the turn has empty ones (Kimi-K2-Thinking's)."""
    question, answer = {"role": "user", "content": "vwkya"}, {"role": "assistant", "content": "qxzja"}
    for mode in modes_for(True):
        try:
            asked = render([question], generation=True, mode=mode)
            finished = render([question, answer | dict.fromkeys(_THOUGHTS, "qxzjb")], mode=mode)
        except TemplateRefusal:
            continue
        back = None if "qxzjb" in finished else with_thoughts(asked, finished, "qxzjb")
        if back is not None and back.rpartition("</think>")[2].lstrip().startswith("qxzja"):
            return True
    return False


OPENED = re.compile(r"\s*<think>\s*")
"""What a prompt opens an answer with for its thoughts."""
_OPENED_LAST = re.compile(r"\s*(<think>\s*)$")
_EMPTY = re.compile(r"(\s*<think>)(\s*)(?=</think>)")


def opens_thoughts(render: Render) -> bool:
    """Whether prompts open an answer for its thoughts, and finished turns hold none (DeepSeek-R1's)."""
    question, answer = {"role": "user", "content": "vwkya"}, {"role": "assistant", "content": "qxzja"}
    thoughts = dict.fromkeys(_THOUGHTS, "qxzjb")
    try:
        asked = render([question], generation=True)
        finished = [render([question, answer]), render([question, answer | thoughts])]
    except TemplateRefusal:
        return False
    before, tag, rest = asked.rpartition("<think>")
    if not OPENED.fullmatch(tag + rest) or any("qxzjb" in text or not text.startswith(before) for text in finished):
        return False
    return all(text[len(before) :].startswith("qxzja") for text in finished)


def with_thoughts(prompt: str, upto: str, thoughts: str) -> str | None:
    """What the model says after the prompt when it thinks, where the finished turn (`upto`) leaves its thoughts out:
    the thoughts, put back where the prompt opens for them or the turn has empty ones, and the answer. None where
    neither is so. They stand in lines of their own where the template's mark does."""
    opened = _OPENED_LAST.search(prompt)
    before = prompt[: opened.start(1)] if opened else prompt
    shared = next(
        (n for n, (x, y) in enumerate(zip(before, upto, strict=False)) if x != y), min(len(before), len(upto))
    )
    if shared < (opened.start() if opened else len(prompt)):
        return None
    rest = upto[shared:]
    empty = _EMPTY.match(rest)
    if opened:
        line = "\n" if opened[1].endswith("\n") else ""
        if empty:
            return thoughts + line + rest[empty.end() :]
        return f"{thoughts}{line}</think>{line}{line}{rest.removeprefix(opened[1])}"
    if empty:
        line = "\n" if "\n" in empty[2] else ""
        return empty[1] + line + thoughts + line + rest[empty.end() :]
    return None


def must_alternate(render: Render) -> frozenset[str]:
    """Roles of which the template refuses two messages one after the other, and takes one."""
    asked, answer = {"role": "user", "content": "vwkya"}, {"role": "assistant", "content": "qxzja"}

    def takes(*messages: dict[str, str]) -> bool:
        try:
            render(list(messages))
        except TemplateRefusal:
            return False
        return True

    if not takes(asked, answer, asked, answer):
        return frozenset()
    twice = {"user": (asked, asked, answer), "assistant": (asked, answer, answer)}
    return frozenset(role for role, messages in twice.items() if not takes(*messages))


_CALL_IDS = {"none": "", "any": "call_vwkyi", "short": "abcdefghi", "named": "functions.vwkyt:0"}
"""An id of each kind of `messages.CALL_IDS` that may be asked for."""


def call_ids(render: Render) -> str:
    """Which ids of tool calls the template wants, a kind of `messages.CALL_IDS`: the first with which it writes a call,
    by its name, and takes its result."""
    asked, answer = {"role": "user", "content": "vwkya"}, {"role": "assistant", "content": "qxzjb"}
    for kind, call_id in _CALL_IDS.items():
        for arguments in ({"qxzjp": "qxzjv"}, '{"qxzjp": "qxzjv"}'):
            call = {"type": "function", "function": {"name": "vwkyt", "arguments": arguments}}
            result = {"role": "tool", "content": "qxzjr", "name": "vwkyt"}
            if call_id:
                call, result = {"id": call_id, **call}, {**result, "tool_call_id": call_id}
            calling = {"role": "assistant", "content": "", "tool_calls": [call]}
            try:
                called = render([asked, calling])
                render([asked, calling, result, answer])
            except TemplateRefusal:
                continue
            if "vwkyt" in called:
                return "counted" if _counts_calls(render, arguments) else kind
    return "none"


def _counts_calls(render: Render, arguments: Any) -> bool:
    """Whether calls get ids that the template makes itself, one count for each message, while results name those of the
    data, which then are of no call (Kimi-K2's)."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "vwkya"}]
    ids = ("call_vwkyi", "call_vwkyj", "call_vwkyk")
    for some in (ids[:2], ids[2:]):
        function = {"name": "vwkyt", "arguments": arguments}
        calls = [{"id": one, "type": "function", "function": function} for one in some]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        messages += [{"role": "tool", "content": "qxzjr", "name": "vwkyt", "tool_call_id": one} for one in some]
    try:
        text = render([*messages, {"role": "assistant", "content": "qxzjb"}])
    except TemplateRefusal:
        return False
    counted = re.findall(r"functions\.vwkyt:(\d+)", text)
    return counted == ["0", "1", "0"] and all(text.count(one) == 1 for one in ids)


def tool_parts(render: Render, ids: str) -> frozenset[str]:
    """Asked with ids of the kind that the template wants, and arguments such as the strictest do."""
    call_id = _CALL_IDS.get(ids) or _CALL_IDS["short"]
    function = {"name": "vwkyt", "description": "qxzjd", "parameters": {"type": "object", "properties": {}}}
    asked = [{"role": "user", "content": "vwkya"}]
    told = [
        {"role": "tool", "content": "qxzjr", "name": "vwkyt", "tool_call_id": call_id},
        {"role": "assistant", "content": "qxzjb"},
    ]
    found = set()
    for before in ([], [{"role": "system", "content": "vwkys"}]):
        for arguments in ({"qxzjp": "qxzjv"}, '{"qxzjp": "qxzjv"}'):
            call = {"id": call_id, "type": "function", "function": {"name": "vwkyt", "arguments": arguments}}
            calling = {"role": "assistant", "content": "", "tool_calls": [call]}
            for tools in ((), ({"type": "function", "function": function},)):
                for messages in ([*before, *asked], [*before, *asked, calling], [*before, *asked, calling, *told]):
                    try:
                        text = render(messages, tools)
                    except TemplateRefusal:
                        continue
                    if tools and calling not in messages and "vwkyt" in text:
                        found.add("descriptions")
                    if calling in messages and not tools and "vwkyt" in text:
                        found |= {"calls"} | ({"arguments"} if "qxzjp" in text and "qxzjv" in text else set())
                    if "qxzjr" in text and "qxzjb" in text:
                        found.add("results")
    return frozenset(found)
