"""Data and settings so small that a whole run takes a second, and a way of starting many runs cheaply.

Importing torch and transformers takes far longer than a tiny run, so `Runs` starts one process that imports them and
forks a child for each run. A child is a process like any other: it can be killed at any instant, by a signal from
outside or by a `Die` that strikes at the Nth call of a function.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TRAIN = ("train", "run.yaml", "--plan", "plan.json")
END = "end\n"
"""Said to a warm process that is not needed any more."""
SETTINGS: dict[str, Any] = {
    "method": "lora",
    "lora": {"rank": 4, "dropout": 0.1},
    "data": [{"path": "train.jsonl"}],
    "eval": [{"path": "held_out.jsonl"}],
    "sequence_length": 64,
    "batch_tokens": 256,
    "epochs": 3,
    "learning_rate": 5e-3,
    "save_every": 2,
    "eval_every": 4,
    "precision": "fp32",
    "device": "cpu",
    "output": "run",
}


def write_data(path: Path, count: int, *, seed: int = 0) -> Path:
    """Questions and answers of varied length, each different."""
    chance = random.Random(seed)
    words = ["red", "blue", "seven", "ten", "cat", "tree", "yes", "no", "sun"]

    def text(most: int) -> str:
        return " ".join(chance.choices(words, k=chance.randint(1, most)))

    records = [
        {"messages": [{"role": "user", "content": text(2)}, {"role": "assistant", "content": f"{n} {text(3)}"}]}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_all(folder: Path, model: Path, *, beside: bool = False, **changes: Any) -> Path:
    """Data, run.yaml (JSON is YAML) and a plan with four micro-batches a step, for `tunesmith train` in `folder`.
    Checkpoints are written between steps, so that it is known when they are there, or `beside` them."""
    folder.mkdir(parents=True, exist_ok=True)
    write_data(folder / "train.jsonl", 20)
    write_data(folder / "held_out.jsonl", 4, seed=1)
    settings = {"model": str(model), **SETTINGS, **changes}
    (folder / "run.yaml").write_text(json.dumps(settings, indent=1) + "\n")
    from tunesmith.config.load import from_mapping
    from tunesmith.run.choose import new_plan

    run = from_mapping(settings)
    plan = new_plan(run).model_copy(update={"threads": 1, "micro_batch": 1, "async_checkpoint": beside})
    (folder / "plan.json").write_text(plan.model_dump_json())
    return folder


@dataclass(frozen=True)
class Die:
    """Send `signal` to the run itself, before or after the `count`-th call of `function` (`module:Class.name`); or, for
    so many `seconds`, just keep that call waiting."""

    function: str
    count: int = 1
    after: bool = False
    signal: int = signal.SIGKILL
    seconds: float = 0.0


@dataclass(frozen=True)
class Ended:
    code: int
    """Exit code, or minus the number of the signal that ended it."""
    out: str
    err: str
    seconds: float


class Runs:
    """`tunesmith` in children of one warm process; every run has the same environment."""

    def __init__(self, cache: Path):
        environment = {
            **os.environ,
            "TUNESMITH_CACHE": str(cache),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "MIMALLOC_ARENA_RESERVE": "0",  # else torch takes a GiB at once on some CPUs, whatever it needs
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tiny"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __call__(self, folder: Path, *arguments: str, **options: Any) -> Ended:
        """Run `tunesmith ARGUMENTS` in `folder` to its end; for the options see `start`."""
        self.start(folder, *arguments, **options)
        ended = self.wait()
        if ended.code == 0 and arguments[0] == "train":
            from loads_elsewhere import check_results

            check_results(folder / "run")
        return ended

    def start(
        self,
        folder: Path,
        *arguments: str,
        die: Die | Sequence[Die] = (),
        kill_after: float | None = None,
        constants: dict[str, Any] | None = None,
        memory: int | None = None,
        forks_ranks: bool = False,
    ) -> int:
        """Start it and return its process id; `wait` gives its end, before which no other can be started.

        With `kill_after`, it is killed after so many seconds; `constants` (`module:NAME`) get other values in it;
        `memory` is what it may take beyond what it has when it starts, in bytes. With `forks_ranks`, ranks that it
        starts are children like itself, which need to import nothing.
        """
        order = {
            "folder": str(folder),
            "arguments": arguments,
            "die": [asdict(one) for one in ([die] if isinstance(die, Die) else die)],
            "kill_after": kill_after,
            "constants": constants or {},
            "memory": memory,
            "forks_ranks": forks_ranks,
        }
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def wait(self) -> Ended:
        return Ended(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.stdin.write(END)  # another process that was forked meanwhile may keep the pipe open
        self._process.stdin.close()
        self._process.wait(120)  # it may still be importing, on a busy machine
        self._process.stdout.close()


def build_commands_once() -> None:
    """Not at every call of `main`: that is half of what the shortest ones take."""
    import typer.main

    typer.main.get_command = functools.cache(typer.main.get_command)


def outcome(run: Path) -> dict[str, object]:
    """All that must be the same: files byte for byte, and the history without clock times and memory."""
    from tunesmith.train import events

    newest = max((run / "checkpoints").glob("step-????????"))
    result = run / "adapter" if (run / "adapter").exists() else run / "model"
    files = [newest / "tensors.safetensors", newest / "state.json", newest / "manifest.json", run / "summary.json"]
    files += sorted(file for file in result.iterdir() if file.is_file())
    history = [
        {key: value for key, value in record.items() if key not in ("time", "seconds", "memory", "memory_by")}
        for record in events.read(run)
        if record["event"] in ("step", "evaluation")
    ]
    return {str(file.relative_to(run)): file.read_bytes() for file in files} | {"history": history}


def assert_same(found: Path, expected: Path) -> None:
    mine, theirs = outcome(found), outcome(expected)
    assert mine.keys() == theirs.keys()
    assert mine["history"] == theirs["history"]
    assert [name for name in mine if mine[name] != theirs[name]] == []


def assert_resumes(runs: Runs, killed: Path, whole: Path, *deaths: Die) -> None:
    """The run in `killed`, which dies so often and goes on each time, ends as the one in `whole`, which was trained in
    one piece or is now. The last death is after a checkpoint."""
    for die in deaths:
        assert runs(killed, *TRAIN, die=die).code == -signal.SIGKILL
    assert any((killed / "run" / "checkpoints").iterdir())
    ended = runs(killed, *TRAIN)
    assert ended.code == 0, ended.err
    if not (whole / "run" / "summary.json").exists():
        assert runs(whole, *TRAIN).code == 0
    assert_same(killed / "run", whole / "run")


def wait_until_stopped(pid: int) -> None:
    """Until the run has sent itself SIGSTOP, or has ended."""
    give_up = time.monotonic() + 60
    while os.path.exists(status := f"/proc/{pid}/stat"):
        if Path(status).read_text().rpartition(")")[2].split()[0] in "TZ":
            return
        assert time.monotonic() < give_up
        time.sleep(0.02)


def serve() -> None:
    """The warm process: one order a line, answered by the child's process id and, when it has ended, by how."""
    import numpy.ma  # noqa: F401  (the imports are the point)
    import transformers.convert_slow_tokenizer
    import transformers.models.llama.modeling_llama
    import typer

    import tunesmith.cli.display
    import tunesmith.config.load
    import tunesmith.run.assemble
    import tunesmith.train.loop  # noqa: F401
    from tunesmith.cli.main import app, main
    from tunesmith.model.probe import has_other_names

    with contextlib.suppress(ImportError):
        import peft  # noqa: F401
    has_other_names(transformers.models.llama.modeling_llama.LlamaConfig())  # it takes long the first time
    build_commands_once()
    typer.main.get_command(app)
    gc.freeze()  # else each child copies most of the memory, by looking for garbage in it

    for line in sys.stdin:
        if line == END:
            break
        order = json.loads(line)
        folder = Path(order["folder"])
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            _be_a_run(main, folder, order)
        print(child, flush=True)
        if order["kill_after"] is not None:
            time.sleep(order["kill_after"])
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        ended = Ended(
            os.waitstatus_to_exitcode(status),
            (folder / "stdout.txt").read_text(),
            (folder / "stderr.txt").read_text(),
            time.monotonic() - began,
        )
        print(json.dumps(asdict(ended)), flush=True)
    os._exit(0)  # tidying up takes seconds and helps nobody


