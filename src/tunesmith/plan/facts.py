"""What planning needs to know of a model, from its config alone: sizes, not weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunesmith.errors import UserError
from tunesmith.plan.plan import Part


class ModelFacts(Part):
    architecture: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    positions: int | None
    """Longest sequence the model was made for, where known."""

    @property
    def layer_parameters(self) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def parameters(self) -> int:
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + embeddings + self.hidden

    def adapter_parameters(self, rank: int) -> int:
        """Of LoRA on every linear of every layer."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sizes = 2 * (self.hidden + query) + 2 * (self.hidden + key) + 3 * (self.hidden + self.intermediate)
        return self.layers * rank * sizes


def from_config(config: Mapping[str, Any]) -> ModelFacts:
    """Facts of a decoder from the contents of its config.json (multimodal ones: of their text part)."""
    text = config.get("text_config") or config
    merged = {**config, **text}

    def number(*names: str, default: int | None = None) -> int:
        for name in names:
            value = merged.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        if default is None:
            raise UserError(f"The model's config says nothing of its {names[0]}, so it cannot be planned for.")
        return default

    hidden = number("hidden_size", "n_embd", "d_model")
    heads = number("num_attention_heads", "n_head", default=max(1, hidden // 64))
    positions = number("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", default=1 << 62)
    architectures = merged.get("architectures") or [merged.get("model_type", "unknown")]
    return ModelFacts(
        architecture=str(architectures[0]),
        hidden=hidden,
        intermediate=number("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", default=4 * hidden),
        layers=number("num_hidden_layers", "n_layer", "num_layers"),
        heads=heads,
        kv_heads=number("num_key_value_heads", default=heads),
        head_dim=number("head_dim", default=max(1, hidden // heads)),
        vocabulary=number("vocab_size"),
        tied=bool(merged.get("tie_word_embeddings", True)),
        positions=None if positions == 1 << 62 else positions,
    )
