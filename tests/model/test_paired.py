"""What an encoder-decoder takes, counted without memory, against what autograd keeps of the model as it is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSeq2SeqLM

from encoder_decoders import make_encoder_decoder
from tunesmith.config.schema import Run
from tunesmith.model import paired
from tunesmith.model.structure import stacks_of
from tunesmith.plan.facts import PairedWork, Rows

SHAPE = (12, 40, 24)


def _kept(folder) -> int:
    """Bytes that autograd saves in a call of the whole model on a CPU."""
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).train()
    rows, read, written = SHAPE
    known = {one.untyped_storage()._cdata for one in [*model.parameters(), *model.buffers()]}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in known:
            kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    sources, targets = (torch.full((rows, length), 5) for length in (read, written))
    mask = torch.ones_like(sources)
    mask[1, 30:] = 0
    is_written = torch.ones_like(targets)
    is_written[1, 20:] = 0
    encoder, decoder = stacks_of(model)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        states = encoder(input_ids=sources, attention_mask=mask)[0]
        decoder(
            input_ids=targets,
            attention_mask=is_written,
            encoder_hidden_states=states,
            encoder_attention_mask=mask,
            use_cache=False,
        )
    return sum(one.untyped_storage().nbytes() for one in kept.values())


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_what_is_counted_is_what_autograd_keeps(tmp_path, family):
    changes = {"num_layers": 4, "dropout_rate": 0.1} if family == "t5" else {"encoder_layers": 4}
    folder = make_encoder_decoder(tmp_path / family, family, **changes)
    found = paired.count_paired(
        Run.model_validate({"model": str(folder), "data": ["-"], "method": "full"}), on_gpu=False
    )
    assert found is not None
    assert found.kept(*SHAPE) == pytest.approx(_kept(folder), rel=0.02)


def test_what_is_dropped_on_a_gpu_is_a_byte_a_value():
    def sizes(attention, *given) -> list[int]:
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.nbytes), lambda _: None), attention:
            F.dropout(given[0], 0.1)
            F.scaled_dot_product_attention(*given[:3], attn_mask=given[3], dropout_p=0.1)
        return sorted(kept)

    given = [torch.empty(2, 4, 64, 8, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    bias = torch.empty(1, 64, 64, 4, device="meta", dtype=torch.bfloat16).permute(0, 3, 1, 2)
    values, scores = given[0].numel(), 2 * 4 * 64 * 64
    # Dropped values; q, k and v in fp32; the scores' softmax, what is left of it, and what is dropped.
    expected = sorted([values, *[4 * values] * 3, 4 * scores, 4 * scores, scores])
    assert sizes(paired._Attention(on_gpu=True), *given, bias) == expected


def test_scores_computed_plainly_are_those_of_torchs_attention():
    torch.manual_seed(0)
    q, bias = torch.randn(2, 4, 9, 8), torch.randn(1, 4, 9, 9)
    k, v = torch.randn(2, 2, 2, 9, 8)
    for mask in (bias, bias > 0):
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        assert torch.allclose(paired._plain(q, k, v, mask, 0.0), expected, atol=1e-5)


def test_work_grows_with_tokens(tmp_path):
    folder = make_encoder_decoder(tmp_path / "model", "flan")
    lora = paired.count_paired(Run.model_validate({"model": str(folder), "data": ["-"], "method": "lora"}), on_gpu=True)
    assert lora is not None
    assert lora.kept(24, 40, 24) > 1.8 * lora.kept(*SHAPE)
    assert lora.half(24, 40, 24) == pytest.approx(2 * lora.half(*SHAPE), rel=0.1)
    assert lora.kernels(24, 40, 24) == pytest.approx(lora.kernels(*SHAPE), rel=0.02)
    assert lora.layer(*SHAPE) < lora.kept(*SHAPE) / 2


def test_a_count_is_kept_for_the_next_time_and_made_again_where_it_is_damaged(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNESMITH_CACHE", str(tmp_path / "cache"))
    folder = make_encoder_decoder(tmp_path / "model", "t5")
    run = Run.model_validate({"model": str(folder), "data": ["-"], "method": "full"})
    counted = PairedWork(
        **{name: Rows(terms=(1.0,) * 6) for name in PairedWork.model_fields if name != "width"}, width=4
    )
    calls = []
    monkeypatch.setattr(paired, "_count", lambda *_, **__: calls.append(1) or counted)
    assert [paired.count_paired(run, on_gpu=False) for _ in range(2)] == [counted, counted]
    (kept,) = (tmp_path / "cache" / "probes").glob("paired-*.json")
    kept.write_text("{")
    assert paired.count_paired(run, on_gpu=False) == counted
    assert len(calls) == 2
    paired.count_paired(run, on_gpu=True)
    paired.count_paired(run.model_copy(update={"method": "lora"}), on_gpu=False)
    assert len(calls) == 4
