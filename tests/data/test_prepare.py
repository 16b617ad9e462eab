import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tunesmith.config.schema import Run
from tunesmith.data import prepare as prepare_module
from tunesmith.data import store as store_module
from tunesmith.data.loader import Loader
from tunesmith.data.prepare import prepare, unique
from tunesmith.errors import UserError, UserErrors

VOCABULARY = 1000


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name, records):
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def chat(*texts):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}


def chats(count, word="Hello"):
    return [chat(f"Hi {n}", f"{word} {n}") for n in range(count)]


def run(**settings):
    return Run(**{"model": "m", "data": ["train.jsonl"], "sequence_length": 128} | settings)


def texts(store, tokenizer, targets_only=False):
    found = []
    for i in range(len(store)):
        ids, weights, _ = store.example(i)
        found.append(tokenizer.decode(ids[weights > 0] if targets_only else ids))
    return found


def test_records_become_examples_with_their_targets(chatml):
    write("train.jsonl", chats(3))
    write("held_out.jsonl", [{"prompt": "Hi", "completion": "Bye"}])
    prepared = prepare(run(eval=["held_out.jsonl"]), chatml, VOCABULARY)
    (train,), (held_out,) = prepared.train, prepared.evals
    assert (train.title, train.report.format, held_out.report.format) == ("train", "messages", "prompt_completion")
    assert texts(train, chatml)[1] == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi 1<|im_end|>\n"
        "<|im_start|>assistant\nHello 1<|im_end|>"
    )
    assert texts(train, chatml, targets_only=True) == [f"Hello {n}<|im_end|>" for n in range(3)]
    assert texts(held_out, chatml, targets_only=True) == ["Bye<|im_end|>"]
    assert train.example(2)[2] == "train.jsonl, line 3"
    assert prepared.weights == (1.0,)


def test_the_second_time_nothing_is_tokenized(chatml, monkeypatch):
    write("train.jsonl", chats(5))
    first = prepare(run(), chatml, VOCABULARY)
    monkeypatch.setattr(prepare_module.source, "read", lambda dataset: pytest.fail("read again"))
    second = prepare(run(), chatml, VOCABULARY)
    assert second.fingerprint == first.fingerprint
    assert texts(second.train[0], chatml) == texts(first.train[0], chatml)
    shorter = prepare(run(sequence_length=16, too_long="split"), chatml, VOCABULARY)
    assert shorter.train[0].lengths.max() <= 16
    assert shorter.fingerprint != first.fingerprint


def test_a_data_set_used_twice_is_tokenized_once(chatml, monkeypatch):
    write("train.jsonl", chats(5))
    built = []
    monkeypatch.setattr(
        prepare_module.store, "build", lambda *a, build=store_module.build, **k: built.append(a) or build(*a, **k)
    )
    prepared = prepare(run(data=["train.jsonl", "train.jsonl"]), chatml, VOCABULARY)
    assert len(built) == 1
    assert [store.title for store in prepared.train] == ["train", "train (2)"]


@pytest.mark.parametrize(
    "change",
    [
        {"train_on": "all"},
        {"data": [{"path": "train.jsonl", "limit": 3}]},
        {"data": [{"path": "train.jsonl", "weight": 2}]},
        {"data": [{"path": "other.jsonl"}]},
        {"sequence_length": 16, "too_long": "split"},
    ],
)
def test_what_changes_the_data_changes_the_fingerprint(chatml, change):
    write("train.jsonl", chats(5))
    write("other.jsonl", chats(5, "Bye"))
    assert prepare(run(**change), chatml, VOCABULARY).fingerprint != prepare(run(), chatml, VOCABULARY).fingerprint


def test_what_does_not_change_the_data_does_not_change_the_fingerprint(chatml, monkeypatch):
    write("train.jsonl", chats(5))
    write("moved/elsewhere.jsonl", chats(5))
    write("held_out.jsonl", chats(5, "Bye"))
    before = prepare(run(), chatml, VOCABULARY)
    changed = run(data=["moved/elsewhere.jsonl"], eval=["held_out.jsonl"], seed=7, sequence_length=512, learning_rate=1)
    after = prepare(changed, chatml, VOCABULARY)
    assert after.fingerprint == before.fingerprint
    assert after.train[0].example(0)[2] == "moved/elsewhere.jsonl, line 1"
    monkeypatch.setattr(prepare_module, "_code", lambda: "another version")
    assert prepare(run(), chatml, VOCABULARY).fingerprint == before.fingerprint


