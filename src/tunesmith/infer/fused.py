"""A decoding step of one or a few rows by kernels of our own (`kernels.decode`), from the token to the next one.

Which models this is for is found by what their layers compute, not by their names: attention with rotary positions, a
gated MLP, an RMS norm before each. Every layer is tried against the model's own before it is used; a layer of another
kind, or one whose linears are adapted or quantized, leaves the whole model to the compiler.

Legend: B rows, C columns, D head dim, K hidden size, N outputs, V tokens of the vocabulary.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tunesmith.errors import first_line
from tunesmith.kernels.gating import Gating
from tunesmith.model.gated import find_gated
from tunesmith.model.norms import RmsNorm, find_rms_norm
from tunesmith.model.rotary import NORMS, OUT, SEPARATE, attention_form
from tunesmith.model.structure import body, decoder_layers

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Those whose angles do not depend on how long the text is."""
PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
TRIED, BOUND = 5, 2e-2
"""Tokens that a layer is tried with, and how far it may be from the model's own, relative to what it adds."""
log = logging.getLogger("tunesmith.infer")
Pair = tuple[torch.Tensor, torch.Tensor]


class NotFusedError(RuntimeError):
    """The kernels are none for this model, or this GPU."""


@dataclass(frozen=True)
class Layer:
    """Weights of one layer, and what is done with them."""

    norm: RmsNorm
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    qkv_bias: torch.Tensor | None
    head_norms: tuple[RmsNorm, RmsNorm] | None
    size: int
    """Of a head."""
    scaling: float
    window: int | None
    out: nn.Linear
    mlp_norm: RmsNorm
    gate: nn.Linear
    up: nn.Linear
    gating: Gating
    down: nn.Linear


@dataclass(frozen=True)
class Room:
    """What a step of B rows and C columns writes: the same memory every time."""

    x_bk: torch.Tensor
    qkv_bn: torch.Tensor
    attended_bn: torch.Tensor
    gated_bn: torch.Tensor
    logits_bv: torch.Tensor
    largest_bp: torch.Tensor
    places_bp: torch.Tensor
    chosen_b: torch.Tensor
    turns: Pair
    scratch: Any


