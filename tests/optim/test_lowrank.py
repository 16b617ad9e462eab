"""GaLore and APOLLO against plain versions of their papers, written here."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tunesmith.config.schema import Run
from tunesmith.optim import lowrank
from tunesmith.optim.build import Optimizer
from tunesmith.plan.model_states import projected_rank

RATE, STEPS, EVERY = 1e-2, 5, 3


def gradients(shape: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator) for _ in range(STEPS)]


def adam(
    low: torch.Tensor, m: torch.Tensor, v: torch.Tensor, t: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    m, v = 0.9 * m + 0.1 * low, 0.999 * v + 0.001 * low**2
    return (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8), m, v


def galore(weight: torch.Tensor, given: list[torch.Tensor]) -> torch.Tensor:
    tall = weight.shape[0] > weight.shape[1]
    m = v = torch.zeros(())
    for t, gradient in enumerate(given, 1):
        g = gradient.T if tall else gradient
        if (t - 1) % EVERY == 0:
            p = torch.linalg.svd(g.T)[2][: max(1, g.shape[0] // 4)].T  # of the transposed one: the signs are then ours
        step, m, v = adam(p.T @ g, m, v, t)
        update = 0.25 * p @ step
        weight = weight - RATE * (update.T if tall else update)
    return weight


def apollo(weight: torch.Tensor, given: list[torch.Tensor], seed: int = 0) -> torch.Tensor:
    tall, before = weight.shape[0] > weight.shape[1], None
    m = v = torch.zeros(())
    for t, gradient in enumerate(given, 1):
        g = gradient.T if tall else gradient
        rank = max(1, g.shape[0] // 4)
        drawn = torch.Generator().manual_seed(seed * 1_000_003 + (t - 1) // EVERY)
        low = (torch.randn(rank, g.shape[0], generator=drawn) / math.sqrt(rank)) @ g
        step, m, v = adam(low, m, v, t)
        update = g * (step.norm(dim=0) / low.norm(dim=0))
        if before is not None and update.norm() > 1.01 * before:
            update = update / update.norm() * 1.01 * before
        before = update.norm()
        weight = weight - RATE * (update.T if tall else update)
    return weight


@pytest.mark.parametrize("shape", [(8, 24), (24, 8)])
@pytest.mark.parametrize("plain", [galore, apollo])
def test_its_steps_are_those_of_the_paper(monkeypatch, plain, shape):
    monkeypatch.setattr(lowrank, "EVERY", EVERY)
    weight = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    start = weight.detach().clone()
    vector = nn.Parameter(torch.ones(3))
    run = Run(model="m", data="d", method="full", optimizer=plain.__name__)
    optimizer = Optimizer({"w": weight, "b": vector}.items(), run, master_weights=False)
    for gradient in gradients(shape):
        weight.grad, vector.grad = gradient.clone(), torch.ones(3)
        optimizer.step(RATE)
        optimizer.zero_grad()
    torch.testing.assert_close(weight.detach(), plain(start, gradients(shape)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(vector.detach(), torch.full((3,), 1 - STEPS * RATE), rtol=1e-4, atol=1e-5)  # AdamW's
    held = sum(value.numel() for name, value in optimizer.tensors().items() if name.startswith("optimizer/exp_avg"))
    assert held == 2 * (projected_rank(plain.__name__, 8) * 24 + 3)


@pytest.mark.parametrize("together", [1, 2.5, 100])
@pytest.mark.parametrize("plain", [galore, apollo])
def test_matrices_that_are_updated_together_take_the_steps_of_each_alone(monkeypatch, plain, together):
    monkeypatch.setattr(lowrank, "EVERY", EVERY)
    monkeypatch.setattr(lowrank, "TOGETHER", together)
    shapes = [(8, 24), (24, 8), (16, 16), (8, 24), (4, 40)]
    drawn = torch.Generator().manual_seed(2)
    weights = [nn.Parameter(torch.randn(shape, generator=drawn)) for shape in shapes]
    starts = [weight.detach().clone() for weight in weights]
    run = Run(model="m", data="d", method="full", optimizer=plain.__name__)
    named = {f"w{number}": weight for number, weight in enumerate(weights)}
    optimizer = Optimizer(named.items(), run, master_weights=False)
    skipped = weights[3]  # which has no gradient in the first step, and so is a step behind the others
    for step in range(STEPS):
        for number, weight in enumerate(weights):
            weight.grad = (1 + number) * gradients(weight.shape)[step]
        if step == 0:
            skipped.grad = None
        optimizer.step(RATE)
    for number, (weight, start) in enumerate(zip(weights, starts, strict=True)):
        given = [(1 + number) * gradient for gradient in gradients(weight.shape)][weight is skipped :]
        torch.testing.assert_close(weight.detach(), plain(start, given), rtol=1e-5, atol=1e-6)


def test_apollo_draws_its_projection_once_in_an_interval_for_all_matrices_with_the_same_sides(monkeypatch):
    monkeypatch.setattr(lowrank, "EVERY", EVERY)
    drawn, randn = [], torch.randn
    monkeypatch.setattr(lowrank.torch, "randn", lambda *size, **more: drawn.append(size) or randn(*size, **more))
    weights = {f"w{number}": nn.Parameter(torch.ones(shape)) for number, shape in enumerate([(8, 24), (32, 8), (8, 9)])}
    run = Run(model="m", data="d", method="full", optimizer="apollo")
    optimizer = Optimizer(weights.items(), run, master_weights=False)
    for _ in range(2 * EVERY):
        for weight in weights.values():
            weight.grad = torch.ones_like(weight)
        optimizer.step(RATE)
    assert drawn == [(2, 8), (2, 8)]
