"""Encoder-decoders: loss and gradients are transformers' own, a killed run goes on to the same bytes, ranks do not
change a step, and what is saved loads as AutoModelForSeq2SeqLM and in peft with the same logits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from encoder_decoders import FAMILIES, make_encoder_decoder, write_pairs
from ranks import assert_two_give_the_losses_of_one
from tiny import TRAIN, Die, Runs, assert_resumes, write_all
from tunesmith.cli.main import main
from tunesmith.config.load import from_mapping
from tunesmith.config.schema import Dataset
from tunesmith.data.convert import convert
from tunesmith.data.loader import Loader
from tunesmith.data.paired import PairEncoder
from tunesmith.data.recognise import recognise
from tunesmith.data.types import Completion, Conversation, Document, Message, Origin, Record, RecordError
from tunesmith.errors import UserError
from tunesmith.model import load
from tunesmith.model.probe import probe_run
from tunesmith.plan.documents import like_lengths
from tunesmith.plan.plan import ForwardSpec
from tunesmith.run.assemble import assemble
from tunesmith.run.choose import new_plan, plan_and_data
from tunesmith.run.start import prepare_run
from tunesmith.train.loop import step_of

HERE = Origin("pairs.jsonl", 1)
SHORT = {"batch_tokens": 192, "save_every": 1, "lora": {"rank": 4, "dropout": 0.1}}
QUICK = ("t5", "marian")
"""A tied head that scales, and one with a bias that nobody trains."""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: make_encoder_decoder(folder / family, family) for family in FAMILIES}


def write_run(folder: Path, model: Path, **changes) -> Path:
    changes = {"sequence_length": 96, "batch_tokens": 384, "epochs": 2, "lora": {"rank": 4}, **changes}
    made = write_all(folder, model, **changes)
    write_pairs(folder / "train.jsonl", 20)
    write_pairs(folder / "held_out.jsonl", 4, seed=1)
    return made


def tunesmith(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert not ended.value.code


def one_step(folder: Path, **planned):
    """Loss and gradients of a step that has all records, and the number of its micro-batches."""
    run = from_mapping(json.loads((folder / "run.yaml").read_text()))
    (folder / "run").mkdir()
    setting = prepare_run(run, plan=new_plan(run).changed(threads=1, micro_batch=1, **planned), warn=print)
    job = assemble(setting)
    found = {}
    job.optimizer.step = lambda _: found.update(
        {name: one.grad.clone() for name, one in job.optimizer.masters.items() if one.grad is not None}
    )
    step = step_of(job, None)
    job.model.train()
    batch = job.loader.step(0)
    return step(batch, 1.0), found, len(batch.micro_batches)


def own_loss(model, folder: Path) -> torch.Tensor:
    """By transformers, from its own tokenizer's tokens, as its documentation trains such models."""
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    records = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    inputs = tokenizer([one["prompt"] for one in records], padding=True, return_tensors="pt")
    labels = tokenizer(text_target=[one["completion"] for one in records], padding=True, return_tensors="pt")
    given = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
    return model(**given, labels=labels["input_ids"].masked_fill(labels["attention_mask"] == 0, -100)).loss


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in FAMILIES]
)
def test_loss_and_gradients_are_transformers_own(family, models, tmp_path, monkeypatch):
    changes = {"method": "full", "batch_tokens": 4096, "epochs": 1, "max_grad_norm": None, "held_out": 0}
    folder = write_run(tmp_path / "made", models[family], **changes)
    monkeypatch.chdir(folder)
    result, gradients, micro_batches = one_step(folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(models[family]).train()
    expected = own_loss(model, folder)
    expected.backward()
    assert micro_batches > 1
    assert abs(result.loss - expected.item()) <= 1e-5 * max(1.0, expected.item())
    named = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert set(gradients) == set(named)
    for name, gradient in named.items():
        scale = max(1.0, gradient.abs().max().item())
        assert torch.allclose(gradients[name], gradient, rtol=0, atol=1e-5 * scale), name


def test_a_step_is_cut_into_rows_of_like_length():
    sides = [(40, 5), (39, 4), (5, 5), (4, 5), (38, 30)]
    groups = like_lengths(sides, 200)
    assert sorted(i for group in groups for i in group) == list(range(5))
    for group in groups:
        longest = [max(sides[i][side] for i in group) for side in (0, 1)]
        assert len(group) * sum(longest) <= 200
    assert [0, 1] in groups


def test_records_become_sources_and_targets(models):
    tokenizer = load.load_tokenizer(from_mapping({"model": str(models["t5"]), "data": "x"}))
    encoder = PairEncoder(tokenizer, start=0, template=None, train_on="assistant")
    made = encoder.encode(Completion("ask", "say"), HERE)
    source, target = tokenizer("ask")["input_ids"], tokenizer(text_target="say")["input_ids"]
    assert made.ids.tolist() == [0, *target, *source]
    assert made.weights.tolist() == [0.0] + [1.0] * len(target) + [0.0] * len(source)
    chat = Conversation((Message("system", "be brief"), Message("user", "ask"), Message("assistant", "say")))
    assert encoder.encode(chat, HERE).ids.tolist() == [0, *target, *tokenizer("be brief\nask")["input_ids"]]
    assert encoder.prompt([Message("user", "ask")]) == source
    wrapped = PairEncoder(tokenizer, start=None, template=None, train_on="assistant")
    assert wrapped.encode(Completion("ask", "say"), HERE).ids[0] == target[-1]
    twice = Conversation((*chat.messages, Message("user", "more"), Message("assistant", "no")))
    for item, why in ((Document("ask"), "without a prompt"), (twice, "several turns")):
        with pytest.raises(RecordError, match=why):
            encoder.encode(item, HERE)


def test_with_a_chat_template_every_answer_is_a_target_of_what_came_before_it(models):
    tokenizer = load.load_tokenizer(from_mapping({"model": str(models["t5"]), "data": "x"}))
    template = "{% for m in messages %}{{ m.role + ':' + m.content + '</s>' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    encoder = PairEncoder(tokenizer, start=0, template=template, train_on="assistant")
    said = [
        Message(role, text) for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    ]
    made = encoder.encode_all(Conversation(tuple(said)), HERE)
    read = [tokenizer.decode(one.ids[1 + int(one.weights.sum()) :]) for one in made]
    assert read == ["user:a</s>assistant:", "user:a</s>assistant:b</s>user:c</s>assistant:"]
    written = [tokenizer.decode(one.ids[one.weights > 0]) for one in made]
    assert written == ["b</s>", "d</s>"]


def test_a_long_example_loses_the_end_of_its_source_and_keeps_its_answer(models, tmp_path, monkeypatch):
    folder = write_run(tmp_path / "made", models["bart"], sequence_length=24, batch_tokens=96)
    monkeypatch.chdir(folder)
    (folder / "run").mkdir()
    run = from_mapping(json.loads((folder / "run.yaml").read_text()))
    data = prepare_run(run, plan=new_plan(run).changed(threads=1), warn=print).data
    store = data.train[0]
    assert store.report.truncated
    assert store.lengths.max() == 24
    for n in range(len(store)):
        ids, weights, _ = store.example(n)
        assert 1 in ids[weights > 0]  # its end
        assert len(ids) > 1 + (weights > 0).sum()  # something to read


@pytest.fixture(scope="module")
def trained(models, tmp_path_factory, runs: Runs) -> Path:
    folder = write_run(tmp_path_factory.mktemp("trained") / "whole", models["t5"], **SHORT)
    ended = runs(folder, *TRAIN)
    assert ended.code == 0, ended.err
    return folder


def test_a_killed_run_goes_on_to_the_same_bytes(models, trained, tmp_path, runs: Runs):
    folder = write_run(tmp_path / "killed", models["t5"], **SHORT)
    assert_resumes(runs, folder, trained, Die("tunesmith.train.step:TrainStep._forward_backward", 14))
    plan = json.loads((folder / "run" / "plan.json").read_text())
    assert plan["forward"]["layout"] == "encoder-decoder"


def test_the_plan_knows_the_micro_batches_that_the_data_make(models, tmp_path, monkeypatch):
    folder = write_run(tmp_path / "made", models["t5"])
    monkeypatch.chdir(folder)
    run = from_mapping(json.loads((folder / "run.yaml").read_text()))
    plan, data = plan_and_data(run, probed=probe_run(run)[1])
    assert plan.most_padded is not None
    assert not any("guess" in reason.why for reason in plan.reasons if reason.topic == "layout")
    widths = data.train[0].widths
    most = 0
    sizes = {"sequence_length": plan.sequence_length, "sequences_per_step": plan.sequences_per_step}
    loader = Loader(data.train, data.weights, seed=run.seed, **sizes, epochs=run.epochs or plan.epochs)
    for step in range(loader.total_steps):
        of_step = loader.widths(step)
        assert {tuple(one) for one in of_step.tolist()} <= {tuple(one) for one in widths.tolist()}
        for group in like_lengths(of_step.tolist(), plan.micro_batch * plan.sequence_length, most=plan.most_padded):
            if len(group) > 1:
                most = max(most, len(group) * int(of_step[group].max(axis=0).sum()))
    assert most == plan.most_padded[0]


def test_adapter_and_merged_model_load_elsewhere(models, trained, tmp_path, monkeypatch, capsys):
    peft = pytest.importorskip("peft")
    monkeypatch.chdir(trained)
    tunesmith("merge", "run", "--to", str(tmp_path / "merged"))
    tunesmith("eval", "run", "--json")
    tunesmith("chat", "run", "--prompt", "3 red", "--temperature", "0", "--max-tokens", "4")
    base = AutoModelForSeq2SeqLM.from_pretrained(models["t5"])
    adapted = peft.PeftModel.from_pretrained(base, trained / "run" / "adapter").eval()
    config = json.loads((trained / "run" / "adapter" / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_2_SEQ_LM"
    assert {"q", "k", "v", "o", "wi", "wo"} == set(config["target_modules"])
    merged = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "merged").eval()
    tokens = torch.arange(3, 15)[None]
    with torch.no_grad():
        logits = [one(input_ids=tokens, decoder_input_ids=tokens).logits for one in (adapted, merged)]
        plain = AutoModelForSeq2SeqLM.from_pretrained(models["t5"])(input_ids=tokens, decoder_input_ids=tokens).logits
    assert torch.allclose(*logits, atol=1e-4)
    assert (logits[0] - plain).abs().max() > 1e-2
    answer = merged.generate(input_ids=tokens, max_new_tokens=4)
    assert answer[0, 0] == base.config.decoder_start_token_id
    for verb, why in (("serve", "be served"), ("quantize", "be quantized"), ("export", "be exported")):
        more = {"serve": ("--port", "0"), "quantize": ("--to", "out"), "export": ("--to", "gguf")}[verb]
        with pytest.raises(SystemExit) as ended:
            main([verb, "run", *more])
        assert ended.value.code
        assert why in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "method", "way"), [("t5", "full", "zero3"), ("bart", "lora", "ddp"), ("flan", "qlora", "zero3")]
)
def test_two_ranks_give_the_losses_of_one(world, models, tmp_path, family, method, way):
    """Five sequences a step, which two ranks cannot share evenly."""
    changes = {"method": method, "eval": [], "held_out": 0, "sequence_length": 64, "batch_tokens": 5 * 64, "epochs": 4}
    folder = write_run(tmp_path, models[family], **changes)
    assert_two_give_the_losses_of_one(world, folder, way)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_checkpointed_layers_give_the_same_gradients(models, tmp_path, monkeypatch, family):
    found = []
    for layers in (0, 4):
        changes = {"batch_tokens": 4096, "epochs": 1, "held_out": 0, "lora": {"rank": 4}}
        folder = write_run(tmp_path / str(layers), models[family], **changes)
        monkeypatch.chdir(folder)
        found.append(one_step(folder, checkpointed_layers=layers)[:2])
    assert found[0][0].loss == pytest.approx(found[1][0].loss, rel=1e-6)
    for name, gradient in found[0][1].items():
        assert torch.allclose(gradient, found[1][1][name], atol=1e-6), name


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"objective": "dpo"}, "learns answers"),
        ({"method": "peft", "peft": {"peft_type": "IA3"}, "lora": {}}, "full, lora or qlora"),
        ({"lora": {"layers": "top 1"}}, "two stacks"),
        ({"too_long": "split"}, "another question"),
        ({"train_on": "all"}, "reads the prompt"),
    ],
)
def test_what_is_not_there_is_refused_before_anything_is_loaded(models, changes, why):
    run = from_mapping({"model": str(models["bart"]), "data": "x.jsonl", "method": "lora", **changes})
    with pytest.raises(UserError, match=why):
        new_plan(run)


