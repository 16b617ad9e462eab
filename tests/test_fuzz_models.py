"""500 mutated model folders: each is refused in a sentence, or trained as what it is; no traceback, no hang, no more
memory than a model of its size takes."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tiny import write_data
from tiny_model import make_tiny_model
from tunesmith.cli.main import main
from tunesmith.config.schema import Run
from tunesmith.model import load
from tunesmith.parallel.prepare import load_model
from tunesmith.train import events

ALL = 500
SECONDS = 120
ROOM = 3 << 30
"""Bytes that a run may take beyond what the process has."""
TOKENS = torch.arange(3, 30)[None]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 1.5, -0.5, 1e-9, 1e300, float("inf"), float("nan"), 10**6, 10**9, 2**31,
    2**63, 10**40, "", "x", "none", "1", "../..", "/etc/passwd", "a" * 3000, [], [1], [None], ["x"], {}, {"a": 1},
    {"__float__": "Infinity"}, [[]], "gpt2", "bert", "t5", "llama", "mamba", "LlamaForCausalLM", "BertModel", "float64",
    "bfloat16", "eager", "{{ x }}", "\u0000", "\ud800", "<|im_end|>",
]  # fmt: skip


def mutate_json(path: Path, chance: random.Random) -> None:
    """A value replaced, removed, renamed or doubled somewhere in it, or the file itself spoilt."""
    if chance.random() < 0.15:
        spoil(path, chance)
        return
    content = json.loads(path.read_text())
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        places = list(_places(content))
        if not places:
            break
        owner, key = chance.choice(places)
        kind = chance.randrange(5)
        if kind == 0:
            del owner[key]
        elif kind == 1 and isinstance(owner, dict):
            owner[chance.choice(["x", f"{key}_", "hidden_size", "quantization_config"])] = owner.pop(key)
        elif kind == 2:
            other, place = chance.choice(places)
            with contextlib.suppress(KeyError, IndexError, TypeError):
                owner[key] = json.loads(json.dumps(other[place]))
        elif kind == 3 and isinstance(owner[key], int | float) and not isinstance(owner[key], bool):
            owner[key] = chance.choice([2, 0.5, -1, 1000]) * owner[key]
        else:
            owner[key] = chance.choice(VALUES)
    path.write_text(json.dumps(content))


def _places(content: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Of the values, the outer ones more often."""
    keys = content.keys() if isinstance(content, dict) else range(len(content))
    for key in list(keys)[:40]:
        yield content, key
        if isinstance(content[key], dict | list) and depth < 4:
            yield from _places(content[key], depth + 1)


def spoil(path: Path, chance: random.Random) -> None:
    """Bytes cut off, changed or put in; another encoding; nothing at all; a folder in its place."""
    content = bytearray(path.read_bytes())
    kind = chance.randrange(8)
    if kind == 0:
        content = content[: chance.randrange(len(content) + 1)]
    elif kind in (1, 2):
        for _ in range(chance.choice([1, 1, 5])):
            content[chance.randrange(len(content))] = chance.randrange(256)
    elif kind == 3:
        place = chance.randrange(len(content) + 1)
        content[place:place] = chance.choice([b"\0", b"\xff\xfe", b"{", b"]", b'"', b"\xef\xbb\xbf", b"{%", b"}}"])
    elif kind == 4:
        content = bytearray(content.decode("utf-8", "replace").encode(chance.choice(["utf-16", "utf-8-sig", "utf-32"])))
    elif kind == 5:
        content = bytearray(chance.choice([b"", b"{}", b"[]", b"null", b"7", b"[" * 3000, b'{"a":' * 3000]))
    path.unlink()
    if kind == 6:
        path.mkdir()
    elif kind != 7:
        path.write_bytes(content)


