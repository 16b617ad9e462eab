"""What layers keep for their backward pass, counted: for architectures and adapters that the planner has no formula of.

The model's own layers, at their own widths and without memory (meta tensors), are prepared as training prepares them,
and what autograd saves of each is counted. On a GPU layers are compiled: the compiler's own partition of the graph into
its two passes says what is saved, and no kernel is made.

Some methods of peft look at weights, which meta tensors have not. They are counted on real layers of a few widths that
are a fraction of the model's: what is kept for a token grows with the width, what is made of weights with its square,
so that a few widths tell what is kept at the model's own.
"""

from __future__ import annotations

import contextlib
import gc
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from tunesmith.config.schema import Run
from tunesmith.kernels.operator import operator, register_backward
from tunesmith.model import adapters, load, lora, lora_modules
from tunesmith.model.experts import use_early_weights
from tunesmith.model.forward import Inputs, packed_hidden_states
from tunesmith.model.fuse import fuse
from tunesmith.model.gated import use_memory_efficient_gates
from tunesmith.model.rotary import fuse_rope
from tunesmith.model.structure import decoder_layers, replace_module, train_all
from tunesmith.model.work import Tally, storage_of
from tunesmith.plan.facts import KEPT_RANK, Kept, KeptByOwn, Work
from tunesmith.plan.model_states import BLOCKWISE
from tunesmith.plan.models import language_model_class
from tunesmith.plan.plan import GATES

TOKENS, REAL_TOKENS = 1031, 23
"""Primes, so that no width is taken for them."""
STAND_IN = "tunesmith_counted"
ATTENTION = ("counted_attention", "counted_attention_backward")
PARTITION = "aot_eager_decomp_partition"
"""torch's backend that parts the graph of both passes as its compiler does, and runs the parts as they are."""
MOST_KINDS = 4
"""Of layers; compiling one takes seconds."""
NARROW = ((64, 32, 16), (32, 16, 8), (16, 8, 4), (8, 4, 2))
"""Parts of the model's widths at which layers with weights are counted; the wider ones where a method's blocks do not
divide the narrow."""
NARROWEST = 16
MOST_REAL_LAYERS = 12
WIDTHS = ("hidden_size", "intermediate_size", "head_dim", "moe_intermediate_size", "shared_expert_intermediate_size")


def count_kept(
    config: Any,
    *,
    compiles: bool,
    fuses: bool,
    kernels: tuple[str, ...],
    seq_idx: bool = False,
    trust_remote_code: bool = False,
) -> tuple[Kept, ...] | None:
    """Of each layer. None where that cannot be said: layers that do not run without data, or whose attention is their
    own and keeps a value for each pair of tokens. Where layers of a CPU cannot be counted (matmuls of experts have no
    shapes in fp32), those of a GPU are, from which the planner knows the way."""
    for is_compiled in dict.fromkeys((compiles, True)):
        case = {"compiles": is_compiled, "on_gpu": is_compiled, "fuses": fuses, "kernels": kernels, "seq_idx": seq_idx}
        try:
            found = [
                _Counting(adapt, is_full=adapt is train_all, **case).run(config, trust_remote_code)
                for adapt in (train_all, _adapt_all)
            ]
        except Exception:  # the model's own code, run on tensors that hold nothing
            continue
        if not all(found):
            return None
        width = 2 if is_compiled else 4
        return tuple(
            Kept(full=full[0], adapters=adapted[0], width=width, is_compiled=is_compiled)
            for full, adapted in zip(*found, strict=True)
        )
    return None


