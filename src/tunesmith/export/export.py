"""A run out of the door: check, write, prove, describe, and only then give the folder its name.

One entry for each format: what it can hold, what writes it, and which engine it is proved by. Everything is written
into a partial folder beside the target, which is renamed when the proof has been given; a kill or a failure leaves
nothing that looks like an export.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from tunesmith import disk, hub
from tunesmith.checkpoint.room import with_slack
from tunesmith.config.schema import Dataset
from tunesmith.data.recognise import given_by_option
from tunesmith.errors import UserError, first_line, listed
from tunesmith.export import adapter, gguf, onnx, quantized, safetensors
from tunesmith.export.describe import copy_licence, write_card
from tunesmith.export.engines import (
    VLLM_ROOM,
    Engine,
    LlamaCpp,
    OnnxRuntime,
    Peft,
    Streamed,
    Transformers,
    Vllm,
)
from tunesmith.export.proof import GREEDY, LONGEST, Proof, Sample, prove, samples_of
from tunesmith.export.source import Progress, Source, has
from tunesmith.infer.vllm_server import VARIABLE, find_command
from tunesmith.model import load
from tunesmith.model.save import remove_leftovers, whole_folder
from tunesmith.objectives import objective_of
from tunesmith.plan.models import rounded_already
from tunesmith.run.certificate import certify
from tunesmith.run.evaluate import held_out_of
from tunesmith.run.folder import read_plan, read_run
from tunesmith.run.merge import BITS, put_side_files
from tunesmith.run.open import refuse_encoder_decoder, refuse_head, trained_storage


@dataclass(frozen=True)
class Format:
    types: tuple[str, ...]
    """The first is the usual one; `""` stands for that of the base."""
    check: Callable[[Source, str], None]
    size: Callable[[Source, str], int]
    write: Callable[[Source, Path, str, Progress], None]
    engine: Callable[[Source, Path, str], Engine]
    packages: tuple[str, ...] = ()
    """That the engine needs."""
    is_bounded: bool = False
    """The engine runs models that do not fit into memory."""
    vllm: Callable[[Source, Path, str], Engine] | None = None
    """The same by vLLM, where that loads this format."""


def _gguf_engine(source: Source, folder: Path, kind: str) -> Engine:
    return LlamaCpp(folder / gguf.file_name(kind), vocabulary=source.vocabulary, context=LONGEST + 2 * GREEDY)


def _gguf_adapter_engine(source: Source, folder: Path, kind: str) -> Engine:
    """Over the base alone, written for this."""
    bare = replace(source, weights=replace(source.weights, adapter=None, adapted=()))
    base = folder / ".base.gguf"
    gguf.write_plain(bare, base, "f32", lambda *_: None)
    sizes = {"vocabulary": source.vocabulary, "context": LONGEST + 2 * GREEDY}
    try:
        return LlamaCpp(base, **sizes, adapter=folder / f"adapter-{kind}.gguf")
    finally:
        base.unlink()  # the server has mapped it


def _peft_engine(source: Source, folder: Path, kind: str) -> Engine:
    return Peft(folder, source.weights.base, trust_remote_code=source.run.trust_remote_code)


def _transformers(source: Source, folder: Path) -> Engine:
    return Transformers(folder, trust_remote_code=source.run.trust_remote_code)


def _safetensors_engine(source: Source, folder: Path, kind: str) -> Engine:
    return _transformers(source, folder) if fits(source) else Streamed(folder, source.run)


def _vllm_engine(source: Source, folder: Path, kind: str) -> Engine:
    """In fp32, so that what is seen is the files' rounding alone; in few bits, for which kernels want 16-bit
    activations, and over a base with an adapter on a GPU, as vLLM chooses."""
    is_adapter = kind in adapter.TYPES and not (folder / "config.json").exists()
    is_rounded = kind in quantized.COMPRESSED
    dtype = "auto" if is_rounded or (is_adapter and torch.cuda.is_available()) else "float32"
    context = min(load.max_positions(source.weights.model.config) or LONGEST, LONGEST + 2 * GREEDY)
    sizes = {"vocabulary": source.vocabulary, "context": context}
    return Vllm(folder, dtype=dtype, base=source.weights.base if is_adapter else None, **sizes)


def fits(source: Source) -> bool:
    """Whether the model fits into host memory in fp32, twice: engines read files into more than they keep."""
    return 8 * source.weights.count <= psutil.virtual_memory().available


FORMATS = {
    "safetensors": Format(
        safetensors.TYPES,
        safetensors.check,
        safetensors.size,
        safetensors.write,
        _safetensors_engine,
        is_bounded=True,
        vllm=_vllm_engine,
    ),
    "adapter": Format(
        adapter.TYPES, adapter.check, adapter.size, adapter.write, _peft_engine, ("peft",), vllm=_vllm_engine
    ),
    "gguf": Format(gguf.TYPES, gguf.check, gguf.size, gguf.write, _gguf_engine, ("xllamacpp",), True),
    "gguf-adapter": Format(
        ("f32", "f16"), gguf.check_adapter, gguf.size_adapter, gguf.write_adapter, _gguf_adapter_engine, ("xllamacpp",)
    ),
    "onnx": Format(onnx.TYPES, onnx.check, onnx.size, onnx.write, lambda s, f, k: OnnxRuntime(f), ("onnxruntime",)),
    "compressed-tensors": Format(
        quantized.COMPRESSED,
        quantized.check_compressed,
        quantized.size,
        quantized.write_compressed,
        lambda s, f, k: _transformers(s, f),
        ("compressed_tensors",),
        vllm=_vllm_engine,
    ),
    "bitsandbytes": Format(
        quantized.BITSANDBYTES,
        quantized.check_bitsandbytes,
        quantized.size,
        quantized.write_bitsandbytes,
        lambda s, f, k: _transformers(s, f),
        ("bitsandbytes", "accelerate"),
    ),
}
PRECISIONS = {
    "f32": "fp32", "f16": "fp16", "q8_0": "8 bits", "int8": "8 bits", "q6_k": "8 bits",
    **dict.fromkeys(("q4_0", "int4", "nvfp4", "nf4", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m"), "4 bits"),
    **dict.fromkeys(("q2_k", "q3_k_s", "q3_k_m", "q3_k_l"), "2 bits"),
}  # fmt: skip
"""By which bound a type is judged, where it is not its own name."""
FEW_BITS = ("8 bits", "4 bits", "2 bits", "fp8")
TRAINED_FOR = {"int4": "bf16", "nvfp4": "bf16", "q4_0": "8 bits", "fp8": "fp8"}
"""The same where the run was trained for the type, so that rounding has no part in it: what is left are embeddings in
16 or 8 bits, and inputs that llama.cpp (q4_0) and fp8 matmuls round to 8."""
ALIKE = ("int8", "int4", "nvfp4", "fp8", "q8_0", "q4_0")
"""Types of which all that rounds much is computed here."""


@dataclass(frozen=True)
class Exported:
    folder: Path
    kind: str
    proof: Proof | None
    missing: str
    """What to install to have it proved, where it was not."""
    notes: tuple[str, ...]
    step: int | None


def export_run(
    folder: Path,
    form: str,
    *,
    kind: str | None = None,
    out: Path | None = None,
    push: str | None = None,
    data: Sequence[str] = (),
    engine: str | None = None,
    progress: Progress = lambda *_: None,
    say: Callable[[str], None] = lambda _: None,
) -> Exported:
    """Export the run in `folder`; `say` is told what should be known before anything is written. It is compared on the
    run's held-out data, or on the files in `data`; by `vllm` where that is the engine which is asked for, else by the
    format's own."""
    chosen = _format(form, kind, engine)
    if push is not None and not hub.is_reachable():
        raise UserError(f"--push {push}: {hub.unreachable()}; export without --push and upload the folder later.")
    refuse_head(folder, "be exported here")
    refuse_encoder_decoder(folder, "be exported here; `tunesmith merge` writes an adapter and its base as one model")
    source = Source.of(folder)
    kind = kind or _usual(form, chosen, source)
    chosen.check(source, kind)
    if form == "adapter" and engine == "vllm" and (reasons := adapter.refused(source)):
        raise UserError(f"--engine vllm: {' '.join(reasons)}")
    notes = (*storage_note(folder), *twice_rounded(source, kind), *(adapter.notes(source) if form == "adapter" else ()))
    for note in notes:
        say(note)
    to = out or folder / "export" / f"{form}-{kind}"
    check_place(to, chosen.size(source, kind))
    samples = _samples(source, data, VLLM_ROOM if engine == "vllm" else 0, progress)
    certificate = certify(folder, progress=progress)
    for name, one in certificate["checks"].items():
        if one["verdict"] == "failed":
            say(f"The certificate of the run says of {name.replace('_', ' ')}: {one['found']}.")
    remove_leftovers(to)
    with whole_folder(to, is_new=True) as partial:
        chosen.write(source, partial, kind, progress)
        if form in ("gguf", "gguf-adapter"):
            put_side_files(folder, partial, dtype=torch.float32 if form == "gguf" else None, card=None)
        if form == "gguf":
            (partial / "Modelfile").write_text(gguf.modelfile(source, gguf.file_name(kind)), encoding="utf-8")
        proof, missing = None, _missing(chosen, source)
        if not missing:
            progress("Starting vLLM" if engine == "vllm" else "Loading it back", 0, None)
            proof = _prove(source, chosen, partial, kind, samples, progress, _kind_of_data(source, data))
        licence = copy_licence(source, partial)
        told = {"proof": proof, "missing": missing, "notes": notes, "certificate": certificate, "licence": licence}
        write_card(source, partial, form=form, kind=kind, usage=_usage(form, kind), **told)
    if push is not None:
        push_folder(to, push, progress)
    return Exported(to, kind, proof, missing, notes, source.weights.step)


