"""Conversations and texts -> token ids and which of them are targets, by the model's own chat template.

Targets are found by construction. What the model generates for turn k is what the template writes for the
messages up to and including k, beyond what it writes as the prompt for k; up to and including the end-of-turn
token, where generation stops. Prompt and answer are tokenized apart, as they are when the model generates, so
no token straddles the two. Special tokens that the data write out are plain text: only the template's own are control
tokens. A turn that the template writes differently once it is not the last (reasoning models
drop earlier reasoning) is trained in an example of its own, cut off after that turn.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tunesmith.data import template as templates
from tunesmith.data import traits
from tunesmith.data.chat_template import ChatTemplate
from tunesmith.data.marked import TextTokenizer, any_of, clean, marked
from tunesmith.data.messages import (
    REFUSED,
    as_conversation,
    as_dict,
    fold_system,
    joined,
    tool_parts_of,
    with_call_ids,
    with_thoughts_apart,
    write_tools,
)
from tunesmith.data.places import NO_THOUGHTS, Place, Places, closes_thoughts, common_prefix, fits, holds
from tunesmith.data.template import TemplateRefusal
from tunesmith.data.types import Completion, Conversation, Document, Example, Message, Origin, RecordError, Tokens
from tunesmith.errors import UserError

VERSION = "encoder 4"  # part of every fingerprint: raise it when the same input gives other tokens or targets
TEMPLATE_DATE = templates.DATE
WINDOW = 1 << 17
"""Characters of a text that are tokenized at a time: memory for tokens' names and places is 300 times the text."""
LONGEST_CHAT = 1 << 22
"""Characters of a conversation, a million tokens or more, which no sequence holds."""


def _check_tokenizer(tokenizer: Any, special_tokens: Sequence[str]) -> None:
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise UserError(
            f"the tokenizer ({type(tokenizer).__name__}) is not a fast one, so the places of its tokens in the "
            "text are unknown; convert it to a tokenizer.json."
        )
    known = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    for name in special_tokens:
        if name not in known:
            raise UserError(f"special_tokens: the tokenizer has no token {name}.")