def mutate_weights(folder: Path, chance: random.Random) -> None:
    path = chance.choice(sorted(folder.glob("model*.safetensors")))
    kind = chance.randrange(12)
    if kind == 0:
        spoil(path, chance)
        return
    if kind == 1:
        spoil_header(path, chance)
        return
    tensors = load_file(path)
    names = sorted(tensors)
    name, other = chance.choice(names), chance.choice(names)
    one = tensors[name]
    if kind == 2:
        del tensors[name]
    elif kind == 3:
        tensors[name], tensors[other] = tensors[other].clone(), one.clone()
    elif kind == 4:
        tensors[chance.choice(["x", f"{name}.x", name.replace("0", "7"), name.replace("model", "m")])] = tensors.pop(
            name
        )
    elif kind == 5:
        tensors[name] = one[:-1].clone() if one.shape[0] > 1 else torch.ones(3)
    elif kind == 6:
        tensors[name] = one.t().contiguous() if one.ndim == 2 else one[None].clone()
    elif kind == 7:
        flat = one.reshape(-1)
        tensors[name] = flat.clone() if one.ndim == 2 else flat.view(2, -1).clone()
    elif kind == 8:
        kinds = ["float16", "bfloat16", "float64", "int8", "uint8", "bool", "int64", "float8_e4m3fn", "float8_e5m2"]
        tensors[name] = one.to(getattr(torch, chance.choice(kinds)))
    elif kind == 9:
        one.view(-1)[chance.randrange(one.numel())] = chance.choice([float("nan"), float("inf"), -float("inf"), 1e30])
    elif kind == 10:
        more = chance.choice(
            ["model.layers.2.mlp.up_proj.weight", f"{name}_scale", f"{name}.SCB", "lm_head.weight", "x"]
        )
        more = more if chance.random() < 0.7 else name.replace("weight", "bias")
        tensors[more] = chance.choice([one.clone(), torch.ones(1), torch.ones(32)])
    else:
        tensors[name] = torch.zeros(0) if chance.random() < 0.5 else torch.zeros(())
    save_file(tensors, path, chance.choice([None, {"format": "pt"}, {"format": "x"}]))


