"""Where the time of a step goes: its kernels, recorded over a few steps, and what they are for."""

from __future__ import annotations

import itertools
import json
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

STEPS = 3
"""Launched ahead, as in training."""
MOST = 200
"""Kernels that are kept, by name."""
GAPS = 12
"""Times without a kernel that are kept, by the kernels around them; those between two steps are among them."""

NAMED = (
    ("attention", r"flash_attn|flash_fwd|flash_bwd|fmha"),
    ("matmul_dtype", r"nvjet_sm\d+_qq|e4m3"),
    ("head", r"^_row$"),
    ("quantizing", r"^(_rows\w*|_column_maxima|_turn\w*)$|triton_.*amax"),
    ("MLP kernels", r"^(_forward|_backward)$"),
    ("low-rank sums", r"^_add$"),
    ("nf4 and updates", r"^_kernel$"),
)
"""What kernels are for, by what their names contain. Other matmuls are told by their tiles."""
TILE = re.compile(r"nvjet_sm\d+_[a-z]+_(\d+)x(\d+)_")
REST = "norms, rotations, sums and the rest"


def record(step: Any, workload: Any) -> Any:
    """Of a training step, launched some times; `read` makes something of it."""
    from torch.profiler import ProfilerActivity, profile

    from tunesmith.measure import bench

    made = bench.batches(workload, STEPS)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        results = [step.launch(batch, bench.LEARNING_RATE) for batch in made]
        for result in results:
            result()
    return trace


def read(trace: Any) -> dict[str, Any]:
    """Milliseconds of a step in which a kernel ran, the kernels that took the longest, and where none ran."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memset")]
    kernels.sort(key=lambda event: event["ts"])
    busy, end, before = 0.0, kernels[0]["ts"], kernels[0]["name"]
    gaps: Counter[tuple[str, str]] = Counter()
    for event in kernels:
        start, stop = event["ts"], event["ts"] + event["dur"]
        gaps[before[:60], event["name"][:60]] += max(0.0, start - end)
        busy += max(0.0, stop - max(start, end))
        if stop >= end:
            end, before = stop, event["name"]
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in kernels:
        name = re.sub(r"\s+", " ", event["name"])[:160]
        times[name] += event["dur"]
        calls[name] += 1
    return {
        "kernel_ms": round(busy / STEPS / 1000, 2),
        "gaps": [[*names, round(time / STEPS / 1000, 3)] for names, time in gaps.most_common(GAPS)],
        "kernels": [
            {"name": name, "calls": round(calls[name] / STEPS, 1), "ms": round(time / STEPS / 1000, 3)}
            for name, time in itertools.islice(times.most_common(), MOST)
        ],
    }


def kinds(profile: dict[str, Any], *, matmul_dtype: str) -> dict[str, float]:
    """Milliseconds of a step by what they are for, the longest first. Kernels that were not kept are the rest."""
    found: Counter[str] = Counter()
    for kernel in profile["kernels"]:
        found[_kind(kernel["name"], matmul_dtype)] += kernel["ms"]
    found[REST] += max(0.0, profile["kernel_ms"] - sum(found.values()))
    return {kind: round(time, 1) for kind, time in found.most_common()}


def _kind(name: str, matmul_dtype: str) -> str:
    for kind, pattern in NAMED:
        if re.search(pattern, name):
            return kind
    if tile := TILE.search(name):
        if min(map(int, tile.groups())) < 128:  # one side is an adapter's rank
            return "low-rank sums"
        return "head" if matmul_dtype == "fp8" else "matmul_dtype"
    return REST
