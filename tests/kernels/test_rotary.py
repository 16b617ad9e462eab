from __future__ import annotations

import pytest
import torch
from interpreted import run_interpreted

from tunesmith.kernels import reference
from tunesmith.kernels.lowrank import quantize_rows
from tunesmith.kernels.lowrank_qkv import lowrank_qkv
from tunesmith.kernels.rotary import PAIRS, rotate_joint, rotate_pair

TOKENS, INPUTS, SIZE, RANK = 6, 32, 16, 4
ROWS = (64, 32, 32)
"""Outputs of queries, keys and values: four heads over two."""


def draw(*shape: int, seed: int = 0, size: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * size


def test_the_kernel_is_right_in_the_interpreter():
    assert "rotary: 36 cases" in run_interpreted("check_rotary")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_is_right_on_the_gpu():
    from kernel_cases import check_rotary

    check_rotary("cuda", (torch.bfloat16,))


def assert_equal_with_gradients(found, wanted, leaves):
    directions = [draw(*one.shape, seed=3).float() for one in wanted]
    gradients = (torch.autograd.grad(some, leaves, directions) for some in (found, wanted))
    for ours, plain in ((found, wanted), tuple(gradients)):
        for one, want in zip(ours, plain, strict=True):
            torch.testing.assert_close(one, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("turned", [SIZE, SIZE // 2])
@pytest.mark.parametrize("pairs", PAIRS)
def test_rotations_and_their_gradients_are_those_of_the_plain_one(pairs, turned):
    leaves = [draw(TOKENS, heads, SIZE, seed=heads).float().requires_grad_() for heads in (4, 2)]
    angles = draw(TOKENS, turned, seed=1).float(), draw(TOKENS, turned, seed=2).float()
    wanted = [reference.rotate(leaf, *angles, pairs) for leaf in leaves]
    assert_equal_with_gradients(rotate_pair(*leaves, *angles, pairs), wanted, leaves)

    joint = draw(TOKENS, sum(ROWS), seed=5).float().requires_grad_()
    q, k, v = (part.unflatten(1, (-1, SIZE)) for part in joint.split(ROWS, 1))
    wanted = [reference.rotate(q, *angles, pairs), reference.rotate(k, *angles, pairs), v]
    assert_equal_with_gradients(rotate_joint(joint, *angles, 2, SIZE, pairs), wanted, [joint])


@pytest.mark.parametrize(
    ("fp8", "cache_transposed", "pairs", "turned"),
    [(False, False, 0, SIZE), (True, False, 0, SIZE), (True, True, 0, SIZE), (False, False, 2, SIZE // 2)],
)
def test_the_joint_product_is_that_of_plain_linears_rotated(fp8, cache_transposed, pairs, turned):
    weight, bias = draw(sum(ROWS), INPUTS, seed=1, size=0.2), draw(sum(ROWS), seed=2)
    cos, sin = draw(TOKENS, turned, seed=3), draw(TOKENS, turned, seed=4)
    shapes = ((TOKENS, INPUTS), (3 * RANK, INPUTS), (sum(ROWS), 3 * RANK))
    exact = [draw(*shape, seed=5 + at, size=0.3).requires_grad_() for at, shape in enumerate(shapes)]
    held, scale = weight.float(), None
    if fp8:
        held, scale = quantize_rows(weight.float())
        weight, scale = (held.float() * scale).double(), scale.squeeze(1)
    transposed = held.t().contiguous() if cache_transposed else None
    leaves = [leaf.detach().float().requires_grad_() for leaf in exact]
    x, a, b = exact
    y = x @ weight.t() + (x @ a.t()) @ b.t() + bias
    parts = [part.unflatten(1, (-1, SIZE)) for part in y.split(ROWS, 1)]
    wanted = [reference.rotate(parts[0], cos, sin, pairs), reference.rotate(parts[1], cos, sin, pairs), parts[2]]
    angles, form = (cos.float(), sin.float()), (ROWS[1] // SIZE, SIZE, pairs)
    found = lowrank_qkv(leaves[0], held, scale, *leaves[1:], bias.float(), ROWS, transposed, *angles, *form)
    directions = [draw(*one.shape, seed=9) for one in wanted]
    gradients = torch.autograd.grad(found, leaves, [one.float() for one in directions])
    for one, want in zip((*found, *gradients), (*wanted, *torch.autograd.grad(wanted, exact, directions)), strict=True):
        assert (one.double() - want).norm() <= (3e-2 if fp8 else 1e-5) * want.norm()


def test_the_joint_product_is_not_kept():
    x = draw(TOKENS, INPUTS).float().requires_grad_()
    factors = draw(3 * RANK, INPUTS).float().requires_grad_(), draw(sum(ROWS), 3 * RANK).float().requires_grad_()
    cos = draw(TOKENS, SIZE).float()
    weight, form = draw(sum(ROWS), INPUTS).float(), (ROWS[1] // SIZE, SIZE)
    found = lowrank_qkv(x, weight, None, *factors, None, ROWS, None, cos, cos, *form)
    assert all(part.untyped_storage().nbytes() == part.numel() * 4 for part in found)
    kept = [one for one in found[0].grad_fn.saved_tensors if one is not None]
    assert not any(one.shape == (TOKENS, sum(ROWS)) for one in kept)
