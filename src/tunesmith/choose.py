"""Run -> Plan: a new one, or the one that a run was begun with.

Without torch where nothing was begun yet: whoever starts ranks has no other use for it, and they would wait for it.
"""

from __future__ import annotations

from pathlib import Path

from tunesmith.checkpoint import run_folder
from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.plan.documents import sample_lengths
from tunesmith.plan.hardware import Hardware, probe, shared
from tunesmith.plan.models import read_facts
from tunesmith.plan.place import Place, here
from tunesmith.plan.plan import Plan
from tunesmith.plan.search import make_plan, refusal


def plan_run(run: Run, hardware: Hardware | None = None) -> Plan:
    """The plan for a run on this machine (or the hardware given). Reads the model's config, not its weights, and a
    little of the data."""
    facts = read_facts(run.model, trust_remote_code=run.trust_remote_code)
    return make_plan(run, facts, hardware or probe(), lengths=sample_lengths(run))


def choose_plan(run: Run, *, plan: Plan | None = None, ranks: int | None = None) -> Plan:
    """The plan that `prepare_run` will obey: the one given, that of the run's folder where it still fits, or a new one
    for so many ranks on this machine."""
    place, folder = here(), Path(run.output)
    if place.is_started:
        ranks = None  # as many as there are
    if plan is not None:
        _check_agreement(run, plan)
        facts = read_facts(run.model, trust_remote_code=run.trust_remote_code)
        if (why := refusal(run, plan, facts, probe())) is not None:
            raise UserError(f"The plan cannot be carried out: {why}.")
        return plan
    before = run_folder.read_identity(folder)
    if before is not None and _is_of(run, before):
        planned = run_folder.read_plan(folder)
        if planned is not None and _can_run(planned, run, place, ranks) and _suits_gpu(planned, run):
            return planned
    return plan_run(run, shared(probe(), ranks) if ranks else None)


def _is_of(run: Run, before: run_folder.Identity) -> bool:
    """Whether a folder was begun with these settings and these weights."""
    from tunesmith.model.load import model_fingerprint

    return before.is_like(run_folder.identify(run, data=before.data, model=model_fingerprint(run)))


def _can_run(plan: Plan, run: Run, place: Place, ranks: int | None) -> bool:
    """Whether a plan made earlier still fits: its devices are here, and no others are asked for now."""
    if run.device not in ("auto", plan.device):
        return False
    if place.is_started or ranks is not None:
        return plan.mesh.ranks == (place.ranks if place.is_started else ranks)
    if plan.device == "cpu":
        return True
    import torch

    return torch.cuda.device_count() >= plan.mesh.ranks


def _suits_gpu(plan: Plan, run: Run) -> bool:
    """Whether the GPU that is here now can do what was planned for the one that was here then."""
    if plan.device == "cpu":
        return True
    facts = read_facts(run.model, trust_remote_code=run.trust_remote_code)
    return refusal(run, plan, facts, probe()) is None


def _check_agreement(run: Run, plan: Plan) -> None:
    """A plan made by hand decides what the settings leave open; what they say, it may not contradict."""
    asked = "int8" if run.lora.bits == 8 else "nf4"
    if run.method == "qlora" and plan.storage != asked:
        raise UserError(
            f"The plan's storage is {plan.storage}, but method: qlora with lora.bits {run.lora.bits} holds the base in "
            f"{asked}; make the plan anew by `tunesmith plan`, or leave --plan out."
        )
    if run.optimizer_states not in (None, plan.optimizer_states):
        raise UserError(
            f"The plan's optimizer_states is {plan.optimizer_states}, but optimizer: {run.optimizer} makes it "
            f"{run.optimizer_states}; change one of the two, or leave --plan out."
        )
    if plan.release_gradients and (run.max_grad_norm is not None or plan.accumulation > 1):
        raise UserError(
            "The plan's release_gradients uses each gradient at once, but "
            + (
                f"max_grad_norm {run.max_grad_norm:g} needs them all; say max_grad_norm: null"
                if run.max_grad_norm is not None
                else f"a step has {plan.accumulation} micro-batches to sum; raise its micro_batch"
            )
            + ", or release_gradients: false in the plan."
        )
    sequences = max(1, round(run.batch_tokens / plan.sequence_length))
    for setting, wanted, name in (
        ("learning_rate", run.learning_rate, "learning_rate"),
        ("sequence_length", run.sequence_length, "sequence_length"),
        ("batch_tokens", sequences, "sequences_per_step"),
    ):
        planned = getattr(plan, name)
        if setting in run.model_fields_set and wanted is not None and wanted != planned:
            raise UserError(
                f"The plan's {name} is {planned}, but {setting} in the settings makes it {wanted}; change one of the "
                "two, or leave --plan out."
            )
