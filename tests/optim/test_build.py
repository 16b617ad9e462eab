from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.optim.build import Optimizer
from tunesmith.optim.fused import Fused
from tunesmith.optim.muon import GroupedMuon
from tunesmith.plan.model_states import STATE_BYTES, STATES


def make(kind: str, *, dtype=torch.float32, seed: int = 0, masters: bool = True, width: int = 8, **more):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2)).to(dtype)
    run = Run(model="x", data="x", optimizer=kind, weight_decay=0.1)
    masters = masters and dtype != torch.float32
    states = more.pop("states", run.optimizer_states or "fp32")
    return model, Optimizer(model.named_parameters(), run, master_weights=masters, states=states, **more)


def advance(model, optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(5, 4, generator=generator).to(next(model.parameters()).dtype)
        for part in x.split(2):
            model(part).float().square().mean().backward()
        optimizer.step(1e-2)
        optimizer.zero_grad()


ALL = ["adamw", "adamw_8bit", "adamw_4bit", "adamw_fp8", "lion", "muon", "adafactor", "sgd", "galore", "apollo"]
HALF = {"dtype": torch.bfloat16}
WITHOUT_MASTERS = {"dtype": torch.bfloat16, "masters": False}


@pytest.mark.parametrize(
    ("kind", "how"),
    [(kind, how) for kind in ALL for how in ({}, HALF)]
    + [(kind, WITHOUT_MASTERS) for kind in (*ALL[:5], "adamw")]
    + [("adamw", {"states": "bf16", **WITHOUT_MASTERS})],
)
def test_saved_and_restored_it_goes_on_bit_for_bit(kind, how, tmp_path):
    model, optimizer = make(kind, width=300, **how)
    advance(model, optimizer, range(3))
    save_file({name: tensor.contiguous() for name, tensor in optimizer.tensors().items()}, tmp_path / "saved")
    advance(model, optimizer, range(3, 6))
    other, restored = make(kind, width=300, seed=1, **how)
    restored.restore(load_file(tmp_path / "saved"))
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


@pytest.mark.parametrize("kind", ["adamw", "adafactor"])
def test_what_masters_learned_is_in_their_copies_from_the_first_step_on(kind):
    model, optimizer = make(kind, dtype=torch.bfloat16, width=5000)
    before = model[0].weight.float()
    for weight in optimizer.parameters:
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    optimizer.step(1e-5)
    moved = optimizer.masters["0.weight"].detach() - before
    kept = ((model[0].weight.float() - before) * moved).sum() / moved.square().sum()
    nearest = (((before + moved).bfloat16().float() - before) * moved).sum() / moved.square().sum()
    assert kept.item() == pytest.approx(1.0, abs=0.15)
    assert nearest < 0.5


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "lion"])
def test_lifted_weights_are_rounded_as_copies_of_masters_are(kind):
    model, masters = make(kind, dtype=torch.bfloat16, width=300)
    shards, prerounded = make(kind, width=300, prerounded=True)
    with torch.no_grad():
        for weight, shard in zip(model.parameters(), shards.parameters(), strict=True):
            shard.copy_(weight)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for weight, shard in zip(model.parameters(), shards.parameters(), strict=True):
            weight.grad = torch.randn(weight.shape, generator=generator).bfloat16()
            shard.grad = weight.grad.float()
        for optimizer in (masters, prerounded):
            optimizer.step(1e-5)
            optimizer.zero_grad()
        for weight, shard in zip(model.parameters(), shards.parameters(), strict=True):
            assert torch.equal(shard.bfloat16(), weight)
    prerounded.decode()
    tensors = {name: tensor.clone() for name, tensor in prerounded.tensors().items()}
    prerounded.encode()
    other, restored = make(kind, dtype=torch.bfloat16, width=300, seed=1)
    restored.restore(tensors)
    for name, master in restored.masters.items():
        assert torch.equal(master, masters.masters[name])
        assert torch.equal(dict(other.named_parameters())[name], dict(model.named_parameters())[name])
    back, again = make(kind, width=300, seed=2, prerounded=True)
    again.restore({name: tensor.clone() for name, tensor in masters.tensors().items()})
    for name, weight in shards.named_parameters():
        assert torch.equal(dict(back.named_parameters())[name], weight)


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


