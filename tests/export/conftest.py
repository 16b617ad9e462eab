from __future__ import annotations

from pathlib import Path

import pytest

from export.models import make_model, make_run


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture(scope="session")
def trained(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short LoRA run of a tiny Llama."""
    return make_run(tmp_path_factory.mktemp("exported"), llama)
