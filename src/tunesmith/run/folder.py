"""The folder of a run: what it was started with, whether it may be continued, and what came of it.

runs/NAME/  run.json       settings and fingerprints this run was started with
            plan.json      how it is done
            documents/     the loss of each document of each step
            base.json      the config and a hash of each tensor of the model it starts from
            events.jsonl   what happened
            bad_records.jsonl   records that cannot be trained on, where there are any
            side_files/    what will lie beside the weights: tokenizer, template, configs; `chat` and `merge` use them
            grown_base/    the model with new tokens, where there are any
            start/         the adapter that it begins with, where that is not drawn
            checkpoints/   to continue from
            adapter/       or model/: the trained weights
            summary.json   written last: the run is finished
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunesmith.checkpoint.files import write_atomic
from tunesmith.config.schema import Lora, Run
from tunesmith.disk import expanded, writing
from tunesmith.errors import UserError, listed
from tunesmith.plan.plan import Plan, first_problem, upgraded

FREE_SETTINGS = frozenset(
    {
        "bad_records",
        "exclude",
        "eval",
        "eval_every",
        "stop_when",
        "save_every",
        "keep",
        "max_minutes",
        "output",
        "device",
        "deterministic",
        "trust_remote_code",
        "profile_steps",
        "sweep",
    }
)
"""Settings that may change between sittings of a run: none of them touches what the steps compute."""


FORMAT = 2
"""Of run.json and plan.json. Folders of format 1 (0.1, which did not write it down) are continued."""
SWEEP = "sweep.json"
"""In the folder of a sweep, whose variants are runs in folders below."""
WRITTEN = ("adapter", "model", "checkpoints", "profile", "stacks", "start", "documents")
"""Folders that a run makes in its own."""

RESULTS = {"adapter": ("adapter_config.json", "*.safetensors"), "model": ("config.json", "*.safetensors")}
"""What a run gives, and the files that it cannot be opened without."""


@dataclass(frozen=True)
class Identity:
    """All that determines the course of a run."""

    settings: dict[str, Any]
    data: str
    """Fingerprint of the tokenized training data."""
    model: str
    """Fingerprint of the weights it starts from."""
    earlier: tuple[str, ...] = ()
    """Lineages it was continued from when changes were accepted, newest first."""

    @property
    def lineage(self) -> str:
        text = json.dumps([self.course, self.data, self.model], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def is_like(self, other: Identity) -> bool:
        return (self.course, self.data, self.model) == (other.course, other.data, other.model)

    @property
    def course(self) -> dict[str, Any]:
        """The settings that matter for the course. Data are known by their content, not by where they lie."""
        kept = {key: value for key, value in self.settings.items() if key not in FREE_SETTINGS | {"data", "model"}}
        if self.settings.get("method") == "full":
            kept.pop("lora", None)
        if self.settings.get("objective", "sft") == "sft":  # as runs were known before there were others
            kept.pop("objective", None)
            kept.pop("preference", None)
        is_on_policy = (self.settings.get("distillation") or {}).get("on_policy")
        if self.settings.get("objective") != "distill":
            kept.pop("distillation", None)
        elif not is_on_policy:  # as runs were known before it was a setting
            kept["distillation"] = {name: value for name, value in kept["distillation"].items() if name != "on_policy"}
        if self.settings.get("objective") not in ("classify", "classify_tokens"):
            kept.pop("labels", None)
        if self.settings.get("objective") != "embed":
            kept.pop("embedding", None)
        if self.settings.get("objective") not in ("grpo", "rloo"):
            kept.pop("rewards", None)
            if not is_on_policy:
                kept.pop("rollout", None)
        if (kept.get("rollout") or {}).get("engine") == "own":  # as runs were known before it was a setting
            kept["rollout"] = {name: value for name, value in kept["rollout"].items() if name != "engine"}
        return kept


def check_place(run: Run) -> None:
    """Refuse an output that would be mixed up with the model it is made from, or overwrite it."""
    model, output = expanded(run.model), expanded(run.output)
    if (output / SWEEP).exists():
        raise UserError(f"output: {run.output} is the folder of a sweep; set output to another folder.")
    for place, name in ((Path(output.anchor or "/"), "the root of the file system"), (Path.home(), "the home folder")):
        if os.path.realpath(output) == os.path.realpath(place):
            raise UserError(f"output: {run.output} is {name}; set output to a folder of the run's own in it.")
    if not model.exists():
        return  # a name on the hub, or a mistake that is told later
    model, output = (Path(os.path.realpath(path)) for path in (model, output))
    folder = model if model.is_dir() else model.parent
    if model == output or (model.is_dir() and output.is_relative_to(folder)):
        where = "is the folder of the model itself" if model == output else "lies inside the folder of the model"
    elif any(model.is_relative_to(output / name) for name in WRITTEN):
        where = f"is a folder in which the run would overwrite its own model, {run.model}"
    else:
        return
    raise UserError(f"output: {run.output} {where}; set output to another folder.")


def changed_settings(before: Identity, run: Run) -> list[str]:
    """What is set differently from when a run was started, one phrase each; where it is written does not matter."""
    try:
        old = Run.model_validate(before.settings)
    except ValueError:  # settings of another version
        return []
    was, now = (
        _flat(settings.model_dump(mode="json", exclude={"output"})) for settings in (old, as_begun(run, before))
    )
    return [
        f"{key} was {_shown(was.get(key))} and is now {_shown(now.get(key))}"
        for key in sorted(was.keys() | now.keys())
        if was.get(key) != now.get(key)
    ]


DECIDED = ("batch_tokens", "epochs", "learning_rate", "held_out")
"""Settings that a plan decides where they are left out. A run is known by what was decided, and keeps it."""


def decided(run: Run, plan: Plan) -> Run:
    """The settings with what the plan decided in the place of what they leave open."""
    by_plan = {
        "batch_tokens": plan.sequences_per_step * plan.sequence_length,
        "epochs": plan.epochs,
        "learning_rate": plan.learning_rate,
        "held_out": plan.held_out,
    }
    return run.model_copy(update={name: by_plan[name] for name in DECIDED if getattr(run, name) is None})


def as_begun(run: Run, before: Identity | None) -> Run:
    """The settings with what was decided when a run was begun in the place of what they leave open."""
    then = before.settings if before else {}
    return run.model_copy(update={name: then.get(name) for name in DECIDED if getattr(run, name) is None})


def identify(run: Run, *, data: str, model: str) -> Identity:
    return Identity(run.model_dump(mode="json"), data, model)


def differences(before: Identity, now: Identity) -> list[str]:
    """What a continued run would do differently, one phrase each."""
    old, new = _flat(before.course), _flat(now.course)
    changes = [
        f"{key} was {_shown(old.get(key))} and is now {_shown(new.get(key))}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
    if before.data != now.data:
        changes.append("the training data are not the same")
    if before.model != now.model:
        changes.append("the model's weights are not the same")
    return changes


def read_identity(folder: Path) -> Identity | None:
    content = read_json(folder / "run.json")
    if content is None:
        return None
    try:
        identity = Identity(content["settings"], content["data"], content["model"], tuple(content.get("earlier", ())))
        written = content.get("format", 1)
    except KeyError as error:
        raise UserError(
            f"{folder / 'run.json'} is damaged: {error} is missing; choose another output folder."
        ) from error
    except (TypeError, AttributeError) as error:
        raise UserError(f"{folder / 'run.json'} is damaged; choose another output folder.") from error
    if written == FORMAT:
        return _completed(identity)
    if written != 1:
        raise UserError(
            f"{folder} is of format {written}, and this version of tunesmith reads formats 1 and {FORMAT}; continue it "
            "with the version that wrote it, or choose another output."
        )
    return _from_format_1(identity)


def _from_format_1(identity: Identity) -> Identity:
    """The identity of a run of 0.1, with the settings that there were not yet, as it did without them. Its checkpoints
    have the lineage that it had."""
    settings = {"held_out": 0.0, "special_tokens": [], "bad_records": "stop", **identity.settings}
    if settings.get("too_long") == "truncate":  # the default, which is now to be left out
        settings["too_long"] = None
    return _completed(replace(identity, settings=settings, earlier=(identity.lineage, *identity.earlier)))


def _completed(identity: Identity) -> Identity:
    """The identity of a run that was begun before there were some settings, with what they are when left out. Its
    checkpoints have the lineage that it had."""
    settings = identity.settings
    usual = Run(model="model", data="data").model_dump(mode="json")
    lora = {**Lora().model_dump(mode="json"), **settings["lora"]} if isinstance(settings.get("lora"), dict) else None
    full = {**usual, **settings, **({} if lora is None else {"lora": lora})}
    if full == settings or "model" not in settings:
        return identity
    earlier = tuple(dict.fromkeys((identity.lineage, *identity.earlier)))
    return replace(identity, settings=full, earlier=earlier)


def write_identity(folder: Path, identity: Identity) -> None:
    content = {"format": FORMAT, "settings": identity.settings, "data": identity.data, "model": identity.model}
    write_json(folder / "run.json", content | ({"earlier": identity.earlier} if identity.earlier else {}))


def has_checkpoints(folder: Path) -> bool:
    """Whether there is anything to continue from, whole or damaged."""
    return any((folder / "checkpoints").glob("step-*"))


def read_run(folder: Path) -> Run:
    """The settings of the run in `folder`, for what comes after training: one whose adapters are merged into a model
    while it trains is then like any other that gives a model."""
    run = read_trained_run(folder)
    return run.model_copy(update={"method": "full"}) if run.is_merged else run


def read_trained_run(folder: Path) -> Run:
    """The settings of the run in `folder` as it was trained."""
    identity = read_identity(folder)
    if identity is None:
        refuse_sweep(folder)
        raise no_run(folder)
    usual = {name: field.default for name, field in Run.model_fields.items()}
    changed = {name: value for name, value in identity.settings.items() if name not in usual or value != usual[name]}
    try:
        run = Run.model_validate(changed)  # what is as usual was left to the model and its data
    except ValueError as error:
        problem = first_problem(error, "settings")
        raise UserError(
            f"{folder / 'run.json'} holds settings that this version does not have: {problem}; the file is damaged, "
            "or of another version of tunesmith, with which the run can be opened."
        ) from error
    return _found_again(run, folder)


def no_run(folder: Path) -> UserError:
    """What to say of a folder that is given for a run's and is none."""
    if not folder.exists():
        return UserError(f"{folder}: no such folder; give the output folder of a run.")
    found, there = f"{folder} holds no run (there is no run.json)", folder.resolve().parent
    is_adapter = (folder / "adapter_config.json").exists()
    if is_adapter or (folder / "config.json").exists():
        if (there / "run.json").exists():
            return UserError(f"{found}, but what the run in {there} has given; give that folder.")
        if is_adapter:
            return UserError(
                f"{found}, but an adapter by itself; peft merges it (`merge_and_unload`), and `adapter: {folder}` in "
                "the settings of a run trains on from it."
            )
        return UserError(
            f"{found}, but a model by itself, which `tunesmith chat`, `quantize` and `eval --tasks` take; give the "
            "output folder of a run here."
        )
    return UserError(f"{found}; give the output folder of a run.")


