"""The beginning of a run, up to its weights: plan, tokens, and whether its folder may be continued and has room."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tunesmith.checkpoint.room import check_room, result_bytes
from tunesmith.checkpoint.store import CheckpointStore
from tunesmith.config.schema import Run
from tunesmith.data.labels import needs_labels, with_labels
from tunesmith.data.prepare import Prepared, answers_reason, unread_fields
from tunesmith.errors import UserError, listed
from tunesmith.infer.described import beside
from tunesmith.model import load, lora, side_files
from tunesmith.model.head import has_head, make_head
from tunesmith.model.probe import Probed, probe_run
from tunesmith.model.save import remove_leftovers
from tunesmith.objectives import objective_of
from tunesmith.parallel.ranks import Ranks
from tunesmith.plan.pairs import check_pairs
from tunesmith.plan.plan import Plan
from tunesmith.rewards import Rewards
from tunesmith.run import folder as run_folder
from tunesmith.run.choose import Progress, plan_and_data, tokenize_as_called, will_write, with_label_reason
from tunesmith.run.engine import check_engine
from tunesmith.run.initial import make_start
from tunesmith.run.rollout import check_rewards
from tunesmith.run.task_scores import read_tasks
from tunesmith.run.teacher import check_teacher


@dataclass(frozen=True)
class PreparedRun:
    """What is known before the weights are loaded: enough to find every mistake in settings and data."""

    run: Run
    plan: Plan
    data: Prepared
    identity: run_folder.Identity
    checkpoints: CheckpointStore
    resume_from: CheckpointStore
    warnings: tuple[str, ...] = ()
    """What was noticed about the files that the result will have."""
    is_continued: bool = False
    """There is something of an earlier sitting to go on from."""
    accept_changes: bool = False


def prepare_run(
    run: Run,
    *,
    plan: Plan | None = None,
    ranks: int | None = None,
    accept_changes: bool = False,
    saves: bool = True,
    warn: Callable[[str], None],
    progress: Progress | None = None,
) -> PreparedRun:
    """Everything up to the weights: plan, tokens, and whether the run folder may be continued and, where the run
    `saves` anything, has room.

    The folder must be locked. A run that is continued keeps the plan it was started with, since the last bits of its
    losses depend on how steps are cut into micro-batches.
    """
    folder = Path(run.output)
    is_labelled, run = needs_labels(run), with_labels(run)
    before = run_folder.read_identity(folder)
    planned = run_folder.read_plan(folder) if before else None
    rewards = _check_settings(run)
    model = load.model_fingerprint(run)
    adapted, probed, notes = _try_model(run)  # what cannot be trained is refused before data are read
    chosen, data = plan_and_data(run, probed=probed, plan=plan, ranks=ranks, progress=progress)
    if is_labelled:
        chosen = with_label_reason(chosen, run)
    check_rewards(rewards, (*data.train, *data.evals))
    read_tasks(run, chosen)
    if data.bad:
        warn(f"All records that were left out are in {run_folder.write_bad_records(folder, data.bad)}.")

    identity = run_folder.identify(run_folder.decided(run, chosen), data=data.fingerprint, model=model)
    if before is not None and not before.is_like(identity) and not run_folder.has_checkpoints(folder):
        before = None  # nothing was trained yet that could be continued
    if before is not None:
        if not accept_changes:
            _refuse_changes(folder, before, identity, planned, chosen, is_given=plan is not None)
        identity = _continuing(identity, before)

    expected = will_write(run, chosen)
    if saves:
        check_room(run, chosen, expected, warn)
    checkpoints, resume_from = _stores(run, identity, warn, leave=result_bytes(run, expected))
    run_folder.write_start(folder, identity, chosen)
    mended = _write_side_files(run, data) if saves else []
    is_continued = before is not None and run_folder.has_checkpoints(folder)
    if saves and not is_continued:
        _warn_of_unread_fields(run, warn)
    make_start(adapted, chosen, data.train, is_continued=is_continued)
    return PreparedRun(
        adapted,
        chosen,
        data,
        identity,
        checkpoints,
        resume_from,
        warnings=(*mended, *dict.fromkeys(notes)),
        is_continued=is_continued,
        accept_changes=accept_changes,
    )


def _check_settings(run: Run) -> Rewards:
    """UserError where settings contradict each other or the model's config; the rewards that they name, in which
    mistakes are found before anything is read."""
    check_pairs(run)
    check_teacher(run)
    check_engine(run)
    rewards = Rewards(run.rewards)
    if has_head(run):
        make_head(run, load.load_skeleton(run))
    return rewards


def _try_model(run: Run) -> tuple[Run, Probed, list[str]]:
    """The run with the linears that carry its adapters, what the probe has found of its model, and what to say about
    it. UserError where the model cannot be trained, or has none of the linears that were chosen."""
    device = run.device if run.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    tried = probe_run(run, device=device)
    if run.has_lora and (run.lora.targets != "all-linear" or run.lora.layers is not None):
        lora.find_targets(load.load_skeleton(run), run.lora)
    return tried


def _continuing(identity: run_folder.Identity, before: run_folder.Identity) -> run_folder.Identity:
    """The identity of a run that goes on from `before`, whose checkpoints are of that one's lineage, or of an earlier
    one."""
    earlier = before.earlier if before.is_like(identity) else (before.lineage, *before.earlier)
    return replace(identity, earlier=tuple(lineage for lineage in earlier if lineage != identity.lineage))


def _write_side_files(run: Run, data: Prepared) -> list[str]:
    """Write what will lie beside the result into the run's folder, and say what was mended in it."""
    folder = Path(run.output) / side_files.FOLDER
    remove_leftovers(folder)
    reasons = answers_reason(data.encoder, data.train)
    return side_files.make(run, folder, **beside(run, data.encoder, reasons=reasons))


