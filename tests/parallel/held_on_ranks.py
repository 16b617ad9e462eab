"""What ranks hold, as they count it for `test_held.py`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from parallel.on_ranks import job_of
from tunesmith.parallel.ranks import Ranks
from tunesmith.train.loop import loss_scale_of, step_of


def held(ranks: Ranks, **job: Any) -> dict[str, int]:
    """Bytes of weights, adapters, gradients and optimizer states on this rank when a step's update begins."""
    made = job_of(ranks, **job)
    step, update = step_of(made, loss_scale_of(made)), made.optimizer.step
    found: dict[str, int] = {}

    def count(*arguments: Any, **options: Any) -> Any:
        weights = list(made.model.parameters())
        trained = {weight for weight in weights if weight.requires_grad}
        has_adapters = len(trained) < len(weights)
        found["weights"] = (
            _bytes([*(set(weights) - trained), *_buffers(made.model)]) if has_adapters else _bytes(trained)
        )
        found["adapter"] = _bytes(trained) if has_adapters else 0
        found["gradients"] = _bytes(weight.grad for weight in trained if weight.grad is not None)
        return update(*arguments, **options)

    made.optimizer.step = count
    made.model.train()
    step(made.loader.step(0), 1e-3)
    states = [value for state in made.optimizer.states() for value in state.values() if isinstance(value, torch.Tensor)]
    found["optimizer"] = _bytes(value for value in states if value.ndim)
    return found


def _buffers(model: torch.nn.Module) -> list[torch.Tensor]:
    """Weights that are buffers; not the few frequencies of rotary embeddings."""
    return [buffer for name, buffer in model.named_buffers() if "inv_freq" not in name]


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of what lies on this rank."""
    locally = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(
        tensor.untyped_storage().nbytes()
        for tensor in {one.untyped_storage().data_ptr(): one for one in locally}.values()
    )
