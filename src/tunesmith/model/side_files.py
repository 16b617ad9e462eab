"""All of a result but its weights: configs, tokenizer, chat template, model card.

They are written into the run's folder before the first step, and read back there by transformers' own classes, so that
nothing is left to fail when training is done: the end only copies them beside the weights. What is odd in the base's
own files is mended where that keeps its meaning, else carried as it is, and said.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.config.schema import Run
from tunesmith.errors import UserError, first_line
from tunesmith.model.head import has_head
from tunesmith.model.load import generation_settings, load_skeleton, load_tokenizer, locate, quiet, weights_folder
from tunesmith.model.save import check_ties, whole_folder
from tunesmith.model.sentence import files

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FOLDER = "side_files"
"""In the run's folder."""
ASKED = "tunesmith.json"
"""Among them: how the model was asked in training, for those who ask it later."""
CARD = "README.md"
CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template*", "additional_chat_templates",
)  # fmt: skip
PROCESSORS = "*processor_config.json"
"""What makes pixels of images; a model that sees them is not loaded without, by vLLM and others."""
SAMPLE = "A line of text, 12345 numbers;\n\n  spaces and Ünïcödé 漢字 <tags> {braces}"


def make(run: Run, folder: Path, *, template: Any, ends: Iterable[int], texts: Mapping[str, str]) -> list[str]:
    """Write them all into `folder`, read them back, and say what was mended.

    `template` is the chat template of training, `ends` are the tokens that end turns there; `texts` are files besides,
    by name.
    """
    try:
        with whole_folder(folder) as partial, quiet():
            base, model = weights_folder(locate(run.model)), load_skeleton(run)
            if not run.gives_adapter:
                check_ties(model)
            settings, said = generation_settings(base, model)
            said += _write_config(run, model, base, partial)
            _write_generation(settings, partial, sorted(ends))
            for file in base.glob(PROCESSORS):
                shutil.copyfile(file, partial / file.name)
            said += _write_tokenizer(run, base, partial, template)
            for name, text in {**texts, **files(run, model.config)}.items():
                (partial / name).parent.mkdir(exist_ok=True)
                (partial / name).write_text(text, encoding="utf-8")
            for file in partial.glob("*.safetensors*"):
                file.unlink()
            return said
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written: {error.strerror or error}; make room there or choose another output."
        ) from error


def put_beside(side: Path, folder: Path, *, dtype: torch.dtype | None = None, card: str | None = None) -> None:
    """Copy the side files beside weights of this precision; beside an adapter, which has no config, without one."""
    for file in sorted(side.iterdir()):
        if file.is_dir():
            shutil.copytree(file, folder / file.name, dirs_exist_ok=True)
        elif file.name != CONFIG or dtype is not None:
            shutil.copyfile(file, folder / file.name)
    if dtype is not None:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        _set_dtype(config, str(dtype).removeprefix("torch."))
        _write_json(folder / CONFIG, config)
    if card is not None:
        (folder / CARD).write_text(card, encoding="utf-8")