def _found_again(run: Run, folder: Path) -> Run:
    """What a run names by relative paths that are not there from here, because it was started from another folder or
    moved since together with what it names: they are looked for from where its output is named from."""
    own = folder / Path(run.model).name
    if run.new_tokens and not Path(run.model).exists() and (own / "config.json").exists():
        run = run.model_copy(update={"model": str(own)})  # made for this run, in its folder
    root = _root_of(run, folder)
    if root is None:
        return run
    changes: dict[str, Any] = {"model": _from(root, run.model)}
    for name in ("data", "eval"):
        changes[name] = [
            dataset if dataset.path is None else dataset.model_copy(update={"path": _from(root, dataset.path)})
            for dataset in getattr(run, name)
        ]
    return run.model_copy(update=changes)


def _root_of(run: Run, folder: Path) -> Path | None:
    """The folder that the run was started in, as far as its output tells; None where that is the one we are in."""
    output = Path(run.output)
    above, parts = folder.resolve().parent, output.parent.parts
    if output.is_absolute() or ".." in parts or "~" in parts or above.parts[len(above.parts) - len(parts) :] != parts:
        return None
    root = above.parents[len(parts) - 1] if parts else above
    return None if root == Path.cwd() else root


def _from(root: Path, path: str) -> str:
    """The path from there, if there is something and nothing from here."""
    if Path(path).is_absolute() or path.startswith("~") or _is_any(Path(), path) or not _is_any(root, path):
        return path
    return str(root / path)


