"""What a generation config asks of decoding is what transformers' `generate` makes of it, for each row its own."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from families import VOCABULARY, tiny_model
from tunesmith.infer import call, captured
from tunesmith.infer.decoding import (
    Decoding,
    GenerationDefaults,
    History,
    asked_of,
    never_made,
    not_streamed,
    processed,
)
from tunesmith.infer.sampling import Choice, choose
from tunesmith.infer.speculate import Draft, Pace
from tunesmith.serve.engine import Engine, Job, Limits

LIMITS = Limits(batch=16, queue=100, length=128, cache_tokens=2048)
END = 7
CONFIGS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "no_repeat_ngram_size": 2},
    {"encoder_repetition_penalty": 1.4, "encoder_no_repeat_ngram_size": 2},
    {"bad_words_ids": [[9], [5, 6], [END]], "sequence_bias": [[[11], 2.0], [[5, 6], -5.0]]},
    {"min_new_tokens": 9, "min_length": 3},
    {"min_length": 25, "suppress_tokens": [3, 4], "begin_suppress_tokens": [20, 21]},
    {"forced_bos_token_id": 12, "forced_eos_token_id": [END, 8], "begin_suppress_tokens": list(range(50))},
    {"exponential_decay_length_penalty": (3, 1.5), "repetition_penalty": 1.1},
]
DRAWN: list[dict[str, Any]] = [
    {"top_k": 5},
    {"min_p": 0.3, "repetition_penalty": 1.5},
    {"top_k": 20, "top_p": 0.6, "min_p": 0.2},
    {"typical_p": 0.3},
    {"epsilon_cutoff": 0.012, "top_k": 30},
    {"eta_cutoff": 0.02},
    {"top_h": 0.5, "top_k": 8, "top_p": 0.9},
]


@pytest.fixture(scope="module")
def llama():
    """Whose answers repeat themselves."""
    return tiny_model("llama")


def with_config(model: Any, settings: dict[str, Any]) -> Any:
    model.generation_config = GenerationConfig(**settings)
    return model


def asked(model: Any, settings: dict[str, Any]) -> GenerationDefaults:
    return asked_of(with_config(model, settings))


def decode(model: Any, jobs: list[Job], **options: Any) -> Engine:
    engine = Engine(model, lambda _: None, LIMITS, is_shared=True, **options)
    engine.start()
    try:
        for job in jobs:
            engine.submit(job)
        until = time.monotonic() + 60
        while not all(job.is_ended for job in jobs):
            assert time.monotonic() < until
            time.sleep(0.005)
    finally:
        engine.close()
    return engine


def job(prompt: list[int], most: int, decoding: Decoding, made: list[int], **options: Any) -> Job:
    options = {"temperature": 0.0, **options}
    take = lambda token: bool(made.append(token.id))  # noqa: E731
    return Job("one", prompt, most, frozenset([END]), take, lambda reason: None, decoding=decoding, **options)


def generated(model: Any, settings: dict[str, Any], prompt: list[int], most: int) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": most, "do_sample": False, "eos_token_id": END, "pad_token_id": 0}
    with torch.inference_mode():
        made = with_config(model, settings).generate(ids, attention_mask=torch.ones_like(ids), **options)
    found = made[0, len(prompt) :].tolist()
    return found[:-1] if found[-1:] == [END] else found


@pytest.fixture(scope="module")
def rows(llama):
    """Prompts, what is asked of each, how long its answer may be, and what generate makes of it."""
    chance = random.Random(0)
    prompts = [[chance.randrange(3, 12) for _ in range(size)] for size in (1, 2, 9, 20) for _ in CONFIGS]
    settings = CONFIGS * 4
    most = [chance.randint(8, 40) for _ in prompts]
    return prompts, settings, most, [generated(llama, *one) for one in zip(settings, prompts, most, strict=True)]


@pytest.mark.parametrize("way", ["one by one", "speculative", "captured"])
def test_rows_that_ask_for_different_things_each_have_what_generate_makes_of_them(llama, rows, way, monkeypatch):
    monkeypatch.setattr(Pace, "may_try", lambda self, rows: True)
    monkeypatch.setattr(captured, "COLUMNS", 16)
    monkeypatch.setattr(call, "is_capturable", lambda model: way == "captured")  # as on a GPU, without its graphs
    speculates = way == "speculative"
    prompts, settings, most, expected = rows
    assert len({tuple(one) for one in expected}) > 20
    made: list[list[int]] = [[] for _ in prompts]
    decodings = [asked(llama, one).decoding for one in settings]
    jobs = [job(*one) for one in zip(prompts, most, decodings, made, strict=True)]
    draft = Draft(tiny_model("gpt2"), VOCABULARY, None) if speculates else None
    engine = decode(llama, jobs, is_wide=speculates, draft=draft)
    assert made == expected
    assert (engine.stats.accepted_tokens > 5) == speculates


@pytest.mark.parametrize("settings", DRAWN, ids="-".join)
def test_what_is_drawn_from_is_what_generate_draws_from(llama, settings):
    """The token after a prompt, drawn often, beside the probabilities that generate's processors leave."""
    prompt, count = [9, 5, 6, 7, 5], 3000
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": 1, "do_sample": True, "eos_token_id": END, "pad_token_id": 0}
    options |= {"output_scores": True, "return_dict_in_generate": True, "temperature": 0.7, "top_k": 0}
    with torch.inference_mode():
        model = with_config(llama, settings)
        told = model.generate(ids, attention_mask=torch.ones_like(ids), **{**options, **settings})
        logits_bv = llama(ids).logits[:, -1].expand(count, -1)
    expected = told.scores[0][0].softmax(-1)
    assert 1 < (expected > 0).sum() < VOCABULARY
    decoding = asked(llama, settings).decoding
    history = History(decoding, prompt, ends=frozenset([END]), most=1, device=torch.device("cpu"))
    chance, top_p = random.Random(0), settings.get("top_p", 1.0)
    choices = [Choice(0.7, top_p, chance.random(), None, history=history) for _ in range(count)]
    plain = [Choice(0.7, 1.0, chance.random(), None) for _ in range(10)]
    ids = [token.id for token in choose(logits_bv[:1].expand(count + 10, -1), [*plain, *choices]) if token]
    found = torch.bincount(torch.tensor(ids[10:]), minlength=VOCABULARY) / count
    assert not found[expected == 0].any()
    spread = 4.5 * (expected * (1 - expected) / count).sqrt()
    assert ((found - expected).abs() <= spread).all()
    assert ids[:10] == [token.id for token in choose(logits_bv[:10], plain) if token], "those beside draw as ever"


