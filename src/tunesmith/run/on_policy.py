"""Steps of distillation on the student's own answers (GKD, arXiv 2306.13649): a share of the steps, evenly spread.

In such a step the last answer of each document is left out; the student answers in its place, by the weights and
modules that are being trained, and the teacher's probabilities are learned at the tokens that it gave. Which answers a
step has is a function of (weights, data, seed, step), so a run resumes as any other does. Each rank answers the prompts
that it has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import floor
from pathlib import Path

import numpy as np

from tunesmith.data.loader import PackedDocument, deal, idle, micro_batch_of
from tunesmith.data.mix import exact
from tunesmith.data.store import TokenStore
from tunesmith.data.types import MicroBatch, StepBatch
from tunesmith.errors import UserError
from tunesmith.infer.rollout import Wanted
from tunesmith.objectives.distill import Distill
from tunesmith.parallel.ranks import Ranks
from tunesmith.plan.plan import ForwardSpec, Plan
from tunesmith.run.rollout import SAMPLES, SHOWN_CHARACTERS, SHOWN_PROMPTS, Sampler, Samples


class OnPolicy:
    """A step of the data -> the same step, or one with the student's own answers."""

    def __init__(self, sampler: Sampler, objective: Distill, spec: ForwardSpec, plan: Plan, ranks: Ranks, folder: Path):
        self.sampler, self.objective, self.spec, self.plan, self.ranks = sampler, objective, spec, plan, ranks
        self.samples = Samples(folder / SAMPLES) if ranks.is_first else None

    def __call__(self, batch: StepBatch, should_stop: Callable[[int, int], None]) -> StepBatch:
        if not is_answered(batch.step, self.objective.distillation.on_policy):
            return batch
        every = [document for micro_batch in batch.micro_batches for document in documents_in(micro_batch)]
        documents = [document for document in every if document.part >= 0]
        starts = {place: answer_start(document.weights) for place, document in enumerate(documents)}
        asked = {place: start for place, start in starts.items() if start is not None}
        answers = self._answers(batch.step, documents, asked, should_stop)
        for place, (ids, _) in answers.items():
            prompt = documents[place].ids[: asked[place]]
            weights = np.repeat(np.array([0, 1], dtype=np.float32), [len(prompt), len(ids)])
            documents[place] = documents[place]._replace(ids=np.concatenate([prompt, ids]), weights=weights)
        micro_batches = self._dealt(documents)
        weight = sum(float(document.weights[1:].sum(dtype=np.float64)) for document in documents)
        tokens = sum(len(document.ids) for document in documents)
        answered = [sum(len(ids) for ids, _ in answers.values()), sum(not is_ended for _, is_ended in answers.values())]
        here = [len(micro_batches), weight, tokens, len(answers), *answered]
        counts = np.array([json.loads(text) for text in self.ranks.gather(json.dumps(here))], dtype=np.float64)
        # As many on all ranks, whose collectives must meet.
        missing = int(counts[:, 0].max()) - len(micro_batches)
        micro_batches += (micro_batch_of([idle(every[0])]),) * missing
        _, weight, tokens, count, answer_tokens, cut_off = counts.sum(0).tolist()
        figures = {"answer_tokens": answer_tokens / count, "truncated": cut_off / count} if count else {}
        return replace(
            batch,
            # What is kept of a document's losses is of the data's own answers.
            micro_batches=tuple(replace(micro_batch, is_sampled=True, records=None) for micro_batch in micro_batches),
            target_weight=weight,
            tokens=int(tokens),
            figures=figures,
        )

    def _answers(
        self,
        step: int,
        documents: Sequence[PackedDocument],
        asked: dict[int, int],
        should_stop: Callable[[int, int], None],
    ) -> dict[int, tuple[np.ndarray, bool]]:
        """The tokens of the student's answer, and whether it was ended, by the document's place."""
        answers: dict[int, tuple[np.ndarray, bool]] = {}
        settings = self.sampler.settings
        for limit, places in by_limit(asked, settings.max_answer_tokens, self.plan.sequence_length).items():
            prompts = [documents[place].ids[: asked[place]].tolist() for place in places]
            numbers = [(documents[place].source, documents[place].number) for place in places]
            wanted = [Wanted(at, f"{self.sampler.seed}:{step}:{a}:{b}") for at, (a, b) in enumerate(numbers)]
            tell = partial(_tell, should_stop, len(answers), len(asked))
            sampled = self.sampler.sampled(
                prompts, wanted, temperature=settings.temperature, max_tokens=limit, should_stop=tell
            )
            for place, answer in zip(places, sampled, strict=True):
                answers[place] = np.array(answer.ids, dtype=np.int32), answer.is_ended
        shown = [(documents[place], asked[place], *answers[place]) for place in asked]
        self._save_samples(step, shown[:SHOWN_PROMPTS])
        return answers

    def _dealt(self, documents: Sequence[PackedDocument]) -> tuple[MicroBatch, ...]:
        if not documents:
            return ()
        length = self.plan.sequence_length
        lengths = self.spec.lengths(length)
        return deal(documents, sequence_length=length, micro_batch=self.plan.micro_batch, lengths=lengths)

    def _save_samples(self, step: int, answers: Sequence[tuple[PackedDocument, int, np.ndarray, bool]]) -> None:
        if self.samples is None:
            return
        decode = self.sampler.encoder.tokenizer.decode
        lines = [
            {
                "step": step + 1,
                "origin": document.origin,
                "prompt": decode(document.ids[:start].tolist())[-SHOWN_CHARACTERS:],
                "answer": decode(ids.tolist(), skip_special_tokens=True)[:SHOWN_CHARACTERS],
                "tokens": len(ids),
                "ended": is_ended,
            }
            for document, start, ids, is_ended in answers
        ]
        self.samples.add(step + 1, lines)


