"""From the name of a model to its config, tokenizer and weights.

A model is a folder, a GGUF file or a name on the hub. What exists on this disk is never looked up on the hub.
Nothing here changes the model.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith import hub
from tunesmith.cache import cache_folder
from tunesmith.config.schema import Run
from tunesmith.disk import expanded
from tunesmith.errors import UserError, first_line, listed
from tunesmith.model import head
from tunesmith.model.gguf import converted_folder, read_tokenizer
from tunesmith.objectives.head import padding_id
from tunesmith.plan.models import check_quantization, find, is_encoder_decoder, language_model_class, read_config_file

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

PROXY_TOKENS = 500
"""The vocabulary of a small proxy."""
TOKENIZER_FILES = ("tokenizer*", "*vocab*", "*.model", "merges.txt", "*tiktoken*", "tekken.json", "*.bpe", "spiece*")
GENERIC_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of a tokenizer_config.json that do no more than read tokenizer.json."""
TOKENIZER_SAMPLE = "The cat, 2024: don't say 'no' x=1;\n\n\tz  \u00fcber \u6f22\u5b57"
RETURNED = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}
"""What a model gives is by name, and its logits alone, whatever its config.json asks for besides."""
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
    if source.is_local:
        check_quantization(read_config_file(Path(source.location) / "config.json"))
    with reading(run, "config"):
        config = AutoConfig.from_pretrained(
            source.location, trust_remote_code=run.trust_remote_code, local_files_only=source.offline, **RETURNED
        )
        check_quantization(config.to_dict())
    if head.has_head(run):
        head.set_labels(config, run, padding_id(load_tokenizer(run)))
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config  # weights are made whole while they are read: an ordinary model from here on
        for name, value in vars(part).items():
            is_share = re.search(r"dropout|pdrop|drop_rate", name) and isinstance(value, int | float)
            if is_share and not 0 <= value < 1:
                raise UserError(f"model: its config.json has {name} {value}, which is no share of 1; it is damaged.")
    text = config.get_text_config()
    if getattr(text, "num_hidden_layers", 0) is None and isinstance(getattr(text, "layer_types", None), list):
        text.num_hidden_layers = len(text.layer_types)  # Nemotron-H has their kinds alone
    return config


def load_tokenizer(run: Run) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    source = locate(run.model)
    if source.is_local and not any(any(Path(source.location).glob(pattern)) for pattern in TOKENIZER_FILES):
        raise UserError(
            f"model: {run.model} holds no tokenizer (no tokenizer.json, nor one of another kind); copy its files there "
            "from the model that it was made from."
        )
    with reading(run, "tokenizer"), quiet():
        tokenizer = AutoTokenizer.from_pretrained(
            source.location, trust_remote_code=run.trust_remote_code, local_files_only=source.offline
        )
        if not isinstance(tokenizer.model_max_length, int | float):
            said = str(tokenizer.model_max_length)[:60]
            raise UserError(f"model: its tokenizer_config.json has model_max_length {said!r}, which is no number.")
        tokenizer("a b")  # what would fail with any text fails here
        return _as_its_file_says(tokenizer, source)


