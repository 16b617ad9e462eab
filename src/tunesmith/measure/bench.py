"""Speed and memory of training steps on standard workloads, through the same code that `train` runs.

Weights are random at published shapes, which costs the same arithmetic as the real ones, and batches are dense or have
the document lengths of chat data. A measurement is the median of several steps after warm-up, with the peak of memory.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from tunesmith.config.schema import Lora, Run
from tunesmith.data.loader import PackedDocument, micro_batch_of
from tunesmith.data.pack import pack
from tunesmith.data.types import StepBatch
from tunesmith.kernels import flash4
from tunesmith.model import attention
from tunesmith.model.quantized import build_empty
from tunesmith.model.source import RandomWeights
from tunesmith.model.structure import body, decoder_layers, set_attention
from tunesmith.optim.build import Optimizer
from tunesmith.optim.build import build as build_optimizer
from tunesmith.parallel.prepare import TRANSFORMS, Preparation
from tunesmith.plan.facts import ModelFacts
from tunesmith.plan.families import from_config
from tunesmith.plan.hardware import Hardware
from tunesmith.plan.plan import ForwardSpec, Memory, Plan
from tunesmith.plan.search import search
from tunesmith.run.shape import micro_batch_shape
from tunesmith.train.graph import GraphCapture
from tunesmith.train.loop import peak_memory
from tunesmith.train.step import StepResult, TrainStep

LEARNING_RATE = 1e-5

SHAPES: dict[str, dict[str, Any]] = {
    "llama3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
    "llama3-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
    "llama2-7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 512,
    },
}


@dataclass(frozen=True)
class Workload:
    shape: str
    method: str
    sequences: int
    length: int
    is_packed: bool = False
    """Documents with the lengths of chat data (log-normal, median 350) instead of one document a sequence."""
    accumulation_steps: int = 1
    """Micro-batches of a step, each of `sequences`."""
    saving: Mapping[str, Any] = field(default_factory=dict)
    """Of the plan, in the variant that checkpoints: what else it does to need less memory."""
    is_low_memory: bool = False
    """Does not fit in any other variant, and takes minutes: measured in few steps, and without peers."""


WORKLOADS = {
    "lora-8b": Workload("llama3-8b", "lora", 4, 4096, saving={"save_attention": True, "offload_activations": True}),
    "lora-8b-packed": Workload("llama3-8b", "lora", 2, 8192, is_packed=True),
    "qlora-8b": Workload(
        "llama3-8b",
        "qlora",
        4,
        2048,
        saving={"mlp_slice": 2816, "offload_activations": True, "cuda_graphs": True},
    ),
    "full-7b": Workload("llama2-7b", "full", 16, 1024),
    "lora-8b-long": Workload(
        "llama3-8b",
        "lora",
        1,
        262144,
        saving={"save_attention": True, "mlp_slice": 8192, "offload_activations": True},
        is_low_memory=True,
    ),
    "qlora-70b": Workload("llama3-70b", "qlora", 1, 4096, is_low_memory=True),
    "tiny": Workload("tiny", "lora", 2, 128),
}


@dataclass(frozen=True)
class Measurement:
    tokens_per_second: float
    """Of documents; padding does not count."""
    step_seconds: float
    peak_bytes: int
    """Allocated on a GPU (of captured passes, held), resident of the process on a CPU."""
    first_step_seconds: float
    spread: float
    """Between the slowest and the fastest step, as a share of the median; large where other work disturbs."""
    loss: float


def facts_of(workload: Workload) -> ModelFacts:
    facts = from_config({"model_type": "llama", **SHAPES[workload.shape]})
    return facts.changed(positions=max(facts.positions, workload.length))


def planned(workload: Workload, hardware: Hardware) -> Plan:
    """What the planner makes of a workload, on one device."""
    hardware = hardware.model_copy(update={"gpus": hardware.gpus[:1]})
    tokens = workload.sequences * workload.length * workload.accumulation_steps
    run = run_of(workload).model_copy(update={"batch_tokens": tokens, "sequence_length": workload.length})
    return search(run, facts_of(workload), hardware).plan


def plan_for(workload: Workload, *, device: str, matmul_dtype: str, checkpointed_layers: int, compiled: bool) -> Plan:
    """One that is made by hand, to see what each choice gives."""
    return Plan(
        device=device,
        threads=torch.get_num_threads(),
        precision="bf16" if device == "cuda" else "fp32",
        matmul_dtype=matmul_dtype,
        storage="nf4" if workload.method == "qlora" else "plain",
        attention="sdpa" if device != "cuda" else "flash-attn-4" if flash4.is_available() else "varlen",
        is_compiled=compiled,
        cache_transposed=matmul_dtype == "fp8" and workload.method == "lora" and compiled and not checkpointed_layers,
        master_weights=False,
        sequence_length=workload.length,
        sequences_per_step=workload.sequences,
        micro_batch=workload.sequences,
        checkpointed_layers=checkpointed_layers,
        learning_rate=LEARNING_RATE,
        deterministic=False,
        memory=Memory(),
        memory_limit=0,
    )


def cut_by(plan: Plan, workload: Workload) -> Workload:
    """The same workload in the micro-batches that the plan makes of a step."""
    return replace(workload, sequences=plan.micro_batch, accumulation_steps=plan.accumulation_steps)


def run_of(workload: Workload, *, rank: int = 16, optimizer: str = "adamw") -> Run:
    settings = {"method": workload.method, "optimizer": optimizer, "lora": Lora(rank=rank, alpha=16)}
    return Run(model="random", data="random", **settings)


def build(workload: Workload, plan: Plan, *, rank: int = 16, optimizer: str = "adamw") -> TrainStep:
    """The training step of a workload: prepared as a run's model is, from random weights made on the device."""
    from transformers import LlamaConfig

    run = run_of(workload, rank=rank, optimizer=optimizer)
    return build_step(LlamaConfig(**SHAPES[workload.shape]), run, plan)


