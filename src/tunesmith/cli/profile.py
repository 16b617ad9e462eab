"""`tunesmith profile`: where the time and the memory of a training step go."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunesmith.cli.ranks import RanksOption, plan_for_ranks, start_ranks

if TYPE_CHECKING:
    from tunesmith.measure.profile import Report


def command(
    config: Annotated[Path, typer.Argument(help="The run's settings.", show_default=False)] = Path("run.yaml"),
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the file's.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=20, help="Steps to profile, after warm-up.")] = 2,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="Obey this plan instead of making one.")] = None,
    ranks: RanksOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a few steps and show where their time and memory go. The run itself is not touched."""
    import os
    import tempfile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own remarks help nobody

    from tunesmith.cli import output

    output.stage(f"Reading {config}")
    from tunesmith.cli import display
    from tunesmith.config.load import load
    from tunesmith.disk import check_writable, writing
    from tunesmith.run.folder import check_place

    run = load(config, overrides or ()).run
    if run.new_tokens:
        from tunesmith.model.grown import grown

        run = grown(run)
    check_place(run)
    plan = display.read_plan_file(plan_file) if plan_file else None
    folder = Path(run.output) / "profile"
    advice = "make room there, or set output to another folder"
    with writing(folder, advice):
        folder.mkdir(parents=True, exist_ok=True)
    check_writable(folder / "report.json", advice)
    from tunesmith.launch.rank_environment import read_rank_environment

    environment = read_rank_environment()
    if not environment.is_started and (chosen := plan_for_ranks(run, plan, ranks)).mesh.ranks > 1:
        flags = [f"--steps={steps}", *([f"--plan={plan_file}"] if plan_file else []), *(["--json"] if as_json else [])]
        start_ranks(["profile", str(config), *(overrides or ()), *flags], chosen.mesh.ranks, plan=chosen)
        return
    output.stage("Loading torch and transformers")
    from tunesmith.measure.profile import profile_job
    from tunesmith.parallel.ranks import connected
    from tunesmith.run.assemble import assemble
    from tunesmith.run.start import start_run

    with tempfile.TemporaryDirectory(prefix="tunesmith-profile-") as own, connected(environment) as others:
        there = run.model_copy(update={"output": others.tell(own)})
        how = {"plan": plan, "ranks": None if environment.is_started else 1, "saves": False}
        setting = start_run(there, others, **how, warn=output.warn, progress=output.progress)
        output.stage("Loading the model")
        job = assemble(setting, others)
        output.stage(f"Profiling {steps} step{'s' if steps > 1 else ''}, after warm-up")
        with writing(folder, advice):
            report = profile_job(job, folder, steps=steps)
        others.wait()  # before the folder is gone
    if report is None:
        return
    if as_json:
        output.print_json(report.as_json() | {"folder": str(folder)})
    else:
        show(report, folder)


def show(report: Report, folder: Path) -> None:
    from tunesmith.cli import output

    found = report.analysis
    step = found.step_seconds
    output.say(f"{report.device}: a step of {report.tokens:,} tokens takes {step:.4g} s ({_speed(report)})")
    output.say()
    rows = [
        (
            region,
            f"{1e3 * found.host_seconds.get(region, 0.0):.1f}",
            f"{found.host_seconds.get(region, 0.0) / step:.0%}",
            *([f"{1e3 * found.device_seconds.get(region, 0.0):.1f}"] if found.device_seconds else []),
        )
        for region in dict.fromkeys([*found.host_seconds, *found.device_seconds])
    ]
    columns = ("region", "host ms", "of the step", *(["GPU ms"] if found.device_seconds else []))
    output.say(output.table(columns, rows, right=columns[1:]))
    output.say()
    what = "kernel" if found.device_seconds else "operator"
    rows = [(_short(k.name), f"{k.calls:,}", f"{1e3 * k.seconds:.2f}", f"{k.share:.1%}") for k in found.kernels]
    output.say(output.table((what, "calls", "ms", "of the step"), rows, right=("calls", "ms", "of the step")))
    output.say()
    memory = found.memory
    parts = [(name, output.readable_bytes(size)) for name, size in memory.at_peak.items() if size]
    output.say(
        output.table(("memory at the peak", ""), [*parts, ("together", output.readable_bytes(memory.peak_bytes))])
    )
    output.say()
    output.say(report.bound)
    output.say(f"In {folder}: {', '.join(report.files)}; open the trace at https://ui.perfetto.dev.")


def _speed(report: Report) -> str:
    words = [f"{report.tokens_per_second:,.0f} tokens/s", f"{report.tflops:.3g} TFLOP/s"]
    if report.share_of_peak is not None:
        words.append(f"{report.share_of_peak:.0%} of the peak")
    if report.analysis.busy is not None:
        words.append(f"the GPU is busy for {report.analysis.busy:.0%}")
    return ", ".join(words)


def _short(name: str) -> str:
    return name if len(name) <= 90 else name[:87] + "..."
