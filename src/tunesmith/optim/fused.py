"""AdamW and Lion with states in any of the formats of `kernels.update`, one kernel a parameter and nothing beside it.

Trained weights in bf16 are rounded stochastically (the mean is exact), drawn from (seed, step, parameter), so that a
step is a function of what stood before it and a resumed run goes on bit for bit. States and masters may live in host
memory or on disk (`optim.offload`), and a parameter may be updated as soon as its gradient is there
(optimizer-in-backward). Of a weight that lies over several ranks each updates its rows; blocks of states lie within
rows, so these are the numbers of one rank.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tunesmith.kernels.update import update_
from tunesmith.kernels.update_states import Algorithm, States, new_state
from tunesmith.optim.offload import DISK_PIECE, PIECE, Event, FromDisk, Offload, pin, visit_bytes
from tunesmith.optim.scratch import Scratch, aligned


class Fused(torch.optim.Optimizer):
    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        algorithm: Algorithm,
        states: States,
        betas: tuple[float, float],
        epsilon: float,
        seed: int,
        models: Mapping[nn.Parameter, nn.Parameter],
        prerounded: bool = False,
        offload: bool = False,
        scratch: Scratch | None = None,
    ):
        """`models`: the model's own weight for each parameter that is its master, written in the same pass; its
        gradient is used. `prerounded`: fp32 weights are held as `kernels.update` says. `offload`: states live in host
        memory, or in `scratch`; so do masters that were made there."""
        super().__init__(groups, {"lr": 0.0, "betas": betas, "eps": epsilon})
        self.algorithm: Algorithm = algorithm
        self.states: States = states
        self.seed = seed
        self.models = models
        self.is_prerounded = prerounded
        everything = [weight for group in self.param_groups for weight in group["params"]]
        self.numbers = {weight: number for number, weight in enumerate(everything)}
        self.groups = {weight: group for group in self.param_groups for weight in group["params"]}
        self.starts = {weight: start_of(weight) for weight in everything}
        self.is_offloaded = offload
        self.scratch = scratch
        self.piece = PIECE if scratch is None else DISK_PIECE
        self.offload: Offload | None = None
        self.factor: torch.Tensor | None = None
        """By which gradients are multiplied on the way."""
        self.order = everything
        """In which weights are updated."""
        self.is_overlapped = False
        """Updates run beside what comes after them, which must `finish_update` before it uses their weights."""
        self.updating: dict[nn.Parameter, _Update] = {}
        if scratch is not None:  # all of it has its place already
            for weight in everything:
                self.state[weight].update(self.make_state(weight))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        assert closure is None
        self.finish_update()
        with self._visitors().overlapped() if self.is_overlapped else nullcontext():
            for weight in self.order:
                model = self._model(weight)
                if model.grad is None:
                    continue
                self.update(weight)
                if self.is_overlapped:
                    self.updating[model] = _Update(self._visitors().mark(), model.grad, self.factor)
        self.end_step()

    def finish_update(self, weights: Iterable[nn.Parameter] | None = None) -> None:
        """Let what comes next on the device wait for the updates of these weights of the model, or of all. Their
        gradients are held until then."""
        for weight in list(self.updating) if weights is None else weights:
            if (update := self.updating.pop(weight, None)) is not None:
                self._visitors().let_wait(update.done)

    @torch.no_grad()
    def update(self, weight: nn.Parameter) -> None:
        """One parameter's step, from its gradient."""
        state = self.state[weight]
        if not state:
            state.update(self.make_state(weight))
        state["step"] += 1
        step, group, model = int(state["step"]), self.groups[weight], self._model(weight)
        options = {
            "algorithm": self.algorithm,
            "states": self.states,
            "rate": group["lr"],
            "decay": group["weight_decay"],
            "betas": group["betas"],
            "epsilon": group["eps"],
            "step": step,
            "seed": _draw(self.seed, step, self.numbers[weight]),
            "factor": self.factor,
            "prerounded": self.is_prerounded,
        }
        assert model.grad is not None
        gradient, copy = local(model.grad), model.detach() if model is not weight else None
        if not gradient.numel():
            return
        mine, start = local(weight.detach()), self.starts[weight]
        held = {name: local(value) for name, value in state.items()}
        if not self.is_offloaded:
            update_(mine, gradient, held, copy=copy, start=start, **options)
            return
        for first, host in self._pieces(weight, held):
            rows = slice(first, first + next(iter(host.values())).shape[0])
            with self._visitors().visit((self.numbers[weight], first), host) as here:
                master = here.get("master", mine[rows])
                there = copy[rows] if copy is not None else None
                begin = start + first * (mine.numel() // mine.shape[0])
                update_(master, gradient[rows], here, copy=there, start=begin, **options)

    def end_step(self) -> None:
        if self.offload is not None:
            self.offload.end_step()

    def wait(self) -> None:
        """Until states and masters that live elsewhere may be read there, and weights here."""
        self.finish_update()
        if self.offload is not None:
            self.offload.wait()

    def make_state(self, weight: nn.Parameter) -> dict[str, torch.Tensor]:
        """The state before the first step, where it will live."""
        device = torch.device("meta" if self.scratch else "cpu") if self.is_offloaded else weight.device
        state = new_state(local(weight.detach()), self.algorithm, self.states, device=device)
        if self.scratch:
            state = {name: self.scratch.zeros(value.shape, value.dtype) for name, value in state.items()}
        elif self.is_offloaded:
            state = {name: pin(value) for name, value in state.items()}
        return {"step": torch.zeros(()), **{name: spread(value, weight) for name, value in state.items()}}

    def set_state(self, weight: nn.Parameter, values: Mapping[str, torch.Tensor]) -> None:
        """Values read from a checkpoint, spread as the weight is where it is; into their places, or there already."""
        state = self.state[weight] or self.make_state(weight)
        for name, value in values.items():
            if local(state[name]).data_ptr() != local(value).data_ptr():
                local(state[name]).copy_(local(value))
        self.state[weight].update(state)

    def fits(self, weight: nn.Parameter, values: Mapping[str, torch.Tensor]) -> bool:
        """Whether these values, read from a checkpoint, are a state of this weight."""
        expected = new_state(weight, self.algorithm, self.states, device=torch.device("meta"))
        expected["step"] = torch.empty((), device="meta")
        return values.keys() == expected.keys() and all(
            (value.shape, value.dtype) == (expected[name].shape, expected[name].dtype) for name, value in values.items()
        )

    def _model(self, weight: nn.Parameter) -> nn.Parameter:
        """What the model computes with, and what has the gradient."""
        return self.models.get(weight, weight)

    def _visitors(self) -> Offload:
        """The way between the device and where states live."""
        if self.offload is None:
            device, size = self._model(self.order[0]).device, max(map(visit_bytes, self._visits()))
            self.offload = FromDisk(device, size, self.scratch) if self.scratch else Offload(device, size)
        return self.offload

    def _pieces(
        self, weight: nn.Parameter, state: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """What visits the device, some of this rank's rows at a time: the first row, and tensors that share memory with
        the whole."""
        held, mine = {name: value for name, value in state.items() if name != "step"}, local(weight.detach())
        if weight in self.models:
            held["master"] = mine
        rows = max(1, self.piece * len(mine) // max(1, mine.numel()))
        for first in range(0, len(mine), rows):
            yield first, {name: value[first : first + rows] for name, value in held.items()}

    def _visits(self) -> Iterator[dict[str, torch.Tensor]]:
        """The largest piece of each parameter, as it would be."""
        for weight in self.numbers:
            state = new_state(local(weight.detach()), self.algorithm, self.states, device=torch.device("meta"))
            for _, piece in itertools.islice(self._pieces(weight, state), 1):
                yield piece


class _Update(NamedTuple):
    """One that may still be under way, and what it reads."""

    done: Event
    gradient: torch.Tensor
    factor: torch.Tensor | None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def start_of(weight: torch.Tensor) -> int:
    """The first element of this rank's rows."""
    if not isinstance(weight, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    return offset[0] * (weight.numel() // weight.shape[0])


def home_bytes(weight: torch.Tensor, algorithm: Algorithm, states: States, *, has_master: bool) -> int:
    """What this rank's part of a weight takes in a file."""
    mine = local(weight.detach())
    state = new_state(mine, algorithm, states, device=torch.device("meta"))
    return visit_bytes(state) + (aligned(4 * mine.numel()) if has_master else 0)


def spread(part: torch.Tensor, weight: torch.Tensor, shape: torch.Size | None = None) -> torch.Tensor:
    """This rank's part of a tensor (of this shape, or with the weight's rows) that lies over ranks as the weight does.
    It stays on its device, which may be another than the weight's; `DTensor.from_local` would move it there."""
    if not isinstance(weight, DTensor):
        return part
    shape = shape or torch.Size((weight.shape[0], *part.shape[1:]))
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), part.dtype)
    return DTensor(part, DTensorSpec(weight.device_mesh, weight.placements, meta), requires_grad=False)


def _draw(seed: int, step: int, number: int) -> int:
    """31 bits for a parameter's step."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{step}:{number}".encode()).digest()[:4], "big") >> 1
