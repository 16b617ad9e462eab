"""Examples of encoder-decoders: a source for the encoder, a target for the decoder, in one row of tokens.

    start  target ... end  |  source ...
      0      1 ...    1    |    0 ...          weights

The decoder's tokens stand first, so that the token before each target predicts it as everywhere else, and an example
that is too long loses the end of its source, never its answer. Where one side ends is known from the weights: every
target counts, and nothing else does.

Both sides get what the model's own tokenizer puts around texts (an end, a language), as it puts it around sources and
around targets. A model with a chat template is asked by it; any other by the text alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tunesmith.data.chat import Encoder
from tunesmith.data.marked import marked
from tunesmith.data.types import Completion, Conversation, Document, Example, Message, Origin, RecordError, Tokens
from tunesmith.errors import UserError


class PairEncoder(Encoder):
    """An `Encoder` for models that read with an encoder: a target and its source. `start` is the token that the decoder
    begins with; None where that is the last one of its targets."""

    def __init__(self, tokenizer: Any, *, start: int | None, **options: Any):
        super().__init__(tokenizer, **options)
        self.start = start
        self._around_source, self._around_target = self._around("text"), self._around("text_target")
        self.fingerprint = f"{self.fingerprint}:pairs 1:{start}:{self._around_source}:{self._around_target}"

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, reasons: bool = False
    ) -> list[int]:
        if self.has_template:
            return super().prompt(messages, tools, reasons=reasons)
        return self.text_prompt("\n".join(message.content for message in messages))

    def text_prompt(self, text: str) -> list[int]:
        before, after = self._around_source
        return [*before, *self._plain(text), *after]

    def _encode(self, item: Conversation | Document | Completion | Tokens, origin: Origin) -> list[Example]:
        if isinstance(item, Document | Tokens):
            what = "a text" if isinstance(item, Document) else "tokens"
            raise RecordError(
                "no source",
                origin,
                f"it is {what} without a prompt, and an encoder-decoder learns from a prompt and its answer; give "
                "`prompt` and `completion`, or say which fields they are by `fields`",
            )
        if isinstance(item, Completion):
            item = Conversation((Message("user", item.prompt), Message("assistant", item.completion)))
        answers = [n for n, message in enumerate(item.messages) if message.role == "assistant" and message.weight != 0]
        if not answers:
            raise RecordError("no answer", origin, "there is no answer of the assistant in it to learn")
        if self.has_template:
            chosen = answers[-1:] if self.train_on == "last" else answers
            return [self._of_template(replace(item, messages=item.messages[: n + 1]), origin) for n in chosen]
        if len(answers) > 1 or answers[-1] != len(item.messages) - 1 or item.tools:
            raise RecordError(
                "several turns",
                origin,
                "it has several turns or tools, and the model has no chat template to write them by; give one question "
                "and one answer, or a `chat_template`",
            )
        return [self._of_texts(item, origin)]

    def _of_texts(self, item: Conversation, origin: Origin) -> Example:
        *asked, answer = item.messages
        texts = [message.content for message in asked]
        self._check_ends(answer.content, "answer", origin)
        self._check_size(sum(map(len, texts)) + len(answer.content), origin)
        source = self.text_prompt("\n".join(texts))
        before, after = self._around_target
        target = [*before, *self._plain(answer.content), *after]
        end = self.tokenizer.eos_token_id
        if end is not None and end not in target:
            target.append(end)
        return self._paired(source, target, answer.weight, origin)

    def _of_template(self, item: Conversation, origin: Origin) -> Example:
        """What the template writes before the last answer is read; the answer, up to its end, is written."""
        earlier = [replace(m, weight=0.0) if m.role == "assistant" else m for m in item.messages[:-1]]
        answer = item.messages[-1]
        made = super()._encode(replace(item, messages=(*earlier, replace(answer, weight=None))), origin)[-1]
        (places,) = np.nonzero(made.weights)
        if not len(places):
            raise RecordError("no answer", origin, "the chat template writes nothing of its last answer")
        first, last = int(places[0]), int(places[-1])
        return self._paired(made.ids[:first].tolist(), made.ids[first : last + 1].tolist(), answer.weight, origin)

    def _paired(self, source: list[int], target: list[int], weight: float | None, origin: Origin) -> Example:
        if not source:
            raise RecordError("no source", origin, "its prompt is empty, so there is nothing to read for the encoder")
        start = target[-1] if self.start is None else self.start
        ids = np.array([start, *target, *source], dtype=np.int32)
        weights = np.zeros(len(ids), dtype=np.float32)
        weights[1 : 1 + len(target)] = 1.0 if weight is None else weight
        return Example(ids, weights, origin)

    def _plain(self, text: str) -> list[int]:
        return self._text.start(marked(text, self.controls))[0] if text else []

    def _around(self, side: str) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before and after a text of this side."""
        whole = self.tokenizer(**{side: "x"})["input_ids"]
        inside = self.tokenizer(**{side: "x"}, add_special_tokens=False)["input_ids"]
        for at in range(len(whole) - len(inside) + 1):
            if whole[at : at + len(inside)] == inside:
                return whole[:at], whole[at + len(inside) :]
        raise UserError(
            f"the tokenizer ({type(self.tokenizer).__name__}) writes a text otherwise with its special tokens than "
            "without them, so sources and targets cannot be put together from it."
        )
