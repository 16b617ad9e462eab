"""Adapters: what they match, how they start, and that the peft library and ours read each other's files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from tunesmith.config.schema import Lora, Run
from tunesmith.errors import UserError
from tunesmith.kernels import nf4
from tunesmith.model import lora, quantized, structure
from tunesmith.model.forward import token_losses, trial_inputs
from tunesmith.model.forward_spec import own_losses
from tunesmith.model.fuse import fuse
from tunesmith.model.save import write_adapter
from tunesmith.plan.families import from_config
from tunesmith.plan.plan import ForwardSpec

TOKENS = torch.arange(3, 40)[None]


def load(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def shake(model: torch.nn.Module, seed: int = 1) -> None:
    """Give the adapters an effect; B starts at zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for adapter in lora.adapters(model).values():
            late = getattr(adapter, "lora_embedding_a", None)
            late = adapter.lora_b if late is None else late
            late.copy_(torch.randn(late.shape, generator=generator) * 0.1)


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(TOKENS).logits


def test_adapters_start_as_the_base_model(tiny_model):
    model = load(tiny_model)
    before = logits(model)
    lora.attach(model, Lora(rank=4), seed=0)
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * 7
    assert all("lora_" in name for name in trained)


@pytest.mark.parametrize(
    "settings",
    [
        Lora(rank=4),
        Lora(rank=4, alpha=3, rank_stabilised=True),
        Lora(rank=2, targets=["q_proj", "mlp.*_proj"], layers="top 1"),
    ],
)
def test_peft_loads_our_files_and_gives_the_same_logits(tiny_model, tmp_path, settings):
    peft = pytest.importorskip("peft")
    model = load(tiny_model)
    lora.attach(model, settings, seed=0)
    shake(model)
    write_adapter(model, Run(model=str(tiny_model), data="x", lora=settings), tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(load(tiny_model), tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-5, atol=1e-5)
    assert (logits(model) - logits(load(tiny_model))).abs().max() > 1e-3


@pytest.mark.parametrize(
    "changes", [{}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 2}, "rank_pattern": {"v_proj": 3}}]
)
def test_we_load_files_made_by_peft(tiny_model, tmp_path, changes):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", init_lora_weights=False, **changes)
    theirs = peft.get_peft_model(load(tiny_model), config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    model = load(tiny_model)
    lora.attach_saved(model, tmp_path / "adapter")
    torch.testing.assert_close(logits(model), logits(theirs), rtol=1e-5, atol=1e-5)


def test_gpt2s_transposed_linears_go_to_peft_and_back(tmp_path):
    peft = pytest.importorskip("peft")
    model = load(gpt2(tmp_path / "base"))
    settings = Lora(rank=4)
    lora.attach(model, settings, seed=0)
    shake(model)
    write_adapter(model, Run(model=str(tmp_path / "base"), data="x", lora=settings), tmp_path / "adapter")
    with_adapter = logits(model)
    theirs = peft.PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(theirs), with_adapter, rtol=1e-5, atol=1e-5)
    lora.merge(model)
    torch.testing.assert_close(logits(model), with_adapter, rtol=1e-4, atol=1e-5)


def test_merging_gives_the_same_logits_without_adapters(tiny_model):
    model = load(tiny_model)
    lora.attach(model, Lora(rank=4), seed=0)
    shake(model)
    expected = logits(model)
    assert lora.merge(model) == 14
    assert not lora.adapters(model)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_the_start_depends_on_seed_and_name_alone(tiny_model):
    wide, narrow = load(tiny_model), load(tiny_model)
    lora.attach(wide, Lora(rank=4), seed=3)
    lora.attach(narrow, Lora(rank=4, targets=["v_proj"]), seed=3)
    name = "model.layers.1.self_attn.v_proj"
    assert torch.equal(lora.adapters(wide)[name].lora_a, lora.adapters(narrow)[name].lora_a)
    other = load(tiny_model)
    lora.attach(other, Lora(rank=4), seed=4)
    assert not torch.equal(lora.adapters(wide)[name].lora_a, lora.adapters(other)[name].lora_a)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("top 2", {6, 7}), ("bottom 3", {0, 1, 2}), ("0-2", {0, 1, 2}), ("3,5, 7", {3, 5, 7}), ("top 99", set(range(8)))],
)
def test_layers_are_chosen_as_written(text, expected):
    assert lora.choose_layers(text, 8) == expected


