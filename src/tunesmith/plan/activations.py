"""Activations of one rank: what layers keep for the backward pass, from their structure, and what of it is there at a
time. Where the probe has counted a layer, the formulas say how other cases are to the one that was counted.

What compiled layers keep was measured on an H200 (benchmarks/planner.py); where a number below is not a count of
tensors in our own code, it says so.
"""

from __future__ import annotations

import dataclasses

from tunesmith.config.schema import Lora
from tunesmith.plan import model_states
from tunesmith.plan.choice import Choice, Task
from tunesmith.plan.facts import KEPT_RANK, Layer
from tunesmith.plan.paths import is_in_full, preferred
from tunesmith.plan.plan import Attention
from tunesmith.plan.stages import micro_batches

ENDS = {"adapters": 2, "full": 4}
"""Hidden states that are kept outside of the layers; a final norm that is trained keeps its input in fp32 as well."""
CROWDED = 1.2
"""Tokens that come to the rank whose experts are the most popular, against the mean; taken, not measured."""


def kept(task: Task, choice: Choice, tokens: float) -> tuple[float, float]:
    """What all layers of this rank keep, and one layer alone, checkpointed or not."""
    facts = task.facts
    if facts.paired is not None and task.shape is not None:
        one_layer = facts.paired.layer(*task.shape) * task.width / facts.paired.width
        all_layers = facts.paired.kept(*task.shape) * task.width / facts.paired.width
        share = choice.checkpointed_layers / facts.layers
        return all_layers * (1 - share) + kept_by_recomputed(task, choice, tokens), one_layer

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
                crowded=CROWDED if choice.expert > 1 and model_states.kind_experts(kind) else 1.0,
            )
        )

    boundary = tokens * facts.hidden * task.width / choice.tensor
    one_layer = max(of(kind) for kind in facts.kinds)
    share = choice.checkpointed_layers / facts.layers
    if choice.save_attention and choice.checkpointed_layers:
        one_layer -= tokens * max(kind.query * task.width + 4 * facts.heads for kind in facts.kinds) / choice.tensor
    every = facts.total(of)
    if (part := model_states.trained_share(task)) < 1:
        every = part * every + (1 - part) * facts.total(lambda kind: of(kind, is_frozen=True))
    saved = every * (1 - share) * task.backward_share * _layers_at_once(task, choice)
    # The factors in the matmuls' precision; checkpointed layers make them again.
    casts = (1 - share) * task.adapted[0] * task.width / choice.tensor / choice.pipeline
    ends = ENDS["adapters" if task.has_adapters else "full"] * boundary
    ends += boundary if task.has_adapters and choice.checkpointed_layers else 0.0  # measured; whose it is is not known
    return saved + kept_by_recomputed(task, choice, tokens) + ends + casts, one_layer


def kept_by_recomputed(task: Task, choice: Choice, tokens: float) -> float:
    """What checkpointed layers keep on the device: their inputs, and what attention gave."""
    facts, kept = task.facts, 0.0
    if choice.save_attention:
        share = choice.checkpointed_layers / facts.layers
        kept = share * tokens * facts.total(lambda kind: kind.query * task.width + 4 * facts.heads) / choice.tensor
        kept *= task.backward_share * _layers_at_once(task, choice)
    boundary = tokens * facts.hidden * task.width / choice.tensor
    inputs = recomputed_inputs(task, choice, tokens)
    return kept + (min(inputs, 2 * boundary) if choice.offload_activations else inputs)  # in use, and on its way


def recomputed_inputs(task: Task, choice: Choice, tokens: float) -> float:
    """What checkpointed layers keep, in host memory where the plan says so."""
    boundary = tokens * task.facts.hidden * task.width / choice.tensor
    return choice.checkpointed_layers * boundary * task.backward_share * _layers_at_once(task, choice)


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
    by_structure = _structured_bytes(
        task,
        kind,
        is_compiled=is_compiled,
        matmul_dtype=matmul_dtype,
        storage=storage,
        tensor=tensor,
        is_sliced=is_sliced,
        crowded=crowded,
        attention_kernel=attention_kernel,
        is_frozen=is_frozen,
    )
    if (own := kind.kept_by_own) is not None:
        precision = task.precision if task.width == own.width else "fp32" if own.width == 4 else "bf16"
        counted = dataclasses.replace(task, precision=precision)
        return by_structure * own.bytes / _structured_bytes(counted, kind, is_compiled=own.is_compiled)
    if kind.kept is None:
        return by_structure
    precision = task.precision if task.width == kind.kept.width else "fp32" if kind.kept.width == 4 else "bf16"
    counted = dataclasses.replace(task, precision=precision, lora=Lora(rank=KEPT_RANK))
    usual = _structured_bytes(counted, kind, is_compiled=kind.kept.is_compiled)
    return by_structure * (kind.kept.adapters if task.has_adapters else kind.kept.full) / usual


def is_apart(task: Task, storage: str) -> bool:
    """Adapters that are not fused with the linears they belong to."""
    return task.has_adapters and bool(task.lora.dropout or task.lora.dora or storage == "int8" or task.is_merged)


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
    """What a layer keeps for backward, for each token, by its structure. Eager: as autograd's own hooks count it.
    Compiled: norms and activations are computed again from what stands before them, save where an adapter keeps its
    input."""
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
    """Norms with what they give to matmuls, attention, and the MLP, of a layer that is run as it is."""
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
    is_in_a_kernel = task.device == "cuda" and kind.is_rope_fused
    # The values keep all three alive, unless they are taken apart where queries and keys are rotated.
    attention += (kind.query + kind.key) * width if kind.is_qkv_fused and kind.is_rotated and not is_in_a_kernel else 0
    attention += kind.query * width if task.device == "cpu" else 0  # heads last: a copy
    if task.has_lora and not is_apart(task, storage) and not kind.is_qkv_fused:
        is_rotated_at_once = is_in_a_kernel and not kind.has_qk_norm
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
    """Whether kernels for the gates of trained MLPs are used (`model.gated`)."""
    return task.device == "cuda" and tensor == 1


def _layers_at_once(task: Task, choice: Choice) -> float:
    """Times all layers of the model, how many this rank keeps activations of."""
    if choice.pipeline == 1:
        return 1.0
    layers, stages = task.facts.layers, choice.pipeline
    # Micro-batches between their two passes on the first rank: it has half of its layers twice as early, interleaved.
    flying = (3 * stages - 1) / 2 if choice.schedule == "interleaved" else stages
    return -(-layers // stages) / layers * min(flying, micro_batches(choice.accumulation_steps(task), stages))