def build_step(config: Any, run: Run, plan: Plan) -> TrainStep:
    """The training step of a run whose model has this config and random weights, by its plan."""
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if plan.precision == "bf16" else torch.float32
    device, spec = torch.device(plan.device), plan.forward or ForwardSpec("packed")
    packed = attention.register(plan.attention)
    model = build_empty(lambda: AutoModelForCausalLM.from_config(config, dtype=dtype))
    model.config.use_cache = False
    if spec.layout == "packed":
        set_attention(model, packed)
    work = Preparation.for_training(model, run, plan, device, RandomWeights(model, dtype, device))
    work.apply(TRANSFORMS)
    called = work.called()
    if plan.device == "cuda":
        torch.cuda.empty_cache()
    if "optimizer_states" in plan.model_fields_set:
        updates = build_optimizer(model, run, plan)
    else:  # a workload says nothing of them: in the weights' precision, as its peers have them
        has_masters = plan.master_weights and plan.sharding == "none"
        updates = Optimizer(model.named_parameters(), run, master_weights=has_masters)
    if called is model:
        updates.overlap_update(body(model), decoder_layers(model))
    return TrainStep(
        called.train(),
        spec,
        updates,
        device=device,
        max_grad_norm=1.0,
        seed=0,
        shape=micro_batch_shape(plan),
        capture=GraphCapture(model, spec, updates.parameters) if plan.cuda_graphs else None,
    )


def few_layers(workload: Workload, layers: int = 2, vocabulary: int | None = None) -> Workload:
    """The same with so many layers: what it compiles is what the whole one needs, in little memory. Two layers show all
    kinds there are, since the first has no gradient to give to a frozen embedding."""
    shape = f"{workload.shape}-{layers}-layers"
    few = {"num_hidden_layers": layers} | ({"vocab_size": vocabulary} if vocabulary else {})
    SHAPES[shape] = {**SHAPES[workload.shape], **few}
    return replace(workload, shape=shape)


