"""Odd shapes, dtypes and options for each Triton kernel; run by the tests, in the interpreter or on a GPU."""

from __future__ import annotations

import sys

import torch

from tunesmith.kernels import reference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def check_cross_entropy(device: str, dtypes=(torch.float32, torch.float16)) -> None:
    from tunesmith.kernels.cross_entropy import cross_entropy_

    cases = 0
    for dtype in dtypes:
        for rows, vocabulary in ((1, 5), (7, 1000), (3, 8193)):
            for scale, softcap in ((1.0, None), (0.5, 20.0)):
                generator = torch.Generator().manual_seed(rows)
                logits = (torch.randn(rows, vocabulary, generator=generator) * 4).to(dtype).to(device)
                labels = torch.randint(vocabulary, (rows,), generator=generator).to(device)
                weights = torch.rand(rows, generator=generator).to(device)
                # The identity as weight matrix makes the reference's logits the ones given here.
                exact = logits.double().requires_grad_()
                identity = torch.eye(vocabulary, dtype=torch.float64, device=device)
                total, expected = reference.linear_cross_entropy(
                    exact, identity, labels, weights, torch.arange(rows, device=device), scale=scale, softcap=softcap
                )
                (gradient,) = torch.autograd.grad(total, exact)
                found = logits.clone()
                losses = cross_entropy_(found, labels, weights, scale=scale, softcap=softcap)
                torch.testing.assert_close(losses, expected.float(), rtol=1e-4, atol=1e-4)
                error = (found.double() - gradient).norm() / gradient.norm()
                assert error < TOLERANCE[dtype], (dtype, rows, vocabulary, scale, softcap, error)
                untouched = logits.clone()
                cross_entropy_(untouched, labels, weights, scale=scale, softcap=softcap, needs_gradient=False)
                assert torch.equal(untouched, logits)
                cases += 1
    print(f"cross_entropy: {cases} cases")


if __name__ == "__main__":
    check_cross_entropy(sys.argv[1])
