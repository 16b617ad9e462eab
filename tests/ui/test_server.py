"""`tunesmith ui`: who is let in, what is refused, what is shown, and that it is live."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager

import numpy as np
import pytest
from typer.testing import CliRunner

from recorded_runs import line, record_run
from tunesmith.cli.main import app
from tunesmith.train import documents, events
from tunesmith.ui.report import asset
from tunesmith.ui.runs import Runs, find_runs, run_id
from tunesmith.ui.server import Server, host_names, is_loopback

HOSTILE = "<img src=x onerror=alert(1)>"
ROUTES = [
    "/",
    "/assets/page.js",
    "/api/runs",
    "/api/compare?runs=x",
    "/api/stream",
    f"/api/runs/{'0' * 16}",
    f"/api/runs/{'0' * 16}/documents?step=1",
    f"/api/runs/{'0' * 16}/samples",
    "/nothing",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("runs")
    record_run(made / "first", steps=40, learning_rate=1e-4)
    record_run(made / "deep" / "second", steps=40, ends="stopped", learning_rate=2e-4, seed=1)
    record_run(made / HOSTILE, steps=5, ends=None, model=HOSTILE)
    (made / "secret.txt").write_text("secret")
    return made


@contextmanager
def serving(folder):
    server = Server(Runs(folder), "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def server(folder):
    with serving(folder) as made:
        yield made


def ask(server, path, *, method="GET", cookie=True, host=None, **headers):
    """Status, headers and content."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    if cookie:
        given["Cookie"] = f"{server.cookie}={server.access.session if cookie is True else cookie}"
    given["Host"] = f"127.0.0.1:{server.port}" if host is None else host
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in given.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        is_stream = answer.headers.get("Content-Type") == "text/event-stream"
        return answer.status, answer.headers, b"" if is_stream else answer.read()


def own(server):
    return f"http://127.0.0.1:{server.port}"


def test_the_link_works_once_and_becomes_a_cookie_that_scripts_and_other_sites_do_not_get(server):
    token = server.access.token
    status, headers, _ = ask(server, f"/?token={token}", cookie=False)
    assert (status, headers["Location"]) == (303, "/")
    kept = headers["Set-Cookie"]
    assert "HttpOnly" in kept
    assert "SameSite=Strict" in kept
    assert token not in kept
    status, headers, _ = ask(server, f"/?token={token}", cookie=False)
    assert status == 403
    assert "Set-Cookie" not in headers
    assert ask(server, "/", cookie=re.search("=([^;]+)", kept)[1])[0] == 200
    assert server.access.token != token


def test_an_address_that_names_another_server_and_two_lengths_are_refused(server):
    assert ask(server, f"http://127.0.0.1:{server.port}/api/runs")[0] == 200
    assert ask(server, "http://elsewhere.example/api/runs")[0] == 421
    cookie = f"{server.cookie}={server.access.session}"
    sent = (
        f"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nCookie: {cookie}\r\n"
        "Content-Length: 0\r\nContent-Length: 40\r\n\r\n"
    )
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=60)) as connection:
        connection.sendall(sent.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_run_that_was_deleted_while_it_was_looked_at_is_no_run(tmp_path):
    folder = record_run(tmp_path / "gone", steps=5)
    with serving(tmp_path) as server:
        assert ask(server, f"/api/runs/{run_id('gone')}")[0] == 200
        shutil.rmtree(folder)
        for more in ("", "/samples", "/documents?step=1", "/report"):
            assert ask(server, f"/api/runs/{run_id('gone')}{more}")[0] == 404


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_refuses_who_has_no_cookie(server, path):
    for cookie in (False, "", "wrong", "é".encode().decode("latin-1")):
        assert ask(server, path, cookie=cookie)[0] == 401
    assert ask(server, "/?token=wrong", cookie=False)[0] == 403


@pytest.mark.parametrize("path", [*ROUTES, "/?token=x"])
def test_every_route_refuses_another_host(server, path):
    port = server.port
    for host in (f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", "", f"127.0.0.1:{port}.evil.example"):
        assert ask(server, path, host=host)[0] == 421


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS"])
def test_another_origin_is_refused(server, method):
    for origin in ("http://evil.example", "null", own(server).replace("http:", "https:"), own(server) + "0"):
        assert ask(server, "/api/runs", method=method, Origin=origin)[0] == 403
    assert ask(server, "/api/runs", Origin=own(server))[0] == 200


def test_a_change_needs_a_post_from_these_pages(server):
    stop = f"/api/runs/{run_id('first')}/stop"
    assert ask(server, stop)[0] == 404
    assert ask(server, stop, method="POST")[0] == 403
    assert ask(server, stop, method="POST", Origin=own(server), Sec_Fetch_Site="cross-site")[0] == 403
    assert ask(server, stop, method="POST", Origin=own(server), cookie=False)[0] == 401
    status, _, content = ask(server, stop, method="POST", Origin=own(server))
    assert (status, json.loads(content)) == (409, {"problem": "This run is not running."})
    assert ask(server, "/api/runs", method="PUT", Origin=own(server))[0] == 405


def test_marking_records_is_a_change_and_names_them_by_numbers_alone(server, folder):
    mark = f"/api/runs/{run_id('first')}/exclude?step=3&records=0-1"
    assert ask(server, mark)[0] == 404
    assert ask(server, mark, method="POST")[0] == 403
    assert ask(server, mark, method="POST", Origin=own(server), cookie=False)[0] == 401
    for records in ("0-1", "../../secret.txt", "0-1%00", "9-9", ""):
        path = f"/api/runs/{run_id('first')}/exclude?step=3&records={records}"
        assert ask(server, path, method="POST", Origin=own(server))[0] in (400, 409)
    assert not (folder / "first" / "excluded.jsonl").exists()
    status, _, content = ask(server, f"/api/runs/{run_id('first')}/documents?step=3")
    assert status == 409
    assert "has kept no losses of documents" in json.loads(content)["problem"]
    assert ask(server, f"/api/runs/{run_id('first')}/documents?step=x")[0] == 400
    assert ask(server, f"/api/runs/{run_id('first')}/documents")[0] == 400


def test_a_run_that_names_paths_instead_of_keys_leads_nowhere(folder, server):
    made = folder / "deep" / "second"
    rows = documents.rows_of(np.zeros(2, int), np.arange(2), np.ones(2), np.ones(2))
    documents.DocumentLog(made, 0, [("x", "../../../secret.txt")]).write(1, rows)
    status, _, content = ask(server, f"/api/runs/{run_id('deep/second')}/documents?step=1")
    assert status == 200
    assert [one["text"] for one in json.loads(content)["documents"]] == [None, None]


def test_content_is_not_taken(server):
    for more in ({"Content_Length": "4000"}, {"Content_Length": "-1"}, {"Transfer_Encoding": "chunked"}):
        assert ask(server, "/api/runs", method="POST", Origin=own(server), **more)[0] == 413


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/assets/../report.py",
        "/assets/%2e%2e/report.py",
        "/assets//etc/passwd",
        "/assets/uplot.LICENSE",
        "/api/runs/..%2f..%2fsecret.txt",
        "/api/runs/../../secret.txt",
        "/api/runs/first",
        f"/api/runs/{'a' * 16}",
        f"/api/runs/{'a' * 16}/report",
        "/api/compare?runs=../first",
        "//evil.example/",
        "/secret.txt",
    ],
)
def test_runs_go_by_id_and_paths_lead_nowhere(server, path):
    status, _, content = ask(server, path)
    assert status == 404
    assert b"secret" not in content


