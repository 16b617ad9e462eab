"""Whether the weights that are read are numbers: NaN and infinite values are found before the first step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from tunesmith.errors import UserError
from tunesmith.model.headers import shortened

LARGEST_FP16 = 65504


class Finite:
    """Looks at tensors as they come and says at the end which were not finite. The smallest and the largest value are
    enough to see it, or a sum, at the speed of memory; on a GPU it is waited for once, at the end."""

    def __init__(self, dtype: torch.dtype):
        """What is looked at will be computed with in `dtype`."""
        self._dtype = dtype
        self._sums: dict[str, torch.Tensor] = {}
        self._doubtful: dict[str, torch.Tensor] = {}

    def look(self, name: str, values: torch.Tensor) -> bool:
        """False where it is known at once that one is not."""
        if not values.is_floating_point() or not values.numel():
            return True
        if values.element_size() < 2:
            values = values.float()
        if self._dtype == torch.float16 and values.dtype != torch.float16:
            values = values.to(torch.float16)
        if values.device.type == "cpu":  # where a sum in fp32 would first make a copy of all that is in bf16
            if not torch.isfinite(torch.stack(torch.aminmax(values))).all():
                self._doubtful[name] = values
        else:
            self._sums[name] = values.sum(dtype=torch.float32)
        return name not in self._doubtful

    def say(self, files: Mapping[str, str]) -> None:
        """UserError where something was not finite; `files` says where each tensor lies."""
        if self._sums:
            sums = torch.stack(list(self._sums.values())).isfinite().tolist()
            bad = {name: None for name, is_finite in zip(self._sums, sums, strict=True) if not is_finite}
        else:
            bad = dict(self._doubtful)
        if bad:
            raise UserError(_words(bad, files, self._dtype))


@torch.no_grad()
def check_finite(model: nn.Module, dtype: torch.dtype) -> None:
    """UserError where a weight of the model is not finite."""
    finite = Finite(dtype)
    for name, weight in model.named_parameters():
        finite.look(name, weight)
    finite.say({})


def _words(bad: Mapping[str, torch.Tensor | None], files: Mapping[str, str], dtype: torch.dtype) -> str:
    first = next(iter(bad))
    where = f" in {files[first]}" if first in files else ""
    values = bad[first]
    kind, count = "NaN or infinite values", ""
    if values is not None:
        nans = int(values.isnan().sum())
        kind = "NaN" if nans else "infinite values"
        count = f" ({nans or int(values.isinf().sum()):,} of {values.numel():,} values)"
    others = f" {shortened(bad)}" if len(bad) > 1 else f" {first}"
    advice = "the model is damaged, whatever the data: download it again, or ask who made it"
    if dtype == torch.float16 and kind != "NaN":
        advice = f"fp16 ends at {LARGEST_FP16:,}: use precision: bf16 or fp32, unless the model is damaged"
    return f"model: its weights hold {kind} in{others}{where}{count}; {advice}."
