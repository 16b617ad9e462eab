"""The field's words: what people search for is what the code, its messages and its pages say."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRIVATE = {
    r"\bproducts\b": "matmuls",
    r"\brounded at random\b|\brounding at random\b|\brounds at random\b": "stochastic rounding",
    r"\bis_recorded\b|\b[Rr]ecorder\b|\brecorded pass": "CUDA graphs: capture, replay",
    r"\brecompute_layers\b|\brecomputed\b|\brecomputes\b": "activation checkpointing",
    r"\bkeep_attention\b": "save_attention",
    r"\brelease_gradients\b": "optimizer_in_backward",
    r"\bsave_beside\b": "async_checkpoint",
    r"\bupdate_beside\b": "overlap_update",
    r"\bon the wire\b": "quantized collectives",
    r"\brotate_in_kernels\b": "fused RoPE",
    r"\bmake_activations_again\b": "memory-efficient SwiGLU",
    r"\bkeep_turned\b|\bturned (weights?|fp8)\b": "transposed fp8 weight cache",
    r"\bCalling\b": "ForwardSpec",
    r"\btwins?\b": "proxy model",
    r"\b[Mm]ixtures\b(?! of)": "MoE",
    r"(?<!platform\.)(?<!logits )\bprocessors?\b": "CPU",
    r"\bnought\b": "zero",
    r"\bKEEPS_WHOLE\b|\bwhole_mlps\b": "full tensor, fused MLPs",
    r"\btrain\.moments\b|\bMoment\b": "memory phases of a step",
}
"""What this project once called things, and what everybody else does."""
SPEAKS = ("src/tunesmith/*.py", "docs/*.md", "README.md", "CONTRIBUTING.md", "examples/*.py", "benchmarks/*.py")
ALLOWED = {
    "src/tunesmith/plan/plan.py": r"products|is_recorded|recompute_layers|keep_\w+|release_gradients|save_beside",
    "src/tunesmith/model/gguf.py": "processors",
    "docs/lab.md": ".*",
}
"""Plans of version 1 have the old names; a module of another library has its own; what was written down as it was tried
stays as it was written."""


def spoken() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *SPEAKS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split()]


@pytest.mark.parametrize("word", PRIVATE)
def test_private_words_stay_out(word):
    found = []
    for path in spoken():
        allowed = ALLOWED.get(str(path.relative_to(ROOT)))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if (match := re.search(word, line)) and not (allowed and re.fullmatch(allowed, match[0])):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]!r}, which others call {PRIVATE[word]}")
    assert not found, "\n".join(found)


TERMS = {
    "activation checkpointing": "parallel/",
    "gradient accumulation": "plan/",
    "stochastic rounding": "kernels/update",
    "CUDA graphs": "train/graph.py",
    "ZeRO-3": "parallel/",
    "fused RoPE": "model/rotary.py",
    "memory-efficient SwiGLU": "model/gated.py",
    "quantized collectives": "parallel/quantized.py",
    "mixture of experts": "model/experts.py",
    "tensor parallelism": "parallel/tensor.py",
    "context parallelism": "parallel/context.py",
    "pipeline parallelism": "parallel/pipeline.py",
    "activation offloading": "parallel/activation.py",
    "optimizer-in-backward": "optim/",
    "paged": "optim/offload.py",
}
"""What people search for, and where it is done."""


@pytest.mark.parametrize("term", TERMS)
def test_a_term_of_the_field_leads_to_where_it_is_done(term):
    asked = ["git", "grep", "-il", "-e", term, "--", "src/tunesmith"]
    listed = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert TERMS[term] in listed, listed
