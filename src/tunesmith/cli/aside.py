"""Steps of a run that are tried aside, for verbs that measure a few: what they write lies in a folder of the run's
output, and the run itself is not touched."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.cli.ranks import plan_for_ranks, start_ranks

if TYPE_CHECKING:
    from tunesmith.config.schema import Run
    from tunesmith.launch.rank_environment import RankEnvironment
    from tunesmith.parallel.ranks import Ranks
    from tunesmith.plan.plan import Plan
    from tunesmith.train.job import Job

ADVICE = "make room there, or set output to another folder"


@dataclass(frozen=True)
class Aside:
    verb: str
    run: Run
    plan: Plan | None
    environment: RankEnvironment
    folder: Path
    """For what is found."""

    @contextmanager
    def job(self) -> Iterator[tuple[Job, Ranks]]:
        """The run, ready for its first step, in a folder that is gone afterwards."""
        from tunesmith.cli import output

        output.stage("Loading torch and transformers")
        from tunesmith.parallel.ranks import connected
        from tunesmith.run.assemble import assemble
        from tunesmith.run.start import start_run

        with (
            tempfile.TemporaryDirectory(prefix=f"tunesmith-{self.verb}-") as own,
            connected(self.environment) as others,
        ):
            there = self.run.model_copy(update={"output": others.tell(own)})
            how = {"plan": self.plan, "ranks": None if self.environment.is_started else 1, "saves": False}
            setting = start_run(there, others, **how, warn=output.warn, progress=output.progress)
            output.stage("Loading the model")
            with closing(assemble(setting, others)) as job:
                yield job, others
            others.wait()  # before the folder is gone


def prepare_aside(
    verb: str,
    config: Path,
    overrides: Sequence[str],
    options: Mapping[str, Any],
    *,
    plan_file: Path | None,
    ranks: int | None,
    as_json: bool,
) -> Aside | None:
    """None where several ranks were started to do it, with the same options."""
    from tunesmith.cli import output

    output.stage(f"Reading {config}")
    from tunesmith.cli import display
    from tunesmith.config.load import load
    from tunesmith.disk import check_writable, writing
    from tunesmith.launch.rank_environment import read_rank_environment
    from tunesmith.run.folder import check_place

    run = load(config, overrides).run
    if run.new_tokens:
        from tunesmith.model.grown import grown

        run = grown(run)
    check_place(run)
    plan = display.read_plan_file(plan_file) if plan_file else None
    folder = Path(run.output) / verb
    with writing(folder, ADVICE):
        folder.mkdir(parents=True, exist_ok=True)
    check_writable(folder / "report.json", ADVICE)
    environment = read_rank_environment()
    if not environment.is_started and (chosen := plan_for_ranks(run, plan, ranks)).mesh.ranks > 1:
        given = {**options, "plan": plan_file}
        flags = [f"--{name}={value}" for name, value in given.items() if value is not None]
        words = [verb, str(config), *overrides, *flags, *(["--json"] if as_json else [])]
        start_ranks(words, chosen.mesh.ranks, plan=chosen)
        return None
    return Aside(verb, run, plan, environment, folder)