def test_edited_data_is_tokenized_again(chatml):
    write("train.jsonl", chats(5))
    prepare(run(), chatml, VOCABULARY)
    write("train.jsonl", chats(5, "Bye"))
    prepared = prepare(run(), chatml, VOCABULARY)
    assert texts(prepared.train[0], chatml, targets_only=True)[0] == "Bye 0<|im_end|>"


def test_a_damaged_cache_is_made_again(chatml, here):
    write("train.jsonl", chats(5))
    prepare(run(), chatml, VOCABULARY)
    (folder,) = (here / "cache" / "tokens").iterdir()
    os.truncate(folder / "tokens.bin", 10)
    prepared = prepare(run(), chatml, VOCABULARY)
    assert texts(prepared.train[0], chatml, targets_only=True)[4] == "Hello 4<|im_end|>"


def test_a_pool_of_processes_gives_the_same_data(chatml, here, monkeypatch):
    write("train.jsonl", chats(60))
    alone = prepare(run(), chatml, VOCABULARY, workers=1)
    shutil.rmtree(here / "cache")
    monkeypatch.setattr(store_module, "PARALLEL_FROM", 10)
    monkeypatch.setattr(store_module, "CHUNK", 7)
    done = []
    pooled = prepare(run(), chatml, VOCABULARY, workers=2, progress=lambda what, now, total: done.append((what, now)))
    assert pooled.fingerprint == alone.fingerprint
    assert texts(pooled.train[0], chatml) == texts(alone.train[0], chatml)
    assert done[-1] == ("Tokenizing train", 60)


def test_a_bad_record_is_named_from_inside_the_pool(chatml, here, monkeypatch):
    monkeypatch.setattr(store_module, "PARALLEL_FROM", 10)
    write("train.jsonl", [*chats(40), {"messages": [{"role": "user", "content": 5}]}, *chats(20)])
    with pytest.raises(UserError, match=r"train.jsonl, line 41"):
        prepare(run(), chatml, VOCABULARY, workers=2)
    assert list((here / "cache" / "tokens").iterdir()) == []


def test_all_data_sets_that_cannot_be_read_are_named_before_any_is_tokenized(chatml, monkeypatch):
    write("train.jsonl", chats(3))
    write("odd.jsonl", [{"x": 1}])
    monkeypatch.setattr(prepare_module.store, "build", lambda *a, **k: pytest.fail("tokenized"))
    with pytest.raises(UserErrors) as problem:
        prepare(run(data=["train.jsonl", "missing.jsonl"], eval=["odd.jsonl"]), chatml, VOCABULARY)
    assert len(problem.value.messages) == 2
    assert "missing.jsonl" in problem.value.messages[0]
    assert "odd.jsonl" in problem.value.messages[1]


def test_a_sequence_length_beyond_the_model_is_refused(chatml):
    write("train.jsonl", chats(3))
    with pytest.raises(UserError, match="sequence_length 8192 is beyond the model's 2048 positions"):
        prepare(run(sequence_length=8192), chatml, VOCABULARY, max_length=2048)


def test_targets_cut_off_by_the_length_are_refused(chatml):
    write("train.jsonl", chats(3))
    with pytest.raises(UserError, match=r"train: no example is left.*too_long: split"):
        prepare(run(sequence_length=8), chatml, VOCABULARY)


def test_what_is_lost_and_what_overlaps_is_said(chatml):
    write("train.jsonl", [*chats(3), chat("Hi", "Hello " * 140), chat("Hi " * 60, "Hello")])
    write("held_out.jsonl", chats(2))
    warnings = "\n".join(prepare(run(eval=["held_out.jsonl"]), chatml, VOCABULARY).warnings)
    assert "train: 1 examples (of 5 records) were truncated" in warnings
    assert "train: dropped for having no target left within sequence_length: 1" in warnings
    assert "2 of the 2 examples of held_out" in warnings


