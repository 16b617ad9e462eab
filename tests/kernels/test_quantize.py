from __future__ import annotations

import pytest
import torch
from interpreted import run_interpreted

from tunesmith.kernels.fp8 import quantize_transposed, quantize_with_maxima
from tunesmith.kernels.lowrank import quantize_apart, quantize_rows, transposed_copy


def test_rows_and_turned_columns_come_out_over_their_scales_in_the_interpreter():
    # In fp32: the interpreter does not round to fp8 as a GPU does.
    assert "quantize: 4 cases" in run_interpreted("check_quantize")


def test_rows_and_the_largest_of_their_columns_come_out_of_one_pass_in_the_interpreter():
    assert "quantize_with_maxima: 9 cases" in run_interpreted("check_quantize_with_maxima")


def test_the_largest_of_columns_change_nothing_where_they_are_known():
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
    values, scale, largest = quantize_with_maxima(x)
    wanted, wanted_scale = quantize_apart(x, None)
    assert torch.equal(values.float(), wanted.float())
    assert torch.equal(scale, wanted_scale)
    assert torch.equal(largest, x.abs().amax(0))
    for one, two in zip(quantize_transposed(x, None, largest), quantize_transposed(x, None), strict=True):
        assert torch.equal(one.float(), two.float())
    torch.library.opcheck(quantize_with_maxima, (x,), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(quantize_transposed, (x, None, largest), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_rows_and_turned_columns_come_out_over_their_scales_on_the_gpu():
    from kernel_cases import check_quantize

    check_quantize("cuda", torch.float32)
    check_quantize("cuda", torch.float8_e4m3fn)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_rows_and_the_largest_of_their_columns_come_out_of_one_pass_on_the_gpu():
    from kernel_cases import check_quantize_with_maxima

    check_quantize_with_maxima("cuda", torch.float32)
    check_quantize_with_maxima("cuda", torch.float8_e4m3fn)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_matrices_whose_rows_are_not_whole_are_quantized_rightly_on_the_gpu():
    x = torch.randn(64, 96, device="cuda", dtype=torch.bfloat16)
    for one, two in zip(quantize_transposed(x.t(), None), quantize_transposed(x.t().contiguous(), None), strict=True):
        assert torch.equal(one.float(), two.float())
    for one, two in zip(quantize_with_maxima(x.t()), quantize_with_maxima(x.t().contiguous()), strict=True):
        assert torch.equal(one.float(), two.float())


def test_a_matrix_in_fp8_is_transposed():
    values = quantize_rows(torch.randn(7, 32, generator=torch.Generator().manual_seed(0)))[0]
    assert torch.equal(transposed_copy(values).float(), values.float().t())
    torch.library.opcheck(transposed_copy, (values,), test_utils=("test_faketensor",))


def test_a_matrix_in_fp8_is_transposed_in_the_interpreter():
    assert "transpose: 3 cases" in run_interpreted("check_transpose")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_matrix_in_fp8_is_transposed_on_the_gpu():
    from kernel_cases import check_transpose

    check_transpose("cuda")
