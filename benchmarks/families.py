"""Is every causal family right? Each that the installed transformers has, made tiny, LoRA and all weights, against a
plain loop; the table is docs/models.md.

    python benchmarks/families.py [--workers 2] [--again [FAMILY ...]]

About ten seconds a row. What is in the result file already is not measured again unless asked for, so a call that was
stopped can be repeated.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from results import read_rows, write_result

from tunesmith.measure.results import document

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
NAME = "families"
WHAT = "Every causal family of transformers, made tiny, against a plain loop on the CPU"
METHODS = ("lora", "full")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--again", nargs="*", metavar="FAMILY", help="measure these anew; all where none is named")
    options = parser.parse_args()
    from families import causal_families

    rows = {(row["family"], row["method"]): row for row in read_rows(NAME)}
    if options.again is not None:
        rows = {key: row for key, row in rows.items() if options.again and key[0] not in options.again}
    wanted = [key for key in itertools.product(causal_families(), METHODS) if key not in rows]
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    with multiprocessing.get_context("spawn").Pool(options.workers, maxtasksperchild=24) as pool:
        for number, row in enumerate(pool.imap_unordered(measure, wanted), start=1):
            rows[row["family"], row["method"]] = row
            made = [rows[key] for key in sorted(rows)]
            write_result(NAME, WHAT, made, document(WHAT, made) | {"families": len(causal_families())})
            print(f"{number}/{len(wanted)} {row['family']} {row['method']}: {row['outcome']}", flush=True)
    print(dict(collections.Counter(row["outcome"] for row in rows.values())))


def measure(key: tuple[str, str]) -> dict[str, Any]:
    import torch

    import parity

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TUNESMITH_CACHE"] = folder + "/cache"
        return parity.compare(*key, Path(folder) / "run").fields()


if __name__ == "__main__":
    main()
