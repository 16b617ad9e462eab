"""Conversations and texts -> token ids and which of them are targets, by the model's own chat template.

Targets are found by construction. What the model generates for turn k is what the template writes for the
messages up to and including k, beyond what it writes as the prompt for k; up to and including the end-of-turn
token, where generation stops. Prompt and answer are tokenized apart, as they are when the model generates, so
no token straddles the two. A turn that the template writes differently once it is not the last (reasoning models
drop earlier reasoning) is trained in an example of its own, cut off after that turn.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from tunesmith.data.types import Completion, Conversation, Document, Example, Message, Origin, Tokens
from tunesmith.errors import UserError

VERSION = "encoder 1"  # part of every fingerprint: raise it when the same input gives other tokens or targets
TEMPLATE_DATE = datetime(2024, 7, 26)
"""The date for templates that write today's: a fixed one, so that the same run gives the same tokens tomorrow."""


def read_template(path: str) -> str:
    """The text of a chat template file (`chat_template:` of the run), for `Encoder(template=...)`."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise UserError(f"chat_template: {path} cannot be read ({reason}).") from error
    if path.endswith(".json"):
        try:
            text = json.loads(text)["chat_template"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"chat_template: {path} is JSON without a text `chat_template`.") from error
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"chat_template: {path} holds no template.")
    return text


class TemplateRefusal(Exception):
    """The template raised an error for these messages."""


class Encoder:
    """Tokenizer + chat template + `train_on` -> examples. Picklable. `template` is the template's text."""

    def __init__(self, tokenizer: Any, *, template: str | None, train_on: str):
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise UserError(
                f"the tokenizer ({type(tokenizer).__name__}) is not a fast one, so the places of its tokens in the "
                "text are unknown; convert it to a tokenizer.json."
            )
        assert train_on in ("assistant", "last", "all"), train_on
        self.tokenizer = tokenizer
        self.train_on = train_on
        self._backend.no_truncation()
        self._backend.no_padding()
        own = tokenizer.chat_template if template is None else template
        self._templates: dict[str, str] = own if isinstance(own, dict) else {"default": own} if own else {}
        self.has_template = bool(self._templates)
        """Without one, only texts, prompt/completion texts and tokens can be encoded."""
        self.writes_date = any("strftime_now" in text for text in self._templates.values())
        self._variables = dict(tokenizer.special_tokens_map)
        self.fingerprint: str = self._make_fingerprint()

        self._special = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        self._newline = self._backend.encode("\n", add_special_tokens=False).ids
        after_newline = self._backend.encode("\nx", add_special_tokens=False).ids[len(self._newline) :]
        # Tokenizers that put a space before every text (sentencepiece) must not do so where an answer continues.
        self._adds_prefix = after_newline != self._backend.encode("x", add_special_tokens=False).ids
        self.bos_id: int | None = None
        """The token that the tokenizer itself puts before every text, if it does."""
        if self._backend.encode("x", add_special_tokens=True).ids[:1] == [tokenizer.bos_token_id]:
            self.bos_id = tokenizer.bos_token_id

        self.end_ids: frozenset[int] = frozenset(i for i in (tokenizer.eos_token_id,) if i is not None)
        """Tokens that end an assistant's turn or a document: where generation stops."""
        self.turn_end_id: int | None = None
        """The token with which the template ends an assistant's turn."""
        self.folds_system = False
        """The template has no place for a system message, so it goes in front of the first user message."""
        self.mode: dict[str, bool] = {}
        """Variables with which the template is asked for answers without reasoning."""
        if self.has_template:
            self._marks = any("endgeneration" in text for text in self._templates.values())
            self._special |= self.end_ids
            self.turn_end_id = self._find_turn_end()
            self.end_ids |= {i for i in (self.turn_end_id,) if i is not None}
            self._special |= self.end_ids
            self.folds_system = self._has_no_system_role()
            self.mode = self._find_mode()

    def encode(self, item: Conversation | Document | Completion | Tokens, origin: Origin) -> Example:
        """One example. Turns that the template rewrites once they are not the last are not targets in it."""
        return self._encode(item, origin)[0]

    def encode_all(self, item: Conversation | Document | Completion | Tokens, origin: Origin) -> list[Example]:
        """All examples of the item: one, and one more for each turn that the template rewrites later on.

        An empty document gives none.
        """
        if isinstance(item, Document) and not item.text.strip():
            return []
        return self._encode(item, origin)

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """What the model is given to answer these messages: for chat and generation."""
        if not self.has_template:
            raise UserError(_NO_TEMPLATE)
        try:
            folded = self._fold_system(list(messages))
            return self._start(self.render([_as_dict(m) for m in folded], tools, True, self.mode))[0]
        except TemplateRefusal as error:
            raise UserError(f"the chat template refuses this conversation: {error}.") from error

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        generation: bool = False,
        mode: dict[str, bool] | None = None,
    ) -> str:
        """The template's text for these messages. Raises TemplateRefusal."""
        return self._render(messages, tools, generation, mode)[0]

    # Items

    def _encode(self, item: Conversation | Document | Completion | Tokens, origin: Origin) -> list[Example]:
        if isinstance(item, Completion) and self.has_template:
            item = Conversation((Message("user", item.prompt), Message("assistant", item.completion)))
        if isinstance(item, Conversation):
            return self._encode_conversation(item, origin)
        ids: list[int] = []
        weights: list[float] = []
        if isinstance(item, Tokens):
            ids, weights = list(item.ids), [float(t) for t in item.is_target]
            return [self._example(ids, weights, origin, check_bos=False)]
        if self.bos_id is not None:
            _append(ids, weights, [self.bos_id], 0.0)
        if isinstance(item, Document):
            _append(ids, weights, self._start(item.text)[0], 1.0)
        elif item.prompt:
            _append(ids, weights, self._start(item.prompt)[0], 1.0 if self.train_on == "all" else 0.0)
            _append(ids, weights, self._continue(item.completion)[0], 1.0)
        else:
            _append(ids, weights, self._start(item.completion)[0], 1.0)
        if self.tokenizer.eos_token_id is not None and ids[-1:] != [self.tokenizer.eos_token_id]:
            _append(ids, weights, [self.tokenizer.eos_token_id], 1.0)
        return [self._example(ids, weights, origin)]

    def _encode_conversation(self, item: Conversation, origin: Origin) -> list[Example]:
        if not self.has_template:
            raise UserError(f"{origin}: {_NO_TEMPLATE}")
        messages = self._fold_system(list(item.messages), origin)
        if self.train_on != "all":
            while messages and messages[-1].role != "assistant" and not messages[-1].weight:
                messages.pop()
        chat = _Chat(messages, [_as_dict(m) for m in messages], item.tools, origin)
        try:
            try:
                full = self.render(chat.dicts, chat.tools)
            except TemplateRefusal:  # some templates want the arguments of tool calls as text
                chat = replace(chat, dicts=[_as_dict(m, text_arguments=True) for m in messages])
                full = self.render(chat.dicts, chat.tools)
            self._check_nothing_dropped(chat, full)
            turns, spans = self._locate(chat, full)
        except TemplateRefusal as error:
            raise UserError(f"{origin}: the chat template refuses this conversation: {error}.") from error
        main = self._lay_out(full, [t for t in turns if t.in_full], spans, origin)
        if self.train_on == "all":
            return [main]
        extras = [self._lay_out(t.prompt, [t], [], origin) for t in turns if not t.in_full]
        return [main, *extras] if main.weights.any() or not extras else extras

    # Where the targets are

    def _locate(self, chat: _Chat, full: str) -> tuple[list[_Turn], list[tuple[int, int, float]]]:
        """The assistant's turns, and spans of other messages whose weight was given."""
        last = max((i for i, m in enumerate(chat.messages) if m.role == "assistant"), default=-1)
        usual = 1.0 if self.train_on == "all" else 0.0
        turns, spans = [], []
        for i, message in enumerate(chat.messages):
            if message.role == "assistant":
                weight = self._weight(message, i == last)
                turn = self._turn(chat, i, full, weight) if weight > 0 or self.train_on == "all" else None
                turns += [turn] if turn else []
            elif message.weight not in (None, usual):
                spans.append((*self._message_span(chat, i, full), message.weight))
        return turns, spans

    def _weight(self, answer: Message, is_last: bool) -> float:
        if answer.weight is not None:
            return answer.weight
        return 1.0 if is_last or self.train_on != "last" else 0.0

    def _turn(self, chat: _Chat, i: int, full: str, weight: float) -> _Turn | None:
        place = self._marked_place(chat.dicts, i, chat.tools) or self._place(chat.dicts, i, chat.tools, full)
        if place is None:
            if self.train_on == "all" and chat.messages[i].weight is None:
                return None  # all of the full text is trained; there is no turn to set apart
            raise self._unplaceable(chat, i)
        self._check_answer_kept(chat, i, place.answer)
        ids, offsets = self._continue(place.answer)
        kept = self._until_turn_end(place.answer, ids, offsets)
        written = place.answer[: offsets[kept - 1][1] if kept else 0]
        in_full = full.startswith(place.prompt + written)
        if self.train_on == "all" and not in_full and chat.messages[i].weight is not None:
            self._message_span(chat, i, full)  # refuses: the weight has no place in the full text
        start = len(place.prompt)
        return _Turn(place.prompt, start, start + len(written), ids[:kept], weight, in_full)

    def _place(
        self, dicts: list[dict[str, Any]], i: int, tools: Sequence[dict[str, Any]], full: str | None = None
    ) -> _Place | None:
        """What the template asks for turn i with, and what follows it in the finished turn."""
        reasons = bool(dicts[i].get("reasoning_content")) or "</think>" in dicts[i]["content"]
        for mode in _MODES:
            if mode.get("enable_thinking", reasons) != reasons:
                continue
            prompt = self.render(dicts[:i], tools, generation=True, mode=mode)
            if full is not None and i == len(dicts) - 1 and not mode:
                upto = full
            else:
                upto = self.render(dicts[: i + 1], tools, mode=mode)
            if upto.startswith(prompt):
                return _Place(prompt, upto[len(prompt) :], mode)
            shared = len(_common_prefix(prompt, upto))
            # The template thinks for the model, of nothing, and finished turns leave that out.
            is_skipped = not reasons and _NO_THOUGHTS.fullmatch(prompt[shared:])
            if is_skipped and not upto[shared:].lstrip().startswith("</"):
                return _Place(prompt, upto[shared:], mode)
        return None

    def _marked_place(self, dicts: list[dict[str, Any]], i: int, tools: Sequence[dict[str, Any]]) -> _Place | None:
        """The template may say itself which characters are generated, with {% generation %}."""
        if not self._marks:
            return None
        upto, blocks = self._render(dicts[: i + 1], tools)
        if len(blocks) != sum(message["role"] == "assistant" for message in dicts[: i + 1]):
            blocks = blocks[len(self._render(dicts[:i], tools)[1]) :]
        else:
            blocks = blocks[-1:]
        return _Place(upto[: blocks[0][0]], upto[blocks[0][0] : blocks[-1][1]], {}) if blocks else None

    def _unplaceable(self, chat: _Chat, i: int) -> UserError:
        prompt = self.render(chat.dicts[:i], chat.tools, generation=True)
        upto = self.render(chat.dicts[: i + 1], chat.tools)
        same = len(_common_prefix(prompt, upto))
        return UserError(
            f"{chat.origin}: the chat template asks for an answer with {prompt[same:][:40]!r}, but writes finished "
            f"turns with {upto[same:][:40]!r} in its place, so what the model generates cannot be told; "
            "give a `chat_template` that writes both alike."
        )

    def _message_span(self, chat: _Chat, i: int, full: str) -> tuple[int, int]:
        before = self.render(chat.dicts[:i], chat.tools) if i else ""
        upto = self.render(chat.dicts[: i + 1], chat.tools)
        if not upto.startswith(before) or not full.startswith(upto):
            raise UserError(
                f"{chat.origin}: message {i + 1} has a weight, but the chat template writes it differently with and "
                "without its neighbours, so its tokens cannot be told; remove the weight."
            )
        return len(before), len(upto)

    def _until_turn_end(self, text: str, ids: list[int], offsets: list[tuple[int, int]]) -> int:
        """How many tokens up to and including the end-of-turn token; all, where there is none.

        At the end of a turn stand only special tokens and blanks (ChatML: `<|im_end|>` and a newline). Generation
        stops at the template's end-of-turn token among them; where that is not, at the last special one.
        """
        kept = len(ids)
        last_special = 0
        for place in range(len(ids) - 1, -1, -1):
            start, end = offsets[place]
            if ids[place] == self.turn_end_id:
                kept = last_special = place + 1
            elif ids[place] in self._special:
                last_special = last_special or place + 1
            elif text[start:end].strip():
                break
        return min(kept, last_special) if last_special else kept

    # Tokens

    @property
    def _backend(self) -> Any:
        return self.tokenizer.backend_tokenizer

    def _start(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def _continue(self, text: str, after: int | None = None) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens of text in the middle of another, which follows the special token `after`, if one is given."""
        if not self._adds_prefix or not text:
            return self._start(text)
        anchor = "\n" if after is None else self.tokenizer.convert_ids_to_tokens(after)
        anchor_ids = self._newline if after is None else [after]
        encoding = self._backend.encode(anchor + text, add_special_tokens=False)
        size = len(anchor_ids)
        if encoding.ids[:size] != anchor_ids:
            return self._start(text)
        return encoding.ids[size:], [(max(s - len(anchor), 0), e - len(anchor)) for s, e in encoding.offsets[size:]]

    def _lay_out(self, text: str, turns: list[_Turn], spans: list[tuple[int, int, float]], origin: Origin) -> Example:
        ids: list[int] = []
        weights: list[float] = []
        usual = 1.0 if self.train_on == "all" else 0.0
        place = 0

        def add_context(end: int) -> None:
            if end <= place:
                return
            if place == 0:
                made, offsets = self._start(text[:end])
            else:
                made, offsets = self._continue(text[place:end], ids[-1] if ids[-1] in self._special else None)
            ids.extend(made)
            if not spans:
                weights.extend([usual] * len(made))
                return
            for start, _ in offsets:
                inside = (w for s, e, w in spans if s <= place + start < e)
                weights.append(next(inside, usual))

        for turn in turns:
            add_context(turn.start)
            _append(ids, weights, turn.ids, turn.weight)
            place = turn.end
        # What follows the last target teaches nothing; all is kept only where all is a target or nothing is.
        if self.train_on == "all" or spans or not any(weights):
            add_context(len(text))
        return self._example(ids, weights, origin)

    def _example(self, ids: list[int], weights: list[float], origin: Origin, check_bos: bool = True) -> Example:
        bos = self.tokenizer.bos_token_id
        if bos is not None and check_bos and ids[:1] == [bos]:
            weights[0] = 0.0
            if ids[1:2] == [bos] and bos != self.tokenizer.eos_token_id:
                raise UserError(
                    f"{origin}: the example begins with {self.tokenizer.bos_token} twice: remove it from the data, or "
                    "from the chat template."
                )
        return Example(np.asarray(ids, dtype=np.int32), np.asarray(weights, dtype=np.float32), origin)

    # The template

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        generation: bool = False,
        mode: dict[str, bool] | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name) or next(iter(self._templates.values()))
        return _render(template, messages, list(tools) or None, generation, {**self._variables, **(mode or {})})

    def _make_fingerprint(self) -> str:
        parts = [VERSION, self.train_on, self._templates, self._variables, str(TEMPLATE_DATE)]
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode())
        digest.update(self._backend.to_str().encode())
        return digest.hexdigest()

    def _find_turn_end(self) -> int | None:
        """The last special token that follows an answer both in the middle and at the end of a conversation.

        Found with words that no template has in its own text. (In the middle the next question comes after it; at the
        end, some templates add an end-of-text token of their own.)
        """
        words = ("vwkya", "qxzja", "vwkyb", "qxzjb")
        messages = [{"role": "assistant" if n % 2 else "user", "content": word} for n, word in enumerate(words)]
        try:
            text = self.render(messages)
        except TemplateRefusal:
            return None  # the guard looks closer and says why
        places = [text.find(word) for word in words]
        if min(places) < 0 or places != sorted(places):
            return None
        middle = self._start(text[places[1] + 5 : places[2]])[0]
        end = self._start(text[places[3] + 5 :])[0]
        added = self._special | set(self.tokenizer.added_tokens_decoder)
        common = [a for n, a in enumerate(end) if middle[: n + 1] == end[: n + 1] and a in added]
        if self.tokenizer.eos_token_id in common:
            return self.tokenizer.eos_token_id
        return next(iter((common or [i for i in end if i in added])[::-1]), None)

    def _find_mode(self) -> dict[str, bool]:
        """How the template is asked for answers without reasoning."""
        messages = [{"role": "user", "content": "vwkya"}, {"role": "assistant", "content": "qxzja"}]
        try:
            place = self._place(messages, 1, ())
        except TemplateRefusal:
            return {}
        return place.mode if place else {}

    def _has_no_system_role(self) -> bool:
        """Looked for in a finished conversation: some templates write the system message in prompts alone."""
        chat = [{"role": "user", "content": "vwkya"}, {"role": "assistant", "content": "qxzja"}]
        try:
            self.render(chat)
        except TemplateRefusal:
            return False
        try:
            return "qxzjb" not in self.render([{"role": "system", "content": "qxzjb"}, *chat])
        except TemplateRefusal:
            return True

    def _fold_system(self, messages: list[Message], origin: Origin | None = None) -> list[Message]:
        if not self.folds_system or not messages or messages[0].role != "system":
            return messages
        if len(messages) < 2 or messages[1].role != "user":
            raise UserError(
                f"{f'{origin}: ' if origin else ''}the chat template has no system role, and no user message follows "
                "into which the system message could go."
            )
        system, first, *rest = messages
        return [replace(first, content=f"{system.content}\n\n{first.content}"), *rest]

    def _check_nothing_dropped(self, chat: _Chat, full: str) -> None:
        for number, message in enumerate(chat.messages, start=1):
            content = message.content
            if message.role == "assistant":
                content = content.rpartition("</think>")[2]  # dropping earlier reasoning is what some templates do
            if not _holds(full, content, is_data=message.role == "tool"):
                raise UserError(
                    f"{chat.origin}: the chat template drops the {message.role} message (number {number}); "
                    "give a `chat_template` that writes it."
                )
        for tool in chat.tools:
            if tool["function"]["name"] not in full:
                raise UserError(
                    f"{chat.origin}: the chat template drops the description of the tool "
                    f"`{tool['function']['name']}`; give a `chat_template` that knows tools."
                )

    def _check_answer_kept(self, chat: _Chat, i: int, answer: str) -> None:
        message = chat.messages[i]
        for call in message.extra.get("tool_calls", ()):
            if call["function"]["name"] not in answer:
                raise UserError(
                    f"{chat.origin}: the chat template drops the call of the tool `{call['function']['name']}` "
                    f"(message {i + 1}); give a `chat_template` that knows tools."
                )
        for name, part in (("answer", message.content), ("reasoning", message.extra.get("reasoning_content", ""))):
            if not _holds(answer, part):
                raise UserError(
                    f"{chat.origin}: the chat template does not write all of the {name} of message {i + 1}; "
                    "give a `chat_template` that does, or remove that part from the data."
                )


# Templates of reasoning models open an answer for thinking, or not; which of the two a finished turn fits, shows.
_MODES: tuple[dict[str, bool], ...] = (
    {},
    {"enable_thinking": False, "thinking": False},
    {"enable_thinking": True, "thinking": True},
)
_NO_THOUGHTS = re.compile(
    r"\s*(<think>\s*</think>|<\|channel>\w*\s*<channel\|>|<\|START_THINKING\|><\|END_THINKING\|>)\s*"
)
_NO_TEMPLATE = (
    "the model has no chat template, so a conversation cannot be written for it; give one with `chat_template:`, or "
    "train on prompt and completion texts (`format: prompt_completion`) or on plain text."
)


@dataclass(frozen=True, slots=True)
class _Chat:
    messages: list[Message]
    dicts: list[dict[str, Any]]
    tools: tuple[dict[str, Any], ...]
    origin: Origin


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an answer stands: after which prompt, and how the template's variables were set for it."""

    prompt: str
    answer: str
    mode: dict[str, bool]


@dataclass(frozen=True, slots=True)
class _Turn:
    """An assistant's turn: its tokens, and where it stands in the text that the template writes up to it."""

    prompt: str
    start: int
    end: int
    ids: list[int]
    weight: float
    in_full: bool
    """The text of the whole conversation holds it at the same place, after the same prompt."""


def _append(ids: list[int], weights: list[float], more: list[int], weight: float) -> None:
    ids.extend(more)
    weights.extend([weight] * len(more))


def _as_dict(message: Message, text_arguments: bool = False) -> dict[str, Any]:
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


def _common_prefix(a: str, b: str) -> str:
    """What both begin with, up to the end of a word or tag."""
    size = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    while size and a[size - 1] not in ">\n ":
        size -= 1
    return a[:size]


def _holds(text: str, part: str, is_data: bool = False) -> bool:
    """Whether the text holds the part, give or take blanks, which templates trim; data may be written as JSON."""
    part = part.strip()
    if part in text:
        return True
    squeezed = "".join(text.split())
    if "".join(part.split()) in squeezed:
        return True
    if not is_data:
        return False
    if json.dumps(part)[1:-1] in text or json.dumps(part, ensure_ascii=False)[1:-1] in text:
        return True
    try:
        return "".join(json.dumps(json.loads(part), ensure_ascii=False).split()) in squeezed
    except (ValueError, RecursionError):
        return False


def _render(
    template: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    generation: bool,
    variables: dict[str, Any],
) -> tuple[str, list[tuple[int, int]]]:
    """The text, and the stretches inside {% generation %} blocks."""
    import jinja2

    try:
        compiled = _compile(template)
        arguments = {**variables, "messages": messages, "tools": tools, "documents": None}
        with compiled.environment.track() as (pieces, blocks):  # type: ignore[attr-defined]
            for piece in compiled.generate(**arguments, add_generation_prompt=generation):
                pieces.append(piece)
            return "".join(pieces), [(start, end) for start, end in blocks if end > start]
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"the chat template is not valid Jinja: {error.message} (line {error.lineno}).") from error
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise TemplateRefusal(str(error).strip().rstrip(".") or type(error).__name__) from error


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> Any:
    """As transformers compiles templates: in a sandbox, since a template is a program that comes with a model."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012

        def __init__(self, environment: jinja2.Environment):
            super().__init__(environment)
            environment.extend(track=self.track)
            self.pieces: list[str] = []
            self.blocks: list[tuple[int, int]] = []

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("note"), [], [], body).set_lineno(line)

        def note(self, caller: Any) -> str:
            text = caller()
            start = sum(map(len, self.pieces))
            self.blocks.append((start, start + len(text)))
            return text

        @contextmanager
        def track(self) -> Any:
            self.pieces, self.blocks = [], []
            yield self.pieces, self.blocks

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = TEMPLATE_DATE.strftime
    return environment.from_string(template)
