"""A run knows its base by its whole content: replaced anywhere, it is found wherever the base is read again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny import write_all
from tunesmith.config.load import load as load_run
from tunesmith.errors import UserError
from tunesmith.model import content, files, load
from tunesmith.run.assemble import assemble
from tunesmith.run.base import check_base
from tunesmith.run.evaluate import evaluate_run
from tunesmith.run.merge import merge_run
from tunesmith.run.open import open_run
from tunesmith.run.start import prepare_run
from tunesmith.train.loop import train


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_model) -> Path:
    """A folder with a base of more than 2 MiB and a finished run over it."""
    folder = tmp_path_factory.mktemp("trained")
    from tiny_model import make_tiny_model

    make_tiny_model(folder / "base", intermediate_size=8192, max_position_embeddings=64)
    write_all(
        folder,
        folder / "base",
        epochs=1,
        output=str(folder / "run"),
        eval=[],
        data=[{"path": str(folder / "train.jsonl")}],
    )
    train_in(folder)
    return folder


def train_in(folder: Path, **options) -> None:
    run = load_run(folder / "run.yaml").run
    (folder / "run").mkdir(exist_ok=True)
    train(assemble(prepare_run(run, warn=print, **options)), lambda _: None)


@pytest.fixture
def moved(trained, tmp_path) -> Path:
    """A copy of it, whose base may be changed."""
    shutil.copytree(trained, tmp_path / "all")
    for name in ("run.yaml", "run/run.json"):
        file = tmp_path / "all" / name
        file.write_text(file.read_text().replace(str(trained), str(tmp_path / "all")))
    return tmp_path / "all"


def change_middle(folder: Path, name: str = "model.layers.1.mlp.up_proj.weight") -> None:
    """One value in the middle of the file, which both of its ends say nothing of."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name][0, 0] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


VERBS = {
    "chat": lambda folder: open_run(folder / "run"),
    "merge": lambda folder: merge_run(folder / "run", folder / "merged"),
    "eval": lambda folder: evaluate_run(folder / "run", with_data(folder)),
}


def with_data(folder: Path):
    run = load_run(folder / "run.yaml").run
    return run.model_copy(update={"eval": run.data})


@pytest.mark.parametrize("verb", VERBS)
def test_a_base_replaced_after_training_is_refused_by_every_verb_that_reads_it(moved, verb):
    before = load.model_fingerprint(load_run(moved / "run.yaml").run)
    change_middle(moved / "base")
    assert load.model_fingerprint(load_run(moved / "run.yaml").run) == before  # a first look does not see it
    with pytest.raises(UserError, match=r"not the base .* 1 of 20 tensors differ \(model.layers.1.mlp.up_proj.weight"):
        VERBS[verb](moved)
    assert not (moved / "merged").exists()


def test_a_base_that_holds_its_tied_weight_twice_is_known_again_by_every_verb(tmp_path, tiny_model):
    """As trainers that gather state dicts write it."""
    base = tmp_path / "base"
    hold_twice(shutil.copytree(tiny_model, base), 1.0)
    where = {"data": [{"path": str(tmp_path / "train.jsonl")}], "output": str(tmp_path / "run")}
    write_all(tmp_path, base, epochs=1, eval=[], **where)
    train_in(tmp_path)
    for use in VERBS.values():
        use(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "merged" / "model.safetensors")
    hold_twice(base, 2.0)
    with pytest.raises(UserError, match=r"lm_head.weight with other values than model.embed_tokens.weight, but its"):
        merge_run(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(UserError, match=r'the two are one weight; put "tie_word_embeddings": false there'):
        train_in(tmp_path)


def hold_twice(base: Path, times: float) -> None:
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = times * tensors["model.embed_tokens.weight"]
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})


def test_a_run_is_not_continued_over_another_base_unless_that_is_accepted(moved):
    (moved / "run" / "summary.json").unlink()
    train_in(moved)  # nothing has changed
    change_middle(moved / "base")
    with pytest.raises(UserError, match="started over another base: 1 of 20 tensors"):
        train_in(moved)
    train_in(moved, accept_changes=True)
    VERBS["chat"](moved)


def test_the_same_weights_in_other_files_are_the_same_base(moved):
    tensors = load_file(moved / "base" / "model.safetensors")
    (moved / "base" / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[1::2], names[::2])):
        save_file(
            {name: tensors[name] for name in part}, moved / "base" / f"part-{number}.safetensors", {"format": "pt"}
        )
        weight_map |= dict.fromkeys(part, f"part-{number}.safetensors")
    (moved / "base" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    VERBS["chat"](moved)


def test_what_config_json_says_is_part_of_the_base(moved):
    config = json.loads((moved / "base" / "config.json").read_text())
    config["rms_norm_eps"], config["transformers_version"] = 0.5, "other"
    (moved / "base" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"config.json had rms_norm_eps 1e-06 and now has 0.5. Put"):
        VERBS["chat"](moved)


def test_ranks_that_read_parts_hash_what_one_process_hashes(moved, monkeypatch):
    monkeypatch.setattr(content, "PIECE", 1000)
    tensors = files.read_tensors(moved / "base")
    whole = content.Content()
    list(files.read_ahead(tensors, pin=False, content=whole))
    ranks = [content.Content() for _ in range(3)]
    for rank, mine in enumerate(ranks):

        def part(name, shape, rank=rank):
            rows, columns = (
                (slice(size * at // 3, size * (at + 1) // 3) for size, at in zip(shape, (rank, rank), strict=False))
                if len(shape) > 1
                else (None, None)
            )
            if rows is None:
                return ()
            return (rows,) if "mlp" in name else (slice(0, shape[0]), columns)

        list(files.read_ahead(tensors, pin=False, part=part, content=mine))
    counted = [sum(map(len, one._pieces.values())) for one in (*ranks, whole)]
    assert sum(counted[:3]) < 1.2 * counted[3]  # each has hashed its own
    said = []
    for one in ranks:
        one.join(lambda text: said.append(text) or [text])
    ranks[0].join(lambda _: said)
    assert ranks[0].tensors() == whole.tensors()


def test_every_byte_and_the_shape_count(tmp_path):
    def digest(tensor: torch.Tensor) -> dict:
        (tmp_path / "config.json").write_text("{}")
        save_file({"a": tensor}, tmp_path / "model.safetensors")
        found = content.Content()
        list(files.read_ahead(files.read_tensors(tmp_path), pin=False, content=found))
        return found.tensors()

    first = digest(torch.zeros(6))
    assert digest(torch.zeros(6)) == first
    assert digest(torch.zeros(2, 3)) != first
    for place in range(6):
        other = torch.zeros(6)
        other[place] = 1e-30
        assert digest(other) != first


def test_a_run_of_an_earlier_version_is_opened_without_comparing(moved):
    (moved / "run" / "base.json").unlink()
    VERBS["chat"](moved)
    (moved / "run" / "base.json").write_text("[]")
    with pytest.raises(UserError, match="damaged"):
        check_base(moved / "run", load_run(moved / "run.yaml").run, content.Content())
