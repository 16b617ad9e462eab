"""JSON answers, embeddings, and adapters that come and go while the server runs."""

from __future__ import annotations

import base64
import json
import re
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from serve.serving import serving
from tunesmith.errors import UserError
from tunesmith.run.open import open_model
from tunesmith.serve import grammar, trial
from tunesmith.serve.server import Options, prepare

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
QUESTION = [{"role": "user", "content": "What is red?"}]
POINT = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "b"]},
        "at": {
            "type": "array",
            "items": {"type": "integer", "minimum": -9, "maximum": 99},
            "minItems": 1,
            "maxItems": 3,
        },
        "name": {"type": "string", "maxLength": 6},
    },
    "required": ["kind", "at", "name"],
    "additionalProperties": False,
}


TREE = {"type": "object", "properties": {"of": {"$ref": "#/$defs/tree"}}, "additionalProperties": False}


def is_tree(made) -> bool:
    return isinstance(made, dict) and set(made) <= {"of"} and all(map(is_tree, made.values()))


def is_point(made) -> bool:
    return (
        set(made) == {"kind", "at", "name"}
        and made["kind"] in ("a", "b")
        and 1 <= len(made["at"]) <= 3
        and all(type(one) is int and -9 <= one <= 99 for one in made["at"])
        and isinstance(made["name"], str)
        and len(made["name"]) <= 6
    )


def held_to(schema, **fields):
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    return {"model": "run", "messages": QUESTION, "response_format": form, **fields}


@pytest.mark.parametrize(
    ("schema", "fits"),
    [
        (POINT, is_point),
        ({"type": "string", "pattern": "^[ab]{2,4}$"}, lambda made: re.fullmatch("[ab]{2,4}", made)),
        ({"anyOf": [{"type": "null"}, {"type": "boolean"}]}, lambda made: made in (None, True, False)),
        (
            {
                "$defs": {"tree": TREE},
                "$ref": "#/$defs/tree",
            },
            is_tree,
        ),
    ],
)
def test_answers_are_valid_by_their_schema_or_cut_by_their_length(server, schema, fits):
    """The model has learned nothing of JSON, and tokens are drawn wildly."""
    pytest.importorskip("llguidance")
    reasons = []
    for seed in range(3):
        asked = held_to(schema, temperature=2 if seed else 0, seed=seed, max_tokens=200)
        choice = server.post(CHAT, **asked).json()["choices"][0]
        reasons.append(choice["finish_reason"])
        if choice["finish_reason"] == "stop":
            assert fits(json.loads(choice["message"]["content"])), choice
        chunks = server.stream(CHAT, **asked)
        said = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert said == choice["message"]["content"]
    assert "stop" in reasons
    assert set(reasons) <= {"stop", "length"}


def test_any_object_will_do_and_others_are_answered_freely_beside(server):
    pytest.importorskip("llguidance")
    free = server.chat("What is red?", temperature=0, max_tokens=20)["choices"][0]["message"]["content"]
    found = {}

    def ask(place):
        form = {"response_format": {"type": "json_object"}} if place % 2 else {}
        found[place] = server.chat("What is red?", temperature=place % 2, seed=place, max_tokens=20, **form)

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place, answer in found.items():
        choice = answer["choices"][0]
        said = choice["message"]["content"]
        if place % 2 == 0:
            assert said == free
        elif choice["finish_reason"] == "stop":
            assert isinstance(json.loads(said), dict)
        else:
            assert said.lstrip().startswith("{")


def nested(depth: int):
    schema = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def options(count: int, **more):
    properties = {f"p{number}": {"type": "integer"} for number in range(count)}
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


LARGE = {
    "optional properties": options(1500),
    "required properties": options(2000, required=[f"p{number}" for number in range(2000)]),
    "optional properties further in": {"type": "array", "items": options(900), "minItems": 1},
    "strings": {"enum": [f"value {number}" for number in range(10_000)]},
    "kinds": {
        "anyOf": [
            {"type": "object", "properties": {"k": {"const": n}, f"x{n}": {"type": "null"}}, "required": ["k"]}
            for n in range(300)
        ]
    },
    "repeats": {"type": "string", "pattern": "^((a|b|[c-z]+){500}){500}$"},
    "characters": {"type": "string", "minLength": 100_000, "maxLength": 1_000_000},
    "items": {"type": "array", "items": {"type": "integer"}, "minItems": 10_000, "maxItems": 10**9},
    "depth": nested(80),
    "itself": {"$defs": {"a": options(0) | {"properties": {"b": {"$ref": "#/$defs/a"}}}}, "$ref": "#/$defs/a"},
}


@pytest.mark.parametrize("schema", LARGE.values(), ids=LARGE)
def test_large_schemas_are_answered_by(server, schema):
    pytest.importorskip("llguidance")
    response = server.post(CHAT, **held_to(schema, temperature=2, seed=1, max_tokens=60))
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    if choice["finish_reason"] == "stop":
        json.loads(choice["message"]["content"])
    else:
        assert choice["finish_reason"] == "length"


