"""Attention of many kinds, packed: whether it is right, how fast it is, and what training makes of it.

    python benchmarks/attention.py --to FILE.json [--parts check time train] [--only NAME...] [--tiny]

`check` compares each path (flash-attn-4, FlexAttention, torch's own) forward and backward in bf16 with the plain
computation in fp32, one document at a time. `time` times forward and backward of 16,384 packed tokens at the heads of
published models. `train` plans and runs `tunesmith train` at such shapes, as benchmarks/forecast.py does. Every case is
a process: all compile at once, and each is timed alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forecast

from tunesmith.measure.results import document

WHAT = "Packed attention: errors against fp32, and time forward and backward"
TOKENS, CHECKED = 16_384, 3_000
CALLS = 8
PATIENCE = 150.0
"""Seconds for all cases to compile."""
DEVICES = ("flash-attn-4", "flex-attention", "varlen", "sdpa")
"""Kernels that a plan may name."""


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    has_alibi: bool = False


CASES = {
    "Gemma-2-2B": Case(8, 4, 256, 256, softcap=50.0),
    "Gemma-2-9B, sliding": Case(16, 8, 256, 256, window=4096, softcap=50.0),
    "Gemma-3-4B": Case(8, 4, 256, 256),
    "Gemma-3-4B, sliding": Case(8, 4, 256, 256, window=1024),
    "gpt-oss-20b": Case(64, 8, 64, 64, has_sinks=True),
    "gpt-oss-20b, sliding": Case(64, 8, 64, 64, window=128, has_sinks=True),
    "DeepSeek-V2-Lite": Case(16, 16, 192, 128),
    "MPT-7B": Case(32, 32, 128, 128, has_alibi=True),
    "Llama-3.1-8B": Case(32, 8, 128, 128),
}
TRAINED: dict[str, dict[str, Any]] = {
    "Gemma-2-2B": forecast.SHAPES["Gemma-2-2B"],
    "Gemma-3-4B": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
        "sliding_window": 1024,
    },
    "gpt-oss, 4 layers": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 4,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
        "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
    },
}  # fmt: skip
"""Models that are trained; gpt-oss with fewer layers, so that they are made in seconds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--parts", nargs="*", default=["check", "time", "train"], choices=["check", "time", "train"])
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name contains one of these")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the benchmark itself on a CPU")
    parser.add_argument("--deadline", type=float, default=110.0, help="seconds for all trainings together")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if {"check", "time"} & set(options.parts):
        names = [name for name in CASES if chosen(name, options.only)]
        with tempfile.TemporaryDirectory(prefix="tunesmith-attention-") as folder:
            rows += measure(names, Path(folder), options)
        write(options.to, rows)
    if "train" in options.parts:
        rows += train(options)
        write(options.to, rows)


def chosen(name: str, only: list[str]) -> bool:
    return any(one in name for one in only or [""])


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**document(WHAT, rows), "numbers": rows}, indent=1) + "\n")


