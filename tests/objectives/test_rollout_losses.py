"""Loss and gradient of GRPO, its variants and RLOO are TRL's; and before the first update every ratio is exactly 1."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import preference_cases as cases
from objectives.test_losses import CPU, CUTS, load, models  # noqa: F401
from tunesmith.config.schema import Lora, Run
from tunesmith.data.loader import PackedDocument, deal, micro_batch_of
from tunesmith.data.prompts import Prompt, PromptBatch
from tunesmith.data.types import StepBatch
from tunesmith.model import lora
from tunesmith.model.forward import to_device, token_losses
from tunesmith.objectives import objective_of
from tunesmith.objectives.base import Answers
from tunesmith.optim.build import Optimizer
from tunesmith.parallel.ranks import Ranks
from tunesmith.plan.plan import ForwardSpec
from tunesmith.run.choose import new_plan
from tunesmith.run.rollout import Answer, Rollouts, at_temperature
from tunesmith.train.step import TrainStep

TRL = json.loads((Path(__file__).with_name("trl.json")).read_text())


EVERY = cases.ROLLOUTS | cases.DRAWN


def documents() -> list[PackedDocument]:
    made = []
    for pair in cases.pairs():
        for answer in (pair.chosen, pair.rejected):
            weights = np.repeat(np.array([0, 1], dtype=np.float32), [len(pair.prompt), len(answer)])
            ids = np.concatenate([pair.prompt, answer]).astype(np.int32)
            made.append(PackedDocument(ids, weights, 0, "d, line 1", number=len(made)))
    return made


@cache
def reference_logps(folder: Path, temperature: float) -> list[np.ndarray]:
    """Of each answer's tokens, document by document."""
    model, spec = load(folder, "packed").eval(), at_temperature(ForwardSpec("packed"), temperature)
    with torch.no_grad():
        return [
            -token_losses(model, to_device(micro_batch_of([one]), CPU), spec)[1].double().numpy() for one in documents()
        ]


def step_of(name: str, folders: tuple[Path, Path], cut: str, *, is_first: bool = False, updates: int = 1):
    """Loss and gradients of one step; the optimizer is stopped from applying them."""
    settings = dict(EVERY[name])
    kind, layout = settings.pop("objective"), "padded" if cut == "padded" else "packed"
    objective = objective_of(Run(model="m", data="d", objective=kind, rollout=settings, rewards="exact"))
    temperature = settings.get("temperature", 1.0)
    compared = reference_logps(folders[1], temperature)
    length, micro_batch = CUTS[cut]
    lengths = (True, None) if layout == "padded" else None
    batches = deal(documents(), sequence_length=length, micro_batch=micro_batch, lengths=lengths)
    assert cut != "accumulated" or len(batches) > 2
    advantages = torch.tensor(objective.advantages(cases.REWARDS)).flatten()

    def of(batch, each) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([each[i] for i in batch.numbers.tolist()]))

    batches = tuple(replace(one, advantages=advantages[one.numbers], compared=of(one, compared)) for one in batches)
    targets = float(sum(one.weights.sum() for one in batches))
    divisors = {"examples": float(len(documents())), "tokens": targets}
    batch = StepBatch(0, 1.0, batches, targets, sum(map(len, compared)), divisors, updates=updates)
    model = load(folders[0], layout).train()
    optimizer = Optimizer(model.named_parameters(), Run(model="x", data="x"), master_weights=False)
    found = {}
    real = optimizer.step

    def apply(rate: float) -> None:
        found.update({n: w.grad.clone() for n, w in optimizer.masters.items()})
        real(rate)

    optimizer.step = apply
    spec = at_temperature(ForwardSpec(layout), temperature)
    step = TrainStep(model, spec, optimizer, device=CPU, max_grad_norm=None, seed=0, objective=objective)
    if is_first:
        return step(batch, 3e-3), found
    sampled = [cases.sampled(logps) for logps in compared]
    step._sampled = [of(one, sampled) for one in batches]
    if settings.get("engine") == "vllm":
        drawn = [cases.by_sampler(logps) for logps in sampled]
        batch = replace(batch, micro_batches=tuple(replace(one, sampler=of(one, drawn)) for one in batches))
    return step._launch(batch, 1.0, lambda: False)(), found


OFTEN = [("grpo", "accumulated"), ("grpo_gspo", "padded"), *((name, "packed") for name in EVERY)]
SELDOM = [(name, cut) for name in EVERY for cut in CUTS if (name, cut) not in OFTEN]


