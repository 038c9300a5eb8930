"""JSON types that a tool's schema allows for an argument: through references, unions and constants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

Types = frozenset[str]
ANY: Types = frozenset()  # nothing is known
MAX_STEPS = 1000  # schemas visited for one argument; beyond, nothing is known
MAX_DEPTH = 64
TYPES_OF_VALUES: dict[type, Types] = {
    str: frozenset({"string"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer"}),
    float: frozenset({"number"}),
    dict: frozenset({"object"}),
    list: frozenset({"array"}),
    type(None): frozenset({"null"}),
}


def value_types(schema: object, root: Mapping[str, Any]) -> Types:
    """JSON types of the values that a schema allows; empty if it does not say.

    Args:
        root: the schema in which references point.
    """
    return _Resolver(root).types(schema)


def argument_types(root: Mapping[str, Any], name: str) -> Types:
    """JSON types of the values that a tool's schema allows for an argument; empty if it does not say."""
    resolver = _Resolver(root)
    return _all_of(map(resolver.types, resolver.property_schemas(root, name)))


def argument_names(root: Mapping[str, Any]) -> Types:
    """The arguments that a tool's schema names."""
    resolver = _Resolver(root)
    parts = resolver.parts(root)
    return frozenset(name for part in parts for name in _mapping(part.get("properties")))


def plain_schema(schema: object, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a chain of bare references leads to; {} if there is none."""
    resolver = _Resolver(root)
    for _ in range(MAX_DEPTH):
        if isinstance(schema, Mapping) and schema.keys() == {"$ref"}:
            schema = resolver.target(str(schema["$ref"]))
        elif (
            isinstance(schema, Mapping)
            and schema.keys() == {"allOf"}
            and len(_list(schema["allOf"])) == 1
        ):
            schema = schema["allOf"][0]
        else:
            break
    return _mapping(schema)


class _Resolver:
    """Follows the references of one schema, within `MAX_STEPS`."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._steps_left, self._depth = root, MAX_STEPS, 0

    def types(self, schema: object) -> Types:
        """See `value_types`."""
        self._steps_left -= 1
        if not isinstance(schema, Mapping) or self._steps_left < 0 or self._depth > MAX_DEPTH:
            return ANY
        self._depth += 1
        limits = [self._own_types(schema)]
        if isinstance(reference := schema.get("$ref"), str):
            limits.append(self.types(self.target(reference)))
        limits += map(self.types, _list(schema.get("allOf")))
        for union in ("anyOf", "oneOf"):
            if options := _list(schema.get(union)):
                limits.append(_any_of(map(self.types, options)))
        self._depth -= 1
        return _all_of(limits)

    @staticmethod
    def _own_types(schema: Mapping[str, Any]) -> Types:
        types = schema.get("type")
        names = types if isinstance(types, list) else [types]
        own = frozenset(name for name in names if isinstance(name, str))
        if own and schema.get("nullable") is True:
            own |= {"null"}
        values = schema["enum"] if isinstance(schema.get("enum"), list) else []
        values = [schema["const"]] if "const" in schema else values
        return _all_of([own, _any_of(TYPES_OF_VALUES.get(type(value), ANY) for value in values)])

    def property_schemas(self, schema: Mapping[str, Any], name: str) -> list[object]:
        """What the parts of a schema say of a property."""
        properties = (_mapping(part.get("properties")) for part in self.parts(schema))
        return [members[name] for members in properties if name in members]

    def parts(self, schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """A schema and those that describe the same object with it: references, all of, any of."""
        waiting: list[object] = [schema]
        parts: list[Mapping[str, Any]] = []
        while waiting and len(parts) < MAX_STEPS:
            part = waiting.pop()
            if not isinstance(part, Mapping) or any(part is other for other in parts):
                continue
            parts.append(part)
            if isinstance(reference := part.get("$ref"), str):
                waiting.append(self.target(reference))
            for keyword in ("allOf", "anyOf", "oneOf"):
                waiting += _list(part.get(keyword))
        return parts

    def target(self, reference: str) -> object:
        """The schema that a reference within the root names; None if there is none."""
        if not reference.startswith("#"):
            return None
        target: Any = self._root
        for part in unquote(reference[1:]).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, Mapping):
                target = target.get(key)
            elif isinstance(target, list) and key.isdecimal() and int(key[:9]) < len(target):
                target = target[int(key[:9])]
            else:
                return None
        return target


def _any_of(options: Iterable[Types]) -> Types:
    """Types of a union; empty if it has none, or one of which nothing is known."""
    union: set[str] = set()
    for option in options:
        if not option:
            return ANY
        union |= option
    return frozenset(union)


def _all_of(limits: Iterable[Types]) -> Types:
    """Types that all limits allow, of which something is known."""
    allowed = ANY
    for limit in limits:
        if not allowed or not limit:
            allowed = allowed or limit
            continue
        both = {
            name
            for name in allowed | limit
            if all(
                name in types or (name == "integer" and "number" in types)
                for types in (allowed, limit)
            )
        }
        # No value is possible: the later word counts.
        allowed = frozenset(both) or limit
    return allowed


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else ()
