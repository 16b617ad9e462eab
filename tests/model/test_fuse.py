"""Fused adapters compute what plain ones do, train the same, and keep their names."""

from __future__ import annotations

import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tunesmith.config.schema import Lora
from tunesmith.kernels.lowrank import quantize_rows
from tunesmith.model import lora, lora_modules
from tunesmith.model.fuse import JointLinear, fuse

TOKENS = torch.arange(3, 40)[None]


def adapted(folder, **settings) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    lora.attach(model, Lora(rank=4, **settings), seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for adapter in lora.adapters(model).values():
            adapter.lora_b.copy_(torch.randn(adapter.lora_b.shape, generator=generator) * 0.1)
    return model


def results(model):
    logits = model(TOKENS).logits
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad(logits.square().mean(), list(trained.values()))
    return logits, dict(zip(trained, gradients, strict=True))


@pytest.mark.parametrize("settings", [{}, {"targets": ["q_proj", "v_proj", "down_proj"]}, {"layers": "top 1"}])
def test_fusing_changes_neither_results_nor_gradients_nor_names(tiny_model, settings):
    model = adapted(tiny_model, **settings)
    before, expected = results(model)
    files = lora.adapter_tensors(model)
    config = lora.adapter_config(model, Lora(rank=4, **settings), "base")
    assert fuse(model, fp8=False) > 0
    after, found = results(model)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-6)
    assert all(torch.equal(tensor, files[name]) for name, tensor in lora.adapter_tensors(model).items())
    assert lora.adapter_config(model, Lora(rank=4, **settings), "base") == config


def test_siblings_are_computed_together(tiny_model):
    model = adapted(tiny_model)
    assert fuse(model, fp8=False) == 2 * 4
    sizes = sorted(len(module.members) for module in model.modules() if isinstance(module, JointLinear))
    assert sizes == [1, 1, 1, 1, 2, 2, 3, 3]


def test_weights_kept_transposed_change_nothing(tiny_model):
    once, twice = adapted(tiny_model), adapted(tiny_model)
    fuse(once, fp8=True)
    fuse(twice, fp8=True, cache_transposed=True)
    kept = [module.transposed_kn for module in twice.modules() if isinstance(module, JointLinear)]
    assert kept
    assert all(transposed is not None for transposed in kept)
    (logits, gradients), (again, found) = results(once), results(twice)
    assert torch.equal(again, logits)
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())


def test_a_member_called_alone_is_right_too(tiny_model):
    plain, fused = adapted(tiny_model), adapted(tiny_model)
    fuse(fused, fp8=False)
    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(1))
    name = "model.layers.0.self_attn.k_proj"
    torch.testing.assert_close(fused.get_submodule(name)(x), plain.get_submodule(name)(x), rtol=1e-4, atol=1e-5)


def test_biases_are_kept(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
    config = Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, bos_token_id=1, eos_token_id=2)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    model.save_pretrained(tmp_path)
    for fp8 in (False, True):
        model = adapted(tmp_path)
        before, _ = results(model)
        fuse(model, fp8=fp8)
        after, _ = results(model)
        assert ((after - before).norm() / before.norm()).item() < (0.1 if fp8 else 1e-5)


@pytest.mark.parametrize("without", ["q_proj", "k_proj"])
def test_siblings_need_not_all_have_a_bias(without):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 100}
    config = Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, bos_token_id=1, eos_token_id=2)
    model = Qwen2ForCausalLM(config).eval()
    for name in ("q_proj", "k_proj", "v_proj"):
        torch.nn.init.normal_(model.model.layers[0].self_attn.get_submodule(name).bias)
    model.model.layers[0].self_attn.get_submodule(without).bias = None
    lora.attach(model, Lora(rank=4), seed=0)
    before, _ = results(model)
    fuse(model, fp8=False)
    torch.testing.assert_close(results(model)[0], before, rtol=1e-4, atol=1e-5)


def test_adapters_with_dropout_are_left_as_they_are(tiny_model):
    model = adapted(tiny_model, dropout=0.1)
    assert fuse(model, fp8=False) == 0


def test_fp8_stays_within_what_its_format_rounds(tiny_model):
    """e4m3 has 3 bits after the point: a factor is off by 2.6% in the mean square, a product of two by 3.7%."""
    plain, fused = adapted(tiny_model), adapted(tiny_model)
    fuse(fused, fp8=True)
    x = torch.randn(1, 50, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    pairs = []
    for model in (plain, fused):
        linear = model.get_submodule("model.layers.1.mlp.down_proj")
        y = linear(x)
        pairs.append((y, *torch.autograd.grad(y.square().sum(), (x, linear.lora_a, linear.lora_b))))
    for exact, rounded in zip(*pairs, strict=True):
        assert 0 < ((rounded - exact).norm() / exact.norm()).item() < 0.06


def test_rows_are_quantized_to_the_nearest_fp8_value():
    x = torch.randn(7, 33, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 4, 7)[:, None]
    values, scale = quantize_rows(x)
    error = (values.float() * scale - x).abs() / x.abs().amax(-1, keepdim=True)
    assert error.max() <= 2**-4
    assert torch.isfinite(values.float()).all()
    assert quantize_rows(torch.zeros(2, 16))[0].float().abs().max() == 0


def test_each_weight_is_given_up_when_it_is_grouped_and_not_at_the_end(tiny_model, monkeypatch):
    """Else the model is there one and a half times while its adapters are fused."""
    from tunesmith.model import fuse as module

    model = adapted(tiny_model)
    bases = [weakref.ref(adapter.base) for adapter in lora.adapters(model).values()]
    alive, group = [], module._group

    def watched(members, **named):
        group(members, **named)
        alive.append(sum(base() is not None for base in bases))

    monkeypatch.setattr(module, "_group", watched)
    fuse(model, fp8=False)
    assert alive == sorted(alive, reverse=True)
    assert alive[0] < len(bases)
    assert alive[-1] == 0


def test_one_linear_for_gate_and_up_in_nf4_keeps_its_values():
    """The kernels know gate and up as two weights, one behind the other."""
    from torch import nn
    from transformers import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3MLP

    from tunesmith.kernels import nf4
    from tunesmith.model.fuse import JointMlp
    from tunesmith.model.quantized import Nf4Linear

    for width in (256, 64, 40):  # whose halves end with blocks of scales, or not
        mlp = Phi3MLP(Phi3Config(hidden_size=64, intermediate_size=width, pad_token_id=0))
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(mlp, name).weight
            base = Nf4Linear(nf4.quantize(weight), tuple(weight.shape), None)
            setattr(mlp, name, lora_modules.LoraLinear(base, 4, 1.0))
        expected = mlp.gate_up_proj.base.dequantize()
        parent = nn.Sequential(mlp)
        assert fuse(parent, fp8=False, fuse_mlps=True) == 1
        assert isinstance(parent[0], JointMlp)
        assert torch.equal(nf4.dequantize(parent[0].gate_up, [width, width], 64, torch.float32), expected)
