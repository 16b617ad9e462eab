"""The official `openai` client, as its users call it."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import threading

import pytest
from pydantic import BaseModel, Field

from export.models import make_run
from serve.serving import serving

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.slow
QUESTION = [{"role": "user", "content": "What is red?"}]
SAID = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_whole_and_streamed_answers(client):
    ask = {"model": "run", "messages": QUESTION, "temperature": 0, "max_tokens": 8}
    answer = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
    assert answer.usage.completion_tokens == 8
    assert len(answer.choices[0].logprobs.content) == 8
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == answer.choices[0].message.content
    assert chunks[-1].usage == answer.usage
    text = client.completions.create(model="second", prompt="red is", max_tokens=6, temperature=0)
    pieces = client.completions.create(model="second", prompt="red is", max_tokens=6, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == text.choices[0].text
    assert [model.id for model in client.models.list()] == ["run", "second", "base"]


def test_errors_are_the_ones_it_knows(client, trained):
    with pytest.raises(openai.NotFoundError, match="no such model"):
        client.chat.completions.create(model="other", messages=QUESTION)
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="run", prompt="a", max_tokens=100_000)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="n:"):
        client.chat.completions.create(model="run", messages=QUESTION, n=3)
    with serving(trained[0], api_key="right-key-1", batch=1, queue=1) as server:
        for key, kind in (("wrong-key-1", openai.AuthenticationError), ("right-key-1", openai.RateLimitError)):
            other = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
            found = []

            def ask(other=other, found=found):
                try:
                    other.completions.create(model="run", prompt="a", max_tokens=300, temperature=3)
                except openai.APIError as error:
                    found.append(type(error))

            threads = [threading.Thread(target=ask) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert kind in found


def test_streams_that_are_left_free_their_cache(client, server):
    stream = client.completions.create(model="run", prompt="a", max_tokens=500, stream=True, temperature=2)
    next(iter(stream))
    stream.close()
    server.wait_idle()

    async def cancelled() -> None:
        other = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        work = other.completions.create(model="run", prompt="a", max_tokens=500, temperature=2)
        task = asyncio.create_task(work)
        while not server.engine.running:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await other.close()

    before = server.engine.stats.cancelled
    asyncio.run(cancelled())
    server.wait_idle()
    assert server.engine.stats.cancelled == before + 1
    assert server.engine.cached_tokens == 0


def test_calls_of_tools(tiny_model, tmp_path):
    data = tmp_path / "calls.jsonl"
    turns = [{"role": "user", "content": "add 2 and 3"}, {"role": "assistant", "content": SAID}]
    data.write_text("".join(json.dumps({"messages": turns, "tools": [TOOL]}) + "\n" for _ in range(32)))
    changes = {"data": str(data), "eval": str(data), "method": "full", "steps": 200, "learning_rate": 1e-2}
    run = make_run(tmp_path / "made", tiny_model, **changes, sequence_length=512)
    with serving(run) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        ask = {"model": "run", "messages": turns[:1], "tools": [TOOL], "temperature": 0, "max_tokens": 90}
        answer = client.chat.completions.create(**ask).choices[0]
        assert answer.finish_reason == "tool_calls", answer
        called = answer.message.tool_calls[0].function
        assert (called.name, json.loads(called.arguments)) == ("add", {"a": 2, "b": 3})
        chunks = list(client.chat.completions.create(**ask, stream=True))
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        assert [call.function.name for call in calls] == ["add"]
        assert chunks[-1].choices[0].finish_reason == "tool_calls"


class Point(BaseModel):
    x: int = Field(ge=0, le=99)
    name: str = Field(max_length=4)


def test_answers_of_a_type(client):
    pytest.importorskip("llguidance")
    parsed = []
    for seed in range(4):
        ask = {"model": "run", "messages": QUESTION, "seed": seed, "max_tokens": 200, "temperature": 2}
        try:
            parsed.append(client.chat.completions.parse(**ask, response_format=Point).choices[0].message.parsed)
        except openai.LengthFinishReasonError:
            continue
    assert parsed
    assert all(isinstance(one, Point) for one in parsed)


def test_embeddings(client, server):
    answer = client.embeddings.create(model="run", input=["red is", "blue is"])
    coded = server.post("/v1/embeddings", model="run", input=["red is"], encoding_format="base64").json()
    raw = base64.b64decode(coded["data"][0]["embedding"])
    assert answer.data[0].embedding == pytest.approx(list(struct.unpack(f"<{len(raw) // 4}f", raw)))
    assert sum(one * one for one in answer.data[1].embedding) == pytest.approx(1, abs=1e-5)