def count_own(run: Run, *, on_gpu: bool, kernels: tuple[str, ...]) -> tuple[KeptByOwn, ...] | None:
    """Of each layer, with adapters of the run's own kind: those of the peft library, DoRA, dropout. None where there is
    a formula, or they cannot be put on layers without weights, or are none of the layers'."""
    is_prompt = adapters.is_prompt(run)
    if is_prompt or not (run.method == "peft" or (run.has_lora and (run.lora.dora or run.lora.dropout))):
        return None
    key = run.model_dump_json(include={"model", "peft", "adapter", "lora", "method", "trust_remote_code"})
    if (key, on_gpu, kernels) not in _counted:
        compiles = on_gpu and run.method != "peft"
        case = {"compiles": compiles, "on_gpu": on_gpu, "fuses": True, "kernels": kernels}
        counting = _Counting(partial(_adapt_as, run), is_full=False, **case)
        try:
            found = counting.run(load.load_config(run), run.trust_remote_code)
        except Exception:  # other people's code, as above
            found = _count_narrow(run, on_gpu=on_gpu, kernels=kernels) if run.method == "peft" else None
        width = 2 if on_gpu else 4
        _counted[key, on_gpu, kernels] = found and tuple(
            KeptByOwn(bytes=of_tokens, fixed=fixed, width=width, is_compiled=compiles) for of_tokens, fixed in found
        )
    return _counted[key, on_gpu, kernels]


def count_work(run: Run, *, kernels: tuple[str, ...]) -> tuple[Work, ...] | None:
    """Of each layer's two passes on a GPU, where a run's layers are not compiled: with methods of the peft library,
    LoQT, and optimizers that train some layers at a time. None of others, and where it cannot be counted."""
    if adapters.is_prompt(run) or not (run.method in ("peft", "loqt") or run.optimizer in BLOCKWISE):
        return None
    key = run.model_dump_json(include={"model", "peft", "adapter", "lora", "method", "optimizer", "trust_remote_code"})
    if (key, kernels) not in _worked:
        is_full = run.method == "full"
        adapt = _freeze if is_full else partial(_adapt_as, run)
        case = {"compiles": False, "on_gpu": True, "fuses": False, "kernels": kernels, "tallies": True}
        counting = _Counting(adapt, is_full=is_full, **case)
        try:
            found = counting.run(load.load_config(run), run.trust_remote_code)
            works = found and tuple(counting.works[kind] for kind in counting.kinds)
        except Exception:  # other people's code, as above
            works = _work_narrow(run) if run.method == "peft" else None
        _worked[key, kernels] = works
    return _worked[key, kernels]


_worked: dict[Any, tuple[Work, ...] | None] = {}


def _work_narrow(run: Run) -> tuple[Work, ...] | None:
    """By real layers of a few widths."""
    layers = load.load_config(run).get_text_config().num_hidden_layers
    for parts in NARROW:
        with contextlib.suppress(Exception), warnings.catch_warnings():  # as above
            warnings.simplefilter("ignore")
            return (_grown_work([_real_work(run, part) for part in parts], parts),) * layers
    return None


def _real_work(run: Run, part: int) -> Work:
    """Of a layer of such a part of the model's widths."""
    case = {"compiles": False, "on_gpu": True, "fuses": False, "kernels": (), "tallies": True}
    counting = _Counting(partial(_adapt_and_empty, run), is_full=False, part=part, **case)
    counting.run(_narrowed(load.load_config(run), part, 2), run.trust_remote_code, device="cpu", called_on="meta")
    return counting.works[counting.kinds[0]]


def _grown_work(works: list[Work], parts: tuple[int, ...]) -> Work:
    """At the model's own width: bytes of tokens, and kernels for blocks that are copied, grow with it, what is made of
    weights with its square, and matmuls of two such with its third power."""
    widths = [1 / part for part in parts]

    def pair(name: str, degree: int) -> tuple[float, float]:
        of_tokens, fixed = ([getattr(one, name)[place] for one in works] for place in (0, 1))
        cubed = fixed[-1] * parts[-1] ** 3
        return (
            _at_whole_width(widths, of_tokens, degree),
            _at_whole_width(widths, fixed, 2) if degree == 1 else cubed,
        )

    kernels = round(_at_whole_width(widths, [one.kernels for one in works], 1))
    return Work(bytes=pair("bytes", 1), half=pair("half", 2), full=pair("full", 2), kernels=kernels)


def _count_narrow(run: Run, *, on_gpu: bool, kernels: tuple[str, ...]) -> list[tuple[int, int]] | None:
    """By real layers of a few widths."""
    if any(name.startswith("layers_") and value is not None for name, value in vars(adapters.make_config(run)).items()):
        return None  # other layers than these are adapted
    hidden = load.load_config(run).get_text_config().hidden_size
    for parts in NARROW:
        if hidden < NARROWEST * parts[0] and parts is not NARROW[-1]:
            continue
        with (
            contextlib.suppress(Exception),
            warnings.catch_warnings(),
        ):  # other people's code, which may need more width
            warnings.simplefilter("ignore")
            return _grown(run, parts, on_gpu=on_gpu, kernels=kernels)
    return None


