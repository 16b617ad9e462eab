"""What vLLM makes of a LoRA adapter: what it rejects, and what older versions read without a word and leave out.

Held against vLLM 0.32, which was given an adapter of each kind (docs/lab.md).
"""

from __future__ import annotations

from typing import Any

LARGEST_RANK = 16
"""Of what vLLM loads when it is not told `--max-lora-rank`."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
HARMLESS_STARTS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Of peft's, those that leave the base as it is."""
PATTERNS_SINCE = (0, 32)
"""Of vLLM's versions, the first that was seen to scale each module by its own rank and alpha."""


def vllm_notes(config: dict[str, Any], tensors: list[str]) -> list[str]:
    """What vLLM would reject or ignore of an adapter with this config, or must be told of it, one sentence each."""
    found, largest = refused(config, tensors), _largest(config)
    if LARGEST_RANK < largest <= RANKS[-1]:
        found.append(f"vLLM needs `--max-lora-rank {largest_rank(config)}` for this adapter's rank of {largest}.")
    return found


def refused(config: dict[str, Any], tensors: list[str], version: tuple[int, ...] | None = None) -> list[str]:
    """What vLLM, of this version where it is known, would reject or ignore whatever it is told."""
    found = []
    if config.get("use_dora") or any("lora_magnitude_vector" in name for name in tensors):
        found.append("vLLM rejects DoRA: merge it with --to safetensors to serve it there.")
    if config.get("bias", "none") != "none":
        found.append(f"vLLM rejects adapters with trained biases (bias: {config['bias']}): merge it.")
    if config.get("lora_bias"):
        found.append("vLLM rejects adapters with biases of their own (lora_bias): merge it.")
    if config.get("modules_to_save"):
        found.append(f"vLLM rejects fully trained modules (modules_to_save: {', '.join(config['modules_to_save'])}).")
    if config.get("trainable_token_indices"):
        found.append("vLLM rejects trained token embeddings (trainable_token_indices): merge it.")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower() not in HARMLESS_STARTS:
        found.append(f"vLLM rejects adapters over a base that their start has changed (init_lora_weights: {start}).")
    patterns = [name for name in ("rank_pattern", "alpha_pattern") if config.get(name)]
    if patterns and (version is None or version < PATTERNS_SINCE):
        found.append(
            f"vLLM before 0.32 ignores {' and '.join(patterns)} and scales every module alike, so that its answers "
            "would differ: merge it, or use a newer one."
        )
    if (largest := _largest(config)) > RANKS[-1]:
        found.append(f"vLLM loads ranks of {RANKS[-1]} at most, and this adapter has {largest}.")
    return found


def largest_rank(config: dict[str, Any]) -> int:
    """What `--max-lora-rank` must be for an adapter with this config."""
    wanted = _largest(config)
    return next(rank for rank in RANKS if rank >= wanted)


def _largest(config: dict[str, Any]) -> int:
    return max(config.get("r", 8), *(config.get("rank_pattern") or {}).values(), 1)
