"""Parameter groups and the optimizer a run names, with its state as named tensors.

Where weights are held in half precision, `Optimizer` keeps fp32 masters of the trained ones and gathers their
gradients in fp32 as soon as backward has made them, so that neither accumulation nor small updates are rounded away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from tunesmith.config.schema import Run
from tunesmith.errors import UserError

BETAS = (0.9, 0.999)
EPSILON = 1e-8
MOMENTUM = 0.9


class Optimizer:
    """One optimizer over a model's trained parameters, by name; fp32 inside, whatever the model's precision."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], run: Run, *, master_weights: bool):
        self.weights = {name: parameter for name, parameter in named if parameter.requires_grad}
        if not self.weights:
            raise UserError("Nothing is left to train: every parameter of the model is frozen.")
        self.has_masters = master_weights
        self.masters = {
            name: nn.Parameter(weight.detach().float().clone()) if master_weights else weight
            for name, weight in self.weights.items()
        }
        if master_weights:
            for name, weight in self.weights.items():
                weight.register_post_accumulate_grad_hook(_gather_into(self.masters[name]))
        matrices = [weight for weight in self.masters.values() if weight.ndim >= 2]
        vectors = [weight for weight in self.masters.values() if weight.ndim < 2]
        groups = [
            {"params": parameters, "weight_decay": decay}
            for parameters, decay in ((matrices, run.weight_decay), (vectors, 0.0))
            if parameters
        ]
        self.inner = _build(run, groups)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What carries the gradients that are clipped and applied."""
        return list(self.masters.values())

    def step(self, learning_rate: float) -> None:
        for group in self.inner.param_groups:
            group["lr"] = learning_rate
        self.inner.step()
        if self.has_masters:
            self._copy_masters()

    def zero_grad(self) -> None:
        self.inner.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Trained weights (fp32 where there are masters) and optimizer state: all that must be saved."""
        found = {f"weights/{name}": weight.detach() for name, weight in self.masters.items()}
        for name, weight in self.masters.items():
            for key, value in self.inner.state.get(weight, {}).items():
                if isinstance(value, torch.Tensor):
                    found[f"optimizer/{key}/{name}"] = value
        return found

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The inverse of `tensors`, bit for bit."""
        names = {f"weights/{name}" for name in self.masters}
        found = {name for name in tensors if name.startswith("weights/")}
        if names != found:
            different = sorted(names ^ found)[0].removeprefix("weights/")
            raise UserError(
                f"The checkpoint was made for other trained weights: '{different}' is in one of the two only."
            )
        for name, weight in self.masters.items():
            if (there := tensors[f"weights/{name}"].shape) != weight.shape:
                raise UserError(
                    f"The checkpoint's '{name}' has the shape {tuple(there)}, and that of these settings is "
                    f"{tuple(weight.shape)}; put lora.rank or the model back, or choose another output."
                )
            weight.copy_(tensors[f"weights/{name}"])
        state: dict[nn.Parameter, dict[str, torch.Tensor]] = {weight: {} for weight in self.masters.values()}
        keys = {name.split("/")[1] for name in tensors if name.startswith("optimizer/")}
        is_ours = keys <= _STATE[type(self.inner)]  # else another optimizer was chosen since, which starts afresh
        for full_name, value in tensors.items():
            kind, _, rest = full_name.partition("/")
            if kind == "optimizer" and is_ours:
                key, _, name = rest.partition("/")
                weight = self.masters[name]
                on_host = key == "step" and not _is_fused(self.inner)
                state[weight][key] = value.clone() if on_host else value.to(weight.device, copy=True)
        self.inner.state.update({weight: values for weight, values in state.items() if values})
        if self.has_masters:
            self._copy_masters()

    @torch.no_grad()
    def _copy_masters(self) -> None:
        torch._foreach_copy_(list(self.weights.values()), list(self.masters.values()))


_STATE = {
    torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"},
    torch.optim.Adafactor: {"step", "row_var", "col_var", "variance"},
    torch.optim.SGD: {"momentum_buffer"},
}


def _gather_into(master: nn.Parameter):
    def hook(weight: torch.Tensor) -> None:
        if master.grad is None:
            master.grad = weight.grad.float()
        else:
            master.grad += weight.grad
        weight.grad = None

    return hook


def _build(run: Run, groups: list[dict]) -> torch.optim.Optimizer:
    # The rate is set before each step; what is given here is never used.
    if run.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=EPSILON, fused=True)
    if run.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, lr=0.0)
    return torch.optim.SGD(groups, lr=0.0, momentum=MOMENTUM)


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer.defaults.get("fused"))