def _grown(run: Run, parts: tuple[int, ...], *, on_gpu: bool, kernels: tuple[str, ...]) -> list[tuple[int, int]] | None:
    """What is kept at the model's own width, by what is at these parts of it."""
    config = load.load_config(run)
    with load.quiet(), torch.device("meta"):
        whole = language_model_class(config).from_config(config, trust_remote_code=run.trust_remote_code)
    layers = decoder_layers(whole)
    kinds = [_kind(layer) for layer in layers]
    firsts = [kinds.index(kind) for kind in kinds]
    count = max(2, max(firsts) + 1)
    if count > MOST_REAL_LAYERS:
        return None
    case = {"compiles": False, "on_gpu": on_gpu, "fuses": True}
    found = []
    for part in parts:
        narrow = _narrowed(load.load_config(run), part, count)
        found.append(_count_real(run, narrow, (layers, part), {**case, "kernels": (), "tokens": REAL_TOKENS}))
    if None in found:
        return None
    # The kernel for positions is a GPU's; what it saves does not depend on adapters.
    with_kernels, without = (
        _Counting(_freeze, is_full=False, **case, kernels=some).run(config, run.trust_remote_code)
        for some in (kernels, ())
    )
    if with_kernels is None or without is None:
        return None
    widths = [1 / part for part in parts]
    grown = []
    for layer, first in enumerate(firsts):
        of_tokens, fixed = (
            _at_whole_width(widths, [one[first][place] for one in found], degree) for place, degree in ((0, 1), (1, 2))
        )
        grown.append((round(of_tokens) + with_kernels[layer][0] - without[layer][0], round(fixed)))
    return grown


def _count_real(
    run: Run, config: Any, like: tuple[list[nn.Module], int], case: dict[str, Any]
) -> list[tuple[int, int]] | None:
    """With weights while adapters are made of them, and where it can be without while layers are called: half precision
    takes minutes on some CPUs."""
    try:
        counting = _Counting(partial(_adapt_and_empty, run), is_full=False, **case)
        return counting.run(config, run.trust_remote_code, device="cpu", called_on="meta", like=like)
    except Exception:  # other people's code, as above
        counting = _Counting(partial(_adapt_as, run), is_full=False, **case)
        return counting.run(config, run.trust_remote_code, device="cpu", like=like)