@pytest.mark.parametrize("path", ["/api/runs/{}?from=x&to=2", "/api/runs/{}?from=1&to=" + "9" * 5000])
def test_an_address_that_is_none_is_refused(server, path):
    assert ask(server, path.format(run_id("first")))[0] == 400


@pytest.mark.parametrize("path", ["/", "/assets/app.js", "/api/runs", "/nothing", "/api/stream"])
def test_every_answer_has_a_strict_policy(server, path):
    _, headers, _ = ask(server, path)
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert "Access-Control-Allow-Origin" not in headers


def test_the_page_has_no_inline_script_and_names_are_text(server):
    page = ask(server, "/")[2].decode()
    assert not re.findall(r"<script>|\bon\w+=|style=|https?://", page)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", asset("app.js"))
    _, headers, content = ask(server, "/api/runs")
    assert headers["Content-Type"].startswith("application/json")
    assert HOSTILE in [run["name"] for run in json.loads(content)["runs"]]


def test_the_list_a_page_and_a_comparison(server):
    listed = {run["name"]: run for run in json.loads(ask(server, "/api/runs")[2])["runs"]}
    assert set(listed) == {"first", "deep/second", HOSTILE}
    assert [listed[name]["state"] for name in ("first", "deep/second", HOSTILE)] == ["finished", "stopped", "failed"]
    assert listed["first"]["best"] < listed["first"]["sparks"][0]
    one, two = listed["first"]["id"], listed["deep/second"]["id"]
    page = json.loads(ask(server, f"/api/runs/{one}")[2])
    assert page["curves"]["step"][-1] == 40
    part = json.loads(ask(server, f"/api/runs/{one}?from=6&to=9")[2])["curves"]
    assert {6, 7, 8, 9} <= set(part["step"])
    assert 11 not in part["step"]
    compared = json.loads(ask(server, f"/api/compare?runs={one},{two}")[2])
    assert [run["name"] for run in compared["runs"]] == ["first", "deep/second"]
    assert compared["differences"] == [{"name": "learning_rate", "values": {one: 1e-4, two: 2e-4}}]
    _, headers, content = ask(server, f"/api/runs/{one}/report")
    assert headers["Content-Disposition"].startswith("attachment")
    assert b"Tunesmith report" in content


