"""Model states of one rank: weights, gradients and what the optimizer keeps, by how they are sharded, quantized and
offloaded; what of them is in host memory, on disk and in a checkpoint. Pure arithmetic on sizes."""

from __future__ import annotations

import dataclasses

from tunesmith.plan.choice import Choice, Task
from tunesmith.plan.facts import Layer
from tunesmith.plan.plan import Sharding

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
PINNED = 1.25
"""Host memory of pinned tensors: their sizes are rounded up to powers of two."""
FP8_MULTIPLE = 16
"""Sizes of fp8 matmuls are multiples of this; the same as in `kernels.fp8`."""
COLLECTIVE_BYTES = {"int8": 1 + 4 / 128, "int4": 0.5 + 4 / 64}
"""Bytes of a rounded value between ranks, with its share of a block's scale (`parallel.quantized`)."""


def static(task: Task, choice: Choice) -> dict[str, float]:
    if choice.offload_parameters and not choice.has_frozen_on_host(task):
        return {"weights": 0.0}
    base, trained = held_parameters(task, choice)
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
            "optimizer": trained * state_bytes(task, choice) * states if on_device else visiting(task, choice),
        }
    return {
        "weights": weights * _share(choice, "weights"),
        "adapter": 4 * trained * states if task.has_adapters else 0.0,
        "master": 4 * trained * states if choice.has_masters(task) and on_device else 0.0,
        "optimizer": trained * state_bytes(task, choice) * states if on_device else visiting(task, choice),
    }


def gradients(task: Task, choice: Choice) -> float:
    """All of them; in fp32 where they are summed or unscaled, else as backward made them. Released: the largest two."""
    if choice.offload_parameters and not choice.has_frozen_on_host(task):
        return 0.0
    is_summed = choice.accumulation_steps(task) > 1 or (choice.sharding != "none" and choice.has_masters(task))
    is_made = task.optimizer in ALONE | BLOCKWISE and task.precision == "bf16" and not is_summed
    width = task.width if is_made and task.has_masters else 4
    held = held_parameters(task, choice)[1] * _share(choice, "states")
    if choice.optimizer_in_backward:
        held = min(held, 2 * task.facts.embedding / choice.tensor)
    return width * held


def kept_gradients(task: Task, choice: Choice) -> float:
    """Gradients of the micro-batches before, in bytes: whole where they are reduced once a step."""
    if choice.accumulation_steps(task) == 1:
        return 0.0
    is_whole = choice.sharding in ("ddp", "zero1") or (choice.sharding not in ("none", "zero2") and task.has_adapters)
    return 4 * held_parameters(task, choice)[1] if is_whole else gradients(task, choice)


def gathered(task: Task, choice: Choice) -> tuple[float, float, float]:
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
        base, trained = held_parameters(task, choice)
        whole = 4 * trained if task.has_adapters else base * task.width
        buffer = 0.0 if choice.sharding == "ddp" else whole / facts.layers if task.has_adapters else layer * task.width
        return whole + packed + buffer, whole, unit
    width = layer * task.width + packed / 2
    if choice.storage != "plain":  # 4 bits between ranks too
        width -= matrices * (task.width - QUANTIZED[choice.storage])
    if choice.has_frozen_on_host(task):
        return 2 * width, 2 * width, unit  # the layer in use and the next one
    kept = held_parameters(task, choice)[0] * task.width / choice.sharers if choice.sharding == "hierarchical" else 0.0
    kept += _ends(task, choice) * task.width  # from the forward pass to the backward pass
    together = 1 if choice.ranks == 1 else 2  # on one rank FSDP brings a layer when it is called, not before
    return kept + together * width, kept + width, unit


def parameter_bytes(task: Task, choice: Choice) -> float:
    """What offloaded parameters of one rank take in host memory."""
    return parameter_traffic(task, choice) * (1 if choice.has_frozen_on_host(task) else PINNED)


def parameter_traffic(task: Task, choice: Choice) -> float:
    """Offloaded parameters of one rank: the frozen ones as they are held, trained ones in fp32."""
    parts = static(task, dataclasses.replace(choice, offload_parameters=False))
    if choice.has_frozen_on_host(task):
        return parts["weights"] - _ends(task, choice) * task.width
    return sum(parts.get(part, 0.0) for part in ("weights", "adapter", "master"))


