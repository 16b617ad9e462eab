"""Context parallelism: long sequences over several ranks, each of which computes some of the tokens of a micro-batch.

A row of packed documents is cut into twice as many chunks as there are ranks, and each rank takes one from the front
and its mirror image from the back, so that all have about the same number of earlier tokens to attend to:

    two ranks      | chunk 0 | chunk 1 | chunk 2 | chunk 3 |
                     rank 0    rank 1    rank 1    rank 0

Everything but attention treats each token by itself. In attention, keys and values are gathered from all ranks of the
group (their gradients are summed and dealt out again), and the queries of a chunk see, of the document they belong to,
what lies before them, whichever rank computed it. Weights lie over these ranks as over ranks with different data.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tunesmith.data.types import MicroBatch, Pieces
from tunesmith.errors import UserError
from tunesmith.model.attention import packed_attention, settled
from tunesmith.model.forward import Shape, filled, hidden_states, to_device
from tunesmith.model.inline_attention import inline_attention
from tunesmith.model.load import usable_tokens
from tunesmith.model.structure import body, set_attention
from tunesmith.parallel.collectives import Group, gather_rows, group_of
from tunesmith.parallel.mesh import context_mesh
from tunesmith.plan.plan import Attention, ForwardSpec, Plan

NAME = "tunesmith_context"


@dataclass(frozen=True, slots=True)
class ContextShard:
    """What of a micro-batch this rank computes."""

    rank: int = 0
    ranks: int = 1
    """Of the context group."""
    multiple: int = 1
    """Micro-batches are filled up to a multiple of so many tokens."""
    shape: Shape | None = None
    copies: int = 1
    """Ranks that compute the same losses."""

    def __call__(self, batch: MicroBatch) -> MicroBatch:
        if self.multiple == 1:
            return batch
        if self.shape is not None:
            filled = _filled(batch, self.shape.tokens, self.shape.longest)
        else:
            filled = _filled(batch, -(-batch.tokens.shape[0] // self.multiple) * self.multiple, batch.longest)
        return cut(filled, self.rank, self.ranks) if self.ranks > 1 else filled


def context_shard_of(plan: Plan, rank: int, shape: Shape | None) -> ContextShard:
    return ContextShard(
        plan.mesh.context_rank(rank), plan.mesh.context, multiple_of(plan), shape, copies=plan.mesh.tensor
    )


def multiple_of(plan: Plan) -> int:
    """Tokens of a micro-batch must be a multiple of this, to be shared evenly."""
    return plan.mesh.tensor * (2 * plan.mesh.context if plan.mesh.context > 1 else 1)


def cut(batch: MicroBatch, rank: int, ranks: int) -> MicroBatch:
    """The two chunks of a rank, one behind the other; a document that goes beyond a chunk is a piece here."""
    tokens = batch.tokens.shape[0]
    chunk = tokens // (2 * ranks)
    assert chunk * 2 * ranks == tokens
    bounds = batch.boundaries.long()
    rows, queries, keys, ends, owners = [], [], [], [torch.zeros(1, dtype=torch.int64)], []
    for number, index in enumerate((rank, 2 * ranks - 1 - rank)):
        start, end = index * chunk, (index + 1) * chunk
        edges = bounds.clamp(start, end).unique()
        documents = torch.searchsorted(bounds, edges[:-1], right=True) - 1
        # The keys before the first document and behind the chunk belong to no query, which is said by pieces without.
        queries.append(torch.cat([edges[:1] - start, edges - start, edges[-1:] - start]))
        keys.append(torch.cat([bounds[:1], bounds[documents[:1]], edges[1:], bounds[-1:]]))
        ends.append(edges[1:] - start + number * chunk)
        owners.append(documents)
        rows.append(torch.arange(start, end))
    longest = max(len(bounds) for bounds in queries)
    mine, owner = torch.cat(rows), torch.cat(owners)
    pieces = Pieces(*(torch.stack([_extended(bounds, longest) for bounds in both]) for both in (queries, keys)))
    return dataclasses.replace(
        batch,
        tokens=batch.tokens[mine],
        labels=batch.labels[mine],
        weights=batch.weights[mine],
        positions=batch.positions[mine],
        boundaries=torch.cat(ends).int(),
        sources=batch.sources[owner],
        origins=tuple(batch.origins[document] for document in owner.tolist()),
        records=None if batch.records is None else batch.records[owner],
        pieces=pieces,
    )


def attend_over(model: nn.Module, mesh: DeviceMesh, kernel: Attention) -> None:
    """From now on the model's attention takes micro-batches that are cut over the ranks of the mesh."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, partial(context_attention, group=group_of(mesh), **settled(kernel)))
    set_attention(model, NAME)
    if (inline := inline_attention(body(model))) is not None:
        inline.attention = NAME


