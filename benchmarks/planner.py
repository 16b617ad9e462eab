"""Predicted against measured: a seeded list of configurations, each run through the real training step.

    python benchmarks/planner.py [--out FOLDER] [--deadline SECONDS] [--device cpu] [--list]
    python benchmarks/planner.py --collect benchmarks/results/planner.json FOLDER/planner.jsonl ... [--held-out all]

The first measures: many processes build and compile at once, and each is timed alone (`pool.py`). What comes out of a
configuration is written to FOLDER/planner.jsonl at once. Some are given a limit, as if the GPU were a smaller one,
close to what they are predicted to need; they either fit or run out of memory. The second makes
benchmarks/results/planner.json of such files, and of what is there already where that is named first. Only what was
measured is kept there: predictions are made by the present model whenever the file is read, so that docs/planner.md and
the tests hold every change of the model against the same measurements. `--held-out all` marks what is new: no constant
of the model was chosen with it in view, which is true until one is, and the mark then has to go. With `half` constants
may be chosen by the other half.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pool import OUT_OF_TIME, Order, Pool

from tunesmith.config.schema import Lora
from tunesmith.measure.results import document
from tunesmith.plan import memory, speed
from tunesmith.plan.choice import Choice, Task
from tunesmith.plan.families import from_config
from tunesmith.plan.hardware import Hardware, named, probe
from tunesmith.plan.paths import preferred
from tunesmith.plan.plan import Phase
from tunesmith.plan.ranking import should_capture
from tunesmith.plan.refusals import refused
from tunesmith.plan.rules import beyond

GIB = 2**30
SHAPES: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    # hidden, intermediate, layers, heads, key heads, vocabulary, tied
    "0.1B": (576, 1536, 30, 9, 3, 49152, True),
    "0.4B": (960, 2560, 32, 15, 5, 49152, True),
    "1.2B": (2048, 8192, 16, 32, 8, 128256, True),
    "3B": (3072, 8192, 28, 24, 8, 128256, False),
    "7B": (4096, 11008, 32, 32, 32, 32000, False),
    "8B": (4096, 14336, 32, 32, 8, 128256, False),
    "70B": (8192, 28672, 80, 64, 8, 128256, False),
    "tiny": (64, 128, 2, 4, 2, 512, False),
}
COUNTS = {"0.1B": 3, "0.4B": 3, "1.2B": 3, "3B": 3, "7B": 2, "8B": 2, "70B": 1}
"""How many of each are drawn."""
VARIANTS = 2
"""How many others are drawn for each, with the same layers in the same way: they are compiled already."""
CARDS = {6: 4, 8: 4, 12: 5, 16: 5, 24: 5, 40: 2, 48: 1}
"""Limits in GiB, and how many configurations are given each."""
NEAR = (0.85, 1.15)
"""Predicted need over the limit, of those."""
FEW_WORDS = 512
SHARES = (0.0, 0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0)
OPTIMIZERS = [("adamw", "fp32")] * 4 + [
    ("adamw", "int8"),
    ("adamw", "int4"),
    ("lion", "fp32"),
    ("muon", "fp32"),
    ("adafactor", "fp32"),
    ("sgd", "fp32"),
]
"""And how their states are held."""
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
MOST_TOKENS = 65536
LONGEST_STEP = 4.0
"""Seconds as predicted; the time on the GPU is short."""
LARGEST = 100 * GIB
USUAL = 20 * GIB
"""Larger ones are drawn more rarely, the larger the more: they leave no room for others to be prepared beside them."""
LONELY = 60 * GIB
"""Where speed alone is measured, those that leave no room for others come last."""
MEASURE_WITHIN = 1.15, GIB
"""What a configuration may take of the GPU beside others: so much more than predicted, and then tried again alone."""

MISTAKES = 8
"""In a row: something is wrong with all of them, and the GPU's time is better spent later."""
SETTINGS = {
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # of each worker: there are as many as the CPU has cores
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Of the workers' environment."""


@dataclass(frozen=True)
class Configuration:
    shape: str
    method: str
    optimizer: str
    length: int
    micro_batch: int
    accumulation_steps: int
    is_packed: bool
    matmul_dtype: str
    storage: str
    recompute: float
    """Share of the layers."""
    rank: int = 16
    states: str = "fp32"
    has_masters: bool = True
    save_attention: bool = False
    offload: bool = False
    """Inputs of checkpointed layers, to host memory."""
    cuda_graphs: bool = False

    @property
    def name(self) -> str:
        optimizer = self.optimizer if self.states == "fp32" else f"{self.optimizer} in {self.states}"
        parts = [self.shape, self.method, optimizer, f"{self.micro_batch}x{self.length}"]
        parts += ["no masters"] if not self.has_masters else []
        parts += [f"{self.accumulation_steps} rounds"] if self.accumulation_steps > 1 else []
        parts += ["packed"] if self.is_packed else []
        parts += [part for part in (self.matmul_dtype, self.storage) if part != "plain"]
        parts += [f"rank {self.rank}"] if self.method != "full" and self.rank != 16 else []
        parts += [f"checkpoint {self.recompute:.0%}"] if self.recompute else []
        parts += ["attention kept"] if self.save_attention else []
        parts += ["inputs on the host"] if self.offload else []
        parts += ["recorded"] if self.cuda_graphs else []
        return ", ".join(parts)

    @property
    def layers(self) -> str:
        """Those of a kind are compiled once; a checkpointed layer is compiled in another way."""
        sizes = f"{self.micro_batch} {self.length}"
        return f"{self.shape} {self.method} {sizes} {self.matmul_dtype} {self.storage} {self.rank}"

    @property
    def way(self) -> tuple[bool, ...]:
        """Which layers there are: as they are, checkpointed, and checkpointed with their attention kept."""
        return self.recompute < 1, self.recompute > 0, self.save_attention


ALWAYS = (  # whatever is drawn: the usual workloads, all weights of large models, the longest documents
    Configuration("8B", "lora", "adamw", 4096, 4, 1, False, "fp8", "plain", 0.0),
    Configuration("8B", "lora", "adamw", 4096, 4, 1, False, "plain", "plain", 0.0),
    Configuration("8B", "lora", "adamw", 65536, 1, 1, True, "fp8", "plain", 1.0),
    Configuration("7B", "full", "adamw", 1024, 16, 1, False, "fp8", "plain", 0.0, states="int8", has_masters=False),
    Configuration("7B", "full", "adafactor", 2048, 4, 1, False, "plain", "plain", 0.5),
    Configuration("8B", "full", "adamw", 4096, 2, 1, True, "fp8", "plain", 1.0, states="int8", has_masters=False),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None, help="where planner.jsonl and the workers' log go")
    parser.add_argument("--deadline", type=float, default=540, help="seconds after which nothing new is begun")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument(
        "--seed", type=int, default=39, help="39 was taken because every method comes up for nearly every size"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only-speed", action="store_true", help="none of those that are given a limit")
    parser.add_argument("--list", action="store_true", help="only say what would be measured")
    parser.add_argument("--only", default="", help="only configurations whose names contain this")
    parser.add_argument(
        "--again", type=Path, nargs="*", default=[], help="files with what to measure, in place of a draw"
    )
    parser.add_argument("--only-limits", action="store_true", help="those that are given a limit")
    parser.add_argument("--skip", type=Path, nargs="*", default=[], help="files with what is measured already")
    parser.add_argument("--collect", type=Path, nargs="*", default=[], help="files to make the result of, oldest first")
    parser.add_argument(
        "--held-out",
        default="none",
        choices=("none", "half", "all"),
        help="what is marked of the new among what is collected",
    )
    given = parser.parse_args()
    from planner_results import collect, read_rows

    if given.collect:
        print(collect(given.collect, held_out=given.held_out))
        return
    hardware = machine(given.device)
    if given.again:
        before = [row for file in given.again for row in read_rows(file)]
        chosen = [(Configuration(**row["configuration"]), row["limit_bytes"]) for row in before]
    else:
        chosen = configurations(hardware, seed=given.seed) if given.device == "cuda" else tiny(given.seed)
    done = {(row["name"], row["limit_bytes"]) for file in given.skip for row in read_rows(file)}
    chosen = [(one, limit) for one, limit in chosen if given.only in one.name and (one.name, limit) not in done]
    if given.only_limits:
        chosen = [(one, limit) for one, limit in chosen if limit is not None]
    if given.only_speed:
        chosen = [(one, limit) for one, limit in chosen if limit is None]
        chosen.sort(key=lambda pair: peak(*settle(pair[0], hardware, given.device)).memory.total > LONELY)
    if given.list:
        for one, limit in chosen:
            print(describe(one, limit, hardware, given.device))
        return
    folder = given.out or Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="planner-"))
    folder.mkdir(parents=True, exist_ok=True)
    measure_all(chosen, hardware, given.device, folder, workers=given.workers, deadline=given.deadline)
    print(f"results are in {folder / 'planner.jsonl'}")


