"""Whether speculative decoding pays, and that it never costs: tokens a second with it and without, by turns.

    python benchmarks/speculative.py --model SmolLM2-135M-Instruct.Q4_1.gguf [--draft MODEL] [--tokens 64]

One request at a time and four at once, greedily: a text to be repeated (what prompt lookup is good at), a question
about a text, and a question alone (where there is nothing to look up). Each is decoded with and without, by turns, so
that what else the machine does meets both; answers must be the same. The result is benchmarks/results/speculative.json,
with a draft speculative_draft.json. `--deepen 3` gives the model three times its layers, those added without effect, so
that the model itself is a draft that is always right at a third of the cost: what a draft can bring at best.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from typing import Any

from results import write_result

TEXT = (
    "The smithy stands at the end of the lane, behind the mill. Its owner, Ada Hammer, makes gates, hinges and garden "
    "tools, and mends what others break. On Mondays it is closed; on all other days the fire is lit at six and put out "
    "at four."
)
PROMPTS = {
    "repeat a text": f"Repeat this text word for word: {TEXT}",
    "ask about a text": f"{TEXT}\n\nWhen is the smithy closed, and what does its owner make? Answer in two sentences.",
    "ask": "Tell me a short story about a fox.",
}


def decode(
    engine: Any, prompts: list[list[int]], most: int, ends: frozenset[int]
) -> tuple[list[list[int]], float, float]:
    """Answers, seconds, and those of the CPU."""
    from tunesmith.serve.engine import Job

    found: list[list[int]] = [[] for _ in prompts]
    left = threading.Semaphore(0)

    def job(place: int) -> Job:
        def take(token: Any) -> bool:
            found[place].append(token.id)
            return False

        return Job("", prompts[place], most, ends, take, lambda _: left.release(), temperature=0.0)

    began, busy = time.monotonic(), time.process_time()
    for place in range(len(prompts)):
        engine.submit(job(place))
    for _ in prompts:
        left.acquire()
    return found, time.monotonic() - began, time.process_time() - busy


def deepen(model: Any, times: int) -> None:
    """Put layers that add nothing after each of a Llama's."""
    import copy

    import torch

    layers = []
    for layer in model.model.layers:
        layers.append(layer)
        for _ in range(times - 1):
            layers.append(copy.deepcopy(layer))
            torch.nn.init.zeros_(layers[-1].self_attn.o_proj.weight)
            torch.nn.init.zeros_(layers[-1].mlp.down_proj.weight)
    for number, layer in enumerate(layers):
        layer.self_attn.layer_idx = number
    model.model.layers = torch.nn.ModuleList(layers)
    model.config.num_hidden_layers = len(layers)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [kind for kind in model.config.layer_types for _ in range(times)]


def main() -> None:
    from tunesmith.data.types import Message
    from tunesmith.infer.call import try_out
    from tunesmith.infer.generate import stop_tokens
    from tunesmith.infer.speculate import Draft
    from tunesmith.run.open import open_plain
    from tunesmith.serve.engine import Engine, Limits

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--deepen", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 4], help="at once")
    chosen = parser.parse_args()
    opened = open_plain(chosen.model)
    deepen(opened.model, chosen.deepen)
    tried = try_out(opened.model)
    assert tried.is_wide
    ends = frozenset(stop_tokens(opened.model, opened.encoder))
    draft = None
    if chosen.draft:
        other = open_plain(chosen.draft)
        draft = Draft(other.model, len(other.tokenizer), None)
    rows = []
    for count in chosen.requests:
        for name, text in PROMPTS.items():
            prompts = [opened.encoder.prompt([Message("user", text + " " * n)]) for n in range(count)]
            rates: dict[bool, list[float]] = {False: [], True: []}
            busy: dict[bool, list[float]] = {False: [], True: []}
            answers, told = {}, {}
            engines = {}
            for is_wide in (False, True):
                limits = Limits(count, 2 * count, 2048, 1 << 30)
                given = {"is_wide": is_wide, "draft": draft if is_wide else None}
                engines[is_wide] = Engine(opened.model, lambda _: None, limits, is_shared=True, **given)
                engines[is_wide].start()
            for _ in range(chosen.rounds):
                for is_wide, engine in engines.items():
                    answers[is_wide], seconds, used = decode(engine, prompts, chosen.tokens, ends)
                    busy[is_wide].append(used / sum(map(len, answers[is_wide])))
                    rates[is_wide].append(sum(map(len, answers[is_wide])) / seconds)
                    told[is_wide] = engine.stats
            for engine in engines.values():
                engine.close()
            without, with_it = (statistics.median(rates[one]) for one in (False, True))
            rows.append(
                {
                    "requests": count, "task": name, "tokens": sum(map(len, answers[True])), "without": without,
                    "with": with_it, "times": with_it / without,
                    "rates": {"without": rates[False], "with": rates[True]},
                    "cpu_times": statistics.median(busy[False]) / statistics.median(busy[True]),
                    "proposed": told[True].proposed_tokens, "accepted": told[True].accepted_tokens,
                    "is_same": answers[False] == answers[True],
                }
            )  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    what = "Speculative decoding by prompt lookup" + (" and a draft model" if draft else "") + ": tokens a second, CPU"
    write_result("speculative_draft" if draft else "speculative", what, rows)


if __name__ == "__main__":
    main()
