"""From a run's folder to a server that listens, and its orderly end."""

from __future__ import annotations

import contextlib
import gc
import ipaddress
import logging
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tunesmith.errors import UserError
from tunesmith.infer.call import Tried, try_out
from tunesmith.infer.speculate import Draft
from tunesmith.run.open import open_model, open_plain
from tunesmith.serve.app import make_app
from tunesmith.serve.engine import LONGEST, Engine, Limits, cache_tokens
from tunesmith.serve.guard import Access, Guard
from tunesmith.serve.models import Models, Served, open_models

DRAIN_SECONDS = 30
"""Seconds for answers that are under way when the server is told to end."""
HEADER_SECONDS = 15.0
"""Seconds that a new connection has to send its first request."""
log = logging.getLogger("tunesmith.serve")


@dataclass(frozen=True)
class Options:
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    batch: int = 64
    queue: int = 256
    length: int | None = None
    cache_tokens: int | None = None
    timeout: float = 600.0
    draft: str | None = None
    """A smaller model with the same vocabulary, which proposes tokens."""
    loads_adapters: bool = False
    """Clients with the key may load and unload adapters."""
    speculates: bool = True


@dataclass(frozen=True)
class Ready:
    app: Any
    models: Models
    engine: Engine
    tried: Tried


def check_options(options: Options) -> None:
    """UserError, before anything is loaded, for options that cannot be."""
    if options.api_key is not None and (not options.api_key.isascii() or len(options.api_key.strip()) < 8):
        raise UserError("--api-key: a key has 8 characters or more, all of them ASCII.")
    if options.api_key is None and not is_loopback(options.host):
        raise UserError(
            f"--host {options.host} can be reached by others: give a key in TUNESMITH_API_KEY (or --api-key), which "
            "clients then send."
        )
    if options.loads_adapters and options.api_key is None:
        raise UserError(
            "--allow-adapter-loading lets clients name folders of this machine: give a key in TUNESMITH_API_KEY (or "
            "--api-key), which they then send."
        )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def prepare(folder: Path, adapters: Mapping[str, Path], options: Options) -> Ready:
    """The model loaded and tried, behind an app that is not listening yet."""
    check_options(options)
    models = open_models(folder, adapters)
    tried = _tried(models)
    draft, draft_tried = _draft(options.draft, models, tried) if options.draft else (None, None)
    limits = limits_of(models, tried, options, draft_tried)
    engine = Engine(
        models.model,
        models.select,
        limits,
        is_shared=tried.is_shared,
        is_wide=tried.is_wide and options.speculates,
        compiles=True,
        draft=draft,
    )
    engine.warm_up(next(iter(models.served.values())))
    access = Access(options.api_key, is_loopback(options.host))

    def load(name: str, where: Path) -> Served:
        served = models.read_adapter(name, where)
        models.select(served)
        with_adapter = try_out(models.model)
        if with_adapter.is_shared < tried.is_shared or with_adapter.is_wide < tried.is_wide:
            raise UserError(f"{where} changes how the model is called; serve it by a server of its own.")
        return served

    app = make_app(
        models, engine, access, timeout=options.timeout, load=load if options.loads_adapters else None
    )  # fmt: skip
    return Ready(app, models, engine, tried)


def _tried(models: Models) -> Tried:
    """How the model may be called whichever adapter is on it."""
    found = []
    for served in models.served.values():
        models.select(served)
        found.append(try_out(models.model))
        if not found[-1].is_shared:
            return found[-1]
    return replace(found[0], is_wide=all(one.is_wide for one in found))


def _draft(name: str, models: Models, tried: Tried) -> tuple[Draft, Tried]:
    """The draft model, loaded and tried. UserError where its tokens are not those of the model."""
    if not tried.is_wide:
        raise UserError("--draft: this model is not given several tokens at once, so a draft is of no use to it.")
    opened = open_model(Path(name)) if Path(name).is_dir() else open_plain(name)
    if opened.tokenizer.get_vocab() != models.own.encoder.tokenizer.get_vocab():
        raise UserError(
            f"--draft: {name} has another vocabulary than {models.folder}; take a model of the same family."
        )
    found = try_out(opened.model)
    if not found.is_shared or not found.is_wide:
        raise UserError(f"--draft: {name} cannot be decoded in a batch; take a model with a plain key-value cache.")
    context = getattr(opened.model.config.get_text_config(), "max_position_embeddings", None)
    limit = context if isinstance(context, int) and context > 0 else None
    return Draft(opened.model, len(opened.tokenizer), limit), found


def limits_of(models: Models, tried: Tried, options: Options, draft: Tried | None = None) -> Limits:
    length = min(options.length or models.context or LONGEST, models.context or 1 << 30)
    room = length * options.batch
    if options.cache_tokens is not None:
        room = options.cache_tokens
    elif (free := cache_tokens(models.model, tried, draft)) is not None:
        room = min(room, free)
    if room < 16:
        raise UserError("There is no memory left for a key-value cache beside the model; serve it on a larger device.")
    limit = room * tried.bytes_per_token or None
    return Limits(options.batch, options.queue, min(length, room), room, limit)


def listen(ready: Ready, options: Options) -> None:
    """Answer until SIGTERM or Ctrl-C; then finish what is under way, `DRAIN_SECONDS` at most."""
    # A server lives long: what is loaded is never looked through for garbage again, what requests leave is, and often.
    gc.collect()
    gc.freeze()
    gc.set_threshold(1000, 10, 10)
    try:
        make_server(ready, options).run()
    finally:
        gc.unfreeze()  # libraries take what is not looked through when the process ends for a leak, and say so


def make_server(ready: Ready, options: Options) -> Server:
    config = uvicorn.Config(
        ready.app,
        host=options.host,
        port=options.port,
        http=Protocol,
        ws="none",
        loop="asyncio",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=DRAIN_SECONDS,
        limit_concurrency=options.batch + options.queue + 64,
        h11_max_incomplete_event_size=64 << 10,
    )
    return Server(config, ready.app)


class Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, app: Guard):
        super().__init__(config)
        self._guard = app

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures signals as uvicorn does, but does not raise them again afterwards: having drained is a good end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: Any) -> None:
        if not self.should_exit:
            log.info("ending: answers under way are finished, within %d s; once more ends at once", DRAIN_SECONDS)
        self._guard.drain()
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True


class Protocol(H11Protocol):
    """A connection that sends no request is closed."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.loop.call_later(HEADER_SECONDS, self._close_if_silent)

    def _close_if_silent(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()
