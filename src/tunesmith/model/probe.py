"""The probe: how a model is called and which of its linears carry adapters, found by trying before it is loaded.

What a model's code does with documents and adapters does not depend on its weights. So it is tried on a small model of
the same code in fp32 (`model.proxy`), and the results are compared with that model's own plain call, one document at a
time.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tunesmith import __version__
from tunesmith.cache import folder_to_fill
from tunesmith.config.schema import Lora, Run
from tunesmith.errors import UserError, first_line
from tunesmith.kernels import flash4
from tunesmith.model import adapters, attention, load, lora, lora_modules
from tunesmith.model.attention import NAME as PACKED_ATTENTION
from tunesmith.model.experts import check_stacks, experts_of_layers, use_early_weights
from tunesmith.model.forward import hidden_states, trial_inputs
from tunesmith.model.forward_spec import confirm_forward_spec, find_forward_spec, installed_kernels
from tunesmith.model.fuse import fuse
from tunesmith.model.gated import use_memory_efficient_gates
from tunesmith.model.kept import count_kept
from tunesmith.model.logit_form import real_form
from tunesmith.model.proxy import WIDTH, build_proxy, layers_of_every_kind
from tunesmith.model.rotary import fuse_rope
from tunesmith.model.routers import router_loss_of
from tunesmith.model.state_space import has_own_kernels, mixers_of, use_chunked_scan
from tunesmith.model.structure import (
    body,
    holds_most_elsewhere,
    is_encoder_decoder,
    kind_of,
    linears_of_layers,
    plain_call,
    replace_module,
    set_attention,
)
from tunesmith.plan.facts import Kept
from tunesmith.plan.families import family_of
from tunesmith.plan.models import check_kind, read_config
from tunesmith.plan.plan import Attention, ForwardSpec, Gate, Kernel

VERSION = 13
"""Of what the probe tries; cached results of another are not read."""
ATTENTION_KERNELS: tuple[Attention | None, ...] = (None, "varlen", "flex-attention", "sdpa")
"""As they are tried on a GPU, in this order; None: the best that is there."""
DIFFER = "losses differ"
READS_WEIGHT = "the model reads its weight itself"

Patterns = tuple[str, ...]


@dataclass(frozen=True)
class Probed:
    spec: ForwardSpec | None
    """How it is called; None, of a config alone, where no proxy could be made."""
    note: str | None = None
    """Why it is not the fastest there is."""
    left_out: tuple[tuple[str, str], ...] = ()
    """Linears that get no adapter, by kind (`model.layers.#.mixer.x_proj`), and why."""
    can_fuse: bool = True
    adapted: tuple[str, ...] | None = None
    """The linears that get adapters in this run, where some of those that were chosen cannot carry one."""
    reuses_weights: bool = False
    """A forward pass calls some of its linears more than once, so no weight may change before the whole backward pass
    is done."""
    wrong_paths: tuple[str, ...] = ()
    """Paths of attention that fail on this GPU, or give something else than the model's own."""
    kernels: tuple[Kernel, ...] | None = None
    """Those of ours that equal the modules of the model whose place they take; None where no proxy could be made."""
    needs_weight: tuple[str, ...] = ()
    """Linears, by kind, that cannot be held in few bits: the model's own code computes with their weight."""
    router_loss: float | None = None
    """What the load-balancing loss of its routers counts by its config; None where it has no such loss."""
    asks_router_loss: bool = False
    """Its config asks for it (`output_router_logits`)."""
    kept: tuple[Kept, ...] | None = None
    """What each layer keeps for backward, counted on this kind of device, of an architecture without a formula."""

    def settings(self, settings: Lora, names: Iterable[str]) -> tuple[Lora, str | None]:
        """The adapters' settings without those linears, and a sentence about it; UserError where nothing is left.
        `names` are the linears that they choose."""
        reasons = dict(self.left_out)
        chosen = list(dict.fromkeys(kind_of(name) for name in names))
        out = [kind for kind in chosen if kind in reasons]
        if not out:
            return settings, None
        said = "; ".join(f"{kind.replace('#', '*')} ({reasons[kind]})" for kind in out[:4])
        said += f" and {len(out) - 4} more" if len(out) > 4 else ""
        if len(out) == len(chosen):
            raise UserError(f"lora.targets: no linear that was chosen can carry an adapter: {said}.")
        kept = [kind.replace("#", "*") for kind in chosen if kind not in reasons]
        changed = settings.model_copy(update={"targets": kept, "layers": settings.layers})
        return changed, f"Left without an adapter: {said}."


