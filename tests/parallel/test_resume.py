"""A run saved on four ranks goes on, on four, two or one, with the data and losses of a run that was never stopped."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from loads_elsewhere import check_results
from tiny import SETTINGS, write_data
from tunesmith.checkpoint.codec import uncovered
from tunesmith.checkpoint.store import CheckpointStore

pytestmark = pytest.mark.distributed
STEPS, STOP = 6, 2
MESHES = {
    8: {"zero3": {"shard": 8}},
    4: {"zero3": {"shard": 4}, "hybrid": {"replicate": 2, "shard": 2}, "ddp": {"replicate": 4}, "zero1": {"shard": 4}},
    2: {"zero3": {"shard": 2}, "ddp": {"replicate": 2}},
    1: {"none": {}},
}


@pytest.fixture(scope="module")
def settings(tiny_model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("settings")
    write_data(folder / "train.jsonl", 60)
    write_data(folder / "held_out.jsonl", 7, seed=1)
    content = {
        **SETTINGS,
        "model": str(tiny_model),
        "lora": {"rank": 4},
        "data": [{"path": str(folder / "train.jsonl")}],
        "eval": [{"path": str(folder / "held_out.jsonl")}],
        "batch_tokens": 9 * 64,
        "steps": STEPS,
        "save_every": 1000,
    }
    (folder / "run.yaml").write_text(json.dumps(content))
    return folder


@pytest.fixture
def train(world, settings):
    return partial(_train, world, settings)


def _train(world, settings: Path, until: int, ranks: int, sharding: str, output: Path, **changes) -> dict:
    options = {"mesh": MESHES[ranks][sharding], "sharding": sharding, "folder": str(settings)}
    found = world(ranks)("parallel.on_ranks:train_for", until=until, output=str(output), **options, **changes)
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.fixture(scope="module")
def wholes(world, settings, tmp_path_factory):
    """By method: the history of a run on one rank that was never stopped, and its folder."""
    known: dict[str, tuple[dict, Path]] = {}

    def of(method: str) -> tuple[dict, Path]:
        if method not in known:
            output = tmp_path_factory.mktemp(method) / "whole"
            known[method] = (_train(world, settings, STEPS, 1, "none", output, method=method), output)
        return known[method]

    return of


CASES = [
    pytest.param("full", "zero3", 8, marks=pytest.mark.slow),  # starting so many takes longest
    ("full", "zero3", 4),
    pytest.param("full", "hybrid", 2, marks=pytest.mark.slow),
    ("full", "zero1", 1),
    ("qlora", "zero3", 2),
    ("lora", "ddp", 1),
]


@pytest.mark.parametrize(("method", "sharding", "after"), CASES)
def test_a_run_saved_on_four_ranks_goes_on_on_others(train, wholes, tmp_path, method, sharding, after):
    whole, folder = wholes(method)
    begun = train(STOP, 4, sharding, tmp_path / "run", method=method)
    assert (begun["first"], begun["last"]) == (1, STOP)
    follow = sharding if sharding in MESHES[after] else next(iter(MESHES[after]))
    ended = train(STEPS, after, follow, tmp_path / "run", method=method)
    assert (ended["first"], ended["last"]) == (STOP + 1, STEPS)
    assert begun["losses"] + ended["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert begun["evaluations"] + ended["evaluations"] == pytest.approx(whole["evaluations"], rel=1e-5)
    result = "model/model.safetensors" if method == "full" else "adapter/adapter_model.safetensors"
    assert_close(tmp_path / "run" / result, folder / result)
    check_results(tmp_path / "run")


def test_ranks_that_replicate_save_everything_after_every_resume(train, wholes, tmp_path):
    whole, _ = wholes("full")
    losses = []
    for until in (2, 4, STEPS):
        losses += train(until, 2, "ddp", tmp_path / "run", method="full")["losses"]
    assert losses == pytest.approx(whole["losses"], rel=1e-5)


def test_rows_that_nobody_writes_are_noticed():
    halves = [{"weights/x": [2, 4], "optimizer/step/x": [1, None]}, {"weights/x": [2, 4]}]
    assert uncovered({"weights/x", "optimizer/step/x"}, halves) == ""
    assert "weights/x in parts that do not make a whole" in uncovered({"weights/x"}, halves[:1])
    assert "weights/y" in uncovered({"weights/x", "weights/y"}, halves)


def assert_close(found: Path, expected: Path) -> None:
    """A file of weights, whose header and neighbours are the same to the byte. Single weights may differ more: where a
    gradient is next to nothing, AdamW divides noise by noise."""
    from safetensors.torch import load_file

    def others(file: Path) -> dict[str, bytes]:
        header = file.read_bytes()[: 8 + int.from_bytes(file.read_bytes()[:8], "little")]
        return {one.name: one.read_bytes() if one != file else header for one in file.parent.iterdir()}

    assert others(found) == others(expected)
    ours, theirs = load_file(found), load_file(expected)
    for name, value in ours.items():
        off, largest = (value - theirs[name]).abs().double(), theirs[name].abs().max()
        assert off.max() <= 1e-3 * largest + 1e-6, name
        assert off.mean() <= 1e-6 * largest + 1e-7, name


def test_each_rank_writes_its_own_rows_and_a_damaged_file_of_one_is_noticed(train, tmp_path):
    train(STOP, 4, "zero3", tmp_path / "run", method="full")
    (folder,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    files = sorted(folder.glob("rank-*"))
    assert [file.name for file in files] == [f"rank-{rank:05d}-of-00004.safetensors" for rank in range(4)]
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) < 1.3 * min(sizes)
    lineage = json.loads((folder / "manifest.json").read_text())["lineage"]
    warned = []
    store = CheckpointStore(folder.parent, lineage, warn=warned.append)
    found = store.latest()
    tensors, state = store.load(found)
    assert state["step"] == STOP
    assert {name.split("/")[0] for name in tensors} == {"weights", "optimizer"}
    content = bytearray(files[2].read_bytes())
    content[-10] ^= 1
    files[2].write_bytes(content)
    assert store.latest() is None
    assert "rank-00002-of-00004.safetensors does not match its checksum" in warned[0]
    shutil.rmtree(folder)
