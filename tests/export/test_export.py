"""Every export does what base and adapter do, as its own engine runs it; one that does not is refused."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, normalizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import parity
from export.models import FAMILIES, SHAPE, make_model, make_run, make_tokenizer, write_chats
from tiny import TRAIN, write_all
from tunesmith.cli.main import app
from tunesmith.data.chat import Encoder
from tunesmith.errors import UserError
from tunesmith.export import gguf, gguf_architectures, gguf_tokenizer, onnx, onnx_layers, proof, quantized
from tunesmith.export.engines import LlamaCpp, Transformers
from tunesmith.export.export import FORMATS, export_run, push_folder
from tunesmith.export.gguf_tokenizer import pre_tokenizer_name
from tunesmith.export.proof import GREEDY, Proof
from tunesmith.export.source import Source
from tunesmith.model.fake_quantize import FakeQuantization
from tunesmith.model.gguf import read_tokenizer
from tunesmith.model.load import load_empty
from tunesmith.model.vllm import largest_rank, refused, vllm_notes
from tunesmith.run.merge import merge_run

slow = pytest.mark.slow
ENGINES = {
    "bitsandbytes": "bitsandbytes",
    "adapter": "peft",
    "gguf": "xllamacpp",
    "gguf-adapter": "xllamacpp",
    "onnx": "onnxruntime",
}


def engine_is_here(form: str) -> None:
    package = ENGINES.get(form, "transformers")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("safetensors", "fp32"),
        ("adapter", "fp32"),
        ("gguf", "f16"),
        ("gguf", "q8_0"),
        *(
            pytest.param(*one, marks=slow)
            for one in [
                ("onnx", "fp32"),  # these two SmolLM2 has, too
                ("compressed-tensors", "int8"),
                ("gguf-adapter", "f32"),
                ("safetensors", "bf16"),
                ("safetensors", "fp16"),
                ("gguf", "f32"),
                ("gguf", "bf16"),
                ("gguf", "q4_0"),
                ("compressed-tensors", "int4"),
                ("compressed-tensors", "fp8"),
                ("bitsandbytes", "nf4"),
            ]
        ),
    ],
)
def test_an_export_is_what_was_trained_as_its_engine_runs_it(trained, tmp_path, form, kind):
    engine_is_here(form)
    made = export_run(trained, form, kind=kind, out=tmp_path / "out")
    proof = made.proof
    assert proof is not None
    assert proof.places > 200
    assert proof.stops == ["<|im_end|>"]
    if kind in ("fp32", "f32", "f16"):
        assert proof.agreement == 1.0
        assert proof.largest < (5e-3 if kind != "f16" else 0.05)
        assert proof.same_text == proof.text_tokens > 0
    elif kind in ("int8", "q8_0"):
        assert proof.agreement >= 0.95  # the proof itself wants 98% where there is no tie, such as between digits here
    assert proof.adapter_share == pytest.approx(1, abs=0.1 if kind not in ("q4_0", "int4", "nf4") else 0.35)
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'license: "apache-2.0"' in card
    assert f"| {proof.agreement:.2%}" in card
    assert "| end of turn | passed |" in card
    said = json.loads((tmp_path / "out" / "export.json").read_text())
    assert said["proof"]["places"] == proof.places
    assert said["files"].keys() >= {"LICENSE", "tokenizer.json", "generation_config.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    if form == "gguf":
        modelfile = (tmp_path / "out" / "Modelfile").read_text()
        assert modelfile.startswith(f'FROM ./model-{kind}.gguf\nPARAMETER stop "<|im_end|>"\n')
        assert '{{ if eq .Role "user" }}' in modelfile.replace("else if", "if")


def test_the_modelfile_of_a_model_without_a_chat_template_has_none():
    tokenizer = make_tokenizer("smollm")
    tokenizer.chat_template = None
    encoder = Encoder(tokenizer, template=None, train_on="assistant")
    said = gguf.modelfile(SimpleNamespace(tokenizer=tokenizer, encoder=encoder, ends=[4]), "model.gguf")
    assert said.startswith('FROM ./model.gguf\nPARAMETER stop "<|im_end|>"\n# The model has no chat template')
    assert "TEMPLATE" not in said


def test_routers_that_give_more_than_a_tensor_are_run_as_transformers_runs_them(tmp_path):
    folder = parity.write_model("llama4_text", tmp_path / "model")
    ids = [3, 5, 7]
    with torch.no_grad():
        expected = parity.plain_model(folder)(torch.tensor([ids])).logits[0].log_softmax(-1)
    torch.testing.assert_close(Transformers(folder).scores([ids])[0].logprobs_tk, expected)


def test_rows_that_are_no_blocks_are_refused_and_characters_of_several_tokens_compared(runs, tiny_model, tmp_path):
    """A model with random weights and a token a byte says little else; llama.cpp tells no probabilities of those."""
    engine_is_here("gguf")
    write_all(tmp_path, tiny_model, steps=3)
    assert runs(tmp_path, *TRAIN).code == 0
    if importlib.util.find_spec("bitsandbytes") is not None:
        with pytest.raises(UserError, match="no multiples of 64, as nf4 wants; --to gguf can hold it"):
            export_run(tmp_path / "run", "bitsandbytes", out=tmp_path / "nf4")
    proof = export_run(tmp_path / "run", "gguf", kind="f16", out=tmp_path / "out").proof
    assert "\ufffd" in proof.text
    assert proof.same_text == proof.text_tokens == GREEDY


def test_an_exported_gguf_is_read_again_with_its_tokenizer_whatever_lies_beside_it(trained, llama, tmp_path):
    engine_is_here("gguf")
    export_run(trained, "gguf", kind="f16", out=tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").exists()
    found, own = read_tokenizer(tmp_path / "out" / "model-f16.gguf"), AutoTokenizer.from_pretrained(llama)
    assert [found.bos_token, found.eos_token, found.pad_token] == [own.bos_token, own.eos_token, own.pad_token]
    assert found.chat_template == own.chat_template
    assert found("Who are you?")["input_ids"] == own("Who are you?")["input_ids"]
    config = AutoConfig.from_pretrained(llama)
    assert "<|endoftext|>" not in own.get_vocab()
    assert len(found) == config.vocab_size  # with no token that the file has not


def changed(monkeypatch, form, change):
    """The exporter of a format, with what it wrote changed afterwards."""
    own = FORMATS[form]

    def write(source, folder, kind, progress):
        own.write(source, folder, kind, progress)
        change(folder)

    monkeypatch.setitem(FORMATS, form, replace(own, write=write))


def edit_json(name, **values):
    def change(folder):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, **values}))

    return change


def other_template(folder):
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text().replace("assistant\n", "model\n"))


def lose_a_token(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = [one for one in content["added_tokens"] if one["content"] != "<|im_start|>"]
    (folder / "tokenizer.json").write_text(json.dumps(content))


def untie(folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].roll(1, 0).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    edit_json("config.json", tie_word_embeddings=False)(folder)


def misname_a_tensor(folder):
    file = folder / "adapter_model.safetensors"
    tensors = {
        name.replace("layers.1.self_attn.v_proj", "layers.1.self_attn.w_proj"): t for name, t in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})


WRITTEN_FAULTS = {
    "a wrong template": ("safetensors", "fp32", other_template, "chat template does not make the tokens of training"),
    "a lost special token": ("safetensors", "fp32", lose_a_token, "becomes other tokens"),
    "a lost stop token": (
        "safetensors",
        "fp32",
        edit_json("generation_config.json", eos_token_id=2),
        "does not stop at",
    ),
    "an untied head": ("safetensors", "fp32", untie, "likeliest token"),
    "an unscaled adapter": ("adapter", "fp32", edit_json("adapter_config.json", lora_alpha=4), "of what the adapter"),
    "an ignored tensor": ("adapter", "fp32", misname_a_tensor, "log-probabilities differ"),
}


@pytest.fixture
def few(monkeypatch):
    """Enough to find a fault."""
    monkeypatch.setattr("tunesmith.export.proof.SEQUENCES", 2)


@pytest.mark.parametrize("fault", WRITTEN_FAULTS)
def test_a_fault_in_what_was_written_is_found(trained, tmp_path, monkeypatch, few, fault):
    form, kind, change, said = WRITTEN_FAULTS[fault]
    engine_is_here(form)
    changed(monkeypatch, form, change)
    with pytest.raises(UserError, match=said):
        export_run(trained, form, kind=kind, out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", ["a wrong template", "a lost special token"])
@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("compressed-tensors", "int8"),
        pytest.param("bitsandbytes", "nf4", marks=slow),
        pytest.param("onnx", "fp32", marks=slow),
    ],
)
def test_a_fault_beside_the_weights_is_found_in_every_format(trained, tmp_path, monkeypatch, few, form, kind, fault):
    """The tokenizer is the format's own copy: bits of weights that were lost do not excuse it."""
    engine_is_here(form)
    _, _, change, said = WRITTEN_FAULTS[fault]
    changed(monkeypatch, form, change)
    with pytest.raises(UserError, match=said):
        export_run(trained, form, kind=kind, out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def drop_the_adapter(monkeypatch):
    def alone(weights, name, tensor, dtype, **_):
        return tensor if dtype is None else tensor.to(dtype)

    monkeypatch.setattr("tunesmith.run.streamed._merged", alone)


@pytest.mark.parametrize(
    ("form", "kind"),
    [("safetensors", "fp32"), pytest.param("gguf", "f16", marks=slow), pytest.param("onnx", "fp32", marks=slow)],
)
def test_a_dropped_adapter_is_found(trained, tmp_path, monkeypatch, few, form, kind):
    engine_is_here(form)
    drop_the_adapter(monkeypatch)
    with pytest.raises(UserError, match="of what the adapter learned"):
        export_run(trained, form, kind=kind, out=tmp_path / "out")


@pytest.mark.parametrize(
    ("form", "kind"), [("compressed-tensors", "int4"), pytest.param("bitsandbytes", "nf4", marks=slow)]
)
def test_a_dropped_adapter_is_found_under_the_noise_of_four_bits(trained, tmp_path, monkeypatch, few, form, kind):
    engine_is_here(form)
    drop_the_adapter(monkeypatch)
    with pytest.raises(UserError) as caught:
        export_run(trained, form, kind=kind, out=tmp_path / "out")
    found = re.search(r"(-?\d+)% of what the adapter learned are in it", str(caught.value))
    assert found, caught.value
    assert abs(int(found[1])) < 20


def no_permutation(monkeypatch):
    monkeypatch.setattr(gguf_architectures, "arranged", lambda name, tensor, *_: tensor)


def plain_token(monkeypatch):
    own = gguf_tokenizer._tokens

    def tokens(found, tokenizer, vocabulary):
        names, kinds = own(found, tokenizer, vocabulary)
        names[names.index("<|im_start|>")] = "[LOST]"
        return names, kinds

    monkeypatch.setattr(gguf_tokenizer, "_tokens", tokens)


def other_head(monkeypatch):
    generator = torch.Generator().manual_seed(0)

    def head(model):
        return {"output.weight": torch.randn(model.config.vocab_size, model.config.hidden_size, generator=generator)}

    monkeypatch.setattr(gguf, "rope_tensors", head)


def other_way_of_splitting(monkeypatch):
    monkeypatch.setattr(gguf_tokenizer, "pre_tokenizer_name", lambda found: "gpt-2")


def template_of_another(monkeypatch):
    from gguf import GGUFWriter

    own = GGUFWriter.add_chat_template
    monkeypatch.setattr(
        GGUFWriter, "add_chat_template", lambda self, text: own(self, text.replace("assistant", "model"))
    )


def unscaled_factors(monkeypatch):
    own = gguf._factors
    monkeypatch.setattr(gguf, "_factors", lambda source: ((name, a, b / 2) for name, a, b in own(source)))


GGUF_FAULTS = {
    "swapped permutation": ("gguf", no_permutation, "likeliest token"),
    "lost special token": ("gguf", plain_token, "becomes other tokens"),
    "untied head": ("gguf", other_head, "likeliest token"),
    "other pre-tokenizer": ("gguf", other_way_of_splitting, "the tokens of training|becomes other"),
    "wrong template": ("gguf", template_of_another, "chat template does not make the tokens of training"),
    "unscaled adapter": ("gguf-adapter", unscaled_factors, "of what the adapter learned"),
}


@pytest.mark.parametrize("fault", GGUF_FAULTS)
def test_a_fault_in_a_gguf_file_is_found_by_llama_cpp(trained, tmp_path, monkeypatch, few, fault):
    engine_is_here("gguf")
    form, plant, said = GGUF_FAULTS[fault]
    plant(monkeypatch)
    with pytest.raises(UserError, match=said):
        export_run(trained, form, kind="f32", out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_q8_0_is_rounded_here_as_llama_cpp_does(trained, tmp_path):
    """Weights, and what goes into each matmul."""
    engine_is_here("gguf")
    source = Source.of(trained)
    gguf.write(source, tmp_path, "q8_0", lambda *_: None)
    ids = list(range(5, 45))
    engine = FORMATS["gguf"].engine(source, tmp_path, "q8_0")
    (found,) = engine.scores([ids])
    engine.close()

    def divergence(kind):
        rows = found.same_of(proof._reference(source, [ids], kind)[0])
        return (rows.exp() * (rows - found.logprobs_tk)).sum(1).mean().item()

    assert divergence("q8_0") < 0.25 * divergence(None)


def test_fp8_is_rounded_here_as_compressed_tensors_does(trained, tmp_path):
    """Weights, and each token that goes into a matmul."""
    source = Source.of(trained)
    quantized.write_compressed(source, tmp_path, "fp8", lambda *_: None)
    engine = FORMATS["compressed-tensors"].engine(source, tmp_path, "fp8")
    model, _ = load_empty(source.run, dtype="fp32")
    rounded = FakeQuantization.of(model, "fp8", with_inputs=True)
    x_btk = torch.randn(2, 5, SHAPE["hidden_size"], generator=torch.Generator().manual_seed(0))
    linear = engine.model.get_submodule("model.layers.0.mlp.up_proj")
    assert torch.equal(linear(x_btk), torch.nn.functional.linear(rounded.round_inputs(x_btk), linear.weight))


@pytest.fixture
def stricter(monkeypatch):
    """8 bits must agree everywhere, as they would have to where every other place is a near tie."""
    for name in ("8 bits", "fp8"):
        monkeypatch.setitem(proof.BOUNDS, name, replace(proof.BOUNDS[name], agreement=1.01))


@pytest.mark.parametrize(
    ("form", "kind"), [("gguf", "q8_0"), ("compressed-tensors", "int8"), ("compressed-tensors", "fp8")]
)
def test_below_the_bound_an_export_is_compared_with_base_and_adapter_rounded_alike(
    trained, tmp_path, stricter, form, kind
):
    engine_is_here(form)
    made = export_run(trained, form, kind=kind, out=tmp_path / "out")
    assert made.proof is not None
    assert made.proof.rounded_agreement >= 0.9
    assert "| the same, of base + adapter rounded alike | " in (tmp_path / "out" / "README.md").read_text()


def off_by_a_tenth(name, tensor, kind):
    return (tensor * 0.9 if name == "blk.1.attn_norm.weight" else tensor), kind


def test_a_fault_is_not_explained_by_rounding(trained, tmp_path, monkeypatch, stricter):
    """A smaller one than the divergence of 8 bits tells: a norm whose weights are off by a tenth."""
    engine_is_here("gguf")
    own = gguf._encoded
    monkeypatch.setattr(gguf, "_encoded", lambda name, *rest: own(name, *off_by_a_tenth(name, *rest)))
    with pytest.raises(UserError, match="nor is that what rounding does to this model: base"):
        export_run(trained, "gguf", kind="q8_0", out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def other_scales(monkeypatch):
    own = quantized._compressed

    def compressed(*arguments):
        made = own(*arguments)
        return {**made, "weight_scale": made["weight_scale"].roll(1, 0)}

    monkeypatch.setattr(quantized, "_compressed", compressed)


def half_of_the_codes(monkeypatch):
    own = quantized._nf4
    monkeypatch.setattr(quantized, "_nf4", lambda weight: own(weight * (torch.arange(weight.shape[1]) % 2)))


def forgotten_cache(monkeypatch):
    own = onnx_layers.OneLayer.forward

    def forward(self, hidden, past, given):
        return own(self, hidden, [tensor * 0 for tensor in past], given)

    monkeypatch.setattr(onnx_layers.OneLayer, "forward", forward)


@pytest.mark.parametrize(
    ("form", "kind", "plant", "said"),
    [
        ("compressed-tensors", "int8", other_scales, "likeliest token"),
        pytest.param("bitsandbytes", "nf4", half_of_the_codes, "likeliest token", marks=slow),
        pytest.param("onnx", "fp32", forgotten_cache, "the greedy text goes on with", marks=slow),
    ],
)
def test_a_fault_of_other_writers_is_found(trained, tmp_path, monkeypatch, few, form, kind, plant, said):
    engine_is_here(form)
    plant(monkeypatch)
    with pytest.raises(UserError, match=said):
        export_run(trained, form, kind=kind, out=tmp_path / "out")


@slow
@pytest.mark.parametrize("family", ["smollm3", "gemma2", "qwen3"])
def test_onnx_layers_of_a_kind_are_traced_once_and_each_has_its_weights(tmp_path, monkeypatch, family):
    """Two rows at once, of which one begins later, with what came before in the cache: not what a proof asks."""
    import numpy as np
    import onnxruntime

    traced, own = [], onnx._export
    monkeypatch.setattr(
        onnx, "_export", lambda module, *rest, **more: traced.append(module) or own(module, *rest, **more)
    )
    kinds = {"smollm3": 2, "gemma2": 2, "qwen3": 1}
    layers = {"num_hidden_layers": 3} | ({"no_rope_layers": [1, 0, 1]} if family == "smollm3" else {})
    run = make_run(tmp_path / "run", make_model(tmp_path / "model", family, **layers), steps=1)
    source = Source.of(run)
    onnx.write(source, tmp_path, "fp32", lambda *_: None)
    assert [type(module).__name__ for module in traced] == ["OneLayer"] * kinds[family] + ["_Surroundings"]

    model, session = onnx._whole(source, lambda *_: None), onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, :3] = 0
    names = [one.name for one in session.get_inputs()]
    shape = next(one.shape for one in session.get_inputs() if one.name.startswith("past"))
    past = [torch.randn(2, shape[1], 5, shape[3]) for _ in range(6)]
    tokens = torch.arange(14).view(2, 7) + 3
    given = [one.numpy() for one in (tokens, mask, *past)]
    found = session.run(None, dict(zip(names, given, strict=True)))
    with torch.no_grad():
        expected = onnx.Decoder(model)(tokens, mask, past)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), atol=1e-4)


