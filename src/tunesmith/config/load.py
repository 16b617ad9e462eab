"""From run.yaml and `key=value` overrides to a `Run`, with every mistake found in one go and named.

Each message is one sentence with the place of the mistake. Paths in the settings stay as written and are
relative to the current directory, as on any command line. What the settings mean is not known here.
"""

from __future__ import annotations

import codecs
import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel, ValidationError

from tunesmith.config.adapter import with_adapter
from tunesmith.config.other_names import SENTENCES, SETTINGS
from tunesmith.config.schema import (
    Dataset,
    Distillation,
    Embedding,
    Lora,
    Preference,
    Reward,
    Rollout,
    Run,
    named_source,
)
from tunesmith.errors import UserError, UserErrors

DEFAULT = "default"
COMMAND_LINE = "command line"
DEFAULT_FILE = "run.yaml"
OVERRIDE = re.compile(r"[a-z]\w*(\.\w+)*=")
LARGEST_FILE = 1 << 20
DEEPEST = 50
MOST_VALUES = 20_000
"""Values in one file after aliases are followed: a few nested aliases can stand for billions."""


@dataclass(frozen=True)
class Loaded:
    """A run, and where each of its settings came from."""

    run: Run
    path: Path
    origin: dict[str, str]
    """Dotted key (`lora.rank`, `data.0.path`) -> "run.yaml, line 7", "command line" or "default"."""


def load(path: Path | str, overrides: Sequence[str] = ()) -> Loaded:
    """Reads settings from a YAML file; `overrides` such as `lora.rank=8` or `data.0.weight=2` come on top. An
    override in the file's place stands for run.yaml, or for no file where there is none."""
    path = Path(path)
    if OVERRIDE.match(str(path)) and not path.exists():
        path, overrides = Path(DEFAULT_FILE), [str(path), *overrides]
        has_file = path.exists()
    else:
        has_file = True
    settings = _parse(_read(path), str(path)) if has_file else _Settings({})
    for override in overrides:
        _apply(override, settings)
    run = _validate(settings, str(path) if has_file else COMMAND_LINE)
    return Loaded(run, path, dict(_origins(run, settings)))


def from_mapping(mapping: Mapping[str, Any]) -> Run:
    """Settings from a program; the same messages, without a place."""
    if not isinstance(mapping, Mapping):
        raise UserError(f"settings are {_show(mapping)} but need to be a mapping of keys to values")
    return _validate(_Settings(dict(mapping)), "")


def with_settings(run: Run, changes: Mapping[str, Any], place: str) -> Run:
    """The run with other values of some settings, by dotted keys; what is wrong with them is said to be at `place`."""
    settings = _Settings(run.model_dump(mode="json", exclude_unset=True))
    for name, value in changes.items():
        _put(settings, _keys_of(name), copy.deepcopy(value), place)
    return _validate(settings, place)


# --- Text to values, with the line of each ---------------------------------------------------------------

Keys = tuple[str | int, ...]


@dataclass
class _Settings:
    """Plain values, and the place of each; where a value has none, the one around it has."""

    values: dict[str, Any]
    places: dict[Keys, str] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def place(self, keys: Keys) -> str:
        while keys and keys not in self.places:
            keys = keys[:-1]
        return self.places.get(keys, "")


