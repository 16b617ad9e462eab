"""Models in nf4 and int8: filled from their files piece by piece, and trained as those with the same values in full."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

import parity
from tiny_model import make_tiny_model
from tunesmith.config.schema import Lora, Run
from tunesmith.errors import UserError
from tunesmith.kernels import int8, nf4
from tunesmith.model import load, lora, quantized, source, structure
from tunesmith.model.fuse import JointLinear, fuse
from tunesmith.model.probe import probe_run
from tunesmith.parallel.prepare import load_model
from tunesmith.plan.model_states import QUANTIZED

TOKENS = torch.arange(3, 40)[None]


def load_nf4(folder, **changes):
    run = Run(model=str(folder), data="none.jsonl", **changes)
    return load_model(run, dtype="fp32", device="cpu", storage="nf4")


def dequantized(folder):
    """The model in full, each linear of its layers replaced by what nf4 makes of it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for linear in structure.linears_of_layers(model).values():
        is_transposed = structure.is_transposed(linear)
        weight = linear.weight.detach().t() if is_transposed else linear.weight.detach()
        values = nf4.dequantize(nf4.quantize(weight), [weight.shape[0]], weight.shape[1], torch.float32)
        linear.weight.data = values.t().contiguous() if is_transposed else values
    return model


def adapt(model, **settings):
    lora.attach(model, Lora(rank=4, **settings), seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for adapter in lora.adapters(model).values():
            adapter.lora_b.copy_(torch.randn(adapter.lora_b.shape, generator=generator) * 0.1)
    return model


def results(model):
    logits = model(TOKENS).logits
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], TOKENS[0, 1:])
    return loss, dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("settings", [{}, {"targets": ["q_proj", "v_proj", "down_proj"]}])
def test_losses_and_gradients_are_those_over_the_dequantized_base(tiny_model, settings, fused):
    model, full = adapt(load_nf4(tiny_model), **settings), adapt(dequantized(tiny_model), **settings)
    if fused:
        fuse(model, fp8=False)
    (found, gradients), (expected, wanted) = results(model), results(full)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_all_but_the_linears_of_the_layers_is_as_in_the_files(tmp_path, tied):
    folder = make_tiny_model(tmp_path / "model", tie_word_embeddings=tied)
    model, full = load_nf4(folder), AutoModelForCausalLM.from_pretrained(folder)
    kept = model.state_dict()
    assert kept.keys() == {name for name in full.state_dict() if "_proj" not in name}
    assert all(torch.equal(tensor, full.state_dict()[name]) for name, tensor in kept.items())
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    assert all(map(torch.equal, dict(full.named_buffers()).values(), own_buffers(model)))
    assert model.generation_config.eos_token_id == full.generation_config.eos_token_id
    assert not model.training


def own_buffers(model):
    return [tensor for name, tensor in model.named_buffers() if not name.endswith(("weight4", "bias"))]


def test_what_a_fused_model_keeps_is_4_127_bits_a_weight(tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1}
    model = load_nf4(make_tiny_model(tmp_path / "model", **sizes))
    linears = [module for module in model.modules() if isinstance(module, quantized.Nf4Linear)]
    weights = sum(module.in_features * module.out_features for module in linears)
    adapt(model)
    fuse(model, fp8=False)
    del linears
    assert not any(isinstance(module, quantized.Nf4Linear) for module in model.modules())
    held = sum(
        tensor.nbytes for module in model.modules() if isinstance(module, JointLinear) for tensor in module.buffers()
    )
    assert 8 * held / weights == pytest.approx(4.127, abs=0.005)
    small = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    assert small < weights / 10, "no weight is left in full precision"


