"""How a model is made ready: one ordered list of transforms, which every unit of it goes through.

A unit is a decoder layer, or what surrounds the layers (embedding, last norm, head). A unit goes through the whole list
before the next one begins, so that of a model over several ranks no more than one layer is ever whole on a device, and
of one that is quantized no more than one layer is there in full precision. One device is a mesh of size 1: the same
path, on which the transforms that have nothing to do return at once. Training, evaluation, generation, merging,
benchmarks and the check of parallelism all come through here, with the transforms that they need.

    files or state dict ─► read ─► adapt ─► fake-quantize ─► split ─► spread experts ─► watch routers ─► fuse
                                ─► swap kernels ─► slice ─► checkpoint ─► compile ─► offload ─► to host ─► shard
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.model import adapters, attention, load, lora
from tunesmith.model.content import Content
from tunesmith.model.experts import use_early_weights
from tunesmith.model.fake_quantize import FakeQuantization
from tunesmith.model.files import Read, memory_for, own_copy
from tunesmith.model.forward import is_adapted
from tunesmith.model.fp8 import use_fp8_head_gradient, use_fp8_linears
from tunesmith.model.fuse import fuse
from tunesmith.model.gated import use_memory_efficient_gates
from tunesmith.model.grown import new_ids
from tunesmith.model.head import has_head, head_name, is_headed
from tunesmith.model.noise import put_noise_on
from tunesmith.model.prefetch import beside
from tunesmith.model.prefix import SharedPrefix
from tunesmith.model.quantized import Reading, put_weights
from tunesmith.model.rotary import fuse_rope
from tunesmith.model.routers import Routing
from tunesmith.model.source import WeightSource, find_source
from tunesmith.model.structure import decoder_layers, linears_of_layers, set_attention, train_all
from tunesmith.parallel.activation import HostStore, checkpointed, offloaded, slice_mlp
from tunesmith.parallel.compile import compiled, structure_of
from tunesmith.parallel.context import attend_over
from tunesmith.parallel.expert import find_experts, spread_experts
from tunesmith.parallel.host_weights import HostWeights
from tunesmith.parallel.mesh import context_mesh, data_mesh, world_mesh
from tunesmith.parallel.pipeline import Pipelined, Stages, cut
from tunesmith.parallel.shard import Sharding, is_sharded
from tunesmith.parallel.sharded_load import SharedReading, put_rows, read_rows, shared_as_they_are
from tunesmith.parallel.tensor import TensorParallelPlan
from tunesmith.plan.plan import GATES, Kernel, Mesh, Plan, Storage


@dataclass(frozen=True)
class Unit:
    """A decoder layer, what surrounds the layers, or all of a model whose layers share weights with each other."""

    module: nn.Module
    name: str = ""
    """Of a layer; empty for what surrounds the layers."""
    layers: Sequence[nn.Module] = ()
    """The decoder layers that are in it."""
    others: tuple[str, ...] = ()
    """Names of units of their own inside this one."""

    def owns(self, name: str) -> bool:
        """Whether a module or weight of the model belongs to this unit."""
        if self.name:
            return name.startswith(f"{self.name}.")
        return not name.startswith(tuple(f"{other}." for other in self.others))

    def weights(self) -> list[tuple[str, nn.Parameter]]:
        """By the names they have in the model."""
        prefix = f"{self.name}." if self.name else ""
        named = ((prefix + name, weight) for name, weight in self.module.named_parameters())
        return [(name, weight) for name, weight in named if self.owns(name)]


@dataclass
class Preparation:
    """What the transforms know, and what they leave to each other."""

    model: nn.Module
    run: Run
    device: torch.device
    dtype: torch.dtype
    storage: Storage = "plain"
    plan: Plan | None = None
    """None where a model is only read."""
    source: WeightSource | None = None
    """None where the weights are there already."""
    is_trained: bool = False
    world: DeviceMesh | None = None
    stages: Stages | None = None
    split: TensorParallelPlan | None = None
    experts: dict[str, nn.Module] = field(default_factory=dict)
    """That are spread over ranks, by name."""
    routing: Routing | None = None
    """The routers of an MoE model; None where a micro-batch lies over several ranks, or there are none."""
    targets: Sequence[str] = ()
    """Linears that get adapters."""
    start: lora.Start | None = None
    """What they begin with, where that is not drawn."""
    rounded: FakeQuantization | None = None
    """In quantization-aware training."""
    sharding: Sharding | None = None
    reading: Reading = field(default_factory=Reading)
    later: set[str] = field(default_factory=set)
    """Weights whose rows are read when their unit is sharded."""
    uncompiled: set[Hashable] = field(default_factory=set)
    """Kinds of layers that the compiler does not take."""
    _reads: Generator[Read] | None = None
    _left: list[str] = field(default_factory=list)
    """Names of tensors that are not read yet, the next one last."""

    @classmethod
    def for_training(
        cls, model: nn.Module, run: Run, plan: Plan, device: torch.device, source: WeightSource | None
    ) -> Preparation:
        """Cut into stages, with all that concerns the whole model found."""
        dtype = getattr(torch, load.DTYPES[plan.precision])
        work = cls(model, run, device, dtype, plan.storage, plan, source, is_trained=True)
        sizes = plan.mesh
        if run.quantization_aware is not None:
            work.rounded = FakeQuantization.of(model, run.quantization_aware)
        if run.method == "peft":
            pass  # the adapter is there, and the rest is frozen
        elif run.has_adapters:
            work.targets, work.start = lora.find_targets(model, run.lora), lora.Start.of(run)
            model.requires_grad_(False)
            for name in work.targets:  # what will be trained; by this, stages without any are found
                model.get_submodule(name).requires_grad_(True)
        else:
            train_all(model)
        if sizes.ranks > 1 or plan.sharding != "none":
            work.world = world_mesh(plan)
        if sizes.pipeline > 1:
            work.stages = cut(model, plan, work.world.get_local_rank("pipeline"))
        if sizes.tensor > 1:
            work.split = TensorParallelPlan.of(model, work.world)
        if sizes.expert > 1:
            work.experts = find_experts(model, sizes.expert)
        if sizes.context * sizes.pipeline * sizes.tensor == 1:
            routing = Routing(model, plan.router_loss or 0.0)
            work.routing = routing if routing.routers else None
        if sizes.context > 1:
            attend_over(model, context_mesh(plan), plan.attention)
        here = {name for name, _ in model.named_modules()}
        work.targets = [name for name in work.targets if name in here]  # others are in stages elsewhere
        if source is not None and work.world is not None:
            work.reading = SharedReading.of(model, plan, work.world, work.split, work.experts)
            changed = [*work.targets, *(lora.ends_of(model) if run.has_lora and run.new_tokens else ())]
            changed += [head_name(model)] if is_headed(model) else []
            work.later = shared_as_they_are(model, plan, changed, work.reading)
        if plan.sharding != "none":
            work.sharding = Sharding(model, plan, data_mesh(work.world), has_adapters=run.has_adapters)
        return work

    @cached_property
    def layers(self) -> list[nn.Module]:
        """The decoder layers that are on this rank."""
        return decoder_layers(self.model) if self.stages is None else self.stages.layers

    @cached_property
    def units(self) -> list[Unit]:
        names = {module: name for name, module in self.model.named_modules()}
        inside = tuple(names[layer] for layer in self.layers)
        if self._layers_share_weights(inside):
            return [Unit(self.model, layers=self.layers)]
        units = [Unit(layer, name, (layer,)) for layer, name in zip(self.layers, inside, strict=True)]
        return [*units, Unit(self.model, others=inside)]

    def _layers_share_weights(self, names: Sequence[str]) -> bool:
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        prefixes = tuple(f"{name}." for name in names)
        weights = [weight for layer in self.layers for weight in layer.parameters()]
        return len(set(weights)) < len(weights) or any(
            name.startswith(prefixes) for pair in tied.items() for name in pair
        )

    @cached_property
    def linears(self) -> dict[str, nn.Module]:
        """That are held in few bits."""
        return linears_of_layers(self.model) if self.storage != "plain" else {}

    @cached_property
    def checkpointed(self) -> int:
        """Layers on this rank whose activations are computed again: early ones, since what they would keep is kept the
        longest; of a stage the same part as of all."""
        every = len(decoder_layers(self.model))
        return -(-self.plan.checkpointed_layers * len(self.layers) // max(1, every))

    @cached_property
    def host_store(self) -> HostStore:
        return HostStore(self.device)

    @cached_property
    def host_weights(self) -> HostWeights:
        return HostWeights(self.device)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def apply(self, transforms: Sequence[Transform]) -> None:
        """Every unit goes through all transforms before the next one begins."""
        for _ in self.each(transforms):
            pass

    def each(self, transforms: Sequence[Transform]) -> Iterator[Unit]:
        """Every unit when it has gone through all transforms, for those who may free it before the next one is read."""
        with self._reading_ahead():
            for unit in self.units:
                for transform in transforms:
                    transform(self, unit)
                yield unit
                _close_gaps(self.device)

    def called(self) -> nn.Module:
        """What is to be called when all units are ready: the model, or what stands before its shards or stages."""
        called = self.model if self.sharding is None else self.sharding.root
        if self.split is not None:
            self.split.connect(self.model)
            called.tensor_ranks = self.split.mesh.get_group()
        if self.stages is not None:
            called = Pipelined(called, self.stages, self.plan, self.world.get_group("pipeline"))
        return called

    @contextlib.contextmanager
    def _reading_ahead(self) -> Iterator[None]:
        """Tensors in the order of the units, read ahead across the borders between them. Ranks that share the reading
        read unit by unit: files that stay mapped would count in the memory of each of them."""
        if self.source is None or (self.plan is not None and is_cut(self.plan)):
            yield
            return
        names = [name for unit in self.units for name in self._names_of(unit)]
        self._left = names[::-1]
        with contextlib.closing(self._read(names)) as self._reads:
            yield

    def reads_of(self, unit: Unit) -> Iterator[Read]:
        if self._reads is None:
            yield from self._read(self._names_of(unit))
        while self._left and unit.owns(self._left[-1]):
            self._left.pop()
            yield next(self._reads)

    def _read(self, names: list[str]) -> Generator[Read]:
        codes = {f"{name}.weight": self.storage for name in self.linears}
        return self.source.read(names, part=self.reading.part, pin=self.on_gpu, codes=codes)

    def _names_of(self, unit: Unit) -> list[str]:
        """Tensors of the source that are read as the unit's turn comes."""
        return [name for name in self._wanted if unit.owns(name)]

    @cached_property
    def _wanted(self) -> list[str]:
        here = self.model.state_dict().keys()
        return [name for name in self.source.names if name in here and name not in self.later]


