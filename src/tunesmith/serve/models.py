"""What is served: one base with several adapters, each by its name, or one model alone.

An adapter is a set of modules that stand in the place of the base's; choosing one exchanges them, which copies nothing.
Adapters come and go while others are used: a request holds the one it asked, which lasts until its answer has ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from tunesmith.data.chat import Encoder
from tunesmith.errors import UserError
from tunesmith.infer.decoding import ASKS_NOTHING, GenerationDefaults, asked_of
from tunesmith.infer.generate import stop_tokens
from tunesmith.model import lora, lora_modules, side_files
from tunesmith.model.structure import replace_module
from tunesmith.run.base import FILE as BASE_FILE
from tunesmith.run.folder import has_result, read_identity, read_json, read_run
from tunesmith.run.open import Opened, open_model, refuse_encoder_decoder, tokenizer_of, trained_storage
from tunesmith.run.there import no_result

BASE = "base"
WRAPPERS = (lora_modules.LoraLinear, lora_modules.LoraEmbedding, lora_modules.TokenRows)


@dataclass(frozen=True, eq=False)
class Served:
    """One name that requests may ask for."""

    name: str
    encoder: Encoder
    reasons: bool
    stop_ids: frozenset[int]
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    """What stands in the place of the base's modules."""
    step: int | None = None
    """Step of the checkpoint it was taken from; None for a finished result."""
    defaults: GenerationDefaults = ASKS_NOTHING
    """What its generation config asks for, where a request does not."""

    def __str__(self) -> str:
        return self.name


class Models:
    """The first of `served` is the run itself. `model` is changed by one thread alone, which decodes."""

    def __init__(self, folder: Path, model: nn.Module, served: Sequence[Served], bases: Mapping[str, nn.Module]):
        self.folder, self.model, self._bases = folder, model, dict(bases)
        self.served = {one.name: one for one in served}
        self.own = served[0]
        self.created = int(time.time())
        self._chosen: Served | None = None
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.context: int | None = context if isinstance(context, int) and context > 0 else None

    def select(self, served: Served) -> None:
        """Put this adapter on the model."""
        if served is self._chosen:
            return
        for place, base in self._bases.items():
            replace_module(self.model, place, served.modules.get(place, base))
        self._chosen = served

    def check_adapter(self, name: str, where: Path) -> None:
        """Before it is read: UserError where it cannot be served here by this name."""
        if name in (*self.served, BASE):
            raise UserError(f"the name {name} is taken; give this adapter another one, or unload that one first.")
        check_same_base(self.folder, where)

    def read_adapter(self, name: str, where: Path) -> Served:
        """Read it; by the thread that decodes. It is not served yet."""
        _put(self.model, self._bases)
        self._chosen = None
        try:
            lora.attach_saved(self.model, where / "adapter")
            lora.keep_lengths(self.model)
            found = {place: module.eval() for place, module in _wrappers(self.model).items()}
        finally:
            for place, module in _wrappers(self.model).items():
                self._bases.setdefault(place, _unwrapped(module))
            _put(self.model, self._bases)
        encoder, reasons = _asked_as(where)
        return _served(name, self.model, encoder, reasons, found, None)

    def add(self, served: Served) -> None:
        if served.name in self.served:
            raise UserError(
                f"the name {served.name} is taken; give this adapter another one, or unload that one first."
            )
        self.served[served.name] = served

    def remove(self, name: str) -> None:
        """From now on there is no such name. Answers under way keep it, and nothing else does."""
        if name in (self.own.name, BASE):
            raise UserError(f"{name} is what this server was started with, and cannot be unloaded.")
        del self.served[name]

    def take_off(self) -> None:
        """Leave the base alone on the model; by the thread that decodes."""
        _put(self.model, self._bases)
        self._chosen = None


