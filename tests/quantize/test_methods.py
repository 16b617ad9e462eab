"""Each method does what it promises to a matrix; and the roundings are those of the libraries whose files hold them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from tunesmith.errors import UserError
from tunesmith.export.quantized import _compressed, _scheme
from tunesmith.kernels.fake_quantize import fake_quantized_linear, fake_quantized_lowrank
from tunesmith.kernels.rounding import Rounding, group_of, int_scales, to_int
from tunesmith.quantize.awq import best_factors
from tunesmith.quantize.clusters import cluster
from tunesmith.quantize.gptq import gptq

KINDS = [Rounding("int4", 32), Rounding("int8", 64), Rounding("fp8"), Rounding("nvfp4")]


@pytest.fixture
def weight():
    torch.manual_seed(0)
    made = torch.randn(24, 128) * torch.rand(24, 1)
    made[3] = 0  # a row of zeros has no scale of its own
    return made


@pytest.fixture
def hessian():
    """Of inputs that depend on each other, some of them large."""
    torch.manual_seed(1)
    x = torch.randn(512, 128) @ (torch.eye(128) + 0.3 * torch.randn(128, 128)) * torch.logspace(-1, 1, 128)
    return x.t() @ x / len(x)


def output_error(weight, rounded, hessian):
    difference = weight - rounded
    return ((difference @ hessian) * difference).sum().item()


@pytest.mark.parametrize("rounding", KINDS, ids=lambda one: one.kind)
def test_what_is_trained_for_is_what_compressed_tensors_reads_from_the_file(weight, rounding):
    from compressed_tensors.compressors import BaseCompressor

    scheme, layout = _scheme(rounding)
    read = BaseCompressor.get_value_from_registry(layout).decompress(_compressed(weight, rounding), scheme)["weight"]
    expected = rounding(weight)
    if rounding.kind == "nvfp4":  # which it dequantizes to bf16
        expected = expected.to(read.dtype)
    assert torch.equal(read.float(), expected.float())
    assert (expected.float() - weight).norm() < {"int4": 0.15, "nvfp4": 0.12}.get(rounding.kind, 0.03) * weight.norm()


@pytest.mark.parametrize("kind", ["q4_0", "q8_0"])
def test_blocks_of_llama_cpp_are_bit_for_bit_those_of_the_gguf_package(weight, kind):
    type_ = gguf.GGMLQuantizationType[kind.upper()]
    expected = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), type_), type_)
    np.testing.assert_array_equal(Rounding(kind)(weight).numpy(), expected)


def test_groups_are_the_largest_usual_ones_that_divide_all_rows():
    assert (group_of({256, 128}), group_of({576, 1536}), group_of({96}), group_of({80})) == (128, 64, 32, None)


@pytest.mark.parametrize("act_order", [True, False])
def test_gptq_and_awq_lose_less_of_the_output_than_rounding_to_the_nearest(weight, hessian, act_order):
    nearest = output_error(weight, Rounding("int4", 32)(weight), hessian)
    rounded, scale = gptq(weight, hessian, bits=4, group=32, act_order=act_order)
    assert output_error(weight, rounded, hessian) < (0.5 if act_order else 0.8) * nearest
    assert torch.equal(to_int(rounded, scale, 4), rounded)  # on the grid of its scales
    factors = best_factors([weight], hessian, bits=4, group=32)
    scaled = weight * factors
    assert output_error(weight, to_int(scaled, int_scales(scaled, 4, 32), 4) / factors, hessian) < nearest


def test_gptq_takes_few_tokens_and_says_where_it_cannot_do_anything(weight):
    x = torch.randn(3, 128)
    rounded, _ = gptq(weight, x.t() @ x, bits=8, group=32)
    assert (rounded - weight).norm() < 0.05 * weight.norm()
    with pytest.raises(UserError, match=r"The inputs of layers.0.q in calibration are zero or not finite"):
        gptq(weight, torch.zeros(128, 128), bits=4, group=32, name="layers.0.q")
    with pytest.raises(UserError, match=r"The Hessian of layers.0.q is singular"):
        gptq(weight, torch.diag(torch.tensor([1.0] * 127 + [-50.0])), bits=4, group=32, name="layers.0.q")


def test_clusters_have_few_values_a_row_and_follow_what_is_important(weight):
    rounded, book, codes = cluster(weight, None, bits=4, dtype=torch.bfloat16)
    assert all(len(row.unique()) <= 16 for row in rounded)
    assert torch.equal(book.float().gather(1, codes.long()), rounded)
    assert (rounded - weight).norm() < (Rounding("int4", 128)(weight) - weight).norm()
    importance = torch.ones(128)
    importance[:8] = 1000
    weighed, _, _ = cluster(weight, importance, bits=4, dtype=torch.bfloat16)
    assert (weighed - weight)[:, :8].norm() < 0.7 * (rounded - weight)[:, :8].norm()


@pytest.mark.parametrize("rounding", [*KINDS, Rounding("q4_0")], ids=lambda one: one.kind)
def test_gradients_pass_straight_through_the_rounding(weight, rounding):
    torch.manual_seed(2)
    x, g = torch.randn(2, 5, 128, requires_grad=True), torch.randn(2, 5, 24)
    a, b = torch.randn(4, 128, requires_grad=True), torch.randn(24, 4, requires_grad=True)
    bias = torch.randn(24, requires_grad=True)
    trained = weight.clone().requires_grad_()
    y = fake_quantized_linear(x, trained, bias, rounding)
    assert torch.equal(y, torch.nn.functional.linear(x, rounding(weight), bias))
    plain = torch.nn.functional.linear(x, trained + (rounding(weight) - trained).detach(), bias)
    for mine, theirs in zip(_grads(y, g, x, trained, bias), _grads(plain, g, x, trained, bias), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    y = fake_quantized_lowrank(x, weight, bias, a, b, 0.5, rounding)
    merged = weight + (b @ a) * 0.5
    assert torch.equal(y, torch.nn.functional.linear(x, rounding(merged), bias))
    plain = torch.nn.functional.linear(x, merged + (rounding(merged) - merged).detach(), bias)
    for mine, theirs in zip(_grads(y, g, x, a, b, bias), _grads(plain, g, x, a, b, bias), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-3)


def _grads(y, g, *inputs):
    return torch.autograd.grad(y, inputs, g)
