"""Embeddings of texts by a model that generates: the mean over a text's tokens of the final hidden state (what the
output head is given), scaled to length 1."""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch import nn

from tunesmith.errors import UserError


def embed(model: nn.Module, tokens: list[int]) -> list[float]:
    """The vector of one text, which is read alone, without padding."""
    inner: Any = getattr(model, "base_model", model)
    if inner is model:
        raise UserError(f"{type(model).__name__} does not tell its final hidden state, so it gives no embeddings.")
    ids = torch.tensor([tokens], device=next(model.parameters()).device)
    out = inner(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    states_1td = getattr(out, "last_hidden_state", None)
    if states_1td is None:
        raise UserError(f"{type(model).__name__} does not tell its final hidden state, so it gives no embeddings.")
    return nn.functional.normalize(states_1td[0].float().mean(0), dim=0).tolist()


def written(vector: list[float], form: str) -> list[float] | str:
    """A vector as a list, or as OpenAI's client asks for it: the bytes of little-endian fp32 in base64."""
    if form != "base64":
        return vector
    return base64.b64encode(torch.tensor(vector).numpy().astype("<f4").tobytes()).decode("ascii")
