"""Frozen weights of decoder layers that live in host memory, on one rank: each layer's come to the device before it is
used, and those of the layer after it while it computes.

In the forward pass the layer after is the next one, in the backward pass (which a checkpointed layer begins by
computing itself again) the one before; two layers' weights are on the device at a time. A layer's weights are one block
of host memory, locked, and so one copy, on a stream of its own: it waits for what was queued before the layer, and the
next layer waits for it; the CPU only queues. FSDP's own offload is for weights that lie over ranks or are trained: on
one rank it copies on the computing stream when a layer is called, beside nothing (measured: the GPU computed for 53% of
a step).

What autograd keeps of a weight is the tensor, whose memory comes and goes, as in FSDP. While a layer is not on the
device, its modules hold the tensors in host memory, so that nothing can read what is not there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tunesmith.optim.offload import pin
from tunesmith.optim.scratch import aligned
from tunesmith.parallel.shard import HOLDERS


class HostWeights:
    """Layers in the order in which a model calls them."""

    def __init__(self, device: torch.device):
        self.device = device
        self.layers: list[_Weights] = []
        self.here: set[int] = set()
        """Places of the layers whose weights are on the device, or on their way to it."""
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def take(self, layers: Sequence[nn.Module]) -> None:
        """Move their frozen weights to host memory, save those that several of them share."""
        times = Counter(id(tensor) for layer in layers for tensor in {id(t): t for *_, t in _frozen(layer)}.values())
        for layer in layers:
            number = len(self.layers)
            self.layers.append(_Weights([held for held in _frozen(layer) if times[id(held[-1])] == 1], self.device))
            layer.register_forward_pre_hook(lambda *_, number=number: self.use(number, number + 1))
            layer.register_forward_hook(lambda _module, _inputs, given, number=number: self._watch(number, given))

    def use(self, number: int, following: int) -> None:
        """Let what is queued on the device from here on find the weights of one layer, and start to bring those of the
        one that follows; at either end of the model that is the one before, which is here."""
        if not 0 <= following < len(self.layers):
            following = max(0, min(len(self.layers) - 1, 2 * number - following))
        for other in self.here - {number, following}:
            self.layers[other].leave()
        self.here &= {number, following}
        for wanted in (number, following):
            if wanted not in self.here:
                self.layers[wanted].come(self.stream)
                self.here.add(wanted)
        self.layers[number].await_arrival()

    def _watch(self, number: int, output: object) -> None:
        """A layer's backward pass begins when the gradient of what it gave is there."""
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self.use(number, number - 1))


@dataclass
class _Held:
    """One weight: where it belongs, and the two tensors that stand there by turns."""

    owner: dict[str, torch.Tensor | None]
    leaf: str
    at_home: torch.Tensor
    on_device: torch.Tensor


class _Weights:
    """The weights of one layer: a block of host memory, and one of the device that has memory while they are there."""

    def __init__(self, frozen: Sequence[tuple[dict, str, torch.Tensor]], device: torch.device):
        tensors = {id(tensor): tensor for *_, tensor in frozen}
        starts, self.size = {}, 0
        for key, tensor in tensors.items():
            starts[key] = self.size
            self.size += aligned(tensor.nbytes)
        self.home = pin(torch.empty(self.size, dtype=torch.uint8))
        self.block = torch.empty(self.size, dtype=torch.uint8, device=device)
        self.arrived: torch.cuda.Event | None = None
        self.held: list[_Held] = []
        pairs = {
            key: tuple(_carved(block, start, tensors[key]) for block in (self.home, self.block))
            for key, start in starts.items()
        }
        for key, (at_home, _) in pairs.items():
            at_home.copy_(tensors[key])
        for owner, leaf, tensor in frozen:
            self.held.append(_Held(owner, leaf, *pairs[id(tensor)]))
        self._put("at_home")
        self._resize(0)

    def come(self, stream: torch.cuda.Stream | None) -> None:
        self._resize(self.size)  # of the computing stream's memory: what stood there before is done by then
        self._put("on_device")
        if stream is None:
            self.block.copy_(self.home)
            return
        stream.wait_stream(torch.cuda.current_stream(self.block.device))
        with torch.cuda.stream(stream):
            self.block.copy_(self.home, non_blocking=True)
            self.arrived = stream.record_event()

    def leave(self) -> None:
        self.await_arrival()  # brought for nothing, its memory would be taken while the copy is under way
        self._put("at_home")
        self._resize(0)

    def await_arrival(self) -> None:
        if self.arrived is not None:
            torch.cuda.current_stream(self.block.device).wait_event(self.arrived)
            self.arrived = None

    def _put(self, side: str) -> None:
        for tensor in self.held:
            tensor.owner[tensor.leaf] = getattr(tensor, side)

    def _resize(self, size: int) -> None:
        self.block.untyped_storage().resize_(size)


def _frozen(layer: nn.Module) -> Iterator[tuple[dict, str, torch.Tensor]]:
    """Weights that are not trained, with the dictionary of their module: parameters, and what our modules hold of a
    frozen base as buffers. Other buffers may be written to."""
    for module in layer.modules():
        for leaf, weight in module._parameters.items():
            if weight is not None and not weight.requires_grad:
                yield module._parameters, leaf, weight
        for leaf, buffer in module._buffers.items() if isinstance(module, HOLDERS) else ():
            if buffer is not None:
                yield module._buffers, leaf, buffer


def _carved(block: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor in a block's memory that is no view of it: copies into the block do not count as changes of it."""
    stride = torch.empty_like(like, device="meta").stride()
    place = start // like.element_size()
    tensor = torch.empty(0, dtype=like.dtype, device=block.device)
    tensor.set_(block.untyped_storage(), place, like.shape, stride)
    return nn.Parameter(tensor, requires_grad=False) if isinstance(like, nn.Parameter) else tensor
