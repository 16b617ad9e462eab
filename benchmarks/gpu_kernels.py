"""Our kernels on a GPU over their tiles and beside variants of them: one line each, checked against plain torch.

    python benchmarks/gpu_kernels.py [--only TEXT ...] [--rows 16384] [--deadline 85]
    TRITON_INTERPRET=1 python benchmarks/gpu_kernels.py --device cpu --rows 40 --narrow 64

Median of 20 calls, the cache emptied before each. Several processes first run everything on few rows, so that what is
timed afterwards, alone, is compiled already. The first of each group is what is in use, or what it replaced; the last
column is the share of an H200's copy bandwidth, with each tensor read or written once. A variant that fails says why,
and the others go on. The second form shows that the script runs; its times say nothing.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from tunesmith.kernels import quantize, reference, swiglu
from tunesmith.kernels.gating import SILU

CALLS = 20
COPY_BYTES_PER_SECOND = 4.27e12
FLUSH_BYTES = 1 << 30
"""So much that the CPU has launched the next call before the GPU is done with it."""
WARM_ROWS = 512
RANK = 16


@dataclass(frozen=True)
class Group:
    """Variants of one thing: `make` gives the inputs for so many rows, `check` raises where a result is wrong."""

    name: str
    make: Callable[[int, str], Any]
    variants: dict[str, Callable[[Any], Any]]
    check: Callable[[Any, Any], None]
    bytes_a_row: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--narrow", type=int, default=1, help="widths are divided by this")
    parser.add_argument("--only", nargs="*", default=[], help="groups whose name contains one of these")
    parser.add_argument("--deadline", type=float, default=85.0, help="seconds after which nothing more is timed")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    chosen = [
        group
        for group in groups(options.narrow)
        if not options.only or any(text in group.name for text in options.only)
    ]
    if options.compile is not None:
        compile_share(chosen, options.compile, options.workers)
        return
    began = time.perf_counter()
    if options.device == "cuda":
        compile_all(options.workers, until=began + 0.6 * options.deadline)
        print(f"{torch.cuda.get_device_name()}, {options.rows} rows; compiled in {time.perf_counter() - began:.0f} s")
    for group in chosen:
        measure(group, options.rows, options.device, until=began + options.deadline)
    print(f"{time.perf_counter() - began:.0f} s in all")


def compile_all(workers: int, until: float) -> None:
    """What does not end in time is compiled when its turn to be timed comes."""
    started = [
        subprocess.Popen([sys.executable, *sys.argv, "--compile", str(number)], stderr=subprocess.DEVNULL)
        for number in range(workers)
    ]
    for process in started:
        try:
            process.wait(max(0.1, until - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def compile_share(chosen: list[Group], number: int, workers: int) -> None:
    jobs = [(group, run) for group in chosen for run in group.variants.values()]
    for group, run in jobs[number::workers]:
        try:
            run(group.make(WARM_ROWS, "cuda"))
        except Exception:  # said when its turn to be timed comes
            continue


def measure(group: Group, rows: int, device: str, until: float) -> None:
    print(f"\n{group.name}", flush=True)
    if time.perf_counter() > until:
        print("  not begun: no time left")
        return
    try:
        inputs = group.make(rows, device)
    except Exception as error:
        print(f"  no inputs: {_line(error)}", flush=True)
        return
    for name, run in group.variants.items():
        if time.perf_counter() > until:
            print(f"  {name:44} no time left")
            continue
        try:
            group.check(inputs, run(inputs))
            seconds = timed(partial(run, inputs), device)
            share = rows * group.bytes_a_row / seconds / COPY_BYTES_PER_SECOND
            print(f"  {name:44} {seconds * 1e6:9.1f} us {share:7.0%}", flush=True)
        except Exception as error:
            print(f"  {name:44} failed: {_line(error)}", flush=True)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def timed(run: Callable[[], Any], device: str) -> float:
    """Median in seconds. The cache is emptied by reading: written lines would go to memory during the call."""
    if device == "cpu":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
    pairs = []
    for _ in range(3):
        run()
    for _ in range(CALLS):
        flush.amax()
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        run()
        last.record()
        pairs.append((first, last))
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(last) for first, last in pairs) / 1e3


# What is measured.


def groups(narrow: int) -> Iterator[Group]:
    for width, is_gradient in ((14336 // narrow, False), (28672 // narrow, False), (6144 // narrow, True)):
        yield quantized(width, is_gradient)
    for width in (4096 // narrow, 11008 // narrow):
        yield both_ways(width)
    yield gated(14336 // narrow, backward=False)
    for scaled in (False, True):
        yield gated(14336 // narrow, backward=True, scaled=scaled)


def quantized(width: int, is_gradient: bool) -> Group:
    def make(rows: int, device: str) -> tuple:
        return _rows(rows, width, device, is_gradient)

    def in_use(inputs: tuple, per_warp: int) -> tuple:
        with patch.object(quantize, "PER_WARP", per_warp):
            quantize.quantize_rows_into(*inputs)
        return inputs

    def check(_, found: tuple) -> None:
        x, factor, values, scale = found
        for some in _some_rows(x):
            _check_rows(x[some], factor, values[some], scale[some])

    variants: dict[str, Callable[[Any], Any]] = {
        f"a row held, {per_warp} values a warp": partial(in_use, per_warp=per_warp)
        for per_warp in (2048, 512, 1024, 4096)
    }
    name = f"quantize: rows {width} wide" + (" with a factor" if is_gradient else "")
    return Group(name, make, variants, check, 3 * width)


def both_ways(width: int) -> Group:
    """A gradient by its rows and, transposed, by its columns: in three passes, and in two."""

    def make(rows: int, device: str) -> tuple:
        x, _, values, scale = _rows(rows, width, device, has_factor=False)
        transposed = values.new_empty(width, rows), scale.new_empty(width, 1)
        return x, values, scale, *transposed, scale.new_empty(width)

    def apart(inputs: tuple) -> tuple:
        x, values, scale, values_turned, scale_turned, _ = inputs
        quantize.quantize_rows_into(x, None, values, scale)
        quantize.quantize_transposed_into(x, values_turned, scale_turned)
        return inputs

    def together(inputs: tuple, stages: int, per_warp: int, at_work: int, is_turned: bool = True) -> tuple:
        x, values, scale, values_turned, scale_turned, largest = inputs
        sizes = {"STAGES": stages, "PER_WARP": per_warp, "AT_WORK": at_work}
        with patch.object(quantize, "WITH_MAXIMA", sizes):
            quantize.quantize_with_maxima_into(x, values, scale, largest)
        if is_turned:
            quantize.quantize_transposed_into(x, values_turned, scale_turned, largest)
        return inputs

    def check(_, found: tuple) -> None:
        x, values, scale, values_turned, scale_turned, _ = found
        for some in _some_rows(x):
            _check_rows(x[some], None, values[some], scale[some])
        _check_rows(x[:, :128].t(), None, values_turned[:128], scale_turned[:128])
        _check_rows(x[:, -128:].t(), None, values_turned[-128:], scale_turned[-128:])

    variants: dict[str, Callable[[Any], Any]] = {"three passes": apart}
    for stages, per_warp, at_work in (
        (3, 512, 16384),
        (3, 1024, 16384),
        (2, 512, 16384),
        (2, 1024, 16384),
        (4, 512, 16384),
        (3, 512, 8192),
        (3, 1024, 24576),
        (3, 512, 33024),
    ):
        sizes = {"stages": stages, "per_warp": per_warp, "at_work": at_work}
        variants[_named("two", sizes)] = partial(together, **sizes)
        if at_work == 16384 and stages == 3:
            variants[_named("not transposed", sizes)] = partial(together, **sizes, is_turned=False)
    return Group(f"both ways: {width} wide", make, variants, check, 6 * width)


FORWARD = (
    (16, 128, 4, 3, None, 16),
    (16, 128, 4, 2, None, 16),
    (16, 128, 4, 3, None, 32),
    (16, 256, 8, 3, None, 16),
    (32, 128, 8, 3, None, 16),
    (16, 128, 4, 1, 2, 16),
    (16, 128, 4, 1, 3, 16),
    (16, 128, 4, 1, 4, 16),
    (16, 128, 4, 1, 3, 32),
    (16, 256, 8, 1, 3, 16),
    (16, 256, 4, 1, 3, 16),
    (32, 64, 4, 1, 3, 16),
    (32, 128, 4, 1, 2, 16),
    (32, 128, 8, 1, 3, 16),
    (32, 128, 8, 1, 3, 8),
)
BACKWARD = (
    (32, 64, 4, 2, None, 16),
    (32, 64, 4, 1, None, 16),
    (32, 64, 4, 2, None, 32),
    (32, 64, 8, 2, None, 16),
    (16, 64, 4, 2, None, 16),
    (32, 64, 4, 1, 2, 16),
    (32, 64, 4, 1, 3, 16),
    (32, 64, 4, 1, 4, 16),
    (32, 64, 4, 1, 2, 32),
    (32, 64, 4, 1, 2, 8),
    (32, 64, 8, 1, 3, 16),
    (16, 64, 4, 1, 3, 16),
    (16, 128, 4, 1, 3, 16),
    (32, 128, 8, 1, 2, 16),
    (64, 32, 4, 1, 2, 16),
)
"""BT, BI, warps, stages, ahead, parts."""


def gated(width: int, backward: bool, scaled: bool = False) -> Group:
    """`scaled`: with the weights' scales folded into the gradient, whose rows then become fp8."""

    def make(rows: int, device: str) -> dict[str, torch.Tensor]:
        draw = partial(_normal, device=device)
        inputs = {"y": draw(rows, 2 * width), "low": draw(rows, 2 * RANK), "d_act": draw(rows, width)}
        inputs |= {"g": draw(rows, RANK), "b_gate": draw(width, RANK) * 0.2, "b_up": draw(width, RANK) * 0.2}
        inputs["a_down"] = draw(RANK, width) * 0.2
        inputs["scale"] = torch.rand(2 * width, device=device) + 0.5
        return inputs | (_plain_sums(inputs) if backward else {})

    def forward(inputs: dict, tile: dict, parts: int) -> torch.Tensor:
        with patch.multiple(swiglu, FORWARD=tile, PARTS=parts):
            return swiglu.swiglu(*(inputs[name] for name in ("y", "low", "b_gate", "b_up")), False, SILU.text)[0]

    def check_forward(inputs: dict, act: torch.Tensor) -> None:
        for some in _some_rows(act):
            wanted = reference.swiglu(*_float(inputs["y"][some], inputs["low"][some], inputs["b_gate"], inputs["b_up"]))
            _check_close("the activation", act[some], wanted)

    def back(inputs: dict, tile: dict, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
        names = ("d_act", "g", "y", "low", "b_gate", "b_up", "a_down", "scale")
        with patch.multiple(swiglu, BACKWARD=tile, PARTS=parts):
            d_y, _, _, sums = swiglu.swiglu_backward(*(inputs[name] for name in names), scaled, SILU.text)
        return d_y, sums

    def check_back(inputs: dict, found: tuple[torch.Tensor, torch.Tensor]) -> None:
        d_y, sums = found
        for some, wanted in zip(_some_rows(d_y), inputs["d_y"], strict=True):
            _check_close("the gradient of gate and up", d_y[some], wanted * inputs["scale"] if scaled else wanted)
        _check_close("the factors' gradients", sums, inputs["sums"])

    variants: dict[str, Callable[[Any], Any]] = {}
    for height, block, warps, stages, ahead, parts in BACKWARD if backward else FORWARD:
        tile = {"BT": height, "BI": block, "AHEAD": ahead, "num_warps": warps, "num_stages": stages}
        loads = f"{stages} stages" if ahead is None else f"{ahead} ahead"
        name = f"{height} x {block}, {loads}, {warps} warps, {parts} parts"
        variants[name] = partial(back if backward else forward, tile=tile, parts=parts)
    name = f"gated: {'backward' if backward else 'forward'}, {width} wide, rank {RANK}" + ", rows in fp8" * scaled
    passed = (10 if backward else 6) + (6 if scaled else 0)
    return Group(name, make, variants, check_back if backward else check_forward, passed * width)


def _plain_sums(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What the backward kernel should give: `d_y` of the rows that are looked at, and the sums over all rows."""
    y, low, d_act, g = (inputs[name] for name in ("y", "low", "d_act", "g"))
    factors = [inputs[name].float().requires_grad_() for name in ("b_gate", "b_up", "a_down")]
    totals = [torch.zeros_like(factor) for factor in factors]

    def gradients(some: slice) -> tuple[torch.Tensor, ...]:
        y_some = y[some].float().requires_grad_()
        act = reference.swiglu(y_some, low[some].float(), factors[0], factors[1])
        outputs, directions = (act, act @ factors[2].t()), (d_act[some].float(), g[some].float())
        return torch.autograd.grad(outputs, (y_some, *factors), directions)

    for start in range(0, len(y), 2048):
        for total, part in zip(totals, gradients(slice(start, start + 2048))[1:], strict=True):
            total += part
    sums = torch.stack([totals[0], totals[1], totals[2].t()])
    return {"d_y": [gradients(some)[0] for some in _some_rows(y)], "sums": sums}


def _rows(rows: int, width: int, device: str, has_factor: bool) -> tuple:
    x = _normal(rows, width, device=device)
    factor = torch.rand(width, device=device) + 0.5 if has_factor else None
    # The interpreter rounds to fp8 in another way.
    values = torch.empty(rows, width, device=device, dtype=torch.float8_e4m3fn if device == "cuda" else torch.float32)
    return x, factor, values, torch.empty(rows, 1, device=device)


def _normal(*shape: int, device: str) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)


def _named(name: str, sizes: dict[str, int]) -> str:
    return f"{name}: " + ", ".join(f"{key} {value}" for key, value in sizes.items())


def _some_rows(x: torch.Tensor) -> tuple[slice, slice]:
    """The first ones and the last."""
    return slice(0, 128), slice(max(0, len(x) - 128), len(x))


def _float(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.float() for tensor in tensors]


def _check_rows(x: torch.Tensor, factor: torch.Tensor | None, values: torch.Tensor, scale: torch.Tensor) -> None:
    wanted = x.float() if factor is None else x.float() * factor
    largest = wanted.abs().amax(1, keepdim=True)
    torch.testing.assert_close(scale, largest / quantize.LARGEST, rtol=1e-5, atol=0)
    error = ((values.float() * scale - wanted).abs() / largest).max().item()
    assert error <= 2**-4, f"values are off by {error:.2g}"


def _check_close(what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    error = ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()
    assert error < 1e-2, f"{what} is off by {error:.2g}"


if __name__ == "__main__":
    main()
