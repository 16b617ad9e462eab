"""From packed documents to the loss of their target tokens: the one way models are called, in training and evaluation.

Three layouts. `packed`: documents end to end in one row, with attention that keeps them apart; nothing is padded.
`padded`: one document a row with the model's own attention, for architectures that cannot do the first; the loader
gives them documents of like length. `encoder-decoder`: the same with two rows for each document, its source and its
target (`data.paired` lays such documents out). `find_forward_spec` tries them on a proxy in fp32 (`model.probe`) and
compares with the model's own plain call, so that an architecture nobody has seen is either computed rightly or refused;
`confirm_forward_spec` tries what was found in another precision.

Legend: T tokens, N target tokens, D documents, H hidden, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from tunesmith.errors import UserError, first_line, listed
from tunesmith.kernels.linear_cross_entropy import Transposed, chunk_bytes, chunk_rows, linear_cross_entropy
from tunesmith.kernels.linear_distillation import Lesson, distillation_by_module, linear_distillation
from tunesmith.model.attention import NAME as PACKED_ATTENTION
from tunesmith.model.inline_attention import inline_attention
from tunesmith.model.local import local
from tunesmith.model.noise import tell_lengths
from tunesmith.model.state_space import use_chunked_scan
from tunesmith.model.structure import body, is_encoder_decoder, set_attention, stacks_of
from tunesmith.plan.plan import ForwardSpec

LEAKS = "documents see each other"
KERNELS = {"causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm", "fla": "flash-linear-attention"}
"""Packages with kernels for what runs along tokens, and the names they are installed by."""
ENLARGED = (1.0, 8.0, 64.0, 512.0, 4096.0, 32768.0)
"""Times its weight, an output head's logits are compared with the model's."""


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
        return _decoder_states(model, inputs)
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


def _decoder_states(model: nn.Module, inputs: Inputs) -> torch.Tensor:
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


def confirm_forward_spec(
    model: nn.Module, *, vocabulary: int, longest: int = 0, known: ForwardSpec | None = None
) -> tuple[ForwardSpec, str | None]:
    """The fastest way of calling this model that gives what the model itself gives.

    `known` is what a proxy of it was found to need; without, the model is its own proxy as far as its precision allows.
    `longest` is what training will give as the longest document, so that attention compiles no other kernels here.
    Returns it with a sentence when it is not the fastest there is. Leaves the model with the attention that the layout
    needs.
    """
    if known is None:
        return find_forward_spec(model, vocabulary=vocabulary, longest=longest)
    if hasattr(model, "head_files"):  # it has no logits of tokens to compare; its layers are those that were tried
        set_attention(model, PACKED_ATTENTION if known.layout == "packed" else own_attention(model))
        return known, None
    if is_encoder_decoder(model):
        return _find_encoder_decoder_spec(model, vocabulary, known), None
    inputs = trial_inputs(vocabulary, next(model.parameters()).device)
    was_training = model.training
    model.eval()
    own = own_attention(model)
    reasons = []
    try:
        set_attention(model, own)
        expected = _own_losses(model, inputs)
        if not expected.isfinite().all():  # the weights' fault, which is found elsewhere, and not the layout's
            set_attention(model, PACKED_ATTENTION if known.layout == "packed" else own)
            return known, None
        # In half precision a model's own losses on random tokens are off by some percent, whichever way it is called.
        is_exact = expected.dtype == torch.float64
        tolerance = 1e-4 * max(1.0, expected.abs().max().item()) if is_exact else 0.05 * expected.abs().max().item()
        leak = 1e-5 if is_exact else 0.005
        for layout in ("packed", "padded") if known.layout == "packed" else ("padded",):
            spec = replace(known, layout=layout, seq_idx=known.seq_idx and layout == "packed")
            why = _tried(model, spec, own, inputs, expected, vocabulary, tolerance, leak, longest)
            if why is None:
                branches = known.branches and layout == "packed" and _takes_branches(model, spec, own, vocabulary)
                return replace(spec, branches=branches), None if layout == known.layout else _slower(model, reasons)
            reasons.append(f"{layout}: {why}")
    finally:
        model.train(was_training)
    raise _cannot(model, reasons)


def find_forward_spec(
    model: nn.Module, *, vocabulary: int, longest: int = 0, long: int | None = None
) -> tuple[ForwardSpec, str | None]:
    """`confirm_forward_spec` where nothing is known yet: how the head's logits become the model's, whether the model is
    causal, and which layout gives its own results. Above `long` tokens its code may compute by other rules: such
    documents are tried beside shorter ones, and by themselves."""
    if is_encoder_decoder(model):
        return _find_encoder_decoder_spec(model, vocabulary), None
    device = next(model.parameters()).device
    inputs = trial_inputs(vocabulary, device)
    was_training = model.training
    model.eval()
    own = own_attention(model)
    try:
        set_attention(model, own)
        expected = _own_losses(model, inputs)
        is_exact = expected.dtype == torch.float64
        _check_causal(model, inputs, vocabulary, is_exact)
        scale, softcap = _logit_form(model, inputs, is_exact)
        tolerance = 1e-4 * max(1.0, expected.abs().max().item()) if is_exact else 0.05 * expected.abs().max().item()
        leak = 1e-5 if is_exact else 0.005
        reasons, before = [], None
        for layout, seq_idx in (("packed", False), ("packed", True), ("padded", False)):
            spec = ForwardSpec(layout, scale, softcap, seq_idx=seq_idx)
            why = _tried(model, spec, own, inputs, expected, vocabulary, tolerance, leak, longest)
            if why is None and long is not None and is_exact:
                spec, why = _over_lengths(model, spec, own, vocabulary, long)
            if why is None:
                branches = layout == "packed" and not seq_idx and _takes_branches(model, spec, own, vocabulary)
                return replace(spec, branches=branches), None if layout == "packed" else _slower(model, reasons)
            if seq_idx and why != before:  # most models do not look at `seq_idx`
                reasons.append(f"with seq_idx: {why.partition('. ')[0]}")
            elif not seq_idx:
                reasons.append(f"{layout}: {why}")
            before = why
        spec = ForwardSpec("padded", scale, softcap, switch=0)
        set_attention(model, own)
        if _one_by_one_differs(model, spec, inputs, expected) <= tolerance:
            return spec, _slower(model, reasons, alone=True)
        reasons.append("one by one: losses differ")
    finally:
        model.train(was_training)
    raise _cannot(model, reasons)


def _find_encoder_decoder_spec(model: nn.Module, vocabulary: int, known: ForwardSpec | None = None) -> ForwardSpec:
    """How an encoder-decoder is called: UserError where its losses over padded rows are not the model's own."""
    inputs, was_training = paired_inputs(vocabulary, next(model.parameters()).device), model.training
    model.eval()
    try:
        logits_nv = _own_paired_logits(model, inputs)
        is_exact = logits_nv.dtype == torch.float64
        _check_decoder_causal(model, inputs, vocabulary, logits_nv, is_exact)
        spec = known
        if spec is None:
            with torch.no_grad():
                try:
                    _decoder_states(model, inputs)
                except Exception as error:  # the model's own code, called as it may not expect
                    raise _cannot(model, [first_line(error)[:200]]) from error
            form = _paired_form(model, inputs) if is_exact else _form_by_config(model)
            spec = ForwardSpec("encoder-decoder", *form)
        expected = F.cross_entropy(logits_nv, inputs.labels, reduction="none")
        if not expected.isfinite().all():  # the weights' fault, which is found elsewhere
            return spec
        with torch.no_grad():
            found = token_losses(model, inputs, spec)[1].to(expected.dtype)
    finally:
        model.train(was_training)
    largest = max(1.0, expected.abs().max().item())
    if not (worst := (found - expected).abs().max().item()) <= (1e-4 if is_exact else 0.05) * largest:
        raise _cannot(model, [f"padded: losses differ by {worst:.2g}"])
    return spec


