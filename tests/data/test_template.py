"""Templates come with models, and a model comes from anybody: none may run for ever, take all memory or get out."""

from __future__ import annotations

import json
import resource
import threading
import time
import tomllib
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tunesmith.data import allowance
from tunesmith.data.allowance import TemplateRunaway
from tunesmith.data.template import TemplateRefusal, render
from tunesmith.errors import UserError

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
LOOP = "{% for _ in range(99999) %}"

RUNAWAY = {
    "nested loops": LOOP * 4 + "x" + "{% endfor %}" * 4,
    "loops that write nothing": LOOP * 4 + "{% endfor %}" * 4,
    "loops that only test": LOOP * 3 + "{% for x in range(99999) if x < 0 %}{% endfor %}" + "{% endfor %}" * 3,
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "a loop that calls itself": "{% for x in [1, 1] recursive %}{% if loop.depth < 60 %}{{ loop([1, 1]) }}{% endif %}"
    "{% endfor %}",
    "a large product": "{{ 'x' * 10 ** 10 }}",
    "a large list": "{{ [1] * 10 ** 10 }}",
    "a large power": "{{ 10 ** (10 ** 10) }}",
    "powers": "{% set n = namespace(x=7) %}" + LOOP + "{% set n.x = n.x * n.x %}{% endfor %}",
    "sums": "{% set n = namespace(x='x') %}" + LOOP + "{% set n.x = n.x + n.x %}{% endfor %}",
    "sums of lists": "{% set n = namespace(x=[1]) %}" + LOOP + "{% set n.x = n.x + n.x %}{% endfor %}",
    "joins": "{% set n = namespace(x='x') %}" + LOOP + "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "blocks": "{% set n = namespace(x='x') %}" + LOOP + "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
    "a list of itself, written": "{% set n = namespace(x=[1]) %}{% for _ in range(60) %}{% set n.x = [n.x, n.x] %}"
    "{% endfor %}{{ n.x }}",
    "a list of itself, compared": "{% set n = namespace(x=[1], y=[1]) %}{% for _ in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
    "a dictionary of itself": "{% set n = namespace(x={}) %}{% for _ in range(60) %}{% set n.x = dict(a=n.x, b=n.x) %}"
    "{% endfor %}{{ n.x | tojson }}",
    "replace": "{% set n = namespace(x='xx') %}" + LOOP + "{% set n.x = n.x.replace('x', n.x) %}{% endfor %}",
    "the filter replace": "{% set n = namespace(x='xx') %}"
    + LOOP
    + "{% set n.x = n.x | replace('x', n.x) %}{% endfor %}",
    "join": "{% set n = namespace(x='xx') %}" + LOOP + "{% set n.x = n.x.join(n.x) %}{% endfor %}",
    "the filter join": "{% set n = namespace(x='xx') %}" + LOOP + "{% set n.x = n.x | join(n.x) %}{% endfor %}",
    "a width": "{{ 'x' | center(10 ** 10) }}",
    "a width of a method": "{{ 'x'.zfill(10 ** 10) }}",
    "a width of a format": "{{ '{:>9999999999}'.format(1) }}",
    "a width of a format from elsewhere": "{{ '{:>{w}}'.format(1, w='9999999999') }}",
    "a width of an operator": "{{ '%9999999999d' % 1 }}",
    "a width of an operator from elsewhere": "{{ '%*d' % (10 ** 10, 1) }}",
    "tabs": "{{ ('\\t' * 9999).expandtabs(999999) }}",
    "an indent": "{{ messages | tojson(indent=10 ** 9) }}",
    "an indented text": "{{ ('\\n' * 9999) | indent(999999) }}",
    "a rounded number": "{{ 7 | round(10 ** 9, 'ceil') }}",
    "batches": "{{ [1] | batch(10 ** 9, 'x') | list }}",
    "the same text again and again": "{% set x %}" + LOOP + "x" * 9999 + "{% endfor %}{% endset %}{{ x | length }}",
}