def probe(run: Run, *, device: torch.device | str = "cpu") -> Probed:
    """Of the run's model; known from an earlier time where config and versions are the same."""
    check_kind(run.model, read_config(run.model))
    config = load.load_config(run)
    cached, key = _cache_file(run, config, torch.device(device))
    if cached is not None and cached.exists():
        try:
            return _from_json(json.loads(cached.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError):
            pass  # made again
    found = probe_config(config, device=torch.device(device), trust_remote_code=run.trust_remote_code)
    found = _with_kept_activations(run, config, found, torch.device(device))
    if found.spec is None or torch.device(device).type == "cuda":
        found = _in_half_precision(run, found, torch.device(device))
    if cached is not None:
        try:
            partial = cached.with_suffix(f".{key[-6:]}.partial")
            partial.write_text(json.dumps(asdict(found), default=dict), encoding="utf-8")
            partial.replace(cached)
        except OSError:
            pass  # a cache that cannot be written
    return found


def _with_kept_activations(run: Run, config: Any, found: Probed, device: torch.device) -> Probed:
    """With what layers keep for backward. Counting that compiles a layer or two, so it is left to models of which
    nothing else is known."""
    is_known = family_of(read_config(run.model)) is not None
    if is_known or found.spec is None or found.spec.layout != "packed":
        return found
    on_gpu = device.type == "cuda"
    kept = count_kept(
        config,
        compiles=on_gpu,
        fuses=found.can_fuse,
        kernels=found.kernels or (),
        seq_idx=found.spec.seq_idx,
        trust_remote_code=run.trust_remote_code,
    )
    return replace(found, kept=kept)


def probe_run(run: Run, *, device: torch.device | str = "cpu") -> tuple[Run, Probed, list[str]]:
    """The run with the adapters that its model can carry, what the probe found, and what is to be said about both."""
    attention.register()
    found = probe(run, device=device)
    notes = [found.note] if found.note else []
    if run.method in ("qlora", "loqt"):
        _check_few_bits(run, found)
    if run.method == "peft":
        return run, _with_adapter_of_peft(run, found), notes
    is_odd_to_peft = run.has_lora and (has_other_names(load.load_config(run)) or _has_scan(found))
    if run.has_lora and (found.left_out or is_odd_to_peft):
        skeleton = load.load_skeleton(run)
        settings, note = found.settings(run.lora, lora.find_targets(skeleton, run.lora))
        if note:
            notes.append(note)
            found = replace(found, adapted=tuple(settings.targets))
        if is_odd_to_peft:
            settings, note = _without_lost_in_peft(run, settings)
            if note:
                notes.append(note)
                found = replace(found, adapted=tuple(settings.targets))
        run = run.model_copy(update={"lora": settings})
    return run, found, notes


def _has_scan(found: Probed) -> bool:
    return found.spec is not None and found.spec.seq_idx


def _check_few_bits(run: Run, found: Probed) -> None:
    """UserError where the model computes with the weight of a linear that would be there in 4 or 8 bits only, or most
    of its weights could not be there so."""
    model = load.load_skeleton(run)
    held, experts = linears_of_layers(model), experts_of_layers(model).values()
    for one in experts:
        check_stacks(one)
    weights = [*(one.weight for one in held.values()), *(weight for one in experts for weight in one.parameters())]
    if (odd := holds_most_elsewhere(model, weights)) is not None:
        raise UserError(
            f"method: {run.method}: most weights in the layers of {type(model).__name__} are those of {odd} modules, "
            "which cannot be held in 4 or 8 bits; use method: lora."
        )
    if named := next((kind for kind in map(kind_of, held) if kind in found.needs_weight), None):
        raise UserError(
            f"method: {run.method}: the model's own code computes with the weight of {named.replace('#', '*')}, so it "
            "cannot be held in few bits; use method: lora."
        )


def _without_lost_in_peft(run: Run, settings: Lora) -> tuple[Lora, str | None]:
    """The adapters' settings without the linears whose adapters peft would not read from files. UserError where such a
    linear was asked for by name."""
    names = lora.find_targets(load.load_skeleton(run), settings)
    if not lora.lost_in_peft(load.load_skeleton(run), settings, names):
        return settings, None
    by_leaf: dict[str, list[str]] = {}
    for name in names:
        by_leaf.setdefault(name.rpartition(".")[2], []).append(name)
    lost: dict[str, str] = {}
    for some in by_leaf.values():
        lost |= lora.lost_in_peft(load.load_skeleton(run), settings, some)
    said = ", ".join(list(dict.fromkeys(kind_of(name).replace("#", "*") for name in lost))[:4])
    why = f"peft, as it is installed here, {next(iter(lost.values()))}"
    kept = [kind for kind in dict.fromkeys(map(kind_of, names)) if kind not in set(map(kind_of, lost))]
    if run.lora.targets != "all-linear" or not kept:
        advice = "use other lora.targets"
        if lora.TAKEN_FOR_EXPERTS in lost.values():
            advice = f"use method: peft with target_parameters for adapters on experts, or {advice[4:]}"
        raise UserError(f"lora.targets: {said}: {why}, and would not read their adapters; {advice}.")
    changed = settings.model_copy(update={"targets": [kind.replace("#", "*") for kind in kept]})
    return changed, f"Left without an adapter: {said} ({why})."


def _with_adapter_of_peft(run: Run, found: Probed) -> Probed:
    """The same with how the model is called with its adapter of peft's on it, tried on a small model of the same code
    with an adapter that has an effect."""
    config = adapters.make_config(run)
    if config.is_prompt_learning and (run.objective in ("grpo", "rloo") or run.distillation.on_policy):
        raise UserError(
            f"peft: {config.peft_type.value} puts trained vectors before each text, with which answers are not decoded "
            f"while training, as `objective: {run.objective}` needs here; use lora, full or another of peft's methods."
        )
    if found.spec is None:
        return found
    if config.is_prompt_learning:
        found = replace(found, spec=replace(found.spec, layout="padded"))
    layers = layers_of_every_kind(load.load_skeleton(run), load.load_config(run))
    small = load.build_small_proxy(run, dtype="fp32", device=torch.device("cpu"), layers=layers, width=WIDTH)
    try:
        tuned = adapters.put_on(small, run)
    except UserError:  # it may be for layers or tokens that a small model does not have
        return found
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in tuned.model.parameters():
            if weight.requires_grad:
                weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    vocabulary = load.usable_tokens(small.config)
    _check_call(tuned, vocabulary)
    try:
        spec, note = confirm_forward_spec(tuned.model, vocabulary=vocabulary, known=found.spec)
    except UserError:
        try:
            spec, note = find_forward_spec(tuned.model, vocabulary=vocabulary)  # one by one, perhaps
        except UserError as error:
            raise UserError(
                f"peft.peft_type: with {config.peft_type.value} on it {type(small).__name__} does not give the logits "
                "of its output head over what its layers give, which the loss here is computed from; use another type, "
                "or method: lora."
            ) from error
    return replace(found, spec=spec, note=found.note or note)


@torch.no_grad()
def _check_call(tuned: adapters.Tuned, vocabulary: int) -> None:
    """UserError where the model cannot be called with the adapter, or gives what it gives without. peft hands a prefix
    over as keys and values, for one: layers with a state want other caches, and models without attention none."""
    model, kind = tuned.model.eval(), tuned.config.peft_type.value
    name = type(tuned.peft.get_base_model()).__name__
    tokens = torch.arange(4, device=next(model.parameters()).device)[None] % vocabulary
    try:
        found = model(input_ids=tokens, use_cache=False).logits
        with adapters.without(tuned):
            plain = model(input_ids=tokens, use_cache=False).logits
    except Exception as error:  # the model's own code, called by peft
        raise UserError(
            f"peft.peft_type: {name} cannot be called with {kind} on it ({first_line(error)}); use another type, or "
            "method: lora."
        ) from error
    if torch.equal(found, plain):
        raise UserError(
            f"peft.peft_type: {kind} changes nothing of what {name} gives; use another type, or method: lora."
        )


def _in_half_precision(run: Run, found: Probed, device: torch.device) -> Probed:
    """The same with kernels that fp32 does not reach, on a small model in the precision that is trained in; all that is
    known of a model of which no proxy in fp32 could be made."""
    dtype = "fp32" if device.type == "cpu" else "bf16" if torch.cuda.is_bf16_supported() else "fp16"
    small = load.build_small_proxy(run, dtype=dtype, device=device, layers=2, width=WIDTH)
    sizes = {"vocabulary": load.usable_tokens(small.config), "longest": run.sequence_length}
    wrong: dict[str, str] = {}
    try:
        # From the fastest kernel to none; most often the first is right.
        for kernel in ATTENTION_KERNELS if device.type == "cuda" else (None,):
            attention.register(kernel)
            with attention.watched() as asked:
                spec, note = confirm_forward_spec(small, **sizes, known=found.spec)
            faults = {one.path: why for one in asked if not one.is_usual and (why := attention.fault_of(one, device))}
            if spec.layout == "padded" and found.spec is not None and found.spec.layout == "packed":
                faults |= {one.path: DIFFER for one in asked if one.path not in faults}
            if not faults or kernel == ATTENTION_KERNELS[-1]:
                break
            wrong |= faults
        if spec.layout == "padded":  # with any of them
            wrong = {path: why for path, why in wrong.items() if why != DIFFER}
    finally:
        attention.register()
    if wrong:
        said = "; ".join(f"{path} ({why.rstrip('.')})" for path, why in wrong.items())
        note = note or f"Attention that was found wrong on this GPU is not used: {said}."
    return replace(found, spec=spec, note=found.note or note, wrong_paths=tuple(wrong))


def has_other_names(config: Any) -> bool:
    """Whether transformers renames what the files of this family hold, as peft then does with adapters."""
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    except ImportError:  # an older transformers
        return False
    return get_checkpoint_conversion_mapping(getattr(config, "model_type", None)) is not None


def probe_config(config: Any, *, device: torch.device, trust_remote_code: bool = False) -> Probed:
    proxy = build_proxy(config, device=device, trust_remote_code=trust_remote_code)
    if proxy is None:
        return Probed(None)
    model = proxy.model
    own = model.config._attn_implementation
    spec, note = find_forward_spec(model, vocabulary=proxy.vocabulary, long=proxy.long)
    set_attention(model, own)
    if spec.seq_idx:  # as it will be trained
        use_chunked_scan(body(model))
    scale, softcap = real_form(spec, model, config, device, trust_remote_code)
    spec = replace(spec, logit_scale=scale, softcap=softcap)
    if spec.switch:
        spec = replace(spec, switch=proxy.switch)
        note = note or (
            f"{type(model).__name__} computes documents of more than {proxy.switch:,} tokens by other rules, and all "
            "that are called with them; longer ones are called by themselves."
        )
    left_out, can_fuse = try_adapters(model, proxy.vocabulary)
    needs = _need_weights(model, [kind for kind, why in left_out.items() if why == READS_WEIGHT], proxy.vocabulary)
    reuses = _reuses_weights(model)
    is_ours = spec.seq_idx and bool(mixers_of(model)) and not has_own_kernels(device)
    kernels = (*equal_kernels(model, spec, proxy.vocabulary), *(("scan",) if is_ours else ()))
    found = Probed(spec, note, tuple(left_out.items()), can_fuse, reuses_weights=reuses, kernels=kernels)
    return replace(found, needs_weight=needs, **_router_loss(model))


def _router_loss(model: nn.Module) -> dict[str, Any]:
    config = model.config.get_text_config()
    weight = getattr(model, "router_aux_loss_coef", getattr(config, "router_aux_loss_coef", None))
    if router_loss_of(model) is None or weight is None:
        return {}
    return {
        "router_loss": float(weight),
        "asks_router_loss": bool(getattr(config, "output_router_logits", False)),
    }


def equal_kernels(model: nn.Module, spec: ForwardSpec, vocabulary: int) -> tuple[Kernel, ...]:
    """Which of the model's modules ours can take the place of; none of an encoder-decoder's, which has dropout between
    what they would compute as one."""
    if is_encoder_decoder(model):
        return ()
    found: list[Kernel] = []
    with contextlib.suppress(Exception):  # the model's own code, called with what it does not expect
        found += ["rope"] if _has_equal_rope(model, spec, vocabulary) else []
    with contextlib.suppress(Exception):
        found += ["experts"] if _has_equal_experts(model) else []
    return (*found, *_equal_gates(model))


@torch.no_grad()
def _has_equal_experts(model: nn.Module) -> bool:
    """Whether the model as a whole cannot tell its experts from ours."""
    tokens, ours = torch.arange(8, device=model.device)[None], copy.deepcopy(model)
    if not use_early_weights(ours):
        return False
    expected = _logits(model, tokens)
    return (_logits(ours, tokens) - expected).abs().max().item() <= 1e-4 * max(1.0, expected.abs().max().item())


@torch.no_grad()
def _has_equal_rope(model: nn.Module, spec: ForwardSpec, vocabulary: int) -> bool:
    """Whether some attention of the model can be ours, and the model as a whole cannot tell."""
    plain, fused = copy.deepcopy(model), copy.deepcopy(model)
    if not fuse_rope(fused, torch.float32):
        return False
    if spec.layout != "packed":  # it is the model's own that is called then
        return True
    inputs = trial_inputs(vocabulary, model.device)
    for one in (plain, fused):
        set_attention(one, PACKED_ATTENTION)
    expected, ours = (hidden_states(one, inputs, spec) for one in (plain, fused))
    return (ours - expected).abs().max().item() <= 1e-4 * max(1.0, expected.abs().max().item())


@torch.no_grad()
def _equal_gates(model: nn.Module) -> tuple[Gate, ...]:
    """Of its gated MLPs, those that the model as a whole cannot tell from ours."""
    tokens, small = torch.arange(8, device=model.device)[None], copy.deepcopy(model)
    try:
        found = use_memory_efficient_gates(small)
        if not found:
            return ()
        expected, ours = _logits(model, tokens), _logits(small, tokens)
    except Exception:  # the model's own code, with other modules in it
        return ()
    is_equal = (ours - expected).abs().max().item() <= 1e-4 * max(1.0, expected.abs().max().item())
    return tuple(dict.fromkeys(found)) if is_equal else ()


@torch.no_grad()
def _reuses_weights(model: nn.Module) -> bool:
    calls: collections.Counter[nn.Module] = collections.Counter()
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    hooks = [module.register_forward_hook(lambda one, *_: calls.update([one])) for module in linears]
    try:
        model(**plain_call(model, torch.arange(8, device=model.device)[None]))
    finally:
        for hook in hooks:
            hook.remove()
    return any(count > 1 for count in calls.values())


def try_adapters(model: nn.Module, vocabulary: int) -> tuple[dict[str, str], bool]:
    """The kinds of linears on which an adapter does not do what a changed weight does, and why; and whether the
    others can be computed together as training does."""
    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if lora_modules.is_linear(module) and module is not head]
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(kind_of(name), []).append(name)
    generator = torch.Generator().manual_seed(2)
    device = next(model.parameters()).device
    tokens = torch.randint(vocabulary, (2, 23), generator=generator).to(device)
    trained = {name: weight.requires_grad for name, weight in model.named_parameters()}
    model.requires_grad_(False)
    model.train()
    try:
        plain = _logits(model, tokens)
        reasons = {kind: _why_not_adapted(model, members, tokens, plain) for kind, members in kinds.items()}
        left_out = {kind: why for kind, why in reasons.items() if why is not None}
        return left_out, _can_fuse(model, [name for name in names if kind_of(name) not in left_out], tokens)
    finally:
        model.eval()
        for name, weight in model.named_parameters():
            weight.requires_grad_(trained.get(name, True))


