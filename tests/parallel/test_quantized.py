"""Weights gathered and gradients reduced in few bits: how far off they may be, and what a run makes of it."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import settings as settings_of
from hypothesis import strategies as st

from parallel.on_ranks import STEPS, made
from parallel.test_shard import settings  # noqa: F401  (a fixture)
from tunesmith.config.load import from_mapping
from tunesmith.errors import UserError
from tunesmith.parallel.quantized import BLOCK, Packing
from tunesmith.plan import model_states
from tunesmith.run.start import prepare_run

FLAT = ("zero3", {"shard": 4})
NODES = ("hierarchical", {"replicate": 2, "shard": 2})
BOTH = {"quantized_all_gather": "int8", "quantized_reduce_scatter": "int8"}
WAYS = {
    "gather": (*FLAT, {"quantized_all_gather": "int8"}),
    "reduce": (*FLAT, {"quantized_reduce_scatter": "int8"}),
    "gather over nodes": (*NODES, {"quantized_all_gather": "int8"}),
    "reduce over nodes": (*NODES, {"quantized_reduce_scatter": "int8"}),
    "both over nodes": (*NODES, BOTH),
    "both, weights kept whole": ("zero2", {"shard": 4}, BOTH),
    "reduce in int4": (*FLAT, {"quantized_reduce_scatter": "int4"}),
    "reduce in int4 over nodes": (*NODES, {"quantized_reduce_scatter": "int4"}),
    "gather, reduce in int4 over nodes": (*NODES, {"quantized_all_gather": "int8", "quantized_reduce_scatter": "int4"}),
}
IN_OTHERS = (
    "gather",
    "reduce",
    "gather over nodes",
    "reduce over nodes",
    "both, weights kept whole",
    "reduce in int4 over nodes",
    "gather, reduce in int4 over nodes",
)
"""What other ways have in them."""
BOUND = {"usual": {"loss": 0.01, "norm": 0.1}, "gradients in int8": {"loss": 0.002, "norm": 0.02}}
"""How far losses and gradient norms of 20 steps may be from those of a run without quantized collectives."""
OFF = {"int8": 1.001 / 254, "int4": 1.001 / 14}
"""How far a value may be off, in units of the largest of its block: half a step."""
WIRES = pytest.mark.parametrize("wire", OFF)


def there_and_back(packing: Packing, flat: torch.Tensor, onto: torch.Tensor | None = None) -> torch.Tensor:
    packed = torch.zeros(packing.bytes(flat.numel(), flat.dtype), dtype=torch.uint8)
    packing.pack(flat, packed)
    found = torch.full_like(flat, 7.0) if onto is None else onto.clone()
    packing.unpack(packed, found, add=onto is not None)
    return found


@settings_of(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 300)), min_size=1, max_size=6),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 1000),
)
@WIRES
def test_a_value_is_off_by_half_a_step_of_its_block_and_vectors_by_nothing(wire, pieces, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(length, generator=generator) * 10.0 ** (seed % 7 - 3) for _, length in pieces]
    flat = torch.cat(parts).to(dtype)
    found = there_and_back(Packing(pieces, wire), flat)
    is_matrix = torch.cat([torch.full((length,), kind) for kind, length in pieces])
    assert torch.equal(found[~is_matrix], flat[~is_matrix])
    for mine, exact in zip(*(one[is_matrix].float().split(BLOCK[wire]) for one in (found, flat)), strict=True):
        if len(exact):
            largest = exact.abs().max()
            own_rounding = torch.finfo(dtype).eps * largest
            assert (mine - exact).abs().max() <= OFF[wire] * largest + own_rounding


@pytest.mark.parametrize(("wire", "share", "size"), [("int8", 0.0064, 1.031), ("int4", 0.11, 0.5625)])
def test_usual_values_are_off_by_this_share_and_take_so_many_bytes(wire, share, size):
    values = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    packing = Packing([(True, values.numel())], wire)
    assert ((there_and_back(packing, values) - values).norm() / values.norm()).item() == pytest.approx(share, rel=0.1)
    assert packing.bytes(values.numel(), values.dtype) / values.numel() == pytest.approx(size, rel=0.001)
    assert size == pytest.approx(model_states.COLLECTIVE_BYTES[wire], rel=0.001)


@WIRES
def test_the_same_values_give_the_same_bytes_and_rounding_again_changes_nothing(wire):
    packing, values = Packing([(True, 1000)], wire), torch.randn(1000)
    once = there_and_back(packing, values)
    assert torch.equal(once, there_and_back(packing, values))
    torch.testing.assert_close(there_and_back(packing, once), once, rtol=1e-6, atol=0)


@WIRES
def test_zeros_stay_zeros_and_what_is_not_a_number_is_not_made_one(wire):
    block = BLOCK[wire]
    values = torch.ones(3 * block)
    values[:block] = 0
    values[block], values[2 * block] = float("inf"), float("nan")
    zeros, infinite, nan = there_and_back(Packing([(True, 3 * block)], wire), values).split(block)
    assert torch.equal(zeros, torch.zeros(block))
    assert not infinite.isfinite().any()
    assert not nan.isfinite().any()


@WIRES
def test_what_is_received_is_added_in_fp32(wire):
    packing, values, before = Packing([(True, 200), (False, 10)], wire), torch.randn(210), torch.randn(210)
    assert torch.equal(there_and_back(packing, values, before), before + there_and_back(packing, values))


@WIRES
def test_a_shard_without_some_of_the_weights_is_still_packed(wire):
    values = torch.randn(150)
    found = there_and_back(Packing([(True, 100), (False, 100)], wire), values)
    assert (found - values).abs().max() <= OFF[wire] * values.abs().max()


@pytest.mark.distributed
@WIRES
def test_gathers_and_reductions_of_four_ranks_are_the_exact_ones_within_the_bound(world, wire):
    for found in world(4)("parallel.rounded_on_ranks:rounded_collectives", wire=wire):
        assert found["gather"] <= OFF[wire]
        assert found["nodes_gather"] <= OFF[wire]
        assert found["reduce"] <= 3 * OFF[wire]  # of three other ranks
        assert found["nodes_reduce"] <= OFF[wire]  # of one other node
        assert found["same"]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] if way in IN_OTHERS else []) for way in WAYS]
)
def test_a_run_with_rounding_on_the_wire_stays_near_the_run_of_one_rank(world, settings, alone, tmp_path, way):  # noqa: F811
    sharding, mesh, wire = WAYS[way]
    options = {"folder": str(settings), "mesh": mesh, "sharding": sharding, "wire": wire, "method": "full"}
    on_ranks = world(4)("parallel.on_ranks:steps", count=STEPS, output=str(tmp_path / "run"), **options)
    bound = BOUND["gradients in int8" if wire == {"quantized_reduce_scatter": "int8"} else "usual"]
    for number, one in enumerate(alone("full")):
        found = [steps[number] for steps in on_ranks]
        assert all(each["loss"] == found[0]["loss"] and each["norm"] == found[0]["norm"] for each in found)
        assert sorted(origin for each in found for origin in each["data"]) == sorted(one["data"])
        for name, share in bound.items():
            assert found[0][name] == pytest.approx(one[name], rel=share)


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize(
    "wire",
    [{"quantized_all_gather": "int8"}, {"quantized_reduce_scatter": "int8"}, {"quantized_reduce_scatter": "int4"}],
)
def test_adapters_do_without(settings, tmp_path, method, wire):  # noqa: F811
    run = from_mapping(json.loads((settings / "run.yaml").read_text()) | {"method": method, "output": str(tmp_path)})
    with pytest.raises(UserError, match="quantized collectives are for full fine-tuning"):
        prepare_run(run, plan=made(run, {"shard": 4}, "zero3", wire), warn=print)


@pytest.mark.parametrize(("sharding", "mesh"), [("ddp", {"replicate": 4}), ("hybrid", {"replicate": 2, "shard": 2})])
def test_only_weights_that_all_ranks_share_are_rounded_on_the_wire(settings, tmp_path, sharding, mesh):  # noqa: F811
    run = from_mapping(json.loads((settings / "run.yaml").read_text()) | {"method": "full", "output": str(tmp_path)})
    with pytest.raises(UserError, match="zero1, zero2, zero3 and hierarchical"):
        prepare_run(run, plan=made(run, mesh, sharding, {"quantized_reduce_scatter": "int8"}), warn=print)
