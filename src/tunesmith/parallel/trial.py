"""How a model that will lie over several ranks is called, and whether it may be cut: tried before it is loaded, on a
small twin of it, all ranks taking part.

No rank ever has the whole model, so what that computes is not known. How it must be called and how it may be cut is
its code's matter and not its weights': a few narrow layers tell it as well as many.
"""

from __future__ import annotations

import torch
from torch import nn

from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.kernels.nf4 import BLOCK
from tunesmith.model import load, lora, quantized
from tunesmith.model.forward import Calling, settle
from tunesmith.model.fuse import fuse
from tunesmith.model.probe import Probed
from tunesmith.parallel.mesh import world_mesh
from tunesmith.parallel.pipeline import check_stages
from tunesmith.parallel.tensor import Split, check_split
from tunesmith.plan.plan import Plan
from tunesmith.plan.stages import PER_RANK

MOST_STAGES = 4
"""That are tried; one more is as good as another."""


def try_twin(run: Run, plan: Plan, device: torch.device, probed: Probed) -> tuple[Calling, str | None]:
    """As `settle` has it; UserError where what stages or strips compute is not what the model computes itself."""
    tensor, stages = plan.mesh.tensor, min(MOST_STAGES, plan.mesh.pipeline * PER_RANK[plan.schedule])
    width = BLOCK * tensor  # whole blocks of weights in nf4 for each rank
    twin = load.build_twin(run, dtype=plan.precision, device=device, layers=max(2, stages), width=width)
    sizes = {"vocabulary": load.vocabulary_size(twin.config), "longest": plan.sequence_length}
    calling, note = settle(twin, **sizes, known=probed.calling)
    check_layout(twin, calling, plan)
    if plan.mesh.pipeline > 1:
        check_stages(twin, stages)
    if tensor > 1:
        if plan.storage != "plain":
            quantized.quantize_linears(twin, dtype=next(twin.parameters()).dtype, device=device, storage=plan.storage)
        if run.has_adapters:
            lora.attach(twin, run.lora.model_copy(update={"layers": None}), seed=run.seed)

        def make_split() -> None:
            split = Split.of(twin, world_mesh(plan))
            split.cut(twin)
            if run.has_adapters and probed.can_fuse:
                fuse(twin, fp8=plan.products == "fp8", whole_mlps=device.type == "cuda")
            split.connect(twin)

        check_split(twin, tensor, make_split)
    return calling, note


def check_layout(model: nn.Module, calling: Calling, plan: Plan) -> None:
    """Tokens can be shared out, and have one shape for all stages, where they lie end to end."""
    axes = [axis for axis in ("tensor", "context", "pipeline") if getattr(plan.mesh, axis) > 1]
    if axes and calling.layout != "packed":
        raise UserError(
            f"{type(model).__name__} does not take packed documents, which {axes[0]} parallelism needs; use a plan "
            f"with {axes[0]} 1."
        )
