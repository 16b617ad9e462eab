"""The memory model against what is published, what autograd really keeps, and itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.config.schema import Lora
from tunesmith.plan import activations, memory, model_states, speed
from tunesmith.plan.choice import Choice
from tunesmith.plan.families import from_config

from .shapes import GIB, MODEL, task

GB = 1e9


def published(
    parameters: int,
    sharding: str,
    ranks: int,
    *,
    weights: float = 2.0,
    gradients: float = 2.0,
    states: float = 12.0,
    offload_states: bool = False,
    offload_weights: bool = False,
) -> float:
    """Bytes a rank holds of weights, gradients and states alone, given their bytes a parameter."""

    def held(size: float, what: str) -> float:
        return size * model_states.share(sharding, what, ranks, ranks)

    of_weights = 0.0 if offload_weights else held(weights, "weights")
    of_states = 0.0 if offload_states else held(gradients, "gradients") + held(states, "states")
    return parameters * (of_weights + of_states)


@pytest.mark.parametrize(("sharding", "gigabytes"), [("none", 120), ("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.9)])
def test_the_table_of_the_zero_paper(sharding, gigabytes):
    """7.5B parameters on 64 GPUs; 2 bytes of weights, 2 of gradients, 12 of states."""
    found = published(7_500_000_000, sharding, 64) / GB
    assert found == pytest.approx(gigabytes, abs=0.05)


def test_the_estimates_of_deepspeed():
    """2,851M parameters, 32M in the largest layer, 8 GPUs; half weights, fp32 gradients, masters and states."""
    parameters, largest = 2_851_000_000, 32_000_000
    recipe = {"weights": 2, "gradients": 4, "states": 12}
    half_gradients = 2 * parameters  # stage 2 makes all of them before it reduces them
    layer = 4 * largest  # stage 3 gathers a layer's half weights and makes its half gradients

    def gib(size: float) -> float:
        return size / GIB

    stage2 = published(parameters, "zero2", 8, **recipe)
    assert gib(stage2 + half_gradients) == pytest.approx(15.93, abs=0.01)
    offloaded = published(parameters, "zero2", 8, **recipe, offload_states=True)
    assert gib(offloaded) == pytest.approx(5.31, abs=0.01)
    stage3 = published(parameters, "zero3", 8, **recipe)
    assert gib(stage3 + layer) == pytest.approx(6.10, abs=0.02)
    offloaded = published(parameters, "zero3", 8, **recipe, offload_states=True)
    assert gib(offloaded + layer) == pytest.approx(0.79, abs=0.01)
    nothing = published(parameters, "zero3", 8, **recipe, offload_states=True, offload_weights=True)
    assert gib(nothing + layer) == pytest.approx(0.12, abs=0.01)


@pytest.mark.parametrize(
    ("method", "length", "micro_batch", "choice", "gib"),
    [
        # The leanest of others' code, measured on an H200: bytes allocated at the peak.
        ("lora", 4096, 4, Choice(), 75.7),
        ("qlora", 2048, 4, Choice(storage="nf4"), 36.1),
        ("lora", 4096, 4, Choice(is_compiled=False, checkpointed_layers=32), 23.8),
    ],
)
def test_measured_peaks_on_an_h200_are_near(method, length, micro_batch, choice, gib):
    given = task("Llama-3.1-8B", "H200", method, length, micro_batch)
    compiled = replace(choice, micro_batch=micro_batch, attention="varlen", is_compiled=choice.checkpointed_layers == 0)
    found = memory.peak(memory.timeline(given, compiled)).memory.allocated / GIB
    assert found == pytest.approx(gib, rel=0.15)


FAMILIES = ["llama", "qwen3", "gemma2", "gemma3_text", "phi3", "mixtral", "gpt_neox", "phi"]
FAMILIES += ["glm", "olmo2", "cohere2", "starcoder2"]


@pytest.mark.parametrize(
    ("family", "method"),
    [(family, method) for family in FAMILIES for method in ("full", "lora")]
    + [(family, "frozen") for family in ("llama", "gemma2", "gpt_neox")]
    + [pytest.param("qwen3_moe", "lora", marks=pytest.mark.slow), ("qwen3_moe", "qlora")],
)
def test_activations_are_what_autograd_keeps(family, method):
    """Counted by autograd's hooks on a model of two layers against one of one layer, in bf16. Of frozen layers over an
    embedding that is trained, as LISA has them, it is near. Of `qlora` the experts are in nf4."""
    heads = {"gemma2": 4, "mixtral": 4, "glm": 4, "qwen3_moe": 8}.get(family, 2)  # scores and routers count for little
    config = {
        "model_type": family,
        "hidden_size": 16 * heads,
        "intermediate_size": 44 * heads,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if family == "gpt_neox" else heads // 2,
        "head_dim": 16,
        "vocab_size": 128,
        "max_position_embeddings": 1024,
        "num_local_experts": 4,
        **(
            {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 22 * heads} if "moe" in family else {}
        ),
        "pad_token_id": 0,
    }
    tokens, rank = 576, 4  # long enough that a CPU computes attention in bf16 too
    per_layer = _kept(config | {"num_hidden_layers": 2}, method, tokens, rank)
    per_layer -= _kept(config | {"num_hidden_layers": 1}, method, tokens, rank)
    facts = from_config(config | {"num_hidden_layers": 2})
    given = task(facts, "T4", "lora" if "lora" in method else "full", tokens, 1, lora=Lora(rank=rank), device="cpu")
    # Without the layer's window, which makes a difference from the second layer on in some families only.
    options = {"is_compiled": False, "is_frozen": method == "frozen"}
    options["storage"] = "nf4" if method == "qlora" else "plain"
    expected = tokens * activations.layer_bytes(given, facts.kinds[facts.pattern[-1]], **options)
    expected += given.adapted[0] / 2 * 2 * 2  # the factors in bf16, of one layer
    assert expected == pytest.approx(per_layer, rel=0.1 if method == "frozen" else 0.03)


def _kept(config: dict, method: str, tokens: int, rank: int) -> int:
    """Bytes that the forward pass of the trainer's own code keeps for backward, without weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from half import HalfMatmulsInFp32
    from tunesmith.model import attention, lora
    from tunesmith.model.experts import QuantizedExperts, experts_of_layers
    from tunesmith.model.forward import Inputs, hidden_states
    from tunesmith.model.fuse import fuse
    from tunesmith.model.structure import decoder_layers, replace_module
    from tunesmith.plan.plan import ForwardSpec

    attention.register()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).to(torch.bfloat16).train()
    model.set_attn_implementation(attention.NAME)
    if method == "qlora":
        for name, experts in experts_of_layers(model).items():
            held = QuantizedExperts(experts, "nf4")
            for leaf, stack in experts.named_parameters():
                held.hold(leaf, stack.detach())
            replace_module(model, name, held)
    if "lora" in method:
        lora.attach(model, Lora(rank=rank), seed=0)
        fuse(model, fp8=False)
    if method == "frozen":
        for layer in decoder_layers(model):
            layer.requires_grad_(False)
    own = {held.untyped_storage().data_ptr() for held in (*model.parameters(), *model.buffers())}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    inputs = Inputs(
        tokens=torch.arange(tokens) % 128,
        positions=torch.arange(tokens),
        boundaries=torch.tensor([0, tokens], dtype=torch.int32),
        longest=tokens,
        rows=torch.arange(tokens),
        labels=torch.arange(tokens) % 128,
        weights=torch.ones(tokens),
    )
    with HalfMatmulsInFp32(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = hidden_states(model, inputs, ForwardSpec("packed"))
    assert result.requires_grad
    return sum(size for size, _ in kept.values())


def test_the_loss_holds_as_many_logits_as_its_kernel_says():
    from tunesmith.kernels.fp8 import FP8_MULTIPLE
    from tunesmith.kernels.linear_cross_entropy import CHUNK_ELEMENTS

    assert memory.LOGITS == CHUNK_ELEMENTS
    assert model_states.FP8_MULTIPLE == FP8_MULTIPLE


def test_a_cache_has_the_room_that_it_is_made_with():
    from tunesmith.infer import cache, captured

    assert memory.CACHE_ROOM == cache.ROOM == captured.FINE_COLUMNS


@pytest.mark.parametrize(
    ("method", "choice", "is_there"),
    [
        ("lora", Choice(matmul_dtype="fp8"), True),
        ("qlora", Choice(matmul_dtype="fp8", storage="nf4"), True),
        ("lora", Choice(), False),
        ("full", Choice(matmul_dtype="fp8"), False),
        ("lora", Choice(matmul_dtype="fp8", sharding="zero2", shard=2), True),
        ("lora", Choice(matmul_dtype="fp8", sharding="zero3", shard=2), False),
        ("lora", Choice(matmul_dtype="fp8", sharding="ddp", tensor=2), False),
        ("lora", Choice(matmul_dtype="fp8", pipeline=2), False),
    ],
)
def test_a_frozen_head_in_fp8_costs_a_byte_a_weight_and_one_a_logit(monkeypatch, method, choice, is_there):
    given = task("Llama-3.1-8B", "8 x H200", method, 4096, 4)
    found = loss_phase(given, choice)
    monkeypatch.setattr(model_states, "has_fp8_head", lambda *_: False)
    without = loss_phase(given, choice)
    assert found.weights - without.weights == is_there * given.facts.embedding
    assert found.loss - without.loss == is_there * memory.LOGITS["cuda"]


def loss_phase(given, choice):
    return next(one.memory for one in memory.timeline(given, choice) if one.name == "loss")


SMALL = {"hidden_size": 512, "num_hidden_layers": 4, "vocab_size": 1000}
GELU, JOINT, RELU = (
    from_config(SMALL | {"model_type": "llama", "hidden_act": "gelu"}),
    from_config(SMALL | {"model_type": "phi3"}),
    from_config(SMALL | {"model_type": "llama", "hidden_act": "relu"}),
)


@pytest.mark.parametrize(
    ("name", "device", "choice", "spared"),
    [
        ("Llama-2-7B", "H200", Choice(is_compiled=True), 1),
        ("Llama-2-7B", "H200", Choice(is_compiled=False), 2),
        ("Llama-2-7B", "H200", Choice(is_compiled=True, matmul_dtype="fp8"), 0),
        ("Llama-2-7B", "2 x H200", Choice(is_compiled=True, tensor=2, sharding="ddp"), 0),
        ("Llama-2-7B", "2 x H200", Choice(is_compiled=True, shard=2, sharding="zero3"), 1),
        (GELU, "H200", Choice(is_compiled=True), 1),
        (JOINT, "H200", Choice(is_compiled=True), 1),
        (RELU, "H200", Choice(is_compiled=True), 0),
    ],
)
def test_an_activation_that_is_made_again_is_not_kept(name, device, choice, spared):
    given = task(name, device, "full", 1024, 16)
    kinds = tuple(kind.changed(gate=None) for kind in given.facts.kinds)
    otherwise = replace(given, facts=given.facts.changed(kinds=kinds))
    without, kept = (loss_phase(one, choice).activations for one in (given, otherwise))
    wide = 2 * choice.tokens(given) * given.facts.kinds[0].intermediate * given.facts.layers
    assert kept - without == spared * wide


def test_adapters_on_the_top_layers_keep_less():
    every = task("Llama-3.1-8B", "H200", "lora", 2048, 1)
    top = replace(every, lora=Lora(rank=16, layers="top 8"))
    whole, part = (memory.timeline(one, Choice())[0].memory.activations for one in (every, top))
    assert part == pytest.approx(whole / 4, rel=0.1)


def test_the_peak_moves_from_the_activations_to_the_optimizer_when_they_shrink():
    long = task("Llama-3.2-1B", "H200", "full", 8192, 1)
    short = task("Llama-3.2-1B", "H200", "full", 16, 1, optimizer="adafactor")
    assert memory.peak(memory.timeline(long, Choice())).name != "optimizer step"
    assert memory.peak(memory.timeline(short, Choice())).name == "optimizer step"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("model", "method", "sequences", "choice"),
    [
        ("SmolLM2-135M", "full", 4, Choice(micro_batch=4)),
        ("SmolLM2-135M", "lora", 4, Choice(micro_batch=1)),
        ("Llama-3.1-8B", "full", 1, Choice(checkpointed_layers=16)),
        ("Llama-3.1-8B", "qlora", 2, Choice(micro_batch=2, storage="nf4", matmul_dtype="fp8")),
    ],
)
def test_recorded_passes_hold_their_worst_moment_all_the_time(model, method, sequences, choice, optimizer):
    given = task(model, "H200", method, 2048, sequences, optimizer=optimizer)
    choice = replace(choice, is_compiled=True, attention="varlen")
    plain = memory.timeline(given, choice)
    recorded = memory.timeline(given, replace(choice, cuda_graphs=True))
    assert recorded[0] == plain[0]  # nothing is recorded while the model is loaded
    assert len({phase.memory.total for phase in recorded[1:]}) == 1
    for before, after in zip(plain, recorded, strict=True):
        assert after.memory.total >= before.memory.total
        assert sum(after.memory.model_dump().values()) == after.memory.total
        assert after.memory.fragmentation >= before.memory.fragmentation
    parts = {phase.name: phase.memory for phase in recorded}
    backward, loss = parts["first layer of the backward pass"], parts["loss"]
    least = backward.activations + backward.quantization + backward.workspace
    rest = loss.weights + loss.adapter + loss.master + loss.optimizer + loss.loss + loss.context
    assert memory.peak(recorded).memory.total >= least + rest
    assert memory.peak(recorded).memory.allocated == max(phase.memory.allocated for phase in recorded[1:])


