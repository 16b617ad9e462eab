"""Packed attention: causal, inside documents only, on every path the CPU has."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tunesmith.errors import UserError
from tunesmith.kernels import reference
from tunesmith.model import attention
from tunesmith.model.attention import NotPackable, packed_attention


@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_documents_do_not_see_each_other(window, softcap, kv_heads):
    generator = torch.Generator().manual_seed(0)
    bounds = [0, 5, 6, 14]
    query = torch.randn(14, 4, 8, generator=generator, requires_grad=True)
    key, value = (torch.randn(14, kv_heads, 8, generator=generator, requires_grad=True) for _ in range(2))
    expected = reference.packed_attention(query, key, value, bounds, scale=0.3, window=window, softcap=softcap)
    found, _ = packed_attention(
        torch.nn.Module(),
        *(tensor.transpose(0, 1)[None] for tensor in (query, key, value)),
        None,
        scaling=0.3,
        sliding_window=window,
        softcap=softcap,
        cu_seq_lens_q=torch.tensor(bounds, dtype=torch.int32),
        max_length_q=8,
    )
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)
    direction = torch.randn(found[0].shape, generator=generator)
    wanted = torch.autograd.grad(expected, (query, key, value), direction)
    for gradient, want in zip(torch.autograd.grad(found[0], (query, key, value), direction), wanted, strict=True):
        torch.testing.assert_close(gradient, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_other_lengths_do_not_compile_a_layer_again(softcap):
    def layer(x, bounds):
        rows = (one[None] for one in (x * 2, x + 1, x - 1))
        options = {"cu_seq_lens_q": bounds, "max_length_q": 14, "softcap": softcap}
        return packed_attention(torch.nn.Module(), *rows, None, **options)[0].cos()

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(layer, backend=counter)
    x = torch.randn(4, 14, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    frames = []
    for lengths in ((14,), (5, 1, 8), (7, 7), (1,) * 14, (13, 1), (14, 0)):
        bounds = torch.tensor([0, *lengths]).cumsum(0).int()
        torch._dynamo.maybe_mark_dynamic(bounds, 0)
        found, wanted = fast(x, bounds), layer(x, bounds)
        torch.testing.assert_close(found, wanted)
        for mine, plain in zip(*(torch.autograd.grad(one.sum(), x) for one in (found, wanted)), strict=True):
            torch.testing.assert_close(mine, plain)
        frames.append(counter.frame_count)
    assert frames == [2] * 6  # before attention and after it


def test_without_boundaries_it_refuses():
    tensor = torch.zeros(1, 1, 2, 8)
    with pytest.raises(NotPackable):
        packed_attention(torch.nn.Module(), tensor, tensor, tensor, None)


def test_the_kernel_that_the_plan_names_is_taken_and_no_other(monkeypatch):
    from transformers import AttentionInterface

    taken = []
    monkeypatch.setattr(attention, "_has_flash4", lambda *_: True)
    monkeypatch.setattr(attention, "_has_kernel", lambda *_: True)
    monkeypatch.setattr(attention.flash4, "is_available", lambda: True)
    monkeypatch.setattr(attention.flash4, "flash4", lambda q, *_: taken.append("flash-attn-4") or q)
    monkeypatch.setattr(attention, "_variable_length", lambda q, *_: taken.append("varlen") or q)
    monkeypatch.setattr(attention.efficient, "can", lambda *_: True)
    monkeypatch.setattr(attention.efficient, "efficient", lambda q, *_: taken.append("sdpa") or q)
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    boundaries = {"cu_seq_lens_q": torch.tensor([0, 6], dtype=torch.int32), "max_length_q": 6}
    try:
        for kernel in ("flash-attn-4", "varlen", "sdpa", None):
            name = attention.register(kernel)
            AttentionInterface()[name](torch.nn.Module(), q, k, v, None, **boundaries)
    finally:
        attention.register()
    assert taken == ["flash-attn-4", "varlen", "sdpa", "flash-attn-4"]


def test_a_plan_with_a_kernel_that_is_not_here_is_refused():
    with pytest.raises(UserError, match="attention is flash-attn-4, which is not installed here"):
        attention.register("flash-attn-4")
