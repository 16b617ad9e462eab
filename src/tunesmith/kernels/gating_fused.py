"""`kernels.gating` for Triton's kernels, in fp32."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false
# Of Triton: launches take more than the kernel names, and constants are numbers.

from __future__ import annotations

import triton
import triton.language as tl

from tunesmith.kernels.gating import CURVES, gating_of


def constants(text: str) -> dict[str, int | float]:
    """Of a gating, as the functions here take them."""
    gating = gating_of(text)
    return {
        "CURVE": CURVES.index(gating.curve),
        "SLOPE": gating.slope,
        "LIMIT": gating.limit,
        "SHIFT": gating.shift,
    }


@triton.jit
def activation(gate, up, CURVE: tl.constexpr, SLOPE: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr):
    if LIMIT > 0.0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return gate * _share(gate, CURVE, SLOPE) * (up + SHIFT)


@triton.jit
def with_derivatives(gate, up, CURVE: tl.constexpr, SLOPE: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr):
    """The activation, and its derivatives by gate and by up."""
    x, y = gate, up
    if LIMIT > 0.0:
        x = tl.minimum(gate, LIMIT)
        y = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    y += SHIFT
    share = _share(x, CURVE, SLOPE)
    if CURVE == 0:
        steepness = share * (1.0 + SLOPE * x * (1.0 - share))
    elif CURVE == 1:
        steepness = share + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    else:
        steepness = share + 1.5957691216057308 * x * share * (1.0 - share) * (1.0 + 0.134145 * x * x)
    by_gate = steepness * y
    by_up = x * share
    if LIMIT > 0.0:
        by_gate = tl.where(gate <= LIMIT, by_gate, 0.0)
        by_up = tl.where(tl.abs(up) <= LIMIT, by_up, 0.0)
    return x * share * y, by_gate, by_up


@triton.jit
def _share(x, CURVE: tl.constexpr, SLOPE: tl.constexpr):
    """Of the gate, how much goes through."""
    if CURVE == 0:
        share = tl.sigmoid(SLOPE * x)
    elif CURVE == 1:
        share = 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476))
    else:
        share = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return share
