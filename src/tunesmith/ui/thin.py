"""Fewer points that look the same: of each pixel's worth of a curve its lowest and its highest point are kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

PIXELS = 600
"""Columns of a wide chart, about."""


def thinned(curves: Iterable[Sequence[float]], *, pixels: int = PIXELS) -> np.ndarray:
    """The positions to keep, in order, of curves that share their x. A curve's extremes within each of `pixels` equal
    pieces stay, so that no spike gets lost, as do the ends. NaN is no point."""
    columns = [np.asarray(curve, dtype=float) for curve in curves]
    count = len(columns[0]) if columns else 0
    if count <= 2 * pixels:
        return np.arange(count)
    size = -(-count // pixels)
    kept = [np.array([0, count - 1])]
    starts = np.arange(0, count, size)
    for column in columns:
        for sign in (1.0, -1.0):
            padded = np.full(len(starts) * size, np.inf)
            padded[:count] = np.where(np.isfinite(column), sign * column, np.inf)
            found = starts + padded.reshape(len(starts), size).argmin(axis=1)
            kept.append(found[np.isfinite(padded[found])])
    return np.unique(np.concatenate(kept))


def smoothed(curve: Sequence[float]) -> list[float]:
    """An exponential moving average over about a fiftieth of the curve, unbiased at its beginning; NaN is skipped."""
    keep = 1.0 - 2.0 / (max(10, len(curve) // 50) + 1)
    total, weight, made = 0.0, 0.0, []
    for value in curve:
        if np.isfinite(value):
            total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        made.append(total / weight if weight else float("nan"))
    return made
