"""Safetensors in few bits that engines read: compressed-tensors (int8, int4, fp8; vLLM, SGLang, transformers) and
bitsandbytes (nf4).

Weights are rounded to the nearest; choosing them with calibration data (GPTQ, AWQ) belongs to a verb of its own, which
would hand its rounded weights to the writers here. The linears of the decoder layers are quantized; embeddings, norms
and the output head stay in 16 bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tunesmith.errors import UserError
from tunesmith.export.source import Progress, Source, needs
from tunesmith.model.experts import experts_of_layers
from tunesmith.model.side_files import CONFIG
from tunesmith.model.structure import is_transposed, linears_of_layers
from tunesmith.run.merge import put_side_files
from tunesmith.run.streamed import merged_weights, rounded

COMPRESSED = ("int8", "int4", "fp8")
BITSANDBYTES = ("nf4",)
BYTES = {"int8": 1.02, "int4": 0.52, "fp8": 1.01, "nf4": 0.52}
GROUPS = (128, 64, 32)
"""Weights that share a scale: as many as divide the rows of every linear."""
FILE_BYTES = 2 * 10**9
"""Of one file, and of what waits in memory to be written."""
FP8_LARGEST = 448.0
Quantize = Callable[[torch.Tensor], dict[str, torch.Tensor]]


def check_compressed(source: Source, kind: str) -> None:
    needs("compressed_tensors", "export")
    _check_linears(source)
    if kind != "fp8" and _group(source) is None:
        raise UserError("The rows of this model's linears have no common divisor of 32; --to gguf can hold it.")


def check_bitsandbytes(source: Source, kind: str) -> None:
    needs("bitsandbytes", "export")
    _check_linears(source)


def _check_linears(source: Source) -> None:
    model = source.weights.model
    if experts_of_layers(model):
        raise UserError(
            f"The experts of this {type(model).__name__} cannot be quantized here; use --to gguf, or --to safetensors."
        )
    if any(is_transposed(module) for module in linears_of_layers(model).values()):
        raise UserError(f"{type(model).__name__} stores its linears transposed, which engines do not read in few bits.")
    if source.weights.files is None:
        raise UserError("The files of this model are in a layout that only transformers knows; use --to safetensors.")


def size(source: Source, kind: str) -> int:
    few = sum(module.weight.numel() for module in linears_of_layers(source.weights.model).values())
    return int(2 * (source.weights.count - few) + BYTES[kind] * few)


def write_compressed(source: Source, folder: Path, kind: str, progress: Progress) -> None:
    scheme, layout = _scheme(source, kind)
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        "ignore": _ignored(source),
    }
    _write(source, folder, lambda weight: _compressed(weight, kind, scheme, layout), config, progress)


def write_bitsandbytes(source: Source, folder: Path, kind: str, progress: Progress) -> None:
    config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": _half(source),
        "llm_int8_skip_modules": _ignored(source),
    }
    _write(source, folder, _nf4, config, progress)


def _write(source: Source, folder: Path, quantize: Quantize, config: dict[str, Any], progress: Progress) -> None:
    half = getattr(torch, _half(source))
    chosen = {f"{name}.weight" for name in linears_of_layers(source.weights.model)}
    put_side_files(source.folder, folder, dtype=half, card=None)
    described = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    (folder / CONFIG).write_text(
        json.dumps({**described, "quantization_config": config}, indent=2, sort_keys=True) + "\n"
    )
    files = source.weights.files
    assert files is not None

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in merged_weights(source.weights, progress):
            stored = getattr(files.get(name), "name", name)
            if name not in chosen:
                yield stored, rounded(source.weights, name, tensor, half)
                continue
            for leaf, value in quantize(tensor.float()).items():
                yield f"{stored.removesuffix('.weight')}.{leaf}", value

    _save_in_parts(folder, tensors())


def _scheme(source: Source, kind: str) -> tuple[Any, str]:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    if kind == "fp8":
        weights = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="channel")
        inputs = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="token", dynamic=True)
        return QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs), "float-quantized"
    bits = 8 if kind == "int8" else 4
    weights = QuantizationArgs(num_bits=bits, type="int", symmetric=True, strategy="group", group_size=_group(source))
    return QuantizationScheme(targets=["Linear"], weights=weights), "pack-quantized"


def _compressed(weight: torch.Tensor, kind: str, scheme: Any, layout: str) -> dict[str, torch.Tensor]:
    from compressed_tensors.compressors import BaseCompressor

    if kind == "fp8":
        scale = weight.abs().amax(1, keepdim=True) / FP8_LARGEST
    else:
        groups = weight.view(weight.shape[0], -1, scheme.weights.group_size)
        scale = groups.abs().amax(-1) / (2 ** (scheme.weights.num_bits - 1) - 0.5)
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
    made = BaseCompressor.get_value_from_registry(layout).compress({"weight": weight, "weight_scale": scale}, scheme)
    return {name: tensor.contiguous() for name, tensor in made.items() if tensor is not None}


def _nf4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(weight.contiguous(), quant_type="nf4", compress_statistics=True)
    packed = {f"weight.{name}": value for name, value in state.as_dict(packed=True).items()}
    return {"weight": codes, **{name: value.contiguous() for name, value in packed.items()}}


def _group(source: Source) -> int | None:
    widths = {module.weight.shape[1] for module in linears_of_layers(source.weights.model).values()}
    return next((group for group in GROUPS if all(width % group == 0 for width in widths)), None)


def _ignored(source: Source) -> list[str]:
    """Linears that stay as they are."""
    chosen = set(linears_of_layers(source.weights.model))
    named = source.weights.model.named_modules()
    return [name for name, module in named if isinstance(module, torch.nn.Linear) and name not in chosen]


def _half(source: Source) -> str:
    return "float16" if source.weights.stored == "fp16" else "bfloat16"


def _save_in_parts(folder: Path, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Into files of a bounded size, with an index where there are several."""
    from safetensors.torch import save_file

    waiting: dict[str, torch.Tensor] = {}
    parts: list[list[str]] = []
    total = 0

    def flush() -> None:
        save_file(waiting, folder / f"part-{len(parts)}", metadata={"format": "pt"})
        parts.append(list(waiting))
        waiting.clear()

    for name, tensor in tensors:
        if waiting and sum(one.nbytes for one in waiting.values()) + tensor.nbytes > FILE_BYTES:
            flush()
        waiting[name] = tensor.clone()
        total += tensor.nbytes
    flush()
    if len(parts) == 1:
        (folder / "part-0").rename(folder / "model.safetensors")
        return
    places = {}
    for number, names in enumerate(parts):
        file = f"model-{number + 1:05}-of-{len(parts):05}.safetensors"
        (folder / f"part-{number}").rename(folder / file)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
