"""Decoding on one GPU: the engine of `tunesmith serve` beside transformers' generate, and beside the time that reading
the weights takes.

    python benchmarks/decode.py [--shapes llama3-1b llama3-8b] [--batches 1 16 64] [--ways] [--tiny]

Random weights at published shapes, merged (no adapter), prompts of 128 tokens and answers of 256, the likeliest token
each time, no stop token. Both answer the same prompts, prefill included; the time of one token, in a batch of one, is
that between the first and the last. Proposals (speculative decoding) are off: random weights repeat themselves.

`--ways` times a step of one row by our own kernels (`kernels.decode`) alone, launched in one way after the other, and
shows where the time of the best goes, kernel by kernel, before all else.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import threading
import time
from typing import Any

import torch
from results import write_result
from torch import nn

from tunesmith.errors import first_line
from tunesmith.infer.call import try_out
from tunesmith.infer.captured import Step
from tunesmith.infer.fused import FusedModel, fused
from tunesmith.kernels.decode import Tile, Way, can_overlap
from tunesmith.measure.bench import SHAPES
from tunesmith.serve.engine import Engine, Job, Limits

WHAT = "Decoding by the engine of `tunesmith serve`, beside transformers' generate in the same run"
PROMPT, ANSWER = 128, 256
ALL_SHAPES = {
    "llama3-1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True, "max_position_embeddings": 8192,
    },
    **SHAPES,
}  # fmt: skip
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=["llama3-1b", "llama3-8b"])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 16, 64])
    parser.add_argument("--ways", action="store_true")
    parser.add_argument("--alone", action="store_true", help="without generate; nothing is written")
    parser.add_argument("--seconds", type=float, default=80.0, help="for trying ways")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bandwidth, rows = read_bandwidth(device), []
    for name in options.shapes:
        model = make(name, device, tiny=options.tiny)
        weights = sum(one.numel() * one.element_size() for one in model.parameters())
        if options.ways:
            try_ways(model, weights / bandwidth, options.seconds)
        for batch in options.batches:
            row = {"shape": name, "batch": batch, **measure(model, batch, device, beside=not options.alone)}
            row["reading_seconds"] = round(weights / bandwidth, 6)
            row["times_reading"] = round(row["token_seconds"] / row["reading_seconds"], 3)
            rows.append(row)
            print(row, flush=True)
        del model
    if rows and not options.alone:
        print(f"wrote {write_result('decode', WHAT, rows)}")


def make(name: str, device: str, *, tiny: bool) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"model_type": "llama", **ALL_SHAPES[name], **(SMALL if tiny else {})}
    with torch.device(device):
        config = AutoConfig.for_model(**shape, bos_token_id=1, eos_token_id=2)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32  # Triton's interpreter has no bf16 matmuls
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def measure(model: nn.Module, batch: int, device: str, *, beside: bool) -> dict[str, Any]:
    size = model.config.vocab_size
    prompts = torch.randint(3, size, (batch, PROMPT), generator=torch.Generator().manual_seed(batch)).tolist()
    model.set_attn_implementation("sdpa")
    theirs = by_generate(model, prompts, device) if beside else 0.0
    try_out(model)
    ours, between, device_seconds = by_engine(model, prompts)
    row = {"tokens_per_second": round(batch * ANSWER / ours, 1)}
    if beside:
        row["generate_tokens_per_second"] = round(batch * ANSWER / theirs, 1)
        row["speed_to_generate"] = round(theirs / ours, 3)
    return row | {
        "token_seconds": round(between, 6),
        "replay_seconds": device_seconds,
    }


def by_generate(model: nn.Module, prompts: list[list[int]], device: str) -> float:
    tokens = torch.tensor(prompts, device=device)
    options = {"do_sample": False, "min_new_tokens": ANSWER, "max_new_tokens": ANSWER, "pad_token_id": 0}
    model.generate(tokens[:, :16], attention_mask=torch.ones_like(tokens[:, :16]), max_new_tokens=8, pad_token_id=0)
    began = time.perf_counter()
    model.generate(tokens, attention_mask=torch.ones_like(tokens), **options).cpu()
    return time.perf_counter() - began


def by_engine(model: nn.Module, prompts: list[list[int]]) -> tuple[float, float, float | None]:
    """Seconds for all, between two tokens of the last request, and of a captured step alone."""
    length = PROMPT + ANSWER
    limits = Limits(len(prompts), 2 * len(prompts), length, length * len(prompts))
    engine = Engine(model, lambda _: None, limits, is_shared=True, compiles=True)
    began = time.perf_counter()
    engine.warm_up("")
    print(f"ready after {time.perf_counter() - began:.1f} s", flush=True)
    engine.start()
    try:
        for _ in range(2):  # steps of all sizes are captured before; buffers that grow end those there were
            answered(engine, prompts, ANSWER)
        return *answered(engine, prompts, ANSWER), replayed(engine)
    finally:
        engine.close()


@torch.inference_mode()
def replayed(engine: Engine) -> float | None:
    steps = [step for one in engine._call._captured.values() for step in one._steps.values() if step.graph]
    if not steps:
        return None
    steps[-1].set([PROMPT] * steps[-1].rows)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(50):
        steps[-1].graph.replay()
    torch.cuda.synchronize()
    return round((time.perf_counter() - began) / 50, 6)


def answered(engine: Engine, prompts: list[list[int]], count: int) -> tuple[float, float]:
    done, times, failed = threading.Semaphore(0), [], []

    def job(prompt: list[int], is_last: bool) -> Job:
        def take(_: Any) -> bool:
            if is_last:
                times.append(time.perf_counter())
            return False

        def end(reason: str) -> None:
            if reason != "length":
                failed.append(reason)
            done.release()

        return Job("", prompt, count, frozenset(), take, end, temperature=0.0, seed=0)

    began = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.submit(job(prompt, number == len(prompts) - 1))
    for _ in prompts:
        done.acquire()
    if failed:
        raise SystemExit(f"{len(failed)} answers ended as {failed[0]}")
    ended = time.perf_counter()
    apart = sorted(later - earlier for earlier, later in itertools.pairwise(times))
    shown = {share: f"{apart[int(share * (len(apart) - 1))] * 1e6:.0f}" for share in (0.05, 0.5, 0.95, 1.0)}
    print(f"microseconds between two tokens, by quantile: {shown}", flush=True)
    return ended - began, (times[-1] - times[0]) / (len(times) - 1)


TRIED = [
    *({"attention": Tile(64, warps)} for warps in (2, 8)),
    *({"attention": Tile(32, warps), "columns": 32} for warps in (4, 2)),
    {"attention": Tile(64, 4), "columns": 128},
    *({"gated": tile} for tile in (Tile(8192, 4), Tile(8192, 2), Tile(16384, 4))),
    *({"down": tile} for tile in (Tile(32768, 16), Tile(16384, 8))),
    *({"out": tile} for tile in (Tile(8192, 4), Tile(16384, 4))),
    *({"qkv": tile} for tile in (Tile(8192, 4), Tile(16384, 8))),
    *({"head": tile} for tile in (Tile(16384, 8), Tile(32768, 8))),
]


@torch.inference_mode()
def try_ways(model: nn.Module, reading: float, seconds_at_most: float) -> None:
    """The best of each setting after the other, from those in use."""
    began = time.perf_counter()
    own = fused(model, Way())
    if own is None:
        raise SystemExit("its layers are none for these kernels")
    print(f"layers tried after {time.perf_counter() - began:.1f} s", flush=True)

    def timed(way: Way) -> tuple[float, torch.Tensor]:
        step = step_of(FusedModel(model, own.layers, own.final, way))
        logits = torch.stack([step.replay()[0].clone() for _ in range(STEPS)])
        best = min(replay_seconds(step) for _ in range(3))
        print(f"{best * 1e6:8.1f} us  {best / reading:.3f} times reading  {changed(way)}", flush=True)
        return best, logits

    device = next(model.parameters()).device
    best, (least, expected) = Way(), timed(Way())
    if can_overlap(device):
        overlapping = Way(overlaps=True)
        seconds, found = timed(overlapping)
        print("with kernels that overlap, logits are", "the same" if torch.equal(found, expected) else "OTHERS")
        best, least = (overlapping, seconds) if seconds < least else (best, least)
    for change in TRIED:
        way = best._replace(**change)
        if way == best or time.perf_counter() - began > seconds_at_most:
            continue
        try:
            seconds, found = timed(way)
        except Exception as error:
            print(f"{changed(way)}: {first_line(error)}", flush=True)
            continue
        worst = float((found[0].float() - expected[0].float()).abs().max() / expected[0].float().std())
        if not worst < 0.2:
            print(f"its logits differ by {worst:.3g}")
        elif seconds < 0.998 * least:
            best, least = way, seconds
    print(f"best: {least * 1e6:.1f} us, {least / reading:.3f} times reading: {changed(best)}", flush=True)
    show_kernels(step_of(FusedModel(model, own.layers, own.final, best)))


def changed(way: Way) -> str:
    """What is not as it is in use."""
    fields = {name: value for name, value in way._asdict().items() if value != getattr(Way(), name)}
    return " ".join(
        f"{name} {'x'.join(map(str, one)) if isinstance(one, tuple) else one}" for name, one in fields.items()
    )


STEPS = 24 if torch.cuda.is_available() else 2
"""Whose logits are compared."""


def step_of(made: FusedModel) -> Step:
    """A step of one row whose prompt is there already, captured where there is a GPU."""
    heads = made.layers[0].qkv[1].shape[0] // made.layers[0].size
    weight, columns = made.head.weight, -(-(PROMPT + ANSWER) // 256) * 256
    generator = torch.Generator(weight.device).manual_seed(0)
    pairs = []
    for _ in made.layers:
        shape = (2, 1, heads, columns, made.layers[0].size)
        pairs.append(tuple(torch.randn(shape, generator=generator, device=weight.device).to(weight.dtype)))
    step = Step(lambda *_: torch.empty(0), pairs, 1, fused=made)
    step.begin([5], [PROMPT])
    step.capture(None)
    return step


def replay_seconds(step: Step, count: int = 50) -> float:
    step.begin([5], [PROMPT])
    if step.graph is None:
        count = 1
    else:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        step.replay()
    if step.graph is not None:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


def show_kernels(step: Step, count: int = 10) -> None:
    """Of a step: the kernels, how often each runs, and what one of them takes."""
    if step.graph is None:
        return
    step.begin([5], [PROMPT])
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(count):
            step.replay()
        torch.cuda.synchronize()
    found = [one for one in profile.key_averages() if one.device_time_total > 0]
    for one in sorted(found, key=lambda one: -one.device_time_total):
        mean = one.device_time_total / one.count
        print(
            f"{one.device_time_total / count:9.1f} us a step  {one.count / count:5.1f} x {mean:8.2f} us  {one.key[:70]}"
        )
    print(f"{sum(one.device_time_total for one in found) / count:9.1f} us a step in kernels", flush=True)


def read_bandwidth(device: str) -> float:
    """Bytes a second that a large tensor is read with, the best of a few."""
    size = (8 << 30) if device == "cuda" else (256 << 20)
    large = torch.empty(size // 2, dtype=torch.bfloat16, device=device).fill_(1)
    best = 0.0
    for _ in range(5):
        began = time.perf_counter()
        large.view(torch.int64).max().item()
        best = max(best, size / (time.perf_counter() - began))
    return best


if __name__ == "__main__":
    main()
