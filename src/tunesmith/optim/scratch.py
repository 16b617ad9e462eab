"""A file that holds tensors for as long as this process lives: for what neither device nor host memory has room for.

Its room is reserved when it is made, so that a full disk is known before the first step. Its name is gone at once: what
it holds is worth nothing without the process that wrote it, and the system frees it however the process ends. Tensors
are mapped, and cost no memory until they are looked at; where it matters that they never do, `read` and `write` copy
pieces of them past the map.
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
import tempfile
import weakref
from pathlib import Path

import torch

from tunesmith import disk
from tunesmith.errors import UserError

ALIGNMENT = 256


class Scratch:
    def __init__(self, folder: Path, size: int):
        """A file in `folder` of so many bytes, all zero."""
        self.folder = folder
        needs = f"The plan keeps optimizer states on the disk, {disk.size(size)} for each rank"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if (free := shutil.disk_usage(folder).free) < size:
                raise UserError(
                    f"{needs}, and {folder} has {disk.size(free)} free; make room there, or set output to another disk."
                )
            self._file, name = tempfile.mkstemp(prefix=".scratch-", dir=folder)
            weakref.finalize(self, os.close, self._file)
            os.unlink(name)
            os.posix_fallocate(self._file, 0, max(size, 1))
            self._memory = torch.frombuffer(mmap.mmap(self._file, max(size, 1)), dtype=torch.uint8)
        except OSError as error:
            raise UserError(
                f"{needs}, and {folder} cannot hold them: {error.strerror or error}; make room there, or set output to "
                "another disk."
            ) from error
        self._taken = 0

    def zeros(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A tensor within the file."""
        start, size = self._taken, math.prod(shape) * dtype.itemsize
        self._taken += aligned(size)
        assert self._taken <= len(self._memory), "the file was made too small"
        return self._memory[start : start + size].view(dtype).view(shape)

    def read(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        """Copy some rows of a tensor of this file."""
        memory, at = _bytes_of(into), self._place(tensor)
        while memory:
            count = self._try("read", os.preadv, [memory], at)
            memory, at = memory[count:], at + count

    def write(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        memory, at = _bytes_of(source), self._place(tensor)
        while memory:
            count = self._try("written", os.pwrite, memory, at)
            memory, at = memory[count:], at + count

    def _place(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr() - self._memory.data_ptr()

    def _try(self, what: str, call, memory, at: int) -> int:
        try:
            return call(self._file, memory, at)
        except OSError as error:
            raise UserError(
                f"Optimizer states on the disk in {self.folder} could not be {what}: {error.strerror or error}; when "
                "that is put right, `tunesmith train` again continues from the last checkpoint."
            ) from error


def aligned(size: int) -> int:
    """What a tensor of so many bytes takes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    assert tensor.is_contiguous()
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())