# what is measured


def configurations(hardware: Hardware, *, seed: int) -> list[tuple[Configuration, int | None]]:
    """Different ones that can be executed: some of each shape, others with the same layers, which are compiled
    already, and of those some with a limit close to what they need."""
    chance = random.Random(seed)
    found: list[tuple[Configuration, int | None]] = [(as_planned(one, hardware), None) for one in ALWAYS]
    taken: set[Configuration] = {one for one, _ in found}

    def draw_until(
        propose: Callable[[], Configuration], suits: Callable[[int, float], bool], limit: int | None
    ) -> None:
        for _ in range(10_000):
            one = as_planned(propose(), hardware)
            task, choice = settle(one, hardware, "cuda")
            if one in taken or refused(task, choice) or beyond(task, choice):
                continue
            if suits(peak(task, choice).memory.total, speed.step_time(task, choice).total):
                taken.add(one)
                found.append((one, limit))
                return
        raise AssertionError("nothing suits")

    def is_affordable(size: int, seconds: float) -> bool:
        is_rare = size > USUAL and chance.random() > (USUAL / size) ** 2
        return size < LARGEST and seconds < LONGEST_STEP and not is_rare

    def is_possible(size: int, seconds: float) -> bool:
        return size < LARGEST and seconds < 1.5 * LONGEST_STEP

    for shape, count in COUNTS.items():
        for _ in range(count):
            draw_until(functools.partial(draw, chance, shape), is_affordable, None)
    first = [one for one, _ in found]
    for one in first:
        for _ in range(VARIANTS):
            draw_until(functools.partial(vary, chance, [one], is_compiled=True), is_possible, None)
    for card, count in CARDS.items():
        for _ in range(count):
            draw_until(
                functools.partial(vary, chance, first),
                lambda size, seconds, card=card: NEAR[0] <= size / card / GIB <= NEAR[1] and seconds < LONGEST_STEP,
                card * GIB,
            )
    chance.shuffle(found)  # large and small ones beside each other
    return found


