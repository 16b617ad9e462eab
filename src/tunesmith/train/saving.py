"""A checkpoint on its way to the disk, beside training or before it goes on."""

from __future__ import annotations

import threading
import time

from tunesmith.checkpoint.store import Saving


class CheckpointWriting:
    """A checkpoint on its way to the disk: written at once, or by a thread beside training."""

    def __init__(self, step: int, began: float, checkpoint: Saving, *, is_async: bool):
        self.step = step
        self.seconds = 0.0
        """From the first copy to the last byte."""
        self._began = began
        self._checkpoint = checkpoint
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True) if is_async else None
        if self._thread is None:
            self._write()
        else:
            self._thread.start()

    @property
    def is_written(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> bool:
        """Wait for it; whether it is on the disk. A matter of all ranks."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return bool(self._checkpoint.finish())

    def _write(self) -> None:
        try:
            self._checkpoint.write()
        except BaseException as error:  # for the thread that waits
            self._error = error
        self.seconds = time.monotonic() - self._began
