"""Memory of one rank over one optimizer step, by category: the peak is the peak of a timeline, not a sum of maxima.

Eight phases can be the peak: when the model has just been loaded, the end of the forward pass, the loss, the backward
pass at its first layer (the last of the model, while all activations are still there), where the layers begin that are
computed again, at its last and at its end (when all gradients are there), and the optimizer's step. Pure arithmetic on
sizes; nothing here knows what fits.

What compiled layers keep and need on the way was measured on an H200 (benchmarks/planner.py); where a number below is
not a count of tensors in our own code, it says so.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from tunesmith.config.schema import Lora, Rollout
from tunesmith.objectives.distill import Distill
from tunesmith.objectives.grpo import Grpo
from tunesmith.objectives.head import ClassifyTokens
from tunesmith.plan.choice import Choice, Task
from tunesmith.plan.facts import KEPT_RANK, Layer, Linear, StateSpace
from tunesmith.plan.paths import is_in_full, preferred
from tunesmith.plan.plan import Attention, Memory, Phase, Sharding
from tunesmith.plan.stages import PER_RANK, micro_batches

MIB = 2**20
QUANTIZED = {"nf4": 0.5 + 1 / 64 + 4 / (64 * 256), "int8": 1.0 + 4 / 2048}
"""Bytes of a quantized weight: nf4 with 8-bit scales of 64 values, and fp32 scales of 256 of those; int8 with an fp32
scale for each row, which is 2,048 values or more where it matters."""
STATES = {"adamw": 2, "lion": 1, "muon": 1, "sgd": 1, "adafactor": 0, "galore": 1, "apollo": 1, "lisa": 2, "badam": 2}
"""Values of optimizer state for each trained parameter."""
STATE_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0 + 4 / 256, "fp8": 1.0 + 4 / 256, "int4": 0.5 + 4 / 128}
"""Of one value, with its share of a block's scale (`kernels.update`)."""
PROJECTED = frozenset({"galore", "apollo"})
"""Optimizers with the states of projected gradients."""
BLOCKWISE = frozenset({"lisa", "badam"})
"""Optimizers that train some layers at a time, and have gradients, states and masters of those alone."""
LISA_LAYERS = 2
"""Layers that LISA trains at a time."""
ALONE = frozenset({"adamw", "lion"})
"""Optimizers that update each weight for itself, from its gradient as backward made it (`optim.fused`)."""
PIECE, BUFFERS = {"host": 1 << 24, "disk": 1 << 20}, 4
"""Values whose states visit the device at a time, and how many such pieces do; as in `optim.offload`."""
TOGETHER = 1 << 23
"""Values of the matrices that Muon computes at a time, as in `optim.muon`."""
PINNED = 1.25
"""Host memory of pinned tensors: their sizes are rounded up to powers of two."""
LOGITS = {"cpu": 1 << 23, "cuda": 1 << 28}
"""Logits the loss holds at a time; the same as `kernels.linear_cross_entropy.CHUNK_ELEMENTS`."""
DISTILLED = {"every": 8, "likeliest": 4}
"""Tensors in fp32, as large as a chunk of logits, while two models are compared without a kernel, by all tokens or by
the teacher's likeliest; of a quarter of the usual chunk. One more where the student's probabilities are not those of
its own loss."""
FP8_MULTIPLE = 16
"""Sizes of fp8 matmuls are multiples of this; the same as in `kernels.fp8`."""
LOGIT_BYTES = {"cpu": 8, "cuda": 2}
"""Of one logit at the worst moment: on a CPU fp32 logits and softmax; on a GPU the gradient replaces them."""
CONTEXT = {"cpu": 450 * MIB, "cuda": 800 * MIB}
"""Measured with our kernels loaded: 742 to 814 MiB."""
LIBRARIES = {"cpu": 0, "cuda": 68 * MIB}
"""Measured: what cuBLAS keeps of the allocator's memory."""
WIDE = {("adapters", "plain"): 3.0, ("adapters", "fp8"): 4.0, ("full", "plain"): 4.0, ("full", "fp8"): 5.5}
"""Tensors as wide as the MLP, in the working precision, that exist beside what was kept while its gradient is computed:
those of the activation (one) and of both its inputs (two), then their fp8 values. The last one is measured."""
WIDE_AGAIN = {"adapters": 0.8, "full": 3.5}
"""How many more where the layer is computed again at the same time, if it is compiled in two pieces; measured. Of one
graph none are seen, with all weights or in fp8; adapters in half precision have not been measured as one."""
ENDS = {"adapters": 2, "full": 4}
"""Hidden states that are kept outside of the layers; a final norm that is trained keeps its input in fp32 as well."""
ROUNDED = 16
"""Bytes a weight while it is rounded: itself with its adapter, its scale, and two in between, in fp32."""
COLLECTIVE_BYTES = {"int8": 1 + 4 / 128, "int4": 0.5 + 4 / 64}
"""Bytes of a rounded value between ranks, with its share of a block's scale (`parallel.quantized`)."""
CROWDED = 1.2
"""Tokens that come to the rank whose experts are the most popular, against the mean; taken, not measured."""
COLLECTIVES = 300 * MIB
"""What NCCL takes once there is more than one rank."""
FRAGMENTATION = {"cpu": 0.08, "cuda": 0.01}
"""Of what comes and goes. On a GPU 0.4% was enough where memory was short; it takes up to 10% where there is plenty."""
SCAN_CHUNK = 128
"""Tokens of a chunk of a state space, the same as in `kernels.scan`."""
ROLLOUT_ROWS = 256
"""Answers that are decoded at once, at most."""
ENGINE = 4 * 2**30
"""Of vLLM on a GPU besides weights, keys and values. Its documentation's usual figures; not measured here."""
CACHE_ROOM = 64
"""Columns of their cache that nothing is in yet, the same as in `infer.cache`; captured steps have a multiple."""
OUTSIDE = frozenset({"loss", "optimizer step"})
"""Moments whose workspace is not that of the layers' passes."""
POOLS = {"plain": 0.015, "rounded": 0.05}, 128 * MIB
"""What two pools hold beyond what they need: a share of all, and this. With plenty of memory it was 1 to 2% where
matmuls and weights are in half precision, 4 to 10% with fp8 or nf4, whose weights come and go in many sizes. Where it
does not suffice, passes are run as they are."""
HOST_PROCESS = 3 * 2**30
"""Host memory of one rank without weights: Python, torch, CUDA's libraries."""


def timeline(task: Task, choice: Choice) -> list[Phase]:
    """The memory of one rank at each moment of a step that may be its peak."""
    if task.padded is not None and task.shape is None:
        every = [_timeline(one, choice) for one in task.largest(choice.room(task))]
        return [max(phases, key=lambda one: one.memory.total) for phases in zip(*every, strict=True)]
    phases, answered = _timeline(task, choice), _with_answers(task, choice)
    if answered is None:
        return phases
    larger = {phase.name: phase for phase in _timeline(*answered) if phase.name != "rollout"}
    return [max(phase, larger.get(phase.name, phase), key=lambda one: one.memory.total) for phase in phases]