def read_asked(folder: Path) -> dict[str, Any]:
    """How the model whose side files are in `folder` was asked in training; empty where nobody wrote it down."""
    try:
        found = json.loads((folder / ASKED).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


# The parts


def _write_config(run: Run, model: PreTrainedModel, base: Path, folder: Path) -> list[str]:
    from transformers import AutoConfig, GenerationConfig

    said = []
    try:
        model.generation_config = GenerationConfig()  # written apart
        model.save_pretrained(folder, state_dict={})
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except _ODD as error:
        said.append(
            f"the base's {CONFIG} is carried as it is, since transformers cannot write it: {first_line(error)}."
        )
        config = json.loads((base / CONFIG).read_text(encoding="utf-8"))
        config["architectures"] = [type(model).__name__]
    config.pop("quantization_config", None)  # weights are written as they are trained
    _write_json(folder / CONFIG, config)
    try:
        AutoConfig.from_pretrained(folder, trust_remote_code=run.trust_remote_code)
    except _ODD as error:
        raise UserError(
            f"model: the config of {run.model} cannot be saved so that transformers reads it again: "
            f"{first_line(error)}; mend the model's {CONFIG}."
        ) from error
    return said


def _write_generation(settings: dict[str, Any], folder: Path, ends: list[int]) -> None:
    """With the base's stop tokens and those that were trained. Of a model that copies it from its config, no more."""
    from transformers import GenerationConfig

    named = settings.get("eos_token_id")
    named = [end for end in (named if isinstance(named, list) else [named]) if isinstance(end, int)]
    stops = [*named, *(end for end in ends if end not in named)]
    settings = {name: value for name, value in settings.items() if name != "_from_model_config"}
    if stops:
        settings["eos_token_id"] = stops[0] if len(stops) == 1 else stops
    _write_json(folder / GENERATION, settings)
    GenerationConfig.from_pretrained(folder).validate(strict=True)


def _write_tokenizer(run: Run, base: Path, folder: Path, template: Any) -> list[str]:
    is_plain = run.chat_template is None and not run.trust_remote_code and _names_its_class(base)
    is_asked_in_batches = run.objective == "embed" or has_head(run)
    tokenizer = None if is_plain and not is_asked_in_batches else load_tokenizer(run)
    needs_padding = tokenizer is not None and is_asked_in_batches and tokenizer.pad_token is None
    if is_plain and not needs_padding:
        _copy_tokenizer(base, folder)  # as they were just read; to save and read large ones again takes seconds
        return []
    assert tokenizer is not None
    if needs_padding:  # transformers and sentence-transformers pad with it, behind texts, where nobody looks
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = template
    reason = _saved_tokenizer(tokenizer, folder, run)
    if reason is None:
        return []
    for file in [file for pattern in TOKENIZER_FILES for file in folder.glob(pattern)]:
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    _copy_tokenizer(base, folder)
    if isinstance(template, str):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    second = _difference(tokenizer, folder, run)
    if second is not None:
        raise UserError(
            f"model: the tokenizer of {run.model} cannot be saved so that it reads back the same: {second}."
        )
    return [f"the tokenizer's files are carried as they are, since saved by transformers they differ: {reason}."]


def _names_its_class(base: Path) -> bool:
    """Whether its files are all that transformers needs to read the tokenizer. Where they do not name the class, it
    goes by the model's config, which adapters do not have."""
    try:
        settings = json.loads((base / "tokenizer_config.json").read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return False
    return (base / "tokenizer.json").is_file() and isinstance(settings, dict) and bool(settings.get("tokenizer_class"))


def _copy_tokenizer(base: Path, folder: Path) -> None:
    for file in {file for pattern in TOKENIZER_FILES for file in base.glob(pattern)}:
        if file.is_dir():
            shutil.copytree(file, folder / file.name)
        else:
            shutil.copyfile(file, folder / file.name)


def _saved_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, run: Run) -> str | None:
    """Save it; the reason where it does not read back as it is."""
    try:
        tokenizer.save_pretrained(folder)
    except _ODD as error:
        return first_line(error)
    return _difference(tokenizer, folder, run)


def _difference(tokenizer: PreTrainedTokenizerBase, folder: Path, run: Run) -> str | None:
    try:
        found = load_tokenizer(run.model_copy(update={"model": str(folder)}))
    except (UserError, *_ODD) as error:
        return first_line(error)
    text = SAMPLE + "".join(tokenizer.all_special_tokens)
    if found(text)["input_ids"] != tokenizer(text)["input_ids"]:
        return "the same text becomes other tokens"
    if found.chat_template != tokenizer.chat_template:
        return "the chat template is another one"
    if found.eos_token_id != tokenizer.eos_token_id:
        return "the end-of-text token is another one"
    return None


_ODD = (ValueError, TypeError, KeyError, AttributeError, NotImplementedError, ImportError, OSError, RuntimeError)
"""What transformers raises for files that it does not like."""


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """That of the weights that were written, in the config and in those of its parts that name one."""
    config["dtype"] = dtype
    config.pop("torch_dtype", None)
    for part in config.values():
        if isinstance(part, dict) and ("dtype" in part or "torch_dtype" in part):
            _set_dtype(part, dtype)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
