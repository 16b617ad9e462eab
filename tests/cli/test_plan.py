"""`tunesmith plan`: quick, without torch, the same everywhere for named hardware, and plain words when it fails."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tunesmith.cli import output
from tunesmith.cli.main import app
from tunesmith.plan.hardware import DISK_RATE, measured_links, probe
from tunesmith.plan.plan import Plan

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(LLAMA_8B))
    (tmp_path / "d.jsonl").write_text('{"text": "hello"}\n' * 100)
    (tmp_path / "run.yaml").write_text("model: m\ndata: d.jsonl\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(*words: str) -> str:
    result = CliRunner().invoke(app, ["plan", *words])
    assert result.exit_code == 0, result.output
    return result.output


def test_it_takes_less_than_a_second_and_imports_no_torch(folder):
    code = (
        "import sys\n"
        "from tunesmith.cli.main import main\n"
        "try:\n    main(['plan', '--hardware', 'H200'])\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert busy < 3  # under 1 s on an idle machine; a busy one takes more time for the same work
    assert "tokens a second" in done.stdout


def test_the_page_says_what_why_how_much_and_what_else(folder):
    page = plan("--hardware", "H200", "--price", "2.5", "--tokens", "1e9")
    for words in (
        "8,030,261,248 parameters, 41,943,040 trained",
        "everything fits into",
        "Memory of each rank at the peak",
        "tokens a second",
        "1,000,000,000 tokens (as given)",
        "GPU hours",
        "at 2.5 an hour",
        "precision: fp8",
    ):
        assert words in page


def test_a_model_without_a_formula_is_planned_by_what_its_code_does(folder, monkeypatch):
    """BLOOM's code takes no packed attention, but its documents are packed in training all the same."""
    sizes = {"hidden_size": 256, "n_layer": 3, "n_head": 4, "vocab_size": 1000}
    bloom = {"architectures": ["BloomForCausalLM"], "model_type": "bloom", **sizes}
    (folder / "m" / "config.json").write_text(json.dumps(bloom))
    stages = []
    monkeypatch.setattr(output, "stage", stages.append)
    said = plan("--hardware", "H200")
    assert "padded" not in said
    assert "no formula" not in said
    assert stages == ["Reading run.yaml", "Trying the model's code on a small proxy"]


def test_data_that_are_not_there_are_told(folder):
    assert "gone.jsonl: no such file or folder" in plan("run.yaml", "data=gone.jsonl", "--hardware", "H200")
    assert "no such file" not in plan("--hardware", "H200")


def test_json_is_one_document_and_the_same_again(folder):
    first, second = plan("--hardware", "H200", "--json"), plan("--hardware", "H200", "--json")
    assert first == second
    document = json.loads(first)
    found = Plan.model_validate(document["plan"])
    assert document["fits"] is True
    assert document["tokens_per_second"] == pytest.approx(found.tokens_per_second, abs=0.1)
    peak = max(sum(phase["memory"].values()) for phase in document["timeline"])
    assert peak == found.memory.total


def test_a_saved_plan_is_one_that_train_reads(folder):
    plan("--hardware", "H200", "--save", "plan.json")
    assert Plan.model_validate_json((folder / "plan.json").read_text()).device == "cuda"


def test_what_if_and_solve_answer(folder):
    changes = ("sequence_length=16384", "batch_tokens=16384", "checkpointed_layers=32")
    what_if = [word for change in changes for word in ("--what-if", change)]
    page = plan("--hardware", "RTX 4090", *what_if)
    assert "what if" in page
    assert "16384" in page
    assert "longest sequence" in plan("--hardware", "RTX 4090", "--solve", "sequence_length")
    assert "The fewest that do" in plan("run.yaml", "method=full", "--hardware", "A100-40G", "--solve", "gpus")


def test_what_does_not_fit_says_what_would(folder):
    page = plan("run.yaml", "method=full", "--hardware", "T4")
    assert "does not fit into" in page
    assert "method: lora" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hardware", "A100"], "A100-40G or A100-80G"),
        (["--what-if", "nonsense"], "KEY=VALUE"),
        (["--solve", "life"], "sequence_length"),
        (["run.yaml", "model=./nowhere"], "does not exist"),
    ],
)
def test_mistakes_are_one_sentence(folder, words, message):
    result = CliRunner().invoke(app, ["plan", *words])
    assert result.exit_code == 1
    assert message in result.output
    assert "Traceback" not in result.output


def test_train_refuses_a_plan_that_this_version_cannot_run(folder):
    plan("--hardware", "8 x H100", "--save", "plan.json")
    content = json.loads(Path("plan.json").read_text()) | {"beyond": ["magic"]}
    Path("plan.json").write_text(json.dumps(content))
    result = CliRunner().invoke(app, ["train", "--plan", "plan.json"])
    assert result.exit_code == 1
    assert "this version cannot do: magic" in result.output


def test_train_refuses_a_plan_for_a_machine_that_is_not_here(folder):
    plan("--hardware", "8 x H100", "--save", "plan.json")
    result = CliRunner().invoke(app, ["train", "--plan", "plan.json"])
    assert result.exit_code == 1
    assert "The plan cannot be carried out: it is for a GPU, and none is here." in result.output


def test_a_processor_is_measured_once_and_its_plans_are_no_guess_any_more(folder, monkeypatch):
    monkeypatch.setenv("TUNESMITH_CACHE", str(folder / "cache"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("tunesmith.plan.calibrate.DISK_BYTES", 1 << 25)
    assert "factor of three" in plan("run.yaml", "device=cpu")
    page = plan("run.yaml", "device=cpu", "--calibrate")
    assert "GFLOP/s in fp32" in page
    assert re.search(r"disk [\d.]+ GB/s", page)
    assert probe().disk_rate == measured_links()["disk"] != DISK_RATE
    assert "factor of three" not in page
    assert "factor of three" not in plan("run.yaml", "device=cpu")
