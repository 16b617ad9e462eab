"""From the name of a model to its facts, without loading it: config.json of a folder or of the hub, a GGUF's header.

No torch and no transformers, unless the architecture has no formula: then the model is built on the meta device,
which takes seconds and is said.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal

from tunesmith import hub
from tunesmith.disk import expanded
from tunesmith.errors import UserError
from tunesmith.plan.facts import Layer, Linear, ModelFacts, StateSpace, is_attention
from tunesmith.plan.families import architecture_of, family_of, from_config


@dataclass(frozen=True)
class ModelLocation:
    """Where a model is: a folder with config.json, a GGUF file, or a name on the hub."""

    kind: Literal["folder", "gguf", "hub"]
    location: str


def find(model: str) -> ModelLocation:
    """Find the model, without reading it; raise UserError when it cannot be one."""
    path = expanded(model)
    if path.is_file():
        if path.suffix == ".gguf":
            return ModelLocation("gguf", str(path))
        raise UserError(f"model: {model} is a file; give a model folder, a .gguf file or a hub name.")
    if path.is_dir():
        if (path / "adapter_config.json").exists() and not (path / "config.json").exists():
            raise UserError(
                f"model: {model} holds an adapter, not a model; give its base and `adapter: {model}`, or what "
                "`tunesmith merge` makes of it."
            )
        if (path / "config.json").exists():
            return ModelLocation("folder", str(path))
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return ModelLocation("gguf", str(ggufs[0]))
        if ggufs:
            raise UserError(f"model: {model} holds {len(ggufs)} GGUF files; name the one you mean.")
        if (path / "model" / "config.json").exists():
            raise UserError(f"model: {model} is the folder of a run; give the model that it made, {path / 'model'}.")
        if (path / "adapter" / "adapter_config.json").exists():
            raise UserError(
                f"model: {model} is the folder of a run that made an adapter; give its base and `adapter: "
                f"{path / 'adapter'}`, or what `tunesmith merge` makes of it."
            )
        raise UserError(f"model: the folder {model} holds no config.json, so it is not a model folder.")
    looks_like_path = model.startswith((".", "/", "~")) or model.count("/") > 1 or path.suffix == ".gguf"
    if looks_like_path or not _is_hub_name(model):
        raise UserError(f"model: {model} does not exist; give a model folder, a .gguf file or a hub name.")
    return ModelLocation("hub", model)


def check_there(model: str) -> None:
    """Raise UserError where there is no such model: before anything is imported that takes seconds, and the hub asked
    at most once."""
    place = find(model)
    if place.kind == "hub":
        _from_hub(place.location)


def files_of(model: str) -> list[Path]:
    """The files with the model's weights, where they lie on this disk, in the order of their names."""
    place = find(model)
    if place.kind == "hub":
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(place.location, "config.json")
        folder = Path(config).parent if isinstance(config, str) else None
    else:
        folder = Path(place.location) if place.kind == "folder" else None
    return sorted(folder.glob("model*.safetensors")) if folder else []


@contextmanager
def as_teacher(model: str) -> Iterator[None]:
    """What is wrong with this model is said of `distillation.teacher`, which it is."""
    try:
        yield
    except UserError as error:
        said = re.sub("give its base and `adapter: .*`, or what", "give what", str(error))  # that is the student's
        raise UserError(said.replace(f"model: {model}", f"distillation.teacher: {model}")) from error


def read_facts(model: str, *, trust_remote_code: bool = False) -> ModelFacts:
    """Facts of the model of this name: by formula, or by building it without weights."""
    config = read_config(model)
    check_kind(model, config)
    try:
        if family_of(config) is not None:
            return from_config(config)
        try:
            return build_facts(config, trust_remote_code=trust_remote_code, source=model)
        except (ImportError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError):
            return from_config(config)  # whose note says that it is a guess
    except UserError as error:
        raise UserError(f"model: {model} cannot be planned for: {error}") from error


def read_config(model: str) -> dict[str, Any]:
    """The contents of the model's config.json, or what a GGUF's header says in its words."""
    place = find(model)
    if place.kind == "gguf":
        return gguf_config(Path(place.location))
    if place.kind == "folder":
        path = Path(place.location) / "config.json"
    else:
        path = _from_hub(place.location)
    config = read_config_file(path)
    check_quantization(config)
    return config


