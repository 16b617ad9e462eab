"""The probe: how a model is called and which of its linears carry adapters, found by trying before it is loaded.

What a model's code does with documents and adapters does not depend on its weights. So it is tried on a proxy: the same
code in fp32, a few narrow layers, each kind of layer among them, and every length in the config at which the code
switches (windows, chunks, the length from which RoPE is scaled otherwise) made so small that short documents cross it.
The results are compared with the model's own plain call, one document at a time.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from tunesmith import __version__
from tunesmith.cache import folder_to_fill
from tunesmith.config.schema import Lora, Run
from tunesmith.errors import UserError, first_line
from tunesmith.kernels import flash4
from tunesmith.model import adapters, attention, load, lora
from tunesmith.model.attention import NAME as PACKED_ATTENTION
from tunesmith.model.experts import check_stacks, experts_of_layers, use_early_weights
from tunesmith.model.forward import (
    confirm_forward_spec,
    find_forward_spec,
    hidden_states,
    installed_kernels,
    logit_form,
    trial_inputs,
)
from tunesmith.model.fuse import fuse
from tunesmith.model.gated import use_memory_efficient_gates
from tunesmith.model.kept import count_kept
from tunesmith.model.rotary import fuse_rope
from tunesmith.model.routers import router_loss_of
from tunesmith.model.state_space import has_own_kernels, mixers_of, use_chunked_scan
from tunesmith.model.structure import (
    body,
    holds_most_elsewhere,
    is_encoder_decoder,
    linears_of_layers,
    plain_call,
    replace_module,
    set_attention,
)
from tunesmith.plan.facts import Kept
from tunesmith.plan.families import family_of
from tunesmith.plan.models import check_kind, language_model_class, read_config
from tunesmith.plan.models import is_encoder_decoder as is_encoder_decoder_config
from tunesmith.plan.plan import Attention, ForwardSpec, Gate, Kernel

VERSION = 13
"""Of what is tried; results of another are not read."""
TOKENS = 500
"""The proxy's vocabulary."""
WIDTH = 64
"""Of its MLPs and experts."""
LARGEST = 60_000_000
"""Parameters of a proxy; a model that cannot be made smaller is tried once it is loaded, in its own precision."""
SMALL = 3_000_000
"""A model of so few parameters is its own proxy, but for the lengths at which it switches."""
WINDOW, SWITCH, POSITIONS = 5, 16, 64
"""Tokens, in the proxy: a window or chunk, where RoPE changes, and the longest sequence."""
CHUNK = 8
"""Tokens that a state space takes at once, in the proxy."""
MOST_LAYERS = 12
KERNELS: tuple[Attention | None, ...] = (None, "varlen", "flex-attention", "sdpa")
"""Of attention, as they are tried on a GPU; None: the best that is there."""
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


