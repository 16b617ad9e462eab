"""The pages in a real Chromium, where one is installed: nothing fails, nothing leaves the machine, all is fast, and axe
finds no serious fault (AXE names its axe.min.js, or node finds axe-core)."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from recorded_runs import line, record_run, step_event
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


def axe() -> str | None:
    """Where axe-core lies: AXE names its axe.min.js, or node finds the package."""
    if os.environ.get("AXE"):
        return os.environ["AXE"]
    found = subprocess.run(
        ["node", "-p", "require.resolve('axe-core/axe.min.js')"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() if found.returncode == 0 else None


def browse(server, profile, orders):
    command = ["node", "--experimental-websocket", str(SCRIPT), server.link, str(profile), json.dumps(orders)]
    command += [os.environ["SHOTS"]] if os.environ.get("SHOTS") else []
    environment = os.environ | {"AXE": axe() or ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
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


RUN_READY = "document.querySelectorAll('.u-over').length >= 5 && document.querySelector('.tokens')"


@pytest.fixture
def few(tmp_path, monkeypatch):
    """A few runs of all kinds: a failed one, one with alerts and warnings, tags, preferences."""
    for name, more in (
        ("support", {"samples": True, "warnings": ("The learning rate is high.",)}),
        ("<b>stopped</b>", {"ends": "stopped", "steps": 40, "total": 300}),
        ("failed", {"ends": None, "steps": 20, "total": 300, "objective": "dpo"}),
    ):
        record_run(tmp_path / "runs" / name, **more)
    (tmp_path / "run.yaml").write_text("model: nowhere\ndata: none.jsonl\noutput: runs/new\n")
    (tmp_path / "wrong.yaml").write_text("model: nowhere\ndata: none.jsonl\nepoch: 2\n")
    alert = {"event": "alert", "time": 1.0, "step": 100, "name": "loss spike", "evidence": "4.1", "advice": "Look."}
    with (tmp_path / "runs" / "support" / "events.jsonl").open("a") as file:
        file.write(json.dumps(alert) + "\n")
    analysis = {"step_seconds": 0.5, "host_seconds": {"forward": 0.2}, "kernels": [{"name": "gemm", "seconds": 0.2}]}
    profile = tmp_path / "runs" / "support" / "profile"
    profile.mkdir()
    (profile / "report.json").write_text(json.dumps({"step": 5, "device": "H200", "analysis": analysis}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.skipif(shutil.which("node") is None or axe() is None, reason="needs axe-core")
def test_axe_finds_no_serious_fault_on_any_page_light_and_dark_wide_and_narrow(few, tmp_path):
    ids = [run_id(one) for one in ("support", "<b>stopped</b>", "failed")]
    opened = "document.querySelectorAll('details').forEach((one) => { one.open = true; })"
    plan = (
        "(async () => { document.querySelectorAll('select')[2].value = 'H100';"
        " [...document.querySelectorAll('button')].find((one) => one.textContent === 'Plan').click();"
        " for (let i = 0; i < 300 && !document.querySelector('.bar'); i++)"
        " await new Promise((done) => setTimeout(done, 100)); })()"
    )
    pages = [
        {"page": "#/", "wait": "document.querySelectorAll('table.runs tbody tr').length === 3"},
        *({"page": f"#/run/{one}", "wait": "document.querySelectorAll('.u-over').length >= 5"} for one in ids[1:]),
        {"page": f"#/run/{ids[0]}", "wait": RUN_READY, "script": opened},
        {"page": f"#/compare/{','.join(ids)}", "wait": "document.querySelectorAll('.u-over').length >= 5"},
        {"page": "#/start", "wait": "document.querySelectorAll('main table').length"},
        {"page": "#/plan", "wait": "document.querySelectorAll('select')[0]?.options.length > 5", "script": plan},
    ]
    looks = [{"dark": dark, "width": width} for dark in (False, True) for width in (1200, 390)]
    with serving(few / "runs") as server:
        seen = browse(server, tmp_path / "profile", [page | look | {"axe": True} for look in looks for page in pages])
    assert seen["errors"] == []
    assert all(page["isReady"] for page in seen["pages"])
    assert all(page["faults"] is not None for page in seen["pages"])
    faults = [json.dumps([page["page"], page["faults"]]) for page in seen["pages"] if page["faults"]]
    assert not faults, "\n".join(faults)
    assert all(page["overflow"] <= 0 for page in seen["pages"]), [(p["page"], p["overflow"]) for p in seen["pages"]]


FAILS = Path(__file__).with_name("fails.js")


def test_what_fails_is_said_on_the_page_and_can_be_tried_again(few, tmp_path):
    with serving(few / "runs") as server:
        orders = [{"page": f"#/run/{run_id('support')}", "wait": RUN_READY, "script": FAILS.read_text()}]
        (page,) = browse(server, tmp_path / "profile", orders)["pages"]
    found = page["found"]
    assert found["afterFailure"][0] is False
    assert "does not answer" in found["afterFailure"][1]
    assert found["tags"][:3] == ["mine", False, False]
    assert "does not answer" in found["tags"][3]
    assert found["afterRetry"][0] is True
    assert found["afterRetry"][1].startswith("2 records")
    assert found["afterRetry"][2:] == ["Tags kept.", 3]
    labels = json.loads((few / "runs" / "support" / "labels.json").read_text())
    assert labels["tags"] == ["mine"]


def test_each_step_of_a_real_run_is_on_its_page_within_two_seconds(tiny_model, tmp_path):
    """Of every step that is trained while the page is watched: when the page shows it, or a later one."""
    from tiny import write_all, write_data

    folder = write_all(tmp_path / "here", tiny_model, output="runs/live", steps=900, save_every=100, eval_every=50)
    write_data(folder / "train.jsonl", 400)
    log, run, watched = folder / "runs" / "live" / "events.jsonl", run_id("live"), 10_000
    script = (
        "(async () => { const seen = [], began = Date.now();"
        f" while (Date.now() < began + {watched}) {{ await new Promise((done) => setTimeout(done, 20));"
        " const step = Number(/([0-9]+) of 900/.exec(document.querySelector('.cards').innerText)?.[1]);"
        " if (step && step !== seen.at(-1)?.[0]) seen.push([step, Date.now()]); }"
        " return { began, seen }; })()"
    )
    command = [sys.executable, "-m", "tunesmith", "train", "run.yaml"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    training = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    try:
        give_up = time.monotonic() + 200
        while not (log.exists() and '"event": "step"' in log.read_text()):
            assert training.poll() is None, "it has ended before its first step"
            assert time.monotonic() < give_up, "no step within 200 s"
            time.sleep(0.1)
        with serving(folder / "runs") as server:
            charts = "document.querySelectorAll('.u-over').length >= 4"
            orders = [{"page": f"#/run/{run}", "wait": charts, "script": script}]
            (page,) = browse(server, tmp_path / "profile", orders)["pages"]
    finally:
        training.terminate()
        training.wait(120)
    assert page["isReady"]
    began, seen = page["found"]["began"], page["found"]["seen"]
    lags = []
    for event in map(json.loads, log.read_text().splitlines()):
        if event["event"] == "step" and began < 1000 * event["time"] < began + watched - 2000:
            lags.append(min((at for step, at in seen if step >= event["step"]), default=1e15) - 1000 * event["time"])
    assert len(lags) >= 5
    assert max(lags) < 2000
    print(f"{len(lags)} steps, each seen within {max(lags):.0f} ms")


def test_a_step_is_on_the_page_within_two_seconds(tmp_path):
    """As a trainer writes it, once the page has said by a tag that it is open."""
    folder = record_run(tmp_path / "runs" / "live", ends=None, steps=20, total=300)
    written = []

    def write_when_open():
        for _ in range(1200):
            if (folder / "labels.json").exists():
                break
            time.sleep(0.05)
        time.sleep(2.0)
        event = line(step_event(21, 300, random.Random(0)), time.time())
        with (folder / "events.jsonl").open("a") as file:
            file.write(event)
        written.append(1000 * time.time())

    script = (
        f"(async () => {{ await fetch('/api/runs/{run_id('live')}/tags?tags=open', {{ method: 'POST' }});"
        " for (let i = 0; i < 1200 && !document.querySelector('.cards').innerText.includes('21 of 300'); i++)"
        " await new Promise((done) => setTimeout(done, 25)); return Date.now(); })()"
    )
    writer = threading.Thread(target=write_when_open)
    writer.start()
    with serving(tmp_path / "runs") as server:
        charts = "document.querySelectorAll('.u-over').length >= 5"
        orders = [{"page": f"#/run/{run_id('live')}", "wait": charts, "script": script}]
        (page,) = browse(server, tmp_path / "profile", orders)["pages"]
    writer.join()
    assert 0 <= page["found"] - written[0] < 2000
    print(f"seen {page['found'] - written[0]:.0f} ms after it was written")
