"""What planning needs to know of a model, from its config.json alone: sizes, not weights.

Families that are known have closed formulas, which tests hold against the model built on the meta device. For other
architectures `models.read_facts` builds that meta model; `from_config` alone takes them for the usual gated decoder
and says so. A model is described by the kinds of layers it has and which layer is of which kind.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, Literal

from tunesmith.config.schema import Lora
from tunesmith.errors import UserError
from tunesmith.plan.plan import Part

LARGEST = 10**14
MOST_LAYERS = 10_000
"""Parameters and layers beyond which a config is a mistake, not a model."""


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
    norms: int = 2
    """Norms whose result goes into products."""
    post_norms: int = 0
    """Norms whose result goes into a residual sum."""
    norm: Literal["rms", "wide", "layer"] = "rms"
    """RMS norms, those that also multiply in fp32 (Gemma), or layer norms."""
    has_qk_norm: bool = False
    is_qkv_fused: bool = False
    is_parallel: bool = False
    """Attention and MLP read the same input."""
    mlp_values: int = 4
    """Values of the intermediate width that the MLP's activation and products keep for backward, run eagerly."""
    is_swiglu: bool = False
    """The MLP is `down(silu(gate(x)) * up(x))` of three linears, whose activation can be made again."""
    copies: int = 0
    """Mixtures: how often a token's hidden state is copied, once for each of its experts."""

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
    """Kernels do its attention; soft-capped scores are computed in full."""
    packs: bool = True
    """Documents can lie end to end; else they are padded, one a row."""
    is_causal: bool = True
    """A decoder alone; encoder-decoder models are known but cannot be trained."""
    note: str | None = None
    """What is not certain about these facts; plans then keep a larger margin."""

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
            return int(self.total(lambda kind: sum(one.parameters for one in kind.linears if choose(one))))

        experts = part(lambda one: one.count > 1)
        attention = part(lambda one: one.count == 1 and _is_attention(one.name))
        return {
            "embedding": self.embedding,
            "attention": attention,
            "mlp": part(lambda one: True) - experts - attention,
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

        def of(kind: Layer) -> float:
            window = kind.window or length
            # Token i looks at min(i + 1, window) others.
            seen = (length + 1) / 2 if window >= length else window - window * (window - 1) / 2 / length
            return 4 * kind.query * seen

        return self.total(of)

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


def from_config(config: Mapping[str, Any]) -> ModelFacts:
    """Facts from the contents of config.json; without a formula, those of a decoder of these sizes, with a note."""
    family = family_of(config)
    if family in FAMILIES:
        return _checked(FAMILIES[family](_Config(config)))
    text = config.get("text_config")
    merged = {**config, **text} if isinstance(text, Mapping) else dict(config)
    inner = family_of({"model_type": merged.get("model_type")})
    facts = _checked(FAMILIES.get(inner or "llama", _llama)(_Config(merged)))
    architecture = architecture_of(config)
    note = f"{architecture} has no formula here; its sizes are taken for those of the usual decoder"
    return facts.changed(architecture=architecture, note=note)


def family_of(config: Mapping[str, Any]) -> str | None:
    """The family whose formula applies: `model_type`, or what the architecture's name says where that is missing."""
    name = config.get("model_type")
    if not isinstance(name, str):
        words = re.sub(r"(ForCausalLM|LMHeadModel|Model|ForConditionalGeneration)$", "", architecture_of(config))
        name = {"gptneox": "gpt_neox", "gemma3": "gemma3_text", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}.get(
            words.lower(), words.lower()
        )
    return name if name in FAMILIES and "text_config" not in config else None


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


# the families


class _Config:
    """A config.json with names that differ between families, and defaults where files of old leave a key out."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = values
        self.hidden = self.number("hidden_size", "n_embd", "d_model")
        self.layers = self.number("num_hidden_layers", "n_layer", "num_layers", "decoder_layers")
        if self.layers > MOST_LAYERS:
            raise UserError(f"its config.json has {self.layers:,} layers, which no model has; it is damaged.")
        self.heads = self.number("num_attention_heads", "n_head", "num_heads", default=max(1, self.hidden // 64))
        self.kv_heads = self.number("num_key_value_heads", default=self.heads)
        self.head_dim = self.number("head_dim", default=max(1, self.hidden // self.heads))
        self.intermediate = self.number(
            "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", default=4 * self.hidden
        )

    def number(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self.values.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
            if value is not None and not (value == 0 and default is not None):
                raise UserError(f"its config.json has {name}: {value!r}, which is no size.")
        if default is None:
            raise UserError(f"its config.json says nothing of {names[0]}.")
        return default

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        return default if value is None else bool(value)

    def facts(
        self, kinds: list[Layer], pattern: list[int] | None = None, *, tied: bool = False, **more: Any
    ) -> ModelFacts:
        positions = self.number("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", default=1 << 62)
        return ModelFacts(
            architecture=architecture_of(self.values),
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocabulary=self.number("vocab_size"),
            tied=self.flag("tie_word_embeddings", tied),
            positions=None if positions == 1 << 62 else positions,
            kinds=tuple(kinds),
            pattern=tuple(pattern if pattern is not None else [0] * self.layers),
            **{"extra": self.hidden, **more},
        )

    def layer(
        self,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        mlp_bias: bool = False,
        qk_norm: bool = False,
        post_norms: int = 0,
        norm: Literal["rms", "wide"] = "rms",
        window: int | None = None,
        mlp: tuple[Linear, ...] | None = None,
        intermediate: int | None = None,
        copies: int = 0,
    ) -> Layer:
        """The usual layer: q, k, v, o and a gated MLP (or the `mlp` given)."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = (
            Linear(name="self_attn.q_proj", inputs=self.hidden, outputs=query, has_bias=qkv_bias),
            Linear(name="self_attn.k_proj", inputs=self.hidden, outputs=key, has_bias=qkv_bias),
            Linear(name="self_attn.v_proj", inputs=self.hidden, outputs=key, has_bias=qkv_bias),
            Linear(name="self_attn.o_proj", inputs=query, outputs=self.hidden, has_bias=out_bias),
        )
        return Layer(
            prefix="model.layers",
            linears=attention + (self.gated(self.intermediate, bias=mlp_bias) if mlp is None else mlp),
            other=(2 + post_norms) * self.hidden + (2 * self.head_dim if qk_norm else 0),
            query=query,
            key=key,
            intermediate=intermediate or self.intermediate,
            window=window,
            post_norms=post_norms,
            norm=norm,
            has_qk_norm=qk_norm,
            is_swiglu=mlp is None and norm == "rms" and self.values.get("hidden_act", "silu") in ("silu", "swish"),
            copies=copies,
        )

    def gated(self, width: int, *, bias: bool = False, at: str = "mlp") -> tuple[Linear, ...]:
        return (
            Linear(name=f"{at}.gate_proj", inputs=self.hidden, outputs=width, has_bias=bias),
            Linear(name=f"{at}.up_proj", inputs=self.hidden, outputs=width, has_bias=bias),
            Linear(name=f"{at}.down_proj", inputs=width, outputs=self.hidden, has_bias=bias),
        )

    def experts(self, count: int, active: int, width: int) -> tuple[Linear, ...]:
        """Stacks of matrices, and the router; none of them a linear module, so none carries an adapter."""
        stack = {"count": count, "active": active, "is_adaptable": False}
        return (
            Linear(name="mlp.gate", inputs=self.hidden, outputs=count, is_adaptable=False),
            Linear(name="mlp.experts.gate_up_proj", inputs=self.hidden, outputs=2 * width, **stack),
            Linear(name="mlp.experts.down_proj", inputs=width, outputs=self.hidden, **stack),
        )

    def windows(self, default: int | None, is_sliding: Callable[[int], bool]) -> list[int | None]:
        """The window of each layer, None where it sees everything; `layer_types` wins where the config has it."""
        window = self.values.get("sliding_window", default)
        types = self.values.get("layer_types")
        if isinstance(types, list) and len(types) == self.layers:
            sliding = [kind == "sliding_attention" for kind in types]
        else:
            sliding = [is_sliding(index) for index in range(self.layers)]
        return [window if one and isinstance(window, int) and window > 0 else None for one in sliding]