def test_recorded_passes_make_gradients_beside_the_sum_of_several():
    given = task("Llama-3.1-8B", "H200", "lora", 512, 4)
    choice = Choice(is_compiled=True, attention="varlen", cuda_graphs=True)
    several = memory.timeline(given, choice)[-1].memory.gradients
    one = memory.timeline(given, replace(choice, micro_batch=4))[-1].memory.gradients
    assert one == 4 * given.trained
    assert several == 2 * one


CHOICES = st.builds(
    Choice,
    micro_batch=st.sampled_from([1, 2, 8]),
    checkpointed_layers=st.sampled_from([0, 5, 32]),
    is_compiled=st.booleans(),
    offload_activations=st.booleans(),
    offload_optimizer=st.sampled_from(["none", "host", "disk"]),
    offload_parameters=st.booleans(),
    optimizer_states=st.sampled_from(["fp32", "bf16", "int8"]),
    storage=st.sampled_from(["plain", "nf4", "int8"]),
    pipeline=st.sampled_from([1, 2]),
    tensor=st.sampled_from([1, 2]),
    context=st.sampled_from([1, 2]),
)


@settings(max_examples=40, deadline=None)
@given(
    CHOICES,
    st.sampled_from(["full", "lora", "qlora"]),
    st.sampled_from(["zero1", "zero2", "zero3", "ddp", "hybrid", "hierarchical"]),
    st.sampled_from(["adamw", "sgd", "adafactor"]),
)
def test_every_category_is_there_and_more_ranks_never_need_more(choice, method, sharding, optimizer):
    given = task("Llama-3.1-8B", "4 nodes of 8 x A100-80G, 100 Gbit/s", method, 1024, 64, optimizer=optimizer)
    before = None
    for nodes in (1, 2, 4):
        axes = {"shard": 4, "replicate": nodes} if "h" in sharding[:1] else {"shard": 4 * nodes}
        found = replace(choice, sharding=sharding, **axes)
        phases = memory.timeline(given, found)
        for phase in phases:
            parts = phase.memory.model_dump()
            assert all(size >= 0 for size in parts.values())
            assert sum(parts.values()) == phase.memory.total
        peak = memory.peak(phases).memory.total
        assert before is None or peak <= before
        before = peak


