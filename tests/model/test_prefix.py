"""Layers below the first adapter: computed once for each input, and nothing else shared."""

from __future__ import annotations

import copy

import pytest
import torch

from tunesmith.config.schema import Lora, Run
from tunesmith.model import attention, load, lora
from tunesmith.model.forward import packed_hidden_states, trial_inputs
from tunesmith.model.fuse import fuse
from tunesmith.model.prefix import SharedPrefix
from tunesmith.model.structure import decoder_layers
from tunesmith.parallel.prepare import load_model

TOP = Lora(rank=2, layers="top 1")


@pytest.fixture
def model(tiny_model):
    attention.register()
    made = load_model(Run(model=str(tiny_model), data=["-"]), dtype="fp32", device="cpu")
    made.set_attn_implementation(attention.NAME)
    return made


def adapted(model, settings=TOP):
    lora.attach(model, settings, seed=0)
    with torch.no_grad():
        for one in lora.adapters(model).values():
            one.lora_b.normal_()
    return model.train()


def put(prefix, model, room=2**20):
    return prefix.put_on(model, decoder_layers(model), vocabulary=load.vocabulary_size(model.config), room=room)


def inputs_of(model, lengths=(5, 9)):
    return trial_inputs(load.vocabulary_size(model.config), torch.device("cpu"), lengths)


def passed(model, inputs):
    hidden = packed_hidden_states(model, inputs)
    model.zero_grad()
    hidden.square().sum().backward()
    return [hidden.detach(), *(weight.grad for weight in model.parameters() if weight.requires_grad)]


def test_what_comes_again_is_the_same_to_the_last_bit_and_is_computed_once(model):
    plain, prefix = adapted(copy.deepcopy(model)), SharedPrefix()
    sharing = [copy.deepcopy(plain) for _ in range(2)]
    assert [put(prefix, one) for one in sharing] == [1, 1]
    for number, lengths in enumerate([(5, 9), (9, 5)]):  # other boundaries are another input
        inputs = inputs_of(model, lengths)
        expected = passed(plain, inputs)
        for one in sharing:
            assert all(map(torch.equal, passed(one, inputs), expected))
        assert prefix.hits == number + 1


def test_nothing_is_kept_beyond_its_room(model):
    prefix = SharedPrefix()
    put(prefix, adapted(model), room=100)
    for _ in range(2):
        passed(model, inputs_of(model))
    assert prefix.hits == 0


def test_layers_with_dropout_are_computed_each_time(model):
    first, prefix = decoder_layers(model)[0], SharedPrefix()
    own = first.forward
    first.forward = lambda *args, **named: torch.dropout(own(*args, **named), 0.5, first.training)
    assert put(prefix, adapted(model)) == 1
    one, two = (passed(model, inputs_of(model))[0] for _ in range(2))
    assert not torch.equal(one, two)
    assert prefix.hits == 0


def test_layers_that_tell_each_other_something_are_left_alone(model):
    left = {}
    first, second = (layer for layer in decoder_layers(model))
    forwards = first.forward, second.forward

    def leaves(hidden, *args, **named):
        left["value"] = hidden
        return forwards[0](hidden, *args, **named)

    def takes(hidden, *args, **named):
        return forwards[1](hidden + left.pop("value"), *args, **named)

    first.forward, second.forward = leaves, takes
    assert put(SharedPrefix(), adapted(model)) == 0
    assert first.forward is leaves


def test_adapters_on_all_layers_leave_nothing_to_share(model):
    assert put(SharedPrefix(), adapted(model, Lora(rank=2))) == 0


def test_models_over_the_same_weights_fuse_them_once(model):
    """Two models of a sweep hold one copy of the base, also where adapters are on other linears of it."""
    weights = {id(weight): weight for weight in model.parameters()}
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    found = []
    for targets in ("all-linear", "all-linear", ["q_proj"]):
        own = copy.deepcopy(model, dict(weights))
        lora.attach(own, Lora(rank=2, targets=targets), seed=0)
        fuse(own, fp8=False)
        attend = decoder_layers(own)[0].self_attn
        found.append(attend.q_proj.joint.weight_nk)
    q_proj = decoder_layers(model)[0].self_attn.q_proj.weight
    assert {one.data_ptr() for one in found} == {q_proj.data_ptr()}
    assert found[2].shape == q_proj.shape
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
