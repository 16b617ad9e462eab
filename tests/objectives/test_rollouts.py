"""Runs that learn from the model's own answers: killed ones go on to the same bytes, and ranks change nothing."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from objectives.test_runs import tunesmith
from ranks import assert_two_give_the_losses_of_one
from rollout_tasks import settings_of, write_prompts, write_run
from tiny import TRAIN, Die, Runs, assert_resumes
from tunesmith.cli.main import main
from tunesmith.config.load import from_mapping
from tunesmith.config.schema import Lora
from tunesmith.infer.rollout import Wanted, sample
from tunesmith.model import lora, lora_modules
from tunesmith.run.assemble import assemble
from tunesmith.run.choose import new_plan
from tunesmith.run.start import prepare_run
from tunesmith.train import events

STEP = "tunesmith.train.step:TrainStep._forward_backward"
CHOSEN = "tunesmith.infer.rollout:_chosen"


@pytest.mark.parametrize(
    ("objective", "changes"),
    [
        ("grpo", {"rollout": {"updates": 2, "beta": 0.05}, "lora": {"rank": 4, "dropout": 0.1}}),
        pytest.param("rloo", {"method": "full", "learning_rate": 1e-3}, marks=pytest.mark.slow),
        pytest.param("rloo", {"rollout": {"beta": 0.1, "temperature": 0.8}}, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_to_the_same_bytes(runs: Runs, tiny_model, tmp_path, objective, changes):
    """While it answers, and between two updates with the same answers."""
    settings = {"objective": objective, **changes}
    whole, killed = (write_run(tmp_path / name, tiny_model, **settings) for name in ("whole", "killed"))
    updates = changes.get("rollout", {}).get("updates", 1)
    assert_resumes(runs, killed, whole, Die(CHOSEN, 30), Die(STEP, 2 * updates))
    assert (killed / "run" / "rollouts.jsonl").read_bytes() == (whole / "run" / "rollouts.jsonl").read_bytes()


def test_a_run_learns_what_earns_rewards(tiny_model, tmp_path, monkeypatch, capsys):
    folder = write_run(tmp_path, tiny_model, steps=16, rollout={"prompts": 8, "answers": 8}, eval_every=16)
    monkeypatch.chdir(folder)
    tunesmith(["check", "run.yaml"])
    said = capsys.readouterr().out
    assert "8 a step, which the model itself answers" in " ".join(said.split())
    assert "abcdefghijklmnop" in said
    tunesmith(list(TRAIN))
    found = events.read(folder / "run")
    evaluations = [one["figures"] for one in found if one["event"] == "evaluation"]
    assert evaluations[0]["reward"] < 0.3
    assert evaluations[-1]["reward"] > 0.7
    steps = [one["figures"] for one in found if one["event"] == "step"]
    assert steps[-1]["reward"] > 0.6 > 0.2 > steps[0]["reward"]
    assert {"reward_std", "no_spread", "answer_tokens", "truncated", "clipped"} <= steps[0].keys()
    kept = [json.loads(line) for line in (folder / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert {one["step"] for one in kept} == set(range(1, 17))
    capsys.readouterr()
    tunesmith(["eval", "run", "--json"])
    (row,) = json.loads(capsys.readouterr().out)["results"]
    assert row["figures"]["reward"] == pytest.approx(evaluations[-1]["reward"])


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("objective", "method", "way"),
    [
        ("grpo", "lora", "ddp"),
        pytest.param("rloo", "full", "zero2", marks=pytest.mark.slow),
        pytest.param("grpo", "full", "zero1", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_give_the_losses_of_one(world, tiny_model, tmp_path, objective, method, way):
    """Of three prompts, one rank answers two and the other one."""
    beta = {"beta": 0.1} if method == "lora" else {}
    rollout = {"prompts": 3, "updates": 2, **beta}
    folder = write_run(tmp_path / "settings", tiny_model, objective=objective, rollout=rollout, eval=[], held_out=0)
    rewards = [{"kind": "function", "function": f"{folder}/rewards.py:letters"}]
    options = {"count": 3, "rel": 1e-4, "method": method, "rewards": rewards}
    alone, both = assert_two_give_the_losses_of_one(world, folder, way, **options)
    for number, expected in enumerate(alone):
        assert sorted(both[0][number]["data"] + both[1][number]["data"]) == sorted(expected["data"])


def test_the_divergence_from_the_base_is_part_of_rloos_reward(tiny_model, tmp_path, monkeypatch):
    """As in TRL: the sum over an answer's tokens of how much likelier they are than to the base, times beta."""
    rollout = {"beta": 0.3, "temperature": 0.7, "prompts": 3}
    folder = write_run(tmp_path, tiny_model, objective="rloo", rollout=rollout, eval=[], held_out=0)
    (folder / "rewards.py").write_text("def letters(answer, record):\n    return 0.0\n")
    (folder / "run").mkdir()
    monkeypatch.chdir(folder)
    run = from_mapping(json.loads((folder / "run.yaml").read_text()))
    job = assemble(prepare_run(run, plan=new_plan(run).changed(threads=1), warn=print))
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in job.optimizer.masters.values():
            weight.add_(0.05 * torch.randn_like(weight))
    job.model.train()
    batch = job.roll_out(job.loader.step(0), lambda *_: None)
    above, advantages = torch.zeros(12).double(), torch.zeros(12).double()
    for one in batch.micro_batches:
        advantages[one.numbers] = one.advantages
        for number, (a, b) in zip(one.numbers.tolist(), pairwise(one.boundaries.tolist()), strict=True):
            above[number] = divergence(job.model, one.tokens[a:b], one.weights[a:b], 0.7)
    assert above.abs().min() > 1e-3
    taken = -0.3 * above.view(3, 4)
    expected = taken - (taken.sum(1, keepdim=True) - taken) / 3
    torch.testing.assert_close(advantages, expected.flatten(), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def divergence(model, tokens: torch.Tensor, weights: torch.Tensor, temperature: float) -> torch.Tensor:
    """Of one document by itself, from whole softmaxes."""

    def logps() -> torch.Tensor:
        logits = model(input_ids=tokens[None].long(), attention_mask=torch.ones_like(tokens)[None]).logits[0, :-1]
        return torch.log_softmax(logits.double() / temperature, -1).gather(-1, tokens[1:, None].long())[:, 0]

    model.eval().set_attn_implementation("sdpa")
    own = logps()
    with lora.without_adapters(model):
        base = logps()
    return ((own - base) * weights[:-1]).sum()


@pytest.fixture(scope="module")
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model).eval()


