"""What ranks are told to do by the tests of this folder; each function runs on all of them at once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunesmith.config.load import from_mapping
from tunesmith.errors import UserError
from tunesmith.parallel.ranks import Ranks
from tunesmith.plan.plan import Mesh, Plan
from tunesmith.run.assemble import assemble
from tunesmith.run.choose import new_plan
from tunesmith.run.start import join_run, prepare_run
from tunesmith.train.job import Job
from tunesmith.train.loop import loss_scale_of, rate_of, step_of, train

STEPS = 20
"""Of the runs that are compared with one rank's."""
METHODS = {
    "full": {"method": "full"},
    "lora": {"method": "lora"},
    "qlora": {"method": "qlora"},
    "qlora in 8 bits": {"method": "qlora", "lora": {"rank": 4, "bits": 8}},
}
"""What their settings say of it."""


def job_of(
    ranks: Ranks,
    folder: str,
    mesh: dict[str, int],
    sharding: str,
    wire: dict[str, str] | None = None,
    moved: dict[str, Any] | None = None,
    **changes: Any,
) -> Job:
    """The job that `tunesmith train` would run in `folder`, with this mesh; output goes to a folder of its own.
    `moved`: what the plan has elsewhere, even if that makes no sense on a CPU."""
    settings = json.loads((Path(folder) / "run.yaml").read_text()) | changes
    run = from_mapping(settings)
    if ranks.is_first:
        Path(run.output).mkdir(parents=True, exist_ok=True)
        setting = prepare_run(run, plan=made(run, mesh, sharding, wire), warn=print)
    ranks.wait()
    if not ranks.is_first:
        setting = join_run(run)
    return assemble(replace(setting, plan=setting.plan.changed(**moved or {})), ranks)


def failure(ranks: Ranks, **job: Any) -> str:
    """What a run that must fail says of it."""
    try:
        train(job_of(ranks, **job), lambda _: None)
    except UserError as error:
        return str(error)
    raise AssertionError("it did not fail")


def made(run, mesh: dict[str, int], sharding: str, wire: dict[str, str] | None = None) -> Plan:
    plan = new_plan(run.model_copy(update={"device": "cpu"}))
    return plan.changed(threads=1, micro_batch=1, mesh=Mesh(**mesh), sharding=sharding, **wire or {})


def steps(ranks: Ranks, count: int, **job: Any) -> list[dict[str, Any]]:
    """Loss, losses by data set, gradient norm and data of each step."""
    made_job = job_of(ranks, **job)
    step = step_of(made_job, loss_scale_of(made_job))
    made_job.model.train()
    found = []
    for number in range(count):
        batch = made_job.loader.step(number)
        if made_job.roll_out is not None:
            batch = made_job.roll_out(batch, lambda *_: None)
        result = step(batch, rate_of(made_job, number))
        found.append(
            {
                "loss": result.loss,
                "losses": {str(source): loss for source, loss in sorted(result.losses.items())},
                "norm": result.grad_norm,
                "figures": result.figures,
                "data": [origin for one in batch.micro_batches if one.weights.any() for origin in one.origins],
            }
        )
    return found


