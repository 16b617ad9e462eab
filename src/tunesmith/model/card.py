"""The model card: what a trained model is, in words that the next person needs, and nothing that changes by itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunesmith.config.schema import Run
from tunesmith.model.head import form, has_head

LEFT_OUT = frozenset(
    {
        "model", "method", "data", "eval", "output", "chat_template", "keep", "save_every", "eval_every", "max_minutes",
        "device", "deterministic", "trust_remote_code", "profile_steps",
    }
)  # fmt: skip
"""Settings that the card says otherwise, or that say nothing of the model."""


CAUSAL, PAIRED = "AutoModelForCausalLM", "AutoModelForSeq2SeqLM"


@dataclass(frozen=True)
class Facts:
    """What a card says besides the settings."""

    data: Sequence[str]
    """Titles of the training data sets."""
    versions: Mapping[str, str]
    ends: Sequence[str] = ()
    """Tokens that end the model's turns."""
    steps: int | None = None
    before: float | None = None
    """Held-out loss before training, where it is known; and after it."""
    after: float | None = None
    is_merged: bool = False
    notes: Sequence[str] = field(default=())
    """How it must be asked to answer as it was trained to."""
    usage: Sequence[str] | None = None
    """How it is run, where that is not by transformers or peft."""
    licence: str | None = None
    """Of the base, as its card calls it."""
    is_trained: bool = True
    """By a run of ours; else it was only quantized."""
    loaded_by: str = CAUSAL
    """transformers' class for models of this config."""
    has_template: bool = True


def card(run: Run, facts: Facts) -> str:
    is_adapter = run.gives_adapter and not facts.is_merged
    base = Path(run.model).name or run.model
    kind = {"lora": "a LoRA adapter", "qlora": "a LoRA adapter, trained over a quantized base"}.get(
        run.method, "a model"
    )
    if run.method == "peft":
        kind = f"an adapter of the peft library ({run.peft.get('peft_type')})"
    if facts.is_merged:
        kind = f"a model, {'a LoRA' if run.has_lora else 'an'} adapter merged into its base"
    front = {
        "library_name": _LIBRARIES.get(run.objective, "peft" if is_adapter else "transformers"),
        "pipeline_tag": "text2text-generation"
        if facts.loaded_by == PAIRED
        else _PIPELINES.get(run.objective, "text-generation"),
        "tags": ["tunesmith", *([run.method] if facts.is_trained else [])],
    }
    if facts.licence:
        front["license"] = facts.licence
    if not Path(run.model).exists():
        front["base_model"] = run.model
    lines = ["---", *(f"{name}: {json.dumps(value)}" for name, value in front.items()), "---", ""]
    done = "fine-tuned" if facts.is_trained else "quantized"
    lines += [f"# {base}, {done}", "", f"This is {kind}, made with Tunesmith.", ""]
    rows: list[tuple[str, Any]] = [("base", base)]
    rows += [("method", run.method), ("data", ", ".join(facts.data))] if facts.is_trained else []
    rows += [("steps", facts.steps)] if facts.steps is not None else []
    if facts.before is not None:
        rows.append(("held-out loss before training", f"{facts.before:.4f}"))
    if facts.after is not None:
        rows.append(("held-out loss after training", f"{facts.after:.4f}"))
    rows += [("versions", ", ".join(f"{name} {version}" for name, version in facts.versions.items()))]
    lines += ["| | |", "| --- | --- |", *(f"| {name} | {_cell(value)} |" for name, value in rows), ""]
    is_headed = has_head(run)
    code = _scoring(run, is_adapter) if is_headed else _writing(run, facts.loaded_by, is_adapter)
    if run.objective == "embed":
        code = _EMBEDDING
    if facts.loaded_by == PAIRED:
        code = _paired(is_adapter, facts.has_template)
    usage = ["```python", *code, "```"] if facts.usage is None else facts.usage
    lines += ["## How to use it", "", *usage, ""]
    ends = "" if is_headed or run.objective == "embed" else ", ".join(f"`{token}`" for token in facts.ends)
    notes = [*([f"Its answers end with {ends}."] if ends else []), *facts.notes]
    lines += [*(f"- {note}" for note in notes), ""]
    if not facts.is_trained:
        return "\n".join(lines)
    settings = run.model_dump(mode="json", exclude_defaults=True, exclude=set(LEFT_OUT))
    lines += ["## Settings", "", "```json", json.dumps(settings, indent=2, sort_keys=True), "```", ""]
    return "\n".join(lines)