def tiny(seed: int) -> list[tuple[Configuration, int | None]]:
    """For a machine without a GPU: the mechanism, not the numbers."""
    chance = random.Random(seed)
    drawn = [
        dataclasses.replace(draw(chance, "tiny"), length=64, micro_batch=2, matmul_dtype="plain") for _ in range(2)
    ]
    return [(one, None) for one in drawn]


def draw(chance: random.Random, shape: str, method: str | None = None) -> Configuration:
    method = method or ("qlora" if shape == "70B" else chance.choice(["full", "full", "lora", "lora", "qlora"]))
    length = chance.choice(LENGTHS)
    sizes = [size for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if size * length <= MOST_TOKENS]
    optimizer, states = chance.choice(OPTIMIZERS)
    recompute = chance.choice(SHARES)
    return Configuration(
        shape=shape,
        method=method,
        optimizer=optimizer,
        length=length,
        micro_batch=chance.choice(sizes),
        accumulation_steps=chance.choice([1, 1, 1, 2]),
        is_packed=length >= 1024 and chance.random() < 0.35,
        matmul_dtype=chance.choice(["plain", "fp8"]),
        storage="nf4" if method == "qlora" else "plain",
        recompute=recompute,
        rank=16 if method == "full" else chance.choice([8, 16, 16, 64]),
        states=states,
        has_masters=method != "full" or optimizer not in ("adamw", "lion") or chance.random() < 0.6,
        save_attention=recompute > 0 and chance.random() < 0.3,
        offload=recompute > 0 and chance.random() < 0.15,
    )


