"""Writes tests/evaluate/lm_eval.json: what lm-eval makes of the tiny model and of some answers, for tests without it.

python tests/lm_eval_oracle.py      with lm-eval 0.4.13 installed
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
FILE = Path(__file__).parent / "evaluate" / "lm_eval.json"
NUMBERS = ("72", "-5", "1,000", "3.50", "$18", "18.", "0", "12/4", "7 8", "")
FORMS = (
    "So the answer is {n}.\n#### {n}", "#### {n}", "####{n}", "#### {n} apples", "It is {n}", "{n}",
    "She has 3 and then {n} left", "#### 9\nNo, #### {n}", "= {n} dollars.", "The total is ${n}.00", "#### ${n}",
    "nothing at all",
)  # fmt: skip
FORMULAS = (
    "\\frac{1}{2}", "\\frac12", "1/2", "0.5", ".5", "\\dfrac{1}{2}", "x=5", "5", "5\\%", "5 \\text{ cm}", "\\sqrt2",
    "\\sqrt{2}", "90^\\circ", "90", "\\left(1,2\\right)", "(1,2)", "2\\!3", "\\$5", "\\frac1{72}", "k = 7", "",
    "3/04", "-3/4", "{.5}", "\\tfrac34",
)  # fmt: skip
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "RED",
    "mat",
    "and",
    "said:",
    "hello",
    "there,",
    "DOG.",
    "Why",
    "not?",
    "Section",
    "1",
    "we",
    "[name]",
    "*run*",
    "**far**",
    "far",
]


def records() -> list[dict[str, Any]]:
    """Questions of varied length, with choices of one token and of many."""
    chance = random.Random(5)

    def text(most: int) -> str:
        return " ".join(chance.choices(WORDS, k=chance.randint(1, most)))

    made: list[dict[str, Any]] = [
        {
            "question": text(12),
            "choices": [text(5) for _ in range(chance.randint(2, 5))],
            "answer": 0,
            "subject": "odd_things",
        }
        for _ in range(14)
    ]
    made.append({"question": "ends in spaces  ", "choices": ["a", "bb", "naïve – ☃"], "answer": "C"})
    made.append({"question": "long " * 150, "choices": ["x", "y z"], "answer": "y z"})
    return made


def answered() -> list[str]:
    """Answers to be checked, from words, marks and lines."""
    chance = random.Random(6)
    parts = [*WORDS, "\n", "\n\n", "* one\n", "- two\n", "***", "******", "<<title>>", "P.S. more", "keyword", ","]
    made = [" ".join(chance.choices(parts, k=chance.randint(1, 40))) for _ in range(60)]
    return [*made, '{"a": 1}', '```json\n{"a": [1]}\n```', '"quoted"', "ALL CAPS HERE", "all small here", "  "]


INSTRUCTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("keywords:existence", {"keywords": ["cat", "keyword"]}),
    ("keywords:frequency", {"keyword": "far", "frequency": 2, "relation": "at least"}),
    ("keywords:forbidden_words", {"forbidden_words": ["mat", "two"]}),
    ("keywords:letter_frequency", {"letter": "e", "let_frequency": 6, "let_relation": "less than"}),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}),
    ("length_constraints:number_words", {"num_words": 20, "relation": "at least"}),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "the"},
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 1}),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}),
    ("detectable_format:constrained_response", {}),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 1}),
    ("detectable_format:json_format", {}),
    ("detectable_format:title", {}),
    ("combination:two_responses", {}),
    ("combination:repeat_prompt", {"prompt_to_repeat": "The cat"}),
    ("startend:end_checker", {"end_phrase": "Why not?"}),
    ("startend:quotation", {}),
    ("punctuation:no_comma", {}),
)


def gsm8k_cases() -> list[tuple[str, str]]:
    return [(form.format(n=number), f"Some steps.\n#### {wanted}") for number in NUMBERS for form in FORMS
            for wanted in ("18", "1000")][:200]  # fmt: skip


def main() -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.api.metrics import exact_match_hf_evaluate
    from lm_eval.filters.extraction import RegexFilter
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks.hendrycks_math.utils import is_equiv
    from lm_eval.tasks.ifeval import utils as ifeval
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tiny_model import make_tiny_model

    folder = make_tiny_model(Path(tempfile.mkdtemp()) / "tiny")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
    likelihoods = []
    for record in records():
        context = f"Question: {record['question'].strip()}\nAnswer:"
        asked = [Instance("loglikelihood", {}, (context, f" {one}"), k) for k, one in enumerate(record["choices"])]
        likelihoods.append([value for value, _ in harness.loglikelihood(asked, disable_tqdm=True)])

    filters = {
        "strict": RegexFilter("#### (\\-?[0-9\\.\\,]+)", 0),
        "flexible": RegexFilter("(-?[$0-9.,]{2,})|(-?[0-9]+)", -1),
    }
    ignored = [",", "\\$", "(?s).*#### ", "\\.$"]

    def gsm8k(answer: str, reference: str, name: str) -> int:
        taken = filters[name].apply([[answer]], [{}])[0][0]
        found = exact_match_hf_evaluate([taken], [reference], regexes_to_ignore=ignored, ignore_case=True)
        return int(found["exact_match"])

    checked = []
    for answer in answered():
        row = []
        for name, options in INSTRUCTIONS:
            example = ifeval.InputExample(0, [name], "", [options])
            strict = ifeval.test_instruction_following_strict(example, answer)
            loose = ifeval.test_instruction_following_loose(example, answer)
            row.append([int(strict.follow_all_instructions), int(loose.follow_all_instructions)])
        checked.append(row)
    content = {
        "likelihoods": likelihoods,
        "gsm8k": [[gsm8k(*case, name) for name in filters] for case in gsm8k_cases()],
        "math": [[int(is_equiv(a, b)) for b in FORMULAS] for a in FORMULAS],
        "instructions": checked,
    }
    FILE.write_text(json.dumps(content).replace("], [", "],\n [") + "\n")


if __name__ == "__main__":
    main()
