"""Packed attention: causal, inside documents only, on every path the CPU has."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tunesmith.errors import UserError
from tunesmith.kernels import flex, reference
from tunesmith.model import attention
from tunesmith.model.attention import NotPackable, packed_attention
from tunesmith.plan.attention import Heads, path_of

EXTRAS = {
    "plain": {},
    "soft-capped": {"softcap": 4.0},
    "sinks": {"s_aux": True},
    "alibi": {"alibi_slopes": True},
    "values": {"value_dim": 24},
}


def drawn(kind: str, kv_heads: int, tokens: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    extras = dict(EXTRAS[kind])
    value_dim = extras.pop("value_dim", 16)
    query = torch.randn(tokens, 4, 16, generator=generator, requires_grad=True)
    key = torch.randn(tokens, kv_heads, 16, generator=generator, requires_grad=True)
    value = torch.randn(tokens, kv_heads, value_dim, generator=generator, requires_grad=True)
    extras = {name: torch.rand(4, generator=generator) if one is True else one for name, one in extras.items()}
    if "s_aux" in extras:
        extras["s_aux"].requires_grad_()
    return [query, key, value], extras, generator


@pytest.fixture
def flex_on_cpu(monkeypatch):
    """torch computes FlexAttention and its gradients on a CPU, by all scores, but does not let training at it."""

    def force(path="flex-attention"):
        monkeypatch.setattr(attention, "_path", lambda *_: path)
        monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)

    return force


def expect_reference(kernel, kind, kv_heads, window, chunk=None, bounds=(0, 5, 6, 14)):
    tensors, extras, generator = drawn(kind, kv_heads, bounds[-1])
    theirs = {"softcap": "softcap", "s_aux": "sinks", "alibi_slopes": "slopes"}
    named = {theirs[name]: one for name, one in extras.items()}
    expected = reference.packed_attention(*tensors, list(bounds), scale=0.3, window=window, chunk=chunk, **named)
    module = torch.nn.Module()
    if chunk is not None:
        module.config = SimpleNamespace(layer_types=["chunked_attention"], attention_chunk_size=chunk)
        module.layer_idx = 0
    found, _ = packed_attention(
        module,
        *(tensor.transpose(0, 1)[None] for tensor in tensors),
        None,
        scaling=0.3,
        sliding_window=window,
        cu_seq_lens_q=torch.tensor(bounds, dtype=torch.int32),
        max_length_q=max(after - before for before, after in pairwise(bounds)),
        kernel=kernel,
        **extras,
    )
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)
    direction = torch.randn(found[0].shape, generator=generator)
    inputs = [*tensors, *(one for one in extras.values() if isinstance(one, torch.Tensor) and one.requires_grad)]
    wanted = torch.autograd.grad(expected, inputs, direction)
    for gradient, want in zip(torch.autograd.grad(found[0], inputs, direction), wanted, strict=True):
        torch.testing.assert_close(gradient, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("kind", EXTRAS)
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_documents_do_not_see_each_other(window, kind, kv_heads):
    expect_reference("varlen", kind, kv_heads, window)


@pytest.mark.parametrize("path", ["by document", "flex-attention"])
def test_layers_in_chunks_see_their_chunk(path, flex_on_cpu):
    flex_on_cpu(path)
    expect_reference("varlen", "plain", 2, None, chunk=3)


LONG = (0, 130, 131, 131, 300, 427)
"""Documents over several blocks, on and off their edges; one is empty."""


@pytest.mark.parametrize(
    ("kind", "window"), [("soft-capped", None), ("sinks", 40), ("alibi", None), ("values", 200), ("plain", None)]
)
def test_flex_attention_is_the_same(kind, window, flex_on_cpu):
    flex_on_cpu()
    expect_reference("varlen", kind, 2, window, bounds=LONG)


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (1, None), (100, None), (129, None), (None, 50)])
@pytest.mark.parametrize("lengths", [(700,), (1,) * 300, (128, 256, 128), (5, 390, 1, 0, 127, 129, 0)])
def test_tables_of_blocks_are_those_of_the_mask(lengths, window, chunk):
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    tokens = int(bounds[-1])
    tables = flex.tables_of(bounds, bounds, tokens, tokens, window, chunk)
    place = torch.arange(tokens)
    mask = (place[None] >= tables.first[:, None]) & (place[None] <= tables.last[:, None])
    blocks = -(-tokens // flex.BLOCK)
    padded = torch.zeros(blocks * flex.BLOCK, blocks * flex.BLOCK, dtype=torch.bool)
    padded[:tokens, :tokens] = mask
    rows = torch.arange(padded.shape[0]) >= tokens
    tiles = padded.view(blocks, flex.BLOCK, blocks, flex.BLOCK)
    some = tiles.any(3).any(1)
    full = (padded | rows[:, None]).view(tiles.shape).all(3).all(1)
    for (count, numbers), wanted in zip(
        (tables.part_k, tables.full_k, tables.part_q, tables.full_q),
        (some & ~full, full, (some & ~full).t(), full.t()),
        strict=True,
    ):
        found = [sorted(row[:length].tolist()) for row, length in zip(numbers, count, strict=True)]
        # A block that no query sees may be looked at; one that is seen, or seen in full, may not be left out.
        for row, want in zip(found, wanted, strict=True):
            assert set(want.nonzero().flatten().tolist()) <= set(row)
    for part, whole in ((tables.part_k, tables.full_k), (tables.part_q, tables.full_q)):
        for row in range(blocks):
            taken = [*part[1][row][: part[0][row]].tolist(), *whole[1][row][: whole[0][row]].tolist()]
            assert len(taken) == len(set(taken))
    wholly = [set(row[:length].tolist()) for row, length in zip(tables.full_k[1], tables.full_k[0], strict=True)]
    assert all(full[row, one] for row, ones in enumerate(wholly) for one in ones)


@pytest.mark.parametrize(
    ("softcap", "path", "graphs"), [(None, "by document", 2), (4.0, "by document", 2), (4.0, "flex-attention", 1)]
)
def test_other_lengths_do_not_compile_a_layer_again(softcap, path, graphs, flex_on_cpu):
    if path == "flex-attention":
        flex_on_cpu()

    def layer(x, bounds):
        rows = (one[None] for one in (x * 2, x + 1, x - 1))
        options = {"cu_seq_lens_q": bounds, "max_length_q": 14, "softcap": softcap}
        return packed_attention(torch.nn.Module(), *rows, None, **options)[0].cos()

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(layer, backend=counter, fullgraph=graphs == 1)
    x = torch.randn(4, 14, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    frames = []
    for lengths in ((14,), (5, 1, 8), (7, 7), (1,) * 14, (13, 1), (14, 0)):
        bounds = torch.tensor([0, *lengths]).cumsum(0).int()
        torch._dynamo.maybe_mark_dynamic(bounds, 0)
        found, wanted = fast(x, bounds), layer(x, bounds)
        torch.testing.assert_close(found, wanted)
        for mine, plain in zip(*(torch.autograd.grad(one.sum(), x) for one in (found, wanted)), strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-5)
        frames.append(counter.frame_count)
    assert frames == [graphs] * 6  # before attention and after it, or all in one


def test_without_boundaries_it_refuses():
    tensor = torch.zeros(1, 1, 2, 8)
    with pytest.raises(NotPackable):
        packed_attention(torch.nn.Module(), tensor, tensor, tensor, None)


def test_the_kernel_that_the_plan_names_is_taken_and_no_other(monkeypatch):
    from transformers import AttentionInterface

    taken = []
    monkeypatch.setattr(
        attention, "_path", lambda kernel, capability, is_cuda, sizes: path_of(kernel, (9, 0), Heads(16, 16))
    )
    monkeypatch.setattr(attention.flash4, "is_available", lambda: True)
    monkeypatch.setattr(attention.flash4, "flash4", lambda q, *_: taken.append("flash-attn-4") or q)
    monkeypatch.setattr(attention, "_variable_length", lambda q, *_: taken.append("varlen") or q)
    monkeypatch.setattr(attention.flex, "flex", lambda q, *_, **__: taken.append("flex-attention") or q)
    monkeypatch.setattr(attention.efficient, "efficient", lambda q, *_: taken.append("sdpa") or q)
    q, k, v = (torch.randn(1, 2, 6, 16) for _ in range(3))
    boundaries = {"cu_seq_lens_q": torch.tensor([0, 6], dtype=torch.int32), "max_length_q": 6}
    kernels = ("flash-attn-4", "varlen", "flex-attention", "sdpa", None)
    try:
        for kernel in kernels:
            name = attention.register(kernel)
            AttentionInterface()[name](torch.nn.Module(), q, k, v, None, **boundaries)
    finally:
        attention.register()
    assert taken == ["flash-attn-4", "varlen", "flex-attention", "sdpa", "flash-attn-4"]


def test_a_plan_with_a_kernel_that_is_not_here_is_refused():
    with pytest.raises(UserError, match="attention is flash-attn-4, which is not installed here"):
        attention.register("flash-attn-4")


def test_a_kernel_that_is_wrong_or_fails_is_found_out(flex_on_cpu, monkeypatch):
    flex_on_cpu()
    asked = attention.AttentionCall("flex-attention", torch.float32, (4, 2, 16, 24), 40, 5.0, True, False)
    assert attention.fault_of(asked, torch.device("cpu")) is None
    right = attention.flex.flex
    monkeypatch.setattr(attention.flex, "flex", lambda *given, **named: right(*given, **named | {"softcap": 2.0}))
    assert "off by" in attention.fault_of(asked, torch.device("cpu"))

    def fails(*_, **__):
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(attention.flex, "flex", fails)
    assert attention.fault_of(asked, torch.device("cpu")) == "out of shared memory"


ONCE = {"beginning": 12, "own": (5, 3, 20)}
"""Tokens that three documents begin with and that stand in the first alone, and how they go on."""


def shared_beginnings(kernel, window, *, device="cpu", dtype=torch.float32, size=16, **extras):
    """Output and gradients of documents that share a beginning, each with it and with it once."""
    begin, own = ONCE["beginning"], ONCE["own"]
    generator = torch.Generator(device).manual_seed(0)
    ends = [begin + own[0], *(begin + own[0] + sum(own[1 : 1 + n]) for n in range(1, len(own)))]
    starts = [0, *ends[:-1]]
    places = [torch.arange(ends[0])]
    places += [torch.cat([torch.arange(begin), torch.arange(a, b)]) for a, b in zip(starts[1:], ends[1:], strict=True)]
    sizes = [len(one) for one in places]
    places = torch.cat(places).to(device)
    tensors = [
        torch.randn(1, heads, ends[-1], size, generator=generator, device=device).to(dtype).requires_grad_()
        for heads in (4, 2, 2)
    ]
    bounds, keys = (
        torch.tensor(one, device=device).int() for one in ([0, *ends], [0, *torch.tensor(sizes).cumsum(0).tolist()])
    )
    options = {"scaling": 0.3, "sliding_window": window, "kernel": kernel, "max_length_q": max(sizes), **extras}
    options["max_length_k"] = options["max_length_q"]
    if device == "cuda":
        options["capability"] = torch.cuda.get_device_capability()
    plain = torch.nn.Module()
    once, _ = packed_attention(
        plain, *tensors, None, cu_seq_lens_q=bounds, cu_seq_lens_k=keys, key_places=places, **options
    )
    repeated = [tensor.index_select(2, places) for tensor in tensors]
    each, _ = packed_attention(plain, *repeated, None, cu_seq_lens_q=keys, cu_seq_lens_k=keys, **options)
    is_own = torch.ones(sum(sizes), dtype=torch.bool, device=device)
    for start in keys[1:-1].tolist():
        is_own[start : start + begin] = False
    direction = torch.randn(once.shape, generator=generator, device=device).to(dtype)
    for out in (once, each[:, is_own]):
        yield [out, *torch.autograd.grad(out, tensors, direction)]


@pytest.mark.parametrize("window", [None, 9, 30])
@pytest.mark.parametrize("extras", [{}, {"softcap": 4.0}], ids=["plain", "soft-capped"])
def test_documents_see_the_beginning_that_they_share(window, extras):
    for once, each in zip(*shared_beginnings("varlen", window, **extras), strict=True):
        torch.testing.assert_close(once, each, rtol=1e-5, atol=1e-5)


def test_rows_of_any_length_are_one_graph(monkeypatch):
    """What chooses the path is known to the compiler where it knows no lengths."""
    monkeypatch.setattr(attention, "_by_document", lambda query, *_, **__: query.transpose(1, 2))

    @torch.compile(backend="eager", fullgraph=True)
    def attend(x, bounds, longest):
        x = x.view(1, -1, 2, 8).transpose(1, 2)
        bounds = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
        return packed_attention(torch.nn.Module(), x, x, x, None, sliding_window=3, **bounds)[0]

    for tokens in (24, 30, 17):
        x = torch.randn(tokens, 16)
        out = attend(x, torch.tensor([0, 5, tokens]).int(), tokens - 5)
        assert torch.equal(out, x.view(1, tokens, 2, 8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kernel", ["flash-attn-4", "varlen", "flex-attention", "sdpa"])
@pytest.mark.parametrize("window", [None, 9])
def test_kernels_let_documents_see_the_beginning_that_they_share(kernel, window):
    if kernel == "flash-attn-4":
        from tunesmith.kernels import flash4

        if not flash4.is_available():
            pytest.skip("needs flash-attn-4")
    both = shared_beginnings(kernel, window, device="cuda", dtype=torch.bfloat16, size=64)
    for once, each in zip(*both, strict=True):
        torch.testing.assert_close(once, each, rtol=0.02, atol=0.02 * each.abs().max().item())