def traffic(ranks: Ranks, **job: Any) -> dict[str, float]:
    """What one step sends between ranks: values gathered, scattered, reduced and exchanged, in bytes; what of it has to
    go from node to node, of two ranks each; and the parameters."""
    import torch
    import torch.distributed as dist

    made_job = job_of(ranks, **job)
    step = step_of(made_job, loss_scale_of(made_job))
    made_job.model.train()
    step(made_job.loader.step(0), 1e-3)
    sent = {"gathered": 0.0, "scattered": 0.0, "reduced": 0.0, "exchanged": 0.0, "between": 0.0}
    names = {  # torch 2.13 has new names for the first two
        "gathered": ("all_gather_single", "all_gather_into_tensor"),
        "scattered": ("reduce_scatter_single", "reduce_scatter_tensor"),
        "reduced": ("all_reduce",),
        "exchanged": ("all_to_all_single",),
    }
    real = {name: getattr(dist, name) for known in names.values() for name in known if hasattr(dist, name)}

    def counting(name: str, kind: str, whole: Any):
        def call(*arguments: Any, **options: Any) -> Any:
            tensor = whole(arguments, options)
            group = options.get("group")
            if tensor.numel() > 16 and (group is None or group.size() > 1):  # a few numbers are the step's losses
                sent[kind] += tensor.nbytes
                members = dist.get_process_group_ranks(group or dist.group.WORLD)
                elsewhere = sum(rank // 2 != ranks.rank // 2 for rank in members) / len(members)
                sent["between"] += elsewhere * tensor.nbytes * (2 if kind == "reduced" else 1)
            return real[name](*arguments, **options)

        return call

    def first(arguments: tuple, options: dict) -> torch.Tensor:
        return arguments[0] if arguments else options.get("output_tensor", options.get("tensor"))

    def second(arguments: tuple, options: dict) -> torch.Tensor:
        return arguments[1] if len(arguments) > 1 else options["input"]

    for kind, known in names.items():
        for name in known:
            if name in real:
                setattr(dist, name, counting(name, kind, second if kind == "scattered" else first))
    try:
        step(made_job.loader.step(1), 1e-3)
    finally:
        for name, function in real.items():
            setattr(dist, name, function)
    model = made_job.model.model
    layers = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name and p.requires_grad)
    everything = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {**sent, "layers": layers, "outside": everything - layers}


def train_for(ranks: Ranks, until: int, **job: Any) -> dict[str, Any]:
    """Continue the run in its folder up to this step and save; its history, and which steps this sitting did."""
    from tunesmith.train import events
    from tunesmith.train.loop import train

    made_job = job_of(ranks, **job)
    seen: list[events.Event] = []

    def observe(event: events.Event) -> None:
        seen.append(event)

    if until < made_job.loader.total_steps:
        stopper = _stop_after(until, observe)
        made_job = replace(made_job, run=made_job.run.model_copy(update={"max_minutes": 1e9}))
        outcome = train(made_job, stopper)
    else:
        outcome = train(made_job, observe)
    steps_seen = [event for event in seen if isinstance(event, events.Step)]
    evaluations = [event.loss for event in seen if isinstance(event, events.Evaluation)]
    return {
        "first": steps_seen[0].step,
        "last": outcome.step,
        "losses": [event.loss for event in steps_seen],
        "evaluations": evaluations,
    }


def vocabulary_errors(ranks: Ranks) -> list[float]:
    """How far loss and gradients over a vocabulary that two ranks share are off, in several ways of computing them."""
    import torch
    import torch.distributed as dist

    from tunesmith.kernels.linear_cross_entropy import VocabularyPart, linear_cross_entropy

    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((17, 5), (23, 5), (23,)))
    rows, labels = torch.arange(2, 13), torch.randint(23, (11,), generator=generator)
    weights = torch.rand(11, generator=generator)
    mine = slice(ranks.rank * 12, ranks.rank * 12 + 12)  # 12 and 11 tokens
    worst = []
    for options in ({}, {"chunk": 3}, {"softcap": 5.0, "scale": 2.0}, {"z_loss": 0.3, "bias_v": True}):
        found = []
        for part in (None, VocabularyPart(mine.start, 12, dist.group.WORLD)):
            leaves = [one.clone() if part is None else one[at].clone() for one, at in _cut(hidden, weight, bias, mine)]
            for leaf in leaves:
                leaf.requires_grad_()
            more = {**options, "bias_v": leaves[2] if options.get("bias_v") else None, "part": part}
            total, losses = linear_cross_entropy(*leaves[:2], labels, weights, rows, **more)
            total.backward()
            if part is not None:
                dist.all_reduce(leaves[0].grad)
            gradients = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves]
            if part is None:
                gradients = [gradient[at] for gradient, (_, at) in zip(gradients, _cut(*leaves, mine), strict=True)]
            found.append([total.detach(), losses, *gradients])
        worst.append(max((ours - theirs).abs().max().item() for ours, theirs in zip(*found, strict=True)))
    return worst


