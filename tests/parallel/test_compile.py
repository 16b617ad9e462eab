from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import plain_efficient
import plain_flash4
import pytest
import torch
import torch._dynamo.backends.common
from torch._dynamo.utils import counters

from families import tiny_config
from tunesmith.cli.display import Display
from tunesmith.data.loader import PackedDocument, micro_batch_of
from tunesmith.data.types import StepBatch
from tunesmith.measure.bench import Workload, build, build_step, plan_for, run_of
from tunesmith.model.fuse import fuse
from tunesmith.model.rotary import fuse_rope
from tunesmith.parallel import prepare
from tunesmith.parallel.compile import _own_code, compiled, news, structure_of, tell
from tunesmith.train import events, loop


@pytest.fixture(autouse=True)
def _from_the_start():
    torch._dynamo.reset()
    counters.clear()
    news()
    yield
    torch._dynamo.reset()
    news()


def compile_by(monkeypatch, backend) -> None:
    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: whole(function, backend=backend, **options))


def test_what_does_not_compile_runs_as_it_is_and_is_named_once():
    def breaks(x):
        torch._dynamo.graph_break()
        return x + 1

    layers = [compiled(breaks, "OddLayer", fullgraph=True) for _ in range(3)]
    x = torch.zeros(3)
    for layer in layers:
        x = layer(x)
    assert x.tolist() == [3.0, 3.0, 3.0]
    found = news()
    assert len(found.notes) == 1
    assert found.notes[0].startswith("OddLayer could not be compiled (")
    assert found.notes[0].endswith("; it is run as it is, which is right but slower.")
    assert layers[0](x).tolist() == [4.0, 4.0, 4.0]
    assert news() is None


def test_layers_like_one_that_does_not_compile_are_not_tried(monkeypatch):
    tried = []

    def refuse(graph, inputs):
        tried.append(graph)
        raise NotImplementedError("no such kernel")

    def layer(number: int, wide: bool = False) -> torch.nn.Module:
        made = torch.nn.Linear(4, 8 if wide else 4)
        made.layer_idx = number
        return made

    compile_by(monkeypatch, refuse)
    layers, failed = [layer(0), layer(1), layer(2), layer(3, wide=True)], set()
    for one in layers:
        one.forward = compiled(one.forward, "Linear", kind=structure_of(one), failed=failed)
    x = torch.ones(2, 4)
    found = [one(x) for one in layers for _ in range(2)]
    assert len(tried) == 2  # one of each kind
    torch.testing.assert_close(found[2], torch.nn.functional.linear(x, layers[1].weight, layers[1].bias))


def test_a_backward_pass_that_does_not_compile_falls_back_too(monkeypatch):
    def refuse(graph, inputs):
        raise NotImplementedError("no such kernel")

    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=refuse)
    compile_by(monkeypatch, backend)
    layer = compiled(lambda x: x.sin() * x, "OneWayLayer")
    x = torch.ones(3, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(3).cos() + torch.ones(3).sin())
    assert "no such kernel" in news().notes[0]


def test_a_run_tells_how_long_compiling_took_and_what_did_not_work(monkeypatch, capsys):
    said = []
    running = SimpleNamespace(observe=said.append, done=1)
    loop._Loop._tell_of_compiling(running, news())
    assert said == []
    compiled(lambda x: torch._dynamo.graph_break() or x, "StrangeLayer", fullgraph=True)(torch.ones(1))
    found = news()
    loop._Loop._tell_of_compiling(running, found)
    assert found.seconds > 0
    assert [event.kind for event in said] == ["warning", "compiled"]
    assert said[1].seconds == round(found.seconds, 2)
    tell("Something else did not work.")
    loop._Loop._tell_of_compiling(running, news())
    assert [event.kind for event in said[2:]] == ["warning"]
    Display().show(events.Compiled(1, 23.4))
    assert "Compiling layers took 23 s" in capsys.readouterr().out


def test_an_error_of_the_layer_itself_stays_one():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        compiled(lambda x: x @ torch.ones(7, 2), "WrongLayer")(torch.ones(2, 3))


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path))
    return tmp_path / "compiled"


def test_the_compiler_keeps_its_cache_with_ours(own_cache, monkeypatch):
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

    compiled(torch.sin, "Layer")
    assert cache_dir() == str(own_cache)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # as torch itself sets it when imported
    compiled(torch.sin, "Layer")
    assert cache_dir() == str(own_cache)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(own_cache / "elsewhere"))  # what a user says stands
    compiled(torch.sin, "Layer")
    assert cache_dir() == str(own_cache / "elsewhere")


@pytest.mark.slow
def test_what_was_compiled_is_kept_in_the_cache_and_found_again(own_cache):
    def layer(x):
        return (x * 3).sin() + 1

    compiled(layer, "Layer")(torch.ones(5))
    assert news().seconds > 0
    assert any(own_cache.rglob("*.py"))
    assert counters["inductor"]["fxgraph_cache_hit"] == 0
    torch._dynamo.reset()
    compiled(layer, "Layer")(torch.ones(5))
    assert counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"] > 0


