"""A run never ends without its result, and the result behaves elsewhere as it did here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    GenerationConfig,
    OpenAIGPTConfig,
)

from loads_elsewhere import answer, check_result
from tiny import SETTINGS, write_all, write_data
from tiny_model import CHATML, make_tiny_model
from tunesmith.config.load import from_mapping
from tunesmith.data.chat_template import read_template
from tunesmith.errors import UserError
from tunesmith.infer.generate import answers
from tunesmith.run.assemble import assemble
from tunesmith.run.merge import merge_run
from tunesmith.run.open import open_model, open_run
from tunesmith.run.start import prepare_run
from tunesmith.train.job import Job
from tunesmith.train.loop import train

END = "<|im_end|>"
TEMPLATE = CHATML.replace("<|im_start|>", "<|im_start|>:")
"""ChatML with a mark by which it is known."""
QUESTIONS = {"red": "sun", "blue": "a cat", "ten": "yes"}
LEARN = {
    "full": {"method": "full", "learning_rate": 1e-2, "steps": 40},
    "lora": {"method": "lora", "lora": {"rank": 8}, "learning_rate": 3e-2, "steps": 60},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A model whose texts end with <|endoftext|>, and that has no chat template."""
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "plain", eos_token_id=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token, tokenizer.chat_template = "<|endoftext|>", None
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5], "pad_token_id": 0}))
    return folder


