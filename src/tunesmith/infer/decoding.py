"""What is asked of decoding beyond temperature and top_p: by a model's generation config, which is applied as
transformers' `generate` applies it, and by requests.

Penalties of tokens that a text has already are computed for all rows of a batch at once. What models rarely ask for is
left to transformers' own logits processors, row by row. Of the distribution that is drawn from, `infer.sampling` knows
more.

Legend: B rows, V tokens of the vocabulary, N tokens of texts, each once a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from tunesmith.errors import first_line
from tunesmith.model.load import usable_tokens, vocabulary_size

NOT_STREAMED: dict[str, Any] = {
    "num_beams": 1, "num_return_sequences": 1, "penalty_alpha": None, "dola_layers": None, "constraints": None,
    "force_words_ids": None, "token_healing": False,
}  # fmt: skip
"""What asks for another way of decoding than token by token, and the values that ask for nothing."""
NOT_APPLIED: dict[str, Any] = {
    **NOT_STREAMED, "guidance_scale": 1.0, "watermarking_config": None, "remove_invalid_values": False,
    "max_time": None,
}  # fmt: skip
"""What the embedded engine does not know, besides."""


@dataclass(frozen=True)
class Decoding:
    """How the tokens of an answer are chosen, beyond temperature and top_p."""

    repetition_penalty: float = 1.0
    """Of tokens that the prompt or the answer has: positive logits are divided by it, negative ones multiplied."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token each time that the answer has it; OpenAI's."""
    presence_penalty: float = 0.0
    """The same once, however often it came."""
    top_k: int = 0
    """0: all."""
    min_p: float = 0.0
    """Tokens less likely than the likeliest one times this are not drawn."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """By their names in generation configs."""

    @property
    def is_plain(self) -> bool:
        return self == PLAIN

    @property
    def forces_end(self) -> bool:
        """An answer that is cut off has an end token as its last one."""
        return "forced_eos_token_id" in self.others

    def without_sampling(self) -> Decoding:
        """Where the likeliest token is taken each time."""
        others = {name: value for name, value in self.others.items() if name not in {**FIRST, **LAST}}
        return replace(self, top_k=0, min_p=0.0, others=others)


PLAIN = Decoding()


@dataclass(frozen=True)
class GenerationDefaults:
    """What a model's generation config asks for."""

    decoding: Decoding = PLAIN
    max_new_tokens: int | None = None
    max_length: int | None = None
    """Of prompt and answer."""
    stops: tuple[str, ...] = ()
    """Strings that end an answer."""
    not_applied: tuple[str, ...] = ()
    """What it asks for in vain, as it is written there, each with the reason where that is a fault of its own."""

    def longest(self, prompt: int, room: int) -> int:
        """Tokens of an answer for which nobody has said how long it may be."""
        if self.max_new_tokens is not None:
            return min(room, self.max_new_tokens)
        if self.max_length is not None and self.max_length > prompt:
            return min(room, self.max_length - prompt)
        return room

    @property
    def sentence(self) -> str | None:
        """What to say of it, once."""
        if not self.not_applied:
            return None
        return f"The model's generation config asks for {', '.join(self.not_applied)}; answers are made without."


ASKS_NOTHING = GenerationDefaults()


def never_made(model: nn.Module) -> list[int]:
    """Tokens with which a model cannot go on, since one of its embeddings has no row of them, besides those that its
    generation config leaves out."""
    config: Any = model.config
    left_out = getattr(getattr(model, "generation_config", None), "suppress_tokens", None) or []
    return sorted({*left_out, *range(usable_tokens(config), vocabulary_size(config))})


def asked_of(model: nn.Module) -> GenerationDefaults:
    config: Any = getattr(model, "generation_config", None)
    if config is None:
        return ASKS_NOTHING
    found = {name: value for name in _NEUTRAL if (value := _wanted(config, name)) is not None}
    found |= {"suppress_tokens": never} if (never := never_made(model)) else {}
    faults = {name: f"{name}: {found[name]}" for name in found if name in NOT_APPLIED}
    for name in list(found):
        if name not in faults and (why := _fault(name, found, model)) is not None:
            faults[name] = f"{name}: {found[name]} ({why})"
    good = {name: value for name, value in found.items() if name not in faults}
    own = {name: good[name] for name in ("repetition_penalty", "top_k", "min_p") if name in good}
    decoding = Decoding(**own, others={name: good[name] for name in _OTHERS if name in good})
    stops = good.get("stop_strings", ())
    return GenerationDefaults(
        decoding,
        good.get("max_new_tokens"),
        good.get("max_length"),
        (stops,) if isinstance(stops, str) else tuple(stops),
        tuple(faults.values()),
    )


def not_streamed(model: nn.Module) -> tuple[dict[str, Any], str | None]:
    """Of what a model's generation config asks for, what `generate` cannot give token by token: the values with which
    it does not try, and what to say."""
    config: Any = getattr(model, "generation_config", None)
    found = {name: value for name in NOT_STREAMED if (value := _wanted(config, name)) is not None}
    said = GenerationDefaults(not_applied=tuple(f"{name}: {value}" for name, value in found.items())).sentence
    return {name: NOT_STREAMED[name] for name in found}, said


