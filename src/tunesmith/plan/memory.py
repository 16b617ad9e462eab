"""Memory of one rank over one optimizer step, by category: the peak is the peak of a timeline, not a sum of maxima.

Eight phases can be the peak: when the model has just been loaded, the end of the forward pass, the loss, the backward
pass at its first layer (the last of the model, while all activations are still there), where the layers begin that are
computed again, at its last and at its end (when all gradients are there), and the optimizer's step. Pure arithmetic on
sizes; nothing here knows what fits.

Model states are counted in `plan.model_states`, what layers keep in `plan.activations`; here is what comes beside them,
and when. What compiled layers need on the way was measured on an H200 (benchmarks/planner.py); where a number below is
not a count of tensors in our own code, it says so.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from tunesmith.config.schema import Rollout
from tunesmith.objectives.distill import Distill
from tunesmith.objectives.grpo import Grpo
from tunesmith.objectives.head import ClassifyTokens
from tunesmith.plan import activations, model_states
from tunesmith.plan.choice import Choice, Task
from tunesmith.plan.facts import Layer, Linear, StateSpace
from tunesmith.plan.plan import Memory, Phase
from tunesmith.plan.stages import PER_RANK, micro_batches

MIB = 2**20
TOGETHER = 1 << 23
"""Values of the matrices that Muon computes at a time, as in `optim.muon`."""
LOGITS = {"cpu": 1 << 23, "cuda": 1 << 28}
"""Logits the loss holds at a time; the same as `kernels.linear_cross_entropy.CHUNK_ELEMENTS`."""
DISTILLED = {"every": 8, "likeliest": 4}
"""Tensors in fp32, as large as a chunk of logits, while two models are compared without a kernel, by all tokens or by
the teacher's likeliest; of a quarter of the usual chunk. One more where the student's probabilities are not those of
its own loss."""
LOGIT_BYTES = {"cpu": 8, "cuda": 2}
"""Of one logit at the worst moment: on a CPU fp32 logits and softmax; on a GPU the gradient replaces them."""
CONTEXT = {"cpu": 560 * MIB, "cuda": 800 * MIB}
"""Of a process without a model: on a CPU the libraries (measured: 565 MiB), on a GPU our kernels (742 to 814 MiB)."""
LIBRARIES = {"cpu": 0, "cuda": 68 * MIB}
"""Measured: what cuBLAS keeps of the allocator's memory."""
WIDE = {("adapters", "plain"): 3.0, ("adapters", "fp8"): 4.0, ("full", "plain"): 4.0, ("full", "fp8"): 5.5}
"""Tensors as wide as the MLP, in the working precision, that exist beside what was kept while its gradient is computed:
those of the activation (one) and of both its inputs (two), then their fp8 values. The last one is measured."""
WIDE_AGAIN = {"adapters": 0.8, "full": 3.5}
"""How many more where the layer is computed again at the same time, if it is compiled in two pieces; measured. Of one
graph none are seen, with all weights or in fp8; adapters in half precision have not been measured as one."""
ROUNDED = 16
"""Bytes a weight while it is rounded: itself with its adapter, its scale, and two in between, in fp32."""
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
        every = [_timeline(sized, choice) for sized in task.largest(choice.room(task))]
        return [max(phases, key=_total) for phases in zip(*every, strict=True)]
    phases, answered = _timeline(task, choice), _with_answers(task, choice)
    if answered is None:
        return phases
    larger = {phase.name: phase for phase in _timeline(*answered) if phase.name != "rollout"}
    return [max(phase, larger.get(phase.name, phase), key=_total) for phase in phases]


def _total(phase: Phase) -> int:
    return phase.memory.total


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
    static = model_states.static(task, choice)
    is_head_fp8 = model_states.has_fp8_head(task, choice)
    static["weights"] += facts.embedding if is_head_fp8 else 0
    static["weights"] += teacher_bytes(task, choice) if task.teacher_in_steps else 0.0
    tokens = choice.tokens(task)
    saved, one_layer = activations.kept(task, choice, tokens)
    gradients = model_states.gradients(task, choice)
    kept_gradients = model_states.kept_gradients(task, choice)
    saved += _taught(task, tokens)
    gathered, gathered_head, unit = model_states.gathered(task, choice)
    spread = choice.tensor
    hidden = tokens * facts.hidden * width
    has_logits = facts.has_head and not task.objective.has_embeddings
    head = facts.embedding / spread if is_full and has_logits else 0.0
    forward, backward, again = _workspaces(task, choice, hidden)
    if facts.paired is not None and task.shape is not None:
        forward, backward, again = hidden, max(0.0, facts.paired.workspace(*task.shape)), 0.0
    is_all_again = choice.checkpointed_layers == facts.layers
    is_some_again = 0 < choice.checkpointed_layers < facts.layers
    inputs = activations.kept_by_recomputed(task, choice, tokens)
    ends = activations.ENDS["full" if is_full else "adapters"] * hidden / spread
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
    for_each = gradients / max(1.0, model_states.held_parameters(task, choice)[1])
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
        offloaded += model_states.parameter_bytes(task, choice)
    if choice.offload_parameters and not choice.has_frozen_on_host(task):
        offloaded += model_states.gradient_bytes(task, choice) + _optimizer_on_host(task, choice)
    elif choice.offload_optimizer != "none":
        offloaded += _optimizer_on_host(task, choice)
    if choice.offload_activations:
        offloaded += activations.recomputed_inputs(task, choice, choice.tokens(task))
    return round(per_node * HOST_PROCESS + max(loading, per_node * offloaded + copied))


