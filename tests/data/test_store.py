import errno
import json
import multiprocessing
import os
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.data import build as build_module
from tunesmith.data import token_files
from tunesmith.data.build import build, store_of
from tunesmith.data.store import cut
from tunesmith.data.token_cache import stored, tokens_folder
from tunesmith.data.types import Example, Origin, Record
from tunesmith.errors import UserError, UserErrors


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


def records(count):
    for number in range(1, count + 1):
        yield Record({"n": number}, Origin("data.jsonl", number))


def encode(some):
    """Record n becomes the tokens n, n+1, n+2, of which the last is a target with weight n % 3 + 0.1."""
    examples = []
    for record in some:
        n = record.fields["n"]
        if n == 1313:
            raise UserError(f"{record.origin}: an unlucky record.")
        if n == 1414:
            raise UserErrors([f"{record.origin}: wrong.", f"{record.origin}: and wrong again."])
        if n == 1515:
            os._exit(9)
        ids, weights = np.arange(n, n + 3), np.array([1, 0, n % 3 + 0.1])
        examples.append(Example(ids.astype(np.int32), weights.astype(np.float32), record.origin))
    return examples, [record.origin.line for record in some]


def built(count, key="k", **options):
    options = {"format": "text", "vocab_size": 70_000} | options
    return build(key, "data", records(count), encode, **options)


def opened(whole, **options):
    return cut(whole, "data", **({"sequence_length": 8, "too_long": "truncate"} | options))


@pytest.mark.parametrize("vocab_size", [5000, 70_000])
def test_what_was_written_is_read_back(vocab_size):
    built(10, vocab_size=vocab_size)
    store = opened(stored("k"))
    assert len(store) == 10
    for i in range(10):
        ids, weights, origin = store.example(i)
        assert ids.tolist() == [i + 1, i + 2, i + 3]
        assert ids.dtype == np.int32
        assert weights.tolist() == np.array([1, 0, (i + 1) % 3 + 0.1], dtype=np.float32).tolist()
        assert weights.dtype == np.float32
        assert origin == f"data.jsonl, line {i + 1}"
    assert store.lengths.tolist() == [3] * 10
    assert store.target_weights == pytest.approx([(n % 3) + 0.1 for n in range(1, 11)])
    assert len(set(store.hashes.tolist())) == 10
    assert (store.report.records, store.report.tokens, store.report.target_tokens) == (10, 30, 10)


def test_nothing_is_stored_before_it_is_built(cache):
    assert stored("k") is None
    built(3)
    assert stored("k") is not None
    assert [folder.name for folder in cache.iterdir()] == ["k"]


def test_a_pool_of_processes_makes_the_same_bytes_as_one(cache, monkeypatch):
    monkeypatch.setattr(build_module, "PARALLEL_FROM", 100)
    monkeypatch.setattr(build_module, "CHUNK", 16)
    noticed, seen = [], []
    built(1000, "pool", workers=2, notice=noticed.extend, progress=lambda title, done, total: seen.append(done))
    assert noticed == list(range(1, 1001))
    assert seen == [*range(16, 1000, 16), 1000]
    assert "TOKENIZERS_PARALLELISM" not in os.environ
    built(1000, "one", workers=1)
    for file in (cache / "one").iterdir():
        assert file.read_bytes() == (cache / "pool" / file.name).read_bytes()


@pytest.mark.parametrize("workers", [1, 2])
def test_errors_for_people_come_out_of_the_pool_as_they_are(cache, monkeypatch, workers):
    monkeypatch.setattr(build_module, "PARALLEL_FROM", 10)
    with pytest.raises(UserError) as one:
        built(3000, workers=workers)
    assert str(one.value) == "data.jsonl, line 1313: an unlucky record."
    with pytest.raises(UserErrors) as two:
        build("k", "data", list(records(1500))[1313:], encode, format="text", vocab_size=9999, workers=workers)
    assert two.value.messages == ["data.jsonl, line 1414: wrong.", "data.jsonl, line 1414: and wrong again."]
    assert list(cache.iterdir()) == []


def test_a_worker_that_is_killed_is_an_error_for_people(monkeypatch):
    monkeypatch.setattr(build_module, "PARALLEL_FROM", 10)
    with pytest.raises(UserError, match="killed, most likely for lack of memory"):
        build("k", "data", list(records(1600))[1500:], encode, format="text", vocab_size=9999, workers=2)


