"""nf4 holds exactly what bitsandbytes holds, and gives the weights back exactly as it does."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from interpreted import run_interpreted
from kernel_cases import check_lowrank_mlp_nf4, check_nf4

from tunesmith.kernels import nf4
from tunesmith.kernels.lowrank import lowrank_linear_fp8, quantize_rows

SHAPES = [(1, 1), (1, 2), (3, 7), (1, 63), (5, 13), (2, 64), (32, 96), (7, 129), (257, 64), (130, 131), (300, 128)]


def draw(shape, *, dtype=torch.float32, seed=0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*SHAPES, (1024, 1024)])
def test_every_byte_and_every_value_equal_bitsandbytes(shape, dtype):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = draw(shape, dtype=dtype, seed=shape[0])
    # Flattened, since bitsandbytes 0.50 on AVX-512 takes the wrong scales for rows that are no multiple of 64.
    packed, state = functional.quantize_4bit(weight.flatten(), blocksize=64, compress_statistics=True, quant_type="nf4")
    held = nf4.quantize(weight)
    parts = nf4.split(held, weight.numel())
    assert held.shape == (nf4.size(weight.numel()),)
    assert torch.equal(parts.packed, packed.view(-1))
    assert torch.equal(parts.scales, state.absmax)
    assert torch.equal(parts.nested, state.state2.absmax)
    assert torch.equal(parts.offset[0], state.offset)
    assert torch.equal(nf4.scale_values(torch.device("cpu")), state.state2.code)
    with torch.compiler.set_stance("force_eager"):  # bitsandbytes compiles its path for odd sizes, for seconds
        expected = functional.dequantize_4bit(packed, state).view(shape)
    assert torch.equal(nf4.dequantize(held, [shape[0]], shape[1], dtype), expected)


def test_chunks_do_not_change_what_is_held(monkeypatch):
    weight = draw((129, 100))
    expected = nf4.quantize(weight)
    monkeypatch.setattr(nf4, "CHUNK", 128)
    assert torch.equal(nf4.quantize(weight), expected)


def test_zeros_and_constant_weights_come_back_as_they_were():
    for weight in (torch.zeros(5, 64), torch.ones(5, 64), torch.zeros(1, 3)):
        found = nf4.dequantize(nf4.quantize(weight), [weight.shape[0]], weight.shape[1], torch.float32)
        torch.testing.assert_close(found, weight, rtol=1e-6, atol=1e-30)


def test_linears_one_behind_the_other_are_quantized_each_by_itself():
    weights = [draw((rows, 33), seed=rows) * rows for rows in (1, 7, 64)]
    held = [nf4.quantize(weight) for weight in weights]
    alone = [nf4.dequantize(one, [len(weight)], 33, torch.float32) for one, weight in zip(held, weights, strict=True)]
    assert torch.equal(nf4.dequantize(torch.cat(held), [1, 7, 64], 33, torch.float32), torch.cat(alone))


def test_a_weight_takes_4_127_bits():
    assert 8 * nf4.size(4096 * 4096) / 4096**2 == pytest.approx(4.127, abs=0.001)


def test_a_linear_in_nf4_gives_what_its_weights_give():
    weight, bias = draw((24, 40)), draw((24,))
    held = nf4.quantize(weight)
    plain = nf4.dequantize(held, [24], 40, torch.float32)
    x = draw((2, 5, 40), seed=1).requires_grad_()
    found, expected = nf4.nf4_linear(x, held, 24, bias), torch.nn.functional.linear(x, plain, bias)
    assert torch.equal(found, expected)
    (one,), (two,) = (torch.autograd.grad(y.square().sum(), x) for y in (found, expected))
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-8)


def test_rows_may_be_divided_by_scales_of_their_own():
    weights = [draw((rows, 48), seed=rows) for rows in (3, 8)]
    held = torch.cat([nf4.quantize(weight) for weight in weights])
    scale_n = torch.rand(11, generator=torch.Generator().manual_seed(2)) + 0.5
    plain = nf4.dequantize(held, [3, 8], 48, torch.float32)
    assert torch.equal(nf4.dequantize(held, [3, 8], 48, torch.float32, scale_n), plain / scale_n[:, None])


def test_fp8_products_over_nf4_are_those_over_the_same_weights_in_fp8():
    """Forward and backward see one and the same fp8 matrix, made anew each time."""
    held = nf4.quantize(draw((32, 48)))
    values, scale_n1 = quantize_rows(nf4.dequantize(held, [32], 48, torch.float32))
    x, a, b = (draw(shape, seed=3).requires_grad_() for shape in ((5, 48), (4, 48), (32, 4)))
    results = []
    for weight in (held, values):
        y = lowrank_linear_fp8(x, weight, scale_n1.squeeze(1), a, b, None, (32,))
        results.append([y, *torch.autograd.grad(y.square().sum(), (x, a, b))])
    assert all(map(torch.equal, *results))


def test_the_operator_is_registered_rightly():
    held = nf4.quantize(draw((24, 40)))
    torch.library.opcheck(nf4.dequantize, (held, [24], 40, torch.float32))
    torch.library.opcheck(nf4.dequantize, (held, [24], 40, torch.float16, torch.rand(24) + 0.5, held))


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
def test_the_kernel_gives_the_same_bits_in_the_interpreter():
    assert "nf4: " in run_interpreted("check_nf4")


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
def test_a_whole_mlp_in_nf4_is_the_mlp_of_its_weights_in_the_interpreter():
    assert "mlp in nf4: ok" in run_interpreted("check_lowrank_mlp_nf4")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_gives_the_same_bits_on_a_gpu():
    check_nf4("cuda", (torch.float32, torch.float16, torch.bfloat16))
    check_lowrank_mlp_nf4("cuda", torch.bfloat16)


@pytest.mark.parametrize("shape", [(64, 128), (512, 256), (6, 640)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_part_of_a_weight_holds_the_values_of_the_whole(shape, ranks):
    rows, columns = shape
    held = nf4.quantize(draw(shape))
    whole = nf4.dequantize(held, [rows], columns, torch.float32)
    for rank in range(ranks):
        part = nf4.cut_rows(held, shape, rank, ranks)
        found = nf4.dequantize(part, [rows // ranks], columns, torch.float32)
        assert torch.equal(found, whole.chunk(ranks)[rank])
        part = nf4.cut_columns(held, shape, rank, ranks)
        found = nf4.dequantize(part, [rows], columns // ranks, torch.float32)
        assert torch.equal(found, whole.chunk(ranks, 1)[rank])


def test_rows_that_hold_whole_groups_of_scales_stay_as_small():
    held = nf4.quantize(draw((512, 256)))
    assert nf4.cut_rows(held, (512, 256), 1, 2).shape == (nf4.size(256 * 256),)


def test_parts_with_either_kind_of_scales_are_joined_to_the_values_of_both():
    shapes = [(256, 256), (128, 256)]  # of four parts, the first one's are whole groups of scales and the second's torn
    parts = [nf4.cut_rows(nf4.quantize(draw(shape)), shape, 1, 4) for shape in shapes]
    rows = [height // 4 for height, _ in shapes]
    each = [nf4.dequantize(part, [height], 256, torch.float32) for part, height in zip(parts, rows, strict=True)]
    joined = nf4.join(parts, [height * 256 for height in rows])
    assert torch.equal(nf4.dequantize(joined, rows, 256, torch.float32), torch.cat(each))
