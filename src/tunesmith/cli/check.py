"""`tunesmith check`: the data as the model will see it, in numbers and token by token.

What is shown is taken out of the micro-batches that the trainer would be fed, not out of the tokenizer: a fault
anywhere on the way would be seen here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.text import Text

    from tunesmith.config.schema import Run
    from tunesmith.data.prepare import Prepared
    from tunesmith.data.store import TokenStore
    from tunesmith.data.types import MicroBatch

SHOWN_TOKENS = 1000
"""Of a longer example, the middle is left out."""


def command(
    config: Annotated[Path, typer.Argument(help="The run's settings; KEY=VALUE alone need no file.")] = Path(
        "run.yaml"
    ),
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the file's.")
    ] = None,
    examples: Annotated[int, typer.Option(min=0, help="Examples to show of each data set.")] = 3,
    dataset: Annotated[str | None, typer.Option(help="Show this data set only.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show examples one token a line.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, for programs.")] = False,
) -> None:
    """Show the data as the model will see it: counts, lengths, tokens, targets in colour, warnings."""
    from tunesmith.cli.output import print_json, stage, warn

    stage(f"Reading {config}")
    from tunesmith.config.load import load
    from tunesmith.errors import UserError
    from tunesmith.plan.models import check_there

    run = load(config, overrides or []).run
    if run.objective.startswith("classify"):
        from tunesmith.data.labels import with_labels

        run = with_labels(run)
    if run.new_tokens:
        from tunesmith.model.grown import grown

        run = grown(run)
    check_there(run.model)
    stage(f"Reading the tokenizer of {run.model}")
    from tunesmith.model.load import load_tokenizer

    tokenizer = load_tokenizer(run)
    if run.objective == "distill":
        from tunesmith.run.teacher import check_teacher

        check_teacher(run)
    report = examine(run, tokenizer, examples=examples, dataset=dataset)
    if as_json:
        print_json(report)
        return
    _show(report, one_a_line=tokens)
    for warning in report["warnings"]:
        warn(warning)
    if report["bad"] and run.bad_records == "stop":
        count = len(report["bad"])
        raise UserError(
            f"{count:,} record{'s' * (count > 1)} cannot be trained on; mend {'them' if count > 1 else 'it'}, or leave "
            f"{'them' if count > 1 else 'it'} out with `bad_records: skip`."
        )


def examine(run: Run, tokenizer: Any, *, examples: int = 3, dataset: str | None = None) -> dict[str, Any]:
    """Everything that `check` shows, as plain values."""
    from tunesmith.cli import output
    from tunesmith.data.loader import Loader
    from tunesmith.data.prompts import PromptLoader
    from tunesmith.evaluate.tasks import task_of
    from tunesmith.objectives import objective_of
    from tunesmith.plan.defaults import few_steps
    from tunesmith.rewards import Rewards
    from tunesmith.run.choose import new_plan, tokenize
    from tunesmith.run.rollout import check_rewards

    # Data can be looked at on a machine without the GPU that the run will have.
    # Bad records are shown beside the good ones, whatever a run would do about them.
    run = run.model_copy(update={"device": "auto", "precision": "auto", "bad_records": "skip"})
    new_plan(run)
    tasks = [task_of(one) for one in run.eval_tasks]
    prepared = tokenize(run, None, output.progress)
    plan = new_plan(run, data=prepared)
    has_rollouts = objective_of(run).has_rollouts
    amount = {"seed": run.seed, "epochs": plan.epochs, "steps": run.steps}
    if has_rollouts:
        check_rewards(Rewards(run.rewards), (*prepared.train, *prepared.evals))
        loader = PromptLoader(prepared.train, prepared.weights, **amount, prompts=run.rollout.prompts)
    else:
        sizes = {"sequence_length": plan.sequence_length, "sequences_per_step": plan.sequences_per_step}
        loader = Loader(prepared.train, prepared.weights, **amount, **sizes)
    shown = partial(seen, tokenizer=tokenizer, run=run)
    few = few_steps(loader.total_steps) if run.steps is None and not has_rollouts else None
    return {
        "prompts_per_step": run.rollout.prompts if has_rollouts else None,
        "sequence_length": plan.sequence_length,
        "sequences_per_step": plan.sequences_per_step,
        "sequences": loader.total_sequences if isinstance(loader, Loader) else loader.total,
        "steps": loader.total_steps,
        "epochs": loader.epoch_of(loader.total_steps - 1),
        "datasets": [
            _described(store, use, weight, plan.sequence_length)
            | {"shown": [one.plain() for i in range(min(examples, len(store))) for one in shown(store, i)]}
            for store, use, weight in _chosen(prepared, dataset)
        ],
        "unread": _unread(run),
        "tasks": [{"title": one.title, "kind": one.kind, "items": len(one.items)} for one in tasks],
        "bad": [{"where": str(one.origin), "kind": one.kind, "reason": one.reason} for one in prepared.bad],
        "warnings": [*prepared.warnings, *([f"{_steps(loader.total_steps)} {few}."] if few else [])],
    }


def _unread(run: Run) -> list[dict[str, Any]]:
    """Fields of the records that nothing is made of, by data set."""
    from tunesmith.data.prepare import unread_fields
    from tunesmith.objectives import objective_of

    found = [(one.title, unread_fields(one, objective_of(run).records)) for one in run.data]
    return [{"title": title, "fields": names} for title, names in found if names]


@dataclass(frozen=True)
class Seen:
    """One example, token by token, as a micro-batch holds it."""

    origin: str
    ids: list[int]
    texts: list[str]
    """Of a character made of several tokens, the last one has the text."""
    weights: list[float]
    """Of each token as a target; 0 where it is only context."""
    facts: dict[str, Any] | None = None
    """Of a prompt that the model itself answers: what its record says besides."""
    labels: list[str | None] | None = None
    """Of words with labels: that of each token which has one."""
    said: str | None = None
    """What the data say of it as a whole: a label or score, or which of an example's texts it is."""

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def seen(store: TokenStore, index: int, tokenizer: Any, run: Run) -> list[Seen]:
    """The documents of an example: of a pair, the answer that is chosen and the one that is rejected."""
    from tunesmith.data import loader
    from tunesmith.objectives import objective_of

    if facts := store.facts(index):
        ids = store.document(store.documents(index)[0])[0].tolist()
        return [Seen(store.origin(index), ids, token_texts(tokenizer, ids), [0.0] * len(ids), facts)]
    documents = loader.documents_of(store, index, 0)
    if not store.is_tagged:
        found = documents_of(loader.micro_batch_of(documents), tokenizer)
        if store.is_paired:
            return [_source_first(one) for one in found]
        said = _said(run, [store.value(document) for document in store.documents(index)])
        objective = objective_of(run)
        if objective.has_head or objective.has_embeddings:  # no token is a target
            found = [replace(one, weights=[0.0] * len(one.ids)) for one in found]
        return [replace(one, said=what) for one, what in zip(found, said, strict=True)]
    batch = loader.micro_batch_of(documents, rows="tagged")
    pairs = zip(batch.weights.tolist(), batch.labels.tolist(), strict=True)
    labels = [run.labels[label] if weight else None for weight, label in pairs]
    ids = batch.tokens.tolist()
    return [Seen(store.origin(index), ids, token_texts(tokenizer, ids), batch.weights.tolist(), labels=labels)]


