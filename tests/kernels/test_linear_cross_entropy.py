"""The chunked loss equals cross-entropy of the full logits, gradients included."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tunesmith.kernels import reference
from tunesmith.kernels.fp8 import quantize_transposed
from tunesmith.kernels.linear_cross_entropy import CHUNK_ELEMENTS, Transposed, chunk_bytes, linear_cross_entropy


def make(tokens: int, hidden: int, vocabulary: int, targets: int, dtype=torch.float64, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()

    rows = torch.randperm(tokens, generator=generator)[:targets].sort().values
    labels = torch.randint(vocabulary, (targets,), generator=generator)
    weights = torch.rand(targets, generator=generator)
    return draw(tokens, hidden), draw(vocabulary, hidden), draw(vocabulary), labels, weights, rows


@pytest.mark.parametrize("chunk", [1, 3, 7, 1000])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.25, None), (1.0, 5.0), (2.0, 30.0)])
@pytest.mark.parametrize(("has_bias", "z_loss"), [(False, 0.0), (True, 0.0), (True, 0.3)])
def test_it_equals_the_full_logits_with_gradients(chunk, scale, softcap, has_bias, z_loss):
    hidden, weight, bias, labels, weights, rows = make(17, 5, 23, 11, torch.float32)
    leaves = [hidden, weight] + ([bias] if has_bias else [])
    options = {"bias_v": bias if has_bias else None, "scale": scale, "softcap": softcap, "z_loss": z_loss}
    expected, expected_losses = reference.linear_cross_entropy(hidden, weight, labels, weights, rows, **options)
    found, losses = linear_cross_entropy(hidden, weight, labels, weights, rows, **options, chunk=chunk)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-6)
    wanted = torch.autograd.grad(expected * 0.7, leaves)
    for gradient, want in zip(torch.autograd.grad(found * 0.7, leaves), wanted, strict=True):
        torch.testing.assert_close(gradient, want, rtol=1e-5, atol=1e-6)


def test_bf16_stays_within_what_bf16_rounds():
    hidden, weight, _, labels, weights, rows = make(40, 16, 300, 30)
    low = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, weight)]
    found, _ = linear_cross_entropy(*low, labels, weights, rows, chunk=8)
    exact, _ = reference.linear_cross_entropy(
        low[0].detach().double().requires_grad_(), low[1].detach().double(), labels, weights, rows
    )
    assert abs(found.item() - exact.item()) / abs(exact.item()) < 2**-8
    gradient = torch.autograd.grad(found, low[0])[0].double()
    again = low[0].detach().double().requires_grad_()
    total, _ = reference.linear_cross_entropy(again, low[1].detach().double(), labels, weights, rows)
    want = torch.autograd.grad(total, again)[0]
    assert ((gradient - want).norm() / want.norm()).item() < 2**-6


@pytest.mark.parametrize("in_fp8", [False, True])
def test_logits_may_be_put_where_there_is_room(in_fp8, monkeypatch):
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 128 * 301)
    hidden, weight, _, labels, weights, rows = make(300, 16, 301, 200, torch.float32)
    transposed = Transposed(*quantize_transposed(weight.detach(), None)) if in_fp8 else None
    head = weight.detach() if in_fp8 else weight
    leaves = [hidden] if in_fp8 else [hidden, weight]
    given = (hidden, head, labels, weights, rows)
    expected, _ = linear_cross_entropy(*given, transposed=transposed)
    wanted = torch.autograd.grad(expected, leaves)
    size = chunk_bytes(300, head, transposed)
    assert size == 128 * 301 * 4 + (128 * transposed.values8_hw.shape[1] if in_fp8 else 0)
    room = torch.full((size + 8,), 7, dtype=torch.uint8)
    found, _ = linear_cross_entropy(*given, transposed=transposed, room=room)
    assert found == expected
    for gradient, want in zip(torch.autograd.grad(found, leaves), wanted, strict=True):
        assert torch.equal(gradient, want)
    assert (room[:4096] != 7).any()
    assert (room[-8:] == 7).all()
    assert chunk_bytes(20, head) == -(-20 * 301 * 4 // 256) * 256


def test_tokens_that_are_no_targets_get_no_gradient():
    hidden, weight, _, labels, weights, rows = make(9, 4, 11, 4)
    total, _ = linear_cross_entropy(hidden, weight, labels, weights, rows)
    total.backward()
    others = sorted(set(range(9)) - set(rows.tolist()))
    assert hidden.grad is not None
    assert hidden.grad[others].abs().max() == 0
    assert hidden.grad[rows].abs().min() > 0


def test_no_targets_at_all_is_a_loss_of_zero():
    hidden, weight, _, labels, weights, rows = make(5, 4, 11, 0)
    total, losses = linear_cross_entropy(hidden, weight, labels, weights, rows)
    total.backward()
    assert total.item() == 0
    assert losses.numel() == 0
    assert hidden.grad is not None
    assert hidden.grad.abs().max() == 0


def test_a_label_of_vanishing_probability_has_a_finite_loss():
    hidden = torch.tensor([[200.0]])
    weight = torch.tensor([[1.0], [-1.0]])
    total, _ = linear_cross_entropy(hidden, weight, torch.tensor([1]), torch.ones(1), torch.tensor([0]))
    assert total.item() == pytest.approx(400.0)


def test_the_gradient_with_z_loss_is_that_of_double_precision_and_rows_keep_their_own_losses():
    hidden, weight, bias, labels, weights, rows = make(17, 5, 23, 11)
    leaves = [hidden, weight, bias]
    exact, _ = reference.linear_cross_entropy(hidden, weight, labels, weights.double(), rows, bias_v=bias, z_loss=0.2)
    single = [leaf.detach().float().requires_grad_() for leaf in leaves]
    given = (labels, weights, rows)
    found, losses = linear_cross_entropy(single[0], single[1], *given, bias_v=single[2], z_loss=0.2, chunk=4)
    _, without = linear_cross_entropy(single[0], single[1], *given, bias_v=single[2], chunk=4)
    assert torch.equal(losses, without)
    assert found.item() == pytest.approx(exact.item(), rel=1e-6)
    wanted = torch.autograd.grad(exact, leaves)
    for gradient, want in zip(torch.autograd.grad(found, single), wanted, strict=True):
        torch.testing.assert_close(gradient.double(), want, rtol=1e-5, atol=1e-6)


def frozen(hidden: int, vocabulary: int, *, tokens: int = 40, targets: int = 30, dtype=torch.float32, device="cpu"):
    """Hidden states to be given a gradient, and what else the loss of a frozen head takes."""
    states, weight, bias, *rest = make(tokens, hidden, vocabulary, targets)
    states = states.detach().to(device, dtype).requires_grad_()
    weight = (weight.detach() / hidden**0.5).to(device, dtype)
    return states, weight, bias.detach().to(device, dtype), [one.to(device) for one in rest]


def gradients(states, weight, given, **options):
    """Of the hidden states: exact, and with the head in fp8; the losses of both."""
    doubled = {name: value.double() if name == "bias_v" else value for name, value in options.items()}
    exact = states.detach().double().requires_grad_()
    want, _ = reference.linear_cross_entropy(exact, weight.double(), *given, **doubled)
    plain, plain_losses = linear_cross_entropy(states, weight, *given, **options, chunk=8)
    transposed = Transposed(*quantize_transposed(weight, None))
    found, losses = linear_cross_entropy(states, weight, *given, **options, chunk=8, transposed=transposed)
    torch.testing.assert_close(found, plain, rtol=1e-6, atol=0)
    torch.testing.assert_close(losses, plain_losses, rtol=1e-6, atol=1e-6)
    (wanted,), (gradient,) = torch.autograd.grad(want * 0.7, exact), torch.autograd.grad(found * 0.7, states)
    assert gradient.dtype == states.dtype
    return gradient.double(), wanted


@pytest.mark.parametrize("vocabulary", [96, 301])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("scale", "softcap", "z_loss"), [(1.0, None, 0.0), (0.25, None, 0.1), (1.0, 5.0, 0.0), (2.0, 30.0, 0.3)]
)
def test_a_frozen_head_in_fp8_changes_no_loss_and_the_gradient_by_a_few_percent(
    vocabulary, dtype, scale, softcap, z_loss
):
    states, weight, bias, given = frozen(32, vocabulary, dtype=dtype)
    options = {"bias_v": bias, "scale": scale, "softcap": softcap, "z_loss": z_loss}
    gradient, wanted = gradients(states, weight, given, **options)
    assert 1e-5 < ((gradient - wanted).norm() / wanted.norm()).item() < 0.04


def test_in_fp8_the_labels_part_is_exact():
    states, weight, _, given = frozen(32, 96)
    labels = given[0]
    others = torch.ones(96, dtype=torch.bool)
    others[labels[0]] = False
    labels.fill_(labels[0])
    weight[others] = 0.0
    gradient, wanted = gradients(states, weight, given)
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-7)


def test_in_fp8_the_small_gradients_of_likely_labels_are_as_good_as_any():
    """They are what a probability near 1 leaves of its label's weights."""
    states, weight, _, given = frozen(32, 96)
    labels, _, rows = given
    with torch.no_grad():
        states[rows] += 12 * torch.nn.functional.normalize(weight[labels])
    gradient, wanted = gradients(states, weight, given)
    assert wanted[rows].norm(dim=1).min() < 1e-3
    assert ((gradient - wanted)[rows].norm(dim=1) < 0.06 * wanted[rows].norm(dim=1)).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("vocabulary", "softcap"), [(32000, None), (128256, None), (50257, 30.0)])