def test_while_a_schema_is_compiled_others_are_answered(server, monkeypatch):
    pytest.importorskip("llguidance")
    goes_on = threading.Event()
    monkeypatch.setattr(trial, "is_compiled", lambda grammar: goes_on.wait(60))
    asked = held_to({"type": "string", "maxLength": 5}, max_tokens=4)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(server.post, CHAT, **asked)
        assert server.chat("What is red?", max_tokens=4)["choices"]
        assert not slow.done()
        goes_on.set()
        assert slow.result().status_code == 200


def test_a_repeated_schema_is_compiled_once_for_each_model_and_answered_alike_by_all_threads(server, monkeypatch):
    llguidance = pytest.importorskip("llguidance")
    monkeypatch.setattr(grammar, "COMPILED", 2)
    compiled, real = [], llguidance.LLMatcher

    class Counting:
        grammar_from_json_schema = staticmethod(real.grammar_from_json_schema)

        def __new__(cls, *given, **named):
            compiled.append(given[1])
            return real(*given, **named)

    def answer(name, place=0):
        schema = options(40, title=name, required=["p3"])  # which no other test has
        asked = held_to(schema, temperature=2, seed=place % 2, max_tokens=60) | {"model": name}
        return server.post(CHAT, **asked).json()["choices"]

    names = ["run", "second"]
    expected = {(name, place): answer(name, place) for name in names for place in range(2)}
    monkeypatch.setattr(llguidance, "LLMatcher", Counting)
    with ThreadPoolExecutor(8) as pool:
        asked = [(name, place) for place in range(8) for name in names]
        for (name, place), found in zip(asked, pool.map(lambda one: answer(*one), asked), strict=True):
            assert found == expected[name, place % 2]
    assert not compiled
    for other in ("x", "y"):
        server.post(CHAT, **held_to({"const": other}, max_tokens=4))
    assert (answer("run"), answer("second")) == (expected["run", 0], expected["second", 0])
    assert len(compiled) == 3  # the two others, and the one that had to make room for them


def test_a_schema_that_turns_out_too_intricate_ends_its_answer_in_a_sentence(server, monkeypatch):
    pytest.importorskip("llguidance")
    monkeypatch.setitem(trial.LIMITS, "max_items_in_row", 50)
    response = server.post(CHAT, **held_to(options(200), max_tokens=20))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")
    assert "too intricate" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (held_to({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (held_to({"type": "object", "minProperties": 2, "x-guidance": {"lenient": True}}), "minProperties"),
        (held_to({"properties": {"const": {"type": "object", "minProperties": 2}}}), "minProperties"),
        (held_to({"type": "nothing"}), "nothing"),
        (held_to({"type": "string", "pattern": "(ab"}), "regex parse error: unclosed group"),
        (held_to({"$ref": "http://example.org/x"}), "cannot be held"),
        (held_to({"description": "x" * 300_000}), "256 KiB"),
        (
            held_to({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 2}}, "$ref": "#/$defs/a"}),
            "no answer is valid by it",
        ),
        (held_to(nested(300)), "nested too deeply"),
        (held_to({"type": "integer", "multipleOf": 999_983}), "takes too long, or too much memory"),
        (held_to(POINT, stop="}"), "stop"),
        (held_to(POINT, tools=[{"type": "function", "function": {"name": "add"}}]), "tools"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        (held_to({"$ref": "#"}), "answers cannot be held to this schema"),
        (held_to({"type": "integer", "minimum": 5, "maximum": 3}), "minimum (5) is greater"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "a", "schema": {}}}}, "json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
    ],
)
def test_what_answers_cannot_be_held_to_is_refused(server, fields, said):
    pytest.importorskip("llguidance")
    response = server.post(CHAT, **{"model": "run", "messages": QUESTION, "max_tokens": 4, **fields})
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


def test_what_looks_like_a_keyword_among_values_and_names_of_a_schema_is_none(server):
    pytest.importorskip("llguidance")
    names = {"minProperties": True, "enum": {"enum": [{"minProperties": 3}]}}
    schema = {"type": "object", "properties": names, "required": ["enum"], "examples": [{"minProperties": 9}]}
    schema |= {"default": {"minProperties": 9}, "additionalProperties": False}
    response = server.post(CHAT, **held_to(schema, max_tokens=4))
    assert response.status_code == 200, response.text
    response = server.post(CHAT, **held_to({"const": {"minProperties": 3}}, max_tokens=60))
    assert json.loads(response.json()["choices"][0]["message"]["content"]) == {"minProperties": 3}


