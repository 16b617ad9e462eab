"""Other engines behind the same verb: vLLM and SGLang, where they are installed, started for a run and watched.

They get what the run's own server has: its names, tokenizer, chat template and stop tokens, limits and key. What one of
them would leave out of an adapter without a word is refused before it starts.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open

from tunesmith.errors import UserError
from tunesmith.model import side_files, vllm
from tunesmith.model.load import locate
from tunesmith.model.save import ADAPTER_CONFIG, ADAPTER_FILE
from tunesmith.run.folder import read_identity, read_run
from tunesmith.run.open import refuse_encoder_decoder, refuse_head
from tunesmith.serve.models import BASE, check_same_base
from tunesmith.serve.server import Options

NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
DRAFTED = 5
"""Tokens that a draft model proposes at a time."""


@dataclass(frozen=True)
class Command:
    """How an engine is started."""

    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    """What is no word of the command, where everybody on the machine would read it."""
    names: tuple[str, ...] = ()
    """What clients may ask for."""


def find_engine(wanted: str, *, has_gpu: bool) -> str | None:
    """The engine to start: the one that is wanted, or with `auto` the first that is installed, where there is a GPU;
    None for Tunesmith's own."""
    if wanted == "own":
        return None
    if wanted == "auto":
        return next(filter(shutil.which, NAMES), None) if has_gpu else None
    if wanted not in NAMES:
        raise UserError(f"--engine is {wanted}; it can be auto, own, vllm or sglang.")
    if shutil.which(wanted) is None:
        raise UserError(f"--engine {wanted}: {NAMES[wanted]} is not installed here (no command `{wanted}`).")
    return wanted


def engine_command(
    engine: str, folder: Path, adapters: Mapping[str, Path], options: Options, *, gpus: int = 1
) -> Command:
    """For the run or model in `folder`, with further adapters by their names."""
    is_run = read_identity(folder) is not None
    if is_run:
        refuse_head(folder, "be served here")
        refuse_encoder_decoder(folder, f"be served by {NAMES[engine]} here")
    has_adapter = is_run and read_run(folder).has_adapters
    if adapters and not has_adapter:
        raise UserError(f"--adapter: {folder} holds no adapter, and others need its base; merge them instead.")
    if engine == "sglang":
        return _sglang(folder, options, has_adapter=has_adapter, is_run=is_run, gpus=gpus)
    name = folder.resolve().name
    words = ["vllm", "serve", locate(read_run(folder).model).location if has_adapter else str(_model(folder, is_run))]
    names = (BASE,) if has_adapter else (name,)
    words += ["--served-model-name", *names]
    if has_adapter:
        loras = {name: folder, **adapters}
        for other in adapters.values():
            check_same_base(folder, other)
        ranks = [_adapter_rank(where) for where in loras.values()]
        words += ["--enable-lora", "--max-loras", str(len(loras)), "--max-lora-rank", str(max(ranks))]
        words += ["--lora-modules", *(f"{one}={(where / 'adapter').resolve()}" for one, where in loras.items())]
        side = str((folder / side_files.FOLDER).resolve())
        words += ["--tokenizer", side, "--generation-config", side]
        names = (*loras, BASE)
    words += ["--host", options.host, "--port", str(options.port), "--max-num-seqs", str(options.batch)]
    words += ["--max-model-len", str(options.length)] if options.length else []
    words += ["--tensor-parallel-size", str(gpus)] if gpus > 1 else []
    if options.draft is not None:
        drafted = {"method": "draft_model", "model": options.draft, "num_speculative_tokens": DRAFTED}
        words += ["--speculative-config", json.dumps(drafted)]
    environment = {"VLLM_API_KEY": options.api_key} if options.api_key else {}
    if options.loads_adapters:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    return Command(words, environment, names)


def _sglang(folder: Path, options: Options, *, has_adapter: bool, is_run: bool, gpus: int) -> Command:
    if has_adapter:
        raise UserError(
            f"{folder} holds an adapter, which SGLang would serve with its base's stop tokens and chat template: merge "
            "it with `tunesmith merge`, and serve the merged folder."
        )
    if options.draft is not None or options.loads_adapters:
        raise UserError("--draft and --allow-adapter-loading go with --engine vllm or own.")
    name = folder.resolve().name
    words = ["sglang", "serve", "--model-path", str(_model(folder, is_run)), "--served-model-name", name]
    words += ["--host", options.host, "--port", str(options.port), "--max-running-requests", str(options.batch)]
    words += ["--context-length", str(options.length)] if options.length else []
    words += ["--tp-size", str(gpus)] if gpus > 1 else []
    words += ["--api-key", options.api_key] if options.api_key else []
    return Command(words, {}, (name,))


def _model(folder: Path, is_run: bool) -> Path:
    found = folder / "model" if is_run else folder
    if not (found / "config.json").exists():
        raise UserError(f"{folder} holds no finished model yet; run `tunesmith train` first.")
    return found.resolve()


def _adapter_rank(folder: Path) -> int:
    """What vLLM must be told of the adapter's rank. UserError where it would leave some of the adapter out."""
    where = folder / "adapter"
    if not (where / ADAPTER_CONFIG).exists():
        raise UserError(f"{folder} holds no finished adapter yet; run `tunesmith train` first.")
    config = json.loads((where / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    with safe_open(where / ADAPTER_FILE.format(suffix=""), framework="pt") as file:
        names = list(file.keys())
    if notes := vllm.refused(config, names):
        raise UserError(f"{folder}: {' '.join(notes)} Or serve it by Tunesmith: --engine own.")
    return vllm.largest_rank(config)


def run_engine(engine: str, command: Command, options: Options, ready: Callable[[], None]) -> int:
    """Start it, call `ready` when it answers, and wait for its end; SIGINT and SIGTERM are passed on. Its exit code."""
    process = subprocess.Popen(command.words, env=os.environ | command.environment)
    old = {
        number: signal.signal(number, lambda number, _: process.send_signal(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        while process.poll() is None and not _answers(options):
            time.sleep(0.2)
        if process.poll() not in (None, 0):
            raise UserError(
                f"{NAMES[engine]} ended with code {process.returncode} before it answered; it says why above."
            )
        ready()
        return process.wait()
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        if process.poll() is None:
            process.terminate()
            process.wait()


def _answers(options: Options) -> bool:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(options.host, options.host)
    try:
        with urllib.request.urlopen(f"http://{host}:{options.port}/health", timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False
