from __future__ import annotations

import os
from types import SimpleNamespace

import plain_flash4
import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from tunesmith.cli.display import Display
from tunesmith.measure.bench import Workload, batches, build, plan_for
from tunesmith.parallel.compile import compiled, news
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

    layers = [compiled(breaks, "OddLayer", whole=True) for _ in range(3)]
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
    job = SimpleNamespace(
        plan=SimpleNamespace(precision="fp32"),
        run=SimpleNamespace(max_grad_norm=1.0, seed=0),
        loader=SimpleNamespace(total_steps=2),
        model=None, calling=None, optimizer=None, device=torch.device("cpu"), rank=0, shape=None,
    )  # fmt: skip
    running = loop._Loop(job, said.append, 0.0, None)
    assert running._tell_of_compiling() == 0.0
    compiled(lambda x: torch._dynamo.graph_break() or x, "StrangeLayer", whole=True)(torch.ones(1))
    seconds = running._tell_of_compiling()
    assert seconds > 0
    assert [event.kind for event in said] == ["warning", "compiled"]
    assert said[1].seconds == round(seconds, 2)
    Display().show(events.Compiled(1, 23.4))
    assert "Compiling layers took 23 s" in capsys.readouterr().out


def test_an_error_of_the_layer_itself_stays_one():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        compiled(lambda x: x @ torch.ones(7, 2), "WrongLayer")(torch.ones(2, 3))


def test_what_was_compiled_is_kept_in_the_cache_and_found_again(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path))

    def layer(x):
        return (x * 3).sin() + 1

    try:
        compiled(layer, "Layer")(torch.ones(5))
        assert news().seconds > 0
        assert any((tmp_path / "compiled").rglob("*.py"))
        assert counters["inductor"]["fxgraph_cache_hit"] == 0
        torch._dynamo.reset()
        compiled(layer, "Layer")(torch.ones(5))
        assert counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"] > 0
    finally:
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)


def test_document_lengths_do_not_compile_anything_again(monkeypatch):
    plain_flash4.install(monkeypatch)
    compile_by(monkeypatch, "aot_eager_decomp_partition")
    workload = Workload("tiny", "lora", 2, 96, is_packed=True)
    plan = plan_for(workload, device="cpu", products="plain", recompute_layers=1, compiled=True)
    step = build(workload, plan.changed(attention="flash-attn-4"))
    made = batches(workload, 4)
    documents = {len(batch.micro_batches[0].boundaries) for batch in made}
    assert len(documents) > 1  # of other lengths, and other numbers of them
    step(made[0], 1e-3)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    for batch in made[1:]:
        step(batch, 1e-3)
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]
