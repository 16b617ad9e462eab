"""Chat templates in the manner of well-known families, each with what makes its family hard to ask right."""

from __future__ import annotations

# Thoughts are kept after the last question only; switched off, the prompt holds empty ones; lists tools.
QWEN3 = """
{%- if tools or messages[0].role == 'system' %}
  {{- '<|im_start|>system\\n' }}
  {%- if messages[0].role == 'system' %}{{- messages[0].content + ('\\n\\n' if tools else '') }}{%- endif %}
  {%- if tools %}
    {{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}{{- '\\n</tools>' }}
  {%- endif %}
  {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
  {%- if m.role == 'assistant' %}
    {%- set thoughts = m.reasoning_content or '' %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if loop.index0 > ns.last and (loop.last or thoughts) %}
      {{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- m.content }}
    {%- for call in m.tool_calls or [] %}
      {{- '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
  {%- elif m.role == 'tool' %}
    {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
  {%- elif m.role == 'user' %}
    {{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\\n' }}
  {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
# The prompt opens the thoughts; switched off, it closes them at once. Finished turns carry what they had.
R1 = """
{{- bos_token }}
{%- for m in messages %}
  {%- if m.role == 'system' %}{{- m.content }}
  {%- elif m.role == 'user' %}{{- '<|User|>' + m.content }}
  {%- else %}
    {{- '<|Assistant|>' }}
    {%- if m.reasoning_content %}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
    {%- else %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
    {{- m.content + '<|endoftext|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|Assistant|>' }}
  {{- '<think>\\n\\n</think>\\n\\n' if thinking is defined and not thinking else '<think>\\n' }}
{%- endif %}
"""
# As it was published: the prompt opens the thoughts, and finished turns have none.
R1_OWN = """
{{- bos_token }}
{%- for m in messages %}
  {%- if m.role == 'system' %}{{- m.content }}
  {%- elif m.role == 'user' %}{{- '<|User|>' + m.content }}
  {%- else %}{{- '<|Assistant|>' + m.content.split('</think>')[-1] + '<|endoftext|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\\n' }}{%- endif %}
"""
# Today's date in the system message, tools described there, calls that end in a token of their own.
LLAMA31 = """
{{- bos_token }}
{%- set date = strftime_now('%d %b %Y') %}
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}{%- set rest = messages[1:] %}
{%- else %}{%- set system = '' %}{%- set rest = messages %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date + '\\n\\n' }}
{%- if tools %}
  {{- 'Environment: ipython\\n' }}{%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
{%- endif %}
{{- system + '<|eot_id|>' }}
{%- for m in rest %}
  {%- if m.tool_calls %}
    {%- set call = m.tool_calls[0].function %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
    {{- call.arguments | tojson + '}<|eom_id|>' }}
  {%- elif m.role == 'tool' %}
    {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content + '<|eot_id|>' }}
  {%- else %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
# No system role, another name for the assistant.
GEMMA = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- raise_exception('a system message has no place here') }}{%- endif %}
{%- for m in messages %}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles take turns') }}{%- endif %}
  {%- set role = 'model' if m.role == 'assistant' else m.role %}
  {{- '<start_of_turn>' + role + '\\n' + m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""
# No generation prompt, tools before the last question, calls as a list.
MISTRAL = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}{%- set system = '' %}{%- set rest = messages %}{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for m in rest %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in rest %}
  {%- if m.role == 'user' %}
    {%- if tools and loop.index0 == ns.last %}
      {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
    {%- endif %}
    {{- '[INST]' + (system + '\\n\\n' if system and loop.first else '') + m.content + '[/INST]' }}
  {%- elif m.tool_calls %}
    {{- '[TOOL_CALLS][' }}
    {%- for call in m.tool_calls %}{{- call.function | tojson }}{%- endfor %}{{- ']' + eos_token }}
  {%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
  {%- else %}{{- m.content + eos_token }}{%- endif %}
{%- endfor %}
"""
# The end of the text, which is the tokenizer's eos, is no end of a turn.
PHI = """
{%- for m in messages %}{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- else %}{{- eos_token }}{%- endif %}
"""
# Channels: the last answer ends otherwise than earlier ones, thoughts go before it, and so do date and tools.
HARMONY = """
{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}
{%- if messages[0].role == 'system' or tools %}
  {{- '<|start|>developer<|message|>' }}
  {%- if messages[0].role == 'system' %}{{- '# Instructions\\n\\n' + messages[0].content }}{%- endif %}
  {%- for tool in tools or [] %}
    {{- '\\n# Tools\\n' + tool.function.name + tool.function.parameters | tojson }}
  {%- endfor %}
  {{- '<|end|>' }}
{%- endif %}
{%- for m in messages %}
  {%- if m.role == 'user' %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
  {%- elif m.role == 'tool' %}{{- '<|start|>functions to=assistant<|message|>' + m.content + '<|end|>' }}
  {%- elif m.role == 'assistant' %}
    {%- if m.thinking and loop.last %}
      {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
    {%- endif %}
    {%- if m.tool_calls %}
      {%- set call = m.tool_calls[0].function %}
      {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary<|message|>' }}
      {{- call.arguments | tojson + '<|call|>' }}
    {%- elif loop.last and not add_generation_prompt %}
      {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
    {%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{%- endif %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""
# A system message of its own where none is given.
CHATML = """
{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nYou are of help.<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
# Asked to think by words in the system message, with the date.
GRANITE = """
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}{%- set system = 'Today is ' + strftime_now('%B %d, %Y') + '.' %}{%- set rest = messages %}{%- endif %}
{%- if thinking %}{%- set system = system + ' Think first, between tags.' %}{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|endoftext|>\\n' }}
{%- if tools %}
  {{- '<|start_of_role|>tools<|end_of_role|>' + tools | tojson(indent=2) + '<|endoftext|>\\n' }}
{%- endif %}
{%- for m in rest %}
  {{- '<|start_of_role|>' + m.role + '<|end_of_role|>' }}
  {%- if m.reasoning_content and loop.last %}{{- '<think>' + m.reasoning_content + '</think>' }}{%- endif %}
  {{- m.content }}
  {%- for call in m.tool_calls or [] %}{{- '<|tool_call|>' + call.function | tojson }}{%- endfor %}
  {{- '<|endoftext|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}
"""
# A mode written into the system message, switched by a variable, with empty thoughts in the prompt when it is off.
SMOLLM3 = """
{%- if enable_thinking is not defined %}{%- set enable_thinking = true %}{%- endif %}
{{- '<|im_start|>system\\nDate: ' + strftime_now('%d %B %Y') + '\\nMode: ' }}
{{- ('/think' if enable_thinking else '/no_think') + '\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- for tool in tools or [] %}{{- '\\n' + tool | tojson }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- for m in rest %}
  {%- if m.role == 'assistant' %}
    {%- if enable_thinking %}
      {{- '<|im_start|>assistant\\n<think>\\n' + (m.reasoning_content or 'None.') + '\\n</think>\\n' }}
      {{- m.content + '<|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}
  {%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\\n' + ('<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n') }}
{%- endif %}
"""

# Writes nothing after an answer: the model ends its turn with what begins the next one.
GLM = """
{{- '[gMASK]<sop>' }}
{%- if tools %}{{- '<|system|>\\n# Tools' }}{%- endif %}
{%- for tool in tools or [] %}{{- '\\n' + tool | tojson }}{%- endfor %}
{%- for m in messages %}
  {%- if m.role == 'assistant' and m.tool_calls %}
    {%- for call in m.tool_calls %}
      {{- '<|assistant|>' + call.function.name + '\\n' + call.function.arguments | tojson }}
    {%- endfor %}
  {%- elif m.role == 'tool' %}{{- '<|observation|>\\n' + m.content }}
  {%- else %}{{- '<|' + m.role + '|>\\n' + m.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
# The same with thoughts, which only answers to the last question keep, and an empty one in all others.
GLM45 = """
{{- '[gMASK]<sop>' }}
{%- if tools %}{{- '<|system|>\\n# Tools' }}{%- endif %}
{%- for tool in tools or [] %}{{- '\\n' + tool | tojson }}{%- endfor %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- set is_off = enable_thinking is defined and not enable_thinking %}
{%- for m in messages %}
  {%- if m.role == 'user' %}{{- '<|user|>\\n' + m.content + ('/nothink' if is_off else '') }}
  {%- elif m.role == 'assistant' %}
    {{- '<|assistant|>' }}
    {%- if loop.index0 > ns.last and m.reasoning_content %}
      {{- '\\n<think>' + m.reasoning_content.strip() + '</think>' }}
    {%- else %}{{- '\\n<think></think>' }}{%- endif %}
    {%- if m.content.strip() %}{{- '\\n' + m.content.strip() }}{%- endif %}
    {%- for call in m.tool_calls or [] %}{{- '\\n<tool_call>' + call.function | tojson + '</tool_call>' }}{%- endfor %}
  {%- elif m.role == 'tool' %}{{- '<|observation|>\\n<tool_response>' + m.content + '</tool_response>' }}
  {%- else %}{{- '<|system|>\\n' + m.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' + ('\\n<think></think>' if is_off else '') }}{%- endif %}
"""

TEMPLATES = {
    "qwen3": QWEN3,
    "r1": R1,
    "r1_own": R1_OWN,
    "llama31": LLAMA31,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "phi": PHI,
    "harmony": HARMONY,
    "chatml": CHATML,
    "granite": GRANITE,
    "smollm3": SMOLLM3,
    "glm4": GLM,
    "glm45": GLM45,
}
THINKING = ("qwen3", "r1", "r1_own", "harmony", "granite", "smollm3", "glm45")
TOOLS = ("qwen3", "llama31", "mistral", "harmony", "granite", "glm4", "glm45")
ENDS = {"llama31": "<|eom_id|>", "harmony": "<|call|>", "glm4": "<|observation|>", "glm45": "<|observation|>"}
"""Tokens that end a call, where they are not those that end an answer."""
SPECIAL = (
    "<|endoftext|>", "<s>", "<|im_start|>", "<|im_end|>", "<|User|>", "<|Assistant|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]",
    "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|user|>",
    "<|assistant|>", "<|system|>", "<|end|>", "<|start|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>",
    "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>", "<|observation|>", "[gMASK]", "<sop>",
)  # fmt: skip


def make_tokenizer(template: str | None, *, prefix_space: bool = False, eos: str = "<|endoftext|>"):
    """Byte level, in which two newlines are one token, so that it shows where texts are tokenized apart; or, like
    sentencepiece, with a space before every text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    if prefix_space:
        pieces = [("<unk>", 0.0), ("▁", -2.0), ("\n", -2.0), ("\n\n", -2.5), ("▁T", -2.0), (">", -3.0)]
        pieces += [(chr(i), -5.0) for i in range(33, 127) if chr(i) != ">"]
        backend = Tokenizer(models.Unigram(pieces, unk_id=0))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Replace("▁", " ")
    else:
        vocab = {char: n for n, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        backend = Tokenizer(models.BPE(vocab={**vocab, "ĊĊ": len(vocab)}, merges=[("Ċ", "Ċ")]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    plain = ("<think>", "</think>")
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=eos)
    made.chat_template = template
    return made
