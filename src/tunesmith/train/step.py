"""One optimizer step: forward and backward over the micro-batches, clip, update. The same at every scale.

The loss is a sum, over target tokens or over the objective's examples, divided by their number in the whole step, so
the gradient is the same however the step is cut into micro-batches. All randomness is drawn from (seed, step,
micro-batch, rank), so a step is a pure function of the weights before it. Its parts are named regions (data, forward,
loss, backward, optimizer, wait) for `measure.profile`; outside a profile they cost some microseconds.

Legend: N target tokens of a micro-batch, K numbers that an objective reports, S data sets.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.profiler import record_function

from tunesmith.data.types import MicroBatch, StepBatch
from tunesmith.errors import UserError, listed
from tunesmith.kernels.linear_distillation import Lesson
from tunesmith.model.adapters import RankSchedule
from tunesmith.model.embedding import BatchLoss, batch_loss, embedded, facts_of, lengths_of, pooled
from tunesmith.model.forward import Inputs, Shape, Weigh, losses_of_hidden, moved, to_device, token_losses
from tunesmith.model.merges import Merges
from tunesmith.model.routers import Balance, Routing
from tunesmith.model.scoring import Scoring, figures_of, reported, risen, scoring_of
from tunesmith.objectives.base import Objective
from tunesmith.objectives.distill import PARTS
from tunesmith.objectives.embed import Embed
from tunesmith.optim.build import Optimizer, by_mesh
from tunesmith.parallel.context import ContextShard
from tunesmith.parallel.pipeline import Pipelined
from tunesmith.parallel.ranks import Ranks
from tunesmith.parallel.shard import Sharded, full_tensor
from tunesmith.plan.plan import ForwardSpec
from tunesmith.train.documents import rows_of
from tunesmith.train.graph import EAGER_STEPS, GraphCapture
from tunesmith.train.vitals import EVERY, FIRST, MEASURED, Sample, Weights, weights_of

BySource = dict[int, list[float]]
"""What a step has found, by data set."""


Teach = Callable[[MicroBatch, Inputs], Lesson]
"""What a teacher says of a micro-batch, which is on the device already."""


class NotFinite(UserError):
    """The loss or its gradient became NaN or infinite, or the weights of no use; nothing may be saved any more."""


class Interrupted(Exception):
    """Asked to stop between two micro-batches; the weights are still those before the step."""


@dataclass(frozen=True, slots=True)
class StepResult:
    loss: float
    grad_norm: float
    losses: dict[int, float]
    """Loss by data set, as the loader numbers them."""
    is_skipped: bool = False
    """fp16: gradients overflowed at the present loss scale, and nothing was updated."""
    weights: Weights | None = None
    """As they were before the update, in steps in which they are measured."""
    figures: dict[str, float] = field(default_factory=dict)
    """What the objective reports besides its loss."""
    figures_of: dict[int, dict[str, float]] = field(default_factory=dict)
    """What the objective reports besides its loss, by data set."""
    routers: list[Balance] = field(default_factory=list)
    """How evenly each router of an MoE model has dealt out the step's tokens, in steps in which that is counted."""
    documents: np.ndarray | None = field(default=None, compare=False)
    """The loss of each document of this rank (`train.documents.ROW`), where the loss is a sum over tokens."""


class _Documents:
    """Losses of a step's documents, on their way from the device. They are summed by document on the host, which waits
    for the step anyway: kernels for it would cost the device more than the copy does."""

    def __init__(self) -> None:
        self._batches: list[MicroBatch] = []
        self._losses: list[torch.Tensor] = []
        self._read: Callable[[], torch.Tensor] | None = None

    def add(self, batch: MicroBatch, weighted_n: torch.Tensor) -> None:
        if batch.records is not None:
            self._batches.append(batch)
            self._losses.append(weighted_n.detach() if weighted_n.ndim == 1 else weighted_n.detach().sum(1))

    def send(self) -> None:
        """Begin to copy them to the host."""
        if self._losses:
            self._read = start_copy_to_host(torch.cat(self._losses).float())

    def found(self) -> tuple[np.ndarray | None, list[str]]:
        """Rows of `train.documents`, and where those documents came from whose losses are no finite numbers."""
        if self._read is None:
            return None, []
        known = [_sums_by_document(*pair) for pair in zip(self._batches, self._split(self._read()), strict=True)]
        sources, records, sums, weights = torch.cat(known, dim=1).numpy()
        origins = [origin for batch in self._batches for origin in batch.origins]
        bad = [origins[place] for place in np.flatnonzero(~np.isfinite(sums))]
        return rows_of(sources.astype(np.int64), records.astype(np.int64), sums, weights), bad

    def _split(self, losses: torch.Tensor) -> Sequence[torch.Tensor]:
        return losses.double().split([len(losses_n) for losses_n in self._losses])