PROMPTS = [[5, 9, 40], [7] * 11, [100, 3, 50, 60, 70]]


def sampled(model, wanted: list[Wanted], **changes) -> list[list[int]]:
    options = {"max_tokens": 12, "temperature": 1.0, "stop_ids": frozenset({2}), "rows": 8, "is_shared": True}
    return [one.ids for one in sample(model, PROMPTS, wanted, **options | changes)]


def test_likeliest_answers_are_those_of_transformers(model):
    found = sampled(model, [Wanted(number, "") for number in range(3)], temperature=0.0)
    for prompt, ids in zip(PROMPTS, found, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=2)
        assert ids == expected[0, len(prompt) :].tolist()


def test_lengths_of_dora_are_measured_once_for_all_answers(tiny_model, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    lora.attach(model, Lora(rank=4, dora=True), seed=0)
    adapters = [module for module in model.modules() if isinstance(module, lora_modules.LoraLinear)]
    measured, own = [], lora_modules.LoraLinear._lengths
    monkeypatch.setattr(
        lora_modules.LoraLinear, "_lengths", lambda self, dtype: measured.append(self) or own(self, dtype)
    )
    with torch.no_grad():
        for module in adapters:
            module.lora_b.normal_(0.0, 0.3)
        options = {"max_tokens": 6, "temperature": 0.0, "stop_ids": frozenset({-1}), "rows": 2, "is_shared": True}
        first = sample(model, [[5, 9, 40]], [Wanted(0, "a")], **options)
        assert len(measured) == len(adapters)
        for module in adapters:
            module.lora_b.normal_(0.0, 0.3)
        (answer,) = sample(model, [[5, 9, 40]], [Wanted(0, "a")], **options)
        logits = model(torch.tensor([[5, 9, 40, *answer.ids]])).logits[0]
    assert logits[2:-1].argmax(-1).tolist() == answer.ids != first[0].ids  # not by what they were before


def test_an_answer_depends_on_its_seed_and_not_on_its_neighbours(model):
    stops = frozenset(range(2, 90))  # so that most answers end early, and rows leave the cache
    wanted = [Wanted(number % 3, f"seed {number}") for number in range(12)]
    together = sampled(model, wanted, rows=12, stop_ids=stops)
    assert together == sampled(model, wanted, rows=5, stop_ids=stops)
    assert together == sampled(model, wanted, is_shared=False, stop_ids=stops)
    assert len({tuple(ids) for ids in together}) > 6
    assert len({len(ids) for ids in together}) > 3


def test_draws_follow_the_probabilities(model):
    """Of the first token, at a temperature."""
    count = 4000
    found = sampled(model, [Wanted(0, str(n)) for n in range(count)], max_tokens=1, rows=count, temperature=0.3)
    with torch.no_grad():
        expected = torch.softmax(model(torch.tensor([PROMPTS[0]])).logits[0, -1].double() / 0.3, -1)
    shares = torch.bincount(torch.tensor(found).flatten(), minlength=len(expected)) / count
    deviation = (expected * (1 - expected) / count).sqrt()
    assert ((shares - expected).abs() <= 5 * deviation + 1e-4).all()


@pytest.mark.parametrize(
    ("record", "rewards", "why"),
    [
        ({"prompt": "a"}, ["exact"], "needs the field `answer`"),
        ({"prompt": "a", "answer": None}, ["exact"], "`answer` is null, but rewards has `exact`"),
        ({"prompt": "a", "answer": ""}, ["exact"], "`answer` is empty, but rewards has `exact`"),
        ({"prompt": "a", "answer": "b"}, ["tests"], "needs the field `tests`"),
        ({"text": "a"}, ["exact"], "is trained on prompts"),
        ({"prompt": "a", "answer": "b"}, ["nowhere.py:score"], "cannot be imported"),
        ({"prompt": "a", "answer": "b"}, ["rewards.py:score"], "has no function score"),
        ({"prompt": "a", "answer": "b"}, [{"kind": "json_schema", "file": "none.json"}], "cannot be read"),
    ],
)
def test_what_cannot_be_checked_is_said_first(tiny_model, tmp_path, monkeypatch, capsys, record, rewards, why):
    write_run(tmp_path, tiny_model, rewards=rewards, eval=[])
    (tmp_path / "train.jsonl").write_text(json.dumps(record) + "\n")
    monkeypatch.chdir(tmp_path)
    from tunesmith.cli.main import main

    with pytest.raises(SystemExit) as ended:
        main(["train", "run.yaml"])
    assert ended.value.code
    assert why in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("kind", ["PREFIX_TUNING", "PROMPT_TUNING"])
def test_vectors_before_a_text_are_refused_before_data_are_read(tiny_model, tmp_path, monkeypatch, capsys, kind):
    settings = {name: value for name, value in settings_of(tiny_model).items() if name != "lora"}
    settings |= {"method": "peft", "peft": {"peft_type": kind, "num_virtual_tokens": 4}, "rewards": ["exact"]}
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["train", "run.yaml"])
    assert ended.value.code
    assert f"{kind} puts trained vectors before each text" in " ".join(capsys.readouterr().err.split())


