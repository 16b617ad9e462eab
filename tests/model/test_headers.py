"""What a model's files say of themselves is checked before it is believed: damage and names that lead elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import parity
from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.model import load, side_files
from tunesmith.model.headers import inside, read_headers, shortened
from tunesmith.parallel.prepare import load_model
from tunesmith.plan.models import read_config


@pytest.fixture
def model(tiny_model, tmp_path):
    return shutil.copytree(tiny_model, tmp_path / "inner" / "model")


def load_it(folder, **options):
    return load_model(Run(model=str(folder), data="none.jsonl"), **{"dtype": "fp32", "device": "cpu", **options})


def write_index(folder, weight_map) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "a/../../other.safetensors", "ABSOLUTE", "..\\other", "C:x", ""]
)
def test_names_of_files_in_an_index_stay_inside_the_folder(model, name):
    outside = model.parent / "other.safetensors"
    shutil.move(model / "model.safetensors", outside)
    name = str(outside) if name == "ABSOLUTE" else name
    write_index(model, dict.fromkeys(load_file(outside), name))
    with pytest.raises(UserError, match="does not lie in the model's folder"):
        load_it(model)
    with pytest.raises(UserError, match="not read"):
        inside(model, name, model)


def test_files_that_are_links_into_a_cache_are_read(model):
    """As those of the hub are."""
    blob = model.parent / "blob"
    shutil.move(model / "model.safetensors", blob)
    (model / "model.safetensors").symlink_to(blob)
    assert read_headers(model)


CUTS = {
    "": "cut off",
    "head": "cut off",
    "middle": "cut off: it has .* bytes",
    "text": "cut off",
    "garbage": "header cannot",
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_file_that_was_cut_off_is_said_to_be(model, cut):
    file = model / "model.safetensors"
    content = file.read_bytes()
    changed = {"": b"", "head": content[:20], "middle": content[:-1000], "text": b"version https://git-lfs"}
    file.write_bytes(changed.get(cut, content[:8] + b"x" * (len(content) - 8)))
    with pytest.raises(UserError, match=f"damaged: .*{CUTS[cut]}.*download it again"):
        load_it(model)


def test_files_and_tensors_that_an_index_promises_are_missed(model):
    names = load_file(model / "model.safetensors")
    write_index(model, {**dict.fromkeys(names, "model.safetensors"), "x.weight": "model.safetensors"})
    with pytest.raises(UserError, match=r"names tensors that its files do not hold: x.weight; download"):
        load_it(model)
    write_index(model, {name: f"model-{number}.safetensors" for number, name in enumerate(names)})
    with pytest.raises(UserError, match=r"not there: model-0.safetensors, .* and \d+ more; download"):
        load_it(model)
    for odd in ("[]", "{}", '{"weight_map": 7}', "{", '{"weight_map": {"a": 7}}', '{"weight_map": {}}'):
        (model / "model.safetensors.index.json").write_text(odd)
        with pytest.raises(UserError, match=r"index\.json (is damaged|names no tensors)"):
            load_it(model)


def test_weights_in_files_that_can_run_code_are_refused_with_what_to_do(model):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model.bin.*save_pretrained"):
        load_it(model)


def change(folder, **tensors) -> None:
    kept = load_file(folder / "model.safetensors") | tensors
    kept = {name: one for name, one in kept.items() if one is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


NORM, GATE = "model.layers.1.input_layernorm.weight", "model.layers.0.mlp.gate_proj.weight"
MISFITS = {
    "size": ({NORM: torch.ones(31)}, r"hold model.layers.1.*\[31\], and its config.json describes \[32\]"),
    "missing": ({NORM: None, GATE: None}, r"lack 2 tensors .*: model.layers.0.mlp.gate_proj.weight, model"),
    "layer": ({"model.layers.2.mlp.up_proj.weight": torch.ones(64, 32)}, "hold 1 tensors that .* has not"),
    "bias": ({"model.layers.0.mlp.up_proj.bias": torch.ones(64)}, "hold 1 tensors that .* has not"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_weights_that_do_not_fit_the_config_are_refused_in_our_words(model, misfit):
    """transformers would draw what is missing at random, and leave out what is too much."""
    tensors, words = MISFITS[misfit]
    change(model, **tensors)
    with pytest.raises(UserError, match=f"could not be loaded: its files {words}"):
        load_it(model)


def test_tensors_that_no_module_misses_are_left_out(model):
    change(model, **{"vision.patches.weight": torch.ones(3, 3)})
    assert load_it(model).get_submodule("model.layers.1")


BAD = {"NaN": float("nan"), "infinite values": float("inf")}


@pytest.mark.parametrize("storage", ["plain", "nf4", "int8"])
@pytest.mark.parametrize("kind", BAD)
def test_weights_that_are_no_numbers_are_found_while_they_are_read(model, kind, storage):
    weight = load_file(model / "model.safetensors")[GATE]
    weight[3, 5] = BAD[kind]
    change(model, **{GATE: weight})
    with pytest.raises(
        UserError, match=rf"hold {kind} in {GATE} in model.safetensors \(1 of 2,048 values\); the model"
    ):
        load_it(model, storage=storage)


def test_weights_that_are_too_large_for_fp16_only_are_said_to_be(model):
    weight = load_file(model / "model.safetensors")[GATE]
    weight[0, 0] = 1e6
    change(model, **{GATE: weight})
    load_it(model, dtype="bf16")
    with pytest.raises(UserError, match=r"infinite values in .* fp16 ends at 65,504: use precision: bf16"):
        load_it(model, dtype="fp16")


def test_numbers_that_json_has_no_words_for_are_read_as_transformers_writes_them(model):
    config = json.loads((model / "config.json").read_text())
    config["odd"] = {"__float__": "Infinity"}
    config["inner"] = {"low": {"__float__": "-Infinity"}}
    (model / "config.json").write_text(json.dumps(config))
    found = read_config(str(model))
    assert found["odd"] == float("inf")
    assert found["inner"]["low"] == float("-inf")
    assert load_it(model).config.odd == float("inf")


def test_long_lists_of_names_are_shortened():
    assert shortened(["a", "b"]) == "a, b"
    assert shortened(f"n{i}" for i in range(5000)) == "n0, n1, n2 and 4,997 more"
    assert len(shortened(["x" * 10_000])) < 200


def test_a_folder_without_a_tokenizer_is_said_to_have_none(model):
    (model / "tokenizer_config.json").write_text(json.dumps({"model_max_length": "long"}))
    with pytest.raises(UserError, match=r"model_max_length 'long', which is no number"):
        load.load_tokenizer(Run(model=str(model), data="none.jsonl"))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (model / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"a tokenizer_config.json and no tokenizer.json, .* copy it there"):
        load.load_tokenizer(Run(model=str(model), data="none.jsonl"))
    for file in model.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UserError, match=r"holds no tokenizer .* copy its files there"):
        load.load_tokenizer(Run(model=str(model), data="none.jsonl"))


def test_a_tokenizer_that_takes_another_package_says_which(tmp_path, model, monkeypatch):
    def cannot_read(*_, **__):
        raise ValueError("`tiktoken` is required to read a `tiktoken` file.")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", cannot_read)
    with pytest.raises(UserError, match=r"SentencePiece or tiktoken file .*pip install sentencepiece.*tokenizer.json"):
        load.load_tokenizer(Run(model=str(model), data="none.jsonl"))


@pytest.mark.parametrize("settings", [None, {"model_max_length": 64}])
def test_a_tokenizer_that_names_no_class_is_the_same_beside_an_adapter(tiny_model, tmp_path, settings):
    """Its class, and with it its special tokens, are known by the model's config alone, which no adapter has."""
    folder = parity.write_model("qwen2", tmp_path / "model")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    shutil.copyfile(tiny_model / "tokenizer.json", folder / "tokenizer.json")
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    run = Run(model=str(folder), data="none.jsonl")
    known = load.load_tokenizer(run)
    side_files.make(run, tmp_path / "side", template=known.chat_template, ends=[2], texts={})
    (tmp_path / "adapter").mkdir()
    side_files.put_beside(tmp_path / "side", tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "config.json").exists()
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "adapter")
    assert known.eos_token is not None
    assert (read.eos_token, type(read)) == (known.eos_token, type(known))
    assert read("Hello there")["input_ids"] == known("Hello there")["input_ids"]


@pytest.mark.parametrize("chat_template", [None, "chatml.jinja"])
def test_a_tokenizer_of_words_stays_one_in_a_folder_of_any_architecture(tmp_path, chat_template):
    """transformers reads it as the byte-level BPE that Qwen2 usually has, and most words are lost."""
    folder = parity.write_model("qwen2", tmp_path / "model")
    run = Run(model=str(folder), data="none.jsonl")
    if chat_template:
        (tmp_path / chat_template).write_text("{% for one in messages %}w3 {{ one['content'] }}{% endfor %}")
        run = run.model_copy(update={"chat_template": str(tmp_path / chat_template)})
    tokenizer = load.load_tokenizer(run)
    assert tokenizer("w5 w37 w40 nothing")["input_ids"] == [5, 37, 40, 0]
    template = Path(run.chat_template).read_text() if chat_template else None
    side_files.make(run, tmp_path / "side", template=template, ends=[2], texts={})
    written = load.load_tokenizer(run.model_copy(update={"model": str(tmp_path / "side")}))
    assert written("w5 w37 w40 nothing")["input_ids"] == [5, 37, 40, 0]
