"""Reward models and classifiers: loss and gradients are those of transformers' own classes, what is saved loads there
with the same scores, and a killed run goes on to the same bytes."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import parity
from ranks import assert_two_give_the_losses_of_one
from tiny import TRAIN, Die, Runs, assert_resumes, write_all
from tunesmith.cli.main import main
from tunesmith.config.load import from_mapping
from tunesmith.data.loader import documents_of
from tunesmith.errors import UserError
from tunesmith.model import load, lora
from tunesmith.run.assemble import assemble
from tunesmith.run.choose import new_plan
from tunesmith.run.start import prepare_run
from tunesmith.train import events
from tunesmith.train.loop import step_of

STEP = "tunesmith.train.step:TrainStep._forward_backward"
WORDS = ["red", "blue", "seven", "ten", "cat", "tree", "sun"]
KINDS = {"pairs": "reward", "scores": "reward", "texts": "classify", "messages": "classify"}


def records(kind: str, count: int, seed: int = 0) -> list[dict]:
    """Texts that say yes score high."""
    chance, made = random.Random(seed), []

    def text(most: int) -> str:
        return " ".join(chance.choices(WORDS, k=chance.randint(1, most)))

    for n in range(count):
        is_good = chance.random() < 0.5
        said = f"{text(2)} {'yes' if is_good else 'no'}"
        if kind == "pairs":
            margin = {"margin": chance.choice([0.0, 0.5, 1.0])} if n % 3 else {}
            made.append({"prompt": f"{n} {text(3)}", "chosen": f"{text(2)} yes", "rejected": f"{text(2)} no"} | margin)
        elif kind == "scores":
            made.append({"prompt": text(3), "completion": said, "score": 1.5 if is_good else -0.5})
        elif kind == "texts":
            made.append({"text": said, "label": "good" if is_good else "bad"})
        else:
            made.append({"messages": [{"role": "user", "content": said}], "label": int(is_good)})
    return made


def write_run(folder: Path, model: Path, kind: str, **changes) -> Path:
    changes = {"objective": KINDS[kind], "epochs": 2, "sequence_length": 128, "batch_tokens": 512, **changes}
    if changes["objective"] == "classify":
        changes["labels"] = ["bad", "good"]
    made = write_all(folder, model, **changes)
    for name, count, seed in (("train", 24, 0), ("held_out", 8, 1)):
        lines = [json.dumps(one) + "\n" for one in records(kind, count, seed)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return made


def tunesmith(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert not ended.value.code


def in_full(store, index: int) -> list:
    """The documents of an example, with what the second shares with the first."""
    documents = documents_of(store, index, 0)
    return [one._replace(ids=np.concatenate([documents[0].ids[: one.shared], one.ids]), shared=0) for one in documents]


def padded(documents: list, fill: int) -> dict[str, torch.Tensor]:
    ids = torch.full((len(documents), max(len(one.ids) for one in documents)), fill)
    mask = torch.zeros_like(ids)
    for row, one in enumerate(documents):
        ids[row, : len(one.ids)], mask[row, : len(one.ids)] = torch.from_numpy(one.ids).long(), 1
    return {"input_ids": ids, "attention_mask": mask}


def plain_loss(model: torch.nn.Module, kind: str, examples: list[list]) -> torch.Tensor:
    """By transformers' own forward pass, padded as its tokenizer pads, and TRL's formula for pairs."""

    def scores(documents) -> torch.Tensor:
        return model(**padded(documents, model.config.pad_token_id)).logits

    first = scores([example[0] for example in examples])
    values = torch.tensor([example[0].value for example in examples])
    if kind == "pairs":
        second = scores([example[1] for example in examples])
        return -F.logsigmoid(first - second - values[:, None]).mean()
    return F.mse_loss(first[:, 0], values) if kind == "scores" else F.cross_entropy(first, values.long())


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_transformers_own(tiny_model, tmp_path, monkeypatch, kind, method):
    changes = {"method": method, "lora": {"rank": 4}, "batch_tokens": 4096, "eval": [], "held_out": 0}
    changes |= {"epochs": 1, "max_grad_norm": 1e9}
    folder = write_run(tmp_path, tiny_model, kind, **changes)
    monkeypatch.chdir(folder)
    run = from_mapping(json.loads((folder / "run.yaml").read_text()))
    setting = prepare_run(run, plan=new_plan(run).changed(threads=1, micro_batch=1), warn=print)
    job = assemble(setting)
    found = {}
    job.optimizer.step = lambda _: found.update({n: w.grad.clone() for n, w in job.optimizer.masters.items()})
    step = step_of(job, None)
    job.model.train()
    batch = job.loader.step(0)
    assert len(batch.micro_batches) > 1
    result = step(batch, 1.0)
    (store,) = setting.data.train
    examples = [in_full(store, index) for index in range(len(store))]
    plain = load.head.model_class(run, None).from_pretrained(
        tiny_model, num_labels=len(run.labels) or 1, dtype=torch.float32
    )
    plain.config.pad_token_id = 0
    weight = job.model.get_output_embeddings().weight
    plain.score.weight.data.copy_(weight)
    expected = plain_loss(plain, kind, examples)
    assert result.loss == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    own = {name: one.grad for name, one in plain.named_parameters()}
    names = found.keys() & own.keys()
    assert names == ({"score.weight"} if method == "lora" else own.keys())
    for name in names:
        torch.testing.assert_close(found[name], own[name], atol=1e-5 * own[name].abs().max().item(), rtol=1e-4)


@pytest.mark.slow
def test_a_step_on_pairs_is_that_of_trls_trainer(tiny_model, tmp_path, monkeypatch):
    """Loss and gradients of a whole run's first step, with the margins of pairs that have one."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    changes = {"method": "full", "lora": {}, "batch_tokens": 4096, "eval": [], "held_out": 0, "epochs": 1}
    monkeypatch.chdir(write_run(tmp_path, tiny_model, "pairs", **changes, max_grad_norm=1e9))
    run = from_mapping(json.loads(Path("run.yaml").read_text()))
    setting = prepare_run(run, plan=new_plan(run).changed(threads=1, micro_batch=1), warn=print)
    job, found = assemble(setting), {}
    job.optimizer.step = lambda _: found.update({n: w.grad.clone() for n, w in job.optimizer.masters.items()})
    job.model.train()
    batch = job.loader.step(0)
    assert len(batch.micro_batches) > 1
    result = step_of(job, None)(batch, 1.0)
    (store,) = setting.data.train
    examples = [in_full(store, index) for index in range(len(store))]
    values = torch.tensor([example[0].value for example in examples])
    assert values.any()
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = 0
    model.score.weight.data.copy_(job.model.get_output_embeddings().weight)
    config = trl.RewardConfig(
        output_dir=str(tmp_path / "trl"), report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False
    )
    options = {"args": config, "processing_class": AutoTokenizer.from_pretrained(tiny_model)}
    options["train_dataset"] = datasets.Dataset.from_dict({"chosen": ["a b"], "rejected": ["c d"]})
    trainer = trl.RewardTrainer(model, **options)
    both = [example[place] for place in (0, 1) for example in examples]
    expected = trainer.compute_loss(model, {**padded(both, 0), "margin": values})
    assert result.loss == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    own = {name: one.grad for name, one in model.named_parameters()}
    assert found.keys() == own.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, own[name], rtol=1e-5, atol=1e-5 * own[name].abs().max().item())


