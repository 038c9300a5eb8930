"""Output formats of model families: parse text, reasoning and tool calls; constrain calls by grammars.

Read `events` (what a parser yields) first, then `output_format`, `table`, `parser` (reasoning, text and
calls), `reader` and `writer` (what parsers use), the syntaxes of calls (`*_calls`, `harmony`) over their
scanners (`*_scanner`, `tagged_values`, `value_types`), then `call_syntax`, `call_text`, `lark_rules` and
`call_grammar`.
Imported by the rest of `server`; imports nothing of it.
"""

from ramify.server.model_dialects.output_format import OutputFormat, detect, named

__all__ = ["OutputFormat", "detect", "named"]