@pytest.mark.parametrize("text", ["the top ones", "", "9", "2-12", "5-2", "-1"])
def test_layers_that_are_not_there_are_named(text):
    with pytest.raises(UserError, match=r"lora\.layers"):
        lora.choose_layers(text, 8)


def test_a_target_that_matches_nothing_is_an_error_that_names_what_there_is(tiny_model):
    with pytest.raises(UserError, match=r"'qproj' matches no linear.*q_proj"):
        lora.find_targets(load(tiny_model), Lora(targets=["qproj"]))


def test_embedding_and_head_carry_adapters_where_they_are_named(tiny_model, tmp_path):
    peft = pytest.importorskip("peft")
    assert not any("lm_head" in name for name in lora.find_targets(load(tiny_model), Lora()))
    settings = Lora(rank=4, targets=["q_proj", "embed_tokens", "lm_head"])
    with pytest.raises(UserError, match=r"output head, which go without lora\.dora"):
        lora.find_targets(load(tiny_model), settings.model_copy(update={"dora": True}))
    model = load(tiny_model)
    targets = lora.attach(model, settings, seed=0)
    assert {"model.embed_tokens", "lm_head"} < set(targets)
    torch.testing.assert_close(logits(model), logits(load(tiny_model)), rtol=0, atol=0)
    shake(model)
    folder = write_adapter(model, Run(model=str(tiny_model), data="x", lora=settings), tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(load(tiny_model), folder).eval()
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-5, atol=1e-5)
    again = load(tiny_model)
    lora.attach_saved(again, folder)
    fuse(again, fp8=False)
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-5, atol=1e-5)
    batch = trial_inputs(100, torch.device("cpu"))
    total, _ = token_losses(again, batch, ForwardSpec("padded"))
    total.backward()
    expected = own_losses(model, batch)
    torch.testing.assert_close(total.double(), (expected.double() * batch.weights).sum(), rtol=1e-5, atol=1e-4)
    assert again.lm_head.lora_b.grad.abs().max() > 0
    assert again.model.embed_tokens.lora_embedding_a.grad.abs().max() > 0
    assert lora.shared_end(model) in ("model.embed_tokens", "lm_head")  # the two are one weight here


def test_adapters_that_do_more_than_lora_are_refused_by_name(tiny_model, tmp_path):
    model = load(tiny_model)
    lora.attach(model, Lora(rank=2), seed=0)
    folder = write_adapter(model, Run(model=str(tiny_model), data="x", lora=Lora(rank=2)), tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"modules_to_save": ["lm_head"]}))
    with pytest.raises(UserError, match="modules_to_save"):
        lora.attach_saved(load(tiny_model), folder)


def test_dropout_acts_in_training_only_and_keeps_the_mean(tiny_model):
    model = load(tiny_model)
    lora.attach(model, Lora(rank=4, dropout=0.5), seed=0)
    shake(model)
    assert torch.equal(logits(model), logits(model))
    adapter = next(iter(lora.adapters(model).values())).train()
    x = torch.ones(1, adapter.lora_a.shape[1])
    torch.manual_seed(0)
    mean = torch.stack([adapter(x) for _ in range(4000)]).mean(0)
    torch.testing.assert_close(mean, adapter.eval()(x), rtol=0.05, atol=0.05)


def test_the_scale_is_alpha_over_rank_or_its_root(tiny_model):
    for settings, scale in (
        (Lora(rank=4), 2.0),
        (Lora(rank=4, alpha=4), 1.0),
        (Lora(rank=9, alpha=6, rank_stabilised=True), 6 / math.sqrt(9)),
    ):
        model = load(tiny_model)
        lora.attach(model, settings, seed=0)
        assert {adapter.scale for adapter in lora.adapters(model).values()} == {scale}


