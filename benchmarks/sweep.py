"""Four adapters over one base: a sweep in one process against four runs one after another, through the command line.

    python benchmarks/sweep.py --model MODEL [--folder FOLDER] [--only alone|sweep] [key=value ...]

The settings are the demo's (examples/demo/run.yaml), with two learning rates and two ranks. Besides the seconds, it
says whether each variant of the sweep ends with the same bytes as the run alone. `--only` measures one of the two and
keeps the other's numbers.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from results import read_rows, write_result

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "examples/demo/run.yaml"
SWEPT: dict[str, list[Any]] = {"learning_rate": [2e-3, 4e-3], "lora.rank": [8, 16]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--folder", type=Path, default=Path("sweep-benchmark"))
    parser.add_argument("--only", choices=("alone", "sweep"))
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    os.chdir(ROOT)
    folder = options.folder.resolve()
    rows = {row["what"]: row for row in read_rows("sweep")}
    common = [f"model={options.model}", *options.overrides]
    variants = [dict(zip(SWEPT, values, strict=True)) for values in itertools.product(*SWEPT.values())]
    if options.only != "sweep":
        shutil.rmtree(folder / "alone", ignore_errors=True)
        rows["alone"] = {"what": "alone", "seconds": 0.0, "cpu_seconds": 0.0, "spent": {}}
        for variant in variants:
            name = "_".join(f"{key}={value:g}" for key, value in variant.items())
            settings = [f"{key}={value}" for key, value in variant.items()]
            added = timed([*common, *settings, f"output={folder / 'alone' / name}"])
            add(rows["alone"], added, [folder / "alone" / name])
        rows["alone"]["adapters"] = digest(folder / "alone")
    if options.only != "alone":
        shutil.rmtree(folder / "sweep", ignore_errors=True)
        swept = json.dumps(SWEPT)
        rows["sweep"] = {"what": "sweep", "seconds": 0.0, "cpu_seconds": 0.0, "spent": {}}
        added = timed([*common, f"sweep={swept}", f"output={folder / 'sweep'}"])
        add(rows["sweep"], added, sorted(one.parent for one in (folder / "sweep").glob("*/summary.json")))
        rows["sweep"]["adapters"] = digest(folder / "sweep")
    if {"alone", "sweep"} <= rows.keys():
        alone, sweep = rows["alone"], rows["sweep"]
        found = {name: round(sweep[name] / alone[name], 3) for name in ("seconds", "cpu_seconds")}
        rows["ratio"] = {"what": "ratio", **found, "is_bit_identical": alone["adapters"] == sweep["adapters"]}
    for row in rows.values():
        print(row, flush=True)
    print(f"wrote {write_result('sweep', 'A sweep of four adapters against four runs, CPU demo', list(rows.values()))}")


def timed(overrides: list[str]) -> dict[str, float]:
    """Of one `tunesmith train`."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([sys.executable, "-m", "tunesmith", "train", CONFIG, *overrides], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": time.monotonic() - began, "cpu_seconds": used}


def add(row: dict[str, Any], added: dict[str, float], folders: list[Path]) -> None:
    for name, value in added.items():
        row[name] = round(row[name] + value, 1)
    for folder in folders:
        finished = json.loads((folder / "events.jsonl").read_text().splitlines()[-1])
        for name, seconds in finished["spent"].items():
            row["spent"][name] = round(row["spent"].get(name, 0.0) + seconds, 1)


def digest(folder: Path) -> str:
    """Of the trained adapters of all runs below it, with their names."""
    made = hashlib.sha256()
    for file in sorted(folder.glob("*/adapter/adapter_model.safetensors")):
        made.update(f"{file.parts[-3]} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return made.hexdigest()[:16]


if __name__ == "__main__":
    main()
