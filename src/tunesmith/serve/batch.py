"""Answers to many prompts by the engine, without a server: each is given as soon as it is there, in no order."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from tunesmith.data.chat import Encoder
from tunesmith.errors import UserError
from tunesmith.infer.call import try_out
from tunesmith.infer.decoding import asked_of
from tunesmith.infer.generate import stop_tokens
from tunesmith.infer.sampling import Token
from tunesmith.serve.answer import Answer
from tunesmith.serve.engine import LONGEST, Engine, Job, Limits, Reason, cache_tokens

BATCH = {"cpu": 8, "cuda": 64}
"""Prompts that are decoded at once."""


def generate(
    model: nn.Module,
    encoder: Encoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    stops: Sequence[str] = (),
    cut: Callable[[Sequence[int], int], None] | None = None,
) -> Iterator[tuple[int, str]]:
    """The place of each prompt and its answer, the likeliest token each time by the model and its generation config. A
    prompt that leaves no room for an answer loses its beginning, of which `cut` is told: the places of such prompts,
    and the tokens that are kept of them."""
    asked = asked_of(model)
    tried = try_out(model)
    config: Any = model.config
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    length = context if isinstance(context, int) and context > 0 else LONGEST
    batch = BATCH[next(model.parameters()).device.type]
    room = min(length * batch, cache_tokens(model, tried) or length * batch)
    length = min(length, room)
    if length < 16:
        raise UserError("There is no memory left for a key-value cache beside the model; use a larger device.")
    most = min(max_tokens, length // 2)
    too_long = [place for place, prompt in enumerate(prompts) if len(prompt) > length - most]
    if cut is not None and too_long:
        cut(too_long, length - most)
    limits = Limits(batch, 2 * batch, length, room, room * tried.bytes_per_token or None)
    engine = Engine(model, lambda _: None, limits, is_shared=tried.is_shared, is_wide=tried.is_wide)
    done: queue.SimpleQueue[tuple[int, Reason, Answer, list[str]]] = queue.SimpleQueue()
    ends = frozenset(stop_tokens(model, encoder))

    def job(place: int) -> Job:
        prompt = list(prompts[place])[-(length - most) :]
        answer, said = Answer(encoder.tokenizer, [*stops, *asked.stops], prompt), []

        def take(token: Token) -> bool:
            if piece := answer.push(token):
                said.append(piece.text)
            return answer.is_stopped

        return Job(
            model="",
            prompt=prompt,
            max_tokens=most,
            stop_ids=ends,
            take=take,
            end=lambda reason: done.put((place, reason, answer, said)),
            temperature=0.0,
            seed=0,
            decoding=asked.decoding,
        )

    # The longest first: rows that are decoded together are padded to the longest of them.
    waiting = sorted(range(len(prompts)), key=lambda place: -len(prompts[place]))[::-1]
    engine.start()
    try:
        under_way = 0
        while waiting or under_way:
            while waiting and under_way < 2 * batch:
                engine.submit(job(waiting.pop()))
                under_way += 1
            place, reason, answer, said = done.get()
            under_way -= 1
            if reason not in ("stop", "length"):
                raise UserError("The model failed while it answered; its weights are damaged, or memory ran out.")
            if piece := answer.rest():
                said.append(piece.text)
            yield place, "".join(said).strip()
    finally:
        engine.close()
