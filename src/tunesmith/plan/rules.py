"""What a choice may use, and what the installed Tunesmith can execute of it.

`refusals` is about the world: such a choice would make no sense anywhere. `beyond` is about this version: a choice that
is sound and predicted, but that `train` cannot do yet; the planner shows it, and does not take it.
"""

from __future__ import annotations

from tunesmith.plan import activations, model_states, paths
from tunesmith.plan.choice import Choice, Task
from tunesmith.plan.facts import Linear
from tunesmith.plan.model_states import ALONE
from tunesmith.plan.plan import GATES, Kernel

SHARDED_OPTIMIZERS = ("adamw", "lion", "muon", "sgd")
"""Those with states in rows as the weights' are: any rows can be another rank's. Muon gathers each matrix to update it;
the others update each value by itself."""

CAPTURED = ("flash-attn-4", "varlen", "flex-attention")
"""Paths of attention that start the same kernels whatever the documents are."""
BF16 = (8, 0)
FP8 = (8, 9)
"""Compute capability that each needs."""

COLWISE = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "c_fc"})
ROWWISE = frozenset({"o_proj", "down_proj", "c_proj"})
"""Linears that are cut by their outputs and by their inputs, as models' own plans name them."""


def beyond(task: Task, choice: Choice) -> tuple[str, ...]:
    """What of this choice the installed Tunesmith cannot execute."""
    missing = []
    if choice.sharding != "none":
        if task.optimizer not in SHARDED_OPTIMIZERS:
            missing.append(f"{task.optimizer} over several ranks, only {', '.join(SHARDED_OPTIMIZERS)}")
        if task.has_masters and not choice.master_weights and choice.accumulation_steps(task) > 1:
            missing.append("weights without masters over several ranks and several micro-batches")
        if task.has_masters and not choice.master_weights and choice.tensor * choice.expert > 1:
            missing.append("weights without masters beside tensor or expert parallelism")
    if choice.tensor > 1 and choice.storage == "int8":
        missing.append("weights in int8 that are cut over ranks")
    if choice.is_lossy and (choice.ranks > choice.data_ranks or choice.expert > 1):
        missing.append("quantized collectives beside tensor, context, pipeline or expert parallelism")
    if choice.expert > 1 and (choice.expert != choice.ranks or choice.sharding not in ("zero1", "zero2", "zero3")):
        missing.append("experts cut over other ranks than all those of zero1, zero2 or zero3")
    if choice.offload_parameters and (choice.tensor * choice.pipeline * choice.expert > 1 or choice.is_lossy):
        missing.append(
            "parameters in host memory beside tensor, pipeline or expert parallelism or quantized collectives"
        )
    if choice.pipeline > 1:
        if choice.sharding not in ("none", "ddp", "zero3"):
            missing.append(f"{choice.sharding} within a pipeline")
        if choice.tensor * choice.context > 1:
            missing.append("tensor or context parallelism within a pipeline")
        if choice.offload_activations or (task.has_masters and not choice.master_weights):
            missing.append("activations in host memory or weights without masters within a pipeline")
    if choice.tensor > 1 and not _splits(task):
        missing.append(
            "tensor parallelism of experts, of projections that are one matrix, or of other linears than those of "
            "attention and MLP"
        )
    if choice.tensor > 1 and choice.matmul_dtype == "fp8" and not task.has_adapters:
        missing.append("fp8 matmuls of trained weights that are cut over ranks")
    is_plain = choice.optimizer_states == "fp32" and choice.offload_optimizer == "none"
    if choice.tensor > 1 and (task.optimizer not in ("adamw", "sgd") or not is_plain):
        missing.append("other than adamw and sgd with states in fp32 on the device beside tensor parallelism")
    return tuple(missing)


def may_checkpoint(task: Task) -> bool:
    return task.peft_type != "PREFIX_TUNING"


def may_release(task: Task, choice: Choice) -> bool:
    """Whether each weight can be updated as soon as its gradient is there: no other gradient has a say in it."""
    return (
        not task.has_adapters
        and not task.clips
        and task.facts.packs  # padded documents make more micro-batches
        and not task.facts.reuses_weights  # the gradient is there, and an earlier use may still want the weight
        and task.optimizer in ALONE
        and task.precision != "fp16"
        and choice.accumulation_steps(task) == 1
        and not task.objective.is_on_policy  # whose answers may be longer than was thought
        and choice.sharding == "none"
        and choice.pipeline == 1
    )