DAMAGES = {
    "cut short": lambda folder: os.truncate(folder / "tokens.bin", 8),
    "empty": lambda folder: os.truncate(folder / "codes.bin", 0),
    "missing": lambda folder: (folder / "hashes.bin").unlink(),
    "no meta": lambda folder: (folder / "meta.json").unlink(),
    "half a meta": lambda folder: os.truncate(folder / "meta.json", 30),
    "another layout": lambda folder: (folder / "meta.json").write_text('{"layout": 0}'),
    "not an object": lambda folder: (folder / "meta.json").write_text("[]"),
    "wrong offsets": lambda folder: (folder / "offsets.bin").write_bytes(np.array([0, 9, 6, 9], np.int64).tobytes()),
}


def flip(path, place=-3):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


for _name in ("tokens", "codes", "offsets", "sums", "targets", "origins", "hashes"):
    DAMAGES[f"a bit of {_name}"] = lambda folder, name=_name: flip(folder / f"{name}.bin")
DAMAGES["a bit of the description"] = lambda folder: (folder / "meta.json").write_text(
    (folder / "meta.json").read_text().replace("1.1", "1.2")
)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_cache_is_found_out_and_made_again(cache, damage, caplog):
    built(3)
    damage(cache / "k")
    assert stored("k") is None
    assert "damaged" in caplog.text
    assert len(opened(built(3))) == 3
    assert len(opened(stored("k"))) == 3


def test_damage_beyond_the_first_piece_that_is_hashed_is_found(cache, monkeypatch):
    monkeypatch.setattr(token_files, "HASHED_BYTES", 16)
    built(30)
    assert stored("k") is not None
    flip(cache / "k" / "tokens.bin", 100)
    assert stored("k") is None


def test_long_records_travel_alone(cache):
    some = [Record({"n": n}, Origin("data.jsonl", n), size) for n, size in enumerate([1, 1, 5 << 20, 1, 9 << 20, 1])]
    assert [len(chunk) for chunk in build_module._chunks(iter(some))] == [3, 2, 1]


def test_data_that_is_refused_at_the_end_is_not_kept(cache):
    def refuse():
        raise UserError("no.")

    with pytest.raises(UserError, match="no"):
        built(3, warnings=refuse)
    assert list(cache.iterdir()) == []
    built(3, warnings=lambda: ["careful"])
    assert opened(stored("k")).warnings == ("careful",)


def _build_many(gate):
    gate.wait()
    built(200)


