"""New tokens: a base whose vocabulary has grown, made once in the run's folder.

`runs/NAME/grown_base` is a model folder like any other: config, tokenizer with the new tokens, and files in which the
embedding and the output head have rows for them, in a number that tensor cores like. What holds neither is linked, not
copied. From then on it is the run's model, and an adapter says that it belongs to it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.config.schema import Run
from tunesmith.disk import expanded
from tunesmith.errors import UserError
from tunesmith.model import load
from tunesmith.model.headers import read_headers
from tunesmith.model.save import whole_folder
from tunesmith.model.source import names_in_model

if TYPE_CHECKING:
    import torch

FOLDER, NEW = "grown_base", "new_tokens.json"
MULTIPLE = 64
"""Of which the vocabulary is made: what tensor cores like."""


def grown(run: Run) -> Run:
    """The run over its base with the new tokens, which is made where it is not there yet; the run itself where it has
    none. The data may write the new tokens out."""
    if not run.new_tokens or Path(run.model).name == FOLDER:
        return run
    folder = expanded(run.output).resolve() / FOLDER
    wanted = {"tokens": list(run.new_tokens), "base": load.model_fingerprint(run)}
    made = _read(folder)
    if any(made.get(key) != value for key, value in wanted.items()):
        _make(run, folder, wanted)
    meant = [*run.special_tokens, *(token for token in run.new_tokens if token not in run.special_tokens)]
    return run.model_copy(update={"model": str(folder), "special_tokens": meant})


def new_ids(run: Run) -> list[int]:
    """The tokens that were added to the run's model."""
    return sorted(_read(Path(run.model))["ids"]) if run.new_tokens else []


def _read(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / NEW).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _make(run: Run, folder: Path, wanted: dict[str, Any]) -> None:
    tokenizer, skeleton = load.load_tokenizer(run), load.load_skeleton(run)
    before, vocabulary = load.vocabulary_size(skeleton.config), tokenizer.get_vocab()
    # A tokenizer may have got tokens that its model never had embeddings for.
    known = [token for token in run.new_tokens if vocabulary.get(token, before) < before]
    if known:
        raise UserError(
            f"new_tokens: the tokenizer has {known[0]} already; leave it out, or name it in special_tokens."
        )
    if len(set(run.new_tokens)) < len(run.new_tokens):
        raise UserError("new_tokens: a token is named twice.")
    tokenizer.add_tokens(list(run.new_tokens), special_tokens=True)
    ids = [int(tokenizer.convert_tokens_to_ids(token)) for token in run.new_tokens]
    size = -(-max(before, *(number + 1 for number in tokenizer.get_vocab().values())) // MULTIPLE) * MULTIPLE
    base = load.weights_folder(load.locate(run.model))
    with whole_folder(folder) as partial, load.quiet():
        for file in base.iterdir():
            if file.is_file() and file.suffix not in (".safetensors", ".bin", ".gguf", ".pt", ".pth"):
                shutil.copyfile(file, partial / file.name)
        _grow_files(run, base, partial, skeleton, ids, before, size)
        config = json.loads((base / "config.json").read_text(encoding="utf-8"))
        for part in (config, *(one for one in config.values() if isinstance(one, dict))):
            if part.get("vocab_size") == before:
                part["vocab_size"] = size
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        tokenizer.save_pretrained(partial)
        (partial / NEW).write_text(json.dumps({**wanted, "ids": ids, "rows": size}) + "\n", encoding="utf-8")


def _ends(skeleton: Any) -> set[str]:
    """Names of the weights, and biases, with a row for each token."""
    ends = [skeleton.get_input_embeddings(), skeleton.get_output_embeddings()]
    return {
        f"{name}.{leaf}"
        for name, module in skeleton.named_modules()
        if any(module is end for end in ends)
        for leaf, _ in module.named_parameters(recurse=False)
    }


def _grow_files(run: Run, base: Path, folder: Path, skeleton: Any, ids: list[int], before: int, size: int) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    names = names_in_model(skeleton, read_headers(base))
    ends, found = _ends(skeleton), 0
    for file in sorted(base.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            mine = [key for key in opened.keys() if names.get(key) in ends]  # noqa: SIM118  (no mapping)
            metadata = opened.metadata()
        if not mine:
            (folder / file.name).symlink_to(file.resolve())
            continue
        tensors = load_file(file)
        for key in mine:
            if tensors[key].shape[0] != before or not tensors[key].is_floating_point():
                raise UserError(f"new_tokens: {key} in {file.name} has other rows than tokens, and cannot be grown.")
            tensors[key] = _more_rows(tensors[key], ids, size)
        found += len(mine)
        save_file(tensors, folder / file.name, metadata=metadata or {"format": "pt"})
    if not found:
        raise UserError(
            f"new_tokens: the files of {run.model} hold no embedding under the name that the model gives it."
        )


def _more_rows(weight: torch.Tensor, ids: list[int], size: int) -> torch.Tensor:
    """With rows for all tokens; those of new tokens, and of none, begin as the mean of the others."""
    import torch

    old = torch.ones(weight.shape[0], dtype=torch.bool)
    old[[one for one in ids if one < weight.shape[0]]] = False
    mean = weight[old].float().mean(0).to(weight.dtype)
    made = mean.expand(size, *weight.shape[1:]).clone()
    made[: weight.shape[0]][old] = weight[old]
    return made
