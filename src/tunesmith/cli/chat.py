"""`tunesmith chat`: talk to a trained run, or a model folder, in the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tunesmith.errors import UserError


def command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a run, or of a model.")],
    prompt: Annotated[str | None, typer.Option(help="Answer this one prompt and exit.")] = None,
    system: Annotated[str | None, typer.Option(help="System message to begin with.")] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=5.0, help="Sampling temperature; 0 takes the likeliest token.")
    ] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
) -> None:
    """Talk to a run, or a merged model. An empty line or Ctrl-D ends, Ctrl-C stops an answer, /new starts over."""
    from tunesmith.cli import output

    _check_text("--prompt", prompt or "")
    _check_text("--system", system or "")
    output.stage(f"Loading the model of {folder}")
    from tunesmith.infer.decoding import not_streamed
    from tunesmith.infer.generate import stream
    from tunesmith.run.open import open_model
    from tunesmith.run.there import why_checkpoint

    opened = open_model(folder)
    output.clear_bottom()
    if opened.step is not None:
        output.note(why_checkpoint(folder, opened.step))
    if said := not_streamed(opened.model)[1]:
        output.note(said)
    beginning = [{"role": "system", "content": system}] if system else []
    turns = list(beginning)

    def answer() -> str:
        options = {"max_new_tokens": max_tokens, "temperature": temperature, "reasons": opened.reasons}
        pieces = stream(opened.model, opened.encoder, turns, **options)
        said = []
        try:
            for piece in pieces:
                said.append(piece)
                sys.stdout.write(piece)
                sys.stdout.flush()
        except KeyboardInterrupt:
            if prompt is not None:
                raise
        finally:
            pieces.close()
        sys.stdout.write("\n")
        return "".join(said)

    if prompt is not None:
        turns.append({"role": "user", "content": prompt})
        answer()
        return
    output.note("An empty line or Ctrl-D ends, Ctrl-C stops an answer, /new starts over.")
    while True:
        try:
            question = input("you> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            break
        except UnicodeDecodeError:
            raise _no_text("a question") from None
        _check_text("a question", question)
        if not question:
            break
        if question == "/new":
            turns = list(beginning)
            continue
        turns.append({"role": "user", "content": question})
        turns.append({"role": "assistant", "content": answer()})


def _check_text(what: str, text: str) -> None:
    """Some locales read bytes that are no text as halves of surrogate pairs, which nothing can be made of."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _no_text(what) from None


def _no_text(what: str) -> UserError:
    return UserError(f"{what} is no text in UTF-8; convert it, for example with `iconv -t utf-8`.")
