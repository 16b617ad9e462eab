"""Speed and memory of training steps on standard workloads, through the same code that `train` runs.

Weights are random at published shapes, which costs the same arithmetic as the real ones, and batches are dense or have
the document lengths of chat data. A measurement is the median of several steps after warm-up, with the peak of memory.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tunesmith.assemble import make_trainable, micro_batch_shape
from tunesmith.config.schema import Lora, Run
from tunesmith.data.loader import PackedDocument, micro_batch_of
from tunesmith.data.pack import pack
from tunesmith.data.types import StepBatch
from tunesmith.model import attention
from tunesmith.model.forward import Calling
from tunesmith.optim.build import Optimizer
from tunesmith.plan.plan import Memory, Plan
from tunesmith.train.step import TrainStep

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


WORKLOADS = {
    "lora-8b": Workload("llama3-8b", "lora", 4, 4096),
    "lora-8b-packed": Workload("llama3-8b", "lora", 2, 8192, is_packed=True),
    "full-7b": Workload("llama2-7b", "full", 16, 1024),
    "tiny": Workload("tiny", "lora", 2, 128),
}


@dataclass(frozen=True)
class Measurement:
    tokens_per_second: float
    """Of documents; padding does not count."""
    step_seconds: float
    peak_bytes: int
    first_step_seconds: float
    loss: float


def plan_for(workload: Workload, *, device: str, products: str, recompute_layers: int, compiled: bool) -> Plan:
    return Plan(
        device=device,
        threads=torch.get_num_threads(),
        precision="bf16" if device == "cuda" else "fp32",
        products=products,
        attention="varlen" if device == "cuda" else "sdpa",
        is_compiled=compiled,
        master_weights=False,
        sequence_length=workload.length,
        sequences_per_step=workload.sequences,
        micro_batch=workload.sequences,
        recompute_layers=recompute_layers,
        learning_rate=1e-5,
        deterministic=False,
        memory=Memory(),
        memory_limit=0,
    )


def build(workload: Workload, plan: Plan) -> TrainStep:
    """The training step of a workload, with random weights made on the device."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    run = Run(model="random", data="random", method=workload.method, lora=Lora(rank=16, alpha=16))
    dtype = torch.bfloat16 if plan.precision == "bf16" else torch.float32
    config = LlamaConfig(**SHAPES[workload.shape], use_cache=False)
    torch.manual_seed(0)
    with torch.device(plan.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.register())
    make_trainable(model, run, plan)
    if plan.device == "cuda":
        torch.cuda.empty_cache()
    optimizer = Optimizer(model.named_parameters(), run, master_weights=plan.master_weights)
    return TrainStep(
        model.train(),
        Calling("packed"),
        optimizer,
        device=torch.device(plan.device),
        max_grad_norm=1.0,
        seed=0,
        shape=micro_batch_shape(plan),
    )


def batches(workload: Workload, count: int) -> list[StepBatch]:
    random = np.random.Generator(np.random.PCG64(0))
    vocabulary = SHAPES[workload.shape]["vocab_size"]

    def document(length: int) -> PackedDocument:
        ids = random.integers(0, vocabulary, length, dtype=np.int64)
        return PackedDocument(ids, np.ones(length, dtype=np.float32), 0, "random")

    made = []
    for step in range(count):
        lengths = [workload.length] * workload.sequences
        if workload.is_packed:
            lengths = chat_lengths(random, workload)
        documents = [document(length) for length in lengths]
        made.append(
            StepBatch(
                step=step,
                epoch=0.0,
                micro_batches=(micro_batch_of(documents),),
                target_weight=float(sum(lengths) - len(lengths)),
                tokens=sum(lengths),
            )
        )
    return made


def chat_lengths(random: np.random.Generator, workload: Workload) -> list[int]:
    """Document lengths that fill the workload's sequences: log-normal with median 350, cut at the sequence length."""
    lengths = np.minimum(random.lognormal(np.log(350), 1.0, 4096).astype(np.int64) + 2, workload.length)
    sequences = pack(lengths, workload.length)
    full = sorted(sequences, key=lambda chosen: -int(lengths[chosen].sum()))[: workload.sequences]
    return [int(length) for chosen in full for length in lengths[chosen]]


def measure(step: TrainStep, workload: Workload, *, warmup: int = 3, steps: int = 6) -> Measurement:
    on_gpu = step.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times, tokens, loss = [], [], 0.0
    for batch in batches(workload, warmup + steps):
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        loss = step(batch, 1e-5).loss
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
        tokens.append(batch.tokens)
    rates = [count / seconds for count, seconds in zip(tokens[warmup:], times[warmup:], strict=True)]
    return Measurement(
        tokens_per_second=round(statistics.median(rates), 1),
        step_seconds=round(statistics.median(times[warmup:]), 5),
        peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else 0,
        first_step_seconds=round(times[0], 2),
        loss=round(loss, 4),
    )
