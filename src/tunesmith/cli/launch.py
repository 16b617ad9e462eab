"""`tunesmith launch`: the same run on several machines, by ssh, Slurm, Kubernetes, Kubeflow, Ray or SkyPilot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tunesmith.launch.clusters import Task

app = typer.Typer(no_args_is_help=True)

Config = Annotated[Path, typer.Argument(help="The run's settings.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the file's.")
]
Nodes = Annotated[int, typer.Option(help="Number of machines.")]
PerNode = Annotated[int, typer.Option(help="Ranks on each machine, one for each GPU.")]
OnCpu = Annotated[bool, typer.Option("--cpu", help="Ranks on CPUs instead of GPUs.")]
Name = Annotated[str | None, typer.Option(help="Name of the job; that of the output folder when left out.")]
Out = Annotated[Path | None, typer.Option(help="The file to write.", show_default=False)]
Image = Annotated[str, typer.Option(help="A container image with tunesmith in it.")]
Claim = Annotated[str, typer.Option(help="The volume claim that holds settings, data and output.")]
Mount = Annotated[str, typer.Option(help="Where the volume is mounted; the run starts there.")]
Submit = Annotated[bool, typer.Option("--submit", help="Submit it, too.")]


@app.callback()
def about() -> None:
    """Run on several machines. They share the folder with the settings, the data and the output.

    A run that is pre-empted or fails is started again by the cluster and continues from its last checkpoint.
    """


@app.command()
def hosts(
    config: Config,
    overrides: Overrides = None,
    hosts: Annotated[str, typer.Option(help="Names or addresses, separated by commas; the first leads.")] = "",
    ranks: PerNode = 8,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="Use this plan instead of making one.")] = None,
    reach: Annotated[str, typer.Option(help="How a command is run on a host.")] = "ssh -tt {host}",
    address: Annotated[str | None, typer.Option(help="Address of the first host, as the others see it.")] = None,
    show: Annotated[bool, typer.Option("--print", help="Print the commands instead of running them.")] = False,
) -> None:
    """Start the ranks on named hosts, over ssh, and wait for them."""
    import shlex

    from tunesmith.cli import output
    from tunesmith.errors import UserError
    from tunesmith.launch.clusters import host_commands
    from tunesmith.launch.hosts import run_on_hosts

    names = [name.strip() for name in hosts.split(",") if name.strip()]
    if not names:
        raise UserError("No hosts were named; say --hosts a,b.")
    task = _task(config, overrides, None, len(names), ranks, plan_file=plan_file)
    commands = host_commands(task, names, reach, address=address)
    output.clear_bottom()
    if show:
        for command in commands:
            typer.echo(shlex.join(command))
        return
    code = run_on_hosts(dict(zip(names, commands, strict=True)), typer.echo)
    raise typer.Exit(code)


@app.command()
def slurm(
    config: Config,
    overrides: Overrides = None,
    nodes: Nodes = 1,
    ranks: PerNode = 8,
    hours: Annotated[float, typer.Option(min=0.1, help="Time limit; the run is queued again when it is over.")] = 24.0,
    option: Annotated[list[str] | None, typer.Option(help="Further sbatch options, as partition=gpu.")] = None,
    cpu: OnCpu = False,
    name: Name = None,
    out: Out = None,
    submit: Submit = False,
) -> None:
    """Write a script for sbatch."""
    from tunesmith.disk import writing
    from tunesmith.launch.clusters import slurm_script

    task = _task(config, overrides, name, nodes, ranks, has_gpus=not cpu, options=option or ())
    with writing(task.output, "set output to another folder"):  # the job's log, which Slurm opens before anything runs
        Path(task.output).mkdir(parents=True, exist_ok=True)
    _write(slurm_script(task, hours=hours), out or config.with_suffix(".slurm.sh"), ["sbatch"], submit)


@app.command()
def kubernetes(
    config: Config,
    overrides: Overrides = None,
    image: Image = "tunesmith",
    claim: Claim = "work",
    mount: Mount = "/work",
    nodes: Nodes = 1,
    ranks: PerNode = 8,
    cpu: OnCpu = False,
    name: Name = None,
    out: Out = None,
    submit: Submit = False,
) -> None:
    """Write a manifest for kubectl."""
    from tunesmith.launch.clusters import kubernetes_manifest

    task = _in_image(_task(config, overrides, name, nodes, ranks, has_gpus=not cpu), mount)
    made = kubernetes_manifest(task, image=image, claim=claim, mount=mount)
    _write(made, out or config.with_suffix(".kubernetes.yaml"), ["kubectl", "apply", "-f"], submit)


@app.command()
def kubeflow(
    config: Config,
    overrides: Overrides = None,
    image: Image = "tunesmith",
    claim: Claim = "work",
    mount: Mount = "/work",
    nodes: Nodes = 1,
    ranks: PerNode = 8,
    cpu: OnCpu = False,
    name: Name = None,
    out: Out = None,
    submit: Submit = False,
) -> None:
    """Write a TrainJob for Kubeflow's Trainer."""
    from tunesmith.launch.clusters import kubeflow_manifest

    task = _in_image(_task(config, overrides, name, nodes, ranks, has_gpus=not cpu), mount)
    made = kubeflow_manifest(task, image=image, claim=claim, mount=mount)
    _write(made, out or config.with_suffix(".kubeflow.yaml"), ["kubectl", "apply", "-f"], submit)


