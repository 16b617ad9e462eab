"""flash-attn-4 for packed documents, as operators that sit inside compiled layers without a break.

Ours is only the wrapping: forward and backward as custom operators with shapes known to the compiler. Documents may
change their lengths from call to call without anything being compiled again.

Legend: T tokens, H query heads, G key heads, D head dim.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch


@cache
def is_available() -> bool:
    """Installed, and the GPU is one it has kernels for."""
    try:
        found = find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:
        found = False
    return found and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def flash4(
    q_thd: torch.Tensor,
    k_tgd: torch.Tensor,
    v_tgd: torch.Tensor,
    boundaries: torch.Tensor,
    longest: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Causal attention inside each document. `window` counts the token itself; `longest` may be an upper bound."""
    return _forward(q_thd, k_tgd, v_tgd, boundaries, longest, scale, window or 0, softcap or 0.0)[0]


def _functions() -> tuple[Callable, Callable]:
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    return _flash_attn_fwd, _flash_attn_bwd


def _options(boundaries: torch.Tensor, longest: int, scale: float, window: int, softcap: float) -> dict:
    options = {
        "cu_seqlens_q": boundaries,
        "cu_seqlens_k": boundaries,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "softmax_scale": scale,
        "causal": window == 0,
    }
    if window:
        options |= {"window_size_left": window - 1, "window_size_right": 0}
    if softcap:
        options["softcap"] = softcap
    return options


@torch.library.custom_op("tunesmith::flash4", mutates_args=())
def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    boundaries: torch.Tensor,
    longest: int,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about `aux_data`, at the first call; harmless
        out, lse, *_ = _functions()[0](
            q, k, v, return_lse=True, **_options(boundaries, longest, scale, window, softcap)
        )
    return out, lse


@_forward.register_fake
def _(q, k, v, boundaries, longest, scale, window, softcap):
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@torch.library.custom_op("tunesmith::flash4_backward", mutates_args=())
def _backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    boundaries: torch.Tensor,
    longest: int,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    d_q, d_k, d_v, *_ = _functions()[1](
        q,
        k,
        v,
        out,
        d_out.contiguous(),
        lse,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **_options(boundaries, longest, scale, window, softcap),
    )
    return d_q, d_k, d_v


@_backward.register_fake
def _(d_out, q, k, v, out, lse, boundaries, longest, scale, window, softcap):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output):
    q, k, v, boundaries, ctx.longest, ctx.scale, ctx.window, ctx.softcap = inputs
    ctx.save_for_backward(q, k, v, *output, boundaries)


def _gradients(ctx, d_out, _):
    q, k, v, out, lse, boundaries = ctx.saved_tensors
    options = (ctx.longest, ctx.scale, ctx.window, ctx.softcap)
    return *_backward(d_out, q, k, v, out, lse, boundaries, *options), None, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)
