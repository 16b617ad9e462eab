"""Adapters at full speed: linears that share an input are computed together, over a base in bf16, fp8 or nf4.

`fuse` takes over the bases of a model's adapters. The q, k and v projections of an attention, and gate and up of an
MLP, become one matmul with one joint adapter; every other adapted linear is a group of one. The model's code is not
touched: it still calls q_proj, k_proj and v_proj, and the first of them computes all three. The trained factors stay
where they were, under their names, so checkpoints and adapter files do not change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tunesmith.kernels.fp8 import FP8_MULTIPLE
from tunesmith.kernels.lowrank import E4M3, lowrank_linear, lowrank_linear_fp8, quantize_rows
from tunesmith.kernels.nf4 import BLOCK, cut_rows, dequantize, join
from tunesmith.model.gated import GatedLinears, find_gated
from tunesmith.model.local import local
from tunesmith.model.lora_modules import LoraLinear
from tunesmith.model.quantized import Nf4Linear
from tunesmith.model.structure import computes_as_linear

SHARED_INPUTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Sibling linears that models call one after the other with the same input, in this order."""


ALIGNED = 64
"""Bytes, of the memory that torch allocates on a CPU."""


def fuse(
    model: nn.Module,
    *,
    fp8: bool,
    fuse_mlps: bool = False,
    cache_transposed: bool = False,
) -> int:
    """Group the model's adapters; returns the number of groups. Dropout, DoRA and bases in int8 are left alone.

    `fuse_mlps` makes one operation of each gated MLP (needs a GPU). With `cache_transposed` weights in fp8 are held
    transposed, too.
    """
    groups = 0
    if fuse_mlps:
        for parent in _parents(model):
            for name, child in list(parent.named_children()):
                if (found := _joint_mlp(child)) is not None:
                    setattr(parent, name, JointMlp(child, found, fp8=fp8, cache_transposed=cache_transposed))
                    groups += 1
    for parent in _parents(model):
        taken: set[str] = set()
        adapted = {name: child for name, child in parent.named_children() if _can_fuse(child)}
        for names in (*SHARED_INPUTS, *((name,) for name in adapted)):
            if all(name in adapted and name not in taken for name in names) and (
                len({type(adapted[name].base) for name in names}) == 1
            ):
                taken.update(names)
                _group([adapted[name] for name in names], fp8=fp8, cache_transposed=cache_transposed)
                groups += 1
    return groups


def _parents(model: nn.Module) -> list[nn.Module]:
    """Modules with children. The linears themselves are not among them: each gives up its weight when it is grouped,
    which a list that holds them all would keep until the last is."""
    return [module for module in model.modules() if next(module.children(), None) is not None]


