"""Every kernel compiles for the GPUs we name; no GPU is needed for that. (Triton 3.6 once failed at a constant.)"""

from __future__ import annotations

import importlib.util

import pytest

from tunesmith.kernels.gating import GELU, GELU_TANH, Gating

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
HOPPER, AMPERE = 90, 80
OTHER_GATES = (Gating("sigmoid", 1.702, 7.0, 1.0), GELU, GELU_TANH)
"""Activations of gated MLPs; the first has all that SiLU has."""


def compile_for(capability: int, kernel, types: dict[str, str], constants: dict, **options) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert "cubin" in made.asm


NUMBERS = ("keep", "rate", "beta1", "beta2", "epsilon", "unbias", "fp8_largest", "fp8_smallest")


@pytest.mark.parametrize("states", ["fp32", "bf16", "int8", "fp8", "int4"])
def test_updates(states):
    from tunesmith.kernels import update_fused as module

    held = {"fp32": "*fp32", "bf16": "*bf16"}.get(states, "*u8")
    types = {"weight": "*bf16", "gradient": "*bf16", "copy": "*bf16", "factor": "*fp32", "first": held, "second": held}
    types |= {"first_scale": "*fp32", "second_scale": "*fp32", "seed": "i32", "start": "i64"}
    types |= dict.fromkeys(("columns", "row_blocks", "blocks"), "i32") | dict.fromkeys(NUMBERS, "fp32")
    block = module.BLOCK.get(states, module.VALUES)
    flags = {"IS_LION": False, "IS_RANDOM": True, "IS_PREROUNDED": False, "HAS_COPY": False, "HAS_FACTOR": True}
    constants = {"FORMAT": module.FORMATS[states], "TILE": module.VALUES // block, "BLOCK": block, **flags}
    with_masters = {
        "types": types | {"weight": "*fp32"},
        "constants": constants | {"IS_RANDOM": False, "HAS_COPY": True},
    }
    for capability in (HOPPER,) if states == "fp8" else (HOPPER, AMPERE):
        compile_for(capability, module._kernel, types, constants, num_warps=4)
        compile_for(capability, module._kernel, **with_masters, num_warps=4)


def test_copies_in_half_precision():
    from tunesmith.kernels import update_fused as module

    types = {"copy": "*bf16", "values": "*fp32", "count": "i32", "start": "i64"}
    for capability in (HOPPER, AMPERE):
        compile_for(capability, module._copy_kernel, types, {"SIZE": module.VALUES})


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("has_softcap", [False, True])
def test_cross_entropy(in_fp8, has_softcap):
    from tunesmith.kernels import cross_entropy as module

    results = dict.fromkeys(("losses", "log_totals", "scales", "owns"), "*fp32")
    types = {"logits": "*bf16", "labels": "*i64", "weights": "*fp32", "values8": "*fp8e4nv" if in_fp8 else "*bf16"}
    types |= results | dict.fromkeys(("stride", "vocabulary", "places", "width"), "i32")
    types |= dict.fromkeys(("scale", "softcap", "z_loss"), "fp32")
    flags = {"HAS_SOFTCAP": has_softcap, "NEEDS_GRADIENT": True, "IN_FP8": in_fp8}
    for capability in (HOPPER,) if in_fp8 else (HOPPER, AMPERE):
        constants = {**flags, "LARGEST": module.LARGEST, "LOWEST": module.LOWEST, "BLOCK": module.BLOCK}
        compile_for(capability, module._row, types, constants, num_warps=8)


@pytest.mark.parametrize("width", [4096, 65536])
def test_quantizing_rows(width):
    from tunesmith.kernels import quantize as module

    types = {"x": "*bf16", "factor": "*fp32", "values": "*fp8e4nv", "scale": "*fp32", "stride": "i32", "K": "i32"}
    constants = {"HAS_FACTOR": True, "LARGEST": module.LARGEST, "SMALLEST": module.SMALLEST_SCALE, "BLOCK": width}
    compile_for(HOPPER, module._rows, types, constants, num_warps=min(32, width // 1024))


@pytest.mark.parametrize("width", [4096, 11008, 16384])
def test_quantizing_rows_with_the_largest_of_columns(width):
    from tunesmith.kernels import quantize as module

    types = {"x": "*bf16", "values": "*fp8e4nv", "scale": "*fp32", "largest": "*i32"}
    types |= dict.fromkeys(("stride", "T", "K"), "i32")
    block, rest = {4096: (4096, 0), 11008: (8192, 4096), 16384: (16384, 0)}[width]
    constants = {"LARGEST": module.LARGEST, "SMALLEST": module.SMALLEST_SCALE, "STAGES": module.WITH_MAXIMA["STAGES"]}
    sizes = {"BLOCK": block, "REST": rest}
    compile_for(HOPPER, module._rows_and_maxima, types, constants | sizes, num_warps=min(16, block // 512))


def test_the_largest_of_columns():
    from tunesmith.kernels import quantize as module

    types = {"x": "*bf16", "largest": "*i32"} | dict.fromkeys(("stride", "T", "K"), "i32")
    tile = {name: value for name, value in module.MAXIMA.items() if name != "num_warps"}
    compile_for(HOPPER, module._column_maxima, types, tile, num_warps=module.MAXIMA["num_warps"])


def test_quantizing_transposed():
    from tunesmith.kernels import quantize as module

    sizes = dict.fromkeys(("stride", "T", "K", "LONGEST"), "i32")
    types = {"x": "*bf16", "largest": "*fp32", "values": "*fp8e4nv", "scale": "*fp32", **sizes}
    tile = {name: value for name, value in module.TURNED.items() if name != "num_warps"}
    constants = {"LARGEST": module.LARGEST, "SMALLEST": module.SMALLEST_SCALE, **tile}
    compile_for(HOPPER, module._turn, types, constants, num_warps=module.TURNED["num_warps"])


@pytest.mark.parametrize("capability", [HOPPER, AMPERE])
def test_the_gated_mlp(capability):
    from tunesmith.kernels import swiglu as module

    tensors = ("d_act", "g", "y", "low", "b_gate", "b_up", "a_down", "act", "d_y")
    types = dict.fromkeys(tensors, "*bf16") | {"sums": "*fp32", "scale": "*fp32"}
    types |= {"T": "i32", "WIDTH": "i32", "ROWS": "i32"}
    for kernel, tile in ((module._forward, module.FORWARD), (module._backward, module.BACKWARD)):
        named = {name: kind for name, kind in types.items() if name in kernel.arg_names}
        constants = {"R": 16, "R_PADDED": 16, "BT": tile["BT"], "BI": tile["BI"]}
        constants |= {"SCALED": capability == HOPPER} if "SCALED" in kernel.arg_names else {}
        constants |= {"AHEAD": tile["AHEAD"]}
        options = {name: tile[name] for name in ("num_warps", "num_stages")}
        for gating in OTHER_GATES if capability == HOPPER else OTHER_GATES[:1]:
            compile_for(capability, kernel, named, constants | module.constants(gating.text), **options)


@pytest.mark.parametrize("capability", [HOPPER, AMPERE])
def test_the_gradient_of_a_gated_mlp_with_trained_weights(capability):
    from tunesmith.kernels import gated_fused as module

    tensors = ("d_act", "gate", "up", "d_gate", "d_up", "act")
    types = dict.fromkeys(tensors, "*bf16") | {"WIDTH": "i32", "STRIDE": "i32"}
    for gating in OTHER_GATES if capability == HOPPER else OTHER_GATES[:1]:
        constants = {"BLOCK": module.BLOCK, **module.constants(gating.text)}
        compile_for(capability, module._kernel, types, constants, num_warps=module.WARPS)


@pytest.mark.parametrize("out", ["*fp8e4nv", "*bf16"])
def test_weights_out_of_nf4(out):
    from tunesmith.kernels import nf4_dequantize as module

    types = {"packed": "*u8", "scales": "*u8", "nested": "*fp32", "offset": "*fp32", "values": "*fp32", "out": out}
    types |= {"scale_values": "*fp32", "row_scales": "*fp32", "COUNT": "i32", "COLUMNS": "i32"}
    constants = {"HAS_ROW_SCALES": "8" in out, "BYTES": module.BYTES, "BLOCK": module.BLOCK, "NESTED": module.NESTED}
    compile_for(HOPPER, module._kernel, types, constants, num_warps=4)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(("pairs", "turned", "values"), [(0, 128, 8), (0, 96, 8), (1, 128, 0), (2, 64, 8)])
def test_rotary_positions(back, pairs, turned, values):
    from tunesmith.kernels import rotary_fused as module

    tensors = ("q", "k", "v", "cos", "sin", "q_out", "k_out", "v_out")
    strides = [name for name in module._rotate.arg_names if name.endswith(("_row", "_head"))]
    types = dict.fromkeys(tensors, "*bf16") | dict.fromkeys(strides, "i32")
    constants = {"H": 32, "G": 8, "V": values, "D": 128, "R": turned, "HEADS": 64, "HALF": 64, "REST": 64}
    constants |= {"PAIRS": pairs, "BACK": back}
    for capability in (HOPPER, AMPERE):
        compile_for(capability, module._rotate, types, constants, num_warps=module.WARPS)


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("name", ["_all_row", "_likeliest_row"])
def test_distillation(name, kind):
    from tunesmith.kernels import distillation as module

    types = dict.fromkeys(("logits", "owns", "likely"), "*bf16") | dict.fromkeys(("labels", "ids"), "*i64")
    types |= {"teacher": "*fp32", "weights": "*fp32", "parts": "*fp32"}
    types |= dict.fromkeys(("stride", "teacher_stride", "width", "vocabulary", "count"), "i32")
    types |= dict.fromkeys(("scale", "softcap", "heat", "share", "teacher_scale"), "fp32")
    kernel = getattr(module, name)
    constants = {"KIND": kind, "HAS_SOFTCAP": kind == 1, "IS_SAME": kind == 0, "NEEDS_GRADIENT": True}
    constants |= {"LOWEST": module.LOWEST, "LEAST": module.LEAST, "BLOCK": module.BLOCK}
    constants |= {"HAS_REST": True, "BLOCK_K": 64} if name == "_likeliest_row" else {}
    types = {key: value for key, value in types.items() if key in kernel.arg_names}
    compile_for(HOPPER, kernel, types, constants, num_warps=8)


@pytest.mark.parametrize(
    ("capability", "overlaps", "batch"), [(HOPPER, True, 1), (HOPPER, True, 4), (AMPERE, False, 1)]
)
def test_products_of_a_decoding_step(capability, overlaps, batch):
    from tunesmith.kernels import decode as module

    names = (
        "x",
        "norm",
        "w0",
        "w1",
        "w2",
        "bias",
        "out",
        "y",
        "weight",
        "gate",
        "up",
        "gate_bias",
        "up_bias",
        "logits",
    )
    types = dict.fromkeys(names, "*bf16") | {"eps": "fp32", "largest": "*fp32", "places": "*i32"}
    sizes = {"N0": 2048, "N1": 512, "N2": 512, "N": 2048, "OFFSET": 0.0, "HAS_BIAS": True, "BATCH": batch}
    sizes |= {
        "OVERLAPS": overlaps,
        **module.constants(GELU.text),
    }
    for kernel in (module._norm_products, module._products_added, module._norm_gated, module._norm_head):
        inputs = 5000 if kernel is module._products_added else 2048  # in chunks, the last not whole
        rows, chunk = module.tile_of(2048, inputs, module.Way().down)
        constants = sizes | {"K": inputs, "ROWS": rows, "CHUNK": chunk}
        named = {name: value for name, value in types.items() if name in kernel.arg_names}
        used = {name: value for name, value in constants.items() if name in kernel.arg_names}
        compile_for(capability, kernel, named, used, num_warps=4)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("capability", "overlaps"), [(HOPPER, True), (AMPERE, False)])
def test_attention_of_a_decoding_step(capability, overlaps, splits):
    from tunesmith.kernels import decode as module

    halves = ("qkv", "cos", "sin", "query_norm", "key_norm", "keys", "values", "out")
    types = dict.fromkeys(halves, "*bf16") | dict.fromkeys(("sums", "maxima", "totals"), "*fp32")
    types |= {"positions": "*i64", "at": "*i64", "counts": "*i32", "columns": "i32", "scaling": "fp32", "eps": "fp32"}
    constants = {"HAS_NORMS": True, "OFFSET": 0.0, "WINDOW": 512, "QUERY_HEADS": 32, "KEY_HEADS": 8, "SIZE": 128}
    constants |= {"GROUP": 16, "HALF": 64, "WHOLE": 128, "BLOCK": 64, "EACH": 256, "SPLITS": splits}
    constants |= {"BATCH": 2, "OVERLAPS": overlaps}
    compile_for(capability, module._attend, types, constants, num_warps=4, num_stages=1)


def test_the_choice_of_a_decoding_step():
    from tunesmith.kernels import decode as module

    types = {"largest": "*fp32", "places": "*i32"} | dict.fromkeys(("chosen", "tokens", "positions", "at"), "*i64")
    compile_for(HOPPER, module._take_largest, types, {"COUNT": 16032, "WIDTH": 16384, "OVERLAPS": True}, num_warps=8)


def test_handing_states_on():
    from tunesmith.kernels import scan_fused as module

    types = {"states": "*bf16", "decay": "*fp32", "entering": "*bf16", "count": "i32", "numbers": "i32"}
    sizes = {"OF_GROUP": 128 * 64 * 64, "WIDTH": 64 * 64, "HEADS": 64, "GROUPS": 1, "BLOCK": module.BLOCK}
    for back in (False, True):
        options = {"num_warps": module.WARPS, "num_stages": module.STAGES}
        compile_for(HOPPER, module._hand_on, types, {**sizes, "BACK": back}, **options)
