from __future__ import annotations

import pytest
import torch
from interpreted import run_interpreted


def test_the_kernel_is_right_in_the_interpreter():
    assert "update: 52 cases" in run_interpreted("check_update")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_is_right_on_the_gpu():
    from kernel_cases import check_update

    check_update("cuda")
