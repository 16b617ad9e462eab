"""Tasks of `eval` on several ranks: the scores, the answers and the token losses of one."""

from __future__ import annotations

import json

import pytest

from tiny import write_all

pytestmark = pytest.mark.distributed
CHOICES = [
    {"path": "held_out.jsonl"},
    {"path": "quiz.jsonl", "format": "choices"},
    {"path": "quiz.jsonl", "format": "letters", "name": "lettered"},
]
ANSWERS = [{"path": "sums.jsonl", "format": "answers"}, {"path": "sums.jsonl", "format": "samples", "name": "asked"}]


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    made = write_all(tmp_path_factory.mktemp("tasks"), tiny_model, lora={"rank": 4}, batch_tokens=256)
    quiz = [
        {"question": f"Which is number {n}?", "choices": ["red", "blue sky", f"{n}", "tree"], "answer": n % 4}
        for n in range(7)
    ]
    sums = [{"question": f"What is {n} and {n}?", "answer": f"{2 * n}"} for n in range(3)]
    for path, records in (("quiz", quiz), ("sums", sums)):
        (made / f"{path}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return made


def evaluated(world, folder, count, mesh, sharding, asked):
    asked = [one | {"path": str(folder / one["path"])} for one in asked]
    output = str(folder / f"{count}-{sharding}-{len(asked)}")
    job = {"folder": str(folder), "mesh": mesh, "sharding": sharding, "eval": asked, "output": output}
    job |= {"data": str(folder / "train.jsonl")}
    found = world(count)("parallel.on_ranks:evaluated", **job)
    assert all(one == found[0] for one in found)  # all ranks know the same
    return found[0]


@pytest.mark.parametrize(
    ("mesh", "sharding", "asked"),
    [
        ({"replicate": 2}, "ddp", [*CHOICES, *ANSWERS]),
        ({"shard": 2}, "zero3", CHOICES),
        pytest.param({"tensor": 2}, "ddp", CHOICES, marks=pytest.mark.slow),
        pytest.param({"shard": 2}, "zero2", [*CHOICES, *ANSWERS], marks=pytest.mark.slow),
    ],
)
def test_two_ranks_find_the_scores_answers_and_token_losses_of_one(world, folder, mesh, sharding, asked):
    one = evaluated(world, folder, 1, {}, "none", asked)
    two = evaluated(world, folder, 2, mesh, sharding, asked)
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
    assert two["tasks"].keys() == one["tasks"].keys()
    for title, measures in one["tasks"].items():
        for name, score in measures.items():
            assert two["tasks"][title][name][0] == pytest.approx(score[0], abs=1e-3), (title, name)
    assert two["samples"].get("answers") == one["samples"].get("answers")
    assert len(asked) == len(CHOICES) or two["samples"]["answers"]["asked"][1]["prompt"] == "What is 1 and 1?"
    mine, theirs = one["samples"]["tokens"], two["samples"]["tokens"]
    assert [document["ids"] for document in mine] == [document["ids"] for document in theirs]
    for a, b in zip(mine, theirs, strict=True):
        assert [x is None for x in a["losses"]] == [x is None for x in b["losses"]]
        counted = [(x, y) for x, y in zip(a["losses"], b["losses"], strict=True) if x is not None]
        assert all(y == pytest.approx(x, abs=5e-3) for x, y in counted)
