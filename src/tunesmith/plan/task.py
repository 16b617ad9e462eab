"""What is known before anything is searched for: device, precision, sequence length, amount of data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.objectives import objective_of
from tunesmith.objectives.base import Objective
from tunesmith.objectives.distill import Distill
from tunesmith.plan import rules
from tunesmith.plan.choice import OF_PEFT, Task
from tunesmith.plan.defaults import Amount, DataSize, Decide, propose
from tunesmith.plan.documents import Padded, guessed, mean_length
from tunesmith.plan.facts import ModelFacts
from tunesmith.plan.hardware import Hardware
from tunesmith.plan.plan import Device, Precision

Draw = Callable[[Amount], Padded | None]
"""Of tokenized data, the documents of the steps that it makes; None where they are not padded after all."""
MARGIN = {"known": 0.04, "uncertain": 0.12, "cpu": 0.15}
"""Share of the free memory that a plan leaves alone."""
HIGHEST_RATE = 1.0
"""Of optimizers that move each weight by about the learning rate, whatever its gradient."""


def make_task(
    run: Run,
    facts: ModelFacts,
    hardware: Hardware,
    decide: Decide,
    lengths: Sequence[int] = (),
    size: DataSize | None = None,
    draw: Draw | None = None,
) -> tuple[Task, str, Amount]:
    """What is decided before anything is searched for, and the arithmetic of the matmuls."""
    device = _device(run, hardware, decide)
    precision, matmul_dtype = _precision(run, hardware, device, decide)
    limit = longest_sequence(run, facts, decide)
    amount = propose(run, facts.hidden, limit, size, decide)
    check_rate(run, amount.learning_rate)
    sequence_length = amount.sequence_length
    objective = objective_of(run)
    _say_objective(objective, decide)
    padded = None
    if not facts.packs and not objective.has_rollouts and not objective.is_on_policy:
        padded = draw(amount) if draw else _guessed(lengths, amount, facts, objective.documents)
    lengths = [max(1, length // objective.documents) for length in lengths]
    cut = [min(length, sequence_length) for length in lengths]
    task = Task(
        facts=facts,
        hardware=hardware,
        device=device,
        precision=precision,
        method=run.method,
        lora=run.lora if run.has_lora else OF_PEFT,
        has_new_tokens=bool(run.new_tokens) and run.has_lora,
        peft_type=str(run.peft.get("peft_type", "")).upper(),
        optimizer=run.algorithm,
        sequence_length=sequence_length,
        sequences=amount.sequences,
        document_length=mean_length(lengths, sequence_length),
        mean_document=_mean_document(size, cut),
        longest_sampled=size.longest if size and size.is_exact else max(cut, default=None),
        shared=size.shared / size.tokens if size and size.tokens else 0.0,
        clips=run.max_grad_norm is not None,
        is_quantization_aware=run.quantization_aware is not None,
        has_noise=run.neftune_noise_alpha > 0,
        is_exact=run.deterministic,
        objective=objective,
        teacher_in_steps=objective.has_teacher and run.distillation.top_k is None,
        padded=padded,
        longest_document=None if facts.packs else sequence_length,
    )
    _say_documents(task, decide)
    return task, matmul_dtype, amount


def _say_objective(objective: Objective, decide: Decide) -> None:
    if objective.why:
        decide("objective", objective.name, objective.why)
    if isinstance(objective, Distill) and objective.is_on_policy:
        why = "in these the student answers, and learns the teacher's probabilities at the tokens of its answers"
        decide("own answers", f"{objective.distillation.on_policy:.0%} of the steps", why)


def _say_documents(task: Task, decide: Decide) -> None:
    """How documents are laid out, and how long they are."""
    if not task.facts.packs:
        decide("layout", "padded", _why_padded(task))
    if task.shared:
        why = "the two answers of a pair share their prompt's computation, which the probe found exact on this model"
        decide("prompts of pairs", f"once: {task.shared / (1 + task.shared):.0%} fewer tokens", why)
    if task.device == "cpu" and task.hardware.rates is None:
        why = "CPUs differ by a factor of three and more; `tunesmith plan --calibrate` measures this one"
        decide("speed", "a guess", why)
    if task.document_length < 0.8 * task.sequence_length:
        why = "estimated from the data; several are packed into a sequence, and attention costs by their lengths"
        decide("documents", f"about {task.document_length:,} tokens", why)


def _why_padded(task: Task) -> str:
    facts, padded = task.facts, task.padded
    why = f"{facts.architecture} does not take packed documents; those of like length share a micro-batch"
    if not facts.is_causal:
        why = "an encoder-decoder: sources and targets are padded rows, those of like length share a micro-batch"
        if not facts.paired:
            why += "; memory and time are guessed, as if every token passed through both stacks"
    more = padded.padding(task.sequence_length) - 1 if padded is not None else 0.0
    return f"{why}, and {more:.0%} more tokens are computed, by the data's own lengths" if more > 0 else why


def _guessed(lengths: Sequence[int], amount: Amount, facts: ModelFacts, documents: int) -> Padded:
    """By what the files tell of their documents, of which there are several in an example of preferences."""
    step, sides = amount.sequences * amount.sequence_length, 1 if facts.is_causal else 2
    return guessed(lengths, amount.sequence_length, step, sides=sides, rows=documents)


def _mean_document(size: DataSize | None, lengths: Sequence[int]) -> int | None:
    if size is not None and size.is_exact:
        return max(1, round(size.tokens / size.examples))
    return round(sum(lengths) / len(lengths)) if lengths else None


def margin_of(task: Task, decide: Decide) -> float:
    if task.device == "cpu":
        return MARGIN["cpu"]
    doubts = [task.facts.note] if task.facts.note else []
    if task.gpu.rates is None:
        doubts.append(f"{task.gpu.name} is not in the catalogue, so its speed is a guess")
    if doubts:
        decide("margin", f"{MARGIN['uncertain']:.0%} of the memory", "; ".join(doubts))
        return MARGIN["uncertain"]
    return MARGIN["known"]


def longest_sequence(run: Run, facts: ModelFacts, decide: Decide = lambda *_: None) -> int:
    """What is asked for, as far as the model was made for it."""
    limit = facts.positions
    if limit is not None and run.sequence_length > limit:
        if "sequence_length" in run.model_fields_set:
            raise UserError(
                f"sequence_length is {run.sequence_length}, but {facts.architecture} was made for at most {limit} "
                f"positions; lower it to {limit} or less."
            )
        decide("sequence length", limit, "the model was made for no more")
        return limit
    return run.sequence_length


def check_rate(run: Run, rate: float) -> None:
    """Refuse a learning rate that cannot be meant. How far SGD moves a weight is for its gradient to say."""
    if rate > HIGHEST_RATE and run.algorithm != "sgd":
        raise UserError(
            f"learning_rate is {rate:g}, and {run.algorithm} moves each weight by about so much in a step, where most "
            "are smaller than 0.1; 2e-4 is usual for adapters and 2e-5 for all weights."
        )


def decide_determinism(run: Run, device: str, decide: Decide) -> bool:
    if device == "cuda" and run.deterministic:
        decide("determinism", "on", "asked for; some kernels are slower")
    return device == "cpu" or run.deterministic


def _device(run: Run, hardware: Hardware, decide: Decide) -> Device:
    if run.device == "cuda" and not hardware.gpus:
        raise UserError(
            "device is cuda, but no NVIDIA GPU was found here; say device: cpu or look at `tunesmith doctor`."
        )
    if run.device != "cpu" and 0 < len(hardware.gpus) < hardware.processes:
        raise UserError(
            f"{hardware.processes} ranks were asked for, and this machine has {len(hardware.gpus)} GPU"
            f"{'s'[: len(hardware.gpus) > 1]}; ask for no more ranks than GPUs, or say device: cpu."
        )
    if run.device != "auto":
        decide("device", run.device, "asked for")
        return run.device
    if not hardware.gpus:
        decide("device", "cpu", "no GPU was found")
        return "cpu"
    names = f"{hardware.gpu_count} x {hardware.gpus[0].name}" if hardware.gpu_count > 1 else hardware.gpus[0].name
    decide("device", "cuda", f"{names} {'was named' if hardware.is_named else 'is here'}")
    return "cuda"


def _precision(run: Run, hardware: Hardware, device: Device, decide: Decide) -> tuple[Precision, str]:
    gpu = hardware.gpus[0] if device == "cuda" else None
    has_bf16 = gpu.capability >= rules.BF16 if gpu else hardware.has_fast_bf16
    where = gpu.name if gpu else "this CPU"
    wanted: str = run.precision
    if wanted == "fp8":
        if gpu and gpu.capability >= rules.FP8:
            decide("precision", "bf16 with fp8 matmuls", "asked for")
            return "bf16", "fp8"
        raise UserError(
            f"precision is fp8, but {where} has no fp8 arithmetic (compute capability 8.9 and more); leave it out."
        )
    if wanted == "auto":
        if has_bf16:
            decide("precision", "bf16", f"{where} has bf16 arithmetic, and bf16 needs no loss scaling")
            return "bf16", "plain"
        if gpu:
            decide("precision", "fp16", f"{where} has no bf16 arithmetic; fp16 runs with loss scaling")
            return "fp16", "plain"
        decide("precision", "fp32", "this CPU has no bf16 arithmetic, and emulating it is far slower than fp32")
        return "fp32", "plain"
    if wanted != "fp32" and device == "cpu" and not has_bf16:
        decide("precision", "fp32", f"{wanted} was asked for, but this CPU computes it far slower than fp32")
        return "fp32", "plain"
    if wanted == "fp16" and device == "cpu":
        decide("precision", "bf16", "fp16 was asked for, but CPUs train in bf16, which has the wider range")
        return "bf16", "plain"
    if wanted == "bf16" and not has_bf16:
        decide("precision", "fp16", f"bf16 was asked for, but {where} has none; fp16 runs with loss scaling")
        return "fp16", "plain"
    decide("precision", wanted, "asked for")
    return cast(Precision, wanted), "plain"
