"""bf16 on CPUs that have no arithmetic for it, where a matmul takes 200 times as long as in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ATEN = torch.ops.aten
MATMULS = {ATEN.mm.default, ATEN.addmm.default, ATEN.bmm.default, ATEN.baddbmm.default, ATEN._grouped_mm.default}
ATTENTION = ATEN._scaled_dot_product_flash_attention_for_cpu.default


class HalfMatmulsInFp32(TorchDispatchMode):
    """Matmuls and attention of bf16 tensors are computed in fp32 and rounded, below autograd, which keeps what it would
    keep: for tests of sizes, and of values within what bf16 allows."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        is_matmul = function in MATMULS or function is ATTENTION or function.namespace == "tunesmith"
        if not is_matmul or not any(_is_half(one) for one in arguments):
            return function(*arguments, **options)
        found = function(*(one.float() if _is_half(one) else one for one in arguments), **options)
        return found.bfloat16() if torch.is_tensor(found) else (found[0].bfloat16(), *found[1:])


def _is_half(value: Any) -> bool:
    return torch.is_tensor(value) and value.dtype == torch.bfloat16
