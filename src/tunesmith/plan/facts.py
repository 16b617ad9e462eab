"""What planning needs to know of a model: sizes, not weights.

A model is described by the kinds of layers it has and which layer is of which kind. Where these sizes come from,
`families.py` (closed formulas over config.json) and `models.py` (a model built on the meta device) know.
"""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, Literal

from tunesmith.config.schema import Lora
from tunesmith.errors import UserError
from tunesmith.plan.plan import GATES, Gate, Part


class Linear(Part):
    """A matrix of a layer, or a stack of equal ones (experts)."""

    name: str
    """Within its layer, e.g. `mlp.up_proj`."""
    inputs: int
    outputs: int
    has_bias: bool = False
    count: int = 1
    """Matrices in the stack."""
    active: int = 1
    """Of these, how many one token passes through."""
    is_adaptable: bool = True
    """It is a linear module of its own, so LoRA can be put on it."""

    @property
    def parameters(self) -> int:
        return self.count * self.outputs * (self.inputs + self.has_bias)


KEPT_RANK = 8
"""Of the adapters with which `Kept` was counted."""


class Kept(Part):
    """What a layer keeps for backward, in bytes for each token, as the probe has counted it."""

    full: int
    """With all weights trained."""
    adapters: int
    """With adapters of rank `KEPT_RANK` on all its linears."""
    width: int
    """Bytes of a value when it was counted."""
    is_compiled: bool


class Work(Part):
    """What the two passes of a layer that is run as it is take beside attention's own kernel, each for a token and for
    any number of them."""

    bytes: tuple[float, float]
    """Read and written by operators that memory bounds."""
    half: tuple[float, float]
    """Operations of matmuls in half precision."""
    full: tuple[float, float]
    """Operations of matmuls in fp32."""
    kernels: int


def terms(rows: float, read: float, written: float) -> tuple[float, ...]:
    """What the parts of an encoder-decoder grow with, on a micro-batch of so many padded rows that are read and
    written: tokens, pairs of them that attention looks at, and nothing."""
    return rows * read, rows * written, rows * read * read, rows * written * written, rows * read * written, 1.0


class Rows(Part):
    """A sum over a micro-batch of an encoder-decoder: how much for each of `terms`."""

    terms: tuple[float, ...]

    def __call__(self, rows: float, read: float, written: float) -> float:
        return self.of(terms(rows, read, written))

    def of(self, terms: Iterable[float]) -> float:
        return sum(map(operator.mul, self.terms, terms))


class PairedWork(Part):
    """What a micro-batch of an encoder-decoder takes, as its own code does (`model.paired`)."""

    kept: Rows
    """Bytes for the backward pass, of all layers and what surrounds them."""
    layer: Rows
    """Bytes for the backward pass, of the largest layer."""
    workspace: Rows
    """Bytes that exist besides at the worst moment of the backward pass, but for gradients of weights."""
    bytes: Rows
    half: Rows
    full: Rows
    """As `Work` has them, with the weights' own matmuls."""
    attention: Rows
    """Operations of attention's own kernel, both passes."""
    kernels: Rows
    width: int


class KeptByOwn(Part):
    """The same with adapters of the run's own kind, where the planner has no formula for them."""

    bytes: int
    fixed: int = 0
    """For any number of tokens: what a method makes of the weights in each pass."""
    width: int
    is_compiled: bool


class StateSpace(Part):
    """Of a layer with a Mamba-2 mixer."""

    heads: int
    inner: int
    """Width over all heads."""
    state: int
    """Size of the state, for each number of the width."""
    channels: int
    """Of the convolution before it."""


