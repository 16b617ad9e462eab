"""`tunesmith eval --tasks` as a whole: on a run, its base, a plain model; again after a kill; and the verdict."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import lm_eval_oracle as oracle
from export.models import make_run
from tunesmith.cli.main import app


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    made = {
        "mc": oracle.records()[:8],
        "gsm": [{"question": f"What is {n} + 1?", "answer": f"It is.\n#### {n + 1}"} for n in range(3)],
        "rules": [{"prompt": "No commas", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}],
        "texts": [{"text": f"some text of {n}", "group": "ab"[n % 2]} for n in range(6)],
    }
    for name, records in made.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return folder


@pytest.fixture(scope="module")
def run(tiny_model, tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("evaluated") / "run", tiny_model, steps=4)


def invoke(*arguments: object, code: int = 0):
    done = CliRunner().invoke(app, ["eval", *map(str, arguments)])
    assert done.exit_code == code, (done.output, done.exception)
    return done


def of(tasks, *names: str) -> str:
    return ",".join(str(tasks / f"{name}.jsonl") for name in names)


def test_a_run_is_held_against_its_base_in_one_table(run, tasks):
    given = [run, "--tasks", of(tasks, "mc", "gsm", "rules", "texts"), "--max-tokens", 6]
    found = json.loads(invoke(*given, "--against", "base", "--json").stdout)
    rows = {(row["task"], row["measure"]): row for row in found["results"]}
    assert {("mc", "acc"), ("mc", "acc_norm"), ("gsm", "strict"), ("rules", "loose"), ("texts", "loss")} <= rows.keys()
    loss = rows["texts", "loss"]
    assert loss["difference"] == pytest.approx(loss["value"] - loss["against"])
    assert loss["value"] != loss["against"]
    alone = json.loads(invoke(*given, "--json").stdout)
    assert {row["measure"]: row["value"] for row in alone["results"] if row["task"] == "texts"}["loss"] == loss["value"]
    assert {row["group"] for row in alone["groups"] if row["task"] == "texts"} == {"a", "b"}
    shown = invoke(*given, "--base").output
    assert "verdict" in shown
    assert any(words in shown for words in ("No difference can be told", "is better", "is worse"))


def test_what_is_known_is_not_computed_again_and_a_killed_evaluation_goes_on(run, tasks, tmp_path, monkeypatch):
    from tunesmith.evaluate import score
    from tunesmith.run import targets

    given = [run, "--tasks", of(tasks, "mc"), "--output", tmp_path, "--json"]
    monkeypatch.setitem(score.TOKENS, "cpu", 1)  # an item a batch
    real, calls = score.Scorer._tree_sums, []

    def dies(self, trees):
        calls.append(len(trees))
        if len(calls) == 6:  # two trials, then the fourth item
            raise KeyboardInterrupt
        return real(self, trees)

    monkeypatch.setattr(score.Scorer, "_tree_sums", dies)
    CliRunner().invoke(app, ["eval", *map(str, given)])
    (file,) = tmp_path.glob("*.jsonl")
    assert len(file.read_text().splitlines()) == 2  # the third was under way
    whole = json.loads(invoke(*given).stdout)
    assert len(calls) == 6 + 2 + 6
    monkeypatch.setattr(targets, "open_run", lambda _: pytest.fail("nothing is missing"))
    assert json.loads(invoke(*given).stdout) == whole


def test_the_own_general_task_is_read_and_asked(tiny_model):
    found = json.loads(invoke(tiny_model, "--tasks", "general", "--json", "--limit", 3).stdout)
    assert {row["measure"] for row in found["results"]} == {"acc", "acc_norm", "choice_loss"}
    from tunesmith.evaluate.tasks import read_task

    assert len(read_task("general").items) == 64


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--tasks", "{texts}", "--against", "base"], "is no run"),
        (["--against", "base"], "--tasks"),
        (["--tasks", "lm-eval:arc_easy"], "extra `eval`"),
        (["--tasks", "{texts}", "--judge", "http://127.0.0.1:9/v1"], "go together"),
        (["--tasks", "judge:{gsm}"], "--judge URL"),
        (["--tasks", "{texts}", "--data", "x"], "loss:FILE"),
    ],
)
def test_what_cannot_be_done_is_told_in_a_sentence(tiny_model, tasks, given, words, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    named = {name: tasks / f"{name}.jsonl" for name in ("texts", "gsm")}
    done = CliRunner().invoke(app, ["eval", str(tiny_model), *(one.format(**named) for one in given)])
    assert done.exit_code == 1
    assert words in str(done.exception) + done.output


@pytest.mark.slow
def test_a_task_of_lm_eval_scores_as_ours_does(tiny_model, tasks, tmp_path):
    pytest.importorskip("lm_eval")
    path = tmp_path / "mine.yaml"
    path.write_text(
        "task: mine\ndataset_path: json\noutput_type: multiple_choice\ntest_split: test\n"
        f"dataset_kwargs:\n  data_files:\n    test: {tasks / 'mc.jsonl'}\n"
        'doc_to_text: "Question: {{question.strip()}}\\nAnswer:"\ndoc_to_choice: choices\ndoc_to_target: answer\n'
        "metric_list:\n  - metric: acc\n  - metric: acc_norm\n"
    )
    found = json.loads(invoke(tiny_model, "--tasks", f"lm-eval:{path},{tasks / 'mc.jsonl'}", "--json").stdout)
    values = {(row["task"] == "mc", row["measure"]): row["value"] for row in found["results"]}
    assert values[True, "acc"] == values[False, "acc"]
    assert values[True, "acc_norm"] == values[False, "acc_norm"]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_share_the_items(runs, tiny_model, tasks, tmp_path):
    given = ["eval", str(tiny_model), "--tasks", of(tasks, "mc", "texts", "gsm"), "--json", "--max-tokens", "4"]
    both = runs(tmp_path, *given, "--ranks", "2", "--output", str(tmp_path / "two"))
    assert both.code == 0, both.err
    alone = json.loads(invoke(*given[1:], "--output", tmp_path / "one").stdout)
    for mine, theirs in zip(json.loads(both.out)["results"], alone["results"], strict=True):
        assert mine["value"] == pytest.approx(theirs["value"], rel=1e-5)
    assert {file.name.split(".")[-2] for file in (tmp_path / "two").glob("*.jsonl")} == {"0", "1"}
