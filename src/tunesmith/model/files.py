"""The tensors of a model folder: which files hold them, and how they are read, whole or in part, ahead of their use.

Files are mapped into memory, and of a tensor only the pages are touched that the part in use lies in. Mixtures are
built with the experts of a layer stacked in one tensor, while most files hold them one by one: both ways are known.
Other ways in which files may differ from the model are left to transformers.
"""

from __future__ import annotations

import json
import mmap
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

READERS = 4
"""Threads that read files ahead of what is being moved and quantized."""
MOST_PINNED = 1 << 28
"""Bytes of a tensor that is pinned: pinned memory is kept for the next one, and embeddings would keep gigabytes."""
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

    path: Path
    name: str

    @property
    def paths(self) -> set[Path]:
        return {self.path}

    def shape(self, opened: Opened) -> tuple[int, ...]:
        return tuple(opened[self.path].get_slice(self.name).get_shape())

    def read(self, opened: Opened, block: Block = ()) -> torch.Tensor:
        if not block:
            return opened[self.path].get_tensor(self.name)
        return opened[self.path].get_slice(self.name)[block]


@dataclass(frozen=True)
class Stack:
    """Experts, each held as one or several matrices that lie one below the other in the model's stack."""

    experts: Sequence[Sequence[Tensor]]

    @property
    def paths(self) -> set[Path]:
        return {matrix.path for expert in self.experts for matrix in expert}

    def shape(self, opened: Opened) -> tuple[int, ...]:
        rows, columns = zip(*(matrix.shape(opened) for matrix in self.experts[0]), strict=True)
        return len(self.experts), sum(rows), columns[0]

    def read(self, opened: Opened, block: Block = ()) -> torch.Tensor:
        chosen = self.experts[block[0]] if block else self.experts
        return torch.stack([torch.cat([matrix.read(opened) for matrix in expert]) for expert in chosen])


Held = Tensor | Stack


def find(folder: Path, wanted: Mapping[str, torch.Tensor]) -> dict[str, Held] | None:
    """Where the files of `folder` hold the `wanted` tensors, in the order they are to be read. None when they hold
    something in other ways than these have it."""
    files = _files(folder)
    found: dict[str, Held] = {}
    stacks: dict[str, dict[tuple[int, int], Tensor]] = {}
    for stored, path in files.items():
        name = stored.replace(".block_sparse_moe.", ".mlp.")  # as Mixtral's files call it
        if name in wanted:
            found[name] = Tensor(path, stored)
        elif (match := SINGLE_EXPERT.fullmatch(name)) and match[3] in STACKS:
            stack, place = STACKS[match[3]]
            matrices = stacks.setdefault(f"{match[1]}.experts.{stack}", {})
            matrices[int(match[2]), place] = Tensor(path, stored)
        else:
            return None
    for name, matrices in stacks.items():
        count, parts = (1 + max(place[axis] for place in matrices) for axis in (0, 1))
        if len(matrices) != count * parts:
            return None
        found[name] = Stack([[matrices[expert, part] for part in range(parts)] for expert in range(count)])
    with ExitStack() as stack:
        opened = _open(stack, found.values())
        for name, held in found.items():
            if name not in wanted or held.shape(opened) != tuple(wanted[name].shape):
                return None
    return found or None


def read_ahead(
    held: Mapping[str, Held], *, pin: bool, part: Callable[[str, tuple[int, ...]], Block] = lambda *_: ()
) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
    """All tensors in order, with the shapes they have when whole: `part` says what of them is read, given name and
    shape. Read by threads; in pinned memory, from which they travel beside other work."""
    with ExitStack() as stack:
        opened = _open(stack, held.values())

        def read(name: str) -> tuple[str, torch.Tensor, tuple[int, ...]]:
            shape = held[name].shape(opened)
            block = part(name, shape)
            tensor = held[name].read(opened, block)
            if pin and tensor.nbytes <= MOST_PINNED:
                tensor = tensor.contiguous().pin_memory()
            return name, tensor, shape

        readers = stack.enter_context(ThreadPoolExecutor(READERS))
        underway: deque[Future[tuple[str, torch.Tensor, tuple[int, ...]]]] = deque()
        for name in held:
            underway.append(readers.submit(read, name))
            if len(underway) > READERS:
                yield underway.popleft().result()
        while underway:
            yield underway.popleft().result()


def alone(tensor: torch.Tensor) -> torch.Tensor:
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

    paths = sorted({path for one in held for path in one.paths})
    return {path: stack.enter_context(safe_open(path, framework="pt")) for path in paths}


def _files(folder: Path) -> dict[str, Path]:
    """The file of each tensor, in the order they are to be read."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = json.loads(index.read_text())["weight_map"]
        return {name: folder / file for name, file in sorted(names.items(), key=lambda item: (item[1], item[0]))}
    single = folder / "model.safetensors"
    if not single.exists():
        return {}
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)
