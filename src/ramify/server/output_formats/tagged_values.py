"""Converts a parameter's value from text to JSON, by the type that the tool's schema gives it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from ramify.server.output_formats.json_scanner import ObjectScanner, json_text

PYTHON_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
TYPES = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    dict: {"object"},
    list: {"array"},
    type(None): {"null"},
}
STRING = frozenset({"string"})


def allowed_types(schema: Mapping[str, object], key: str, is_string: bool | None) -> frozenset[str]:
    """JSON types that a value may have; empty if neither schema nor answer says.

    Args:
        schema: of the tool's arguments.
        is_string: what the answer itself says of the value; None: nothing.
    """
    if is_string:
        return STRING
    properties = schema.get("properties")
    types = frozenset(_types(properties.get(key)) if isinstance(properties, Mapping) else ())
    return types if is_string is None else types - STRING


def _types(schema: object) -> Iterable[str]:
    """The types of a property's schema and of its alternatives, one level deep."""
    schemas = [schema]
    if isinstance(schema, Mapping):
        for name in ("anyOf", "oneOf"):
            options = schema.get(name)
            schemas += options if isinstance(options, list) else ()
    for option in schemas:
        types = option.get("type") if isinstance(option, Mapping) else None
        yield from (
            name
            for name in (types if isinstance(types, list) else [types])
            if isinstance(name, str)
        )


def as_json(text: str, types: frozenset[str]) -> str:
    """A value as JSON text: a string, unless the text is JSON of another of the allowed types."""
    literal = text.strip()
    literal = PYTHON_CONSTANTS.get(literal, literal)
    try:
        value = json.loads(literal, parse_constant=_reject)
    except (ValueError, RecursionError):
        return json_text(text)
    value_types = TYPES.get(type(value), STRING)
    is_allowed = value_types != STRING and ("string" not in types or types & value_types)
    if not is_allowed:
        return json_text(text)
    return ObjectScanner().scan(literal)[0] if literal[0] in "{[" else literal


def _reject(name: str) -> object:
    raise ValueError(name)
