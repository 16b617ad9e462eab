from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.optim.schedule import learning_rate, warmup_length

SHAPES = ["constant", "linear", "cosine", "wsd"]


@given(st.sampled_from(SHAPES), st.integers(1, 500), st.floats(0, 600, allow_nan=False), st.floats(1e-6, 1.0))
def test_the_rate_stays_between_zero_and_its_peak(shape, total, warmup, peak):
    rates = [learning_rate(step, total=total, peak=peak, warmup=warmup, shape=shape) for step in range(total)]
    assert all(0 < rate <= peak * (1 + 1e-12) for rate in rates)
    warm = warmup_length(warmup, total)
    assert rates[:warm] == sorted(rates[:warm])
    assert rates[warm:] == sorted(rates[warm:], reverse=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_peak_is_reached_after_warm_up(shape):
    assert learning_rate(10, total=100, peak=0.5, warmup=0.1, shape=shape) == pytest.approx(0.5)


def test_known_values():
    def rate(step, shape):
        return learning_rate(step, total=100, peak=1.0, warmup=0, shape=shape)

    assert rate(50, "linear") == pytest.approx(0.5)
    assert rate(50, "cosine") == pytest.approx(0.5)
    assert rate(25, "cosine") == pytest.approx(0.8535534)
    assert rate(79, "wsd") == 1.0
    assert rate(90, "wsd") == pytest.approx(0.5)
    assert learning_rate(3, total=100, peak=1.0, warmup=9, shape="constant") == pytest.approx(0.4)
