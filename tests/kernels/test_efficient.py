from __future__ import annotations

import itertools

import plain_efficient
import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from tunesmith.kernels import efficient
from tunesmith.model.attention import _by_document, packed_attention

SCALE = 0.3
LENGTHS = [(17,), (1, 1, 1), (5, 1, 33, 8), (64, 130, 3), (300, 1, 97, 0)]
PIECES = [((0, 6, 9, 0), (4, 20, 9, 50)), ((40, 0), (200, 7)), ((1, 65), (70, 65))]
"""Documents of which only the last queries are here, and keys of documents without any."""
CASES = [
    *itertools.product([(lengths, lengths) for lengths in LENGTHS], [4, 2, 1], [None, 3, 70]),
    *itertools.product(PIECES, [4, 2], [None]),
]


def bounds_of(lengths, device="cpu") -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def draw(lengths, kv_heads: int, dtype=torch.float32, device="cpu", size: int = 16) -> list[torch.Tensor]:
    """Queries, keys, values and a gradient of what comes out, [tokens, heads, size]."""
    generator = torch.Generator().manual_seed(0)
    queries, keys = (sum(one) for one in lengths)
    shapes = (queries, 4, size), (keys, kv_heads, size), (keys, kv_heads, size), (queries, 4, size)
    made = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    return [*(one.requires_grad_() for one in made[:3]), made[3]]


def attend(lengths, q, k, v, window):
    queries = bounds_of(lengths[0], q.device)
    keys = queries if lengths[0] == lengths[1] else bounds_of(lengths[1], q.device)
    return efficient.efficient(q, k, v, queries, keys, max(lengths[0]), SCALE, window)


def expected(lengths, q, k, v, window):
    """Document by document, in float64."""
    rows = (one.transpose(0, 1)[None] for one in (q, k, v))
    return _by_document(*rows, [bounds_of(one) for one in lengths], SCALE, window, 0.0)[0]


def compare(lengths, inputs, window, tolerance: float) -> None:
    *leaves, direction = inputs
    found = attend(lengths, *leaves, window)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wanted = expected(lengths, *exact, window)
    pairs = [("out", found, wanted)]
    gradients = zip(
        torch.autograd.grad(found, leaves, direction),
        torch.autograd.grad(wanted, exact, direction.double()),
        strict=True,
    )
    pairs += [(f"gradient of {name}", *both) for name, both in zip("qkv", gradients, strict=True)]
    for name, mine, plain in pairs:
        torch.testing.assert_close(
            mine.double(),
            plain,
            rtol=tolerance,
            atol=tolerance * max(1.0, float(plain.detach().abs().max())),
            msg=lambda text, name=name: f"{name}, documents {lengths}, window {window}: {text}",
        )


@pytest.mark.parametrize(("lengths", "kv_heads", "window"), CASES, ids=str)
def test_it_is_attention_inside_documents(monkeypatch, lengths, kv_heads, window):
    plain_efficient.install(monkeypatch)
    compare(lengths, draw(lengths, kv_heads), window, 1e-4)


def test_the_compiler_is_told_what_the_operators_do(monkeypatch):
    plain_efficient.install(monkeypatch)
    lengths = ((0, 6, 9), (4, 20, 9))
    *leaves, direction = draw(lengths, 2)
    bounds = [bounds_of(one) for one in lengths]
    torch.library.opcheck(efficient._forward, (*leaves, *bounds, 9, SCALE, 3))
    plain = [leaf.detach() for leaf in leaves]
    out, lse = efficient._forward(*plain, *bounds, 9, SCALE, 3)
    torch.library.opcheck(
        efficient._backward,
        (direction, *plain, out, lse, *bounds, 9, SCALE, 3),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_what_is_kept_does_not_grow_with_the_longest_document(monkeypatch):
    plain_efficient.install(monkeypatch)
    lengths = ((1,) * 20 + (40,),) * 2
    q, k, v, _ = draw(lengths, 2)
    out = attend(lengths, q, k, v, None)
    assert max(one.numel() for one in out.grad_fn.saved_tensors if one is not None) == q.numel()


def boundaries(queries: torch.Tensor) -> dict:
    return {"cu_seq_lens_q": queries, "max_length_q": 64}


def on_a_gpu(dtype=torch.float32, size: int = 16, keys: int = 64, **options) -> torch.Tensor:
    """What packed attention gives, where only shapes are known and any question for a value is an error."""
    with FakeTensorMode():
        shapes = (4, 64), (2, keys), (2, keys)
        q, k, v = (torch.empty(1, *shape, size, dtype=dtype, device="cuda") for shape in shapes)
        queries = torch.empty(5, dtype=torch.int32, device="cuda")
        bounds = boundaries(queries) | {"cu_seq_lens_k": torch.empty_like(queries), "max_length_k": keys}
        return packed_attention(torch.nn.Module(), q, k, v, None, **bounds, kernel="sdpa", **options)[0]


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 20), (torch.float16, 24), (torch.bfloat16, 64)], ids=str)
def test_on_a_gpu_it_is_what_a_plan_calls_sdpa(dtype, size):
    out = on_a_gpu(dtype, size, sliding_window=8)
    assert (out.shape, out.dtype) == ((1, 64, 4, size), dtype)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 4.0},
        {"dropout": 0.1},
        {"size": 18},
        {"size": 20, "dtype": torch.float16},
        {"keys": 100, "sliding_window": 8},
    ],
    ids=str,
)
def test_what_it_does_not_have_is_done_by_document(options):
    with pytest.raises(DataDependentOutputException):
        on_a_gpu(**options)


