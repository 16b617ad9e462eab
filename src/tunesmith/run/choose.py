"""Run -> Plan: a new one, or the one that a run was begun with.

Without torch where nothing was begun yet: whoever starts ranks has no other use for it, and they would wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tunesmith.config.schema import Run
from tunesmith.errors import UserError, listed
from tunesmith.launch.rank_environment import PLAN, RankEnvironment, read_rank_environment
from tunesmith.objectives import objective_of
from tunesmith.plan.defaults import Amount
from tunesmith.plan.documents import Padded, guess_held_out, measure, outermost, sample_lengths
from tunesmith.plan.hardware import Hardware, probe, shared
from tunesmith.plan.models import as_teacher, read_config, read_facts
from tunesmith.plan.pairs import check_pairs
from tunesmith.plan.plan import ForwardSpec, Plan, Reason
from tunesmith.plan.search import Written, refusal, search, written
from tunesmith.plan.task import check_rate
from tunesmith.run import folder as run_folder

if TYPE_CHECKING:
    from tunesmith.data.prepare import Prepared
    from tunesmith.model.probe import Probed
    from tunesmith.plan.facts import ModelFacts


LABELS = "labels"
LOOKED_AT = 4000
"""Examples of steps whose documents are padded, before a plan is made."""
Progress = Callable[[str, int, int | None], None]
"""Told what is being done, how far it is, and out of how much (None: not known)."""


def facts_of(run: Run) -> ModelFacts:
    """The model's sizes, those of its teacher, and how many parameters an adapter of peft's trains."""
    check_pairs(run)
    facts = read_facts(run.model, trust_remote_code=run.trust_remote_code)
    if (teacher := run.distillation.teacher) is not None:
        with as_teacher(teacher):
            facts = facts.changed(teacher=read_facts(teacher, trust_remote_code=run.trust_remote_code))
    if objective_of(run).has_head:  # in place of the one for tokens, and small
        facts = facts.changed(tied=True, has_head=False)
    facts = facts.changed(has_router_loss=_asks_router_loss(run))
    if run.method != "peft":
        return facts
    from tunesmith.model.adapters import is_prompt, trained_parameters

    return facts.changed(adapter=trained_parameters(run), packs=facts.packs and not is_prompt(run))


def found_facts(run: Run, hardware: Hardware, probed: Probed) -> ModelFacts:
    """What a plan must know of the model, with what the probe has found of it."""
    from tunesmith.model.kept import count_own, count_work
    from tunesmith.model.paired import count_paired

    facts = facts_of(run)
    facts = facts.changed(
        packs=probed.spec.lengths(run.sequence_length) is None,
        runs_along=probed.spec.seq_idx,
        reuses_weights=probed.reuses_weights,
        wrong_paths=probed.wrong_paths,
        has_router_loss=facts.has_router_loss and probed.router_loss is not None,
    )
    if probed.spec.seq_idx and any(kind.state_space is not None for kind in facts.kinds):
        facts = facts.changed(scan="ours" if "scan" in (probed.kernels or ()) else "mamba-ssm")
    on_gpu = bool(hardware.gpus) and run.device != "cpu"
    if not facts.is_causal:
        facts = facts.changed(paired=count_paired(run, on_gpu=on_gpu))
    own = count_own(run, on_gpu=on_gpu, kernels=probed.kernels or ())
    work = count_work(run, kernels=probed.kernels or ()) if on_gpu else None
    return facts.with_findings(probed.kernels, probed.kept, own, work)


def facts_before(run: Run, hardware: Hardware, tell: Callable[[str], None] = lambda _: None) -> ModelFacts:
    """What a plan must know of the model before a run is begun. Only models of families without a formula are probed,
    on the CPU; `tell` is told so, since the first time takes up to a minute."""
    facts = facts_of(run)
    if facts.note is None and facts.is_causal:
        return facts
    if facts.note is None:
        from tunesmith.model.paired import count_paired

        on_gpu = bool(hardware.gpus) and run.device != "cpu"
        return facts.changed(paired=count_paired(run, on_gpu=on_gpu))
    tell("Trying the model's code on a small proxy")
    from tunesmith.model.probe import probe_run

    run, probed, _ = probe_run(run)
    return facts if probed.spec is None else found_facts(run, hardware, probed)


def new_plan(
    run: Run, hardware: Hardware | None = None, data: Prepared | None = None, probed: Probed | None = None
) -> Plan:
    """A new plan for a run on this machine (or the hardware given), whatever its folder holds. Reads the model's
    config, not its weights, and of the data a sample, unless it is tokenized already. Without what the probe has found,
    the model is assumed to be like others of its family."""
    hardware = hardware or probe()
    facts = facts_of(run) if probed is None else found_facts(run, hardware, probed)
    size = data.size if data else measure(run)
    return search(
        run,
        facts,
        hardware,
        lengths=sample_lengths(run),
        size=size,
        held_out=data.held_out if data else guess_held_out(run, size),
        draw=partial(_padded_documents, run, data, probed) if data and probed else None,
    ).plan


def _padded_documents(run: Run, data: Prepared, probed: Probed, amount: Amount) -> Padded | None:
    """The documents of the run's first steps, of as many as can be looked at in a second or two; None where documents
    are packed."""
    from tunesmith.data.loader import Loader

    lengths = probed.spec.lengths(amount.sequence_length)
    if lengths is None or not lengths[0]:  # they are packed, but for long ones
        return None
    loader = Loader(
        data.train,
        data.weights,
        seed=run.seed,
        sequence_length=amount.sequence_length,
        sequences_per_step=amount.sequences,
        epochs=run.epochs or amount.epochs,
        steps=run.steps,
    )
    steps, left = [], LOOKED_AT
    for step in range(loader.total_steps):
        if left <= 0:
            break
        steps.append(loader.widths(step))
        left -= len(steps[-1])
    widths = np.concatenate([store.widths for store in data.train])
    sides = 1 if widths.ndim == 1 else widths.shape[1]
    longest = np.unique(widths.reshape(-1, sides), axis=0)
    objective = objective_of(run)
    widths_of_steps = tuple(widths_of_step.reshape(-1, sides) for widths_of_step in steps)
    return Padded(widths_of_steps, outermost(longest), objective.documents, len(steps) == loader.total_steps)


def launch_plan(run: Run, *, plan: Plan | None = None, ranks: int | None = None) -> Plan:
    """The plan by which a launcher starts ranks on this machine, before they find theirs by `plan_and_data`: that of
    the run's folder where it still fits, a rough one where the number of ranks cannot depend on the data, else the same
    as theirs."""
    if (kept := _kept_plan(run, plan, ranks)) is not None:
        return kept
    run = run_folder.as_begun(run, _begun(run))
    hardware = _hardware(ranks)
    rough = new_plan(run, hardware)
    depends_on_data = run.batch_tokens is None or run.batch_tokens < run.sequence_length
    if depends_on_data and (hardware.gpu_count > 1 or hardware.processes > 1):
        from tunesmith.model.probe import probe_run

        return plan_and_data(run, ranks=ranks, probed=probe_run(run)[1])[0]
    return rough


def plan_and_data(
    run: Run,
    *,
    probed: Probed,
    plan: Plan | None = None,
    ranks: int | None = None,
    progress: Progress | None = None,
) -> tuple[Plan, Prepared]:
    """The plan that a run obeys, and its tokenized data. The first of these: the plan given, that of the run's folder
    where it still fits, the one that its ranks were started by, a new one made for the tokenized data. It has what the
    probe has found."""
    _check_objective(run, probed)
    if (known := _kept_plan(run, plan, ranks) or _plan_from_launcher()) is not None:
        known = _completed(known, run, probed)
        return known, tokenize_as_called(run, known, probed.spec, progress)
    run = run_folder.as_begun(run, _begun(run))
    hardware = _hardware(ranks)
    new_plan(run, hardware)  # what is wrong with the settings is said before an hour of tokenizing
    data = tokenize_as_called(run, None, probed.spec, progress)
    return _completed(new_plan(run, hardware, data, probed), run, probed), data


def _asks_router_loss(run: Run) -> bool:
    """Whether the settings or, where they leave it open, the model's config ask for the load-balancing loss of its
    routers; some families have none."""
    objective = objective_of(run)
    if run.router_aux_loss_coef is not None or objective.has_head or objective.has_embeddings:
        return bool(run.router_aux_loss_coef)
    config = read_config(run.model)
    text = config.get("text_config")
    return (text if isinstance(text, dict) else config).get("output_router_logits") is True


def _completed(plan: Plan, run: Run, probed: Probed) -> Plan:
    """The plan with what the probe has found, and the weight of the routers' load-balancing loss."""
    plan, asked = with_findings(plan, probed), run.router_aux_loss_coef
    if _shares_prompts(run, plan.forward):  # captured passes have one number of keys
        plan = plan.model_copy(update={"cuda_graphs": False})
    if probed.router_loss is None and asked:
        raise UserError(
            f"router_aux_loss_coef: {facts_of(run).architecture} has no load-balancing loss in transformers, since it "
            "has no routers or balances them by a bias; leave it out."
        )
    if probed.router_loss is None or plan.router_loss is not None:
        return plan
    weight = asked if asked is not None else probed.router_loss if _asks_router_loss(run) else 0.0
    if asked is not None:
        why = "router_aux_loss_coef in the settings"
    elif weight:
        why = "the model's config has output_router_logits"
    else:
        why = "the model's config does not ask for it (output_router_logits); router_aux_loss_coef would"
    reason = Reason(topic="load-balancing loss of the routers", choice=f"{weight:g}" if weight else "none", why=why)
    return plan.changed(router_loss=weight, reasons=(*plan.reasons, reason))


