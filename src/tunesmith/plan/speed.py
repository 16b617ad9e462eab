"""Seconds of one optimizer step: matmuls at the rate of their shapes, attention by document length, passes over
memory, communication and offload as far as computation does not hide them, and the CPU that launches it all.

Rates are the hardware's attainable ones. The constants below are what is left: each says where it comes from.
Pure arithmetic; nothing here knows what fits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from tunesmith.config.schema import Rollout
from tunesmith.objectives.distill import Distill
from tunesmith.objectives.grpo import Grpo
from tunesmith.plan import activations, memory, model_states, stages
from tunesmith.plan.choice import Choice, Task
from tunesmith.plan.facts import Layer, StateSpace
from tunesmith.plan.paths import is_in_full, path_of_kind
from tunesmith.plan.plan import Time

HALF_RATE_TOKENS = 0.6e-12
"""Matmuls over this many tokens, for each operation a second of the device in half precision, run at half their rate:
430 on an H200."""
HALF_RATE_TOKENS_CPU = 60
HALF_RATE_WIDTH = 0.2e-12
"""The same for the narrower side of the matrix: 140 on an H200, a tenth of that on small GPUs."""


class AttentionRate(NamedTuple):
    """How fast an attention path is."""

    share: float
    """Of the half-precision rate."""
    overhead: int
    """Tokens that a query seems to look at beside those it does: whole tiles, and what each pass costs in any case."""
    narrower: float
    wider: float
    """By which power of their size heads narrower and wider than `ATTENTION_HEAD` are slower."""


ATTENTION: dict[tuple[str, str], AttentionRate] = {
    # By benchmarks/results/attention.json (H200, forward and backward): off by at most 17%, but for soft-capped heads
    # and those with values of another size, where it is 33%.
    ("flash-attn-4", "new"): AttentionRate(1.25, 1500, 0.2, 0.7),
    ("varlen", "new"): AttentionRate(0.55, 780, 0.5, 0.25),
    ("flex-attention", "new"): AttentionRate(0.54, 1200, 0.6, 1.0),
    ("memory-efficient", "new"): AttentionRate(0.22, 450, 0.5, 1.35),
    # Of older GPUs none was measured with heads of another size than 128.
    ("flash-attn-4", "old"): AttentionRate(0.85, 450, 0.5, 0.5),
    ("varlen", "old"): AttentionRate(0.85, 350, 0.5, 0.5),
    ("flex-attention", "old"): AttentionRate(0.6, 600, 0.6, 1.0),
    ("memory-efficient", "old"): AttentionRate(0.5, 350, 0.5, 1.35),
}
"""By path, on GPUs of compute capability 9.0 and more ("new") or less."""
ATTENTION_HEAD = 128
ATTENTION_SOFT_CAPPED = {"flash-attn-4": 0.9, "flex-attention": 0.73}
"""The rate with a tangent for each score, against the same without."""
ATTENTION_ALIBI = 0.78
ATTENTION_CALL = 0.5e-3
"""Seconds of the CPU for one document in one layer's forward pass, where each is computed by itself: Gemma 2 of 2B took
2.0 ms for forward and backward, at about 65 kernels (H200)."""
ATTENTION_BACKWARD = 2.5 / 0.85
"""Backward against forward: 2.5 times the operations, at 0.85 of the rate."""
ELEMENTWISE = {
    True: {"hidden": 22, "attention": 4, "intermediate": 9},
    False: {"hidden": 150, "attention": 35, "intermediate": 20},
}
"""Passes over values of each width in norms, rotation, residuals and activations, forward and backward, compiled or
not. Norms in transformers' own code go over their input a dozen times each way, half of that in fp32."""
FORWARD_ELEMENTWISE = 0.4
"""The forward pass's part of them."""
ADAPTER_PASSES = 2.0
"""Over inputs and outputs of adapted linears."""
UNFUSED_ADAPTER_PASSES = 4.0
"""The same where an adapter is a linear beside the base's, whose outputs and gradients are added in passes of their
own; half as many again, as of all adapters in layers that are not compiled. Counted."""
DORA_PASSES = 6.5
"""And where each output is scaled as well, and what it was before is read again for the scale's gradient: measured of a
classifier's and an embedding model's steps (OLMo-2-1B, H200)."""
ADAPTER_RATE = 0.25
"""Share of the half-precision rate that matmuls as narrow as an adapter's reach."""
ROUNDING_BYTES = 48
"""Read and written for each weight that is rounded in quantization-aware training; counted, not measured."""
FP8_PASSES = {"adapters": 1.8, "full": 5.5}
"""Over inputs and outputs of matmuls, to scale and convert them; where weights are trained also transposed."""
OPERATORS = 0.75
"""Share of the memory's speed that operators of layers reach which are not compiled."""
UNFUSED_ATTENTION = (44, 48)
"""Bytes passed over for each score in the forward and the backward pass, where no kernel keeps scores on the chip: 33
and 36 by the operators of transformers' own code, which reach three quarters of the memory's speed."""
HOST_LAYER = {
    ("full", "plain"): 3e-3,
    ("full", "fp8"): 7e-3,
    ("adapters", "plain"): 4.5e-3,
    ("adapters", "fp8"): 6.2e-3,
}
"""Seconds of the CPU for a compiled layer's forward and backward pass: what starting its kernels takes when the
GPU waits for nothing else. Measured on machines with an H200, in fp8 on one whose CPU compiled other things
meanwhile: alone on it, adapters in fp8 took 3. Adapters in half precision were only seen over nf4 and with states in
few bits."""
HOST_ADAPTED = 7
"""Adapted linears of the layers that were measured: what adapters take is shared out over so many."""
HOST_NF4 = {"plain": 4.5e-3, "fp8": 1e-3}
"""Seconds of it more where weights are made whole first. In fp8 a step of 8B took no longer than its kernels."""
HOST_AGAIN = 0.5
"""Times as much more where the layer is computed again, within the graph of its backward pass."""
GRAPH_LAYER, GRAPH_MICRO_BATCH, GRAPH_WEIGHT = 0.1e-3, 2e-3, 0.06e-3
"""Seconds of the CPU for a layer of captured passes; for what is not captured of a micro-batch, its loss and
copies; and for each trained weight in clipping and update. A step of 30 layers with 420 matrices of adapters took 31 ms
so, and 15 on a quieter CPU."""
HOST_STATES = 0.2e-3
"""Seconds of it more for each trained weight whose states are in 8 or 4 bits: 0.1B with all weights took 80 ms more."""
ADAFACTOR, ADAFACTOR_PASSES = {"adapters": 0.25e-3, "full": 0.5e-3}, 30
"""Seconds for each trained matrix that nothing hides, since torch's Adafactor has the CPU wait for two norms of
each (adapters took 0.17 to 0.21 ms, and 0.3 to 0.45 with older code); and bytes that it passes over for each trained
value beside those that any update does."""
NEWTON_SCHULZ = 5
"""Steps by which Muon makes a matrix orthogonal, each of three matmuls."""
HOST_UPDATES = 20e9
"""Bytes a second that a node's CPUs pass over in an optimizer's update: a guess."""
LAUNCH = 20e-6
"""Seconds of the CPU to start a kernel of eager code, with what Python and autograd do for it: measured of T5-large,
whose step the GPU alone would do in a third of its time."""
DISPATCH = 10e-6
"""Seconds of an operator on a CPU beside its arithmetic; nothing hides them."""
KERNELS = (60, 130)
"""Kernels of an eager layer, forward and backward."""
DECODED_LAYER, DECODED_TOKEN = 140e-6, 2e-3
"""Seconds of a captured decoding step: the small kernels of a layer, and the host between two tokens."""
CAPTURED_LAYER = 24e-3
"""Seconds for each layer to capture a decoding step, which every rollout does anew. Fitted to two rows of
benchmarks/results/objectives.json: GRPO of 1B over 256 tokens and of 1.7B in nf4 over 64 (H200)."""
CAPTURED_COLUMNS = 256
"""Tokens that the buffers of a captured step have room for (`infer.captured`)."""
DRAWN_BYTES = 44
"""Passed over for each value of the vocabulary to draw a token: probabilities in fp32, their sums in fp64."""
STEP_SECONDS = 2e-3
"""Seconds of a step outside of everything: batch, clipping, logging."""
LINK, NETWORK = 0.75, 0.97
"""Share of a link's published speed that a collective reaches, within and between nodes."""
SCATTER = {"cpu": 2, "cuda": 1}
"""Times what a reduce-scatter has to send that it sends: gloo, on CPUs, makes a whole all-reduce of it."""
HIDDEN_SHARE = {"cpu": 0.0, "cuda": 0.8}
"""Communication and copies hide behind this share of the computation beside them; on a CPU behind nothing."""
BUBBLE = {"1f1b": 1.0, "interleaved": 1 / 2, "zero-bubble": 1 / 3}
"""What each stage but one makes the others wait, in passes of a micro-batch through the layers of a rank."""
EXPOSED = 0.05
"""Of a collective, at least this share is seen: the first and the last one of a pass have nothing to hide behind."""


