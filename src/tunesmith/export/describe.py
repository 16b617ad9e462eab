"""What lies beside exported weights: the card with what was measured, hashes, the base's licence."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunesmith.checkpoint.files import digest_file
from tunesmith.export.proof import BOUNDS, Proof
from tunesmith.export.source import Source
from tunesmith.infer.described import facts_of
from tunesmith.model.card import card
from tunesmith.model.side_files import CARD, FOLDER, read_asked
from tunesmith.run.folder import read_json, read_plan, read_summary

LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*", "license*")
PROOF = "export.json"


def copy_licence(source: Source, folder: Path) -> str | None:
    """The base's own files about its licence, and what its card calls it."""
    base = source.weights.base if source.weights.adapter else Path(source.run.model)
    if not base.is_dir():
        return None
    for file in {file for pattern in LICENCES for file in base.glob(pattern) if file.is_file()}:
        shutil.copyfile(file, folder / file.name)
    readme = base / "README.md"
    lines = readme.read_text(encoding="utf-8", errors="replace").splitlines() if readme.is_file() else []
    front = lines[1 : lines.index("---", 1)] if lines[:1] == ["---"] and "---" in lines[1:] else []
    named = [line.partition(":")[2].strip().strip("'\"") for line in front if line.startswith("license:")]
    return named[0] if named and named[0] else None


def write_card(
    source: Source,
    folder: Path,
    *,
    form: str,
    kind: str,
    proof: Proof | None,
    missing: str,
    notes: Sequence[str],
    usage: Sequence[str] | None,
    certificate: Mapping[str, Any] | None,
    licence: str | None,
    measured: Sequence[str] = (),
) -> None:
    """The model card and, for programs, `export.json`. Last, since it has the hashes of all the rest. `measured`: lines
    of what was found out besides the proof."""
    run, summary = source.run, read_summary(source.folder) or {}
    loaded_by = read_asked(source.folder / FOLDER).get("loaded_by")
    facts = replace(
        facts_of(run, source.encoder, reasons=source.reasons, loaded_by=loaded_by),
        steps=summary.get("steps", source.weights.step),
        before=summary.get("held_out_before"),
        after=summary.get("held_out_after"),
        is_merged=run.has_adapters and form not in ("adapter", "gguf-adapter"),
        usage=tuple(usage) if usage is not None else None,
        licence=licence,
        is_trained=source.is_trained,
    )
    hashes = hashes_of(folder)
    parts = [card(run, facts), *measured, *_proof_lines(form, kind, proof, missing, notes)]
    parts += [*_certificate_lines(certificate), *_plan_lines(source), *_hash_lines(source, hashes)]
    (folder / CARD).write_text("\n".join(parts) + "\n", encoding="utf-8")
    said = {
        "format": form,
        "type": kind,
        "proof": proof.as_dict() if proof else None,
        "not_proved": missing or None,
        "notes": list(notes),
        "files": hashes,
        "base": _base_hash(source),
        "data": _data_hash(source),
        "certificate": certificate,
    }
    (folder / PROOF).write_text(json.dumps(said, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def hashes_of(folder: Path) -> dict[str, str]:
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name not in (CARD, PROOF))
    return {str(file.relative_to(folder)): digest_file(file, "sha256") for file in files}


def _proof_lines(form: str, kind: str, proof: Proof | None, missing: str, notes: Sequence[str]) -> list[str]:
    lines = [f"## Proof of this export ({form}, {kind})", ""]
    if proof is None:
        lines += [f"Not proved: {missing}", ""]
    else:
        bound = BOUNDS[proof.precision]
        rows = [
            ("engine", proof.engine),
            (f"places compared, on {proof.data} data", f"{proof.places}"),
            ("same likeliest token", f"{proof.agreement:.2%}"),
            (
                f"same, ties within {bound.tie:g} nats aside",
                f"{proof.agreement_without_ties:.2%} (at least {bound.agreement:.0%})",
            ),
            ("largest difference of log-probabilities", f"{proof.largest:.2g}{_most(bound.largest)}"),
            ("mean divergence, nats a token", f"{proof.divergence:.2g}{_most(bound.divergence)}"),
            (f"perplexity; of {proof.reference}", f"{proof.perplexity:.4f}; {proof.reference_perplexity:.4f}"),
            ("tokens of texts and chat template", proof.chat_template),
            ("stops at", ", ".join(f"`{stop}`" for stop in proof.stops)),
            (f"greedy text, the same as of {proof.reference}", f"{proof.same_text} of {proof.text_tokens} tokens"),
        ]
        if proof.rounded_agreement is not None:
            rows.insert(4, (f"the same, of {proof.reference} rounded alike", f"{proof.rounded_agreement:.2%}"))
        if proof.adapter_share is not None:
            rows.append(("share of the adapter that is in it", f"{proof.adapter_share:.1%} (within {bound.share:.0%})"))
        lines += ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows), ""]
    return [*lines, *(f"- {note}" for note in notes), ""]


def _most(bound: float | None) -> str:
    return f" (at most {bound:g})" if bound is not None else ""


def _certificate_lines(certificate: Mapping[str, Any] | None) -> list[str]:
    if certificate is None:
        return []
    rows = [
        f"| {name.replace('_', ' ')} | {one['verdict']} | {one['found']} |"
        for name, one in certificate["checks"].items()
    ]
    return ["## Certificate of the run", "", "| check | verdict | found |", "| --- | --- | --- |", *rows, ""]


def _plan_lines(source: Source) -> list[str]:
    plan = read_plan(source.folder)
    if plan is None:
        return []
    rows = [
        ("device", plan.device),
        ("precision", plan.precision),
        ("base held in", plan.storage),
        ("sequence length", plan.sequence_length),
        ("sequences a step", plan.sequences_per_step),
        ("learning rate", plan.learning_rate),
        ("ranks", plan.mesh.ranks),
    ]
    return ["## Plan", "", "| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows), ""]


def _hash_lines(source: Source, hashes: Mapping[str, str]) -> list[str]:
    rows = [
        ("base, all tensors", _base_hash(source)),
        ("training data, tokenized", _data_hash(source)),
        *hashes.items(),
    ]
    known = [f"| {name} | `{value}` |" for name, value in rows if value is not None]
    return ["## Hashes", "", "| | |", "| --- | --- |", *known]


def _base_hash(source: Source) -> str | None:
    kept = read_json(source.folder / "base.json")
    if not isinstance(kept, dict) or "tensors" not in kept:
        return None
    return hashlib.sha256(json.dumps(kept["tensors"], sort_keys=True).encode()).hexdigest()


def _data_hash(source: Source) -> str | None:
    return (read_json(source.folder / "run.json") or {}).get("data")
