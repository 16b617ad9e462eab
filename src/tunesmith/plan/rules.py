"""What may go with what, each with its reason in one sentence, and what the installed Tunesmith can execute.

`refused` is about the world: such a choice would make no sense anywhere. `beyond` is about this version: a choice that
is sound and predicted, but that `train` cannot do yet; the planner shows it, and does not take it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tunesmith.plan import activations, model_states, paths
from tunesmith.plan.choice import Choice, Task
from tunesmith.plan.facts import Linear
from tunesmith.plan.model_states import ALONE, BLOCKWISE, PROJECTED
from tunesmith.plan.plan import GATES, Kernel
from tunesmith.plan.stages import PER_RANK

SHARDED_OPTIMIZERS = ("adamw", "lion", "muon", "sgd")
"""Those with states in rows as the weights' are: any rows can be another rank's. Muon gathers each matrix to update it;
the others update each value by itself."""

ALONE_ONLY = frozenset({"ADALORA", "OSF"})
"""Methods of peft that are not for weights that lie over ranks."""
CAPTURED = ("flash-attn-4", "varlen", "flex-attention")
"""Paths of attention that start the same kernels whatever the documents are."""
BF16 = (8, 0)
FP8 = (8, 9)
"""Compute capability that each needs."""

COLWISE = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "c_fc"})
ROWWISE = frozenset({"o_proj", "down_proj", "c_proj"})
"""Linears that are cut by their outputs and by their inputs, as models' own plans name them."""
NF4_BLOCK = 64

Refusal = tuple[Callable[[Task, Choice], bool], str]

