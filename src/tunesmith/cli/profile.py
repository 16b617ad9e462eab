"""`tunesmith profile`: where the time and the memory of a training step go."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunesmith.cli.ranks import RanksOption

if TYPE_CHECKING:
    from tunesmith.measure.profile import Report


def command(
    config: Annotated[Path, typer.Argument(help="The run's settings; KEY=VALUE alone need no file.")] = Path(
        "run.yaml"
    ),
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the file's.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=20, help="Steps to profile, after warm-up.")] = 2,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="Use this plan instead of making one.")] = None,
    ranks: RanksOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a few steps and show where their time and memory go. The run itself is not touched."""
    import os

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own remarks help nobody

    from tunesmith.cli import output
    from tunesmith.cli.aside import ADVICE, prepare_aside
    from tunesmith.disk import writing

    aside = prepare_aside(
        "profile", config, overrides or (), {"steps": steps}, plan_file=plan_file, ranks=ranks, as_json=as_json
    )
    if aside is None:
        return
    with aside.job() as (job, _):
        from tunesmith.measure.profile import profile_job

        output.stage(f"Profiling {steps} step{'s' if steps > 1 else ''}, after warm-up")
        with writing(aside.folder, ADVICE):
            report = profile_job(job, aside.folder, steps=steps)
    if report is None:
        return
    if as_json:
        output.print_json(report.as_json() | {"folder": str(aside.folder)})
    else:
        show(report, aside.folder)


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
