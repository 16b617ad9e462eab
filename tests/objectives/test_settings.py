"""What does not go together is said in a sentence, before anything is loaded."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from plan.shapes import task
from tunesmith.config.load import from_mapping
from tunesmith.config.schema import Preference
from tunesmith.errors import UserError
from tunesmith.objectives import OBJECTIVES, objective_of
from tunesmith.plan import refusals
from tunesmith.plan.choice import Choice
from tunesmith.plan.speed import step_time

GOOD = {"model": "m", "data": "d.jsonl", "objective": "dpo"}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"objective": "sft", "preference": {"beta": 0.2}}, "`objective: sft` has no use for preference.beta"),
        ({"objective": "embed", "chat_template": "x.jinja"}, "chat_template: `objective: embed` reads texts as the"),
        ({"objective": "kto", "preference": {"margin": 2}}, "`objective: kto` has no use for preference.margin"),
        ({"objective": "cpo", "preference": {"loss": "robust"}}, "loss robust is for `objective: dpo`"),
        ({"preference": {"loss": "robust"}}, "robust needs label_smoothing"),
        ({"preference": {"loss": "ipo", "label_smoothing": 0.1}}, "label_smoothing is for the sigmoid and robust"),
        ({"preference": {"loss": "hinge", "length_normalised": True}}, "length_normalised is for the sigmoid loss"),
        ({"preference": {"label_smoothing": 0.5}}, "is 0.5 but needs to be less than 0.5"),
        ({"preference": {"betta": 1}}, "did you mean `preference.beta`"),
        ({"train_on": "all"}, "leave train_on out"),
        ({"z_loss": 1e-4}, "z_loss is for `objective: sft`"),
        ({"neftune_noise_alpha": 5}, "neftune_noise_alpha is for `objective: sft`"),
        ({"too_long": "split"}, "needs answers in one piece"),
        ({"objective": "dop"}, "did you mean `dpo`"),
        ({"objective": "grpo"}, "needs at least one, such as `rewards: [exact]`"),
        ({"rewards": "exact"}, "rollout and rewards are for `objective: grpo` and `rloo`"),
        ({"objective": "grpo", "rewards": "exat"}, "did you mean `exact`"),
        ({"objective": "grpo", "rewards": [{"kind": "regex"}]}, "kind regex needs `pattern`"),
        ({"objective": "grpo", "rewards": [{"kind": "regex", "pattern": "("}]}, "no regular expression"),
        ({"objective": "grpo", "rewards": ["exact", "exact"]}, "two of them are called exact"),
        ({"objective": "grpo", "rewards": "exact", "rollout": {"answers": 1}}, "at least 2"),
        ({"objective": "rloo", "rewards": "exact", "rollout": {"loss": "grpo"}}, "rloo has one loss"),
        (
            {"objective": "grpo", "rewards": "exact", "rollout": {"beta": 0.1}, "method": "full"},
            "the model with its adapter switched off",
        ),
        ({"objective": "grpo", "rewards": "exact", "sequence_length": 256}, "leaves no room for a prompt"),
    ],
)
def test_settings_that_do_not_suit_the_objective_are_refused(changes, why):
    with pytest.raises(UserError) as found:
        from_mapping(GOOD | changes)
    assert why in str(found.value)


def test_settings_read_back_from_a_run_are_taken():
    run = from_mapping(GOOD)
    assert from_mapping(run.model_dump(mode="json")) == run


def test_an_objective_of_its_own_is_for_every_name():
    for name in OBJECTIVES:
        more = {"distillation": {"teacher": "t"}} if name == "distill" else {}
        more |= {"labels": ["a", "b"]} if name in ("classify", "classify_tokens") else {}
        more |= {"rewards": "exact"} if name in ("grpo", "rloo") else {}
        assert objective_of(from_mapping(GOOD | {"objective": name} | more)).name == name


@pytest.mark.parametrize(
    "choice",
    [
        Choice(tensor=2),
        Choice(shard=2, sharding="zero3"),
        Choice(offload_parameters=True),
    ],
)
def test_what_rollouts_cannot_have_is_refused(choice):
    sft = task("Llama-3.1-8B", "4xH100", "lora", 4096, 16)
    grpo = replace(sft, objective=OBJECTIVES["grpo"](Preference()))
    assert "objectives with rollouts" not in (refusals.refused(sft, choice) or "")
    assert "objectives with rollouts" in (refusals.refused(grpo, choice) or "")
    assert "objectives with rollouts" not in (refusals.refused(grpo, Choice(replicate=4, sharding="ddp")) or "")


def test_the_planner_counts_answers():
    from tunesmith.plan import memory

    sft = task("Llama-3.1-8B", "1xH100", "lora", 4096, 16)
    grpo = replace(sft, objective=OBJECTIVES["grpo"](Preference()))
    assert step_time(grpo, Choice()).total > 1.1 * step_time(sft, Choice()).total
    (rollout,) = (one for one in memory.timeline(grpo, Choice()) if one.name == "rollout")
    cached = 2 * 8 * 128 * 32 * 2 * 64 * min(4096, 256 + grpo.document_length)  # 64 answers, keys and values in bf16
    assert rollout.memory.activations >= cached


@pytest.mark.parametrize("axis", ["context", "pipeline"])
def test_what_cuts_answers_up_is_refused(axis):
    sft = task("Llama-3.1-8B", "4xH100", "lora", 4096, 16)
    choice = Choice(**{axis: 2, "replicate": 2, "sharding": "ddp"})
    dpo = replace(sft, objective=OBJECTIVES["dpo"](Preference()))
    said = "compare whole answers, which context and pipeline parallelism cut up"
    assert said not in (refusals.refused(sft, choice) or "")
    assert said in (refusals.refused(dpo, choice) or "")


def test_the_planner_counts_the_forward_pass_of_a_baseline():
    sft = task("Llama-3.1-8B", "1xH100", "lora", 4096, 16)
    kto, dpo = (replace(sft, objective=OBJECTIVES[name](Preference())) for name in ("kto", "dpo"))
    seconds = [step_time(one, Choice()).total for one in (sft, dpo, kto)]
    assert seconds[0] == seconds[1]
    assert 1.2 * seconds[0] < seconds[2] < 1.6 * seconds[0]


DOCS = Path(__file__).parents[2] / "docs" / "objectives.md"


def test_every_objective_has_a_section_with_a_whole_run_that_loads():
    sections = re.split(r"^## ", DOCS.read_text(), flags=re.M)
    for name in OBJECTIVES:
        (section,) = (one for one in sections if one.startswith(f"{name}\n"))
        written = re.findall(r"```yaml\n(.*?)```", section, re.S)
        assert written
        for one in written:
            assert from_mapping(yaml.safe_load(one)).objective == name