def test_nothing_whole_is_saved_for_the_backward_pass(tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    model = adapt(load_nf4(make_tiny_model(tmp_path / "model", **sizes)))
    fuse(model, fp8=False)
    largest = []

    def keep(tensor):
        if tensor.is_floating_point():
            largest.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model.layers[0](torch.randn(1, 8, 256), position_embeddings=(torch.ones(1, 8, 64), torch.zeros(1, 8, 64)))
    assert max(largest) < 256 * 256 / 4


@pytest.mark.parametrize(("storage", "kernel"), [("nf4", nf4), ("int8", int8)])
def test_one_weight_at_a_time_is_in_full_precision(tiny_model, monkeypatch, storage, kernel):
    """Files are read tensor by tensor, and each is quantized before the next is read."""
    trace = []
    real_tensors, real_quantize = source.read_ahead, kernel.quantize

    def tensors(files, **options):
        for name, *read in real_tensors(files, **options):
            trace.append(name)
            yield name, *read

    def quantize(weight):
        trace.append("quantized")
        return real_quantize(weight)

    monkeypatch.setattr(source, "read_ahead", tensors)
    monkeypatch.setattr(kernel, "quantize", quantize)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    run = Run(model=str(tiny_model), data="none.jsonl")
    load_model(run, dtype="fp32", device="cpu", storage=storage)
    linears = [index for index, name in enumerate(trace) if "_proj" in name]
    assert len(linears) == 2 * 7
    assert all(trace[index + 1] == "quantized" for index in linears)


def test_files_of_several_shards_are_read(tmp_path, tiny_model):
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    found, expected = load_nf4(tmp_path), load_nf4(tiny_model)
    assert torch.equal(found(TOKENS).logits, expected(TOKENS).logits)


def test_files_that_name_their_tensors_otherwise_give_the_same_model(tmp_path, tiny_model):
    from safetensors.torch import load_file, save_file

    tensors = load_file(tiny_model / "model.safetensors")
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    assert torch.equal(load_nf4(tmp_path)(TOKENS).logits, load_nf4(tiny_model)(TOKENS).logits)


def test_a_tied_weight_is_found_under_its_other_name(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = make_tiny_model(tmp_path / "model", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    expected = load_nf4(folder)(TOKENS).logits
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")  # as GGUF files are converted
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    empty, _ = load.load_empty(Run(model=str(folder), data="x"), dtype="fp32")
    files = source.files_of(empty, folder)
    assert files is not None
    assert files.keys() == tensors.keys() - {"lm_head.weight"} | {"model.embed_tokens.weight"}
    assert torch.equal(load_nf4(folder)(TOKENS).logits, expected)


def test_biases_and_transposed_weights_are_right(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
    qwen = Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, bos_token_id=1, eos_token_id=2)
    gpt2 = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=100, n_positions=64, bos_token_id=1, eos_token_id=2)
    for build, config in ((Qwen2ForCausalLM, qwen), (GPT2LMHeadModel, gpt2)):
        model = build(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_()
        folder = tmp_path / build.__name__
        model.save_pretrained(folder)
        found, full = adapt(load_nf4(folder)), adapt(dequantized(folder))
        fuse(found, fp8=False)
        torch.testing.assert_close(found(TOKENS).logits, full(TOKENS).logits, rtol=1e-4, atol=1e-5)
        config = [lora.adapter_config(one, Lora(rank=4), "base") for one in (found, full)]
        assert config[0] == config[1]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_in_int8_losses_and_gradients_are_those_over_the_dequantized_base(tiny_model, tmp_path, family):
    folder = tiny_model
    if family == "gpt2":
        torch.manual_seed(0)
        folder = tmp_path / "gpt2"
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2}
        GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(folder)
    run = Run(model=str(folder), data="none.jsonl", method="qlora", lora={"bits": 8})
    model = load_model(run, dtype="fp32", device="cpu", storage="int8")
    full = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    held = {name: one for name, one in model.named_modules() if isinstance(one, quantized.Int8Linear)}
    assert held.keys() == structure.linears_of_layers(full).keys()
    for name, linear in structure.linears_of_layers(full).items():
        weight = linear.weight.t() if structure.is_transposed(linear) else linear.weight
        whole = held[name].dequantize()
        assert (whole - weight).abs().max() <= 0.51 / 127 * weight.abs().max()
        linear.weight.data = whole.t().contiguous() if structure.is_transposed(linear) else whole
    for one in (model, full):
        adapt(one)
    assert fuse(model, fp8=False) == 0
    (found, gradients), (expected, wanted) = results(model), results(full)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-5)


def test_int8_takes_the_bytes_that_the_plan_counts():
    linear = quantized.Int8Linear(*int8.quantize(torch.randn(8, 2048)), None)
    assert sum(buffer.nbytes for buffer in linear.buffers()) == 8 * 2048 * QUANTIZED["int8"]


# read in full precision


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_plain_model_read_tensor_by_tensor_is_the_one_transformers_loads(tiny_model, dtype, monkeypatch):
    run = Run(model=str(tiny_model), data="none.jsonl")
    expected = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=getattr(torch, load.DTYPES[dtype])).eval()
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)  # is not needed
    model = load_model(run, dtype=dtype, device="cpu")
    found, wanted = model.state_dict(), expected.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.dtype == wanted[name].dtype
        assert torch.equal(tensor, wanted[name])
    assert model.lm_head.weight is model.model.embed_tokens.weight  # tied as before
    assert torch.equal(model(TOKENS).logits, expected(TOKENS).logits)
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()


def test_linears_that_are_smaller_than_a_block_stay_as_they_are(tmp_path):
    """Gemma 3n reads the weights of its coefficients itself while it trains."""
    folder = parity.write_model("gemma3n_text", tmp_path)
    kinds = {name.rpartition(".")[2] for name in structure.linears_of_layers(parity.plain_model(folder))}
    assert "q_proj" in kinds
    assert not kinds & {"prediction_coefs", "correction_coefs"}
    targets = {"targets": ["q_proj", "down_proj"]}
    model, full = adapt(load_nf4(folder), **targets).train(), adapt(dequantized(folder), **targets).train()
    (found, gradients), (expected, wanted) = results(model), results(full)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6)


def test_a_linear_whose_weight_the_model_needs_is_refused_in_few_bits(tmp_path):
    folder = parity.write_model("deepseek_v32", tmp_path)
    with pytest.raises(UserError, match=r"qlora: the model's own code computes with the weight of .*weights_proj"):
        probe_run(Run(model=str(folder), data="none.jsonl", method="qlora"))


@pytest.mark.parametrize(
    "changes",
    [
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"bias": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_linears_of_a_models_own_class_are_held_in_few_bits_where_they_compute_as_others(tmp_path, changes):
    """Falcon's, which were held as they are; its code adds to what the last one gives in place."""
    folder = parity.write_model("falcon", tmp_path / "model", **changes)
    trained = parity.train(folder, "qlora", tmp_path / "run")
    assert len([one for one in trained.job.model.modules() if isinstance(one, JointLinear)]) == 8
    plain = parity.plain_model(folder)
    quantized.round_weights(plain, "nf4")
    assert parity.distance(trained.losses, parity.plain_losses(plain, trained, "qlora")) < parity.TOLERANCE


def test_a_model_most_of_which_would_stay_as_it_is_is_refused_in_few_bits(tmp_path):
    folder = parity.write_model("dbrx", tmp_path)
    with pytest.raises(UserError, match="most weights in the layers of DbrxForCausalLM are those of DbrxExpertGLU"):
        probe_run(Run(model=str(folder), data="none.jsonl", method="qlora"))
    found = probe_run(Run(model=str(folder), data="none.jsonl"))[1]
    assert found.router_loss == 0.01  # which its class has, and its config has elsewhere
