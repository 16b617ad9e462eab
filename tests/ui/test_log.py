"""events.jsonl read while it grows, and what a list says of it."""

from __future__ import annotations

import dataclasses
import json

import pytest

from recorded_runs import line, record_run
from tunesmith.train import events
from tunesmith.ui.log import Digest, GrowingLog, digest, glance


def a_step(step, loss):
    return line(events.Step(step, 0.1, loss, 1e-4, 1.0, 100, 50.0, 0.5, 2**20), 1000.0 + step)


def test_a_growing_log_reads_complete_lines_once(tmp_path):
    path = tmp_path / events.FILE
    log = GrowingLog(tmp_path)
    assert not log.update()
    assert log.records == []
    path.write_text(a_step(1, 3.0) + a_step(2, 2.0)[:30])
    assert log.update()
    assert [one["step"] for one in log.records] == [1]
    assert not log.update()
    with path.open("a") as stream:
        stream.write(a_step(2, 2.0)[30:])
    assert log.update()
    assert [one["step"] for one in log.records] == [1, 2]


def test_a_log_that_was_replaced_is_read_anew(tmp_path):
    path = tmp_path / events.FILE
    path.write_text(a_step(1, 3.0) + a_step(2, 2.0))
    log = GrowingLog(tmp_path)
    log.update()
    path.write_text(a_step(1, 9.0))
    assert log.update()
    assert [one["loss"] for one in log.records] == [9.0]


def test_a_resumed_run_is_one_history_also_while_it_grows(tmp_path):
    path = tmp_path / events.FILE
    parts = [a_step(1, 3.0), a_step(2, 2.5), line(events.Resumed(1), 5.0), a_step(2, 2.0)]
    log = GrowingLog(tmp_path)
    for part in parts:
        with path.open("a") as stream:
            stream.write(part)
        log.update()
    assert log.records == events.read(tmp_path)
    assert [one["loss"] for one in log.records if one["event"] == "step"] == [3.0, 2.0]


def test_a_digest_says_what_the_whole_history_says(tmp_path):
    folder = record_run(tmp_path / "run", steps=500)
    found, records = digest(folder), events.read(folder)
    losses = [one["loss"] for one in records if one["event"] == "evaluation"]
    steps = [one for one in records if one["event"] == "step"]
    assert (found.kind, found.step, found.total_steps) == ("finished", 500, 500)
    assert (found.best, found.held_out, found.loss) == (min(losses), losses[-1], steps[-1]["loss"])
    recent = steps[-20:]
    assert found.tokens_per_second == pytest.approx(
        sum(one["tokens"] for one in recent) / sum(one["seconds"] for one in recent)
    )
    assert found.sparks[0] == steps[0]["loss"]
    assert 40 <= len(found.sparks) <= 60


def test_a_glance_at_a_long_run_says_the_same_but_for_held_out_losses(tmp_path):
    folder = record_run(tmp_path / "run", steps=3000)
    quick, whole = glance(folder), digest(folder)
    assert not quick.is_exact
    assert len(quick.sparks) == 40
    left_out = {"sparks": (), "best": None, "held_out": None, "is_exact": True}
    assert dataclasses.replace(quick, **left_out) == dataclasses.replace(whole, **left_out)
    short = record_run(tmp_path / "short", steps=30)
    assert glance(short) == digest(short)


def test_held_out_losses_that_a_resumed_run_has_forgotten_are_not_the_best(tmp_path):
    evaluation = line(events.Evaluation(4, 0.5, {}, 1.0, 0.1), 5.0)
    later = line(events.Evaluation(4, 0.9, {}, 1.0, 0.1), 9.0)
    (tmp_path / events.FILE).write_text(evaluation + line(events.Resumed(2), 6.0) + a_step(3, 1.0) + later)
    assert digest(tmp_path).best == 0.9


def test_held_out_losses_of_other_data_are_not_the_best(tmp_path):
    earlier, later = (line(events.Evaluation(step, loss, {}, 1.0, 0.1), 5.0) for step, loss in ((1, 0.5), (4, 0.9)))
    (tmp_path / events.FILE).write_text(earlier + line(events.Resumed(2, has_other_held_out=True), 6.0) + later)
    assert digest(tmp_path).best == 0.9


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n\n",
        b"{",
        b"\xff\xfe\n[1]\nnull\n",
        b'{"event": "step"\n',
        b'{"event": "step", "step": "x", "loss": []}\n',
        b'{"event": "step", "step": 1, "loss": "x", "tokens": {}, "seconds": null, "memory": NaN}\n',
        b'{"event": "evaluation", "step": 1, "loss": Infinity}\n{"event": "started", "total_steps": "many"}\n',
    ],
)
def test_damaged_lines_are_left_out(tmp_path, content):
    (tmp_path / events.FILE).write_bytes(content)
    found = digest(tmp_path)
    assert found.loss is None
    assert found.best is None
    GrowingLog(tmp_path).update()


def test_without_events_there_is_nothing_to_say(tmp_path):
    assert digest(tmp_path) == Digest()
    assert json.dumps(digest(tmp_path).sparks) == "[]"
