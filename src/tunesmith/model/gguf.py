"""GGUF files, converted once into an ordinary model folder and kept in the cache.

transformers can read GGUF, but slowly (it dequantizes in Python), it cannot save what it read, and it rebuilds
the tokenizer from the vocabulary alone. Converting once gives a folder that loads in half a second and is the
same for training, merging and export.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.disk import writing
from tunesmith.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CONVERTER = "5"
"""Part of the cache key: raise it when the conversion changes."""
BEGINNING = ("llama3", "llama-v3", "llama-bpe")
"""Byte-level vocabularies whose texts begin with a token of their own where the file does not say."""


def converted_folder(file: Path, cache: Path) -> Path:
    """The model folder made from `file`, converting it first when that was not done before."""
    folder = cache / "models" / f"{file.stem}-{_content_key(file)}"
    if not (folder / "config.json").exists():
        with writing(folder, "make room there, or set TUNESMITH_CACHE to a folder elsewhere"):
            _convert(file, folder)
    return folder


def read_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """The file's own, without its weights."""
    from transformers import AutoTokenizer

    metadata = _metadata(file)
    with _alone(file) as folder, contextlib.redirect_stderr(io.StringIO()):
        # transformers' bars fight with a live display; errors raise
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    tokenizer = _without_additions(tokenizer, metadata)
    _restore_pre_tokenizer(tokenizer, metadata)
    _restore_bos(tokenizer, metadata)
    return tokenizer


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[Path]:
    """A folder with nothing but the file: of a tokenizer.json beside it transformers would take a part."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / file.name).symlink_to(file.resolve())
        yield Path(folder)


def _metadata(file: Path) -> Mapping[str, Any]:
    try:
        import accelerate  # noqa: F401  (transformers needs it to place GGUF tensors)
        import gguf
    except ImportError as error:
        raise UserError(
            f"Reading {file.name} needs the packages gguf and accelerate: pip install 'tunesmith[gguf]'."
        ) from error
    try:
        return gguf.GGUFReader(str(file)).fields
    except Exception as error:
        raise UserError(f"{file} is not a readable GGUF file: {error}.") from error


def _content_key(file: Path) -> str:
    """Size and both ends identify a model file well enough, without reading tens of gigabytes."""
    size = file.stat().st_size
    digest = hashlib.sha256(f"{CONVERTER}:{size}".encode())
    with file.open("rb") as stream:
        digest.update(stream.read(1 << 20))
        stream.seek(max(0, size - (1 << 20)))
        digest.update(stream.read())
    return digest.hexdigest()[:16]


def _convert(file: Path, folder: Path) -> None:
    tokenizer = read_tokenizer(file)
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"Converting {file.name}, this once; the result is kept in {folder}", file=sys.stderr, flush=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        tokenizer.save_pretrained(partial)
        with _alone(file) as alone, contextlib.redirect_stderr(io.StringIO()):
            model = AutoModelForCausalLM.from_pretrained(alone, gguf_file=file.name, dtype=torch.float32)
        save_file(each_once(model), partial / "model.safetensors", metadata={"format": "pt"})
        config = model.config
        del config.quantization_config
        config.architectures = [type(model).__name__]
        model.generation_config.save_pretrained(partial)
        config.save_pretrained(partial)
        try:
            os.replace(partial, folder)
        except OSError:
            if not (folder / "config.json").exists():  # not another process that was faster
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def each_once(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's tensors; one with several names by that of the embedding, where others look for it: vLLM makes one
    up where it finds the head alone."""
    embedding, state = model.get_input_embeddings().weight, model.state_dict()
    first = sorted(state, key=lambda name: state[name].data_ptr() != embedding.data_ptr() or "embed" not in name)
    found: dict[tuple[int, torch.Size], str] = {}
    for name in first:
        found.setdefault((state[name].data_ptr(), state[name].shape), name)
    return {name: state[name].contiguous() for name in found.values()}


def _without_additions(tokenizer: PreTrainedTokenizerBase, metadata: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """Without the tokens that transformers adds to the file's own: GPT-2's `<|endoftext|>`, which others have not, has
    no row in the embedding."""
    known = len(metadata["tokenizer.ggml.tokens"].data)
    if len(tokenizer) <= known:
        return tokenizer
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    described = json.loads(tokenizer.backend_tokenizer.to_str())
    described["added_tokens"] = [token for token in described["added_tokens"] if token["id"] < known]
    ids = {f"{name}_token": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk", "pad")}
    own = {name: tokenizer.convert_ids_to_tokens(at) for name, at in ids.items() if at is not None and at < known}
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(described)), **own)
    plain.chat_template = tokenizer.chat_template
    return plain


def _restore_pre_tokenizer(tokenizer, metadata) -> None:
    """transformers splits every byte-level vocabulary as GPT-2 does; SmolLM splits digits one by one."""
    field = metadata.get("tokenizer.ggml.pre")
    if field is not None and field.contents() == "smollm":
        from tokenizers import pre_tokenizers

        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )


def _restore_bos(tokenizer, metadata) -> None:
    """transformers leaves out that texts begin with a token of their own, as they do for llama.cpp."""
    model, pre, asked = (
        field.contents() if (field := metadata.get(f"tokenizer.ggml.{name}")) is not None else None
        for name in ("model", "pre", "add_bos_token")
    )
    is_wanted = asked if asked is not None else model == "llama" or pre in BEGINNING
    bos, backend = tokenizer.bos_token_id, tokenizer.backend_tokenizer
    if not is_wanted or bos is None or backend.encode("x", add_special_tokens=True).ids[:1] == [bos]:
        return
    from tokenizers import processors

    name = tokenizer.bos_token
    backend.post_processor = processors.TemplateProcessing(
        single=f"{name} $A", pair=f"{name} $A {name} $B", special_tokens=[(name, bos)]
    )
