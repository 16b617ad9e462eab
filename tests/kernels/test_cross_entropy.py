from __future__ import annotations

import pytest
import torch
from interpreted import run_interpreted


def test_the_kernel_is_right_in_the_interpreter():
    assert "cross_entropy: 12 cases" in run_interpreted("check_cross_entropy")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_is_right_on_the_gpu():
    from kernel_cases import check_cross_entropy

    check_cross_entropy("cuda", (torch.float32, torch.bfloat16, torch.float16))


def test_the_gradient_in_two_parts_is_right_in_the_interpreter():
    # In fp32: the interpreter does not round to fp8 as a GPU does.
    assert "cross_entropy in fp8: 8 cases" in run_interpreted("check_cross_entropy_fp8")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gradient_in_two_parts_is_right_on_the_gpu():
    from kernel_cases import check_cross_entropy_fp8

    check_cross_entropy_fp8("cuda", torch.float32)
    check_cross_entropy_fp8("cuda", torch.float8_e4m3fn)
