"""Response formats (structured output) as OpenAI, vLLM, SGLang and llama.cpp spell them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ramify.params import StructuredOutput
from ramify.server.errors import ApiError
from ramify.server.grammars.constraint import schema_format, written_format
from ramify.server.http.request_body import convert_value, decode_json_text
from ramify.server.openai.protocol import (
    JsonSchema,
    ResponseFormat,
    Sampling,
    StructuredOutputs,
)

Warnings = list[str]


FORMAT_PATH = "response_format"
# A schema has at least one of these, unless it allows everything.
SCHEMA_WORDS = frozenset("type properties $ref anyOf oneOf allOf enum const items".split())


def answer_format(
    request: Sampling, warnings: Warnings, format_path: str = FORMAT_PATH
) -> tuple[StructuredOutput | None, str]:
    """The format that the answer must match, and its field; None and "" if the request has none.

    Args:
        warnings: what of a schema is not enforced is appended.
        format_path: of `response_format` in the client's request.

    Raises:
        ApiError: it has more than one, or one that is malformed or not served.
    """
    formats = list(_formats(request, format_path))
    if len(formats) > 1:
        names = ", ".join(name for name, _ in formats)
        raise ApiError(
            400,
            f"the answer can have one format, not {len(formats)}: {names}",
            param=formats[-1][0],
        )
    if formats:
        name, make = formats[0]
        return make(warnings), name
    if request.structured_outputs is not None:
        raise ApiError(
            400,
            "it has none of the formats json, regex, choice, grammar and json_object",
            param="structured_outputs",
        )
    return None, ""


def _formats(
    request: Sampling, format_path: str
) -> Iterator[tuple[str, Callable[[Warnings], StructuredOutput]]]:
    """Yield each format of a request: the name of its field, and a function that makes it."""
    response_format = request.response_format
    if response_format is not None and response_format.type == "json_schema":
        schema, strict, path = named_schema(response_format, format_path)
        yield (
            format_path,
            lambda warnings: schema_format(schema, path, warnings, strict=strict),
        )
    elif response_format is not None and response_format.type == "json_object":
        of_object = response_format.schema
        yield (
            format_path,
            _json_object if of_object is None else _schema(of_object, f"{format_path}.schema"),
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
            yield name, _text("regex" if name.endswith("regex") else "grammar", text, name)
    for name, choice in (
        ("choice", request.choice),
        ("guided_choice", request.guided_choice),
        ("structured_outputs.choice", nested.choice),
    ):
        if choice is not None:
            yield name, _text("choice", tuple(choice), name)


def named_schema(
    response_format: ResponseFormat, format_path: str
) -> tuple[dict[str, Any], bool, str]:
    """The schema of a `json_schema` format, whether it is strict, and its path in the request.

    It stands beside the type, in `json_schema` with its name, or is `json_schema` itself.

    Raises:
        ApiError: 400, it is missing or malformed.
    """
    strict, nested = response_format.strict is True, response_format.json_schema
    if nested is None and response_format.schema is None:
        raise ApiError(400, "the schema is missing", param=f"{format_path}.json_schema")
    nested = nested or {}
    path = f"{format_path}.json_schema"
    if nested.get("schema") is None and SCHEMA_WORDS & nested.keys():
        return nested, strict, path
    named = convert_value(nested, JsonSchema, path)
    strict = strict or named.strict is True
    if named.schema is None and response_format.schema is not None:
        return response_format.schema, strict, f"{format_path}.schema"
    return named.schema or {}, strict, f"{path}.schema"


def _json_object(_: Warnings) -> StructuredOutput:
    return StructuredOutput(json_object=True)


def _text(kind: str, value: Any, name: str) -> Callable[[Warnings], StructuredOutput]:
    return lambda _: written_format(name, **{kind: value})


def _schema(value: object, where: str) -> Callable[[Warnings], StructuredOutput]:
    def make(warnings: Warnings) -> StructuredOutput:
        schema = decode_json_text(value, where) if isinstance(value, str) else value
        if not isinstance(schema, dict):
            raise ApiError(400, "a JSON schema is an object", param=where)
        return schema_format(schema, where, warnings, strict=False)

    return make