def _llama(c: _Config) -> ModelFacts:
    bias = c.flag("attention_bias")
    return c.facts([c.layer(qkv_bias=bias, out_bias=bias, mlp_bias=c.flag("mlp_bias"))])


def _mistral(c: _Config) -> ModelFacts:
    window = c.windows(4096, lambda _: True)[0]
    return c.facts([c.layer(window=window)])


def _qwen2(c: _Config) -> ModelFacts:
    return _windowed(c, _qwen_windows(c), qkv_bias=True)


def _qwen3(c: _Config) -> ModelFacts:
    bias = c.flag("attention_bias")
    c.head_dim = c.number("head_dim", default=128)
    return _windowed(c, _qwen_windows(c), qkv_bias=bias, out_bias=bias, qk_norm=True)


def _smollm3(c: _Config) -> ModelFacts:
    bias = c.flag("attention_bias")
    return c.facts([c.layer(qkv_bias=bias, out_bias=bias, mlp_bias=c.flag("mlp_bias"))], tied=True)


def _gemma(c: _Config) -> ModelFacts:
    c.head_dim = c.number("head_dim", default=256)
    bias = c.flag("attention_bias")
    return c.facts([c.layer(qkv_bias=bias, out_bias=bias, norm="wide")], tied=True)


def _gemma2(c: _Config) -> ModelFacts:
    c.head_dim = c.number("head_dim", default=256)
    bias = c.flag("attention_bias")
    windows = c.windows(4096, lambda index: index % 2 == 0)
    capped = c.values.get("attn_logit_softcapping", 50.0) is not None
    return _windowed(
        c,
        windows,
        qkv_bias=bias,
        out_bias=bias,
        post_norms=2,
        norm="wide",
        facts={"tied": True, "has_fused_attention": not capped},
    )


