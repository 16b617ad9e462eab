"""Parameter groups and the optimizer a run names, with its state as named tensors.

Where weights are held in half precision, `Optimizer` keeps fp32 masters of the trained ones and gathers their gradients
in fp32 as soon as backward has made them, so that neither accumulation nor small updates are rounded away. Weights in
bf16, with masters or without, are rounded stochastically, which keeps small updates on average; so are those that FSDP
makes of fp32 shards, which are held `prerounded` for that (`kernels.update`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.kernels.update import copy_half_, preround_, undo_preround_
from tunesmith.kernels.update_states import Algorithm
from tunesmith.optim.fused import Fused, home_bytes, local, spread, start_of
from tunesmith.optim.lowrank import Apollo, GaLore, LowRank
from tunesmith.optim.muon import GroupedMuon, SpreadMuon
from tunesmith.optim.offload import pin
from tunesmith.optim.scratch import Scratch
from tunesmith.plan.plan import OffloadTo, OptimizerStates, Plan

BETAS = (0.9, 0.999)
LION_BETAS = (0.9, 0.99)
EPSILON = 1e-8
MOMENTUM = 0.9
LARGE = 1 << 20
"""Values of the usual weight from which AdamW on a GPU takes a kernel for each and clips on the way: a pass over all
gradients costs more than so many launches. Torch's own does many small ones in one launch."""


