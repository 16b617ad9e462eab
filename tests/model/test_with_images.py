"""Models that see images besides are trained on text: transformers has many of them in no other class."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    Pix2StructConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

import parity
from families import VOCABULARY, quiet
from ranks import assert_two_give_the_losses_of_one
from tiny import SETTINGS
from tunesmith.config.load import from_mapping
from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.export import proof
from tunesmith.export.export import export_run
from tunesmith.export.quantized import rounding_of
from tunesmith.export.source import Source
from tunesmith.model import adapters
from tunesmith.model.fake_quantize import FakeQuantization
from tunesmith.model.grown import grown
from tunesmith.model.headers import read_headers
from tunesmith.model.load import build_small_proxy, load_empty
from tunesmith.model.source import files_of
from tunesmith.plan.models import check_kind, language_model_class
from tunesmith.quantize.quantize import quantize_model

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
SIZES |= {"num_key_value_heads": 2, "vocab_size": VOCABULARY, "initializer_range": 0.2, "max_position_embeddings": 128}
SEEN = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> Path:
    folder = parity.write_model("llama", tmp_path_factory.mktemp("seeing") / "model")  # for its tokenizer
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    config = Qwen2_5_VLConfig(
        text_config={**SIZES, "rope_parameters": rope, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        vision_config={**SEEN, "fullatt_block_indexes": [0]},
        **{f"{name}_token_id": 90 + place for place, name in enumerate(("image", "video", "vision_start"))},
    )
    torch.manual_seed(0)
    with quiet():
        Qwen2_5_VLForConditionalGeneration(config).float().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')
    return folder


@pytest.fixture(scope="module")
def trained(seeing, tmp_path_factory) -> parity.Trained:
    trained = parity.train(seeing, "lora", tmp_path_factory.mktemp("trained"))
    trained.job.write_result()
    return trained


def test_text_trains_them_as_a_plain_loop_does(seeing, trained):
    assert trained.job.spec.layout == "packed"
    plain = AutoModelForImageTextToText.from_pretrained(seeing, dtype=torch.float32)
    assert parity.distance(trained.losses, parity.plain_losses(plain, trained, "lora")) <= parity.TOLERANCE


def test_results_load_as_the_base_does_and_have_what_makes_pixels_of_images(trained, tmp_path):
    adapter = trained.job.folder / "adapter"
    assert "base = AutoModelForImageTextToText.from_pretrained" in (adapter / "README.md").read_text()
    made = export_run(trained.job.folder, "safetensors", out=tmp_path / "out", data=[str(_documents(tmp_path))])
    assert made.proof is not None
    assert made.proof.agreement == 1.0
    assert "model = AutoModelForImageTextToText.from_pretrained(folder)" in (tmp_path / "out/README.md").read_text()
    assert json.loads((tmp_path / "out/preprocessor_config.json").read_text())["image_processor_type"]


def test_they_are_read_tensor_by_tensor_although_their_files_have_other_names(seeing):
    model, folder = load_empty(Run(model=str(seeing), data="x"), dtype="fp32")
    held = files_of(model, folder)
    assert held is not None
    assert held["model.language_model.layers.0.mlp.up_proj.weight"].name == "model.layers.0.mlp.up_proj.weight"
    assert held.keys() == dict(model.named_parameters()).keys()


def test_what_no_text_passes_through_is_not_quantized(trained, tmp_path):
    data = [str(_documents(tmp_path))]
    made = quantize_model(str(trained.job.folder), tmp_path / "few", method="gptq", data=data)
    assert made.proof is not None
    names = read_headers(tmp_path / "few")
    assert "model.layers.0.mlp.up_proj.weight_packed" in names
    assert "visual.blocks.0.mlp.up_proj.weight" in names


def test_groups_of_quantization_aware_training_are_those_of_what_text_passes_through(seeing, trained):
    """The encoder of images has rows of 16 weights, which no group divides."""
    model, _ = load_empty(Run(model=str(seeing), data="x"), dtype="fp32")
    found = FakeQuantization.of(model, "int4")
    assert found.rounding == rounding_of(Source.of(trained.job.folder), "int4")
    assert found.names
    assert not [name for name in found.names if "visual" in name]


@pytest.mark.parametrize("method", ["fp8", "rtn"])
def test_random_weights_quantize_as_far_as_rounding_alone_goes(seeing, tmp_path, monkeypatch, method):
    """Of many tokens about as likely another one comes first after any rounding, which is no fault of what is
    written."""
    bound = "fp8" if method == "fp8" else "8 bits"
    monkeypatch.setitem(proof.BOUNDS, bound, replace(proof.BOUNDS[bound], agreement=1.01))
    data = [str(_documents(tmp_path))]
    made = quantize_model(str(seeing), tmp_path / "few", method=method, bits=8, data=data)
    assert made.proof is not None
    assert made.proof.rounded_agreement == pytest.approx(made.proof.agreement_without_ties, abs=0.1)


def test_new_tokens_grow_the_embedding_that_files_have_under_another_name(seeing, tmp_path):
    run = Run(model=str(seeing), data="x", output=str(tmp_path / "run"), new_tokens=["<|new|>"])
    base = grown(run).model
    assert read_headers(Path(base))["model.embed_tokens.weight"].shape[0] == 128
    assert AutoModelForImageTextToText.from_pretrained(base).get_input_embeddings().num_embeddings == 128


def _documents(folder: Path) -> Path:
    return parity.write_documents(folder / "held_out.jsonl")


def test_one_that_needs_images_is_refused_for_that(tmp_path):
    config = {"model_type": "blip", "architectures": ["BlipForConditionalGeneration"]}
    sizes = {**SIZES, "encoder_hidden_size": 16, "hidden_size": 16, "intermediate_size": 32}
    config |= {"text_config": sizes, "vision_config": {**SEEN, "num_attention_heads": 2, "image_size": 16}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = Run(model=str(tmp_path), data="x")
    with pytest.raises(UserError, match=r"cannot be called with text alone \(.*pixel_values.*\), which is all that"):
        build_small_proxy(run, dtype="fp32", device=torch.device("cpu"), layers=2, width=8)


def test_a_name_with_vision_in_it_is_no_reason_to_refuse_one_that_writes():
    config = {"architectures": ["AyaVisionForConditionalGeneration"], "text_config": {"vocab_size": 9}}
    check_kind("model", config)
    with pytest.raises(UserError, match="is a vision model"):
        check_kind("model", {"architectures": ["CLIPModel"], "text_config": {"vocab_size": 9}})


def test_one_that_transformers_has_no_language_model_of_is_refused_by_its_kind():
    with pytest.raises(UserError, match="transformers has no class of pix2struct models that writes text"):
        language_model_class(Pix2StructConfig())


def test_adapters_of_peft_are_on_what_text_passes_through_alone(seeing):
    """The encoder's projections have names that peft looks for, and would get no gradient."""
    pytest.importorskip("peft")
    for kind in ({"peft_type": "IA3"}, {"peft_type": "ADALORA", "target_modules": ["up_proj", "q_proj"]}):
        run = from_mapping({"model": str(seeing), "data": "x", "output": "o", "method": "peft", "peft": kind})
        model, _ = load_empty(run, dtype="fp32")
        tuned = adapters.put_on(model, run, empty=True)
        trained = [name for name, one in tuned.model.named_parameters() if one.requires_grad]
        assert any("language_model.layers.1.mlp" in name for name in trained)
        assert not [name for name in trained if "visual" in name]
        described = json.loads(adapters.config_text(tuned, run))
        assert set(described.get("feedforward_modules") or []) <= set(described["target_modules"])


@pytest.mark.parametrize("way", [pytest.param("zero3", marks=pytest.mark.slow), "tensor"])
def test_two_ranks_train_them_as_one_does(seeing, world, tmp_path, way):
    (tmp_path / "model").symlink_to(seeing)
    settings = {"model": str(tmp_path / "model"), **SETTINGS, "eval": [], "sequence_length": 128}
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    parity.write_documents(tmp_path / "train.jsonl")
    assert_two_give_the_losses_of_one(world, tmp_path, way, method="full")
