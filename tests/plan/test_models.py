"""From a model's name to its facts: folders, GGUF headers, the hub's cache, and architectures without a formula."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from tunesmith.errors import UserError
from tunesmith.plan.families import from_config
from tunesmith.plan.models import build_facts, find, gguf_config, read_config, read_facts, rounded_already

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


def write_gguf(path: Path, *, tied: bool = True, kind: int | None = None) -> Path:
    """The header of a GGUF file (no weights), as its specification says."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    def number(value: int) -> bytes:
        return struct.pack("<II", 4, value)

    values = {
        "general.architecture": struct.pack("<I", 8) + text("llama"),
        "llama.embedding_length": number(64),
        "llama.block_count": number(3),
        "llama.feed_forward_length": number(160),
        "llama.attention.head_count": number(4),
        "llama.attention.head_count_kv": number(2),
        "llama.context_length": number(256),
        "llama.rope.freq_base": struct.pack("<If", 6, 10000.0),
        "tokenizer.ggml.scores": struct.pack("<IIQ", 9, 6, 131) + struct.pack("<131f", *range(131)),
        "tokenizer.ggml.tokens": struct.pack("<IIQ", 9, 8, 131) + b"".join(text(f"t{n}") for n in range(131)),
    }
    values |= {} if kind is None else {"general.file_type": number(kind)}
    names = ["token_embd.weight"] + ([] if tied else ["output.weight"])
    content = struct.pack("<4sIQQ", b"GGUF", 3, len(names), len(values))
    content += b"".join(text(key) + value for key, value in values.items())
    content += b"".join(text(name) + struct.pack("<IQQIQ", 2, 64, 131, 0, 0) for name in names)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_header_says_what_config_json_says(tmp_path, tied):
    file = write_gguf(tmp_path / "m.gguf", tied=tied)
    expected = from_config(LLAMA | {"tie_word_embeddings": tied})
    assert from_config(gguf_config(file)).changed(architecture=expected.architecture) == expected
    assert read_facts(str(tmp_path)).parameters == expected.parameters  # a folder that holds nothing else


@pytest.mark.parametrize(("kind", "said"), [(None, None), (1, None), (32, None), (15, "GGUF, file type 15")])
def test_a_gguf_tells_whether_its_weights_are_in_few_bits(tmp_path, kind, said):
    assert rounded_already(str(write_gguf(tmp_path / "m.gguf", kind=kind))) == said


def test_a_gguf_that_took_the_place_of_another_is_read_anew(tmp_path):
    found = [gguf_config(write_gguf(tmp_path / "m.gguf", tied=tied))["tie_word_embeddings"] for tied in (True, False)]
    assert found == [True, False]


def test_a_damaged_gguf_is_one_sentence(tmp_path):
    good = write_gguf(tmp_path / "m.gguf").read_bytes()
    for name, content in {
        "cut": good[:200],
        "other": b"PK" + good[2:],
        "empty": b"",
        "long": good[:24] + b"\xff" * 90,
    }.items():
        file = tmp_path / f"{name}.gguf"
        file.write_bytes(content)
        with pytest.raises(UserError, match="not a readable GGUF"):
            gguf_config(file)


def test_a_folder_is_read_without_torch_or_transformers(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_facts(str(tmp_path)) == from_config(LLAMA)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("./nowhere", "does not exist"),
        ("a/b/c", "does not exist"),
        ("some/model", "neither a folder here nor in the hub's cache"),
        ("not a name!", "does not exist"),
    ],
)
def test_what_is_no_model_is_one_sentence(model, words):
    with pytest.raises(UserError, match=words):
        read_config(model)


def test_folders_that_hold_something_else_are_named(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        find(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="adapter"):
        find(str(tmp_path))
    for content in ("{", "[]"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(UserError, match=r"config\.json"):
            read_config(str(tmp_path))


def test_the_folder_of_a_run_is_told_from_the_model_that_it_made(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"made an adapter; give its base and `adapter: .*`, or what `tunesmith merge`"):
        find(str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"is the folder of a run; give the model that it made, .*/model\.$"):
        find(str(tmp_path))


@pytest.mark.parametrize("family", ["olmo2", "starcoder2", "granite"])
def test_an_architecture_without_a_formula_is_counted_on_the_meta_device(family):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = LLAMA | {"model_type": family, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    facts = build_facts(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert facts.layers == 3
    assert "no formula" in (facts.note or "")


def test_an_architecture_that_nobody_knows_is_guessed_and_says_so(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"model_type": "mystery"}))
    facts = read_facts(str(tmp_path))
    assert facts.parameters == from_config(LLAMA).parameters
    assert "usual decoder" in (facts.note or "")