_LIBRARIES = {"embed": "sentence-transformers"}
_PIPELINES = {
    "reward": "text-classification",
    "classify": "text-classification",
    "classify_tokens": "token-classification",
    "embed": "sentence-similarity",
}
_EMBEDDING = (
    "from sentence_transformers import SentenceTransformer",
    "",
    'model = SentenceTransformer(".")  # this folder',
    'vectors = model.encode(["...", "..."])',
    "print(model.similarity(vectors, vectors))",
)
_COMMON = (
    'messages = [{"role": "user", "content": "..."}]',
    "asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)",
    'inputs = tokenizer(asked, add_special_tokens=False, return_tensors="pt")',
    "generation = GenerationConfig.from_pretrained(folder)  # with the tokens that end its turns",
    "generation.max_new_tokens = 256",
    "print(tokenizer.decode(model.generate(**inputs, generation_config=generation)[0]))",
)
_ADAPTER = (
    "from peft import AutoPeftModelForCausalLM",
    "from transformers import AutoTokenizer, GenerationConfig",
    "",
    'folder = "."  # this one',
    "tokenizer = AutoTokenizer.from_pretrained(folder)",
    "model = AutoPeftModelForCausalLM.from_pretrained(folder)",
    *_COMMON,
)


def _writing(run: Run, loaded_by: str, is_adapter: bool) -> tuple[str, ...]:
    """How a model that writes text is asked. peft has no class of its own for those that see images besides."""
    if is_adapter and loaded_by == CAUSAL:
        return _ADAPTER
    loaded = (f"model = {loaded_by}.from_pretrained(folder)",)
    if is_adapter:
        base = f"base = {loaded_by}.from_pretrained({json.dumps(run.model)})"
        loaded = (base, "model = PeftModel.from_pretrained(base, folder)")
    return (
        *(("from peft import PeftModel",) if is_adapter else ()),
        f"from transformers import {loaded_by}, AutoTokenizer, GenerationConfig",
        "",
        'folder = "."  # this one',
        "tokenizer = AutoTokenizer.from_pretrained(folder)",
        *loaded,
        *_COMMON,
    )


def _paired(is_adapter: bool, has_template: bool) -> tuple[str, ...]:
    """How an encoder-decoder is asked."""
    name = "AutoPeftModelForSeq2SeqLM" if is_adapter else PAIRED
    asked = ('inputs = tokenizer("...", return_tensors="pt")',)
    return (
        *((f"from peft import {name}",) if is_adapter else ()),
        f"from transformers import {'' if is_adapter else name + ', '}AutoTokenizer, GenerationConfig",
        "",
        'folder = "."  # this one',
        "tokenizer = AutoTokenizer.from_pretrained(folder)",
        f"model = {name}.from_pretrained(folder)",
        *(_COMMON[:3] if has_template else asked),
        *_COMMON[3:5],
        "answer = model.generate(**inputs, generation_config=generation)[0]",
        "print(tokenizer.decode(answer, skip_special_tokens=True))",
    )


def _scoring(run: Run, is_adapter: bool) -> tuple[str, ...]:
    """How a model with a head of its own is asked."""
    loaded_by = f"AutoModelFor{form(run)}"
    loaded = (f"model = {loaded_by}.from_pretrained(folder)",)
    if is_adapter:
        base, labels = json.dumps(run.model), max(1, len(run.labels))
        loaded = (
            f"base = {loaded_by}.from_pretrained({base}, num_labels={labels})",
            "padding = tokenizer.pad_token_id",
            "base.config.pad_token_id = tokenizer.eos_token_id if padding is None else padding",
            "model = PeftModel.from_pretrained(base, folder)",
        )
    return (
        *(("from peft import PeftModel",) if is_adapter else ()),
        f"from transformers import {loaded_by}, AutoTokenizer",
        "",
        'folder = "."  # this one',
        "tokenizer = AutoTokenizer.from_pretrained(folder)",
        *loaded,
        'print(model(**tokenizer("...", return_tensors="pt")).logits)',
    )


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
