"""What a family can do beside training as a plain loop does: each thing tried on a tiny model of it, on the CPU.

A cell is what came of one try: `yes`, a difference from what is expected, or a reason in a few words.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import parity
from families import VOCABULARY, quiet

STEPS = 10
RUNS = {"lora": "packed", "lora_unpacked": "padded", "full": "packed", "full_unpacked": "padded"}
"""Trainings by their cells, with the layout of documents."""
SLOW = 60
"""Seconds of the CPU's time, from which on tracing layers is given up."""
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3_text": {"query_pre_attn_scalar": 8, "num_hidden_layers": 6}
    | {"layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
    "qwen3_moe": {"norm_topk_prob": True},
}
"""What configs have as they are published, and llama.cpp takes for given."""
Cell = str | float


def support(family: str, folder: Path) -> dict[str, Any]:
    """The row of this family; everything is written below `folder`, and removed."""
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    try:
        row = {"family": family} | _cells(family, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return row | {"seconds": round(time.monotonic() - began, 1)}


def _cells(family: str, folder: Path) -> dict[str, Any]:
    from tunesmith.model.probe import probe

    model = parity.write_model(family, folder / "model", **PUBLISHED.get(family, {}))
    row: dict[str, Any] = {}
    for cell, layout in RUNS.items():
        row[cell], trained = _trained(model, cell.partition("_")[0], folder / cell, layout)
        if cell == "lora" and trained is not None:
            job = trained.job
            row |= {
                "layout": job.spec.layout,
                "fused": [*(probe(job.run).kernels or ())],
                "compiled": _tried(traced, job),
            }
            row["fused"] += ["adapters"] if job.plan.fuse_adapters else []
            job.write_result()
            row["merge"] = _tried(merged, job.folder, folder / "merged")
            row["gguf"] = _tried(in_gguf, folder / "merged" if isinstance(row["merge"], float) else model, folder)
            row["tensor"] = split_over_ranks(job, folder)
    row["qlora"], _ = _trained(model, "qlora", folder / "qlora", None)
    return row


def _trained(model: Path, method: str, folder: Path, layout: str | None) -> tuple[Cell, Any]:
    """The largest difference of a step's loss from a plain loop's, over the weights that are held; and the run."""
    from tunesmith.errors import UserError

    try:
        trained = parity.train(model, method, folder, steps=STEPS, layout=None if layout == "packed" else layout)
    except UserError as error:
        return str(error), None
    except Exception as error:
        return f"{type(error).__name__}: {parity.one_line(error)}", None
    with quiet():
        expected = parity.plain_losses(plain_base(model, method), trained, method)
    worst = parity.distance(trained.losses, expected)
    if worst > parity.TOLERANCE:  # what another order of sums does to a plain loop
        other = replace(trained, documents=parity.reversed_documents(trained))
        with quiet():
            again = parity.distance(parity.plain_losses(plain_base(model, method), other, method), expected)
        if not worst <= 4 * again:
            return f"differs by {worst:.1e}", trained
    return float(f"{worst:.1e}"), trained


def plain_base(folder: Path, method: str) -> torch.nn.Module:
    """transformers' model; for QLoRA with the values that linears and experts have in nf4."""
    from tunesmith.model import quantized

    model = parity.plain_model(folder)
    if method == "qlora":
        quantized.round_weights(model, "nf4")
    return model


def _tried(attempt: Callable[..., Cell], *given: Any) -> Cell:
    from tunesmith.errors import UserError

    try:
        with quiet():
            return attempt(*given)
    except UserError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {parity.one_line(error)}"


def traced(job: Any) -> Cell:
    """Whether torch's compiler takes each layer as one graph. Attention is an operator without arithmetic, as kernels
    on a GPU are to the compiler."""
    from tunesmith.model import kept
    from tunesmith.model.forward import hidden_states, to_device
    from tunesmith.model.structure import decoder_layers

    layers = decoder_layers(job.model)
    own = [layer.forward for layer in layers]
    configs = [job.model.config, job.model.config.get_text_config()]
    attention = [config._attn_implementation for config in configs]
    is_packed = job.spec.layout == "packed"
    torch._dynamo.reset()
    began = time.process_time()
    signal.signal(signal.SIGPROF, _give_up)
    signal.setitimer(signal.ITIMER_PROF, SLOW)  # of the CPU's time
    try:
        for layer in layers:
            layer.forward = torch.compile(layer.forward, backend="eager", fullgraph=True)
        with kept._attention_of(job.model, on_gpu=True) if is_packed else contextlib.nullcontext():
            batch = job.loader.step(0).micro_batches[0]
            hidden_states(job.model, to_device(batch, job.device), job.spec)
    except Exception as error:
        return f"not traced in {SLOW} s" if time.process_time() - began > SLOW else f"no: {_break(error)}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        torch._dynamo.reset()
        for layer, forward in zip(layers, own, strict=True):
            layer.forward = forward
        for config, name in zip(configs, attention, strict=True):
            config._attn_implementation = name
    return "yes"


def _give_up(*_: object) -> None:
    raise TimeoutError


def _break(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    said = next((line for line in lines if line.startswith("Explanation: ")), parity.one_line(error))
    return said.removeprefix("Explanation: ")


def merged(run: Path, to: Path) -> Cell:
    """How far the logits of the merged model, read back, are from those of base and adapter."""
    from tunesmith.run.merge import merge_run

    difference = merge_run(run, to).difference
    return float(f"{difference:.1e}") if difference <= 1e-4 else f"accepted, and its logits differ by {difference:.1e}"


def in_gguf(model: Path, folder: Path) -> Cell:
    """Whether the model is written as GGUF and llama.cpp's own package reads all its tensors."""
    import gguf as library
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tunesmith.export import gguf
    from tunesmith.export.source import Source

    to = folder / "model.gguf"
    with Source.of_model(str(model)) as source:
        gguf.architecture_of(source.weights.model)
        backend = Tokenizer(models.BPE({f"w{i}": i for i in range(VOCABULARY)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokens = {"bos_token": "w1", "eos_token": "w2", "pad_token": "w0"}
        source.encoder.tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)
        gguf.check(source, "f32")
        gguf.write_plain(source, to, "f32", lambda *_: None)
    held = {one.name: one.data for one in library.GGUFReader(to).tensors}
    return "yes" if len(held) > 5 and all(data.size for data in held.values()) else "its file is empty"


def split_over_ranks(job: Any, folder: Path) -> Cell:
    """Whether two tensor ranks compute what one does."""
    context = multiprocessing.get_context("fork")
    told = context.SimpleQueue()
    ranks = [context.Process(target=_rank, args=(number, job, folder / "store", told)) for number in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        process.kill()
    return "no answer in a minute" if told.empty() else told.get()


def _rank(number: int, job: Any, store: Path, told: Any) -> None:
    import torch.distributed as dist

    from tunesmith.parallel.check import check_parallelism
    from tunesmith.plan.plan import Mesh

    def check() -> Cell:
        check_parallelism(job.run, job.plan.changed(mesh=Mesh(tensor=2)), torch.device("cpu"))
        return "yes"

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # those of the process that was forked are not here
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    found = _tried(check)
    if number == 0:
        told.put(found)
    dist.barrier()
    dist.destroy_process_group()
