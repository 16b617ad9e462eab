"""What may be chosen for a task, with memory and time of each: storage and offload in tiers, meshes, micro-batches, and
as much recomputation as they need."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tunesmith.plan import memory, model_states, paths, refusals, rules, speed
from tunesmith.plan.choice import Choice, Task
from tunesmith.plan.plan import Phase, Time

MICRO_BATCH_TOKENS = {"cpu": 4096, "cuda": 65536}
"""More tokens in one forward pass bring no more speed on these devices."""
ROLLOUT_TOKENS = 16384
"""Of a micro-batch of answers."""
MLP_SLICE = 4096
"""Tokens of a slice of an MLP: enough for its matmuls to be near their full speed."""
MOST_VALUES = 1 << 31
"""Of one tensor, as far as kernels can count."""
SCHEDULES = ("1f1b", "interleaved")
"""Those that are looked at; zero-bubble is for those who ask for it, since it goes with plain layers only."""
MOST_STAGES = 16
IN_INT8 = {"quantized_all_gather": "int8", "quantized_reduce_scatter": "int8"}


@dataclass(frozen=True)
class Candidate:
    choice: Choice
    peak: Phase
    time: Time

    @property
    def bytes(self) -> int:
        return self.peak.memory.total


class Refused:
    """Remembers the first reason for which something was not even looked at."""

    first: str | None = None


def tiers_of(task: Task) -> list[dict[str, Any]]:
    """What is tried when nothing before it fits. `axes`: split single sequences and layers over ranks, too."""
    asked = "int8" if task.lora.bits == 8 else "nf4"
    plain = {"storage": asked if task.is_quantized else "plain"}
    if task.device == "cpu":
        has_large_states = not task.has_adapters and task.optimizer in model_states.ALONE
        return [plain, {**plain, "offload_optimizer": "disk"}] if has_large_states else [plain]
    if task.has_adapters:
        # What was asked for stays; else 8 bits, which are closer to the base, before 4.
        small: dict[str, Any] = {"storage": "nf4"}
        order = [plain] if task.method in ("qlora", "peft") or task.is_merged else [plain, {"storage": "int8"}, small]
        order += [] if task.is_merged else [{**order[-1], "offload_parameters": True}]
    else:
        is_fused, sent = task.optimizer in model_states.ALONE, {"offload_activations": True}
        small = {"optimizer_states": "int8"} if is_fused else {}
        rounded = [{**small, "master_weights": False}] if is_fused and task.precision == "bf16" else []
        beside = ({}, {**small, **sent})
        moved = [{**tier, "offload_optimizer": "host"} for tier in beside if is_fused]
        moved += [{**tier, "offload_parameters": True} for tier in ({}, sent)]
        moved += [{**tier, "offload_optimizer": "disk"} for tier in beside if is_fused]
        moved += [{**sent, "offload_parameters": True, "offload_optimizer": "disk"}] if is_fused else []
        order = [plain, small, {**small, **sent}, *rounded, *moved]
    if task.facts.teacher is not None:  # frozen, and nothing is trained over it: the first to be in 4 bits
        order = [order[0], *({**tier, "teacher_storage": "nf4"} for tier in order)]
    tiers = [tier for without_axes in order for tier in (without_axes, {**without_axes, "axes": True})]
    return [tier for index, tier in enumerate(tiers) if tier not in tiers[:index]]


def candidates_of(
    task: Task,
    tier: Mapping[str, Any],
    pins: Mapping[str, Any],
    limit: int,
    seen: set[Choice],
    why_not: Refused,
) -> Iterator[Candidate]:
    base = Choice(
        attention=paths.preferred(task),
        # Padded rows change their shape with every step; modules of other libraries are run as they are, and so are
        # layers that are frozen and trained by turns.
        is_compiled=task.device == "cuda"
        and task.facts.packs
        and task.optimizer not in model_states.BLOCKWISE
        and task.method not in ("peft", "loqt"),
        **{name: value for name, value in tier.items() if name != "axes"},
    )
    fixed = {name: value for name, value in pins.items() if name != "checkpointed_layers"}
    layers = pins.get("checkpointed_layers")
    has_axes = tier.get("axes", False) or task.sequences < task.hardware.gpu_count > 1
    wanted = fixed.get("pipeline")
    plain = list(_meshes(task, has_axes=has_axes)) if wanted in (None, 1) else []
    if base.offload_parameters and plain == [{}] and not task.has_adapters:
        plain = [{"sharding": "zero3"}]  # of one rank: what brings trained weights layer by layer is the same
    for mesh in itertools.chain(plain, _pipelines(task, wanted)):
        for micro_batch in _micro_batches(task, mesh):
            choice = dataclasses.replace(base, **{**mesh, "micro_batch": micro_batch, **fixed})
            if "optimizer_in_backward" not in fixed:
                choice = dataclasses.replace(choice, optimizer_in_backward=rules.may_release(task, choice))
            if choice in seen or (choice.pipeline > 1 and not _has_work(task, choice, is_asked_for=wanted is not None)):
                continue
            seen.add(choice)
            refusal = refusals.refused(task, choice)
            if refusal is None and (missing := rules.beyond(task, choice)):
                refusal = f"this version of Tunesmith cannot do {missing[0]}"
            if refusal is None and choice.ranks > task.hardware.nodes * task.ranks_per_node:
                refusal = "there are fewer GPUs than its mesh has ranks"
            if refusal is not None:
                why_not.first = why_not.first or refusal
                continue
            yield from _checkpointing(task, choice, layers, _checkpointing_options(task, choice, pins), limit)
            captured = dataclasses.replace(choice, cuda_graphs=True)
            if "cuda_graphs" not in fixed and rules.may_capture(task, captured):
                yield from _checkpointing(task, captured, layers, _checkpointing_options(task, captured, pins), limit)


def make_candidate(task: Task, choice: Choice, checkpointed_layers: int) -> Candidate:
    choice = dataclasses.replace(choice, checkpointed_layers=checkpointed_layers)
    return Candidate(choice, memory.peak(memory.timeline(task, choice)), speed.step_time(task, choice))


def _checkpointing(
    task: Task, choice: Choice, layers: int | None, options: list[dict[str, Any]], limit: int
) -> Iterator[Candidate]:
    """The choice with as much recomputation as it needs, with each of the options: none when it fits without."""
    if not rules.may_checkpoint(task):
        yield make_candidate(task, choice, 0)
        return
    if layers is not None:
        yield make_candidate(task, choice, min(layers, task.facts.layers))
        return
    if not options[0]["offload_activations"]:  # of what is not checkpointed nothing is offloaded
        plain = make_candidate(task, dataclasses.replace(choice, mlp_slice=options[0]["mlp_slice"]), 0)
        yield plain
        if plain.bytes <= limit:
            return
    for option in options:
        yield from _fewest_layers(task, dataclasses.replace(choice, **option), limit)


def _checkpointing_options(task: Task, choice: Choice, pins: Mapping[str, Any]) -> list[dict[str, Any]]:
    """How checkpointed layers may save memory; the first of them is that of a run that checkpoints nothing."""
    can_offload = task.has_adapters and task.device == "cuda"
    values: dict[str, tuple[Any, ...]] = {
        "mlp_slice": _slices(task, choice),
        # Over adapters layer inputs in host memory cost time alone; else they are a tier of their own.
        "offload_activations": (False, True) if can_offload else (False,),
        "save_attention": (False, True),
    }
    if choice.offload_activations:
        values["offload_activations"] = (True,)
    values |= {name: (pins[name],) for name in values.keys() & pins.keys()}
    return [dict(zip(values, combination, strict=True)) for combination in itertools.product(*values.values())]


def _slices(task: Task, choice: Choice) -> tuple[int, ...]:
    """Tokens an MLP may take at a time: all (0), unless they are too many for one tensor, or a slice."""
    tokens, widest = choice.tokens(task), max(kind.intermediate for kind in task.facts.kinds)
    has_experts = any(linear.count > 1 for kind in task.facts.kinds for linear in kind.linears)
    if task.device == "cpu" or has_experts or tokens <= MLP_SLICE or task.method == "peft":
        return (0,)
    return (MLP_SLICE,) if tokens * 2 * widest >= MOST_VALUES else (0, MLP_SLICE)


def _fewest_layers(task: Task, choice: Choice, limit: int) -> Iterator[Candidate]:
    """The choice with every layer checkpointed, and with only as many as it needs."""
    evaluate = functools.partial(make_candidate, task, choice)
    every = evaluate(task.facts.layers)
    yield every
    if every.bytes > limit:
        return
    low, high = 0, task.facts.layers  # the fewest layers that do
    while high - low > 1:
        middle = (low + high) // 2
        if evaluate(middle).bytes <= limit:
            high = middle
        else:
            low = middle
    if high < task.facts.layers:
        yield evaluate(high)


def _meshes(task: Task, *, has_axes: bool) -> Iterator[dict[str, Any]]:
    """Ways to lay ranks over the GPUs; all of them are used where the batch has work for all."""
    hardware = task.hardware
    per_node = task.ranks_per_node
    if hardware.nodes * per_node == 1:
        yield {}
        return
    powers = [size for size in (1, 2, 4, 8, 16) if per_node % size == 0] if has_axes else [1]
    for tensor in powers:
        for context in powers:
            if tensor * context > per_node or (context > 1 and task.sequences >= hardware.gpu_count):
                continue
            here = per_node // (tensor * context)
            while here > 1 and here * hardware.nodes > task.sequences:
                here //= 2
            nodes = min(hardware.nodes, max(1, task.sequences // here))
            ranks = here * nodes
            mesh = {"tensor": tensor, "context": context}
            if ranks * tensor * context == 1:
                yield mesh
                continue
            yield {**mesh, "sharding": "ddp", "replicate": ranks}
            for sharding in ("zero1", "zero2", "zero3"):
                yield {**mesh, "sharding": sharding, "shard": ranks}
            if nodes > 1 and here > 1:
                yield {**mesh, "sharding": "hybrid", "shard": here, "replicate": nodes}
                yield {**mesh, "sharding": "hierarchical", "shard": here, "replicate": nodes}
            if nodes > 1 and not task.has_adapters:
                hierarchical = {"sharding": "hierarchical", "shard": here, "replicate": nodes}
                yield {**mesh, **(hierarchical if here > 1 else {"sharding": "zero3", "shard": ranks}), **IN_INT8}
            if tensor * context == 1 and rules.experts(task) and task.facts.note is None:
                yield {**mesh, "sharding": "zero3", "shard": ranks, "expert": ranks}


def _pipelines(task: Task, pinned: int | None) -> Iterator[dict[str, Any]]:
    """With several nodes: a stage for each of them or for each rank, whose ranks replicate or share. Within one node
    pipelines bring little, and are looked at when their number of stages is given."""
    nodes, ranks = task.hardware.nodes, task.hardware.nodes * task.ranks_per_node
    own = {size for size in (nodes, ranks) if size <= MOST_STAGES} if nodes > 1 and _can_be_cut(task) else set()
    for pipeline in sorted(own) if pinned is None else range(max(2, pinned), pinned + 1):
        beside = min(ranks // pipeline, task.sequences)
        shardings = ({"sharding": "ddp", "replicate": beside}, {"sharding": "zero3", "shard": beside})
        for sharding, schedule in itertools.product(shardings if beside > 1 else ({},), SCHEDULES):
            yield {"pipeline": pipeline, "schedule": schedule, **sharding}


def _can_be_cut(task: Task) -> bool:
    """Into stages, each with something to train; what is outside the layers (learned positions, a vision tower) would
    be missing from stages behind the first."""
    facts = task.facts
    return facts.note is None and facts.extra <= 4 * facts.hidden and task.lora.layers is None


def _has_work(task: Task, choice: Choice, *, is_asked_for: bool) -> bool:
    """Whether a pipeline has as many micro-batches as stages."""
    return is_asked_for or choice.accumulation_steps(task) >= choice.pipeline


def _micro_batches(task: Task, mesh: Mapping[str, Any]) -> list[int]:
    per_rank = -(-task.sequences // (mesh.get("replicate", 1) * mesh.get("shard", 1)))
    # How many sequences the answers of a step fill is not known before: a micro-batch is one that they fill.
    most_tokens = ROLLOUT_TOKENS if task.objective.has_rollouts else MICRO_BATCH_TOKENS[task.device]
    most = max(1, min(per_rank, most_tokens // task.sequence_length))
    sizes = {size for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, most) if size <= most}
    even = [size for size in sizes if per_rank % size == 0 or task.objective.has_rollouts]
    return sorted(even, reverse=True)
