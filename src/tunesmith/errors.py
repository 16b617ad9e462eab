"""The one exception that is meant for people: what was found, where, and what to do about it; and how its sentences
list names and quote others' errors."""

from __future__ import annotations

from collections.abc import Iterable

MOST_NAMES = 8
"""That a sentence lists; of the others it says how many there are."""
LONGEST_NAME = 100


class UserError(ValueError):
    """Something the user can fix. The command line prints the message alone and exits with 1. What a terminal would not
    show, of names and others' words in it, is escaped."""

    def __init__(self, message: str = ""):
        shown = (char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in message)
        super().__init__("".join(shown))


class UserErrors(UserError):
    """Several things the user can fix, found in one go; printed one a line."""

    def __init__(self, messages: list[str]):
        assert messages
        self.messages = messages
        super().__init__("\n".join(messages))


def listed(names: Iterable[object], separator: str = ", ", most: int = MOST_NAMES) -> str:
    """`a, b and 97 more`: the names that a sentence has room for, each cut in the middle where it is too long."""
    texts = [_shortened(str(name)) for name in names]
    if len(texts) <= most + 1:  # one more name is no longer than the words for it
        return separator.join(texts)
    return f"{separator.join(texts[:most])} and {len(texts) - most:,} more"


def first_line(error: BaseException) -> str:
    """What an error of some library says first, without the full stop; its kind, where it says nothing. A line that
    only announces the next one (`Validation error for x:`) goes with it."""
    lines = [line for text in str(error).splitlines() if (line := text.strip())]
    count = next((n for n, line in enumerate(lines, start=1) if not line.endswith(":")), len(lines))
    return " ".join(lines[:count]).rstrip(".:,") or type(error).__name__


def _shortened(name: str) -> str:
    if len(name) <= LONGEST_NAME or " " in name:  # what has words is no name
        return name
    half = LONGEST_NAME // 2
    return f"{name[:half]}...{name[-half:]}"
