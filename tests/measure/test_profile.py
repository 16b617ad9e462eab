"""A profile is a trace that opens, regions that cover the step, and memory that adds up to the peak."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from tiny import write_all
from tunesmith.measure.profile import (
    CATEGORIES,
    REGIONS,
    WORDS,
    Analysis,
    MemoryPicture,
    analyse,
    kind_of,
    largest_region,
    memory_svg,
    model_flops,
    peak_tflops,
    profile_job,
    read_trace,
    what_bounds,
)


def profile(tiny_model: Path, folder: Path, *changes: str):
    """A profile of the tiny model, its folder, its job."""
    from tunesmith.assemble import assemble, prepare_run
    from tunesmith.config.load import load

    write_all(folder, tiny_model)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("TUNESMITH_CACHE", str(folder / "cache"))
        (folder / "run").mkdir()
        run = load("run.yaml", ["lora.dropout=0", *changes]).run
        job = assemble(prepare_run(run, warn=lambda _: None))
        return profile_job(job, folder / "found", steps=2), folder / "found", job


@pytest.fixture(scope="module")
def profiled(tiny_model, tmp_path_factory):
    return profile(tiny_model, tmp_path_factory.mktemp("profile"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_profile_on_a_gpu_covers_the_step_and_adds_up(tiny_model, tmp_path):
    report, folder, _ = profile(tiny_model, tmp_path, "device=cuda", "precision=auto")
    assert report.analysis.coverage > 0.95
    assert sum(report.analysis.memory.at_peak.values()) == pytest.approx(report.measured_peak, rel=0.02)
    assert any(event.get("cat") == "kernel" for event in read_trace(folder / "trace.json.gz"))


def test_the_trace_is_what_perfetto_reads(profiled):
    _, folder, _ = profiled
    events = read_trace(folder / "trace.json.gz")
    for event in events:
        assert event["ph"] in "XBEiIMCsftbnePNOD"
        assert isinstance(event["name"], str)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert {"ts", "pid", "tid"} <= event.keys()
    named = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert named >= {"step", *REGIONS} - {"communication", "wait"}
    assert sum(event["name"] == "step" for event in events if event.get("cat") == "user_annotation") == 2


def test_regions_cover_the_step(profiled, tiny_model, tmp_path):
    found = profiled[0].analysis
    assert sum(found.host_seconds.values()) == pytest.approx(found.coverage * found.step_seconds, rel=0.01)
    for again in range(3):  # on a busy machine another process may have come in between
        if found.coverage <= 0.95:
            found = profile(tiny_model, tmp_path / str(again))[0].analysis
    assert found.coverage > 0.95


def test_memory_adds_up_to_the_peak_and_knows_weights_and_states_exactly(profiled):
    report, _, job = profiled
    memory = report.analysis.memory
    assert sum(memory.at_peak.values()) == memory.peak_bytes == report.measured_peak
    totals = [sum(sizes) for sizes in zip(*memory.bytes.values(), strict=True)]
    assert max(totals) == memory.peak_bytes
    trained = sum(parameter.nbytes for parameter in job.optimizer.parameters)
    assert memory.at_peak["optimizer"] == pytest.approx(2 * trained, rel=0.02)  # two moments, and step counts
    assert memory.at_peak["weights"] >= sum(parameter.nbytes for parameter in job.model.parameters())
    assert max(memory.bytes["gradients"]) == pytest.approx(trained, rel=0.1)
    assert totals[-1] < totals[0] * 1.1  # a step gives back what it takes


def test_the_independent_count_of_the_profiler_has_the_same_peak(profiled):
    report, folder, _ = profiled
    events = read_trace(folder / "trace.json.gz")
    starts = [event["ts"] for event in events if event["name"] == "step" and event.get("cat") == "user_annotation"]
    last = max(starts)
    counted = [
        event["args"]["Total Allocated"]
        for event in events
        if event["name"] == "[memory]" and event["args"]["Device Type"] == 0 and event["ts"] >= last
    ]
    static = report.analysis.memory.at_peak["weights"] + report.analysis.memory.at_peak["optimizer"]
    assert report.analysis.memory.peak_bytes == pytest.approx(static + max(counted), rel=0.01)


def test_the_picture_is_valid_and_has_every_category(profiled):
    _, folder, _ = profiled
    root = ElementTree.parse(folder / "memory.svg").getroot()
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == list(CATEGORIES)


def test_an_empty_step_has_a_picture_too():
    nothing = dict.fromkeys(CATEGORIES, 0)
    picture = MemoryPicture([0.0, 0.0], {name: [0, 0] for name in CATEGORIES}, 0, nothing)
    ElementTree.fromstring(memory_svg(picture))


def test_flops_are_those_of_the_published_count(profiled):
    from tunesmith.plan.models import read_facts

    job = profiled[2]
    facts = read_facts(job.run.model)
    batch = job.loader.step(0)
    lora = model_flops(facts, job.run, batch)
    full = model_flops(facts, job.run.model_copy(update={"method": "full"}), batch)
    assert 4 * facts.active * batch.tokens < lora < 4 * facts.parameters * batch.tokens * 1.5
    assert 1.2 < full / lora < 1.5


def test_the_peak_is_that_of_the_arithmetic_used(profiled):
    plan = profiled[2].plan.model_copy(update={"precision": "bf16"})
    assert peak_tflops(plan, "NVIDIA H200") == 989
    assert peak_tflops(plan.model_copy(update={"products": "fp8"}), "NVIDIA H200") == 1979
    assert peak_tflops(plan, "a GPU of next year") is None


# a GPU's trace, written down


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
    assert found.kinds == pytest.approx({"products": 30e-6, "attention": 20e-6, "other": 45e-6})
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


def test_the_summary_begins_with_the_region_that_takes_most(profiled):
    report = profiled[0]
    seconds = report.analysis.host_seconds
    most = max(seconds, key=seconds.get)
    assert report.bound.startswith(f"{WORDS[most]} takes most: {seconds[most] / report.analysis.step_seconds:.0%} of a")
    assert largest_region(case()) == "The backward pass takes most: 67% of the GPU's time."
    in_loss = case(device_seconds={}, host_seconds={"forward": 0.1, "loss": 0.8})
    assert largest_region(in_loss) == "The loss takes most: 80% of a step."


def case(**changes) -> Analysis:
    usual = {
        "step_seconds": 1.0,
        "host_seconds": {"forward": 1.0},
        "device_seconds": {"forward": 0.3, "backward": 0.6},
        "coverage": 1.0,
        "busy": 0.99,
        "kernels": [],
        "kinds": {"products": 0.6, "attention": 0.1, "other": 0.2},
        "calls": 1000,
        "memory": MemoryPicture([], {}, 0, {}),
    }
    return Analysis(**usual | changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "compute"),
        ({"busy": 0.4, "host_seconds": {"data": 0.5}}, "data"),
        ({"busy": 0.4}, "host"),
        ({"kinds": {"products": 0.3, "communication": 0.5}}, "communication"),
        ({"device_seconds": {"optimizer": 0.5, "forward": 0.4}}, "optimizer"),
        ({"kinds": {"products": 0.2, "other": 0.7}}, "memory bandwidth"),
        ({"busy": None, "kinds": {"products": 0.2, "other": 0.7}, "calls": 100_000, "device_seconds": {}}, "host"),
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
    assert "in training most of them are recorded" in what_bounds(found, will_replay=True)[1]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm90_xmma_gemm_bf16bf16", "products"),
        ("aten::addmm", "products"),
        ("aten::mul", "other"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication"),
        ("void at::native::vectorized_elementwise_kernel<4>", "other"),
    ],
)
def test_kernels_are_known_by_name(name, kind):
    assert kind_of(name) == kind


def test_files_are_named_in_the_report(profiled):
    report, folder, _ = profiled
    assert sorted(report.files) == sorted(path.name for path in Path(folder).iterdir())
