"""GPUs by name: memory, arithmetic and links as their makers publish them, and the sizes of well-known models.

Rates are dense ones, in TFLOP/s; what a training run gets of them is the speed model's business. Memory is what the
driver reports, in MiB, which is less than the round figure on the box.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from tunesmith.errors import UserError


@dataclass(frozen=True, slots=True)
class GpuModel:
    name: str
    mib: int
    capability: tuple[int, int]
    fp32: float
    half: float
    """fp16, and bf16 where the capability has it."""
    fp8: float
    """0 where there is none."""
    bandwidth: float
    """GB/s of its memory."""
    link: float
    """GB/s to the other GPUs of its node, each way: NVLink or the like, else PCIe."""
    pcie: float
    """GB/s to host memory, each way, as really reached."""
    patterns: tuple[str, ...]
    """Whole names it goes by, as the driver or people write them, in lower case without spaces and dashes."""


GPUS: tuple[GpuModel, ...] = (
    GpuModel("T4", 15360, (7, 5), 8.1, 65, 0, 320, 12, 12, ("t4", "t416g")),
    GpuModel("V100-16G", 16384, (7, 0), 15.7, 125, 0, 900, 150, 12, ("v100(sxm2|pcie)?16g",)),
    GpuModel("V100-32G", 32768, (7, 0), 15.7, 125, 0, 900, 150, 12, ("v100(s|sxm2|sxm3|pcie)?32g",)),
    GpuModel("RTX 2080 Ti", 11264, (7, 5), 13.4, 54, 0, 616, 12, 12, ("(rtx)?2080ti",)),
    GpuModel("RTX 3060", 12288, (8, 6), 12.7, 51, 0, 360, 24, 24, ("(rtx)?3060(12g)?",)),
    GpuModel("RTX 3080", 10240, (8, 6), 29.8, 60, 0, 760, 24, 24, ("(rtx)?3080(10g)?",)),
    GpuModel("RTX 3090", 24576, (8, 6), 35.6, 71, 0, 936, 24, 24, ("(rtx)?3090(24g)?",)),
    GpuModel("RTX 4070", 12282, (8, 9), 29.1, 58, 117, 504, 24, 24, ("(rtx)?4070(12g)?",)),
    GpuModel("RTX 4080", 16376, (8, 9), 48.7, 97, 195, 717, 24, 24, ("(rtx)?4080(16g)?",)),
    GpuModel("RTX 4090", 24564, (8, 9), 82.6, 165, 330, 1008, 24, 24, ("(rtx)?4090(24g)?",)),
    GpuModel("RTX 5090", 32607, (12, 0), 104.8, 210, 419, 1792, 48, 48, ("(rtx)?5090(32g)?",)),
    GpuModel("RTX A6000", 49140, (8, 6), 38.7, 155, 0, 768, 24, 24, ("(rtx)?a6000(48g)?",)),
    GpuModel("RTX 6000 Ada", 49140, (8, 9), 91.1, 364, 728, 960, 24, 24, ("(rtx)?6000ada(generation|48g)?",)),
    GpuModel("A10", 23028, (8, 6), 31.2, 125, 0, 600, 24, 24, ("a10g?(24g)?",)),
    GpuModel("A30", 24576, (8, 0), 10.3, 165, 0, 933, 100, 24, ("a30(24g)?",)),
    GpuModel("A40", 46068, (8, 6), 37.4, 150, 0, 696, 24, 24, ("a40(48g)?",)),
    GpuModel("L4", 23034, (8, 9), 30.3, 121, 242, 300, 24, 24, ("l4(24g)?",)),
    GpuModel("L40S", 46068, (8, 9), 91.6, 362, 733, 864, 24, 24, ("l40s(48g)?",)),
    GpuModel("A100-40G", 40960, (8, 0), 19.5, 312, 0, 1555, 300, 24, ("a100(sxm4|pcie)?40g",)),
    GpuModel("A100-80G", 81920, (8, 0), 19.5, 312, 0, 2039, 300, 24, ("a100(sxm4|pcie)?80g",)),
    GpuModel("H100", 81559, (9, 0), 67, 989, 1979, 3350, 450, 50, ("h100(sxm5?)?(80g)?(hbm3)?",)),
    GpuModel("H100-PCIe", 81559, (9, 0), 51, 756, 1513, 2000, 50, 50, ("h100pcie(80g)?",)),
    GpuModel("H200", 143771, (9, 0), 67, 989, 1979, 4800, 450, 55, ("h200(sxm)?(141g)?", "gh200(480g)?(144ghbm3e)?")),
    GpuModel("B200", 183359, (10, 0), 80, 2250, 4500, 8000, 900, 55, ("g?b200(180g|192g)?",)),
    GpuModel("MI300X", 196592, (9, 4), 163, 1307, 2615, 5300, 448, 50, ("(amdinstinct)?mi300x(oam)?(192g)?",)),
)


def find_gpu(name: str) -> GpuModel | None:
    """The GPU that the driver, or a person, calls so; None for one that is not here."""
    plain = _plain(name)
    for gpu in GPUS:
        if any(re.fullmatch(pattern, plain) for pattern in gpu.patterns):
            return gpu
    return None


def gpu_called(name: str) -> GpuModel:
    """As `find_gpu`, for people: an unknown name, or one that leaves the memory open, is a sentence."""
    found = find_gpu(name)
    if found:
        return found
    sizes = [gpu.name for gpu in GPUS if _plain(gpu.name).startswith(_plain(name)) and _plain(name)]
    if sizes:
        raise UserError(f"hardware: {name.strip()} could be {' or '.join(sizes)}; say which.")
    names = [gpu.name for gpu in GPUS]
    near = difflib.get_close_matches(name.strip().upper(), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(
        f"hardware: the GPU '{name.strip()}' is not known; {hint}the known ones are {', '.join(names)}; another can "
        "be described in a YAML file."
    )


def _plain(name: str) -> str:
    plain = re.sub(r"nvidia|geforce|tesla|quadro|[\s_/-]", "", name.lower())
    return re.sub(r"(\d+)gi?b?(?=$|hbm)", r"\1g", plain)


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A decoder of the usual shape, for the question how large a model fits."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool

    def config(self) -> dict[str, object]:
        return {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied,
        }


MODELS: tuple[KnownModel, ...] = (
    KnownModel("SmolLM2-135M", 576, 1536, 30, 9, 3, 49152, True),
    KnownModel("SmolLM2-360M", 960, 2560, 32, 15, 5, 49152, True),
    KnownModel("Llama-3.2-1B", 2048, 8192, 16, 32, 8, 128256, True),
    KnownModel("Llama-3.2-3B", 3072, 8192, 28, 24, 8, 128256, True),
    KnownModel("Llama-2-7B", 4096, 11008, 32, 32, 32, 32000, False),
    KnownModel("Llama-3.1-8B", 4096, 14336, 32, 32, 8, 128256, False),
    KnownModel("Llama-2-13B", 5120, 13824, 40, 40, 40, 32000, False),
    KnownModel("Qwen2.5-14B", 5120, 13824, 48, 40, 8, 152064, False),
    KnownModel("Qwen2.5-32B", 5120, 27648, 64, 40, 8, 152064, False),
    KnownModel("Llama-3.1-70B", 8192, 28672, 80, 64, 8, 128256, False),
    KnownModel("Llama-3.1-405B", 16384, 53248, 126, 128, 8, 128256, False),
)
"""Smallest first."""
