"""Multiple choice through ours and through lm-eval over one loaded model, and what recording costs a training step.

    python benchmarks/evaluation.py mmlu_validation.jsonl --out FOLDER [--items 400] [--only tasks|recording] [--tiny]

The model has the shape of an 8B Llama with random weights, made on the device; the tokenizer is trained on the file's
own texts (its tokens are about as long as usual ones). Both ways score the same items of the same model in one process,
one after the other and the first again: choices by their texts, and by their letters. lm-eval has the better of
--batches. Without lm-eval only ours is measured. The second part trains an adapter of the same shape by `tunesmith
train`, in steps that record and steps that do not (benchmarks/recording.py); most of its weights are zeros, which a
sparse file holds, and which make steps a little shorter, so that recording counts more. FOLDER gets evaluation.json.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tunesmith.evaluate import choices
from tunesmith.evaluate.score import Scorer
from tunesmith.evaluate.tasks import Choices, Item, read_task
from tunesmith.measure.bench import SHAPES
from tunesmith.measure.results import document

WHAT = "Multiple choice through ours and lm-eval on one model; training steps that record and that do not"
TOKENS = 8192
"""Of the tokenizer, and of a training step."""
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": TOKENS + 8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--items", type=int, default=400)
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--only", choices=["tasks", "recording"])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    shape = SHAPES["llama3-8b"] | (TINY if options.tiny else {})
    tokenizer = tokenizer_of(options.file)
    rows: list[dict[str, Any]] = []
    if options.only != "recording":
        rows += measure_tasks(shape, tokenizer, options)
        write(options.out, rows)
    if options.only != "tasks":
        rows.append(measure_recording(shape, tokenizer, options))
        write(options.out, rows)


def write(out: Path, rows: list[dict[str, Any]]) -> None:
    (out / "evaluation.json").write_text(json.dumps({**document(WHAT, rows), "numbers": rows}, indent=1) + "\n")


def tokenizer_of(file: Path) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>"]
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(file.read_text(encoding="utf-8").splitlines(), trainer)
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def config_of(shape: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model("llama", **shape, bos_token_id=0, eos_token_id=1, pad_token_id=2)


# Tasks


def measure_tasks(shape: dict[str, Any], tokenizer: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    began = time.monotonic()
    with device:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_config(config_of(shape), dtype=dtype).eval()
    print(f"model made in {time.monotonic() - began:.0f} s", flush=True)
    scorer = Scorer(model)
    rows = []
    for kind in ("choices", "letters"):
        items = read_task(str(options.file), kind, limit=options.items).items
        row = compared(scorer, tokenizer, items, options.batches)
        rows.append({"kind": kind, "items": len(items), **row})
        print(rows[-1], flush=True)
    return rows


def compared(scorer: Scorer, tokenizer: Any, items: Any, batches: list[int]) -> dict[str, Any]:
    def ours(some: Any) -> dict[str, list[float]]:
        return {item.id: found["likelihoods"] for item, found in choices.scores(scorer, tokenizer, some)}

    few = items[:64]
    warm_up, _ = timed(ours, few)
    first, mine = timed(ours, items)
    found: dict[str, Any] = {"warm_up_seconds": round(warm_up, 2), "shares_contexts": scorer.shares_contexts}
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        return found | {"seconds": round(first, 3), "items_per_second": len(items) / first, "lm_eval": str(error)}
    scorer.as_it_was()
    harness = {size: HFLM(pretrained=scorer.model, tokenizer=tokenizer, batch_size=size) for size in batches}
    tries = {
        size: timed(asked(one), few)[0] for size, one in harness.items() for _ in range(2)
    }  # the second one counts
    best = min(tries, key=tries.__getitem__)
    theirs_seconds, theirs = timed(asked(harness[best]), items)
    second, _ = timed(ours, items)
    pairs = [(a, b) for item in items for a, b in zip(mine[item.id], theirs[item.id], strict=True)]
    same = sum(mine[item.id].index(max(mine[item.id])) == theirs[item.id].index(max(theirs[item.id])) for item in items)
    return found | {
        "seconds": [round(first, 3), round(second, 3)],
        "items_per_second": 2 * len(items) / (first + second),
        "lm_eval_seconds": round(theirs_seconds, 3),
        "lm_eval_items_per_second": len(items) / theirs_seconds,
        "lm_eval_batch": best,
        "lm_eval_seconds_of_64_by_batch": {size: round(one, 3) for size, one in tries.items()},
        "ratio": theirs_seconds / ((first + second) / 2),
        "same_choice": same,
        "largest_difference": max(abs(a - b) for a, b in pairs),
    }


def asked(harness: Any) -> Callable[[Any], dict[str, list[float]]]:
    """lm-eval's own function for likelihoods, over all choices of all items at once."""

    def ask(items: list[Item]) -> dict[str, list[float]]:
        from lm_eval.api.instance import Instance

        given = []
        for item in items:
            content = item.content
            assert isinstance(content, Choices)
            given += [Instance("loglikelihood", {}, (content.context, one), 0) for one in content.continuations]
        rest = iter(harness.loglikelihood(given, disable_tqdm=True))
        return {item.id: [next(rest)[0] for _ in item.content.continuations] for item in items}

    return ask


