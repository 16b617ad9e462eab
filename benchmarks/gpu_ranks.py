"""Parallelism with the real kernels: ranks that share one GPU, over gloo, against one rank.

    python benchmarks/gpu_ranks.py [--device cpu] [--only TEXT ...]

Each way trains the same small Llama in bf16 on the same packed documents, with compiled layers and fused kernels, by a
plan that differs from one rank's in its mesh and sharding alone. Compared are the losses of all steps. What bf16 itself
is worth is shown by one rank that computes the same steps in other micro-batches.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from results import read_rows, write_result

WHAT = "Losses of several ranks on one GPU over gloo, with compiled layers and fused kernels, against one rank"
STEPS = 20
SECONDS = 120
"""After which a way is given up."""
WAYS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    # ranks, what differs from one rank's plan, settings
    "one rank": (1, {}, {}),
    "one rank, other micro-batches": (1, {"micro_batch": 2}, {}),
    "ddp": (2, {"mesh": {"replicate": 2}, "sharding": "ddp"}, {}),
    "zero2": (2, {"mesh": {"shard": 2}, "sharding": "zero2"}, {}),
    "zero3": (2, {"mesh": {"shard": 2}, "sharding": "zero3"}, {}),
    "hybrid, four ranks": (4, {"mesh": {"replicate": 2, "shard": 2}, "sharding": "hybrid"}, {}),
    "tensor": (2, {"mesh": {"tensor": 2}, "sharding": "ddp"}, {}),
    "context": (2, {"mesh": {"context": 2}, "sharding": "ddp"}, {}),
    "pipeline": (2, {"mesh": {"pipeline": 2}}, {}),
    "qlora, one rank": (1, {}, {"method": "qlora"}),
    "qlora, one rank, other micro-batches": (1, {"micro_batch": 2}, {"method": "qlora"}),
    "qlora, zero3": (2, {"mesh": {"shard": 2}, "sharding": "zero3"}, {"method": "qlora"}),
}
SHAPE = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6,
    "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 4096,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", nargs="*", default=[""])
    parser.add_argument("--at-once", type=int, default=4)
    options = parser.parse_args()
    names = [name for name in WAYS if any(name.startswith(text) for text in options.only)]
    with tempfile.TemporaryDirectory(prefix="tunesmith-ranks-") as name:
        folder = Path(name)
        make(folder, options.device)
        with ThreadPoolExecutor(options.at_once) as threads:
            rows = list(threads.map(lambda way: measure(way, folder), names))
    for row in rows:
        print(row["way"], words(row, rows), flush=True)
    found = {row["way"]: row | difference(row, rows) for row in rows}
    kept = {row["way"]: row for row in read_rows("gpu_ranks")} if options.only != [""] else {}
    print(f"wrote {write_result('gpu_ranks', WHAT, list((kept | found).values()))}")


def make(folder: Path, device: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tunesmith.measure.peers import tokenizer_of

    shape = SHAPE | (SMALL if device == "cpu" else {})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    tokenizer_of(shape["vocab_size"]).save_pretrained(folder / "model")
    chance, lines = random.Random(0), []
    for _ in range(400):
        length = min(2000, max(20, int(chance.lognormvariate(5.5, 0.8)))) // (8 if device == "cpu" else 1)
        start = chance.randint(4, 400)
        lines.append({"text": " ".join(f"t{(start + chance.randint(0, 9)) % 500 + 4}" for _ in range(length))})
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    length = 128 if device == "cpu" else 2048
    settings = {
        "model": str(folder / "model"), "data": str(folder / "train.jsonl"), "method": "full", "held_out": 0,
        "sequence_length": length, "batch_tokens": 4 * length, "steps": STEPS, "learning_rate": 2e-4,
        "device": device,
    }  # fmt: skip
    (folder / "settings.json").write_text(json.dumps(settings))


def measure(way: str, folder: Path) -> dict[str, Any]:
    own = folder / way.replace(" ", "-").replace(",", "")
    own.mkdir()
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, __file__, "--launch", str(own), way], timeout=SECONDS)
    found = own / "found.json"
    row = {"way": way, **(json.loads(found.read_text()) if found.exists() else {"failed": "it hung"})}
    print(way, row.get("failed", "done"), flush=True)
    return row


def launch(folder: Path, way: str) -> None:
    """Ranks are started by a process of their own, since launchers want the signals that it gets."""
    from tunesmith.launch.local import run_ranks

    ranks, _, _ = WAYS[way]
    failure = run_ranks([sys.executable, __file__, "--rank", str(folder), way], ranks)
    if failure is not None:
        (folder / "found.json").write_text(json.dumps({"failed": failure.words(ranks)}))


def be_a_rank(folder: Path, way: str) -> None:
    import torch.distributed as dist

    from tunesmith.config.load import from_mapping
    from tunesmith.errors import UserError
    from tunesmith.launch.local import write_failure
    from tunesmith.launch.rank_environment import read_rank_environment
    from tunesmith.parallel.ranks import Ranks

    _, _, settings = WAYS[way]
    given = json.loads((folder.parent / "settings.json").read_text())
    run = from_mapping(given | settings | {"output": str(folder / "run")})
    try:
        environment = read_rank_environment()
        dist.init_process_group("gloo", rank=environment.rank, world_size=environment.ranks)  # NCCL would refuse it
        for name in ("RANK", "WORLD_SIZE"):  # plans are made, and checked, for the one GPU there is
            del os.environ[name]
        ranks = Ranks(environment, dist.new_group(backend="gloo") if environment.ranks > 1 else None)
        found = losses(run, way, ranks)
        if ranks.is_first:
            (folder / "found.json").write_text(json.dumps(found))
    except (UserError, RuntimeError) as error:
        import traceback

        traceback.print_exc()
        write_failure(str(error).splitlines()[0][:300], "")
        sys.exit(1)


def losses(run: Any, way: str, ranks: Any) -> dict[str, Any]:
    from tunesmith.model import attention
    from tunesmith.model.probe import probe_run
    from tunesmith.plan.plan import Mesh
    from tunesmith.run.assemble import assemble
    from tunesmith.run.choose import plan_and_data
    from tunesmith.run.start import join_run, prepare_run
    from tunesmith.train.loop import loss_scale_of, rate_of, step_of

    if ranks.is_first:
        attention.register()
        Path(run.output).mkdir(parents=True)
        plan, _ = plan_and_data(run, probed=probe_run(run, device=run.device)[1])
        setting = prepare_run(run, plan=plan.changed(micro_batch=1, cuda_graphs=False), warn=print)
    ranks.wait()
    if not ranks.is_first:
        setting = join_run(run)
    _, changes, _ = WAYS[way]
    plan = setting.plan.changed(**changes | {"mesh": Mesh(**changes.get("mesh", {}))})
    job = assemble(replace(setting, plan=plan), ranks)
    step = step_of(job, loss_scale_of(job))
    job.model.train()
    found, norms = [], []
    for number in range(STEPS):
        result = step(job.loader.step(number), rate_of(job, number))
        found.append(result.loss)
        norms.append(result.grad_norm)
    kept = {"attention": plan.attention, "is_compiled": plan.is_compiled, "precision": plan.precision}
    return {"losses": found, "norms": norms, **kept, "mesh": plan.mesh.model_dump(), "sharding": plan.sharding}


def difference(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, float]:
    """The largest over the steps, of losses and gradient norms, as shares of one rank's."""
    base = "qlora, one rank" if row["way"].startswith("qlora") else "one rank"
    reference = next((one for one in rows if one["way"] == base), None)
    if reference is None or "failed" in row or "failed" in reference:
        return {}
    return {
        f"{name}_difference": max(abs(a / b - 1) for a, b in zip(row[name], reference[name], strict=True))
        for name in ("losses", "norms")
    }


def words(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    if "failed" in row:
        return row["failed"]
    said = "".join(f", {name} {value:.2e}" for name, value in difference(row, rows).items())
    return f"loss {row['losses'][0]:.5f} to {row['losses'][-1]:.5f}{said}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        be_a_rank(Path(sys.argv[2]), sys.argv[3])
    elif sys.argv[1:2] == ["--launch"]:
        launch(Path(sys.argv[2]), sys.argv[3])
    else:
        main()
