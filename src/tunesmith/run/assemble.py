"""Run + Plan -> Job: the one place where every package meets."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from tunesmith.config.schema import Run
from tunesmith.data.loader import Loader
from tunesmith.data.prompts import PromptLoader
from tunesmith.kernels import flash4
from tunesmith.model import attention
from tunesmith.model.adapters import RankSchedule
from tunesmith.model.content import Content
from tunesmith.model.merges import Merges
from tunesmith.model.structure import body, decoder_layers
from tunesmith.objectives import objective_of
from tunesmith.objectives.base import Objective
from tunesmith.objectives.distill import Distill
from tunesmith.objectives.grpo import Grpo
from tunesmith.optim.blocks import BlockOptimizer, BlockSchedule
from tunesmith.optim.build import Optimizer, build
from tunesmith.parallel import compile
from tunesmith.parallel.check import check_parallelism
from tunesmith.parallel.context import context_shard_of
from tunesmith.parallel.mesh import check_ranks
from tunesmith.parallel.prepare import Prepared, SharedBase, is_cut, prepare
from tunesmith.parallel.ranks import Ranks
from tunesmith.plan.defaults import few_steps
from tunesmith.plan.model_states import BLOCKWISE
from tunesmith.plan.plan import ForwardSpec, Plan
from tunesmith.rewards import Rewards
from tunesmith.run import folder as run_folder
from tunesmith.run.base import keep_base
from tunesmith.run.engine import Engine, RunningEngine, started_engine
from tunesmith.run.evaluate import Evaluator, RewardEvaluator, held_out_while_training, with_known_start
from tunesmith.run.on_policy import OnPolicy, check_prompts
from tunesmith.run.reference import Progress, Reference
from tunesmith.run.result import ResultWriter
from tunesmith.run.rollout import Generator, Rollouts, Sampler, at_temperature
from tunesmith.run.shape import micro_batch_shape, settle_torch
from tunesmith.run.start import PreparedRun
from tunesmith.run.state import Share, TrainingState
from tunesmith.run.stop import StopRule
from tunesmith.run.task_scores import Evaluate, with_tasks
from tunesmith.run.teacher import teach_of
from tunesmith.train.events import Evaluation
from tunesmith.train.job import Job, RollOut
from tunesmith.train.samples import SampleLog


@dataclass
class Shared:
    """What the runs of a sweep have in common, each of which is assembled, trained and let go before the next."""

    base: SharedBase = field(default_factory=SharedBase)
    evaluated: dict[Hashable, Evaluation] = field(default_factory=dict)
    """The base's held-out losses, as runs find them before their first step."""


def assemble(
    ready: PreparedRun,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
    shared: Shared | None = None,
) -> Job:
    """Prepare the model by the plan, and put the job together; it is to be closed."""
    run, plan, ranks = ready.run, ready.plan, ranks or Ranks()
    device = _device(plan, ranks)
    _make_ready(run, plan, device, ranks)
    with ExitStack() as stack:
        started = stack.enter_context(started_engine(run, plan, ranks, progress))
        job = _assembled(ready, ranks, device, progress, shared, started)
        return replace(job, close=stack.pop_all().close)


