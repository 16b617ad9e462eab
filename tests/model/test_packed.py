"""Models that were quantized before they came here: read as their own library reads them, or refused in a sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GPT2Config, GptOssConfig, Qwen3MoeConfig

from tiny_model import make_tiny_model
from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.model import load, quantized
from tunesmith.parallel.prepare import load_model
from tunesmith.plan.models import read_facts

TOKENS = torch.arange(3, 40)[None]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    return make_tiny_model(folder, hidden_size=64, intermediate_size=128, num_hidden_layers=1, dtype="bfloat16")


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def ours(folder: Path, storage: str = "plain"):
    return load_model(Run(model=str(folder), data="none.jsonl"), dtype="fp32", device="cpu", storage=storage)


def theirs(folder: Path, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # bitsandbytes computes in bf16 where a CPU has that
            module.support_avx512bf16_for_cpu = False
    return model


def rewrite(plain: Path, folder: Path, change, scheme: dict) -> Path:
    """A copy of a model whose linears' weights `change` replaces by other tensors."""
    shutil.copytree(plain, folder)
    tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        is_linear = name.endswith("_proj.weight") and tensor.ndim == 2
        tensors |= change(name.removesuffix("weight"), tensor.float()) if is_linear else {name: tensor}
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    say(folder, quantization_config=scheme)
    return folder


def say(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


# bitsandbytes


def by_bitsandbytes(plain: Path, folder: Path, **options) -> Path:
    if not folder.exists():
        config = BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.float32, **options)
        made = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config, dtype=torch.float32)
        made.save_pretrained(folder)
        for file in plain.glob("tok*"):
            shutil.copy(file, folder)
    return folder


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize("nested", [True, False])
def test_nf4_of_bitsandbytes_is_trained_over_its_own_codes(plain, tmp_path, nested):
    folder = by_bitsandbytes(plain, tmp_path / "nf4", **NF4, bnb_4bit_use_double_quant=nested)
    model, expected = ours(folder, "nf4"), theirs(folder)
    assert torch.equal(logits(model), logits(expected))
    stored = load_file(folder / "model.safetensors")
    linears = {name: one for name, one in model.named_modules() if isinstance(one, quantized.Nf4Linear)}
    assert len(linears) == 7
    for name, linear in linears.items():
        packed = stored[f"{name}.weight"].reshape(-1)
        assert torch.equal(linear.weight4[-len(packed) :], packed)  # byte for byte
    assert torch.equal(logits(ours(folder)), logits(expected))


def test_fp4_is_read_and_not_rounded_a_second_time(plain, tmp_path):
    folder = by_bitsandbytes(plain, tmp_path / "fp4", load_in_4bit=True, bnb_4bit_quant_type="fp4")
    assert torch.equal(logits(ours(folder)), logits(theirs(folder)))
    with pytest.raises(UserError, match=r"a second time .* use method: lora"):
        ours(folder, "nf4")


def test_int8_of_bitsandbytes_is_read_by_its_scales_and_trained_over_its_codes(plain, tmp_path):
    """bitsandbytes also rounds the inputs of its matmuls, which training has no use for: weights are compared."""
    folder = by_bitsandbytes(plain, tmp_path / "int8", load_in_8bit=True)
    from bitsandbytes.functional import int8_vectorwise_dequant

    library = theirs(folder)
    read, held = ours(folder), ours(folder, "int8")
    stored = load_file(folder / "model.safetensors")
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        name = f"model.layers.0.{name}"
        weight = library.get_submodule(name).weight
        state = weight.SCB if weight.SCB is not None else library.get_submodule(name).state.SCB
        expected = int8_vectorwise_dequant(weight.data, state)
        torch.testing.assert_close(read.get_submodule(name).weight.data, expected, rtol=1e-6, atol=1e-9)
        assert torch.equal(held.get_submodule(name).weight8, stored[f"{name}.weight"])
        torch.testing.assert_close(held.get_submodule(name).dequantize(), expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(logits(held), logits(read), rtol=1e-4, atol=1e-4)
    assert (logits(read) - logits(theirs(plain))).norm() < 0.2 * logits(theirs(plain)).norm()


def test_linears_stored_the_other_way_round_are_turned(tmp_path):
    torch.manual_seed(0)
    config = GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=100, n_positions=64, initializer_range=0.3)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "plain")
    folder = by_bitsandbytes(tmp_path / "plain", tmp_path / "nf4", **NF4)
    expected = logits(theirs(folder))
    for storage in ("plain", "nf4"):
        torch.testing.assert_close(logits(ours(folder, storage)), expected, rtol=1e-4, atol=1e-4)


