"""Models whose decoding steps our own kernels make, and models of which they must keep their hands off."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tunesmith.infer import captured
from tunesmith.infer.cache import Row, regroup
from tunesmith.infer.call import Call
from tunesmith.infer.captured import Captured
from tunesmith.infer.fused import fused
from tunesmith.kernels.decode import Tile, Way, can_overlap

SHAPE = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 1, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: dict[str, tuple[str, dict[str, Any], Way]] = {
    "plain": ("llama", {"num_hidden_layers": 2}, Way()),
    "biases, several splits": ("llama", {"attention_bias": True, "mlp_bias": True}, Way(columns=64)),
    "a wide one in chunks": (
        "qwen2",
        {"hidden_size": 1536, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1,
         "head_dim": 24, "tie_word_embeddings": True},
        Way(gated=Tile(8192, 4)),
    ),
    "norms of heads": ("qwen3", {"head_dim": 16}, Way()),
    "a window": ("mistral", {"sliding_window": 9}, Way(columns=64)),
    "offsets and another gate": ("gemma", {"head_dim": 16}, Way()),
    "other angles": (
        "llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32}, "rms_norm_eps": 1e-3}, Way(),
    ),
}  # fmt: skip
OTHERS = {
    "norms behind": ("gemma2", {}),
    "scaled residuals": ("granite", {"residual_multiplier": 0.5}),
    "a joint product": ("phi3", {}),
    "experts": ("qwen2_moe", {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4}),
}
PROMPTS = [[5, 9, 40], [7, 30, 8, 4, 7, 7, 12, 60, 7, 1, 2], [90, 3, 50, 60, 70]]


def make(kind: str, more: dict[str, Any], device: str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE | more)).eval()
    for tensor in model.parameters():  # norms and biases, too, are none that a mistake would leave as they are
        tensor.data.normal_(0.0, 0.5 if tensor.ndim == 1 else 0.3)
    return model.to(device, dtype)


def decoded(call: Call, times: int, steps: int = 2) -> list[torch.Tensor]:
    """Logits of one row, then of three of other lengths, one of them so many times as long; always the same tokens."""
    found = []
    with torch.inference_mode():
        for prompts in (PROMPTS[1:2], [*PROMPTS[:2], PROMPTS[2] * times]):
            _, cache = call.read_all(prompts)
            lengths = [len(prompt) for prompt in prompts]
            cache = regroup([Row(cache, place, length) for place, length in enumerate(lengths)])
            for number in range(steps):
                found.append(call.go_on(cache, [(7 * number + row) % 90 for row in range(len(prompts))], lengths))
                lengths = [length + 1 for length in lengths]
    return found


def differences(name: str, device: str, dtype: torch.dtype) -> float:
    """How far logits are from the model's own, relative to them."""
    kind, more, way = CASES[name]
    model = make(kind, more, device, dtype)
    made = fused(model, way._replace(overlaps=can_overlap(torch.device(device))))
    assert made is not None, name
    plain, call = Call(model, is_shared=True), Call(model, is_shared=True)
    plain._is_capturable, call._is_capturable = False, True  # as on a GPU, without its graphs on others
    steps = Captured(call._step, None, None, made)
    call._captured[None] = steps
    captured.FUSED_ROWS = 4
    # The longest row is beyond the first split of columns, the others are not; but for what splits have no part in.
    captured.COLUMNS, times = (32, 1) if name == "norms of heads" else (128, 13)
    found, expected = decoded(call, times), decoded(plain, times)
    assert steps._steps
    assert all(step.fused is not None for step in steps._steps.values())
    pairs = zip(found, expected, strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


def kept_after_timing(own: float, others: float) -> tuple[bool, float]:
    """Whether steps are made of our own kernels where a step of theirs takes `own` seconds and a compiled one `others`;
    and how far their logits are from the model's own then."""
    model = make("llama", {})
    made = fused(model, Way())
    assert made is not None
    made.is_known_fast = False
    plain, call = Call(model, is_shared=True), Call(model, is_shared=True)
    plain._is_capturable, call._is_capturable = False, True
    steps = Captured(call._step, None, None, made)
    call._captured[None] = steps
    timed = captured.Step.seconds
    captured.Step.seconds = lambda self: own if self.fused is not None else others
    try:
        found, expected = decoded(call, 1), decoded(plain, 1)
    finally:
        captured.Step.seconds = timed
    assert not steps.is_off
    assert steps._steps
    worst = max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))
    return steps._fused is not None, worst
