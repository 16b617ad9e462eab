"""A run on one rank, and with its layers or its sequences split over several: the same losses and gradients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import parity
from loads_elsewhere import check_results
from parallel.on_ranks import METHODS, STEPS, made
from parallel.test_resume import assert_close
from tiny import SETTINGS, write_data
from tiny_model import make_tiny_model
from tunesmith.config.load import from_mapping
from tunesmith.errors import UserError
from tunesmith.model import attention
from tunesmith.parallel.tensor import check_split
from tunesmith.plan.hardware import probe, shared
from tunesmith.plan.models import read_facts
from tunesmith.plan.search import refusal

WAYS = {
    "tensor 2": ({"tensor": 2}, "ddp"),
    "tensor 2 x shard 2": ({"tensor": 2, "shard": 2}, "zero3"),
    "context 2": ({"context": 2}, "ddp"),
    "context 2 x shard 2": ({"context": 2, "shard": 2}, "zero3"),
    "context 2 x tensor 2": ({"context": 2, "tensor": 2}, "zero3"),
}
QUICK = [
    *((method, "tensor 2 x shard 2") for method in ("full", "qlora")),
    *((method, "context 2 x shard 2") for method in ("full", "lora")),
]
"""Every method and every axis."""
MORE = [(method, way) for way in list(WAYS)[:4] for method in ("full", "lora", "qlora") if (method, way) not in QUICK]
MORE += [("qlora in 8 bits", "context 2"), *((method, "context 2 x tensor 2") for method in ("full", "qlora"))]
CELLS = [*QUICK, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in MORE)]
pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> Path:
    """A folder with a model wide enough for blocks of 64 weights in each part of it, data and settings: documents of
    many lengths, three sequences a step."""
    folder = tmp_path_factory.mktemp("settings")
    model = make_tiny_model(folder / "model", hidden_size=128, intermediate_size=128, initializer_range=0.05)
    write_data(folder / "train.jsonl", 60)
    write_data(folder / "more.jsonl", 20, seed=5)
    write_data(folder / "held_out.jsonl", 7, seed=1)
    content = {
        **SETTINGS,
        "model": str(model),
        "lora": {"rank": 4},
        "data": [{"path": str(folder / "train.jsonl")}, {"path": str(folder / "more.jsonl"), "name": "more"}],
        "eval": [{"path": str(folder / "held_out.jsonl")}],
        "batch_tokens": 3 * 64,
        "learning_rate": 1e-3,
        "save_every": 1000,
        "steps": STEPS,
    }
    (folder / "run.yaml").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(("method", "way"), CELLS)
def test_splitting_layers_or_sequences_gives_the_steps_of_one_rank(world, settings, alone, tmp_path, method, way):
    mesh, sharding = WAYS[way]
    ranks = mesh.get("tensor", 1) * mesh.get("context", 1) * mesh.get("shard", 1)
    is_uneven = method == "full" and way == "context 2 x shard 2"  # the others are quicker with fewer micro-batches
    settled = METHODS[method] | ({} if is_uneven else {"batch_tokens": 2 * 64})
    options = {"folder": str(settings), "mesh": mesh, "sharding": sharding, **settled}
    on_ranks = world(ranks)("parallel.on_ranks:steps", count=STEPS, output=str(tmp_path / "run"), **options)
    group = ranks // mesh.get("shard", 1)  # see the same data
    for number, expected in enumerate(alone(**settled)):
        found = [steps[number] for steps in on_ranks]
        assert all(one["loss"] == found[0]["loss"] and one["norm"] == found[0]["norm"] for one in found)
        assert found[0]["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found[0]["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        assert found[0]["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert sorted(origin for one in found[::group] for origin in one["data"]) == sorted(expected["data"])


@pytest.mark.parametrize(
    ("method", "way"),
    [
        ("full", "tensor 2 x shard 2"),
        pytest.param("lora", "tensor 2", marks=pytest.mark.slow),
        ("lora", "context 2"),
    ],
)
def test_what_ranks_save_together_is_what_one_would_save(world, settings, tmp_path, method, way):
    mesh, sharding = WAYS[way]
    ranks = mesh.get("tensor", 1) * mesh.get("context", 1) * mesh.get("shard", 1)
    split = {"mesh": mesh, "sharding": sharding}
    single = {"mesh": {}, "sharding": "none"}
    options = {"folder": str(settings), "method": method, "steps": 6}

    def train(world_of, until, output, **layout):
        return world_of("parallel.on_ranks:train_for", until=until, output=str(tmp_path / output), **layout, **options)[
            0
        ]

    expected = train(world(1), 6, "whole", **single)
    begun = train(world(ranks), 2, "run", **split)
    going = train(world(1), 4, "run", **single)
    ended = train(world(ranks), 6, "run", **split)
    assert (begun["last"], going["first"], going["last"], ended["first"]) == (2, 3, 4, 5)
    assert [*begun["losses"], *going["losses"], *ended["losses"]] == pytest.approx(expected["losses"], rel=1e-5)
    assert ended["evaluations"][-1] == pytest.approx(expected["evaluations"][-1], rel=1e-5)
    result = "model/model.safetensors" if method == "full" else "adapter/adapter_model.safetensors"
    assert_close(tmp_path / "run" / result, tmp_path / "whole" / result)
    check_results(tmp_path / "run")


@pytest.mark.parametrize("method", ["full", "qlora"])
def test_a_model_that_computes_something_else_when_it_is_split_is_refused(world, settings, tmp_path, method):
    options = {"folder": str(settings), "mesh": {"tensor": 2}, "sharding": "ddp", "method": method}
    found = world(2)("parallel.on_ranks:refusal_of_a_wrong_split", output=str(tmp_path / "run"), **options)
    assert all("computes something else when its layers are split over ranks" in said for said in found)


def test_a_vocabulary_cut_over_ranks_gives_the_loss_and_gradients_of_the_whole(world):
    for worst in world(2)("parallel.on_ranks:vocabulary_errors"):
        assert max(worst) < 1e-5


REFUSED = [
    ({"tensor": 4}, {}, "splits whole key heads"),
    ({"tensor": 2}, {"method": "qlora"}, "would cut through blocks"),
    ({"tensor": 2}, {"lora": {"dora": True}}, "DoRA needs whole rows"),
    ({"tensor": 2}, {"method": "qlora", "lora": {"bits": 8}}, "weights in int8 that are cut over ranks"),
    ({"tensor": 2, "context": 4}, {}, "stay within a node"),
    ({"context": 2, "shard": 8}, {}, "fewer sequences than there are ranks"),
]


@pytest.mark.parametrize(("mesh", "changes", "why"), REFUSED)
def test_what_cannot_be_split_is_refused_in_a_sentence(settings, tiny_model, mesh, changes, why):
    content = json.loads((settings / "run.yaml").read_text()) | {"model": str(tiny_model)} | changes
    run = from_mapping(content)
    plan = made(run, mesh, "zero3")
    assert why in refusal(run, plan, read_facts(run.model), shared(probe(), 4))


def test_several_ranks_without_a_way_to_share_are_refused(settings):
    run = from_mapping(json.loads((settings / "run.yaml").read_text()))
    for axis in ("tensor", "context"):
        why = refusal(run, made(run, {axis: 2}, "none"), read_facts(run.model), shared(probe(), 2))
        assert why is not None
        assert "share what is the same on all by sharding: ddp" in why


def test_a_plan_of_the_model_may_name_the_embedding_which_is_cut_by_its_vocabulary(tmp_path):
    from transformers import AutoModelForCausalLM

    from tunesmith.parallel.tensor import TensorParallelPlan

    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path))
    plan = {name: style for name, style in model.config.base_model_tp_plan.items() if name != "embed_tokens"}
    model.config.base_model_tp_plan = plan
    expected = TensorParallelPlan.of(model, None).styles
    model.config.base_model_tp_plan = {**plan, "embed_tokens": "embedding_rowwise"}  # as transformers 5.17 has it
    assert TensorParallelPlan.of(model, None).styles == expected
    assert "model.embed_tokens" not in expected


def test_layers_that_compute_with_all_tokens_between_blocks_are_refused(tiny_model, tmp_path):
    attention.register()
    model = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation=attention.NAME)

    def fail(*_, **__):
        raise RuntimeError("The size of tensor a (8) must match the size of tensor b (16)")

    with pytest.raises(UserError, match="cannot be split over ranks: what they compute between blocks"):
        check_split(model, 2, lambda: setattr(model.model.layers[0], "forward", fail))
    folder = parity.write_model("gemma4_text", tmp_path / "model")
    run = from_mapping({**SETTINGS, "model": str(folder)})
    why = refusal(run, made(run, {"tensor": 2}, "ddp"), read_facts(str(folder)), shared(probe(), 2))
    assert "other linears than those of attention and MLP" in why
