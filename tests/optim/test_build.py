from __future__ import annotations

import pytest
import torch
from torch import nn

from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.optim.build import Optimizer


def make(kind: str, *, dtype=torch.float32, seed: int = 0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).to(dtype)
    run = Run(model="x", data="x", optimizer=kind, weight_decay=0.1)
    return model, Optimizer(model.named_parameters(), run, master_weights=dtype != torch.float32)


def advance(model, optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(5, 4, generator=generator).to(next(model.parameters()).dtype)
        for part in x.split(2):
            model(part).float().square().mean().backward()
        optimizer.step(1e-2)
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adamw", "adafactor", "sgd"])
def test_saved_and_restored_it_goes_on_bit_for_bit(kind, dtype):
    model, optimizer = make(kind, dtype=dtype)
    advance(model, optimizer, range(3))
    saved = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    advance(model, optimizer, range(3, 6))
    other, restored = make(kind, dtype=dtype, seed=1)
    restored.restore(saved)
    advance(other, restored, range(3, 6))
    assert optimizer.tensors().keys() == restored.tensors().keys()
    for name, tensor in optimizer.tensors().items():
        assert torch.equal(tensor, restored.tensors()[name]), name
    for name, weight in model.named_parameters():
        assert torch.equal(weight, dict(other.named_parameters())[name])


def test_masters_keep_updates_that_bf16_would_lose():
    model, optimizer = make("sgd", dtype=torch.bfloat16)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for _ in range(200):
        for weight in optimizer.masters.values():
            weight.grad = torch.full_like(weight, 1e-2)
        optimizer.step(1e-3)
        optimizer.zero_grad()
    assert all((weight != before[name]).all() for name, weight in model.named_parameters())


def test_accumulated_half_precision_gradients_are_summed_in_fp32():
    model, optimizer = make("sgd", dtype=torch.bfloat16)
    for _ in range(300):
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    bias = optimizer.masters["1.bias"]
    assert bias.grad is not None
    assert bias.grad.dtype == torch.float32
    torch.testing.assert_close(bias.grad, torch.full((2,), 300.0))


def test_vectors_are_not_decayed():
    model, optimizer = make("adamw")
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(1.0)
    for weight in optimizer.parameters:
        weight.grad = torch.zeros_like(weight)
    optimizer.step(0.5)
    assert model[0].bias.min() == 1.0
    assert model[0].weight.max() < 1.0


def test_a_checkpoint_for_other_weights_is_refused():
    _, optimizer = make("adamw")
    tensors = dict(optimizer.tensors())
    tensors["weights/other"] = tensors.pop("weights/0.bias")
    with pytest.raises(UserError, match="other trained weights"):
        optimizer.restore(tensors)
