"""A sweep: variants over one base, each as it would be alone."""

from __future__ import annotations

import json

import pytest

from tiny import Die, assert_same, write_all
from tunesmith.config.load import from_mapping
from tunesmith.config.sweep import variants
from tunesmith.errors import UserError
from tunesmith.run import sweep

SWEEP = [
    {"learning_rate": 2e-3, "lora.rank": 2, "lora.layers": "top 1"},
    {"lora.dropout": 0.0, "lora.layers": "top 1"},
    {"seed": 7, "epochs": 2},
]
NAMES = ("learning_rate=0.002_lora.rank=2_lora.layers=top-1", "lora.dropout=0_lora.layers=top-1", "seed=7_epochs=2")


@pytest.fixture(scope="module")
def alone(runs, tiny_model, tmp_path_factory):
    """Each variant as a run of its own."""
    folder = write_all(tmp_path_factory.mktemp("alone"), tiny_model)
    for name, changes in zip(NAMES, SWEEP, strict=True):
        settings = [f"{key}={value}" for key, value in changes.items()]
        runs.start(folder, "train", "run.yaml", *settings, f"output={name}")
        assert runs.wait().code == 0
    return folder


def test_each_variant_ends_with_the_bytes_of_its_run_alone(runs, tiny_model, tmp_path, alone):
    folder = write_all(tmp_path, tiny_model, sweep=SWEEP)
    runs.start(folder, "train", "run.yaml")
    ended = runs.wait()
    assert ended.code == 0, ended.err
    for name in NAMES:
        assert_same(folder / "run" / name, alone / name)
    rows = json.loads((folder / "run" / "sweep.json").read_text())["variants"]
    assert [row["name"] for row in rows] == list(NAMES)
    losses = [json.loads((alone / name / "summary.json").read_text())["held_out_after"] for name in NAMES]
    assert [row["held_out"] for row in rows] == losses
    assert [row["is_best"] for row in rows] == [loss == min(losses) for loss in losses]
    assert f"{min(losses):.4f}" in ended.out
    assert "best" in (folder / "run" / "sweep.md").read_text()
    runs.start(folder, "train", "run.yaml")  # nothing is left to do
    again = runs.wait()
    assert again.code == 0
    assert again.out.count("is finished") == len(NAMES)
    runs.start(folder, "eval", f"run/{NAMES[1]}")
    assert runs.wait().code == 0
    runs.start(folder, "train", "run.yaml", "sweep=null")
    assert "output: run is the folder of a sweep" in runs.wait().err


def test_no_variant_is_the_best_by_another_loss_than_the_others(monkeypatch):
    rows = [sweep.Row(name, {}, "finished", held_out=loss, preference={"beta": beta})
            for name, loss, beta in (("a", 0.6, 0.1), ("b", 0.5, 0.1), ("c", 0.4, 0.5))]  # fmt: skip
    monkeypatch.setattr(sweep, "_row", lambda row, why: row)
    assert [row.name for row in sweep.rows_of(rows[:2]) if row.is_best] == ["b"]
    assert not any(row.is_best for row in sweep.rows_of(rows))
    assert "`preference` differs" in sweep.note_on(rows)


def test_the_plan_has_all_variants_and_the_memory_of_the_whole(runs, tiny_model, tmp_path):
    folder = write_all(tmp_path, tiny_model, sweep=SWEEP)
    runs.start(folder, "plan", "run.yaml")
    out = runs.wait().out
    assert all(name in out for name in NAMES)
    assert "Memory of the whole sweep" in out


def test_what_is_for_one_run_is_refused_to_a_sweep(runs, tiny_model, tmp_path, alone):
    folder = write_all(tmp_path, tiny_model, sweep=SWEEP)
    single = f"output={alone / NAMES[0]}"
    for more, said in ((["--ranks", "2"], "one process"), (["--plan", "plan.json"], "--plan is"), ([single], "single")):
        runs.start(folder, "train", "run.yaml", *more)
        ended = runs.wait()
        assert ended.code != 0
        assert said in ended.err


