"""The modules of low-rank adapters: each stands in the place of a linear or an embedding, which it holds frozen.

A `LoraLinear` holds the frozen original and two small trainable matrices. The factors are kept in fp32 whatever the
base's precision; matmuls run in the input's. `lora` says which linears of a model get one, and how they are stored.

Legend: T tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from tunesmith.kernels.fake_quantize import fake_quantized_lowrank
from tunesmith.kernels.rounding import Rounding
from tunesmith.model.local import local
from tunesmith.model.quantized import QuantizedLinear
from tunesmith.model.structure import is_transposed

MERGED_PIECE = 1 << 17
"""Values of a weight that are merged at a time: half a megabyte in fp32."""


class LoraLinear(nn.Module):
    """`base(x) + scale * dropout(x) @ A.T @ B.T`, with the base frozen.

    With DoRA each output is then scaled by `m / |row of W + scale * B @ A|`, where `m` is trained, starts as the length
    of the base's row, and the length it is divided by counts as a constant.
    """

    def __init__(self, base: nn.Module, rank: int, scale: float, dropout: float = 0.0, *, dora: bool = False):
        super().__init__()
        inputs, outputs = _sizes(base)
        device = next(itertools.chain(base.parameters(), base.buffers())).device
        self.base = base.requires_grad_(False)
        self.joint: nn.Module | None = None
        self.index = 0
        self.shows_weight = False
        self.is_head = False
        """The model's output head, which the loss calls a few rows at a time."""
        self.rounding: Rounding | None = None
        """Of base and adapter together, in quantization-aware training."""
        self.scale = scale
        self.dropout = dropout
        self.lora_a = nn.Parameter(torch.zeros(rank, inputs, device=device, dtype=torch.float32))
        self.lora_b = nn.Parameter(torch.zeros(outputs, rank, device=device, dtype=torch.float32))
        squares_o = _row_squares(base) if dora else None
        self.lora_m = nn.Parameter(squares_o.sqrt()) if squares_o is not None else None
        self.register_buffer("squares_o", squares_o, persistent=False)
        self.keeps_lengths = False
        """Weights stay as they are while this is so; DoRA's lengths are then computed once."""
        self._kept: tuple[torch.dtype, torch.Tensor] | None = None

    @property
    def rank(self) -> int:
        return self.lora_a.shape[0]

    @property
    def weight(self) -> torch.Tensor | None:
        """The base's, for encoder-decoders, which look at its type before they call it (T5); None where it is not held
        as one. To others it is not there: what they would compute with it would be without the adapter."""
        if not self.shows_weight:
            raise AttributeError("an adapter has no weight")
        return getattr(self.base, "weight", None)

    def reset(self, generator: torch.Generator) -> None:
        """A as PEFT draws it (uniform within sqrt(1 / I)), B zero: the model starts as the base."""
        with torch.no_grad():
            self.lora_a.copy_(_drawn(tuple(self.lora_a.shape), generator))
            self.lora_b.zero_()

    def join(self, product: nn.Module, index: int) -> None:
        """From now on `product` computes this linear, as its part `index`, and holds the base's weight."""
        self.base = nn.Identity()
        self.joint = product
        self.index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.joint is not None:
            return self.joint.part(x, self.index)
        if self.rounding is not None:
            factors = (local(self.lora_a), local(self.lora_b), self.scale)
            return fake_quantized_lowrank(x, self.base.weight, self.base.bias, *factors, self.rounding)
        y = self.base(x)
        inner = F.dropout(x, self.dropout, self.training) if self.dropout else x
        low = F.linear(inner, local(self.lora_a).to(x.dtype))
        update = F.linear(low, (local(self.lora_b) * self.scale).to(x.dtype))
        if self.lora_m is None:
            return y + update
        factor_o = (self.lora_m / self._present_lengths(x.dtype)).to(x.dtype)
        bias = self.base.bias
        return (y + update) * factor_o if bias is None else (y - bias + update) * factor_o + bias

    def _present_lengths(self, dtype: torch.dtype) -> torch.Tensor:
        if not self.keeps_lengths:
            return self._lengths(dtype)
        if self._kept is None or self._kept[0] != dtype:
            self._kept = (dtype, self._lengths(dtype))
        return self._kept[1]

    @torch.no_grad()
    def _lengths(self, dtype: torch.dtype) -> torch.Tensor:
        """Of the rows of W + scale * B @ A, without making that matrix: W is seen through its product with A alone, so
        that it may be held in any way."""
        product_ro = self.base(self.lora_a.to(dtype)).float()
        if self.base.bias is not None:
            product_ro -= self.base.bias.float()
        b_or = self.lora_b * self.scale
        crossed = (b_or * product_ro.t()).sum(1)
        own = ((b_or @ (self.lora_a @ self.lora_a.t())) * b_or).sum(1)
        return (self.squares_o + 2 * crossed + own).clamp(min=1e-20).sqrt()

    @torch.no_grad()
    def take_out(self) -> None:
        """Take what the factors add out of the base's weight; DoRA's lengths stay those of the base as it was."""
        weight = self.base.weight
        self.base.weight = nn.Parameter((weight.float() - self.delta()).to(weight.dtype), requires_grad=False)
        if self.squares_o is not None:
            self.squares_o.copy_(_row_squares(self.base))

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """The base's weight with the adapter in it, in fp32, in the base's own layout."""
        if self.adds_rows:
            total = weight.to(torch.float32, copy=True)
            for rows in row_pieces(total):
                self.add_rows_(total[rows], rows)
            return total
        total = weight.float() + self.delta()
        if self.lora_m is None:
            return total
        rows = 1 if has_inputs_first(self.base) else 0
        factor_o = self.lora_m / total.norm(dim=1 - rows)
        return total * factor_o.unsqueeze(1 - rows)

    @property
    def adds_rows(self) -> bool:
        """Whether the adapter is a sum, row by row of the base's weight."""
        return self.lora_m is None and not has_inputs_first(self.base)

    def add_rows_(self, total: torch.Tensor, rows: slice) -> None:
        """To these rows of the base's weight, in fp32, what the factors add. Every merge adds them by `row_pieces`,
        whatever it does with them next, so that all have the same bits."""
        total.addmm_(self.lora_b[rows].float(), self.lora_a.float(), alpha=self.scale)

    def delta(self) -> torch.Tensor:
        """What the factors add to the base's weight, in fp32, in the base's own layout."""
        update = (self.lora_b @ self.lora_a) * self.scale
        return update.t() if has_inputs_first(self.base) else update