Transform = Callable[[Preparation, Unit], None]


def read(work: Preparation, unit: Unit) -> None:
    """Weights from their source to the device, quantized on the way where the plan says so."""
    if work.source is None:
        return
    put_weights(
        work.model,
        work.reads_of(unit),
        dtype=work.dtype,
        device=work.device,
        storage=work.storage,
        linears=work.linears,
        source=work.source,
        reading=work.reading,
    )
    stages = work.stages
    if not unit.name and (stages is None or (stages.tied and stages.parts[-1].is_last)):
        work.model.tie_weights()
    for name, weight in unit.weights():
        if weight.is_meta and name not in work.later:
            raise UserError(f"model: the weights of {work.run.model} hold no {name}.")
    _move_buffers(unit, work.device)


def adapt(work: Preparation, unit: Unit) -> None:
    """LoRA or DoRA on the linears of the unit that were chosen; all other weights are frozen."""
    if not work.run.has_lora:
        return
    for _, weight in unit.weights():
        weight.requires_grad_(False)
    targets = list(filter(unit.owns, work.targets))
    lora.put_on(work.model, targets, work.run.lora, seed=work.run.seed, start=work.start)
    if work.run.new_tokens and not unit.name:
        lora.put_token_rows(work.model, new_ids(work.run))
    if is_headed(work.model) and not unit.name:
        work.model.get_output_embeddings().float().requires_grad_(True)  # in fp32, as adapters are


