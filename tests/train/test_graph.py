"""Recorded passes give what the passes themselves give, in every step, whatever the documents."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tunesmith.measure import bench
from tunesmith.model.forward import Shape, trial_inputs
from tunesmith.parallel import compile
from tunesmith.plan.plan import ForwardSpec
from tunesmith.train import graph
from tunesmith.train.graph import EAGER_STEPS, TRIES, GraphCapture
from tunesmith.train.loop import _Loop

STEPS = EAGER_STEPS + 4
LARGER = {**bench.SHAPES["tiny"], "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
"""Large enough for every kernel."""


@pytest.fixture(autouse=True)
def shapes(monkeypatch):
    if torch.cuda.is_available():
        torch._dynamo.reset()  # a layer's code that tests of decoding compiled is not compiled as here
    monkeypatch.setitem(bench.SHAPES, "larger", LARGER)
    monkeypatch.setitem(bench.SHAPES, "tied", {**bench.SHAPES["tiny"], "tie_word_embeddings": True})


@pytest.fixture
def replayed(monkeypatch):
    """Stands in for CUDA's recording: what was recorded is done again, and writes where it wrote first. Returns how
    often that was."""
    found: list[str] = []

    def recorded(capture: GraphCapture):
        def record(_, forward, backward, *, between):
            forward()
            between()
            backward()

            def replay_forward() -> None:
                found.append("forward")
                forward()

            def replay_backward() -> None:
                found.append("backward")
                assert capture.passes is not None
                held = [weight.grad for weight, _ in capture.passes.gradients]
                for weight, _ in capture.passes.gradients:
                    weight.grad = None
                backward()
                for (weight, place), gradient in zip(capture.passes.gradients, held, strict=True):
                    place.copy_(weight.grad)
                    weight.grad = gradient

            return (replay_forward, replay_backward), (0, 0)

        monkeypatch.setattr(graph, "_beside", lambda rehearse: rehearse())
        monkeypatch.setattr(graph, "_captured", record)
        return found

    return recorded


def results(workload: bench.Workload, *, device: str, prepare=lambda _: None, optimizer="adamw", **changes):
    plan = bench.plan_for(
        workload, device=device, matmul_dtype="plain", checkpointed_layers=0, compiled=device == "cuda"
    )
    step = bench.build(workload, plan.changed(**changes), optimizer=optimizer)
    step.shape = Shape(workload.sequences * workload.length, workload.length)
    prepare(step)
    found = [step(batch, 1e-3) for batch in bench.batches(workload, STEPS)]
    return step, found


def record(step) -> None:
    step.capture = GraphCapture(step.model, step.spec, step.optimizer.parameters)


@pytest.mark.parametrize(
    ("shape", "method", "accumulation_steps", "changes"),
    [
        ("tiny", "lora", 2, {}),
        ("tied", "full", 1, {}),
        ("tiny", "full", 2, {"checkpointed_layers": 2}),
        ("tiny", "lora", 2, {"checkpointed_layers": 2, "offload_activations": True}),
        ("tiny", "full", 2, {"precision": "bf16", "master_weights": True, "optimizer": "sgd"}),
    ],
    ids=str,
)
def test_replayed_steps_are_the_same(replayed, shape, method, accumulation_steps, changes):
    workload = bench.Workload(shape, method, 2, 16, is_packed=True, accumulation_steps=accumulation_steps)
    plain, expected = results(workload, device="cpu", **changes)

    def prepare(step):
        record(step)
        seen.append(replayed(step.capture))

    seen: list[list[str]] = []
    step, found = results(workload, device="cpu", prepare=prepare, **changes)
    assert seen[0] == ["forward", "backward"] * accumulation_steps * (STEPS - EAGER_STEPS)
    for one, other in zip(found, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-6)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
    for weight, other in zip(step.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-4, atol=1e-5)


def test_more_documents_than_there_is_room_for_are_recorded_anew(replayed):
    few, many = bench.Workload("tiny", "lora", 2, 64), bench.Workload("tiny", "lora", 16, 8)
    step, _ = results(few, device="cpu", prepare=lambda step: (record(step), replayed(step.capture)))
    room = step.capture.passes.inputs.boundaries.shape[0]
    assert room < 16
    plain, _ = results(few, device="cpu")
    (batch,) = bench.batches(many, 1)
    assert step(batch, 1e-3).loss == pytest.approx(plain(batch, 1e-3).loss, rel=1e-6)
    assert step.capture.passes.inputs.boundaries.shape[0] > 16


def test_gradients_of_the_micro_batches_before_survive_a_new_recording(replayed):
    few, many = bench.Workload("tiny", "lora", 2, 64), bench.Workload("tiny", "lora", 16, 8)
    (first,), (then,) = bench.batches(few, 1), bench.batches(many, 1)
    batch = replace(
        first,
        micro_batches=(*first.micro_batches, *then.micro_batches),
        target_weight=first.target_weight + then.target_weight,
    )
    step, _ = results(few, device="cpu", prepare=lambda step: (record(step), replayed(step.capture)))
    plain, _ = results(few, device="cpu")
    before = step.capture.passes
    found, expected = step(batch, 1e-3), plain(batch, 1e-3)
    assert step.capture.passes is not before
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)


def test_a_recording_that_was_spoiled_is_made_again(monkeypatch, replayed):
    workload = bench.Workload("tiny", "lora", 2, 64)

    def prepare(step):
        record(step)
        seen.append(replayed(step.capture))
        monkeypatch.setattr(graph, "_beside", lambda rehearse: fail() if tries.pop() else rehearse())

    def fail():
        raise RuntimeError("operation failed due to a previous error during capture")

    tries, seen = [False, True, True], []
    results(workload, device="cpu", prepare=prepare)
    assert seen[0] == ["forward", "backward"] * (STEPS - EAGER_STEPS - 2)
    said = compile.news()
    assert said is None or not said.notes


def test_what_cannot_be_recorded_is_run_as_it_is(monkeypatch):
    def fail(*_):
        try:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(graph, "_beside", fail)
    workload = bench.Workload("tiny", "lora", 2, 64)
    _, expected = results(workload, device="cpu")
    compile.news()
    step, found = results(workload, device="cpu", prepare=record)
    assert [one.loss for one in found] == [other.loss for other in expected]
    assert step.capture.passes is None
    said = compile.news()
    assert said is not None
    assert said.notes == (
        "The passes could not be captured (operation not permitted when stream is capturing); they are run as they "
        "are, which is slower.",
    )


def test_passes_over_shared_prompts_are_not_captured():
    capture = GraphCapture(SimpleNamespace(device=torch.device("cpu")), ForwardSpec("packed"), [])
    inputs = trial_inputs(100, torch.device("cpu"))
    assert not capture.record(replace(inputs, keys=inputs.boundaries, places=inputs.rows))
    assert capture.tries


def test_an_evaluation_that_runs_out_of_memory_gets_that_of_the_passes(monkeypatch):
    capture = GraphCapture(SimpleNamespace(device=torch.device("cpu")), ForwardSpec("packed"), [])
    tried: list[int] = []

    def evaluate(step, *_):
        tried.append(step)
        if capture.passes is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return SimpleNamespace(loss=1.0, seconds=0.0)

    loop = object.__new__(_Loop)
    loop.job = SimpleNamespace(evaluate=evaluate, model=torch.nn.Linear(1, 1))
    loop.train_step = SimpleNamespace(capture=capture)
    loop.done, loop.observe, loop.alerts = 7, lambda event: None, SimpleNamespace(see=lambda event: [])
    capture.passes = object()
    loop._evaluate()
    assert loop.metric_at == (7, 1.0)
    assert tried == [7, 7]
    monkeypatch.setattr(capture, "give_up", lambda: False)
    capture.passes = object()
    with pytest.raises(torch.OutOfMemoryError):
        loop._evaluate()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("method", "accumulation_steps", "changes"),
    [
        ("lora", 2, {}),
        ("lora", 1, {"matmul_dtype": "fp8", "checkpointed_layers": 2}),
        ("lora", 2, {"checkpointed_layers": 2, "offload_activations": True}),
        ("qlora", 2, {"matmul_dtype": "fp8"}),
        ("qlora", 1, {"matmul_dtype": "fp8", "checkpointed_layers": 3, "offload_activations": True, "mlp_slice": 256}),
        ("full", 1, {"master_weights": True, "optimizer_states": "fp32"}),
        ("full", 1, {"matmul_dtype": "fp8"}),
        ("full", 1, {"checkpointed_layers": 3, "offload_activations": True}),
    ],
    ids=str,
)
def test_replayed_steps_are_the_same_on_a_gpu(method, accumulation_steps, changes):
    workload = bench.Workload("larger", method, 2, 512, is_packed=True, accumulation_steps=accumulation_steps)
    storage = {"storage": "nf4"} if method == "qlora" else {}
    _, expected = results(workload, device="cuda", **changes, **storage)
    compile.news()
    step, found = results(workload, device="cuda", prepare=record, **changes, **storage)
    said = compile.news()
    assert said is None or not said.notes, said
    assert step.capture.passes is not None
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.loss == pytest.approx(other.loss, rel=2e-3), (index, found, expected)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=0.03), (index, found, expected)


def test_what_adds_up_a_gradient_is_made_anew_while_an_earlier_pass_is_held():
    weight = torch.nn.Parameter(torch.ones(2, 3))
    held, place = weight * 2, weight.data_ptr()
    accumulator = held.grad_fn.next_functions[0][0]
    assert (weight * 2).grad_fn.next_functions[0][0] is accumulator
    graph._renew_accumulators([weight])
    other = weight * 3
    assert other.grad_fn.next_functions[0][0] is not accumulator
    assert weight.data_ptr() == place
    other.sum().backward()
    held.sum().backward()
    assert torch.equal(weight.grad, torch.full((2, 3), 5.0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_passes_are_captured_while_an_earlier_one_is_held():
    """As torch 2.11 does of a layer that it could not compile."""
    held = []

    def prepare(step):
        record(step)
        held.extend(weight * 1 for weight in step.optimizer.parameters)

    step, _ = results(bench.Workload("larger", "lora", 2, 512), device="cuda", prepare=prepare)
    assert held
    assert step.capture.passes is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_logits_lie_in_the_pool_of_the_passes():
    workload = bench.Workload("larger", "lora", 2, 512)
    step, _ = results(workload, device="cuda", prepare=record, checkpointed_layers=3)
    room = step.capture.room
    assert room.nbytes == 2 * 512 * LARGER["vocab_size"] * 2
    pool = next(
        segment
        for segment in torch.cuda.memory_snapshot()
        if segment["address"] <= room.data_ptr() < segment["address"] + segment["total_size"]
    )
    assert tuple(pool["segment_pool_id"]) != (0, 0)
    assert room.data_ptr() + room.nbytes <= pool["address"] + pool["total_size"]
    assert step.capture.idle_bytes >= room.nbytes  # the backward pass was free to use it


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_replay_drops_what_the_pass_itself_would(monkeypatch):
    """Until this was seen, rules.may_capture has no dropout."""
    monkeypatch.setattr(bench, "Lora", partial(bench.Lora, dropout=0.3))
    workload = bench.Workload("larger", "lora", 2, 512, accumulation_steps=2)
    _, expected = results(workload, device="cuda")
    _, found = results(workload, device="cuda", prepare=record)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=0.01), (index, found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("changes", [{}, {"checkpointed_layers": 2, "offload_activations": True}], ids=str)
@pytest.mark.parametrize("failures", [1, TRIES])
def test_a_recording_that_fails_on_a_gpu_leaves_nothing_open(failures, changes, monkeypatch):
    """Torch leaves its stream, its pool and the state of random numbers as they are when CUDA ends a recording."""
    monkeypatch.setattr(compile._news, "said", set())  # the same thing is said once only
    workload = bench.Workload("larger", "lora", 2, 512)
    left = [True] * failures

    def spoil(*_):
        if torch.cuda.is_current_stream_capturing() and left:
            left.pop()
            torch.ones((), device="cuda").item()

    def prepare(step):
        record(step)
        step.model.base_model.layers[-1].register_forward_pre_hook(spoil)  # inputs of layers below are on their way

    _, expected = results(workload, device="cuda", **changes)
    before = torch.cuda.current_stream()
    step, found = results(workload, device="cuda", prepare=prepare, **changes)
    assert not left
    assert (step.capture.passes is not None) == (failures < TRIES)
    said = compile.news()
    assert ("not permitted" in "".join(said.notes if said else ())) == (failures == TRIES), said
    assert torch.cuda.current_stream() == before
    torch.rand(8, device="cuda")
    for one, other in zip(found, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=2e-3)
    step.capture.passes = None
    gc.collect()
    torch.cuda.empty_cache()
    assert {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()} == {(0, 0)}
