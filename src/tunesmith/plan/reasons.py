"""Why a plan is as it is: a sentence for each decision, with the numbers it was made by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tunesmith.config.schema import Run
from tunesmith.disk import gib
from tunesmith.errors import listed
from tunesmith.plan import memory, model_states, paths, refusals, rules
from tunesmith.plan.candidates import Candidate
from tunesmith.plan.choice import Choice, Task
from tunesmith.plan.defaults import Decide
from tunesmith.plan.ranking import best_of, fits_host, saved_by_graphs

ROUNDING_ERROR = {"int8": "1/254 of the largest of its 128", "int4": "1/14 of the largest of its 64"}
"""How far quantized collectives round a value, at most (`parallel.quantized`)."""

GIVES_UP = {
    "lisa": "a step trains two layers, drawn at random, and what surrounds the layers",
    "badam": "a step trains one layer, and each has its turn",
    "apollo": "AdamW's states are those of gradients seen through a random projection",
}
"""Optimizers with which all weights are trained in less memory, and what each gives up for it."""


SCANS = {
    "ours": (
        "chunked scan of ours",
        "packed documents kept apart, without other libraries; tried equal to the model's code",
    ),
    "mamba-ssm": ("mamba-ssm", "its kernels and those of causal-conv1d keep packed documents apart"),
}
"""What runs along the tokens of Mamba-2 hybrids, and why."""


def explain(
    run: Run, task: Task, chosen: Candidate, every: list[Candidate], limit: int, fits: bool, decide: Decide
) -> None:
    """Say by `decide` what was chosen and why: what the others that were looked at (`every`) need or take."""
    if unused := run.unused_lora:
        decide("lora", "without effect", f"`method: {run.method}` has no use for {listed(unused, most=10)}")
    every = [candidate for candidate in every if fits_host(task, candidate.choice)] or every
    has = f"the {gib(limit)} that may be used"
    _explain_ranks(task, chosen, every, limit, decide)
    _explain_weights(run, task, chosen, every, has, decide)
    _explain_teacher(task, chosen, decide)
    _explain_blocks(task, chosen, limit, decide)
    _explain_gradients(task, chosen, decide)
    _explain_offload(task, chosen, every, limit, has, decide)
    _explain_computing(task, chosen, decide)
    _explain_checkpointing(task, chosen, every, has, fits, decide)
    host = memory.host_memory(task, chosen.choice)
    if task.device == "cuda" and host > task.hardware.available:
        decide(
            "host memory",
            gib(host),
            f"only {gib(task.hardware.available)} are free: loading the model may be killed by the system",
        )


def explain_engine(task: Task, chosen: Candidate, limit: int, decide: Decide) -> int:
    """Say what memory vLLM gets where it answers in rollouts, and return it: `limit` is what the trainer may use."""
    if not memory.has_engine(task):
        return 0
    needed, spare = memory.engine_memory(task), max(0, limit - chosen.bytes)
    if task.device == "cuda":
        granted = needed + spare
        has = f"{gib(granted)} of {'a' if task.hardware.gpu_count > 1 else 'the'} GPU, which the trainer leaves"
    else:
        granted = round(memory.engine_cache(task))
        has = f"about {gib(needed)} of host memory"
    decide(
        "answers",
        "by vLLM",
        f"a process of its own beside the trainer, with {has}; importance sampling corrects for its other arithmetic; "
        "a run that was killed continues, but not to the same bytes; its speed is planned as if the trainer answered",
    )
    return granted


def _explain_teacher(task: Task, chosen: Candidate, decide: Decide) -> None:
    if task.facts.teacher is None:
        return
    storage = chosen.choice.teacher_storage
    size = gib(round(memory.teacher_bytes(task, chosen.choice)))
    held = f"{size} in {task.precision if storage == 'plain' else storage}"
    if task.teacher_in_steps:
        decide("teacher", held, "frozen, in full on each rank; it runs on every micro-batch before the student does")
    else:
        decide("teacher", held, "runs once, before the student is loaded; its likeliest tokens are kept in the cache")


def _explain_ranks(task: Task, chosen: Candidate, every: list[Candidate], limit: int, decide: Decide) -> None:
    choice = chosen.choice
    if task.device == "cuda" and task.hardware.gpu_count > choice.ranks:
        idle = task.hardware.gpu_count - choice.ranks
        why = "the batch has too few sequences for all"
        decide("ranks", choice.ranks, f"{idle} GPU{'s'[: idle > 1]} stay idle: {why}")
    if choice.pipeline > 1:
        decide(
            "pipeline",
            f"{choice.pipeline} stages, {choice.schedule}",
            _why_axis("pipeline", task, chosen, every, limit),
        )
    if choice.expert > 1:
        each = max(rules.experts(task)) // choice.expert
        decide("experts", f"{each} of each layer on a rank", _why_axis("expert", task, chosen, every, limit))
    if choice.ranks > choice.pipeline:
        decide("sharding", _sharding_words(choice), _why_sharding(task, chosen, every, limit))
    if choice.is_lossy:
        sent = {"weights": choice.quantized_all_gather, "gradients": choice.quantized_reduce_scatter}
        words = " and ".join(f"{what} in {dtype}" for what, dtype in sent.items() if dtype != "plain")
        fitting = [candidate for candidate in every if candidate.bytes <= limit]
        decide("communication", words, _why_lossy(task, chosen, fitting))


def _explain_weights(run: Run, task: Task, chosen: Candidate, every: list[Candidate], has: str, decide: Decide) -> None:
    choice = chosen.choice
    if choice.storage != "plain":
        if task.is_quantized:
            decide("storage", choice.storage, f"method: {task.method} holds the frozen base in {task.lora.bits} bits")
        else:
            least = _least(every, lambda other: other.storage == "plain")
            decide("storage", choice.storage, f"in {task.precision} the base needs at least {least} of {has}")
    if choice.has_masters(task):
        lost = f"updates smaller than {task.precision}'s steps would be lost"
        decide("weights", f"{task.precision} with fp32 masters", lost)
    elif task.has_masters:
        least = _least(every, lambda other: other.master_weights and other.offload_optimizer == "none")
        decide("weights", "bf16, rounded stochastically", f"with fp32 masters at least {least} are needed of {has}")
    if run.optimizer_states is not None:
        decide("optimizer states", choice.optimizer_states, f"optimizer: {run.optimizer}")
    elif choice.optimizer_states != "fp32":
        least = _least(every, lambda other: other.optimizer_states == "fp32" and other.offload_optimizer == "none")
        decide("optimizer states", choice.optimizer_states, f"in fp32 at least {least} are needed of {has}")


def _explain_blocks(task: Task, chosen: Candidate, limit: int, decide: Decide) -> None:
    """Layers that are trained by turns; or, where states or masters were sacrificed or moved, that they could be."""
    facts, choice = task.facts, chosen.choice
    if task.optimizer in model_states.BLOCKWISE:
        active = model_states.active_parameters(task)
        what = "a block at a time" if task.optimizer == "badam" else f"{model_states.LISA_LAYERS} layers at a time"
        held = f"gradients, states and masters are those of {active:,} of {facts.parameters:,} parameters"
        decide("trained", what, f"optimizer: {task.optimizer}; {held}, and a weight begins anew with each of its turns")
        return
    is_short = choice.offload_optimizer != "none" or choice.offload_parameters or chosen.bytes > limit
    if task.has_adapters or task.optimizer != "adamw" or choice.ranks > 1 or not is_short:
        return
    for optimizer, gives_up in GIVES_UP.items():
        other = dataclasses.replace(task, optimizer=optimizer)
        plain = Choice(attention=choice.attention, checkpointed_layers=facts.layers)
        size = memory.peak(memory.timeline(other, plain)).memory.total
        if size <= limit and refusals.refused(other, plain) is None:
            decide("instead", f"optimizer: {optimizer}", f"about {gib(size)} would do on the device, but {gives_up}")


def _explain_gradients(task: Task, chosen: Candidate, decide: Decide) -> None:
    choice = chosen.choice
    if choice.optimizer_in_backward:
        decide(
            "gradients",
            "released in the backward pass",
            "one micro-batch a step and no max_grad_norm, so none has to be kept",
        )
    elif task.device == "cuda" and rules.may_release(dataclasses.replace(task, clips=False), choice):
        freed = chosen.peak.memory.gradients
        if freed and not (choice.checkpointed_layers == 0 and rules.complexity(choice) == 0):
            why = f"max_grad_norm needs the norm of all gradients; max_grad_norm: null would free up to {gib(freed)}"
            decide("gradients", "kept to the end of the step", why)


def _explain_offload(
    task: Task, chosen: Candidate, every: list[Candidate], limit: int, has: str, decide: Decide
) -> None:
    choice = chosen.choice
    if choice.offload_optimizer != "none":
        decide("offload", *_why_offloaded(task, chosen, every, has))
    if choice.offload_parameters:
        least = _least(every, lambda other: not other.offload_parameters)
        moved = 2 * choice.accumulation_steps(task) * model_states.parameter_traffic(task, choice)
        rate = task.rates.host_link
        takes = f"{gib(moved)} a step over the host link at {rate / 1e9:.3g} GB/s take {_seconds(moved / rate)}"
        is_beside = choice.ranks > 1 or choice.has_frozen_on_host(task)
        why = f"all else needs at least {least} of {has}; {takes}" + (", partly beside the computation" * is_beside)
        what = "frozen weights" if choice.has_frozen_on_host(task) else "parameters and gradients"
        decide("offload", f"{what} to host memory", why)
    if choice.offload_activations:
        others = [other for other in every if not other.choice.offload_activations]
        why = f"all else needs at least {_least(others, lambda _: True)} of {has}"
        if fitting := [other.time.total for other in others if other.bytes <= limit]:
            times = max(1.0, min(fitting) / chosen.time.total)
            why = f"copied beside the computation; the fastest other choice that fits takes {times:.2f} times as long"
        decide("offload", "layer inputs to host memory", why)


def _explain_computing(task: Task, chosen: Candidate, decide: Decide) -> None:
    choice = chosen.choice
    if task.device == "cuda" and task.facts.packs:
        decide("attention", *paths.said(task, choice.attention))
    if task.facts.scan is not None:
        decide("state spaces", *SCANS[task.facts.scan])
    if choice.mlp_slice:
        wide = 2 * max(kind.intermediate for kind in task.facts.kinds) * task.width * choice.tokens(task)
        decide("MLP", f"{choice.mlp_slice:,} tokens at a time", f"for all tokens it would make {gib(wide)} at once")
    if choice.cache_transposed:
        transposed = task.facts.matrices / choice.tensor
        decide(
            "weights",
            "also transposed",
            f"{gib(transposed)} more than needed, so that the backward pass transposes none",
        )
    if choice.cuda_graphs:
        waiting = f"{saved_by_graphs(task, choice):.0%} of a step the GPU would wait for the CPU"
        decide("launching", "captured passes", f"{waiting} to start kernels; these are captured once and replayed")
    count, about = choice.accumulation_steps(task), ""
    if task.padded is not None and task.padded.steps:
        count, about = max(1, round(task.padded.micro_batches(choice.room(task), choice.data_ranks))), "about "
    decide(
        "micro-batch",
        choice.micro_batch,
        f"{about}{count} forward pass{'es'[: 2 * (count > 1)]} a step, about {gib(chosen.bytes)} at the peak",
    )


def _explain_checkpointing(
    task: Task, chosen: Candidate, every: list[Candidate], has: str, fits: bool, decide: Decide
) -> None:
    choice = chosen.choice
    layers = task.facts.layers
    if not fits:
        decide(
            "checkpointing",
            "all layers" if choice.checkpointed_layers else "none",
            f"even so, about {gib(chosen.bytes)} are needed of {has}, so it may run out of memory; a shorter "
            "sequence_length or method: lora needs less",
        )
    elif choice.checkpointed_layers == 0:
        decide("checkpointing", "none", f"everything fits into {has}")
    else:
        same = [
            other.bytes for other in every if _without_checkpointing(other.choice) == _without_checkpointing(choice)
        ]
        needed = gib(max(same))
        count = (
            "all layers" if choice.checkpointed_layers == layers else f"{choice.checkpointed_layers} of {layers} layers"
        )
        kept = "; outputs of attention are kept" if choice.save_attention else ""
        decide("checkpointing", count, f"keeping all activations would need about {needed} of {has}{kept}")


def _why_offloaded(task: Task, chosen: Candidate, every: list[Candidate], has: str) -> tuple[str, str]:
    """Where the optimizer's states go and why, with what moves in each step and how long that takes."""
    choice, hardware = chosen.choice, task.hardware
    least = _least(every, lambda other: other.offload_optimizer == "none")
    why = f"all else needs at least {least} of {has}"
    if choice.offload_optimizer == "host":
        moved, rate, way = (
            model_states.offloaded_bytes(task, choice),
            task.rates.host_link,
            "each way over the host link",
        )
    else:
        moved, rate, way = 2 * model_states.disk(task, choice), hardware.disk_rate, "from and to the disk"
        in_memory = dataclasses.replace(choice, offload_optimizer="host")
        if task.device == "cuda" and (need := memory.host_memory(task, in_memory)) > hardware.available:
            why += f", and host memory would have to hold {gib(need)} and has {gib(hardware.available)}"
    why += f"; {gib(moved)} a step {way} at {rate / 1e9:.3g} GB/s take {_seconds(moved / rate)}"
    return f"optimizer states to {'host memory' if choice.offload_optimizer == 'host' else 'disk'}", why