@pytest.mark.slow
def test_a_function_with_its_own_backward_pass_is_found_again_and_not_mistaken_for_another(own_cache):
    def times(factor: float) -> type[torch.autograd.Function]:
        class Times(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.sin()

            @staticmethod
            def backward(ctx, d_out):
                return d_out * factor

        return Times

    for factor, hits in ((3.0, 0), (3.0, 1), (5.0, 1)):
        torch._dynamo.reset()
        function, x = times(factor), torch.ones(5, requires_grad=True)
        compiled(lambda x, function=function: function.apply(x) + 1, "Layer")(x).sum().backward()
        assert x.grad.tolist() == [factor] * 5
        assert counters["aot_autograd"]["autograd_cache_hit"] == hits
        assert counters["aot_autograd"]["autograd_cache_bypass"] == 0


def test_our_own_code_is_part_of_what_is_looked_up(monkeypatch):
    with torch.compiler.config.patch(cache_key_tag="mine"):
        for _ in range(2):
            compiled(torch.sin, "Layer")
            assert torch.compiler.config.cache_key_tag == f"mine{_own_code()}"
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path.name == "flash4.py"))
    assert _own_code.__wrapped__() != _own_code()


def batch_of(*lengths: int) -> StepBatch:
    """A step over documents of these lengths, every token a target."""
    documents = [PackedDocument(np.arange(n) % 512, np.ones(n, dtype=np.float32), 0, "here") for n in lengths]
    targets = float(sum(lengths) - len(lengths))
    return StepBatch(0, 0.0, (micro_batch_of(documents),), target_weight=targets, tokens=sum(lengths))


def pairs_of(*sizes: tuple[int, int, int]) -> StepBatch:
    """A step over pairs with such prompts and answers, of which the second begins with the first one's prompt."""
    documents = [
        PackedDocument(np.arange(n) % 512, np.ones(n, dtype=np.float32), 0, "here", part, shared=part * prompt)
        for prompt, *answers in sizes
        for part, n in enumerate((prompt + answers[0], answers[1]))
    ]
    targets = float(sum(len(one.ids) - 1 for one in documents))
    batch = micro_batch_of(documents)
    assert batch.keys is not None
    return StepBatch(0, 0.0, (batch,), target_weight=targets, tokens=len(batch.tokens))


@pytest.mark.parametrize(
    ("attention", "rotates", "matmul_dtype"),
    [
        pytest.param("flash-attn-4", False, "plain", marks=pytest.mark.slow),
        pytest.param("flash-attn-4", False, "fp8", marks=pytest.mark.slow),
        pytest.param("flash-attn-4", True, "plain", marks=pytest.mark.slow),
        ("flash-attn-4", True, "fp8"),
        ("sdpa", True, "plain"),
    ],
)
def test_document_lengths_do_not_compile_anything_again(monkeypatch, attention, rotates, matmul_dtype):
    made = [batch_of(*lengths) for lengths in ((50, 46), (96,), (7,) * 11, (1, 90), (40, 30, 20))]
    assert_compiled_once(monkeypatch, made, attention, rotates, matmul_dtype)


@pytest.mark.parametrize("attention", ["flash-attn-4", pytest.param("sdpa", marks=pytest.mark.slow)])
def test_pairs_with_their_prompts_once_do_not_compile_anything_again(monkeypatch, attention):
    made = [pairs_of(*sizes) for sizes in (((20, 9, 11),), ((10, 20, 30), (8, 3, 4)), ((30, 2, 50),), ((9, 9, 9),) * 2)]
    assert_compiled_once(monkeypatch, made, attention, True, "plain")


def rotate_as_on_a_gpu(monkeypatch) -> list[int]:
    """How many attentions of each layer compute RoPE by our kernel."""
    rotated = []

    def fuse_and_rotate(model, **named):
        fuse(model, **named)
        if hasattr(model, "self_attn"):  # a layer, and not what surrounds them
            rotated.append(fuse_rope(model, torch.float32))

    monkeypatch.setattr(prepare, "fuse", fuse_and_rotate)
    return rotated


def assert_compiled_once(monkeypatch, made, attention, rotates, matmul_dtype):
    rotated = rotate_as_on_a_gpu(monkeypatch) if rotates else []
    (plain_flash4 if attention == "flash-attn-4" else plain_efficient).install(monkeypatch)
    compile_by(monkeypatch, "aot_eager_decomp_partition")
    workload = Workload("tiny", "lora", 1, 96)
    plan = plan_for(workload, device="cpu", matmul_dtype=matmul_dtype, checkpointed_layers=1, compiled=True)
    step = build(workload, plan.changed(attention=attention))
    assert rotated == ([1, 1] if rotates else [])
    step(made[0], 1e-3)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    for batch in made[1:]:
        step(batch, 1e-3)
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


@pytest.mark.parametrize(
    ("family", "method"),
    [pytest.param("gemma3_text", "lora", marks=pytest.mark.slow), ("qwen3", "lora"), ("qwen3_moe", "qlora")],
)
def test_layers_of_a_kind_are_compiled_once(monkeypatch, family, method):
    """However many there are: nothing in their code is the number of a layer, or of a router."""
    plain_flash4.install(monkeypatch)
    compile_by(monkeypatch, "aot_eager")
    rotated = rotate_as_on_a_gpu(monkeypatch)
    workload, sizes = Workload("tiny", method, 1, 96), {"hidden_size": 64, "moe_intermediate_size": 64}
    plan = plan_for(workload, device="cpu", matmul_dtype="plain", checkpointed_layers=0, compiled=True)
    graphs = []
    for times in (2, 3):
        kinds = {"layer_types": ["sliding_attention", "full_attention"] * times} if family == "gemma3_text" else {}
        config = tiny_config(family, num_hidden_layers=2 * times, vocab_size=512, **sizes, **kinds)
        step = build_step(config, run_of(workload), plan.changed(attention="flash-attn-4"))
        torch._dynamo.reset()
        counters.clear()
        step(batch_of(50, 46), 1e-3)
        graphs.append(counters["stats"]["unique_graphs"])
        assert not counters["graph_break"]
    assert rotated == [1] * 10
    assert graphs[0] == graphs[1] > 0
