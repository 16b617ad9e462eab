"""The operators around flash-attn-4, whose kernels are stood in for by plain attention."""

import plain_flash4
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tunesmith.kernels import flash4, reference


@pytest.mark.parametrize("heads_first", [False, True])
def test_compiled_layers_get_the_strides_that_the_operators_declare(monkeypatch, heads_first):
    plain_flash4.install(monkeypatch)
    q, k, v = (torch.randn(12, heads, 8) for heads in (4, 2, 2))
    if heads_first:  # as attention has them that no kernel of ours has rotated
        q, k, v = (one.transpose(0, 1).contiguous().transpose(0, 1) for one in (q, k, v))
    given = (torch.tensor([0, 5, 12], dtype=torch.int32), None, None, 12, 12, 0.5, 0, 0.0)
    out, lse = flash4._forward(q, k, v, *given)
    found = [out, lse, *flash4._backward(torch.randn_like(out), q, k, v, out, lse, *given)]
    with FakeTensorMode() as mode:
        q, k, v, out_f, lse_f = (mode.from_tensor(one) for one in (q, k, v, out, lse))
        given = (mode.from_tensor(given[0]), *given[1:])
        declared = [*flash4._forward(q, k, v, *given), *flash4._backward(out_f, q, k, v, out_f, lse_f, *given)]
    assert [one.stride() for one in found] == [one.stride() for one in declared]


@pytest.mark.parametrize("has_sinks", [False, True])
def test_sinks_and_values_of_another_size_get_their_gradients(monkeypatch, has_sinks):
    plain_flash4.install(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    shapes = [(12, 4, 16), (12, 2, 16), (12, 2, 8), *([(4,)] if has_sinks else [])]
    given = [torch.randn(*shape, generator=generator, requires_grad=True) for shape in shapes]
    bounds = torch.tensor([0, 5, 12], dtype=torch.int32)
    sinks = given[3] if has_sinks else None
    fast = torch.compile(flash4.flash4, backend="aot_eager", fullgraph=True)
    out = fast(*given[:3], bounds, bounds, 7, 7, 0.3, None, None, sinks)
    expected = reference.packed_attention(*given[:3], [0, 5, 12], scale=0.3, sinks=sinks)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    direction = torch.randn(out.shape, generator=generator)
    found, wanted = (torch.autograd.grad(one, given, direction) for one in (out, expected))
    for mine, plain in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-5)
