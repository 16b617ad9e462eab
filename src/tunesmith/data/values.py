"""What stands in a field of a record, strictly read: text, numbers, lists and JSON, or a sentence that says what is
there instead. A missing value is null, or NaN as pandas writes it."""

from __future__ import annotations

import json
import math
from typing import Any

from tunesmith.data.types import Origin, RecordError
from tunesmith.errors import listed

ODD = "NaN or Infinity"


def as_text(value: Any, name: str, origin: Origin) -> str:
    """Text; a number becomes text, as numeric answers are often written without quotes."""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and not is_odd(value):
        return json.dumps(value)
    name = name if "`" in name else f"`{name}`"
    raise RecordError(ODD if is_odd(value) else "wrong type", origin, f"{name} must be text, found {described(value)}")


def shown(value: Any) -> str:
    return json.dumps(value, default=str)[:80]


def as_number(value: Any, name: str, origin: Origin) -> float:
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found):
        raise RecordError("wrong number", origin, f"`{name}` must be a finite number, found {shown(value)}")
    return found


def as_list(value: Any, name: str, origin: Origin) -> list[Any]:
    """A list, also as JSON text (a CSV column)."""
    if isinstance(value, str):
        value = as_json(value, f"`{name}`", origin)
    if not isinstance(value, list | tuple):
        kind = ODD if is_odd(value) else "wrong type"
        raise RecordError(kind, origin, f"`{name}` must be a list, found {described(value)}")
    return list(value)


def as_integers(value: Any, name: str, origin: Origin) -> list[int]:
    values = as_list(value, name, origin)
    for place, number in enumerate(values):
        if type(number) is not int:
            raise RecordError(
                "wrong type", origin, f"`{name}` must be whole numbers, found {number!r} at place {place}"
            )
    return values


def as_json(value: Any, name: str, origin: Origin) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RecordError("not valid JSON", origin, f"the {name} is not valid JSON ({error})") from error


def present(value: Any) -> Any:
    return None if is_odd(value) else value


def is_odd(value: Any) -> bool:
    """What pandas writes for a missing value; no text, and no number to train on."""
    return isinstance(value, float) and not math.isfinite(value)


def lack_of(value: Any) -> str:
    """The kind of fault where something must be given."""
    return ODD if is_odd(value) else "missing value"


def described(value: Any) -> str:
    if value is None or is_odd(value):
        return json.dumps(value)  # null, NaN, Infinity, -Infinity
    return "true/false" if isinstance(value, bool) else f"a {type(value).__name__}"


def first_of(fields: dict[str, Any], *names: str) -> tuple[Any, str]:
    """The first field of these names that is there, and its name."""
    for name in names:
        if present(fields.get(name)) is not None:
            return fields[name], name
    name = next((name for name in names if name in fields), names[0])
    return fields.get(name), name


def key_of(item: dict[str, Any], *names: str) -> str | None:
    there = [name for name in names if name in item]
    return next((name for name in there if item[name] is not None), there[0] if there else None)


def names_of(fields: dict[str, Any]) -> str:
    names = [f"`{name}`" for name in fields]
    return listed(names, most=12) or "no fields"


def check_numbers(value: Any, name: str, origin: Origin) -> None:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            check_numbers(inner, name, origin)
    elif is_odd(value):
        raise RecordError(ODD, origin, f"the {name} holds {described(value)}, which JSON does not have")


def without_nulls(value: Any) -> Any:
    """The value without its nulls: in a record from columns (Parquet), a field that only other records have stands
    so."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value]
    return value
