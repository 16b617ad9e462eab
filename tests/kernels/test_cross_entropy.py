"""The Triton kernel against the plain truth: in Triton's interpreter without a GPU, compiled on one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HAS_GPU = torch.cuda.is_available()


def test_the_kernel_is_right_in_the_interpreter():
    """In a process of its own: Triton decides at import whether it interprets."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("kernel_cases.py")), "cpu"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cross_entropy: 12 cases" in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_the_kernel_is_right_on_the_gpu():
    from kernel_cases import check_cross_entropy

    check_cross_entropy("cuda", (torch.float32, torch.bfloat16, torch.float16))
