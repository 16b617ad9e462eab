"""How a run will be done: `Plan` and its parts. Types, and what is wrong with a plan that was written by hand.

A plan is made once, printed, saved as plan.json in the run folder, and obeyed: the trainer decides nothing. It is
closed and frozen like the run it belongs to, and may be edited by hand.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Device = Literal["cpu", "cuda"]
Precision = Literal["fp32", "bf16", "fp16"]
MatmulDtype = Literal["plain", "fp8"]
Storage = Literal["plain", "nf4", "int8"]
Attention = Literal["flash-attn-4", "varlen", "flex-attention", "sdpa"]
OptimizerStates = Literal["fp32", "bf16", "int8", "fp8", "int4"]
OffloadTo = Literal["none", "host", "disk"]
Sharding = Literal["none", "ddp", "zero1", "zero2", "zero3", "hybrid", "hierarchical"]
TrafficDtype = Literal["plain", "int8", "int4"]
Schedule = Literal["1f1b", "interleaved", "zero-bubble"]
Layout = Literal["packed", "padded", "encoder-decoder"]
Gate = Literal["swiglu", "geglu", "clamped_swiglu"]
GATES: tuple[Gate, ...] = get_args(Gate)
Kernel = Literal["rope", "swiglu", "geglu", "clamped_swiglu", "experts", "fp8_head", "scan"]
Positive = Annotated[int, Field(ge=1)]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    def changed(self, **changes: Any) -> Self:
        """A copy with other values, checked, and without what was computed from the old ones."""
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | changes)


class Mesh(Part):
    """How many ranks lie along each axis; an axis of size 1 does nothing."""

    replicate: Positive = 1
    shard: Positive = 1
    tensor: Positive = 1
    context: Positive = 1
    pipeline: Positive = 1
    expert: Positive = 1
    """Of the ranks that see different data, so many share the experts of each layer; no axis of its own."""

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard * self.tensor * self.context * self.pipeline

    @property
    def data_ranks(self) -> int:
        """Ranks that see different data."""
        return self.replicate * self.shard

    def stage(self, rank: int) -> int:
        """Where a rank lies along `pipeline`, the outermost axis; the innermost ones are `context` and `tensor`."""
        return rank // (self.ranks // self.pipeline)

    def data_rank(self, rank: int) -> int:
        """Which part of the data a rank sees."""
        return rank % (self.ranks // self.pipeline) // (self.context * self.tensor)

    def context_rank(self, rank: int) -> int:
        """Which part of its sequences a rank computes."""
        return rank // self.tensor % self.context


class Reason(Part):
    """One decision: what it is about, what was chosen, and why, in a sentence."""

    topic: str
    choice: str
    why: str


class Memory(Part):
    """Memory of one rank at one moment, in bytes, by what it is for."""

    weights: int = 0
    """The model's weights as the forward pass uses them, in the plan's storage."""
    adapter: int = 0
    """Low-rank factors, in fp32."""
    master: int = 0
    """fp32 copies of trained weights that are held in half precision."""
    gradients: int = 0
    """Gradients of trained weights, in fp32."""
    optimizer: int = 0
    """The optimizer's states."""
    activations: int = 0
    """What the forward pass keeps for the backward pass."""
    loss: int = 0
    """A chunk of logits, and the gradients of head and hidden states."""
    gathered: int = 0
    """Full parameters gathered from shards, and buffers of collectives."""
    quantization: int = 0
    """Weights of a layer dequantized from 4 or 8 bits."""
    workspace: int = 0
    """Short-lived tensors."""
    context: int = 0
    """What the driver, its libraries and the process itself take."""
    fragmentation: int = 0
    """What the allocator holds and cannot use."""

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in type(self).model_fields)

    @property
    def allocated(self) -> int:
        """What the framework's own count of allocated memory sees."""
        return self.total - self.context - self.fragmentation


class Phase(Part):
    """A phase of an optimizer step, and the memory then."""

    name: str
    memory: Memory


class Time(Part):
    """Seconds of one optimizer step, by what they are spent on; what runs beside something else counts once."""

    matmuls: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    adapter: float = 0.0
    loss: float = 0.0
    recomputation: float = 0.0
    quantization: float = 0.0
    optimizer: float = 0.0
    communication: float = 0.0
    offload: float = 0.0
    bubbles: float = 0.0
    """Pipeline stages that wait for each other."""
    host: float = 0.0
    """The CPU starts kernels more slowly than the GPU runs them."""

    @property
    def total(self) -> float:
        return sum(getattr(self, name) for name in type(self).model_fields)


