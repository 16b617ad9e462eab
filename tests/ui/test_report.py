"""`tunesmith report`: one file, safe and small."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from recorded_runs import record_run
from tunesmith.cli.main import app
from tunesmith.ui.report import asset, report

HOSTILE = "</script><img src=x onerror=alert(1)>"


def test_a_report_is_one_file_under_a_megabyte_and_a_half_that_asks_for_nothing(tmp_path):
    folder = record_run(tmp_path / "run", steps=10_000, objective="dpo")
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert result.exit_code == 0, result.output
    made = (folder / "report.html").read_text()
    assert len(made.encode()) < 1_500_000
    assert not re.findall(r"<(?:link|img|iframe|object|embed|base|form)\b|<script[^>]*\bsrc", made)
    assert not re.findall(r"\b(?:fetch|XMLHttpRequest|EventSource|WebSocket|sendBeacon|import)\(", made)
    assert "default-src 'none'" in made.replace("&#x27;", "'")


def test_only_the_scripts_own_bytes_may_run(tmp_path):
    made = report(record_run(tmp_path / "run", steps=5)).replace("&#x27;", "'")
    for tag in ("script", "style"):
        content = re.search(rf"<{tag}>(.*?)</{tag}>", made, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in made
    assert "unsafe" not in made


@pytest.mark.parametrize("where", ["name", "model", "warning"])
def test_hostile_names_stay_text(tmp_path, where):
    folder = record_run(
        tmp_path / (HOSTILE.replace("/", "_") if where == "name" else "run"),
        steps=5,
        model=HOSTILE if where == "model" else "m",
        warnings=(HOSTILE,) if where == "warning" else (),
    )
    made = report(folder)
    assert "<img" not in made
    assert made.count("</script>") == 2
    run = json.loads(re.search(r'id="run">(.*?)</script>', made, re.DOTALL)[1])
    assert "<img src=x" in json.dumps(run)


def test_assets_put_nothing_in_as_html_and_stay_small():
    own = {name: asset(name) for name in ("page.js", "report.js", "page.css")}
    for text in own.values():
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    everything = "".join([*own.values(), asset("uplot.js"), asset("uplot.css")])
    assert len(gzip.compress(everything.encode())) < 40_000
    assert "Leon Sorokin" in asset("uplot.LICENSE")


def test_a_folder_without_a_run_gets_a_sentence(tmp_path):
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 1
    assert "holds no run" in result.output


def test_pages_are_made_without_torch():
    code = "import sys, tunesmith.ui.report, tunesmith.cli.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
