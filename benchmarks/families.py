"""Is every causal family right? Each that the installed transformers has, made tiny, LoRA and all weights, against a
plain loop; the table is docs/models.md.

    python benchmarks/families.py [--workers 2] [--again [FAMILY ...]] [--named]

About ten seconds a row. `--named`: the families that people tune most, each with all that it can do (packed and not,
fused, compiled, in nf4, split over ranks, merged, as GGUF), about twenty seconds of the CPU's time a row. What is in
the result file already is not measured again unless asked for, so a call that was stopped can be repeated.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from results import read_rows, write_result

from tunesmith.measure.results import document

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
NAME = "families"
WHAT = "Every causal family of transformers, made tiny, against a plain loop on the CPU"
METHODS = ("lora", "full")
NAMED = "families_named"
WHAT_NAMED = "What the families that people tune most can do, each made tiny, tried on the CPU"
Rows = dict[Any, dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--again", nargs="*", metavar="FAMILY", help="measure these anew; all where none is named")
    parser.add_argument("--named", action="store_true", help="all that the families people tune most can do")
    options = parser.parse_args()
    import families

    name = NAMED if options.named else NAME
    rows: Rows = {_key(row): row for row in read_rows(name)}
    if options.again is not None:
        rows = {key: row for key, row in rows.items() if options.again and row["family"] not in options.again}
    if options.named:
        wanted = [key for family in families.NAMED if (key := (family, "")) not in rows]
        measure_all(wanted, support, rows, options.workers, WHAT_NAMED, name)
        return
    wanted = [key for key in itertools.product(families.causal_families(), METHODS) if key not in rows]
    measure_all(wanted, measure, rows, options.workers, WHAT, name)
    print(dict(collections.Counter(row["outcome"] for row in rows.values())))


def measure_all(
    wanted: list[tuple[str, str]], one: Callable[..., dict[str, Any]], rows: Rows, workers: int, what: str, name: str
) -> None:
    """Into `rows` and the result file, as they come."""
    import families

    counts = {"families": len(families.causal_families()), "named": len(families.NAMED)}
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), max_tasks_per_child=24) as pool:
        tasks = [pool.submit(one, key) for key in wanted]
        for number, task in enumerate(as_completed(tasks), start=1):
            row = task.result()
            rows[_key(row)] = row
            made = [rows[key] for key in sorted(rows)]
            write_result(name, what, made, document(what, made) | counts)
            print(f"{number}/{len(wanted)} {' '.join(_key(row))}: {row.get('outcome', row)}", flush=True)


def _key(row: dict[str, Any]) -> tuple[str, str]:
    return row["family"], row.get("method", "")


def measure(key: tuple[str, str]) -> dict[str, Any]:
    import parity

    return _in_folder(lambda folder: parity.compare(*key, folder).fields())


def support(key: tuple[str, str]) -> dict[str, Any]:
    import support

    return _in_folder(lambda folder: support.support(key[0], folder))


def _in_folder(make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TUNESMITH_CACHE"] = folder + "/cache"
        return make(Path(folder) / "run")


if __name__ == "__main__":
    main()