def _optimizer_on_host(task: Task, choice: Choice) -> float:
    """What of a rank's states is in host memory: from a disk they come by way of as many buffers as the device has."""
    is_on_disk = choice.offload_optimizer == "disk"
    return (model_states.visiting if is_on_disk else model_states.offloaded_bytes)(task, choice)


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

    held = max(within(phase) for phase in step) + max(phase.memory.total - within(phase) for phase in step)
    held += round(more * (held - step[0].memory.context)) + POOLS[1]

    def whole(memory: Memory) -> Memory:
        return memory.changed(fragmentation=memory.fragmentation + held - memory.total)

    return [loading, *(phase.changed(memory=whole(phase.memory)) for phase in step)]


def _loading(task: Task, choice: Choice, static: dict[str, float]) -> dict[str, float]:
    """On one rank a plain model comes to the device as its files have it; a base that is to be in fp8 becomes so layer
    by layer. Optimizer states do not exist yet."""
    on_host = choice.has_frozen_on_host(task)
    if choice.ranks > 1 or task.device == "cpu" or (choice.offload_parameters and not on_host):
        return {"optimizer": 0.0}
    joint = _widest_matmul(task, choice)  # weights that share an input are put together for their adapters
    if on_host:  # where they go layer by layer
        layer = model_states.gathered(task, choice)[0] / 2
        return {"optimizer": 0.0, "gathered": layer, "workspace": joint * task.width}
    if choice.storage != "plain":
        return {"optimizer": 0.0, "quantization": joint * (model_states.QUANTIZED[choice.storage] + task.width)}
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
    saved = 0.0 if choice.teacher_storage == "plain" else task.width - model_states.QUANTIZED[choice.teacher_storage]
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
        workspace += task.width * max(
            linear.inputs * linear.outputs for kind in teacher.kinds for linear in kind.linears
        )
    if task.teacher_in_steps:
        return {"gradients": model_states.kept_gradients(task, choice), "workspace": workspace}
    logits = DISTILLED["likeliest"] * 4 * min(LOGITS[task.device] / 4, tokens * teacher.vocabulary)
    return {"weights": teacher_bytes(task, choice), **dict.fromkeys(static.keys() - {"weights"}, 0.0)} | {
        "workspace": workspace,
        "loss": logits,
    }


def _merging(task: Task, choice: Choice, saved: float, tokens: float) -> dict[str, float]:
    """While adapters are merged into the base: one weight in fp32 and what is made of it; before that, with LoQT, a
    pass in which every linear's input is kept, and one gradient's singular directions."""
    matrix = max(
        linear.inputs * linear.outputs for kind in task.facts.kinds for linear in kind.linears if linear.count == 1
    )
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
    is_added = task.facts.tied or (
        choice.has_masters(task) and task.optimizer not in model_states.ALONE | model_states.BLOCKWISE
    )
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
    is_joint = task.has_adapters and not activations.is_apart(task, choice.storage)

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


def _received(task: Task, choice: Choice, tokens: float) -> float:
    """Room for the hidden states and gradients that a rank's stages receive in a step: each has one of its own."""
    if choice.pipeline == 1:
        return 0.0
    sides = 1 if choice.pipeline * PER_RANK[choice.schedule] == 2 else 2  # an end of the pipeline receives one of them
    count = micro_batches(choice.accumulation_steps(task), choice.pipeline) * PER_RANK[choice.schedule]
    return sides * count * tokens * task.facts.hidden * task.width


def _optimizer_workspace(task: Task, choice: Choice) -> float:
    facts = task.facts
    linears = [linear for kind in facts.kinds for linear in kind.linears]
    matrix = max(linear.inputs * linear.outputs for linear in linears)
    if task.has_adapters:
        matrix = task.lora.rank * max(max(linear.inputs, linear.outputs) for linear in linears)
    largest = (matrix if task.has_adapters else max(facts.embedding, matrix)) / choice.tensor
    if task.optimizer == "adafactor":
        return 3 * 4 * largest
    if task.optimizer in model_states.PROJECTED:  # one matrix's gradient, its update, and what finds its directions
        return 4 * 4 * matrix
    if task.optimizer == "muon":  # matrices and their matmuls, in fp32 and bf16; embedding and head are AdamW's
        return 4 * 4 * max(matrix, min(TOGETHER, task.trained)) / choice.tensor
    if choice.offload_optimizer != "none":
        largest = min(largest, model_states.PIECE[choice.offload_optimizer])
    is_fused = task.optimizer == "lion" or choice.optimizer_states != "fp32" or choice.offload_optimizer != "none"
    return 8 * 4 * largest if is_fused and task.device == "cpu" else 0.0  # a GPU does it in one pass
