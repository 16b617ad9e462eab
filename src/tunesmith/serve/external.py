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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tunesmith.config.schema import Run
from tunesmith.errors import UserError, listed
from tunesmith.infer.vllm_server import answers, end_group, find_command, is_taken, refusals, serve_words
from tunesmith.model import side_files, vllm
from tunesmith.model.load import DTYPES, load_tokenizer, locate
from tunesmith.model.save import ADAPTER_CONFIG
from tunesmith.run.folder import has_result, no_run, read_identity, read_plan, read_run
from tunesmith.run.open import encoder_of, make_encoder, placement, refuse_encoder_decoder, refuse_head
from tunesmith.run.there import no_result
from tunesmith.serve.models import BASE, check_same_base
from tunesmith.serve.server import DRAIN_SECONDS, Options

NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
DRAFTED = 5
"""Tokens that a draft model proposes at a time."""
VLLM_SIDE = Path(__file__).parent / "vllm_side"
KEY_EVERYWHERE = "tunesmith_key.KeyEverywhere"
"""What vLLM's own Python imports from there."""
CACHE_SHARE = 4
"""On a host without a GPU the key-value cache has one part of so many of the free memory, as that of Tunesmith's own
engine; vLLM would take nine tenths of all memory, and end where they are not free."""


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
        return next(filter(_command_of, NAMES), None) if has_gpu else None
    if wanted not in NAMES:
        raise UserError(f"--engine is {wanted}; it can be auto, own, vllm or sglang.")
    if _command_of(wanted) is None:
        raise UserError(f"--engine {wanted}: {NAMES[wanted]} is not installed here (no command `{wanted}`).")
    return wanted


def _command_of(engine: str) -> str | None:
    return find_command() if engine == "vllm" else shutil.which(engine)


