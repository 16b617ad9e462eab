"""Models, hardware and tasks that the planner's tests share."""

from __future__ import annotations

from tunesmith.config.schema import Lora, Run
from tunesmith.plan.catalogue import MODELS
from tunesmith.plan.choice import Task
from tunesmith.plan.facts import ModelFacts
from tunesmith.plan.families import from_config
from tunesmith.plan.hardware import named
from tunesmith.plan.plan import Plan

GIB = 2**30
MODEL: dict[str, ModelFacts] = {known.name: from_config(known.config()) for known in MODELS}
MODEL["Llama-2-70B"] = from_config(
    {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    }
)
FALCON = {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 8, "vocab_size": 65024}
MODEL["Falcon-40B"] = from_config(FALCON | {"hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128})
MODEL["Falcon-180B"] = from_config(FALCON | {"hidden_size": 14848, "num_hidden_layers": 80, "num_attention_heads": 232})
MIXTRAL = from_config(
    {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "vocab_size": 32000,
    }
)


def run(**settings) -> Run:
    return Run(model="m", data="d", **settings)


def task(model: str | ModelFacts, hardware: str, method: str, length: int, sequences: int, **more) -> Task:
    given = {
        "device": "cuda",
        "precision": "bf16",
        "lora": Lora(rank=16),
        "optimizer": "adamw",
        "document_length": length,
    }
    facts = MODEL[model] if isinstance(model, str) else model
    return Task(
        facts=facts,
        hardware=named(hardware),
        method=method,
        sequence_length=length,
        sequences=sequences,
        **given | more,
    )


def why(plan: Plan, topic: str) -> str:
    return next(f"{reason.choice}: {reason.why}" for reason in plan.reasons if reason.topic == topic)