class FusedModel:
    """A model's weights for such steps. `way`: how kernels are launched (`kernels.decode.Way`)."""

    def __init__(self, model: nn.Module, layers: Sequence[Layer], final: RmsNorm, way: Any):
        self.layers, self.final, self.way = layers, final, way
        self.is_known_fast = False
        """Nobody has to time a step against one of compiled layers any more."""
        self.embedding, self.head = model.get_input_embeddings(), model.get_output_embeddings()
        self.rotary = body(model).rotary_emb

    def room(self, rows: int, columns: int) -> Room:
        from tunesmith.kernels.decode import Scratch, head_programs

        first, head = self.layers[0], self.head.weight
        like = head.new_empty(0)
        heads = first.out.in_features // first.size
        programs = head_programs(*head.shape, self.way)
        positions = torch.arange(columns, device=head.device)[None]
        cos, sin = self.rotary(like.new_empty(1, 1, head.shape[1]), positions)
        return Room(
            like.new_empty(rows, head.shape[1]),
            like.new_empty(rows, sum(one.shape[0] for one in first.qkv)),
            like.new_empty(rows, first.out.in_features),
            like.new_empty(rows, first.down.in_features),
            like.new_empty(rows, head.shape[0]),
            like.new_empty(rows, programs, dtype=torch.float32),
            like.new_empty(rows, programs, dtype=torch.int32),
            torch.zeros(rows, dtype=torch.int64, device=head.device),
            (cos[0].contiguous(), sin[0].contiguous()),
            Scratch.make(rows, heads, first.size, columns, head.device, self.way),
        )

    def run(
        self, tokens_b1: torch.Tensor, positions_b1: torch.Tensor, at: torch.Tensor, pairs: Sequence[Pair], room: Room
    ) -> torch.Tensor:
        """The logits [B, V]; the likeliest tokens are `chosen_b` of the room and the next ones to be read, and rows are
        a column further."""
        from tunesmith.kernels.decode import norm_head, take_largest

        try:
            self._embed(tokens_b1[:, 0], room.x_bk)
            for layer, pair in zip(self.layers, pairs, strict=True):
                self.run_layer(layer, (positions_b1, at), pair, room)
            head = (self.head.weight, self.head.bias)
            norm_head(room.x_bk, self.final, *head, room.logits_bv, room.largest_bp, room.places_bp, self.way)
            places = (room.largest_bp, room.places_bp)
            take_largest(*places, room.chosen_b, tokens_b1, positions_b1, at, self.way)
        except Exception as error:  # of Triton: what it raises has no common kind
            raise NotFusedError(first_line(error)) from error
        return room.logits_bv

    def _embed(self, tokens_b: torch.Tensor, x_bk: torch.Tensor) -> None:
        if type(self.embedding) is nn.Embedding:
            torch.index_select(self.embedding.weight, 0, tokens_b, out=x_bk)
        else:  # some scale what they look up
            x_bk.copy_(self.embedding(tokens_b))

    def run_layer(self, layer: Layer, places: Pair, pair: Pair, room: Room) -> None:
        """Five kernels: the hidden states of the room are those after the layer then."""
        from tunesmith.kernels.decode import attend, norm_gated, norm_products, products_added

        x_bk, way = room.x_bk, self.way
        norm_products(x_bk, layer.norm, layer.qkv, layer.qkv_bias, room.qkv_bn, way)
        attend(
            room.qkv_bn, places, room.turns, layer.head_norms, *pair, room.attended_bn, room.scratch,
            layer.scaling, layer.window, way,
        )  # fmt: skip
        products_added(room.attended_bn, layer.out.weight, layer.out.bias, x_bk, way.out, way)
        biases = None if layer.gate.bias is None else (layer.gate.bias, layer.up.bias)
        weights = (layer.gate.weight, layer.up.weight)
        norm_gated(x_bk, layer.mlp_norm, *weights, biases, layer.gating, room.gated_bn, way)
        products_added(room.gated_bn, layer.down.weight, layer.down.bias, x_bk, way.down, way)


@torch.inference_mode()
def fused(model: nn.Module, way: Any = None) -> FusedModel | None:
    """None where the model has other parts than these kernels compute, or they compute something else; without a `way`
    also where they cannot be fast."""
    if not _can_run(model):
        return None
    final = find_rms_norm(getattr(body(model), "norm", None))
    layers = [one for layer in decoder_layers(model) if (one := _found(layer)) is not None]
    if (
        final is None
        or len(layers) < len(decoder_layers(model))
        or not _are_alike(layers)
        or not _has_plain_ends(model)
    ):
        log.info("decoding steps are not made of our own kernels: its layers are of another kind")
        return None
    from tunesmith.kernels.decode import Way

    if way is None and not _can_be_fast(model):
        return None
    made = FusedModel(model, layers, final, way or Way(overlaps=True))
    made.is_known_fast = way is not None or _is_timed(model, layers)
    try:
        worst = max(_difference(made, own, one) for own, one in zip(decoder_layers(model), layers, strict=True))
    except Exception as error:  # of Triton, or of a layer called in a way that it does not expect
        log.info("decoding steps are not made of our own kernels (%s)", first_line(error))
        return None
    if not worst <= 1:
        log.info(
            "decoding steps are not made of our own kernels: a layer differs by %.2g times what rounding does", worst
        )
    return made if worst <= 1 else None


def _can_run(model: nn.Module) -> bool:
    """All weights plain and of one kind, where Triton runs: on a GPU, or in its interpreter."""
    first = next(model.parameters())
    is_there = first.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return is_there and all(
        type(one.data) is torch.Tensor and one.dtype == first.dtype and one.is_contiguous()
        for one in model.parameters()
    )


def _can_be_fast(model: Any) -> bool:
    """In half precision, on a GPU where kernels can overlap."""
    from tunesmith.kernels.decode import can_overlap

    weight = model.get_output_embeddings().weight
    return can_overlap(weight.device) and weight.dtype in (torch.bfloat16, torch.float16)