def as_asked(tokenizer, prompt: str, answer: str):
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), return_tensors="pt")


@pytest.mark.parametrize(("kind", "method"), [("pairs", "lora"), ("texts", "full")])
def test_what_is_saved_loads_in_transformers_with_the_same_scores(
    tiny_model, tmp_path, monkeypatch, kind, method, capsys
):
    """It has learned, `eval` finds the same, and what such a model cannot do is said."""
    options = {"method": method, "lora": {"rank": 8}, "epochs": 6, "learning_rate": 1e-2 if method == "lora" else 3e-3}
    folder = write_run(tmp_path, tiny_model, kind, **options, save_every=100, eval_every=100)
    monkeypatch.chdir(folder)
    tunesmith("train", "run.yaml")
    (*_, last) = [one for one in events.read(folder / "run") if one["event"] == "evaluation"]
    assert last["figures"]["accuracy"] > 0.8
    assert last["figures_of"]["held_out"]["accuracy"] == last["figures"]["accuracy"]
    if method == "full":
        tokenizer = AutoTokenizer.from_pretrained("run/model")
        model = AutoModelForSequenceClassification.from_pretrained("run/model", dtype=torch.float32)
        assert model.config.architectures == ["LlamaForSequenceClassification"]
        assert model.config.id2label == {0: "bad", 1: "good"}
    else:
        peft = pytest.importorskip("peft")
        tokenizer = AutoTokenizer.from_pretrained("run/adapter")
        base = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1, dtype=torch.float32)
        base.config.pad_token_id = tokenizer.pad_token_id
        model = peft.PeftModel.from_pretrained(base, "run/adapter")
    asked = [json.loads(line) for line in Path("held_out.jsonl").read_text().splitlines()]
    with torch.no_grad():
        if kind == "texts":
            given = tokenizer([one["text"] for one in asked], return_tensors="pt", padding=True)
            labels = torch.tensor([model.config.label2id[one["label"]] for one in asked])
            found = F.cross_entropy(model.eval()(**given).logits, labels)
        else:
            losses = []
            for one in asked:
                both = [as_asked(tokenizer, one["prompt"], one[name]) for name in ("chosen", "rejected")]
                chosen, rejected = (model.eval()(**given).logits[0, 0] for given in both)
                losses.append(-F.logsigmoid(chosen - rejected - one.get("margin", 0.0)))
            found = torch.stack(losses).mean()
    assert found.item() == pytest.approx(last["loss"], rel=1e-4)
    capsys.readouterr()
    tunesmith("eval", "run", "--json")
    (row,) = json.loads(capsys.readouterr().out)["results"]
    assert row["loss"] == pytest.approx(last["loss"], rel=1e-5)
    for command in (
        ["chat", "run", "--prompt", "Hi"],
        ["merge", "run", "--to", "m"],
        ["export", "run", "--to", "gguf"],
    ):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code
        assert "scores texts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("pairs", "lora"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("texts", "full"), ("scores", "full"))),
    ],
)
def test_a_killed_run_goes_on_to_the_same_bytes(runs: Runs, tiny_model, tmp_path, kind, method):
    options = {"method": method, "output": "run", "save_every": 2, "eval_every": 100, "steps": 12}
    whole, killed = (write_run(tmp_path / name, tiny_model, kind, **options) for name in ("whole", "killed"))
    assert_resumes(runs, killed, whole, Die(STEP, 10))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "method", "way"),
    [
        ("pairs", "lora", "zero3"),
        ("texts", "full", "zero3"),
        pytest.param("scores", "full", "zero2", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_give_the_losses_of_one(world, tiny_model, tmp_path, kind, method, way):
    """Five sequences a step, which two ranks cannot share evenly."""
    changes = {"method": method, "lora": {"rank": 4}, "eval": [], "held_out": 0, "batch_tokens": 5 * 128, "epochs": 8}
    folder = write_run(tmp_path, tiny_model, kind, **changes)
    assert_two_give_the_losses_of_one(world, folder, way)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"objective": "classify", "labels": ["a", "a"]}, "needs two names or more"),
        ({"objective": "sft", "labels": ["a", "b"]}, "labels are for"),
        ({"objective": "reward", "method": "peft", "peft": {"peft_type": "IA3"}}, "trains a new head"),
        ({"objective": "reward", "too_long": "split"}, "in one piece"),
    ],
)
def test_settings_that_do_not_go_together(changes, said):
    with pytest.raises(UserError, match=said):
        from_mapping({"model": "m", "data": "d", **changes})


