"""What tests share: a tiny model folder with tokenizer and chat template, made here, so that no hub is needed."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of two workers on two cores, more would wait for each other

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from ranks import Worlds
from repeated import REPEATED
from tiny import Runs, build_commands_once
from tiny_model import make_tiny_model
from tunesmith.cli.main import COLLECTING

gc.set_threshold(*COLLECTING)
# An example takes longer, and is drawn more slowly, where something else runs beside it. CI draws the same ones each
# time, so that a change is judged by what it changes.
settings.register_profile(
    "tunesmith", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=bool(os.environ.get("CI"))
)
settings.load_profile("tunesmith")


def have_a_core_each() -> None:
    """Two workers whose runs take two threads each wait for each other on two cores."""
    worker, count = os.environ.get("PYTEST_XDIST_WORKER", ""), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    if worker and len(cores) == count:
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw"))]})


have_a_core_each()
build_commands_once()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.nodeid.endswith(REPEATED):
            item.add_marker(pytest.mark.slow)
    if list(config.args) == config.getini("testpaths"):  # all of them
        names = [item.nodeid for item in items]
        if gone := [end for end in REPEATED if not any(name.endswith(end) for name in names)]:
            raise pytest.UsageError(f"tests/repeated.py names tests that are not there: {', '.join(gone)}")


def pytest_collection_finish():
    gc.freeze()  # what is imported by now is no garbage, and looking through it takes a second each time


def pytest_unconfigure():
    gc.unfreeze()  # else libraries complain of what was not tidied up


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr("tunesmith.cli.main.keep_bytecode", lambda: None)  # it would change the whole process


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 2 layers with random weights, a byte-level tokenizer and a ChatML template."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    started = Runs(tmp_path_factory.mktemp("cache"))
    yield started
    started.close()


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    worlds = Worlds(tmp_path_factory.mktemp("cache"))
    yield worlds
    worlds.close()


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from export.models import make_model

    return make_model(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture(scope="session")
def trained(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short LoRA run of a tiny Llama."""
    from export.models import make_run

    return make_run(tmp_path_factory.mktemp("exported"), llama)
