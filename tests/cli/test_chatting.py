"""`tunesmith chat` with what comes through a pipe."""

from __future__ import annotations

import io
import sys

import pytest

from tunesmith.cli.main import main
from tunesmith.infer.generate import stream
from tunesmith.run.open import open_model


def chatted(monkeypatch, typed: bytes, *words: str) -> object:
    """The exit code. As in the locale C, where bytes that are no text are let through."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8", errors="surrogateescape"))
    with pytest.raises(SystemExit) as ended:
        main(["chat", *words])
    return ended.value.code


def test_each_line_of_a_pipe_is_answered(tiny_model, monkeypatch, capsys):
    assert chatted(monkeypatch, b"Who?\nAnd what is red?\n", str(tiny_model), "--max-tokens", "3") == 0
    assert len(capsys.readouterr().out.splitlines()) >= 2


@pytest.mark.parametrize(("typed", "words", "said"), [
    (b"Who?\n\xff\n", (), "a question is no text in UTF-8"),
    (b"", ("--prompt", "a\udcff"), "--prompt is no text in UTF-8"),
    (b"word " * 200 + b"\n", (), "tokens, and this model takes 512 with its answer"),
])  # fmt: skip
def test_what_cannot_be_asked_is_said_in_a_sentence(tiny_model, monkeypatch, capsys, typed, words, said):
    assert chatted(monkeypatch, typed, str(tiny_model), "--max-tokens", "3", *words) not in (0, 70)
    assert said in " ".join(capsys.readouterr().err.split())


def test_an_answer_has_no_more_tokens_than_the_model_takes(tiny_model, monkeypatch):
    opened, given = open_model(tiny_model), {}

    def generate(*, streamer, **options):
        given.update(options)
        streamer.end()

    monkeypatch.setattr(opened.model, "generate", generate)
    list(stream(opened.model, opened.encoder, [{"role": "user", "content": "w" * 450}], max_new_tokens=100))
    assert given["max_new_tokens"] == 512 - given["input_ids"].shape[1] < 100
