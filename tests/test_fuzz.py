"""500 mutated settings and data files: each trains or is refused in a sentence; no traceback reaches the user."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from tiny import write_data
from tunesmith.cli.main import main
from tunesmith.config.schema import Run
from tunesmith.model import load
from tunesmith.run import assemble

COUNT = int(os.environ.get("TUNESMITH_FUZZ", "25"))
"""Mutants of each of the 5 parts of the settings; more can be asked for."""
COUNTS = [15, pytest.param(max(40, COUNT), marks=pytest.mark.slow)]
"""Of each of the 8 files of data."""
SETTINGS = """\
# A run, as people write them.
model: MODEL
method: lora
lora:
  rank: 4
  alpha: 8
  dropout: 0.1
  targets: [q_proj, v_proj]
  layers: top 1
data:
  - path: train.jsonl
    weight: 2
    name: mine
  - path: more.jsonl
    format: prompt_completion
    fields: {prompt: question}
    limit: 5
eval: held_out.jsonl
train_on: assistant
sequence_length: 64
too_long: truncate
batch_tokens: 256
epochs: 1.5
learning_rate: 2e-4
schedule: cosine
warmup: 0.03
optimizer: adamw
weight_decay: 0.01
max_grad_norm: 1.0
precision: fp32
device: cpu
seed: 7
eval_every: 2
save_every: 2
keep: 1
max_minutes: 10
"""
CHAT = [
    {
        "messages": [
            {"role": "system", "content": "Be."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yo"},
        ]
    },
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": "b", "weight": 1},
        ]
    },
]
KINDS = {
    "chat.jsonl": CHAT * 2,
    "sharegpt.jsonl": [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}] * 3,
    "alpaca.json": [{"instruction": "Add", "input": "1 1", "output": "2"}] * 3,
    "pairs.jsonl": [{"prompt": "a", "completion": "b"}] * 3,
    "text.jsonl": [{"text": "Once upon a time"}] * 3,
    "tokens.jsonl": [{"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, 8]}] * 3,
    "table.csv": "question,answer\nWho?,Me\nWhy?,\"Because, so\"\n",
    "plain.txt": "Once upon a time\n\nthere was a cat.\n",
}  # fmt: skip
GARBAGE = [
    b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\x80", b"\r", b"\t", b"'", b'"', b"{", b"[", b"}", b"]", b":", b"- ", b"&a",
    b"*a", b"!!python/object", b"%", b"@", b"`", b"#", b"|", b">", b"\xe2\x80\xa8", b"\xf0\x9f\x98\x80", b"\\ud800",
    b"<|im_end|>", b"{{x}}", b"{%",
]  # fmt: skip
VALUES = [
    "null", "~", "true", "no", "-1", "0", "1e400", "-1e309", "1e308", "1e-400", "NaN", ".nan", ".inf", "Infinity",
    "9" * 30, "9" * 300, "9" * 500, "1.5", "1:30", "0x10", "08", "2026-01-01", "2147483648", "9223372036854775808",
    "-9223372036854775809", "[]", "{}", "[[]]", "[null]", '{"a": 1}', "[" * 2000, "[" * 60 + "]" * 60, '{"a":' * 2000,
    '"' + "x" * 5000 + '"', '""', '" "', '"\\u0000"', '"\\ud800"', "'", '"', "x", "../..", "/dev/null", ".", "*",
]  # fmt: skip


def delete_line(lines: list[bytes], chance: random.Random) -> None:
    del lines[chance.randrange(len(lines))]


def duplicate_line(lines: list[bytes], chance: random.Random) -> None:
    lines.insert(chance.randrange(len(lines)), chance.choice(lines))


def swap_lines(lines: list[bytes], chance: random.Random) -> None:
    a, b = (chance.randrange(len(lines)) for _ in range(2))
    lines[a], lines[b] = lines[b], lines[a]


def cut_line(lines: list[bytes], chance: random.Random) -> None:
    at = chance.randrange(len(lines))
    lines[at] = lines[at][: chance.randrange(len(lines[at]) + 1)]


def flip(lines: list[bytes], chance: random.Random) -> None:
    at = chance.randrange(len(lines))
    line = bytearray(lines[at])
    if line:
        line[chance.randrange(len(line))] ^= 1 << chance.randrange(8)
    lines[at] = bytes(line)


def insert_garbage(lines: list[bytes], chance: random.Random) -> None:
    at = chance.randrange(len(lines))
    place = chance.randrange(len(lines[at]) + 1)
    lines[at] = lines[at][:place] + chance.choice(GARBAGE) + lines[at][place:]


def replace_value(lines: list[bytes], chance: random.Random) -> None:
    at = chance.randrange(len(lines))
    value = chance.choice(VALUES).encode()
    found = list(re.finditer(rb'(?<=: )("[^"]*"|[^\s,}\]]+)|"[^"]*"', lines[at]))
    if found:
        start, end = chance.choice(found).span()
        lines[at] = lines[at][:start] + value + lines[at][end:]


def rename_key(lines: list[bytes], chance: random.Random) -> None:
    at = chance.randrange(len(lines))
    found = list(re.finditer(rb"\w+(?=\"?:)", lines[at]))
    if found:
        start, end = chance.choice(found).span()
        lines[at] = lines[at][:start] + chance.choice([b"role", b"x", b"", b"path", b"content"]) + lines[at][end:]


def indent(lines: list[bytes], chance: random.Random) -> None:
    at = chance.randrange(len(lines))
    lines[at] = chance.choice([b"  ", b"\t", b"-", b" "]) + lines[at]


MUTATIONS: list[Callable[[list[bytes], random.Random], None]] = [
    delete_line, duplicate_line, swap_lines, cut_line, flip, flip, insert_garbage, insert_garbage,
    replace_value, replace_value, replace_value, rename_key, indent,
]  # fmt: skip


def mutated(content: bytes, chance: random.Random) -> bytes:
    lines = content.split(b"\n")
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        if lines:
            chance.choice(MUTATIONS)(lines, chance)
    content = b"\n".join(lines)
    if chance.random() < 0.05:
        content = content[: chance.randrange(len(content) + 1)]
    if chance.random() < 0.05:
        encoding = chance.choice(["utf-16", "utf-32", "latin-1", "utf-8-sig"])
        content = content.decode("utf-8", "replace").encode(encoding, "replace")
    return content


@pytest.fixture
def here(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path / "train.jsonl", 6)
    write_data(tmp_path / "held_out.jsonl", 2, seed=1)
    (tmp_path / "more.jsonl").write_text('{"question": "Why?", "completion": "So."}\n' * 3)
    # Reading the same tokenizer 500 times is all that would take time.
    for name in ("load_tokenizer", "load_config"):
        real = getattr(load, name)
        known = functools.cache(
            lambda model, trusted, real=real: real(Run(model=model, data="train.jsonl", trust_remote_code=trusted))
        )

        def read(run: Run, real=real, known=known):
            return real(run) if run.objective != "sft" else known(run.model, run.trust_remote_code)

        monkeypatch.setattr(load, name, read)
    return tmp_path


def tunesmith(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code or 0, out.getvalue(), err.getvalue()


def assert_civil(code: int, out: str, err: str, content: bytes) -> None:
    """Exit 0, or sentences that say what is wrong."""
    if code == 70 and (file := re.search(r"traceback is in (\S+\.txt)", err)):
        err += Path(file[1]).read_text()
    assert code in (0, 1), (code, content, err)
    assert "Traceback" not in out + err, (content, err)
    lines = err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert bool(errors) == (code == 1), (content, err)
    assert all(line.startswith(("error: ", "warning: ")) for line in lines), (content, err)
    assert all(15 < len(line) < 1000 for line in errors), (content, err)


@pytest.mark.parametrize("part", range(5))
def test_mutated_settings_train_or_are_refused_in_a_sentence(here, tiny_model, monkeypatch, part):
    """Up to the weights; every tenth goes on for a step, since what is wrong with settings is known before."""
    original = SETTINGS.replace("MODEL", str(tiny_model)).encode()
    codes = []
    for number in range(COUNT * part, COUNT * (part + 1)):
        content = mutated(original, random.Random(f"settings {number}"))
        Path("run.yaml").write_bytes(content)
        with monkeypatch.context() as patch:
            if number % 10:
                patch.setattr(assemble, "assemble", stop)
            ended = tunesmith("train", "run.yaml", f"output=runs/{number}", "steps=1", "max_minutes=1")
        assert_civil(*ended, content)
        codes.append(ended[0])
    assert 3 < sum(codes) < COUNT


NUMBERS = ["0", "-1", "1", "7", "1e308", "1e-320", "1e19", str(2**63 - 1), str(2**63), "9" * 399, "0.1", "null"]


@pytest.mark.parametrize("value", NUMBERS)
def test_strange_numbers_in_any_setting_train_or_are_refused_in_a_sentence(here, tiny_model, monkeypatch, value):
    content = SETTINGS.replace("MODEL", str(tiny_model))
    monkeypatch.setattr(assemble, "assemble", stop)
    for match in re.finditer(r"(\w+): \S+$", content, re.M):
        changed = content[: match.start()] + f"{match[1]}: {value}" + content[match.end() :]
        Path("run.yaml").write_text(changed)
        ended = tunesmith("train", "run.yaml", f"output=runs/{match[1]}")
        assert_civil(*ended, f"{match[1]}: {value}".encode())


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", KINDS)
def test_mutated_data_trains_or_is_refused_in_a_sentence(here, tiny_model, monkeypatch, name, count):
    records = KINDS[name]
    if not isinstance(records, str):
        lines = [json.dumps(record) for record in records]
        records = "[" + ",\n".join(lines) + "]" if name.endswith(".json") else "\n".join(lines) + "\n"
    settings = f"model: {tiny_model}\nsequence_length: 64\nbatch_tokens: 64\nprecision: fp32\ndevice: cpu\n"
    Path("run.yaml").write_text(settings + f"data: {name}\n")
    codes = []
    for number in range(count):
        content = mutated(records.encode(), random.Random(f"{name} {number}"))
        Path(name).write_bytes(content)
        with monkeypatch.context() as patch:
            if number % 8:
                patch.setattr(assemble, "assemble", stop)
            ended = tunesmith("train", "run.yaml", f"output=runs/{number}", "steps=1")
        assert_civil(*ended, content)
        codes.append(ended[0])
    assert 0 < sum(codes) < count or name == "plain.txt"


def stop(*_: object) -> None:
    raise typer.Exit(0)
