"""What is exported: a run's trained model, as all formats see it."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tunesmith.config.schema import Run
from tunesmith.data.chat import Encoder
from tunesmith.errors import UserError
from tunesmith.infer.described import beside
from tunesmith.model import load, side_files
from tunesmith.plan.models import check_kind, read_config
from tunesmith.run.folder import read_run
from tunesmith.run.open import tokenizer_of
from tunesmith.run.streamed import Weights, find_weights, weights_of_model

Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class Source:
    folder: Path
    """Of the run."""
    run: Run
    weights: Weights
    encoder: Encoder
    """What asks the model as in training."""
    reasons: bool
    """The answers it was trained on begin with reasoning."""
    is_trained: bool = True
    """By a run of ours."""

    @classmethod
    def of(cls, folder: Path) -> Source:
        run = read_run(folder)
        weights = find_weights(folder)
        encoder = Encoder(tokenizer_of(folder), template=None, train_on=run.train_on, special_tokens=run.special_tokens)
        reasons = bool(side_files.read_asked(folder / side_files.FOLDER).get("reasons"))
        return cls(folder, run, weights, encoder, reasons)

    @classmethod
    @contextmanager
    def of_model(cls, model: str, data: Sequence[str] = ()) -> Iterator[Source]:
        """Of a model that no run has trained: a folder, a .gguf file or a name on the hub. For this time it has a
        folder with all that lies beside weights."""
        check_kind(model, read_config(model), "quantized")
        run = Run(model=model, method="full", data=[{"path": path} for path in data or (model,)])
        asked = side_files.read_asked(Path(model))
        given = {"train_on": asked.get("train_on", run.train_on), "special_tokens": asked.get("special_tokens", [])}
        run = run.model_copy(update=given)
        encoder = Encoder(load.load_tokenizer(run), template=None, **given)
        reasons = bool(asked.get("reasons"))
        with tempfile.TemporaryDirectory(prefix="tunesmith-") as folder:
            side_files.make(run, Path(folder) / side_files.FOLDER, **beside(run, encoder, reasons=reasons))
            yield cls(Path(folder), run, weights_of_model(run, Path(folder)), encoder, reasons, is_trained=False)

    @property
    def tokenizer(self) -> Any:
        return self.encoder.tokenizer

    @cached_property
    def ends(self) -> list[int]:
        """Tokens that end the model's turns."""
        return sorted(self.encoder.end_ids)

    @property
    def vocabulary(self) -> int:
        return load.vocabulary_size(self.weights.model.config)

    @property
    def title(self) -> str:
        name = Path(self.run.model).name or self.run.model
        return f"{name}, fine-tuned" if self.is_trained else name


def needs(package: str, extra: str) -> None:
    """UserError where a package that writes a format is not installed."""
    if not has(package):
        raise UserError(f"This export needs the package {package}: pip install 'tunesmith[{extra}]'.")


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