def open_models(folder: Path, more: Mapping[str, Path]) -> Models:
    """The run or model in `folder`, by the name of the folder, `base` where that is a base with an adapter, and more
    adapters by their names."""
    name = folder.resolve().name
    _check_names(name, more)
    for other in more.values():
        check_same_base(folder, other)
    refuse_encoder_decoder(folder, "be served here, whose engine is for decoders alone")
    opened = open_model(folder)
    if opened.tuned is not None and opened.tuned.is_prompt:
        raise UserError(f"{folder} trained a prompt, not weights; it can be talked to with `tunesmith chat` alone.")
    modules = _wrappers(opened.model)
    own = _served(name, opened.model, opened.encoder, opened.reasons, modules, opened.step)
    if not modules:
        return Models(folder, opened.model, [own], {})
    models = Models(folder, opened.model, [own], {place: _unwrapped(module) for place, module in modules.items()})
    for other, where in more.items():
        models.add(models.read_adapter(other, where))
    models.take_off()
    if not _has_changed_base(folder, opened):
        models.add(_served(BASE, opened.model, opened.encoder, opened.reasons, {}, None))
    return models


def _served(
    name: str, model: nn.Module, encoder: Encoder, reasons: bool, modules: dict[str, nn.Module], step: int | None
) -> Served:
    return Served(name, encoder, reasons, frozenset(stop_tokens(model, encoder)), modules, step, asked_of(model))


def _check_names(name: str, more: Mapping[str, Path]) -> None:
    for other in more:
        if other in (name, BASE):
            raise UserError(f"--adapter: the name {other} is taken; give this adapter another one.")


def check_same_base(folder: Path, other: Path) -> None:
    """UserError where two runs were trained over different bases, by the hashes of their tensors that training kept."""
    for one in (folder, other):
        if read_identity(one) is None:
            raise UserError(f"{one} is no run, so whether both have the same base is not known.")
        if read_run(one).method not in ("lora", "qlora"):
            raise UserError(f"{one} is of method: {read_run(one).method}; only LoRA adapters can share a base.")
        if not has_result(one, "adapter"):
            raise no_result(one, "finished adapter")
    mine, theirs = _base_of(folder), _base_of(other)
    if mine != theirs:
        raise UserError(f"{other} was trained over another base than {folder}; serve it by a server of its own.")
    if trained_storage(folder) != trained_storage(other):
        raise UserError(
            f"The base of {other} was held in {trained_storage(other)} and that of {folder} in "
            f"{trained_storage(folder)}; serve it by a server of its own."
        )


def _base_of(folder: Path) -> dict[str, Any]:
    kept = read_json(folder / BASE_FILE)
    if not isinstance(kept, dict) or not isinstance(kept.get("tensors"), dict):
        raise UserError(f"{folder} does not say which base it was trained over ({BASE_FILE} is missing).")
    config = {
        key: value
        for key, value in kept.get("config", {}).items()
        if key not in ("_name_or_path", "transformers_version")
    }
    return {"tensors": kept["tensors"], "config": json.dumps(config, sort_keys=True)}


def _asked_as(folder: Path) -> tuple[Encoder, bool]:
    """How the run in `folder` asks, as `open_run` finds it."""
    run = read_run(folder)
    encoder = Encoder(tokenizer_of(folder), template=None, train_on=run.train_on, special_tokens=run.special_tokens)
    return encoder, bool(side_files.read_asked(folder / side_files.FOLDER).get("reasons"))


def _has_changed_base(folder: Path, opened: Opened) -> bool:
    """An unfinished run whose first factors were taken out of the base's weights."""
    if opened.step is None:
        return False
    start = lora.Start.of(read_run(folder), folder)
    return start is not None and start.takes_out


def _wrappers(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost modules that adapt others, by name."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, WRAPPERS) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found


def _unwrapped(module: nn.Module) -> nn.Module:
    while isinstance(module, WRAPPERS):
        module = module.base
    return module


def _put(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    for place, module in modules.items():
        replace_module(model, place, module)
