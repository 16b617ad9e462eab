"""The steps of the Containerfile, without a builder: what they copy is there and enough, what they install pinned."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def steps() -> list[tuple[str, str]]:
    lines = [line for line in (ROOT / "Containerfile").read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def arguments(kind: str) -> list[str]:
    return [given for name, given in steps() if name == kind]


def copied() -> dict[str, str]:
    """Source -> target."""
    found = {}
    for given in arguments("COPY"):
        *sources, target = shlex.split(given)
        found |= dict.fromkeys(sources, target)
    return found


def plain(name: str) -> str:
    """A package's name as all who name it would spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def is_ignored(path: str) -> bool:
    patterns = (ROOT / ".containerignore").read_text().split()
    return any(fnmatch.fnmatch(path, pattern) for pattern in patterns)


def test_the_base_is_one_version_with_a_python_that_the_project_takes():
    (base,) = arguments("FROM")
    version = re.fullmatch(r"docker\.io/library/python:(3\.\d+)\.\d+-slim-\w+", base)
    assert version, base
    assert PROJECT["requires-python"] == ">=3.11"
    assert float(version[1].partition(".")[2]) >= 11


def test_what_is_copied_is_there_and_not_ignored():
    assert copied().keys() == {"constraints.txt", "pyproject.toml", "README.md", "LICENSE", "src"}
    for source in copied():
        assert (ROOT / source).exists(), source
        assert not is_ignored(source), source
    assert is_ignored(".git")
    assert is_ignored(".venv")
    assert (ROOT / ".containerignore").read_text() == (ROOT / ".dockerignore").read_text()  # docker's name for it


def test_every_package_that_is_asked_for_is_pinned():
    installs = [given for given in arguments("RUN") if "pip install" in given]
    assert installs
    pinned = {
        re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    extras = PROJECT["optional-dependencies"]
    for given in installs:
        words = shlex.split(given)
        assert words[words.index("--constraint") + 1] == "constraints.txt"
        (target,) = [word for word in words if word.startswith(".[")]
        waiting, wanted = target[2:-1].split(","), list(PROJECT["dependencies"])
        while waiting:
            for requirement in extras[waiting.pop()]:
                own = re.fullmatch(r"tunesmith\[(.+)\]", requirement)
                waiting += own[1].split(",") if own else []
                wanted += [] if own else [requirement]
        names = {re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", one)[0]).lower() for one in wanted}
        assert names - pinned == set()


def test_it_runs_as_nobody_special_and_holds_no_secret():
    defaults = dict(given.split("=", 1) for given in arguments("ARG"))
    user = re.sub(r"\$\{(\w+)\}", lambda name: defaults[name[1]], arguments("USER")[-1])
    assert user == "1000"
    assert steps().index(("USER", arguments("USER")[-1])) > max(
        number for number, (name, _) in enumerate(steps()) if name in ("RUN", "COPY")
    )
    named = " ".join(given for kind in ("ARG", "ENV", "LABEL") for given in arguments(kind))
    assert not re.search(r"key|token|secret|password", named, re.IGNORECASE)
    assert json.loads(arguments("ENTRYPOINT")[-1]) == ["tunesmith"]
    assert "tunesmith" in PROJECT["scripts"]


def test_every_command_is_one_that_a_shell_reads():
    for given in arguments("RUN"):
        read = subprocess.run(["sh", "-n", "-c", given], capture_output=True, text=True)
        assert read.returncode == 0, (given, read.stderr)
        first = [words.split()[0] for words in given.split("&&")]
        assert set(first) <= {
            "apt-get",
            "rm",
            "python",
            "useradd",
            "mkdir",
            "chown",
        }  # a slim Debian and Python have these


@pytest.mark.slow
def test_what_it_installs_can_be_had_together_in_the_pinned_versions(tmp_path):
    """The command itself, in an environment with nothing in it, up to the point where it would install."""
    for source in copied():
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
        copy(ROOT / source, tmp_path / source)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "clean")], check=True)
    (given,) = [one for one in arguments("RUN") if "pip install" in one]
    python, *words = shlex.split(given)
    assert python == "python"
    command = [str(tmp_path / "clean" / "bin" / "python"), *words, "--dry-run", "--report", str(tmp_path / "report")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    if done.returncode and "No matching distribution found for hatchling" in done.stderr:
        pytest.skip("there is no package index here")
    assert done.returncode == 0, done.stderr[-2000:]
    lines = (ROOT / "constraints.txt").read_text().split()
    pinned = {plain(name): version for name, version in (line.split("==") for line in lines)}
    found = json.loads((tmp_path / "report").read_text())["install"]
    (torch,) = [one["metadata"] for one in found if one["metadata"]["name"] == "torch"]
    needs = [need for need in torch["requires_dist"] if "==" in need.partition(";")[0]]
    exact = {plain(re.match(r"[\w.-]+", need)[0]) for need in needs}  # CUDA's, which torch pins itself
    for one in found:
        name, version = plain(one["metadata"]["name"]), one["metadata"]["version"].partition("+")[0]
        assert name in {"tunesmith", *exact} or pinned.get(name) == version, (name, version)


@pytest.mark.slow
def test_the_system_packages_are_debian_s():
    (given,) = [one for one in arguments("RUN") if "apt-get install" in one]
    words = shlex.split(next(one for one in given.split("&&") if "apt-get install" in one))
    if shutil.which("apt-get") is None:
        pytest.skip("no Debian")
    done = subprocess.run([*words, "--simulate"], capture_output=True, text=True)
    if "Unable to locate package" in done.stderr and not any(Path("/var/lib/apt/lists").glob("*Packages*")):
        pytest.skip("no list of packages here")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_what_is_copied_is_enough_to_build_and_start_it(tmp_path):
    for source in copied():
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
        copy(ROOT / source, tmp_path / source)
    built = tmp_path / "built"
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(built), str(tmp_path)]
    if find_spec("hatchling") is not None:
        command.insert(4, "--no-build-isolation")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "hatchling" in done.stderr and "No matching distribution" in done.stderr:
        pytest.skip("hatchling, which builds the package, cannot be had here")
    assert done.returncode == 0, done.stderr[-2000:]
    started = [
        sys.executable,
        "-c",
        "import tunesmith, sys; print(tunesmith.__file__); from tunesmith.cli.main import main",
    ]
    said = subprocess.run(started, cwd=tmp_path, env={"PYTHONPATH": str(built)}, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith(str(built))
    assert (built / "tunesmith" / "ui" / "assets").is_dir()
