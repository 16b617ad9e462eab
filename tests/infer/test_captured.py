"""Steps over buffers that stay where they are give what the model gives: rows leave and join, buffers grow."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounter
from transformers import AutoConfig, AutoModelForCausalLM

from tunesmith.infer import captured
from tunesmith.infer.attention import NAME, use_decoding_attention
from tunesmith.infer.cache import Row, cut, regroup
from tunesmith.infer.call import Call
from tunesmith.infer.sampling import Choice, choose
from tunesmith.kernels import streams
from tunesmith.model.forward import own_attention

SHAPE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97, "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip
KINDS = {
    "llama": {},
    "gemma2": {"sliding_window": 12, "query_pre_attn_scalar": 8},
    "mistral": {"sliding_window": 9},
}
PROMPTS = [[5, 9, 40], [7, 30, 8, 4, 7, 7, 12, 60, 7, 1, 2], [90, 3, 50, 60, 70]]


def made(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE | KINDS[kind])).eval()


def decoded(call: Call, adapter: str = "") -> list[torch.Tensor]:
    """Logits of 30 steps, in the middle of which the second row leaves and another one joins."""
    found = []
    with torch.inference_mode():
        read, cache = call.read_all(PROMPTS)
        lengths = [len(prompt) for prompt in PROMPTS]
        last = read.argmax(-1).tolist()
        cache = regroup([Row(cache, place, length) for place, length in enumerate(lengths)])
        for number in range(30):
            if number == 8:
                cache = regroup([Row(cache, 0, lengths[0]), Row(cache, 2, lengths[2])])
                last, lengths = [last[0], last[2]], [lengths[0], lengths[2]]
            if number == 12:
                logits, other = call.read(PROMPTS[1] * 3)
                rows = [Row(cache, place, length) for place, length in enumerate(lengths)]
                cache = regroup([Row(other, 0, len(PROMPTS[1] * 3)), *rows])
                last, lengths = [int(logits.argmax()), *last], [len(PROMPTS[1] * 3), *lengths]
            logits = call.go_on(cache, last, lengths, adapter)
            lengths = [length + 1 for length in lengths]
            last = logits.argmax(-1).tolist()
            found.append(logits)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_are_those_of_the_model(kind, monkeypatch):
    monkeypatch.setattr(captured, "COLUMNS", 16)
    model = made(kind)
    plain = decoded(Call(model, is_shared=True))
    use_decoding_attention(model, own_attention(model))
    assert (model.config._attn_implementation == NAME) == (kind != "gemma2")
    call = Call(model, is_shared=True)
    call._is_capturable = True  # as on a GPU, without its graphs
    found = decoded(call)
    assert not call._captured[""].is_off
    for a, b in zip(plain, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("expected", "shape"), [(5, (3, 16)), (200, (3, 48))])
def test_buffers_have_the_size_of_what_is_to_come(expected, shape, monkeypatch):
    """And grow where more comes after all."""
    monkeypatch.setattr(captured, "COLUMNS", 32)
    monkeypatch.setattr(captured, "FINE_COLUMNS", 16)
    model = made("llama")
    plain = decoded(Call(model, is_shared=True))
    call = Call(model, is_shared=True, expected=expected)
    call._is_capturable = True
    sizes, place = [], captured.Captured._size

    def size(self, count, longest):
        sizes.append(place(self, count, longest))
        return sizes[-1]

    monkeypatch.setattr(captured.Captured, "_size", size)
    found = decoded(call)
    assert not call._captured[""].is_off
    assert sizes[0] == shape
    for a, b in zip(plain, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gemma2", "mistral"))]
)
def test_layers_are_compiled_once_for_one_row_and_once_for_several(kind, monkeypatch):
    monkeypatch.setattr(captured, "COLUMNS", 16)
    counter = CompileCounter()
    own = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda layer, *, fullgraph, options: own(layer, backend=counter, fullgraph=fullgraph)
    )
    model = made(kind)
    names = dict(model.named_modules())
    plain = decoded(Call(model, is_shared=True))
    use_decoding_attention(model, own_attention(model))
    call = Call(model, is_shared=True, compiles=True)
    call._is_capturable = True
    found = decoded(call)
    assert dict(model.named_modules()) == names
    assert call._captured[""]._compiled is not None
    for a, b in zip(plain, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1  # three rows, two, then three again, with ever more columns
    call.warm_up()
    assert counter.frame_count == 2


def test_layers_that_cannot_be_compiled_are_captured_as_they_are(monkeypatch):
    monkeypatch.setattr(captured, "COLUMNS", 16)
    model = made("llama")
    plain = decoded(Call(model, is_shared=True))

    def broken(*_, **__):
        raise torch._dynamo.exc.Unsupported("something of this model")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    call = Call(model, is_shared=True, compiles=True)
    call._is_capturable = True
    found = decoded(call)
    assert call._captured[""]._compiled is None
    assert not call._captured[""].is_off
    for a, b in zip(plain, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mistral"])  # Gemma 2 makes a tensor on the host in every pass
def test_graphs_give_what_the_model_gives(kind, compiles, monkeypatch):
    monkeypatch.setattr(captured, "COLUMNS", 16)
    model = made(kind).cuda()
    plain = decoded(_uncaptured(model))
    use_decoding_attention(model, own_attention(model))
    call = Call(model, is_shared=True, compiles=compiles)
    found = decoded(call) + decoded(call)
    assert (call._captured[""]._compiled is not None) == compiles
    assert all(step.graph is not None for step in call._captured[""]._steps.values())
    assert not call._captured[""].is_off
    for a, b in zip(plain + plain, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def ahead(call: Call, runs_ahead: bool) -> tuple[list[torch.Tensor], list[list[int] | None]]:
    """Logits of 24 steps, and what was found likeliest. Now and then another token is wanted than that; once a row
    leaves, and once the last columns are cut off again."""
    found, likeliest = [], []
    with torch.inference_mode():
        read, cache = call.read_all(PROMPTS)
        lengths, last = [len(prompt) for prompt in PROMPTS], read.argmax(-1).tolist()
        for number in range(24):
            if number == 9:
                cache = regroup([Row(cache, 0, lengths[0]), Row(cache, 2, lengths[2])])
                last, lengths = [last[0], last[2]], [lengths[0], lengths[2]]
            if number == 13:
                cut(cache, 2)
                lengths = [length - 2 for length in lengths]
            rows = [[token] for token in last]
            logits = call.go_on_with(cache, rows, lengths, runs_ahead=runs_ahead)[:, -1]
            likeliest.append(call.likeliest() if call.likeliest is not None else None)
            lengths = [length + 1 for length in lengths]
            last = logits.argmax(-1).tolist() if number % 5 else logits.topk(2).indices[:, 1].tolist()
            found.append(logits)
    return found, likeliest


def test_steps_begun_before_their_tokens_are_known_are_undone_where_others_come(monkeypatch):
    monkeypatch.setattr(captured, "COLUMNS", 16)
    model, replays, own = made("llama"), [], captured.Step.replay
    expected, _ = ahead(Call(model, is_shared=True), False)
    monkeypatch.setattr(captured.Step, "replay", lambda step: (replays.append(step.lengths), own(step))[1])
    call = Call(model, is_shared=True)
    call._is_capturable = True
    found, likeliest = ahead(call, True)
    for a, b, ids in zip(expected, found, likeliest, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert ids == b.argmax(-1).tolist()
    assert 24 < len(replays) < 40  # a step each, and one more for each that was begun in vain, not for all


def test_logits_that_are_no_numbers_are_no_token():
    model = made("llama")
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    call = Call(model, is_shared=True)
    call._is_capturable = True
    step = captured.Step(call._step, [tuple(torch.zeros(2, 1, 2, 16, 8)) for _ in range(3)], 1)
    step.begin([5], [4])
    with torch.inference_mode():
        step.replay()
    assert step.read(1)() == [-1]
    assert choose(step.logits, [Choice(0.0, 1.0, 0.5, None)], step.read(1)) == [None]
    assert choose(step.logits, [Choice(0.0, 1.0, 0.5, None)]) == [None]


def _uncaptured(model: torch.nn.Module) -> Call:
    call = Call(model, is_shared=True)
    call._is_capturable = False
    return call


def test_buffers_stay_within_their_limit(monkeypatch):
    monkeypatch.setattr(captured, "COLUMNS", 16)
    model = made("llama")
    call = Call(model, is_shared=True, limit=40_000)  # 4 rows of 16 columns need 24,576 bytes, 32 columns twice that
    call._is_capturable = True
    expected, found = decoded(Call(model, is_shared=True)), decoded(call)
    assert 0 < call._captured[""].bytes <= 40_000
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    decoded(call, "another")
    assert call._captured["another"].bytes + call._captured[""].bytes <= 40_000


def test_a_step_that_differs_is_not_used(monkeypatch, caplog):
    """As of a model that looks at all columns of a cache, whatever the mask says."""
    model = made("llama")
    call = Call(model, is_shared=True)
    call._is_capturable = True
    own = call._logits

    def looks(tokens, mask, positions, cache, options):
        logits = own(tokens, mask, positions, cache, options)
        return logits + float(isinstance(cache.layers[0], captured.FixedLayer))

    monkeypatch.setattr(call, "_logits", looks)
    found = decoded(call)
    assert call._captured[""].is_off
    assert "differs by" in caplog.text
    for a, b in zip(decoded(Call(model, is_shared=True)), found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class Device:
    """Stands in for a GPU: what captures ask of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int):
        self.calls: list[str] = []
        graph = type("Graph", (), {})
        graph.capture_begin = lambda _, **__: self.calls.append("begin")
        graph.capture_end = lambda _: self.calls.append("end")
        monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
        monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, free))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.calls.append("empty"))
        monkeypatch.setattr(streams, "_streams", {})


@pytest.mark.parametrize(("free", "calls"), [(10, ["begin", "end"]), (9, ["empty", "begin", "end"])])
def test_a_capture_leaves_the_allocators_memory_where_enough_is_free(monkeypatch, free, calls):
    device = Device(monkeypatch, free)
    every = [streams.capture_stream(torch.device("cuda", 0)) for _ in range(3)]
    assert all(stream is every[0] for stream in every)
    assert captured.captured(lambda: torch.ones(1), None, every[0], 10)[1] == 1
    assert device.calls == calls


def test_a_capture_that_fails_is_ended(monkeypatch):
    device = Device(monkeypatch, 10)

    def fail() -> torch.Tensor:
        raise RuntimeError("spoiled")

    with pytest.raises(RuntimeError, match="spoiled"):
        captured.captured(fail, None, streams.capture_stream(torch.device("cuda", 0)), 10)
    assert device.calls == ["begin", "end"]
