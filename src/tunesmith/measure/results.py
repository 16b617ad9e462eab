"""What a measurement is worth nothing without: when, on what, with which versions and commit."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "peft", "triton", "flash-attn-4", "liger-kernel", "unsloth", "trl", "bitsandbytes")


def document(what: str, numbers: dict[str, Any] | list[dict[str, Any]]) -> dict[str, Any]:
    """Measured numbers with their circumstances, as kept in benchmarks/results."""
    return {
        "what": what,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": _commit(),
        "device": _device(),
        "versions": {"python": platform.python_version(), **_versions()},
        "numbers": numbers,
    }


def _commit() -> str:
    """Of the checkout this package runs from; an installed package has none, whatever repository surrounds it."""
    if os.environ.get("COMMIT"):
        return os.environ["COMMIT"]
    package = Path(__file__).resolve().parents[1]
    root = package.parents[1]
    if package != root / "src" / "tunesmith" or not (root / ".git").exists():
        return "unknown"
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=root)
    except FileNotFoundError:
        return "unknown"
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
