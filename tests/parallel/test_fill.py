"""A model over several ranks is read in parts: each rank reads what it will hold, and never has more than one layer
besides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiny import SETTINGS, write_data
from tiny_model import make_tiny_model

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("method", ["full", "qlora"])
def test_a_rank_never_holds_more_than_its_share_and_one_layer(world, tmp_path, method):
    model = make_tiny_model(tmp_path / "model", num_hidden_layers=8, hidden_size=64)
    write_data(tmp_path / "train.jsonl", 20)
    content = {**SETTINGS, "model": str(model), "lora": {"rank": 4}, "eval": [], "method": method}
    content["data"] = [{"path": str(tmp_path / "train.jsonl")}]
    (tmp_path / "run.yaml").write_text(json.dumps(content))
    options = {"folder": str(tmp_path), "mesh": {"shard": 4}, "sharding": "zero3", "output": str(tmp_path / "run")}
    for found in world(4)("parallel.on_ranks:most_that_was_whole", **options):
        assert found["parts"] == 9  # eight layers, and what is around them
        outside = found["all"] - 8 * found["layer"]
        share = found["all"] / 4
        assert found["most"] < share + 1.1 * max(found["layer"], outside) + 4096
        assert found["most"] < 0.75 * found["all"]


WAYS = {
    "zero3": ({"shard": 4}, "zero3"),
    "tensor": ({"tensor": 4}, "ddp"),
    "tensor x shard": ({"tensor": 2, "shard": 2}, "zero3"),
    "pipeline": ({"pipeline": 4}, "none"),
}


def write_deep_job(folder: Path, layers: int) -> None:
    """With a model of so many layers, of 5.5 MB each."""
    write_data(folder / "train.jsonl", 20)
    content = {**SETTINGS, "lora": {"rank": 4}, "eval": [], "data": [{"path": str(folder / "train.jsonl")}]}
    content["model"] = str(make_deep_model(folder / "model", layers))
    (folder / "run.yaml").write_text(json.dumps(content))


def make_deep_model(folder: Path, layers: int) -> Path:
    """The same layer many times: drawing that many weights would take long."""
    from safetensors.numpy import load_file, save_file

    sizes = {"hidden_size": 512, "intermediate_size": 384, "num_attention_heads": 8, "num_key_value_heads": 4}
    make_tiny_model(folder, num_hidden_layers=1, initializer_range=0.02, **sizes)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    weights = load_file(folder / "model.safetensors")
    numbered = {name.replace(".0.", f".{layer}."): one for name, one in weights.items() for layer in range(layers)}
    save_file(numbered, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("method", "way"),
    [
        *(pytest.param("full", way, marks=pytest.mark.slow) for way in WAYS),
        pytest.param("lora", "zero3", marks=pytest.mark.slow),
        ("qlora", "zero3"),
    ],
)
def test_while_a_model_is_loaded_on_four_ranks_all_of_them_need_little_more_than_its_size(world, tmp_path, method, way):
    mesh, sharding = WAYS[way]
    write_deep_job(tmp_path, 24 if method == "qlora" else 128)  # quantizing takes the CPU long
    size = (tmp_path / "model/model.safetensors").stat().st_size
    options = {"folder": str(tmp_path), "output": str(tmp_path / "run")}
    ranks = world(4, is_new=True)  # what others have left behind would hide what this one needs
    found = ranks("parallel.on_ranks:loading", mesh=mesh, sharding=sharding, method=method, **options)
    assert sum(one["grew"] for one in found) <= 1.3 * size
    assert 0.98 * size < sum(one["read"] for one in found) < 1.02 * size
