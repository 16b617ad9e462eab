"""The operators around flash-attn-4, whose kernels are stood in for by plain attention."""

import plain_flash4
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tunesmith.kernels import flash4


@pytest.mark.parametrize("heads_first", [False, True])
def test_compiled_layers_get_the_strides_that_the_operators_declare(monkeypatch, heads_first):
    plain_flash4.install(monkeypatch)
    q, k, v = (torch.randn(12, heads, 8) for heads in (4, 2, 2))
    if heads_first:  # as attention has them that no kernel of ours has rotated
        q, k, v = (one.transpose(0, 1).contiguous().transpose(0, 1) for one in (q, k, v))
    given = (torch.tensor([0, 5, 12], dtype=torch.int32), None, 12, 12, 0.5, 0, 0.0)
    out, lse = flash4._forward(q, k, v, *given)
    found = [out, lse, *flash4._backward(torch.randn_like(out), q, k, v, out, lse, *given)]
    with FakeTensorMode() as mode:
        q, k, v, out_f, lse_f = (mode.from_tensor(one) for one in (q, k, v, out, lse))
        given = (mode.from_tensor(given[0]), *given[1:])
        declared = [*flash4._forward(q, k, v, *given), *flash4._backward(out_f, q, k, v, out_f, lse_f, *given)]
    assert [one.stride() for one in found] == [one.stride() for one in declared]