def test_a_checkpoint_of_another_optimizer_gives_the_weights_alone():
    model, optimizer = make("adamw", width=300)
    advance(model, optimizer, range(2))
    for kind in ALL[1:]:
        other, fresh = make(kind, width=300)
        fresh.restore(optimizer.tensors())
        assert torch.equal(other[0].weight, model[0].weight)
        assert not any(name.startswith("optimizer/") for name in fresh.tensors()), kind
        advance(other, fresh, range(1))


def test_states_in_fewer_bits_take_the_bytes_that_the_plan_counts():
    for kind in ("adamw", "adamw_8bit", "adamw_fp8", "adamw_4bit", "lion", "muon"):
        weight = nn.Parameter(torch.randn(64, 1024))
        run = Run(model="x", data="x", optimizer=kind)
        states = run.optimizer_states or "fp32"
        optimizer = Optimizer([("weight", weight)], run, master_weights=False, states=states)
        weight.grad = torch.randn_like(weight)
        optimizer.step(1e-3)
        sizes = [value.nbytes for state in optimizer.states() for value in state.values() if value.ndim]
        assert sum(sizes) == weight.numel() * STATES[run.algorithm] * STATE_BYTES[states], kind


def test_adamw_in_few_bits_follows_adamw_in_32():
    """The same gradients, in elements of different sizes: the way gone is close to the exact one, and none explodes."""
    generator = torch.Generator().manual_seed(0)
    size = (torch.randn(8, 512, generator=generator) / 2).exp()
    gradients = [size * (0.2 + torch.randn(8, 512, generator=generator)) for _ in range(60)]

    def moved(kind: str) -> torch.Tensor:
        weight = nn.Parameter(torch.zeros(8, 512))
        run = Run(model="x", data="x", optimizer=kind)
        optimizer = Optimizer([("w", weight)], run, master_weights=False, states=run.optimizer_states or "fp32")
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step(1.0)
        return weight.detach()

    exact = moved("adamw")
    for kind, tolerance in (("adamw_8bit", 0.05), ("adamw_fp8", 0.1), ("adamw_4bit", 0.4)):
        found = moved(kind)
        assert (found - exact).norm() / exact.norm() < tolerance, kind
        assert found.abs().max() < 2 * 60, kind


def test_fused_adamw_in_fp32_is_torch_adamw():
    (exact, plain), (model, fused) = make("adamw", width=300), make("adamw", width=300, states="bf16")
    for part in fused.parts:
        assert isinstance(part, Fused)
        part.states = "fp32"
    advance(exact, plain, range(5))
    advance(model, fused, range(5))
    for one, other in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("device", "rows", "is_fused"), [("cuda", 2048, True), ("cuda", 64, False), ("cpu", 2048, False)]
)
def test_large_weights_on_a_gpu_are_clipped_on_their_way_into_the_update(device, rows, is_fused):
    with FakeTensorMode():
        weight = nn.Parameter(torch.empty(rows, 1024, device=device))
        optimizer = Optimizer([("weight", weight)], Run(model="x", data="x"), master_weights=False)
    assert isinstance(optimizer.parts[0], Fused) == is_fused


def test_lion_steps_by_the_sign_of_its_momentum():
    weight = nn.Parameter(torch.zeros(3))
    optimizer = Optimizer([("w", weight)], Run(model="x", data="x", optimizer="lion"), master_weights=False)
    momentum, expected = torch.zeros(3), torch.zeros(3)
    for step in range(4):
        gradient = torch.tensor([1.0, -2.0, 0.0]) * (-1) ** step
        weight.grad = gradient.clone()
        optimizer.step(0.1)
        expected -= 0.1 * (0.9 * momentum + 0.1 * gradient).sign()
        momentum = 0.99 * momentum + 0.01 * gradient
        torch.testing.assert_close(weight.detach(), expected)