class _Loader(yaml.SafeLoader):
    """YAML with the scalars people expect: `2e-4` is a number; dates, octals and 1:30 are text."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (the superclass's are replaced, not shared)


_TAG = "tag:yaml.org,2002:"
for _name, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE|yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF", list("tTfFyYnNoO")),
    ("int", r"[-+]?[0-9][0-9_]*", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern})\Z"), _first)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except IsADirectoryError:
        raise UserError(f"{path} is a folder; name the settings file in it, such as {path / 'run.yaml'}") from None
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; `tunesmith init {path}` writes one") from None
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or str(problem)
        raise UserError(f"{_plain(str(path))} cannot be read: {reason}") from None
    if len(content) > LARGEST_FILE:
        raise UserError(f"{path} is larger than 1 MiB, which no settings file is; is it a data file?")
    if path.suffix.lower() in (".jsonl", ".csv", ".tsv", ".parquet"):
        raise UserError(f"{path} is a data file; `tunesmith init --data {path}` writes a settings file for it")
    encoding = "utf-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as problem:
        if b"\0" in content:
            raise UserError(f"{path} is a binary file, not settings in YAML") from None
        line = content[: problem.start].count(b"\n") + 1
        raise UserError(f"{path}, line {line} is not UTF-8 text; save the file as UTF-8") from None
    if "\0" in text:
        raise UserError(f"{path} is a binary file, not settings in YAML")
    return text


def _parse(text: str, source: str) -> _Settings:
    node = _compose(text, source)
    if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == _TAG + "null"):
        raise UserError(f"{source} is empty; it needs at least `model` and `data` (`tunesmith init` writes an example)")
    if not isinstance(node, yaml.MappingNode):
        found = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
        raise UserError(f"{source} holds {found} but needs `key: value` lines, such as `model: my-model`")
    reader = _Reader(source)
    values = reader.value(node, ())
    return _Settings(values, reader.places, reader.errors)


def _compose(text: str, source: str) -> yaml.Node | None:
    loader = None
    try:
        loader = _Loader(text)  # looks for characters that YAML forbids
        return loader.get_single_node()
    except yaml.MarkedYAMLError as problem:
        began = re.search(
            "simple key|quoted scalar|flow", problem.context or ""
        )  # there is the mistake, not at its end
        mark = (problem.context_mark if began else None) or problem.problem_mark or problem.context_mark
        place = f"{source}, line {mark.line + 1}" if mark else source
        raise UserError(f"{place}: {_yaml_problem(problem)}") from None
    except yaml.reader.ReaderError as problem:
        line = text[: problem.position].count("\n") + 1
        raise UserError(f"{source}, line {line}: the character {problem.character!r} is not allowed here") from None
    except RecursionError:
        raise UserError(f"{source} is nested too deeply to be settings") from None
    except (ValueError, OverflowError) as problem:  # PyYAML on escapes such as "\UFFFFFFFF"
        raise UserError(f"{source} is not valid YAML: {_plain(str(problem))}") from None
    finally:
        if loader:
            loader.dispose()


def _yaml_problem(problem: yaml.MarkedYAMLError) -> str:
    text = _plain(problem.problem or problem.context or "not valid YAML")
    for pattern, advice in (
        (r"character '\\t'", "indented with a tab; YAML wants spaces"),
        (
            "mapping values are not",
            "a second `: ` in one value; quote it, or put a space after the `:` of the line before",
        ),
        ("could not find expected ':'", "not `key: value`; is the `:` or the space after it missing?"),
        ("expected <block end>", "indented unlike the lines above it, or a bracket or quote is not closed"),
        ("another document|single document", "a second document begins; settings are one"),
        ("character '[@`%]'", "a value that begins with @, ` or % needs quotes"),
        ("unexpected end of stream|unexpected document", "a quote is opened but never closed"),
        (r"expected ',' or '[]}]'", "a bracket is opened but not closed, or a comma is missing"),
        ("unknown escape character", "a backslash in double quotes; use single quotes"),
        ("expected alphabetic|undefined alias", "a value that begins with * or & needs quotes"),
    ):
        if re.search(pattern, text):
            return advice
    return f"not valid YAML, {text}"


class _Reader:
    """Nodes to values; keeps the place of each and the mistakes on the way."""

    def __init__(self, source: str, place: str | None = None):
        self.source = source
        self.fixed_place = place
        self.places: dict[Keys, str] = {}
        self.errors: list[str] = []
        self.count = 0
        self.open_nodes: list[yaml.Node] = []

    def value(self, node: yaml.Node, keys: Keys) -> Any:
        self.count += 1
        if self.count > MOST_VALUES:
            raise UserError(f"{self.source} stands for more than {MOST_VALUES:,} values, which no settings file does")
        if keys:  # a key has its own line already; what is missing altogether has none
            self.places.setdefault(keys, self._place(node))
        if isinstance(node, yaml.ScalarNode):
            try:
                return _scalar(node)
            except ValueError as problem:
                self.errors.append(f"{_key(keys)} {problem} ({self._place(node)})")
                return None
        if node in self.open_nodes:
            raise UserError(f"{_key(keys)} contains itself ({self._place(node)})")
        if len(self.open_nodes) > DEEPEST:
            raise UserError(f"{self.source} is nested too deeply to be settings")
        self.open_nodes.append(node)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            made: Any = [self.value(item, (*keys, number)) for number, item in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            made = self._mapping(node, keys)
        else:
            made = None
            self.errors.append(
                f"{_key(keys)} has the tag {_show(node.tag)}, which settings do not take ({self._place(node)})"
            )
        self.open_nodes.pop()
        return made

    def _mapping(self, node: yaml.MappingNode, keys: Keys) -> dict[str, Any]:
        made: dict[str, Any] = {}
        lines: dict[str, int] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self.errors.append(f"a key is a list or mapping but needs to be a name ({self._place(key_node)})")
            elif key_node.tag == _TAG + "merge":
                merged += value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            elif (key := key_node.value) in lines:
                both = f"lines {lines[key]} and {line}" if lines[key] != line else f"line {line}"
                where = self.fixed_place or f"{self.source}, {both}"
                self.errors.append(f"{_key((*keys, key))} is given twice ({where})")
            else:
                lines[key] = line
                self.places[(*keys, key)] = self._place(key_node)
                made[key] = self.value(value_node, (*keys, key))
        for other in merged:  # `<<: *base`: what is said here goes before what is merged in
            if not isinstance(other, yaml.MappingNode):
                self.errors.append(f"`<<` needs a mapping to merge in ({self._place(other)})")
                continue
            if other in self.open_nodes:
                raise UserError(f"`<<` merges a mapping into itself ({self._place(other)})")
            inner = _Reader(self.source, self.fixed_place)
            inner.count, inner.open_nodes = self.count, self.open_nodes
            values = inner.value(other, keys)
            self.count = inner.count
            self.errors += inner.errors
            for key in values or {}:
                if key not in made:
                    made[key] = values[key]
                    start = (*keys, key)
                    self.places |= {k: place for k, place in inner.places.items() if k[: len(start)] == start}
        return made

    def _place(self, node: yaml.Node) -> str:
        return self.fixed_place or f"{self.source}, line {node.start_mark.line + 1}"


def _scalar(node: yaml.ScalarNode) -> Any:
    text = node.value
    kind = node.tag.removeprefix(_TAG)
    if kind in ("str", "merge"):
        return text
    if kind == "null":
        return None
    if kind == "bool" and text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    if kind not in ("int", "float", "bool"):
        raise ValueError(f"has the tag {_show(node.tag)}, which settings do not take")
    if len(text) > 400:
        raise ValueError("is a number of more than 400 digits")
    try:
        plain = text.replace("_", "")
        return int(plain) if kind == "int" else float(plain.lower().replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError:
        raise ValueError(f"is {_show(text)}, which its tag says it is not") from None


_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


# --- Overrides -------------------------------------------------------------------------------------------


def _apply(override: str, settings: _Settings) -> None:
    """Sets one `key=value` in `settings`; a mistake is added to its errors."""
    name, equals, text = override.partition("=")
    name = name.strip()
    if not equals or not name:
        settings.errors.append(f"{_show(override)} is not an override; write key=value ({COMMAND_LINE})")
        return
    keys = _keys_of(name)
    reader = _Reader(_plain(override), COMMAND_LINE)
    try:
        value = reader.value(_override_node(text.strip(), override), keys)
        _put(settings, keys, value, COMMAND_LINE)
    except UserError as problem:
        settings.errors.append(str(problem))
        return
    settings.errors += reader.errors
    settings.places = {k: place for k, place in settings.places.items() if k[: len(keys)] != keys} | reader.places


def _override_node(text: str, override: str) -> yaml.Node:
    """Lists, mappings and quoted text are YAML; anything else is one plain value, also `*.jsonl` or `a: b`."""
    if text.startswith(("[", "{", '"', "'")):
        try:
            node = _compose(text, "value")
        except UserError as problem:
            reason = str(problem).removeprefix("value").removeprefix(", line 1").removeprefix(": ")
            raise UserError(f"`{_plain(override)}`: {reason} ({COMMAND_LINE})") from None
        assert node is not None
        return node
    return yaml.ScalarNode(_Loader("").resolve(yaml.ScalarNode, text, (True, False)), text)


def _keys_of(name: str) -> Keys:
    return tuple(int(part) if re.fullmatch(r"[0-9]{1,9}", part) else part for part in name.split("."))


def _put(settings: _Settings, keys: Keys, value: Any, place: str) -> None:
    if keys[0] in ("data", "eval") and len(keys) > 1:
        _datasets_as_lists(settings)
    around: Any = settings.values
    key: Any
    for depth, key in enumerate(keys):
        is_last = depth == len(keys) - 1
        problem = ""
        if isinstance(around, dict):
            key = str(key)
            if not is_last and around.get(key) is None:
                around[key] = {}
        elif not isinstance(around, list):
            problem = f"is {_show(around)}"
        elif not isinstance(key, int):
            problem = "is a list; say which item, counted from 0"
        elif key >= len(around):
            problem = f"has {len(around)} item{'s' * (len(around) != 1)}, counted from 0"
        if problem:
            raise UserError(f"{_key(keys)} cannot be set: {_key(keys[:depth])} {problem} ({place})")
        if is_last:
            around[key] = value
        else:
            around = around[key]


def _datasets_as_lists(settings: _Settings) -> None:
    """`data: a.jsonl` and `data: {path: ...}` as the list that they mean, so that places and keys agree."""
    for key in ("data", "eval"):
        value = settings.values.get(key)
        if isinstance(value, str | dict):
            settings.values[key] = value = [value]
            start = (key,)
            settings.places = {
                (key, 0, *k[1:]) if k[:1] == start and len(k) > 1 else k: place for k, place in settings.places.items()
            }
        if isinstance(value, list):
            settings.values[key] = [named_source(item) if isinstance(item, str) else item for item in value]


# --- Values to a Run, or to sentences --------------------------------------------------------------------


def _validate(settings: _Settings, source: str) -> Run:
    _datasets_as_lists(settings)
    found = list(settings.errors)
    try:
        run = Run.model_validate(settings.values)
    except ValidationError as problem:
        # A value that could not be read is None here; what is wrong with it has been said already.
        said = {message.split(" ", 1)[0] for message in found}
        sentences = []
        for error in problem.errors(include_url=False):
            keys = _without_tags(error["loc"], settings.values)
            if _key(keys) in said:
                continue
            place = settings.place(keys) or source
            sentence = _sentence(cast(dict[str, Any], error), keys)
            sentences.append((_order(place), f"{sentence} ({place})" if place else sentence))
        found += [sentence for _, sentence in sorted(sentences, key=lambda pair: pair[0])]
    else:
        if not found:
            return with_adapter(run)
    found = list(dict.fromkeys(found))
    raise UserErrors(found)


def _sentence(error: dict[str, Any], keys: Keys) -> str:
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    name = _key(keys)
    if kind == "extra_forbidden":
        return _unknown_key(keys)
    if kind == "missing":
        return f"{name} is missing: {_lower(_field(keys).description or 'it is needed')}".rstrip(".")
    if kind == "literal_error":
        choices = _choices(context["expected"])
        near = get_close_matches(str(value).lower(), choices, n=1, cutoff=0.6)
        hint = f"; did you mean `{near[0]}`?" if near else ""
        return f"{name} is {_show(value)} but needs to be {_either([f'`{choice}`' for choice in choices])}{hint}"
    if kind == "value_error" and not keys:
        return str(context["error"])
    if kind == "value_error":
        return f"{name} is {_show(value)}: {context['error']}" if _is_plain(value) else f"{name} {context['error']}"
    if kind in _WANTED:
        return f"{name} is {_show(value)} but needs {_WANTED[kind]}"
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        return f"{name} is {_show(value)} but needs to be {words} {context[bound]:g}"
    if kind == "too_short":
        return f"{name} is empty; it needs at least one item"
    return f"{name} is {_show(value)}: {_lower(_plain(error['msg']))}"


_WANTED = {
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "a whole number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "finite_number": "a finite number",
    "string_type": "text; put it in quotes if it is a name",
    "string_unicode": "text of valid Unicode characters",
    "list_type": "a list",
    "dict_type": "a mapping (`key: value`)",
    "model_type": "a mapping (`key: value`)",
    "model_attributes_type": "a mapping (`key: value`)",
}
_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
_PARTS: dict[str, type[BaseModel]] = {
    "lora": Lora,
    "preference": Preference,
    "distillation": Distillation,
    "embedding": Embedding,
    "rollout": Rollout,
    "rewards": Reward,
    "data": Dataset,
    "eval": Dataset,
}


def _unknown_key(keys: Keys) -> str:
    """Looks for the key that was meant: by the names of other tools, among its neighbours, then in the other parts."""
    key, around = str(keys[-1]), keys[:-1]
    word = key.strip().lower().replace("-", "_")
    here = _model_of(around)
    if word in SENTENCES:
        return f"{_key(keys)} is not a setting: {SENTENCES[word]}"
    if word in SETTINGS:
        settings = [_keys_of(name) for name in SETTINGS[word]]
        meant = next((one for one in settings if _model_of(one[:-1]) is here), None)
        return _did_you_mean(keys, settings[0] if meant is None else (*around, meant[-1]))
    if near := get_close_matches(word, list(here.model_fields), n=1, cutoff=0.75):
        return _did_you_mean(keys, (*around, near[0]))
    elsewhere: dict[str, Keys] = dict.fromkeys(Embedding.model_fields, ("embedding",))
    elsewhere |= dict.fromkeys(Distillation.model_fields, ("distillation",))
    elsewhere |= dict.fromkeys(Rollout.model_fields, ("rollout",)) | dict.fromkeys(Reward.model_fields, ("rewards", 0))
    elsewhere |= dict.fromkeys(Dataset.model_fields, ("data", 0))
    elsewhere |= dict.fromkeys(Preference.model_fields, ("preference",)) | dict.fromkeys(Lora.model_fields, ("lora",))
    elsewhere |= dict.fromkeys(Run.model_fields, ())
    if near := get_close_matches(word, list(elsewhere), n=1, cutoff=0.8):
        return _did_you_mean(keys, (*elsewhere[near[0]], near[0]))
    return f"{_key(keys)} is not a setting; docs/settings.md and `tunesmith schema` list them all"


def _did_you_mean(keys: Keys, meant: Keys) -> str:
    hint = ", at the top level" if len(keys) > 1 and len(meant) == 1 else ""
    return f"{_key(keys)}: did you mean {_key(meant)}{hint}?"


def _origins(run: Run, settings: _Settings, model: BaseModel | None = None, keys: Keys = ()) -> Any:
    model = run if model is None else model
    for name in type(model).model_fields:
        value, inner = getattr(model, name), (*keys, name)
        if isinstance(value, BaseModel):
            yield from _origins(run, settings, value, inner)
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            for number, item in enumerate(value):
                yield from _origins(run, settings, item, (*inner, number))
        else:
            given = name in model.model_fields_set
            yield ".".join(map(str, inner)), settings.place(inner) if given else DEFAULT


def _without_tags(location: Sequence[str | int], values: Any) -> Keys:
    """pydantic names the branch of a union inside the location: keep what is a key or an index."""
    keys: list[str | int] = []
    key: Any
    for number, key in enumerate(location):
        is_index = isinstance(values, list) and isinstance(key, int) and key < len(values)
        if is_index or (isinstance(values, dict) and key in values):
            values = values[key]
            keys.append(key)
        elif isinstance(values, dict) and number == len(location) - 1 and key != "[key]":
            keys.append(key)  # one that is missing
    return tuple(keys)


def _choices(expected: str) -> list[str]:
    """pydantic's `'full' or 'lora'` as a list."""
    return re.findall(r"'([^']*)'", expected)


def _model_of(keys: Keys) -> type[BaseModel]:
    return _PARTS[str(keys[0])] if keys else Run


def _field(keys: Keys) -> Any:
    names = [key for key in keys if isinstance(key, str)]
    return _model_of(keys[:-1] if len(names) > 1 else ()).model_fields[names[-1]]


# --- Words -----------------------------------------------------------------------------------------------


def _key(keys: Keys) -> str:
    return f"`{_plain('.'.join(map(str, keys)))}`" if keys else "the file"


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "empty"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    text = repr(value)
    return text if len(text) <= 60 else text[:45] + "..." + text[-10:]


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool)


def _plain(text: str) -> str:
    """One line that any terminal shows: line ends, control characters and broken Unicode are escaped."""
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in " ".join(text.split()))
    return line if len(line) <= 120 else line[:100] + "..." + line[-15:]


def _lower(text: str) -> str:
    """`Passes over` -> `passes over`, but `BOS` stays."""
    return text[:1].lower() + text[1:] if not text[1:2].isupper() else text


def _either(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _order(place: str) -> tuple[bool, int]:
    """File lines first, in order; then the rest."""
    line = re.search(r"line ([0-9]+)\Z", place)
    return (line is None, int(line[1]) if line else 0)
