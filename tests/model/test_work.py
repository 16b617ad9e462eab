"""The work of layers that are not compiled is counted operator by operator, and the plan's time goes by it."""

import pytest
import torch
from transformers import LlamaConfig

from tunesmith.config.schema import Run
from tunesmith.model.kept import TOKENS, _real_work, count_work
from tunesmith.model.work import Tally

WIDTH = 1024
HRA = {"peft_type": "HRA", "r": 2, "target_modules": ["q_proj"]}


def tally(call, *sizes: tuple[int, ...], dtype=torch.bfloat16) -> dict[str, float]:
    tensors = [torch.empty(size, dtype=dtype, device="meta", requires_grad=True) for size in sizes]
    with Tally(lambda shape: TOKENS in shape, TOKENS) as counted:
        out = call(*tensors)
        torch.autograd.grad(out, tensors, torch.empty_like(out))
    return counted.sums


def test_a_large_matmul_counts_by_its_operations_and_a_small_one_by_its_bytes():
    sums = tally(torch.mm, (TOKENS, WIDTH), (WIDTH, WIDTH))
    assert sums == {"kernels": 3, "half, of tokens": 3 * 2 * TOKENS * WIDTH * WIDTH}
    sums = tally(torch.mm, (TOKENS, 8), (8, 8), dtype=torch.float32)
    each = 2 * TOKENS * 8 * 4
    assert sums == {"kernels": 3, "bytes, of tokens": 3 * each, "bytes": 3 * 8 * 8 * 4}


def test_views_move_nothing_and_what_is_expanded_lies_in_memory_once():
    sums = tally(lambda x: x.view(TOKENS, 4, WIDTH).transpose(0, 1), (TOKENS, 4 * WIDTH))
    assert sums == {}
    with Tally(lambda shape: TOKENS in shape, TOKENS) as counted:
        torch.empty(TOKENS, WIDTH, device="meta") + torch.empty(1, WIDTH, device="meta").expand(TOKENS, WIDTH)
    assert counted.sums["bytes, of tokens"] == (2 * TOKENS + 1) * WIDTH * 4


def test_a_block_diagonal_matrix_starts_a_kernel_for_each_block():
    with Tally(lambda shape: TOKENS in shape, TOKENS) as counted:
        torch.block_diag(*torch.empty(50, 4, 4, device="meta").unbind())
    assert counted.work().kernels == 50


def a_run(folder, **settings) -> Run:
    return Run(model=str(folder), data="none.jsonl", sequence_length=64, **settings)


def test_weights_that_are_made_anew_in_each_pass_are_work(llama):
    """Of HRA; IA3 scales what comes out."""
    scaled = count_work(a_run(llama, method="peft", peft={"peft_type": "IA3"}), kernels=())
    rotated = count_work(a_run(llama, method="peft", peft=HRA), kernels=())
    assert scaled is not None
    assert rotated is not None
    assert rotated[0].kernels > scaled[0].kernels
    assert rotated[0].bytes[1] > 2 * scaled[0].bytes[1]


def test_layers_that_are_compiled_are_not_counted(llama):
    assert count_work(a_run(llama, method="lora"), kernels=()) is None
    assert count_work(a_run(llama, method="full"), kernels=()) is None
    for settings in ({"method": "loqt"}, {"method": "full", "optimizer": "lisa"}):
        assert count_work(a_run(llama, **settings), kernels=()) is not None


@pytest.mark.slow
def test_narrow_layers_tell_the_work_of_wide_ones(tmp_path):
    """Of BOFT, which looks at weights."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2, "vocab_size": 64}
    LlamaConfig(num_attention_heads=8, num_key_value_heads=8, head_dim=128, **sizes).save_pretrained(tmp_path)
    run = a_run(tmp_path, method="peft", peft={"peft_type": "BOFT", "target_modules": ["q_proj", "down_proj"]})
    said = count_work(run, kernels=())
    assert said is not None
    found = _real_work(run, 1)
    for name in ("bytes", "half", "full"):
        for narrow, real in zip(getattr(said[0], name), getattr(found, name), strict=True):
            assert narrow == pytest.approx(real, rel=0.15, abs=1)
    assert said[0].kernels == found.kernels