def _why_not_adapted(model: nn.Module, members: list[str], tokens: torch.Tensor, plain: torch.Tensor) -> str | None:
    """Why adapters on these linears do not do what the same change of their weights does; None where they do."""
    with _trial_adapters(model, members) as adapters_of:
        bases = {name: adapter.base for name, adapter in adapters_of.items()}
        deltas = {name: adapter.delta() for name, adapter in adapters_of.items()}
        try:
            with torch.enable_grad():
                found = _logits(model, tokens)
                if found.requires_grad:
                    found.square().mean().backward()
            _logits(model.eval(), tokens)  # some read their weights only when they do not train
        except Exception as error:  # the model's own code, given a module it does not expect
            return _why_failed(error)
        finally:
            model.train()
        has_gradient = any(one.lora_b.grad is not None and one.lora_b.grad.any() for one in adapters_of.values())
    with torch.no_grad():
        kept = {name: base.weight.detach().clone() for name, base in bases.items()}
        try:
            for name, base in bases.items():
                base.weight.add_(deltas[name])
            expected = _logits(model, tokens)
        finally:
            for name, base in bases.items():
                base.weight.copy_(kept[name])
    effect = (expected - plain).abs().max().item()
    if effect <= 1e-6 * max(1.0, plain.abs().max().item()):
        return "text does not pass through it"
    if (found.detach() - expected).abs().max().item() > 0.02 * effect + 1e-4:
        if torch.equal(found.detach(), plain):
            return READS_WEIGHT
        return "the model uses its weight otherwise than as a linear"
    return None if has_gradient else "no gradient reaches it"


