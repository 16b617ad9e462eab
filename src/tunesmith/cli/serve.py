"""`tunesmith serve`: a run behind an HTTP server that speaks OpenAI's protocol."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tunesmith.serve.server import Options


def command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a run, or of a model.")],
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", metavar="NAME=RUN", help="Another run over the same base, served under this name."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; one that others reach needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="TUNESMITH_API_KEY", show_envvar=True, help="What clients must send as their key."),
    ] = None,
    max_batch: Annotated[int, typer.Option(min=1, max=1024, help="Requests that are decoded at once.")] = 64,
    max_queue: Annotated[int, typer.Option(min=1, max=100_000, help="Requests that wait; more are refused.")] = 256,
    max_length: Annotated[
        int | None, typer.Option(min=16, help="Tokens of a prompt and its answer; the model's limit when left out.")
    ] = None,
    cache_tokens: Annotated[
        int | None, typer.Option(min=16, help="Tokens in the key-value cache; as free memory allows when left out.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds that a request may take.")] = 600.0,
    draft: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A smaller model with the same vocabulary, for speculative decoding."),
    ] = None,
    allow_adapter_loading: Annotated[
        bool,
        typer.Option("--allow-adapter-loading", help="Let clients with the key load and unload adapters."),
    ] = False,
    engine: Annotated[
        str, typer.Option(help="own, vllm or sglang; auto: vllm or sglang where installed and a GPU is here, else own.")
    ] = "auto",
) -> None:
    """Serve a run, or a merged model, over HTTP as OpenAI's API: chat, JSON, embeddings, streaming. Ctrl-C ends it."""
    from tunesmith.cli import output
    from tunesmith.errors import UserError

    adapters = _adapters(adapter or [])
    output.stage(f"Loading the model of {folder}")
    from tunesmith.run.there import why_checkpoint
    from tunesmith.serve.server import Options, check_options, listen, prepare

    options = Options(
        host=host,
        port=port,
        api_key=api_key or None,
        batch=max_batch,
        queue=max_queue,
        length=max_length,
        cache_tokens=cache_tokens,
        timeout=timeout,
        draft=draft,
        loads_adapters=allow_adapter_loading,
    )
    check_options(options)
    if engine != "own" and (code := _elsewhere(engine, folder, adapters, options)) is not None:
        raise typer.Exit(code)
    ready = prepare(folder, adapters, options)
    output.clear_bottom()
    if (step := ready.models.own.step) is not None:
        output.note(why_checkpoint(folder, step))
    if not ready.tried.is_shared:
        output.warn(f"Requests are answered one token at a time each, not in a batch: {ready.tried.why_not}.")
    if said := ready.models.own.defaults.sentence:
        output.warn(said)
    limits = ready.engine.limits
    output.say(f"Serving {', '.join(ready.models.served)} on http://{_shown(host)}:{port}/v1")
    output.note(
        f"Up to {limits.batch} requests at once, {limits.length:,} tokens each, {limits.cache_tokens:,} in the cache "
        f"together; {'with a key' if options.api_key else 'without a key'}. Ctrl-C ends."
    )
    _log_to_stderr()
    try:
        listen(ready, options)
    except SystemExit as problem:  # uvicorn has logged why it cannot listen
        if problem.code:
            raise UserError(f"It cannot listen on {host}:{port}; choose another --host or --port.") from None


def _elsewhere(engine: str, folder: Path, adapters: dict[str, Path], options: Options) -> int | None:
    """The exit code of another engine; None where there is none."""
    import torch

    from tunesmith.cli import output
    from tunesmith.errors import UserError
    from tunesmith.serve.external import NAMES, engine_command, find_engine, run_engine

    gpus = torch.cuda.device_count()
    found = find_engine(engine, has_gpu=gpus > 0)
    if found is None:
        return None
    try:
        command = engine_command(found, folder, adapters, options, gpus=gpus)
    except UserError as why:
        if engine != "auto":
            raise
        output.note(f"{NAMES[found]} is installed and does not serve this, so Tunesmith does: {why}")
        return None
    output.clear_bottom()
    output.note(f"Starting {NAMES[found]}: {shlex.join(_without_key(command.words, options.api_key))}")

    def ready() -> None:
        output.say(f"Serving {', '.join(command.names)} on http://{_shown(options.host)}:{options.port}/v1")

    return run_engine(found, command, options, ready)


def _without_key(words: list[str], key: str | None) -> list[str]:
    return ["***" if key and word == key else word for word in words]


def _adapters(given: list[str]) -> dict[str, Path]:
    from tunesmith.errors import UserError

    made: dict[str, Path] = {}
    for one in given:
        name, separator, where = one.partition("=")
        if not separator or not name or not where:
            raise UserError(f"--adapter: {one} is not of the form NAME=RUN.")
        if not all(char.isalnum() or char in "._-" for char in name) or len(name) > 100:
            raise UserError(f"--adapter: the name {name} has more than letters, digits, `.`, `_` and `-`.")
        if name in made:
            raise UserError(f"--adapter: {name} is given twice.")
        made[name] = Path(where)
    return made


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _log_to_stderr() -> None:
    import logging

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    for name, level in (("tunesmith.serve", logging.INFO), ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.addHandler(handler)
        logger.propagate = False
