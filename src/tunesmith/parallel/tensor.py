"""Tensor parallelism: layers split over ranks, each of which holds some heads and a strip of every MLP, by the model's
own plan.

Of a pair of linears around an attention or an activation the first is cut by outputs (colwise) and the second by inputs
(rowwise), so that a block (attention or MLP) needs its whole input once and gives a sum over ranks once. Between blocks
each rank has some of the tokens: norms and residuals are computed there, the input of a block is gathered, its output
summed and dealt out again. Embedding, output head and loss are cut by the vocabulary. With two ranks, in one block:

    rank 0   tokens 0..T/2 ─ norm ─┐            ┌─ heads 0..n/2 ─┐             ┌─ tokens 0..T/2
                                   ├─ gathered ─┤                ├─ summed up ─┤
    rank 1   tokens T/2..T ─ norm ─┘            └─ heads n/2..n ─┘             └─ tokens T/2..T

Trained weights that are cut are DTensors, so that whatever shards, clips, updates and saves them knows where they
belong; matmuls use the part that is here. An adapter's factor beside a cut is cut, the other one whole. What is whole
on every rank (norms, such factors) gets a part of its gradient on each, added up once a step.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tunesmith.errors import UserError
from tunesmith.kernels.linear_cross_entropy import VocabularyPart
from tunesmith.kernels.nf4 import cut_columns, cut_rows
from tunesmith.model.local import local
from tunesmith.model.lora_modules import LoraLinear
from tunesmith.model.quantized import Nf4Linear
from tunesmith.model.structure import body
from tunesmith.parallel.collectives import Group, gather_rows, group_of, scatter_rows

CUTS = {"colwise": 0, "rowwise": 1}
"""The dimension of a weight [outputs, inputs] that is cut."""
WHOLE = "replicated_with_grad_allreduce"
"""Norms of single heads."""
TRIAL_TOKENS = 8
"""Of each rank."""


class SplitLinear(nn.Module):
    """A trained linear of which this rank has some outputs, or some inputs."""

    def __init__(self, linear: nn.Linear, style: str, mesh: DeviceMesh):
        super().__init__()
        self.is_summed = style == "rowwise"
        self.group = group_of(mesh)
        self.weight = _distributed(linear.weight, CUTS[style], mesh)
        self.bias = linear.bias if self.is_summed or linear.bias is None else _distributed(linear.bias, 0, mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, local(self.weight))
        if self.bias is None:
            return y
        # A bias beside a sum over ranks is added by each of them, a part of it: so are its gradients, in the end.
        return y + (self.bias / self.group.size if self.is_summed else local(self.bias))


@dataclass(frozen=True)
class TensorParallelPlan:
    """How a model's weights lie over tensor ranks: `cut` leaves this rank its part of them, `connect` makes the blocks
    exchange what they need."""

    world: DeviceMesh
    styles: Mapping[str, str]
    """By the module's name."""

    @classmethod
    def of(cls, model: nn.Module, world: DeviceMesh) -> TensorParallelPlan:
        # Said whenever weights that are cut twice are put together: that it takes two steps.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        prefix = _name_of(model, body(model))
        return cls(world, {f"{prefix}.{name}".removeprefix("."): style for name, style in _styles(model).items()})

    @property
    def mesh(self) -> DeviceMesh:
        return self.world["tensor"]

    def dims(self, model: nn.Module) -> dict[str, int]:
        """The dimension along which each tensor is cut that is."""
        dims = {f"{name}.weight": CUTS[style] for name, style in self.styles.items() if style in CUTS}
        dims |= {f"{name}.bias": 0 for name, style in self.styles.items() if style == "colwise"}
        for end in _ends(model):
            dims |= {f"{_name_of(model, end)}.{leaf}": 0 for leaf, _ in end.named_parameters()}
        return dims

    def cut(self, model: nn.Module, is_here: Callable[[str], bool] = lambda _: True) -> None:
        """Modules whose name `is_here`. Adapters are there already, and nothing is fused yet. Weights may be cut."""
        for name, style in self.styles.items():
            if style in CUTS and is_here(name):
                parent, _, child = name.rpartition(".")
                owner = model.get_submodule(parent)
                setattr(owner, child, _cut(getattr(owner, child), style, self.mesh, name))
        parts = {}  # embedding and head may be one weight
        for end in _ends(model):
            for leaf, weight in list(end.named_parameters()) if is_here(_name_of(model, end)) else []:
                if weight not in parts:
                    make = _distributed if weight.requires_grad else _frozen
                    parts[weight] = make(weight, 0, self.mesh)
                setattr(end, leaf, parts[weight])

    def connect(self, model: nn.Module) -> None:
        group = group_of(self.mesh)
        for name in dict.fromkeys(name.rpartition(".")[0] for name, style in self.styles.items() if style in CUTS):
            block = model.get_submodule(name)
            block.register_forward_pre_hook(_gather_input(group), with_kwargs=True)
            block.register_forward_hook(_scatter_output(group))
        _look_up_in_parts(model.get_input_embeddings(), self.mesh)
        body(model).register_forward_hook(lambda _, __, out: (_gathered(out[0], group),))
        head = model.get_output_embeddings()
        height = -(-head.out_features // group.size)
        rank = self.mesh.get_local_rank()
        head.vocabulary = VocabularyPart(rank * height, height, self.mesh.get_group())


def check_split(model: nn.Module, ranks: int, make_split: Callable[[], None]) -> None:
    """UserError where the model, cut and connected by `make_split`, does not compute what it did before."""
    expected = _try(model, ranks)
    make_split()
    try:
        computed = _try(model, ranks)
    except RuntimeError as error:  # the model's own code, which meets some of the tokens where it expects all
        raise UserError(
            f"The layers of {type(model).__name__} cannot be split over ranks: what they compute between blocks needs "
            "all tokens; use a plan with tensor 1."
        ) from error
    tolerance = 1e-3 if computed.dtype == torch.float32 else 0.05
    worst = (computed - expected).abs().max().item()
    if not worst <= tolerance * expected.abs().max().item():
        raise UserError(
            f"{type(model).__name__} computes something else when its layers are split over ranks (values differ "
            f"by {worst:.2g}), so its own plan for that cannot be right; use a plan with tensor 1."
        )


def _ends(model: nn.Module) -> list[nn.Module]:
    return [model.get_input_embeddings(), model.get_output_embeddings()]


def _name_of(model: nn.Module, module: nn.Module) -> str:
    return next(name for name, known in model.named_modules() if known is module)


def _styles(model: nn.Module) -> dict[str, str]:
    """By module of the decoder: how it is cut, as the model's config says."""
    plan = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    patterns = {re.compile(re.escape(pattern).replace(r"\*", r"\d+")): style for pattern, style in plan.items()}
    # Embedding and head are cut by their vocabulary, whatever a plan says: some transformers name them there.
    ends = _ends(model)
    names = [name for name, module in body(model).named_modules() if module not in ends]
    # A model that sees images has its text model, whose plan it is, inside.
    inside = next((name for name, module in body(model).named_modules() if name and module is model.get_decoder()), "")
    own = {name: name.removeprefix(f"{inside}.") for name in names}
    styles = {name: style for name in names for pattern, style in patterns.items() if pattern.fullmatch(own[name])}
    blocks = {name.rpartition(".")[0] for name, style in styles.items() if style in CUTS}
    unknown = {style for style in styles.values() if style not in CUTS and style != WHOLE}
    for block in blocks:  # what is in a block and in no plan would see tokens or heads that it does not expect
        for name, _ in body(model).get_submodule(block).named_parameters():
            owner = f"{block}.{name}"
            if not any(owner.startswith(f"{known}.") for known in styles):
                unknown.add(owner)
    if not blocks or unknown:
        why = f"{sorted(unknown)[0]} cannot be split" if unknown else "it has no plan for that"
        raise UserError(
            f"The layers of {type(model).__name__} cannot be split over ranks: {why}; use a plan with tensor 1."
        )
    return styles


def _cut(module: nn.Module, style: str, mesh: DeviceMesh, name: str) -> nn.Module:
    dim = CUTS[style]
    base = module.base if isinstance(module, LoraLinear) else module
    if (base.out_features, base.in_features)[dim] % mesh.size():
        raise UserError(f"{name} cannot be cut into {mesh.size()} equal parts; use a plan with tensor 1.")
    if not isinstance(module, LoraLinear):
        return SplitLinear(module, style, mesh) if module.weight.requires_grad else _frozen_linear(module, dim, mesh)
    module.base = _frozen_linear(base, dim, mesh)
    if dim == 0:
        module.lora_b = _distributed(module.lora_b, 0, mesh)
    else:
        module.lora_a = _distributed(module.lora_a, 1, mesh)
    return module


def _frozen_linear(base: nn.Module, dim: int, mesh: DeviceMesh) -> nn.Module:
    size, rank = mesh.size(), mesh.get_local_rank()
    bias = base.bias
    if bias is not None:  # one that is beside a sum over ranks is added by each of them
        bias = _part(bias, 0, mesh) if dim == 0 else bias.detach() / size
    if isinstance(base, Nf4Linear):
        shape = (base.out_features, base.in_features)
        cut = cut_rows if dim == 0 else cut_columns
        base.weight4 = cut(base.weight4, shape, rank, size)
        base.bias = bias
    else:
        base.weight = _frozen(base.weight, dim, mesh)
        base.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    if dim == 0:
        base.out_features //= size
    else:
        base.in_features //= size
    return base


def _frozen(weight: nn.Parameter, dim: int, mesh: DeviceMesh) -> nn.Parameter:
    return nn.Parameter(_part(weight, dim, mesh), requires_grad=False)


def _distributed(weight: nn.Parameter, dim: int, mesh: DeviceMesh) -> nn.Parameter:
    """In fp32, as the optimizer updates it."""
    return nn.Parameter(as_part(_part(weight, dim, mesh).float(), dim, mesh, weight.shape))


def as_part(part: torch.Tensor, dim: int, mesh: DeviceMesh, shape: Sequence[int]) -> DTensor:
    """What one rank has of a tensor of this shape that is cut along `dim`."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, mesh, [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=stride)


def _part(weight: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's, also of a weight of which no more was read."""
    if isinstance(weight, DTensor):
        return weight.detach().to_local()
    part = weight.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()]
    return part.clone(memory_format=torch.contiguous_format)


