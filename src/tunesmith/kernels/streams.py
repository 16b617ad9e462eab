"""The stream on which CUDA graphs are captured."""

from __future__ import annotations

import torch

_streams: dict[torch.device, torch.cuda.Stream] = {}


def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The same for every capture: cuBLAS keeps workspaces of 32 MiB for each stream that it was called on, one for each
    thread that calls it."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
