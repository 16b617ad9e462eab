"""`init` writes a file that loads, says each setting's purpose, and never destroys anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tunesmith.cli.init import Answers, propose, write_settings
from tunesmith.cli.main import app
from tunesmith.config.load import from_mapping, load
from tunesmith.config.schema import Dataset, Lora, Preference, Run


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("support.jsonl").write_text("{}\n")


def init(*arguments: str, answers: str | None = None, monkeypatch=None):
    if answers is not None:
        monkeypatch.setattr("tunesmith.cli.init._is_terminal", lambda: True)
    return CliRunner().invoke(app, ["init", *arguments], input=answers)


def test_options_alone_write_a_file_that_loads():
    done = init("--model", "some/model", "--data", "support.jsonl", "--method", "full")
    assert done.exit_code == 0, done.output
    assert "tunesmith train run.yaml" in done.stdout
    run = load("run.yaml").run
    assert (run.model, run.method, run.output) == ("some/model", "full", "runs/support")
    assert [d.path for d in run.data] == ["support.jsonl"]
    assert run.learning_rate is None, "so that it follows the method when that is changed later"


def test_three_questions_are_asked_and_wrong_answers_asked_again(monkeypatch):
    done = init(answers="./missing\n\nnowhere.jsonl\nsupport.jsonl\nlorra\nqlora\n", monkeypatch=monkeypatch)
    assert done.exit_code == 0, done.output
    assert "the model ./missing does not exist" in done.output
    assert "the data nowhere.jsonl does not exist" in done.output
    assert "the method 'lorra' is not known" in done.output
    run = load("run.yaml").run
    assert run.model == propose("lora").model
    assert run.method == "qlora"


def test_giving_up_writes_nothing(monkeypatch):
    done = init(answers="a/b\n", monkeypatch=monkeypatch)
    assert done.exit_code == 130
    assert not Path("run.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "there is no terminal to ask in; give --model and --data"),
        (("--model", "m"), "there is no terminal to ask in; give --data"),
        (
            ("--model", "m", "--data", "no.jsonl"),
            "the data no.jsonl does not exist (write hub:no.jsonl for a data set on the hub)",
        ),
        (("--model", "x.gguf", "--data", "support.jsonl"), "the model x.gguf does not exist"),
        (
            ("--model", " ", "--data", "support.jsonl"),
            "the model is blank; name a folder, a .gguf file or a model on the hub",
        ),
        (
            ("--model", "m", "--data", "support.jsonl", "--method", "x"),
            "the method 'x' is not known; say lora, qlora or full",
        ),
        (("support.jsonl/run.yaml", "--model", "m", "--data", "support.jsonl"), "cannot be written"),
    ],
)
def test_what_cannot_work_is_one_sentence(arguments, message):
    done = init(*arguments)
    assert done.exit_code == 1
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not Path("run.yaml").exists()


def test_a_file_is_only_overwritten_when_forced():
    Path("run.yaml").write_text("mine")
    arguments = ("--model", "m", "--data", "support.jsonl")
    done = init(*arguments)
    assert done.exit_code == 1
    assert "run.yaml exists already" in done.stderr
    assert Path("run.yaml").read_text() == "mine"
    assert init(*arguments, "--force").exit_code == 0
    assert load("run.yaml").run.model == "m"


def test_a_folder_a_glob_and_the_hub_are_data_too():
    Path("folder").mkdir()
    for data, title in (("folder", "folder"), ("*.jsonl", "*"), ("hub:some/data", "some/data")):
        assert init("--model", "m", "--data", data, "--force").exit_code == 0
        assert load("run.yaml").run.data[0].title == title


def test_what_is_left_open_is_proposed_from_data_and_model_and_pinned_nowhere(tiny_model):
    record = json.dumps({"messages": [{"role": "user", "content": "x" * 200}, {"role": "assistant", "content": "y"}]})
    Path("support.jsonl").write_text(f"{record}\n" * 440)
    done = init("--model", str(tiny_model), "--data", "support.jsonl")
    assert done.exit_code == 0, done.output
    assert "440 examples" in done.stdout
    assert "steps" in done.stdout
    text = Path("run.yaml").read_text()
    assert "\n# batch_tokens: 512 " in text
    assert "\n# epochs: 2 " in text
    assert "\n# held_out: 22 " in text
    run = load("run.yaml").run
    assert (run.batch_tokens, run.epochs, run.learning_rate, run.held_out) == (None,) * 4


@pytest.mark.parametrize("method", ["lora", "full"])
def test_every_setting_is_shown_and_the_commented_ones_are_the_defaults(method):
    text = write_settings(Answers("m", "a", method), "runs/a", {})
    for model in (Run, Lora, Preference, Dataset):
        for name, field in model.model_fields.items():
            if name != "hub":
                assert f"{name}:" in text
                assert field.description in text
    body = text.split("\n\n", 1)[1].replace("# eval:", "eval:").replace("#   - path: held_out", "  - path: held_out")
    uncommented = "\n".join(
        line.replace("# ", "", 1) if line.lstrip().startswith("# ") and ": " in line else line
        for line in body.splitlines()
        if not line.startswith(("# The rest", "# Decided by"))
    )
    Path("full.yaml").write_text(uncommented)
    run = load("full.yaml").run
    defaults = from_mapping({"model": "m", "data": "a", "method": method})
    changed = {"output", "eval"}
    assert {k: v for k, v in run.model_dump(mode="json").items() if k not in changed} == {
        k: v for k, v in defaults.model_dump(mode="json").items() if k not in changed
    }


@settings(max_examples=40, deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12).filter(
        lambda t: t.strip() and not t.startswith(("hub:", "~"))
    )
)
def test_any_name_comes_back_as_it_was_given(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(write_settings(Answers(text, text, "lora"), text, {}), encoding="utf-8")
    run = load(path).run
    assert (run.model, run.data[0].path, run.output) == (text, text, text)


def test_proposals_fit_the_memory(monkeypatch):
    from tunesmith.plan import hardware

    def with_gpu(gibibytes: float) -> hardware.Hardware:
        gpu = hardware.Gpu(name="GPU", memory=int(gibibytes * 2**30), free=0, capability=(9, 0))
        return hardware.Hardware(
            cpu="p", cores=4, memory=1, available=1, has_fast_bf16=False, gpus=(gpu,) if gibibytes else ()
        )

    chosen = []
    for gibibytes in (0, 2, 8, 24, 80):
        monkeypatch.setattr(hardware, "probe", lambda gibibytes=gibibytes: with_gpu(gibibytes))
        chosen.append(propose("lora").model.split("/")[1])
    assert chosen == ["SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-14B"]
    assert propose("full").model == "Qwen/Qwen3-1.7B"
