"""What is decoded together, with others joining and leaving, is what transformers generates alone."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

from families import VOCABULARY, tiny_model
from tunesmith.errors import UserError
from tunesmith.infer.call import try_out
from tunesmith.infer.decoding import asked_of
from tunesmith.infer.speculate import Draft, Drafted, Lookup, Pace
from tunesmith.serve.engine import Engine, Job, Limits, Reason

LIMITS = Limits(batch=8, queue=100, length=128, cache_tokens=512)


class Asked:
    """A job, and what came of it."""

    def __init__(self, prompt: list[int], most: int, stops: frozenset[int] = frozenset(), **options: Any):
        self.tokens: list[int] = []
        self.reason: Reason | None = None
        self.is_done = threading.Event()
        self.job = Job("one", prompt, most, stops, self.take, self.end, **{"temperature": 0.0, **options})

    def take(self, token) -> bool:
        self.tokens.append(token.id)
        return False

    def end(self, reason: Reason) -> None:
        assert self.reason is None, "it ended twice"
        self.reason = reason
        self.is_done.set()


def run_all(engine: Engine, asked: list[Asked]) -> None:
    for one in asked:
        engine.submit(one.job)
    for one in asked:
        assert one.is_done.wait(60)


def generated(model, prompt: list[int], most: int, stop: int | None) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": most, "do_sample": False, "eos_token_id": stop, "pad_token_id": 0}
    with torch.inference_mode():
        made = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
    return made[:-1] if stop is not None and made[-1:] == [stop] else made


def check_family(family: str) -> bool:
    """Twelve prompts of varied lengths, more than fit at once, decoded speculatively where the model allows it; returns
    whether they were decoded together."""
    model = tiny_model(family)
    tried, decoding = try_out(model), asked_of(model).decoding  # BART and its like force the end of what is cut off
    engine = Engine(model, lambda _: None, LIMITS, is_shared=tried.is_shared, is_wide=tried.is_wide)
    engine._reads_batches = tried.is_shared  # as on a GPU
    chance = random.Random(0)
    asked, expected = [], []
    for _ in range(12):
        prompt = [chance.randrange(3, VOCABULARY) for _ in range(chance.randint(1, 20))]
        most, stop = chance.randint(1, 24), chance.choice([None, 7])
        asked.append(Asked(prompt, most, frozenset([stop] if stop is not None else []), decoding=decoding))
        expected.append(generated(model, prompt, most, stop))
    engine.start()
    try:
        run_all(engine, asked)
        assert [one.tokens for one in asked] == expected
        assert {one.reason for one in asked} <= {"stop", "length"}
        assert (engine.running, engine.waiting, engine.cached_tokens) == (0, 0, 0)
        assert not tried.is_wide or engine.stats.proposed_tokens > 0
    finally:
        engine.close()
    return tried.is_shared


@pytest.fixture
def always_tried(monkeypatch):
    """Whether proposals pay is a matter of the clock; here they are made all the time."""
    monkeypatch.setattr(Pace, "may_try", lambda self, rows: True)


@pytest.mark.parametrize(
    ("family", "is_shared"),
    [("llama", True), ("gemma3_text", True), ("gpt2", True), ("lfm2_moe", False), ("bart", False)],
)
def test_greedy_tokens_are_those_of_generate_whoever_joins_and_leaves(family, is_shared, always_tried):
    assert check_family(family) == is_shared


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama")


@pytest.fixture
def engine(llama):
    made = Engine(llama, lambda _: None, LIMITS, is_shared=True)
    made.start()
    yield made
    made.close()


def test_a_seed_gives_the_same_tokens_alone_and_among_others(engine):
    options = {"temperature": 1.0, "top_p": 0.9}
    alone = Asked([5, 6, 7], 30, seed=11, **options)
    run_all(engine, [alone])
    again = Asked([5, 6, 7], 30, seed=11, **options)
    others = [Asked([9] * size, 12, seed=size, **options) for size in range(1, 7)]
    run_all(engine, [*others[:3], again, *others[3:]])
    assert again.tokens == alone.tokens
    other = Asked([5, 6, 7], 30, seed=12, **options)
    run_all(engine, [other])
    assert other.tokens != alone.tokens


def test_a_cancelled_request_frees_its_cache_and_the_others_go_on(engine, llama):
    kept, gone = Asked([5, 6, 7], 40), Asked([8] * 60, 60)
    gone.take = lambda token: engine.cancel(gone.job)  # as soon as it has its first token
    gone.job.take = gone.take
    run_all(engine, [gone, kept])
    assert gone.reason == "cancelled"
    assert gone.job.generated <= 2
    assert kept.tokens == generated(llama, [5, 6, 7], 40, None)
    assert engine.cached_tokens == 0


def test_the_cache_never_holds_more_than_its_limit(engine, llama):
    most = 0
    asked = [Asked([4] * size, 40) for size in (1, 80, 3, 50, 2, 88, 7, 1)]

    def looking(one: Asked):
        def take(token) -> bool:
            nonlocal most
            most = max(most, engine.cached_tokens)
            return one.take(token)

        return take

    for one in asked:
        one.job.take = looking(one)
    run_all(engine, asked)
    assert 0 < most <= LIMITS.cache_tokens
    assert all(len(one.tokens) == 40 for one in asked)


def test_an_answer_that_fails_takes_no_other_with_it(engine, llama):
    good, bad = Asked([5, 6, 7], 20), Asked([8, 9], 20)

    def fail(token) -> bool:
        raise KeyError("secret")

    bad.job.take = fail
    run_all(engine, [bad, good])
    assert bad.reason == "failed"
    assert good.tokens == generated(llama, [5, 6, 7], 20, None)


def test_a_grammar_that_fails_takes_no_other_with_it(engine, llama):
    class Broken:
        def allowed(self):
            if bad.tokens:
                raise RuntimeError
            return torch.ones(VOCABULARY, dtype=torch.bool)

        def take(self, token):
            return False

    good, bad = Asked([5, 6, 7], 20), Asked([8, 9], 20, grammar=Broken())
    run_all(engine, [bad, good])
    assert (bad.reason, len(bad.tokens)) == ("failed", 1)
    assert good.tokens == generated(llama, [5, 6, 7], 20, None)


def test_a_request_that_takes_too_long_is_ended(engine):
    asked = Asked([5, 6, 7], 100, deadline=0.0)
    run_all(engine, [asked])
    assert asked.reason == "timeout"


def decoded(model, *, most: int, count: int, **options: Any) -> tuple[list[list[int]], Engine]:
    """Drawn and greedy answers to prompts that repeat themselves."""
    engine = Engine(model, lambda _: None, LIMITS, is_shared=True, **options)
    engine.start()
    asked = [
        Asked([9 + n, 5, 6, 7] * (1 + n % 3), most - n, temperature=n % 2 * 0.7, top_p=0.9, seed=n)
        for n in range(count)
    ]
    try:
        run_all(engine, asked)
        assert engine.cached_tokens == 0
    finally:
        engine.close()
    return [one.tokens for one in asked], engine


def test_speculative_answers_drawn_ones_too_are_those_without(llama, always_tried):
    plain, _ = decoded(llama, most=40, count=6)
    found, engine = decoded(llama, most=40, count=6, is_wide=True)
    assert found == plain
    assert 5 < engine.stats.accepted_tokens < engine.stats.proposed_tokens


def test_a_draft_model_changes_no_answer_and_one_that_is_the_model_itself_is_always_right(llama, always_tried):
    plain, _ = decoded(llama, most=24, count=4)
    for other in (llama, tiny_model("gpt2")):
        found, engine = decoded(llama, most=24, count=4, is_wide=True, draft=Draft(other, VOCABULARY, 40))
        assert found == plain
    engine = Engine(llama, lambda _: None, LIMITS, is_shared=True, is_wide=True, draft=Draft(llama, VOCABULARY, None))
    asked = Asked([5, 9, 11, 3], 30)
    engine.start()
    run_all(engine, [asked])
    engine.close()
    assert asked.tokens == generated(llama, [5, 9, 11, 3], 30, None)
    assert engine.stats.steps <= 10


def test_a_draft_goes_on_from_what_it_has_read_rightly(llama):
    draft, state = Draft(llama, VOCABULARY, None), Drafted()
    with torch.inference_mode():
        first = draft.propose(state, ["a", "b"], [[5, 6, 7], [8, 9, 10, 11, 12]], 4)
        texts = [[5, 6, 7, *first[0][:2], 3], [8, 9, 10, 11, 12, 4]]
        again = draft.propose(state, ["a", "b", "c"], [*texts, [3, 4]], 3)
    assert first == [generated(llama, [5, 6, 7], 4, None), generated(llama, [8, 9, 10, 11, 12], 4, None)]
    assert again == [generated(llama, text, 3, None) for text in [*texts, [3, 4]]]
    state.keep(["c"])
    assert state.fed == [[3, 4, *again[2][:2]]]


def test_prompt_lookup_proposes_what_came_after_the_same_tokens_and_less_after_wrong_ones():
    lookup = Lookup([1, 2, 3, 4, 5, 9, 9, 1, 2, 3])
    assert lookup.propose(3) == [4, 5, 9]
    assert Lookup([7, 1, 2, 1, 2]).propose(8) == [1, 2, 1, 2]
    assert Lookup([1, 2, 3]).propose(8) == []
    lookup.learn(3, 0)
    assert (lookup.propose(3), lookup.propose(3)) == ([], [4, 5])


def test_proposals_rest_where_they_make_fewer_tokens_a_second_and_are_tried_again():
    pace = Pace()
    assert not pace.may_try(1), "nothing to compare with"
    pace.note(1, 1, 0.01, is_wide=False)
    assert pace.may_try(1)
    wide = steps = 0
    while steps < 2000:
        is_wide = pace.may_try(1)
        wide += is_wide
        steps += 1
        pace.note(1, 1, 0.02 if is_wide else 0.01, is_wide=is_wide)
    assert 2 <= wide < 20
    pace.note(8, 8, 0.01, is_wide=False)
    pace.note(8, 24, 0.02, is_wide=True)
    assert pace.may_try(8)


@pytest.mark.slow
def test_every_family_is_decoded_as_generate_does_or_refused(always_tried):
    """All causal families that transformers has; those that do not run here at all say nothing of the engine."""
    from families import causal_families

    wrong, shared, alone, refused = {}, [], [], []
    for family in causal_families():
        try:
            model = tiny_model(family)
            generated(model, [5, 6, 7], 4, None)
        except Exception:
            continue
        try:
            (shared if check_family(family) else alone).append(family)
        except UserError:
            refused.append(family)
        except AssertionError as error:
            wrong[family] = str(error)[:200]
    print(f"{len(shared)} together, {len(alone)} alone {alone}, {len(refused)} refused {refused}")
    assert not wrong
    assert len(shared) > 100
    assert len(alone) > 30


def test_a_model_that_keeps_its_states_to_itself_is_refused():
    with pytest.raises(UserError, match=r"^RecurrentGemmaForCausalLM does not give with a key-value cache what"):
        try_out(tiny_model("recurrent_gemma"))
