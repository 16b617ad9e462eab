"""Held-out losses of a run: while it trains, and of its folder afterwards."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tunesmith.config.schema import Run
from tunesmith.data.held_out import in_proportion
from tunesmith.data.store import TokenStore
from tunesmith.evaluate.loss import HeldOut, TokenLosses, held_out_losses, overall, overall_figures
from tunesmith.model import attention, load
from tunesmith.model.content import Content
from tunesmith.model.forward_spec import confirm_forward_spec
from tunesmith.model.probe import probe
from tunesmith.objectives import objective_of
from tunesmith.objectives.base import Objective
from tunesmith.parallel.context import ContextShard
from tunesmith.parallel.pipeline import Pipelined
from tunesmith.parallel.prepare import load_model, make_fast
from tunesmith.parallel.ranks import Ranks
from tunesmith.parallel.shard import Sharded
from tunesmith.plan.plan import ForwardSpec, Plan
from tunesmith.rewards import Rewards
from tunesmith.run import folder as run_folder
from tunesmith.run.base import check_base
from tunesmith.run.choose import Progress, new_plan, tokenize, with_findings
from tunesmith.run.open import encoder_of, open_run, placement, tokenizer_of
from tunesmith.run.reference import Reference
from tunesmith.run.rollout import Generator, held_out_rewards
from tunesmith.run.shape import as_called, micro_batch_shape, settle_torch
from tunesmith.run.stop import StopRule, together
from tunesmith.run.there import with_own_model
from tunesmith.train.events import Evaluation
from tunesmith.train.samples import SampleLog


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a model while it is trained; all ranks take part."""

    called: nn.Module
    spec: ForwardSpec
    plan: Plan
    stores: Sequence[TokenStore]
    device: torch.device
    ranks: Ranks
    context_shard: ContextShard
    losses: dict[int, float]
    """Held-out losses by step; each evaluation adds its own."""
    objective: Objective | None = None
    mismatched: Sequence[TokenStore] = ()
    rule: StopRule | None = None
    """Told of each evaluation."""
    samples: SampleLog | None = None

    def __call__(self, step: int, progress: Callable[[int, int], None]) -> Evaluation:
        began = time.monotonic()
        documents: dict[str, tuple[float, float]] | None = {} if self.rule else None
        mesh = self.plan.mesh
        is_whole = mesh.pipeline == mesh.context == 1 and self.spec.layout != "encoder-decoder"
        tokens = TokenLosses() if self.samples is not None and is_whole else None
        results = held_out_losses(
            self.called,
            self.spec,
            self.stores,
            device=self.device,
            sequence_length=self.plan.sequence_length,
            micro_batch=self.plan.micro_batch,
            shape=micro_batch_shape(self.plan),
            progress=progress,
            ranks=self.ranks,
            share=(self.plan.mesh.data_rank(self.ranks.rank), self.plan.mesh.data_ranks),
            context_shard=self.context_shard,
            objective=self.objective,
            mismatched=self.mismatched,
            documents=documents,
            tokens=tokens,
        )
        inner = self.called.model if isinstance(self.called, Pipelined) else self.called
        if isinstance(inner, Sharded):
            inner.free_full_weights()
        self.losses[step] = overall(results)
        if self.rule is not None and documents is not None:
            self.rule.tell(step, self.losses[step], together(documents, self.ranks))
        if tokens is not None and self.samples is not None:
            every: dict[str, Any] = {}
            for said in self.ranks.gather(json.dumps(tokens.documents)):
                every |= json.loads(said)
            self.samples.write(step, tokens=[every[key] for key in sorted(every)])
        return evaluation_of(step, results, began)


@dataclass(frozen=True)
class RewardEvaluator:
    """Evaluates a model while it is trained, by the rewards of its likeliest answers; all ranks take part."""

    generator: Generator
    stores: Sequence[TokenStore]
    ranks: Ranks
    losses: dict[int, float]
    """Held-out losses by step; each evaluation adds its own."""

    def __call__(self, step: int, progress: Callable[[int, int], None]) -> Evaluation:
        began = time.monotonic()
        self.generator.refresh(step)
        results = held_out_rewards(self.generator, self.stores, ranks=self.ranks, progress=progress)
        evaluation = evaluation_of(step, results, began)
        self.losses[step] = evaluation.loss
        return evaluation


def evaluation_of(step: int, results: Sequence[HeldOut], began: float) -> Evaluation:
    return Evaluation(
        step=step,
        loss=overall(results),
        losses={result.title: result.loss for result in results},
        target_tokens=sum(result.target_tokens for result in results),
        seconds=round(time.monotonic() - began, 3),
        figures=overall_figures(results),
        figures_of={result.title: dict(result.figures) for result in results if result.figures},
    )