# DoRA


def stretch(model: torch.nn.Module) -> None:
    """Give the lengths an effect; they start as the base's own."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for adapter in lora.adapters(model).values():
            adapter.lora_m.mul_(1 + 0.3 * torch.rand(adapter.lora_m.shape, generator=generator))


def gpt2(folder: Path) -> Path:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=100, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def test_dora_starts_as_the_base_model_and_trains_a_length_for_each_output(tiny_model):
    model = load(tiny_model)
    before = logits(model)
    lora.attach(model, Lora(rank=4, dora=True), seed=0)
    torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-5)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 3 * 7
    adapter = model.model.layers[0].self_attn.k_proj
    torch.testing.assert_close(adapter.lora_m.detach(), adapter.base.weight.norm(dim=1))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_dora_goes_to_peft_and_back_with_the_same_logits_and_gradients(tiny_model, tmp_path, family):
    peft = pytest.importorskip("peft")
    base = tiny_model if family == "llama" else gpt2(tmp_path / "base")
    settings = Lora(rank=4, alpha=6, dora=True)
    model = load(base)
    lora.attach(model, settings, seed=0)
    shake(model)
    stretch(model)
    write_adapter(model, Run(model=str(base), data="x", lora=settings), tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(load(base), tmp_path / "adapter", is_trainable=True).eval()
    expected = logits(theirs)
    assert (logits(model) - expected).norm() < 1e-5 * expected.norm()
    assert (logits(model) - logits(load(base))).abs().max() > 1e-2
    again = load(base)
    lora.attach_saved(again, tmp_path / "adapter")
    torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=0)
    for one in (model, theirs):
        one(TOKENS).logits.square().mean().backward()
    wanted = {name.replace(".default", ""): weight.grad for name, weight in theirs.named_parameters()}
    for name, adapter in lora.adapters(model).items():
        for ours, key in list(lora.PEFT_NAMES.items())[:3]:
            want = wanted[f"{lora.PREFIX}{name}.{key}" + (".weight" if ours == "lora_m" else "")]
            torch.testing.assert_close(getattr(adapter, ours).grad, want, rtol=1e-4, atol=1e-6, msg=f"{name} {ours}")
    lora.merge(model)
    torch.testing.assert_close(logits(model), logits(again), rtol=1e-4, atol=1e-4)


def test_we_load_doras_made_by_peft(tiny_model, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, use_dora=True)
    theirs = peft.get_peft_model(load(tiny_model), config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    model = load(tiny_model)
    lora.attach_saved(model, tmp_path / "adapter")
    torch.testing.assert_close(logits(model), logits(theirs), rtol=1e-5, atol=1e-5)
    with lora.without_adapters(model):
        torch.testing.assert_close(logits(model), logits(load(tiny_model)), rtol=0, atol=0)


def test_dora_over_nf4_is_dora_over_the_same_values_in_full(tiny_model):
    held, full = load(tiny_model), load(tiny_model)
    quantized.quantize_linears(held, dtype=torch.float32, device=torch.device("cpu"))
    for linear in structure.linears_of_layers(full).values():
        rows, columns = linear.weight.shape
        linear.weight.data = nf4.dequantize(nf4.quantize(linear.weight), [rows], columns, torch.float32)
    for model in (held, full):
        lora.attach(model, Lora(rank=4, dora=True), seed=0)
        shake(model)
        stretch(model)
        assert fuse(model, fp8=False) == 0
    torch.testing.assert_close(logits(held), logits(full), rtol=1e-5, atol=1e-5)


def test_the_plan_counts_what_dora_trains(tiny_model):
    facts = from_config(json.loads((tiny_model / "config.json").read_text()))
    for settings in (Lora(rank=4, dora=True), Lora(rank=4, dora=True, targets=["v_proj"], layers="top 1")):
        model = load(tiny_model)
        lora.attach(model, settings, seed=0)
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        assert facts.adapted(settings)[0] == trained