def timed(function: Callable[[Any], Any], items: Any) -> tuple[float, Any]:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    began = time.perf_counter()
    found = function(items)
    wait()
    return time.perf_counter() - began, found


# Recording


def measure_recording(shape: dict[str, Any], tokenizer: Any, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tunesmith-evaluation-") as name:
        folder = Path(name)
        write_model(folder / "model", shape, tokenizer)
        lines = options.file.read_text(encoding="utf-8").splitlines()
        texts = [" ".join(lines[start : start + 4]) for start in range(0, len(lines), 4)]
        (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        length = 512 if options.tiny else 4096
        settings = {
            "model": str(folder / "model"), "data": str(folder / "train.jsonl"), "method": "lora", "held_out": 0,
            "sequence_length": length, "batch_tokens": 2 * length, "steps": options.steps, "epochs": None,
            "output": str(folder / "run"),
        }  # fmt: skip
        settings = {key: value for key, value in settings.items() if value is not None}
        (folder / "run.yaml").write_text(json.dumps(settings))
        script = Path(__file__).with_name("recording.py")
        command = [sys.executable, str(script), "--model", settings["model"], "--config", str(folder / "run.yaml")]
        environment = os.environ | {"RESULTS": str(folder / "results")}
        subprocess.run([*command, "--in-turn"], check=True, env=environment)
        found = json.loads((folder / "results" / "recording.json").read_text())["numbers"][0]
    return {"kind": "recording", "batch_tokens": 2 * length, **found}


def write_model(folder: Path, shape: dict[str, Any], tokenizer: Any) -> None:
    """A model's folder: its embeddings and first layer are random, all else are the zeros of a sparse file."""
    from transformers import AutoModelForCausalLM

    folder.mkdir()
    config = config_of(shape)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with torch.device("meta"):
        tensors = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    described, end = {}, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * 2
        described[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    header = json.dumps({"__metadata__": {"format": "pt"}, **described}).encode()
    header += b" " * (-len(header) % 8)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for name, tensor in tensors.items():
            is_norm = tensor.ndim == 1
            if is_norm or "layers." not in name or "layers.0." in name:
                file.seek(8 + len(header) + described[name]["data_offsets"][0])
                made = torch.empty(tensor.shape, dtype=torch.bfloat16, device=device).normal_(
                    1.0 if is_norm else 0.0, 0.02
                )
                file.write(made.cpu().view(torch.uint8).numpy().data)
        file.truncate(8 + len(header) + end)


if __name__ == "__main__":
    main()
