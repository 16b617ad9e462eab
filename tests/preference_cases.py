"""Pairs, judged answers and two small models whose losses and gradients another library has computed: what
`tests/trl_oracle.py` asks TRL about, and what the tests of objectives compare with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CASES: dict[str, dict[str, Any]] = {
    "sft": {"objective": "sft"},
    "reward": {"objective": "reward"},
    "dpo": {"objective": "dpo"},
    "dpo_hinge": {"objective": "dpo", "loss": "hinge", "beta": 0.3},
    "dpo_ipo": {"objective": "dpo", "loss": "ipo"},
    "dpo_robust": {"objective": "dpo", "loss": "robust", "label_smoothing": 0.1},
    "dpo_length_normalised": {"objective": "dpo", "length_normalised": True, "beta": 2.0},
    "dpo_sft": {"objective": "dpo", "sft_weight": 0.5},
    "kto": {"objective": "kto", "desirable_weight": 1.5},
    "kto_unwanted": {"objective": "kto", "undesirable_weight": 2.0, "beta": 0.3},
    "orpo": {"objective": "orpo", "beta": 0.2},
    "simpo": {"objective": "simpo", "margin": 0.6, "label_smoothing": 0.1},
    "simpo_sft": {"objective": "simpo", "margin": 0.3, "sft_weight": 0.5, "beta": 1.5},
    "cpo": {"objective": "cpo", "label_smoothing": 0.2},
    "cpo_hinge": {"objective": "cpo", "loss": "hinge", "sft_weight": 0.0},
    "cpo_ipo": {"objective": "cpo", "loss": "ipo"},
}
ROLLOUTS: dict[str, dict[str, Any]] = {
    "grpo_dapo": {"objective": "grpo", "temperature": 0.7},
    "grpo": {"objective": "grpo", "loss": "grpo", "beta": 0.1, "epsilon_high": 0.3},
    "grpo_dr": {"objective": "grpo", "loss": "dr_grpo", "scale_rewards": "none", "max_answer_tokens": 16},
    "grpo_bnpo": {"objective": "grpo", "loss": "bnpo", "scale_rewards": "batch", "beta": 0.02},
    "grpo_gspo": {"objective": "grpo", "loss": "grpo", "ratios": "sequence", "epsilon": 0.05},
    "grpo_gspo_kl": {"objective": "grpo", "ratios": "sequence", "epsilon": 0.05, "beta": 0.1},
    "rloo": {"objective": "rloo", "epsilon": 0.4},
    "rloo_batch": {"objective": "rloo", "scale_rewards": "batch", "temperature": 1.3},
}
"""Settings of `rollout`; the chosen and the rejected answers are the answers to each prompt."""
DRAWN: dict[str, dict[str, Any]] = {
    "grpo_drawn": {"objective": "grpo", "engine": "vllm", "temperature": 0.7},
    "grpo_drawn_kl": {"objective": "grpo", "engine": "vllm", "loss": "grpo", "beta": 0.1, "epsilon_high": 0.3},
    "grpo_drawn_dr": {"objective": "grpo", "engine": "vllm", "loss": "dr_grpo", "max_answer_tokens": 16},
    "grpo_drawn_gspo": {"objective": "grpo", "engine": "vllm", "loss": "grpo", "ratios": "sequence", "epsilon": 0.05},
}
"""The same where another engine has drawn the answers' tokens, by log-probabilities of its own (`by_sampler`)."""
ADAPTED: dict[str, dict[str, Any]] = {
    "rloo_kl": {"objective": "rloo", "beta": 0.3, "temperature": 0.7},
    "rloo_kl_batch": {"objective": "rloo", "beta": 0.05, "scale_rewards": "batch"},
    "grpo_kl": {"objective": "grpo", "beta": 0.2, "temperature": 0.7, "scale_rewards": "none"},
}
"""The same with adapters (`FACTORS`), whose reference is the model without them; before the first update."""
DISTILLED: dict[str, dict[str, Any]] = {
    "distill_forward_kl": {"loss": "forward_kl"},
    "distill_reverse_kl": {"loss": "reverse_kl", "temperature": 1.7},
    "distill_jsd": {"loss": "jsd", "temperature": 0.8},
}
"""Settings of `distillation`; the reference is the teacher, and the chosen answers are learned."""
FACTORS, RANK = ("q_proj", "v_proj", "down_proj"), 4
MARGINS = (0.0, 0.5, 0.25, 0.0, 1.0)
"""By which the chosen answer of each pair should score higher."""
REWARDS = ((1.0, 0.0), (0.5, 0.25), (1.0, 1.0), (0.0, 2.0), (0.0, 1.0))


