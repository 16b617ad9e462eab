"""What a plan says of every process of a run: its data as they are called, the shape of its micro-batches, and whether
its numbers repeat."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from tunesmith.data.store import TokenStore
from tunesmith.model.forward import Shape
from tunesmith.objectives.base import Objective
from tunesmith.parallel.context import multiple_of
from tunesmith.plan.plan import ForwardSpec, Plan


def as_called(stores: Sequence[TokenStore], objective: Objective, spec: ForwardSpec) -> list[TokenStore]:
    """Pairs with their prompts once, for a model that takes them so."""
    shares = objective.has_pairs and spec.branches
    return [store.sharing() for store in stores] if shares else list(stores)


def micro_batch_shape(plan: Plan) -> Shape | None:
    """The one shape of micro-batches that compiled layers and pipeline stages see; None where any will do."""
    if not plan.is_compiled and plan.mesh.pipeline == 1:
        return None
    multiple = multiple_of(plan)
    tokens = -(-plan.micro_batch * plan.sequence_length // multiple) * multiple
    return Shape(tokens=tokens, longest=plan.sequence_length)


def settle_torch(plan: Plan) -> None:
    """The same numbers every time: always on a CPU, on a GPU when the plan says so. And no kernels that have to be
    prepared for each shape, where the shape is another one with every micro-batch: cuDNN's attention takes 50 ms."""
    if plan.by_length:
        torch.backends.cuda.enable_cudnn_sdp(False)
    if plan.device == "cpu":
        # Matmuls in bf16 are kept prepared for each shape; those of the last steps are enough.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
        if torch.get_num_threads() != plan.threads:
            torch.set_num_threads(plan.threads)
    if plan.deterministic and plan.device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