GRADIENT_BYTES = 4
"""Bytes of a gradient between ranks: they are reduced in fp32."""
PACK, UNPACK = {"cpu": 120, "cuda": 40}, {"cpu": 75, "cuda": 12}
"""Bytes that could be passed over in memory while a value is rounded for the wire, and taken back; on a CPU
measured with int8."""


class Passes(NamedTuple):
    """Seconds of one micro-batch on the slowest rank."""

    forward: Time
    backward: Time
    recomputation: float
    """What the backward pass takes more for activations that are computed again."""


def step_time(task: Task, choice: Choice) -> Time:
    """The time of one optimizer step, on the slowest rank, by what it is for."""
    micro_batches: float = choice.accumulation_steps(task)
    if choice.pipeline > 1:
        micro_batches = stages.micro_batches(choice.accumulation_steps(task), choice.pipeline)
    if task.padded is not None and task.padded.steps:
        micro_batches = task.padded.micro_batches(choice.room(task), choice.data_ranks)
    forward, backward, recomputation = passes(task, choice)
    compute = forward.total + backward.total + recomputation
    time = {part: micro_batches * (getattr(forward, part) + getattr(backward, part)) for part in Time.model_fields}
    if task.objective.has_baseline:  # answers to other prompts, without a gradient
        time = _plus(time, forward, micro_batches)
    if task.objective.has_embeddings and micro_batches > 1:  # all texts once before, without a gradient
        time = _plus(time, forward, micro_batches)
    if task.teacher_in_steps:
        time = _plus(time, _teacher(task, choice), micro_batches)
    if (answers := memory.rolled_out(task, choice)) is not None:
        objective = task.objective
        updates = objective.rollout.updates if isinstance(objective, Grpo) else 1
        share = objective.distillation.on_policy if isinstance(objective, Distill) else 1.0
        time = {part: updates * seconds for part, seconds in time.items()}
        time = _plus(time, _rollout(task, choice, *answers), share)
    time["recomputation"] = micro_batches * recomputation
    time["optimizer"], host_update = _optimizer(task, choice)
    if choice.offload_optimizer == "host" and choice.ranks == 1 and not choice.optimizer_in_backward:
        host_update = max(0.0, host_update - forward.total)  # layers begin once their own weights are updated
    time["communication"] = _communication(task, choice, micro_batches, forward.total, backward.total + recomputation)
    time["offload"] = host_update + micro_batches * _activation_traffic(task, choice, compute)
    if choice.offload_parameters:
        time["offload"] += _parameter_traffic(
            task, choice, micro_batches, forward.total, backward.total + recomputation
        )
    time["bubbles"] = _bubbles(choice, micro_batches, compute)
    update = 0.0
    if task.optimizer == "adafactor" and task.device == "cuda":
        update = ADAFACTOR["adapters" if task.has_adapters else "full"] * _matrices(task)
    time["host"] += _waiting(task, choice, micro_batches, compute) + update + STEP_SECONDS
    return Time(**time)