def _said(run: Run, values: Sequence[float]) -> list[str | None]:
    """Of each document of an example, given what the data say of them."""
    from tunesmith.data.preferences import RANKED
    from tunesmith.objectives import objective_of

    first, count = values[0], len(values)
    if run.objective == "classify":
        return [f"labelled {run.labels[int(first)]}"]
    if run.objective == "kto":
        return ["an answer that is wanted" if first > 0.5 else "an answer that is not wanted"]
    if run.objective == "embed":
        if first != RANKED:
            return [f"one of two texts with the score {first:g}"] * count
        return ["the anchor", "what belongs to it", *["what does not belong to it"] * (count - 2)]
    if run.objective == "reward" and count == 1:
        return [f"score {first:g}"]
    if objective_of(run).documents == 2:
        margin = f", ahead by {first:g}" if run.objective == "reward" and first else ""
        return [f"the chosen answer{margin}", "the rejected answer"]
    return [None] * count


def _source_first(one: Seen) -> Seen:
    """An encoder-decoder's example as it is read and written: the source, then the start and its targets."""
    at = 1 + sum(weight > 0 for weight in one.weights)
    parts = {name: [*getattr(one, name)[at:], *getattr(one, name)[:at]] for name in ("ids", "texts", "weights")}
    return replace(one, **parts)


