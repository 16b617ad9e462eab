"""Measurements by several processes at once on one GPU: they prepare beside each other and are timed alone.

Compiling keeps a CPU busy, not the GPU, so many workers do that together. When one needs much of the GPU's memory
it asks for it, and gets it when there is enough beside what others have. When it is ready to be timed it asks for its
turn: all others are stopped until it is done, and what they had queued on the GPU has run before it begins. Workers
live on from one order to the next, which saves importing and compiling what orders have in common; one that dies is
replaced, and costs its own order alone.

A worker is a process that reads orders as lines of JSON and writes messages as lines that begin with `MARK`:
`{"kind": "memory"}` and `{"kind": "turn"}`, on which it waits for a line, `{"kind": "timed"}`, and
`{"kind": "result", ...}`, with `"is_last": true` where it ends thereafter.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

MARK = "@@"
TURN_SECONDS = 30.0
"""A turn that takes longer waits for something that a stopped process holds; it is given up."""
ORDER_SECONDS = 300.0
GRACE_SECONDS = 40.0
"""For what is under way when the deadline comes."""
OUT_OF_TIME = "out of time"
QUIET_SECONDS, AT_ONCE = 0.1, 0.5e-3
"""A GPU is quiet when for so long each small kernel was done within so many seconds."""
PATIENCE = 30.0
"""Seconds after which nobody gets memory before the one that has waited the longest."""


@dataclass
class Order:
    payload: dict[str, Any]
    size: int
    """Bytes of the GPU that are set aside for it once it asks for memory."""
    first_size: int
    """Bytes until then."""
    kind: str = ""
    """Orders of a kind share all that a process compiles for them, as long as they follow each other."""
    family: str = ""
    """Orders of a family share some of it."""
    turn_seconds: float = TURN_SECONDS
    seconds: float = ORDER_SECONDS
    """For what it does before it has memory, and again for what it does after that."""


@dataclass(eq=False)
class Worker:
    process: subprocess.Popen[str]
    order: Order | None = None
    since: float = 0.0
    held: int = 0
    """Bytes of the GPU that it may use now."""
    kind: str | None = None
    """Of its last order."""
    families: set[str] = field(default_factory=set)
    is_stopped: bool = False
    is_leaving: bool = False
    is_late: bool = False

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # its end is told by its output
            assert self.process.stdin
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        """To the process and those it started, which are in its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class Pool:
    def __init__(
        self,
        command: list[str],
        *,
        workers: int,
        budget: int,
        deadline: float,
        log: IO[str],
        reuses_workers: bool = True,
        patience: float = PATIENCE,
    ):
        self.command = command
        self.reuses_workers = reuses_workers
        self.patience = patience
        self.count = workers
        self.budget = budget
        self.deadline = time.monotonic() + deadline
        self.log = log
        self.waiting: list[Order] = []
        self.workers: list[Worker] = []
        self.events: queue.Queue[tuple[Worker, dict[str, Any] | None]] = queue.Queue()
        self.needs: list[tuple[float, Worker]] = []
        """Who waits for memory, and since when."""
        self.turns: list[Worker] = []
        """Who waits for its turn."""
        self.timing: Worker | None = None
        self.timing_since = 0.0

    def add(self, order: Order) -> None:
        self.waiting.append(order)

    def run(self) -> Iterator[tuple[Order, dict[str, Any]]]:
        """Each order with what came of it, as soon as it is known; `failed` says why there is nothing. Those that the
        deadline left are not among them."""
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # workers must not outlive this process
        try:
            while self.waiting or any(worker.order for worker in self.workers):
                if time.monotonic() > self.deadline:
                    self.waiting.clear()
                self._hand_out()
                for worker in self._too_long():
                    worker.is_late = True
                    worker.signal(signal.SIGKILL)
                try:
                    worker, message = self.events.get(timeout=0.5)
                except queue.Empty:
                    continue
                found = self._take(worker, message)
                self._next_turn()
                if found:
                    yield found
        finally:
            for worker in self.workers:
                worker.signal(signal.SIGKILL)
            signal.signal(signal.SIGTERM, before)

    def _hand_out(self) -> None:
        if self.timing:
            return  # a new process would disturb the one that is timed
        self._grant_memory()
        for worker in self.workers:
            if worker.order is None and not worker.is_leaving and (order := self._choose(worker)):
                self._give(worker, order)
        while len(self.workers) < self.count and (order := self._choose(None)):
            self._give(self._start(), order)

    def _grant_memory(self) -> None:
        for since, worker in list(self.needs):
            assert worker.order
            if worker.order.size <= self._free or not self._taken:
                self.needs.remove((since, worker))
                worker.held, worker.since = worker.order.size, time.monotonic()
                worker.send({"go": True})
            elif time.monotonic() - since > self.patience:
                return

    @property
    def _taken(self) -> int:
        return sum(worker.held for worker in self.workers)

    @property
    def _free(self) -> int:
        return self.budget - self._taken

    def _choose(self, worker: Worker | None) -> Order | None:
        """The first that can begin beside the others, rather one that the worker is prepared for, and rather none
        that another is prepared for."""
        fitting = [order for order in self.waiting if order.first_size <= self._free or not self._taken]
        others = {one.kind for one in self.workers if one is not worker}
        tests: list[Callable[[Order], bool]] = [
            lambda order: worker is not None and order.kind == worker.kind,
            lambda order: worker is not None and order.family in worker.families and order.kind not in others,
            lambda order: order.kind not in others,
            lambda order: True,
        ]
        for suits in tests:
            for order in fitting:
                if suits(order):
                    self.waiting.remove(order)
                    return order
        return None

    def _give(self, worker: Worker, order: Order) -> None:
        worker.order, worker.since, worker.held = order, time.monotonic(), order.first_size
        worker.kind = order.kind
        worker.families.add(order.family)
        worker.send(order.payload)

    def _start(self) -> Worker:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log}
        worker = Worker(subprocess.Popen(self.command, text=True, errors="replace", start_new_session=True, **pipes))
        self.workers.append(worker)
        threading.Thread(target=self._listen, args=(worker,), daemon=True).start()
        return worker

    def _listen(self, worker: Worker) -> None:
        assert worker.process.stdout
        for line in worker.process.stdout:
            if line.startswith(MARK):
                self.events.put((worker, json.loads(line.removeprefix(MARK))))
        self.events.put((worker, None))

    def _take(self, worker: Worker, message: dict[str, Any] | None) -> tuple[Order, dict[str, Any]] | None:
        order = worker.order
        if message is None:
            if worker not in self.workers:
                return None  # done, and ended by us
            self.workers.remove(worker)
            self.needs = [(since, one) for since, one in self.needs if one is not worker]
            self.turns = [one for one in self.turns if one is not worker]
            self.timing = None if self.timing is worker else self.timing
            code = worker.process.wait()
            why = OUT_OF_TIME if worker.is_late else f"the process ended with {code}"
            return (order, {"failed": why}) if order else None
        if message["kind"] == "memory":
            worker.held = 0
            if order is not None and message.get("bytes"):
                order.size = message["bytes"]
            self.needs.append((time.monotonic(), worker))
        elif message["kind"] == "turn":
            self.turns.append(worker)
        elif message["kind"] == "timed":
            self.timing = None if self.timing is worker else self.timing
        elif order is not None:
            worker.order, worker.held = None, 0
            if not self.reuses_workers:
                self.workers.remove(worker)
                worker.signal(signal.SIGKILL)
                worker.process.wait()  # its memory is free then, and not before
            return order, {name: value for name, value in message.items() if name != "kind"}
        return None

    def _next_turn(self) -> None:
        if self.timing is not None:
            return
        self.timing = self.turns.pop(0) if self.turns else None
        for worker in self.workers:
            should_stop = self.timing is not None and worker is not self.timing
            if worker.is_stopped != should_stop:
                worker.signal(signal.SIGSTOP if should_stop else signal.SIGCONT)
                worker.is_stopped = should_stop
        if self.timing is not None:
            self.timing_since = time.monotonic()
            self.timing.send({"go": True})

    def _too_long(self) -> list[Worker]:
        """Those to be ended: the one whose turn or order takes too long, or all when the time is over."""
        now = time.monotonic()
        if self.timing is not None:
            assert self.timing.order
            return [self.timing] if now - self.timing_since > self.timing.order.turn_seconds else []
        is_over = now > self.deadline + GRACE_SECONDS
        waiting = [*self.turns, *(worker for _, worker in self.needs)]
        late = [one for one in self.workers if one.order and one not in waiting and now - one.since > one.order.seconds]
        return [one for one in self.workers if one.order and (is_over or one in late)]


