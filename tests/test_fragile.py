"""docs/fragile.md lists every private name of another library that the code uses, and counts them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tunesmith"
PAGE = (ROOT / "docs" / "fragile.md").read_text(encoding="utf-8")
PUBLIC = {"_replace", "_asdict", "_fields"}
"""Of named tuples: the underscore keeps them apart from fields."""
OURS = ("self", "cls", "super()")


def test_every_private_name_is_on_the_page_with_the_files_that_use_it():
    private, _, _ = PAGE.partition("## Public")
    rows = re.findall(r"^\| `([^`|]+)` \|([^|]*)\|", private, re.MULTILINE)
    listed = {(name, file) for name, files in rows for file in re.findall(r"`([\w/]+\.py)`", files)}
    assert listed == used()


def test_the_first_line_counts_them():
    found = used()
    names, files = ({pair[which] for pair in found} for which in (0, 1))
    assert f"{len(names)} private names" in PAGE
    assert f"{len(found)} places" in PAGE
    assert f"{len(files)} files" in PAGE


@cache
def used() -> set[tuple[str, str]]:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}
    known = PUBLIC | {name for tree in trees.values() for name in defined(tree)}
    return {
        (name, str(path.relative_to(SOURCE)))
        for path, tree in trees.items()
        for name in private_names(tree)
        if name.split(".")[-1] not in known
    }


def defined(tree: ast.AST) -> Iterator[str]:
    """Names that begin with an underscore and are ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in OURS:
            yield node.attr


def private_names(tree: ast.AST) -> Iterator[str]:
    """With the library's name where torch itself is asked (`torch._scaled_mm`), without it where an object is."""
    inner = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("tunesmith"):
            dotted = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name for name in dotted if is_private(name))
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"torch(\.\w+)+", name := ast.unparse(node)):
            if is_private(name) and node not in inner:
                yield name
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and ast.unparse(node.value) not in OURS:
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            whose, asked = node.args[:2]
            if isinstance(asked, ast.Constant) and is_private(str(asked.value)):
                yield f"torch.{asked.value}" if ast.unparse(whose) == "torch" else str(asked.value)


def is_private(name: str) -> bool:
    return any(re.match(r"_[A-Za-z]", part) for part in name.split("."))