@pytest.mark.distributed
def test_processes_that_build_the_same_store_do_not_disturb_each_other(cache):
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(4)
    processes = [context.Process(target=_build_many, args=(gate,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    assert [folder.name for folder in cache.iterdir()] == ["k"]
    assert len(opened(stored("k"))) == 200


def test_what_killed_builds_left_and_what_nobody_opened_for_long_is_removed(cache):
    days = {"partial-old": 1.1, "partial-new": 0.1, "forgotten": 61, "recent": 59}
    for name, age in days.items():
        (cache / name).mkdir(parents=True)
        (cache / name / "tokens.bin").write_bytes(b"x")
        for path in (cache / name / "tokens.bin", cache / name):
            os.utime(path, (time.time() - age * 86400,) * 2)
    built(3)
    assert sorted(folder.name for folder in cache.iterdir()) == ["k", "partial-new", "recent"]


def test_tokens_that_are_used_are_not_removed(cache):
    built(3)
    long_ago = time.time() - 100 * 86400
    for path in (*(cache / "k").iterdir(), cache / "k"):
        os.utime(path, (long_ago, long_ago))
    assert stored("k") is not None
    built(3, key="other")
    assert sorted(folder.name for folder in cache.iterdir()) == ["k", "other"]


@pytest.mark.parametrize(
    ("number", "said"), [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "the disk is read-only")]
)
def test_a_disk_that_cannot_be_written_is_an_error_for_people(cache, monkeypatch, number, said):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match=rf"{said}.*TUNESMITH_CACHE"):
        built(3)
    assert list(cache.iterdir()) == []


def test_a_cache_path_that_is_a_file_is_an_error_for_people(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"a file is where a folder is needed|a part of the path is a file"):
        built(3)


def test_more_weights_than_codes_is_an_error_for_people():
    weights = np.arange(2**16 + 10, dtype=np.float32)
    example = Example(np.zeros(len(weights), np.int32), weights, Origin("data.jsonl", 1))
    with pytest.raises(UserError, match="round them"):
        store_of([example])


def example(weights, line=1):
    weights = np.array(weights, dtype=np.float32)
    return Example(np.arange(100, 100 + len(weights), dtype=np.int32), weights, Origin("data.jsonl", line))


def test_long_examples_are_truncated_and_those_that_lose_their_targets_dropped():
    examples = [example([0, 1, 1]), example([0, 1, 1, 1, 1, 1], 2), example([0, 0, 0, 0, 1, 1], 3)]
    store = store_of(examples, sequence_length=4)
    assert [store.example(i)[0].tolist() for i in range(2)] == [[100, 101, 102], [100, 101, 102, 103]]
    assert store.target_weights.tolist() == [2, 3]
    report = store.report
    assert (report.truncated, report.dropped_targets_cut_off, report.examples, report.records) == (1, 1, 2, 3)
    assert (report.tokens, report.target_tokens, report.longest, report.longest_uncut) == (7, 5, 4, 6)


def test_long_examples_are_split_without_losing_a_target():
    long = example([0, 1, 0, 0, 0, 0, 0, 1, 2, 1, 1])  # 11 tokens: pieces 0-3, 3-6, 6-9, 9-10
    store = store_of([long, example([0, 1], 2)], sequence_length=4, too_long="split")
    assert [store.example(i)[0].tolist() for i in range(4)] == [
        [100, 101, 102, 103],
        [106, 107, 108, 109],
        [109, 110],
        [100, 101],
    ]
    assert [store.example(i)[2] for i in (0, 2, 3)] == [
        "data.jsonl, line 1",
        "data.jsonl, line 1",
        "data.jsonl, line 2",
    ]
    assert store.target_weights.tolist() == [1, 4, 1, 1]
    report = store.report
    assert (report.split, report.truncated, report.dropped_targets_cut_off) == (1, 0, 1)
    assert store.hashes[0] == store.hashes[2] != store.hashes[3]


@given(
    st.lists(st.lists(st.sampled_from([0, 1, 0.5]), min_size=1, max_size=30), min_size=1, max_size=8),
    st.integers(2, 9),
)
@settings(max_examples=25, deadline=None)
def test_splitting_keeps_every_target_whatever_the_lengths(all_weights, size):
    examples = [example([*weights, 1], line) for line, weights in enumerate(all_weights, start=1)]
    store = store_of(examples, sequence_length=size, too_long="split")
    assert store.lengths.max() <= size
    found: dict[str, dict[int, float]] = {}
    for i in range(len(store)):
        ids, weights, origin = store.example(i)
        assert weights[1:].sum() == store.target_weights[i] > 0
        for token, weight in zip(ids[1:].tolist(), weights[1:].tolist(), strict=True):
            if weight:
                assert token not in found.setdefault(origin, {})
                found[origin][token] = weight
    for whole in examples:
        wanted = dict(zip(whole.ids[1:].tolist(), whole.weights[1:].tolist(), strict=True))
        assert found[str(whole.origin)] == {token: weight for token, weight in wanted.items() if weight}


def test_long_examples_are_dropped_when_asked():
    store = store_of([example([0, 1]), example([0, 1, 1, 1], 2)], sequence_length=3, too_long="drop")
    assert (len(store), store.report.dropped_too_long, store.report.truncated) == (1, 1, 0)


def test_examples_without_targets_are_left_out_and_counted():
    store = store_of([example([1, 0]), example([0, 0, 0]), example([0, 1]), example([])])
    assert (len(store), store.report.dropped_without_targets, store.report.dropped_targets_cut_off) == (1, 3, 0)


@pytest.mark.parametrize(
    ("weights", "too_long", "said"),
    [
        ([0, 0, 0, 0, 1], "truncate", "targets of 1 of 1 begin beyond sequence_length 3.*too_long: split"),
        ([0, 0, 0, 0, 1], "drop", "1 of 1 are longer than sequence_length 3.*longest has 5"),
        ([1, 0], "truncate", "none of its 1 examples has a target"),
    ],
)
def test_when_nothing_is_left_the_reason_is_said(weights, too_long, said):
    with pytest.raises(UserError, match=said):
        store_of([example(weights)], sequence_length=3, too_long=too_long)


def test_the_fingerprint_knows_the_sequence_length_only_where_it_matters():
    examples = [example([0, 1]), example([0, 1, 1, 1], 2)]
    prints = {n: store_of(examples, sequence_length=n).fingerprint for n in (3, 4, 8)}
    assert prints[3] != prints[4] == prints[8]
    assert prints[3] != store_of(examples, sequence_length=3, too_long="drop").fingerprint
    assert prints[8] != store_of(examples[::-1]).fingerprint
    assert prints[8] != store_of([example([0, 1]), example([0, 1, 1, 0.5], 2)]).fingerprint


def test_the_cache_is_where_the_environment_says(tmp_path, monkeypatch):
    assert tokens_folder() == tmp_path / "cache" / "tokens"
    monkeypatch.delenv("TUNESMITH_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tokens_folder() == tmp_path / ".cache" / "tunesmith" / "tokens"


def test_the_description_is_readable(cache):
    built(2)
    meta = json.loads((cache / "k" / "meta.json").read_text())
    assert (meta["format"], meta["records"], meta["files"]) == ("text", 2, [["data.jsonl", "line"]])
