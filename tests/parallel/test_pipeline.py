"""A run whose model is cut into stages over the ranks: the same data, losses and gradients in each step as on one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, MixtralConfig, Qwen3Config

from loads_elsewhere import check_results
from parallel.on_ranks import METHODS, STEPS, made
from parallel.test_resume import assert_close
from tiny import SETTINGS, write_data
from tiny_model import make_tiny_model
from tunesmith.config.load import from_mapping
from tunesmith.config.schema import Lora
from tunesmith.errors import UserError
from tunesmith.measure.bench import Workload, plan_for
from tunesmith.model import attention, lora
from tunesmith.model.forward_spec import confirm_forward_spec
from tunesmith.parallel.pipeline import Pipelined, Stages, check_stages, cut
from tunesmith.plan.plan import Mesh, Plan
from tunesmith.run.start import prepare_run

WAYS = {
    "1f1b": ({"pipeline": 2}, "none", "1f1b"),
    "interleaved": ({"pipeline": 2}, "none", "interleaved"),
    "zero-bubble": ({"pipeline": 2}, "none", "zero-bubble"),
    "shard": ({"pipeline": 2, "shard": 2}, "zero3", "1f1b"),
    "shard interleaved": ({"pipeline": 2, "shard": 2}, "zero3", "interleaved"),
    "replicate": ({"pipeline": 2, "replicate": 2}, "ddp", "1f1b"),
}
QUICK = [
    *(("full", way) for way in ("interleaved", "zero-bubble", "shard")),
    *((method, "1f1b") for method in ("lora", "qlora")),
]
"""Every method and every schedule."""
MORE = [("full", "shard interleaved"), ("full", "replicate"), ("lora", "replicate"), ("qlora in 8 bits", "1f1b")]
MORE += [(m, way) for m in ("full", "lora", "qlora") for way in list(WAYS)[:4] if (m, way) not in QUICK]
CELLS = [*QUICK, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in MORE)]
REFUSED = {
    "zero-bubble, sharded": ({"pipeline": 2, "shard": 2}, "zero3", "zero-bubble", "goes with plain layers only"),
    "more stages than layers": ({"pipeline": 3}, "none", "interleaved", "a pipeline stage has at least one layer"),
    "zero2": ({"pipeline": 2, "shard": 2}, "zero2", "1f1b", "zero2 within a pipeline"),
}
pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> Path:
    """A folder with data and settings; 3 sequences a step, which make no whole rounds through two stages."""
    folder = tmp_path_factory.mktemp("settings")
    model = make_tiny_model(folder / "model", num_hidden_layers=4, initializer_range=0.1)  # no chaos
    write_data(folder / "train.jsonl", 60)
    write_data(folder / "more.jsonl", 20, seed=5)
    content = {
        **SETTINGS,
        "model": str(model),
        "lora": {"rank": 4},
        "data": [{"path": str(folder / "train.jsonl")}, {"path": str(folder / "more.jsonl"), "name": "more"}],
        "eval": [],
        "batch_tokens": 3 * 64,
        "steps": STEPS,
    }
    (folder / "run.yaml").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(("method", "way"), CELLS)
def test_stages_give_the_steps_of_one_rank(world, settings, alone, tmp_path, method, way):
    mesh, sharding, schedule = WAYS[way]
    settled = METHODS[method] | ({} if method == "full" else {"batch_tokens": 2 * 64})  # fewer are quicker
    options = {"folder": str(settings), "mesh": mesh, "sharding": sharding, **settled}
    options["wire"] = {"schedule": schedule}
    ranks = 2 * mesh.get("shard", 1) * mesh.get("replicate", 1)
    on_ranks = world(ranks)("parallel.on_ranks:steps", count=STEPS, output=str(tmp_path / "run"), **options)
    for number, expected in enumerate(alone(**settled)):
        found = [steps[number] for steps in on_ranks]
        assert all(one["loss"] == found[0]["loss"] and one["norm"] == found[0]["norm"] for one in found)
        assert found[0]["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found[0]["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        assert found[0]["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        data = [origin for one in found[: ranks // 2] for origin in one["data"]]
        assert sorted(data) == sorted(expected["data"])
        assert found[ranks // 2]["data"] == found[0]["data"]


@pytest.mark.parametrize(("method", "sharding"), [("full", "zero3"), ("lora", "none")])
def test_a_run_in_stages_goes_on_on_one_rank_and_on_others(world, settings, tmp_path, method, sharding):
    write_data(settings / "held_out.jsonl", 7, seed=1)
    ranks, mesh = (4, {"pipeline": 2, "shard": 2}) if sharding == "zero3" else (2, {"pipeline": 2})
    staged = {"mesh": mesh, "sharding": sharding}
    staged["wire"] = {"schedule": "1f1b" if sharding == "zero3" else "interleaved"}
    plain = {"mesh": {}, "sharding": "none"}

    def train(until: int, count: int, output: str, way: dict) -> dict:
        shared = {"folder": str(settings), "method": method, "output": str(tmp_path / output), "steps": 6}
        shared |= {"eval": [{"path": str(settings / "held_out.jsonl")}], "save_every": 1000, "eval_every": 3}
        found = world(count)("parallel.on_ranks:train_for", until=until, **shared, **way)
        assert all(one == found[0] for one in found)
        return found[0]

    whole = train(6, 1, "whole", plain)
    parts = [train(2, ranks, "run", staged), train(4, 1, "run", plain), train(6, ranks, "run", staged)]
    assert [loss for part in parts for loss in part["losses"]] == pytest.approx(whole["losses"], rel=1e-5)
    found = [loss for part in parts for loss in part["evaluations"]]
    assert found == pytest.approx(whole["evaluations"], rel=1e-5)
    result = "model/model.safetensors" if method == "full" else "adapter/adapter_model.safetensors"
    assert_close(tmp_path / "run" / result, tmp_path / "whole" / result)
    check_results(tmp_path / "run")


@pytest.mark.parametrize("way", REFUSED)
def test_what_cannot_be_is_refused_in_a_sentence(settings, tmp_path, way):
    mesh, sharding, schedule, why = REFUSED[way]
    run = from_mapping(json.loads((settings / "run.yaml").read_text()) | {"method": "full", "output": str(tmp_path)})
    with pytest.raises(UserError, match=why):
        prepare_run(run, plan=made(run, mesh, sharding, {"schedule": schedule}), warn=print)


SMALL = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 100}
MODELS = {
    "llama": LlamaConfig(**SMALL, intermediate_size=64),
    "qwen3": Qwen3Config(**SMALL, intermediate_size=64, head_dim=8, num_key_value_heads=2),
    "mistral": MistralConfig(**SMALL, intermediate_size=64, num_key_value_heads=2, sliding_window=4),
    "mixtral": MixtralConfig(**SMALL, intermediate_size=64, num_key_value_heads=2, num_local_experts=4),
}


def build(config) -> torch.nn.Module:
    attention.register()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    confirm_forward_spec(model, vocabulary=100)
    return model


def plan_of(**mesh: int) -> Plan:
    workload = Workload("tiny", "full", 2, 64)
    plan = plan_for(workload, device="cpu", matmul_dtype="plain", checkpointed_layers=0, compiled=False)
    return plan.changed(mesh=Mesh(**mesh))


@pytest.mark.parametrize("name", MODELS)
def test_each_weight_is_on_one_stage_under_its_own_name(name):
    expected = {name: weight.shape for name, weight in build(MODELS[name]).named_parameters()}
    stages = [build(MODELS[name]) for _ in range(3)]
    cuts = [cut(model, plan_of(pipeline=3), stage) for stage, model in enumerate(stages)]
    assert [len(one.layers) for one in cuts] in ([2, 1, 1], [1, 2, 1], [1, 1, 2])
    held = [{name: weight.shape for name, weight in model.named_parameters()} for model in stages]
    assert sum(map(len, held)) == len(expected)
    assert held[0] | held[1] | held[2] == expected
    assert "model.embed_tokens.weight" in held[0]
    assert {"model.norm.weight", "lm_head.weight"} <= held[2].keys()


def test_a_model_whose_layers_alone_do_not_make_it_up_is_refused():
    positions_in_every_stage = GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=100)
    with pytest.raises(UserError, match="GPT2LMHeadModel cannot be cut into pipeline stages"):
        check_stages(build(positions_in_every_stage), 2)


def test_a_stage_without_anything_to_train_is_refused():
    model = build(MODELS["llama"])
    lora.attach(model, Lora(rank=2, layers="top 1"), seed=0)
    with pytest.raises(UserError, match="would have nothing to train"):
        cut(model, plan_of(pipeline=2), 0)


def test_zero_bubble_with_adapters_is_refused_where_torch_cannot(monkeypatch):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.11.0"))
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    plan = plan_for(
        Workload("tiny", "lora", 1, 64), device="cpu", matmul_dtype="plain", checkpointed_layers=0, compiled=False
    )
    with pytest.raises(UserError, match=r"needs torch 2\.13, and this is 2\.11"):
        Pipelined(model, Stages([], None), plan.changed(schedule="zero-bubble"), None)
