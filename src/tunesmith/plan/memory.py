"""Peak memory of one rank, roughly: enough to decide on recomputation and micro-batches."""

from __future__ import annotations

from tunesmith.config.schema import Run
from tunesmith.plan.facts import ModelFacts
from tunesmith.plan.plan import Device, Memory, Precision

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
OPTIMIZER_BYTES = {"adamw": 8, "sgd": 4, "adafactor": 0.1}
"""Bytes of state for each trained parameter."""


def estimate(
    run: Run, facts: ModelFacts, *, device: Device, precision: Precision, tokens: int, recompute_layers: int
) -> Memory:
    width = BYTES[precision]
    if run.method == "full":
        trained = facts.parameters
        master = 0 if precision == "fp32" else 4
        weights = trained * (width + master)
        gradients = trained * 4 if precision == "fp32" else trained * (4 + width)
    else:
        trained = facts.adapter_parameters(run.lora.rank)
        weights = facts.parameters * width + trained * 4
        gradients = trained * 4
    per_token = _layer_bytes_per_token(facts, width)
    kept = (facts.layers - recompute_layers) * per_token
    if recompute_layers:
        kept += recompute_layers * facts.hidden * width + per_token
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=int(trained * OPTIMIZER_BYTES[run.optimizer]),
        activations=tokens * (kept + 4 * facts.hidden * width),
        loss=(1 << 28)
        if device == "cpu"
        else (1 << 30) + (facts.vocabulary * facts.hidden * 4 if run.method == "full" else 0),
        overhead=(1 << 29) if device == "cpu" else (1 << 30),
    )


def _layer_bytes_per_token(facts: ModelFacts, width: int) -> int:
    """What one decoder layer keeps for backward: norms in fp32 and out, q, k, v before and after rotation,
    attention's output, and gate, up, their activation and product."""
    attention = (4 * facts.heads + 4 * facts.kv_heads) * facts.head_dim
    return width * (4 * facts.hidden + attention + 5 * facts.intermediate) + 4 * 4 * facts.hidden