def _assembled(
    ready: PreparedRun,
    ranks: Ranks,
    device: torch.device,
    progress: Progress | None,
    shared: Shared | None,
    started: RunningEngine | None,
) -> Job:
    run, plan = ready.run, ready.plan
    objective = objective_of(run)
    loader = _prompt_loader(ready, objective) if isinstance(objective, Grpo) else _loader(ready, ranks, objective)
    teach = None
    check_prompts(run.distillation.on_policy, ready.data.train)
    if isinstance(loader, Loader):
        teach = teach_of(run, plan, ready.data.train, loader.seen, device, ranks, progress)
    prepared = _prepare(ready, device, ranks, loader.total_steps, shared.base if shared else None)
    model, called = prepared.model, prepared.called
    merges = Merges.of(model, run, loader.total_steps)
    optimizer = _optimizer(ready, model, loader.total_steps)
    if called is model:
        optimizer.overlap_update(body(model), decoder_layers(model))
    shape = micro_batch_shape(plan)
    context_shard = context_shard_of(plan, ranks.rank, shape)
    began = f"{ready.identity.model}:{run.peft}:{run.seed}" if run.method == "peft" else ready.identity.model
    about = {"weights": began, "ranks": ranks, "context_shard": context_shard, "progress": progress}
    reference = Reference(called, plan.forward, plan, device, **about)
    if isinstance(loader, Loader):
        loader.refer(*reference.of(ready.data.train, objective, loader.seen))
    evals, note = held_out_while_training(run, plan, ready.data.evals, loader.total_steps)
    evals, eval_mismatched = reference.of(evals, objective)
    few = None if objective.has_rollouts else _few_steps(run, loader.total_steps)
    notes = [one for one in (note, few) if one]
    share = Share(called, plan, ranks)
    schedule = RankSchedule.of(prepared.tuned)
    rule = StopRule.of(run, plan, objective, has_held_out=bool(evals))
    fingerprints = tuple(store.fingerprint for store in evals)
    state = TrainingState(optimizer, share, ready.checkpoints, schedule or merges, rule=rule, held_out=fingerprints)
    told = {"steps": loader.total_steps, "losses": state.losses}
    result = ResultWriter.of(run, plan, model, optimizer, share, ready.data, **told, tuned=prepared.tuned)
    engine = None if started is None else Engine(started, result.write_current, ranks)
    answering = _answering(ready, called, objective, device, ranks, engine)
    evaluate, samples = None, SampleLog(Path(run.output), is_first=ranks.is_first)
    if answering.generator is not None and evals:
        evaluate = RewardEvaluator(answering.generator, evals, ranks, state.losses)
    elif evals:
        told = (state.losses, objective, eval_mismatched, rule if rule and rule.task is None else None)
        evaluate = Evaluator(called, plan.forward, plan, evals, device, ranks, context_shard, *told, samples)
        evaluate = _knowing_the_base(evaluate, ready, shared) if rule is None else evaluate
    if run.eval_tasks:
        given = (called, device, ranks, loader.total_steps, rule, samples)
        evaluate = with_tasks(evaluate, run, plan, ready.data, *given)
        notes += [evaluate.note] if evaluate.note else []
    return Job(
        run=run,
        plan=plan,
        folder=Path(run.output),
        device=device,
        model=called,
        spec=answering.spec,
        loader=loader,
        titles=tuple(store.title for store in ready.data.train),
        sets=tuple((store.title, store.key) for store in ready.data.train),
        optimizer=optimizer,
        checkpoints=ready.checkpoints,
        resume_from=ready.resume_from,
        evaluate=evaluate,
        ends=(lambda: rule.reason) if rule is not None else (lambda: None),
        save=state.save,
        restore=state.restore,
        write_result=result.write,
        finish=lambda summary: run_folder.write_summary(Path(run.output), summary),
        shape=shape,
        warnings=(*ready.data.warnings, *ready.warnings, *notes),
        ranks=ranks,
        context_shard=context_shard,
        objective=objective,
        schedule=schedule,
        merges=merges,
        teach=teach,
        roll_out=answering.roll_out,
    )


def _device(plan: Plan, ranks: Ranks) -> torch.device:
    if ranks.count > 1 and plan.device == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(plan.device)


def _make_ready(run: Run, plan: Plan, device: torch.device, ranks: Ranks) -> None:
    """The process as the plan needs it: its ranks, its random numbers, its attention; UserError where it cannot be."""
    check_ranks(plan, ranks)
    settle_torch(plan)
    attention.register(plan.attention)
    check_parallelism(run, plan, device)


def _prepare(ready: PreparedRun, device: torch.device, ranks: Ranks, steps: int, base: SharedBase | None) -> Prepared:
    """The model, whose base is known by its content from here on."""
    run, plan = ready.run, ready.plan
    content = (base.content(run, plan) if base else None) or Content()
    ways = {"content": content, "meanwhile": _imports_for(plan), "steps": steps}
    prepared = prepare(run, plan, device, **ways, base=base)
    _keep_base(ready, content, plan, ranks)
    return prepared


