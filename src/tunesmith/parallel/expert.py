"""Expert parallelism: the experts of an MoE model spread over the ranks that see different data; tokens travel to the
experts that they chose.

Of a layer's E experts each of n ranks holds E/n, whole, with their gradients and optimizer states. A forward pass sends
each token's hidden state to the ranks of its experts and their results back, a backward pass the gradients, all by
all-to-all: four times the hidden states of a token's experts, in each layer. Nothing else of an expert travels: its
gradient is complete where it lies, since all ranks' tokens come by.

  rank 0: tokens a b c    experts 0 1         a -> 0, b -> 3, c -> 1       rank 0 computes a c e
  rank 1: tokens d e f    experts 2 3         d -> 2, e -> 0, f -> 3       rank 1 computes d b f

Everything else of the model is the sharding's. The model's own code computes the experts, with fewer of them.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tunesmith.errors import UserError
from tunesmith.model.experts import ARGUMENTS, QuantizedExperts, experts_of_layers, is_called_as_usual
from tunesmith.model.structure import plain_call

TRIED = 7
"""Tokens."""


def find_experts(model: nn.Module, ranks: int) -> dict[str, nn.Module]:
    """By name, the experts of each layer that has some; UserError where they cannot be cut over so many ranks."""
    experts_of = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedExperts)}
    experts_of |= {name: module for name, module in experts_of_layers(model).items() if is_called_as_usual(module)}
    if not experts_of:
        raise UserError(f"{type(model).__name__} has no experts that could be cut over ranks; use a plan without.")
    for experts in experts_of.values():
        if experts.num_experts % ranks != 0:
            raise UserError(f"{experts.num_experts} experts cannot be cut evenly over {ranks} ranks.")
    return experts_of


@torch.no_grad()
def check_experts(model: nn.Module) -> None:
    """UserError where experts do not give the sum of what each makes of a token by itself, times the router's weight:
    those that are elsewhere are asked one by one, without it."""
    inputs_of: dict[nn.Module, tuple[torch.Tensor, ...]] = {}

    def keep(experts: nn.Module, args: tuple, named: dict) -> None:
        inputs_of[experts] = tuple((dict(zip(ARGUMENTS, args, strict=False)) | named)[name] for name in ARGUMENTS)

    every = [module for module in experts_of_layers(model).values() if is_called_as_usual(module)]
    hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in every]
    model(**plain_call(model, torch.arange(TRIED, device=model.device)[None]))
    for hook in hooks:
        hook.remove()
    for experts, (hidden_th, index_tk, weights_tk) in inputs_of.items():
        expected_th = experts(hidden_th, index_tk, weights_tk)
        summed_th = torch.zeros_like(expected_th)
        for index_t1, weights_t1 in zip(index_tk.split(1, dim=1), weights_tk.split(1, dim=1), strict=True):
            summed_th += experts(hidden_th, index_t1, torch.ones_like(weights_t1)) * weights_t1
        if not (summed_th - expected_th).abs().max() <= 1e-3 * expected_th.abs().max():
            raise UserError(
                f"{type(experts).__name__} computes something else when its experts are cut over ranks: it does not "
                "sum up what each makes of a token, times the router's weight; use a plan with expert 1."
            )


def spread_experts(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Leave this rank its part of a layer's experts, where it has more; their weights know where the others are."""
    each, group = experts.num_experts // mesh.size(), mesh.get_group()
    if isinstance(experts, QuantizedExperts):
        experts.keep(mesh.get_local_rank(), mesh.size())
    else:
        _spread_weights(experts, mesh)
    plain = copy.copy(experts)  # the model's own code, which wants plain tensors
    plain._parameters, plain.num_experts = {}, each

    @torch.compiler.disable
    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        for name, weight in experts.named_parameters(recurse=False):
            vars(plain)[name] = weight.to_local().to(hidden_states.dtype)
        return _through(plain, each, group, hidden_states, top_k_index, top_k_weights)

    experts.forward = forward


def _spread_weights(experts: nn.Module, mesh: DeviceMesh) -> None:
    each = experts.num_experts // mesh.size()
    mine = slice(mesh.get_local_rank() * each, (mesh.get_local_rank() + 1) * each)
    for name, weight in list(experts.named_parameters(recurse=False)):
        local = weight.detach().to_local() if isinstance(weight, DTensor) else weight.detach()[mine].clone()
        local = local.float() if weight.requires_grad else local  # as the optimizer updates it
        spread = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        experts.register_parameter(name, nn.Parameter(spread, requires_grad=weight.requires_grad))


def _through(
    experts: nn.Module,
    each: int,
    group: dist.ProcessGroup,
    hidden_th: torch.Tensor,
    index_tk: torch.Tensor,
    weights_tk: torch.Tensor,
) -> torch.Tensor:
    """Send each token to its experts' ranks, compute what has come here, and sum up what comes back.

    Legend: T tokens, K experts of a token, H hidden, S pairs of token and expert sent, R pairs received.
    """
    ranks = group.size()
    chosen_s = index_tk.reshape(-1)
    order_s = torch.argsort(chosen_s, stable=True)  # by rank, and for each rank by expert
    token_s = order_s // index_tk.shape[1]
    sent = torch.bincount(chosen_s // each, minlength=ranks)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    sent, received = sent.tolist(), received.tolist()
    local_s = chosen_s[order_s] % each
    local_r = local_s.new_empty(sum(received))
    dist.all_to_all_single(local_r, local_s, received, sent, group=group)
    arrived_rh = _Exchange.apply(hidden_th[token_s], sent, received, group)
    # A last row that nobody sent: also experts without a token have a gradient then, of 0, as in one process.
    rows_rh = torch.cat([arrived_rh, arrived_rh.new_zeros(1, arrived_rh.shape[1])])
    index_r1 = torch.cat([local_r, local_r.new_zeros(1)])[:, None]
    done_rh = experts(rows_rh, index_r1, torch.ones_like(index_r1, dtype=weights_tk.dtype))[:-1]
    back_sh = _Exchange.apply(done_rh, received, sent, group)
    own_order_s = torch.empty_like(order_s)
    own_order_s[order_s] = torch.arange(len(order_s), device=order_s.device)
    each_tkh = back_sh[own_order_s].view(*index_tk.shape, -1)
    return (each_tkh * weights_tk[..., None]).sum(1).to(hidden_th.dtype)


class _Exchange(torch.autograd.Function):
    """Rows to the other ranks, so many to each, and theirs back; gradients the other way."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup):
        ctx.sizes, ctx.group = (sent, received), group
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        sent, received = ctx.sizes
        out = gradient.new_empty(sum(sent), *gradient.shape[1:])
        dist.all_to_all_single(out, gradient.contiguous(), sent, received, group=ctx.group)
        return out, None, None, None