def _with_answers(task: Task, choice: Choice) -> tuple[Task, Choice] | None:
    """A step in which the student's answers are as long as they may be, where these make micro-batches of what would be
    one without them: smaller ones, beside whose activations stand the gradients of those before."""
    if not isinstance(task.objective, Distill) or (answered := rolled_out(task, choice)) is None:
        return None
    rollout, prompts, _ = answered
    rows = -(-task.sequences // choice.data_ranks) + -(-prompts * rollout.max_answer_tokens // task.sequence_length)
    count = -(-rows // choice.micro_batch)
    if count == 1 or choice.accumulation_steps(task) > 1:
        return None
    larger = dataclasses.replace(task, sequences=rows * choice.data_ranks)
    return larger, dataclasses.replace(choice, micro_batch=-(-rows // count))


def _timeline(task: Task, choice: Choice) -> list[Phase]:
    facts, width = task.facts, task.width
    is_full = not task.has_adapters
    static = _static(task, choice)
    is_head_fp8 = has_fp8_head(task, choice)
    static["weights"] += facts.embedding if is_head_fp8 else 0
    static["weights"] += teacher_bytes(task, choice) if task.teacher_in_steps else 0.0
    tokens = choice.tokens(task)
    saved, one_layer = _activations(task, choice, tokens)
    gradients = _gradients(task, choice)
    kept_gradients = _kept_gradients(task, choice)
    saved += _taught(task, tokens)
    gathered, gathered_head, unit = _gathered(task, choice)
    spread = choice.tensor
    hidden = tokens * facts.hidden * width
    has_logits = facts.has_head and not task.objective.has_embeddings
    head = facts.embedding / spread if is_full and has_logits else 0.0
    forward, backward, again = _workspaces(task, choice, hidden)
    if facts.paired is not None and task.shape is not None:
        forward, backward, again = hidden, max(0.0, facts.paired.workspace(*task.shape)), 0.0
    is_all_again = choice.checkpointed_layers == facts.layers
    is_some_again = 0 < choice.checkpointed_layers < facts.layers
    inputs = _recomputed(task, choice, tokens)
    ends = ENDS["full" if is_full else "adapters"] * hidden / spread
    upper, late = _late_gradients(task, choice, gradients, head) if is_full else (0.0, 0.0)
    last = _last_gradient(task, choice)
    dequantized = _dequantized(task, choice)
    received = _received(task, choice, tokens)
    # Captured passes have a place for the gradient they are given, and make theirs beside the sum of several.
    placed = {"workspace": hidden, "gradients": gradients if kept_gradients else 0.0} if choice.cuda_graphs else {}
    phase = functools.partial(_phase, task, choice, static, {"gathered": received, **placed})
    phases = [
        phase("loading", **_loading(task, choice, static)),
        phase(
            "end of the forward pass",
            activations=saved,
            gradients=kept_gradients,
            gathered=gathered,
            quantization=dequantized,
            workspace=forward,
        ),
        phase(
            "loss",
            activations=saved,
            gradients=kept_gradients,
            gathered=gathered_head,
            loss=_loss(task, _predicting(task, tokens), spread, head, in_fp8=is_head_fp8) + hidden,
        ),
        phase(
            "first layer of the backward pass",
            activations=saved - ends + (one_layer if is_all_again else 0.0),
            gradients=max(kept_gradients, head * width),
            gathered=gathered + unit,
            quantization=dequantized,
            workspace=backward + (again if is_all_again else 0.0),
        ),
        phase(
            "first checkpointed layer of the backward pass",
            activations=inputs + (one_layer if is_some_again else 0.0),
            gradients=max(kept_gradients, min(upper, gradients)),
            gathered=gathered + unit,
            quantization=dequantized,
            workspace=backward + again if is_some_again else 0.0,
        ),
        phase(
            "last layer of the backward pass",
            activations=one_layer,
            gradients=max(kept_gradients, gradients - late),
            gathered=gathered + unit,
            quantization=dequantized,
            workspace=backward + (again if choice.checkpointed_layers else 0.0),
        ),
        phase("end of the backward pass", gradients=gradients, gathered=gathered, workspace=last / spread),
        phase("optimizer step", gradients=gradients, workspace=_optimizer_workspace(task, choice)),
    ]
    phases += [phase(name, **parts) for name, parts in _besides(task, choice, static, saved, tokens).items()]
    if not choice.cuda_graphs:
        return phases
    logits = _logits(task, tokens, in_fp8=is_head_fp8)
    more = POOLS[0]["plain" if choice.matmul_dtype == choice.storage == "plain" else "rounded"]
    return _with_pool(phases, summed=round(kept_gradients + head * width), logits=round(logits), more=more)


def _predicting(task: Task, tokens: float) -> float:
    """Of the tokens, those that may predict others: of an encoder-decoder what is written."""
    return tokens if task.shape is None or len(task.shape) < 3 else task.shape[0] * task.shape[2]


def _late_gradients(task: Task, choice: Choice, gradients: float, head: float) -> tuple[float, float]:
    """Bytes of the gradients that are there when the backward pass comes to the first checkpointed layer, and of those
    that are missing before its last layer."""
    facts = task.facts
    layer = max(kind.parameters for kind in facts.kinds) / choice.tensor
    for_each = gradients / max(1.0, _held(task, choice)[1])
    upper = head + (facts.layers - choice.checkpointed_layers) * layer
    late = (0.0 if facts.tied else facts.embedding / choice.tensor) + layer
    return upper * for_each, late * for_each


def _besides(
    task: Task, choice: Choice, static: dict[str, float], saved: float, tokens: float
) -> dict[str, dict[str, float]]:
    """The moments that only some runs have."""
    phases = {}
    if task.facts.teacher is not None:
        phases["the teacher's forward pass"] = _asking(task, choice, static, tokens)
    if task.is_merged:
        phases["merge"] = _merging(task, choice, saved, tokens)
    if (answers := rolled_out(task, choice)) is not None and not has_engine(task):
        phases["rollout"] = _rolling_out(task, *answers)
    return phases


def _phase(
    task: Task, choice: Choice, static: dict[str, float], throughout: dict[str, float], name: str, **parts: float
) -> Phase:
    """`static`: what is always there. `throughout`: what is there in all of a step, and not while the model loads."""
    sizes = {**static, **parts}
    for part, size in throughout.items():
        sizes[part] = sizes.get(part, 0.0) + (size if name != "loading" else 0.0)
    if task.device == "cuda":
        sizes["context"] = CONTEXT["cuda"] + (COLLECTIVES if choice.ranks > 1 else 0)
    else:
        sizes["context"] = CONTEXT["cpu"]
    sizes["workspace"] = sizes.get("workspace", 0.0) + LIBRARIES[task.device]
    sizes["fragmentation"] = FRAGMENTATION[task.device] * sum(
        sizes.get(part, 0.0) for part in ("activations", "gradients", "loss", "gathered", "workspace")
    )
    return Phase(name=name, memory=Memory(**{part: max(0, round(size)) for part, size in sizes.items()}))


def _workspaces(task: Task, choice: Choice, hidden: float) -> tuple[float, float, float]:
    """Short-lived tensors of a layer's forward and backward pass, and what it takes more to compute it again."""
    trained = "adapters" if task.has_adapters else "full"
    wide = max(kind.intermediate for kind in task.facts.kinds) * task.width * choice.mlp_tokens(task) / choice.tensor
    forward = (1 if choice.is_compiled else 2) * wide + hidden
    if choice.is_compiled:
        backward = WIDE[trained, choice.matmul_dtype] * wide
    else:
        backward = 3 * wide + 4 * hidden
    backward += 2 * wide if choice.mlp_slice else 0.0  # a slice is computed again first
    # Of experts, the gradient of their first matmul, and of its input.
    copied = max(kind.copies for kind in task.facts.kinds) * hidden
    backward = max(backward, 2 * wide + copied) if copied else backward
    scan = max((_scan_bytes(task, kind.state_space) for kind in task.facts.kinds), default=0.0)
    backward = max(backward, scan * choice.tokens(task))
    is_more = task.has_adapters and choice.matmul_dtype != "fp8"
    again = WIDE_AGAIN[trained] * wide if choice.is_compiled and is_more else 0.0
    again += hidden if choice.offload_activations else 0.0  # the next input is on its way
    return forward, backward, again


def _scan_bytes(task: Task, space: StateSpace | None) -> float:
    """What the backward pass of our scan makes for each token: two triangles of each chunk, states at its two ends, and
    some tensors of its width (`kernels.scan`). On a CPU nothing of it is fused, and decays are in fp64."""
    if space is None or task.facts.scan != "ours":
        return 0.0
    triangles, states = space.heads * SCAN_CHUNK, space.state * space.inner / SCAN_CHUNK
    if task.device == "cpu":
        return 32 * triangles + (4 * states + 8 * space.channels) * task.width
    return (2 * triangles + 2 * states + 6 * space.inner + 3 * space.channels) * task.width


def peak(phases: list[Phase]) -> Phase:
    return max(phases, key=lambda phase: (phase.memory.total, phase.memory.allocated))


def host_memory(task: Task, choice: Choice, *, copied: int = 0) -> int:
    """Peak of all ranks of a node in host memory: loading, then what is offloaded and `copied` of a checkpoint."""
    per_node = max(1, choice.ranks // task.hardware.nodes)
    if task.device == "cpu":
        return peak(timeline(task, choice)).memory.total + copied
    loading = per_node * task.facts.largest_layer * 4  # a few tensors at a time, on their way to the device
    offloaded = 0.0
    if choice.offload_parameters:
        offloaded += per_node * parameter_bytes(task, choice)
    if choice.offload_parameters and not choice.has_frozen_on_host(task):
        offloaded += per_node * gradient_bytes(task, choice)
        offloaded += per_node * (_visiting if choice.offload_optimizer == "disk" else offloaded_bytes)(task, choice)
    elif choice.offload_optimizer != "none":  # from a disk by way of as many buffers as the device has
        is_here = choice.offload_optimizer == "host"
        offloaded += per_node * (offloaded_bytes(task, choice) if is_here else _visiting(task, choice))
    if choice.offload_activations:
        offloaded += per_node * _layer_inputs(task, choice, choice.tokens(task))
    return round(per_node * HOST_PROCESS + max(loading, offloaded + copied))


def checkpoint(task: Task, choice: Choice) -> int:
    """What all ranks of a node write of a checkpoint."""
    return round(checkpoint_bytes(task, choice) / min(choice.ranks, task.hardware.nodes))


def checkpoint_bytes(task: Task, choice: Choice) -> float:
    """Of a checkpoint: trained weights as the optimizer updates them, and states."""
    if task.optimizer in BLOCKWISE and not task.has_adapters:
        active = active_parameters(task)
        return (task.trained - active) * task.width + active * (4 + _states(task, choice))
    is_half = task.precision != "fp32" and choice.sharding == "none" and not choice.has_masters(task)
    if task.is_merged:
        held = task.width if choice.storage == "plain" else QUANTIZED[choice.storage]
        return task.facts.matrices * held + task.trained * (4 + _states(task, choice))
    weight = task.width if is_half and not task.has_adapters else 4
    return task.trained * (weight + _states(task, choice))


def result_bytes(task: Task) -> int:
    """Of the trained adapter, or of the model in the precision it is held in."""
    if task.is_merged:
        return task.facts.parameters * task.width
    return task.trained * (4 if task.has_adapters else task.width)


def parameter_bytes(task: Task, choice: Choice) -> float:
    """What offloaded parameters of one rank take in host memory."""
    return parameter_traffic(task, choice) * (1 if choice.has_frozen_on_host(task) else PINNED)


def parameter_traffic(task: Task, choice: Choice) -> float:
    """Offloaded parameters of one rank: the frozen ones as they are held, trained ones in fp32."""
    static = _static(task, dataclasses.replace(choice, offload_parameters=False))
    if choice.has_frozen_on_host(task):
        return static["weights"] - _ends(task, choice) * task.width
    return sum(static.get(part, 0.0) for part in ("weights", "adapter", "master"))


def gradient_bytes(task: Task, choice: Choice) -> float:
    """Offloaded gradients of one rank."""
    return 4 * _held(task, choice)[1] * _share(choice, "states")


def disk(task: Task, choice: Choice) -> int:
    """What all ranks of a node keep on its disk while they train."""
    per_node = max(1, choice.ranks // task.hardware.nodes)
    return round(per_node * offloaded_bytes(task, choice)) if choice.offload_optimizer == "disk" else 0


def offloaded_bytes(task: Task, choice: Choice) -> float:
    """States, and masters beside the model's weights, of one rank."""
    values = _states(task, choice) + (4 if choice.has_masters_apart(task) else 0)
    return _held(task, choice)[1] * values * _share(choice, "states")


def share(sharding: Sharding, what: str, data_ranks: int, shard: int) -> float:
    """The part of `what` (weights, gradients or states) that one rank holds between uses."""
    whole = {
        "none": (),
        "ddp": (),
        "zero1": ("states",),
        "zero2": ("states", "gradients"),
        "zero3": ("states", "gradients", "weights"),
        "hybrid": ("states", "gradients", "weights"),
        "hierarchical": ("states", "gradients", "weights"),
    }[sharding]
    if what not in whole:
        return 1.0
    return 1 / (shard if sharding == "hybrid" else data_ranks)


def model_states(
    parameters: int,
    sharding: Sharding,
    ranks: int,
    *,
    weights: float = 2.0,
    gradients: float = 2.0,
    states: float = 12.0,
    offload_states: bool = False,
    offload_weights: bool = False,
) -> float:
    """Bytes a rank holds of weights, gradients and states alone, given their bytes a parameter: what is published."""
    held = 0.0 if offload_weights else weights * share(sharding, "weights", ranks, ranks)
    if not offload_states:
        held += gradients * share(sharding, "gradients", ranks, ranks) + states * share(
            sharding, "states", ranks, ranks
        )
    return parameters * held


def kind_experts(kind: Layer) -> int:
    """Parameters of a layer's experts."""
    return sum(linear.count * linear.inputs * linear.outputs for linear in kind.linears if linear.count > 1)


def has_fp8_head(task: Task, choice: Choice) -> bool:
    """Whether a frozen head has its weight in fp8 besides (`model.fp8`): where it is whole on each rank, and memory is
    not so short that layers are checkpointed."""
    is_cut = choice.tensor * choice.pipeline * choice.expert > 1
    is_whole = not is_cut and choice.sharding in ("none", "ddp", "zero1", "zero2")
    is_frozen = task.has_adapters and task.facts.has_head and not choice.checkpointed_layers
    return choice.matmul_dtype == "fp8" and is_frozen and is_whole and task.facts.hidden % FP8_MULTIPLE == 0


# parts


def _with_pool(phases: list[Phase], *, summed: int, logits: int, more: float) -> list[Phase]:
    """Captured passes have a pool of memory of their own, as large as they need it at their worst moment, and nothing
    but the `logits` can use what is free in it. `summed`: bytes of gradients that are made elsewhere; `more`: the part
    that is held beyond what is needed."""
    loading, *step = phases

    def within(phase: Phase) -> int:
        now = phase.memory
        short_lived = 0 if phase.name in OUTSIDE else now.quantization + now.workspace
        short_lived += logits if phase.name == "loss" else 0
        return now.activations + max(0, now.gradients - summed) + short_lived

    held = max(within(one) for one in step) + max(one.memory.total - within(one) for one in step)
    held += round(more * (held - step[0].memory.context)) + POOLS[1]

    def whole(memory: Memory) -> Memory:
        return memory.changed(fragmentation=memory.fragmentation + held - memory.total)

    return [loading, *(one.changed(memory=whole(one.memory)) for one in step)]


def _share(choice: Choice, what: str) -> float:
    return share(choice.sharding, what, choice.holders, choice.sharers)


def _held(task: Task, choice: Choice) -> tuple[float, float]:
    """Base and trained parameters of this rank's part of the model, before they are sharded over data ranks."""
    facts = task.facts
    body = facts.total(lambda kind: kind.parameters) / choice.tensor
    if choice.pipeline > 1:
        body *= -(-facts.layers // choice.pipeline) / facts.layers
    base = body + _ends(task, choice)
    if not task.has_adapters:
        return base, active_parameters(task) if task.optimizer in BLOCKWISE else base
    return base, task.trained / choice.tensor / choice.pipeline


def _ends(task: Task, choice: Choice) -> float:
    """Parameters of this rank that are not in layers."""
    facts = task.facts
    head = facts.head if choice.pipeline == 1 else 0  # the first stage or the last
    return (facts.embedding + head) / choice.tensor + facts.extra


def active_parameters(task: Task) -> int:
    """Those that are trained at a time, at most (`optim.blocks`)."""
    facts = task.facts
    layers = sorted((facts.kinds[kind].parameters for kind in facts.pattern), reverse=True)
    if task.optimizer == "badam":
        is_apart = facts.has_head and not facts.tied
        return max(layers[0], facts.head + facts.extra + (0 if is_apart else facts.embedding), facts.embedding)
    return facts.embedding + facts.head + facts.extra + sum(layers[:LISA_LAYERS])


def trained_share(task: Task) -> float:
    """Of the layers, where all weights are trained: how many are at a time."""
    at_once = {"lisa": LISA_LAYERS, "badam": 1}.get(task.optimizer, task.facts.layers)
    return 1.0 if task.has_adapters else min(1.0, at_once / task.facts.layers)


def _static(task: Task, choice: Choice) -> dict[str, float]:
    if choice.offload_parameters and not choice.has_frozen_on_host(task):
        return {"weights": 0.0}
    base, trained = _held(task, choice)
    weights = base * task.width
    matrices = task.facts.matrices / choice.tensor / choice.pipeline
    if choice.storage != "plain":
        weights -= matrices * (task.width - QUANTIZED[choice.storage])
    elif choice.matmul_dtype == "fp8" and task.has_adapters:  # the frozen base, quantized once; but experts are not
        matrices -= task.facts.total(kind_experts) / choice.tensor / choice.pipeline
        weights -= matrices * (task.width - (2 if choice.cache_transposed else 1))
    weights = _ends(task, choice) * task.width if choice.has_frozen_on_host(task) else weights
    on_device = choice.offload_optimizer == "none"
    states = _share(choice, "states")
    if choice.sharding != "none" and not task.has_adapters:  # what the forward pass uses is made from these
        has_masters = choice.has_masters(task)
        return {
            "weights": 0.0 if has_masters else task.width * trained * states,
            "master": 4 * trained * states if has_masters else 0.0,
            "optimizer": trained * _states(task, choice) * states if on_device else _visiting(task, choice),
        }
    return {
        "weights": weights * _share(choice, "weights"),
        "adapter": 4 * trained * states if task.has_adapters else 0.0,
        "master": 4 * trained * states if choice.has_masters(task) and on_device else 0.0,
        "optimizer": trained * _states(task, choice) * states if on_device else _visiting(task, choice),
    }


def _visiting(task: Task, choice: Choice) -> float:
    """Buffers for what lives in host memory or on disk."""
    trained = _held(task, choice)[1] * _share(choice, "states")
    return BUFFERS * min(PIECE[choice.offload_optimizer] / trained, 1) * offloaded_bytes(task, choice)


def projected_rank(optimizer: str, short: int) -> int:
    """Of the projected gradients of a matrix with this shorter side."""
    quarter = max(1, short // 4)
    return quarter if optimizer == "galore" else min(256, quarter)


def _projected_states(task: Task) -> float:
    """Values of state of all weights: two moments of each projected matrix, GaLore's projections, and AdamW's of the
    rest."""

    def of(kind: Layer) -> float:
        values = 2.0 * kind.parameters
        for one in kind.linears:
            short, long = sorted((one.inputs, one.outputs))
            rank = projected_rank(task.optimizer, short)
            held = 2 * rank * long + (short * rank if task.optimizer == "galore" else 0)
            values += (held - 2 * short * long) if one.count == 1 else 0  # stacks of experts are AdamW's
        return values

    facts = task.facts
    return facts.total(of) + 2.0 * (facts.embedding + facts.head + facts.extra)


def _states(task: Task, choice: Choice) -> float:
    """Bytes of optimizer state for each trained parameter."""
    if task.optimizer == "adafactor":  # a row and a column of each matrix
        facts = task.facts
        widths = task.adapted[1] if task.has_adapters else facts.total(lambda kind: kind.widths) + facts.vocabulary
        return min(4.0, 4 * widths / max(1, task.trained))
    if task.optimizer in PROJECTED:
        return 4 * _projected_states(task) / max(1, task.trained)
    values = float(STATES[task.optimizer])
    if task.optimizer == "muon" and not task.has_adapters:  # embedding and head are AdamW's
        values += (task.facts.embedding + task.facts.head) / task.facts.parameters
    if task.method == "loqt":  # the first factor is not trained
        values /= 2
    size = STATE_BYTES[choice.optimizer_states]
    if task.has_adapters and size < 2:  # rows of the second factor are shorter than a block: they stay in fp32
        size = (size + 4.0) / 2
    return values * size


def _gradients(task: Task, choice: Choice) -> float:
    """All of them; in fp32 where they are summed or unscaled, else as backward made them. Released: the largest two."""
    if choice.offload_parameters and not choice.has_frozen_on_host(task):
        return 0.0
    is_summed = choice.accumulation_steps(task) > 1 or (choice.sharding != "none" and choice.has_masters(task))
    is_made = task.optimizer in ALONE | BLOCKWISE and task.precision == "bf16" and not is_summed
    width = task.width if is_made and task.has_masters else 4
    held = _held(task, choice)[1] * _share(choice, "states")
    if choice.optimizer_in_backward:
        held = min(held, 2 * task.facts.embedding / choice.tensor)
    return width * held


def _kept_gradients(task: Task, choice: Choice) -> float:
    """Those of the micro-batches before: whole where they are reduced once a step."""
    if choice.accumulation_steps(task) == 1:
        return 0.0
    is_whole = choice.sharding in ("ddp", "zero1") or (choice.sharding not in ("none", "zero2") and task.has_adapters)
    return 4 * _held(task, choice)[1] if is_whole else _gradients(task, choice)


def _gathered(task: Task, choice: Choice) -> tuple[float, float, float]:
    """Whole parameters out of shards with the buffers of collectives, in the layers and at the loss, and the
    gradients of one layer on their way."""
    facts = task.facts
    if not choice.offload_parameters and (choice.sharding == "none" or choice.ranks == 1):
        return 0.0, 0.0, 0.0
    stay = kind_experts if choice.expert > 1 else (lambda _: 0)  # tokens go to experts that have their places
    layer = max(kind.parameters - stay(kind) for kind in facts.kinds) / choice.tensor
    matrices = max(kind.matrices - stay(kind) for kind in facts.kinds) / choice.tensor
    unit = layer * (task.width + 2 * 4) if not task.has_adapters else 0.0  # as made; in fp32, with those before
    if choice.quantized_reduce_scatter != "plain":
        unit += layer * (4 + 2 * COLLECTIVE_BYTES[choice.quantized_reduce_scatter])
    packed = (
        0.0 if choice.quantized_all_gather == "plain" else 2 * layer * COLLECTIVE_BYTES[choice.quantized_all_gather]
    )
    if choice.sharding in ("ddp", "zero1", "zero2"):
        base, trained = _held(task, choice)
        whole = 4 * trained if task.has_adapters else base * task.width
        buffer = 0.0 if choice.sharding == "ddp" else whole / facts.layers if task.has_adapters else layer * task.width
        return whole + packed + buffer, whole, unit
    width = layer * task.width + packed / 2
    if choice.storage != "plain":  # 4 bits between ranks too
        width -= matrices * (task.width - QUANTIZED[choice.storage])
    if choice.has_frozen_on_host(task):
        return 2 * width, 2 * width, unit  # the layer in use and the next one
    kept = _held(task, choice)[0] * task.width / choice.sharers if choice.sharding == "hierarchical" else 0.0
    kept += _ends(task, choice) * task.width  # from the forward pass to the backward pass
    together = 1 if choice.ranks == 1 else 2  # on one rank FSDP brings a layer when it is called, not before
    return kept + together * width, kept + width, unit


def _loading(task: Task, choice: Choice, static: dict[str, float]) -> dict[str, float]:
    """On one rank a plain model comes to the device as its files have it; a base that is to be in fp8 becomes so layer
    by layer. Optimizer states do not exist yet."""
    on_host = choice.has_frozen_on_host(task)
    if choice.ranks > 1 or task.device == "cpu" or (choice.offload_parameters and not on_host):
        return {"optimizer": 0.0}
    joint = _widest_matmul(task, choice)  # weights that share an input are put together for their adapters
    if on_host:  # where they go layer by layer
        layer = _gathered(task, choice)[0] / 2
        return {"optimizer": 0.0, "gathered": layer, "workspace": joint * task.width}
    if choice.storage != "plain":
        return {"optimizer": 0.0, "quantization": joint * (QUANTIZED[choice.storage] + task.width)}
    whole = max(static["weights"], task.facts.parameters * float(task.width))
    return {"optimizer": 0.0, "weights": whole, "workspace": joint * task.width if task.has_adapters else 0.0}


def _loss(task: Task, tokens: float, spread: int, head: float, *, in_fp8: bool) -> float:
    """A chunk of logits and the gradient of the head (`kernels.linear_cross_entropy`): in fp32, and its part of it, or,
    where the matmul itself adds that, the gradient once more in half precision when the logits are gone. Of
    embeddings, the hidden states that are pooled, in fp32, with their gradient (`model.embedding`). Of words with
    labels, as if every token were one: hidden states, as they are and in fp32, and scores, with the gradients."""
    if task.objective.has_embeddings:
        return 8 * task.facts.hidden * tokens
    if isinstance(task.objective, ClassifyTokens):
        hidden, outputs = task.facts.hidden, len(task.objective.labels)
        return tokens * (2 * (4 + task.width) * hidden + 3 * 4 * outputs)
    if isinstance(task.objective, Distill):
        return _compared(task, task.objective, tokens, head) + 4 * head
    logits = _logits(task, tokens, in_fp8=in_fp8) / spread
    if task.device == "cuda" and task.width == 2:
        return max(logits + 4 * head, (4 + task.width) * head)
    return logits + (4 + task.width) * head


def _logits(task: Task, tokens: float, *, in_fp8: bool) -> float:
    """A chunk of them, with their gradient where it is not in their place."""
    width = max(LOGIT_BYTES[task.device], task.width) + (1 if in_fp8 else 0)
    return min(LOGITS[task.device], tokens * task.facts.vocabulary) * width


def teacher_bytes(task: Task, choice: Choice) -> float:
    """The weights of the teacher, whole on each rank."""
    teacher = task.facts.teacher
    if teacher is None:
        return 0.0
    saved = 0.0 if choice.teacher_storage == "plain" else task.width - QUANTIZED[choice.teacher_storage]
    return teacher.parameters * task.width - teacher.matrices * saved


def _taught(task: Task, tokens: float) -> float:
    """The teacher's hidden states, which wait for the student's."""
    teacher = task.facts.teacher
    return tokens * teacher.hidden * task.width if teacher is not None and task.teacher_in_steps else 0.0


def _compared(task: Task, objective: Distill, tokens: float, head: float) -> float:
    """The student's logits beside the teacher's (`kernels.linear_distillation`)."""
    facts, teacher = task.facts, task.facts.teacher
    logits = min(LOGITS[task.device] / 4, tokens * facts.vocabulary)
    if task.device == "cuda":  # by a kernel that reads both as they are; the teacher's are made in two precisions
        taught = 4 if task.teacher_in_steps else 0
        rounding = task.width if taught else 0
        return max(logits * (task.width + taught + rounding), task.width * head)
    is_own = objective.distillation.temperature == 1 and (teacher or facts).vocabulary >= facts.vocabulary
    tensors = DISTILLED["every" if task.teacher_in_steps else "likeliest"] + (not is_own)
    return tensors * 4 * logits  # the head's gradient is added when the comparison is over


def _asking(task: Task, choice: Choice, static: dict[str, float], tokens: float) -> dict[str, float]:
    """While the teacher computes: before the student does, or before it is there at all."""
    teacher = task.facts.teacher
    assert teacher is not None
    wide = max(kind.intermediate for kind in teacher.kinds)
    workspace = tokens * (3 * wide + 6 * teacher.hidden) * task.width
    if choice.teacher_storage != "plain":
        workspace += task.width * max(one.inputs * one.outputs for kind in teacher.kinds for one in kind.linears)
    if task.teacher_in_steps:
        return {"gradients": _kept_gradients(task, choice), "workspace": workspace}
    logits = DISTILLED["likeliest"] * 4 * min(LOGITS[task.device] / 4, tokens * teacher.vocabulary)
    return {"weights": teacher_bytes(task, choice), **dict.fromkeys(static.keys() - {"weights"}, 0.0)} | {
        "workspace": workspace,
        "loss": logits,
    }


def _merging(task: Task, choice: Choice, saved: float, tokens: float) -> dict[str, float]:
    """While adapters are merged into the base: one weight in fp32 and what is made of it; before that, with LoQT, a
    pass in which every linear's input is kept, and one gradient's singular directions."""
    matrix = max(one.inputs * one.outputs for kind in task.facts.kinds for one in kind.linears if one.count == 1)
    if task.method == "relora":
        return {"workspace": 3 * 4 * matrix}
    kept = task.facts.total(lambda kind: kind.norms * task.facts.hidden + kind.query + kind.intermediate)
    share = choice.checkpointed_layers / task.facts.layers  # others have them among their activations
    return {"activations": saved + share * tokens * kept * task.width, "workspace": 5 * 4 * matrix}


def rolled_out(task: Task, choice: Choice) -> tuple[Rollout, int, int] | None:
    """Where the model itself answers in steps: the settings, prompts that a rank has in a step, and answers to each."""
    objective = task.objective
    if isinstance(objective, Grpo):
        return objective.rollout, -(-objective.rollout.prompts // choice.data_ranks), objective.rollout.answers
    if isinstance(objective, Distill) and objective.is_on_policy:
        documents = task.sequences * task.sequence_length / max(1, task.mean_document or task.document_length)
        return objective.rollout, math.ceil(documents / choice.data_ranks), 1
    return None


def has_engine(task: Task) -> bool:
    """Whether another process than the trainer answers."""
    return isinstance(task.objective, Grpo) and task.objective.rollout.engine == "vllm"


def engine_memory(task: Task) -> int:
    """What vLLM needs beside the trainer, on the device where it answers: the base, keys and values of all answers at
    their longest, and what its libraries, captured passes and its largest batch take."""
    base = task.facts.parameters * task.width
    return round(base + engine_cache(task) + (ENGINE if task.device == "cuda" else HOST_PROCESS))


def engine_cache(task: Task) -> float:
    """Bytes of keys and values; on a CPU whole GiB, as vLLM is told them there."""
    assert isinstance(task.objective, Grpo)
    facts, rollout = task.facts, task.objective.rollout
    rows = min(ROLLOUT_ROWS, rollout.prompts * rollout.answers)
    longest = min(task.sequence_length, (task.longest_sampled or task.document_length) + rollout.max_answer_tokens)
    size = 2 * facts.kv_heads * facts.head_dim * facts.layers * task.width * rows * longest
    return size if task.device == "cuda" else 2**30 * math.ceil(size / 2**30)


def _rolling_out(task: Task, rollout: Rollout, prompts: int, answers: int) -> dict[str, float]:
    """While the model answers: keys and values of all rows, each with as many columns as the longest has, twice when
    rows leave the cache or, on a GPU, when they are copied to where captured steps have them; and the last logits."""
    facts = task.facts
    rows = min(ROLLOUT_ROWS, prompts * answers)
    prompt, answer = task.longest_sampled or task.document_length, rollout.max_answer_tokens
    if isinstance(task.objective, Distill):  # the student's answer takes the place of one in the data
        prompt = max(1, prompt - answer)
    longest = min(task.sequence_length, prompt + answer)
    cached = rows * (longest + CACHE_ROOM)
    copied = rows * (longest + CACHE_ROOM / 2) if task.device == "cuda" else 0.5 * cached
    wide = max(kind.intermediate for kind in facts.kinds)
    read = rows / answers * prompt * (3 * wide + 6 * facts.hidden) * task.width
    return {
        "activations": 2 * facts.kv_heads * facts.head_dim * facts.layers * task.width * (cached + copied),
        "loss": rows * facts.vocabulary * (task.width + 4 + 4 + 8),
        "workspace": 0.0 if task.device == "cuda" else read,
    }


def _last_gradient(task: Task, choice: Choice) -> float:
    """What stands beside all gradients when the embedding's is made: its own once more where it is added to the
    head's, or to that of an fp32 master."""
    if task.has_adapters:
        return 0.0
    is_added = task.facts.tied or (choice.has_masters(task) and task.optimizer not in ALONE | BLOCKWISE)
    return task.facts.embedding * task.width if is_added else 0.0


def _dequantized(task: Task, choice: Choice) -> float:
    """A weight made whole: in half precision, or in fp8 with its transposed copy, which is as much."""
    widest = _widest_matmul(task, choice) / choice.tensor
    if task.is_quantization_aware:
        return widest * (ROUNDED + task.width)
    if choice.storage != "plain":
        return widest * task.width
    is_transposed = (
        choice.matmul_dtype == "fp8" and task.has_adapters and choice.is_compiled and not choice.cache_transposed
    )
    return widest if is_transposed else 0.0  # the transposed copy alone


def _widest_matmul(task: Task, choice: Choice) -> float:
    """Weights that are multiplied at once: those of gate and up together where they are fused, a rank's experts of a
    layer where they are held in few bits, or the largest ones."""
    is_joint = task.has_adapters and not is_apart(task, choice.storage)

    def together(kind: Layer, linear: Linear) -> float:
        if linear.count > 1:
            return linear.count / choice.expert
        return 2 if is_joint and kind.is_gated and linear.outputs == kind.intermediate else 1

    return max(
        linear.inputs * linear.outputs * together(kind, linear)
        for kind in task.facts.kinds
        for linear in kind.linears
        if linear.count == 1 or choice.storage != "plain"
    )


def is_apart(task: Task, storage: str) -> bool:
    """Adapters that are not fused with the linears they belong to."""
    return task.has_adapters and bool(task.lora.dropout or task.lora.dora or storage == "int8" or task.is_merged)


def layer_bytes(
    task: Task,
    kind: Layer,
    *,
    is_compiled: bool,
    matmul_dtype: str = "plain",
    storage: str = "plain",
    tensor: int = 1,
    is_sliced: bool = False,
    crowded: float = 1.0,
    attention_kernel: Attention | None = None,
    is_frozen: bool = False,
) -> float:
    """What a layer keeps for backward, for each token. Where the probe has counted it for the usual case, others are to
    that as the formulas say. `is_frozen`: none of its weights is trained, so its linears keep no inputs (eager)."""
    options = {"is_sliced": is_sliced, "crowded": crowded, "attention_kernel": attention_kernel, "is_frozen": is_frozen}
    case = {"is_compiled": is_compiled, "matmul_dtype": matmul_dtype, "storage": storage, "tensor": tensor}
    found = _structured_bytes(task, kind, **case, **options)
    if (own := kind.kept_by_own) is not None:
        precision = task.precision if task.width == own.width else "fp32" if own.width == 4 else "bf16"
        counted = dataclasses.replace(task, precision=precision)
        return found * own.bytes / _structured_bytes(counted, kind, is_compiled=own.is_compiled)
    if kind.kept is None:
        return found
    precision = task.precision if task.width == kind.kept.width else "fp32" if kind.kept.width == 4 else "bf16"
    counted = dataclasses.replace(task, precision=precision, lora=Lora(rank=KEPT_RANK))
    usual = _structured_bytes(counted, kind, is_compiled=kind.kept.is_compiled)
    return found * (kind.kept.adapters if task.has_adapters else kind.kept.full) / usual


def _structured_bytes(
    task: Task,
    kind: Layer,
    *,
    is_compiled: bool,
    matmul_dtype: str = "plain",
    storage: str = "plain",
    tensor: int = 1,
    is_sliced: bool = False,
    crowded: float = 1.0,
    attention_kernel: Attention | None = None,
    is_frozen: bool = False,
) -> float:
    """The same from the layer's structure. Eager: as autograd's own hooks count it. Compiled: norms and
    activations are computed again from what stands before them, save where an adapter keeps its input."""
    if is_compiled:
        norms, attention, mlp = _compiled_parts(task, kind, matmul_dtype, storage, tensor)
    else:
        norms, attention, mlp = _eager_parts(task, kind, matmul_dtype, storage, tensor, is_frozen)
    if is_sliced:
        mlp = 0  # its input alone, which is counted with the norms
    is_early = crowded == 1.0 and (storage != "plain" or (task.device == "cuda" and kind.has_early_weights))
    if kind.copies and is_early and not is_compiled:
        mlp += kind.intermediate * task.width  # what the weights are multiplied with
    attention += 4 * task.facts.heads
    if is_in_full(task, attention_kernel or preferred(task), kind):
        length = task.longest_document or task.document_length
        attention += 8 * task.facts.heads * min(length, kind.window or length)
    copies = kind.copies * (2 - task.has_adapters - is_early)  # what enters the first matmul, what leaves the last
    mlp = crowded * (mlp + copies * task.facts.hidden * task.width)
    adapter = 0.0
    if task.has_adapters:
        linears = [linear for linear in kind.linears if linear.is_adaptable]
        adapter = len(linears) * task.lora.rank * task.width
        if task.lora.dora:  # each output before it is scaled
            adapter += sum(linear.outputs for linear in linears) * task.width
        if task.lora.dropout:  # each linear drops for itself: its input again, and which values were dropped
            adapter += sum(linear.inputs for linear in linears) * (task.width + 1)
    dropped = kind.dropouts * task.facts.hidden * (1 if is_compiled or task.device == "cuda" else task.width)
    return (norms + attention + mlp + adapter + dropped) / tensor


def _compiled_parts(
    task: Task, kind: Layer, matmul_dtype: str, storage: str, tensor: int
) -> tuple[float, float, float]:
    """Norms with what they give to matmuls, attention, and the MLP, of a compiled layer."""
    width, hidden, is_full = task.width, task.facts.hidden, not task.has_adapters
    qk_norms = (kind.query + kind.key) if kind.has_qk_norm else 0
    experts = max((linear.count for linear in kind.linears), default=1)
    are_apart = is_apart(task, storage)
    is_fp8 = matmul_dtype == "fp8" and is_full
    # Where a norm follows attention, the sum that the next one reads is made again from what both its parts keep.
    inputs = min(1, kind.norms) if kind.is_parallel or kind.post_norms else kind.norms
    is_read_by_none = experts > 1 and not is_full and not kind.shared  # frozen experts and their router
    into_matmuls = kind.norms + kind.bare_inputs - is_read_by_none
    norms = hidden * ((inputs + kind.post_norms) * width + into_matmuls * (1 if is_fp8 else width))
    norms += hidden * (width - 1) if is_fp8 and experts > 1 else 0  # trained experts multiply in half precision
    norms += 4 * (kind.norms + kind.post_norms + qk_norms / task.facts.head_dim)  # what each scales by
    attention = 2 * (kind.query + kind.key) * width
    # Of a joint matmul that is not rotated in one pass with it (`model.rotary`) the values keep all alive, and
    # norms of queries and keys need nothing else.
    is_joint = kind.is_qkv_fused or (task.has_adapters and not are_apart)
    is_made_anew = kind.is_rotated and (tensor > 1 or not kind.is_rope_fused)
    keeps_joint = is_joint and (is_made_anew or kind.has_qk_norm)
    attention += ((kind.query + kind.key) if keeps_joint else qk_norms) * width
    # Adapters fused with the MLP compute the activation again, too, as kernels for trained weights do (`model.gated`);
    # others keep it, in fp8 where it enters its last matmul so. Frozen experts need none of it.
    values = (2 if kind.is_gated else 1) * kind.intermediate * width
    values += (kind.intermediate if experts == 1 else kind.shared) if is_fp8 else 0
    is_made_again = kind.gate is not None and (not are_apart if task.has_adapters else _has_gate_kernels(task, tensor))
    kept = kind.intermediate - kind.shared if is_full or experts == 1 else 0
    kept = 0 if (is_made_again or is_fp8) and experts == 1 else kept
    kept += 0 if is_made_again or is_fp8 else kind.shared
    values += kept * width
    values += hidden * width if kind.shared else 0  # what its gate multiplies
    active = max((linear.active for linear in kind.linears), default=1)
    # The router's weights of all experts, and of a token's own: four numbers that say where it goes, and a weight.
    values += (width * experts + (4 * 8 + width) * active) if experts > 1 else 0
    return norms, attention, values


def _eager_parts(
    task: Task, kind: Layer, matmul_dtype: str, storage: str, tensor: int, is_frozen: bool
) -> tuple[float, float, float]:
    """The same of a layer that is run as it is."""
    width, hidden, is_full = task.width, task.facts.hidden, not task.has_adapters
    qk_norms = (kind.query + kind.key) if kind.has_qk_norm else 0
    # An RMS norm keeps its input in fp32 and, where its own weight is trained, what it multiplies with that.
    kept = {"rms": 4, "wide": 4, "centered": 8, "layer": width}[kind.norm]
    trained = {"rms": width, "wide": 4, "centered": 4, "layer": 0}[kind.norm] if is_full else 0
    inputs = min(1, kind.norms) if kind.is_parallel else kind.norms
    norms = hidden * (inputs * kept + kind.norms * (width + trained) + kind.post_norms * (kept + trained))
    norms += hidden * kind.bare_inputs * width
    norms += qk_norms * (kept + trained)
    attention = 2 * (kind.query + kind.key) * width
    # The values keep all three alive.
    attention += (kind.query + kind.key) * width if kind.is_qkv_fused and kind.is_rotated else 0
    attention += kind.query * width if task.device == "cpu" else 0  # heads last: a copy
    if task.has_lora and not is_apart(task, storage) and not kind.is_qkv_fused:
        is_rotated_at_once = task.device == "cuda" and kind.is_rope_fused and not kind.has_qk_norm
        is_held_by_norms = kind.has_qk_norm and width == 4
        attention += 0 if is_rotated_at_once or is_held_by_norms else (kind.query + kind.key) * width
    is_made_again = is_full and matmul_dtype != "fp8" and _has_gate_kernels(task, tensor) and kind.gate is not None
    values = 2 if is_made_again else kind.mlp_values
    if is_frozen:
        norms -= hidden * (kind.norms * (width + trained) + kind.post_norms * trained) + qk_norms * trained
        values -= 0 if is_made_again else 1
    if any(linear.count > 1 for linear in kind.linears) and not is_full:
        values -= 1  # frozen experts do not keep their inputs
    return norms, attention, values * kind.intermediate * width


def _has_gate_kernels(task: Task, tensor: int) -> bool:
    """Of trained weights (`model.gated`)."""
    return task.device == "cuda" and tensor == 1


def _activations(task: Task, choice: Choice, tokens: float) -> tuple[float, float]:
    """What all layers of this rank keep, and one layer alone, checkpointed or not."""
    facts = task.facts
    if facts.paired is not None and task.shape is not None:
        one = facts.paired.layer(*task.shape) * task.width / facts.paired.width
        every = facts.paired.kept(*task.shape) * task.width / facts.paired.width
        share = choice.checkpointed_layers / facts.layers
        return every * (1 - share) + _recomputed(task, choice, tokens), one

    def of(kind: Layer, *, is_frozen: bool = False) -> float:
        # Keys and values of other ranks, and of the prompts that second answers of pairs share with the first.
        gathered = 2 * kind.key * task.width * (choice.context - 1 + task.shared) / choice.tensor
        fixed = kind.kept_by_own.fixed if kind.kept_by_own is not None else 0
        experts = max((linear.count for linear in kind.linears), default=1)
        logits = experts * task.width if facts.has_router_loss and experts > 1 else 0
        return (
            fixed
            + tokens * (gathered + logits)
            + tokens
            * layer_bytes(
                task,
                kind,
                is_compiled=choice.is_compiled,
                matmul_dtype=choice.matmul_dtype,
                storage=choice.storage,
                tensor=choice.tensor,
                is_sliced=choice.mlp_slice > 0,
                attention_kernel=choice.attention,
                is_frozen=is_frozen,
                crowded=CROWDED if choice.expert > 1 and kind_experts(kind) else 1.0,
            )
        )

    boundary = tokens * facts.hidden * task.width / choice.tensor
    one = max(of(kind) for kind in facts.kinds)
    share = choice.checkpointed_layers / facts.layers
    if choice.save_attention and choice.checkpointed_layers:
        one -= tokens * max(kind.query * task.width + 4 * facts.heads for kind in facts.kinds) / choice.tensor
    every = facts.total(of)
    if (part := trained_share(task)) < 1:
        every = part * every + (1 - part) * facts.total(lambda kind: of(kind, is_frozen=True))
    saved = every * (1 - share) * task.backward_share * _layers_at_once(task, choice)
    # The factors in the matmuls' precision; checkpointed layers make them again.
    casts = (1 - share) * task.adapted[0] * task.width / choice.tensor / choice.pipeline
    ends = ENDS["adapters" if task.has_adapters else "full"] * boundary
    ends += boundary if task.has_adapters and choice.checkpointed_layers else 0.0  # measured; whose it is is not known
    return saved + _recomputed(task, choice, tokens) + ends + casts, one


def _recomputed(task: Task, choice: Choice, tokens: float) -> float:
    """What checkpointed layers keep on the device: their inputs, and what attention gave."""
    facts, kept = task.facts, 0.0
    if choice.save_attention:
        share = choice.checkpointed_layers / facts.layers
        kept = share * tokens * facts.total(lambda kind: kind.query * task.width + 4 * facts.heads) / choice.tensor
        kept *= task.backward_share * _layers_at_once(task, choice)
    boundary = tokens * facts.hidden * task.width / choice.tensor
    inputs = _layer_inputs(task, choice, tokens)
    return kept + (min(inputs, 2 * boundary) if choice.offload_activations else inputs)  # in use, and on its way


def _layer_inputs(task: Task, choice: Choice, tokens: float) -> float:
    """What checkpointed layers keep, in host memory where the plan says so."""
    boundary = tokens * task.facts.hidden * task.width / choice.tensor
    return choice.checkpointed_layers * boundary * task.backward_share * _layers_at_once(task, choice)


def _layers_at_once(task: Task, choice: Choice) -> float:
    """Times all layers of the model, how many this rank keeps activations of."""
    if choice.pipeline == 1:
        return 1.0
    layers, stages = task.facts.layers, choice.pipeline
    # Micro-batches between their two passes on the first rank: it has half of its layers twice as early, interleaved.
    flying = (3 * stages - 1) / 2 if choice.schedule == "interleaved" else stages
    return -(-layers // stages) / layers * min(flying, micro_batches(choice.accumulation_steps(task), stages))


def _received(task: Task, choice: Choice, tokens: float) -> float:
    """Room for the hidden states and gradients that a rank's stages receive in a step: each has one of its own."""
    if choice.pipeline == 1:
        return 0.0
    sides = 1 if choice.pipeline * PER_RANK[choice.schedule] == 2 else 2  # an end of the pipeline receives one of them
    count = micro_batches(choice.accumulation_steps(task), choice.pipeline) * PER_RANK[choice.schedule]
    return sides * count * tokens * task.facts.hidden * task.width


def _optimizer_workspace(task: Task, choice: Choice) -> float:
    facts = task.facts
    linears = [one for kind in facts.kinds for one in kind.linears]
    matrix = max(one.inputs * one.outputs for one in linears)
    if task.has_adapters:
        matrix = task.lora.rank * max(max(one.inputs, one.outputs) for one in linears)
    largest = (matrix if task.has_adapters else max(facts.embedding, matrix)) / choice.tensor
    if task.optimizer == "adafactor":
        return 3 * 4 * largest
    if task.optimizer in PROJECTED:  # one matrix's gradient, its update, and what finds its directions
        return 4 * 4 * matrix
    if task.optimizer == "muon":  # matrices and their matmuls, in fp32 and bf16; embedding and head are AdamW's
        return 4 * 4 * max(matrix, min(TOGETHER, task.trained)) / choice.tensor
    if choice.offload_optimizer != "none":
        largest = min(largest, PIECE[choice.offload_optimizer])
    is_fused = task.optimizer == "lion" or choice.optimizer_states != "fp32" or choice.offload_optimizer != "none"
    return 8 * 4 * largest if is_fused and task.device == "cpu" else 0.0  # a GPU does it in one pass
