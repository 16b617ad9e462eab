"""What sentence-transformers says of the cases in `embedding_cases.py`, written into
tests/objectives/sentence_transformers.json when this is run."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

import embedding_cases as cases
from tiny_model import make_tiny_model

FILE = Path(__file__).parent / "objectives" / "sentence_transformers.json"
COUNT = 24


def found(name: str, folder: Path) -> dict[str, Any]:
    """Loss and gradients of one batch of all records."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import (
        CosineSimilarityLoss,
        MatryoshkaLoss,
        MultipleNegativesRankingLoss,
    )
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    case = cases.CASES[name]
    mode = "lasttoken" if case["pooling"] == "last" else "mean"
    with tempfile.TemporaryDirectory() as made:  # it would write texts as turns of a chat where there is a template
        plain = shutil.copytree(folder, Path(made) / "plain", ignore=shutil.ignore_patterns("chat_template*"))
        transformer = Transformer(str(plain))
    assert transformer.tokenizer.chat_template is None
    model = SentenceTransformer(modules=[transformer, Pooling(32, pooling_mode=mode)], device="cpu")
    model.float().train()
    labels = torch.tensor([one.get("score", 0.0) for one in cases.records(case["kind"], COUNT)])
    if case["kind"] == "scores":
        loss: Any = CosineSimilarityLoss(model)
    else:
        loss = MultipleNegativesRankingLoss(model, scale=1 / case.get("temperature", 0.05))
    if "matryoshka" in case:
        loss = MatryoshkaLoss(model, loss, [32, *case["matryoshka"]])
    value = loss([model.preprocess(texts) for texts in cases.columns(case["kind"], COUNT)], labels)
    value.backward()
    inner = transformer.auto_model
    gradients = {f"model.{one}": weight.grad for one, weight in inner.named_parameters() if weight.grad is not None}
    return {"loss": value.item(), "gradients": cases.told(gradients)}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        tiny = make_tiny_model(Path(made) / "tiny")
        FILE.write_text(json.dumps({name: found(name, tiny) for name in cases.CASES}, indent=1) + "\n")
