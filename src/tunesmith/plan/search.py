"""From the run, the model's facts and the hardware to a plan: enumerate, discard what does not fit, rank.

Choices are looked at in tiers: first those that change nothing but speed, then quantization, then offload; a tier is
entered only when nothing before it fits. Within a tier the least time wins, and among equals the simplest. Pure: the
same arguments give the same plan.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.plan import memory, rules, speed
from tunesmith.plan.choice import Choice, Task
from tunesmith.plan.defaults import Amount, DataSize, Decide, propose
from tunesmith.plan.documents import mean_length, padding
from tunesmith.plan.facts import ModelFacts
from tunesmith.plan.hardware import Hardware
from tunesmith.plan.plan import Device, Mesh, Moment, Plan, Precision, Reason, Time

MARGIN = {"known": 0.04, "uncertain": 0.12, "cpu": 0.15}
"""Share of the free memory that a plan leaves alone."""
MICRO_BATCH_TOKENS = {"cpu": 4096, "cuda": 65536}
"""More tokens in one forward pass bring no more speed on these devices."""
MLP_SLICE = 4096
"""Tokens of a slice of an MLP: enough for its products to be near their full speed."""
MOST_VALUES = 1 << 31
"""Of one tensor, as far as kernels can count."""
EQUAL = 0.05
"""Choices whose times differ by less than this are equals: predictions are no better."""
SAME = 0.01
"""Among choices of the same kind, more memory must bring more than this."""
RECORDED = 0.03
"""Of the time of a step, what recorded passes must save."""
WORTH = 1.2
"""A pipeline must be this much faster than anything without, and what is rounded on the wire than anything exact."""
SCHEDULES = ("1f1b", "interleaved")
"""Those that are looked at; zero-bubble is for those who ask for it, since it goes with plain layers only."""
MOST_STAGES = 16
HIGHEST_RATE = 1.0
"""Of optimizers that move each weight by about the learning rate, whatever its gradient."""
IN_INT8 = {"gather": "int8", "reduce": "int8"}
OFF = {"int8": "1/254 of the largest of its 128", "int4": "1/14 of the largest of its 64"}
"""How far rounding takes a value, at most (`parallel.quantized`)."""


@dataclass(frozen=True)
class Candidate:
    choice: Choice
    peak: Moment
    time: Time

    @property
    def bytes(self) -> int:
        return self.peak.memory.total


@dataclass(frozen=True)
class Search:
    """All that is known after planning: the plan, how it was found, and what else there was."""

    plan: Plan
    task: Task
    chosen: Candidate
    tiers: tuple[tuple[Candidate, ...], ...]
    """What was looked at, fitting or not."""

    @property
    def timeline(self) -> list[Moment]:
        return memory.timeline(self.task, self.chosen.choice)


def make_plan(
    run: Run, facts: ModelFacts, hardware: Hardware, *, lengths: Sequence[int] = (), size: DataSize | None = None
) -> Plan:
    return search(run, facts, hardware, lengths=lengths, size=size).plan


def search(
    run: Run,
    facts: ModelFacts,
    hardware: Hardware,
    *,
    pins: Mapping[str, Any] | None = None,
    lengths: Sequence[int] = (),
    size: DataSize | None = None,
    held_out: int = 0,
) -> Search:
    """Look for the best plan. `pins` fixes what may be chosen; `lengths` are those of some documents and `size` that of
    the training data, where they are known; so many of its records are held out."""
    reasons: list[Reason] = []

    def decide(topic: str, choice: object, why: str) -> None:
        reasons.append(Reason(topic=topic, choice=str(choice), why=why))

    task, products, amount = make_task(run, facts, hardware, decide, lengths, size)
    if held_out:
        why = "asked for" if run.held_out else "no eval is given, and only what is not trained on tells learning apart"
        decide("held out", f"{held_out:,} records", why)
    margin = _margin(task, decide)
    free = task.gpu.free if task.device == "cuda" else hardware.available // hardware.processes
    limit = int((1 - margin) * free)
    pinned = {"products": products, **(pins or {})}
    if run.optimizer_states is not None:
        pinned.setdefault("optimizer_states", run.optimizer_states)
    tiers: list[tuple[Candidate, ...]] = []
    chosen: Candidate | None = None
    seen: set[Choice] = set()
    why_not = _Refused()
    for tier in _tiers(task):
        candidates = tuple(_candidates(task, tier, pinned, limit, seen, why_not))
        tiers.append(candidates)
        fitting = [one for one in candidates if one.bytes <= limit and _fits_host(task, one.choice)]
        if "is_recorded" not in pinned:
            fitting = [one for one in fitting if not one.choice.is_recorded or should_record(task, one.choice)]
        chosen = _best(task, fitting)
        if chosen:
            break
    every = [candidate for tier in tiers for candidate in tier]
    if not every:
        raise UserError(f"This run cannot be planned: {why_not.first or 'nothing is left to choose'}.")
    if chosen is not None:
        chosen = _with_turned(task, chosen, pinned, limit)
    found = chosen or min(every, key=lambda candidate: (not _fits_host(task, candidate.choice), candidate.bytes))
    _explain(run, task, found, every, limit, chosen is not None, decide)
    choice = found.choice
    saves_beside = _saves_beside(task, choice, decide)
    copied = memory.checkpoint(task, choice) if saves_beside else 0
    plan = Plan(
        device=task.device,
        threads=max(1, hardware.cores // hardware.processes),
        mesh=Mesh(
            replicate=choice.replicate,
            shard=choice.shard,
            tensor=choice.tensor,
            context=choice.context,
            pipeline=choice.pipeline,
            expert=choice.expert,
        ),
        sharding=choice.sharding,
        gather=choice.gather,
        reduce=choice.reduce,
        schedule=choice.schedule,
        precision=task.precision,
        products=choice.products,
        storage=choice.storage,
        attention=choice.attention,
        is_compiled=choice.is_compiled,
        is_recorded=choice.is_recorded,
        by_length=not task.facts.packs,
        keep_turned=choice.keep_turned,
        master_weights=choice.has_masters(task),
        sequence_length=task.sequence_length,
        sequences_per_step=task.sequences,
        micro_batch=choice.micro_batch,
        recompute_layers=choice.recompute_layers,
        keep_attention=choice.keep_attention,
        mlp_slice=choice.mlp_slice,
        offload_activations=choice.offload_activations,
        optimizer_states=choice.optimizer_states,
        offload_optimizer=choice.offload_optimizer,
        offload_parameters=choice.offload_parameters,
        release_gradients=choice.release_gradients,
        save_beside=saves_beside,
        epochs=amount.epochs,
        learning_rate=amount.learning_rate,
        held_out=held_out,
        deterministic=_deterministic(run, task.device, decide),
        memory=found.peak.memory,
        peak=found.peak.name,
        moments=tuple(memory.timeline(task, choice)),
        memory_limit=limit,
        host_memory=memory.host_memory(task, choice, copied=copied),
        disk=memory.disk(task, choice),
        time=found.time,
        beyond=rules.beyond(task, choice),
        reasons=tuple(reasons),
    )
    return Search(plan, task, found, tuple(tiers))


def should_record(task: Task, choice: Choice) -> bool:
    """Whether the GPU would wait for the processor so long that recorded passes are worth their memory."""
    recorded = dataclasses.replace(choice, is_recorded=True)
    return rules.may_record(task, recorded) and _saved_by_recording(task, choice) >= RECORDED


def _saved_by_recording(task: Task, choice: Choice) -> float:
    """The part of a step's time that the GPU would wait for the processor, and does not if passes are recorded."""
    waiting, recorded = (
        speed.step_time(task, dataclasses.replace(choice, is_recorded=is_recorded)).total
        for is_recorded in (False, True)
    )
    return 1 - recorded / waiting


