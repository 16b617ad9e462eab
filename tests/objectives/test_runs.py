"""Whole runs with objectives: they learn, a killed one goes on to the same bytes, and ranks do not change them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from ranks import assert_two_give_the_losses_of_one
from tiny import SETTINGS, Die, Runs, assert_resumes, write_all
from tunesmith.cli.main import main
from tunesmith.objectives import OBJECTIVES
from tunesmith.train import events

STEP = "tunesmith.train.step:TrainStep._forward_backward"
COMPUTE = "tunesmith.run.reference:Reference._compute"
WORDS = ["red", "blue", "seven", "ten", "cat", "tree", "sun"]


def write_preferences(path: Path, count: int, *, seed: int = 0, judged: bool = False) -> Path:
    """Answers that say yes are wanted."""
    chance = random.Random(seed)
    records = []
    for n in range(count):
        text = f"{n} " + " ".join(chance.choices(WORDS, k=chance.randint(1, 3)))
        yes, no = (f"{word} {' '.join(chance.choices(WORDS, k=chance.randint(1, 2)))}" for word in ("yes", "no"))
        if judged:
            is_good = chance.random() < 0.5
            records.append({"prompt": text, "completion": yes if is_good else no, "label": is_good})
        else:
            records.append({"prompt": text, "chosen": yes, "rejected": no})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_run(folder: Path, model: Path, **changes) -> Path:
    """As `tiny.write_all`, with preferences."""
    changes = {"objective": "dpo", "sequence_length": 128, "batch_tokens": 512, "epochs": 2, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    made = write_all(folder, model, **changes)
    judged = changes["objective"] == "kto"
    write_preferences(folder / "train.jsonl", 20, judged=judged)
    write_preferences(folder / "held_out.jsonl", 6, seed=1, judged=judged)
    return made


def tunesmith(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert not ended.value.code


KILLED = [("kto", "lora"), ("orpo", "full"), ("simpo", "lora"), ("cpo", "full")]


@pytest.mark.parametrize(
    ("objective", "method"), [("dpo", "full"), *(pytest.param(*one, marks=pytest.mark.slow) for one in KILLED)]
)
def test_a_killed_run_goes_on_to_the_same_bytes(runs: Runs, tiny_model, tmp_path, objective, method):
    """In the middle of a step, and while the reference is asked where there is one."""
    settings = {"objective": objective, "method": method, "lora": {"rank": 4}, "output": "run"}
    whole, killed = (write_run(tmp_path / name, tiny_model, **settings) for name in ("whole", "killed"))
    asked = [Die(COMPUTE, 2)] if OBJECTIVES[objective].has_reference else []
    assert_resumes(runs, killed, whole, *asked, Die(STEP, 10))


def test_a_run_with_adapters_learns_what_is_preferred(tiny_model, tmp_path, monkeypatch, capsys):
    """From a reference that is the model itself: no margin at first, and most held-out pairs right in the end."""
    folder = write_run(tmp_path, tiny_model, epochs=3, lora={"rank": 8})
    monkeypatch.chdir(folder)
    tunesmith(["train", "run.yaml"])
    found = events.read(folder / "run")
    evaluations = [one for one in found if one["event"] == "evaluation"]
    assert evaluations[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert evaluations[0]["figures"]["margin"] == pytest.approx(0, abs=1e-4)
    assert evaluations[-1]["figures"]["accuracy"] > 0.8
    assert evaluations[-1]["figures_of"].keys() == {"held_out"}
    steps = [one for one in found if one["event"] == "step"]
    assert steps[-1]["figures"]["margin"] > 0.1
    assert steps[-1]["figures_of"]["train"]["reward_chosen"] > steps[-1]["figures_of"]["train"]["reward_rejected"]
    assert "accuracy" in capsys.readouterr().out
    tunesmith(["eval", "run", "--json"])
    (row,) = json.loads(capsys.readouterr().out)["results"]
    assert row["figures"]["accuracy"] == evaluations[-1]["figures"]["accuracy"]
    assert row["loss"] == pytest.approx(evaluations[-1]["loss"], rel=1e-4)
    plan = json.loads(Path("run/plan.json").read_text())
    assert plan["forward"]["branches"]
    assert [one["choice"] for one in plan["reasons"] if one["topic"] == "prompts of pairs"]


def test_pairs_with_their_prompts_once_have_the_losses_of_pairs_apart(tiny_model, tmp_path, monkeypatch):
    """All pairs in one sequence, so that both runs see the same in each step; the plan that is given says how."""
    sizes = {"sequence_length": 512, "batch_tokens": 512, "steps": 3, "epochs": None}
    folder = write_run(tmp_path, tiny_model, **sizes, lora={"rank": 4}, learning_rate=1e-3)
    write_preferences(folder / "train.jsonl", 5)
    monkeypatch.chdir(folder)
    tunesmith(["train", "run.yaml", "output=once"])
    plan = json.loads(Path("once/plan.json").read_text())
    plan["forward"]["branches"] = False
    Path("plan.json").write_text(json.dumps(plan))
    tunesmith(["train", "run.yaml", "output=apart", "--plan", "plan.json"])
    once, apart = ([one for one in events.read(folder / name) if one["event"] == "step"] for name in ("once", "apart"))
    for a, b in zip(once, apart, strict=True):
        assert a["tokens"] < b["tokens"]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


def test_the_reference_is_asked_once(tiny_model, tmp_path, monkeypatch):
    """Another run over the same data, with another beta, reads what it said; a damaged answer is asked for again."""
    from tunesmith.run.reference import Reference

    asked = []
    real = Reference._compute
    monkeypatch.setattr(Reference, "_compute", lambda self, store: asked.append(store.title) or real(self, store))
    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path / "cache"))
    folder = write_run(tmp_path, tiny_model, steps=1)
    monkeypatch.chdir(folder)
    tunesmith(["train", "run.yaml"])
    assert asked == ["train", "held_out"]
    tunesmith(["train", "run.yaml", "output=other", "preference.beta=0.5"])
    assert asked == ["train", "held_out"]
    for file in (tmp_path / "cache" / "references").iterdir():
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    tunesmith(["train", "run.yaml", "output=third"])
    assert asked == ["train", "held_out"] * 2


def test_the_reference_is_asked_about_what_the_run_will_see(tiny_model, tmp_path, monkeypatch):
    from tunesmith.run.reference import Reference

    asked = {}
    real = Reference._compute
    monkeypatch.setattr(
        Reference, "_compute", lambda self, store: asked.update({store.title: len(store)}) or real(self, store)
    )
    folder = write_run(tmp_path, tiny_model, steps=1, batch_tokens=128)
    write_preferences(folder / "train.jsonl", 30, seed=5)
    monkeypatch.chdir(folder)
    tunesmith(["train", "run.yaml"])
    assert 1 <= asked["train"] < 10
    (step,) = [one for one in events.read(folder / "run") if one["event"] == "step"]
    assert step["loss"] == pytest.approx(0.693147, abs=1e-5)


@pytest.fixture(scope="module")
def shared(tiny_model, tmp_path_factory) -> Path:
    """Five sequences a step, which two ranks cannot share evenly."""
    folder = tmp_path_factory.mktemp("settings")
    for name, judged in (("pairs", False), ("judged", True)):
        write_preferences(folder / f"{name}.jsonl", 40, judged=judged)
    settings = {**SETTINGS, "model": str(tiny_model), "lora": {"rank": 4}, "eval": [], "held_out": 0}
    settings |= {"sequence_length": 128, "batch_tokens": 5 * 128, "steps": 3}
    (folder / "run.yaml").write_text(json.dumps(settings))
    return folder


CELLS = [("dpo", "full", "zero3"), ("kto", "lora", "ddp")]
REST = [
    *(("dpo", "lora", "ddp"), ("dpo", "qlora", "zero3"), ("orpo", "full", "zero3"), ("kto", "full", "zero3")),
    *(("dpo", "full", "tensor"), ("kto", "lora", "tensor"), ("simpo", "full", "zero2"), ("cpo", "lora", "ddp")),
]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("objective", "method", "way"), [*CELLS, *(pytest.param(*one, marks=pytest.mark.slow) for one in REST)]
)
def test_two_ranks_give_the_losses_of_one(world, shared, tmp_path, objective, method, way):
    data = [{"path": str(shared / ("judged.jsonl" if objective == "kto" else "pairs.jsonl"))}]
    options = {"method": method, "objective": objective, "data": data, "places": tmp_path}
    alone, both = assert_two_give_the_losses_of_one(world, shared, way, count=3, **options)
    for number, expected in enumerate(alone):
        found = both[0][number]["data"] + ([] if way == "tensor" else both[1][number]["data"])
        assert sorted(found) == sorted(expected["data"])
