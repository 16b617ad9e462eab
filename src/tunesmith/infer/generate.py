"""Answers to conversations, one at a time and streamed, or many in one batch."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from tunesmith.errors import UserError

Conversation = Sequence[dict[str, str]]


def answers(
    model: nn.Module,
    tokenizer,
    conversations: Sequence[Conversation],
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[str]:
    """The model's next turn in each conversation. Temperature 0 takes the likeliest token each time."""
    prompts = [prompt_ids(tokenizer, conversation) for conversation in conversations]
    longest = max(len(prompt) for prompt in prompts)
    filler = _padding_token(tokenizer)
    device = next(model.parameters()).device
    tokens = torch.tensor([[filler] * (longest - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    torch.manual_seed(seed)
    output = model.generate(
        input_ids=tokens, attention_mask=mask, **_options(model, tokenizer, max_new_tokens, temperature)
    )
    return [tokenizer.decode(row[longest:], skip_special_tokens=True).strip() for row in output]


def stream(
    model: nn.Module,
    tokenizer,
    conversation: Conversation,
    *,
    max_new_tokens: int = 512,
    temperature: float = 0.7,
) -> Iterator[str]:
    """The model's next turn, piece by piece as it is made. Closing the iterator stops the generation."""
    from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

    is_cancelled = threading.Event()

    class Cancelled(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            return torch.full((input_ids.shape[0],), is_cancelled.is_set(), device=input_ids.device)

    tokens = torch.tensor([prompt_ids(tokenizer, conversation)], device=next(model.parameters()).device)
    pieces = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    failure: list[BaseException] = []

    def work() -> None:
        try:
            model.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                streamer=pieces,
                stopping_criteria=StoppingCriteriaList([Cancelled()]),
                **_options(model, tokenizer, max_new_tokens, temperature),
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


def prompt_ids(tokenizer, conversation: Conversation) -> list[int]:
    """The conversation as the model sees it, up to where its answer begins."""
    if tokenizer.chat_template is None:
        return tokenizer("\n".join(turn["content"] for turn in conversation))["input_ids"]
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(list(conversation), tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise UserError(f"The chat template refuses this conversation: {error}.") from error
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _options(model: nn.Module, tokenizer, max_new_tokens: int, temperature: float) -> dict:
    ends = {tokenizer.eos_token_id}
    configured = model.generation_config.eos_token_id
    ends |= set(configured if isinstance(configured, list) else [configured])
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    if temperature <= 0:  # what the model's own file says of sampling would only cause a warning
        sampling |= {"temperature": None, "top_p": None, "top_k": None}
    return {
        "max_new_tokens": max_new_tokens,
        "eos_token_id": sorted(end for end in ends if end is not None) or None,
        "pad_token_id": _padding_token(tokenizer),
        "use_cache": True,
        **sampling,
    }


def _padding_token(tokenizer) -> int:
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    return 0
