"""Settings files load, or fail with sentences that name the mistake, its place and the way out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tunesmith.config.load import from_mapping, load
from tunesmith.config.other_names import SENTENCES, SETTINGS
from tunesmith.config.schema import Run
from tunesmith.errors import UserError, UserErrors

GOOD = """\
model: some/model            # a comment
method: lora
lora:
  rank: 8
  targets: [q_proj, v_proj]
data:
  - path: a.jsonl
    weight: 2
  - hub: some/data
eval: held_out.jsonl
sequence_length: 4096
epochs: 2
learning_rate: 2e-4
output: runs/x
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str | bytes) -> Path:
        Path("run.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return Path("run.yaml")

    return write


@pytest.fixture
def fail(write):
    def fail(text: str | bytes, *overrides: str) -> list[str]:
        with pytest.raises(UserError) as caught:
            load(write(text), overrides)
        return getattr(caught.value, "messages", [str(caught.value)])

    return fail


def test_a_good_file_loads_with_the_origin_of_every_setting(write):
    loaded = load(write(GOOD), ["seed=7", "data.0.limit=5"])
    run = loaded.run
    assert run.model == "some/model"
    assert (run.lora.rank, run.lora.targets) == (8, ["q_proj", "v_proj"])
    assert [d.title for d in run.data] == ["a", "some/data"]
    assert [d.path for d in run.eval] == ["held_out.jsonl"]
    assert run.learning_rate == 2e-4
    assert run.data[0].limit == 5
    assert loaded.origin["model"] == "run.yaml, line 1"
    assert loaded.origin["lora.rank"] == "run.yaml, line 4"
    assert loaded.origin["lora.alpha"] == "default"
    assert loaded.origin["data.0.weight"] == "run.yaml, line 8"
    assert loaded.origin["data.0.limit"] == "command line"
    assert loaded.origin["data.1.weight"] == "default"
    assert loaded.origin["eval.0.path"] == "run.yaml, line 10"
    assert loaded.origin["seed"] == "command line"
    assert loaded.origin["batch_tokens"] == "default"


def test_all_mistakes_are_found_at_once_in_the_order_of_the_file(fail):
    messages = fail("model: m\ndata: a\nepochs: two\nlearning_rte: 1\n", "lora.rank=x")
    assert messages == [
        "`epochs` is 'two' but needs a number (run.yaml, line 3)",
        "`learning_rte`: did you mean `learning_rate`? (run.yaml, line 4)",
        "`lora.rank` is 'x' but needs a whole number (command line)",
    ]


REQUIRED = "model: m\ndata: a\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("learning-rate: 1", "`learning-rate`: did you mean `learning_rate`?"),
        ("Epochs: 1", "`Epochs`: did you mean `epochs`?"),
        ("lr: 1", "`lr`: did you mean `learning_rate`?"),
        ("max_seq_length: 1", "`max_seq_length`: did you mean `sequence_length`?"),
        ("rank: 8", "`rank`: did you mean `lora.rank`?"),
        ("lora_r: 8", "`lora_r`: did you mean `lora.rank`?"),
        ("weight: 8", "`weight`: did you mean `data.0.weight`?"),
        ("lora: {r: 8}", "`lora.r`: did you mean `lora.rank`?"),
        ("lora: {epochs: 8}", "`lora.epochs`: did you mean `epochs`, at the top level?"),
        ("lora: {rslora: true}", "`lora.rslora`: did you mean `lora.rank_stabilised`?"),
        ("eval: [{type: text}]", "`eval.0.type`: did you mean `eval.0.format`?"),
        ("rewards: [{kind: exact, type: exact}]", "`rewards.0.type`: did you mean `rewards.0.kind`?"),
        (
            "lora: {modules_to_save: [lm_head]}",
            "`lora.modules_to_save` is not a setting: adapters go on the embedding and the output head where "
            "`lora.targets` names them, `new_tokens` trains the rows of tokens that it adds, and `method: full` all "
            "weights",
        ),
        (
            "load_in_4bit: true",
            "`load_in_4bit` is not a setting: `method: qlora` holds the base in 4 bits, and with "
            "`lora: {bits: 8}` in 8",
        ),
        ("eval: [{pth: a}]", "`eval.0.pth`: did you mean `eval.0.path`?"),
        ("colour: red", "`colour` is not a setting; docs/settings.md and `tunesmith schema` list them all"),
        (
            "method: loraa",
            "`method` is 'loraa' but needs to be `full`, `lora`, `qlora`, `peft`, `relora` or `loqt`; did you mean "
            "`lora`?",
        ),
        ("method: 3", "`method` is 3 but needs to be `full`, `lora`, `qlora`, `peft`, `relora` or `loqt`"),
        ("model_: 3", "`model_`: did you mean `model`?"),
        ("epochs: [1]", "`epochs` is a list but needs a number"),
        ("epochs: 0", "`epochs` is 0 but needs to be more than 0"),
        ("epochs: .inf", "`epochs` is inf but needs a finite number"),
        ("weight_decay:", "`weight_decay` is empty but needs a number"),
        ("epochs: yes", "`epochs` is true: it needs a number, not yes or no"),
        ("seed: no", "`seed` is false: it needs a number, not yes or no"),
        ("seed: 1.5", "`seed` is 1.5 but needs a whole number"),
        ("keep: 0", "`keep` is 0 but needs to be at least 1"),
        ("deterministic: perhaps", "`deterministic` is 'perhaps' but needs true or false"),
        ("output: 2024", "`output` is 2024 but needs text; put it in quotes if it is a name"),
        ("output: ''", "`output` is '': it is blank"),
        ("lora: 8", "`lora` is 8 but needs a mapping (`key: value`)"),
        ("lora: {targets: [q, 3]}", "`lora.targets.1` is 3 but needs text; put it in quotes if it is a name"),
        ("lora: {targets: 3}", "`lora.targets` is 3 but needs to be `all-linear`"),
        ("lora: {targets: all_linear}", "`lora.targets` is 'all_linear': did you mean `all-linear`?"),
        ("lora: {targets: []}", "`lora.targets` is empty; it needs at least one item"),
        ("lora: {dropout: 1}", "`lora.dropout` is 1 but needs to be less than 1"),
        ("eval: 3", "`eval` is 3 but needs a list"),
        ("eval: [3]", "`eval.0` is 3 but needs a mapping (`key: value`)"),
        (
            "eval: [{path: a, hub: b}]",
            "`eval.0` needs exactly one of `path` (a file, folder or glob) and `hub` (a hub data set)",
        ),
        (
            "eval: [{path: a, fields: {x: 1}}]",
            "`eval.0.fields.x` is 1 but needs text; put it in quotes if it is a name",
        ),
        ("seed: !!python/object:os.system 1", "`seed` has the tag '!!python/object:os.system'"),
    ],
)
def test_a_mistake_is_one_sentence_with_its_line(fail, line, message):
    (said,) = fail(REQUIRED + line + "\n")
    if "tag" in message:
        assert said.startswith("`seed` has the tag")
    else:
        assert said == f"{message} (run.yaml, line 3)"


