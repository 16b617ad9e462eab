"""The loss and its gradient are those of the whole step, however it is cut: rule 3 of the design."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from tunesmith.config.schema import Lora, Run
from tunesmith.data.loader import PackedDocument, micro_batch_of
from tunesmith.data.types import StepBatch
from tunesmith.model import attention, lora
from tunesmith.optim.build import Optimizer
from tunesmith.plan.plan import ForwardSpec
from tunesmith.train.step import Interrupted, LossScale, NotFinite, TrainStep

LENGTHS = (5, 9, 3, 14, 7, 11)


def documents(seed: int = 0) -> list[PackedDocument]:
    random = np.random.Generator(np.random.PCG64(seed))
    made = []
    for index, length in enumerate(LENGTHS):
        weights = random.choice([0.0, 1.0, 1.0, 0.5], size=length).astype(np.float32)
        weights[-1] = 1.0
        made.append(
            PackedDocument(random.integers(3, 200, length, dtype=np.int64), weights, index % 2, f"d, line {index}")
        )
    return made


def step_of(groups: list[list[int]]) -> StepBatch:
    docs = documents()
    chosen = [docs[i] for group in groups for i in group]
    return StepBatch(
        step=3,
        epoch=1.0,
        micro_batches=tuple(micro_batch_of([docs[i] for i in group]) for group in groups),
        target_weight=float(sum(document.weights[1:].sum() for document in chosen)),
        tokens=sum(len(document.ids) for document in chosen),
    )


def load(folder, layout="packed") -> torch.nn.Module:
    attention.register()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.set_attn_implementation(attention.NAME if layout == "packed" else "sdpa")
    return model


def gradients(folder, groups, *, layout="packed", settings: Lora | None = None):
    """Loss and gradients of one step; the optimizer is stopped from applying them."""
    model = load(folder, layout).train()
    if settings:
        lora.attach(model, settings, seed=0)
        with torch.no_grad():
            for adapter in lora.adapters(model).values():
                adapter.lora_b.add_(0.05)
    optimizer = Optimizer(model.named_parameters(), Run(model="x", data="x"), master_weights=False)
    found = {}

    def keep(_rate: float) -> None:
        found.update({name: weight.grad.clone() for name, weight in optimizer.masters.items()})

    optimizer.step = keep
    step = TrainStep(model, ForwardSpec(layout), optimizer, device=torch.device("cpu"), max_grad_norm=None, seed=0)
    result = step(step_of(groups), 1.0)
    return result, found


def plain_reference(folder):
    """The definition itself: cross-entropy of full logits, a document at a time, in float64."""
    model = load(folder, "padded").double().eval()
    total, weight = torch.zeros((), dtype=torch.float64), 0.0
    for document in documents():
        ids = torch.from_numpy(np.asarray(document.ids, dtype=np.int64))
        weights = torch.from_numpy(document.weights.astype(np.float64))
        logits = model(ids[None]).logits[0]
        total = total + (F.cross_entropy(logits[:-1], ids[1:], reduction="none") * weights[1:]).sum()
        weight += weights[1:].sum().item()
    loss = total / weight
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


CUTS = {
    "all documents in one micro-batch": [[0, 1, 2, 3, 4, 5]],
    "one document a micro-batch": [[0], [1], [2], [3], [4], [5]],
    "uneven micro-batches": [[0, 1, 2, 3], [4], [5]],
    "another order": [[5, 3], [1, 0], [4, 2]],
}


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
def test_accumulation_packing_and_batch_shape_do_not_change_loss_or_gradients(tiny_model, cut, layout):
    expected_loss, expected = plain_reference(tiny_model)
    result, found = gradients(tiny_model, cut, layout=layout)
    assert result.loss == pytest.approx(expected_loss, rel=1e-5)
    for name, gradient in found.items():
        want = expected[name].float()
        assert (gradient - want).norm() <= 1e-5 * want.norm(), name


def test_accumulation_does_not_change_the_gradients_of_adapters(tiny_model):
    whole, expected = gradients(tiny_model, [[0, 1, 2, 3, 4, 5]], settings=Lora(rank=4))
    parts, found = gradients(tiny_model, [[0, 1], [2], [3, 4, 5]], settings=Lora(rank=4))
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
    assert expected.keys() == found.keys()
    for name, gradient in found.items():
        assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


def test_losses_by_data_set_add_up_to_the_loss(tiny_model):
    result, _ = gradients(tiny_model, [[0, 1, 2], [3, 4, 5]])
    by_source = {0: 0.0, 1: 0.0}
    for document in documents():
        by_source[document.source] += float(document.weights[1:].sum())
    mean = sum(result.losses[source] * weight for source, weight in by_source.items()) / sum(by_source.values())
    assert mean == pytest.approx(result.loss, rel=1e-6)
    assert result.losses[0] != pytest.approx(result.losses[1], rel=1e-3)


def trainer(folder, **options) -> TrainStep:
    model = load(folder).train()
    lora.attach(model, Lora(rank=4, dropout=0.3), seed=0)
    optimizer = Optimizer(model.named_parameters(), Run(model="x", data="x"), master_weights=False)
    settings = {"device": torch.device("cpu"), "max_grad_norm": 1.0, "seed": 0} | options
    return TrainStep(model, ForwardSpec("packed"), optimizer, **settings)


def test_z_loss_changes_the_step_and_not_the_loss_that_is_reported(tiny_model):
    plain, other = trainer(tiny_model), trainer(tiny_model, z_loss=0.5)
    batch = step_of([[0, 1, 2, 3, 4, 5]])
    one, two = plain(batch, 1e-2), other(batch, 1e-2)
    assert one.loss == two.loss
    assert one.grad_norm != two.grad_norm


def weights_of(step: TrainStep) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in step.optimizer.tensors().items()}


def test_the_same_step_twice_gives_the_same_bytes_with_dropout(tiny_model):
    one, two = trainer(tiny_model), trainer(tiny_model)
    torch.manual_seed(1)
    first = one(step_of([[0, 1], [2, 3]]), 1e-2)
    torch.manual_seed(2)
    second = two(step_of([[0, 1], [2, 3]]), 1e-2)
    assert first == second
    assert all(torch.equal(tensor, weights_of(two)[name]) for name, tensor in weights_of(one).items())
    assert trainer(tiny_model, seed=5)(step_of([[0, 1], [2, 3]]), 1e-2).grad_norm != first.grad_norm


def test_a_step_that_is_interrupted_changes_nothing(tiny_model):
    step = trainer(tiny_model)
    before = weights_of(step)
    answers = itertools.chain([False, True], itertools.repeat(True))
    with pytest.raises(Interrupted):
        step(step_of([[0, 1], [2, 3]]), 1e-2, lambda: next(answers))
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(step).items())
    assert all(weight.grad is None for weight in step.optimizer.parameters)


def test_a_loss_that_is_not_finite_stops_with_step_and_data_and_changes_nothing(tiny_model):
    step = trainer(tiny_model)
    before = weights_of(step)
    with torch.no_grad():
        step.model.get_input_embeddings().weight[int(documents()[2].ids[0])] = float("nan")
    with pytest.raises(NotFinite, match=r"step 4 .*d, line"):
        step(step_of([[0, 1], [2, 3]]), 1e-2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(step).items())


def test_gradients_are_clipped_to_the_norm_asked_for(tiny_model):
    step = trainer(tiny_model, max_grad_norm=1e-3)
    seen = []
    step.optimizer.step = lambda _: seen.append(
        torch.nn.utils.get_total_norm([weight.grad for weight in step.optimizer.parameters])
    )
    result = step(step_of([[0, 1, 2]]), 1e-2)
    assert result.grad_norm > 1e-3
    assert seen[0].item() == pytest.approx(1e-3, rel=1e-3)


def test_loss_scaling_does_not_change_the_update(tiny_model):
    plain, scaled = trainer(tiny_model), trainer(tiny_model, loss_scale=LossScale())
    plain(step_of([[0, 1], [2, 3]]), 1e-2)
    scaled(step_of([[0, 1], [2, 3]]), 1e-2)
    for name, tensor in weights_of(plain).items():
        torch.testing.assert_close(weights_of(scaled)[name], tensor, rtol=1e-4, atol=1e-6)


def test_an_overflow_skips_the_step_and_halves_the_scale(tiny_model):
    scale = LossScale()
    scale.value = 1e38
    step = trainer(tiny_model, loss_scale=scale)
    before = weights_of(step)
    result = step(step_of([[0, 1]]), 1e-2)
    assert result.is_skipped
    assert scale.value == 5e37
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(step).items())


def test_the_scale_grows_after_a_while_without_overflow():
    scale = LossScale()
    for _ in range(LossScale.GROWTH_INTERVAL):
        scale.update(False)
    assert scale.value == 2.0**16
    assert scale.clean_steps == 0
