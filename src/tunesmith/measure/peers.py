"""The same workloads through other systems, where they are installed: transformers with peft, Liger, Unsloth, TRL.

Each peer is used as its own documentation says, with the same shapes, adapters, optimizer and tokens as ours, and with
or without recomputation. Packed workloads go in as one row of documents with restarting positions, which transformers
keeps apart by itself; Unsloth gets them padded, in rows of similar length. TRL goes through its own trainer.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tunesmith.data.types import StepBatch
from tunesmith.measure.bench import (
    LEARNING_RATE,
    SHAPES,
    Measurement,
    Turn,
    Workload,
    batches,
    few_layers,
    summary,
    timed,
)
from tunesmith.train.loop import peak_memory
from tunesmith.train.step import start_reading

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Peer:
    name: str
    needs: tuple[str, ...]
    """Packages that must be importable."""
    gpu_only: bool = False


PEERS = (
    Peer("transformers", ("transformers",)),
    Peer("liger", ("liger_kernel",), gpu_only=True),
    Peer("unsloth", ("unsloth",), gpu_only=True),
    Peer("trl", ("trl",)),
)


def available(workload: Workload, *, on_gpu: bool) -> list[str]:
    """The peers that are installed and can do this workload here."""
    extra = {"full": (), "lora": ("peft",), "qlora": ("peft", "bitsandbytes")}[workload.method]
    return [
        peer.name
        for peer in PEERS
        if (on_gpu or not peer.gpu_only) and all(find_spec(package) for package in (*peer.needs, *extra))
    ]


def measure_peer(
    name: str,
    workload: Workload,
    *,
    device: str,
    checkpointing: bool,
    warmup: int,
    steps: int,
    turn: Turn = nullcontext,
    models: Path | None = None,
) -> Measurement:
    """`models`: where the models that some systems want to load from a disk are kept for others to use."""
    with tempfile.TemporaryDirectory(prefix="tunesmith-peer-") as folder:
        if name == "trl":
            return _through_trainer(
                workload, Path(folder), device, checkpointing, warmup=warmup, steps=steps, turn=turn
            )
        model = _build(name, workload, models or Path(folder), device, checkpointing).train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)
        inputs_of = _padded if name == "unsloth" and workload.is_packed else _rows

        def step(batch: StepBatch) -> Callable[[], float]:
            loss = torch.zeros((), device=device)
            parts = list(inputs_of(batch, workload, device))
            for part in parts:
                with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
                    one = model(**part, use_cache=False).loss / len(parts)
                one.backward()
                loss += one.detach()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            read = start_reading(loss.view(1))
            return lambda: read()[0]

        return timed(step, workload, torch.device(device), warmup=warmup, steps=steps, turn=turn)


def _build(name: str, workload: Workload, folder: Path, device: str, checkpointing: bool) -> Any:
    if name == "unsloth":
        return _unsloth(workload, folder, checkpointing)
    if name == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    if workload.method == "qlora":
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        model = AutoModelForCausalLM.from_pretrained(
            saved(workload, folder, device),
            device_map={"": device},
            dtype=torch.bfloat16,
            attn_implementation=_attention(workload),
            quantization_config=BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.bfloat16,
            ),
        )
    else:
        model = _random_model(workload, device)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    if workload.method != "full":
        from peft import get_peft_model

        model = get_peft_model(model, _adapters())
    return model


def _unsloth(workload: Workload, folder: Path, checkpointing: bool) -> Any:
    from unsloth import FastLanguageModel

    path = saved(workload, folder, "cuda")
    model, _ = FastLanguageModel.from_pretrained(
        str(path),
        max_seq_length=workload.length,
        dtype=torch.bfloat16,
        load_in_4bit=workload.method == "qlora",
        full_finetuning=workload.method == "full",
    )
    if workload.method == "full":
        return model
    return FastLanguageModel.get_peft_model(
        model,
        r=16,
        lora_alpha=16,
        lora_dropout=0.0,
        bias="none",
        target_modules=TARGETS,
        use_gradient_checkpointing="unsloth" if checkpointing else False,
    )


def _through_trainer(
    workload: Workload, folder: Path, device: str, checkpointing: bool, *, warmup: int, steps: int, turn: Turn
) -> Measurement:
    """TRL's SFTTrainer on tokenized documents, in its padding-free mode where the workload is packed."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    made = batches(workload, warmup + steps)
    documents = [[row.tolist() for row in _documents(batch)] for batch in made]
    rows = max(len(one) for one in documents)
    if any(len(one) != rows for one in documents):  # a step of the trainer is a fixed number of documents
        rows = min(len(one) for one in documents)
        documents = [one[:rows] for one in documents]
    times: list[float] = []
    losses: list[float] = []
    alone = ExitStack()

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if len(times) == warmup:
                alone.enter_context(turn())
            if device == "cuda":
                torch.cuda.synchronize()
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - self.began)

        def on_log(self, _arguments: Any, _state: Any, _control: Any, logs: dict[str, float], **__: Any) -> None:
            losses.extend(value for key, value in logs.items() if key == "loss")

    settings = SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=rows,
        max_steps=len(documents),
        max_length=None,
        padding_free=workload.is_packed,
        gradient_checkpointing=checkpointing,
        learning_rate=LEARNING_RATE,
        bf16=device == "cuda",
        use_cpu=device == "cpu",
        optim="adamw_torch_fused",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=0,
    )
    trainer = SFTTrainer(
        model=_random_model(workload, device),
        args=settings,
        train_dataset=Dataset.from_dict({"input_ids": list(itertools.chain.from_iterable(documents))}),
        processing_class=tokenizer_of(SHAPES[workload.shape]["vocab_size"]),
        peft_config=None if workload.method == "full" else _adapters(),
        callbacks=[Clock()],
    )
    trainer._get_train_sampler = lambda *_: None  # in the order given, as the others see them
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with alone:
        trainer.train()
    tokens = [sum(map(len, one)) for one in documents]
    return summary(times, tokens, losses[-1], peak_memory(torch.device(device)), warmup=warmup)


