"""From the name of a model to its config, tokenizer and weights.

A model is a folder, a GGUF file or a name on the hub. What exists on this disk is never looked up on the hub.
Nothing here changes the model.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith import hub
from tunesmith.cache import cache_folder
from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.model.ahead import beside
from tunesmith.model.gguf import converted_folder
from tunesmith.plan.models import find
from tunesmith.plan.plan import Storage

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

TWIN_TOKENS = 500
"""The vocabulary of a small twin."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Source:
    """Where a model comes from: `location` is what transformers takes, a folder or a hub name."""

    location: str
    is_local: bool

    @property
    def offline(self) -> bool:
        """Look only at what is on this disk: the hub would be asked in vain, and for half a minute."""
        return self.is_local or not hub.is_reachable()


def locate(model: str) -> Source:
    """Find the model, without loading it; raise UserError when it cannot be one."""
    found = find(model)
    if found.kind == "gguf":
        return Source(str(converted_folder(Path(found.location), cache_folder())), True)
    return Source(found.location, found.kind == "folder")


def load_config(run: Run) -> PreTrainedConfig:
    from transformers import AutoConfig

    source = locate(run.model)
    with _reading(run, "config"):
        return AutoConfig.from_pretrained(
            source.location, trust_remote_code=run.trust_remote_code, local_files_only=source.offline
        )


def load_tokenizer(run: Run) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    source = locate(run.model)
    with _reading(run, "tokenizer"):
        return AutoTokenizer.from_pretrained(
            source.location, trust_remote_code=run.trust_remote_code, local_files_only=source.offline
        )


def load_model(
    run: Run,
    *,
    dtype: str,
    device: str,
    storage: Storage = "plain",
    fp8: bool = False,
    meanwhile: Callable[[], None] = lambda: None,
) -> PreTrainedModel:
    """The model with its weights in `dtype` ("fp32", "bf16", "fp16") on `device`, in evaluation mode.

    Weights go from their files to the device one by one. With `storage` nf4 or int8 the linears of the decoder layers
    are quantized on the way; with `fp8`, those that the run's adapters take over for fp8 products. `meanwhile` is done
    in a thread while files are read.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from tunesmith.model import quantized

    form = {"dtype": getattr(torch, DTYPES[dtype]), "device": torch.device(device), "storage": storage}
    model, folder = load_empty(run, dtype=dtype)
    with _reading(run, "weights"), quiet():
        in_fp8 = _taken_in_fp8(model, run) if fp8 and storage == "plain" else ()
        with beside(meanwhile):
            is_filled = quantized.fill(model, folder, fp8=in_fp8, **form)
        if is_filled:
            return model
        # Files of another layout are translated by transformers, which reads them whole, in host memory.
        options = {"trust_remote_code": run.trust_remote_code, "use_safetensors": True, "local_files_only": True}
        if storage == "plain":
            return AutoModelForCausalLM.from_pretrained(folder, dtype=form["dtype"], **options).to(device).eval()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options)
        quantized.quantize_linears(model, **form)
    return model.eval()


def load_empty(run: Run, *, dtype: str) -> tuple[PreTrainedModel, Path]:
    """The model to be filled from its files, without weights but for those it computes itself; and their folder."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from tunesmith.model import quantized

    config = load_config(run)
    options = {"trust_remote_code": run.trust_remote_code}
    with _reading(run, "weights"), quiet():
        folder = _weights_folder(locate(run.model))
        model = quantized.build_empty(
            lambda: AutoModelForCausalLM.from_config(config, dtype=getattr(torch, DTYPES[dtype]), **options)
        ).eval()
        if (folder / "generation_config.json").exists():
            model.generation_config = GenerationConfig.from_pretrained(folder)
    return model, folder


def _taken_in_fp8(model: PreTrainedModel, run: Run) -> set[str]:
    """The linears whose products will run in fp8 as `model.fuse` has them: all that have adapters, or none."""
    from tunesmith.kernels.fp8 import FP8_MULTIPLE
    from tunesmith.model import lora, quantized

    if run.lora.dropout or run.lora.dora:
        return set()
    targets, plain = lora.find_targets(model, run.lora), quantized.linears_of_layers(model)
    sizes = [size for name in targets for size in model.get_submodule(name).weight.shape]
    if any(size % FP8_MULTIPLE for size in sizes) or not plain.keys() >= set(targets):
        return set()
    return {name for name in targets if not quantized.is_transposed(plain[name])}


