"""`tunesmith init`: three questions and a look at machine, model and data, then a commented run.yaml.

The file is made from the schema, so each setting carries its sentence and its default. What the plan decides from the
data and the model is shown, with its reasons, and stands in the file as a comment: it stays open, so that other data
get other values.
"""

from __future__ import annotations

import glob
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

METHODS = ("lora", "qlora", "full")
HEADED = ("data", "eval", "lora", "preference", "distillation", "embedding", "rollout")
"""Settings of several lines."""


def command(
    path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("run.yaml"),
    model: Annotated[str | None, typer.Option(help="Model: folder, .gguf file or hub name.")] = None,
    data: Annotated[str | None, typer.Option(help="Data: file, folder or glob; hub:NAME for the hub.")] = None,
    method: Annotated[
        str | None, typer.Option(help="lora (adapters), qlora (over a base in 4 bits) or full (every weight).")
    ] = None,
    output: Annotated[str | None, typer.Option(help="Folder of the run.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")] = False,
) -> None:
    """Ask three questions, look at the machine, and write a commented run.yaml.

    Answers given as options are not asked for.
    """
    from tunesmith.cli.output import note, say, stage, table

    stage("Looking at this machine")
    from tunesmith.checkpoint.files import write_atomic
    from tunesmith.config.load import load
    from tunesmith.disk import writing
    from tunesmith.errors import UserError

    if path.is_dir():
        path = path / "run.yaml"
    if path.exists() and not force:
        raise UserError(f"{path} exists already; name another file, or overwrite it with --force")
    proposal = propose(method or "lora")
    answers = _ask(model, data, method, proposal)
    stage("Reading the model's config and the data")
    target = output or f"runs/{_run_name(answers.data)}"
    decided = _decided(answers, target)
    text = write_settings(answers, target, decided.proposed)
    with writing(path, "name another file"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode())
    load(path)  # what we write, we can read
    if decided.reasons:
        say(table(("left open", "proposed", "why"), decided.reasons))
    if decided.remark:
        note(decided.remark)
    say(f"Wrote {path} for {proposal.machine}. Next:")
    say(f"  tunesmith check {path}    the data as the model will see it")
    say(f"  tunesmith plan {path}     what the run will need, and why")
    say(f"  tunesmith train {path}    train; run it again to continue")


@dataclass(frozen=True)
class Proposal:
    """A start that fits this machine."""

    machine: str
    model: str


@dataclass(frozen=True)
class Answers:
    model: str
    data: str
    method: str


def propose(method: str) -> Proposal:
    """By the memory of the first GPU, else a model that a CPU can train while one watches."""
    from tunesmith.plan.hardware import probe

    machine = probe()
    if not machine.gpus:
        return Proposal(f"{machine.cores} CPU cores", "HuggingFaceTB/SmolLM2-135M-Instruct")
    gpu = machine.gpus[0]
    gibibytes = gpu.memory / 2**30
    # Every weight trained costs about 16 bytes with AdamW; a frozen one 2 in bf16.
    room = gibibytes / 8 if method == "full" else gibibytes
    for at_least, name in _SIZES:
        if room >= at_least:
            return Proposal(f"{gpu.name}, {gibibytes:.0f} GiB", name)
    raise AssertionError("the last row takes everything")


_SIZES = (
    (60, "Qwen/Qwen3-14B"),
    (30, "Qwen/Qwen3-8B"),
    (15, "Qwen/Qwen3-4B"),
    (7, "Qwen/Qwen3-1.7B"),
    (3, "Qwen/Qwen3-0.6B"),
    (0, "HuggingFaceTB/SmolLM2-135M-Instruct"),
)
"""GiB of GPU memory for adapters -> model, with room for activations."""


@dataclass(frozen=True)
class Decided:
    """What a plan would decide now of what the settings leave open."""

    proposed: dict[str, Any]
    """By setting."""
    reasons: list[tuple[str, str, str]]
    """Topic, choice and why."""
    remark: str | None = None


_TOPICS = ("batch", "sequence length", "epochs", "steps", "learning rate", "held out")


def _decided(answers: Answers, output: str) -> Decided:
    """From the data's files and the model's config, as far as they can be read from here."""
    from tunesmith.config.schema import Run
    from tunesmith.errors import UserError
    from tunesmith.run.choose import new_plan
    from tunesmith.run.folder import DECIDED, decided

    key, source = _source(answers)
    run = Run.model_validate(
        {"model": answers.model, "method": answers.method, "data": {key: source}, "output": output}
    )
    try:
        plan = new_plan(run)
    except UserError as problem:
        return Decided({}, [], f"What the plan will decide is not known yet: {problem}")
    chosen = decided(run, plan)
    reasons = [(reason.topic, reason.choice, reason.why) for reason in plan.reasons if reason.topic in _TOPICS]
    return Decided({name: getattr(chosen, name) for name in DECIDED}, reasons)


def _source(answers: Answers) -> tuple[str, str]:
    return ("hub", answers.data[4:]) if answers.data.startswith("hub:") else ("path", answers.data)


