"""The model families: facts from the contents of config.json alone, by closed formulas.

Tests hold the formulas against the model built on the meta device. For other architectures `models.read_facts` builds
that meta model; `from_config` alone takes them for the usual gated decoder and says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from tunesmith.errors import UserError
from tunesmith.plan.facts import Layer, Linear, ModelFacts
from tunesmith.plan.plan import Gate

LARGEST = 10**14
MOST_LAYERS = 10_000
"""Parameters and layers beyond which a config is a mistake, not a model."""


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


def architecture_of(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else str(config.get("model_type") or "unknown")


class _Config:
    """A config.json with names that differ between families, and defaults where files of old leave a key out."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = values
        self.hidden = self.number("hidden_size", "n_embd", "d_model")
        types = values.get("layers_block_type") or values.get("layer_types")
        counted = len(types) if isinstance(types, list) and types else None  # Nemotron-H says no number
        self.layers = self.number(
            "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", default=counted
        )
        if self.layers > MOST_LAYERS:
            raise UserError(f"its config.json has {self.layers:,} layers, which no model has; it is damaged.")
        self.heads = self.number(
            "num_attention_heads", "n_head", "n_heads", "num_heads", default=max(1, self.hidden // 64)
        )
        self.kv_heads = self.number("num_key_value_heads", default=self.heads)
        self.head_dim = self.number("head_dim", default=max(1, self.hidden // self.heads))
        self.activation = "silu"
        """Where the config says nothing of it."""
        self.intermediate = self.number(
            "intermediate_size",
            "n_inner",
            "ffn_dim",
            "ffn_hidden_size",
            "d_ff",
            default=self.number("expansion_ratio", default=4) * self.hidden,
        )

    def number(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self.values.get(name)
            if name == "intermediate_size" and isinstance(value, list) and value:  # of each layer
                value = max(value, key=lambda size: size if isinstance(size, int) else 0)
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
        self, kinds: list[Layer], pattern: list[int] | None = None, *, tied: bool = False, **fields: Any
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
            **{"extra": self.hidden, **fields},
        )

    def layer(
        self,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        mlp_bias: bool = False,
        qk_norm: bool = False,
        post_norms: int = 0,
        norm: Literal["rms", "wide", "centered"] = "rms",
        window: int | None = None,
        is_soft_capped: bool = False,
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
            is_soft_capped=is_soft_capped,
            post_norms=post_norms,
            norm=norm,
            has_qk_norm=qk_norm,
            is_rope_fused=True,
            gate=self.gate() if mlp is None else None,
            copies=copies,
            has_early_weights=copies > 0,
        )

    def gate(self) -> Gate | None:
        """What kernels of ours call the MLP's activation."""
        act = self.values.get("hidden_activation") or self.values.get("hidden_act") or self.activation
        gelu = ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_python", "gelu_fast", "gelu_accurate", "quick_gelu")
        return "swiglu" if act in ("silu", "swish") else "geglu" if act in gelu else None

    def gated(self, width: int, *, bias: bool = False, at: str = "mlp") -> tuple[Linear, ...]:
        return (
            Linear(name=f"{at}.gate_proj", inputs=self.hidden, outputs=width, has_bias=bias),
            Linear(name=f"{at}.up_proj", inputs=self.hidden, outputs=width, has_bias=bias),
            Linear(name=f"{at}.down_proj", inputs=width, outputs=self.hidden, has_bias=bias),
        )

    def experts(self, count: int, active: int, width: int) -> tuple[Linear, ...]:
        """Stacks of matrices, and the router; none of them a linear module, so none carries an adapter."""

        def stack(name: str, inputs: int, outputs: int) -> Linear:
            return Linear(name=name, inputs=inputs, outputs=outputs, count=count, active=active, is_adaptable=False)

        return (
            Linear(name="mlp.gate", inputs=self.hidden, outputs=count, is_adaptable=False),
            stack("mlp.experts.gate_up_proj", self.hidden, 2 * width),
            stack("mlp.experts.down_proj", width, self.hidden),
        )

    def windows(self, default: int | None, is_sliding: Callable[[int], bool]) -> list[int | None]:
        """The window of each layer, None where it sees everything; `layer_types` wins where the config has it."""
        window = self.values.get("sliding_window", default)
        types = self.values.get("layer_types")
        if isinstance(types, list) and len(types) == self.layers:
            sliding = [kind == "sliding_attention" for kind in types]
        else:
            sliding = [is_sliding(index) for index in range(self.layers)]
        has_window = isinstance(window, int) and window > 0
        return [window if has_window and slides else None for slides in sliding]


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
    c.head_dim, c.activation = c.number("head_dim", default=256), "gelu_pytorch_tanh"
    bias = c.flag("attention_bias")
    return c.facts([c.layer(qkv_bias=bias, out_bias=bias, norm="wide")], tied=True)


def _gemma2(c: _Config) -> ModelFacts:
    c.head_dim, c.activation = c.number("head_dim", default=256), "gelu_pytorch_tanh"
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
        is_soft_capped=capped,
        facts={"tied": True},
    )


def _gemma3(c: _Config) -> ModelFacts:
    c.head_dim, c.activation = c.number("head_dim", default=256), "gelu_pytorch_tanh"
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
    return c.facts([plain.changed(linears=linears, is_qkv_fused=True)])


def _glm(c: _Config) -> ModelFacts:
    """Gate and up in one linear; a part of each head is rotated, pair by pair."""
    plain = c.layer(qkv_bias=c.flag("attention_bias"))
    joint = Linear(name="mlp.gate_up_proj", inputs=c.hidden, outputs=2 * c.intermediate)
    linears = (*plain.linears[:4], joint, plain.linears[-1])
    return c.facts([plain.changed(linears=linears)])


def _olmo2(c: _Config) -> ModelFacts:
    """Norms after attention and MLP, none before them, and one over all heads of the queries and of the keys."""
    bias = c.flag("attention_bias")
    plain = c.layer(qkv_bias=bias, out_bias=bias, norm="wide", qk_norm=True)
    other = 2 * c.hidden + plain.query + plain.key
    return c.facts([plain.changed(other=other, norms=0, bare_inputs=2, post_norms=2)])


def _cohere2(c: _Config) -> ModelFacts:
    """One norm for attention and MLP, which are added to each other; layers without a window have no positions."""
    c.head_dim = c.number("head_dim", default=c.hidden // c.heads)
    bias, every = c.flag("attention_bias"), c.number("sliding_window_pattern", "_sliding_window_pattern", default=4)
    windows = c.windows(4096, lambda index: (index + 1) % every != 0)
    facts = _windowed(c, windows, qkv_bias=bias, out_bias=bias, norm="centered", facts={"tied": True})
    kinds = tuple(
        kind.changed(other=c.hidden, norms=1, is_parallel=True, is_rope_fused=kind.window is not None)
        for kind in facts.kinds
    )
    return facts.changed(kinds=kinds)


def _starcoder2(c: _Config) -> ModelFacts:
    bias, query, key = c.flag("use_bias", True), c.heads * c.head_dim, c.kv_heads * c.head_dim
    linears = (
        Linear(name="self_attn.q_proj", inputs=c.hidden, outputs=query, has_bias=bias),
        Linear(name="self_attn.k_proj", inputs=c.hidden, outputs=key, has_bias=bias),
        Linear(name="self_attn.v_proj", inputs=c.hidden, outputs=key, has_bias=bias),
        Linear(name="self_attn.o_proj", inputs=query, outputs=c.hidden, has_bias=bias),
        Linear(name="mlp.c_fc", inputs=c.hidden, outputs=c.intermediate, has_bias=bias),
        Linear(name="mlp.c_proj", inputs=c.intermediate, outputs=c.hidden, has_bias=bias),
    )
    window = c.windows(None, lambda _: True)[0]
    layer = _plain_layer(c, "model.layers", linears, 4 * c.hidden, window=window, is_rope_fused=True)
    return c.facts([layer], tied=True, extra=2 * c.hidden)


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
    dropouts = 2 if c.values.get("resid_pdrop", 0.1) else 0
    layer = _plain_layer(
        c,
        "transformer.h",
        linears,
        4 * c.hidden,
        is_qkv_fused=True,
        is_rotated=False,
        mlp_values=5,
        dropouts=dropouts,
    )
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
    return c.facts([layer], tied=True, extra=2 * c.hidden, packs=not c.flag("alibi"))


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
    seen, shared_width = active * width, 0
    if shared:
        shared_width = c.number("shared_expert_intermediate_size", default=5632)
        gate = Linear(name="mlp.shared_expert_gate", inputs=c.hidden, outputs=1)
        mlp = (*mlp, *c.gated(shared_width, at="mlp.shared_expert"), gate)
        seen += shared_width
    mixed = c.layer(mlp=mlp, intermediate=seen, copies=active, **layer)
    if shared:
        mixed = mixed.changed(shared=shared_width, gate=c.gate())
    kinds = [mixed, c.layer(**layer)]
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
        into = tuple(Linear(name=f"{name}.{part}", inputs=c.hidden, outputs=inner) for part in "qkv")
        return (*into, Linear(name=f"{name}.o", inputs=inner, outputs=c.hidden))

    def mlp(at: str) -> tuple[Linear, ...]:
        into = tuple(Linear(name=f"{at}.{up}", inputs=c.hidden, outputs=c.intermediate) for up in ups)
        return (*into, Linear(name=f"{at}.wo", inputs=c.intermediate, outputs=c.hidden))

    encoder = Layer(
        prefix="encoder.block",
        linears=attention("layer.0.SelfAttention") + mlp("layer.1.DenseReluDense"),
        other=2 * c.hidden,
        query=inner,
        key=inner,
        intermediate=c.intermediate,
        is_gated=is_gated,
        mlp_values=4 if is_gated else 2,
    )
    decoder = encoder.changed(
        prefix="decoder.block",
        linears=attention("layer.0.SelfAttention")
        + attention("layer.1.EncDecAttention")
        + mlp("layer.2.DenseReluDense"),
        other=3 * c.hidden,
        norms=3,
    )
    layers = c.number("num_layers", default=c.layers)
    pattern = [0] * layers + [1] * c.number("num_decoder_layers", default=layers)
    relative = 2 * c.number("relative_attention_num_buckets", default=32) * c.heads
    # Its own attention adds a bias to every pair of tokens, and its positions are relative: none is the last.
    facts = c.facts(
        [encoder, decoder],
        pattern,
        tied=True,
        extra=2 * c.hidden + relative,
        is_causal=False,
        packs=False,
        has_fused_attention=False,
    )
    return facts.changed(positions=None)


FAMILIES: dict[str, Callable[[_Config], ModelFacts]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "smollm3": _smollm3,
    "granite": _llama,
    "glm": _glm,
    "olmo2": _olmo2,
    "cohere2": _cohere2,
    "starcoder2": _starcoder2,
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


def _plain_layer(c: _Config, prefix: str, linears: tuple[Linear, ...], other: int, **fields: Any) -> Layer:
    """A layer with layer norms whose MLP has no gate."""
    return Layer(
        prefix=prefix,
        linears=linears,
        other=other,
        query=c.heads * c.head_dim,
        key=c.kv_heads * c.head_dim,
        intermediate=c.intermediate,
        norm="layer",
        is_gated=False,
        **{"mlp_values": 2, **fields},
    )


def _checked(facts: ModelFacts) -> ModelFacts:
    if facts.parameters > LARGEST:
        raise UserError(
            f"its config.json describes {facts.parameters:,} parameters, which no model has; it is damaged."
        )
    return facts
