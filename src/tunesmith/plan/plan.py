"""How a run will be done: `Plan` and its parts. Types only.

A plan is made once, printed, saved as plan.json in the run folder, and obeyed: the trainer decides nothing. It is
closed and frozen like the run it belongs to, and may be edited by hand.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Device = Literal["cpu", "cuda"]
Precision = Literal["fp32", "bf16", "fp16"]
Products = Literal["plain", "fp8"]
Storage = Literal["plain", "nf4", "int8"]
Attention = Literal["flash-attn-4", "varlen", "sdpa"]
OptimizerStates = Literal["fp32", "bf16", "int8"]
Sharding = Literal["none", "ddp", "zero1", "zero2", "zero3", "hybrid", "hierarchical"]
Positive = Annotated[int, Field(ge=1)]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Mesh(Part):
    """How many ranks lie along each axis; an axis of size 1 does nothing."""

    replicate: Positive = 1
    shard: Positive = 1
    tensor: Positive = 1
    context: Positive = 1
    pipeline: Positive = 1

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard * self.tensor * self.context * self.pipeline

    @property
    def data_ranks(self) -> int:
        """Ranks that see different data."""
        return self.replicate * self.shard


class Reason(Part):
    """One decision: what it is about, what was chosen, and why, in a sentence."""

    topic: str
    choice: str
    why: str


class Memory(Part):
    """Predicted peak memory of one rank, in bytes, by category."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    loss: int = 0
    overhead: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in type(self).model_fields)


class Plan(Part):
    version: Literal[1] = 1
    device: Device
    threads: Positive
    """Threads of the processor; on a CPU the last bits of a sum depend on it."""
    mesh: Mesh = Mesh()
    sharding: Sharding = "none"
    """How weights, gradients and optimizer states lie over the ranks that see different data."""
    precision: Precision
    """Arithmetic of the forward and backward pass, and how the model's weights are held."""
    products: Products = "plain"
    """Arithmetic of the large products: that of `precision`, or fp8 (compute capability 8.9 and above)."""
    storage: Storage = "plain"
    """How frozen base weights are held: in `precision`, or quantized."""
    attention: Attention
    is_compiled: bool
    """Each decoder layer is compiled."""
    master_weights: bool
    """Trained weights are also kept in fp32, and updated there."""
    sequence_length: Positive
    sequences_per_step: Positive
    """Packed sequences in one optimizer step, over all ranks."""
    micro_batch: Positive
    """Packed sequences in one forward pass of one rank."""
    recompute_layers: Annotated[int, Field(ge=0)] = 0
    """Decoder layers whose activations are computed again in the backward pass instead of being kept."""
    offload_activations: bool = False
    """Activations wait in host memory between forward and backward."""
    optimizer_states: OptimizerStates = "fp32"
    offload_optimizer: bool = False
    """Optimizer states live in host memory."""
    learning_rate: float
    deterministic: bool
    memory: Memory
    memory_limit: int
    """What the device has for this run, in bytes."""
    reasons: tuple[Reason, ...] = ()

    @property
    def accumulation(self) -> int:
        """Micro-batches one rank runs for one step, at most."""
        per_rank = -(-self.sequences_per_step // self.mesh.data_ranks)
        return -(-per_rank // self.micro_batch)
