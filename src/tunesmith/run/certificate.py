"""The certificate of a run: what training did, found out again from the run's folder when it is done.

certificate.json has a verdict (passed, failed, or not checked and why) for each of these, and hashes of data, base and
result:

    gradients           every trained tensor had one
    moved               every trained tensor is another than when training began
    end_of_turn         the token that ends turns was among the targets
    documents_apart     in the trained model, what a document says does not depend on the one packed before it
    saved_is_evaluated  the result on the disk has the held-out loss that training reported
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import safe_open
from torch import nn

from tunesmith.checkpoint.files import digest_file
from tunesmith.checkpoint.store import CheckpointStore
from tunesmith.config.schema import Run
from tunesmith.data.loader import documents_of, micro_batch_of
from tunesmith.data.prepare import Prepared
from tunesmith.data.store import TokenStore
from tunesmith.errors import UserError, listed
from tunesmith.evaluate.loss import held_out_losses, overall
from tunesmith.model import attention, load, lora, lora_modules
from tunesmith.model.files import read_ahead
from tunesmith.model.forward import to_device, token_losses
from tunesmith.model.source import files_of
from tunesmith.model.structure import set_attention
from tunesmith.objectives import objective_of
from tunesmith.optim.build import weight_of
from tunesmith.parallel.prepare import make_fast
from tunesmith.plan.model_states import BLOCKWISE
from tunesmith.plan.plan import ForwardSpec, Plan
from tunesmith.run.choose import tokenize
from tunesmith.run.evaluate import held_out_while_training
from tunesmith.run.folder import (
    has_result,
    lost_of_result,
    read_identity,
    read_json,
    read_plan,
    read_run,
    read_summary,
    read_trained_run,
    write_json,
)
from tunesmith.run.open import Opened, open_run, tokenizer_of, trained_adapter
from tunesmith.run.shape import settle_torch
from tunesmith.run.there import check_base_there, with_own_model

FILE = "certificate.json"
FORMAT = 1
LOOKED_AT = 512
"""Examples of each data set in which the end of turns is looked for."""
NO_END = "the tokenizer has no token that ends a turn or a text, so answers will not stop by themselves"
PAIRS = 4
"""Of documents that are packed behind each other."""
LEAK = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}
"""Relative to the largest loss: what sums in another order explain."""
RESULT = ("*.safetensors", "adapter_config.json", "config.json")
"""Files of the result by which its certificate is known to be still of it."""
SAME_LOSS = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 2e-3}
Progress = Callable[[str, int, int | None], None]
Check = dict[str, str]


def certify(folder: Path, *, progress: Progress = lambda *_: None) -> dict[str, Any]:
    """The certificate of the run in `folder`, which is written there. What was found before is kept as long as nothing
    that it tells of has changed."""
    run, identity = read_run(folder), read_identity(folder)
    assert identity is not None
    hashes = {"data": identity.data, "base": _base_hash(folder), "result": _result_hashes(folder)}
    kept = read_json(folder / FILE)
    if isinstance(kept, dict) and kept.get("format") == FORMAT and kept.get("hashes") == hashes:
        return kept
    plan = read_plan(folder)
    progress("Checking what was trained", 0, None)
    checks = {"gradients": _gradients(folder), "moved": _moved(folder, run)}
    plain = with_own_model(folder, run).model_copy(update={"chat_template": None})  # the tokenizer has it
    tokenizer = None
    try:
        tokenizer = tokenizer_of(folder)
        data = tokenize(plain, plan, progress, tokenizer)
    except UserError as error:
        for name in ("end_of_turn", "documents_apart", "saved_is_evaluated"):
            checks[name] = _unknown(f"the data cannot be read: {error}")
        if tokenizer is not None and tokenizer.eos_token_id is None and not tokenizer.chat_template:
            checks["end_of_turn"] = _failed(NO_END)
    else:
        checks["end_of_turn"] = _end_of_turn(data)
        checks |= _model_checks(folder, run, plan, data, progress)
    certificate = {"format": FORMAT, "checks": checks, "hashes": hashes}
    write_json(folder / FILE, certificate)
    return certificate


# What was trained


def _gradients(folder: Path) -> Check:
    """Whether every trained weight had a gradient, by the optimizer's states, which are sums of gradients: one that is
    all 0 never saw any."""
    if (run := read_trained_run(folder)).algorithm in BLOCKWISE or run.is_merged:
        held = run.method if run.is_merged else run.algorithm
        return _unknown(f"{held} begins with new sums of gradients at intervals")
    store = CheckpointStore(folder / "checkpoints", read_identity(folder).lineage)
    checkpoint = store.latest() if (folder / "checkpoints").is_dir() else None
    if checkpoint is None:
        return _unknown("there is no checkpoint any more")
    names: set[str] = set()
    seen: set[str] = set()
    for file in sorted(checkpoint.path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118  (it is no mapping)
                kind, _, rest = key.partition("/")
                if kind != "optimizer":
                    names.add(weight_of(key))
                    continue
                state, _, name = rest.partition("/")
                if name in seen or state == "step":
                    continue
                value = tensors.get_tensor(key)
                if value.dtype != torch.uint8 and value.any():  # codes of few bits are not 0 where their value is
                    seen.add(name)
    if not seen:
        return _unknown(f"{read_run(folder).algorithm} keeps no sums of gradients")
    without = sorted(names - seen)
    if without:
        return _failed(
            f"{len(without)} of {len(names)} trained tensors never had a gradient: {listed(without, most=3)}"
        )
    return _passed(f"all {len(names)} trained tensors had gradients")


def _moved(folder: Path, run: Run) -> Check:
    if run.has_adapters:
        adapter, _ = trained_adapter(folder)
        still = []
        for key, tensor in adapter.tensors.items():
            name = key.removeprefix(lora.PREFIX).rsplit(".lora_", 1)[0]
            if key.endswith("lora_A.weight"):
                is_still = torch.equal(tensor, lora_modules.initial_a(tuple(tensor.shape), run.seed, name))
            else:
                is_still = key.endswith("lora_B.weight") and not tensor.any()
            still += [key] if is_still else []
        return _verdict(still, len(adapter.tensors))
    if not has_result(folder, "model"):
        lost = lost_of_result(folder)
        return _unknown("the run is not finished" if lost is None else f"{lost} is gone")
    try:
        check_base_there(folder, run)
    except UserError as error:
        return _unknown(str(error))
    trained = with_own_model(folder, run)
    model, base = load.load_empty(run, dtype="fp32")
    before, after = files_of(model, base), files_of(model, load.load_empty(trained, dtype="fp32")[1])
    if before is None or after is None:
        return _unknown("only transformers knows the layout of its files")
    trainable = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    before = {name: held for name, held in before.items() if name in trainable}  # and no buffers
    if (as_trained := read_trained_run(folder)).is_merged:  # only the linears that had adapters
        plan = read_plan(folder)
        chosen = {"targets": list(plan.adapted)} if plan is not None and plan.adapted else {}
        names = lora.find_targets(model, as_trained.lora.model_copy(update=chosen))
        before = {f"{name}.weight": before[f"{name}.weight"] for name in names if f"{name}.weight" in before}
    still = []
    both = (read_ahead(before, pin=False), read_ahead({name: after[name] for name in before}, pin=False))
    for first, last in zip(*both, strict=True):
        if torch.equal(first[1].to(last[1].dtype), last[1]):
            still.append(first[0])
    return _verdict(still, len(before))


def _verdict(still: Sequence[str], count: int) -> Check:
    if still:
        return _failed(f"{len(still)} of {count} trained tensors are as they were: {listed(still, most=3)}")
    return _passed(f"all {count} trained tensors have moved")


def _end_of_turn(data: Prepared) -> Check:
    ends, looked, having = data.encoder.end_ids, 0, 0
    for store in data.train:
        for index in range(min(LOOKED_AT, len(store))):
            ids, weights, _ = store.example(index)
            looked += 1
            having += any(int(token) in ends for token in ids[weights > 0])
    named = listed(str(data.encoder.tokenizer.convert_ids_to_tokens(end)) for end in sorted(ends))
    if not ends:
        return _failed(NO_END)
    if not having:
        return _failed(f"{named} is a target in none of {looked} examples, so answers will not stop by themselves")
    return _passed(f"{named} is a target in {having} of {looked} examples")


# The trained model


def _model_checks(folder: Path, run: Run, plan: Plan | None, data: Prepared, progress: Progress) -> dict[str, Check]:
    names = ("documents_apart", "saved_is_evaluated")
    if plan is None or plan.forward is None:
        return dict.fromkeys(names, _unknown("the run has no plan of this version"))
    model, _ = load.load_empty(with_own_model(folder, run), dtype="fp32")
    if plan.device == "cpu" and 5 * load.parameter_count(model) > psutil.virtual_memory().available:
        return dict.fromkeys(names, _unknown("the model does not fit into this machine's memory"))
    progress("Opening the trained model", 0, None)
    settle_torch(plan)
    attention.register()
    opened = open_run(folder)
    if plan.forward.layout == "packed":
        set_attention(opened.model, attention.NAME)
    make_fast(opened.model, run, plan, opened.device)
    precision = plan.precision if opened.device.type == plan.device else "fp32"
    apart = _documents_apart(opened, plan.forward, data.train, precision)
    return {"documents_apart": apart, "saved_is_evaluated": _evaluated(folder, run, plan, data, opened, precision)}


@torch.no_grad()
def _documents_apart(opened: Opened, spec: ForwardSpec, stores: Sequence[TokenStore], precision: str) -> Check:
    """A document's losses, packed behind one document and behind another of the same length."""
    store = max(stores, key=len)
    count = min(PAIRS, len(store) - 1)
    if count < 1:
        return _unknown("there is one example only")
    worst, scale = 0.0, 1e-6
    for index in range(count):
        first, second = documents_of(store, index, 0)[0], documents_of(store, index + 1, 0)[0]
        other = first._replace(ids=(first.ids[::-1] + 1) % min(int(first.ids.max()) + 2, _vocabulary(opened.model)))
        losses = [_losses_of_last(opened, spec, [before, second]) for before in (first, other)]
        worst = max(worst, (losses[0] - losses[1]).abs().max().item())
        scale = max(scale, losses[0].abs().max().item())
    if not worst <= LEAK[precision] * scale:
        return _failed(
            f"documents see each other: with another document packed before it, a token's loss changed by {worst:.2g}"
        )
    return _passed(f"losses change by {worst:.1g} with another document packed before ({count} pairs)")


