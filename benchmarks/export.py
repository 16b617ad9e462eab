"""What each export of a run is worth, as its own engine runs it, and where the loss of q8_0 comes from.

    python benchmarks/export.py --run runs/smithy --data held_out.jsonl
    python benchmarks/export.py --run runs/smithy --data held_out.jsonl --only onnx-fp32 gguf-q8_0

Each form is written by `tunesmith export` itself and compared with base + adapter in fp32 on the same places. For
gguf q8_0 a second file holds the weights of the first one, rounded in the same way, as fp32: llama.cpp runs it without
rounding what goes into a matmul, so that the two kinds of rounding are told apart. The result is
benchmarks/results/export.json.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from results import read_rows, write_result

FORMS = [
    ("safetensors", "fp32"), ("safetensors", "bf16"), ("adapter", "fp32"), ("gguf-adapter", "f32"), ("gguf", "f32"),
    ("gguf", "f16"), ("gguf", "q8_0"), ("gguf", "q8_0, weights alone"), ("gguf", "q4_0"), ("onnx", "fp32"),
    ("compressed-tensors", "int8"), ("compressed-tensors", "int4"), ("compressed-tensors", "fp8"),
    ("compressed-tensors", "nvfp4"), ("bitsandbytes", "nf4"),
]  # fmt: skip
ALONE = "q8_0, weights alone"


def exported(run: Path, data: str, form: str, kind: str, folder: Path) -> dict:
    from tunesmith.errors import UserError
    from tunesmith.export import gguf as gguf_export
    from tunesmith.export import proof as proving
    from tunesmith.export.export import export_run

    encoded, kinds = gguf_export._encoded, gguf_export._kind
    rounded = {"_encoded": lambda name, tensor, _: rounded_to_q8(encoded, kinds, name, tensor)}
    proofs, judge = [], proving._judge

    def noted(proof, *given):
        proofs.append(proof)
        judge(proof, *given)

    began, problem = time.monotonic(), None
    changes = rounded if kind == ALONE else {"_encoded": encoded}
    with mock.patch.multiple(gguf_export, **changes), mock.patch.object(proving, "_judge", noted):
        try:
            export_run(run, form, kind="f32" if kind == ALONE else kind, out=folder / "out", data=[data])
        except UserError as error:  # the figures of one that fails are wanted, too
            problem = str(error)
    told = ("engine", "places", "agreement", "agreement_without_ties", "largest", "divergence", "perplexity")
    row = {"form": form, "type": kind} | {
        name: getattr(proofs[0], name) for name in (*told, "reference_perplexity", "adapter_share") if proofs
    }
    return row | {"problem": problem, "seconds": round(time.monotonic() - began, 1)}


def rounded_to_q8(encoded, kind_of, name: str, tensor):
    """The tensor as fp32, with the values that q8_0 leaves it."""
    import gguf
    import torch

    kind = kind_of(name, tensor, "q8_0")
    types = gguf.GGMLQuantizationType
    if kind == types.Q8_0:
        tensor = torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.float().numpy(), kind), kind))
    return encoded(name, tensor, types.F32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True, type=Path)
    parser.add_argument("--data", required=True)
    parser.add_argument("--only", nargs="*", default=[], help="such as gguf-q8_0")
    chosen = parser.parse_args()
    rows = {(row["form"], row["type"]): row for row in read_rows("export")}
    for form, kind in FORMS:
        if chosen.only and f"{form}-{kind}" not in chosen.only:
            continue
        with TemporaryDirectory(dir=chosen.run.parent) as folder:
            rows[form, kind] = exported(chosen.run, chosen.data, form, kind, Path(folder))
        print(json.dumps(rows[form, kind]), flush=True)
        what = "Exports of a tuned SmolLM2-135M-Instruct against base + adapter in fp32, CPU"
        write_result("export", what, [rows[one] for one in FORMS if one in rows])


if __name__ == "__main__":
    main()