def kernels(task: Task, choice: Choice) -> tuple[Kernel, ...]:
    """Kernels in the place of the model's own modules, on a GPU."""
    if task.device == "cpu":
        return ()
    if task.has_adapters:  # one operation with them
        has_gates = task.has_lora and not activations.is_apart(task, choice.storage) and choice.tensor == 1
    else:
        has_gates = choice.matmul_dtype == "plain" and choice.tensor == 1
    has_gates = has_gates and not task.is_quantization_aware
    gates = {kind.gate for kind in task.facts.kinds} if has_gates else set()
    is_used: dict[Kernel, bool] = {
        "rope": choice.tensor == 1 and any(kind.is_rope_fused for kind in task.facts.kinds),
        **{gate: gate in gates for gate in GATES},
        "experts": choice.expert == 1 and any(kind.has_early_weights for kind in task.facts.kinds),
        "fp8_head": model_states.has_fp8_head(task, choice),
    }
    return tuple(name for name, applies in is_used.items() if applies)


def may_cache_transposed(task: Task, choice: Choice) -> bool:
    """Whether frozen weights are in fp8, whole, and used by kernels that take them transposed."""
    return (
        task.has_adapters
        and choice.matmul_dtype == "fp8"
        and choice.storage == "plain"
        and choice.is_compiled
        and choice.ranks == 1
        and not choice.offload_parameters
        and not choice.mlp_slice
        and task.lora.targets == "all-linear"
        and task.lora.layers is None
        and not (task.lora.dropout or task.lora.dora or experts(task))
    )


def may_capture(task: Task, choice: Choice) -> bool:
    """Whether the layers' passes start the same kernels on the same memory each time, whatever the micro-batch."""
    return (
        task.device == "cuda"
        and choice.is_compiled
        and choice.ranks == 1
        and choice.sharding == "none"
        and choice.offload_optimizer == "none"
        and not (choice.offload_parameters or choice.optimizer_in_backward)
        and all(paths.path_of_kind(task, choice.attention, kind) in CAPTURED for kind in task.facts.kinds)
        and not experts(task)
        and (not task.lora.dropout if task.has_adapters else choice.accumulation_steps(task) == 1)
        and not task.has_noise  # drawn anew in each pass
        and not task.is_exact
        and not task.is_merged
        and not task.objective.has_teacher  # its logits have no place in the captured passes' memory
        and not task.objective.has_embeddings  # a step's gradients come from all its micro-batches
        and not task.shared  # the number of keys changes with the pairs of a micro-batch
    )


def experts(task: Task) -> set[int]:
    """How many experts layers of this model have."""
    return {linear.count for kind in task.facts.kinds for linear in kind.linears if linear.count > 1}


def _splits(task: Task) -> bool:
    return all(
        linear.count == 1 and last_name(linear) in COLWISE | ROWWISE
        for kind in task.facts.kinds
        for linear in kind.linears
    )


def last_name(linear: Linear) -> str:
    """What a linear is called within its module."""
    return linear.name.rpartition(".")[2]


def complexity(choice: Choice) -> int:
    """How much a choice asks of those who must understand it, and of the network; the simpler of equals wins."""
    sharding = {"none": 0, "ddp": 0, "zero3": 1, "zero1": 3, "zero2": 3, "hybrid": 2, "hierarchical": 4}
    return (
        sharding[choice.sharding]
        + 2 * choice.is_lossy
        + 3 * (choice.tensor > 1)
        + 3 * (choice.context > 1)
        + 4 * (choice.pipeline > 1)
        + (choice.schedule != "1f1b")
        + 2 * (choice.expert > 1)
        + (choice.checkpointed_layers > 0)
        + (choice.mlp_slice > 0)
        + 2 * (choice.storage != "plain")
        + 2 * (choice.optimizer_states != "fp32")
        + 2 * (not choice.master_weights)
        + 3 * choice.offload_activations
        + {"none": 0, "host": 4, "disk": 6}[choice.offload_optimizer]
        + 5 * choice.offload_parameters
    )