def test_muon_takes_hidden_matrices_and_adamw_the_rest():
    model = nn.ModuleDict({"embed": nn.Embedding(7, 4), "layer": nn.Linear(4, 6), "head": nn.Linear(6, 7, bias=False)})
    ends = {model["embed"].weight, model["head"].weight}
    run = Run(model="x", data="x", optimizer="muon")
    optimizer = Optimizer(model.named_parameters(), run, master_weights=False, ends=ends)
    matrices = [name for name, weight in model.named_parameters() if type(optimizer.owner[weight]) is GroupedMuon]
    assert matrices == ["layer.weight"]


def test_rounding_at_random_is_right_on_average():
    """Updates of a 40th of what bf16 can show: nearest would keep every weight, at random they arrive in the mean."""
    count, steps = 4096, 50
    weight = nn.Parameter(torch.ones(count, dtype=torch.bfloat16))
    run = Run(model="x", data="x", optimizer="lion")
    optimizer = Optimizer([("w", weight)], run, master_weights=False)
    step = 2.0**-7 / 40
    for _ in range(steps):
        weight.grad = -torch.ones_like(weight)
        optimizer.step(step)
    moved = (weight.float() - 1).mean().item()
    # Each step adds 2^-7 with probability 1/40 or nothing: binomial, so five standard deviations is a wide berth.
    deviation = 2.0**-7 * (steps / 40 * (1 - 1 / 40) / count) ** 0.5
    assert abs(moved - steps * step) < 5 * deviation
    assert 3 < len(weight.unique()) < 12


def test_draws_differ_between_steps_parameters_and_seeds_and_not_between_runs():
    def after(seed: int) -> list[torch.Tensor]:
        weights = [nn.Parameter(torch.ones(64, dtype=torch.bfloat16)) for _ in range(2)]
        run = Run(model="x", data="x", optimizer="lion", seed=seed)
        optimizer = Optimizer([("a", weights[0]), ("b", weights[1])], run, master_weights=False)
        seen = []
        for _ in range(2):
            for weight in weights:
                weight.grad = -torch.ones_like(weight)
            optimizer.step(2.0**-8)
            seen += [weight.detach().clone() for weight in weights]
            for weight in weights:
                weight.data.fill_(1)
        return seen

    first, again, other = after(0), after(0), after(1)
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    everything = [tuple(one.tolist()) for one in (*first, *other)]
    assert len(set(everything)) == len(everything)


def test_without_masters_gradients_of_several_micro_batches_are_summed_in_fp32():
    model, _ = make("adamw", dtype=torch.bfloat16, masters=False, accumulates=True)
    for _ in range(300):
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    torch.testing.assert_close(model[1].bias.grad, torch.full((2,), 300.0))


def test_weights_are_prepared_for_that_once_however_many_optimizers_they_have_in_turn():
    model, _ = make("adamw", dtype=torch.bfloat16, masters=False, accumulates=True)
    Optimizer(model.named_parameters(), Run(model="m", data="d"), master_weights=False, accumulates=True)
    assert {len(weight._post_accumulate_grad_hooks) for weight in model.parameters()} == {1}


def test_one_micro_batch_a_step_keeps_the_gradients_in_bf16():
    model, _ = make("adamw", dtype=torch.bfloat16, masters=False)
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert model[1].bias.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "dtype"), [("muon", torch.bfloat16), ("sgd", torch.bfloat16), ("adamw", torch.float16)]
)
def test_half_precision_without_masters_is_refused_where_nothing_rounds_at_random(kind, dtype):
    with pytest.raises(UserError, match="loses small updates"):
        make(kind, dtype=dtype, masters=False)


def test_lora_plus_gives_the_second_factor_its_own_rate():
    named = {f"x.{leaf}": torch.nn.Parameter(torch.ones(4, 4)) for leaf in ("lora_a", "lora_b")}
    run = Run(model="m", data="d", optimizer="sgd", lora={"b_rate": 16})
    optimizer = Optimizer(named.items(), run, master_weights=False)
    for weight in named.values():
        weight.grad = torch.ones(4, 4)
    optimizer.begin(1e-3)
    optimizer.step(1e-3)
    torch.testing.assert_close(named["x.lora_a"].detach(), torch.full((4, 4), 1 - 1e-3))
    torch.testing.assert_close(named["x.lora_b"].detach(), torch.full((4, 4), 1 - 16e-3))
