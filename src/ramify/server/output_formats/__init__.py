"""What a model's output means: text, reasoning and tool calls, by the format of its family.

Read `events` (what a parser yields) first, then `output_format`, `table`, `parser` (reasoning, text and
calls), `reader` and `writer` (what parsers use), and the syntaxes of calls. Imported by the rest of
`server`; imports nothing of it.
"""

from ramify.server.output_formats.output_format import OutputFormat, detect, named

__all__ = ["OutputFormat", "detect", "named"]
