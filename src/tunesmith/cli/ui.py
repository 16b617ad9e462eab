"""`tunesmith ui`: pages over a folder of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    folder: Annotated[Path, typer.Argument(metavar="[RUNS_FOLDER]", help="Folder of the runs.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 7860,
    host: Annotated[
        str, typer.Option(help="Address to listen on; the default is for this machine alone.")
    ] = "127.0.0.1",
    open_to_network: Annotated[
        bool, typer.Option("--open-to-network", help="Needed with a --host that others can reach.")
    ] = False,
) -> None:
    """Show the runs of a folder in a browser: live curves, comparison, start, stop, plans."""
    from tunesmith.cli import output
    from tunesmith.errors import UserError
    from tunesmith.ui.runs import Runs
    from tunesmith.ui.server import Server, is_loopback

    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; give the one that holds your runs (`output: runs/NAME` makes runs/).")
    if not is_loopback(host) and not open_to_network:
        raise UserError(
            f"--host {host} opens these pages to everybody who can reach this machine, unencrypted: with the link they "
            "can see all runs of the folder, their settings and data names, stop and resume them, and start the "
            "run.yaml files below this directory. Say --open-to-network to do so, or leave --host out and use an SSH "
            "tunnel (ssh -L 7860:localhost:7860 HOST)."
        )

    def tell_link() -> None:
        output.say(f"For another browser: {server.link}")

    try:
        server = Server(Runs(folder), host, port, opened=tell_link)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"--host {host} --port {port} cannot be used: {reason}; choose others.") from error
    if not is_loopback(host):
        output.warn(
            f"{host}, port {server.port}, is open to the network, unencrypted: who has the link, or listens in, sees "
            f"all runs of {folder}, can stop and resume them, and can start the run.yaml files below this directory."
        )
    output.say(f"Runs of {folder}: open this link, which works once; Ctrl-C ends.\n{server.link}")
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        output.say("Ended; runs go on.")
    finally:
        server.server_close()
