"""The kinds of values that settings have: numbers, texts, and short forms that are read and checked by themselves.

Each is a type for a field of `schema`: pydantic reads what YAML, JSON or the command line gives, as people write it,
and says in a sentence what it must be where it is something else."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, WithJsonSchema


def _whole_number(value: object) -> object:
    """YAML reads `1e5` as text and JSON writers emit `65536.0`; both mean a whole number."""
    if isinstance(value, str):
        value = _number(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _number(value: object) -> object:
    """YAML 1.1 reads `2e-4` as text, since it wants a dot: take it as the number it plainly is."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _not_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("it needs a number, not yes or no")
    return value


def _not_absurd(count: int) -> int:
    """Refuses a slip of the keyboard, which would be too much for the arithmetic further on."""
    if count > 10**15:
        raise ValueError("it is larger than anything there is to count")
    return count


Number = Annotated[float, BeforeValidator(_number), BeforeValidator(_not_bool)]
WholeNumber = Annotated[int, BeforeValidator(_whole_number), BeforeValidator(_not_bool)]
Count = Annotated[WholeNumber, Field(ge=1), AfterValidator(_not_absurd)]


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("it is blank")
    if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError("it holds a character that no file name or text can have")
    return text


Text = Annotated[str, AfterValidator(_not_blank)]
Folder = Annotated[Text, AfterValidator(os.path.expanduser)]
"""A folder that is made; `~` is expanded here, since what is only read is looked for where it is read."""


class Stop(NamedTuple):
    """When a run ends early, as `stop_when` says it."""

    kind: Literal["no gain", "below", "above"]
    number: float
    """How many evaluations without a gain; or the loss, or a task's score, that is enough."""
    task: str | None = None
    """The task by which the run is judged, instead of its held-out loss."""


def stop_rule(text: str) -> Stop:
    """The rule that a text spells out; a ValueError with all forms it may have where it is none."""
    if match := re.fullmatch(r"no gain in ([1-9]\d{0,5}) evaluations?(?: of (\S.*))?", text.strip()):
        return Stop("no gain", int(match[1]), match[2])
    if match := re.fullmatch(r"loss below (\d{1,6}(?:\.\d{1,12})?)", text.strip()):
        return Stop("below", float(match[1]))
    if match := re.fullmatch(r"(\S.*?) above (0?\.\d{1,12}|0)", text.strip()):
        return Stop("above", float(match[2]), match[1])
    raise ValueError(
        "it must be `no gain in N evaluations`, `no gain in N evaluations of TASK`, `loss below X` or `TASK above X` "
        "(a share, such as 0.6)"
    )


def _is_stop_rule(text: str) -> str:
    stop_rule(text)
    return text


StopRule = Annotated[Text, AfterValidator(_is_stop_rule)]


def _patterns(value: object) -> object:
    """`targets: q_proj` and `targets: q_proj, v_proj` are what people write for a list."""
    if not isinstance(value, str) or value == "all-linear" or not value.strip():
        return value
    if value.strip().lower().startswith(("all", "linear")):
        raise ValueError("did you mean `all-linear`?")
    return [part.strip() for part in value.split(",")]


def _kind_of_targets(value: object) -> str:
    """Which branch of `Targets` the user meant, so that a mistake gives one message and not two."""
    return "patterns" if isinstance(value, list | tuple) else "name"


Targets = Annotated[
    Annotated[Literal["all-linear"], Tag("name")] | Annotated[list[Text], Field(min_length=1), Tag("patterns")],
    Discriminator(_kind_of_targets),
    BeforeValidator(_patterns, json_schema_input_type=list[str] | Literal["all-linear"] | str),
]


def _step_range(text: str) -> str:
    first, colon, last = text.replace(" ", "").partition(":")
    if not (first.isascii() and first.isdigit() and (not colon or (last.isascii() and last.isdigit()))):
        raise ValueError("it needs two steps such as `10:12`")
    if not 1 <= int(first) <= int(last or first):
        raise ValueError("steps count from 1, and the first of the two comes first")
    return f"{int(first)}:{int(last or first)}"


ProfileSteps = Annotated[
    str, BeforeValidator(lambda value: str(value) if type(value) is int else value), AfterValidator(_step_range)
]


def _as_sweep(value: object) -> object:
    """A sweep by dotted settings: `{lora: {rank: [8, 16]}}` is what overrides on the command line make of
    `sweep.lora.rank`."""
    wanted = "it must be a mapping of settings to lists of values, or a list of variants, each a mapping of settings"
    if value is None:
        return {}
    if isinstance(value, list) and all(isinstance(variant, dict) and variant for variant in value):
        return [_dotted(variant) for variant in value]
    if not isinstance(value, dict):
        raise ValueError(wanted)
    flat = _dotted(value)
    for name, values in flat.items():
        if not isinstance(values, list) or not values:
            shown = name if name.isprintable() else repr(name)[1:-1]
            raise ValueError(f"needs a list of values for `{shown}`, such as `{shown}: [A, B]`")
    return flat


def _dotted(values: dict[Any, Any]) -> dict[str, Any]:
    """The settings with those of parts, such as `lora`, by their dotted names."""
    parts = ("lora", "preference", "distillation", "peft")
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if name in parts and isinstance(value, dict):
            flat |= {f"{name}.{setting}": inner for setting, inner in value.items()}
        else:
            flat[str(name)] = value
    return flat


_SWEEP_SCHEMA = {"anyOf": [{"type": "object"}, {"type": "array", "items": {"type": "object"}}]}
Sweep = Annotated[Any, AfterValidator(_as_sweep), WithJsonSchema(_SWEEP_SCHEMA)]
