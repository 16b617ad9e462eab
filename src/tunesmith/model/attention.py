"""Packed attention as a registered attention function: causal, and never across documents.

transformers hands every attention function the same arguments; the document boundaries travel as the keyword
arguments that its own variable-length attention uses (`cu_seq_lens_q`, `max_length_q`). On a GPU in half
precision this is flash-attn-4 where installed, else torch's variable-length kernel; elsewhere SDPA, one document at a
time.

Legend: T tokens, D head dim; queries have more heads than keys in grouped attention.
"""

from __future__ import annotations

import inspect
import itertools
from functools import cache, partial

import torch
import torch.nn.functional as F

from tunesmith.errors import UserError
from tunesmith.kernels import flash4
from tunesmith.plan.plan import Attention

NAME = "tunesmith_packed"
UPCAST_BELOW = 512
"""Shorter documents are computed in fp32 on a CPU, since SDPA's backward in bf16 is slow there: at 170 tokens and 9
heads 2.0 ms against 7.2 ms, forward and backward on two cores; at 512 tokens the two are even."""


def register(kernel: Attention | None = None) -> str:
    """Make packed attention known to transformers; returns the name to load models with.

    `kernel` is the one a plan names: no better one is taken then, and a simpler one only for inputs it cannot do.
    """
    from transformers import AttentionInterface

    if kernel == "flash-attn-4" and not flash4.is_available():
        raise UserError(
            "The plan's attention is flash-attn-4, which is not installed here or has no kernels for this GPU; install "
            "it, or make the plan anew by `tunesmith plan`."
        )
    AttentionInterface.register(NAME, packed_attention if kernel is None else partial(packed_attention, kernel=kernel))
    return NAME


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    s_aux: torch.Tensor | None = None,
    kernel: Attention | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """[1, heads, T, D] queries, keys and values to [1, T, heads, D]."""
    if cu_seq_lens_q is None or max_length_q is None or attention_mask is not None or s_aux is not None:
        raise NotPackable("this model does not pass document boundaries to its attention")
    assert query.shape[0] == 1, "packed documents lie end to end in one row"
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    window = sliding_window if sliding_window is not None and sliding_window < max_length_q else None
    if kernel in (None, "flash-attn-4") and _has_flash4(query, dropout):
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return flash4.flash4(q, k, v, cu_seq_lens_q, max_length_q, scale, window, softcap).unsqueeze(0), None
    if kernel != "sdpa" and _has_kernel(query, dropout, softcap):
        return _variable_length(query, key, value, cu_seq_lens_q, max_length_q, scale, window), None
    return _by_document(query, key, value, cu_seq_lens_q.tolist(), scale, window, softcap, dropout), None


class NotPackable(RuntimeError):
    """The model's attention needs something that packed attention does not have."""


def _has_flash4(query: torch.Tensor, dropout: float) -> bool:
    is_right = query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] in (64, 96, 128)
    return query.is_cuda and is_right and dropout == 0.0 and flash4.is_available()


def _has_kernel(query: torch.Tensor, dropout: float, softcap: float | None) -> bool:
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
        and dropout == 0.0
        and softcap is None
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _variable_length(query, key, value, boundaries, longest, scale, window) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    groups = query.shape[1] // key.shape[1]
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    options = {}
    if groups > 1:
        if "enable_gqa" in _variable_length_parameters():
            options["enable_gqa"] = True
        else:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    left = -1 if window is None else window - 1
    out = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        boundaries,
        boundaries,
        longest,
        longest,
        scale=scale,
        window_size=(left, 0),
        **options,
    )
    return out.unsqueeze(0)


@cache
def _variable_length_parameters() -> frozenset[str]:
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def _by_document(query, key, value, boundaries, scale, window, softcap, dropout) -> torch.Tensor:
    lengths = [end - start for start, end in itertools.pairwise(boundaries)]
    outputs = []
    # Split, not sliced: the gradient of a split is one concatenation, that of a slice a full-size tensor of zeros.
    for q, k, v in zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True):
        if softcap is not None:
            outputs.append(_soft_capped(q, k, v, scale, window, softcap, dropout))
            continue
        is_windowed = window is not None and q.shape[2] > window
        if q.device.type == "cpu" and q.shape[2] < UPCAST_BELOW:
            q, k, v = q.float(), k.float(), v.float()
        outputs.append(
            F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=_window_mask(q.shape[2], window, q.device) if is_windowed else None,
                dropout_p=dropout,
                is_causal=not is_windowed,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            ).to(query.dtype)
        )
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _soft_capped(q, k, v, scale, window, softcap, dropout) -> torch.Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = softcap * torch.tanh((q @ k.transpose(2, 3)) * (scale / softcap))
    mask = _window_mask(q.shape[2], window, q.device)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.float32).to(q.dtype)
    return F.dropout(weights, dropout) @ v


def _window_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None]
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)
