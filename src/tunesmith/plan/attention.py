"""Which kernel does the attention of a kind of layer: facts about the kernels, and the order they are preferred in.

The plan names the path of each kind of layer by these rules, and `model.attention` obeys the same. What flash-attn-4
has is that of 4.0.0b36, forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tunesmith.plan.plan import Attention

Path = Literal["flash-attn-4", "varlen", "flex-attention", "memory-efficient", "by document"]
Capability = tuple[int, int]
FLASH_ATTENTION: Capability = (8, 0)
"""From here on torch's variable-length kernel is there, and FlexAttention's are tried."""


@dataclass(frozen=True, slots=True)
class Heads:
    """What a layer's attention asks of a kernel."""

    head_dim: int
    value_dim: int
    is_soft_capped: bool = False
    has_sinks: bool = False
    has_alibi: bool = False
    has_dropout: bool = False
    itemsize: int = 2
    """Bytes of a value: 2 in half precision, 4 in fp32."""
    is_cut: bool = False
    """There are more keys than queries, and a window over them."""

    @property
    def is_usual(self) -> bool:
        return not (self.is_soft_capped or self.has_sinks or self.has_alibi or self.has_dropout)

    @property
    def words(self) -> str:
        """What of it is not usual."""
        said = {
            "soft-capped scores": self.is_soft_capped,
            "sinks": self.has_sinks,
            "ALiBi": self.has_alibi,
            "dropout": self.has_dropout,
            f"head size {self.head_dim}": self.head_dim > 128 or self.head_dim % 8 > 0,
            f"values of size {self.value_dim}": self.value_dim != self.head_dim,
            "fp32": self.itemsize == 4,
        }
        return ", ".join(words for words, applies in said.items() if applies)


def path_of(kernel: Attention, capability: Capability, heads: Heads) -> Path:
    """The path of a layer on a GPU of this compute capability, where a plan names `kernel`: that one where it has what
    the layer asks for, else the best that is simpler."""
    if kernel == "flash-attn-4" and has_flash4(capability, heads):
        return "flash-attn-4"
    if kernel == "flex-attention" and has_flex(capability, heads):
        return "flex-attention"
    if kernel != "sdpa" and has_varlen(capability, heads):
        return "varlen"
    if kernel != "sdpa" and heads.itemsize == 2 and has_flex(capability, heads):
        return "flex-attention"
    return "memory-efficient" if has_efficient(heads) else "by document"


def has_flash4(capability: Capability, heads: Heads) -> bool:
    sizes = heads.head_dim, heads.value_dim
    if heads.itemsize != 2 or heads.has_dropout or heads.has_alibi or any(size % 8 or size < 8 for size in sizes):
        return False
    is_plain = not (heads.is_soft_capped or heads.has_sinks)
    match capability[0]:
        case 9:
            return max(sizes) <= 256
        case 10 | 11:
            return max(sizes) <= 128 or sizes == (192, 128) or (sizes == (256, 256) and is_plain)
        case 12:
            return sizes in ((64, 64), (96, 96), (128, 128)) and is_plain
    return False  # 8.x has no backward pass


def has_varlen(capability: Capability, heads: Heads) -> bool:
    return (
        capability >= FLASH_ATTENTION
        and heads.itemsize == 2
        and heads.is_usual
        and heads.head_dim == heads.value_dim <= 256
        and heads.head_dim % 8 == 0
    )


def has_flex(capability: Capability, heads: Heads) -> bool:
    sizes = heads.head_dim, heads.value_dim
    return capability >= FLASH_ATTENTION and not heads.has_dropout and min(sizes) >= 16 and max(sizes) <= 256


def has_efficient(heads: Heads) -> bool:
    """Of a window over more keys than queries torch's kernel makes wrong gradients (2.11, on an H200)."""
    multiple = 16 // heads.itemsize
    return heads.is_usual and not heads.is_cut and heads.head_dim % multiple == heads.value_dim % multiple == 0


def what_is_missing(capability: Capability, heads: Heads, has_flash_attention_4: bool) -> str:
    """What a layer that goes document by document would need for a kernel."""
    if heads.has_dropout:
        return "attention dropout of 0"
    if has_flash4(capability, heads) and not has_flash_attention_4:
        return "flash-attn-4 (pip install --pre flash-attn-4)"
    if max(heads.head_dim, heads.value_dim) > 256:
        return "a kernel for heads of more than 256 values, which none has yet"
    if capability < FLASH_ATTENTION:
        return "a GPU of compute capability 8.0 or more (FlexAttention)"
    return "half precision"