class _WithoutWeight(nn.Module):
    """A linear as one in few bits looks to the model."""

    weight = None

    def __init__(self, base: nn.Module):
        super().__init__()
        self.base = base
        self.bias = base.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x)


@torch.no_grad()
def _need_weights(model: nn.Module, kinds: list[str], vocabulary: int) -> tuple[str, ...]:
    """Of these kinds of linears, which the model reads, those that it cannot do without; others it only hands to
    kernels that are not there."""
    tokens = torch.arange(8, device=model.device)[None] % vocabulary
    found = []
    for kind in kinds:
        small = copy.deepcopy(model)
        for name, module in list(small.named_modules()):
            if kind_of(name) == kind:
                replace_module(small, name, _WithoutWeight(module))
        try:
            same = [torch.equal(_logits(one, tokens), _logits(two, tokens)) for one, two in _both_modes(model, small)]
        except Exception:  # the model's own code, which finds no weight
            same = [False]
        if not all(same):
            found.append(kind)
    model.eval()
    return tuple(found)


def _both_modes(*models: nn.Module) -> Iterator[tuple[nn.Module, ...]]:
    for is_training in (True, False):
        for model in models:
            model.train(is_training)
        yield models


def _why_failed(error: Exception) -> str:
    text = first_line(error)
    if isinstance(error, AttributeError):
        return READS_WEIGHT
    if isinstance(error, TypeError):
        return "it gives more than a tensor"
    if "inplace" in text or "in-place" in text:
        return "the model changes its output in place"
    return f"the model cannot be called with it: {text[:80]}"


