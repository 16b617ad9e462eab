"""flash-attn-4 for packed documents, as operators that sit inside compiled layers without a break.

Ours is only the wrapping: forward and backward as custom operators with shapes known to the compiler. Documents may
change their lengths from call to call without anything being compiled again.

Legend: T tokens, S tokens with keys, H query heads, G key heads, D head dim, V value dim.
"""

from __future__ import annotations

import importlib.metadata
import os
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch

from tunesmith.cache import folder_to_fill
from tunesmith.kernels.operator import operator


@cache
def is_available() -> bool:
    """Installed, and the GPU is one it has kernels for: on compute capability 8.x it has no backward pass."""
    try:
        found = find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:
        found = False
    return found and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def version() -> str | None:
    """Of the package, where it can be used."""
    try:
        return importlib.metadata.version("flash-attn-4") if is_available() else None
    except importlib.metadata.PackageNotFoundError:  # its files alone
        return "unknown"


def flash4(
    q_thd: torch.Tensor,
    k_sgd: torch.Tensor,
    v_sgv: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    longest_q: int,
    longest_k: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention inside each document, whose queries and keys end together. `window` counts the token itself;
    the longest may be upper bounds. `sinks` [H] are scores of nothing, in the softmax's sum alone."""
    sizes = (longest_q, longest_k, scale, window or 0, softcap or 0.0)
    return _forward(q_thd, k_sgd, v_sgv, queries, None if keys is queries else keys, sinks, *sizes)[0]


def keep_compiled() -> None:
    """Have what it compiles kept for the next run; it looks at this when it is imported."""
    if "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED" not in os.environ and (folder := folder_to_fill("attention")):
        os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1"
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))


@cache
def functions() -> tuple[Callable, Callable]:
    """Its forward and backward pass; importing them takes seconds."""
    keep_compiled()
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd  # pyright: ignore[reportMissingImports]

    warnings.filterwarnings("ignore", message=".*aux_data.*")  # when it compiles a kernel; harmless
    return _flash_attn_fwd, _flash_attn_bwd


def _options(
    queries: torch.Tensor,
    keys: torch.Tensor | None,
    sinks: torch.Tensor | None,
    longest_q: int,
    longest_k: int,
    scale: float,
    window: int,
    softcap: float,
) -> dict:
    options = {
        "cu_seqlens_q": queries,
        "cu_seqlens_k": queries if keys is None else keys,
        "max_seqlen_q": longest_q,
        "max_seqlen_k": longest_k,
        "softmax_scale": scale,
        "causal": window == 0,
    }
    if window:
        options |= {"window_size_left": window - 1, "window_size_right": 0}
    if softcap:
        options["softcap"] = softcap
    if sinks is not None:
        options["learnable_sink"] = sinks.detach().contiguous()
    return options


@operator("flash4")
def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor | None,
    sinks: torch.Tensor | None,
    longest_q: int,
    longest_k: int,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    options = _options(queries, keys, sinks, longest_q, longest_k, scale, window, softcap)
    out, lse, *_ = functions()[0](q, k, v, return_lse=True, **options)
    return out.contiguous(), lse.contiguous()


@torch.library.register_fake(_forward)
def _(q, k, v, queries, keys, sinks, longest_q, longest_k, scale, window, softcap):
    return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@operator("flash4_backward")
def _backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor | None,
    sinks: torch.Tensor | None,
    longest_q: int,
    longest_k: int,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    gradients = functions()[1](
        q,
        k,
        v,
        out,
        d_out.contiguous(),
        lse,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **_options(queries, keys, sinks, longest_q, longest_k, scale, window, softcap),
    )
    # It lays them out as q, k and v are, which is each model's own affair; compiled layers expect what is declared.
    d_q, d_k, d_v = (one.contiguous() for one in gradients[:3])
    return d_q, d_k, d_v, q.new_empty(0) if sinks is None else gradients[3]


@torch.library.register_fake(_backward)
def _(d_out, q, k, v, out, lse, queries, keys, sinks, *_):
    d_sinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_sinks


def _save(ctx, inputs, output) -> None:
    q, k, v, queries, keys, sinks, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, queries, keys, sinks)


def _gradients(ctx, d_out, _):
    saved = ctx.saved_tensors  # once: a checkpointed layer computes them when they are asked for
    *others, d_sinks = _backward(d_out, *saved, *ctx.options)
    return *others, None, None, None if saved[-1] is None else d_sinks, *[None] * len(ctx.options)


torch.library.register_autograd(_forward, _gradients, setup_context=_save)