@app.command()
def skypilot(
    config: Config,
    overrides: Overrides = None,
    accelerator: Annotated[str, typer.Option(help="The GPU, as `sky show-gpus` calls it.")] = "H100",
    image: Image = "tunesmith",
    volume: Annotated[str, typer.Option(help="SkyPilot's volume that holds settings, data and output.")] = "work",
    mount: Mount = "/work",
    nodes: Nodes = 1,
    ranks: PerNode = 8,
    option: Annotated[list[str] | None, typer.Option(help="Further resources, as infra=kubernetes.")] = None,
    cpu: OnCpu = False,
    name: Name = None,
    out: Out = None,
    submit: Submit = False,
) -> None:
    """Write a task for `sky jobs launch`."""
    from tunesmith.launch.clusters import skypilot_task

    task = _task(config, overrides, name, nodes, ranks, has_gpus=not cpu, options=option or ())
    made = skypilot_task(_in_image(task, mount), accelerator=accelerator, image=image, volume=volume, mount=mount)
    _write(made, out or config.with_suffix(".skypilot.yaml"), ["sky", "jobs", "launch", "--yes"], submit)


@app.command()
def ray(
    config: Config,
    overrides: Overrides = None,
    nodes: Nodes = 1,
    ranks: PerNode = 8,
    cpu: OnCpu = False,
    name: Name = None,
    out: Out = None,
    submit: Submit = False,
) -> None:
    """Write a program for `ray job submit`, with Ray Train."""
    from tunesmith.launch.clusters import ray_driver

    task = _task(config, overrides, name, nodes, ranks, has_gpus=not cpu)
    _write(ray_driver(task), out or config.with_suffix(".ray.py"), ["ray", "job", "submit", "--", "python"], submit)


def _in_image(task: Task, mount: str) -> Task:
    """The same in a container: with its Python, from where the volume is mounted."""
    import dataclasses

    return dataclasses.replace(task, folder=mount, command=["python", *task.command[1:]], name=task.name.lower())


def _task(
    config: Path,
    overrides: list[str] | None,
    name: str | None,
    nodes: int,
    ranks: int,
    *,
    plan_file: Path | None = None,
    has_gpus: bool = True,
    options: list[str] | tuple[str, ...] = (),
) -> Task:
    import os
    import re
    import sys

    from tunesmith.cli import output

    output.stage(f"Reading {config}")
    from tunesmith.config.load import load
    from tunesmith.launch.clusters import Task

    run = load(config, overrides or ()).run  # mistakes are found here, not on every rank
    plan = ["--plan", str(plan_file)] if plan_file else []
    return Task(
        command=[sys.executable, "-m", "tunesmith", "train", str(config), *(overrides or ()), *plan],
        name=name or re.sub(r"[^A-Za-z0-9]+", "-", Path(run.output).name).strip("-") or "tunesmith",
        folder=os.getcwd(),
        output=run.output,
        nodes=nodes,
        ranks=ranks,
        has_gpus=has_gpus,
        options=options,
    )


def _write(content: str, path: Path, submit_command: list[str], submits: bool) -> None:
    import shlex
    import shutil
    import subprocess

    from tunesmith.checkpoint.files import write_atomic
    from tunesmith.cli import output
    from tunesmith.disk import writing
    from tunesmith.errors import UserError

    with writing(path, "give --out another file"):
        write_atomic(path, content.encode())
    command = [*submit_command, str(path)]
    if not submits:
        output.say(f"Wrote {path}; submit it by `{shlex.join(command)}`, or add --submit.")
        return
    output.clear_bottom()
    if not shutil.which(command[0]):
        raise UserError(f"{command[0]} is not here; {path} is written, submit it where it is.")
    raise typer.Exit(subprocess.run(command).returncode)
