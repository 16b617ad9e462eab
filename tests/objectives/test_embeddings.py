"""Embeddings: loss and gradients are sentence-transformers' own however a step is cut, what is saved loads there with
the same vectors, a killed run goes on to the same bytes, and ranks do not change a step."""

from __future__ import annotations

import importlib.util
import json
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import embedding_cases as cases
from ranks import assert_two_give_the_losses_of_one
from tiny import Die, Runs, assert_resumes, write_all
from tiny_model import make_tiny_model
from tunesmith.cli.main import main
from tunesmith.config.load import from_mapping
from tunesmith.config.schema import Dataset
from tunesmith.data.convert import convert
from tunesmith.data.recognise import recognise
from tunesmith.data.types import Origin, Record, RecordError
from tunesmith.errors import UserError
from tunesmith.plan.plan import ForwardSpec
from tunesmith.run.assemble import assemble
from tunesmith.run.choose import new_plan
from tunesmith.run.start import prepare_run
from tunesmith.train import events
from tunesmith.train.loop import step_of

EMBED = "tunesmith.train.step:TrainStep._embed"
ORACLE = json.loads(Path(__file__).with_name("sentence_transformers.json").read_text())
CUTS = {"packed": (512, 64), "accumulated": (128, 1), "padded": (256, 1)}
"""Tokens of a sequence, and sequences of a micro-batch."""
QUICK = [("pairs", "accumulated"), ("negatives", "accumulated"), ("matryoshka", "packed"), ("scores", "padded")]


@pytest.fixture(scope="module")
def untied(tmp_path_factory) -> Path:
    """With a head for tokens that is a weight of its own, and gets no gradient."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "untied", tie_word_embeddings=False)


def write_run(folder: Path, model: Path, kind: str, **changes) -> Path:
    changes = {"objective": "embed", "sequence_length": 128, "batch_tokens": 1024, "epochs": 2, **changes}
    made = write_all(folder, model, **changes)
    for name, count, seed in (("train", 24, 0), ("held_out", 8, 1)):
        lines = [json.dumps(one) + "\n" for one in cases.records(kind, count, seed)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return made


def tunesmith(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert not ended.value.code


def one_step(folder: Path, cut: str):
    """Loss, gradients and figures of a step that has all records."""
    run = from_mapping(json.loads((folder / "run.yaml").read_text()))
    plan = new_plan(run).changed(threads=1, micro_batch=CUTS[cut][1])
    (folder / "run").mkdir()
    setting = prepare_run(run, plan=plan, warn=print)
    job = assemble(setting)
    found = {}
    job.optimizer.step = lambda _: found.update(
        {name: one.grad.clone() for name, one in job.optimizer.masters.items() if one.grad is not None}
    )
    step = step_of(job, None)
    if cut == "padded":
        job.model.set_attn_implementation("sdpa")
        step.spec = ForwardSpec("padded", 1.0, None)
    job.model.train()
    batch = job.loader.step(0)
    assert (len(batch.micro_batches) > 1) == (cut != "packed")
    return step(batch, 1.0), found


@pytest.mark.parametrize(
    ("name", "cut"),
    [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in product(cases.CASES, CUTS) if one not in QUICK)],
)
def test_loss_and_gradients_are_those_of_sentence_transformers(tiny_model, tmp_path, monkeypatch, name, cut):
    case = dict(cases.CASES[name])
    settings = {"method": "full", "eval": [], "held_out": 0, "max_grad_norm": 1e9, "epochs": 1}
    settings |= {"sequence_length": CUTS[cut][0], "batch_tokens": 8192}
    folder = write_run(tmp_path, tiny_model, case.pop("kind"), **settings, embedding=case)
    monkeypatch.chdir(folder)
    result, gradients = one_step(folder, cut)
    expected = ORACLE[name]
    assert result.loss == pytest.approx(expected["loss"], rel=1e-5)
    told = cases.told(gradients)
    assert told.keys() == expected["gradients"].keys()
    for weight, (norm, *projected) in expected["gradients"].items():
        assert told[weight] == pytest.approx([norm, *projected], rel=1e-4, abs=1e-5 * norm), weight


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("sentence_transformers") is None, reason="needs sentence-transformers")
@pytest.mark.parametrize("name", cases.CASES)
def test_the_frozen_numbers_are_those_of_sentence_transformers(tiny_model, name):
    from sentence_transformers_oracle import found

    live = found(name, tiny_model)
    assert live["loss"] == pytest.approx(ORACLE[name]["loss"], rel=1e-6)
    for weight, numbers in ORACLE[name]["gradients"].items():
        assert live["gradients"][weight] == pytest.approx(numbers, rel=1e-4, abs=1e-6 * numbers[0])


def vectors(folder: Path, tokenizer, texts: list[str], base: Path | None = None) -> torch.Tensor:
    """By plain transformers, one text at a time, and what sentence-transformers' files say of pooling."""
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text())
    if base is None:
        model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    else:
        peft = pytest.importorskip("peft")
        whole = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder)
        model = whole.base_model.model.model
    found = []
    with torch.no_grad():
        for text in texts:
            hidden = model.eval()(**tokenizer(text, return_tensors="pt"))[0][0]
            found.append(hidden[-1] if pooling["pooling_mode_lasttoken"] else hidden.mean(0))
    return F.normalize(torch.stack(found), dim=-1)


