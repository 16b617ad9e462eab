"""The chunked scan of Mamba-2 gives what its recurrence gives, and no document sees another."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from interpreted import run_interpreted

from tunesmith.kernels import reference
from tunesmith.kernels.scan import chunked_scan

SHAPES = [
    (37, 4, 3, 2, 5, 16),
    (64, 4, 8, 1, 8, 16),
    (5, 2, 4, 2, 3, None),
    (1, 2, 4, 1, 3, None),
    (300, 6, 4, 3, 8, None),
]
"""Tokens, heads, head dim, groups, state size, chunk."""


def drawn(tokens: int, heads: int, size: int, groups: int, state: int, documents: int = 9):
    """What a scan is given (with a bias that is not there where there are odd groups), and a gradient of its output."""
    generator = torch.Generator().manual_seed(tokens)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    channels = heads * size + 2 * groups * state
    given = [draw(tokens, channels), draw(channels, 4), None if groups == 3 else draw(channels)]
    given += [F.softplus(draw(tokens, heads)), -draw(heads).exp(), draw(heads)]
    ends = torch.randint(max(1, tokens // documents), (tokens,), generator=generator)
    return (
        [one if one is None else one.requires_grad_() for one in given],
        ends.sort().values.int(),
        draw(tokens, heads * size),
    )


def there(given: list) -> list[torch.Tensor]:
    return [one for one in given if one is not None]


def as_exact(given: list) -> list:
    return [one if one is None else one.detach().double().requires_grad_() for one in given]


@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_gradients_are_those_of_the_recurrence(shape):
    *sizes, groups, state, chunk = shape
    given, document, dy = drawn(*sizes, groups, state)
    exact = as_exact(given)
    expected = reference.state_space(*exact, document, groups, state)
    found = chunked_scan(*given, document, groups=groups, state=state, chunk=chunk)
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)
    wanted = torch.autograd.grad(expected, there(exact), dy.double())
    for one, other in zip(torch.autograd.grad(found, there(given), dy), wanted, strict=True):
        assert (one - other).abs().max() <= 5e-6 * other.abs().max()


def test_what_decays_at_once_has_exact_gradients():
    """Rows and columns of what crosses a token cancel all but for a little."""
    given, document, dy = drawn(200, 2, 4, 1, 8)
    given[4] = (30 * given[4]).detach().requires_grad_()
    exact = as_exact(given)
    expected = torch.autograd.grad(reference.state_space(*exact, document, 1, 8), exact, dy.double())
    found = torch.autograd.grad(chunked_scan(*given, document, groups=1, state=8), given, dy)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


@pytest.mark.parametrize("border", [1, 15, 16, 17, 32, 47])
def test_no_document_reaches_another(border):
    """Not by a bit, wherever the border lies: within a chunk, at its edge, or chunks apart."""
    (x_bc, *rest), _, dy = drawn(48, 4, 3, 2, 5)
    document = (torch.arange(48) >= border).int()
    other = x_bc.detach().clone()
    other[:border] += 100.0
    outs = [chunked_scan(one, *rest, document, groups=2, state=5, chunk=16) for one in (x_bc, other)]
    assert torch.equal(outs[0][border:], outs[1][border:])
    assert not torch.equal(outs[0][:border], outs[1][:border])
    (gradient,) = torch.autograd.grad(outs[0][border:].mul(dy[border:]).sum(), x_bc)
    assert not gradient[:border].any()
    assert gradient[border:].any()


def test_a_document_is_what_it_is_alone():
    given, document, _ = drawn(90, 4, 3, 2, 5)
    document = (torch.arange(90) // 30).int()
    packed = chunked_scan(*given, document, groups=2, state=5, chunk=16)
    x_bc, weight, bias, dt, *rest = given
    alone = chunked_scan(x_bc[30:60], weight, bias, dt[30:60], *rest, document[:30], groups=2, state=5, chunk=16)
    torch.testing.assert_close(packed[30:60], alone, rtol=1e-5, atol=1e-5)


def test_nothing_is_kept_for_backward_but_what_was_given():
    given, document, _ = drawn(300, 4, 8, 1, 8)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        chunked_scan(*given, document, groups=1, state=8)
    assert {one.data_ptr() for one in kept} == {one.data_ptr() for one in (*given, document)}


def test_scan_as_compiled_layers_call_it():
    given, document, dy = drawn(40, 4, 3, 2, 5)
    plain = lambda *given: chunked_scan(*given, document, groups=2, state=5).square()  # noqa: E731
    made = torch.compile(plain, backend="aot_eager", fullgraph=True)
    expected, found = (torch.autograd.grad(one(*given), given, dy) for one in (plain, made))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_states_are_handed_on_by_the_kernel():
    assert "hand_on" in run_interpreted("check_hand_on")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scan_on_a_gpu(dtype):
    given, document, dy = drawn(1100, 8, 64, 2, 64, documents=100)
    exact = as_exact(given)
    expected = reference.state_space(*exact, document, 2, 64)
    wanted = torch.autograd.grad(expected, there(exact), dy.double())
    place = lambda at, one: one.detach().to("cuda", dtype if at == 0 else torch.float32).requires_grad_()  # noqa: E731
    placed = [place(at, one) for at, one in enumerate(given)]
    found = chunked_scan(*placed, document.cuda(), groups=2, state=64)
    close = 1e-4 if dtype == torch.float32 else 0.02
    assert (found.cpu() - expected).norm() <= close * expected.norm()
    for one, other in zip(torch.autograd.grad(found, placed, dy.cuda().to(dtype)), wanted, strict=True):
        assert (one.cpu() - other).norm() <= close * other.norm()
