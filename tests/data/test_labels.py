"""Labels that the settings do not give are read from the data, or refused in a sentence."""

from __future__ import annotations

import json

import pytest

from tunesmith.config.load import from_mapping
from tunesmith.data.labels import with_labels
from tunesmith.data.prepare import prepare
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
        ([True, False], ["0", "1"]),
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
        (["same", "same"], "have same for a label, and classes are two or more"),
        ([0.25, 0.5, 1.0], "line 1: .*0.25; scores are for `objective: reward`"),
        ([1, 2, 3], "are the numbers 1, 2, 3, not all from 0"),
        (["a", 1], r"are names and numbers \(1, a\)"),
        (["a", " "], "A label in the data is empty"),
        ([f"answer {n}" for n in range(30)], "30 labels have 30 different values .*too many to be classes"),
        ([f"{n}" for _ in range(3) for n in range(1001)], "3,003 labels have 1,001 different values"),
    ],
)
def test_what_is_no_class_is_refused_in_a_sentence(tmp_path, labels, said):
    with pytest.raises(UserError, match=said) as caught:
        labelled(tmp_path, labels)
    assert "\n" not in str(caught.value)
