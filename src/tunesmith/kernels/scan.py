"""The state space of Mamba-2 over packed documents: a scan in chunks, by matmuls, and the short convolution before it.

A head holds a state of N x P numbers, which decays by `exp(dt * a)` from token to token, takes `dt * x` in at places
that b names and is read at those that c names. Within a chunk of tokens that is a matmul with a triangle of decays,
much like attention; between chunks only the states are handed on (SSD, https://arxiv.org/abs/2405.21060). A document
begins with an empty state: what is of another document has a decay of 0, wherever the border lies.

For backward nothing is kept but what the scan was given: all else is computed again. Decays are in fp32 (their sums in
fp64 where all is fp32), matmuls in the precision of x. On a GPU the compiler makes the parts between the matmuls, and
states are handed on by a kernel of ours.

Legend: T tokens, C chunks, L tokens of a chunk, H heads, P head dim, G groups that share b and c, R heads of a group,
N state size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tunesmith.kernels.operator import operator

CHUNK = 128
"""Tokens. A chunk's triangles grow with it, states become fewer: as many bytes of both at the usual 128 x 64."""
SHORTEST = 16
"""What a tensor core takes."""
LEAST_COMPILED = 1024
"""Tokens for which the parts are compiled: fewer are a trial, which takes less time than compiling."""


def chunked_scan(
    x_bc_td: torch.Tensor,
    weight_dk: torch.Tensor,
    bias_d: torch.Tensor | None,
    dt_th: torch.Tensor,
    a_h: torch.Tensor,
    d_h: torch.Tensor,
    document_t: torch.Tensor,
    *,
    groups: int,
    state: int,
    chunk: int | None = None,
) -> torch.Tensor:
    """What the states give at each token: [T, H * P]. `x_bc_td` has x, b and c side by side, as they enter their short
    convolution and SiLU; `dt_th` and `a_h` (which is negative) are fp32; `d_h` is how much of x is added to the
    output."""
    chunk = chunk or min(CHUNK, max(SHORTEST, 1 << (x_bc_td.shape[0].bit_length() - 1)))
    return scan(x_bc_td, weight_dk, bias_d, dt_th, a_h, d_h, document_t, groups, state, chunk)


# Operators: a compiled layer does not look inside, so that it keeps nothing of it.


@operator("chunked_scan")
def scan(
    x_bc_td: torch.Tensor,
    weight_dk: torch.Tensor,
    bias_d: torch.Tensor | None,
    dt_th: torch.Tensor,
    a_h: torch.Tensor,
    d_h: torch.Tensor,
    document_t: torch.Tensor,
    groups: int,
    state: int,
    chunk: int,
) -> torch.Tensor:
    convolved = _part(_convolved, x_bc_td)(x_bc_td, weight_dk, bias_d, document_t)
    given = (convolved, dt_th, a_h, document_t, groups, state, chunk)
    states, decay_ch = _part(_local_states, x_bc_td)(*given)
    return _part(_outputs, x_bc_td)(hand_on(states, decay_ch), d_h, *given)


@torch.library.register_fake(scan)
def _(x_bc_td, weight_dk, bias_d, dt_th, a_h, d_h, document_t, groups, state, chunk):
    return x_bc_td.new_empty(x_bc_td.shape[0], x_bc_td.shape[1] - 2 * groups * state)


