"""The teacher of `objective: distill`: asked in each step, or once, before training.

In each step it sees the same packed documents as the student, through the same code, frozen and whole on every rank.
With `distillation.top_k` it is asked before the student is loaded: the log-probabilities of its likeliest tokens at
each target, and that of all others together, are kept in the cache in blocks of documents, under a key of everything
they depend on. A run that was stopped goes on with the blocks that are missing, and one with another student, loss or
weight reads them; ranks share the asking, and any number of them finds the same blocks.

Legend: N target tokens, K likeliest tokens, C rows of a chunk.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tunesmith.cache import cache_folder
from tunesmith.checkpoint.files import write_atomic
from tunesmith.config.schema import Run
from tunesmith.data.loader import documents_of, micro_batch_of
from tunesmith.data.pack import pack
from tunesmith.data.store import TokenStore
from tunesmith.data.types import MicroBatch
from tunesmith.disk import gib
from tunesmith.errors import UserError
from tunesmith.kernels.linear_cross_entropy import chunk_rows
from tunesmith.kernels.linear_distillation import Lesson, Taught, rest_of
from tunesmith.model import load
from tunesmith.model.forward import Inputs, hidden_states, logits_of, moved, part_of, to_device
from tunesmith.model.forward_spec import confirm_forward_spec
from tunesmith.model.probe import probe
from tunesmith.parallel.prepare import load_model
from tunesmith.parallel.ranks import Ranks
from tunesmith.plan.models import as_teacher, read_facts
from tunesmith.plan.plan import ForwardSpec, Plan
from tunesmith.run.reference import Progress
from tunesmith.train.step import Teach

VERSION = 1
"""Of how answers are made and kept."""
BLOCK = 1 << 22
"""Probabilities of a block: 32 MiB."""
SAMPLE = "Ägypten's 3 cats,\n\tsaid 你好 — “no”  \U0001f600 x = f(12.5)\n"
"""Two tokenizers with the same vocabulary may still cut texts differently."""


def check_teacher(run: Run) -> None:
    """UserError where the run's teacher cannot be compared with its student token by token."""
    if run.objective != "distill":
        return
    teacher = load.teacher_run(run)
    with as_teacher(teacher.model):
        tokenizers = load.load_tokenizer(run), load.load_tokenizer(teacher)
        configs = load.load_config(run), load.load_config(teacher)
    _check_vocabulary(run, tokenizers, [load.vocabulary_size(config) for config in configs])
    longest, own = (load.max_positions(config) for config in reversed(configs))
    length = min(run.sequence_length, own or run.sequence_length)
    if longest is not None and longest < length:
        raise UserError(
            f"distillation.teacher: {teacher.model} takes {longest:,} tokens at most; set sequence_length to that."
        )


def check_planned_teacher(run: Run) -> None:
    """UserError where the teacher has another vocabulary, before anything is converted or trained, as far as both
    tokenizers are at hand: a plan may be made for models of which no more than the name is there."""
    both = run, load.teacher_run(run)
    try:
        tokenizers = [load.tokenizer_at_hand(model_run) for model_run in both]
    except UserError:  # it is said when the run is begun
        return
    vocabularies = [
        read_facts(model_run.model, trust_remote_code=model_run.trust_remote_code).vocabulary for model_run in both
    ]
    _check_vocabulary(run, tokenizers, vocabularies)


def _check_vocabulary(run: Run, tokenizers: Sequence[Any], sizes: Sequence[int]) -> None:
    """`tokenizers`: the tokenizers of student and teacher; `sizes`: rows of their heads."""
    vocabularies = [tokenizer.get_vocab() for tokenizer in tokenizers]
    cuts = [tokenizer(SAMPLE, add_special_tokens=False)["input_ids"] for tokenizer in tokenizers]
    if vocabularies[0] != vocabularies[1] or cuts[0] != cuts[1] or max(vocabularies[0].values()) >= min(sizes):
        raise UserError(
            f"distillation.teacher: {run.distillation.teacher} has another vocabulary than {run.model}, and the two "
            "are compared token by token; choose a teacher with the same tokenizer."
        )


def teach_of(
    run: Run,
    plan: Plan,
    stores: Sequence[TokenStore],
    seen: Callable[[], Sequence[np.ndarray]],
    device: torch.device,
    ranks: Ranks,
    progress: Progress | None = None,
) -> Teach | None:
    """What gives each micro-batch its lesson; None where there is no teacher. With `top_k` it is asked here, about the
    examples that will be `seen`."""
    if run.objective != "distill":
        return None
    settings = run.distillation
    teacher = load.teacher_run(run)
    vocabulary = min(load.vocabulary_size(load.load_config(model_run)) for model_run in (run, teacher))
    form = (settings.loss, settings.temperature, settings.weight, vocabulary)
    # The student's own tokens are nothing to learn: at these the divergence is all there is.
    own = (*form[:2], 1.0, vocabulary)
    open_teacher = partial(Teacher.open, teacher, plan, device, settings.temperature, vocabulary)
    if settings.top_k is None:
        asked = open_teacher()
        return lambda batch, inputs: Lesson(asked.taught(batch, inputs), *(own if batch.is_sampled else form))
    kept = [Answers(store, teacher, plan, settings.temperature, settings.top_k, vocabulary) for store in stores]
    _ask(kept, seen(), open_teacher, ranks, progress)
    return lambda batch, _: Lesson(_read_for(batch, kept, device), *form)


