"""Which kernel does the attention of each kind of layer: named in the plan, with what a faster one would need."""

from __future__ import annotations

import pytest

from tunesmith.plan.attention import Heads, path_of
from tunesmith.plan.families import from_config
from tunesmith.plan.hardware import named
from tunesmith.plan.models import build_facts
from tunesmith.plan.search import best_plan

from .shapes import run, why

GEMMA_2 = from_config(
    {
        "model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256000,
    }
)  # fmt: skip
CAPPED, SINKS, MLA, ALIBI = (
    Heads(256, 256, is_soft_capped=True),
    Heads(64, 64, has_sinks=True),
    Heads(192, 128),
    Heads(128, 128, has_alibi=True),
)


@pytest.mark.parametrize(
    ("kernel", "capability", "heads", "path"),
    [
        ("flash-attn-4", (9, 0), CAPPED, "flash-attn-4"),
        ("flash-attn-4", (9, 0), SINKS, "flash-attn-4"),
        ("flash-attn-4", (9, 0), MLA, "flash-attn-4"),
        ("flash-attn-4", (9, 0), ALIBI, "flex-attention"),
        ("flash-attn-4", (9, 0), Heads(512, 512), "memory-efficient"),
        ("flash-attn-4", (10, 0), CAPPED, "flex-attention"),
        ("flash-attn-4", (12, 0), SINKS, "flex-attention"),
        ("flash-attn-4", (8, 0), Heads(128, 128), "varlen"),
        ("varlen", (8, 0), CAPPED, "flex-attention"),
        ("varlen", (9, 0), Heads(256, 256), "varlen"),
        ("varlen", (9, 0), Heads(128, 128, has_dropout=True), "by document"),
        ("sdpa", (9, 0), Heads(64, 64, itemsize=4), "memory-efficient"),
        ("varlen", (7, 5), CAPPED, "by document"),
    ],
)
def test_a_layer_takes_the_best_kernel_that_has_what_it_asks_for(kernel, capability, heads, path):
    assert path_of(kernel, capability, heads) == path


def test_the_plan_names_the_path_of_each_kind_of_layer_and_its_cost():
    asked = run(method="lora", sequence_length=4096, batch_tokens=16384)
    fast, flexible, slow = (best_plan(asked, GEMMA_2, named(where)) for where in ("H200", "A100-80G", "T4"))
    assert fast.attention_paths == ("full: flash-attn-4", "sliding 4096: flash-attn-4")
    assert flexible.attention_paths == ("full: flex-attention", "sliding 4096: flex-attention")
    assert slow.attention_paths == ("full: by document", "sliding 4096: by document")
    assert "soft-capped scores" in why(flexible, "attention")
    assert "needs a GPU of compute capability 8.0" in why(slow, "attention")
    wrong = best_plan(asked, GEMMA_2.changed(wrong_paths=("flash-attn-4",)), named("H200"))
    assert wrong.attention == "flex-attention"
    none = best_plan(asked, GEMMA_2.changed(wrong_paths=("flash-attn-4", "flex-attention")), named("H200"))
    assert none.attention == "sdpa"
    assert "failed or was wrong when tried" in why(none, "attention")
    assert none.tokens_per_second < wrong.tokens_per_second < fast.tokens_per_second
    assert none.time.attention > 4 * fast.time.attention


def test_what_layers_ask_of_a_kernel_is_found_in_models_without_a_formula():
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 50,
    }
    facts = build_facts({"model_type": "gpt_oss", **sizes, "head_dim": 16, "num_local_experts": 2, "sliding_window": 8})
    assert [(kind.window, kind.has_sinks) for kind in facts.kinds] == [(8, True), (None, True)]
    facts = build_facts({"model_type": "deepseek_v2", **sizes, "first_k_dense_replace": 2, "qk_nope_head_dim": 16,
                         "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 2})  # fmt: skip
    assert {(kind.head_dim, kind.value_dim) for kind in facts.kinds} == {(24, 16)}