def _plus(time: dict[str, float], more: Time, count: float) -> dict[str, float]:
    """The time with so many times `more` added."""
    return {part: seconds + count * getattr(more, part) for part, seconds in time.items()}


# compute


def passes(task: Task, choice: Choice) -> Passes:
    """The passes of one micro-batch: of an encoder-decoder as they were counted, of others by their structure."""
    if task.facts.paired is not None and task.padded is not None:
        return _counted_passes(task, choice)
    return _passes_by_structure(task, choice)


def _counted_passes(task: Task, choice: Choice) -> Passes:
    """The passes of an encoder-decoder's mean micro-batch, of which all work was counted."""
    facts, rates, padded = task.facts, task.rates, task.padded
    assert facts.paired is not None
    assert padded is not None
    mean, work = padded.mean(choice.room(task)), facts.paired
    read, written = (float(count) for count in mean[:2])
    half, is_gpu = rates.half if task.width == 2 else rates.fp32, task.device == "cuda"
    rate = _matmul_rate(task, choice, read + written)
    share = ATTENTION["memory-efficient", "new"].share if is_gpu else 0.5
    head = 2 * facts.embedding * written / half
    both = Time(
        matmuls=work.half.of(mean) / rate + work.full.of(mean) / rates.fp32,
        attention=work.attention.of(mean) / (share * half),
        elementwise=work.bytes.of(mean) * task.width / work.width / (OPERATORS * rates.bandwidth),
        quantization=_quantization(task, choice, read + written),
        loss=head * (2 if task.has_adapters else 3) + 20 * facts.vocabulary * written / rates.bandwidth,
    )
    forward, backward = (
        Time(**{name: part * seconds for name, seconds in dict(both).items()}) for part in (1 / 3, 2 / 3)
    )
    return Passes(forward, backward, forward.total * choice.checkpointed_layers / facts.layers)


def _passes_by_structure(task: Task, choice: Choice) -> Passes:
    """The passes of one micro-batch, as long as the structure of the layers and the head says."""
    facts, rates, tokens = task.facts, task.rates, choice.tokens(task)
    if task.padded is not None:
        tokens = float(task.padded.mean(choice.room(task))[0])
    split = choice.tensor / _part_of_rank(task, choice)
    matmul_rate = _matmul_rate(task, choice, choice.mlp_tokens(task))
    forward_flops = 2 * facts.active * tokens / split
    matmuls = forward_flops / matmul_rate
    matmuls *= 1 + (activations.CROWDED - 1) * _expert_share(task) if choice.expert > 1 else 1
    attention = _attention(task, choice) * tokens / split
    elementwise = _elementwise_bytes(task, choice) * tokens / split / rates.bandwidth
    adapter = _adapter_seconds(task, choice, tokens, split)
    if (counted := _counted(task, choice, tokens)) is not None:
        elementwise, adapter = (part / split for part in counted)
    quantization = _quantization(task, choice, tokens) / split
    weight_gradients = 0 if task.has_adapters else model_states.trained_share(task)
    share = _backward_share(task)
    forward = Time(
        matmuls=matmuls,
        attention=attention,
        elementwise=FORWARD_ELEMENTWISE * elementwise,
        adapter=adapter / 3,
        quantization=quantization / 2,
        loss=_loss_seconds(task, choice, tokens, split, weight_gradients),
    )
    backward = Time(
        matmuls=matmuls * (1 + weight_gradients) * share,
        attention=attention * ATTENTION_BACKWARD * share,
        elementwise=(1 - FORWARD_ELEMENTWISE) * elementwise * share,
        adapter=adapter * 2 / 3,
        quantization=quantization / 2 * share,
    )
    return Passes(forward, backward, share * _recomputation(task, choice, forward))