def test_what_sampling_asks_for_does_not_touch_the_likeliest_token(llama):
    decoding = asked(llama, {"top_k": 5, "min_p": 0.5, "typical_p": 0.3, "do_sample": True}).decoding
    assert not decoding.is_plain
    assert decoding.without_sampling().is_plain
    assert job([1, 2], 3, decoding, []).is_greedy


def test_frequency_and_presence_count_the_answer_alone():
    history = History(
        Decoding(frequency_penalty=0.5, presence_penalty=2.0), [1, 1, 2], ends=frozenset(), most=4,
        device=torch.device("cpu"),
    )  # fmt: skip
    for token in (2, 3, 3):
        history.push(token)
    logits_bv = torch.zeros(2, 5)
    expected = [[0.0] * 5, [0.0, 0.0, -2.5, -3.0, 0.0]]
    assert processed(logits_bv, [None, history]).tolist() == expected
    assert not logits_bv.any()


def test_tokens_that_the_output_head_does_not_have_are_passed_over():
    history = History(
        Decoding(repetition_penalty=2.0), [1, 9], ends=frozenset(), most=1, device=torch.device("cpu")
    )  # fmt: skip
    assert processed(torch.ones(1, 4), [history]).tolist() == [[1.0, 0.5, 1.0, 1.0]]


def test_what_must_be_spelled_goes_before_what_the_config_forbids():
    """An answer that must be JSON is JSON."""
    decoding = Decoding(others={"suppress_tokens": [2, 3]})
    history = History(decoding, [1], ends=frozenset(), most=1, device=torch.device("cpu"))
    logits_bv = torch.tensor([[5.0, 4.0, 1.0, 2.0]])

    def chosen(*allowed: int) -> int:
        allowed_v = torch.tensor([token in allowed for token in range(4)])
        token = choose(logits_bv, [Choice(0.0, 1.0, 0.5, None, allowed_v, history)])[0]
        assert token is not None
        return token.id

    assert chosen(1, 3) == 1
    assert chosen(2, 3) == 3


def test_log_probabilities_are_those_of_the_model_itself():
    history = History(
        Decoding(repetition_penalty=5.0), [0], ends=frozenset(), most=1, device=torch.device("cpu")
    )  # fmt: skip
    logits_bv = torch.tensor([[3.0, 2.0, 0.0]])
    token = choose(logits_bv, [Choice(0.0, 1.0, 0.5, 2, history=history)])[0]
    assert token is not None
    told = logits_bv.log_softmax(-1)[0].tolist()
    assert (token.id, token.logprob) == (1, pytest.approx(told[1]))
    assert token.top == ((0, pytest.approx(told[0])), (1, pytest.approx(told[1])))


def test_what_cannot_be_applied_is_said_with_its_fault(llama):
    found = asked(llama, {"num_beams": 4, "guidance_scale": 1.5, "repetition_penalty": 1.2, "top_k": 50})
    assert found.decoding == Decoding(repetition_penalty=1.2, top_k=50)
    assert found.sentence == (
        "The model's generation config asks for num_beams: 4, guidance_scale: 1.5; answers are made without."
    )
    assert asked(llama, {}).sentence is None
    assert "stop_strings: 5 (which is out of bounds)" in str(asked(llama, {"stop_strings": 5}).sentence)
    odd = asked(llama, {"bad_words_ids": [[100_000]], "suppress_tokens": [3]})
    assert odd.decoding == Decoding(others={"suppress_tokens": [3]})
    assert str(odd.sentence).startswith("The model's generation config asks for bad_words_ids: [[100000]] (The model")
    assert not_streamed(with_config(llama, {"num_beams": 4, "guidance_scale": 1.5}))[0] == {"num_beams": 1}


def test_answers_whose_length_nobody_says_are_as_long_as_the_config_says(llama):
    assert asked(llama, {"max_new_tokens": 9, "max_length": 50}).longest(10, 100) == 9
    assert asked(llama, {"max_length": 50}).longest(10, 100) == 40
    assert asked(llama, {"max_length": 50}).longest(60, 100) == 100
    assert asked(llama, {}).longest(10, 100) == 100


def test_tokens_without_a_row_in_every_embedding_are_never_made():
    """Gemma's tables for each layer end before the vocabulary does."""
    model = tiny_model("gemma3n_text", vocab_size_per_layer_input=10).eval()
    torch.manual_seed(0)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    beyond = list(range(10, VOCABULARY))
    assert never_made(model) == beyond
    assert asked_of(model).decoding.others["suppress_tokens"] == beyond
    options = {"max_new_tokens": 20, "do_sample": True, "temperature": 5.0}
    made = model.generate(torch.tensor([[3, 4]]), suppress_tokens=never_made(model), **options)
    assert made.max() < 10
    assert never_made(tiny_model("llama")) == []
