"""How answers are checked: from an answer's text and its record to a number. No torch.

`Rewards` is what a run has of them. A check is a function of the two alone, so that the same answers have the same
rewards whenever and on whichever rank they are asked for; functions of the user's own must keep to that.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tunesmith.config.schema import Reward
from tunesmith.disk import expanded
from tunesmith.errors import UserError, first_line
from tunesmith.plan.hardware import usable_cores
from tunesmith.rewards.exact import is_right
from tunesmith.rewards.json_schema import Schema
from tunesmith.rewards.unit_tests import has_passed

Record = Mapping[str, Any]
Check = Callable[[str, Record], float]
SLOW = 60
"""Seconds after which a check that has not returned is named: training waits for it."""
log = logging.getLogger("tunesmith.rewards")


class Rewards:
    """The checks of a run. Making them finds every mistake in their settings."""

    def __init__(self, settings: Sequence[Reward]):
        self.names = tuple(one.title for one in settings)
        self.weights = tuple(one.weight for one in settings)
        self._settings = tuple(settings)
        self._checks = tuple(_check_of(one) for one in settings)
        self._workers = min(usable_cores(), 16) if any(one.kind == "tests" for one in settings) else 1

    def check_record(self, record: Record, origin: str) -> None:
        """UserError where a record lacks what an answer to it is checked by."""
        for one in self._settings:
            wanted = {"exact": "answer", "tests": "tests"}.get(one.kind)
            if wanted and wanted in record and record[wanted] in (None, "", []):
                found = "null" if record[wanted] is None else "empty"
                raise UserError(
                    f"{origin}: `{wanted}` is {found}, but rewards has `{one.kind}`, which checks answers by it; give "
                    "it, or leave the record out."
                )
            if wanted and wanted not in record:
                raise UserError(
                    f"{origin}: rewards has `{one.kind}`, which needs the field `{wanted}`, and the record has "
                    f"{', '.join(f'`{name}`' for name in record) or 'none but its prompt'}; if another field holds it, "
                    f"say `fields: {{{wanted}: NAME}}`."
                )

    def __call__(self, answers: Sequence[tuple[str, Record, str]]) -> list[list[float]]:
        """What each check finds, of each (answer, record, where the record came from); not weighted."""
        if self._workers == 1 or len(answers) == 1:
            return [self._found(*one) for one in answers]
        with ThreadPoolExecutor(self._workers, thread_name_prefix="rewards") as pool:
            return list(pool.map(lambda one: self._found(*one), answers))

    def total(self, found: Sequence[float]) -> float:
        return math.fsum(weight * value for weight, value in zip(self.weights, found, strict=True))

    def _found(self, answer: str, record: Record, origin: str) -> list[float]:
        return [
            _number(check, answer, record, origin, name) for check, name in zip(self._checks, self.names, strict=True)
        ]


def _number(check: Check, answer: str, record: Record, origin: str, name: str) -> float:
    words = f"rewards: {name} has been at an answer to {origin} for {SLOW} s; training waits until it returns."
    slow = threading.Timer(SLOW, log.warning, [words])
    slow.daemon = True
    slow.start()
    try:
        found = check(answer, record)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # the user's own code, which may do anything, and end the process
        raise UserError(
            f"rewards: {name} failed on an answer to {origin}: {type(error).__name__}: {first_line(error)}."
        ) from error
    finally:
        slow.cancel()
    try:
        number = math.nan if isinstance(found, str) else float(found)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"rewards: {name} gave {found!r} for an answer to {origin}, which is no finite number.")
    return number


def _check_of(settings: Reward) -> Check:
    if settings.kind == "exact":
        pattern = re.compile(settings.extract, re.S) if settings.extract else None
        return lambda answer, record: float(is_right(answer, record.get("answer"), pattern))
    if settings.kind == "regex":
        wanted = re.compile(settings.pattern or "", re.S)
        return lambda answer, _: float(wanted.search(answer) is not None)
    if settings.kind == "json_schema":
        schema = Schema.read(expanded(settings.file or ""))
        return lambda answer, _: float(schema.fits(answer))
    if settings.kind == "tests":
        limits = {"seconds": settings.seconds, "memory": settings.memory_mb << 20}
        return lambda answer, record: float(has_passed(answer, record, **limits))
    assert settings.function is not None
    return _function(settings.function)


def _function(name: str) -> Check:
    """A function by its file or module; running the user's code was asked for by naming it."""
    where, _, attribute = name.rpartition(":")
    try:
        if where.endswith(".py"):
            path = expanded(where).resolve()
            spec = importlib.util.spec_from_file_location(f"tunesmith_rewards_{path.stem}", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
    except (Exception, SystemExit) as error:  # the user's own code, which may do anything, and end the process
        raise UserError(f"rewards: {where} cannot be imported: {type(error).__name__}: {first_line(error)}.") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(f"rewards: {where} has no function {attribute}.")
    return function
