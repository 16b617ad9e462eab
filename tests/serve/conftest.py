from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from export.models import make_run
from serve.serving import Served, serving


@pytest.fixture(scope="session")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two short runs over the same base, whose adapters are on different linears."""
    folder = tmp_path_factory.mktemp("served")
    first = make_run(folder / "first", tiny_model, steps=4)
    second = make_run(folder / "second", tiny_model, steps=4, seed=5, lora={"rank": 2, "targets": ["q_proj"]})
    return first, second


@pytest.fixture(scope="session")
def server(trained: tuple[Path, Path]) -> Iterator[Served]:
    first, second = trained
    with serving(first, {"second": second}) as served:
        yield served
