"""Small tokenizers of the kinds that models have, with templates of the kinds that models have."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for message in messages %}"
    "{% set text = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' "
    "+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set text = bos_token + text %}{% endif %}{{ text }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
# Like Qwen3's: turns after the last question carry their reasoning, earlier ones lose it; knows tools.
REASONING = """
{%- if tools %}{{- '<|im_start|>system\\n' + tools | map('tojson') | join('\\n') + '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
  {%- set content = message.content %}{%- set reasoning = message.reasoning_content or '' %}
  {%- if message.role == 'assistant' %}
    {%- if '</think>' in content %}
      {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
      {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if loop.index0 > ns.last %}{{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}{%- endif %}
    {{- content }}
    {%- for call in message.tool_calls or [] %}
      {{- '<tool_call>' + call.function | tojson + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
  {%- else %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
# Says itself what is generated.
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Like Llama 2's: no header, a leading space, the end token written by the template.
INST = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<bos>", "<start_of_turn>", "<end_of_turn>",
)  # fmt: skip
WORDS = ("Hi", "Hello", "system", "user", "assistant", "model", "Be", "kind", "Bye", "four", "two", "\n\n")


def byte_level(template: str | None, *, bos: str | None = None, eos: str = "<|im_end|>", adds_bos: bool = False):
    """A byte-level BPE in which some words, and two newlines, are one token."""
    vocab = {char: n for n, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for word in WORDS:
        word = word.replace("\n", "Ċ")
        for end in range(2, len(word) + 1):
            pair = (word[: end - 1], word[end - 1])
            if pair not in merges:
                merges.append(pair)
                vocab.setdefault("".join(pair), len(vocab))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    backend.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>", "</tool_call>")])
    if adds_bos:
        assert bos
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos)
    made.chat_template = template
    return made


def sentencepiece(template: str | None):
    """As Llama 2's: a space goes before every text, and spaces are part of the tokens."""
    pieces = ["<unk>", "<s>", "</s>", "▁", "\n", "[INST]", "▁[INST]", "▁[/INST]", "Hi", "▁Hi", "▁four", "four"]
    letters = [c for c in map(chr, range(33, 127)) if c not in pieces]
    vocab = [(piece, 0.0 if len(piece) > 2 else -5.0) for piece in [*pieces, *letters]]
    backend = Tokenizer(models.Unigram(vocab, unk_id=0))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Replace("▁", " ")
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.chat_template = template
    return made


@pytest.fixture(scope="session")
def chatml():
    return byte_level(CHATML)


@pytest.fixture(scope="session")
def llama3():
    return byte_level(LLAMA3, bos="<|begin|>", eos="<|eot_id|>", adds_bos=True)


@pytest.fixture(scope="session")
def gemma():
    return byte_level(GEMMA, bos="<bos>", eos="<end_of_turn>", adds_bos=True)


@pytest.fixture(scope="session")
def reasoning():
    return byte_level(REASONING)


@pytest.fixture(scope="session")
def marked():
    return byte_level(MARKED)


@pytest.fixture(scope="session")
def inst():
    return sentencepiece(INST)


@pytest.fixture(scope="session")
def base():
    """A model that was never taught to chat."""
    return byte_level(None, bos="<bos>", eos="<|endoftext|>", adds_bos=True)


@pytest.fixture(scope="session")
def make_tokenizer():
    return byte_level
