"""`tunesmith serve` over real HTTP: what clients of OpenAI's API expect, and what strangers must not get."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import httpx2
import pytest
import torch
from tokenizers import decoders

from export.models import make_run, make_tokenizer
from serve.serving import free_port, serving
from tunesmith.data.chat import Encoder
from tunesmith.data.types import Message
from tunesmith.errors import UserError
from tunesmith.infer.sampling import Token
from tunesmith.run.open import open_model
from tunesmith.serve import endpoints, reply
from tunesmith.serve.answer import Answer, tool_calls
from tunesmith.serve.models import Served
from tunesmith.serve.server import Options, listen, prepare
from tunesmith.serve.shapes import Shape

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTION = [{"role": "user", "content": "What is red?"}]


def expected_text(folder, question, most=20) -> str:
    """Asked as in training, answered by transformers."""
    opened = open_model(folder)
    ids = torch.tensor([opened.encoder.prompt([Message("user", question)])])
    ends = sorted(opened.encoder.end_ids)
    with torch.inference_mode():
        made = opened.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=most,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=0,
        )
    return opened.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


def test_answers_of_each_adapter_and_the_base_are_those_of_transformers(server, trained, tiny_model):
    found = {}
    for name, folder in (("run", trained[0]), ("second", trained[1]), ("base", tiny_model)):
        answer = server.chat("What is red?", model=name, temperature=0, max_tokens=20)
        found[name] = answer["choices"][0]["message"]["content"]
        assert found[name] == expected_text(folder, "What is red?")
        assert answer["usage"]["total_tokens"] == sum(list(answer["usage"].values())[:2])
        assert answer["choices"][0]["finish_reason"] in ("stop", "length")
    assert len(set(found.values())) == 3
    listed = server.client.get("/v1/models").json()["data"]
    assert [one["id"] for one in listed] == ["run", "second", "base"]


def test_a_stream_says_the_same_with_usage_at_its_end(server):
    options = {"model": "run", "messages": QUESTION, "temperature": 0, "max_tokens": 20}
    whole = server.post(CHAT, **options).json()
    chunks = server.stream(CHAT, **options, stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    said = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])
    assert said == whole["choices"][0]["message"]["content"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    text = {"model": "run", "prompt": "red is", "temperature": 0, "max_tokens": 9}
    pieces = server.stream(COMPLETIONS, **text)
    complete = server.post(COMPLETIONS, **text).json()["choices"][0]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == complete["text"]


def test_stop_strings_end_an_answer_before_them(server):
    options = {"model": "run", "prompt": "red is", "temperature": 0, "max_tokens": 30, "logprobs": 0}
    full = server.post(COMPLETIONS, **options).json()["choices"][0]
    stop = full["text"][4:6]
    cut = server.post(COMPLETIONS, **options, stop=["never seen", stop]).json()
    assert cut["choices"][0]["text"] == full["text"][: full["text"].index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] < 30
    pieces = server.stream(COMPLETIONS, **options, stop=stop)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == cut["choices"][0]["text"]


def test_log_probabilities_are_the_models(server, trained):
    answer = server.chat("What is red?", temperature=0.7, seed=3, max_tokens=5, logprobs=True, top_logprobs=3)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == 5
    opened = open_model(trained[0])
    prompt = opened.encoder.prompt([Message("user", "What is red?")])
    with torch.inference_mode():
        first = torch.log_softmax(opened.model(torch.tensor([prompt])).logits[0, -1], -1)
    best = first.topk(3)
    assert [one["logprob"] for one in entries[0]["top_logprobs"]] == pytest.approx(best.values.tolist(), abs=1e-4)
    known = {round(value, 3) for value in first.tolist()}
    assert round(entries[0]["logprob"], 3) in known


def test_seeds_are_reproducible(server):
    def say(seed):
        return server.chat("What is red?", temperature=1.2, seed=seed, max_tokens=16)["choices"][0]["message"][
            "content"
        ]

    assert say(1) == say(1)
    assert say(1) != say(2)


def test_tools_go_through_the_template_and_calls_come_back():
    said = 'Well. <tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    text, calls = tool_calls(said)
    assert text == "Well."
    assert calls[0]["function"] == {"name": "add", "arguments": '{"a": 2}'}
    assert tool_calls("<tool_call>no JSON")[0] == "<tool_call>no JSON"
    written = tool_calls('<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}')[1]
    assert written[0]["function"]["arguments"] == '{"a": 2}'  # which is JSON already


def test_without_parallel_calls_an_answer_ends_with_its_first(tiny_model, tmp_path):
    said = '<tool_call>{"name": "add"}</tool_call>' * 2
    turns = [{"role": "user", "content": "add"}, {"role": "assistant", "content": said}]
    tools = [{"type": "function", "function": {"name": "add"}}]
    data = tmp_path / "calls.jsonl"
    data.write_text((json.dumps({"messages": turns, "tools": tools}) + "\n") * 8)
    changes = {"data": str(data), "eval": str(data), "method": "full", "steps": 120, "learning_rate": 1e-2}
    with serving(make_run(tmp_path / "made", tiny_model, **changes, sequence_length=512)) as server:
        ask = {"model": "run", "messages": turns[:1], "tools": tools, "temperature": 0, "max_tokens": 120}
        for fields, count in (({}, 2), ({"parallel_tool_calls": True}, 2), ({"parallel_tool_calls": False}, 1)):
            choice = server.post(CHAT, **ask, **fields).json()["choices"][0]
            assert (len(choice["message"]["tool_calls"]), choice["finish_reason"]) == (count, "tool_calls")
            deltas = [chunk["choices"][0]["delta"] for chunk in server.stream(CHAT, **ask, **fields)]
            assert sum(len(delta.get("tool_calls", ())) for delta in deltas) == count
        whole = server.post(CHAT, **ask).json()["usage"]["completion_tokens"]
        ask["max_tokens"] = whole * 3 // 4  # in the second call
        choice = server.post(CHAT, **ask).json()["choices"][0]
        assert (len(choice["message"]["tool_calls"]), choice["finish_reason"]) == (1, "length")
        *_, last = (chunk["choices"][0] for chunk in server.stream(CHAT, **ask))
        assert last["finish_reason"] == "length"


def test_tools_are_part_of_the_prompt(server):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    plain = server.chat("What is red?", max_tokens=1)["usage"]["prompt_tokens"]
    with_tool = server.chat("What is red?", max_tokens=1, tools=[tool])["usage"]["prompt_tokens"]
    assert with_tool > plain + 20


@pytest.mark.parametrize(
    ("fields", "status", "code", "said"),
    [
        ({"model": "other"}, 404, "model_not_found", "there are run, second, base"),
        ({"n": 2}, 400, None, "n:"),
        ({"n": True}, 400, None, "n:"),
        ({"store": 0}, 400, None, "store: it must be true or false"),
        ({"surprise": 1}, 400, None, "surprise"),
        ({"logit_bias": {"5": 100}}, 400, None, "logit_bias: it must be empty or left out"),
        ({"frequency_penalty": 2.5}, 400, None, "frequency_penalty: Input should be less than or equal to 2"),
        ({"presence_penalty": "1"}, 400, None, "presence_penalty: Input should be a valid number"),
        ({"repetition_penalty": 0}, 400, None, "repetition_penalty: Input should be greater than 0"),
        ({"top_k": -2}, 400, None, "top_k: Input should be greater than or equal to -1"),
        ({"top_k": 1.5}, 400, None, "top_k: Input should be a valid integer"),
        ({"min_p": 1.1}, 400, None, "min_p: Input should be less than or equal to 1"),
        ({"stop": list("abcdefghijklmnopq")}, 400, None, "at most 16 items"),
        ({"stop": [""]}, 400, None, "stop.0: String should have at least 1 character"),
        ({"stream_options": {"include_usage": True}}, 400, None, "stream_options: say `stream: true`"),
        ({"messages": [{"role": "user", "content": None}]}, 400, None, "messages.0: a message of role user needs"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, 400, None, "tools.0: only tools of type function"),
        ({"tools": [{"type": "function", "function": {"parameters": {}}}]}, 400, None, "tools.0: its function has no"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": "b"}}]}, 400, None, "a JSON schema"),
        ({"max_tokens": 0}, 400, None, "max_tokens: Input should be greater"),
        ({"logprobs": True, "top_logprobs": 21}, 400, None, "top_logprobs: Input should be less"),
        ({"temperature": -1}, 400, None, "temperature"),
        ({"messages": [{"role": "nobody", "content": "a"}]}, 400, None, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, 400, None, "needs its `text`"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, 400, None, "function_call: it must be"),
        ({"safety_identifier": 5, "prompt_cache_key": "a"}, 400, None, "safety_identifier: Input should be a valid st"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            None,
            "image_url`; only text is read",
        ),
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, 400, "context_length_exceeded", "512"),
        ({"messages": [{"role": "user", "content": "x" * 4_000_000}]}, 400, "context_length_exceeded", "characters"),
        ({"max_tokens": 100_000}, 400, "context_length_exceeded", "asked for"),
        ({"messages": [{"role": "user", "content": "x" * (9 << 20)}]}, 413, "body_too_large", "8 MiB"),
    ],
)
def test_bad_requests_are_refused_in_the_shape_clients_know(server, fields, status, code, said):
    response = server.post(CHAT, **{"model": "run", "messages": QUESTION, "max_tokens": 4, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code)
    assert said in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_a_prompt_may_come_as_a_list_of_one_and_its_faults_are_its_own(server):
    ask = {"model": "run", "max_tokens": 4, "temperature": 0}
    ids = server.ready.models.served["run"].encoder.text_prompt("red is")
    alone = server.post(COMPLETIONS, **ask, prompt="red is").json()["choices"]
    assert server.post(COMPLETIONS, **ask, prompt=["red is"]).json()["choices"] == alone
    assert server.post(COMPLETIONS, **ask, prompt=[ids]).json()["choices"] == alone
    for prompt, said in (
        (["a", "b"], "one prompt a request, not 2"),
        ([], "at least 1 item"),
        ([-1], "greater than or equal to 0"),
    ):
        error = server.post(COMPLETIONS, **ask, prompt=prompt).json()["error"]
        assert error["param"].startswith("prompt")
        assert said in error["message"]
    error = server.post(COMPLETIONS, **{**ask, "max_tokens": 100_000}, prompt="a").json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


def test_what_is_no_request_is_refused(server):
    plain = {"content-type": "text/plain"}
    assert server.client.post(CHAT, content=b"{}", headers=plain).status_code == 415
    assert server.client.post(CHAT, content=b"{", headers={"content-type": "application/json"}).status_code == 400
    half = server.client.post(CHAT, content=b'{"a": "\\ud800"}', headers={"content-type": "application/json"}).json()
    assert half["error"]["message"].endswith("hex escape at line 1 column 14.")
    nothing = server.client.post(CHAT, content=b"[]", headers={"content-type": "application/json"}).json()["error"]
    assert (nothing["message"], nothing["param"]) == ("the body: Input should be an object.", None)
    assert server.client.get("/nowhere").json()["error"]["message"]
    assert server.client.get(CHAT).status_code == 405
    foreign = server.client.get("/v1/models", headers={"host": "evil.example:8000"})
    assert (foreign.status_code, foreign.json()["error"]["code"]) == (403, "foreign_host")


def test_keys_are_asked_for_and_nothing_that_was_written_is_logged(trained, caplog):
    caplog.set_level(logging.DEBUG)
    with serving(trained[0], api_key="right-key-1") as server:
        ask = {"model": "run", "messages": [{"role": "user", "content": "a secret"}], "max_tokens": 2}
        for headers, status in (
            ({}, 401),
            ({"authorization": "Bearer wrong-key-1"}, 401),
            ({"authorization": "Basic right-key-1"}, 401),
            ({"authorization": "Bearer right-key-1"}, 200),
        ):
            assert server.client.post(CHAT, json=ask, headers=headers).status_code == status
        assert server.client.get("/health").status_code == 200
        assert server.client.get("/metrics").status_code == 401
    lines = [record.getMessage() for record in caplog.records if record.name.startswith(("tunesmith", "uvicorn"))]
    assert any(CHAT in line for line in lines)
    assert not any("secret" in line or "right-key" in line for line in lines)


def test_what_is_refused_is_logged_without_what_was_written(server, monkeypatch, caplog):
    monkeypatch.setattr(endpoints, "BODY_SECONDS", 0.2)
    caplog.set_level(logging.DEBUG)

    def ask(text, **headers):
        messages = [{"role": "user", "content": text}]
        return server.client.post(CHAT, json={"model": "run", "messages": messages}, headers=headers).status_code

    assert ask("a secret", host="evil.example") == 403
    assert ask("secret " * 2000) == 400
    assert ask("secret " * (9 << 18)) == 413
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head.encode() + b'{"model": "secret')
        assert client.recv(12) == b"HTTP/1.1 408"
    until = time.monotonic() + 10
    while f"{CHAT} 408" not in caplog.text and time.monotonic() < until:  # it is logged after it was sent
        time.sleep(0.01)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith(("tunesmith", "uvicorn"))]
    for status in (403, 400, 413, 408):
        assert any(f"{CHAT} {status}" in line for line in lines), status
    assert not any("secret" in line for line in lines)


def test_without_a_key_only_this_machine_is_served_and_keys_must_be_long(tmp_path):
    for options in (Options(host="0.0.0.0"), Options(host="192.168.0.9"), Options(api_key="short")):
        with pytest.raises(UserError, match="key"):
            prepare(tmp_path, {}, options)


def test_a_run_over_another_base_is_no_adapter_here(trained, tmp_path):
    from export.models import make_run
    from tiny_model import make_tiny_model

    other = make_run(tmp_path, make_tiny_model(tmp_path / "model", initializer_range=0.2), steps=1)
    with pytest.raises(UserError, match="another base"):
        prepare(trained[0], {"other": other}, Options())


def test_a_client_that_leaves_frees_its_cache(server):
    body = json.dumps({"model": "run", "prompt": "a", "max_tokens": 500, "stream": True, "seed": 1, "temperature": 3})
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    before = server.engine.stats.cancelled
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        assert client.recv(10)
    server.wait_idle()
    assert server.engine.stats.cancelled == before + 1
    assert server.engine.cached_tokens == 0


def test_a_client_that_does_not_read_is_left(trained, monkeypatch):
    monkeypatch.setattr(reply, "READ_SECONDS", 0.2)
    sent = []

    class Unread(reply.Reply):
        async def __call__(self, scope, receive, send):
            async def stuck(message):
                sent.append(message)
                await (asyncio.sleep(60) if len(sent) > 3 else send(message))

            await super().__call__(scope, receive, stuck)

    monkeypatch.setattr(endpoints, "Reply", Unread)
    with serving(trained[0]) as server:
        with pytest.raises(httpx2.RemoteProtocolError):
            server.stream(COMPLETIONS, model="run", prompt="a", max_tokens=400, temperature=3)
        server.wait_idle()
        assert len(sent) == 4
        assert server.engine.cached_tokens == 0


def ask_many(server, clients: int, seconds: float) -> int:
    """Each client asks what only its own answer fits, again and again; returns how many answers were checked."""
    names = ["run", "second", "base"]
    expected = {
        n: server.chat(f"number {n}", model=names[n % 3], temperature=0, max_tokens=3 + n % 7)["choices"][0]["message"]
        for n in range(clients)
    }

    async def one(client: httpx2.AsyncClient, n: int, until: float) -> int:
        count = 0
        while count == 0 or time.monotonic() < until:
            ask = {"model": names[n % 3], "messages": [{"role": "user", "content": f"number {n}"}], "temperature": 0}
            response = await client.post(CHAT, json={**ask, "max_tokens": 3 + n % 7})
            assert response.status_code == 200, response.text
            assert response.json()["choices"][0]["message"] == expected[n], n
            count += 1
        return count

    async def all_of_them() -> int:
        limits = httpx2.Limits(max_connections=clients)
        async with httpx2.AsyncClient(base_url=server.url, timeout=60, limits=limits, trust_env=False) as client:
            until = time.monotonic() + seconds
            return sum(await asyncio.gather(*(one(client, n, until) for n in range(clients))))

    return asyncio.run(all_of_them())


def test_64_clients_at_once_each_have_their_own_answer(server):
    assert ask_many(server, 64, 1.0) >= 64
    server.wait_idle()
    assert server.engine.cached_tokens == 0


@pytest.mark.slow
def test_64_clients_for_five_minutes_in_bounded_memory(server):
    import psutil

    ask_many(server, 64, 20)
    before = psutil.Process().memory_info().rss
    assert ask_many(server, 64, 300) > 1000
    server.wait_idle()
    assert psutil.Process().memory_info().rss < before + (64 << 20)


def test_health_and_metrics(server):
    assert server.client.get("/health").json() == {"status": "ok"}
    server.chat("hello", max_tokens=2)
    lines = dict(line.rsplit(" ", 1) for line in server.client.get("/metrics").text.splitlines() if line[0] != "#")
    assert float(lines["tunesmith_generated_tokens_total"]) >= 2
    assert float(lines["tunesmith_cache_tokens"]) == 0
    assert any(CHAT in name and "200" in name for name in lines)


def test_text_is_given_out_as_whole_characters_and_never_twice(trained):
    tokenizer = open_model(trained[0]).tokenizer
    text = "naïve 日本 😀 end STOP more"
    ids = tokenizer.encode(text, add_special_tokens=False)
    answer, pieces = Answer(tokenizer, ["STOP"]), []
    for token in ids:
        piece = answer.push(Token(token))
        pieces += [piece.text] if piece else []
        if answer.is_stopped:
            break
    assert "".join(pieces) == "naïve 日本 😀 end "
    assert not any("\ufffd" in piece for piece in pieces)
    broken = Answer(tokenizer, [])
    said = [broken.push(Token(token)) for token in ids[3:4] + ids[:2] + ids[8:9]] + [broken.rest()]
    made = "".join(piece.text for piece in said if piece)
    assert made == tokenizer.decode(ids[3:4] + ids[:2] + ids[8:9])


@pytest.mark.parametrize("kind", ["sentencepiece", "gemma"])
def test_a_character_of_several_byte_tokens_comes_whole(kind):
    """A byte fallback's decoder gives one replacement character for each byte that is no character yet."""
    tokenizer = make_tokenizer(kind)
    text = "a 😀 and 👨\u200d👩 é漢"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "<0xF0>" in tokenizer.convert_ids_to_tokens(ids)
    answer = Answer(tokenizer, [])
    pieces = [piece.text for piece in (*(answer.push(Token(token)) for token in ids), answer.rest()) if piece]
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "".join(pieces).strip() == text