def with_known_start(
    evaluate: Evaluator, run: Run, known: dict[Hashable, Evaluation]
) -> Callable[[int, Callable[[int, int], None]], Evaluation]:
    """The evaluator of one of several runs over one base, which takes the losses before the first step from `known`
    where they are there, and adds them where not: adapters that begin without effect leave the base's own losses, to
    the last bit where the same linears carry them, so that the first run's are those of all."""
    plan, lora = evaluate.plan, run.lora
    sizes = (plan.sequence_length, plan.micro_batch, plan.threads, plan.is_compiled, plan.forward)
    adapted = (str(lora.targets), lora.layers, lora.dora, lora.dropout > 0)
    data = tuple((store.title, store.fingerprint) for store in (*evaluate.stores, *evaluate.mismatched))
    key = (*sizes, *adapted, data, str(run.preference), str(run.distillation))
    begins_as_base = lora.init == "default" and not lora.dora

    def called(step: int, progress: Callable[[int, int], None]) -> Evaluation:
        if step > 0 or not begins_as_base:
            return evaluate(step, progress)
        if key not in known:
            known[key] = evaluate(step, progress)
        evaluate.losses[step] = known[key].loss
        return known[key]

    return called


def held_out_while_training(
    run: Run, plan: Plan, evals: Sequence[TokenStore], total_steps: int
) -> tuple[Sequence[TokenStore], str | None]:
    """What of the held-out data is evaluated while the run trains, and a word about it where that is not all. Neither
    clocks nor the machine have a say: the losses before, within and after a run are those of the same examples."""
    if run.eval_every is not None or not evals:
        return evals, None
    chosen = in_proportion(evals, total_steps * plan.sequences_per_step * plan.sequence_length)
    taken, there = (sum(len(store) for store in stores) for stores in (chosen, evals))
    if taken == there:
        return evals, None
    return chosen, (
        f"{taken:,} of the {there:,} held-out examples are evaluated, the same ones each time: all would take too long "
        "beside so short a training. Set eval_every to evaluate all; `tunesmith eval` always does."
    )


def evaluate_run(
    folder: Path,
    run: Run,
    *,
    with_base: bool = False,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
) -> tuple[list[HeldOut] | None, list[HeldOut], int | None]:
    """Held-out losses of the run in `folder` on the texts of `run.eval` and what `run.held_out` takes of its data:
    before training if asked for, after it, and the checkpoint's step where there is no result. Several ranks share
    the documents; each has the whole model."""
    ranks = ranks or Ranks()
    plan = run_folder.read_plan(folder) or new_plan(run)
    if plan.forward is None:  # planned by an earlier version, or not at all
        plan = with_findings(plan, probe(run, device=placement(plan)[0]))
    for is_turn in (ranks.is_first, not ranks.is_first):  # what the first has tokenized, the others find
        if is_turn:
            stores = held_out_of(folder, run, plan, progress)
        ranks.wait()
    settle_torch(plan)
    attention.register()
    device, precision = placement(plan)
    objective = objective_of(run)
    mismatched: Sequence[TokenStore] = ()

    def ready(model: nn.Module) -> tuple[ForwardSpec, torch.device]:
        spec, _ = confirm_forward_spec(model, vocabulary=load.usable_tokens(model.config), known=plan.forward)
        where = next(model.parameters()).device
        # Fused as in training, since in half precision the same sums in another order are other losses.
        make_fast(model, run, plan, where)
        return spec, where

    def measure(model: nn.Module, spec: ForwardSpec, where: torch.device) -> list[HeldOut]:
        evaluating = partial(progress, "Evaluating") if progress else None
        if objective.has_rollouts:
            generator = Generator(model, encoder_of(folder), run.rollout, Rewards(run.rewards), run.seed)
            return held_out_rewards(generator, stores, ranks=ranks, progress=evaluating)
        called = as_called(stores, objective, spec)
        assert spec.branches or not any(store.shared_tokens for store in called), "base and result are one architecture"
        return held_out_losses(
            model,
            spec,
            called,
            device=where,
            sequence_length=plan.sequence_length,
            micro_batch=plan.micro_batch,
            progress=evaluating,
            ranks=ranks,
            share=(ranks.rank, ranks.count),
            objective=objective,
            mismatched=mismatched,
        )

    before = None
    if with_base or objective.has_reference:
        content = Content()
        base = load_model(run, dtype=precision, device=device, storage=plan.storage, content=content).eval()
        spec, where = ready(base)
        if objective.has_reference:
            weights, share = load.model_fingerprint(run), (ranks.rank, ranks.count)
            reference = Reference(base, spec, plan, where, weights=weights, ranks=ranks, share=share)
            stores, mismatched = reference.of(as_called(stores, objective, spec), objective)
        before = measure(base, spec, where) if with_base else None
        del base
        check_base(folder, run, content)
    opened = open_run(folder)
    return before, measure(opened.model, *ready(opened.model)), opened.step


def held_out_of(folder: Path, run: Run, plan: Plan | None, progress: Progress | None = None) -> Sequence[TokenStore]:
    """What the run in `folder` was not trained on; of a run without held-out data, what it was trained on."""
    tokenizer = tokenizer_of(folder)
    run = with_own_model(folder, run).model_copy(update={"chat_template": None})  # the tokenizer has it
    if run.held_out or not run.eval_texts:
        data = tokenize(run, plan, progress, tokenizer)
        return data.evals or data.train
    only = {"data": run.eval_texts, "eval": [], "held_out": 0}
    only |= {"sequence_length": plan.sequence_length} if plan is not None else {}
    return tokenize(run.model_copy(update=only), None, progress, tokenizer).train