# the worker's side


def say(kind: str, **content: Any) -> None:
    # A line of its own, whatever a library has written before it.
    print("\n" + MARK + json.dumps({"kind": kind, **content}), flush=True)


def orders() -> Iterator[dict[str, Any]]:
    for line in iter(sys.stdin.readline, ""):
        yield json.loads(line)


def ask_for_memory(size: int | None = None) -> None:
    """Wait until the order's size is there, or so many bytes; what was used before has been given back."""
    say("memory", bytes=size)
    sys.stdin.readline()


@contextmanager
def turn() -> Iterator[None]:
    """Alone on the machine."""
    say("turn")
    sys.stdin.readline()
    try:
        wait_for_others()
        yield
    finally:
        say("timed")


def wait_for_others(seconds: float = 10.0) -> None:
    """Until the GPU is done with what stopped processes had queued, or for so long. As long as it is not, it gives each
    process its slice of time in turn, and the smallest kernel comes back after milliseconds."""
    import torch

    if not torch.cuda.is_available():
        return
    tensor = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    began = quiet_since = time.monotonic()
    while time.monotonic() - began < seconds and time.monotonic() - quiet_since < QUIET_SECONDS:
        before = time.monotonic()
        tensor.add_(1)
        torch.cuda.synchronize()
        if time.monotonic() - before > AT_ONCE:
            quiet_since = time.monotonic()
