"""Chat templates that behave as those of known models do, and a tokenizer with their markers."""

from __future__ import annotations

from typing import Any

LLAMA3 = """\
{{- bos_token }}
{%- set system = 'Today Date: 26 Jul 2024' %}
{%- if messages[0].role == 'system' %}
    {%- set system = system ~ '\\n\\n' ~ messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' ~ system }}
{%- if tools %}{{- '\\n' ~ tools | tojson }}{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('one call at a time') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' ~ call.name }}
        {{- '", "parameters": ' ~ call.arguments | tojson ~ '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' ~ message.content }}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' }}
        {{- message.content | trim ~ '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
LLAMA4 = (
    LLAMA3.replace("<|start_header_id|>", "<|header_start|>")
    .replace("<|end_header_id|>", "<|header_end|>")
    .replace("}<|eot_id|>", "}<|eom|>")
    .replace("<|eot_id|>", "<|eot|>")
)
QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content ~ '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n' ~ tools | tojson ~ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' ~ messages[0].content ~ '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(query=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set last.query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or message.role == 'system' and not loop.first %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set thinking = message.reasoning_content or '' %}
        {%- if not thinking and '</think>' in content %}
            {%- set thinking = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > last.query and (loop.last or thinking) %}
            {{- '<think>\\n' ~ thinking.strip('\\n') ~ '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson ~ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
DEEPSEEK = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|Assistant|>' ~ message.content.split('</think>')[-1] ~ '<|eos|>' }}
    {%- else %}
        {{- '<|User|>' ~ message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\\n' }}{%- endif %}
"""
TEMPLATES = {"llama3": LLAMA3, "llama4": LLAMA4, "qwen3": QWEN3, "deepseek": DEEPSEEK}
SPECIAL = {
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    "llama4": ("<|header_start|>", "<|header_end|>", "<|eot|>", "<|eom|>"),
    "qwen3": ("<|im_end|>", "<|im_start|>"),
    "deepseek": ("<|eos|>", "<|User|>", "<|Assistant|>"),
}


def tokenizer(name: str) -> Any:
    """Return a byte-level tokenizer of a few merges with a template and its markers."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(["the user and the assistant call the tools\n\n" * 3], trainer)
    special = ("<|begin|>", *SPECIAL[name])
    inner.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    inner.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<|begin|>", clean_up_tokenization_spaces=False
    )
    wrapped.chat_template = TEMPLATES[name]
    return wrapped
