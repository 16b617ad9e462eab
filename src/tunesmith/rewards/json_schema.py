"""Whether an answer is JSON that fits a schema: the keywords of JSON Schema that describe values. Others are refused
when the schema is read, not passed over."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.errors import UserError

DESCRIPTIVE = frozenset({"$schema", "$id", "$defs", "definitions", "title", "description", "default", "examples",
                         "$comment", "deprecated", "readOnly", "writeOnly"})  # fmt: skip
TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda v: v is None,
    "boolean": lambda v: isinstance(v, bool),
    "integer": lambda v: _is_number(v) and float(v).is_integer(),
    "number": lambda v: _is_number(v),
    "string": lambda v: isinstance(v, str),
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
}
_FENCE = re.compile(r"^\s*```(?:json)?\s*\n(.*?)\n?\s*```\s*$", re.S)


@dataclass(frozen=True)
class Schema:
    root: Any

    @classmethod
    def read(cls, path: Path) -> Schema:
        try:
            root = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"rewards: the schema {path} cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise UserError(f"rewards: the schema {path} is not JSON: {error}.") from error
        schema = cls(root)
        if why := schema._problem(root):
            raise UserError(f"rewards: the schema {path} {why}.")
        return schema

    def fits(self, answer: str) -> bool:
        """The whole answer, but for a code fence around it."""
        fenced = _FENCE.match(answer)
        try:
            value = json.loads(fenced.group(1) if fenced else answer)
        except (ValueError, RecursionError):
            return False
        return self._fits(value, self.root, 0)

    def _fits(self, value: Any, schema: Any, depth: int) -> bool:
        if isinstance(schema, bool) or depth > 200:
            return schema is True
        return all(
            KEYWORDS[name](self, value, given, schema, depth + 1) for name, given in schema.items() if name in KEYWORDS
        )

    def _referred(self, name: str) -> Any:
        found = self.root
        for part in name.removeprefix("#").strip("/").split("/"):
            if part:
                part = part.replace("~1", "/").replace("~0", "~")
                found = found[int(part)] if isinstance(found, list) else found[part]
        return found

    def _problem(self, schema: Any) -> str | None:
        """What of a schema is not understood here."""
        if isinstance(schema, bool):
            return None
        if not isinstance(schema, dict):
            return f"has {json.dumps(schema)[:60]} where a schema should stand"
        for name, given in schema.items():
            if name not in KEYWORDS and name not in DESCRIPTIVE:
                return f"uses `{name}`, which is not supported here"
            if name == "type" and not all(one in TYPES for one in _listed(given)):
                return f"has the unknown type {json.dumps(given)}"
            if name == "pattern" and not _compiles(given):
                return f"has a pattern that is no regular expression: {given}"
            if name == "$ref":
                try:
                    self._referred(given)
                except (KeyError, IndexError, ValueError, TypeError, AttributeError):
                    return f"refers to {given}, which is not in it"
            inside: list[Any] = []
            if name in ("anyOf", "oneOf", "allOf", "prefixItems"):
                inside = given
            elif name in ("properties", "patternProperties", "$defs", "definitions"):
                inside = list(given.values())
            elif name in ("items", "additionalProperties", "not", "contains", "propertyNames"):
                inside = [given]
            if why := next((why for one in inside if (why := self._problem(one))), None):
                return why
        return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _compiles(pattern: Any) -> bool:
    try:
        re.compile(pattern)
    except (re.error, TypeError):
        return False
    return True


def _same(a: Any, b: Any) -> bool:
    """Equal as JSON is: true is not 1."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def _sized(kind: type | tuple[type, ...], right: Callable[[int, Any], bool]) -> Callable[..., bool]:
    return lambda _, v, g, s, d: not isinstance(v, kind) or right(len(v), g)


def _bound(right: Callable[[Any, Any], bool]) -> Callable[..., bool]:
    return lambda _, v, g, s, d: not _is_number(v) or right(v, g)


def _others(schema: dict[str, Any], value: dict[str, Any]) -> list[str]:
    patterns = schema.get("patternProperties", {})
    known = schema.get("properties", {})
    return [key for key in value if key not in known and not any(re.search(one, key) for one in patterns)]


KEYWORDS: dict[str, Callable[..., bool]] = {
    "$ref": lambda of, v, g, s, d: of._fits(v, of._referred(g), d),
    "type": lambda of, v, g, s, d: any(TYPES[one](v) for one in _listed(g)),
    "enum": lambda of, v, g, s, d: any(_same(v, one) for one in g),
    "const": lambda of, v, g, s, d: _same(v, g),
    "anyOf": lambda of, v, g, s, d: any(of._fits(v, one, d) for one in g),
    "oneOf": lambda of, v, g, s, d: sum(of._fits(v, one, d) for one in g) == 1,
    "allOf": lambda of, v, g, s, d: all(of._fits(v, one, d) for one in g),
    "not": lambda of, v, g, s, d: not of._fits(v, g, d),
    "properties": lambda of, v, g, s, d: (
        not isinstance(v, dict) or all(of._fits(v[key], one, d) for key, one in g.items() if key in v)
    ),
    "patternProperties": lambda of, v, g, s, d: (
        not isinstance(v, dict)
        or all(of._fits(v[key], one, d) for pattern, one in g.items() for key in v if re.search(pattern, key))
    ),
    "additionalProperties": lambda of, v, g, s, d: (
        not isinstance(v, dict) or all(of._fits(v[key], g, d) for key in _others(s, v))
    ),
    "propertyNames": lambda of, v, g, s, d: not isinstance(v, dict) or all(of._fits(key, g, d) for key in v),
    "required": lambda of, v, g, s, d: not isinstance(v, dict) or all(key in v for key in g),
    "minProperties": _sized(dict, lambda n, g: n >= g),
    "maxProperties": _sized(dict, lambda n, g: n <= g),
    "prefixItems": lambda of, v, g, s, d: (
        not isinstance(v, list) or all(of._fits(one, want, d) for one, want in zip(v, g, strict=False))
    ),
    "items": lambda of, v, g, s, d: (
        not isinstance(v, list) or all(of._fits(one, g, d) for one in v[len(s.get("prefixItems", ())) :])
    ),
    "contains": lambda of, v, g, s, d: not isinstance(v, list) or any(of._fits(one, g, d) for one in v),
    "uniqueItems": lambda of, v, g, s, d: (
        not (g and isinstance(v, list)) or not any(_same(a, b) for n, a in enumerate(v) for b in v[:n])
    ),
    "minItems": _sized(list, lambda n, g: n >= g),
    "maxItems": _sized(list, lambda n, g: n <= g),
    "minLength": _sized(str, lambda n, g: n >= g),
    "maxLength": _sized(str, lambda n, g: n <= g),
    "pattern": lambda of, v, g, s, d: not isinstance(v, str) or re.search(g, v) is not None,
    "minimum": _bound(lambda v, g: v >= g),
    "maximum": _bound(lambda v, g: v <= g),
    "exclusiveMinimum": _bound(lambda v, g: v > g),
    "exclusiveMaximum": _bound(lambda v, g: v < g),
    "multipleOf": _bound(lambda v, g: math.isclose(v / g, round(v / g), rel_tol=1e-12)),
}
