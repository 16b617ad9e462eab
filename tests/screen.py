"""A terminal of a test's own: a pty that programs write to, and the screen that a person would see."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time

TOKENS = re.compile(r"\x1b\[(\??[0-9;]*)([A-Za-z])|\x1b\]8;[^\x1b]*\x1b\\|(\r)|(\n)|(\x07)|([^\x1b\r\n\x07]+)")


class Screen:
    """So many columns, and as many rows as it takes. Knows what rich writes; anything else is an error."""

    def __init__(self, columns: int):
        self.columns = columns
        self.rows: list[str] = [""]
        self.row = self.column = 0

    @property
    def lines(self) -> list[str]:
        return [row.rstrip() for row in self.rows]

    def feed(self, text: str) -> None:
        end = 0
        for token in TOKENS.finditer(text):
            assert token.start() == end, f"cannot read {text[end : token.start()]!r}"
            end = token.end()
            self._act(token)
        assert end == len(text), f"cannot read {text[end:]!r}"

    def _act(self, token: re.Match[str]) -> None:
        argument, command, back, down, _bell, written = token.groups()
        if back:
            self.column = 0
        elif down:
            self._move_down()
        elif written:
            for char in written:
                self._put(char)
        elif command == "A":
            self.row = max(0, self.row - int(argument or 1))
        elif command == "K":
            assert argument == "2"
            self.rows[self.row] = ""
        else:
            assert command in "mhl" or command is None, f"cannot do {token[0]!r}"

    def _put(self, char: str) -> None:
        if self.column >= self.columns:  # as terminals wrap: within words
            self._move_down()
            self.column = 0
        row = self.rows[self.row].ljust(self.column)
        self.rows[self.row] = row[: self.column] + char + row[self.column + 1 :]
        self.column += 1

    def _move_down(self) -> None:
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append("")


class Terminal:
    """The two ends of a pty. What comes back is fed to the screen by `look`."""

    def __init__(self, columns: int):
        self.mine, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        self.screen = Screen(columns)
        self.written = ""

    def look(self, seconds: float = 0.0) -> list[str]:
        """The screen, after everything that is written within so many seconds."""
        end = time.monotonic() + seconds
        while select.select([self.mine], [], [], max(0.0, end - time.monotonic()))[0]:
            try:
                data = os.read(self.mine, 1 << 16).decode()
            except OSError:  # its other end is closed
                break
            # A pty makes \r\n of \n; both end a line.
            self.written += data
            self.screen.feed(data)
        return self.screen.lines

    def close(self) -> None:
        for end in (self.mine, self.theirs):
            os.close(end)
