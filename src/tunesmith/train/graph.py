"""The layers' forward and backward passes captured once, as CUDA graphs, and replayed for each micro-batch.

Starting a layer's kernels takes the CPU milliseconds. Where the GPU needs less for them, as with small models and
batches, it waits; a captured pass is started at once. The loss is not in it, since the number of targets changes from
batch to batch, nor are clipping and the update.

A captured pass reads and writes the same memory every time, so inputs are copied into place, and documents are
followed by empty ones. What it allocates comes from a pool of its own, which the allocator gives to nothing else; the
loss alone gets of it, for its logits, what is free between the two passes. Gradients are made in the same place each
time, too: those of several micro-batches are summed elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from tunesmith.errors import first_line
from tunesmith.kernels.streams import capture_stream
from tunesmith.model.forward import Inputs, hidden_states, loss_bytes
from tunesmith.parallel import compile
from tunesmith.plan.plan import ForwardSpec

EAGER_STEPS = 2
"""Before passes are captured: layers are compiled in them, and the optimizer makes its states."""
TRIES = 3
"""To record them; what another thread does meanwhile may spoil one."""


class GraphCapture:
    """`weights` are those whose gradients the backward pass is to make, of a model on a GPU."""

    def __init__(self, model: nn.Module, spec: ForwardSpec, weights: Sequence[nn.Parameter]):
        self.model = model
        self.spec = spec
        self.weights = weights
        self.passes: Passes | None = None
        self.sums: dict[nn.Parameter, torch.Tensor] = {}
        """Where gradients of several micro-batches are summed."""
        self.tries = TRIES if spec.layout == "packed" else 0

    @property
    def room(self) -> torch.Tensor:
        """Bytes that nothing else uses between the two passes."""
        assert self.passes is not None
        return self.passes.room

    @property
    def idle_bytes(self) -> int:
        """What the passes' pool holds beyond what the allocator counts as allocated, from their capturing on."""
        segments = torch.cuda.memory_snapshot(self.passes.pool) if self.passes is not None else ()
        return sum(segment["total_size"] - segment["allocated_size"] for segment in segments)

    def give_up(self) -> bool:
        """Free the memory of the passes, which are captured anew when they are wanted; False where there are none."""
        if self.passes is None:
            return False
        self._make_room()
        return True

    def record(self, inputs: Inputs) -> bool:
        """Whether there are passes for inputs like these; makes them where there are not. If that cannot be done, it is
        said once, and passes are to be run as they are; so are those of documents that see tokens of others, of which
        there are as many keys as they share."""
        if inputs.keys is not None:
            return False
        has_room = self.passes is not None and inputs.boundaries.shape[0] <= self.passes.inputs.boundaries.shape[0]
        if has_room or not self.tries:
            return has_room
        self._make_room()
        try:
            self.passes = Passes(self.model, self.spec, self.weights, inputs)
        except RuntimeError as error:
            self.tries -= 1
            if not self.tries:
                why = first_line(_first(error))
                compile.tell(f"The passes could not be captured ({why}); they are run as they are, which is slower.")
        return self.passes is not None

    def _make_room(self) -> None:
        """Give up passes that were captured for fewer documents, and what was left of those that were not."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        self.passes = None
        torch.cuda.empty_cache()

    def forward(self, inputs: Inputs) -> torch.Tensor:
        """What the output head sees, [T, H], and nothing behind it: its gradient is to be handed to `backward`."""
        assert self.passes is not None
        self.passes.place(inputs)
        self.passes.replay_forward()
        return self.passes.hidden_th.detach().requires_grad_()

    def backward(self, d_hidden_th: torch.Tensor, *, is_only: bool) -> None:
        """Gradients of the weights, added to those they have. `is_only`: no other micro-batch follows in this step, so
        that they may stay where they are made."""
        assert self.passes is not None
        self.passes.d_hidden_th.copy_(d_hidden_th)
        self.passes.replay_backward()
        summed = [(weight.grad, made) for weight, made in self.passes.gradients if weight.grad is not None]
        if summed:
            torch._foreach_add_([gradient for gradient, _ in summed], [made for _, made in summed])
        first = [(weight, made) for weight, made in self.passes.gradients if weight.grad is None]
        places = [made for _, made in first] if is_only else self._put_aside(first)
        for (weight, _), place in zip(first, places, strict=True):
            weight.grad = place

    def _put_aside(self, first: list[tuple[nn.Parameter, torch.Tensor]]) -> list[torch.Tensor]:
        """Copies of gradients that the next micro-batch's are added to."""
        for weight, made in first:
            if weight not in self.sums:
                self.sums[weight] = torch.empty_like(made)
        places = [self.sums[weight] for weight, _ in first]
        if places:
            torch._foreach_copy_(places, [made for _, made in first])
        return places


