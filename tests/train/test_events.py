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


def test_a_damaged_line_is_left_out_and_said_and_loses_no_other(tmp_path):
    from tunesmith.ui.log import GrowingLog, digest

    lines = [b'{"event": "step", "step": %d, "time": 1.0, "loss": 2.0}' % n for n in range(1, 5)]
    later = b'{"event": "of another version"}'
    damaged = [
        lines[0],
        lines[1][:20],
        b"\x00\xff\xfe",
        b'{"event": "step", "step": "x"}',
        later,
        b"",
        lines[2],
        lines[3],
    ]
    (tmp_path / "events.jsonl").write_bytes(b"\n".join(damaged) + b"\n" + lines[0][:30])  # the last is being written
    log = GrowingLog(tmp_path)
    log.update()
    for found in (events.read(tmp_path), log.records):
        assert [one["step"] for one in found if one["event"] == "step"] == [1, 3, 4]
        said = "3 lines of events.jsonl cannot be read and are left out of the history; the first is line 2."
        assert [one["message"] for one in found if one["event"] == "warning"] == [said] == [events.damage(found)]
    assert digest(tmp_path).step == 4
    (tmp_path / "events.jsonl").write_bytes(b"\n".join([lines[0], lines[1]]) + b"\n")
    assert events.damage(events.read(tmp_path)) is None


def test_a_file_of_one_partial_line_becomes_empty(tmp_path):
    (tmp_path / events.FILE).write_text('{"event": "st')
    events.EventLog(tmp_path).close()
    assert (tmp_path / events.FILE).read_text() == ""