def _losses_of_last(opened: Opened, spec: ForwardSpec, documents: list[Any]) -> torch.Tensor:
    batch = micro_batch_of(documents)
    inputs = to_device(batch, opened.device)
    losses = token_losses(opened.model, inputs, spec)[1].float()
    return losses[inputs.rows >= int(batch.boundaries[-2])]


def _vocabulary(model: nn.Module) -> int:
    return load.usable_tokens(model.config)


def _evaluated(folder: Path, run: Run, plan: Plan, data: Prepared, opened: Opened, precision: str) -> Check:
    summary = read_summary(folder)
    if summary is None:
        return _unknown("the run is not finished")
    if not objective_of(run).is_token_sum:
        return _unknown(f"the loss of objective {run.objective} is checked by `tunesmith eval`")
    reported = summary.get("held_out_after")
    if reported is None or not data.evals:
        return _unknown("nothing was held out, so training reported no held-out loss")
    stores, _ = held_out_while_training(run, plan, data.evals, summary["steps"])
    results = held_out_losses(
        opened.model,
        plan.forward,
        stores,
        device=opened.device,
        sequence_length=plan.sequence_length,
        micro_batch=plan.micro_batch,
    )
    loss = overall(results)
    said = f"held-out loss {reported:.6f} when training ended, {loss:.6f} of the files"
    return _passed(said) if abs(loss - reported) <= SAME_LOSS[precision] * max(1.0, abs(reported)) else _failed(said)


# Hashes and verdicts


def _base_hash(folder: Path) -> str | None:
    kept = read_json(folder / "base.json")
    if not isinstance(kept, dict) or "tensors" not in kept:
        return None
    return hashlib.sha256(json.dumps(kept["tensors"], sort_keys=True).encode()).hexdigest()


def _result_hashes(folder: Path) -> dict[str, str]:
    hashes = {}
    for name in ("adapter", "model"):
        files = (file for pattern in RESULT for file in (folder / name).glob(pattern))
        for file in sorted(files):
            hashes[f"{name}/{file.name}"] = digest_file(file, "sha256")
    return hashes


def _passed(found: str) -> Check:
    return {"verdict": "passed", "found": found}


def _failed(found: str) -> Check:
    return {"verdict": "failed", "found": found}


def _unknown(why: str) -> Check:
    return {"verdict": "not checked", "found": why}
