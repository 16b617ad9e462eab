"""The command `tunesmith`: its verbs, and what happens when one of them fails.

Each verb is a function `command` in a file of its own, which imports nothing but typer and the standard
library until it runs; that keeps `tunesmith --help` quick. An error that the user can fix, or that a disk
made, is one sentence on stderr and exit code 1. Anything else is our fault: one sentence, a traceback in a file,
exit code 70.
"""

from __future__ import annotations

import gc
import io
import os
import shutil
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from tunesmith import __version__, disk
from tunesmith.cache import keep_bytecode
from tunesmith.cli import (
    bench,
    branch,
    chat,
    check,
    doctor,
    evaluate,
    export,
    init,
    launch,
    lr,
    merge,
    network,
    plan,
    profile,
    quantize,
    report,
    schema,
    serve,
    train,
    ui,
)
from tunesmith.errors import UserError, UserErrors
from tunesmith.launch.local import write_failure

INTERRUPTED = 130
OUR_FAULT = 70
COLLECTING = 20_000, 20, 50
"""How many objects are made before Python looks for garbage, among new ones and then among older ones. The usual 700
are for programs of another size: of importing torch and what belongs to it that took a seventh."""


class Verbs(TyperGroup):
    """The group of verbs; turns what they raise into a sentence and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            try:
                return super().invoke(ctx)
            finally:
                _clear_screen()
        except (KeyboardInterrupt, typer.Abort):
            _say_error("interrupted", label="\n" if sys.stderr.isatty() else "")  # below the terminal's ^C
            raise typer.Exit(INTERRUPTED) from None
        except UserErrors as problem:
            _fail(problem.messages)
        except UserError as problem:
            _fail([str(problem)])
        except ModuleNotFoundError as problem:
            package = (problem.name or "").partition(".")[0]
            if package == "tunesmith":
                _report(problem)
            _fail([f"the package {package} is missing; `tunesmith doctor` says how to get it"])
        except BrokenPipeError:
            raise  # typer ends quietly
        except Exception as problem:
            if _is_about_usage(problem):
                raise  # typer shows the usage line and ends with 2
            if refused := disk.sentence(problem):
                _fail([refused])
            _report(problem)


app = typer.Typer(
    name="tunesmith",
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tunesmith {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Fine-tunes language models on the hardware you have, and proves the result.

    Begin with `tunesmith init`, which writes run.yaml; then `check` the data, see the `plan`, and `train`.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point; always ends by raising SystemExit."""
    gc.set_threshold(*COLLECTING)
    keep_bytecode()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # data may hold what a terminal cannot show; that is no error
            stream.reconfigure(errors="backslashreplace")
    try:
        app(args=None if arguments is None else list(arguments), prog_name="tunesmith")
    finally:
        _flush_quietly()


for _panel, _verbs in {
    "Prepare": {"init": init, "check": check, "plan": plan, "lr": lr},
    "Train": {"train": train, "eval": evaluate, "branch": branch},
    "Use the result": {"chat": chat, "merge": merge, "export": export, "quantize": quantize, "serve": serve},
    "See": {"ui": ui, "report": report},
    "Measure": {"profile": profile, "bench": bench, "network": network},
    "Look around": {"doctor": doctor, "schema": schema},
}.items():
    for _name, _verb in _verbs.items():
        app.command(_name, rich_help_panel=_panel)(_verb.command)
    if _panel == "Train":
        app.add_typer(launch.app, name="launch", rich_help_panel=_panel)


def _fail(messages: Sequence[str]) -> NoReturn:
    if os.environ.get("TUNESMITH_DEBUG"):
        traceback.print_exc()
    if not write_failure("; ".join(messages), ""):
        for message in messages:
            _say_error(message)
    raise typer.Exit(1)


def _report(problem: Exception) -> NoReturn:
    what = f"something unexpected happened: {type(problem).__name__}: {_one_line(str(problem))}"
    if write_failure(what, traceback.format_exc()):
        raise typer.Exit(OUR_FAULT)
    if os.environ.get("TUNESMITH_DEBUG"):
        traceback.print_exc()
        _say_error(what)
        raise typer.Exit(OUR_FAULT)
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="tunesmith-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write(f"tunesmith {__version__}, Python {sys.version}\n{' '.join(sys.argv)}\n\n")
            file.write(traceback.format_exc())
    except OSError:
        traceback.print_exc()
        _say_error(f"{what}; please report it with the traceback above")
    else:
        _say_error(f"{what}; the traceback is in {file.name}, please report it")
    raise typer.Exit(OUR_FAULT)


def _say_error(message: str, label: str = "error: ") -> None:
    """Plain typer, not rich: this must work when everything else is broken.

    Messages quote settings and data, which may hold anything; what is shown is one line that does no harm.
    """
    line = " ".join(part.strip() for part in message.splitlines())
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)
    if len(line) > 1000:
        line = f"{line[:600]} ... {line[-300:]}"
    if sys.stderr.isatty():  # between words; elsewhere a message is one line
        width = shutil.get_terminal_size().columns - 1
        lines = textwrap.wrap(label.strip("\n") + line, width, break_long_words=False, break_on_hyphens=False)
        line = "\n".join(lines).removeprefix(label.strip("\n"))
    typer.echo(typer.style(label, fg=typer.colors.RED, bold=True) + line, err=True)


def _clear_screen() -> None:
    """What a verb showed while it worked; nothing where it never came to it."""
    if output := sys.modules.get("tunesmith.cli.output"):
        output.clear_bottom()


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:297] + "..."


def _is_about_usage(problem: Exception) -> bool:
    """typer's own exceptions: wrong options and the like, and Exit."""
    usage_error = typer.BadParameter.__mro__[1:-3]  # UsageError, ClickException, whichever click typer brings
    return isinstance(problem, (typer.Exit, *usage_error))


def _flush_quietly() -> None:
    """A reader that went away (`tunesmith schema | head -1`) is no error, at exit neither; a full disk is."""
    refused = None
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError) as problem:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1 if stream is sys.stdout else 2)
            refused = disk.reason(problem) or refused
    if refused:
        _fail_to_print(refused)


def _fail_to_print(why: str) -> NoReturn:
    with suppress(OSError):
        _say_error(f"what should be printed cannot be written: {why}; send it to another place.")
        sys.stderr.flush()
    raise SystemExit(1)
