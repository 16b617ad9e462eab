"""The settings are few, closed, frozen and described; the generated page and JSON Schema follow them."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from tunesmith.config.load import from_mapping
from tunesmith.config.schema import Dataset, Lora, Run, json_schema

ROOT = Path(__file__).parents[2]


def test_there_are_at_most_68_settings_and_each_has_a_sentence():
    fields = [field for model in (Run, Lora, Dataset) for field in model.model_fields.values()]
    assert len(fields) <= 68
    for field in fields:
        assert field.description
        assert field.description.endswith(".")
        assert "\n" not in field.description


def test_a_run_cannot_be_changed():
    run = from_mapping({"model": "m", "data": "a"})
    with pytest.raises(ValidationError):
        run.epochs = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("path", "title"),
    [("a/b.jsonl", "b"), ("a/b.jsonl.gz", "b"), ("folder/", "folder"), ("data/*.json", "*"), ("x.y.parquet", "x.y")],
)
def test_a_data_set_is_named_after_its_file(path, title):
    assert Dataset(path=path).title == title


def test_the_json_schema_uses_the_words_that_editors_know():
    schema = json_schema()
    assert schema["$defs"]["Dataset"]["properties"]["weight"]["exclusiveMinimum"] == 0
    assert schema["properties"]["sequence_length"]["minimum"] == 8
    assert schema["required"] == ["model", "data"]
    assert schema["additionalProperties"] is False
    assert {"type": "string"} in schema["properties"]["data"]["anyOf"]  # data: file.jsonl


def generated(folder: Path, monkeypatch, *arguments: str) -> int:
    """What docs/generate.py in this folder ends with."""
    monkeypatch.setattr(sys, "argv", ["generate.py", *arguments])
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(folder / "generate.py"), run_name="__main__")
    return ended.value.code


def test_the_pages_are_up_to_date(monkeypatch, capsys):
    assert not generated(ROOT / "docs", monkeypatch, "--check"), capsys.readouterr().err


def test_a_stale_page_fails_the_check(tmp_path, monkeypatch, capsys):
    (tmp_path / "generate.py").write_text((ROOT / "docs" / "generate.py").read_text())
    (tmp_path / "settings.md").write_text("old")
    assert generated(tmp_path, monkeypatch, "--check") == 1
    assert "docs/settings.md" in capsys.readouterr().err
    assert (tmp_path / "settings.md").read_text() == "old"
    assert not generated(tmp_path, monkeypatch)
    assert not generated(tmp_path, monkeypatch, "--check")
