"""Adapters at full speed: linears that share an input are computed together, in bf16 or fp8.

`fuse` takes over the bases of a model's adapters. The q, k and v projections of an attention, and gate and up of an
MLP, become one product with one joint adapter; every other adapted linear is a group of one. The model's code is not
touched: it still calls q_proj, k_proj and v_proj, and the first of them computes all three. The trained factors stay
where they were, under their names, so checkpoints and adapter files do not change.
"""

from __future__ import annotations

import torch
from torch import nn

from tunesmith.kernels.lowrank import lowrank_linear, lowrank_linear_fp8, quantize_rows
from tunesmith.model.lora import LoraLinear

SHARED_INPUTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Sibling linears that models call one after the other with the same input, in this order."""
FP8_MULTIPLE = 16
"""fp8 products need sizes that are multiples of this."""


def fuse(model: nn.Module, *, fp8: bool) -> int:
    """Group the model's adapters; returns the number of groups. Adapters with dropout or other bases are left alone."""
    groups = 0
    for parent in list(model.modules()):
        taken: set[str] = set()
        adapted = {name: child for name, child in parent.named_children() if _can_fuse(child)}
        for names in (*SHARED_INPUTS, *((name,) for name in adapted)):
            if all(name in adapted and name not in taken for name in names):
                taken.update(names)
                _group([adapted[name] for name in names], fp8=fp8)
                groups += 1
    return groups


class JointProduct(nn.Module):
    """The frozen weights of a group, one below the other, and their product with all the group's adapters.

    The members are called one after the other with the same input: the first computes all, the others take their part.
    """

    def __init__(self, members: list[LoraLinear], *, fp8: bool):
        super().__init__()
        weight_nk = torch.cat([member.base.weight.detach() for member in members])
        biases = [member.base.bias for member in members]
        bias_n = None if biases[0] is None else torch.cat([bias.detach() for bias in biases])
        self.is_fp8 = fp8 and all(size % FP8_MULTIPLE == 0 for size in weight_nk.shape)
        self.sizes = [member.base.weight.shape[0] for member in members]
        self.members = tuple(members)  # a tuple, so that they are not its children: it is theirs
        if self.is_fp8:
            weight_nk, scale_n1 = quantize_rows(weight_nk)
            self.register_buffer("scale_n", scale_n1.squeeze(1), persistent=False)
        self.register_buffer("weight_nk", weight_nk, persistent=False)
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
        a_rk = torch.cat([member.lora_a for member in self.members]).to(x.dtype)
        b_nr = torch.block_diag(*(member.lora_b * member.scale for member in self.members)).to(x.dtype)
        if self.is_fp8:
            y_tn = lowrank_linear_fp8(x_tk, self.weight_nk, self.scale_n, a_rk, b_nr, self.bias_n)
        else:
            y_tn = lowrank_linear(x_tk, self.weight_nk, a_rk, b_nr, self.bias_n)
        return y_tn.view(*x.shape[:-1], -1).split(self.sizes, dim=-1)


def _can_fuse(module: nn.Module) -> bool:
    return isinstance(module, LoraLinear) and module.dropout == 0 and type(module.base) is nn.Linear


def _group(members: list[LoraLinear], *, fp8: bool) -> None:
    product = JointProduct(members, fp8=fp8)
    for index, member in enumerate(members):
        member.join(product, index)
