"""From the run, the model's facts and the hardware to a plan: enumerate, discard what does not fit, rank.

What may be chosen is enumerated in `candidates.py`, tier by tier: first choices that change nothing but speed, then
quantization, then offload; a tier is entered only when nothing before it fits. Within a tier `ranking.py` picks one,
and `reasons.py` says why. Pure: the same arguments give the same plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tunesmith.config.schema import Run
from tunesmith.disk import gib
from tunesmith.errors import UserError
from tunesmith.objectives import objective_of
from tunesmith.plan import memory, model_states, paths, refusals, rules
from tunesmith.plan.candidates import Candidate, Refused, candidates_of, tiers_of
from tunesmith.plan.choice import OF_PEFT, Choice, Task
from tunesmith.plan.defaults import Amount, DataSize, Decide
from tunesmith.plan.facts import ModelFacts
from tunesmith.plan.hardware import Hardware
from tunesmith.plan.plan import Mesh, Phase, Plan, Reason
from tunesmith.plan.ranking import best_of, fits_host, should_capture, with_transposed
from tunesmith.plan.reasons import explain, explain_engine
from tunesmith.plan.task import Draw, decide_determinism, make_task, margin_of


@dataclass(frozen=True)
class Search:
    """All that is known after planning: the plan, how it was found, and what else there was."""

    plan: Plan
    task: Task
    chosen: Candidate
    tiers: tuple[tuple[Candidate, ...], ...]
    """What was looked at, fitting or not."""

    @property
    def timeline(self) -> list[Phase]:
        return memory.timeline(self.task, self.chosen.choice)


def best_plan(
    run: Run, facts: ModelFacts, hardware: Hardware, *, lengths: Sequence[int] = (), size: DataSize | None = None
) -> Plan:
    """The plan alone that `search` finds."""
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
    draw: Draw | None = None,
) -> Search:
    """Look for the best plan. `pins` fixes what may be chosen; `lengths` are those of some documents and `size` that of
    the training data, where they are known; so many of its records are held out. `draw` says how documents lie in
    steps, for models that have them padded."""
    reasons: list[Reason] = []

    def decide(topic: str, choice: object, why: str) -> None:
        reasons.append(Reason(topic=topic, choice=str(choice), why=why))

    task, matmul_dtype, amount = make_task(run, facts, hardware, decide, lengths, size, draw)
    if held_out:
        why = "asked for" if run.held_out else "no eval is given, and only what is not trained on tells learning apart"
        decide("held out", f"{held_out:,} records", why)
    margin = margin_of(task, decide)
    free = task.gpu.free if task.device == "cuda" else hardware.available // hardware.processes
    limit = _beside_engine(task, int((1 - margin) * free))
    pinned = {"matmul_dtype": matmul_dtype, **(pins or {})}
    if run.optimizer_states is not None:
        pinned.setdefault("optimizer_states", run.optimizer_states)
    chosen, tiers = _choose(task, pinned, limit)
    every = [candidate for tier in tiers for candidate in tier]
    best = chosen or min(every, key=lambda candidate: (not fits_host(task, candidate.choice), candidate.bytes))
    explain(run, task, best, every, limit, chosen is not None, decide)
    engine = explain_engine(task, best, limit, decide)
    saves_beside = _saves_beside(task, best.choice, decide)
    deterministic = decide_determinism(run, task.device, decide)
    plan = _plan_of(
        task,
        best,
        limit,
        amount,
        held_out=held_out,
        engine=engine,
        saves_beside=saves_beside,
        deterministic=deterministic,
        reasons=tuple(reasons),
    )
    return Search(plan, task, best, tiers)


def _beside_engine(task: Task, limit: int) -> int:
    """What is left for the trainer where another process answers. UserError where that is nothing."""
    if not memory.has_engine(task):
        return limit
    needed = memory.engine_memory(task)
    if needed >= limit:
        raise UserError(
            f"rollout.engine: vllm needs about {gib(needed)} beside the trainer, and {gib(limit)} may be used in all; "
            "lower rollout.answers or rollout.max_answer_tokens, or use engine: own, which answers with the trainer's "
            "own weights."
        )
    return limit - needed


def _choose(
    task: Task, pins: Mapping[str, Any], limit: int
) -> tuple[Candidate | None, tuple[tuple[Candidate, ...], ...]]:
    """The best of the first tier in which anything fits into `limit` bytes, and all that was looked at."""
    tiers: list[tuple[Candidate, ...]] = []
    chosen: Candidate | None = None
    seen: set[Choice] = set()
    why_not = Refused()
    for tier in tiers_of(task):
        candidates = tuple(candidates_of(task, tier, pins, limit, seen, why_not))
        tiers.append(candidates)
        fitting = [
            candidate for candidate in candidates if candidate.bytes <= limit and fits_host(task, candidate.choice)
        ]
        if "cuda_graphs" not in pins:
            fitting = [
                candidate
                for candidate in fitting
                if not candidate.choice.cuda_graphs or should_capture(task, candidate.choice)
            ]
        chosen = best_of(task, fitting)
        if chosen:
            break
    if not any(tiers):
        raise UserError(f"This run cannot be planned: {why_not.first or 'nothing is left to choose'}.")
    return chosen and with_transposed(task, chosen, pins, limit), tuple(tiers)


def _plan_of(
    task: Task,
    best: Candidate,
    limit: int,
    amount: Amount,
    *,
    held_out: int,
    engine: int,
    saves_beside: bool,
    deterministic: bool,
    reasons: tuple[Reason, ...],
) -> Plan:
    choice = best.choice
    copied = model_states.checkpoint(task, choice) if saves_beside else 0
    return Plan(
        device=task.device,
        threads=max(1, task.hardware.cores // task.hardware.processes),
        mesh=Mesh(
            replicate=choice.replicate,
            shard=choice.shard,
            tensor=choice.tensor,
            context=choice.context,
            pipeline=choice.pipeline,
            expert=choice.expert,
        ),
        sharding=choice.sharding,
        quantized_all_gather=choice.quantized_all_gather,
        quantized_reduce_scatter=choice.quantized_reduce_scatter,
        schedule=choice.schedule,
        precision=task.precision,
        matmul_dtype=choice.matmul_dtype,
        storage=choice.storage,
        teacher_storage=choice.teacher_storage,
        attention=choice.attention,
        attention_paths=tuple(f"{kind}: {path}" for kind, path in paths.paths(task, choice.attention).items()),
        is_compiled=choice.is_compiled,
        cuda_graphs=choice.cuda_graphs,
        kernels=rules.kernels(task, choice),
        by_length=not task.facts.packs,
        most_padded=task.padded.most(choice.room(task)) if task.padded is not None else None,
        cache_transposed=choice.cache_transposed,
        master_weights=choice.has_masters(task),
        sequence_length=task.sequence_length,
        sequences_per_step=task.sequences,
        micro_batch=choice.micro_batch,
        checkpointed_layers=choice.checkpointed_layers,
        save_attention=choice.save_attention,
        mlp_slice=choice.mlp_slice,
        offload_activations=choice.offload_activations,
        optimizer_states=choice.optimizer_states,
        offload_optimizer=choice.offload_optimizer,
        offload_parameters=choice.offload_parameters,
        optimizer_in_backward=choice.optimizer_in_backward,
        async_checkpoint=saves_beside,
        epochs=amount.epochs,
        learning_rate=amount.learning_rate,
        held_out=held_out,
        deterministic=deterministic,
        memory=best.peak.memory,
        peak=best.peak.name,
        phases=tuple(memory.timeline(task, choice)),
        engine_memory=engine,
        memory_limit=limit,
        host_memory=memory.host_memory(task, choice, copied=copied),
        disk=model_states.disk(task, choice),
        time=best.time,
        beyond=rules.beyond(task, choice),
        reasons=reasons,
    )


def _saves_beside(task: Task, choice: Choice, decide: Decide) -> bool:
    """Whether checkpoints are copied and written beside training. States that are not on the device change in place."""
    copied = model_states.checkpoint(task, choice)
    if choice.offload_optimizer != "none":
        return False
    fits = memory.host_memory(task, choice, copied=copied) <= task.hardware.available
    if not fits:
        free = f"only {gib(task.hardware.available)} of host memory are free"
        decide("checkpoints", "written between steps", f"a copy to write beside them is {gib(copied)}, and {free}")
    return fits


def refusal(run: Run, plan: Plan, facts: ModelFacts, hardware: Hardware) -> str | None:
    """Why a plan made by hand cannot be carried out, or None."""
    if plan.device == "cuda" and not hardware.gpus:
        return "it is for a GPU, and none is here"
    counted = run.model_copy(update={"batch_tokens": None})  # by the plan
    make_task(counted, facts, hardware, lambda *_: None)  # what refuses the run refuses it here
    task, choice = _of_plan(run, plan, facts, hardware)
    if (refused := refusals.refused(task, choice)) is not None:
        return refused
    return next((f"this version of Tunesmith cannot do {missing}" for missing in rules.beyond(task, choice)), None)


class Written(NamedTuple):
    """What a run writes, in bytes."""

    checkpoint: int
    result: int


def written(run: Run, plan: Plan, facts: ModelFacts, hardware: Hardware) -> Written:
    """By a run that obeys this plan."""
    task, choice = _of_plan(run, plan, facts, hardware)
    return Written(round(model_states.checkpoint_bytes(task, choice)), model_states.result_bytes(task))


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
        lora=run.lora if run.has_lora else OF_PEFT,
        has_new_tokens=bool(run.new_tokens) and run.has_lora,
        peft_type=str(run.peft.get("peft_type", "")).upper(),
        optimizer=run.algorithm,
        sequence_length=plan.sequence_length,
        sequences=plan.sequences_per_step,
        document_length=plan.sequence_length,
        clips=run.max_grad_norm is not None,
        is_exact=plan.deterministic,
        objective=objective_of(run),
        teacher_in_steps=run.objective == "distill" and run.distillation.top_k is None,
    )
    values = {**dict(plan), **dict(plan.mesh)}
    return task, Choice(**{field.name: values[field.name] for field in dataclasses.fields(Choice)})