def _sums_by_document(batch: MicroBatch, losses_n: torch.Tensor) -> torch.Tensor:
    """Source, record, sum of the losses and of the weights of each document [4, D]."""
    is_target, count = batch.weights > 0, len(batch.sources)
    owners_n = torch.arange(count).repeat_interleave(batch.boundaries.diff().long())[is_target]
    sums = torch.zeros(2, count, dtype=torch.float64)
    sums.index_add_(1, owners_n, torch.stack([losses_n, batch.weights[is_target].double()]))
    assert batch.records is not None
    return torch.cat([torch.stack([batch.sources.double(), batch.records.double()]), sums])


class Tally:
    """Sums over a step by data set, and what each is to be divided by: of the loss, and of what objectives report."""

    def __init__(self, names: Sequence[str] = ("loss",), is_loss: Sequence[bool] = (True,)) -> None:
        self.names = names
        self.is_loss = is_loss
        self.sums: dict[int, torch.Tensor] = {}
        """[K], on the device"""
        self.weights: dict[int, list[float]] = {}

    def add(self, source: int, sums_k: torch.Tensor, weights: list[float]) -> None:
        self.sums[source] = self.sums[source] + sums_k if source in self.sums else sums_k
        before = self.weights.get(source, [0.0] * len(weights))
        self.weights[source] = [a + b for a, b in zip(before, weights, strict=True)]

    def add_scored(self, scoring: Scoring | BatchLoss) -> None:
        if scoring.sums is None or scoring.weights is None:
            return
        for source in torch.nonzero(scoring.weights.any(0)).flatten().tolist():
            self.add(source, scoring.sums[:, source], scoring.weights[:, source].tolist())

    def loss(self, sums: Sequence[float], weights: Sequence[float]) -> float:
        parts = zip(sums, weights, self.is_loss, strict=True)
        return sum(total / weight for total, weight, is_loss in parts if is_loss and weight)

    def figures(self, sums: Sequence[float], weights: Sequence[float]) -> dict[str, float]:
        return figures_of(self.names, self.is_loss, sums, weights)


class LossScale:
    """fp16's loss scaling: as large as the gradients allow, halved at each overflow."""

    GROWTH_INTERVAL = 200

    def __init__(self) -> None:
        self.value = 2.0**15
        self.clean_steps = 0

    def update(self, overflowed: bool) -> None:
        if overflowed:
            self.value /= 2
            self.clean_steps = 0
            return
        self.clean_steps += 1
        if self.clean_steps == self.GROWTH_INTERVAL:
            self.value *= 2
            self.clean_steps = 0