def _narrowed(config: Any, part: int, layers: int) -> Any:
    """So many layers of a part of the widths, with few tokens."""
    load.cut(config, layers)
    text = config.get_text_config()
    for name in WIDTHS:
        if isinstance(size := getattr(text, name, None), int):
            if size % part:
                raise ValueError(f"{name} {size} has no part of 1/{part}")
            setattr(text, name, size // part)
    return config


def _check_like(layers: list[nn.Module], whole: list[nn.Module], part: int) -> None:
    """ValueError where the weights of narrow layers are no such part of the model's."""
    for narrow, wide in zip(layers, whole, strict=False):
        for (name, one), (_, other) in zip(narrow.named_parameters(), wide.named_parameters(), strict=True):
            for small, large in zip(one.shape, other.shape, strict=True):
                if large not in (small, small * part):
                    raise ValueError(f"{name} is {tuple(one.shape)} for {tuple(other.shape)}")


def _at_whole_width(widths: list[float], counts: list[float], degree: int) -> float:
    """At width 1, by the polynomial of this degree through what the widest of these widths have."""
    x, y = widths[-degree - 1 :], counts[-degree - 1 :]
    total = 0.0
    for place, value in enumerate(y):
        others = [one for at, one in enumerate(x) if at != place]
        total += value * math.prod((1 - one) / (x[place] - one) for one in others)
    return total


_counted: dict[Any, tuple[KeptByOwn, ...] | None] = {}
"""A plan asks more than once."""


def _adapt_all(model: nn.Module) -> None:
    model.requires_grad_(False)
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if lora_modules.is_linear(module) and module is not head:
            replace_module(model, name, lora_modules.LoraLinear(module, KEPT_RANK, 1.0).to("meta"))


def _freeze(model: nn.Module) -> None:
    model.requires_grad_(False)


def _adapt_as(run: Run, model: nn.Module) -> None:
    model.requires_grad_(False)
    if run.method == "peft":
        place = next(model.parameters()).device
        with torch.device(place):
            adapters.put_on(model, run, empty=place.type == "meta")
        return
    for name in lora.find_targets(model, run.lora):
        linear = model.get_submodule(name)
        if lora_modules.is_linear(linear):
            one = lora_modules.LoraLinear(linear, run.lora.rank, 1.0, run.lora.dropout, dora=run.lora.dora)
            one.lora_a.requires_grad_(run.method != "loqt")
            replace_module(model, name, one.to("meta"))


def _adapt_and_empty(run: Run, model: nn.Module) -> None:
    """The same, after which no weight takes memory."""
    _adapt_as(run, model)
    model.to("meta")


@dataclass
class _Counting:
    adapt: Callable[[nn.Module], None]
    """Puts adapters on, and says what is trained."""
    is_full: bool
    compiles: bool
    on_gpu: bool
    fuses: bool
    kernels: tuple[str, ...]
    seq_idx: bool = False
    tokens: int = TOKENS
    tallies: bool = False
    """Whether the work of both passes is counted, too."""
    part: int = 1
    """Of the model's widths."""
    kinds: list[Any] = field(default_factory=list)
    works: dict[Any, Work] = field(default_factory=dict)
    known: dict[Any, tuple[int, int] | None] = field(default_factory=dict)
    """By kind of layer: bytes for each token, and those that are kept for any number of them."""
    held: list[torch.Tensor] = field(default_factory=list)
    """What is there before the layers are called: weights, and what a method keeps where no module holds it."""

    def run(
        self,
        config: Any,
        trust_remote_code: bool,
        *,
        device: str = "meta",
        called_on: str | None = None,
        like: tuple[list[nn.Module], int] | None = None,
    ) -> list[tuple[int, int]] | None:
        """`like`: the layers of which these must be such a part."""
        dtype = torch.bfloat16 if self.on_gpu else torch.float32
        with load.quiet(), torch.device(device), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = (
                language_model_class(config)
                .from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
                .train()
            )
        if like is not None:
            _check_like(decoder_layers(model), *like)
        self.adapt(model)
        model.get_input_embeddings().requires_grad_(True)  # so that the first layer is like the others
        layers = decoder_layers(model)
        kinds = [_kind(layer) for layer in layers]
        if not layers or len(set(kinds)) > MOST_KINDS:
            return None
        for layer, kind in zip(layers, kinds, strict=True):
            if kind in self.known:
                layer.forward = _passed_on
                continue
            self.known[kind] = None
            self._prepare(layer, dtype)
            layer.forward = self._counted(layer, kind)
        inputs = _inputs(self.tokens, called_on or device)
        self.held = [part for one in _every_tensor() for part in _dense(one)]
        with _attention_of(model, on_gpu=self.on_gpu):
            packed_hidden_states(model, inputs, seq_idx=self.seq_idx)
        self.held = []
        self.kinds = kinds
        counts = [self.known[kind] for kind in kinds]
        return None if None in counts else counts  # pyright: ignore

    def _prepare(self, layer: nn.Module, dtype: torch.dtype) -> None:
        """As `parallel.prepare` does."""
        if not self.is_full and self.fuses:
            fuse(layer, fp8=False, fuse_mlps=self.compiles and any(gate in self.kernels for gate in GATES))
        if self.on_gpu and self.is_full:
            use_memory_efficient_gates(layer, self.kernels)
        if self.on_gpu and "experts" in self.kernels:
            use_early_weights(layer)
        if self.on_gpu and "rope" in self.kernels:
            fuse_rope(layer, dtype, torch.device("meta"))

    def _counted(self, layer: nn.Module, kind: Any) -> Callable:
        forward = torch.compile(layer.forward, backend=PARTITION) if self.compiles else layer.forward

        def count(*arguments: Any, **named: Any) -> Any:
            hidden = arguments[0] if arguments else named["hidden_states"]
            given = [part for one in _tensors_in((arguments, named)) for part in _dense(one)]
            held = self.held + given  # so that no place is taken again
            before = {storage_of(part) for part in held} - {storage_of(hidden)}
            kept: dict[int, torch.Tensor] = {}

            def keep(tensor: torch.Tensor) -> torch.Tensor:
                for one in _dense(tensor):
                    if storage_of(one) not in before:
                        kept.setdefault(storage_of(one), one)
                return tensor

            tally = Tally(self._is_of_tokens, self.tokens, ATTENTION, self.part)
            hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
            with hooks, tally if self.tallies else contextlib.nullcontext():
                result = forward(*arguments, **named)
                if self.tallies:
                    _backward(layer, hidden, result)
            self.works[kind] = tally.work()
            tokens = self.tokens
            if not any(tensor.shape.count(tokens) > 1 for tensor in kept.values()):
                sizes = [(self._is_of_tokens(one.shape), one.untyped_storage().nbytes()) for one in kept.values()]
                of_tokens, fixed = (sum(size for is_own, size in sizes if is_own is one) for one in (True, False))
                self.known[kind] = of_tokens // tokens, fixed
            del held
            return result

        return count

    def _is_of_tokens(self, shape: torch.Size) -> bool:
        """Whether it grows with their number, or with that of their copies for several experts; few tokens have
        multiples among the widths."""
        if self.tokens == TOKENS:
            return any(size and size % self.tokens == 0 for size in shape)
        return self.tokens in shape


def _backward(layer: nn.Module, hidden: torch.Tensor, result: Any) -> None:
    out = next(_tensors_in(result))
    trained = [one for one in (hidden, *layer.parameters()) if one.requires_grad]
    torch.autograd.grad(out, trained, torch.empty_like(out), retain_graph=True, allow_unused=True)


def _kind(layer: nn.Module) -> Any:
    weights = tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters())
    return type(layer), weights, getattr(layer, "attention_type", None), getattr(layer, "layer_type", None)


