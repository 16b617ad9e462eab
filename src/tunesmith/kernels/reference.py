"""The plain truth each kernel is held against: short, slow, obviously right.

Legend: N rows, T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def linear_cross_entropy(
    hidden_th: torch.Tensor,
    weight_vh: torch.Tensor,
    labels_n: torch.Tensor,
    weights_n: torch.Tensor,
    rows_n: torch.Tensor,
    *,
    bias_v: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of weighted cross-entropies of the rows named, and the loss of each, from the full logits matrix."""
    logits = F.linear(hidden_th, weight_vh, bias_v) * scale
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    losses = F.cross_entropy(logits[rows_n], labels_n, reduction="none")
    penalties = z_loss * logits[rows_n].logsumexp(-1).square()
    return ((losses + penalties) * weights_n).sum(), losses.detach()


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: list[int],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention inside each document, by an explicit mask over all tokens. [T, heads, D] in and out."""
    tokens = query.shape[0]
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    document = torch.zeros(tokens, dtype=torch.long)
    for start in boundaries[1:-1]:
        document[start:] += 1
    position = torch.arange(tokens)
    allowed = (document[:, None] == document[None]) & (position[:, None] >= position[None])
    if chunk is not None:
        number = (position - torch.tensor(boundaries)[document]) // chunk
        allowed &= number[:, None] == number[None]
    if window is not None:
        allowed &= position[:, None] - position[None] < window
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores + slopes[:, None, None] * (position[None] - position[:, None]).to(scores.device)
    scores = scores.masked_fill(~allowed.to(scores.device), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, tokens, 1)], dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :tokens], value)


def silu_gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def swiglu(
    y_t2i: torch.Tensor,
    low_t2r: torch.Tensor,
    b_gate_ir: torch.Tensor,
    b_up_ir: torch.Tensor,
    act: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = silu_gated,
) -> torch.Tensor:
    """The gated activation, where gate and up lie side by side and each gets its low-rank part first."""
    intermediate, rank = b_gate_ir.shape
    gate = y_t2i[:, :intermediate] + low_t2r[:, :rank] @ b_gate_ir.t()
    up = y_t2i[:, intermediate:] + low_t2r[:, rank:] @ b_up_ir.t()
    return act(gate, up)


def gated_matmul(
    gate_ti: torch.Tensor,
    up_ti: torch.Tensor,
    weight_ni: torch.Tensor,
    act: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = silu_gated,
) -> torch.Tensor:
    return act(gate_ti, up_ti) @ weight_ni.t()


def rotate(x_thd: torch.Tensor, cos_td: torch.Tensor, sin_td: torch.Tensor) -> torch.Tensor:
    """Rotary positions, the first half of a head against the second."""
    first, second = x_thd.chunk(2, -1)
    return x_thd * cos_td[:, None] + torch.cat([-second, first], -1) * sin_td[:, None]
