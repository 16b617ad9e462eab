"""The training loop: steps, evaluations, checkpoints, and stopping well.

It obeys the plan and decides nothing about how to train. What it adds is order: evaluate before saving, so that a
checkpoint knows its held-out loss; save before stopping; never save anything that is not finite. Where there are
several ranks, all run this loop; the first one writes, and what depends on clocks and signals they decide together.
"""

from __future__ import annotations

import itertools
import json
import math
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.profiler import record_function

from tunesmith import disk
from tunesmith.checkpoint.store import Checkpoint, CheckpointStore
from tunesmith.data.prompts import PromptBatch
from tunesmith.data.types import StepBatch
from tunesmith.errors import UserError, listed
from tunesmith.model.routers import routing_of
from tunesmith.optim.schedule import learning_rate
from tunesmith.parallel.compile import Compilation, news
from tunesmith.plan.defaults import EVALUATED_SHARE
from tunesmith.plan.model_states import BLOCKWISE
from tunesmith.train import events
from tunesmith.train.alerts import SHORT, Alerts
from tunesmith.train.documents import DocumentLog
from tunesmith.train.graph import EAGER_STEPS, GraphCapture
from tunesmith.train.hang import HangWatch
from tunesmith.train.job import Job, RollOut
from tunesmith.train.machine import Machine
from tunesmith.train.phases import OutOfMemory, PhaseMemory, is_out_of_memory
from tunesmith.train.saving import CheckpointWriting
from tunesmith.train.signals import stop_signals
from tunesmith.train.speed import Speed
from tunesmith.train.step import Interrupted, LossScale, NotFinite, StepResult, TrainStep
from tunesmith.train.vitals import Failing, Sample, Vitals

Observer = Callable[[events.Event], None]
Progress = Callable[[str, int, int | None], None]
"""Told what goes on within or between steps, how far it is, and out of how much (None: not known)."""
MICRO_BATCHES = "micro-batches"
"""What progress inside a step is called."""
Watch = Callable[[int], AbstractContextManager[object]]
"""Stands around each step (counted from 1), the wait for its data included; for profiles."""
SAVE_SECONDS = 600.0
"""Between checkpoints, when save_every leaves it open: a kill then costs ten minutes at most."""
RETRY_SECONDS = 30.0
"""Until the next try after a checkpoint could not be written."""
ROUTERS_EVERY, ROUTERS_MOST = 16, 32
"""What routers do is recorded in the first step and each so many steps, but about so often at most: of a large model
it is thousands of numbers."""
OTHER_HELD_OUT = (
    "The held-out data are not those that this run was evaluated on before: held-out losses from here cannot be "
    "compared with earlier ones, and the result will not say what the loss was before training."
)
WAITED_SECONDS = 2e-4
"""That asking for a result takes where the device is not done with it."""


@dataclass(frozen=True)
class Outcome:
    step: int
    total_steps: int
    is_finished: bool
    reason: str
    result: Path | None = None
    resumes_at: int = 0
    """The step from which an unfinished run continues."""


def train(
    job: Job,
    observe: Observer,
    *,
    started: float | None = None,
    watch: Watch | None = None,
    progress: Progress = lambda *_: None,
) -> Outcome:
    """Run the job to its end, or to a signal or time limit; in each case everything done is saved."""
    return _Loop(job, observe, time.monotonic() if started is None else started, watch, progress).run()


