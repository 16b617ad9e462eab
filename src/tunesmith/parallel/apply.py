"""The order in which a loaded, adapted model is made ready to train. Mechanisms live elsewhere.

recompute some layers  ->  compile each layer
"""

from __future__ import annotations

import functools

from torch import nn
from torch.utils.checkpoint import checkpoint

from tunesmith.errors import UserError
from tunesmith.plan.plan import Plan


def apply(model: nn.Module, plan: Plan) -> None:
    layers = decoder_layers(model)
    if plan.recompute_layers:
        recompute(layers[: plan.recompute_layers])
    if plan.is_compiled:
        for layer in layers:
            layer.compile()


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a decoder: the longest list of modules it has."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise UserError(f"{type(model).__name__} has no list of layers, so nothing can be recomputed layer by layer.")
    return list(max(lists, key=len))


def recompute(layers: list[nn.Module]) -> None:
    """Let these layers keep their inputs alone and compute the rest again in the backward pass.

    transformers' layers do this by themselves when told to; the switch is on each layer, so some may and others not.
    Early layers are the ones to choose: what they would keep is kept the longest.
    """
    again = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=True)
    for layer in layers:
        if not hasattr(layer, "gradient_checkpointing"):
            raise UserError(f"{type(layer).__name__} cannot recompute its activations; use shorter sequences instead.")
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = again