def read_config_file(path: Path) -> dict[str, Any]:
    """The contents of a config.json, with the numbers that JSON has no words for."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_hook=_untagged)
    except (OSError, ValueError, RecursionError) as error:
        said = str(error).splitlines() or [type(error).__name__]
        raise UserError(f"model: {path} cannot be read: {said[0]}.") from error
    if not isinstance(config, dict):
        raise UserError(f"model: {path} holds no settings; it is damaged.")
    return config


def _untagged(value: dict[str, Any]) -> Any:
    """transformers writes a float that JSON has no word for as {"__float__": "Infinity"}."""
    if value.keys() == {"__float__"}:
        try:
            return float(value["__float__"])
        except (TypeError, ValueError):
            return value
    return value


QUANTIZED = {"bitsandbytes", "fp8", "fbgemm_fp8", "mxfp4", "gptq", "awq", "auto-round", "compressed-tensors"}
"""Ways in which weights may lie in a model's files in few bits already; `model.packed` reads them."""


GGUF_PLAIN = (0, 1, 32)
"""File types of GGUF with weights in fp32, fp16 and bf16."""


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a config says of weights that are quantized already."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        for name in ("quantization_config", "compression_config"):
            if isinstance(part.get(name), dict) and part[name]:
                return part[name]
    return None


def rounded_already(model: str) -> str | None:
    """How a model's files hold its weights in few bits; None where they hold them as they are."""
    config, place = read_config(model), find(model)
    if place.kind == "gguf":
        status = Path(place.location).stat()
        kind = _gguf_header(Path(place.location), status.st_size, status.st_mtime_ns)[0].get("general.file_type")
        return None if kind in (None, *GGUF_PLAIN) else f"GGUF, file type {kind}"
    scheme = quantization_of(config)
    return None if scheme is None else str(scheme.get("quant_method") or "bitsandbytes")


def check_quantization(config: Mapping[str, Any]) -> None:
    """UserError where the config says that its weights are in few bits in a way that cannot be read here."""
    scheme = quantization_of(config)
    if scheme is None:
        return
    method = scheme.get("quant_method")
    if method is None and scheme.keys() & {"load_in_4bit", "load_in_8bit"}:
        method = "bitsandbytes"
    if method not in QUANTIZED:
        known = ", ".join(sorted(QUANTIZED))
        raise UserError(
            f"model: its weights were quantized by {str(method)[:60]!r}, which cannot be read here (only {known}); "
            "give the model as it was before."
        )


def check_kind(model: str, config: Mapping[str, Any], verb: str = "fine-tuned") -> None:
    """UserError where the model is no language model that writes text, as far as its config says."""
    if (kind := other_kind(config)) is not None:
        raise UserError(
            f"model: {model} is {kind}, and only causal language models, which predict the next token, and "
            f"encoder-decoders of text can be {verb} here."
        )


def is_encoder_decoder(config: Mapping[str, Any]) -> bool:
    """Whether a model reads with one stack of layers and writes with another, as far as its config says."""
    return config.get("is_encoder_decoder") is True and not architecture_of(config).endswith(("ForCausalLM", "Decoder"))