def test_what_other_tools_call_a_setting_points_to_one_that_there_is(fail):
    for theirs, names in SETTINGS.items():
        assert f"`{theirs}`: did you mean `{names[0]}`? (command line)" in fail(REQUIRED, f"{theirs}=1")
        for ours in names:
            assert not any("did you mean" in said or "not a setting" in said for said in fail("", f"{ours}=1"))
    for theirs in SENTENCES:
        (said,) = fail(REQUIRED, f"{theirs}=1")
        assert said.startswith(f"`{theirs}` is not a setting: ")


def test_missing_settings_are_named_with_what_they_are(fail):
    model, data = fail("epochs: 1\n")
    assert model == "`model` is missing: a folder, a .gguf file, or a name on the Hugging Face hub (run.yaml)"
    assert data.startswith("`data` is missing")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "run.yaml is empty"),
        ("# nothing\n", "run.yaml is empty"),
        ("- a\n- b\n", "holds a list but needs `key: value` lines"),
        ("just words\n", "holds a single value but needs"),
        (b"\x80\x81abc", "line 1 is not UTF-8 text"),
        ("model: caf\u00e9\n".encode("latin-1"), "line 1 is not UTF-8 text"),
        (b"\x7fELF\0\0\xff\xfe", "is a binary file"),
        (b"abc\0def", "is a binary file"),
        ("model: a\n\tdata: b\n", "run.yaml, line 2: indented with a tab"),
        ("model: a: b\n", "run.yaml, line 1: a second `: ` in one value"),
        ("model: a\ndata\nepochs: 1\n", "run.yaml, line 2: not `key: value`"),
        ("epochs: 1\nmodel: [a\nepochs: 1\n", "run.yaml, line 2: a bracket is opened but not closed"),
        ("model: 'a\nepochs: 1\n", "run.yaml, line 1: a quote is opened but never closed"),
        ("model: *.jsonl\n", "a value that begins with * or & needs quotes"),
        ('model: "C:\\data"\n', "a backslash in double quotes; use single quotes"),
        ("model: a\n---\nmodel: b\n", "a second document begins"),
        ("model: a\nmodel: b\ndata: c\n", "`model` is given twice (run.yaml, lines 1 and 2)"),
        (
            "model: a\ndata: c\nlora:\n  rank: 1\n  rank: 2\n",
            "`lora.rank` is given twice (run.yaml, lines 4 and 5)",
        ),
        ("? [a, b]\n: c\n", "a key is a list or mapping"),
        ("a: &a [*a]\n", "contains itself"),
        ("a: &a\n  <<: *a\n", "into itself"),
        ("[" * 5000, "nested too deeply"),
        ("model: \x07\n", "is not allowed"),
        (b"x" * (2 << 20), "larger than 1 MiB"),
        ("model: " + "9" * 5000 + "\ndata: a\n", "`model` is a number of more than 400 digits"),
    ],
    ids=range(25),
)
def test_a_file_that_is_not_settings_is_told_so(fail, content, words):
    messages = fail(content)
    assert any(words in message for message in messages), messages
    assert all("\n" not in message and len(message) < 400 for message in messages)