def test_a_model_whose_layers_cannot_be_traced_one_by_one_is_traced_as_a_whole_and_that_is_said(monkeypatch):
    def fails(*_):
        raise TypeError("no such layer")

    said, model = [], torch.nn.Linear(2, 2)
    monkeypatch.setattr(onnx, "by_layers", fails)
    monkeypatch.setattr(onnx, "_export", lambda module, *_: module)
    inputs = onnx_layers.Inputs(torch.zeros(1, 2), torch.zeros(1, 2), [], {})
    assert isinstance(onnx._traced(model, inputs, 4, lambda *told: said.append(told)), onnx.Decoder)
    assert said == [("Tracing all 4 layers for ONNX, which takes minutes", 0, None)]


@slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families_survive_the_trip(tmp_path, family):
    """Each has its traps: permuted queries, rope factors, norm offsets, tied heads, experts, pre-tokenizers."""
    engine_is_here("gguf")
    run = make_run(tmp_path / "run", make_model(tmp_path / "model", family))
    for form, kind in [("gguf", "f32"), ("gguf", "q8_0"), ("safetensors", "fp32"), ("adapter", "fp32")]:
        proof = export_run(run, form, kind=kind, out=tmp_path / form / kind).proof
        assert proof is not None
        assert proof.agreement >= (0.97 if kind == "q8_0" else 1.0)


