from __future__ import annotations

import sys
import time

from tunesmith.launch.hosts import run_on_hosts


def test_the_commands_of_hosts_end_together_when_one_fails():
    said: list[str] = []
    began = time.monotonic()
    python = [sys.executable, "-c"]
    code = run_on_hosts({"a": [*python, "print('hello'); raise SystemExit(3)"], "b": ["sleep", "60"]}, said.append)
    assert code == 3
    assert said == ["a: hello"]
    assert time.monotonic() - began < 30
    assert run_on_hosts({"a": ["true"], "b": ["true"]}, said.append) == 0
