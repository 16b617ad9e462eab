"""Records of prompts that the model itself will answer, with what its answers are checked by."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tunesmith.data.formats import PROMPTS, value_at
from tunesmith.data.messages import as_context, turns_of
from tunesmith.data.questions import asked_of
from tunesmith.data.turns import (
    system_turns,
    tools_of,
    user_turn,
)
from tunesmith.data.types import (
    Asked,
    Message,
    Origin,
    RecordError,
)
from tunesmith.data.values import (
    first_of,
    present,
)

if TYPE_CHECKING:
    from tunesmith.config.schema import Dataset

_ANSWERS = (
    "answer", "answers", "solution", "ground_truth", "final_answer", "target", "completion", "response", "output",
    "label",
)  # fmt: skip
_TESTS = ("tests", "test", "test_list", "test_cases", "unit_tests")


def convert_prompts(fields: dict[str, Any], origin: Origin, dataset: Dataset) -> Asked:
    """The prompt without an answer that it may end with, and all else that the record says, for those who check
    answers: among it an `answer` and `tests`, by whatever name."""
    names = (*PROMPTS, "problem")
    asked = asked_of(fields, origin, dataset, names)
    if asked is None:
        raise RecordError("missing value", origin, "the prompt is empty")
    messages, answered = _without_answer([user_turn(asked)] if isinstance(asked, str) else asked)
    used = {*names, "input", "context", "system", "system_prompt", "tools", "functions"}
    facts = answered | {name: value for name, value in fields.items() if name not in used}
    while messages and messages[-1].role == "assistant":  # a conversation with its answer, which is not shown
        facts = {"answer": messages[-1].content, **facts}
        messages = messages[:-1]
    if not any(message.role in ("user", "tool") for message in messages):
        raise RecordError("no question", origin, "the prompt has no user turn, so there is nothing to answer")
    for wanted, others in (("answer", _ANSWERS), ("tests", _TESTS)):
        value, _ = first_of(facts, wanted, *others)
        if present(value) is not None:
            facts[wanted] = value
    if "answer" not in facts and (inner := value_at(facts, "reward_model.ground_truth")):  # as verl has it
        facts["answer"] = inner[0]
    if isinstance(facts.get("answer"), dict):  # {"text": [...]} of SQuAD
        facts["answer"] = facts["answer"].get("text")
    messages = [*system_turns(fields, messages, origin), *messages]
    return Asked(tuple(as_context(messages)), tools_of(fields, origin), facts)


def _without_answer(messages: list[Message]) -> tuple[list[Message], dict[str, str]]:
    """The messages with a question that is a dialogue in one text up to its last answer, and that answer."""
    *before, asked = messages
    turns = (
        turns_of(asked.content)
        if asked.role == "user" and all(message.role == "system" for message in before)
        else None
    )
    if not turns or turns[-1].role == "user" or not turns[-1].content:
        return messages, {}
    end = asked.content.rindex("\n\nAssistant:") + len("\n\nAssistant:")
    return [*before, replace(asked, content=asked.content[:end])], {"answer": turns[-1].content}
