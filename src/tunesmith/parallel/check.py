"""The parallelism check: whether a model may be split over tensor ranks, its sequences be cut over context ranks, its
layers into stages and its experts over ranks, tried before it is loaded on a small proxy of it, all ranks taking part.

No rank ever has the whole model, so what that computes is not known. How it may be cut is its code's matter and not its
weights': a few narrow layers tell it as well as many.
"""

from __future__ import annotations

import torch

from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.kernels.nf4 import BLOCK
from tunesmith.model import attention, load, lora, quantized
from tunesmith.model.experts import experts_of_layers
from tunesmith.model.structure import set_attention
from tunesmith.parallel.context import check_context
from tunesmith.parallel.expert import check_experts
from tunesmith.parallel.mesh import world_mesh
from tunesmith.parallel.pipeline import check_stages
from tunesmith.parallel.prepare import Preparation, fuse_adapters, split
from tunesmith.parallel.tensor import TensorParallelPlan, check_split
from tunesmith.plan.plan import Plan
from tunesmith.plan.stages import PER_RANK

MOST_STAGES = 4
"""That are tried; one more is as good as another."""


def check_parallelism(run: Run, plan: Plan, device: torch.device) -> None:
    """UserError where what stages or strips compute is not what the model computes itself."""
    axes = [axis for axis in ("tensor", "context", "pipeline", "expert") if getattr(plan.mesh, axis) > 1]
    if not axes:
        return
    tensor, stages = plan.mesh.tensor, min(MOST_STAGES, plan.mesh.pipeline * PER_RANK[plan.schedule])
    width = BLOCK * tensor  # whole blocks of weights in nf4 for each rank
    # In fp32, whatever the run computes in: what differs is then the cut, and not what half precision rounds.
    layers = max(2, stages, _layers_to_experts(run) if plan.mesh.expert > 1 else 0)
    proxy = load.build_small_proxy(run, dtype="fp32", device=device, layers=layers, width=width)
    if plan.mesh.expert > 1:
        check_experts(proxy)
    if axes == ["expert"]:
        return
    if plan.forward.layout != "packed":  # tokens can be shared out where they lie end to end
        raise UserError(
            f"{type(proxy).__name__} does not take packed documents, which {axes[0]} parallelism needs; use a plan "
            f"with {axes[0]} 1."
        )
    set_attention(proxy, attention.NAME)
    if plan.mesh.pipeline > 1:
        check_stages(proxy, stages)
    if plan.mesh.context > 1:
        check_context(proxy, plan)
    if tensor > 1:
        dtype = next(proxy.parameters()).dtype
        if plan.storage != "plain":
            quantized.quantize_linears(proxy, dtype=dtype, device=device, storage=plan.storage)
        if run.has_adapters:
            lora.attach(proxy, run.lora.model_copy(update={"layers": None}), seed=run.seed)

        def make_split() -> None:
            work = Preparation(proxy, run, device, dtype, plan=plan)
            work.split = TensorParallelPlan.of(proxy, world_mesh(plan))
            work.apply([split, fuse_adapters])
            work.split.connect(proxy)

        check_split(proxy, tensor, make_split)


def _layers_to_experts(run: Run) -> int:
    """How many layers, from the first, have experts among them: the first ones may be dense."""
    layers = (lora.layer_of(name) for name in experts_of_layers(load.load_skeleton(run)))
    return 1 + min((layer for layer in layers if layer is not None), default=0)
