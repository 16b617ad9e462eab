"""Pictures of every page for docs/ui.md, from recorded runs and one small run that is really trained:

make screenshots        needs chromium and node
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

DOCS = Path(__file__).parents[2] / "docs"
PHONE = {"width": 390, "height": 844}
LARGEST = 150_000


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="screenshots-", ignore_cleanup_errors=True) as name:
        here = Path(name)
        os.environ |= {"TUNESMITH_CACHE": str(here / "cache"), "SHOTS": str(here / "shots")}
        (here / "work" / "runs").mkdir(parents=True)
        (here / "shots").mkdir()
        record(here / "work")
        take(here)
        for shot in sorted((here / "shots").glob("*.png")):
            content = shot.read_bytes()
            (DOCS / shot.name).write_bytes(content)
            print(f"{shot.name}: {len(content):,} bytes")
            if len(content) > LARGEST:
                raise SystemExit(f"{shot.name} is larger than {LARGEST:,} bytes.")


def record(work: Path) -> None:
    from recorded_runs import record_run
    from tunesmith.ui.labels import write_tags

    runs = work / "runs"
    warning = "12 of 3,010 records are longer than sequence_length and were cut."
    record_run(runs / "support-lora", steps=600, samples=True, warnings=(warning,))
    record_run(runs / "support-low-rate", steps=600, seed=1, learning_rate=5e-5)
    record_run(runs / "support-dpo", steps=220, total=400, ends="stopped", seed=2, objective="dpo")
    record_run(runs / "alpaca-full", steps=90, total=900, ends=None, seed=3, method="full")
    write_tags(runs / "support-lora", ["for release"])
    (work / "run.yaml").write_text("model: models/SmolLM2-135M\ndata: support.jsonl\noutput: runs/new\n")
    (work / "typo.yaml").write_text("model: models/SmolLM2-135M\ndata: support.jsonl\nepoch: 2\n")
    train_with_corrupt_records(work)


def train_with_corrupt_records(work: Path) -> None:
    """A run of a tiny model on 240 records, five of which are no language."""
    from tiny import SETTINGS
    from tiny_model import make_tiny_model
    from tunesmith.config.load import from_mapping
    from ui.test_documents import trained, write_records

    os.chdir(work)
    model = make_tiny_model(Path("tiny"))
    given = {
        "model": str(model),
        "data": [{"path": str(write_records(Path("train.jsonl"), 240))}],
        "eval": [],
        "held_out": 0,
        "epochs": 1,
    }
    given |= {"batch_tokens": 512, "learning_rate": 2e-2, "save_every": 10, "keep": 9, "eval_every": 1000}
    trained(from_mapping(SETTINGS | given | {"output": "runs/corrupt-records"}))


def take(here: Path) -> None:
    from tunesmith.train import documents
    from tunesmith.ui.runs import run_id
    from ui.test_browser import browse
    from ui.test_server import serving

    one, two, spike = (run_id(name) for name in ("support-lora", "support-low-rate", "corrupt-records"))
    kept = documents.read(here / "work" / "runs" / "corrupt-records")
    steps = sorted(kept)
    worst = max((step for step in steps if step > 10), key=lambda step: float(kept[step]["loss"].max()))
    charts = "document.querySelectorAll('.u-over').length >= 4"
    samples = f"{charts} && document.querySelector('.tokens')"
    scroll = (
        "(async () => { await new Promise((done) => setTimeout(done, 800));"
        " document.getElementById('s-answers').scrollIntoView(); })()"
    )
    choose = (
        "(async () => { const plot = document.querySelector('.plot');"
        " const press = (key) => plot.dispatchEvent(new KeyboardEvent('keydown', { key }));"
        f" press('Home'); for (let i = 0; i < {steps.index(worst)}; i++) press('ArrowRight'); press('Enter');"
        " await new Promise((done) => setTimeout(done, 800));"
        " document.querySelector('[id^=s-documents]').scrollIntoView(); })()"
    )
    plan = (
        "(async () => { const [models, , hardware] = document.querySelectorAll('select'); hardware.value = 'H100';"
        " models.value = [...models.options].find((one) => one.text.includes('8B')).value;"
        " [...document.querySelectorAll('button')].find((one) => one.textContent === 'Plan').click();"
        " for (let i = 0; i < 300 && !document.querySelector('.bar'); i++)"
        " await new Promise((done) => setTimeout(done, 100)); })()"
    )
    rows = "document.querySelectorAll('table.runs tbody tr').length === 5"
    listed = "document.querySelectorAll('select')[0]?.options.length > 5"
    pages = [
        (
            "runs",
            {"page": "#/", "wait": rows, "height": 460},
        ),
        ("run", {"page": f"#/run/{one}", "wait": samples}),
        ("answers", {"page": f"#/run/{one}", "wait": samples, "script": scroll, "height": 900}),
        ("spike", {"page": f"#/run/{spike}", "wait": charts, "script": choose, "height": 600}),
        ("compare", {"page": f"#/compare/{one},{two}", "wait": charts}),
        ("start", {"page": "#/start", "wait": "document.querySelectorAll('main table').length", "height": 420}),
        ("plan", {"page": "#/plan", "wait": listed, "script": plan}),
    ]
    # Somewhere else between two pictures of a page: each is drawn anew
    away = {"page": "#/start", "wait": "document.querySelectorAll('main table').length", "shot": "away"}
    orders = []
    for name, order in pages:
        orders += [
            away,
            order | {"shot": f"ui-{name}"},
            away,
            order | {**PHONE, "dark": True, "shot": f"ui-{name}-phone"},
        ]
    os.chdir(here / "work")
    with serving(Path("runs")) as server:  # as `tunesmith ui` is started, so that no path of a machine is seen
        seen = browse(server, here / "profile", orders)
    (here / "shots" / "away.png").unlink()
    missing = [page["page"] for page in seen["pages"] if not page["isReady"]]
    if seen["errors"] or missing:
        raise SystemExit(f"The pages failed: {seen['errors']}, {missing}.")


if __name__ == "__main__":
    main()
