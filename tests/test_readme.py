"""What the pages for newcomers say is there, is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import typer
import yaml

from tunesmith.cli.main import app
from tunesmith.config.load import from_mapping
from tunesmith.config.schema import ObjectiveName

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
VERBS = set(typer.main.get_command(app).commands)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_table_of_commands_has_every_verb_and_no_other():
    assert set(re.findall(r"^\| `tunesmith (\w+)", README, re.MULTILINE)) == VERBS


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_of_tunesmith_and_make_that_is_named_exists(page):
    text = page.read_text(encoding="utf-8")
    commands = re.findall(r"(?:^\$ |`|/bin/)tunesmith ([a-z]+)", text, re.MULTILINE)
    assert set(commands) <= VERBS
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"(?:^ *|`)make ([a-z-]+)", text, re.MULTILINE)) <= set(targets)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_and_every_test_that_is_named_resolves(page):
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in link:
            assert (page.parent / link).exists(), link
    for test in re.findall(r"`(tests/[\w/]+\.py)`", text):
        assert (ROOT / test).is_file(), test


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_to_a_heading_leads_to_one(page):
    for link, heading in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
        assert heading in headings(page.parent / link if link else page), f"{link}#{heading}"


def headings(page: Path) -> set[str]:
    """As links name them: small letters, spaces as hyphens, and no other marks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_whole_run_yaml_is_valid(page):
    for block in re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        settings = yaml.safe_load(block)
        if "model" in settings:
            settings.pop("adapter", None)  # it would have to be there
            from_mapping(settings)


def test_every_objective_has_a_section_with_a_whole_run_yaml():
    sections = re.split(r"^## ", (ROOT / "docs" / "objectives.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    texts = {text.split("\n", 1)[0]: text for text in sections}
    for objective in get_args(ObjectiveName):
        found = [yaml.safe_load(one) for one in re.findall(r"```yaml\n(.*?)```", texts[objective], re.DOTALL)]
        assert objective in {one.get("objective", "sft") for one in found if {"model", "data", "output"} <= one.keys()}


def test_the_index_lists_every_page():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    assert pages <= set(re.findall(r"\]\(([^)#]+)\)", index))


def test_each_promise_names_its_test():
    page = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith(("| promise", "| ---"))]
    assert len(rows) >= 70
    assert all(re.search(r"`tests/[\w/]+\.py` \|$", row) for row in rows)


def test_every_file_that_the_design_says_is_there_exists():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    today = text.split("Today:")[1].split("Planned:")[0]
    folder = ""
    found = 0
    for line in today.splitlines():
        match = re.match(r" {6}(?:(\w+)/ +|(?=\w+\.py)| {13})(\w+\.py)?", line)
        if not match:
            continue
        folder = match[1] or ("" if re.match(r" {6}\w", line) else folder)
        if match[2]:
            found += 1
            assert (ROOT / "src" / "tunesmith" / folder / match[2]).is_file(), f"{folder}/{match[2]}"
    assert found > 30
