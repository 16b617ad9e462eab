"""Hybrids with Mamba-2 or short convolutions are trained packed by code of ours: equal to the model's own, and no
document leaks."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import parity
from families import tiny_config, tiny_model
from tunesmith.model import attention
from tunesmith.model.forward import (
    hidden_states,
    packed_hidden_states,
    token_losses,
    trial_inputs,
)
from tunesmith.model.forward_spec import find_forward_spec
from tunesmith.model.kept import count_kept
from tunesmith.model.probe import probe_config, try_adapters
from tunesmith.model.rotary import fuse_rope
from tunesmith.model.state_space import is_mixer, mixers_of, use_chunked_scan
from tunesmith.plan.plan import ForwardSpec

FAMILIES = ("granitemoehybrid", "bamba", "falcon_h1", "nemotron_h", "zamba2", "mamba2", "lfm2")
ODD = {
    "granitemoehybrid": {"mamba_n_groups": 4, "mamba_conv_bias": False, "mamba_proj_bias": True},
    "falcon_h1": {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 2}
    | {"ssm_in_multiplier": 0.7, "ssm_multipliers": [0.5, 0.8, 1.3, 0.9, 1.1]},
    "nemotron_h": {"n_groups": 2, "time_step_min": 0.3},
    "mamba2": {"n_groups": 2, "time_step_limit": (0.2, 1.5)},
}
"""Groups, biases, limits of the time step, multipliers and norms that not every model has."""
CASES = [(family, {}) for family in FAMILIES] + list(ODD.items())
LENGTHS = (7, 40, 3, 60, 12, 30)
"""Documents that end within chunks, at their edges and chunks apart."""


def small(family: str, **changes):
    attention.register()
    return tiny_model(family, **changes)


def own_gradients(model, inputs) -> dict[str, torch.Tensor]:
    """By the model's own code, a document at a time."""
    for start, end in itertools.pairwise(inputs.boundaries.tolist()):
        logits = model(input_ids=inputs.tokens[None, start:end], use_cache=False).logits[0]
        F.cross_entropy(logits, inputs.labels[start:end], reduction="sum").backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize(("family", "changes"), CASES, ids=[f"{one}{'-odd' if odd else ''}" for one, odd in CASES])
def test_losses_and_gradients_are_those_of_the_models_own_code(family, changes):
    model = small(family, **changes).train()
    own = copy.deepcopy(model)
    spec, note = find_forward_spec(model, vocabulary=100)
    assert (spec.layout, spec.seq_idx, note) == ("packed", True, None)
    inputs = trial_inputs(100, torch.device("cpu"), LENGTHS)
    token_losses(model, inputs, spec)[0].backward()
    expected = own_gradients(own, inputs)
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert found.keys() == expected.keys()
    scale = torch.cat([one.flatten() for one in expected.values()]).abs().max()
    worst = max((gradient - expected[name]).abs().max() for name, gradient in found.items())
    if worst > 1e-5 * scale:  # no more than the model's own code moves when its weights are off by one rounding
        assert worst <= min(2 * rounding_moves(model, expected, inputs), 1e-4 * scale)


def rounding_moves(model, expected: dict[str, torch.Tensor], inputs) -> float:
    """By how much the gradients of the model's own code change with its weights' last bits."""
    other = small(model.config.model_type)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        for weight in other.parameters():
            weight.copy_(torch.nextafter(weight, torch.full_like(weight, torch.inf)))
    moved = own_gradients(other.train(), inputs)
    return max((moved[name] - gradient).abs().max().item() for name, gradient in expected.items())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_training", [True, False])
