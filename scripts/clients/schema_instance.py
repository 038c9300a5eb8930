"""A small instance of a JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FORMATS = {
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "time": "12:00:00Z",
    "email": "ann@example.org",
    "uri": "https://example.org",
    "uuid": "123e4567-e89b-12d3-a456-426614174000",
}


def schema_instance(schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> Any:
    """An instance of a schema: every property, one item of a list, the first of alternatives."""
    root = schema if root is None else root
    if "$ref" in schema:
        target: Any = root
        for step in schema["$ref"].lstrip("#").split("/")[1:]:
            target = target[step]
        return schema_instance(target, root)
    for name in ("anyOf", "oneOf"):
        if name in schema:
            return schema_instance(schema[name][0], root)
    if "allOf" in schema:
        merged = {**schema, **{k: v for part in schema["allOf"] for k, v in part.items()}}
        return schema_instance({k: v for k, v in merged.items() if k != "allOf"}, root)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: schema_instance(value, root) for name, value in properties.items()}
    if kind == "array":
        items = schema.get("prefixItems") or [schema.get("items") or {"type": "string"}]
        count = max(1, schema.get("minItems", 1))
        return [schema_instance(item, root) for item in (items * count)[: max(count, len(items))]]
    if kind in ("integer", "number"):
        return max(schema.get("minimum", 3), schema.get("exclusiveMinimum", 2) + 1)
    if kind == "boolean":
        return True
    if kind == "null":
        return None
    text = FORMATS.get(schema.get("format", ""), "Rome")
    return text.ljust(schema.get("minLength", 0), "x")[: schema.get("maxLength", 100)]