@pytest.mark.parametrize(
    ("config", "changes", "context"),
    [
        ("MistralConfig", {"sliding_window": 2047}, 2047),
        ("Phi3Config", {"sliding_window": 2047, "pad_token_id": 0}, 2047),  # llama.cpp reads it, and lets it be
        ("Phi3Config", {"sliding_window": None, "pad_token_id": 0}, 4096),
        ("Qwen2Config", {"sliding_window": 2047, "use_sliding_window": False}, 4096),
        ("Gemma2Config", {"sliding_window": 2047}, 4096),
    ],
)
def test_a_file_names_no_longer_context_than_the_window_that_llama_cpp_does_not_have(config, changes, context):
    described = getattr(transformers, config)(max_position_embeddings=4096, **changes)
    assert gguf_architectures._context(described, has_windows=config == "Gemma2Config") == context


class Said(dict):
    """A writer that keeps what is said to it."""

    def __getattr__(self, name):
        return lambda *said: self.update({name.removeprefix("add_"): said[0] if len(said) == 1 else said})


def described(family, **changes):
    """What a GGUF file says of a tiny model of this family, without its weights."""
    name, _, own = FAMILIES[family]
    config = getattr(transformers, name)(**{**SHAPE, "vocab_size": 64, **own, **changes})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    said = Said()
    gguf_architectures.describe(said, model, gguf_architectures.architecture_of(model))
    return said


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("own", "scale"),
    [({}, 1.0), ({"attention_factor": 1.0}, 0.8782), ({"mscale": 0.7, "mscale_all_dim": 1.0}, 0.8461)],
)
def test_yarns_scale_of_attention_is_told_beside_llama_cpps_own(own, scale):
    """llama.cpp multiplies by 1 + 0.1 ln 4 itself, whatever the model does."""
    said = described("llama", rope_parameters={**YARN, **own})
    assert said["rope_scaling_attn_factors"] == pytest.approx(scale, abs=1e-4)
    assert said["rope_scaling_factor"] == 4.0


