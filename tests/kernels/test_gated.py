from __future__ import annotations

import pytest
import torch
from interpreted import run_interpreted

from tunesmith.kernels import reference
from tunesmith.kernels.gated import gated_matmul


def operands(device: str = "cpu", dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((20, 48), (20, 48), (32, 48))
    return [torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def test_the_kernel_is_right_in_the_interpreter():
    assert "gated: 8 cases" in run_interpreted("check_gated")


def test_product_and_gradients_equal_the_plain_ones():
    given = operands()
    found, expected = gated_matmul(*given), reference.gated_matmul(*given)
    torch.testing.assert_close(found, expected)
    g = torch.randn(20, 32)
    torch.testing.assert_close(torch.autograd.grad(found, given, g), torch.autograd.grad(expected, given, g))


def test_the_activation_is_not_kept():
    given, kept = operands(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        gated_matmul(*given)
    assert [one.data_ptr() for one in kept] == [one.data_ptr() for one in given]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_is_right_on_the_gpu():
    from kernel_cases import check_gated

    check_gated("cuda", (torch.float32, torch.float16, torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_compiled_layer_does_not_keep_the_activation_and_gives_the_same_gradients():
    from torch import nn
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    from tunesmith.model.gated import use_memory_efficient_swiglu

    config = LlamaConfig(hidden_size=256, intermediate_size=1024)
    torch.manual_seed(0)
    layer = nn.Sequential(LlamaMLP(config)).to("cuda", torch.bfloat16)
    x = torch.randn(1, 4096, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def passes(call) -> tuple[int, list[torch.Tensor]]:
        before = torch.cuda.memory_allocated()
        out = call(x)
        kept = torch.cuda.memory_allocated() - before - out.nbytes
        return kept, [out, *torch.autograd.grad(out, [x, *layer.parameters()], torch.ones_like(out) / 64)]

    _, expected = passes(layer)
    assert use_memory_efficient_swiglu(layer) == 1
    compiled = torch.compile(layer, fullgraph=True)
    passes(compiled)
    kept, found = passes(compiled)
    wide = 4096 * 1024 * 2
    assert 2 * wide <= kept < 2.5 * wide
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.float() - theirs.float()).norm() < 0.01 * theirs.float().norm()
