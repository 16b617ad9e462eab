"""How a model is called to generate: a prompt read, or one more token for each row of a key-value cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tunesmith.errors import UserError, first_line
from tunesmith.infer.attention import use_decoding_attention
from tunesmith.infer.cache import Row, bytes_of, is_shareable, new_cache, regroup
from tunesmith.infer.captured import FUSED_ROWS, Captured, is_capturable
from tunesmith.infer.compiled import CompiledLayers
from tunesmith.infer.fused import fused
from tunesmith.model.forward import own_attention

ADAPTERS = 8
"""Whose captured steps are kept; adapters may come and go."""


class Call:
    """How the model is called: a prompt read, or one more token for each row of a cache. On a GPU the latter is
    captured, in buffers of no more than `limit` bytes, made for as many tokens as are `expected` where that is known;
    `compiles`: of compiled layers, which takes half a minute the first time and pays where many tokens follow."""

    def __init__(
        self,
        model: nn.Module,
        *,
        is_shared: bool,
        limit: int | None = None,
        expected: int | None = None,
        compiles: bool = False,
    ):
        takes = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in takes
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        """For a prompt; a few more tokens have all of their logits."""
        self.model, self.is_shared = model, is_shared
        self._limit, self._expected = limit, expected
        self._captured: dict[Hashable, Captured] = {}
        self._is_capturable = is_shared and is_capturable(model)
        self._compiles = compiles
        self.likeliest: Callable[[], list[int]] | None = None
        """The tokens that the last step finds likeliest, -1 where its logits are no numbers; None where it has not
        looked for them."""

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def read(self, prompt: list[int]) -> tuple[torch.Tensor, Any]:
        """The logits after the prompt [1, V], and its cache."""
        cache = new_cache(self.model.config, is_shared=self.is_shared)
        tokens = torch.tensor([prompt], device=self.device)
        return self._logits(tokens, torch.ones_like(tokens), 0, cache, self._last)[:, -1], cache

    def read_all(self, prompts: Sequence[list[int]]) -> tuple[torch.Tensor, Any]:
        """The same of several prompts at once, which end at the same column: [B, V]."""
        longest = max(map(len, prompts))
        lengths_b1 = torch.tensor([len(prompt) for prompt in prompts], device=self.device)[:, None]
        tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=self.device)
        places_bl = torch.arange(longest, device=self.device)[None] - (longest - lengths_b1)
        cache = new_cache(self.model.config, is_shared=True)
        options = dict(self._last)
        if self._takes_positions:
            options["position_ids"] = places_bl.clamp(min=0)
        mask = (places_bl >= 0).long()
        out = self.model(input_ids=tokens, attention_mask=mask, past_key_values=cache, use_cache=True, **options)
        return out.logits[:, -1], cache

    def go_on(self, cache: Any, last: list[int], lengths: list[int], adapter: Hashable = None) -> torch.Tensor:
        """The logits after one more token for each row [B, V]; the cache has it then."""
        return self.go_on_with(cache, [[token] for token in last], lengths, adapter)[:, -1]

    def go_on_with(
        self,
        cache: Any,
        tokens: Sequence[list[int]],
        lengths: list[int],
        adapter: Hashable = None,
        *,
        runs_ahead: bool = False,
    ) -> torch.Tensor:
        """The logits after each of several more tokens [B, W, V]. Rows with fewer are filled up behind them: what the
        cache has of that, the caller cuts off. `adapter` tells the modules that are on the model from others that may
        be put there. `runs_ahead`: the likeliest tokens will very likely be given next, and no others."""
        width, self.likeliest = max(map(len, tokens)), None
        if width == 1 and self._is_capturable:
            captured = self._captured_for(adapter)
            last = [row[0] for row in tokens]
            if (logits_bv := captured.go_on(cache, last, lengths, runs_ahead=runs_ahead)) is not None:
                self.likeliest = captured.likeliest
                return logits_bv[:, None]
        filled = torch.tensor([[*row, *row[-1:] * (width - len(row))] for row in tokens], device=self.device)
        lengths_b1 = torch.tensor(lengths, device=self.device)[:, None]
        longest = max(lengths)
        mask = (torch.arange(longest + width, device=self.device)[None] >= longest - lengths_b1).long()
        return self._logits(filled, mask, lengths_b1, cache, {})

    @torch.inference_mode()
    def warm_up(self, adapter: Hashable = None, most: int = FUSED_ROWS + 1) -> None:
        """Steps of one row and of several, but no more than `most`, are compiled now, and not while somebody waits for
        an answer."""
        if self._is_capturable and self._compiles:
            for count in sorted({min(count, most) for count in (1, FUSED_ROWS + 1)}):
                _, cache = self.read_all([[0]] * count)
                self.go_on(cache, [0] * count, [1] * count, adapter)

    def release(self) -> None:
        """Free captured steps and their buffers now; others want the memory."""
        for captured in self._captured.values():
            captured.release()
        self._captured.clear()

    def _captured_for(self, adapter: Hashable) -> Captured:
        captured = self._captured.pop(adapter, None) or self._new_captured()
        self._captured[adapter] = captured  # the last used one last
        if len(self._captured) > ADAPTERS:
            del self._captured[next(iter(self._captured))]
        others = sum(one.bytes for one in self._captured.values() if one is not captured)
        captured.limit = None if self._limit is None else self._limit - others
        return captured

    def _new_captured(self) -> Captured:
        if not self._compiles or not CompiledLayers.suits(self.model):
            return Captured(self._step, None, self._expected)
        return Captured(self._step, CompiledLayers(self.model), self._expected, fused(self.model))

    def _step(self, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        return self._logits(tokens, mask, positions, cache, self._last)[:, -1]

    def _logits(self, tokens: torch.Tensor, mask: torch.Tensor, start: Any, cache: Any, options: dict) -> torch.Tensor:
        options = dict(options)
        if self._takes_positions:
            options["position_ids"] = start + torch.arange(tokens.shape[1], device=tokens.device)[None]
        out = self.model(input_ids=tokens, attention_mask=mask, past_key_values=cache, use_cache=True, **options)
        return out.logits


@dataclass(frozen=True)
class Tried:
    is_shared: bool
    """Requests may be decoded together."""
    why_not: str
    bytes_per_token: int
    is_wide: bool = False
    """Several more tokens at once give what they give one after the other, as speculative decoding needs."""


@torch.no_grad()
def try_out(model: nn.Module) -> Tried:
    """Whether the model, decoded from a cache, alone and with others of other lengths, does what it does without one;
    it has the attention for decoding from then on. UserError where it does not even alone."""
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        raise UserError(f"{type(model).__name__} is not called with a key-value cache, so it cannot be served here.")
    size = min(model.config.get_text_config().vocab_size, 500)
    prompts = [[(7 * place + 3 * number) % size for place in range(length)] for number, length in enumerate((5, 11))]
    expected = [_without_cache(model, prompt) for prompt in prompts]
    use_decoding_attention(model, own_attention(model))
    shareable = is_shareable(model.config)
    problem = "its layers keep states of other kinds than keys and values"
    for is_shared in (True, False) if shareable else (False,):
        try:
            found, amount = _with_cache(model, prompts, is_shared=is_shared)
            worst = max(_difference(a, b) for a, b in zip(found, expected, strict=True))
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, NotImplementedError) as error:
            worst, amount, why = float("inf"), 0, first_line(error)
        else:
            why = f"its logits differ by {worst:.2g} then"
        if worst <= _bound(model):
            is_wide = is_shared and _is_wide(model, prompts, expected)
            return Tried(is_shared, "" if is_shared else problem, amount, is_wide)
        problem = why
    raise UserError(f"{type(model).__name__} does not give with a key-value cache what it gives without ({problem}).")


def _without_cache(model: nn.Module, prompt: list[int]) -> torch.Tensor:
    tokens = torch.tensor([prompt], device=next(model.parameters()).device)
    return model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits[0, -1].float()


def _with_cache(
    model: nn.Module, prompts: list[list[int]], *, is_shared: bool
) -> tuple[list[torch.Tensor], int]:  # fmt: skip
    """The same logits, the last two tokens of each prompt by the cache; and the cache's bytes for each token."""
    call = Call(model, is_shared=is_shared)
    begun = [(prompt, call.read(prompt[:-2])[1]) for prompt in prompts]
    lengths = [len(prompt) - 2 for prompt in prompts]
    amount = sum(bytes_of(cache) for _, cache in begun) // sum(lengths) if is_shared else 0
    if not is_shared:
        found = []
        for prompt, cache in begun:
            call.go_on(cache, [prompt[-2]], [len(prompt) - 2])
            found.append(call.go_on(cache, [prompt[-1]], [len(prompt) - 1])[0].float())
        return found, 0
    cache = regroup([Row(cache, 0, length) for (_, cache), length in zip(begun, lengths, strict=True)])
    call.go_on(cache, [prompt[-2] for prompt in prompts], lengths)
    logits = call.go_on(cache, [prompt[-1] for prompt in prompts], [length + 1 for length in lengths])
    return [row.float() for row in logits], amount


