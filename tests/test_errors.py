"""Sentences stay readable however much they have to list."""

from __future__ import annotations

import json

import pytest

from tunesmith.config.schema import Dataset
from tunesmith.data import source
from tunesmith.errors import UserError, first_line, listed


def test_long_lists_are_shortened_and_the_rest_counted():
    assert listed("abc") == "a, b, c"
    assert listed(range(9)) == "0, 1, 2, 3, 4, 5, 6, 7, 8"
    assert listed(range(1000)) == "0, 1, 2, 3, 4, 5, 6, 7 and 992 more"
    assert listed([], "; ") == ""


def test_a_name_that_is_a_page_long_is_cut_in_the_middle_and_sentences_are_not():
    (name,) = [listed(["model." + "layers." * 100 + "weight"])]
    assert len(name) == 103
    assert name.startswith("model.layers.")
    assert name.endswith("layers.weight")
    assert listed(["a sentence that is long " * 10]) == "a sentence that is long " * 10


def test_a_file_with_hundreds_of_lists_is_one_readable_sentence(tmp_path):
    file = tmp_path / "x.json"
    file.write_text(json.dumps({f"part-{n}": [{"text": "x"}] for n in range(500)}))
    with pytest.raises(UserError) as error:
        list(source.read(Dataset(path=str(file))))
    assert "part-7 and 492 more" in str(error.value)
    assert len(str(error.value)) < 400


def test_of_a_library_s_error_the_first_line_is_quoted_without_its_full_stop():
    assert first_line(ValueError("\n  it broke.\nand then more")) == "it broke"
    assert first_line(KeyError()) == "KeyError"
    assert first_line(ValueError("Validation error for heads:\n\n    It has 3 heads.\nMore")) == (
        "Validation error for heads: It has 3 heads"
    )
    assert first_line(ValueError("Nothing follows:")) == "Nothing follows"
