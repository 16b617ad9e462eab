"""The speed model against what was measured and published, and against plain sense."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tunesmith.objectives import objective_of
from tunesmith.plan import activations, speed
from tunesmith.plan.choice import Choice
from tunesmith.plan.facts import StateSpace, Work
from tunesmith.plan.families import from_config
from tunesmith.plan.plan import Time

from .shapes import MIXTRAL, MODEL, run, task

COMPILED = Choice(is_compiled=True, attention="varlen")
EAGER = Choice(attention="varlen")
TIGHT = {"matmul_dtype": "fp8", "checkpointed_layers": 32, "save_attention": True, "offload_activations": True}
NO_MASTERS = {"optimizer_states": "bf16", "master_weights": False}
SLOW_NODES = "2 nodes of 4 x A100-80G, nvlink, 50 Gbit/s"


def tokens_per_second(given, choice: Choice) -> float:
    return given.step_tokens / speed.step_time(given, choice).total


@pytest.mark.parametrize(
    ("model", "hardware", "method", "length", "micro_batch", "choice", "published"),
    [
        # One H200, measured: compiled layers with swapped linears, and transformers' own.
        ("Llama-3.1-8B", "H200", "lora", 4096, 4, COMPILED, 15_468),
        ("Llama-3.1-8B", "H200", "lora", 4096, 4, replace(COMPILED, attention="flash-attn-4"), 15_747),
        ("Llama-3.1-8B", "H200", "lora", 4096, 4, replace(COMPILED, matmul_dtype="fp8"), 21_236),
        ("Llama-3.1-8B", "H200", "lora", 4096, 4, replace(EAGER, checkpointed_layers=32), 7_529),
        ("Llama-2-7B", "H200", "full", 1024, 16, EAGER, 11_451),
        ("Llama-2-7B", "H200", "full", 1024, 16, replace(EAGER, checkpointed_layers=32), 9_044),
        ("Llama-3.1-8B", "H200", "qlora", 2048, 4, replace(COMPILED, storage="nf4"), 15_617),
        ("Llama-2-7B", "H200", "full", 1024, 16, COMPILED, 14_488),
        ("Llama-2-7B", "H200", "full", 1024, 16, replace(COMPILED, matmul_dtype="fp8"), 19_768),
        # vectorlm's table, A100s; with recomputation.
        ("Llama-3.1-8B", "A100-80G", "full", 2048, 8, replace(EAGER, checkpointed_layers=32), 3_550),
        ("Llama-3.1-8B", "A100-80G", "lora", 2048, 8, replace(EAGER, checkpointed_layers=32), 4_079),
    ],
)
def test_one_gpu_is_near_what_was_measured(model, hardware, method, length, micro_batch, choice, published):
    given = task(model, hardware, method, length, micro_batch)
    assert tokens_per_second(given, replace(choice, micro_batch=micro_batch)) == pytest.approx(published, rel=0.2)


@pytest.mark.parametrize(
    ("model", "method", "length", "micro_batch", "changes", "measured"),
    [
        ("Llama-3.1-8B", "lora", 4096, 4, {"matmul_dtype": "fp8", "cache_transposed": True}, 24_704),
        ("Llama-3.1-8B", "lora", 4096, 4, {}, 16_945),
        ("Llama-3.1-8B", "lora", 4096, 4, TIGHT, 19_155),
        ("Llama-3.1-8B", "qlora", 2048, 4, {"matmul_dtype": "fp8", "storage": "nf4"}, 25_864),
        (
            "Llama-3.1-70B",
            "qlora",
            4096,
            1,
            {"matmul_dtype": "fp8", "storage": "nf4", "checkpointed_layers": 80},
            2_355,
        ),
        ("Llama-2-7B", "full", 1024, 16, NO_MASTERS | {"matmul_dtype": "fp8"}, 22_186),
        ("Llama-2-7B", "full", 1024, 16, NO_MASTERS | {"checkpointed_layers": 1}, 14_632),
    ],
)
def test_our_own_workloads_are_near_what_was_measured(model, method, length, micro_batch, changes, measured):
    """One H200, benchmarks/results/gpu.json."""
    given = task(model, "H200", method, length, micro_batch)
    choice = replace(COMPILED, attention="flash-attn-4", micro_batch=micro_batch, **changes)
    assert tokens_per_second(given, choice) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("choice", "published"),
    [
        (EAGER, 5_762),
        (COMPILED, 6_667),
        (replace(COMPILED, matmul_dtype="fp8"), 8_532),
    ],
)
def test_eight_h100_are_near_what_torchtitan_publishes(choice, published):
    """Llama-3.1-8B, full, 8,192 tokens; selective recomputation, taken for half of the layers."""
    given = task("Llama-3.1-8B", "8 x H100", "full", 8192, 8)
    sharded = replace(choice, sharding="zero3", shard=8, checkpointed_layers=16)
    assert tokens_per_second(given, sharded) / 8 == pytest.approx(published, rel=0.4)


def test_the_published_ladder_from_full_sharding_across_nodes_to_hybrid(monkeypatch):
    """Llama-2-7B at 1,024 tokens: 1,500 over two nodes, 8,000 on one with recomputation, 16,000 with fused attention,
    24,000 with hybrid sharding. How many sequences each GPU had is not published: one, four, and eight are taken.
    Gradients were reduced in bf16."""
    monkeypatch.setattr(speed, "GRADIENT_BYTES", 2)
    unfused = MODEL["Llama-2-7B"].changed(has_fused_attention=False)
    plain = replace(EAGER, attention="sdpa", sharding="zero3")
    naive = tokens_per_second(task(unfused, SLOW_NODES, "full", 1024, 8), replace(plain, shard=8))
    one_node = replace(plain, shard=4, micro_batch=4, checkpointed_layers=32)
    recomputing = tokens_per_second(task(unfused, "4 x A100-80G", "full", 1024, 16), one_node)
    fused_choice = replace(one_node, attention="varlen", micro_batch=8, checkpointed_layers=0)
    fused = tokens_per_second(task("Llama-2-7B", "4 x A100-80G", "full", 1024, 32), fused_choice)
    hybrid_choice = replace(fused_choice, sharding="hybrid", replicate=2)
    hybrid = tokens_per_second(task("Llama-2-7B", SLOW_NODES, "full", 1024, 64), hybrid_choice)
    assert naive < recomputing < fused < hybrid
    assert recomputing / naive == pytest.approx(8_000 / 1_500, rel=0.35)
    assert fused / recomputing == pytest.approx(16_000 / 8_000, rel=0.35)
    assert hybrid / fused == pytest.approx(24_000 / 16_000, rel=0.35)


def test_full_sharding_over_a_slow_link_takes_as_long_as_its_rings():
    """Two gathers in bf16 and a reduction in fp32, of which the link between the nodes carries seven eighths, in a ring
    of eight."""
    given = task("Llama-2-7B", SLOW_NODES, "full", 1024, 8)
    time = speed.step_time(given, replace(EAGER, sharding="zero3", shard=8))
    rings = 7 / 8 * (2 * 16 + 32) * given.facts.parameters
    assert time.communication == pytest.approx(rings / (speed.NETWORK * 50e9), rel=0.1)


def test_what_costs_time_costs_time():
    given = task("Llama-3.1-8B", "H200", "lora", 4096, 4)
    base = replace(COMPILED, micro_batch=4)
    plain = speed.step_time(given, base).total
    assert speed.step_time(given, replace(base, checkpointed_layers=32)).total > plain
    assert speed.step_time(given, replace(base, checkpointed_layers=8)).total > plain
    assert speed.step_time(given, replace(base, storage="nf4")).total > plain
    assert speed.step_time(given, replace(base, is_compiled=False)).total > plain
    assert speed.step_time(given, replace(base, matmul_dtype="fp8")).total < plain
    assert speed.step_time(given, replace(base, micro_batch=1)).total > plain


def test_a_compiled_layer_leaves_its_last_product_out_when_it_is_computed_again():
    """It takes 27% of the matmuls of a layer of this shape; an H200 ran three of four again."""
    given = task("Llama-3.1-8B", "H200", "lora", 4096, 4)
    base = replace(COMPILED, micro_batch=4, matmul_dtype="fp8", save_attention=True)
    time = speed.step_time(given, replace(base, checkpointed_layers=32))
    again = time.recomputation - (speed.FORWARD_ELEMENTWISE * time.elementwise + time.adapter / 3)
    assert again - time.quantization / 2 == pytest.approx(0.73 * time.matmuls / 2, rel=0.01)
    eager = speed.step_time(given, replace(base, is_compiled=False, checkpointed_layers=32))
    assert eager.recomputation > eager.matmuls / 2


def test_a_frozen_heads_gradient_is_in_fp8_where_products_are_and_nothing_is_recomputed():
    given = task("Llama-3.1-8B", "H200", "lora", 4096, 4)
    base = replace(COMPILED, micro_batch=4)
    half, fp8 = (
        speed.step_time(given, replace(base, matmul_dtype=matmul_dtype)).loss for matmul_dtype in ("plain", "fp8")
    )
    assert fp8 == pytest.approx(0.046, rel=0.1)  # measured: 26 ms forward, 13 ms backward, 7 ms for the softmax
    assert half == pytest.approx(0.054, rel=0.1)
    checkpointed = replace(base, matmul_dtype="fp8", checkpointed_layers=1)
    assert speed.step_time(given, checkpointed).loss == half


def test_muon_takes_the_time_of_its_products_where_all_weights_are_trained():
    """Ten matmuls of 2,048 x 2,048 x 8,192 and five of 2,048 each for every matrix of an MLP, and so on."""
    given = task("Llama-3.2-1B", "H200", "full", 2048, 3)
    sgd = speed.step_time(replace(given, optimizer="sgd"), COMPILED).optimizer
    muon = speed.step_time(replace(given, optimizer="muon"), COMPILED).optimizer
    mlps = 16 * 3 * (10 * 2 * 2048**2 * 8192 + 5 * 2 * 2048**3) / given.rates.half
    assert mlps < muon - sgd < 1.5 * mlps
    adapters = replace(given, optimizer="muon", method="lora")
    assert speed.step_time(adapters, COMPILED).optimizer < 0.001


def test_a_forward_pass_runs_beside_an_update_from_host_memory_unless_backward_did_it():
    given = task("Llama-3.1-8B", "H200", "full", 4096, 4)
    host = Choice(micro_batch=4, offload_optimizer="host")
    released = speed.step_time(given, replace(host, optimizer_in_backward=True)).offload
    forward = speed.passes(given, host).forward.total
    assert forward > 0
    assert speed.step_time(given, host).offload == pytest.approx(released - forward)


def test_long_documents_cost_more_than_short_ones_in_the_same_sequence():
    given = task("Llama-3.1-8B", "H200", "lora", 16384, 1)
    short = replace(given, document_length=512)
    assert speed.step_time(short, COMPILED).attention < 0.3 * speed.step_time(given, COMPILED).attention


def test_a_tiny_model_is_bound_by_the_processor_that_starts_its_kernels():
    time = speed.step_time(task("SmolLM2-135M", "H200", "lora", 512, 1), EAGER)
    assert time.host > 0.5 * time.total


def test_an_update_of_many_small_operations_keeps_a_gpu_waiting_and_not_a_cpu():
    on_gpu = task("SmolLM2-135M", "H200", "lora", 512, 1)
    on_cpu = task("SmolLM2-135M", "T4", "lora", 512, 1, device="cpu", precision="fp32")
    for given, waits in ((on_gpu, True), (on_cpu, False)):
        plain, small = (speed.step_time(replace(given, optimizer=name), EAGER).host for name in ("adamw", "adafactor"))
        assert (small > plain) == waits


def test_recorded_passes_are_started_at_once():
    small, large = (task(model, "H200", "lora", 512, 1) for model in ("SmolLM2-135M", "Llama-3.1-8B"))
    recorded = replace(COMPILED, cuda_graphs=True)
    waiting, replayed = speed.step_time(small, COMPILED), speed.step_time(small, recorded)
    assert replayed.host < 0.3 * waiting.host
    assert replayed.changed(host=0.0) == waiting.changed(host=0.0)
    busy = replace(large, sequences=32)
    plain, same = (speed.step_time(busy, replace(one, micro_batch=32)) for one in (COMPILED, recorded))
    assert plain == same  # a GPU that has enough to do waits for nobody


def test_a_step_on_a_slow_cpu_is_near_what_was_measured():
    """57 tokens a second, all weights of SmolLM2-135M in fp32 on two slow cores; 73 with adapters on all layers."""
    base = task("SmolLM2-135M", "T4", "full", 512, 1, device="cpu", precision="fp32")
    base = replace(base, hardware=base.hardware.changed(cores=2))
    assert tokens_per_second(base, Choice()) == pytest.approx(57, rel=0.35)
    adapters = replace(base, method="lora")
    assert tokens_per_second(adapters, Choice()) == pytest.approx(73, rel=0.35)


def test_cost_is_hours_times_gpus_times_price():
    found = speed.cost(7200, 4, 2.5)
    assert (found.hours, found.gpu_hours, found.money) == (2.0, 8.0, 20.0)


def test_a_joint_gate_and_up_is_as_much_of_the_mlp_as_two():
    sizes = {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 4, "num_attention_heads": 32}
    sizes |= {"num_key_value_heads": 32, "vocab_size": 32064, "max_position_embeddings": 4096}
    models = [from_config({"model_type": kind, **sizes}) for kind in ("phi3", "llama")]
    joint, apart = (speed._mlp_share(task(model, "H200", "lora", 4096, 4)) for model in models)
    assert joint == pytest.approx(apart, rel=1e-3)


def test_others_wait_for_the_rank_of_the_most_popular_experts(monkeypatch):
    given, choice = task(MIXTRAL, "8xH100", "lora", 4096, 8), Choice(micro_batch=1, expert=8)
    monkeypatch.setattr(activations, "CROWDED", 1.0)
    even = speed.passes(given, choice).forward.matmuls
    monkeypatch.setattr(activations, "CROWDED", 2.0)
    crowded = speed.passes(given, choice).forward.matmuls
    assert crowded / even == pytest.approx(1 + speed._expert_share(given))
    assert speed._expert_share(given) > 0.8


def test_badam_goes_back_to_the_block_whose_turn_it_is():
    """Measured in the first turns of a run of Qwen3-1.7B, where that is one of the top layers, 0.089 s a step of 8,192
    tokens (benchmarks/results/objectives.json): about a forward pass. In the mean of a run it is half of the layers."""
    full, badam = (task("Llama-3.2-1B", "H200", "full", 2048, 4, optimizer=one) for one in ("adamw", "badam"))
    choice = replace(EAGER, micro_batch=4)
    before, after = speed.step_time(full, choice), speed.step_time(badam, choice)
    layers = full.facts.layers
    mean = (layers * (layers + 1) / 2 + layers) / (layers + 1) / layers  # tied: the head's turn is the embedding's
    forward = before.attention / (1 + speed.ATTENTION_BACKWARD)
    assert after.attention == pytest.approx(forward * (1 + speed.ATTENTION_BACKWARD * mean))
    assert after.matmuls == pytest.approx(before.matmuls / 3 * (1 + mean * (1 + 1 / layers)))


def test_a_rollout_is_near_what_was_measured():
    """GRPO of 1B, 8 prompts with 8 answers of up to 256 tokens on an H200: 1.87 and 2.25 s a step were seen."""
    rollout = {"prompts": 8, "answers": 8, "max_answer_tokens": 256}
    given = {"objective": "grpo", "rewards": [{"kind": "regex", "pattern": "e"}], "rollout": rollout}
    asked = task("Llama-3.2-1B", "H200", "lora", 1024, 46, objective=objective_of(run(**given)), document_length=150)
    assert speed.step_time(asked, replace(EAGER, micro_batch=46)).total == pytest.approx(2.25, rel=0.2)


def test_a_rollout_reads_prompts_and_keys_and_draws_from_the_vocabulary():
    given = {"objective": "grpo", "rewards": [{"kind": "regex", "pattern": "e"}]}
    few, many = (
        task(
            "Llama-3.2-1B", "H200", "lora", 4096, 4, document_length=length,
            objective=objective_of(run(**given, rollout={"prompts": prompts, "answers": 8, "max_answer_tokens": 64})),
        )
        for length, prompts in ((500, 8), (2000, 32))
    )  # fmt: skip
    before, after = (
        speed._rollout(one, EAGER, one.objective.rollout, one.objective.rollout.prompts, 8) for one in (few, many)
    )
    assert after.attention == pytest.approx(before.attention * 4 * (2000 + 32) / (500 + 32))
    assert after.loss == pytest.approx(4 * before.loss)
    assert after.matmuls > 4 * before.matmuls
    assert after.host == before.host  # the same number of tokens, all rows at once


def test_buffers_of_captured_steps_are_as_wide_as_the_plan_has_them():
    from tunesmith.infer import captured

    assert speed.CAPTURED_COLUMNS == captured.COLUMNS


def test_projected_optimizers_multiply_in_fp32():
    adamw, apollo, galore = (
        speed.step_time(task("Llama-3.2-1B", "H200", "full", 2048, 4, optimizer=one), COMPILED).optimizer
        for one in ("adamw", "apollo", "galore")
    )
    assert adamw < apollo < galore


def test_layers_that_are_not_compiled_take_what_their_operators_were_counted_to():
    """Bytes by the memory's speed, matmuls beside the weights' own by theirs; none of it where layers are compiled."""
    plain = MODEL["Llama-3.2-1B"]
    active, tokens = plain.active / plain.layers, 8192

    def seconds(more_bytes: float, more_operations: float, **choice) -> Time:
        work = Work(bytes=(1e6, more_bytes), half=(4.0 * active, 0.0), full=(0.0, more_operations), kernels=300)
        facts = plain.changed(kinds=tuple(kind.changed(work=work) for kind in plain.kinds))
        given = task(facts, "H200", "peft", 1024, 8)
        return speed.step_time(given, Choice(micro_batch=8, attention="flash-attn-4", **choice))

    rates = task("Llama-3.2-1B", "H200", "peft", 1024, 8).rates
    usual, rotated = seconds(0.0, 0.0), seconds(1e9, 1e12)
    assert usual.adapter == pytest.approx(0.0, abs=1e-9)
    assert usual.elementwise == pytest.approx(16 * 1e6 * tokens / (0.75 * rates.bandwidth))
    assert rotated.elementwise - usual.elementwise == pytest.approx(16 * 1e9 / (0.75 * rates.bandwidth))
    assert rotated.adapter == pytest.approx(16 * 1e12 / rates.fp32)
    assert seconds(0.0, 0.0, is_compiled=True) == seconds(1e9, 1e12, is_compiled=True)


def test_a_state_space_takes_as_long_as_measured():
    """Granite 4's on an H200, 16,384 tokens: 4.6 ms a layer with adapters, its own matmuls apart."""
    space = StateSpace(heads=64, inner=4096, state=128, channels=4352)
    with_it = task("Llama-3.1-8B", "H200", "lora", 4096, 4)
    kinds = tuple(kind.changed(state_space=space) for kind in with_it.facts.kinds)
    with_it = replace(with_it, facts=with_it.facts.changed(kinds=kinds))
    without = task("Llama-3.1-8B", "H200", "lora", 4096, 4)
    choice = replace(COMPILED, micro_batch=4)
    more = speed.step_time(with_it, choice).elementwise - speed.step_time(without, choice).elementwise
    assert more / with_it.facts.layers == pytest.approx(4.6e-3, rel=0.1)
