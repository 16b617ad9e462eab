"""jinja2's sandbox for chat templates, as transformers has it, in which all that repeats or grows is paid for out of an
allowance (`data.allowance`). Imported when a template is first compiled."""

from __future__ import annotations

import json
import re
import threading
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

from tunesmith.data.allowance import (
    ALLOWANCE,
    LARGEST_BITS,
    TemplateRunaway,
    bounded_filter,
    foreseen,
    made,
    spend,
    tick,
    weigh,
)

_ESCAPED_MARK = re.compile(r"(?<!\\)((?:\\\\)*)\\u(fdd[01])")


class Generation(jinja2.ext.Extension):
    tags = {"generation"}  # noqa: RUF012

    def __init__(self, environment: jinja2.Environment):
        super().__init__(environment)
        environment.extend(track=self.track)
        self.here = threading.local()

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("note"), [], [], body).set_lineno(line)

    def note(self, caller: Any) -> str:
        text = caller()
        start = sum(map(len, self.here.pieces))
        self.here.blocks.append((start, start + len(text)))
        return text

    @contextmanager
    def track(self) -> Any:
        self.here.pieces, self.here.blocks = [], []
        yield self.here.pieces, self.here.blocks


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, str | bytes | list | tuple) and isinstance(other, int):
                    spend(weigh(one, ALLOWANCE * 64) * max(other, 0))
        elif operator == "%":
            foreseen("mod", left, (right,), {})
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (abs(right) if operator == "**" else 1) + right.bit_length()
            if bits > LARGEST_BITS:
                raise TemplateRunaway
        return made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __function: Any, *arguments: Any, **named: Any) -> Any:
        receiver = getattr(__function, "__self__", None)
        if isinstance(receiver, str | bytes | int | float | list | tuple | dict):
            arguments = foreseen(__function.__name__, receiver, arguments, named)
        elif (wrapped := getattr(__function, "__wrapped__", None)) is not None:  # str.format, as the sandbox has it
            foreseen("format", getattr(wrapped, "__self__", None), arguments, named)
        if __function is namespace or isinstance(__function, Dictionary):
            made([*arguments, named])
        return made(super().call(__context, __function, *arguments, **named))


class Dictionary:
    """`dict` of templates: the type itself would lead out of the sandbox."""

    def __call__(self, *arguments: Any, **named: Any) -> dict[Any, Any]:
        return dict(*arguments, **named)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


class namespace(jinja2.utils.Namespace):
    def __init__(*arguments: Any, **named: Any):
        self, *arguments = arguments  # type: ignore[assignment]
        attributes = dict(*arguments, **named)
        for name in attributes:
            _refuse_hidden(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_hidden(name)
        super().__setitem__(name, value)


def _refuse_hidden(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.sandbox.SecurityError(f"names such as {name} are hidden")


class Counted(jinja2.visitor.NodeTransformer):
    """Everything that repeats, or puts values together, is counted."""

    def _visit_body(self, node: Any) -> Any:
        self.generic_visit(node)
        size = 1 + sum(len(data.data) for data in node.find_all(jinja2.nodes.TemplateData))
        tick = jinja2.nodes.Filter(jinja2.nodes.Const(size), "_tick", [], [], None, None)
        node.body.insert(0, jinja2.nodes.Output([tick]))
        return node.set_lineno(node.lineno)

    visit_For = visit_Macro = visit_CallBlock = _visit_body

    def _visit_container(self, node: Any) -> Any:
        self.generic_visit(node)
        is_read = getattr(node, "ctx", "load") == "load"
        return jinja2.nodes.Filter(node, "_made", [], [], None, None) if is_read else node

    visit_List = visit_Tuple = visit_Dict = _visit_container

    def visit_Concat(self, node: Any) -> Any:
        self.generic_visit(node)
        parts = jinja2.nodes.Filter(jinja2.nodes.List(node.nodes), "_made", [], [], None, None)
        return jinja2.nodes.Filter(parts, "_concat", [], [], None, None)


def refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    # What the encoder marks content with (`marked.MARK`) goes through as it is.
    return _ESCAPED_MARK.sub(lambda match: match[1] + chr(int(match[2], 16)), text) if ensure_ascii else text


def compiled(template: str, date: datetime) -> jinja2.Template:
    """`date`: what the template takes for today's."""
    environment = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
        finalize=made,
        optimized=False,
    )
    environment.filters["tojson"] = to_json
    for name, function in list(environment.filters.items()):
        environment.filters[name] = bounded_filter(name, function)
    environment.filters |= {"_made": made, "_tick": tick, "_concat": lambda parts: made("".join(map(str, parts)))}
    del environment.globals["lipsum"]
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": date.strftime,
        "dict": Dictionary(),
        "namespace": namespace,
    }
    return environment.from_string(Counted().visit(environment.parse(template)))