@operator("chunked_scan_backward")
def scan_backward(
    dy_td: torch.Tensor,
    x_bc_td: torch.Tensor,
    weight_dk: torch.Tensor,
    bias_d: torch.Tensor | None,
    dt_th: torch.Tensor,
    a_h: torch.Tensor,
    d_h: torch.Tensor,
    document_t: torch.Tensor,
    groups: int,
    state: int,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of `x_bc_td`, `weight_dk`, a bias, `dt_th`, `a_h` and `d_h`."""
    convolution = (x_bc_td, weight_dk, bias_d, document_t)
    convolved = _part(_convolved, x_bc_td)(*convolution)
    given = (convolved, dt_th, a_h, document_t, groups, state, chunk)
    states, decay_ch = _part(_local_states, x_bc_td)(*given)
    entering = hand_on(states, decay_ch)
    by_entering = _part(_gradient_of_entering, x_bc_td)(dy_td, *given)
    by_leaving = hand_on(by_entering, decay_ch, backward=True)
    by_convolved, *others = _part(_gradients, x_bc_td)(dy_td, entering, by_leaving, d_h, *given)
    return *_part(_convolution_gradients, x_bc_td)(by_convolved, *convolution), *others


@torch.library.register_fake(scan_backward)
def _(dy_td, x_bc_td, weight_dk, bias_d, dt_th, a_h, d_h, document_t, groups, state, chunk):
    bias = weight_dk[:, 0] if bias_d is None else bias_d
    return tuple(one.new_empty(one.shape) for one in (x_bc_td, weight_dk, bias, dt_th, a_h, d_h))


def _save(ctx, inputs, output):
    *tensors, ctx.groups, ctx.state, ctx.chunk = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, dy_td):
    dx_bc, dweight, dbias, *others = scan_backward(dy_td, *ctx.saved_tensors, ctx.groups, ctx.state, ctx.chunk)
    has_bias = ctx.saved_tensors[2] is not None
    return dx_bc, dweight, dbias if has_bias else None, *others, None, None, None, None


torch.library.register_autograd(scan, _backward, setup_context=_save)


def _part(function: Callable, given: torch.Tensor) -> Callable:
    return _compiled(function) if given.is_cuda and given.shape[0] >= LEAST_COMPILED else function


@cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, fullgraph=True)


# The parts


def _convolved(x_td, weight_dk, bias_d, document_t) -> torch.Tensor:
    """SiLU of each channel over the last K tokens of its document: [T, D]."""
    return F.silu(short_convolution(x_td, weight_dk, bias_d, document_t)).to(x_td.dtype)


def short_convolution(x_td, weight_dk, bias_d, document_t) -> torch.Tensor:
    """Each channel over the last K tokens of its document: fp32 [T, D]."""
    out_td = x_td.float() * weight_dk[:, -1].float()
    for back in range(1, weight_dk.shape[1]):
        out_td = out_td + _earlier(x_td, document_t, back) * weight_dk[:, -1 - back].float()
    return out_td if bias_d is None else out_td + bias_d.float()


def _earlier(x_td: torch.Tensor, document_t: torch.Tensor, back: int) -> torch.Tensor:
    """What stands so many tokens before each one, if that is of its document: fp32 [T, D]."""
    back = min(back, x_td.shape[0])
    is_same = F.pad(document_t[back:] == document_t[: document_t.shape[0] - back], (back, 0))
    shifted = F.pad(x_td[: x_td.shape[0] - back], (0, 0, back, 0))
    return torch.where(is_same[:, None], shifted.float(), 0.0)


def _convolution_gradients(dy_td, x_td, weight_dk, bias_d, document_t) -> tuple[torch.Tensor, ...]:
    out_td = short_convolution(x_td, weight_dk, bias_d, document_t)
    share = torch.sigmoid(out_td)
    dout_td = dy_td * share * (1.0 + out_td * (1.0 - share))
    dx_td, of_taps = dout_td * weight_dk[:, -1].float(), [(dout_td * x_td).sum(0)]
    mirrored = dout_td.flip(0), document_t.flip(0)
    for back in range(1, weight_dk.shape[1]):
        dx_td = dx_td + _earlier(*mirrored, back).flip(0) * weight_dk[:, -1 - back].float()
        of_taps.append((dout_td * _earlier(x_td, document_t, back)).sum(0))
    dweight_dk, dbias_d = torch.stack(of_taps[::-1], dim=1).to(weight_dk.dtype), dout_td.sum(0)
    return dx_td.to(x_td.dtype), dweight_dk, dbias_d.to((weight_dk if bias_d is None else bias_d).dtype)


class _Chunks(NamedTuple):
    x: torch.Tensor
    """[C, G, L, R, P]"""
    b: torch.Tensor
    """[C, G, L, N]"""
    c: torch.Tensor
    dt: torch.Tensor
    """fp32 [C, G, R, L]"""
    summed: torch.Tensor
    """[C, G, R, L]: logarithms of decays since the chunk's start"""
    since: torch.Tensor
    """fp32 [C, G, R, L]: what is left of the state that enters the chunk, at each token"""
    until: torch.Tensor
    """fp32 [C, G, R, L]: what is left of each token's share at the chunk's end"""
    through: torch.Tensor
    """fp32 [C, G, R]: what is left of the state that enters, at the chunk's end"""
    document: torch.Tensor
    """[C, L]"""


def _cut(x_bc, dt, a_h, document, groups: int, state: int, chunk: int) -> _Chunks:
    tokens, heads = dt.shape
    filler = -tokens % chunk
    if filler:
        x_bc, dt = F.pad(x_bc, (0, 0, 0, filler)), F.pad(dt, (0, 0, 0, filler))
        document = F.pad(document, (0, filler), value=-1)
    inner = x_bc.shape[1] - 2 * groups * state
    x, b, c = x_bc.split([inner, groups * state, groups * state], dim=1)
    x = x.unflatten(0, (-1, chunk)).unflatten(2, (groups, heads // groups, inner // heads)).transpose(1, 2)
    b, c = (one.unflatten(0, (-1, chunk)).unflatten(2, (groups, state)).transpose(1, 2) for one in (b, c))
    dt = dt.unflatten(0, (-1, chunk)).unflatten(2, (groups, heads // groups)).permute(0, 2, 3, 1)
    document = document.view(-1, chunk)
    summed = (dt * a_h.view(groups, -1, 1)).cumsum(-1, dtype=_of_sums(x))
    before, last = F.pad(document[:-1, -1:], (0, 0, 1, 0), value=-2), document[:, -1:]
    masks = [(document == one).view(-1, 1, 1, chunk) for one in (before, last)]
    since = torch.where(masks[0], summed.float().exp(), 0.0)
    until = torch.where(masks[1], (summed[..., -1:] - summed).float().exp(), 0.0)
    through = torch.where((before == last).view(-1, 1, 1), summed[..., -1].float().exp(), 0.0)
    return _Chunks(x, b, c, dt, summed, since, until, through, document)


def _of_sums(x: torch.Tensor) -> torch.dtype:
    """In which sums are taken that cancel for the most part."""
    return torch.float64 if x.dtype == torch.float32 else torch.float32


def _weighed(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[C, G, L, R, P] with weights [C, G, R, L], as [C, G, L, R * P] in the precision of x."""
    return (x * weights.transpose(-1, -2).unsqueeze(-1)).to(x.dtype).flatten(3)


def _local_states(*given) -> tuple[torch.Tensor, torch.Tensor]:
    """What each chunk's own tokens leave in the state at its end [C, G, N, R * P], and what is left of the state that
    entered it [C, H]."""
    cut = _cut(*given)
    states = cut.b.transpose(-1, -2) @ _weighed(cut.x, cut.until * cut.dt)
    return states, cut.through.flatten(1)


def _triangles(cut: _Chunks) -> torch.Tensor:
    """What is left of each token at each later one of its chunk and document: fp32 [C, G, R, L, L]."""
    length = cut.document.shape[1]
    place = torch.arange(length, device=cut.document.device)
    is_seen = (cut.document[:, :, None] == cut.document[:, None, :]) & (place[:, None] >= place)
    left = (cut.summed.unsqueeze(-1) - cut.summed.unsqueeze(-2)).float()
    return torch.where(is_seen[:, None, None], left, float("-inf")).exp()


def _by_head(x: torch.Tensor) -> torch.Tensor:
    """[C, G, L, R, P] as [C * G * R, L, P]."""
    return x.transpose(2, 3).flatten(0, 2)


def _scores(cut: _Chunks) -> torch.Tensor:
    """[C, G, 1, L, L]"""
    return (cut.c @ cut.b.transpose(-1, -2)).unsqueeze(2)


def _outputs(entering: torch.Tensor, d_h: torch.Tensor, *given) -> torch.Tensor:
    cut, tokens = _cut(*given), given[0].shape[0]
    weights = (_scores(cut) * _triangles(cut) * cut.dt.unsqueeze(-2)).to(cut.x.dtype)
    own = (weights.flatten(0, 2) @ _by_head(cut.x)).view(*cut.dt.shape, -1)
    read = (cut.c @ entering).unflatten(-1, (own.shape[2], -1)).transpose(2, 3)
    d = d_h.float().view(cut.dt.shape[1], -1, 1, 1)
    y = own + read * cut.since.unsqueeze(-1) + d * cut.x.transpose(2, 3)
    return y.to(cut.x.dtype).permute(0, 3, 1, 2, 4).flatten(2).flatten(0, 1)[:tokens]


def _gradients_in_chunks(dy_td: torch.Tensor, cut: _Chunks) -> torch.Tensor:
    """[C, G, L, R, P]"""
    count, groups, length, heads, size = cut.x.shape
    dy = F.pad(dy_td, (0, 0, 0, count * length - dy_td.shape[0]))
    return dy.view(count, length, groups, heads, size).transpose(1, 2)


def _gradient_of_entering(dy_td: torch.Tensor, *given) -> torch.Tensor:
    """By a chunk's own outputs alone: [C, G, N, R * P]."""
    cut = _cut(*given)
    return cut.c.transpose(-1, -2) @ _weighed(_gradients_in_chunks(dy_td, cut), cut.since)


def _gradients(dy_td, entering, by_leaving, d_h, *given) -> tuple[torch.Tensor, ...]:
    cut, (tokens, heads), groups, chunk = _cut(*given), given[1].shape, given[4], given[6]
    dy, dtype, shape = _gradients_in_chunks(dy_td, cut), cut.x.dtype, cut.dt.shape
    x_head, dy_head = _by_head(cut.x), _by_head(dy)
    # Within chunks
    scores, left = _scores(cut), _triangles(cut)
    weights = (scores * left * cut.dt.unsqueeze(-2)).to(dtype)
    dx = (weights.flatten(0, 2).transpose(-1, -2) @ dy_head).view(*shape, -1)
    by_weights = (dy_head @ x_head.transpose(-1, -2)).view(*shape, chunk)
    by_scores = (by_weights * left * cut.dt.unsqueeze(-2)).sum(2).to(dtype)
    moved = by_weights * scores * left
    own = moved.diagonal(dim1=-2, dim2=-1)  # which no decay is in
    moved = moved.tril(-1)
    # Sums over rows and columns are of the same values.
    exact = _of_sums(cut.x)
    from_key = moved.sum(-2, dtype=exact)
    by_summed = (moved * cut.dt.unsqueeze(-2)).sum(-1, dtype=exact) - from_key * cut.dt
    # From the state that enters, and to the one that leaves
    read = (cut.c @ entering).unflatten(-1, (shape[2], -1)).transpose(2, 3)
    by_summed = by_summed + cut.since * (dy.transpose(2, 3).float() * read).sum(-1)
    put = (cut.b @ by_leaving).unflatten(-1, (shape[2], -1)).transpose(2, 3)
    to_end = cut.until * (cut.x.transpose(2, 3).float() * put).sum(-1)
    kept = (entering.float() * by_leaving).unflatten(-1, (shape[2], -1)).sum((2, 4)) * cut.through
    dc = by_scores @ cut.b + _weighed(dy, cut.since) @ entering.transpose(-1, -2)
    db = by_scores.transpose(-1, -2) @ cut.c + _weighed(cut.x, cut.until * cut.dt) @ by_leaving.transpose(-1, -2)
    dx = dx + put * (cut.until * cut.dt).unsqueeze(-1) + d_h.float().view(groups, -1, 1, 1) * dy.transpose(2, 3)
    # Of the decays: a token's counts in all that crosses it
    later, before = to_end * cut.dt, by_summed.flip(-1).cumsum(-1).flip(-1)
    by_decay = (before + (later.cumsum(-1) - later) + kept.unsqueeze(-1)).float()
    ddt = by_decay * given[2].view(groups, -1, 1) + from_key.float() + own + to_end
    da = (by_decay * cut.dt).sum((0, 3)).flatten()
    dd = (dy.float() * cut.x).sum((0, 2, 4)).flatten().to(d_h.dtype)
    dx_bc = [
        one.flatten(2).flatten(0, 1) for one in (dx.permute(0, 3, 1, 2, 4), db.transpose(1, 2), dc.transpose(1, 2))
    ]
    joint = torch.cat([one[:tokens].to(dtype) for one in dx_bc], dim=1)
    return joint, ddt.permute(0, 3, 1, 2).reshape(-1, heads)[:tokens].contiguous(), da, dd


def hand_on(states: torch.Tensor, decay_ch: torch.Tensor, *, backward: bool = False) -> torch.Tensor:
    """From what each chunk adds to the state [C, G, N, R * P] to the state that enters it; with `backward`, from the
    last chunk to the first. The state itself is fp32."""
    if states.is_cuda:
        from tunesmith.kernels.scan_fused import hand_on_fused

        return hand_on_fused(states, decay_ch, backward=backward)
    groups, heads = states.shape[1], decay_ch.shape[1]
    decay = decay_ch.view(-1, groups, 1, heads // groups, 1)
    entering = torch.empty_like(states)
    state = torch.zeros_like(states[0], dtype=torch.float32).unflatten(-1, (heads // groups, -1))
    order = range(states.shape[0])
    for place in reversed(order) if backward else order:
        entering[place] = state.flatten(-2)
        state = state * decay[place] + states[place].unflatten(-1, (heads // groups, -1))
    return entering
