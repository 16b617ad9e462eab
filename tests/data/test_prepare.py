import json
import multiprocessing
import os
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tunesmith.config.schema import Run
from tunesmith.data import build as build_module
from tunesmith.data import prepare as prepare_module
from tunesmith.data.loader import Loader
from tunesmith.data.prepare import BadRecords, prepare, unique
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
        build_module, "build", lambda *a, build=build_module.build, **k: built.append(a) or build(*a, **k)
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
    monkeypatch.setattr(build_module, "PARALLEL_FROM", 10)
    monkeypatch.setattr(build_module, "CHUNK", 7)
    done = []
    pooled = prepare(run(), chatml, VOCABULARY, workers=2, progress=lambda what, now, total: done.append((what, now)))
    assert pooled.fingerprint == alone.fingerprint
    assert texts(pooled.train[0], chatml) == texts(alone.train[0], chatml)
    assert done[-1] == ("Tokenizing train", 60)


def test_a_bad_record_is_named_from_inside_the_pool(chatml, here, monkeypatch):
    monkeypatch.setattr(build_module, "PARALLEL_FROM", 10)
    write("train.jsonl", [*chats(40), {"messages": [{"role": "user", "content": 5}]}, *chats(20)])
    with pytest.raises(UserError, match=r"train.jsonl, line 41: .*bad_records: skip"):
        prepare(run(), chatml, VOCABULARY, workers=2)


PLANTED = {
    "not valid JSON": '{"conversations": [{"from": "human", "va',
    "not UTF-8": b'{"conversations": "\xe9\xe8"}',
    "not an object": "7",
    "missing field": '{"id": "3"}',
    "empty conversation": '{"conversations": []}',
    "no answer": {"conversations": [{"from": "human", "value": "Hi"}]},
    "empty answer": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": " "}]},
    "unknown role": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "narrator", "value": "x"}]},
    "wrong type": {"conversations": [{"from": "human", "value": True}, {"from": "gpt", "value": "x"}]},
    "NaN or Infinity": '{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": NaN}]}',
    "refused by the chat template": {
        "conversations": [{"from": who, "value": "Hi"} for who in ("gpt", "human", "gpt")]
    },
}


