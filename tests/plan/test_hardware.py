"""Hardware by name: many ways to say it, one result everywhere; what is not understood is a sentence."""

from __future__ import annotations

import json

import pytest

from tunesmith.errors import UserError
from tunesmith.plan import hardware
from tunesmith.plan.catalogue import GPUS, find_gpu
from tunesmith.plan.hardware import Rates, named

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "nodes", "gpus", "name"),
    [
        ("2 nodes of 4 x A100-80G, nvlink, 50 Gbit/s", 2, 4, "A100-80G"),
        ("8xA100-80G x2 nodes, 50 Gbit/s", 2, 8, "A100-80G"),
        ("H200", 1, 1, "H200"),
        ("2 x RTX 4090, 128 GB host memory", 1, 2, "RTX 4090"),
        ("4x4090, pcie", 1, 4, "RTX 4090"),
        ("8 x h100 80GB, 64 cores", 1, 8, "H100"),
    ],
)
def test_descriptions_people_write(text, nodes, gpus, name):
    found = named(text)
    assert (found.nodes, len(found.gpus), found.gpus[0].name) == (nodes, gpus, name)
    assert found.is_named


def test_links_and_speeds_mean_what_they_say():
    found = named("2 nodes of 4 x A100-80G, nvlink, 50 Gbit/s")
    assert (found.link, found.network) == (300e9, 50e9 / 8)
    assert named("2 x A100-80G, pcie").link == 24e9
    assert named("2 x A100-80G, 100 GB/s").link == 100e9
    assert named("H200, 512 GB host memory, 32 cores").memory == 512 * GIB


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A100", "A100-40G or A100-80G"),
        ("RTX 4091", "did you mean RTX 4090"),
        ("2 nodes of 4 x A100-80G", "how fast the link"),
        ("H200, warp drive", "warp drive.*not understood"),
        ("", "blank"),
        ("1000 x T4", "1 to 64"),
        ("T4, 1.2.3 GB/s", "not understood"),
        ("nowhere.yaml", "cannot be read"),
    ],
)
def test_what_is_not_understood_is_one_sentence(text, words):
    with pytest.raises(UserError, match=words):
        named(text)


def test_a_yaml_file_describes_hardware_too(tmp_path):
    file = tmp_path / "h.yaml"
    file.write_text("gpu: A100-80G\ngpus: 4\nnodes: 2\nlink: nvlink\nnetwork: 50 Gbit/s\nhost_memory: 512 GB\n")
    assert named(str(file)) == named("2 nodes of 4 x A100-80G, nvlink, 50 Gbit/s, 512 GB host memory")
    file.write_text(
        "gpu: {name: X1, memory_gib: 48, capability: [9, 0], half_tflops: 400, fp32_tflops: 40, bandwidth_gb: 2000}\n"
    )
    assert named(str(file)).gpus[0].memory == 48 * GIB
    for content, words in {
        "gpus: 2": "gpu",
        "gpu: T4\nspeed: 3": "speed",
        "[": "not YAML",
        "- 1": "should say",
    }.items():
        file.write_text(content)
        with pytest.raises(UserError, match=words):
            named(str(file))


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80G"),
        ("NVIDIA A100-PCIE-40GB", "A100-40G"),
        ("Tesla T4", "T4"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("Tesla V100-SXM2-16GB", "V100-16G"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10G", "A10"),
        ("NVIDIA GeForce RTX 3080 Ti", None),
    ],
)
def test_the_drivers_names_are_known(driver, name):
    found = find_gpu(driver)
    assert (found.name if found else None) == name


def test_the_catalogue_is_sound():
    for gpu in GPUS:
        assert find_gpu(gpu.name) == gpu
        assert (gpu.fp8 > 0) == (gpu.capability >= (8, 9))
        assert gpu.half > gpu.fp32 > 0
        assert gpu.link >= gpu.pcie > 0


def test_measured_rates_are_kept_by_name_and_a_damaged_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path))
    assert hardware.measured_rates() == {}
    rates = Rates(fp32=1e13, half=7e14, bandwidth=4e12, host_link=5e10, is_measured=True)
    (tmp_path / "rates.json").write_text(json.dumps({"NVIDIA H200": rates.model_dump()}))
    assert hardware.measured_rates() == {"NVIDIA H200": rates}
    (tmp_path / "rates.json").write_text("{")
    with pytest.raises(UserError, match="calibrate"):
        hardware.measured_rates()
