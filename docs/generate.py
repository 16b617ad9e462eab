"""Writes the pages of docs/ that are made from the code; `--check` only says whether they are up to date.

    python docs/generate.py [--check]

A new page is a function that returns its text, and a line in `PAGES`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunesmith.config.schema import json_schema

DOCS = Path(__file__).parent


def main() -> int:
    stale = []
    for name, make in PAGES.items():
        page, text = DOCS / name, make()
        if page.exists() and page.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if "--check" not in sys.argv[1:]:
            page.write_text(text, encoding="utf-8")
            print(f"wrote docs/{name}")
    if stale and "--check" in sys.argv[1:]:
        print(f"out of date: {', '.join('docs/' + name for name in stale)}; run `make docs`", file=sys.stderr)
        return 1
    return 0


def settings_page() -> str:
    schema = json_schema()
    parts = schema["$defs"]
    lines = [
        "# Settings",
        "",
        "<!-- made by docs/generate.py from src/tunesmith/config/schema.py; do not edit -->",
        "",
        "Everything that may stand in run.yaml. Only `model` and `data` are needed; the rest has defaults.",
        "An unknown key is an error, and so is a value of the wrong type.",
        "",
        "- Each setting can be given on the command line too, and wins there:",
        "  `tunesmith train run.yaml epochs=3 lora.rank=8 data.0.weight=2 eval=[]`.",
        "  Lists count from 0; `key=` and `key=null` take a value away.",
        "- Paths are relative to the folder in which `tunesmith` is started, as on any command line.",
        "- `tunesmith schema` prints all this as JSON Schema, which editors use to complete and check.",
        "",
        "## The run",
        "",
        *_table(schema),
        "",
        "## Data sets: items of `data` and `eval`",
        "",
        f"{parts['Dataset']['description']} A file name alone stands for `path`: `data: support.jsonl`.",
        "",
        *_table(parts["Dataset"]),
        "",
        "## Adapters: `lora`",
        "",
        parts["Lora"]["description"],
        "",
        *_table(parts["Lora"], "lora."),
    ]
    return "\n".join(lines) + "\n"


PAGES: dict[str, Callable[[], str]] = {"settings.md": settings_page}


def _table(model: dict[str, Any], prefix: str = "") -> list[str]:
    rows = ["| setting | value | default | meaning |", "| --- | --- | --- | --- |"]
    for name, spec in model["properties"].items():
        default = "needed" if name in model.get("required", ()) else _default(spec)
        rows.append(f"| `{prefix}{name}` | {_kind(spec)} | {default} | {spec['description']} |".replace("  ", " "))
    return rows


def _default(spec: dict[str, Any]) -> str:
    value = spec.get("default")
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if value is None or isinstance(value, list | dict):
        return ""
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _kind(spec: dict[str, Any]) -> str:
    if "$ref" in spec:
        return {"Dataset": "data set", "Lora": "see below"}[spec["$ref"].rsplit("/", 1)[-1]]
    if "anyOf" in spec:
        kinds = [_kind(branch) for branch in spec["anyOf"] if branch.get("type") != "null"]
        if "list of data sets" in kinds:
            return "list of data sets"
        if "list of texts" in kinds:
            return "`all-linear` or list"
        return " or ".join(kinds)
    if "enum" in spec or "const" in spec:
        return ", ".join(f"`{choice}`" for choice in spec.get("enum", [spec.get("const")]))
    kind = spec["type"]
    if kind == "array":
        return f"list of {_kind(spec['items']).split(' or ')[0]}s"
    plain = {"string": "text", "boolean": "true or false", "object": "mapping", "integer": "whole number"}
    return plain.get(kind, kind) + _bounds(spec)


def _bounds(spec: dict[str, Any]) -> str:
    words = []
    for key, word in (
        ("minimum", "from"),
        ("exclusiveMinimum", "above"),
        ("maximum", "to"),
        ("exclusiveMaximum", "below"),
    ):
        # 1 as the least whole number says nothing, nor does the largest seed.
        if key in spec and not (key == "minimum" and spec[key] == 1) and spec[key] < 2**53:
            words.append(f"{word} {spec[key]:g}")
    return " " + " ".join(words) if words else ""


if __name__ == "__main__":
    sys.exit(main())
