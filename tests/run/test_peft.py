"""`method: peft`: what is trained through the peft library is planned, resumed, opened, merged and read by peft itself.

Every method and every cell is in benchmarks/adapters.py; here are one tuner, one prompt and AdaLoRA, which remembers
more than its weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import parity
from tiny import Die, assert_same, write_all
from tiny_model import make_tiny_model
from tunesmith.config.load import from_mapping
from tunesmith.errors import UserError
from tunesmith.model import adapters, attention, lora
from tunesmith.model.probe import probe_run
from tunesmith.model.save import write_adapter
from tunesmith.run.folder import read_plan, read_summary
from tunesmith.run.open import open_run

peft = pytest.importorskip("peft")
TOKENS = torch.arange(3, 40)[None]
METHODS = {
    "IA3": {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "PREFIX_TUNING": {"num_virtual_tokens": 3},
    "ADALORA": {"init_r": 4, "target_r": 2, "tfinal": 1, "target_modules": ["q_proj", "up_proj"]},
}


def settings(kind: str) -> dict:
    return {"method": "peft", "lora": {}, "peft": {"peft_type": kind, **METHODS[kind]}, "epochs": 1, "save_every": 1}


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=TOKENS).logits.float()[:, -TOKENS.shape[1] :]


def plain(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", METHODS)
def test_a_killed_run_ends_with_the_same_bytes_and_peft_reads_them(runs, tiny_model, tmp_path, kind):
    for name in ("whole", "killed"):
        write_all(tmp_path / name, tiny_model, **settings(kind))
    assert (ended := runs(tmp_path / "whole", "train", "run.yaml", "--plan", "plan.json")).code == 0, ended.err
    die = Die("tunesmith.train.step:TrainStep.launch", count=3)
    assert runs(tmp_path / "killed", "train", "run.yaml", "--plan", "plan.json", die=die).code == -9
    checkpoint = logits(open_run(tmp_path / "killed" / "run").model)
    assert runs(tmp_path / "killed", "train", "run.yaml", "--plan", "plan.json").code == 0
    assert_same(tmp_path / "killed" / "run", tmp_path / "whole" / "run")
    run = tmp_path / "whole" / "run"
    theirs = logits(peft.PeftModel.from_pretrained(plain(tiny_model), run / "adapter").eval())
    torch.testing.assert_close(theirs, logits(open_run(run).model), rtol=1e-5, atol=1e-5)
    assert (theirs - checkpoint).abs().max() > 1e-5
    assert (theirs - logits(plain(tiny_model))).abs().max() > 1e-3
    assert (ended := runs(tmp_path / "whole", "eval", "run")).code == 0, ended.err
    assert f"{read_summary(run)['held_out_after']:.4f}" in ended.out
    assert read_plan(run).forward.layout == ("padded" if kind == "PREFIX_TUNING" else "packed")
    ended = runs(tmp_path / "whole", "merge", "run", "--to", "merged")
    if kind == "PREFIX_TUNING":
        assert "puts vectors before each document" in ended.err
    else:
        torch.testing.assert_close(logits(plain(tmp_path / "whole" / "merged")), theirs, rtol=1e-4, atol=1e-4)


def test_an_adapter_made_by_peft_is_trained_on(runs, tiny_model, tmp_path):
    torch.manual_seed(0)
    config = peft.IA3Config(**METHODS["IA3"], init_ia3_weights=False, task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(plain(tiny_model), config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    changes = {"adapter": str(tmp_path / "theirs"), "peft": {}, "learning_rate": 1e-9}
    write_all(tmp_path / "on", tiny_model, **{**settings("IA3"), **changes})
    assert (ended := runs(tmp_path / "on", "train", "run.yaml", "--plan", "plan.json")).code == 0, ended.err
    torch.testing.assert_close(logits(open_run(tmp_path / "on" / "run").model), logits(theirs), rtol=1e-5, atol=1e-5)
    assert read_summary(tmp_path / "on" / "run")["held_out_before"] > 0


def test_trained_parameters_are_counted_without_weights(tiny_model):
    def count(kind: str, **fields) -> int:
        given = {"model": str(tiny_model), "data": "x", "method": "peft", "peft": {"peft_type": kind, **fields}}
        return adapters.trained_parameters(from_mapping(given))

    assert count("IA3", **METHODS["IA3"]) == 2 * (16 + 16 + 64)
    assert count("PROMPT_TUNING", num_virtual_tokens=5) == 5 * 32
    assert count("BOFT", target_modules=["q_proj"], boft_block_size=4) == 2 * (8 * 4 * 4 + 32)  # its code needs weights


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA4"}, "has no IA4; did you mean IA3?"),
        ({"peft_type": "IA3", "target_module": ["q_proj"]}, "IA3 has no such field; did you mean `target_modules`?"),
        ({"peft_type": "LORA", "r": "4"}, 'peft.r is "4", but LORA needs a number there.'),
        ({"peft_type": "LORA", "use_dora": 2}, "peft.use_dora is 2, but LORA needs true or false there."),
        ({"peft_type": "LORA", "target_modules": 5}, "target_modules is 5, but LORA needs a list or text there."),
        ({"peft_type": "LORA", "bias": "some"}, 'LORA needs "all" or "lora_only" or "none" there.'),
        ({"peft_type": "PROMPT_TUNING"}, "say how many vectors PROMPT_TUNING puts before a document"),
        ({"peft_type": "XLORA"}, "cannot be trained here: it mixes LoRA adapters that exist already"),
        ({"peft_type": "IA3", "target_modules": ["zzz"], "feedforward_modules": []}, "does not go on LlamaForCausalLM"),
        ({"peft_type": "TRAINABLE_TOKENS"}, "peft.token_indices: say the ids of the tokens whose embeddings"),
    ],
)
def test_what_peft_would_not_take_is_said_in_a_sentence(tiny_model, fields, message):
    run = from_mapping({"model": str(tiny_model), "data": "x", "method": "peft", "peft": fields})
    with pytest.raises(UserError) as said:
        adapters.trained_parameters(run)
    assert message in str(said.value)


@pytest.mark.parametrize(
    ("family", "kind", "expected"),
    [
        ("olmo2", "OFT", {"q_proj", "v_proj"}),
        ("olmo2", "LN_TUNING", {"post_attention_layernorm", "post_feedforward_layernorm", "q_norm", "k_norm", "norm"}),
        ("olmo2", "IA3", {"k_proj", "v_proj", "down_proj"}),
        ("starcoder2", "IA3", {"q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"}),
        ("nemotron", "LN_TUNING", {"input_layernorm", "post_attention_layernorm", "norm"}),
    ],
)
def test_families_that_peft_does_not_know_get_targets(family, kind, expected):
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = AutoConfig.for_model(family, **shape, num_key_value_heads=2, vocab_size=64, pad_token_id=0)
    with pytest.raises(ValueError, match="specify"):
        peft.get_peft_model(AutoModelForCausalLM.from_config(config), peft.get_peft_config({"peft_type": kind}))
    run = from_mapping({"model": "m", "data": "d", "output": "o", "method": "peft", "peft": {"peft_type": kind}})
    tuned = adapters.put_on(AutoModelForCausalLM.from_config(config), run)
    assert {name.rpartition(".")[2] for name in tuned.config.target_modules} == expected


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("falcon_h1", "peft.peft_type: FalconH1ForCausalLM cannot be called with PREFIX_TUNING on it (Cannot get conv"),
        (
            "recurrent_gemma",
            "peft.peft_type: with PREFIX_TUNING on it RecurrentGemmaForCausalLM does not give the logits",
        ),
        ("mamba2", "peft.peft_type: PREFIX_TUNING changes nothing of what Mamba2ForCausalLM gives; use another type"),
    ],
)
def test_a_prefix_that_a_model_cannot_take_is_refused_before_training(tmp_path, family, message):
    folder = parity.write_model(family, tmp_path / "model")
    run = from_mapping({"model": str(folder), "data": "x", "sequence_length": 64, **settings("PREFIX_TUNING")})
    with pytest.raises(UserError) as said:
        probe_run(run)
    assert message in str(said.value)


def test_a_list_of_factors_as_long_as_there_are_layers_is_not_cut_with_them(tmp_path):
    folder = parity.write_model("falcon_h1", tmp_path / "model")  # of two layers, whose MLPs have two multipliers
    fields = {"peft_type": "BOFT", "boft_block_size": 4, "target_modules": ["q_proj"]}
    run = from_mapping({"model": str(folder), "data": "x", "method": "peft", "peft": fields})
    assert adapters.trained_parameters(run) == 2 * (8 * 4 * 4 + 32)  # its code needs weights


def test_names_that_peft_takes_for_experts_carry_no_adapter(tmp_path):
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    folder = make_tiny_model(tmp_path / "model")
    sizes = json.loads((folder / "config.json").read_text())
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "bos_token_id", "eos_token_id")
    small = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    small |= {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    small |= {"intermediate_size": 64, "moe_intermediate_size": 16, "num_key_value_heads": 4}
    DeepseekV3ForCausalLM(DeepseekV3Config(**{name: sizes[name] for name in names}, **small)).save_pretrained(folder)
    attention.register()
    run, found, notes = probe_run(from_mapping({"model": str(folder), "data": "x"}))
    assert any("for the experts'" in note for note in notes)
    assert not any("gate_proj" in target or "down_proj" in target for target in run.lora.targets)
    assert found.adapted == tuple(run.lora.targets)
    model = plain(folder)
    lora.attach(model, run.lora, seed=0)
    with torch.no_grad():
        for adapter in lora.adapters(model).values():
            adapter.lora_b.normal_(std=0.1)
    write_adapter(model, run, tmp_path / "adapter")
    theirs = logits(peft.PeftModel.from_pretrained(plain(folder), tmp_path / "adapter").eval())
    torch.testing.assert_close(theirs, logits(model), rtol=1e-4, atol=1e-4)
    assert (theirs - logits(plain(folder))).abs().max() > 1e-3
    with pytest.raises(UserError, match="for the experts'"):
        probe_run(from_mapping({"model": str(folder), "data": "x", "lora": {"targets": ["down_proj"]}}))
