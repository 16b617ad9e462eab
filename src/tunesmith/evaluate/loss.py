"""Held-out loss, by data set, in bounded memory: one micro-batch at a time, logits in chunks, no gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tunesmith.data.loader import evaluation_batches
from tunesmith.data.store import TokenStore
from tunesmith.model.forward import Shape, to_device, token_losses
from tunesmith.parallel.context import Cut
from tunesmith.parallel.ranks import Ranks
from tunesmith.plan.plan import ForwardSpec


@dataclass(frozen=True)
class HeldOut:
    """Loss of one data set: the weighted mean over its target tokens."""

    title: str
    loss: float
    target_tokens: float


@torch.no_grad()
def held_out_losses(
    model: nn.Module,
    spec: ForwardSpec,
    stores: Sequence[TokenStore],
    *,
    device: torch.device,
    sequence_length: int,
    micro_batch: int = 1,
    shape: Shape | None = None,
    progress: Callable[[int, int], None] | None = None,
    ranks: Ranks | None = None,
    share: tuple[int, int] = (0, 1),
    cut: Cut | None = None,
) -> list[HeldOut]:
    """The model must be in evaluation mode. `progress` is told the documents done, of how many. Several ranks
    share the work (`share`: which part of how many this rank does; `cut`: what of each micro-batch), and all know the
    result."""
    assert not model.training
    results = []
    ranks, cut = ranks or Ranks(), cut or Cut()
    done, documents = 0, -(-sum(len(store) for store in stores) // share[1])
    for store in stores:
        total = torch.zeros((), dtype=torch.float64, device=device)
        weight = 0.0
        sizes = {
            "sequence_length": sequence_length,
            "micro_batch": micro_batch,
            "lengths": spec.lengths(sequence_length),
        }
        for batch in map(cut, evaluation_batches(store, **sizes, rank=share[0], ranks=share[1])):
            total += token_losses(model, to_device(batch, device, shape), spec)[0].double()
            weight += batch.weights.double().sum().item()
            done += len(batch.origins)
            if progress:
                progress(min(done, documents), documents)
        sums = ranks.sum(torch.stack([total, torch.full_like(total, weight)]))
        copies = ranks.count // (share[1] * cut.ranks)  # ranks that share a model all know its losses
        total, weight = (sums / copies).tolist()
        results.append(HeldOut(store.title, total / weight if weight else float("nan"), weight))
    return results


def overall(results: Sequence[HeldOut]) -> float:
    """Loss over all target tokens of all data sets."""
    weight = sum(result.target_tokens for result in results)
    return sum(result.loss * result.target_tokens for result in results) / weight
