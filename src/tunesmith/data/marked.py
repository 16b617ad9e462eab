"""Text that says which of its special tokens the data wrote, and its tokens: those are plain text, and only the chat
template's own are control tokens."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

MARK, ESCAPE = "\ufdd0", "\ufdd1"
"""Characters that no text has. A mark after the first character of a special token says that the data wrote it; where
the data hold a mark themselves, an escape follows it."""


class TextTokenizer:
    """A tokenizer for text that may be marked, and for text in the middle of another. Picklable."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.controls: re.Pattern[str] | None = None
        """Special tokens, as the data may write them out: they become plain text."""
        self.control_ids: set[int] = set()
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = False
        self._newline = self._backend.encode("\n", add_special_tokens=False).ids
        after_newline = self._backend.encode("\nx", add_special_tokens=False).ids[len(self._newline) :]
        # Tokenizers that put a space before every text (sentencepiece) must not do so where an answer continues.
        self._adds_prefix = after_newline != self._backend.encode("x", add_special_tokens=False).ids

    @property
    def _backend(self) -> Any:
        return self.tokenizer.backend_tokenizer

    def start(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens of text, which may be marked, and where they lie in it."""
        return self._with_plain_spans(text, self._start_clean) if MARK in text else self._start_clean(text)

    def _start_clean(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def resume(self, text: str, after: int | None = None) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens of text in the middle of another, which follows the special token `after`, if one is given."""
        if MARK in text:
            return self._with_plain_spans(text, lambda clean: self._continue_clean(clean, after))
        return self._continue_clean(text, after)

    def _continue_clean(self, text: str, after: int | None) -> tuple[list[int], list[tuple[int, int]]]:
        if not self._adds_prefix or not text:
            return self._start_clean(text)
        anchor = "\n" if after is None else self.tokenizer.convert_ids_to_tokens(after)
        anchor_ids = self._newline if after is None else [after]
        encoding = self._backend.encode(anchor + text, add_special_tokens=False)
        size = len(anchor_ids)
        if encoding.ids[:size] != anchor_ids:
            return self._start_clean(text)
        return encoding.ids[size:], [(max(s - len(anchor), 0), e - len(anchor)) for s, e in encoding.offsets[size:]]

    def _with_plain_spans(
        self, text: str, encode: Callable[[str], tuple[list[int], list[tuple[int, int]]]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens of marked text. First with letters in place of what is marked, which tells where the template's
        control tokens lie; then each stretch between these that has a mark again, as it is, with none in it."""
        clean, spans, removed = self._unmark(text)
        filled = clean
        for start, end in spans:
            filled = filled[:start] + "x" * (end - start) + filled[end:]
        ids, offsets = encode(filled)
        added = self.tokenizer.added_tokens_decoder
        made: list[int] = []
        places: list[tuple[int, int]] = []
        walls = [n for n, i in enumerate(ids) if i in added]
        for first, wall in zip([0, *(n + 1 for n in walls)], [*walls, len(ids)], strict=True):
            start = offsets[first - 1][1] if first else 0
            end = offsets[wall][0] if wall < len(ids) else len(clean)
            inside = [(s - start, e - start) for s, e in spans if start <= s < end]
            if inside:
                again, at = self._plain(clean[start:end], filled[start:end], ids[first:wall], inside)
                made += again
                places += [(start + s, start + e) for s, e in at]
            else:
                made += ids[first:wall]
                places += offsets[first:wall]
            made += ids[wall : wall + 1]
            places += offsets[wall : wall + 1]
        return made, [(s + bisect_left(removed, s), e + bisect_left(removed, e)) for s, e in places]

    def _plain(
        self, text: str, filled: str, before: list[int], spans: list[tuple[int, int]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens of text in which no special token is one, with a space before it or not, as `before` had it."""
        lead = ""
        if self._start_clean(filled)[0] != before:
            lead = "\n" if self._start_clean("\n" + filled)[0] == [*self._newline, *before] else ""
        ids, offsets = self._encode_plainly(text, lead)
        if not self.control_ids.intersection(ids):
            return ids, offsets
        ids, offsets, place = [], [], 0  # one that the tokenizer does not call special: only in two parts it is plain
        for end in (*(start + 1 for start, _ in spans), len(text)):
            more, at = self._encode_plainly(text[place:end], "\n" if place and self._adds_prefix else lead)
            ids, offsets, place = ids + more, offsets + [(s + place, e + place) for s, e in at], end
        return ids, offsets

    def _encode_plainly(self, text: str, lead: str) -> tuple[list[int], list[tuple[int, int]]]:
        backend = self._backend
        backend.encode_special_tokens = True
        try:
            encoding = backend.encode(lead + text, add_special_tokens=False)
        finally:
            backend.encode_special_tokens = False
        skipped = len(self._newline) if lead else 0
        return encoding.ids[skipped:], [(s - len(lead), e - len(lead)) for s, e in encoding.offsets[skipped:]]

    def _unmark(self, text: str) -> tuple[str, list[tuple[int, int]], list[int]]:
        """The text itself, where in it the data wrote special tokens, and where characters of ours were taken out."""
        parts, marks, removed = [], [], []
        size = place = 0
        for match in _MARKS.finditer(text):
            is_literal = match[0] != MARK
            parts.append(text[place : match.start() + is_literal])
            size += len(parts[-1])
            place = match.end()
            removed.append(size)
            marks += [] if is_literal else [size]
        clean = "".join((*parts, text[place:]))
        found = (self.controls.match(clean, mark - 1) if self.controls and mark else None for mark in marks)
        return clean, [match.span() for match in found if match], removed


def marked(value: Any, controls: re.Pattern[str] | None) -> Any:
    """The value with a mark in every special token that it writes out."""
    if isinstance(value, str):
        value = value.replace(MARK, MARK + ESCAPE) if MARK in value else value
        return controls.sub(lambda m: m[0][0] + MARK + m[0][1:], value) if controls else value
    if isinstance(value, dict):
        return {marked(k, controls): marked(v, controls) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(marked(one, controls) for one in value)
    return value


def clean(text: str) -> str:
    """Marked text as the data have it."""
    return _MARKS.sub(lambda match: MARK if match[0] != MARK else "", text) if MARK in text else text


def any_of(tokens: set[str]) -> re.Pattern[str] | None:
    """Matches the longest of them."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))) if tokens else None


_MARKS = re.compile(f"{MARK}{ESCAPE}?")
