"""Folders: a run and its model are kept apart, lost checkpoints are said before training begins again, and changed
settings of a finished run are mentioned."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tiny import SETTINGS, write_data
from tunesmith.cli.main import main
from tunesmith.config.load import from_mapping
from tunesmith.errors import UserError
from tunesmith.run.folder import check_place


@pytest.fixture
def train(tmp_path, tiny_model, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path / "train.jsonl", 8)
    shutil.copytree(tiny_model, "base")
    settings = SETTINGS | {"model": "base", "eval": [], "steps": 2, "save_every": 1}
    Path("run.yaml").write_text(json.dumps(settings))

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["train", "run.yaml", *arguments])
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return run


@pytest.mark.parametrize(
    ("model", "output", "is_refused"),
    [
        ("base", "base", True),
        ("base", "./other/../base/", True),
        ("base", "link", True),
        ("link", "base", True),
        ("base", "base/runs/one", True),
        ("run/model", "run", True),
        ("run/adapter", "run", True),
        ("base", "~/base", True),
        ("run/base", "run", False),
        ("base", "base-tuned", False),
        ("base", "run", False),
        ("base/a.gguf", "base", False),
        ("org/name", "org", False),
    ],
)
def test_an_output_that_would_be_mixed_up_with_its_model_is_refused(tmp_path, monkeypatch, model, output, is_refused):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in ("base", "other", "run/model", "run/adapter", "run/base"):
        Path(folder).mkdir(parents=True)
    Path("base/a.gguf").touch()
    Path("link").symlink_to("base")
    run = from_mapping({"model": model, "data": "d", "output": output})
    if not is_refused:
        check_place(run)
        return
    with pytest.raises(UserError, match=r"^output: .* model.*; set output to another folder\.$"):
        check_place(run)


def test_a_run_under_the_home_folder_lies_there_and_names_with_a_tilde_are_names(train, monkeypatch):
    monkeypatch.setenv("HOME", str(Path("home").absolute()))
    Path("train.jsonl").rename("~nobody.jsonl")
    code, out, err = train("output=~/my runs/one", "data=~nobody.jsonl", "steps=1")
    assert code == 0, err
    assert Path("home/my runs/one/adapter/adapter_config.json").exists()
    assert not Path("~").exists()
    assert f"`tunesmith chat '{Path('home/my runs/one').absolute()}'`" in out


def test_such_an_output_is_refused_before_anything_is_written_there(train):
    before = sorted(Path("base").rglob("*"))
    code, _, err = train("output=base")
    assert code == 1
    assert err.startswith("error: output: base is the folder of the model itself")
    assert sorted(Path("base").rglob("*")) == before


def test_a_run_does_not_lie_loose_in_the_root_or_the_home_folder(train, monkeypatch):
    monkeypatch.setenv("HOME", str(Path("home").absolute()))
    Path("home").mkdir()
    root, home = "the root of the file system", "the home folder"
    for output, name in {"/": root, "~/": home, "home/.": home}.items():
        code, _, err = train(f"output={output}")
        assert code == 1
        assert err.startswith("error: output: ")
        assert f" is {name}; set output to" in err
    assert not list(Path("home").iterdir())


@pytest.mark.parametrize("loss", ["damaged", "gone"])
def test_a_run_whose_checkpoints_are_all_lost_says_so_before_it_starts_again(train, loss):
    assert train()[0] == 0
    Path("run/summary.json").unlink()
    if loss == "gone":
        shutil.rmtree("run/checkpoints")
    else:
        for file in Path("run/checkpoints").rglob("*.safetensors"):
            file.write_bytes(file.read_bytes()[:-1] + b"x")
    code, out, err = train()
    assert code == 0, err
    said = next(line for line in err.splitlines() if "starts again at step 0" in line)
    assert said.startswith("warning: This run starts again at step 0: it had been saved up to step 2")
    assert "Continuing" not in out
    lines = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    last = len(lines) - 1 - next(n for n, line in enumerate(reversed(lines)) if line["event"] == "started")
    kinds = [line["event"] for line in lines[last:]]
    assert kinds.index("warning") < kinds.index("step")
    assert "starts again" not in train("steps=3", "--accept-changes")[2]


def test_a_new_run_says_nothing_of_the_kind(train):
    assert "starts again" not in train()[2]


def test_a_changed_setting_of_a_finished_run_is_mentioned(train):
    assert train()[0] == 0
    code, out, err = train()
    assert code == 0
    assert "is finished" in out
    assert "have changed" not in err
    code, out, err = train("learning_rate=0.001", "lora.rank=8", "keep=5")
    assert code == 0
    assert "is finished" in out
    (line,) = (line for line in err.splitlines() if "have changed" in line)
    assert "no effect on a finished run" in line
    for change in (
        "learning_rate was 0.005 and is now 0.001",
        "lora.rank was 4 and is now 8",
        "keep was 2 and is now 5",
    ):
        assert change in line


def test_a_finished_run_whose_result_is_gone_makes_it_again(train):
    assert train()[0] == 0
    before = Path("run/adapter/adapter_model.safetensors").read_bytes()
    shutil.rmtree("run/adapter")
    code, _, err = train()
    assert code == 0
    assert "run/adapter is gone; its result is made again" in err
    assert Path("run/adapter/adapter_model.safetensors").read_bytes() == before