def test_what_is_new_is_said_within_two_seconds(tmp_path):
    folder = record_run(tmp_path / "runs" / "run", steps=5, total=50, ends=None)
    run = run_id("run")
    with serving(tmp_path / "runs") as server, closing(http.client.HTTPConnection("127.0.0.1", server.port)) as live:
        live.request("GET", f"/api/stream?run={run}", headers={"Cookie": f"{server.cookie}={server.access.session}"})
        answer = live.getresponse()
        assert answer.readline() == b"retry: 2000\n"
        time.sleep(0.1)
        began = time.monotonic()
        with (folder / events.FILE).open("a") as stream:
            stream.write(line(events.Step(6, 0.1, 0.123, 1e-4, 1.0, 100, 50.0, 0.5, 2**20), 1e9))
        while answer.readline() != b"event: changed\n":
            assert time.monotonic() - began < 2
        curves = json.loads(ask(server, f"/api/runs/{run}")[2])["curves"]
        assert (curves["step"][-1], curves["loss"][-1]) == (6, 0.123)
        assert time.monotonic() - began < 2


TRAINER = """
import signal, sys, time
from pathlib import Path
from tunesmith.checkpoint.lock import RunLock
asked = []
signal.signal(signal.SIGINT, lambda *_: asked.append(1))
with RunLock(Path(sys.argv[1])):
    print("ready", flush=True)
    while not asked:
        time.sleep(0.02)
    time.sleep(0.5)
sys.exit(len(asked))
"""


def test_stop_interrupts_the_process_that_writes_the_run_and_only_once(tmp_path):
    folder = record_run(tmp_path / "runs" / "run", steps=5, total=50, ends=None)
    stop = f"/api/runs/{run_id('run')}/stop"
    with serving(tmp_path / "runs") as server:
        process = subprocess.Popen([sys.executable, "-c", TRAINER, str(folder)], stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "ready\n"
        assert json.loads(ask(server, "/api/runs")[2])["runs"][0]["state"] == "running"
        assert ask(server, stop, method="POST", Origin=own(server))[0] == 200
        status, _, content = ask(server, stop, method="POST", Origin=own(server))
        assert status == 409
        assert b"already" in content
        assert process.wait(timeout=10) == 1
        process.stdout.close()


def test_a_process_that_does_not_write_the_run_is_never_interrupted(tmp_path):
    """On a shared disk the pid in the lock is another machine's."""
    folder = record_run(tmp_path / "runs" / "run", steps=5, total=50, ends=None)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    holder = subprocess.Popen([sys.executable, "-c", TRAINER, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "ready\n"
        (folder / ".lock").write_text(f"{other.pid}\n")
        with serving(tmp_path / "runs") as server:
            status, _, content = ask(server, f"/api/runs/{run_id('run')}/stop", method="POST", Origin=own(server))
        assert status == 409
        assert b"another machine" in content
        assert other.poll() is None
    finally:
        for process in (other, holder):
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        holder.stdout.close()


def test_addresses_beyond_this_machine_need_to_be_asked_for(tmp_path):
    for host in ("0.0.0.0", "192.168.1.2", "::", "example.com"):
        result = CliRunner().invoke(app, ["ui", str(tmp_path), "--host", host])
        assert result.exit_code == 1
        assert "--open-to-network" in result.output
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert "evil.example:1" not in host_names("0.0.0.0", 1)
    assert "127.0.0.1:1" in host_names("0.0.0.0", 1)
    assert host_names("10.0.0.5", 1) == {"10.0.0.5:1"}
    assert "[::1]:1" in host_names("::1", 1)


def test_a_folder_that_is_none_and_a_port_that_is_taken_get_a_sentence(tmp_path, server):
    missing = CliRunner().invoke(app, ["ui", str(tmp_path / "none")])
    assert missing.exit_code == 1
    assert "is no folder" in missing.output
    taken = CliRunner().invoke(app, ["ui", str(tmp_path), "--port", str(server.port)])
    assert taken.exit_code == 1
    assert "cannot be used" in taken.output


def test_runs_that_links_lead_to_are_not_looked_at(tmp_path):
    record_run(tmp_path / "elsewhere" / "run", steps=2)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "elsewhere")
    assert find_runs(tmp_path / "runs") == []
    assert [one.name for one in find_runs(tmp_path / "elsewhere" / "run")] == ["run"]


def _listing_seconds(tmp_path, count, steps):
    first = record_run(tmp_path / "runs" / "0", steps=steps)
    for number in range(1, count):
        copy = tmp_path / "runs" / str(number)
        copy.mkdir()
        for one in first.glob("*.json*"):
            (copy / one.name).write_bytes(one.read_bytes())
    with serving(tmp_path / "runs") as server:
        began = time.monotonic()
        _, _, content = ask(server, "/api/runs")
        seconds = time.monotonic() - began
        assert len(json.loads(content)["runs"]) == count
        until = time.monotonic() + 60
        while not all(run["is_exact"] and run["best"] for run in json.loads(ask(server, "/api/runs")[2])["runs"]):
            assert time.monotonic() < until
            time.sleep(0.1)
    return seconds


def test_twenty_runs_are_listed_at_once(tmp_path):
    assert _listing_seconds(tmp_path, 20, 2000) < 2.0


@pytest.mark.slow
def test_two_hundred_runs_of_ten_thousand_steps_are_listed_within_a_second(tmp_path):
    assert _listing_seconds(tmp_path, 200, 10_000) < 1.0
