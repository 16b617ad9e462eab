from __future__ import annotations

import json

from tunesmith.train import events


def step(number: int, loss: float) -> events.Step:
    return events.Step(number, 0.1, loss, 1e-3, 0.5, 10, 5.0, 0.1, 100, {"a": loss})


def test_events_come_back_as_written(tmp_path):
    log = events.EventLog(tmp_path)
    log.write(events.Started(10, 100, {"torch": "2"}))
    log.write(step(1, 0.1 + 0.2))
    log.close()
    first, second = events.read(tmp_path)
    assert first["event"] == "started"
    assert second["loss"] == 0.1 + 0.2
    assert second["losses"] == {"a": 0.1 + 0.2}


def test_what_a_resumed_run_does_again_replaces_what_it_did_before(tmp_path):
    log = events.EventLog(tmp_path)
    for number in (1, 2, 3):
        log.write(step(number, number))
    log.write(events.Resumed(1))
    for number in (2, 3, 4):
        log.write(step(number, 10 * number))
    log.close()
    steps = [(record["step"], record["loss"]) for record in events.read(tmp_path) if record["event"] == "step"]
    assert steps == [(1, 1), (2, 20), (3, 30), (4, 40)]


def test_a_line_cut_short_by_a_kill_is_removed(tmp_path):
    for long in ("", "x" * 10_000):
        path = tmp_path / events.FILE
        path.write_text(json.dumps({"event": "warning", "message": "a"}) + "\n" + '{"event": "step", "st' + long)
        log = events.EventLog(tmp_path)
        log.write(events.Warned("b"))
        log.close()
        assert [record["message"] for record in events.read(tmp_path)] == ["a", "b"]


def test_a_file_of_one_partial_line_becomes_empty(tmp_path):
    (tmp_path / events.FILE).write_text('{"event": "st')
    events.EventLog(tmp_path).close()
    assert (tmp_path / events.FILE).read_text() == ""
