"""What sentence-transformers reads beside a model or adapter: how its vectors are pooled, and that they have length 1.

Its modules have had these names since version 2, and the newest resolve them still.
"""

from __future__ import annotations

import json
from typing import Any

from tunesmith.config.schema import Run

MODULES = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
POOLINGS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def files(run: Run, config: Any) -> dict[str, str]:
    """By their names; none where the run trains no embeddings."""
    if run.objective != "embed":
        return {}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
        for number, (path, name) in enumerate(MODULES.items())
    ]
    chosen = "lasttoken" if run.embedding.pooling == "last" else "mean_tokens"
    pooling = {
        "word_embedding_dimension": config.get_text_config().hidden_size,
        **{f"pooling_mode_{name}": name == chosen for name in POOLINGS},
        "include_prompt": True,
    }
    whole = {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    made = {
        "modules.json": modules,
        "1_Pooling/config.json": pooling,
        "sentence_bert_config.json": {"max_seq_length": run.sequence_length, "do_lower_case": False},
        "config_sentence_transformers.json": whole,
    }
    return {name: json.dumps(value, indent=2) + "\n" for name, value in made.items()}
