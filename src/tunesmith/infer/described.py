"""What a result's side files say of how the model was asked in training, from the encoder that asked it."""

from __future__ import annotations

import json
from typing import Any

import torch
import transformers

from tunesmith import __version__
from tunesmith.config.schema import Run
from tunesmith.data.chat import TEMPLATE_DATE, Encoder
from tunesmith.data.paired import PairEncoder
from tunesmith.data.prepare import unique
from tunesmith.model.card import CAUSAL, PAIRED, Facts, card
from tunesmith.model.load import load_config
from tunesmith.model.side_files import ASKED, CARD
from tunesmith.plan.models import language_model_class


def versions() -> dict[str, str]:
    return {"tunesmith": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def facts_of(run: Run, encoder: Encoder, *, reasons: bool, loaded_by: str | None) -> Facts:
    """What is known before the first step. `loaded_by`: transformers' class, as `beside` wrote it down, if it did."""
    return Facts(
        data=unique([dataset.title for dataset in run.data]),
        versions=versions(),
        ends=[str(encoder.tokenizer.convert_ids_to_tokens(end)) for end in sorted(encoder.end_ids)],
        notes=_notes(encoder, reasons),
        loaded_by=loaded_by or (PAIRED if isinstance(encoder, PairEncoder) else CAUSAL),
        has_template=encoder.has_template,
    )


def beside(run: Run, encoder: Encoder, *, reasons: bool) -> dict[str, Any]:
    """For `side_files.make`: template, stop tokens, and the files that only we write."""
    loaded_by = language_model_class(load_config(run)).__name__
    asked = {"train_on": run.train_on, "reasons": reasons, "special_tokens": list(run.special_tokens)}
    asked |= {"loaded_by": loaded_by} if loaded_by != CAUSAL else {}
    texts = {
        CARD: card(run, facts_of(run, encoder, reasons=reasons, loaded_by=loaded_by)),
        ASKED: json.dumps(asked, indent=2) + "\n",
    }
    return {"template": encoder.template, "ends": encoder.end_ids, "texts": texts}


def _notes(encoder: Encoder, reasons: bool) -> list[str]:
    """Where transformers' own way of asking is not the one of training."""
    found = []
    if not encoder.has_template:
        return ["It has no chat template: give it plain text, as in training."]
    mode = encoder.mode_of(reasons)
    if mode:
        asked = ", ".join(f"{name}={value}" for name, value in mode.items())
        found.append(f"It was trained on answers in one mode of its chat template: give `apply_chat_template` {asked}.")
    if encoder.wants_parts:
        found.append('Its chat template wants contents as parts: `[{"type": "text", "text": "..."}]`.')
    if encoder.folds_system:
        found.append("Its chat template has no system role: put a system message and two newlines before the question.")
    if encoder.writes_date:
        found.append(f"Its chat template writes today's date; in training that was {TEMPLATE_DATE:%d %b %Y}.")
    return found