def _as_its_file_says(tokenizer: PreTrainedTokenizerBase, source: Source) -> PreTrainedTokenizerBase:
    """transformers takes the class that is usual for a model's architecture, which builds its own way of cutting text
    around the file's vocabulary: a tokenizer of another kind (words, or BPE with other cuts) then loses most of a text.
    Where the folder itself says that tokenizer.json is all there is, and it gives other tokens, that counts."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import cached_file

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(tokenizer) is PreTrainedTokenizerFast:
        return tokenizer
    options = {"local_files_only": True}
    try:
        settings, file = (
            str(cached_file(source.location, name, **options)) for name in ("tokenizer_config.json", "tokenizer.json")
        )
    except OSError:  # one of them is not there
        return tokenizer
    said = json.loads(Path(settings).read_text(encoding="utf-8-sig"))
    if said.get("tokenizer_class") not in GENERIC_TOKENIZERS or "auto_map" in said:
        return tokenizer
    own = Tokenizer.from_file(file)
    words = [word for word, _ in sorted(own.get_vocab().items(), key=lambda pair: pair[1]) if word.isalnum()]
    text = " ".join([TOKENIZER_SAMPLE, *words[:100]])
    ids = [one.encode(text, add_special_tokens=False).ids for one in (own, backend)]
    if ids[0] == ids[1]:
        return tokenizer
    return PreTrainedTokenizerFast.from_pretrained(source.location, **options)


def tokenizer_at_hand(run: Run) -> PreTrainedTokenizerBase:
    """The same, and of a GGUF file without the conversion of its weights."""
    found = find(run.model)
    if found.kind != "gguf":
        return load_tokenizer(run)
    with reading(run, "tokenizer"):
        return read_tokenizer(Path(found.location))


def load_empty(run: Run, *, dtype: str) -> tuple[PreTrainedModel, Path]:
    """The model to be filled from its files, without weights but for those it computes itself; and their folder."""
    import torch
    from transformers import GenerationConfig

    from tunesmith.model import quantized

    config = load_config(run)
    options = {"trust_remote_code": run.trust_remote_code}
    with reading(run, "weights"), quiet():
        folder = weights_folder(locate(run.model))
        model = quantized.build_empty(
            lambda: head.build(run, config, dtype=getattr(torch, DTYPES[dtype]), **options)
        ).eval()
        model.generation_config = GenerationConfig.from_dict(generation_settings(folder, model)[0])
    return model, folder


def generation_settings(folder: Path, model: PreTrainedModel) -> tuple[dict[str, Any], list[str]]:
    """What the model's files say of generation, mended where transformers would not save it; and what was mended."""
    file = folder / "generation_config.json"
    if not file.exists():
        own = getattr(model, "generation_config", None)
        known = own.to_diff_dict() if own is not None else {}
        return _without_faults(known, "what the config says of generation", model)
    try:
        found = json.loads(file.read_text(encoding="utf-8-sig"))
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        return {}, [f"the base's {file.name} cannot be read ({error}) and is left out of the result."]
    return _without_faults(found, f"the base's {file.name}", model)


def _without_faults(
    settings: dict[str, Any], origin: str, model: PreTrainedModel
) -> tuple[dict[str, Any], list[str]]:  # fmt: skip
    from transformers import GenerationConfig

    tokens = vocabulary_size(model.config)

    def is_valid(candidate: dict[str, Any]) -> bool:
        if not all(_is_possible(name, value, tokens) for name, value in candidate.items()):
            return False
        try:
            GenerationConfig.from_dict(dict(candidate)).validate(strict=True)
        except (ValueError, TypeError, AttributeError, KeyError):
            return False
        return True

    if is_valid(settings):
        return settings, []
    # Values for sampling say what their author wanted; transformers wants that said.
    if is_valid(sampled := {**settings, "do_sample": True}):
        return sampled, [f"{origin} has values for sampling without `do_sample`: the result says `do_sample: true`."]
    kept: dict[str, Any] = {}
    for name in sorted(settings, key=lambda name: name not in ("do_sample", "num_beams", "return_dict_in_generate")):
        value = settings[name]
        if name.endswith("_token_id") and isinstance(value, list):
            value = [one for one in value if _is_possible(name, one, tokens)] or None
        if is_valid({**kept, name: value}):
            kept[name] = value
    lost = listed(f"`{name}: {settings[name]}`" for name in settings if kept.get(name) != settings[name])
    return kept, [f"{origin} has values that generation cannot use, and the result is without them: {lost}."]


def _is_possible(name: str, value: Any, tokens: int) -> bool:
    """What transformers takes without a look: ids of tokens that the model has, and whole numbers."""
    if value is None:
        return True
    if name.endswith("_token_id"):
        ids = value if isinstance(value, list) else [value]
        return all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < tokens for one in ids)
    return name != "top_k" or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)


def weights_folder(source: Source) -> Path:
    """The folder with the model's files, downloaded first where the model is on the hub."""
    if source.is_local:
        return Path(source.location)
    from huggingface_hub import snapshot_download

    wanted = ["*.safetensors", "*.json", "*.py"]
    return Path(snapshot_download(source.location, allow_patterns=wanted, local_files_only=source.offline))


def load_skeleton(run: Run) -> PreTrainedModel:
    """The model's modules without weights, on the meta device: what it is made of, in a moment."""
    import torch

    config = load_config(run)
    with reading(run, "config"), quiet(), torch.device("meta"):
        return head.build(run, config, trust_remote_code=run.trust_remote_code)


