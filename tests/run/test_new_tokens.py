"""New tokens: the vocabulary grows, their rows are trained, and transformers and peft load what comes of it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tiny import write_all
from tiny_model import make_tiny_model
from tunesmith.config.load import from_mapping
from tunesmith.errors import UserError
from tunesmith.model.grown import grown
from tunesmith.run.open import open_run

TOKENS = ["<|call|>", "<|done|>"]


@torch.no_grad()
def logits(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([[3, 4, *ids, 5]]), use_cache=False).logits.float()


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request, tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "model", tie_word_embeddings=request.param)


def write(folder, model, **changes):
    write_all(folder, model, epochs=2, lora={"rank": 2}, **changes)
    lines = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    for record in lines:
        record["messages"][1]["content"] += " <|call|> x <|done|>"
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = json.loads((folder / "run.yaml").read_text())
    (folder / "run.yaml").write_text(json.dumps({**settings, "new_tokens": TOKENS}))


def test_rows_of_new_tokens_are_trained_beside_lora_and_peft_reads_them(runs, model, tmp_path):
    peft = pytest.importorskip("peft")
    write(tmp_path / "x", model)
    assert (ended := runs(tmp_path / "x", "train", "run.yaml")).code == 0, ended.err
    run = tmp_path / "x" / "run"
    tokenizer = AutoTokenizer.from_pretrained(run / "adapter")
    ids = tokenizer.convert_tokens_to_ids(TOKENS)
    base = AutoModelForCausalLM.from_pretrained(run / "grown_base", dtype=torch.float32).eval()
    before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert base.config.vocab_size == 320
    torch.testing.assert_close(base.model.embed_tokens.weight[: min(ids)], before.model.embed_tokens.weight[: min(ids)])
    ours = open_run(run).model
    rows = ours.model.embed_tokens.token_rows
    assert (rows - base.model.embed_tokens.weight[ids]).abs().max() > 1e-3
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(run / "adapter", dtype=torch.float32).eval()
    torch.testing.assert_close(logits(theirs, ids), logits(ours, ids), rtol=1e-4, atol=1e-4)
    expected = logits(ours, ids)
    (run / "adapter").rename(run / "elsewhere")
    torch.testing.assert_close(logits(open_run(run).model, ids), expected, rtol=1e-5, atol=1e-5)  # the checkpoint's
    (run / "elsewhere").rename(run / "adapter")
    assert (ended := runs(tmp_path / "x", "merge", "run", "--to", "merged")).code == 0, ended.err
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "x" / "merged", dtype=torch.float32).eval()
    torch.testing.assert_close(logits(merged, ids), expected, rtol=1e-4, atol=1e-4)


def test_a_token_that_is_there_already_is_refused(model, tmp_path):
    given = {"model": str(model), "data": "x", "output": str(tmp_path / "run"), "new_tokens": ["<|im_end|>"]}
    with pytest.raises(UserError, match=r"has <.im_end.> already"):
        grown(from_mapping(given))


def test_tokens_that_a_tokenizer_got_without_its_model_are_given_rows(model, tmp_path):
    """As many fine-tunes are published: with a [PAD] that has no embedding."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|call|>", "<|pad|>", *(f"<|{number}|>" for number in range(70))], special_tokens=True)
    tokenizer.save_pretrained(folder)
    given = {"model": str(folder), "data": "x", "output": str(tmp_path / "run"), "new_tokens": ["<|call|>"]}
    made = AutoModelForCausalLM.from_pretrained(grown(from_mapping(given)).model)
    assert made.config.vocab_size == 384 >= len(tokenizer)
