"""Whether the code of an answer passes the unit tests of its record, tried in a process of its own.

That process has a time limit, a memory limit, an empty folder that is removed afterwards, no environment, and, where
the kernel lets an ordinary user do it, a namespace without network and with processes that end when it ends. It is a
guard against what a model may write by accident, not against an attacker: it can read what its user can read.

It must say at the end a word that it was told, so that code which ends the process early has passed nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunesmith.rewards import sandbox

_FENCE = re.compile(r"```(?:python|py)?[^\S\n]*\n(.*?)```", re.S)
LARGEST_OUTPUT = 1 << 16


def has_passed(answer: str, record: Mapping[str, Any], *, seconds: float, memory: int) -> bool:
    program = f"{code_of(answer)}\n\n{tests_of(record)}\n"
    word = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="tunesmith-tests-") as folder:
        command = [sys.executable, "-I", str(Path(sandbox.__file__)), str(seconds), str(memory)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"},
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(f"{word}\n{program}".encode(errors="replace"), timeout=seconds + 5)
        except subprocess.TimeoutExpired:
            said = b""
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.communicate()
    return said[-LARGEST_OUTPUT:].endswith(word.encode())


def code_of(answer: str) -> str:
    """The last fenced block, or all of the answer."""
    blocks = _FENCE.findall(answer)
    return blocks[-1] if blocks else answer


def tests_of(record: Mapping[str, Any]) -> str:
    """Tests as text, as a list of statements (MBPP), or as a function `check` of the one under `entry_point`."""
    tests = record.get("tests")
    parts = [str(record[name]) for name in ("test_setup_code", "test_imports") if isinstance(record.get(name), str)]
    parts += [str(one) for one in tests] if isinstance(tests, list) else [str(tests)]
    if record.get("entry_point") and any("def check(" in part for part in parts):
        parts.append(f"check({record['entry_point']})")
    return "\n".join(parts)