@pytest.mark.parametrize("name", RUNAWAY)
def test_a_template_that_would_run_for_ever_or_take_all_memory_is_stopped(name, monkeypatch):
    monkeypatch.setattr(allowance, "SECONDS", 0.3)
    monkeypatch.setattr(allowance, "ALLOWANCE", 1_000_000)
    began, before = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TemplateRunaway, match="loops or grows without end"):
        render(RUNAWAY[name], MESSAGES, None, False, {})
    assert time.thread_time() - began < 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # KiB


def test_the_time_is_bounded_in_any_thread(monkeypatch):
    monkeypatch.setattr(allowance, "SECONDS", 0.2)
    monkeypatch.setattr(allowance, "ALLOWANCE", 10**12)
    caught = []

    def work():
        try:
            render(RUNAWAY["loops that write nothing"], MESSAGES, None, False, {})
        except TemplateRunaway as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert caught


ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ messages.append(1) }}",
    "{{ ''|attr('__class__') }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ ('{0.__class__}'|attr('format'))(1) }}",
    "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "{{ dict.mro() }}",
    "{{ dict.__subclasses__() }}",
    "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    "{{ namespace(__class__=1) }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ lipsum.__globals__ }}",
    "{% include 'x' %}",
    "{{ self.__init__.__globals__ }}",
    "{{ messages | map(attribute='__class__') | list }}",
]


@pytest.mark.parametrize("text", ESCAPES)
def test_a_template_cannot_get_out(text):
    try:
        written = render(text, MESSAGES, None, False, {})[0]
    except (TemplateRefusal, UserError):
        written = ""
    assert written in ("", "[Undefined, Undefined]")


def test_the_lowest_jinja2_that_is_allowed_has_the_hardened_sandbox_and_is_one_that_transformers_takes():
    """Up to 3.1.5 a template gets at `str.format` through `|attr` and from there to anything (CVE-2025-27516)."""
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    (lowest,) = (one.removeprefix("jinja2>=") for one in settings["project"]["dependencies"] if "jinja2" in one)
    asked = [Requirement(one) for one in requires("transformers") or () if one.lower().startswith("jinja2")]
    assert Version(lowest) >= Version("3.1.6")
    assert all(one.specifier.contains(lowest) for one in asked)
    assert Version(version("jinja2")) >= Version(lowest)


def test_counting_changes_nothing_that_templates_write():
    """Against jinja2 as it is, on all that is counted."""
    import jinja2.sandbox

    text = (
        "{% macro m(x) %}<{{ x }}>{% endmacro %}{% set n = namespace(x=[], y='') %}"
        "{% for a, b in [(1, 2), (3, 4)] %}{% set n.x = n.x + [a * b] %}{% set n.y = n.y ~ a ~ none ~ nope %}"
        "{{ loop.index }}{{ loop.last }}{{ m(a) }}"
        "{% if loop.first %}{% continue %}{% endif %}{{ loop.length }}{% endfor %}"
        "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% else %}none{% endfor %}"
        "{{ n.x | join(',') }}{{ n.y }}{{ {'a': [1, 'ü']} | tojson }}{{ '%s-%03d' % ('a', 7) }}{{ '{:>4}'.format(1) }}"
        "{% call(x) m2() %}{{ x }}{% endcall %}"
        "{{ 'a,b'.split(',') | map('upper') | list }}{{ messages[0].content * 2 }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | first }}{{ 2 ** 8 % 7 }}"
        "{% filter upper %}abc{% endfilter %}{% set t %}x{{ 1 }}{% endset %}{{ t }}{{ 'x' in ('x', 'y') }}{{ none }}"
    )
    text = "{% macro m2() %}[{{ caller(3) }}]{% endmacro %}" + text
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    plain.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    wanted = plain.from_string(text).render(messages=MESSAGES)
    assert render(text, MESSAGES, None, False, {})[0] == wanted


def test_a_long_conversation_is_within_the_allowance(reasoning, chatml):
    messages = MESSAGES * 1000 + [{"role": "user", "content": "word " * 400_000}]
    for tokenizer in (reasoning, chatml):
        assert render(tokenizer.chat_template, messages, None, True, {"eos_token": "x"})[0]