def test_a_yaml_bomb_is_refused_quickly(fail):
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    assert "more than 20,000 values" in fail("\n".join(levels))[0]


def test_nesting_is_bounded_through_aliases_too(fail):
    levels = ["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {{x: *a{n - 1}}}" for n in range(1, 100))]
    assert fail("\n".join(levels)) == ["run.yaml is nested too deeply to be settings"]


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.yaml does not exist; `tunesmith init .*nowhere.yaml` writes one"):
        load(tmp_path / "nowhere.yaml")
    with pytest.raises(UserError, match="is a folder"):
        load(tmp_path)
    with pytest.raises(UserError, match="cannot be read"):
        load(Path("a\0b"))
    (tmp_path / "a.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="is a data file"):
        load(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match="cannot be read: File name too long"):
        load(tmp_path / ("x" * 300))


def test_settings_on_the_command_line_need_no_file_and_take_run_yaml_where_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = load("model=/models/tiny", ["data=a.jsonl", "lora.rank=4"])
    assert (loaded.run.model, loaded.run.data[0].path, loaded.run.lora.rank) == ("/models/tiny", "a.jsonl", 4)
    assert loaded.origin["model"] == "command line"
    with pytest.raises(UserError, match=r"`data` is missing: .* \(command line\)"):
        load("model=/models/tiny")
    with pytest.raises(UserError, match="does not exist"):
        load("run.yaml", ["epochs=3"])
    (tmp_path / "run.yaml").write_text(GOOD)
    loaded = load("epochs=3")
    assert (loaded.run.model, loaded.run.epochs) == ("some/model", 3)
    assert loaded.origin["model"] == "run.yaml, line 1"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file(write):
    path = write(GOOD)
    path.chmod(0)
    with pytest.raises(UserError, match="cannot be read: Permission denied"):
        load(path)


def test_windows_encodings_and_anchors_are_fine(write):
    assert load(write(GOOD.replace("\n", "\r\n").encode("utf-8-sig"))).run.model == "some/model"
    assert load(write(GOOD.encode("utf-16"))).run.model == "some/model"
    text = "model: m\ndata:\n  - &base {path: a, weight: 3}\n  - <<: *base\n    path: b\neval: [*base]\n"
    loaded = load(write(text))
    assert [(d.path, d.weight) for d in loaded.run.data] == [("a", 3), ("b", 3)]
    assert loaded.origin["data.1.path"] == "run.yaml, line 5"
    assert loaded.origin["data.1.weight"] == "run.yaml, line 3"


@pytest.mark.parametrize(
    ("written", "value"),
    [("2e-4", 2e-4), ("1_000", 1000.0), (".5", 0.5), ("+1e+1", 10.0), ("'3'", 3.0), ("010", 10)],
)
def test_numbers_are_read_as_people_write_them(write, written, value):
    assert load(write(REQUIRED + f"learning_rate: {written}\n")).run.learning_rate == value


def test_dates_and_times_stay_text(write):
    run = load(write("model: 2024-01-01\ndata: 12:30:45\noutput: 1.2.3\n")).run
    assert (run.model, run.data[0].path, run.output) == ("2024-01-01", "12:30:45", "1.2.3")


@pytest.mark.parametrize("override", ["data=hub:org/name", "data=[hub:org/name]", 'data=["hub:org/name"]'])
def test_data_on_the_hub_is_named_as_init_takes_it(write, override):
    (dataset,) = load(write(GOOD), [override]).run.data
    assert (dataset.hub, dataset.path) == ("org/name", None)
    (dataset,) = load(write("model: m\ndata: hub:org/name\n")).run.data
    assert dataset.hub == "org/name"


@pytest.mark.parametrize(
    ("override", "get", "value"),
    [
        ("lora.rank=4", lambda r: r.lora.rank, 4),
        ("lora.alpha=", lambda r: r.lora.alpha, None),
        ("lora={rank: 3}", lambda r: r.lora.rank, 3),
        ("lora.targets=q_proj,k_proj", lambda r: r.lora.targets, ["q_proj", "k_proj"]),
        ("lora.targets=all-linear", lambda r: r.lora.targets, "all-linear"),
        ("lora.layers=top 8", lambda r: r.lora.layers, "top 8"),
        ("data.0.weight=0.5", lambda r: r.data[0].weight, 0.5),
        ("data=*.jsonl", lambda r: [d.path for d in r.data], ["*.jsonl"]),
        ("data=[a, {hub: b}]", lambda r: [d.title for d in r.data], ["a", "b"]),
        ("eval=[]", lambda r: r.eval, []),
        ("eval.0.limit=3", lambda r: r.eval[0].limit, 3),
        ("max_grad_norm=null", lambda r: r.max_grad_norm, None),
        ("model=a=b: c", lambda r: r.model, "a=b: c"),
        ("output='0'", lambda r: r.output, "0"),
        ("batch_tokens=1e5", lambda r: r.batch_tokens, 100000),
    ],
)
def test_overrides_win(write, override, get, value):
    assert get(load(write(GOOD), [override]).run) == value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("foo", "'foo' is not an override; write key=value (command line)"),
        ("=3", "'=3' is not an override; write key=value (command line)"),
        ("data.5.weight=3", "`data.5.weight` cannot be set: `data` has 2 items, counted from 0 (command line)"),
        (
            "data.weight=3",
            "`data.weight` cannot be set: `data` is a list; say which item, counted from 0 (command line)",
        ),
        ("model.x=3", "`model.x` cannot be set: `model` is 'some/model' (command line)"),
        ("lora.rnk=3", "`lora.rnk`: did you mean `lora.rank`? (command line)"),
        ("lora={rank: 1, rank: 2}", "`lora.rank` is given twice (command line)"),
    ],
)
def test_a_wrong_override_is_told_so(fail, override, message):
    assert fail(GOOD, override) == [message]


