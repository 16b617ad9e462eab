"""NEFTune: each document gets the noise of its own length, in training only."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from tunesmith.data.loader import PackedDocument, micro_batch_of
from tunesmith.model import attention
from tunesmith.model.forward import hidden_states, to_device, token_losses
from tunesmith.model.noise import put_noise_on
from tunesmith.plan.plan import ForwardSpec

LENGTHS, ALPHA = (4, 25), 5.0


def loaded(folder, layout: str = "packed") -> torch.nn.Module:
    attention.register()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.set_attn_implementation(attention.NAME if layout == "packed" else "sdpa")
    return model.train()


def inputs_of(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    documents = [
        PackedDocument(
            torch.randint(3, 200, (length,), generator=generator).numpy(), torch.ones(length).numpy(), 0, "d"
        )
        for length in lengths
    ]
    return to_device(micro_batch_of(documents), torch.device("cpu"))


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_noise_is_as_large_as_each_document_s_length_allows(tiny_model, layout):
    model, seen = loaded(tiny_model, layout), []
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(lambda _module, _inputs, embedded: seen.append(embedded.detach().clone()))
    put_noise_on(model, ALPHA)
    embedding.register_forward_hook(lambda _module, _inputs, embedded: seen.append(embedded.detach().clone()))
    torch.manual_seed(0)
    hidden_states(model, inputs_of(), ForwardSpec(layout))
    plain, noisy = seen
    noise = (noisy - plain).abs()
    parts = noise[0].split(LENGTHS) if layout == "packed" else [noise[0, : LENGTHS[0]], noise[1]]
    for length, part in zip(LENGTHS, parts, strict=True):
        bound = ALPHA / math.sqrt(length * plain.shape[-1])
        assert part.max() <= bound * (1 + 1e-5)
        assert part.max() > 0.9 * bound
        assert part.mean() == pytest.approx(bound / 2, rel=0.2)  # of a uniform draw


def test_loss_and_gradients_are_those_of_noisy_embeddings_given_to_the_plain_model(tiny_model):
    inputs, ours, plain = inputs_of([13]), loaded(tiny_model), loaded(tiny_model)
    put_noise_on(ours, ALPHA)
    torch.manual_seed(3)
    total, _ = token_losses(ours, inputs, ForwardSpec("packed"))
    total.backward()

    torch.manual_seed(3)
    embedded = plain.get_input_embeddings()(inputs.tokens[None])
    noise = torch.empty_like(embedded).uniform_(-1.0, 1.0) * ALPHA / math.sqrt(13 * embedded.shape[-1])
    plain.set_attn_implementation("sdpa")
    logits = plain(inputs_embeds=embedded + noise).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, inputs.tokens[1:], reduction="sum")
    expected.backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    wanted = dict(plain.named_parameters())
    for name, weight in ours.named_parameters():
        torch.testing.assert_close(weight.grad, wanted[name].grad, rtol=1e-4, atol=1e-5)


def test_evaluation_has_no_noise(tiny_model):
    inputs, ours = inputs_of(), loaded(tiny_model)
    expected = hidden_states(ours.eval(), inputs, ForwardSpec("packed"))
    put_noise_on(ours, ALPHA)
    assert torch.equal(hidden_states(ours, inputs, ForwardSpec("packed")), expected)
    assert not torch.equal(hidden_states(ours.train(), inputs, ForwardSpec("packed")), expected)
