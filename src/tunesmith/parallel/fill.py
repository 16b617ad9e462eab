"""A sharded model read from its files layer by layer: on no rank is more than one layer ever whole.

Each layer is read, quantized where it is to be, given its adapters and sharded before the next one is read. The host
holds one tensor at a time beside the mapped files, which the ranks of a node share. For strategies that keep weights
whole this would be of no use.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.model import load, lora, quantized
from tunesmith.model.fp8 import use_fp8_products
from tunesmith.model.fuse import fuse
from tunesmith.parallel.apply import decoder_layers, spread
from tunesmith.parallel.shard import KEEPS_WHOLE, Sharded
from tunesmith.plan.plan import Plan


def load_in_parts(run: Run, plan: Plan, device: torch.device) -> tuple[nn.Module, Sharded] | None:
    """The model, trainable, and what stands before its shards; layers are not wrapped yet.

    None where it must be loaded whole: its weights stay whole, or are cut over tensor ranks, or its files hold them in
    other ways than the model.
    """
    split = plan.mesh.pipeline * plan.mesh.expert * plan.mesh.tensor > 1
    if plan.sharding == "none" or plan.sharding in KEEPS_WHOLE or split:
        return None
    model, folder = load.load_empty(run, dtype=plan.precision)
    files = quantized.files_of(model, folder)
    if files is None:
        return None
    prefixes = {layer: f"{name}." for name, layer in model.named_modules() if layer in set(decoder_layers(model))}
    targets = lora.find_targets(model, run.lora) if run.has_adapters else []
    dtype = getattr(torch, load.DTYPES[plan.precision])

    def prepare(unit: nn.Module) -> None:
        """Everything of one layer, or of what is around the layers."""
        within = prefixes.get(unit, "")

        def is_here(name: str) -> bool:
            return name.startswith(within) if within else not name.startswith(tuple(prefixes.values()))

        part = {name: file for name, file in files.items() if is_here(name)}
        quantized.fill_part(model, part, dtype=dtype, device=device, storage=plan.storage)
        if not within:
            model.tie_weights()
        for name, weight in unit.named_parameters():
            if weight.is_meta:
                raise UserError(f"model: the weights of {run.model} hold no {within}{name.removeprefix('model.')}.")
            if run.has_adapters and not isinstance(weight, DTensor):
                weight.requires_grad_(False)
        _move_buffers(unit, device)
        if run.has_adapters:
            lora.put_on(model, filter(is_here, targets), run.lora, seed=run.seed)
            fuse(unit, fp8=plan.products == "fp8", whole_mlps=device.type == "cuda", dtype=dtype)
        elif plan.products == "fp8" and within:
            use_fp8_products(unit)

    return model, spread(model, plan, has_adapters=run.has_adapters, prepare=prepare)


def _move_buffers(unit: nn.Module, device: torch.device) -> None:
    """What no file holds, since the model computed it when it was built."""
    for module in unit.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)