class History:
    """The tokens of one row, from the first of its prompt on, as what is asked of its decoding needs them."""

    def __init__(
        self, decoding: Decoding, prompt: Sequence[int], *, ends: frozenset[int], most: int, device: torch.device
    ):
        self.decoding, self._device = decoding, device
        self._tokens = list(prompt)
        before = np.unique(np.array(prompt, dtype=np.int64))
        self._ids = np.empty(len(before) + most, dtype=np.int64)
        self._ids[: len(before)] = before
        self._counts = np.zeros(len(self._ids), dtype=np.float64)
        self._places = {int(token): place for place, token in enumerate(before)}
        start = _Start(list(prompt), sorted(ends), most, device, decoding.others)
        self._processors = {name: _OTHERS[name](value, start) for name, value in decoding.others.items()}

    def push(self, token: int) -> None:
        self._tokens.append(token)
        place = self._places.setdefault(token, len(self._places))
        self._ids[place] = token
        self._counts[place] += 1

    @property
    def ids(self) -> np.ndarray:
        """Each token of the text, once."""
        return self._ids[: len(self._places)]

    @property
    def taken_off(self) -> np.ndarray:
        """By frequency and presence in the answer."""
        counts = self._counts[: len(self._places)]
        return self.decoding.frequency_penalty * counts + self.decoding.presence_penalty * (counts > 0)

    def process(self, stage: Mapping[str, Any], scores_v: torch.Tensor) -> torch.Tensor:
        """By those of transformers' logits processors that belong here."""
        found = [one for name, one in self._processors.items() if name in stage and one is not None]
        if not found:
            return scores_v
        tokens = torch.tensor([self._tokens], device=self._device)
        scores_bv = scores_v[None]
        for one in found:
            scores_bv = one(tokens, scores_bv)
        return scores_bv[0]


def processed(logits_bv: torch.Tensor, histories: Sequence[History | None]) -> torch.Tensor:
    """Logits with what is asked of their rows, in the order of `generate`; as they are where nothing is. Frequency and
    presence come last, where `generate` has its caller's logits processors."""
    asking = {place: one for place, one in enumerate(histories) if one is not None}
    if not asking:
        return logits_bv
    made_bv = logits_bv.to(torch.float32, copy=True)
    _each(made_bv, asking, BEFORE)
    penalised = {place: one for place, one in asking.items() if one.decoding.repetition_penalty != 1.0}
    if penalised:
        places_n, penalties_n = _entries(
            penalised, made_bv, lambda one: np.full(len(one.ids), one.decoding.repetition_penalty)
        )
        values_n = made_bv.view(-1)[places_n]
        made_bv.view(-1)[places_n] = torch.where(values_n < 0, values_n * penalties_n, values_n / penalties_n)
    _each(made_bv, asking, AFTER)
    penalised = {
        place: one
        for place, one in asking.items()
        if one.decoding.frequency_penalty != 0.0 or one.decoding.presence_penalty != 0.0
    }
    if penalised:
        places_n, penalties_n = _entries(penalised, made_bv, lambda one: one.taken_off)
        made_bv.view(-1)[places_n] -= penalties_n
    return made_bv


def _each(logits_bv: torch.Tensor, histories: Mapping[int, History], stage: Mapping[str, Any]) -> None:
    for place, one in histories.items():
        if not stage.keys().isdisjoint(one.decoding.others):
            logits_bv[place] = one.process(stage, logits_bv[place])


