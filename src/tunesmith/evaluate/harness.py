"""Tasks of lm-eval (EleutherAI's harness), asked of a loaded model through lm-eval's own API."""

from __future__ import annotations

import numbers
from collections.abc import Iterator
from typing import Any

import yaml
from torch import nn

from tunesmith.disk import expanded
from tunesmith.errors import UserError, first_line
from tunesmith.evaluate.tasks import Task

BATCH = {"cpu": 4, "cuda": 32}


def scores(model: nn.Module, tokenizer: Any, task: Task) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each document of the task and its metrics, as lm-eval computes them."""
    evaluator = _library()
    from lm_eval.models.huggingface import HFLM

    named = _named(task.title)
    batch = BATCH[next(model.parameters()).device.type]
    try:
        wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch)
        found = evaluator.simple_evaluate(
            model=wrapped,
            tasks=[named],
            limit=task.settings.get("limit"),
            log_samples=True,
            bootstrap_iters=0,
        )
    except Exception as error:  # its own, and those of the libraries that it loads data with
        raise UserError(f"lm-eval could not do {task.title}: {first_line(error)}.") from error
    assert found is not None
    for name, samples in sorted(found["samples"].items()):
        for sample in samples:
            metrics = {
                key: value for key in sample.get("metrics", ()) if (value := _number(sample.get(key))) is not None
            }
            about = {"filter": kept} if (kept := sample.get("filter", "none")) != "none" else {}
            suffix = f"/{kept}" if about else ""
            yield f"{name}/{sample['doc_id']:08d}{suffix}", {f"{key}{suffix}": one for key, one in metrics.items()}


def _named(title: str) -> Any:
    """One of lm-eval's tasks, or a YAML file that describes one, without code of its own."""
    path = expanded(title)
    if path.suffix not in (".yaml", ".yml"):
        return title
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(
            f"lm-eval: {title} cannot be read ({first_line(error)}); functions in it are not run."
        ) from error
    if not isinstance(found, dict) or not found.get("task"):
        raise UserError(f"lm-eval: {title} describes no task (it has no `task`).")
    return found


def check_installed() -> None:
    _library()


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, numbers.Number) and not isinstance(value, complex) else None


def _library() -> Any:
    try:
        from lm_eval import evaluator
    except ImportError as error:
        raise UserError(
            f"Tasks of lm-eval need the extra `eval` ({first_line(error)}): pip install 'tunesmith[eval]'."
        ) from error
    return evaluator