def _be_a_run(main, folder: Path, order: dict[str, Any]) -> None:
    code = 99
    try:
        os.chdir(folder)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background have it ignored
        for name, stream in (("stdout.txt", 1), ("stderr.txt", 2)):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        if order["memory"] is not None:
            _limit_memory(order["memory"])
        for name, value in order["constants"].items():
            owner, name = _find(name)
            setattr(owner, name, value)
        for die in order["die"]:
            _arm(Die(**die))
        if order["forks_ranks"]:
            from tunesmith.launch import local

            local.subprocess.Popen = functools.partial(_ForkedRank, main)
        code = _code_of(main, order["arguments"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _code_of(main, arguments: Sequence[str]) -> int:
    try:
        main(arguments)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    return 0


class _ForkedRank:
    """As a `subprocess.Popen` of `python -m tunesmith`, without the start of a Python."""

    def __init__(self, main, command: list[str], *, env: dict[str, str], start_new_session: bool):
        assert command[:3] == [sys.executable, "-m", "tunesmith"]
        assert start_new_session
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            try:
                os.setsid()
                os.environ.clear()
                os.environ.update(env)
                code = _code_of(main, command[3:])
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def poll(self) -> int | None:
        return self._look(os.WNOHANG)

    def wait(self) -> int | None:
        return self._look(0)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def _look(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _limit_memory(size: int) -> None:
    """By RLIMIT_DATA: all memory of its own that a process asks for counts, used or not, and what is beyond is refused
    at once. Shared maps of files do not count, since the system can drop their pages; RLIMIT_AS would count them too,
    and RLIMIT_RSS does nothing."""
    status = Path("/proc/self/status").read_text()
    has = 1024 * int(status.split("VmData:")[1].split()[0])
    resource.setrlimit(resource.RLIMIT_DATA, (has + size, has + size))


def _find(where: str) -> tuple[Any, str]:
    """`module:Class.name` -> the class and "name"."""
    module, _, dotted = where.partition(":")
    *owners, name = dotted.split(".")
    owner = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    return owner, name


def _arm(die: Die) -> None:
    owner, name = _find(die.function)
    real = getattr(owner, name)
    calls = 0

    def deadly(*arguments, **options):
        nonlocal calls
        calls += 1
        strikes = calls == die.count
        if strikes and die.seconds:
            time.sleep(die.seconds)
            strikes = False
        if strikes and not die.after:
            os.kill(os.getpid(), die.signal)
        result = real(*arguments, **options)
        if strikes and die.after:
            os.kill(os.getpid(), die.signal)
        return result

    setattr(owner, name, deadly)


if __name__ == "__main__":
    serve()