def _is_any(root: Path, path: str) -> bool:
    """Whether there is such a file or folder, or one that a pattern stands for."""
    return (root / path).exists() or (any(sign in path for sign in "*?[") and any(root.glob(path)))


def refuse_sweep(folder: Path) -> None:
    """UserError where the folder is that of a sweep: which of its runs is meant?"""
    sweep = read_json(folder / SWEEP)
    if not isinstance(sweep, dict) or not isinstance(sweep.get("variants"), list):
        return
    runs = [str(folder / str(variant.get("name"))) for variant in sweep["variants"] if isinstance(variant, dict)]
    raise UserError(f"{folder} holds a sweep of {len(runs)} runs; give the folder of one of them: {listed(runs)}.")


def check_merged(folder: Path) -> None:
    """UserError where the model of a run that merges adapters as it trains is not there: its checkpoints hold parts of
    it."""
    run = read_trained_run(folder)
    if not run.is_merged or has_result(folder, "model"):
        return
    if (lost := lost_of_result(folder)) is not None:
        raise UserError(
            f"The run in {folder} was finished, but {lost} is gone, and checkpoints of method: {run.method} hold parts "
            "of its model; put it back, or `tunesmith train` makes it again."
        )
    raise UserError(
        f"{folder} is not finished, and method: {run.method} gives its model at the end; `tunesmith train` goes on."
    )