@pytest.mark.parametrize(("name", "cut"), [*OFTEN, *(pytest.param(*one, marks=pytest.mark.slow) for one in SELDOM)])
def test_loss_and_gradient_are_trls(models, name, cut):  # noqa: F811
    result, gradients = step_of(name, models, cut)
    assert result.loss == pytest.approx(TRL[name]["loss"], rel=1e-5, abs=1e-6)
    assert 0 < result.figures["clipped"] < 1  # else the cases would not show that ratios are clipped
    cases.assert_gradients(gradients, TRL[name]["gradients"])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl 1.16")
@pytest.mark.parametrize("name", EVERY)
def test_every_number_of_the_gradient_is_trls(models, name):  # noqa: F811
    from trl_oracle import trl_gradients

    loss, expected = trl_gradients(name, *models)
    result, found = step_of(name, models, "accumulated")
    assert result.loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
    for weight, gradient in found.items():
        largest = expected[weight].abs().max().item()
        torch.testing.assert_close(gradient, expected[weight], atol=1e-5 * largest, rtol=1e-5)


@pytest.mark.parametrize("name", ["rloo", "rloo_batch"])
def test_answers_that_another_engine_has_drawn_count_by_how_likely_they_were(models, name):  # noqa: F811
    """With `rloo`, which TRL does not correct: each answer as a whole, by at most 3, without a gradient of its own."""
    settings = dict(cases.ROLLOUTS[name])
    run = Run(model="m", data="d", objective=settings.pop("objective"), rewards="exact", rollout=settings)
    objective = objective_of(run.model_copy(update={"rollout": run.rollout.model_copy(update={"engine": "vllm"})}))
    lengths, count = torch.tensor([3, 1, 4]), 8
    torch.manual_seed(0)
    logps, weights = -torch.rand(count).double(), torch.ones(count).double()
    leaf, ahead = logps.clone().requires_grad_(), torch.tensor([1.5, -0.5, 2.0]).double()
    before, drawn = logps - 0.01, logps - torch.linspace(-0.9, 0.9, count).double()
    zeros = torch.zeros(3).double()
    answers = Answers(leaf, weights, weights, lengths, zeros, zeros, torch.zeros(()), ahead, before, None, drawn)
    columns = objective.columns(answers)
    starts = [(0, 3), (3, 4), (4, 8)]
    importance = torch.stack([(before - drawn)[a:b].sum().exp() for a, b in starts])
    assert importance.max() > 3 > importance.min()
    moved = torch.stack([(leaf - before)[a:b].sum().exp() for a, b in starts])
    expected = -moved * ahead * importance.clamp(max=3.0)
    torch.testing.assert_close(columns["loss"].each_e, expected, rtol=1e-12, atol=1e-12)
    (found,) = torch.autograd.grad(columns["loss"].each_e.sum(), leaf, retain_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), leaf)[0], rtol=1e-12, atol=1e-12)
    far = (before - drawn).abs()
    assert columns["sampler_gap"].each_e.sum().item() == pytest.approx(far.sum().item())
    assert columns["sampler_gap_largest"].each_e.tolist() == [far[a:b].max().item() for a, b in starts]
    assert columns["sampler_capped"].each_e.tolist() == (importance > 3).double().tolist()


class Given:
    """A generator whose model has answered already."""

    def __init__(self, model: torch.nn.Module, tokenizer):
        self.called = self.model = model
        self.seed, self.encoder = 0, SimpleNamespace(tokenizer=tokenizer)
        self.rewards = SimpleNamespace(names=["given"])
        self.refresh = lambda _: None

    def answers(self, prompts, wanted, **_) -> list[Answer]:
        made = []
        for pair, rewards in zip(cases.pairs(), cases.REWARDS, strict=True):
            both = zip((pair.chosen, pair.rejected), rewards, strict=True)
            made += [Answer(ids.tolist(), False, "x", [reward], reward) for ids, reward in both]
        return made