def with_label_reason(plan: Plan, run: Run) -> Plan:
    """The plan with the labels that were read from the data."""
    why = "the data's own, sorted; `labels` names them in another order"
    reason = Reason(topic=LABELS, choice=listed(run.labels), why=why)
    return plan.changed(reasons=(*(other for other in plan.reasons if other.topic != LABELS), reason))


def with_findings(plan: Plan, probed: Probed) -> Plan:
    """The plan with what the probe has found. Where micro-batches go by the lengths of documents, they change their
    shape and number with every step: there is nothing to compile once, and no gradient is whole after one. UserError
    where a plan that was written by hand asks for an encoder-decoder's documents end to end."""
    if plan.forward is not None and plan.forward.layout != "encoder-decoder" == probed.spec.layout:
        raise UserError(
            f"The plan has `forward.layout: {plan.forward.layout}`, but an encoder-decoder reads its sources and "
            "writes its targets in rows of their own, which are not packed; leave `forward` out of the plan."
        )
    spec = probed.spec
    if spec.branches and plan.forward is not None and not plan.forward.branches:  # a run goes on as it was begun
        spec = replace(spec, branches=False)
    by_length = probed.spec.lengths(plan.sequence_length) is not None
    findings: dict[str, Any] = {
        "forward": spec,
        "fuse_adapters": probed.can_fuse,
        "adapted": probed.adapted,
        "by_length": by_length,
    }
    if by_length:
        findings |= {"is_compiled": False, "cuda_graphs": False, "optimizer_in_backward": False}
    return plan.model_copy(update=findings)


