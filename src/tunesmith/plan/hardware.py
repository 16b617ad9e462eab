"""What there is to run on: this machine, probed, or machines by name.

Asks the system and the GPU driver, never torch. Named hardware ("2 nodes of 4 x A100-80G, nvlink, 50 Gbit/s") gives
the same result everywhere: nothing of the machine that plans goes into it. Rates come from the catalogue, or were
measured on this machine by `tunesmith plan --calibrate`.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import platform
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError

from tunesmith.cache import cache_folder
from tunesmith.disk import expanded, writing
from tunesmith.errors import UserError
from tunesmith.launch.rank_environment import read_rank_environment
from tunesmith.plan import catalogue
from tunesmith.plan.plan import Part

GIB = 2**30
ELSEWHERE = "make room there, or set TUNESMITH_CACHE to a folder elsewhere"
ATTAINABLE = {"fp32": 0.75, "half": 0.72, "fp8": 0.78}
"""Share of the published rate that large matmuls reach (bf16 on an H200: 0.67 to 0.77; fp8: 0.64 to 0.73 alone, and
0.74 within a step, which the speed model's shapes make of this)."""
COPY = 0.88
"""Share of the published bandwidth that a copy reaches (H200: 0.89)."""
PROCESSOR_LINK = 2e9
"""Bytes a second between ranks on one CPU: gloo over the loopback device."""
CPU_KEY, BETWEEN_NODES, DISK = "CPU", "between nodes", "disk"
"""What has been measured, where it is no GPU's link."""
DISK_RATE = 2e9
"""Bytes a second from and to a disk that nobody has measured: an ordinary NVMe drive's, written as much as read."""
UNKNOWN_NETWORK = 1.25e9
"""Bytes a second between nodes that nobody has measured: 10 Gbit/s."""


class Rates(Part):
    """What a device really does, in operations and bytes a second."""

    fp32: float
    half: float
    """fp16 and bf16."""
    fp8: float = 0.0
    bandwidth: float
    host_link: float
    """To host memory and back, each way."""
    is_measured: bool = False


class Gpu(Part):
    name: str
    memory: int
    """Bytes in all."""
    free: int
    """Bytes free now."""
    capability: tuple[int, int]
    """Compute capability; bf16 needs 8.0, fp8 8.9."""
    rates: Rates | None = None
    """None where the GPU is not known; then a guess is made, and said."""


class Hardware(Part):
    cpu: str
    cores: int
    """Cores this process may use."""
    memory: int
    """Bytes of host memory this process may use."""
    available: int
    """Bytes of it that are free now."""
    has_fast_bf16: bool
    """The CPU has bf16 arithmetic."""
    rates: Rates | None = None
    """Of the CPU, where they were measured."""
    gpus: tuple[Gpu, ...] = ()
    """Of one node; all nodes are equal."""
    nodes: int = 1
    processes: int = 1
    """Ranks of one node, where they were asked for or started; on a CPU they share its cores and memory."""
    link: float = 0.0
    """Bytes a second from one GPU to the others of its node, as published."""
    network: float = 0.0
    """Bytes a second from one node to the others, as published."""
    disk: int = 0
    """Bytes free where runs are written."""
    disk_rate: float = DISK_RATE
    """Bytes a second from and to it, together."""
    has_flash_attention_4: bool = False
    """The package flash-attn-4 is installed."""
    is_named: bool = False
    """Named, not probed: nothing is known of what is free on it now."""

    @property
    def gpu_count(self) -> int:
        return self.nodes * len(self.gpus)


def shared(hardware: Hardware, ranks: int, nodes: int = 1) -> Hardware:
    """The hardware as so many ranks on each node use it: a GPU each, or a part of the CPU."""
    if not 1 <= ranks <= 1024:
        raise UserError(f"{ranks} ranks were asked for; say 1 or more.")
    gpus = hardware.gpus[:ranks]
    return hardware.changed(
        gpus=gpus,
        nodes=nodes,
        processes=ranks,
        link=_link(gpus) or measured_links().get(CPU_KEY, PROCESSOR_LINK),
        network=measured_links().get(BETWEEN_NODES, UNKNOWN_NETWORK) if nodes > 1 else 0.0,
    )


def probe() -> Hardware:
    """This machine; where this process was started as one of several ranks, as they share it."""
    environment = read_rank_environment()
    machine = _probe()
    return shared(machine, environment.local_ranks, environment.nodes) if environment.is_started else machine


def _probe() -> Hardware:
    total, available = host_memory()
    gpus = _gpus()
    return Hardware(
        cpu=_cpu_name(),
        cores=usable_cores(),
        memory=total,
        available=available,
        has_fast_bf16=has_fast_bf16(),
        rates=measured_rates().get(cpu_key()),
        gpus=gpus,
        link=_link(gpus),
        disk=shutil.disk_usage(Path.cwd()).free,
        disk_rate=measured_links().get(DISK, DISK_RATE),
        has_flash_attention_4=bool(gpus) and _has_flash_attention_4(),
    )


def host_memory() -> tuple[int, int]:
    """Bytes of it that this process may use, and those that are free or can be freed."""
    memory = psutil.virtual_memory()
    limit = _cgroup_limit() or memory.total
    return min(memory.total, limit), min(memory.available, limit)


def named(text: str) -> Hardware:
    """Hardware from a description in words, or from the small YAML file of this name."""
    path = expanded(text)
    if path.suffix in (".yaml", ".yml", ".json"):
        return _from_file(path)
    nodes, count, gpu, options = 1, 1, "", {}
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise UserError('hardware: it is blank; say for example "2 nodes of 4 x A100-80G, nvlink, 50 Gbit/s".')
    written = re.fullmatch(
        r"(?:(\d+)\s*nodes?\s*(?:of|x|with|:)?\s*)?(.+?)(?:\s*(?:x|on)\s*(\d+)\s*nodes?)?", parts[0], re.I
    )
    assert written
    nodes = int(written[1] or written[3] or 1)
    count_and_name = re.fullmatch(r"(\d+)\s*[x*\u00d7]\s*(.+)", written[2], re.I)
    count, gpu = (int(count_and_name[1]), count_and_name[2]) if count_and_name else (1, written[2])
    for part in parts[1:]:
        options |= _option(part, nodes)
    return build(gpu=gpu, gpus=count, nodes=nodes, **options)


def build(
    *,
    gpu: str | Gpu,
    gpus: int = 1,
    nodes: int = 1,
    link: float | str | None = None,
    network: float | None = None,
    host_memory: int | None = None,
    cores: int | None = None,
) -> Hardware:
    """Named hardware from its parts; sizes in bytes, speeds in bytes a second."""
    if not (1 <= gpus <= 64 and 1 <= nodes <= 10_000):
        raise UserError(f"hardware: {nodes:,} nodes of {gpus:,} GPUs are no machine; a node has 1 to 64 GPUs.")
    if nodes > 1 and not network:
        raise UserError("hardware: with several nodes, say how fast the link between them is, e.g. `50 Gbit/s`.")
    default_link = 24e9
    if isinstance(gpu, str):
        model = catalogue.gpu_called(gpu)
        default_link = model.link * 1e9
        if link == "pcie":
            link = model.pcie * 1e9
        gpu = Gpu(
            name=model.name,
            memory=model.mib * 2**20,
            free=model.mib * 2**20,
            capability=model.capability,
            rates=rates_of(model),
        )
    speed = default_link if link is None or isinstance(link, str) else link
    host = host_memory or max(64 * GIB, 2 * gpus * gpu.memory)
    return Hardware(
        cpu="named",
        cores=cores or 8 * gpus,
        memory=host,
        available=host,
        has_fast_bf16=True,
        gpus=(gpu,) * gpus,
        nodes=nodes,
        link=speed if gpus > 1 else 0.0,
        network=network if network and nodes > 1 else 0.0,
        disk=1 << 50,
        has_flash_attention_4=True,
        is_named=True,
    )


def rates_of(model: catalogue.GpuModel) -> Rates:
    return Rates(
        fp32=ATTAINABLE["fp32"] * model.fp32 * 1e12,
        half=ATTAINABLE["half"] * model.half * 1e12,
        fp8=ATTAINABLE["fp8"] * model.fp8 * 1e12,
        bandwidth=COPY * model.bandwidth * 1e9,
        host_link=model.pcie * 1e9,
    )


def guessed_rates(gpu: Gpu) -> Rates:
    """For a GPU nobody here has heard of: those of a modest one of its generation."""
    half = 40e12 if gpu.capability < (8, 0) else 90e12 if gpu.capability < (9, 0) else 350e12
    return Rates(fp32=half / 6, half=half, fp8=2 * half, bandwidth=half * 0.006, host_link=12e9)


def measured_rates_file() -> Path:
    return cache_folder() / "rates.json"


def cpu_key() -> str:
    """What the CPU's measured rates are kept by: another number of cores is another CPU."""
    return f"{_cpu_name()}, {usable_cores()} cores"


def measured_rates() -> dict[str, Rates]:
    """By the name of GPU or CPU, as `tunesmith plan --calibrate` measured them on this machine."""
    try:
        content = json.loads(measured_rates_file().read_text(encoding="utf-8"))
        return {name: Rates.model_validate(rates) for name, rates in content.items()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(
            f"{measured_rates_file()} cannot be read ({str(error).splitlines()[0]}); delete it, or measure again with "
            "`tunesmith plan --calibrate`."
        ) from error


def keep_measured(file: Path, content: dict[str, Any]) -> None:
    """Write one of these files, whole or not at all."""
    partial = file.with_name(f".{file.name}.partial-{os.getpid()}")
    with writing(file, ELSEWHERE):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            os.replace(partial, file)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)


def measured_links_file() -> Path:
    return measured_rates_file().with_name("network.json")


def measured_links() -> dict[str, float]:
    """Bytes a second between the ranks of a node, by GPU, and between nodes, as `tunesmith network` measured them, in
    terms of what makers publish; and from and to the disk, by `tunesmith plan --calibrate`."""
    try:
        content = json.loads(measured_links_file().read_text(encoding="utf-8"))
        return {str(name): float(speed) for name, speed in content.items()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UserError(
            f"{measured_links_file()} cannot be read ({str(error).splitlines()[0]}); delete it, or measure again with "
            "`tunesmith network`."
        ) from error


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def has_fast_bf16() -> bool:
    """Whether the CPU multiplies bf16 itself; without that, bf16 on a CPU is hundreds of times slower."""
    flags = _cpu_fields("flags", "Features")
    return bool(flags & {"amx_bf16", "avx512_bf16", "bf16"})


def _cpu_fields(*names: str) -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return {word for line in lines if line.split(":")[0].strip() in names for word in line.split(":", 1)[1].split()}


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()  # `platform.processor` would start a process to say no more


def _cgroup_limit() -> int | None:
    """The memory limit of a container, which psutil does not see."""
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(file).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None


def _gpus() -> tuple[Gpu, ...]:
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    measured = measured_rates()
    try:
        gpus = []
        for index in _visible(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            name = pynvml.nvmlDeviceGetName(handle)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            name = name.decode() if isinstance(name, bytes) else name
            model = catalogue.find_gpu(name)
            gpus.append(
                Gpu(
                    name=name,
                    memory=int(memory.total),
                    free=int(memory.free),
                    capability=(int(major), int(minor)),
                    rates=measured.get(name) or (rates_of(model) if model else None),
                )
            )
        return tuple(gpus)
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def _visible(count: int) -> list[int]:
    """GPUs that CUDA_VISIBLE_DEVICES leaves visible (names by UUID count as all: the driver sorts those out)."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return list(range(count))
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.lstrip("-").isdigit() for part in parts):
        return list(range(count))
    visible = []
    for part in parts:
        if not 0 <= int(part) < count:
            break  # CUDA ignores what follows an invalid number
        visible.append(int(part))
    return visible


def _has_flash_attention_4() -> bool:
    """Without importing it, which would import torch."""
    package = importlib.util.find_spec("flash_attn")
    return (
        any((Path(place) / "cute").is_dir() for place in (package.submodule_search_locations or ()))
        if package
        else False
    )


def _link(gpus: tuple[Gpu, ...]) -> float:
    """As `tunesmith network` measured it, or what the catalogue says."""
    if len(gpus) < 2:
        return 0.0
    if measured := measured_links().get(gpus[0].name):
        return measured
    model = catalogue.find_gpu(gpus[0].name)
    return 1e9 * (model.link if model else 12)


def _option(text: str, nodes: int) -> dict[str, Any]:
    """One part of a description after the first: a link, a speed, host memory, cores."""
    if re.fullmatch(r"nvlink|nvswitch|xgmi", text, re.I):
        return {"link": "nvlink"}
    if re.fullmatch(r"pci-?e?(\s*\d(\.0)?)?", text, re.I):
        return {"link": "pcie"}
    speed = re.fullmatch(
        r"([\d.]+)\s*(gbit/s|gbps|gb/s|g)(?:\s*(?:between|network|infiniband|ethernet|ib).*)?", text, re.I
    )
    if speed and re.fullmatch(r"[\d]+(\.\d+)?", speed[1]):
        is_bytes = "GB/s" in speed[2]
        value = float(speed[1]) * 1e9 / (1 if is_bytes else 8)
        return {"network": value} if nodes > 1 else {"link": value}
    size = re.fullmatch(r"(\d+)\s*(g|t)i?b?\s*(?:of\s*)?(?:host|ram|memory|host memory)", text, re.I)
    if size:
        return {"host_memory": int(size[1]) * GIB * (1024 if size[2].lower() == "t" else 1)}
    cores = re.fullmatch(r"(\d+)\s*cores?", text, re.I)
    if cores:
        return {"cores": int(cores[1])}
    raise UserError(
        f"hardware: '{text}' is not understood; after the GPUs may come nvlink or pcie, a speed like `50 Gbit/s`, "
        "`512 GB host memory` and `64 cores`, each after a comma."
    )


def _from_file(path: Path) -> Hardware:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"hardware: {path} cannot be read: {error.strerror or error}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"hardware: {path} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(content, Mapping):
        raise UserError(f"hardware: {path} should say `gpu: A100-80G`, `gpus: 4` and the like.")
    try:
        wanted = _Description.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"hardware: {path}: {where}: {first['msg']}.") from error
    return wanted.hardware()


class _Custom(Part):
    """A GPU that the catalogue does not have."""

    name: str
    memory_gib: float
    capability: tuple[int, int]
    half_tflops: float
    fp32_tflops: float
    fp8_tflops: float = 0.0
    bandwidth_gb: float

    def gpu(self) -> Gpu:
        size = int(self.memory_gib * GIB)
        rates = Rates(
            fp32=ATTAINABLE["fp32"] * self.fp32_tflops * 1e12,
            half=ATTAINABLE["half"] * self.half_tflops * 1e12,
            fp8=ATTAINABLE["fp8"] * self.fp8_tflops * 1e12,
            bandwidth=COPY * self.bandwidth_gb * 1e9,
            host_link=24e9,
        )
        return Gpu(name=self.name, memory=size, free=size, capability=self.capability, rates=rates)


class _Description(Part):
    gpu: str | _Custom
    gpus: int = 1
    nodes: int = 1
    link: str | None = None
    network: str | None = None
    host_memory: str | None = None
    cores: int | None = None

    def hardware(self) -> Hardware:
        options: dict[str, Any] = {}
        for text, nodes in ((self.link, 1), (self.network, 2), (self.host_memory and f"{self.host_memory} host", 1)):
            if text:
                options |= _option(text, nodes)
        gpu = self.gpu if isinstance(self.gpu, str) else self.gpu.gpu()
        return build(gpu=gpu, gpus=self.gpus, nodes=self.nodes, cores=self.cores, **options)
