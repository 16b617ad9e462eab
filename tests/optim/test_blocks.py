"""LISA and BAdam against a plain loop of torch, written here: the same losses and weights, whoever's turn it is."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from plan.shapes import task
from tiny import SETTINGS, write_data
from tiny_model import make_tiny_model
from tunesmith.config.load import from_mapping
from tunesmith.config.schema import Run
from tunesmith.model.structure import decoder_layers
from tunesmith.optim import blocks
from tunesmith.optim.blocks import BlockOptimizer, BlockSchedule, turn_length
from tunesmith.optim.build import Optimizer
from tunesmith.plan import memory, model_states
from tunesmith.plan.choice import Choice
from tunesmith.plan.families import from_config
from tunesmith.run.assemble import assemble
from tunesmith.run.start import prepare_run
from tunesmith.train.loop import rate_of, step_of

LAYERS, STEPS = 4, 7
SHAPE = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=LAYERS, tie_word_embeddings=False)


def make_job(tmp_path: Path, model: Path, optimizer: str, **changes):
    data = write_data(tmp_path / "train.jsonl", 20)
    settings = {"model": str(model), **SETTINGS, "method": "full", "optimizer": optimizer, "eval": []}
    (tmp_path / "run").mkdir()
    settings |= {"data": [{"path": str(data)}], "output": str(tmp_path / "run"), "held_out": 0, **changes}
    return assemble(prepare_run(from_mapping(settings), warn=lambda _: None))


def plain_turn(kind: str, turn: int, names: list[str]) -> set[str]:
    """By the papers: which weights are trained."""
    layers = [[name for name in names if f"layers.{index}." in name] for index in range(LAYERS)]
    outside = [name for name in names if "layers." not in name]
    embedding = [name for name in outside if "embed" in name]
    rest = [name for name in outside if "embed" not in name]
    if kind == "badam":
        return set([rest, *layers[::-1], embedding][turn % (LAYERS + 2)])
    chosen = random.Random(f"0:{turn}").sample(range(LAYERS), 2)
    return set(outside) | {name for index in chosen for name in layers[index]}


def plain_steps(kind: str, model, batches, rates, every: int) -> list[float]:
    """AdamW over the weights whose turn it is, the others frozen; clipped to a norm of 1."""
    named, losses, states = dict(model.named_parameters()), [], {}
    for step, (batch, rate) in enumerate(zip(batches, rates, strict=True)):
        turn = plain_turn(kind, step // every, list(named))
        active = [name for name in named if name in turn]
        states = {name: state for name, state in states.items() if name in active}
        model.zero_grad(set_to_none=True)
        total = 0.0
        for part in batch.micro_batches:
            for start, end in zip(part.boundaries[:-1].tolist(), part.boundaries[1:].tolist(), strict=True):
                ids, weights = part.tokens[start:end][None], part.weights[start:end]
                logits = model(input_ids=ids.long()).logits[0]
                each = torch.nn.functional.cross_entropy(logits, part.labels[start:end].long(), reduction="none")
                loss = (each * weights).sum() / batch.target_weight
                loss.backward()
                total += loss.item()
        losses.append(total)
        grads = {name: named[name].grad for name in active}
        norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
        for name, grad in grads.items():
            grad = grad * min(1.0, 1.0 / (norm.item() + 1e-6))
            m, v, t = states.get(name, (torch.zeros_like(grad), torch.zeros_like(grad), 0))
            m, v, t = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2, t + 1
            states[name] = (m, v, t)
            update = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
            named[name].data -= rate * update
    return losses


@pytest.mark.parametrize("kind", ["lisa", "badam"])
def test_its_steps_are_those_of_a_plain_loop(kind, model, tmp_path, monkeypatch):
    monkeypatch.setitem(blocks.LONGEST, kind, 2)
    job = make_job(tmp_path, model, kind, steps=40, learning_rate=1e-3)
    assert isinstance(job.optimizer, BlockOptimizer)
    assert job.optimizer.schedule.every == 2
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    batches = [batch for batch, _ in zip(job.loader.iterate(0), range(STEPS), strict=False)]
    rates = [rate_of(job, step) for step in range(STEPS)]
    step = step_of(job, None)
    job.model.train()
    found = []
    for batch, rate in zip(batches, rates, strict=True):
        found.append(step(batch, rate).loss)
        frozen = [weight for name, weight in job.optimizer.weights.items() if name not in job.optimizer.active]
        assert frozen
        assert all(weight.grad is None and not weight.requires_grad for weight in frozen)
        held = {weight for part in job.optimizer.parts for weight in part.state}
        assert held == {job.optimizer.weights[name] for name in job.optimizer.active}
    expected = plain_steps(kind, reference, batches, rates, 2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for name, weight in reference.named_parameters():
        torch.testing.assert_close(job.optimizer.weights[name].detach(), weight.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["lisa", "badam"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_what_is_trained_at_a_time_is_what_the_plan_counts(kind, is_tied):
    config = LlamaConfig(**SHAPE, tie_word_embeddings=is_tied)
    with torch.device("meta"):
        built = LlamaForCausalLM(config)
    built.tie_weights()
    settings = Run(model="m", data="d", method="full", optimizer=kind)
    schedule = BlockSchedule.of(built, decoder_layers(built), settings, steps=1000)
    named = dict(built.named_parameters())
    sizes = [sum(named[name].numel() for name in schedule.active(turn)) for turn in range(40)]
    given = task(from_config(config.to_dict()), "H200", "full", 64, 1, optimizer=kind)
    assert max(sizes) == model_states.active_parameters(given)
    assert set().union(*(schedule.active(turn) for turn in range(40))) == set(named)
    found, usual = (
        memory.peak(memory.timeline(one, Choice())).memory for one in (given, replace(given, optimizer="adamw"))
    )
    assert found.weights == usual.weights
    assert found.optimizer == 8 * max(sizes)
    assert found.master == 4 * max(sizes)
    assert found.total < usual.total


def test_a_short_run_has_short_turns():
    assert turn_length("badam", 32, 10_000) == 100
    assert turn_length("badam", 32, 340) == 10
    assert turn_length("lisa", 32, 10_000) == 20
    assert turn_length("lisa", 32, 320) == 10
    assert turn_length("lisa", 32, 3) == 1


@pytest.mark.parametrize("kind", ["lisa", pytest.param("badam", marks=pytest.mark.slow)])
def test_saved_and_restored_it_goes_on_bit_for_bit(kind):
    """In bf16 with masters, within a turn and at its end; one that another optimizer has begun starts afresh."""
    expected = None
    for saved_after in (0, 3, 4):
        model, optimizer = make(kind)
        advance(model, optimizer, range(saved_after))
        tensors = {name: value.clone() for name, value in optimizer.tensors().items()}
        if saved_after:
            model, optimizer = make(kind, seed=1)
            optimizer.restore(tensors)
        advance(model, optimizer, range(saved_after, 5))
        found = {name: value.clone() for name, value in optimizer.tensors().items()}
        found |= {name: value.detach().clone() for name, value in model.named_parameters()}
        expected = expected or found
        assert found.keys() == expected.keys()
        assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    model.requires_grad_(True)
    usual = Optimizer(model.named_parameters(), Run(model="m", data="d", method="full"), master_weights=False)
    usual.restore({name: value.clone() for name, value in optimizer.tensors().items()})
    assert list(usual.states()) == []


def make(kind: str, seed: int = 0) -> tuple[LlamaForCausalLM, BlockOptimizer]:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).bfloat16()
    run = Run(model="m", data="d", method="full", optimizer=kind)
    schedule = replace(BlockSchedule.of(model, decoder_layers(model), run, steps=1000), every=2)
    return model, BlockOptimizer(model.named_parameters(), run, schedule, master_weights=True)


def advance(model: LlamaForCausalLM, optimizer: BlockOptimizer, steps: range) -> None:
    for step in steps:
        optimizer.begin(1e-3, step)
        ids = torch.randint(50, (1, 8), generator=torch.Generator().manual_seed(step))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step(1e-3)
        optimizer.zero_grad()