def _entries(
    histories: Mapping[int, History], logits_bv: torch.Tensor, of: Callable[[History], np.ndarray]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where in the logits, laid end to end, the tokens of texts are [N], and a number for each [N]."""
    size = logits_bv.shape[-1]
    ids = np.concatenate([one.ids for one in histories.values()])
    rows = np.repeat(list(histories), [len(one.ids) for one in histories.values()])
    values = np.concatenate([of(one) for one in histories.values()]).astype(np.float32)
    places, known = rows * size + ids, ids < size  # an embedding may have tokens that the output head has not
    if not known.all():
        places, values = places[known], values[known]
    return torch.from_numpy(places).to(logits_bv.device), torch.from_numpy(values).to(logits_bv.device)


@dataclass(frozen=True)
class _Start:
    """What logits processors are made from."""

    prompt: list[int]
    ends: list[int]
    most: int
    device: torch.device
    others: Mapping[str, Any]

    @property
    def begin(self) -> int:
        """The place of the first token that is free."""
        return len(self.prompt) + (len(self.prompt) == 1 and "forced_bos_token_id" in self.others)

    @property
    def tokens(self) -> torch.Tensor:
        return torch.tensor([self.prompt], device=self.device)

    def without(self, words: list[list[int]]) -> Any:
        """What ends an answer is no bad word."""
        bad = [word for word in words if word not in [[end] for end in self.ends]]
        return transformers.NoBadWordsLogitsProcessor(bad) if bad else None

    def with_ends(self, make: Callable[..., Any], *values: Any) -> Any:
        """Nothing where nothing ends an answer."""
        return make(*values, self.ends, device=self.device) if self.ends else None


Make = Callable[[Any, _Start], Any]
# In the order of `generate`, which counts no token of padding here: rows have their own tokens alone.
BEFORE: dict[str, Make] = {
    "sequence_bias": lambda value, _: transformers.SequenceBiasLogitsProcessor(value),
    "encoder_repetition_penalty": lambda value, start: transformers.EncoderRepetitionPenaltyLogitsProcessor(
        float(value), start.tokens
    ),
}
"""Before the repetition penalty."""
AFTER: dict[str, Make] = {
    "no_repeat_ngram_size": lambda value, _: transformers.NoRepeatNGramLogitsProcessor(value),
    "encoder_no_repeat_ngram_size": lambda value, start: transformers.EncoderNoRepeatNGramLogitsProcessor(
        value, start.tokens
    ),
    "bad_words_ids": lambda value, start: start.without(value),
    "min_length": lambda value, start: start.with_ends(transformers.MinLengthLogitsProcessor, value),
    "min_new_tokens": lambda value, start: start.with_ends(
        transformers.MinNewTokensLengthLogitsProcessor, len(start.prompt), value
    ),
    "forced_bos_token_id": lambda value, _: transformers.ForcedBOSTokenLogitsProcessor(value),
    "forced_eos_token_id": lambda value, start: transformers.ForcedEOSTokenLogitsProcessor(
        len(start.prompt) + start.most,
        value,
        device=start.device,  # pyright: ignore[reportArgumentType]
    ),
    "exponential_decay_length_penalty": lambda value, start: (
        transformers.ExponentialDecayLengthPenalty(tuple(value), start.ends, len(start.prompt)) if start.ends else None
    ),
    "suppress_tokens": lambda value, start: transformers.SuppressTokensLogitsProcessor(
        value,
        device=start.device,  # pyright: ignore[reportArgumentType]
    ),
    "begin_suppress_tokens": lambda value, start: transformers.SuppressTokensAtBeginLogitsProcessor(
        value,
        start.begin,
        device=start.device,  # pyright: ignore[reportArgumentType]
    ),
}
"""After it."""
FIRST: dict[str, Make] = {"top_h": lambda value, _: transformers.TopHLogitsWarper(value)}
"""Of what is drawn from: between temperature and top_k."""
LAST: dict[str, Make] = {
    "typical_p": lambda value, _: transformers.TypicalLogitsWarper(value),
    "epsilon_cutoff": lambda value, _: transformers.EpsilonLogitsWarper(value),
    "eta_cutoff": lambda value, start: transformers.EtaLogitsWarper(
        value,
        device=start.device,  # pyright: ignore[reportArgumentType]
    ),
}
"""After top_p and min_p."""
_OTHERS: dict[str, Make] = {**BEFORE, **AFTER, **FIRST, **LAST}
_NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(_OTHERS), **NOT_APPLIED, "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": 0, "top_k": 0,
    "min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "max_new_tokens": None,
    "max_length": None, "stop_strings": None,
}  # fmt: skip
"""All that is read of a generation config, with the values that ask for nothing."""
_BOUNDS: dict[str, Callable[[Any], bool]] = {
    "repetition_penalty": lambda value: isinstance(value, int | float) and value > 0,
    "top_k": lambda value: isinstance(value, int) and value > 0,
    "min_p": lambda value: isinstance(value, int | float) and 0 <= value <= 1,
    "max_new_tokens": lambda value: isinstance(value, int) and value > 0,
    "max_length": lambda value: isinstance(value, int) and value > 0,
    "stop_strings": lambda value: isinstance(value, str | list) and all(isinstance(one, str) for one in value),
}


def _wanted(config: Any, name: str) -> Any:
    value = getattr(config, name, None)
    if value in ([], {}) or value == _NEUTRAL[name]:
        return None
    if name == "min_length" and getattr(config, "min_new_tokens", None) is not None:
        return None  # `generate` takes the latter
    return value


def _fault(name: str, found: Mapping[str, Any], model: nn.Module) -> str | None:
    """Why it cannot be applied: what fails is to fail now, and not with a request."""
    value = found[name]
    if name in _BOUNDS:
        return None if _BOUNDS[name](value) else "which is out of bounds"
    config: Any = model.config
    try:
        history = History(
            Decoding(others={name: value}), [0, 0], ends=frozenset([0]), most=2, device=torch.device("cpu")
        )
        history.process({name: None}, torch.zeros(config.get_text_config().vocab_size))
    except (ValueError, TypeError, IndexError, RuntimeError, AttributeError) as error:
        return first_line(error)
    return None