def write_settings(answers: Answers, output: str, proposed: Mapping[str, Any]) -> str:
    """The text of run.yaml: the usual settings, then all others commented out with their defaults, or with what is
    proposed at the time."""
    from tunesmith.config.schema import Dataset, Distillation, Embedding, Lora, Preference, Rollout, Run
    from tunesmith.run.folder import DECIDED

    key, source = _source(answers)
    active: dict[str, Any] = {"model": answers.model, "method": answers.method, "output": output}
    lora = {} if answers.method == "full" else {"rank": Lora().rank}
    open_settings = {name: proposed.get(name) for name in DECIDED}
    lines = [
        "# Settings of a fine-tuning run. Each line says what it is for; docs/settings.md has them all.",
        "# Paths are relative to the folder in which tunesmith is started.",
        "# Editors complete this file after `tunesmith schema > run.schema.json`, if its first line is",
        "#   # yaml-language-server: $schema=run.schema.json",
        "",
        *(_line(Run, name, active[name]) for name in ("model", "method")),
        "",
        _headed("data:", Run, "data"),
        _line(Dataset, key, source, "  - "),
        *_defaults(Dataset, {"path", "hub"}, "    # "),
        "",
        _headed("# eval:", Run, "eval"),
        "#   - path: held_out.jsonl",
        "",
        *(_line(Run, name, active[name]) for name in list(active)[2:]),
        "",
        _headed("lora:" if lora else "# lora:", Run, "lora"),
        *(_line(Lora, name, value, "  ") for name, value in lora.items()),
        *_defaults(Lora, set(lora), "  # " if lora else "#   "),
        _headed("# preference:", Run, "preference"),
        *_defaults(Preference, set(), "#   "),
        _headed("# distillation:", Run, "distillation"),
        *_defaults(Distillation, set(), "#   "),
        _headed("# embedding:", Run, "embedding"),
        *_defaults(Embedding, set(), "#   "),
        _headed("# rollout:", Run, "rollout"),
        *_defaults(Rollout, set(), "#   "),
        "",
        "# Decided by the plan from the data, the model and the method; a value given here wins.",
        *(_line(Run, name, value, "# ") for name, value in open_settings.items()),
        "",
        "# The rest, with the defaults; take away the `# ` to change one.",
        *_defaults(Run, {*active, *open_settings, *HEADED}, "# "),
    ]
    return "\n".join(lines) + "\n"


def _ask(model: str | None, data: str | None, method: str | None, proposal: Proposal) -> Answers:
    """Options are checked and fail; typed answers are checked and asked again."""
    from tunesmith.errors import UserError

    missing = [name for name, given in (("--model", model), ("--data", data)) if given is None]
    if missing and not _is_terminal():
        raise UserError(f"there is no terminal to ask in; give {' and '.join(missing)}")
    for check, given in ((_wrong_model, model), (_wrong_data, data), (_wrong_method, method)):
        if given is not None and (wrong := check(_expand(given))):
            raise UserError(wrong)
    model = model or _prompt("Model (folder, .gguf file or hub name)", proposal.model, _wrong_model)
    data = data or _prompt("Data (file, folder or glob; hub:NAME for the hub)", None, _wrong_data)
    if method is None:
        question = "Method (lora: adapters, qlora: adapters over a base in 4 bits, full: every weight)"
        method = _prompt(question, "lora", _wrong_method) if _is_terminal() else "lora"
    return Answers(_expand(model), _expand(data), method)


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _prompt(question: str, default: str | None, check: Callable[[str], str | None]) -> str:
    from tunesmith.cli.output import clear_bottom

    clear_bottom()
    while True:
        answer = typer.prompt(question, default=default).strip()
        wrong = check(_expand(answer))
        if not wrong:
            return answer
        typer.echo(f"  {wrong}")


def _wrong_model(model: str) -> str | None:
    if not model.strip():
        return "the model is blank; name a folder, a .gguf file or a model on the hub"
    looks_like_path = model.startswith((".", "/", "\\")) or model.endswith(".gguf") or model.count("/") > 1
    if looks_like_path and not Path(model).exists():
        return f"the model {model} does not exist"
    return None


def _wrong_data(data: str) -> str | None:
    if not data.removeprefix("hub:").strip():
        return "the data is blank; name a file, a folder or a glob, or hub:NAME"
    if data.startswith("hub:") or Path(data).exists() or glob.glob(data, recursive=True):
        return None
    return f"the data {data} does not exist (write hub:{data} for a data set on the hub)"


def _wrong_method(method: str) -> str | None:
    if method in METHODS:
        return None
    return f"the method {method!r} is not known; say {', '.join(METHODS[:-1])} or {METHODS[-1]}"


def _expand(path: str) -> str:
    """A shell turns ~ into the home folder; a prompt and a settings file do not."""
    from tunesmith.disk import expanded

    return str(expanded(path)) if path.startswith("~") else path


def _run_name(data: str) -> str:
    """`data/support.jsonl.gz` -> `support`."""
    name = re.split(r"[/\\]", data.rstrip("/\\"))[-1].split(".")[0]
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") or "default"


def _line(model: Any, name: str, value: Any, lead: str = "") -> str:
    return _headed(f"{lead}{name}: {_yaml(value)}", model, name)


def _headed(setting: str, model: Any, name: str) -> str:
    return f"{setting:<36} # {model.model_fields[name].description}"


def _defaults(model: Any, without: set[str], lead: str) -> list[str]:
    """The settings left to their defaults, commented out."""
    return [
        _line(model, name, field.get_default(call_default_factory=True), lead)
        for name, field in model.model_fields.items()
        if name not in without
    ]


def _yaml(value: Any) -> str:
    """One value as YAML; text is quoted when anything could read it as something else."""
    if (
        isinstance(value, str)
        and re.fullmatch(r"[A-Za-z_/.][A-Za-z0-9_/.-]*", value)
        and value.lower() not in _NOT_TEXT
    ):
        return value
    if isinstance(value, float):
        return f"{value:g}" if value >= 0.001 or value == 0 else f"{value:.0e}".replace("e-0", "e-")
    return json.dumps(value, ensure_ascii=False)


_NOT_TEXT = {"null", "true", "false", "yes", "no", "on", "off", "y", "n", ".inf", ".nan", ".", "..", "..."}
