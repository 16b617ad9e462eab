"""The first planner: each choice with its reason, pure, and never silently other than asked."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.plan.facts import from_config
from tunesmith.plan.hardware import Gpu, Hardware
from tunesmith.plan.plan import Plan
from tunesmith.plan.search import make_plan

GIB = 2**30
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
SMOL = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def machine(*, bf16=False, gpu: Gpu | None = None, memory=16 * GIB) -> Hardware:
    return Hardware(
        processor="p", cores=4, memory=memory, available=memory, has_fast_bf16=bf16, gpus=(gpu,) if gpu else ()
    )


def gpu(size: int, capability=(9, 0), name="GPU") -> Gpu:
    return Gpu(name=name, memory=size * GIB, free=size * GIB, capability=capability)


def run(**settings) -> Run:
    return Run(model="m", data="d", **settings)


def why(plan: Plan, topic: str) -> str:
    return next(f"{reason.choice}: {reason.why}" for reason in plan.reasons if reason.topic == topic)


@pytest.mark.parametrize(
    ("wanted", "hardware", "precision", "reason"),
    [
        ("auto", machine(), "fp32", "no bf16 arithmetic"),
        ("auto", machine(bf16=True), "bf16", "has bf16"),
        ("bf16", machine(), "fp32", "bf16 was asked for"),
        ("fp16", machine(bf16=True), "bf16", "fp16 was asked for"),
        ("auto", machine(gpu=gpu(80)), "bf16", "has bf16"),
        ("auto", machine(gpu=gpu(16, (7, 5))), "fp16", "loss scaling"),
        ("bf16", machine(gpu=gpu(16, (7, 5))), "fp16", "bf16 was asked for"),
        ("fp32", machine(gpu=gpu(80)), "fp32", "asked for"),
    ],
)
def test_precision_is_what_the_device_does_well_and_says_so(wanted, hardware, precision, reason):
    plan = make_plan(run(precision=wanted), from_config(SMOL), hardware)
    assert plan.precision == precision
    assert reason in why(plan, "precision")


def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(UserError, match="no NVIDIA GPU"):
        make_plan(run(device="cuda"), from_config(SMOL), machine())


def test_recomputation_only_when_memory_is_short():
    roomy = make_plan(run(), from_config(LLAMA_8B), machine(gpu=gpu(141)))
    tight = make_plan(run(), from_config(LLAMA_8B), machine(gpu=gpu(24)))
    assert roomy.recompute_layers == 0
    assert tight.recompute_layers == 32
    assert "would need" in why(tight, "recomputation")


def test_what_cannot_fit_is_said_before_it_runs_out_of_memory():
    plan = make_plan(run(method="full"), from_config(LLAMA_8B), machine(gpu=gpu(16)))
    assert "may run out of memory" in why(plan, "recomputation")


def test_a_sequence_longer_than_the_model_is_refused_when_asked_for_and_shortened_when_not():
    short = SMOL | {"max_position_embeddings": 1024}
    with pytest.raises(UserError, match=r"sequence_length is 4096.*1024"):
        make_plan(run(sequence_length=4096), from_config(short), machine())
    assert make_plan(run(), from_config(short), machine()).sequence_length == 1024


def test_a_batch_smaller_than_a_sequence_is_refused():
    with pytest.raises(UserError, match=r"batch_tokens is 512.*2048"):
        make_plan(run(batch_tokens=512), from_config(SMOL), machine())


@settings(max_examples=40)
@given(
    st.integers(8, 8192),
    st.integers(1, 64),
    st.sampled_from(["full", "lora"]),
    st.integers(2, 200),
    st.sampled_from(["adamw", "sgd", "adafactor"]),
)
def test_every_plan_covers_the_batch_and_survives_json(length, sequences, method, size, optimizer):
    wanted = run(sequence_length=length, batch_tokens=length * sequences, method=method, optimizer=optimizer)
    plan = make_plan(wanted, from_config(LLAMA_8B), machine(gpu=gpu(size)))
    assert plan.sequences_per_step == sequences
    assert plan.micro_batch * plan.accumulation >= sequences
    assert plan.micro_batch * (plan.accumulation - 1) < sequences
    assert Plan.model_validate(json.loads(plan.model_dump_json())) == plan
    assert all(getattr(plan.memory, name) >= 0 for name in type(plan.memory).model_fields)
    assert make_plan(wanted, from_config(LLAMA_8B), machine(gpu=gpu(size))) == plan
