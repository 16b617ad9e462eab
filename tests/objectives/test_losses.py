"""Loss and gradient of every objective are TRL's, however a step is packed, cut into micro-batches and laid out."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import preference_cases as cases
from tunesmith.config.schema import Preference, Run
from tunesmith.data.build import store_of
from tunesmith.data.loader import Loader, documents_of, evaluation_batches, micro_batch_of
from tunesmith.data.preferences import mismatched
from tunesmith.data.store import TokenStore
from tunesmith.data.types import Example, Origin
from tunesmith.evaluate.loss import held_out_losses
from tunesmith.model import attention
from tunesmith.model.forward import to_device, token_losses
from tunesmith.model.scoring import document_logps
from tunesmith.objectives import objective_of
from tunesmith.objectives.base import Objective
from tunesmith.optim.build import Optimizer
from tunesmith.plan.plan import ForwardSpec
from tunesmith.train.step import TrainStep

CPU = torch.device("cpu")
TRL = json.loads((Path(__file__).with_name("trl.json")).read_text())
CUTS = {"packed": (200, 1), "accumulated": (24, 1), "padded": (48, 1), "prompts once": (24, 1)}
"""Tokens of a sequence, and sequences of a micro-batch."""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    return cases.make_models(tmp_path_factory.mktemp("models"))


def load(folder: Path, layout: str, *, has_head: bool = False) -> torch.nn.Module:
    attention.register()
    if has_head:
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
        model.score.weight.data.copy_(torch.from_numpy(cases.drawn("score", tuple(model.score.weight.shape), 0.3)))
        model.get_output_embeddings = lambda: model.score
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.set_attn_implementation(attention.NAME if layout == "packed" else "sdpa")
    return model


def objective_named(name: str) -> Objective:
    settings = dict(cases.CASES[name])
    return objective_of(
        Run(model="m", data="d", objective=settings.pop("objective"), preference=Preference(**settings))
    )


def store_for(objective: Objective) -> TokenStore:
    examples = []
    for index, pair in enumerate(cases.pairs()):
        answers = [pair.chosen, pair.rejected] if objective.documents == 2 else [pair.chosen]
        ids = [np.concatenate([pair.prompt, answer]) for answer in answers]
        weights = [np.repeat([0.0, 1.0], [len(pair.prompt), len(answer)]) for answer in answers]
        if objective.has_head:
            weights, values = [np.ones(len(one)) for one in ids], (cases.MARGINS[index], 0.0)
        else:
            values = (1.0, 0.0) if objective.documents == 2 else (float(cases.LABELS[index]),)
        sizes = tuple(map(len, ids)) if len(ids) > 1 else ()
        examples.append(Example(np.concatenate(ids), np.concatenate(weights), Origin("d", index + 1), sizes, values))
    return store_of(examples, vocab_size=cases.LARGEST)


@torch.no_grad()
def with_references(store: TokenStore, model: torch.nn.Module) -> TokenStore:
    """Document by document, each alone."""
    found = []
    for index in range(len(store)):
        for document in documents_of(store, index, 0):
            batch = micro_batch_of([document._replace(part=0)])
            losses_n = token_losses(model.eval(), to_device(batch, CPU), ForwardSpec("packed"))[1]
            found.append(document_logps(batch, losses_n).item())
    return store.referred(np.array(found))


def stores_of(objective: Objective, reference: Path) -> tuple[TokenStore, list[TokenStore]]:
    return _stores_of(type(objective), reference)


@cache
def _stores_of(kind: type[Objective], reference: Path) -> tuple[TokenStore, list[TokenStore]]:
    objective = kind(Preference())
    store, model = store_for(objective), load(reference, "packed")
    others = [mismatched(store, 200)] if objective.has_baseline else []
    if objective.has_reference:
        return with_references(store, model), [with_references(one, model) for one in others]
    return store, others


def step_of(name: str, models: tuple[Path, Path], cut: str, **changes):
    """Loss and gradients of one step; the optimizer is stopped from applying them."""
    objective, layout = objective_named(name), "padded" if cut == "padded" else "packed"
    store, others = stores_of(objective, models[1])
    model = load(models[0], layout, has_head=objective.has_head).train()
    optimizer = Optimizer(model.named_parameters(), Run(model="x", data="x"), master_weights=False)
    found = {}
    optimizer.step = lambda _: found.update({n: w.grad.clone() for n, w in optimizer.masters.items()})
    length, micro_batch = CUTS[cut]
    if cut == "prompts once":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tunesmith.data.store.SHARED", 1)
            store = store.sharing()
        assert bool(store.shared_tokens) == (objective.documents == 2)
    sizes = {"sequence_length": length, "sequences_per_step": 100, "micro_batch": micro_batch}
    lengths = (True, None) if layout == "padded" else None
    loader = Loader([store], [1.0], seed=0, **sizes, lengths=lengths, objective=objective)
    loader.refer([store], others)
    spec = ForwardSpec(layout)
    options = {"device": CPU, "max_grad_norm": None, "seed": 0, "objective": objective, **changes}
    batch = loader.step(0)
    assert cut not in ("accumulated", "prompts once") or len(batch.micro_batches) > 2
    return TrainStep(model, spec, optimizer, **options)(batch, 1.0), found


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", cases.CASES)
def test_loss_and_gradient_are_trls(models, name, cut):
    result, gradients = step_of(name, models, cut)
    assert result.loss == pytest.approx(TRL[name]["loss"], rel=1e-5)
    cases.assert_gradients(gradients, TRL[name]["gradients"])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl 1.16")
@pytest.mark.parametrize("name", cases.CASES)
def test_every_number_of_the_gradient_is_trls(models, name):
    from trl_oracle import trl_gradients

    loss, expected = trl_gradients(name, *models)
    result, found = step_of(name, models, "accumulated")
    assert result.loss == pytest.approx(loss, rel=1e-5)
    for weight, gradient in found.items():
        torch.testing.assert_close(
            gradient, expected[weight], atol=1e-5 * expected[weight].abs().max().item(), rtol=1e-5
        )


def test_smoothed_labels_are_a_mix_of_both_orders(models):
    """cDPO, which TRL has not: of each pair, (1 - e) of its loss and e of that of the pair the other way round."""
    objective = objective_named("dpo")
    store, _ = stores_of(objective, models[1])
    model = load(models[0], "packed").eval()

    def loss(values: dict, source: TokenStore) -> float:
        chosen = objective_of(Run(model="m", data="d", objective="dpo", preference=Preference(**values)))
        return held_out_losses(
            model, ForwardSpec("packed"), [source], device=CPU, sequence_length=64, objective=chosen
        )[0].loss

    margins = []
    for batch in evaluation_batches(store, sequence_length=64, micro_batch=1):
        logps_d = document_logps(batch, token_losses(model, to_device(batch, CPU), ForwardSpec("packed"))[1])
        ratios = logps_d.detach() - batch.references
        margins += (0.1 * (ratios[0::2] - ratios[1::2])).tolist()
    sigmoid = torch.nn.functional.logsigmoid
    margin_e = torch.tensor(margins, dtype=torch.float64)
    expected = (-0.8 * sigmoid(margin_e) - 0.2 * sigmoid(-margin_e)).mean().item()
    assert loss({"label_smoothing": 0.2}, store) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["dpo_sft", "kto", "orpo"])
def test_evaluation_has_the_loss_and_figures_of_a_step(models, name):
    objective = objective_named(name)
    store, others = stores_of(objective, models[1])
    model = load(models[0], "packed").eval()
    told = []
    options = {"device": CPU, "sequence_length": 32, "objective": objective, "mismatched": others}
    options["progress"] = lambda done, count: told.append((done, count))
    (found,) = held_out_losses(model, ForwardSpec("packed"), [store], **options)
    documents = sum(one.document_count for one in (store, *others))
    assert told[-1] == (documents, documents)
    assert {count for _, count in told} == {documents}
    result, _ = step_of(name, models, "accumulated")
    assert found.loss == pytest.approx(result.loss, rel=1e-6)
    assert dict(found.figures) == pytest.approx(result.figures, rel=1e-5)
    assert 0 <= found.figures["accuracy"] <= 1


def test_half_precision_scales_the_loss_and_nothing_else(models):
    from tunesmith.train.step import LossScale

    plain, scaled = step_of("dpo", models, "packed"), step_of("dpo", models, "packed", loss_scale=LossScale())
    assert plain[0].loss == scaled[0].loss
    for name, gradient in plain[1].items():
        torch.testing.assert_close(gradient, scaled[1][name], rtol=1e-5, atol=1e-8)
