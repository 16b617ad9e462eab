from __future__ import annotations

import random

import pytest
import torch
from interpreted import run_interpreted

from tunesmith.kernels import update


def test_the_kernel_is_right_in_the_interpreter():
    assert "update: 52 cases" in run_interpreted("check_update")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_is_right_on_the_gpu():
    from kernel_cases import check_update

    check_update("cuda")


def test_rows_rounded_apart_are_what_they_are_together(monkeypatch):
    values = torch.randn(30, 7, generator=torch.Generator().manual_seed(0))
    whole = update.halved(values, torch.bfloat16)
    monkeypatch.setattr(update, "PIECE", 16)
    parts = [
        update.halved(rows, torch.bfloat16, start=7 * start) for start, rows in ((0, values[:11]), (11, values[11:]))
    ]
    assert torch.equal(whole, torch.cat(parts))
    assert ((whole.float() - values).abs() < 2**-7 * values.abs()).all()  # one of the two beside it
    assert update.halved(values, torch.float32) is values
    assert torch.equal(update.halved(values, torch.float16), values.half())


def test_rounding_at_random_is_right_on_average_and_leaves_what_bf16_has():
    values = torch.full((100_000,), 1.001)
    assert update.halved(values, torch.bfloat16).double().mean().item() == pytest.approx(1.001, abs=5e-5)
    held = torch.randn(1000).bfloat16()
    assert torch.equal(update.halved(held.float(), torch.bfloat16), held)


def test_what_is_no_number_stays_so():
    nan = torch.full((64,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # as GPUs make it
    assert update.halved(nan, torch.bfloat16).isnan().all()
    assert update.halved(torch.full((64,), float("-inf")), torch.bfloat16).isneginf().all()


def halved_once(values: torch.Tensor, seed: int) -> torch.Tensor:
    made = torch.empty(values.shape, dtype=torch.bfloat16)
    update.halve_into(made, values.clone(), random.Random(seed))
    return made


def test_weights_that_are_rounded_once_have_their_value_as_the_mean():
    values = torch.full((300, 1000), 1.001)
    made = halved_once(values, seed=3)
    assert made.double().mean().item() == pytest.approx(1.001, abs=5e-5)
    assert set(made.unique().tolist()) == {1.0, 1.0078125}
    assert torch.equal(made, halved_once(values, seed=3))
    assert not torch.equal(made, halved_once(values, seed=4))
    held = torch.randn(70_000).bfloat16()
    assert torch.equal(halved_once(held.float(), seed=0), held), "what bf16 holds stays as it is"
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    assert halved_once(odd, seed=0).isnan().tolist() == [True, False, False, False]
    assert halved_once(odd[1:2], seed=0).isposinf()


def test_the_nearest_to_what_is_lifted_is_what_chance_wanted_and_it_comes_down_as_it_was(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(100, 70, generator=generator) * torch.randn(100, 70, generator=generator).exp()
    values[0, :10], values[1] = 0.0, values[1].bfloat16().float()
    values[2, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    held = values.clone()
    update.preround_(held, start=5)
    assert torch.equal(
        held.bfloat16().view(torch.int16), update.halved(values, torch.bfloat16, start=5).view(torch.int16)
    )
    assert torch.equal(held[1], values[1])
    assert 0.2 < (held != values).float().mean() < 0.3  # where chance and the nearest disagree
    monkeypatch.setattr(update, "PIECE", 64)
    update.undo_preround_(held[:50], start=5)
    update.undo_preround_(held[50:], start=5 + 50 * 70)
    assert torch.equal(held.view(torch.int32), values.view(torch.int32))


def test_what_lies_in_the_middle_or_next_to_nothing_is_lifted_too():
    middle = torch.full((1000,), 0x3F808000, dtype=torch.int32).view(torch.float32)
    update.preround_(middle)
    assert middle.bfloat16().float().unique().tolist() == [1.0, 1.0078125]
    update.undo_preround_(middle)
    torch.testing.assert_close(middle, torch.full((1000,), 1.00390625), rtol=1e-6, atol=0)
    nothing = torch.tensor([1e-45, -1e-41, 0.0])
    update.preround_(nothing)
    update.undo_preround_(nothing)
    assert not nothing.any()