def language_model_class(config: Any) -> Any:
    """transformers' class for models of this config that write text; of many that see images, the only one that it has
    is called with images and text, or with text alone."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    )

    kinds = {
        AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoModelForImageTextToText: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    }
    if is_encoder_decoder(config.to_dict()):
        kinds = {AutoModelForSeq2SeqLM: MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING}
    has_own_code = bool(getattr(config, "auto_map", None))
    known_kind = next((kind for kind, known in kinds.items() if type(config) in known), None)
    if known_kind is None and not has_own_code:
        raise UserError(
            f"transformers has no class of {config.model_type} models that writes text when it is given text alone: it "
            "is an encoder or another kind of model; choose another."
        )
    return known_kind or next(iter(kinds))


def other_kind(config: Mapping[str, Any]) -> str | None:
    """What a model is by its config where it is neither a causal language model nor an encoder-decoder of text; None
    where it may be one."""
    name = architecture_of(config)
    has_text = any(isinstance(part.get("vocab_size"), int) for part in (config, config.get("text_config") or {}))
    keys = set(config) | {key for part in config.values() if isinstance(part, dict) for key in part}
    is_heard = bool(keys & {"num_mel_bins", "feat_extract_norm", "conv_bias", "audio_config", "sampling_rate"})
    is_seen = bool(keys & {"image_size", "patch_size", "vision_config", "num_channels"})
    if re.search(r"ForCTC$|Audio|Speech|Wav2Vec|Whisper|Hubert|XVector", name) or (is_heard and not has_text):
        return f"a speech model ({name})"
    writes = name.endswith("ForConditionalGeneration") and isinstance(config.get("text_config"), Mapping)
    by_name = re.search(r"Image|Vision|ObjectDetection|Segmentation|Depth|^CLIP|^Siglip", name) and not writes
    if by_name or (is_seen and not has_text):
        return f"a vision model ({name})"
    if re.search(r"MaskedLM$|ForPreTraining$|TokenClassification$|QuestionAnswering$|MultipleChoice$", name):
        return f"an encoder of BERT's kind ({name})"
    has_no_head = re.search(rf"({_ENCODERS})(Model)?$|EncoderModel$", name, re.IGNORECASE)  # MiniLM, BGE, E5
    if has_no_head and not config.get("is_decoder"):
        return f"an encoder of BERT's kind ({name})"
    if re.search(r"SequenceClassification$|RewardModel$", name):
        return f"a classifier ({name})"
    return None


_ENCODERS = (
    "bert|deberta([-_]?v2)?|roberta([-_]?xl|[-_]?prelayernorm)?|camembert|electra|ernie|mpnet|fnet|funnel|luke|mra|"
    "yoso|esmc?|longformer|nystromformer|roformer|layoutlm|tapas|big_?bird|data2vec[-_]?text|gte|"
    "jina_?embeddings_?v3"
)
"""Ends of the names of models that read a text in both directions, and of their `model_type`."""


def build_facts(config: Mapping[str, Any], *, trust_remote_code: bool = False, source: str = "") -> ModelFacts:
    """Facts of an architecture without a formula, from the model itself, built without weights. Where its code lies
    beside its config, that of `source` is read, if it is trusted."""
    import torch
    from transformers import AutoConfig

    is_pair = is_encoder_decoder(config)
    plain = {name: value for name, value in config.items() if name not in ("quantization_config", "compression_config")}
    if "auto_map" in plain and trust_remote_code and source:
        built = AutoConfig.from_pretrained(source, trust_remote_code=True)
    else:
        built = AutoConfig.for_model(**plain)
    with torch.device("meta"):
        model = language_model_class(built).from_config(built, trust_remote_code=trust_remote_code)
    rough = from_config(_as_decoder(built) if is_pair else built.to_dict())
    layers: dict[str, list[tuple[str, Any]]] = {}
    for name, parameter in model.named_parameters():
        prefix, index = _layer(name)
        if index is not None and "vision" not in prefix and "visual" not in prefix and "audio" not in prefix:
            layers.setdefault(f"{prefix}.{index}", []).append((name, parameter))
    active = getattr(built.get_text_config(), "num_experts_per_tok", None) or 1
    kinds: list[Layer] = []
    pattern: list[int] = []
    for place, parameters in layers.items():
        prefix = place.rpartition(".")[0]
        linears = tuple(
            Linear(
                name=name.removeprefix(place + ".").removesuffix(".weight"),
                inputs=parameter.shape[-1],
                outputs=parameter.shape[-2],
                count=parameter.shape[0] if parameter.ndim == 3 else 1,
                active=min(active, parameter.shape[0]) if parameter.ndim == 3 else 1,
                is_adaptable=parameter.ndim == 2,
            )
            for name, parameter in parameters
            if _is_matrix(parameter)
        )
        usual = rough.kinds[0]
        other = sum(parameter.numel() for _, parameter in parameters if not _is_matrix(parameter))
        index = int(place.rpartition(".")[2])
        attention = _attention_of(built.get_text_config(), index, [name for name, _ in parameters])
        attention |= _mlp_of(linears, usual.intermediate) | _mixer_of(model.get_submodule(place), linears)
        kind = usual.changed(prefix=prefix, linears=linears, other=other, **attention)
        if kind not in kinds:
            kinds.append(kind)
        pattern.append(kinds.index(kind))
    if not kinds:
        raise ValueError("it has no layers")
    inside = sum(parameter.numel() for parameters in layers.values() for _, parameter in parameters)
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    facts = rough.changed(
        kinds=tuple(kinds),
        pattern=tuple(pattern),
        tied=tied,
        has_head=head is not None,
        packs=not is_pair and _packs(model),
        is_causal=not is_pair,
        has_fused_attention=rough.has_fused_attention and not is_pair,
        extra=0,
        note=f"{rough.architecture} has no formula here: its sizes are those of the model built without weights, and "
        "what its layers keep for backward is an estimate",
    )
    everything = sum(parameter.numel() for parameter in model.parameters())
    return facts.changed(extra=everything - inside - facts.embedding - facts.head)


def _as_decoder(config: Any) -> dict[str, Any]:
    """Sizes of an encoder-decoder in the words of a decoder's config; those of the wider stack, where they differ."""
    parts = [config, *(getattr(config, name, None) for name in ("encoder", "decoder"))]
    values_of = {"architectures": config.architectures, "model_type": config.model_type}
    names = {
        "hidden_size": ("hidden_size",),
        "num_hidden_layers": ("num_hidden_layers",),
        "num_attention_heads": ("num_attention_heads", "encoder_attention_heads"),
        "intermediate_size": ("intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim"),
        "head_dim": ("d_kv", "head_dim"),
        "vocab_size": ("vocab_size",),
        "max_position_embeddings": ("max_position_embeddings",),
    }
    for name, others in names.items():
        values = [getattr(part, other, None) for part in parts if part is not None for other in others]
        if values := [value for value in values if isinstance(value, int)]:
            values_of[name] = max(values)
    return values_of


