"""What may not go with what, in any version: each refusal is a function with a name, and a sentence with the reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from tunesmith.plan import paths
from tunesmith.plan.choice import Choice, Task
from tunesmith.plan.model_states import ALONE, BLOCKWISE, PROJECTED
from tunesmith.plan.rules import (
    BF16,
    COLWISE,
    FP8,
    ROWWISE,
    experts,
    last_name,
    may_cache_transposed,
    may_capture,
    may_checkpoint,
    may_release,
)
from tunesmith.plan.stages import PER_RANK

ALONE_ONLY = frozenset({"ADALORA", "OSF"})
"""Methods of peft that are not for weights that lie over ranks."""
NF4_BLOCK = 64


class Refusal(NamedTuple):
    applies: Callable[[Task, Choice], bool]
    why: str


REFUSALS: list[Refusal] = []
"""All of them, in the order in which they are looked at: that of this file."""


def refused(task: Task, choice: Choice) -> str | None:
    """Why this cannot be, or None."""
    return next((refusal.why for refusal in REFUSALS if refusal.applies(task, choice)), None)


def _refused_because(why: str) -> Callable[[Callable[[Task, Choice], bool]], Callable[[Task, Choice], bool]]:
    """Add the function below to `REFUSALS`, which says of a choice whether it is refused for this reason."""

    def add(applies: Callable[[Task, Choice], bool]) -> Callable[[Task, Choice], bool]:
        REFUSALS.append(Refusal(applies, why))
        return applies

    return add


@_refused_because(
    "the load-balancing loss of routers is over all layers and tokens of a micro-batch, which tensor, context and "
    "pipeline parallelism cut up; use data or expert parallelism, or router_aux_loss_coef: 0"
)
def router_loss_is_cut(task: Task, choice: Choice) -> bool:
    return task.facts.has_router_loss and _cuts_sequences(choice)


@_refused_because(
    "noise on embeddings (neftune_noise_alpha) is drawn for whole documents, which tensor, context and pipeline "
    "parallelism cut up; use data parallelism"
)
def noise_is_cut(task: Task, choice: Choice) -> bool:
    return task.has_noise and _cuts_sequences(choice)


@_refused_because(
    "objectives other than sft compare whole answers, which context and pipeline parallelism cut up; use data or "
    "tensor parallelism"
)
def answers_are_cut(task: Task, choice: Choice) -> bool:
    return not task.objective.is_token_sum and max(choice.context, choice.pipeline) > 1


@_refused_because(
    "objective: distill compares whole vocabularies on each rank; use data parallelism, not tensor, context or "
    "pipeline parallelism"
)
def compared_vocabulary_is_cut(task: Task, choice: Choice) -> bool:
    return task.objective.has_teacher and _cuts_sequences(choice)


@_refused_because(
    "objective: reward, classify, classify_tokens and embed have a head of their own or none, which tensor "
    "parallelism cannot cut; use data parallelism"
)
def own_head_is_cut(task: Task, choice: Choice) -> bool:
    return (task.objective.has_head or task.objective.has_embeddings) and choice.tensor > 1


@_refused_because(
    "objectives with rollouts decode on each rank, which needs all weights there: use ddp, zero1 or zero2, not "
    "tensor parallelism, zero3, hybrid or hierarchical sharding"
)
def rollouts_lack_weights(task: Task, choice: Choice) -> bool:
    return task.objective.is_on_policy and (
        choice.tensor > 1 or choice.sharding not in ("none", "ddp", "zero1", "zero2")
    )


@_refused_because("objectives with rollouts read all weights for every token: they are not offloaded")
def rollouts_with_offloaded_parameters(task: Task, choice: Choice) -> bool:
    return task.objective.is_on_policy and choice.offload_parameters


@_refused_because(
    "an encoder-decoder has two stacks and padded rows, which tensor, context and pipeline parallelism do not cut; "
    "use data parallelism"
)
def encoder_decoder_is_cut(task: Task, choice: Choice) -> bool:
    return not task.facts.is_causal and _cuts_sequences(choice)


@_refused_because("layers of an encoder-decoder are run as they are: not in fp8, nor with MLPs in slices")
def encoder_decoder_in_fp8_or_slices(task: Task, choice: Choice) -> bool:
    return not task.facts.is_causal and (choice.matmul_dtype == "fp8" or choice.mlp_slice > 0)


@_refused_because("layers of an encoder-decoder share what the encoder gives, so their inputs stay on the device")
def encoder_decoder_offloads_activations(task: Task, choice: Choice) -> bool:
    return not task.facts.is_causal and choice.offload_activations


@_refused_because("this model does not take packed documents, which tensor, context and pipeline parallelism need")
def padded_rows_are_cut(task: Task, choice: Choice) -> bool:
    return not task.facts.packs and _cuts_sequences(choice)


@_refused_because(
    "convolutions and state spaces run along this model's tokens, which tensor, context and pipeline parallelism "
    "do not cut"
)
def state_spaces_are_cut(task: Task, choice: Choice) -> bool:
    return task.facts.runs_along and _cuts_sequences(choice)


@_refused_because(
    "layers of this model attend in chunks shorter than sequence_length, which context parallelism does not cut"
)
def attention_in_chunks_is_cut(task: Task, choice: Choice) -> bool:
    return choice.context > 1 and any((kind.chunk or math.inf) < task.sequence_length for kind in task.facts.kinds)


@_refused_because("fp8 matmuls need a GPU of compute capability 8.9 or more")
def gpu_lacks_fp8(task: Task, choice: Choice) -> bool:
    return choice.matmul_dtype == "fp8" and (task.device == "cpu" or task.gpu.capability < FP8)


@_refused_because("bf16 needs a GPU of compute capability 8.0 or more; older ones have fp16, with loss scaling")
def gpu_lacks_bf16(task: Task, _: Choice) -> bool:
    return task.precision == "bf16" and task.device == "cuda" and task.gpu.capability < BF16


@_refused_because("fp8 matmuls need a base in full precision or in nf4")
def fp8_over_int8(task: Task, choice: Choice) -> bool:
    return choice.matmul_dtype == "fp8" and choice.storage not in ("plain", "nf4")


@_refused_because("fp8 matmuls are for LoRA without lora.dora")
def fp8_with_dora(task: Task, choice: Choice) -> bool:
    return choice.matmul_dtype == "fp8" and task.has_adapters and task.lora.dora


@_refused_because(
    "quantization_aware rounds whole weights in full precision: not in 4 or 8 bits or fp8, nor cut by tensor or "
    "expert parallelism"
)
def quantization_aware_of_parts(task: Task, choice: Choice) -> bool:
    return task.is_quantization_aware and (
        choice.storage != "plain" or choice.matmul_dtype != "plain" or choice.tensor * choice.expert > 1
    )


@_refused_because("weights that are trained cannot be held in 4 or 8 bits")
def trained_weights_in_few_bits(task: Task, choice: Choice) -> bool:
    return choice.storage != "plain" and not task.has_adapters


@_refused_because("quantized weights make a CPU slower")
def quantized_weights_on_a_cpu(task: Task, choice: Choice) -> bool:
    return task.device == "cpu" and (
        (choice.storage != "plain" and not task.is_quantized) or choice.teacher_storage != "plain"
    )


@_refused_because("method: qlora and loqt hold the base in 4 bits, or in 8 with lora.bits: 8")
def quantized_method_over_plain_base(task: Task, choice: Choice) -> bool:
    return task.is_quantized and choice.storage == "plain"


@_refused_because(
    "lora.init: pissa, olora and lora-ga take their factors out of the base's weights, which must be whole and in "
    "full precision for that"
)
def initial_factors_of_parts(task: Task, choice: Choice) -> bool:
    return (choice.storage != "plain" or choice.tensor > 1) and task.has_lora and task.lora.takes_out


@_refused_because(
    "adapters or new tokens in the embedding or the output head do not go with tensor or pipeline parallelism"
)
def trained_ends_are_cut(task: Task, choice: Choice) -> bool:
    return max(choice.tensor, choice.pipeline) > 1 and _trains_ends(task)


@_refused_because(
    "adapters of the peft library are on a base in full precision on the device: not in 4 or 8 bits or fp8"
)
def peft_over_few_bits(task: Task, choice: Choice) -> bool:
    return task.method == "peft" and (
        choice.storage != "plain" or choice.matmul_dtype != "plain" or choice.offload_parameters
    )


@_refused_because(
    "adapters of the peft library go with data parallelism alone, not with tensor, context, pipeline or expert "
    "parallelism"
)
def peft_is_cut(task: Task, choice: Choice) -> bool:
    return task.method == "peft" and max(choice.tensor, choice.context, choice.pipeline, choice.expert) > 1


@_refused_because(
    f"{' and '.join(sorted(ALONE_ONLY))} compare or share weights of all layers, which must be whole on one device"
)
def peft_of_all_layers_over_ranks(task: Task, choice: Choice) -> bool:
    return choice.sharding != "none" and task.peft_type in ALONE_ONLY


@_refused_because(
    "PREFIX_TUNING hands keys and values from call to call, which activation checkpointing would hand on twice"
)
def prefix_is_checkpointed(task: Task, choice: Choice) -> bool:
    return choice.checkpointed_layers > 0 and not may_checkpoint(task)


@_refused_because("modules of the peft library are run as they are, neither compiled nor in slices")
def peft_compiled_or_sliced(task: Task, choice: Choice) -> bool:
    return task.method == "peft" and (choice.is_compiled or choice.mlp_slice > 0)


@_refused_because("method: relora and loqt merge adapters into whole weights, on one rank and without fp8 matmuls")
def merges_of_parts(task: Task, choice: Choice) -> bool:
    return task.is_merged and (choice.ranks > 1 or choice.sharding != "none" or choice.matmul_dtype == "fp8")


@_refused_because(
    "method: loqt looks at the gradient of each linear, in layers that are run as they are and have no experts"
)
def loqt_compiled_or_with_experts(task: Task, choice: Choice) -> bool:
    return task.method == "loqt" and (choice.is_compiled or bool(experts(task)))


@_refused_because(
    "method: relora merges adapters into a base in full precision; method: loqt is for one in 4 or 8 bits"
)
def relora_over_few_bits(task: Task, choice: Choice) -> bool:
    return task.method == "relora" and choice.storage != "plain"


@_refused_because("optimizer: galore and apollo are for method: full; adapters are of low rank already")
def projected_adapters(task: Task, _: Choice) -> bool:
    return task.optimizer in PROJECTED and task.has_adapters


@_refused_because("optimizer: lisa and badam are for method: full; adapters are small already")
def blockwise_adapters(task: Task, _: Choice) -> bool:
    return task.optimizer in BLOCKWISE and task.has_adapters


@_refused_because(
    "optimizer: lisa and badam freeze and train whole layers by turns, which are run as they are: not compiled, in "
    "fp8, or cut by pipeline or tensor parallelism"
)
def blockwise_compiled_or_cut(task: Task, choice: Choice) -> bool:
    return task.optimizer in BLOCKWISE and (
        choice.is_compiled or choice.matmul_dtype == "fp8" or max(choice.pipeline, choice.tensor) > 1
    )


@_refused_because("smaller optimizer states are for AdamW and Lion")
def small_states_of_other_optimizers(task: Task, choice: Choice) -> bool:
    return choice.optimizer_states != "fp32" and task.optimizer not in ALONE


@_refused_because("optimizer: adamw_fp8 needs a GPU of compute capability 8.9 or more; adamw_8bit is as small")
def gpu_lacks_fp8_states(task: Task, choice: Choice) -> bool:
    return choice.optimizer_states == "fp8" and task.device == "cuda" and task.gpu.capability < FP8


@_refused_because("training without fp32 masters needs bf16 and AdamW or Lion, which round stochastically")
def no_masters_without_stochastic_rounding(task: Task, choice: Choice) -> bool:
    return task.has_masters and not choice.master_weights and (task.optimizer not in ALONE or task.precision != "bf16")


@_refused_because("on a CPU everything is in host memory already")
def offload_on_a_cpu(task: Task, choice: Choice) -> bool:
    return task.device == "cpu" and (
        choice.offload_optimizer == "host" or choice.offload_parameters or choice.offload_activations
    )


@_refused_because("only AdamW and Lion update weight by weight, as states in host memory or on disk need it")
def offloaded_states_of_other_optimizers(task: Task, choice: Choice) -> bool:
    return choice.offload_optimizer != "none" and task.optimizer not in ALONE


@_refused_because("where parameters are in host memory, the optimizer's states are there already")
def states_offloaded_twice(task: Task, choice: Choice) -> bool:
    return choice.offload_parameters and choice.offload_optimizer == "host" and not choice.has_frozen_on_host(task)


@_refused_because(
    "parameters in host memory come layer by layer, as those of zero3, hybrid and hierarchical sharding do, or "
    "frozen ones on one rank"
)
def offloaded_parameters_not_by_layer(task: Task, choice: Choice) -> bool:
    return (
        choice.offload_parameters
        and choice.sharding not in ("zero3", "hybrid", "hierarchical")
        and not choice.has_frozen_on_host(task)
    )


@_refused_because(
    "gradients can be released in the backward pass of full fine-tuning by AdamW or Lion only, with one "
    "micro-batch a step and without max_grad_norm and loss scaling"
)
def gradients_released_too_early(task: Task, choice: Choice) -> bool:
    return choice.optimizer_in_backward and not may_release(task, choice)


@_refused_because("hybrid and hierarchical sharding are for several nodes of several ranks")
def hybrid_sharding_without_nodes(task: Task, choice: Choice) -> bool:
    return choice.sharding in ("hybrid", "hierarchical") and 1 in (choice.replicate, choice.shard)


@_refused_because(
    "quantized collectives are for full fine-tuning: adapters send little, and a base in nf4 (method: qlora) has 4 "
    "bits between ranks without being rounded again"
)
def quantized_collectives_of_adapters(task: Task, choice: Choice) -> bool:
    return choice.is_lossy and task.has_adapters


@_refused_because("quantized collectives are for weights that all ranks share: zero1, zero2, zero3 and hierarchical")
def quantized_collectives_of_copies(task: Task, choice: Choice) -> bool:
    return choice.is_lossy and choice.sharding in ("none", "ddp", "hybrid")


@_refused_because(
    "several ranks share what is the same on all by sharding: ddp, zero1, zero2, zero3, hybrid, hierarchical"
)
def ranks_without_sharding(task: Task, choice: Choice) -> bool:
    return choice.sharding == "none" and choice.holders * choice.tensor > 1


@_refused_because("a step has fewer sequences than there are ranks")
def fewer_sequences_than_ranks(task: Task, choice: Choice) -> bool:
    return choice.data_ranks > task.sequences


@_refused_because("tensor parallelism splits whole key heads")
def key_heads_are_cut(task: Task, choice: Choice) -> bool:
    return choice.tensor > 1 and task.facts.kv_heads % choice.tensor != 0


@_refused_because("tensor parallelism cuts every matrix into equal parts")
def matrices_cut_unevenly(task: Task, choice: Choice) -> bool:
    return choice.tensor > 1 and any(width % choice.tensor for width, _ in _cuts(task))


@_refused_because(
    "weights in 4 bits have a scale for each block of 64, and tensor parallelism would cut through blocks"
)
def nf4_blocks_are_cut(task: Task, choice: Choice) -> bool:
    return (
        choice.tensor > 1
        and choice.storage == "nf4"
        and any(width // choice.tensor * run % NF4_BLOCK for width, run in _cuts(task))
    )


@_refused_because("DoRA needs whole rows of each weight, which tensor parallelism cuts")
def dora_rows_are_cut(task: Task, choice: Choice) -> bool:
    return choice.tensor > 1 and task.has_adapters and task.lora.dora


@_refused_because("tensor and context parallelism stay within a node")
def tensor_or_context_across_nodes(task: Task, choice: Choice) -> bool:
    return choice.tensor * choice.context > task.ranks_per_node


@_refused_because("a pipeline stage has at least one layer")
def stages_without_layers(task: Task, choice: Choice) -> bool:
    return choice.pipeline > 1 and choice.pipeline * PER_RANK[choice.schedule] > task.facts.layers


@_refused_because(
    "a zero-bubble schedule takes the gradients of weights apart from the others, which goes with plain layers "
    "only: not sharded, compiled or checkpointed, nor trained in half precision"
)
def zero_bubble_of_other_layers(task: Task, choice: Choice) -> bool:
    return choice.pipeline > 1 and choice.schedule == "zero-bubble" and not _may_split(task, choice)


@_refused_because("expert parallelism cuts experts over ranks, and none of this model's layers has any")
def no_experts_to_cut(task: Task, choice: Choice) -> bool:
    return choice.expert > 1 and not experts(task)


@_refused_because("experts are cut evenly over ranks, and this model has another number of them")
def experts_cut_unevenly(task: Task, choice: Choice) -> bool:
    return choice.expert > 1 and any(count % choice.expert for count in experts(task))


@_refused_because(
    "flash attention needs half precision, head sizes of 8 to 256 and compute capability 8.0 (flash-attn-4: 9.0), "
    "and FlexAttention the latter"
)
def attention_without_kernel(task: Task, choice: Choice) -> bool:
    return not _has_kernel(task, choice)


@_refused_because(
    "weights are kept transposed where adapters without dropout or DoRA are on all linears of one GPU's fp8 base"
)
def transposed_cache_of_others(task: Task, choice: Choice) -> bool:
    return choice.cache_transposed and not may_cache_transposed(task, choice)


@_refused_because(
    "passes are captured on one GPU, of compiled layers without experts or dropout whose attention is a packed "
    "kernel; nothing but activations may be offloaded, no gradient released, and where all weights are trained a "
    "step has one micro-batch; not with deterministic: true, since passes are run as they are first and may round "
    "otherwise"
)
def passes_cannot_be_captured(task: Task, choice: Choice) -> bool:
    return choice.cuda_graphs and not may_capture(task, choice)


@_refused_because("there are not so many layers to checkpoint")
def more_checkpointed_than_layers(task: Task, choice: Choice) -> bool:
    return choice.checkpointed_layers > task.facts.layers


def _cuts_sequences(choice: Choice) -> bool:
    """Whether no rank has whole documents in whole layers: tensor, context or pipeline parallelism."""
    return max(choice.tensor, choice.context, choice.pipeline) > 1


def _trains_ends(task: Task) -> bool:
    return task.has_lora and (task.lora.has_ends or task.has_new_tokens)


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


def _cuts(task: Task) -> list[tuple[int, int]]:
    """Of each linear, the width that tensor parallelism cuts, and how many weights in a row lie together behind it."""
    linears = [linear for kind in task.facts.kinds for linear in kind.linears]
    return [
        *((linear.inputs, 1) for linear in linears if last_name(linear) in ROWWISE),
        *((linear.outputs, linear.inputs) for linear in linears if last_name(linear) in COLWISE),
    ]
