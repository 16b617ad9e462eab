"""`tunesmith lr`: rates are tried, drawn and judged, and the run is left alone."""

from __future__ import annotations

import json
import math
from xml.etree import ElementTree

import pytest

from tiny import write_all
from tunesmith.measure.rate_range import Tried, judge, rates_between


def curve(loss) -> list[Tried]:
    return [Tried(rate, loss(rate), loss(rate)) for rate in rates_between(1e-6, 1e-2, 60)]


def valley(rate: float) -> float:
    """Falls fastest around 1e-4, is lowest around 2e-3."""
    return 3 - 2 / (1 + math.exp(-3 * math.log10(rate / 1e-4))) + (rate / 4e-3) ** 2


def test_the_rate_where_the_loss_falls_fastest_is_suggested():
    suggested, reason = judge(curve(valley), 2e-4, has_diverged=True)
    assert 5e-5 < suggested < 2e-4
    assert "falls fastest" in reason
    assert "may stay" in reason
    assert "never diverged" not in reason
    assert "may stay" not in judge(curve(valley), 5e-2, has_diverged=True)[1]


def test_a_loss_that_does_not_fall_suggests_nothing():
    suggested, reason = judge(curve(lambda rate: 3 + rate), 2e-4, has_diverged=False)
    assert suggested is None
    assert "did not fall" in reason


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_rates_are_tried_and_the_run_is_left_alone(runs, tiny_model, tmp_path, method):
    folder = write_all(tmp_path, tiny_model, method=method, learning_rate=1e-2 if method == "lora" else 1e-3, steps=2)
    assert runs(folder, "train", "run.yaml", "--plan", "plan.json").code == 0
    before = {path: path.read_bytes() for path in sorted((folder / "run").rglob("*")) if path.is_file()}
    ended = runs(folder, "lr", "run.yaml", "--plan", "plan.json", "--steps", "30", "--highest", "1e4")
    assert ended.code == 0, ended.err
    assert "learning rate" in ended.out
    assert "learning_rate: " in ended.out
    after = {path: path.read_bytes() for path in sorted((folder / "run").rglob("*")) if path.is_file()}
    own = {folder / "run/lr/rates.svg", folder / "run/lr/report.json"}
    assert after.keys() - before.keys() == own
    assert all(after[path] == before[path] for path in before)
    report = json.loads((folder / "run/lr/report.json").read_text())
    rates = [one["rate"] for one in report["tried"]]
    assert rates == sorted(rates)
    assert report["has_diverged"]
    assert len(rates) < 30
    lowest = min(report["tried"], key=lambda one: one["smoothed"])
    assert rates[0] < report["suggested"] <= lowest["rate"] / 2.9
    picture = ElementTree.parse(folder / "run/lr/rates.svg").getroot()
    assert len(picture.findall("{*}circle")) == len(rates)


def test_rates_without_a_range_are_refused(runs, tiny_model, tmp_path):
    folder = write_all(tmp_path, tiny_model)
    ended = runs(folder, "lr", "run.yaml", "--lowest", "1e-3", "--highest", "1e-4")
    assert (ended.code, ended.err.count("\n")) == (1, 1)
    assert "no rates between them" in ended.err
