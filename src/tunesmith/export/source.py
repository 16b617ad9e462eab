"""What is exported: a run's trained model, as all formats see it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tunesmith.config.schema import Run
from tunesmith.data.chat import Encoder
from tunesmith.errors import UserError
from tunesmith.model import load, side_files
from tunesmith.run.folder import read_run
from tunesmith.run.open import tokenizer_of
from tunesmith.run.streamed import Weights, find_weights

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

    @classmethod
    def of(cls, folder: Path) -> Source:
        run = read_run(folder)
        weights = find_weights(folder)
        encoder = Encoder(tokenizer_of(folder), template=None, train_on=run.train_on, special_tokens=run.special_tokens)
        reasons = bool(side_files.read_asked(folder / side_files.FOLDER).get("reasons"))
        return cls(folder, run, weights, encoder, reasons)

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
        return f"{Path(self.run.model).name or self.run.model}, fine-tuned"


def needs(package: str, extra: str) -> None:
    """UserError where a package that writes a format is not installed."""
    if not has(package):
        raise UserError(f"This export needs the package {package}: pip install 'tunesmith[{extra}]'.")


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
