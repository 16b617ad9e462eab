"""Finding out how a model is called: which layout gives, from packed documents, what the model's own plain call gives.

`find_forward_spec` tries the layouts of `model.forward` on a proxy in fp32 (`model.probe`) and compares their losses
with those of the plain call, one document at a time, so that an architecture nobody has seen is either computed rightly
or refused; `confirm_forward_spec` tries what was found on the model itself, in its own precision.

Legend: N target tokens, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import re
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from tunesmith.errors import UserError, first_line, listed
from tunesmith.model.attention import NAME as PACKED_ATTENTION
from tunesmith.model.forward import (
    TRIAL_LENGTHS,
    Inputs,
    decoder_states,
    own_attention,
    part_of,
    token_losses,
    trial_inputs,
)
from tunesmith.model.logit_form import form_by_config, form_of, logit_form
from tunesmith.model.structure import is_encoder_decoder, set_attention
from tunesmith.plan.plan import ForwardSpec

LEAKS = "documents see each other"
KERNEL_PACKAGES = {"causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm", "fla": "flash-linear-attention"}
"""Packages with kernels for what runs along tokens, and the names they are installed by."""


@dataclass(frozen=True)
class _Trial:
    """A few short documents, their losses by the model's plain call, and how far those of another call may be off."""

    inputs: Inputs
    expected: torch.Tensor
    """[N], in float64 where the model is in fp32"""
    own_attention: str
    """What the model's config calls the attention of its plain call."""
    vocabulary: int
    longest: int

    @classmethod
    def of(
        cls, model: nn.Module, vocabulary: int, longest: int = 0, lengths: tuple[int, ...] = TRIAL_LENGTHS
    ) -> _Trial:
        inputs = trial_inputs(vocabulary, next(model.parameters()).device, lengths)
        own = own_attention(model)
        set_attention(model, own)
        return cls(inputs, own_losses(model, inputs), own, vocabulary, longest)

    @property
    def is_exact(self) -> bool:
        return self.expected.dtype == torch.float64

    @property
    def tolerance(self) -> float:
        # In half precision a model's own losses on random tokens are off by some percent, whichever way it is called.
        largest = self.expected.abs().max().item()
        return 1e-4 * max(1.0, largest) if self.is_exact else 0.05 * largest

    @property
    def leak(self) -> float:
        """How far a document's losses may move with the tokens of another."""
        return 1e-5 if self.is_exact else 0.005


def confirm_forward_spec(
    model: nn.Module, *, vocabulary: int, longest: int = 0, known: ForwardSpec | None = None
) -> tuple[ForwardSpec, str | None]:
    """The fastest way of calling this model that gives what the model itself gives.

    `known` is what a proxy of it was found to need; without, the model is its own proxy as far as its precision allows.
    `longest` is what training will give as the longest document, so that attention compiles no other kernels here.
    Returns it with a sentence when it is not the fastest there is. Leaves the model with the attention that the layout
    needs.
    """
    if known is None:
        return find_forward_spec(model, vocabulary=vocabulary, longest=longest)
    if hasattr(model, "head_files"):  # it has no logits of tokens to compare; its layers are those that were tried
        set_attention(model, PACKED_ATTENTION if known.layout == "packed" else own_attention(model))
        return known, None
    if is_encoder_decoder(model):
        return _find_encoder_decoder_spec(model, vocabulary, known), None
    was_training = model.training
    model.eval()
    reasons = []
    try:
        trial = _Trial.of(model, vocabulary, longest)
        if not trial.expected.isfinite().all():  # the weights' fault, which is found elsewhere, and not the layout's
            set_attention(model, PACKED_ATTENTION if known.layout == "packed" else trial.own_attention)
            return known, None
        for layout in ("packed", "padded") if known.layout == "packed" else ("padded",):
            spec = replace(known, layout=layout, seq_idx=known.seq_idx and layout == "packed")
            why = _fault_of(model, spec, trial)
            if why is None:
                branches = known.branches and layout == "packed" and _takes_branches(model, spec, trial)
                return replace(spec, branches=branches), None if layout == known.layout else _slower(model, reasons)
            reasons.append(f"{layout}: {why}")
    finally:
        model.train(was_training)
    raise _cannot(model, reasons)


