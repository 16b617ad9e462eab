"""Pipeline parallelism: a decoder cut into stages along its layers, and a step's micro-batches sent through them by
PyTorch's schedules.

Each rank keeps a run of layers (two runs where stages are interleaved); the first stage has the embedding besides, the
last one norm, head and loss. Everything else of the model's own code runs on every stage, such as its rotary
embeddings; weights there (gates that the layers are given) have a part of their gradient on each. Layers that are
elsewhere are passed over, so that those which are here keep their numbers and names.

  1f1b, 2 ranks, 4 micro-batches          F forward, B backward, . waiting
    rank 0:  F0 F1 .  B0 F2 B1 F3 B2 .  B3
    rank 1:  .  F0 B0 F1 B1 F2 B2 F3 B3 .

What goes from stage to stage are hidden states, and their gradients back: all micro-batches have one shape, so that
everybody knows how much to expect. Idle micro-batches make up whole rounds. Where ranks share a GPU, whose tensors gloo
does not send, they go through host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor

from tunesmith.errors import UserError
from tunesmith.model.forward import (
    Entrance,
    Inputs,
    hidden_states,
    losses_of_hidden,
    packed_hidden_states,
    trial_inputs,
)
from tunesmith.model.load import DTYPES, usable_tokens
from tunesmith.model.local import local
from tunesmith.model.structure import decoder_layers
from tunesmith.optim.build import Optimizer
from tunesmith.parallel.shard import Sharded, full_tensor
from tunesmith.plan import stages
from tunesmith.plan.plan import ForwardSpec, Plan

SCHEDULES = {
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}


class Stage:
    """One stage: a run of a model's layers. While it is `active`, calling the model computes these and no others."""

    def __init__(self, model: nn.Module, own: range, number: int, count: int):
        self.number, self.count = number, count
        self.is_first, self.is_last = number == 0, number == count - 1
        self.holder, name, layers = _find_layers(model)
        self.layers = [layers[index] for index in own]
        self.swapped: dict[str, nn.Module] = {
            name: nn.ModuleList(layer if index in own else _PassedOver(layer) for index, layer in enumerate(layers))
        }
        if not self.is_last:
            self.swapped |= {name: nn.Identity() for name in _behind_layers(self.holder, layers)}

    @contextmanager
    def active(self) -> Iterator[None]:
        kept = {name: getattr(self.holder, name) for name in self.swapped}
        try:
            for name, module in self.swapped.items():
                setattr(self.holder, name, module)
            yield
        finally:
            for name, module in kept.items():
                setattr(self.holder, name, module)


@dataclass(frozen=True)
class Stages:
    """What a rank has of a model."""

    parts: list[Stage]
    tied: str | None
    """The weight that is the embedding of the first stage and the head of the last."""

    @property
    def layers(self) -> list[nn.Module]:
        return [layer for part in self.parts for layer in part.layers]


def cut(model: nn.Module, plan: Plan, stage: int) -> Stages:
    """Leave of the model what this rank computes; its weights need not be there yet."""
    _, _, layers = _find_layers(model)
    count = plan.mesh.pipeline * stages.PER_RANK[plan.schedule]
    if count > len(layers):
        raise UserError(
            f"The plan cuts the model into {count} stages, but it has {len(layers)} layers only; use a plan with a "
            "smaller pipeline."
        )
    head = model.get_output_embeddings()
    runs = stages.cut([_size(layer) for layer in layers], count, last=_size(head))
    parts = [Stage(model, own, number, count) for number, own in enumerate(runs)]
    if not all(any(weight.requires_grad for layer in part.layers for weight in layer.parameters()) for part in parts):
        raise UserError(
            "A stage of the pipeline would have nothing to train, since lora.layers leaves its layers out; adapt more "
            "layers, or use a plan without a pipeline."
        )
    _check_layers_are_apart(model, parts, plan.mesh.pipeline)
    own_stages = Stages([part for part in parts if part.number % plan.mesh.pipeline == stage], _tied_name(model))
    _leave(model, own_stages)
    return own_stages


