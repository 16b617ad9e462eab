"""Measures what this machine's GPU, or its CPU where there is none, really does, once, so that plans use its own
rates instead of the catalogue's or a guess."""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tunesmith.disk import writing
from tunesmith.plan.hardware import (
    DISK,
    Rates,
    cpu_key,
    has_fast_bf16,
    keep_measured,
    measured_links,
    measured_links_file,
    measured_rates,
    measured_rates_file,
)

SIZES = ((8192, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096))
"""Tokens, inputs and outputs of the matmuls that are measured: those of an 8B model."""
CPU_SIZES = ((1024, 576, 1536), (1024, 1536, 576))
"""Those of a model that is trained on a CPU."""
DISK_BYTES = 1 << 30
"""Written and read: more than what a drive takes into its own memory at once."""


def calibrate() -> str:
    """Measure matmuls, memory, host link and disk, keep the rates for later plans, and say what was found."""

    keep_measured(measured_links_file(), measured_links())  # before it takes minutes
    links = measured_links() | {DISK: _disk_rate()}
    keep_measured(measured_links_file(), links)
    return f"{_calibrate_device()}; disk {links[DISK] / 1e9:.1f} GB/s"


def _calibrate_device() -> str:
    import torch

    if not torch.cuda.is_available():
        return _calibrate_processor()
    name = torch.cuda.get_device_name()
    has_fp8 = torch.cuda.get_device_capability() >= (8, 9)
    half = torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16
    rates = Rates(
        fp32=_matmul_rate(torch.float32),
        half=_matmul_rate(half),
        fp8=_fp8_rate() if has_fp8 else 0.0,
        bandwidth=_bandwidth(),
        host_link=_host_link(),
        is_measured=True,
    )
    _keep(name, rates)
    fp8 = f", fp8 {rates.fp8 / 1e12:.0f}" if has_fp8 else ""
    return (
        f"{name}: matmuls {rates.half / 1e12:.0f} TFLOP/s in half precision, {rates.fp32 / 1e12:.1f} in fp32{fp8}; "
        f"memory {rates.bandwidth / 1e12:.2f} TB/s; host link {rates.host_link / 1e9:.0f} GB/s; kept in "
        f"{measured_rates_file()}"
    )


def _calibrate_processor() -> str:
    import torch

    fp32 = _matmul_rate(torch.float32, CPU_SIZES, "cpu")
    half = _matmul_rate(torch.bfloat16, CPU_SIZES, "cpu") if has_fast_bf16() else fp32 / 100
    source = torch.empty(1 << 24)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / _host_seconds(lambda: target.copy_(source))
    _keep(cpu_key(), Rates(fp32=fp32, half=half, bandwidth=bandwidth, host_link=bandwidth, is_measured=True))
    bf16 = f", {half / 1e9:.0f} in bf16" if has_fast_bf16() else ""
    return (
        f"{cpu_key()}: matmuls {fp32 / 1e9:.0f} GFLOP/s in fp32{bf16}; memory {bandwidth / 1e9:.0f} GB/s; "
        f"kept in {measured_rates_file()}"
    )


def _keep(name: str, rates: Rates) -> None:
    kept = measured_rates() | {name: rates}
    keep_measured(measured_rates_file(), {device: of_device.model_dump() for device, of_device in kept.items()})


def _disk_rate() -> float:
    """Bytes a second to and from the disk of this folder: a file written through to it, then read without what the
    system has kept of it."""
    block = os.urandom(1 << 24)
    here = "make room there, or start this in another folder: the disk is measured here"
    with writing(Path.cwd(), here), tempfile.TemporaryFile(dir=".", buffering=0) as file:
        began = time.perf_counter()
        for _ in range(DISK_BYTES // len(block)):
            file.write(block)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        while file.read(len(block)):
            pass
        return 2 * DISK_BYTES / (time.perf_counter() - began)


def _host_seconds(work: Callable[[], object], rounds: int = 5) -> float:
    """Of the quickest of some calls: what disturbs only makes slower."""
    work()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def _seconds(work: Callable[[], object], rounds: int = 20) -> float:
    """Of one call, on the GPU's own clock, after a warm-up long enough for its frequency to settle."""
    import torch

    for _ in range(rounds):
        work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(rounds):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / rounds


def _matmul_rate(dtype, sizes: tuple[tuple[int, int, int], ...] = SIZES, device: str = "cuda") -> float:
    import torch

    seconds = flops = 0.0
    for tokens, inputs, outputs in sizes:
        a = torch.randn(tokens, inputs, device=device, dtype=dtype)
        b = torch.randn(outputs, inputs, device=device, dtype=dtype)
        work = functools.partial(torch.matmul, a, b.t())
        seconds += _seconds(work) if device == "cuda" else _host_seconds(work)
        flops += 2.0 * tokens * inputs * outputs
    return flops / seconds


def _fp8_rate() -> float:
    import torch

    seconds = flops = 0.0
    for tokens, inputs, outputs in SIZES:
        a = torch.randn(tokens, inputs, device="cuda").to(torch.float8_e4m3fn)
        b = torch.randn(outputs, inputs, device="cuda").to(torch.float8_e4m3fn)
        row, column = torch.ones(tokens, 1, device="cuda"), torch.ones(1, outputs, device="cuda")
        multiply = functools.partial(getattr(torch, "_scaled_mm"), a, b.t(), row, column)  # noqa: B009
        seconds += _seconds(functools.partial(multiply, out_dtype=torch.bfloat16))
        flops += 2.0 * tokens * inputs * outputs
    return flops / seconds


def _bandwidth() -> float:
    import torch

    source = torch.empty(1 << 28, device="cuda", dtype=torch.float32)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source))


def _host_link() -> float:
    import torch

    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    return host.nbytes / _seconds(lambda: device.copy_(host, non_blocking=True), rounds=5)
