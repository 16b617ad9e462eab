from __future__ import annotations

import pytest
import torch
from interpreted import run_interpreted
from kernel_cases import GATINGS

from tunesmith.kernels import reference
from tunesmith.kernels.gated import gated_matmul, joint_gated_matmul


def operands(device: str = "cpu", dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((20, 48), (20, 48), (32, 48))
    return [torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def test_the_kernel_is_right_in_the_interpreter():
    assert "gated: 8 cases" in run_interpreted("check_gated")


@pytest.mark.parametrize("gating", GATINGS, ids=lambda gating: gating.text)
def test_product_and_gradients_equal_the_plain_ones(gating):
    given = operands()
    g = torch.randn(20, 32)
    expected = reference.gated_matmul(*given, GATINGS[gating])
    gradients = torch.autograd.grad(expected, given, g)
    joint = torch.cat(given[:2], dim=1)
    for found in (gated_matmul(*given, gating.text), joint_gated_matmul(joint, given[2], gating.text)):
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, given, g), gradients)


def test_the_activation_is_not_kept():
    given, kept = operands(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        gated_matmul(*given)
    assert [one.data_ptr() for one in kept] == [one.data_ptr() for one in given]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_is_right_on_the_gpu():
    from kernel_cases import check_gated

    for gating in GATINGS:
        check_gated("cuda", (torch.float32, torch.float16, torch.bfloat16), gating=gating)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("act", "is_joint"), [("silu", False), ("gelu_pytorch_tanh", False), ("silu", True)])
def test_a_compiled_layer_does_not_keep_the_activation_and_gives_the_same_gradients(act, is_joint):
    from torch import nn
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP
    from transformers.models.phi3.modeling_phi3 import Phi3MLP

    from tunesmith.model.gated import use_memory_efficient_gates

    config = LlamaConfig(hidden_size=256, intermediate_size=1024, hidden_act=act)
    torch.manual_seed(0)
    layer = nn.Sequential((Phi3MLP if is_joint else LlamaMLP)(config)).to("cuda", torch.bfloat16)
    x = torch.randn(1, 4096, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def passes(call) -> tuple[int, list[torch.Tensor]]:
        before = torch.cuda.memory_allocated()
        out = call(x)
        kept = torch.cuda.memory_allocated() - before - out.nbytes
        return kept, [out, *torch.autograd.grad(out, [x, *layer.parameters()], torch.ones_like(out) / 64)]

    _, expected = passes(layer)
    assert len(use_memory_efficient_gates(layer)) == 1
    compiled = torch.compile(layer, fullgraph=True)
    passes(compiled)
    kept, found = passes(compiled)
    wide = 4096 * 1024 * 2
    assert 2 * wide <= kept < 2.5 * wide
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.float() - theirs.float()).norm() < 0.01 * theirs.float().norm()
