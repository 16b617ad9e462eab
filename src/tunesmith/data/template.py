"""Chat templates: programs that come with a model, run in a sandbox and within bounds.

They run as transformers runs them, in jinja2's sandbox. Besides, all that a template can do again and again, or make
large, is counted against an allowance that grows with the conversation: bodies of loops and macros, operators, calls,
filters, what is put together and what is written. A template that goes beyond it is refused, so none can run for ever
or take all memory. (jinja2 itself bounds ranges only.)
"""

from __future__ import annotations

import functools
import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from tunesmith.errors import UserError

DATE = datetime(2024, 7, 26)
"""The date for templates that write today's: a fixed one, so that the same run gives the same tokens tomorrow."""
ALLOWANCE, ALLOWANCE_PER_CHARACTER = 20_000_000, 64
"""Steps and characters that a template may take to write a conversation. The ten of `tests/templates.py` take 2 to 5 a
character."""
SECONDS = 20
"""Of CPU time, for single steps that are slow."""
LARGEST_NUMBER, LARGEST_BITS = 1_000_000, 10_000
LONGEST_TEMPLATE = 1 << 20


class TemplateRefusal(Exception):
    """The template raised an error for these messages."""


class TemplateRunaway(UserError):
    """The template does more than writing a conversation can take."""

    def __init__(self) -> None:
        super().__init__(
            "the chat template was stopped: to write this conversation, it loops or grows without end; give another "
            "`chat_template`."
        )


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
        with _allowance(_weigh([messages, tools], math.inf)), track() as (pieces, blocks):
            for piece in compiled.generate(**arguments, add_generation_prompt=generation):
                _spend(len(piece))
                pieces.append(piece)
            return "".join(pieces), [(start, end) for start, end in blocks if end > start]
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"the chat template is not valid Jinja: {error.message} (line {error.lineno}).") from error
    except (RecursionError, MemoryError) as error:
        raise TemplateRunaway from error
    except TemplateRunaway:
        raise
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise TemplateRefusal(str(error).strip().rstrip(".") or type(error).__name__) from error


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


# The allowance of the rendering that is under way in this thread

_under_way = threading.local()


@contextmanager
def _allowance(size: float) -> Iterator[None]:
    before = getattr(_under_way, "left", None), getattr(_under_way, "until", 0.0)
    _under_way.left = ALLOWANCE + ALLOWANCE_PER_CHARACTER * size
    _under_way.until = time.thread_time() + SECONDS * (1 + size / 10_000_000)
    try:
        yield
    finally:
        _under_way.left, _under_way.until = before


def _spend(amount: float) -> None:
    left = getattr(_under_way, "left", None)
    if left is None:  # while the template is compiled, nothing is repeated
        if amount > ALLOWANCE:
            raise TemplateRunaway
        return
    _under_way.left = left - amount - 1
    if _under_way.left < 0 or ((int(left) & 255) == 0 and time.thread_time() > _under_way.until):
        raise TemplateRunaway


def _tick(amount: int) -> str:
    """In the body of every loop and macro; the time is looked at each time, which counting alone does not bound."""
    _spend(amount)
    if time.thread_time() > getattr(_under_way, "until", math.inf):
        raise TemplateRunaway
    return ""