def _adapter_seconds(task: Task, choice: Choice, tokens: float, split: float) -> float:
    """Seconds that adapters add to both passes: passes over memory, and their own matmuls."""
    passes = UNFUSED_ADAPTER_PASSES if task.method == "loqt" else ADAPTER_PASSES
    passes = DORA_PASSES if task.has_adapters and task.lora.dora else passes
    rates = task.rates
    seconds = task.adapted[1] * passes * task.width * tokens / split / rates.bandwidth
    seconds += 6 * task.adapted[0] * tokens / split / (ADAPTER_RATE * (rates.fp32 if task.width == 4 else rates.half))
    return seconds * (1 if choice.is_compiled else 1.5)


def _loss_seconds(task: Task, choice: Choice, tokens: float, split: float, weight_gradients: float) -> float:
    """Seconds of the head and the loss, gradients included, for which the head's matmul is done again."""
    if task.objective.has_embeddings or task.objective.has_head:
        return 0.0
    facts, rates = task.facts, task.rates
    head = 2 * facts.embedding * tokens / split / (rates.fp32 if task.width == 4 else rates.half)
    logits = 20 * facts.vocabulary * tokens / split / rates.bandwidth
    has_fp8_head = rates.fp8 and model_states.has_fp8_head(task, choice)
    head_backward = rates.half / rates.fp8 if has_fp8_head else 1 + weight_gradients
    return head * (1 + head_backward) + logits


def _recomputation(task: Task, choice: Choice, forward: Time) -> float:
    """Seconds of what the backward pass computes again of the forward pass, if it goes through all layers."""
    # A checkpointed layer's output is nobody's input: its last matmul falls out of the graph that both passes are.
    needed = 1 - _last_share(task) if choice.is_compiled else 1
    again = needed * forward.matmuls + forward.elementwise + forward.adapter + forward.quantization
    again += 0.0 if choice.save_attention else forward.attention
    checkpointed = choice.checkpointed_layers / task.facts.layers
    # An MLP in slices is computed again in any case; a compiled layer leaves it out when it is itself checkpointed.
    sliced = (1 - checkpointed if choice.is_compiled else 1) if choice.mlp_slice else 0
    return again * checkpointed + sliced * forward.matmuls * _mlp_share(task)


def _counted(task: Task, choice: Choice, tokens: float) -> tuple[float, float] | None:
    """Seconds of the passes over memory, and of matmuls beside those of the weights themselves, where the layers' work
    was counted operator by operator."""
    kinds, rates = task.facts.kinds, task.rates
    if choice.is_compiled or task.device != "cuda" or any(kind.work is None for kind in kinds):
        return None
    facts = task.facts

    def total(name: str) -> float:
        of_token, fixed = (facts.total(lambda kind, at=at: getattr(kind.work, name)[at]) for at in (0, 1))
        return of_token * tokens + fixed

    own = 4 * facts.active * tokens  # forward, and back to the inputs
    # Matmuls of the weights themselves may be in fp32 by a method's own code: what they take more is its own.
    more = total("half") / rates.half + total("full") / rates.fp32 - own / rates.half
    return total("bytes") / (OPERATORS * rates.bandwidth), max(0.0, more)


def _backward_share(task: Task) -> float:
    """The part of the layers that the backward pass goes through, from the top, in the mean of a run: BAdam's goes down
    to the block whose turn it is, of the head, each layer and the embedding."""
    if task.optimizer != "badam" or task.has_adapters:
        return task.backward_share
    layers = task.facts.layers
    ends = (layers,) if task.facts.tied else (0, layers)
    return (sum(range(1, layers + 1)) + sum(ends)) / (layers + len(ends)) / layers


def _teacher(task: Task, choice: Choice) -> Time:
    """The forward pass of one micro-batch through the teacher, whose layers are not compiled, and its logits."""
    assert task.facts.teacher is not None
    asked = replace(task, facts=task.facts.teacher, method="full")
    way = Choice(
        micro_batch=choice.micro_batch,
        storage=choice.teacher_storage,
        attention=choice.attention,
        sharding=choice.sharding,
        replicate=choice.replicate,
        shard=choice.shard,
    )
    forward = _passes_by_structure(asked, way).forward
    return Time(**{**dict(forward), "loss": forward.loss / 2})


