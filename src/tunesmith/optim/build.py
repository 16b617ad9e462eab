"""Parameter groups and the optimizer a run names, with its state as named tensors.

Where weights are held in half precision, `Optimizer` keeps fp32 masters of the trained ones and gathers their
gradients in fp32 as soon as backward has made them, so that neither accumulation nor small updates are rounded away.
Without masters, weights in bf16 are rounded at random, which keeps small updates on average.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import nn

from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.optim.fused import Fused
from tunesmith.plan.plan import OptimizerStates, Plan

BETAS = (0.9, 0.999)
LION_BETAS = (0.9, 0.99)
EPSILON = 1e-8
MOMENTUM = 0.9
FUSED = ("adamw", "lion")
"""What `optim.fused` can do: states in fewer bits, and bf16 weights without masters."""


def build(model: nn.Module, run: Run, plan: Plan) -> Optimizer:
    """The optimizer of a model that is ready to train."""
    ends = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    return Optimizer(
        model.named_parameters(),
        run,
        master_weights=plan.master_weights,
        states=plan.optimizer_states,
        accumulates=plan.accumulation > 1,
        ends={weight for end in ends if end is not None for weight in end.parameters()},
    )


class Optimizer:
    """One optimizer over a model's trained parameters, by name; fp32 inside, whatever the model's precision."""

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        run: Run,
        *,
        master_weights: bool,
        states: OptimizerStates | None = None,
        accumulates: bool = False,
        ends: Collection[nn.Parameter] = (),
    ):
        """`states`: in the precision of what is updated when left out. `accumulates`: a step has several micro-batches,
        whose gradients are summed. `ends`: embedding and head, which Muon leaves to AdamW."""
        self.weights = {name: parameter for name, parameter in named if parameter.requires_grad}
        if not self.weights:
            raise UserError("Nothing is left to train: every parameter of the model is frozen.")
        self.has_masters = master_weights
        self.masters = {
            name: nn.Parameter(weight.detach().float().clone()) if master_weights else weight
            for name, weight in self.weights.items()
        }
        for name, weight in self.weights.items():
            if master_weights:
                weight.register_post_accumulate_grad_hook(_gather_into(self.masters[name]))
            elif weight.dtype == torch.bfloat16 and accumulates:
                weight.grad_dtype = torch.float32
        self.parts = self._build(run, states or ("bf16" if self._is_half else "fp32"), ends)
        self.owner = {weight: part for part in self.parts for group in part.param_groups for weight in group["params"]}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What carries the gradients that are clipped and applied."""
        return list(self.masters.values())

    def step(self, learning_rate: float) -> None:
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = learning_rate
            part.step()
            if self.has_masters and not isinstance(part, Fused):
                self._copy_masters(part)

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def states(self) -> Iterable[Mapping[str, torch.Tensor]]:
        """The state of each parameter that has been updated."""
        return [state for part in self.parts for state in part.state.values()]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Trained weights (fp32 where there are masters) and optimizer state: all that must be saved."""
        found = {f"weights/{name}": weight.detach() for name, weight in self.masters.items()}
        for name, weight in self.masters.items():
            for key, value in self.owner[weight].state.get(weight, {}).items():
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
        states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in self.masters}
        for full_name, value in tensors.items():
            kind, _, rest = full_name.partition("/")
            if kind == "optimizer":
                key, _, name = rest.partition("/")
                states[name][key] = value
        # Else another optimizer was chosen since, which starts afresh.
        if all(self._fits(self.masters[name], values) for name, values in states.items()):
            for name, values in states.items():
                weight = self.masters[name]
                part = self.owner[weight]
                for key, value in values.items():
                    on_host = key == "step" and not part.defaults.get("fused")
                    part.state[weight][key] = value.clone() if on_host else value.to(weight.device, copy=True)
        if self.has_masters:
            for part in self.parts:
                self._copy_masters(part)

    @property
    def _is_half(self) -> bool:
        return any(weight.dtype != torch.float32 for weight in self.masters.values())

    def _fits(self, weight: nn.Parameter, values: Mapping[str, torch.Tensor]) -> bool:
        part = self.owner[weight]
        if not values:
            return True
        return part.fits(weight, values) if isinstance(part, Fused) else values.keys() <= _STATE[type(part)]

    @torch.no_grad()
    def _copy_masters(self, part: torch.optim.Optimizer) -> None:
        names = [name for name, master in self.masters.items() if self.owner[master] is part]
        torch._foreach_copy_([self.weights[name] for name in names], [self.masters[name] for name in names])

    def _build(self, run: Run, states: OptimizerStates, ends: Collection[nn.Parameter]) -> list[torch.optim.Optimizer]:
        # The rate is set before each step; what is given here is never used.
        trained = list(self.masters.values())
        if any(weight.dtype == torch.float16 for weight in trained) or (self._is_half and run.algorithm not in FUSED):
            raise UserError(
                f"optimizer: {run.optimizer} loses small updates of weights in half precision; let the plan keep "
                "master_weights, or use bf16 with adamw or lion."
            )
        if run.algorithm == "lion" or (run.algorithm == "adamw" and (self._is_half or states != "fp32")):
            return [
                Fused(
                    _groups(trained, run),
                    algorithm=run.algorithm,
                    states=states,
                    betas=BETAS if run.algorithm == "adamw" else LION_BETAS,
                    epsilon=EPSILON,
                    seed=run.seed,
                    copies={self.masters[name]: weight for name, weight in self.weights.items()}
                    if self.has_masters
                    else {},
                )
            ]
        if run.algorithm == "adamw":
            return [_adamw(_groups(trained, run))]
        if run.algorithm == "muon":
            outer = {name for name, weight in self.weights.items() if weight in ends or weight.ndim != 2}
            inner = [master for name, master in self.masters.items() if name not in outer]
            rest = [master for name, master in self.masters.items() if name in outer]
            muon = torch.optim.Muon  # its steps are scaled to the size of AdamW's, so that one rate suits both
            made = [muon(_groups(inner, run), lr=0.0, adjust_lr_fn="match_rms_adamw")] if inner else []
            return [*made, *([_adamw(_groups(rest, run))] if rest else [])]
        if run.algorithm == "adafactor":
            return [torch.optim.Adafactor(_groups(trained, run), lr=0.0)]
        return [torch.optim.SGD(_groups(trained, run), lr=0.0, momentum=MOMENTUM)]


def _groups(weights: list[nn.Parameter], run: Run) -> list[dict]:
    matrices = [weight for weight in weights if weight.ndim >= 2]
    vectors = [weight for weight in weights if weight.ndim < 2]
    return [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in ((matrices, run.weight_decay), (vectors, 0.0))
        if parameters
    ]


def _adamw(groups: list[dict]) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=EPSILON, fused=True)


_STATE = {
    torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"},
    torch.optim.Adafactor: {"step", "row_var", "col_var", "variance"},
    torch.optim.Muon: {"momentum_buffer"},
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
