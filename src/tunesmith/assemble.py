"""Run + Plan -> Job: the one place where every package meets."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tunesmith.checkpoint import run_folder
from tunesmith.checkpoint.base import check_base, keep_base
from tunesmith.checkpoint.result import stored_parts, stored_shapes, write_together
from tunesmith.checkpoint.room import check_room, result_bytes
from tunesmith.checkpoint.store import Checkpoint, CheckpointStore, Rows, Saving, copy_to_host
from tunesmith.choose import Progress, plan_run, settle_plan, tokenize, will_write
from tunesmith.config.schema import Run
from tunesmith.data.held_out import in_proportion
from tunesmith.data.loader import Loader
from tunesmith.data.prepare import Prepared, answers_reason
from tunesmith.data.store import TokenStore
from tunesmith.errors import UserError, listed
from tunesmith.evaluate.loss import HeldOut, held_out_losses, overall
from tunesmith.infer.described import beside, facts_of
from tunesmith.infer.open import open_run, placement, tokenizer_of
from tunesmith.kernels import flash4
from tunesmith.model import attention, load, lora, side_files
from tunesmith.model.card import card
from tunesmith.model.content import Content
from tunesmith.model.forward import Calling, Shape, lengths_of, settle
from tunesmith.model.fp8 import use_fp8_head_gradient, use_fp8_products
from tunesmith.model.fuse import fuse
from tunesmith.model.gated import make_activations_again
from tunesmith.model.lora import peft_name
from tunesmith.model.probe import Probed, probe, settled
from tunesmith.model.quantized import files_of
from tunesmith.model.rotary import rotate_in_kernels
from tunesmith.model.save import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    MODEL_FILES,
    adapter_config_text,
    remove_leftovers,
    saved_buffers,
    write_adapter,
    write_model,
)
from tunesmith.optim.build import build, weight_of
from tunesmith.parallel import compile
from tunesmith.parallel.apply import apply, decoder_layers, wrap_layers
from tunesmith.parallel.context import cut_of, multiple_of
from tunesmith.parallel.fill import lies_in_parts, load_in_parts
from tunesmith.parallel.mesh import check_ranks, world_mesh
from tunesmith.parallel.pipeline import Pipelined
from tunesmith.parallel.ranks import Ranks
from tunesmith.parallel.shard import Sharded, from_rows, gathered, own_parts, rows_of, whole
from tunesmith.parallel.tensor import Split
from tunesmith.parallel.trial import check_layout, try_twin
from tunesmith.plan.defaults import few_steps
from tunesmith.plan.plan import Plan
from tunesmith.train.events import Evaluation
from tunesmith.train.job import Job


@dataclass(frozen=True)
class Setting:
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
) -> Setting:
    """Everything up to the weights: plan, tokens, and whether the run folder may be continued and, where the run
    `saves` anything, has room.

    The folder must be locked. A run that is continued keeps the plan it was started with, since the last bits of its
    losses depend on how steps are cut into micro-batches.
    """
    folder = Path(run.output)
    before = run_folder.read_identity(folder)
    planned = run_folder.read_plan(folder) if before else None
    model = load.model_fingerprint(run)
    attention.register()
    here = run.device if run.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    settled(run, device=here)  # a model that cannot be trained is refused before its data are read
    if run.has_adapters and (run.lora.targets != "all-linear" or run.lora.layers is not None):
        lora.find_targets(load.load_skeleton(run), run.lora)
    chosen, data = settle_plan(run, plan=plan, ranks=ranks, progress=progress)
    if data.bad:
        warn(f"All records that were left out are in {run_folder.write_bad_records(folder, data.bad)}.")
    identity = run_folder.identify(run_folder.decided(run, chosen), data=data.fingerprint, model=model)
    has_changed = before is not None and not before.is_like(identity)
    if has_changed and not run_folder.has_checkpoints(folder):
        before, has_changed = None, False  # nothing was trained yet that could be continued
    changes = run_folder.differences(before, identity) if has_changed else []
    if plan is not None and planned is not None and before is not None and not has_changed:
        changes = run_folder.plan_differences(planned, plan)
    elif planned is not None and before is not None and not has_changed and chosen.storage != planned.storage:
        changes = [f'the plan\'s storage was "{planned.storage}" and is now "{chosen.storage}"']
    if changes and not accept_changes:
        raise UserError(
            f"The run in {folder} was started differently: {listed(changes, '; ')}. Put it back, choose another "
            "output, or go on with the changes by `tunesmith train --accept-changes`."
        )
    if before is not None:
        earlier = (before.lineage, *before.earlier) if has_changed else before.earlier
        identity = replace(identity, earlier=tuple(one for one in earlier if one != identity.lineage))

    expected = will_write(run, chosen)
    if saves:
        check_room(run, chosen, expected, warn)

    def store(lineage: str) -> CheckpointStore:
        related, leave = (identity.lineage, *identity.earlier), result_bytes(run, expected)
        where = folder / "checkpoints"
        return CheckpointStore(where, lineage, keep=run.keep, warn=warn, relatives=related, leave=leave)

    checkpoints = store(identity.lineage)
    resume_from = checkpoints
    if identity.earlier:  # until the first checkpoint with the changes, the newest is one from before them
        stores = [checkpoints, *map(store, identity.earlier)]
        resume_from = max(stores, key=lambda one: found.step if (found := one.latest()) else -1)
    run_folder.write_start(folder, identity, chosen)
    said: list[str] = []
    if saves:
        remove_leftovers(folder / side_files.FOLDER)
        said = side_files.make(run, folder / side_files.FOLDER, **beside(run, data.encoder, reasons=_reasons(data)))
    is_continued = before is not None and run_folder.has_checkpoints(folder)
    more = {"warnings": tuple(said), "is_continued": is_continued, "accept_changes": accept_changes}
    return Setting(run, chosen, data, identity, checkpoints, resume_from, **more)


def join_run(run: Run) -> Setting:
    """What `prepare_run` has settled on the first rank, for the others: they read its folder and write nothing."""
    folder = Path(run.output)
    plan, identity = run_folder.read_plan(folder), run_folder.read_identity(folder)
    if plan is None or identity is None:
        raise UserError(f"{folder} is not the same on all ranks; set output to a folder that all of them share.")
    data = tokenize(run, plan)
    if data.fingerprint != identity.data:
        raise UserError("The training data are not the same on all ranks; give each node the same files.")
    checkpoints = CheckpointStore(folder / "checkpoints", identity.lineage, keep=run.keep)
    return Setting(run, plan, data, identity, checkpoints, checkpoints)


def assemble(setting: Setting, ranks: Ranks | None = None) -> Job:
    """Load the model, make it trainable, and put the job together."""
    run, plan, ranks = setting.run, setting.plan, ranks or Ranks()
    check_ranks(plan, ranks)
    device = torch.device(plan.device)
    if ranks.count > 1 and plan.device == "cuda":
        device = torch.device("cuda", ranks.place.local_rank)
    make_reproducible(plan)
    attention.register(plan.attention)
    run, probed, notes = settled(run, device=device)
    plan = plan_for(plan, probed.calling)
    loaded, tried = None, None
    content = Content()
    if lies_in_parts(plan):
        tried = try_twin(run, plan, device, probed)
        loaded = load_in_parts(run, plan, device, content, can_fuse=probed.can_fuse)
    if loaded is not None:
        model = loaded.model
    else:
        # Over several ranks weights are sharded first and quantized then.
        in_fp8 = plan.products == "fp8" and run.has_adapters and ranks.count == 1
        form = {"dtype": plan.precision, "device": str(device), "storage": plan.storage, "fp8": in_fp8}
        model = load.load_model(run, **form, meanwhile=_imports_for(plan), content=content)
    if loaded is not None:
        content.join(ranks.gather)
    if ranks.is_first:
        ways = {"is_continued": setting.is_continued, "accept_changes": setting.accept_changes}
        keep_base(Path(run.output), run, content, **ways)
    model.config.use_cache = False
    sizes = {"vocabulary": load.vocabulary_size(model.config), "longest": plan.sequence_length}
    calling, note = tried or settle(model, **sizes, known=probed.calling)
    notes += [note] if note else []
    if calling.layout == "packed":
        model.set_attn_implementation(attention.NAME)
    plan = plan_for(plan, calling)
    check_layout(model, calling, plan)
    if loaded is None:
        called = make_trainable(model, run, plan, probed)
    else:
        called = loaded.called
        wrap_layers(model, plan, loaded.layers)
    optimizer = build(model, run, plan)
    if called is model:
        optimizer.update_beside(model, decoder_layers(model))
    loader = Loader(
        setting.data.train,
        [dataset.weight for dataset in run.data],
        seed=run.seed,
        sequence_length=plan.sequence_length,
        sequences_per_step=plan.sequences_per_step,
        epochs=run.epochs or plan.epochs,
        steps=run.steps,
        micro_batch=plan.micro_batch,
        rank=plan.mesh.data_rank(ranks.rank),
        ranks=plan.mesh.data_ranks,
        lengths=lengths_of(calling, plan.sequence_length),
    )
    evals, note = _evaluated(run, plan, setting.data.evals, loader.total_steps)
    notes += [note] if note else []
    is_asked_for = run.steps is not None or None not in (run.epochs, run.batch_tokens)
    if not is_asked_for and (few := few_steps(loader.total_steps)):
        notes.append(f"The steps of this run are {loader.total_steps}, {few}.")
    folder = Path(run.output)
    cut = cut_of(plan, ranks.rank, micro_batch_shape(plan))
    is_first = ranks.rank % (ranks.count // plan.mesh.pipeline) == 0
    """Of the ranks of its stage."""

    losses: dict[int, float] = {}
    """Held-out losses by step, for the model card."""

    def evaluate(step: int, progress: Callable[[int, int], None]) -> Evaluation:
        began = time.monotonic()
        results = held_out_losses(
            called,
            calling,
            evals,
            device=device,
            sequence_length=plan.sequence_length,
            micro_batch=plan.micro_batch,
            shape=micro_batch_shape(plan),
            progress=progress,
            ranks=ranks,
            share=(plan.mesh.data_rank(ranks.rank), plan.mesh.data_ranks),
            cut=cut,
        )
        inner = called.model if isinstance(called, Pipelined) else called
        if isinstance(inner, Sharded):
            inner.free_whole_weights()
        losses[step] = overall(results)
        return Evaluation(
            step=step,
            loss=losses[step],
            losses={result.title: result.loss for result in results},
            target_tokens=sum(result.target_tokens for result in results),
            seconds=round(time.monotonic() - began, 3),
        )

    def own(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Those that this rank has a part in writing: a weight that is tied is the first stage's."""
        tied = called.tied if isinstance(called, Pipelined) and not called.parts[0].is_first else None
        return {name: tensor for name, tensor in tensors.items() if tied is None or weight_of(name) != tied}

    def parts_of(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, Rows]]:
        tensor = (ranks.rank % plan.mesh.tensor, plan.mesh.tensor)
        for name, part in own_parts(tensors, is_first=is_first, tensor=tensor):
            yield name, Rows(*part)

    def save(step: int, state: dict[str, Any], metric: float | None, *, beside: bool) -> Saving:
        tensors, copy = optimizer.tensors(), {"copy": copy_to_host} if beside else {}
        if ranks.count == 1:
            full = {name: whole(tensor) for name, tensor in tensors.items()}
            return setting.checkpoints.begin(step, full, state, metric=metric, **copy)
        tensors = own(tensors)
        parts = dict(parts_of(tensors))
        return setting.checkpoints.begin_together(step, parts, tensors.keys(), state, ranks, metric=metric, **copy)

    def restore(store: CheckpointStore, found: Checkpoint) -> dict[str, Any]:
        spread = {name: weight for name, weight in optimizer.weights.items() if isinstance(weight, DTensor)}

        def rows(name: str) -> tuple[int, int] | None:
            weight = spread.get(weight_of(name))
            if isinstance(called, Pipelined) and weight_of(name) not in optimizer.weights:
                return 0, 0
            return None if weight is None else rows_of(weight)

        loaded, state = store.load_rows(found, rows, optimizer.room)
        tensors = {}
        for name, part in loaded.items():
            if rows(name) == (0, 0):
                continue  # another stage's
            weight = spread.get(weight_of(name))
            is_spread = weight is not None and part.total == weight.shape[0] and part.tensor.ndim > 0
            tensors[name] = from_rows(part.tensor, weight) if is_spread else part.tensor
        optimizer.restore(tensors)
        if found.metric is not None:
            losses[found.step] = found.metric
        if state.get("first_loss") is not None:
            losses[0] = state["first_loss"]
        return state

    # What the end needs of the base and of the model's names is looked up now: by then the base may be gone.
    is_spread = isinstance(called, Sharded | Pipelined)
    precision = getattr(torch, load.DTYPES[plan.precision])
    adapter_config = _adapter_config(model, run, is_whole=not isinstance(called, Pipelined)) if run.has_adapters else ""
    empty, source = load.load_empty(run, dtype=plan.precision) if is_spread and not run.has_adapters else (None, None)
    files = files_of(empty, source) if empty is not None else None

    def describe(steps: int | None, dtype: torch.dtype | None, target: Path) -> None:
        facts = facts_of(run, setting.data.encoder, reasons=_reasons(setting.data))
        text = card(run, replace(facts, steps=steps, before=losses.get(0), after=losses.get(loader.total_steps)))
        side_files.put_beside(folder / side_files.FOLDER, target, dtype=dtype, card=text)
        if adapter_config:
            (target / ADAPTER_CONFIG).write_text(adapter_config)

    def write_result(name: str | None = None) -> Path:
        target = folder / (name or ("adapter" if run.has_adapters else "model"))
        if ranks.is_first:
            remove_leftovers(target)
        optimizer.settle()
        steps = loader.total_steps if name is None else None
        described = partial(describe, steps, None if run.has_adapters else precision)
        if not is_spread:
            if run.has_adapters:
                return write_adapter(model, run, target, described)
            return write_model(model, target, described)
        if run.has_adapters:
            tensors = own(optimizer.weights)
            parts = ((peft_name(name), rows) for name, rows in parts_of(tensors))
            shapes = {peft_name(name): (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
            write_together(target, shapes, parts, ranks, pattern=ADAPTER_FILE, describe=described)
            return target
        tensors = {**optimizer.weights, **saved_buffers(model)}
        if files is None:  # of another layout, which transformers knows: it wants them all
            weights = gathered(tensors, ranks, precision, keeps=is_first if isinstance(called, Pipelined) else None)
            if ranks.is_first:
                write_model(empty, target, described, weights)
            ranks.wait()
            return target
        tensors = own(tensors)
        parts = (stored for name, rows in parts_of(tensors) for stored in stored_parts(name, rows, files))
        trained = optimizer.weights
        kinds = {name: (one.shape, precision if name in trained else one.dtype) for name, one in tensors.items()}
        write_together(target, stored_shapes(kinds, files), parts, ranks, pattern=MODEL_FILES, describe=described)
        return target

    return Job(
        run=run,
        plan=plan,
        folder=folder,
        device=device,
        model=called,
        calling=calling,
        loader=loader,
        titles=tuple(store.title for store in setting.data.train),
        optimizer=optimizer,
        checkpoints=setting.checkpoints,
        resume_from=setting.resume_from,
        evaluate=evaluate if evals else None,
        save=save,
        restore=restore,
        write_result=write_result,
        shape=micro_batch_shape(plan),
        warnings=(*setting.data.warnings, *setting.warnings, *dict.fromkeys(notes)),
        ranks=ranks,
        cut=cut,
    )


def _evaluated(
    run: Run, plan: Plan, evals: Sequence[TokenStore], total_steps: int
) -> tuple[Sequence[TokenStore], str | None]:
    """What of the held-out data is evaluated while the run trains, and a word about it where that is not all. Neither
    clocks nor the machine have a say: the losses before, within and after a run are those of the same examples."""
    if run.eval_every is not None or not evals:
        return evals, None
    chosen = in_proportion(evals, total_steps * plan.sequences_per_step * plan.sequence_length)
    taken, there = (sum(len(store) for store in stores) for stores in (chosen, evals))
    if taken == there:
        return evals, None
    return chosen, (
        f"{taken:,} of the {there:,} held-out examples are evaluated, the same ones each time: all would take too long "
        "beside so short a training. Set eval_every to evaluate all; `tunesmith eval` always does."
    )


def _imports_for(plan: Plan) -> Callable[[], None]:
    """What imports modules that take seconds, and are wanted once the model is there. What they look at in the
    environment is set at once: not in a thread."""
    uses_flash4 = plan.attention == "flash-attn-4"
    if uses_flash4:
        flash4.keep_compiled()
    if plan.is_compiled:
        compile.prepare()

    def work() -> None:
        if uses_flash4:
            flash4.functions()
        if plan.is_compiled:
            import torch._inductor.compile_fx  # noqa: F401

    return work


def _adapter_config(model: torch.nn.Module, run: Run, *, is_whole: bool) -> str:
    if not is_whole:
        model = load.load_skeleton(run)
        lora.attach(model, run.lora, seed=run.seed)
    return adapter_config_text(model, run)


def make_trainable(model: torch.nn.Module, run: Run, plan: Plan, probed: Probed | None = None) -> torch.nn.Module:
    """Adapters or all weights, then everything that makes the steps fast and fit. Returns what is to be called."""
    can_fuse = probed is None or probed.can_fuse
    if run.has_adapters:
        lora.attach(model, run.lora, seed=run.seed)
    else:
        model.requires_grad_(True)
    split = Split.of(model, world_mesh(plan)) if plan.mesh.tensor > 1 else None
    if split is not None:
        split.cut(model)
    if run.has_adapters and can_fuse:
        fuse(model, fp8=plan.products == "fp8", whole_mlps=plan.device == "cuda", keep_turned=plan.keep_turned)
        # A copy of the head, which is too much in parts, or where memory is short.
        if plan.products == "fp8" and not (lies_in_parts(plan) or plan.recompute_layers):
            use_fp8_head_gradient(model)
    elif plan.products == "fp8" and not run.has_adapters:
        use_fp8_products(model)
    elif plan.device == "cuda" and not run.has_adapters:
        make_activations_again(model)
    if plan.device == "cuda" and split is None:
        rotate_in_kernels(model, model.get_input_embeddings().weight.dtype)
    return apply(model, plan, has_adapters=run.has_adapters, split=split)


def plan_for(plan: Plan, calling: Calling | None) -> Plan:
    """The plan for a model that is called like this. Where micro-batches go by the lengths of documents, they change
    their shape and number with every step: there is nothing to compile once, and no gradient is whole after one."""
    if calling is None or lengths_of(calling, plan.sequence_length) is None:
        return plan.model_copy(update={"by_length": False}) if plan.by_length else plan
    changes = {"by_length": True, "is_compiled": False, "is_recorded": False, "release_gradients": False}
    return plan.model_copy(update=changes)


def micro_batch_shape(plan: Plan) -> Shape | None:
    if not plan.is_compiled and plan.mesh.pipeline == 1:
        return None
    multiple = multiple_of(plan)
    tokens = -(-plan.micro_batch * plan.sequence_length // multiple) * multiple
    return Shape(tokens=tokens, longest=plan.sequence_length)


def evaluate_run(
    folder: Path, run: Run, *, with_base: bool = False, progress: Progress | None = None
) -> tuple[list[HeldOut] | None, list[HeldOut], int | None]:
    """Held-out losses of the run in `folder` on `run.eval` and what `run.held_out` takes of its data: before training
    if asked for, after it, and the checkpoint's step where the run is not finished."""
    plan = run_folder.read_plan(folder) or plan_run(run)
    tokenizer = tokenizer_of(folder)
    if run.held_out:
        stores = tokenize(run.model_copy(update={"chat_template": None}), plan, progress, tokenizer).evals
    else:
        alone = {"data": run.eval, "eval": [], "held_out": 0, "sequence_length": plan.sequence_length}
        alone["chat_template"] = None  # the tokenizer has it
        stores = tokenize(run.model_copy(update=alone), None, progress, tokenizer).train
    make_reproducible(plan)
    attention.register()

    probed = probe(run, device=placement(plan)[0])

    def measure(model: torch.nn.Module) -> list[HeldOut]:
        calling, _ = settle(model, vocabulary=load.vocabulary_size(model.config), known=probed.calling)
        device = next(model.parameters()).device
        # Fused as in training, since in half precision the same sums in another order are other losses.
        if probed.can_fuse:
            fuse(model, fp8=plan.products == "fp8" and device.type == "cuda", whole_mlps=device.type == "cuda")
        if device.type == "cuda":
            rotate_in_kernels(model, model.get_input_embeddings().weight.dtype)
        sizes = {"sequence_length": plan.sequence_length, "micro_batch": plan.micro_batch}
        evaluating = partial(progress, "Evaluating") if progress else None
        return held_out_losses(model, calling, stores, device=device, progress=evaluating, **sizes)

    before = None
    if with_base:
        device, precision = placement(plan)
        content = Content()
        form = {"dtype": precision, "device": device, "storage": plan.storage}
        before = measure(load.load_model(run, **form, content=content))
        check_base(folder, run, content)
    opened = open_run(folder)
    return before, measure(opened.model), opened.step


def _reasons(data: Prepared) -> bool:
    return answers_reason(data.encoder, data.train)


def make_reproducible(plan: Plan) -> None:
    """The same numbers every time: always on a CPU, on a GPU when the plan says so."""
    if torch.get_num_threads() != plan.threads and plan.device == "cpu":
        torch.set_num_threads(plan.threads)
    if plan.deterministic and plan.device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