def refusal(run: Run, plan: Plan, facts: ModelFacts, hardware: Hardware) -> str | None:
    """Why a plan made by hand cannot be carried out, or None."""
    if plan.device == "cuda" and not hardware.gpus:
        return "it is for a GPU, and none is here"
    counted = run.model_copy(update={"batch_tokens": None})  # by the plan
    make_task(counted, facts, hardware, lambda *_: None)  # what refuses the run refuses it here
    task, choice = _of_plan(run, plan, facts, hardware)
    if (refused := rules.refused(task, choice)) is not None:
        return refused
    return next((f"this version of Tunesmith cannot do {missing}" for missing in rules.beyond(task, choice)), None)


class Written(NamedTuple):
    """What a run writes, in bytes."""

    checkpoint: int
    result: int


def written(run: Run, plan: Plan, facts: ModelFacts, hardware: Hardware) -> Written:
    """By a run that obeys this plan."""
    task, choice = _of_plan(run, plan, facts, hardware)
    return Written(round(memory.checkpoint_bytes(task, choice)), memory.result_bytes(task))


def predicted_memory(run: Run, plan: Plan, facts: ModelFacts, hardware: Hardware) -> int:
    """Bytes of each rank at the peak of a step that obeys this plan."""
    return memory.peak(memory.timeline(*_of_plan(run, plan, facts, hardware))).memory.total


def _of_plan(run: Run, plan: Plan, facts: ModelFacts, hardware: Hardware) -> tuple[Task, Choice]:
    task = Task(
        facts=facts,
        hardware=hardware,
        device=plan.device,
        precision=plan.precision,
        method=run.method,
        lora=run.lora,
        optimizer=run.algorithm,
        sequence_length=plan.sequence_length,
        sequences=plan.sequences_per_step,
        document_length=plan.sequence_length,
        clips=run.max_grad_norm is not None,
        is_exact=plan.deterministic,
    )
    given = {**dict(plan), **dict(plan.mesh)}
    return task, Choice(**{field.name: given[field.name] for field in dataclasses.fields(Choice)})