class Layer(Part):
    """One kind of layer."""

    prefix: str
    """Where such layers live in the model, e.g. `model.layers`."""
    linears: tuple[Linear, ...]
    other: int
    """Parameters of norms and other small things."""
    query: int
    """Width of the queries over all heads."""
    key: int
    """Width of the keys (and of the values) over all heads."""
    intermediate: int
    """Width of the MLP as one token sees it: summed over its experts."""
    window: int | None = None
    """Sliding attention: how far back a token looks."""
    chunk: int | None = None
    """Attention in chunks of so many tokens."""
    head_dim: int | None = None
    """Of queries and keys, where it is not the model's `head_dim`."""
    value_dim: int | None = None
    """Size of a head of the values, where it is another (MLA)."""
    is_soft_capped: bool = False
    """Attention scores are, as Gemma 2's."""
    has_sinks: bool = False
    """Attention sinks, as gpt-oss has them."""
    has_alibi: bool = False
    state_space: StateSpace | None = None
    norms: int = 2
    """Norms whose result goes into matmuls."""
    bare_inputs: int = 0
    """What goes into matmuls with no norm before it, where norms come after (OLMo 2)."""
    post_norms: int = 0
    """Norms whose result goes into a residual sum."""
    norm: Literal["rms", "wide", "centered", "layer"] = "rms"
    """RMS norms, those that also multiply in fp32 (Gemma), layer norms in plain operations (Cohere), or torch's."""
    has_qk_norm: bool = False
    is_qkv_fused: bool = False
    """Queries, keys and values are one linear of the model's own."""
    is_rotated: bool = True
    """Queries and keys are rotated by their positions (RoPE), which makes new tensors of them."""
    is_rope_fused: bool = False
    """A kernel of ours rotates queries and keys (`model.rotary`)."""
    is_parallel: bool = False
    """Attention and MLP read the same input."""
    is_gated: bool = True
    """The MLP multiplies two of its linears' outputs, `act(gate(x)) * up(x)`."""
    mlp_values: int = 4
    """Values of the intermediate width that the MLP's activation and matmuls keep for backward, run eagerly."""
    gate: Gate | None = None
    """Of an MLP `down(act(gate(x)) * up(x))` with gate and up in two linears or one, whose activation kernels of ours
    compute again (`model.gated`)."""
    kept: Kept | None = None
    """None: what layers of this structure keep, by `plan.activations`."""
    kept_by_own: KeptByOwn | None = None
    work: Work | None = None
    """Of layers that run as they are, on a GPU, where it was counted."""
    copies: int = 0
    """MoE models: how often a token's hidden state is copied, once for each of its experts."""
    has_early_weights: bool = False
    """MoE models: tokens are weighted before the last matmul of their experts (`model.experts`)."""
    shared: int = 0
    """Of the `intermediate` width, that of an expert through which every token passes, behind a gate of its own."""
    dropouts: int = 0
    """Dropouts of hidden states: each remembers which values it has dropped."""

    @cached_property
    def parameters(self) -> int:
        return sum(linear.parameters for linear in self.linears) + self.other

    @cached_property
    def matrices(self) -> int:
        """Parameters of all matrices: what quantization shrinks and sharding gathers."""
        return sum(linear.count * linear.inputs * linear.outputs for linear in self.linears)

    @cached_property
    def active(self) -> int:
        """Parameters of the matrices one token passes through."""
        return sum(linear.active * linear.inputs * linear.outputs for linear in self.linears)

    @cached_property
    def adaptable(self) -> tuple[int, int]:
        """Inputs and outputs of all adaptable linears, summed."""
        linears = [linear for linear in self.linears if linear.is_adaptable]
        return sum(linear.inputs for linear in linears), sum(linear.outputs for linear in linears)

    @property
    def widths(self) -> int:
        return sum(self.adaptable)


