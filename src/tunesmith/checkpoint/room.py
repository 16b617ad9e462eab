"""Whether what a run will write has room on its disk: asked before the weights are loaded, from sizes that are known.

The result comes first: a run that could not leave one is refused, and checkpoints leave it its room. Without room for
checkpoints a run still trains, and is told what a kill would cost.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tunesmith import disk
from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.plan.plan import Plan
from tunesmith.plan.search import Written

WEIGHTS = frozenset({".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".ot"})
"""Endings of files with weights; what else lies in a model's folder may be part of the result."""


def with_slack(size: int) -> int:
    """What so many bytes take, with headers, lists of files and the blocks of the file system."""
    return size + size // 100 + 2**20


def result_bytes(run: Run, written: Written) -> int:
    """Of the result, with what lies beside the weights in the model's folder."""
    return with_slack(written.result + _side_files(Path(run.model)))


def check_room(run: Run, plan: Plan, written: Written, warn: Callable[[str], None]) -> None:
    """Refuse a run whose result has no room; say so where its checkpoints have none."""
    folder = Path(run.output)
    found = disk.free(folder)
    if found is None:
        return
    free = found - plan.disk  # optimizer states on the disk are not there yet
    result, checkpoint = result_bytes(run, written), with_slack(written.checkpoint)
    elsewhere = "make room there, or set output to a folder on another disk"
    if free < result:
        besides = f" besides the {disk.size(plan.disk)} of optimizer states" if plan.disk else ""
        raise UserError(
            f"The result of this run needs {disk.size(result)}{besides}, and the disk of {folder} has "
            f"{disk.size(found)} free; {elsewhere}."
        )
    there = len(list((folder / "checkpoints").glob("step-*")))
    most = run.keep + bool(run.eval) + 1  # the best one, and one that is being written
    fitting = (free - result) // checkpoint
    needs = (
        f"a checkpoint needs {disk.size(checkpoint)}, the result {disk.size(result)}, and {disk.size(found)} are free"
    )
    if fitting < 1:
        loss = "what comes after the last one" if there else "all that was trained"
        warn(
            f"There is no room for checkpoints on the disk of {folder}: {needs}. If the run is stopped or killed, "
            f"{loss} is lost; {elsewhere}."
        )
    elif there + fitting < most:
        fewer = there + fitting - 1 - bool(run.eval)
        advice = f"set keep to {fewer}, " if 1 <= fewer < run.keep else ""
        warn(
            f"The disk of {folder} has room for {fitting} more checkpoint{'s'[: fitting > 1]}, and keep {run.keep} "
            f"needs up to {most - there}: {needs}. Those that do not fit are not written; {advice}{elsewhere}."
        )


def _side_files(model: Path) -> int:
    try:
        files = [file for file in model.iterdir() if file.suffix not in WEIGHTS and file.is_file()]
        return sum(file.stat().st_size for file in files)
    except OSError:  # a name on the hub, or a single file
        return 0
