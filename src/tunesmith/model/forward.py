"""From packed documents to the loss of their target tokens: the one way models are called, in training and evaluation.

Three layouts. `packed`: documents end to end in one row, with attention that keeps them apart; nothing is padded.
`padded`: one document a row with the model's own attention, for architectures that cannot do the first; the loader
gives them documents of like length. `encoder-decoder`: the same with two rows for each document, its source and its
target (`data.paired` lays such documents out). Which of them a model takes is found out by `model.forward_spec`.

Legend: T tokens, N target tokens, D documents, H hidden, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from tunesmith.kernels.linear_cross_entropy import Transposed, chunk_bytes, chunk_rows, linear_cross_entropy
from tunesmith.kernels.linear_distillation import Lesson, distillation_by_module, linear_distillation
from tunesmith.model.attention import NAME as PACKED_ATTENTION
from tunesmith.model.inline_attention import inline_attention
from tunesmith.model.local import local
from tunesmith.model.noise import tell_lengths
from tunesmith.model.state_space import use_chunked_scan
from tunesmith.model.structure import body, stacks_of
from tunesmith.plan.plan import ForwardSpec

TRIAL_LENGTHS = (7, 3, 12)
"""Tokens of the documents of `trial_inputs`."""


class Documents(Protocol):
    """What is needed of a micro-batch; `data.types.MicroBatch` is one."""

    @property
    def tokens(self) -> torch.Tensor: ...
    @property
    def labels(self) -> torch.Tensor: ...
    @property
    def weights(self) -> torch.Tensor: ...
    @property
    def positions(self) -> torch.Tensor: ...
    @property
    def boundaries(self) -> torch.Tensor: ...
    @property
    def longest(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Inputs:
    """A micro-batch on the device. Which positions are targets was found on the host, so nothing waits for it."""

    tokens: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T]"""
    boundaries: torch.Tensor
    """int32 [D+1]"""
    """or, of a micro-batch that several ranks compute, the queries' in each chunk, [2, P+1]"""
    longest: int
    rows: torch.Tensor
    """int64 [N]: the positions that predict a target"""
    labels: torch.Tensor
    """int64 [N]"""
    weights: torch.Tensor
    """float32 [N]"""
    keys: torch.Tensor | None = None
    """int32 [2, P+1], or [D+1] with `places`: which keys those queries see; None where they are their own"""
    places: torch.Tensor | None = None
    """int64 [S]: the tokens that are these keys, where documents share beginnings"""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes every micro-batch is brought to, so that compiled layers see one shape: a last document of padding fills
    the tokens up, and the longest document counts as this long."""

    tokens: int
    longest: int


def to_device(batch: Documents, device: torch.device, shape: Shape | None = None) -> Inputs:
    rows = torch.nonzero(batch.weights).squeeze(1)
    move = partial(moved, device=device)
    tokens, positions, boundaries, longest = batch.tokens, batch.positions, batch.boundaries, batch.longest
    pieces, keys, places = (getattr(batch, name, None) for name in ("pieces", "keys", "key_places"))
    if pieces is not None:
        boundaries, keys = pieces.queries, pieces.keys
    elif shape is not None:
        longest = shape.longest
        tokens, positions, boundaries = filled(batch, shape.tokens, longest)
        if places is not None:
            fillers = torch.arange(batch.tokens.shape[0], shape.tokens)
            ends = boundaries[batch.boundaries.shape[0] :] - batch.tokens.shape[0] + places.shape[0]
            keys, places = torch.cat([keys, ends.to(keys.dtype)]), torch.cat([places, fillers])
    boundaries, keys, places = (None if one is None else move(one) for one in (boundaries, keys, places))
    if shape is not None or pieces is not None:
        for one in (boundaries, keys, places):
            if one is not None:
                torch._dynamo.maybe_mark_dynamic(one, one.ndim - 1)
    return Inputs(
        tokens=move(tokens),
        positions=move(positions),
        boundaries=boundaries,
        longest=longest,
        rows=move(rows),
        labels=move(batch.labels[rows]),
        weights=move(batch.weights[rows]),
        keys=keys,
        places=places,
    )


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Not waited for. A copy of more than a few pages from memory that is not pinned would wait for all before it."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def filled(batch: Documents, tokens: int, longest: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, positions and boundaries with so much padding at the end that there are `tokens`."""
    filler = tokens - batch.tokens.shape[0]
    assert filler >= 0
    # Cut like documents, so that no filler is longer than `longest`; one of length 0 where nothing is missing.
    cuts = torch.arange(0, filler, longest)[1:]
    ends = torch.cat([cuts, torch.tensor([filler])]) + batch.tokens.shape[0]
    return (
        F.pad(batch.tokens, (0, filler)),
        torch.cat([batch.positions, torch.arange(filler) % longest]),
        torch.cat([batch.boundaries, ends.to(batch.boundaries.dtype)]),
    )