def vary(chance: random.Random, like: list[Configuration], *, is_compiled: bool = False) -> Configuration:
    """One with the same layers as one of these, and in the same way where they are to be compiled already."""
    one = chance.choice(like)
    other = draw(chance, one.shape, one.method)
    same = ["length", "micro_batch", "matmul_dtype", "storage", "rank"]
    if is_compiled:
        same += ["save_attention"]
        other = dataclasses.replace(other, recompute=one.recompute, offload=one.recompute > 0 and other.offload)
        if 0 < one.recompute < 1:
            other = dataclasses.replace(other, recompute=chance.choice([0.25, 0.5, 0.75]))
    packed = one.length >= 1024 and chance.random() < 0.35
    return dataclasses.replace(other, is_packed=packed, **{name: getattr(one, name) for name in same})


# the planner's view


def as_planned(one: Configuration, hardware: Hardware) -> Configuration:
    """With its passes recorded where the planner would."""
    return dataclasses.replace(one, cuda_graphs=should_capture(*settle(one, hardware, "cuda")))


def settle(
    one: Configuration, hardware: Hardware, device: str, document_length: float | None = None
) -> tuple[Task, Choice]:
    """The task and the choice that a configuration is; with the lengths of its documents where they are known."""
    facts = from_config({"model_type": "llama", **shape_config(one.shape)})
    chat = 0.28 * one.length if one.length < 4096 else 1200  # of the tokens, on average
    task = Task(
        facts=facts,
        hardware=hardware,
        device=device,
        precision="bf16" if device == "cuda" else "fp32",
        method=one.method,
        lora=Lora(rank=one.rank, alpha=16),
        optimizer=one.optimizer,
        sequence_length=one.length,
        sequences=one.micro_batch * one.accumulation_steps,
        document_length=round(document_length or (chat if one.is_packed else one.length)),
    )
    choice = Choice(
        micro_batch=one.micro_batch,
        checkpointed_layers=round(one.recompute * facts.layers),
        matmul_dtype=one.matmul_dtype,
        storage=one.storage,
        is_compiled=device == "cuda",
        cuda_graphs=one.cuda_graphs,
        save_attention=one.save_attention,
        offload_activations=one.offload,
        optimizer_states=one.states,
        master_weights=one.has_masters,
    )
    return task, dataclasses.replace(choice, attention=preferred(task))


def machine(device: str) -> Hardware:
    """What predictions are for: the GPU the results come from, or this machine's CPU."""
    return named("H200") if device == "cuda" else probe()


def peak(task: Task, choice: Choice) -> Phase:
    return memory.peak(memory.timeline(task, choice))


def few_layers(one: Configuration) -> Configuration:
    """The same kinds of layers, but two of them or three, and a small vocabulary."""
    is_mixed = 0 < one.recompute < 1
    recompute = 2 / 3 if is_mixed else one.recompute
    plain = {"accumulation_steps": 1, "optimizer": "sgd", "states": "fp32", "has_masters": True, "offload": False}
    plain["cuda_graphs"] = False
    return dataclasses.replace(one, shape=f"{one.shape}/{3 if is_mixed else 2}", recompute=recompute, **plain)