def _paired_form(model: nn.Module, inputs: Inputs) -> tuple[float, float | None]:
    return _form_of(model, lambda: (_own_paired_logits(model, inputs), _decoder_states(model, inputs)[inputs.rows]))


@torch.no_grad()
def _own_paired_logits(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    """Of every target by the model's own forward pass, one document at a time: [N, V], float64 where it is in fp32."""
    found, bounds = [], inputs.boundaries.tolist()
    for start, end in itertools.pairwise(bounds):
        count = int(((inputs.rows >= start) & (inputs.rows < end)).sum())
        given = {"input_ids": inputs.tokens[None, start + count + 1 : end], "use_cache": False}
        found.append(model(**given, decoder_input_ids=inputs.tokens[None, start : start + count]).logits[0])
    logits_nv = torch.cat(found).float()
    return logits_nv.double() if next(model.parameters()).dtype == torch.float32 else logits_nv


def _check_decoder_causal(
    model: nn.Module, inputs: Inputs, vocabulary: int, logits_nv: torch.Tensor, is_exact: bool
) -> None:
    """UserError where a target is predicted from targets behind it; the last document's are changed from the third."""
    last = int((inputs.rows >= inputs.boundaries[-2]).sum())
    changed = inputs.tokens.clone()
    start = int(inputs.boundaries[-2])
    changed[start + 3 : start + last] = (changed[start + 3 : start + last] + 1) % vocabulary
    after = _own_paired_logits(model, replace(inputs, tokens=changed))
    place = len(inputs.rows) - last
    differ = (after - logits_nv)[place : place + 3].abs().max().item()
    if differ > (1e-4 if is_exact else 0.05) * max(1.0, logits_nv.abs().max().item()):
        raise UserError(
            f"{type(model).__name__} cannot be trained: what its decoder predicts for a token depends on the tokens "
            "after it."
        )


def paired_inputs(
    vocabulary: int, device: torch.device, sizes: tuple[tuple[int, int], ...] = ((4, 9), (1, 3), (7, 5))
) -> Inputs:
    """Some short documents with so many targets and so many tokens of their source each."""
    lengths = [1 + targets + source for targets, source in sizes]
    starts = [0, *itertools.accumulate(lengths)]
    tokens = torch.randint(vocabulary, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    rows = torch.cat([start + torch.arange(targets) for start, (targets, _) in zip(starts, sizes, strict=False)])
    return Inputs(
        tokens=tokens.to(device),
        positions=torch.cat([torch.arange(length) for length in lengths]).to(device),
        boundaries=torch.tensor(starts, dtype=torch.int32, device=device),
        longest=max(lengths),
        rows=rows.to(device),
        labels=tokens[rows + 1].to(device),
        weights=torch.ones(len(rows), device=device),
    )


def own_attention(model: nn.Module) -> str:
    """The attention that defines the model: its own, but not torch's where that leaves something out. transformers
    gives some models with soft caps over to it all the same."""
    own = model.config._attn_implementation
    if own == PACKED_ATTENTION:
        own = model.get_correct_attn_implementation(None)
    is_capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    return "eager" if own == "sdpa" and is_capped else own


def _cannot(model: nn.Module, reasons: list[str]) -> UserError:
    return UserError(
        f"{type(model).__name__} cannot be trained: calling it document by document does not give the model's own "
        f"results ({listed(reasons, '; ')})."
    )


@torch.no_grad()
def _check_causal(model: nn.Module, inputs: Inputs, vocabulary: int, is_exact: bool) -> None:
    """UserError where what a token is predicted from has the token itself in it. Only tokens are changed, not their
    number: a model may compute a longer document by other rules and be causal all the same."""
    tokens = inputs.tokens[None, -12:]
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % vocabulary
    before, after = (model(input_ids=one, use_cache=False).logits[0, :6].float() for one in (tokens, changed))
    scale = max(1.0, before.abs().max().item())
    if (before - after).abs().max().item() > (1e-4 if is_exact else 0.05) * scale:
        raise UserError(
            f"{type(model).__name__} is not a causal language model: what it predicts for a token depends on the "
            "tokens after it; give a model that is made to predict the next token."
        )


def _logit_form(model: nn.Module, inputs: Inputs, is_exact: bool) -> tuple[float, float | None]:
    """Factor and soft cap between what the output head gives and the model's logits: found by comparing the two in
    fp32, read from the config otherwise."""
    return logit_form(model, inputs.tokens[None, -12:]) if is_exact else _form_by_config(model)


@torch.no_grad()
def logit_form(model: nn.Module, tokens: torch.Tensor) -> tuple[float, float | None]:
    """The same of a model in fp32, by these tokens, [1, T]."""

    def logits_and_states() -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(input_ids=tokens, use_cache=False).logits[0].double()
        return logits, body(model)(input_ids=tokens, use_cache=False)[0][0]

    return _form_of(model, logits_and_states)


def _form_by_config(model: nn.Module) -> tuple[float, float | None]:
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0
    if getattr(config, "logits_scaling", None):
        scale = 1.0 / config.logits_scaling
    if is_encoder_decoder(model) and getattr(config, "scale_decoder_outputs", False):  # T5
        scale = config.hidden_size**-0.5
    return scale, getattr(config, "final_logit_softcapping", None)


@torch.no_grad()
def _form_of(
    model: nn.Module, logits_and_states: Callable[[], tuple[torch.Tensor, torch.Tensor]]
) -> tuple[float, float | None]:
    """Factor and soft cap that make the model's logits of its hidden states, over the whole range of logits: those of a
    few random weights lie where a cap bends them by less than is seen, so the output head is made larger, too. A cap
    that the config does not name is what logits come to then."""
    config = model.config.get_text_config()
    named = [value for name, value in vars(config).items() if "softcap" in name and isinstance(value, int | float)]
    samples = [_raw_and_logits(model, logits_and_states, factor) for factor in ENLARGED]
    samples = [(raw, logits) for raw, logits in samples if raw.isfinite().all() and logits.isfinite().all()]
    highest = [logits.abs().max().item() for _, logits in samples]
    ceiling = float(f"{highest[-1]:.6g}") if len(samples) > 1 and highest[-1] <= highest[-2] * (1 + 1e-6) else None
    for cap in (None, *(float(cap) for cap in named if cap), *([ceiling] if ceiling else [])):
        scale = _fitted_scale(samples, cap)
        made = [raw * scale if cap is None else cap * torch.tanh(raw * scale / cap) for raw, _ in samples]
        if all(_is_close(one, logits) for one, (_, logits) in zip(made, samples, strict=True)):
            rounded = float(f"{scale:.6g}")
            return 1.0 if abs(scale - 1) < 1e-5 else rounded if abs(rounded / scale - 1) < 1e-7 else scale, cap
    raise _no_form(model, samples, ceiling)


def _raw_and_logits(
    model: nn.Module, logits_and_states: Callable[[], tuple[torch.Tensor, torch.Tensor]], factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the output head, its weight so many times as large, makes of the model's hidden states, and the model's
    logits: [N, V] each. UserError where there is no such head."""
    head = model.get_output_embeddings()
    if head is None or getattr(head, "weight", None) is None:
        raise _no_head(model)
    weight, bias, added = local(head.weight), getattr(head, "bias", None), logit_bias(model)
    before = weight.clone()
    weight.mul_(factor)
    try:
        logits, hidden = logits_and_states()
        if hidden.ndim != 2 or hidden.shape[1] != weight.shape[-1] or weight.shape[0] != logits.shape[-1]:
            raise _no_head(model)
        raw = F.linear(hidden, weight, None if bias is None else local(bias)).double()
    finally:
        weight.copy_(before)
    return raw if added is None else raw + added.double(), logits


def _fitted_scale(samples: list[tuple[torch.Tensor, torch.Tensor]], cap: float | None) -> float:
    """The factor before the cap that comes nearest to these logits, by those that are neither cut off nor nothing."""
    crossed = squares = 0.0
    for raw, logits in samples:
        if cap is None:
            wanted = logits
        else:
            is_told = (logits.abs() < 0.9 * cap) & (logits.abs() > 0.01 * cap)
            raw, wanted = raw[is_told], cap * torch.atanh(logits[is_told] / cap)
        weight = 1 / max(1.0, raw.abs().max().item() ** 2) if raw.numel() else 0.0
        crossed, squares = (
            crossed + weight * (raw * wanted).sum().item(),
            squares + weight * raw.square().sum().item(),
        )
    return crossed / squares if squares else 1.0


def _is_close(found: torch.Tensor, logits: torch.Tensor) -> bool:
    return (found - logits).abs().max().item() <= 1e-4 * max(1.0, logits.abs().max().item())


def _no_form(model: nn.Module, samples: list[tuple[torch.Tensor, torch.Tensor]], ceiling: float | None) -> UserError:
    """What the model's code does to its logits that the loss here cannot do."""
    name, differ = type(model).__name__, []
    for raw, logits in samples[:2]:  # with larger ones what is added is lost in the last digits
        centered, wanted = raw - raw.mean(0), logits - logits.mean(0)
        scale = ((centered * wanted).sum() / centered.square().sum()).item()
        differ.append((logits - scale * raw).mean(0))
        if not _is_close(scale * raw + differ[-1], logits) or not _is_close(differ[-1], differ[0]):
            break
    else:
        own = [one for one, tensor in (*model.named_parameters(), *model.named_buffers()) if _holds(tensor, differ[0])]
        what = f"`{own[0]}`" if own else "numbers of its own"
        return UserError(
            f"{name} cannot be trained: its code adds {what} to the logits of its output head, which the loss here "
            "does not do; let its code add them as the bias of that head (nn.Linear)."
        )
    if ceiling is not None:
        return UserError(
            f"{name} cannot be trained: its code keeps the logits of its output head between -{ceiling:g} and "
            f"{ceiling:g}, but not by cap * tanh(logits / cap), the only bound that the loss here can compute; let its "
            "code use that one, or none."
        )
    return UserError(
        f"{name} cannot be trained: its logits are not those of a linear output head over what its layers give, "
        "neither times a factor nor as cap * tanh(logits / cap), and the loss here is computed from such a head."
    )


def _holds(tensor: torch.Tensor, values_v: torch.Tensor) -> bool:
    is_alike = tensor.numel() == values_v.numel() and tensor.is_floating_point()
    return is_alike and _is_close(tensor.detach().reshape(-1).double(), values_v)


def _no_head(model: nn.Module) -> UserError:
    return UserError(
        f"{type(model).__name__} cannot be trained: its logits are not those of a linear output head over what its "
        "layers give, which the loss here is computed from."
    )


def _tried(
    model: nn.Module,
    spec: ForwardSpec,
    own: str,
    inputs: Inputs,
    expected: torch.Tensor,
    vocabulary: int,
    tolerance: float,
    leak: float,
    longest: int,
) -> str | None:
    """What is wrong with calling the model like this; None where nothing is."""
    set_attention(model, PACKED_ATTENTION if spec.layout == "packed" else own)
    given = replace(inputs, longest=max(longest, inputs.longest)) if spec.layout == "packed" else inputs
    changed = inputs.tokens.clone()
    changed[:7] = (changed[:7] + 1) % vocabulary
    if spec.switch is not None and spec.switch < inputs.longest:
        found = _one_by_one_differs(model, spec, inputs, expected)
        return None if found <= tolerance else f"losses differ by {found:.2g}"
    try:
        with torch.no_grad():
            found = token_losses(model, given, spec)[1].to(expected.dtype)
            # In half precision rounding hides a small leak from the comparison below. What stands in the first
            # document must not reach the others at all, whatever the precision.
            others = token_losses(model, replace(given, tokens=changed), spec)[1].to(expected.dtype)
    except Exception as error:  # the model's own code, called as it may not expect
        return first_line(error)[:200]
    worst = (found - expected).abs().max().item()
    if not worst <= tolerance:
        return f"losses differ by {worst:.2g}"
    if not (found[7:] - others[7:]).abs().max().item() <= leak:
        return LEAKS
    if spec.seq_idx and not _keeps_apart_in_training(model, spec, given, changed, leak):
        return LEAKS + " in training"
    return None


@torch.no_grad()
def _takes_branches(model: nn.Module, spec: ForwardSpec, own: str, vocabulary: int) -> bool:
    """Whether a document that begins with tokens of the one before it, which stand there once, has the losses that it
    has by itself, and does not see how the other goes on. Leaves the model with the attention of packed calls."""
    beside = trial_inputs(vocabulary, next(model.parameters()).device, (14, 5, 6))
    tokens = beside.tokens
    alone = [tokens[:14], torch.cat([tokens[:9], tokens[14:19]]), tokens[19:]]
    whole = replace(
        trial_inputs(vocabulary, tokens.device, (14, 14, 6)),
        tokens=torch.cat(alone),
        labels=torch.cat([beside.labels[:14], beside.labels[:9], beside.labels[14:]]),
    )
    places = torch.cat([torch.arange(14), torch.arange(9), torch.arange(14, 25)])
    positions = torch.cat([torch.arange(14), torch.arange(9, 14), torch.arange(6)])
    branched = replace(
        beside,
        positions=positions.to(tokens.device),
        longest=14,
        keys=whole.boundaries,
        places=places.to(tokens.device),
    )
    changed = tokens.clone()
    changed[9:14] = (changed[9:14] + 1) % vocabulary
    set_attention(model, own)
    expected = _own_losses(model, whole)
    set_attention(model, PACKED_ATTENTION)
    try:
        found, others = (
            token_losses(model, replace(branched, tokens=one), spec)[1].to(expected.dtype) for one in (tokens, changed)
        )
    except Exception:  # the model's own code, called as it may not expect
        return False
    expected = torch.cat([expected[:14], expected[23:]])
    is_exact, largest = expected.dtype == torch.float64, max(1.0, expected.abs().max().item())
    differs, leaks = (found - expected).abs().max().item(), (found - others)[14:].abs().max().item()
    return differs <= (1e-4 if is_exact else 0.05) * largest and leaks <= (1e-5 if is_exact else 0.005)


@torch.no_grad()
def _keeps_apart_in_training(
    model: nn.Module, spec: ForwardSpec, inputs: Inputs, changed: torch.Tensor, leak: float
) -> bool:
    """The same of what a model computes when it is trained: layers with state spaces have other kernels for that."""
    found = []
    model.train()
    try:
        for tokens in (inputs.tokens, changed):
            with torch.random.fork_rng():  # the same draws, for models that draw in training
                torch.manual_seed(0)
                found.append(token_losses(model, replace(inputs, tokens=tokens), spec)[1])
    except Exception:  # the model's own code, called as it may not expect
        return False
    finally:
        model.eval()
    return (found[0][7:] - found[1][7:]).abs().max().item() <= leak


def _over_lengths(
    model: nn.Module, spec: ForwardSpec, own: str, vocabulary: int, long: int
) -> tuple[ForwardSpec, str | None]:
    """The same with documents on both sides of `long` tokens; with `switch` where these must not be called together."""
    device = next(model.parameters()).device
    inputs = trial_inputs(vocabulary, device, (5, long + 11, 9, long + 4))
    set_attention(model, own)
    expected = _own_losses(model, inputs)
    tolerance = 1e-4 * max(1.0, expected.abs().max().item())
    set_attention(model, PACKED_ATTENTION if spec.layout == "packed" else own)
    try:
        with torch.no_grad():
            found = token_losses(model, inputs, spec)[1].to(expected.dtype)
        if (found - expected).abs().max().item() <= tolerance:
            return spec, None
        if _one_by_one_differs(model, spec, inputs, expected) <= tolerance:
            return replace(spec, switch=long), None
    except Exception as error:  # the model's own code, called as it may not expect
        return spec, f"documents of more than {long} tokens: {first_line(error)[:200]}"
    return spec, "long documents differ"


@torch.no_grad()
def _one_by_one_differs(model: nn.Module, spec: ForwardSpec, inputs: Inputs, expected: torch.Tensor) -> float:
    """How far losses are off with every document called by itself; infinite where it cannot be."""
    found = []
    try:
        for start, end in itertools.pairwise(inputs.boundaries.tolist()):
            found.append(token_losses(model, part_of(inputs, start, end), spec)[1].to(expected.dtype))
    except Exception:  # the model's own code, called as it may not expect
        return float("inf")
    return (torch.cat(found) - expected).abs().max().item()


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


def trial_inputs(vocabulary: int, device: torch.device, lengths: tuple[int, ...] = (7, 3, 12)) -> Inputs:
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


@torch.no_grad()
def _own_losses(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    """The losses by the model's own forward pass, one document at a time; float64 where the model is fp32."""
    losses = []
    bounds = inputs.boundaries.tolist()
    for start, end in itertools.pairwise(bounds):
        logits = model(input_ids=inputs.tokens[None, start:end], use_cache=False).logits[0]
        losses.append(F.cross_entropy(logits.float(), inputs.labels[start:end], reduction="none"))
    found = torch.cat(losses)
    return found.double() if next(model.parameters()).dtype == torch.float32 else found


def _slower(model: nn.Module, reasons: list[str], *, alone: bool = False) -> str:
    instead = "they are called one by one" if alone else "they are padded"
    missing = missing_kernels(model)
    advice = f" Its code has kernels of {listed(missing)}, not installed here, with which packing is tried, too."
    return (
        f"{type(model).__name__} does not take packed documents ({listed(reasons, '; ')}); {instead} instead, "
        f"which is right but slower.{advice if missing else ''}"
    )


def installed_kernels() -> list[str]:
    """Those of the libraries for what runs along tokens that are there: with others a model may be called otherwise."""
    return [package for package in KERNELS if importlib.util.find_spec(package) is not None]


def missing_kernels(model: nn.Module) -> list[str]:
    """Libraries for what runs along tokens that the model's code would use if they were there."""
    source = inspect.getsource(inspect.getmodule(type(model)) or type(model))
    return [
        name
        for package, name in KERNELS.items()
        if re.search(rf"[\"']({package}|{name})[\"']", source) and package not in installed_kernels()
    ]
