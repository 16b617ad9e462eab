from __future__ import annotations

import datetime
import gzip
import json
import os
import tracemalloc
from decimal import Decimal
from itertools import islice

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.config.schema import Dataset
from tunesmith.data import source
from tunesmith.errors import UserError

ROWS = [{"text": "one"}, {"text": "two\u2028still two"}, {"text": "drei ü"}]


def put(folder, name, content) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def rows(path, **more):
    return [record.fields for record in source.read(Dataset(path=str(path), **more))]


def places(path, **more):
    return [str(record.origin) for record in source.read(Dataset(path=str(path), **more))]


def lines(records=ROWS, end="\n") -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + end for row in records)


def test_every_container_gives_the_same_records(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    paths = [
        tmp_path / "a.parquet",
        put(tmp_path, "a.jsonl", lines()),
        put(tmp_path, "b.jsonl", "\ufeff" + lines(end="\r\n")),
        put(tmp_path, "c.jsonl", "\n\n" + lines(end="\n  \n").rstrip()),
        put(tmp_path, "a.json", json.dumps(ROWS, indent=1)),
        put(tmp_path, "b.json", json.dumps({"version": 1, "data": ROWS})),
        put(tmp_path, "c.json", json.dumps({"test": ROWS[:1], "train": ROWS})),
        put(tmp_path, "d.json", lines()),
        put(tmp_path, "e.json", "\n".join(json.dumps(row, indent=1) for row in ROWS)),
        put(tmp_path, "e.jsonl", json.dumps(ROWS)),
        put(tmp_path, "f.jsonl", json.dumps(ROWS, indent=1)),
        put(tmp_path, "g.jsonl", "[" + ",\n".join(map(json.dumps, ROWS)) + "]"),
        put(tmp_path, "h.jsonl.gz", gzip.compress("\n".join(json.dumps(row, indent=1) for row in ROWS).encode())),
        put(tmp_path, "c.csv", "sep=;\ntext;n\n" + "".join(f'"{row["text"]}";1\n' for row in ROWS)),
        put(tmp_path, "a.csv", "text,n\n" + "".join(f'"{row["text"]}",1\n' for row in ROWS)),
        put(tmp_path, "b.csv", "\ufeffn;text\r\n" + "".join(f"1;{row['text']}\r\n" for row in ROWS)),
        put(tmp_path, "a.tsv", "n\ttext\n" + "".join(f"1\t{row['text']}\n" for row in ROWS)),
        put(tmp_path, "a.jsonl.gz", gzip.compress(lines().encode())),
        put(tmp_path, "d.json.zst", zstandard.compress(lines().encode())),
        put(tmp_path, "a.JSONL.zst", b"".join(zstandard.compress(lines([r]).encode()) for r in ROWS)),
    ]
    for path in paths:
        assert [row["text"] for row in rows(path)] == [row["text"] for row in ROWS], path


def test_lines_are_counted_as_an_editor_counts_them(tmp_path):
    jsonl = put(tmp_path, "a.jsonl", '{"a": 1}\n\n{"a": 2}\n')
    assert places(jsonl) == [f"{jsonl}, line 1", f"{jsonl}, line 3"]
    table = put(tmp_path, "a.csv", 'a,b\n"two\nlines",1\n\nx,2\n')
    assert places(table) == [f"{table}, line 2", f"{table}, line 5"]
    assert rows(table)[0] == {"a": "two\nlines", "b": "1"}
    array = put(tmp_path, "a.json", '[{"a": 1},\n\n{"a": 2}]')
    assert places(array) == [f"{array}, record 1", f"{array}, record 2"]


def test_values_of_columns_that_json_does_not_have_are_spelled_out(tmp_path):
    import pyarrow
    import pyarrow.parquet

    day = datetime.date(2024, 7, 26)
    columns = {
        "text": [b"a text"], "price": [Decimal("1.50")], "count": [Decimal("3")], "day": [day], "raw": [b"\xff"],
        "messages": [[{"role": "user", "at": day}]],
    }  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    assert rows(tmp_path / "a.parquet") == [
        {"text": "a text", "price": 1.5, "count": 3, "day": "2024-07-26", "raw": b"\xff"}
        | {"messages": [{"role": "user", "at": "2024-07-26"}]}
    ]


def test_a_text_file_is_one_record(tmp_path):
    assert rows(put(tmp_path, "a.txt", "\ufeffOne.\r\n\r\nTwo.\n")) == [{"text": "One.\n\nTwo.\n"}]


def test_a_single_conversation_is_one_record(tmp_path):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    for content in (chat, {"messages": chat}, [{"messages": chat}], [chat]):
        assert rows(put(tmp_path, "a.json", json.dumps(content))) == [{"messages": chat}]
    assert rows(put(tmp_path, "a.jsonl", json.dumps(chat))) == [{"messages": chat}]


def test_folders_and_globs_are_read_in_order_of_names(tmp_path):
    put(tmp_path, "b/2.jsonl", '{"n": 3}')
    put(tmp_path, "b/1.jsonl", '{"n": 2}')
    put(tmp_path, "a.json", '[{"n": 1}]')
    for name in ("README.md", "LICENSE", ".hidden/x.jsonl", "dataset_info.json"):
        put(tmp_path, name, "not a record")
    assert [row["n"] for row in rows(tmp_path)] == [1, 2, 3]
    assert [row["n"] for row in rows(tmp_path / "**" / "*.jsonl")] == [2, 3]
    assert [row["n"] for row in rows(tmp_path, limit=2)] == [1, 2]


@pytest.mark.parametrize(
    "names",
    [
        ["train.jsonl", "test.jsonl", "validation.jsonl"],
        ["data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl", "dev.jsonl"],
        ["training/a.jsonl", "test/a.jsonl", "val/a.jsonl"],
        ["alpaca_train.jsonl", "alpaca_test.jsonl", "alpaca_valid.jsonl"],
    ],
)
def test_of_a_folder_of_splits_only_the_one_that_is_asked_for_is_read(tmp_path, names):
    for name in names:
        put(tmp_path, name, json.dumps({"n": name}))
    train, test, validation = names
    assert [row["n"] for row in rows(tmp_path)] == [train]
    assert [row["n"] for row in rows(tmp_path, split="test")] == [test]
    assert [row["n"] for row in rows(tmp_path, split="validation")] == [validation]
    assert sorted(row["n"] for row in rows(tmp_path / "**" / "*")) == sorted(names)
    with pytest.raises(UserError, match=r"has the splits test, train, validation, but not `other`; say which"):
        rows(tmp_path, split="other")


def test_files_that_are_no_splits_are_all_read(tmp_path):
    for name in ("train.jsonl", "more.jsonl", "contest.jsonl", "trainer.jsonl"):
        put(tmp_path, name, json.dumps({"n": name}))
    assert len(rows(tmp_path)) == 4


def test_lines_within_a_cell_end_as_those_of_a_file_from_elsewhere_do_here(tmp_path):
    put(tmp_path, "a.csv", b'a,b\r\n"one\r\ntwo",3\r\n')
    assert rows(tmp_path / "a.csv") == [{"a": "one\ntwo", "b": "3"}]


def test_what_the_datasets_library_saved_is_read(tmp_path):
    import datasets

    made = {name: datasets.Dataset.from_list([{"n": name, "more": [{"a": 2}]}]) for name in ("train", "test")}
    datasets.DatasetDict(made).save_to_disk(tmp_path / "saved")
    assert [row["n"] for row in rows(tmp_path / "saved")] == ["train"]
    assert [row["n"] for row in rows(tmp_path / "saved", split="test")] == ["test"]
    datasets.Dataset.from_list([{"n": 1}, {"n": 2}]).data.table.to_pandas().to_feather(tmp_path / "indexed.arrow")
    assert [row["n"] for row in rows(tmp_path / "indexed.arrow")] == [1, 2]
    put(tmp_path, "broken.arrow", "x" * 100)
    with pytest.raises(UserError, match=r"broken\.arrow: not an Arrow file that can be read, at record 1"):
        rows(tmp_path / "broken.arrow")


def test_a_folder_of_texts_is_read_and_a_hidden_folder_above_does_not_matter(tmp_path):
    put(tmp_path, ".cache/books/a.txt", "A")
    put(tmp_path, ".cache/books/b.md", "B")
    assert [row["text"] for row in rows(tmp_path / ".cache" / "books")] == ["A", "B"]


BROKEN = {
    "commas": ("a.jsonl", '{"a": 1},\n{"a": 2}\n', r"a\.jsonl, line 1: the line ends with a comma, .*: remove the"),
    "cut off": ("a.jsonl", '{"a": 1}\n{"a": \n{"a": 3}\n', r"a\.jsonl, line 2: not valid JSON at column 6:"),
    "not an object": ("a.jsonl", '{"a": 1}\n"text"\n', r"a\.jsonl, line 2: expected an object.*found a text"),
    "a number": ("a.jsonl", "5\n", r"a\.jsonl, line 1: expected an object.*found a number"),
    "twins": ("a.jsonl", '{"a": 1, "a": 2}\n', r"a\.jsonl, line 1: .*`a` appears twice"),
    "not UTF-8": ("a.jsonl", b'{"a": 1}\n{"a": "\xe9"}\n', r"a\.jsonl, line 2: byte 8 \(0xe9\) is not UTF-8"),
    "UTF-16": ("a.jsonl", '{"a": 1}'.encode("utf-16"), r"a\.jsonl: the text is UTF-16"),
    "UTF-16 without a mark": ("a.jsonl", '{"a": 1}'.encode("utf-16-le"), r"a\.jsonl: the text is UTF-16"),
    "lines of an old Mac": ("a.csv", "a,b\r1,2\r", r"a\.csv, line 1: .*carriage return stands outside of quotes; save"),
    "a list after an object": ("a.json", '{\n"a": 1}\n[1]', r"a\.json, line 3: not valid JSON at column 4: extra data"),
    "half a character in a list": ("a.json", '[{"a": "b"}, {"\\ud800": "b"}]', r"a\.json, record 2: .*surrogate"),
    "half a character": ("a.jsonl", '{"a": "\\ud800"}\n', r"a\.jsonl, line 1: .*surrogate"),
    "too deep": ("a.jsonl", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", r"a\.jsonl, line 1: .*nested"),
    "array": ("a.json", '[\n{"a": 1},\n{"a": }\n]', r"a\.json, line 3: not valid JSON"),
    "array of numbers": ("a.json", "[1, 2]", r"a\.json, record 1: expected an object"),
    "scalar": ("a.json", "3", r"a\.json: holds only a number"),
    "several lists": ("a.json", '{"x": [{"a": 1}], "y": [{"a": 1}]}', r"several lists of records \(x, y\)"),
    "columns": ("a.json", '{"x": {"0": "a", "1": "b"}, "y": {"0": "c", "1": "d"}}', r"holds columns \(`x`, `y`\)"),
    "no records": ("a.json", "[]", r"a\.json: holds no records"),
    "blank": ("a.jsonl", "\n \n", r"a\.jsonl: holds no records"),
    "empty": ("a.jsonl", "", r"a\.jsonl: the file is empty"),
    "header only": ("a.csv", "a,b\n", r"a\.csv: holds no records"),
    "short row": ("a.csv", "a,b\n1,2\n3\n", r"a\.csv, line 3: 1 fields, but the header names 2"),
    "open quote": ("a.csv", 'a,b\n1,2\n"3,4\n5,6\n', r"a\.csv, line 3: not valid CSV"),
    "twin columns": ("a.csv", "a,a\n1,2\n", r"a\.csv, line 1: the column name `a`"),
    "no parquet": ("a.parquet", "hello", r"a\.parquet: not a Parquet file"),
    "unknown ending": ("a.xlsx", "x", r"a\.xlsx: cannot read files that end in `\.xlsx`; known are \.json"),
    "cut gzip": ("a.jsonl.gz", gzip.compress(lines(ROWS * 1000).encode())[:-20], r"gz: .*damaged or cut short"),
    "no gzip": ("a.jsonl.gz", lines(), r"gz: .*damaged or cut short"),
    "cut zst": ("a.jsonl.zst", zstandard.compress(os.urandom(9000).hex().encode())[:-20], r"zst: .*cut short"),
    "no zst": ("a.jsonl.zst", lines(), r"zst: .*damaged"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_is_one_sentence_with_its_place(name, tmp_path):
    file, content, message = BROKEN[name]
    path = put(tmp_path, file, content)
    with pytest.raises(UserError, match=message) as caught:
        rows(path)
    assert "\n" not in str(caught.value)


def test_a_file_whose_name_is_not_utf8_is_named(tmp_path):
    folder = os.fsencode(tmp_path / "data")
    os.mkdir(folder)
    with open(os.path.join(folder, b"\xff.jsonl"), "wb") as file:
        file.write(lines().encode())
    with pytest.raises(UserError, match=r"data/\\xff\.jsonl: the name of this data file is not UTF-8; rename it"):
        rows(tmp_path / "data")


def test_nan_and_infinity_stay_what_they_are(tmp_path):
    path = put(tmp_path, "a.jsonl", '{"a": NaN, "b": -Infinity}\nNaN\n')
    found = []
    (record,) = source.read(Dataset(path=path), found.append)
    assert json.dumps(record.fields) == '{"a": NaN, "b": -Infinity}'
    assert "line 2: expected an object with named fields, found NaN" in str(found[0])


def test_all_bad_records_of_a_file_are_told_and_those_between_are_read(tmp_path):
    lines = b'{"a": 1}\n{"a": \n\n{"a": "\xe9"}\n[]\n{"a": 2}\n{"a": 1, "a": 2}\n{"a": "\\ud800"}\n{"a": 3}'
    table = b'a,b\n1,2\n3\n4,\xe9\n5,"6"7\n8,9\n"10,11\n12,13\n'
    for name, content, wanted in (
        (
            "a.jsonl",
            lines,
            {2: "not valid JSON", 4: "not UTF-8", 5: "not an object", 7: "not valid JSON", 8: "half of a character"},
        ),
        ("a.csv", table, {3: "not valid CSV", 4: "not UTF-8", 5: "not valid CSV", 7: "not valid CSV"}),
        ("a.json", b'[{"a": 1}, 2, null, {"a": 2}]', {2: "not an object", 3: "not an object"}),
    ):
        found = []
        read = list(source.read(Dataset(path=put(tmp_path, name, content)), found.append))
        assert {error.origin.line: error.kind for error in found} == wanted, name
        assert len(read) == {"a.jsonl": 3, "a.csv": 2, "a.json": 2}[name]


def test_a_folder_that_links_lead_back_to_is_read_once(tmp_path):
    put(tmp_path, "data/a.jsonl", '{"n": 1}')
    put(tmp_path, "data/b/b.jsonl", '{"n": 2}')
    put(tmp_path, "elsewhere/c.jsonl", '{"n": 3}')
    data = tmp_path / "data"
    for name in ("1", "2", "b/back"):  # two loops in one folder are 2**40 paths to one who follows them all
        (data / name).symlink_to(data, target_is_directory=True)
    (data / "linked").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (data / "0.jsonl").symlink_to(data / "a.jsonl")
    os.link(data / "a.jsonl", data / "hard.jsonl")
    for path in (data, data / "**" / "*.jsonl", tmp_path / "d*" / "**" / "*.jsonl"):
        read = list(source.read(Dataset(path=str(path))))
        assert [record.fields["n"] for record in read] == [1, 2, 1, 3], path
        assert read[0].origin.file == str(data / "a.jsonl")
    assert [row["n"] for row in rows(data / "**" / "b.jsonl")] == [2]
    assert [row["n"] for row in rows(data / "*.jsonl")] == [1, 1]


def test_a_long_line_is_read_in_a_small_multiple_of_it(tmp_path):
    size = 5_000_000
    path = tmp_path / "a.jsonl"
    with path.open("w") as file:
        for _ in range(2):
            file.write('{"text": "' + "word " * (size // 5) + '"}\n')
    tracemalloc.start()
    for record in source.read(Dataset(path=str(path))):
        assert len(record.fields["text"]) == size
        assert record.size > size
        del record
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * size


def test_records_before_a_broken_line_are_still_given(tmp_path):
    records = source.read(Dataset(path=put(tmp_path, "a.jsonl", '{"a": 1}\n{"a": \n')))
    assert next(records).fields == {"a": 1}


def test_a_missing_file_names_what_is_near(tmp_path):
    near = put(tmp_path, "support.jsonl", lines())
    with pytest.raises(UserError, match=r"suport\.jsonl: no such file or folder; did you mean .*support\.jsonl\?"):
        rows(tmp_path / "suport.jsonl")
    with pytest.raises(UserError, match="did you mean"):
        rows(near.replace(".jsonl", ".json"))
    with pytest.raises(UserError, match="no files there"):
        rows(tmp_path / "*.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty: no files there\.$"):
        rows(tmp_path / "empty")
    put(tmp_path, "unnamed", "x")
    with pytest.raises(UserError, match="cannot read files without an ending; known are"):
        rows(tmp_path / "unnamed")
    put(tmp_path, "other/x.bin", "x")
    with pytest.raises(UserError, match=r"only files that cannot be read \(`\.bin`\)"):
        rows(tmp_path / "other")


def test_the_fingerprint_follows_content_and_limit_but_not_the_name(tmp_path):
    def fingerprint(path, **more):
        return source.fingerprint(Dataset(path=str(path), **more))

    a, b = put(tmp_path, "a.jsonl", lines()), put(tmp_path, "b.jsonl", lines())
    assert fingerprint(a) == fingerprint(b)
    assert fingerprint(a) != fingerprint(a, limit=1)
    before = fingerprint(tmp_path)
    put(tmp_path, "b.jsonl", lines(ROWS[:2]))
    assert fingerprint(a) != fingerprint(b)
    assert fingerprint(tmp_path) != before


def test_memory_does_not_grow_with_a_jsonl_file(tmp_path):
    path = put(tmp_path, "a.jsonl", lines([{"text": "x" * 1000}] * 5000))
    tracemalloc.start()
    for _ in source.read(Dataset(path=path)):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_only_as_much_is_read_as_is_asked_for(tmp_path):
    path = put(tmp_path, "a.jsonl", lines() + "broken")
    assert len(rows(path, limit=3)) == 3
    assert len(list(islice(source.read(Dataset(path=path)), 3))) == 3


def test_a_hub_name_that_is_a_folder_here_is_not_looked_up(tmp_path, monkeypatch):
    put(tmp_path, "org/data/a.jsonl", lines())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="say `path: org/data`"):
        list(source.read(Dataset(hub="org/data")))


def test_hub_data_sets_come_through_the_datasets_library(monkeypatch):
    import datasets

    made = datasets.Dataset.from_list(ROWS)
    asked = []

    def load(name, subset, split):
        asked.append((name, subset, split))
        if name == "org/none":
            raise ConnectionError("Couldn't reach the hub\nwith details")
        return made

    monkeypatch.setattr(datasets, "load_dataset", load)
    source._load_hub_cached.cache_clear()
    dataset = Dataset(hub="org/some", subset="en", split="test", limit=2)
    assert [(str(r.origin), r.fields) for r in source.read(dataset)] == [
        ("org/some, record 1", ROWS[0]),
        ("org/some, record 2", ROWS[1]),
    ]
    assert source.fingerprint(dataset) != source.fingerprint(Dataset(hub="org/some", subset="en", split="test"))
    assert asked == [("org/some", "en", "test")]
    with pytest.raises(
        UserError, match=r"org/none .* is not in the hub's cache, and the hub cannot be reached \(HF_HUB_"
    ):
        list(source.read(Dataset(hub="org/none")))
    source._load_hub_cached.cache_clear()


@settings(max_examples=60, deadline=None)
@given(
    content=st.binary(max_size=200),
    ending=st.sampled_from([".json", ".jsonl", ".csv", ".txt", ".jsonl.gz", ".parquet"]),
)
def test_any_bytes_give_records_or_a_sentence(content, ending, tmp_path_factory):
    path = put(tmp_path_factory.mktemp("any"), "a" + ending, content)
    said = ""
    try:
        assert all(isinstance(row, dict) for row in rows(path))
    except UserError as error:
        said = str(error)
    assert "\n" not in said
