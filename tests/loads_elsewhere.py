"""What every result folder must be: one that plain transformers (and peft) load, and that stops where turns end.

`tiny.Runs` checks each result that a run of the tests leaves behind. Of folders with equal side files and equal names
of tensors, the first alone is loaded whole: loading takes longer than many a tiny run.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

SIDE = ("README.md", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def check_results(run: Path) -> None:
    """All results in the folder of a run."""
    for name in ("adapter", "model"):
        if (run / name).is_dir():
            check_result(run / name)


def check_result(folder: Path) -> None:
    names = {file.name for file in folder.iterdir()}
    assert names >= set(SIDE), names
    assert ("adapter_config.json" in names) != ("config.json" in names), names
    if _scores(folder):  # it generates nothing; tests/objectives/test_heads.py and test_tags.py load such
        return
    if (likeness := _likeness(folder)) in _seen:
        return
    _check_whole(folder)
    _seen.add(likeness)


def _scores(folder: Path) -> bool:
    """Whether it is a model with a head of its own."""
    adapter = folder / "adapter_config.json"
    if adapter.exists():
        return json.loads(adapter.read_text()).get("task_type") in ("SEQ_CLS", "TOKEN_CLS")
    return "Classification" in json.loads((folder / "config.json").read_text())["architectures"][0]


def _is_encoder_decoder(folder: Path) -> bool:
    adapter = folder / "adapter_config.json"
    if adapter.exists():
        return json.loads(adapter.read_text()).get("task_type") == "SEQ_2_SEQ_LM"
    return bool(json.loads((folder / "config.json").read_text()).get("is_encoder_decoder"))


def load_plain(folder: Path) -> tuple[Any, Any, Any]:
    """Model, tokenizer and generation config, as anybody loads them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig

    if (folder / "adapter_config.json").exists():
        from peft import AutoPeftModelForCausalLM, AutoPeftModelForSeq2SeqLM

        kind = AutoPeftModelForSeq2SeqLM if _is_encoder_decoder(folder) else AutoPeftModelForCausalLM
        model = kind.from_pretrained(folder, dtype=torch.float32)
    else:
        kind = AutoModelForSeq2SeqLM if _is_encoder_decoder(folder) else AutoModelForCausalLM
        model, report = kind.from_pretrained(folder, output_loading_info=True)
        assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval(), AutoTokenizer.from_pretrained(folder), GenerationConfig.from_pretrained(folder)


def answer(folder: Path, question: str, most: int = 40) -> tuple[str, int]:
    """What plain transformers makes the model say, taking the likeliest token each time; and the last token."""
    model, tokenizer, generation = load_plain(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    asked = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    generation.update(do_sample=False, max_new_tokens=most)
    said = model.generate(**asked, generation_config=generation)[0, asked["input_ids"].shape[1] :].tolist()
    return tokenizer.decode(said, skip_special_tokens=True), said[-1]


def _likeness(folder: Path) -> str:
    """Equal for folders that load equally: side files, and names and shapes of tensors."""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix == ".safetensors":
            with file.open("rb") as stream:
                digest.update(stream.read(int.from_bytes(stream.read(8), "little")))
        elif file.is_file() and file.name not in ("README.md", "adapter_config.json"):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _check_whole(folder: Path) -> None:
    from tunesmith.data.chat import Encoder

    model, tokenizer, generation = load_plain(folder)
    encoder = Encoder(tokenizer, template=None, train_on="assistant")
    stops = generation.eos_token_id if isinstance(generation.eos_token_id, list) else [generation.eos_token_id]
    assert encoder.has_template or _is_encoder_decoder(folder)
    assert encoder.end_ids <= set(stops), (encoder.end_ids, stops)
    generation.validate(strict=True)
    generation.update(max_new_tokens=2)
    model.generate(**tokenizer("x", return_tensors="pt"), generation_config=generation)


_seen: set[str] = set()
