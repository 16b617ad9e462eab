"""A sweep: from one run's settings to those of its variants, which are adapters over the same frozen base.

A variant is an ordinary run in a folder of its own below the sweep's. It is named by what makes it different, so that a
value that is added to a sweep later leaves the other variants what they are.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from dataclasses import dataclass
from typing import Any

from tunesmith.config.load import with_settings
from tunesmith.config.schema import Run
from tunesmith.errors import UserError

MOST = 256
"""Variants of a sweep."""
SWEPT = (
    "learning_rate",
    "schedule",
    "warmup",
    "optimizer",
    "weight_decay",
    "max_grad_norm",
    "z_loss",
    "router_aux_loss_coef",
    "batch_tokens",
    "epochs",
    "steps",
    "seed",
    "data",
    "lora",
    "peft",
    "preference",
    "distillation",
)
"""Settings, or parts of them, that leave the base and what variants are compared by the same."""
FIXED = {
    "lora.bits": "it is how the base is held",
    "distillation.teacher": "it is another model",
    "peft.peft_type": "it is another kind of adapter",
}


@dataclass(frozen=True)
class Variant:
    name: str
    """The name of its folder, below the sweep's."""
    changes: dict[str, Any]
    """What it changes, by dotted settings."""
    run: Run


def variants(run: Run) -> list[Variant]:
    """The variants of the run's sweep, in the order of their values; UserError where one cannot be had."""
    if run.method == "full" or run.is_merged:
        raise UserError(
            f"sweep: its variants are adapters over one frozen base, and method: {run.method} trains the base itself; "
            "use method lora or qlora, or runs of their own."
        )
    if isinstance(run.sweep, list):
        changes = [dict(one) for one in run.sweep]
    else:
        changes = [dict(zip(run.sweep, values, strict=True)) for values in itertools.product(*run.sweep.values())]
    if len(changes) > MOST:
        raise UserError(f"sweep: it has {len(changes):,} variants, and no more than {MOST:,} are taken.")
    for name in dict.fromkeys(name for one in changes for name in one):
        _check_swept(name)
    made: dict[str, Variant] = {}
    for one in changes:
        name = _name(one)
        if name in made:
            raise UserError(f"sweep: the variant {name} is there twice; leave one of the two out.")
        own = with_settings(run, {**one, "sweep": {}, "output": f"{run.output}/{name}"}, f"sweep, variant {name}")
        made[name] = Variant(name, one, own)
    return list(made.values())


def _check_swept(name: str) -> None:
    first = name.partition(".")[0]
    if first not in Run.model_fields:
        return  # what was meant is said when the variant is made
    if name in FIXED or first not in SWEPT:
        why = FIXED.get(name, "the base, its preparation and the held-out data are the same for all variants")
        raise UserError(f"sweep: `{name}` cannot differ between variants: {why}; make runs of their own for it.")


def _name(changes: dict[str, Any]) -> str:
    parts = (f"{name}={_shown(value)}" for name, value in changes.items())
    text = re.sub(r"[^A-Za-z0-9._=+-]+", "-", "_".join(parts))
    return text if len(text) <= 120 else f"{text[:100]}-{_digest(changes)}"


def _shown(value: Any) -> str:
    if isinstance(value, float | int) and not isinstance(value, bool):
        return f"{value:g}" if float(f"{value:g}") == value else str(value)
    return str(value) if isinstance(value, str | bool | None) and len(str(value)) <= 40 else _digest(value)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
