"""Data files opened, compressed or not, and read line by line as UTF-8."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tunesmith.data.types import Origin, RecordError
from tunesmith.errors import UserError


def open_file(path: Path) -> BinaryIO:
    """The file's bytes, decompressed where its ending says that it is compressed."""
    name = path.name.lower()
    if name.endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if name.endswith((".zst", ".zstd")):
        return io.BufferedReader(_Zstandard(path), 1 << 20)
    return path.open("rb")


def read_lines(stream: BinaryIO, path: Path) -> Iterator[bytes]:
    """The lines of a file, with their ends, without a byte-order mark; a UserError for UTF-16. They are split at
    newlines alone: JSON texts may hold other separators such as U+2028."""
    for number, line in enumerate(stream, start=1):
        if number == 1:
            if line.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in line[:4]:
                raise UserError(f"{path}: the text is UTF-16; save it as UTF-8.")
            line = line.removeprefix(b"\xef\xbb\xbf")
        yield line


def decoded(line: bytes, origin: Origin) -> str:
    """The line as text; a RecordError that names the byte where it is not UTF-8."""
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise RecordError(
            "not UTF-8",
            origin,
            f"byte {error.start + 1} (0x{line[error.start]:02x}) is not UTF-8; save the file as UTF-8",
        ) from error


class _Zstandard(io.RawIOBase):
    """A .zst file, of one or more frames. The library's own reader does not notice one cut short."""

    def __init__(self, path: Path):
        import zstandard

        self._library = zstandard
        self._file = path.open("rb")
        self._frame: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            chunk = self._frame.unused_data if self._frame and self._frame.eof else b""
            chunk = chunk or self._file.read(1 << 17)
            if not chunk:
                if self._frame and not self._frame.eof:
                    raise EOFError("the last frame is not complete")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._library.ZstdDecompressor().decompressobj()
            try:
                self._ready = self._frame.decompress(chunk)
            except self._library.ZstdError as error:
                raise EOFError(str(error)) from error
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()
