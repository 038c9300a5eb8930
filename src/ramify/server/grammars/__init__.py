"""Grammars of answers: calls of the request's tools, its response format, or either.

In reading order:

- `schema_keywords`: the keywords of JSON schemas that a grammar can enforce.
- `tool_schemas`: rewrites a JSON schema to what a grammar can enforce; warns of the rest.
- `constraint`: the grammar of an answer from its tools, tool choice and response format.

`service`, `conversation` and the APIs import it. It imports `errors` and `model_dialects` only.
"""
