"""Layers compiled one by one. One that cannot be is run as it is, and said so.

What the compiler made is kept in Tunesmith's cache, so that the next run of the same shapes starts in seconds. How long
compiling took and what did not work is collected here until `news` is asked for it.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch._dynamo  # the whole of it, before a thread imports what it is imported by
from torch import nn

import tunesmith
from tunesmith.cache import folder_to_fill

MOST_VARIANTS = 64
"""Of one layer's code: with and without gradients, kinds of layers, sliding windows. torch gives up after 8."""


@dataclass(frozen=True)
class Compilation:
    seconds: float
    notes: tuple[str, ...]
    """A sentence for each kind of failure."""


def compiled(
    forward: Callable, name: str, *, fullgraph: bool = False, kind: Hashable = None, failed: set[Hashable] | None = None
) -> Callable:
    """`forward`, compiled when it is first called. `fullgraph`: as one graph or not at all.

    What is not compiled adds its `kind` to `failed`; others of a kind that stands there are run as they are, untried,
    since finding out takes seconds each time.
    """
    prepare()
    fast: Callable | None = torch.compile(forward, fullgraph=fullgraph)
    failed = set() if failed is None else failed

    def attempt(*arguments, **named):
        nonlocal fast
        if fast is not None and (fullgraph, kind) not in failed:
            try:
                return fast(*arguments, **named)
            except torch._dynamo.exc.FailOnRecompileLimitHit as error:  # others may have what they need
                _news.failed(name, error)
                fast = None
            except torch._dynamo.exc.TorchDynamoException as error:
                _news.failed(name, error)
                failed.add((fullgraph, kind))
        return forward(*arguments, **named)

    return attempt


def structure_of(layer: nn.Module) -> Hashable:
    """Equal for layers whose code takes the same way, as far as their modules, shapes and switches tell: numbers, such
    as a layer's own, do not count."""
    modules = tuple((name, type(module), _switches(module)) for name, module in layer.named_modules())
    weights = tuple(
        (name, weight.shape, weight.dtype, weight.requires_grad) for name, weight in layer.named_parameters()
    )
    return modules, weights


def _switches(module: nn.Module) -> tuple:
    return tuple(
        (name, value if isinstance(value, bool | str | None) else type(value)) for name, value in vars(module).items()
    )


def tell(note: str) -> None:
    """A sentence to be said with the news."""
    _news.note(note)


def news() -> Compilation | None:
    """What happened since this was last asked; None when there is nothing to say."""
    return _news.take()


class _News:
    def __init__(self) -> None:
        self.seconds = 0.0
        self.notes: list[str] = []
        self.said: set[str] = set()
        self.began: float | None = None

    def started(self, _about: object) -> None:
        self.began = time.monotonic()

    def ended(self, _about: object) -> None:
        if self.began is not None:
            self.seconds += time.monotonic() - self.began
        self.began = None

    def failed(self, name: str, error: Exception) -> None:
        cause = getattr(error, "inner_exception", error)
        why = next((line.strip() for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
        self.note(f"{name} could not be compiled ({why.rstrip('.')}); it is run as it is, which is right but slower.")

    def note(self, note: str) -> None:
        if note not in self.said:
            self.said.add(note)
            self.notes.append(note)

    def take(self) -> Compilation | None:
        if not self.seconds and not self.notes:
            return None
        compilation = Compilation(self.seconds, tuple(self.notes))
        self.seconds, self.notes = 0.0, []
        return compilation


_news = _News()


def prepare() -> None:
    """Settings of the compiler, which are the process's."""
    from torch._dynamo.callback import callback_handler
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # Importing torch's compiler sets the folder to a temporary one, which is not what a user said.
    is_open = os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir())
    if is_open and (folder := folder_to_fill("compiled")):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    torch._dynamo.config.recompile_limit = max(MOST_VARIANTS, torch._dynamo.config.recompile_limit)
    # Numbers of a layer, such as its soft cap, are constants: FlexAttention takes no symbols for them.
    torch._dynamo.config.specialize_float = True
    # Backward is compiled together with forward, where a failure can still be answered.
    torch._functorch.config.force_non_lazy_backward_lowering = True
    # Layers with functions that have a backward pass of their own are kept, too. Their code is part of what is looked
    # up; of operators only the names are, so all our code is added to it.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    if not torch.compiler.config.cache_key_tag.endswith(_own_code()):
        torch.compiler.config.cache_key_tag += _own_code()
    if _news.started not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_news.started)
        callback_handler.register_end_callback(_news.ended)


@cache
def _own_code() -> str:
    """Changes with it, and so with the shapes and gradients of our operators."""
    digest = hashlib.sha256()
    for file in sorted(Path(tunesmith.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