class TrainStep:
    def __init__(
        self,
        model: nn.Module,
        spec: ForwardSpec,
        optimizer: Optimizer,
        *,
        device: torch.device,
        max_grad_norm: float | None,
        seed: int,
        ranks: Ranks | None = None,
        sources: int = 1,  # data sets, over which several ranks add up their losses
        loss_scale: LossScale | None = None,
        shape: Shape | None = None,
        z_loss: float = 0.0,
        context_shard: ContextShard | None = None,
        capture: GraphCapture | None = None,
        sample: Sample | None = None,
        objective: Objective | None = None,
        schedule: RankSchedule | None = None,
        teach: Teach | None = None,
        merges: Merges | None = None,
        routing: Routing | None = None,
    ):
        self.model = model
        self.spec = spec
        self.optimizer = optimizer
        self.device = device
        self.max_grad_norm = max_grad_norm
        self.seed = seed
        self.ranks = ranks or Ranks()
        self.sources = sources
        self.loss_scale = loss_scale
        self.shape = shape
        self.z_loss = z_loss
        self.context_shard = context_shard or ContextShard()
        self.capture = capture
        self.sample = sample
        self.objective = None if objective is None or objective.is_token_sum else objective
        """None: the mean over target tokens."""
        self.schedule = schedule
        self.teach = teach
        self.merges = merges
        self.routing = routing
        self.keeps_documents = self.objective is None and self.ranks.rank % self.context_shard.copies == 0
        """Whether the losses of documents are told; of ranks that compute the same, by one."""
        self.launched = 0
        self._sampled: list[torch.Tensor | None] = []
        """The log-probabilities of the micro-batches' targets before the first of several updates with them."""

    def __call__(
        self, batch: StepBatch, learning_rate: float, should_stop: Callable[[], bool] = lambda: False
    ) -> StepResult:
        return self.launch(batch, learning_rate, should_stop)()

    def launch(
        self, batch: StepBatch, learning_rate: float, should_stop: Callable[[], bool] = lambda: False
    ) -> Callable[[], StepResult]:
        """Queue the step on the device; what is returned waits for it and says how it went.

        A GPU is not made to wait for the host: there the update is queued before the loss is looked at, and the next
        step may be launched before this one's result is asked for. Should a loss not be finite, asking raises
        NotFinite, and nothing of this step or a later one may be saved.
        """
        self._sampled = []
        if self.merges is not None and self.merges.is_due(batch.step):
            self._merge(self.merges, batch)
        results = [self._launch(batch, learning_rate, should_stop)]
        for _ in range(1, batch.updates):  # not to be stopped any more: the weights are no longer those before the step
            results.append(self._launch(batch, learning_rate, lambda: False))
        return results[0] if len(results) == 1 else lambda: [result() for result in results][-1]

    def _launch(
        self, batch: StepBatch, learning_rate: float, should_stop: Callable[[], bool]
    ) -> Callable[[], StepResult]:
        """One update."""
        scale = self.loss_scale.value if self.loss_scale else 1.0
        self.optimizer.begin(learning_rate, batch.step)
        self.launched += 1
        if self.routing is not None:
            self.routing.begin_step(batch.step)
        try:
            tally, documents = self._gradients(batch, scale, should_stop)
            with record_function("optimizer"):
                result = self._result_of(batch, tally, documents, self._clip(scale))
            known = result() if self.checks_before_update else None
            if known is None or not known.is_skipped:
                with record_function("optimizer"):
                    self.optimizer.step(learning_rate)
                    if self.schedule is not None:
                        self.schedule.after_update(batch.step)
            return result if known is None else lambda: known
        finally:
            with record_function("optimizer"):
                self.optimizer.zero_grad()

    def _gradients(self, batch: StepBatch, scale: float, should_stop: Callable[[], bool]) -> tuple[Tally, _Documents]:
        """Of the whole step, and what its loss is made of."""
        tally, documents = self._tally(), _Documents()
        factor = scale if self.objective is not None else scale / batch.target_weight
        for micro_batch, found in self._passes(batch, factor, should_stop):
            with record_function("loss"):
                if isinstance(found, Scoring | BatchLoss):
                    tally.add_scored(found)
                else:
                    self._add_by_source(micro_batch, found, tally)
                    if self.keeps_documents:
                        documents.add(micro_batch, found)
        if self.schedule is not None:
            (self.schedule.penalty() * scale).backward()
        if isinstance(self.model, Sharded):
            self.model.end_backward()
        return tally, documents

    def _result_of(
        self, batch: StepBatch, tally: Tally, documents: _Documents, norm: torch.Tensor
    ) -> Callable[[], StepResult]:
        """Begin to copy to the host what the step has found; what is returned waits for it."""
        is_measured = self.sample is not None and (self.launched <= FIRST or batch.step % EVERY == 0)
        parts = [self.measured()] if is_measured else []
        parts += [self.routing.told(self.device)] if self.routing is not None else []
        read_routers = self.routing.reader() if self.routing is not None else None
        read = self._start_reading_totals(tally, norm, torch.cat(parts) if parts else None)
        documents.send()

        def result() -> StepResult:
            totals, weights, grad_norm, rest = read()
            measured, rest = (rest[:MEASURED], rest[MEASURED:]) if is_measured else ([], rest)
            router_loss, routers = (None, []) if read_routers is None else read_routers(rest)
            with record_function("loss"):
                rows, bad = documents.found()
            overflowed = self._check(batch, totals, grad_norm, bad)
            total, weight = (_over_sources(sums) for sums in (totals, weights))
            if self.objective is None:
                weight = [batch.target_weight] * len(tally.names)
            figures = {**batch.figures, **tally.figures(total, weight)}
            return StepResult(
                loss=tally.loss(total, weight),
                grad_norm=0.0 if overflowed else grad_norm,
                losses={at: tally.loss(totals[at], weights[at]) for at in totals if any(weights[at])},
                is_skipped=overflowed,
                weights=weights_of(*measured) if measured else None,
                figures=figures if router_loss is None else {**figures, "router_loss": router_loss},
                figures_of={
                    at: {**batch.figures_of.get(at, {}), **tally.figures(totals[at], weights[at])}
                    for at in (totals if len(tally.names) > 1 else ())
                },
                routers=routers,
                documents=rows,
            )

        return result

    def _merge(self, merges: Merges, batch: StepBatch) -> None:
        """Adapters into the base, after a look at the gradient of the first micro-batch where that is wanted."""
        if merges.needs_gradient:
            micro_batch = batch.micro_batches[0]
            self._draw_from(batch.step, 0)
            inputs = to_device(micro_batch, self.device, self.shape)
            baseline = self._baseline(batch) if batch.mismatched else None
            scoring = self._scoring(batch, micro_batch, baseline, 0)
            lesson = None if self.teach is None else self.teach(micro_batch, inputs)
            with merges.looking(batch.step):
                self._forward_backward(
                    inputs, self.loss_scale.value if self.loss_scale else 1.0, scoring, lesson, is_only=True
                )
            self.optimizer.zero_grad()
        merges.merge(batch.step)
        self.optimizer.reset()

    def _tally(self) -> Tally:
        if self.teach is not None:
            return Tally(PARTS, (True,) * len(PARTS))
        return Tally() if self.objective is None else Tally(*reported(self.objective))

    @property
    def checks_before_update(self) -> bool:
        """Whether the loss is looked at before the update: on a CPU it costs nothing, and fp16 needs it."""
        return self.device.type == "cpu" or self.loss_scale is not None

    def measured(self) -> torch.Tensor:
        """The trained weights' sample, of this rank."""
        assert self.sample is not None
        return self.sample.measure(self.device)

    def weights_now(self) -> Weights:
        """Figures of the weights as they are now; waits for them. A matter of all ranks."""
        self.optimizer.finish_update()
        return weights_of(*start_reading(self.ranks.sum(self.measured()))())

    def _start_reading_totals(
        self, tally: Tally, norm: torch.Tensor, measured: torch.Tensor | None = None
    ) -> Callable[[], tuple[BySource, BySource, float, list[float]]]:
        """Sums and what they are to be divided by, by data set, both of the whole step, the norm, and what was measured
        of the weights, once waited for."""
        width = len(tally.names)
        if self.ranks.count == 1:
            values = torch.cat([norm.view(1), *tally.sums.values()])
            read = start_reading(values if measured is None else torch.cat([values.double(), measured]))

            def alone() -> tuple[BySource, BySource, float, list[float]]:
                grad_norm, *figures = read()
                totals = {source: figures[n * width : (n + 1) * width] for n, source in enumerate(tally.sums)}
                return totals, tally.weights, grad_norm, figures[len(tally.sums) * width :]

            return alone
        here = torch.zeros(2, self.sources, width, dtype=torch.float64)
        for source, weights in tally.weights.items():
            here[1, source] = torch.tensor(weights, dtype=torch.float64)
        values = here.to(self.device, non_blocking=True)
        for source, total in tally.sums.items():
            values[0, source] = total
        if self.context_shard.copies > 1:
            values /= self.context_shard.copies
        flat = values.view(-1) if measured is None else torch.cat([values.view(-1), measured])
        read_all = start_reading(torch.cat([norm.double().view(1), self.ranks.sum(flat)]))

        def together() -> tuple[BySource, BySource, float, list[float]]:
            grad_norm, *figures = read_all()
            size = self.sources * width
            each = [figures[n * width : (n + 1) * width] for n in range(2 * self.sources)]
            weights = {
                source: weights_of_source
                for source, weights_of_source in enumerate(each[self.sources :])
                if any(weights_of_source)
            }
            return {source: each[source] for source in weights}, weights, grad_norm, figures[2 * size :]

        return together

    def _check(self, batch: StepBatch, totals: BySource, grad_norm: float, documents: list[str]) -> bool:
        """Whether fp16 gradients overflowed; NotFinite for everything else that is not finite."""
        if not all(math.isfinite(value) for total in totals.values() for value in total):
            raise NotFinite(self._blame(batch, totals, "loss", documents))
        overflowed = not math.isfinite(grad_norm)
        if self.loss_scale:
            self.loss_scale.update(overflowed)
        if overflowed and (self.loss_scale is None or self.loss_scale.value < 1):
            raise NotFinite(self._blame(batch, totals, "gradient", documents))
        return overflowed

    def _passes(
        self, batch: StepBatch, factor: float, should_stop: Callable[[], bool]
    ) -> Iterator[tuple[MicroBatch, torch.Tensor | Scoring | BatchLoss]]:
        """Forward and backward of every micro-batch of the step, with the weighted losses of its targets, or what its
        objective found. A pipeline does them all together, and the losses are known where its last stage is."""
        if isinstance(self.objective, Embed):
            yield batch.micro_batches[0], self._embedding_passes(self.objective, batch, factor, should_stop)
            return
        baseline = self._baseline(batch) if batch.mismatched else None
        if isinstance(self.model, Pipelined):
            if should_stop():
                raise Interrupted
            with record_function("data"):
                inputs = [to_device(micro_batch, self.device, self.shape) for micro_batch in batch.micro_batches]
            draw = partial(self._draw_from, batch.step)
            losses = self.model.run(inputs, self.spec, factor, self.z_loss, draw)
            yield from zip(batch.micro_batches, losses, strict=False)
            return
        for index, micro_batch in enumerate(batch.micro_batches):
            if should_stop():
                raise Interrupted
            if isinstance(self.model, Sharded):
                self.model.begin_micro_batch(is_last=index == len(batch.micro_batches) - 1)
            with record_function("data"):
                self._draw_from(batch.step, index)
                micro_batch = self.context_shard(micro_batch)
                inputs = to_device(micro_batch, self.device, self.shape)
            scoring = self._scoring(batch, micro_batch, baseline, index)
            lesson = None if self.teach is None else self.teach(micro_batch, inputs)
            if self.routing is not None:
                tokens = live_tokens(micro_batch)
                self.routing.begin(inputs, self.spec, tokens, tokens / batch.tokens)
            is_only = len(batch.micro_batches) == 1
            losses_n = self._forward_backward(inputs, factor, scoring, lesson, is_only=is_only)
            if scoring is not None and index == len(self._sampled) and batch.updates > 1:
                self._sampled.append(scoring.sampled)
            yield micro_batch, losses_n if scoring is None else scoring

    def _embedding_passes(
        self, objective: Embed, batch: StepBatch, factor: float, should_stop: Callable[[], bool]
    ) -> BatchLoss:
        """Loss and gradient of texts that are compared with all others of the step (`model.embedding`)."""
        count = len(batch.micro_batches)
        vectors = []
        for index in range(count):
            if should_stop():
                raise Interrupted
            with torch.set_grad_enabled(count == 1):
                vectors.append(self._embed(batch, index))
        facts = torch.cat([facts_of(micro_batch) for micro_batch in batch.micro_batches])
        with record_function("loss"):
            all_dh, mine = self.ranks.rows(torch.cat([vectors_dh.detach() for vectors_dh in vectors]))
            all_d4, _ = self.ranks.rows(facts.to(self.device))
            loss = batch_loss(
                objective,
                embedded(all_dh, all_d4),
                all_d4[:, 3],
                sources=self.sources,
                mine=mine,
                divisor=batch.divisors["examples"],
            )
        assert loss.gradients_dh is not None
        for index, gradients_dh in enumerate(loss.gradients_dh.split([vectors_dh.shape[0] for vectors_dh in vectors])):
            again_dh = vectors[0] if count == 1 else self._embed(batch, index)
            with record_function("backward"):
                ((again_dh * gradients_dh).sum() * factor).backward()
        return loss

    def _embed(self, batch: StepBatch, index: int) -> torch.Tensor:
        """The vectors of a micro-batch; with the same dropout each time."""
        micro_batch = batch.micro_batches[index]
        if isinstance(self.model, Sharded) and torch.is_grad_enabled():
            self.model.begin_micro_batch(is_last=index == len(batch.micro_batches) - 1)
        with record_function("data"):
            self._draw_from(batch.step, index)
            inputs = to_device(micro_batch, self.device, self.shape)
            lengths_d = moved(lengths_of(micro_batch), self.device)
        with record_function("forward"):
            return pooled(self.model, inputs, self.spec, lengths_d)

    def _scoring(
        self, batch: StepBatch, micro_batch: MicroBatch, baseline: torch.Tensor | None, index: int
    ) -> Scoring | None:
        if self.objective is None:
            return None
        return scoring_of(
            self.objective,
            micro_batch,
            self.device,
            sources=self.sources,
            divisors=batch.divisors,
            baseline=baseline,
            sampled=self._sampled[index] if index < len(self._sampled) else None,
        )

    @torch.no_grad()
    def _baseline(self, batch: StepBatch) -> torch.Tensor:
        """By how much the log-probability of answers to other prompts has grown since the reference, on average over
        the whole step, or 0 where it has not; before any gradient is taken. Without dropout, as the reference is."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.model.eval()
        for micro_batch in batch.mismatched:
            sums += risen(self.model, self.context_shard(micro_batch), self.spec, self.device, self.shape)
        self.model.train()
        total, count = self.ranks.sum(sums)
        return (total / count).clamp(min=0)

    def _forward_backward(
        self, inputs: Inputs, factor: float, weigh: Weigh | None = None, lesson: Lesson | None = None, *, is_only: bool
    ) -> torch.Tensor:
        """The weighted losses of the targets [N], or their parts [N, 2]."""
        if self.capture is not None and self.launched > EAGER_STEPS and self.capture.record(inputs):
            return self._replay(self.capture, inputs, factor, weigh, is_only=is_only)
        total, losses_n = token_losses(self.model, inputs, self.spec, z_loss=self.z_loss, weigh=weigh, lesson=lesson)
        if self.routing is not None:
            self.routing.end_forward(self.loss_scale.value if self.loss_scale else 1.0)
        with record_function("backward"):
            (total * factor).backward()
        return losses_n * (inputs.weights if lesson is None else inputs.weights[:, None])

    def _replay(
        self, capture: GraphCapture, inputs: Inputs, factor: float, weigh: Weigh | None, *, is_only: bool
    ) -> torch.Tensor:
        """The weighted losses of the targets [N], by captured passes."""
        with record_function("forward"):
            hidden_th = capture.forward(inputs)
        total, losses_n = losses_of_hidden(
            self.model, hidden_th, inputs, self.spec, self.z_loss, room=capture.room, weigh=weigh
        )
        with record_function("backward"):
            (total * factor).backward()
            assert hidden_th.grad is not None
            capture.backward(hidden_th.grad, is_only=is_only)
        return losses_n * inputs.weights

    def _add_by_source(self, micro_batch: MicroBatch, weighted_n: torch.Tensor, tally: Tally) -> None:
        """Sum losses and target weights by data set. Which token is whose is known on the host already."""
        is_target = micro_batch.weights > 0
        sources_n = micro_batch.sources.repeat_interleave(micro_batch.boundaries.diff().long())[is_target]
        weights_n = micro_batch.weights[is_target]
        present = micro_batch.sources.unique().tolist()
        for source in present:
            mine = sources_n == source
            if len(present) > 1:
                is_mine = moved(mine, self.device)
                part = (weighted_n * (is_mine if weighted_n.ndim == 1 else is_mine[:, None])).sum(0)
            else:
                part = weighted_n.sum(0)
            tally.add(source, part.view(-1), [weights_n[mine].sum().item()] * len(tally.names))

    def _clip(self, scale: float) -> torch.Tensor:
        """Unscale and clip the gradients; returns their norm before, without waiting for it."""
        if isinstance(self.model, Pipelined):
            self.model.finish_gradients(self.optimizer)
        if scale != 1.0:
            for weights in by_mesh(weight for weight in self.optimizer.parameters if weight.grad is not None):
                torch._foreach_div_([weight.grad for weight in weights if weight.grad is not None], scale)
        norm = full_tensor(self.optimizer.gradient_norm())
        if isinstance(self.model, Sharded):
            norm = self.model.agreed(norm)
        if isinstance(self.model, Pipelined):
            norm = self.model.norm_of_all(norm, self.optimizer)
        if self.max_grad_norm is not None:
            self.optimizer.clip(norm, self.max_grad_norm)
        return norm.float().to(self.device)

    def _draw_from(self, step: int, micro_batch: int, stage: int = 0) -> None:
        text = f"{self.seed}:{step}:{micro_batch}:{self.ranks.rank}" + (f":{stage}" if stage else "")
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _blame(self, batch: StepBatch, totals: BySource, what: str, documents: list[str]) -> str:
        """The step and the documents behind a value that is not finite: those whose loss is not, where that is known,
        or else those of the data sets whose loss is not."""
        bad = {source for source, total in totals.items() if not all(map(math.isfinite, total))} or set(totals)
        mine = [
            origin
            for micro_batch in batch.micro_batches
            for origin, source in zip(micro_batch.origins, micro_batch.sources.tolist(), strict=True)
            if source in bad
        ]
        origins_of_all = [origin for text in self.ranks.gather("\n".join(documents)) for origin in text.splitlines()]
        if not origins_of_all:
            origins_of_all = [origin for text in self.ranks.gather("\n".join(mine)) for origin in text.splitlines()]
        origins = list(dict.fromkeys(origins_of_all))  # several ranks may see the same data
        named = listed(origins, "; ", 5)
        return (
            f"The {what} of step {batch.step + 1} is not a finite number, so training stopped and nothing of this step "
            f"was kept; the data behind it: {named}. A lower learning_rate or precision: fp32 usually helps."
        )


def _over_sources(sums: BySource) -> list[float]:
    """Each sum over all data sets."""
    return [sum(of_sources) for of_sources in zip(*sums.values(), strict=True)]


def live_tokens(micro_batch: MicroBatch) -> int:
    """0 of one that a rank computes only because others wait for it."""
    is_idle = micro_batch.parts is not None and bool((micro_batch.parts < 0).all())
    return 0 if is_idle else micro_batch.tokens.shape[0]


def start_reading(values: torch.Tensor) -> Callable[[], list[float]]:
    """The numbers of `start_copy_to_host`."""
    read = start_copy_to_host(values)
    return lambda: read().tolist()


def start_copy_to_host(values: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start copying numbers to the host; what is returned waits for them, and for nothing queued later."""
    if values.device.type == "cpu":
        return lambda: values
    numbers = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def read() -> torch.Tensor:
        with record_function("wait"):
            arrived.synchronize()
        return numbers

    return read