def _gemma3(c: _Config) -> ModelFacts:
    c.head_dim = c.number("head_dim", default=256)
    bias = c.flag("attention_bias")
    every = c.number("sliding_window_pattern", "_sliding_window_pattern", default=6)
    windows = c.windows(4096, lambda index: (index + 1) % every != 0)
    return _windowed(
        c, windows, qkv_bias=bias, out_bias=bias, post_norms=2, norm="wide", qk_norm=True, facts={"tied": True}
    )


def _phi3(c: _Config) -> ModelFacts:
    plain = c.layer(window=c.windows(None, lambda _: True)[0])
    linears = (
        Linear(name="self_attn.qkv_proj", inputs=c.hidden, outputs=plain.query + 2 * plain.key),
        plain.linears[3],
        Linear(name="mlp.gate_up_proj", inputs=c.hidden, outputs=2 * c.intermediate),
        plain.linears[-1],
    )
    return c.facts([plain.changed(linears=linears, is_qkv_fused=True, is_swiglu=False)])


def _phi(c: _Config) -> ModelFacts:
    query, key = c.heads * c.head_dim, c.kv_heads * c.head_dim
    linears = (
        Linear(name="self_attn.q_proj", inputs=c.hidden, outputs=query, has_bias=True),
        Linear(name="self_attn.k_proj", inputs=c.hidden, outputs=key, has_bias=True),
        Linear(name="self_attn.v_proj", inputs=c.hidden, outputs=key, has_bias=True),
        Linear(name="self_attn.dense", inputs=query, outputs=c.hidden, has_bias=True),
        Linear(name="mlp.fc1", inputs=c.hidden, outputs=c.intermediate, has_bias=True),
        Linear(name="mlp.fc2", inputs=c.intermediate, outputs=c.hidden, has_bias=True),
    )
    other = 2 * c.hidden + (4 * c.head_dim if c.flag("qk_layernorm") else 0)
    layer = _plain_layer(c, "model.layers", linears, other, norms=1, is_parallel=True, mlp_values=5)
    return c.facts([layer], extra=2 * c.hidden, head_bias=True)


