"""Packed attention as a registered attention function: causal, and never across documents.

transformers hands every attention function the same arguments; the document boundaries travel as the keyword
arguments that its own variable-length attention uses (`cu_seq_lens_q`, `max_length_q`). Which kernel does a layer is
said in `plan.attention`: on a GPU flash-attn-4 where it is installed and has what the layer asks for, torch's
variable-length kernel, FlexAttention for what neither has (soft-capped scores, sinks, ALiBi, values of another size),
and on older GPUs and in fp32 torch's memory-efficient kernel, which a plan calls "sdpa". On a CPU, and for what no
kernel has, it is one document at a time.

Legend: T tokens, D head dim; queries have more heads than keys in grouped attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from tunesmith.errors import UserError, first_line
from tunesmith.kernels import efficient, flash4, flex
from tunesmith.model.structure import kind_of_layer
from tunesmith.plan.attention import Capability, Heads, Path, path_of
from tunesmith.plan.plan import Attention

NAME = "tunesmith_packed"
UPCAST_BELOW = 512
"""Shorter documents are computed in fp32 on a CPU, since SDPA's backward in bf16 is slow there: at 170 tokens and 9
heads 2.0 ms against 7.2 ms, forward and backward on two cores; at 512 tokens the two are even."""
HAS_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""torch's variable-length attention knows of fewer key heads than query heads."""


def register(kernel: Attention | None = None) -> str:
    """Make packed attention known to transformers; returns the name to load models with.

    `kernel` is the one a plan names: no better one is taken then, and another only for layers it cannot do.
    """
    from transformers import AttentionInterface

    if kernel == "flash-attn-4" and not flash4.is_available():
        raise UserError(
            "The plan's attention is flash-attn-4, which is not installed here or has no kernels for this GPU; install "
            "it, or make the plan anew by `tunesmith plan`."
        )
    AttentionInterface.register(NAME, partial(packed_attention, **settled(kernel)))
    return NAME


def settled(kernel: Attention | None = None) -> dict[str, object]:
    """The options of `packed_attention` that are the same for all calls. Looking for packages and devices would break a
    compiled layer into pieces."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    kernel = kernel or ("flash-attn-4" if flash4.is_available() else "varlen")
    return {"kernel": kernel, "capability": capability}


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
    alibi_slopes: torch.Tensor | None = None,
    key_places: torch.Tensor | None = None,
    kernel: Attention = "varlen",
    capability: Capability = (0, 0),
    **_: object,
) -> tuple[torch.Tensor, None]:
    """[1, heads, T, D] queries, keys and values to [1, T, heads, D].

    Where there are more keys than queries, each document has the last of its queries only, or none. `key_places` (int64
    [S]) says which tokens' keys and values these are: documents then see the beginnings that they share with others,
    which the row has once (tree attention). `s_aux` are attention sinks, and `alibi_slopes` what a head adds to a score
    for each token of distance.
    """
    if cu_seq_lens_q is None or max_length_q is None or attention_mask is not None:
        raise NotPackable("this model does not pass document boundaries to its attention")
    assert query.shape[0] == 1, "packed documents lie end to end in one row"
    if key_places is not None:
        key, value = (one.index_select(2, key_places) for one in (key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    bounds, longest, is_cut = (cu_seq_lens_q, cu_seq_lens_q), (max_length_q, max_length_q), False
    if key.shape[2] != query.shape[2]:  # by a branch, since to the compiler a comparison is no constant
        assert cu_seq_lens_k is not None
        assert max_length_k is not None
        bounds, longest, is_cut = (cu_seq_lens_q, cu_seq_lens_k), (max_length_q, max_length_k), True
    window, chunk = _reach(module, sliding_window, longest[1])
    asked = (softcap is not None, s_aux is not None, alibi_slopes is not None, dropout > 0.0)
    sizes = (query.shape[-1], value.shape[-1], *asked, query.dtype.itemsize, is_cut and window is not None)
    path = _path(kernel, capability, query.is_cuda, sizes)
    if _watched is not None:
        shape = (query.shape[1], key.shape[1], *sizes[:2])
        _watched[AttentionCall(path, query.dtype, shape, window, softcap, *asked[1:3])] = None
    extras = {"softcap": softcap, "sinks": s_aux, "slopes": alibi_slopes}
    if path == "flex-attention":
        q, k, v = (tensor.squeeze(0) for tensor in (query, key, value))
        out = flex.flex(q, k, v, *bounds, scale, window, chunk=chunk, **extras)
        return out.transpose(0, 1).unsqueeze(0).contiguous(), None
    if chunk is not None:
        if is_cut:
            raise NotPackable("attention in chunks is not cut over several ranks")
        bounds, longest = (cut_at_chunks(bounds[0], chunk, query.shape[2]),) * 2, (chunk, chunk)
    if path == "by document":
        return _by_document(query, key, value, bounds, scale, window, dropout, **extras), None
    if path == "varlen":
        return _variable_length(query, key, value, bounds, longest, scale, window), None
    # Squeezed, not indexed: the gradient of an index is a full-size copy.
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    if path == "flash-attn-4":
        return flash4.flash4(q, k, v, *bounds, *longest, scale, window, softcap, s_aux).unsqueeze(0), None
    return efficient.efficient(q, k, v, *bounds, longest[0], scale, window).unsqueeze(0), None


class AttentionCall(NamedTuple):
    """What a layer has asked of a path."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Heads of queries and of keys, head dim, value dim."""
    window: int | None
    softcap: float | None
    has_sinks: bool
    has_alibi: bool

    @property
    def is_usual(self) -> bool:
        """As the kernels have been used from the beginning."""
        has_less = self.softcap is None and not self.has_sinks and not self.has_alibi
        is_narrow = self.shape[2] == self.shape[3] <= 128
        return self.path in ("by document", "memory-efficient") or (
            has_less and self.path != "flex-attention" and (is_narrow or self.path == "varlen")
        )


