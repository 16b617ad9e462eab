"""Weights that a model folder holds in few bits already, by the layouts that their libraries publish.

What such files hold beside a weight (scales, zero points, codes) is put together with it again: `logical` turns the
tensors of the files into those of the model. They are made whole while they are read, in fp32; weights in
bitsandbytes' nf4 and int8 can also be taken over code by code, so that nothing is rounded a second time. A layout that
is not known, or a part that is missing, ends in one sentence before anything is loaded.

  bitsandbytes         4 bits (nf4, fp4; scales quantized or not), 8 bits
  fp8, fbgemm_fp8      e4m3 with a scale for each tensor, row or block
  mxfp4                experts as gpt-oss has them
  gptq, awq            2, 3, 4 and 8 bits; 4 bits in the gemm layout
  compressed-tensors   pack-quantized, int-quantized, float-quantized, naive-quantized

Legend: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tunesmith.errors import UserError
from tunesmith.kernels import nf4
from tunesmith.model.headers import Entry, shortened

Opened = Mapping[Path, Any]
Block = tuple[slice, ...]
Parts = Mapping[str, torch.Tensor]
FLOATS = {"F64", "F32", "BF16", "F16"}
FP8 = {"F8_E4M3", "F8_E5M2"}
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Of mxfp4's codes."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word the eight neighbours lie."""
CT_FORMATS = {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense"}
IGNORED = re.compile(
    r".*\.(weight_format|input_scale|activation_scale|input_zero_point|input_scale_ub|[kvq]_scale|[kv]_zero_point|"
    r"output_scale|output_zero_point)"
)
"""What belongs to rounded activations or caches, which training does not have."""


@dataclass(frozen=True)
class Packed:
    """A weight that lies in the files as several tensors."""

    name: str
    parts: Mapping[str, Entry]
    full_shape: tuple[int, ...]
    decode: Callable[[Parts], torch.Tensor]
    """What makes it whole, in fp32."""
    nf4_codes: Callable[[Parts], torch.Tensor] | None = field(default=None)
    """Its codes as `kernels.nf4` holds them, where they are the same."""
    int8_codes: Callable[[Parts], tuple[torch.Tensor, torch.Tensor]] | None = field(default=None)
    """Its codes and their rows' scales as `kernels.int8` holds them, where they are the same."""
    is_transposed: bool = False
    """The model stores it [inputs, outputs]."""

    @property
    def entries(self) -> list[Entry]:
        return list(self.parts.values())

    @property
    def paths(self) -> set[Path]:
        return {entry.path for entry in self.entries}

    def shape(self, opened: Opened | None = None) -> tuple[int, ...]:
        return tuple(reversed(self.full_shape)) if self.is_transposed else self.full_shape

    def read(self, opened: Opened, block: Block = ()) -> torch.Tensor:
        full = self.decode(self.read_parts(opened))
        full = full.t().contiguous() if self.is_transposed else full
        return full[block] if block else full

    def read_parts(self, opened: Opened) -> dict[str, torch.Tensor]:
        return {role: opened[entry.path].get_tensor(entry.name) for role, entry in self.parts.items()}


def logical(
    entries: Mapping[str, Entry], scheme: Mapping[str, Any] | None, content: Callable[[Entry], bytes]
) -> dict[str, Entry | Packed]:
    """The model's tensors by name, from those of its files; `scheme` is what its config says of quantization, and
    `content` gives the bytes of a small tensor."""
    rest = dict(entries)
    found: dict[str, Packed] = {}
    for take in (_bitsandbytes4, _bitsandbytes8, _gptq_or_awq, _mxfp4, _compressed, _fp8):
        found |= take(rest, scheme or {}, content)
    if scheme is not None:
        rest = {name: entry for name, entry in rest.items() if not IGNORED.fullmatch(name)}
        if odd := [name for name, entry in rest.items() if entry.dtype in FP8]:
            raise UserError(f"model: the files hold {shortened(odd)} in fp8 without scales; the model is damaged.")
    if odd := [name for name, entry in rest.items() if name.endswith(".weight") and entry.dtype not in FLOATS | FP8]:
        said = f"config.json says {method_of(scheme)}" if scheme else "config.json says nothing of quantization"
        kind = rest[odd[0]].dtype
        raise UserError(
            f"model: the files hold {shortened(odd)} as {kind} without what is needed to read them, and {said}; give "
            "the model as it was before it was quantized."
        )
    where = {**rest, **found}
    return {name: where[name] for name in sorted(where, key=lambda name: _place(where[name]))}


def method_of(scheme: Mapping[str, Any]) -> str:
    named = scheme.get("quant_method")
    return str(named) if named else "bitsandbytes" if scheme.keys() & {"load_in_4bit", "load_in_8bit"} else "nothing"


def _place(one: Entry | Packed) -> tuple[str, int]:
    first = one.entries[0] if isinstance(one, Packed) else one
    return str(first.path), first.start


def _take(
    rest: dict[str, Entry], name: str, roles: Mapping[str, str], optional: Sequence[str] = ()
) -> dict[str, Entry]:
    """Remove what belongs to a weight from `rest`: role -> its name in the files."""
    if missing := [stored for role, stored in roles.items() if stored not in rest and role not in optional]:
        raise UserError(f"model: the files hold {name} in few bits, but not {shortened(missing)}; download it again.")
    return {role: rest.pop(stored) for role, stored in roles.items() if stored in rest}


def _fits(name: str, entry: Entry, shape: Sequence[int | None], dtypes: set[str] | None = None) -> None:
    """UserError where a part of a weight has another shape or type than its layout asks for."""
    same = len(shape) == len(entry.shape) and all(
        want in (None, have) for want, have in zip(shape, entry.shape, strict=True)
    )
    if not same or (dtypes is not None and entry.dtype not in dtypes):
        raise UserError(
            f"model: {entry.path.name} holds {entry.name} as {entry.dtype} {list(entry.shape)}, which does not fit the "
            f"quantized weight {name}; download it again."
        )


# bitsandbytes


def _bitsandbytes4(rest: dict[str, Entry], scheme: Mapping[str, Any], content: Callable[[Entry], bytes]):
    found = {}
    marks = [name for name in rest if re.search(r"\.quant_state\.bitsandbytes__(nf4|fp4)$", name)]
    for mark in marks:
        name, _, kind = mark.rpartition(".quant_state.bitsandbytes__")
        roles = {"state": mark, "weight": name, "absmax": f"{name}.absmax", "map": f"{name}.quant_map"}
        if f"{name}.nested_absmax" in rest:
            roles |= {"nested": f"{name}.nested_absmax", "nested_map": f"{name}.nested_quant_map"}
        parts = _take(rest, name, roles)
        try:
            state = json.loads(content(parts["state"]))
            shape, block = tuple(int(size) for size in state["shape"]), int(state["blocksize"])
            nested = int(state["nested_blocksize"]) if "nested" in parts else 0
            offset = float(state["nested_offset"]) if "nested" in parts else 0.0
            if block < 1 or block % 2 or len(shape) != 2 or min(shape) < 1 or nested < 0:
                raise ValueError
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"model: {mark} in {parts['state'].path.name} is damaged; download it again.") from error
        count = math.prod(shape)
        blocks = -(-count // block)
        _fits(name, parts["weight"], [None] * len(parts["weight"].shape))
        if parts["weight"].size != -(-count // 2):
            _fits(name, parts["weight"], [-1])
        _fits(name, parts["absmax"], [blocks], {"U8"} if nested else {"F32"})
        _fits(name, parts["map"], [16], {"F32"})
        if nested:
            _fits(name, parts["nested"], [-(-blocks // nested)], {"F32"})
            _fits(name, parts["nested_map"], [256], {"F32"})
        del parts["state"]
        options = {"shape": shape, "block": block, "nested": nested, "offset": offset}
        is_known = kind == "nf4" and block % nf4.BLOCK == 0 and not nf4.BLOCK < count <= 3 * nf4.BLOCK
        found[name] = Packed(
            name,
            parts,
            shape,
            lambda tensors, options=options: _decode_bnb4(tensors, **options),
            (lambda tensors, options=options: _bnb4_codes(tensors, **options)) if is_known else None,
        )
    return found


def _bnb4_scales(parts: Parts, nested: int, offset: float) -> torch.Tensor:
    absmax = parts["absmax"]
    if not nested:
        return absmax.float()
    scales = parts["nested"].repeat_interleave(nested)[: absmax.numel()]
    return parts["nested_map"][absmax.int()] * scales + offset


def _decode_bnb4(parts: Parts, *, shape: tuple[int, ...], block: int, nested: int, offset: float) -> torch.Tensor:
    packed, count = parts["weight"].reshape(-1), math.prod(shape)
    codes = torch.stack([packed >> 4, packed & 15], dim=1).view(-1)[:count]
    scales = _bnb4_scales(parts, nested, offset)
    values = parts["map"][codes.int()]
    values = torch.nn.functional.pad(values, (0, scales.numel() * block - count)).view(-1, block)
    return (values * scales[:, None]).view(-1)[:count].view(shape)


def _bnb4_codes(parts: Parts, *, shape: tuple[int, ...], block: int, nested: int, offset: float) -> torch.Tensor:
    """The same codes and scales. Scales that bitsandbytes left in fp32, or has for larger blocks, stay in fp32."""
    if not torch.allclose(parts["map"], nf4.values(torch.device("cpu")), atol=1e-6, rtol=0):
        raise UserError("model: the files hold nf4 weights with another table of values than bitsandbytes has.")
    is_same = block == nf4.BLOCK and nested == nf4.NESTED
    if is_same and torch.allclose(parts["nested_map"], nf4.scale_values(torch.device("cpu")), atol=1e-6, rtol=0):
        return nf4.from_codes(parts["weight"], math.prod(shape), parts["absmax"], parts["nested"], offset)
    scales = _bnb4_scales(parts, nested, offset).repeat_interleave(block // nf4.BLOCK)
    count = math.prod(shape)
    return nf4.from_plain_scales(parts["weight"], count, scales[: -(-count // nf4.BLOCK)])


def _bitsandbytes8(rest: dict[str, Entry], scheme: Mapping[str, Any], content: Callable[[Entry], bytes]):
    found = {}
    for mark in [name for name in rest if name.endswith(".SCB")]:
        name = mark.removesuffix("SCB") + "weight"
        parts = _take(rest, name, {"weight": name, "scales": mark})
        _fits(name, parts["weight"], [None, None], {"I8"})
        _fits(name, parts["scales"], [parts["weight"].shape[0]], {"F32", "F16", "BF16"})
        rest.pop(mark.removesuffix("SCB") + "weight_format", None)

        def codes(tensors: Parts) -> tuple[torch.Tensor, torch.Tensor]:
            return tensors["weight"], tensors["scales"].float() / 127

        def decode(tensors: Parts) -> torch.Tensor:
            return tensors["weight"].float() * (tensors["scales"].float() / 127)[:, None]

        found[name] = Packed(name, parts, parts["weight"].shape, decode, int8_codes=codes)
    return found


# GPTQ and AWQ


def _gptq_or_awq(rest: dict[str, Entry], scheme: Mapping[str, Any], content: Callable[[Entry], bytes]):
    marks = [name for name in rest if name.endswith(".qweight")]
    if not marks:
        return {}
    method = method_of(scheme)
    if method == "auto-round":
        method = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}.get(
            str(scheme.get("packing_format")), method
        )
    if method not in ("gptq", "awq"):
        raise UserError(
            f"model: the files hold {shortened(marks)}, and config.json does not say that they are GPTQ or AWQ; give "
            "the model as it was before it was quantized."
        )
    bits = scheme.get("bits", scheme.get("w_bit"))
    kind = scheme.get("version", scheme.get("format", "gemm")) if method == "awq" else _gptq_format(scheme)
    if bits not in ((4,) if method == "awq" else (2, 3, 4, 8)) or str(kind).lower() not in ("gemm", "gptq", "gptq_v2"):
        raise UserError(
            f"model: {method} with {bits} bits in the layout {kind} cannot be read here; give the model as it was "
            "before it was quantized."
        )
    found = {}
    for mark in marks:
        stem = mark.removesuffix("qweight")
        name = stem + "weight"
        roles = {"weight": mark, "zeros": f"{stem}qzeros", "scales": f"{stem}scales", "order": f"{stem}g_idx"}
        parts = _take(rest, name, roles, optional=["order"])
        _fits(name, parts["scales"], [None, None], FLOATS)
        groups, outputs = parts["scales"].shape
        if len(parts["weight"].shape) != 2 or not groups:
            _fits(name, parts["weight"], [-1, -1])
        if method == "awq":
            inputs = parts["weight"].shape[0]
            _fits(name, parts["weight"], [None, outputs // 8], {"I32"})
            _fits(name, parts["zeros"], [groups, outputs // 8], {"I32"})
            parts.pop("order", None)
        else:
            inputs = parts["weight"].shape[0] * 32 // bits
            _fits(name, parts["weight"], [None, outputs], {"I32"})
            _fits(name, parts["zeros"], [groups, -(-outputs * bits // 32)], {"I32"})
            if "order" in parts:
                _fits(name, parts["order"], [inputs], {"I32", "I64"})
        if inputs % groups:
            size = scheme.get("group_size")
            if not isinstance(size, int) or size < 1 or -(-inputs // size) != groups:
                _fits(name, parts["scales"], [-1, outputs])
        each = -(-inputs // groups)
        if method == "awq":
            found[name] = Packed(name, parts, (outputs, inputs), lambda tensors, each=each: _decode_awq(tensors, each))
        else:
            shift = 0 if kind == "gptq_v2" else 1  # the first format stores zero points less one
            options = {"bits": bits, "each": each, "shift": shift}
            found[name] = Packed(
                name, parts, (outputs, inputs), lambda tensors, options=options: _decode_gptq(tensors, **options)
            )
    return found


def _gptq_format(scheme: Mapping[str, Any]) -> str:
    if scheme.get("is_marlin_format"):
        return "marlin"
    return str(scheme.get("checkpoint_format") or "gptq")


def _decode_gptq(parts: Parts, *, bits: int, each: int, shift: int) -> torch.Tensor:
    weight_kn = _unpack(parts["weight"].t(), bits).t()
    zeros_gn = (_unpack(parts["zeros"], bits)[:, : weight_kn.shape[1]] + shift) & ((1 << bits) - 1)
    inputs = torch.arange(weight_kn.shape[0])
    group_k = parts["order"].long() if "order" in parts else inputs // each
    if int(group_k.max()) >= zeros_gn.shape[0] or int(group_k.min()) < 0:
        raise UserError("model: a g_idx of the GPTQ weights names groups that are not there; download it again.")
    scales_gn = parts["scales"].float()
    return ((weight_kn - zeros_gn[group_k]).float() * scales_gn[group_k]).t().contiguous()


def _decode_awq(parts: Parts, each: int) -> torch.Tensor:
    order = torch.tensor(AWQ_ORDER)

    def unpacked(words: torch.Tensor) -> torch.Tensor:
        return _unpack(words, 4).view(words.shape[0], -1, 8)[:, :, order].reshape(words.shape[0], -1)

    weight_kn, zeros_gn = unpacked(parts["weight"]), unpacked(parts["zeros"])
    group_k = torch.arange(weight_kn.shape[0]) // each
    return ((weight_kn - zeros_gn[group_k]).float() * parts["scales"].float()[group_k]).t().contiguous()


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Whole numbers of so many bits, one behind the other in words of 32 along the last dimension."""
    mask = (1 << bits) - 1
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32)
        return ((words[..., None] >> shifts) & mask).flatten(-2)
    count = words.shape[-1] * 32 // bits
    at = torch.arange(count) * bits
    wide = words.long() & 0xFFFFFFFF
    low, high = wide[..., at // 32], wide[..., (at // 32 + 1).clamp(max=words.shape[-1] - 1)]
    return (((low >> (at % 32)) | (high << (32 - at % 32))) & mask).int()


# MXFP4


def _mxfp4(rest: dict[str, Entry], scheme: Mapping[str, Any], content: Callable[[Entry], bytes]):
    found = {}
    for mark in [name for name in rest if name.endswith("_blocks") and rest[name].dtype == "U8"]:
        name = mark.removesuffix("_blocks")
        parts = _take(rest, name, {"weight": mark, "scales": f"{name}_scales"})
        _fits(name, parts["weight"], [None, None, None, 16], {"U8"})
        experts, rows, groups, _ = parts["weight"].shape
        _fits(name, parts["scales"], [experts, rows, groups], {"U8"})
        found[name] = Packed(name, parts, (experts, 32 * groups, rows), _decode_mxfp4)
    return found


def _decode_mxfp4(parts: Parts) -> torch.Tensor:
    """gpt-oss has its experts' matrices the other way round than files in blocks."""
    table = torch.tensor(FP4_VALUES)
    full = []
    for blocks, scales in zip(parts["weight"], parts["scales"], strict=True):
        codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
        values = torch.ldexp(table[codes.int()], (scales.int() - 127)[..., None])
        full.append(values.flatten(-2).t())
    return torch.stack(full).contiguous()


# fp8


def _fp8(rest: dict[str, Entry], scheme: Mapping[str, Any], content: Callable[[Entry], bytes]):
    found = {}
    for mark in [name for name in rest if name.endswith(("_scale_inv", ".weight_scale"))]:
        name = mark.removesuffix("_scale_inv").removesuffix("_scale")
        if name not in rest or rest[name].dtype not in FP8:
            raise UserError(f"model: the files hold {mark}, but no {name} in fp8 that it is for; download it again.")
        parts = _take(rest, name, {"weight": name, "scales": mark})
        size = scheme.get("weight_block_size")
        found[name] = _scaled(name, parts, size if isinstance(size, list) and len(size) == 2 else None)
    return found


def _scaled(name: str, parts: dict[str, Entry], block: Sequence[int] | None) -> Packed:
    """A weight to be multiplied with scales for the whole, for rows, or for blocks of its last two dimensions."""
    shape, scales = parts["weight"].shape, parts["scales"].shape
    if math.prod(scales) == 1:
        sizes = None
    elif len(scales) == 1 and shape and scales[0] == shape[0]:
        sizes = (1, shape[-1])
    elif len(scales) == len(shape) >= 2 and scales[:-2] == shape[:-2]:
        pairs = zip(shape[-2:], scales[-2:], strict=True)
        sizes = tuple(block) if block else tuple(-(-full // max(1, few)) for full, few in pairs)
        if scales[-1] == 1:
            sizes = (1 if scales[-2] == shape[-2] else sizes[0], shape[-1])
        if any(
            type(one) is not int or one < 1 or -(-full // one) != few
            for one, full, few in zip(sizes, shape[-2:], scales[-2:], strict=True)
        ):
            _fits(name, parts["scales"], [-1])
    else:
        _fits(name, parts["scales"], [-1])
        sizes = None

    def decode(tensors: Parts) -> torch.Tensor:
        values, factors = tensors["weight"].float(), tensors["scales"].float()
        if sizes is None:
            return values * factors.reshape(())
        factors = factors[:, None] if factors.ndim == 1 else factors
        factors = factors.repeat_interleave(sizes[0], -2)[..., : shape[-2], :]
        return values * factors.repeat_interleave(sizes[1], -1)[..., : shape[-1]]

    return Packed(name, parts, shape, decode)


# compressed-tensors


def _compressed(rest: dict[str, Entry], scheme: Mapping[str, Any], content: Callable[[Entry], bytes]):
    if method_of(scheme) != "compressed-tensors":
        if odd := [name for name in rest if name.endswith(".weight_packed")]:
            raise UserError(
                f"model: the files hold {shortened(odd)}, and config.json does not say how they are packed."
            )
        return {}
    groups = _weight_groups(scheme)
    found = {}
    for mark in [name for name in rest if name.endswith(".weight_packed")]:
        stem = mark.removesuffix("weight_packed")
        name = stem + "weight"
        roles = {
            "weight": mark,
            "scales": f"{stem}weight_scale",
            "shape": f"{stem}weight_shape",
            "zeros": f"{stem}weight_zero_point",
            "order": f"{stem}weight_g_idx",
        }
        parts = _take(rest, name, roles, optional=["zeros", "order"])
        found[name] = _packed_ints(name, parts, groups, content)
    for mark in [name for name in rest if name.endswith(".weight_scale")]:
        stem = mark.removesuffix("weight_scale")
        name = stem + "weight"
        roles = {"weight": name, "scales": mark, "zeros": f"{stem}weight_zero_point", "order": f"{stem}weight_g_idx"}
        parts = _take(rest, name, roles, optional=["zeros", "order"])
        _fits(name, parts["weight"], [None, None], {"I8", *FP8})
        found[name] = _plain_ints(name, parts, groups)
    return found


def _weight_groups(scheme: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What the config says of weights: bits, group size, and so on, for each group of modules."""
    formats = {str(scheme.get("format") or "dense")}
    found, config_groups = [], scheme.get("config_groups")
    for group in config_groups.values() if isinstance(config_groups, Mapping) else []:
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping):
            found.append(group["weights"])
            formats |= {str(group["format"])} if group.get("format") else set()
    formats.discard("mixed-precision")
    sparsity = scheme.get("sparsity_config") or {}
    is_sparse = isinstance(sparsity, Mapping) and str(sparsity.get("format") or "dense") != "dense"
    has_transforms = isinstance(scheme.get("transform_config"), Mapping) and bool(
        scheme["transform_config"].get("config_groups")
    )
    if is_sparse or has_transforms or not formats <= CT_FORMATS:
        what = (
            "sparse weights"
            if is_sparse
            else "transforms"
            if has_transforms
            else shortened(sorted(formats - CT_FORMATS))
        )
        raise UserError(
            f"model: compressed-tensors with {what} cannot be read here; give the model as it was before it was "
            "quantized."
        )
    return found


def _packed_ints(
    name: str, parts: dict[str, Entry], groups: Sequence[Mapping[str, Any]], content: Callable[[Entry], bytes]
) -> Packed:
    _fits(name, parts["shape"], [2], {"I64", "I32"})
    kind = torch.int64 if parts["shape"].dtype == "I64" else torch.int32
    outputs, inputs = torch.frombuffer(bytearray(content(parts.pop("shape"))), dtype=kind).tolist()
    words = parts["weight"].shape[-1] if parts["weight"].shape else 0
    fitting = {group.get("num_bits") for group in groups if group.get("num_bits") in (2, 4, 8)}
    fitting = {bits for bits in fitting if -(-inputs * bits // 32) == words}
    if len(fitting) != 1:
        raise UserError(
            f"model: config.json does not say in how many bits {name} is packed (2, 4 or 8 can be read); give the "
            "model as it was before it was quantized."
        )
    bits = fitting.pop()
    _fits(name, parts["weight"], [outputs, words], {"I32"})
    each = _group_size(name, parts["scales"], outputs, inputs, groups)
    half = 1 << (bits - 1)
    is_packed = "zeros" in parts and parts["zeros"].dtype == "I32"

    def decode(tensors: Parts) -> torch.Tensor:
        values = _unpack(tensors["weight"], bits)[:, :inputs] - half
        zeros = tensors.get("zeros")
        if zeros is not None and is_packed:
            zeros = _unpack(zeros.t(), bits).t()[:outputs] - half
        return _affine(values, tensors["scales"], zeros, tensors.get("order"), each)

    return Packed(name, parts, (outputs, inputs), decode)


def _plain_ints(name: str, parts: dict[str, Entry], groups: Sequence[Mapping[str, Any]]) -> Packed:
    outputs, inputs = parts["weight"].shape
    block = next((group["block_structure"] for group in groups if group.get("block_structure")), None)
    if block is not None:
        return _scaled(name, parts, block)
    if math.prod(parts["scales"].shape) == 1 and "zeros" not in parts:
        return _scaled(name, parts, None)
    each = _group_size(name, parts["scales"], outputs, inputs, groups)

    def decode(tensors: Parts) -> torch.Tensor:
        values = tensors["weight"].float()
        return _affine(values, tensors["scales"], tensors.get("zeros"), tensors.get("order"), each)

    return Packed(name, parts, (outputs, inputs), decode)


def _group_size(name: str, scales: Entry, outputs: int, inputs: int, groups: Sequence[Mapping[str, Any]]) -> int:
    """Neighbours among a row's inputs that share a scale."""
    if math.prod(scales.shape) == 1:
        return inputs
    if len(scales.shape) == 1:
        _fits(name, scales, [outputs])
        return inputs
    _fits(name, scales, [outputs, None])
    count = scales.shape[1]
    sizes = [group.get("group_size") for group in groups]
    for size in (*sizes, inputs // max(1, count)):
        if isinstance(size, int) and size > 0 and -(-inputs // size) == count:
            return size
    _fits(name, scales, [outputs, -1])
    return inputs


def _affine(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, order: torch.Tensor | None, each: int
) -> torch.Tensor:
    """(values - zeros) * scales, whose columns belong to groups of inputs."""
    inputs = values.shape[1]
    group_k = torch.arange(inputs) // each
    if order is not None and int(order.min()) >= 0:
        group_k = order.long()

    def spread(one: torch.Tensor) -> torch.Tensor:
        one = one.float().reshape(-1, 1) if one.ndim < 2 else one.float()
        return one[:, group_k] if one.shape[1] > 1 else one

    values = values.float()
    return (values if zeros is None else values - spread(zeros)) * spread(scales)