@dataclass(frozen=True)
class Teacher:
    """A model to learn from, as it is called."""

    model: nn.Module
    spec: ForwardSpec
    is_packed: bool
    """Documents of any length may be in one call; else they are called one by one."""
    temperature: float
    vocabulary: int
    device: torch.device

    @classmethod
    def open(cls, run: Run, plan: Plan, device: torch.device, temperature: float, vocabulary: int) -> Teacher:
        known = probe(run, device=device).spec
        model = load_model(run, dtype=plan.precision, device=str(device), storage=plan.teacher_storage)
        model.requires_grad_(False)
        model.config.use_cache = False
        spec, _ = confirm_forward_spec(model, vocabulary=vocabulary, longest=plan.sequence_length, known=known)
        is_packed = spec.lengths(plan.sequence_length) is None
        return cls(model.eval(), spec, is_packed, temperature, vocabulary, device)

    @torch.no_grad()
    def taught(self, batch: MicroBatch, inputs: Inputs) -> Callable[[int, int], Taught]:
        """The forward pass up to the head; its logits are made a chunk at a time."""
        hidden_nh = self._hidden(batch, inputs)
        return lambda start, stop: Taught(self._logits(hidden_nh[start:stop]), heat=self.temperature)

    @torch.no_grad()
    def likeliest(self, batch: MicroBatch, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids of the likeliest tokens at each target [N, K], and their log-probabilities with that of all others
        together [N, K+1]; without the last where there are no others."""
        hidden_nh = self._hidden(batch, to_device(batch, self.device))
        chunk = chunk_rows(self.device, self.vocabulary, is_shared=True)
        ids, logps = [], []
        for start in range(0, hidden_nh.shape[0], chunk):
            logps_cv = Taught(self._logits(hidden_nh[start : start + chunk]), heat=self.temperature).normalised
            top_ck, ids_ck = logps_cv.topk(count, -1)
            rest = [rest_of(logps_cv, ids_ck)] if count < self.vocabulary else []
            logps.append(torch.cat([top_ck, *rest], 1).cpu().numpy())
            ids.append(ids_ck.int().cpu().numpy())
        return np.concatenate(ids), np.concatenate(logps)

    @torch.no_grad()
    def _logits(self, rows_ch: torch.Tensor) -> torch.Tensor:
        return logits_of(self.model, rows_ch, self.spec)[:, : self.vocabulary]

    def _hidden(self, batch: MicroBatch, inputs: Inputs) -> torch.Tensor:
        """What the teacher's head sees at the targets, [N, H]."""
        if self.is_packed:
            return hidden_states(self.model, inputs, self.spec).index_select(0, inputs.rows)
        bounds = batch.boundaries.tolist()
        alone = [hidden_states(self.model, part_of(inputs, *ends), self.spec) for ends in pairwise(bounds)]
        rows = torch.nonzero(batch.weights).squeeze(1)
        return torch.cat(alone).index_select(0, moved(rows, self.device))


class Answers:
    """What a teacher says of the documents of one data set, in the cache: a file a block of documents."""

    def __init__(self, store: TokenStore, teacher: Run, plan: Plan, temperature: float, most: int, vocabulary: int):
        count = min(most, vocabulary)
        self.store, self.plan, self.count = store, plan, count
        self.width = count + (count < vocabulary)
        """Log-probabilities of a target: those of the likeliest tokens, and of all others together."""
        how = [plan.precision, plan.teacher_storage, plan.attention, plan.sequence_length, plan.micro_batch]
        parts = [VERSION, load.model_fingerprint(teacher), store.fingerprint, len(store), count, temperature, *how]
        key = hashlib.sha256(json.dumps([*parts, plan.device, vocabulary]).encode()).hexdigest()
        self.folder = cache_folder() / "distillation" / key
        assert store.document_count == len(store)
        rows = np.concatenate([[0], np.cumsum(store.target_counts)])
        blocks = rows[:-1] * count // BLOCK
        firsts = np.flatnonzero(np.diff(blocks, prepend=-1))
        self.bounds = np.concatenate([firsts, [len(store)]])
        """The first document of each block."""
        self.rows = rows
        """The first target of each document, among all."""
        self._maps: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def path(self, block: int) -> Path:
        return self.folder / f"{self.bounds[block]}-{self.bounds[block + 1]}"

    def block_of(self, document: int) -> int:
        return int(np.searchsorted(self.bounds, document, side="right")) - 1

    def is_whole(self, block: int) -> bool:
        """Whether the block is there, and what was written."""
        try:
            with self.path(block).open("rb") as file:
                digest = file.read(32)
                return hashlib.file_digest(file, "sha256").digest() == digest
        except OSError:
            return False

    def bytes_of(self, block: int) -> int:
        first, last = self.bounds[block : block + 2]
        return int(self.rows[last] - self.rows[first]) * 4 * (self.count + self.width)

    def ask(self, teacher: Teacher, block: int) -> None:
        """Ask the teacher about the documents of a block, and write its answers down."""
        first, last = self.bounds[block : block + 2].tolist()
        start, stop = self.rows[first], self.rows[last]
        ids = np.empty((stop - start, self.count), dtype=np.int32)
        logps = np.empty((stop - start, self.width), dtype=np.float32)
        sequences = pack(self.store.lengths[first:last], self.plan.sequence_length)
        step = self.plan.micro_batch
        for at in range(0, len(sequences), step):
            numbers = first + np.concatenate(sequences[at : at + step])
            batch = micro_batch_of([document for i in numbers.tolist() for document in documents_of(self.store, i, 0)])
            places = np.concatenate([np.arange(self.rows[i], self.rows[i + 1]) for i in numbers]) - start
            ids[places], logps[places] = teacher.likeliest(batch, self.count)
        data = ids.tobytes() + logps.tobytes()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path(block), hashlib.sha256(data).digest() + data)
        except OSError as error:
            raise UserError(
                f"distillation.top_k: the teacher's answers cannot be kept in {self.folder.parent} ({error}); set "
                "TUNESMITH_CACHE to a folder that can be written, or leave top_k out."
            ) from error

    def of(self, document: int) -> tuple[np.ndarray, np.ndarray]:
        """The likeliest tokens at each target of a document, and their log-probabilities."""
        block = self.block_of(document)
        if block not in self._maps:
            first, last = self.bounds[block : block + 2]
            count = int(self.rows[last] - self.rows[first])
            ids = np.memmap(self.path(block), np.int32, "r", 32, (count, self.count))
            logps = np.memmap(self.path(block), np.float32, "r", 32 + ids.nbytes, (count, self.width))
            self._maps[block] = ids, logps
        start = self.rows[self.bounds[block]]
        at = slice(int(self.rows[document] - start), int(self.rows[document + 1] - start))
        ids, logps = self._maps[block]
        return ids[at], logps[at]