def sampled(reference_logps: Any) -> Any:
    """What tokens of an answer were given when they were sampled, from what the reference gives them."""
    return reference_logps + 0.2 * np.cos(np.arange(len(reference_logps)))


def by_sampler(sampled_logps: Any) -> Any:
    """With which the tokens of an answer were drawn by an engine that is not quite the trainer; weights of some are cut
    off."""
    return sampled_logps - 0.9 * np.sin(1 + 2 * np.arange(len(sampled_logps))) - 0.4


PROMPTS, CHOSEN, REJECTED = (4, 7, 3, 5, 6), (5, 3, 9, 4, 6), (8, 3, 2, 6, 4)
"""Tokens of each pair's prompt and answers."""
LABELS = (True, False, False, True, True)
"""Of the chosen answers, where they are judged one by one."""
LARGEST = 259


@dataclass(frozen=True)
class Pair:
    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray


def pairs() -> list[Pair]:
    random = np.random.Generator(np.random.PCG64(7))
    draw = [random.integers(3, LARGEST, 30) for _ in PROMPTS]
    sizes = zip(draw, PROMPTS, CHOSEN, REJECTED, strict=True)
    return [Pair(ids[:p], ids[p : p + c], ids[p + c : p + c + r]) for ids, p, c, r in sizes]


def other_answer(index: int) -> np.ndarray:
    """To another prompt, as the baseline of KTO takes them."""
    count = len(PROMPTS)
    return pairs()[(index - round(count * 0.618)) % count].chosen


def make_models(folder: Path) -> tuple[Path, Path]:
    """The model that is trained, and its reference, whose weights are others. Numbers that do not depend on torch's."""
    from transformers import AutoModelForCausalLM

    from tiny_model import make_tiny_model

    made = []
    for name, seed in (("model", 1), ("reference", 2)):
        path = make_tiny_model(folder / name)
        model = AutoModelForCausalLM.from_pretrained(path)
        random = np.random.Generator(np.random.PCG64(3)), np.random.Generator(np.random.PCG64(seed))
        for weight in model.parameters():
            both = [one.standard_normal(tuple(weight.shape)).astype(np.float32) for one in random]
            if weight.ndim > 1:
                weight.data.copy_(weight.new_tensor(0.25 * both[0] + 0.03 * both[1]))
        model.save_pretrained(path)
        made.append(path)
    return made[0], made[1]


def drawn(name: str, shape: tuple[int, ...], scale: float) -> np.ndarray:
    """Values of a weight that is new to the model, by its name."""
    random = np.random.Generator(np.random.PCG64(sum(name.encode())))
    return (scale * random.standard_normal(shape)).astype(np.float32)


def fingerprint(name: str, gradient: Any) -> list[float]:
    """A gradient in a few numbers: its length, and its products with directions that its name stands for."""
    values = gradient.detach().double().numpy().ravel()
    random = np.random.Generator(np.random.PCG64(sum(name.encode())))
    directions = [random.standard_normal(values.size) / np.sqrt(values.size) for _ in range(3)]
    return [float(np.linalg.norm(values)), *(float(values @ one) for one in directions)]


def assert_gradients(found: dict[str, Any], expected: dict[str, list[float]]) -> None:
    """By their fingerprints, to 1e-5 of each gradient's length."""
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        bound = 1e-5 * max(expected[name][0], 1e-3)
        np.testing.assert_allclose(fingerprint(name, gradient), expected[name], rtol=0, atol=bound, err_msg=name)