def fake_quantize(work: Preparation, unit: Unit) -> None:
    """Quantization-aware training: linears compute with their weights rounded as the exported file holds them."""
    if work.rounded is not None:
        work.rounded.put_on(work.model, unit.owns)


def split(work: Preparation, unit: Unit) -> None:
    """Tensor parallelism: this rank keeps some heads and a strip of every MLP."""
    if work.split is not None:
        work.split.cut(work.model, unit.owns)


def spread(work: Preparation, unit: Unit) -> None:
    """Expert parallelism: this rank keeps some of the experts."""
    for name in filter(unit.owns, work.experts):
        spread_experts(work.model.get_submodule(name), data_mesh(work.world))


def watch_routers(work: Preparation, unit: Unit) -> None:
    """Routers of an MoE model tell how they deal out tokens, and get the gradient of their loss."""
    for name in filter(unit.owns, work.routing.routers if work.routing is not None else ()):
        work.routing.watch(name)


def fuse_adapters(work: Preparation, unit: Unit) -> None:
    """Adapted linears that share an input as one matmul, gated MLPs as one operation."""
    plan = work.plan
    if work.run.has_adapters and plan.fuse_adapters and not work.run.is_merged:
        keeps_transposed = plan.cache_transposed and not is_cut(plan)
        fuse_mlps = work.on_gpu and any(_has_kernel(plan, gate) for gate in GATES)
        fuse(unit.module, fp8=plan.matmul_dtype == "fp8", fuse_mlps=fuse_mlps, cache_transposed=keeps_transposed)


