"""A mixture whose experts are cut over the ranks: the same data, losses and gradients in each step as on one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from loads_elsewhere import check_results
from parallel.on_ranks import STEPS, made
from parallel.test_resume import assert_close
from parity import write_model
from tiny import SETTINGS, write_data
from tiny_model import make_tiny_model
from tunesmith.config.load import from_mapping
from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.model.experts import experts_of_layers
from tunesmith.parallel import check
from tunesmith.parallel.expert import check_experts
from tunesmith.plan.plan import Mesh
from tunesmith.run.start import prepare_run

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERT = {"shard": 2, "expert": 2}
pytestmark = pytest.mark.distributed


def write_mixture(folder: Path, kind: str) -> Path:
    make_tiny_model(folder)  # for its tokenizer
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    if kind == "mixtral":
        config = MixtralConfig(**SMALL, vocab_size=vocabulary, num_local_experts=4, num_experts_per_tok=2)
        MixtralForCausalLM(config).save_pretrained(folder)
    else:
        many = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, vocab_size=vocabulary, **many)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """By the kind of mixture: a folder with data and settings; 3 sequences a step, uneven for 2 ranks."""
    known = {}

    def of(kind: str) -> Path:
        if kind not in known:
            known[kind] = folder = tmp_path_factory.mktemp(kind)
            write_data(folder / "train.jsonl", 60)
            content = {
                **SETTINGS,
                "model": str(write_mixture(folder / "model", kind)),
                "lora": {"rank": 4},
                "data": [{"path": str(folder / "train.jsonl")}],
                "eval": [],
                "batch_tokens": 3 * 64,
                "steps": STEPS,
            }
            (folder / "run.yaml").write_text(json.dumps(content))
        return known[kind]

    return of


@pytest.mark.parametrize(
    ("method", "kind", "sharding"),
    [
        pytest.param("full", "mixtral", "zero3", marks=pytest.mark.slow),  # as in the run that goes on, below
        pytest.param("lora", "mixtral", "zero3", marks=pytest.mark.slow),
        ("qlora", "mixtral", "zero3"),
        pytest.param("full", "qwen", "zero1", marks=pytest.mark.slow),
    ],
)
def test_experts_on_two_ranks_give_the_steps_of_one(world, settings, tmp_path, method, kind, sharding):
    shared = {"count": STEPS, "folder": str(settings(kind)), "method": method}
    alone = world(1)("parallel.on_ranks:steps", mesh={}, sharding="none", output=str(tmp_path / "one"), **shared)[0]
    both = world(2)("parallel.on_ranks:steps", mesh=EXPERT, sharding=sharding, output=str(tmp_path / "two"), **shared)
    for expected, *found in zip(alone, *both, strict=True):
        assert found[0]["loss"] == found[1]["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found[0]["norm"] == found[1]["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        assert sorted(origin for one in found for origin in one["data"]) == sorted(expected["data"])


@pytest.mark.parametrize(
    ("method", "mesh", "sharding"),
    [("full", EXPERT, "zero2"), pytest.param("lora", {"replicate": 2}, "ddp", marks=pytest.mark.slow)],
)
def test_the_load_balancing_loss_on_two_ranks_is_that_of_one(world, settings, tmp_path, method, mesh, sharding):
    shared = {"count": 6, "folder": str(settings("qwen")), "method": method, "router_aux_loss_coef": 0.5}
    alone = world(1)("parallel.on_ranks:steps", mesh={}, sharding="none", output=str(tmp_path / "one"), **shared)[0]
    both = world(2)("parallel.on_ranks:steps", mesh=mesh, sharding=sharding, output=str(tmp_path / "two"), **shared)
    for expected, *found in zip(alone, *both, strict=True):
        assert found[0]["figures"] == found[1]["figures"] == pytest.approx(expected["figures"], rel=1e-5)
        assert found[0]["norm"] == found[1]["norm"] == pytest.approx(expected["norm"], rel=1e-5)
    assert "router_loss" in alone[0]["figures"]


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_shards_of_experts_in_few_bits_give_the_steps_of_one(world, settings, tmp_path, bits):
    lora = {"rank": 4, "bits": bits}
    shared = {"count": STEPS, "folder": str(settings("qwen")), "method": "qlora", "lora": lora}
    alone = world(1)("parallel.on_ranks:steps", mesh={}, sharding="none", output=str(tmp_path / "one"), **shared)[0]
    way = {"mesh": {"shard": 2}, "sharding": "zero3"}
    both = world(2)("parallel.on_ranks:steps", output=str(tmp_path / "two"), **way, **shared)
    for expected, *found in zip(alone, *both, strict=True):
        assert found[0]["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found[0]["norm"] == pytest.approx(expected["norm"], rel=1e-5)


class WeighedBefore(torch.nn.Module):
    """Experts that take a token times the router's weight, as some do, through what is not linear."""

    def __init__(self, experts: torch.nn.Module):
        super().__init__()
        self.num_experts, self.stacks = experts.num_experts, [experts]
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj

    def forward(self, hidden_states, top_k_index, top_k_weights):
        each = [
            self.stacks[0](hidden_states * weight, index, torch.ones_like(weight))
            for index, weight in zip(top_k_index.split(1, dim=1), top_k_weights.split(1, dim=1), strict=True)
        ]
        return sum(each)