def _random_model(workload: Workload, device: str) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**SHAPES[workload.shape], use_cache=False)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=_attention(workload))


def _attention(workload: Workload) -> str:
    """Packed documents need a kernel that knows their bounds, or a mask over everything."""
    if workload.is_packed and torch.cuda.is_available() and find_spec("flash_attn"):
        return "flash_attention_4" if find_spec("flash_attn.cute") else "flash_attention_2"
    return "sdpa"


def _adapters() -> Any:
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=16, lora_dropout=0.0, bias="none", target_modules=TARGETS)


def saved(workload: Workload, folder: Path, device: str) -> Path:
    """The workload's model as a folder, for systems that only load from one; made by the first that needs it."""
    path = folder / workload.shape
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{workload.shape}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (path / "tokenizer.json").exists():
            _save(workload, path, device)
            tokenizer_of(SHAPES[workload.shape]["vocab_size"]).save_pretrained(path)
    return path


def _save(workload: Workload, path: Path, device: str) -> None:
    """A file for each layer. All have the weights of the first: random ones cost the same wherever they stand, and a
    model of one layer needs little memory."""
    from safetensors.torch import save_file

    model = _random_model(few_layers(workload, 1), device)
    weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    in_layer = {name: tensor for name, tensor in weights.items() if ".layers.0." in name}
    parts = [{name: tensor for name, tensor in weights.items() if name not in in_layer}]
    layers = SHAPES[workload.shape]["num_hidden_layers"]
    for layer in range(layers):
        parts.append({name.replace(".layers.0.", f".layers.{layer}."): tensor for name, tensor in in_layer.items()})
    path.mkdir(parents=True, exist_ok=True)
    files = {f"model-{index:05}-of-{len(parts):05}.safetensors": part for index, part in enumerate(parts, 1)}
    for name, part in files.items():
        save_file(part, path / name, metadata={"format": "pt"})
    size = sum(tensor.nbytes for part in parts for tensor in part.values())
    where = {name: file for file, part in files.items() for name in part}
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    model.config.num_hidden_layers = layers
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(path)
    model.generation_config.save_pretrained(path)


def tokenizer_of(size: int) -> Any:
    """A tokenizer of so many words, which are called t0, t1, ...: random weights need no better one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{number}": number for number in range(size)}
    backend = Tokenizer(models.WordLevel(words, unk_token="t0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="t0", bos_token="t1", eos_token="t2", pad_token="t3"
    )


Inputs = dict[str, Any]


def _rows(batch: StepBatch, workload: Workload, device: str) -> Iterator[Inputs]:
    """Documents as rows, or end to end in one row with positions that begin anew with each."""
    (micro,) = batch.micro_batches
    tokens = micro.tokens.to(device)
    if not workload.is_packed:
        tokens = tokens.view(workload.sequences, workload.length)
        yield {"input_ids": tokens, "labels": tokens}
        return
    bounds = {}
    if _attention(workload) != "sdpa":  # transformers would work them out as tensors, which flash-attn-4 refuses
        for side in "qk":
            bounds[f"cu_seq_lens_{side}"] = micro.boundaries.to(device)
            bounds[f"max_length_{side}"] = micro.longest
    positions = micro.positions.to(device)[None]
    yield {"input_ids": tokens[None], "labels": tokens[None], "position_ids": positions, **bounds}


def _padded(batch: StepBatch, workload: Workload, device: str) -> Iterator[Inputs]:
    """Documents as rows, sorted by length and cut so that no part is larger than the workload's sequences."""
    left = sorted(_documents(batch), key=len, reverse=True)
    while left:
        count = max(1, workload.sequences * workload.length // len(left[0]))
        part, left = left[:count], left[count:]
        tokens = torch.nn.utils.rnn.pad_sequence(part, batch_first=True).to(device)
        lengths = torch.tensor([len(row) for row in part], device=device)
        mask = torch.arange(tokens.shape[1], device=device) < lengths[:, None]
        yield {"input_ids": tokens, "attention_mask": mask.long(), "labels": tokens.masked_fill(~mask, -100)}


def _documents(batch: StepBatch) -> list[torch.Tensor]:
    (micro,) = batch.micro_batches
    return list(micro.tokens.split(micro.boundaries.diff().tolist()))