class Encoder:
    """Tokenizer + chat template + `train_on` -> examples, and prompts. Picklable. `template` is the template's text.

    `special_tokens` are those that the data may write out and mean.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        template: str | dict[str, str] | None,
        train_on: str,
        special_tokens: Sequence[str] = (),
    ):
        self.labels: tuple[str, ...] = ()
        """Names of classes, for records with a label."""
        _check_tokenizer(tokenizer, special_tokens)
        assert train_on in ("assistant", "last", "all"), train_on
        self.tokenizer = tokenizer
        self.train_on = train_on
        self._asked = frozenset(special_tokens)
        self._text = TextTokenizer(tokenizer)
        own = tokenizer.chat_template if template is None else template
        self.template: str | dict[str, str] | None = own
        owner = "tokenizer" if template is None else "file"
        self._template = ChatTemplate(own, owner, dict(tokenizer.special_tokens_map))
        self._places = Places(self._template)
        self.render = self._template.render
        self.as_wanted = self._template.as_wanted
        self.has_template = bool(self._template.by_use)
        """Without one, only texts, prompt/completion texts and tokens can be encoded."""
        self.writes_date = self._template.writes_date
        self.wants_parts = self._template.wants_parts
        """The template takes lists of parts, not texts."""
        self.mode = self._places.mode
        """Variables with which the template is asked for answers without reasoning."""
        self.opens_thoughts = self._places.opens_thoughts
        """Prompts open an answer for thoughts, and finished turns hold none: without any they are closed at once."""
        self.leaves_out_thoughts = self._places.leaves_out_thoughts
        """Finished turns leave out thoughts that the model is asked for; they are put back."""
        self.fingerprint: str = self._make_fingerprint()

        self._special = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        self.bos_id: int | None = None
        """The token that the tokenizer itself puts before every text, if it does."""
        if self.tokenizer.backend_tokenizer.encode("x", add_special_tokens=True).ids[:1] == [tokenizer.bos_token_id]:
            self.bos_id = tokenizer.bos_token_id

        self.end_ids: frozenset[int] = frozenset(i for i in (tokenizer.eos_token_id,) if i is not None)
        """Tokens that end an assistant's turn or a document: where generation stops."""
        self.turn_end_id: int | None = None
        """The token with which the template ends an assistant's turn."""
        self._next_turns: dict[str, tuple[str, int]] = {}
        """What the template begins the next turn with, by its role, where it ends an assistant's turn with nothing:
        answers then end with it."""
        self.folds_system = False
        """The template has no place for a system message, so it goes in front of the first user message."""
        self._alternate = frozenset[str]()
        """Roles of which the template takes no two messages one after the other."""
        self._tool_parts = frozenset[str]()
        """What the template writes of tools: descriptions, calls, arguments, results."""
        self._call_ids = "none"
        """Which ids of tool calls the template wants."""
        self._takes_reasoning = False
        """Thoughts go to the template apart from the answer."""
        self.controls: re.Pattern[str] | None = None
        """Special tokens, as the data may write them out: they become plain text."""
        self._spoken_controls: re.Pattern[str] | None = None
        """`controls` in what the assistant says: without tokens that the template looks for in it (`</think>`)."""
        if self.has_template:
            self._ask_template()
        self._find_controls()

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

    def whole(self, item: Conversation, origin: Origin) -> list[int]:
        """A conversation as the template writes it, with or without answers; nothing in it is a target."""
        if not self.has_template:
            raise RecordError(
                "no chat template", origin, "it is a conversation, and the model has no chat template; give `text`"
            )
        messages, tools = self._as_written(item, origin)
        return self._text.start(self.render([self._as_dict(m) for m in messages], tools, mode=self.mode))[0]

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, reasons: bool = False
    ) -> list[int]:
        """What the model is given to answer these messages, token for token as training puts it before an answer:
        before one that begins with reasoning, where the data had such (`prepare.answers_reason`)."""
        if not self.has_template:
            if tools or any(message.extra.get("tool_calls") for message in messages):
                raise UserError(
                    "The model has no chat template, which alone could say what tools and their calls are; ask it "
                    "without them."
                )
            return self.text_prompt("\n".join(message.content for message in messages))
        problem: UserError | None = None
        for is_thought in (reasons, not reasons):  # the other kind, where the template knows only that
            answer = Message("assistant", "qxzja", extra={"reasoning_content": "vwkyc"} if is_thought else {})
            # What the model itself said before may be such as no template places; it then is context like the rest.
            for earlier in (messages, [replace(m, weight=0.0) if m.role == "assistant" else m for m in messages]):
                try:
                    return self._before(Conversation((*earlier, answer), tuple(tools)))
                except UserError as error:
                    problem = problem or error
        assert problem
        raise problem

    def text_prompt(self, text: str) -> list[int]:
        """What the model is given to go on with a text, as training lays out the beginning of one."""
        bos = [] if self.bos_id is None else [self.bos_id]
        return bos + (self._text.start(marked(text, self.controls))[0] if text else [])

    def _before(self, item: Conversation) -> list[int]:
        """The tokens of a conversation up to where its last answer begins."""
        origin = Origin("this conversation", len(item.messages) - 1, "message")
        _, turns, _ = self._located(item, origin)
        if len(turns) < sum(m.role == "assistant" and m.weight != 0 for m in item.messages) and self.train_on == "all":
            messages, tools = self._as_written(replace(item, messages=item.messages[:-1]), origin)
            dicts = [self._as_dict(m) for m in messages]
            return self._text.start(self.render(dicts, tools, generation=True, mode=self.mode))[0]
        last = turns[-1]
        earlier = [turn for turn in turns[:-1] if turn.in_full] if last.in_full else []
        return self._lay_out(last.prompt, [*earlier, replace(last, ids=[])], [], origin).ids.tolist()

    def mode_of(self, reasons: bool) -> dict[str, Any]:
        """Variables with which the template is asked for answers with reasoning, or without."""
        return self._places.mode_of(True) if reasons else self.mode

    # Items

    def _encode(self, item: Conversation | Document | Completion | Tokens, origin: Origin) -> list[Example]:
        if isinstance(item, Completion) and self.has_template:
            item = as_conversation(item)
        if isinstance(item, Conversation):
            return self._encode_conversation(item, origin)
        ids: list[int] = []
        weights: list[float] = []
        if isinstance(item, Tokens):
            ids, weights = list(item.ids), [float(t) for t in item.is_target]
            return [self._example(ids, weights, origin, check_bos=False)]
        if isinstance(item, Document):
            return [self._document(item, origin)]
        if self.bos_id is not None:
            _append(ids, weights, [self.bos_id], 0.0)
        self._check_ends(item.completion, "completion", origin)
        self._check_size(len(item.prompt) + len(item.completion), origin)
        prompt, completion = (marked(text, self.controls) for text in (item.prompt, item.completion))
        if prompt:
            _append(ids, weights, self._text.start(prompt)[0], 1.0 if self.train_on == "all" else 0.0)
            _append(ids, weights, self._text.resume(completion)[0], 1.0)
        else:
            _append(ids, weights, self._text.start(completion)[0], 1.0)
        if self.tokenizer.eos_token_id is not None and ids[-1:] != [self.tokenizer.eos_token_id]:
            _append(ids, weights, [self.tokenizer.eos_token_id], 1.0)
        return [self._example(ids, weights, origin)]

    def _document(self, item: Document, origin: Origin) -> Example:
        """The example of a text, made in arrays from the start: a text may have fifty megabytes."""
        text, eos = marked(item.text, self.controls), self.tokenizer.eos_token_id
        parts = [np.asarray([self.bos_id] if self.bos_id is not None else [], dtype=np.int32)]
        place = 0
        while place < len(text):
            end = _word_boundary(text, place + WINDOW)
            made = self._text.resume(text[place:end]) if place else self._text.start(text[:end])
            parts.append(np.asarray(made[0], dtype=np.int32))
            place = end
        if eos is not None and parts[-1][-1:].tolist() != [eos]:
            parts.append(np.asarray([eos], dtype=np.int32))
        ids = np.concatenate(parts)
        self._check_bos(ids[:2].tolist(), origin)
        weights = np.ones(len(ids), dtype=np.float32)
        if self.tokenizer.bos_token_id is not None and ids[:1].tolist() == [self.tokenizer.bos_token_id]:
            weights[0] = 0.0
        return Example(ids, weights, origin)

    def _encode_conversation(self, item: Conversation, origin: Origin) -> list[Example]:
        if not self.has_template:
            raise UserError(f"{origin}: {_NO_TEMPLATE}")
        self._check_size(sum(len(message.content) for message in item.messages), origin)
        for number, message in enumerate(item.messages, start=1):
            if message.role == "assistant":
                for text in (message.content, message.extra.get("reasoning_content", "")):
                    self._check_ends(text, f"answer (message {number})", origin)
        full, turns, spans = self._located(item, origin)
        main = self._lay_out(full, [t for t in turns if t.in_full], spans, origin)
        if self.train_on == "all":
            return [main]
        extras = [self._lay_out(t.prompt, [t], [], origin) for t in turns if not t.in_full]
        return [main, *extras] if main.weights.any() or not extras else extras

    # Where the targets are

    def _as_written(self, item: Conversation, origin: Origin) -> tuple[list[Message], tuple[dict[str, Any], ...]]:
        """Messages and tools as the template has a place for them; the tools marked."""
        messages, tools = list(item.messages), item.tools
        if self.writes_tools_as_text(messages, tools):
            messages, tools = write_tools(messages, tools)
        elif self._call_ids != "none":
            messages = with_call_ids(messages, self._call_ids)
        if self.folds_system:
            messages = fold_system(messages, origin)
        messages = joined(messages, self._alternate, origin)
        if self._takes_reasoning:
            messages = [with_thoughts_apart(message) for message in messages]
        return messages, marked(tools, self.controls)

    def _located(self, item: Conversation, origin: Origin) -> tuple[str, list[_Turn], list[tuple[int, int, float]]]:
        """The template's text for the conversation, the assistant's turns, and spans with weights of their own."""
        messages, tools = self._as_written(item, origin)
        if self.train_on != "all":
            while messages and messages[-1].role != "assistant" and not messages[-1].weight:
                messages.pop()
        chat = _Chat(messages, [self._as_dict(m) for m in messages], tools, origin)
        try:
            try:
                full = self.render(chat.dicts, chat.tools)
            except TemplateRefusal:  # some templates want the arguments of tool calls as text
                chat = replace(chat, dicts=[self._as_dict(m, text_arguments=True) for m in messages])
                full = self.render(chat.dicts, chat.tools)
            self._check_nothing_dropped(chat, clean(full))
            return full, *self._locate(chat, full)
        except TemplateRefusal as error:
            raise RecordError(REFUSED, origin, f"the chat template refuses this conversation: {error}") from error

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
        place = self._places.find_marked(chat.dicts, i, chat.tools, full) or self._places.find(
            chat.dicts, i, chat.tools, full
        )
        if place is None:
            if self.train_on == "all" and chat.messages[i].weight is None:
                return None  # all of the full text is trained; there is no turn to set apart
            raise self._unplaceable(chat, i)
        self._check_answer_kept(chat, i, place)
        ids, offsets = self._text.resume(place.answer)
        kept = self._until_turn_end(place.answer, ids, offsets)
        written = place.answer[: offsets[kept - 1][1] if kept else 0]
        in_full = full.startswith(place.prompt + written)
        ids = ids[:kept]
        role = "tool" if chat.messages[i].extra.get("tool_calls") else "user"
        if self._next_turns and not self._is_ended(role, ids):
            text, end = self._next_turn(role, full[len(place.prompt + written) :] if in_full else "")
            written, ids = written + text, [*ids, *end]
        is_left_out = self.leaves_out_thoughts and not in_full and "reasoning_content" in chat.messages[i].extra
        if self.train_on == "all" and is_left_out:
            raise RecordError(
                "dropped by the chat template",
                chat.origin,
                f"the chat template leaves the reasoning of message {i + 1} out of finished turns, so that "
                "`train_on: all` would miss it; train on answers (`train_on: assistant`)",
            )
        if self.train_on == "all" and not in_full and chat.messages[i].weight is not None:
            self._message_span(chat, i, full)  # refuses: the weight has no place in the full text
        start = len(place.prompt)
        return _Turn(place.prompt, start, start + len(written), ids, weight, in_full)

    def _is_ended(self, role: str, ids: list[int]) -> bool:
        """Whether the template, which ends no answer, does end this one: calls may have a mark of their own."""
        last = ids[-1] if ids else None
        return last in self.end_ids or (role == "tool" and "tool" not in self._next_turns and last in self._special)

    def _next_turn(self, role: str, rest: str) -> tuple[str, list[int]]:
        """What an answer ends with, of the text that follows it, and its tokens: what begins a turn of this role where
        nothing follows; nothing, where another answer does."""
        if not rest:
            return "", [self._next_turns.get(role, self._next_turns["user"])[1]]
        return next(((text, [i]) for text, i in self._next_turns.values() if rest.startswith(text)), ("", []))

    def _unplaceable(self, chat: _Chat, i: int) -> RecordError:
        prompt = self.render(chat.dicts[:i], chat.tools, generation=True)
        upto = self.render(chat.dicts[: i + 1], chat.tools)
        same = len(common_prefix(prompt, upto))
        if not NO_THOUGHTS.fullmatch(prompt[same:]) and self._needs_thoughts(chat, i):
            return RecordError(
                "answer without reasoning",
                chat.origin,
                f"the chat template asks for reasoning with {prompt[same:][:40]!r}, and message {i + 1} has none; give "
                "its `reasoning_content`, or a `chat_template` that asks for answers without",
            )
        return RecordError(
            "answer without a place",
            chat.origin,
            f"the chat template asks for an answer with {prompt[same:][:40]!r}, but writes finished "
            f"turns with {upto[same:][:40]!r} in its place, so what the model generates cannot be told; "
            "give a `chat_template` that writes both alike",
        )

    def _needs_thoughts(self, chat: _Chat, i: int) -> bool:
        """Whether an answer without reasoning would have its place if it had some."""
        if chat.dicts[i].get("reasoning_content") or not self._takes_reasoning:
            return False
        thoughtful = chat.dicts[i] | dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "vwkyc")
        place = self._places.find([*chat.dicts[:i], thoughtful], i, chat.tools)
        return place is not None and fits(place, thoughtful)

    def _message_span(self, chat: _Chat, i: int, full: str) -> tuple[int, int]:
        upto = self.render(chat.dicts[: i + 1], chat.tools)
        before = self._before_first(chat, upto) if i == 0 else self.render(chat.dicts[:i], chat.tools)
        if not upto.startswith(before) or not full.startswith(upto):
            raise RecordError(
                "weight without a place",
                chat.origin,
                f"message {i + 1} has a weight, but the chat template writes it differently with and "
                "without its neighbours, so its tokens cannot be told; remove the weight",
            )
        return len(before), len(upto)

    def _before_first(self, chat: _Chat, upto: str) -> str:
        """What the template writes before the first message (a system prompt of its own) does not belong to it.

        The message's turn is what is written for it after others; else, what changes with its content.
        """
        message = chat.dicts[0]
        others = [{"role": "user", "content": "vwkya"}, {"role": "assistant", "content": "qxzja"}]
        try:
            turn = self.render([*others, message])[len(self.render(others)) :]
            if turn and upto.endswith(turn):
                return upto[: -len(turn)]
        except TemplateRefusal:
            pass
        other = self.render([{**message, "content": "q" if message["content"].strip()[:1] != "q" else "v"}], chat.tools)
        same = next((n for n, (x, y) in enumerate(zip(upto, other, strict=False)) if x != y), 0)
        return upto[:same]

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

    def _as_dict(self, message: Message, text_arguments: bool = False) -> dict[str, Any]:
        controls = self._spoken_controls if message.role == "assistant" else self.controls
        return marked(as_dict(message, text_arguments), controls)

    def _lay_out(self, text: str, turns: list[_Turn], spans: list[tuple[int, int, float]], origin: Origin) -> Example:
        ids: list[int] = []
        weights: list[float] = []
        usual = 1.0 if self.train_on == "all" else 0.0
        place = 0

        def add_context(end: int) -> None:
            if end <= place:
                return
            if place == 0:
                made, offsets = self._text.start(text[:end])
            else:
                made, offsets = self._text.resume(text[place:end], ids[-1] if ids[-1] in self._special else None)
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
            self._check_bos(ids[:2], origin)
        return Example(np.asarray(ids, dtype=np.int32), np.asarray(weights, dtype=np.float32), origin)

    # The template

    def _make_fingerprint(self) -> str:
        parts = [
            VERSION,
            self.train_on,
            self._template.by_use,
            self._template.variables,
            str(TEMPLATE_DATE),
            sorted(self._asked),
        ]
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode())
        digest.update(self.tokenizer.backend_tokenizer.to_str().encode())
        return digest.hexdigest()

    def _ask_template(self) -> None:
        """Finds out what the template does with turns, system messages, tools and thoughts."""
        self._special |= self.end_ids
        self.turn_end_id = traits.turn_end(self.render, self._text, self._special)
        if self.turn_end_id is None and (found := traits.next_turns(self.render, self._text)):
            self._next_turns, self.turn_end_id = found, found["user"][1]
        self.end_ids |= {i for i in (self.turn_end_id,) if i is not None}
        self._special |= self.end_ids
        self.folds_system = traits.has_no_system_role(self.render)
        self._alternate = traits.must_alternate(self.render)
        self._call_ids = traits.call_ids(self.render)
        self._tool_parts = traits.tool_parts(self.render, self._call_ids)
        self._takes_reasoning = self.leaves_out_thoughts or traits.writes_reasoning(self.render)
        self.end_ids |= self._find_call_ends()
        self._special |= self.end_ids

    def _find_controls(self) -> None:
        """Which special tokens become plain text where the data writes them out."""
        added = self.tokenizer.added_tokens_decoder
        ends = {str(added[i]) for i in self.end_ids if i in added}
        controls = {str(added[i]) for i in self._control_ids()} - self._asked
        spoken = controls - ({t for t in controls if self._template.is_parsed(t)} - ends)
        self.controls, self._spoken_controls = any_of(controls), any_of(spoken)
        self._text.controls = self.controls
        self._ends = any_of(ends - self._asked)
        self._text.control_ids = {i for i, t in added.items() if str(t) in controls}

    def _find_call_ends(self) -> set[int]:
        """The special token with which the template ends a turn that calls a tool, where it has one of its own."""
        call = {"type": "function", "id": "qxzja0000", "function": {"name": "qxzja", "arguments": {"vwkyb": "qxzjb"}}}
        question, answer = Message("user", "vwkya"), Message("assistant", "", 1.0, {"tool_calls": [call]})
        described = {"name": "qxzja", "description": "vwkyc", "parameters": {"type": "object", "properties": {}}}
        tools = ({"type": "function", "function": described},)
        try:
            _, turns, _ = self._located(Conversation((question, answer), tools), Origin("a test call", 1))
        except UserError:
            return set()
        return {i for i in turns[-1].ids[-1:] if i in self._special}

    def _control_ids(self) -> set[int]:
        """Tokens that are the template's to write: those flagged special, and others with which it begins and ends the
        turns of users. (Reasoning models' `<think>` is neither, where it is not flagged.)"""
        found = self._special | self.end_ids
        if self.has_template:
            found |= traits.between_turns(self.render, self._text)
        return found & self.tokenizer.added_tokens_decoder.keys()

    def writes_tools_as_text(self, messages: Sequence[Message], tools: Sequence[Any]) -> bool:
        """Whether the template has no place for what these messages do with tools, so that it is written for it."""
        return not tool_parts_of(messages, tools) <= self._tool_parts

    def joins_messages(self, messages: Sequence[Message], tools: Sequence[Any]) -> bool:
        """Whether messages of one role stand one after the other, and are written as one since the template refuses
        them."""
        if not self._alternate:
            return False
        if self.writes_tools_as_text(messages, tools):
            messages = write_tools(list(messages), tuple(tools))[0]
        return len(joined(list(messages), self._alternate)) < len(messages)

    def _check_nothing_dropped(self, chat: _Chat, full: str) -> None:
        for number, message in enumerate(chat.messages, start=1):
            content = message.content
            if message.role == "assistant":
                content = content.rpartition("</think>")[2]  # dropping earlier reasoning is what some templates do
            is_there = holds(full, content, is_data=message.role == "tool")
            if not is_there and message.role == "assistant" and self.train_on != "all":  # or is dropped later alone
                is_there = holds(clean(self.render(chat.dicts[:number], chat.tools)), content)
            if not is_there:
                raise RecordError(
                    "dropped by the chat template",
                    chat.origin,
                    f"the chat template drops the {message.role} message (number {number}); "
                    "give a `chat_template` that writes it",
                )
        for tool in chat.tools:
            name = clean(tool["function"]["name"])
            if name not in full:
                raise RecordError(
                    "dropped by the chat template",
                    chat.origin,
                    f"the chat template drops the description of the tool "
                    f"`{tool['function']['name']}`; give a `chat_template` that knows tools",
                )

    def _check_ends(self, text: str, what: str, origin: Origin) -> None:
        if self._ends and (match := self._ends.search(text)):
            raise RecordError(
                "end of turn in an answer",
                origin,
                f"the {what} holds {match[0]}, with which an answer ends; remove it, or say `special_tokens: "
                f"[{match[0]!r}]` where it is meant",
            )

    def _check_size(self, size: int, origin: Origin) -> None:
        if size > LONGEST_CHAT:
            reason = f"{size:,} characters in one conversation are more than a sequence holds; make several of it"
            raise RecordError("too long", origin, reason)

    def _check_bos(self, ids: list[int], origin: Origin) -> None:
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids == [bos, bos] and bos != self.tokenizer.eos_token_id:
            raise RecordError(
                "begins twice",
                origin,
                f"the example begins with {self.tokenizer.bos_token} twice: remove it from the data, or from the chat "
                "template",
            )

    def _check_answer_kept(self, chat: _Chat, i: int, place: Place) -> None:
        message, answer = chat.messages[i], clean(place.answer)
        if not closes_thoughts(place):
            raise RecordError(
                "thoughts without an end",
                chat.origin,
                f"the chat template opens message {i + 1} for thoughts and does not close them, so that the answer "
                "would be learned as a thought; give its `reasoning_content`, or put the reasoning and `</think>` "
                "before the answer, or give a `chat_template` that closes them",
            )
        thoughts = message.content.count("<think>")
        if thoughts and (place.prompt + place.answer).count("<think>") > thoughts + self.render(
            chat.dicts[:i], chat.tools
        ).count("<think>"):
            raise RecordError(
                "thoughts twice",
                chat.origin,
                f"the chat template writes thoughts of its own before those of message {i + 1}; leave out the "
                "`<think>` that it writes, give them as `reasoning_content`, or give a `chat_template` that does not",
            )
        for call in message.extra.get("tool_calls", ()):
            if call["function"]["name"] not in answer:
                raise RecordError(
                    "dropped by the chat template",
                    chat.origin,
                    f"the chat template drops the call of the tool `{call['function']['name']}` "
                    f"(message {i + 1}); give a `chat_template` that knows tools",
                )
        for name, part in (("answer", message.content), ("reasoning", message.extra.get("reasoning_content", ""))):
            if not holds(answer, part):
                inside = ", put it into the answer between <think> and </think>" if name == "reasoning" else ""
                raise RecordError(
                    "dropped by the chat template",
                    chat.origin,
                    f"the chat template does not write all of the {name} of message {i + 1}; "
                    f"give a `chat_template` that does{inside}, or remove that part from the data",
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
class _Turn:
    """An assistant's turn: its tokens, and where it stands in the text that the template writes up to it."""

    prompt: str
    start: int
    end: int
    ids: list[int]
    weight: float
    in_full: bool
    """The text of the whole conversation holds it at the same place, after the same prompt."""


def _word_boundary(text: str, place: int) -> int:
    """The nearest place before this one where a space stands between two words: all tokenizers split there."""
    if place >= len(text):
        return len(text)
    for at in range(place, max(place - (1 << 16), 1), -1):
        if text[at] == " " and text[at - 1].isalpha() and text[at + 1 : at + 2].isalpha():
            return at
    return place


def _append(ids: list[int], weights: list[float], more: list[int], weight: float) -> None:
    ids.extend(more)
    weights.extend([weight] * len(more))