@contextlib.contextmanager
def _trial_adapters(model: nn.Module, names: Iterable[str]) -> Iterator[dict[str, lora_modules.LoraLinear]]:
    """Adapters that are not zero on these linears, for as long as this lasts."""
    adapters_of = _put_trial_adapters(model, names)
    try:
        yield adapters_of
    finally:
        for name, adapter in adapters_of.items():
            replace_module(model, name, adapter.base)


def _put_trial_adapters(model: nn.Module, names: Iterable[str]) -> dict[str, lora_modules.LoraLinear]:
    generator = torch.Generator().manual_seed(3)
    adapters_of = {}
    for name, base in {name: model.get_submodule(name) for name in names}.items():
        adapter = lora_modules.LoraLinear(base, 2, 1.0)
        adapter.reset(generator)
        spread = base.weight.std().item() or 0.1
        with torch.no_grad():
            adapter.lora_b.copy_(spread * torch.randn(adapter.lora_b.shape, generator=generator))
        replace_module(model, name, adapter)
        adapters_of[name] = adapter
    return adapters_of


def _can_fuse(model: nn.Module, names: list[str], tokens: torch.Tensor) -> bool:
    """Whether adapters on these linears give the same when they are fused with the linears around them."""
    if not names:
        return False
    small = copy.deepcopy(model)
    _put_trial_adapters(small, names)
    fuse_mlps = tokens.device.type == "cuda"
    try:
        with torch.enable_grad():
            expected = _logits(small, tokens)
            fuse(small, fp8=False, fuse_mlps=fuse_mlps)
            found = _logits(small, tokens)
            found.square().mean().backward()
    except Exception:  # the model's own code, given outputs that are views
        return False
    return (found - expected).abs().max().item() <= 1e-3 * max(1.0, expected.abs().max().item())


