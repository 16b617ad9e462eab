"""Tasks of `eval` are asked while a run trains, score as `tunesmith eval --tasks` scores them, and can end it."""

from __future__ import annotations

import json
import shutil

import pytest

from tiny import Die, write_all
from tunesmith.config.load import from_mapping
from tunesmith.errors import UserError
from tunesmith.train import events

ASKED = [
    {"path": "held_out.jsonl"},
    {"path": "quiz.jsonl", "format": "choices"},
    {"path": "quiz.jsonl", "format": "letters", "name": "lettered"},
    {"path": "sums.jsonl", "format": "answers"},
]


@pytest.fixture(scope="module")
def asked(runs, tiny_model, tmp_path_factory):
    """A run that was asked four times, and the same after a kill."""
    folders = []
    model = shutil.copytree(tiny_model, tmp_path_factory.mktemp("asked") / "model")
    generation = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps({**generation, "num_beams": 4}))
    for name in ("plain", "killed"):
        folder = write_all(tmp_path_factory.mktemp("asked") / name, model, eval=ASKED, lora={"rank": 4}, steps=8)
        quiz = [
            {"question": f"Which is number {n}?", "choices": ["red", "blue sky", f"{n}", "tree"], "answer": n % 4}
            for n in range(7)
        ]
        sums = [{"question": f"What is {n} and {n}?", "answer": f"{2 * n}"} for n in range(3)]
        sums[1]["question"] = "And so on. " * 60 + sums[1]["question"]
        quiz[2]["question"] = "And so on. " * 60 + quiz[2]["question"]
        for path, records in (("quiz", quiz), ("sums", sums)):
            (folder / f"{path}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
        die = Die("tunesmith.run.task_scores:Asking.__call__", count=2) if name == "killed" else ()
        short = {"constants": {"tunesmith.run.task_scores:ANSWER_TOKENS": 8}}
        done = runs(folder, "train", "run.yaml", die=die, **short)
        if name == "killed":
            assert done.code < 0
            done = runs(folder, "train", "run.yaml", **short)
        assert done.code == 0, done.err
        folders.append((folder, done.out))
    return folders


def evaluations(folder):
    return [one for one in events.read(folder / "run") if one["event"] == "evaluation"]


def test_each_evaluation_has_the_scores_of_each_task(asked):
    folder, said = asked[0]
    found = evaluations(folder)
    assert [one["step"] for one in found] == [0, 4, 8]
    for one in found:
        assert set(one["tasks"]) == {"quiz", "lettered", "sums"}
        assert set(one["tasks"]["quiz"]) == {"acc", "acc_norm", "choice_loss"}
        assert one["tasks"]["sums"]["exact"][0] == 0
    assert found[0]["tasks"]["quiz"]["choice_loss"] != found[-1]["tasks"]["quiz"]["choice_loss"]
    assert "quiz: acc" in said
    warned = [one["message"] for one in events.read(folder / "run") if one["event"] == "warning"]
    assert any("generation config asks for num_beams: 4; answers are made without" in one for one in warned)
    for title, place, room in (
        ("quiz", 3, "sequence_length"),
        ("lettered", 3, "sequence_length"),
        ("sums", 2, "answer"),
    ):
        told = next(one for one in warned if f"{title}: 1 of " in one).split(f"{title}: 1 of ")[1]
        assert f"{room} and lose their beginning; the first is " in told
        assert f".jsonl, line {place}." in told


def test_questions_that_were_cut_are_said_again_where_results_are_known(asked, runs):
    folder, _ = asked[0]
    for _ in range(2):
        done = runs(folder, "eval", "run", "--tasks", "answers:sums.jsonl", "--max-tokens", "4")
        assert done.code == 0, done.err
        assert "sums: 1 of 3 questions are longer than the 508 tokens that are left beside an answer" in done.err


def test_a_run_that_was_killed_has_the_same_scores_and_bytes(asked):
    plain, killed = (folder for folder, _ in asked)
    assert [one["tasks"] for one in evaluations(plain)] == [one["tasks"] for one in evaluations(killed)]
    weights = [(one / "run" / "adapter" / "adapter_model.safetensors").read_bytes() for one in (plain, killed)]
    assert weights[0] == weights[1]


def test_the_last_scores_are_those_of_the_result(asked, runs):
    folder, _ = asked[0]
    done = runs(folder, "eval", "run", "--tasks", "choices:quiz.jsonl", "--json")
    assert done.code == 0, done.err
    by_eval = {one["measure"]: one["value"] for one in json.loads(done.out)["results"]}
    last = {name: score[0] for name, score in evaluations(folder)[-1]["tasks"]["quiz"].items()}
    assert last["acc"] == by_eval["acc"]
    assert last["acc_norm"] == by_eval["acc_norm"]
    assert last["choice_loss"] == pytest.approx(by_eval["choice_loss"], abs=1e-4)


def test_check_counts_the_items_of_tasks(asked, runs):
    done = runs(asked[0][0], "check", "run.yaml", "--json")
    assert done.code == 0, done.err
    found = {one["title"]: (one["kind"], one["items"]) for one in json.loads(done.out)["tasks"]}
    assert found == {"quiz": ("choices", 7), "lettered": ("letters", 7), "sums": ("answers", 3)}


def test_the_page_has_a_curve_for_each_measure(asked):
    from tunesmith.ui.read import curves

    found = curves(events.read(asked[0][0] / "run"))["tasks"]
    assert set(found) == {"quiz", "lettered", "sums"}
    assert len(found["quiz"]["acc"]) == 3
    assert len(found["quiz"]["acc"][0]) == 4


def settings(**changes):
    return {"model": "m", "data": "d.jsonl", "eval": [{"path": "quiz.jsonl", "format": "letters"}], **changes}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": [{"path": "d.jsonl", "format": "choices"}]}, "put it under `eval`"),
        ({"stop_when": "no gain in 2 evaluations of mmlu"}, "it has quiz"),
        ({"stop_when": "mmlu above 0.5", "eval": []}, "none of its data sets"),
        ({"objective": "embed"}, "a model that predicts tokens"),
        ({"eval": [{"path": "quiz.jsonl", "format": one} for one in ("letters", "choices")]}, "`name`"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_is_read(changes, said):
    with pytest.raises(UserError, match=said):
        from_mapping(settings(**changes))


def test_the_items_of_a_short_run_are_a_sample_and_always_the_same_one(tmp_path):
    from tunesmith.evaluate.tasks import read_task
    from tunesmith.run.task_scores import sampled

    quiz = [{"question": f"Which is {n}?", "choices": ["a", "b"], "answer": 0} for n in range(500)]
    (tmp_path / "quiz.jsonl").write_text("".join(json.dumps(one) + "\n" for one in quiz))
    task = read_task(str(tmp_path / "quiz.jsonl"), "choices")
    run = from_mapping(settings())
    (some,), note = sampled(run, [task], 10_000)
    assert 16 <= len(some.items) < 250
    assert note is not None
    assert "500" in note
    assert sampled(run, [task], 10_000)[0][0].items == some.items
    assert sampled(from_mapping(settings(eval_every=5)), [task], 10_000) == ([task], None)


@pytest.mark.slow
def test_a_run_ends_when_its_task_gains_nothing(runs, tiny_model, tmp_path):
    rule = {"stop_when": "no gain in 2 evaluations of quiz", "learning_rate": 1e-9, "eval_every": 1}
    write_all(tmp_path, tiny_model, eval=ASKED[:2], **rule)
    quiz = [{"question": f"Which is {n}?", "choices": ["red", "blue"], "answer": n % 2} for n in range(5)]
    (tmp_path / "quiz.jsonl").write_text("".join(json.dumps(one) + "\n" for one in quiz))
    done = runs(tmp_path, "train", "run.yaml")
    assert done.code == 0, done.err
    assert "on quiz" in done.out + done.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2


@pytest.mark.slow
def test_tasks_alone_without_held_out_records_are_refused(runs, tiny_model, tmp_path):
    write_all(tmp_path, tiny_model, eval=ASKED[1:2])
    (tmp_path / "quiz.jsonl").write_text('{"question": "a?", "choices": ["b", "c"], "answer": 0}\n')
    done = runs(tmp_path, "train", "run.yaml")
    assert done.code == 1
    assert "eval names tasks alone" in done.err
