"""Models are called packed where that gives the model's own results, else padded, else not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    Qwen3Config,
)

from tunesmith.errors import UserError
from tunesmith.model import attention, forward_spec, state_space
from tunesmith.model.forward import Inputs, token_losses, trial_inputs
from tunesmith.model.forward_spec import confirm_forward_spec, own_losses
from tunesmith.plan.plan import ForwardSpec

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEAD = {"head_dim": 8}
IDS = {"bos_token_id": 1, "eos_token_id": 2}
FALCON = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "initializer_range": 0.2,
    **IDS,
}
BY_LAYOUT = {
    "packed": [
        LlamaConfig(**SMALL),
        MistralConfig(**SMALL, sliding_window=4),
        Qwen3Config(**SMALL, **HEAD),
        Gemma2Config(**SMALL, **HEAD, sliding_window=4),
        MixtralConfig(**SMALL, num_local_experts=4),
        GraniteConfig(**SMALL, logits_scaling=3.0),
        GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=100, initializer_range=0.2, **IDS),
        BloomConfig(hidden_size=48, n_layer=2, n_head=6, vocab_size=100, initializer_range=0.2, **IDS),
        MptConfig(d_model=48, n_layers=2, n_heads=6, vocab_size=100, initializer_range=0.2, **IDS),
        FalconConfig(**FALCON),
        FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2),
    ],
    "padded": [FalconConfig(**FALCON, alibi=True)],
}
CASES = [(layout, config) for layout, configs in BY_LAYOUT.items() for config in configs]


def build(config) -> torch.nn.Module:
    torch.manual_seed(0)
    attention.register()
    return AutoModelForCausalLM.from_config(config).float().eval()


@pytest.mark.parametrize(("layout", "config"), CASES, ids=[config.model_type for _, config in CASES])
def test_each_family_is_called_the_fastest_right_way(layout, config):
    model = build(config)
    spec, note = confirm_forward_spec(model, vocabulary=100)
    assert spec.layout == layout
    assert (note is None) == (layout == "packed")
    inputs = trial_inputs(100, torch.device("cpu"))
    found = token_losses(model, inputs, spec)[1]
    model.set_attn_implementation("eager")
    torch.testing.assert_close(found.double(), own_losses(model, inputs), rtol=1e-4, atol=1e-4)


def test_a_model_that_leaks_between_rows_is_called_one_by_one_and_refused_where_that_differs_too():
    model = build(LlamaConfig(**SMALL))
    plain = model.base_model.forward

    def leaking(input_ids=None, **kwargs):
        output = plain(input_ids=input_ids, **kwargs)
        if input_ids.shape[0] > 1 or "cu_seq_lens_q" in kwargs:
            output.last_hidden_state = output.last_hidden_state + 1
        return output

    model.base_model.forward = leaking
    spec, note = confirm_forward_spec(model, vocabulary=100)
    assert spec.switch == 0
    assert "one by one" in note
    model.get_output_embeddings().register_forward_hook(lambda _module, _inputs, logits: logits * logits)
    with pytest.raises(UserError, match="cannot be trained"):
        confirm_forward_spec(model, vocabulary=100)


def test_packed_and_padded_give_the_same_gradients():
    model = build(LlamaConfig(**SMALL))
    inputs = trial_inputs(100, torch.device("cpu"))
    gradients = []
    for layout, implementation in (("packed", attention.NAME), ("padded", "sdpa")):
        model.set_attn_implementation(implementation)
        total, _ = token_losses(model, inputs, ForwardSpec(layout))
        gradients.append(torch.autograd.grad(total, [p for p in model.parameters() if p.requires_grad]))
    for packed, padded in zip(*gradients, strict=True):
        torch.testing.assert_close(packed, padded, rtol=1e-4, atol=1e-5)


def pair(model: torch.nn.Module, *, is_once: bool) -> Inputs:
    """Two documents of 11 and 13 tokens that begin with the same 9, of which 8 may stand there once."""
    drawn = trial_inputs(100, torch.device("cpu"), (11, 13))
    first, second = drawn.tokens.split((11, 13))
    second = torch.cat([first[:9], second[9:]])
    rows = torch.cat([torch.arange(8, 10), 11 + torch.arange(8, 12)])  # all but the prompt's
    labels = torch.cat([first, second])[rows + 1]
    whole = replace(drawn, tokens=torch.cat([first, second]), rows=rows, labels=labels, weights=torch.ones(len(rows)))
    if not is_once:
        return whole
    own = torch.cat([torch.arange(11), torch.arange(19, 24)])
    return replace(
        whole,
        tokens=whole.tokens[own],
        positions=whole.positions[own],
        boundaries=torch.tensor([0, 11, 16], dtype=torch.int32),
        rows=torch.tensor([8, 9, 11, 12, 13, 14]),
        keys=whole.boundaries,
        places=torch.cat([torch.arange(11), torch.arange(8), torch.arange(11, 16)]),
    )


@pytest.mark.parametrize("config", BY_LAYOUT["packed"], ids=[config.model_type for config in BY_LAYOUT["packed"]])
def test_a_beginning_that_stands_there_once_has_the_gradients_of_both(config):
    model = build(config)
    spec, _ = confirm_forward_spec(model, vocabulary=100)
    assert spec.branches
    found = []
    for is_once in (False, True):
        total, losses_n = token_losses(model, pair(model, is_once=is_once), spec)
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        found.append([losses_n, *torch.autograd.grad(total, weights, allow_unused=True)])
    for twice, once in zip(*found, strict=True):
        if twice is not None:
            torch.testing.assert_close(once, twice, rtol=1e-4, atol=2e-5)


def test_branches_are_left_alone_where_they_are_not_right_or_documents_do_not_pack(monkeypatch):
    model = build(LlamaConfig(**SMALL))
    known, _ = confirm_forward_spec(model, vocabulary=100)
    plain = attention.packed_attention

    def forgetful(*given, key_places=None, cu_seq_lens_k=None, **named):
        return plain(*given, **named, cu_seq_lens_k=named["cu_seq_lens_q"])

    attention_functions = pytest.importorskip("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    attention_functions.register(attention.NAME, forgetful)
    try:
        assert not confirm_forward_spec(model, vocabulary=100)[0].branches
        assert not confirm_forward_spec(model, vocabulary=100, known=known)[0].branches
    finally:
        attention.register()
    assert confirm_forward_spec(model, vocabulary=100, known=known)[0].branches
    assert not confirm_forward_spec(model, vocabulary=100, known=replace(known, branches=False))[0].branches
    assert not confirm_forward_spec(build(BY_LAYOUT["padded"][0]), vocabulary=100)[0].branches


def short_convolutions(hidden, weight, bias=None, activation=None, seq_idx=None, **_):
    """What causal-conv1d computes, and keeps apart by `seq_idx`."""
    parts = [hidden]
    if seq_idx is not None:
        assert seq_idx.dtype == torch.int32
        assert seq_idx.shape == (hidden.shape[0], hidden.shape[2])
        parts = hidden.split(torch.unique_consecutive(seq_idx[0], return_counts=True)[1].tolist(), dim=2)
    width = weight.shape[-1] - 1
    made = [
        torch.nn.functional.conv1d(one, weight.unsqueeze(1), bias, padding=width, groups=one.shape[1])[..., :-width]
        for one in parts
    ]
    return torch.cat(made, dim=2)


def test_a_model_whose_kernels_take_document_numbers_packs_with_them_and_pads_without(monkeypatch):
    """LFM2 without our convolution, with stand-ins for causal-conv1d: one that keeps documents apart, one that leaks,
    and none."""
    from transformers.models.lfm2 import Lfm2Config, modeling_lfm2

    monkeypatch.setattr(state_space, "is_short_convolution", lambda _: False)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}
    model = build(Lfm2Config(**sizes, **heads, pad_token_id=0))
    spec, note = confirm_forward_spec(model, vocabulary=64)
    assert (spec.layout, spec.seq_idx) == ("padded", False)
    assert "kernels of causal-conv1d, not installed here" in note
    leaking = lambda hidden, *given, seq_idx=None, **named: short_convolutions(hidden, *given, **named)  # noqa: E731
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", leaking)
    assert confirm_forward_spec(model, vocabulary=64)[0].layout == "padded"
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", short_convolutions)
    spec, note = confirm_forward_spec(model, vocabulary=64)
    assert (spec, note) == (ForwardSpec("packed", seq_idx=True), None)
    assert confirm_forward_spec(model, vocabulary=64, known=spec) == (spec, None)
    # In training the kernels may be others: what leaks there alone is found, too.
    modeling = modeling_lfm2.Lfm2ShortConv.forward

    def forgetful(self, *given, seq_idx=None, **named):
        return modeling(self, *given, **named, seq_idx=None if self.training else seq_idx)

    monkeypatch.setattr(modeling_lfm2.Lfm2ShortConv, "forward", forgetful)
    assert confirm_forward_spec(model, vocabulary=64)[0].layout == "padded"


def test_a_model_that_fails_without_a_word_is_told_by_the_kind_of_its_failure(monkeypatch):
    """An `assert` without a message, as in the code of many models."""
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)).eval()

    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(forward_spec, "token_losses", fail)
    trial, spec = forward_spec._Trial.of(model, SMALL["vocab_size"]), ForwardSpec("padded")
    found = forward_spec._over_lengths(model, spec, trial, long=20)
    assert found == (spec, "documents of more than 20 tokens: AssertionError")