def _gpt2(c: _Config) -> ModelFacts:
    linears = (
        Linear(name="attn.c_attn", inputs=c.hidden, outputs=3 * c.hidden, has_bias=True),
        Linear(name="attn.c_proj", inputs=c.hidden, outputs=c.hidden, has_bias=True),
        Linear(name="mlp.c_fc", inputs=c.hidden, outputs=c.intermediate, has_bias=True),
        Linear(name="mlp.c_proj", inputs=c.intermediate, outputs=c.hidden, has_bias=True),
    )
    positions = c.number("n_positions", "max_position_embeddings", default=1024)
    layer = _plain_layer(c, "transformer.h", linears, 4 * c.hidden, is_qkv_fused=True, mlp_values=5)
    return c.facts([layer], tied=True, extra=(2 + positions) * c.hidden)


def _gpt_neox(c: _Config) -> ModelFacts:
    bias = c.flag("attention_bias", True)
    linears = (
        Linear(name="attention.query_key_value", inputs=c.hidden, outputs=3 * c.hidden, has_bias=bias),
        Linear(name="attention.dense", inputs=c.hidden, outputs=c.hidden, has_bias=bias),
        Linear(name="mlp.dense_h_to_4h", inputs=c.hidden, outputs=c.intermediate, has_bias=True),
        Linear(name="mlp.dense_4h_to_h", inputs=c.intermediate, outputs=c.hidden, has_bias=True),
    )
    is_parallel = c.flag("use_parallel_residual", True)
    layer = _plain_layer(c, "gpt_neox.layers", linears, 4 * c.hidden, is_qkv_fused=True, is_parallel=is_parallel)
    return c.facts([layer], extra=2 * c.hidden)


def _falcon(c: _Config) -> ModelFacts:
    is_new, bias = c.flag("new_decoder_architecture"), c.flag("bias")
    head_dim = c.hidden // c.heads
    if is_new:
        c.kv_heads = c.number("num_kv_heads", "n_head_kv", default=c.heads)
    else:
        c.kv_heads = 1 if c.flag("multi_query", True) else c.heads
    is_parallel = is_new or c.flag("parallel_attn", True)
    has_two = c.values.get("num_ln_in_parallel_attn") in (None, 2) if is_new else not is_parallel
    norms = 2 if has_two else 1
    linears = (
        Linear(
            name="self_attention.query_key_value",
            inputs=c.hidden,
            outputs=(c.heads + 2 * c.kv_heads) * head_dim,
            has_bias=bias,
        ),
        Linear(name="self_attention.dense", inputs=c.hidden, outputs=c.hidden, has_bias=bias),
        Linear(name="mlp.dense_h_to_4h", inputs=c.hidden, outputs=c.intermediate, has_bias=bias),
        Linear(name="mlp.dense_4h_to_h", inputs=c.intermediate, outputs=c.hidden, has_bias=bias),
    )
    other = 2 * norms * c.hidden
    layer = _plain_layer(c, "transformer.h", linears, other, norms=norms, is_qkv_fused=True, is_parallel=is_parallel)
    return c.facts([layer], tied=True, extra=2 * c.hidden, packs=False)


def _mixtral(c: _Config) -> ModelFacts:
    active = c.number("num_experts_per_tok", default=2)
    mlp = c.experts(c.number("num_local_experts", default=8), active, c.intermediate)
    window = c.windows(None, lambda _: True)[0]
    return c.facts([c.layer(window=window, mlp=mlp, intermediate=active * c.intermediate, copies=active)])


def _qwen_mixture(c: _Config, *, default_experts: int, default_active: int, shared: bool, **layer: Any) -> ModelFacts:
    """Layers with experts, and dense ones where the config says so."""
    width = c.number("moe_intermediate_size")
    active = c.number("num_experts_per_tok", default=default_active)
    mlp = c.experts(c.number("num_experts", "num_local_experts", default=default_experts), active, width)
    seen = active * width
    if shared:
        shared_width = c.number("shared_expert_intermediate_size", default=5632)
        gate = Linear(name="mlp.shared_expert_gate", inputs=c.hidden, outputs=1)
        mlp = (*mlp, *c.gated(shared_width, at="mlp.shared_expert"), gate)
        seen += shared_width
    kinds = [c.layer(mlp=mlp, intermediate=seen, copies=active, **layer), c.layer(**layer)]
    step, dense = c.number("decoder_sparse_step", default=1), c.values.get("mlp_only_layers") or []
    pattern = [1 if index in dense or (index + 1) % step else 0 for index in range(c.layers)]
    return c.facts(kinds, pattern)