def build(model: nn.Module, run: Run, plan: Plan) -> Optimizer:
    """The optimizer of a model that is ready to train."""
    is_gathered = plan.sharding != "none" and plan.mesh.tensor * plan.mesh.expert == 1 and not run.has_adapters
    ends = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    return Optimizer(
        model.named_parameters(),
        run,
        master_weights=plan.master_weights and plan.sharding == "none",  # shards are in fp32 already
        prerounded=is_gathered and plan.precision == "bf16" and plan.master_weights,
        states=plan.optimizer_states,
        offload=plan.offload_optimizer,
        in_backward=plan.optimizer_in_backward,
        accumulates=plan.accumulation_steps > 1 or plan.by_length,
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
        prerounded: bool = False,
        states: OptimizerStates | None = None,
        offload: OffloadTo = "none",
        in_backward: bool = False,
        accumulates: bool = False,
        ends: Collection[nn.Parameter] = (),
    ):
        """`prerounded`: the weights are fp32 shards that are rounded to bf16 wherever they are used, and are to be held
        so that this is stochastic, where the optimizer can. `states`: in the precision of what is updated when left
        out. `offload`: they and the masters live in host memory, or in a file in the run's folder. `in_backward`: each
        weight is updated and its gradient freed within the backward pass. `accumulates`: a step has several
        micro-batches, whose gradients are summed. `ends`: embedding and head, which Muon leaves to AdamW."""
        self.weights = {name: parameter for name, parameter in named if parameter.requires_grad}
        if not self.weights:
            raise UserError("Nothing is left to train: every parameter of the model is frozen.")
        self.has_masters = master_weights
        self.is_in_backward = in_backward
        self.step_hooks: list[Callable[[], None]] = []
        """Called before each update."""
        self._norms: dict[str, torch.Tensor] = {}
        dtypes = {weight.dtype for weight in self.weights.values()}
        is_half = dtypes != {torch.float32}
        states = states or ("bf16" if is_half and not master_weights else "fp32")
        is_asked = (
            offload != "none" or in_backward or prerounded or states != "fp32" or _is_large(self.weights.values())
        )
        is_fused = run.algorithm == "lion" or (run.algorithm == "adamw" and (is_asked or is_half))
        if is_half and not master_weights and (not is_fused or torch.float16 in dtypes):
            raise UserError(
                f"optimizer: {run.optimizer} loses small updates of weights in half precision; let the plan keep "
                "master_weights, or use bf16 with adamw or lion."
            )
        if (offload != "none" or in_backward) and not is_fused:
            raise UserError(
                f"optimizer: {run.optimizer} cannot update weights one by one, as the plan's "
                f"{'optimizer_in_backward' if offload == 'none' else 'offload_optimizer'} wants; choose adamw or lion."
            )
        assert not (in_backward and accumulates)
        self.is_prerounded = prerounded and is_fused
        scratch = self._scratch(run, states) if offload == "disk" else None
        self.masters = {
            name: _master_of(weight, offload, scratch) if master_weights else weight
            for name, weight in self.weights.items()
        }
        self.encode()
        is_plus = run.has_lora and run.lora.b_rate != 1
        factors = [name for name in self.masters if name.endswith(("lora_b", "lora_embedding_b"))] if is_plus else []
        self.faster = {self.masters[name] for name in factors}
        """LoRA+: weights with a rate of their own."""
        self.parameters = list((self.weights if is_fused else self.masters).values())
        """What carries the gradients that are clipped and applied."""
        self.parts = [self._fused(run, states, offload, scratch)] if is_fused else self._build(run, ends)
        self.owner = {weight: part for part in self.parts for group in part.param_groups for weight in group["params"]}
        for name, weight in self.weights.items():
            if master_weights and not is_fused:
                weight.register_post_accumulate_grad_hook(_gather_into(self.masters[name]))
            else:
                _gather_in_fp32(weight, accumulates=accumulates)
            if in_backward:
                weight.register_post_accumulate_grad_hook(self._update_at_once(name))

    def overlap_update(self, body: nn.Module, layers: Sequence[nn.Module]) -> None:
        """Where states come from host memory, begin the model's next forward pass while weights are still updated: a
        layer waits for its own, and the model for those outside the layers, which come first."""
        (part, *_) = self.parts
        if self.is_in_backward or not isinstance(part, Fused) or not part.is_offloaded or part.scratch is not None:
            return
        weights = [set(layer.parameters()) for layer in layers]
        outside = set(self.weights.values()).difference(*weights)
        for module, own in zip((body, *layers), (outside, *weights), strict=True):
            module.register_forward_pre_hook(lambda *_, own=own: part.finish_update(own))
        place = {weight: number for number, own in enumerate((outside, *weights)) for weight in own}
        named = zip(self.masters.values(), self.weights.values(), strict=True)
        places = {master: place[weight] for master, weight in named}
        part.order.sort(key=lambda master: places[master])
        part.is_overlapped = True

    def finish_update(self) -> None:
        """Before weights are used otherwise than by a forward pass: wait, on the device, for their updates."""
        for part in self.parts:
            if isinstance(part, Fused):
                part.finish_update()

    def held_over(self) -> int:
        """Bytes of gradients whose updates may still be under way in the next forward pass."""
        fused = [part for part in self.parts if isinstance(part, Fused)]
        return sum(update.gradient.nbytes for part in fused for update in part.updating.values())

    def begin(self, learning_rate: float, step: int = 0) -> None:
        """Before the backward pass of a step (counted from 0): its rate."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = learning_rate * group["times"]
        self._norms.clear()

    def carrier(self, name: str) -> nn.Parameter:
        """What carries the gradient of the weight of this name, where it is clipped and applied."""
        return dict(zip(self.weights, self.parameters, strict=True))[name]

    def gradient(self, name: str) -> torch.Tensor | None:
        return self.carrier(name).grad

    def gradient_norm(self, names: Collection[str] | None = None) -> torch.Tensor:
        """Of all gradients of this step together (or of these), those that are gone already included; in fp32."""
        if self.is_in_backward:
            norms = [self._norms[name] for name in self.weights if name in self._norms]
        else:
            named = zip(self.weights, self.parameters, strict=True)
            alike = by_mesh(one for name, one in named if one.grad is not None and (names is None or name in names))
            if len(alike) > 1:
                norms = [one.full_tensor() if isinstance(one, DTensor) else one for one in map(_norm, alike)]
                return torch.linalg.vector_norm(torch.stack(norms))
            return _norm(alike[0]) if alike else torch.zeros(())
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())

    def clip(self, norm: torch.Tensor, largest: float) -> None:
        """Scale gradients of this `norm` down to the `largest` allowed: at once, or on their way into the update."""
        if all(isinstance(part, Fused) for part in self.parts):
            for part in self.parts:
                part.factor = (largest / (norm.float() + 1e-6)).clamp(max=1.0)
        else:
            for some in by_mesh(self.parameters):
                torch.nn.utils.clip_grads_with_norm_(some, largest, norm)

    def step(self, learning_rate: float) -> None:
        """Update every weight that has a gradient."""
        for hook in self.step_hooks:
            hook()
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = learning_rate * group["times"]
            part.step()
            if self.has_masters and not isinstance(part, Fused):
                self._copy_masters(part)

    def reset(self) -> None:
        """Begin with new states."""
        for part in self.parts:
            part.state.clear()

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def states(self) -> Iterable[Mapping[str, torch.Tensor]]:
        """The state of each parameter that has been updated."""
        return [state for part in self.parts for state in part.state.values()]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Trained weights as they are held (masters, where there are) and optimizer state: all that must be saved."""
        for part in self.parts:
            if isinstance(part, Fused):
                part.wait()
        found = {f"weights/{name}": weight.detach() for name, weight in self.masters.items()}
        for name, weight in self.masters.items():
            for key, value in self.owner[weight].state.get(weight, {}).items():
                if isinstance(value, torch.Tensor):
                    found[f"optimizer/{key}/{name}"] = value
        return found

    def encode(self) -> None:
        """Hold weights so that FSDP's cast rounds them stochastically, where it is one (`kernels.update`)."""
        for weight in self.weights.values() if self.is_prerounded else ():
            preround_(local(weight.detach()), start=start_of(weight))

    def decode(self) -> None:
        """Hold them as they are, for whoever reads them."""
        self.finish_update()
        for weight in self.weights.values() if self.is_prerounded else ():
            undo_preround_(local(weight.detach()), start=start_of(weight))

    def room(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """What a saved tensor is to be read into: its own place, where there is one that the host can write, so that it
        is never in memory twice, or at all; else new memory."""
        kind, _, rest = name.partition("/")
        key, _, of_state = rest.partition("/")
        own = self.masters.get(rest)
        if kind == "optimizer" and (weight := self.masters.get(of_state)) is not None:
            own = self.owner[weight].state.get(weight, {}).get(_SAME.get(key, key))
        own = None if own is None else local(own.detach())
        if own is None or own.device.type != "cpu" or not own.is_contiguous():
            return torch.empty(shape, dtype=dtype)
        return own if (own.shape, own.dtype) == (shape, dtype) else torch.empty(shape, dtype=dtype)

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The inverse of `tensors`, bit for bit. What is given may be changed on the way."""
        self.finish_update()
        saved = {weight_of(name): value for name, value in tensors.items() if not name.startswith("optimizer/")}
        was_encoded = any(name.startswith("lifted/") for name in tensors)  # by version 0.1
        if different := sorted(self.masters.keys() ^ saved.keys()):
            raise UserError(
                f"The checkpoint was made for other trained weights: '{different[0]}' is in one of the two only."
            )
        for name, weight in self.masters.items():
            if (there := saved[name].shape) != weight.shape:
                raise UserError(
                    f"The checkpoint's '{name}' has the shape {tuple(there)}, and that of these settings is "
                    f"{tuple(weight.shape)}; put lora.rank or the model back, or choose another output."
                )
            if was_encoded:
                undo_preround_(local(saved[name]), start=start_of(saved[name]))
            if local(weight).data_ptr() != local(saved[name]).data_ptr():
                weight.copy_(_placed(saved[name], weight))
        self.encode()
        states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in self.masters}
        for full_name, value in tensors.items():
            kind, _, rest = full_name.partition("/")
            if kind == "optimizer":
                key, _, name = rest.partition("/")
                states[name][key] = value
        self._restore_states(states)
        if self.has_masters:
            for part in self.parts:
                self._copy_masters(part)

    def _restore_states(self, states: Mapping[str, dict[str, torch.Tensor]]) -> None:
        """By the weights' names; those of another optimizer, which was chosen since, start afresh."""
        for name, values in states.items():
            _translate(values, is_fused=isinstance(self.owner[self.masters[name]], Fused))
        if not all(self._fits(self.masters[name], values) for name, values in states.items()):
            for state in self.states():
                for value in state.values():
                    value.zero_()
            return
        for name, values in states.items():
            weight = self.masters[name]
            part = self.owner[weight]
            if isinstance(part, Fused):
                if values:
                    part.set_state(weight, values)
                continue
            for key, value in values.items():
                on_host = key == "step" and not part.defaults.get("fused")
                part.state[weight][key] = value.clone() if on_host else _placed(value, weight).clone()

    def _fits(self, weight: nn.Parameter, values: Mapping[str, torch.Tensor]) -> bool:
        part = self.owner[weight]
        if not values:
            return True
        if isinstance(part, Fused):
            return part.fits(weight, values)
        is_like = not isinstance(part, LowRank) or part.fits(weight, values)
        return is_like and values.keys() <= _STATE[type(part)]

    @torch.no_grad()
    def _copy_masters(self, part: torch.optim.Optimizer) -> None:
        for name, master in self.masters.items():
            if self.owner[master] is part:
                copy_half_(self.weights[name].detach(), master.detach())

    def _update_at_once(self, name: str) -> Callable[[torch.Tensor], None]:
        weight, master = self.weights[name], self.masters[name]
        part = self.owner[master]
        assert isinstance(part, Fused)

        def hook(_: torch.Tensor) -> None:
            self._norms[name] = torch.linalg.vector_norm(weight.grad, dtype=torch.float32)
            part.update(master)
            weight.grad = None

        return hook

    def _scratch(self, run: Run, states: OptimizerStates) -> Scratch:
        """The file for what this rank has of states and masters."""
        sizes = [
            home_bytes(weight, _algorithm(run), states, has_master=self.has_masters) for weight in self.weights.values()
        ]
        return Scratch(Path(run.output), sum(sizes))

    def _fused(self, run: Run, states: OptimizerStates, offload: OffloadTo, scratch: Scratch | None) -> Fused:
        return Fused(
            self._groups(self.masters.values(), run),
            algorithm=_algorithm(run),
            states=states,
            betas=LION_BETAS if run.algorithm == "lion" else BETAS,
            epsilon=EPSILON,
            seed=run.seed,
            models={self.masters[name]: weight for name, weight in self.weights.items()} if self.has_masters else {},
            offload=offload != "none",
            prerounded=self.is_prerounded,
            scratch=scratch,
        )

    def _build(self, run: Run, ends: Collection[nn.Parameter]) -> list[torch.optim.Optimizer]:
        # The rate is set before each step; what is given here is never used.
        trained = list(self.masters.values())
        if run.algorithm == "adamw":
            return [_adamw(self._groups(trained, run))]
        if run.algorithm in ("galore", "apollo"):
            matrices = [
                self.masters[name] for name, weight in self.weights.items() if weight.ndim == 2 and weight not in ends
            ]
            rest = [master for master in trained if not any(master is one for one in matrices)]
            kind = GaLore if run.algorithm == "galore" else Apollo
            made = kind(self._groups(matrices, run), betas=BETAS, epsilon=EPSILON, seed=run.seed) if matrices else None
            parts = [made, _adamw(self._groups(rest, run)) if rest else None]
            return [part for part in parts if part is not None]
        if run.algorithm == "muon":
            outer = {name for name, weight in self.weights.items() if weight in ends or weight.ndim != 2}
            inner = [master for name, master in self.masters.items() if name not in outer]
            rest = [master for name, master in self.masters.items() if name in outer]
            muon = SpreadMuon if any(isinstance(master, DTensor) for master in inner) else GroupedMuon
            # Its steps are scaled to the size of AdamW's, so that one rate suits both.
            made = [muon(self._groups(inner, run), lr=0.0, adjust_lr_fn="match_rms_adamw")] if inner else []
            return [*made, *([_adamw(self._groups(rest, run))] if rest else [])]
        if run.algorithm == "adafactor":
            # One after the other: all at once would need as much as the fp32 gradients once more.
            return [torch.optim.Adafactor(self._groups(trained, run), lr=0.0, foreach=False)]
        return [torch.optim.SGD(self._groups(trained, run), lr=0.0, momentum=MOMENTUM)]

    def _groups(self, weights: Iterable[nn.Parameter], run: Run) -> list[dict]:
        """Weights with the same decay, the same rate (`times` that of the step) and on the same ranks."""
        found: dict[tuple[bool, float], list[nn.Parameter]] = {}
        for weight in weights:
            times = run.lora.b_rate if weight in self.faster else 1.0
            found.setdefault((weight.ndim < 2, times), []).append(weight)
        return [
            {"params": some, "weight_decay": 0.0 if is_vector else run.weight_decay, "times": times}
            for is_vector, times in sorted(found)
            for some in by_mesh(found[is_vector, times])
        ]


def weight_of(name: str) -> str:
    """The weight that a tensor of a checkpoint belongs to: `weights/NAME` or `optimizer/KEY/NAME`."""
    return name.split("/", 2 if name.startswith("optimizer/") else 1)[-1]


def by_mesh(weights: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Weights that lie over the same ranks, which alone may be computed with together."""
    found: dict[object, list[nn.Parameter]] = {}
    for weight in weights:
        found.setdefault(weight.device_mesh if isinstance(weight, DTensor) else None, []).append(weight)
    return list(found.values())


def _norm(weights: list[nn.Parameter]) -> torch.Tensor:
    """Of all their gradients."""
    norms = torch._foreach_norm([weight.grad for weight in weights], 2, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms))


def _is_large(weights: Collection[torch.Tensor]) -> bool:
    """Whether they lie on a GPU and are large, each counted whole, so that all ranks find the same."""
    on_gpu = any(weight.is_cuda for weight in weights)
    return on_gpu and sum(weight.numel() for weight in weights) >= LARGE * len(weights)


def _algorithm(run: Run) -> Algorithm:
    return "lion" if run.algorithm == "lion" else "adamw"


def _master_of(weight: nn.Parameter, offload: OffloadTo, scratch: Scratch | None) -> nn.Parameter:
    if scratch is not None:
        return nn.Parameter(scratch.zeros(weight.shape, torch.float32).copy_(weight.detach()))
    if offload == "host":
        return nn.Parameter(pin(weight.detach().float().cpu().clone()))
    return nn.Parameter(weight.detach().float().clone())


def _adamw(groups: list[dict]) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=EPSILON, fused=True)


_STATE = {
    torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"},
    torch.optim.Adafactor: {"step", "row_var", "col_var", "variance"},
    GaLore: {"step", "exp_avg", "exp_avg_sq", "projection"},
    Apollo: {"step", "exp_avg", "exp_avg_sq", "norm"},
    GroupedMuon: {"momentum_buffer"},
    SpreadMuon: {"momentum_buffer"},
    torch.optim.SGD: {"momentum_buffer"},
}


_SAME = {"exp_avg_sq": "root"}


def _translate(values: dict[str, torch.Tensor], *, is_fused: bool) -> None:
    """AdamW's second moment in fp32, which torch's own optimizer has as it is and `Fused` as its root: a run that
    goes on with the other one keeps it."""
    for square, root in _SAME.items():
        if is_fused and square in values:
            local(values[square]).sqrt_()
            values[root] = values.pop(square)
        elif not is_fused and root in values and values[root].dtype == torch.float32:
            local(values[root]).square_()
            values[square] = values.pop(root)


def _gather_in_fp32(weight: nn.Parameter, *, accumulates: bool) -> None:
    """Gradients of a weight in half precision, where several are added or small ones vanish."""
    if weight.dtype == torch.float16:
        weight.grad_dtype = torch.float32
    elif weight.dtype == torch.bfloat16 and accumulates and weight.grad_dtype is not None:  # not prepared yet
        weight.grad_dtype = None  # those of later micro-batches are added as they are, by one kernel each
        weight.register_post_accumulate_grad_hook(_in_fp32)


def _in_fp32(weight: torch.Tensor) -> None:
    if weight.grad.dtype != torch.float32:
        weight.grad = weight.grad.float()


def _gather_into(master: nn.Parameter):
    def hook(weight: torch.Tensor) -> None:
        if master.grad is None:
            master.grad = weight.grad.float()
        else:
            master.grad += weight.grad
        weight.grad = None

    return hook


def _placed(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A saved tensor on the weight's device, and spread over the ranks as the weight is."""
    if isinstance(value, DTensor):
        return spread(local(value).to(weight.device), weight, value.shape)
    if not isinstance(weight, DTensor) or value.ndim == 0:
        return value.to(weight.device)
    assert value.shape == weight.shape
    return distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None)