def make_task(
    run: Run,
    facts: ModelFacts,
    hardware: Hardware,
    decide: Decide,
    lengths: Sequence[int] = (),
    size: DataSize | None = None,
) -> tuple[Task, str, Amount]:
    """What is settled before anything is searched for, and the arithmetic of the products."""
    device = _device(run, hardware, decide)
    precision, products = _precision(run, hardware, device, decide)
    limit = longest_sequence(run, facts, decide)
    amount = propose(run, facts.hidden, limit, size, decide)
    check_rate(run, amount.learning_rate)
    sequence_length = amount.sequence_length
    task = Task(
        facts=facts,
        hardware=hardware,
        device=device,
        precision=precision,
        method=run.method,
        lora=run.lora,
        optimizer=run.algorithm,
        sequence_length=sequence_length,
        sequences=amount.sequences,
        document_length=mean_length(lengths, sequence_length),
        clips=run.max_grad_norm is not None,
        is_exact=run.deterministic,
        padding=1.0
        if facts.packs
        else padding(lengths, sequence_length, amount.sequences * sequence_length, sequence_length),
        longest_document=None if facts.packs else sequence_length,
    )
    if not facts.packs:
        share = f"{task.padding - 1:.0%} more tokens are computed, by the data's own lengths" if lengths else ""
        decide(
            "layout",
            "padded",
            f"{facts.architecture} does not take packed documents; those of like length share a "
            f"micro-batch{', and ' if share else ''}{share}",
        )
    if device == "cpu" and hardware.rates is None:
        decide(
            "speed",
            "a guess",
            "processors differ by a factor of three and more; `tunesmith plan --calibrate` measures this one",
        )
    if task.document_length < 0.8 * sequence_length:
        why = "the data's own lengths, roughly: attention costs by them, and sequences are packed with several"
        decide("documents", f"about {task.document_length:,} tokens", why)
    return task, products, amount


# enumeration


class _Refused:
    """Remembers the first reason for which something was not even looked at."""

    first: str | None = None


def _tiers(task: Task) -> list[dict[str, Any]]:
    """What is tried when nothing before it fits. `axes`: split single sequences and layers over ranks, too."""
    asked = "int8" if task.lora.bits == 8 else "nf4"
    plain = {"storage": asked if task.method == "qlora" else "plain"}
    if task.device == "cpu":
        has_large_states = not task.has_adapters and task.optimizer in memory.ALONE
        return [plain, {**plain, "offload_optimizer": "disk"}] if has_large_states else [plain]
    if task.has_adapters:
        # What was asked for stays; else 8 bits, which are closer to the base, before 4.
        small: dict[str, Any] = {"storage": "nf4"}
        order = [plain] if task.method == "qlora" else [plain, {"storage": "int8"}, small]
        order += [{**order[-1], "offload_parameters": True}]
    else:
        is_fused, sent = task.optimizer in memory.ALONE, {"offload_activations": True}
        small = {"optimizer_states": "int8"} if is_fused else {}
        rounded = [{**small, "master_weights": False}] if is_fused and task.precision == "bf16" else []
        more = ({}, {**small, **sent})
        moved = [{**one, "offload_optimizer": "host"} for one in more if is_fused]
        moved += [{**one, "offload_parameters": True} for one in ({}, sent)]
        moved += [{**one, "offload_optimizer": "disk"} for one in more if is_fused]
        moved += [{**sent, "offload_parameters": True, "offload_optimizer": "disk"}] if is_fused else []
        order = [plain, small, {**small, **sent}, *rounded, *moved]
    tiers = [tier for one in order for tier in (one, {**one, "axes": True})]
    return [tier for index, tier in enumerate(tiers) if tier not in tiers[:index]]