def test_an_override_with_broken_brackets_is_one_sentence(fail):
    (message,) = fail(GOOD, "eval=[a")
    assert message.startswith("`eval=[a`: a bracket is opened but not closed")
    assert message.endswith("(command line)")


def test_mappings_go_round(write):
    run = load(write(GOOD)).run
    mapping = json.loads(run.model_dump_json())
    assert from_mapping(mapping) == run
    with pytest.raises(UserErrors) as caught:
        from_mapping({"model": "m", "data": "a", "rankk": 3, "epochs": -1})
    assert caught.value.messages == [
        "`epochs` is -1 but needs to be more than 0",
        "`rankk`: did you mean `lora.rank`?",
    ]


def test_loading_never_changes_what_it_was_given():
    mapping = {"model": "m", "data": "a", "eval": {"path": "b"}}
    from_mapping(mapping)
    assert mapping == {"model": "m", "data": "a", "eval": {"path": "b"}}


def test_loading_imports_no_torch(write):
    write(GOOD)
    code = "import sys, tunesmith.config.load as l; l.load('run.yaml'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- Whatever is written, the user sees a run or sentences ------------------------------------------------

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from([10**400, "all-linear", "1e5"]),
)
names = st.sampled_from([*Run.model_fields, "rank", "path", "hub", "targets", "weight", "fields", "0", "x", ""])
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names | st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def sentences_or_run(call) -> None:
    try:
        run = call()
    except UserError as problem:
        messages = getattr(problem, "messages", [str(problem)])
        assert messages
        for message in messages:
            assert message.strip()
            assert len(message.splitlines()) == 1
            message.encode()
    else:
        run = getattr(run, "run", run)
        assert from_mapping(json.loads(run.model_dump_json())) == run


