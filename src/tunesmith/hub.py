"""Whether the Hugging Face hub answers, found out within four seconds instead of minutes of retries.

It is asked once, as its own library would ask (endpoint, proxies and certificates by the environment), and where it
does not answer, all libraries are told that there is none: what they have kept is all there is.
"""

from __future__ import annotations

import functools
import os
import sys
from threading import Thread

from tunesmith.errors import first_line

SECONDS = 4.0
"""For everything: names, proxies, handshakes and the answer. A name server may keep one waiting far longer."""


def is_reachable() -> bool:
    return why_unreachable() is None


@functools.cache
def why_unreachable() -> str | None:
    """The reason, in a few words; None where the hub answers."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        return "HF_HUB_OFFLINE is set"
    import huggingface_hub.constants
    from huggingface_hub.utils import get_session

    endpoint = huggingface_hub.constants.ENDPOINT
    found: list[str | None] = []

    def ask() -> None:
        try:
            answer = get_session().head(endpoint, timeout=SECONDS, follow_redirects=False)
            found.append(f"it answers with status {answer.status_code}" if answer.status_code >= 500 else None)
        except Exception as error:  # of sockets, names, proxies and certificates, each with a class of its own
            found.append(_reason(error))

    thread = Thread(target=ask, name="hub", daemon=True)
    thread.start()
    thread.join(SECONDS)
    why = found[0] if found else f"no answer within {SECONDS:.0f} seconds"
    if why is None:
        return None
    _go_offline()
    proxy = next(
        (name for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy") if os.environ.get(name)), ""
    )
    return f"{endpoint}: {why}" + (f"; {proxy} is set" if proxy else "")


def unreachable() -> str:
    """For a sentence."""
    why = why_unreachable()
    return f"the hub cannot be reached ({why})" if why else "the hub cannot be reached"


def _go_offline() -> None:
    """Else the hub's libraries would ask again and again."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # for those that are imported later, and for other processes
    for module in ("huggingface_hub.constants", "datasets.config"):
        if module in sys.modules:
            sys.modules[module].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]


def _reason(error: Exception) -> str:
    said = first_line(error)
    if "timed out" in said.lower() or "Timeout" in type(error).__name__:
        return f"no answer within {SECONDS:.0f} seconds"
    return said
