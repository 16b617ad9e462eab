"""What a chat template may take to write a conversation: an allowance that grows with the conversation.

All that a template can do again and again, or make large, is paid for: bodies of loops and macros, operators, calls,
filters, what is put together and what is written. One that goes beyond it is stopped, so none can run for ever or take
all memory. (jinja2 itself bounds ranges only.)
"""

from __future__ import annotations

import functools
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tunesmith.errors import UserError

ALLOWANCE, ALLOWANCE_PER_CHARACTER = 20_000_000, 64
"""Steps and characters that a template may take to write a conversation. The ten of `tests/templates.py` take 2 to 5 a
character."""
SECONDS = 20
"""Seconds of CPU time that a template may take, for single steps that are slow."""
LARGEST_NUMBER, LARGEST_BITS = 1_000_000, 10_000


class TemplateRunaway(UserError):
    """The template does more than writing a conversation can take."""

    def __init__(self) -> None:
        super().__init__(
            "the chat template was stopped: to write this conversation, it loops or grows without end; give another "
            "`chat_template`."
        )


_under_way = threading.local()
"""The allowance of the rendering of this thread."""


@contextmanager
def allowance(size: float) -> Iterator[None]:
    before = getattr(_under_way, "left", None), getattr(_under_way, "until", 0.0)
    _under_way.left = ALLOWANCE + ALLOWANCE_PER_CHARACTER * size
    _under_way.until = time.thread_time() + SECONDS * (1 + size / 10_000_000)
    try:
        yield
    finally:
        _under_way.left, _under_way.until = before


def spend(amount: float) -> None:
    left = getattr(_under_way, "left", None)
    if left is None:  # while the template is compiled, nothing is repeated
        if amount > ALLOWANCE:
            raise TemplateRunaway
        return
    _under_way.left = left - amount - 1
    if _under_way.left < 0 or ((int(left) & 255) == 0 and time.thread_time() > _under_way.until):
        raise TemplateRunaway


def tick(amount: int) -> str:
    """Spends from the allowance in the body of every loop and macro, and looks at the time, which counting alone does
    not bound."""
    spend(amount)
    if time.thread_time() > getattr(_under_way, "until", math.inf):
        raise TemplateRunaway
    return ""


def weigh(value: Any, most: float) -> float:
    """Characters and members of all that a value holds, counted as often as it holds them, up to `most`."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        parts: Any = (part for pair in value.items() for part in pair)
    elif isinstance(value, list | tuple | set | frozenset):
        parts = value
    else:
        return 1
    weight = 1.0
    for part in parts:
        weight += weigh(part, most - weight)
        if weight > most:
            raise TemplateRunaway
    return weight


def made(value: Any) -> Any:
    """A value that the template put together: paid for by its weight."""
    if isinstance(value, str | list | tuple | dict | set | bytes):
        spend(weigh(value, ALLOWANCE + getattr(_under_way, "left", ALLOWANCE)))
    else:
        spend(1)
    return value


def _check_numbers(values: Any) -> None:
    """Widths, counts and the like: none that stands for a large piece of memory."""
    for value in values:
        if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
            raise TemplateRunaway
        if isinstance(value, list | tuple):
            _check_numbers(value)


_WIDE = re.compile(r"\d{7,}|[{][^{}]*[{]")  # a width of seven digits, or one that is taken from an argument


def foreseen(name: str, receiver: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """Raise where the result would be too large to be made at all; the arguments, with what can be read once listed."""
    everything = (*arguments, *named.values())
    _check_numbers(everything)
    size = len(receiver) if isinstance(receiver, str | bytes | list | tuple) else 1
    if name == "join":
        arguments = tuple(list(one) if isinstance(one, Iterator) else one for one in arguments)
        members = arguments[0] if arguments and not isinstance(receiver, list | tuple) else receiver
        between = max((len(one) for one in (receiver, *everything) if isinstance(one, str)), default=0)
        if isinstance(members, list | tuple | dict | set | str):
            spend(weigh(members, math.inf if isinstance(members, str) else ALLOWANCE * 64) + len(members) * between)
    elif name in ("replace", "translate", "indent", "wordwrap", "expandtabs", "center", "ljust", "rjust", "zfill"):
        longest = max((weigh(one, ALLOWANCE * 64) for one in everything if not isinstance(one, int)), default=0)
        width = max((abs(one) for one in everything if isinstance(one, int)), default=0)
        if name == "replace" and arguments and isinstance(receiver, str) and isinstance(arguments[0], str):
            size = receiver.count(arguments[0])
        elif name == "indent" and isinstance(receiver, str):
            size = receiver.count("\n") + 1
        elif name == "expandtabs" and isinstance(receiver, str):
            size = receiver.count("\t")
        elif name in ("center", "ljust", "rjust", "zfill"):
            size = 1
        spend(size * (longest + (width if name != "replace" else 0)))
    elif name in ("format", "format_map", "mod") and isinstance(receiver, str):
        if _WIDE.search(receiver):
            raise TemplateRunaway
    elif name == "round":
        if any(isinstance(one, int) and abs(one) > 300 for one in everything):
            raise TemplateRunaway
    elif name == "tojson":
        widths = (one if isinstance(one, int) else len(one) for one in everything if isinstance(one, int | str))
        spend(weigh(receiver, ALLOWANCE * 64) * (1 + max(widths, default=0)))
    return arguments


def bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    takes_context = hasattr(function, "jinja_pass_arg")

    @functools.wraps(function)
    def bounded(*arguments: Any, **named: Any) -> Any:
        first = 1 if takes_context else 0
        if len(arguments) > first:
            receiver, rest = arguments[first], arguments[first + 1 :]
            if name == "join" and isinstance(receiver, Iterator):
                receiver = list(receiver)
            arguments = (*arguments[:first], receiver, *foreseen(name, receiver, rest, named))
        return made(function(*arguments, **named))

    return bounded