def find_forward_spec(
    model: nn.Module, *, vocabulary: int, longest: int = 0, long: int | None = None
) -> tuple[ForwardSpec, str | None]:
    """`confirm_forward_spec` where nothing is known yet: how the head's logits become the model's, whether the model is
    causal, and which layout gives its own results. Above `long` tokens its code may compute by other rules: such
    documents are tried beside shorter ones, and by themselves."""
    if is_encoder_decoder(model):
        return _find_encoder_decoder_spec(model, vocabulary), None
    was_training = model.training
    model.eval()
    try:
        trial = _Trial.of(model, vocabulary, longest)
        _check_causal(model, trial.inputs, vocabulary, trial.is_exact)
        scale, softcap = _logit_form(model, trial.inputs, trial.is_exact)
        reasons, before = [], None
        for layout, seq_idx in (("packed", False), ("packed", True), ("padded", False)):
            spec = ForwardSpec(layout, scale, softcap, seq_idx=seq_idx)
            why = _fault_of(model, spec, trial)
            if why is None and long is not None and trial.is_exact:
                spec, why = _over_lengths(model, spec, trial, long)
            if why is None:
                branches = layout == "packed" and not seq_idx and _takes_branches(model, spec, trial)
                return replace(spec, branches=branches), None if layout == "packed" else _slower(model, reasons)
            if seq_idx and why != before:  # most models do not look at `seq_idx`
                reasons.append(f"with seq_idx: {why.partition('. ')[0]}")
            elif not seq_idx:
                reasons.append(f"{layout}: {why}")
            before = why
        spec = ForwardSpec("padded", scale, softcap, switch=0)
        set_attention(model, trial.own_attention)
        if _one_by_one_differs(model, spec, trial.inputs, trial.expected) <= trial.tolerance:
            return spec, _slower(model, reasons, alone=True)
        reasons.append("one by one: losses differ")
    finally:
        model.train(was_training)
    raise _cannot(model, reasons)


def _find_encoder_decoder_spec(model: nn.Module, vocabulary: int, known: ForwardSpec | None = None) -> ForwardSpec:
    """How an encoder-decoder is called: UserError where its losses over padded rows are not the model's own."""
    inputs, was_training = paired_inputs(vocabulary, next(model.parameters()).device), model.training
    model.eval()
    try:
        logits_nv = _own_paired_logits(model, inputs)
        is_exact = logits_nv.dtype == torch.float64
        _check_decoder_causal(model, inputs, vocabulary, logits_nv, is_exact)
        spec = known
        if spec is None:
            with torch.no_grad():
                try:
                    decoder_states(model, inputs)
                except Exception as error:  # the model's own code, called as it may not expect
                    raise _cannot(model, [first_line(error)[:200]]) from error
            form = _paired_form(model, inputs) if is_exact else form_by_config(model)
            spec = ForwardSpec("encoder-decoder", *form)
        expected = F.cross_entropy(logits_nv, inputs.labels, reduction="none")
        if not expected.isfinite().all():  # the weights' fault, which is found elsewhere
            return spec
        with torch.no_grad():
            found = token_losses(model, inputs, spec)[1].to(expected.dtype)
    finally:
        model.train(was_training)
    largest = max(1.0, expected.abs().max().item())
    if not (worst := (found - expected).abs().max().item()) <= (1e-4 if is_exact else 0.05) * largest:
        raise _cannot(model, [f"padded: losses differ by {worst:.2g}"])
    return spec


