"""Converts a parameter's value from text to JSON, by the type that the tool's schema gives it."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from ramify.server.model_dialects.json_scanner import PYTHON_CONSTANTS, ObjectScanner, json_text
from ramify.server.model_dialects.value_types import Types, argument_types

TYPES = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    dict: {"object"},
    list: {"array"},
    type(None): {"null"},
}
STRING = frozenset({"string"})


def allowed_types(schema: Mapping[str, Any], key: str, is_string: bool | None) -> Types:
    """JSON types that a value may have; empty if neither schema nor answer says.

    Args:
        schema: of the tool's arguments.
        is_string: what the answer itself says of the value; None: nothing.
    """
    if is_string:
        return STRING
    types = argument_types(schema, key)
    return types if is_string is None else types - STRING


def as_json(text: str, types: Types) -> str:
    """A value as JSON text: a string, unless the text is JSON of another of the allowed types.

    Where a string is allowed, a number is one only if it is written as JSON writers do: `1.10` may be a
    version. Where it is not, literals of Python are read too.
    """
    literal = text.strip()
    literal = PYTHON_CONSTANTS.get(literal, literal)
    try:
        value = json.loads(literal, parse_constant=_reject)
    except (ValueError, RecursionError):
        return _python_as_json(literal, types) or json_text(text)
    value_types = TYPES.get(type(value), STRING)
    may_be_text = not types or "string" in types
    is_allowed = value_types != STRING and (not may_be_text or not types or types & value_types)
    if not is_allowed or (may_be_text and _is_number(value) and json_text(value) != literal):
        return json_text(text)
    return ObjectScanner().scan(literal)[0] if literal[0] in "{[" else literal


def _python_as_json(literal: str, types: Types) -> str | None:
    """A list or dict in Python's syntax as JSON; None if it is none, or the value may be text."""
    if not types & {"object", "array"} or "string" in types or literal[:1] not in ("{", "["):
        return None
    try:
        return json_text(ast.literal_eval(literal))
    # What `literal_eval` raises by its documentation, and values that JSON does not have.
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _reject(name: str) -> object:
    raise ValueError(name)
