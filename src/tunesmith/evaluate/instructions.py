"""Instructions whose following a program can check: IFEval's, by their published names and options.

`follows` says of each instruction whether an answer follows it; strictly, or loosely: also where it would without its
first or last line (a greeting, a remark) or its asterisks. Two things differ from IFEval's own program: sentences are
counted by rules in place of nltk's trained model, and the instructions about capital letters look at the letters alone.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tunesmith.errors import listed


@dataclass(frozen=True)
class Instruction:
    """An instruction as a record names it."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


def problem_of(given: Instruction) -> str | None:
    """Why an instruction cannot be checked, in words; None where it can."""
    check = CHECKS.get(given.name)
    if check is None:
        return f"the instruction {given.name} is not known here; known are {listed(CHECKS, most=len(CHECKS))}"
    if given.name == "language:response_language" and importlib.util.find_spec("langdetect") is None:
        return f"{given.name} needs the package langdetect (`pip install langdetect`)"
    wanted = {name for name in inspect.signature(check).parameters if name != "text"}
    if wanted - given.options.keys():
        return f"{given.name} lacks {listed(f'`{name}`' for name in sorted(wanted - given.options.keys()))} in `kwargs`"
    for name in wanted:
        value = given.options[name]
        kind = KINDS.get(name, str)
        is_kind = isinstance(value, kind) and not isinstance(value, bool)
        if not is_kind or (kind is list and not all(isinstance(one, str) for one in value)):
            return f"{given.name}: `{name}` is {json.dumps(value, default=str)[:60]}, which is no {WORDS[kind]}"
        if name in RELATIONS and value not in ("less than", "at least"):
            return f"{given.name}: `{name}` is {value!r}; it must be `less than` or `at least`"
    return None


def follows(given: Sequence[Instruction], answer: str) -> list[bool]:
    return [_follows(one, answer) for one in given]


def follows_loosely(given: Sequence[Instruction], answer: str) -> list[bool]:
    lines = answer.split("\n")
    cut = [answer, *("\n".join(some).strip() for some in (lines[1:], lines[:-1], lines[1:-1]))]
    forms = [*cut, *(form.replace("*", "") for form in cut)]
    return [any(_follows(one, form) for form in forms) for one in given]


def _follows(one: Instruction, answer: str) -> bool:
    if not answer.strip():
        return False
    check = CHECKS[one.name]
    wanted = inspect.signature(check).parameters
    return bool(check(answer, **{name: value for name, value in one.options.items() if name in wanted}))


def _compare(count: int, relation: str, wanted: float) -> bool:
    return count < wanted if relation == "less than" else count >= wanted


# One function an instruction; their options have IFEval's names


def _existence(text: str, keywords: list[str]) -> bool:
    return all(re.search(re.escape(word), text, re.IGNORECASE) for word in keywords)


def _frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return _compare(len(re.findall(re.escape(keyword.strip()), text, re.IGNORECASE)), relation, frequency)


