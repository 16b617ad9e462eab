"""A model into few bits: check, quantize layer by layer, measure, write, prove, describe, and only then give the folder
its name.

Everything is computed in fp32 on the CPU with one layer of weights in memory at a time, and written into a partial
folder beside the target; a kill or a failure leaves nothing that looks like a model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tunesmith.config.schema import Dataset
from tunesmith.data.recognise import given_by_option
from tunesmith.errors import UserError
from tunesmith.export.describe import copy_licence, write_card
from tunesmith.export.engines import Transformers
from tunesmith.export.export import check_place, fits, storage_note, twice_rounded
from tunesmith.export.proof import LONGEST, SEQUENCES, Proof, Sample, prove
from tunesmith.export.quantized import Parts, check_linears, describe, size, stored_name, widths_of
from tunesmith.export.source import Progress, Source
from tunesmith.measure.picture import layers_svg
from tunesmith.model.save import remove_leftovers, whole_folder
from tunesmith.objectives import objective_of
from tunesmith.quantize.methods import CALIBRATED, ROUNDS_INPUTS, Options, Recipe
from tunesmith.quantize.report import Report, card_lines
from tunesmith.quantize.rows import Rows, examples_of, rows_of
from tunesmith.quantize.walk import LayerWork, Measured, Walk
from tunesmith.run.choose import tokenize
from tunesmith.run.evaluate import held_out_of
from tunesmith.run.folder import read_identity, read_plan
from tunesmith.run.open import refuse_encoder_decoder, refuse_head
from tunesmith.run.streamed import rounded
from tunesmith.run.there import why_checkpoint

SAMPLES, LENGTH = 64, 512
"""Calibration documents, and how much of each."""
MEASURED = 32
"""Documents of which perplexity is told."""
SAMPLE_TOKENS = 256
"""Of which it is told for each layer: all layers after it are gone through once more."""
DIVERGENCE = 2e-3
"""Largest mean divergence, in nats a token, of what the engine says from what was measured: it may add in another
order, and holds embeddings in 16 bits."""


@dataclass(frozen=True)
class Quantized:
    folder: Path
    report: Report
    proof: Proof | None
    missing: str
    """Why it was not proved, where it was not."""
    notes: tuple[str, ...]


def quantize_model(
    target: str,
    to: Path,
    *,
    method: str,
    bits: int | None = None,
    group: int | None = None,
    act_order: bool = True,
    data: Sequence[str] = (),
    samples: int = SAMPLES,
    measured: int = MEASURED,
    length: int = LENGTH,
    progress: Progress = lambda *_: None,
    say: Callable[[str], None] = lambda _: None,
) -> Quantized:
    """Quantize a run's model, or a model by itself, into the folder `to`: calibrated on `samples` documents, measured
    on other ones, of `length` tokens at most."""
    with open_target(target, data) as source:
        check_linears(source)
        asked = Options.of(source, method, bits, group, act_order)
        recipe = Recipe(source, asked)
        needed = size(source, "int8") if asked.method != "kmeans" else 3 * source.weights.count
        check_place(to, needed, option="--to")
        calibration, held_out, kind_of_data, notes = _data(source, asked, data, (samples, measured, length), progress)
        notes = (*_notes_of(source), *twice_rounded(source, asked.precision), *notes)
        for note in notes:
            say(note)
        remove_leftovers(to)
        with whole_folder(to, is_new=True) as partial:
            found = _write(source, recipe, partial, calibration, held_out, progress)
            tokens = calibration.tokens if calibration else 0
            report = Report.of(
                asked, found, calibration_tokens=tokens, held_out=held_out, data=kind_of_data, outliers=recipe.outliers
            )
            missing = "" if fits(source) else "the model does not fit into this machine's memory."
            proof = None if missing else _proved(source, asked, partial, held_out, found.logits, kind_of_data, progress)
            (partial / "quantization.svg").write_text(layers_svg(report.title, report.bars), encoding="utf-8")
            (partial / "quantization.json").write_text(json.dumps(report.as_dict(), indent=2) + "\n", encoding="utf-8")
            kind = "kmeans" if asked.method == "kmeans" else recipe.rounding.kind
            told = {"proof": proof, "missing": missing, "notes": notes, "certificate": None}
            told |= {"licence": copy_licence(source, partial), "usage": None, "measured": card_lines(report)}
            write_card(source, partial, form=f"quantized by {asked.method}", kind=kind, **told)
    return Quantized(to, report, proof, missing, notes)


@contextmanager
def open_target(target: str, data: Sequence[str]) -> Iterator[Source]:
    folder = Path(target)
    refuse_encoder_decoder(target, "be quantized here")
    if folder.is_dir() and read_identity(folder) is not None:
        refuse_head(folder, "be quantized here")
        yield Source.of(folder)
        return
    if not data:
        raise UserError(
            f"{target} is no run of ours, so that there is no data to measure it on; name some with --data FILE."
        )
    with Source.of_model(target, data) as source:
        yield source


def _notes_of(source: Source) -> list[str]:
    if not source.is_trained:
        return []
    step = source.weights.step
    return [*storage_note(source.folder), *([why_checkpoint(source.folder, step)] if step is not None else [])]


def _data(
    source: Source, asked: Options, data: Sequence[str], sizes: tuple[int, int, int], progress: Progress
) -> tuple[Rows | None, Rows, str, tuple[str, ...]]:
    """What to calibrate with, what to measure on and what kind of data that is: of a run its training and its held-out
    data, else a quarter of the data is held out."""
    notes = []
    samples, measured, length = sizes
    given = [Dataset(path=path) for path in data]
    plan = read_plan(source.folder) if source.is_trained else None
    if given:
        only = source.run.model_copy(update={"data": given, "eval": [], "held_out": 0, "chat_template": None})
        with given_by_option("--data", objective_of(only).records):
            calibrating = list(examples_of(tokenize(only, None, progress, source.tokenizer).train, length=length))
    else:
        run = source.run.model_copy(update={"chat_template": None})  # the tokenizer has it
        calibrating = list(examples_of(tokenize(run, plan, progress, source.tokenizer).train, length=length))
    if source.is_trained:
        measuring = list(examples_of(held_out_of(source.folder, source.run, plan, progress), length=length))
        kind = "held-out" if source.run.held_out or source.run.eval_texts else "training"
    else:
        measuring, kind = calibrating[3::4], "held-out"
        calibrating = [one for number, one in enumerate(calibrating) if number % 4 != 3] if measuring else calibrating
    if not measuring:
        notes.append("There is too little data to hold any of it out: perplexity is that of the calibration data.")
        measuring, kind = calibrating, "calibration"
    if not measuring:
        raise UserError("The data hold no document with a target token; name other data with --data FILE.")
    uses_data = asked.method in (*CALIBRATED, "kmeans", "int8-outliers")
    calibration = rows_of(calibrating[:samples]) if uses_data and calibrating else None
    if calibration is not None and asked.method in CALIBRATED:
        widest = max(widths_of(source))
        if calibration.tokens < widest:
            notes.append(
                f"Calibration has {calibration.tokens:,} tokens, fewer than the widest linear has inputs ({widest:,}); "
                "more data would help."
            )
    return calibration, rows_of(measuring[:measured]), kind, tuple(notes)


def _write(
    source: Source, recipe: Recipe, folder: Path, calibration: Rows | None, held_out: Rows, progress: Progress
) -> Measured:
    describe(source, folder, recipe.config())
    parts, books = Parts(folder), Parts(folder, "codebooks")
    written: set[str] = set()

    def quantize(work: LayerWork) -> float:
        error = recipe(work)
        for leaf, weight in work.module.named_parameters():
            name = f"{work.name}.{leaf}"
            written.add(name)
            owner = name.removesuffix(".weight")
            stored = stored_name(source, name)
            if owner in recipe.stored and name != owner:
                for one, tensor in recipe.stored[owner].items():
                    parts.add(f"{stored.removesuffix('.weight')}.{one}", tensor)
            else:
                parts.add(stored, weight.to(recipe.half))
        for name, tensor in recipe.beside.items():
            books.add(name, tensor)
        return error

    few = max(1, SAMPLE_TOKENS // held_out.ids_bt.shape[1])
    kept = (min(SEQUENCES, len(held_out)), min(LONGEST, held_out.ids_bt.shape[1]))
    rows = {"calibration": calibration, "measured": held_out}
    walk = Walk(source.weights, quantize, **rows, sample=few, kept=kept, progress=progress)
    found = walk.run()
    for name, tensor in walk.others([name for name in source.weights.names if name not in written]):
        parts.add(stored_name(source, name), rounded(source.weights, name, tensor, recipe.half))
    parts.finish()
    if recipe.asked.method == "kmeans":
        books.finish()
    return found


def _proved(
    source: Source,
    asked: Options,
    folder: Path,
    held_out: Rows,
    logits: torch.Tensor,
    data: str,
    progress: Progress,
) -> Proof:
    """By the engine that reads the folder: what any export must show; and that it says what was measured, where the
    method rounds weights alone."""
    progress("Loading it back", 0, None)
    try:
        engine = Transformers(folder, trust_remote_code=source.run.trust_remote_code)
    except (ValueError, RuntimeError, OSError, KeyError, TypeError, ImportError) as error:
        raise UserError(f"What was written cannot be loaded back by transformers: {error}.") from error
    try:
        samples = samples_of_rows(held_out[: logits.shape[0]], logits.shape[1])
        if asked.method not in ROUNDS_INPUTS:
            _compare(engine, samples, logits)
        alike = {"fp8": "fp8", "int8-outliers": None}.get(asked.method, logits)
        return prove(source, engine, asked.precision, samples, progress, alike=alike, data=data)
    finally:
        engine.close()


def samples_of_rows(rows: Rows, length: int) -> list[Sample]:
    found = []
    for row in range(len(rows)):
        ids = rows.ids_bt[row][rows.is_text_bt[row]][:length].tolist()
        found.append(Sample(ids, int((rows.weights_bt[row] > 0).int().argmax()) or 1))
    return found


def _compare(engine: Any, samples: Sequence[Sample], logits: torch.Tensor) -> None:
    total, places = 0.0, 0
    scores = engine.scores([sample.ids for sample in samples])
    for sample, found, rows_tv in zip(samples, scores, logits, strict=True):
        expected = rows_tv[: len(sample.ids)].log_softmax(-1)
        total += (expected.exp() * (expected - found.logprobs_tk)).sum().item()
        places += len(sample.ids)
    if not total / places <= DIVERGENCE:
        raise UserError(
            f"What was written does not say what was measured, as {engine.name} runs it: it diverges by "
            f"{total / places:.2g} nats a token, more than {DIVERGENCE:g}. Nothing was written."
        )
