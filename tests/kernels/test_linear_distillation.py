from __future__ import annotations

import pytest
import torch
from interpreted import run_interpreted


def test_the_kernels_are_right_in_the_interpreter():
    assert "distillation: 42 cases" in run_interpreted("check_distillation")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernels_are_right_on_the_gpu():
    from kernel_cases import check_distillation

    check_distillation("cuda", (torch.float32, torch.bfloat16, torch.float16))
