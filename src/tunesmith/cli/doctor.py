"""`tunesmith doctor`: what is installed, what the machine has, what is missing, and how to get it.

Works on a broken installation: everything that may be missing is looked up with care and reported.
"""

from __future__ import annotations

import os
import platform
import shutil
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

OPTIONAL = {
    "peft": ("comparing adapters with the peft library", "pip install 'tunesmith[peft]'"),
    "gguf": ("models in GGUF files", "pip install 'tunesmith[gguf]'"),
    "xllamacpp": ("proving GGUF exports by llama.cpp", "pip install 'tunesmith[export]'"),
    "compressed-tensors": ("exports in int8, int4 and fp8", "pip install 'tunesmith[export]'"),
    "onnxruntime": ("proving ONNX exports", "pip install 'tunesmith[onnx]'"),
    "uvicorn": ("`tunesmith serve`", "pip install 'tunesmith[serve]'"),
    "accelerate": ("models in GGUF files", "pip install 'tunesmith[gguf]'"),
    "triton": ("fast kernels on a GPU; comes with the CUDA builds of torch", "pip install triton"),
    "flash-attn-4": ("faster attention on a GPU", "pip install --pre flash-attn-4"),
}
GPU_ONLY = ("triton", "flash-attn-4")
SHOWN = ("torch", "transformers", "tokenizers", "datasets", *OPTIONAL)
"""Always listed; other packages only when something is wrong with them."""
LITTLE_DISK = 5 << 30


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, for programs.")] = False,
) -> None:
    """Show versions and devices, what is missing, and how to get it.

    Ends with exit code 1 when something that every run needs is missing, too old or broken.
    """
    from tunesmith.cli.output import print_json, stage

    stage("Looking at this machine and what is installed")
    report = examine()
    if as_json:
        print_json(report)
    else:
        _show(report)
    if not report["ok"]:
        raise typer.Exit(1)


def examine() -> dict[str, Any]:
    """Everything that `doctor` shows, as plain values."""
    from tunesmith import __version__

    problems: list[dict[str, Any]] = []
    machine = _machine()
    packages = _packages(problems)
    torch = _torch(machine, problems)
    disks = _disks(problems)
    has_gpu = bool(machine and machine["gpus"])
    return {
        "ok": not any(problem["required"] for problem in problems),
        "tunesmith": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "torch": torch,
        "machine": machine,
        "disks": disks,
        "problems": problems,
        "optional": [
            {"name": name, "for": purpose, "get": get}
            for name, (purpose, get) in OPTIONAL.items()
            if _version(name) is None and (has_gpu or name not in GPU_ONLY)
        ],
    }


def _machine() -> dict[str, Any] | None:
    """Processor, memory and GPUs; None when a package needed to look is missing, which is reported as such."""
    try:
        from tunesmith.plan.hardware import probe
    except ImportError:
        return None
    return probe().model_dump(mode="json") | {"driver": _driver()}


def _driver() -> str | None:
    """Version of the NVIDIA driver, if there is one."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    return version.decode() if isinstance(version, bytes) else version


def _packages(problems: list[dict[str, Any]]) -> list[dict[str, Any]]:
    wanted = _requirements(problems)
    rows = []
    for name in dict.fromkeys([*SHOWN, *wanted]):
        version, specifier, required = _version(name), wanted.get(name, ""), name not in OPTIONAL
        state = "ok" if version else "missing"
        if version and specifier and not specifier.contains(version, prereleases=True):
            state = "does not fit"
        if required and state != "ok":
            what = f"{name} is missing" if version is None else f"{name} {version} is not {specifier}"
            problems.append(_problem(what, f"pip install '{name}{specifier}'", True))
        row = {"name": name, "version": version, "wanted": str(specifier) or None, "required": required, "state": state}
        rows.append(row)
    return rows


def _requirements(problems: list[dict[str, Any]]) -> dict[str, Any]:
    """Package -> versions wanted, as the installed Tunesmith itself declares them."""
    try:
        from packaging.requirements import Requirement

        declared = [Requirement(text) for text in metadata.requires("tunesmith") or []]
    except (ImportError, metadata.PackageNotFoundError) as problem:
        problems.append(
            _problem(
                f"the versions wanted are not known: {problem}", "pip install tunesmith, or `pip install -e .`", False
            )
        )
        return {}
    return {
        need.name: need.specifier for need in declared if need.marker is None or need.marker.evaluate({"extra": ""})
    }


def _torch(machine: dict[str, Any] | None, problems: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What torch itself says; the one heavy import of this verb."""
    if _version("torch") is None:
        return None
    try:
        import torch
    except (ImportError, OSError, RuntimeError, AttributeError) as problem:
        reason = " ".join(str(problem).split())
        problems.append(_problem(f"torch does not start: {reason}", "pip install --force-reinstall torch", True))
        return None
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "ROCm" if torch.version.hip else "CPU"
    found = {"build": build, "gpu_usable": torch.cuda.is_available()}
    if machine and machine["gpus"] and not found["gpu_usable"]:
        there = f"there is a GPU ({machine['gpus'][0]['name']}) but torch {torch.__version__}"
        if build == "CPU":
            what, fix = f"{there} is a CPU build", "install the CUDA build, as torch's installation page says"
        else:
            what, fix = f"{there} ({build}) cannot use it with driver {machine['driver']}", "update the driver"
        problems.append(_problem(f"{what}, so runs would use the CPU", fix, False))
    return found


