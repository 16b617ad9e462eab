"""Safetensors in few bits that engines read: compressed-tensors (int8, int4, fp8, nvfp4; vLLM, SGLang, transformers)
and bitsandbytes (nf4).

Weights are rounded to the nearest (`kernels.rounding`); `tunesmith quantize` chooses them with calibration data and
hands them to the same writers. The linears of the decoder layers are quantized; embeddings, norms and the output head
stay in 16 bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tunesmith.errors import UserError
from tunesmith.export.source import Progress, Source, needs
from tunesmith.kernels.rounding import (
    BITS,
    GROUPS,
    NVFP4_GROUP,
    Rounding,
    fp8_scales,
    group_of,
    int_scales,
    nvfp4_scales,
)
from tunesmith.model.experts import experts_of_layers
from tunesmith.model.side_files import CONFIG
from tunesmith.model.structure import holds_most_elsewhere, is_transposed, linears_for_text
from tunesmith.run.merge import put_side_files
from tunesmith.run.streamed import merged_weights, rounded

COMPRESSED = ("int8", "int4", "fp8", "nvfp4")
BITSANDBYTES = ("nf4",)
BYTES = {"int8": 1.13, "int4": 0.63, "fp8": 1.01, "nvfp4": 0.57, "nf4": 0.52}
"""A weight, at most."""
BLOCK = 64
"""Weights that have a scale of their own in bitsandbytes' nf4."""
FILE_BYTES = 2 * 10**9
"""Of one file, and of what waits in memory to be written."""
Quantize = Callable[[torch.Tensor], dict[str, torch.Tensor]]


def check_compressed(source: Source, kind: str) -> None:
    needs("compressed_tensors", "export")
    check_linears(source)
    _check_widths(source, kind, rounding_of(source, kind).divisor)


def check_bitsandbytes(source: Source, kind: str) -> None:
    needs("bitsandbytes", "export")
    check_linears(source)
    _check_widths(source, kind, BLOCK)  # else its kernels for CPUs fail


def _check_widths(source: Source, kind: str, divisor: int) -> None:
    if any(width % divisor for width in widths_of(source)):
        raise UserError(
            f"The rows of this model's linears are no multiples of {divisor}, as {kind} wants; --to gguf can hold it, "
            "where llama.cpp has such models."
        )


def check_linears(source: Source) -> None:
    model = source.weights.model
    if experts_of_layers(model):
        raise UserError(
            f"The experts of this {type(model).__name__} cannot be quantized here; `tunesmith export` writes them to "
            "gguf or safetensors."
        )
    if any(is_transposed(module) for module in linears_for_text(model).values()):
        raise UserError(f"{type(model).__name__} stores its linears transposed, which engines do not read in few bits.")
    plain = [one.weight for one in linears_for_text(model).values() if type(one) is torch.nn.Linear]
    if (odd := holds_most_elsewhere(model, plain)) is not None:
        raise UserError(
            f"Most weights in the layers of this {type(model).__name__} are those of {odd} modules, which cannot be "
            "quantized here; `tunesmith export --to safetensors` writes them as they are."
        )
    if source.weights.files is None:
        causal = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
        if causal and not any(causal):
            raise UserError(
                f"{source.run.model} is an encoder of BERT's kind, and only causal language models, which predict the "
                "next token, can be quantized here; give one of those, or use the encoder as it is."
            )
        raise UserError(
            "The files of this model hold its tensors in a layout that only transformers knows, and the linears cannot "
            "be quantized one by one; `tunesmith export --to gguf` writes it in few bits if llama.cpp has the model."
        )


def size(source: Source, kind: str) -> int:
    few = sum(module.weight.numel() for module in linears_for_text(source.weights.model).values())
    return int(2 * (source.weights.count - few) + BYTES[kind] * few)


def rounding_of(source: Source, kind: str, group: int | None = None) -> Rounding:
    """As this model's files hold it."""
    usual = group_of(widths_of(source)) or GROUPS[-1] if kind in BITS else 0
    return Rounding(kind, group or usual)


def widths_of(source: Source) -> set[int]:
    return {module.weight.shape[1] for module in linears_for_text(source.weights.model).values()}


def write_compressed(source: Source, folder: Path, kind: str, progress: Progress) -> None:
    rounding = rounding_of(source, kind)
    config = compressed_config(source, rounding)
    _write(source, folder, lambda weight: _compressed(weight, rounding), config, progress)


def compressed_config(source: Source, rounding: Rounding) -> dict[str, Any]:
    scheme, layout = _scheme(rounding)
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        "ignore": skipped(source),
    }


def write_bitsandbytes(source: Source, folder: Path, kind: str, progress: Progress) -> None:
    config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": half_of(source),
        "llm_int8_skip_modules": skipped(source),
    }
    _write(source, folder, _nf4, config, progress)