def _rollout(task: Task, choice: Choice, rollout: Rollout, prompts: int, answers: int) -> Time:
    """Of answers as long as they may be: prompts are read once; then each token reads the weights, and for each row its
    keys and values, and what is drawn from is as wide as the vocabulary. On a GPU the step is captured first, for each
    batch of rows and again when answers outgrow its buffers."""
    facts, rates = task.facts, task.rates
    rows = prompts * answers
    batches = -(-rows // memory.ROLLOUT_ROWS)
    tokens = batches * rollout.max_answer_tokens
    weights, rate = facts.active + facts.embedding, rates.fp32 if task.width == 4 else rates.half
    flops = 2 * weights * (rows * rollout.max_answer_tokens + prompts * task.document_length)
    held = task.width if choice.storage == "plain" else model_states.QUANTIZED[choice.storage] + 2 * task.width
    read = (facts.matrices * held + facts.embedding * task.width) * tokens / rates.bandwidth
    columns = task.document_length + rollout.max_answer_tokens / 2
    kept = facts.total(lambda kind: 2 * kind.key) * task.width * columns
    drawn = facts.vocabulary * DRAWN_BYTES
    attention = rows * rollout.max_answer_tokens * kept / rates.bandwidth
    loss = rows * rollout.max_answer_tokens * drawn / rates.bandwidth
    time = {"matmuls": max(flops / rate, read), "attention": attention, "loss": loss}
    if task.device != "cuda":
        return Time(**time)
    captures = batches * -(-rollout.max_answer_tokens // CAPTURED_COLUMNS)
    capture = captures * facts.layers * CAPTURED_LAYER
    return Time(**time, elementwise=tokens * facts.layers * DECODED_LAYER, host=tokens * DECODED_TOKEN + capture)


def _part_of_rank(task: Task, choice: Choice) -> float:
    """The part of the layers and the head that the busiest rank of a pipeline computes."""
    if choice.pipeline == 1:
        return 1.0
    facts = task.facts
    head = facts.embedding / max(1.0, facts.active / facts.layers)
    return stages.busiest(facts.layers, round(head, 2), choice.pipeline, choice.schedule)


def _mlp_share(task: Task) -> float:
    """Of the matmuls, those that are as wide as the MLP, or twice where gate and up are one."""
    facts = task.facts
    wide = facts.total(
        lambda kind: sum(
            linear.active * linear.inputs * linear.outputs
            for linear in kind.linears
            if kind.intermediate in (linear.inputs, linear.outputs)
            or (kind.is_gated and linear.outputs == 2 * kind.intermediate)
        )
    )
    return wide / facts.active


def _last_share(task: Task) -> float:
    """Of the matmuls, those whose outcome is added to what the layer gives and is needed for nothing else."""
    facts = task.facts
    last = facts.total(
        lambda kind: sum(
            linear.active * linear.inputs * linear.outputs
            for linear in kind.linears
            if linear.inputs == kind.intermediate and linear.count == 1 and not kind.post_norms
        )
    )
    return last / facts.active


def _expert_share(task: Task) -> float:
    """Of the parameters that a token passes through."""
    active = task.facts.total(
        lambda kind: sum(linear.active * linear.inputs * linear.outputs for linear in kind.linears if linear.count > 1)
    )
    return active / task.facts.active


def _matmul_rate(task: Task, choice: Choice, tokens: float) -> float:
    rates = task.rates
    if choice.matmul_dtype == "fp8":
        plain = _expert_share(task)  # experts are multiplied in half precision
        best = 1 / ((1 - plain) / (rates.fp8 or rates.half) + plain / rates.half)
    else:
        best = rates.fp32 if task.width == 4 else rates.half
    if task.device == "cpu":
        return best * tokens / (tokens + HALF_RATE_TOKENS_CPU)
    narrow = min(task.facts.hidden, min(kind.intermediate for kind in task.facts.kinds)) / choice.tensor
    rows = tokens
    experts = max(linear.count / linear.active for kind in task.facts.kinds for linear in kind.linears)
    if experts > 1:
        rows *= choice.expert / experts  # an expert sees its part of the tokens only, of all ranks that send it theirs
    scale = rates.fp32 if task.width == 4 else rates.half
    return best * rows / (rows + HALF_RATE_TOKENS * scale) * narrow / (narrow + HALF_RATE_WIDTH * scale)


def _attention(task: Task, choice: Choice) -> float:
    """Seconds of a token's forward pass in all layers."""
    facts, rates = task.facts, task.rates
    if task.device == "cpu":
        return facts.attention_flops(task.document_length) / (0.5 * (rates.fp32 if task.width == 4 else rates.half))
    return facts.total(lambda kind: _attention_of(task, choice, kind))


def _attention_of(task: Task, choice: Choice, kind: Layer) -> float:
    """The same in one layer on a GPU."""
    facts, rates, length = task.facts, task.rates, task.document_length
    flops = facts.layer_attention_flops(kind, length)
    generation = "new" if task.gpu.capability >= (9, 0) else "old"
    best = rates.half if task.width == 2 else rates.fp32
    if is_in_full(task, choice.attention, kind):
        passes = (UNFUSED_ATTENTION[0] + UNFUSED_ATTENTION[1]) / (1 + ATTENTION_BACKWARD)
        scores = facts.heads * min(length, kind.window or length)
        # Also what lies in the future is computed.
        seconds = 2 * flops / (0.4 * best) + passes * scores / rates.bandwidth
        return max(seconds, ATTENTION_CALL / length) if facts.has_fused_attention else seconds
    path = path_of_kind(task, choice.attention, kind)
    rate = ATTENTION[path, generation]
    size = (kind.head_dim or facts.head_dim) / ATTENTION_HEAD
    share = rate.share * (size**rate.narrower if size < 1 else size**-rate.wider)
    share *= ATTENTION_SOFT_CAPPED.get(path, 1.0) if kind.is_soft_capped else 1.0
    share *= ATTENTION_ALIBI if kind.has_alibi else 1.0
    return flops * (1 + rate.overhead / facts.tokens_seen(kind, length)) / (best * share)


def _elementwise_bytes(task: Task, choice: Choice) -> float:
    facts = task.facts
    passes = ELEMENTWISE[choice.is_compiled]
    values = facts.total(
        lambda kind: (
            passes["hidden"] * facts.hidden * (kind.norms + kind.post_norms) / 2
            + passes["attention"] * (kind.query + kind.key)
            + passes["intermediate"] * kind.intermediate
            + (5 if kind.has_early_weights else 8) * kind.copies * facts.hidden
            + _scan_values(kind.state_space)
        )
    )
    return values * task.width


def _scan_values(space: StateSpace | None) -> float:
    """What a state space reads and writes for each token, forward and backward, with its convolution, its gate and its
    norm: the kernels of Granite 4's (4.6 ms a layer of 16,384 tokens on an H200) by what they go through."""
    if space is None:
        return 0.0
    triangles, states = space.heads * memory.SCAN_CHUNK, space.state * space.inner / memory.SCAN_CHUNK
    return 19 * triangles + 20 * states + 39 * space.inner + 41 * space.channels


def _quantization(task: Task, choice: Choice, tokens: float) -> float:
    """Seconds to take weights out of 4 or 8 bits, or to scale the operands of fp8 matmuls."""
    seconds = 0.0
    if task.is_quantization_aware:  # forward and backward
        seconds += 2 * ROUNDING_BYTES * task.facts.matrices / task.rates.bandwidth
    if choice.storage != "plain":
        times = 1 + (math.ceil(tokens / choice.mlp_tokens(task)) - 1) * _mlp_share(task)  # once for each slice
        size = model_states.QUANTIZED[choice.storage] + 2 * task.width
        elsewhere = task.facts.total(model_states.kind_experts) * (1 - 1 / choice.expert)
        seconds += 2 * times * (task.facts.matrices - elsewhere) * size / task.rates.bandwidth
    if choice.quantized_all_gather != "plain":
        gathers = 1 if choice.sharding == "hierarchical" else 2
        passes = PACK[task.device] / choice.data_ranks + gathers * UNPACK[task.device]
        seconds += passes * task.trained / task.rates.bandwidth
    if choice.quantized_reduce_scatter != "plain":
        parts = choice.shard if choice.sharding == "hierarchical" else 1
        seconds += (PACK[task.device] + UNPACK[task.device]) / parts * task.trained / task.rates.bandwidth
    if choice.matmul_dtype == "fp8":
        widths = task.facts.total(lambda kind: kind.widths)
        passes = FP8_PASSES["adapters" if task.has_adapters else "full"]
        seconds += passes * task.width * widths * tokens / task.rates.bandwidth
        if not task.has_adapters:
            seconds += 6 * task.facts.matrices / task.rates.bandwidth
        elif not choice.cache_transposed:
            seconds += 2 * task.facts.matrices / task.rates.bandwidth
    return seconds


def _waiting(task: Task, choice: Choice, micro_batches: float, compute: float) -> float:
    """Seconds of a step in which the device waits for the CPU."""
    share = choice.checkpointed_layers / task.facts.layers
    layers = task.facts.layers / choice.pipeline
    if task.device == "cuda" and choice.is_compiled:
        kind = "adapters" if task.has_adapters else "full"
        layer = HOST_LAYER[kind, choice.matmul_dtype]
        if task.has_adapters:
            adapted = _matrices(task) / 2 / task.facts.layers
            layer -= (layer - HOST_LAYER["full", "plain"]) * max(0.0, 1 - adapted / HOST_ADAPTED)
        layer += HOST_NF4[choice.matmul_dtype] if choice.storage == "nf4" else 0.0
        starting = micro_batches * layers * layer * (1 + share * HOST_AGAIN)
        if choice.cuda_graphs:
            starting = micro_batches * (layers * GRAPH_LAYER + GRAPH_MICRO_BATCH) + GRAPH_WEIGHT * _matrices(task)
        if model_states.STATE_BYTES[choice.optimizer_states] < 2:
            starting += HOST_STATES * _matrices(task)
        return max(0.0, starting - micro_batches * compute)
    kernels = layers * (KERNELS[0] * (1 + share) + KERNELS[1] + (70 if task.has_adapters else 0))
    if all(kind.work is not None for kind in task.facts.kinds):
        started = task.facts.total(lambda kind: kind.work.kernels if kind.work else 0) / choice.pipeline
        kernels = started * (1 + share * KERNELS[0] / sum(KERNELS))
    if task.facts.paired is not None and task.padded is not None:
        kernels = task.facts.paired.kernels.of(task.padded.mean(choice.room(task))) * (1 + share / 3)
    return micro_batches * (max(0.0, LAUNCH * kernels - compute) if task.device == "cuda" else DISPATCH * kernels)


def _matrices(task: Task) -> int:
    """Trained ones in the layers."""
    each = 2 if task.has_adapters else 1
    return sum(count * each * sum(linear.is_adaptable for linear in kind.linears) for kind, count in task.facts.counts)


# the rest


def _optimizer(task: Task, choice: Choice) -> tuple[float, float]:
    """Seconds of the update on the device, and of the way between it and where the states live, if elsewhere."""
    if choice.offload_optimizer == "host":  # both ways at once, and the update is hidden behind them
        return 0.0, model_states.offloaded_bytes(task, choice) / task.rates.host_link
    trained = model_states.active_parameters(task) if task.optimizer in model_states.BLOCKWISE else task.trained
    base = trained / choice.tensor / choice.pipeline
    held = base * model_states.share(choice.sharding, "states", choice.holders, choice.sharers)
    states = model_states.STATES[task.optimizer] * model_states.STATE_BYTES[choice.optimizer_states]
    passes = 2 * states + 3 * 4 + (4 + task.width if choice.has_masters(task) else 4)
    passes += ADAFACTOR_PASSES if task.optimizer == "adafactor" else 0
    if choice.offload_parameters and not choice.has_frozen_on_host(task):  # by the CPUs that all ranks of a node share
        per_node = max(1, choice.ranks // task.hardware.nodes)
        return per_node * held * passes / HOST_UPDATES, 2 * model_states.disk(task, choice) / task.hardware.disk_rate
    # From and to the disk for all ranks of a node; a GPU's update is hidden behind that, a CPU's is not.
    streamed = 2 * model_states.disk(task, choice) / task.hardware.disk_rate
    update = held * passes / task.rates.bandwidth + _orthogonal(task) + _projections(task)
    return update if not streamed or task.device == "cpu" else 0.0, streamed


def _projections(task: Task) -> float:
    """Seconds of the matmuls into the small space of GaLore and APOLLO, and of GaLore's back from there, in fp32."""
    if task.optimizer not in model_states.PROJECTED:
        return 0.0
    operations = 0
    for kind, count in task.facts.counts:
        for linear in kind.linears:
            rank = model_states.projected_rank(task.optimizer, min(linear.inputs, linear.outputs))
            operations += count * 2 * rank * linear.inputs * linear.outputs if linear.count == 1 else 0
    return operations * (2 if task.optimizer == "galore" else 1) / task.rates.fp32


def _orthogonal(task: Task) -> float:
    """Seconds of Muon's matmuls, which every rank computes of whole matrices; those of adapters are nothing."""
    if task.optimizer != "muon" or task.has_adapters:
        return 0.0
    operations = 0
    for kind, count in task.facts.counts:
        for linear in kind.linears:
            short, long = sorted((linear.inputs, linear.outputs))
            operations += count * linear.count * NEWTON_SCHULZ * 2 * short**2 * (2 * long + short)
    return operations / task.rates.half


def _communication(task: Task, choice: Choice, micro_batches: float, forward: float, backward: float) -> float:
    """What is seen of collectives after they ran beside the forward and backward passes."""
    seen = micro_batches * _activations_sent(task, choice, forward + backward)
    if choice.holders == 1 or choice.sharding == "none":
        return seen
    return seen + _weights_sent(task, choice, micro_batches, forward, backward)


def _activations_sent(task: Task, choice: Choice, passes: float) -> float:
    """Of a micro-batch, whose layers, tokens, stages or experts lie on several ranks; for seconds of its passes."""
    seen = 0.0
    facts, tokens = task.facts, choice.tokens(task)
    if choice.tensor > 1:  # four gathers or scatters of the hidden states in a layer, each way, nothing to hide behind
        moved = 8 * facts.layers / choice.pipeline * tokens * facts.hidden * task.width
        seen += moved * (choice.tensor - 1) / choice.tensor / (LINK * task.hardware.link)
    if choice.context > 1:  # keys and values gathered, their gradients scattered: nothing to hide behind either
        moved = 3 * facts.total(lambda kind: 2 * kind.key) / choice.pipeline / choice.tensor * tokens * task.width
        seen += moved * (choice.context - 1) / (LINK * task.hardware.link)
    if choice.pipeline > 1:  # hidden states to the next stage, gradients to the one before
        moved = 2 * stages.PER_RANK[choice.schedule] * tokens * facts.hidden * task.width
        beside = choice.ranks // choice.pipeline  # that send at the same time, over the same link where it is a node's
        moved *= min(beside, task.ranks_per_node) if task.hardware.nodes > 1 else 1
        seen += _seen(task, moved / _between(task), passes)
    if choice.expert > 1:  # tokens to their experts and back, in both passes, with nothing to hide behind
        moved = 4 * facts.total(lambda kind: kind.copies) * tokens * facts.hidden * task.width
        nodes = task.hardware.nodes
        away = task.ranks_per_node * (nodes - 1) / nodes if nodes > 1 else (choice.expert - 1) / choice.expert
        seen += moved * away / _between(task)
    return seen


def _weights_sent(task: Task, choice: Choice, micro_batches: float, forward: float, backward: float) -> float:
    """Of a step: weights gathered, and gradients reduced, by ranks that hold the same ones or parts of them."""
    facts = task.facts
    split = choice.tensor * choice.pipeline
    stay = facts.total(model_states.kind_experts) if choice.expert > 1 else 0
    base = (facts.parameters - stay) / split
    gathered = base * task.width
    if choice.storage != "plain":
        gathered -= (facts.matrices - stay) / split * (task.width - model_states.QUANTIZED[choice.storage])
    reduced = (task.trained - (0 if task.has_adapters else stay)) / split * GRADIENT_BYTES
    rounded_weights = base * model_states.COLLECTIVE_BYTES.get(choice.quantized_all_gather, 0.0)
    rounded_gradients = task.trained / split * model_states.COLLECTIVE_BYTES.get(choice.quantized_reduce_scatter, 0.0)
    if choice.sharding != "hierarchical":
        gathered = rounded_weights or gathered
        reduced = rounded_gradients or reduced
    if choice.sharding in ("ddp", "zero1", "zero2"):
        twice = 2 if choice.sharding == "ddp" else SCATTER[task.device]
        reduction = twice * _collective(task, choice, reduced, everywhere=True)
        sent = reduced if task.has_adapters else gathered  # a frozen base is on each rank already
        gather = 0.0 if choice.sharding == "ddp" else _collective(task, choice, sent, everywhere=True)
        times = micro_batches if choice.sharding == "zero2" else 1
        return times * _seen(task, reduction, backward) + gather
    gather_forward = _collective(task, choice, gathered, everywhere=choice.sharding != "hybrid")
    gather_backward = _collective(task, choice, gathered, everywhere=choice.sharding == "zero3")
    reduced_within = SCATTER[task.device] * reduced
    reduction = _collective(task, choice, reduced_within, everywhere=choice.sharding != "hybrid")
    if choice.sharding == "hierarchical" and rounded_weights:
        gather_forward = _node_by_node(task, choice, between=rounded_weights, within=rounded_weights)
    if choice.sharding == "hierarchical" and rounded_gradients:
        reduction = _node_by_node(task, choice, between=rounded_gradients, within=reduced_within)
    seen = micro_batches * (_seen(task, gather_forward, forward) + _seen(task, gather_backward + reduction, backward))
    if choice.sharding == "hybrid" and choice.replicate > 1:
        # Each rank reduces its shard with its peers in the other nodes, all over the same link, in the last round.
        share = (choice.replicate - 1) / choice.replicate
        seen += _seen(task, 2 * share * reduced / _between(task), backward)
    return seen


def _collective(task: Task, choice: Choice, size: float, *, everywhere: bool) -> float:
    """Seconds to gather or reduce-scatter `size` bytes over all data ranks, or over those of a node.

    In a ring: every link of it carries all that is not the next rank's own. So the link between two nodes carries
    nearly everything, though half of it would do.
    """
    hardware = task.hardware
    here = task.ranks_per_node // choice.tensor
    ranks = choice.holders if everywhere else choice.sharers
    if ranks == 1:
        return 0.0
    slowest = LINK * hardware.link if ranks <= here else NETWORK * hardware.network
    return size * (ranks - 1) / ranks / slowest


def _node_by_node(task: Task, choice: Choice, *, between: float, within: float) -> float:
    """Seconds of a collective in two stages: each node sends what another has not, once, and spreads what it gets."""
    seconds = between * (choice.replicate - 1) / choice.replicate / _between(task)
    return seconds + within * (choice.shard - 1) / choice.shard / (LINK * task.hardware.link)


def _between(task: Task) -> float:
    hardware = task.hardware
    return NETWORK * hardware.network if hardware.nodes > 1 else LINK * hardware.link


def _seen(task: Task, communication: float, compute: float) -> float:
    return max(communication - HIDDEN_SHARE[task.device] * compute, EXPOSED * communication)


def _activation_traffic(task: Task, choice: Choice, compute: float) -> float:
    if not choice.offload_activations:
        return 0.0
    inputs = task.facts.hidden * task.width * choice.checkpointed_layers * choice.tokens(task) / choice.tensor
    return _seen(task, 2 * inputs / choice.pipeline / task.rates.host_link, compute)


def _parameter_traffic(task: Task, choice: Choice, micro_batches: float, forward: float, backward: float) -> float:
    """Parameters to the device for each pass, gradients from it at the same time. Of one rank's shards FSDP copies
    each layer when it is called, and the GPU waits."""
    weights = model_states.parameter_traffic(task, choice) / task.rates.host_link
    if choice.ranks == 1 and not choice.has_frozen_on_host(task):
        return micro_batches * 2 * weights
    return micro_batches * (_seen(task, weights, forward) + _seen(task, weights, backward))


def _bubbles(choice: Choice, micro_batches: float, compute: float) -> float:
    """Each step starts and ends with stages that wait for each other."""
    return (choice.pipeline - 1) * BUBBLE[choice.schedule] * compute if choice.pipeline > 1 and micro_batches else 0.0


@dataclass(frozen=True)
class Cost:
    """What a run takes in all."""

    hours: float
    gpu_hours: float
    money: float | None


def cost(seconds: float, ranks: int, price: float | None) -> Cost:
    hours = seconds / 3600
    return Cost(hours, hours * ranks, None if price is None else hours * ranks * price)