def _passed_on(hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
    return hidden_states


def _dense(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that it is held in."""
    return (tensor._indices(), tensor._values()) if tensor.layout is torch.sparse_coo else (tensor,)


def _every_tensor() -> Iterator[torch.Tensor]:
    yield from (one for one in gc.get_objects() if issubclass(type(one), torch.Tensor))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(one)


def _inputs(count: int, device: str) -> Inputs:
    whole = {"device": device, "dtype": torch.int64}
    tokens, positions, labels = (torch.zeros(count, **whole) for _ in range(3))
    boundaries = torch.tensor([0, 1, 2, 3, count], dtype=torch.int32).to(device)
    return Inputs(tokens, positions, boundaries, count, positions, labels, torch.ones(count, device=device))


# Attention that computes nothing, and keeps what kernels keep: queries, keys, values, the output and logarithms.


@operator("counted_attention")
def counted(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    out = q.new_empty(*q.shape[:2], v.shape[2])
    return out, q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.register_fake(counted)
def _(q, k, v, queries, keys):
    return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[:2], dtype=torch.float32)


@operator("counted_attention_backward")
def counted_backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


register_backward(counted, counted_backward)


def _attend(_module, query, key, value, _mask, *, cu_seq_lens_q=None, **_):
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    return counted(q, k, v, cu_seq_lens_q, cu_seq_lens_q)[0].unsqueeze(0), None


def _attend_on_cpu(_module, query, key, value, _mask, *, cu_seq_lens_q=None, **_):
    """Document by document, whose outputs are put together once more."""
    q, k, v = (tensor.squeeze(0) for tensor in (query, key, value))
    out, _ = counted(q, k, v, cu_seq_lens_q, cu_seq_lens_q)
    return out.transpose(0, 1).contiguous().unsqueeze(0), None


@contextlib.contextmanager
def _attention_of(model: nn.Module, *, on_gpu: bool) -> Iterator[None]:
    from transformers import AttentionInterface

    AttentionInterface.register(STAND_IN, _attend if on_gpu else _attend_on_cpu)
    model.config._attn_implementation = STAND_IN
    if (text := model.config.get_text_config()) is not model.config:
        text._attn_implementation = STAND_IN
    try:
        yield
    finally:
        torch._dynamo.reset()
