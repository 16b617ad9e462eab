"""The pages over HTTP: Python's own server, a token, and refusals.

Nobody but who was given the link gets an answer. Every request must name this server as its Host (which DNS rebinding
does not) and come from no foreign page; what changes anything is a POST from these pages. The link's token works once
and becomes a cookie that scripts cannot read and other sites cannot send.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil

from tunesmith.errors import UserError
from tunesmith.ui.documents import Documents
from tunesmith.ui.explore import Explorer
from tunesmith.ui.labels import write_archived, write_tags
from tunesmith.ui.report import asset, report
from tunesmith.ui.runs import Runs
from tunesmith.ui.start import Starter
from tunesmith.ui.stop import Stopper

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
ASSETS = {
    "page.js": "text/javascript",
    "app.js": "text/javascript",
    "uplot.js": "text/javascript",
    "page.css": "text/css",
    "uplot.css": "text/css",
}
POLL_S = 0.5
"""How often files are looked at for what is new."""
QUIET_S = 10.0
"""After so long without news a stream says something, which finds out whether anybody still listens."""
CONNECTIONS = 64
STREAMS = 24
COMPARED = 12
"""Runs at a time, at most."""
MARKED = 100
"""Records as bad, at a time."""
RUN = r"/api/runs/([0-9a-f]{16})"


class Access:
    """Who may see the pages: whoever has opened a link. Each link works once, and then there is another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.token = secrets.token_urlsafe(32)
        self.session = secrets.token_urlsafe(32)

    def redeem(self, token: str) -> bool:
        with self._lock:
            is_right = hmac.compare_digest(token.encode(), self.token.encode())
            if is_right:
                self.token = secrets.token_urlsafe(32)
            return is_right

    def has(self, session: str) -> bool:
        return hmac.compare_digest(session.encode(), self.session.encode())


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, runs: Runs, host: str, port: int, *, opened: Callable[[], None] = lambda: None):
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.runs = runs
        self.stopper = Stopper()
        self.documents = Documents()
        self.starter = Starter(runs.folder)
        self.explorer = Explorer()
        self.access = Access()
        self.opened = opened
        self.streams = threading.BoundedSemaphore(STREAMS)
        self.connections = threading.BoundedSemaphore(CONNECTIONS)
        super().__init__((host, port), Handler)
        self.port = self.server_address[1]
        self.hosts = host_names(host, self.port)
        self.shown_host = f"[{host}]" if ":" in host else host

    @property
    def link(self) -> str:
        shown = socket.gethostname() if is_any(self.shown_host.strip("[]")) else self.shown_host
        return f"http://{shown}:{self.port}/?token={self.access.token}"

    @property
    def cookie(self) -> str:
        """Cookies do not tell ports apart, and there may be several of these servers."""
        return f"tunesmith_{self.port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.connections.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        problem = sys.exception() if hasattr(sys, "exception") else sys.exc_info()[1]
        if not isinstance(problem, OSError):  # a browser that has gone away is no fault
            super().handle_error(request, client_address)


class Refused(Exception):
    def __init__(self, status: HTTPStatus, sentence: str):
        super().__init__(sentence)
        self.status = status


class Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    server_version = "tunesmith"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_HEAD(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def do_PUT(self) -> None:
        self._answer(self._no_such_method)

    do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = do_PUT

    def log_message(self, format: str, *args: Any) -> None:
        pass  # a line for each request would hide the link

    def _answer(self, route: Callable[[str, dict[str, str]], None]) -> None:
        try:
            self._read_body()
            self._check_sender()
            url = urlsplit(self.path)
            given = {name: values[-1] for name, values in parse_qs(url.query, max_num_fields=10).items()}
            if self.command == "GET" and url.path == "/" and "token" in given:
                self._let_in(given["token"])
                return
            self._check_session()
            route(url.path, given)
        except Refused as refused:
            self._send_text(refused.status, str(refused))
        except UserError as problem:
            self._send_json({"problem": str(problem)}, HTTPStatus.CONFLICT)
        except (ValueError, KeyError):  # an address that is none
            self._send_text(HTTPStatus.BAD_REQUEST, "This request cannot be understood.")

    # Who asks

    def _read_body(self) -> None:
        """No route takes any; what is sent all the same must not be read as the next request."""
        lengths = self.headers.get_all("Content-Length", ["0"])
        is_known = len(lengths) == 1 and re.fullmatch("[0-9]{1,4}", lengths[0]) and int(lengths[0]) <= 1024
        if self.headers.get("Transfer-Encoding") or not is_known:
            self.close_connection = True
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "Requests have no content here.")
        self.rfile.read(int(lengths[0]))

    def _check_sender(self) -> None:
        hosts = self.headers.get_all("Host", [])
        named = urlsplit(self.path).netloc  # of an address as proxies send it
        if len(hosts) != 1 or not {hosts[0].lower(), (named or hosts[0]).lower()} <= self.server.hosts:
            raise Refused(HTTPStatus.MISDIRECTED_REQUEST, "This server is not the one that was asked for.")
        origins = self.headers.get_all("Origin", [])
        is_change = self.command not in ("GET", "HEAD")
        if any(origin.lower() != f"http://{hosts[0].lower()}" for origin in origins) or (is_change and not origins):
            raise Refused(HTTPStatus.FORBIDDEN, "Requests from other pages are refused.")
        if is_change and self.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
            raise Refused(HTTPStatus.FORBIDDEN, "Requests from other pages are refused.")

    def _let_in(self, token: str) -> None:
        if not self.server.access.redeem(token):
            raise Refused(HTTPStatus.FORBIDDEN, "This link was used before, or is none; the terminal shows a new one.")
        kept = f"{self.server.cookie}={self.server.access.session}; HttpOnly; SameSite=Strict; Path=/"
        self._send(HTTPStatus.SEE_OTHER, b"", "text/plain", {"Location": "/", "Set-Cookie": kept})
        self.server.opened()

    def _check_session(self) -> None:
        try:
            cookies = SimpleCookie("; ".join(self.headers.get_all("Cookie", [])))
        except CookieError:
            cookies = SimpleCookie()
        kept = cookies.get(self.server.cookie)
        if kept is None or not self.server.access.has(kept.value):
            raise Refused(HTTPStatus.UNAUTHORIZED, "Open the link that `tunesmith ui` shows in its terminal.")

    # What is asked for

    def _get(self, path: str, given: dict[str, str]) -> None:
        runs = self.server.runs
        if path == "/":
            self._send(HTTPStatus.OK, asset("app.html").encode(), "text/html")
        elif path.startswith("/assets/") and path.removeprefix("/assets/") in ASSETS:
            name = path.removeprefix("/assets/")
            self._send(HTTPStatus.OK, asset(name).encode(), ASSETS[name])
        elif path == "/api/runs":
            self._send_json({"folder": str(runs.folder), "runs": runs.listing()})
        elif path == "/api/configs":
            self._send_json({"configs": self.server.starter.configs(), "starts": self.server.starter.starts()})
        elif path == "/api/starts":
            self._send_json({"starts": self.server.starter.starts()})
        elif path == "/api/choices":
            self._send_json(self.server.explorer.choices())
        elif path == "/api/compare":
            wanted = list(dict.fromkeys(given.get("runs", "").split(",")))[:COMPARED]
            self._send_json(self._there(runs.compare(wanted)))
        elif path == "/api/stream":
            self._stream(given.get("run"))
        elif match := re.fullmatch(RUN, path):
            steps = (int(given["from"]), int(given["to"])) if {"from", "to"} <= given.keys() else None
            self._send_json(self._there(runs.page(match[1], steps=steps)))
        elif match := re.fullmatch(rf"{RUN}/documents", path):
            found = self._there(runs.get(match[1]))
            self._send_json(self.server.documents.of_step(found.folder, int(given["step"])))
        elif match := re.fullmatch(rf"{RUN}/samples", path):
            found = self._there(runs.get(match[1]))
            self._send_json(self.server.documents.samples(found.folder))
        elif match := re.fullmatch(rf"{RUN}/report", path):
            found = self._there(runs.get(match[1]))
            kept = {"Content-Disposition": 'attachment; filename="report.html"'}
            self._send(HTTPStatus.OK, report(found.folder).encode(), "text/html", kept)
        else:
            raise Refused(HTTPStatus.NOT_FOUND, "There is no such page.")

    def _post(self, path: str, given: dict[str, str]) -> None:
        server = self.server
        if path == "/api/plan":
            self._send_json(server.explorer.plan(given))
            return
        if match := re.fullmatch(r"/api/configs/([0-9a-f]{16})/start", path):
            self._send_json(server.starter.start(match[1]))
            return
        match = re.fullmatch(rf"{RUN}/(stop|exclude|resume|tags|archive)", path)
        if match is None:
            raise Refused(HTTPStatus.NOT_FOUND, "There is no such page.")
        found = self._there(server.runs.get(match[1]))
        if match[2] == "exclude":
            records = given["records"].split(",")[:MARKED]
            self._send_json(server.documents.exclude(found.folder, records, int(given["step"])))
        elif match[2] == "resume":
            self._send_json(server.starter.resume(found.folder, found.name))
        elif match[2] == "tags":
            self._send_json(write_tags(found.folder, given.get("tags", "").split(",")))
        elif match[2] == "archive":
            self._send_json(write_archived(found.folder, {"yes": True, "no": False}[given["archived"]]))
        else:
            server.stopper.stop(found.folder)
            self._send_json({"said": "Asked to stop; it saves first."})

    def _no_such_method(self, path: str, given: dict[str, str]) -> None:
        raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, "There is no such method here.")

    def _there(self, found: Any) -> Any:
        if found is None:
            raise Refused(HTTPStatus.NOT_FOUND, "There is no such run.")
        return found

    def _stream(self, run: str | None) -> None:
        """Server-sent events: one whenever there is something new to fetch."""
        if not self.server.streams.acquire(blocking=False):
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "Too many pages are open.")
        try:
            self.close_connection = True
            self.send_response(HTTPStatus.OK)
            for name, value in (HEADERS | {"Content-Type": "text/event-stream", "Connection": "close"}).items():
                self.send_header(name, value)
            self.end_headers()
            self._say("retry: 2000\n\n")
            seen, said = self._signature(run), time.monotonic()
            while True:
                time.sleep(POLL_S)
                now = self._signature(run)
                if now != seen:
                    seen, said = now, time.monotonic()
                    self._say("event: changed\ndata: {}\n\n")
                elif time.monotonic() - said > QUIET_S:
                    said = time.monotonic()
                    self._say(": here\n\n")
        finally:
            self.server.streams.release()

    def _signature(self, run: str | None) -> tuple[Any, ...]:
        return (*self.server.runs.signature(run), self.server.starter.signature)

    def _say(self, message: str) -> None:
        self.wfile.write(message.encode())
        self.wfile.flush()

    # What is answered

    def _send_json(self, value: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._send(status, json.dumps(value, allow_nan=False, separators=(",", ":")).encode(), "application/json")

    def _send_text(self, status: HTTPStatus, sentence: str) -> None:
        self._send(status, f"{sentence}\n".encode(), "text/plain")

    def _send(self, status: HTTPStatus, content: bytes, kind: str, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        given = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content))}
        for name, value in (HEADERS | given | (more or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def host_names(host: str, port: int) -> frozenset[str]:
    """What may stand in the Host header. A server on all addresses answers to this machine's own, never to any name."""
    if is_loopback(host):
        names = {"localhost", "127.0.0.1", "::1", host}
    elif is_any(host):
        addresses = {one.address.partition("%")[0] for many in psutil.net_if_addrs().values() for one in many}
        names = {"localhost", socket.gethostname(), socket.getfqdn(), *addresses}
    else:
        names = {host}
    return frozenset(f"[{name}]:{port}".lower() if ":" in name else f"{name}:{port}".lower() for name in names)