@torch.no_grad()
def check_stages(model: nn.Module, count: int) -> None:
    """UserError where so many stages, one after the other, do not give what the whole model gives."""
    _, _, layers = _find_layers(model)
    parts = [Stage(model, own, number, count) for number, own in enumerate(stages.cut([1.0] * len(layers), count))]
    inputs = trial_inputs(usable_tokens(model.config), model.get_input_embeddings().weight.device)
    was_training = model.training
    model.eval()
    expected = hidden_states(model, inputs, ForwardSpec("packed"))
    try:
        hidden = None
        for part in parts:
            hidden = _hidden_of(model, part, inputs, hidden)
        is_same = torch.allclose(hidden[0], expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
    except (TypeError, ValueError, IndexError, AttributeError, RuntimeError):
        is_same = False
    finally:
        model.train(was_training)
    if not is_same:
        raise UserError(
            f"{type(model).__name__} cannot be cut into pipeline stages: its layers, run after run, do not give what "
            "the whole model gives; use a plan without a pipeline."
        )


class Pipelined(Entrance):
    """A rank's stages, standing for the whole model: called as that is, they compute it together with the others'."""

    def __init__(self, called: nn.Module, mine: Stages, plan: Plan, group: dist.ProcessGroup):
        """`called` is what remains of the model here, or what stands before its shards."""
        super().__init__(called)
        has_adapters = any(not weight.requires_grad for weight in called.parameters())
        if plan.schedule == "zero-bubble" and has_adapters and torch.__version__ < (2, 13):
            raise UserError(
                f"A zero-bubble schedule of layers with adapters needs torch 2.13, and this is {torch.__version__}; "
                "use a plan whose schedule is 1f1b or interleaved."
            )
        self.parts = mine.parts
        self.tied = mine.tied
        self.everywhere = _names_everywhere(self.inner, mine)
        """Trained weights that each stage has, beside its layers."""
        self.group = group
        self.ranks = plan.mesh.pipeline
        self.schedule = plan.schedule
        self.micro_batches = stages.micro_batches(plan.accumulation_steps, self.ranks)
        width = self.inner.config.get_text_config().hidden_size
        self.hidden_shape = (1, plan.micro_batch * plan.sequence_length, width)
        self.dtype = getattr(torch, DTYPES[plan.precision])
        self.device = torch.device(plan.device)
        self.sent_from = torch.device("cpu") if "cuda:gloo" in dist.get_backend_config(group) else self.device
        """Where tensors must be to be sent to another rank."""
        self._step: _Step | None = None
        self._made: Any = None

    @property
    def inner(self) -> nn.Module:
        """What remains of the model here."""
        return self.model.model if isinstance(self.model, Entrance) else self.model

    @property
    def repeated(self) -> set[str]:
        """Weights of which an earlier stage has the same."""
        return set() if self.parts[0].is_first else {*self.everywhere, *filter(None, [self.tied])}

    @property
    def has_loss(self) -> bool:
        """Whether this rank has the last stage."""
        return self.parts[-1].is_last

    def run(
        self,
        inputs: Sequence[Inputs],
        spec: ForwardSpec,
        factor: float,
        z_loss: float,
        draw: Callable[[int, int], None],
    ) -> list[torch.Tensor]:
        """Forward and backward of all micro-batches of a step; returns the weighted losses of each one's targets, on
        the ranks that have them. The loss is multiplied by `factor`; `draw` is told micro-batch and stage before each
        forward pass."""
        idle = replace(inputs[0], weights=torch.zeros_like(inputs[0].weights))
        filled = [*inputs, *[idle] * (self.micro_batches - len(inputs))]
        self._step = _Step(filled, spec, factor, z_loss, draw)
        schedule = self._schedule()
        numbers = torch.arange(self.micro_batches)  # the schedules want something that they can cut
        schedule.step(*([numbers] if self.parts[0].is_first else []), target=numbers if self.has_loss else None)
        if isinstance(self.model, Sharded):
            self.model.end_backward()
        losses, self._step = self._step.losses, None
        return losses[: len(inputs)]

    def forward(
        self,
        function: Callable[..., Any],
        inputs: Inputs,
        spec: ForwardSpec,
        z_loss: float = 0.0,
        weigh: None = None,
        lesson: None = None,
    ) -> Any:
        """`token_losses` without a backward pass. The last stage's total counts for all stages, whose own is 0."""
        assert not torch.is_grad_enabled()
        assert (weigh, lesson) == (None, None), "the planner refuses objectives other than SFT in a pipeline"
        hidden = None
        for part in self.parts:
            if not part.is_first:
                received = torch.empty(self.hidden_shape, dtype=self.dtype, device=self.sent_from)
                dist.recv(received, group=self.group, group_src=(part.number - 1) % self.ranks)
                hidden = received.to(self.device)
            if part.is_last:
                total, losses_n = self._call(_loss_of, part, inputs, spec, z_loss, hidden)
                return total * self.ranks, losses_n
            hidden = self._call(_hidden_of, part, inputs, hidden)
            sent = hidden.to(self.sent_from)
            dist.send(sent, group=self.group, group_dst=(part.number + 1) % self.ranks)
        return torch.zeros((), device=inputs.tokens.device), torch.zeros_like(inputs.weights)

    def finish_gradients(self, optimizer: Optimizer) -> None:
        """After all backward passes: a weight that several stages hold gets the gradients of all of them."""
        for name in self.everywhere:
            self._sum_over_stages(optimizer, name)
        if (gradient := self._tied_gradient(optimizer)) is None:
            return
        mine = gradient.to(self.sent_from)
        theirs = torch.empty_like(mine)
        other = 0 if self.has_loss else self.ranks - 1
        operations = [
            dist.P2POp(dist.isend, mine, group=self.group, group_peer=other),
            dist.P2POp(dist.irecv, theirs, group=self.group, group_peer=other),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        gradient += theirs.to(gradient.device)

    def norm_of_all(self, norm: torch.Tensor, optimizer: Optimizer) -> torch.Tensor:
        """The norm of the gradients of all stages, from that of this rank's; one that several have counts once."""
        squares = norm.double().square()
        if self.repeated:
            squares -= full_tensor(optimizer.gradient_norm(self.repeated)).double().square()
        dist.all_reduce(squares, group=self.group)
        return squares.sqrt().float()

    def _sum_over_stages(self, optimizer: Optimizer, name: str) -> None:
        weight = optimizer.carrier(name)
        is_there = torch.tensor(float(weight.grad is not None), device=self.device)
        dist.all_reduce(is_there, group=self.group)
        if not is_there:  # no layer uses it
            return
        if weight.grad is None:  # another stage's layers do
            weight.grad = torch.zeros_like(weight)
        dist.all_reduce(local(weight.grad), group=self.group)

    def _tied_gradient(self, optimizer: Optimizer) -> torch.Tensor | None:
        is_end = self.has_loss or self.parts[0].is_first
        if self.tied not in optimizer.weights or not is_end:
            return None
        gradient = optimizer.gradient(self.tied)
        return gradient.to_local() if isinstance(gradient, DTensor) else gradient

    def _call(self, function: Callable[..., Any], part: Stage, *arguments: Any) -> Any:
        if isinstance(self.model, Entrance):
            return self.model(function, part, *arguments)
        return function(self.model, part, *arguments)

    def _schedule(self) -> Any:
        """Made at the first step, with room for what will be received."""
        if self._made is None:
            hidden = torch.empty(self.hidden_shape, dtype=self.dtype, device="meta", requires_grad=True)
            stages = [
                PipelineStage(
                    _Stage(self, part),
                    part.number,
                    part.count,
                    self.sent_from,
                    input_args=(torch.empty(1, dtype=torch.int64, device="meta") if part.is_first else hidden,),
                    output_args=(torch.empty(1, device="meta", requires_grad=True) if part.is_last else hidden,),
                    group=self.group,
                )
                for part in self.parts
            ]
            kind = SCHEDULES[self.schedule]
            self._made = kind(
                stages[0] if self.schedule == "1f1b" else stages,
                self.micro_batches,
                loss_fn=lambda total, _: total.sum(),
                scale_grads=False,
            )
        return self._made


@dataclass
class _Step:
    """What the stages need to know of the step that is under way."""

    inputs: list[Inputs]
    spec: ForwardSpec
    factor: float
    z_loss: float
    draw: Callable[[int, int], None]
    losses: list[torch.Tensor] = field(default_factory=list)
    backward_passes: int = 0


class _Stage(nn.Module):
    """What a schedule calls, micro-batch after micro-batch: hidden states in, hidden states or the loss out."""

    def __init__(self, pipeline: Pipelined, part: Stage):
        super().__init__()
        self.model = pipeline.model  # whose weights the schedule wants to see
        self.part = part
        self.pipeline = (pipeline,)  # in a tuple, since this is no part of it
        self.calls = 0

    def forward(self, received: torch.Tensor) -> torch.Tensor:
        (pipeline,), part = self.pipeline, self.part
        step = pipeline._step
        index = self.calls % pipeline.micro_batches
        self.calls += 1
        step.draw(index, part.number)
        hidden = None if part.is_first else received.to(pipeline.device)
        if not part.is_last:
            out = pipeline._call(_hidden_of, part, step.inputs[index], hidden)
        else:
            loss_of = _split_loss_of if pipeline.schedule == "zero-bubble" else _scaled_loss_of
            out, losses_n = pipeline._call(
                loss_of, part, step.inputs[index], step.spec, step.z_loss, hidden, step.factor
            )
            step.losses.append(losses_n.detach() * step.inputs[index].weights)
        out = out.to(pipeline.sent_from)
        if isinstance(pipeline.model, Sharded):
            out.register_hook(lambda _: self._before_backward(index))
        return out

    def _before_backward(self, index: int) -> None:
        (pipeline,) = self.pipeline
        step = pipeline._step
        step.backward_passes += 1
        last = pipeline.micro_batches - 1
        pipeline.model.begin_micro_batch(is_last=index == last)
        # Other micro-batches are between their two passes: what is known of their order must be kept.
        pipeline.model.set_is_last_backward(step.backward_passes == len(pipeline.parts) * pipeline.micro_batches)


# What stages compute, as functions of the model


def _hidden_of(model: nn.Module, part: Stage, inputs: Inputs, hidden: torch.Tensor | None) -> torch.Tensor:
    with part.active():
        return packed_hidden_states(model, inputs, hidden)


def _loss_of(
    model: nn.Module, part: Stage, inputs: Inputs, spec: ForwardSpec, z_loss: float, hidden: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return losses_of_hidden(model, _hidden_of(model, part, inputs, hidden)[0], inputs, spec, z_loss)


def _scaled_loss_of(
    model: nn.Module,
    part: Stage,
    inputs: Inputs,
    spec: ForwardSpec,
    z_loss: float,
    hidden: torch.Tensor,
    factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    total, losses_n = _loss_of(model, part, inputs, spec, z_loss, hidden)
    return total.reshape(1) * factor, losses_n


def _split_loss_of(
    model: nn.Module,
    part: Stage,
    inputs: Inputs,
    spec: ForwardSpec,
    z_loss: float,
    hidden: torch.Tensor,
    factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """For schedules that take the gradients of weights apart from those of hidden states: the loss makes both at once,
    so the head gets its own here, and what is returned has the same gradient as the loss for all that lies below."""
    below = _hidden_of(model, part, inputs, hidden)
    above = below.detach().requires_grad_()
    total, losses_n = losses_of_hidden(model, above[0], inputs, spec, z_loss)
    (total * factor).backward()
    return (below * above.grad).sum().reshape(1) * 1.0, losses_n


# The model's parts


class _PassedOver(nn.Module):
    """In the place of a layer that is another stage's."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        if (kind := getattr(layer, "attention_type", None)) is not None:  # by which models choose a layer's mask
            self.attention_type = kind

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states


def _find_layers(model: nn.Module) -> tuple[nn.Module, str, nn.ModuleList]:
    """The module that has the list of decoder layers, the list's name there, and the list."""
    layers = decoder_layers(model)
    for holder in model.modules():
        for name, child in holder.named_children():
            if isinstance(child, nn.ModuleList) and layers and list(dict.fromkeys(child)) == layers:
                return holder, name, child
    raise UserError(f"{type(model).__name__} has no list of layers that could be cut into stages.")


def _behind_layers(holder: nn.Module, layers: nn.ModuleList) -> list[str]:
    """Modules with weights that come after the layers: the last norm."""
    names = [name for name, _ in holder.named_children()]
    at = next(name for name, child in holder.named_children() if child is layers)
    behind = names[names.index(at) + 1 :]
    return [name for name in behind if next(getattr(holder, name).parameters(), None) is not None]


def _leave(model: nn.Module, mine: Stages) -> None:
    """Take everything out of the model that other ranks have."""
    has_first, has_last = mine.parts[0].is_first, mine.parts[-1].is_last
    holder, name, layers = _find_layers(model)
    here = set(mine.layers)
    setattr(holder, name, nn.ModuleList(layer if layer in here else _PassedOver(layer) for layer in layers))
    if not has_last:
        for behind in _behind_layers(holder, getattr(holder, name)):
            setattr(holder, behind, nn.Identity())
        model.set_output_embeddings(nn.Identity())
    if not has_first and not (has_last and mine.tied):
        model.set_input_embeddings(nn.Identity())


def _names_everywhere(model: nn.Module, mine: Stages) -> list[str]:
    """Trained weights that are neither a layer's nor those of the embedding, the last norm and the head."""
    holder, _, layers = _find_layers(model)
    behind = [getattr(holder, name) for name in _behind_layers(holder, layers)]
    apart = [*mine.layers, *behind, model.get_input_embeddings(), model.get_output_embeddings()]
    known = {weight for module in apart for weight in module.parameters()}
    return [name for name, weight in model.named_parameters() if weight.requires_grad and weight not in known]


def _check_layers_are_apart(model: nn.Module, parts: Sequence[Stage], ranks: int) -> None:
    """UserError where ranks would each have a part of the gradient of one layer's weight."""
    layers = {layer: part.number % ranks for part in parts for layer in part.layers}
    places: dict[nn.Parameter, set[int | None]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        above = [model.get_submodule(name.rsplit(".", depth)[0]) for depth in range(1, name.count(".") + 1)]
        stage = next((layers[owner] for owner in (module, *above) if owner in layers), None)
        for weight in module.parameters(recurse=False):
            places.setdefault(weight, set()).add(stage)
    if any(len(stages) > 1 for stages in places.values()) or len(layers) < sum(len(part.layers) for part in parts):
        raise UserError(
            f"{type(model).__name__} cannot be cut into pipeline stages: layers of several stages, or layers and what "
            "surrounds them, share weights; use a plan without a pipeline."
        )


def _tied_name(model: nn.Module) -> str | None:
    """The name of the weight that is embedding and head at once."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    weights = {id(weight) for weight in head.parameters()} & {id(weight) for weight in embedding.parameters()}
    return next((name for name, weight in model.named_parameters() if id(weight) in weights), None)


def _size(module: nn.Module) -> int:
    """Values of a module's weights; of those in 4 bits, there are two in a byte."""
    tensors = (*module.parameters(), *module.buffers())
    return sum(tensor.numel() * (2 if tensor.dtype == torch.uint8 else 1) for tensor in tensors)
