"""An adapter that exists, to be trained on: what its files say of it becomes the run's settings.

Only names, shapes and numbers are read here, without torch. Whether it fits the model is found when it is put on it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

from tunesmith.config.schema import Run
from tunesmith.disk import expanded
from tunesmith.errors import UserError, listed

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FACTORS = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector", "lora_embedding_A", "lora_embedding_B")
OF_PEFT = (
    "rank_pattern", "alpha_pattern", "modules_to_save", "trainable_token_indices", "target_parameters", "lora_bias",
    "layer_replication", "alora_invocation_tokens", "exclude_modules",
)  # fmt: skip
"""Fields of peft's LoRA, beyond ours, that change what its adapters compute."""
CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations of peft's that take something out of the base, unless the adapter is converted when it is saved."""
LARGEST_HEADER = 100 * 2**20


def with_adapter(run: Run) -> Run:
    """The run with the settings of the adapter that it trains on; UserError where they cannot be had or contradict."""
    if run.adapter is None:
        return run
    if not run.adapter.isprintable():
        raise UserError(f"adapter: {run.adapter!r} has characters that no folder's name should have.")
    folder = expanded(run.adapter)
    config = _read_config(folder)
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(CHANGE_THE_BASE):
        raise UserError(
            f"adapter: the adapter in {folder} belongs to a base that `init_lora_weights: {init}` has changed, and not "
            "to the model as it is; save it by peft with `path_initial_model_for_weight_conversion`."
        )
    if run.method == "peft":
        return run.model_copy(update={"peft": _same_peft(run, folder, config)})
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UserError(f"adapter: the adapter in {folder} is of type {kind}; use method: peft for it.")
    more = [name for name in OF_PEFT if config.get(name)]
    more += ["bias"] if config.get("bias", "none") != "none" else []
    if more:
        raise UserError(f"adapter: the adapter in {folder} uses {listed(more)}; use method: peft for it.")
    rank, alpha, names = config.get("r"), config.get("lora_alpha"), _names(folder)
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1 or alpha <= 0:
        raise UserError(f"adapter: {folder / CONFIG} has no rank and alpha (r, lora_alpha) that make sense.")
    some_layers = config.get("layers_to_transform") is not None
    theirs: dict[str, Any] = {
        "rank": rank,
        "alpha": float(alpha),
        "rank_stabilised": bool(config.get("use_rslora")),
        "dora": bool(config.get("use_dora")),
        "targets": names if some_layers else _shortest(names, config.get("target_modules")),
        "layers": None,
    }
    for name, value in theirs.items():
        mine = getattr(run.lora, name)
        if name in run.lora.model_fields_set and mine != value and not (name == "targets" and mine == "all-linear"):
            raise UserError(
                f"lora.{name} is {json.dumps(mine)}, but the adapter in {folder} has {json.dumps(value)}; leave it out."
            )
    dropout = config.get("lora_dropout")
    if "dropout" not in run.lora.model_fields_set and isinstance(dropout, int | float) and 0 <= dropout < 1:
        theirs["dropout"] = float(dropout)
    return run.model_copy(update={"lora": run.lora.model_copy(update=theirs)})


def _same_peft(run: Run, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    for name, value in run.peft.items():
        if name in config and config[name] != value:
            raise UserError(
                f"peft.{name} is {json.dumps(value)}, but the adapter in {folder} has {json.dumps(config[name])}; "
                "leave it out."
            )
    return {"peft_type": config.get("peft_type"), **run.peft}


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        inner = folder / "adapter"  # of a run
        hint = f": there is no {CONFIG}"
        if (inner / CONFIG).exists():
            hint = f"; give {inner}"
        elif not folder.exists() and folder.name in get_args(Run.model_fields["method"].annotation):
            hint = f"; the way of training is the setting `method: {folder.name}`"
        raise UserError(f"adapter: {folder} holds no adapter{hint}.") from error
    except (OSError, ValueError) as error:
        raise UserError(f"adapter: {folder / CONFIG} cannot be read: {error}.") from error
    if not isinstance(found, dict):
        raise UserError(f"adapter: {folder / CONFIG} is no JSON object.")
    return found


def _names(folder: Path) -> list[str]:
    """The linears that carry the adapters, by the header of their file."""
    try:
        with (folder / WEIGHTS).open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if 0 < size <= LARGEST_HEADER else None
        assert isinstance(header, dict)
    except FileNotFoundError as error:
        raise UserError(f"adapter: {folder} holds no {WEIGHTS}; save it with safetensors.") from error
    except (OSError, ValueError, AssertionError) as error:
        raise UserError(f"adapter: {folder / WEIGHTS} is no safetensors file, or damaged.") from error
    keys = [key for key in header if key != "__metadata__"]
    strange = [key for key in keys if not key.endswith(FACTORS)]
    if strange or not keys:
        held = f"holds {strange[0]}, which is no factor of a linear" if strange else "is empty"
        raise UserError(f"adapter: {folder / WEIGHTS} {held}; use method: peft for it.")
    return sorted({re.sub(r"\.lora_[^.]+(\.weight)?$", "", key.removeprefix("base_model.model.")) for key in keys})


def _shortest(names: list[str], modules: object) -> list[str]:
    """Names of the adapted modules as peft shortens them, where that is a list of words, each the end of a name; else
    all of them."""
    if isinstance(modules, list) and all(isinstance(word, str) for word in modules):
        words = sorted(modules)
        layers = {re.sub(r"\.\d+\.", ".#.", name) for name in names}
        per_layer = {kind: sum(re.sub(r"\.\d+\.", ".#.", name) == kind for name in names) for kind in layers}
        covers = all(any(name == word or name.endswith(f".{word}") for word in words) for name in names)
        if covers and len(set(per_layer.values())) <= 1:
            return words
    return names
