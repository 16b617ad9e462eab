"""What answers are worth."""

from __future__ import annotations

import json
import re

import pytest

from tunesmith.config.schema import Reward
from tunesmith.errors import UserError
from tunesmith.rewards import Rewards
from tunesmith.rewards.exact import is_right
from tunesmith.rewards.json_schema import Schema
from tunesmith.rewards.unit_tests import has_passed


@pytest.mark.parametrize(
    ("answer", "wanted", "right"),
    [
        ("The total is $1,200.", "so it is 1200 #### 1,200", True),
        ("12 and then 13", "#### 12", False),
        ("First 7. #### 12", 12, True),
        ("It is 12.0", 12, True),
        ("so x = \\boxed{\\frac{1}{2}} holds", "\\boxed{\\frac{1}{2}}", True),
        ("Paris.", "paris", True),
        ("It is Paris", "Paris", False),
        ("b", ["a", "B"], True),
        ("-3", "3", False),
        ("no number", 3, False),
        ("yes", True, False),
        ("True", True, True),
        ("", "4", False),
    ],
)
def test_exact_answers(answer, wanted, right):
    assert is_right(answer, wanted) == right


def test_a_pattern_finds_what_counts():
    pattern = re.compile("<answer>(.*?)</answer>", re.S)
    assert is_right("<answer> 3 </answer> then <answer>4</answer> 5", 4, pattern)
    assert not is_right("4", 4, pattern)


SCHEMA = {
    "$defs": {"name": {"type": "string", "minLength": 2, "pattern": "^[A-Z]"}},
    "type": "object",
    "required": ["name", "age"],
    "properties": {
        "name": {"$ref": "#/$defs/name"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "maxItems": 2},
        "either": {"oneOf": [{"type": "null"}, {"type": "number", "exclusiveMaximum": 1}]},
    },
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("answer", "fits"),
    [
        ('{"name": "Ann", "age": 3}', True),
        ('```json\n{"name": "Ann", "age": 3, "tags": ["a", "b"], "either": 0.5}\n```', True),
        ('{"name": "Ann", "age": 3.0, "either": null}', True),
        ('Here: {"name": "Ann", "age": 3}', False),
        ('{"name": "ann", "age": 3}', False),
        ('{"name": "A", "age": 3}', False),
        ('{"name": "Ann", "age": true}', False),
        ('{"name": "Ann", "age": -1}', False),
        ('{"name": "Ann"}', False),
        ('{"name": "Ann", "age": 3, "more": 1}', False),
        ('{"name": "Ann", "age": 3, "tags": ["a", "a"]}', False),
        ('{"name": "Ann", "age": 3, "tags": ["c"]}', False),
        ('{"name": "Ann", "age": 3, "either": 1}', False),
        ("[" * 100_000, False),
    ],
)
def test_json_that_fits_a_schema(answer, fits):
    assert Schema(SCHEMA).fits(answer) == fits


def test_a_schema_that_is_not_understood_is_refused(tmp_path):
    for schema, why in (
        ({"properties": {"a": {"format": "date"}}}, "uses `format`"),
        ({"type": "text"}, "unknown type"),
        ({"$ref": "#/$defs/a"}, "which is not in it"),
    ):
        (tmp_path / "schema.json").write_text(json.dumps(schema))
        with pytest.raises(UserError, match=re.escape(why)):
            Schema.read(tmp_path / "schema.json")


RECORD = {"tests": ["assert square(3) == 9", "assert square(-2) == 4"]}


@pytest.mark.parametrize(
    ("answer", "passed"),
    [
        ("Sure:\n```python\ndef square(x):\n    return x * x\n```\nDone.", True),
        ("def square(x): return 9", False),
        ("import os; os._exit(0)", False),
        ("x = bytearray(1 << 29)\ndef square(x): return x * x", False),
        ("open('f', 'wb').write(bytes(1 << 27))\ndef square(x): return x * x", False),
        ("while True: pass", False),
    ],
)
def test_unit_tests_are_run_within_limits(answer, passed):
    assert has_passed(answer, RECORD, seconds=1.0 if "while" in answer else 20.0, memory=1 << 28) == passed


def test_code_under_test_has_no_network():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        place = server.getsockname()
        code = f"import socket\nsocket.create_connection({place}, 1)\ndef square(x): return x * x"
        assert not has_passed(code, RECORD, seconds=20.0, memory=1 << 28)


def test_rewards_are_weighed_and_summed(tmp_path):
    (tmp_path / "own.py").write_text("def half(answer, record):\n    return 0.5 if record['x'] else float('nan')\n")
    rewards = Rewards(
        [
            Reward(kind="exact", weight=2.0),
            Reward(kind="regex", pattern="^<a>.*</a>$", weight=-1),
            Reward(kind="function", function=f"{tmp_path}/own.py:half"),
        ]
    )
    assert rewards.names == ("exact", "regex", "half")
    (found,) = rewards([("<a>4</a>", {"answer": 4, "x": 1}, "d, line 1")])
    assert found == [1.0, 1.0, 0.5]
    assert rewards.total(found) == 1.5
    with pytest.raises(UserError, match="half gave nan for an answer to d, line 1"):
        rewards([("4", {"answer": 4, "x": 0}, "d, line 1")])
    with pytest.raises(UserError, match="half failed on an answer to d, line 1: KeyError"):
        rewards([("4", {"answer": 4}, "d, line 1")])


def test_a_reward_that_ends_the_process_is_said(tmp_path):
    (tmp_path / "ends.py").write_text("import sys\n\ndef at_once(answer, record):\n    sys.exit(3)\n")
    (tmp_path / "script.py").write_text("import sys\nsys.exit()\n")
    with pytest.raises(UserError, match="at_once failed on an answer to d, line 1: SystemExit: 3"):
        Rewards([Reward(kind="function", function=f"{tmp_path}/ends.py:at_once")])([("4", {}, "d, line 1")])
    with pytest.raises(UserError, match=r"script\.py cannot be imported: SystemExit"):
        Rewards([Reward(kind="function", function=f"{tmp_path}/script.py:score")])


@pytest.mark.parametrize("given", ["'high'", "'1'", "None", "[1.0]", "float('inf')"])
def test_what_is_no_number_is_no_reward(tmp_path, given):
    (tmp_path / "mine.py").write_text(f"def reward(answer, record):\n    return {given}\n")
    check = Rewards([Reward(kind="function", function=f"{tmp_path}/mine.py:reward")])
    with pytest.raises(UserError, match=r"gave .* for an answer to d.jsonl, line 3, which is no finite number"):
        check([("text", {}, "d.jsonl, line 3")])


def test_a_function_that_takes_long_is_named(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("tunesmith.rewards.SLOW", 0.05)
    (tmp_path / "mine.py").write_text("import time\ndef reward(answer, record):\n    time.sleep(0.5)\n    return 1\n")
    check = Rewards([Reward(kind="function", function=f"{tmp_path}/mine.py:reward")])
    assert check([("text", {}, "d.jsonl, line 3")]) == [[1.0]]
    assert "reward has been at an answer to d.jsonl, line 3" in caplog.text
