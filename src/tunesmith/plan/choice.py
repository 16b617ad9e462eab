"""What is given for a plan (`Task`) and what the planner may choose (`Choice`): the arguments of both models.

Plain dataclasses, since a search makes hundreds of choices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from tunesmith.config.schema import Lora, Preference
from tunesmith.objectives.base import Objective
from tunesmith.objectives.sft import Sft
from tunesmith.plan.documents import Padded, Shape
from tunesmith.plan.facts import ModelFacts
from tunesmith.plan.hardware import Gpu, Hardware, Rates, guessed_rates
from tunesmith.plan.plan import (
    Attention,
    Device,
    MatmulDtype,
    OffloadTo,
    OptimizerStates,
    Precision,
    Schedule,
    Sharding,
    Storage,
    TrafficDtype,
)

Method = Literal["full", "lora", "qlora", "peft", "relora", "loqt"]
OF_PEFT = Lora(rank=8, dropout=0.01)
"""What an adapter of peft's is taken for in all but its parameters: each linear keeps its input for itself."""
WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a value."""


@dataclass(frozen=True)
class Task:
    """What is to be done, and on what."""

    facts: ModelFacts
    hardware: Hardware
    device: Device
    precision: Precision
    method: Method
    lora: Lora
    optimizer: str
    sequence_length: int
    sequences: int
    """Packed sequences of one optimizer step, over all ranks."""
    document_length: int
    """Tokens that attend to each other; the sequence length unless more is known."""
    padded: Padded | None = None
    """Documents as they are padded, where the model does not take packed ones."""
    shape: Shape | None = None
    """Of the padded micro-batch that is looked at; None: as many tokens as there is room for."""
    longest_document: int | None = None
    """Of which the attention of a padded micro-batch keeps its scores; None: that of the usual one."""
    mean_document: int | None = None
    """Tokens of a document, on average over documents; None: not known."""
    longest_sampled: int | None = None
    """Of the documents that were looked at; None: none was."""
    shared: float = 0.0
    """Tokens of prompts that second answers of pairs share with the first, for each token that is computed."""
    clips: bool = True
    """Gradients are scaled by the norm of them all."""
    has_new_tokens: bool = False
    """Of which the rows are trained, beside adapters."""
    peft_type: str = ""
    """With `method: peft`: which."""
    is_quantization_aware: bool = False
    """Weights are rounded in each pass, as the exported file holds them."""
    has_noise: bool = False
    """On embeddings (NEFTune)."""
    is_exact: bool = False
    """The same bits are asked for every time, however often the run is stopped and continued."""
    objective: Objective = field(default_factory=lambda: Sft(Preference()))
    teacher_in_steps: bool = False
    """The teacher is asked in each step, and stays on the device; else once, before the model is there."""

    @property
    def gpu(self) -> Gpu:
        return self.hardware.gpus[0]

    @property
    def ranks_per_node(self) -> int:
        return len(self.hardware.gpus) if self.device == "cuda" else self.hardware.processes

    @cached_property
    def rates(self) -> Rates:
        if self.device == "cuda":
            return self.gpu.rates or guessed_rates(self.gpu)
        if self.hardware.rates is not None:
            return self.hardware.rates
        # Measured with PyTorch on two ARM cores: 23 GFLOP/s a core, with all its overheads.
        half = 60e9 if self.hardware.has_fast_bf16 else 0.1e9
        cores = max(1, self.hardware.cores // self.hardware.processes)
        return Rates(fp32=30e9 * cores, half=half * cores, bandwidth=min(15e9 * cores, 120e9), host_link=1e12)

    @property
    def width(self) -> int:
        return WIDTH[self.precision]

    @property
    def has_adapters(self) -> bool:
        return self.method != "full"

    @property
    def has_lora(self) -> bool:
        return self.method in ("lora", "qlora", "relora", "loqt")

    @property
    def is_merged(self) -> bool:
        """Adapters are merged into the base at intervals; the result is a model."""
        return self.method in ("relora", "loqt")

    @property
    def is_quantized(self) -> bool:
        """A base in few bits was asked for."""
        return self.method in ("qlora", "loqt")

    @property
    def has_masters(self) -> bool:
        """Trained weights in half precision have fp32 masters, unless the choice goes without."""
        return not self.has_adapters and self.precision != "fp32"

    @cached_property
    def adapted(self) -> tuple[int, int]:
        """Parameters of the adapters, and inputs and outputs of the adapted linears."""
        if not self.has_adapters:
            return 0, 0
        parameters, widths = self.facts.adapted(self.lora)
        return parameters if self.facts.adapter is None else self.facts.adapter, widths

    @cached_property
    def trained(self) -> int:
        return self.adapted[0] if self.has_adapters else self.facts.parameters

    @cached_property
    def backward_share(self) -> float:
        """The part of the layers that the backward pass goes through, from the top."""
        if not self.has_adapters:
            return 1.0
        return self.facts.layers_with_backward(self.lora) / self.facts.layers

    @property
    def step_tokens(self) -> int:
        return self.sequences * self.sequence_length

    def of_shape(self, shape: Shape) -> Task:
        """The task as it is for one padded micro-batch of this shape."""
        return replace(self, shape=shape, longest_document=max(shape[1:]))

    @cached_property
    def largest(self) -> Callable[[int], tuple[Task, ...]]:
        """By the room of a micro-batch, in tokens, the same with each of those that may need the most memory."""
        assert self.padded is not None
        padded = self.padded
        return functools.cache(lambda tokens: tuple(map(self.of_shape, padded.largest(tokens))))


@dataclass(frozen=True, slots=True)
class Choice:
    """One way of doing it. Axes of size 1 do nothing."""

    micro_batch: int = 1
    checkpointed_layers: int = 0
    matmul_dtype: MatmulDtype = "plain"
    storage: Storage = "plain"
    teacher_storage: Storage = "plain"
    attention: Attention = "sdpa"
    is_compiled: bool = False
    cuda_graphs: bool = False
    cache_transposed: bool = False
    save_attention: bool = False
    mlp_slice: int = 0
    offload_activations: bool = False
    master_weights: bool = True
    """Where the trained weights are held in half precision; else there are none."""
    optimizer_states: OptimizerStates = "fp32"
    offload_optimizer: OffloadTo = "none"
    offload_parameters: bool = False
    optimizer_in_backward: bool = False
    sharding: Sharding = "none"
    quantized_all_gather: Literal["plain", "int8"] = "plain"
    quantized_reduce_scatter: TrafficDtype = "plain"
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    schedule: Schedule = "1f1b"

    @property
    def data_ranks(self) -> int:
        return self.replicate * self.shard

    @property
    def ranks(self) -> int:
        return self.data_ranks * self.tensor * self.context * self.pipeline

    @property
    def is_lossy(self) -> bool:
        """What travels between ranks is rounded on the way."""
        return (self.quantized_all_gather, self.quantized_reduce_scatter) != ("plain", "plain")

    @property
    def holders(self) -> int:
        """Ranks that hold the same weights: those with different data, and those with parts of the same sequences."""
        return self.data_ranks * self.context

    @property
    def sharers(self) -> int:
        """The ranks of a node that hold the same weights; hybrid and hierarchical sharding keep apart what is near."""
        return self.shard * self.context

    def has_frozen_on_host(self, task: Task) -> bool:
        """Parameter offload on one rank: the frozen weights of layers live in host memory, what is trained does not."""
        return self.offload_parameters and task.has_adapters and self.ranks == 1 and self.sharding == "none"

    def has_masters(self, task: Task) -> bool:
        return task.has_masters and self.master_weights

    def has_masters_apart(self, task: Task) -> bool:
        """Masters beside the model's own weights; of shards in fp32 the weights are made when they are gathered."""
        return self.has_masters(task) and self.sharding == "none"

    def accumulation_steps(self, task: Task) -> int:
        """Micro-batches of one rank in one step, at most; where they go by lengths, several for all that is known."""
        count = -(-self._per_rank(task) // self.micro_batch)
        return count if task.facts.packs else max(2, count)

    def tokens(self, task: Task) -> float:
        """Tokens of one micro-batch on one rank."""
        if task.shape is not None:
            return task.shape[0] * sum(task.shape[1:])
        return min(self.micro_batch, self._per_rank(task)) * task.sequence_length / self.context

    def room(self, task: Task) -> int:
        """Tokens that a padded micro-batch may have."""
        return self.micro_batch * task.sequence_length

    def mlp_tokens(self, task: Task) -> float:
        """Tokens for which the wide tensors of an MLP exist at a time."""
        tokens = self.tokens(task)
        return min(tokens, self.mlp_slice) if self.mlp_slice else tokens

    def _per_rank(self, task: Task) -> int:
        return -(-task.sequences // self.data_ranks)
