"""Offloaded optimizer states (and fp32 masters), the place of paged optimizers: they live in host memory or on disk and
visit the device for their update.

Each visit is a piece of a parameter, some rows of its states: brought while the piece before is updated, taken back
while the piece after is. A few buffers of fixed size go round, so the device holds no more than these. Which piece
comes next is what came next in the step before.

From host memory one stream brings, another takes back, and a third may update, beside what comes next on the device;
all waiting is done by streams, the host only queues. On a CPU the same code copies at once; that is for tests, since
there is nothing to gain. From disk one thread reads ahead and another writes behind, on a GPU by way of as many buffers
in host memory, which holds no more than these either.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from tunesmith.optim.scratch import Scratch, aligned

PIECE, DISK_PIECE = 1 << 24, 1 << 20
"""Values of a parameter in one visit: large enough for the full speed of the link or the disk, small beside the memory
that is to be saved, and no larger than most weights, so that visits are alike and neither way waits for the other."""
BUFFERS = 4
"""One arrives, one waits, one is updated, one leaves."""

Tensors = Mapping[str, torch.Tensor]
Event = torch.cuda.Event | None
"""When a stream is done; None where there are no streams."""
Done = Event | Future[Event]


class Offload:
    """The way between host memory and device. `size` is the bytes of the largest visit."""

    def __init__(self, device: torch.device, size: int):
        self.device = device
        self.streams = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(3)]
        self.buffers = [_Buffer(torch.empty(size, dtype=torch.uint8, device=device)) for _ in range(BUFFERS)]
        self.turn = 0
        self.arrived: dict[Hashable, _Visit] = {}
        self.left: dict[Hashable, Done] = {}
        self.followers: dict[Hashable, tuple[Hashable, Tensors]] = {}
        self.previous: Hashable = None

    @contextmanager
    def visit(self, key: Hashable, home: Tensors) -> Iterator[dict[str, torch.Tensor]]:
        """The tensors of `home` on the device, to be changed there and written back."""
        self.followers[self.previous] = (key, home)
        self.previous = key
        visit = self.arrived.pop(key, None) or self._bring(key, home)
        upcoming = key
        for _ in range(BUFFERS - 2):
            upcoming, its_home = self.followers.get(upcoming, (None, None))
            if upcoming is None or upcoming == key or its_home is None:
                break
            if upcoming not in self.arrived:
                self.arrived[upcoming] = self._bring(upcoming, its_home, besides=visit.buffer)
        self._await(visit.ready)
        yield visit.tensors
        visit.buffer.free = self.left[key] = self._return(visit, home)

    def end_step(self) -> None:
        """The next piece is the first of the next step."""
        self.previous = None

    def overlapped(self) -> AbstractContextManager[object]:
        """What is queued on the device within comes after what was queued before, and beside what is queued later."""
        _wait(self.streams[2], self.mark())
        return _on(self.streams[2])

    def mark(self) -> Event:
        """When all that was queued here is done."""
        return _mark(_current(self.device))

    def let_wait(self, event: Event) -> None:
        """Let what is queued from here on wait for this."""
        _wait(_current(self.device), event)

    def wait(self) -> None:
        """Until everything is back where it lives."""
        if self.streams[1] is not None:
            self.streams[1].synchronize()

    def _bring(self, key: Hashable, home: Tensors, besides: _Buffer | None = None) -> _Visit:
        buffer = self.buffers[self.turn % BUFFERS]
        if buffer is besides:
            self.turn += 1
            buffer = self.buffers[self.turn % BUFFERS]
        self.turn += 1
        for other, visit in list(self.arrived.items()):
            if visit.buffer is buffer:  # brought for nothing: its parameter had no gradient this time
                buffer.free = visit.ready
                del self.arrived[other]
        visit = _Visit(_carve(buffer.memory, home), buffer)
        visit.ready = self._fetch(visit, home, [buffer.free, self.left.get(key)])
        return visit

    def _fetch(self, visit: _Visit, home: Tensors, after: list[Done]) -> Done:
        """Start to copy what lives in `home` to the device, once these are done."""
        return _copy(self.streams[0], after, home, visit.tensors)

    def _await(self, ready: Done) -> None:
        """Let what comes next on the device wait for what was brought."""
        self.let_wait(ready)

    def _return(self, visit: _Visit, home: Tensors) -> Done:
        """Start to copy back what is on the device, once all that was queued there is done."""
        return _copy(self.streams[1], [self.mark()], visit.tensors, home)


class FromDisk(Offload):
    """The same for tensors of a file."""

    def __init__(self, device: torch.device, size: int, scratch: Scratch):
        super().__init__(device, size)
        self.scratch = scratch
        for buffer in self.buffers if device.type == "cuda" else ():
            buffer.staging = pin(torch.empty(size, dtype=torch.uint8))
        self.reader, self.writer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def wait(self) -> None:
        for written in self.left.values():
            written.result()

    def _fetch(self, visit: _Visit, home: Tensors, after: list[Done]) -> Done:
        return self.reader.submit(self._read, visit, home, after)

    def _await(self, ready: Done) -> None:
        super()._await(ready.result())

    def _return(self, visit: _Visit, home: Tensors) -> Done:
        return self.writer.submit(self._write, visit, home, self.mark())

    def _read(self, visit: _Visit, home: Tensors, after: list[Done]) -> Event:
        for done in after:
            if done is not None and (event := done.result()) is not None:
                event.synchronize()
        staged = visit.staged(home)
        for name, value in home.items():
            self.scratch.read(value, staged[name])
        return None if staged is visit.tensors else _copy(self.streams[0], [], staged, visit.tensors)

    def _write(self, visit: _Visit, home: Tensors, updated: Event) -> None:
        staged = visit.staged(home)
        if staged is not visit.tensors and (copied := _copy(self.streams[1], [updated], visit.tensors, staged)):
            copied.synchronize()
        for name, value in home.items():
            self.scratch.write(value, staged[name])


def visit_bytes(home: Tensors) -> int:
    """What a visit of these tensors takes in a buffer."""
    return sum(aligned(value.nbytes) for value in home.values())


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Lock a host tensor's own pages, so that copies run beside everything else; torch's pinned memory would round
    its size up to a power of two. Nothing happens where there is no GPU."""
    if torch.cuda.is_available() and tensor.nbytes:
        runtime, address = torch.cuda.cudart(), tensor.data_ptr()
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, tensor.nbytes, 0)))
        weakref.finalize(tensor.untyped_storage(), runtime.cudaHostUnregister, address)
    return tensor


