"""A plan in words, for people."""

from __future__ import annotations

from tunesmith.plan.plan import Memory, Plan


def summary_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """Topic, choice and reason of each decision."""
    return [(reason.topic, reason.choice, reason.why) for reason in plan.reasons]


def memory_rows(memory: Memory) -> list[tuple[str, str]]:
    rows = [(name, size_text(getattr(memory, name))) for name in type(memory).model_fields]
    return [*rows, ("total", size_text(memory.total))]


def size_text(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
