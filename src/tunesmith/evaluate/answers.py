"""Answers in words against a reference: how they are asked for, what of them counts, and when two are the same.

The rules are the published ones: GSM8K's (`#### N`, or the last number) and MATH's (what is boxed, equal after
normalisation), both as lm-eval has them; and `exact` for any other question: the same text but for case, articles,
punctuation and spaces.
"""

from __future__ import annotations

import re
import string
from typing import Any

from tunesmith.evaluate import instructions
from tunesmith.evaluate.tasks import Question, Task

STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
STOPS = ("Question:", "Problem:")
"""Texts with which a model without a chat template goes on with a question of its own, and is stopped."""


def plain_prompt(task: Task, question: str) -> str:
    """The prompt of a question for a model without a chat template."""
    if task.kind == "answers":
        return f"{'Problem' if task.rule == 'math' else 'Question'}: {question}\nAnswer:"
    return f"{question}\n"


def score(task: Task, question: Question, answer: str) -> dict[str, Any]:
    """What is kept of an answer: the answer itself, and 1 or 0 by each measure."""
    if task.kind == "samples":
        return {"answer": answer}
    if task.kind == "instructions":
        strict = instructions.follows(question.target, answer)
        loose = instructions.follows_loosely(question.target, answer)
        return {
            "answer": answer,
            "strict": int(all(strict)),
            "loose": int(all(loose)),
            "followed": sum(strict),
            "followed_loosely": sum(loose),
            "instructions": len(strict),
        }
    references = question.target if isinstance(question.target, tuple) else (question.target,)
    if task.rule == "gsm8k":
        each = [gsm8k(answer, one) for one in references]
        return {"answer": answer, **{name: int(any(one[name] for one in each)) for name in each[0]}}
    is_right = is_equivalent if task.rule == "math" else is_same
    return {"answer": answer, "exact": int(any(is_right(answer, one) for one in references))}


# GSM8K


def gsm8k(answer: str, reference: str) -> dict[str, bool]:
    """Whether the number after `####`, and the last number at all, is the reference's."""
    wanted = _cleaned(reference)
    strict = STRICT.findall(answer)
    flexible = FLEXIBLE.findall(answer)
    last = next((part for part in flexible[-1] if part), "") if flexible else ""
    return {
        "strict": bool(strict) and _cleaned(strict[0]) == wanted,
        "flexible": bool(last) and _cleaned(last) == wanted,
    }


def _cleaned(text: str) -> str:
    for pattern in (",", r"\$", r"(?s).*#### ", r"\.$"):
        text = re.sub(pattern, "", text)
    return text.lower().strip()


# MATH


def is_equivalent(answer: str, reference: str) -> bool:
    """Whether the answer's result, what it boxes or else what stands between its dollar signs, equals the reference's
    (what that boxes, or all of it) by MATH's rules."""
    wanted = boxed(reference)
    if wanted is None:
        wanted = reference
    found = boxed(answer)
    if found is None:
        places = [place for place, char in enumerate(answer) if char == "$"]
        found = answer[places[0] + 1 : places[-1]] if len(places) > 1 else answer
    return normalised(found) == normalised(wanted)


def boxed(text: str) -> str | None:
    """What the last \\boxed or \\fbox holds."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].removeprefix("\\boxed").removeprefix("\\fbox")
    if not rest.startswith("{"):
        return rest.split("$")[0].strip() or None
    depth = 0
    for place, char in enumerate(rest):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return rest[1:place]
    return None


def normalised(text: str) -> str:
    """MATH's own: units, degrees, dollar signs and spaces away; fractions and roots in one form."""
    for old, new in (
        ("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""), ("\\right", ""),
        ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", ""),
    ):  # fmt: skip
        text = text.replace(old, new)
    if "\\text{ " in text:  # units, on the right
        text = text.split("\\text{ ")[0]
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    if text[0] == ".":
        text = "0" + text
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:
        text = sides[1]
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", "")
    text = _with_braces(text)
    if text == "0.5":
        return "\\frac{1}{2}"
    if match := re.fullmatch(r"(-?\d+)/(-?\d+)", text):
        numerator, denominator = int(match[1]), int(match[2])
        if text == f"{numerator}/{denominator}":
            return f"\\frac{{{numerator}}}{{{denominator}}}"
    return text


def _with_braces(text: str) -> str:
    """\\frac1b and \\frac12 as \\frac{1}{b} and \\frac{1}{2}."""
    first, *parts = text.split("\\frac")
    made = first
    for part in parts:
        if part.startswith("{"):
            made += "\\frac" + part
        elif len(part) < 2:
            return text
        elif part[1] == "{":
            made += f"\\frac{{{part[0]}}}{part[1:]}"
        else:
            made += f"\\frac{{{part[0]}}}{{{part[1]}}}{part[2:]}"
    return made


# Any other question


def is_same(answer: str, reference: str) -> bool:
    return _plain(answer) == _plain(reference)


def _plain(text: str) -> str:
    """The text as SQuAD compares it: in lower case, without articles, punctuation and spaces around."""
    text = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())