def test_experts_that_do_not_sum_up_by_the_router_s_weights_are_not_cut_over_ranks(tmp_path):
    model = MixtralForCausalLM.from_pretrained(write_mixture(tmp_path, "mixtral"))
    check_experts(model)
    for layer in model.model.layers:
        layer.mlp.experts = WeighedBefore(layer.mlp.experts)
    with pytest.raises(UserError, match="WeighedBefore computes something else when its experts are cut over ranks"):
        check_experts(model)


def test_experts_are_tried_also_where_the_first_layers_are_dense(tmp_path, monkeypatch):
    folder = write_model("deepseek_v3", tmp_path / "model", num_hidden_layers=4, first_k_dense_replace=3)
    tried = []
    monkeypatch.setattr(check, "check_experts", tried.append)
    plan = SimpleNamespace(mesh=Mesh(**EXPERT), schedule="1f1b")
    check.check_parallelism(Run(model=str(folder), data="x"), plan, torch.device("cpu"))
    assert [*experts_of_layers(tried[0])] == ["model.layers.3.mlp.experts"]


REFUSED = {
    "uneven": ("full", {"shard": 3, "expert": 3}, "zero3", "experts are cut evenly over ranks"),
    "replicated": ("full", {"replicate": 2, "expert": 2}, "ddp", "experts cut over other ranks than all"),
}


@pytest.mark.parametrize("way", REFUSED)
def test_what_cannot_be_is_refused_in_a_sentence(settings, tmp_path, way):
    method, mesh, sharding, why = REFUSED[way]
    content = json.loads((settings("mixtral") / "run.yaml").read_text())
    run = from_mapping(content | {"method": method, "output": str(tmp_path)})
    with pytest.raises(UserError, match=why):
        prepare_run(run, plan=made(run, mesh, sharding), warn=print)


def test_a_model_without_experts_is_refused(settings, tiny_model, tmp_path):
    content = json.loads((settings("mixtral") / "run.yaml").read_text())
    run = from_mapping(content | {"model": str(tiny_model), "method": "full", "output": str(tmp_path)})
    with pytest.raises(UserError, match="none of this model's layers has any"):
        prepare_run(run, plan=made(run, EXPERT, "zero3"), warn=print)


def test_a_run_with_experts_on_two_ranks_goes_on_on_one_and_on_two_again(world, settings, tmp_path):
    shared = {"folder": str(settings("mixtral")), "method": "full", "steps": 4, "save_every": 1000}

    def train(until: int, count: int, output: str) -> list[float]:
        way = {"mesh": EXPERT, "sharding": "zero3"} if count == 2 else {"mesh": {}, "sharding": "none"}
        options = {"until": until, "output": str(tmp_path / output), **shared, **way}
        return world(count)("parallel.on_ranks:train_for", **options)[0]["losses"]

    whole = train(4, 1, "whole")
    parts = train(2, 2, "run") + train(3, 1, "run") + train(4, 2, "run")
    assert parts == pytest.approx(whole, rel=1e-5)
    assert_close(tmp_path / "run/model/model.safetensors", tmp_path / "whole/model/model.safetensors")
    check_results(tmp_path / "run")
