"""Where the weights of a model come from, with one interface: its files, tensor by tensor, or, where these are laid out
in a way that only transformers knows, transformers' state dict.

A source is asked for tensors by name, in the order in which they are wanted, and for the part of each that this process
needs. Files are read ahead by threads; a state dict is in host memory whole.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from tunesmith.model.content import Content
from tunesmith.model.experts import STACKS, experts_of_layers
from tunesmith.model.files import (
    SINGLE_EXPERT,
    Block,
    Held,
    Memory,
    Read,
    Tensor,
    are_equal,
    check_rounding,
    find,
    lazily,
    read_ahead,
    read_tensors,
)
from tunesmith.model.finite import check_finite
from tunesmith.model.headers import read_headers, shortened
from tunesmith.model.structure import is_transposed, linears_of_layers
from tunesmith.plan.plan import Storage

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS_HEAD = re.compile(r"(lm_head|embed_out|output|head)\.(weight|bias)")
"""What files call the output head for tokens."""
Part = Callable[[str, tuple[int, ...]], Block]
"""What of a tensor is read, given its name and shape."""


class WeightSource(Protocol):
    names: Collection[str]
    """Of the tensors that it has, as the model calls them."""
    files: Mapping[str, str]
    """Their files, where known."""
    is_lent: bool
    """What it gives lies in a file that is mapped into memory, or where others will be read to: it is copied to be
    kept."""
    knows_dtypes: bool
    """What it gives has the precision that it is to have."""

    def read(self, names: Collection[str], *, part: Part, pin: bool, codes: Mapping[str, str]) -> Iterator[Read]:
        """These tensors, in this order, with the shapes they have when whole. `pin`: in pinned memory. Of the weights
        in `codes` the codes are read, of the kind it says, where the files have them so."""
        ...


class Files:
    """Model files that hold the tensors of the model as they are, experts one by one, or weights that were quantized
    before."""

    knows_dtypes = False

    def __init__(self, held: Mapping[str, Held], content: Content | None = None, memory: Memory | None = None):
        self.held, self.content, self.memory = held, content, memory
        self.is_lent = memory is None or memory.is_lent
        self.names = held.keys()
        self.files = {name: one.entries[0].path.name for name, one in held.items()}

    def read(self, names: Collection[str], *, part: Part, pin: bool, codes: Mapping[str, str]) -> Iterator[Read]:
        wanted = {name: self.held[name] for name in names}
        return read_ahead(wanted, pin=pin, part=part, codes=codes, content=self.content, memory=self.memory)


class StateDict:
    """What transformers has made of files that it knows how to translate."""

    is_lent = False

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, knows_dtypes: bool):
        self.tensors, self.knows_dtypes = dict(tensors), knows_dtypes
        self.names = tensors.keys()
        self.files: Mapping[str, str] = {}

    def read(self, names: Collection[str], *, part: Part, pin: bool, codes: Mapping[str, str]) -> Iterator[Read]:
        for name in names:
            tensor = self.tensors[name]
            yield name, tensor[part(name, tuple(tensor.shape))], tuple(tensor.shape)


class RandomWeights:
    """Weights that nobody has trained, for measurements: drawn on the device as they are asked for."""

    is_lent = False
    knows_dtypes = True

    def __init__(self, empty: nn.Module, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device = dtype, device
        self.shapes = {name: tuple(weight.shape) for name, weight in empty.named_parameters()}
        self.names = self.shapes.keys()
        self.files: Mapping[str, str] = {}

    def read(self, names: Collection[str], *, part: Part, pin: bool, codes: Mapping[str, str]) -> Iterator[Read]:
        for name in names:
            shape = self.shapes[name]
            generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
            tensor = torch.empty(shape, dtype=self.dtype, device=self.device).normal_(0, 0.02, generator=generator)
            if len(shape) == 1:
                tensor.fill_(0.0 if name.endswith("bias") else 1.0)
            yield name, tensor[part(name, shape)], shape


def find_source(
    empty: PreTrainedModel,
    folder: Path,
    *,
    dtype: torch.dtype,
    storage: Storage,
    content: Content | None = None,
    memory: Memory | None = None,
) -> WeightSource:
    """For a model built by `build_empty`. What is read from files is hashed into `content`. Given `memory`, files are
    read into that and not mapped, so that what was read leaves the process. UserError or ValueError where the files do
    not fit the model."""
    held = files_of(empty, folder)
    if held is None:
        is_plain = storage == "plain"
        tensors = _translated(empty, folder, dtype, is_plain=is_plain, content=content)
        return StateDict(tensors, knows_dtypes=is_plain)
    if storage != "plain":
        few = {f"{name}.weight" for name in linears_of_layers(empty)}
        few |= {f"{name}.{leaf}" for name in experts_of_layers(empty) for leaf in STACKS}
        check_rounding({name: held[name] for name in few & held.keys()}, storage)
    return Files(held, content, memory)


def files_of(empty: nn.Module, folder: Path) -> dict[str, Held] | None:
    """Where files hold each tensor of a model built by `build_empty`, in the order they are to be read.

    None when they hold their tensors in other ways than the model, which transformers would translate. A tied weight
    is the embedding's, whichever of its names they have it under.
    """
    transposed = {f"{name}.weight" for name, module in empty.named_modules() if is_transposed(module)}
    wanted = empty.state_dict()
    if _has_fp32_parts(empty):
        return None
    tensors = _with_head(empty, read_tensors(folder), wanted)
    found = find(tensors, wanted, transposed)
    if found is None and len(names := names_in_model(empty, tensors)) == len(tensors):
        found = find(_renamed(tensors, names), wanted, transposed)
    if found is None:
        return None
    tied = getattr(empty, "all_tied_weights_keys", None) or {}
    for name in tied.keys() & found.keys():
        if tied[name] in found and not are_equal(found[name], found[tied[name]]):
            raise ValueError(_untied(name, tied[name]))
    found = {tied[name] if name in tied and tied[name] not in found else name: held for name, held in found.items()}
    missing = [name for name in wanted if name not in found and tied.get(name) not in found]
    return None if missing else found


def names_in_model(model: nn.Module, stored: Collection[str]) -> dict[str, str]:
    """What the model calls the tensors that files call so, where transformers only renames them; without those that it
    makes something else of, but for experts, which are found one by one."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # an older transformers
        return {name: name for name in stored}
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    wanted, prefix = model.state_dict(), getattr(model, "base_model_prefix", "")
    found: dict[str, str] = {}
    for name in sorted(stored):
        renamed, _ = rename_source_key(name, renamings, [], prefix, wanted)
        _, converted = rename_source_key(name, renamings, converters, prefix, wanted)
        if renamed not in wanted and name in wanted:  # that transformers would not have renamed
            renamed, converted = name, None
        if converted is None or SINGLE_EXPERT.fullmatch(renamed):
            found[name] = renamed
    return found if len(set(found.values())) == len(found) else {}


