"""From packed documents to the loss of their target tokens: the one way models are called, in training and evaluation.

Two layouts. `packed`: documents end to end in one row, with attention that keeps them apart; nothing is padded.
`padded`: one document a row with the model's own attention, for architectures that cannot do the first. `settle`
tries them on the model at hand and compares with the model's own plain forward pass, so that an architecture
nobody has seen is either computed rightly or refused.

Legend: T tokens, N target tokens, D documents, H hidden, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import record_function

from tunesmith.errors import UserError
from tunesmith.kernels.linear_cross_entropy import Turned, chunk_bytes, linear_cross_entropy
from tunesmith.model.attention import NAME as PACKED_ATTENTION
from tunesmith.model.attention import NotPackable
from tunesmith.model.local import local

Layout = Literal["packed", "padded"]


class Documents(Protocol):
    """What is needed of a micro-batch; `data.types.MicroBatch` is one."""

    tokens: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    positions: torch.Tensor
    boundaries: torch.Tensor
    longest: int


@dataclass(frozen=True, slots=True)
class Inputs:
    """A micro-batch on the device. Which positions are targets was settled on the host, so nothing waits for it."""

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
    """int32 [2, P+1]: which keys those queries see; None where they are their own"""


@dataclass(frozen=True, slots=True)
class Calling:
    """How this model is called, as `settle` found it."""

    layout: Layout
    logit_scale: float = 1.0
    softcap: float | None = None


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
    pieces = getattr(batch, "pieces", None)
    keys = None
    if pieces is not None:
        boundaries, keys = pieces.queries, move(pieces.keys)
        torch._dynamo.maybe_mark_dynamic(keys, 1)
    elif shape is not None:
        longest = shape.longest
        tokens, positions, boundaries = filled(batch, shape.tokens, longest)
    boundaries = move(boundaries)
    if shape is not None or pieces is not None:
        torch._dynamo.maybe_mark_dynamic(boundaries, boundaries.ndim - 1)
    return Inputs(
        tokens=move(tokens),
        positions=move(positions),
        boundaries=boundaries,
        longest=longest,
        rows=move(rows),
        labels=move(batch.labels[rows]),
        weights=move(batch.weights[rows]),
        keys=keys,
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
        return self.model.base_model

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.model, *arguments)


def token_losses(
    model: nn.Module, inputs: Inputs, calling: Calling, z_loss: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted sum of the target tokens' losses (with `z_loss`), to call backward on, and the loss of each target
    [N] (without)."""
    if isinstance(model, Entrance):
        return model(token_losses, inputs, calling, z_loss)
    with record_function("forward"):
        hidden_th = hidden_states(model, inputs, calling)
    return losses_of_hidden(model, hidden_th, inputs, calling, z_loss)


