"""Exports proved by vLLM: each does what base and adapter do, and one that does not is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from export.models import make_model, make_run
from tunesmith.errors import UserError
from tunesmith.export import engines
from tunesmith.export.engines import Vllm
from tunesmith.export.export import FORMATS, export_run
from tunesmith.infer.vllm_server import VARIABLE
from vllm_here import needs_vllm


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads of a size that vLLM's attention on a CPU has."""
    folder = tmp_path_factory.mktemp("vllm")
    return make_run(folder / "run", make_model(folder / "model", "llama", head_dim=32))


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize(
    ("form", "kind"),
    [("adapter", "fp32"), ("safetensors", "fp32"), ("safetensors", "bf16"), ("compressed-tensors", "int4")],
)
def test_an_export_is_what_was_trained_as_vllm_runs_it(run, tmp_path, form, kind):
    proof = export_run(run, form, kind=kind, out=tmp_path / "out", engine="vllm").proof
    assert proof is not None
    assert proof.engine.startswith("vLLM 0.")
    assert proof.places > 200
    assert proof.stops == ["<|im_end|>"]
    assert proof.chat_template == "the same tokens"
    if kind == "fp32":
        assert proof.agreement == 1.0
        assert proof.largest < 1e-3
        assert proof.same_text == proof.text_tokens > 0
    assert proof.adapter_share == pytest.approx(1, abs=0.35 if kind == "int4" else 0.02)
    assert "| engine | vLLM 0." in (tmp_path / "out" / "README.md").read_text()


def half_the_scale(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": config["lora_alpha"] // 2}))


def permuted_queries(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    heads, width = tensors[name].unflatten(0, (-1, 2, 16)), tensors[name].shape
    tensors[name] = heads.transpose(1, 2).reshape(width).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def other_stop(folder: Path) -> None:
    """In both files: vLLM stops at the end token of the tokenizer, too."""
    for name, end in (
        ("generation_config.json", {"eos_token_id": 2}),
        ("tokenizer_config.json", {"eos_token": "</s>"}),
    ):
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**config, **end}))


def silence_a_module(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    for name in [name for name in tensors if "layers.1.self_attn.o_proj" in name]:
        tensors[name] = torch.zeros_like(tensors[name])
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


FAULTS = {
    "an adapter at half its scale": ("adapter", half_the_scale, "of what the adapter learned"),
    "a module of an adapter that is lost": ("adapter", silence_a_module, "log-probabilities differ"),
    "permuted queries": ("safetensors", permuted_queries, "likeliest token"),
    "a lost stop token": ("safetensors", other_stop, "does not stop at"),
}


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_by_vllm(run, tmp_path, monkeypatch, fault):
    form, plant, said = FAULTS[fault]
    own = FORMATS[form]

    def write(source, folder, kind, progress):
        own.write(source, folder, kind, progress)
        plant(folder)

    monkeypatch.setitem(FORMATS, form, replace(own, write=write))
    monkeypatch.setattr("tunesmith.export.proof.SEQUENCES", 2)
    with pytest.raises(UserError, match=said):
        export_run(run, form, kind="fp32", out=tmp_path / "out", engine="vllm")
    assert list(tmp_path.iterdir()) == []


class Protocol:
    """What vLLM 0.32 answers: of a model of 5 tokens whose next token is likely the one that is one higher. Adapters
    of a `k_proj` are not read."""

    version = "0.32.0"

    def __init__(self, model, options, environment=None):
        self.options, self.loaded = list(options), []

    def ask(self, path, body):
        if path == "/v1/load_lora_adapter":
            self.loaded.append(load_file(Path(body["lora_path"], "adapter_model.safetensors")))
        if path != "/v1/completions":
            return "Success: done."
        is_read = body["model"] != "base" and not (self.loaded and any("k_proj" in name for name in self.loaded[-1]))
        rows = [
            self.row(before, after, body["prompt_logprobs"], 0.5 if is_read else 0.0)
            for before, after in pairwise(body["prompt"])
        ]
        return {"choices": [{"prompt_logprobs": [None, *rows]}]}

    def row(self, before, after, count, step):
        ranked = [(before + 1 + rank) % 5 for rank in range(5)]
        told = {token: {"logprob": -1.0 - step * rank, "rank": rank + 1} for rank, token in enumerate(ranked)}
        return {str(token): one for token, one in told.items() if one["rank"] <= count or token == after}


@pytest.fixture
def protocol(monkeypatch):
    monkeypatch.setattr(engines, "Server", Protocol)


def test_what_vllm_tells_of_prompts_becomes_scores_of_each_place(protocol, tmp_path):
    engine = Vllm(tmp_path, vocabulary=3, context=64, dtype="float32")
    (scores,) = engine.scores([[1, 2, 4]])
    assert scores.ids_tk.tolist() == [[2, 3, 4], [3, 4, 0], [0, 1, 2]], "the likeliest, without the token that came"
    assert scores.logprobs_tk[0].tolist() == [-1.0, -1.5, -2.0]


def test_a_module_that_vllm_does_not_read_is_found(protocol, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 24}))
    modules = ("q_proj", "k_proj", "v_proj")
    factors = {f"model.layers.0.{name}.lora_{side}.weight": torch.ones(2, 2) for name in modules for side in "AB"}
    save_file(factors, tmp_path / "adapter_model.safetensors")
    engine = Vllm(tmp_path, vocabulary=5, context=64, dtype="float32", base=tmp_path / "base")
    options = engine.server.options
    assert options[options.index("--max-lora-rank") + 1] == "32"
    assert sorted(engine.without_influence([1, 2, 3])) == [
        "model.layers.0.k_proj.lora_A.weight",
        "model.layers.0.k_proj.lora_B.weight",
    ]
    assert [sorted(one) for one in engine.server.loaded] == [
        [f"model.layers.0.{name}.lora_A.weight", f"model.layers.0.{name}.lora_B.weight"] for name in sorted(modules)
    ]


def test_what_vllm_cannot_prove_is_refused_before_anything_is_written(trained, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="--engine is peft; it can be vllm"):
        export_run(trained, "adapter", out=tmp_path / "out", engine="peft")
    with pytest.raises(UserError, match="it proves --to safetensors, adapter, compressed-tensors, not onnx"):
        export_run(trained, "onnx", out=tmp_path / "out", engine="vllm")
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="--engine vllm: vLLM is not installed here"):
        export_run(trained, "adapter", out=tmp_path / "out", engine="vllm")
    assert list(tmp_path.iterdir()) == []
