"""ONNX: the decoder with its key-value cache, for onnxruntime on CPUs, phones and browsers.

One graph serves prompts and single tokens: `input_ids` with the cache of what came before, which is empty at first,
give `logits` and the new cache. Names are those of the optimum library, which its users' code expects. transformers'
own code is traced by torch's exporter, so all of the model must be in memory, in fp32.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from tunesmith import disk
from tunesmith.errors import UserError, first_line
from tunesmith.export.onnx_layers import PAST, PRESENT, Inputs, by_layers, cache_of, named
from tunesmith.export.source import Progress, Source, needs
from tunesmith.model import load
from tunesmith.model.structure import decoder_layers, put_tensor, set_attention
from tunesmith.run.merge import put_side_files
from tunesmith.run.streamed import merged_weights

log = logging.getLogger(__name__)
TYPES = ("fp32",)
FILE = "model.onnx"


def check(source: Source, kind: str) -> None:
    needs("onnx", "onnx")
    needs("onnxscript", "onnx")
    config = source.weights.model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if not kinds <= {"full_attention", "sliding_attention"} or getattr(config, "num_key_value_heads", None) is None:
        raise UserError(
            f"{type(source.weights.model).__name__} keeps more than keys and values of what it has read, and cannot be "
            "exported to ONNX here; use --to safetensors."
        )

    if 12 * source.weights.count > psutil.virtual_memory().available:
        needed = disk.size(12 * source.weights.count)
        raise UserError(f"The export to ONNX takes about {needed} of host memory, which are not free here.")


def size(source: Source, kind: str) -> int:
    return 4 * source.weights.count


class Decoder(nn.Module):
    """The model with its cache as plain tensors: keys and values of each layer, [B, heads, past, head dim]."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, past: list[torch.Tensor]) -> Any:
        cache = cache_of(past)
        found = self.model(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True)
        kept = [tensor for layer in found.past_key_values.layers for tensor in (layer.keys, layer.values)]
        return found.logits, *kept


def write(source: Source, folder: Path, kind: str, progress: Progress) -> None:
    model = _whole(source, progress)
    progress("Tracing the model for ONNX", 0, None)
    config = model.config.get_text_config()
    layers = len(decoder_layers(model))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = {"layers": layers, "kv_heads": config.num_key_value_heads, "head_dim": head_dim}
    inputs = _inputs(source, **sizes)
    try:
        program = _traced(model, inputs, layers, progress)
    except Exception as error:  # of torch's exporter, which has many kinds
        raise UserError(
            f"torch could not export {type(model).__name__} to ONNX: {first_line(error)[:300]}; use --to safetensors."
        ) from error
    program.save(folder / FILE, external_data=True)
    put_side_files(source.folder, folder, dtype=torch.float32, card=None)
    (folder / "onnx.json").write_text(json.dumps(sizes, indent=2) + "\n", encoding="utf-8")


def _inputs(source: Source, *, layers: int, kv_heads: int, head_dim: int) -> Inputs:
    past = [torch.zeros(2, kv_heads, 18, head_dim) for _ in range(2 * layers)]
    tokens = torch.arange(26).view(2, 13) % source.vocabulary
    mask = torch.ones(2, 31, dtype=torch.int64)  # no other sizes are 13 or 31
    batch, new, before = (torch.export.Dim(name) for name in ("batch", "sequence", "past_sequence"))
    dynamic = {
        "input_ids": {0: batch, 1: new},
        "attention_mask": {0: batch, 1: torch.export.Dim.DYNAMIC},
        "past": [{0: batch, 2: before} for _ in past],
    }
    return Inputs(tokens, mask, past, dynamic)


def _traced(model: nn.Module, inputs: Inputs, layers: int, progress: Progress) -> Any:
    try:
        return by_layers(model, inputs, _export)
    except Exception as error:  # the same graph, more slowly, of a model whose layers cannot be called by themselves
        log.debug("%s is traced as a whole: %r", type(model).__name__, error)
        progress(f"Tracing all {layers} layers for ONNX, which takes minutes", 0, None)
    names = ["input_ids", "attention_mask", *named(PAST, layers)]
    taken = (inputs.tokens, inputs.mask, inputs.past)
    return _export(Decoder(model), taken, names, ["logits", *named(PRESENT, layers)], inputs.dynamic)


def _export(
    module: nn.Module, inputs: tuple, names: list[str], told: list[str], dynamic: dict[str, Any], **options: Any
) -> Any:
    """torch's exporter."""
    options |= {"input_names": names, "output_names": told, "dynamic_shapes": dynamic}
    with warnings.catch_warnings(), load.quiet(), _unheard("torch.onnx", "onnxscript", "onnx_ir"):
        warnings.simplefilter("ignore")
        return torch.onnx.export(module.eval(), inputs, dynamo=True, verbose=False, **options)


@contextmanager
def _unheard(*names: str) -> Iterator[None]:
    """What exporters tell of operators that no language model has."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _whole(source: Source, progress: Progress) -> nn.Module:
    """The merged model in fp32, in memory."""
    model, _ = load.load_empty(source.weights.run, dtype="fp32")
    for name, tensor in merged_weights(source.weights, progress):
        put_tensor(model, name, tensor.float().clone() if tensor.is_floating_point() else tensor.clone())
    model.tie_weights()
    set_attention(model, "eager")
    return model.eval()
