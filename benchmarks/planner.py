"""Predicted against measured: a seeded list of configurations, each run through the real training step.

    python benchmarks/planner.py [--count 64] [--seed 0] [--near-limit 24] [--device cpu] [--only NAME]

Each configuration runs in a process of its own, so that one that runs out of memory harms no other and every peak is
its own. What came out is written to benchmarks/results/planner.json; docs/planner.md is made from that file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from results import write_result

from tunesmith.config.schema import Lora, Run
from tunesmith.plan import memory, speed
from tunesmith.plan.choice import Choice, Task
from tunesmith.plan.facts import from_config
from tunesmith.plan.hardware import Hardware, probe
from tunesmith.plan.plan import Mesh, Plan
from tunesmith.plan.rules import EXECUTABLE, attention_for, beyond, refused
from tunesmith.plan.search import MARGIN

SHAPES: dict[str, tuple[int, int, int, int, int, int]] = {
    # hidden, intermediate, layers, heads, key heads, vocabulary
    "0.1B": (576, 1536, 30, 9, 3, 49152),
    "0.4B": (960, 2560, 32, 15, 5, 49152),
    "1.2B": (2048, 8192, 16, 32, 8, 128256),
    "3B": (3072, 8192, 28, 24, 8, 128256),
    "7B": (4096, 11008, 32, 32, 32, 32000),
    "8B": (4096, 14336, 32, 32, 8, 128256),
    "70B": (8192, 28672, 80, 64, 8, 128256),
    "tiny": (64, 128, 2, 4, 2, 512),
}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
MOST_TOKENS = 65536
TIMEOUT = 600


@dataclass(frozen=True)
class Configuration:
    shape: str
    method: str
    optimizer: str
    length: int
    micro_batch: int
    is_packed: bool
    products: str
    storage: str
    recompute: float
    """Share of the layers."""

    @property
    def name(self) -> str:
        parts = [self.shape, self.method, self.optimizer, f"{self.micro_batch}x{self.length}"]
        parts += ["packed"] if self.is_packed else []
        parts += [part for part in (self.products, self.storage) if part != "plain"]
        parts += [f"recompute {self.recompute:.0%}"] if self.recompute else []
        return ", ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=64, help="configurations of all kinds")
    parser.add_argument("--near-limit", type=int, default=24, help="of these, so many close to what fits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shapes", default=None, help="only these, with commas")
    parser.add_argument("--most-tokens", type=int, default=MOST_TOKENS)
    parser.add_argument("--only", default=None, help="measure this one, given as JSON, and print what came out")
    given = parser.parse_args()
    if given.only:
        print(json.dumps(measure(Configuration(**json.loads(given.only)), given.device)))
        return
    hardware = probe()
    shapes = given.shapes.split(",") if given.shapes else [name for name in SHAPES if name != "tiny"]
    rows = []
    chosen = configurations(
        hardware,
        given.device,
        shapes,
        count=given.count,
        near=given.near_limit,
        seed=given.seed,
        most=given.most_tokens,
    )
    for index, configuration in enumerate(chosen):
        row = run_apart(configuration, hardware, given.device)
        rows.append(row)
        print(f"{index + 1}/{len(chosen)} {describe(row)}", flush=True)
        numbers = {"limit_bytes": free_bytes(hardware, given.device), "margin": MARGIN, "rows": rows}
        write_result("planner", "Predicted against measured, through the training step", numbers)


def configurations(
    hardware: Hardware, device: str, shapes: list[str], *, count: int, near: int, seed: int, most: int
) -> list[Configuration]:
    """Different ones that can be executed, `near` of them predicted to need 85 to 110% of the memory there is."""
    chance = random.Random(seed)
    free = free_bytes(hardware, device)
    near_limit: list[Configuration] = []
    others: list[Configuration] = []
    for _ in range(200 * count):
        one = draw(chance, shapes, most)
        task, choice = settle(one, hardware, device)
        if one in near_limit or one in others or refused(task, choice) or beyond(task, choice):
            continue
        share = memory.peak(memory.timeline(task, choice)).memory.total / free
        if 0.85 <= share <= 1.1 and len(near_limit) < near:
            near_limit.append(one)
        elif share < 0.85 and len(others) < count - near:
            others.append(one)
        if len(near_limit) + len(others) == count:
            break
    return others + near_limit


def draw(chance: random.Random, shapes: list[str], most: int) -> Configuration:
    method = chance.choice([one for one in ("full", "lora", "qlora") if one in EXECUTABLE["method"]])
    length = chance.choice([length for length in LENGTHS if length <= most])
    sizes = [size for size in (1, 2, 3, 4, 6, 8, 12, 16, 32) if size * length <= most]
    recompute = chance.choice([0.0, 0.0, 0.25, 0.5, 1.0] if "some" in EXECUTABLE["recompute"] else [0.0, 1.0])
    return Configuration(
        shape=chance.choice(shapes),
        method=method,
        optimizer=chance.choice(["adamw", "adamw", "adafactor", "sgd"]),
        length=length,
        micro_batch=chance.choice(sizes),
        is_packed=chance.random() < 0.3,
        products=str(chance.choice(sorted(map(str, EXECUTABLE["products"])))),
        storage="nf4" if method == "qlora" else "plain",
        recompute=recompute,
    )


def settle(one: Configuration, hardware: Hardware, device: str) -> tuple[Task, Choice]:
    """The planner's view of a configuration."""
    facts = from_config({"model_type": "llama", **shape_config(one.shape)})
    task = Task(
        facts=facts,
        hardware=hardware,
        device=device,
        precision="bf16" if device == "cuda" else "fp32",
        method=one.method,
        lora=Lora(rank=16, alpha=16),
        optimizer=one.optimizer,
        sequence_length=one.length,
        sequences=one.micro_batch,
        document_length=min(one.length, 900) if one.is_packed else one.length,  # a token's own document, on average
    )
    choice = Choice(
        micro_batch=one.micro_batch,
        recompute_layers=round(one.recompute * facts.layers),
        products=one.products,
        storage=one.storage,
        is_compiled=device == "cuda",
    )
    return task, dataclasses.replace(choice, attention=attention_for(task, is_limited=True))