def _knowing_the_base(evaluate: Evaluator, ready: PreparedRun, shared: Shared | None) -> Evaluate:
    """In a sweep, what the base's losses were found to be once is not computed again."""
    run = ready.run
    if shared is None or run.adapter is not None or not SharedBase.suits(run, ready.plan):
        return evaluate
    return with_known_start(evaluate, run, shared.evaluated)


class _Answering(NamedTuple):
    """Where the model itself answers in steps."""

    spec: ForwardSpec
    roll_out: RollOut | None = None
    generator: Generator | None = None


def _answering(
    ready: PreparedRun,
    called: nn.Module,
    objective: Objective,
    device: torch.device,
    ranks: Ranks,
    engine: Engine | None,
) -> _Answering:
    run, plan, encoder, folder = ready.run, ready.plan, ready.data.encoder, Path(ready.run.output)
    if isinstance(objective, Grpo):
        generator = Generator(called, encoder, run.rollout, Rewards(run.rewards), run.seed, engine)
        spec = at_temperature(plan.forward, run.rollout.temperature)
        longest = max(int(store.lengths.max()) for store in ready.data.train)
        return _Answering(spec, Rollouts(generator, objective, spec, plan, device, ranks, folder, longest), generator)
    if isinstance(objective, Distill) and objective.is_on_policy:
        sampler = Sampler(called, encoder, run.rollout, run.seed)
        return _Answering(plan.forward, OnPolicy(sampler, objective, plan.forward, plan, ranks, folder))
    return _Answering(plan.forward)


def _optimizer(ready: PreparedRun, model: nn.Module, steps: int) -> Optimizer:
    run, plan = ready.run, ready.plan
    if run.algorithm not in BLOCKWISE:
        return build(model, run, plan)
    schedule = BlockSchedule.of(model, decoder_layers(model), run, steps=steps)
    accumulates = plan.accumulation_steps > 1 or plan.by_length
    options = {"master_weights": plan.master_weights, "accumulates": accumulates}
    return BlockOptimizer(model.named_parameters(), run, schedule, **options)


def _keep_base(ready: PreparedRun, content: Content, plan: Plan, ranks: Ranks) -> None:
    """The base is known again by what was read of it, by all ranks where each has read a part."""
    if is_cut(plan):
        content.join(ranks.gather)
    if ranks.is_first:
        ways = {"is_continued": ready.is_continued, "accept_changes": ready.accept_changes}
        keep_base(Path(ready.run.output), ready.run, content, **ways)


def _loader(ready: PreparedRun, ranks: Ranks, objective: Objective) -> Loader:
    run, plan = ready.run, ready.plan
    return Loader(
        ready.data.train,
        [dataset.weight for dataset in run.data],
        seed=run.seed,
        sequence_length=plan.sequence_length,
        sequences_per_step=plan.sequences_per_step,
        epochs=run.epochs or plan.epochs,
        steps=run.steps,
        micro_batch=plan.micro_batch,
        rank=plan.mesh.data_rank(ranks.rank),
        ranks=plan.mesh.data_ranks,
        lengths=plan.forward.lengths(plan.sequence_length),
        most_padded=plan.most_padded,
        objective=objective,
    )


def _prompt_loader(ready: PreparedRun, objective: Grpo) -> PromptLoader:
    run, weights = ready.run, [dataset.weight for dataset in ready.run.data]
    amount = {"epochs": run.epochs or ready.plan.epochs, "steps": run.steps}
    return PromptLoader(ready.data.train, weights, seed=run.seed, prompts=objective.rollout.prompts, **amount)


def _few_steps(run: Run, total_steps: int) -> str | None:
    is_asked_for = run.steps is not None or None not in (run.epochs, run.batch_tokens)
    few = None if is_asked_for else few_steps(total_steps)
    return f"The steps of this run are {total_steps}, {few}." if few else None


def _imports_for(plan: Plan) -> Callable[[], None]:
    """What imports modules that take seconds, and are wanted once the model is there. What they look at in the
    environment is set at once: not in a thread."""
    uses_flash4 = plan.attention == "flash-attn-4"
    if uses_flash4:
        flash4.keep_compiled()
    if plan.is_compiled:
        compile.prepare()

    def work() -> None:
        if uses_flash4:
            flash4.functions()
        if plan.is_compiled:
            import torch._inductor.compile_fx  # noqa: F401

    return work