def test_a_mixture_of_experts_with_a_head_gets_its_adapters(tmp_path):
    """peft has other names for weights of such families, and looks for the head in the adapter's files."""
    pytest.importorskip("peft")
    model = parity.write_model("mixtral", tmp_path / "model")
    run = from_mapping({"model": str(model), "objective": "reward", "data": "x.jsonl"})
    names = lora.find_targets(load.load_skeleton(run), run.lora)
    assert names
    assert lora.lost_in_peft(load.load_skeleton(run), run.lora, names) == {}


def test_a_head_that_is_trained_whole_gets_no_adapter(tiny_model):
    given = {"model": str(tiny_model), "objective": "reward", "data": "x.jsonl"}
    run = from_mapping({**given, "lora": {"targets": ["q_proj", "score"]}})
    with pytest.raises(UserError, match="'score' matches the head, which is trained whole; leave it out"):
        lora.find_targets(load.load_skeleton(run), run.lora)
    with pytest.raises(UserError, match="leave out `init`"):
        from_mapping({**given, "lora": {"init": "pissa"}})


def test_texts_are_asked_in_batches_where_the_tokenizer_has_no_padding_token(runs, tiny_model, tmp_path):
    from transformers import pipeline

    model = shutil.copytree(tiny_model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(model)
    folder = write_run(tmp_path, model, "texts", method="full", steps=1, eval=[], held_out=0, output="run")
    ended = runs(folder, *TRAIN)
    assert ended.code == 0, ended.err
    ask = pipeline("text-classification", model=str(folder / "run" / "model"))
    texts = ["red", "blue seven ten yes"]
    assert [one["score"] for one in ask(texts, batch_size=2)] == pytest.approx([ask(one)[0]["score"] for one in texts])


def test_labels_that_are_not_given_are_those_of_the_data_in_plan_folder_and_result(runs, tiny_model, tmp_path):
    given = write_run(tmp_path / "given", tiny_model, "texts")
    read = write_run(tmp_path / "read", tiny_model, "texts")
    settings = json.loads((read / "run.yaml").read_text())
    del settings["labels"]
    (read / "run.yaml").write_text(json.dumps(settings))
    for folder in (given, read):
        ended = runs(folder, *TRAIN)
        assert ended.code == 0, ended.err
    result = Path("run/adapter/adapter_model.safetensors")
    assert (given / result).read_bytes() == (read / result).read_bytes()
    reasons = json.loads((read / "run/plan.json").read_text())["reasons"]
    assert [one["choice"] for one in reasons if one["topic"] == "labels"] == ["bad, good"]
    assert runs(read, *TRAIN).code == 0  # nothing has changed
    planned = runs(read, "plan", "run.yaml")
    assert "bad, good" in planned.out, planned.err


def test_an_unknown_label_is_a_bad_record(tiny_model, tmp_path, monkeypatch, capsys):
    folder = write_run(tmp_path, tiny_model, "texts")
    (folder / "train.jsonl").write_text('{"text": "red", "label": "fair"}\n')
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        main(["train", "run.yaml"])
    assert ended.value.code
    assert "not among `labels` (bad, good)" in capsys.readouterr().err


def test_a_single_label_is_told(tiny_model, tmp_path, monkeypatch, capsys):
    folder = write_run(tmp_path, tiny_model, "texts", steps=1, eval=[], held_out=0)
    (folder / "train.jsonl").write_text('{"text": "red", "label": "good"}\n{"text": "blue", "label": "good"}\n')
    monkeypatch.chdir(folder)
    tunesmith("train", "run.yaml")
    assert "All training records have the label good" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("kind", ["scores", "pairs"])
def test_scores_that_say_nothing_are_told(tiny_model, tmp_path, monkeypatch, capsys, kind):
    """All the same; or of a pair's two answers the same. Pairs without scores beside them say what they prefer."""
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records("pairs", 4)))
    data = [{"path": "train.jsonl"}, {"path": "pairs.jsonl"}]
    folder = write_run(tmp_path, tiny_model, kind, steps=1, data=data, eval=[], held_out=0)
    made = records(kind, 12)
    if kind == "scores":
        made = [one | {"score": 2.0} for one in made]
    else:
        made = [one | {"score_chosen": 3, "score_rejected": 3 if n else 1} for n, one in enumerate(made)]
    (folder / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in made))
    monkeypatch.chdir(folder)
    tunesmith("train", "run.yaml")
    said = " ".join(capsys.readouterr().err.split())
    if kind == "scores":
        assert "All training records have the score 2, so the model learns to give it to any answer" in said
    else:
        assert "line 2: the score of the chosen answer is not above that of the rejected one (11 records)" in said


