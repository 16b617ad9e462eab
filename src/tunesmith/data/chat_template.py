"""A model's chat template: read from a file or the tokenizer, and the text that it writes for messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tunesmith.data import template as templates
from tunesmith.data import traits
from tunesmith.disk import expanded
from tunesmith.errors import UserError


class ChatTemplate:
    """The templates of a tokenizer or a file, one for each use, with the variables that they are given."""

    def __init__(self, source: str | dict[str, str] | None, owner: str, variables: dict[str, Any]):
        self.by_use = _by_use(source, owner)
        self.variables = variables
        self.writes_date = any("strftime_now" in text for text in self.by_use.values())
        self.marks_answers = any("endgeneration" in text for text in self.by_use.values())
        """It says itself which characters are generated, with {% generation %}."""
        self.wants_parts = False
        """It takes lists of parts, not texts."""
        if self.by_use:
            self.wants_parts = traits.wants_parts(self.render)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        generation: bool = False,
        mode: dict[str, Any] | None = None,
    ) -> str:
        """The text for these messages, in a `mode` of the template's variables. Raises TemplateRefusal."""
        return self.render_marked(messages, tools, generation, mode)[0]

    def render_marked(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        generation: bool = False,
        mode: dict[str, Any] | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the places in it that the template itself marks as generated."""
        use = "tool_use" if tools and "tool_use" in self.by_use else "default"
        variables = {**self.variables, **(mode or {})}
        return templates.render(self.by_use[use], self.as_wanted(messages), list(tools) or None, generation, variables)

    def as_wanted(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with contents in the form that the template writes."""
        if not self.wants_parts:
            return messages
        return [
            {**message, "content": traits.as_parts(message["content"])}
            if isinstance(message.get("content"), str)
            else message
            for message in messages
        ]

    def is_parsed(self, token: str) -> bool:
        """Whether the template looks for the token in what it is given (`</think>`)."""
        return any(token in looked for text in self.by_use.values() for looked in templates.parsed(text))


def read_template(path: str) -> str | dict[str, str]:
    """The chat template in a file (`chat_template:` of the run), for `chat.Encoder(template=...)`: Jinja, or JSON as in
    tokenizer_config.json, whatever the file is called. No template is valid JSON, so the two cannot be mixed up."""
    try:
        text = expanded(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise UserError(f"chat_template: {path} cannot be read ({reason}).") from error
    try:
        template = _in_json(json.loads(text))
    except (ValueError, RecursionError) as error:
        template = text
        if path.endswith(".json"):
            raise UserError(f"chat_template: {path} is not valid JSON: {error}.") from error
    if template is None:
        raise UserError(f"chat_template: {path} is JSON without a text `chat_template`.")
    if not all(use.strip() for use in ([template] if isinstance(template, str) else template.values())):
        raise UserError(f"chat_template: {path} holds no template.")
    return template


def _in_json(content: Any) -> str | dict[str, str] | None:
    """The template, or one for each use, that JSON holds: itself, in an object with `chat_template`, or in a list of
    objects with `name` and `template`; None where it holds none."""
    if isinstance(content, dict):
        content = content.get("chat_template")
    if isinstance(content, str):
        return content
    try:
        named = {entry["name"]: entry["template"] for entry in content}
    except (TypeError, KeyError):
        return None
    is_whole = named and all(isinstance(text, str) for pair in named.items() for text in pair)
    return named if is_whole else None


def _by_use(source: str | dict[str, str] | None, owner: str) -> dict[str, str]:
    """The templates by their use; one for everything is called `default`."""
    by_use = source if isinstance(source, dict) else {"default": source} if source else {}
    if by_use and "default" not in by_use:
        named = ", ".join(f"`{name}`" for name in sorted(by_use))
        raise UserError(
            f"the {owner} has chat templates for special uses alone ({named}), none of them `default`; "
            "give the one that is meant as a file by `chat_template:`."
        )
    return by_use