def _format(form: str, kind: str | None, engine: str | None) -> Format:
    """What is asked for by its name; UserError where there is no such format, type or engine."""
    chosen = FORMATS.get(form)
    if chosen is None:
        raise UserError(f"--to is {form}; it can be {listed(FORMATS, most=10)}.")
    if kind is not None and kind not in chosen.types:
        raise UserError(f"--type is {kind}; for --to {form} it can be {listed(chosen.types, most=20)}.")
    return chosen if engine is None else _proved_by(engine, form, chosen)


def _samples(source: Source, data: Sequence[str], room: int, progress: Progress) -> list[Sample]:
    """What the export is compared on: the run's held-out data, or the files that are named. `room`: tokens that the
    engine needs for itself."""
    folder = source.folder
    compared = {"eval": [Dataset(path=path) for path in data], "held_out": 0} if data else {}
    with given_by_option("--data", objective_of(source.run).records) if data else nullcontext():
        stores = held_out_of(folder, source.run.model_copy(update=compared), read_plan(folder), progress)
    context = load.max_positions(source.weights.model.config) or LONGEST
    return samples_of(stores, context=context - room)


def _proved_by(engine: str, form: str, chosen: Format) -> Format:
    """The format with vLLM as its engine, before anything is written."""
    if engine != "vllm":
        raise UserError(f"--engine is {engine}; it can be vllm, or left out for the engine of the format.")
    if chosen.vllm is None:
        able = [name for name, one in FORMATS.items() if one.vllm is not None]
        raise UserError(f"--engine vllm: it proves --to {listed(able)}, not {form}.")
    if find_command() is None:
        raise UserError(
            f"--engine vllm: vLLM is not installed here (no command `vllm` on the PATH, and {VARIABLE} names none)."
        )
    return replace(chosen, engine=chosen.vllm, packages=(), is_bounded=True)