def kind_of(name: str) -> str:
    """A module's name without the number of its layer, expert or the like."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "#", name)


def probe(run: Run, *, device: torch.device | str = "cpu") -> Probed:
    """Of the run's model; known from an earlier time where config and versions are the same."""
    check_kind(run.model, read_config(run.model))
    config = load.load_config(run)
    kept, key = _kept(run, config, torch.device(device))
    if kept is not None and kept.exists():
        try:
            return _from_json(json.loads(kept.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError):
            pass  # made again
    found = probe_config(config, device=torch.device(device), trust_remote_code=run.trust_remote_code)
    found = _with_kept(run, config, found, torch.device(device))
    if found.spec is None or torch.device(device).type == "cuda":
        found = _in_half_precision(run, found, torch.device(device))
    if kept is not None:
        try:
            beside = kept.with_suffix(f".{key[-6:]}.partial")
            beside.write_text(json.dumps(asdict(found), default=dict), encoding="utf-8")
            beside.replace(kept)
        except OSError:
            pass  # a cache that cannot be written
    return found


def _with_kept(run: Run, config: Any, found: Probed, device: torch.device) -> Probed:
    """Counting compiles a layer or two, so it is left to models of which nothing else is known."""
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
        return run, _tried_with_peft(run, found), notes
    is_odd_to_peft = run.has_lora and (has_other_names(load.load_config(run)) or _has_scan(found))
    if run.has_lora and (found.left_out or is_odd_to_peft):
        skeleton = load.load_skeleton(run)
        settings, note = found.settings(run.lora, lora.find_targets(skeleton, run.lora))
        if note:
            notes.append(note)
            found = replace(found, adapted=tuple(settings.targets))
        if is_odd_to_peft:
            settings, note = _readable(run, settings)
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


def _readable(run: Run, settings: Lora) -> tuple[Lora, str | None]:
    """The adapters' settings without the linears whose adapters peft would not read from files. UserError where such a
    linear was asked for by name."""
    names = lora.find_targets(load.load_skeleton(run), settings)
    if not lora.lost_in_peft(load.load_skeleton(run), settings, names):
        return settings, None
    ends: dict[str, list[str]] = {}
    for name in names:
        ends.setdefault(name.rpartition(".")[2], []).append(name)
    lost: dict[str, str] = {}
    for some in ends.values():
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


def _tried_with_peft(run: Run, found: Probed) -> Probed:
    """How the model is called with its adapter of peft's on it, tried on a small model of the same code with an adapter
    that has an effect."""
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
    layers = layers_of_every_kind(run)
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
            raise UserError(f"peft: with {config.peft_type.value} as it is set here, {error}") from error
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


def layers_of_every_kind(run: Run) -> int:
    """How many layers of the run's model, from the first, are of every kind that it has, as far as a proxy goes."""
    return _depth(load.load_skeleton(run), load.load_config(run))


def _in_half_precision(run: Run, found: Probed, device: torch.device) -> Probed:
    """The same with kernels that fp32 does not reach, on a small model in the precision that is trained in; all that is
    known of a model of which no proxy in fp32 could be made."""
    dtype = "fp32" if device.type == "cpu" else "bf16" if torch.cuda.is_bf16_supported() else "fp16"
    small = load.build_small_proxy(run, dtype=dtype, device=device, layers=2, width=WIDTH)
    sizes = {"vocabulary": load.usable_tokens(small.config), "longest": run.sequence_length}
    wrong: dict[str, str] = {}
    try:
        # From the fastest kernel to none; most often the first is right.
        for kernel in KERNELS if device.type == "cuda" else (None,):
            attention.register(kernel)
            with attention.watched() as asked:
                spec, note = confirm_forward_spec(small, **sizes, known=found.spec)
            faults = {one.path: why for one in asked if not one.is_usual and (why := attention.fault_of(one, device))}
            if spec.layout == "padded" and found.spec is not None and found.spec.layout == "packed":
                faults |= {one.path: DIFFER for one in asked if one.path not in faults}
            if not faults or kernel == KERNELS[-1]:
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
    scale, softcap = _real_form(spec, model, config, device, trust_remote_code)
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


# The proxy


@dataclass(frozen=True)
class Proxy:
    model: nn.Module
    vocabulary: int
    long: int | None
    """Documents above this many tokens are computed by other rules than shorter ones, perhaps."""
    switch: int | None
    """The same length in the model itself."""


def build_proxy(config: Any, *, device: torch.device, trust_remote_code: bool = False) -> Proxy | None:
    """The smallest model of this code that can be built and called; None where none can."""
    skeleton = _skeleton(config, trust_remote_code)
    if skeleton is None:
        return None
    size = load.parameter_count(skeleton)
    depth = _depth(skeleton, config)
    shrinkings: list[Callable[[Any], None]] = [lambda small: None] if size <= SMALL else []
    shrinkings += [
        lambda small: _shrink(small, depth),
        lambda small: _shrink(small, depth, is_harder=True),
        lambda small: _shrink(small, depth, heads=4, is_harder=True),
    ]
    for shrink, lowers in itertools.product(shrinkings, (True, False)):
        small = copy.deepcopy(config)
        _set_dropouts(small)
        shrink(small)
        long, switch = _lower_switches(small) if lowers else (None, None)
        made = _skeleton(small, trust_remote_code)
        if made is None or load.parameter_count(made) > LARGEST:
            continue
        vocabulary = load.usable_tokens(small)
        model = _drawn(small, device, trust_remote_code, vocabulary)
        if model is not None:
            return Proxy(model, vocabulary, long, switch)
    return None


def _skeleton(config: Any, trust_remote_code: bool) -> nn.Module | None:
    with load.quiet(), torch.device("meta"):
        try:
            return language_model_class(config).from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)
        except Exception:  # the model's own code: whatever it raises, this is no way to build it
            return None


