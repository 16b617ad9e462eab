"""A run as one HTML file that needs nothing else: style, script and figures are inside, and no request leaves it."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import time
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from tunesmith.ui.read import open_log, page, text
from tunesmith.ui.samples import read_tokenizer, shown


def asset(name: str) -> str:
    return (resources.files("tunesmith.ui") / "assets" / name).read_text(encoding="utf-8")


def report(folder: Path) -> str:
    """The page of the run in `folder`."""
    folder = Path(folder)
    run = {"name": text(folder.resolve().name), **page(folder, open_log(folder))}
    run["samples"] = shown(folder, read_tokenizer(folder), steps=4, documents=6)
    style = asset("uplot.css") + asset("page.css")
    licence = "/*! uPlot 1.6.32\n" + asset("uplot.LICENSE") + "*/\n"
    script = licence + "\n".join(asset(name) for name in ("uplot.js", "page.js", "report.js"))
    # Only these very bytes run and style the page, whatever a name or an answer in it says.
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    return Template(asset("report.html")).substitute(
        policy=html.escape(policy),
        title=html.escape(f"{run['name']}, a run of Tunesmith"),
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        style=style,
        run=script_json(run),
        script=script,
    )


def script_json(value: Any) -> str:
    """JSON that may stand inside a script element: nothing in it ends or opens one."""
    made = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return made.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
