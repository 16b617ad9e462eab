"""Answers to conversations, one at a time and streamed, or many in one batch.

They are asked for exactly as in training, by the function that lays out training examples (`Encoder.prompt`), and end
where those end.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from tunesmith.data.chat import Encoder
from tunesmith.data.types import Message
from tunesmith.errors import UserError
from tunesmith.infer.decoding import FIRST, LAST, never_made, not_streamed
from tunesmith.model.structure import is_encoder_decoder

Conversation = Sequence[dict[str, str]]


def answers(
    model: nn.Module,
    encoder: Encoder,
    conversations: Sequence[Conversation],
    *,
    reasons: bool = False,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[str]:
    """The model's next turn in each conversation. Temperature 0 takes the likeliest token each time."""
    prompts = [prompt_ids(encoder, conversation, reasons) for conversation in conversations]
    longest = max(len(prompt) for prompt in prompts)
    filler = _padding_token(encoder)
    device = next(model.parameters()).device
    is_read = is_encoder_decoder(model)  # its prompts end where they end, and answers begin anew

    def row(content: list[int], filler: int) -> list[int]:
        padding = [filler] * (longest - len(content))
        return content + padding if is_read else padding + content

    tokens = torch.tensor([row(p, filler) for p in prompts], device=device)
    mask = torch.tensor([row([1] * len(p), 0) for p in prompts], device=device)
    torch.manual_seed(seed)
    output = model.generate(
        input_ids=tokens, attention_mask=mask, **_options(model, encoder, max_new_tokens, temperature)
    )
    begin = 0 if is_read else longest
    return [encoder.tokenizer.decode(one[begin:], skip_special_tokens=True).strip() for one in output]


def stream(
    model: nn.Module,
    encoder: Encoder,
    conversation: Conversation,
    *,
    reasons: bool = False,
    max_new_tokens: int = 512,
    temperature: float = 0.7,
) -> Iterator[str]:
    """The model's next turn, piece by piece as it is made. Closing the iterator stops the generation. UserError where
    the conversation leaves no room for an answer."""
    from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

    is_cancelled = threading.Event()

    class Cancelled(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            return torch.full((input_ids.shape[0],), is_cancelled.is_set(), device=input_ids.device)

    ids = prompt_ids(encoder, conversation, reasons)
    most = min(max_new_tokens, _room(model, len(ids)))
    tokens = torch.tensor([ids], device=next(model.parameters()).device)
    pieces = TextIteratorStreamer(encoder.tokenizer, skip_prompt=True, skip_special_tokens=True)
    failure: list[BaseException] = []

    def work() -> None:
        try:
            model.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                streamer=pieces,
                stopping_criteria=StoppingCriteriaList([Cancelled()]),
                **_options(model, encoder, most, temperature),
            )
        except BaseException as error:  # told to the reader, who is waiting in the other thread
            failure.append(error)
            pieces.end()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield from pieces
    finally:
        is_cancelled.set()
        thread.join()
    if failure:
        raise failure[0]


def _room(model: nn.Module, prompt: int) -> int:
    """Tokens that an answer may have."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if is_encoder_decoder(model) or not isinstance(context, int) or context < 1:
        return sys.maxsize
    if prompt >= context:
        raise UserError(
            f"The conversation has {prompt:,} tokens, and this model takes {context:,} with its answer; begin a new "
            "one, or ask something shorter."
        )
    return context - prompt


def prompt_ids(encoder: Encoder, conversation: Conversation, reasons: bool = False) -> list[int]:
    """The conversation as the model sees it, up to where its answer begins."""
    return encoder.prompt([Message(turn["role"], turn["content"]) for turn in conversation], reasons=reasons)


def stop_tokens(model: nn.Module, encoder: Encoder) -> list[int]:
    """Where answers end: at what the model was trained to end its turns with, and at what its own files name."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    named = configured if isinstance(configured, list) else [configured]
    return sorted(encoder.end_ids.union(end for end in named if isinstance(end, int)))


def _options(model: nn.Module, encoder: Encoder, max_new_tokens: int, temperature: float) -> dict:
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    if temperature <= 0:  # what the model's own file says of sampling would only cause a warning
        sampling |= dict.fromkeys(("temperature", "top_p", "top_k", "min_p", *FIRST, *LAST))
    return {
        **not_streamed(model)[0],
        "return_dict_in_generate": False,
        "max_new_tokens": max_new_tokens,
        "eos_token_id": stop_tokens(model, encoder) or None,
        "pad_token_id": _padding_token(encoder),
        "tokenizer": encoder.tokenizer,
        "use_cache": True,
        "suppress_tokens": never_made(model) or None,
        **sampling,
    }


def _padding_token(encoder: Encoder) -> int:
    for token in (encoder.tokenizer.pad_token_id, encoder.tokenizer.eos_token_id):
        if token is not None:
            return token
    return 0
