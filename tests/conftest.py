"""What tests share: a tiny model folder with tokenizer and chat template, made here, so that no hub is needed."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of two workers on two cores, more would wait for each other

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ranks import World
from tiny_model import make_tiny_model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 2 layers with random weights, a byte-level tokenizer and a ChatML template."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], World]]:
    """Worlds by their number of ranks, each started once."""
    cache = tmp_path_factory.mktemp("cache")
    worlds: dict[int, World] = {}

    def of(count: int) -> World:
        if count not in worlds or worlds[count].is_over:
            worlds[count] = World(count, cache)
        return worlds[count]

    yield of
    for one in worlds.values():
        one.close()