@pytest.mark.parametrize("axis", ["tensor", "context", "pipeline"])
def test_what_cuts_layers_or_rows_is_refused(models, tmp_path, axis):
    folder = write_run(tmp_path / "made", models["t5"])
    run = from_mapping(json.loads((folder / "run.yaml").read_text()))
    plan = new_plan(run)
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match="two stacks"):
        prepare_run(run, plan=plan.changed(mesh={axis: 2}, sharding="ddp"), warn=print)


def test_a_plan_with_packed_documents_is_refused(models, tmp_path, monkeypatch):
    monkeypatch.chdir(write_run(tmp_path / "made", models["t5"]))
    run = from_mapping(json.loads(Path("run.yaml").read_text()))
    Path("run").mkdir()
    with pytest.raises(UserError, match="in rows of their own, which are not packed"):
        prepare_run(run, plan=new_plan(run).changed(forward=ForwardSpec("packed")), warn=print)


def test_the_run_of_the_docs_can_be_planned(models, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "encoder-decoders.md").read_text()
    settings = yaml.safe_load(page.split("```yaml")[1].split("```")[0])
    for dataset in (*settings["data"], *settings["eval"]):
        dataset["path"] = str(write_pairs(tmp_path / dataset["path"], 8))
    plan = new_plan(from_mapping(settings | {"model": str(models["flan"]), "device": "cpu"}))
    assert plan.by_length


@pytest.mark.parametrize(
    ("fields", "mapping"),
    [
        ({"source": "ask", "target": "say"}, {}),
        ({"translation": {"en": "ask", "de": "say"}}, {"prompt": "translation.en", "completion": "translation.de"}),
        ({"instruction": "ask", "output": "say"}, {}),
        ({"question": "ask", "answer": "say"}, {}),
    ],
)
def test_shapes_that_people_have_become_pairs(models, fields, mapping):
    tokenizer = load.load_tokenizer(from_mapping({"model": str(models["t5"]), "data": "x"}))
    encoder = PairEncoder(tokenizer, start=0, template=None, train_on="assistant")
    record, dataset = Record(fields, HERE), Dataset(path="f", fields=mapping)
    item = convert(record, recognise([record], dataset), dataset)
    assert encoder.encode(item, HERE).ids.tolist() == encoder.encode(Completion("ask", "say"), HERE).ids.tolist()