def has_result(folder: Path, name: str) -> bool:
    """Whether the folder of a run holds this result, `adapter` or `model`, with its weights."""
    return all(any((folder / name).glob(pattern)) for pattern in RESULTS[name])


def lost_of_result(folder: Path) -> Path | None:
    """What is gone of the result that the run in `folder` was finished with; None where nothing is, or where it is not
    finished."""
    summary = read_summary(folder)
    if summary is None:
        return None
    result = folder / summary["result"]
    if not result.is_dir():
        return result
    return next((result / pattern for pattern in RESULTS[result.name] if not any(result.glob(pattern))), None)


def read_plan(folder: Path) -> Plan | None:
    content = read_json(folder / "plan.json")
    if content is None:
        return None
    try:
        return Plan.model_validate(upgraded(content))
    except ValueError as error:
        raise UserError(
            f"{folder / 'plan.json'} is not a plan of this version: {first_problem(error)}. Mend it, or remove that "
            "file to have a new one made."
        ) from error


def write_start(folder: Path, identity: Identity, plan: Plan) -> None:
    """What the run is and how it is done. Killed in between, no plan is left that belongs to other settings."""
    if plan != read_plan(folder):
        with _writing(folder / "plan.json"):
            (folder / "plan.json").unlink(missing_ok=True)
    write_identity(folder, identity)
    write_json(folder / "plan.json", plan.model_dump(mode="json"))


def plan_differences(before: Plan, now: Plan) -> list[str]:
    """What a plan would do differently to a continued run, one phrase each; on how many ranks, and where weights and
    states live, it may choose anew."""
    predicted = {"memory", "peak", "phases", "memory_limit", "host_memory", "disk", "time", "beyond", "reasons"}
    elsewhere = {"offload_optimizer", "offload_parameters", "offload_activations"}
    tried = {"forward", "fuse_adapters", "kernels", "adapted", "by_length"}
    harmless = (
        predicted | elsewhere | tried | {"device", "mesh", "sharding", "schedule", "async_checkpoint", "cuda_graphs"}
    )
    old, new = (_flat(plan.model_dump(mode="json", exclude=harmless)) for plan in (before, now))
    return [
        f"the plan's {key} was {_shown(old.get(key))} and is now {_shown(new[key])}"
        for key in new
        if old.get(key) != new[key]
    ]


def write_bad_records(folder: Path, bad: Iterable[Any]) -> Path:
    """Records that cannot be trained on (`data.types.RecordError`), one a line."""
    path = folder / "bad_records.jsonl"
    lines = (
        {
            "file": record.origin.file,
            record.origin.unit: record.origin.line,
            "kind": record.kind,
            "reason": record.reason,
        }
        for record in bad
    )
    with _writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())
    return path


def read_summary(folder: Path) -> dict[str, Any] | None:
    summary = read_json(folder / "summary.json")
    if summary is not None and not (isinstance(summary, dict) and {"steps", "result"} <= summary.keys()):
        raise UserError(f"{folder / 'summary.json'} is damaged; remove it and run `tunesmith train` again.")
    return summary


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    write_json(folder / "summary.json", summary)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        above = next(one for one in path.parents if one.exists())
        raise UserError(f"{above} is a file where the output folder of a run is needed; give another one.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}; repair it or choose another output folder.") from error


def write_json(path: Path, content: Any) -> None:
    with _writing(path):
        write_atomic(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    with writing(path, "make room there or choose another output"):
        yield


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)