@pytest.mark.parametrize(
    ("method", "pooling"), [("lora", "last"), pytest.param("full", "mean", marks=pytest.mark.slow)]
)
def test_what_is_saved_loads_elsewhere_with_the_same_vectors(
    tiny_model, tmp_path, monkeypatch, capsys, method, pooling
):
    """It has learned, `eval` finds the same, and what such a model cannot do is said."""
    options = {"method": method, "lora": {"rank": 8}, "epochs": 6, "learning_rate": 1e-2 if method == "lora" else 3e-3}
    options |= {"embedding": {"pooling": pooling}, "save_every": 100, "eval_every": 100}
    folder = write_run(tmp_path, tiny_model, "pairs", **options)
    monkeypatch.chdir(folder)
    tunesmith("train", "run.yaml")
    assert "try `tunesmith eval run`" in capsys.readouterr().out
    first, *_, last = [one for one in events.read(folder / "run") if one["event"] == "evaluation"]
    assert last["loss"] < 0.9 * first["loss"]
    saved = Path("run/adapter" if method == "lora" else "run/model")
    tokenizer = AutoTokenizer.from_pretrained(saved)
    asked = cases.records("pairs", 8, 1)
    both = [
        vectors(saved, tokenizer, [one[name] for one in asked], tiny_model if method == "lora" else None)
        for name in ("anchor", "positive")
    ]
    expected = F.cross_entropy(both[0] @ both[1].T / 0.05, torch.arange(8))
    assert expected.item() == pytest.approx(last["loss"], rel=1e-4)
    if importlib.util.find_spec("sentence_transformers") is not None:
        from sentence_transformers import SentenceTransformer

        made = SentenceTransformer(str(saved), device="cpu").encode([one["anchor"] for one in asked])
        torch.testing.assert_close(torch.tensor(made), both[0], atol=1e-5, rtol=1e-4)
    capsys.readouterr()
    tunesmith("eval", "run", "--json")
    (row,) = json.loads(capsys.readouterr().out)["results"]
    assert row["loss"] == pytest.approx(last["loss"], rel=1e-5)
    with pytest.raises(SystemExit) as ended:
        main(["chat", "run", "--prompt", "Hi"])
    assert ended.value.code
    assert "embeds texts" in capsys.readouterr().err
    if method == "lora":
        tunesmith("merge", "run", "--to", "merged")
        merged = vectors(Path("merged"), tokenizer, [one["anchor"] for one in asked])
        torch.testing.assert_close(merged, both[0], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_to_the_same_bytes(runs: Runs, untied, tmp_path, method):
    """With dropout, in the middle of the second pass over a step."""
    options = {"method": method, "output": "run", "eval_every": 100, "steps": 4, "batch_tokens": 512}
    whole, killed = (write_run(tmp_path / name, untied, "negatives", **options) for name in ("whole", "killed"))
    assert_resumes(runs, killed, whole, Die(EMBED, 22))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "method", "way"),
    [("negatives", "full", "zero3"), pytest.param("scores", "lora", "ddp", marks=pytest.mark.slow)],
)
def test_two_ranks_give_the_losses_of_one(world, untied, tmp_path, kind, method, way):
    """Five sequences a step, which two ranks cannot share evenly; an anchor meets the negatives of both."""
    changes = {"method": method, "lora": {"rank": 4}, "eval": [], "held_out": 0, "batch_tokens": 5 * 128, "epochs": 8}
    folder = write_run(tmp_path, untied, kind, **changes)
    assert_two_give_the_losses_of_one(world, folder, way)


