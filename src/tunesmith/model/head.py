"""A head of its own for objectives that score documents or words: transformers' form of the model for classification.

The model is built as that class, so that what is saved loads in plain transformers; its weights are the base's, but for
the head, which is drawn once into the run's folder and read from there like any other tensor. What calls models asks
for their output embeddings: here that is the new head.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.errors import UserError
from tunesmith.plan.models import language_model_class

if TYPE_CHECKING:
    from torch import nn

    from tunesmith.config.schema import Run

FOLDER = "head"
"""In the run's folder."""
FILE = "model.safetensors"
NAMES = {"TokenClassification": "token classification", "SequenceClassification": "sequence classification"}
TASKS = {"TokenClassification": "TOKEN_CLS", "SequenceClassification": "SEQ_CLS"}
"""In peft."""


def has_head(run: Run) -> bool:
    return run.objective in ("reward", "classify", "classify_tokens")


def form(run: Run) -> str:
    """The form of models with such a head, in the names that transformers gives its classes."""
    return "TokenClassification" if run.objective == "classify_tokens" else "SequenceClassification"


def set_labels(config: Any, run: Run, padding: int | None) -> None:
    """Have the config describe the head, and the token that fills documents up."""
    config.num_labels = max(1, len(run.labels))
    if run.labels:
        config.id2label = dict(enumerate(run.labels))
        config.label2id = {name: number for number, name in enumerate(run.labels)}
        if run.objective == "classify":
            config.problem_type = "single_label_classification"
    elif run.objective == "reward":
        config.id2label, config.label2id, config.problem_type = {0: "reward"}, {"reward": 0}, "regression"
    config.pad_token_id = config.get_text_config().pad_token_id = padding


def model_class(run: Run, config: Any) -> Any:
    import transformers

    return getattr(transformers, f"AutoModelFor{form(run)}") if has_head(run) else language_model_class(config)


def build(run: Run, config: Any, **options: Any) -> Any:
    """The model without its weights, with the head that the run's objective needs as its output embeddings."""
    if not has_head(run):
        return model_class(run, config).from_config(config, **options)
    try:
        model = model_class(run, config).from_config(config, **options)
    except ValueError as error:
        raise UserError(
            f"objective: {run.objective} needs a form for {NAMES[form(run)]}, which transformers has not for "
            f"{config.model_type} models; choose another model."
        ) from error
    name = head_name(model)
    model.head_files = Path(run.output) / FOLDER / FILE
    model.head_task = TASKS[form(run)]
    model.get_output_embeddings = lambda: model.get_submodule(name)
    return model


def head_name(model: nn.Module) -> str:
    from torch import nn

    found = [name for name, module in model.named_children() if isinstance(module, nn.Linear)]
    if len(found) != 1:
        raise UserError(f"{type(model).__name__} has no single linear head to train; choose another model.")
    return found[0]


def is_headed(model: nn.Module) -> bool:
    return hasattr(model, "head_files")


def make_head(run: Run, skeleton: nn.Module) -> None:
    """Draw the head into the run's folder: the same one for the same seed."""
    import torch
    from safetensors.torch import save_file

    name = head_name(skeleton)
    generator = torch.Generator().manual_seed(run.seed)
    spread = float(getattr(skeleton.config.get_text_config(), "initializer_range", 0.02))
    tensors = {}
    for leaf, weight in skeleton.get_submodule(name).named_parameters():
        drawn = (
            spread * torch.randn(weight.shape, generator=generator) if weight.ndim > 1 else torch.zeros(weight.shape)
        )
        tensors[f"{name}.{leaf}"] = drawn
    file = Path(run.output) / FOLDER / FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file, metadata={"format": "pt"})