def swap_kernels(work: Preparation, unit: Unit) -> None:
    """Modules of the model for ones that compute the same with kernels of ours, as far as the plan names them: fp8
    linears, memory-efficient SwiGLU and its like, experts with early weights, fused RoPE; a frozen head's gradient in
    fp8."""
    plan = work.plan
    for layer in unit.layers:
        if plan.matmul_dtype == "fp8" and not work.run.has_adapters:
            use_fp8_linears(layer)
        elif work.on_gpu and not work.run.has_adapters and work.rounded is None:
            use_memory_efficient_gates(layer, [gate for gate in GATES if _has_kernel(plan, gate)])
        if work.on_gpu and _has_kernel(plan, "experts"):
            use_early_weights(layer)
        if work.on_gpu and work.split is None and _has_kernel(plan, "rope"):
            fuse_rope(layer, work.dtype, work.device)
    has_fp8_adapters = plan.matmul_dtype == "fp8" and work.run.has_adapters and plan.fuse_adapters
    has_room = not (is_cut(plan) or plan.checkpointed_layers)  # for a copy of the head
    has_plain_head = not (is_adapted(work.model.get_output_embeddings()) or is_headed(work.model))
    is_asked = work.is_trained and not unit.name and _has_kernel(plan, "fp8_head")
    if is_asked and has_fp8_adapters and has_room and has_plain_head:
        use_fp8_head_gradient(work.model)


def add_noise(work: Preparation, unit: Unit) -> None:
    """NEFTune: noise on what enters the layers while they are trained."""
    if work.is_trained and work.run.neftune_noise_alpha and not unit.name:
        put_noise_on(work.model, work.run.neftune_noise_alpha)


