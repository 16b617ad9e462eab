"""Matmuls of tokens with the matrices of their experts, held in few bits, against those with each expert by itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tunesmith.kernels import int8, nf4
from tunesmith.kernels.experts import expert_matmuls, grouped

COUNTS = (3, 0, 7, 1, 0)
"""Tokens of each expert."""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("storage", ["nf4", "int8"])
def test_rows_are_multiplied_by_their_experts(storage, dtype, device):
    torch.manual_seed(0)
    outputs, inputs = 24, 64
    matrices = torch.randn(len(COUNTS) * outputs, inputs, device=device)
    if storage == "nf4":
        held, scale_n = nf4.quantize(matrices), None
        whole = nf4.dequantize(held, [matrices.shape[0]], inputs, dtype)
    else:
        held, scale_n = int8.quantize(matrices)
        whole = int8.dequantize(held, scale_n, dtype)
    x = torch.randn(sum(COUNTS), inputs, device=device, dtype=dtype, requires_grad=True)
    ends = torch.tensor(COUNTS, device=device).cumsum(0).int()
    found = expert_matmuls(x, ends, held, scale_n, outputs)
    direction = torch.randn_like(found)
    (found_gradient,) = torch.autograd.grad(found, x, direction)
    parts = zip(x.split(COUNTS), whole.view(len(COUNTS), outputs, inputs), strict=True)
    expected = torch.cat([rows @ matrix.t() for rows, matrix in parts])
    (expected_gradient,) = torch.autograd.grad(expected, x, direction)
    off = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found, expected, **off)
    torch.testing.assert_close(found_gradient, expected_gradient, **off)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_torchs_grouped_products_mean_the_same(is_transposed):
    torch.manual_seed(0)
    weight = torch.randn(len(COUNTS), 24, 64, dtype=torch.bfloat16)
    weight = weight.transpose(1, 2) if is_transposed else weight
    x = torch.randn(sum(COUNTS), weight.shape[1], dtype=torch.bfloat16)
    ends = torch.tensor(COUNTS).cumsum(0).int()
    torch.testing.assert_close(grouped(x, weight, ends), F.grouped_mm(x, weight, offs=ends), rtol=2e-2, atol=2e-2)


def test_the_weights_are_not_kept_for_backward():
    held, kept = nf4.quantize(torch.randn(64, 64)), []
    x = torch.randn(8, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        expert_matmuls(x, torch.tensor([4, 8], dtype=torch.int32), held, None, 32)
    assert sum(one.nbytes for one in kept) < 0.2 * 4 * 64 * 64
    assert any(one.data_ptr() == held.data_ptr() for one in kept)


def test_the_compiler_sees_one_operator_without_a_break():
    held = nf4.quantize(torch.randn(64, 64))
    x, ends = torch.randn(8, 64, requires_grad=True), torch.tensor([4, 8], dtype=torch.int32)

    def layer(x, ends):
        return expert_matmuls(x.sin(), ends, held, None, 32).cos()

    found = torch.compile(layer, backend="aot_eager", fullgraph=True)(x, ends)
    torch.testing.assert_close(found, layer(x, ends))
    (gradient,) = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(gradient, torch.autograd.grad(layer(x, ends).sum(), x)[0])
