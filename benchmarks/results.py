"""Measured numbers as files: what, when, on what, with which versions and commit. Tables are made from these."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "peft", "triton", "flash-attn-4", "liger-kernel", "unsloth", "bitsandbytes")


def write_result(name: str, what: str, numbers: dict[str, Any] | list[dict[str, Any]]) -> Path:
    """Write NAME.json into benchmarks/results, or into the folder that RESULTS names."""
    folder = Path(os.environ.get("RESULTS") or FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "what": what,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": _commit(),
        "device": _device(),
        "versions": {"python": platform.python_version(), **_versions()},
        "numbers": numbers,
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def _commit() -> str:
    if os.environ.get("COMMIT"):
        return os.environ["COMMIT"]
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=FOLDER.parent)
    return done.stdout.strip() or "unknown"


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
