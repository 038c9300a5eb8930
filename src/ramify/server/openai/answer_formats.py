"""Response formats (structured output) as OpenAI, vLLM, SGLang and llama.cpp spell them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ramify.params import StructuredOutput
from ramify.server.answers.constraint import schema_format
from ramify.server.errors import ApiError
from ramify.server.http.request_body import decode_json_text
from ramify.server.openai.protocol import Sampling, StructuredOutputs

Warnings = list[str]


SCHEMA_PATH = "response_format.json_schema.schema"


def answer_format(
    request: Sampling, warnings: Warnings, schema_path: str = SCHEMA_PATH
) -> StructuredOutput | None:
    """The format that the answer must match; None if the request has none.

    Args:
        warnings: what of a schema is not enforced is appended.
        schema_path: of the schema of `response_format` in the client's request.

    Raises:
        ApiError: it has more than one, or one that is malformed or not served.
    """
    formats = list(_formats(request, schema_path))
    if len(formats) > 1:
        names = ", ".join(name for name, _ in formats)
        raise ApiError(
            400,
            f"the answer can have one format, not {len(formats)}: {names}",
            param=formats[-1][0],
        )
    if formats:
        _, make = formats[0]
        return make(warnings)
    if request.structured_outputs is not None:
        raise ApiError(
            400,
            "it has none of the formats json, regex, choice, grammar and json_object",
            param="structured_outputs",
        )
    return None


def _formats(
    request: Sampling, schema_path: str
) -> Iterator[tuple[str, Callable[[Warnings], StructuredOutput]]]:
    """Yield each format of a request: the name of its field, and a function that makes it."""
    response_format = request.response_format
    if response_format is not None and response_format.type == "json_schema":
        named = response_format.json_schema
        if named is None:
            raise ApiError(400, "json_schema is missing", param="response_format.json_schema")
        strict = named.strict is True
        yield (
            "response_format",
            lambda warnings: schema_format(named.schema, schema_path, warnings, strict=strict),
        )
    elif response_format is not None and response_format.type == "json_object":
        schema = response_format.schema
        yield (
            "response_format",
            _json_object if schema is None else _schema(schema, "response_format.schema"),
        )
    nested = request.structured_outputs or StructuredOutputs()
    if nested.structural_tag is not None:
        raise ApiError(
            400,
            "structural tags are not served; send tools, whose calls are constrained",
            param="structured_outputs.structural_tag",
        )
    if nested.json_object:
        yield "structured_outputs.json_object", _json_object
    for name, value in (
        ("guided_json", request.guided_json),
        ("json_schema", request.json_schema),
        ("structured_outputs.json", nested.json),
    ):
        if value is not None:
            yield name, _schema(value, name)
    texts = {
        "regex": request.regex,
        "guided_regex": request.guided_regex,
        "structured_outputs.regex": nested.regex,
        "grammar": request.grammar,
        "ebnf": request.ebnf,
        "guided_grammar": request.guided_grammar,
        "structured_outputs.grammar": nested.grammar,
    }
    for name, text in texts.items():
        if text is not None:
            yield name, _text("regex" if name.endswith("regex") else "grammar", text)
    for name, choice in (
        ("choice", request.choice),
        ("guided_choice", request.guided_choice),
        ("structured_outputs.choice", nested.choice),
    ):
        if choice is not None:
            yield name, _text("choice", tuple(choice))


def _json_object(_: Warnings) -> StructuredOutput:
    return StructuredOutput(json_object=True)


def _text(kind: str, value: Any) -> Callable[[Warnings], StructuredOutput]:
    return lambda _: StructuredOutput(**{kind: value})


def _schema(value: object, where: str) -> Callable[[Warnings], StructuredOutput]:
    def make(warnings: Warnings) -> StructuredOutput:
        schema = decode_json_text(value, where) if isinstance(value, str) else value
        if not isinstance(schema, dict):
            raise ApiError(400, "a JSON schema is an object", param=where)
        return schema_format(schema, where, warnings, strict=False)

    return make