def _is_timed(model: Any, layers: Sequence[Layer]) -> bool:
    """What the kernels were faster than the compiler with by far: weights whose rows a program takes whole."""
    from tunesmith.kernels.decode import LARGEST

    widths = {model.get_output_embeddings().weight.shape[1]}
    widths |= {one.in_features for layer in layers for one in (layer.out, layer.down)}
    return all(width & (width - 1) == 0 and width <= LARGEST for width in widths)


def _has_plain_ends(model: Any) -> bool:
    """The output head, and the rotary positions."""
    rotary = getattr(body(model), "rotary_emb", None)
    return type(model.get_output_embeddings()) is nn.Linear and getattr(rotary, "rope_type", None) in ROPE_TYPES


def _are_alike(layers: Sequence[Layer]) -> bool:
    """Of the same sizes, so that they share their room."""
    kinds = {(one.size, one.gate.out_features, *(weight.shape for weight in one.qkv)) for one in layers}
    return len(kinds) == 1


def _found(layer: nn.Module) -> Layer | None:
    children = dict(layer.named_children())
    if children.keys() != PARTS or any(True for _ in layer.parameters(recurse=False)):
        return None
    attention, mlp = children["self_attn"], children["mlp"]
    norms = [find_rms_norm(children[name]) for name in ("input_layernorm", "post_attention_layernorm")]
    weight = next(layer.parameters())
    form, gated = attention_form(attention, weight.dtype, weight.device), find_gated(mlp)
    if form is None or not form.is_plain or form.rotated != attention.head_dim or form.options.get("softcap"):
        return None
    if gated is None or len(gated.first) != 2 or None in norms:
        return None
    head_norms = [find_rms_norm(getattr(attention, name)) for name in NORMS if hasattr(attention, name)]
    linears = [getattr(attention, name) for name in (*SEPARATE, OUT)]
    linears += [mlp.get_submodule(name) for name in gated.names]
    if any(type(one) is not nn.Linear for one in linears) or None in head_norms:
        return None
    q, k, v, out, gate, up, down = linears
    biases = [one.bias for one in (q, k, v)]
    has_some = {one is None for one in biases} == {True, False} or (gate.bias is None) != (up.bias is None)
    size = attention.head_dim
    if has_some or q.out_features % size or k.out_features % size or k.out_features != v.out_features or size % 2:
        return None
    return Layer(
        norm=norms[0], qkv=(q.weight, k.weight, v.weight), qkv_bias=None if biases[0] is None else torch.cat(biases),
        head_norms=tuple(head_norms) or None, size=size, scaling=form.options.get("scaling") or size**-0.5,
        window=form.options.get("sliding_window"), out=out, mlp_norm=norms[1], gate=gate, up=up, gating=gated.gating,
        down=down,
    )  # fmt: skip


def _difference(made: FusedModel, own: nn.Module, layer: Layer) -> float:
    """A few tokens, one after the other, against the model's own layer, which reads them all: how far they are apart,
    over how far they may be."""
    weight = made.head.weight
    columns = TRIED + 2
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(1, TRIED, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
    room = made.room(1, columns)
    angles = made.rotary(given, torch.arange(TRIED, device=weight.device)[None])
    takes = inspect.signature(own.forward).parameters
    options = {"position_ids": torch.arange(TRIED, device=weight.device)[None]} if "position_ids" in takes else {}
    expected = own(given, position_embeddings=angles, attention_mask=None, **options)
    expected = expected[0] if isinstance(expected, tuple) else expected
    cache = weight.new_zeros(2, 1, layer.qkv[1].shape[0] // layer.size, columns, layer.size)
    found = []
    for place in range(TRIED):
        room.x_bk.copy_(given[:, place])
        at = torch.tensor([place], device=weight.device)
        made.run_layer(layer, (at, at.clone()), (cache[0], cache[1]), room)
        found.append(room.x_bk.clone())
    seen = slice(0, min(TRIED, layer.window or TRIED))  # the model's own sees beyond its window where it has no mask
    found, expected, given = (one[0, seen].float() for one in (torch.stack(found, 1), expected, given))
    allowed = BOUND * (expected - given).norm() + torch.finfo(weight.dtype).eps * expected.norm()
    return float((found - expected).norm() / allowed)
