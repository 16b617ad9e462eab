"""Distillation against plain torch with whole logits: each divergence, packed, padded and cut into micro-batches, from
a teacher that is asked in each step and from one that was asked before."""

from __future__ import annotations

import importlib.util
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import preference_cases as cases
from ranks import assert_two_give_the_losses_of_one
from tiny import Die, Runs, assert_resumes, write_all
from tiny_model import make_tiny_model
from tunesmith.cli.main import main
from tunesmith.config.load import from_mapping
from tunesmith.config.schema import Run
from tunesmith.data.build import store_of
from tunesmith.data.loader import Loader
from tunesmith.data.store import TokenStore
from tunesmith.data.types import Example, Origin
from tunesmith.errors import UserError
from tunesmith.kernels.linear_distillation import Lesson, Taught, distillation_by_module, linear_distillation
from tunesmith.model import attention
from tunesmith.objectives import objective_of
from tunesmith.optim.build import Optimizer
from tunesmith.parallel.ranks import Ranks
from tunesmith.plan.plan import ForwardSpec
from tunesmith.run import on_policy
from tunesmith.run import teacher as teaching
from tunesmith.run.assemble import assemble
from tunesmith.run.choose import new_plan
from tunesmith.run.start import prepare_run
from tunesmith.train import events
from tunesmith.train.loop import step_of as step_of_job
from tunesmith.train.step import TrainStep

CPU = torch.device("cpu")
TRL = json.loads((Path(__file__).with_name("trl.json")).read_text())
WORDS = 259
"""Tokens of the student; the teacher's head has some rows more, as heads are padded."""
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
STEP = "tunesmith.train.step:TrainStep._forward_backward"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    student = make_tiny_model(folder / "student", num_hidden_layers=1)
    return student, make_tiny_model(folder / "teacher", vocab_size=WORDS + 5, hidden_size=48, num_attention_heads=4)


@pytest.fixture(scope="module")
def store() -> TokenStore:
    random = np.random.Generator(np.random.PCG64(5))
    examples = []
    for number, length in enumerate((9, 14, 5, 11, 7)):
        weights = np.where(np.arange(length) < 3, 0.0, random.choice([0.5, 1.0], length))
        examples.append(Example(random.integers(3, WORDS, length), weights, Origin("d", number + 1)))
    return store_of(examples, vocab_size=WORDS)


def load(folder: Path, layout: str) -> torch.nn.Module:
    attention.register()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.set_attn_implementation(attention.NAME if layout == "packed" else "sdpa")
    return model


def settings_of(models: tuple[Path, Path], **distillation) -> Run:
    return from_mapping(
        {
            "model": str(models[0]),
            "objective": "distill",
            "data": "d",
            "distillation": {"teacher": str(models[1]), **distillation},
            "device": "cpu",
            "precision": "fp32",
            "sequence_length": 48,
        }
    )


def plain_divergence(student: torch.Tensor, teacher: torch.Tensor, kind: str) -> torch.Tensor:
    """By the definitions, of probabilities [N, classes]; gradients by autograd."""

    def kl(a, b):
        return (a * (a / b).log()).sum(-1)

    if kind == "jsd":
        mean = (student + teacher) / 2
        return (kl(teacher, mean) + kl(student, mean)) / 2
    return kl(teacher, student) if kind == "forward_kl" else kl(student, teacher)


