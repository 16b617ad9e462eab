"""How fast a run is: tokens over the time of the same steps.

A mean of rates would be another number, and a too large one where steps differ. Steps that also compile or warm up say
nothing about the others and are left out, unless there are no others.
"""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 30.0
"""Of the steps behind the speed that is shown while a run goes on."""
WINDOW_STEPS = 5
"""At least, however long they take."""


class Speed:
    """Of the steps it was told about, and of the latest of them."""

    def __init__(self) -> None:
        self.tokens = 0
        self.seconds = 0.0
        """Of all steps, with what they compiled."""
        self._compiling = 0.0
        self._steady = (0, 0.0)
        self._window: deque[tuple[int, float]] = deque()

    def add(self, tokens: int, seconds: float, *, is_warm_up: bool, compiling: float = 0.0) -> None:
        self.tokens += tokens
        self.seconds += seconds
        self._compiling += min(seconds, compiling)
        if is_warm_up:
            return
        self._steady = (self._steady[0] + tokens, self._steady[1] + seconds)
        self._window.append((tokens, seconds))
        while len(self._window) > WINDOW_STEPS and self._seconds() - self._window[0][1] >= WINDOW_SECONDS:
            self._window.popleft()

    @property
    def overall(self) -> float:
        """Tokens a second."""
        tokens, seconds = self._steady if self._steady[1] else (self.tokens, self.seconds - self._compiling)
        return tokens / seconds if seconds else 0.0

    @property
    def training_seconds(self) -> float:
        """What all steps take at that speed. What they took beyond it, they compiled."""
        return self.tokens / self.overall if self.overall else 0.0

    @property
    def now(self) -> float | None:
        """Tokens a second of the latest steps; None where all that there were compiled something."""
        return sum(tokens for tokens, _ in self._window) / self._seconds() if self._seconds() else None

    @property
    def step_seconds(self) -> float | None:
        """Of one of the latest steps."""
        return self._seconds() / len(self._window) if self._window else None

    def _seconds(self) -> float:
        return sum(seconds for _, seconds in self._window)
