"""Answers: the grammar that constrains one, and the parts that it consists of.

In reading order:

- `schema_keywords`: the keywords of JSON schemas that a grammar can enforce.
- `tool_schemas`: rewrites a JSON schema to what a grammar can enforce; warns of the rest.
- `constraint`: the grammar of an answer from its tools, tool choice and response format.
- `answer`: the text, reasoning and tool calls of an answer, as parts that grow.
- `partial_json`: the complete members of a truncated JSON object.

`generation`, `service` and the APIs import it. It imports `errors` and `model_dialects` only.
"""
