from __future__ import annotations

import pytest
import torch
from interpreted import run_interpreted


def test_rows_and_turned_columns_come_out_over_their_scales_in_the_interpreter():
    # In fp32: the interpreter does not round to fp8 as a GPU does.
    assert "quantize: 4 cases" in run_interpreted("check_quantize")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_rows_and_turned_columns_come_out_over_their_scales_on_the_gpu():
    from kernel_cases import check_quantize

    check_quantize("cuda", torch.float32)
    check_quantize("cuda", torch.float8_e4m3fn)
