"""Is every causal family right? Each that the installed transformers has, made tiny, LoRA and all weights, against a
plain loop; the table is docs/models.md.

    python benchmarks/families.py [--workers 2] [--only FAMILY ...]

About ten seconds a row. With `--only`, the rows of those families are measured again and the others kept.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from results import read_rows, write_result

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
NAME = "families"
WHAT = "Every causal family of transformers, made tiny, against a plain loop on the CPU"
METHODS = ("lora", "full")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], metavar="FAMILY")
    options = parser.parse_args()
    from families import causal_families

    families = [name for name in causal_families() if not options.only or name in options.only]
    rows = {(row["family"], row["method"]): row for row in (read_rows(NAME) if options.only else [])}
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=fresh, max_tasks_per_child=24) as pool:
        waiting = {pool.submit(measure, name, method) for name in families for method in METHODS}
        for number, done in enumerate(as_completed(waiting), start=1):
            row = done.result()
            rows[row["family"], row["method"]] = row
            print(f"{number}/{len(waiting)} {row['family']} {row['method']}: {row['outcome']}", flush=True)
    write_result(NAME, WHAT, [rows[key] for key in sorted(rows)])
    print(dict(collections.Counter(row["outcome"] for row in rows.values())))


def measure(family: str, method: str) -> dict[str, Any]:
    import torch

    import parity

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TUNESMITH_CACHE"] = folder + "/cache"
        return parity.compare(family, method, Path(folder) / "run").fields()


if __name__ == "__main__":
    main()