def spoil_header(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = chance.choice(sorted(header))
    said = header[name]
    if "shape" in said:
        key = chance.choice(["shape", "dtype", "data_offsets"])
        said[key] = chance.choice([[2**40, 2**40], [-1], [0, 10**15], "F32", "F4", None, {}, [], [1.5], "BF16", [0, 0]])
    else:
        header[name] = chance.choice([7, None, [], {"a": 7}])
    text = json.dumps(header).encode()
    said_length = chance.choice([len(text)] * 5 + [0, 2**63, len(text) + 9])
    path.write_bytes(said_length.to_bytes(8, "little") + text + content[8 + length :])


def mutate_template(folder: Path, chance: random.Random) -> None:
    spoil(folder / "chat_template.jinja", chance)


KINDS: dict[str, Callable[[Path, random.Random], None]] = {
    "config": lambda folder, chance: mutate_json(folder / "config.json", chance),
    "weights": mutate_weights,
    "index": lambda folder, chance: mutate_json(folder / "model.safetensors.index.json", chance),
    "tokenizer": lambda folder, chance: mutate_json(folder / "tokenizer.json", chance),
    "tokenizer_config": lambda folder, chance: mutate_json(folder / "tokenizer_config.json", chance),
    "template": mutate_template,
    "generation": lambda folder, chance: mutate_json(folder / "generation_config.json", chance),
}
SHARES = (
    ["config"] * 6
    + ["weights"] * 6
    + ["index"] * 2
    + ["tokenizer"] * 2
    + ["tokenizer_config", "template", "generation"]
)


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """In two files."""
    folder = make_tiny_model(tmp_path_factory.mktemp("original") / "model", hidden_size=32, num_hidden_layers=2)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"model-{number}-of-2.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """No more than so much memory and time."""
    status = Path("/proc/self/status").read_text()
    has = 1024 * int(status.split("VmData:")[1].split()[0])
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (has + ROOM, before[1]))

    def late(*_: object) -> None:
        raise AssertionError(f"it took longer than {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_DATA, before)


def tunesmith(*arguments: str) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        limited(),
        pytest.raises(SystemExit) as ended,
    ):
        main(arguments)
    return ended.value.code or 0, err.getvalue()


def run_mutant(number: int, original: Path) -> tuple[str, int, str]:
    """Its kind, how it ended, and what is wrong with that, if anything."""
    chance = random.Random(f"model {number}")
    kind = SHARES[number % len(SHARES)]
    folder = Path(f"m{number}")
    shutil.copytree(original, folder)
    KINDS[kind](folder, chance)
    code, err = tunesmith("train", "run.yaml", f"model={folder}", f"output=r{number}", "steps=1", "max_minutes=1")
    problem = _judge(kind, folder, Path(f"r{number}"), code, err)
    if not problem:
        shutil.rmtree(folder)
        shutil.rmtree(f"r{number}", ignore_errors=True)
    return kind, code, problem


def _judge(kind: str, folder: Path, run: Path, code: int, err: str) -> str:
    if code == 70 and (file := re.search(r"traceback is in (\S+\.txt)", err)):
        err += Path(file[1]).read_text()
    lines = err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    if code not in (0, 1) or "Traceback" in err or (len(errors) > 0) != (code == 1):
        return f"ended with {code}: {err[-3000:]}"
    if any(not 15 < len(line) < 1100 for line in errors):
        return f"not a sentence: {errors}"
    if code == 0 and kind in ("config", "weights", "index", "generation") and not _is_right(folder, run):
        return "trained as something that it is not"
    return ""


def losses_of(run: Path) -> list[float]:
    return [record["loss"] for record in events.read(run) if record["event"] == "step"]


def _is_right(folder: Path, run: Path) -> bool:
    """Whether it has the original's loss; or whether the weights that are read are those that transformers reads, none
    of them drawn at random."""
    losses = losses_of(run)
    if losses == losses_of(Path("original")):
        return True
    if len(losses) != 1 or not losses[0] < 1e9:
        return False
    with load.quiet():
        theirs, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    if info["missing_keys"] or info["mismatched_keys"]:
        return False
    mine = load_model(Run(model=str(folder), data="x"), dtype="fp32", device="cpu")
    with torch.no_grad():
        logits = [model(TOKENS, use_cache=False).logits for model in (mine, theirs)]
    return torch.allclose(*logits, rtol=1e-3, atol=1e-3, equal_nan=True)


def run_all(numbers: range, original: Path) -> dict[str, list[int]]:
    write_data(Path("train.jsonl"), 6)
    settings = {"data": "train.jsonl", "sequence_length": 64, "batch_tokens": 128, "precision": "fp32", "device": "cpu"}
    Path("run.yaml").write_text(json.dumps({"model": str(original), "method": "lora", **settings}))
    assert tunesmith("train", "run.yaml", "output=original", "steps=1")[0] == 0
    problems, codes = [], {}
    for number in numbers:
        kind, code, problem = run_mutant(number, original)
        codes.setdefault(kind, []).append(code)
        if problem:
            problems.append(f"mutant {number} ({kind}): {problem}")
    assert not problems, f"{len(problems)} of {len(numbers)}:\n" + "\n\n".join(problems)
    return codes


def test_some_mutated_model_folders_are_refused_in_a_sentence_or_trained_as_what_they_are(
    original, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    codes = run_all(range(7, ALL, 41), original)
    assert {0, 1} <= {code for kind in codes.values() for code in kind}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_500_mutated_model_folders_are_refused_in_a_sentence_or_trained_as_what_they_are(
    original, tmp_path, monkeypatch, part
):
    monkeypatch.chdir(tmp_path)
    each = ALL // 10
    codes = run_all(range(each * part, each * (part + 1)), original)
    for kind in ("config", "weights", "index"):
        assert 1 in codes[kind], kind
