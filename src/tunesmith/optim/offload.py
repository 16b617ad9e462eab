"""Optimizer states (and fp32 masters) that live in host memory and visit the device for their update.

Each visit is a piece of a parameter, some rows of its states: brought by one stream while the piece before is updated,
taken back by another while the piece after is. A few buffers of fixed size go round, so the device holds no more than
these, and all waiting is done by streams: the host only queues. Which piece comes next is what came next in the step
before. On a CPU the same code copies at once; that is for tests, since there is nothing to gain.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

PIECE = 1 << 25
"""Values of a parameter in one visit: large enough for the link's full speed, small beside the device's memory."""
BUFFERS = 3
"""One arrives, one is updated, one leaves."""
ALIGNMENT = 256

Tensors = Mapping[str, torch.Tensor]


class Offload:
    """The way between host and device. `size` is the bytes of the largest visit."""

    def __init__(self, device: torch.device, size: int):
        self.device = device
        self.streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else [None, None]
        self.buffers = [_Buffer(torch.empty(size, dtype=torch.uint8, device=device)) for _ in range(BUFFERS)]
        self.turn = 0
        self.arrived: dict[Hashable, _Visit] = {}
        self.left: dict[Hashable, torch.cuda.Event | None] = {}
        self.followers: dict[Hashable, tuple[Hashable, Tensors]] = {}
        self.previous: Hashable = None

    @contextmanager
    def visit(self, key: Hashable, host: Tensors) -> Iterator[dict[str, torch.Tensor]]:
        """The tensors of `host` on the device, to be changed there and written back."""
        self.followers[self.previous] = (key, host)
        self.previous = key
        visit = self.arrived.pop(key, None) or self._bring(key, host)
        upcoming = key
        for _ in range(BUFFERS - 2):
            upcoming, its_host = self.followers.get(upcoming, (None, None))
            if upcoming is not None and upcoming not in self.arrived and upcoming != key and its_host is not None:
                self.arrived[upcoming] = self._bring(upcoming, its_host, besides=visit.buffer)
        _wait(_current(self.device), visit.ready)
        yield visit.tensors
        updated = _mark(_current(self.device))
        with _on(self.streams[1]):
            _wait(self.streams[1], updated)
            for name, value in host.items():
                value.copy_(visit.tensors[name], non_blocking=True)
            visit.buffer.free = self.left[key] = _mark(self.streams[1])

    def end_step(self) -> None:
        """The next piece is the first of the next step."""
        self.previous = None

    def wait(self) -> None:
        """Until the host may read."""
        if self.streams[1] is not None:
            self.streams[1].synchronize()

    def _bring(self, key: Hashable, host: Tensors, besides: _Buffer | None = None) -> _Visit:
        buffer = self.buffers[self.turn % BUFFERS]
        if buffer is besides:
            self.turn += 1
            buffer = self.buffers[self.turn % BUFFERS]
        self.turn += 1
        for other, visit in list(self.arrived.items()):
            if visit.buffer is buffer:  # brought for nothing: its parameter had no gradient this time
                buffer.free = visit.ready
                del self.arrived[other]
        with _on(self.streams[0]):
            _wait(self.streams[0], buffer.free)
            _wait(self.streams[0], self.left.get(key))
            tensors = _carve(buffer.memory, host)
            for name, value in host.items():
                tensors[name].copy_(value, non_blocking=True)
            return _Visit(tensors, buffer, _mark(self.streams[0]))


def visit_bytes(host: Tensors) -> int:
    """What a visit of these tensors takes in a buffer."""
    return sum(-(-value.nbytes // ALIGNMENT) * ALIGNMENT for value in host.values())


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
    free: torch.cuda.Event | None = None
    """When the last visit has left."""


@dataclass
class _Visit:
    tensors: dict[str, torch.Tensor]
    buffer: _Buffer
    ready: torch.cuda.Event | None = field(default=None)


def _carve(memory: torch.Tensor, host: Tensors) -> dict[str, torch.Tensor]:
    tensors, start = {}, 0
    for name, value in host.items():
        tensors[name] = memory[start : start + value.nbytes].view(value.dtype).view(value.shape)
        start += -(-value.nbytes // ALIGNMENT) * ALIGNMENT
    return tensors


def _current(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return torch.cuda.stream(stream) if stream is not None else nullcontext()


def _mark(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    return stream.record_event() if stream is not None else None


def _wait(stream: torch.cuda.Stream | None, event: torch.cuda.Event | None) -> None:
    if stream is not None and event is not None:
        stream.wait_event(event)
