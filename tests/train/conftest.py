from __future__ import annotations

from collections.abc import Iterator

import pytest

from tiny import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    started = Runs(tmp_path_factory.mktemp("cache"))
    yield started
    started.close()
