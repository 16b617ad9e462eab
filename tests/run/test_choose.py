"""The choice of a plan before ranks are started."""

from __future__ import annotations

import subprocess
import sys

from tiny import write_all

CODE = """
import sys
from tunesmith.run.choose import choose_plan
from tunesmith.config.load import load
assert choose_plan(load("run.yaml").run, ranks=2).mesh.ranks == 2
print([name for name in ("torch", "transformers") if name in sys.modules])
"""


def test_ranks_do_not_wait_for_libraries_that_their_launcher_has_no_use_for(tiny_model, tmp_path):
    folder = write_all(tmp_path, tiny_model)
    done = subprocess.run([sys.executable, "-c", CODE], cwd=folder, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