def push_folder(folder: Path, name: str, progress: Progress) -> None:
    """Send an export to the hub, into a private repository that is made where there is none."""
    from huggingface_hub import HfApi

    progress(f"Sending it to {name}", 0, None)
    api = HfApi()
    try:
        api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=str(folder), commit_message="Exported by Tunesmith")
    except Exception as error:  # of its HTTP library, with many classes
        raise UserError(
            f"--push {name}: the hub refused it: {first_line(error)}; the export is whole in {folder}."
        ) from error


def _prove(source: Source, chosen: Format, folder: Path, kind: str, samples, progress: Progress, data: str) -> Proof:
    try:
        engine = chosen.engine(source, folder, kind)
    except UserError as error:
        raise UserError(f"The export cannot be loaded back, and nothing was written: {error}") from error
    except (ValueError, RuntimeError, OSError, KeyError, TypeError, ImportError) as error:
        raise UserError(
            f"The export cannot be loaded back by its own engine, and nothing was written: {first_line(error)}."
        ) from error
    try:
        told = {"alike": kind if kind in ALIKE else None, "data": data}
        if kind == source.run.quantization_aware:
            return prove(source, engine, TRAINED_FOR[kind], samples, progress, rounded_to=kind, **told)
        return prove(source, engine, PRECISIONS.get(kind, kind), samples, progress, **told)
    finally:
        engine.close()