def measure(names: list[str], folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every case in a process of its own; these compile and check at once, and are timed one after another."""
    size = "tiny" if options.tiny else "whole"
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2", "TUNESMITH_CACHE": str(folder / "cache")}
    running, rows = {}, []
    for index, name in enumerate(names):
        command = [sys.executable, __file__, "--one", name, str(folder / str(index)), size, *options.parts]
        log = (folder / f"{index}.log").open("w")
        running[name] = subprocess.Popen(command, env=environment, stdout=log, stderr=log), folder / str(index)
    until = time.monotonic() + PATIENCE
    for process, place in running.values():
        while not _file(place, "ready").exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
    for name, (process, place) in running.items():
        if process.poll() is None and _file(place, "ready").exists():
            _file(place, "go").touch()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
        process.kill()
        if _file(place, "json").exists():
            row = json.loads(_file(place, "json").read_text())
        else:
            said = place.with_suffix(".log").read_text(errors="replace").strip()[-800:]
            row = {"name": name, "failed": said or "too slow"}
        rows.append(row)
        print(words(row), flush=True)
    return rows


def _file(place: Path, kind: str) -> Path:
    return place.with_suffix("." + kind)


def words(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{row['name']}: failed: {row['failed']}"
    lines = [row["name"]]
    for path, found in row["paths"].items():
        if "failed" in found:
            lines.append(f"  {path:22} failed: {found['failed']}")
            continue
        errors = ", ".join(f"{what} {error:.1e}" for what, error in found.get("errors", {}).items())
        timed = ", ".join(
            f"{kind}: {one['ms']:.2f} ms, {one['tflops']:.0f} TFLOP/s" for kind, one in found.get("times", {}).items()
        )
        lines.append(f"  {path:22} {errors}; {timed}")
    return "\n".join(lines)


# One case


def one(name: str, place: Path, size: str, parts: list[str]) -> None:
    import torch

    from tunesmith.model import attention
    from tunesmith.parallel.compile import prepare

    prepare()
    case, is_tiny = CASES[name], size == "tiny"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if is_tiny:
        case = Case(4, 2, 16, 16 if case.value_dim == case.head_dim else 24, case.window and 40, case.softcap,
                    case.has_sinks, case.has_alibi)  # fmt: skip
    if device.type == "cpu":  # torch computes it there, but does not let training at it
        torch.nn.attention.flex_attention._validate_device = lambda *_: None  # pyright: ignore
    found: dict[str, dict[str, Any]] = {path: {} for path in paths_of(attention, case, device)}
    long = 300 if is_tiny else TOKENS
    documents = {"mixed": lengths(long, 0), "4 of a length": [long // 4] * 4}
    for path in found:
        try:
            if "check" in parts:
                found[path]["errors"] = errors(attention, case, path, device, 200 if is_tiny else CHECKED)
            if "time" in parts:
                Timed(attention, case, path, device, documents["mixed"]).run(1)
        except Exception as error:  # a kernel that does not compile; the others are measured all the same
            found[path] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
    _file(place, "ready").touch()
    while not _file(place, "go").exists():
        time.sleep(0.02)
    if "time" in parts:
        for path, numbers in found.items():
            if "failed" not in numbers:
                numbers["times"] = {
                    kind: Timed(attention, case, path, device, some).numbers() for kind, some in documents.items()
                }
    _file(place, "partial").write_text(json.dumps({"name": name, "case": vars(case), "paths": found}))
    _file(place, "partial").replace(_file(place, "json"))


def paths_of(attention: Any, case: Case, device: Any) -> list[str]:
    """Which paths this device has for it, and document by document."""
    from tunesmith.plan.attention import Heads, path_of

    if device.type == "cpu":
        return ["flex-attention", "by document"]
    settled = attention.settled()
    asked = (case.softcap is not None, case.has_sinks, case.has_alibi)
    heads = Heads(case.head_dim, case.value_dim, *asked)
    kernels = [kernel for kernel in DEVICES if kernel != "flash-attn-4" or settled["kernel"] == kernel]
    return list(dict.fromkeys([*(path_of(kernel, settled["capability"], heads) for kernel in kernels), "by document"]))


def lengths(tokens: int, seed: int) -> list[int]:
    """Of documents as data has them."""
    chance, found = random.Random(seed), []
    while sum(found) < tokens:
        found.append(min(6000, max(20, int(chance.lognormvariate(5.8, 0.9))), tokens - sum(found)))
    return found


def drawn(case: Case, tokens: int, device: Any, dtype: Any) -> tuple[list[Any], dict[str, Any]]:
    import torch

    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int):
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    shapes = (case.heads, case.head_dim), (case.kv_heads, case.head_dim), (case.kv_heads, case.value_dim)
    parts = [draw(1, heads, tokens, size).requires_grad_() for heads, size in shapes]
    extras: dict[str, Any] = {"softcap": case.softcap} if case.softcap else {}
    if case.has_sinks:
        extras["s_aux"] = draw(case.heads).requires_grad_()
    if case.has_alibi:
        extras["alibi_slopes"] = 2.0 ** -(8 * torch.arange(1, case.heads + 1, device=device) / case.heads)
    return parts, extras


def called(attention: Any, case: Case, path: str, parts: list[Any], extras: dict[str, Any], some: list[int]) -> Any:
    import torch

    bounds = torch.tensor([0, *some], device=parts[0].device).cumsum(0).int()
    before = attention._path
    attention._path = lambda *_: path
    try:
        return attention.packed_attention(
            torch.nn.Module(), *parts, None, sliding_window=case.window, cu_seq_lens_q=bounds, max_length_q=max(some),
            **extras,
        )[0]  # fmt: skip
    finally:
        attention._path = before


def errors(attention: Any, case: Case, path: str, device: Any, tokens: int) -> dict[str, float]:
    """The largest differences from fp32, as shares of the largest value there."""
    import torch

    some = lengths(tokens, 1)
    parts, extras = drawn(case, tokens, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    direction = torch.randn(1, tokens, case.heads, case.value_dim, device=device).to(parts[0].dtype)
    found = []
    for way in (path, "plain"):
        if way == "plain":
            parts = [part.detach().float().requires_grad_() for part in parts]
            extras = {name: one.detach().float() if torch.is_tensor(one) else one for name, one in extras.items()}
        inputs = [*parts, *(one.requires_grad_() for name, one in extras.items() if name == "s_aux")]
        out = called(attention, case, "by document" if way == "plain" else way, parts, extras, some)
        found.append([out, *torch.autograd.grad(out, inputs, direction.to(out.dtype))])
    names = ["out", "dq", "dk", "dv", "dsinks"]
    return {
        name: ((mine.float() - plain).abs().max() / plain.abs().max()).item()
        for name, mine, plain in zip(names, *found, strict=False)
    }


class Timed:
    def __init__(self, attention: Any, case: Case, path: str, device: Any, some: list[int]):
        import torch

        self.given = attention, case, path
        self.some, self.device = some, device
        half = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.parts, self.extras = drawn(case, sum(some), device, half)

    def run(self, times: int) -> None:
        import torch

        for _ in range(times):
            out = called(*self.given, self.parts, self.extras, self.some)
            torch.autograd.grad(out, self.parts, out)

    def numbers(self) -> dict[str, float]:
        import torch

        case = self.given[1]
        wait = torch.cuda.synchronize if self.device.type == "cuda" else (lambda: None)
        self.run(2)
        wait()
        began = time.perf_counter()
        self.run(CALLS)
        wait()
        seconds = (time.perf_counter() - began) / CALLS
        window = case.window or max(self.some)
        pairs = sum(sum(min(place + 1, window) for place in range(length)) for length in self.some)
        flops = 3.5 * 2 * case.heads * (case.head_dim + case.value_dim) * pairs
        return {"ms": 1e3 * seconds, "tflops": flops / seconds / 1e12}


# Training


class Trainings(forecast.Forecast):
    """Of our shapes; what was said about compiling is kept, too."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.found: list[dict[str, Any]] = []

    def make_models(self) -> None:
        size = "tiny" if self.options.tiny else "whole"
        shapes = list(dict.fromkeys(case.shape for case in self.cases))
        with (self.options.out / "make.log").open("w") as log:
            commands = [[sys.executable, __file__, "--make", str(self.folder), size, shape] for shape in shapes]
            for process in [subprocess.Popen(command, stderr=log, stdout=log) for command in commands]:
                process.wait()
        self.say("models made")

    def end(self, one: forecast.Training, found: dict[str, Any]) -> None:
        said = [
            line.strip()
            for line in one.log.read_text(errors="replace").splitlines()
            if any(word in line for word in ("ompil", "captur", "ttention"))
        ]
        plan = json.loads((Path(one.case.folder) / "plan.json").read_text())
        super().end(one, found | {"said": said[-12:], "attention_paths": plan["attention_paths"]})

    def write(self, row: dict[str, Any]) -> None:
        if "name" in row:
            self.found.append(dict(row))
        super().write(row)


def train(options: argparse.Namespace) -> list[dict[str, Any]]:
    settings = {"method": "lora", "sequence_length": 4096, "batch_tokens": 16_384, "lora": {"rank": 16}}
    if options.tiny:
        settings |= {"sequence_length": 64, "batch_tokens": 128}
    cases = [forecast.Case(f"train {name}", name, dict(settings)) for name in TRAINED if chosen(name, options.only)]
    options.workers = len(cases)
    with tempfile.TemporaryDirectory(prefix="tunesmith-attention-") as folder:
        options.out = Path(folder)
        trainings = Trainings(cases, Path(folder), options)
        trainings.run()
    for row in trainings.found:
        print(row["name"], row.get("attention_paths"), *row.get("said", []), sep="\n  ")
    return trainings.found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(sys.argv[2], Path(sys.argv[3]), sys.argv[4], sys.argv[5:])
    elif sys.argv[1:2] == ["--make"]:
        forecast.SHAPES.update(TRAINED)
        forecast.make(Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
    else:
        main()
