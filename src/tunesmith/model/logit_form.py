"""The form of a model's logits: the factor and the soft cap between what its output head gives and its logits.

The loss is computed from the head's weight, without calling the model's own code for it, so this form must be known. It
is found by comparing the two on a model in fp32, a proxy most often (`logit_form`); `real_form` says what it is in the
model itself, whose config has other sizes.

Legend: N target tokens, V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tunesmith.errors import UserError
from tunesmith.model import load
from tunesmith.model.forward import logit_bias, trial_inputs
from tunesmith.model.local import local
from tunesmith.model.proxy import build_wider_proxy, configs_within
from tunesmith.model.structure import body, is_encoder_decoder
from tunesmith.plan.plan import ForwardSpec

ENLARGED = (1.0, 8.0, 64.0, 512.0, 4096.0, 32768.0)
"""Times its weight, an output head's logits are compared with the model's."""
NAMES_OF_FORM = r"logit|lm_head|mult|scal|cap"
"""What configs call factors and soft caps of the logits."""


@torch.no_grad()
def logit_form(model: nn.Module, tokens: torch.Tensor) -> tuple[float, float | None]:
    """The same of a model in fp32, by these tokens, [1, T]."""

    def logits_and_states() -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(input_ids=tokens, use_cache=False).logits[0].double()
        return logits, body(model)(input_ids=tokens, use_cache=False)[0][0]

    return form_of(model, logits_and_states)


def form_by_config(model: nn.Module) -> tuple[float, float | None]:
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0
    if getattr(config, "logits_scaling", None):
        scale = 1.0 / config.logits_scaling
    if is_encoder_decoder(model) and getattr(config, "scale_decoder_outputs", False):  # T5
        scale = config.hidden_size**-0.5
    return scale, getattr(config, "final_logit_softcapping", None)


def real_form(
    spec: ForwardSpec, model: nn.Module, config: Any, device: torch.device, trust_remote_code: bool
) -> tuple[float, float | None]:
    """Factor and soft cap of the logits in the model itself, by what of its config makes those of the proxy, or as they
    are where nothing there does: constants of its code. Where that leaves several, a wider proxy tells which it is."""
    found = {"factor": spec.logit_scale, "soft cap": spec.softcap}
    made = [(found, _numbers_of(model.config, model))]
    real = _numbers_of(config, model)
    if is_encoder_decoder(model) and abs(spec.logit_scale * model.config.hidden_size**0.5 - 1) < 1e-5:  # T5
        return config.hidden_size**-0.5, spec.softcap
    values = {name: _real_values(name, made, real) for name in found}
    if made[0][1].get("hidden_size") == real.get("hidden_size"):
        values = {name: some if len(some) == 1 else {found[name]} for name, some in values.items()}
    elif any(len(some) != 1 for some in values.values()) and not is_encoder_decoder(model):
        wider = build_wider_proxy(model, config, device, trust_remote_code)
        if wider is not None:
            tokens = trial_inputs(load.usable_tokens(wider.config), device).tokens[None, -12:]
            form = dict(zip(found, logit_form(wider, tokens), strict=True))
            made.append((form, _numbers_of(wider.config, wider)))
            values = {name: _real_values(name, made, real) for name in found}
    for name, some in values.items():
        if len(some) != 1:
            what = "multiplied by a factor" if name == "factor" else "bounded by a soft cap"
            raise UserError(
                f"model: its logits are {what} that its config does not name ({found[name] or 0:.6g} in a small model "
                "of its code), and what makes it is not known, so they cannot be computed rightly here; let its code "
                "take it from a field of the config."
            )
    return values["factor"].pop() or 1.0, values["soft cap"].pop()


@torch.no_grad()
def form_of(
    model: nn.Module, logits_and_states: Callable[[], tuple[torch.Tensor, torch.Tensor]]
) -> tuple[float, float | None]:
    """Factor and soft cap that make the model's logits of its hidden states, over the whole range of logits: those of a
    few random weights lie where a cap bends them by less than is seen, so the output head is made larger, too. A cap
    that the config does not name is what logits come to then."""
    config = model.config.get_text_config()
    named = [value for name, value in vars(config).items() if "softcap" in name and isinstance(value, int | float)]
    samples = [_raw_and_logits(model, logits_and_states, factor) for factor in ENLARGED]
    samples = [(raw, logits) for raw, logits in samples if raw.isfinite().all() and logits.isfinite().all()]
    highest = [logits.abs().max().item() for _, logits in samples]
    ceiling = float(f"{highest[-1]:.6g}") if len(samples) > 1 and highest[-1] <= highest[-2] * (1 + 1e-6) else None
    for cap in (None, *(float(cap) for cap in named if cap), *([ceiling] if ceiling else [])):
        scale = _fitted_scale(samples, cap)
        made = [raw * scale if cap is None else cap * torch.tanh(raw * scale / cap) for raw, _ in samples]
        if all(_is_close(one, logits) for one, (_, logits) in zip(made, samples, strict=True)):
            rounded = float(f"{scale:.6g}")
            return 1.0 if abs(scale - 1) < 1e-5 else rounded if abs(rounded / scale - 1) < 1e-7 else scale, cap
    raise _no_form(model, samples, ceiling)


def _raw_and_logits(
    model: nn.Module, logits_and_states: Callable[[], tuple[torch.Tensor, torch.Tensor]], factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the output head, its weight so many times as large, makes of the model's hidden states, and the model's
    logits: [N, V] each. UserError where there is no such head."""
    head = model.get_output_embeddings()
    if head is None or getattr(head, "weight", None) is None:
        raise _no_head(model)
    weight, bias, added = local(head.weight), getattr(head, "bias", None), logit_bias(model)
    before = weight.clone()
    weight.mul_(factor)
    try:
        logits, hidden = logits_and_states()
        if hidden.ndim != 2 or hidden.shape[1] != weight.shape[-1] or weight.shape[0] != logits.shape[-1]:
            raise _no_head(model)
        raw = F.linear(hidden, weight, None if bias is None else local(bias)).double()
    finally:
        weight.copy_(before)
    return raw if added is None else raw + added.double(), logits


