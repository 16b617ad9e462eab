"""Tasks of `eval` while a run trains: asked of the model as it lies in memory, at each evaluation.

Choices are documents that go the way of held-out data, so every layout of the model that knows a document's loss can be
asked: each continuation stands after its question, packed with others. Answers are the likeliest ones, decoded from a
key-value cache as those of rollouts are. Nothing here draws a random number, so a run that is killed and goes on gives
the same bytes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from tunesmith.config.schema import Dataset, Rollout, Run
from tunesmith.data.chat import Encoder
from tunesmith.data.loader import PackedDocument, deal
from tunesmith.data.messages import asked_as_turns
from tunesmith.data.prepare import Prepared, answers_reason
from tunesmith.data.types import Message, MicroBatch
from tunesmith.errors import UserError
from tunesmith.evaluate import answers, choices
from tunesmith.evaluate.figures import figure, finite, measures_of
from tunesmith.evaluate.loss import by_document
from tunesmith.evaluate.tasks import Choices, Item, Question, Task, equal_choices, task_of
from tunesmith.infer.decoding import asked_of
from tunesmith.infer.rollout import Wanted
from tunesmith.model.forward import Entrance, to_device, token_losses
from tunesmith.parallel.context import context_shard_of
from tunesmith.parallel.pipeline import Pipelined
from tunesmith.parallel.ranks import Ranks
from tunesmith.parallel.shard import Sharded
from tunesmith.plan.defaults import EVALUATED_LEAST, EVALUATED_TOKENS, SAMPLED_TOKENS
from tunesmith.plan.plan import Plan
from tunesmith.rewards import Rewards
from tunesmith.run.rollout import Generator
from tunesmith.run.shape import micro_batch_shape
from tunesmith.run.stop import StopRule
from tunesmith.train.events import Evaluation
from tunesmith.train.samples import PROMPTS, SampleLog, answered

Evaluate = Callable[[int, Callable[[int, int], None]], Evaluation]
Results = dict[str, list[dict[str, Any]]]
"""Results by the titles of tasks, item by item."""
ANSWER_TOKENS = 256
"""An answer is cut off after so many; `tunesmith eval --tasks` gives more."""
DECODED = 8
"""A token that is decoded takes as long as so many that are read, roughly."""
ROWS = 16
"""Answers that are decoded at a time, beside a model in training and its optimizer."""


@dataclass
class TaskEvaluator:
    """Held-out losses, and then the scores of tasks; all ranks take part."""

    evaluate: Evaluate
    asking: Asking
    rule: StopRule | None = None
    """Told of its task, where it is by one that the run is judged."""
    note: str | None = None
    samples: SampleLog | None = None

    def __call__(self, step: int, progress: Callable[[int, int], None]) -> Evaluation:
        began = time.monotonic()
        evaluation = self.evaluate(step, progress)
        results = self.asking(progress)
        scores = {}
        for task in self.asking.tasks:
            if not measures_of(task):
                continue
            figures = [figure(measure, results[task.title]) for measure in measures_of(task)]
            scores[task.title] = {
                scored.measure.name: (scored.value, finite(scored.low), finite(scored.high))
                for scored in figures
                if scored
            }
            if self.rule is not None and self.rule.task == task.title:
                first = measures_of(task)[0].name
                self.rule.tell(step, -scores[task.title][first][0], _lacking(task, results[task.title]))
        if self.samples is not None:
            self.samples.write(step, answers=self._answers(results))
        return replace(evaluation, tasks=scores, seconds=round(time.monotonic() - began, 3))

    def _answers(self, results: Results) -> dict[str, list[dict[str, Any]]]:
        """What is kept of the answers to tasks that are answered in words."""
        asked = [task for task in self.asking.tasks if task.kind not in ("choices", "letters")]
        return {
            task.title: answered([item.question.turns[0] for item in task.items[:PROMPTS]], results[task.title])
            for task in asked
        }


def with_tasks(
    evaluate: Evaluate | None,
    run: Run,
    plan: Plan,
    data: Prepared,
    called: nn.Module,
    device: torch.device,
    ranks: Ranks,
    total_steps: int,
    rule: StopRule | None,
    samples: SampleLog | None = None,
) -> TaskEvaluator:
    """UserError where a task cannot be asked of this run, before its first step."""
    if evaluate is None:
        raise UserError(
            "eval names tasks alone, and no records are held out; set held_out, or add a data set of texts to eval."
        )
    tasks = read_tasks(run, plan)
    tasks, note = sampled(run, tasks, total_steps * plan.sequences_per_step * plan.sequence_length)
    reasons = answers_reason(data.encoder, data.train)
    asking = Asking(called, data.encoder, plan, device, ranks, tasks, reasons=reasons)
    return TaskEvaluator(
        evaluate, asking, rule, " ".join(filter(None, [note, asking.in_vain, *asking.doubts])) or None, samples
    )


def read_tasks(run: Run, plan: Plan) -> list[Task]:
    tasks = [_with_title(task_of(dataset), dataset) for dataset in run.eval_tasks]
    mesh = plan.mesh
    for task in tasks:
        if mesh.pipeline > 1 or mesh.context > 1:
            raise UserError(
                f"eval: {task.title}: with pipeline or context parallelism no rank knows the scores of a task; ask it "
                "afterwards with `tunesmith eval --tasks`."
            )
        is_spread = mesh.tensor > 1 or plan.sharding not in ("none", "ddp", "zero1", "zero2")
        if task.kind not in ("choices", "letters") and (is_spread or plan.offload_parameters):
            raise UserError(
                f"eval: {task.title}: answers are decoded on each rank, which needs all weights there: use ddp, zero1 "
                "or zero2, or ask it afterwards with `tunesmith eval --tasks`."
            )
        prompts = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "MULTITASK_PROMPT_TUNING", "CPT")
        if str(run.peft.get("peft_type", "")).upper() in prompts:
            raise UserError(f"eval: {task.title}: tasks are not asked of a model whose prompt is trained.")
    return tasks


def _with_title(task: Task, dataset: Dataset) -> Task:
    task = replace(task, title=dataset.title)
    return task if task.kind in ("choices", "letters") else task.with_settings(max_tokens=ANSWER_TOKENS)


def sampled(run: Run, tasks: Sequence[Task], trained: int) -> tuple[list[Task], str | None]:
    """The items that are asked while the run trains on so many tokens, always the same ones: all, or, as with held-out
    data, a sample that leaves evaluations their share of the time. Neither clocks nor the machine have a say."""
    costs = [[_cost(task, item) for item in task.items] for task in tasks]
    total = sum(map(sum, costs))
    if run.eval_every is not None or total <= EVALUATED_TOKENS * trained:
        return list(tasks), None
    share, chosen = SAMPLED_TOKENS * trained / total, []
    for task, each in zip(tasks, costs, strict=True):
        order = np.argsort(np.arange(len(each), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        within = int(np.searchsorted(np.cumsum(np.array(each)[order]), share * sum(each), side="right"))
        kept = sorted(order[: max(within, min(EVALUATED_LEAST, len(each)))].tolist())
        chosen.append(replace(task, items=tuple(task.items[place] for place in kept)))
    asked, there = (sum(len(task.items) for task in some) for some in (chosen, tasks))
    if asked == there:
        return chosen, None
    return chosen, (
        f"{asked:,} of the {there:,} items of tasks are asked at each evaluation, the same ones each time: all would "
        "take too long beside so short a training. Set eval_every to ask all; `tunesmith eval --tasks` always does."
    )


def _cost(task: Task, item: Item) -> int:
    """About how many tokens an item has to read, or as many as take so long to decode; by characters, since an estimate
    is enough."""
    if isinstance(item.content, Choices):
        return sum(len(item.content.context) + len(choice) for choice in item.content.continuations) // 4 + 1
    assert isinstance(item.content, Question)
    return len(item.content.turns[0]) // 4 + DECODED * int(task.settings["max_tokens"])


def _lacking(task: Task, results: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """What each item lacks, and its weight: the loss of the right choice, which moves with every item, or whether the
    answer is wrong."""
    is_choice = task.kind in ("choices", "letters")
    name = "choice_loss" if is_choice else measures_of(task)[0].of
    each = [float(result[name]) if is_choice else 1.0 - float(result[name]) for result in results]
    return {item.id: (value, 1.0) for item, value in zip(task.items, each, strict=True)}


class Asking:
    """Tasks, as they are asked of a model in training."""

    def __init__(
        self,
        called: nn.Module,
        encoder: Encoder,
        plan: Plan,
        device: torch.device,
        ranks: Ranks,
        tasks: Sequence[Task],
        *,
        reasons: bool = False,
    ):
        self.called, self.encoder, self.plan, self.device, self.ranks = called, encoder, plan, device, ranks
        self.tasks, self.reasons = tasks, reasons
        self._data_rank, self._data_ranks = plan.mesh.data_rank(ranks.rank), plan.mesh.data_ranks
        self.doubts = [said for task in tasks if (said := equal_choices(task))]
        """What to say of each task's questions: that some are too long, or have equal choices."""
        self._documents = {task.title: self._packed(task) for task in tasks if task.kind in ("choices", "letters")}
        self._prompts = {task.title: self._asked(task) for task in tasks if task.title not in self._documents}
        # To tokens that tensor ranks share evenly.
        self._fill = context_shard_of(plan, ranks.rank, micro_batch_shape(plan))
        self._generator: Generator | None = None

    @property
    def in_vain(self) -> str | None:
        """What to say of the model's generation config, where a task is answered in words."""
        model = self.called.model if isinstance(self.called, Entrance) else self.called
        return asked_of(model).sentence if self._prompts else None

    def __call__(self, progress: Callable[[int, int], None]) -> Results:
        assert not self.called.training
        total = sum(len(task.items) for task in self.tasks)
        done, results = 0, {}
        for task in self.tasks:
            count = len(task.items)

            def tell(share: float, done: int = done, count: int = count) -> None:
                progress(done + int(share * count), total)

            ask = self._chosen if task.title in self._documents else self._answered
            results[task.title] = ask(task, tell)
            done += count
            progress(done, total)
        inner = self.called.model if isinstance(self.called, Pipelined) else self.called
        if isinstance(inner, Sharded):
            inner.free_full_weights()
        return results

    # Choices

    def _packed(self, task: Task) -> list[PackedDocument]:
        """A document for each choice, in the order of the items."""
        documents: list[PackedDocument] = []
        cut: dict[str, Item] = {}
        most = self.plan.sequence_length
        for item, tree in zip(task.items, choices.trees_of(self.encoder.tokenizer, task.items), strict=True):
            for choice in tree.continuations:
                if len(tree.context) + len(choice) > most:
                    cut[item.id] = item
                ids = [*tree.context, *choice][-most:]  # a question that is too long loses its beginning, as in lm-eval
                if len(choice) >= len(ids):
                    raise UserError(
                        f"{item.origin}: one of its choices has {len(choice):,} tokens, and sequence_length is "
                        f"{most:,}; raise that, or leave the task {task.title} out of eval."
                    )
                weights = np.zeros(len(ids), dtype=np.float32)
                weights[-len(choice) :] = 1
                ids = np.array(ids, dtype=np.int32)
                documents.append(PackedDocument(ids, weights, 0, origin=str(item.origin), number=len(documents)))
        self._say_cut(task, list(cut.values()), f"the {most:,} tokens of sequence_length")
        return documents

    def _say_cut(self, task: Task, cut: Sequence[Item], room: str) -> None:
        if cut:
            self.doubts.append(
                f"{task.title}: {len(cut):,} of {len(task.items):,} questions are longer than {room} and lose their "
                f"beginning; the first is {cut[0].origin}."
            )

    @torch.no_grad()
    def _chosen(self, task: Task, tell: Callable[[float], None]) -> list[dict[str, Any]]:
        documents = self._documents[task.title]
        assert self.plan.forward is not None
        batches = deal(
            documents,
            sequence_length=self.plan.sequence_length,
            micro_batch=self.plan.micro_batch,
            lengths=self.plan.forward.lengths(self.plan.sequence_length),
            rank=self._data_rank,
            ranks=self._data_ranks,
        )
        here: dict[int, float] = {}
        for number, batch in enumerate(batches):
            tell(number / len(batches))
            here |= self._losses(batch)
        losses: dict[int, float] = {}
        for said in self.ranks.gather(json.dumps(here)):
            losses |= {int(number): loss for number, loss in json.loads(said).items()}
        rest: Iterator[int] = iter(range(len(documents)))
        results = []
        for item in task.items:
            assert isinstance(item.content, Choices)
            likelihoods = [-losses[next(rest)] for _ in item.content.continuations]
            results.append(choices.score(item.content, likelihoods))
        return results

    def _losses(self, batch: MicroBatch) -> dict[int, float]:
        batch = self._fill(batch)
        inputs = to_device(batch, self.device, micro_batch_shape(self.plan))
        assert self.plan.forward is not None
        losses_n = token_losses(self.called, inputs, self.plan.forward)[1]
        documents = by_document(0, batch, inputs, losses_n)
        return {int(key.partition(":")[2]): loss for key, (loss, _) in documents.items()}

    # Answers

    def _answered(self, task: Task, tell: Callable[[float], None]) -> list[dict[str, Any]]:
        self._generator = self._generator or Generator(self.called, self.encoder, Rollout(), Rewards([]), 0)
        mine = list(range(len(task.items)))[self._data_rank :: self._data_ranks]
        mine = mine or [0]  # a rank that has none is needed all the same where weights are put together
        prompts = [self._prompts[task.title][place] for place in mine]
        sampled = self._generator.sampled(
            prompts,
            [Wanted(number, "") for number in range(len(mine))],
            temperature=0.0,
            max_tokens=self._most(task),
            rows=ROWS,
            should_stop=lambda done: tell(done / len(mine)),
            decoding=asked_of(self._generator.model).decoding.without_sampling(),
        )
        here = {place: self._text(self._generator.text_of(answer)) for place, answer in zip(mine, sampled, strict=True)}
        every: dict[int, str] = {}
        for text in self.ranks.gather(json.dumps(here)):
            every = {int(place): answer for place, answer in json.loads(text).items()} | every
        return [answers.score(task, item.question, every[place]) for place, item in enumerate(task.items)]

    def _text(self, answer: str) -> str:
        """Without a chat template a model goes on with a question of its own."""
        if self.encoder.has_template:
            return answer
        ends = [place for stop in answers.STOPS if (place := answer.find(stop)) >= 0]
        return answer[: min(ends)].strip() if ends else answer

    def _asked(self, task: Task) -> list[list[int]]:
        """The prompt of each item; one that leaves no room for an answer loses its beginning."""
        room = self._room - self._most(task)
        prompts = [self._prompt(task, item) for item in task.items]
        cut = [item for item, ids in zip(task.items, prompts, strict=True) if len(ids) > room]
        self._say_cut(task, cut, f"the {room:,} tokens that are left beside an answer")
        return [ids[-room:] for ids in prompts]

    def _prompt(self, task: Task, item: Item) -> list[int]:
        turn = item.question.turns[0]
        if self.encoder.has_template:
            return list(self.encoder.prompt(asked_as_turns([Message("user", turn)]), reasons=self.reasons))
        return list(self.encoder.text_prompt(answers.plain_prompt(task, turn)))

    def _most(self, task: Task) -> int:
        """Tokens of an answer; of a model with few positions no more than half of them."""
        return min(int(task.settings["max_tokens"]), self._room // 2)

    @property
    def _room(self) -> int:
        config: Any = getattr(self.called, "model", self.called).config
        most = getattr(config.get_text_config(), "max_position_embeddings", None)
        return most if isinstance(most, int) and most > 0 else 1 << 15
