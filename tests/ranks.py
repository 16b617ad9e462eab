"""Ranks over gloo that are started once and then do one thing after another, since starting them is what takes long.

`Worlds` is one process that imports everything and forks ranks, of worlds of any size; each rank waits for orders, a
function's name with arguments, and all of a world run it at once.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny import END


class Worlds:
    """Worlds by their number of ranks, each started when it is first asked for something."""

    def __init__(self, cache: Path):
        environment = {
            **os.environ,
            "TUNESMITH_CACHE": str(cache),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ranks"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __call__(self, count: int, *, is_new: bool = False) -> Callable[..., list[Any]]:
        """Runs a function (`module:name`, given its `Ranks` first) on so many ranks; new ones have done nothing yet."""

        def world(function: str, **arguments: Any) -> list[Any]:
            return self._ask(count, {"function": function, "arguments": arguments, "is_new": is_new})

        return world

    def close(self) -> None:
        self._process.stdin.write(END)  # another process that was forked meanwhile may keep the pipe open
        self._process.stdin.close()
        self._process.wait(120)  # it may still be importing, on a busy machine
        self._process.stdout.close()

    def _ask(self, count: int, order: dict[str, Any]) -> list[Any]:
        """What each rank returned, in their order; a failure of one is an AssertionError with its traceback."""
        self._process.stdin.write(json.dumps({"count": count, **order}) + "\n")
        self._process.stdin.flush()
        answers = json.loads(self._process.stdout.readline())
        failed = [f"rank {rank}: {one['failed']}" for rank, one in enumerate(answers) if "failed" in one]
        assert not failed, "\n".join(failed)
        return [one["result"] for one in answers]


AXES = {"tensor": "ddp", "context": "ddp", "pipeline": "none"}
"""And what lies over their ranks."""
MESHES = {way: {"shard": 2} for way in ("zero1", "zero2", "zero3")} | {"ddp": {"replicate": 2}}
MESHES |= {axis: {axis: 2} for axis in AXES}


def assert_two_give_the_losses_of_one(
    worlds: Worlds,
    folder: Path,
    way: str,
    *,
    count: int = 2,
    rel: float = 1e-5,
    places: Path | None = None,
    **options: Any,
) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """Steps of the run in `folder` on one rank and on two: losses, norms (to ten times `rel`) and figures. Returns them
    for what else should hold."""
    import pytest

    call = "parallel.on_ranks:steps"
    options = {"folder": str(folder), "data": [{"path": str(folder / "train.jsonl")}], "count": count, **options}
    alone = worlds(1)(call, mesh={}, sharding="none", output=str((places or folder) / "one"), **options)[0]
    sharding = AXES.get(way, way)
    both = worlds(2)(call, mesh=MESHES[way], sharding=sharding, output=str((places or folder) / "two"), **options)
    assert len(alone) == count
    for number, expected in enumerate(alone):
        found = [steps[number] for steps in both]
        assert found[0]["loss"] == found[1]["loss"]
        assert found[0]["loss"] == pytest.approx(expected["loss"], rel=rel, abs=1e-6)
        assert found[0]["norm"] == pytest.approx(expected["norm"], rel=10 * rel)
        # Before the first update the answers of a pair are as likely as the reference has them, up to rounding.
        is_open = {"accuracy"} if number == 0 and options.get("objective") else set()
        figures = [{k: v for k, v in one["figures"].items() if k not in is_open} for one in (found[0], expected)]
        assert figures[0] == pytest.approx(figures[1], rel=10 * rel, abs=1e-5)
    return alone, both


class _World:
    """The ranks of one world, as their parent sees them."""

    def __init__(self, count: int):
        import multiprocessing

        from tunesmith.launch.local import free_port

        context = multiprocessing.get_context("fork")
        port = free_port()
        self._pipes, self._processes = [], []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_be_a_rank, args=(rank, count, port, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def ask(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        for pipe in self._pipes:
            pipe.send_bytes(json.dumps(order).encode())
        return _answers(self._pipes)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def serve() -> None:
    from tunesmith.cli.main import COLLECTING

    gc.set_threshold(*COLLECTING)
    import torch.distributed.fsdp  # noqa: F401  (the imports are the point)
    import transformers.models.llama.modeling_llama  # noqa: F401

    import tunesmith.run.assemble  # noqa: F401

    worlds: dict[int, _World] = {}
    for line in sys.stdin:
        if line == END:
            break
        order = json.loads(line)
        count = order.pop("count")
        if order.pop("is_new") and count in worlds:
            worlds.pop(count).end()
        if count not in worlds:
            worlds[count] = _World(count)
        answers = worlds[count].ask(order)
        if any("failed" in one for one in answers):
            worlds.pop(count).end()  # others may wait for it in vain
        print(json.dumps(answers), flush=True)
    for world in worlds.values():
        world.end()
    os._exit(0)  # tidying up takes seconds and helps nobody


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
    from tunesmith.launch.rank_environment import read_rank_environment
    from tunesmith.parallel.ranks import connected

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the parent's is for answers
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with connected(read_rank_environment()) as ranks:
        while True:
            wanted = json.loads(pipe.recv_bytes())
            module, _, name = wanted["function"].partition(":")
            try:
                answer = {"result": getattr(importlib.import_module(module), name)(ranks, **wanted["arguments"])}
            except BaseException:
                answer = {"failed": traceback.format_exc()}
            pipe.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    serve()