def test_warnings_about_records_survive_the_cache(chatml):
    write("train.jsonl", [*chats(3), chat("Hi {{name}}", "Hello")])
    warnings = prepare(run(), chatml, VOCABULARY).warnings
    assert any("{{name}}" in warning for warning in warnings)
    assert prepare(run(), chatml, VOCABULARY).warnings == warnings


def test_each_turn_of_a_reasoning_model_is_an_example(reasoning):
    answers = [f"<think>\nfour {n}\n</think>\n\nHello {n}" for n in range(2)]
    write("train.jsonl", [chat("Hi", answers[0], "Bye", answers[1])])
    store = prepare(run(), reasoning, VOCABULARY).train[0]
    assert (store.report.records, store.report.examples) == (1, 2)
    together = " ".join(texts(store, reasoning, targets_only=True))
    assert all(f"four {n}" in together for n in range(2))


def test_prepared_data_feeds_the_loader(chatml):
    write("train.jsonl", chats(20))
    write("more.jsonl", chats(9, "Bye"))
    data = run(data=["train.jsonl", {"path": "more.jsonl", "weight": 2}])
    prepared = prepare(data, chatml, VOCABULARY)
    loader = Loader(prepared.train, prepared.weights, seed=0, sequence_length=128, sequences_per_step=4)
    steps = list(loader.iterate())
    assert sum(len(batch.origins) for step in steps for batch in step.micro_batches) == 20 + 2 * 9
    spoken = np.concatenate([batch.tokens.numpy() for step in steps for batch in step.micro_batches])
    assert chatml.decode(spoken).count("Bye") == 18


texts_people_write = st.sampled_from(
    ["", " ", "Hi", "Hello four", "{{x}}", "<|im_end|>", "\u2028", "🙂", "a\x00b", "\n"]
)
values = st.one_of(st.none(), st.booleans(), st.integers(-3, 400), st.floats(), texts_people_write)
messages = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "from", "content", "value", "weight", "tool_calls"]),
        st.one_of(st.sampled_from(["user", "assistant", "system", "tool", "human", "gpt"]), values),
    ),
    max_size=4,
)
record_values = st.one_of(values, messages, st.lists(st.integers(-101, 400), max_size=6))
names = st.sampled_from(
    ["messages", "conversations", "prompt", "completion", "instruction", "output", "text", "input_ids", "labels"]
)
said = st.text("Hi four\n{}<|>🙂é", min_size=1, max_size=60).filter(str.strip)
files = st.one_of(
    st.lists(st.dictionaries(names, record_values, max_size=4), min_size=1, max_size=4),
    st.lists(st.builds(chat, texts_people_write, said, said, said), min_size=1, max_size=6),
    st.lists(st.fixed_dictionaries({"text": said}), min_size=1, max_size=6),
    st.lists(st.fixed_dictionaries({"prompt": texts_people_write, "completion": said}), min_size=1, max_size=6),
    st.lists(
        st.lists(st.integers(0, 300), max_size=90).map(lambda ids: {"input_ids": ids, "labels": ids}),
        min_size=1,
        max_size=6,
    ),
)


@given(
    files,
    st.sampled_from(["assistant", "last", "all"]),
    st.sampled_from(["truncate", "split", "drop"]),
    st.integers(8, 60),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_the_records_they_are_prepared_or_refused_in_a_sentence(chatml, lines, train_on, too_long, length):
    write("train.jsonl", lines)
    wanted = run(train_on=train_on, too_long=too_long, sequence_length=length)
    try:
        (store,) = prepare(wanted, chatml, VOCABULARY).train
    except UserError as problem:
        sentence = str(problem)
    else:
        sentence = ""
        loader = Loader([store], [1.0], seed=0, sequence_length=length, sequences_per_step=2)
        assert all(step.target_weight > 0 for step in loader.iterate())
    assert "\n" not in sentence
    assert "Traceback" not in sentence


def test_titles_are_made_unique():
    assert unique(["a", "b", "a", "a (2)", "a"]) == ["a", "b", "a (2)", "a (2) (2)", "a (3)"]