@settings(max_examples=100, deadline=None)
@given(changes=st.dictionaries(names, values, max_size=4))
@example(changes={"epochs": 10**400})
@example(changes={"data": [{"path": "\ud800"}]})
def test_any_mapping_loads_or_is_explained(changes):
    good = {"model": "m", "data": [{"path": "a"}], "lora": {"rank": 4}}
    sentences_or_run(lambda: from_mapping(good | changes))


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(changes=st.dictionaries(names, values, max_size=3), overrides=st.lists(st.text(max_size=12), max_size=2))
@example(changes={"sweep": {"\r": None}}, overrides=[])
def test_any_yaml_loads_or_is_explained(write, changes, overrides):
    path = write(yaml.safe_dump(yaml.safe_load(GOOD) | changes, allow_unicode=False))
    sentences_or_run(lambda: load(path, overrides))


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_any_damage_to_the_file_loads_or_is_explained(write, data):
    content = bytearray(GOOD.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content)))
        stop = data.draw(st.integers(start, min(len(content), start + 12)))
        piece = st.binary(max_size=4) | st.text(alphabet="\t\n \"'#:-?[]{},&*!|>%@`<~\\0eux\ud7ff", max_size=5).map(
            str.encode
        )
        content[start:stop] = data.draw(piece)
    path = write(bytes(content))
    sentences_or_run(lambda: load(path))


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    key=st.lists(names | st.integers(0, 3).map(str), min_size=1, max_size=4).map(".".join),
    value=st.text(max_size=10) | values.map(lambda v: yaml.safe_dump(v, default_flow_style=True)),
)
def test_any_override_loads_or_is_explained(write, key, value):
    path = write(GOOD)
    sentences_or_run(lambda: load(path, [f"{key}={value}"]))