def _renamed(tensors: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """By their names in the model. Those of a model without its head are written with it, so under these names."""
    is_body = all(name.endswith(f".{stored}") for stored, name in names.items())
    return {
        names[stored]: replace(held, written_as=names[stored]) if is_body and isinstance(held, Tensor) else held
        for stored, held in tensors.items()
    }


def _untied(name: str, other: str) -> str:
    """Which of the two is meant cannot be told: transformers takes both, and other programs the embedding alone."""
    return (
        f"its files hold {name} with other values than {other}, but its config.json says that the two are one weight; "
        'put "tie_word_embeddings": false there if both are meant, or remove the one that is not'
    )


def _with_head(empty: nn.Module, tensors: dict[str, Any], wanted: Collection[str]) -> dict[str, Any]:
    """Where the model has a head of its own (`model.head`): without the base's for tokens, and with that one."""
    file = getattr(empty, "head_files", None)
    if file is None:
        return tensors
    kept = {name: held for name, held in tensors.items() if name in wanted or not TOKENS_HEAD.fullmatch(name)}
    missing = {name: Tensor(entry) for name, entry in read_headers(file.parent).items() if name not in kept}
    return kept | missing


def _has_fp32_parts(model: nn.Module) -> bool:
    """Some models keep chosen modules in fp32 whatever they are loaded in; transformers knows which."""
    names = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return any(getattr(module, name, None) for module in model.modules() for name in names)


def _translated(
    empty: PreTrainedModel, folder: Path, dtype: torch.dtype, *, is_plain: bool, content: Content | None
) -> dict[str, torch.Tensor]:
    """The weights of files that hold them in other ways than the model has them, by transformers' own code. What that
    would pass over in silence (tensors that are missing, too many or of another size) is refused."""
    tensors = _with_head(empty, read_tensors(folder), empty.state_dict())
    if not is_plain:  # to be quantized from what the files have
        check_rounding(tensors, "fewer bits", as_codes=False)
        kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        sizes = Counter()
        for held in tensors.values():
            sizes[kinds.get(held.entries[0].dtype, torch.float32)] += held.entries[0].size
        dtype = max(sizes, key=lambda kind: sizes[kind])
    with lazily(tensors, content) as lazy:
        model, found = type(empty).from_pretrained(
            None,
            config=empty.config,
            state_dict=lazy,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    if problem := _misfit(model, found):
        raise ValueError(problem)
    tied, left = (getattr(one, "all_tied_weights_keys", None) or {} for one in (empty, model))
    for name in tied.keys() - left.keys():
        raise ValueError(_untied(name, tied[name]))
    check_finite(model, dtype)
    return model.state_dict()


def _misfit(model: PreTrainedModel, found: Mapping[str, Any]) -> str:
    """How files do not fit the model, in words; empty where they do."""
    if mismatched := sorted(found["mismatched_keys"], key=str):
        name, stored, wanted = mismatched[0]
        more = f" and {len(mismatched) - 1:,} more" if len(mismatched) > 1 else ""
        return f"its files hold {name}{more} as {list(stored)}, and its config.json describes {list(wanted)}"
    if missing := sorted(found["missing_keys"]):
        return (
            f"its files lack {len(missing):,} tensors of the model that its config.json describes: {shortened(missing)}"
        )
    known = {re.sub(r"\d+", "0", name) for name in model.state_dict()}
    modules = dict(model.named_modules())

    def has_a_place(name: str) -> bool:
        owner, _, leaf = name.rpartition(".")
        module = modules.get(owner)
        is_known_module = module is not None and any(True for _ in module.parameters(recurse=False))
        return re.sub(r"\d+", "0", name) in known or (is_known_module and getattr(module, leaf, None) is None)

    if odd := sorted(filter(has_a_place, found["unexpected_keys"])):
        return (
            f"its files hold {len(odd):,} tensors that the model which its config.json describes has not: "
            f"{shortened(odd)}"
        )
    return ""
