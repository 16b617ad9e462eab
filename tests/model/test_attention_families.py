"""Models whose attention is not Llama's, packed: as a plain loop computes them, by every path there is on a CPU."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from families import VOCABULARY, tiny_model
from tunesmith.model import attention
from tunesmith.model.forward import token_losses, trial_inputs
from tunesmith.plan.plan import ForwardSpec

LENGTHS = (9, 4, 150, 1, 17)
"""Longer than their windows, and than a block."""
FAMILIES = {
    "gemma2": {"attn_logit_softcapping": 3.0, "final_logit_softcapping": None, "query_pre_attn_scalar": 8},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
    "deepseek_v2": {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    "deepseek_v3": {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    "mimo_v2_flash": {},
    "bloom": {"n_head": 4},
    "mpt": {"max_seq_len": 256},
    "falcon": {},
}
CELLS = [
    ("gemma2", "flex-attention"),
    ("gpt_oss", "flex-attention"),
    ("gpt_oss", "by document"),
    ("deepseek_v2", "flex-attention"),
    ("bloom", "flex-attention"),
    pytest.param("mpt", "flex-attention", marks=pytest.mark.slow),
    pytest.param("mpt", "by document", marks=pytest.mark.slow),
    pytest.param("bloom", "by document", marks=pytest.mark.slow),
    pytest.param("falcon", "flex-attention", marks=pytest.mark.slow),
    pytest.param("deepseek_v3", "flex-attention", marks=pytest.mark.slow),
    pytest.param("gemma2", "by document", marks=pytest.mark.slow),
    pytest.param("mimo_v2_flash", "by document", marks=pytest.mark.slow),
]


def plain_losses(model, inputs):
    """One document at a time, with the model's own attention."""
    losses = []
    for start, end in itertools.pairwise(inputs.boundaries.tolist()):
        logits = model(input_ids=inputs.tokens[None, start:end], use_cache=False).logits[0]
        losses.append(F.cross_entropy(logits.float(), inputs.labels[start:end], reduction="none"))
    return torch.cat(losses)


@pytest.mark.parametrize(("family", "path"), CELLS)
def test_a_packed_model_is_the_plain_one(family, path, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    taken = set()
    monkeypatch.setattr(attention, "_path", lambda *_: taken.add(path) or path)
    attention.register()
    model = tiny_model(family, **FAMILIES[family])
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(weight)
    inputs = trial_inputs(VOCABULARY, torch.device("cpu"), LENGTHS)
    model.set_attn_implementation("eager")
    expected = plain_losses(model, inputs)
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    wanted = torch.autograd.grad(expected.sum(), [*weights.values()], allow_unused=True)
    model.set_attn_implementation(attention.NAME)
    total, found = token_losses(model, inputs, ForwardSpec("packed"))
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(total, [*weights.values()], allow_unused=True)
    for name, gradient, want in zip(weights, gradients, wanted, strict=True):
        assert (gradient is None) == (want is None), name
        if want is not None:
            scale = max(1.0, want.abs().max().item())
            torch.testing.assert_close(gradient / scale, want / scale, rtol=1e-4, atol=1e-5)
    assert taken == {path}
    # What stands in one document does not reach the others.
    changed = inputs.tokens.clone()
    changed[: LENGTHS[0]] = (changed[: LENGTHS[0]] + 1) % VOCABULARY
    with torch.no_grad():
        others = token_losses(model, replace(inputs, tokens=changed), ForwardSpec("packed"))[1]
    torch.testing.assert_close(others[LENGTHS[0] :], found[LENGTHS[0] :], rtol=1e-6, atol=1e-6)
