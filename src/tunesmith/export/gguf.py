"""GGUF, for llama.cpp, Ollama and what is built on them: the merged model in one file, or the adapter alone.

Tensors are merged, arranged, quantized and written one after the other. 16 and 32 bits, q8_0 and q4_0 are written by
the `gguf` package; K-quants are made by llama.cpp's own quantizer, where that is installed, out of a file in 16 bits.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tunesmith.data.types import Message
from tunesmith.errors import UserError
from tunesmith.export.gguf_architectures import architecture_of, arranged, converted, describe, rope_tensors
from tunesmith.export.gguf_tokenizer import write_tokenizer
from tunesmith.export.source import Progress, Source, needs
from tunesmith.model import lora
from tunesmith.run.streamed import merged_weights

WRITTEN = ("f32", "f16", "bf16", "q8_0", "q4_0")
"""By the gguf package."""
K_QUANTS = ("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k")
TYPES = (*WRITTEN, *K_QUANTS)
BITS = {"f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8_0": 8.5, "q4_0": 4.5}
QUANTIZER = "llama-quantize"
WHOLE = re.compile(r"norm|ffn_gate_inp|ssm_(a|d|conv1d)(\.|$)|shortconv\.conv|position_embd|^rope_|\.bias$")
"""Kept in 32 bits by llama.cpp's own converter, too: small, and some of them taken in no other way."""
WIDE = ("token_embd.weight", "output.weight")
"""Kept in 8 bits where the rest is in 4: all tokens go through them."""


def check(source: Source, kind: str) -> None:
    """UserError for what cannot be exported, before anything is written."""
    needs("gguf", "gguf")
    architecture_of(source.weights.model)
    write_tokenizer(_Nothing(), source.tokenizer, **_vocabulary(source))
    if kind in K_QUANTS and shutil.which(QUANTIZER) is None:
        raise UserError(
            f"--type {kind} is made by llama.cpp's {QUANTIZER}, which is not installed here; install llama.cpp, or "
            "take q8_0 or q4_0."
        )


def size(source: Source, kind: str) -> int:
    first = 4 if source.weights.stored == "fp32" else 2  # what a K-quant is made from
    return int(source.weights.count * (BITS[kind] / 8 if kind in BITS else first + 7 / 8))


def file_name(kind: str) -> str:
    return f"model-{kind}.gguf"


