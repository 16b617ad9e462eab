"""A judge over real HTTP, by a stand-in server that follows a script of faults."""

from __future__ import annotations

import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tunesmith.errors import UserError
from tunesmith.evaluate import judge as judges
from tunesmith.evaluate.judge import Judge, judge_all

KEY = "sk-secret-of-nobody"


class StandIn(ThreadingHTTPServer):
    """Prefers the answer with more of the letter x; likes the first place where both are alike and `is_biased`."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults: list = []
        self.asked: list[dict] = []
        self.times: list[float] = []
        self.keys: set[str | None] = set()
        self.is_biased = False
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_POST(self):
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(content)
            self.server.times.append(time.monotonic())
            self.server.keys.add(self.headers.get("Authorization"))
            fault = self.server.faults.pop(0) if self.server.faults else None
        if fault == "cut off":
            self.connection.close()
            return
        status, headers, body = fault or (200, {}, self._answer(content["messages"][-1]["content"]))
        sent = body if isinstance(body, bytes) else json.dumps({"choices": [{"message": {"content": body}}]}).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(sent))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(sent)

    def _answer(self, text: str) -> str:
        if "[Assistant B]" not in text:
            return f"Fine. Rating: [[{min(10, 1 + text.count('x'))}]]"
        first, second = (part.count("x") for part in text.split("[Assistant B]"))
        if first == second:
            return "[[A]]" if self.server.is_biased else "I cannot tell. [[C]]"
        return "Clearly. [[A]]" if first > second else "Clearly. [[B]]"

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    made = StandIn()
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def judge_of(server: StandIn, **options) -> Judge:
    return Judge(server.url, "stand-in", KEY, **{"first_wait": 0.01, "timeout": 5.0, **options})


def test_pairs_are_judged_in_both_orders(server):
    judge = judge_of(server)
    found = judge.choose(["hello?", "more?"], ["xx", "x"], ["x", "."])
    assert (found["win"], found["orders"], found["length"], found["other_length"]) == (1.0, [1.0, 1.0], 3, 2)
    assert judge.choose(["hello?"], ["."], ["x"])["win"] == 0.0
    assert judge.choose(["hello?"], ["x"], ["x"])["win"] == 0.5
    server.is_biased = True
    biased = judge.choose(["hello?"], ["x"], ["x"])
    assert (biased["win"], biased["orders"]) == (0.5, [1.0, 0.0])
    assert server.keys == {f"Bearer {KEY}"}


def test_each_turn_is_rated_after_the_conversation_before_it(server):
    found = judge_of(server).rate(["one?", "two?"], ["xx", "xxx"], ["a reference"])
    assert (found["scores"], found["score"], found["malformed"]) == ([3.0, 6.0], 4.5, 0)
    first, second = (one["messages"][-1]["content"] for one in server.asked)
    assert "a reference" in first
    assert "two?" not in first
    assert "one?" in second
    assert "a reference" not in second


def test_what_passes_is_tried_again_and_as_late_as_the_server_asks(server):
    server.faults = [(503, {}, b"busy"), "cut off", (429, {"Retry-After": "0.4"}, b"slow down")]
    assert judge_of(server).rate(["a?"], ["x"], None)["score"] == 2.0
    assert len(server.asked) == 4
    assert server.times[3] - server.times[2] >= 0.4


def test_a_rate_limit_holds_back_all_that_ask(server):
    server.faults = [(429, {"Retry-After": "0.5"}, b"")]
    judge = judge_of(server)
    judge.rate(["a?"], ["x"], None)
    began = time.monotonic()
    judge.pauses.until(began + 0.3)
    dict(judge_all([(str(n), lambda: judge.rate(["a?"], ["x"], None)) for n in range(4)]))
    assert min(server.times[2:]) >= began + 0.3


def test_what_cannot_be_read_is_asked_for_again_then_counted(server):
    server.faults = [(200, {}, "no verdict"), (200, {}, b"{not json"), (200, {}, "[[7]]")]
    assert judge_of(server).rate(["a?"], ["x"], None)["score"] == 7.0
    server.faults = [(200, {}, "no verdict"), (200, {}, "[[99]]"), (200, {}, b'{"choices": []}')]
    found = judge_of(server).rate(["a?"], ["x"], None)
    assert (found["score"], found["malformed"]) == (None, 1)


@pytest.mark.parametrize("status", [400, 401, 302])
def test_what_is_in_vain_is_told_at_once_without_the_key(server, status, caplog):
    server.faults = [(status, {"Location": "http://127.0.0.1:9/steal"}, f"bad key {KEY}".encode())]
    judge = judge_of(server)
    with pytest.raises(UserError, match=str(status)) as told:
        judge.rate(["a?"], ["x"], None)
    assert len(server.asked) == 1
    assert KEY not in str(told.value) + repr(judge) + caplog.text


def test_a_judge_that_stays_away_is_given_up(monkeypatch):
    monkeypatch.setattr(judges, "ATTEMPTS", 3)
    with pytest.raises(UserError, match="3 times in a row"):
        Judge("http://127.0.0.1:9/v1", "m", KEY, first_wait=0.01).rate(["a?"], ["x"], None)


def test_a_key_does_not_travel_unencrypted():
    with pytest.raises(UserError, match="unencrypted"):
        Judge("http://judge.example.com/v1", "m", KEY)
    with pytest.raises(UserError, match="no address"):
        Judge("judge.example.com", "m", KEY)
    Judge("http://judge.example.com/v1", "m")


def test_retry_after_may_be_a_date():
    from datetime import UTC, datetime, timedelta
    from email.utils import format_datetime

    found = judges._retry_after(format_datetime(datetime.now(UTC) + timedelta(seconds=60)))
    assert found is not None
    assert 55 < found <= 61
    assert judges._retry_after("soon") is None


def test_judged_questions_are_kept_and_an_interrupted_evaluation_goes_on(server, tiny_model, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from tunesmith.cli.main import app

    path = tmp_path / "questions.jsonl"
    records = [
        {"question_id": n, "category": "c", "turns": [f"say {n}", "again"] if n % 2 else [f"say {n}"]} for n in range(6)
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    monkeypatch.setenv("TUNESMITH_JUDGE_KEY", KEY)
    monkeypatch.setattr(judges, "WORKERS", 1)
    monkeypatch.setattr(judges.judge_all, "__kwdefaults__", {"workers": 1})
    command = ["eval", str(tiny_model), "--tasks", str(path), "--judge", server.url, "--judge-model", "stand-in"]
    command += ["--output", str(tmp_path / "out"), "--json", "--max-tokens", "8"]
    server.faults = [None, None, None, (401, {}, b"")]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 1
    assert "TUNESMITH_JUDGE_KEY" in str(first.exception) + first.output
    before = len(server.asked)
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0, again.output
    found = json.loads(again.stdout)
    assert found["results"][0]["measure"] == "score"
    assert found["results"][0]["items"] == 6
    assert before + len(server.asked[before:]) < 9 + 4  # 9 turns; at most those of the item that failed are repeated
    assert not any(KEY in file.read_text() for file in (tmp_path / "out").glob("*"))
    pair = CliRunner().invoke(app, [*command, "--against", str(tiny_model)])
    assert json.loads(pair.stdout)["wins"][0]["rate"] == 0.5
    assert re.search("judge", str(sorted(file.name for file in (tmp_path / "out").glob("*"))))
