"""Whether vLLM can be tried: it lives in an environment of its own, and its command is on the PATH or named."""

from __future__ import annotations

import pytest

from tunesmith.infer.vllm_server import VARIABLE, find_command

needs_vllm = pytest.mark.skipif(
    find_command() is None, reason=f"no command `vllm` is on the PATH, and {VARIABLE} names none"
)
