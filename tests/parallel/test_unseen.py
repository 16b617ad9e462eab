"""Models of remote code on two ranks: single numbers and vectors that all layers are given, shared layers, attention
looked up as earlier versions of transformers did, tokens that see others besides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

import parity
from families import VOCABULARY
from parallel.test_resume import assert_close
from ranks import AXES, MESHES, assert_two_give_the_losses_of_one
from tiny import SETTINGS

CODE = """
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention, LlamaDecoderLayer, apply_rotary_pos_emb, eager_attention_forward
)


class GatedConfig(LlamaConfig):
    model_type = "gated"
    shifts = False
    experts = 0
    shares = False


class GatedAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        like = LlamaAttention(config, layer_idx)
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.head_dim, self.scaling, self.num_key_value_groups = like.head_dim, like.scaling, like.num_key_value_groups
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = like.q_proj, like.k_proj, like.v_proj, like.o_proj

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **named):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (one(hidden_states).view(shape).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        attend = eager_attention_forward
        if self.config._attn_implementation != "eager":
            attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        named.pop("past_key_values", None)
        attended, _ = attend(self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling, **named)
        return self.o_proj(attended.reshape(*hidden_states.shape[:-1], -1).contiguous()), None


class GatedLayer(LlamaDecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.shifts = config.shifts
        self.self_attn = GatedAttention(config, layer_idx)
        self.more = nn.ModuleList(nn.Identity() for _ in range(8))  # a longer list than that of the layers
        self.number = nn.Parameter(torch.tensor(0.7))
        wide = config.hidden_size
        self.experts = nn.ModuleList(nn.Linear(wide, wide, bias=False) for _ in range(config.experts))
        self.sign = nn.Parameter(torch.tensor([1 - layer_idx % 2 * 2]), requires_grad=False)

    def forward(self, hidden_states, gate=None, **named):
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **named)
        hidden_states = hidden_states + self.number * self.sign * attended
        chosen = hidden_states.detach()[..., : len(self.experts)].argmax(-1) if len(self.experts) else None
        for number, expert in enumerate(self.experts):
            if (chosen == number).any():
                hidden_states = hidden_states + expert(hidden_states) * (chosen == number)[..., None]
        if self.shifts:
            follows = (named["position_ids"] > 0)[..., None]
            hidden_states = hidden_states + 0.3 * hidden_states.roll(1, dims=1) * follows
        return hidden_states + gate * self.mlp(self.post_attention_layernorm(hidden_states))


class GatedModel(LlamaModel):
    config_class = GatedConfig

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList(GatedLayer(config, index) for index in range(config.num_hidden_layers))
        if config.shares:
            self.layers[-1].mlp = self.layers[0].mlp
        self.gate = nn.Parameter(torch.full((config.hidden_size,), 0.7))

    def forward(self, input_ids=None, inputs_embeds=None, position_ids=None, attention_mask=None, **named):
        from transformers.masking_utils import create_causal_mask

        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1])[None]
        given = {"config": self.config, "inputs_embeds": hidden, "attention_mask": attention_mask}
        mask = create_causal_mask(**given, past_key_values=None, position_ids=position_ids)
        named |= {"position_embeddings": self.rotary_emb(hidden, position_ids), "position_ids": position_ids}
        for layer in self.layers:
            hidden = layer(hidden, gate=self.gate, attention_mask=mask, **named)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


class GatedForCausalLM(LlamaForCausalLM):
    config_class = GatedConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = GatedModel(config)
"""
CONFIG = {
    "model_type": "gated",
    "architectures": ["GatedForCausalLM"],
    "auto_map": {"AutoConfig": "gated.GatedConfig", "AutoModelForCausalLM": "gated.GatedForCausalLM"},
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
pytestmark = pytest.mark.distributed


def write_gated(folder: Path, **changes: int) -> Path:
    """A folder with such a model, data and settings."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    model = parity.write_model("llama", folder / "model")  # for its tokenizer
    (model / "gated.py").write_text(CODE)
    (model / "config.json").write_text(json.dumps(CONFIG | changes))
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(model, trust_remote_code=True)
    made = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: weight + 0.1 * torch.randn(weight.shape, generator=generator) if weight.is_floating_point() else weight
        for name, weight in made.state_dict().items()
    }
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    parity.write_documents(folder / "train.jsonl")
    content = {
        **SETTINGS,
        "model": str(model),
        "trust_remote_code": True,
        "data": [{"path": str(folder / "train.jsonl")}],
        "eval": [],
        "lora": {"rank": 2},
        "batch_tokens": 2 * 64,
        "learning_rate": 1e-3,
        "save_every": 1000,
        "steps": 4,
    }
    (folder / "run.yaml").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def gated(tmp_path_factory) -> Path:
    return write_gated(tmp_path_factory.mktemp("gated"))


@pytest.mark.parametrize("way", ["ddp", "zero3", "tensor", "context", "pipeline"])
def test_single_numbers_and_weights_of_all_layers_train_as_on_one_rank(world, gated, tmp_path, way):
    assert_two_give_the_losses_of_one(world, gated, way, method="full", count=4, places=tmp_path)


def test_experts_in_a_list_that_one_rank_calls_and_another_does_not_train_as_on_one_rank(world, tmp_path):
    """Also those that neither calls in a step, which AdamW leaves as they are."""
    folder = write_gated(tmp_path, experts=30)
    assert_two_give_the_losses_of_one(world, folder, "zero3", method="full", count=4, places=tmp_path)


@pytest.mark.parametrize("way", ["zero3", "pipeline"])
def test_weights_of_integers_stay_and_are_saved_by_ranks_with_the_others(world, gated, tmp_path, way):
    options = {"folder": str(gated), "until": 2, "steps": 2, "method": "full"}
    single = {"mesh": {}, "sharding": "none", "output": str(tmp_path / "one")}
    several = {"mesh": MESHES[way], "sharding": AXES.get(way, way), "output": str(tmp_path / "two")}
    world(1)("parallel.on_ranks:train_for", **options, **single)
    world(2)("parallel.on_ranks:train_for", **options, **several)
    name = "model/model.safetensors"
    assert_close(tmp_path / "two" / name, tmp_path / "one" / name)
    before, after = load_file(gated / "model" / "model.safetensors"), load_file(tmp_path / "two" / name)
    assert before.keys() == after.keys()
    changed = {key.rpartition(".")[2] for key in before if not before[key].equal(after[key])}
    assert changed == {"weight", "number", "gate"}


def test_tokens_that_see_others_besides_attention_are_not_cut_over_ranks(world, tmp_path):
    folder = write_gated(tmp_path, shifts=True)
    options = {"folder": str(folder), "output": str(tmp_path / "run"), "method": "full"}
    found = world(2)("parallel.on_ranks:failure", mesh={"context": 2}, sharding="ddp", **options)
    assert all("computes something else when its sequences are cut over ranks" in said for said in found)


def test_layers_that_share_weights_are_not_cut_into_stages_nor_trained_in_full_where_the_code_does_not_say_so(
    world, tmp_path
):
    folder = write_gated(tmp_path, shares=True)
    options = {"folder": str(folder), "sharding": "none"}
    of_stages = {"mesh": {"pipeline": 2}, "output": str(tmp_path / "stages"), "method": "lora"}
    found = world(2)("parallel.on_ranks:failure", **options, **of_stages)
    assert all("layers of several stages, or layers and what surrounds them, share weights" in said for said in found)
    (said,) = world(1)("parallel.on_ranks:failure", mesh={}, output=str(tmp_path / "full"), method="full", **options)
    assert "mlp.gate_proj.weight of GatedForCausalLM are one weight" in said
