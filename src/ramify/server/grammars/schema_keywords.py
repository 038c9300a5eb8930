"""The keywords of JSON schemas: which a grammar can enforce, what shape each has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ramify.engine.logits.grammar import can_enforce

TYPES = frozenset({"object", "array", "string", "integer", "number", "boolean", "null"})
# Formats of strings that llguidance enforces.
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
NUMBER_FORMATS = frozenset({"int32", "int64", "uint32", "uint64", "float", "double", "decimal"})
# Keywords that change which values are valid, and that llguidance does not enforce.
UNENFORCED = (
    "uniqueItems",
    "propertyNames",
    "not",
    "if",
    "contains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedItems",
    "$dynamicRef",
    "$recursiveRef",
)
MAX_COUNT = 2**31  # of items, characters or properties
# Bounds between these, without a sign, need not be tried.
_SMALL, _LARGE = 1e-6, 2.0**53


def restricts(keyword: str, value: Any) -> bool:
    """Whether a keyword of `UNENFORCED` makes any value invalid."""
    if keyword == "uniqueItems":
        return value is True
    if keyword == "propertyNames":  # names are strings in any case
        return value not in (True, {}, {"type": "string"})
    return value is not True and not (keyword == "unevaluatedItems" and value == {})


def _is_schema(value: Any) -> bool:
    return isinstance(value, bool | Mapping)


def _is_schema_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _is_schema_map(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_schema, value.values()))


def _is_name_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= MAX_COUNT and int(value) == value


def _is_type(value: Any) -> bool:
    types = value if isinstance(value, list) else [value]
    return bool(types) and all(isinstance(name, str) and name in TYPES for name in types)


def is_pattern(value: Any) -> bool:
    """Whether a regular expression can be enforced: no look-around, no word boundaries."""
    return isinstance(value, str) and can_enforce("pattern", value)


def _is_bound(value: Any) -> bool:
    is_usual = _is_number(value) and (value == 0 or _SMALL < abs(value) < _LARGE)
    return is_usual or (_is_number(value) and can_enforce("minimum", value))


def _is_divisor(value: Any) -> bool:
    return _is_number(value) and value > 0 and can_enforce("multipleOf", value)


# Keyword → whether a value of it can be enforced.
SHAPES: dict[str, Callable[[Any], bool]] = {
    "type": _is_type,
    "enum": lambda value: isinstance(value, list) and bool(value),
    "const": lambda value: True,
    "properties": _is_schema_map,
    "patternProperties": _is_schema_map,  # its patterns are checked one by one
    "additionalProperties": _is_schema,
    "unevaluatedProperties": _is_schema,
    "required": _is_name_list,
    "minProperties": _is_count,
    "maxProperties": _is_count,
    "items": _is_schema,
    "prefixItems": _is_schema_list,
    "minItems": _is_count,
    "maxItems": _is_count,
    "minLength": _is_count,
    "maxLength": _is_count,
    "pattern": is_pattern,
    "format": lambda value: value in FORMATS,
    "minimum": _is_bound,
    "maximum": _is_bound,
    "exclusiveMinimum": _is_bound,
    "exclusiveMaximum": _is_bound,
    "multipleOf": _is_divisor,
    "allOf": _is_schema_list,
    "anyOf": _is_schema_list,
    "oneOf": _is_schema_list,
    "$ref": lambda value: isinstance(value, str),
}


def modern(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema in the words of draft 2020-12, from older drafts and OpenAPI."""
    new = dict(schema)
    if isinstance(new.get("items"), list):
        new["prefixItems"] = new.pop("items")
        if "additionalItems" in new:
            new["items"] = new.pop("additionalItems")
        if not new["prefixItems"]:
            del new["prefixItems"]
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(new.get(exclusive), bool):
            is_exclusive = new.pop(exclusive)
            if is_exclusive and bound in new:
                new[exclusive] = new.pop(bound)
    if new.pop("nullable", None) is True and isinstance(new.get("type"), str):
        new["type"] = [new["type"], "null"]
        if isinstance(new.get("enum"), list) and None not in new["enum"]:
            new["enum"] = [*new["enum"], None]
    if isinstance(new.get("required"), bool):  # draft 3: of the property itself
        del new["required"]
    if new.get("format") in NUMBER_FORMATS or ("format" in new and not _may_be_text(new)):
        del new["format"]
    if isinstance(new.get("enum"), list) and len(new["enum"]) == 0:
        del new["enum"]
    return new


def _may_be_text(schema: Mapping[str, Any]) -> bool:
    types = schema.get("type", "string")
    return types == "string" or (isinstance(types, list) and "string" in types)
