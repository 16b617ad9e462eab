"""What people get wrong: each one clear sentence, before the weights are loaded wherever that can be known."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny import SETTINGS, write_data
from tunesmith.cli.main import main


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


@pytest.fixture
def train(tmp_path, tiny_model, monkeypatch, capsys):
    """`tunesmith train` in a folder of good data, with settings changed (None: left out) and overrides."""
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path / "train.jsonl", 8)
    write_data(tmp_path / "held_out.jsonl", 2, seed=1)

    def run(*overrides: str, text: str | None = None, **changes: Any) -> Ended:
        settings = {"model": str(tiny_model), **SETTINGS, "epochs": 1, **changes}
        settings = {key: value for key, value in settings.items() if value is not None}
        Path("run.yaml").write_text(json.dumps(settings, indent=1) if text is None else text)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["train", "run.yaml", *overrides])
        captured = capsys.readouterr()
        return Ended(ended.value.code or 0, captured.out, captured.err)

    return run


@pytest.fixture
def refused(train, monkeypatch):
    """`train` that must be refused in one sentence holding the words, without the weights being touched."""

    def no_weights(*_: object, **__: object) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr("tunesmith.run.assemble.prepare", no_weights)

    def check(words: list[str], *overrides: str, **changes: Any) -> str:
        ended = train(*overrides, **changes)
        assert ended.code == 1, ended
        lines = ended.err.splitlines()
        assert len(lines) == 1, ended.err
        assert lines[0].startswith("error: ")
        assert "Traceback" not in ended.err + ended.out
        for word in words:
            assert word in lines[0], lines[0]
        return lines[0]

    return check


def write_lines(*records: object) -> None:
    lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
    Path("train.jsonl").write_text("".join(line + "\n" for line in lines))


def chat(question: object, answer: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


# Settings


def test_good_input_trains(train):
    ended = train()
    assert ended.code == 0, ended.err
    assert ended.err == ""
    assert "Done." in ended.out


def test_a_mistyped_setting_names_the_right_one_and_its_line(refused):
    refused(["learning_rte", "did you mean `learning_rate`?", "run.yaml, line"], learning_rte=1e-4)
    refused(["lora.rnk", "`lora.rank`"], lora={"rnk": 4})
    refused(["command line", "`epochs`"], "epoch=3")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"epochs": "many"}, ["epochs", "many", "line"]),
        ({"batch_tokens": [1]}, ["batch_tokens", "line"]),
        ({"learning_rate": -1}, ["learning_rate", "line"]),
        ({"learning_rate": True}, ["learning_rate", "number", "line"]),
        ({"method": "lorra"}, ["method", "lorra", "lora", "line"]),
        ({"seed": 1.5}, ["seed", "line"]),
        ({"lora": {"dropout": 2}}, ["lora.dropout", "line"]),
        ({"lora": 16}, ["lora", "line"]),
        ({"data": []}, ["data"]),
        ({"model": None}, ["model"]),
        ({"keep": 0}, ["keep"]),
    ],
)
def test_a_wrong_value_is_named_with_its_line(refused, change, words):
    refused(words, **change)


def test_settings_that_do_not_go_together_are_refused(refused):
    refused(["batch_tokens", "sequence_length"], batch_tokens=32)
    refused(["cuda", "cpu"], device="cuda") if not torch.cuda.is_available() else None


def test_ranks_that_cannot_share_a_step_and_plans_for_others_are_refused(refused):
    small = {"batch_tokens": SETTINGS["sequence_length"] * 2}
    refused(["--ranks is 7", "2 sequences of", "--ranks 1", "batch_tokens"], "--ranks", "7", **small)
    with pytest.raises(SystemExit):
        main(["plan", "run.yaml", "--save", "plan.json"])
    refused(["--ranks is 2", "the plan given is for 1"], "--ranks", "2", "--plan", "plan.json", **small)
    plan = json.loads(Path("plan.json").read_text())
    Path("plan.json").write_text(json.dumps(plan | {"learning_rate": -1.0}))
    refused(["learning_rate", "greater than 0"], "--plan", "plan.json", **small)


def test_a_step_of_more_data_than_anyone_has_is_refused(train):
    for changes in ({"batch_tokens": 10**15, "steps": 1}, {"steps": 10**12}):
        ended = train(**changes)
        assert ended.code == 1, ended
        assert "10,000,000 passes over the data" in ended.err


def test_a_sequence_length_beyond_the_models_is_refused(refused):
    refused(["sequence_length", "513", "512"], sequence_length=513, batch_tokens=1024)


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"targets": ["query_proj"]}, ["lora.targets", "query_proj", "q_proj"]),
        ({"targets": ["q_proj", "nothing*"]}, ["lora.targets", "nothing*"]),
        ({"layers": "top many"}, ["lora.layers", "top many"]),
        ({"layers": "7"}, ["lora.layers", "0 to 1"]),
    ],
)
def test_adapters_that_match_nothing_are_refused(refused, lora, words):
    refused(words, lora=lora)


# The model


def test_a_model_that_is_not_there_is_refused_and_no_hub_is_asked(refused, monkeypatch):
    import socket

    def no_network(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    refused(["models/llama/x", "does not exist"], model="models/llama/x")
    refused(["./llama", "does not exist"], model="./llama")
    refused(["/no/such/folder", "does not exist"], model="/no/such/folder")
    taught = {"objective": "distill", "distillation": {"teacher": "./nobody"}}
    refused(["distillation.teacher: ./nobody does not exist"], **taught)
    Path("empty").mkdir()
    refused(["empty", "config.json"], model="empty")
    refused(["train.jsonl", "is a file"], model="train.jsonl")


def test_a_hub_name_that_cannot_be_had_is_a_sentence(refused):
    refused(["nobody/no-such-model", "hub"], model="nobody/no-such-model")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model_type": "no_such_thing"}', "\0\0"])
def test_a_model_folder_with_a_broken_config_is_a_sentence(refused, content):
    Path("broken").mkdir()
    Path("broken/config.json").write_text(content)
    refused(["broken"], model="broken")


def test_a_model_without_a_tokenizer_is_a_sentence(refused, tiny_model):
    Path("broken").mkdir()
    Path("broken/config.json").write_text((tiny_model / "config.json").read_text())
    refused(["broken", "tokenizer"], model="broken")


def copy_of(model: Path) -> Path:
    import shutil

    return Path(shutil.copytree(model, "copy"))


def test_weights_that_are_missing_or_damaged_are_a_sentence(train, tiny_model):
    file = copy_of(tiny_model) / "model.safetensors"
    content = file.read_bytes()
    for damaged in (content[:1000], b"", bytes(50) + content[50:]):
        file.write_bytes(damaged)
        ended = train(model="copy", output=f"run{len(damaged)}")
        assert ended.code == 1, ended.err
        assert ended.err.count("\n") == 1
        assert "copy/model.safetensors is damaged" in ended.err
    file.unlink()
    ended = train(model="copy", output="gone")
    assert ended.code == 1, ended.err
    assert "copy holds no weights" in ended.err


# Data


def test_a_missing_file_is_named_with_what_is_near(refused):
    refused(["trian.jsonl", "did you mean", "train.jsonl"], data="trian.jsonl")
    refused(["nothing/here.jsonl"], data="nothing/here.jsonl")
    refused(["held.jsonl"], eval="held.jsonl")


def test_a_broken_line_is_named_by_file_and_line(refused):
    write_lines(chat("a", "b"), chat("c", "d"), '{"messages": [{"role": "user"', chat("e", "f"))
    refused(["train.jsonl, line 3", "JSON"])
    write_lines(chat("a", "b"), "", "not json")
    refused(["train.jsonl, line 3"])
    write_lines(*[chat("a", "b")] * 300, "{")
    refused(["train.jsonl, line 301"])


def test_unexpected_fields_are_named_with_the_mapping_that_would_work(refused):
    write_lines({"question_text": "a", "reply": "b"}, {"question_text": "c", "reply": "d"})
    refused(["question_text", "reply", "fields"])


def test_an_empty_file_is_refused(refused):
    Path("train.jsonl").write_text("")
    refused(["train.jsonl", "empty"])
    Path("train.jsonl").write_text("\n\n \n")
    refused(["train.jsonl", "no records"])
    Path("train.json").write_text("[]")
    refused(["train.json"], data="train.json")


@pytest.mark.parametrize("answer", [None, "", "   ", True, [], {}])
def test_empty_and_null_answers_are_named_by_line(refused, answer):
    write_lines(chat("a", "b"), chat("c", answer))
    refused(["train.jsonl, line 2"])


@pytest.mark.parametrize("answer", [None, "", False])
def test_empty_and_null_answers_of_other_formats_are_named_too(refused, answer):
    for one, other in (("prompt", "completion"), ("instruction", "output"), ("question", "answer")):
        write_lines({one: "a", other: "b"}, {one: "c", other: answer})
        refused(["train.jsonl, line 2"])


def test_numeric_answers_are_taken_as_the_text_they_look_like(train):
    write_lines(chat("a", 7), chat("c", 1.5))
    assert train(steps=1).code == 0


def test_targets_all_cut_off_by_the_length_are_refused(refused):
    write_lines(*[chat("why " * 100, f"because {n}") for n in range(4)])
    refused(["sequence_length 64", "cut off"])


def test_wrong_encodings_are_named(refused):
    for content in (
        '{"text": "gr\u00fc\u00dfe"}\n'.encode("latin-1"),
        '{"text": "a"}\n'.encode("utf-16"),
        b"\x00" * 99,
    ):
        Path("train.jsonl").write_bytes(content)
        refused(["train.jsonl"])


def test_a_folder_without_data_and_an_unknown_ending_are_refused(refused):
    Path("folder").mkdir()
    refused(["folder"], data="folder")
    Path("data.docx").write_text("x")
    refused(["data.docx", ".jsonl"], data="data.docx")


def test_a_chat_template_that_is_broken_or_not_there_is_refused(refused):
    refused(["no.jinja"], chat_template="no.jinja")
    Path("bad.jinja").write_text("{% for message in %}")
    refused(["chat template", "line 1"], chat_template="bad.jinja")


# Numbers that are no numbers


def test_nan_in_the_base_is_found_before_the_first_step_and_not_blamed_on_the_data(train, tiny_model):
    file = copy_of(tiny_model) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    ended = train(model="copy")
    assert ended.code == 1
    assert "hold NaN in model.layers.1.mlp.down_proj.weight in model.safetensors (1 of 2,048 values)" in ended.err
    assert "jsonl" not in ended.err
    assert ended.err.count("\n") == 1


def test_losses_that_are_no_numbers_stop_the_run_and_nothing_is_saved(train, tiny_model):
    file = copy_of(tiny_model) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"][:] = 3e38
    save_file(tensors, file, metadata={"format": "pt"})
    ended = train(model="copy")
    assert ended.code == 1
    assert "held-out loss after step 0 is not a finite number" in ended.err
    assert "held_out" in ended.err
    ended = train(model="copy", eval=[])
    assert ended.code == 1
    assert "loss of step 1 is not a finite number" in ended.err
    assert "train.jsonl, line" in ended.err
    assert ended.err.count("\n") == 1
    assert not list(Path("run").rglob("*.safetensors"))


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_loss_that_explodes_stops_the_run_and_no_such_weights_are_saved(train, method):
    sgd = {"optimizer": "sgd", "learning_rate": 1e30, "max_grad_norm": None}  # the one that may have any rate
    ended = train(method=method, **sgd, save_every=1, epochs=10, warmup=0, eval=[])
    assert ended.code == 1, ended
    assert ended.err.count("\n") == 1
    assert "step" in ended.err
    assert "have exploded" in ended.err or "not a finite number" in ended.err
    for file in Path("run").rglob("*.safetensors"):
        assert all(tensor.float().isfinite().all() for tensor in load_file(file).values())
    assert not Path("run/adapter").exists()
    assert not Path("run/model").exists()
    assert not Path("run/summary.json").exists()
