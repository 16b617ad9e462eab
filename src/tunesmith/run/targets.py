"""What can be evaluated: a run, the base of a run, or a model by itself; known by content, opened when needed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tunesmith.cache import cache_folder
from tunesmith.checkpoint.files import digest_file
from tunesmith.checkpoint.store import CheckpointStore
from tunesmith.config.schema import Run
from tunesmith.disk import expanded
from tunesmith.errors import UserError
from tunesmith.model import load, side_files
from tunesmith.plan.models import check_there, find
from tunesmith.plan.plan import ForwardSpec
from tunesmith.run.base import FILE as BASE_FILE
from tunesmith.run.folder import RESULTS, has_result, read_identity, read_plan, read_run
from tunesmith.run.open import (
    Opened,
    open_base,
    open_plain,
    open_run,
    own_placement,
    placement,
    refuse_encoder_decoder,
    refuse_head,
)
from tunesmith.run.there import check_base_there, no_result, run_to_open

BASE = "base"
FOLDER = "evaluations"
WEIGHTS = (".safetensors", ".json", ".jinja", ".model", ".txt", ".tiktoken", ".gguf")


@dataclass(frozen=True)
class Target:
    name: str
    key: str
    """Of the content of its files, its precision and its device."""
    folder: Path
    """Where its results are kept: a run's in its own folder, others' in the cache."""
    open: Callable[[], Opened]
    known: ForwardSpec | None = None
    """How it is called, as a run's plan says."""


def find_target(text: str) -> Target:
    """A run's folder, a model's folder, a GGUF file or a hub name. UserError before anything is loaded."""
    refuse_encoder_decoder(text, "be given tasks here; `tunesmith eval` without them measures its held-out loss")
    folder = expanded(text)
    if folder.is_dir() and (read_identity(folder) is not None or not _is_model(folder)):
        return _run(folder)
    check_there(text)
    place, dtype = own_placement()
    key = _key(_content_of(text), place, dtype)
    return Target(folder.name if folder.exists() else text, key, _shared(), lambda: open_plain(text))


def base_of(text: str) -> Target:
    """The model that a run was trained from."""
    folder = expanded(text)
    if read_identity(folder) is None:
        raise UserError(f"{text} is no run, so it has no base here; name another model with --against.")
    run = read_run(folder)
    check_base_there(folder, run)
    plan = read_plan(folder)
    kept = folder / BASE_FILE
    content = [digest_file(kept)] if kept.exists() else _content_of(run.model)
    key = _key([*content, *_side_files(folder), plan.storage if plan else None], *placement(plan))
    return Target("base", key, _shared(), lambda: open_base(folder), plan.forward if plan else None)


def _run(folder: Path) -> Target:
    refuse_head(folder, "be asked")
    run = run_to_open(folder)
    plan = read_plan(folder)
    content: list[str | None] = [*_side_files(folder), plan.storage if plan else None]
    trained = next((folder / name for name in RESULTS if has_result(folder, name)), None)
    if trained is not None:
        content += _digests(trained)
    else:
        content += _checkpoint(folder)
    if trained is None or trained.name == "adapter":
        kept = folder / BASE_FILE
        content += [digest_file(kept)] if kept.exists() else _content_of(run.model)
    key = _key(content, *placement(plan))
    name = folder.resolve().name
    return Target(name, key, folder / FOLDER, lambda: open_run(folder), plan.forward if plan else None)


def _checkpoint(folder: Path) -> list[str]:
    identity = read_identity(folder)
    assert identity is not None
    known = folder / "checkpoints"
    checkpoint = CheckpointStore(known, identity.lineage).latest() if known.is_dir() else None
    if checkpoint is None:
        raise no_result(folder)
    return [f"{identity.lineage}:{checkpoint.step}"]


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").exists() or any(folder.glob("*.gguf"))


def _content_of(model: str) -> list[str]:
    location = find(model)
    if location.kind == "hub":
        return [load.model_fingerprint(Run(model=model, data=model))]
    path = Path(location.location)
    return [digest_file(path)] if path.is_file() else _digests(path)


def _side_files(folder: Path) -> list[str]:
    kept = folder / side_files.FOLDER
    return _digests(kept) if kept.is_dir() else []


def _digests(folder: Path) -> list[str]:
    files = sorted(file for file in folder.iterdir() if file.suffix in WEIGHTS and file.is_file())
    return [f"{file.name}:{digest_file(file)}" for file in files]


def _key(content: Iterable[str | None], place: str, dtype: str) -> str:
    return hashlib.sha256(json.dumps([*content, place, dtype]).encode()).hexdigest()[:32]


def _shared() -> Path:
    return cache_folder() / FOLDER
