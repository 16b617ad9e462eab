"""From the run, the model's facts and the hardware to a plan: a first, simple planner.

It decides device, precision, the cut of a step into micro-batches and whether to recompute, by rough estimates, and
gives a reason for each. Pure: the same arguments give the same plan.
"""

from __future__ import annotations

from collections.abc import Callable

from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.plan.facts import ModelFacts
from tunesmith.plan.hardware import Hardware
from tunesmith.plan.memory import estimate
from tunesmith.plan.plan import Attention, Device, Memory, Mesh, Plan, Precision, Reason

Decide = Callable[[str, object, str], None]
"""Writes down a decision: topic, choice, reason."""
MARGIN = 0.85
"""Share of the free memory a plan may count on; the estimates are rough."""
MICRO_BATCH_TOKENS = {"cpu": 4096, "cuda": 32768}
"""More tokens in one forward pass bring no more speed on these devices."""


def make_plan(run: Run, facts: ModelFacts, hardware: Hardware) -> Plan:
    reasons: list[Reason] = []

    def decide(topic: str, choice: object, why: str) -> None:
        reasons.append(Reason(topic=topic, choice=str(choice), why=why))

    device = _device(run, hardware, decide)
    precision = _precision(run, hardware, device, decide)
    sequence_length = _sequence_length(run, facts, decide)
    if run.batch_tokens < sequence_length:
        raise UserError(
            f"batch_tokens is {run.batch_tokens}, less than the {sequence_length} of sequence_length: a step holds at "
            "least one sequence; raise batch_tokens or lower sequence_length."
        )
    sequences = max(1, round(run.batch_tokens / sequence_length))
    decide(
        "batch",
        f"{sequences} sequence{'s'[: sequences > 1]} a step",
        f"batch_tokens {run.batch_tokens:,} is {sequences} packed sequences of {sequence_length:,} tokens",
    )
    master = run.method == "full" and precision != "fp32"
    if master:
        decide(
            "weights",
            f"{precision} with fp32 masters",
            f"updates smaller than {precision}'s steps would be lost",
        )
    limit = int(MARGIN * (hardware.gpus[0].free if device == "cuda" else hardware.available))
    micro, recompute, memory = _micro_batch(run, facts, device, precision, sequence_length, sequences, limit, decide)
    return Plan(
        device=device,
        threads=hardware.cores,
        mesh=Mesh(),
        precision=precision,
        attention=_attention(facts, hardware, device, precision),
        is_compiled=device == "cuda",
        master_weights=master,
        sequence_length=sequence_length,
        sequences_per_step=sequences,
        micro_batch=micro,
        recompute_layers=recompute,
        learning_rate=_learning_rate(run, decide),
        deterministic=_deterministic(run, device, decide),
        memory=memory,
        memory_limit=limit,
        reasons=tuple(reasons),
    )


def _device(run: Run, hardware: Hardware, decide: Decide) -> Device:
    if run.device == "cuda" and not hardware.gpus:
        raise UserError(
            "device is cuda, but no NVIDIA GPU was found here; say device: cpu or look at `tunesmith doctor`."
        )
    if run.device != "auto":
        decide("device", run.device, "asked for")
        return run.device
    if hardware.gpus:
        decide("device", "cuda", f"{hardware.gpus[0].name} is here")
        return "cuda"
    decide("device", "cpu", "no GPU was found")
    return "cpu"


def _precision(run: Run, hardware: Hardware, device: Device, decide: Decide) -> Precision:
    gpu = hardware.gpus[0] if device == "cuda" else None
    has_bf16 = gpu.capability >= (8, 0) if gpu else hardware.has_fast_bf16
    where = gpu.name if gpu else "this processor"
    if run.precision == "auto":
        if has_bf16:
            decide("precision", "bf16", f"{where} has bf16 arithmetic, and bf16 needs no loss scaling")
            return "bf16"
        if gpu:
            decide("precision", "fp16", f"{where} has no bf16 arithmetic; fp16 runs with loss scaling")
            return "fp16"
        decide(
            "precision",
            "fp32",
            "this processor has no bf16 arithmetic, and emulating it is far slower than fp32",
        )
        return "fp32"
    if run.precision != "fp32" and device == "cpu" and not has_bf16:
        decide(
            "precision",
            "fp32",
            f"{run.precision} was asked for, but this processor computes it far slower than fp32",
        )
        return "fp32"
    if run.precision == "fp16" and device == "cpu":
        decide("precision", "bf16", "fp16 was asked for, but processors train in bf16, which has the wider range")
        return "bf16"
    if run.precision == "bf16" and not has_bf16:
        decide("precision", "fp16", f"bf16 was asked for, but {where} has none; fp16 runs with loss scaling")
        return "fp16"
    decide("precision", run.precision, "asked for")
    return run.precision


def _attention(facts: ModelFacts, hardware: Hardware, device: Device, precision: Precision) -> Attention:
    has_kernel = device == "cuda" and precision != "fp32" and hardware.gpus[0].capability >= (8, 0)
    return "varlen" if has_kernel and facts.head_dim <= 256 and facts.head_dim % 8 == 0 else "sdpa"


def _sequence_length(run: Run, facts: ModelFacts, decide: Decide) -> int:
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


def _micro_batch(
    run: Run,
    facts: ModelFacts,
    device: Device,
    precision: Precision,
    sequence_length: int,
    sequences: int,
    limit: int,
    decide: Decide,
) -> tuple[int, int, Memory]:
    """The largest useful micro-batch that fits without recomputation; with it, when nothing fits without."""

    def memory_of(micro: int, recompute_layers: int) -> Memory:
        return estimate(
            run,
            facts,
            device=device,
            precision=precision,
            tokens=micro * sequence_length,
            recompute_layers=recompute_layers,
        )

    useful = max(1, MICRO_BATCH_TOKENS[device] // sequence_length)
    sizes = [size for size in range(min(sequences, useful), 0, -1) if sequences % size == 0 or size == 1]
    for recompute in (0, facts.layers):
        for micro in sizes:
            memory = memory_of(micro, recompute)
            if memory.total > limit:
                continue
            rounds = -(-sequences // micro)
            decide(
                "micro-batch",
                micro,
                f"{rounds} forward pass{'es'[: 2 * (rounds > 1)]} a step, about {_gib(memory.total)} at the peak",
            )
            if not recompute:
                decide("recomputation", "none", f"everything fits into the {_gib(limit)} that may be used")
            else:
                needed = _gib(memory_of(1, 0).total)
                decide(
                    "recomputation",
                    "all layers",
                    f"keeping all activations would need about {needed} of {_gib(limit)}",
                )
            return micro, recompute, memory
    smallest = memory_of(1, facts.layers)
    decide(
        "recomputation",
        "all layers",
        f"even so, a rough estimate of {_gib(smallest.total)} is above the {_gib(limit)} that may be used: it may run "
        "out of memory; a shorter sequence_length or method: lora needs less",
    )
    return 1, facts.layers, smallest


def _learning_rate(run: Run, decide: Decide) -> float:
    if run.learning_rate is not None:
        return run.learning_rate
    rate = 2e-4 if run.method == "lora" else 2e-5
    decide("learning rate", f"{rate:g}", f"usual for method: {run.method}")
    return rate


def _deterministic(run: Run, device: str, decide: Decide) -> bool:
    if device == "cuda" and run.deterministic:
        decide("determinism", "on", "asked for; some kernels are slower")
    return device == "cpu" or run.deterministic


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
