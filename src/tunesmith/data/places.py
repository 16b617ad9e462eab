"""Where a chat template places an answer: after which prompt, as it is asked for, and as which text.

What the model generates for a turn is what the template writes for the messages up to and including it, beyond what it
writes as the prompt for it. Templates differ in how they treat reasoning there, which the functions below allow for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tunesmith.data import traits
from tunesmith.data.chat_template import ChatTemplate
from tunesmith.data.template import TemplateRefusal

NO_THOUGHTS = re.compile(
    r"\s*(<think>\s*</think>|<\|channel>\w*\s*<channel\|>|<\|START_THINKING\|><\|END_THINKING\|>)\s*"
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an answer stands: after which prompt, as which text, and in which mode of the template's variables."""

    prompt: str
    answer: str
    mode: dict[str, Any]


class Places:
    """Finds the places of answers in what one chat template writes."""

    def __init__(self, template: ChatTemplate):
        self._template = template
        self.opens_thoughts = False
        """Prompts open an answer for thoughts, and finished turns hold none: without any they are closed at once."""
        self.leaves_out_thoughts = False
        """Finished turns leave out thoughts that the model is asked for; they are put back."""
        self.mode: dict[str, Any] = {}
        """Variables with which the template is asked for answers without reasoning."""
        if template.by_use:
            self.mode = self.mode_of(reasons=False)
            self.opens_thoughts = traits.opens_thoughts(template.render)
            self.leaves_out_thoughts = traits.leaves_out_thoughts(template.render)

    def mode_of(self, reasons: bool) -> dict[str, Any]:
        """Variables with which the template is asked for answers with reasoning, or without."""
        thoughts = {"reasoning_content": "vwkyc", "reasoning": "vwkyc", "thinking": "vwkyc"} if reasons else {}
        messages = [{"role": "user", "content": "vwkya"}, {"role": "assistant", "content": "qxzja", **thoughts}]
        try:
            place = self.find(messages, 1, ())
        except TemplateRefusal:
            return {}
        return place.mode if place else {}

    def find_marked(
        self, dicts: list[dict[str, Any]], i: int, tools: Sequence[dict[str, Any]], full: str
    ) -> Place | None:
        """The place of turn i as the template itself marks what is generated, with {% generation %}; without what the
        generation prompt gives, which some templates mark as well. None where it marks nothing."""
        if not self._template.marks_answers:
            return None
        upto, blocks = self._template.render_marked(dicts[: i + 1], tools)
        if len(blocks) != sum(message["role"] == "assistant" for message in dicts[: i + 1]):
            blocks = blocks[len(self._template.render_marked(dicts[:i], tools)[1]) :]
        else:
            blocks = blocks[-1:]
        if not blocks:
            return None
        start, end = blocks[0][0], blocks[-1][1]
        asked = self.find(dicts, i, tools, full)
        return asked if asked and len(asked.prompt) > start else Place(upto[:start], upto[start:end], {})

    def find(
        self, dicts: list[dict[str, Any]], i: int, tools: Sequence[dict[str, Any]], full: str | None = None
    ) -> Place | None:
        """The place of turn i: what the template asks for it with, and what follows that in the finished turn. `full`
        is the text of the whole conversation, where it is known; None where no place fits."""
        reasons = bool(dicts[i].get("reasoning_content")) or "</think>" in dicts[i]["content"]
        unfitting: Place | None = None
        for mode in traits.modes_for(reasons):
            prompt = self._template.render(dicts[:i], tools, generation=True, mode=mode)
            if full is not None and i == len(dicts) - 1 and not mode:
                upto = full
            else:
                upto = self._template.render(dicts[: i + 1], tools, mode=mode)
            if place := self._place_after(prompt, upto, mode, dicts[i], reasons):
                if fits(place, dicts[i]):
                    return place
                unfitting = unfitting or place
        return unfitting or self._place_after_dropped(dicts, i, tools) or self._place_in_open_turn(dicts, i, tools)

    def _place_after(
        self, prompt: str, upto: str, mode: dict[str, Any], answer: dict[str, Any], reasons: bool
    ) -> Place | None:
        """The place of an answer after this prompt, in the finished turn `upto` which may write the prompt
        otherwise."""
        thoughts = answer.get("reasoning_content", "").strip("\n")
        if (
            self.leaves_out_thoughts
            and thoughts
            and not (upto.startswith(prompt) and holds(upto[len(prompt) :], thoughts))
        ):
            thoughtful = traits.with_thoughts(prompt, upto, thoughts)
            if thoughtful is not None:
                return Place(prompt, thoughtful, mode)
        if upto.startswith(prompt):
            return Place(prompt, upto[len(prompt) :], mode)
        shared = len(common_prefix(prompt, upto))
        # The template thinks for the model, of nothing, and finished turns leave that out.
        is_skipped = not reasons and NO_THOUGHTS.fullmatch(prompt[shared:])
        if is_skipped and not upto[shared:].lstrip().startswith("</"):
            return Place(prompt, upto[shared:], mode)
        if self.opens_thoughts and traits.OPENED.fullmatch(prompt[shared:]):
            closed = traits.with_thoughts(prompt, upto, "")
            return Place(prompt, closed, mode) if closed is not None else None
        return None

    def _place_after_dropped(
        self, dicts: list[dict[str, Any]], i: int, tools: Sequence[dict[str, Any]]
    ) -> Place | None:
        """The place of an answer before which the template drops what led to a call of a tool (gpt-oss). The model sees
        that when it answers, and the answer is what the template writes where there is nothing to drop."""
        before = [_without_thoughts(turn) if turn["role"] == "assistant" else turn for turn in dicts[:i]]
        if before == dicts[:i]:
            return None
        place = self.find([*before, dicts[i]], i, tools)
        if place is None or not self._template.render(dicts[: i + 1], tools, mode=place.mode).endswith(place.answer):
            return None
        return replace(place, prompt=self._template.render(dicts[:i], tools, generation=True, mode=place.mode))

    def _place_in_open_turn(self, dicts: list[dict[str, Any]], i: int, tools: Sequence[dict[str, Any]]) -> Place | None:
        """The place of an answer in a turn that the template keeps open through the results of its tools (Apertus), and
        begins anew where it is asked for the answer: what is asked is what generation gives, the answer what
        follows."""
        if i == 0 or dicts[i - 1]["role"] != "tool":
            return None
        unasked, prompt = (self._template.render(dicts[:i], tools, generation=asks) for asks in (False, True))
        upto = self._template.render(dicts[: i + 1], tools)
        header, answer = prompt[len(unasked) :], upto[len(unasked) :]
        if not (header.strip() and prompt.startswith(unasked) and upto.startswith(unasked)) or answer[:1] == header[:1]:
            return None
        return Place(prompt, answer, {})


def fits(place: Place, answer: dict[str, Any]) -> bool:
    """Whether the answer stands there whole, in a mode of the template that is meant for it."""
    return holds(place.answer, answer.get("reasoning_content", "")) and closes_thoughts(place)


def closes_thoughts(place: Place) -> bool:
    """Whether the answer ends the thoughts that its prompt begins, if it does."""
    return not place.prompt.rstrip().endswith("<think>") or "</think>" in place.answer


def holds(text: str, part: str, is_data: bool = False) -> bool:
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


def common_prefix(a: str, b: str) -> str:
    """What both begin with, up to the end of a word or tag."""
    size = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    while size and a[size - 1] not in ">\n ":
        size -= 1
    return a[:size]


def _without_thoughts(answer: dict[str, Any]) -> dict[str, Any]:
    """The turn without its reasoning, and without what was said beside a call of a tool."""
    kept = {name: value for name, value in answer.items() if name not in ("reasoning_content", "reasoning", "thinking")}
    return {**kept, "content": ""} if kept.get("tool_calls") else kept