def test_batches_of_tokens_are_refused(tiny_model):
    from tunesmith.errors import UserError
    from tunesmith.run.choose import new_plan

    with pytest.raises(UserError, match="batch_tokens is not for objective: grpo"):
        new_plan(from_mapping(settings_of(tiny_model, batch_tokens=512)))


def test_prompts_are_read_as_people_write_them(tmp_path):
    from tunesmith.config.schema import Dataset
    from tunesmith.data.convert import convert
    from tunesmith.data.recognise import recognise
    from tunesmith.data.types import Origin, Record

    user = {"role": "user", "content": "2+2?"}
    for fields, answer in (
        ({"question": "2+2?", "answer": "so 4 #### 4"}, "so 4 #### 4"),
        ({"prompt": "2+2?", "ground_truth": 4}, 4),
        ({"prompt": "2+2?", "reward_model": {"style": "rule", "ground_truth": "4"}}, "4"),
        ({"problem": "2+2?", "solution": "\\boxed{4}"}, "\\boxed{4}"),
        ({"messages": [user], "answer": "4"}, "4"),
        ({"messages": [user, {"role": "assistant", "content": "4"}]}, "4"),
        ({"prompt": [user], "tests": ["assert True"]}, None),
    ):
        dataset, record = Dataset(path=str(tmp_path)), Record(fields, Origin("d", 1))
        item = convert(record, recognise([record], dataset, "prompts"), dataset)
        assert [(m.role, m.content) for m in item.messages] == [("user", "2+2?")]
        assert item.facts.get("answer") == answer


def test_prompts_that_leave_no_room_for_answers_are_told_why(tiny_model, tmp_path, monkeypatch, capsys):
    write_run(tmp_path, tiny_model, sequence_length=64, rollout={"max_answer_tokens": 20}, eval=[])
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "x" * 100}) + "\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["train", "run.yaml"])
    assert ended.value.code
    said = " ".join(capsys.readouterr().err.split())
    assert "rollout.max_answer_tokens (20) leaves 44 of sequence_length 64 for it" in said


def test_prompts_without_room_for_an_answer_are_left_out(tiny_model, tmp_path, monkeypatch, capsys):
    write_run(tmp_path, tiny_model, sequence_length=64, rollout={"max_answer_tokens": 20}, eval=[])
    write_prompts(tmp_path / "train.jsonl", 4)
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "x" * 40, "letters": "e"}) + "\n")
    monkeypatch.chdir(tmp_path)
    tunesmith(["check", "run.yaml", "--json"])
    (found,) = json.loads(capsys.readouterr().out)["datasets"]
    assert (found["examples"], found["dropped_too_long"]) == (4, 1)


def test_the_file_of_samples_never_grows_beyond_a_size(tmp_path, monkeypatch):
    from tunesmith.run import rollout

    monkeypatch.setattr(rollout, "LARGEST_FILE", 2000)
    (tmp_path / "s").write_text(json.dumps({"step": 7}) + "\n" + '{"step": 3, "cut o')
    samples = rollout.Samples(Path(tmp_path / "s"))
    for step in range(1, 200):
        samples.add(step, [{"step": step, "answer": "x" * 50}])
    kept = [json.loads(line)["step"] for line in (tmp_path / "s").read_text().splitlines()]
    assert (tmp_path / "s").stat().st_size < 2100
    assert kept == sorted(kept)
    assert kept[-1] == 199
