"""Low-rank adapters on a model: which linears get them, putting them on and merging them, and PEFT's file layout.

`attach` replaces each chosen linear by a `lora_modules.LoraLinear`. Files are those of the `peft` library, so either
side loads what the other wrote. Biases and fully trained extra modules of other tools' adapters are refused by name
when loading, not ignored.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tunesmith.config.schema import Lora, Run
from tunesmith.errors import UserError, first_line, listed
from tunesmith.model.head import head_name, is_headed
from tunesmith.model.lora_modules import (
    LoraEmbedding,
    LoraLinear,
    TokenRows,
    generator_of,
    has_inputs_first,
    is_linear,
)
from tunesmith.model.structure import is_encoder_decoder, replace_module
from tunesmith.plan.facts import choose_layers, matches

PREFIX = "base_model.model."
"""What PEFT puts before module names in adapter files."""
PEFT_NAMES = {
    "lora_a": "lora_A.weight",
    "lora_b": "lora_B.weight",
    "lora_m": "lora_magnitude_vector",
    "lora_embedding_a": "lora_embedding_A",
    "lora_embedding_b": "lora_embedding_B",
    "token_rows": "token_adapter.trainable_tokens_delta",
}


def keep_lengths(model: nn.Module, keeps: bool = True) -> None:
    """While weights stay as they are, each DoRA adapter need not measure its rows in every call."""
    for module in model.modules():
        if isinstance(module, LoraLinear) and module.lora_m is not None:
            module.keeps_lengths, module._kept = keeps, None


def put_token_rows(model: nn.Module, ids: list[int]) -> None:
    """Train the rows of these tokens in the embedding and the head, together where the two are one weight."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    first = TokenRows(embedding, ids)
    for name, module in list(model.named_modules()):
        if module is embedding:
            replace_module(model, name, first)
        elif module is head:
            replace_module(model, name, TokenRows(head, ids, first.token_rows if is_tied else None))


def token_row_modules(model: nn.Module) -> dict[str, TokenRows]:
    return {name: module for name, module in model.named_modules() if isinstance(module, TokenRows)}


def ends_of(model: nn.Module) -> list[str]:
    """Names of the embedding and the output head."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    return [name for name, module in model.named_modules() if any(module is end for end in ends)]


START = "start"
"""In the run's folder: the adapter that a run begins with, where it is not drawn."""


