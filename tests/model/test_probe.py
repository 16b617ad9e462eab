"""The probe is strict: what a model's code does is tried in fp32 on a proxy, before anything is loaded."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import parity
from families import quiet, tiny_config, tiny_model
from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.model import attention, load
from tunesmith.model.forward_spec import find_forward_spec
from tunesmith.model.probe import probe_config, probe_run, try_adapters
from tunesmith.model.proxy import build_proxy
from tunesmith.model.structure import kind_of
from tunesmith.plan.models import language_model_class, read_facts

CPU = torch.device("cpu")
LONG_ROPE = {
    "max_position_embeddings": 128,
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0, 3.0, 5.0, 8.0],
    },
}


def probed(family: str, **changes):
    attention.register()
    with quiet():
        return probe_config(tiny_config(family, **changes), device=CPU)


def test_a_model_that_sees_the_tokens_it_predicts_is_refused():
    with pytest.raises(UserError, match=r"^XLNetLMHeadModel is not a causal language model[^\n]*\.$"):
        probed("xlnet")


def test_documents_that_change_how_their_neighbours_are_computed_are_called_by_themselves(tmp_path):
    found = probed("phi3", **LONG_ROPE)
    assert found.spec.layout == "packed"
    assert found.spec.switch == 32
    row = parity.compare("phi3", "full", tmp_path / "run", **LONG_ROPE)
    assert (row.outcome, row.layout) == ("right", "packed"), row


def test_a_factor_between_head_and_logits_is_found_to_the_last_digit():
    model = tiny_model("llama")
    attention.register()
    model.get_output_embeddings().register_forward_hook(lambda _module, _inputs, logits: logits * 1.0184)
    assert find_forward_spec(model, vocabulary=100)[0].logit_scale == pytest.approx(1.0184, rel=1e-5)


@pytest.mark.parametrize(
    ("family", "changes", "scale"), [("granite", {"logits_scaling": 3.0}, 1 / 3), ("llama", {}, 1)]
)
def test_the_factor_is_that_of_the_model_and_not_of_its_proxy(family, changes, scale):
    assert probed(family, **changes).spec.logit_scale == pytest.approx(scale, rel=1e-9)


def test_a_linear_whose_weight_the_model_reads_itself_is_left_without_an_adapter(tmp_path):
    folder = parity.write_model("mamba", tmp_path / "model")
    attention.register()
    run, _, notes = probe_run(Run(model=str(folder), data="none.jsonl"))
    assert run.lora.targets == ["backbone.layers.*.mixer.in_proj"]
    assert any("mixer.x_proj (the model reads its weight itself)" in note for note in notes)
    only = Run(model=str(folder), data="none.jsonl", lora={"targets": ["x_proj"]})
    with pytest.raises(UserError, match="no linear that was chosen can carry an adapter"):
        probe_run(only)


class Router(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


class Routed(nn.Module):
    """An MLP whose linear gives more than its product, and whose weight is not all that it computes with."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.mlp, self.router, self.unused = mlp, Router(32, 1), nn.Linear(32, 32)

    def forward(self, x):
        weight, x = self.router(x)
        return self.mlp(x) * weight.sigmoid()


def test_linears_that_give_more_than_a_tensor_or_that_text_does_not_pass_are_left_out():
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.mlp = Routed(layer.mlp)
    left_out, can_fuse = try_adapters(model, 100)
    assert left_out["model.layers.#.mlp.router"] == "it gives more than a tensor"
    assert left_out["model.layers.#.mlp.unused"] == "text does not pass through it"
    assert len(left_out) == 2
    assert can_fuse
    assert not any(weight.grad is not None for weight in model.parameters())


def test_outputs_that_the_model_clamps_in_place_train_as_by_the_plain_loop(tmp_path):
    row = parity.compare("olmo", "lora", tmp_path / "run", clip_qkv=0.5)
    assert row.outcome == "right", row