def test_no_document_reaches_another_by_a_bit(family, is_training):
    model = small(family).train(is_training)
    spec = ForwardSpec("packed", seq_idx=True)
    model.set_attn_implementation(attention.NAME)
    inputs = trial_inputs(100, torch.device("cpu"), LENGTHS)
    for start, end in ((0, 7), (50, 110)):
        changed = inputs.tokens.clone()
        changed[start:end] = (changed[start:end] + 1) % 100
        with torch.no_grad():
            before = hidden_states(model, inputs, spec)
            inputs_changed = trial_inputs(100, torch.device("cpu"), LENGTHS)
            inputs_changed.tokens.copy_(changed)
            after = hidden_states(model, inputs_changed, spec)
        others = torch.ones(len(changed), dtype=torch.bool)
        others[start:end] = False
        assert (before[others] - after[others]).abs().max() <= 1e-6 * before.abs().max()
        assert (before[~others] - after[~others]).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["granitemoehybrid", "falcon_h1", "zamba2"])
def test_decoding_is_the_models_own(family):
    model = small(family)
    own = copy.deepcopy(model)
    use_chunked_scan(model.base_model)
    assert mixers_of(model)
    prompt = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(0))
    given = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    found, expected = (one.generate(prompt, attention_mask=torch.ones_like(prompt), **given) for one in (model, own))
    assert torch.equal(found.sequences, expected.sequences)
    for one, other in zip(found.logits, expected.logits, strict=True):
        assert torch.equal(one, other)


def test_rows_that_train_without_boundaries_are_documents():
    model = small("bamba").train()
    own = copy.deepcopy(model)
    use_chunked_scan(model.base_model)
    tokens = torch.randint(3, 100, (3, 29), generator=torch.Generator().manual_seed(0))
    found, expected = (one(input_ids=tokens, use_cache=False).logits for one in (model, own))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_all_linears_of_a_mixer_carry_adapters():
    model = small("granitemoehybrid")
    out = "model.layers.#.mamba.out_proj"
    assert out in try_adapters(model, 100)[0]
    use_chunked_scan(model.base_model)
    left_out, can_fuse = try_adapters(model, 100)
    assert (left_out, can_fuse) == ({}, True)
    assert probe_config(tiny_config("granitemoehybrid"), device=torch.device("cpu")).left_out == ()


def test_a_mixer_that_computes_something_else_is_not_taken_for_one():
    """Its parts are the same, what it does with them is not: the probe has the last word."""
    model = small("mamba2")
    mixers = mixers_of(model)
    assert len(mixers) == 2
    own = type(mixers[0]).forward

    class Other(type(mixers[0])):
        def forward(self, hidden_states, **named):
            return own(self, hidden_states.flip(-1), **named)

    for mixer in mixers:
        mixer.__class__ = Other
    spec, note = find_forward_spec(model, vocabulary=100)
    assert spec.layout == "padded"
    assert "losses differ" in note


@pytest.mark.parametrize(
    "change",
    [{"n_groups": 3}, {"head_dim": 9}, {"intermediate_size": 65}, {"D": None}],
    ids=["groups", "head dim", "width", "no D"],
)
def test_sizes_that_do_not_belong_together_are_no_mixer(change):
    (mixer, *_) = mixers_of(small("mamba2"))
    for name, value in change.items():
        setattr(mixer, name, value)
    assert not is_mixer(mixer)


