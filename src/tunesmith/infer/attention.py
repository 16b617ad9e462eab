"""torch's attention as transformers calls it, but for one token of each row: the query heads that share a key head are
handed over as queries of that head, so that keys and values are read once and not copied for each of them.

Legend: B rows, H heads, G query heads of each key head, C columns, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tunesmith.model.structure import set_attention

NAME = "tunesmith_decode"


def use_decoding_attention(model: nn.Module, own: str) -> None:
    """Give the model, whose attention is `own`, the one for decoding where that is the same; else its own."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    if own in ("sdpa", NAME):
        AttentionInterface.register(NAME, decoding_attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        own = NAME
    if model.config._attn_implementation != own:
        set_attention(model, own)


def decoding_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Queries [B, H, 1, D], keys and values [B, H / G, C, D], a mask [B, 1, 1, C] -> [B, 1, H, D]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    batch, heads, count, size = query.shape
    has_other_mask = attention_mask is not None and attention_mask.shape[1] != 1
    is_other = any(kwargs.get(name) is not None for name in ("position_bias", "cache", "softcap"))
    if count > 1 or heads == key.shape[1] or dropout or has_other_mask or is_other:
        options = {"dropout": dropout, "scaling": scaling, **kwargs}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    grouped = query.reshape(batch, key.shape[1], -1, size)
    mask = attention_mask
    if mask is not None:
        mask = mask.expand(-1, -1, grouped.shape[2], -1)
    attended = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return attended.reshape(batch, 1, heads, value.shape[-1]), None
