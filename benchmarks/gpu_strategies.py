"""What sharding costs where there is nothing to share: each strategy on one GPU, over NCCL, against the plain path.

    python benchmarks/gpu_strategies.py [LAYERS]

Llama-3-8B's shapes with so many layers, LoRA and full fine-tuning (fp32 masters and states), random weights.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from tunesmith.measure import bench

LAYERS = int(sys.argv[1]) if len(sys.argv) > 1 else 8
WAYS = {"lora": ("none", "ddp", "zero3"), "full": ("none", "ddp", "zero2", "zero3", "hybrid")}


def main() -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    bench.SHAPES["cut"] = {**bench.SHAPES["llama3-8b"], "num_hidden_layers": LAYERS}
    for method, ways in WAYS.items():
        workload = bench.Workload("cut", method, 4, 4096)
        plain = None
        for way in ways:
            plan = bench.plan_for(workload, device="cuda", products="plain", recompute_layers=0, compiled=True)
            plan = plan.changed(sharding=way, master_weights=method == "full", optimizer_states="fp32")
            step = bench.build(workload, plan)
            found = bench.measure(step, workload, warmup=3, steps=8)
            plain = plain or found
            share = found.tokens_per_second / plain.tokens_per_second
            print(
                f"{method:5} {way:6} {found.tokens_per_second:9,.0f} tokens/s  {share:6.1%}  "
                f"{found.peak_bytes / 2**30:6.1f} GiB  loss {found.loss:.4f}",
                flush=True,
            )
            del step
            torch._dynamo.reset()
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