_watched: dict[AttentionCall, None] | None = None


@contextmanager
def watched() -> Iterator[dict[AttentionCall, None]]:
    """While this lasts, what layers ask for is noted."""
    global _watched
    _watched = {}
    try:
        yield _watched
    finally:
        _watched = None


LENGTHS = (150, 1, 40, 65)
"""Of documents on which a kernel is tried."""


def fault_of(asked: AttentionCall, device: torch.device) -> str | None:
    """What is wrong with a kernel, forward or backward, on random heads of this kind; None where nothing is."""
    heads, kv_heads, head_dim, value_dim = asked.shape
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(asked.dtype)

    tokens = sum(LENGTHS)
    given = [
        draw(1, heads, tokens, head_dim),
        draw(1, kv_heads, tokens, head_dim),
        draw(1, kv_heads, tokens, value_dim),
    ]
    given += [draw(heads)] if asked.has_sinks else []
    slopes = torch.rand(heads, generator=generator, device=device) if asked.has_alibi else None
    direction = draw(1, tokens, heads, value_dim)
    bounds = torch.tensor([0, *LENGTHS], device=device).cumsum(0).int()

    def computed(tensors: list[torch.Tensor], *, in_full: bool) -> list[torch.Tensor]:
        tensors = [tensor.requires_grad_() for tensor in tensors]
        q, k, v, *sinks = tensors
        s_aux = sinks[0] if sinks else None
        window = None if asked.window is None else min(asked.window, LENGTHS[-1])
        if in_full:
            extras = {"softcap": asked.softcap, "sinks": s_aux, "slopes": slopes}
            out = _by_document(q, k, v, (bounds, bounds), head_dim**-0.5, window, 0.0, **extras)
        else:
            options = settled("flex-attention" if asked.path == "flex-attention" else None)
            options |= {"softcap": asked.softcap, "s_aux": s_aux, "alibi_slopes": slopes, "sliding_window": window}
            longest = {"cu_seq_lens_q": bounds, "max_length_q": max(LENGTHS)}
            out = packed_attention(torch.nn.Module(), q, k, v, None, **longest, **options)[0]
        return [out, *torch.autograd.grad(out, tensors, direction.to(out.dtype))]

    try:
        with torch.enable_grad():
            found = computed([tensor.clone() for tensor in given], in_full=False)
    except Exception as error:  # a compiler's, a driver's, or that of a kernel's own checks
        return first_line(error)[:160]
    with torch.enable_grad():
        expected = computed([tensor.float() for tensor in given], in_full=True)
    for mine, plain in zip(found, expected, strict=True):
        worst = ((mine.float() - plain).abs().max() / plain.abs().max()).item()
        if not worst <= 0.05:
            return f"it is off by {worst:.2g}"
    return None