def step_of(job: Job, scale: LossScale | None) -> TrainStep:
    """The training step of a job."""
    if (routing := routing_of(job.model)) is not None:
        routing.every = max(ROUTERS_EVERY, -(-job.loader.total_steps // ROUTERS_MOST))
    return TrainStep(
        job.model,
        job.spec,
        job.optimizer,
        device=job.device,
        max_grad_norm=job.run.max_grad_norm,
        seed=job.run.seed,
        ranks=job.ranks,
        sources=len(job.titles),
        loss_scale=scale,
        shape=job.shape,
        z_loss=job.run.z_loss,
        context_shard=job.context_shard,
        objective=job.objective,
        capture=GraphCapture(job.model, job.spec, job.optimizer.parameters) if job.plan.cuda_graphs else None,
        schedule=job.schedule,
        teach=job.teach,
        merges=job.merges,
        routing=routing,
    )


def rate_of(job: Job, step: int) -> float:
    """The learning rate of a step, counted from 0."""
    warmth = 1.0 if job.merges is None else job.merges.warmth(step)
    return warmth * learning_rate(
        step,
        total=job.loader.total_steps,
        peak=job.plan.learning_rate,
        warmup=job.run.warmup,
        shape=job.run.schedule,
    )


def loss_scale_of(job: Job) -> LossScale | None:
    return LossScale() if job.plan.precision == "fp16" else None


@dataclass(frozen=True)
class _LaunchedStep:
    """A step that was launched and whose result nobody has asked for yet."""

    batch: StepBatch
    rate: float
    began: float
    result: Callable[[], StepResult]
    waited: float = 0.0
    """Seconds in which the device had nothing to do, for want of this step's data."""


class _Loop:
    def __init__(self, job: Job, observe: Observer, started: float, watch: Watch | None, progress: Progress):
        self.job = job
        self.observe = observe
        self.started = started
        self.scale = loss_scale_of(job)
        self.train_step = step_of(job, self.scale)
        trained = job.optimizer.weights.values()
        self.train_step.sample = Sample(trained if job.merges is None else job.merges.factors())
        self.vitals = Vitals(job.run, job.plan.learning_rate, resumes=False)
        self.alerts = Alerts(judges_loss=job.roll_out is None, clip=job.run.max_grad_norm)
        self.machine = Machine(job.ranks, job.device)
        self.documents = DocumentLog(job.folder, job.ranks.rank, job.sets)
        self.begun_at = 0
        """Steps that were done before this sitting."""
        self.phases = PhaseMemory(job.model, job.optimizer, last=EAGER_STEPS if job.plan.cuda_graphs else None)
        self.hang_watch = HangWatch(job.folder, job.ranks)
        self.watch = watch or (lambda _: nullcontext())
        self.progress = progress
        self.waits_for_each_step = self.train_step.checks_before_update or job.roll_out is not None
        """Whether each step is waited for before the next is launched."""
        self.total = job.loader.total_steps
        self.done = 0
        self.underway: _LaunchedStep | None = None
        self.last_end = 0.0
        self.saving: CheckpointWriting | None = None
        self.saved_at: int | None = None
        self.metric_at: tuple[int, float] | None = None
        self.first_loss: float | None = None
        self.speed = Speed()
        self.warm_up_steps = 1 if self.waits_for_each_step else EAGER_STEPS + 1
        """Of this sitting: memory is allocated and passes are captured in them, on a device that is launched ahead."""
        self.spent: dict[str, float] = {}
        self.before = {"step": 0.0, "evaluation": 0.0}
        """Seconds of the steps and evaluations of earlier sittings; the first rank knows them."""
        self.last_evaluation = 0.0
        """Seconds it took."""
        self.asked_to_stop: Callable[[], str | None] = lambda: None
        self.slowest_step = 0.0
        self.slowest_save = 1.0
        self.next_save_time = 0.0
        self.retry_time: float | None = None
        """When to try again, after a checkpoint could not be written."""

    def run(self) -> Outcome:
        self._restore()
        self.next_save_time = time.monotonic() + SAVE_SECONDS
        with stop_signals(lambda reason: self.observe(events.Stopping(reason))) as asked_to_stop:
            self.asked_to_stop = asked_to_stop
            try:
                reason = self._steps(asked_to_stop)
            except Exception as error:
                if isinstance(error, NotFinite):
                    self._alert([_not_finite(self.done, error)])
                if self.job.ranks.count == 1 or isinstance(error, NotFinite):  # else others may know nothing of it
                    self._finish_saving()
                if is_out_of_memory(error):
                    is_on_gpu = isinstance(error, torch.OutOfMemoryError)
                    peak = peak_memory(self.job.device)
                    raise OutOfMemory(self.done, self.phases.now(), peak, is_on_gpu=is_on_gpu) from error
                raise
            if reason is not None:
                with self._stage("Saving"):
                    kept = "everything is saved" if self._save() else self._rescue()
                self.observe(events.Stopped(self.done, f"{reason}; {kept}"))
                return Outcome(self.done, self.total, False, reason, resumes_at=self._resumes_at())
            return self._finish()

    def _restore(self) -> None:
        store, checkpoint = self._latest()
        if checkpoint is None:
            if self.job.ranks.is_first and (step := saved_before(self.job.folder)):
                self._warn(
                    f"This run starts again at step 0: it had been saved up to step {step}, and none of its "
                    f"checkpoints in {store.folder} is there and whole. Stop it now if they can be brought back."
                )
            return
        if checkpoint.step > self.total:
            raise UserError(
                f"The run in {self.job.folder} is at step {checkpoint.step} already, beyond the {self.total} steps of "
                "these settings; raise epochs or steps, or choose another output."
            )
        state = self.job.restore(store, checkpoint)
        if self.scale:
            self.scale.value, self.scale.clean_steps = state["loss_scale"], state["clean_steps"]
        self.done = checkpoint.step
        self.saved_at = checkpoint.step
        self.first_loss = state["first_loss"]
        has_other = bool(state.get("has_other_held_out"))
        if has_other:
            if self.job.ranks.is_first:
                self._warn(OTHER_HELD_OUT)
        elif checkpoint.metric is not None:
            self.metric_at = (checkpoint.step, checkpoint.metric)
        self.vitals.has_learned = True
        self.begun_at = checkpoint.step
        if self.job.ranks.is_first:
            history = events.read(self.job.folder)
            if (damage := events.damage(history)) is not None:
                self._warn(damage)
            records = [record for record in history if record.get("step", 0) <= checkpoint.step]
            known = events.comparable(records)
            self.alerts.recall(record for record in known if not has_other or record["event"] != "evaluation")
            for record in records:
                if record["event"] in self.before and record["step"] <= checkpoint.step:
                    self.before[record["event"]] += record["seconds"]
                    if record["event"] == "evaluation":
                        self.last_evaluation = record["seconds"]
        self.observe(events.Resumed(checkpoint.step, has_other))

    def _latest(self) -> tuple[CheckpointStore, Checkpoint | None]:
        """The newest whole checkpoint, as the first rank finds it."""
        ranks, store = self.job.ranks, self.job.resume_from
        checkpoint = store.latest() if ranks.is_first else None
        told = [checkpoint.step, checkpoint.path.name, checkpoint.lineage, checkpoint.metric] if checkpoint else None
        said = ranks.tell(json.dumps(told))
        if ranks.is_first or (values := json.loads(said)) is None:
            return store, checkpoint
        step, name, lineage, metric = values
        return CheckpointStore(store.folder, lineage), Checkpoint(step, store.folder / name, lineage, metric)

    def _steps(self, asked_to_stop: Callable[[], str | None]) -> str | None:
        """Train to the end; the reason when it stopped before that."""
        job = self.job
        job.model.train()
        if self.done == 0 and self.metric_at is None:
            with self._stage("Evaluating"):
                self._evaluate()
        reason = None
        launched = self.done
        batches = job.loader.iterate(launched)

        def is_stopping() -> bool:
            # Others would wait for the rest of this rank's step.
            return job.ranks.count == 1 and asked_to_stop() is not None

        while launched < self.total and not self._ends():
            with self.hang_watch():
                if self.saving is not None and not any(job.ranks.any([not self.saving.is_written])):
                    self._finish_saving()
                reason = self._agreed(asked_to_stop() or self._out_of_time())
            if reason is not None:
                break
            rate = rate_of(job, launched)
            with self.hang_watch(), self.watch(launched + 1):
                began = time.monotonic()
                with record_function("data"):
                    next_batch = next(batches)
                waited = time.monotonic() - began
                try:
                    batch = next_batch
                    if job.roll_out is not None:
                        batch = self._roll_out(job.roll_out, next_batch, is_stopping)
                    assert isinstance(batch, StepBatch)
                    result = self.train_step.launch(batch, rate, self._before_micro_batch(batch, is_stopping))
                except Interrupted:
                    reason = asked_to_stop()
                    break
                was_busy = self._finish_step()  # the step before, while the device is busy with this one
                self.underway = _LaunchedStep(batch, rate, began, result, 0.0 if was_busy else waited)
                launched = batch.step + 1
                evaluates = self._is_evaluation_due(launched)
                if self.waits_for_each_step or evaluates or self._is_save_due(launched):
                    self._finish_step()
            if evaluates:
                with self._stage("Evaluating"):
                    self._evaluate()
            if self.underway is None and self._is_save_due(launched):
                with self._stage("Saving"):
                    self._begin_saving(is_async=job.plan.async_checkpoint)
        self._finish_step()
        return reason

    def _ends(self) -> bool:
        """Whether the run has reached the end that its settings name (`stop_when`); said once."""
        reason = self.job.ends() if self.done and self.underway is None else None
        if reason is not None:
            ends = f"The run ends after step {self.done} of {self.total}, by stop_when: {reason}."
            self.observe(events.Noted(ends))
        return reason is not None

    def _before_micro_batch(self, batch: StepBatch, is_stopping: Callable[[], bool]) -> Callable[[], bool]:
        counted = itertools.count()

        def tell() -> bool:
            self.progress(MICRO_BATCHES, next(counted), len(batch.micro_batches))
            return is_stopping()

        return tell

    def _roll_out(
        self, roll_out: RollOut, batch: PromptBatch | StepBatch, is_stopping: Callable[[], bool]
    ) -> StepBatch:
        """The model's own answers to the prompts of a step."""

        def tell(done: int, total: int) -> None:
            self.progress("Answering", done, total)
            if is_stopping():
                raise Interrupted

        with record_function("rollout"):
            return roll_out(batch, tell)

    def _finish_step(self) -> bool:
        """Wait for the step that is under way, if one is, and say how it went; whether it had to be waited for."""
        if self.underway is None:
            return False
        step, self.underway = self.underway, None
        asked = time.monotonic()
        result = step.result()
        now = time.monotonic()
        seconds = now - max(step.began, self.last_end)
        self.last_end = now
        self.done = step.batch.step + 1
        self.warm_up_steps -= 1
        compiled = news()
        compiling = compiled.seconds if compiled else 0.0
        is_warm_up = self.warm_up_steps >= 0 or compiling > 0
        self.speed.add(step.batch.tokens, seconds, is_warm_up=is_warm_up, compiling=compiling)
        self.slowest_step = max(self.slowest_step, seconds)
        is_looked_at = self.done <= 3 or self.done % 16 == 0
        self._tell(
            events.Step(
                step=self.done,
                epoch=round(step.batch.epoch, 6),
                loss=result.loss,
                learning_rate=step.rate,
                grad_norm=result.grad_norm,
                tokens=step.batch.tokens,
                target_tokens=step.batch.target_weight,
                seconds=round(seconds, 4),
                memory=peak_memory(self.job.device),
                losses={self.job.titles[source]: loss for source, loss in result.losses.items()},
                skipped=result.is_skipped,
                figures=result.figures,
                figures_of={self.job.titles[source]: figures for source, figures in result.figures_of.items()},
                memory_by=self.phases.now() if is_looked_at else {},
                waited=round(step.waited, 4),
                is_warm_up=is_warm_up,
            )
        )
        if result.routers and self.train_step.routing is not None:
            self._tell(events.Routers.of(self.done, self.train_step.routing.layers, result.routers))
        if result.documents is not None:
            self.documents.write(self.done, result.documents)
        self._tell_of_compiling(compiled)
        if (reading := self.machine.after_step()) is not None:
            self._alert(self.alerts.see_machine(self.done, reading))
        with self._failing():
            if result.weights is not None:
                self._warn(self.vitals.see_weights(result.weights, self.done - 1))
            self._warn(self.vitals.see_rewards(self.done, result.figures))
            # Answers of one reward all teach nothing, and the next ones may.
            if not result.is_skipped and (result.grad_norm or self.job.roll_out is None):
                self._warn(self.vitals.see_step(self.done, result.loss, result.grad_norm, step.rate))
        return now - asked > WAITED_SECONDS

    def _check_weights(self) -> None:
        """Before they are kept."""
        with self._failing():
            self._warn(self.vitals.see_weights(self.train_step.weights_now(), self.done))
        has_turns = self.job.merges is not None or self.job.run.algorithm in BLOCKWISE  # not all move all the time
        if self.done >= self.begun_at + SHORT and not has_turns:
            self._alert(self.alerts.see_unmoved(self.done, *self._unmoved()))

    def _unmoved(self) -> tuple[list[str], int]:
        """Trained tensors of which no sampled value has changed in this sitting, and how many were looked at. A matter
        of all ranks. Embeddings are not among them: rows of tokens that the data do not have stay what they are."""
        assert self.train_step.sample is not None
        rows = {f"{name}.weight" for name, module in self.job.model.named_modules() if isinstance(module, nn.Embedding)}
        samples = zip(self.job.optimizer.weights, self.train_step.sample.moved(), strict=True)
        here = {name: is_moved for name, is_moved in samples if is_moved is not None and name not in rows}
        moved: dict[str, bool] = {}
        for said in self.job.ranks.gather(json.dumps(here)):
            for name, is_moved in json.loads(said).items():
                moved[name] = moved.get(name, False) or is_moved
        return [name for name, is_moved in moved.items() if not is_moved and "embed" not in name], len(moved)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except Failing as failure:
            step = self._resumes_at()
            goes_on = f" The checkpoint of step {step} is kept." if step else ""
            raise NotFinite(f"{failure}{goes_on}") from None

    def _tell(self, event: events.Step | events.Evaluation | events.Routers) -> None:
        self.observe(event)
        self._alert(self.alerts.see(event))

    def _alert(self, alerts: Sequence[events.Alert]) -> None:
        for alert in alerts:
            self.observe(alert)

    def _warn(self, message: str | None) -> None:
        if message is not None:
            self.observe(events.Warned(message))

    def _tell_of_compiling(self, compilation: Compilation | None) -> None:
        for note in compilation.notes if compilation else ():
            self.observe(events.Warned(note))
        if compilation and compilation.seconds:
            self.observe(events.Compiled(self.done, round(compilation.seconds, 2)))

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """Something that is no step: shown while it lasts, and its time counted."""
        self.progress(name, 0, None)
        began = time.monotonic()
        try:
            yield
        finally:
            self.spent[name.lower()] = self.spent.get(name.lower(), 0.0) + time.monotonic() - began

    def _spent(self, seconds: float) -> dict[str, float]:
        """All the time of this sitting, by what it was for."""
        training = self.speed.training_seconds
        parts = {"training": training, "compiling": max(0.0, self.speed.seconds - training), **self.spent}
        return {name: round(part, 3) for name, part in ({"starting": seconds - sum(parts.values())} | parts).items()}

    def _finish(self) -> Outcome:
        job = self.job
        with self._stage("Saving"):
            is_saved = self._save()
        with self._stage("Writing the result"):
            result, why = self._write_result()
        if result is None and is_saved:
            raise UserError(
                f"Training is done and saved, but the result could not be written to {job.folder}: {why}; make room "
                "there and run `tunesmith train` again."
            )
        if result is None:
            there = self._write_elsewhere()
            kept = f" The trained weights are in {there} instead: move them to a safe place first." if there else ""
            raise UserError(
                f"Training is done, but neither its last checkpoint nor its result could be written to {job.folder}: "
                f"{why}; make room there and run `tunesmith train` again: it continues {self._from_where()}.{kept}"
            )
        if not is_saved:
            warning = (
                f"The last checkpoint could not be written, but the result is whole, in {result}. Should this run be "
                f"trained on later, it continues {self._from_where()}."
            )
            self.observe(events.Warned(warning))
        last = self.metric_at[1] if self.metric_at and self.metric_at[0] == self.done else None
        seconds = time.monotonic() - self.started
        event = events.Finished(
            step=self.done,
            seconds=round(seconds, 3),
            tokens_per_second=round(self.speed.overall, 2),
            predicted_memory=job.plan.memory.allocated if job.device.type == "cuda" else job.plan.memory.total,
            measured_memory=peak_memory(job.device),
            predicted_tokens_per_second=round(job.plan.tokens_per_second, 2),
            memory=self.phases.by_category(job.plan),
            spent=self._spent(seconds),
        )
        self.observe(event)
        if job.ranks.is_first:
            losses = {"held_out_before": self.first_loss, "held_out_after": last}
            job.finish({"steps": self.done, "result": result.name, **losses})
        return Outcome(self.done, self.total, True, "finished", result)

    def _write_result(self, name: str | None = None) -> tuple[Path | None, str]:
        """Where the result is, or None and why the disk has refused it."""
        try:
            return self.job.write_result(name), ""
        except Exception as error:
            why = disk.reason(error)
            if why is None and not isinstance(error, OSError):
                raise
            return None, why or getattr(error, "strerror", None) or str(error)

    def _rescue(self) -> str:
        """Stopped, with no room for a checkpoint: keep at least the weights, which are smaller. Says what was kept."""
        result = None
        if self.done:
            result, _ = self._write_result(f"{'adapter' if self.job.run.gives_adapter else 'model'}-step-{self.done}")
        kept = f", but the weights are kept in {result}" if result else ""
        return f"the last steps could not be saved{kept}; `tunesmith train` again continues {self._from_where()}"

    def _write_elsewhere(self) -> Path | None:
        """The result on another disk than the run's, where ranks share one and it has room."""
        if self.job.ranks.environment.nodes > 1:
            return None
        kind = "adapter" if self.job.run.gives_adapter else "model"
        for place in (tempfile.gettempdir(), Path.home()):
            name = f"tunesmith-{self.job.folder.absolute().name}-{kind}-{secrets.token_hex(4)}"
            there, _ = self._write_result(self.job.ranks.tell(str(Path(place) / name)))
            if there is not None:
                return there
        return None

    def _resumes_at(self) -> int:
        return json.loads(self.job.ranks.tell(json.dumps(self.job.checkpoints.newest_step() or 0)))

    def _from_where(self) -> str:
        step = self._resumes_at()
        return f"from step {step}" if step else "at step 0, since no checkpoint was ever written"

    def _evaluate(self) -> None:
        if self.job.evaluate is None:
            return
        self.job.model.eval()
        evaluation, capture = None, self.train_step.capture

        def progress(documents: int, total: int | None) -> None:
            self.progress("Evaluating", documents, total)
            # Others would wait for the rest of this rank's part; and the last evaluation is part of the result.
            if self.job.ranks.count == 1 and self.done < self.total and self.asked_to_stop() is not None:
                raise Interrupted

        try:
            evaluation = self.job.evaluate(self.done, progress)
        except Interrupted:  # what is left of it, the run that goes on can do without
            self.job.model.train()
            return
        except torch.OutOfMemoryError:
            # Of what captured passes hold, an evaluation can use nothing.
            if capture is None or not capture.give_up():
                raise
        if evaluation is None:  # out there, what the first try held is free
            evaluation = self.job.evaluate(self.done, progress)
        self.job.model.train()
        self._tell_of_compiling(news())
        if not math.isfinite(evaluation.loss):
            bad = listed(title for title, loss in evaluation.losses.items() if not math.isfinite(loss))
            raise NotFinite(
                f"The held-out loss after step {self.done} is not a finite number, so training stopped and these "
                f"weights were not saved; the data behind it: {bad}. "
                + (
                    "A lower learning_rate or precision: fp32 usually helps."
                    if self.done
                    else "The model has not been trained yet: its weights are damaged or do not suit this precision."
                )
            )
        if self.done == 0:
            self.first_loss = evaluation.loss
        self.metric_at = (self.done, evaluation.loss)
        self.last_evaluation = evaluation.seconds
        self._tell(evaluation)

    def _is_evaluation_due(self, step: int) -> bool:
        every = self.job.run.eval_every or max(1, -(-self.total // 10))
        if step == self.total or step % every:
            return step == self.total
        return self.job.run.eval_every is not None or self._can_evaluate()

    def _can_evaluate(self) -> bool:
        """Whether one evaluation more, and the last, stay within their share of the training there was; else it is left
        out. By the first rank's clock."""
        if self.job.evaluate is None:
            return False
        spent = self.before["evaluation"] + self.spent.get("evaluating", 0.0) + 2 * self.last_evaluation
        allowed = EVALUATED_SHARE * (self.before["step"] + self.speed.training_seconds)
        return self.job.ranks.any([self.job.ranks.is_first and spent <= allowed])[0]

    def _is_save_due(self, step: int) -> bool:
        if step == self.total or (self.saving is not None and self.job.run.save_every is None):
            return False  # _finish saves; or one is on its way
        if self.retry_time is None and self.job.run.save_every is not None:
            return step % self.job.run.save_every == 0
        due = self.next_save_time if self.retry_time is None else self.retry_time
        (is_time,) = self.job.ranks.any([time.monotonic() >= due])
        return is_time or (self.retry_time is None and step in self.job.loader.epoch_ends)

    def _save(self) -> bool:
        """Now, and to the end; whether the state of this step is on the disk."""
        self._finish_saving()
        if self.saved_at != self.done:
            self._begin_saving(is_async=False)
        return self.saved_at == self.done

    def _begin_saving(self, *, is_async: bool) -> None:
        self._finish_saving()
        if self.saved_at == self.done:
            return
        self._check_weights()
        began = time.monotonic()
        metric = self.metric_at[1] if self.metric_at and self.metric_at[0] == self.done else None
        state = {
            "step": self.done,
            "first_loss": self.first_loss,
            "loss_scale": self.scale.value if self.scale else None,
            "clean_steps": self.scale.clean_steps if self.scale else None,
        }
        self.retry_time = None
        self.saving = CheckpointWriting(
            self.done, began, self.job.save(self.done, state, metric, is_async=is_async), is_async=is_async
        )
        if not is_async:
            self._finish_saving()

    def _finish_saving(self) -> None:
        """Wait for the checkpoint that is on its way, if one is, and say how it went."""
        if self.saving is None:
            return
        saving, self.saving = self.saving, None
        is_saved = saving.finish()
        self.slowest_save = max(self.slowest_save, saving.seconds)
        if not is_saved:
            self.retry_time = time.monotonic() + RETRY_SECONDS
            return
        self.saved_at = saving.step
        self.next_save_time = time.monotonic() + SAVE_SECONDS
        self.observe(events.Checkpointed(saving.step, round(saving.seconds, 3)))

    def _agreed(self, reason: str | None) -> str | None:
        """Why to stop, where any rank has a reason; the same on all."""
        if not any(self.job.ranks.any([reason is not None])):
            return None
        return next((said for said in self.job.ranks.gather(reason or "") if said), None)

    def _out_of_time(self) -> str | None:
        limit = self.job.run.max_minutes
        if limit is None:
            return None
        needed = 1.2 * self.slowest_step + 2 * self.slowest_save
        if time.monotonic() - self.started + needed < 60 * limit:
            return None
        return f"max_minutes {limit:g} is nearly used up"


def saved_before(folder: Path) -> int:
    """The last step that a run in this folder has saved, by its own records; 0 where it never has."""
    said = [record["step"] for record in events.read(folder) if record["event"] == events.Checkpointed.kind]
    names = [path.name.removeprefix("step-") for path in (folder / "checkpoints").glob("step-*")]
    return max([0, *said, *(int(name) for name in names if name.isdecimal())])


def _not_finite(step: int, error: NotFinite) -> events.Alert:
    """Of a step that could not be used; what the error says ends with what to do."""
    said = str(error)
    name = "divergence" if "exploded" in said else "dead gradients" if "exactly 0" in said else "not finite"
    advice = (
        "Look at the records that are named. Where they are sound, go on from the last checkpoint with a lower "
        "learning_rate, or with precision: fp32."
        if name == "not finite"
        else "Go on from the last checkpoint with a lower learning_rate, or look at the model's weights."
    )
    return events.Alert(step, name, said, advice, is_fatal=True)


def peak_memory(device: torch.device) -> int:
    """Peak bytes: allocated on a GPU, resident of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
