"""What tests share: a tiny model folder with tokenizer and chat template, made here, so that no hub is needed."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of two workers on two cores, more would wait for each other

from collections.abc import Iterator
from pathlib import Path

import pytest

from ranks import Worlds
from tiny import Runs, build_commands_once
from tiny_model import make_tiny_model
from tunesmith.cli.main import COLLECTING

gc.set_threshold(*COLLECTING)
build_commands_once()


REPEATED = (
    "test_quantized.py::test_a_run_with_rounding_on_the_wire_stays_near_the_run_of_one_rank[both over nodes]",
    "test_quantized.py::test_a_run_with_rounding_on_the_wire_stays_near_the_run_of_one_rank[reduce in int4]",
    "test_expert.py::test_experts_on_two_ranks_give_the_steps_of_one[qlora-mixtral-zero3]",
    "test_families.py::test_losses_are_those_of_a_plain_loop[mamba]",
    "test_families.py::test_losses_are_those_of_a_plain_loop[jetmoe]",
    "test_pipeline.py::test_stages_give_the_steps_of_one_rank[full-shard]",
    "test_pipeline.py::test_stages_give_the_steps_of_one_rank[full-interleaved]",
    "test_pipeline.py::test_stages_give_the_steps_of_one_rank[qlora-1f1b]",
    "all_of_them_need_little_more_than_its_size[qlora-zero3]",
    "test_ranks.py::test_two_ranks_evaluate_to_the_losses_of_one",
    "test_axes.py::test_splitting_layers_or_sequences_gives_the_steps_of_one_rank[qlora-tensor 2 x shard 2]",
    "test_axes.py::test_splitting_layers_or_sequences_gives_the_steps_of_one_rank[lora-context 2 x shard 2]",
    "test_resume.py::test_a_run_saved_on_four_ranks_goes_on_on_others[qlora-zero3-2]",
    "test_shard.py::test_every_way_of_sharing_gives_the_steps_of_one_rank[qlora-hybrid]",
    "test_shard.py::test_every_way_of_sharing_gives_the_steps_of_one_rank[full-zero2]",
    "test_compile.py::test_document_lengths_do_not_compile_anything_again[sdpa-True-plain]",
    "test_distillation.py::test_a_distilled_student_learns_more_from_the_same_tokens",
    "test_heads.py::test_what_is_saved_loads_in_transformers_with_the_same_scores[pairs-lora]",
    "test_store.py::test_killed_at_random_moments_nothing_acknowledged_is_lost[writers1-0.4]",
    "test_export.py::test_a_quantizer_of_llama_cpp_is_used_where_there_is_one",
    "what_lives_in_host_memory_or_on_disk_gives_the_steps_of_one_rank[full-hierarchical-True]",
    "what_lives_in_host_memory_or_on_disk_gives_the_steps_of_one_rank[qlora-zero3-disk]",
    "test_activation.py::test_what_compiled_layers_keep_does_not_change_gradients",
    "test_bench.py::test_the_tiny_workload_is_measured_in_a_process_of_its_own",
    "test_distillation.py::test_a_killed_run_goes_on_to_the_same_bytes[None]",
    "test_axes.py::test_splitting_layers_or_sequences_gives_the_steps_of_one_rank[full-context 2 x shard 2]",
    "test_families.py::test_losses_are_those_of_a_plain_loop[bloom]",
    "test_shard.py::test_every_way_of_sharing_gives_the_steps_of_one_rank[full-hierarchical]",
    "test_expert.py::test_shards_of_experts_in_few_bits_give_the_steps_of_one[4]",
    "test_resume.py::test_a_run_saved_on_four_ranks_goes_on_on_others[full-zero3-4]",
    "test_resume.py::test_a_run_saved_on_four_ranks_goes_on_on_others[lora-ddp-1]",
    "test_qlora.py::test_dora_over_nf4_is_trained_continued_and_merged",
    "are_the_same[tiny-lora-2-{'checkpointed_layers': 2, 'offload_activations': True}]",
    "are_the_same[tiny-full-2-{'precision': 'bf16', 'master_weights': True, 'optimizer': 'sgd'}]",
    "what_lives_in_host_memory_or_on_disk_gives_the_steps_of_one_rank[full-zero3-True-disk]",
    "test_pipeline.py::test_stages_give_the_steps_of_one_rank[full-zero-bubble]",
    "test_evaluation.py::test_evaluations_that_take_long_beside_training_are_left_out_but_the_first_and_the_last",
    "test_network.py::test_each_collective_is_measured_at_each_size_and_kept",
    "test_export.py::test_a_fault_in_a_gguf_file_is_found_by_llama_cpp[unscaled adapter]",
    "test_compile.py::test_document_lengths_do_not_compile_anything_again[flash-attn-4-True-fp8]",
    "test_swiglu.py::test_a_model_with_whole_mlps_gives_the_same_results_in_the_interpreter",
    "test_activation.py::test_a_recomputed_layer_keeps_its_input_alone[True-qlora-plain]",
)
"""Cells that are another combination of what the cells beside them show, and take long: `make test-slow` runs them."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid.endswith(REPEATED):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr("tunesmith.cli.main.keep_bytecode", lambda: None)  # it would change the whole process


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 2 layers with random weights, a byte-level tokenizer and a ChatML template."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    started = Runs(tmp_path_factory.mktemp("cache"))
    yield started
    started.close()


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    worlds = Worlds(tmp_path_factory.mktemp("cache"))
    yield worlds
    worlds.close()


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from export.models import make_model

    return make_model(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture(scope="session")
def trained(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short LoRA run of a tiny Llama."""
    from export.models import make_run

    return make_run(tmp_path_factory.mktemp("exported"), llama)