def _candidates(
    task: Task,
    tier: Mapping[str, Any],
    pins: Mapping[str, Any],
    limit: int,
    seen: set[Choice],
    why_not: _Refused,
) -> Iterator[Candidate]:
    base = Choice(
        attention=rules.attention_for(task),
        is_compiled=task.device == "cuda" and task.facts.packs,  # padded rows change their shape with every step
        **{name: value for name, value in tier.items() if name != "axes"},
    )
    fixed = {name: value for name, value in pins.items() if name != "recompute_layers"}
    layers = pins.get("recompute_layers")
    has_axes = tier.get("axes", False) or task.sequences < task.hardware.gpu_count > 1
    wanted = fixed.get("pipeline")
    plain = list(_meshes(task, has_axes=has_axes)) if wanted in (None, 1) else []
    if base.offload_parameters and plain == [{}]:
        plain = [{"sharding": "zero3"}]  # of one rank: what brings parameters layer by layer is the same
    for mesh in itertools.chain(plain, _pipelines(task, wanted)):
        for micro_batch in _micro_batches(task, mesh):
            choice = dataclasses.replace(base, **{**mesh, "micro_batch": micro_batch, **fixed})
            if "release_gradients" not in fixed:
                choice = dataclasses.replace(choice, release_gradients=rules.may_release(task, choice))
            if choice in seen or (choice.pipeline > 1 and not _has_work(task, choice, is_asked_for=wanted is not None)):
                continue
            seen.add(choice)
            refusal = rules.refused(task, choice)
            if refusal is None and (missing := rules.beyond(task, choice)):
                refusal = f"this version of Tunesmith cannot do {missing[0]}"
            if refusal is None and choice.ranks > task.hardware.nodes * task.ranks_per_node:
                refusal = "there are fewer GPUs than its mesh has ranks"
            if refusal is not None:
                why_not.first = why_not.first or refusal
                continue
            yield from _recomputing(task, choice, layers, _ways(task, choice, pins), limit)
            recorded = dataclasses.replace(choice, is_recorded=True)
            if "is_recorded" not in fixed and rules.may_record(task, recorded):
                yield from _recomputing(task, recorded, layers, _ways(task, recorded, pins), limit)


def _recomputing(
    task: Task, choice: Choice, layers: int | None, ways: list[dict[str, Any]], limit: int
) -> Iterator[Candidate]:
    """The choice with as much recomputation as it needs, in each of the ways: none when it fits without."""
    if layers is not None:
        yield _evaluate(task, choice, min(layers, task.facts.layers))
        return
    if not ways[0]["offload_activations"]:  # of what is not recomputed nothing is offloaded
        plain = _evaluate(task, dataclasses.replace(choice, mlp_slice=ways[0]["mlp_slice"]), 0)
        yield plain
        if plain.bytes <= limit:
            return
    for way in ways:
        yield from _fewest_layers(task, dataclasses.replace(choice, **way), limit)


def _ways(task: Task, choice: Choice, pins: Mapping[str, Any]) -> list[dict[str, Any]]:
    """How recomputed layers may save memory; the first of them is that of a run that recomputes nothing."""
    can_offload = task.has_adapters and task.device == "cuda"
    options: dict[str, tuple[Any, ...]] = {
        "mlp_slice": _slices(task, choice),
        # Over adapters layer inputs in host memory cost time alone; else they are a tier of their own.
        "offload_activations": (False, True) if can_offload else (False,),
        "keep_attention": (False, True),
    }
    if choice.offload_activations:
        options["offload_activations"] = (True,)
    options |= {name: (pins[name],) for name in options.keys() & pins.keys()}
    return [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]


def _slices(task: Task, choice: Choice) -> tuple[int, ...]:
    """Tokens an MLP may take at a time: all (0), unless they are too many for one tensor, or a slice."""
    tokens, widest = choice.tokens(task), max(kind.intermediate for kind in task.facts.kinds)
    has_experts = any(linear.count > 1 for kind in task.facts.kinds for linear in kind.linears)
    if task.device == "cpu" or has_experts or tokens <= MLP_SLICE:
        return (0,)
    return (MLP_SLICE,) if tokens * 2 * widest >= MOST_VALUES else (0, MLP_SLICE)


def _fewest_layers(task: Task, choice: Choice, limit: int) -> Iterator[Candidate]:
    """The choice with every layer recomputed, and with only as many as it needs."""
    evaluate = functools.partial(_evaluate, task, choice)
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


def _evaluate(task: Task, choice: Choice, recompute_layers: int) -> Candidate:
    choice = dataclasses.replace(choice, recompute_layers=recompute_layers)
    return Candidate(choice, memory.peak(memory.timeline(task, choice)), speed.step_time(task, choice))


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
                ways = {"sharding": "hierarchical", "shard": here, "replicate": nodes}
                yield {**mesh, **(ways if here > 1 else {"sharding": "zero3", "shard": ranks}), **IN_INT8}
            if tensor * context == 1 and rules.experts(task) and task.facts.note is None:
                yield {**mesh, "sharding": "zero3", "shard": ranks, "expert": ranks}


