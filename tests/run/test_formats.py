"""Run folders of other versions are continued, or refused in one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tunesmith.errors import UserError
from tunesmith.run import folder
from tunesmith.train import events

BEGUN = Path(__file__).parent / "format_1"
"""A run of 12 steps that version 0.1 was told to stop after 5, and the losses of one that it was not."""


@pytest.fixture
def here(tmp_path):
    shutil.copytree(BEGUN, tmp_path, dirs_exist_ok=True)
    (tmp_path / "begun").rename(tmp_path / "run")
    return tmp_path


def test_a_run_that_version_0_1_began_goes_on_with_the_losses_it_would_have_had(here, runs):
    ended = runs(here, "train", "run.yaml")
    assert ended.code == 0, ended.err
    assert "Continuing after step 5" in ended.out
    losses = [one["loss"] for one in events.read(here / "run") if one["event"] == "step"]
    assert losses == pytest.approx(json.loads((here / "losses.json").read_text()), rel=1e-5)
    assert json.loads((here / "run" / "run.json").read_text())["format"] == folder.FORMAT
    assert json.loads((here / "run" / "plan.json").read_text())["version"] == 2


def test_a_run_that_version_0_1_began_is_not_continued_with_other_settings(here, runs):
    ended = runs(here, "train", "run.yaml", "learning_rate=1e-3")
    assert ended.code == 1
    assert "was started differently: learning_rate was 0.005 and is now 0.001." in ended.err


def test_a_run_of_a_later_version_is_refused_in_a_sentence(here):
    path = here / "run" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 3}))
    with pytest.raises(UserError, match="is of format 3, and this version of tunesmith reads formats 1 and 2"):
        folder.read_identity(here / "run")
