"""What this machine has: processors, memory, GPUs. Asks the system and the GPU driver, never torch."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

import psutil

from tunesmith.plan.plan import Part


class Gpu(Part):
    name: str
    memory: int
    """Bytes in all."""
    free: int
    """Bytes free now."""
    capability: tuple[int, int]
    """Compute capability; bf16 needs 8.0."""


class Hardware(Part):
    processor: str
    cores: int
    """Cores this process may use."""
    memory: int
    """Bytes of host memory this process may use."""
    available: int
    """Bytes of it that are free now."""
    has_fast_bf16: bool
    """The processor has bf16 arithmetic."""
    gpus: tuple[Gpu, ...] = ()


def probe() -> Hardware:
    memory = psutil.virtual_memory()
    limit = _cgroup_limit() or memory.total
    return Hardware(
        processor=_processor_name(),
        cores=usable_cores(),
        memory=min(memory.total, limit),
        available=min(memory.available, limit),
        has_fast_bf16=has_fast_bf16(),
        gpus=_gpus(),
    )


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def has_fast_bf16() -> bool:
    """Whether the processor multiplies bf16 itself; without that, bf16 on a CPU is hundreds of times slower."""
    flags = _cpu_fields("flags", "Features")
    return bool(flags & {"amx_bf16", "avx512_bf16", "bf16"})


def _cpu_fields(*names: str) -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return {word for line in lines if line.split(":")[0].strip() in names for word in line.split(":", 1)[1].split()}


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cgroup_limit() -> int | None:
    """The memory limit of a container, which psutil does not see."""
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(file).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None


def _gpus() -> tuple[Gpu, ...]:
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        found = []
        for index in _visible(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            name = pynvml.nvmlDeviceGetName(handle)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            found.append(
                Gpu(
                    name=name.decode() if isinstance(name, bytes) else name,
                    memory=int(memory.total),
                    free=int(memory.free),
                    capability=(int(major), int(minor)),
                )
            )
        return tuple(found)
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def _visible(count: int) -> list[int]:
    """GPUs that CUDA_VISIBLE_DEVICES leaves visible (names by UUID count as all: the driver sorts those out)."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return list(range(count))
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.lstrip("-").isdigit() for part in parts):
        return list(range(count))
    visible = []
    for part in parts:
        if not 0 <= int(part) < count:
            break  # CUDA ignores what follows an invalid number
        visible.append(int(part))
    return visible