def batches(workload: Workload, count: int) -> list[StepBatch]:
    random = np.random.Generator(np.random.PCG64(0))
    vocabulary = SHAPES[workload.shape]["vocab_size"]

    def document(length: int) -> PackedDocument:
        ids = random.integers(0, vocabulary, length, dtype=np.int64)
        return PackedDocument(ids, np.ones(length, dtype=np.float32), 0, "random")

    made = []
    for step in range(count):
        drawn = [
            chat_lengths(random, workload) if workload.is_packed else [workload.length] * workload.sequences
            for _ in range(workload.accumulation_steps)
        ]
        made.append(
            StepBatch(
                step=step,
                epoch=0.0,
                micro_batches=tuple(micro_batch_of([document(length) for length in lengths]) for lengths in drawn),
                target_weight=float(sum(sum(lengths) - len(lengths) for lengths in drawn)),
                tokens=sum(sum(lengths) for lengths in drawn),
            )
        )
    return made


def chat_lengths(random: np.random.Generator, workload: Workload) -> list[int]:
    """Document lengths that fill the workload's sequences: log-normal with median 350, cut at the sequence length.

    Of many packed sequences some are drawn: the fullest would be those of a few long documents."""
    lengths = np.minimum(random.lognormal(np.log(350), 1.0, 4096).astype(np.int64) + 2, workload.length)
    sequences = pack(lengths, workload.length)
    drawn = random.permutation(len(sequences))[: workload.sequences]
    return [int(length) for index in drawn for length in lengths[sequences[index]]]


Turn = Callable[[], AbstractContextManager[object]]
"""Stands around the timed steps, after the warm-up: where measurements share a device, they take turns."""


def measure(
    step: TrainStep, workload: Workload, *, warmup: int = 3, steps: int = 6, turn: Turn = nullcontext
) -> Measurement:
    return timed(
        lambda batch: step.launch(batch, LEARNING_RATE),
        workload,
        step.device,
        warmup=warmup,
        steps=steps,
        turn=turn,
        idle=lambda: step.capture.idle_bytes if step.capture else 0,
    )


def timed(
    launch: Callable[[StepBatch], Callable[[], float | StepResult]],
    workload: Workload,
    device: torch.device,
    *,
    warmup: int,
    steps: int,
    turn: Turn = nullcontext,
    idle: Callable[[], int] = lambda: 0,
) -> Measurement:
    """Time `launch`, which queues one step and returns what waits for its loss.

    As in training, a step is launched before the loss of the one before is looked at. A GPU's steps are timed by its
    own clock, from the end of one to the end of the next. `idle`: bytes it holds that are not allocated, and cannot be.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    made = batches(workload, warmup + steps)
    _, before = _run(launch, made[:warmup], on_gpu)
    peak = peak_memory(device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with turn():
        loss, times = _run(launch, made[warmup:], on_gpu)
    peak = max(peak, peak_memory(device) + idle())
    return summary([*before, *times], [batch.tokens for batch in made], loss, peak, warmup=warmup)


def _run(
    launch: Callable[[StepBatch], Callable[[], float | StepResult]], made: list[StepBatch], on_gpu: bool
) -> tuple[float, list[float]]:
    """The last loss, and the seconds of each step."""
    results: list[Callable[[], float | StepResult]] = []
    found: float | StepResult = 0.0
    marks = [_mark(on_gpu)]
    for batch in made:
        results.append(launch(batch))
        marks.append(_mark(on_gpu))
        if len(results) > 1:
            found = results.pop(0)()
    if results:
        found = results.pop()()
    return found.loss if isinstance(found, StepResult) else found, _between(marks)


def _mark(on_gpu: bool) -> Any:
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(marks: list[Any]) -> list[float]:
    if isinstance(marks[0], float):
        return [later - earlier for earlier, later in itertools.pairwise(marks)]
    torch.cuda.synchronize()
    return [earlier.elapsed_time(later) / 1000 for earlier, later in itertools.pairwise(marks)]


def summary(times: list[float], tokens: list[int], loss: float, peak_bytes: int, *, warmup: int) -> Measurement:
    rates = [count / seconds for count, seconds in zip(tokens[warmup:], times[warmup:], strict=True)]
    return Measurement(
        tokens_per_second=round(statistics.median(rates), 1),
        step_seconds=round(statistics.median(times[warmup:]), 5),
        peak_bytes=peak_bytes,
        first_step_seconds=round(times[0], 2),
        spread=round((max(rates) - min(rates)) / statistics.median(rates), 3),
        loss=round(loss, 4),
    )
