"""What a GPU's allocator holds at the moments of a step that can be told apart, to be held against the plan's."""

from __future__ import annotations

import torch
from torch import nn

from tunesmith.optim.build import Optimizer


class Moments:
    """Bytes at the latest step's moments: before its last forward pass, after it, before the update. A CPU's
    allocator does not tell: there they are all 0.

    What lies between two of them is a category of the plan's memory: before the forward pass weights, masters and
    optimizer states (from the second step on), after it activations too, before the update gradients instead.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer):
        self.held: dict[str, int] = {}
        """Allocated at the moment."""
        self.peaks: dict[str, int] = {}
        """The most that was allocated up to it, since the allocator's peak was last reset."""
        self.is_told = next(model.parameters()).is_cuda
        model.base_model.register_forward_pre_hook(lambda *_: self._note("before forward"))
        model.base_model.register_forward_hook(lambda *_: self._note("after forward"))
        optimizer.parts[0].register_step_pre_hook(lambda *_: self._note("before update"))

    def _note(self, moment: str) -> None:
        self.held[moment] = torch.cuda.memory_allocated() if self.is_told else 0
        self.peaks[moment] = torch.cuda.max_memory_allocated() if self.is_told else 0