def build_small_proxy(run: Run, *, dtype: str, device: torch.device, layers: int, width: int) -> PreTrainedModel:
    """A small model of the same code, in evaluation mode: so many layers, narrow MLPs (a multiple of `width`), a small
    vocabulary, and random weights that are the same every time. What would take the whole model to try is tried on it.
    A model that cannot be made smaller is its own proxy in size."""
    import torch

    from tunesmith.model.structure import plain_call

    small = load_config(run)
    kind = language_model_class(small)
    text = small.get_text_config()
    depth = text.num_hidden_layers
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == depth:  # what each layer is
            setattr(text, name, value[:layers])
    text.num_hidden_layers = min(layers, depth)
    for name in ("decoder_layers", "num_decoder_layers"):  # of an encoder-decoder
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, min(layers, getattr(text, name)))
    for name in {"intermediate_size", *(name for name in vars(text) if name.endswith("_intermediate_size"))}:
        if isinstance(value := getattr(text, name, None), int):  # also of experts, and of shared ones
            setattr(text, name, min(value, 2 * width))
    for name in getattr(small, "sub_configs", {}):  # what images and sounds go through, and no text does
        if (other := getattr(small, name, None)) is not None and other is not text:
            for count in ("num_hidden_layers", "depth", "encoder_layers"):
                if isinstance(value := getattr(other, count, None), int):
                    setattr(other, count, min(value, layers))
    text.vocab_size = min(text.vocab_size, PROXY_TOKENS)
    if not (is_encoder_decoder(small.to_dict()) and (text.pad_token_id or 0) < text.vocab_size):
        text.pad_token_id = None
    options = {"trust_remote_code": run.trust_remote_code}
    with quiet(), device:
        for config in (small, load_config(run)):
            try:
                model = kind.from_config(config, dtype=getattr(torch, DTYPES[dtype]), **options).to(device).eval()
                draw_weights(model, device)
                if model(**plain_call(model, torch.arange(4, device=device)[None])).logits is None:
                    raise TypeError("it gives no logits")
                break
            except Exception as error:  # the model's own code: whatever it raises, its config or that code is at fault
                if config is not small:
                    if kind.__name__ == "AutoModelForImageTextToText":
                        raise UserError(
                            f"model: {run.model} cannot be called with text alone ({first_line(error)}), which is all "
                            "that is trained on here; choose a model that can."
                        ) from error
                    is_own = run.trust_remote_code and hasattr(config, "auto_map")
                    how = "called as transformers' models are" if is_own else "built from its config.json"
                    mended = (
                        "its code has to take `input_ids` and `use_cache`, and to give an output with `logits`"
                        if is_own
                        else "compare that file with the original's"
                    )
                    raise UserError(f"model: {run.model} cannot be {how} ({first_line(error)}); {mended}.") from error
    return model


def load_shallow(run: Run, *, layers: int) -> PreTrainedModel:
    """The model as wide as it is, with so few layers and tokens, and random weights."""
    import torch

    options = {"dtype": torch.float32, "trust_remote_code": run.trust_remote_code}
    with quiet():
        try:
            cut(config := load_config(run), layers)
            return language_model_class(config).from_config(config, **options)
        except Exception:  # the model's own code: a list of factors may be as long as there are layers by chance
            cut(config := load_config(run), layers, cuts_factors=False)
    with reading(run, "config"), quiet():
        return language_model_class(config).from_config(config, **options)


def cut(config: Any, layers: int, *, cuts_factors: bool = True) -> None:
    """The config of so few layers, the first ones, and few tokens. What it lists for each layer is cut, too, lists of
    fractions if `cuts_factors`."""
    text = config.get_text_config()
    depth = text.num_hidden_layers
    for name, value in vars(text).items():
        is_factors = isinstance(value, list) and all(isinstance(one, float) for one in value)
        if isinstance(value, list) and len(value) == depth and (cuts_factors or not is_factors):
            setattr(text, name, value[:layers])
    text.num_hidden_layers = min(layers, depth)
    text.vocab_size, text.pad_token_id = min(text.vocab_size, PROXY_TOKENS), None


def draw_weights(model: PreTrainedModel, device: torch.device) -> None:
    """So that each layer changes what passes through it by about as much as it is."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            drawn = torch.randn(weight.shape, generator=generator, device=device)
            weight.copy_(drawn / weight.shape[-1] ** 0.5 if weight.ndim > 1 else 1 + 0.1 * drawn)


def max_positions(config: PreTrainedConfig) -> int | None:
    """Longest sequence the model was made for, where its config says so."""
    text = config.get_text_config()
    if hasattr(text, "relative_attention_num_buckets"):  # T5: relative positions, of which none is the last
        return None
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def vocabulary_size(config: PreTrainedConfig) -> int:
    return int(config.get_text_config().vocab_size)


def usable_tokens(config: PreTrainedConfig) -> int:
    """How many of the tokens have a row in every embedding: Gemma's tables for each layer may have fewer than there are
    tokens in the vocabulary, the last of which then are no text's."""
    text = config.get_text_config()
    rows = getattr(text, "vocab_size_per_layer_input", None)
    has_tables = bool(rows and getattr(text, "hidden_size_per_layer_input", None))
    return min(vocabulary_size(config), rows) if has_tables else vocabulary_size(config)


