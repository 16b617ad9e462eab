"""How the machines of a run are: memory left on the host, GPUs that are slowed down, ranks that are slower than others.

Read every quarter of a minute, between steps. With several ranks each does the same small piece of work: a collective
makes all of them as slow as the slowest, so the time of a step cannot tell which one that is.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import torch

from tunesmith.parallel.ranks import Ranks
from tunesmith.plan.hardware import host_memory
from tunesmith.train.alerts import Reading

SECONDS = 15.0
"""Between two readings, about."""
SETTLED = 8
"""Steps of a sitting after which it is known how long one takes."""
SIZE = {"cuda": 1024, "cpu": 192}
"""Rows and columns of the matrices that are multiplied."""
REASONS = {
    "nvmlClocksEventReasonHwThermalSlowdown": "thermal slowdown",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "thermal slowdown",
    "nvmlClocksEventReasonSwThermalSlowdown": "thermal slowdown by the driver",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "thermal slowdown by the driver",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "power brake",
}
"""Why clocks are lowered, as NVML's versions name it; that a busy GPU reaches its power limit is usual."""


class Machine:
    """Reads by the number of steps, which all ranks count alike; how many lie between two, the first rank says."""

    def __init__(self, ranks: Ranks, device: torch.device):
        self._ranks, self._device = ranks, device
        self._steps, self._began = 0, time.monotonic()
        self._every: int | None = None
        self._gpu = _Gpu.of(device)

    def after_step(self) -> Reading | None:
        """A matter of all ranks."""
        self._steps += 1
        if self._every is None and self._steps == SETTLED:
            seconds = (time.monotonic() - self._began) / SETTLED
            self._every = int(self._ranks.tell(str(max(1, round(SECONDS / max(seconds, 1e-6))))))
        if self._every is None or self._steps % self._every:
            return None
        return self._read()

    def _read(self) -> Reading:
        here: dict[str, Any] = {"hot": self._gpu.slowed_by() if self._gpu else ""}
        if self._ranks.count > 1:
            here["seconds"] = self._work()
        all_of_them = [json.loads(said) for said in self._ranks.gather(json.dumps(here))]
        total, available = host_memory()
        return Reading(
            available,
            total,
            {rank: of_rank["hot"] for rank, of_rank in enumerate(all_of_them) if of_rank["hot"]},
            [of_rank["seconds"] for of_rank in all_of_them] if self._ranks.count > 1 else (),
        )

    def _work(self) -> float:
        """Seconds of some matmuls, the best of three tries."""
        size = SIZE[self._device.type]
        dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        matrix = torch.full((size, size), 1 / size, dtype=dtype, device=self._device)
        tries = []
        for _ in range(3):
            self._wait()
            began = time.perf_counter()
            for _ in range(8):
                torch.mm(matrix, matrix)
            self._wait()
            tries.append(time.perf_counter() - began)
        return min(tries)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _Gpu:
    """Temperature and clocks, as NVML tells them."""

    def __init__(self, nvml: Any, handle: Any):
        self._nvml, self._handle = nvml, handle

    @classmethod
    def of(cls, device: torch.device) -> _Gpu | None:
        """None where there is no GPU, or nobody tells."""
        if device.type != "cuda":
            return None
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
            return cls(pynvml, pynvml.nvmlDeviceGetHandleByUUID(name))
        except (AttributeError, pynvml.NVMLError):
            return None

    def slowed_by(self) -> str:
        """`91 °C, thermal slowdown`; nothing where its clocks are what they should be."""
        nvml = self._nvml
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            now = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
            reasons = dict.fromkeys(words for name, words in REASONS.items() if now & getattr(nvml, name, 0))
            if reasons:
                degrees = nvml.nvmlDeviceGetTemperature(self._handle, nvml.NVML_TEMPERATURE_GPU)
                return f"{degrees} °C, {', '.join(reasons)}"
        return ""