def slice_mlps(work: Preparation, unit: Unit) -> None:
    """MLPs that take some tokens at a time."""
    plan = work.plan
    for layer in unit.layers if plan.mlp_slice else ():
        is_graph = _is_checkpointed(work, layer) and plan.is_compiled
        if not slice_mlp(layer, plan.mlp_slice, is_checkpointed=not is_graph):
            raise UserError(
                f"The plan computes MLPs in slices of {plan.mlp_slice:,} tokens, but {type(layer).__name__} has none "
                "that can be; use a shorter sequence_length, or a plan with mlp_slice 0."
            )


def checkpoint(work: Preparation, unit: Unit) -> None:
    """Activation checkpointing (gradient checkpointing): activations computed again in the backward pass."""
    for layer in unit.layers:
        if _is_checkpointed(work, layer):
            layer.forward = checkpointed(layer.forward, save_attention=work.plan.save_attention)


def compile_layers(work: Preparation, unit: Unit) -> None:
    for layer in unit.layers if work.plan.is_compiled else ():
        layer.forward = compiled(
            layer.forward,
            type(layer).__name__,
            fullgraph=_is_checkpointed(work, layer),
            kind=structure_of(layer),
            failed=work.uncompiled,
        )


def offload(work: Preparation, unit: Unit) -> None:
    """Activation offloading: the inputs of checkpointed layers wait in host memory."""
    for layer in unit.layers if work.plan.offload_activations else ():
        if _is_checkpointed(work, layer):
            is_last = work.layers.index(layer) == work.checkpointed - 1
            layer.forward = offloaded(layer.forward, work.host_store, stays=is_last)


def to_host(work: Preparation, unit: Unit) -> None:
    """Parameter offload of a frozen base on one rank; of all else it is the sharding's."""
    if work.plan.offload_parameters and work.sharding is None:
        work.host_weights.take(unit.layers)


def shard(work: Preparation, unit: Unit) -> None:
    """Data parallelism: DDP, ZeRO-1 to 3, hybrid and hierarchical sharding, each on FSDP2."""
    if work.sharding is None:
        return
    _close_gaps(work.device)
    module = unit.module if unit.name else work.sharding.root
    work.sharding.shard(module)
    if work.source is None:
        return
    weights = dict(unit.weights())
    rows = {}
    if later := {name: weight for name, weight in weights.items() if name in work.later and name in work.source.names}:
        where = torch.device("cpu") if work.plan.offload_parameters else work.device
        rows = read_rows(work.source, later, where)
    with torch.no_grad():
        if not work.on_gpu:  # where FSDP has put rows in between whole weights
            others = [weight for name, weight in weights.items() if name not in later and isinstance(weight, DTensor)]
            rows |= {weight: own_copy(weight.to_local()) for weight in others}
        put_rows(module, rows)
        if not work.on_gpu:
            module.to(work.device)  # where it is already: this makes FSDP let go of the rows that it had


TRANSFORMS: tuple[Transform, ...] = (
    read,
    adapt,
    fake_quantize,
    split,
    spread,
    watch_routers,
    fuse_adapters,
    swap_kernels,
    add_noise,
    slice_mlps,
    checkpoint,
    compile_layers,
    offload,
    to_host,
    shard,
)
"""All of them, in the order in which a unit goes through them."""


@dataclass(frozen=True)
class PreparedModel:
    model: nn.Module
    called: nn.Module
    """What is to be called: the model, or what stands before its shards or stages."""
    tuned: adapters.Tuned | None = None
    """With `method: peft`: the model and peft's own view of it."""


PREFIX_ROOM = 0.1
"""Of a run's memory, for the hidden states that runs over one base share."""