class JointLinear(nn.Module):
    """The frozen weights of a group, one below the other, and their matmul with all the group's adapters.

    The members are called one after the other with the same input: the first computes all, the others take their part.
    """

    def __init__(self, members: list[LoraLinear], *, fp8: bool, cache_transposed: bool = False):
        super().__init__()
        weight_nk = _held(members)
        biases = [member.base.bias for member in members]
        bias_n = None
        if (known := next((bias for bias in biases if bias is not None), None)) is not None:
            zeros = [known.new_zeros(member.base.out_features) for member in members]  # for members without one
            bias_n = torch.cat([z if b is None else b.detach() for z, b in zip(zeros, biases, strict=True)])
        self.sizes = [member.base.out_features for member in members]
        self.members = tuple(members)  # a tuple, so that they are not its children: it is theirs
        weight_nk, scale_n = _for_matmuls(weight_nk, members, fp8=fp8)
        self.register_buffer("weight_nk", weight_nk, persistent=False)
        self.register_buffer("scale_n", scale_n, persistent=False)
        self.register_buffer("transposed_kn", _transposed(weight_nk) if cache_transposed else None, persistent=False)
        self.register_buffer("bias_n", bias_n, persistent=False)
        self.input: torch.Tensor | None = None
        self.outputs: tuple[torch.Tensor, ...] = ()

    def part(self, x: torch.Tensor, index: int) -> torch.Tensor:
        if len(self.members) == 1:
            return self(x)[0]
        if index == 0 or self.input is not x:
            self.input, self.outputs = x, self(x)
        y = self.outputs[index]
        if index == len(self.members) - 1:
            self.input, self.outputs = None, ()
        return y

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x_tk = x.reshape(-1, x.shape[-1])
        weight_nk, scale_n, *others = self.operands(x.dtype)
        if scale_n is not None:
            y_tn = lowrank_linear_fp8(x_tk, weight_nk, scale_n, *others)
        else:
            y_tn = lowrank_linear(x_tk, weight_nk, *others[:-1])
        y = y_tn.view(*x.shape[:-1], -1)
        return (y,) if len(self.sizes) == 1 else y.split(self.sizes, dim=-1)  # models may add to one part in place

    def operands(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """The frozen weight and the scales of its rows, the joint factors in this precision, bias, sizes, and the
        weight transposed where that is kept."""
        a_rk = torch.cat([local(member.lora_a) for member in self.members]).to(dtype)
        b_nr = torch.block_diag(*(local(member.lora_b) * member.scale for member in self.members)).to(dtype)
        return self.weight_nk, self.scale_n, a_rk, b_nr, self.bias_n, self.sizes, self.transposed_kn


class JointMlp(nn.Module):
    """A gated MLP with adapters on all its linears, as one operation; takes the place of the model's own. One linear
    that gives gate and up has one adapter for both: its first factor serves each of them."""

    def __init__(self, mlp: nn.Module, found: GatedLinears, *, fp8: bool, cache_transposed: bool = False):
        super().__init__()
        for name, child in mlp.named_children():
            if name in found.names:
                self.add_module(name, child)
        self.first_names, self.down_name, self.gating = found.first, found.down, found.gating.text
        self.slice_tokens = 0
        """More tokens than this are computed in slices; 0: never."""
        first, last = [getattr(self, name) for name in found.first], getattr(self, found.down)
        fp8 = fp8 and all(_fits_fp8(member) for member in (*first, last))
        gate_up, gate_up_scale = _for_matmuls(_held(first), first, fp8=fp8)
        if gate_up.dtype == torch.uint8 and len(first) == 1:  # the kernels know gate and up as two
            shape = first[0].base.out_features, first[0].base.in_features
            gate_up = join([cut_rows(gate_up, shape, half, 2) for half in (0, 1)], [shape[0] * shape[1] // 2] * 2)
        down, down_scale = _for_matmuls(_held([last]), [last], fp8=fp8)
        self.register_buffer("gate_up", gate_up, persistent=False)
        self.register_buffer("gate_up_scale", gate_up_scale, persistent=False)
        self.register_buffer("down", down, persistent=False)
        self.register_buffer("down_scale", down_scale, persistent=False)
        self.register_buffer("gate_up_transposed", _transposed(gate_up) if cache_transposed else None, persistent=False)
        self.register_buffer("down_transposed", _transposed(down) if cache_transposed else None, persistent=False)
        for member in (*first, last):
            member.base = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from tunesmith.kernels.lowrank_mlp import FrozenWeights, lowrank_mlp

        first, down = [getattr(self, name) for name in self.first_names], getattr(self, self.down_name)
        b_first = [(local(member.lora_b) * member.scale).to(x.dtype) for member in first]
        out = lowrank_mlp(
            x.reshape(-1, x.shape[-1]),
            FrozenWeights(
                self.gate_up,
                self.gate_up_scale,
                self.down,
                self.down_scale,
                self.gate_up_transposed,
                self.down_transposed,
            ),
            torch.cat([local(member.lora_a) for member in (first[0], first[-1])]).to(x.dtype),
            *(b_first if len(first) == 2 else b_first[0].chunk(2)),
            local(down.lora_a).to(x.dtype),
            (local(down.lora_b) * down.scale).to(x.dtype),
            self.slice_tokens,
            self.gating,
        )
        return out.view(x.shape)


def _joint_mlp(module: nn.Module) -> GatedLinears | None:
    """A gated MLP whose linears all have adapters that can be computed together, and no biases."""
    linears = [child for child in module.children() if isinstance(child, LoraLinear)]
    if len(linears) < 2 or not all(_can_fuse(linear) and linear.base.bias is None for linear in linears):
        return None
    found = find_gated(module)
    if found is None or not all(isinstance(module.get_submodule(name), LoraLinear) for name in found.names):
        return None
    first = [module.get_submodule(name) for name in found.first]
    if first[0].rank != first[-1].rank or len({type(linear.base) for linear in first}) > 1:
        return None
    base = first[0].base
    is_cut = len(first) == 1 and isinstance(base, Nf4Linear)
    return None if is_cut and base.out_features * base.in_features // 2 % BLOCK else found


def _can_fuse(module: nn.Module) -> bool:
    if not isinstance(module, LoraLinear) or module.is_head or module.dropout != 0 or module.lora_m is not None:
        return False
    if module.rounding is not None:  # base and adapter are rounded as one
        return False
    base = module.base
    return computes_as_linear(type(base)) or (isinstance(base, Nf4Linear) and not base.is_transposed)


def _held(members: list[LoraLinear]) -> torch.Tensor:
    """The bases' weights as they are held, one below the other: a matrix, or the vector of bytes that is one in nf4.

    The bases keep their weights as rows of that matrix. Where others share them, as the runs of a sweep do, they need
    no memory of their own then, and the next one finds the matrix made."""
    bases = [member.base for member in members]
    if isinstance(bases[0], Nf4Linear):
        return join([base.weight4 for base in bases], [base.out_features * base.in_features for base in bases])
    weights = [base.weight.detach() for base in bases]
    if not all(type(weight) is torch.Tensor and not weight.is_meta for weight in weights):
        return torch.cat(weights)
    if (there := _lying_together(weights)) is not None:
        return there
    joint = torch.cat(weights)
    for base, rows in zip(bases, joint.split([len(weight) for weight in weights]), strict=True):
        base.weight.data = rows
    return joint


def _lying_together(weights: list[torch.Tensor]) -> torch.Tensor | None:
    """The matrix of which these are the rows, where there is one, aligned as torch aligns its own: on a CPU the last
    bits of a matmul may depend on that."""
    first, end = weights[0], weights[0].data_ptr()
    for weight in weights:
        is_next = weight.data_ptr() == end and weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not is_next or not weight.is_contiguous() or weight.dtype != first.dtype:
            return None
        end += weight.nbytes
    if first.data_ptr() % ALIGNED:
        return None
    rows, columns = sum(len(weight) for weight in weights), first.shape[1]
    return first.as_strided((rows, columns), (columns, 1))


def _for_matmuls(
    held: torch.Tensor, members: list[LoraLinear], *, fp8: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The joint weight as it is kept, and the scales of its rows where the matmuls run in fp8. What is held in nf4
    stays so: it becomes fp8 when it is multiplied."""
    if not fp8 or not all(_fits_fp8(member) for member in members):
        return held, None
    if held.dtype != torch.uint8:
        values, scale_n1 = quantize_rows(held)
        return values, scale_n1.squeeze(1)
    rows = [member.base.out_features for member in members]
    weight_nk = dequantize(held, rows, members[0].base.in_features, torch.bfloat16)
    return held, quantize_rows(weight_nk)[1].squeeze(1)


def _transposed(held: torch.Tensor) -> torch.Tensor | None:
    return held.t().contiguous() if held.dtype == E4M3 else None


def _fits_fp8(member: LoraLinear) -> bool:
    return member.base.in_features % FP8_MULTIPLE == 0 and member.base.out_features % FP8_MULTIPLE == 0


def _group(members: list[LoraLinear], *, fp8: bool, cache_transposed: bool) -> None:
    matmul = JointLinear(members, fp8=fp8, cache_transposed=cache_transposed)
    for index, member in enumerate(members):
        member.join(matmul, index)