def _kind_of_data(source: Source, named: Sequence[str]) -> str:
    if named:
        return "given"
    return "held-out" if source.run.held_out or source.run.eval_texts else "training"


def storage_note(folder: Path) -> list[str]:
    bits = BITS.get(trained_storage(folder))
    if bits is None or not read_run(folder).has_adapters:  # a model that adapters were merged into is as it was trained
        return []
    return [f"The run trained over a base rounded to {bits} bits; it is exported over the base as its files have it."]


def twice_rounded(source: Source, kind: str) -> list[str]:
    """What to know of an export in few bits of a model whose files hold it in few bits already."""
    model = source.weights.run.model
    if PRECISIONS.get(kind, kind) not in FEW_BITS or (held := rounded_already(model)) is None:
        return []
    return [
        f"The weights of {model} were rounded already ({held}), and are rounded once more here: what both lose adds "
        "up. The model as it was before that gives a better one."
    ]


def _missing(chosen: Format, source: Source) -> str:
    if not chosen.is_bounded and not fits(source):
        return "the model does not fit into this machine's memory; prove it on a larger one."
    lacking = [package.replace("_", "-") for package in chosen.packages if not has(package)]
    return f"install {listed(lacking)} to have it proved." if lacking else ""


def _usual(form: str, chosen: Format, source: Source) -> str:
    if source.run.quantization_aware in chosen.types:
        return source.run.quantization_aware
    if form == "safetensors":
        return source.weights.stored
    if form == "gguf":
        return "f16" if source.weights.stored != "bf16" else "bf16"
    return chosen.types[0]


def check_place(to: Path, size: int, option: str = "--out") -> None:
    above = next(one for one in (to, *to.parents) if one.exists())
    if not above.is_dir():
        what = "" if above == to else f", so there can be no folder {to}"
        raise UserError(f"{above} is a file{what}; give {option} a folder that is not there yet.")
    if to.exists() and any(to.iterdir()):
        raise UserError(f"{to} exists and is not empty; give {option} another folder.")
    needed, free = with_slack(size), disk.free(to)
    if free is not None and free < needed:
        raise UserError(
            f"{to} needs {disk.size(needed)}, and its disk has {disk.size(free)} free; make room there, or give "
            f"{option} a folder on another disk."
        )


def _usage(form: str, kind: str) -> list[str] | None:
    """How it is run, where that is not by transformers or peft."""
    if form == "gguf":
        file = gguf.file_name(kind)
        return ["```", f"llama-server -m {file} --jinja      # or:", "ollama create NAME -f Modelfile", "```"]
    if form == "gguf-adapter":
        return ["```", f"llama-server -m BASE.gguf --lora adapter-{kind}.gguf --jinja", "```"]
    if form == "onnx":
        return [
            "`model.onnx` takes `input_ids`, `attention_mask` over cache and new tokens, and `past_key_values.N.key`",
            "and `.value` (with 0 tokens at first); it gives `logits` and `present.N.key` and `.value`. `onnx.json`",
            "has the sizes.",
        ]
    return None
