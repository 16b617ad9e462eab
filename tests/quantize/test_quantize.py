"""`tunesmith quantize`: what is written is what was measured, as the engine that reads it runs it."""

from __future__ import annotations

import json
import math
import shutil
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, CanineConfig, GemmaConfig, GemmaForCausalLM, RobertaConfig
from typer.testing import CliRunner

from export.models import FAMILIES, SHAPE, make_model, write_chats
from families import tiny_model
from tunesmith.cli.main import app
from tunesmith.errors import UserError
from tunesmith.evaluate.loss import overall
from tunesmith.export.export import export_run, twice_rounded
from tunesmith.export.quantized import check_linears
from tunesmith.quantize import methods
from tunesmith.quantize.awq import find_folds
from tunesmith.quantize.quantize import quantize_model
from tunesmith.run.evaluate import evaluate_run
from tunesmith.run.folder import read_run

slow = pytest.mark.slow
FEW = {"samples": 8, "measured": 6}


@pytest.mark.parametrize(
    ("method", "bits"),
    [
        ("gptq", 4),
        ("awq", 4),
        pytest.param("rtn", 4, marks=slow),
        pytest.param("kmeans", 4, marks=slow),
        *(
            pytest.param(*one, marks=slow)
            for one in [("int8-outliers", 8), ("fp8", 8), ("rtn", 8), ("gptq", 8), ("awq", 8), ("kmeans", 8)]
        ),
    ],
)
def test_a_run_is_quantized_measured_and_proved(trained, tmp_path, method, bits):
    made = quantize_model(str(trained), tmp_path / "out", method=method, bits=bits, **FEW)
    report = made.report
    assert made.proof is not None
    assert made.proof.adapter_share == pytest.approx(1, abs=0.35)
    assert len(report.layers) == 2
    assert report.before < report.after * 1.02 < report.before * (1.5 if bits == 4 else 1.05)
    assert 0 < report.layers[0].weight_error < (0.2 if bits == 4 else 0.05)
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{report.before:.4f} before, {report.after:.4f} after" in card
    bars = ElementTree.parse(tmp_path / "out" / "quantization.svg").iter("{http://www.w3.org/2000/svg}title")
    assert len(list(bars)) == 2 * len(report.layers)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    if method == "gptq":  # what `tunesmith eval` finds
        _, after, _ = evaluate_run(trained, read_run(trained))
        assert math.exp(overall(after)) == pytest.approx(report.before, rel=1e-4)
    if method == "kmeans":
        weights, books = (load_file(tmp_path / "out" / f"{name}.safetensors") for name in ("model", "codebooks"))
        name = "model.layers.0.mlp.up_proj"
        codes = books[f"{name}.codes"]
        if bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
        assert torch.equal(books[f"{name}.codebook"].gather(1, codes.long()), weights[f"{name}.weight"])


@slow
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "phi3", "qwen2"])
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_models_by_themselves_are_quantized_whatever_their_norms_and_linears(tmp_path, family, method):
    model = make_model(tmp_path / "model", family)
    data = write_chats(tmp_path / "data.jsonl", 16)
    made = quantize_model(str(model), tmp_path / "out", method=method, data=[str(data)], **FEW)
    nearest = quantize_model(str(model), tmp_path / "rtn", method="rtn", data=[str(data)], **FEW)
    assert made.proof is not None
    # What a method makes smaller is the error of outputs; the perplexity of random weights goes either way.
    for ours, plain in zip(made.report.layers, nearest.report.layers, strict=True):
        assert ours.output_error < plain.output_error, ours.name
    assert "fine-tuned" not in (tmp_path / "out" / "README.md").read_text()


def test_norms_in_16_bits_beside_linears_in_8_are_read_back(tmp_path, monkeypatch, caplog):
    """Of LayerNorms transformers gives back weights in bf16 and biases in fp32, which torch does not compute with."""
    pytest.importorskip("bitsandbytes")
    monkeypatch.setitem(FAMILIES, "phi", ("PhiConfig", "smollm", {}))
    model = make_model(tmp_path / "model", "phi")
    data = write_chats(tmp_path / "data.jsonl", 16)
    made = quantize_model(str(model), tmp_path / "out", method="int8-outliers", data=[str(data)], **FEW)
    assert made.proof is not None
    assert not [record for record in caplog.records if "MatMul8bitLt" in record.getMessage()]


@pytest.mark.parametrize(("family", "found"), [("falcon", "FalconLinear"), ("llama", None)])
def test_a_model_whose_weights_are_in_no_linears_is_refused_and_not_called_quantized(family, found):
    weights = SimpleNamespace(model=tiny_model(family), files={})
    if found is None:
        check_linears(SimpleNamespace(weights=weights))
    else:
        with pytest.raises(UserError, match=f"Most weights in the layers of this .* are those of {found} modules"):
            check_linears(SimpleNamespace(weights=weights))