# fp8 and mxfp4


def in_blocks(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 values, and the scale of each block, as DeepSeek-V3's files have them."""
    rows, columns = (-(-size // one) for size, one in zip(weight.shape, block, strict=True))
    scales = torch.empty(rows, columns)
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(rows):
        for column in range(columns):
            at = (slice(row * block[0], (row + 1) * block[0]), slice(column * block[1], (column + 1) * block[1]))
            scales[row, column] = weight[at].abs().max() / 448
            values[at] = (weight[at] / scales[row, column]).to(torch.float8_e4m3fn)
    return values, scales


def fp8_scheme(block: tuple[int, int]) -> dict:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block)}


FP8_SCHEME = fp8_scheme((32, 48))


def to_fp8(stem: str, weight: torch.Tensor, block: tuple[int, int] = (32, 48)) -> dict[str, torch.Tensor]:
    values, scales = in_blocks(weight, block)
    return {f"{stem}weight": values, f"{stem}weight_scale_inv": scales}


def test_fp8_with_block_scales_is_read_as_transformers_dequantizes_it(plain, tmp_path):
    folder = rewrite(plain, tmp_path / "fp8", to_fp8, FP8_SCHEME)
    found = ours(folder)
    whole = rewrite(plain, tmp_path / "whole blocks", lambda *one: to_fp8(*one, block=(32, 64)), fp8_scheme((32, 64)))
    assert torch.equal(logits(ours(whole)), logits(theirs(whole)))  # the library reads no others
    for name, weight in theirs(plain).state_dict().items():
        if name.endswith("_proj.weight"):
            values, scales = in_blocks(weight, (32, 48))
            spread = scales.repeat_interleave(32, 0).repeat_interleave(48, 1)[: weight.shape[0], : weight.shape[1]]
            assert torch.equal(found.state_dict()[name], values.float() * spread)
    assert isinstance(ours(folder, "nf4").model.layers[0].mlp.up_proj, quantized.Nf4Linear)  # as fine as bf16: rounded


@pytest.mark.parametrize("shape", [(), (1,), ("N",), ("N", 1)])
def test_fp8_with_a_scale_for_each_row_or_tensor_is_read(plain, tmp_path, shape):
    def change(stem, weight):
        scale = weight.abs().amax(1) / 448 if "N" in shape else weight.abs().max() / 448
        values = (weight / (scale[:, None] if "N" in shape else scale)).to(torch.float8_e4m3fn)
        return {f"{stem}weight": values, f"{stem}weight_scale": scale.reshape([-1 if n == "N" else n for n in shape])}

    folder = rewrite(plain, tmp_path / "fp8", change, {"quant_method": "fbgemm_fp8"})
    before = theirs(plain).state_dict()
    for name, weight in ours(folder).state_dict().items():
        torch.testing.assert_close(weight, before[name], rtol=0.07, atol=1e-3 if name.endswith("_proj.weight") else 0)


def test_experts_in_fp8_are_stacked(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 48, "num_experts": 4, "head_dim": 16}
    more = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
    config = Qwen3MoeConfig(**sizes, **more, num_experts_per_tok=2, bos_token_id=1, eos_token_id=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "plain")
    folder = rewrite(tmp_path / "plain", tmp_path / "fp8", to_fp8, FP8_SCHEME)
    before, found = theirs(tmp_path / "plain").state_dict(), ours(folder).state_dict()
    assert found.keys() == before.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, before[name], rtol=0.07, atol=1e-3)


def test_mxfp4_of_gpt_oss_is_read_as_transformers_dequantizes_it(tmp_path):
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4, "head_dim": 16, "vocab_size": 100}
    more = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    config = GptOssConfig(**sizes, **more, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    expected = {}
    for name in ("gate_up_proj", "down_proj"):
        name = f"model.layers.0.mlp.experts.{name}"
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(115, 123, (experts, outputs, inputs // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = _convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    say(tmp_path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    model = ours(tmp_path)
    for name, weight in expected.items():
        assert torch.equal(model.state_dict()[name], weight)
    assert torch.isfinite(logits(model)).all()


# GPTQ and AWQ, packed as their layouts are published


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Whole numbers one behind the other in words of 32 bits, along the last dimension."""
    rows = []
    for row in values.tolist():
        number = sum(value << (bits * place) for place, value in enumerate(row))
        words = [(number >> (32 * at)) & 0xFFFFFFFF for at in range(len(row) * bits // 32)]
        rows.append([word - (1 << 32) if word >= 1 << 31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def affine(weight: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, K], scales and zero points [N, G]."""
    grouped = weight.view(weight.shape[0], -1, group)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scales = ((high - low) / ((1 << bits) - 1)).half().float()
    zeros = (-low / scales).round().clamp(1, (1 << bits) - 1)
    codes = (grouped / scales[..., None] + zeros[..., None]).round().clamp(0, (1 << bits) - 1)
    return codes.view_as(weight).int(), scales, zeros.int()


@pytest.mark.parametrize(("bits", "version", "ordered"), [(4, 1, True), (4, 2, False), (8, 1, False), (3, 1, False)])
def test_gptq_is_read_by_its_published_layout(plain, tmp_path, bits, version, ordered):
    expected = {}

    def change(stem, weight):
        codes, scales, zeros = affine(weight, bits, 32)
        order = torch.arange(weight.shape[1]).flip(0) if ordered else torch.arange(weight.shape[1])
        spread = [one.repeat_interleave(32, 1) for one in (zeros, scales)]
        expected[f"{stem}weight"] = ((codes - spread[0]) * spread[1])[:, order]
        packed = pack(codes[:, order], bits).t()
        zero_words = pack((zeros.t() - (2 - version)) & ((1 << bits) - 1), bits)
        tensors = {"qweight": packed, "qzeros": zero_words, "scales": scales.t().half(), "g_idx": (order // 32).int()}
        return {stem + name: one for name, one in tensors.items()}

    scheme = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": False}
    scheme |= {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    found = ours(rewrite(plain, tmp_path / "gptq", change, scheme)).state_dict()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=0)


def test_awq_is_read_by_its_published_layout(plain, tmp_path):
    expected = {}

    def change(stem, weight):
        codes, scales, zeros = affine(weight, 4, 32)
        expected[f"{stem}weight"] = (codes - zeros.repeat_interleave(32, 1)) * scales.repeat_interleave(32, 1)

        def interleaved(numbers):  # neighbours 0 to 7 lie at 0, 4, 1, 5, 2, 6, 3, 7
            return pack(numbers.view(numbers.shape[0], -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 4)

        tensors = {"qweight": interleaved(codes.t().contiguous()), "qzeros": interleaved(zeros.t().contiguous())}
        return {stem + name: one for name, one in tensors.items()} | {f"{stem}scales": scales.t().half()}

    scheme = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    folder = rewrite(plain, tmp_path / "awq", change, scheme)
    found = ours(folder).state_dict()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=0)
    say(folder, quantization_config=scheme | {"version": "gemv"})
    with pytest.raises(UserError, match="awq with 4 bits in the layout gemv cannot be read"):
        ours(folder)


# compressed-tensors


SCHEMES = {
    "pack-quantized, groups": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "pack-quantized, rows": ("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "pack-quantized, asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "int-quantized": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "float-quantized": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "float-quantized, blocks": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32]},
    ),
}


@pytest.mark.parametrize("kind", SCHEMES)
def test_compressed_tensors_are_read_as_their_library_decompresses_them(plain, tmp_path, kind):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    name, settings = SCHEMES[kind]
    arguments = QuantizationArgs(**settings)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    compressor = BaseCompressor.get_value_from_registry(name)
    expected = {}

    def change(stem, weight):
        outputs, inputs = weight.shape
        if arguments.strategy == "group":
            parts = weight.view(outputs, -1, arguments.group_size)
            low, high = parts.amin(-1), parts.amax(-1)
        elif arguments.strategy == "channel":
            low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        elif arguments.strategy == "block":
            parts = weight.view(outputs // 32, 32, inputs // 32, 32)
            low, high = parts.amin((1, 3)), parts.amax((1, 3))
        else:
            low, high = weight.min().reshape(1), weight.max().reshape(1)
        scale, zero = calculate_qparams(low, high, arguments)
        state = {"weight": weight, "weight_scale": scale}
        if not arguments.symmetric:
            state["weight_zero_point"] = zero
        packed = compressor.compress(state, scheme)
        expected[f"{stem}weight"] = compressor.decompress(dict(packed), scheme)["weight"]
        return {stem + key: one for key, one in packed.items()}

    config = {"quant_method": "compressed-tensors", "format": name, "quantization_status": "compressed"}
    config["config_groups"] = {"group_0": json.loads(scheme.model_dump_json())}
    found = ours(rewrite(plain, tmp_path / "ct", change, config)).state_dict()
    for key, weight in expected.items():
        torch.testing.assert_close(found[key], weight.float(), rtol=1e-5, atol=1e-7)


# refusals


@pytest.mark.parametrize("method", ["aqlm", "hqq", "quip-magic", None, 7])
def test_an_unknown_way_of_quantizing_is_refused_before_anything_is_loaded(plain, tmp_path, method):
    folder = shutil.copytree(plain, tmp_path / "odd")
    say(folder, quantization_config={"quant_method": method, "bits": 2})
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="were quantized by"):
        read_facts(str(folder))
    with pytest.raises(UserError, match="were quantized by"):
        load.load_config(Run(model=str(folder), data="x"))


DAMAGES = {
    "scales missing": (lambda t: t.pop(next(n for n in t if n.endswith("scale_inv"))), "in fp8 without scales"),
    "scales of another shape": (
        lambda t: t.update({n: o[:1] for n, o in t.items() if n.endswith("scale_inv")}),
        "does not fit the quantized weight",
    ),
    "weight missing": (
        lambda t: t.pop("model.layers.0.mlp.up_proj.weight"),
        "but no model.layers.0.mlp.up_proj.weight",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_parts_that_are_missing_or_do_not_fit_are_named(plain, tmp_path, damage):
    folder = rewrite(plain, tmp_path / "fp8", to_fp8, FP8_SCHEME)
    tensors = load_file(folder / "model.safetensors")
    change, words = DAMAGES[damage]
    change(tensors)
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=words):
        ours(folder)


def test_whole_numbers_without_scales_are_not_taken_for_weights(plain, tmp_path):
    folder = rewrite(plain, tmp_path / "odd", lambda stem, one: {f"{stem}weight": one.to(torch.int8)}, {})
    with pytest.raises(UserError, match="as I8 without what is needed to read them"):
        ours(folder)


def test_weights_that_were_made_whole_are_read_whatever_the_config_still_says(plain, tmp_path):
    folder = shutil.copytree(plain, tmp_path / "dequantized")
    say(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert torch.equal(logits(ours(folder)), logits(theirs(plain)))


def test_the_planner_knows_an_ordinary_model(plain, tmp_path):
    folder = rewrite(plain, tmp_path / "fp8", to_fp8, FP8_SCHEME)
    assert read_facts(str(folder)).parameters == read_facts(str(plain)).parameters
    assert not hasattr(load.load_config(Run(model=str(folder), data="x")), "quantization_config")


@pytest.mark.parametrize("method", ["qlora", "lora", "full"])
def test_a_quantized_base_is_trained_and_the_result_is_an_ordinary_model(plain, tmp_path, method):
    from tiny import write_all
    from tunesmith.config.load import load as load_run
    from tunesmith.run.assemble import assemble
    from tunesmith.run.merge import merge_run
    from tunesmith.run.start import prepare_run
    from tunesmith.train.loop import train

    base = by_bitsandbytes(plain, tmp_path / "base", **NF4, bnb_4bit_use_double_quant=True)
    shutil.copy(plain / "chat_template.jinja", base)
    paths = {"data": [{"path": str(tmp_path / "train.jsonl")}], "eval": [], "output": str(tmp_path / "run")}
    write_all(tmp_path, base, method=method, **paths, steps=2)
    (tmp_path / "run").mkdir()
    train(assemble(prepare_run(load_run(tmp_path / "run.yaml").run, warn=print)), lambda _: None)
    written = tmp_path / "run" / "model"
    if method != "full":
        written = merge_run(tmp_path / "run", tmp_path / "merged").folder
    assert "quantization_config" not in json.loads((written / "config.json").read_text())
    moved = (logits(theirs(written)) - logits(theirs(base))).norm() / logits(theirs(base)).norm()
    assert 1e-4 < moved < 0.5
