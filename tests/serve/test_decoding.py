"""What a model's own generation config asks for, by each way of asking the model; and what requests ask for instead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from serve.serving import Served, serving
from tiny_model import make_tiny_model
from tunesmith.infer.decoding import asked_of
from tunesmith.infer.generate import answers, prompt_ids, stop_tokens, stream
from tunesmith.infer.rollout import Wanted, sample
from tunesmith.run.open import Opened, open_model
from tunesmith.serve.batch import generate

FIRST = list(range(3, 60))
"""No answer begins with them."""
CONFIG = {"do_sample": True, "repetition_penalty": 1.7, "top_k": 3, "temperature": 0.3, "begin_suppress_tokens": FIRST}
QUESTIONS = ["What is red?", "What is not red?", "number 5", "who"]
MOST = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_tiny_model(tmp_path_factory.mktemp("asking") / "model")
    file = made / "generation_config.json"
    known = json.loads(file.read_text())
    file.write_text(json.dumps({**known, **CONFIG, "num_beams": 4, "max_new_tokens": 7}))
    return made


@pytest.fixture(scope="module")
def opened(folder: Path) -> Opened:
    return open_model(folder)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with serving(folder) as served:
        yield served


def turns(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def generated(opened: Opened, question: str, **options: Any) -> str:
    ids = torch.tensor([prompt_ids(opened.encoder, turns(question))])
    options = {"max_new_tokens": MOST, "num_beams": 1, "do_sample": False, "pad_token_id": 0, **options}
    options["eos_token_id"] = stop_tokens(opened.model, opened.encoder)
    with torch.inference_mode():
        made = opened.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return opened.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


def said(server: Served, question: str, **fields: Any) -> str:
    asked = {"model": "model", "temperature": 0, "max_tokens": MOST, **fields}
    return server.chat(question, **asked)["choices"][0]["message"]["content"]


def test_served_answers_are_those_of_generate_with_the_models_config_or_what_is_asked_instead(server, opened):
    asked: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.0}, {"repetition_penalty": 2.5}, {"top_k": 1}]
    cases = [(question, fields) for question in QUESTIONS for fields in asked]
    expected = [
        generated(opened, question, **{name: value for name, value in fields.items() if name != "top_k"})
        for question, fields in cases
    ]
    assert len(set(expected)) > len(QUESTIONS)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda case: said(server, case[0], **case[1]), cases))
    assert found == expected


def test_what_is_drawn_has_the_config_of_the_model_and_what_is_asked_goes_before_it(server):
    likeliest = said(server, "who")
    assert said(server, "who", temperature=3, seed=1, top_k=1) == likeliest
    assert said(server, "who", temperature=3, seed=1, min_p=1) == likeliest
    few = {said(server, "who", temperature=3, seed=seed, max_tokens=1) for seed in range(40)}
    many = {said(server, "who", temperature=3, seed=seed, max_tokens=1, top_k=-1) for seed in range(40)}
    assert 1 < len(few) <= CONFIG["top_k"] < len(many)


def test_penalties_by_what_an_answer_has_are_openais(server):
    plain = {"repetition_penalty": 1.0, "logprobs": True, "top_logprobs": 20, "max_tokens": 12}
    for penalties in ({"frequency_penalty": 1.5}, {"presence_penalty": 2}, {"frequency_penalty": -2}):
        asked = {"model": "model", "temperature": 0, **plain, **penalties}
        choice = server.chat("What is red?", **asked)["choices"][0]
        came: list[str] = []
        for entry in choice["logprobs"]["content"]:
            left = {
                one["token"]: one["logprob"]
                - penalties.get("frequency_penalty", 0) * came.count(one["token"])
                - penalties.get("presence_penalty", 0) * (one["token"] in came)
                for one in (entry, *entry["top_logprobs"])
                if one["bytes"] is not None
            }
            if came and entry["bytes"] is not None:  # parts of characters all look the same
                assert left[entry["token"]] == pytest.approx(max(left.values()))
            came.append(entry["token"])


def test_an_answer_of_no_said_length_is_as_long_as_the_config_says(server):
    asked = {"model": "model", "messages": turns("who"), "temperature": 0}
    assert server.post("/v1/chat/completions", **asked).json()["usage"]["completion_tokens"] == 7


def test_the_description_tells_what_may_be_asked(server):
    schemas = server.client.get("/openapi.json").json()["components"]["schemas"]
    for request in ("ChatRequest", "CompletionRequest"):
        for name in ("frequency_penalty", "presence_penalty", "repetition_penalty", "top_k", "min_p"):
            assert "where left out" in schemas[request]["properties"][name]["description"]


def test_what_the_config_asks_for_in_vain_is_said(server):
    assert server.ready.models.own.defaults.sentence == (
        "The model's generation config asks for num_beams: 4; answers are made without."
    )


def test_evaluation_and_chat_answer_as_generate_does(opened):
    expected = [generated(opened, question).strip() for question in QUESTIONS]
    prompts = [prompt_ids(opened.encoder, turns(question)) for question in QUESTIONS]
    found = dict(generate(opened.model, opened.encoder, prompts, max_tokens=MOST))
    assert [found[place] for place in range(len(prompts))] == expected
    asked = {"max_new_tokens": MOST, "temperature": 0.0}
    assert answers(opened.model, opened.encoder, [turns(QUESTIONS[0])], **asked) == expected[:1]
    assert ["".join(stream(opened.model, opened.encoder, turns(one), **asked)).strip() for one in QUESTIONS] == expected


def test_tasks_while_a_run_trains_are_answered_so_too_and_rollouts_by_the_model_alone(opened):
    prompts = [prompt_ids(opened.encoder, turns(question)) for question in QUESTIONS]
    wanted = [Wanted(place, str(place)) for place in range(len(prompts))]
    options: dict[str, Any] = {
        "max_tokens": MOST, "stop_ids": frozenset(stop_tokens(opened.model, opened.encoder)), "rows": 3,
        "is_shared": True,
    }  # fmt: skip

    def texts(**more: Any) -> list[str]:
        made = sample(opened.model, prompts, wanted, temperature=0.0, **options, **more)
        return [opened.tokenizer.decode(one.ids, skip_special_tokens=True) for one in made]

    asked = asked_of(opened.model).decoding.without_sampling()
    assert texts(decoding=asked) == [generated(opened, question) for question in QUESTIONS]
    alone = {"repetition_penalty": 1.0, "begin_suppress_tokens": None}
    assert texts() == [generated(opened, question, **alone) for question in QUESTIONS]