def decoder_start(config: PreTrainedConfig) -> int | None:
    """The token that the decoder of an encoder-decoder begins with; None where its code takes the last one of the
    targets for it, as mBART's does."""
    import inspect

    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

    if type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        code = inspect.getmodule(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING[type(config)])
        shift = getattr(code, "shift_tokens_right", None)
        if shift is not None and "decoder_start_token_id" not in inspect.signature(shift).parameters:
            return None
    parts = [config, getattr(config, "decoder", None)]
    found = [getattr(part, name, None) for name in ("decoder_start_token_id", "bos_token_id") for part in parts]
    if not (ids := [one for one in found if isinstance(one, int)]):
        raise UserError(
            "model: its config.json names no decoder_start_token_id, the token that its decoder begins with; add it."
        )
    return ids[0]


def teacher_run(run: Run) -> Run:
    """A run of the teacher as if it were trained: by this, everything that reads a model reads it."""
    assert run.distillation.teacher is not None
    shared = {name: getattr(run, name) for name in ("data", "sequence_length", "trust_remote_code", "output")}
    return type(run)(model=run.distillation.teacher, method="full", **shared)


def model_fingerprint(run: Run) -> str:
    """Identifies the weights a run starts from, and those it learns from: file names and sizes of a folder, the commit
    of a hub model."""
    if run.objective == "distill":
        plain = run.model_copy(update={"objective": "sft"})
        return f"{model_fingerprint(plain)}+{model_fingerprint(teacher_run(run))}"
    import hashlib

    source = locate(run.model)
    parts: list[Any] = []
    files = sorted(expanded(run.adapter).glob("adapter_model*")) if run.adapter is not None else []
    if not source.is_local:
        found = f"hub:{source.location}:{getattr(load_config(run), '_commit_hash', None)}"
        return found + "".join(f":{hashlib.sha256(file.read_bytes()).hexdigest()[:16]}" for file in files)
    for file in [*sorted(Path(source.location).glob("*")), *files]:
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
def reading(run: Run, what: str):
    """Turn the many ways in which reading a model fails into one sentence: libraries meet its files with any exception
    there is."""
    try:
        yield
    except (UserError, MemoryError, AssertionError):
        raise
    except Exception as error:
        if "DefaultCPUAllocator" in str(error) or type(error).__name__ == "OutOfMemoryError":
            raise
        source = locate(run.model)
        if not source.is_local and source.offline:
            raise UserError(
                f"model: {run.model} is neither a folder here nor in the hub's cache, and {hub.unreachable()}; give "
                "the path of a model folder or a .gguf file."
            ) from error
        first = first_line(error)
        if "trust_remote_code" in str(error):
            first = "it brings Python code of its own; read that code, then say trust_remote_code: true"
        beside = [file.name for pattern in TOKENIZER_FILES for file in Path(source.location).glob(pattern)]
        if what == "tokenizer" and source.is_local and set(beside) == {"tokenizer_config.json"}:
            first = (
                "there is a tokenizer_config.json and no tokenizer.json, nor a vocabulary of another kind; copy it "
                "there from the model that it was made from"
            )
        elif what == "tokenizer" and re.search("sentencepiece|tiktoken", str(error), re.IGNORECASE):
            first = (
                "it is a SentencePiece or tiktoken file without a tokenizer.json; install the package that reads it "
                "(`pip install sentencepiece` or `tiktoken`), or copy the tokenizer.json of the same model beside it"
            )
        if "for this kind of AutoModel" in str(error):
            raise UserError(
                f"model: {run.model} is an encoder or another kind of model that transformers has no causal language "
                "model of; give one that is made to predict the next token."
            ) from error
        raise UserError(f"model: the {what} of {run.model} could not be loaded: {first}.") from error


@contextlib.contextmanager
def quiet():
    """transformers' own bars and hints would fight with the live display."""
    from transformers.utils import logging as transformers_logging

    logger = logging.getLogger("transformers")
    level, has_bars = logger.level, transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        if has_bars:
            transformers_logging.enable_progress_bar()
