"""Labels that the settings do not give are read from the data, or refused in a sentence."""

from __future__ import annotations

import json

import pytest

from tunesmith.config.load import from_mapping
from tunesmith.config.schema import Dataset
from tunesmith.data.convert import convert
from tunesmith.data.labels import with_labels
from tunesmith.data.prepare import prepare
from tunesmith.data.recognise import recognise
from tunesmith.data.types import Document, Origin, Record
from tunesmith.errors import UserError


def labelled(folder, found, **settings):
    lines = [json.dumps({"text": f"text {number}", "label": label}) + "\n" for number, label in enumerate(found)]
    (folder / "train.jsonl").write_text("".join(lines))
    given = {"model": "m", "objective": "classify", "data": str(folder / "train.jsonl")}
    return with_labels(from_mapping(given | settings)).labels


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["good", "bad", "good"], ["bad", "good"]),
        ([" good", "bad ", "good"], ["bad", "good"]),
        (["10", "9", "x", "10"], ["9", "10", "x"]),
        ([1, 0, 2.0, 1], ["0", "1", "2"]),
        ([True, False], ["false", "true"]),
        ([f"{n % 40:02}" for n in range(100)], [f"{n:02}" for n in range(40)]),
    ],
)
def test_labels_are_read_and_sorted(tmp_path, labels, expected):
    assert labelled(tmp_path, labels) == expected


def test_labels_that_are_given_stay_as_they_are(tmp_path):
    assert labelled(tmp_path, ["good", "bad"], labels=["good", "bad"]) == ["good", "bad"]


def test_numbers_in_columns_of_text_are_numbers_unless_they_are_names(tiny_model, tmp_path):
    from transformers import AutoTokenizer

    (tmp_path / "train.csv").write_text("text,label\nred, 1\nblue,0\n")
    given = {"model": str(tiny_model), "objective": "classify", "data": str(tmp_path / "train.csv"), "held_out": 0}

    def values(labels):
        run = from_mapping({**given, "labels": labels})
        (store,) = prepare(run, AutoTokenizer.from_pretrained(tiny_model), 259).train
        return [store.value(document) for document in range(len(store))]

    assert values(["bad", "good"]) == [1, 0]
    assert values(["1", "0"]) == [0, 1]


def test_labels_of_words_are_read_too(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"words": ["EU", "rejects", "calls"], "labels": ["B-ORG", "O", -100]}\n')
    assert labelled_words(tmp_path) == ["B-ORG", "O"]


def labelled_words(folder):
    given = {"model": "m", "objective": "classify_tokens", "data": str(folder / "train.jsonl")}
    return with_labels(from_mapping(given)).labels


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (["same", "same"], "have `same` for a label, and classes are two or more"),
        ([0.25, 0.5, 1.0], "line 1: .*0.25; scores are for `objective: reward`"),
        ([1, 2, 3], "are the numbers 1, 2, 3, not all from 0"),
        (["a", 1], r"are names and numbers \(1, a\)"),
        ([[0], [1]], r"line 1: `label` must be a name or a number, found \[0\]"),
        (["good", "bad", "Good "], "labels 'Good' and 'good' differ in capitals or spaces alone"),
        ([f"answer {n}" for n in range(30)], "30 labels have 30 different values .*too many to be classes"),
        ([f"{n}" for _ in range(3) for n in range(1001)], "3,003 labels have 1,001 different values"),
    ],
)
def test_what_is_no_class_is_refused_in_a_sentence(tmp_path, labels, said):
    with pytest.raises(UserError, match=said) as caught:
        labelled(tmp_path, labels)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ({"label_text": ["bad", "good"]}, ["bad", "good"]),
        ({"label_name": ["bad", "good"]}, ["bad", "good"]),
        ({"label_text": ["the same", "the same"]}, ["0", "1"]),  # names nothing
        ({"source": ["here", "there"]}, ["0", "1"]),
    ],
)
@pytest.mark.parametrize("kind", [int, str])
def test_numbers_are_called_what_a_field_beside_them_says(tmp_path, beside, expected, kind):
    (name, names), path = *beside.items(), tmp_path / "train.jsonl"
    rows = [{"text": f"text {n}", "label": kind(n % 2), name: names[n % 2]} for n in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert with_labels(from_mapping({"model": "m", "objective": "classify", "data": str(path)})).labels == expected
    mapped = {"path": str(path), "fields": {"label_name": name}}
    found = with_labels(from_mapping({"model": "m", "objective": "classify", "data": [mapped]})).labels
    assert found == (names if len(set(names)) == 2 else ["0", "1"])


def test_a_name_beside_a_number_goes_before_the_numbers_place_among_given_labels(tiny_model, tmp_path):
    from transformers import AutoTokenizer

    path = tmp_path / "train.jsonl"
    path.write_text('{"text": "red", "label": 0, "label_text": "bad"}\n{"text": "blue", "label": true}\n')
    given = {"model": str(tiny_model), "objective": "classify", "data": str(path), "held_out": 0}
    run = from_mapping({**given, "labels": ["true", "bad"]})
    (store,) = prepare(run, AutoTokenizer.from_pretrained(tiny_model), 259).train
    assert [store.value(document) for document in range(len(store))] == [1, 0]


@pytest.mark.parametrize("ending", ["parquet", "saved"])
def test_classes_are_those_that_columns_name(tmp_path, ending):
    """As data sets of the hub have them, with a class that no record is of."""
    import datasets

    columns = datasets.Features(
        {
            "text": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["sad", "joyful", "none"]),
            "tokens": datasets.Sequence(datasets.Value("string")),
            "ner_tags": datasets.Sequence(datasets.ClassLabel(names=["O", "B", "I"])),
        }
    )
    rows = [{"text": "x", "label": n % 2, "tokens": ["a", "b"], "ner_tags": [0, n % 2]} for n in range(4)]
    made = datasets.Dataset.from_list(rows, features=columns)
    path = tmp_path / f"data.{ending}"
    made.to_parquet(path) if ending == "parquet" else made.save_to_disk(path)

    def labels(objective, **fields):
        data = [{"path": str(path), "fields": fields}]
        return with_labels(from_mapping({"model": "m", "objective": objective, "data": data})).labels

    assert labels("classify") == ["sad", "joyful", "none"]
    assert labels("classify_tokens") == ["O", "B", "I"]
    assert labels("classify_tokens", tags="ner_tags") == ["O", "B", "I"]


