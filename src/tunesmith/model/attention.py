"""Packed attention as a registered attention function: causal, and never across documents.

transformers hands every attention function the same arguments; the document boundaries travel as the keyword
arguments that its own variable-length attention uses (`cu_seq_lens_q`, `max_length_q`). On a GPU in half
precision this is flash-attn-4 where installed, else torch's variable-length kernel; on older GPUs and in fp32 torch's
memory-efficient one, which a plan calls "sdpa". On a CPU, and for what those kernels do not have, it is SDPA, one
document at a time.

Legend: T tokens, D head dim; queries have more heads than keys in grouped attention.
"""

from __future__ import annotations

import inspect
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from tunesmith.errors import UserError
from tunesmith.kernels import efficient, flash4
from tunesmith.plan.plan import Attention

NAME = "tunesmith_packed"
UPCAST_BELOW = 512
"""Shorter documents are computed in fp32 on a CPU, since SDPA's backward in bf16 is slow there: at 170 tokens and 9
heads 2.0 ms against 7.2 ms, forward and backward on two cores; at 512 tokens the two are even."""
HAS_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""torch's variable-length attention knows of fewer key heads than query heads."""


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
    # Settled here: looking for packages and devices would break a compiled layer into pieces.
    kernel = kernel or ("flash-attn-4" if flash4.is_available() else "varlen")
    if kernel == "varlen" and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        kernel = "sdpa"
    AttentionInterface.register(NAME, partial(packed_attention, kernel=kernel))
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
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    s_aux: torch.Tensor | None = None,
    kernel: Attention = "varlen",
    **_: object,
) -> tuple[torch.Tensor, None]:
    """[1, heads, T, D] queries, keys and values to [1, T, heads, D].

    Where there are more keys than queries, each document has the last of its queries only, or none.
    """
    if cu_seq_lens_q is None or max_length_q is None or attention_mask is not None or s_aux is not None:
        raise NotPackable("this model does not pass document boundaries to its attention")
    assert query.shape[0] == 1, "packed documents lie end to end in one row"
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    bounds, longest = (cu_seq_lens_q, cu_seq_lens_q), (max_length_q, max_length_q)
    if key.shape[2] != query.shape[2]:
        assert cu_seq_lens_k is not None
        assert max_length_k is not None
        bounds, longest = (cu_seq_lens_q, cu_seq_lens_k), (max_length_q, max_length_k)
    window = sliding_window if sliding_window is not None and sliding_window < longest[1] else None
    if kernel == "flash-attn-4" and _has_flash4(query, dropout):
        # Squeezed, not indexed: the gradient of an index is a full-size copy.
        q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
        return flash4.flash4(q, k, v, *bounds, *longest, scale, window, softcap).unsqueeze(0), None
    if kernel != "sdpa" and _has_kernel(query, dropout, softcap):
        return _variable_length(query, key, value, bounds, longest, scale, window), None
    # Of a window over more keys than queries torch's kernel makes wrong gradients (2.11, on an H200).
    is_usual = dropout == 0.0 and softcap is None and (window is None or key.shape[2] == query.shape[2])
    if is_usual and efficient.can(query, value):
        q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
        return efficient.efficient(q, k, v, *bounds, longest[0], scale, window).unsqueeze(0), None
    return _by_document(query, key, value, bounds, scale, window, softcap, dropout), None


class NotPackable(RuntimeError):
    """The model's attention needs something that packed attention does not have."""


def _has_flash4(query: torch.Tensor, dropout: float) -> bool:
    is_right = query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] in (64, 96, 128)
    return query.is_cuda and is_right and dropout == 0.0


def _has_kernel(query: torch.Tensor, dropout: float, softcap: float | None) -> bool:
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
        and dropout == 0.0
        and softcap is None
    )


def _variable_length(query, key, value, bounds, longest, scale, window) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    options = {}
    if groups > 1:
        if HAS_GROUPS:
            options["enable_gqa"] = True
        else:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    left = -1 if window is None else window - 1
    out = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        *bounds,
        *longest,
        scale=scale,
        window_size=(left, 0),
        **options,
    )
    return out.unsqueeze(0)


@torch.compiler.disable(reason="it goes over the documents, whose lengths change")
def _by_document(query, key, value, bounds, scale, window, softcap, dropout) -> torch.Tensor:
    """Always as it is: compiled, it would be unrolled over the documents, and again for all other lengths."""
    q_lengths, k_lengths = (one.diff().tolist() for one in bounds)
    outputs = []
    # Split, not sliced: the gradient of a split is one concatenation, that of a slice a full-size tensor of zeros.
    parts = [query.split(q_lengths, dim=2), *(tensor.split(k_lengths, dim=2) for tensor in (key, value))]
    for q, k, v in zip(*parts, strict=True):
        if q.shape[2] == 0:
            continue
        if softcap is not None:
            outputs.append(_soft_capped(q, k, v, scale, window, softcap, dropout))
            continue
        is_masked = q.shape[2] != k.shape[2] or (window is not None and q.shape[2] > window)
        if q.device.type == "cpu" and q.shape[2] < UPCAST_BELOW:
            q, k, v = q.float(), k.float(), v.float()
        outputs.append(
            F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=_mask(q, k, window) if is_masked else None,
                dropout_p=dropout,
                is_causal=not is_masked,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            ).to(query.dtype)
        )
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()  # some models view it; others would copy it then


def _soft_capped(q, k, v, scale, window, softcap, dropout) -> torch.Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = softcap * torch.tanh((q @ k.transpose(2, 3)) * (scale / softcap))
    mask = _mask(q, k, window)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.float32).to(q.dtype)
    return F.dropout(weights, dropout) @ v


def _mask(q: torch.Tensor, k: torch.Tensor, window: int | None) -> torch.Tensor:
    """Which keys a query sees: the last query stands at the last key."""
    position = torch.arange(k.shape[2], device=q.device)
    distance = position[k.shape[2] - q.shape[2] :, None] - position[None]
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)
