"""Texts that belong together, and the settings whose loss and gradients are compared with sentence-transformers'."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import torch

WORDS = ["red", "blue", "seven", "ten", "cat", "tree", "sun"]
CASES: dict[str, dict[str, Any]] = {
    "pairs": {"kind": "pairs", "pooling": "last"},
    "negatives": {"kind": "negatives", "pooling": "mean", "temperature": 0.1},
    "matryoshka": {"kind": "negatives", "pooling": "last", "matryoshka": [16, 8]},
    "scores": {"kind": "scores", "pooling": "mean"},
}


def records(kind: str, count: int, seed: int = 0) -> list[dict]:
    """No two texts are the same, and those that belong together share a number."""
    chance, made = random.Random(seed), []

    def text(number: int, most: int) -> str:
        return f"{number:02d} " + " ".join(chance.choices(WORDS, k=chance.randint(1, most)))

    for n in range(count):
        first, second, third = text(n, 4), f"so {text(n, 3)}", f"no {text(n + 50, 2)}"
        if kind == "scores":
            made.append({"sentence1": first, "sentence2": second, "score": chance.choice([0.0, 0.25, 1.0])})
        elif kind == "negatives":
            made.append({"query": first, "pos": [second], "neg": [third]})
        else:
            made.append({"anchor": first, "positive": second})
    return made


def columns(kind: str, count: int) -> list[list[str]]:
    """As sentence-transformers takes them."""
    rows = records(kind, count)
    names = {
        "pairs": ("anchor", "positive"),
        "negatives": ("query", "pos", "neg"),
        "scores": ("sentence1", "sentence2"),
    }
    return [[one[name][0] if isinstance(one[name], list) else one[name] for one in rows] for name in names[kind]]


def told(gradients: Mapping[str, torch.Tensor]) -> dict[str, list[float]]:
    """A norm and two projections of each gradient."""
    found = {}
    for name, each in gradients.items():
        flat = each.detach().double().flatten()
        places = torch.arange(len(flat), dtype=torch.float64)
        found[name] = [flat.norm().item(), *((flat * torch.cos(k * places)).sum().item() for k in (1.0, math.pi / 7))]
    return found