@pytest.mark.parametrize(("own", "found"), [({"beta_fast": 8.0}, "beta_fast 8.0"), ({"truncate": False}, "truncate")])
def test_a_yarn_that_llama_cpp_computes_otherwise_is_refused(own, found):
    with pytest.raises(UserError, match=f"its YaRN has {found}"):
        described("llama", rope_parameters={**YARN, **own})


def test_gpt_oss_is_exported_with_the_yarn_of_its_publishers_and_deepseek_v3_with_one_factor_alone():
    """llama.cpp rounds the bounds between which gpt-oss's frequencies are stretched, and everybody runs it so."""
    published = {**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0}
    assert described("gpt_oss", rope_parameters=published)["rope_scaling_factor"] == 4.0
    assert described("deepseek_v3")["rope_scaling_attn_factors"] == 1.0
    with pytest.raises(UserError, match="scales positions and attention by different factors"):
        described("deepseek_v3", rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 1.0})


@pytest.mark.parametrize("family", FAMILIES)
def test_each_tensor_of_a_family_has_its_places(family):
    import gguf as package

    name, _, own = FAMILIES[family]
    config = getattr(transformers, name)(**{**SHAPE, "vocab_size": 64, **own})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    architecture = gguf_architectures.architecture_of(model)
    names = package.get_tensor_name_map(package.MODEL_ARCH[architecture.name], config.num_hidden_layers)
    tied = model.all_tied_weights_keys if config.tie_word_embeddings else {}
    held = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    found = [
        one
        for stored, tensor in held.items()
        for one in gguf_architectures.converted(stored, tensor, model, architecture, names)
    ]
    assert len({place for place, _ in found}) == len(found)
    assert sum(tensor.numel() for _, tensor in found) == sum(tensor.numel() for tensor in held.values())


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("granite4", {"position_embedding_type": "rope"}, "its positions are of the kind rope"),
        ("granite4", {"mamba_n_groups": 2}, "its state spaces have several groups"),
        ("olmoe", {"num_key_value_heads": 2}, "it has fewer heads of keys than of queries"),
        ("qwen2_moe", {"norm_topk_prob": True}, "its routers normalise the weights"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 2}, "its layers do not see a sliding window and all tokens"),
        ("cohere2", {"layer_types": ["full_attention"] * 4}, "another order than every 4th"),
        ("qwen3_5", {"layer_types": ["full_attention"] + ["linear_attention"] * 3}, "not at even distances"),
        ("seed_oss", {"attention_out_bias": True}, "it has biases"),
        ("deepseek_v2", {"q_lora_rank": None}, "its queries are not compressed"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "its routers choose groups of experts by their best"),
        ("glm4_moe", {"n_group": 2}, "its routers choose groups of experts first"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(family, changes, said):
    with pytest.raises(UserError, match=f"cannot be exported to GGUF: .*{said}"):
        described(family, **changes)


def test_a_gemma_2_without_soft_caps_is_not_given_llama_cpps():
    assert described("gemma2")["attn_logit_softcapping"] == 50.0
    said = described("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert said["attn_logit_softcapping"] == said["final_logit_softcapping"] >= 1e5


def test_what_llama_cpp_does_not_like_about_a_file_is_said():
    engine = object.__new__(LlamaCpp)
    engine._said = io.StringIO(
        "0.00 E llama_model_load: error loading model: invalid n_rot: 8, expected 16\n"
        "0.01 E srv init: exiting due to model loading error\nRuntimeError: Failed to init server.\n"
    )
    assert engine._last_words() == "invalid n_rot: 8, expected 16"


@slow
@pytest.mark.parametrize("takes_words", [False, True])
def test_words_that_no_merge_makes_are_read_as_the_tokenizer_reads_them(tmp_path, takes_words):
    """Llama 3's tokenizer takes a word that is a token as it is; others with its pattern make each word by merges."""
    engine_is_here("gguf")
    model = make_model(tmp_path / "model", "llama3")
    described = json.loads((model / "tokenizer.json").read_text())
    vocabulary = described["model"]["vocab"]
    assert "100" not in vocabulary
    vocabulary["100"] = len(vocabulary)  # the model has rows for a few more tokens; held-out texts have this number
    described["model"]["ignore_merges"] = takes_words
    (model / "tokenizer.json").write_text(json.dumps(described))
    proof = export_run(make_run(tmp_path / "run", model), "gguf", kind="f32", out=tmp_path / "out").proof
    assert proof is not None
    assert proof.agreement == 1.0


@pytest.mark.parametrize("taken", ["lstrip", "rstrip"])
def test_a_token_that_takes_in_the_spaces_beside_it_is_looked_at_with_spaces(trained, taken):
    """llama.cpp leaves them where they are, but in models that are called Phi-3."""
    source = Source.of(trained)
    source.tokenizer.add_tokens([AddedToken("<mask>", special=True, **{taken: True})], special_tokens=True)
    plain = Source.of(trained).tokenizer
    plain.add_tokens(["<mask>"], special_tokens=True)

    def failures(tokenizer):
        ways = {"tokenize": lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]}
        ways |= {"prompt": lambda *_: None, "stops_at": lambda _: True}
        found = Proof("an engine", "fp32")
        proof._compare_words(source, SimpleNamespace(**ways), found)
        return found.failures

    assert failures(source.tokenizer) == []
    assert "'A line of text, 1234 <mask> A line of' becomes other tokens" in failures(plain)[0]


# What is refused, or said


def test_an_engine_that_is_not_here_is_named_in_the_card(trained, tmp_path, monkeypatch):
    monkeypatch.setattr("tunesmith.export.export.has", lambda package: False)
    made = export_run(trained, "adapter", out=tmp_path / "out")
    assert made.proof is None
    assert "Not proved: install peft to have it proved." in (tmp_path / "out" / "README.md").read_text()


def test_what_cannot_be_exported_is_refused_before_anything_is_written(trained, llama, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="--to is onxx; it can be safetensors, adapter, gguf"):
        export_run(trained, "onxx", out=tmp_path / "out")
    with pytest.raises(UserError, match="--type is q9; for --to gguf it can be f32, f16"):
        export_run(trained, "gguf", kind="q9", out=tmp_path / "out")
    with pytest.raises(UserError, match=r"made by llama.cpp's llama-quantize, which is not installed"):
        export_run(trained, "gguf", kind="q4_k_m", out=tmp_path / "out")
    with pytest.raises(UserError, match="exists and is not empty"):
        export_run(trained, "adapter", out=llama)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"notes.txt is a file; give --out a folder"):
        export_run(trained, "adapter", out=tmp_path / "notes.txt")
    with pytest.raises(UserError, match=r"notes.txt is a file, so there can be no folder .*notes.txt/out"):
        export_run(trained, "adapter", out=tmp_path / "notes.txt" / "out")
    (tmp_path / "notes.txt").unlink()
    monkeypatch.setattr("tunesmith.disk.free", lambda folder: 1000)
    with pytest.raises(UserError, match=r" needs .* and its disk has 1000 bytes free; .* --out"):
        export_run(trained, "adapter", out=tmp_path / "out")
    monkeypatch.setitem(
        gguf_architectures.ARCHITECTURES, "Other", gguf_architectures.ARCHITECTURES.pop("LlamaForCausalLM")
    )
    with pytest.raises(
        UserError, match="LlamaForCausalLM cannot be exported to GGUF here; export it with --to safetensors"
    ):
        export_run(trained, "gguf", out=tmp_path / "out")
    gguf_architectures.ARCHITECTURES["LlamaForCausalLM"] = gguf_architectures.ARCHITECTURES["Other"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora": {"rank": 2, "targets": ["q_proj", "embed_tokens"]}}, "embedding and output head are one weight"),
        (
            {"method": "peft", "lora": {}, "peft": {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 2}},
            "PROMPT_TUNING puts vectors before each document",
        ),
    ],
)
def test_an_adapter_that_no_weight_can_take_in_is_not_sent_on_to_be_merged(tiny_model, tmp_path, changes, said):
    run = make_run(tmp_path, tiny_model, steps=1, **changes)
    for attempt in (lambda: export_run(run, "gguf", out=tmp_path / "out"), lambda: merge_run(run, tmp_path / "out")):
        with pytest.raises(UserError, match=f"{said}.*keep the adapter"):
            attempt()


