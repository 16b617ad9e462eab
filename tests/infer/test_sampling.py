"""Tokens are drawn as often as they are likely, and by the request's own number alone."""

from __future__ import annotations

import random

import torch

from tunesmith.infer.sampling import Choice, choose

PROBABILITIES = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])


def drawn(count: int, **options) -> torch.Tensor:
    chance = random.Random(0)
    given = {"temperature": 1.0, "top_p": 1.0, "top": None, **options}
    choices = [Choice(drawn=chance.random(), **given) for _ in range(count)]
    ids = [token.id for token in choose(PROBABILITIES.log().expand(count, -1), choices) if token]
    return torch.bincount(torch.tensor(ids), minlength=5) / count


def test_each_token_is_drawn_as_often_as_it_is_likely():
    count = 20_000
    spread = 4 * (PROBABILITIES * (1 - PROBABILITIES) / count).sqrt()
    assert ((drawn(count) - PROBABILITIES).abs() < spread).all()
    warm = PROBABILITIES.sqrt() / PROBABILITIES.sqrt().sum()
    assert ((drawn(count, temperature=2.0) - warm).abs() < 0.015).all()


def test_top_p_and_masks_leave_out_tokens_and_nothing_else():
    found = drawn(5_000, top_p=0.65)
    assert ((found - torch.tensor([4 / 7, 3 / 7, 0, 0, 0])).abs() < 0.03).all()
    masked = drawn(5_000, allowed_v=torch.tensor([False, True, False, True]))
    assert ((masked - torch.tensor([0, 0.75, 0, 0.25, 0])).abs() < 0.03).all()
    assert drawn(10, top_p=1e-9)[0] == 1.0


def test_the_last_bits_of_logits_do_not_matter():
    """Of other batches; also where many tokens are about as likely."""
    chance = random.Random(0)
    logits_bv = torch.randn(2000, 500, generator=torch.Generator().manual_seed(0)) * 1e-3
    choices = [Choice(1.0, 1.0, chance.random(), None) for _ in range(2000)]
    moved_bv = logits_bv + 1e-6 * torch.randn(2000, 500, generator=torch.Generator().manual_seed(1))
    assert choose(logits_bv, choices) == choose(moved_bv, choices)


def test_what_is_known_to_be_likeliest_is_taken_where_that_is_wanted_and_nothing_else():
    logits_bv = PROBABILITIES.log().expand(2, -1)
    greedy = Choice(0.0, 1.0, 0.5, None)
    known = lambda: [1, 2]  # noqa: E731
    assert [token.id for token in choose(logits_bv, [greedy, greedy], known) if token] == [1, 2]
    others = [greedy, Choice(0.0, 1.0, 0.5, 1)], [greedy, Choice(0.0, 1.0, 0.5, None, torch.arange(5) == 4)]
    for choices in others:
        assert choose(logits_bv, choices, known) == choose(logits_bv, choices)
