"""What a page shows of evaluations: from a run's own file, whatever is in it."""

from __future__ import annotations

import json

import pytest

from tiny import write_all
from tunesmith.run.branch import branch
from tunesmith.train import samples
from tunesmith.train.samples import SampleLog
from tunesmith.ui.report import report
from tunesmith.ui.samples import read_tokenizer, shown


@pytest.fixture(scope="module")
def run(runs, tiny_model, tmp_path_factory):
    """A run with three evaluations, of held-out records and of prompts."""
    folder = tmp_path_factory.mktemp("samples")
    asked = [{"path": "held_out.jsonl"}, {"path": "prompts.jsonl", "format": "samples"}]
    write_all(folder, tiny_model, eval=asked, lora={"rank": 4}, steps=4, eval_every=2, save_every=2, keep=4)
    (folder / "prompts.jsonl").write_text('{"prompt": "Who are you?"}\n{"prompt": "<b>What</b> is 2?"}\n')
    done = runs(folder, "train", "run.yaml", constants={"tunesmith.run.task_scores:ANSWER_TOKENS": 6})
    assert done.code == 0, done.err
    return folder / "run"


def test_each_evaluation_has_answers_to_the_same_prompts(run):
    found = shown(run, read_tokenizer(run))
    assert found["steps"] == [0, 2, 4]
    by_step = {
        step: [(one["task"], one["prompt"]) for one in found["answers"] if one["step"] == step] for step in (0, 2, 4)
    }
    assert by_step[0] == by_step[2] == by_step[4] == [("prompts", "Who are you?"), ("prompts", "<b>What</b> is 2?")]
    assert all(one["scores"] == {} for one in found["answers"])
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert not any("prompts" in one.get("tasks", {}) for one in events)


def test_token_losses_are_those_of_the_evaluation_and_masked_tokens_have_none(run):
    found = shown(run, read_tokenizer(run))["tokens"]
    assert found
    for one in found:
        assert len(one["pieces"]) == len(one["losses"][0]) == len(one["losses"][4])
        assert one["losses"][0][0] is None  # nothing predicts the first token
        assert any(loss is not None for loss in one["losses"][0])
        assert one["losses"][0] != one["losses"][4]
    assert any(loss is None for one in found for loss in one["losses"][0][1:])  # the prompt
    tokenizer = read_tokenizer(run)
    kept = samples.read(run)[4]["tokens"]
    assert "".join(found[0]["pieces"]) == tokenizer.decode(kept[0]["ids"], skip_special_tokens=False)


def test_the_losses_of_all_tokens_of_all_documents_are_the_held_out_loss(run):
    kept = samples.read(run)[4]["tokens"]
    losses = [loss for one in kept for loss in one["losses"] if loss is not None]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    last = next(one for one in reversed(events) if one["event"] == "evaluation")
    if len(losses) == last["target_tokens"]:  # the tiny data set is no larger than what is kept
        assert sum(losses) / len(losses) == pytest.approx(last["loss"], abs=2e-3)
    else:
        assert len(losses) < last["target_tokens"]


def test_a_branch_has_what_was_before_it_and_the_report_all(run, tmp_path):
    branch(run, 4, tmp_path / "branch")
    assert list(samples.read(tmp_path / "branch")) == [0, 2]
    made = report(run)
    assert "\\u003cb\\u003eWhat\\u003c/b\\u003e is 2?" in made


def test_damaged_and_hostile_lines_are_left_out_and_the_later_line_counts(tmp_path):
    log = SampleLog(tmp_path)
    log.write(1, answers={"t": [{"prompt": "p", "answer": "old", "scores": {}}]})
    with log.path.open("ab") as file:
        file.write(b'{"step": 2, "answers": {"t": [{"pro')
    log.write(3, tokens=[{"data": "d", "where": "w", "ids": [1, 2], "losses": [None, 0.5]}])
    log.write(1, answers={"t": [{"prompt": "p", "answer": "new", "scores": {"exact": 1}}]})
    log.write(4)
    odd = [
        {"step": 5, "answers": [1], "tokens": {"a": 1}},
        {"step": 6, "answers": {"t": ["x", {"prompt": {}, "scores": [1]}]}, "tokens": [3, {"ids": [1], "losses": []}]},
        {"step": 7, "tokens": [{"ids": ["a", -1], "losses": [1, 2]}, {"ids": [1], "losses": ["nan"]}]},
        {"step": "8"},
        [1],
    ]
    with log.path.open("ab") as file:
        file.write(b"\xff\xfe\n" + b"".join(json.dumps(one).encode() + b"\n" for one in odd))
    found = shown(tmp_path, None)
    assert found["steps"] == [1, 3, 5, 6, 7]
    assert found["answers"][0]["answer"] == "new"
    assert found["answers"][0]["scores"] == {"exact": 1}
    assert [one["losses"] for one in found["tokens"]] == [{3: [None, 0.5]}, {7: [None]}]
    json.dumps(found, allow_nan=False)


def test_other_ranks_write_nothing_and_many_evaluations_are_shown_in_part(tmp_path):
    SampleLog(tmp_path, is_first=False).write(1, answers={"t": []}, tokens=[1])
    assert samples.read(tmp_path) == {}
    log = SampleLog(tmp_path)
    for step in range(0, 1000, 10):
        log.write(step, answers={"t": [{"prompt": "p", "answer": str(step), "scores": {}}]})
    steps = shown(tmp_path, None)["steps"]
    assert len(steps) == 12
    assert steps[0] == 0
    assert steps[-1] == 990