def _forbidden(text: str, forbidden_words: list[str]) -> bool:
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def _letters(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compare(text.lower().count(letter.strip().lower()), let_relation, let_frequency)


def _language(text: str, language: str) -> bool:
    import langdetect

    langdetect.DetectorFactory.seed = 0
    try:
        return langdetect.detect(text) == language
    except langdetect.LangDetectException:  # no letters; IFEval counts it as followed
        return True


def _sentences(text: str, num_sentences: int, relation: str) -> bool:
    return _compare(count_sentences(text), relation, num_sentences)


def _paragraphs(text: str, num_paragraphs: int) -> bool:
    parts = re.split(r"\s?\*\*\*\s?", text)
    if any(not part.strip() for part in parts[1:-1]):
        return False
    ends = {0, len(parts) - 1}
    return len(parts) - sum(not parts[place].strip() for place in ends) == num_paragraphs


def _words(text: str, num_words: int, relation: str) -> bool:
    return _compare(len(re.findall(r"\w+", text)), relation, num_words)


def _nth_paragraph(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = text.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    if not 1 <= nth_paragraph <= count or not parts[nth_paragraph - 1].strip():
        return False
    word = parts[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    found = re.split(r"[.,?!'\"]", word, maxsplit=1)[0].lower()
    return count == num_paragraphs and found == first_word.strip().lower()


def _placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[.*?\]", text)) >= num_placeholders


def _postscript(text: str, postscript_marker: str) -> bool:
    known = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    pattern = known.get(postscript_marker.strip(), re.escape(postscript_marker.strip().lower()))
    return re.search(pattern, text.lower()) is not None


def _bullets(text: str, num_bullets: int) -> bool:
    starred = re.findall(r"^\s*\*[^\*].*$", text, re.MULTILINE)
    return len(starred) + len(re.findall(r"^\s*-.*$", text, re.MULTILINE)) == num_bullets


def _constrained(text: str) -> bool:
    return any(f"My answer is {one}." in text for one in ("yes", "no", "maybe"))


def _highlights(text: str, num_highlights: int) -> bool:
    single = [one for one in re.findall(r"\*[^\n\*]*\*", text) if one.strip("*").strip()]
    double = [one for one in re.findall(r"\*\*[^\n\*]*\*\*", text) if one[2:-2].strip()]
    return len(single) + len(double) >= num_highlights


def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.split(rf"\s?{re.escape(section_spliter.strip())}\s?\d+\s?", text)) - 1 >= num_sections


def _json(text: str) -> bool:
    inner = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        inner = inner.removeprefix(fence)
    try:
        json.loads(inner.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str) -> bool:
    return any(one.lstrip("<").rstrip(">").strip() for one in re.findall(r"<<[^\n]+>>", text))


def _two_responses(text: str) -> bool:
    parts = text.split("******")
    if any(not part.strip() for part in parts[1:-1]):
        return False
    said = [part.strip() for part in parts if part.strip()]
    return len(said) == 2 and said[0] != said[1]


def _repeat(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _end(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    words = [word.strip("'’.&/-") for word in re.findall(r"[\w'’.&/-]+", text)]
    return _compare(sum(word.isupper() for word in words), capital_relation, capital_frequency)


def _capital(text: str) -> bool:
    return text.isupper()


def _lowercase(text: str) -> bool:
    return text.islower()


def _no_comma(text: str) -> bool:
    return "," not in text


def _quotation(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


CHECKS: dict[str, Callable[..., bool]] = {
    "keywords:existence": _existence,
    "keywords:frequency": _frequency,
    "keywords:forbidden_words": _forbidden,
    "keywords:letter_frequency": _letters,
    "language:response_language": _language,
    "length_constraints:number_sentences": _sentences,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": _words,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": _constrained,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeat,
    "startend:end_checker": _end,
    "startend:quotation": _quotation,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": _capital,
    "change_case:english_lowercase": _lowercase,
    "punctuation:no_comma": _no_comma,
}
KINDS: dict[str, type] = {
    **dict.fromkeys(("keywords", "forbidden_words"), list),
    **dict.fromkeys(
        (
            "frequency", "let_frequency", "num_sentences", "num_paragraphs", "num_words", "nth_paragraph",
            "num_placeholders", "num_bullets", "num_highlights", "num_sections", "capital_frequency",
        ),
        int,
    ),
}  # fmt: skip
"""Types of instructions' options; those that are not here are texts."""
WORDS: dict[type, str] = {list: "list of texts", int: "whole number", str: "text"}
RELATIONS = ("relation", "let_relation", "capital_relation")

_ABBREVIATIONS = frozenset(
    [
        "mr",
        "mrs",
        "ms",
        "dr",
        "prof",
        "sr",
        "jr",
        "st",
        "rev",
        "gen",
        "col",
        "sgt",
        "capt",
        "lt",
        "inc",
        "ltd",
        "co",
        "corp",
        "vs",
        "etc",
        "e.g",
        "i.e",
        "cf",
        "al",
        "approx",
        "dept",
        "est",
        "fig",
        "vol",
        "no",
        "jan",
        "feb",
        "mar",
        "apr",
        "jun",
        "jul",
        "aug",
        "sep",
        "sept",
        "oct",
        "nov",
        "dec",
        "mt",
        "ave",
        "blvd",
        "u.s",
        "u.k",
        "ph.d",
        "a.m",
        "p.m",
    ]
)
_END = re.compile(r"([.!?]+|…|[。！？])(['\"”’)\]]*)(?=\s|$|(?<=[。！？]))")


def count_sentences(text: str) -> int:
    """Ends of sentences are marks followed by a space and a beginning; not those of abbreviations and initials."""
    count, start = 0, 0
    for match in _END.finditer(text):
        before = text[start : match.start()].split()
        word = before[-1].lower().lstrip("(['\"“‘") if before else ""
        after = text[match.end() :].lstrip()
        if match[1] == ".":
            is_initial = len(word) == 1 and word.isalpha() and before[-1].isupper()
            if (word in _ABBREVIATIONS or is_initial or after[:1].islower()) and after:
                continue
            line = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
            if line.strip().isdecimal() and after:  # the number of a list
                continue
        if text[start : match.start()].strip():
            count += 1
        start = match.end()
    return count + bool(re.search(r"\w", text[start:]))
