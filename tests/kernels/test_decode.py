"""Decoding steps by our own kernels give what the model gives, of every structure that they are for."""

import pytest
import torch
from interpreted import run_interpreted


def test_decoding_steps_are_those_of_the_model():
    assert "decoding: 1 cases" in run_interpreted("check_some_decoding")


@pytest.mark.slow
def test_decoding_steps_of_every_structure_are_those_of_the_model():
    assert "decoding: 7 cases" in run_interpreted("check_decoding")


def test_other_structures_are_left_to_the_compiler():
    assert "left alone: 4 cases" in run_interpreted("check_decoding_of_others")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decoding_steps_on_the_gpu(dtype):
    """Captured, and with kernels that overlap where they can."""
    from kernel_cases import check_decoding

    check_decoding("cuda", dtype)
