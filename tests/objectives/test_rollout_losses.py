"""Loss and gradient of GRPO, its variants and RLOO are TRL's; and before the first update every ratio is exactly 1."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import preference_cases as cases
from objectives.test_losses import CPU, CUTS, load, models  # noqa: F401
from tunesmith.config.schema import Run
from tunesmith.data.loader import PackedDocument, deal, micro_batch_of
from tunesmith.data.types import StepBatch
from tunesmith.model.forward import to_device, token_losses
from tunesmith.objectives import objective_of
from tunesmith.optim.build import Optimizer
from tunesmith.plan.plan import ForwardSpec
from tunesmith.run.rollout import at_temperature
from tunesmith.train.step import TrainStep

TRL = json.loads((Path(__file__).with_name("trl.json")).read_text())


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
    settings = dict(cases.ROLLOUTS[name])
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
    step._sampled = [of(one, [cases.sampled(logps) for logps in compared]) for one in batches]
    return step._launch(batch, 1.0, lambda: False)(), found


OFTEN = [("grpo", "accumulated"), ("grpo_gspo", "padded"), *((name, "packed") for name in cases.ROLLOUTS)]
SELDOM = [(name, cut) for name in cases.ROLLOUTS for cut in CUTS if (name, cut) not in OFTEN]


@pytest.mark.parametrize(("name", "cut"), [*OFTEN, *(pytest.param(*one, marks=pytest.mark.slow) for one in SELDOM)])
def test_loss_and_gradient_are_trls(models, name, cut):  # noqa: F811
    result, gradients = step_of(name, models, cut)
    assert result.loss == pytest.approx(TRL[name]["loss"], rel=1e-5, abs=1e-6)
    assert 0 < result.figures["clipped"] < 1  # else the cases would not show that ratios are clipped
    expected = TRL[name]["gradients"]
    assert gradients.keys() == expected.keys()
    for weight, gradient in gradients.items():
        wanted = expected[weight]
        assert cases.fingerprint(weight, gradient) == pytest.approx(wanted, abs=1e-5 * max(wanted[0], 1e-3)), weight


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl 1.16")
@pytest.mark.parametrize("name", cases.ROLLOUTS)
def test_every_number_of_the_gradient_is_trls(models, name):  # noqa: F811
    from trl_oracle import trl_gradients

    loss, expected = trl_gradients(name, *models)
    result, found = step_of(name, models, "accumulated")
    assert result.loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
    for weight, gradient in found.items():
        largest = expected[weight].abs().max().item()
        torch.testing.assert_close(gradient, expected[weight], atol=1e-5 * largest, rtol=1e-5)


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
