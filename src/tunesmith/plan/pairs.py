"""What an encoder-decoder is not trained with here, each with its reason in one sentence."""

from __future__ import annotations

from collections.abc import Callable

from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.plan.models import is_encoder_decoder, read_config

REFUSALS: tuple[tuple[Callable[[Run], bool], str], ...] = (
    (
        lambda run: run.objective != "sft",
        "objective: an encoder-decoder learns answers (objective: sft); the others compare or score what a decoder "
        "alone writes",
    ),
    (
        lambda run: run.method not in ("full", "lora", "qlora"),
        "method: an encoder-decoder is trained with full, lora or qlora; adapters of peft and merges at intervals are "
        "for decoders alone",
    ),
    (
        lambda run: run.has_lora and run.lora.init not in ("default", "pissa", "olora"),
        "lora.init: eva, lora-ga and loftq look at what a decoder computes; use default, pissa or olora",
    ),
    (
        lambda run: run.has_lora and run.lora.layers is not None,
        "lora.layers: an encoder-decoder has two stacks, whose layers have the same numbers; choose by lora.targets, "
        "such as `decoder.*.q`",
    ),
    (
        lambda run: run.adapter is not None,
        "adapter: the adapter of an encoder-decoder cannot be trained on yet; merge it, and train the merged model",
    ),
    (
        lambda run: bool(run.new_tokens),
        "new_tokens: an encoder-decoder's embedding is shared by both its stacks, and cannot be grown here",
    ),
    (
        lambda run: run.quantization_aware is not None,
        "quantization_aware: no export of an encoder-decoder in few bits is written here",
    ),
    (
        lambda run: run.neftune_noise_alpha > 0,
        "neftune_noise_alpha: an encoder-decoder embeds sources and targets apart, and gets no noise here",
    ),
    (
        lambda run: run.algorithm in ("lisa", "badam"),
        "optimizer: lisa and badam take turns over one stack of layers; an encoder-decoder has two",
    ),
    (
        lambda run: run.too_long == "split",
        "too_long: a part of a source is another question; with an encoder-decoder it may be truncate or drop",
    ),
    (
        lambda run: run.train_on == "all",
        "train_on: an encoder reads the prompt and does not predict it; with an encoder-decoder it may be assistant or "
        "last",
    ),
)


def check_pairs(run: Run) -> bool:
    """Whether the run's model is an encoder-decoder; UserError where it is, and the run asks for what is not there."""
    if not is_encoder_decoder(read_config(run.model)):
        return False
    why = next((why for applies, why in REFUSALS if applies(run)), None)
    if why is not None:
        raise UserError(f"{why}.")
    return True