def _pipelines(task: Task, pinned: int | None) -> Iterator[dict[str, Any]]:
    """With several nodes: a stage for each of them or for each rank, whose ranks replicate or share. Within one node
    pipelines bring little, and are looked at when their number of stages is given."""
    nodes, ranks = task.hardware.nodes, task.hardware.nodes * task.ranks_per_node
    own = {size for size in (nodes, ranks) if size <= MOST_STAGES} if nodes > 1 and _can_be_cut(task) else set()
    for pipeline in sorted(own) if pinned is None else range(max(2, pinned), pinned + 1):
        beside = min(ranks // pipeline, task.sequences)
        ways = ({"sharding": "ddp", "replicate": beside}, {"sharding": "zero3", "shard": beside})
        for way, schedule in itertools.product(ways if beside > 1 else ({},), SCHEDULES):
            yield {"pipeline": pipeline, "schedule": schedule, **way}


def _can_be_cut(task: Task) -> bool:
    """Into stages, each with something to train; what is outside the layers (learned positions, a vision tower) would
    be missing from stages behind the first."""
    facts = task.facts
    return facts.note is None and facts.extra <= 4 * facts.hidden and task.lora.layers is None


def _has_work(task: Task, choice: Choice, *, is_asked_for: bool) -> bool:
    """Whether a pipeline has as many micro-batches as stages."""
    return is_asked_for or choice.accumulation(task) >= choice.pipeline


def _micro_batches(task: Task, mesh: Mapping[str, Any]) -> list[int]:
    per_rank = -(-task.sequences // (mesh.get("replicate", 1) * mesh.get("shard", 1)))
    most = max(1, min(per_rank, MICRO_BATCH_TOKENS[task.device] // task.sequence_length))
    sizes = {size for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, most) if size <= most}
    even = [size for size in sizes if per_rank % size == 0]
    return sorted(even, reverse=True)


def _fits_host(task: Task, choice: Choice) -> bool:
    """Whether host memory and disk hold what is offloaded; loading alone is warned about, since it can go well."""
    is_offloaded = choice.offload_optimizer != "none" or choice.offload_parameters or choice.offload_activations
    fits_memory = task.device == "cpu" or memory.host_memory(task, choice) <= task.hardware.available
    return not is_offloaded or (fits_memory and memory.disk(task, choice) <= task.hardware.disk)


def _saves_beside(task: Task, choice: Choice, decide: Decide) -> bool:
    """Whether checkpoints are copied and written beside training. States that are not on the device change in place."""
    copied = memory.checkpoint(task, choice)
    if choice.offload_optimizer != "none":
        return False
    fits = memory.host_memory(task, choice, copied=copied) <= task.hardware.available
    if not fits:
        free = f"only {_gib(task.hardware.available)} of host memory are free"
        decide("checkpoints", "written between steps", f"a copy to write beside them is {_gib(copied)}, and {free}")
    return fits


def _best(task: Task, fitting: list[Candidate]) -> Candidate | None:
    """The quickest; among those that are as quick, the simplest, then the one that needs the least memory."""
    if not fitting:
        return None
    kept, least = [], float("inf")
    for effort in sorted({_effort(one) for one in fitting}):
        kind = [one for one in fitting if _effort(one) == effort]
        quickest = min(one.time.total for one in kind)
        if WORTH * quickest < least:
            kept, least = kind, quickest
    equals = [one for one in kept if one.time.total <= least * (1 + EQUAL)]
    simplest = min(rules.complexity(task, one.choice) for one in equals)
    simple = [one for one in equals if rules.complexity(task, one.choice) == simplest]
    least = min(one.time.total for one in simple)
    return min((one for one in simple if one.time.total <= least * (1 + SAME)), key=lambda one: one.bytes)


def _effort(one: Candidate) -> int:
    """Shards alone; stages, which need many micro-batches to be worth it; rounding on the wire, which is lossy."""
    return 2 if one.choice.is_lossy else int(one.choice.pipeline > 1)


def _with_turned(task: Task, found: Candidate, pins: Mapping[str, Any], limit: int) -> Candidate:
    """With memory that is left over, frozen weights are kept transposed, too."""
    choice = dataclasses.replace(found.choice, keep_turned=True)
    if found.choice.recompute_layers or "keep_turned" in pins or not rules.may_keep_turned(task, choice):
        return found
    more = _evaluate(task, choice, 0)
    return more if more.bytes <= limit else found


# decisions that need no search


def _margin(task: Task, decide: Decide) -> float:
    if task.device == "cpu":
        return MARGIN["cpu"]
    doubts = [task.facts.note] if task.facts.note else []
    if task.gpu.rates is None:
        doubts.append(f"{task.gpu.name} is not in the catalogue, so its speed is a guess")
    if doubts:
        decide("margin", f"{MARGIN['uncertain']:.0%} of the memory", "; ".join(doubts))
        return MARGIN["uncertain"]
    return MARGIN["known"]


def _device(run: Run, hardware: Hardware, decide: Decide) -> Device:
    if run.device == "cuda" and not hardware.gpus:
        raise UserError(
            "device is cuda, but no NVIDIA GPU was found here; say device: cpu or look at `tunesmith doctor`."
        )
    if run.device != "cpu" and 0 < len(hardware.gpus) < hardware.processes:
        raise UserError(
            f"{hardware.processes} ranks were asked for, and this machine has {len(hardware.gpus)} GPU"
            f"{'s'[: len(hardware.gpus) > 1]}; ask for no more ranks than GPUs, or say device: cpu."
        )
    if run.device != "auto":
        decide("device", run.device, "asked for")
        return run.device
    if not hardware.gpus:
        decide("device", "cpu", "no GPU was found")
        return "cpu"
    names = f"{hardware.gpu_count} x {hardware.gpus[0].name}" if hardware.gpu_count > 1 else hardware.gpus[0].name
    decide("device", "cuda", f"{names} {'was named' if hardware.is_named else 'is here'}")
    return "cuda"


def _precision(run: Run, hardware: Hardware, device: Device, decide: Decide) -> tuple[Precision, str]:
    gpu = hardware.gpus[0] if device == "cuda" else None
    has_bf16 = gpu.capability >= rules.BF16 if gpu else hardware.has_fast_bf16
    where = gpu.name if gpu else "this processor"
    wanted: str = run.precision
    if wanted == "fp8":
        if gpu and gpu.capability >= rules.FP8:
            decide("precision", "bf16 with fp8 products", "asked for")
            return "bf16", "fp8"
        raise UserError(
            f"precision is fp8, but {where} has no fp8 arithmetic (compute capability 8.9 and more); leave it out."
        )
    if wanted == "auto":
        if has_bf16:
            decide("precision", "bf16", f"{where} has bf16 arithmetic, and bf16 needs no loss scaling")
            return "bf16", "plain"
        if gpu:
            decide("precision", "fp16", f"{where} has no bf16 arithmetic; fp16 runs with loss scaling")
            return "fp16", "plain"
        decide("precision", "fp32", "this processor has no bf16 arithmetic, and emulating it is far slower than fp32")
        return "fp32", "plain"
    if wanted != "fp32" and device == "cpu" and not has_bf16:
        decide("precision", "fp32", f"{wanted} was asked for, but this processor computes it far slower than fp32")
        return "fp32", "plain"
    if wanted == "fp16" and device == "cpu":
        decide("precision", "bf16", "fp16 was asked for, but processors train in bf16, which has the wider range")
        return "bf16", "plain"
    if wanted == "bf16" and not has_bf16:
        decide("precision", "fp16", f"bf16 was asked for, but {where} has none; fp16 runs with loss scaling")
        return "fp16", "plain"
    decide("precision", wanted, "asked for")
    return cast(Precision, wanted), "plain"


def longest_sequence(run: Run, facts: ModelFacts, decide: Decide = lambda *_: None) -> int:
    """What is asked for, as far as the model was made for it."""
    limit = facts.positions
    if limit is not None and run.sequence_length > limit:
        if "sequence_length" in run.model_fields_set:
            raise UserError(
                f"sequence_length is {run.sequence_length}, but {facts.architecture} was made for at most {limit} "
                f"positions; lower it to {limit} or less."
            )
        decide("sequence length", limit, "the model was made for no more")
        return limit
    return run.sequence_length


def check_rate(run: Run, rate: float) -> None:
    """Refuse a learning rate that cannot be meant. How far SGD moves a weight is for its gradient to say."""
    if rate > HIGHEST_RATE and run.algorithm != "sgd":
        raise UserError(
            f"learning_rate is {rate:g}, and {run.algorithm} moves each weight by about so much in a step, where most "
            "are smaller than 0.1; 2e-4 is usual for adapters and 2e-5 for all weights."
        )


def _deterministic(run: Run, device: str, decide: Decide) -> bool:
    if device == "cuda" and run.deterministic:
        decide("determinism", "on", "asked for; some kernels are slower")
    return device == "cpu" or run.deterministic


# why


def _explain(
    run: Run, task: Task, found: Candidate, every: list[Candidate], limit: int, fits: bool, decide: Decide
) -> None:
    choice, layers = found.choice, task.facts.layers
    every = [one for one in every if _fits_host(task, one.choice)] or every
    has = f"the {_gib(limit)} that may be used"
    if task.device == "cuda" and task.hardware.gpu_count > choice.ranks:
        idle = task.hardware.gpu_count - choice.ranks
        why = "the batch has too few sequences for all"
        decide("ranks", choice.ranks, f"{idle} GPU{'s'[: idle > 1]} stay idle: {why}")
    if choice.pipeline > 1:
        decide(
            "pipeline", f"{choice.pipeline} stages, {choice.schedule}", _why_axis("pipeline", task, found, every, limit)
        )
    if choice.expert > 1:
        each = max(rules.experts(task)) // choice.expert
        decide("experts", f"{each} of each layer on a rank", _why_axis("expert", task, found, every, limit))
    if choice.ranks > choice.pipeline:
        decide("sharding", _sharding_words(choice), _why_sharding(task, found, every, limit))
    if choice.is_lossy:
        sent = {"weights": choice.gather, "gradients": choice.reduce}
        words = " and ".join(f"{what} in {wire}" for what, wire in sent.items() if wire != "plain")
        decide("communication", words, _why_lossy(task, found, [one for one in every if one.bytes <= limit]))
    if choice.storage != "plain":
        if task.method == "qlora":
            decide("storage", choice.storage, f"method: qlora holds the frozen base in {task.lora.bits} bits")
        else:
            least = _least(every, lambda one: one.storage == "plain")
            decide("storage", choice.storage, f"in {task.precision} the base needs at least {least} of {has}")
    if choice.has_masters(task):
        lost = f"updates smaller than {task.precision}'s steps would be lost"
        decide("weights", f"{task.precision} with fp32 masters", lost)
    elif task.has_masters:
        least = _least(every, lambda one: one.master_weights and one.offload_optimizer == "none")
        decide("weights", "bf16, rounded at random", f"with fp32 masters at least {least} are needed of {has}")
    if run.optimizer_states is not None:
        decide("optimizer states", choice.optimizer_states, f"optimizer: {run.optimizer}")
    elif choice.optimizer_states != "fp32":
        least = _least(every, lambda one: one.optimizer_states == "fp32" and one.offload_optimizer == "none")
        decide("optimizer states", choice.optimizer_states, f"in fp32 at least {least} are needed of {has}")
    if choice.release_gradients:
        decide("gradients", "released in the backward pass", "one micro-batch a step and no max_grad_norm: none waits")
    elif task.device == "cuda" and rules.may_release(dataclasses.replace(task, clips=False), choice):
        freed = found.peak.memory.gradients
        if freed and not (choice.recompute_layers == 0 and rules.complexity(task, choice) == 0):
            why = f"max_grad_norm needs the norm of them all; null would free up to {_gib(freed)}"
            decide("gradients", "kept to the end of the step", why)
    if choice.offload_optimizer != "none":
        decide("offload", *_why_offloaded(task, found, every, has))
    if choice.offload_parameters:
        least = _least(every, lambda one: not one.offload_parameters)
        moved = 2 * choice.accumulation(task) * memory.parameter_bytes(task, choice) / memory.PINNED
        rate = task.rates.host_link
        takes = f"{_gib(moved)} a step over the host link at {rate / 1e9:.3g} GB/s take {_seconds(moved / rate)}"
        why = f"all else needs at least {least} of {has}; {takes}, partly beside the computation"
        decide("offload", "parameters and gradients to host memory", why)
    if choice.offload_activations:
        others = [one for one in every if not one.choice.offload_activations]
        why = f"all else needs at least {_least(others, lambda _: True)} of {has}"
        if fitting := [one.time.total for one in others if one.bytes <= limit]:
            times = max(1.0, min(fitting) / found.time.total)
            why = f"they go and come beside the computation; what else fits takes {times:.2f} times as long"
        decide("offload", "layer inputs to host memory", why)
    if choice.mlp_slice:
        wide = 2 * max(kind.intermediate for kind in task.facts.kinds) * task.width * choice.tokens(task)
        decide("MLP", f"{choice.mlp_slice:,} tokens at a time", f"for all tokens it would make {_gib(wide)} at once")
    if choice.keep_turned:
        turned = task.facts.matrices / choice.tensor
        decide("weights", "also transposed", f"{_gib(turned)} more than needed, for a backward pass that turns none")
    if choice.is_recorded:
        waiting = f"{_saved_by_recording(task, choice):.0%} of a step the GPU would wait for the processor"
        decide("launching", "recorded passes", f"{waiting} to start kernels; these are recorded once and replayed")
    rounds = choice.accumulation(task)
    decide(
        "micro-batch",
        choice.micro_batch,
        f"{rounds} forward pass{'es'[: 2 * (rounds > 1)]} a step, about {_gib(found.bytes)} at the peak",
    )
    if not fits:
        decide(
            "recomputation",
            "all layers" if choice.recompute_layers else "none",
            f"even so, about {_gib(found.bytes)} are needed of {has}: it may run out of memory; a shorter "
            "sequence_length or method: lora needs less",
        )
    elif choice.recompute_layers == 0:
        decide("recomputation", "none", f"everything fits into {has}")
    else:
        same = [one.bytes for one in every if _but_recompute(one.choice) == _but_recompute(choice)]
        needed = _gib(max(same))
        count = "all layers" if choice.recompute_layers == layers else f"{choice.recompute_layers} of {layers} layers"
        kept = "; what attention gave is kept" if choice.keep_attention else ""
        decide("recomputation", count, f"keeping all activations would need about {needed} of {has}{kept}")
    host = memory.host_memory(task, choice)
    if task.device == "cuda" and host > task.hardware.available:
        decide(
            "host memory",
            _gib(host),
            f"only {_gib(task.hardware.available)} are free: loading the model may be killed by the system",
        )


def _why_offloaded(task: Task, found: Candidate, every: list[Candidate], has: str) -> tuple[str, str]:
    """Where the optimizer's states go and why, with what moves in each step and how long that takes."""
    choice, hardware = found.choice, task.hardware
    least = _least(every, lambda one: one.offload_optimizer == "none")
    why = f"all else needs at least {least} of {has}"
    if choice.offload_optimizer == "host":
        moved, rate, way = memory.offloaded_bytes(task, choice), task.rates.host_link, "each way over the host link"
    else:
        moved, rate, way = 2 * memory.disk(task, choice), hardware.disk_rate, "from and to the disk"
        in_memory = dataclasses.replace(choice, offload_optimizer="host")
        if task.device == "cuda" and (need := memory.host_memory(task, in_memory)) > hardware.available:
            why += f", and host memory would have to hold {_gib(need)} and has {_gib(hardware.available)}"
    why += f"; {_gib(moved)} a step {way} at {rate / 1e9:.3g} GB/s take {_seconds(moved / rate)}"
    return f"optimizer states to {'host memory' if choice.offload_optimizer == 'host' else 'disk'}", why


def _least(every: list[Candidate], of: Callable[[Choice], bool]) -> str:
    """The least memory that choices of this kind need; pins may have left none of them."""
    sizes = [one.bytes for one in every if of(one.choice)]
    return _gib(min(sizes)) if sizes else "more"


def _but_recompute(choice: Choice) -> Choice:
    without = {"recompute_layers": 0, "keep_attention": False, "mlp_slice": 0, "offload_activations": False}
    return dataclasses.replace(choice, **without)


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


def _why_sharding(task: Task, found: Candidate, every: list[Candidate], limit: int) -> str:
    """What the choice is better than, by the model's own numbers."""

    def best(sharding: str) -> Candidate | None:
        kind = [one for one in every if one.choice.sharding == sharding and one.choice.pipeline == 1]
        return _best(task, [one for one in kind if one.bytes <= limit]) or min(
            kind, key=lambda one: one.bytes, default=None
        )

    chosen = found.choice.sharding
    if chosen == "ddp":
        holders = found.choice.tensor * found.choice.pipeline
        held = f"over {holders} ranks" if holders > 1 else "on each rank"
        return f"a whole copy fits {held}, which costs the least communication"
    parts = []
    replicated = best("ddp")
    if replicated and replicated.bytes > limit:
        parts.append(f"a copy on each rank needs {_gib(replicated.bytes)} of {_gib(limit)}")
    if chosen in ("hybrid", "hierarchical") and (full := best("zero3")):
        ratio = full.time.total / found.time.total
        gigabits = task.hardware.network * 8 / 1e9
        parts.append(f"sharding over all nodes would take {ratio:.1f} times as long over {gigabits:.0f} Gbit/s")
    elif replicated and replicated.bytes <= limit:
        parts.append(f"{1 - found.time.total / replicated.time.total:.0%} less time than a copy on each rank")
    return "; ".join(parts) or "the least time of what fits"


def _why_axis(axis: str, task: Task, found: Candidate, every: list[Candidate], limit: int) -> str:
    """What a pipeline, or experts in their places, are better than."""
    without = [one for one in every if getattr(one.choice, axis) == 1 and not one.choice.is_lossy]
    quickest = _best(task, [one for one in without if one.bytes <= limit])
    gain = f"all that is exact needs at least {_least(without, lambda _: True)} without"
    if quickest is not None:
        gain = f"anything else that is exact would take {quickest.time.total / found.time.total:.1f} times as long"
    if axis == "expert":
        return f"tokens go to their experts, and no expert to all ranks; {gain}"
    waiting = found.time.bubbles / found.time.total
    return f"stages send each other hidden states alone, and wait for {waiting:.0%} of the time; {gain}"


def _why_lossy(task: Task, found: Candidate, fitting: list[Candidate]) -> str:
    exact = [one.time.total for one in fitting if not one.choice.is_lossy]
    gain = ""
    if exact:
        times, gigabits = min(exact) / found.time.total, task.hardware.network * 8 / 1e9
        gain = f"; a plan with gather and reduce plain is exact, and takes {times:.1f} times as long over "
        gain += f"{gigabits:.3g} Gbit/s"
    off = "; ".join(OFF[wire] for wire in dict.fromkeys((found.choice.gather, found.choice.reduce)) if wire in OFF)
    return f"lossy: each value is off by at most {off}{gain}"


def _seconds(time: float) -> str:
    return f"{time:.0f} s" if time >= 10 else f"{time:.1f} s"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
