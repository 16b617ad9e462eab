"""The tensors of a model folder: which files hold them, and how they are read, whole or in part, ahead of their use.

Files are mapped into memory, and of a tensor only the pages are touched that the part in use lies in. While they are
read, they are hashed. MoE models are built with the experts of a layer stacked in one tensor, while most files hold
them one by one: both ways are known, and so are weights that were quantized before (`packed`). Other ways in which
files may differ from the model are left to transformers.
"""

from __future__ import annotations

import mmap
import re
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tunesmith.disk import BLOCK_BYTES
from tunesmith.errors import UserError
from tunesmith.model.content import ROOM, Bytes, Content
from tunesmith.model.headers import Entry, read_headers, shortened
from tunesmith.model.packed import FP8, Packed, logical
from tunesmith.plan.models import quantization_of, read_config_file

PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
READERS = 4
"""Threads that read files ahead of what is being moved and quantized."""
MOST_PINNED = 1 << 28
"""Bytes of a tensor that is pinned: pinned memory is kept for the next one, and embeddings would keep gigabytes."""
MOST_KEPT = 1 << 28
"""Bytes of memory that is kept for the next tensor: those of embeddings would be kept for nothing."""
LARGE_PAGE = 1 << 21
SINGLE_EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(\w+)\.weight")
STACKS = {
    "w1": ("gate_up_proj", 0),
    "w3": ("gate_up_proj", 1),
    "w2": ("down_proj", 0),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "down_proj": ("down_proj", 0),
}
"""A single expert's weight -> the stack that it is in, and its place from above in its expert's matrix there."""

Block = tuple[slice, ...]
"""Part of a tensor: from where to where along its first dimensions."""
Opened = Mapping[Path, Any]


@dataclass(frozen=True)
class Tensor:
    """Held as the model has it."""

    entry: Entry
    written_as: str = ""
    """What files that are written in the layout of these call it, where that is another name."""

    @property
    def path(self) -> Path:
        return self.entry.path

    @property
    def name(self) -> str:
        return self.written_as or self.entry.name

    @property
    def entries(self) -> list[Entry]:
        return [self.entry]

    def shape(self, opened: Opened | None = None) -> tuple[int, ...]:
        return self.entry.shape

    def read(self, opened: Opened, block: Block = ()) -> torch.Tensor:
        if not block:
            return opened[self.path].get_tensor(self.entry.name)
        return opened[self.path].get_slice(self.entry.name)[block]


@dataclass(frozen=True)
class Stack:
    """Experts, each held as one or several matrices that lie one below the other in the model's stack."""

    experts: Sequence[Sequence[Tensor | Packed]]

    @property
    def entries(self) -> list[Entry]:
        return [entry for expert in self.experts for matrix in expert for entry in matrix.entries]

    def shape(self, opened: Opened | None = None) -> tuple[int, ...]:
        rows, columns = zip(*(matrix.shape() for matrix in self.experts[0]), strict=True)
        return len(self.experts), sum(rows), columns[0]

    def read(self, opened: Opened, block: Block = ()) -> torch.Tensor:
        chosen = self.experts[block[0]] if block else self.experts
        return torch.stack([torch.cat([matrix.read(opened) for matrix in expert]) for expert in chosen])


Held = Tensor | Stack | Packed


def read_tensors(folder: Path) -> dict[str, Tensor | Packed]:
    """The tensors that the files of `folder` hold, by name, in the order they are to be read. What was quantized, as
    its config says, is one tensor again."""
    scheme = quantization_of(read_config_file(folder / "config.json"))
    entries = read_headers(folder)
    with ExitStack() as stack:
        files = Bytes(stack, {entry.path for entry in entries.values()})

        def content(entry: Entry) -> bytes:
            return bytes(files.into(memoryview(bytearray(entry.size)), entry.path, entry.start))

        found = logical(entries, scheme, content)
    return {name: Tensor(one) if isinstance(one, Entry) else one for name, one in found.items()}


def find(
    tensors: Mapping[str, Tensor | Packed], wanted: Mapping[str, torch.Tensor], transposed: Collection[str] = ()
) -> dict[str, Held] | None:
    """Where files that hold `tensors` have the `wanted` ones, in the order they are to be read. None when they hold
    something in other ways than these have it. Those in `transposed` the model stores [inputs, outputs]."""
    found: dict[str, Held] = {}
    stacks: dict[str, dict[tuple[int, int], Tensor | Packed]] = {}
    for stored, held in tensors.items():
        name = stored.replace(".block_sparse_moe.", ".mlp.")  # as Mixtral's files call it
        if name in wanted:
            found[name] = replace(held, is_transposed=True) if isinstance(held, Packed) and name in transposed else held
        elif (match := SINGLE_EXPERT.fullmatch(name)) and match[3] in STACKS:
            stack, place = STACKS[match[3]]
            matrices = stacks.setdefault(f"{match[1]}.experts.{stack}", {})
            matrices[int(match[2]), place] = held
        else:
            return None
    for name, matrices in stacks.items():
        count, parts = (1 + max(place[axis] for place in matrices) for axis in (0, 1))
        if len(matrices) != count * parts:
            return None
        stack = Stack([[matrices[expert, part] for part in range(parts)] for expert in range(count)])
        shapes = {tuple(matrix.shape() for matrix in expert) for expert in stack.experts}
        columns = {shape[1:] for each in shapes for shape in each}
        if len(shapes) > 1 or len(columns) > 1 or any(len(shape) != 2 for each in shapes for shape in each):
            return None
        found[name] = stack
    for name, held in found.items():
        if name not in wanted or held.shape() != tuple(wanted[name].shape):
            return None
    return found or None


