"""Tasks against lm-eval's own numbers (`tests/lm_eval_oracle.py` made them), and how files of records are read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lm_eval_oracle as oracle
from tunesmith.data.types import Message
from tunesmith.errors import UserError
from tunesmith.evaluate import answers, choices, instructions
from tunesmith.evaluate.results import Results
from tunesmith.evaluate.score import SHARED, Document, Scorer, Tree, common, keys_of, nodes_of, one_ahead
from tunesmith.evaluate.tasks import equal_choices, read_task, read_tasks
from tunesmith.model.forward import token_losses
from tunesmith.run.tasks import cut_of


@pytest.fixture(scope="module")
def expected():
    return json.loads(oracle.FILE.read_text())


@pytest.fixture(scope="module")
def opened(tiny_model):
    from tunesmith.run.open import open_plain

    return open_plain(str(tiny_model))


@pytest.fixture(scope="module")
def scorer(opened):
    return Scorer(opened.model)


def written(path: Path, *records) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize("is_shared", [True, False])
def test_choices_have_the_likelihoods_of_lm_eval(opened, scorer, expected, tmp_path, monkeypatch, is_shared):
    assert scorer.shares_contexts
    monkeypatch.setattr(scorer, "shares_contexts", is_shared)
    task = read_task(written(tmp_path / "mc.jsonl", *oracle.records()))
    assert task.kind == "choices"
    found = {item.id: result for item, result in choices.scores(scorer, opened.tokenizer, task.items)}
    assert len(found) == len(task.items)
    for item, wanted in zip(task.items, expected["likelihoods"], strict=True):
        mine = found[item.id]
        assert mine["likelihoods"] == pytest.approx(wanted, abs=1e-3)
        assert mine["acc"] == (np.argmax(wanted) == item.content.gold)
        assert mine["acc_norm"] == (np.argmax(np.array(wanted) / item.content.lengths) == item.content.gold)


class CountedTokenizer:
    """A tokenizer that may only be called, and counts how often."""

    def __init__(self, tokenizer, bos_token):
        self.tokenizer, self.bos_token, self.calls = tokenizer, bos_token, []

    def __call__(self, texts, **given):
        self.calls.append((len(texts), given["add_special_tokens"]))
        return self.tokenizer(texts, **given)


def test_all_texts_are_tokenized_in_few_calls_and_cut_where_the_question_ends(opened, tmp_path):
    records = [
        {"question": f"{start}what is {n}? ", "choices": ["one", "the two", "3"], "answer": n % 3}
        for n, start in enumerate(["", "", "<|im_end|>", ""])
    ]
    items = read_task(written(tmp_path / "mc.jsonl", *records)).items
    tokenizer = CountedTokenizer(opened.tokenizer, items[2].content.context[:6])
    trees = choices.trees_of(tokenizer, items)
    assert sum(count for count, _ in tokenizer.calls) == 4 * len(items)
    assert len(tokenizer.calls) <= 2
    for item, tree in zip(items, trees, strict=True):
        special = not item.content.context.startswith(tokenizer.bos_token)
        before = opened.tokenizer.encode(item.content.context.rstrip(), add_special_tokens=special)
        assert tree.context == before
        for one, continuation in zip(tree.continuations, item.content.continuations, strict=True):
            both = opened.tokenizer.encode(item.content.context + continuation, add_special_tokens=special)
            assert [*before, *one] == both


@pytest.mark.parametrize(("left_out", "said"), [("question", "question or query or ctx"), ("answer", "answerKey")])
def test_choices_without_a_question_or_an_answer_are_told_what_is_missing(tmp_path, left_out, said):
    record = {"question": "x", "choices": ["a", "b"], "answer": 0}
    del record[left_out]
    with pytest.raises(UserError, match=said):
        read_task(written(tmp_path / "mc.jsonl", record))


def test_a_batch_is_started_before_the_one_before_it_is_read():
    seen = []

    def batches():
        for number in range(3):
            seen.append(f"start {number}")
            yield number

    for number in one_ahead(batches()):
        seen.append(f"read {number}")
    assert seen == ["start 0", "start 1", "read 0", "start 2", "read 1", "read 2"]
    assert list(one_ahead(iter(()))) == []


def test_gsm8k_answers_are_extracted_as_published(expected):
    found = [[int(value) for value in answers.gsm8k(*case).values()] for case in oracle.gsm8k_cases()]
    assert found == expected["gsm8k"]
    assert all(sum(column) > 5 for column in zip(*found, strict=True))


BY_HAND = [  # what a model said, the right number, and as a person reads the published rules: strict, flexible
    ("She sold 48/2 = 24 clips in May.\nIn all she sold 48+24 = 72 clips.\n#### 72", "72", 1, 1),
    ("The answer is 72.", "72", 0, 1),
    ("#### 72.", "72", 1, 1),
    ("####72", "72", 0, 1),
    ("#### $72", "72", 0, 1),
    ("#### 1,000", "1000", 1, 1),
    ("She earns $1,000.", "1000", 0, 1),
    ("#### 18.00", "18", 0, 0),
    ("#### 18\n#### 20", "20", 0, 1),
    ("#### 18\n#### 20", "18", 1, 0),
    ("#### -5", "-5", 1, 1),
    ("The temperature is -5 degrees.", "-5", 0, 1),
    ("It drops from 10 to 10-15 = -5", "-5", 0, 1),
    ("The result is 10-5", "5", 0, 0),
    ("Half of them, so 3/4", "0.75", 0, 0),
    ("#### 0.75", "0.75", 1, 1),
    ("#### .75", "0.75", 0, 0),
    ("She saves 50%", "50", 0, 1),
    ("#### 50%", "50", 1, 1),
    ("#### 9 apples", "9", 1, 1),
    ("#### 9 apples and 3 pears", "9", 1, 0),
    ("I do not know.", "9", 0, 0),
    ("", "9", 0, 0),
    ("Nine", "9", 0, 0),
    ("It is 9...", "9", 0, 0),
    ("It is 9 ...", "9", 0, 0),
    ("#### 9...", "9", 0, 0),
    ("x = 9\nTherefore, x = 9,", "9", 0, 1),
    ("**9**", "9", 0, 1),
    ("\\boxed{9}", "9", 0, 1),
    ("$9", "9", 0, 1),
    ("9$", "9", 0, 1),
    ("#### 9$", "9", 1, 1),
    ("A: 9 (see step 2)", "9", 0, 0),
    ("A: 9 (see step 2)", "2", 0, 1),
    ("#### nine", "9", 0, 0),
    ("## 9", "9", 0, 1),
    ("##### 9", "9", 1, 1),
    ("####  9", "9", 0, 1),
    ("#### \n9", "9", 0, 1),
    ("#### 9\n\nQuestion: How many legs have 4 dogs?\nAnswer: #### 16", "9", 1, 0),
    ("so the total is 1 000", "1000", 0, 0),
    ("so the total is 1e3", "1000", 0, 0),
    ("#### 1.000", "1000", 0, 0),
    ("#### 3 1/2", "3", 1, 0),
    ("Total: $3.50.", "3.50", 0, 1),
    ("#### 3.5", "3.50", 0, 0),
    ("#### ,5", "5", 1, 1),
    ("It takes 07 days", "7", 0, 0),
    ("2 * 4 = 8 legs.\nThe answer is 8 legs, that is -8 + 16.", "8", 0, 0),
    # and three of SmolLM2's
    ("The answer is 14.\n\nSo, there were 14 pieces taken by the guests.", "14", 0, 1),
    ("The total cost of 20 candles is 20 * $2.00 = $40. \nThis is the total cost multiplied by the price.", "20", 0, 0),
    ("So, John spends 120 minutes driving at 30mph, which is 120 minutes of his original 4 hours.", "45", 0, 0),
]


@pytest.mark.parametrize(("said", "right", "strict", "flexible"), BY_HAND)
def test_gsm8k_answers_are_scored_as_a_person_reads_the_rules(said, right, strict, flexible):
    found = answers.gsm8k(said, f"Some <<48/2=24>>steps.\n#### {right}")
    assert found == {"strict": bool(strict), "flexible": bool(flexible)}


def test_math_answers_are_equal_as_published(expected):
    assert [
        [int(answers.normalised(a) == answers.normalised(b)) for b in oracle.FORMULAS] for a in oracle.FORMULAS
    ] == (expected["math"])
    assert answers.is_equivalent("so it is $\\boxed{\\frac{1}{2}}$.", "Thus \\boxed{1/2}")
    assert not answers.is_equivalent("so it is 3", "Thus \\boxed{1/2}")


def test_instructions_are_checked_as_ifeval_checks_them(expected):
    given = [instructions.Instruction(*one) for one in oracle.INSTRUCTIONS]
    assert not [problem for one in given if (problem := instructions.problem_of(one))]
    for answer, wanted in zip(oracle.answered(), expected["instructions"], strict=True):
        strict, loose = instructions.follows(given, answer), instructions.follows_loosely(given, answer)
        found = [[int(a), int(b)] for a, b in zip(strict, loose, strict=True)]
        assert found == wanted, answer


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One. Two! Three?", 3),
        ("Dr. Smith paid 3.50 dollars. He left.", 2),
        ("J. R. Smith said hi", 1),
        ("1. First thing\n2. Second thing.", 1),
        ("", 0),
        ("No end", 1),
        ('"Go away." He went.', 2),
    ],
)
def test_sentences_are_counted(text, count):
    assert instructions.count_sentences(text) == count


def test_long_texts_are_scored_in_windows_each_token_once(opened, scorer, monkeypatch):
    ids = list(np.random.default_rng(1).integers(3, 250, size=50))
    whole = Document(ids, [0.0] + [1.0] * 49)
    monkeypatch.setattr(scorer, "longest", 20)
    parts = [ids[0:21], ids[20:41], ids[40:50]]
    apart = [Document(part, [0.0] + [1.0] * (len(part) - 1)) for part in parts]
    (_, loss), *_ = scorer.losses([whole])
    assert loss == pytest.approx(sum(value for _, value in scorer.losses(apart)), rel=1e-6)


def test_loss_is_that_of_the_plain_model(opened, scorer, tmp_path):
    from tunesmith.evaluate import texts

    task = read_task(written(tmp_path / "t.jsonl", {"text": "hello world"}, {"text": "a longer naïve text"}))
    assert task.kind == "loss"
    assert task.dataset is not None
    found = {item.id: one for item, one in texts.scores(scorer, opened.encoder, task.items, task.dataset)}
    scorer.as_it_was()
    for item in task.items:
        text = item.content.record.fields["text"]
        ids = torch.tensor([[*opened.tokenizer.encode(text), opened.tokenizer.eos_token_id]])
        with torch.no_grad():
            loss = opened.model(input_ids=ids, labels=ids).loss.item()
        one = found[item.id]
        assert one["loss_sum"] / one["target_tokens"] == pytest.approx(loss, rel=1e-5)
        assert one["target_bytes"] == len(text.encode()) - 1  # the first token is one byte, which nothing predicts


@pytest.mark.parametrize(
    ("record", "gold"),
    [
        ({"question": "q", "choices": ["x", "y"], "answer": 1}, 1),
        ({"question": "q", "choices": ["x", "y"], "answer": "B"}, 1),
        ({"question": "q", "choices": ["x", "y"], "answer": "(b)"}, 1),
        ({"question": "q", "choices": ["x", "y"], "answer": "y"}, 1),
        ({"question": "q", "choices": ["2", "1"], "answer": "1"}, 1),
        ({"question": "q", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"}, 1),
        ({"question": "q", "choices": ["x", "y"], "answer": 1.0}, 1),
        ({"ctx": "he ran", "endings": ["x", "y"], "label": "1"}, 1),
    ],
)
def test_the_right_choice_is_found_however_it_is_named(tmp_path, record, gold):
    (item,) = read_task(written(tmp_path / "q.jsonl", record)).items
    assert item.content.gold == gold


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"question": "q", "choices": ["x", "y"], "answer": 2}, "none of its 2 choices"),
        ({"question": "q", "choices": ["x", "y"], "answer": "z"}, "none of its 2 choices"),
        ({"question": "q", "choices": ["x"], "answer": 0}, "at least two"),
        ({"question": "q", "choices": ["x", ""], "answer": 0}, "empty"),
        ({"prompt": "p", "instruction_id_list": ["made:up"], "kwargs": [{}]}, "made:up is not known"),
        ({"prompt": "p", "instruction_id_list": ["keywords:existence"], "kwargs": [{}]}, "`keywords`"),
        ({"prompt": "p", "instruction_id_list": ["punctuation:no_comma"], "kwargs": []}, "one entry for each"),
        ({"turns": "one"}, "no list"),
    ],
)
def test_a_record_that_cannot_be_scored_is_told_with_its_line(tmp_path, record, words):
    with pytest.raises(UserError, match=r"q\.jsonl, line 1") as told:
        read_task(written(tmp_path / "q.jsonl", record))
    assert words in str(told.value)


def test_an_answer_is_right_where_it_is_one_of_those_of_a_list(tmp_path):
    task = read_task(written(tmp_path / "q.jsonl", {"question": "q", "answer": ["Mount Everest", "Everest", 8848]}))
    assert (task.kind, task.rule) == ("answers", "exact")
    (item,) = task.items
    scored = [answers.score(task, item.question, said)["exact"] for said in ("everest.", "8848", "K2")]
    assert scored == [1, 1, 0]
    for wrong in ([], [None], ["x", ""]):
        with pytest.raises(
            UserError, match=r"q\.jsonl, line 2: the field `answer` is missing, or no text or number, nor a"
        ):
            read_task(
                written(tmp_path / "q.jsonl", {"question": "q", "answer": ["x"]}, {"question": "p", "answer": wrong})
            )


@pytest.mark.parametrize("kind", ["choices", "letters"])
def test_equal_choices_of_an_item_are_said(tmp_path, kind):
    fine = {"question": "q", "choices": ["x", "y"], "answer": 0}
    assert equal_choices(read_task(written(tmp_path / "q.jsonl", fine), kind)) is None
    said = equal_choices(read_task(written(tmp_path / "q.jsonl", fine, {**fine, "choices": ["x", "y", "x "]}), kind))
    assert said is not None
    assert said.startswith("q: 1 of 2 questions have two choices that are the same")
    assert said.endswith("q.jsonl, line 2.")


def test_questions_that_lose_their_beginning_are_counted_and_choices_are_never_cut(opened, scorer, tmp_path):
    from tunesmith.serve.batch import generate

    short, long = {"question": "q", "choices": ["x", "y"], "answer": 0}, "long " * 200
    task = read_task(written(tmp_path / "q.jsonl", short, {**short, "question": long}))
    results = Results(tmp_path / "results", "q", model="m", task="t")
    for item, found in choices.scores(scorer, opened.tokenizer, task.items):
        results.add(item.id, found)
    results.close()
    again = cut_of(task, Results(tmp_path / "results", "q", model="m", task="t"))  # as kept by another process
    assert again is not None
    assert "1 of 2 questions are longer than the 512 tokens that the model sees and lose their beginning" in again
    assert again.endswith("q.jsonl, line 2.")
    items = read_task(written(tmp_path / "q.jsonl", short, {**short, "choices": ["x", long]})).items
    with pytest.raises(
        UserError, match=r"q\.jsonl, line 2: one of its choices has 1,001 tokens, and the model sees 512"
    ):
        list(choices.scores(scorer, opened.tokenizer, items))
    scorer.as_it_was()
    prompts = [opened.encoder.prompt([Message("user", text)]) for text in ("q", long)]
    said = []
    list(generate(opened.model, opened.encoder, prompts, max_tokens=4, cut=lambda *told: said.append(told)))
    assert said == [([1], 508)]


def test_what_is_no_task_is_told(tmp_path):
    for named, words in (("no_such", "neither a file nor a task"), ("wrong:x", "before the colon"), ("a,,b", "commas")):
        with pytest.raises(UserError, match=words):
            read_tasks([named])


def test_results_survive_a_kill_in_the_middle_of_a_line(tmp_path):
    first = Results(tmp_path, "a b/c", model="m", task="t")
    first.add("one", {"acc": 1})
    first.add("two", {"acc": 0})
    with first.path.open("ab") as file:
        file.write(b'{"item": "three", "ac')
    again = Results(tmp_path, "a b/c", model="m", task="t")
    assert again.known == {"one": {"acc": 1}, "two": {"acc": 0}}
    again.add("three", {"acc": 1})
    other_rank = Results(tmp_path, "a b/c", model="m", task="t", rank=1)
    other_rank.add("four", {"acc": 1})
    assert Results(tmp_path, "a b/c", model="m", task="t").known.keys() == {"one", "two", "three", "four"}
    assert not Results(tmp_path, "a b/c", model="another", task="t").known


def choices_differ(model, *, sizes=(30, 9)) -> tuple[bool, float]:
    """Whether contexts are shared, and by how much likelihoods then differ from the model's own, text by text."""
    chance = np.random.default_rng(3)
    trees = [
        Tree(chance.integers(3, 99, size).tolist(), tuple(chance.integers(3, 99, n).tolist() for n in (1, 5, 2)))
        for size in sizes
    ]
    scorer = Scorer(model)
    found = dict(scorer.choices(trees))
    scorer.as_it_was()
    own = [[scorer._own(tree.context, one) for one in tree.continuations] for tree in trees]
    return scorer.shares_contexts, max(abs(np.subtract(found[place], own[place])).max() for place in found)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=12))