def _tell(should_stop: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    should_stop(before + done, total)


def is_answered(step: int, share: float) -> bool:
    """Whether the student answers in a step: in so many of all, evenly spread."""
    return floor((step + 1) * exact(share)) > floor(step * exact(share))


def by_limit(asked: Mapping[int, int], most: int, sequence_length: int) -> dict[int, list[int]]:
    """Documents by the tokens that their answers may have, given where these begin: as many as the settings say, or as
    often half of that as fits behind the prompt. Those of a limit are decoded together, and none beyond its sequence:
    a model may have no positions there."""
    places: dict[int, list[int]] = {}
    for place, start in asked.items():
        limit = most
        while limit > sequence_length - start:
            limit //= 2
        places.setdefault(max(1, limit), []).append(place)
    return places


def answer_start(weights: np.ndarray) -> int | None:
    """Where the last answer of a document begins: after the last token that is no target but has one behind it. None
    where all of it is one answer, to nothing."""
    targets = np.flatnonzero(weights[1:] > 0) + 1
    if not len(targets):
        return None
    context = np.flatnonzero(weights[: targets[-1]] == 0)
    return int(context[-1]) + 1 if len(context) else None


def documents_in(batch: MicroBatch) -> list[PackedDocument]:
    """The documents of a micro-batch as they were packed. A first token, which nothing predicts, is a target where the
    whole document is."""
    documents = []
    bounds = batch.boundaries.tolist()
    for number, (start, end) in enumerate(pairwise(bounds)):
        predicted = batch.weights[start : end - 1].numpy()
        first = np.float32(len(predicted) > 0 and (predicted > 0).all())
        documents.append(
            PackedDocument(
                batch.tokens[start:end].numpy().astype(np.int32),
                np.concatenate([[first], predicted]).astype(np.float32),
                int(batch.sources[number]),
                batch.origins[number],
                int(batch.parts[number]),
                float(batch.values[number]),
                number=int(batch.numbers[number]),
            )
        )
    return documents


def check_prompts(run_share: float, stores: Sequence[TokenStore]) -> None:
    """UserError where the student has nothing to answer."""
    if run_share and not any(store.has_context for store in stores):
        raise UserError(
            "distillation.on_policy: the student answers prompts, and the data have none: every token of them is a "
            "target. Give conversations, or prompts with completions, or leave on_policy out."
        )