def are_equal(one: Held, other: Held) -> bool:
    """Whether both hold the same bytes."""
    pairs = list(zip(one.entries, other.entries, strict=False))
    if len(one.entries) != len(other.entries) or any(a.dtype != b.dtype or a.shape != b.shape for a, b in pairs):
        return False
    with ExitStack() as stack:
        files = Bytes(stack, {entry.path for pair in pairs for entry in pair})
        rooms = [memoryview(bytearray(ROOM)) for _ in range(2)]
        for pair in pairs:
            for start in range(0, pair[0].size, ROOM):
                size = min(ROOM, pair[0].size - start)
                mine, theirs = (
                    files.into(room[:size], entry.path, entry.start + start)
                    for room, entry in zip(rooms, pair, strict=True)
                )
                if mine != theirs:
                    return False
    return True


@dataclass(frozen=True)
class Codes:
    """A weight as it was quantized before, in the words of `kernels.nf4` (no scales) or `kernels.int8`."""

    codes: torch.Tensor
    scales: torch.Tensor | None = None

    def to(self, device: torch.device) -> Codes:
        return Codes(self.codes.to(device), None if self.scales is None else self.scales.to(device))


Read = tuple[str, torch.Tensor | Codes, tuple[int, ...]]


def read_ahead(
    held: Mapping[str, Held],
    *,
    pin: bool,
    part: Callable[[str, tuple[int, ...]], Block] = lambda *_: (),
    codes: Mapping[str, str] | None = None,
    content: Content | None = None,
    memory: Memory | None = None,
) -> Iterator[Read]:
    """All tensors in order, with the shapes they have when whole: `part` says what of them is read, given name and
    shape. Read by threads; in pinned memory, from which they travel beside other work. Of the weights in `codes` the
    codes are read, of the kind it says, nf4 or int8, where the files have them so. What is read is hashed into
    `content`. Given `memory`, whole tensors are read into that: pages of a file that is mapped count as the process's
    as long as it is open."""
    with ExitStack() as stack:
        opened = _open(stack, held.values())
        files = Bytes(stack, opened, is_past_cache=memory is not None and memory.is_past_cache)

        def read(name: str) -> Read:
            one = held[name]
            shape, kind = one.shape(), (codes or {}).get(name)
            taken = _codes_of(one, kind)
            block = () if taken else part(name, shape)
            if memory and not (block or taken) and isinstance(one, Tensor) and one.entry.dtype in PLAIN:
                return name, _read_whole(one.entry, files, content, memory), shape
            if content is not None:
                _hash(one, block, files, content)
            if taken:
                return name, taken(opened), shape
            tensor = one.read(opened, block)
            if pin and tensor.nbytes <= MOST_PINNED:
                tensor = tensor.contiguous().pin_memory()
            return name, tensor, shape

        readers = stack.enter_context(ThreadPoolExecutor(READERS))
        underway: deque[Future[Read]] = deque()
        for name in held:
            underway.append(readers.submit(read, name))
            if len(underway) > READERS:
                yield underway.popleft().result()
        while underway:
            yield underway.popleft().result()