def _is_wide(model: nn.Module, prompts: list[list[int]], expected: list[torch.Tensor]) -> bool:
    """The last three tokens of each prompt at once, and for the shorter one a filler that is cut off again."""
    call = Call(model, is_shared=True)
    begun = [(len(prompt) - 3, call.read(prompt[:-3])[1]) for prompt in prompts]
    cache = regroup([Row(one, 0, length) for length, one in begun])
    lengths = [length for length, _ in begun]
    try:
        first = call.go_on_with(cache, [prompts[0][-3:-1], prompts[1][-3:]], lengths)
        rows = [Row(cache, 0, lengths[0] + 2, beyond=1), Row(cache, 1, lengths[1] + 3)]
        again = call.go_on_with(regroup(rows[:1]), [prompts[0][-1:]], [lengths[0] + 2])
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, NotImplementedError):
        return False
    found = (again[0, -1].float(), first[1, -1].float())
    return max(_difference(a, b) for a, b in zip(found, expected, strict=True)) <= _bound(model)


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to how far logits lie apart."""
    worst = (found - expected).abs().max() / expected.std().clamp(min=1e-6)
    return float(worst) if torch.isfinite(worst) else float("inf")


def _bound(model: nn.Module) -> float:
    return 1e-3 if next(model.parameters()).dtype == torch.float32 else 0.3