def check_one_graph(device: str, backend: str) -> None:
    """A compiled function over it neither breaks nor is compiled again when lengths change."""

    def layer(q, k, v, queries):
        rows = (2 * one.transpose(0, 1)[None] for one in (q, k, v))
        return packed_attention(torch.nn.Module(), *rows, None, **boundaries(queries), scaling=SCALE, kernel="sdpa")[0]

    torch._dynamo.reset()
    counters.clear()
    fast = torch.compile(layer, backend=backend, fullgraph=True)
    graphs = []
    for lengths in ((64,), (30, 34), (1,) * 64, (5, 40, 19), (64, 0)):
        *leaves, direction = draw((lengths, lengths), 2, device=device)
        queries = bounds_of(lengths, device)
        torch._dynamo.maybe_mark_dynamic(queries, 0)
        found = fast(*leaves, queries)
        wanted = expected((lengths, lengths), *(2 * leaf.double() for leaf in leaves), None)[None]
        gradients = [torch.autograd.grad(one, leaves, direction[None].to(one.dtype)) for one in (found, wanted)]
        for name, mine, plain in zip(("out", *"qkv"), (found, *gradients[0]), (wanted, *gradients[1]), strict=True):
            torch.testing.assert_close(
                mine.double(), plain.double(), rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
            )
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1] * 5, f"compiled so often after each set of lengths: {graphs}"
    assert not counters["graph_break"], dict(counters["graph_break"])


def test_lengths_do_not_compile_anything_again(monkeypatch):
    plain_efficient.install(monkeypatch)
    check_one_graph("cpu", "aot_eager_decomp_partition")


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 1e-2)], ids=str)
@pytest.mark.parametrize(("lengths", "kv_heads", "window"), CASES[::4], ids=str)
@pytest.mark.parametrize("size", [16, 64, 136])
def test_the_kernel_is_attention_inside_documents(dtype, tolerance, lengths, kv_heads, window, size):
    compare(lengths, draw(lengths, kv_heads, dtype, "cuda", size), window, tolerance)


@pytest.mark.gpu
@gpu
def test_an_upper_bound_will_do_for_the_longest():
    lengths = (5, 1, 33, 8, 200)
    q, k, v, direction = draw((lengths, lengths), 2, device="cuda", size=64)
    queries = bounds_of(lengths, "cuda")
    results = []
    for longest in (200, 247):
        out = efficient.efficient(q, k, v, queries, queries, longest, SCALE, None)
        results.append((out, *torch.autograd.grad(out, (q, k, v), direction)))
    for name, tight, loose in zip(("out", *"qkv"), *results, strict=True):
        torch.testing.assert_close(tight, loose, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.gpu
@gpu
def test_lengths_do_not_compile_anything_again_on_a_gpu():
    check_one_graph("cuda", "inductor")


@pytest.mark.gpu
@gpu
def test_the_host_does_not_wait():
    lengths = ((300, 1, 97),) * 2
    *leaves, direction = draw(lengths, 2, device="cuda")
    queries = bounds_of(lengths[0], "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = efficient.efficient(*leaves, queries, queries, 300, SCALE, 70)
        torch.autograd.grad(out, leaves, direction)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@gpu
def test_gradients_are_the_same_bits_where_that_is_asked():
    lengths = ((700, 1, 323),) * 2
    *leaves, direction = draw(lengths, 2, device="cuda", size=64)
    torch.use_deterministic_algorithms(True)
    try:
        results = [torch.autograd.grad(attend(lengths, *leaves, None), leaves, direction) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    for name, *same in zip("qkv", *results, strict=True):
        off = max(float((one - same[0]).abs().max()) for one in same)
        assert off == 0.0, f"the gradient of {name} differs by {off}"