class LoraEmbedding(nn.Module):
    """`base(tokens) + scale * A[:, tokens].T @ B.T`, with the base frozen."""

    dropout, lora_m = 0.0, None

    def __init__(self, base: nn.Embedding, rank: int, scale: float):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale = scale
        device = base.weight.device
        self.lora_embedding_a = nn.Parameter(torch.zeros(rank, base.num_embeddings, device=device))
        self.lora_embedding_b = nn.Parameter(torch.zeros(base.embedding_dim, rank, device=device))

    @property
    def weight(self) -> nn.Parameter:
        """The base's, for those who ask an embedding for its size or precision."""
        return self.base.weight

    def reset(self, generator: torch.Generator) -> None:
        """As PEFT draws it: A zero, B normal."""
        drawn = torch.randn(self.lora_embedding_b.shape, generator=generator)
        with torch.no_grad():
            self.lora_embedding_a.zero_()
            self.lora_embedding_b.copy_(drawn)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        y = self.base(tokens)
        low = F.embedding(tokens, local(self.lora_embedding_a).t())
        update = F.linear(low, local(self.lora_embedding_b) * self.scale * getattr(self.base, "embed_scale", 1.0))
        return y + update.to(y.dtype)

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """The base's weight with the adapter in it, in fp32."""
        return weight.float() + (self.lora_embedding_b @ self.lora_embedding_a).t() * self.scale


class TokenRows(nn.Module):
    """An embedding or output head of which the rows of some tokens are trained, and the others are frozen."""

    def __init__(self, base: nn.Module, ids: list[int], token_rows: nn.Parameter | None = None):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.is_used = True
        at = torch.tensor(sorted(ids), device=base.weight.device)
        self.register_buffer("ids", at, persistent=False)
        self.token_rows = nn.Parameter(base.weight.detach()[at].float()) if token_rows is None else token_rows

    @property
    def weight(self) -> nn.Parameter:
        """The base's, for those who ask for its size or precision."""
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, rows = self.base(x), local(self.token_rows)
        if not self.is_used:
            return y
        if isinstance(self.base, nn.Embedding):
            at = torch.searchsorted(self.ids, x).clamp(max=len(self.ids) - 1)
            own = F.embedding(at, rows) * getattr(self.base, "embed_scale", 1.0)
            return torch.where((self.ids[at] == x)[..., None], own.to(y.dtype), y)
        bias = None if self.base.bias is None else self.base.bias[self.ids]
        return y.index_copy(-1, self.ids, F.linear(x, rows.to(x.dtype), bias).to(y.dtype))

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.float().index_copy(0, self.ids, self.token_rows.float())


def row_pieces(weight: torch.Tensor) -> Iterator[slice]:
    """The rows of a matrix, on a CPU in pieces that stay in a core's cache."""
    count = max(1, weight.shape[0] if weight.is_cuda else MERGED_PIECE // max(1, weight.shape[1]))
    for first in range(0, weight.shape[0], count):
        yield slice(first, min(first + count, weight.shape[0]))


def initial_a(shape: tuple[int, int], seed: int, name: str) -> torch.Tensor:
    """The first factor of the linear `name` as training begins with it."""
    return _drawn(shape, generator_of(seed, name))


def _drawn(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    bound = 1 / math.sqrt(shape[1])
    return torch.rand(shape, generator=generator, dtype=torch.float32) * (2 * bound) - bound


def generator_of(seed: int, name: str) -> torch.Generator:
    """Each adapter draws from its own stream, so its start depends on nothing but the seed and its name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def is_linear(module: nn.Module) -> bool:
    """Whether a module can carry a `LoraLinear`."""
    return isinstance(module, nn.Linear | QuantizedLinear) or is_transposed(module)


def has_inputs_first(module: nn.Module) -> bool:
    """Whether the weight of a linear is [inputs, outputs], as that of GPT-2's is."""
    return module.is_transposed if isinstance(module, QuantizedLinear) else is_transposed(module)


def _sizes(module: nn.Module) -> tuple[int, int]:
    if isinstance(module, QuantizedLinear):
        return module.in_features, module.out_features
    first, second = module.weight.shape
    return (first, second) if has_inputs_first(module) else (second, first)


def _row_squares(base: nn.Module) -> torch.Tensor:
    """The squared length of each output's weights, [O] in fp32."""
    if isinstance(base, QuantizedLinear):
        return base.dequantize().square().sum(1)
    return base.weight.detach().float().square().sum(0 if has_inputs_first(base) else 1)
