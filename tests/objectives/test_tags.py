"""Words with labels: loss and gradients are those of transformers' own class, what is saved loads there with the same
answers, figures are those of a plain count, and a killed run goes on to the same bytes."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

from ranks import assert_two_give_the_losses_of_one
from tiny import Die, Runs, assert_resumes, write_all
from tunesmith.cli.check import examine
from tunesmith.cli.main import main
from tunesmith.config.load import from_mapping
from tunesmith.config.schema import Dataset
from tunesmith.data.convert import convert
from tunesmith.data.loader import Loader
from tunesmith.data.recognise import recognise
from tunesmith.data.types import Origin, Record, RecordError
from tunesmith.errors import UserError
from tunesmith.plan.plan import ForwardSpec
from tunesmith.run.assemble import assemble
from tunesmith.run.choose import new_plan
from tunesmith.run.start import prepare_run
from tunesmith.train import events
from tunesmith.train.loop import step_of

STEP = "tunesmith.train.step:TrainStep._forward_backward"
LABELS = ["O", "B-COLOUR", "B-THING"]
WORDS = {"red": 1, "blue": 1, "one": 0, "nine": 0, "cat": 2, "tree": 2, "sun": 2, "unbelievable": 0}
"""Their first letters tell: the tiny tokenizer has little more than letters, and a decoder does not look ahead."""


def records(count: int, seed: int = 0, *, named: bool = False) -> list[dict]:
    """In numbers as data sets on the hub have them, or with names; some words without a label."""
    chance, made = random.Random(seed), []
    for _ in range(count):
        words = chance.choices(list(WORDS), k=chance.randint(1, 9))
        tags = [WORDS[word] for word in words]
        if named:
            made.append({"words": words, "labels": [LABELS[tag] for tag in tags]})
        else:
            made.append({"tokens": words, "ner_tags": [-100 if n % 5 == 4 else tag for n, tag in enumerate(tags)]})
    return made


def write_run(folder: Path, model: Path, *, named: bool = False, **changes) -> Path:
    changes = {"epochs": 2, "sequence_length": 128, "batch_tokens": 512, **changes}
    made = write_all(folder, model, objective="classify_tokens", labels=LABELS, **changes)
    for name, count, seed in (("train", 40, 0), ("held_out", 8, 1)):
        lines = [json.dumps(one) + "\n" for one in records(count, seed, named=named)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return made


def as_transformers_wants(tokenizer, asked: list[dict]) -> dict[str, torch.Tensor]:
    """Padded, with labels at the first token of each word: by the texts alone, without anything of ours."""
    texts = [" ".join(one.get("tokens") or one["words"]) for one in asked]
    given = tokenizer(texts, return_tensors="pt", padding=True, return_offsets_mapping=True)
    labels = torch.full_like(given["input_ids"], -100)
    for row, (one, text) in enumerate(zip(asked, texts, strict=True)):
        tags = one.get("ner_tags") or [LABELS.index(name) for name in one["labels"]]
        spans = given["offset_mapping"][row].tolist()
        at = 0
        for word, tag in zip(text.split(), tags, strict=True):
            at = text.index(word, at)
            labels[row, next(n for n, (start, end) in enumerate(spans) if start <= at < end)] = tag
            at += len(word)
    return {"input_ids": given["input_ids"], "attention_mask": given["attention_mask"], "labels": labels}


@pytest.mark.parametrize(
    ("method", "cut"), [("full", "packed"), ("full", "padded"), pytest.param("lora", "packed", marks=pytest.mark.slow)]
)
def test_loss_and_gradients_are_transformers_own(tiny_model, tmp_path, monkeypatch, method, cut):
    changes = {"method": method, "lora": {"rank": 4}, "batch_tokens": 4096, "eval": [], "held_out": 0}
    folder = write_run(tmp_path, tiny_model, **changes, epochs=1, max_grad_norm=1e9)
    monkeypatch.chdir(folder)
    run = from_mapping(json.loads((folder / "run.yaml").read_text()))
    setting = prepare_run(run, plan=new_plan(run).changed(threads=1, micro_batch=1), warn=print)
    job = assemble(setting)
    found = {}
    job.optimizer.step = lambda _: found.update({n: w.grad.clone() for n, w in job.optimizer.masters.items()})
    step, loader = step_of(job, None), job.loader
    if cut == "padded":
        job.model.set_attn_implementation("sdpa")
        step.spec = ForwardSpec("padded", 1.0, None)
        sizes = {"sequence_length": 128, "sequences_per_step": 32, "micro_batch": 1, "lengths": (True, None)}
        loader = Loader(setting.data.train, (1.0,), seed=0, objective=job.objective, **sizes)
    job.model.train()
    batch = loader.step(0)
    assert len(batch.micro_batches) > 1
    result = step(batch, 1.0)

    plain = AutoModelForTokenClassification.from_pretrained(tiny_model, num_labels=3, dtype=torch.float32)
    plain.eval()  # its dropout before the head is not ours
    plain.score.load_state_dict(job.model.get_output_embeddings().state_dict())
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    expected = plain(**as_transformers_wants(tokenizer, records(40))).loss
    assert result.loss == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    own = {name: one.grad for name, one in plain.named_parameters()}
    names = found.keys() & own.keys()
    assert names == ({"score.weight", "score.bias"} if method == "lora" else own.keys())
    for name in names:
        torch.testing.assert_close(found[name], own[name], atol=1e-5 * own[name].abs().max().item(), rtol=1e-4)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_what_is_saved_loads_in_transformers_with_the_same_labels(tiny_model, tmp_path, monkeypatch, method, capsys):
    """It has learned, held-out figures are those of a plain count, and what such a model cannot do is said."""
    options = {"method": method, "lora": {"rank": 8}, "epochs": 6, "learning_rate": 1e-2 if method == "lora" else 3e-3}
    folder = write_run(tmp_path, tiny_model, named=True, **options, save_every=100, eval_every=100)
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        main(["train", "run.yaml"])
    assert not ended.value.code
    (*_, last) = [one for one in events.read(folder / "run") if one["event"] == "evaluation"]
    assert last["figures"]["accuracy"] > 0.8
    if method == "full":
        tokenizer = AutoTokenizer.from_pretrained("run/model")
        model = AutoModelForTokenClassification.from_pretrained("run/model", dtype=torch.float32)
        assert model.config.architectures == ["LlamaForTokenClassification"]
        assert model.config.id2label == dict(enumerate(LABELS))
    else:
        peft = pytest.importorskip("peft")
        tokenizer = AutoTokenizer.from_pretrained("run/adapter")
        base = AutoModelForTokenClassification.from_pretrained(tiny_model, num_labels=3, dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(base, "run/adapter")
        assert type(model).__name__ == "PeftModelForTokenClassification"
    asked = [json.loads(line) for line in Path("held_out.jsonl").read_text().splitlines()]
    given = as_transformers_wants(tokenizer, asked)
    with torch.no_grad():
        found = model.eval()(**given)
    assert found.loss.item() == pytest.approx(last["loss"], rel=1e-4)
    is_word = given["labels"] >= 0
    true, said = given["labels"][is_word].tolist(), found.logits.argmax(-1)[is_word].tolist()
    counts = Counter(true), Counter(said), Counter(a for a, b in zip(true, said, strict=True) if a == b)
    for number, name in enumerate(LABELS):
        f1 = 2 * counts[2][number] / (counts[0][number] + counts[1][number])
        assert last["figures"][f"f1_{name}"] == pytest.approx(f1)
    assert last["figures"]["accuracy"] == pytest.approx(sum(counts[2].values()) / len(true))
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["eval", "run", "--json"])
    (row,) = json.loads(capsys.readouterr().out)["results"]
    assert row["loss"] == pytest.approx(last["loss"], rel=1e-5)
    assert row["figures"] == pytest.approx(last["figures"], rel=1e-5)
    with pytest.raises(SystemExit):
        main(["chat", "run", "--prompt", "Hi"])
    assert "labels words" in capsys.readouterr().err


def test_a_label_is_at_the_first_token_of_its_word(tiny_model, tmp_path, monkeypatch):
    """Also of the first word, which nothing predicts; and a text that is cut off keeps the labels of what is left."""
    folder = write_run(tmp_path, tiny_model, eval=[], held_out=0, sequence_length=24)
    words = ["cat", "unbelievable", "", "blue", "tree", "sun", "red", "cat", "cat", "cat"]
    tags = ["B-THING", "O", "O", "B-COLOUR", *["B-THING"] * 6]
    (folder / "train.jsonl").write_text(json.dumps({"tokens": words, "tags": tags}) + "\n")
    monkeypatch.chdir(folder)
    run = from_mapping(json.loads((folder / "run.yaml").read_text()))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    (data,) = examine(run, tokenizer)["datasets"]
    (shown,) = data["shown"]
    labelled = [n for n, label in enumerate(shown["labels"]) if label]
    assert shown["labels"][labelled[0]] == "B-THING"
    assert shown["labels"][labelled[1]] == "O"
    starts = [*labelled, len(shown["ids"])]
    texts = ["".join(shown["texts"][a:b]).strip() for a, b in pairwise(starts)]
    assert texts[:3] == ["cat", "unbelievable", "blue"]
    assert data["truncated"] == 1
    assert len(shown["ids"]) == 24
    assert data["target_tokens"] == len(labelled)


def test_a_killed_run_goes_on_to_the_same_bytes(runs: Runs, tiny_model, tmp_path):
    options = {"method": "lora", "output": "run", "save_every": 2, "eval_every": 100, "steps": 8}
    whole, killed = (write_run(tmp_path / name, tiny_model, **options) for name in ("whole", "killed"))
    assert_resumes(runs, killed, whole, Die(STEP, 10))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("method", "way"), [("lora", "ddp"), ("full", "zero3")])
def test_two_ranks_give_the_losses_of_one(world, tiny_model, tmp_path, method, way):
    """Three sequences a step, which two ranks cannot share evenly."""
    changes = {"method": method, "lora": {"rank": 4}, "eval": [], "held_out": 0, "batch_tokens": 3 * 128, "epochs": 8}
    folder = write_run(tmp_path, tiny_model, **changes)
    assert_two_give_the_losses_of_one(world, folder, way)


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": ["a", "b"], "tags": ["O", "B-PER"]},
        {"tokens": ["a", "b"], "pos_tags": [3, 4], "ner_tags": [0, 1], "id": "7"},
        {"words": ["a", "b"], "labels": ["O", "B-PER"]},
        {"tokens": "a b", "tags": "O B-PER"},
        {"tokens": '["a", "b"]', "ner_tags": "[0, 1]"},
    ],
)
def test_shapes_that_people_have_are_recognised(fields):
    record, dataset = Record(fields, Origin("f", 1)), Dataset(path="f")
    assert recognise([record], dataset, "tagged") == "tagged"
    item = convert(record, "tagged", dataset)
    assert item.words == ("a", "b")
    assert item.tags in ((0, 1), ("O", "B-PER"))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tokens": ["a", "b"], "tags": ["O"]}, "2 words, but `tags` has 1"),
        ({"tokens": [], "tags": []}, "nothing to label"),
        ({"tokens": ["a"], "tags": [1.5]}, "names or numbers"),
        ({"tokens": [["a"]], "tags": [0]}, "must be text"),
    ],
)
def test_records_that_cannot_be_labelled(fields, said):
    record, dataset = Record(fields, Origin("f", 1)), Dataset(path="f")
    with pytest.raises(RecordError, match=said):
        convert(record, "tagged", dataset)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"labels": ["O"]}, "needs two names or more"),
        ({"method": "peft", "peft": {"peft_type": "IA3"}}, "trains a new head"),
        ({"too_long": "split"}, "in one piece"),
    ],
)
def test_settings_that_do_not_go_together(changes, said):
    with pytest.raises(UserError, match=said):
        from_mapping({"model": "m", "data": "d", "objective": "classify_tokens", "labels": LABELS, **changes})
