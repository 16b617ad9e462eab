"""The cache is filled where it can be, and done without where it cannot."""

from __future__ import annotations

import os

import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from tunesmith.cache import folder_to_fill
from tunesmith.kernels import flash4
from tunesmith.parallel.compile import compiled

FLASH = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"


def test_a_folder_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path / "new"))
    assert folder_to_fill("some") == tmp_path / "new" / "some"
    assert (tmp_path / "new" / "some").is_dir()


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path / "file"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    monkeypatch.delenv(FLASH, raising=False)
    assert folder_to_fill("some") is None
    flash4.keep_compiled()
    assert FLASH not in os.environ
    compiled(torch.sin, "Layer")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == default_cache_dir()


def test_what_a_user_said_of_attentions_kernels_stands(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path))
    monkeypatch.setenv(FLASH, "0")
    flash4.keep_compiled()
    assert os.environ[FLASH] == "0"
    monkeypatch.delenv(FLASH)
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "elsewhere")
    flash4.keep_compiled()
    assert os.environ.pop(FLASH) == "1"
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == "elsewhere"
