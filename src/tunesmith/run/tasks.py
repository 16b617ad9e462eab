"""Tasks asked of a run, its base or a model by itself: what is not known yet is computed, and kept item by item."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tunesmith.data.messages import asked_as_turns
from tunesmith.data.types import Message
from tunesmith.errors import UserError
from tunesmith.evaluate import answers, choices, harness, texts
from tunesmith.evaluate.results import Results
from tunesmith.evaluate.score import Scorer
from tunesmith.evaluate.tasks import Item, Task, equal_choices
from tunesmith.infer.decoding import asked_of
from tunesmith.model.forward import own_attention
from tunesmith.model.structure import set_attention
from tunesmith.parallel.ranks import Ranks
from tunesmith.run.choose import Progress
from tunesmith.run.open import Opened
from tunesmith.run.targets import Target

Generate = Callable[..., Iterator[tuple[int, str]]]
"""`serve.batch.generate`: the place of each prompt and its answer."""


def evaluate(
    target: Target,
    tasks: Sequence[Task],
    *,
    generate: Generate,
    folder: Path | None = None,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
    warn: Callable[[str], None] | None = None,
) -> dict[str, Results]:
    """The results of all items, by the tasks' titles. The model is loaded only where something is missing; several
    ranks share the items, each with the whole model."""
    ranks = ranks or Ranks()
    results_of_tasks = {
        task.title: Results(folder or target.folder, task.title, model=target.key, task=task.key, rank=ranks.rank)
        for task in tasks
    }
    session: Session | None = None
    ranks.wait()  # all have read what is there before the first one writes
    for task in tasks:
        results = results_of_tasks[task.title]
        missing = _missing(task, results)[ranks.rank :: ranks.count]
        if not missing and (task.kind != "lm-eval" or results.known):
            continue
        if task.kind == "lm-eval" and not ranks.is_first:
            continue
        session = session or Session(target, generate, warn)
        for number, (item, result) in enumerate(session.scores(task, missing), start=1):
            results.add(item, result)
            if progress:
                progress(f"{target.name}: {task.title}", number, len(missing) or None)
        results.close()
    if session is not None:
        del session
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    ranks.wait()
    for results in results_of_tasks.values():
        results.read()
    if warn is not None and ranks.is_first:
        for task in tasks:
            for sentence in filter(None, (cut_of(task, results_of_tasks[task.title]), equal_choices(task))):
                warn(f"{target.name}: {sentence}")
    return results_of_tasks


def cut_of(task: Task, results: Results) -> str | None:
    """What to say of questions that were too long: kept with the results, it is said whenever they are shown."""
    cut = [item for item in task.items if "cut" in results.known.get(item.id, {})]
    if not cut:
        return None
    room = results.known[cut[0].id]["cut"]
    seen = "the model sees" if task.kind in ("choices", "letters") else "are left beside an answer"
    return (
        f"{task.title}: {len(cut):,} of {len(task.items):,} questions are longer than the {room:,} tokens that {seen} "
        f"and lose their beginning; the first is {cut[0].origin}."
    )


def results_of(task: Task, results: Results) -> list[dict[str, Any]]:
    """The results in the order of the task's items; of lm-eval's tasks in that of their documents."""
    if task.kind == "lm-eval":
        return [results.known[item] for item in sorted(results.known)]
    return [results.known[item.id] for item in task.items]


def _missing(task: Task, results: Results) -> list[Item]:
    return [item for item in task.items if item.id not in results.known]


class Session:
    """A model that is loaded, and how each kind of task is asked of it."""

    def __init__(self, target: Target, generate: Generate, warn: Callable[[str], None] | None):
        self.opened: Opened = target.open()
        self._generate, self._known = generate, target.known
        self._name, self._warn = target.name, warn or (lambda _: None)
        self._own_attention = own_attention(self.opened.model)
        self._asks_in_vain = asked_of(self.opened.model).sentence
        self._scorer: Scorer | None = None

    def scores(self, task: Task, items: Sequence[Item]) -> Iterator[tuple[str, dict[str, Any]]]:
        encoder = self.opened.encoder
        if task.kind == "lm-eval":
            set_attention(self.opened.model, self._own_attention)
            yield from harness.scores(self.opened.model, encoder.tokenizer, task)
            return
        if task.kind == "loss":
            assert task.dataset is not None
            scored = texts.scores(self.scorer, encoder, items, task.dataset)
        elif task.kind in ("choices", "letters"):
            scored = choices.scores(self.scorer, encoder.tokenizer, items)
        else:
            scored = self._answers(task, items)
        for item, result in scored:
            yield item.id, result

    @property
    def scorer(self) -> Scorer:
        if self._scorer is None:
            self._scorer = Scorer(self.opened.model, known=self._known)
            if not self._scorer.shares_contexts:
                self._warn(f"{self._name}: each choice is computed with its question, since this model's attention "
                           "cannot share it.")  # fmt: skip
        return self._scorer

    def _answers(self, task: Task, items: Sequence[Item]) -> Iterator[tuple[Item, dict[str, Any]]]:
        if self.opened.tuned is not None and self.opened.tuned.is_prompt:
            raise UserError(f"{self._name} trained a prompt, not weights; it cannot be asked for answers here.")
        if self._asks_in_vain is not None:
            self._warn(f"{self._name}: {self._asks_in_vain}")
            self._asks_in_vain = None
        set_attention(self.opened.model, self._own_attention)
        said: dict[str, list[str]] = {item.id: [] for item in items}
        cut: dict[str, dict[str, Any]] = {}
        asking = list(items)
        while asking:  # turn by turn; conversations end when their turns do
            going_on = []
            prompts = [self._prompt(task, item, said[item.id]) for item in asking]
            for place, answer in self._generated(task, prompts, asking, cut):
                item = asking[place]
                question = item.question
                said[item.id].append(answer)
                if len(said[item.id]) < len(question.turns):
                    going_on.append(item)
                elif task.kind == "judge":
                    yield item, {"answers": said[item.id], **cut.get(item.id, {})}
                else:
                    yield item, answers.score(task, question, answer) | cut.get(item.id, {})
            asking = going_on

    def _generated(
        self, task: Task, prompts: Sequence[list[int]], items: Sequence[Item], cut: dict[str, dict[str, Any]]
    ) -> Iterator[tuple[int, str]]:
        def tell(places: Sequence[int], room: int) -> None:
            cut.update({items[place].id: {"cut": room} for place in places})

        encoder = self.opened.encoder
        stops = () if encoder.has_template else answers.STOPS
        ask = partial(self._generate, self.opened.model, encoder, prompts)
        return ask(max_tokens=task.settings["max_tokens"], stops=stops, cut=tell)

    def _prompt(self, task: Task, item: Item, said: Sequence[str]) -> list[int]:
        encoder, turns = self.opened.encoder, item.question.turns
        if not encoder.has_template:
            earlier = "".join(f"{turn}\n{answer}\n" for turn, answer in zip(turns, said, strict=False))
            return encoder.text_prompt(earlier + answers.plain_prompt(task, turns[len(said)]))
        messages = []
        for turn, answer in zip(turns, said, strict=False):
            messages += [Message("user", turn), Message("assistant", answer)]
        messages = asked_as_turns([*messages, Message("user", turns[len(said)])])
        return encoder.prompt(messages, reasons=self.opened.reasons)
