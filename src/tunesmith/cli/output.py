"""What the verbs share for talking to people and programs: consoles, tables, JSON.

Results go to stdout, remarks and errors to stderr, so that a result can be piped. Text is never taken for
markup unless a caller builds it so: what users write may hold square brackets.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 160
"""Columns when the output is not a terminal: wide enough that no table is cut."""


@cache
def stdout() -> Console:
    return _console(stderr=False)


@cache
def stderr() -> Console:
    return _console(stderr=True)


def say(message: RenderableType = "", style: str | None = None) -> None:
    """A result, on stdout. Long lines are left to the terminal to wrap, so that they can be copied."""
    stdout().print(message, style=style, soft_wrap=isinstance(message, str | Text))


def note(message: str) -> None:
    """A remark beside the result, on stderr."""
    stderr().print(message, style="dim", soft_wrap=True)


def warn(message: str) -> None:
    _labelled("warning", message, "yellow")


def error(message: str) -> None:
    _labelled("error", message, "bold red")


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None, right: Sequence[str] = ()
) -> Table:
    """A plain table; `right` names the columns of numbers. Cells are shown as they are, None as a dash."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", header_style="dim", overflow="fold")
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text("-" if cell is None else str(cell)) for cell in row))
    return made


def print_json(value: Any) -> None:
    """One JSON document on stdout, for programs. ASCII, so that no terminal or pipe can garble it."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")
    sys.stdout.flush()


def readable_bytes(count: float) -> str:
    """`1536` -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _console(stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def _labelled(label: str, message: str, style: str) -> None:
    stderr().print(Text.assemble((f"{label}: ", style), message), soft_wrap=True)