def _read_whole(entry: Entry, files: Bytes, content: Content | None, memory: Memory) -> torch.Tensor:
    """Into memory of its own, where it is hashed."""
    before = entry.start % BLOCK_BYTES
    if entry.size < LARGE_PAGE or before % PLAIN[entry.dtype].itemsize:
        tensor = torch.empty(entry.size, dtype=torch.uint8)
        room = files.into(memoryview(tensor.numpy()), entry.path, entry.start)
    else:
        pages = memory.take(-(-(before + entry.size) // BLOCK_BYTES) * BLOCK_BYTES)
        room = files.into_blocks(memoryview(pages.numpy()), entry.path, entry.start, entry.size)
        tensor = pages[before : before + entry.size]
    if content is not None:
        content.add_read(entry, room)
    return tensor.view(PLAIN[entry.dtype]).view(entry.shape)


def at_block(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape from where the memory begins that `tensor` was read into, at most a block before it:
    what lies there can be written past the page cache."""
    if not 0 < tensor.storage_offset() * tensor.element_size() < BLOCK_BYTES:
        return tensor
    return tensor.as_strided(tensor.shape, tensor.stride(), 0)


class Memory:
    """Memory for tensors, taken again when nobody has the one that was in it any more: the system clears new pages,
    which took longer than anything else of a merge (0.9 s a GB on an ARM core, and reading past the cache 0.1)."""

    def __init__(self, *, is_past_cache: bool = False, is_lent: bool = False):
        """`is_past_cache`: what the page cache does not have is read without it, and does not come into it. `is_lent`:
        who keeps what is in it makes a copy, and the next tensor is read into the same pages."""
        self.is_past_cache, self.is_lent = is_past_cache, is_lent
        self._free: dict[int, list[mmap.mmap]] = {}

    def take(self, size: int) -> torch.Tensor:
        """So many bytes, or more; if there is a page of them, from its beginning on."""
        if size < LARGE_PAGE:
            return torch.empty(size, dtype=torch.uint8)
        if size > MOST_KEPT:
            for kept in self._free.values():  # so that no more is held than what is in use
                kept.clear()
            return torch.frombuffer(_new_pages(size), dtype=torch.uint8)
        size = -(-size // LARGE_PAGE) * LARGE_PAGE
        kept = self._free.setdefault(size, [])
        try:
            pages = kept.pop()
        except IndexError:
            pages = _new_pages(size)
        array = np.frombuffer(pages, np.uint8)  # which lives as long as tensors in it do
        weakref.finalize(array, kept.append, pages).atexit = False
        return torch.from_numpy(array)


def memory_for(device: torch.device) -> Memory | None:
    """What the weights of a model on `device` are read into: on a CPU a file that is mapped beside its copy would
    count twice in what the process uses."""
    return Memory(is_lent=True) if device.type == "cpu" else None


def _new_pages(size: int) -> mmap.mmap:
    """In pages of 2 MiB where the system has them: small ones cost twice the time when they are first touched."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class Lazy:
    """A tensor of the files that is read, and hashed, when it is indexed: transformers takes it for one of its own."""

    def __init__(self, held: Tensor | Packed, opened: Opened, files: Bytes, content: Content | None):
        self._held, self._opened, self._files, self._content = held, opened, files, content

    def __getitem__(self, index: Any) -> torch.Tensor:
        if self._content is not None:
            _hash(self._held, (), self._files, self._content)
        return own_copy(self._held.read(self._opened))[index]


@contextmanager
def lazily(tensors: Mapping[str, Tensor | Packed], content: Content | None) -> Iterator[dict[str, Lazy]]:
    """All tensors as ones that are read when they are used, while this lasts."""
    with ExitStack() as stack:
        opened = _open(stack, tensors.values())
        files = Bytes(stack, opened)
        yield {name: Lazy(held, opened, files, content) for name, held in tensors.items()}


def check_rounding(held: Mapping[str, Held], storage: str, *, as_codes: bool = True) -> None:
    """UserError where weights that were rounded to few bits before would be rounded again. Codes of the same kind are
    taken over, unless not `as_codes`; fp8 is about as fine as bf16."""
    matrices = (
        (name, one)
        for name, stack in held.items()
        for one in ([m for expert in stack.experts for m in expert] if isinstance(stack, Stack) else [stack])
        if isinstance(one, Packed) and one.parts["weight"].dtype not in FP8
        if isinstance(stack, Stack) or not as_codes or _codes_of(one, storage) is None
    )
    if twice := [name for name, _ in matrices]:
        raise UserError(
            f"model: its weights are in few bits already, and method: qlora would round them to {storage} a second "
            f"time ({shortened(dict.fromkeys(twice))}); use method: lora, which trains over them as they are."
        )


def _codes_of(held: Held, kind: str | None) -> Callable[[Opened], Codes] | None:
    """What reads the codes of this kind, where the files have them."""
    if not isinstance(held, Packed):
        return None
    nf4_codes, int8_codes = held.nf4_codes, held.int8_codes
    if kind == "nf4" and nf4_codes is not None:
        return lambda opened: Codes(nf4_codes(held.read_parts(opened)))
    if kind == "int8" and int8_codes is not None:
        return lambda opened: Codes(*int8_codes(held.read_parts(opened)))
    return None


def _hash(held: Held, block: Block, files: Bytes, content: Content) -> None:
    """The share of a tensor that belongs to this part of it: ranks that read parts hash all of it between them."""
    if isinstance(held, Stack):
        for expert in held.experts[block[0]] if block else held.experts:
            for matrix in expert:
                _hash(matrix, (), files, content)
        return
    shape = held.shape()
    for entry in held.entries:
        first, last = 0, max(1, entry.size)
        for part, length in zip(block, shape, strict=False):
            start, stop, _ = part.indices(length)
            first, last = (first + (last - first) * at // max(1, length) for at in (start, stop))
        content.add(entry, files, (first, last))


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is to stay, in host memory on pages that nothing else is on.

    Allocators put what stays into the gaps that larger tensors have left, and what is over of a gap stays with it: half
    as much again, with the one that torch has on ARM.
    """
    if tensor.device.type != "cpu" or tensor.nbytes < mmap.PAGESIZE:
        return tensor.clone(memory_format=torch.contiguous_format)
    pages = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _open(stack: ExitStack, held: Iterable[Held]) -> Opened:
    from safetensors import safe_open

    paths = sorted({entry.path for one in held for entry in one.entries})
    return {path: stack.enter_context(safe_open(path, framework="pt")) for path in paths}
