"""Mixture of experts (MoE): which modules are the experts of a layer, and frozen ones in 4 or 8 bits.

transformers keeps the experts of a layer as two stacks of matrices, [experts, outputs, inputs]; a router chooses some
for each token. Adapters are on the linears around them. Frozen experts are most of an MoE model: with `method: qlora`
each stack is held in nf4 or int8, as linears are, and made whole while a layer is computed.

Legend: T tokens, K experts of a token, S = T K pairs of both, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import copy
import inspect

import torch
from torch import nn

from tunesmith.errors import UserError
from tunesmith.kernels import int8, nf4
from tunesmith.kernels.experts import expert_matmuls
from tunesmith.plan.plan import Storage

ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]
"""What models give their experts: the tokens [T, H], and of each its experts and their weights [T, K]."""
STACKS = ("gate_up_proj", "down_proj")
"""[E, 2I, H] and [E, H, I]."""


def experts_of_layers(model: nn.Module) -> dict[str, nn.Module]:
    """By name, what holds the experts of a layer as parameters with the experts as their first dimension."""
    return {name: module for name, module in model.named_modules() if _has_stacks(module)}


def _has_stacks(module: nn.Module) -> bool:
    count = getattr(module, "num_experts", None)
    weights = list(module.parameters(recurse=False))
    is_stacked = all(weight.shape[0] == count for weight in weights) and any(weight.ndim == 3 for weight in weights)
    return isinstance(count, int) and is_stacked


def is_called_as_usual(experts: nn.Module) -> bool:
    """Whether it takes what most models give their experts, in this order."""
    return list(inspect.signature(experts.forward).parameters)[-3:] == ARGUMENTS or _is_wrapped(experts)


def _is_wrapped(module: nn.Module) -> bool:
    """transformers may put a chooser of implementations around a forward that takes the same."""
    inner = inspect.unwrap(type(module).forward)
    return list(inspect.signature(inner).parameters)[1:4] == ARGUMENTS


class QuantizedExperts(nn.Module):
    """The frozen experts of a layer in few bits a weight; computes in the precision of its input."""

    def __init__(self, experts: nn.Module, storage: Storage):
        """In the place of `experts`, without their weights; `hold` brings them."""
        super().__init__()
        weights = dict(experts.named_parameters(recurse=False))
        is_other = any(getattr(experts, name, False) for name in ("has_bias", "is_transposed", "has_post_expert_norm"))
        is_other |= not is_called_as_usual(experts) or not hasattr(experts, "_apply_gate")
        if weights.keys() != set(STACKS) or is_other:
            raise UserError(
                f"model: {type(experts).__name__} cannot be held in 4 or 8 bits; use method: lora, with storage plain "
                "in its plan."
            )
        self.num_experts = experts.num_experts
        self.shapes_nk = {name: tuple(weight.shape[1:]) for name, weight in weights.items()}
        self.storage = storage
        self.gate = copy.copy(experts)  # the model's own way from the first product to the second
        self.gate._parameters = {}

    def hold(self, name: str, stack_enk: torch.Tensor) -> None:
        """One of the stacks, as it is in the files."""
        matrix_nk = stack_enk.reshape(-1, stack_enk.shape[-1])
        if self.storage == "nf4":
            held, scale_n = nf4.quantize(matrix_nk), None
        else:  # an expert at a time: all of them in fp32 would be many times what is held
            held = torch.empty(matrix_nk.shape, dtype=torch.int8, device=matrix_nk.device)
            scale_n = torch.empty(matrix_nk.shape[0], device=matrix_nk.device)
            each = zip(stack_enk, held.view_as(stack_enk), scale_n.view(self.num_experts, -1), strict=True)
            for weight_nk, codes_nk, scales_n in each:
                for whole, part in zip((codes_nk, scales_n), int8.quantize(weight_nk), strict=True):
                    whole.copy_(part)
        self.register_buffer(name, held, persistent=False)
        self.register_buffer(f"{name}_scale", scale_n, persistent=False)

    def keep(self, rank: int, ranks: int) -> None:
        """Only this one's of so many equal parts."""
        for name in STACKS:
            held, scale_n = getattr(self, name), getattr(self, f"{name}_scale")
            outputs, inputs = self.shapes_nk[name]
            rows = self.num_experts * outputs
            if scale_n is None:
                setattr(self, name, nf4.cut_rows(held, (rows, inputs), rank, ranks))
            else:
                mine = slice(rank * rows // ranks, (rank + 1) * rows // ranks)
                setattr(self, name, held[mine].clone())
                setattr(self, f"{name}_scale", scale_n[mine].clone())
        self.num_experts //= ranks

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        chosen_s, order_s = torch.sort(top_k_index.reshape(-1), stable=True)
        every_e = torch.arange(self.num_experts, device=chosen_s.device, dtype=chosen_s.dtype)
        ends_e = torch.searchsorted(chosen_s, every_e, right=True).int()
        x_sh = hidden_states[order_s // top_k_index.shape[1]]
        gated_si = self.gate._apply_gate(self._product(STACKS[0], x_sh, ends_e))
        out_sh = self._product(STACKS[1], gated_si, ends_e)
        place_s = torch.empty_like(order_s)
        place_s[order_s] = torch.arange(len(order_s), device=order_s.device)
        each_tkh = out_sh[place_s].view(*top_k_index.shape, -1)
        return (each_tkh * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)

    def _product(self, name: str, x: torch.Tensor, ends_e: torch.Tensor) -> torch.Tensor:
        held, scale_n = getattr(self, name), getattr(self, f"{name}_scale")
        return expert_matmuls(x, ends_e, held, scale_n, outputs=self.shapes_nk[name][0])
