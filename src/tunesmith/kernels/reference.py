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


def rotate(x_thd: torch.Tensor, cos_tr: torch.Tensor, sin_tr: torch.Tensor, pairs: int = 0) -> torch.Tensor:
    """Rotary positions of a head's first values, by `kernels.rotary.PAIRS`."""
    size = cos_tr.shape[1]
    turned, rest = x_thd[..., :size], x_thd[..., size:]
    if pairs == 0:
        first, second = turned.chunk(2, -1)
        against = torch.cat([-second, first], -1)
    else:
        against = torch.stack([-turned[..., 1::2], turned[..., 0::2]], -1).flatten(-2)
    if pairs == 2:
        cos_tr, sin_tr = (one[:, : size // 2].repeat_interleave(2, -1) for one in (cos_tr, sin_tr))
    return torch.cat([turned * cos_tr[:, None] + against * sin_tr[:, None], rest], -1)


def state_space(
    x_bc_td: torch.Tensor,
    weight_dk: torch.Tensor,
    bias_d: torch.Tensor | None,
    dt_th: torch.Tensor,
    a_h: torch.Tensor,
    d_h: torch.Tensor,
    document_t: torch.Tensor,
    groups: int,
    state: int,
) -> torch.Tensor:
    """Mamba-2's convolution, document by document, and its recurrence, token by token: [T, H * P]."""
    tokens, heads = dt_th.shape
    taps, lengths = weight_dk.shape[1], torch.unique_consecutive(document_t, return_counts=True)[1].tolist()
    parts = [F.pad(part, (0, 0, taps - 1, 0)).T[None] for part in x_bc_td.split(lengths)]
    parts = [F.conv1d(part, weight_dk[:, None], bias_d, groups=weight_dk.shape[0])[0].T for part in parts]
    x_bc_td = F.silu(torch.cat(parts))
    inner = x_bc_td.shape[1] - 2 * groups * state
    x, b, c = x_bc_td.split([inner, groups * state, groups * state], dim=1)
    x = x.view(tokens, heads, -1)
    b, c = (one.view(tokens, groups, state).repeat_interleave(heads // groups, 1) for one in (b, c))
    held, outputs = x.new_zeros(heads, inner // heads, state), []
    for at in range(tokens):
        if at and document_t[at] != document_t[at - 1]:
            held = torch.zeros_like(held)
        held = held * (dt_th[at] * a_h).exp()[:, None, None] + (dt_th[at, :, None] * x[at])[:, :, None] * b[at, :, None]
        outputs.append((held * c[at, :, None]).sum(-1) + d_h[:, None] * x[at])
    return torch.stack(outputs).flatten(1)
