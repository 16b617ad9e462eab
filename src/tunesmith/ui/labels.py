"""Tags of a run, and whether it is archived: a small file in its folder. Archiving hides a run and deletes nothing."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunesmith.checkpoint.files import write_atomic
from tunesmith.disk import writing
from tunesmith.errors import UserError
from tunesmith.run.folder import read_json

FILE = "labels.json"
MOST_TAGS, LONGEST_TAG = 12, 40


def read_labels(folder: Path) -> dict[str, Any]:
    """`tags` and `is_archived`, whatever the file holds."""
    try:
        found = read_json(folder / FILE)
    except UserError:
        found = None
    found = found if isinstance(found, dict) else {}
    tags = found.get("tags")
    named = [one for one in tags if isinstance(one, str)] if isinstance(tags, list) else []
    return {
        "tags": [one[:LONGEST_TAG] for one in named[:MOST_TAGS]],
        "is_archived": found.get("is_archived") is True,
    }


def write_tags(folder: Path, given: Sequence[str]) -> dict[str, Any]:
    tags = list(dict.fromkeys(one for tag in given if (one := " ".join(tag.split()))))
    if len(tags) > MOST_TAGS:
        raise UserError(f"A run has {MOST_TAGS} tags at most.")
    for tag in tags:
        if len(tag) > LONGEST_TAG or any(unicodedata.category(char).startswith("C") for char in tag):
            raise UserError(f"A tag has {LONGEST_TAG} characters at most, all of them visible.")
    return _write(folder, tags=tags)


def write_archived(folder: Path, is_archived: bool) -> dict[str, Any]:
    return _write(folder, is_archived=is_archived)


def _write(folder: Path, **changes: Any) -> dict[str, Any]:
    labels = read_labels(folder) | changes
    with writing(folder / FILE, "make room there"):
        write_atomic(folder / FILE, (json.dumps(labels, ensure_ascii=False) + "\n").encode())
    return labels
