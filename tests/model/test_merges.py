"""ReLoRA and LoQT against a plain loop of torch, written here: the same losses, and the same model in the end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tiny import SETTINGS, write_data
from tiny_model import make_tiny_model
from tunesmith.config.load import from_mapping
from tunesmith.errors import UserErrors
from tunesmith.model import merges
from tunesmith.model.lora_modules import initial_a
from tunesmith.model.merges import merge_steps, merged_weights
from tunesmith.model.quantized import rounded
from tunesmith.run.assemble import assemble
from tunesmith.run.start import prepare_run
from tunesmith.train.loop import rate_of, step_of

STEPS, RANK, SCALE = 6, 4, 2.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=False, num_hidden_layers=1)


class Plain(nn.Module):
    """A linear with two factors beside it."""

    def __init__(self, name: str, weight: torch.Tensor):
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.a = nn.Parameter(initial_a((RANK, weight.shape[1]), 0, name))
        self.b = nn.Parameter(torch.zeros(weight.shape[0], RANK))

    def merged(self) -> torch.Tensor:
        return self.weight + SCALE * self.b @ self.a

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.merged().T


def put_plain(model: nn.Module, method: str) -> list[Plain]:
    model.requires_grad_(False)
    found = []
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "layers." in name:
            weight = module.weight.detach().clone()
            plain = Plain(name, rounded(weight, "nf4") if method == "loqt" else weight)
            model.set_submodule(name, plain)
            found.append(plain)
    return found


def loss_of(model: nn.Module, parts, weight: float) -> torch.Tensor:
    total = torch.zeros(())
    for part in parts:
        for start, end in zip(part.boundaries[:-1].tolist(), part.boundaries[1:].tolist(), strict=True):
            logits = model(input_ids=part.tokens[start:end][None].long()).logits[0]
            each = nn.functional.cross_entropy(logits, part.labels[start:end].long(), reduction="none")
            total = total + (each * part.weights[start:end]).sum() / weight
    return total


@torch.no_grad()
def merge(one: Plain, method: str, step: int, gradient: torch.Tensor | None) -> None:
    full = one.merged()
    if method == "relora":
        one.weight.copy_(full)
        one.a.copy_(initial_a(tuple(one.a.shape), 0, f"{one.name}:{step}"))
        one.b.zero_()
        return
    directions = torch.linalg.svd(gradient)[2][:RANK]
    lost = torch.zeros_like(full)
    if step:
        one.weight.copy_(rounded(full, "nf4"))
        lost = full - one.weight
    one.a.copy_(directions)
    one.b.copy_(lost @ directions.T / SCALE)


def plain_steps(model: nn.Module, method: str, batches, rates, at: tuple[int, ...]) -> list[float]:
    plain, losses, states = put_plain(model, method), [], {}
    trained = [weight for one in plain for weight in ([one.a, one.b] if method == "relora" else [one.b])]
    for step, (batch, rate) in enumerate(zip(batches, rates, strict=True)):
        if step in at:
            gradients = [None] * len(plain)
            if method == "loqt":
                weights = [one.weight.requires_grad_(True) for one in plain]
                gradients = torch.autograd.grad(loss_of(model, batch.micro_batches[:1], 1.0), weights)
                for weight in weights:
                    weight.requires_grad_(False)
            for one, gradient in zip(plain, gradients, strict=True):
                merge(one, method, step, gradient)
            states = {}
        loss = loss_of(model, batch.micro_batches, batch.target_weight)
        losses.append(loss.item())
        grads = torch.autograd.grad(loss, trained)
        norm = torch.stack([grad.norm() for grad in grads]).norm().item()
        for weight, grad in zip(trained, grads, strict=True):
            grad = grad * min(1.0, 1.0 / (norm + 1e-6))
            m, v, t = states.get(weight, (torch.zeros_like(grad), torch.zeros_like(grad), 0))
            m, v, t = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2, t + 1
            states[weight] = (m, v, t)
            weight.data -= rate * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    return losses


def make_job(tmp_path: Path, model: Path, **changes):
    data = write_data(tmp_path / "train.jsonl", 20)
    (tmp_path / "run").mkdir()
    settings = {"model": str(model), **SETTINGS, "lora": {"rank": RANK}, "eval": [], "held_out": 0, **changes}
    settings |= {"data": [{"path": str(data)}], "output": str(tmp_path / "run")}
    return assemble(prepare_run(from_mapping(settings), warn=lambda _: None))


@pytest.mark.parametrize("method", ["relora", "loqt"])
def test_its_steps_are_those_of_a_plain_loop(method, model, tmp_path, monkeypatch):
    monkeypatch.setattr(merges, "RELORA", (4, 2))
    monkeypatch.setattr(merges, "LOQT", (10, 2, 1.2))
    monkeypatch.setattr(merges, "REWARM", (1, 1))
    job = make_job(tmp_path, model, method=method, steps=40, learning_rate=1e-3, warmup=0)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    batches = [batch for batch, _ in zip(job.loader.iterate(0), range(STEPS), strict=False)]
    rates = [rate_of(job, step) for step in range(STEPS)]
    if method == "relora":  # warmed up again
        assert rates[2] < 0.6 * rates[1]
    step = step_of(job, None)
    job.model.train()
    found = [step(batch, rate).loss for batch, rate in zip(batches, rates, strict=True)]
    at = merge_steps(method, 40)
    assert sum(0 < one < STEPS for one in at) == 2
    expected = plain_steps(reference, method, batches, rates, at)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    written = merged_weights(job.model, torch.float32)
    for name, module in reference.named_modules():
        if isinstance(module, Plain):
            torch.testing.assert_close(written[f"{name}.weight"], module.merged().detach(), rtol=1e-4, atol=1e-5)
    trained = {name.rpartition(".")[2] for name in job.optimizer.weights}
    assert trained == ({"lora_a", "lora_b"} if method == "relora" else {"lora_b"})


def test_intervals_suit_the_length_of_a_run():
    assert merge_steps("relora", 40) == (10, 20, 30)
    assert merge_steps("relora", 100_000)[:2] == (1000, 2000)
    assert merge_steps("loqt", 100) == (0, 10, 22, 36, 53, 74, 99)
    assert merge_steps("loqt", 3) == (0, 1, 2)


def test_what_cannot_be_merged_is_refused_in_a_sentence():
    for changes, words in (({"lora": {"dora": True}}, "lora.dora"), ({"adapter": "there"}, "adapter: ")):
        with pytest.raises(UserErrors) as refused:
            from_mapping({"model": "m", "data": "d", "method": "relora", **changes})
        assert words in str(refused.value)
