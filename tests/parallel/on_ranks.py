"""What ranks are told to do by the tests of this folder; each function runs on all of them at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tunesmith.assemble import assemble, join_run, plan_run, prepare_run
from tunesmith.config.load import from_mapping
from tunesmith.parallel.ranks import Ranks
from tunesmith.plan.plan import Mesh, Plan
from tunesmith.train.job import Job
from tunesmith.train.loop import loss_scale_of, rate_of, step_of


def job_of(ranks: Ranks, folder: str, mesh: dict[str, int], sharding: str, **changes: Any) -> Job:
    """The job that `tunesmith train` would run in `folder`, with this mesh; output goes to a folder of its own."""
    settings = json.loads((Path(folder) / "run.yaml").read_text()) | changes
    run = from_mapping(settings)
    if ranks.is_first:
        Path(run.output).mkdir(parents=True, exist_ok=True)
        setting = prepare_run(run, plan=made(run, mesh, sharding), warn=print)
    ranks.wait()
    if not ranks.is_first:
        setting = join_run(run)
    return assemble(setting, ranks)


def made(run, mesh: dict[str, int], sharding: str) -> Plan:
    plan = plan_run(run.model_copy(update={"device": "cpu"}))
    return plan.changed(threads=1, micro_batch=1, mesh=Mesh(**mesh), sharding=sharding)


def steps(ranks: Ranks, count: int, **job: Any) -> list[dict[str, Any]]:
    """Loss, losses by data set, gradient norm and data of each step."""
    made_job = job_of(ranks, **job)
    step = step_of(made_job, loss_scale_of(made_job))
    made_job.model.train()
    found = []
    for number in range(count):
        batch = made_job.loader.step(number)
        result = step(batch, rate_of(made_job, number))
        found.append(
            {
                "loss": result.loss,
                "losses": {str(source): loss for source, loss in sorted(result.losses.items())},
                "norm": result.grad_norm,
                "data": [origin for one in batch.micro_batches if one.weights.any() for origin in one.origins],
            }
        )
    return found