REFUSALS: tuple[Refusal, ...] = (
    (
        lambda task, choice: task.facts.has_router_loss and max(choice.tensor, choice.context, choice.pipeline) > 1,
        "the load-balancing loss of routers is over all layers and tokens of a micro-batch, which tensor, context and "
        "pipeline parallelism cut up; use data or expert parallelism, or router_aux_loss_coef: 0",
    ),
    (
        lambda task, choice: task.has_noise and max(choice.tensor, choice.context, choice.pipeline) > 1,
        "noise on embeddings (neftune_noise_alpha) is drawn for whole documents, which tensor, context and pipeline "
        "parallelism cut up; use data parallelism",
    ),
    (
        lambda task, choice: not task.objective.is_token_sum and max(choice.context, choice.pipeline) > 1,
        "objectives other than sft compare whole answers, which context and pipeline parallelism cut up; use data or "
        "tensor parallelism",
    ),
    (
        lambda task, choice: task.objective.has_teacher and max(choice.tensor, choice.context, choice.pipeline) > 1,
        "objective: distill compares whole vocabularies on each rank; use data parallelism, not tensor, context or "
        "pipeline parallelism",
    ),
    (
        lambda task, choice: (task.objective.has_head or task.objective.has_embeddings) and choice.tensor > 1,
        "objective: reward, classify, classify_tokens and embed have a head of their own or none, which tensor "
        "parallelism cannot cut; use data parallelism",
    ),
    (
        lambda task, choice: (
            task.objective.is_on_policy
            and (choice.tensor > 1 or choice.sharding not in ("none", "ddp", "zero1", "zero2"))
        ),
        "objectives with rollouts decode on each rank, which needs all weights there: use ddp, zero1 or zero2, not "
        "tensor parallelism, zero3, hybrid or hierarchical sharding",
    ),
    (
        lambda task, choice: task.objective.is_on_policy and choice.offload_parameters,
        "objectives with rollouts read all weights for every token: they are not offloaded",
    ),
    (
        lambda task, choice: not task.facts.is_causal and max(choice.tensor, choice.context, choice.pipeline) > 1,
        "an encoder-decoder has two stacks and padded rows, which tensor, context and pipeline parallelism do not cut; "
        "use data parallelism",
    ),
    (
        lambda task, choice: not task.facts.is_causal and (choice.matmul_dtype == "fp8" or choice.mlp_slice > 0),
        "layers of an encoder-decoder are run as they are: not in fp8, nor with MLPs in slices",
    ),
    (
        lambda task, choice: not task.facts.is_causal and choice.offload_activations,
        "layers of an encoder-decoder share what the encoder gives, so their inputs stay on the device",
    ),
    (
        lambda task, choice: not task.facts.packs and max(choice.tensor, choice.context, choice.pipeline) > 1,
        "this model does not take packed documents, which tensor, context and pipeline parallelism need",
    ),
    (
        lambda task, choice: task.facts.runs_along and max(choice.tensor, choice.context, choice.pipeline) > 1,
        "convolutions and state spaces run along this model's tokens, which tensor, context and pipeline parallelism "
        "do not cut",
    ),
    (
        lambda task, choice: (
            choice.context > 1 and any((kind.chunk or math.inf) < task.sequence_length for kind in task.facts.kinds)
        ),
        "layers of this model attend in chunks shorter than sequence_length, which context parallelism does not cut",
    ),
    (
        lambda task, choice: choice.matmul_dtype == "fp8" and (task.device == "cpu" or task.gpu.capability < FP8),
        "fp8 matmuls need a GPU of compute capability 8.9 or more",
    ),
    (
        lambda task, _: task.precision == "bf16" and task.device == "cuda" and task.gpu.capability < BF16,
        "bf16 needs a GPU of compute capability 8.0 or more; older ones have fp16, with loss scaling",
    ),
    (
        lambda task, choice: choice.matmul_dtype == "fp8" and choice.storage not in ("plain", "nf4"),
        "fp8 matmuls need a base in full precision or in nf4",
    ),
    (
        lambda task, choice: choice.matmul_dtype == "fp8" and task.has_adapters and task.lora.dora,
        "fp8 matmuls are for LoRA without lora.dora",
    ),
    (
        lambda task, choice: (
            task.is_quantization_aware
            and (choice.storage != "plain" or choice.matmul_dtype != "plain" or choice.tensor * choice.expert > 1)
        ),
        "quantization_aware rounds whole weights in full precision: not in 4 or 8 bits or fp8, nor cut by tensor or "
        "expert parallelism",
    ),
    (
        lambda task, choice: choice.storage != "plain" and not task.has_adapters,
        "weights that are trained cannot be held in 4 or 8 bits",
    ),
    (
        lambda task, choice: (
            task.device == "cpu"
            and ((choice.storage != "plain" and not task.is_quantized) or choice.teacher_storage != "plain")
        ),
        "quantized weights make a CPU slower",
    ),
    (
        lambda task, choice: task.is_quantized and choice.storage == "plain",
        "method: qlora and loqt hold the base in 4 bits, or in 8 with lora.bits: 8",
    ),
    (
        lambda task, choice: (choice.storage != "plain" or choice.tensor > 1) and task.has_lora and task.lora.takes_out,
        "lora.init: pissa, olora and lora-ga take their factors out of the base's weights, which must be whole and in "
        "full precision for that",
    ),
    (
        lambda task, choice: max(choice.tensor, choice.pipeline) > 1 and _trains_ends(task),
        "adapters or new tokens in the embedding or the output head do not go with tensor or pipeline parallelism",
    ),
    (
        lambda task, choice: (
            task.method == "peft"
            and (choice.storage != "plain" or choice.matmul_dtype != "plain" or choice.offload_parameters)
        ),
        "adapters of the peft library are on a base in full precision on the device: not in 4 or 8 bits or fp8",
    ),
    (
        lambda task, choice: (
            task.method == "peft" and max(choice.tensor, choice.context, choice.pipeline, choice.expert) > 1
        ),
        "adapters of the peft library go with data parallelism alone, not with tensor, context, pipeline or expert "
        "parallelism",
    ),
    (
        lambda task, choice: choice.sharding != "none" and task.peft_type in ALONE_ONLY,
        f"{' and '.join(sorted(ALONE_ONLY))} compare or share weights of all layers, which must be whole on one device",
    ),
    (
        lambda task, choice: choice.checkpointed_layers > 0 and not may_checkpoint(task),
        "PREFIX_TUNING hands keys and values from call to call, which activation checkpointing would hand on twice",
    ),
    (
        lambda task, choice: task.method == "peft" and (choice.is_compiled or choice.mlp_slice > 0),
        "modules of the peft library are run as they are, neither compiled nor in slices",
    ),
    (
        lambda task, choice: (
            task.is_merged and (choice.ranks > 1 or choice.sharding != "none" or choice.matmul_dtype == "fp8")
        ),
        "method: relora and loqt merge adapters into whole weights, on one rank and without fp8 matmuls",
    ),
    (
        lambda task, choice: task.method == "loqt" and (choice.is_compiled or bool(experts(task))),
        "method: loqt looks at the gradient of each linear, in layers that are run as they are and have no experts",
    ),
    (
        lambda task, choice: task.method == "relora" and choice.storage != "plain",
        "method: relora merges adapters into a base in full precision; method: loqt is for one in 4 or 8 bits",
    ),
    (
        lambda task, _: task.optimizer in PROJECTED and task.has_adapters,
        "optimizer: galore and apollo are for method: full; adapters are of low rank already",
    ),
    (
        lambda task, _: task.optimizer in BLOCKWISE and task.has_adapters,
        "optimizer: lisa and badam are for method: full; adapters are small already",
    ),
    (
        lambda task, choice: (
            task.optimizer in BLOCKWISE
            and (choice.is_compiled or choice.matmul_dtype == "fp8" or max(choice.pipeline, choice.tensor) > 1)
        ),
        "optimizer: lisa and badam freeze and train whole layers by turns, which are run as they are: not compiled, in "
        "fp8, or cut by pipeline or tensor parallelism",
    ),
    (
        lambda task, choice: choice.optimizer_states != "fp32" and task.optimizer not in ALONE,
        "smaller optimizer states are for AdamW and Lion",
    ),
    (
        lambda task, choice: choice.optimizer_states == "fp8" and task.device == "cuda" and task.gpu.capability < FP8,
        "optimizer: adamw_fp8 needs a GPU of compute capability 8.9 or more; adamw_8bit is as small",
    ),
    (
        lambda task, choice: (
            task.has_masters and not choice.master_weights and (task.optimizer not in ALONE or task.precision != "bf16")
        ),
        "training without fp32 masters needs bf16 and AdamW or Lion, which round stochastically",
    ),
    (
        lambda task, choice: (
            task.device == "cpu"
            and (choice.offload_optimizer == "host" or choice.offload_parameters or choice.offload_activations)
        ),
        "on a CPU everything is in host memory already",
    ),
    (
        lambda task, choice: choice.offload_optimizer != "none" and task.optimizer not in ALONE,
        "only AdamW and Lion update weight by weight, as states in host memory or on disk need it",
    ),
    (
        lambda task, choice: (
            choice.offload_parameters and choice.offload_optimizer == "host" and not choice.has_frozen_on_host(task)
        ),
        "where parameters are in host memory, the optimizer's states are there already",
    ),
    (
        lambda task, choice: (
            choice.offload_parameters
            and choice.sharding not in ("zero3", "hybrid", "hierarchical")
            and not choice.has_frozen_on_host(task)
        ),
        "parameters in host memory come layer by layer, as those of zero3, hybrid and hierarchical sharding do, or "
        "frozen ones on one rank",
    ),
    (
        lambda task, choice: choice.optimizer_in_backward and not may_release(task, choice),
        "gradients can be released in the backward pass of full fine-tuning by AdamW or Lion only, with one "
        "micro-batch a step and without max_grad_norm and loss scaling",
    ),
    (
        lambda task, choice: choice.sharding in ("hybrid", "hierarchical") and 1 in (choice.replicate, choice.shard),
        "hybrid and hierarchical sharding are for several nodes of several ranks",
    ),
    (
        lambda task, choice: choice.is_lossy and task.has_adapters,
        "quantized collectives are for full fine-tuning: adapters send little, and a base in nf4 (method: qlora) has 4 "
        "bits between ranks without being rounded again",
    ),
    (
        lambda task, choice: choice.is_lossy and choice.sharding in ("none", "ddp", "hybrid"),
        "quantized collectives are for weights that all ranks share: zero1, zero2, zero3 and hierarchical",
    ),
    (
        lambda task, choice: choice.sharding == "none" and choice.holders * choice.tensor > 1,
        "several ranks share what is the same on all by sharding: ddp, zero1, zero2, zero3, hybrid, hierarchical",
    ),
    (
        lambda task, choice: choice.data_ranks > task.sequences,
        "a step has fewer sequences than there are ranks",
    ),
    (
        lambda task, choice: choice.tensor > 1 and task.facts.kv_heads % choice.tensor != 0,
        "tensor parallelism splits whole key heads",
    ),
    (
        lambda task, choice: choice.tensor > 1 and any(width % choice.tensor for width, _ in _cuts(task)),
        "tensor parallelism cuts every matrix into equal parts",
    ),
    (
        lambda task, choice: (
            choice.tensor > 1
            and choice.storage == "nf4"
            and any(width // choice.tensor * run % NF4_BLOCK for width, run in _cuts(task))
        ),
        "weights in 4 bits have a scale for each block of 64, and tensor parallelism would cut through blocks",
    ),
    (
        lambda task, choice: choice.tensor > 1 and task.has_adapters and task.lora.dora,
        "DoRA needs whole rows of each weight, which tensor parallelism cuts",
    ),
    (
        lambda task, choice: choice.tensor * choice.context > task.ranks_per_node,
        "tensor and context parallelism stay within a node",
    ),
    (
        lambda task, choice: choice.pipeline > 1 and choice.pipeline * PER_RANK[choice.schedule] > task.facts.layers,
        "a pipeline stage has at least one layer",
    ),
    (
        lambda task, choice: choice.pipeline > 1 and choice.schedule == "zero-bubble" and not _may_split(task, choice),
        "a zero-bubble schedule takes the gradients of weights apart from the others, which goes with plain layers "
        "only: not sharded, compiled or checkpointed, nor trained in half precision",
    ),
    (
        lambda task, choice: choice.expert > 1 and not experts(task),
        "expert parallelism cuts experts over ranks, and none of this model's layers has any",
    ),
    (
        lambda task, choice: choice.expert > 1 and any(count % choice.expert for count in experts(task)),
        "experts are cut evenly over ranks, and this model has another number of them",
    ),
    (
        lambda task, choice: not _has_kernel(task, choice),
        "flash attention needs half precision, head sizes of 8 to 256 and compute capability 8.0 (flash-attn-4: 9.0), "
        "and FlexAttention the latter",
    ),
    (
        lambda task, choice: choice.cache_transposed and not may_cache_transposed(task, choice),
        "weights are kept transposed where adapters without dropout or DoRA are on all linears of one GPU's fp8 base",
    ),
    (
        lambda task, choice: choice.cuda_graphs and not may_capture(task, choice),
        "passes are captured on one GPU, of compiled layers without experts or dropout whose attention is a packed "
        "kernel; nothing but activations may be offloaded, no gradient released, and where all weights are trained a "
        "step has one micro-batch; not with deterministic: true, since passes are run as they are first and may round "
        "otherwise",
    ),
    (
        lambda task, choice: choice.checkpointed_layers > task.facts.layers,
        "there are not so many layers to checkpoint",
    ),
)


def refused(task: Task, choice: Choice) -> str | None:
    """Why this cannot be, or None."""
    return next((why for applies, why in REFUSALS if applies(task, choice)), None)


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
    found: dict[Kernel, bool] = {
        "rope": choice.tensor == 1 and any(kind.is_rope_fused for kind in task.facts.kinds),
        **{gate: gate in gates for gate in GATES},
        "experts": choice.expert == 1 and any(kind.has_early_weights for kind in task.facts.kinds),
        "fp8_head": model_states.has_fp8_head(task, choice),
    }
    return tuple(name for name, applies in found.items() if applies)


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


def _trains_ends(task: Task) -> bool:
    return task.has_lora and (task.lora.has_ends or task.has_new_tokens)


def experts(task: Task) -> set[int]:
    """How many experts layers of this model have."""
    return {linear.count for kind in task.facts.kinds for linear in kind.linears if linear.count > 1}


def _may_split(task: Task, choice: Choice) -> bool:
    return (
        choice.sharding == "none"
        and not choice.is_compiled
        and choice.checkpointed_layers == 0
        and choice.mlp_slice == 0
        and (task.has_adapters or task.precision == "fp32")
    )


def _has_kernel(task: Task, choice: Choice) -> bool:
    """Whether the kernel that is named does at least one kind of layer."""
    return choice.attention == "sdpa" or any(
        paths.path_of_kind(task, choice.attention, kind) == choice.attention for kind in task.facts.kinds
    )


def _splits(task: Task) -> bool:
    return all(one.count == 1 and _last(one) in COLWISE | ROWWISE for kind in task.facts.kinds for one in kind.linears)


def _cuts(task: Task) -> list[tuple[int, int]]:
    """Of each linear, the width that tensor parallelism cuts, and how many weights in a row lie together behind it."""
    linears = [one for kind in task.facts.kinds for one in kind.linears]
    return [
        *((one.inputs, 1) for one in linears if _last(one) in ROWWISE),
        *((one.outputs, one.inputs) for one in linears if _last(one) in COLWISE),
    ]


def _last(linear: Linear) -> str:
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