def _drawn(config: Any, device: torch.device, trust_remote_code: bool, vocabulary: int) -> nn.Module | None:
    """The model with random weights, the same every time, in evaluation mode; None where it does not compute."""
    tokens = torch.arange(24, device=device)[None] % vocabulary
    for draws in (True, False):
        with load.quiet(), torch.random.fork_rng():
            torch.manual_seed(0)
            try:
                model = language_model_class(config).from_config(
                    copy.deepcopy(config), dtype=torch.float32, trust_remote_code=trust_remote_code
                )
            except Exception:  # the model's own code: it cannot be built like this
                return None
            if draws:
                load.draw_weights(model, torch.device("cpu"))
            for bias in model.buffers():
                if bias.is_floating_point() and bias.numel() == vocabulary:  # so that leaving it out would show
                    bias.normal_()
            try:
                model = model.to(device).eval()
                with torch.no_grad():
                    logits = model(**plain_call(model, tokens)).logits
            except Exception:  # the model's own code: it cannot be called like this
                continue
        if logits.isfinite().all() and logits.std() > 1e-3:
            return model
    return None


def _depth(skeleton: nn.Module, config: Any) -> int:
    """How many layers, from the first, show every kind of module and every kind of layer that there is."""
    kinds: dict[str, int] = {}
    for name, module in skeleton.named_modules():
        layer = lora.layer_of(name)
        if layer is not None:
            kinds.setdefault(f"{kind_of(name)} {type(module).__name__}", layer)
    depth = 1 + max(kinds.values(), default=1)
    text = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", None)
    for value in vars(text).values():
        if isinstance(value, list) and len(value) == layers:
            firsts = {str(one): index for index, one in reversed(list(enumerate(value)))}
            depth = max(depth, 1 + max(firsts.values()))
    return min(max(2, depth), MOST_LAYERS)


def _texts(config: Any) -> Iterator[Any]:
    """The config, and those within it."""
    yield config
    for name in getattr(config, "sub_configs", {}):
        inner = getattr(config, name, None)
        if hasattr(inner, "to_dict"):
            yield from _texts(inner)