def shape_config(name: str) -> dict[str, Any]:
    """Of a shape; of one with few layers where the name says how many, as in 8B/2."""
    name, _, few = name.partition("/")
    hidden, intermediate, layers, heads, kv_heads, vocabulary, is_tied = SHAPES[name]
    layers, vocabulary = (int(few), FEW_WORDS) if few else (layers, vocabulary)
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": MOST_TOKENS,
        "tie_word_embeddings": is_tied,
    }


def describe(one: Configuration, limit: int | None, hardware: Hardware, device: str) -> str:
    task, choice = settle(one, hardware, device)
    seconds = speed.step_time(task, choice).total
    words = (
        f"{peak(task, choice).memory.total / GIB:.1f} GiB, {task.step_tokens / seconds:,.0f} tokens/s, {seconds:.2f} s"
    )
    return f"{one.name}: predicted {words}" + (f"; limit {limit / GIB:.0f} GiB" if limit else "")


# measuring


def measure_all(
    chosen: list[tuple[Configuration, int | None]],
    hardware: Hardware,
    device: str,
    folder: Path,
    *,
    workers: int,
    deadline: float,
) -> None:
    began = time.monotonic()
    budget = (hardware.gpus[0].memory - workers * GIB - 3 * GIB) if device == "cuda" else 1 << 60
    command = [sys.executable, str(Path(__file__).with_name("planner_worker.py")), device]
    os.environ.update({**SETTINGS, **os.environ})
    with (folder / "planner.jsonl").open("a") as rows, (folder / "planner.log").open("a") as log:
        pool = Pool(command, workers=workers, budget=budget, deadline=deadline, log=log)
        for one, limit in chosen:
            total = peak(*settle(one, hardware, device)).memory.total
            cap = limit or min(budget, int(MEASURE_WITHIN[0] * total + MEASURE_WITHIN[1]))
            pool.add(_order(one, limit, cap, hardware, device))
        row: dict[str, Any] = {"document": document("Predicted against measured, through the training step", {})}
        mistakes = 0
        for index, (order, found) in enumerate(pool.run()):
            one = Configuration(**order.payload["configuration"])
            limit = order.payload["limit_bytes"]
            if found.get("failed") == "out of memory" and limit is None and order.size < budget:
                pool.add(_order(one, None, min(budget, 2 * order.size), hardware, device))
            row |= {"name": one.name, "configuration": order.payload["configuration"], "limit_bytes": limit}
            row |= found
            is_mistake = found.get("failed") not in (None, "out of memory", OUT_OF_TIME)
            mistakes = mistakes + 1 if is_mistake else 0
            rows.write(json.dumps(row) + "\n")
            rows.flush()
            row = {}
            outcome = found.get("failed") or words(found)
            seconds = time.monotonic() - began
            print(f"{seconds:4.0f} s {index + 1} {describe(one, limit, hardware, device)}: {outcome}", flush=True)
            if mistakes == MISTAKES:
                sys.exit(f"{MISTAKES} configurations in a row failed; see {folder / 'planner.log'}")


def _order(one: Configuration, limit: int | None, cap: int, hardware: Hardware, device: str) -> Order:
    payload = {"configuration": dataclasses.asdict(one), "limit_bytes": limit, "cap_bytes": cap}
    first = peak(*settle(few_layers(one), hardware, device)).memory.total
    return Order(payload, size=cap, first_size=int(1.2 * first), kind=one.layers, family=one.shape)


def words(found: dict[str, Any]) -> str:
    speed_words = f", {found['tokens'] / found['step_seconds']:,.0f} tokens/s" if found.get("step_seconds") else ""
    return f"measured {found['peak_bytes'] / GIB:.1f} GiB{speed_words}"


if __name__ == "__main__":
    main()