def _warn_of_unread_fields(run: Run, warn: Callable[[str], None]) -> None:
    for dataset in run.data:
        if names := unread_fields(dataset, objective_of(run).records):
            warn(f"{dataset.title}: not read of its records: {listed(names, most=6)}.")


def _refuse_changes(
    folder: Path,
    before: run_folder.Identity,
    identity: run_folder.Identity,
    planned: Plan | None,
    chosen: Plan,
    *,
    is_given: bool,
) -> None:
    """UserError where a run that would be continued was started differently: with other settings, data or weights, or
    by another plan than the one that `is_given` now."""
    changes: list[str] = []
    if not before.is_like(identity):
        changes = run_folder.differences(before, identity)
    elif planned is not None and is_given:
        changes = run_folder.plan_differences(planned, chosen)
    elif planned is not None and chosen.storage != planned.storage:
        changes = [f'the plan\'s storage was "{planned.storage}" and is now "{chosen.storage}"']
    if changes:
        raise UserError(
            f"The run in {folder} was started differently: {listed(changes, '; ')}. Put it back, choose another "
            "output, or go on with the changes by `tunesmith train --accept-changes`."
        )


def _stores(
    run: Run, identity: run_folder.Identity, warn: Callable[[str], None], *, leave: int
) -> tuple[CheckpointStore, CheckpointStore]:
    """Where checkpoints go, and where to look for one to continue from: until the first checkpoint with changes that
    were accepted, the newest is one from before them. `leave`: bytes that the result needs."""
    related = (identity.lineage, *identity.earlier)

    def store_of(lineage: str) -> CheckpointStore:
        where = Path(run.output) / "checkpoints"
        return CheckpointStore(where, lineage, keep=run.keep, warn=warn, relatives=related, leave=leave)

    checkpoints = store_of(identity.lineage)
    if not identity.earlier:
        return checkpoints, checkpoints
    stores = [checkpoints, *map(store_of, identity.earlier)]
    return checkpoints, max(stores, key=lambda store: newest.step if (newest := store.latest()) else -1)


def start_run(run: Run, others: Ranks, **how: Any) -> PreparedRun:
    """`prepare_run` on the first rank, as `how` says, then `join_run` on the others: on each node the first of them,
    which may have to tokenize for it, before the rest."""
    ready = prepare_run(run, **how) if others.is_first else None
    others.wait()
    is_local_first = others.environment.local_rank == 0
    for is_turn in (is_local_first, not is_local_first):
        if ready is None and is_turn:
            ready = join_run(run)
        others.wait()
    assert ready is not None
    return ready


def join_run(run: Run) -> PreparedRun:
    """What `prepare_run` has decided on the first rank, for the others: they read its folder and write nothing."""
    folder = Path(run.output)
    plan, identity = run_folder.read_plan(folder), run_folder.read_identity(folder)
    if plan is None or identity is None:
        raise UserError(f"{folder} is not the same on all ranks; set output to a folder that all of them share.")
    data = tokenize_as_called(run, plan, plan.forward)
    if data.fingerprint != identity.data:
        raise UserError("The training data are not the same on all ranks; give each node the same files.")
    checkpoints = CheckpointStore(folder / "checkpoints", identity.lineage, keep=run.keep)
    if plan.adapted is not None:
        run = run.model_copy(update={"lora": run.lora.model_copy(update={"targets": list(plan.adapted)})})
    return PreparedRun(run, plan, data, identity, checkpoints, checkpoints)