def _put(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except Exception:  # a property, or a value that the config's own checks do not allow
        return


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _set_dropouts(config: Any) -> None:
    for one in _texts(config):
        for name, value in list(vars(one).items()):
            if "drop" in name and isinstance(value, float):
                _put(one, name, 0.0)


STATE_SPACE_HEADS = (
    ("mamba_n_heads", "mamba_d_head"),
    ("mamba_num_heads", "mamba_head_dim"),
    ("n_mamba_heads", "mamba_headdim"),
)
"""What configs call how many there are and how wide each is."""
NAMES_OF_FORM = r"logit|lm_head|mult|scal|cap"
"""What configs call factors and soft caps of the logits."""
LINEAR_HEADS = ("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads")


def _shrink(config: Any, depth: int, heads: int = 2, *, is_harder: bool = False) -> None:
    """Fewer layers, narrow MLPs and experts, few tokens; no fewer than so many heads, of the same size."""
    _shrink_stacks(config)
    text = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", None)
    if _is_size(layers) and layers > depth:
        for name, value in list(vars(text).items()):
            if isinstance(value, list) and len(value) == layers:
                _put(text, name, value[:depth])
        _put(text, "num_hidden_layers", depth)
    for one in _texts(config):
        for name, value in list(vars(one).items()):
            if re.search(r"intermediate_size|ffn_dim|n_inner|ffn_hidden_size|^d_ff$", name):
                _put_at_most(one, name, value, WIDTH)
            if re.search(r"^(mamba_)?chunk_size$", name):  # of a state space's computation
                _put_at_most(one, name, value, CHUNK)
    if is_harder:
        _shrink_harder(text)
    _shrink_vocabulary(config)
    _shrink_width(text, heads)


def _put_at_most(config: Any, name: str, value: Any, most: int) -> None:
    """A size, or those of the layers."""
    if _is_size(value):
        _put(config, name, min(value, most))
    elif isinstance(value, list) and value and all(map(_is_size, value)):
        _put(config, name, [min(one, most) for one in value])


def _shrink_vocabulary(config: Any) -> None:
    text = config.get_text_config()
    if not _is_size(getattr(text, "vocab_size", None)):
        return
    for name, value in list(vars(text).items()):
        if name.startswith("vocab_size"):
            _put_at_most(text, name, value, TOKENS)
    for one in _texts(config):
        for name, value in list(vars(one).items()):
            if name in ("pad_token_id", "decoder_start_token_id") and _is_size(value) and value >= text.vocab_size:
                _put(one, name, None)
                if getattr(one, name) is not None:  # it must be there
                    _put(one, name, text.vocab_size - 1)


def _shrink_width(text: Any, least: int) -> None:
    """Fewer heads, and hidden states that are narrower by as much."""
    heads, hidden = getattr(text, "num_attention_heads", None), getattr(text, "hidden_size", None)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if not (_is_size(heads) and _is_size(hidden) and _is_size(kv_heads)):
        return
    factor = math.gcd(heads, math.gcd(hidden, kv_heads))
    while factor > 1 and (heads // factor < least or hidden // factor < 64):
        factor = max((d for d in range(1, factor) if factor % d == 0), default=1)
    if factor == 1 and least > 2 and kv_heads == heads and hidden % heads == 0 and heads > least:  # a prime number
        _put(text, "hidden_size", hidden // heads * least)
        _put(text, "num_attention_heads", least)
    if factor == 1:
        return
    for name in ("hidden_size", "attention_hidden_size", "num_attention_heads", "num_key_value_heads"):
        if _is_size(value := getattr(text, name, None)) and value % factor == 0:
            _put(text, name, value // factor)
    _shrink_mixers(text, hidden, factor)


def _shrink_harder(text: Any) -> None:
    """Twice as many experts as a token is given to, in as many groups; low ranks of latent attention, and few heads of
    linear attention."""
    sizes = {name: value for name, value in vars(text).items() if _is_size(value)}
    chosen = max(
        (sizes[name] for name in ("num_experts_per_tok", "num_experts_per_token", "moe_topk") if name in sizes),
        default=2,
    )
    groups = max(sizes.get("n_group", 1), sizes.get("num_expert_group", 1))
    each = max(2, -(-2 * chosen // sizes.get("topk_group", 1)))
    for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        if name in sizes:
            _put(text, name, min(sizes[name], groups * each))
    for name in ("q_lora_rank", "kv_lora_rank", "o_lora_rank"):
        if name in sizes:
            _put(text, name, min(sizes[name], WIDTH))
    linear = {name: sizes[name] for name in LINEAR_HEADS if name in sizes}
    for name, count in linear.items():
        _put(text, name, 2 * count // math.gcd(*linear.values()))


def _shrink_mixers(text: Any, hidden: int, factor: int) -> None:
    """The heads of a state space, whose inner width is a multiple of the model's: that is narrower now."""
    for heads, width in STATE_SPACE_HEADS:
        count, size = getattr(text, heads, None), getattr(text, width, None)
        if not _is_size(count) or not _is_size(size) or count * size % hidden:
            continue
        if count % factor == 0:
            _put(text, heads, count // factor)
        elif size % factor == 0:
            _put(text, width, size // factor)
        for name, value in list(vars(text).items()):
            if name.endswith("d_ssm") and value == count * size:
                _put(text, name, value // factor)
            if name.endswith(("n_groups", "ngroups")) and _is_size(value):
                _put(text, name, math.gcd(value, getattr(text, heads)))


def _shrink_stacks(config: Any) -> None:
    """What of an encoder-decoder has names of its own: two counts of layers and of heads."""
    if not is_encoder_decoder_config(config.to_dict()):
        return
    stacks = [one for side in ("encoder", "decoder") if hasattr(one := getattr(config, side, None), "to_dict")]
    for stack in stacks:
        _shrink(stack, 2)
    if len(stacks) == 2 and hasattr(stacks[1], "cross_attention_hidden_size"):
        _put(stacks[1], "cross_attention_hidden_size", stacks[0].hidden_size)
    if stacks and _is_size(getattr(config, "vocab_size", None)):
        _put(config, "vocab_size", min(config.vocab_size, TOKENS))
    for name in ("encoder_layers", "decoder_layers", "num_layers", "num_encoder_layers", "num_decoder_layers"):
        if _is_size(value := getattr(config, name, None)):
            _put(config, name, min(value, 2))
    heads = {getattr(config, f"{side}_attention_heads", None) for side in ("encoder", "decoder")}
    if _is_size(getattr(config, "d_kv", None)) and _is_size(getattr(config, "num_heads", None)):
        _put(config, "num_heads", min(2, config.num_heads))
        return
    many, hidden = heads.pop() if len(heads) == 1 else None, getattr(config, "d_model", None)
    if _is_size(many) and _is_size(hidden) and many > 2 and hidden % many == 0:
        size = hidden // many
        fewer = max(2, -(-64 // size))
        _put(config, "d_model", fewer * size)
        for side in ("encoder", "decoder"):
            _put(config, f"{side}_attention_heads", fewer)


def _lower_switches(config: Any) -> tuple[int | None, int | None]:
    """Windows and chunks of a few tokens, RoPE that changes early. Returns where, in this config and as it was."""
    real: list[int] = []
    for one in _texts(config):
        for name, value in list(vars(one).items()):
            if _is_size(value) and value > WINDOW and re.search(r"window(_size)?$|attention_chunk|index_topk", name):
                _put(one, name, WINDOW)
        ropes = [getattr(one, name, None) for name in ("rope_parameters", "rope_scaling")]
        ropes = [rope for rope in ropes if isinstance(rope, dict)]
        ropes += [inner for rope in ropes for inner in rope.values() if isinstance(inner, dict)]
        is_dynamic = any("dynamic" in str(rope.get("rope_type", rope.get("type"))) for rope in ropes)
        longest = getattr(one, "max_position_embeddings", None)
        found = [rope.get("original_max_position_embeddings") for rope in ropes]
        found += [getattr(one, "original_max_position_embeddings", None), longest if is_dynamic else None]
        real += [value for value in found if _is_size(value)]
        for rope in ropes:
            if _is_size(rope.get("original_max_position_embeddings")):
                rope["original_max_position_embeddings"] = SWITCH
        if _is_size(getattr(one, "original_max_position_embeddings", None)):
            _put(one, "original_max_position_embeddings", SWITCH)
        if _is_size(longest) and ropes:
            _put(one, "max_position_embeddings", min(longest, SWITCH if is_dynamic else POSITIONS))
    return (SWITCH, min(real)) if real and min(real) >= SWITCH else (None, None)


def _real_form(
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
        wider = _wider_proxy(model, config, device, trust_remote_code)
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


def _numbers_of(config: Any, model: nn.Module) -> dict[str, float]:
    """The numbers of a config, by their names."""
    parts = [*_texts(config)][::-1] if is_encoder_decoder(model) else [config.get_text_config()]
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


def _wider_proxy(model: nn.Module, config: Any, device: torch.device, trust_remote_code: bool) -> nn.Module | None:
    """One of twice the heads, and hidden states as much wider; None where there is no such."""
    small = model.config.get_text_config()
    heads = getattr(small, "num_attention_heads", None)
    if not _is_size(heads):
        return None
    wider = copy.deepcopy(config)
    _set_dropouts(wider)
    _shrink(wider, getattr(small, "num_hidden_layers", 2), heads=2 * heads, is_harder=True)
    text = wider.get_text_config()
    if getattr(text, "hidden_size", None) == getattr(small, "hidden_size", None):
        return None
    made = _skeleton(wider, trust_remote_code)
    if made is None or load.parameter_count(made) > LARGEST:
        return None
    return _drawn(wider, device, trust_remote_code, load.usable_tokens(wider))


def try_adapters(model: nn.Module, vocabulary: int) -> tuple[dict[str, str], bool]:
    """The kinds of linears on which an adapter does not do what a changed weight does, and why; and whether the
    others can be computed together as training does."""
    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if lora.is_linear(module) and module is not head]
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
        left_out = {kind: why for kind, members in kinds.items() if (why := _try(model, members, tokens, plain))}
        return left_out, _can_fuse(model, [name for name in names if kind_of(name) not in left_out], tokens)
    finally:
        model.eval()
        for name, weight in model.named_parameters():
            weight.requires_grad_(trained.get(name, True))


def _try(model: nn.Module, members: list[str], tokens: torch.Tensor, plain: torch.Tensor) -> str | None:
    with adapted(model, members) as made:
        bases = {name: adapter.base for name, adapter in made.items()}
        deltas = {name: adapter.delta() for name, adapter in made.items()}
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
        has_gradient = any(one.lora_b.grad is not None and one.lora_b.grad.any() for one in made.values())
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


class adapted:
    """Adapters that are not zero on these linears, for as long as this lasts."""

    def __init__(self, model: nn.Module, names: Iterable[str]):
        self.model, self.names = model, list(names)

    def __enter__(self) -> dict[str, lora.LoraLinear]:
        generator = torch.Generator().manual_seed(3)
        self.bases = {name: self.model.get_submodule(name) for name in self.names}
        made = {}
        for name, base in self.bases.items():
            adapter = lora.LoraLinear(base, 2, 1.0)
            adapter.reset(generator)
            spread = base.weight.std().item() or 0.1
            with torch.no_grad():
                adapter.lora_b.copy_(spread * torch.randn(adapter.lora_b.shape, generator=generator))
            replace_module(self.model, name, adapter)
            made[name] = adapter
        return made

    def __exit__(self, *_: object) -> None:
        for name, base in self.bases.items():
            replace_module(self.model, name, base)


def _can_fuse(model: nn.Module, names: list[str], tokens: torch.Tensor) -> bool:
    if not names:
        return False
    small = copy.deepcopy(model)
    adapted(small, names).__enter__()
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


# What is kept


def _kept(run: Run, config: Any, device: torch.device):
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
