"""The README's picture of a terminal (docs/run.svg): its commands are run, and its lines are what they said.

    python docs/terminal.py SmolLM2-135M-Instruct.Q4_1.gguf

In an empty folder with the demo's data, that model and a run.yaml. Lines that the picture has no room for are left out,
and `...` stands for them; a line that is too long is broken.
"""

from __future__ import annotations

import argparse
import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
COLUMNS, ACROSS, DOWN = 100, 7.8, 18
"""Characters in a line; and what one takes, in points."""
COMMANDS: dict[str, str] = {
    "cat run.yaml": ".",
    "tunesmith plan run.yaml": r"parameters|^Memory of|^\[|^ +memory +bytes|^\w  \w+ +[\d.]+ [KMG]iB|^Speed",
    "tunesmith train run.yaml": r"step 0:|step (\d+)/\1 |step \d\d: held-out|steps in|in all:|^Peak|^Done|^`|/adapter",
    'tunesmith chat runs/smithy --temperature 0 --prompt "Who are you?"': ".",
    "tunesmith merge runs/smithy --to merged": ".",
}
"""What is run, and which lines of what it says are shown."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    model = parser.parse_args().model.resolve()
    with tempfile.TemporaryDirectory() as name:
        here = Path(name) / "smithy"
        write_files(here, model)
        lines = [line for command, shown in COMMANDS.items() for line in said_by(command, re.compile(shown), here)]
    if name in "".join(lines) or str(model.parent) in "".join(lines):
        raise SystemExit("A path of this machine is in the picture.")
    (ROOT / "docs" / "run.svg").write_text(picture(lines[:-1]))
    print("\n".join(lines))


def write_files(here: Path, model: Path) -> None:
    demo = ROOT / "examples" / "demo"
    here.mkdir()
    os.link(model, here / model.name) if os.stat(model).st_dev == os.stat(here).st_dev else shutil.copy(model, here)
    for one in ("identity.jsonl", "held_out.jsonl"):
        shutil.copy(demo / one, here)
    settings = (demo / "run.yaml").read_text().replace("examples/demo/", "").replace("runs/demo", "runs/smithy")
    settings = re.sub(r"^model: .*", f"model: {model.name}", settings, flags=re.MULTILINE)
    settings = settings.replace("batch_tokens: 512", "batch_tokens: 256").replace("epochs: 2", "epochs: 1")
    settings = re.sub(r" *#.*", "", settings).strip() + "\n"
    (here / "run.yaml").write_text(settings)


def said_by(command: str, shown: re.Pattern[str], here: Path) -> list[str]:
    """The command, what it says on a terminal of that width, and an empty line."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": str(COLUMNS), "TUNESMITH_CACHE": f"{here}/../cache"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(command, shell=True, cwd=here, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr}")
    lines = [f"$ {command}"]
    for line in done.stdout.splitlines():
        if shown.search(line):
            lines += textwrap.wrap(line, COLUMNS, drop_whitespace=False, break_on_hyphens=False) or [""]
        elif line.strip() and lines[-1] != "...":
            lines.append("...")
    return [*lines, ""]


def picture(lines: list[str]) -> str:
    width, height = round(COLUMNS * ACROSS + 36), DOWN * len(lines) + 58
    rows = []
    for number, line in enumerate(lines):
        text = line.lstrip()
        if not text:
            continue
        x, y = 18 + ACROSS * (len(line) - len(text)), 53.5 + DOWN * number
        style = "fill:#c9d1d9"
        if line.startswith("$ "):
            style = "fill:#ffffff;font-weight:bold"
        elif line == "...":
            style = "fill:#6e7681"
        rows.append(
            f'<text x="{x:.1f}" y="{y}" textLength="{ACROSS * len(text.rstrip()):.1f}" lengthAdjust="spacingAndGlyphs" '
            f'style="{style};white-space:pre">{html.escape(text.rstrip(), quote=False)}</text>'
        )
    dots = "\n".join(
        f'<circle cx="{x}" cy="18" r="5" fill="{colour}"/>'
        for x, colour in ((22, "#ff5f56"), (38, "#ffbd2e"), (54, "#27c93f"))
    )
    font = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img">\n<title>In a terminal: tunesmith plan, train, chat and merge</title>\n'
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>\n{dots}\n'
        f'<g font-family="{font}" font-size="13">\n' + "\n".join(rows) + "\n</g>\n</svg>\n"
    )


if __name__ == "__main__":
    main()
