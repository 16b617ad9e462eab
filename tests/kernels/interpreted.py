"""Runs a kernel's cases in Triton's interpreter: in processes of their own, since Triton decides at import.

Importing takes longer than most cases, so one process imports everything and forks a child for each check.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

SECONDS = 300
"""That a check may take."""
END = "end\n"
"""Said when no more are wanted."""


def run_interpreted(check: str) -> str:
    """What `kernel_cases.CHECK` prints; its failure is an AssertionError with all it said."""
    process = _warm_process()
    process.stdin.write(check + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    assert line, f"the process of all checks ended with exit code {process.wait()}"
    answer = json.loads(line)
    assert answer["code"] == 0, answer["said"]
    return answer["said"]


@functools.cache
def _warm_process() -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-m", "interpreted"],
        cwd=Path(__file__).parent,
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.communicate, END)
    return process


def serve() -> None:
    """One check a line, answered by its exit code and what it said."""
    import decoding_cases  # noqa: F401  (the imports are the point)
    import kernel_cases
    import torch.distributed.tensor
    import torch.fx.experimental.symbolic_shapes  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401
    import triton.experimental.gluon  # noqa: F401

    gc.freeze()  # else each child copies most of the memory, by looking for garbage in it
    for line in sys.stdin:
        if line == END:
            break
        with tempfile.TemporaryFile("w+") as said:
            child = os.fork()
            if child == 0:
                _be_a_check(getattr(kernel_cases, line.strip()), said.fileno())
            _, status = os.waitpid(child, 0)
            said.seek(0)
            print(json.dumps({"code": os.waitstatus_to_exitcode(status), "said": said.read()}), flush=True)
    os._exit(0)  # tidying up takes seconds and helps nobody


def _be_a_check(check, said: int) -> None:
    code = 1
    try:
        for stream in (1, 2):
            os.dup2(said, stream)
        signal.alarm(SECONDS)
        check("cpu")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