@dataclass(frozen=True)
class Start:
    """The factors that adapters begin with, from a folder in PEFT's layout."""

    folder: Path
    takes_out: bool
    """Their product is taken out of the base's weights, so that the model begins as it was."""

    @classmethod
    def of(cls, run: Run, folder: Path | None = None) -> Start | None:
        """The first factors of a run whose output is `folder`; None where its adapters are drawn."""
        if not run.has_lora or (run.adapter is None and run.lora.init == "default"):
            return None
        return cls((folder or Path(run.output)) / START, run.adapter is None and run.lora.takes_out)

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        return read_adapter(self.folder).tensors

    def factor(self, name: str) -> torch.Tensor:
        """By its name in the model, `MODULE.lora_a`."""
        found = self.tensors.get(peft_name(name))
        if found is None:
            raise UserError(f"adapter: {self.folder} holds no factors for '{name.rpartition('.')[0]}' of this model.")
        return found

    @torch.no_grad()
    def put(self, name: str, adapter: LoraLinear | LoraEmbedding) -> None:
        """Give the adapter of the linear of this name its first values."""
        for leaf, weight in adapter.named_parameters(recurse=False):
            found = self.factor(f"{name}.{leaf}")
            if found.shape != weight.shape:
                raise UserError(
                    f"adapter: {self.folder} does not fit this model: '{name}' has {list(found.shape)} there, and "
                    f"needs {list(weight.shape)}."
                )
            weight.copy_(found)
        if self.takes_out:
            assert isinstance(adapter, LoraLinear)
            adapter.take_out()

    def joined(self, name: str, value: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
        """A trained factor, or these rows of B, as a factor over the unchanged base: what was taken out of it is a
        second half, which adds it again and with the other sign."""
        if not self.takes_out or name.endswith(".lora_m"):
            return value
        first = self.factor(name).to(value)
        if name.endswith(".lora_a"):
            return torch.cat([value, first])
        return torch.cat([value, -first[rows]], dim=1)


def attach(model: nn.Module, settings: Lora, *, seed: int) -> list[str]:
    """Freeze the model and put adapters on the linears that `settings` names; returns their names."""
    targets = find_targets(model, settings)
    model.requires_grad_(False)
    put_on(model, targets, settings, seed=seed)
    return targets


def put_on(model: nn.Module, targets: Iterable[str], settings: Lora, *, seed: int, start: Start | None = None) -> None:
    """Put adapters on these linears, which are there already; drawn, where they have no `start`."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for name in targets:
        base = model.get_submodule(name)
        if isinstance(base, nn.Embedding):
            adapter = LoraEmbedding(base, settings.rank, settings.scale)
        else:
            adapter = LoraLinear(base, settings.rank, settings.scale, settings.dropout, dora=settings.dora)
            adapter.is_head = base is head
        if start is None:
            adapter.reset(generator_of(seed, name))
        else:
            start.put(name, adapter)
        replace_module(model, name, adapter)


def find_targets(model: nn.Module, settings: Lora) -> list[str]:
    """Names of the linears that get adapters; UserError when a pattern or the layer choice matches nothing."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linears = {name: module for name, module in model.named_modules() if is_linear(module)}
    candidates = [name for name, module in linears.items() if module is not head]
    if settings.targets == "all-linear":
        chosen = candidates
    else:
        embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
        ends = {name: module for name, module in model.named_modules() if module in (embedding, head)}
        ends = {name: module for name, module in ends.items() if isinstance(module, nn.Embedding | nn.Linear)}
        chosen = []
        for pattern in settings.targets:
            matching = [name for name in {**linears, **ends} if matches(name, pattern)]
            if not matching:
                known = listed(sorted({name.rsplit(".", 1)[-1] for name in [*candidates, *ends]})) or "none"
                raise UserError(f"lora.targets: '{pattern}' matches no linear of this model; it has {known}.")
            if any(name in ends for name in matching):
                if is_headed(model):
                    raise UserError(
                        f"lora.targets: '{pattern}' matches the head, which is trained whole; leave it out."
                    )
                _check_end(pattern, settings)
            chosen += [name for name in matching if name not in chosen]
    if settings.layers is not None:
        layers = choose_layers(settings.layers, _layer_count(candidates))
        chosen = [name for name in chosen if layer_of(name) in layers or layer_of(name) is None]
    if not chosen:
        raise UserError("lora: no linear of this model is left to adapt; look at lora.targets and lora.layers.")
    return chosen


def _check_end(pattern: str, settings: Lora) -> None:
    if settings.dora or settings.init != "default":
        what = "lora.dora" if settings.dora else f"lora.init: {settings.init}"
        raise UserError(f"lora.targets: '{pattern}' matches the embedding or the output head, which go without {what}.")


def adapters(model: nn.Module) -> dict[str, LoraLinear | LoraEmbedding]:
    kinds = (LoraLinear, LoraEmbedding)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def shared_end(model: nn.Module) -> str | None:
    """The embedding or head with an adapter whose weight is the other's, too: it cannot be merged. None: no such."""
    weights = [weight for _, weight in model.named_parameters(remove_duplicate=False)]
    for name, one in adapters(model).items():
        if sum(weight is one.base.weight for weight in weights) > 1:
            return name
    return None


class SharedEnd(UserError):
    def __init__(self, name: str):
        super().__init__(
            f"The adapter on '{name}' cannot be merged: the model's embedding and output head are one weight, and it "
            "changes one of the two; keep the adapter apart."
        )


def merge(model: nn.Module) -> int:
    """Add every adapter to its base, in fp32 and rounded once, and put the bases back; returns how many."""
    found = adapters(model)
    for name, adapter in found.items():
        weight = adapter.base.weight
        with torch.no_grad():
            weight.copy_(adapter.merged(weight).to(weight.dtype))
        replace_module(model, name, adapter.base)
    for name, rows in token_row_modules(model).items():
        with torch.no_grad():
            rows.base.weight.copy_(rows.merged(rows.base.weight).to(rows.base.weight.dtype))
        replace_module(model, name, rows.base)
    return len(found)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The base alone, for as long as this lasts."""
    kept = [(adapter, adapter.scale, adapter.lora_m) for adapter in adapters(model).values()]
    for adapter, _, _ in kept:
        adapter.scale, adapter.lora_m = 0.0, None
    rows = token_row_modules(model).values()
    for one in rows:
        one.is_used = False
    try:
        yield
    finally:
        for one in rows:
            one.is_used = True
        for adapter, scale, lora_m in kept:
            adapter.scale, adapter.lora_m = scale, lora_m


# PEFT's files


def adapter_tensors(model: nn.Module, start: Start | None = None) -> dict[str, torch.Tensor]:
    """By PEFT's names, as factors over the unchanged base."""
    trained = [
        f"{name}.{leaf}"
        for name, one in adapters(model).items()
        for leaf in PEFT_NAMES
        if getattr(one, leaf, None) is not None
    ]
    shared: set[nn.Parameter] = set()
    for name, rows in token_row_modules(model).items():
        trained += [f"{name}.token_rows"] if rows.token_rows not in shared else []
        shared.add(rows.token_rows)
    if is_headed(model):
        name = head_name(model)
        trained += [f"{name}.{leaf}" for leaf, _ in model.get_submodule(name).named_parameters()]
    values = {name: model.get_parameter(name).detach().cpu() for name in trained}
    if start is not None:
        values = {name: start.joined(name, value) for name, value in values.items()}
    return {peft_name(name): value.contiguous() for name, value in values.items()}


def peft_name(name: str) -> str:
    """In PEFT's files, of an adapter's weight that has this name in the model."""
    module, _, leaf = name.rpartition(".")
    return f"{PREFIX}{module}.{PEFT_NAMES.get(leaf, leaf)}"  # of a head that is trained whole, its own


def task_type(model: nn.Module) -> str:
    """By peft's names."""
    if is_headed(model):
        return model.head_task
    return "SEQ_2_SEQ_LM" if is_encoder_decoder(model) else "CAUSAL_LM"


def adapter_config(model: nn.Module, settings: Lora, base: str) -> dict[str, object]:
    """The fields of PEFT's adapter_config.json that describe these adapters."""
    found = adapters(model)
    rank, alpha = settings.rank, settings.alpha if settings.alpha is not None else 2.0 * settings.rank
    if settings.takes_out:  # see Start.joined
        rank, alpha = 2 * rank, alpha * (math.sqrt(2) if settings.rank_stabilised else 2)
    return {
        "peft_type": "LORA",
        "task_type": task_type(model),
        **({"modules_to_save": [head_name(model)]} if is_headed(model) else {}),
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": settings.dropout,
        "use_rslora": settings.rank_stabilised,
        "use_dora": settings.dora,
        "target_modules": _shortest_names(model, found),
        **_token_indices(model),
        "bias": "none",
        "fan_in_fan_out": any(has_inputs_first(adapter.base) for adapter in found.values()),
        "inference_mode": True,
        "init_lora_weights": True,
    }


def _token_indices(model: nn.Module) -> dict[str, object]:
    """peft trains rows of the head with those of the embedding where the two are one weight."""
    found = token_row_modules(model)
    own = {one.token_rows: name for name, one in reversed(found.items())}
    if not found:
        return {}
    return {"trainable_token_indices": {name.rpartition(".")[2]: found[name].ids.tolist() for name in own.values()}}


TAKEN_FOR_EXPERTS = "takes their names for the experts'"
REFUSED = "refuses adapters on them in this family"


def lost_in_peft(skeleton: nn.Module, settings: Lora, names: Iterable[str]) -> dict[str, str]:
    """The linears, of those with adapters, whose adapters the installed peft does not read from the files written here,
    and what it does instead: it has other names for what some families were before transformers 5, and forbids linears
    that kernels of mamba-ssm read as bare weights. Changes the skeleton."""
    try:
        from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    except ImportError:  # nobody here to read them
        return {}
    names = list(names)
    with torch.device("meta"):
        put_on(skeleton, names, settings, seed=0)
    described = adapter_config(skeleton, settings.model_copy(update={"init": "default"}), "")
    keys = {PREFIX + f"{name}.{PEFT_NAMES[leaf]}": (name, leaf) for name in names for leaf in ("lora_a", "lora_b")}
    found = adapters(skeleton)
    tensors = {key: getattr(found[name], leaf).detach() for key, (name, leaf) in keys.items()}
    if is_headed(skeleton):  # peft looks for the head, too
        head = head_name(skeleton)
        leaves = skeleton.get_submodule(head).named_parameters()
        tensors |= {peft_name(f"{head}.{leaf}"): weight.detach() for leaf, weight in leaves}
    for name in names:
        replace_module(skeleton, name, found[name].base)
    wanted = {"r", "lora_alpha", "target_modules", "use_rslora", "use_dora", "fan_in_fan_out", "task_type"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            read = get_peft_model(skeleton, LoraConfig(**{key: described[key] for key in wanted}))
            missing = set(set_peft_model_state_dict(read, tensors).missing_keys)
        except (ValueError, RuntimeError, KeyError, AttributeError, TypeError, NotImplementedError) as error:
            return dict.fromkeys(names, REFUSED if "incompatible" in str(error) else TAKEN_FOR_EXPERTS)
    have = {
        name.removeprefix(PREFIX)
        for name, module in read.named_modules()
        if "default" in getattr(module, "lora_A", {}) and f"{name}.lora_A.default.weight" not in missing
    }
    return {name: TAKEN_FOR_EXPERTS for name in names if name not in have}


@dataclass(frozen=True)
class AdapterFiles:
    config: dict
    tensors: dict[str, torch.Tensor]


def read_adapter(folder: Path) -> AdapterFiles:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("adapter_config.json holds no settings")
        tensors = load_file(folder / "adapter_model.safetensors")
    except FileNotFoundError as error:
        raise UserError(f"{folder} holds no adapter: {Path(error.filename or '').name} is missing.") from error
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise UserError(f"The adapter in {folder} cannot be read: {first_line(error)}.") from error
    return AdapterFiles(config, tensors)


def attach_saved(model: nn.Module, folder: Path) -> list[str]:
    """Put the adapter stored in `folder` (ours or PEFT's) on the model; returns the names of its linears."""
    files = read_adapter(folder)
    files = _with_head(model, files)
    names = adapted_names(files, str(folder))
    model.requires_grad_(False)
    _attach_token_rows(model, files, folder)
    modules = dict(model.named_modules())
    linears = []
    for name in names:
        if isinstance(modules.get(name), nn.Embedding):
            _attach_embedding(model, name, files, folder)
        else:
            attach_one(model, name, files, str(folder))
            linears.append(name)
    return linears


@torch.no_grad()
def _with_head(model: nn.Module, files: AdapterFiles) -> AdapterFiles:
    """Give the model's own head, where it has one, what the adapter has for it; the rest of the adapter."""
    if not is_headed(model):
        return files
    name = head_name(model)
    rest = dict(files.tensors)
    for leaf, weight in model.get_submodule(name).named_parameters():
        weight.copy_(rest.pop(f"{PREFIX}{name}.{leaf}"))
    return AdapterFiles({**files.config, "modules_to_save": None}, rest)


def adapted_names(files: AdapterFiles, where: str) -> list[str]:
    """The linears and embeddings that an adapter is for. UserError where it holds more than LoRA and DoRA have."""
    config = files.config
    if config.get("peft_type") != "LORA":
        raise UserError(f"The adapter in {where} is of type {config.get('peft_type')}; only LORA can be loaded.")
    refused = [name for name in ("modules_to_save",) if config.get(name)]
    if config.get("bias", "none") != "none":
        refused.append("bias")
    if refused:
        raise UserError(f"The adapter in {where} uses {listed(refused)}, which is not supported.")
    leaves = tuple(f".{leaf}" for leaf in PEFT_NAMES.values())
    if strange := [key for key in files.tensors if not key.endswith(leaves)]:
        raise UserError(
            f"The adapter in {where} holds {strange[0]} (one of {len(strange)} such tensors), "
            "which is no factor of a LoRA and would be left out; only LoRA and DoRA without biases can be loaded."
        )
    factors = [key for key in files.tensors if not key.endswith(PEFT_NAMES["token_rows"])]
    return sorted({key.removeprefix(PREFIX).rsplit(".lora_", 1)[0] for key in factors})


def attach_one(model: nn.Module, name: str, files: AdapterFiles, where: str) -> LoraLinear:
    """Put what `files` have for the linear `name` on it, whose weight must be there."""
    module = dict(model.named_modules()).get(name)
    adapter = adapted_linear(module, name, files, where)
    adapter.is_head = hasattr(model, "get_output_embeddings") and module is model.get_output_embeddings()
    replace_module(model, name, adapter)
    return adapter


def adapted_linear(module: nn.Module | None, name: str, files: AdapterFiles, where: str) -> LoraLinear:
    """The linear `name` with what `files` have for it; its weight must be there."""
    config = files.config
    if module is None or not is_linear(module):
        raise UserError(f"The adapter in {where} is for a linear '{name}', which this model does not have.")
    a = files.tensors.get(f"{PREFIX}{name}.lora_A.weight")
    b = files.tensors.get(f"{PREFIX}{name}.lora_B.weight")
    if a is None or b is None:
        raise UserError(f"The adapter in {where} is not a plain LoRA: '{name}' lacks one of its two factors.")
    m = files.tensors.get(f"{PREFIX}{name}.lora_magnitude_vector")
    scale = scale_of(config, name, a.shape[0])
    adapter = LoraLinear(module, a.shape[0], scale, config.get("lora_dropout") or 0.0, dora=m is not None)
    wanted = (adapter.lora_a.shape, adapter.lora_b.shape, *((b.shape[:1],) if m is not None else ()))
    if wanted != (a.shape, b.shape, *((m.shape,) if m is not None else ())):
        raise UserError(f"The adapter in {where} does not fit this model: '{name}' has other sizes.")
    with torch.no_grad():
        adapter.lora_a.copy_(a)
        adapter.lora_b.copy_(b)
        if m is not None:
            adapter.lora_m.copy_(m)
    return adapter


def scale_of(config: Mapping[str, Any], name: str, rank: int) -> float:
    """What the factors of the linear `name` are multiplied by, as PEFT's config says."""
    alpha = _by_pattern(config.get("alpha_pattern"), name, config.get("lora_alpha", rank))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _attach_token_rows(model: nn.Module, files: AdapterFiles, folder: Path) -> None:
    suffix = f".{PEFT_NAMES['token_rows']}"
    rows = {key.removeprefix(PREFIX).removesuffix(suffix): key for key in files.tensors if key.endswith(suffix)}
    indices = files.config.get("trainable_token_indices")
    if not rows:
        return
    if isinstance(indices, dict):
        indices = next(iter(indices.values()), None)
    if not isinstance(indices, list) or len(set(indices)) != len(indices) or indices != sorted(indices):
        raise UserError(f"The adapter in {folder} trains tokens in a way that is not supported; use method: peft.")
    if max(indices) >= model.get_input_embeddings().weight.shape[0]:
        raise UserError(
            f"The adapter in {folder} is for a base with more tokens; its base_model_name_or_path names the one it "
            "belongs to."
        )
    put_token_rows(model, indices)
    with torch.no_grad():
        for name, one in token_row_modules(model).items():
            if name in rows:
                one.token_rows.copy_(files.tensors[rows[name]])


def _attach_embedding(model: nn.Module, name: str, files: AdapterFiles, folder: Path) -> None:
    base = model.get_submodule(name)
    a, b = (files.tensors.get(f"{PREFIX}{name}.lora_embedding_{side}") for side in "AB")
    fits = a is not None and b is not None and (a.shape[1], b.shape[0]) == tuple(base.weight.shape)
    if a is None or b is None or not fits:
        raise UserError(f"The adapter in {folder} does not fit this model: '{name}' has other sizes.")
    adapter = LoraEmbedding(base, a.shape[0], scale_of(files.config, name, a.shape[0]))
    with torch.no_grad():
        adapter.lora_embedding_a.copy_(a)
        adapter.lora_embedding_b.copy_(b)
    replace_module(model, name, adapter)


def layer_of(name: str) -> int | None:
    """The decoder layer a module belongs to: the first number in its dotted name."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def _layer_count(names: Iterable[str]) -> int:
    return 1 + max((layer for name in names if (layer := layer_of(name)) is not None), default=-1)


def _shortest_names(model: nn.Module, chosen: Iterable[str]) -> list[str]:
    """Last parts of the names where those say exactly which modules are meant, else the full names. A last part may be
    a number, and then a layer's, too."""
    chosen = set(chosen)
    endings = {name.rsplit(".", 1)[-1] for name in chosen}
    same_ending = {name for name, _ in model.named_modules() if name.rsplit(".", 1)[-1] in endings}
    return sorted(endings if same_ending == chosen else chosen)


def _by_pattern(patterns: dict | None, name: str, default: float) -> float:
    for pattern, value in (patterns or {}).items():
        if re.search(rf"(.*\.)?({pattern})$", name):
            return value
    return default
