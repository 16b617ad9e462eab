from __future__ import annotations

import dataclasses
import functools
import gc
import weakref

import plain_efficient
import plain_flash4
import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

from tunesmith.errors import UserError
from tunesmith.measure.bench import SHAPES, Workload, batches, build, plan_for, run_of
from tunesmith.model.forward import to_device, token_losses
from tunesmith.parallel.activation import HostStore, checkpointed, offloaded
from tunesmith.parallel.prepare import make_trainable

WORKLOAD = Workload("tiny", "lora", 2, 64)
COMPILED = {"is_compiled": True, "attention": "flash-attn-4"}
WAYS = [
    {"checkpointed_layers": 1},
    {"checkpointed_layers": 2},
    {"checkpointed_layers": 2, "save_attention": True},
    {"checkpointed_layers": 2, "offload_activations": True},
    {"checkpointed_layers": 1, "save_attention": True, "offload_activations": True},
]


def gradients(steps: int = 1, **plan) -> list[torch.Tensor]:
    """Of a tiny model with adapters, after so many forward and backward passes."""
    step = build(
        WORKLOAD,
        plan_for(WORKLOAD, device="cpu", matmul_dtype="plain", checkpointed_layers=0, compiled=False).changed(**plan),
    )
    with torch.no_grad():  # adapters that do something, so that every factor has a gradient
        for parameter in step.optimizer.parameters:
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    for batch in batches(WORKLOAD, steps):
        torch.manual_seed(batch.step)
        inputs = to_device(batch.micro_batches[0], step.device, step.shape)
        token_losses(step.model, inputs, step.spec)[0].backward()
    return [parameter.grad for parameter in step.optimizer.parameters]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_is_kept_does_not_change_gradients(way):
    expected = gradients(steps=2)
    assert all(gradient.abs().max() > 0 for gradient in expected)
    for found, plain in zip(gradients(steps=2, **way), expected, strict=True):
        torch.testing.assert_close(found, plain, rtol=0, atol=0)


@pytest.mark.parametrize("checkpointed_layers", [0, 1, 2])
def test_mlps_in_slices_have_the_same_gradients(checkpointed_layers):
    expected = gradients(steps=2)
    found = gradients(
        steps=2, checkpointed_layers=checkpointed_layers, mlp_slice=50
    )  # of 128 tokens: the last is shorter
    for mine, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-6)


def test_the_wide_tensors_of_a_sliced_mlp_never_exist_for_all_tokens():
    class Widest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            out = function(*arguments, **named or {})
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor) and tensor.ndim > 2 and tensor.shape[-1] == 256:  # gate and up
                    self.most = max(self.most, tensor.shape[-2])
            return out

    def widest(**plan) -> int:
        with Widest() as mode:
            gradients(**plan)
        return mode.most

    assert widest() == 128
    assert widest(mlp_slice=32) == 32
    assert widest(mlp_slice=32, checkpointed_layers=2) == 32


def test_a_layer_without_an_mlp_for_slices_is_named():
    plan = plan_for(WORKLOAD, device="cpu", matmul_dtype="plain", checkpointed_layers=0, compiled=False)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPES["tiny"]))
    for layer in model.model.layers:
        del layer.mlp
    with pytest.raises(UserError, match="but LlamaDecoderLayer has none"):
        make_trainable(model, run_of(WORKLOAD), plan.changed(mlp_slice=8))


@pytest.fixture
def quickly_compiled(monkeypatch):
    """Layers traced, differentiated and cut into forward and backward by the compiler, but without making kernels."""
    plain_flash4.install(monkeypatch)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager_decomp_partition"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def attention_calls(monkeypatch, kernels=plain_flash4) -> list[int]:
    calls, forward = [], kernels._forward
    monkeypatch.setattr(kernels, "_forward", lambda *tensors, **named: calls.append(1) or forward(*tensors, **named))
    return calls


def test_what_compiled_layers_keep_does_not_change_gradients(quickly_compiled, monkeypatch):
    expected = gradients(**COMPILED)
    calls = attention_calls(monkeypatch)
    put, get, sent, wanted = HostStore.put, HostStore.get, [], []

    def noted(store, tensor, *, stays):
        sent.append((tensor.numel(), stays))
        return put(store, tensor, stays=stays)

    monkeypatch.setattr(HostStore, "put", noted)
    monkeypatch.setattr(HostStore, "get", lambda store, kept: wanted.append(kept) or get(store, kept))
    found = gradients(**COMPILED, checkpointed_layers=2, save_attention=True, offload_activations=True)
    assert sent == [(128 * 64, False), (128 * 64, True)]  # the input of each layer, once
    assert len(wanted) == 2
    assert not torch._dynamo.utils.counters["graph_break"]
    assert len(calls) == 2  # kept, not computed again
    for mine, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("attention", "kernels"), [("flash-attn-4", plain_flash4), ("sdpa", plain_efficient)])
