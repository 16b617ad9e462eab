"""A GGUF file becomes a model folder that others read, too."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tiny_model import make_tiny_model
from tunesmith.model.gguf import _restore_bos, each_once


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_weight_is_kept_once_as_the_embedding(tmp_path, tied):
    """vLLM looks for it there, and answers with numbers of its own where the file has the head alone."""
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path, tie_word_embeddings=tied))
    names = set(model.state_dict())
    assert "lm_head.weight" in names
    assert each_once(model).keys() == (names - {"lm_head.weight"} if tied else names)


@pytest.mark.parametrize(
    ("said", "begins"),
    [
        ({"model": "gpt2", "add_bos_token": True}, True),
        ({"model": "llama", "add_bos_token": False}, False),
        ({"model": "llama"}, True),
        ({"model": "gpt2", "pre": "llama-bpe"}, True),
        ({"model": "gpt2", "pre": "qwen2"}, False),
    ],
)
def test_texts_begin_as_the_file_says(tmp_path, said, begins):
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(tmp_path))
    plain = tokenizer("x")["input_ids"]
    metadata = {f"tokenizer.ggml.{name}": SimpleNamespace(contents=lambda one=one: one) for name, one in said.items()}
    for _ in range(2):  # once is enough
        _restore_bos(tokenizer, metadata)
        assert tokenizer("x")["input_ids"] == ([tokenizer.bos_token_id] if begins else []) + plain