def _logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The same draws every time, for models that draw in training."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model(**plain_call(model, tokens)).logits.float()


# The cache


def _cache_file(run: Run, config: Any, device: torch.device) -> tuple[Path | None, str]:
    """Where what was found of this config is kept, None where it may not be or no folder is there; and its key."""
    import transformers

    text = json.dumps(config.to_dict(), sort_keys=True, default=str)
    if run.trust_remote_code and "auto_map" in text:
        return None, ""
    where = [device.type, *installed_kernels()]
    if device.type == "cuda":
        where += [*torch.cuda.get_device_capability(), flash4.version()]
    parts = [VERSION, __version__, torch.__version__, transformers.__version__, where, text]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    folder = folder_to_fill("probes")
    return (folder / f"{key[:32]}.json" if folder else None), key


def _from_json(values: dict[str, Any]) -> Probed:
    spec = values["spec"]
    return Probed(
        spec=None if spec is None else ForwardSpec(**spec),
        note=values["note"],
        left_out=tuple((kind, why) for kind, why in values["left_out"]),
        can_fuse=values["can_fuse"],
        reuses_weights=values["reuses_weights"],
        wrong_paths=tuple(values["wrong_paths"]),
        kernels=None if values["kernels"] is None else tuple(values["kernels"]),
        needs_weight=tuple(values["needs_weight"]),
        router_loss=values["router_loss"],
        asks_router_loss=values["asks_router_loss"],
        kept=None if values["kept"] is None else tuple(Kept(**one) for one in values["kept"]),
    )
