"""`tunesmith bench` on a CPU."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from tunesmith.cli.main import app


def test_the_tiny_workload_is_measured_in_a_process_of_its_own(tmp_path):
    target = tmp_path / "found.json"
    done = CliRunner().invoke(app, ["bench", "tiny", "--quick", "--no-peers", "--to", str(target)])
    assert done.exit_code == 0, done.output
    assert "tokens/s" in done.output
    found = json.loads(target.read_text())
    assert {"what", "date", "commit", "device", "versions", "numbers"} == found.keys()
    rows = found["numbers"]["rows"]
    assert rows[0]["system"] == "tunesmith"
    assert all(row["tokens_per_second"] > 0 for row in rows)


def test_an_unknown_workload_is_a_sentence(tmp_path):
    done = CliRunner().invoke(app, ["bench", "lora-9b", "--to", str(tmp_path / "found.json")])
    assert done.exit_code == 1
    assert "There is no workload 'lora-9b'; there are lora-8b," in done.output


def test_a_folder_that_is_not_there_is_found_before_anything_is_measured(tmp_path):
    done = CliRunner().invoke(app, ["bench", "tiny", "--to", str(tmp_path / "no" / "found.json")])
    assert done.exit_code == 1
    assert "there is no folder" in done.output
