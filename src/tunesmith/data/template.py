"""Chat templates: programs that come with a model, run in a sandbox and within bounds.

They run as transformers runs them, in jinja2's sandbox (`data.sandbox`), and within an allowance (`data.allowance`).
"""

from __future__ import annotations

import functools
import math
from datetime import datetime
from typing import Any

from tunesmith.data.allowance import TemplateRunaway, allowance, spend, weigh
from tunesmith.errors import UserError

LONGEST_TEMPLATE = 1 << 20
DATE = datetime(2024, 7, 26)
"""The date for templates that write today's: a fixed one, so that the same run gives the same tokens tomorrow."""


class TemplateRefusal(Exception):
    """The template raised an error for these messages."""


def render(
    template: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    generation: bool,
    variables: dict[str, Any],
) -> tuple[str, list[tuple[int, int]]]:
    """The text, and the stretches inside {% generation %} blocks."""
    import jinja2

    try:
        compiled = _compile(template)
        arguments = {**variables, "messages": messages, "tools": tools, "documents": None}
        track = compiled.environment.track  # type: ignore[attr-defined]
        with allowance(weigh([messages, tools], math.inf)), track() as (pieces, blocks):
            for piece in compiled.generate(**arguments, add_generation_prompt=generation):
                spend(len(piece))
                pieces.append(piece)
            return "".join(pieces), [(start, end) for start, end in blocks if end > start]
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"the chat template is not valid Jinja: {error.message} (line {error.lineno}).") from error
    except (RecursionError, MemoryError) as error:
        raise TemplateRunaway from error
    except TemplateRunaway:
        raise
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise TemplateRefusal(str(error).strip().rstrip(".!") or type(error).__name__) from error


@functools.lru_cache(maxsize=16)
def parsed(template: str) -> frozenset[str]:
    """Texts at which the template takes values apart, such as `</think>`."""
    import jinja2
    import jinja2.nodes

    try:
        tree = _compile(template).environment.parse(template)
    except jinja2.TemplateError:
        return frozenset()
    taking_apart = ("split", "rsplit", "partition", "rpartition")
    calls = (c for c in tree.find_all(jinja2.nodes.Call) if getattr(c.node, "attr", "") in taking_apart)
    filters = (f for f in tree.find_all(jinja2.nodes.Filter) if f.name in taking_apart)
    consts = (arg for node in (*calls, *filters) for arg in node.args if isinstance(arg, jinja2.nodes.Const))
    return frozenset(const.value for const in consts if isinstance(const.value, str))


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> Any:
    if len(template) > LONGEST_TEMPLATE:
        raise UserError(f"the chat template has {len(template):,} characters, which none needs; give another.")
    from tunesmith.data.sandbox import compiled

    return compiled(template, DATE)
