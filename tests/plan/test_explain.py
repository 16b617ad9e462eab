"""Alternatives, changes that make a run fit, the largest that fits: all by the planner's own numbers."""

from __future__ import annotations

import pytest

from tunesmith.errors import UserError
from tunesmith.plan import explain
from tunesmith.plan.hardware import named
from tunesmith.plan.search import search

from .shapes import MODEL, run

EIGHT = MODEL["Llama-3.1-8B"]


def by_name(found) -> dict[str, explain.Alternative]:
    return {row.what: row for row in explain.alternatives(found)}


def test_fp8_is_offered_and_explained_on_an_h200():
    found = search(run(sequence_length=4096, batch_tokens=65536), EIGHT, named("H200"))
    fp8 = by_name(found)["precision: fp8"]
    assert fp8.tokens_per_second > 1.2 * found.plan.tokens_per_second
    assert "rounded to 8 bits" in fp8.remark
    assert "times as fast" in fp8.remark


def test_fp8_is_not_offered_where_there_is_none():
    assert "precision: fp8" not in by_name(search(run(), EIGHT, named("A100-80G")))


def test_layer_inputs_in_host_memory_are_offered_and_need_less():
    found = search(run(sequence_length=8192, batch_tokens=16384), EIGHT, named("RTX 4090"))
    assert not found.plan.offload_activations
    row = by_name(found)["layer inputs in host memory"]
    assert row.bytes < found.plan.memory.total
    assert "less" in row.remark


def test_alternatives_cost_what_their_own_plan_would_say():
    found = search(run(), EIGHT, named("H200"))
    row = by_name(found)["checkpoint all layers"]
    own = search(
        run(), EIGHT, named("H200"), pins={"checkpointed_layers": 32, "micro_batch": found.plan.micro_batch}
    ).plan
    assert row.bytes == own.memory.total
    assert row.tokens_per_second == pytest.approx(own.tokens_per_second)
    assert "slower" in row.remark
    assert "less" in row.remark


def test_what_recorded_passes_bring_is_shown_and_no_alternative_is_lost_by_them():
    smol = MODEL["SmolLM2-135M"]
    found = search(run(method="full"), smol, named("H200"))
    assert found.plan.cuda_graphs
    rows = by_name(found)
    off = search(run(method="full"), smol, named("H200"), pins={"cuda_graphs": False, "micro_batch": 8}).plan
    assert rows["passes not captured"].bytes == off.memory.total
    assert rows["passes not captured"].tokens_per_second == pytest.approx(off.tokens_per_second)
    assert {"micro-batch 4", "optimizer in host memory"} <= rows.keys()  # in which passes cannot be captured
    assert not any("recorded" in what for what in by_name(search(run(), EIGHT, named("H200"))))


def test_what_does_not_fit_comes_with_changes_that_do():
    changes = explain.changes_that_fit(run(method="full"), EIGHT, named("RTX 4090"))
    assert any(change.startswith("method: lora") for change in changes)
    assert any("x RTX 4090" in change for change in changes)


def test_a_sequence_that_is_too_long_is_halved_until_it_fits():
    wanted = run(sequence_length=524288, batch_tokens=524288)
    assert not search(wanted, EIGHT, named("RTX 4090")).plan.fits
    assert explain.changes_that_fit(wanted, EIGHT, named("RTX 4090"))[0].startswith("sequence_length: 131072")


@pytest.mark.parametrize("what", explain.SOLVABLE)
def test_every_question_has_an_answer(what):
    assert "fit" in explain.solve(what, run(), EIGHT, named("H200")) or what == "gpus"


def test_the_longest_sequence_fits_and_a_longer_one_does_not():
    answer = explain.solve("sequence_length", run(), EIGHT, named("RTX 4090"))
    longest = int(answer.split(" tokens")[0].rsplit(" ", 1)[1].replace(",", ""))

    def fits(length: int) -> bool:
        wanted = run(sequence_length=length, batch_tokens=max(16384, length))
        return search(wanted, EIGHT, named("RTX 4090")).plan.fits

    assert fits(longest)
    assert not fits(longest + 256)


def test_the_fewest_gpus_are_the_fewest():
    wanted = run(method="full", batch_tokens=65536)
    for model, count in (("Llama-3.1-70B", 4), ("Falcon-40B", 2)):
        answer = explain.solve("gpus", wanted, MODEL[model], named("H200"))
        assert f"{count} x H200" in answer
        assert search(wanted, MODEL[model], named(f"{count} x H200")).plan.fits
        assert not search(wanted, MODEL[model], named(f"{count // 2} x H200")).plan.fits


def test_unknown_questions_are_a_sentence():
    with pytest.raises(UserError, match="sequence_length"):
        explain.solve("everything", run(), EIGHT, named("H200"))
    with pytest.raises(UserError, match="name the kind"):
        explain.solve("gpus", run(), EIGHT, named("H200").changed(gpus=(), is_named=False))


def test_what_if_knows_settings_parts_of_the_plan_and_hardware():
    settings, pins, hardware = explain.apart(
        {"sequence_length": "512", "micro_batch": "2", "offload_optimizer": "host", "storage": "nf4", "hardware": "T4"}
    )
    assert settings == ["sequence_length=512"]
    assert pins == {"micro_batch": 2, "offload_optimizer": "host", "storage": "nf4"}
    assert hardware == "T4"
    for wrong in ({"micro_batch": "two"}, {"offload_optimizer": "maybe"}):
        with pytest.raises(UserError, match="--what-if"):
            explain.apart(wrong)
