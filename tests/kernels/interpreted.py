"""Runs a kernel's cases in Triton's interpreter: in a process of its own, since Triton decides at import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_interpreted(check: str) -> str:
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    code = f"import kernel_cases; kernel_cases.{check}('cpu')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
