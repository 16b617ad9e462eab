"""A GGUF file becomes a model folder that others read, too."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM

from tiny_model import make_tiny_model
from tunesmith.model.gguf import each_once


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_weight_is_kept_once_as_the_embedding(tmp_path, tied):
    """vLLM looks for it there, and answers with numbers of its own where the file has the head alone."""
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path, tie_word_embeddings=tied))
    names = set(model.state_dict())
    assert "lm_head.weight" in names
    assert each_once(model).keys() == (names - {"lm_head.weight"} if tied else names)