def engine_command(
    engine: str, folder: Path, adapters: Mapping[str, Path], options: Options, *, gpus: int = 1
) -> Command:
    """The command that serves the run or model in `folder`, with further adapters by their names; `gpus`: 0 where there
    is none."""
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
            _check_asked_alike(folder, other)
        ranks = [_adapter_rank(where) for where in loras.values()]
        words += ["--enable-lora", "--max-loras", str(len(loras)), "--max-lora-rank", str(max(ranks))]
        words += ["--lora-modules", *(f"{one}={(where / 'adapter').resolve()}" for one, where in loras.items())]
        side = str((folder / side_files.FOLDER).resolve())
        words += ["--tokenizer", side, "--generation-config", side]
        names = (*loras, BASE)
    words += ["--host", options.host, "--port", str(options.port), "--max-num-seqs", str(options.batch)]
    words += ["--max-model-len", str(options.length)] if options.length else []
    words += ["--tensor-parallel-size", str(gpus)] if gpus > 1 else []
    words += _precision(folder, has_adapter=has_adapter, is_run=is_run, has_gpu=gpus > 0)
    if gpus == 0:
        words += ["--kv-cache-memory-bytes", str(psutil.virtual_memory().available // CACHE_SHARE)]
    if mode := _template_mode(folder, is_run):
        words += ["--default-chat-template-kwargs", json.dumps(mode)]
    if options.draft is not None:
        drafted = {"method": "draft_model", "model": options.draft, "num_speculative_tokens": DRAFTED}
        words += ["--speculative-config", json.dumps(drafted)]
    environment: dict[str, str] = {}
    if options.api_key:
        words += ["--middleware", KEY_EVERYWHERE]
        known = os.environ.get("PYTHONPATH")
        folders = os.pathsep.join([str(VLLM_SIDE), *([known] if known else [])])
        environment |= {"VLLM_API_KEY": options.api_key, "PYTHONPATH": folders}
    if options.loads_adapters:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    return Command(words, environment, names)


def _precision(folder: Path, *, has_adapter: bool, is_run: bool, has_gpu: bool) -> list[str]:
    """What vLLM is told where it would round weights in fp32 to 16 bits unasked. On a GPU it has no adapters in fp32,
    and Tunesmith opens a model of which no run is known in 16 bits, too."""
    if is_run:
        precision = placement(read_plan(folder))[1]
        return ["--dtype", DTYPES[precision]] if not (precision == "fp32" and has_gpu and has_adapter) else []
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    is_wide = "float32" in (config.get("dtype"), config.get("torch_dtype"))
    return ["--dtype", "float32"] if is_wide and not has_gpu else []


def _template_mode(folder: Path, is_run: bool) -> dict[str, Any]:
    """The chat template's variables with which the model was asked in training."""
    if is_run:
        asked = side_files.read_asked(folder / side_files.FOLDER)
        return encoder_of(folder).mode_of(bool(asked.get("reasons")))
    if not (asked := side_files.read_asked(folder)):
        return {}
    alone = Run(model=str(folder), data=str(folder))
    encoder = make_encoder(
        alone,
        load_tokenizer(alone),
        train_on=asked.get("train_on", alone.train_on),
        special_tokens=asked.get("special_tokens", ()),
    )
    return encoder.mode_of(bool(asked.get("reasons")))


def _check_asked_alike(folder: Path, other: Path) -> None:
    """vLLM has one tokenizer, chat template and list of stop tokens for all adapters: those of the first run."""
    mine, theirs = (_asked_by(one) for one in (folder, other))
    differ = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
    if differ:
        raise UserError(
            f"{other} is asked in another way than {folder} ({listed(differ)} differ), and vLLM knows one alone: "
            "serve it by a server of its own, or both by Tunesmith: --engine own."
        )


def _asked_by(folder: Path) -> dict[str, bytes]:
    """The side files that say how a run's model is asked and where its answers end."""
    side = folder / side_files.FOLDER
    patterns = (*side_files.TOKENIZER_FILES, side_files.GENERATION, side_files.ASKED)
    files = {file for pattern in patterns for file in side.glob(pattern) if file.is_file()}
    return {file.name: file.read_bytes() for file in files}


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
    if is_run and not has_result(folder, "model"):
        raise no_result(folder, "finished model")
    if not (found / "config.json").exists():
        raise no_run(folder)
    return found.resolve()


def _adapter_rank(folder: Path) -> int:
    """What vLLM must be told of the adapter's rank. UserError where it would leave some of the adapter out."""
    where = folder / "adapter"
    if not has_result(folder, "adapter"):
        raise no_result(folder, "finished adapter")
    if notes := refusals(where):
        raise UserError(f"{folder}: {' '.join(notes)} Or serve it by Tunesmith: --engine own.")
    return vllm.largest_rank(json.loads((where / ADAPTER_CONFIG).read_text(encoding="utf-8")))


def run_engine(engine: str, command: Command, options: Options, ready: Callable[[], None]) -> int:
    """Start it, call `ready` when it answers, and wait for its end. A signal is passed on; what it has not done within
    half a minute, or at a second signal, is ended. Its exit code."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host, options.host)
    if is_taken(host, options.port):
        raise UserError(f"--port {options.port}: another server listens there already; choose another port.")
    words, found = command.words, _command_of(engine)
    if engine == "vllm" and found is not None:
        words = [*serve_words(found), *words[2:]]
    # In a group of its own: a terminal sends Ctrl-C to all of a group, and vLLM takes the second one as an order to
    # drop what is under way.
    process = subprocess.Popen(words, env=os.environ | command.environment, process_group=0)
    asked_to_end: list[tuple[int, float]] = []

    def pass_on(number: int, _: object) -> None:
        if asked_to_end:
            end_group(process)
        else:
            asked_to_end.append((number, time.monotonic()))
            process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    def is_running() -> bool:
        if asked_to_end and time.monotonic() > asked_to_end[0][1] + DRAIN_SECONDS:
            end_group(process)
        return process.poll() is None

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        numbers.append(signal.SIGHUP)
    old = {number: signal.signal(number, pass_on) for number in numbers}
    address = f"http://{f'[{host}]' if ':' in host else host}:{options.port}"
    try:
        while is_running() and not answers(address):
            time.sleep(0.2)
        if process.returncode is None:
            ready()
        while is_running():
            time.sleep(0.2)
        if process.returncode and not asked_to_end:
            raise UserError(f"{NAMES[engine]} ended with code {process.returncode}; it says why above.")
        return process.returncode if process.returncode >= 0 else 128 - process.returncode
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        end_group(process)