def _ask(
    kept: Sequence[Answers],
    seen: Sequence[np.ndarray],
    open_teacher: Callable[[], Teacher],
    ranks: Ranks,
    progress: Progress | None,
) -> None:
    """Have every block with an example that will be seen in the cache. Ranks share the asking."""
    missing: list[list[int]] = []
    if ranks.is_first:
        for answers, chosen in zip(kept, seen, strict=True):
            wanted = [b for b, (first, last) in enumerate(pairwise(answers.bounds)) if chosen[first:last].any()]
            missing.append([block for block in wanted if not answers.is_whole(block)])
    missing = json.loads(ranks.tell(json.dumps(missing)))
    work = [(answers, block) for answers, blocks in zip(kept, missing, strict=True) for block in blocks]
    if not work:
        _check_shared(kept, seen, ranks)
        return
    _check_room(work)
    teacher = open_teacher()
    mine = work[ranks.rank :: ranks.count]
    for done, (answers, block) in enumerate(mine):
        if progress:
            progress(f"Asking the teacher about {answers.store.title}", done, len(mine))
        answers.ask(teacher, block)
    del teacher
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    ranks.wait()
    _check_shared(kept, seen, ranks)


def _check_room(work: Sequence[tuple[Answers, int]]) -> None:
    needed = sum(answers.bytes_of(block) for answers, block in work)
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"distillation.top_k: the teacher's answers need {gib(needed)} in {folder}, and {gib(free)} are free; "
            "lower top_k, make room, or leave it out."
        )


def _check_shared(kept: Sequence[Answers], seen: Sequence[np.ndarray], ranks: Ranks) -> None:
    """UserError where a rank does not see what the others have written."""
    is_lost = any(
        not answers.path(block).exists()
        for answers, chosen in zip(kept, seen, strict=True)
        for block, (first, last) in enumerate(pairwise(answers.bounds))
        if chosen[first:last].any()
    )
    if ranks.any([is_lost])[0]:
        raise UserError(
            "distillation.top_k: not all ranks see the cache with the teacher's answers; set TUNESMITH_CACHE to a "
            "folder that all nodes share, or leave top_k out."
        )


def _read_for(batch: MicroBatch, kept: Sequence[Answers], device: torch.device) -> Callable[[int, int], Taught]:
    """The teacher's answers for the targets of a micro-batch."""
    counted = zip(batch.sources.tolist(), batch.numbers.tolist(), batch.parts.tolist(), strict=True)
    answers = [kept[source].of(number) for source, number, part in counted if part >= 0]
    if not answers:
        return lambda start, stop: Taught(torch.empty(0, 1, device=device), torch.empty(0, 1, device=device).long())
    ids_nk, logps = (np.concatenate(some) for some in zip(*answers, strict=True))
    ids_nk, logps = (moved(torch.from_numpy(one), device) for one in (ids_nk, logps))
    return lambda start, stop: Taught(logps[start:stop], ids_nk[start:stop].long())
