"""Whether an answer gives what its record says is right."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\.\d+")
BOXED = "\\boxed{"


def is_right(answer: str, wanted: Any, pattern: re.Pattern[str] | None = None) -> bool:
    """What of the answer counts is found by the `pattern`; without one, where a number is wanted, it is the last one,
    else what is boxed, else all of it. Of several that are wanted, any will do."""
    if isinstance(wanted, list):
        return any(is_right(answer, one, pattern) for one in wanted)
    if isinstance(wanted, bool):
        wanted = "true" if wanted else "false"
    expected = _gist(str(wanted))
    found = extracted(answer, pattern, is_number=_value(expected) is not None)
    if found is None:
        return False
    value = _value(expected)
    return _plain(found) == _plain(expected) if value is None else _value(found) == value


def extracted(answer: str, pattern: re.Pattern[str] | None, *, is_number: bool) -> str | None:
    """What of an answer counts; None where nothing does."""
    if pattern is not None:
        matches = list(pattern.finditer(answer))
        if not matches:
            return None
        groups = [one for one in matches[-1].groups() if one is not None]
        return groups[0] if groups else matches[-1].group()
    gist = _gist(answer)
    if not is_number or _value(gist) is not None:
        return gist
    numbers = NUMBER.findall(gist)
    return numbers[-1] if numbers else None


def _gist(text: str) -> str:
    """What stands behind the last `####` (GSM8K), or in the last `\\boxed{}`, or all of a text."""
    if "####" in text:
        return text.rpartition("####")[2].strip()
    if BOXED in text:
        inside, depth = text.rpartition(BOXED)[2], 1
        for place, char in enumerate(inside):
            depth += (char == "{") - (char == "}")
            if depth == 0:
                return inside[:place].strip()
    return text.strip()


def _value(text: str) -> Decimal | None:
    """The number that a text is, and nothing else."""
    plain = text.strip().strip("$").rstrip(".%").replace(",", "").replace("\\", "").strip()
    try:
        value = Decimal(plain)
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def _plain(text: str) -> str:
    return " ".join(text.lower().split()).strip(" .")
