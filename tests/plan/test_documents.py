"""What data files tell before they are tokenized."""

from __future__ import annotations

import pytest

from tunesmith.config.schema import Dataset
from tunesmith.plan import documents
from tunesmith.plan.hardware import named
from tunesmith.plan.search import search

from .shapes import MODEL, run, why


def with_data(*paths, **settings):
    return run(**settings).model_copy(update={"data": [Dataset(path=str(path)) for path in paths]})


def test_tokens_are_known_from_steps_or_guessed_from_files(tmp_path):
    assert documents.total_tokens(run(steps=10)) == (163840, "10 steps")
    file = tmp_path / "d.jsonl"
    file.write_text("x" * 9000)
    assert documents.total_tokens(with_data(file, epochs=2)) == (4000, "the size of the files, roughly")
    assert documents.total_tokens(run()) is None


def test_lengths_come_from_the_lines_of_a_folder_and_of_no_other_files(tmp_path):
    (tmp_path / "a.jsonl").write_text("x" * 449 + "\n" + "y" * 899 + "\n\n")
    (tmp_path / "README.md").write_text("z" * 10_000)
    assert documents.sample_lengths(with_data(tmp_path)) == (100, 200)
    text = tmp_path / "t.txt"
    text.write_text("a long text")
    assert documents.sample_lengths(with_data(tmp_path, text)) == ()
    assert documents.sample_lengths(run()) == ()


def test_a_large_file_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "SAMPLE", 4500)
    (tmp_path / "a.jsonl").write_text(("x" * 449 + "\n") * 100)
    assert len(documents.sample_lengths(with_data(tmp_path / "a.jsonl"))) == 10


@pytest.mark.parametrize(
    ("lengths", "mean"), [((), 1000), ((100, 100), 100), ((100, 300), 250), ((5000,), 1000), ((1000, 1, 1), 998)]
)
def test_the_mean_is_over_tokens_and_within_sequences(lengths, mean):
    assert documents.mean_length(lengths, 1000) == mean


def test_short_documents_make_a_plan_quicker_and_are_a_reason():
    wanted = run(sequence_length=16384, batch_tokens=65536)
    long = search(wanted, MODEL["Llama-3.1-8B"], named("H200")).plan
    short = search(wanted, MODEL["Llama-3.1-8B"], named("H200"), lengths=(300, 500)).plan
    assert short.tokens_per_second > 1.2 * long.tokens_per_second
    assert short.memory == long.memory
    assert why(short, "documents").startswith("about 425 tokens")
