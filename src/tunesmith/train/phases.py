"""What a GPU's allocator holds at the memory phases of a step that can be told apart, to be held against the plan's."""

from __future__ import annotations

import torch
from torch import nn

from tunesmith.model.structure import body
from tunesmith.optim.build import Optimizer
from tunesmith.plan.plan import Plan


class OutOfMemory(Exception):
    """Memory ran out in a step or an evaluation."""

    def __init__(self, step: int, held: dict[str, int], peak: int, *, is_on_gpu: bool):
        super().__init__("out of memory")
        self.step, self.held, self.peak, self.is_on_gpu = step, held, peak, is_on_gpu


def is_out_of_memory(error: BaseException) -> bool:
    # The name is all that torch's words for it have in common on different CPUs.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


class PhaseMemory:
    """Bytes at the latest step's phases: at its start, before and after its last forward pass, before the update.

    What lies between two of them is a category of the plan's memory. A CPU's allocator does not tell: there they are
    all 0. `last` is the last step that is looked at: an allocator does not count what is free in captured passes.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, last: int | None = None):
        self.held: dict[str, int] = {}
        """Allocated at the moment."""
        self.peaks: dict[str, int] = {}
        """The most that was allocated up to it, since the allocator's peak was last reset."""
        self.steps = 0
        self._optimizer = optimizer
        self._last = last
        self._is_within = False
        self._is_told = next(model.parameters()).is_cuda
        decoder = body(model)
        decoder.register_forward_pre_hook(lambda *_: self._before_forward() if model.training else None)
        decoder.register_forward_hook(lambda *_: self._note("after forward") if model.training else None)
        optimizer.step_hooks.append(self._before_update)

    def now(self) -> dict[str, int]:
        """Bytes by what they are for, at the phases that there have been; nothing where the allocator does not tell."""
        held = self.held
        if not self._is_told or "start" not in held:
            return {}
        bytes_of = {"weights and states": held["start"]}
        if "after forward" in held:
            bytes_of["activations"] = held["after forward"] - held["before forward"]
        if "before update" in held:
            bytes_of["gradients"] = held["before update"] - held["start"]
        return bytes_of

    def by_category(self, plan: Plan) -> dict[str, tuple[int, int]]:
        """Bytes predicted and measured, by what they are for, as far as that can be told: after the second step, from
        which on the optimizer has its states."""
        predicted = {phase.name: phase.memory for phase in plan.phases}
        if not predicted or not self._is_told or self.steps < 2:
            return {}
        forward, update = predicted["end of the forward pass"], predicted["optimizer step"]
        held = self.held
        return {
            "weights and states": (
                forward.weights + forward.adapter + forward.master + forward.optimizer,
                held["start"],
            ),
            "activations": (forward.activations, held["after forward"] - held["before forward"]),
            "gradients": (update.gradients, held["before update"] - held["start"]),
        }

    def _before_forward(self) -> None:
        if not self._is_within:
            self._is_within = True
            self._note("start")
        self._note("before forward")

    def _before_update(self) -> None:
        self._note("before update")
        self._is_within = False
        self.steps += 1

    def _note(self, phase: str) -> None:
        if self._last is not None and self.steps >= self._last:
            return
        held_over = self._optimizer.held_over()  # of the step before, and gone before the forward pass has ended
        self.held[phase] = torch.cuda.memory_allocated() - held_over if self._is_told else 0
        self.peaks[phase] = torch.cuda.max_memory_allocated() if self._is_told else 0
