"""Ranks over gloo that are started once and then do one thing after another, since starting them is what takes long.

A `World` is one process that imports everything and forks its ranks; each waits for orders, a function's name with
arguments, and all of them run it at once.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any


class World:
    """So many ranks; calling it runs a function (`module:name`, given its `Ranks` first) on all of them."""

    def __init__(self, count: int, cache: Path):
        self.count = count
        self._has_failed = False
        environment = {
            **os.environ,
            "TUNESMITH_CACHE": str(cache),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ranks", str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __call__(self, function: str, **arguments: Any) -> list[Any]:
        """What each rank returned, in their order; a failure of one is an AssertionError with its traceback."""
        self._process.stdin.write(json.dumps({"function": function, "arguments": arguments}) + "\n")
        self._process.stdin.flush()
        answers = json.loads(self._process.stdout.readline())
        failed = [f"rank {rank}: {one['failed']}" for rank, one in enumerate(answers) if "failed" in one]
        self._has_failed = bool(failed)
        assert not failed, "\n".join(failed)
        return [one["result"] for one in answers]

    @property
    def is_over(self) -> bool:
        """A rank has failed, which ends them all."""
        return self._has_failed

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def serve(count: int) -> None:
    import multiprocessing

    import torch.distributed.fsdp  # noqa: F401  (the imports are the point)
    import transformers.models.llama.modeling_llama  # noqa: F401

    import tunesmith.assemble  # noqa: F401
    from tunesmith.parallel.launch import _free_port

    context = multiprocessing.get_context("fork")
    port = _free_port()
    pipes, processes = [], []
    for rank in range(count):
        ours, theirs = context.Pipe()
        process = context.Process(target=_be_a_rank, args=(rank, count, port, theirs), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    for line in sys.stdin:
        for pipe in pipes:
            pipe.send_bytes(line.encode())
        answers = _answers(pipes)
        print(json.dumps(answers), flush=True)
        if any("failed" in one for one in answers):
            break  # others may wait for it in vain
    for process in processes:
        process.kill()


def _answers(pipes: list[Any]) -> list[dict[str, Any]]:
    """Of all ranks; once one has failed, the others have five seconds."""
    answers: list[dict[str, Any]] = [{"failed": "no answer"} for _ in pipes]
    give_up = None
    waiting = dict(enumerate(pipes))
    while waiting and (give_up is None or time.monotonic() < give_up):
        for rank, pipe in list(waiting.items()):
            if pipe.poll(0.01):
                answers[rank] = json.loads(pipe.recv_bytes())
                del waiting[rank]
                if "failed" in answers[rank] and give_up is None:
                    give_up = time.monotonic() + 5
    return answers


def _be_a_rank(rank: int, count: int, port: int, pipe: Any) -> None:
    from tunesmith.parallel.ranks import connected
    from tunesmith.plan.place import here

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the parent's is for answers
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with connected(here()) as ranks:
        while True:
            wanted = json.loads(pipe.recv_bytes())
            module, _, name = wanted["function"].partition(":")
            try:
                answer = {"result": getattr(importlib.import_module(module), name)(ranks, **wanted["arguments"])}
            except BaseException:
                answer = {"failed": traceback.format_exc()}
            pipe.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    serve(int(sys.argv[1]))
