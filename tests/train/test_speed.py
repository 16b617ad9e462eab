"""Speed is tokens over the time of the same steps."""

from __future__ import annotations

import pytest

from tunesmith.train.speed import WINDOW_STEPS, Speed


def test_speed_is_tokens_over_time_and_not_a_mean_of_rates():
    speed = Speed()
    for tokens, seconds in ((100, 1.0), (100, 10.0)):
        speed.add(tokens, seconds, is_warm_up=False)
    assert speed.overall == speed.now == pytest.approx(200 / 11)  # the mean of the rates is 55


def test_what_a_step_compiles_is_not_counted_and_time_and_speed_agree():
    speed = Speed()
    speed.add(100, 61.0, is_warm_up=True, compiling=20.0)  # of the other 40 seconds nothing is known
    for _ in range(3):
        speed.add(100, 1.0, is_warm_up=False)
    assert speed.overall == speed.now == 100
    assert speed.training_seconds == 4
    assert speed.seconds - speed.training_seconds == 60


def test_a_run_of_one_step_has_a_speed_too():
    speed = Speed()
    speed.add(100, 21.0, is_warm_up=True, compiling=20.0)
    assert (speed.overall, speed.training_seconds) == (100, 1.0)
    assert speed.now is None


def test_a_run_without_steps_has_none():
    assert (Speed().overall, Speed().now, Speed().training_seconds) == (0.0, None, 0.0)


def test_what_is_shown_follows_the_latest_steps():
    speed = Speed()
    for _ in range(100):
        speed.add(100, 1.0, is_warm_up=False)
    for _ in range(WINDOW_STEPS):
        speed.add(100, 10.0, is_warm_up=False)
    assert speed.now == 10
    assert speed.step_seconds == 10