def write(source: Source, folder: Path, kind: str, progress: Progress) -> None:
    if kind not in K_QUANTS:
        write_plain(source, folder / file_name(kind), kind, progress)
        return
    plain = folder / file_name("f16")
    write_plain(source, plain, "f32" if source.weights.stored == "fp32" else "bf16", progress)
    progress(f"Quantizing to {kind}", 0, None)
    command = [QUANTIZER, str(plain), str(folder / file_name(kind)), kind.upper()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not (folder / file_name(kind)).is_file():
        said = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise UserError(f"{QUANTIZER} could not make {kind}: {said[-1]}.")
    plain.unlink()


def write_plain(source: Source, file: Path, kind: str, progress: Progress) -> None:
    import gguf

    model, architecture = source.weights.model, architecture_of(source.weights.model)
    arch = gguf.MODEL_ARCH[architecture.name]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(source.title)
    writer.add_file_type(_file_type(kind))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    describe(writer, model, architecture)
    write_tokenizer(writer, source.tokenizer, **_vocabulary(source))
    names = gguf.get_tensor_name_map(arch, model.config.get_text_config().num_hidden_layers)
    extra = rope_tensors(model)
    shapes = source.weights.shapes()
    planned = [(name, tensor.to("meta")) for name, tensor in extra.items()]
    for name in source.weights.names:
        planned += converted(name, torch.empty(shapes[name], device="meta"), model, architecture, names)
    kinds = {name: _kind(name, tensor, kind) for name, tensor in planned}
    for name, tensor in planned:
        _announce(writer, name, tuple(tensor.shape), kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    done = iter(planned)

    def put(name: str, tensor: torch.Tensor) -> None:
        expected, _ = next(done)
        assert name == expected
        writer.write_tensor_data(_encoded(name, tensor, kinds[name]))

    for name, tensor in extra.items():
        put(name, tensor)
    for name, tensor in merged_weights(source.weights, progress):
        for one, value in converted(name, tensor, model, architecture, names):
            put(one, value)
    assert next(done, None) is None
    writer.close()


def _vocabulary(source: Source) -> dict[str, Any]:
    """A tokenizer that begins every text with a token must not where the chat template of training did not."""
    encoder = source.encoder
    begins = not encoder.has_template or encoder.prompt([Message("user", "x")])[:1] == [source.tokenizer.bos_token_id]
    return {"vocabulary": source.vocabulary, "ends": source.ends, "begins": begins}


def _kind(name: str, tensor: torch.Tensor, kind: str) -> Any:
    """How a tensor is held: matrices as asked for, where their rows have whole blocks; all else in 32 bits."""
    import gguf

    types = gguf.GGMLQuantizationType
    if tensor.ndim < 2 or WHOLE.search(name):
        return types.F32
    if kind == "q4_0" and name in WIDE:
        kind = "q8_0"
    if kind in ("q8_0", "q4_0") and tensor.shape[-1] % 32:
        return types.F16
    return types[kind.upper()]


def _announce(writer: Any, name: str, shape: tuple[int, ...], kind: Any) -> None:
    import gguf

    types = gguf.GGMLQuantizationType
    if kind in (types.F32, types.F16):
        dtype = np.dtype(np.float32 if kind == types.F32 else np.float16)
        writer.add_tensor_info(name, shape, dtype, int(np.prod(shape)) * dtype.itemsize, kind)
        return
    held = gguf.quants.quant_shape_to_byte_shape(shape, kind)
    writer.add_tensor_info(name, held, np.dtype(np.uint8), int(np.prod(held)), kind)


def _encoded(name: str, tensor: torch.Tensor, kind: Any) -> np.ndarray:
    import gguf

    values = gguf.quants.quantize(tensor.detach().float().contiguous().numpy(), kind)
    if kind == gguf.GGMLQuantizationType.F16 and not np.isfinite(values).all():
        raise UserError(f"{name} has values beyond what f16 holds; export with --type bf16 or f32.")
    return values


def _file_type(kind: str) -> Any:
    import gguf

    names = {"f32": "ALL_F32", **{one: f"MOSTLY_{one.upper()}" for one in ("f16", "bf16", "q8_0", "q4_0")}}
    return gguf.LlamaFileType[names[kind]]


# The adapter alone


def check_adapter(source: Source, kind: str) -> None:
    needs("gguf", "gguf")
    architecture_of(source.weights.model)
    adapter = source.weights.adapter
    if adapter is None:
        raise UserError(f"The result of {source.folder} is a model and no adapter; use --to gguf.")
    if any(name.endswith("lora_magnitude_vector") for name in adapter.tensors):
        raise UserError("llama.cpp has no DoRA, and would ignore what it learned; use --to gguf, which merges it.")


def size_adapter(source: Source, kind: str) -> int:
    assert source.weights.adapter is not None
    return int(sum(tensor.numel() for tensor in source.weights.adapter.tensors.values()) * BITS[kind] / 8)


def write_adapter(source: Source, folder: Path, kind: str, progress: Progress) -> None:
    import gguf

    model, architecture = source.weights.model, architecture_of(source.weights.model)
    arch = gguf.MODEL_ARCH[architecture.name]
    writer = gguf.GGUFWriter(folder / f"adapter-{kind}.gguf", gguf.MODEL_ARCH_NAMES[arch])
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_name(source.title)
    names = gguf.get_tensor_name_map(arch, model.config.get_text_config().num_hidden_layers)
    found = list(_factors(source))
    alpha = max(a.shape[0] for _, a, _ in found)
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(alpha))
    for name, a, b in found:
        place = names.get_name(name, try_suffixes=(".weight",))
        if place is None:
            raise UserError(f"The linear {name} has no place in a GGUF file of its architecture; use --to gguf.")
        rows = arranged(name, b * (a.shape[0] / alpha), model.config.get_text_config(), architecture)
        for leaf, tensor in (("lora_a", a), ("lora_b", rows)):
            values = gguf.quants.quantize(tensor.float().contiguous().numpy(), gguf.GGMLQuantizationType[kind.upper()])
            writer.add_tensor(f"{place}.{leaf}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _factors(source: Source) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Of each adapted linear its two, the second one scaled: llama.cpp knows one scale for all."""
    files = source.weights.adapter
    assert files is not None
    for name in source.weights.adapted:
        a, b = (files.tensors[f"{lora.PREFIX}{name}.{leaf}.weight"].float() for leaf in ("lora_A", "lora_B"))
        yield f"{name}.weight", a, b * lora.scale_of(files.config, name, a.shape[0])


class _Nothing:
    """A writer that writes nothing, for what a tokenizer is refused for."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def modelfile(source: Source, file: str) -> str:
    """An Ollama Modelfile: the weights, where answers end, and the chat template in its own words where that is one of
    plain turns."""
    stops = [source.tokenizer.convert_ids_to_tokens(end) for end in source.ends]
    lines = [f"FROM ./{file}", *(f'PARAMETER stop "{stop}"' for stop in stops)]
    if not source.encoder.has_template:
        return "\n".join([*lines, "# The model has no chat template: it goes on with texts.", ""])
    template = go_template(source.encoder)
    if template is None:
        lines.append("# The chat template is in the GGUF file; it is not one of plain turns, so none is written here.")
    else:
        lines.append(f'TEMPLATE """{template}"""')
    return "\n".join(lines) + "\n"


def go_template(encoder: Any) -> str | None:
    """A chat template of plain turns in Ollama's language, found by asking the template; None where it does more."""
    said = {"s": "vwkya", "u": "qxzjb", "a": "zkwvc"}
    roles = {"s": "system", "u": "user", "a": "assistant"}

    def render(turns: str, generation: bool = False) -> str:
        return encoder.render([{"role": roles[t], "content": said[t]} for t in turns], generation=generation)

    try:
        alone, asked, answered, again = render("u"), render("u", True), render("ua"), render("uau")
        told = render("su")
    except (UserError, ValueError, TypeError):
        return None
    try:
        head_user, user_end = alone.split(said["u"])
        opening = asked.removeprefix(alone)
        answer_end = answered.split(said["a"])[1]
        between = again.split(said["a"])[1].split(said["u"])[0]
        system_begin, rest = told.split(said["s"])
        system_end_user = rest.split(said["u"])[0]
    except (ValueError, IndexError):
        return None
    user_begin = between.removeprefix(answer_end)
    if not (between.startswith(answer_end) and head_user.endswith(user_begin) and system_end_user.endswith(user_begin)):
        return None
    head = head_user[: len(head_user) - len(user_begin)]
    system_end = system_end_user[: len(system_end_user) - len(user_begin)]
    turn = {"u": (user_begin, user_end), "a": (opening, answer_end), "s": (system_begin, system_end)}
    written = "".join(turn[t][0] + said[t] + turn[t][1] for t in "suau") + opening
    if written != render("suau", True) or any('"""' in part or "{{" in part for pair in turn.values() for part in pair):
        return None
    first = '{{ if ne (index .Messages 0).Role "system" }}' + head + "{{ end }}" if head else ""
    each = "".join(
        f'{{{{ {"if" if t == "s" else "else if"} eq .Role "{roles[t]}" }}}}{turn[t][0]}{{{{ .Content }}}}{turn[t][1]}'
        for t in "sua"
    )
    return f"{first}{{{{ range .Messages }}}}{each}{{{{ end }}}}{{{{ end }}}}{opening}"