def tokenize_as_called(
    run: Run, plan: Plan | None, spec: ForwardSpec | None, progress: Progress | None = None
) -> Prepared:
    """The data of a run as its model is called with them: with the prompts of pairs once, where it takes that."""
    data = tokenize(run, plan, progress)
    spec = spec if plan is None or plan.forward is None else plan.forward
    return data.sharing() if _shares_prompts(run, spec) else data


def _shares_prompts(run: Run, spec: ForwardSpec | None) -> bool:
    return objective_of(run).has_pairs and spec is not None and spec.branches


def tokenize(run: Run, plan: Plan | None, progress: Progress | None = None, tokenizer: Any = None) -> Prepared:
    """The data of a run, by the plan where there is one already, and the tokenizer given or that of its model."""
    from tunesmith.data.prepare import BadRecords, prepare
    from tunesmith.model import load

    config = load.load_config(run)
    tokenizer = tokenizer or load.load_tokenizer(run)
    with suppress(AttributeError):
        tokenizer.model_max_length = int(1e30)  # our own guard counts and reports lengths
    positions = load.max_positions(config)
    if positions is not None and positions < run.sequence_length and "sequence_length" not in run.model_fields_set:
        run = run.model_copy(update={"sequence_length": positions})
    vocabulary = load.vocabulary_size(config)
    try:
        data = prepare(
            run,
            tokenizer,
            vocab_size=vocabulary,
            max_length=positions,
            held_out=plan.held_out if plan else None,
            eval_length=plan.sequence_length if plan else None,
            decoder_start=(load.decoder_start(config),) if check_pairs(run) else None,
            progress=progress,
        )
    except BadRecords as errors:
        if len(errors.bad) > 1:
            errors.messages.append(f"All of them are in {run_folder.write_bad_records(Path(run.output), errors.bad)}.")
        raise
    _check_embedded(data, usable=load.usable_tokens(config), vocabulary=vocabulary)
    longest = max(int(store.lengths.max()) for store in data.train)
    if plan is not None and longest > plan.sequence_length:
        raise UserError(
            f"The plan packs sequences of {plan.sequence_length:,} tokens, but the longest example has {longest:,} "
            "after being cut to sequence_length; raise sequence_length in the plan, or lower it in the settings."
        )
    return data