def test_columns_that_number_the_same_classes_differently_are_refused(tmp_path):
    import datasets

    def labels(*orders):
        for place, names in enumerate(orders):
            columns = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
            rows = [{"text": "x", "label": n % 2} for n in range(4)]
            datasets.Dataset.from_list(rows, features=columns).to_parquet(tmp_path / f"{place}.parquet")
        data = [str(tmp_path / f"{place}.parquet") for place in range(len(orders))]
        return with_labels(from_mapping({"model": "m", "objective": "classify", "data": data})).labels

    assert labels(["sad", "joyful"], ["sad", "joyful", "none"]) == ["sad", "joyful", "none"]
    with pytest.raises(UserError, match=r"in different orders \(sad, joyful; joyful, sad\)"):
        labels(["sad", "joyful"], ["joyful", "sad"])


@pytest.mark.parametrize(
    "names",
    [
        ("premise", "hypothesis"),
        ("sentence1", "sentence2"),
        ("question1", "question2"),
        ("question", "sentence"),
        ("query", "passage"),
        ("text", "text_pair"),
    ],
)
def test_two_texts_with_a_label_are_one_text_with_both(names):
    assert item(dict.fromkeys(["idx", "label"], 1) | dict(zip(names, "AB", strict=True))).text == Document("A\n\nB")


def test_of_more_than_two_texts_the_settings_say_which_are_meant():
    fields = {"question": "A", "context": "B", "answer": "C", "label": 1}
    with pytest.raises(UserError, match=r"more than two texts .*: NAME, sentence2: NAME}`"):
        item(fields)
    assert item(fields, sentence1="answer", sentence2="question").text == Document("C\n\nA")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"text": "A", "response": "B", "label": 1}, "`label` is of one"),
        ({"text": "A", "label": [0, 1]}, "a text has one label here"),
        ({"premise": "A", "hypothesis": " ", "label": 1}, "`hypothesis` is empty"),
        ({"review": "A", "sentiment": "good"}, "`fields: {text: review, label: sentiment}`"),
        ({"premise": "A", "hypothesis": "B", "gold_label": "x"}, "`fields: {label: gold_label}`"),
    ],
)
def test_what_has_no_one_text_and_label_is_refused_with_what_to_do(fields, said):
    with pytest.raises(UserError, match=said):
        item(fields)


def item(fields, **mapping):
    record, dataset = Record(fields, Origin("a.jsonl", 1)), Dataset(path="a.jsonl", fields=mapping)
    return convert(record, recognise([record], dataset, "labelled"), dataset)
