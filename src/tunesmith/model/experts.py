"""Mixture of experts (MoE): which modules are the experts of a layer, and frozen ones in 4 or 8 bits.

transformers keeps the experts of a layer as two stacks of matrices, [experts, outputs, inputs]; a router chooses some
for each token. Adapters are on the linears around them. Frozen experts are most of an MoE model: with `method: qlora`
each stack is held in nf4 or int8, as linears are, and made whole while a layer is computed.

A token's result is the sum of its experts', each times a weight of the router's. The second matmul is linear, so the
weight can as well be multiplied in before it: then backward needs no expert's result for the weight's gradient, which
would be most of what an MoE layer keeps (K times the hidden states).

Legend: T tokens, K experts of a token, S = T K pairs of both, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from types import MethodType

import torch
import torch.nn.functional as F
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
    is_stacked = all(weight.shape[:1] == (count,) for weight in weights) and any(weight.ndim == 3 for weight in weights)
    return isinstance(count, int) and is_stacked


def is_called_as_usual(experts: nn.Module) -> bool:
    """Whether it takes what most models give their experts, in this order."""
    return list(inspect.signature(experts.forward).parameters)[-3:] == ARGUMENTS or _is_wrapped(experts)


def _is_wrapped(module: nn.Module) -> bool:
    """transformers may put a chooser of implementations around a forward that takes the same."""
    inner = inspect.unwrap(type(module).forward)
    return list(inspect.signature(inner).parameters)[1:4] == ARGUMENTS


def check_stacks(experts: nn.Module) -> None:
    """UserError where the experts of a layer cannot be held in few bits."""
    is_other = any(getattr(experts, name, False) for name in ("has_bias", "is_transposed", "has_post_expert_norm"))
    is_other |= not is_called_as_usual(experts) or not hasattr(experts, "_apply_gate")
    if {name for name, _ in experts.named_parameters(recurse=False)} != set(STACKS) or is_other:
        raise UserError(
            f"model: {type(experts).__name__} cannot be held in 4 or 8 bits; use method: lora, with storage plain "
            "in its plan."
        )


class QuantizedExperts(nn.Module):
    """The frozen experts of a layer in few bits a weight; computes in the precision of its input."""

    def __init__(self, experts: nn.Module, storage: Storage):
        """In the place of `experts`, without their weights; `hold` brings them."""
        super().__init__()
        check_stacks(experts)
        weights = dict(experts.named_parameters(recurse=False))
        self.num_experts = experts.num_experts
        self.shapes_nk = {name: tuple(weight.shape[1:]) for name, weight in weights.items()}
        self.storage = storage
        self.gate = copy.copy(experts)  # the model's own way from the first matmul to the second
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
        given = (hidden_states, top_k_index, top_k_weights)
        return _mixed(self.gate, self.num_experts, self._matmul, *given)

    def _matmul(self, name: str, x: torch.Tensor, ends_e: torch.Tensor) -> torch.Tensor:
        held, scale_n = getattr(self, name), getattr(self, f"{name}_scale")
        return expert_matmuls(x, ends_e, held, scale_n, outputs=self.shapes_nk[name][0])


def use_early_weights(module: nn.Module) -> bool:
    """Let experts in half precision or more compute by `_mixed`, where transformers would compute the same by grouped
    matmuls; whether there were any."""
    found = [one for one in experts_of_layers(module).values() if _is_grouped(one)]
    for experts in found:
        experts.forward = MethodType(_plain, experts)
    return bool(found)


def _is_grouped(experts: nn.Module) -> bool:
    """Whether transformers' grouped matmuls compute it, and `forward` is the class's own."""
    asked = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    is_described = all(hasattr(experts, name) for name in ("has_gate", "has_bias", "is_transposed", "_apply_gate"))
    is_other = getattr(experts, "has_post_expert_norm", False) or "forward" in vars(experts)
    return asked == "grouped_mm" and is_described and not is_other


def _plain(
    experts: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    def matmul(name: str, x: torch.Tensor, ends_e: torch.Tensor) -> torch.Tensor:
        stack = getattr(experts, name)
        weight_ekn = stack if experts.is_transposed else stack.transpose(1, 2)
        return F.grouped_mm(x.to(stack.dtype), weight_ekn, offs=ends_e)

    return _mixed(experts, experts.num_experts, matmul, hidden_states, top_k_index, top_k_weights)


def _mixed(
    experts: nn.Module,
    count: int,
    matmul: Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor],
    x_th: torch.Tensor,
    index_tk: torch.Tensor,
    weights_tk: torch.Tensor,
) -> torch.Tensor:
    """What its experts make of each token, summed by their weights. `matmul` multiplies rows, expert by expert, with
    the stack of that name; `experts` knows the rest."""
    chosen_s, order_s = torch.sort(index_tk.reshape(-1), stable=True)
    every_e = torch.arange(count, device=chosen_s.device, dtype=chosen_s.dtype)
    ends_e = torch.searchsorted(chosen_s, every_e, right=True).int()
    first, second = STACKS if experts.has_gate else ("up_proj", "down_proj")
    inner_s = matmul(first, x_th[order_s // index_tk.shape[1]], ends_e)
    if experts.has_bias:
        inner_s = inner_s + getattr(experts, f"{first}_bias")[chosen_s]
    inner_s = experts._apply_gate(inner_s) if experts.has_gate else experts.act_fn(inner_s)
    weight_s1 = weights_tk.reshape(-1)[order_s][:, None]
    out_sh = matmul(second, (inner_s * weight_s1).to(inner_s.dtype), ends_e)
    place_s = torch.empty_like(order_s)
    place_s[order_s] = torch.arange(len(order_s), device=order_s.device)
    out_th = out_sh[place_s].view(*index_tk.shape, -1).sum(1)
    if experts.has_bias:
        weights_te = weights_tk.new_zeros(len(index_tk), count).scatter(1, index_tk, weights_tk)
        out_th = out_th + weights_te.to(out_th.dtype) @ getattr(experts, f"{second}_bias")
    return out_th.to(x_th.dtype)