def _least(every: list[Candidate], of: Callable[[Choice], bool]) -> str:
    """The least memory that choices of this kind need; pins may have left none of them."""
    needs = [candidate.bytes for candidate in every if of(candidate.choice)]
    return gib(min(needs)) if needs else "more"


def _without_checkpointing(choice: Choice) -> Choice:
    """The choice with every activation kept, as far as it decides about that."""
    return dataclasses.replace(
        choice, checkpointed_layers=0, save_attention=False, mlp_slice=0, offload_activations=False
    )


def _sharding_words(choice: Choice) -> str:
    words = {
        "ddp": f"replicated on {choice.data_ranks}" if choice.data_ranks > 1 else "one copy",
        "hybrid": f"hybrid, {choice.shard} a node times {choice.replicate}",
        "hierarchical": f"hierarchical, {choice.shard} a node times {choice.replicate}",
        "none": "none",
    }.get(choice.sharding, f"{choice.sharding} over {choice.data_ranks}")
    for axis in ("tensor", "context", "pipeline"):
        if getattr(choice, axis) > 1:
            words += f", {axis} {getattr(choice, axis)}"
    return words


def _why_sharding(task: Task, chosen: Candidate, every: list[Candidate], limit: int) -> str:
    """What the choice is better than, by the model's own numbers."""

    def best(sharding: str) -> Candidate | None:
        kind = [other for other in every if other.choice.sharding == sharding and other.choice.pipeline == 1]
        return best_of(task, [other for other in kind if other.bytes <= limit]) or min(
            kind, key=lambda other: other.bytes, default=None
        )

    sharding = chosen.choice.sharding
    if sharding == "ddp":
        holders = chosen.choice.tensor * chosen.choice.pipeline
        held = f"over {holders} ranks" if holders > 1 else "on each rank"
        return f"a full copy fits {held}, which costs the least communication"
    parts = []
    replicated = best("ddp")
    if replicated and replicated.bytes > limit:
        parts.append(f"a copy on each rank needs {gib(replicated.bytes)} of {gib(limit)}")
    if sharding in ("hybrid", "hierarchical") and (full := best("zero3")):
        ratio = full.time.total / chosen.time.total
        gigabits = task.hardware.network * 8 / 1e9
        parts.append(f"sharding over all nodes would take {ratio:.1f} times as long over {gigabits:.0f} Gbit/s")
    elif replicated and replicated.bytes <= limit:
        parts.append(f"{1 - chosen.time.total / replicated.time.total:.0%} less time than a copy on each rank")
    return "; ".join(parts) or "the least time of what fits"


