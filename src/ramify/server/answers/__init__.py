"""Answers: the parts that one consists of, and the arguments of calls.

- `answer`: the text, reasoning and tool calls of an answer, as parts that grow.
- `partial_json`: the complete members of a truncated JSON object.
- `call_arguments`: the arguments of calls that clients send back.

`generation` and the APIs import it. It imports `http` and `model_dialects` only.
"""