def _weigh(value: Any, most: float) -> float:
    """Characters and members of all that a value holds, counted as often as it holds them, up to `most`."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        parts: Any = (part for pair in value.items() for part in pair)
    elif isinstance(value, list | tuple | set | frozenset):
        parts = value
    else:
        return 1
    weight = 1.0
    for part in parts:
        weight += _weigh(part, most - weight)
        if weight > most:
            raise TemplateRunaway
    return weight


def _made(value: Any) -> Any:
    """A value that the template put together: paid for by its weight."""
    if isinstance(value, str | list | tuple | dict | set | bytes):
        _spend(_weigh(value, ALLOWANCE + getattr(_under_way, "left", ALLOWANCE)))
    else:
        _spend(1)
    return value


def _check_numbers(values: Any) -> None:
    """Widths, counts and the like: none that stands for a large piece of memory."""
    for value in values:
        if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
            raise TemplateRunaway
        if isinstance(value, list | tuple):
            _check_numbers(value)


_ESCAPED_MARK = re.compile(r"(?<!\\)((?:\\\\)*)\\u(fdd[01])")
_WIDE = re.compile(r"\d{7,}|[{][^{}]*[{]")  # a width of seven digits, or one that is taken from an argument


def _foreseen(name: str, receiver: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """Raise where the result would be too large to be made at all; the arguments, with what can be read once listed."""
    everything = (*arguments, *named.values())
    _check_numbers(everything)
    size = len(receiver) if isinstance(receiver, str | bytes | list | tuple) else 1
    if name == "join":
        arguments = tuple(list(one) if isinstance(one, Iterator) else one for one in arguments)
        members = arguments[0] if arguments and not isinstance(receiver, list | tuple) else receiver
        between = max((len(one) for one in (receiver, *everything) if isinstance(one, str)), default=0)
        if isinstance(members, list | tuple | dict | set | str):
            _spend(_weigh(members, math.inf if isinstance(members, str) else ALLOWANCE * 64) + len(members) * between)
    elif name in ("replace", "translate", "indent", "wordwrap", "expandtabs", "center", "ljust", "rjust", "zfill"):
        longest = max((_weigh(one, ALLOWANCE * 64) for one in everything if not isinstance(one, int)), default=0)
        width = max((abs(one) for one in everything if isinstance(one, int)), default=0)
        if name == "replace" and arguments and isinstance(receiver, str) and isinstance(arguments[0], str):
            size = receiver.count(arguments[0])
        elif name == "indent" and isinstance(receiver, str):
            size = receiver.count("\n") + 1
        elif name == "expandtabs" and isinstance(receiver, str):
            size = receiver.count("\t")
        elif name in ("center", "ljust", "rjust", "zfill"):
            size = 1
        _spend(size * (longest + (width if name != "replace" else 0)))
    elif name in ("format", "format_map", "mod") and isinstance(receiver, str):
        if _WIDE.search(receiver):
            raise TemplateRunaway
    elif name == "round":
        if any(isinstance(one, int) and abs(one) > 300 for one in everything):
            raise TemplateRunaway
    elif name == "tojson":
        widths = (one if isinstance(one, int) else len(one) for one in everything if isinstance(one, int | str))
        _spend(_weigh(receiver, ALLOWANCE * 64) * (1 + max(widths, default=0)))
    return arguments


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    takes_context = hasattr(function, "jinja_pass_arg")

    @functools.wraps(function)
    def bounded(*arguments: Any, **named: Any) -> Any:
        first = 1 if takes_context else 0
        if len(arguments) > first:
            receiver, rest = arguments[first], arguments[first + 1 :]
            if name == "join" and isinstance(receiver, Iterator):
                receiver = list(receiver)
            arguments = (*arguments[:first], receiver, *_foreseen(name, receiver, rest, named))
        return _made(function(*arguments, **named))

    return bounded


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> Any:
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox
    import jinja2.utils
    import jinja2.visitor

    if len(template) > LONGEST_TEMPLATE:
        raise UserError(f"the chat template has {len(template):,} characters, which none needs; give another.")

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
                        _spend(_weigh(one, ALLOWANCE * 64) * max(other, 0))
            elif operator == "%":
                _foreseen("mod", left, (right,), {})
            if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
                bits = left.bit_length() * (abs(right) if operator == "**" else 1) + right.bit_length()
                if bits > LARGEST_BITS:
                    raise TemplateRunaway
            return _made(super().call_binop(context, operator, left, right))

        def call(__self, __context: Any, __function: Any, *arguments: Any, **named: Any) -> Any:
            receiver = getattr(__function, "__self__", None)
            if isinstance(receiver, str | bytes | int | float | list | tuple | dict):
                arguments = _foreseen(__function.__name__, receiver, arguments, named)
            elif (wrapped := getattr(__function, "__wrapped__", None)) is not None:  # str.format, as the sandbox has it
                _foreseen("format", getattr(wrapped, "__self__", None), arguments, named)
            if __function is namespace or isinstance(__function, Dictionary):
                _made([*arguments, named])
            return _made(super().call(__context, __function, *arguments, **named))

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

    environment = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
        finalize=_made,
        optimized=False,
    )
    environment.filters["tojson"] = to_json
    for name, function in list(environment.filters.items()):
        environment.filters[name] = _bounded_filter(name, function)
    environment.filters |= {"_made": _made, "_tick": _tick, "_concat": lambda parts: _made("".join(map(str, parts)))}
    del environment.globals["lipsum"]
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": DATE.strftime,
        "dict": Dictionary(),
        "namespace": namespace,
    }
    return environment.from_string(Counted().visit(environment.parse(template)))