def refusal_of_a_wrong_split(ranks: Ranks, **job: Any) -> str:
    """What is said of a model whose parts, over tensor ranks, are not added up."""
    from tunesmith.errors import UserError
    from tunesmith.parallel import tensor

    real = tensor.scatter_rows
    tensor.scatter_rows = lambda x, group: x.chunk(group.size)[ranks.rank % group.size]
    try:
        job_of(ranks, **job)
    except UserError as error:
        return str(error)
    finally:
        tensor.scatter_rows = real
    return ""


def _cut(hidden: Any, weight: Any, bias: Any, rows: slice) -> list[tuple[Any, slice]]:
    return [(hidden, slice(None)), (weight, rows), (bias, rows)]


def _stop_after(step: int, observe: Any):
    """Ask this process to stop, as a pre-emption does, when so many steps are done."""
    import os
    import signal

    from tunesmith.train import events

    def watch(event: events.Event) -> None:
        observe(event)
        if isinstance(event, events.Step) and event.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return watch


def most_that_was_whole(ranks: Ranks, **job: Any) -> dict[str, float]:
    """While a model is loaded: the most bytes of it that this rank held, against all its bytes, and a layer's."""
    from torch.distributed.tensor import DTensor

    from tunesmith.model.structure import decoder_layers
    from tunesmith.parallel import prepare

    held: list[int] = []
    real = prepare.put_weights

    def watched(model, *arguments, **options):
        real(model, *arguments, **options)
        tensors = [*model.parameters(), *model.buffers()]
        local = [one.to_local() if isinstance(one, DTensor) else one for one in tensors if not one.is_meta]
        held.append(sum(one.nbytes for one in local))

    prepare.put_weights = watched
    try:
        made_job = job_of(ranks, **job)
    finally:
        prepare.put_weights = real
    model = made_job.model.model
    layer = sum(one.numel() * one.element_size() for one in decoder_layers(model)[0].parameters())
    everything = sum(one.numel() * one.element_size() for one in model.parameters())
    return {"most": max(held), "layer": layer, "all": everything, "parts": len(held)}


def loading(ranks: Ranks, **job: Any) -> dict[str, int]:
    """While the model is loaded: by how many bytes this process, which has done nothing before, grew at most, and how
    many it read.

    Pages of the model's files count as long as they are mapped, the same ones once for each rank. Pages of libraries'
    files, which the first use of a function maps, do not: all processes have the same ones.
    """
    import ctypes
    import gc

    from tunesmith.model import files
    from tunesmith.run import assemble as module

    def kilobytes(what: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))

    found: dict[str, int] = {}
    real_check, real_build, real_read = module.check_parallelism, module.build, files.Tensor.read

    def check(*arguments: Any) -> Any:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what imports have left would be given back while the model is loaded
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        found.update(before=kilobytes("VmRSS"), mapped=kilobytes("RssFile"), read=0)
        return real_check(*arguments)

    def read(*arguments: Any) -> Any:
        tensor = real_read(*arguments)
        found["read"] += tensor.nbytes
        return tensor

    def build(*arguments: Any, **options: Any) -> Any:
        assert "model.safetensors" not in Path("/proc/self/maps").read_text()
        found.update(most=kilobytes("VmHWM"), libraries=kilobytes("RssFile") - found["mapped"])
        return real_build(*arguments, **options)

    module.check_parallelism, module.build, files.Tensor.read = check, build, read
    try:
        job_of(ranks, **job)
    finally:
        module.check_parallelism, module.build, files.Tensor.read = real_check, real_build, real_read
    return {"grew": 1024 * (found["most"] - found["before"] - found["libraries"]), "read": found["read"]}


def evaluated(ranks: Ranks, **job: Any) -> dict[str, Any]:
    """Losses and scores of tasks before the first step, and what is kept to be shown."""
    from tunesmith.train import samples

    made_job = job_of(ranks, **job)
    made_job.model.eval()
    assert made_job.evaluate is not None
    found = made_job.evaluate(0, lambda *_: None)
    ranks.wait()
    return {"loss": found.loss, "tasks": found.tasks, "samples": samples.read(made_job.folder)[0]}