def shape_config(name: str) -> dict[str, Any]:
    hidden, intermediate, layers, heads, kv_heads, vocabulary = SHAPES[name]
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": MOST_TOKENS,
        "tie_word_embeddings": False,
    }


def run_apart(one: Configuration, hardware: Hardware, device: str) -> dict[str, Any]:
    task, choice = settle(one, hardware, device)
    peak = memory.peak(memory.timeline(task, choice))
    row: dict[str, Any] = {
        "name": one.name,
        "configuration": dataclasses.asdict(one),
        "predicted": {
            "tokens_per_second": round(task.step_tokens / speed.step_time(task, choice).total, 1),
            "allocated_bytes": peak.memory.allocated,
            "total_bytes": peak.memory.total,
            "peak": peak.name,
            "parts": peak.memory.model_dump(),
        },
    }
    command = [sys.executable, __file__, "--device", device, "--only", json.dumps(dataclasses.asdict(one))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return row | {"failed": f"took more than {TIMEOUT} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        is_memory = any("out of memory" in line.lower() for line in lines)
        return row | {"failed": "out of memory" if is_memory else (lines[-1] if lines else "no output")[:300]}
    return row | {"measured": json.loads(done.stdout.strip().splitlines()[-1])}


def measure(one: Configuration, device: str) -> dict[str, Any]:
    """Tokens a second and the peak of memory, through `measure.bench` and the trainer's own step."""
    import torch

    from tunesmith.measure import bench

    hardware = probe()
    task, choice = settle(one, hardware, device)
    bench.SHAPES[one.shape] = shape_config(one.shape)
    workload = bench.Workload(one.shape, one.method, one.micro_batch, one.length, is_packed=one.is_packed)
    plan = Plan(
        device=task.device,
        threads=hardware.cores,
        mesh=Mesh(),
        precision=task.precision,
        products=choice.products,
        storage=choice.storage,
        attention=choice.attention,
        is_compiled=choice.is_compiled,
        master_weights=task.has_masters,
        sequence_length=one.length,
        sequences_per_step=one.micro_batch,
        micro_batch=one.micro_batch,
        recompute_layers=choice.recompute_layers,
        learning_rate=1e-5,
        deterministic=False,
        memory=memory.peak(memory.timeline(task, choice)).memory,
        memory_limit=free_bytes(hardware, device),
    )
    step = build(one, task, plan)
    found = bench.measure(step, workload, warmup=2, steps=3)
    reserved = torch.cuda.max_memory_reserved() if device == "cuda" else 0
    return {
        "tokens_per_second": found.tokens_per_second,
        "allocated_bytes": found.peak_bytes,
        "reserved_bytes": reserved,
        "step_seconds": found.step_seconds,
    }


def build(one: Configuration, task: Task, plan: Plan) -> Any:
    """The trainer's step over random weights made on the device."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from tunesmith.assemble import make_trainable, micro_batch_shape
    from tunesmith.model import attention
    from tunesmith.model.forward import Calling
    from tunesmith.optim.build import Optimizer
    from tunesmith.train.step import TrainStep

    run = Run(model="random", data="random", method=one.method, optimizer=one.optimizer, lora=task.lora)
    config = LlamaConfig(**shape_config(one.shape), use_cache=False)
    dtype = torch.bfloat16 if plan.precision == "bf16" else torch.float32
    torch.manual_seed(0)
    with torch.device(plan.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.register())
    make_trainable(model, run, plan)
    if plan.device == "cuda":
        torch.cuda.empty_cache()
    return TrainStep(
        model.train(),
        Calling("packed"),
        Optimizer(model.named_parameters(), run, master_weights=plan.master_weights),
        device=torch.device(plan.device),
        max_grad_norm=1.0,
        seed=0,
        shape=micro_batch_shape(plan),
    )


def free_bytes(hardware: Hardware, device: str) -> int:
    return hardware.gpus[0].free if device == "cuda" else hardware.available


def describe(row: dict[str, Any]) -> str:
    def words(numbers: dict[str, Any]) -> str:
        return f"{numbers['allocated_bytes'] / 2**30:.1f} GiB, {numbers['tokens_per_second']:,.0f} tokens/s"

    outcome = row["failed"] if "failed" in row else f"measured {words(row['measured'])}"
    return f"{row['name']}: predicted {words(row['predicted'])}; {outcome}"


if __name__ == "__main__":
    main()
