"""Every verb says in a terminal what it does before it imports what takes seconds."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from screen import Terminal

HEAVY = ("torch", "transformers", "datasets", "numpy", "pyarrow")
VERBS = {
    "init": ["new.yaml", "--model", "m", "--data", "run.yaml", "--method", "lora"],
    "check": [],
    "plan": [],
    "train": [],
    "eval": ["run"],
    "chat": ["run"],
    "merge": ["run", "--to", "merged"],
    "export": ["run", "--to", "gguf"],
    "quantize": ["run", "--to", "quantized"],
    "profile": [],
    "bench": ["tiny"],
    "network": [],
    "doctor": [],
    "schema": [],
    "launch": ["slurm", "run.yaml"],
}
PROGRAM = f"""
import os, sys
from tunesmith.cli import output
from tunesmith.cli.main import main
before = output.stage
def first(name):
    before(name)
    used = sum(os.times()[:2])
    print([m for m in {HEAVY!r} if m in sys.modules], round(used, 2), file=open("found", "w"), flush=True)
    os._exit(0)
output.stage = first
main(sys.argv[1:])
"""


@pytest.mark.parametrize("verb", VERBS)
def test_the_first_sign_of_life_comes_within_a_second_and_before_heavy_imports(verb, tmp_path):
    """In CPU seconds: what else the machine does is not our doing."""
    (tmp_path / "run.yaml").write_text("model: m\ndata: run.yaml\n")
    (tmp_path / "run").mkdir()
    window = Terminal(72)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "NO_COLOR", "FORCE_COLOR")}
    try:
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, verb, *VERBS[verb]],
            cwd=tmp_path,
            env={**environment, "TERM": "xterm-256color"},
            stdin=window.theirs,
            stdout=window.theirs,
            stderr=window.theirs,
            timeout=60,
        )
        (line,) = [line for line in window.look(0.05) if line]
    finally:
        window.close()
    assert ended.returncode == 0, line
    assert line.endswith("...")
    imported, seconds = (tmp_path / "found").read_text().rsplit(" ", 1)
    assert imported == "[]"
    assert float(seconds) < 2.0  # generous: half of it on a machine that does nothing else