def documents_of(batch: MicroBatch, tokenizer: Any) -> list[Seen]:
    """A micro-batch read backwards: which tokens each document has, and which of them are predicted."""
    documents = []
    bounds = batch.boundaries.tolist()
    for origin, start, end in zip(batch.origins, bounds[:-1], bounds[1:], strict=True):
        ids = batch.tokens[start:end].tolist()
        weights = [0.0, *batch.weights[start : end - 1].tolist()]
        labels = batch.labels[start:end].tolist()
        assert all(labels[i - 1] == ids[i] for i, weight in enumerate(weights) if weight), origin
        documents.append(Seen(origin, ids, token_texts(tokenizer, ids), weights))
    return documents


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token where it stands: joined, they are the text of all.

    Tokens are decoded with those before them, since alone many lose a space or are half a character.
    """
    texts: list[str] = []
    before, start = 0, 0  # what was written last, and what is not written yet
    for end in range(1, len(ids) + 1):
        known = tokenizer.decode(ids[before:start])
        now = tokenizer.decode(ids[before:end])
        if now.endswith("\ufffd") and end < len(ids) and end - start < 4:
            texts.append("")
            continue
        texts.append(now[len(known) :])
        before, start = start, end
    return texts


def _chosen(prepared: Prepared, name: str | None) -> Iterator[tuple[TokenStore, str, float | None]]:
    from tunesmith.errors import UserError, listed

    everything = [
        *((store, "train", weight) for store, weight in zip(prepared.train, prepared.weights, strict=True)),
        *((store, "eval", None) for store in prepared.evals),
    ]
    titles = [store.title for store, _, _ in everything]
    if name is not None and name not in titles:
        raise UserError(f"--dataset: there is no data set {name}; there are {listed(titles)}.")
    return (item for item in everything if name in (None, item[0].title))


def _described(store: TokenStore, use: str, weight: float | None, length: int) -> dict[str, Any]:
    from tunesmith.data.loader import pack_in_windows
    from tunesmith.data.pack import fill

    sequences = sum(1 for _ in pack_in_windows(store.lengths, length))
    return {
        "title": store.title,
        "use": use,
        "weight": weight,
        **asdict(store.report),
        "target_share": store.report.target_share,
        "sequences": sequences,
        "fill": fill(store.report.tokens, sequences, length),
    }


# Showing


def _show(report: dict[str, Any], one_a_line: bool) -> None:
    from tunesmith.cli.output import say, table

    _show_data(report)
    amount = f"{report['sequences']:,} packed sequences of {report['sequence_length']:,} tokens, "
    amount += f"{report['sequences_per_step']:,} a step"
    if report["prompts_per_step"]:
        amount = (
            f"{report['sequences']:,} prompts, {report['prompts_per_step']:,} a step, which the model itself answers"
        )
    say(f"Training: {amount}; steps: {report['steps']:,}, epochs: {report['epochs']:.4g}.")
    if report["bad"]:
        say()
        columns = ("record", "kind", "what is wrong")
        say(table(columns, [list(one.values()) for one in report["bad"]], title="Bad records"))
    for one in report["datasets"]:
        for number, shown in enumerate(one["shown"], start=1):
            say()
            _show_example(f"{one['title']}, example {number}", shown, one_a_line)


def _show_data(report: dict[str, Any]) -> None:
    """Tables of the data sets and tasks: what became of their records, and how long these are."""
    from tunesmith.cli.output import say, table
    from tunesmith.errors import listed

    columns = ("data set", "for", "weight", "format", "records", "examples", "truncated", "split", "dropped")
    rows = [
        (
            one["title"],
            one["use"],
            None if one["weight"] is None else f"{one['weight']:g}",
            one["format"],
            *(f"{one[name]:,}" for name in ("records", "examples", "truncated", "split")),
            _dropped(one),
        )
        for one in report["datasets"]
    ]
    say(table(columns, rows, title="Data", right=("weight", *columns[4:8])))
    say()
    if report["tasks"]:
        rows = [(one["title"], one["kind"], f"{one['items']:,}") for one in report["tasks"]]
        say(table(("task", "kind", "items"), rows, title="Asked while it trains", right=("items",)))
        say()
    for one in report["unread"]:
        say(f"{one['title']}: not read of its records: {listed(one['fields'], most=12)}.")
    if report["unread"]:
        say()
    columns = ("data set", "shortest", "median", "95%", "longest", "tokens", "targets", "sequences", "full")
    rows = [
        (
            one["title"],
            *(f"{one[name]:,}" for name in ("shortest", "median", "p95", "longest", "tokens")),
            f"{one['target_share']:.1%}",
            f"{one['sequences']:,}",
            f"{one['fill']:.1%}",
        )
        for one in report["datasets"]
    ]
    say(table(columns, rows, title="Lengths in tokens", right=columns[1:]))
    say()


def _show_example(title: str, shown: dict[str, Any], one_a_line: bool) -> None:
    from tunesmith.cli.output import say, stdout

    has_colour = stdout().color_system is not None and not stdout().no_color
    targets = sum(weight > 0 for weight in shown["weights"])
    about = f"{targets:,} of them targets, {'in colour' if has_colour else 'in [brackets]'}"
    if shown["said"] is not None:
        about = f"{shown['said']}; {about}" if targets else shown["said"]
    if shown["facts"] is not None:
        about = "a prompt, with " + ", ".join(f"{k}: {str(v)[:200]!r}" for k, v in shown["facts"].items())
    say(f"{title} ({shown['origin']}): {len(shown['ids']):,} tokens, {about}", style="bold")
    if one_a_line:
        say(_token_table(shown))
        return
    labels = shown["labels"] or [None] * len(shown["ids"])
    pairs = zip(shown["texts"], labels, strict=True)
    texts = [text if label is None else f"{text}/{label}" for text, label in pairs]
    say(marked(texts, shown["weights"], has_colour))


def marked(texts: Sequence[str], weights: Sequence[float], has_colour: bool) -> Text:
    """The text with its targets in colour, shades alternating from token to token; or in brackets."""
    from rich.text import Text

    out = Text()
    hidden = range(SHOWN_TOKENS // 2, len(texts) - SHOWN_TOKENS // 2)
    was_target = False
    for i, (text, weight) in enumerate(zip(texts, weights, strict=True)):
        is_target = weight > 0
        if not has_colour and is_target != was_target:
            out.append("[" if is_target else "]")
        was_target = is_target
        if i in hidden:
            if i == hidden.start:
                out.append(f" ... {len(hidden):,} tokens not shown ... ", "italic")
            continue
        out.append(text.translate(_CONTROLS), _style(i, weight) if has_colour else None)
    if was_target and not has_colour:
        out.append("]")
    return out


# A control character in the data must not reach the terminal: it is shown by its picture.
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}


def _style(i: int, weight: float) -> str:
    if weight == 0:
        return "dim" if i % 2 else "default"
    if weight == 1:
        return "green" if i % 2 else "bold green"
    return "yellow" if i % 2 else "bold yellow"


def _token_table(shown: dict[str, Any]) -> Any:
    from rich.text import Text

    from tunesmith.cli.output import table

    counted = shown["labels"] or [f"{weight:g}" if weight else "" for weight in shown["weights"]]
    name = "target weight" if shown["labels"] is None else "label"
    rows = [
        (i, token, Text(repr(text), "green" if said else ""), said or "")
        for i, (token, text, said) in enumerate(zip(shown["ids"], shown["texts"], counted, strict=True))
    ]
    return table(("position", "id", "text", name), rows, right=("position", "id", "target weight"))


def _dropped(one: dict[str, Any]) -> str:
    reasons = {
        "bad": one["bad"],
        "too long": one["dropped_too_long"],
        "targets cut off": one["dropped_targets_cut_off"],
        "no targets": one["dropped_without_targets"],
    }
    return ", ".join(f"{count:,} {reason}" for reason, count in reasons.items() if count) or "0"


def _steps(count: int) -> str:
    return "1 step is" if count == 1 else f"{count} steps are"