def _qwen2_moe(c: _Config) -> ModelFacts:
    bias = c.flag("qkv_bias", True)
    return _qwen_mixture(c, default_experts=60, default_active=4, shared=True, qkv_bias=bias)


def _qwen3_moe(c: _Config) -> ModelFacts:
    bias = c.flag("attention_bias")
    return _qwen_mixture(
        c, default_experts=128, default_active=8, shared=False, qkv_bias=bias, out_bias=bias, qk_norm=True
    )


def _t5(c: _Config) -> ModelFacts:
    inner = c.heads * c.number("d_kv", default=64)
    c.head_dim = inner // c.heads
    is_gated = str(c.values.get("feed_forward_proj", "relu")).startswith("gated-")
    ups = ("wi_0", "wi_1") if is_gated else ("wi",)

    def attention(name: str) -> tuple[Linear, ...]:
        into = tuple(Linear(name=f"{name}.{one}", inputs=c.hidden, outputs=inner) for one in "qkv")
        return (*into, Linear(name=f"{name}.o", inputs=inner, outputs=c.hidden))

    def mlp(at: str) -> tuple[Linear, ...]:
        into = tuple(Linear(name=f"{at}.{one}", inputs=c.hidden, outputs=c.intermediate) for one in ups)
        return (*into, Linear(name=f"{at}.wo", inputs=c.intermediate, outputs=c.hidden))

    sizes: dict[str, Any] = {
        "query": inner,
        "key": inner,
        "intermediate": c.intermediate,
        "mlp_values": 4 if is_gated else 2,
    }
    encoder = Layer(
        prefix="encoder.block",
        linears=attention("layer.0.SelfAttention") + mlp("layer.1.DenseReluDense"),
        other=2 * c.hidden,
        **sizes,
    )
    decoder = Layer(
        prefix="decoder.block",
        linears=attention("layer.0.SelfAttention")
        + attention("layer.1.EncDecAttention")
        + mlp("layer.2.DenseReluDense"),
        other=3 * c.hidden,
        norms=3,
        **sizes,
    )
    layers = c.number("num_layers", default=c.layers)
    pattern = [0] * layers + [1] * c.number("num_decoder_layers", default=layers)
    relative = 2 * c.number("relative_attention_num_buckets", default=32) * c.heads
    return c.facts([encoder, decoder], pattern, tied=True, extra=2 * c.hidden + relative, is_causal=False)


FAMILIES: dict[str, Callable[[_Config], ModelFacts]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "smollm3": _smollm3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi": _phi,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "falcon": _falcon,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "t5": _t5,
}


def _qwen_windows(c: _Config) -> list[int | None]:
    if not c.flag("use_sliding_window"):
        return [None] * c.layers
    first = c.number("max_window_layers", default=28)
    return c.windows(4096, lambda index: index >= first)


def _windowed(
    c: _Config, windows: list[int | None], *, facts: Mapping[str, Any] | None = None, **layer: Any
) -> ModelFacts:
    """Layers that differ in their window only."""
    different = sorted(set(windows), key=lambda window: window or 0)
    kinds = [c.layer(window=window, **layer) for window in different]
    return c.facts(kinds, [different.index(window) for window in windows], **(facts or {}))


def _plain_layer(c: _Config, prefix: str, linears: tuple[Linear, ...], other: int, **more: Any) -> Layer:
    """A layer with layer norms whose MLP has no gate."""
    return Layer(
        prefix=prefix,
        linears=linears,
        other=other,
        query=c.heads * c.head_dim,
        key=c.kv_heads * c.head_dim,
        intermediate=c.intermediate,
        norm="layer",
        **{"mlp_values": 2, **more},
    )


def architecture_of(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else str(config.get("model_type") or "unknown")


def _is_attention(name: str) -> bool:
    return name.split(".")[0].lower() in {"self_attn", "attn", "attention", "self_attention"} or "Attention" in name


def _checked(facts: ModelFacts) -> ModelFacts:
    if facts.parameters > LARGEST:
        raise UserError(
            f"its config.json describes {facts.parameters:,} parameters, which no model has; it is damaged."
        )
    return facts