@dataclass
class _Buffer:
    memory: torch.Tensor
    free: Done = None
    """When the last visit has left."""
    staging: torch.Tensor | None = None
    """As much host memory, on the way between a file and a GPU."""


@dataclass
class _Visit:
    tensors: dict[str, torch.Tensor]
    buffer: _Buffer
    ready: Done = None

    def staged(self, home: Tensors) -> dict[str, torch.Tensor]:
        """The same in host memory."""
        return self.tensors if self.buffer.staging is None else _carve(self.buffer.staging, home)


def _carve(memory: torch.Tensor, home: Tensors) -> dict[str, torch.Tensor]:
    tensors, start = {}, 0
    for name, value in home.items():
        tensors[name] = memory[start : start + value.nbytes].view(value.dtype).view(value.shape)
        start += aligned(value.nbytes)
    return tensors


def _copy(stream: torch.cuda.Stream | None, after: list[Event], source: Tensors, target: Tensors) -> Event:
    with _on(stream):
        for event in after:
            _wait(stream, event)
        for name, value in source.items():
            target[name].copy_(value, non_blocking=True)
        return _mark(stream)


def _current(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return torch.cuda.stream(stream) if stream is not None else nullcontext()


def _mark(stream: torch.cuda.Stream | None) -> Event:
    return stream.record_event() if stream is not None else None


def _wait(stream: torch.cuda.Stream | None, event: Event) -> None:
    if stream is not None and event is not None:
        stream.wait_event(event)
