"""What a trace says of its last whole step, over traces that are written down here."""

from __future__ import annotations

import pytest

from tunesmith.measure.trace import (
    Analysis,
    MemoryPicture,
    analyse,
    kind_of,
    largest_region,
    what_bounds,
)


def mark(name: str, start: float, end: float) -> dict:
    return {"cat": "user_annotation", "ph": "X", "name": name, "ts": start, "dur": end - start, "pid": 1, "tid": 1}


def launched(name: str, launch: float, start: float, end: float, number: int) -> list[dict]:
    arguments = {"correlation": number}
    host = {"cat": "cuda_runtime", "ph": "X", "name": "cudaLaunchKernel", "ts": launch, "dur": 1, "args": arguments}
    kernel = {"cat": "kernel", "ph": "X", "name": name, "ts": start, "dur": end - start, "args": arguments}
    return [host, kernel]


def memory(time: float, address: int, size: int) -> dict:
    return {"name": "[memory]", "ph": "i", "ts": time, "args": {"Device Type": 1, "Addr": address, "Bytes": size}}


GPU_TRACE = [
    mark("step", 0, 100),
    mark("forward", 1, 20),
    mark("step", 1000, 1100),
    mark("data", 1000, 1005),
    mark("forward", 1005, 1020),
    mark("loss", 1020, 1025),
    mark("backward", 1025, 1040),
    mark("optimizer", 1040, 1100),
    *launched("nvjet_tst_256x128", 1006, 1010, 1040, 1),
    *launched("kernel_cutlass_flash_attncute", 1030, 1040, 1060, 2),
    *launched("triton_poi_fused_mul", 1035, 1050, 1070, 3),
    *launched("multi_tensor_apply_kernel", 1041, 1070, 1095, 4),
    memory(1010, 1, 400),  # an activation
    memory(1021, 2, 50),  # of the loss
    memory(1026, 3, 30),  # a gradient
    memory(1027, 4, 20),  # of an activation
    memory(1030, 4, -20),
    memory(1031, 1, -400),
    memory(1032, 2, -50),
    memory(1035, 99, -5),  # was there before
    memory(1045, 5, 60),  # a state of the optimizer
    memory(1090, 3, -30),
]


def test_kernels_on_a_gpu_count_for_the_region_that_started_them():
    found = analyse(GPU_TRACE, on_gpu=True, baseline={"weights": 1000, "other": 10})
    assert found.step_seconds == pytest.approx(95e-6)
    assert found.coverage == 1.0
    assert found.busy == round(85 / 95, 4)  # overlapping kernels count once
    assert found.device_seconds == pytest.approx({"forward": 30e-6, "backward": 40e-6, "optimizer": 25e-6})
    assert found.kinds == pytest.approx({"matmuls": 30e-6, "attention": 20e-6, "other": 45e-6})
    assert found.kernels[0].name == "nvjet_tst_256x128"


def test_copies_to_the_host_do_not_make_a_gpu_look_busy():
    copy = {"cat": "gpu_memcpy", "ph": "X", "name": "Memcpy DtoH (Device -> Pinned)", "ts": 1000, "dur": 100}
    assert analyse([*GPU_TRACE, copy], on_gpu=True, baseline={}).busy == round(85 / 95, 4)


def test_a_step_lasts_as_long_as_its_kernels_whenever_they_were_launched():
    """Step 1 is waited for within its own mark; step 2 is only launched within its."""
    trace = [
        mark("step", 0, 200),
        mark("backward", 0, 20),
        mark("wait", 20, 200),
        *launched("nvjet_a", 5, 10, 110, 1),
        mark("step", 200, 230),
        mark("backward", 200, 230),
        *launched("nvjet_b", 199, 110, 190, 2),  # still of the first
        *launched("nvjet_c", 205, 210, 250, 3),
        *launched("nvjet_d", 210, 260, 310, 4),
    ]
    found = analyse(trace, on_gpu=True, baseline={})
    assert found.step_seconds == pytest.approx(110e-6)
    assert [kernel.name for kernel in found.kernels] == ["nvjet_d", "nvjet_c"]
    assert found.busy == round(90 / 110, 4)
    ahead = [*trace, mark("step", 230, 260), *launched("nvjet_e", 240, 310, 400, 5)]
    found = analyse(ahead, on_gpu=True, baseline={})
    assert found.step_seconds == pytest.approx(90e-6)  # from the end of the kernels before it
    assert found.busy == 1.0


def test_memory_on_a_gpu_is_named_by_where_blocks_are_made_and_freed():
    found = analyse(GPU_TRACE, on_gpu=True, baseline={"weights": 1000, "other": 10}).memory
    assert found.peak_bytes == 1510
    assert found.at_peak == {
        "weights": 1000,
        "optimizer": 0,
        "gradients": 30,
        "activations": 420,
        "loss": 50,
        "other": 10,
    }
    assert {name: sizes[-1] for name, sizes in found.bytes.items()} == {
        "weights": 1000,
        "optimizer": 60,
        "gradients": 0,
        "activations": 0,
        "loss": 0,
        "other": 5,
    }


def case(**changes) -> Analysis:
    usual = {
        "step_seconds": 1.0,
        "host_seconds": {"forward": 1.0},
        "device_seconds": {"forward": 0.3, "backward": 0.6},
        "coverage": 1.0,
        "busy": 0.99,
        "kernels": [],
        "kinds": {"matmuls": 0.6, "attention": 0.1, "other": 0.2},
        "calls": 1000,
        "memory": MemoryPicture([], {}, 0, {}),
    }
    return Analysis(**usual | changes)


def test_the_region_that_takes_most_is_named():
    assert largest_region(case()) == "The backward pass takes most: 67% of the GPU's time."
    in_loss = case(device_seconds={}, host_seconds={"forward": 0.1, "loss": 0.8})
    assert largest_region(in_loss) == "The loss takes most: 80% of a step."


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "compute"),
        ({"busy": 0.4, "host_seconds": {"data": 0.5}}, "data"),
        ({"busy": 0.4}, "host"),
        ({"kinds": {"matmuls": 0.3, "communication": 0.5}}, "communication"),
        ({"device_seconds": {"optimizer": 0.5, "forward": 0.4}}, "optimizer"),
        ({"kinds": {"matmuls": 0.2, "other": 0.7}}, "memory bandwidth"),
        ({"busy": None, "kinds": {"matmuls": 0.2, "other": 0.7}, "calls": 100_000, "device_seconds": {}}, "host"),
    ],
)
def test_one_sentence_says_what_bounds_the_run(changes, expected):
    for will_replay in (False, True):
        word, sentence = what_bounds(case(**changes), will_replay=will_replay)
        assert word == expected
        assert sentence.count(". ") == 0
        assert sentence.endswith(".")


def test_what_training_does_not_wait_for_is_said():
    found = case(busy=0.4)
    assert "larger micro-batches" in what_bounds(found)[1]
    assert "in training most of them are captured" in what_bounds(found, will_replay=True)[1]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm90_xmma_gemm_bf16bf16", "matmuls"),
        ("aten::addmm", "matmuls"),
        ("aten::mul", "other"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication"),
        ("void at::native::vectorized_elementwise_kernel<4>", "other"),
    ],
)
def test_kernels_are_known_by_name(name, kind):
    assert kind_of(name) == kind