def _attention_of(config: Any, layer: int, names: list[str]) -> dict[str, Any]:
    """What a layer's attention asks of a kernel, as far as its config and its parameters say."""
    own = config
    if getattr(config, "has_heterogeneity", False):
        own = config.get_full_layer_config(layer)
    attention: dict[str, Any] = {}
    kinds = getattr(own, "layer_types", None)
    kind = kinds[layer] if isinstance(kinds, list) and layer < len(kinds) else None
    if kind == "sliding_attention" and isinstance(getattr(own, "sliding_window", None), int):
        attention["window"] = own.sliding_window or None
    elif kind is not None:
        attention["window"] = None
    if kind == "chunked_attention":
        attention["chunk"] = getattr(own, "attention_chunk_size", None)
    nope, rope = (getattr(own, f"qk_{part}_head_dim", None) for part in ("nope", "rope"))
    if isinstance(nope, int) and isinstance(rope, int):
        attention |= {"head_dim": nope + rope, "value_dim": getattr(own, "v_head_dim", None) or nope}
    elif isinstance(getattr(own, "v_head_dim", None), int):
        attention["value_dim"] = own.v_head_dim
    wide = getattr(own, "global_head_dim", None)
    if kind == "full_attention" and isinstance(wide, int) and wide > 0:
        attention |= {"head_dim": wide, "value_dim": wide}
    attention["is_soft_capped"] = bool(getattr(own, "attn_logit_softcapping", None))
    attention["has_sinks"] = any(re.search(r"(^|\.)(attention_)?sinks?$", name) for name in names)
    attention["has_alibi"] = bool(getattr(own, "alibi", False)) or getattr(own, "model_type", "") in ("bloom", "mpt")
    return attention


def _is_matrix(parameter: Any) -> bool:
    """A linear's weight, or those of experts in one; not that of a convolution of each channel for itself."""
    return parameter.ndim == 2 or (parameter.ndim == 3 and parameter.shape[1] > 1)


def _mixer_of(layer: Any, linears: tuple[Linear, ...]) -> dict[str, Any]:
    """The state space of a layer with a Mamba-2 mixer, which may have no attention besides."""
    names = ("num_heads", "head_dim", "n_groups", "ssm_state_size")
    for module in layer.modules():
        sizes = [size for name in names if isinstance(size := getattr(module, name, None), int)]
        if not hasattr(module, "A_log") or len(sizes) < len(names):
            continue
        heads, size, groups, state = sizes
        inner = heads * size
        space = StateSpace(heads=heads, inner=inner, state=state, channels=inner + 2 * groups * state)
        has_attention = any(is_attention(linear.name) for linear in linears)
        return {"state_space": space} | ({} if has_attention else {"query": 0, "key": 0})
    return {}


def _mlp_of(linears: tuple[Linear, ...], width: int) -> dict[str, Any]:
    """Whether a layer's MLP has a gate: two linears of its width, or one of twice that."""
    inside = [linear.outputs / width for linear in linears if not is_attention(linear.name)]
    if inside.count(1) >= 2 or 2 in inside or 1 not in inside:
        return {}
    return {"is_gated": False, "mlp_values": 2, "gate": None}