@pytest.mark.parametrize("objective", ["classify", "embed"])
def test_texts_of_one_token_are_learned_from(tiny_model, tmp_path, monkeypatch, objective):
    """Nothing predicts a first token, but it can be labelled or embedded."""
    write_all(tmp_path, tiny_model)
    made = {
        "classify": [{"text": letter, "label": number % 2} for number, letter in enumerate("abcdef")],
        "embed": [{"anchor": letter, "positive": letter.upper()} for letter in "abcdef"],
    }[objective]
    settings = {"model": str(tiny_model), "data": "train.jsonl", "objective": objective, "device": "cpu", "steps": 1}
    settings |= {"labels": ["bad", "good"]} if objective == "classify" else {}
    (tmp_path / "run.yaml").write_text(json.dumps(settings | {"held_out": 0, "output": "run"}))
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in made))
    monkeypatch.chdir(tmp_path)
    tunesmith("train", "run.yaml")
    (step,) = [one for one in events.read(tmp_path / "run") if one["event"] == "step"]
    assert step["tokens"] >= (6 if objective == "classify" else 12)
    assert step["grad_norm"] > 0


@pytest.mark.parametrize(
    ("objective", "record", "said"),
    [
        ("classify", {"text": "red", "label": "good"}, ["labelled good"]),
        ("reward", {"prompt": "a", "completion": "b", "score": 0.5}, ["score 0.5"]),
        (
            "reward",
            {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 2},
            ["the chosen answer, ahead by 2", "the rejected answer"],
        ),
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": "c"}, ["the chosen answer", "the rejected answer"]),
        ("kto", {"prompt": "a", "completion": "b", "label": False}, ["an answer that is not wanted"]),
        (
            "embed",
            {"anchor": "a", "positive": "b", "negative": "c"},
            ["the anchor", "what belongs to it", "what does not belong to it"],
        ),
        ("embed", {"sentence1": "a", "sentence2": "b", "score": 0.7}, ["one of two texts with the score 0.7"] * 2),
    ],
)
def test_check_says_what_the_data_say_of_each_text(tiny_model, tmp_path, monkeypatch, capsys, objective, record, said):
    """And shows targets where tokens are some."""
    write_all(tmp_path, tiny_model)
    settings = {"model": str(tiny_model), "data": "train.jsonl", "objective": objective, "device": "cpu"}
    settings |= {"labels": ["bad", "good"]} if objective == "classify" else {}
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    (tmp_path / "train.jsonl").write_text(json.dumps(record) + "\n")
    monkeypatch.chdir(tmp_path)
    tunesmith("check", "run.yaml", "--json")
    (dataset,) = json.loads(capsys.readouterr().out)["datasets"]
    assert [one["said"] for one in dataset["shown"]] == said
    assert all(any(one["weights"]) == (objective in ("dpo", "kto")) for one in dataset["shown"])
    tunesmith("check", "run.yaml")
    shown = " ".join(capsys.readouterr().out.split())
    assert all(one in shown for one in said)