def gradient_bytes(task: Task, choice: Choice) -> float:
    """Offloaded gradients of one rank."""
    return 4 * held_parameters(task, choice)[1] * _share(choice, "states")


def offloaded_bytes(task: Task, choice: Choice) -> float:
    """States, and masters beside the model's weights, of one rank."""
    values = state_bytes(task, choice) + (4 if choice.has_masters_apart(task) else 0)
    return held_parameters(task, choice)[1] * values * _share(choice, "states")


def visiting(task: Task, choice: Choice) -> float:
    """Buffers for what lives in host memory or on disk."""
    trained = held_parameters(task, choice)[1] * _share(choice, "states")
    return BUFFERS * min(PIECE[choice.offload_optimizer] / trained, 1) * offloaded_bytes(task, choice)


def disk(task: Task, choice: Choice) -> int:
    """What all ranks of a node keep on its disk while they train."""
    per_node = max(1, choice.ranks // task.hardware.nodes)
    return round(per_node * offloaded_bytes(task, choice)) if choice.offload_optimizer == "disk" else 0


def checkpoint(task: Task, choice: Choice) -> int:
    """What all ranks of a node write of a checkpoint."""
    return round(checkpoint_bytes(task, choice) / min(choice.ranks, task.hardware.nodes))


def checkpoint_bytes(task: Task, choice: Choice) -> float:
    """Of a checkpoint: trained weights as the optimizer updates them, and states."""
    if task.optimizer in BLOCKWISE and not task.has_adapters:
        active = active_parameters(task)
        return (task.trained - active) * task.width + active * (4 + state_bytes(task, choice))
    is_half = task.precision != "fp32" and choice.sharding == "none" and not choice.has_masters(task)
    if task.is_merged:
        held = task.width if choice.storage == "plain" else QUANTIZED[choice.storage]
        return task.facts.matrices * held + task.trained * (4 + state_bytes(task, choice))
    weight = task.width if is_half and not task.has_adapters else 4
    return task.trained * (weight + state_bytes(task, choice))


def result_bytes(task: Task) -> int:
    """Of the trained adapter, or of the model in the precision it is held in."""
    if task.is_merged:
        return task.facts.parameters * task.width
    return task.trained * (4 if task.has_adapters else task.width)


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


def trained_share(task: Task) -> float:
    """Of the layers, where all weights are trained: how many are at a time."""
    at_once = {"lisa": LISA_LAYERS, "badam": 1}.get(task.optimizer, task.facts.layers)
    return 1.0 if task.has_adapters else min(1.0, at_once / task.facts.layers)


def active_parameters(task: Task) -> int:
    """Parameters that are trained at a time, at most (`optim.blocks`)."""
    facts = task.facts
    layers = sorted((facts.kinds[kind].parameters for kind in facts.pattern), reverse=True)
    if task.optimizer == "badam":
        is_apart = facts.has_head and not facts.tied
        return max(layers[0], facts.head + facts.extra + (0 if is_apart else facts.embedding), facts.embedding)
    return facts.embedding + facts.head + facts.extra + sum(layers[:LISA_LAYERS])


def projected_rank(optimizer: str, short: int) -> int:
    """Of the projected gradients of a matrix with this shorter side."""
    quarter = max(1, short // 4)
    return quarter if optimizer == "galore" else min(256, quarter)


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


def held_parameters(task: Task, choice: Choice) -> tuple[float, float]:
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


def state_bytes(task: Task, choice: Choice) -> float:
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


def _projected_states(task: Task) -> float:
    """Values of state of all weights: two moments of each projected matrix, GaLore's projections, and AdamW's of the
    rest."""

    def of(kind: Layer) -> float:
        values = 2.0 * kind.parameters
        for linear in kind.linears:
            short, long = sorted((linear.inputs, linear.outputs))
            rank = projected_rank(task.optimizer, short)
            held = 2 * rank * long + (short * rank if task.optimizer == "galore" else 0)
            values += (held - 2 * short * long) if linear.count == 1 else 0  # stacks of experts are AdamW's
        return values

    facts = task.facts
    return facts.total(of) + 2.0 * (facts.embedding + facts.head + facts.extra)


def _share(choice: Choice, what: str) -> float:
    return share(choice.sharding, what, choice.holders, choice.sharers)