def _packs(model: Any) -> bool:
    """Whether documents can lie end to end, as far as the code says: its attention is exchangeable, and nothing else
    runs along the tokens. The probe has the last word."""
    along = ("conv1d", "mixer", "mamba", "linear_attn", "recurrent", "rwkv")
    names = (name.rpartition(".")[2].lower() for name, _ in model.named_modules())
    runs_along = getattr(model, "_is_stateful", False) or any(word in name for name in names for word in along)
    return bool(getattr(model, "_supports_attention_backend", False)) and not runs_along


# GGUF


_GGUF_NAMES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_GGUF_FAMILIES = {
    "gptneox": "gpt_neox",
    "gemma3": "gemma3_text",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "phi2": "phi",
}
_GGUF_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_GGUF_STRING, _GGUF_ARRAY = 8, 9


def gguf_config(file: Path) -> dict[str, Any]:
    """What the header of a GGUF file says, in the words of config.json."""
    try:
        status = file.stat()
        values, tensors = _gguf_header(file, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise UserError(f"model: {file} cannot be read: {error.strerror or error}.") from error
    except (struct.error, ValueError, MemoryError, OverflowError) as error:
        raise UserError(f"model: {file} is not a readable GGUF file: {error}.") from error
    family = str(values.get("general.architecture"))
    config: dict[str, Any] = {"model_type": _GGUF_FAMILIES.get(family, family)}
    for name, wanted in _GGUF_NAMES.items():
        value = values.get(f"{family}.{name}")
        if isinstance(value, int):
            config[wanted] = value
    if family == "llama" and config.get("num_local_experts"):
        config["model_type"] = "mixtral"
    config.setdefault("vocab_size", values.get("tokenizer.ggml.tokens"))
    config["tie_word_embeddings"] = "output.weight" not in tensors
    return config


@lru_cache(4)
def _gguf_header(file: Path, size: int, changed: int) -> tuple[dict[str, Any], set[str]]:
    """Read once, since a vocabulary takes a while and a run asks often. `size` and `changed` tell one file from what is
    put in its place."""
    with file.open("rb") as stream:
        return _read_gguf(stream)


def _read_gguf(stream: BinaryIO) -> tuple[dict[str, Any], set[str]]:
    """Scalars and strings by key (arrays: their length), and the names of the tensors."""
    magic, version, tensor_count, value_count = struct.unpack("<4sIQQ", stream.read(24))
    if magic != b"GGUF" or version < 2:
        raise ValueError("it does not begin as one")
    if tensor_count > 1 << 20 or value_count > 1 << 16:
        raise ValueError("its header is damaged")

    def number(code: str) -> Any:
        size = struct.calcsize(code)
        return struct.unpack("<" + code, stream.read(size))[0]

    def text() -> str:
        size = number("Q")
        if size > 1 << 26:
            raise ValueError("its header is damaged")
        return stream.read(size).decode("utf-8", "replace")

    def value(kind: int) -> Any:
        if kind == _GGUF_STRING:
            return text()
        if kind != _GGUF_ARRAY:
            if kind not in _GGUF_SCALARS:
                raise ValueError("its header is damaged")
            return number(_GGUF_SCALARS[kind])
        inner, count = number("I"), number("Q")
        if inner in (_GGUF_STRING, _GGUF_ARRAY):
            for _ in range(count):
                value(inner)
        elif inner in _GGUF_SCALARS:
            stream.seek(count * struct.calcsize(_GGUF_SCALARS[inner]), 1)
        else:
            raise ValueError("its header is damaged")
        return count

    values = {text(): value(number("I")) for _ in range(value_count)}
    tensors = set()
    for _ in range(tensor_count):
        tensors.add(text())
        stream.seek(8 * number("I") + 12, 1)
    return values, tensors


# helpers


def _layer(name: str) -> tuple[str, str | None]:
    """`model.layers.3.mlp.up.weight` -> (`model.layers`, `3`)."""
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[:position]), part
    return name, None


def _from_hub(name: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    is_offline = not hub.is_reachable()
    try:
        return Path(hf_hub_download(name, "config.json", local_files_only=is_offline))
    except LocalEntryNotFoundError as error:
        raise UserError(
            f"model: {name} is neither a folder here nor in the hub's cache, and {hub.unreachable()}; give the path "
            "of a model folder or a .gguf file."
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(f"model: the config of {name} could not be loaded: {first.rstrip('.')}.") from error


def _is_hub_name(model: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return True
