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
from tunesmith.model.probe import probe_run
from tunesmith.model.save import remove_leftovers
from tunesmith.objectives import objective_of
from tunesmith.parallel.ranks import Ranks
from tunesmith.plan.pairs import check_pairs
from tunesmith.plan.plan import Plan
from tunesmith.rewards import Rewards
from tunesmith.run import folder as run_folder
from tunesmith.run.choose import Progress, make_plan, tokenize_as_called, will_write, with_label_reason
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
    check_pairs(run)
    check_teacher(run)
    check_engine(run)
    rewards = Rewards(run.rewards)  # mistakes in them are found before anything is read
    if has_head(run):
        make_head(run, load.load_skeleton(run))
    model = load.model_fingerprint(run)
    here = run.device if run.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    adapted, probed, notes = probe_run(run, device=here)  # what cannot be trained is refused before data are read
    if run.has_lora and (run.lora.targets != "all-linear" or run.lora.layers is not None):
        lora.find_targets(load.load_skeleton(run), run.lora)
    chosen, data = make_plan(run, probed=probed, plan=plan, ranks=ranks, progress=progress)
    if is_labelled:
        chosen = with_label_reason(chosen, run)
    check_rewards(rewards, (*data.train, *data.evals))
    read_tasks(run, chosen)
    if data.bad:
        warn(f"All records that were left out are in {run_folder.write_bad_records(folder, data.bad)}.")
    identity = run_folder.identify(run_folder.decided(run, chosen), data=data.fingerprint, model=model)
    has_changed = before is not None and not before.is_like(identity)
    if has_changed and not run_folder.has_checkpoints(folder):
        before, has_changed = None, False  # nothing was trained yet that could be continued
    if before is not None:
        if not accept_changes:
            _refuse_changes(folder, before, identity, planned, chosen, is_given=plan is not None)
        earlier = (before.lineage, *before.earlier) if has_changed else before.earlier
        identity = replace(identity, earlier=tuple(one for one in earlier if one != identity.lineage))

    expected = will_write(run, chosen)
    if saves:
        check_room(run, chosen, expected, warn)
    checkpoints, resume_from = _stores(run, identity, warn, leave=result_bytes(run, expected))
    run_folder.write_start(folder, identity, chosen)
    said: list[str] = []
    if saves:
        remove_leftovers(folder / side_files.FOLDER)
        reasons = answers_reason(data.encoder, data.train)
        said = side_files.make(run, folder / side_files.FOLDER, **beside(run, data.encoder, reasons=reasons))
    is_continued = before is not None and run_folder.has_checkpoints(folder)
    if saves and not is_continued:
        for one in run.data:
            if names := unread_fields(one, objective_of(run).records):
                warn(f"{one.title}: not read of its records: {listed(names, most=6)}.")
    make_start(adapted, chosen, data.train, is_continued=is_continued)
    more = {"warnings": (*said, *dict.fromkeys(notes)), "is_continued": is_continued, "accept_changes": accept_changes}
    return PreparedRun(adapted, chosen, data, identity, checkpoints, resume_from, **more)


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

    def store(lineage: str) -> CheckpointStore:
        where = Path(run.output) / "checkpoints"
        return CheckpointStore(where, lineage, keep=run.keep, warn=warn, relatives=related, leave=leave)

    checkpoints = store(identity.lineage)
    if not identity.earlier:
        return checkpoints, checkpoints
    stores = [checkpoints, *map(store, identity.earlier)]
    return checkpoints, max(stores, key=lambda one: found.step if (found := one.latest()) else -1)


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