def lumped(probabilities: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    kept = probabilities.gather(1, ids)
    return torch.cat([kept, 1 - kept.sum(-1, keepdim=True)], 1)


def plain(models, store: TokenStore, run: Run) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients in float64, document by document with all logits."""
    settings = run.distillation
    student, teacher = (load(folder, "padded").double() for folder in models)
    total, weight = 0.0, 0.0
    for index in range(len(store)):
        ids, weights, _ = store.example(index)
        tokens = torch.from_numpy(ids).long()[None]
        logits = student(input_ids=tokens).logits[0, :-1]
        heat = settings.temperature
        q = (logits / heat).softmax(-1)
        p = (teacher(input_ids=tokens).logits[0, :-1, :WORDS] / heat).softmax(-1).detach()
        if settings.top_k is not None and settings.top_k < WORDS:
            likeliest = p.topk(settings.top_k).indices
            q, p = lumped(q, likeliest), lumped(p, likeliest)
        own = F.cross_entropy(logits, tokens[0, 1:], reduction="none")
        losses = (1 - settings.weight) * own + settings.weight * heat**2 * plain_divergence(q, p, settings.loss)
        counts = torch.from_numpy(weights[1:]).double()
        total, weight = total + (losses * counts).sum(), weight + counts.sum()
    (total / weight).backward()
    return (total / weight).item(), {name: one.grad for name, one in student.named_parameters()}


def step_of(models, store: TokenStore, run: Run, cut: str):
    """Loss, parts and gradients of one step; the optimizer is stopped from applying them."""
    layout, length = ("padded" if cut == "padded" else "packed"), {"accumulated": 16}.get(cut, 64)
    model = load(models[0], layout).train()
    optimizer = Optimizer(model.named_parameters(), Run(model="x", data="x"), master_weights=False)
    found = {}
    optimizer.step = lambda _: found.update({n: w.grad.clone() for n, w in optimizer.masters.items()})
    objective = objective_of(run)
    lengths = (True, None) if layout == "padded" else None
    sizes = {"sequence_length": length, "sequences_per_step": 100, "micro_batch": 1}
    loader = Loader([store], [1.0], seed=0, **sizes, lengths=lengths, objective=objective)
    teach = teaching.teach_of(run, new_plan(run), [store], loader.seen, CPU, Ranks())
    options = {"device": CPU, "max_grad_norm": None, "seed": 0, "objective": objective, "teach": teach}
    batch = loader.step(0)
    assert cut != "accumulated" or len(batch.micro_batches) > 2
    return TrainStep(model, ForwardSpec(layout), optimizer, **options)(batch, 1.0), found


CELLS = [
    *((kind, "packed", None) for kind in DIVERGENCES),
    *((kind, "accumulated", WORDS) for kind in DIVERGENCES),
    *((kind, "padded", 7) for kind in DIVERGENCES),
    ("jsd", "padded", None),
]


@pytest.mark.parametrize(("kind", "cut", "top_k"), CELLS)
def test_loss_and_gradient_are_those_of_whole_softmaxes(models, store, kind, cut, top_k):
    run = settings_of(models, loss=kind, temperature=1.7, weight=0.7, top_k=top_k)
    loss, expected = plain(models, store, run)
    result, gradients = step_of(models, store, run, cut)
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert sum(result.figures.values()) == pytest.approx(loss, rel=1e-5)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        wanted = expected[name].float()
        torch.testing.assert_close(gradient, wanted, atol=1e-5 * wanted.abs().max().item(), rtol=1e-4)


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> tuple[tuple[Path, Path], TokenStore]:
    """What TRL was asked about."""
    examples = []
    for number, pair in enumerate(cases.pairs()):
        weights = np.repeat([0.0, 1.0], [len(pair.prompt), len(pair.chosen)])
        examples.append(Example(np.concatenate([pair.prompt, pair.chosen]), weights, Origin("d", number + 1)))
    return cases.make_models(tmp_path_factory.mktemp("compared")), store_of(examples, vocab_size=WORDS)


@pytest.mark.parametrize("cut", ["packed", "accumulated", "padded"])
@pytest.mark.parametrize("name", cases.DISTILLED)
def test_loss_and_gradient_are_trls(compared, name, cut):
    models, store = compared
    result, gradients = step_of(models, store, settings_of(models, weight=1.0, **cases.DISTILLED[name]), cut)
    assert result.loss == pytest.approx(TRL[name]["loss"], rel=1e-5)
    cases.assert_gradients(gradients, TRL[name]["gradients"])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl 1.16")
@pytest.mark.parametrize("name", cases.DISTILLED)
def test_every_number_of_the_gradient_is_trls(compared, name):
    from trl_oracle import trl_gradients

    models, store = compared
    loss, expected = trl_gradients(name, *models)
    settings = settings_of(models, weight=1.0, **cases.DISTILLED[name])
    result, found = step_of(models, store, settings, "accumulated")
    assert result.loss == pytest.approx(loss, rel=1e-5)
    for weight, gradient in found.items():
        largest = expected[weight].abs().max().item()
        torch.testing.assert_close(gradient, expected[weight], atol=1e-5 * largest, rtol=1e-5)


@pytest.mark.parametrize("by_module", [False, True])
@pytest.mark.parametrize("top_k", [None, 4])
def test_a_head_with_bias_scale_and_soft_cap(by_module, top_k):
    """Rows that are no targets have no gradient; chunks change nothing."""
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(*size, requires_grad=True) for size in ((9, 6), (20, 6), (20,)))
    rows, labels, weights = torch.tensor([0, 2, 3, 5, 8]), torch.tensor([1, 0, 17, 5, 4]), torch.rand(5)
    taught = torch.randn(5, 18).mul(2).log_softmax(-1)
    ids = None if top_k is None else taught.topk(top_k).indices

    def of(start: int, stop: int) -> Taught:
        if ids is None:
            return Taught(taught[start:stop])
        likely = taught.gather(1, ids)
        both = torch.cat([likely, (1 - likely.exp().sum(-1, keepdim=True)).log()], 1)
        return Taught(both[start:stop], ids[start:stop])

    lesson = Lesson(of, "reverse_kl", 2.0, 0.4, 18)
    form = {"scale": 0.8, "softcap": 3.0, "chunk": 2}
    given = (labels, weights, rows, lesson)
    if by_module:
        total, _ = distillation_by_module(lambda x: F.linear(x, weight, bias), hidden, *given, **form)
    else:
        total, _ = linear_distillation(hidden, weight, *given, bias_v=bias, **form)
    found = torch.autograd.grad(total * 3, (hidden, weight, bias))
    logits = torch.tanh(F.linear(hidden[rows], weight, bias) * 0.8 / 3) * 3
    q, p = (logits[:, :18] / 2).softmax(-1), taught.exp()
    if ids is not None:
        q, p = lumped(q, ids), lumped(p, ids)
    own = F.cross_entropy(logits, labels, reduction="none")
    plain_total = ((0.6 * own + 0.4 * 4 * plain_divergence(q, p, "reverse_kl")) * weights).sum()
    assert total.item() == pytest.approx(plain_total.item(), rel=1e-5)
    for one, other in zip(found, torch.autograd.grad(plain_total * 3, (hidden, weight, bias)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_a_teacher_that_was_interrupted_is_asked_for_the_rest(models, store, monkeypatch, tmp_path):
    """Blocks that are there are read, those that are missing or damaged are asked for again; the same numbers."""
    monkeypatch.setattr(teaching, "BLOCK", 12)
    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path))
    run = settings_of(models, top_k=6)
    asked = []
    real = teaching.Answers.ask
    monkeypatch.setattr(teaching.Answers, "ask", lambda self, *one: asked.append(one[1]) or real(self, *one))
    first, _ = step_of(models, store, run, "packed")
    count = len(asked)
    assert count > 3
    step_of(models, store, settings_of(models, top_k=6, loss="jsd", weight=0.1), "packed")
    assert len(asked) == count
    files = sorted((tmp_path / "distillation").glob("*/*"))
    assert len(files) == count
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:-1] + b"x")
    again, _ = step_of(models, store, run, "packed")
    assert len(asked) == count + 2
    assert again.loss == first.loss


def write_run(folder: Path, models: tuple[Path, Path], **changes) -> Path:
    given = {"teacher": str(models[1]), "temperature": 2.0, **changes.pop("distillation", {})}
    return write_all(folder, models[0], objective="distill", distillation=given, **changes)


@pytest.mark.parametrize(
    ("top_k", "on_policy"),
    [(None, 0.5), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((None, 0.0), (8, 0.0)))],
)
def test_a_killed_run_goes_on_to_the_same_bytes(runs: Runs, models, tmp_path, top_k, on_policy):
    """With steps of both kinds, where the student answers in some."""
    options = {"method": "full" if top_k is None else "lora", "epochs": 2}
    options["distillation"] = {"top_k": top_k, "on_policy": on_policy}
    options |= {"rollout": {"max_answer_tokens": 8}} if on_policy else {}
    whole, killed = (write_run(tmp_path / name, models, **options) for name in ("whole", "killed"))
    assert_resumes(runs, killed, whole, Die(STEP, 10))


def tunesmith(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert not ended.value.code


def sampled(model: torch.nn.Module, count: int, seed: int) -> list[list[int]]:
    """Texts that a model has drawn itself."""
    torch.manual_seed(seed)
    start = torch.ones(count, 1, dtype=torch.long)
    made = model.generate(start, do_sample=True, max_new_tokens=24, min_new_tokens=24, top_k=0, pad_token_id=0)
    return made.tolist()


def test_a_distilled_student_learns_more_from_the_same_tokens(models, tmp_path, monkeypatch):
    """Of texts that the teacher has drawn; measured by the tokens of texts that neither has seen."""
    teacher = AutoModelForCausalLM.from_pretrained(models[1], dtype=torch.float32).eval()
    bad = torch.arange(WORDS, WORDS + 5)
    teacher.generation_config.suppress_tokens = bad.tolist()
    changes = {"method": "full", "learning_rate": 1e-2, "epochs": 6, "sequence_length": 32, "batch_tokens": 128}
    changes |= {"save_every": 1000, "eval_every": 1000}
    folder = write_run(tmp_path, models, **changes, distillation={"weight": 0.9, "temperature": 1.0})
    for name, count, seed in (("train", 48, 1), ("held_out", 24, 2)):
        lines = [json.dumps({"input_ids": ids}) + "\n" for ids in sampled(teacher, count, seed)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    monkeypatch.chdir(folder)
    tunesmith("train", "run.yaml")
    settings = json.loads((folder / "run.yaml").read_text())
    del settings["objective"], settings["distillation"]
    (folder / "plain.yaml").write_text(json.dumps(settings | {"output": "plain"}))
    tunesmith("train", "plain.yaml")
    distilled, alone = (
        [one["loss"] for one in events.read(folder / name) if one["event"] == "evaluation"] for name in ("run", "plain")
    )
    assert distilled[0] == alone[0]
    assert distilled[-1] < alone[-1] - 0.05
    steps = [one for one in events.read(folder / "run") if one["event"] == "step"]
    assert steps[-1]["figures"].keys() == {"sft_loss", "distillation_loss"}
    assert steps[-1]["figures"]["distillation_loss"] < 0.7 * steps[0]["figures"]["distillation_loss"]


def own_answers(models, folder: Path, monkeypatch, **distillation):
    """A step whose answers are the student's own, its result and its gradients."""
    changes = {"method": "full", "eval": [], "held_out": 0, "max_grad_norm": 1e9, "batch_tokens": 4096}
    changes |= {"rollout": {"max_answer_tokens": 12, "temperature": 0.01}, "epochs": 1}
    folder = write_run(folder, models, **changes, distillation={"on_policy": 1, "temperature": 1.0, **distillation})
    monkeypatch.chdir(folder)
    (folder / "run").mkdir()
    run = from_mapping(json.loads((folder / "run.yaml").read_text()))
    job = assemble(prepare_run(run, plan=new_plan(run).changed(threads=1, micro_batch=1), warn=print))
    found = {}
    job.optimizer.step = lambda _: found.update({n: w.grad.clone() for n, w in job.optimizer.masters.items()})
    job.model.train()
    given = job.loader.step(0)
    batch = job.roll_out(given, lambda *_: None)
    assert job.model.training
    assert len(batch.micro_batches) > 1
    return given, batch, step_of_job(job, None)(batch, 1.0), found


def documents(batch) -> dict[str, tuple[torch.Tensor, int]]:
    """Tokens of each document, and where its answer begins: after the last that is no target."""
    made = {}
    for one in batch.micro_batches:
        for number, (a, b) in enumerate(pairwise(one.boundaries.tolist())):
            made[one.origins[number]] = one.tokens[a:b], int((one.weights[a:b] == 0)[:-1].nonzero()[-1]) + 2
    return made


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_a_step_with_own_answers_is_the_divergence_at_their_tokens(models, tmp_path, monkeypatch, kind):
    """The prompts are the data's, the answers what plain transformers makes the student say, and of the answers' own
    tokens nothing is learned, whatever the weight."""
    given, batch, result, gradients = own_answers(models, tmp_path, monkeypatch, loss=kind, weight=0.3)
    student, teacher = (load(folder, "padded").double() for folder in models)
    asked, answered = documents(given), documents(batch)
    assert asked.keys() == answered.keys()
    total, count = 0.0, 0
    for number, (origin, (tokens, start)) in enumerate(answered.items()):
        assert asked[origin][1] == start
        assert torch.equal(asked[origin][0][:start], tokens[:start])
        if number < 3:
            greedy = {"do_sample": False, "max_new_tokens": min(12, 64 - start), "pad_token_id": 0}
            assert torch.equal(student.generate(tokens[None, :start], **greedy)[0], tokens)
        q = student(input_ids=tokens[None]).logits[0, start - 1 : -1].softmax(-1)
        p = teacher(input_ids=tokens[None]).logits[0, start - 1 : -1, :WORDS].softmax(-1).detach()
        total, count = total + plain_divergence(q, p, kind).sum(), count + len(q)
    assert batch.target_weight == count
    (total / count).backward()
    assert result.loss == pytest.approx((total / count).item(), rel=1e-5)
    assert result.figures["sft_loss"] == 0
    assert result.figures["answer_tokens"] == count / len(answered)
    for name, one in student.named_parameters():
        wanted = one.grad.float()
        torch.testing.assert_close(gradients[name], wanted, atol=1e-5 * wanted.abs().max().item(), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_a_step_with_own_answers_has_the_loss_of_trl(models, tmp_path, monkeypatch, kind, temperature):
    """But for the square of the temperature, which TRL leaves to the learning rate."""
    gkd = pytest.importorskip("trl.experimental.gkd")
    _, batch, result, gradients = own_answers(models, tmp_path, monkeypatch, loss=kind, temperature=temperature)
    student, teacher = (load(folder, "padded") for folder in models)
    rows = list(documents(batch).values())
    ids = torch.zeros(len(rows), max(len(tokens) for tokens, _ in rows), dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, (tokens, start) in enumerate(rows):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        labels[row, start : len(tokens)] = tokens[start:]
    own, taught = (one(input_ids=ids, attention_mask=mask).logits[:, :-1, :WORDS] for one in (student, teacher))
    beta = {"forward_kl": 0, "reverse_kl": 1, "jsd": 0.5}[kind]
    options = {"beta": beta, "temperature": temperature}
    loss = temperature**2 * gkd.GKDTrainer.generalized_jsd_loss(own, taught.detach(), labels[:, 1:], **options)
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    loss.backward()
    for name, one in student.named_parameters():
        torch.testing.assert_close(gradients[name], one.grad, atol=1e-5 * one.grad.abs().max().item(), rtol=1e-4)


@pytest.mark.parametrize(("share", "steps"), [(0, []), (1, [0, 1, 2, 3, 4, 5]), (0.5, [1, 3, 5]), (0.7, [1, 2, 4, 5])])
def test_steps_with_own_answers_are_spread_evenly(share, steps):
    assert [step for step in range(6) if on_policy.is_answered(step, share)] == steps
    assert sum(on_policy.is_answered(step, share) for step in range(1000)) == 1000 * share


def test_answers_fit_behind_their_prompts():
    """By the prompt alone, so that it does not matter what is decoded beside it."""
    assert on_policy.by_limit({0: 10, 1: 100, 2: 40, 3: 127}, 64, 128) == {64: [0, 2], 16: [1], 1: [3]}


def test_the_last_answer_is_the_one_that_is_given_anew():
    starts = {"00011": 3, "0011001": 6, "00110": 2, "11111": None, "01111": 1, "00000": None}
    for weights, start in starts.items():
        assert on_policy.answer_start(np.array([*map(float, weights)])) == start


def test_texts_without_a_prompt_cannot_be_answered(models, tmp_path, monkeypatch, capsys):
    folder = write_run(tmp_path, models, distillation={"on_policy": 0.5}, eval=[])
    (folder / "train.jsonl").write_text('{"text": "red cat"}\n' * 4)
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        main(["train", "run.yaml"])
    assert ended.value.code
    assert "the student answers prompts" in capsys.readouterr().err


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("method", "way", "top_k", "on_policy"),
    [
        ("full", "zero3", None, 0.0),
        ("lora", "ddp", 8, 0.0),
        pytest.param("full", "zero2", None, 0.5, marks=pytest.mark.slow),
        pytest.param("lora", "ddp", None, 1.0, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_give_the_losses_of_one(world, models, tmp_path, method, way, top_k, on_policy):
    """Five sequences a step, which two ranks cannot share evenly."""
    folder = write_run(tmp_path, models, lora={"rank": 4}, eval=[], held_out=0, batch_tokens=5 * 64)
    settings = json.loads((folder / "run.yaml").read_text())
    given = {**settings["distillation"], "top_k": top_k, "on_policy": on_policy}
    assert_two_give_the_losses_of_one(world, folder, way, count=3, method=method, distillation=given)


def test_a_teacher_that_is_an_adapter_is_to_be_merged(models, tmp_path):
    adapter = tmp_path / "other" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    for teacher in (adapter, adapter.parent):
        with pytest.raises(UserError, match=r"^distillation.teacher: .*; give what `tunesmith merge` makes of it"):
            write_run(tmp_path / teacher.name / "run", (models[0], teacher))


@pytest.mark.parametrize("command", ["train", "check", "plan"])
def test_a_teacher_with_another_vocabulary_is_refused(models, tmp_path, monkeypatch, capsys, command):
    other = make_tiny_model(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    monkeypatch.chdir(write_run(tmp_path / "run", (models[0], other)))
    with pytest.raises(SystemExit) as ended:
        main([command, "run.yaml"])
    said = capsys.readouterr().err
    assert ended.value.code
    assert "has another vocabulary" in said
    assert "Traceback" not in said
    assert not (tmp_path / "run" / "run" / "plan.json").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"objective": "distill"}, "needs a `teacher`"),
        ({"objective": "dpo", "distillation": {"teacher": "t"}}, "distillation is for `objective: distill`"),
        ({"objective": "distill", "distillation": {"teacher": "t"}, "z_loss": 1e-4}, "z_loss is for"),
        ({"objective": "distill", "distillation": {"teacher": "t", "weight": 0}}, "distillation.weight"),
        ({"objective": "distill", "distillation": {"teacher": "t"}, "preference": {"beta": 1}}, "preference.beta"),
        (
            {"objective": "distill", "distillation": {"teacher": "t", "on_policy": 0.5, "top_k": 8}},
            "do not exist before",
        ),
        ({"objective": "distill", "distillation": {"teacher": "t"}, "rollout": {"temperature": 0.5}}, "rollout and"),
        (
            {"objective": "distill", "distillation": {"teacher": "t", "on_policy": 1}, "rollout": {"answers": 4}},
            "rollout.answers",
        ),
    ],
)
def test_settings_that_do_not_go_together(changes, said):
    with pytest.raises(UserError, match=said.replace("`", ".")):
        from_mapping({"model": "m", "data": "d", **changes})


def test_the_plan_counts_the_teacher():
    """Its weights, whole on each rank, in 4 bits where they are too many; its forward pass; and no axis that cuts
    vocabularies or sequences."""
    from plan.shapes import GIB, MODEL, run
    from tunesmith.plan import refusals
    from tunesmith.plan.choice import Choice
    from tunesmith.plan.hardware import named
    from tunesmith.plan.search import search

    student = MODEL["SmolLM2-135M"].changed(positions=8192)
    asked = {"objective": "distill", "distillation": {"teacher": "t"}}
    large = student.changed(teacher=MODEL["Llama-3.1-8B"])
    hardware = named("1xH100")
    alone = search(run(), student, hardware).plan
    both = search(run(**asked), large, hardware)
    assert both.plan.teacher_storage == "plain"
    assert both.plan.memory.weights - alone.memory.weights == pytest.approx(16e9, rel=0.01)
    per_token = [plan.time.total / (plan.sequences_per_step * 2048) for plan in (both.plan, alone)]
    assert per_token[0] > 5 * per_token[1]
    assert any(reason.topic == "teacher" for reason in both.plan.reasons)
    assert not both.plan.cuda_graphs
    small = search(run(**asked), student.changed(teacher=MODEL["Llama-3.1-70B"]), hardware).plan
    assert small.teacher_storage == "nf4"
    assert small.fits
    cached = search(run(objective="distill", distillation={"teacher": "t", "top_k": 64}), large, hardware)
    assert cached.plan.time.total < both.plan.time.total / 2
    assert 14.9 * GIB < max(phase.memory.weights for phase in cached.plan.phases) < 15.1 * GIB
    choice = Choice(tensor=2, sharding="ddp")
    assert "whole vocabularies" in refusals.refused(both.task, choice)
    own = search(run(objective="distill", distillation={"teacher": "t", "on_policy": 1}), large, hardware)
    assert "rollout" in [phase.name for phase in own.plan.phases]
    assert own.plan.time.matmuls > both.plan.time.matmuls
    assert "decode on each rank" in refusals.refused(own.task, Choice(shard=2, sharding="zero3"))


@pytest.mark.parametrize(("mean", "are_kept"), [(200, True), (2000, False)])
def test_answers_that_make_a_second_micro_batch_leave_gradients_beside_its_activations(mean, are_kept):
    """An answer of 128 tokens for each document, in a step of four sequences that make one micro-batch."""
    import dataclasses

    from plan.shapes import MODEL, run
    from tunesmith.plan import memory
    from tunesmith.plan.choice import Choice
    from tunesmith.plan.hardware import named
    from tunesmith.plan.search import search

    student = MODEL["Llama-3.2-1B"].changed(teacher=MODEL["Llama-3.2-1B"])
    asked = {"objective": "distill", "distillation": {"teacher": "t", "on_policy": 1}, "method": "full"}
    asked |= {"rollout": {"max_answer_tokens": 128}, "sequence_length": 2048, "batch_tokens": 8192}
    task = dataclasses.replace(search(run(**asked), student, named("1xH100")).task, mean_document=mean)
    choice = Choice(micro_batch=5, is_compiled=True)
    assert choice.accumulation_steps(task) == 1
    forward = next(one for one in memory.timeline(task, choice) if one.name == "end of the forward pass").memory
    assert (forward.gradients > 0) == are_kept
    few = dataclasses.replace(task, sequences=3)
    fewer = next(one for one in memory.timeline(few, choice) if one.name == "end of the forward pass").memory
    assert fewer.gradients == 0
    assert fewer.activations <= forward.activations