def losses_of_hidden(
    model: nn.Module,
    hidden_th: torch.Tensor,
    inputs: Inputs,
    calling: Calling,
    z_loss: float = 0.0,
    room: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_losses` from what the output head sees; its logits may use `room` (`loss_bytes`)."""
    head = model.get_output_embeddings()
    with record_function("loss"):
        return linear_cross_entropy(
            hidden_th,
            local(head.weight),
            inputs.labels,
            inputs.weights,
            inputs.rows,
            bias_v=None if getattr(head, "bias", None) is None else local(head.bias),
            scale=calling.logit_scale,
            softcap=calling.softcap,
            z_loss=z_loss,
            part=getattr(head, "vocabulary", None),
            turned=_turned(head),
            room=room,
        )


def loss_bytes(model: nn.Module, tokens: int) -> int:
    """What logits take at a time, of a micro-batch of so many tokens on one rank."""
    head = model.get_output_embeddings()
    return chunk_bytes(tokens, head.weight, _turned(head))


def _turned(head: nn.Module) -> Turned | None:
    return Turned(head.values8_hw, head.scale_h1) if hasattr(head, "values8_hw") else None


def hidden_states(model: nn.Module, inputs: Inputs, calling: Calling) -> torch.Tensor:
    """What the output head sees, for every token: [T, H]."""
    if calling.layout == "packed":
        return packed_hidden_states(model, inputs).squeeze(0)
    documents = torch.repeat_interleave(
        torch.arange(inputs.boundaries.shape[0] - 1, device=inputs.tokens.device), inputs.boundaries.diff()
    )
    shape = (inputs.boundaries.shape[0] - 1, inputs.longest)
    tokens = inputs.tokens.new_zeros(shape)
    mask = inputs.tokens.new_zeros(shape)
    tokens[documents, inputs.positions] = inputs.tokens
    mask[documents, inputs.positions] = 1
    output = model.base_model(input_ids=tokens, attention_mask=mask, use_cache=False)
    return output[0][documents, inputs.positions]


def packed_hidden_states(model: nn.Module, inputs: Inputs, embedded: torch.Tensor | None = None) -> torch.Tensor:
    """The same as one row: [1, T, H]. `embedded` enters the layers in place of the tokens' embeddings."""
    entering = {"input_ids": inputs.tokens[None]} if embedded is None else {"inputs_embeds": embedded}
    return model.base_model(
        **entering,
        position_ids=inputs.positions[None],
        use_cache=False,
        cu_seq_lens_q=inputs.boundaries,
        cu_seq_lens_k=inputs.boundaries if inputs.keys is None else inputs.keys,
        max_length_q=inputs.longest,
        max_length_k=inputs.longest,
    )[0]


def settle(model: nn.Module, *, vocabulary: int, longest: int = 0) -> tuple[Calling, str | None]:
    """The fastest way of calling this model that gives what the model itself gives.

    `longest` is what training will give as the longest document, so that attention compiles no other kernels here.
    Returns it with a sentence when it is not the fastest there is. Leaves the model with the attention that the layout
    needs.
    """
    config = model.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    scale = getattr(config, "logit_scale", None) or 1.0
    if getattr(config, "logits_scaling", None):
        scale = 1.0 / config.logits_scaling
    inputs = trial_inputs(vocabulary, next(model.parameters()).device)
    was_training = model.training
    model.eval()
    own_attention = model.config._attn_implementation
    if own_attention == PACKED_ATTENTION:
        own_attention = "sdpa"
    try:
        model.set_attn_implementation(own_attention)
        expected = _own_losses(model, inputs)
        # In half precision a model's own losses on random tokens are off by some percent, whichever way it is called.
        is_exact = expected.dtype == torch.float64
        tolerance, leak = (1e-4, 1e-5) if is_exact else (0.05 * expected.abs().max().item(), 0.005)
        changed = inputs.tokens.clone()
        changed[:7] = (changed[:7] + 1) % vocabulary
        reasons = []
        for layout, attention in (("packed", PACKED_ATTENTION), ("padded", own_attention)):
            calling = Calling(layout, scale, softcap)
            given = replace(inputs, longest=max(longest, inputs.longest)) if layout == "packed" else inputs
            try:
                model.set_attn_implementation(attention)
                with torch.no_grad():
                    found = token_losses(model, given, calling)[1].to(expected.dtype)
                    # In half precision rounding hides a small leak from the comparison above. What stands in the
                    # first document must not reach the others at all, whatever the precision.
                    others = token_losses(model, replace(given, tokens=changed), calling)[1]
            except (NotPackable, TypeError, ValueError, RuntimeError) as error:
                reasons.append(f"{layout}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
                continue
            worst = (found - expected).abs().max().item()
            if worst > tolerance:
                reasons.append(f"{layout}: losses differ by {worst:.2g}")
                continue
            if (found[7:] - others.to(expected.dtype)[7:]).abs().max().item() > leak:
                reasons.append(f"{layout}: documents see each other")
                continue
            return calling, None if layout == "packed" else _slower(model, reasons)
    finally:
        model.train(was_training)
    raise UserError(
        f"{type(model).__name__} cannot be trained: calling it document by document does not give the model's own "
        f"results ({'; '.join(reasons)})."
    )


def trial_inputs(vocabulary: int, device: torch.device) -> Inputs:
    """Three short documents of varied tokens, every position a target."""
    lengths = (7, 3, 12)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (sum(lengths),), generator=generator)
    boundaries = torch.tensor([0, 7, 10, 22], dtype=torch.int32)
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


def _slower(model: nn.Module, reasons: list[str]) -> str:
    return (
        f"{type(model).__name__} does not take packed documents ({'; '.join(reasons)}); they are padded instead, "
        "which is right but slower."
    )
