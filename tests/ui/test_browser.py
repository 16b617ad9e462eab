"""The pages in a real Chromium, where one is installed: nothing fails, nothing leaves the machine, all is fast."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from recorded_runs import record_run
from tunesmith.ui.runs import run_id

from .test_server import serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("chromium") and shutil.which("node")), reason="needs chromium and node"),
]
SCRIPT = Path(__file__).with_name("browser.js")
RUNS = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """As many runs of 10,000 steps as a page should list at once."""
    made = tmp_path_factory.mktemp("here")
    first = record_run(made / "runs" / "0", steps=10_000)
    for number in range(1, RUNS):
        copy = made / "runs" / str(number)
        copy.mkdir()
        for one in first.glob("*.json*"):
            os.link(one, copy / one.name)
    (made / "run.yaml").write_text("model: nowhere\ndata: none.jsonl\noutput: runs/new\n")
    return made


def browse(server, profile, orders):
    command = ["node", "--experimental-websocket", str(SCRIPT), server.link, str(profile), json.dumps(orders)]
    command += [os.environ["SHOTS"]] if os.environ.get("SHOTS") else []
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_all_pages_work_in_a_browser_and_nothing_leaves_the_machine(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    one, two = run_id("0"), run_id("1")
    press = "[...document.querySelectorAll('button')].find((one) => one.textContent === '{}').click()"
    tag = (
        "(async () => { const field = document.querySelector('input[type=text]'); field.value = '<b>good</b>';"
        " field.dispatchEvent(new Event('change')); await new Promise((done) => setTimeout(done, 1500)); })()"
    )
    plan = (
        f"(async () => {{ document.querySelectorAll('select')[2].value = 'H100'; {press.format('Plan')};"
        " for (let i = 0; i < 200 && !document.querySelector('.bar'); i++)"
        " await new Promise((done) => setTimeout(done, 100));"
        " return [...document.querySelectorAll('h2')].map((one) => one.textContent).join('|'); })()"
    )
    charts = "document.querySelectorAll('.u-over').length >= 5"
    listed = "document.querySelectorAll('select')[0]?.options.length > 5"
    buttons = "document.querySelectorAll('main button').length"
    first_tag = "document.querySelector('.tag')"
    orders = [
        {"page": "#/", "wait": f"document.querySelectorAll('table.runs tbody tr').length === {RUNS}"},
        {"page": f"#/run/{one}", "wait": charts, "script": tag},
        {"page": f"#/compare/{one},{two}", "wait": charts},
        {"page": "#/start", "wait": buttons, "script": "document.querySelector('main').innerText"},
        {"page": "#/plan", "wait": listed, "script": plan},
        {"page": "#/", "wait": first_tag, "script": f"{first_tag}.textContent"},
        {"page": "#/start", "wait": buttons, "width": 390},
        {"page": "#/plan", "wait": listed, "width": 390},
        {"page": f"#/run/{one}", "wait": charts, "width": 390},
    ]
    with serving(folder / "runs") as server:
        seen = browse(server, tmp_path / "profile", orders)
        address = f"127.0.0.1:{server.port}"
    assert seen["errors"] == []
    assert {urlsplit(url).netloc for url in seen["urls"] if not url.startswith("data:")} == {address}
    pages = seen["pages"]
    assert all(page["isReady"] for page in pages), pages
    assert not any(page["unnamed"] for page in pages), pages
    assert all(page["overflow"] <= 0 for page in pages if page["page"] != "#/"), pages
    assert not any(page["odd"] for page in pages), pages
    assert pages[0]["paint"] < 1000
    assert "run.yaml" in pages[3]["found"]
    assert pages[4]["found"].startswith("It fits|Speed and cost|Why")
    assert pages[5]["found"] == "<b>good</b>"
    print({page["page"]: (page["ready"], page["paint"]) for page in pages})