def test_a_way_of_splitting_texts_without_a_name_is_refused():
    split = {"type": "Split", "pattern": {"Regex": r"\w+"}, "behavior": "Isolated"}
    last = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    with pytest.raises(UserError, match=r"splits texts in a way for which no llama.cpp name is known"):
        pre_tokenizer_name({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, last]}, "model": {}})


@pytest.mark.parametrize("step", [None, normalizers.Replace("``", '"'), normalizers.NFKC(), normalizers.Prepend("_")])
def test_a_sentencepiece_that_changes_more_than_spaces_is_refused(step):
    tokenizer = make_tokenizer("sentencepiece")
    usual = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    if step is None:
        gguf_tokenizer.write_tokenizer(gguf._Nothing(), tokenizer, vocabulary=len(tokenizer), ends=[4])
        return
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([step, *usual])
    with pytest.raises(UserError, match=r"changes texts by .* first, which llama.cpp does not"):
        gguf_tokenizer.write_tokenizer(gguf._Nothing(), tokenizer, vocabulary=len(tokenizer), ends=[4])


@pytest.mark.parametrize(
    ("split", "model", "name"),
    [
        ({"behavior": "Isolated", "invert": False}, {"ignore_merges": True}, "llama-bpe"),
        ({"behavior": "Isolated", "invert": False}, {"ignore_merges": False}, "dbrx"),
        ({"behavior": "Removed", "invert": True}, {}, "dbrx"),
        ({"behavior": "Removed", "invert": False}, {}, None),
    ],
)
def test_llama_3s_pattern_has_a_name_for_each_way_of_making_words(split, model, name):
    (pattern,) = next(patterns for patterns, name in gguf_tokenizer.SPLITS.items() if name == "llama-bpe")
    last = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    steps = [{"type": "Split", "pattern": {"Regex": pattern}, **split}, last]
    found = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}, "model": model}
    if name is None:
        with pytest.raises(UserError, match="splits texts in a way"):
            pre_tokenizer_name(found)
    else:
        assert pre_tokenizer_name(found) == name


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"use_dora": True}, "rejects DoRA"),
        ({"bias": "all"}, "rejects adapters with trained biases"),
        ({"modules_to_save": ["lm_head"]}, "rejects fully trained modules"),
        ({"trainable_token_indices": {"embed_tokens": [5]}}, "rejects trained token embeddings"),
        ({"lora_bias": True}, "rejects adapters with biases of their own"),
        ({"init_lora_weights": "pissa"}, "rejects adapters over a base that their start has changed"),
        ({"rank_pattern": {"q_proj": 4}}, "before 0.32 ignores rank_pattern"),
        ({"alpha_pattern": {"q_proj": 4}}, "before 0.32 ignores alpha_pattern"),
        ({"init_lora_weights": "gaussian"}, None),
        ({"r": 100}, "--max-lora-rank 128"),
        ({"r": 8}, None),
    ],
)
def test_what_vllm_would_ignore_or_reject_is_said(config, said):
    notes = vllm_notes({"r": 8, **config}, [])
    assert (said in notes[0] and len(notes) == 1) if said else notes == []