OTHERS = {
    "a vision model (Vision": {"model_type": "vision-encoder-decoder", "architectures": ["VisionEncoderDecoderModel"]}
    | {"is_encoder_decoder": True},
    "an encoder of BERT's kind": {"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 100},
    "a vision model": {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 224},
    "a speech model": {"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"], "vocab_size": 32},
    "a speech model (Whisper": {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}
    | {"is_encoder_decoder": True, "vocab_size": 100},
    "an encoder of BERT's kind (DistilBertModel)": {"model_type": "distilbert", "architectures": ["DistilBertModel"]}
    | {"vocab_size": 100, "dim": 32, "n_layers": 2, "n_heads": 4},
    "an encoder of BERT's kind (T5EncoderModel)": {"model_type": "t5", "architectures": ["T5EncoderModel"]}
    | {"vocab_size": 100, "d_model": 32, "is_encoder_decoder": True},
    "an encoder of BERT's kind (distilbert)": {"model_type": "distilbert", "vocab_size": 100, "dim": 32},
    "a classifier": {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"], "vocab_size": 100},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_models_of_other_kinds_are_named_as_what_they_are_before_anything_is_loaded(tmp_path, kind):
    (tmp_path / "config.json").write_text(json.dumps(OTHERS[kind]))
    with pytest.raises(UserError) as said:
        read_facts(str(tmp_path))
    assert kind in str(said.value)
    assert str(said.value).count(". ") == 0


def test_a_proxy_is_small_and_has_every_kind_of_layer():
    layers = ["sliding_attention"] * 5 + ["full_attention"]
    large = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
    large |= {"intermediate_size": 8192, "vocab_size": 50_000, "sliding_window": 4096}
    config = tiny_config("gemma3_text", **large, num_hidden_layers=24, layer_types=layers * 4)
    with quiet():
        proxy = build_proxy(config, device=CPU)
    text = proxy.model.config
    assert text.layer_types == layers
    assert text.sliding_window < 10
    assert load.parameter_count(proxy.model) < 5_000_000
    assert config.num_hidden_layers == 24


def test_kinds_of_modules_go_without_the_numbers_of_their_layers():
    assert kind_of("model.layers.12.mlp.experts.3.up_proj") == "model.layers.#.mlp.experts.#.up_proj"


def test_weights_that_a_forward_pass_uses_twice_are_not_updated_within_the_backward_pass(tmp_path):
    """hrm_text calls its layers several times; the first gradient of a weight is not the last use of it."""
    import parity

    row = parity.compare("hrm_text", "full", tmp_path / "run")
    assert row.outcome == "right", row


PUBLISHED = (
    "granitemoehybrid",
    "qwen3_next",
    "falcon",
    "zamba2",
    "gemma4_text",
    "deepseek_v32",
    "cwm",
    "gemma4",
)
"""Whose sizes hang together (heads of state spaces, groups of experts, a prime number of heads, tables by layer), or
whose tokens for images are beyond a small vocabulary."""


@pytest.mark.parametrize("family", PUBLISHED)
def test_a_model_of_published_size_has_a_small_proxy(family: str):
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = AutoConfig.for_model(family)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]
    with quiet():
        proxy = build_proxy(config, device=CPU)
    assert proxy is not None
    assert load.parameter_count(proxy.model) < 60e6
    assert {module.__class__.__name__ for module in proxy.model.modules()} == kinds_of_modules(config)


def kinds_of_modules(config) -> set[str]:
    with quiet(), torch.device("meta"):
        return {type(module).__name__ for module in language_model_class(config).from_config(config).modules()}


def test_a_hybrid_of_published_size_is_packed_with_adapters_on_all_its_linears():
    from transformers import AutoConfig

    config = AutoConfig.for_model("granitemoehybrid", layer_types=["mamba", "attention"] * 16)
    config.architectures = ["GraniteMoeHybridForCausalLM"]
    attention.register()
    with quiet():
        found = probe_config(config, device=CPU)
    assert (found.spec.layout, found.spec.seq_idx, found.left_out) == ("packed", True, ())


@pytest.mark.parametrize(
    ("family", "changes", "is_found"),
    [
        ("qwen3", {}, True),
        ("glm4_moe", {}, True),  # whose positions turn half of each head
        ("phi", {}, False),  # whose module has other names
        ("granitemoehybrid", {"position_embedding_type": "nope"}, True),
    ],
)
def test_attention_is_ours_where_the_model_as_a_whole_cannot_tell(family, changes, is_found):
    attention.register()
    with quiet():
        found = probe_config(tiny_config(family, **changes), device=torch.device("cpu"))
    assert found.spec.layout == "packed"
    assert ("rope" in found.kernels) == is_found


def test_the_proxy_has_random_weights_in_norms_and_biases_too():
    """What the weights of a new model hide: a bias of zeros, a norm of ones, an encoder that is not heard."""
    with quiet():
        proxy = build_proxy(tiny_config("gpt2"), device=CPU)
    assert proxy is not None
    assert all(weight.std() > 0.01 for weight in proxy.model.parameters())