class Entrance(nn.Module):
    """Stands before a model whose weights lie over several ranks: while a function of the model runs within it, the
    weights outside the layers, such as the output head's, are whole."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    @property
    def base_model(self) -> nn.Module:
        return body(self.model)

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.model, *arguments)


Weigh = Callable[[torch.Tensor], torch.Tensor]
"""From the loss of each target token [N] to its weight in the sum whose gradient is wanted [N]."""


def token_losses(
    model: nn.Module,
    inputs: Inputs,
    spec: ForwardSpec,
    z_loss: float = 0.0,
    weigh: Weigh | None = None,
    lesson: Lesson | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted sum of the target tokens' losses (with `z_loss`), to call backward on, and the loss of each target
    [N] (without). `weigh` decides about the weights when the losses are known. With a `lesson` they are those of
    distillation, in two parts [N, 2]."""
    if isinstance(model, Entrance):
        return model(token_losses, inputs, spec, z_loss, weigh, lesson)
    with record_function("forward"):
        hidden_th = hidden_states(model, inputs, spec)
    if lesson is not None:
        with record_function("loss"):
            return _distillation_of_head(model.get_output_embeddings(), hidden_th, inputs, spec, lesson)
    return losses_of_hidden(model, hidden_th, inputs, spec, z_loss, weigh=weigh)


