"""Muon for many matrices at a time takes torch's own steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tunesmith.optim import muon
from tunesmith.optim.muon import GroupedMuon

SHAPES = [(8, 24), (24, 8), (8, 24), (16, 16), (24, 8), (8, 24)]


def trained(kind, adjust, *, steps: int = 4, **options) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = kind(weights, lr=0.05, adjust_lr_fn=adjust, **options)
    for step in range(steps):
        for index, weight in enumerate(weights):
            weight.grad = None if index == 3 and step == 1 else torch.randn(weight.shape, generator=generator)
        optimizer.step()
    return weights, optimizer


@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
@pytest.mark.parametrize("together", [1, 400, 1 << 24])
def test_steps_are_those_of_torch(monkeypatch, adjust, together):
    monkeypatch.setattr(muon, "TOGETHER", together)
    for options in ({}, {"nesterov": False, "weight_decay": 0.0}):
        expected, plain = trained(torch.optim.Muon, adjust, **options)
        found, grouped = trained(GroupedMuon, adjust, **options)
        for weight, other in zip(found, expected, strict=True):
            torch.testing.assert_close(weight, other, rtol=0, atol=0.01 * 0.05 * 24**0.5)
            torch.testing.assert_close(grouped.state[weight]["momentum_buffer"], plain.state[other]["momentum_buffer"])


def test_matrices_of_a_shape_are_computed_together(monkeypatch):
    sizes = []
    plain = muon._orthogonal
    monkeypatch.setattr(
        muon, "_orthogonal", lambda matrices, *given: sizes.append(len(matrices)) or plain(matrices, *given)
    )
    trained(GroupedMuon, None, steps=1)
    assert sorted(sizes) == [1, 2, 3]
    sizes.clear()
    monkeypatch.setattr(muon, "TOGETHER", 2 * 8 * 24)
    trained(GroupedMuon, None, steps=1)
    assert sorted(sizes) == [1, 1, 2, 2]