def _check_embedded(data: Prepared, *, usable: int, vocabulary: int) -> None:
    """UserError where the data have tokens of which some embedding has no row."""
    if usable == vocabulary:
        return
    for store in (*data.train, *data.evals):
        highest = max((int(store.document(d)[0].max()) for d in range(store.document_count)), default=-1)
        if highest >= usable:
            raise UserError(
                f"model: its config.json has vocab_size_per_layer_input {usable:,} and vocab_size {vocabulary:,}, and "
                f"the data have the token id {highest:,}, which the first has no embedding for; correct that file by "
                "the original's, or leave such tokens out of the data."
            )


def _check_objective(run: Run, probed: Probed) -> None:
    hidden = facts_of(run).hidden
    if large := [size for size in run.embedding.matryoshka if size >= hidden]:
        raise UserError(
            f"embedding.matryoshka has {large[0]} dimensions, but the model's vectors have {hidden}, which are trained "
            "in any case; give smaller numbers."
        )
    lengths = probed.spec.lengths(run.sequence_length)
    if objective_of(run).documents > 1 and lengths is not None and lengths[1] is not None:
        raise UserError(
            f"objective: {run.objective} compares two answers in one call, but this model must be called with "
            f"documents of more than {lengths[1]} tokens one by one; "
            + (f"lower sequence_length to {lengths[1]}, or " if lengths[1] >= 8 else "")
            + "choose another model."
        )


def _kept_plan(run: Run, plan: Plan | None, ranks: int | None) -> Plan | None:
    """The plan given, or that of the run's folder where it still fits."""
    environment = read_rank_environment()
    if plan is not None:
        _check_agreement(run, plan)
        check_rate(run, plan.learning_rate)
        facts = facts_of(run)
        if (why := refusal(run, plan, facts, _hardware(plan.mesh.ranks))) is not None:
            raise UserError(f"The plan cannot be carried out: {why}.")
        return plan
    if _begun(run) is None:
        return None
    planned = run_folder.read_plan(Path(run.output))
    asked = None if environment.is_started else ranks
    if planned is not None and _can_run(planned, run, environment, asked) and _suits_gpu(planned, run):
        return planned
    return None