@pytest.fixture(scope="module")
def learn(base, runs, tmp_path_factory):
    """Runs that have learned the answers by heart, with a template from a JSON file with a byte-order mark, which is
    gone afterwards."""
    done = {}

    def learned(method: str) -> Path:
        if method not in done:
            folder = tmp_path_factory.mktemp(method)
            file = folder / "template.json"
            file.write_text(json.dumps({"chat_template": TEMPLATE}), encoding="utf-8-sig")
            changes = {"epochs": 1, "eval": [], "save_every": None, "warmup": 0, "chat_template": str(file)}
            write_all(folder, base, **changes | LEARN[method])
            turns = [
                [{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in QUESTIONS.items()
            ]
            lines = [json.dumps({"messages": messages}) + "\n" for messages in turns]
            (folder / "train.jsonl").write_text("".join(lines))
            ended = runs(folder, "train", "run.yaml")
            assert ended.code == 0, ended
            file.unlink()
            done[method] = folder / "run"
        return done[method]

    return learned


def assert_learned(folder: Path) -> None:
    """Plain transformers gets the answers, and stops by itself, for the right reason."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == TEMPLATE
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [0, 5, 2]
    for question, expected in QUESTIONS.items():
        assert answer(folder, question) == (expected, tokenizer.convert_tokens_to_ids(END))


@pytest.mark.parametrize("method", LEARN)
def test_the_result_has_the_template_it_was_trained_with_and_stops_by_itself_in_plain_transformers(learn, method):
    run = learn(method)
    result = run / ("model" if method == "full" else "adapter")
    check_result(result)
    assert_learned(result)
    card = (result / "README.md").read_text()
    assert f"method | {method}" in card
    assert "| data | train" in card
    assert END in card


@pytest.mark.parametrize("method", LEARN)
def test_chat_stops_by_itself_though_the_template_s_file_is_gone(learn, method):
    opened = open_run(learn(method))
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    assert answers(opened.model, opened.encoder, asked, max_new_tokens=40) == list(QUESTIONS.values())


def test_a_merged_model_has_all_of_it_too(learn, tmp_path):
    merge_run(learn("lora"), tmp_path / "merged")
    assert_learned(tmp_path / "merged")
    opened = open_model(tmp_path / "merged")
    asked = [[{"role": "user", "content": "red"}]]
    assert answers(opened.model, opened.encoder, asked, max_new_tokens=40) == ["sun"]
    assert "merged" in (tmp_path / "merged" / "README.md").read_text()


ODD = {
    "a temperature without do_sample": {"temperature": 0.6, "top_p": 0.9, "eos_token_id": 2},
    "beams that are not searched": {"early_stopping": True, "num_beams": 1, "max_new_tokens": 7},
    "a cache nobody knows": {"cache_implementation": "of its own", "eos_token_id": [2, 0]},
    "an argument of generate": {"stopping_criteria": 1},
    "tokens that nobody has": {"eos_token_id": [2, 10**9], "pad_token_id": -1, "top_k": 2.5, "max_new_tokens": 7},
    "no object": [1, 2],
    "endless brackets": "[" * 100_000,
}


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_generation_config_of_the_base_does_not_cost_the_result(runs, tiny_model, tmp_path, kind):
    base = tmp_path / "base"
    shutil.copytree(tiny_model, base)
    content = ODD[kind]
    (base / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    folder = write_all(tmp_path / "run", base, method="full", steps=1, eval=[])
    ended = runs(folder, "train", "run.yaml")
    assert ended.code == 0, ended
    assert "generation_config.json" in ended.err + ended.out
    found = GenerationConfig.from_pretrained(folder / "run" / "model")
    found.validate(strict=True)
    if kind == "a temperature without do_sample":
        assert (found.do_sample, found.temperature, found.top_p) == (True, 0.6, 0.9)
    if kind == "tokens that nobody has":
        assert (found.pad_token_id, found.max_new_tokens) == (None, 7)
        assert found.eos_token_id == 2
        assert "`pad_token_id: -1`" in ended.err + ended.out
    if kind == "beams that are not searched":
        assert found.max_new_tokens == 7


def job_of(base: Path, folder: Path, **changes) -> Job:
    """A job that could start training."""
    folder.mkdir()
    data = write_data(folder / "train.jsonl", 4)
    settings = {**SETTINGS, "model": str(base), "data": [{"path": str(data)}], "eval": [], "steps": 1}
    run = from_mapping(settings | {"lora": {"rank": 2}, "output": str(folder / "run")} | changes)
    (folder / "run").mkdir()
    return assemble(prepare_run(run, warn=print))


@pytest.mark.parametrize("method", LEARN)
def test_the_result_is_written_though_the_base_went_while_the_run_was_under_way(tiny_model, tmp_path, method):
    base = tmp_path / "base"
    shutil.copytree(tiny_model, base)
    job = job_of(base, tmp_path / "here", method=method)
    base.rename(tmp_path / "elsewhere")
    result = job.write_result()
    tokenizer = AutoTokenizer.from_pretrained(result)
    assert tokenizer.chat_template == CHATML
    (tmp_path / "elsewhere").rename(base)
    check_result(result)


SHAPE = {"vocab_size": 259, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 16, "max_position_embeddings": 512}
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
OTHERS = {
    "a config with parts for text and pictures": lambda: Gemma3Config(
        text_config=SHAPE | HEADS,
        vision_config=VISION | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=258,
        boi_token_index=256,
        eoi_token_index=257,
    ),
    "a config that knows no cache": lambda: OpenAIGPTConfig(vocab_size=259, n_embd=16, n_layer=1, n_head=2),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_configs_of_other_kinds_are_merged_and_keep_what_they_say(tiny_model, tmp_path, kind):
    base = tmp_path / "base"
    shutil.copytree(tiny_model, base)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(OTHERS[kind]()).save_pretrained(base)
    outcome = train(job_of(base, tmp_path / "here"), lambda event: None)
    check_result(outcome.result)
    merge_run(tmp_path / "here" / "run", tmp_path / "merged")
    check_result(tmp_path / "merged")
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (base, tmp_path / "merged"))
    for one in (before, after):
        for part in one.values():  # parts may name the precision or leave it to the whole
            part.pop("dtype", None) if isinstance(part, dict) else None
    assert before == after


def test_a_template_under_the_home_folder_is_read_from_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "chat.jinja").write_text(CHATML, encoding="utf-8-sig")
    assert read_template("~/chat.jinja") == CHATML
    with pytest.raises(UserError, match=r"chat_template: ~nobody-here/chat\.jinja cannot be read"):
        read_template("~nobody-here/chat.jinja")


NAMED = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": TEMPLATE}]


@pytest.mark.parametrize("name", ["chat.json", "chat.jinja", "chat"])
def test_a_template_in_json_is_read_whatever_its_file_is_called(tmp_path, name):
    file = tmp_path / name
    for content in (CHATML, {"chat_template": CHATML, "eos_token": END}):
        file.write_text(json.dumps(content), encoding="utf-8-sig")
        assert read_template(str(file)) == CHATML
    for content in (NAMED, {"chat_template": NAMED}):
        file.write_text(json.dumps(content))
        assert read_template(str(file)) == {"default": CHATML, "tool_use": TEMPLATE}
    for content in (None, 7, [], {}, {"chat_template": 7}, [{"name": "default"}], [[]], " ", {"chat_template": ""}):
        file.write_text(json.dumps(content))
        with pytest.raises(UserError, match=r"without a text `chat_template`|holds no template"):
            read_template(str(file))
    for content in ("", " \n"):
        file.write_text(content)
        with pytest.raises(UserError, match=r"holds no template|not valid JSON"):
            read_template(str(file))
