"""Odd shapes, dtypes and options for each Triton kernel; run by the tests, in the interpreter or on a GPU."""

from __future__ import annotations

import itertools
from unittest.mock import patch

import torch
import torch.nn.functional as F

from tunesmith.kernels import reference
from tunesmith.kernels.gating import GELU, GELU_TANH, SILU, Gating

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def between_nans(logits: torch.Tensor) -> torch.Tensor:
    """The same, with rows that begin at multiples of 16 values and padding that must not be used."""
    rows, vocabulary = logits.shape
    places = torch.full((rows, -(-vocabulary // 16) * 16), float("nan"), dtype=logits.dtype, device=logits.device)
    return places[:, :vocabulary].copy_(logits)


def check_cross_entropy(device: str, dtypes=(torch.float32, torch.float16)) -> None:
    from tunesmith.kernels.cross_entropy import cross_entropy_

    cases = 0
    for dtype in dtypes:
        for rows, vocabulary in ((1, 5), (7, 1000), (3, 8193)):
            for scale, softcap, z_loss in ((1.0, None, 0.0), (0.5, 20.0, 0.1)):
                generator = torch.Generator().manual_seed(rows)
                logits = (torch.randn(rows, vocabulary, generator=generator) * 4).to(dtype).to(device)
                labels = torch.randint(vocabulary, (rows,), generator=generator).to(device)
                weights = torch.rand(rows, generator=generator).to(device)
                # The identity as hidden states makes the reference's logits the ones given here.
                exact = logits.double().requires_grad_()
                identity = torch.eye(rows, dtype=torch.float64, device=device)
                given = {"scale": scale, "softcap": softcap, "z_loss": z_loss}
                rows_n = torch.arange(rows, device=device)
                total, expected = reference.linear_cross_entropy(identity, exact.t(), labels, weights, rows_n, **given)
                (gradient,) = torch.autograd.grad(total, exact)
                found = logits.clone()
                losses, log_totals = cross_entropy_(found, labels, weights, **given)
                torch.testing.assert_close(losses, expected.float(), rtol=1e-4, atol=1e-4)
                with_penalties = ((losses + z_loss * log_totals.square()) * weights).sum().double()
                torch.testing.assert_close(with_penalties, total, rtol=1e-4, atol=1e-4)
                error = (found.double() - gradient).norm() / gradient.norm()
                assert error < TOLERANCE[dtype], (dtype, rows, vocabulary, scale, softcap, error)
                apart = between_nans(logits)
                close = {"rtol": 1e-3, "atol": 1e-5}  # sums in another order
                torch.testing.assert_close(cross_entropy_(apart, labels, weights, **given)[0], losses, **close)
                assert (apart.double() - gradient).norm() / gradient.norm() < TOLERANCE[dtype]
                assert torch.isfinite(apart.as_strided((rows, apart.stride(0)), apart.stride())).all()
                untouched = logits.clone()
                cross_entropy_(untouched, labels, weights, **given, needs_gradient=False)
                assert torch.equal(untouched, logits)
                cases += 1
    print(f"cross_entropy: {cases} cases")


def check_cross_entropy_fp8(device: str, values_dtype=torch.float32) -> None:
    """The gradient in two parts; before rounding where `values_dtype` is wide."""
    from tunesmith.kernels.cross_entropy import cross_entropy_, cross_entropy_fp8

    cases = 0
    for rows, vocabulary, width in ((1, 1, 16), (1, 5, 16), (7, 1000, 1008), (3, 8193, 8208)):
        for scale, softcap, z_loss in ((1.0, None, 0.0), (0.5, 20.0, 0.1)):
            generator = torch.Generator().manual_seed(rows)
            logits = (torch.randn(rows, vocabulary, generator=generator) * 4).to(torch.float16).to(device)
            labels = torch.randint(vocabulary, (rows,), generator=generator).to(device)
            logits[-1, labels[-1]] = 40.0  # a label that is nearly certain
            weights = torch.rand(rows, generator=generator).to(device)
            exact = logits.double().requires_grad_()
            identity = torch.eye(rows, dtype=torch.float64, device=device)
            given = {"scale": scale, "softcap": softcap, "z_loss": z_loss}
            rows_n = torch.arange(rows, device=device)
            total, _ = reference.linear_cross_entropy(identity, exact.t(), labels, weights, rows_n, **given)
            (gradient,) = torch.autograd.grad(total, exact)
            values = torch.full((rows, width), 7.0, device=device).to(values_dtype)
            losses, log_totals, scales, owns = cross_entropy_fp8(between_nans(logits), labels, weights, values, **given)
            for found, expected in zip(
                (losses, log_totals), cross_entropy_(logits, labels, weights, **given), strict=True
            ):
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
            values = values.double()
            assert values[:, vocabulary:].abs().sum() == 0
            assert values.gather(1, labels[:, None]).abs().sum() == 0
            if softcap is None and vocabulary > 1:
                assert (values.amax(1) == 448.0).all()
            own = gradient.gather(1, labels[:, None])
            torch.testing.assert_close(owns.double(), own, rtol=1e-4, atol=1e-6)
            others = gradient.scatter(1, labels[:, None], 0.0)
            error = (values[:, :vocabulary] * scales - others).norm(dim=1)
            bound = {torch.float32: 1e-4, torch.float8_e4m3fn: 2**-4}[values_dtype]
            assert (error <= bound * others.norm(dim=1)).all(), (rows, vocabulary, scale, softcap, error)
            cases += 1
    print(f"cross_entropy in fp8: {cases} cases")


def check_distillation(device: str, dtypes=(torch.float32, torch.float16)) -> None:
    """Losses and gradients of the kernels against the plain version, in fp64 up to the kernel's rounding."""
    from tunesmith.kernels import distillation
    from tunesmith.kernels.linear_distillation import Lesson, Taught, rest_of, weighted_losses_

    cases = 0
    forms = ((1.0, 0, 1.0, None), (2.5, 3, 0.5, 20.0))  # temperature, padding of the head, scale, soft cap
    for dtype in dtypes:
        for rows, vocabulary, count in ((2, 8, 8), (3, 300, 7), (2, 4099, 64)):
            for kind in distillation.KINDS if dtype == torch.float32 or vocabulary == 300 else ():
                for temperature, padding, scale, softcap in forms if vocabulary < 4099 else forms[1:]:
                    generator = torch.Generator().manual_seed(rows)
                    width = vocabulary + padding
                    logits = (torch.randn(rows, width, generator=generator) * 4).to(dtype).to(device)
                    labels = torch.randint(vocabulary, (rows,), generator=generator).to(device)
                    weights = torch.rand(rows, generator=generator).to(device)
                    teacher = (torch.randn(rows, vocabulary, generator=generator) * 4).to(dtype).to(device)
                    teacher[-1, 0] = -torch.inf
                    exact = torch.log_softmax(teacher.double() / temperature, -1).float()
                    top_ck, ids_ck = exact.topk(count, -1)
                    rest = [rest_of(exact, ids_ck)] if count < vocabulary else []
                    labels[-1] = ids_ck[-1, 0]  # a label among the likeliest
                    lesson = Lesson(lambda *_: None, kind, temperature, 0.6, vocabulary)
                    form = distillation.Form(kind, temperature, 0.6, vocabulary, scale, softcap)
                    for ids in (None, ids_ck):
                        taught = Taught(exact) if ids is None else Taught(torch.cat([top_ck, *rest], 1), ids)
                        plain = (logits.float().cpu(), labels.cpu(), weights.cpu())
                        host = Taught(taught.logps.cpu(), None if ids is None else ids.cpu())
                        parts, gradient = weighted_losses_(*plain, host, lesson, scale, softcap)
                        found, unchanged = logits.clone(), logits.clone()
                        if ids is None:
                            given = (labels, weights, teacher, temperature, form)
                            own = distillation.of_all_(found, *given)
                            again = distillation.of_all_(unchanged, *given, needs_gradient=False)
                            assert torch.equal(unchanged, logits)
                        else:
                            given = (labels, weights, taught.logps, ids, form)
                            own = distillation.of_likeliest_(found, *given)
                            again = distillation.of_likeliest_(unchanged, *given, needs_gradient=False)
                        case = (dtype, rows, vocabulary, kind, temperature, ids is None)
                        torch.testing.assert_close(own.cpu(), parts, rtol=1e-4, atol=1e-5, msg=str(case))
                        assert torch.equal(own, again), case
                        error = (found.float().cpu() - gradient).norm() / gradient.norm().clamp(min=1e-3)
                        assert error < TOLERANCE[dtype], (case, error)
                        cases += 1
    print(f"distillation: {cases} cases")


def check_add_lowrank(device: str, dtypes=(torch.float32, torch.float16)) -> None:
    from tunesmith.kernels.add_lowrank import add_lowrank_

    cases = 0
    for dtype in dtypes:
        for rows, columns, rank in ((1, 1, 1), (65, 300, 16), (7, 513, 33)):
            generator = torch.Generator().manual_seed(rows)
            y = torch.randn(rows, columns, generator=generator).to(dtype).to(device)
            low = torch.randn(rows, rank, generator=generator).to(dtype).to(device)
            up = torch.randn(columns, rank, generator=generator).to(dtype).to(device).t()
            expected = y.double() + low.double() @ up.double()
            found = add_lowrank_(y, low, up)
            assert found is y
            assert (found.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm(), (
                dtype,
                rows,
                columns,
                rank,
            )
            cases += 1
    print(f"add_lowrank: {cases} cases")


def clamped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """As gpt-oss has it, with a limit that many values reach."""
    gate, up = gate.clamp(min=None, max=1.5), up.clamp(min=-1.5, max=1.5)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


GATINGS = {
    SILU: reference.silu_gated,
    GELU: lambda gate, up: F.gelu(gate) * up,
    GELU_TANH: lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    Gating("sigmoid", 1.702, 1.5, 1.0): clamped,
}


def check_other_gates(device: str) -> None:
    """The kernels with the activations that are not SiLU."""
    for gating in list(GATINGS)[1:]:
        check_swiglu(device, (torch.float32,), gating=gating, sizes=((37, 130, 4),))
        check_gated(device, (torch.float32,), gating=gating, sizes=((7, 100),))
    print("other gates: ok")


SIZES = ((1, 16, 1), (37, 130, 4), (64, 256, 16), (5, 48, 33), (600, 40, 8))


def check_swiglu(
    device: str, dtypes=(torch.float32, torch.float16), fp8: bool = False, gating=SILU, sizes=SIZES
) -> None:
    from tunesmith.kernels.swiglu import swiglu, swiglu_backward

    cases = 0
    for dtype in dtypes:
        for tokens, intermediate, rank in sizes:
            generator = torch.Generator().manual_seed(tokens)

            def draw(*shape: int, generator=generator, dtype=dtype) -> torch.Tensor:
                return torch.randn(*shape, generator=generator).to(dtype).to(device)

            y, low = draw(tokens, 2 * intermediate), draw(tokens, 2 * rank) * 0.3
            b_gate, b_up, d_act = draw(intermediate, rank), draw(intermediate, rank), draw(tokens, intermediate)
            g, a_down = draw(tokens, rank), draw(rank, intermediate)
            scale_in = torch.rand(2 * intermediate, generator=generator).to(device) + 0.5
            exact = [tensor.double().requires_grad_() for tensor in (y, b_gate, b_up, a_down)]
            expected = reference.swiglu(exact[0], low.double(), exact[1], exact[2], GATINGS[gating])
            down = expected @ exact[3].t()  # its gradient g makes `d_act + g @ a_down` that of the activation
            wanted = torch.autograd.grad((expected, down), exact, (d_act.double(), g.double()))
            act, values, scale = swiglu(y, low, b_gate, b_up, fp8, gating.text)
            d_y, d_values, d_scale, sums = swiglu_backward(
                d_act, g, y, low, b_gate, b_up, a_down, scale_in, fp8, gating.text
            )
            tolerance = TOLERANCE[dtype]
            wanted = (wanted[0] * (scale_in if fp8 else 1.0), *wanted[1:])
            for found, want in ((act, expected), *zip((d_y, sums[0], sums[1], sums[2].t()), wanted, strict=True)):
                assert (found.double() - want).norm() <= tolerance * want.norm(), (dtype, tokens, intermediate, rank)
            if fp8:
                for found, want in ((values.float() * scale, act), (d_values.float() * d_scale, d_y)):
                    error = (found - want.float()).abs() / want.float().abs().amax(1, keepdim=True)
                    assert error.max() <= 2**-4, (tokens, intermediate, rank, error.max())
            cases += 1
    print(f"swiglu: {cases} cases")


def check_gated(
    device: str, dtypes=(torch.float32, torch.float16), gating=SILU, sizes=((1, 1), (7, 100), (3, 2048), (5, 1000))
) -> None:
    """The backward kernel alone against gradients in fp64, over sizes that fill no whole number of programs; of gate
    and up apart, and side by side."""
    from tunesmith.kernels.gated_fused import gated_backward_into

    cases = 0
    for dtype in dtypes:
        for rows, width in sizes:
            generator = torch.Generator().manual_seed(rows)
            d_act, gate, up = (
                (torch.randn(rows, width, generator=generator) * 3).to(dtype).to(device) for _ in range(3)
            )
            found = [torch.full_like(gate, float("nan")) for _ in range(3)]
            gated_backward_into(d_act, gate, up, *found, gating.text)
            joint = torch.full_like(gate.repeat(1, 2), float("nan"))
            halves, act = torch.cat([gate, up], dim=1).chunk(2, dim=1), torch.full_like(gate, float("nan"))
            gated_backward_into(d_act, *halves, *joint.chunk(2, dim=1), act, gating.text)
            assert torch.equal(joint, torch.cat(found[:2], dim=1))
            assert torch.equal(act, found[2])
            exact = [one.double().requires_grad_() for one in (gate, up)]
            act = reference.gated_matmul(*exact, torch.eye(width).to(exact[0]), GATINGS[gating])
            expected = [*torch.autograd.grad(act, exact, d_act.double()), act]
            for ours, right in zip(found, expected, strict=True):
                torch.testing.assert_close(ours.double(), right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
            cases += 1
    print(f"gated: {cases} cases")


def check_lowrank_mlp_nf4(device: str, dtype=torch.float32) -> None:
    """The MLP over weights in nf4 gives, to the last bit, what it gives over the same weights made whole."""
    from tunesmith.kernels import nf4
    from tunesmith.kernels.lowrank_mlp import FrozenWeights, lowrank_mlp

    tokens, hidden, intermediate, rank = 7, 24, 72, 4
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.2).to(dtype).to(device)

    gate, up, down = draw(intermediate, hidden), draw(intermediate, hidden), draw(hidden, intermediate)
    gate_up4, down4 = torch.cat([nf4.quantize(gate), nf4.quantize(up)]), nf4.quantize(down)
    gate_up = nf4.dequantize(gate_up4, [intermediate, intermediate], hidden, dtype)
    shapes = ((tokens, hidden), (2 * rank, hidden), (intermediate, rank), (intermediate, rank))
    leaves = [draw(*shape).requires_grad_() for shape in (*shapes, (rank, intermediate), (hidden, rank))]
    results = []
    for held in ((gate_up4, down4), (gate_up, nf4.dequantize(down4, [hidden], intermediate, dtype))):
        out = lowrank_mlp(leaves[0], FrozenWeights(held[0], None, held[1], None), *leaves[1:])
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert all(map(torch.equal, *results))
    print("mlp in nf4: ok")


def check_whole_mlps(device: str) -> None:
    """Models whose MLPs were swapped for one operation each give the same logits and gradients."""
    whole_mlps(device, "llama", groups=3)
    print("whole mlps: ok")


def check_whole_mlps_of_families(device: str) -> None:
    """GeGLU, gate and up in one linear, and linears of other names."""
    for family, groups in (("gemma2", 3), ("gemma3_text", 3), ("phi3", 3), ("glm4", 3)):
        whole_mlps(device, family, groups=groups)
    print("whole mlps: ok")


def whole_mlps(device: str, family: str, groups: int) -> None:
    """`groups` of adapters in a layer: q, k and v, the output projection, the MLP."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from tunesmith.config.schema import Lora
    from tunesmith.model import lora
    from tunesmith.model.fuse import JointMlp, fuse

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).to(device)
    lora.attach(model, Lora(rank=4), seed=0)
    for adapter in lora.adapters(model).values():
        torch.nn.init.normal_(adapter.lora_b, std=0.1)
    tokens = torch.arange(20, device=device)[None]

    def results():
        logits = model(tokens).logits
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        return logits, dict(zip(trained, torch.autograd.grad(logits.square().mean(), trained.values()), strict=True))

    before, expected = results()
    assert fuse(model, fp8=False, fuse_mlps=True) == 2 * groups
    assert sum(isinstance(module, JointMlp) for module in model.modules()) == 2
    after, found = results()
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-6)


def check_lowrank_mlp(device: str, dtype=torch.float32, fp8: bool = False, gating=SILU) -> None:
    """The MLP as one operation against the same by plain linears, all gradients included."""
    from tunesmith.kernels.lowrank import quantize_rows
    from tunesmith.kernels.lowrank_mlp import FrozenWeights, lowrank_mlp

    tokens, hidden, intermediate, rank = 300, 32, 64, 4  # three slices of at most 128
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, size: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * size).to(dtype).to(device)

    gate_up, down = draw(2 * intermediate, hidden, size=0.2), draw(hidden, intermediate, size=0.2)
    leaves = [
        draw(tokens, hidden),
        draw(2 * rank, hidden, size=0.2),
        draw(intermediate, rank),
        draw(intermediate, rank),
    ]
    leaves += [draw(rank, intermediate, size=0.2), draw(hidden, rank)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    frozen = FrozenWeights(gate_up, None, down, None)
    if fp8:
        (g8, g_scale), (d8, d_scale) = quantize_rows(gate_up), quantize_rows(down)
        frozen = FrozenWeights(g8, g_scale.squeeze(1), d8, d_scale.squeeze(1))
    found = lowrank_mlp(leaves[0], frozen, *leaves[1:], gating=gating.text)
    sliced = lowrank_mlp(leaves[0], frozen, *leaves[1:], slice_tokens=128, gating=gating.text)
    assert "sliced_mlp" in type(sliced.grad_fn).__name__
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    x, a_gate_up, b_gate, b_up, a_down, b_down = exact
    act = reference.swiglu(x @ gate_up.double().t(), x @ a_gate_up.t(), b_gate, b_up, GATINGS[gating])
    expected = act @ down.double().t() + act @ a_down.t() @ b_down.t()
    direction = torch.randn(found.shape, generator=generator).to(found)
    tolerance = 0.12 if fp8 else {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    if gating.limit and dtype == torch.bfloat16:  # what rounding takes across the limit has another gradient
        tolerance = 0.2 if fp8 else 8e-2
    wanted = torch.autograd.grad(expected, exact, direction.double())
    pairs = [(found, expected), *zip(torch.autograd.grad(found, leaves, direction), wanted, strict=True)]
    pairs += [(sliced, expected), *zip(torch.autograd.grad(sliced, leaves, direction), wanted, strict=True)]
    for number, (one, want) in enumerate(pairs):
        error = ((one.double() - want).norm() / want.norm()).item()
        assert error < tolerance, (number, error)
    print("mlp: ok")


def check_nf4(device: str, dtypes=(torch.float32, torch.float16)) -> None:
    """Bit for bit what torch alone makes of the same bytes."""
    from tunesmith.kernels import nf4
    from tunesmith.kernels.nf4_dequantize import dequantize_into

    cases = 0
    for dtype in dtypes:
        for rows, columns in ((1, 1), (3, 7), (32, 64), (7, 129), (130, 131), (257, 64), (300, 64)):
            weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * 0.02
            held = nf4.quantize(weight)
            expected = nf4.dequantize_plainly(nf4.split(held, weight.numel()), weight.numel()).to(dtype)
            found = torch.full((weight.numel() + 1,), 7.0, dtype=dtype, device=device)
            dequantize_into(found[:-1], nf4.split(held.to(device), weight.numel()))
            assert torch.equal(found[:-1].cpu(), expected), (dtype, rows, columns)
            assert found[-1] == 7.0
            scales = torch.rand(rows, generator=torch.Generator().manual_seed(1)) + 0.5
            wanted = nf4.dequantize(held, [rows], columns, dtype, scales).view(-1)
            dequantize_into(found[:-1], nf4.split(held.to(device), weight.numel()), scales.to(device), columns)
            torch.testing.assert_close(found[:-1].cpu(), wanted, rtol=torch.finfo(dtype).eps, atol=0)  # division
            cases += 1
    print(f"nf4: {cases} cases")


def check_quantize(device: str, values_dtype=torch.float32) -> None:
    """Rows, and columns of the transposed matrix, over their scales; before rounding where `values_dtype` is wide."""
    from tunesmith.kernels.quantize import quantize_rows_into, quantize_transposed_into

    bound = {torch.float32: 1e-5, torch.float8_e4m3fn: 2**-4}[values_dtype]
    cases = 0
    for rows, columns in ((1, 16), (37, 48), (130, 200), (1100, 33)):  # the last in two parts of its columns
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, columns, generator=generator).to(device)
        x[0] = 0.0
        factor = torch.rand(columns, generator=generator).to(device) + 0.5
        for by in (None, factor) if rows < 1000 else ():  # rows know nothing of each other
            wanted = x if by is None else x * by
            values, scale = torch.empty_like(x, dtype=values_dtype), torch.empty(rows, 1, device=device)
            quantize_rows_into(x, by, values, scale)
            _check_scaled(values, scale, wanted, bound)
        longest = rows + -rows % 16
        values = torch.full((columns, longest), 7.0, device=device).to(values_dtype)
        scale = torch.empty(columns, 1, device=device)
        quantize_transposed_into(x, values, scale)
        _check_scaled(values[:, :rows], scale, x.t(), bound)
        assert values[:, rows:].float().abs().sum() == 0
        quantize_transposed_into(x, values, scale, x.new_full((columns,), 44.8))  # what is given is used
        torch.testing.assert_close(scale, torch.full_like(scale, 0.1), rtol=1e-6, atol=0)
        cases += 1
    print(f"quantize: {cases} cases")


def check_quantize_with_maxima(device: str, values_dtype=torch.float32) -> None:
    """Rows as `quantize_rows_into` gives them, and the largest of each column; by many programs, and by few."""
    from tunesmith.kernels import quantize

    cases = 0
    for rows, columns in ((1, 16), (37, 48), (9, 4096), (9, 2049), (5, 16400)):
        generator = torch.Generator().manual_seed(rows)
        joint = torch.randn(rows, columns + 16, generator=generator).to(device)
        x = joint[:, :columns]  # rows lie apart
        x[0], x[:, 1] = 0.0, 0.0
        wanted = torch.empty(rows, columns, dtype=values_dtype, device=device), torch.empty(rows, 1, device=device)
        quantize.quantize_rows_into(x, None, *wanted)
        for multiprocessors in (1, 132) if columns <= quantize.WIDEST_WITH_MAXIMA else (132,):
            found = [torch.full_like(tensor.float(), 7.0).to(tensor.dtype) for tensor in wanted]
            largest = torch.full((columns,), 7.0, device=device)
            with patch.object(quantize, "MULTIPROCESSORS", multiprocessors):
                quantize.quantize_with_maxima_into(x, *found, largest)
            assert all(torch.equal(one.float(), two.float()) for one, two in zip(found, wanted, strict=True))
            assert torch.equal(largest, x.abs().amax(0)), (rows, columns, multiprocessors)
            cases += 1
    print(f"quantize_with_maxima: {cases} cases")


def _check_scaled(values: torch.Tensor, scale: torch.Tensor, wanted: torch.Tensor, bound: float) -> None:
    largest = wanted.abs().amax(1, keepdim=True)
    torch.testing.assert_close(scale, (largest / 448.0).clamp(min=1e-12 / 448.0), rtol=1e-6, atol=0)
    assert ((values.float() * scale - wanted).abs() <= bound * largest).all()


def check_update(device: str, dtypes=(torch.float32, torch.bfloat16)) -> None:
    """Two steps, each beside torch's own arithmetic; codes may be one apart where a value lies between two."""
    from tunesmith.kernels import update, update_states
    from tunesmith.kernels.update_fused import copy_fused_, update_fused_

    numbers = {"keep": 0.999, "rate": 1e-2, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8, "unbias": 1.3}
    cases = 0
    for dtype in dtypes:
        for states in ("fp32", "bf16", "int8", "fp8", "int4"):
            for shape in ((3, 258), (2, 2, 192), (7,)):
                for algorithm in ("adamw", "lion"):
                    generator = torch.Generator().manual_seed(cases)
                    weight = torch.randn(shape, generator=generator).to(dtype)
                    kind = update_states.format_of(weight, states)
                    if device == "cpu" and kind == "fp8":
                        continue  # the interpreter rounds fp8 in another way
                    state = update_states.new_state(weight, algorithm, states)
                    for step in range(2):
                        mine = weight.to(device, copy=True)
                        held = {name: value.to(device, copy=True) for name, value in state.items()}
                        half = torch.bfloat16 if step else torch.float16
                        copy, found = torch.empty(2, *shape, dtype=half).unbind()
                        found = found.to(device)
                        gradient = torch.randn(shape, generator=generator) * 2.0**-step
                        prerounded = dtype == torch.float32 and step == 1
                        given = {
                            "kind": kind,
                            "algorithm": algorithm,
                            "seed": 2**31 - 1 - step,
                            "start": 3 * step,
                            "prerounded": prerounded,
                            **numbers,
                        }
                        if prerounded:
                            update.preround_(weight, start=given["start"])
                            mine = weight.to(device, copy=True)
                        factor = torch.tensor(0.75) if step else None
                        update.update_plainly_(weight, gradient, state, copy, factor, **given)
                        there = None if factor is None else factor.to(device)
                        update_fused_(mine, gradient.to(device), held, found, there, **given)
                        case = str((dtype, states, shape, algorithm, step))
                        for name, value in state.items():
                            one = held[name].cpu()
                            if value.dtype == torch.uint8:
                                pairs = ((one & 15, value & 15), (one >> 4, value >> 4))
                                for found_code, code in pairs if kind == "int4" else ((one, value),):
                                    away = (found_code.int() - code.int()).abs()
                                    assert away.max() <= 1, case
                                    assert away.float().mean() < 0.01, case
                            else:
                                torch.testing.assert_close(one, value, rtol=1e-2, atol=1e-6, msg=case)
                        if prerounded:
                            assert torch.equal(mine.bfloat16(), found), case
                            held_weight = mine.cpu()
                            for one in (weight, held_weight):
                                update.undo_preround_(one, start=given["start"])
                            mine = held_weight.to(device)
                        step_of = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
                        torch.testing.assert_close(mine.cpu(), weight, rtol=step_of, atol=1e-6, msg=case)
                        near = {torch.float16: 2e-3, torch.bfloat16: 2**-6}[half]
                        torch.testing.assert_close(found.cpu(), copy, rtol=near, atol=1e-6, msg=case)
                        if dtype == torch.float32:  # a copy is made from its weight alone, in the step or apart
                            apart = torch.empty_like(found)
                            copy_fused_(apart, mine, start=given["start"])
                            assert torch.equal(apart, found), case
                            assert torch.equal(update.halved(mine.cpu(), half, start=given["start"]), found.cpu()), case
                    cases += 1
    print(f"update: {cases} cases")


def check_rotary(device: str, dtypes=(torch.float32, torch.float16)) -> None:
    """The kernel against the plain rotation and its gradient, from tensors that lie in memory in several ways."""
    from tunesmith.kernels.rotary import PAIRS
    from tunesmith.kernels.rotary_fused import rotate_into

    shapes = (
        (1, 1, 1, 8, 8),
        (5, 4, 2, 16, 16),
        (3, 6, 2, 48, 48),
        (7, 3, 3, 10, 10),
        (4, 2, 1, 24, 10),
        (2, 5, 1, 9, 2),
    )
    cases = 0
    for dtype, (tokens, heads, groups, size, turned), pairs in itertools.product(dtypes, shapes, PAIRS):
        generator = torch.Generator().manual_seed(tokens)

        def draw(*shape: int, generator=generator, dtype=dtype) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype).to(device)

        y, cos, sin = draw(tokens, heads + 2 * groups, size), draw(tokens, turned), draw(tokens, turned)
        sizes = [heads, groups, groups]
        exact = y.double().requires_grad_()
        parts = exact.split(sizes, 1)
        angles = (cos.double(), sin.double(), pairs)
        wanted = [reference.rotate(parts[0], *angles), reference.rotate(parts[1], *angles), parts[2]]
        d_parts = [draw(count, tokens, size).transpose(0, 1) for count in sizes]
        (gradient,) = torch.autograd.grad(wanted, exact, [one.double() for one in d_parts])
        outputs = [torch.full((tokens, count, size), 9.0, dtype=dtype, device=device) for count in sizes]
        joint = torch.full_like(y, 9.0)
        rotate_into(y.split(sizes, 1), cos, sin, tuple(outputs), pairs=pairs, back=False)
        rotate_into(tuple(d_parts), cos, sin, joint.split(sizes, 1), pairs=pairs, back=True)
        pair = [torch.full_like(one, 9.0) for one in outputs[:2]]
        rotate_into(y.split(sizes, 1)[:2], cos, sin, tuple(pair), pairs=pairs, back=False)
        for found, want in zip((*outputs, joint, *pair), (*wanted, gradient, *wanted[:2]), strict=True):
            assert (found.double() - want).norm() <= TOLERANCE[dtype] * want.norm(), (dtype, tokens, size, pairs)
        cases += 1
    print(f"rotary: {cases} cases")


def check_transpose(device: str) -> None:
    from tunesmith.kernels.quantize import transpose_into

    for rows, columns in ((1, 1), (130, 257), (64, 300)):
        values = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, device=device)
        found = torch.empty(columns, rows, dtype=torch.uint8, device=device)
        transpose_into(values, found)
        assert torch.equal(found, values.t())
    print("transpose: 3 cases")


def check_decoding(device: str, dtype=torch.float32, only: tuple[str, ...] = ()) -> None:
    """Steps of our own kernels, rows of other lengths among them, against the model's own."""
    from decoding_cases import CASES, differences

    names = only or tuple(CASES)
    for name in names:
        worst = differences(name, device, dtype)
        assert worst < 10 * TOLERANCE[dtype], (name, worst)
    print(f"decoding: {len(names)} cases")


def check_some_decoding(device: str) -> None:
    check_decoding(device, only=("biases, several splits",))


def check_decoding_of_others(device: str) -> None:
    """Models with layers of other kinds."""
    from decoding_cases import OTHERS, kept_after_timing, make

    from tunesmith.infer.fused import fused
    from tunesmith.kernels.decode import Way

    plain = make("llama", {}, device)
    assert fused(plain, Way()) is not None
    assert fused(plain) is None  # in full precision, where no kernels overlap
    for kind, more in OTHERS.values():
        assert fused(make(kind, more, device), Way()) is None, kind
    for own, others in ((1.0, 2.0), (2.0, 1.0)):
        is_kept, worst = kept_after_timing(own, others)
        assert is_kept == (own < others)
        assert worst < 1e-5
    print(f"left alone: {len(OTHERS)} cases")


def check_hand_on(device: str) -> None:
    from tunesmith.kernels.scan import hand_on
    from tunesmith.kernels.scan_fused import hand_on_fused

    cases = 0
    for dtype in (torch.float32, torch.float16):
        for chunks, groups, state, heads, size in ((1, 1, 3, 2, 5), (4, 2, 8, 3, 7), (9, 1, 16, 4, 64)):
            generator = torch.Generator().manual_seed(chunks)
            states = torch.randn(chunks, groups, state, heads * size, generator=generator).to(dtype)
            decay = torch.rand(chunks, groups * heads, generator=generator)
            decay[chunks // 2] = 0.0  # a document ends there
            for backward in (False, True):
                found = hand_on_fused(states.to(device), decay.to(device), backward=backward)
                expected = hand_on(states, decay, backward=backward)
                torch.testing.assert_close(found.cpu(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
                cases += 1
    print(f"hand_on: {cases} cases")