def _plan_from_launcher() -> Plan | None:
    """The plan that these ranks were started by, where a launcher started them."""
    text = os.environ.get(PLAN) if read_rank_environment().is_started else None
    return Plan.model_validate_json(text) if text else None


def _hardware(ranks: int | None) -> Hardware:
    """What the ranks have; where they are started already, they are as many as there are."""
    return shared(probe(), ranks) if ranks and not read_rank_environment().is_started else probe()


def _begun(run: Run) -> run_folder.Identity | None:
    """How the run's folder was begun, if that was with these settings."""
    before = run_folder.read_identity(Path(run.output))
    return before if before is not None and _is_of(run, before) else None


def will_write(run: Run, plan: Plan) -> Written:
    """How large the checkpoints and the result of a run will be. Reads the model's config, not its weights."""
    return written(run, plan, facts_of(run), probe())


def _is_of(run: Run, before: run_folder.Identity) -> bool:
    """Whether a folder was begun with these settings and these weights."""
    from tunesmith.model.load import model_fingerprint

    begun = run_folder.as_begun(run, before)
    return before.is_like(run_folder.identify(begun, data=before.data, model=model_fingerprint(run)))


def _can_run(plan: Plan, run: Run, environment: RankEnvironment, ranks: int | None) -> bool:
    """Whether a plan made earlier still fits: its devices are here, and no others are asked for now."""
    if run.device not in ("auto", plan.device):
        return False
    if environment.is_started or ranks is not None:
        return plan.mesh.ranks == (environment.ranks if environment.is_started else ranks)
    if plan.device == "cpu":
        return True
    import torch

    return torch.cuda.device_count() >= plan.mesh.ranks


def _suits_gpu(plan: Plan, run: Run) -> bool:
    """Whether the GPU that is here now can do what was planned for the one that was here then."""
    if plan.device == "cpu":
        return True
    facts = facts_of(run)
    return refusal(run, plan, facts, probe()) is None


def _check_agreement(run: Run, plan: Plan) -> None:
    """A plan made by hand decides what the settings leave open; what they say, it may not contradict."""
    asked = "int8" if run.lora.bits == 8 else "nf4"
    if run.method in ("qlora", "loqt") and plan.storage != asked:
        raise UserError(
            f"The plan's storage is {plan.storage}, but method: {run.method} with lora.bits {run.lora.bits} holds the "
            f"base in {asked}; make the plan anew by `tunesmith plan`, or leave --plan out."
        )
    if run.optimizer_states not in (None, plan.optimizer_states):
        raise UserError(
            f"The plan's optimizer_states is {plan.optimizer_states}, but optimizer: {run.optimizer} makes it "
            f"{run.optimizer_states}; change one of the two, or leave --plan out."
        )
    if plan.optimizer_in_backward and (run.max_grad_norm is not None or plan.accumulation_steps > 1):
        raise UserError(
            "The plan's optimizer_in_backward uses each gradient at once, but "
            + (
                f"max_grad_norm {run.max_grad_norm:g} needs them all; say max_grad_norm: null"
                if run.max_grad_norm is not None
                else f"a step has {plan.accumulation_steps} micro-batches to sum; raise its micro_batch"
            )
            + ", or optimizer_in_backward: false in the plan."
        )
    if run.sequence_length < plan.sequence_length and "sequence_length" in run.model_fields_set:
        raise UserError(
            f"The plan's sequence_length is {plan.sequence_length}, but the settings allow {run.sequence_length} at "
            "most; change one of the two, or leave --plan out."
        )
    sequences = run.batch_tokens and max(1, round(run.batch_tokens / plan.sequence_length))
    for setting, wanted, name in (
        ("learning_rate", run.learning_rate, "learning_rate"),
        ("batch_tokens", sequences, "sequences_per_step"),
    ):
        planned = getattr(plan, name)
        if wanted is not None and wanted != planned:
            raise UserError(
                f"The plan's {name} is {planned}, but {setting} in the settings makes it {wanted}; change one of the "
                "two, or leave --plan out."
            )