def _fitted_scale(samples: list[tuple[torch.Tensor, torch.Tensor]], cap: float | None) -> float:
    """The factor before the cap that comes nearest to these logits, by those that are neither cut off nor nothing."""
    crossed = squares = 0.0
    for raw, logits in samples:
        if cap is None:
            wanted = logits
        else:
            is_told = (logits.abs() < 0.9 * cap) & (logits.abs() > 0.01 * cap)
            raw, wanted = raw[is_told], cap * torch.atanh(logits[is_told] / cap)
        weight = 1 / max(1.0, raw.abs().max().item() ** 2) if raw.numel() else 0.0
        crossed, squares = (
            crossed + weight * (raw * wanted).sum().item(),
            squares + weight * raw.square().sum().item(),
        )
    return crossed / squares if squares else 1.0


def _is_close(found: torch.Tensor, logits: torch.Tensor) -> bool:
    return (found - logits).abs().max().item() <= 1e-4 * max(1.0, logits.abs().max().item())


def _no_form(model: nn.Module, samples: list[tuple[torch.Tensor, torch.Tensor]], ceiling: float | None) -> UserError:
    """What the model's code does to its logits that the loss here cannot do."""
    name, differ = type(model).__name__, []
    for raw, logits in samples[:2]:  # with larger ones what is added is lost in the last digits
        centered, wanted = raw - raw.mean(0), logits - logits.mean(0)
        scale = ((centered * wanted).sum() / centered.square().sum()).item()
        differ.append((logits - scale * raw).mean(0))
        if not _is_close(scale * raw + differ[-1], logits) or not _is_close(differ[-1], differ[0]):
            break
    else:
        own = [one for one, tensor in (*model.named_parameters(), *model.named_buffers()) if _holds(tensor, differ[0])]
        what = f"`{own[0]}`" if own else "numbers of its own"
        return UserError(
            f"{name} cannot be trained: its code adds {what} to the logits of its output head, which the loss here "
            "does not do; let its code add them as the bias of that head (nn.Linear)."
        )
    if ceiling is not None:
        return UserError(
            f"{name} cannot be trained: its code keeps the logits of its output head between -{ceiling:g} and "
            f"{ceiling:g}, but not by cap * tanh(logits / cap), the only bound that the loss here can compute; let its "
            "code use that one, or none."
        )
    return UserError(
        f"{name} cannot be trained: its logits are not those of a linear output head over what its layers give, "
        "neither times a factor nor as cap * tanh(logits / cap), and the loss here is computed from such a head."
    )


def _holds(tensor: torch.Tensor, values_v: torch.Tensor) -> bool:
    is_alike = tensor.numel() == values_v.numel() and tensor.is_floating_point()
    return is_alike and _is_close(tensor.detach().reshape(-1).double(), values_v)


def _no_head(model: nn.Module) -> UserError:
    return UserError(
        f"{type(model).__name__} cannot be trained: its logits are not those of a linear output head over what its "
        "layers give, which the loss here is computed from."
    )


def _numbers_of(config: Any, model: nn.Module) -> dict[str, float]:
    """The numbers of a config, by their names."""
    parts = [*configs_within(config)][::-1] if is_encoder_decoder(model) else [config.get_text_config()]
    named = {name: value for part in parts for name, value in vars(part).items()}
    named["hidden_size"] = getattr(parts[-1], "hidden_size", None)  # some have it by another name
    numbers = {name: value for name, value in named.items() if type(value) in (int, float)}
    return {name: float(value) for name, value in numbers.items() if 0 < abs(value) < math.inf}


def _real_values(
    name: str, made: Sequence[tuple[dict[str, float | None], dict[str, float]]], real: dict[str, float]
) -> set[float | None]:
    """What a model of these numbers may have for what each proxy has: by a name for it in the config; or, where more
    than one proxy tells it, a constant of the code or what some of the numbers make."""
    first = made[0][0][name]
    if first is None or (name == "factor" and first == 1.0):
        return {first} if all(found[name] == first for found, _ in made) else set()
    each = [
        {one for one, value in _expressions(numbers).items() if _is_same(value, found[name])} for found, numbers in made
    ]
    there = _expressions(real)
    fitting = {one: there[one] for one in set.intersection(*each) if one in there}
    direct = {float(f"{value:.9g}"): value for one, value in fitting.items() if re.search(NAMES_OF_FORM, one)}
    if len(direct) == 1 or len(made) == 1:
        return set(direct.values())
    if all(_is_same(first, found[name]) for found, _ in made):  # whatever else may make it, no size does
        return {first}
    return set({float(f"{value:.9g}"): value for value in fitting.values()}.values())


def _is_same(value: float, found: float | None) -> bool:
    return found is not None and abs(value / found - 1) < 1e-5


def _expressions(numbers: dict[str, float]) -> dict[str, float]:
    hidden = numbers.get("hidden_size")
    made = {}
    for name, value in numbers.items():
        made |= {name: value, f"1/{name}": 1 / value}
        if hidden and name != "hidden_size":
            made |= {f"{name}/hidden": value / hidden, f"hidden/{name}": hidden / value}
    return made