def _paired_form(model: nn.Module, inputs: Inputs) -> tuple[float, float | None]:
    return form_of(model, lambda: (_own_paired_logits(model, inputs), decoder_states(model, inputs)[inputs.rows]))


@torch.no_grad()
def _own_paired_logits(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    """Of every target by the model's own forward pass, one document at a time: [N, V], float64 where it is in fp32."""
    found, bounds = [], inputs.boundaries.tolist()
    for start, end in itertools.pairwise(bounds):
        count = int(((inputs.rows >= start) & (inputs.rows < end)).sum())
        given = {"input_ids": inputs.tokens[None, start + count + 1 : end], "use_cache": False}
        found.append(model(**given, decoder_input_ids=inputs.tokens[None, start : start + count]).logits[0])
    logits_nv = torch.cat(found).float()
    return logits_nv.double() if next(model.parameters()).dtype == torch.float32 else logits_nv


def _check_decoder_causal(
    model: nn.Module, inputs: Inputs, vocabulary: int, logits_nv: torch.Tensor, is_exact: bool
) -> None:
    """UserError where a target is predicted from targets behind it; the last document's are changed from the third."""
    last = int((inputs.rows >= inputs.boundaries[-2]).sum())
    changed = inputs.tokens.clone()
    start = int(inputs.boundaries[-2])
    changed[start + 3 : start + last] = (changed[start + 3 : start + last] + 1) % vocabulary
    after = _own_paired_logits(model, replace(inputs, tokens=changed))
    place = len(inputs.rows) - last
    differ = (after - logits_nv)[place : place + 3].abs().max().item()
    if differ > (1e-4 if is_exact else 0.05) * max(1.0, logits_nv.abs().max().item()):
        raise UserError(
            f"{type(model).__name__} cannot be trained: what its decoder predicts for a token depends on the tokens "
            "after it."
        )


def paired_inputs(
    vocabulary: int, device: torch.device, sizes: tuple[tuple[int, int], ...] = ((4, 9), (1, 3), (7, 5))
) -> Inputs:
    """Some short documents with so many targets and so many tokens of their source each."""
    lengths = [1 + targets + source for targets, source in sizes]
    starts = [0, *itertools.accumulate(lengths)]
    tokens = torch.randint(vocabulary, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    rows = torch.cat([start + torch.arange(targets) for start, (targets, _) in zip(starts, sizes, strict=False)])
    return Inputs(
        tokens=tokens.to(device),
        positions=torch.cat([torch.arange(length) for length in lengths]).to(device),
        boundaries=torch.tensor(starts, dtype=torch.int32, device=device),
        longest=max(lengths),
        rows=rows.to(device),
        labels=tokens[rows + 1].to(device),
        weights=torch.ones(len(rows), device=device),
    )


def _cannot(model: nn.Module, reasons: list[str]) -> UserError:
    return UserError(
        f"{type(model).__name__} cannot be trained: calling it document by document does not give the model's own "
        f"results ({listed(reasons, '; ')})."
    )


@torch.no_grad()
def _check_causal(model: nn.Module, inputs: Inputs, vocabulary: int, is_exact: bool) -> None:
    """UserError where what a token is predicted from has the token itself in it. Only tokens are changed, not their
    number: a model may compute a longer document by other rules and be causal all the same."""
    tokens = inputs.tokens[None, -12:]
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % vocabulary
    before, after = (model(input_ids=one, use_cache=False).logits[0, :6].float() for one in (tokens, changed))
    scale = max(1.0, before.abs().max().item())
    if (before - after).abs().max().item() > (1e-4 if is_exact else 0.05) * scale:
        raise UserError(
            f"{type(model).__name__} is not a causal language model: what it predicts for a token depends on the "
            "tokens after it; give a model that is made to predict the next token."
        )


def _logit_form(model: nn.Module, inputs: Inputs, is_exact: bool) -> tuple[float, float | None]:
    """Factor and soft cap between what the output head gives and the model's logits: found by comparing the two in
    fp32, read from the config otherwise."""
    return logit_form(model, inputs.tokens[None, -12:]) if is_exact else form_by_config(model)


def _fault_of(model: nn.Module, spec: ForwardSpec, trial: _Trial) -> str | None:
    """What is wrong with calling the model like this; None where nothing is."""
    inputs, expected, tolerance, leak = trial.inputs, trial.expected, trial.tolerance, trial.leak
    set_attention(model, PACKED_ATTENTION if spec.layout == "packed" else trial.own_attention)
    given = replace(inputs, longest=max(trial.longest, inputs.longest)) if spec.layout == "packed" else inputs
    first, changed = TRIAL_LENGTHS[0], inputs.tokens.clone()
    changed[:first] = (changed[:first] + 1) % trial.vocabulary
    if spec.switch is not None and spec.switch < inputs.longest:
        found = _one_by_one_differs(model, spec, inputs, expected)
        return None if found <= tolerance else f"losses differ by {found:.2g}"
    try:
        with torch.no_grad():
            found = token_losses(model, given, spec)[1].to(expected.dtype)
            # In half precision rounding hides a small leak from the comparison below. What stands in the first
            # document must not reach the others at all, whatever the precision.
            others = token_losses(model, replace(given, tokens=changed), spec)[1].to(expected.dtype)
    except Exception as error:  # the model's own code, called as it may not expect
        return first_line(error)[:200]
    worst = (found - expected).abs().max().item()
    if not worst <= tolerance:
        return f"losses differ by {worst:.2g}"
    if not (found[first:] - others[first:]).abs().max().item() <= leak:
        return LEAKS
    if spec.seq_idx and not _keeps_apart_in_training(model, spec, given, changed, leak):
        return LEAKS + " in training"
    return None


@torch.no_grad()
def _takes_branches(model: nn.Module, spec: ForwardSpec, trial: _Trial) -> bool:
    """Whether a document that begins with tokens of the one before it, which stand there once, has the losses that it
    has by itself, and does not see how the other goes on. Leaves the model with the attention of packed calls."""
    vocabulary = trial.vocabulary
    beside = trial_inputs(vocabulary, trial.inputs.tokens.device, (14, 5, 6))
    tokens = beside.tokens
    alone = [tokens[:14], torch.cat([tokens[:9], tokens[14:19]]), tokens[19:]]
    whole = replace(
        trial_inputs(vocabulary, tokens.device, (14, 14, 6)),
        tokens=torch.cat(alone),
        labels=torch.cat([beside.labels[:14], beside.labels[:9], beside.labels[14:]]),
    )
    places = torch.cat([torch.arange(14), torch.arange(9), torch.arange(14, 25)])
    positions = torch.cat([torch.arange(14), torch.arange(9, 14), torch.arange(6)])
    branched = replace(
        beside,
        positions=positions.to(tokens.device),
        longest=14,
        keys=whole.boundaries,
        places=places.to(tokens.device),
    )
    changed = tokens.clone()
    changed[9:14] = (changed[9:14] + 1) % vocabulary
    set_attention(model, trial.own_attention)
    expected = own_losses(model, whole)
    set_attention(model, PACKED_ATTENTION)
    try:
        found, others = (
            token_losses(model, replace(branched, tokens=one), spec)[1].to(expected.dtype) for one in (tokens, changed)
        )
    except Exception:  # the model's own code, called as it may not expect
        return False
    expected = torch.cat([expected[:14], expected[23:]])
    largest = max(1.0, expected.abs().max().item())
    differs, leaks = (found - expected).abs().max().item(), (found - others)[14:].abs().max().item()
    return differs <= (1e-4 if trial.is_exact else 0.05) * largest and leaks <= trial.leak


@torch.no_grad()
def _keeps_apart_in_training(
    model: nn.Module, spec: ForwardSpec, inputs: Inputs, changed: torch.Tensor, leak: float
) -> bool:
    """The same of what a model computes when it is trained: layers with state spaces have other kernels for that."""
    found = []
    model.train()
    try:
        for tokens in (inputs.tokens, changed):
            with torch.random.fork_rng():  # the same draws, for models that draw in training
                torch.manual_seed(0)
                found.append(token_losses(model, replace(inputs, tokens=tokens), spec)[1])
    except Exception:  # the model's own code, called as it may not expect
        return False
    finally:
        model.eval()
    first = TRIAL_LENGTHS[0]
    return (found[0][first:] - found[1][first:]).abs().max().item() <= leak


def _over_lengths(model: nn.Module, spec: ForwardSpec, trial: _Trial, long: int) -> tuple[ForwardSpec, str | None]:
    """The same with documents on both sides of `long` tokens; with `switch` where these must not be called together."""
    trial = _Trial.of(model, trial.vocabulary, lengths=(5, long + 11, 9, long + 4))
    inputs, expected, tolerance = trial.inputs, trial.expected, trial.tolerance
    set_attention(model, PACKED_ATTENTION if spec.layout == "packed" else trial.own_attention)
    try:
        with torch.no_grad():
            found = token_losses(model, inputs, spec)[1].to(expected.dtype)
        if (found - expected).abs().max().item() <= tolerance:
            return spec, None
        if _one_by_one_differs(model, spec, inputs, expected) <= tolerance:
            return replace(spec, switch=long), None
    except Exception as error:  # the model's own code, called as it may not expect
        return spec, f"documents of more than {long} tokens: {first_line(error)[:200]}"
    return spec, "long documents differ"


@torch.no_grad()
def _one_by_one_differs(model: nn.Module, spec: ForwardSpec, inputs: Inputs, expected: torch.Tensor) -> float:
    """How far losses are off with every document called by itself; infinite where it cannot be."""
    found = []
    try:
        for start, end in itertools.pairwise(inputs.boundaries.tolist()):
            found.append(token_losses(model, part_of(inputs, start, end), spec)[1].to(expected.dtype))
    except Exception:  # the model's own code, called as it may not expect
        return float("inf")
    return (torch.cat(found) - expected).abs().max().item()


@torch.no_grad()
def own_losses(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    """The losses by the model's own forward pass, one document at a time; float64 where the model is fp32."""
    losses = []
    bounds = inputs.boundaries.tolist()
    for start, end in itertools.pairwise(bounds):
        logits = model(input_ids=inputs.tokens[None, start:end], use_cache=False).logits[0]
        losses.append(F.cross_entropy(logits.float(), inputs.labels[start:end], reduction="none"))
    found = torch.cat(losses)
    return found.double() if next(model.parameters()).dtype == torch.float32 else found


def _slower(model: nn.Module, reasons: list[str], *, alone: bool = False) -> str:
    instead = "they are called one by one" if alone else "they are padded"
    missing = missing_kernels(model)
    advice = f" Its code has kernels of {listed(missing)}, not installed here, with which packing is tried, too."
    return (
        f"{type(model).__name__} does not take packed documents ({listed(reasons, '; ')}); {instead} instead, "
        f"which is right but slower.{advice if missing else ''}"
    )


def installed_kernels() -> list[str]:
    """Those of the libraries for what runs along tokens that are there: with others a model may be called otherwise."""
    return [package for package in KERNEL_PACKAGES if importlib.util.find_spec(package) is not None]


def missing_kernels(model: nn.Module) -> list[str]:
    """Libraries for what runs along tokens that the model's code would use if they were there."""
    source = inspect.getsource(inspect.getmodule(type(model)) or type(model))
    return [
        name
        for package, name in KERNEL_PACKAGES.items()
        if re.search(rf"[\"']({package}|{name})[\"']", source) and package not in installed_kernels()
    ]