def losses_of_hidden(
    model: nn.Module,
    hidden_th: torch.Tensor,
    inputs: Inputs,
    spec: ForwardSpec,
    z_loss: float = 0.0,
    room: torch.Tensor | None = None,
    weigh: Weigh | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_losses` from what the output head sees; its logits may use `room` (`loss_bytes`)."""
    head, added_v = model.get_output_embeddings(), logit_bias(model)
    with record_function("loss"):
        if (total_of := getattr(weigh, "total", None)) is not None:  # a head of its own, over a row of each document
            scores_dl = head(hidden_th.index_select(0, inputs.rows).to(head.weight.dtype))
            return total_of(scores_dl), inputs.weights.detach()
        weights_n = inputs.weights
        if weigh is not None:
            # Once without a gradient: what a token counts depends on the losses of all. The logits of a chunk are made
            # again below, which is one matmul more of the head; keeping them would be most of the memory of a step.
            with torch.no_grad():
                total, losses_n = _losses_of_head(head, hidden_th.detach(), inputs, weights_n, spec, 0.0, room, added_v)
            weights_n = weigh(losses_n)
            if not torch.is_grad_enabled():
                return total, losses_n
        return _losses_of_head(head, hidden_th, inputs, weights_n, spec, z_loss, room, added_v)


def logit_bias(model: nn.Module) -> torch.Tensor | None:
    """[V], which some encoder-decoders (BART, Marian) keep apart from their head, and do not train."""
    found = getattr(model, "final_logits_bias", None)
    return found.reshape(-1) if isinstance(found, torch.Tensor) else None


def _losses_of_head(
    head: nn.Module,
    hidden_th: torch.Tensor,
    inputs: Inputs,
    weights_n: torch.Tensor,
    spec: ForwardSpec,
    z_loss: float,
    room: torch.Tensor | None,
    added_v: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if is_adapted(head):
        return _losses_by_module(head, hidden_th, inputs, weights_n, spec, z_loss, added_v)
    weight_vh, bias = local(head.weight), getattr(head, "bias", None)
    bias_v = added_v if bias is None else local(bias) if added_v is None else local(bias) + added_v
    bias_v = None if bias_v is None else bias_v.to(weight_vh.dtype)
    if not torch.is_grad_enabled():  # the kernel would make gradients of what could have one
        weight_vh, bias_v = weight_vh.detach(), None if bias_v is None else bias_v.detach()
    return linear_cross_entropy(
        hidden_th,
        weight_vh,
        inputs.labels,
        weights_n,
        inputs.rows,
        bias_v=bias_v,
        scale=spec.logit_scale,
        softcap=spec.softcap,
        z_loss=z_loss,
        part=getattr(head, "vocabulary", None),
        transposed=_transposed(head),
        room=room,
    )


def _distillation_of_head(
    head: nn.Module, hidden_th: torch.Tensor, inputs: Inputs, spec: ForwardSpec, lesson: Lesson
) -> tuple[torch.Tensor, torch.Tensor]:
    given = (hidden_th, inputs.labels, inputs.weights, inputs.rows, lesson)
    form = {"scale": spec.logit_scale, "softcap": spec.softcap}
    if is_adapted(head):
        chunk = chunk_rows(hidden_th.device, getattr(head, "base", head).weight.shape[0], is_shared=True)
        return distillation_by_module(head, *given, **form, chunk=chunk)
    bias = getattr(head, "bias", None)
    bias_v = None if bias is None else local(bias)
    return linear_distillation(hidden_th, local(head.weight), *given[1:], bias_v=bias_v, **form)


def logits_of(model: nn.Module, rows_ch: torch.Tensor, spec: ForwardSpec) -> torch.Tensor:
    """The model's logits of a few hidden states, in fp32: [C, V]."""
    logits_cv = model.get_output_embeddings()(rows_ch).float()
    if spec.logit_scale != 1.0:
        logits_cv *= spec.logit_scale
    return logits_cv if spec.softcap is None else torch.tanh(logits_cv.div_(spec.softcap)).mul_(spec.softcap)


def is_adapted(module: nn.Module) -> bool:
    """Whether it is more than its weight: an adapter of ours or of peft's is on it, or a copy of it is trained."""
    return any(hasattr(module, name) for name in ("lora_a", "token_rows", "base_layer", "original_module"))


def _losses_by_module(
    head: nn.Module,
    hidden_th: torch.Tensor,
    inputs: Inputs,
    weights_n: torch.Tensor,
    spec: ForwardSpec,
    z_loss: float,
    added_v: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of a head that must be called, a few rows at a time, whose logits backward makes again."""

    def of(rows_ch: torch.Tensor, labels_c: torch.Tensor, weights_c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits_cv = head(rows_ch).float() * spec.logit_scale
        logits_cv = logits_cv if added_v is None else logits_cv + added_v
        if spec.softcap is not None:
            logits_cv = torch.tanh(logits_cv / spec.softcap) * spec.softcap
        totals_c = logits_cv.logsumexp(-1)
        losses_c = totals_c - logits_cv.gather(1, labels_c[:, None]).squeeze(1)
        return ((losses_c + z_loss * totals_c.square()) * weights_c).sum(), losses_c.detach()

    total, losses = hidden_th.new_zeros((), dtype=torch.float32), []
    chunk = chunk_rows(hidden_th.device, getattr(head, "base", head).weight.shape[0], is_shared=True)
    for start in range(0, inputs.rows.shape[0], chunk):
        some = slice(start, start + chunk)
        given = (hidden_th.index_select(0, inputs.rows[some]), inputs.labels[some], weights_n[some])
        part, losses_c = checkpoint(of, *given, use_reentrant=False)
        total = total + part
        losses.append(losses_c)
    return total, torch.cat(losses) if losses else hidden_th.new_zeros(0, dtype=torch.float32)


def loss_bytes(model: nn.Module, tokens: int) -> int:
    """What logits take at a time, of a micro-batch of so many tokens on one rank."""
    head = model.get_output_embeddings()
    head = getattr(head, "base", head)
    return chunk_bytes(tokens, head.weight, _transposed(head))


def _transposed(head: nn.Module) -> Transposed | None:
    return Transposed(head.values8_hw, head.scale_h1) if hasattr(head, "values8_hw") else None


def hidden_states(model: nn.Module, inputs: Inputs, spec: ForwardSpec) -> torch.Tensor:
    """What the output head sees, for every token: [T, H]."""
    tell_lengths(model, inputs.boundaries, inputs.tokens.shape[0] if spec.layout == "packed" else None)
    if spec.layout == "packed":
        return packed_hidden_states(model, inputs, seq_idx=spec.seq_idx).squeeze(0)
    if spec.layout == "encoder-decoder":
        return decoder_states(model, inputs)
    documents = torch.repeat_interleave(
        torch.arange(inputs.boundaries.shape[0] - 1, device=inputs.tokens.device), inputs.boundaries.diff()
    )
    shape = (inputs.boundaries.shape[0] - 1, inputs.longest)
    if inputs.tokens.shape[0] == shape[0] * shape[1]:  # nothing to pad: the plain call
        output = body(model)(input_ids=inputs.tokens.view(shape), use_cache=False)
        return output[0].reshape(inputs.tokens.shape[0], -1)
    tokens = inputs.tokens.new_zeros(shape)
    mask = inputs.tokens.new_zeros(shape)
    tokens[documents, inputs.positions] = inputs.tokens
    mask[documents, inputs.positions] = 1
    output = body(model)(input_ids=tokens, attention_mask=mask, use_cache=False)
    return output[0][documents, inputs.positions]


def decoder_states(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    """What the output head sees where the decoder has a token, and 0 elsewhere: [T, H]. A document begins with the
    decoder's: a start and all its targets, of which the last one is only predicted. The encoder's stand behind them."""
    ends = inputs.boundaries.long()
    # A document of a rank that has nothing to do has no target: one token for each side.
    targets_d = torch.searchsorted(inputs.rows, ends).diff()
    starts_d, written_d, read_d = ends[:-1], targets_d.clamp(min=1), ends.diff() - targets_d - 1
    most_read, most_written = torch.stack([read_d.max(), written_d.max()]).tolist()
    sources, is_read, _ = _rows_of(inputs.tokens, starts_d + targets_d + 1, read_d, most_read)
    targets, is_written, places = _rows_of(inputs.tokens, starts_d, written_d, most_written)
    encoder, decoder = stacks_of(model)
    mask = is_read.long()
    read = encoder(input_ids=sources, attention_mask=mask)[0]
    written = decoder(
        input_ids=targets,
        attention_mask=is_written.long(),
        encoder_hidden_states=read,
        encoder_attention_mask=mask,
        use_cache=False,
    )[0]
    states_th = written.new_zeros(inputs.tokens.shape[0], written.shape[-1])
    return states_th.index_copy(0, places[is_written], written[is_written])


def _rows_of(
    tokens: torch.Tensor, starts_d: torch.Tensor, lengths_d: torch.Tensor, longest: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A stretch of each document as a row, which of its places have a token, and where in `tokens` they are from."""
    along = torch.arange(longest, device=tokens.device)
    is_there = along < lengths_d[:, None]
    places = starts_d[:, None] + along
    return torch.where(is_there, tokens[places.clamp(max=tokens.shape[0] - 1)], 0), is_there, places


def packed_hidden_states(
    model: nn.Module, inputs: Inputs, embedded: torch.Tensor | None = None, *, seq_idx: bool = False
) -> torch.Tensor:
    """The same as one row: [1, T, H]. `embedded` enters the layers in place of the tokens' embeddings; `seq_idx` says
    each token's document, too."""
    entering = {"input_ids": inputs.tokens[None]} if embedded is None else {"inputs_embeds": embedded}
    if seq_idx:
        place = torch.arange(inputs.tokens.shape[0], dtype=torch.int32, device=inputs.tokens.device)
        document = torch.searchsorted(inputs.boundaries, place, right=True, out_int32=True) - 1
        entering["seq_idx"] = document[None]
        use_chunked_scan(body(model))
    keys, decoder = inputs.boundaries if inputs.keys is None else inputs.keys, body(model)
    inline = inline_attention(decoder)
    bounds = (inputs.boundaries, keys, inputs.places)
    told = nullcontext({}) if inline is None else inline.calls(decoder, *bounds, inputs.longest)
    if inputs.places is not None:
        entering["key_places"] = inputs.places
    with told as besides:
        return decoder(
            **entering,
            **besides,
            position_ids=inputs.positions[None],
            use_cache=False,
            cu_seq_lens_q=inputs.boundaries,
            cu_seq_lens_k=keys,
            max_length_q=inputs.longest,
            max_length_k=inputs.longest,
        )[0]


def own_attention(model: nn.Module) -> str:
    """The attention that defines the model: its own, but not torch's where that leaves something out. transformers
    gives some models with soft caps over to it all the same."""
    own = model.config._attn_implementation
    if own == PACKED_ATTENTION:
        own = model.get_correct_attn_implementation(None)
    is_capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    return "eager" if own == "sdpa" and is_capped else own


def part_of(inputs: Inputs, start: int, end: int) -> Inputs:
    """One document of trial inputs, every position a target."""
    at = slice(start, end)
    device = inputs.tokens.device
    return Inputs(
        tokens=inputs.tokens[at],
        positions=inputs.positions[at],
        boundaries=torch.tensor([0, end - start], dtype=torch.int32, device=device),
        longest=end - start,
        rows=torch.arange(end - start, device=device),
        labels=inputs.labels[at],
        weights=inputs.weights[at],
    )


def trial_inputs(vocabulary: int, device: torch.device, lengths: tuple[int, ...] = TRIAL_LENGTHS) -> Inputs:
    """Some short documents of varied tokens, every position a target."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (sum(lengths),), generator=generator)
    boundaries = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return Inputs(
        tokens=tokens.to(device),
        positions=torch.cat([torch.arange(n) for n in lengths]).to(device),
        boundaries=boundaries.to(device),
        longest=max(lengths),
        rows=torch.arange(sum(lengths), device=device),
        labels=tokens.roll(-1).to(device),
        weights=torch.ones(sum(lengths), device=device),
    )
