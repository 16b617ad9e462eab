"""The chunked loss equals cross-entropy of the full logits, gradients included."""

from __future__ import annotations

import pytest
import torch

from tunesmith.kernels import reference
from tunesmith.kernels.linear_cross_entropy import linear_cross_entropy


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