def test_a_frozen_head_in_fp8_is_right_on_the_gpu(vocabulary, softcap):
    """Two rounded factors are off by 3.7% together in the mean square, and bf16 by 0.4%."""
    states, weight, bias, given = frozen(256, vocabulary, tokens=300, targets=200, dtype=torch.bfloat16, device="cuda")
    gradient, wanted = gradients(states, weight, given, bias_v=bias, softcap=softcap)
    assert ((gradient - wanted).norm() / wanted.norm()).item() < 0.04


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("vocabulary", [32000, 50257, 49155])
def test_a_trained_head_of_any_vocabulary_is_right_on_the_gpu(vocabulary):
    states, weight, bias, given = frozen(256, vocabulary, tokens=300, targets=200, dtype=torch.bfloat16, device="cuda")
    leaves = [states, weight.requires_grad_(), bias.requires_grad_()]
    exact = [one.detach().double().requires_grad_() for one in leaves]
    found, _ = linear_cross_entropy(leaves[0], leaves[1], *given, bias_v=leaves[2], chunk=64)
    wanted, _ = reference.linear_cross_entropy(exact[0], exact[1], *given, bias_v=exact[2])
    pairs = zip(
        (found, *torch.autograd.grad(found, leaves)), (wanted, *torch.autograd.grad(wanted, exact)), strict=True
    )
    for one, other in pairs:
        assert ((one.double() - other).norm() / other.norm()).item() < 0.01


@pytest.mark.parametrize("in_fp8", [False, True])
def test_one_chunk_of_logits_exists_at_a_time(in_fp8):
    states, weight, _, given = frozen(32, 96)
    chunk = 8
    alive: list[weakref.ref] = []
    before: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            if function is torch.ops.aten.empty.memory_format and list(arguments[0])[1:] == [96]:  # the next
                before.append(sum(one() is not None for one in alive))
            made = function(*arguments, **(options or {}))
            if isinstance(made, torch.Tensor) and made.shape == (chunk, 96):
                alive.append(weakref.ref(made))
            return made

    transposed = Transposed(*quantize_transposed(weight, None)) if in_fp8 else None
    with Watch():
        linear_cross_entropy(states, weight, *given, chunk=chunk, transposed=transposed)
    assert before == [0, 0, 0, 0]
    assert len(alive) >= 4
