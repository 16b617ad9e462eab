"""Run + Plan -> Job: the one place where every package meets."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from tunesmith.config.schema import Run
from tunesmith.data.loader import Loader
from tunesmith.data.prompts import PromptLoader
from tunesmith.data.store import TokenStore
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
from tunesmith.parallel.context import ContextShard, context_shard_of
from tunesmith.parallel.mesh import check_ranks
from tunesmith.parallel.prepare import PreparedModel, SharedBase, is_cut, prepare
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
from tunesmith.train.step import Teach


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
    assembly = _Assembly(ready, objective_of(run), device, ranks, progress, shared)
    with ExitStack() as stack:
        started = stack.enter_context(started_engine(run, plan, ranks, progress))
        return replace(assembly.job(started), close=stack.pop_all().close)


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


class _HeldOutData(NamedTuple):
    """What is evaluated while the run trains."""

    stores: Sequence[TokenStore]
    mismatched: Sequence[TokenStore]
    """The same prompts with the answers to others, for objectives that have a baseline."""
    note: str | None
    """What to say where these are not all that is held out."""


class _OwnAnswers(NamedTuple):
    """How the model itself answers in steps, where the objective has it answer."""

    spec: ForwardSpec
    """How the model is called in training."""
    roll_out: RollOut | None = None
    generator: Generator | None = None


@dataclass(frozen=True)
class _Assembly:
    """A job in the making: `job` has the order, and each other method makes one part of it."""

    ready: PreparedRun
    objective: Objective
    device: torch.device
    ranks: Ranks
    progress: Progress | None
    shared: Shared | None

    @property
    def run(self) -> Run:
        return self.ready.run

    @property
    def plan(self) -> Plan:
        return self.ready.plan

    @property
    def folder(self) -> Path:
        return Path(self.run.output)

    def job(self, started: RunningEngine | None) -> Job:
        """The job. `started`: vLLM, where it answers in the model's place."""
        run, plan, ranks = self.run, self.plan, self.ranks
        loader = self.loader()
        teach = self.teacher(loader)
        prepared = self.prepared_model(loader.total_steps)
        model, called = prepared.model, prepared.called
        merges = Merges.of(model, run, loader.total_steps)
        schedule = RankSchedule.of(prepared.tuned)
        optimizer = self.optimizer(prepared, loader.total_steps)
        context_shard = context_shard_of(plan, ranks.rank, micro_batch_shape(plan))
        reference = self.reference(called, context_shard)
        if isinstance(loader, Loader):
            loader.refer(*reference.of(self.ready.data.train, self.objective, loader.seen))
        held_out = self.held_out_data(reference, loader.total_steps)
        rule = StopRule.of(run, plan, self.objective, has_held_out=bool(held_out.stores))
        share = Share(called, plan, ranks)
        state = TrainingState(
            optimizer,
            share,
            self.ready.checkpoints,
            schedule=schedule or merges,
            rule=rule,
            held_out=tuple(store.fingerprint for store in held_out.stores),
        )
        result = ResultWriter.of(
            run,
            plan,
            model,
            optimizer,
            share,
            self.ready.data,
            steps=loader.total_steps,
            losses=state.losses,
            tuned=prepared.tuned,
        )
        engine = None if started is None else Engine(started, result.write_current, ranks)
        own_answers = self.own_answers(called, engine)
        samples = SampleLog(self.folder, is_first=ranks.is_first)
        evaluate = self.evaluation(called, held_out, own_answers.generator, context_shard, state, samples)
        tasks_note = None
        if run.eval_tasks:
            evaluate = with_tasks(
                evaluate,
                run,
                plan,
                self.ready.data,
                called=called,
                device=self.device,
                ranks=ranks,
                total_steps=loader.total_steps,
                rule=rule,
                samples=samples,
            )
            tasks_note = evaluate.note
        notes = (held_out.note, self.note_on_steps(loader.total_steps), tasks_note)
        return Job(
            run=run,
            plan=plan,
            folder=self.folder,
            device=self.device,
            model=called,
            spec=own_answers.spec,
            loader=loader,
            titles=tuple(store.title for store in self.ready.data.train),
            sets=tuple((store.title, store.key) for store in self.ready.data.train),
            optimizer=optimizer,
            checkpoints=self.ready.checkpoints,
            resume_from=self.ready.resume_from,
            evaluate=evaluate,
            ends=(lambda: rule.reason) if rule is not None else (lambda: None),
            save=state.save,
            restore=state.restore,
            write_result=result.write,
            finish=lambda summary: run_folder.write_summary(self.folder, summary),
            shape=micro_batch_shape(plan),
            warnings=(*self.ready.data.warnings, *self.ready.warnings, *filter(None, notes)),
            ranks=ranks,
            context_shard=context_shard,
            objective=self.objective,
            schedule=schedule,
            merges=merges,
            teach=teach,
            roll_out=own_answers.roll_out,
        )

    def loader(self) -> Loader | PromptLoader:
        """The batches of each step, or its prompts where the model itself answers them."""
        run, plan, data = self.run, self.plan, self.ready.data
        weights = [dataset.weight for dataset in run.data]
        epochs = run.epochs or plan.epochs
        if isinstance(self.objective, Grpo):
            prompts = self.objective.rollout.prompts
            return PromptLoader(data.train, weights, seed=run.seed, prompts=prompts, epochs=epochs, steps=run.steps)
        return Loader(
            data.train,
            weights,
            seed=run.seed,
            sequence_length=plan.sequence_length,
            sequences_per_step=plan.sequences_per_step,
            epochs=epochs,
            steps=run.steps,
            micro_batch=plan.micro_batch,
            rank=plan.mesh.data_rank(self.ranks.rank),
            ranks=plan.mesh.data_ranks,
            lengths=plan.forward.lengths(plan.sequence_length),
            most_padded=plan.most_padded,
            objective=self.objective,
        )

    def teacher(self, loader: Loader | PromptLoader) -> Teach | None:
        """What gives each micro-batch its lesson; None where there is no teacher."""
        check_prompts(self.run.distillation.on_policy, self.ready.data.train)
        if isinstance(loader, PromptLoader):
            return None
        train = self.ready.data.train
        return teach_of(self.run, self.plan, train, loader.seen, self.device, self.ranks, self.progress)

    def prepared_model(self, total_steps: int) -> PreparedModel:
        """The model, ready to train; its base is known by its content from here on."""
        run, plan = self.run, self.plan
        base = self.shared.base if self.shared else None
        content = (base.content(run, plan) if base else None) or Content()
        imports = _imports_for(plan)
        prepared = prepare(run, plan, self.device, content=content, meanwhile=imports, steps=total_steps, base=base)
        self.keep_base(content)
        return prepared

    def keep_base(self, content: Content) -> None:
        """Have the run's folder remember what was read of the base: by all ranks, where each has read a part."""
        if is_cut(self.plan):
            content.join(self.ranks.gather)
        if self.ranks.is_first:
            is_continued, accept_changes = self.ready.is_continued, self.ready.accept_changes
            keep_base(self.folder, self.run, content, is_continued=is_continued, accept_changes=accept_changes)

    def optimizer(self, prepared: PreparedModel, total_steps: int) -> Optimizer:
        """The optimizer of the trained weights, which overlaps updates with the next step where the model is whole."""
        run, plan, model = self.run, self.plan, prepared.model
        if run.algorithm in BLOCKWISE:
            optimizer = BlockOptimizer(
                model.named_parameters(),
                run,
                BlockSchedule.of(model, decoder_layers(model), run, steps=total_steps),
                master_weights=plan.master_weights,
                accumulates=plan.accumulation_steps > 1 or plan.by_length,
            )
        else:
            optimizer = build(model, run, plan)
        if prepared.called is model:
            optimizer.overlap_update(body(model), decoder_layers(model))
        return optimizer

    def reference(self, called: nn.Module, context_shard: ContextShard) -> Reference:
        """What asks the model, as it is before its first step, for the reference of an objective that has one."""
        model = self.ready.identity.model
        return Reference(
            called,
            self.plan.forward,
            self.plan,
            self.device,
            weights=f"{model}:{self.run.peft}:{self.run.seed}" if self.run.method == "peft" else model,
            ranks=self.ranks,
            context_shard=context_shard,
            progress=self.progress,
        )

    def held_out_data(self, reference: Reference, total_steps: int) -> _HeldOutData:
        """The held-out data that the run evaluates, with their references."""
        stores, note = held_out_while_training(self.run, self.plan, self.ready.data.evals, total_steps)
        return _HeldOutData(*reference.of(stores, self.objective), note)

    def own_answers(self, called: nn.Module, engine: Engine | None) -> _OwnAnswers:
        """What has the model, or `engine` in its place, answer the prompts of a step."""
        run, plan, data, objective = self.run, self.plan, self.ready.data, self.objective
        if isinstance(objective, Grpo):
            generator = Generator(called, data.encoder, run.rollout, Rewards(run.rewards), run.seed, engine)
            spec = at_temperature(plan.forward, run.rollout.temperature)
            longest = max(int(store.lengths.max()) for store in data.train)
            rollouts = Rollouts(generator, objective, spec, plan, self.device, self.ranks, self.folder, longest)
            return _OwnAnswers(spec, rollouts, generator)
        if isinstance(objective, Distill) and objective.is_on_policy:
            sampler = Sampler(called, data.encoder, run.rollout, run.seed)
            on_policy = OnPolicy(sampler, objective, plan.forward, plan, self.ranks, self.folder)
            return _OwnAnswers(plan.forward, on_policy)
        return _OwnAnswers(plan.forward)

    def evaluation(
        self,
        called: nn.Module,
        held_out: _HeldOutData,
        generator: Generator | None,
        context_shard: ContextShard,
        state: TrainingState,
        samples: SampleLog,
    ) -> Evaluate | None:
        """What evaluates the held-out data: by rewards of the answers of `generator`, where there is one, else by their
        loss; None where no data are held out. Losses that are found become part of `state`, and its rule is told."""
        if not held_out.stores:
            return None
        if generator is not None:
            return RewardEvaluator(generator, held_out.stores, self.ranks, state.losses)
        evaluator = Evaluator(
            called,
            self.plan.forward,
            self.plan,
            held_out.stores,
            self.device,
            self.ranks,
            context_shard,
            state.losses,
            objective=self.objective,
            mismatched=held_out.mismatched,
            rule=state.rule if state.rule and state.rule.task is None else None,
            samples=samples,
        )
        return evaluator if state.rule is not None else self.knowing_the_base(evaluator)

    def knowing_the_base(self, evaluator: Evaluator) -> Evaluate:
        """The evaluator, which in a sweep does not compute again what the base's losses were once found to be."""
        if self.shared is None or self.run.adapter is not None or not SharedBase.suits(self.run, self.plan):
            return evaluator
        return with_known_start(evaluator, self.run, self.shared.evaluated)

    def note_on_steps(self, total_steps: int) -> str | None:
        """What to say of a run that has few steps, where nobody has asked for so few."""
        run = self.run
        is_asked_for = run.steps is not None or None not in (run.epochs, run.batch_tokens)
        if is_asked_for or self.objective.has_rollouts:
            return None
        few = few_steps(total_steps)
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