def _disks(problems: list[dict[str, Any]]) -> list[dict[str, Any]]:
    cache = os.environ.get("HF_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "huggingface")
    rows = []
    for purpose, path in (("this folder", Path.cwd()), ("downloaded models", Path(cache))):
        there = next((place for place in (path, *path.absolute().parents) if place.exists()), None)
        if there is None:
            continue
        usage = shutil.disk_usage(there)
        rows.append({"for": purpose, "path": str(path), "free": usage.free, "total": usage.total})
        if usage.free < LITTLE_DISK:
            free = f"{usage.free / 2**30:.1f} GiB"
            problems.append(_problem(f"only {free} free for {purpose} ({path})", "make room, or work elsewhere", False))
    return rows


def _show(report: dict[str, Any]) -> None:
    from rich.text import Text

    from tunesmith.cli.output import readable_bytes, say, table

    colours = {"ok": "green", "missing": "yellow", "does not fit": "red"}
    rows = [
        ("tunesmith", report["tunesmith"], None, Text("ok", "green")),
        ("python", report["python"], ">=3.11", Text("ok", "green")),
    ]
    for package in report["packages"]:
        if package["name"] in SHOWN or package["state"] != "ok":
            state = package["state"] if package["required"] or package["version"] else "not installed (optional)"
            rows.append(
                (package["name"], package["version"], package["wanted"], Text(state, colours.get(state, "dim")))
            )
    say(table(("package", "version", "wanted", "state"), rows, title="Software"))

    rows = []
    if machine := report["machine"]:
        bf16 = "has bf16 arithmetic" if machine["has_fast_bf16"] else "no bf16 arithmetic, so trains in fp32"
        free = f"{readable_bytes(machine['available'])} free"
        rows.append(("CPU", machine["cpu"], f"{machine['cores']} cores", bf16))
        rows.append(("memory", "", free, f"of {readable_bytes(machine['memory'])}"))
        for index, gpu in enumerate(machine["gpus"]):
            capability = ".".join(map(str, gpu["capability"]))
            details = f"of {readable_bytes(gpu['memory'])}, compute capability {capability}, driver {machine['driver']}"
            rows.append((f"GPU {index}", gpu["name"], f"{readable_bytes(gpu['free'])} free", details))
        if not machine["gpus"]:
            rows.append(("GPU", "none found", "", "runs use the CPU"))
    for disk in report["disks"]:
        free, total = readable_bytes(disk["free"]), readable_bytes(disk["total"])
        rows.append(("disk", disk["for"], f"{free} free", f"of {total}"))
    say()
    say(table(("device", "name", "size", "details"), rows, title="Machine"))

    if report["optional"]:
        say()
        rows = [(item["name"], item["for"], item["get"]) for item in report["optional"]]
        say(table(("missing", "for", "get it with"), rows, title="Optional"))
    say()
    for problem in report["problems"]:
        colour = "bold red" if problem["required"] else "yellow"
        say(Text.assemble(("problem: ", colour), f"{problem['what']}; {problem['fix']}"))
    if report["ok"]:
        say("Ready to train.", style="green")


def _problem(what: str, fix: str, required: bool) -> dict[str, Any]:
    return {"what": what, "fix": fix, "required": required}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