def test_a_token_of_log_probabilities_has_the_space_that_it_begins_with():
    tokenizer = make_tokenizer("sentencepiece")
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    ids = tokenizer.encode("who are", add_special_tokens=False)
    assert tokenizer.decode(ids) == "who are"
    shape = Shape(Served("run", Encoder(tokenizer, template=None, train_on="all"), False, frozenset()))
    assert "".join(map(shape._token_text, ids)) == " who are"


def test_sigterm_finishes_what_is_under_way_and_nothing_new_begins(runs, trained, tmp_path):
    port = free_port()
    pid = runs.start(tmp_path, "serve", str(trained[0]), "--port", str(port))
    ask = {"model": "run", "prompt": "a secret", "max_tokens": 480, "stream": True, "seed": 4, "temperature": 5}
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as client:
        until = time.monotonic() + 30
        while True:
            try:
                assert client.get("/health").status_code == 200
                break
            except httpx2.TransportError:
                assert time.monotonic() < until
                time.sleep(0.05)
        with client.stream("POST", COMPLETIONS, json=ask) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(pid, signal.SIGTERM)
            rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    ended = runs.wait()
    assert ended.code == 0, ended.err
    assert f"POST {COMPLETIONS} 200" in ended.err
    assert "secret" not in ended.err + ended.out
    assert "leaked" not in ended.err


def test_what_a_server_kept_from_being_looked_through_is_given_back(monkeypatch):
    """Libraries count what is left when the process ends, and print it."""
    frozen = []
    server = SimpleNamespace(run=lambda: frozen.append(gc.get_freeze_count()))
    before = gc.get_threshold()
    monkeypatch.setattr("tunesmith.serve.server.make_server", lambda ready, options: server)
    try:
        listen(None, Options())
    finally:
        gc.set_threshold(*before)
    assert frozen[0] > 1000
    assert gc.get_freeze_count() == 0


@pytest.mark.slow
def test_the_server_does_what_its_description_says(trained):
    pytest.importorskip("schemathesis")
    key = "right-key-1"
    with serving(trained[0], {"second": trained[1]}, api_key=key, loads_adapters=True, length=256) as server:
        check_description(server, key)


def check_description(server, key):
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--max-examples", "30"]
    # What fits into the context is not the schema's to say.
    command += ["--request-timeout", "30", "--exclude-checks", "positive_data_acceptance"]
    command += ["--header", f"Authorization: Bearer {key}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
