"""Answers of one model, or of two to the same questions, given to a judge; judgements are kept one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tunesmith.evaluate.judge import VERSION, Judge, judge_all
from tunesmith.evaluate.results import Results
from tunesmith.evaluate.tasks import Item, Question, Task
from tunesmith.run.choose import Progress
from tunesmith.run.targets import Target


def judge_tasks(
    judge: Judge,
    tasks: Sequence[Task],
    targets: Sequence[Target],
    found: Sequence[dict[str, list[dict[str, Any]]]],
    *,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> None:
    """Adds to the first model's results what the judge says: a score for each item or, of two models, who wins."""
    for task in tasks:
        if task.kind != "judge":
            continue
        known = f"{VERSION} {judge.url} {judge.model} {task.key}"
        keys = " ".join(target.key for target in targets)
        results = Results(folder or targets[0].folder, f"{task.title}-judged", model=keys, task=known)
        said = [one[task.title] for one in found]
        asked = [
            (item.id, _judgement(judge, item, [one[place]["answers"] for one in said]))
            for place, item in enumerate(task.items)
            if item.id not in results.known
        ]
        try:
            for number, (item, result) in enumerate(judge_all(asked), start=1):
                results.add(item, result)
                if progress:
                    progress(f"Judging {task.title}", number, len(asked))
        finally:
            results.close()
        for item, one in zip(task.items, said[0], strict=True):
            one.update(results.known[item.id])


def _judgement(judge: Judge, item: Item, answers: Sequence[list[str]]) -> Callable[[], dict[str, Any]]:
    content = item.content
    assert isinstance(content, Question)
    if len(answers) == 1:
        return partial(judge.rate, content.turns, answers[0], content.target)
    return partial(judge.choose, content.turns, *answers)