def adapted_step(name: str, folders: tuple[Path, Path], cut: str, place: Path):
    """A first step as a run makes it, from answers to loss and gradients, with an adapter."""
    settings = {"answers": 2, **cases.ADAPTED[name]}
    kind, layout = settings.pop("objective"), "padded" if cut == "padded" else "packed"
    run = Run(model=str(folders[0]), data="d", objective=kind, rollout=settings, rewards="exact", device="cpu")
    objective = objective_of(run)
    model = load(folders[0], layout)
    factors = Lora(rank=cases.RANK, targets=list(cases.FACTORS))
    lora.attach(model, factors, seed=0)
    trained = {of: weight for of, weight in model.named_parameters() if weight.requires_grad}
    for of, weight in trained.items():
        weight.data.copy_(torch.from_numpy(cases.drawn(of, tuple(weight.shape), 0.1)))
    spec = at_temperature(ForwardSpec(layout), settings.get("temperature", 1.0))
    length, micro_batch = CUTS[cut]
    plan = new_plan(run).changed(sequence_length=length, micro_batch=micro_batch)
    rolled = replace(objective, rollout=objective.rollout.model_copy(update={"max_answer_tokens": 9}))
    given = Given(model, AutoTokenizer.from_pretrained(folders[0]))
    roll_out = Rollouts(given, rolled, spec, plan, CPU, Ranks(), place, max(cases.PROMPTS))
    prompts = tuple(Prompt(pair.prompt.astype(np.int32), 0, "d, line 1", {}) for pair in cases.pairs())
    batch = roll_out(PromptBatch(0, 1.0, prompts), lambda *_: None)
    assert cut != "accumulated" or len(batch.micro_batches) > 2
    optimizer = Optimizer(trained.items(), Run(model="x", data="x"), master_weights=False)
    found = {}
    optimizer.step = lambda _: found.update({n: w.grad.clone() for n, w in optimizer.masters.items()})
    step = TrainStep(model.train(), spec, optimizer, device=CPU, max_grad_norm=None, seed=0, objective=objective)
    return step(batch, 1.0), found


def in_peft(name: str) -> str:
    return f"base_model.model.{name}".replace("lora_a", "lora_A.default.weight").replace(
        "lora_b", "lora_B.default.weight"
    )


@pytest.mark.parametrize(
    ("name", "cut"),
    [("rloo_kl", "accumulated"), ("rloo_kl", "padded"), ("rloo_kl_batch", "packed"), ("grpo_kl", "accumulated")],
)
def test_the_reference_is_the_model_without_its_adapter_as_in_trl(models, name, cut, tmp_path):  # noqa: F811
    """RLOO takes the divergence from the reward, GRPO adds it to the loss: rewards, advantages, loss and gradient."""
    result, gradients = adapted_step(name, models, cut, tmp_path)
    assert result.loss == pytest.approx(TRL[name]["loss"], rel=1e-5, abs=1e-6)
    expected = TRL[name]["gradients"]
    assert {in_peft(of) for of in gradients} == expected.keys()
    for of, gradient in gradients.items():
        wanted = expected[in_peft(of)]
        assert cases.fingerprint(in_peft(of), gradient) == pytest.approx(wanted, abs=1e-5 * max(wanted[0], 1e-3)), of


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl 1.16")
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", cases.ADAPTED)
def test_every_number_of_an_adapters_gradient_is_trls(models, name, cut, tmp_path):  # noqa: F811
    from trl_oracle import trl_gradients

    loss, expected = trl_gradients(name, *models)
    result, found = adapted_step(name, models, cut, tmp_path)
    assert result.loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
    for of, gradient in found.items():
        wanted = expected[in_peft(of)]
        torch.testing.assert_close(gradient, wanted, atol=1e-5 * wanted.abs().max().item(), rtol=1e-5)


@pytest.mark.parametrize("name", ["grpo_dr", "rloo"])
def test_ratios_are_exactly_1_before_the_first_update_and_move_after_it(models, name):  # noqa: F811
    """With ratios of 1 the loss is minus the mean advantage, weighted as tokens are."""
    first, _ = step_of(name, models, "accumulated", is_first=True)
    ahead = torch.tensor(objective_advantages(name)).flatten().double()
    tokens = torch.tensor([float(one.weights.sum()) for one in documents()]).double()
    each = -ahead if name == "rloo" else -ahead * tokens / cases.ROLLOUTS[name]["max_answer_tokens"]
    assert first.loss == pytest.approx(each.mean().item(), abs=1e-15)
    assert first.figures["clipped"] == 0
    later, _ = step_of(name, models, "accumulated", is_first=True, updates=3)
    assert later.loss < first.loss - 1e-3


def objective_advantages(name: str) -> list[list[float]]:
    settings = dict(cases.ROLLOUTS[name])
    run = Run(model="m", data="d", objective=settings.pop("objective"), rollout=settings, rewards="exact")
    return objective_of(run).advantages(cases.REWARDS)