def test_a_text_that_belongs_to_an_anchor_is_no_negative_of_it():
    from tunesmith.model.embedding import batch_loss
    from tunesmith.objectives.embed import RANKED, Embed, Embedded

    run = from_mapping({"model": "m", "data": "d", "objective": "embed"})
    objective = Embed(run.preference, run.embedding)
    torch.manual_seed(0)
    vectors_dh = torch.randn(6, 8)
    parts_d, values_d = torch.tensor([0, 1] * 3), torch.full((6,), RANKED, dtype=torch.float64)

    def loss(*keys: int) -> float:
        batch = Embedded(vectors_dh, parts_d, values_d, torch.tensor(keys))
        return batch_loss(objective, batch, torch.zeros(6).long(), sources=1).sums[0, 0].item()

    def plain(*left_out: tuple[int, int]) -> float:
        unit = F.normalize(vectors_dh, dim=-1)
        logits = unit[0::2] @ unit[1::2].T / 0.05
        for place in left_out:
            logits[place] = -torch.inf
        return F.cross_entropy(logits, torch.arange(3), reduction="sum").item()

    assert loss(1, 2, 3, 4, 5, 6) == pytest.approx(plain(), rel=1e-5)
    assert loss(1, 2, 3, 2, 5, 6) == pytest.approx(plain((0, 1), (1, 0)), rel=1e-5)  # the same positive
    assert loss(1, 2, 3, 4, 1, 6) == pytest.approx(plain((0, 2), (2, 0)), rel=1e-5)  # the same anchor


@pytest.mark.parametrize(
    ("fields", "form", "made"),
    [
        ({"anchor": "a", "positive": "b", "negative": "c"}, "anchors", ("a", ("b",), ("c",))),
        ({"query": "a", "pos": ["b", "c"], "neg": ["d"]}, "anchors", ("a", ("b", "c"), ("d",))),
        (
            {"anchor": "a", "positive": "b", "hard_neg": "c", "hard_negative_1": "d"},
            "anchors",
            ("a", ("b",), ("c", "d")),
        ),
        ({"anchor": "a", "positive": "b", "negative_1": "c", "negative_2": "d"}, "anchors", ("a", ("b",), ("c", "d"))),
        (
            {"query": "a", "positive_passages": [{"docid": "1", "title": "t", "text": "b"}], "negative_passages": []},
            "anchors",
            ("a", ("t b",), ()),
        ),
        ({"question": "a", "answer": "b"}, "anchors", ("a", ("b",), ())),
        ({"sentence1": "a", "sentence2": "b"}, "anchors", ("a", ("b",), ())),
    ],
)
def test_shapes_that_people_have_are_recognised(fields, form, made):
    record = Record(fields, Origin("f", 1))
    dataset = Dataset(path="f")
    assert recognise([record], dataset, "related") == form
    item = convert(record, form, dataset)
    assert (item.anchor, item.positives, item.negatives) == made


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"sentence1": "a", "sentence2": "b", "score": 4.2}, "divide the scores"),
        ({"anchor": "a", "positive": "b", "negative": "c", "score": 0.4}, "`negative` beside two texts with a score"),
        ({"sentence1": "a", "sentence2": "b", "label": 1}, "score: label"),
        ({"anchor": "a", "positive": " "}, "nothing to embed"),
        ({"query": "a", "pos": []}, "no text that belongs"),
    ],
)
def test_records_that_cannot_be_embedded(fields, said):
    record, dataset = Record(fields, Origin("f", 1)), Dataset(path="f")
    with pytest.raises(RecordError, match=said):
        convert(record, recognise([record], dataset, "related"), dataset)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"objective": "sft", "embedding": {"pooling": "mean"}}, "embedding is for"),
        ({"method": "peft", "peft": {"peft_type": "IA3"}}, "full, lora or qlora"),
        ({"embedding": {"matryoshka": [8, 8]}}, "twice"),
        ({"z_loss": 1e-4}, "z_loss is for"),
    ],
)
def test_settings_that_do_not_go_together(changes, said):
    with pytest.raises(UserError, match=said):
        from_mapping({"model": "m", "data": "d", "objective": "embed", **changes})


def test_more_dimensions_than_there_are_are_refused(tiny_model, tmp_path, monkeypatch):
    folder = write_run(tmp_path, tiny_model, "pairs", embedding={"matryoshka": [64]})
    monkeypatch.chdir(folder)
    run = from_mapping(json.loads((folder / "run.yaml").read_text()))
    with pytest.raises(UserError, match="the model's vectors have 32"):
        prepare_run(run, warn=print)