@settings(max_examples=30, deadline=None)
@given(CHOICES, st.sampled_from(["full", "lora"]), st.sampled_from(sorted(MODEL)))
def test_recomputation_and_offload_never_need_more_memory(choice, method, model):
    given = task(model, "H200", method, 2048, 8)
    layers = given.facts.layers

    def activations(**changes) -> int:
        return memory.timeline(given, replace(choice, **changes))[0].memory.activations

    assert activations(checkpointed_layers=layers) <= activations(checkpointed_layers=layers // 2)
    assert activations(checkpointed_layers=layers // 2) <= activations(checkpointed_layers=0)
    assert activations(offload_activations=True) <= activations(offload_activations=False)


def test_quantization_aware_training_rounds_one_linear_at_a_time_and_takes_longer():
    usual = task("Llama-3.1-8B", "H200", "lora", 4096, 4)
    aware = replace(usual, is_quantization_aware=True)
    peaks = [memory.peak(memory.timeline(one, Choice())).memory.total for one in (usual, aware)]
    assert 0 < peaks[1] - peaks[0] < 5 * GIB
    assert speed.step_time(aware, Choice()).total > speed.step_time(usual, Choice()).total


def test_embedding_and_head_are_whole_from_the_forward_to_the_backward_pass_where_weights_are_sharded():
    given = task("Llama-3.1-8B", "8 x H100", "full", 4096, 16)
    ends = (given.facts.embedding + given.facts.head) * given.width
    phases = memory.timeline(given, Choice(sharding="zero3", shard=8))
    there = [one.memory.gathered for one in phases if "backward" in one.name or "forward" in one.name]
    assert min(there) > ends


def test_a_frozen_base_in_host_memory_leaves_two_layers_and_what_is_around_them_on_the_device():
    given = task("Llama-3.1-8B", "RTX 4090", "qlora", 1024, 4)
    at_home = Choice(storage="nf4", is_compiled=True, checkpointed_layers=32)
    moved = replace(at_home, offload_parameters=True)
    before, after = (memory.peak(memory.timeline(given, one)).memory for one in (at_home, moved))
    ends = (given.facts.embedding + given.facts.head) * given.width
    layers = before.weights - ends
    assert after.weights == pytest.approx(ends, rel=0.01)
    assert (after.adapter, after.optimizer, after.gradients) == (before.adapter, before.optimizer, before.gradients)
    assert after.gathered == pytest.approx(2 * layers / given.facts.layers, rel=0.01)
    assert model_states.parameter_bytes(given, moved) == pytest.approx(layers, rel=0.01)
    # Beside the computation, as far as that takes; FSDP's own copies of one rank make the GPU wait.
    seen = speed.step_time(given, moved).offload
    whole = 2 * layers / given.rates.host_link
    waiting = speed.step_time(given, replace(moved, sharding="zero3")).offload
    assert 0 < seen < whole < waiting
