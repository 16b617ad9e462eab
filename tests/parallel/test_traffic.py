"""Bytes that one step sends between ranks: 2 values a parameter, 3 where the weights are gathered for each use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiny import SETTINGS, write_data
from tiny_model import make_tiny_model

pytestmark = pytest.mark.distributed
FP32 = 4


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> Path:
    """As many sequences a step as ranks; sizes that four ranks share without padding."""
    folder = tmp_path_factory.mktemp("traffic")
    model = make_tiny_model(folder / "model", vocab_size=272, hidden_size=64)
    write_data(folder / "train.jsonl", 60)
    content = {
        **SETTINGS,
        "model": str(model),
        "lora": {"rank": 4},
        "data": [{"path": str(folder / "train.jsonl")}],
        "eval": [],
        "batch_tokens": 4 * 64,
    }
    (folder / "run.yaml").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def sent(world, settings, tmp_path_factory):
    """By the way of sharding: what a step sends; several tests ask for the same."""
    known = {}

    def of(sharding: str, mesh: dict[str, int], **changes) -> dict[str, float]:
        if (key := json.dumps([sharding, mesh, changes])) not in known:
            output = tmp_path_factory.mktemp("sent") / "run"
            options = {"folder": str(settings), "mesh": mesh, "sharding": sharding, "output": str(output)}
            known[key] = world(4)("parallel.on_ranks:traffic", **options, **changes)[0]
        return known[key]

    return of


@pytest.mark.parametrize(
    ("sharding", "mesh", "gathered", "scattered", "reduced"),
    [
        ("ddp", {"replicate": 4}, 0, 0, 1),  # an all-reduce sends 2 values for each
        ("zero1", {"shard": 4}, 1, 1, 0),
        ("zero2", {"shard": 4}, 1, 1, 0),
    ],
)
def test_two_values_a_parameter_where_weights_stay_whole(sent, sharding, mesh, gathered, scattered, reduced):
    found = sent(sharding, mesh, method="full")
    parameters = FP32 * (found["layers"] + found["outside"])
    assert found["gathered"] == pytest.approx(gathered * parameters, rel=0.01)
    assert found["scattered"] == pytest.approx(scattered * parameters, rel=0.01)
    assert found["reduced"] == pytest.approx(reduced * parameters, rel=0.01)


def test_three_values_a_parameter_of_the_layers_where_weights_are_gathered_for_each_use(sent):
    found = sent("zero3", {"shard": 4}, method="full")
    layers, outside = FP32 * found["layers"], FP32 * found["outside"]
    assert found["gathered"] == pytest.approx(2 * layers + outside, rel=0.01)
    assert found["scattered"] == pytest.approx(layers + outside, rel=0.01)
    assert found["reduced"] == 0


def test_hybrid_sends_a_part_between_nodes_and_reduces_it_there(sent):
    found = sent("hybrid", {"replicate": 2, "shard": 2}, method="full")
    layers, outside = FP32 * found["layers"], FP32 * found["outside"]
    assert found["gathered"] == pytest.approx(2 * layers + outside, rel=0.01)  # within a node
    assert found["reduced"] == pytest.approx((layers + outside) / 2, rel=0.01)  # a shard's gradients, between nodes


@pytest.mark.parametrize(("reduce", "share"), [("int8", 0.1), ("int4", 0.075)])
def test_rounding_over_nodes_sends_a_tenth_of_full_sharding_between_them(sent, reduce, share):
    full = sent("zero3", {"shard": 4}, method="full")
    assert full["between"] == pytest.approx((full["gathered"] + full["scattered"]) / 2)
    mesh = {"replicate": 2, "shard": 2}
    found = sent(
        "hierarchical", mesh, method="full", wire={"quantized_all_gather": "int8", "quantized_reduce_scatter": reduce}
    )
    assert found["between"] == pytest.approx(share * full["between"], rel=0.2)
    # Full sharding in bf16 would send two thirds of what it sends here in fp32: gradients are reduced in fp32.
    assert found["between"] < 0.25 * 2 / 3 * full["between"]


def test_int8_sends_a_quarter_of_fp32_and_int4_an_eighth(sent):
    plain = sent("zero3", {"shard": 4}, method="full")
    for reduce, part in (("int8", 1 / 4), ("int4", 1 / 8)):
        found = sent(
            "zero3",
            {"shard": 4},
            method="full",
            wire={"quantized_all_gather": "int8", "quantized_reduce_scatter": reduce},
        )
        assert found["scattered"] == 0
        assert found["gathered"] == pytest.approx(plain["gathered"] / 4, rel=0.1)
        assert found["exchanged"] == pytest.approx(part * plain["scattered"], rel=0.2)


@pytest.mark.parametrize(("sharding", "mesh"), [("ddp", {"replicate": 4}), ("zero1", {"shard": 4})])
def test_accumulation_sends_no_more(sent, sharding, mesh):
    once = sent(sharding, mesh, method="full")
    twice = sent(sharding, mesh, method="full", batch_tokens=8 * 64)
    assert {key: twice[key] for key in ("gathered", "scattered", "reduced")} == {
        key: once[key] for key in ("gathered", "scattered", "reduced")
    }


def test_frozen_weights_cost_no_gradient_traffic(sent):
    replicated = sent("ddp", {"replicate": 4}, method="lora")
    assert replicated["reduced"] == pytest.approx(FP32 * replicated["layers"], rel=0.01)
    assert replicated["gathered"] == 0
    sharded = sent("zero3", {"shard": 4}, method="lora", batch_tokens=8 * 64)
    assert sharded["scattered"] == pytest.approx(FP32 * sharded["layers"], rel=0.01)  # once, in two micro-batches


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize(("sharding", "times"), [("zero1", 1), ("zero2", 2)])
def test_adapters_beside_a_whole_base_travel_alone(sent, method, sharding, times):
    found = sent(sharding, {"shard": 4}, method=method, batch_tokens=8 * 64)  # two micro-batches
    assert found["gathered"] == pytest.approx(FP32 * found["layers"], rel=0.01)
    assert found["scattered"] == pytest.approx(times * FP32 * found["layers"], rel=0.01)


def test_weights_in_four_bits_are_gathered_in_four_bits(sent):
    plain = sent("zero3", {"shard": 4}, method="lora")
    small = sent("zero3", {"shard": 4}, method="qlora")
    matrices = 2 * (64 * 64 * 2 + 2 * 32 * 64 + 3 * 64 * 64)  # of two layers: q and o, k and v, the MLP
    saved = plain["gathered"] - small["gathered"]
    assert saved == pytest.approx(2 * matrices * (FP32 - 4.13 / 8), rel=0.02)
