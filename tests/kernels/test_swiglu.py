from __future__ import annotations

import pytest
import torch
from interpreted import run_interpreted


def test_the_kernels_are_right_in_the_interpreter():
    assert "swiglu: 10 cases" in run_interpreted("check_swiglu")


def test_other_activations_than_silu_are_right_in_the_interpreter():
    assert "other gates: ok" in run_interpreted("check_other_gates")


@pytest.mark.slow
def test_models_with_other_gates_and_joint_ones_give_the_same_results_in_the_interpreter():
    assert "whole mlps: ok" in run_interpreted("check_whole_mlps_of_families")


def test_the_whole_mlp_equals_its_parts_in_the_interpreter():
    assert "mlp: ok" in run_interpreted("check_lowrank_mlp")


def test_a_model_with_whole_mlps_gives_the_same_results_in_the_interpreter():
    assert "whole mlps: ok" in run_interpreted("check_whole_mlps")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernels_are_right_on_the_gpu():
    from kernel_cases import GATINGS, check_lowrank_mlp, check_swiglu, check_whole_mlps_of_families

    for gating in GATINGS:
        check_swiglu("cuda", (torch.bfloat16,), fp8=True, gating=gating)
        check_lowrank_mlp("cuda", torch.bfloat16, gating=gating)
        check_lowrank_mlp("cuda", torch.bfloat16, fp8=True, gating=gating)
    check_whole_mlps_of_families("cuda")
