"""What a model's own code does to the logits of its output head is found by the probe to the last digit, or refused by
its name: factors, soft caps, and what the loss cannot compute."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import parity
from families import VOCABULARY, quiet
from tunesmith.errors import UserError
from tunesmith.model import attention
from tunesmith.model.probe import probe_config

CODE = """
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


class OddConfig(LlamaConfig):
    model_type = "odd"
    ceiling = 25.0


class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("shift", torch.zeros(config.vocab_size))
        self.post_init()

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        logits, config = output.logits, self.config
        output.logits = {}
        return output
"""
CONFIG = {
    "model_type": "odd",
    "architectures": ["OddForCausalLM"],
    "auto_map": {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddForCausalLM"},
    "base": 256,
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LARGE = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000}
"""A model that is tried on a smaller one."""
TRUSTED = {"trust_remote_code": True}


def written(folder: Path, does: str, **changes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "odd.py").write_text(CODE.replace("= {}", f"= {does}"))
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


def form(folder: Path) -> tuple[float, float | None]:
    from transformers import AutoConfig

    attention.register()
    with quiet():
        config = AutoConfig.from_pretrained(folder, **TRUSTED)
        spec = probe_config(config, device=torch.device("cpu"), **TRUSTED).spec
    assert spec is not None
    return spec.logit_scale, spec.softcap


@pytest.mark.parametrize("changes", [{}, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(
    ("does", "scale", "softcap"),
    [
        ("30.0 * torch.tanh(logits / 30.0)", 1.0, 30.0),
        ("torch.tanh(logits / 300) * 300", 1.0, 300.0),
        ("config.ceiling * torch.tanh(0.5 * logits / config.ceiling)", 0.5, 25.0),
        ("12.0 * torch.tanh(logits / 6.0)", 2.0, 12.0),
        ("logits * 0.37", 0.37, None),
        ("logits / (config.hidden_size / config.base)", None, None),
    ],
)
def test_factors_and_soft_caps_in_code_are_found(tmp_path, does, scale, softcap, changes):
    wanted = 256 / {**CONFIG, **changes}["hidden_size"] if scale is None else scale
    found = form(written(tmp_path / "model", does, **changes))
    assert found == (pytest.approx(wanted, rel=1e-5), softcap)


@pytest.mark.parametrize(
    "does", ["logits * config.hidden_size ** 0.5", "(c := config.hidden_size ** 0.5) * torch.tanh(logits / c)"]
)
def test_what_a_size_makes_in_a_way_that_is_not_known_is_refused(tmp_path, does):
    with pytest.raises(UserError, match=r"^model: its logits are [a-z ]+ that its config does not name .*\.$"):
        form(written(tmp_path / "model", does, **LARGE))


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("logits.clamp(-20, 20)", "keeps the logits of its output head between -20 and 20, but not by cap"),
        ("15 * 2 / torch.pi * torch.atan(logits / 15)", "neither times a factor nor as cap"),
        ("logits + self.shift", "adds `shift` to the logits of its output head"),
        ("logits + torch.arange(logits.shape[-1])", "adds numbers of its own to the logits"),
        ("torch.log_softmax(logits, -1)", "neither times a factor nor as cap"),
        ("torch.where(logits > 9, 9 + (logits - 9) / 2, logits)", "neither times a factor nor as cap"),
    ],
)
def test_what_the_loss_cannot_compute_is_refused_by_its_name(tmp_path, does, said):
    with pytest.raises(UserError) as refused:
        form(written(tmp_path / "model", does))
    assert said in str(refused.value)
    assert str(refused.value).startswith("OddForCausalLM cannot be trained: its ")
    assert str(refused.value).count(". ") == 0


def test_a_model_with_a_soft_cap_in_its_code_trains_as_by_a_plain_loop(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = parity.write_model("llama", tmp_path / "model")  # for its tokenizer
    written(folder, "3.0 * torch.tanh(logits / 3.0)")
    config = AutoConfig.from_pretrained(folder, **TRUSTED)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, **TRUSTED)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn(weight.shape))
    model.save_pretrained(folder)
    written(folder, "3.0 * torch.tanh(logits / 3.0)")
    trained = parity.train(folder, "lora", tmp_path, **TRUSTED)
    assert trained.job.spec.softcap == 3.0
    plain = AutoModelForCausalLM.from_pretrained(folder, **TRUSTED)
    assert parity.distance(trained.losses, parity.plain_losses(plain, trained, "lora")) <= parity.TOLERANCE
