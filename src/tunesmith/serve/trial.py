"""Whether a schema is compiled within bounds, tried in a process of its own, which is ended where it is not: some take
minutes and gigabytes, whatever limits their compiler is given. `python trial.py`, the grammar on standard input."""

from __future__ import annotations

import resource
import subprocess
import sys
from contextlib import suppress

CPU_SECONDS = 3
SECONDS = 15.0
"""Seconds that compiling may take on a machine that is busy."""
BYTES = 1 << 30
LIMITS = {"max_items_in_row": 20_000, "step_max_items": 100_000}
"""Limits of the parser: a place of an answer where thousands of properties may come has thousands of items."""


def is_compiled(grammar: str) -> bool:
    """Whether the grammar can be compiled within bounds of time and memory, with or without faults."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", __file__], input=grammar.encode(), capture_output=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main() -> None:
    for which, most in ((resource.RLIMIT_CPU, CPU_SECONDS), (resource.RLIMIT_AS, BYTES), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError, OSError):  # macOS knows no limit of memory
            resource.setrlimit(which, (most, most))
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    matcher = LLMatcher(
        LLTokenizer("byte"), sys.stdin.buffer.read().decode(), log_level=0, limits=LLParserLimits(**LIMITS)
    )
    if not matcher.is_error():
        matcher.compute_bitmask()


if __name__ == "__main__":
    main()