@dataclass(frozen=True, slots=True)
class ForwardSpec:
    """How a model is called, as the probe has found it."""

    layout: Layout
    """`packed`: documents end to end in one row, with attention that keeps them apart. `padded`: one document a row,
    with the model's own attention. `encoder-decoder`: the same, with two rows for each: its source and its target."""
    logit_scale: float = 1.0
    softcap: float | None = None
    switch: int | None = None
    """Documents of more tokens are called by themselves, since the model then computes all it is given by other rules
    (RoPE with long factors); 0: every one is."""
    seq_idx: bool = False
    """`packed` calls also say of each token which document it is of, by the name that kernels of convolutions and state
    spaces take it under."""
    branches: bool = False
    """In `packed` calls a document may begin with tokens of another that stand there once (tree attention), as the two
    answers of a pair do with their prompt."""

    def lengths(self, sequence_length: int) -> tuple[bool, int | None] | None:
        """How documents, of `sequence_length` tokens at most, are dealt out to micro-batches: whether those in one must
        be of like length, and above how many tokens each is by itself; None where their lengths do not matter."""
        single = self.switch if self.switch is not None and self.switch < sequence_length else None
        return None if self.layout == "packed" and single is None else (self.layout != "packed", single)


class Plan(Part):
    version: Literal[2] = 2
    device: Device
    threads: Positive
    """Threads of the CPU; on a CPU the last bits of a sum depend on it."""
    mesh: Mesh = Mesh()
    sharding: Sharding = "none"
    """How weights, gradients and optimizer states lie over the ranks that see different data."""
    quantized_all_gather: Literal["plain", "int8"] = "plain"
    """How shared weights travel to the ranks that use them: in `precision`, or in int8 with a scale for each 128, which
    is lossy: each is off by at most 1/254 of the largest of its 128."""
    quantized_reduce_scatter: TrafficDtype = "plain"
    """How gradients travel to the rank that holds their weights: in fp32, in int8 in the same way, or in int4 with a
    scale for each 64, off by at most 1/14 of the largest of its 64."""
    schedule: Schedule = "1f1b"
    """In which order the stages of a pipeline do the forward and backward passes of a step."""
    precision: Precision
    """Arithmetic of the forward and backward pass, and how the model's weights are held."""
    matmul_dtype: MatmulDtype = "plain"
    """Arithmetic of the large matmuls: that of `precision`, or fp8 (compute capability 8.9 and above)."""
    storage: Storage = "plain"
    """How frozen base weights are held: in `precision`, or quantized."""
    teacher_storage: Storage = "plain"
    """With `objective: distill`: the same of the teacher's weights, all of which are on every rank."""
    attention: Attention
    """The kernel that packed attention prefers; layers that ask for what it lacks take another."""
    attention_paths: tuple[str, ...] = ()
    """What each kind of layer takes, as `sliding 4096: flash-attn-4`; said, not obeyed."""
    is_compiled: bool
    """Each decoder layer is compiled."""
    cuda_graphs: bool = False
    """The layers' forward and backward passes are captured once, as CUDA graphs, and replayed: the CPU starts all
    kernels of a pass at once."""
    forward: ForwardSpec | None = None
    """How the model is called. None in a plan for which no model was tried yet."""
    fuse_adapters: bool = True
    """Adapters that share an input are fused, which the probe has found to be equal."""
    kernels: tuple[Kernel, ...] | None = None
    """Kernels of ours that take the place of the model's own modules on a GPU, which the probe has found to be equal:
    `rope`, queries and keys rotated in one pass; `swiglu`, `geglu` and `clamped_swiglu`, gated MLPs whose activation is
    computed again in the backward pass; `experts`, of an MoE model, which weigh tokens before their last matmul;
    `fp8_head`, a frozen head's gradient in fp8. None: whatever is found equal when the model is loaded."""
    adapted: tuple[str, ...] | None = None
    """Linears that get adapters, by name or pattern, where they are not all that the settings choose: the probe has
    found others that cannot carry one."""
    router_loss: Annotated[float, Field(ge=0)] | None = None
    """Weight of the load-balancing loss of an MoE model's routers; None where it has none or was not tried yet."""
    most_padded: tuple[int, int] | None = None
    """Tokens, and pairs of tokens in rows, that a padded micro-batch of several documents may have; None: as many
    tokens as `micro_batch` sequences have."""
    by_length: bool = False
    """Micro-batches go by the lengths of documents, which the model does not take packed: padded, of like length, and
    no larger than `micro_batch` sequences. Their number changes from step to step."""
    master_weights: bool
    """Trained weights are also kept in fp32, and updated there; else those in bf16 are rounded stochastically."""
    sequence_length: Positive
    sequences_per_step: Positive
    """Packed sequences in one optimizer step, over all ranks."""
    micro_batch: Positive
    """Packed sequences in one forward pass of one rank."""
    cache_transposed: bool = False
    """Frozen weights in fp8 are held transposed, too, as the backward pass needs them; else transposed each time."""
    checkpointed_layers: Annotated[int, Field(ge=0)] = 0
    """Decoder layers whose activations are computed again in the backward pass instead of being kept."""
    save_attention: bool = False
    """checkpointed layers keep what their attention gave, and compute the rest again."""
    mlp_slice: Annotated[int, Field(ge=0)] = 0
    """Tokens a layer's MLP takes at a time, its wide tensors being computed again in the backward pass; 0: all."""
    offload_activations: bool = False
    """The inputs of checkpointed layers wait in host memory between forward and backward."""
    optimizer_states: OptimizerStates = "fp32"
    """How the states of AdamW or Lion are held; int8, fp8 and int4 in blocks with a scale each."""
    offload_optimizer: OffloadTo = "none"
    """Where optimizer states and masters live, if not on the device: in host memory, or in a file in the run's folder
    that is gone when the process ends."""
    offload_parameters: bool = False
    """Weights and gradients live in host memory, and each layer comes to the device when it is used, as shards do (also
    on one rank); the CPU does the update, and the optimizer's states are beside them or on disk. Of adapters on one
    rank (sharding none) the frozen weights of the layers alone."""
    optimizer_in_backward: bool = False
    """Optimizer-in-backward (gradient release): each weight is updated and its gradient freed within the backward pass;
    one micro-batch a step, no clipping."""
    async_checkpoint: bool = False
    """Checkpoints are copied to host memory and written beside the next steps."""
    epochs: Annotated[float, Field(gt=0)] = 1.0
    """Passes over the data, unless the settings count `steps`."""
    learning_rate: Annotated[float, Field(gt=0)]
    held_out: Annotated[int, Field(ge=0)] = 0
    """Records of the training data that are held out and evaluated."""
    deterministic: bool
    memory: Memory
    """Predicted, at the peak of the step."""
    peak: str = ""
    """The phase of the peak."""
    phases: tuple[Phase, ...] = ()
    """Predicted, at each moment of a step that may be its peak."""
    engine_memory: int = 0
    """Bytes of the GPU, or on a CPU of its keys and values, that vLLM may use beside the trainer (`rollout.engine`)."""
    memory_limit: int
    """What the device has for this run, in bytes."""
    host_memory: int = 0
    """Predicted peak of all ranks of a node in host memory, in bytes."""
    disk: int = 0
    """What all ranks of a node keep on its disk while they train, in bytes; checkpoints come on top."""
    time: Time = Time()
    """Predicted, of one step."""
    beyond: tuple[str, ...] = ()
    """What this plan needs that the installed Tunesmith cannot do yet; such a plan can be looked at, not run."""
    reasons: tuple[Reason, ...] = ()

    @property
    def accumulation_steps(self) -> int:
        """Gradient accumulation: micro-batches one rank runs for one step, at most."""
        per_rank = -(-self.sequences_per_step // self.mesh.data_ranks)
        return -(-per_rank // self.micro_batch)

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.memory_limit

    @property
    def tokens_per_second(self) -> float:
        """Predicted, over all ranks."""
        return self.sequences_per_step * self.sequence_length / self.time.total if self.time.total else 0.0


RENAMED = {
    "products": "matmul_dtype",
    "is_recorded": "cuda_graphs",
    "recompute_layers": "checkpointed_layers",
    "keep_attention": "save_attention",
    "keep_turned": "cache_transposed",
    "release_gradients": "optimizer_in_backward",
    "save_beside": "async_checkpoint",
    "gather": "quantized_all_gather",
    "reduce": "quantized_reduce_scatter",
    "moments": "phases",
}
"""What plans of version 1 called otherwise."""


def upgraded(content: Any) -> Any:
    """What was read as a plan, in the words of this version; a plan that is none stays as it is."""
    if not isinstance(content, dict) or content.get("version") != 1:
        return content
    plan = {RENAMED.get(name, name): value for name, value in content.items()} | {"version": 2}
    if isinstance(time := plan.get("time"), dict) and "products" in time:
        plan["time"] = {"matmuls" if name == "products" else name: value for name, value in time.items()}
    return plan


def first_problem(error: ValueError, kind: str = "plans") -> str:
    """Of what was read as a plan, or as others of its kind, and is none, in words."""
    if not isinstance(error, ValidationError):
        return str(error)
    problem = error.errors()[0]
    name = ".".join(map(str, problem["loc"])) or "all of it"
    words = problem["msg"].replace("Input should be", "it should be")
    if problem["type"] == "missing":
        return f"{name} is missing"
    if problem["type"] == "extra_forbidden":
        return f"{kind} know no {name}"
    return f"{name} is {json.dumps(problem['input'], default=str)}, but {words[0].lower()}{words[1:]}"
