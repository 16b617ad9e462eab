"""A profile is a trace that opens, regions that cover the step, and memory that adds up to the peak."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from tiny import write_all
from tunesmith.measure.picture import memory_svg
from tunesmith.measure.profile import model_flops, peak_tflops, profile_job
from tunesmith.measure.trace import (
    CATEGORIES,
    REGIONS,
    WORDS,
    MemoryPicture,
    read_trace,
)


def profile(tiny_model: Path, folder: Path, *changes: str):
    """A profile of the tiny model, its folder, its job."""
    from tunesmith.config.load import load
    from tunesmith.run.assemble import assemble
    from tunesmith.run.start import prepare_run

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
    assert peak_tflops(plan.model_copy(update={"matmul_dtype": "fp8"}), "NVIDIA H200") == 1979
    assert peak_tflops(plan, "a GPU of next year") is None


def test_the_summary_begins_with_the_region_that_takes_most(profiled):
    report = profiled[0]
    seconds = report.analysis.host_seconds
    most = max(seconds, key=seconds.get)
    assert report.bound.startswith(f"{WORDS[most]} takes most: {seconds[most] / report.analysis.step_seconds:.0%} of a")


def test_files_are_named_in_the_report(profiled):
    report, folder, _ = profiled
    assert sorted(report.files) == sorted(path.name for path in Path(folder).iterdir())