class NotPackable(RuntimeError):
    """The model's attention needs something that packed attention does not have."""


@torch.compiler.assume_constant_result
def _path(kernel: Attention, capability: Capability, is_cuda: bool, sizes: tuple) -> Path:
    return path_of(kernel, capability, Heads(*sizes)) if is_cuda else "by document"


def _reach(module: torch.nn.Module, window: int | None, longest: int) -> tuple[int | None, int | None]:
    """How many tokens a query of this layer looks back, and in chunks of how many; None where that is no limit. Some
    models say it to their masks alone, by the kinds of layers in their configs."""
    kind, config, chunk = kind_of_layer(module), getattr(module, "config", None), None
    if kind == "chunked_attention":
        chunk = getattr(config, "attention_chunk_size", None)
    elif kind == "sliding_attention" and window is None:
        window = getattr(config, "sliding_window", None)
    window, chunk = (one if one is not None and one < longest else None for one in (window, chunk))
    return window, chunk


def cut_at_chunks(bounds: torch.Tensor, chunk: int, tokens: int) -> torch.Tensor:
    """Boundaries of the documents' chunks, followed by empty ones: as many as there may be, so that their number does
    not depend on the lengths."""
    place = torch.arange(tokens, dtype=bounds.dtype, device=bounds.device)
    starts = bounds[torch.searchsorted(bounds, place, right=True) - 1]
    is_start = (place - starts) % chunk == 0
    most = bounds.shape[0] + tokens // chunk + 1
    slot = torch.where(is_start, is_start.cumsum(0) - 1, most)  # all others into one that is dropped
    return bounds.new_full((most + 1,), tokens).scatter(0, slot, place)[:most]


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
def _by_document(
    query, key, value, bounds, scale, window, dropout, *, softcap=None, sinks=None, slopes=None
) -> torch.Tensor:
    """Always as it is: compiled, it would be unrolled over the documents, and again for all other lengths."""
    q_lengths, k_lengths = (one.diff().tolist() for one in bounds)
    is_usual = softcap is None and sinks is None and slopes is None
    outputs = []
    # Split, not sliced: the gradient of a split is one concatenation, that of a slice a full-size tensor of zeros.
    parts = [query.split(q_lengths, dim=2), *(tensor.split(k_lengths, dim=2) for tensor in (key, value))]
    for q, k, v in zip(*parts, strict=True):
        length = q.shape[2]
        if length == 0:
            continue
        if not is_usual:
            outputs.append(_in_full(q, k, v, scale, window, dropout, softcap, sinks, slopes))
            continue
        beyond = k.shape[2] - q.shape[2]
        is_windowed = window is not None and k.shape[2] > window
        if 0 < beyond <= q.shape[2] and not is_windowed:  # queries that are missing cost less than a mask of all pairs
            q = F.pad(q, (0, 0, beyond, 0))
        is_masked = q.shape[2] != k.shape[2] or is_windowed
        if q.device.type == "cpu" and q.shape[2] < UPCAST_BELOW:
            q, k, v = q.float(), k.float(), v.float()
        outputs.append(
            F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=_distance(q, k, window)[1] if is_masked else None,
                dropout_p=dropout,
                is_causal=not is_masked,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )[:, :, q.shape[2] - length :].to(query.dtype)
        )
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()  # some models view it; others would copy it then


def _in_full(q, k, v, scale, window, dropout, softcap, sinks, slopes) -> torch.Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.transpose(2, 3)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance, is_seen = _distance(q, k, window)
    if slopes is not None:
        scores = scores - slopes[:, None, None].to(scores.dtype) * distance
    scores = scores.masked_fill(~is_seen, float("-inf"))
    if sinks is not None:
        extra = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, extra], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)[..., : k.shape[2]]
    return F.dropout(weights, dropout) @ v


def _distance(q: torch.Tensor, k: torch.Tensor, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """How far behind each query a key lies, and whether the query sees it: the last query stands at the last key."""
    position = torch.arange(k.shape[2], device=q.device)
    distance = position[k.shape[2] - q.shape[2] :, None] - position[None]
    mask = distance >= 0
    return distance, mask if window is None else mask & (distance < window)
