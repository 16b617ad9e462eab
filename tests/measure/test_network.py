"""What is measured between ranks is the same on all of them, and the planner uses it."""

from __future__ import annotations

import json

import pytest

from tunesmith.errors import UserError
from tunesmith.plan.hardware import BETWEEN_NODES, CPU_KEY, measured_links_file, probe, shared

pytestmark = pytest.mark.distributed


def test_each_collective_is_measured_at_each_size_and_kept(world):
    on_ranks = world(2)("measure.on_ranks:exchange", sizes=[1 << 12, 1 << 16])
    assert on_ranks[0]["found"] == on_ranks[1]["found"]
    found = on_ranks[0]["found"]
    names = ["all-reduce", "all-gather", "reduce-scatter", "all-to-all"]
    assert [(one["collective"], one["bytes"]) for one in found] == [(n, s) for n in names for s in (1 << 12, 1 << 16)]
    for one in found:
        assert one["algorithm"] == pytest.approx(one["bytes"] / one["seconds"])
        share = 1.0 if one["collective"] == "all-reduce" else 0.5  # of two ranks, each sends half, or half and half
        assert one["bus"] == pytest.approx(share * one["algorithm"])
    best = max(one["bus"] for one in found if one["collective"] in ("all-gather", "reduce-scatter"))
    assert on_ranks[0]["kept"] == {CPU_KEY: pytest.approx(best / 0.75)}


def test_the_planner_takes_what_was_measured():
    measured_links_file().parent.mkdir(parents=True, exist_ok=True)
    measured_links_file().write_text(json.dumps({CPU_KEY: 3e9, BETWEEN_NODES: 7e8}))
    here = shared(probe().changed(gpus=()), 2, nodes=2)
    assert (here.link, here.network) == (3e9, 7e8)
    measured_links_file().write_text("[]")
    with pytest.raises(UserError, match="delete it, or measure again with `tunesmith network`"):
        shared(probe().changed(gpus=()), 2)
    measured_links_file().unlink()