class ModelFacts(Part):
    architecture: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    """The output head is the embedding."""
    positions: int | None
    """Longest sequence the model was made for, where known."""
    kinds: tuple[Layer, ...]
    pattern: tuple[int, ...]
    """The kind of each layer, in order."""
    extra: int = 0
    """Parameters outside layers, embedding and head: final norm, learned positions, a vision tower."""
    head_bias: bool = False
    has_head: bool = True
    has_fused_attention: bool = True
    """Kernels do its attention, as far as these have what its layers ask for (`plan.attention`)."""
    wrong_paths: tuple[str, ...] = ()
    """Paths of its attention that the probe has found to fail on this GPU, or to be wrong."""
    packs: bool = True
    """Documents can lie end to end; else they are padded, one a row."""
    runs_along: bool = False
    """Something besides attention runs along the tokens of a packed document: a convolution, a state space."""
    scan: Literal["ours", "mamba-ssm"] | None = None
    """By what state spaces run along packed documents, as the probe has found."""
    reuses_weights: bool = False
    """A forward pass uses some weights more than once, as the probe has found."""
    has_router_loss: bool = False
    """The load-balancing loss of its routers is asked for, by the settings or by its config."""
    is_causal: bool = True
    """A decoder alone; an encoder-decoder of which nothing was counted is planned as if every token passed through both
    its stacks, which is more than happens."""
    paired: PairedWork | None = None
    """Of an encoder-decoder, where it was counted."""
    note: str | None = None
    """What is not certain about these facts; plans then keep a larger margin."""
    adapter: int | None = None
    """Parameters that are trained with `method: peft`, counted on the model's modules."""
    teacher: ModelFacts | None = None
    """Of the model that this one learns from, with `objective: distill`."""

    def with_findings(
        self,
        kernels: tuple[str, ...] | None,
        kept: tuple[Kept, ...] | None,
        own: tuple[KeptByOwn, ...] | None = None,
        work: tuple[Work, ...] | None = None,
    ) -> ModelFacts:
        """With what the probe has found of its layers, if it has; counts are for architectures, and for adapters (those
        of the run's `own` kind), that have no formula here. `work`: of layers that are not compiled."""
        kinds = []
        for index, kind in enumerate(self.kinds):
            findings: dict[str, Any] = {}
            if kernels is not None:
                has_gate = not kind.copies or kind.shared
                gate = next((gate for gate in GATES if gate in kernels), None) if has_gate else None
                # Of a known family some layers may have no positions, and so nothing to rotate.
                is_rope_fused = "rope" in kernels and (kind.is_rope_fused or self.note is not None)
                findings = {"is_rope_fused": is_rope_fused, "gate": gate, "has_early_weights": "experts" in kernels}
            if self.note is not None and kept is not None and len(kept) == self.layers:
                findings["kept"] = kept[self.pattern.index(index)]
            if own is not None and len(own) == self.layers:
                of_kind = [counted for counted, at in zip(own, self.pattern, strict=True) if at == index]
                findings["kept_by_own"] = of_kind[0].changed(  # in the mean, since not every layer has an adapter
                    bytes=sum(counted.bytes for counted in of_kind) // len(of_kind),
                    fixed=sum(counted.fixed for counted in of_kind) // len(of_kind),
                )
            if work is not None and len(work) == self.layers:
                findings["work"] = _mean(
                    [counted for counted, at in zip(work, self.pattern, strict=True) if at == index]
                )
            kinds.append(kind.changed(**findings))
        note = self.note if any(kind.kept is None for kind in kinds) else None
        return self.changed(kinds=tuple(kinds), note=note)

    @property
    def layers(self) -> int:
        return len(self.pattern)

    @cached_property
    def counts(self) -> tuple[tuple[Layer, int], ...]:
        """Each kind with how many layers are of it."""
        return tuple((kind, self.pattern.count(index)) for index, kind in enumerate(self.kinds))

    def total(self, of: Callable[[Layer], float]) -> float:
        """A figure summed over all layers."""
        return sum(count * of(kind) for kind, count in self.counts)

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def head(self) -> int:
        """Parameters of the output head that are not the embedding's."""
        if not self.has_head:
            return 0
        return (0 if self.tied else self.embedding) + self.head_bias * self.vocabulary

    @cached_property
    def parameters(self) -> int:
        return int(self.total(lambda kind: kind.parameters)) + self.embedding + self.head + self.extra

    @cached_property
    def by_kind(self) -> dict[str, int]:
        """Parameters by what they are for; they add up to `parameters`."""

        def part(choose: Callable[[Linear], bool]) -> int:
            return int(self.total(lambda kind: sum(linear.parameters for linear in kind.linears if choose(linear))))

        experts = part(lambda linear: linear.count > 1)
        attention = part(lambda linear: linear.count == 1 and is_attention(linear.name))
        return {
            "embedding": self.embedding,
            "attention": attention,
            "mlp": part(lambda linear: True) - experts - attention,
            "experts": experts,
            "head": self.head,
            "norms and other": int(self.total(lambda kind: kind.other)) + self.extra,
        }

    @cached_property
    def matrices(self) -> int:
        return int(self.total(lambda kind: kind.matrices))

    @cached_property
    def active(self) -> int:
        """Parameters of the matrices one token passes through, without embedding and head."""
        return int(self.total(lambda kind: kind.active))

    @cached_property
    def largest_layer(self) -> int:
        """Parameters of the largest unit that sharding gathers at a time."""
        return max(max(kind.parameters for kind in self.kinds), self.embedding)

    def attention_flops(self, length: int) -> float:
        """Of one token's forward pass, in all layers, averaged over a document of `length` tokens."""
        return self.total(lambda kind: self.layer_attention_flops(kind, length))

    def tokens_seen(self, kind: Layer, length: int) -> float:
        """By one token of a document, on average: token i looks at min(i + 1, window) of them."""
        if kind.chunk is not None and kind.chunk < length:
            return (kind.chunk + 1) / 2
        window = kind.window or length
        return (length + 1) / 2 if window >= length else window - window * (window - 1) / 2 / length

    def layer_attention_flops(self, kind: Layer, length: int) -> float:
        width = kind.query
        if kind.head_dim is not None or kind.value_dim is not None:
            head_dim = kind.head_dim or self.head_dim
            width = self.heads * (head_dim + (kind.value_dim or head_dim)) / 2
        return 4 * width * self.tokens_seen(kind, length)

    def adapted(self, settings: Lora) -> tuple[int, int]:
        """Parameters of the adapters, and the summed inputs and outputs of the linears that carry them."""
        if settings.targets == "all-linear" and settings.layers is None:
            inputs, outputs = (int(self.total(lambda kind, at=at: kind.adaptable[at])) for at in (0, 1))
        else:
            layers = None if settings.layers is None else choose_layers(settings.layers, self.layers)
            chosen = [
                linear
                for layer, name, linear in self._named_linears()
                if (layers is None or layer in layers)
                and (settings.targets == "all-linear" or any(matches(name, pattern) for pattern in settings.targets))
            ]
            inputs, outputs = sum(linear.inputs for linear in chosen), sum(linear.outputs for linear in chosen)
            ends = [pattern for pattern in settings.targets if _is_end(pattern)] if layers is None else []
            inputs, outputs = inputs + len(ends) * self.hidden, outputs + len(ends) * self.vocabulary
        lengths = outputs if settings.dora else 0
        return settings.rank * (inputs + outputs) + lengths, inputs + outputs

    def layers_with_backward(self, settings: Lora) -> int:
        """Layers that the backward pass of adapters goes through: from the lowest adapted one to the top."""
        if settings.layers is None:
            return self.layers
        return self.layers - min(choose_layers(settings.layers, self.layers))

    def _named_linears(self) -> Iterator[tuple[int, str, Linear]]:
        for index, kind in enumerate(self.pattern):
            layer = self.kinds[kind]
            for linear in layer.linears:
                if linear.is_adaptable:
                    yield index, f"{layer.prefix}.{index}.{linear.name}", linear