def _weights_folder(source: Source) -> Path:
    """The folder with the model's files, downloaded first where the model is on the hub."""
    if source.is_local:
        return Path(source.location)
    from huggingface_hub import snapshot_download

    wanted = ["*.safetensors", "*.json", "*.py"]
    return Path(snapshot_download(source.location, allow_patterns=wanted, local_files_only=source.offline))


def load_skeleton(run: Run) -> PreTrainedModel:
    """The model's modules without weights, on the meta device: what it is made of, in a moment."""
    import torch
    from transformers import AutoModelForCausalLM

    config = load_config(run)
    with _reading(run, "config"), quiet(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=run.trust_remote_code)


def build_twin(run: Run, *, dtype: str, device: torch.device, layers: int, width: int) -> PreTrainedModel:
    """A small model of the same code, in evaluation mode: so many layers, narrow MLPs (a multiple of `width`), a small
    vocabulary, and random weights that are the same every time. What would take the whole model to try is tried on it.
    A model that cannot be made smaller is its own twin in size."""
    import torch
    from transformers import AutoModelForCausalLM

    small = load_config(run)
    text = small.get_text_config()
    depth = text.num_hidden_layers
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == depth:  # what each layer is
            setattr(text, name, value[:layers])
    text.num_hidden_layers = min(layers, depth)
    if isinstance(getattr(text, "intermediate_size", None), int):
        text.intermediate_size = min(text.intermediate_size, 2 * width)
    text.vocab_size = min(text.vocab_size, TWIN_TOKENS)
    text.pad_token_id = None
    options = {"trust_remote_code": run.trust_remote_code}
    with quiet():
        for config in (small, load_config(run)):
            try:
                model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, DTYPES[dtype]), **options)
                _draw_weights(model)
                model = model.to(device).eval()
                model(input_ids=torch.arange(4, device=device)[None], use_cache=False)
                break
            except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
                if config is not small:
                    raise
    return model


def _draw_weights(model: PreTrainedModel) -> None:
    """So that each layer changes what passes through it by about as much as it is."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            weight.copy_(drawn / weight.shape[-1] ** 0.5 if weight.ndim > 1 else 1 + 0.1 * drawn)


def max_positions(config: PreTrainedConfig) -> int | None:
    """Longest sequence the model was made for, where its config says so."""
    text = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def vocabulary_size(config: PreTrainedConfig) -> int:
    return int(config.get_text_config().vocab_size)


def model_fingerprint(run: Run) -> str:
    """Identifies the weights a run starts from: file names and sizes of a folder, the commit of a hub model."""
    import hashlib

    source = locate(run.model)
    if not source.is_local:
        return f"hub:{source.location}:{getattr(load_config(run), '_commit_hash', None)}"
    parts: list[Any] = []
    for file in sorted(Path(source.location).glob("*")):
        if file.suffix == ".safetensors":
            with file.open("rb") as stream:  # the header names every tensor; both ends differ between models
                head = stream.read(1 << 20)
                stream.seek(max(0, file.stat().st_size - (1 << 20)))
                tail = stream.read()
            parts.append([file.name, file.stat().st_size, hashlib.sha256(head + tail).hexdigest()])
        elif file.name == "config.json":
            parts.append([file.name, hashlib.sha256(file.read_bytes()).hexdigest()])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def parameter_count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@contextlib.contextmanager
def _reading(run: Run, what: str):
    """Turn the many ways in which reading a model fails into one sentence."""
    from safetensors import SafetensorError

    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, SafetensorError) as error:
        source = locate(run.model)
        if not source.is_local and source.offline:
            raise UserError(
                f"model: {run.model} is neither a folder here nor in the hub's cache, and the hub cannot be "
                "reached; give the path of a model folder or a .gguf file."
            ) from error
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        if "trust_remote_code" in str(error):
            first = "it brings Python code of its own; read that code, then say trust_remote_code: true"
        raise UserError(f"model: the {what} of {run.model} could not be loaded: {first.rstrip('.')}.") from error


@contextlib.contextmanager
def quiet():
    """transformers' own bars and hints would fight with the live display."""
    from transformers.utils import logging as transformers_logging

    logger = logging.getLogger("transformers")
    level = logger.level
    transformers_logging.disable_progress_bar()
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        transformers_logging.enable_progress_bar()
