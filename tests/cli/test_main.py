"""Help is quick, errors are sentences, exit codes mean something."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from tunesmith import __version__
from tunesmith.cli.main import Verbs, app, main
from tunesmith.errors import UserError, UserErrors

VERBS = ("init", "check", "plan", "train", "eval", "chat", "merge", "profile", "bench", "doctor", "schema")
HEAVY = ("torch", "transformers", "datasets", "pydantic", "numpy", "yaml", "pyarrow")


def fastest(code: str) -> tuple[float, subprocess.CompletedProcess]:
    """The best of three, in CPU seconds: other work on the machine says nothing about us."""
    seconds = []
    for _ in range(3):
        before = os.times()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        after = os.times()
        seconds.append(sum(after[2:4]) - sum(before[2:4]))
    return min(seconds), done


def test_help_is_quick_and_imports_nothing_heavy():
    seconds, done = fastest(
        "import sys\nfrom tunesmith.cli.main import main\n"
        "try:\n    main(['--help'])\n"
        f"finally:\n    print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\n"
    )
    assert done.stderr == "[]\n"
    for verb in VERBS:
        assert f"│ {verb} " in done.stdout
    assert seconds < 0.8  # of which most is typer's and rich's own; a verb has a second for its first sign of life


def test_importing_the_package_is_quick_and_imports_nothing_heavy():
    seconds, done = fastest(f"import sys, tunesmith; print([name for name in {HEAVY!r} if name in sys.modules])")
    assert done.stdout == "[]\n"
    assert seconds < 0.3


def test_the_version_and_the_module_entry_point():
    done = subprocess.run([sys.executable, "-m", "tunesmith", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"tunesmith {__version__}\n"


@pytest.mark.parametrize("has_bytecode", [False, True])
def test_bytecode_goes_to_the_cache_where_python_keeps_none(tmp_path, has_bytecode):
    module = tmp_path / "site" / "torch" / "__init__.py"
    module.parent.mkdir(parents=True)
    module.touch()
    if has_bytecode:
        (module.parent / "__pycache__").mkdir()
    paths = os.pathsep.join([str(tmp_path / "site"), *sys.path])
    places = {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "TUNESMITH_CACHE": str(tmp_path / "cache")}
    code = "from tunesmith.cli.main import main\ntry:\n    main(['--version'])\nfinally:\n    import torch"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPYCACHEPREFIX"} | places
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)
    kept = list((tmp_path / "cache").rglob("*.pyc"))
    assert len([file for file in kept if file.parent.name == "torch"]) == (0 if has_bytecode else 1)
    assert not list((tmp_path / "site").rglob("*.pyc"))


def test_no_home_folder_costs_the_bytecode_and_nothing_else(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    home = {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "HOME": ""}
    environment = {name: value for name, value in os.environ.items() if name != "TUNESMITH_CACHE"} | home
    nobody = "import os, pwd\npwd.getpwuid = lambda uid: {}[uid]\ndel os.environ['HOME']\n"
    code = nobody + "from tunesmith.cli.main import main\nmain(['--version'])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == f"tunesmith {__version__}\n", done.stderr


def test_no_arguments_show_the_help():
    assert "Usage: tunesmith" in CliRunner().invoke(app, []).output


def test_a_wrong_option_shows_the_usage_and_ends_with_2(capfd):
    with pytest.raises(SystemExit) as end:
        main(["schema", "--nonsense"])
    assert end.value.code == 2
    assert "--nonsense" in capfd.readouterr().err


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m tunesmith schema | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stdout == "{\n"
    assert done.stderr == ""


def test_the_schema_is_json_that_says_what_is_needed():
    done = CliRunner().invoke(app, ["schema"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["required"] == ["model", "data"]


def raising(problem: BaseException) -> typer.Typer:
    broken = typer.Typer(cls=Verbs, pretty_exceptions_enable=False)
    broken.callback()(lambda: None)

    @broken.command("go")
    def go() -> None:
        raise problem

    return broken


def run(problem: BaseException, monkeypatch, debug: bool = False):
    monkeypatch.delenv("TUNESMITH_DEBUG", raising=False)
    if debug:
        monkeypatch.setenv("TUNESMITH_DEBUG", "1")
    return CliRunner().invoke(raising(problem), ["go"])


def test_what_the_user_can_fix_is_one_line_each_and_ends_with_1(monkeypatch):
    done = run(UserError("no such file"), monkeypatch)
    assert (done.exit_code, done.stderr) == (1, "error: no such file\n")
    done = run(UserErrors(["one", "two"]), monkeypatch)
    assert (done.exit_code, done.stderr) == (1, "error: one\nerror: two\n")


def test_an_interrupt_says_so_and_ends_with_130(monkeypatch):
    for problem in (KeyboardInterrupt(), typer.Abort()):
        done = run(problem, monkeypatch)
        assert (done.exit_code, done.stderr) == (130, "interrupted\n")


def test_a_missing_package_is_named_and_a_missing_part_of_ours_is_our_fault(monkeypatch):
    done = run(ModuleNotFoundError("No module named 'datasets.x'", name="datasets.x"), monkeypatch)
    assert done.exit_code == 1
    assert done.stderr == "error: the package datasets is missing; `tunesmith doctor` says how to get it\n"
    assert run(ModuleNotFoundError("x", name="tunesmith.x"), monkeypatch, debug=True).exit_code == 70


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb):
    done = CliRunner().invoke(app, [verb, "--help"])
    assert done.exit_code == 0
    assert f"Usage: tunesmith {verb}" in done.output


def test_an_exit_code_passes_through(monkeypatch):
    assert run(typer.Exit(3), monkeypatch).exit_code == 3


def test_anything_else_is_one_sentence_with_the_traceback_in_a_file(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    done = run(RuntimeError("it\nbroke"), monkeypatch)
    assert done.exit_code == 70
    (line,) = done.stderr.splitlines()
    found = re.fullmatch(
        r"error: something unexpected happened: RuntimeError: it broke; the traceback is in (.*), please report it",
        line,
    )
    assert found
    with open(found[1], encoding="utf-8") as file:
        assert "Traceback (most recent call last)" in file.read()


def test_without_a_place_for_the_file_the_traceback_is_shown(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    done = run(RuntimeError("broke"), monkeypatch)
    assert done.exit_code == 70
    assert "Traceback" in done.stderr


def test_debugging_shows_the_traceback(monkeypatch):
    done = run(RuntimeError("broke"), monkeypatch, debug=True)
    assert done.exit_code == 70
    assert "Traceback" in done.stderr
    assert "Traceback" in run(UserError("x"), monkeypatch, debug=True).stderr


def test_text_that_no_terminal_can_show_still_comes_out(tmp_path):
    (tmp_path / "run.yaml").write_text('model: m\ndata: a\noutput: "\\ud800"\n"caf\u00e9": 1\n', encoding="utf-8")
    code = (
        "import tunesmith.cli.main as m, tunesmith.cli.output as o, tunesmith.config.load as l\n"
        "m.app.command('go')(lambda: (o.say('\\ud800 \\u2192'), o.warn('\\ud800'), l.load('run.yaml')))\n"
        "m.main(['go'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == "\\ud800 \\u2192\n"
    first, second, third = done.stderr.splitlines()
    assert first == "warning: \\ud800"
    assert second.startswith("error: `output` is '\\ud800'")
    assert third.startswith("error: `caf")