def test_patterns_are_refused_where_vllm_is_known_to_be_old():
    config = {"r": 8, "alpha_pattern": {"q_proj": 4}, "rank_pattern": {"q_proj": 30}}
    assert len(refused(config, [], (0, 11, 2))) == 1
    assert refused(config, [], (0, 32, 0)) == []
    assert largest_rank(config) == 32


def test_a_quantizer_of_llama_cpp_is_used_where_there_is_one(trained, tmp_path, monkeypatch, few):
    """A stand-in that copies: its proof is that of the file it was given."""
    engine_is_here("gguf")
    tool = tmp_path / "bin" / "llama-quantize"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\ntest "$3" = Q4_K_M && cp "$1" "$2"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    made = export_run(trained, "gguf", kind="q4_k_m", out=tmp_path / "out")
    assert made.proof is not None
    assert [file.name for file in (tmp_path / "out").glob("*.gguf")] == ["model-q4_k_m.gguf"]


def test_push_sends_the_folder_into_a_private_repository(tmp_path, monkeypatch):
    calls = []

    class Api:
        def create_repo(self, name, **options):
            calls.append(("create", name, options))

        def upload_folder(self, **options):
            calls.append(("upload", options["repo_id"], options["folder_path"]))
            if len(calls) > 2:
                raise RuntimeError("403 Forbidden: no right to write")

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    push_folder(tmp_path, "me/model", lambda *_: None)
    assert calls == [("create", "me/model", {"private": True, "exist_ok": True}), ("upload", "me/model", str(tmp_path))]
    with pytest.raises(UserError, match="the hub refused it: 403 Forbidden"):
        push_folder(tmp_path, "me/model", lambda *_: None)