class SharedBase:
    """The frozen base of several runs in one process, one after the other: read once, where nothing of it changes."""

    def __init__(self) -> None:
        self._known: tuple[object, ...] | None = None
        self._model: nn.Module | None = None
        self._content: Content | None = None
        self.prefix = SharedPrefix()
        """What layers without adapters gave for inputs that come again."""

    @staticmethod
    def suits(run: Run, plan: Plan) -> bool:
        """Whether adapters leave the weights as they were read. Those that are held in another form for matmuls (nf4,
        int8, fp8) would be there twice, and heads, new tokens, initial factors and peft's methods change some."""
        is_plain = plan.storage == "plain" and plan.matmul_dtype == "plain" and plan.sharding == "none"
        is_left_alone = not (run.lora.takes_out or run.new_tokens or run.quantization_aware or has_head(run))
        is_left_alone &= not plan.offload_parameters
        return run.method == "lora" and is_plain and is_left_alone and plan.mesh.ranks == 1

    def content(self, run: Run, plan: Plan) -> Content | None:
        """What was hashed of it; None where it is not there, or not for this run."""
        return self._content if self.suits(run, plan) and self._known == self._key(run, plan) else None

    def model_for(
        self, run: Run, plan: Plan, device: torch.device, content: Content | None, meanwhile: Callable[[], None]
    ) -> nn.Module:
        """A model of its own modules over the base's weights; read now, where they are not there."""
        if self._known != self._key(run, plan):
            self.free()
            dtype = getattr(torch, load.DTYPES[plan.precision])
            model, folder = load.load_empty(run, dtype=plan.precision)
            with load.reading(run, "weights"), load.quiet(), beside(meanwhile):
                memory = memory_for(device)
                source = find_source(model, folder, dtype=dtype, storage="plain", content=content, memory=memory)
                Preparation(model, run, device, dtype, source=source).apply([read])
            model.requires_grad_(False)
            self._known, self._model, self._content = self._key(run, plan), model, content
        assert self._model is not None
        own = copy.deepcopy(self._model, {id(weight): weight for weight in self._model.parameters()})
        own.config.use_cache = False
        if plan.forward is None or plan.forward.layout == "packed":
            set_attention(own, attention.NAME)
        return own

    def share_prefix(self, model: nn.Module, plan: Plan) -> None:
        """Have the layers below the first adapter compute each input once for all runs, on a CPU."""
        is_plain = not (plan.is_compiled or plan.checkpointed_layers or plan.mlp_slice)
        if plan.device == "cpu" and is_plain and plan.forward is not None and plan.forward.layout == "packed":
            vocabulary, room = load.vocabulary_size(model.config), int(PREFIX_ROOM * plan.memory.total)
            self.prefix.put_on(model, decoder_layers(model), vocabulary=vocabulary, room=room)

    def free(self) -> None:
        self._known = self._model = self._content = None
        self.prefix = SharedPrefix()

    @staticmethod
    def _key(run: Run, plan: Plan) -> tuple[object, ...]:
        return run.model, run.trust_remote_code, plan.precision, plan.device


def prepare(
    run: Run,
    plan: Plan,
    device: torch.device,
    *,
    content: Content | None = None,
    meanwhile: Callable[[], None] = lambda: None,
    steps: int = adapters.STEPS,
    base: SharedBase | None = None,
) -> PreparedModel:
    """The run's model by its plan, ready to train. What this rank reads is hashed into `content`; `meanwhile` is done
    in a thread while files are read; `steps` is how many the run has; `base` has the weights, where they are shared."""
    if base is not None and base.suits(run, plan):
        model = base.model_for(run, plan, device, content, meanwhile)
        called = make_trainable(model, run, plan)
        base.share_prefix(model, plan)
        return PreparedModel(model, called)
    if base is not None:
        base.free()
    model, folder = load.load_empty(run, dtype=plan.precision)
    model.config.use_cache = False
    if plan.forward is None or plan.forward.layout == "packed":
        set_attention(model, attention.NAME)
    dtype = getattr(torch, load.DTYPES[plan.precision])
    with load.reading(run, "weights"), load.quiet(), beside(meanwhile):
        memory = memory_for(device)
        source = find_source(model, folder, dtype=dtype, storage=plan.storage, content=content, memory=memory)
        if run.method == "peft":
            return _prepare_with_peft(Preparation(model, run, device, dtype, source=source), plan, steps)
        work = Preparation.for_training(model, run, plan, device, source)
        work.apply(TRANSFORMS)
    return PreparedModel(model, work.called())


