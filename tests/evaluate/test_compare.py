"""The statistics behind a verdict, by simulation: what is claimed of false alarms and of intervals is so."""

from __future__ import annotations

import numpy as np
import pytest

from tunesmith.evaluate.compare import compare, corrected, incomplete_beta, mcnemar, t_quantile, t_two_sided
from tunesmith.evaluate.figures import CHOICE_LOSS, LOSS, MEASURES, figure
from tunesmith.evaluate.judge import interval, length_controlled, wins_of

ACC = MEASURES["choices", None][0]
ROUNDS = 700


def shares(chance, count: int, gain: float = 0.0):
    """Two models whose answers depend on how hard an item is; the first is right more often by `gain`."""
    easy = chance.uniform(0.2, 0.8, count)
    return [
        [{"acc": int(value)} for value in chance.random(count) < np.clip(easy + more, 0, 1)] for more in (gain, 0.0)
    ]


def losses(chance, count: int, change: float = 0.0):
    hard, tokens = chance.gamma(2.0, 1.0, count), chance.integers(5, 60, count)
    sums = [(tokens * (hard + more + chance.normal(0, 0.1, count))).tolist() for more in (change, 0.0)]
    return [[{"loss_sum": a, "target_tokens": n} for a, n in zip(one, tokens, strict=True)] for one in sums]


def test_equal_models_are_called_different_as_rarely_as_claimed():
    chance = np.random.default_rng(0)
    alarms = sum(compare(ACC, *shares(chance, 100)).verdict in ("better", "worse") for _ in range(ROUNDS))
    assert alarms / ROUNDS <= 0.05
    alarms = sum(compare(LOSS, *losses(chance, 40)).verdict in ("better", "worse") for _ in range(ROUNDS))
    assert 0.03 <= alarms / ROUNDS <= 0.065


@pytest.mark.parametrize("gain", [pytest.param(0.0, marks=pytest.mark.slow), 0.15])
def test_intervals_cover_the_truth_in_95_of_100(gain):
    chance = np.random.default_rng(1)
    found = [compare(ACC, *shares(chance, 120, gain)) for _ in range(ROUNDS)]
    assert 0.935 <= np.mean([one.low <= gain <= one.high for one in found]) <= 0.985
    found = [compare(LOSS, *losses(chance, 60, gain)) for _ in range(ROUNDS // 3)]
    assert 0.92 <= np.mean([one.low <= gain <= one.high for one in found]) <= 0.98


def test_several_rows_of_equal_models_are_corrected_for_their_number():
    chance = np.random.default_rng(2)
    alarms = 0
    for _ in range(200):
        rows = [(LOSS, compare(LOSS, *losses(chance, 40))) for _ in range(5)]
        alarms += any(row.verdict in ("better", "worse") for row in corrected(rows))
    assert alarms / 200 <= 0.08  # uncorrected it is 0.23


def test_a_true_difference_is_told_in_its_direction_and_so_many_items_would_tell_it():
    chance = np.random.default_rng(3)
    told = compare(LOSS, *losses(chance, 200, -0.5))
    assert told.verdict == "better"
    assert told.needed is None
    assert compare(LOSS, *losses(chance, 200, 0.5)).verdict == "worse"
    assert compare(ACC, *shares(chance, 400, 0.3)).verdict == "better"
    few = next(one for _ in range(99) if (one := compare(ACC, *shares(chance, 40, 0.1))).needed and one.value > 0)
    again = [compare(ACC, *shares(chance, few.needed, few.value)).verdict == "better" for _ in range(60)]
    assert 0.6 <= np.mean(again) <= 0.97  # four out of five, by design


def test_models_that_answer_alike_are_equal_and_nothing_is_divided_by_zero():
    same = [{"acc": 1, "choice_loss": 0.5}] * 3
    assert compare(ACC, same, same).verdict == "equal"
    assert compare(CHOICE_LOSS, same, same).verdict == "equal"
    assert compare(ACC, same[:1], same[:1]).verdict == "equal"
    assert compare(CHOICE_LOSS, [], []) is None
    assert figure(LOSS, [{"loss_sum": 0.0, "target_tokens": 0}]) is None


def test_tests_have_their_tabulated_values():
    assert mcnemar(10, 2) == pytest.approx(0.03857, abs=1e-5)
    assert mcnemar(5, 5) == 1.0
    assert mcnemar(3000, 2700) == pytest.approx(7.5e-5, rel=0.1)
    assert t_two_sided(2.228138852, 10) == pytest.approx(0.05, abs=1e-8)
    assert t_quantile(1) == pytest.approx(12.7062, abs=1e-3)
    assert t_quantile(1000) == pytest.approx(1.96234, abs=1e-4)
    assert incomplete_beta(2.0, 3.0, 0.4) == pytest.approx(0.5248, abs=1e-6)


def test_the_interval_of_wins_covers_the_truth_in_95_of_100_judgements():
    chance = np.random.default_rng(4)
    for win, tie in ((0.5, 0.2), (0.75, 0.1), (0.9, 0.05)):
        covered = []
        for _ in range(500):
            drawn = chance.choice([1.0, 0.5, 0.0], size=80, p=[win, tie, 1 - win - tie])
            low, high = interval(drawn)
            covered.append(low <= win + tie / 2 <= high)
        assert 0.92 <= np.mean(covered) <= 0.985


def test_wins_that_only_length_explains_are_no_wins_at_equal_length():
    chance = np.random.default_rng(5)
    lengths = chance.normal(400, 300, 600)
    by_length = (chance.random(600) < 1 / (1 + np.exp(-lengths / 200))).astype(float)
    assert by_length.mean() > 0.75
    assert length_controlled(by_length, lengths) == pytest.approx(0.5, abs=0.08)
    by_merit = (chance.random(600) < 0.8).astype(float)
    assert length_controlled(by_merit, lengths) == pytest.approx(0.8, abs=0.06)
    made = [
        {"win": float(w), "length": 10, "other_length": 5, "orders": [1.0, float(w)], "malformed": 0} for w in (1, 1, 1)
    ]
    found = wins_of([*made, {"win": None, "malformed": 2, "orders": [None, None]}])
    assert (found.items, found.malformed, found.rate) == (3, 2, 1.0)
    assert found.low < 1