def test_weights_that_are_no_numbers_are_called_that(trained, tmp_path, few):
    shutil.copytree(trained, tmp_path / "run")
    file = tmp_path / "run" / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"base \+ adapter are no numbers \(nan\)"):
        export_run(tmp_path / "run", "safetensors", out=tmp_path / "out")


def test_push_without_a_hub_is_refused_first(trained, tmp_path):
    with pytest.raises(UserError, match="--push me/model: the hub cannot be reached"):
        export_run(trained, "adapter", out=tmp_path / "out", push="me/model")


def test_the_command_says_what_was_proved_and_on_which_data(trained, tmp_path):
    engine_is_here("adapter")
    held_out = write_chats(tmp_path / "other.jsonl", 2, start=50)
    command = ["export", str(trained), "--to", "adapter", "--out", str(tmp_path / "out"), "--data", str(held_out)]
    ended = CliRunner().invoke(app, command)
    assert ended.exit_code == 0, ended.output
    assert "Proved by peft" in ended.output
    assert "the same likeliest token at 100.00%" in " ".join(ended.output.split())


def test_a_model_that_does_not_fit_into_memory_is_proved_a_layer_at_a_time_or_said_not_to_be(
    trained, tmp_path, monkeypatch
):
    monkeypatch.setattr("tunesmith.export.export.fits", lambda source: False)
    proof = export_run(trained, "safetensors", kind="fp32", out=tmp_path / "merged").proof
    assert proof is not None
    assert proof.engine.endswith("one layer at a time")
    assert proof.agreement == 1.0
    made = export_run(trained, "adapter", out=tmp_path / "out")
    assert made.missing == "the model does not fit into this machine's memory; prove it on a larger one."


@slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_full_runs_and_files_in_parts_are_exported(llama, tmp_path, monkeypatch, method):
    engine_is_here("gguf")
    monkeypatch.setattr("tunesmith.checkpoint.result.LARGEST_FILE", 200_000)
    run = make_run(tmp_path / "run", llama, method=method, learning_rate=1e-3)
    for form, kind in [("safetensors", "fp32"), ("gguf", "f16"), ("compressed-tensors", "int8")]:
        made = export_run(run, form, kind=kind, out=tmp_path / form)
        assert made.proof is not None
    assert len(list((tmp_path / "safetensors").glob("model-*.safetensors"))) > 1
    AutoModelForCausalLM.from_pretrained(tmp_path / "safetensors")


def test_what_a_generation_config_asks_of_decoding_is_no_fault_of_an_export(tmp_path):
    """The text of the proof is the model's alone; a repetition penalty makes another one."""
    base = make_model(tmp_path / "base", "llama")
    file = base / "generation_config.json"
    asked = {"repetition_penalty": 50.0, "do_sample": True, "num_beams": 2}
    file.write_text(json.dumps({**json.loads(file.read_text()), **asked}))
    run = make_run(tmp_path / "run", base, steps=2)
    proof = export_run(run, "safetensors", kind="fp32", out=tmp_path / "out").proof
    assert proof is not None
    assert proof.same_text == proof.text_tokens > 1
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()).items() >= asked.items()


def test_an_export_of_a_checkpoint_says_so(trained, tmp_path, few):
    shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "adapter")
    (tmp_path / "run" / "summary.json").unlink()
    made = export_run(tmp_path / "run", "adapter", out=tmp_path / "out")
    assert made.step == 12
    assert made.proof is None or made.proof.agreement == 1.0


@pytest.mark.parametrize(
    ("templates", "expected"),
    [
        ({"default": "a", "tool_use": "b"}, {"chat_template": "a", "chat_template.tool_use": "b"}),
        ({"rag": "c", "tool_use": "b"}, {"chat_template.rag": "c", "chat_template.tool_use": "b"}),
    ],
)
def test_of_a_model_with_several_templates_all_are_in_its_gguf(tmp_path, templates, expected):
    library = pytest.importorskip("gguf")
    tokenizer = make_tokenizer("gpt-2")
    tokenizer.chat_template = templates
    writer = library.GGUFWriter(tmp_path / "a.gguf", "llama")
    gguf_tokenizer.write_tokenizer(writer, tokenizer, vocabulary=len(tokenizer), ends=[])
    found = {name: one.value for name, one in writer.kv_data[0].items() if "chat_template" in name}
    assert {f"tokenizer.{name}": text for name, text in expected.items()} == {
        name: text for name, text in found.items() if isinstance(text, str)
    }
