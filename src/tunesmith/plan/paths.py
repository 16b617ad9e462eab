"""Which path the attention of each kind of layer takes (`plan.attention` has the rules), and what is said of it."""

from __future__ import annotations

from tunesmith.plan.attention import (
    Heads,
    Path,
    has_efficient,
    has_flash4,
    path_of,
    what_is_missing,
)
from tunesmith.plan.choice import Task
from tunesmith.plan.facts import Layer
from tunesmith.plan.plan import Attention


def heads_of(task: Task, kind: Layer) -> Heads:
    head_dim = kind.head_dim or task.facts.head_dim
    return Heads(
        head_dim,
        kind.value_dim or head_dim,
        is_soft_capped=kind.is_soft_capped,
        has_sinks=kind.has_sinks,
        has_alibi=kind.has_alibi,
        itemsize=task.width,
    )


def path_of_kind(task: Task, kernel: Attention, kind: Layer) -> Path:
    """What a kind of layer takes where `kernel` is preferred; on a CPU every document is by itself."""
    if task.device == "cpu" or not task.facts.has_fused_attention:
        return "by document"
    return path_of(kernel, task.gpu.capability, heads_of(task, kind))


def is_in_full(task: Task, kernel: Attention, kind: Layer) -> bool:
    """Whether all scores of a document lie in memory, with nothing fused: no kernel has what the layer asks for."""
    if task.device == "cpu" and task.facts.has_fused_attention:  # SDPA, which fuses what is usual
        return not heads_of(task, kind).is_usual
    return path_of_kind(task, kernel, kind) == "by document"


def preferred(task: Task) -> Attention:
    """The best kernel for packed documents that the device has, for most layers of the model."""
    if task.device == "cpu" or not task.facts.has_fused_attention:
        return "sdpa"
    most = heads_of(task, max(task.facts.counts, key=lambda counted: counted[1])[0])
    kernels: list[Attention] = ["flash-attn-4"] if task.hardware.has_flash_attention_4 else []
    kernels.append("varlen")
    if task.width != 4 or not has_efficient(most):
        kernels.append("flex-attention")
    for kernel in kernels:
        taken = {path_of_kind(task, kernel, kind) for kind in task.facts.kinds}
        if path_of(kernel, task.gpu.capability, most) == kernel and not taken & set(task.facts.wrong_paths):
            return kernel
    return "sdpa"


def _attending(task: Task) -> list[Layer]:
    """Kinds of layers with attention; all, where there is none."""
    return [kind for kind in task.facts.kinds if kind.query] or list(task.facts.kinds)


def paths(task: Task, kernel: Attention) -> dict[str, Path]:
    """The path of each kind of layer, by a name for the kind."""
    by_kind: dict[str, Path] = {}
    for kind in _attending(task):
        name = f"sliding {kind.window}" if kind.window else f"chunked {kind.chunk}" if kind.chunk else "full"
        path = path_of_kind(task, kernel, kind)
        by_kind[name if by_kind.get(name, path) == path else f"{name}, {heads_of(task, kind).words}"] = path
    return by_kind


def said(task: Task, kernel: Attention) -> tuple[str, str]:
    """The paths in words, and why they are these, with what a faster one would need."""
    by_kind = paths(task, kernel)
    choice = (
        "; ".join(by_kind.values())
        if len(by_kind) == 1
        else "; ".join(f"{kind}: {path}" for kind, path in by_kind.items())
    )
    capability = task.gpu.capability
    whys = []
    for kind in _attending(task):
        heads, path = heads_of(task, kind), path_of_kind(task, kernel, kind)
        asked = heads.words or "usual heads"
        if not task.facts.has_fused_attention:
            whys.append("this model's attention is its own code, which no kernel does")
        elif path == "by document" and task.facts.wrong_paths:
            whys.append(f"{', '.join(task.facts.wrong_paths)} failed or was wrong when tried on this GPU: by document")
        elif path == "by document":
            needs = what_is_missing(capability, heads, task.hardware.has_flash_attention_4)
            whys.append(
                f"no packed kernel here has {asked}: each document is computed by itself, all scores in memory, "
                f"which is many times slower; a faster path needs {needs}"
            )
        elif path in ("flex-attention", "memory-efficient"):
            better = "flash-attn-4 would be faster" if has_flash4(capability, heads) else "no faster kernel here has it"
            whys.append(f"{asked}: {better}")
        else:
            whys.append(f"{asked}, packed")
    return choice, "; ".join(dict.fromkeys(whys))
