from __future__ import annotations

import pytest
import torch

from tunesmith.kernels import int8


def test_every_value_is_within_half_a_step_of_its_row():
    weight = torch.randn(33, 70, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 2, 33)[:, None]
    weight[5] = 0
    weight8, scale = int8.quantize(weight)
    assert (weight8.dtype, weight8.shape, scale.shape) == (torch.int8, weight.shape, (33,))
    found = int8.dequantize(weight8, scale, torch.float32)
    assert ((found - weight).abs() <= 0.5 * scale[:, None] * 1.00001).all()
    torch.testing.assert_close(found.abs().amax(1), weight.abs().amax(1))
    assert found[5].abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_product_and_its_gradient_are_those_of_the_whole_weight(dtype, has_bias):
    generator = torch.Generator().manual_seed(1)
    weight8, scale = int8.quantize(torch.randn(6, 10, generator=generator))
    bias = torch.randn(6, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(2, 3, 10, generator=generator).to(dtype)
    direction = torch.randn(2, 3, 6, generator=generator).to(dtype)
    ours, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    whole = (weight8.float() * scale[:, None]).to(dtype)
    found = int8.int8_linear(ours, weight8, scale, bias)
    expected = torch.nn.functional.linear(plain, whole, bias)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    found.backward(direction)
    expected.backward(direction)
    torch.testing.assert_close(ours.grad, plain.grad)
    torch.library.opcheck(int8.dequantize, (weight8, scale, dtype), test_utils="test_faketensor")
