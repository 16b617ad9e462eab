"""What vLLM makes of a LoRA adapter: it reads some kinds without a word about the parts it leaves out."""

from __future__ import annotations

from typing import Any

LARGEST_RANK = 16
"""Of what vLLM loads when it is not told `--max-lora-rank`."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def vllm_notes(config: dict[str, Any], tensors: list[str]) -> list[str]:
    """What vLLM would reject or ignore of an adapter with this config, one sentence each."""
    found = []
    if config.get("use_dora") or any(name.endswith("lora_magnitude_vector") for name in tensors):
        found.append("vLLM rejects DoRA: merge it with --to safetensors to serve it there.")
    if config.get("bias", "none") != "none":
        found.append(f"vLLM rejects adapters with trained biases (bias: {config['bias']}): merge it.")
    if config.get("modules_to_save"):
        found.append(f"vLLM rejects fully trained modules (modules_to_save: {', '.join(config['modules_to_save'])}).")
    if config.get("trainable_token_indices"):
        found.append("vLLM ignores trained token embeddings (trainable_token_indices): merge it.")
    if config.get("alpha_pattern"):
        found.append(
            "vLLM ignores alpha_pattern and scales every module by lora_alpha: its answers would differ; merge it."
        )
    ranks = {config.get("r", 8), *(config.get("rank_pattern") or {}).values()}
    if config.get("rank_pattern"):
        found.append(
            "vLLM scales by the rank `r` of the config, and ranks differ (rank_pattern), so that its answers would: "
            "merge it."
        )
    largest = max(ranks)
    if largest > RANKS[-1]:
        found.append(f"vLLM loads ranks of {RANKS[-1]} at most, and this adapter has {largest}.")
    elif largest > LARGEST_RANK:
        fitting = next(rank for rank in RANKS if rank >= largest)
        found.append(f"vLLM needs `--max-lora-rank {fitting}` for this adapter's rank of {largest}.")
    return found


def largest_rank(config: dict[str, Any]) -> int:
    """What `--max-lora-rank` must be for an adapter with this config."""
    wanted = max(config.get("r", 8), *(config.get("rank_pattern") or {}).values(), 1)
    return next(rank for rank in RANKS if rank >= wanted)


def refused(config: dict[str, Any], tensors: list[str]) -> list[str]:
    """The notes without the one that `largest_rank` answers."""
    return [note for note in vllm_notes(config, tensors) if "--max-lora-rank" not in note]