def test_awq_finds_what_comes_before_linears_in_a_gemma():
    """Whose norms multiply by one more than their weight."""
    config = GemmaConfig(**{**SHAPE, "num_hidden_layers": 1}, vocab_size=64, head_dim=16)
    model = GemmaForCausalLM(config).eval()
    layer = model.model.layers[0]
    linears = {name: one for name, one in layer.named_modules() if isinstance(one, torch.nn.Linear)}
    kept = {}
    layer.register_forward_pre_hook(lambda _, args, kwargs: kept.update(args=args, kwargs=kwargs), with_kwargs=True)
    with torch.no_grad():
        model(input_ids=torch.arange(20)[None])

        def call():
            found = layer.forward(*kept["args"], **kept["kwargs"])
            return found[0] if isinstance(found, tuple) else found

        before = call()
        folds = find_folds(layer, linears, call, torch.bfloat16)
        assert [fold.linears for fold in folds] == [
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            ("mlp.gate_proj", "mlp.up_proj"),
            ("mlp.down_proj",),
        ]
        assert torch.equal(call(), before)  # looking has changed nothing


def test_a_writer_that_stores_something_else_is_found(trained, tmp_path, monkeypatch):
    own = methods.pack

    def pack(*arguments, weight_scale):
        return own(*arguments, weight_scale=weight_scale * 1.05)

    monkeypatch.setattr(methods, "pack", pack)
    with pytest.raises(UserError, match="What was written does not say what was measured"):
        quantize_model(str(trained), tmp_path / "out", method="rtn", **FEW)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_rounded_a_second_time_are_told_of(tmp_path):
    source = SimpleNamespace(weights=SimpleNamespace(run=SimpleNamespace(model=str(tmp_path))))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert twice_rounded(source, "int4") == []
    (tmp_path / "config.json").write_text('{"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}')
    for kind in ("int4", "q8_0", "4 bits", "fp8"):
        (note,) = twice_rounded(source, kind)
        assert f"The weights of {tmp_path} were rounded already (gptq), and are rounded once more here" in note
    assert twice_rounded(source, "bf16") == twice_rounded(source, "f16") == []


def test_what_does_not_go_together_is_said_first(trained, llama, tmp_path):
    for options, said in [
        ({"method": "gptqq"}, "--method is gptqq; it can be rtn, gptq"),
        ({"method": "fp8", "bits": 4}, "--bits is 4; for --method fp8 it can be 8"),
        ({"method": "rtn", "bits": 3}, "it can be 4 or 8"),
        ({"method": "rtn", "group": 48}, "--group is 48, which does not suit rows of 64 weights"),
        ({"method": "rtn", "group": 0}, "--group is 0, which does not suit rows of 64 weights"),
        ({"method": "kmeans", "group": 32}, "--group is for rtn, gptq and awq"),
    ]:
        with pytest.raises(UserError, match=said):
            quantize_model(str(trained), tmp_path / "out", **options)
    with pytest.raises(UserError, match="no run of ours, so that there is no data to measure it on"):
        quantize_model(str(llama), tmp_path / "out", method="gptq")
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "Hi", "chosen": "a", "rejected": "b"}) + "\n")
    said = r"--data: .*pairs.jsonl.* are preference data; give files with texts or conversations here\.$"
    with pytest.raises(UserError, match=said):
        quantize_model(str(llama), tmp_path / "out", method="rtn", data=[str(pairs)])
    with pytest.raises(UserError, match=said):
        export_run(trained, "safetensors", out=tmp_path / "out", data=[str(pairs)])
    pairs.unlink()
    with pytest.raises(UserError, match="exists and is not empty"):
        quantize_model(str(trained), llama, method="rtn")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("config", "said"),
    [(RobertaConfig, "an encoder of BERT's kind"), (CanineConfig, "no class of canine models that writes")],
)
def test_encoders_by_themselves_are_called_that(llama, tmp_path, config, said):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    shutil.copytree(llama, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    AutoModel.from_config(config(**sizes, **tokens, vocab_size=64)).save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=said):
        quantize_model(str(tmp_path / "model"), tmp_path / "out", method="rtn", data=["data.jsonl"])


def test_another_base_than_that_of_training_is_refused(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    kept = json.loads((tmp_path / "run" / "base.json").read_text())
    kept["tensors"] = dict.fromkeys(kept["tensors"], "0")
    (tmp_path / "run" / "base.json").write_text(json.dumps(kept))
    with pytest.raises(UserError, match="is not the base that the run in"):
        quantize_model(str(tmp_path / "run"), tmp_path / "out", method="rtn", **FEW)
    assert not (tmp_path / "out").exists()


@slow
def test_data_that_are_not_held_out_are_not_called_that(llama, tmp_path):
    data = write_chats(tmp_path / "chats.jsonl", 1)
    made = quantize_model(str(llama), tmp_path / "out", method="rtn", data=[str(data)])
    assert (made.report.data, made.proof.data, made.proof.reference) == ("calibration", "calibration", "the full model")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "held-out" not in card
    assert "base + adapter" not in card
    assert "`None`" not in card


def test_the_command_tells_people_and_programs(trained, tmp_path):
    command = ["quantize", str(trained), "--to", str(tmp_path / "out"), "--method", "rtn", "--json"]
    ended = CliRunner().invoke(app, command)
    assert ended.exit_code == 0, ended.output
    found = json.loads(ended.stdout)
    assert found["bits"] == 4
    assert found["proof"]["places"] > 100