def _prepare_with_peft(work: Preparation, plan: Plan, steps: int) -> PreparedModel:
    """Adapters of peft's are put on a model that is whole; all else is done to it then as to any other."""
    work.apply([read])
    start = Path(work.run.output) / lora.START if work.run.adapter is not None else None
    tuned = adapters.put_on(work.model, work.run, steps=steps, start=start)
    ready = Preparation.for_training(tuned.model, work.run, plan, work.device, None)
    ready.apply(TRANSFORMS)
    return PreparedModel(tuned.model, ready.called(), tuned)


def make_trainable(model: nn.Module, run: Run, plan: Plan) -> nn.Module:
    """Make a model whose weights are there already ready to train; returns what is to be called."""
    work = Preparation.for_training(model, run, plan, torch.device(plan.device), None)
    work.apply(TRANSFORMS)
    return work.called()


def make_fast(model: nn.Module, run: Run, plan: Plan, device: torch.device) -> None:
    """The kernels of training on a model that is evaluated: whole on one device, whatever the plan has."""
    matmul_dtype = plan.matmul_dtype if device.type == "cuda" else "plain"
    plan = plan.changed(mesh=Mesh(), sharding="none", cache_transposed=False, matmul_dtype=matmul_dtype)
    dtype = model.get_input_embeddings().weight.dtype
    Preparation(model, run, device, dtype, plan=plan).apply([fuse_adapters, swap_kernels])


def load_model(
    run: Run, *, dtype: str, device: str, storage: Storage = "plain", content: Content | None = None
) -> nn.Module:
    """The model with its weights in `dtype` ("fp32", "bf16", "fp16") on `device`, in evaluation mode. With `storage`
    nf4 or int8 the linears of the decoder layers are quantized on the way. What is read is hashed into `content`."""
    model, folder = load.load_empty(run, dtype=dtype)
    kind = getattr(torch, load.DTYPES[dtype])
    with load.reading(run, "weights"), load.quiet():
        memory = memory_for(torch.device(device))
        source = find_source(model, folder, dtype=kind, storage=storage, content=content, memory=memory)
        Preparation(model, run, torch.device(device), kind, storage, source=source).apply([read])
    return model.eval()


def is_cut(plan: Plan) -> bool:
    """Whether no rank has the whole model."""
    return plan.mesh.tensor * plan.mesh.pipeline * plan.mesh.expert > 1 or is_sharded(plan)


def _has_kernel(plan: Plan, kernel: Kernel) -> bool:
    """Plans that were made before any model was tried name none, and have all that are found equal."""
    return plan.kernels is None or kernel in plan.kernels


def _is_checkpointed(work: Preparation, layer: nn.Module) -> bool:
    return work.layers.index(layer) < work.checkpointed


def _move_buffers(unit: Unit, device: torch.device) -> None:
    """What no file holds, since the model computed it when it was built. Those of units inside this one have their own
    turn, after which they may belong elsewhere."""
    for name, module in unit.module.named_modules(prefix=unit.name):
        for leaf, buffer in module._buffers.items() if unit.owns(f"{name}.") else ():
            if buffer is not None and not buffer.is_meta:
                module._buffers[leaf] = buffer.to(device)


def _close_gaps(device: torch.device) -> None:
    """Give back the host memory that whole layers have left between the parts that stay, where they were there and the
    C library is glibc: it would be as much again as the parts."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if device.type == "cpu" and trim is not None:
        trim(0)
