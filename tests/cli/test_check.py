"""`check` shows exactly what the trainer is fed."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from tunesmith.cli import check
from tunesmith.config.schema import Run
from tunesmith.data.loader import Loader, evaluation_batches
from tunesmith.data.prepare import prepare
from tunesmith.errors import UserError

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
RECORDS = [
    {"messages": [{"role": "user", "content": "Hi [you]"}, {"role": "assistant", "content": "Grüße, 世界 🙂!"}]},
    {"messages": [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "Three."}]},
    {"messages": [{"role": "user", "content": "More"}, {"role": "assistant", "content": "No " * 100}]},
]


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: n for n, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def run_yaml(tmp_path, monkeypatch, tokenizer):
    from transformers import LlamaConfig

    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    LlamaConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
    ).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    for name, records in (("train", RECORDS), ("held_out", RECORDS[:1])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: model\ndata: train.jsonl\neval: held_out.jsonl\nsequence_length: 128\nbatch_tokens: 256\nepochs: 1\n"
    )
    return path


@pytest.fixture
def tunesmith():
    app = typer.Typer()
    app.command()(check.command)

    def run(*arguments, **options):
        return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)

    return run


def test_the_view_equals_what_the_loader_feeds(run_yaml, tokenizer):
    given = {"sequence_length": 128, "batch_tokens": 256, "epochs": 1}
    run = Run(model="model", data=["train.jsonl"], eval=["held_out.jsonl"], **given)
    report = check.examine(run, tokenizer, examples=99)
    prepared = prepare(run, tokenizer, 300)
    loader = Loader(
        prepared.train, prepared.weights, seed=0, sequence_length=128, sequences_per_step=report["sequences_per_step"]
    )
    assert loader.total_steps == report["steps"]
    fed = [batch for s in range(loader.total_steps) for batch in loader.step(s).micro_batches]
    assert_same(report["datasets"][0]["shown"], fed)
    held_out = list(evaluation_batches(prepared.evals[0], sequence_length=128, micro_batch=4))
    assert_same(report["datasets"][1]["shown"], held_out)


def assert_same(shown, batches):
    """Read the batches the hard way, prediction by prediction, and compare with what is shown."""
    fed = {}
    for batch in batches:
        for d, origin in enumerate(batch.origins):
            start, end = int(batch.boundaries[d]), int(batch.boundaries[d + 1])
            predicted = {}
            for i in range(start, end):
                if batch.weights[i] > 0:
                    predicted[i + 1 - start] = (int(batch.labels[i]), float(batch.weights[i]))
            fed[origin] = (batch.tokens[start:end].tolist(), predicted)
    assert {one["origin"] for one in shown} == set(fed)
    for one in shown:
        ids, predicted = fed[one["origin"]]
        assert one["ids"] == ids
        targets = {i: (ids[i], weight) for i, weight in enumerate(one["weights"]) if weight}
        assert targets == predicted


def test_the_texts_of_the_tokens_are_the_text(run_yaml, tokenizer):
    run = Run(model="model", data=["train.jsonl"], sequence_length=128, batch_tokens=256)
    first = check.examine(run, tokenizer)["datasets"][0]["shown"][0]
    whole = "<|im_start|>user\nHi [you]<|im_end|>\n<|im_start|>assistant\nGrüße, 世界 🙂!<|im_end|>"
    assert "".join(first["texts"]) == whole
    assert len(first["texts"]) == len(first["ids"])
    assert "".join(t for t, w in zip(first["texts"], first["weights"], strict=True) if w) == "Grüße, 世界 🙂!<|im_end|>"
    assert first["texts"][:3] == ["<|im_start|>", "u", "s"]


def test_bytes_that_are_no_text_are_shown_all_the_same(tokenizer):
    ids = tokenizer.encode("ab", add_special_tokens=False)
    odd = [tokenizer.convert_tokens_to_ids(token) for token in ("ð", "Ł")]  # the first half of an emoji
    texts = check.token_texts(tokenizer, [*ids, *odd, *ids, *odd])
    assert len(texts) == 8
    assert "".join(texts).replace("\ufffd", "") == "abab"


def test_the_report_is_printed_with_targets_in_brackets_where_there_is_no_colour(run_yaml, tunesmith):
    result = tunesmith(run_yaml)
    assert result.exit_code == 0, result.output
    for part in (
        "train",
        "held_out",
        "messages",
        "Hi [you]",
        "assistant\n[Grüße, 世界 🙂!<|im_end|>]",
        "steps: 1, epochs: 1.",
    ):
        assert part in result.output
    assert "warning: train: 1 examples (of 3 records) were truncated" in result.output
    assert "are also in train (training)" in result.output


def test_json_is_one_document_for_programs(run_yaml, tunesmith):
    result = tunesmith(run_yaml, "--json", "--examples", 1, "train_on=all")
    report = json.loads(result.stdout)
    train, held_out = report["datasets"]
    assert (train["title"], train["use"], train["records"], train["truncated"]) == ("train", "train", 3, 1)
    assert (held_out["use"], held_out["weight"], len(held_out["shown"])) == ("eval", None, 1)
    assert 0.9 < train["target_share"] < 1
    assert sum(weight > 0 for weight in train["shown"][0]["weights"]) == len(train["shown"][0]["ids"]) - 1
    assert train["sequences"] == 2
    assert report["warnings"]


def test_one_data_set_and_one_token_a_line(run_yaml, tunesmith):
    result = tunesmith(run_yaml, "--dataset", "held_out", "--tokens", "--examples", 1)
    assert "train.jsonl" not in result.stdout
    assert "held_out.jsonl, line 1" in result.stdout
    assert "'<|im_start|>'" in result.stdout
    problem = tunesmith(run_yaml, "--dataset", "other").exception
    assert isinstance(problem, UserError)
    assert str(problem) == "--dataset: there is no data set other; there are train, held_out."


def test_targets_are_in_colour_and_the_middle_of_long_examples_is_left_out():
    texts, weights = ["a", "b", "c", "d"], [0, 1, 1, 0.5]
    assert check.marked(texts, weights, has_colour=False).plain == "a[bcd]"
    coloured = check.marked(texts, weights, has_colour=True)
    assert coloured.plain == "abcd"
    assert ["green" in str(span.style) for span in coloured.spans] == [False, True, True, False]
    long = check.marked(["x"] * 3000, [0] * 1000 + [1] * 2000, has_colour=False).plain
    assert long.count("x") == check.SHOWN_TOKENS
    assert "2,000 tokens not shown" in long
    assert check.marked(["\x1b[31m"], [0], has_colour=True).plain == "␛[31m"


def test_fields_that_nothing_is_made_of_are_named(run_yaml, tunesmith, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"prompt": "Hi", "completion": "Hello", "thinking": "Hm"}\n')
    assert "train: not read of its records: thinking." in tunesmith(run_yaml).stdout


def test_a_run_for_a_gpu_can_be_checked_without_one(run_yaml, tunesmith):
    assert tunesmith(run_yaml, "device=cuda", "--examples", 0).exit_code == 0


def test_bad_records_are_all_listed_and_end_the_check_unless_they_are_skipped(run_yaml, tunesmith, tmp_path):
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('{"messages": []}\n{"messages": \n')
    shown = tunesmith(run_yaml, "--examples=0")
    assert shown.exit_code == 1
    assert "Bad records" in shown.output
    assert "train.jsonl, line 4  empty conversation  `messages` is empty" in shown.output
    assert "train.jsonl, line 5  not valid JSON" in shown.output
    assert "2 bad" in shown.output
    assert tunesmith(run_yaml, "bad_records=skip", "--examples=0").exit_code == 0