class Passes:
    """Both passes, captured, with the tensors they read and write."""

    def __init__(self, model: nn.Module, spec: ForwardSpec, weights: Sequence[nn.Parameter], inputs: Inputs):
        room = 1 << inputs.boundaries.shape[0].bit_length()
        self.inputs = replace(
            inputs,
            tokens=inputs.tokens.clone(),
            positions=inputs.positions.clone(),
            boundaries=F.pad(inputs.boundaries, (0, room - inputs.boundaries.shape[0]), value=inputs.tokens.shape[0]),
        )
        torch._dynamo.maybe_mark_dynamic(self.inputs.boundaries, 0)
        self.hidden_th = self.d_hidden_th = self.room = inputs.tokens  # made by the first forward pass
        room_bytes = loss_bytes(model, inputs.tokens.shape[0])
        before = [weight.grad for weight in weights]

        def forward() -> None:
            self.hidden_th = hidden_states(model, self.inputs, spec)
            self.room = torch.empty(room_bytes, dtype=torch.uint8, device=self.hidden_th.device)

        def lend_room() -> None:
            self.room = _lent(self.room)

        def backward() -> None:
            torch.autograd.backward(self.hidden_th, self.d_hidden_th)

        def rehearse() -> None:
            forward()
            self.d_hidden_th = torch.zeros_like(self.hidden_th)
            lend_room()
            backward()

        try:
            _forget(weights)
            _renew_accumulators(weights)
            aside = _beside(rehearse)
            _forget(weights)
            replays, self.pool = _captured(aside, forward, backward, between=lend_room)
            self.replay_forward, self.replay_backward = replays
            self.gradients = [(weight, weight.grad) for weight in weights if weight.grad is not None]
        finally:
            for weight, gradient in zip(weights, before, strict=True):
                weight.grad = gradient
        self.hidden_th = self.hidden_th.detach()

    def place(self, inputs: Inputs) -> None:
        self.inputs.tokens.copy_(inputs.tokens)
        self.inputs.positions.copy_(inputs.positions)
        count = inputs.boundaries.shape[0]
        self.inputs.boundaries[:count].copy_(inputs.boundaries)
        self.inputs.boundaries[count:].fill_(inputs.tokens.shape[0])


def _forget(weights: Sequence[nn.Parameter]) -> None:
    for weight in weights:
        weight.grad = None


def _renew_accumulators(weights: Sequence[nn.Parameter]) -> None:
    """What adds up a weight's gradient is the same node for as long as anything holds an earlier pass, as torch
    2.11 does of a layer that it could not compile. It would wait for the stream of that pass, which a captured pass
    must not. Torch makes a new node for data of another type."""
    for weight in weights:
        kept = weight.data
        weight.data = kept.new_empty(0, dtype=torch.float64)
        weight.data = kept


def _beside(rehearse: Callable[[], None]) -> torch.cuda.Stream:
    """Do on another stream what is to be captured there, without drawing from the stream of random numbers."""
    drawn = torch.cuda.get_rng_state()
    stream = capture_stream(torch.device("cuda", torch.cuda.current_device()))
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            rehearse()
    finally:
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.set_rng_state(drawn)
    return stream


def _captured(
    stream: torch.cuda.Stream, first: Callable[[], None], second: Callable[[], None], *, between: Callable[[], None]
) -> tuple[list[Callable[[], None]], tuple[int, int]]:
    """Two functions' kernels, to be started by what is returned, and the pool that they share; they run in this order.
    `between` is done in between, and not captured."""
    pool, before = torch.cuda.graph_pool_handle(), torch.cuda.current_stream()
    graphs = []
    try:
        for capture, after in ((first, between), (second, lambda: None)):
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on with the next batch meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                capture()
            after()
            graphs.append(graph.replay)
    finally:
        if torch.cuda.current_stream() != before:
            _close(before, pool)
    return graphs, pool


def _first(error: BaseException) -> BaseException:
    """What went wrong first: a capturing that was spoiled says so once more when it ends."""
    while error.__context__ is not None:
        error = error.__context__
    return error


class _Lent:
    """Memory of a tensor, for what does not own it."""

    def __init__(self, tensor: torch.Tensor):
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": tuple(tensor.shape),
            "data": (tensor.data_ptr(), False),
        }


def _lent(room: torch.Tensor) -> torch.Tensor:
    """The bytes of `room` for the loss alone: when `room` is gone, the backward pass may use them, too."""
    return torch.as_tensor(_Lent(room), device=room.device) if room.is_cuda else room


def _close(before: torch.cuda.Stream, pool: tuple[int, int]) -> None:
    """Torch leaves a capturing open that ends in an error of CUDA's: its stream is still the current one, random
    numbers cannot be drawn (2.11), and nothing else gets the memory of its pool."""
    torch.cuda.set_stream(before)
    device = torch.cuda.current_device()
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())
    with suppress(RuntimeError):  # where the pool is closed already
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
