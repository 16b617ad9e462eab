"""NEFTune (Jain et al., 2023): uniform noise on token embeddings while a model is trained, none while it is evaluated.

Each value gets a draw from [-1, 1], times `alpha / sqrt(length * width)`, where the length is that of the token's own
document: packed documents get the noise that they would get one by one. Draws come from the generator that the step
has seeded, as dropout's do, so a step stays a pure function of the weights before it.

Legend: B rows, T tokens, H hidden, D documents.
"""

from __future__ import annotations

import torch
from torch import nn


class EmbeddingNoise:
    """A forward hook of the input embedding."""

    def __init__(self, alpha: float):
        self.alpha = alpha
        self.lengths_bt: torch.Tensor | None = None
        """Of each token's document, [B, T] or [B, 1]; None outside of a pass whose documents are known."""

    def __call__(self, embedding: nn.Module, _arguments: object, embedded_bth: torch.Tensor) -> torch.Tensor:
        if not embedding.training or self.lengths_bt is None:
            return embedded_bth
        scale_bt = self.alpha / (self.lengths_bt * embedded_bth.shape[-1]).float().sqrt()
        noise_bth = torch.empty_like(embedded_bth).uniform_(-1.0, 1.0)
        return embedded_bth + noise_bth * scale_bt[..., None].to(embedded_bth.dtype)


def put_noise_on(model: nn.Module, alpha: float) -> None:
    model.embedding_noise = EmbeddingNoise(alpha)
    model.get_input_embeddings().register_forward_hook(model.embedding_noise)


def tell_lengths(model: nn.Module, boundaries: torch.Tensor, tokens: int | None) -> None:
    """To the noise of this model, where it has any: `boundaries` [D+1] of documents that are `tokens` end to end in
    one row, or a row each where that is None."""
    noise = getattr(model, "embedding_noise", None)
    if noise is None:
        return
    lengths_d = boundaries.diff().long()
    if tokens is None:
        noise.lengths_bt = lengths_d[:, None]
    else:
        noise.lengths_bt = torch.repeat_interleave(lengths_d, lengths_d, output_size=tokens)[None]