def _look_up_in_parts(embedding: nn.Module, mesh: DeviceMesh) -> None:
    """Each rank looks up the tokens of its part of the vocabulary; of the sum it gets some of the tokens."""
    group = group_of(mesh)
    height = -(-embedding.num_embeddings // group.size)
    first = mesh.get_local_rank() * height
    scale = getattr(embedding, "embed_scale", None)
    padding = embedding.padding_idx
    padding = padding - first if padding is not None and first <= padding < first + height else None

    def forward(ids: torch.Tensor) -> torch.Tensor:
        weight = local(embedding.weight)
        row = ids.view(-1) - first
        is_here = (row >= 0) & (row < weight.shape[0])
        embedded = F.embedding(row.where(is_here, 0), weight, padding)
        embedded = scatter_rows(embedded * is_here[:, None].to(embedded.dtype), group).unsqueeze(0)
        return embedded if scale is None else embedded * torch.as_tensor(scale).to(embedded)

    embedding.forward = forward


def _gather_input(group: Group):
    def hook(_, arguments, named):
        if arguments:
            return (_gathered(arguments[0], group), *arguments[1:]), named
        return arguments, {**named, "hidden_states": _gathered(named["hidden_states"], group)}

    return hook


def _scatter_output(group: Group):
    def hook(_, __, out):
        if isinstance(out, torch.Tensor):
            return scatter_rows(out[0], group).unsqueeze(0)
        return (scatter_rows(out[0][0], group).unsqueeze(0), *out[1:])

    return hook


def _gathered(hidden: torch.Tensor, group: Group) -> torch.Tensor:
    return gather_rows(hidden[0], group).unsqueeze(0)


@torch.no_grad()
def _try(model: nn.Module, ranks: int) -> torch.Tensor:
    """What the decoder makes of a few tokens, in two documents."""
    weight = model.get_input_embeddings().weight
    vocabulary = weight.shape[0] if isinstance(weight, DTensor) else model.get_input_embeddings().num_embeddings
    count = TRIAL_TOKENS * ranks
    tokens = torch.randint(vocabulary, (1, count), generator=torch.Generator().manual_seed(0)).to(weight.device)
    ends = (TRIAL_TOKENS - 1, count)
    bounds = torch.tensor([0, *ends], dtype=torch.int32, device=weight.device)
    places = torch.cat([torch.arange(ends[0]), torch.arange(ends[1] - ends[0])])
    was_training = model.training
    model.eval()
    hidden = body(model)(
        input_ids=tokens,
        position_ids=places.to(weight.device)[None],
        use_cache=False,
        cu_seq_lens_q=bounds,
        cu_seq_lens_k=bounds,
        max_length_q=count,
        max_length_k=count,
    )[0]
    model.train(was_training)
    return hidden
