"""What all requests to a server share."""

from __future__ import annotations

from dataclasses import dataclass

from tunesmith.serve.engine import Engine
from tunesmith.serve.metrics import Metrics


@dataclass
class Service:
    """The engine that answers, what is counted of its answers, and whether new requests are still taken."""

    engine: Engine
    metrics: Metrics
    is_draining: bool = False