def _why_axis(axis: str, task: Task, chosen: Candidate, every: list[Candidate], limit: int) -> str:
    """What a pipeline or expert parallelism is better than."""
    without = [other for other in every if getattr(other.choice, axis) == 1 and not other.choice.is_lossy]
    quickest = best_of(task, [other for other in without if other.bytes <= limit])
    gain = f"every exact choice without it needs at least {_least(without, lambda _: True)}"
    if quickest is not None:
        times = quickest.time.total / chosen.time.total
        gain = f"the fastest exact choice without it would take {times:.1f} times as long"
    if axis == "expert":
        return f"tokens are sent to their experts, instead of weights to all ranks; {gain}"
    waiting = chosen.time.bubbles / chosen.time.total
    return f"stages send each other hidden states only, and wait {waiting:.0%} of the time; {gain}"


def _why_lossy(task: Task, chosen: Candidate, fitting: list[Candidate]) -> str:
    exact = [other.time.total for other in fitting if not other.choice.is_lossy]
    gain = ""
    if exact:
        times, gigabits = min(exact) / chosen.time.total, task.hardware.network * 8 / 1e9
        gain = f"; a plan with plain collectives is exact, and takes {times:.1f} times as long over "
        gain += f"{gigabits:.3g} Gbit/s"
    off = "; ".join(
        ROUNDING_ERROR[dtype]
        for dtype in dict.fromkeys((chosen.choice.quantized_all_gather, chosen.choice.quantized_reduce_scatter))
        if dtype in ROUNDING_ERROR
    )
    return f"lossy: each value is off by at most {off}{gain}"


def _seconds(time: float) -> str:
    return f"{time:.0f} s" if time >= 10 else f"{time:.1f} s"
