"""The tokenizer of the built-in model with templates like those of larger ones."""

from __future__ import annotations

import tokenizers

from ramify.engine.text.tokenizer import Tokenizer
from ramify.models.checkpoint.find import find_checkpoint

# Writes tools, calls and their results, and drops from history what an answer thought.
TALKER_TEMPLATE = """
{{- bos_token -}}
{%- if tools -%}
{{- '<|system|>Call one of these as <tool_call>JSON</tool_call>:' -}}
{%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
{%- set text = message.content or '' -%}
{%- if message.role == 'assistant' -%}
{%- set text = text.split('</think>')[-1] -%}
{{- '<|assistant|>' + text -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- elif message.role == 'tool' -%}
{{- '<|user|>Result: ' + text + '<|end|>' -}}
{%- else -%}
{{- '<|' + message.role + '|>' + text + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
# As those models do that think unless they are told not to: it begins the answer with no thoughts.
HASTY_TEMPLATE = TALKER_TEMPLATE.replace(
    "'<|assistant|>' -}}{%- endif -%}\n", "'<|assistant|><think></think>' -}}{%- endif -%}\n"
)


def tokenizer_with(template: str) -> Tokenizer:
    """The built-in model's tokenizer with another chat template."""
    path = find_checkpoint("ramify-tiny")
    plain = Tokenizer.load(path)
    core = tokenizers.Tokenizer.from_str(plain.to_json())
    return Tokenizer(
        core, special_tokens=plain.special_tokens, chat_templates={"default": template}
    )