def test_kept_attention_is_computed_once(monkeypatch, attention, kernels):
    kernels.install(monkeypatch)
    calls = attention_calls(monkeypatch, kernels)
    for keep, expected in ((False, 4), (True, 2)):
        calls.clear()
        gradients(attention=attention, checkpointed_layers=2, save_attention=keep)
        assert len(calls) == expected


@pytest.mark.parametrize(
    ("is_compiled", "method", "matmul_dtype"),
    [(False, "lora", "plain"), (True, "lora", "plain"), (True, "lora", "fp8"), (True, "qlora", "plain")],
)
def test_a_recomputed_layer_keeps_its_input_alone(is_compiled, method, matmul_dtype, quickly_compiled):
    workload = dataclasses.replace(WORKLOAD, method=method)
    plan = plan_for(workload, device="cpu", matmul_dtype=matmul_dtype, checkpointed_layers=2, compiled=is_compiled)
    step = build(workload, plan.changed(attention="flash-attn-4"))
    inputs = to_device(batches(WORKLOAD, 1)[0].micro_batches[0], step.device, step.shape)
    weights = {tensor.data_ptr() for tensor in (*step.model.parameters(), *step.model.buffers())}
    rotary = {16}  # cosines and sines are the same for all layers
    kept = []
    layers = step.model.model.layers

    def note(tensor):
        if tensor.data_ptr() not in weights and tensor.ndim > 1 and tensor.shape[-1] not in rotary:
            kept.append(tensor.shape)
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        hidden = torch.randn(1, 128, 64, requires_grad=True)
        rope = step.model.model.rotary_emb(hidden, inputs.positions[None])
        layers[1](
            hidden,
            position_embeddings=rope,
            position_ids=inputs.positions[None],
            cu_seq_lens_q=inputs.boundaries,
            max_length_q=inputs.longest,
        ).sum().backward()
    assert kept == [hidden.shape]


def test_offloaded_inputs_are_not_on_the_device_between_the_passes():
    store = HostStore(torch.device("cpu"), block=64)
    layers = [nn.Linear(8, 8) for _ in range(3)]
    forwards = [offloaded(checkpointed(layer.forward), store) for layer in layers]
    hidden = torch.randn(5, 8)
    expected = hidden
    for layer in layers:
        expected = layer(expected)
    expected.sum().backward()
    plain = [layer.weight.grad for layer in layers]
    for _ in range(2):
        passed = []
        x = hidden
        for layer, forward in zip(layers, forwards, strict=True):
            layer.weight.grad = None
            x = forward(x)
            passed.append(weakref.ref(x))
        loss = x.sum()
        del x
        gc.collect()
        assert [tensor() for tensor in passed[:-1]] == [None, None]
        loss.backward()
        for layer, gradient in zip(layers, plain, strict=True):
            torch.testing.assert_close(layer.weight.grad, gradient, rtol=0, atol=0)
        del loss
    assert store.blocks == 9  # 160 bytes in each of three layers, the same for both steps
    assert len(store.free) == store.blocks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1, 31, 32, 33, 200])
def test_what_comes_back_from_host_memory_is_what_went(dtype, size):
    store = HostStore(torch.device("cpu"), block=64)
    tensors = [torch.randn(size).to(dtype) for _ in range(3)]
    kept = [store.put(tensor) for tensor in tensors]
    for one, tensor in zip(reversed(kept), reversed(tensors), strict=True):
        found = store.get(one)
        assert found.dtype == dtype
        assert torch.equal(found, tensor)
    del one, kept
    assert len(store.free) == store.blocks


def test_the_input_that_is_wanted_first_stays_and_the_one_before_it_comes_meanwhile():
    store = HostStore(torch.device("cpu"), block=64)
    below, above = (torch.randn(32) for _ in range(2))
    kept = [store.put(below), store.put(above, stays=True)]
    assert store.blocks == 2
    assert store.get(kept[1]) is above
    assert kept[0].fetched is not None
    assert torch.equal(store.get(kept[0]), below)


def test_a_graph_that_is_never_used_gives_its_host_memory_back():
    store = HostStore(torch.device("cpu"), block=64)
    forward = offloaded(checkpointed(torch.sin), store)
    out = forward(torch.randn(64, requires_grad=True))
    assert len(store.free) == 0
    del out
    gc.collect()
    assert len(store.free) == store.blocks == 4