def plant(count):
    """Good ShareGPT records with one of each fault among every hundred."""
    good = json.dumps({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "two"}]})
    lines = [good] * count
    for n in range(count // 100):
        for place, fault in enumerate(PLANTED.values(), start=1):
            lines[100 * n + 7 * place] = fault if isinstance(fault, str | bytes) else json.dumps(fault)
    Path("train.jsonl").write_bytes(b"\n".join(x if isinstance(x, bytes) else x.encode() for x in lines) + b"\n")


def test_all_bad_records_are_named_in_one_pass_or_skipped_and_counted(gemma, monkeypatch):
    plant(2000)
    reads = []
    read = prepare_module.source.read
    monkeypatch.setattr(prepare_module.source, "read", lambda *given: reads.append(given) or read(*given))
    with pytest.raises(BadRecords) as caught:
        prepare(run(), gemma, VOCABULARY, workers=2)
    errors = caught.value
    assert len(reads) == 2  # one of them a look at the format
    assert len(errors.bad) == 20 * len(PLANTED)
    places = {(error.origin.line, error.kind) for error in errors.bad}
    assert places == {(100 * n + 7 * k + 1, kind) for n in range(20) for k, kind in enumerate(PLANTED, start=1)}
    assert errors.messages[0].startswith("220 of 2,000 records cannot be trained on (20 ")
    assert errors.messages[1].startswith("train.jsonl, line 8: not valid JSON at column")
    assert errors.messages[-2:] == [
        "... and 200 more.",
        "Mend them, or leave them out with `bad_records: skip`.",
    ]
    assert len(errors.messages) == 23
    for _ in range(2):  # made, and from the cache
        prepared = prepare(run(bad_records="skip"), gemma, VOCABULARY)
        assert len(prepared.bad) == 220
        report = prepared.train[0].report
        assert (report.records, report.bad, report.examples) == (2000, 220, 1780)
        (said,) = [line for line in prepared.warnings if "left out" in line]
        assert said.startswith("train: left out 220 of 2,000 records (20 ")
        assert all(kind in said for kind in PLANTED)
    with pytest.raises(BadRecords):
        prepare(run(), gemma, VOCABULARY)
    assert len(reads) == 2  # nothing was read again


def test_bad_records_of_all_data_sets_are_named_together(chatml):
    empty = {"messages": [{"role": "user", "content": "Hi"}]}
    write("train.jsonl", [*chats(9), empty])
    write("held_out.jsonl", [empty, *chats(9)])
    write("broken.jsonl", [empty])
    with pytest.raises(BadRecords) as caught:
        prepare(run(eval=["held_out.jsonl"]), chatml, VOCABULARY)
    assert [str(error.origin) for error in caught.value.bad] == ["train.jsonl, line 10", "held_out.jsonl, line 1"]
    with pytest.raises(BadRecords, match=r"broken.jsonl, line 1"):  # nothing would be left of it
        prepare(run(eval=["broken.jsonl"], bad_records="skip"), chatml, VOCABULARY)


def test_data_of_which_nothing_can_be_trained_on_is_not_read_to_its_end(chatml, monkeypatch):
    monkeypatch.setattr(prepare_module, "HOPELESS", 300)
    write("train.jsonl", [{"messages": [{"role": "user", "content": "Hi"}]}] * 2000)
    with pytest.raises(BadRecords) as caught:
        prepare(run(), chatml, VOCABULARY, workers=1)
    assert len(caught.value.bad) == 2 * build_module.CHUNK


def test_a_text_longer_than_a_sequence_is_split_and_a_chat_truncated_unless_said_otherwise(chatml):
    Path("book.txt").write_text("kind " * 700)
    (book,) = prepare(run(data=["book.txt"]), chatml, VOCABULARY).train
    whole = chatml("kind " * 700)["input_ids"]
    assert (book.report.truncated, book.report.split) == (0, 1)
    assert book.report.target_tokens == len(whole)  # with the end of the text, without the first token
    (book,) = prepare(run(data=["book.txt"], too_long="truncate"), chatml, VOCABULARY).train
    assert len(book) == 1
    write("train.jsonl", [chat("Hi", "kind " * 700)])
    (train,) = prepare(run(), chatml, VOCABULARY).train
    assert (train.report.truncated, train.report.split, len(train)) == (1, 0, 1)


def test_special_tokens_and_tools_that_became_plain_text_are_said_and_counted(chatml):
    tool = {"type": "function", "function": {"name": "add", "description": "Adds."}}
    write(
        "train.jsonl", [chat("Hi <|begin|>", "two"), {**chat("Hi <|begin|>", "two"), "tools": [tool]}, chat("a", "b")]
    )
    for _ in range(2):  # made, and from the cache
        warnings = prepare(run(), chatml, VOCABULARY).warnings
        assert any("the special token <|begin|>, which is encoded as plain text (2 records)" in one for one in warnings)
        assert any("has no place for tools: they are described in the system message" in one for one in warnings)
    asked = prepare(run(special_tokens=["<|begin|>"]), chatml, VOCABULARY)
    assert not any("encoded as plain text" in one for one in asked.warnings)
    write("train.jsonl", [chat("Hi", "two"), chat("Hi", "two<|im_end|>")])
    with pytest.raises(BadRecords, match=r"line 2: the answer \(message 2\) holds <\|im_end\|>"):
        prepare(run(), chatml, VOCABULARY)


@pytest.mark.slow
def test_a_line_of_fifty_megabytes_is_tokenized_in_bounded_memory(base, here):
    size = 50_000_000
    with open("train.jsonl", "w") as file:
        file.write(json.dumps({"text": "kind four two Hello everybody, this is a line.\n" * (size // 47)}) + "\n")

    def work(found):
        prepare(run(), base, VOCABULARY)
        found.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)

    context = multiprocessing.get_context("fork")
    found = context.Queue()
    process = context.Process(target=work, args=(found,))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    process.start()
    assert found.get(timeout=900) - before < 25 * size
    process.join()


@pytest.mark.parametrize("data", ["data", "data/**/*.jsonl", "."])
def test_an_output_among_the_data_is_refused(chatml, data):
    write("data/a.jsonl", chats(3))
    with pytest.raises(UserError, match=r"output: data/runs/one lies inside the data .*choose an output elsewhere"):
        prepare(run(data=[data], output="data/runs/one"), chatml, VOCABULARY)
    prepare(run(data=["data/a.jsonl"], output="data/runs/one"), chatml, VOCABULARY)
    prepare(run(data=["data/*.jsonl"], output="data/runs/one"), chatml, VOCABULARY)


def test_all_data_sets_that_cannot_be_read_are_named_before_any_is_tokenized(chatml, monkeypatch):
    write("train.jsonl", chats(3))
    write("odd.jsonl", [{"x": 1}])
    monkeypatch.setattr(build_module, "build", lambda *a, **k: pytest.fail("tokenized"))
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
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_whatever_the_records_they_are_prepared_or_refused_in_a_sentence(chatml, lines, train_on, too_long, length):
    write("train.jsonl", lines)
    wanted = run(train_on=train_on, too_long=too_long, sequence_length=length)
    try:
        (store,) = prepare(wanted, chatml, VOCABULARY).train
    except UserError as problem:
        messages = getattr(problem, "messages", [str(problem)])
        sentence = "\n" if any("\n" in message for message in messages) else " ".join(messages)
    else:
        sentence = ""
        loader = Loader([store], [1.0], seed=0, sequence_length=length, sequences_per_step=2)
        assert all(step.target_weight > 0 for step in loader.iterate())
    assert "\n" not in sentence
    assert "Traceback" not in sentence


def test_titles_are_made_unique():
    assert unique(["a", "b", "a", "a (2)", "a"]) == ["a", "b", "a (2)", "a (2) (2)", "a (3)"]