def test_without_the_library_json_answers_are_refused_with_what_to_install(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    response = server.post(CHAT, **held_to(POINT, max_tokens=4))
    assert response.status_code == 400
    assert "install llguidance" in response.json()["error"]["message"]


def test_embeddings_are_the_mean_of_the_final_hidden_state(server, trained):
    texts = ["red is", "a much longer text, which is about nothing"]
    answer = server.post(EMBEDDINGS, model="second", input=texts).json()
    opened = open_model(trained[1])
    ids = [opened.encoder.text_prompt(text) for text in texts]
    for one, tokens in zip(answer["data"], ids, strict=True):
        with torch.inference_mode():
            states = opened.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]
        expected = torch.nn.functional.normalize(states.mean(0), dim=0)
        assert torch.allclose(torch.tensor(one["embedding"]), expected, atol=1e-5)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    coded = server.post(EMBEDDINGS, model="second", input=ids, encoding_format="base64").json()["data"][1]["embedding"]
    raw = base64.b64decode(coded)
    assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == pytest.approx(answer["data"][1]["embedding"])
    assert server.post(EMBEDDINGS, model="run", input="red is").json()["data"] != answer["data"][:1]


@pytest.mark.parametrize(
    ("given", "said"), [([], "input"), ([""], "input"), ("word " * 2000, "512"), ([10**9], "vocabulary")]
)
def test_texts_that_have_no_embedding_are_refused(server, given, said):
    response = server.post(EMBEDDINGS, model="run", input=given)
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


def test_fewer_dimensions_are_refused_with_what_to_do(server):
    error = server.post(EMBEDDINGS, model="run", input="red", dimensions=8).json()["error"]
    assert error["message"] == "dimensions: it must be left out."


def test_adapters_come_and_go_while_others_are_answered(trained, server):
    first, second = trained
    ask = {"messages": QUESTION, "temperature": 0, "max_tokens": 12}
    expected = {name: server.post(CHAT, model=name, **ask).json()["choices"] for name in ("run", "second", "base")}
    long = {"model": "late", "prompt": "red is", "temperature": 0, "max_tokens": 200}
    whole = server.post(COMPLETIONS, **{**long, "model": "second"}).json()["choices"][0]["text"]
    with serving(first, api_key="right-key-1", loads_adapters=True) as other:
        other.client.headers["authorization"] = "Bearer right-key-1"
        assert other.post(CHAT, model="late", **ask).status_code == 404
        for _ in range(2):  # loaded, used, unloaded under way, loaded again
            loaded = other.post("/v1/load_lora_adapter", lora_name="late", lora_path=str(second))
            assert loaded.status_code == 200, loaded.text
            assert other.post(CHAT, model="late", **ask).json()["choices"] == expected["second"]
            assert other.post(CHAT, model="base", **ask).json()["choices"] == expected["base"]
            again = other.post("/v1/load_lora_adapter", lora_name="late", lora_path=str(second))
            assert (again.status_code, "taken" in again.text) == (400, True)
            with other.client.stream("POST", COMPLETIONS, json={**long, "stream": True}) as response:
                lines = response.iter_lines()
                said = [next(lines)]
                gone = other.post("/v1/unload_lora_adapter", lora_name="late")
                assert gone.status_code == 200, gone.text
                said += [line for line in lines if line]
            assert said[-1] == "data: [DONE]"
            pieces = [json.loads(line.removeprefix("data: ")) for line in said[:-1]]
            assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole
            assert other.post(CHAT, model="late", **ask).status_code == 404
            assert other.post(CHAT, model="run", **ask).json()["choices"] == expected["run"]
        assert [one["id"] for one in other.client.get("/v1/models").json()["data"]] == ["run", "base"]
        for name, status in (("late", 404), ("run", 400), ("base", 400)):
            assert other.post("/v1/unload_lora_adapter", lora_name=name).status_code == status
        for path, said in (("/nowhere", "no run"), (str(first.parent), "no run")):
            refused = other.post("/v1/load_lora_adapter", lora_name="x", lora_path=path)
            assert (refused.status_code, said in refused.text) == (400, True)
        del other.client.headers["authorization"]
        refused = other.post("/v1/load_lora_adapter", lora_name="x", lora_path=str(second))
        assert refused.status_code == 401


def test_adapters_stay_as_they_are_unless_the_server_was_started_for_it(server, trained, tmp_path):
    path = str(trained[1])
    assert server.post("/v1/load_lora_adapter", lora_name="x", lora_path=path).status_code == 404
    assert server.post("/v1/unload_lora_adapter", lora_name="second").status_code == 404
    with pytest.raises(UserError, match="key"):
        prepare(tmp_path, {}, Options(loads_adapters=True))


def test_a_draft_with_another_vocabulary_is_refused(trained, tmp_path):
    from export.models import make_model

    other = make_model(tmp_path / "other", "qwen2")
    with pytest.raises(UserError, match="another vocabulary"):
        prepare(trained[0], {}, Options(draft=str(other)))


def test_a_draft_changes_no_answer(trained, tiny_model, server):
    ask = {"model": "run", "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    expected = server.post(CHAT, **ask).json()["choices"]
    with serving(trained[0], draft=str(tiny_model)) as other:
        assert [other.post(CHAT, **ask).json()["choices"] for _ in range(3)] == [expected] * 3