@torch.no_grad()
def check_context(model: nn.Module, plan: Plan) -> None:
    """UserError where ranks that have some of the tokens each do not compute what the model computes of all of them.
    Leaves the model as it is."""
    mesh = context_mesh(plan)
    rank, ranks, device = mesh.get_local_rank(), mesh.size(), model.get_input_embeddings().weight.device
    whole = _trial(usable_tokens(model.config), 2 * ranks)
    chunks = torch.arange(len(whole.tokens)).chunk(2 * ranks)
    mine = torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])
    small, spec = copy.deepcopy(model).eval(), ForwardSpec("packed")
    expected = hidden_states(small, to_device(whole, device), spec)[mine]
    attend_over(small, mesh, plan.attention)
    try:
        worst = (hidden_states(small, to_device(cut(whole, rank, ranks), device), spec) - expected).abs().max()
    except (TypeError, ValueError, IndexError, RuntimeError):  # the model's own code, which expects all tokens
        worst = torch.tensor(torch.inf, device=device)
    worst_and_scale = torch.stack([worst.nan_to_num(torch.inf), expected.abs().max()])
    dist.all_reduce(worst_and_scale, dist.ReduceOp.MAX, group=mesh.get_group())
    if not worst_and_scale[0] <= 1e-3 * worst_and_scale[1]:
        raise UserError(
            f"{type(model).__name__} computes something else when its sequences are cut over ranks: it looks at other "
            "tokens in other ways than by the attention function that transformers hands it; use a plan with context 1."
        )


def _trial(vocabulary: int, chunks: int) -> MicroBatch:
    """Documents that end within chunks and go on over several of them."""
    lengths = (5, 4 * chunks - 8, 3)
    count = sum(lengths)
    tokens = torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(0))
    return MicroBatch(
        tokens=tokens,
        labels=tokens.roll(-1),
        weights=torch.ones(count),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        boundaries=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        longest=max(lengths),
        sources=torch.zeros(len(lengths), dtype=torch.int64),
        origins=("",) * len(lengths),
    )


def context_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    group: Group,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: torch.Tensor,
    max_length_q: int,
    max_length_k: int,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """`packed_attention` of this rank's queries, chunk by chunk, over the keys and values of all ranks."""
    sizes = key.shape[3], value.shape[3]
    both = torch.cat([key[0], value[0]], dim=-1).transpose(0, 1)  # tokens first
    gathered = gather_rows(both, group).unflatten(0, (group.size, 2, -1))
    in_order = torch.cat([gathered[:, 0], gathered[:, 1].flip(0)]).flatten(0, 1)
    key, value = in_order.transpose(0, 1).unsqueeze(0).split(sizes, dim=-1)
    chunks = [
        packed_attention(
            module,
            part,
            key,
            value,
            attention_mask,
            cu_seq_lens_q=cu_seq_lens_q[index],
            cu_seq_lens_k=cu_seq_lens_k[index],
            max_length_q=part.shape[2],
            max_length_k=max_length_k,
            **options,
        )[0]
        for index, part in enumerate(query.chunk(2, dim=2))
    ]
    return torch.cat(chunks, dim=1), None


def _filled(batch: MicroBatch, tokens: int, longest: int) -> MicroBatch:
    """With a last document of padding, or several, that counts 0."""
    ids, positions, boundaries = filled(batch, tokens, longest)
    more = tokens - batch.tokens.shape[0]
    fillers = boundaries.shape[0] - batch.boundaries.shape[0]
    return dataclasses.replace(
        batch,
        tokens=ids,
        labels=F.pad(batch.labels, (0, more)),
        weights=F.pad(batch.weights, (0, more)),
        positions=positions,
        boundaries=boundaries,
        longest=longest,
        sources=torch.cat([batch.sources, batch.sources[-1:].expand(fillers)]),
        origins=(*batch.origins, *(batch.origins[-1:] * fillers)),
        records=None if batch.records is None else torch.cat([batch.records, batch.records[-1:].expand(fillers)]),
    )


def _extended(bounds: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat([bounds, bounds[-1:].expand(length - len(bounds))]).int()