def test_texts_are_their_paths_through_the_tree_and_long_beginnings_are_there_once(texts):
    nodes, ends = nodes_of(texts)
    keys, row = keys_of(nodes), [token for node in nodes for token in node.tokens]
    assert [node.at for node in nodes] == np.cumsum([0, *(len(node.tokens) for node in nodes)])[:-1].tolist()
    for text, end in zip(texts, ends, strict=True):
        assert [row[place] for place in keys[end]] == text
        assert nodes[end].end == len(text)
    children: dict[int | None, list[list[int]]] = {}
    for node in nodes:
        assert node.tokens
        children.setdefault(node.parent, []).append(list(node.tokens))
    for some in children.values():  # siblings have no long beginning in common
        assert all(common(a, b) < SHARED for n, a in enumerate(some) for b in some[n + 1 :])


def test_what_questions_begin_with_is_computed_once(opened, scorer, monkeypatch):
    from tunesmith.evaluate import score

    chance = np.random.default_rng(4)
    examples = chance.integers(3, 99, 40).tolist()

    def drawn(count):
        return chance.integers(3, 99, count).tolist()

    trees = [Tree([*examples, *drawn(10)], (drawn(1), drawn(3))) for _ in range(4)]
    seen = []
    monkeypatch.setattr(score, "token_losses", lambda *given: seen.append(given[1]) or token_losses(*given))
    found = dict(scorer.choices(trees))
    assert [len(one.tokens) for one in seen] == [40 + 4 * (10 + 2)]
    scorer.as_it_was()
    for place, tree in enumerate(trees):
        assert found[place] == pytest.approx([scorer._own(tree.context, one) for one in tree.continuations], abs=2e-4)


@pytest.mark.parametrize(
    ("family", "changes", "shares"),
    [
        ("bloom", {}, True),  # positions by ALiBi, in attention of its own
        ("mistral", {"sliding_window": 24}, True),  # one of the two rows exceeds the window
        ("mamba", {}, False),
    ],
)
def test_a_model_that_cannot_share_contexts_has_the_same_likelihoods(family, changes, shares):
    import families

    found, worst = choices_differ(families.tiny_model(family, **changes).eval())
    assert found == shares
    assert worst < 2e-4


@pytest.mark.slow
@pytest.mark.parametrize("family", __import__("families").causal_families())
def test_every_family_has_its_own_likelihoods(family):
    import families

    try:
        model = families.tiny_model(family).eval()
        model(input_ids=torch.arange(4)[None], use_cache=False)
    except Exception as error:  # no tiny one of it can be made, or called
        pytest.skip(f"{family}: {error}")
    try:
        _, worst = choices_differ(model)
    except UserError as refused:
        pytest.skip(str(refused))
    assert worst < 5e-3