def _write(source: Source, folder: Path, quantize: Quantize, config: dict[str, Any], progress: Progress) -> None:
    half = getattr(torch, half_of(source))
    chosen = {f"{name}.weight" for name in linears_for_text(source.weights.model)}
    describe(source, folder, config)
    parts = Parts(folder)
    for name, tensor in merged_weights(source.weights, progress):
        stored = stored_name(source, name)
        if name not in chosen:
            parts.add(stored, rounded(source.weights, name, tensor, half))
            continue
        for leaf, value in quantize(tensor.float()).items():
            parts.add(f"{stored.removesuffix('.weight')}.{leaf}", value)
    parts.finish()


def describe(source: Source, folder: Path, config: dict[str, Any] | None) -> None:
    """All that lies beside the weights, with how they are quantized in the model's config."""
    put_side_files(source.folder, folder, dtype=getattr(torch, half_of(source)), card=None)
    described = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if config is not None:
        described["quantization_config"] = config
    (folder / CONFIG).write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")


def stored_name(source: Source, name: str) -> str:
    """That a tensor has in the model's files."""
    files = source.weights.files
    assert files is not None
    return getattr(files.get(name), "name", name)


def _scheme(rounding: Rounding) -> tuple[Any, str]:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    if rounding.kind == "fp8":
        weights = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="channel")
        inputs = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="token", dynamic=True)
        return QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs), "float-quantized"
    shared = {"symmetric": True, "group_size": rounding.group or NVFP4_GROUP}
    if rounding.kind == "nvfp4":
        kinds = {"scale_dtype": torch.float8_e4m3fn, "zp_dtype": torch.float8_e4m3fn}
        weights = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", **shared, **kinds)
        return QuantizationScheme(targets=["Linear"], weights=weights), "nvfp4-pack-quantized"
    weights = QuantizationArgs(num_bits=BITS[rounding.kind], type="int", strategy="group", **shared)
    return QuantizationScheme(targets=["Linear"], weights=weights), "pack-quantized"


def _compressed(weight: torch.Tensor, rounding: Rounding) -> dict[str, torch.Tensor]:
    if rounding.kind == "fp8":
        return pack(weight, rounding, weight_scale=fp8_scales(weight))
    if rounding.kind == "nvfp4":
        scale, whole = nvfp4_scales(weight)
        return pack(rounding(weight), rounding, weight_scale=scale, weight_global_scale=whole)
    return pack(weight, rounding, weight_scale=int_scales(weight, BITS[rounding.kind], rounding.group))


def pack(weight: torch.Tensor, rounding: Rounding, **scales: torch.Tensor) -> dict[str, torch.Tensor]:
    """What compressed-tensors holds of a weight with these scales; one that is rounded already stays what it is."""
    from compressed_tensors.compressors import BaseCompressor

    scheme, layout = _scheme(rounding)
    made = BaseCompressor.get_value_from_registry(layout).compress({"weight": weight, **scales}, scheme)
    return {name: tensor.contiguous() for name, tensor in made.items() if tensor is not None}


def _nf4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(weight.contiguous(), quant_type="nf4", compress_statistics=True)
    packed = {f"weight.{name}": value for name, value in state.as_dict(packed=True).items()}
    return {"weight": codes, **{name: value.contiguous() for name, value in packed.items()}}


def skipped(source: Source) -> list[str]:
    """Linears that stay as they are."""
    chosen = set(linears_for_text(source.weights.model))
    named = source.weights.model.named_modules()
    return [name for name, module in named if isinstance(module, torch.nn.Linear) and name not in chosen]


def half_of(source: Source) -> str:
    return "float16" if source.weights.stored == "fp16" else "bfloat16"


class Parts:
    """Tensors into files of a bounded size, with an index where there are several."""

    def __init__(self, folder: Path, name: str = "model"):
        self.folder, self.name = folder, name
        self._waiting: dict[str, torch.Tensor] = {}
        self._parts: list[list[str]] = []
        self._total = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._waiting and sum(one.nbytes for one in self._waiting.values()) + tensor.nbytes > FILE_BYTES:
            self._flush()
        self._waiting[name] = tensor.detach().clone().contiguous()
        self._total += tensor.nbytes

    def finish(self) -> None:
        self._flush()
        if len(self._parts) == 1:
            self._part(0).rename(self.folder / f"{self.name}.safetensors")
            return
        places = {}
        for number, names in enumerate(self._parts):
            file = f"{self.name}-{number + 1:05}-of-{len(self._parts):05}.safetensors"
            self._part(number).rename(self.folder / file)
            places |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total}, "weight_map": places}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (self.folder / f"{self.name}.safetensors.index.json").write_text(text)

    def _part(self, number: int) -> Path:
        return self.folder / f"{self.name}-part-{number}"

    def _flush(self) -> None:
        from safetensors.torch import save_file

        save_file(self._waiting, self._part(len(self._parts)), metadata={"format": "pt"})
        self._parts.append(list(self._waiting))
        self._waiting = {}
