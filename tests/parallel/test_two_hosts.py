"""Over a slow link between hosts: what each way of sharing the weights takes, and that the planner knows. By
`make test-nodes`, as root."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import hosts

ROOT = Path(__file__).parents[2]
SLOWEST = 40.0

pytestmark = pytest.mark.nodes


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    if (why := hosts.why_not()) is not None:
        pytest.skip(f"two hosts need network namespaces: {why}")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        return importlib.import_module("two_hosts").measure([1000.0, SLOWEST])


def test_the_link_is_as_slow_as_it_is_said_to_be(rows):
    assert rows[-1]["measured_megabits"] == pytest.approx(SLOWEST, rel=0.3)


def test_hybrid_is_three_times_as_fast_as_full_sharding_over_the_slowest_link(rows):
    assert rows[-1]["full_seconds"] >= 3 * rows[-1]["hybrid_seconds"]


def test_the_planner_given_the_measured_bandwidth_takes_the_fastest(rows):
    assert all(row["planner"] == row["fastest"] for row in rows)
    assert rows[-1]["planner_whole"] == rows[-1]["fastest_whole"]


def test_int8_over_nodes_sends_a_quarter_of_full_sharding_at_most(rows):
    for row in rows:
        assert row["int8_megabytes"] <= row["full_megabytes"] / 4
        assert row["hybrid_megabytes"] < row["hierarchical_megabytes"] < row["full_megabytes"]
