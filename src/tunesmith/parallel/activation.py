"""Activation checkpointing (gradient checkpointing) and activation offloading: a layer keeps between its forward and
its backward pass everything, its input alone, or not even that on the device.

`checkpointed` and `offloaded` each take a layer's forward function and return one that computes the same. A
checkpointed layer keeps its input and, where asked, what its attention gave, which is expensive to compute and cheap to
keep; the rest is computed again in the backward pass. It may be compiled: the compiler then leaves out what backward
does not need. Of an offloaded layer the input waits in host memory: it goes there beside the computation of the layer
above, and comes back while that is in its backward pass; the topmost one stays where it is. `slice_mlp` keeps the
widest tensors of a layer from existing for all tokens at once.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tunesmith.model.fuse import JointMlp

Forward = Callable[..., torch.Tensor]
BLOCK = 1 << 25
"""Bytes of one piece of pinned memory: a power of two, to which torch would round anything else up."""
MLPS = ("mlp", "feed_forward")
"""What models call the MLP of a layer."""
ATTENTION = frozenset(
    {
        "tunesmith::flash4",
        "tunesmith::efficient",
        "torch_attn::_varlen_attn",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    }
)
"""Operators whose results a checkpointed layer may keep: the attended values and the logarithms of their sums."""


def checkpointed(forward: Forward, *, save_attention: bool = False) -> Forward:
    """Keep the inputs alone (and what attention gave) and compute the rest again in the backward pass."""
    policy = functools.partial(create_selective_checkpoint_contexts, _attention_kept if save_attention else _none_kept)
    # About operators that change tensors in place, said whenever this is compiled; ours do not.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    # Layers of a group keep their common result on a module from the first to the last of them, and none after that.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True

    def again(*arguments, **named):
        # Compiled without a policy, torch 2.11 keeps what operations of ours hand to their gradients.
        options = {"context_fn": policy} if save_attention or torch.compiler.is_compiling() else {}
        return checkpoint(forward, *arguments, use_reentrant=False, **options, **named)

    return again


def offloaded(forward: Forward, store: HostStore, *, stays: bool = False) -> Forward:
    """Let the layer's input, where it is kept at all, wait in host memory; one that `stays` is the first to be wanted
    back, so its way would be for nothing. Goes around what is compiled."""

    def elsewhere(*arguments, **named):
        hidden = arguments[0] if arguments else named["hidden_states"]
        if not torch.is_grad_enabled():
            return forward(*arguments, **named)
        where, size = hidden.data_ptr(), hidden.numel()  # autograd keeps `pack`, which may not keep the input itself

        def pack(tensor: torch.Tensor) -> torch.Tensor | _Kept:
            is_input = tensor.data_ptr() == where and tensor.numel() == size and tensor.is_contiguous()
            return store.put(tensor, stays=stays) if is_input else tensor

        with saved_tensors_hooks(pack, lambda kept: store.get(kept) if isinstance(kept, _Kept) else kept):
            return forward(*arguments, **named)

    return elsewhere


def slice_mlp(layer: nn.Module, tokens: int, *, is_checkpointed: bool = True) -> bool:
    """Let the layer's MLP take so many tokens at a time, and keep of them its input alone; False where it has none that
    treats each token for itself. `is_checkpointed` may be off where the whole layer is compiled to be checkpointed:
    there each slice is computed again just before its backward pass."""
    mlp = next((found for name in MLPS if (found := getattr(layer, name, None)) is not None), None)
    if mlp is None or any(isinstance(module, nn.ModuleList) or hasattr(module, "experts") for module in mlp.modules()):
        return False
    if isinstance(mlp, JointMlp):
        mlp.slice_tokens = tokens
        return True
    forward = checkpointed(mlp.forward) if is_checkpointed else mlp.forward

    def by_slices(x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(1, -1, x.shape[-1])
        if rows.shape[1] <= tokens:
            return mlp_forward(x)
        return torch.cat([forward(part) for part in rows.split(tokens, dim=1)], dim=1).view(x.shape)

    mlp_forward = mlp.forward
    mlp.forward = by_slices
    return True


class HostStore:
    """Tensors that wait in host memory between forward and backward, in pinned blocks that are used again and again.

    On a GPU all copies run on one stream beside the computation, so that they keep their order: a block may be taken
    anew as soon as the copy out of it is queued. What was put last is fetched first, and the one before it while it is
    in use. On a CPU the copies are plain.
    """

    def __init__(self, device: torch.device, block: int = BLOCK):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.block = block
        self.free: list[torch.Tensor] = []
        self.blocks = 0
        """Made so far."""
        self._leaving: tuple[torch.Tensor, _Copied] | None = None
        self._last: weakref.ref[_Kept] | None = None

    def put(self, tensor: torch.Tensor, *, stays: bool = False) -> _Kept:
        """What `stays` is kept as it is; after it no copy is under way."""
        self._let_go()
        count = 0 if stays else -(-tensor.nbytes // self.block)
        kept = _Kept(self, tensor, [self._take() for _ in range(count)], self._last)
        if stays:
            kept.fetched = (tensor, None)
        elif copied := self._copy(zip(kept.blocks, _pieces(tensor, self.block), strict=True)):
            self._leaving = (tensor, copied)
        self._last = weakref.ref(kept)
        return kept

    def get(self, kept: _Kept) -> torch.Tensor:
        self._let_go()
        if kept.fetched is None:
            self._fetch(kept)
        tensor, copied = kept.fetched
        kept.fetched = None
        if copied is not None:
            copied.wait()
        before = kept.before() if kept.before is not None else None
        if before is not None and before.fetched is None and before.blocks:
            self._fetch(before)
        return tensor

    def _fetch(self, kept: _Kept) -> None:
        # Room is made on the computing stream, where it will be used and freed; the copy waits for that stream below.
        tensor = torch.empty(kept.shape, dtype=kept.dtype, device=kept.device)
        copied = self._copy(zip(_pieces(tensor, self.block), kept.blocks, strict=True))
        kept.fetched = (tensor, copied)

    def _copy(self, pairs) -> _Copied | None:
        """Copy pieces, targets first; says when they are there, None at once."""
        if self.stream is None:
            for target, source in pairs:
                _copy_bytes(target, source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for target, source in pairs:
                _copy_bytes(target, source)
            return _Copied(self.stream)

    def _let_go(self) -> None:
        """The tensor put last may be freed, and its memory used by what is queued from now on, once it is copied."""
        if self._leaving is not None:
            (_, copied), self._leaving = self._leaving, None
            copied.wait()

    def _take(self) -> torch.Tensor:
        if self.free:
            return self.free.pop()
        self.blocks += 1
        return torch.empty(self.block, dtype=torch.uint8, pin_memory=self.stream is not None)


class _Copied:
    """When all that a stream has been given so far is done."""

    def __init__(self, stream: torch.cuda.Stream):
        self.event = stream.record_event()
        self.cuda_graphs = torch.cuda.is_current_stream_capturing()

    def wait(self) -> None:
        """Not for what a recording that failed has left: it never runs. And when one begins, all else is done."""
        if self.cuda_graphs == torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().wait_event(self.event)


class _Kept:
    """A tensor in host memory. Its blocks are free again when nothing refers to it any more."""

    def __init__(self, store: HostStore, tensor: torch.Tensor, blocks: list[torch.Tensor], before):
        self.store, self.blocks, self.before = store, blocks, before
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.fetched: tuple[torch.Tensor, _Copied | None] | None = None

    def __del__(self) -> None:
        self.store.free.extend(self.blocks)
        if self.fetched is not None and self.fetched[1] is not None:  # fetched for nothing, and still on its way
            self.fetched[1].wait()


def _pieces(tensor: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    return tensor.detach().view(-1).view(torch.uint8).split(size)


def _copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """The last piece of a tensor may be shorter than its block."""
    length = min(target.shape[0], source.shape[0])
    target[:length].copy_(source[:length], non_blocking=True)


def _name_of(operator) -> str | None:
    schema = getattr(operator, "_schema", None)  # operators of a higher order have none
    return None if schema is None else schema.name


def _attention_kept(_context, operator, *_arguments, **_named) -> CheckpointPolicy:
    is_attention = operator is torch.ops.higher_order.flex_attention or _name_of(operator) in ATTENTION
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE


def _none_kept(_context, _operator, *_arguments, **_named) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE
