"""Quantization-aware training: the exported file holds, bit for bit, the weights that training computed with."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from pydantic import ValidationError

from export.models import make_run
from families import tiny_model
from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.evaluate.loss import overall
from tunesmith.export.engines import Transformers
from tunesmith.export.export import export_run
from tunesmith.model.fake_quantize import FakeQuantization
from tunesmith.model.lora_modules import LoraLinear
from tunesmith.run.evaluate import evaluate_run
from tunesmith.run.folder import read_run, read_summary
from tunesmith.run.open import open_run

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def aware(llama, tmp_path_factory):
    """A LoRA run on the upper of two layers, trained for int4."""
    return make_run(tmp_path_factory.mktemp("aware"), llama, quantization_aware="int4", lora={"rank": 4, "layers": "1"})


def used(model, name):
    """The weight that a linear computes with: what it makes of ones and zeros."""
    linear = model.get_submodule(name)
    inputs = (linear.base if isinstance(linear, LoraLinear) else linear).in_features
    with torch.no_grad():
        return linear(torch.eye(inputs)).t()


NAMES = [f"model.layers.{n}.{one}" for n in (0, 1) for one in ("self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj")]


def check_written(run, folder, tolerance=0.0):
    mine, written = open_run(run).model, Transformers(folder).model
    for name in NAMES:
        expected = used(mine, name)
        torch.testing.assert_close(used(written, name), expected, rtol=tolerance, atol=0, msg=name)
        if not tolerance:  # one scale for 64 weights
            assert len(expected[0, :64].unique()) <= 16


def test_the_file_holds_the_weights_that_training_computed_with(aware, tmp_path):
    made = export_run(aware, "compressed-tensors", out=tmp_path / "out")
    assert made.kind == "int4"  # what it was trained for, where nothing else is asked
    assert made.proof is not None
    assert made.proof.precision == "bf16"  # rounding has no part in the difference
    assert made.proof.divergence < 1e-3
    check_written(aware, tmp_path / "out")


def test_what_is_evaluated_later_is_what_was_evaluated_in_training(aware):
    _, after, _ = evaluate_run(aware, read_run(aware))
    assert overall(after) == pytest.approx(read_summary(aware)["held_out_after"], rel=1e-5)


@slow
def test_it_loses_less_to_rounding_than_a_run_that_knew_nothing_of_it(llama, tmp_path):
    settings = {"learning_rate": 5e-3, "steps": 16, "method": "full"}
    found = {}
    for kind in (None, "nvfp4"):
        run = make_run(tmp_path / str(kind), llama, **settings, quantization_aware=kind)
        found[kind] = export_run(run, "compressed-tensors", kind="nvfp4", out=tmp_path / f"out-{kind}").proof.perplexity
    assert found["nvfp4"] < found[None]


@slow
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("kind", ["int4", "fp8", "nvfp4"])
def test_every_type_and_method_is_written_as_trained(llama, tmp_path, method, kind):
    rate = 1e-3 if method == "full" else 2e-2
    run = make_run(tmp_path / "run", llama, method=method, learning_rate=rate, quantization_aware=kind)
    export_run(run, "compressed-tensors", kind=kind, out=tmp_path / "out")
    if kind != "fp8":  # of which the engine rounds the inputs, too
        check_written(run, tmp_path / "out", tolerance=2**-8 if kind == "nvfp4" else 0.0)  # it reads nvfp4 into bf16


@slow
@pytest.mark.parametrize("method", ["lora", "full"])
def test_llama_cpp_reads_the_weights_that_training_computed_with(llama, tmp_path, method):
    rate = 1e-3 if method == "full" else 2e-2
    run = make_run(tmp_path / "run", llama, method=method, learning_rate=rate, quantization_aware="q4_0", steps=4)
    made = export_run(run, "gguf", out=tmp_path / "out")
    assert made.kind == "q4_0"
    assert made.proof is None or made.proof.precision == "8 bits"
    mine = open_run(run).model
    reader = gguf.GGUFReader(tmp_path / "out" / "model-q4_0.gguf")
    tensors = {one.name: gguf.quants.dequantize(one.data, one.tensor_type) for one in reader.tensors}
    for name, place in (("self_attn.v_proj", "attn_v"), ("mlp.down_proj", "ffn_down"), ("mlp.up_proj", "ffn_up")):
        np.testing.assert_array_equal(used(mine, f"model.layers.1.{name}").numpy(), tensors[f"blk.1.{place}.weight"])


@slow
def test_a_model_without_plain_linears_is_refused_and_not_trained_as_usual():
    with pytest.raises(UserError, match="the layers of FalconForCausalLM have none"):
        FakeQuantization.of(tiny_model("falcon"), "int4")


def test_layers_compile_with_it():
    from tunesmith.kernels.fake_quantize import fake_quantized_lowrank
    from tunesmith.kernels.rounding import Rounding

    rounding = Rounding("int4", 32)

    def layer(x, w, a, b):
        return fake_quantized_lowrank(x, w, None, a, b, 2.0, rounding).square().sum()

    torch.manual_seed(0)
    x, w, a, b = torch.randn(3, 64), torch.randn(8, 64), torch.randn(2, 64), torch.randn(8, 2)
    found = []
    for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        leaves = [one.clone().requires_grad_() for one in (x, a, b)]
        call(leaves[0], w, leaves[1], leaves[2]).backward()
        found.append([one.grad for one in leaves])
    for plain, compiled in zip(*found, strict=True):
        torch.testing.assert_close(plain, compiled)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "qlora"}, "rounds base and adapter together, which method qlora cannot"),
        ({"lora": {"dora": True}}, r"goes without `lora.dora`"),
        ({"lora": {"init": "pissa"}}, r"goes without `lora.init: pissa`"),
        ({"precision": "fp8"}, "leave `precision: fp8` out"),
    ],
)
def test_what_does_not_go_with_it_is_said(settings, said):
    with pytest.raises(ValidationError, match=said):
        Run(model="m", data="d", quantization_aware="int4", **settings)
