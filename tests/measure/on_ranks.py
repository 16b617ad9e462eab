"""What ranks are told to do by the tests of this folder."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tunesmith.measure import network
from tunesmith.parallel.ranks import Ranks


def exchange(ranks: Ranks, sizes: list[int]) -> dict[str, Any]:
    network.SECONDS = 0.01
    found = network.measure(ranks, torch.device("cpu"), sizes)
    kept = network.keep(found, ranks, None) if ranks.is_first else {}
    return {"found": [dataclasses.asdict(one) for one in found], "kept": kept}
