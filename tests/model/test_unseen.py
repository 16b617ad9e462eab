"""A model nobody has seen: its code lies beside its weights, with an extra norm and heads of an odd size."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import parity
from families import VOCABULARY

CODE = """
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm


class UnseenConfig(LlamaConfig):
    model_type = "unseen"


class UnseenLayer(LlamaDecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.sandwich_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, **named):
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **named)
        hidden_states = hidden_states + self.sandwich_norm(attended)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class UnseenForCausalLM(LlamaForCausalLM):
    config_class = UnseenConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.layers = nn.ModuleList(UnseenLayer(config, index) for index in range(config.num_hidden_layers))
        self.post_init()
"""
CONFIG = {
    "model_type": "unseen",
    "architectures": ["UnseenForCausalLM"],
    "auto_map": {"AutoConfig": "unseen.UnseenConfig", "AutoModelForCausalLM": "unseen.UnseenForCausalLM"},
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TRUSTED = {"trust_remote_code": True}


@pytest.fixture(scope="module")
def unseen(tmp_path_factory) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = parity.write_model("llama", tmp_path_factory.mktemp("unseen") / "model")  # for its tokenizer
    (folder / "unseen.py").write_text(CODE)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config = AutoConfig.from_pretrained(folder, **TRUSTED)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, **TRUSTED)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape))
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "unseen.py").write_text(CODE)
    return folder


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_it_trains_as_by_a_plain_loop_packed(unseen, tmp_path, method):
    from transformers import AutoModelForCausalLM

    trained = parity.train(unseen, method, tmp_path, **TRUSTED)
    assert trained.job.spec.layout == "packed"
    plain = AutoModelForCausalLM.from_pretrained(unseen, **TRUSTED)
    expected = parity.plain_losses(plain, trained, method)
    assert parity.distance(trained.losses, expected) <= parity.TOLERANCE


def test_weights_of_integers_are_read_and_not_trained(unseen, tmp_path):
    """As by a plain loop, which has all others trained, whatever the model's code says when it is built."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    folder = shutil.copytree(unseen, tmp_path / "model")
    built = "        self.post_init()\n"
    frozen = "        self.model.norm.weight.requires_grad_(False)\n"
    numbered = "        self.model.norm.number = nn.Parameter(torch.tensor([3]), requires_grad=False)\n"
    (folder / "unseen.py").write_text("import torch" + CODE.replace(built, built + frozen + numbered))
    weights = load_file(folder / "model.safetensors") | {"model.norm.number": torch.tensor([3])}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    trained = parity.train(folder, "full", tmp_path / "run", **TRUSTED)
    assert trained.job.optimizer.weights.keys() == weights.keys() - {"model.norm.number"}
    plain = AutoModelForCausalLM.from_pretrained(folder, **TRUSTED)
    assert parity.distance(trained.losses, parity.plain_losses(plain, trained, "full")) <= parity.TOLERANCE


def test_what_its_layers_keep_is_counted_and_stands_in_the_plan(unseen, tmp_path):
    """Its memory is predicted from the count, not by a larger margin; the plan says which kernels were found equal."""
    from tunesmith.config.schema import Run
    from tunesmith.model import attention
    from tunesmith.model.probe import probe
    from tunesmith.plan.hardware import named
    from tunesmith.run.choose import facts_of, new_plan

    attention.register()
    parity.write_documents(tmp_path / "train.jsonl")
    run = Run(model=str(unseen), data=str(tmp_path / "train.jsonl"), method="full", sequence_length=64, **TRUSTED)
    found = probe(run)
    assert found.kernels == ("rope", "swiglu")
    assert found.kept is not None
    assert len(found.kept) == 3
    facts = facts_of(run)
    assert "no formula" in facts.note
    assert facts.kinds[0].other == 3 * 40
    plan = new_plan(run, named("H200"), probed=found)
    assert plan.kernels == ("rope", "swiglu")
    assert not [reason for reason in plan.reasons if "no formula" in reason.why]
    # Of heads of 20 values no kernel takes packed ones: the plan says so, and what would be faster.
    (said,) = [reason for reason in plan.reasons if reason.topic == "attention"]
    assert "head size 20" in said.why


def test_the_count_is_what_autograd_keeps(unseen, tmp_path):
    """With real tensors, on a model of three layers against one of two."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tunesmith.model import attention
    from tunesmith.model.forward import Inputs, packed_hidden_states
    from tunesmith.model.kept import count_kept

    config = AutoConfig.from_pretrained(unseen, **TRUSTED)
    (counted, *_) = count_kept(config, compiles=False, fuses=True, kernels=(), **TRUSTED)
    attention.register()
    tokens, sizes = 300, []
    for layers in (2, 3):
        config.num_hidden_layers = layers
        model = AutoModelForCausalLM.from_config(config, **TRUSTED).train()
        model.set_attn_implementation(attention.NAME)
        own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        kept: dict[int, torch.Tensor] = {}

        def keep(tensor, own=own, kept=kept):
            if tensor.untyped_storage().data_ptr() not in own:
                kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        places = torch.arange(tokens)
        inputs = Inputs(places % VOCABULARY, places, torch.tensor([0, 300]).int(), 300, places, places, places.float())
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            packed_hidden_states(model, inputs)
        sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))
    assert (sizes[1] - sizes[0]) / tokens == pytest.approx(counted.full, rel=0.05)


@pytest.mark.parametrize("gives", ["(output.logits,)", "output.last"])
def test_code_that_gives_no_logits_by_name_is_refused_in_a_sentence(unseen, tmp_path, gives):
    from tunesmith.config.schema import Run
    from tunesmith.errors import UserError
    from tunesmith.model.probe import probe

    folder = shutil.copytree(unseen, tmp_path / "model")
    forward = "    def forward(self, input_ids=None, **named):\n        output = super().forward(input_ids, **named)\n"
    (folder / "unseen.py").write_text(f"{CODE}\n{forward}        return {gives}\n")
    with pytest.raises(UserError, match=r"cannot be called as transformers' models are .*`logits`"):
        probe(Run(model=str(folder), data="-", **TRUSTED))


def test_what_a_config_asks_a_model_to_give_besides_logits_is_not_asked(tmp_path):
    """A tuple in place of names, or all attention weights, which only slow attention has."""
    folder = parity.write_model("llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    asks = {"return_dict": False, "output_attentions": True, "output_hidden_states": True}
    (folder / "config.json").write_text(json.dumps(config | asks))
    assert parity.train(folder, "lora", tmp_path / "run").job.spec.layout == "packed"


def test_where_transformers_own_code_runs_a_config_that_cannot_be_built_is_what_is_wrong(tmp_path):
    """Many files name the code that a model had before transformers knew it."""
    from tunesmith.config.schema import Run
    from tunesmith.errors import UserError
    from tunesmith.model.probe import probe

    folder = parity.write_model("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    broken = {"auto_map": {"AutoModelForCausalLM": "gone.Gone"}, "hidden_act": "unheard_of"}
    (folder / "config.json").write_text(json.dumps(config | broken))
    with pytest.raises(UserError, match=r"cannot be built from its config.json \(.*compare that file"):
        probe(Run(model=str(folder), data="-"))