def test_a_killed_sweep_goes_on_to_the_same_bytes(runs, tiny_model, tmp_path, alone):
    folder = write_all(tmp_path, tiny_model, sweep=SWEEP)
    # In the second variant, after its first checkpoint.
    steps = sum(1 for line in (alone / NAMES[0] / "events.jsonl").read_text().splitlines() if '"step"' in line[:20])
    runs.start(folder, "train", "run.yaml", die=Die("tunesmith.train.step:TrainStep.launch", count=steps + 4))
    assert runs.wait().code == -9
    assert (folder / "run" / NAMES[0] / "summary.json").exists()
    assert not (folder / "run" / NAMES[1] / "summary.json").exists()
    runs.start(folder, "train", "run.yaml")
    ended = runs.wait()
    assert ended.code == 0, ended.err
    assert f"{NAMES[0]} is finished" in ended.out
    for name in NAMES:
        assert_same(folder / "run" / name, alone / name)


def test_a_variant_that_diverges_does_not_end_the_sweep(runs, tiny_model, tmp_path):
    changes = {"max_grad_norm": None, "steps": 3, "warmup": 0, "schedule": "constant", "optimizer": "sgd"}
    folder = write_all(tmp_path, tiny_model, **changes, sweep={"learning_rate": [1e30, 1e-3]})
    runs.start(folder, "train", "run.yaml")
    ended = runs.wait()
    assert ended.code == 1
    rows = json.loads((folder / "run" / "sweep.json").read_text())["variants"]
    assert [row["state"] for row in rows] == ["failed", "finished"]
    assert rows[0]["why"]


def run_of(**settings):
    return from_mapping({"model": "model", "data": ["train.jsonl"], **settings})


def test_all_values_are_combined():
    found = variants(run_of(sweep={"learning_rate": [1e-4, 2e-4], "lora": {"rank": [8, 16]}, "seed": [1]}))
    assert [one.name for one in found][:2] == [
        "learning_rate=0.0001_lora.rank=8_seed=1",
        "learning_rate=0.0001_lora.rank=16_seed=1",
    ]
    assert [(one.run.learning_rate, one.run.lora.rank, one.run.seed) for one in found] == [
        (1e-4, 8, 1),
        (1e-4, 16, 1),
        (2e-4, 8, 1),
        (2e-4, 16, 1),
    ]
    assert all(one.run.output == f"runs/default/{one.name}" and not one.run.sweep for one in found)


def test_data_mixes_are_variants():
    mixes = [[{"path": "a.jsonl", "weight": 2}, {"path": "b.jsonl"}], ["a.jsonl"]]
    found = variants(run_of(sweep={"data": mixes}))
    assert [[one.weight for one in variant.run.data] for variant in found] == [[2.0, 1.0], [1.0]]
    assert found[0].name != found[1].name


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sweep": {"precision": ["fp32", "bf16"]}}, "sweep: `precision` cannot differ between variants"),
        ({"sweep": {"lora.bits": [4, 8]}}, "`lora.bits` cannot differ between variants: it is how the base is held"),
        ({"sweep": {"sequence_length": [8, 16]}}, "`sequence_length` cannot differ"),
        ({"sweep": {"lr": [1, 2]}}, "did you mean `learning_rate`?"),
        ({"sweep": {"lora.rank": [8, "many"]}}, "`lora.rank` is 'many' but needs a whole number (sweep, variant"),
        ({"sweep": {"learning_rate": 1e-4}}, "needs a list of values for `learning_rate`"),
        ({"sweep": "seed"}, "it must be a mapping of settings to lists of values"),
        ({"sweep": [{"seed": 1}, {"seed": 1}]}, "the variant seed=1 is there twice"),
        ({"method": "full", "sweep": {"seed": [1, 2]}}, "method: full trains the base itself"),
        ({"method": "relora", "sweep": {"seed": [1, 2]}}, "method: relora trains the base itself"),
        ({"sweep": {"seed": list(range(2000))}}, "it has 2,000 variants"),
    ],
)
def test_what_cannot_be_swept_is_refused(settings, said):
    with pytest.raises(UserError) as error:
        variants(run_of(**settings))
    assert said in str(error.value)
