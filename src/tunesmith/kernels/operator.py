"""Operators that compiled layers call without looking inside.

`torch.library.custom_op` does the same with checks around each call that cost a CPU 28 microseconds, where these
cost 3 (docs/lab.md): a layer has fifteen of them, and small models wait for the CPU. What is given up are checks
that no output shares memory with an input, and an error where a gradient is asked for that was not registered.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._ops import OpOverload

_library = torch.library.Library("tunesmith", "DEF")


def operator(name: str) -> Callable[[Callable], OpOverload]:
    """For a function that changes none of its arguments: `torch.ops.tunesmith.NAME`. Shapes for the compiler and
    gradients are added by `torch.library.register_fake` and `register_autograd`."""

    def define(function: Callable) -> OpOverload:
        schema = torch.library.infer_schema(function, mutates_args=())
        _library.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
        _library.impl(name, function, "CompositeExplicitAutograd")
        return getattr(torch.ops.tunesmith, name).default

    return define


def register_backward(forward: OpOverload, backward: OpOverload) -> None:
    """For operators of attention: `forward` takes q, k, v, queries, keys and options, and gives the output and
    logarithms; `backward` takes the output's gradient, all of these in this order, and gives those of q, k and v."""

    @torch.library.register_fake(backward)
    def _(d_out, q, k, v, *_):
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    def save(ctx, inputs, output):
        q, k, v, queries, keys, *ctx.options = inputs
        ctx.save_for_backward(q, k, v, *output, queries, keys)

    def gradients(ctx, d_out, _):
        return *backward(d_out, *ctx.saved_tensors, *ctx.options), *[None] * (2 + len(ctx.options))

    torch.library.register_autograd(forward, gradients, setup_context=save)
