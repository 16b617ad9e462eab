"""The plan explorer: what a model, a method and hardware come to, by `tunesmith plan` in a process of its own.

Models are those of the catalogue and those whose folders lie below the one the pages were started in, by ids; hardware
is the catalogue's, or this machine. Nothing is loaded and nothing is asked of the network.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import yaml

from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.plan.catalogue import GPUS, MODELS
from tunesmith.ui.read import flat, number, reasons, text
from tunesmith.ui.walk import Entries, file_id, is_run, walk

DEPTH, MOST_FOLDERS, MOST_MODELS = 4, 5_000, 200
SECONDS = 60.0
"""After which a search is given up."""
AT_ONCE = 2
METHODS: tuple[str, ...] = tuple(one for one in get_args(Run.model_fields["method"].annotation) if one != "peft")
HERE = "this machine"
MOST_GPUS = 64


class Explorer:
    """Safe to use from several threads."""

    def __init__(self, here: Path | None = None):
        self.here = Path(here or Path.cwd())
        self._turns = threading.BoundedSemaphore(AT_ONCE)

    def choices(self) -> dict[str, Any]:
        known = [{"id": f"known-{place}", "name": f"{one.name} (catalogue)"} for place, one in enumerate(MODELS)]
        local = [{"id": file_id(path), "name": text(os.path.relpath(path, self.here))} for path in self._folders()]
        return {
            "models": local + known,
            "hardware": [HERE, *(gpu.name for gpu in GPUS)],
            "methods": list(METHODS),
            "most_gpus": MOST_GPUS,
        }

    def plan(self, given: Mapping[str, str]) -> dict[str, Any]:
        """What comes of a choice. UserError where it is none."""
        asked = _asked(given)
        if not self._turns.acquire(blocking=False):
            raise UserError("Other plans are being made; ask again in a moment.")
        try:
            with tempfile.TemporaryDirectory(prefix="tunesmith-plan-") as folder:
                model, shown = self._model(asked["model"], Path(folder))
                settings = {
                    "model": model,
                    "method": asked["method"],
                    "data": "train.jsonl",
                    "sequence_length": asked["sequence_length"],
                    "output": "runs/new",
                }
                file = Path(folder) / "run.yaml"
                file.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
                found = self._found(file, asked)
        finally:
            self._turns.release()
        return _told(found) | {"yaml": yaml.safe_dump(settings | {"model": shown}, sort_keys=False, allow_unicode=True)}

    def _model(self, id: str, folder: Path) -> tuple[str, str]:
        """Where a model's config is, and how a run.yaml would name the model."""
        if id.startswith("known-") and id.removeprefix("known-").isdecimal():
            place = int(id.removeprefix("known-"))
            if place < len(MODELS):
                config = MODELS[place].config() | {
                    "architectures": ["LlamaForCausalLM"],
                    "max_position_embeddings": 1 << 20,
                }
                (folder / "model").mkdir()
                (folder / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
                return str(folder / "model"), MODELS[place].name
        for path in self._folders():
            if file_id(path) == id:
                return str(path), os.path.relpath(path, self.here)
        raise UserError("There is no such model any more; load the page again.")

    def _found(self, file: Path, asked: Mapping[str, Any]) -> dict[str, Any]:
        command = [sys.executable, "-m", "tunesmith", "plan", str(file), "--json", "--tokens", str(asked["tokens"])]
        if asked["price"]:
            command += ["--price", str(asked["price"])]
        if asked["hardware"] != HERE:
            command += ["--hardware", f"{asked['gpus']} x {asked['hardware']}"]
        try:
            done = subprocess.run(
                command, cwd=file.parent, capture_output=True, text=True, check=False, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"No plan was found in {SECONDS:.0f} seconds.") from None
        try:
            return json.loads(done.stdout)
        except ValueError:
            said = [one for one in done.stderr.strip().splitlines() if one.strip() and not one.startswith("warning:")]
            why = " ".join(one.strip() for one in said)[-600:].removeprefix("error: ") or "The plan could not be made."
            raise UserError(why.replace(str(file.parent), "").strip()) from None

    def _folders(self) -> list[Path]:
        """Folders with a model's config and weights."""
        below = walk(self.here, depth=DEPTH, folders=MOST_FOLDERS, ends=lambda some: _is_model(some) or is_run(some))
        return list(itertools.islice((folder for folder, entries in below if _is_model(entries)), MOST_MODELS))


def _is_model(entries: Entries) -> bool:
    names = {one.name for one in entries}
    weights = (".safetensors", ".safetensors.index.json")
    return "config.json" in names and any(name.endswith(weights) for name in names)


def _asked(given: Mapping[str, str]) -> dict[str, Any]:
    method, hardware = given.get("method", "lora"), given.get("hardware", HERE)
    if method not in METHODS or (hardware != HERE and hardware not in {gpu.name for gpu in GPUS}):
        raise UserError("There is no such method or hardware here.")
    length, gpus = int(given.get("sequence_length", "2048")), int(given.get("gpus", "1"))
    tokens, price = float(given.get("tokens") or 1e7), float(given.get("price") or 0)
    if not 8 <= length <= 1 << 20 or not 1 <= gpus <= MOST_GPUS:
        raise UserError(f"A sequence has 8 to {1 << 20:,} tokens, and a machine 1 to {MOST_GPUS} GPUs.")
    if not (math.isfinite(tokens) and 1 <= tokens <= 1e15 and math.isfinite(price) and 0 <= price <= 1e6):
        raise UserError("Tokens and price are numbers above 0.")
    asked = {"model": given.get("model", ""), "method": method, "hardware": hardware}
    return asked | {"sequence_length": length, "gpus": gpus, "tokens": tokens, "price": price}


def _told(found: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of what `tunesmith plan --json` prints."""
    plan = found.get("plan") if isinstance(found.get("plan"), dict) else {}
    model = found.get("model") if isinstance(found.get("model"), dict) else {}
    run = found.get("run") if isinstance(found.get("run"), dict) else {}
    others = [one for one in found.get("alternatives", []) if isinstance(one, dict)]
    return {
        "fits": found.get("fits") is True,
        "memory": {name: size for name, one in flat(plan.get("memory")).items() if (size := number(one))},
        "memory_limit": number(plan.get("memory_limit")),
        "host_memory": number(plan.get("host_memory")),
        "peak": text(plan.get("peak")),
        "tokens_per_second": number(found.get("tokens_per_second")),
        "step_seconds": number(found.get("step_seconds")),
        "parameters": number(model.get("parameters")),
        "trained": number(model.get("trained")),
        "run": {name: number(run.get(name)) for name in ("tokens", "hours", "gpu_hours", "money")},
        "plan": reasons(plan),
        "alternatives": [
            {
                "what": text(one.get("what")),
                "tokens_per_second": number(one.get("tokens_per_second")),
                "bytes": number(one.get("bytes")),
                "remark": text(one.get("remark")),
            }
            for one in others[:8]
        ],
        "changes_that_fit": [text(one) for one in found.get("changes_that_fit", [])[:8]],
        "beyond": [text(one) for one in plan.get("beyond", [])],
    }
