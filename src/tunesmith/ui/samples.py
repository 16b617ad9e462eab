"""What a page shows of each evaluation: answers side by side, and held-out records with the loss of each token."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunesmith.train import samples
from tunesmith.ui.log import number
from tunesmith.ui.read import compact, text

STEPS, DOCUMENTS, TASKS = 12, 24, 8
"""That are shown, at most: the first evaluation, the last one, and some between; records; and tasks."""
WINDOW = 8
"""Tokens that are decoded together: how one is written may depend on those before it."""


def shown(folder: Path, tokenizer: Any, *, steps: int = STEPS, documents: int = DOCUMENTS) -> dict[str, Any]:
    """From the run's folder, whatever is in its file."""
    found = samples.read(folder)
    chosen = _spread(list(found), steps)
    return {
        "steps": chosen,
        "answers": [one for step in chosen for one in _answers(step, found[step].get("answers"))],
        "tokens": _documents({step: found[step].get("tokens") for step in chosen}, tokenizer, documents),
    }


def read_tokenizer(folder: Path) -> Any:
    """That of the run, or None."""
    try:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(folder / "side_files" / "tokenizer.json"))
    except Exception:  # the library raises nothing more special
        return None


def _spread(steps: Sequence[int], most: int) -> list[int]:
    if len(steps) <= most:
        return list(steps)
    places = {round(place * (len(steps) - 1) / (most - 1)) for place in range(most)}
    return [steps[place] for place in sorted(places)]


def _answers(step: int, given: Any) -> list[dict[str, Any]]:
    tasks = given.items() if isinstance(given, Mapping) else ()
    return [
        {
            "step": step,
            "task": text(task),
            "prompt": text(one.get("prompt")),
            "answer": text(one.get("answer")),
            "scores": {text(name): number(value) for name, value in _mapping(one.get("scores")).items()},
        }
        for task, each in itertools.islice(tasks, TASKS)
        for one in (each if isinstance(each, list) else [])[: samples.PROMPTS]
        if isinstance(one, Mapping)
    ]


def _documents(given: Mapping[int, Any], tokenizer: Any, most: int) -> list[dict[str, Any]]:
    """Each with the losses of its tokens by step, of the evaluations that have the same tokens."""
    made: dict[tuple[str, str, tuple[int, ...]], dict[str, Any]] = {}
    for step, documents in given.items():
        for one in documents if isinstance(documents, list) else []:
            ids, losses = (one.get(name) if isinstance(one, Mapping) else None for name in ("ids", "losses"))
            if not _is_document(ids, losses):
                continue
            key = (text(one.get("data")), text(one.get("where")), tuple(ids))
            if key not in made and len(made) >= most:
                continue
            about = {"data": key[0], "where": key[1], "pieces": (), "losses": {}}
            known = made.setdefault(key, about)
            known["losses"][step] = [None if (value := number(loss)) is None else compact(value) for loss in losses]
    return [one | {"pieces": _pieces(tokenizer, key[2])} for key, one in made.items()]


def _is_document(ids: Any, losses: Any) -> bool:
    if not isinstance(ids, list) or not isinstance(losses, list) or len(ids) != len(losses):
        return False
    return 0 < len(ids) <= 4096 and all(type(one) is int and 0 <= one < 1 << 31 for one in ids)


def _pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Each token as it is written after those before it; by number where no tokenizer is there to say it."""
    if tokenizer is None:
        return [str(one) for one in ids]

    def decoded(some: Sequence[int]) -> str:
        return tokenizer.decode(list(some), skip_special_tokens=False)

    made = []
    for place in range(len(ids)):
        low = max(0, place - WINDOW)
        before, now = decoded(ids[low:place]), decoded(ids[low : place + 1])
        made.append(text(now[len(before) :] if now.startswith(before) else decoded(ids[place : place + 1])))
    return made


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
