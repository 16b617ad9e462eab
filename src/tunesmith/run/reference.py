"""What the model thinks of each document before it is trained: the reference of DPO and KTO.

Computed once, before the first step, while the model still is what was loaded: with adapters the base, since new
adapters add nothing; with `method: full` the base itself, of which no second copy is needed. A number for each document
is kept in the cache, under a key of everything it depends on, so a run that goes on, or one with another `beta`, reads
it. A step then costs what a step of SFT costs, and the memory of one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from tunesmith.cache import cache_folder
from tunesmith.checkpoint.files import write_atomic
from tunesmith.data.loader import documents_of, evaluation_indices, idle, micro_batch_of
from tunesmith.data.preferences import mismatched
from tunesmith.data.store import TokenStore
from tunesmith.model.forward import to_device, token_losses
from tunesmith.model.scoring import document_logps
from tunesmith.objectives.base import Objective
from tunesmith.parallel.context import ContextShard
from tunesmith.parallel.pipeline import Pipelined
from tunesmith.parallel.ranks import Ranks
from tunesmith.parallel.shard import Sharded
from tunesmith.plan.plan import ForwardSpec, Plan
from tunesmith.run.shape import micro_batch_shape

VERSION = 1
"""Of how the numbers are made and kept."""
Progress = Callable[[str, int, int | None], None]


class Reference:
    """Gives stores what an objective needs of the model as it is now."""

    def __init__(
        self,
        called: nn.Module,
        spec: ForwardSpec,
        plan: Plan,
        device: torch.device,
        *,
        weights: str,
        ranks: Ranks | None = None,
        context_shard: ContextShard | None = None,
        share: tuple[int, int] | None = None,
        progress: Progress | None = None,
    ):
        """`weights`: the fingerprint of the weights that the model has now. `share`: which part of how many this rank
        does, where that is not by the plan's mesh."""
        self.called, self.spec, self.plan, self.device = called, spec, plan, device
        self.weights, self.ranks, self.context_shard = weights, ranks or Ranks(), context_shard or ContextShard()
        by_mesh = (plan.mesh.data_rank(self.ranks.rank), plan.mesh.data_ranks) if ranks else (0, 1)
        self.share = share or by_mesh
        self.progress = progress

    def of(
        self,
        stores: Sequence[TokenStore],
        objective: Objective,
        seen: Callable[[], Sequence[np.ndarray]] | None = None,
    ) -> tuple[list[TokenStore], list[TokenStore]]:
        """The stores with their references, and, where the objective has a baseline, those of mismatched answers. The
        reference is asked about the examples that will be `seen` (bool [N] of each store), or all."""
        others = [mismatched(store, self.plan.sequence_length) for store in stores] if objective.has_baseline else []
        if not objective.has_reference:
            return list(stores), others
        chosen = seen() if seen else [np.ones(len(store), dtype=bool) for store in stores]
        return self._referred_in_parts(stores, chosen), self._referred_in_parts(others, chosen[: len(others)])

    def _referred_in_parts(self, stores: Sequence[TokenStore], chosen: Sequence[np.ndarray]) -> list[TokenStore]:
        return [self._referred_in_part(store, examples) for store, examples in zip(stores, chosen, strict=True)]

    def _referred_in_part(self, store: TokenStore, chosen: np.ndarray) -> TokenStore:
        if chosen.all():
            return self._referred(store)
        references = np.zeros(store.document_count)
        if chosen.any():
            documents = np.array([d for i in np.flatnonzero(chosen) for d in store.documents(i)])
            references[documents] = self._referred(store.part(chosen, store.title)).references
        return store.referred(references)

    def _referred(self, store: TokenStore) -> TokenStore:
        path = cache_folder() / "references" / self._key(store)
        references = _read(path, store.document_count) if self.ranks.is_first else None
        if not any(self.ranks.any([references is not None])):
            references = self._compute(store)
            if self.ranks.is_first:
                _write(path, references)
        elif self.ranks.count > 1:
            values = torch.zeros(store.document_count, dtype=torch.float64)
            if references is not None:
                values += torch.from_numpy(references)
            references = self.ranks.sum(values.to(self.device)).cpu().numpy()
        assert references is not None
        return store.referred(references)

    def _key(self, store: TokenStore) -> str:
        plan = self.plan
        depends_on = [
            VERSION,
            self.weights,
            store.fingerprint,
            store.document_count,
            plan.precision,
            plan.storage,
            plan.matmul_dtype,
            plan.attention,
            plan.sequence_length,
            plan.micro_batch,
            str(self.spec),
            plan.device,
        ]
        return hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()

    @torch.no_grad()
    def _compute(self, store: TokenStore) -> np.ndarray:
        plan, shape, was_training = self.plan, micro_batch_shape(self.plan), self.called.training
        self.called.eval()
        values = torch.zeros(store.document_count, dtype=torch.float64, device=self.device)
        rank, ranks = self.share
        done = 0
        for indices in evaluation_indices(
            store,
            sequence_length=plan.sequence_length,
            micro_batch=plan.micro_batch,
            lengths=self.spec.lengths(plan.sequence_length),
            rank=rank,
            ranks=ranks,
        ):
            documents = [document for i in indices or () for document in documents_of(store, i, 0)]
            batch = self.context_shard(micro_batch_of(documents or [idle(documents_of(store, 0, 0)[0])]))
            losses_n = token_losses(self.called, to_device(batch, self.device, shape), self.spec)[1]
            if documents:
                at = torch.tensor([d for i in indices or () for d in store.documents(i)], device=self.device)
                values[at] = document_logps(batch, losses_n)
            done += len(documents)
            if self.progress:
                self.progress(f"Asking the reference about {store.title}", done * ranks, store.document_count)
        inner = self.called.model if isinstance(self.called, Pipelined) else self.called
        if isinstance(inner, Sharded):
            inner.free_full_weights()
        self.called.train(was_training)
        copies = self.ranks.count // ranks
        return (self.ranks.sum(values) / copies).cpu().numpy()


def _read(path, count: int) -> np.ndarray | None:
    """What is kept there; None where it is not there, or not what was written."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, numbers = data[:32], data[32:]
    if hashlib.sha256(numbers).digest() != digest or len(numbers) != 8 * count:
        return None
    return np.frombuffer(numbers, dtype=np.float64)


def _write(path, values: np.ndarray) -> None:
    """A cache that cannot be written costs the same work once more, and no run."""
    numbers = np.ascontiguousarray(values, dtype=np.float64).tobytes()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, hashlib.sha256(numbers).digest() + numbers)
    except OSError:
        return