def test_a_layer_with_a_scan_compiles_in_one_graph():
    model = small("bamba").train()
    model.set_attn_implementation(attention.NAME)
    inputs = trial_inputs(100, torch.device("cpu"), LENGTHS)
    spec, weight = ForwardSpec("packed", seq_idx=True), model.model.layers[0].mamba.in_proj.weight
    expected = torch.autograd.grad(hidden_states(model, inputs, spec).square().sum(), weight)[0]
    layer = model.model.layers[0]
    layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(hidden_states(model, inputs, spec).square().sum(), weight)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_the_plan_names_the_scan_and_knows_what_its_layers_keep(tmp_path):
    """Counted, not estimated with a larger margin; layers without attention count none."""
    from tunesmith.config.schema import Run
    from tunesmith.model.probe import probe_run
    from tunesmith.plan.hardware import named
    from tunesmith.run.choose import found_facts, new_plan

    parity.write_model("granitemoehybrid", tmp_path / "model")
    parity.write_documents(tmp_path / "train.jsonl")
    data = str(tmp_path / "train.jsonl")
    run = Run(model=str(tmp_path / "model"), data=data, method="full", sequence_length=64)
    run, found, notes = probe_run(run)
    assert (notes, "scan" in found.kernels) == ([], True)
    assert not found.needs_weight  # they are handed to kernels that are missing here: weights may be in few bits
    facts = found_facts(run, named("H200"), found)
    assert (facts.note, facts.scan, facts.packs) == (None, "ours", True)
    mixer, attends = (facts.kinds[at] for at in facts.pattern)
    assert (mixer.state_space.heads, mixer.state_space.inner, mixer.state_space.state, mixer.query) == (8, 64, 8, 0)
    assert (attends.state_space, attends.query) == (None, 32)
    assert not any(linear.name.endswith("conv1d") for linear in mixer.linears)
    assert mixer.kept.full > attends.kept.full
    assert mixer.kept.is_compiled  # it has experts
    plan = new_plan(run, named("H200"), probed=found)
    (said,) = [reason for reason in plan.reasons if reason.topic == "state spaces"]
    assert said.choice == "chunked scan of ours"
    assert not [reason for reason in plan.reasons if reason.topic == "margin"]


def test_the_count_is_what_autograd_keeps():
    """With real tensors, on a model of three layers against one of two."""
    config = tiny_config("mamba2")
    (counted, *_) = count_kept(config, compiles=False, fuses=True, kernels=(), seq_idx=True)
    inputs, sizes = trial_inputs(100, torch.device("cpu"), (300,)), []
    for layers in (2, 3):
        model = small("mamba2", num_hidden_layers=layers).train()
        own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        kept: dict[int, torch.Tensor] = {}

        def keep(tensor, own=own, kept=kept):
            if tensor.untyped_storage().data_ptr() not in own:
                kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            packed_hidden_states(model, inputs, seq_idx=True)
        sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))
    assert (sizes[1] - sizes[0]) / 300 == pytest.approx(counted.full, rel=0.05)


def test_a_mixer_keeps_less_than_by_the_models_own_code():
    """At the widths of a published model: its own code keeps triangles and states, ours what enters the scan."""
    config = tiny_config("mamba2", num_heads=32, head_dim=64, hidden_size=1024, state_size=128, chunk_size=256)
    with torch.device("meta"):
        mixer = mixers_of(AutoModelForCausalLM.from_config(config))[0].train()
    hidden = torch.empty(1, 1024, 1024, device="meta", requires_grad=True)

    def kept_by(call) -> int:
        kept: dict[int, torch.Tensor] = {}
        keep = lambda one: kept.setdefault(one.untyped_storage()._cdata, one)  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
            call()
        return sum(one.untyped_storage().nbytes() for one in kept.values())

    own = kept_by(lambda: mixer(hidden))
    use_chunked_scan(mixer)
    assert kept_by(lambda: mixer(hidden)) < own / 3


def test_attention_without_positions_is_left_to_the_model():
    """Granite 4's hybrids have none: what rotates queries and keys is called with nothing to rotate by."""
    model = small("granitemoehybrid", position_embedding_type="nope").train()
    model.set_attn_implementation(attention.NAME)
    inputs, spec = trial_inputs(100, torch.device("cpu"), LENGTHS), ForwardSpec("packed", seq_idx=True)
    expected = hidden_states(model, inputs, spec)
    assert fuse_rope(model, torch.float32) == 1
    torch.testing.assert_close(hidden_states(model, inputs, spec), expected)


def test_padded_rows_train_as_by_the_models_own_code():
    model = small("bamba").train()
    own = copy.deepcopy(model)
    use_chunked_scan(model.base_model)
    tokens = torch.randint(3, 100, (2, 29), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, 11:] = 0
    found, expected = (one(input_ids=tokens, attention_mask=mask, use_cache=False).logits for one in (model, own))
    torch.testing.assert_close(found[mask == 1], expected[mask == 1], rtol=1e-4, atol=1e-4)