def _mean(works: list[Work]) -> Work:
    def of(name: str) -> tuple[float, float]:
        first, second = (sum(pair) / len(works) for pair in zip(*(getattr(work, name) for work in works), strict=True))
        return first, second

    kernels = sum(work.kernels for work in works) // len(works)
    return Work(bytes=of("bytes"), half=of("half"), full=of("full"), kernels=kernels)


def matches(name: str, pattern: str) -> bool:
    """A plain word is the end of a module's name; stars and brackets make it a glob over the end of the name."""
    return name == pattern or name.endswith("." + pattern) or fnmatch.fnmatchcase("." + name, "*." + pattern)


def choose_layers(text: str, count: int) -> frozenset[int]:
    """`top 8`, `bottom 4`, `0-7`, `3,5,7` as layer numbers of a model with `count` layers."""
    wanted: set[int] = set()
    for part in text.split(","):
        words = re.fullmatch(r"\s*(?:(top|bottom)\s+(\d+)|(\d+)\s*-\s*(\d+)|(\d+))\s*", part)
        if words is None:
            raise UserError(f"lora.layers: '{text}' is not understood; write `top 8`, `bottom 4`, `0-7` or `3,5,7`.")
        side, number, first, last, single = words.groups()
        if side == "top":
            wanted |= set(range(max(0, count - int(number)), count))
        elif side == "bottom":
            wanted |= set(range(min(int(number), count)))
        elif single is not None:
            wanted.add(int(single))
        else:
            wanted |= set(range(int(first), min(int(last), count) + 1))
    outside = sorted(layer for layer in wanted if layer >= count)
    if outside or not wanted:
        named = outside[0] if outside else text
        raise UserError(f"lora.layers: there is no layer {named}; the model's layers are 0 to {count - 1}.")
    return frozenset(wanted)


def _is_end(pattern: str) -> bool:
    """Whether it names an embedding or an output head, as models usually call them."""
    last = pattern.rpartition(".")[2]
    return last in {"embed_tokens", "wte", "word_embeddings", "embed_in", "lm_head", "embed_out", "output"}


def is_attention(name: str) -> bool:
    return name.split(".")[0].lower() in {"self_attn", "attn", "attention", "self_attention"} or "Attention" in name
