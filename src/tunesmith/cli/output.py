"""What the verbs share for talking to people and programs: consoles, tables, JSON, and a line that shows what goes on.

Results go to stdout, remarks and errors to stderr, so that a result can be piped. Text is never taken for
markup unless a caller builds it so: what users write may hold square brackets. In a terminal, lines that change stand
at the bottom, and everything else is printed above them, whichever stream it is for: two consoles that write to one
terminal would write over each other.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tunesmith import disk

PIPE_WIDTH = 160
"""Columns when the output is not a terminal: wide enough that no table is cut."""
REFRESHES = 5
"""Of the bottom lines, a second."""

_bottom: Live | None = None
_is_stage = False


@cache
def stdout() -> Console:
    return _console(stderr=False)


@cache
def stderr() -> Console:
    return _console(stderr=True)


def say(message: RenderableType = "", style: str | None = None) -> None:
    """A result, on stdout; what was shown until it came goes away. Texts built by the caller keep their spaces: long
    lines of theirs are left to the terminal to wrap."""
    if _is_stage or not is_screen(stdout()):
        clear_bottom()
    _print(stdout(), message, style)


def note(message: str) -> None:
    """A remark beside the result, on stderr."""
    _print(stderr(), message, "dim")


def warn(message: str) -> None:
    _labelled("warning", message, "yellow")


def error(message: str) -> None:
    _labelled("error", message, "bold red")


def stage(name: str) -> None:
    """What goes on until the next result, for who waits for it in a terminal; elsewhere nothing is written. Of several
    ranks the first one says it."""
    global _is_stage
    if is_screen(stderr()) and os.environ.get("RANK", "0") == "0":
        show_at_bottom(stderr(), _Stage(name))
        _is_stage = True


def progress(name: str, done: int, total: int | None) -> None:
    """A stage that can be counted."""
    stage(f"{name}: {done:,}{f' of {total:,}' if total else ''}" if done else name)


def spinning(name: str, console: Console, options: ConsoleOptions) -> Text:
    """`name`, with something in front of it that moves."""
    frames = "|/-\\" if options.ascii_only else "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
    return Text(f"{frames[int(console.get_time() * REFRESHES) % len(frames)]} {name}")


def is_screen(console: Console) -> bool:
    """Whether lines that change can be shown: a terminal that can move its cursor."""
    return console.is_terminal and not console.is_dumb_terminal


def show_at_bottom(console: Console, lines: RenderableType) -> None:
    """Show `lines` below everything that is printed from now on; drawn again several times a second."""
    global _bottom, _is_stage
    _is_stage = False
    if _bottom is not None and _bottom.console is console:
        _bottom.update(lines, refresh=True)
        return
    clear_bottom()
    _bottom = Live(lines, console=console, transient=True, refresh_per_second=REFRESHES, vertical_overflow="crop")
    _bottom.start(refresh=True)


def refresh_bottom() -> None:
    if _bottom is not None:
        _bottom.refresh()


def clear_bottom() -> None:
    """Before anything else writes to the terminal: a prompt, JSON, another program."""
    global _bottom, _is_stage
    live, _bottom, _is_stage = _bottom, None, False
    if live is not None:
        live.stop()


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
    clear_bottom()
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")
    sys.stdout.flush()


def readable_bytes(count: float) -> str:
    """`1536` -> `1.5 KiB`."""
    return disk.size(count)


class _Stage:
    """One line, cut where the terminal ends."""

    def __init__(self, name: str):
        self.name = name

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = spinning(f"{self.name} ...", console, options)
        line.truncate(options.max_width - 1, overflow="ellipsis")
        yield line


def _console(stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def _labelled(label: str, message: str, style: str) -> None:
    _print(stderr(), Text.assemble((f"{label}: ", style), message), None, wraps=True)


def _print(console: Console, message: RenderableType, style: str | None, wraps: bool = False) -> None:
    """Sentences are wrapped between words in a terminal, and stay one line each for programs."""
    is_text = isinstance(message, str | Text)
    wraps = console.is_terminal and (wraps or isinstance(message, str))
    if _bottom is not None and is_screen(console):
        console = _bottom.console
    console.print(message, style=style, soft_wrap=is_text and not wraps)
