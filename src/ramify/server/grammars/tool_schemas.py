"""Schemas of tools and formats as a grammar can follow them: closed, self-contained, enforceable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from ramify.server.errors import ApiError
from ramify.server.grammars.schema_keywords import (
    SHAPES,
    TYPES,
    UNENFORCED,
    is_pattern,
    modern,
    restricts,
)

MAX_SCHEMA_STEPS = 50_000  # schemas visited and names repeated, of all schemas of a request
PROBE_STEPS = 20  # that asking the grammar engine whether it reads a value counts as
MAX_WARNINGS = 16  # of a request
MAX_NAME_CHARS = 64  # of a property, in a path
_HAS_PROPERTIES = frozenset({"properties", "patternProperties"})
_UNIONS = ("anyOf", "oneOf")
# Keywords with schemas in them, or about properties: without any, a schema stays as it is.
_NESTED = frozenset(
    {
        "$ref",
        "additionalProperties",
        "allOf",
        "items",
        "patternProperties",
        "prefixItems",
        "properties",
        "required",
        *_UNIONS,
    }
)

Schema = dict[str, Any]


class SchemaTooLargeError(Exception):
    """The schemas of a request need more than `MAX_SCHEMA_STEPS`."""


@dataclass(slots=True)
class SchemaWarnings:
    """Ignored keywords of a request's schemas, and the steps that rewriting them took so far."""

    messages: list[str] = field(default_factory=list)
    num_steps: int = 0

    def add(self, message: str) -> None:
        """Append a message, unless there are `MAX_WARNINGS`."""
        if len(self.messages) < MAX_WARNINGS:
            self.messages.append(message)

    def step(self, num_steps: int = 1) -> None:
        """Count work. Raises SchemaTooLargeError beyond the limit."""
        self.num_steps += num_steps
        if self.num_steps > MAX_SCHEMA_STEPS:
            raise SchemaTooLargeError


def enforceable_schema(
    schema: Mapping[str, Any],
    where: str,
    warnings: SchemaWarnings,
    *,
    strict: bool,
    checks_types: bool = False,
) -> Schema:
    """The part of a schema that a grammar can enforce, with closed objects.

    - Targets of `$ref` are copied to `$defs` of the result, so that it can be part of a larger grammar.
      "#" is `schema` itself; recursion is allowed.
    - An object with properties has no others, unless `additionalProperties` says so. What several
      schemas describe together (`allOf`, `anyOf`, `$ref` beside other keywords) is closed as a whole.
    - Keywords that cannot be enforced are left out with a warning, annotations without one. So is a
      `$ref` that names nothing here, as an external one.

    Args:
        where: path of the schema in the request: `tools[0].function.parameters`.
        strict: refuse what cannot be enforced.
        checks_types: refuse a `type` that does not exist, such as "int"; "any" is no such mistake.

    Raises:
        ApiError: 400, `strict` and a keyword cannot be enforced, or there is no such type.
        SchemaTooLargeError: there is too much work.
    """
    return _Rewriter(schema, where, warnings, strict=strict, checks_types=checks_types).run()


class _Rewriter:
    """Rewrites one schema. Recurses into nested schemas, whose depth `json_limits` bounds, not into refs."""

    def __init__(
        self,
        root: Mapping[str, Any],
        where: str,
        warnings: SchemaWarnings,
        *,
        strict: bool,
        checks_types: bool,
    ) -> None:
        self._root, self._where, self._warnings, self._strict = root, where, warnings, strict
        self._checks_types = checks_types
        # id of a schema → the schema, so that it lives, and its enforceable keywords
        self._known: dict[int, tuple[Mapping[str, Any], Schema]] = {}
        # (pointer, is open) → name in `$defs`; those without a schema yet wait.
        self._names: dict[tuple[str, bool], str] = {}
        self._waiting: list[tuple[str, bool]] = []

    def run(self) -> Schema:
        schema = self._rewrite(self._root, self._where)
        defs: Schema = {}
        while self._waiting:
            pointer, is_open = self._waiting.pop()
            target, path = self._target(pointer), self._path_of(pointer)
            rewrite = self._rewrite_open if is_open else self._rewrite
            defs[self._names[pointer, is_open]] = rewrite(target, path)
        new = {} if schema is True else {"not": {}} if schema is False else schema
        return {**new, "$defs": defs} if defs else new

    # -- one schema --------------------------------------------------------------------------

    def _rewrite(self, schema: Any, path: str, outer: tuple[str, ...] = ()) -> Any:
        """Rewrite a schema that alone describes its object, apart from `outer`, and close the object.

        Args:
            outer: names of properties that an enclosing schema gives the same object.
        """
        self._warnings.step(1 + len(outer))
        if isinstance(schema, bool):
            return schema
        schema = self._checked(schema, path)
        if not outer and _NESTED.isdisjoint(schema):
            return dict(schema)
        if schema.keys() == {"$ref"} and not outer:
            return self._ref(schema["$ref"], path, is_open=False)
        members = schema.get("allOf", ())
        if len(members) == 1 and schema.keys() == {"allOf"}:
            return self._rewrite(members[0], f"{path}.allOf[0]", outer)
        described = list(self._conjuncts(schema, path))
        if any("additionalProperties" in part for part in described):
            return self._rewrite_open(schema, path)
        names = dict.fromkeys(
            name
            for part in described
            for name in (*part.get("properties", ()), *part.get("required", ()))
        )
        names |= dict.fromkeys(outer)
        patterns = [name for part in described for name in part.get("patternProperties", ())]
        self._warnings.step(len(names) + len(patterns))
        unions = [(name, part) for part in described for name in _UNIONS if name in part]
        if unions:
            if len(unions) > 1 or unions[0][1] is not schema or patterns:
                return self._rewrite_open(schema, path)  # its branches cannot be closed one by one
            union, _ = unions[0]
            new = self._rewrite_open({k: v for k, v in schema.items() if k != union}, path)
            branches = enumerate(schema[union])
            new[union] = [
                self._rewrite(branch, f"{path}.{union}[{index}]", tuple(names))
                for index, branch in branches
            ]
            return new
        new = self._rewrite_open(schema, path)
        if outer or any(_HAS_PROPERTIES & part.keys() for part in described):
            own = new.get("properties", {})
            new["properties"] = own | {name: {} for name in names if name not in own}
            if patterns:
                own = new.get("patternProperties", {})
                new["patternProperties"] = own | {name: {} for name in patterns if name not in own}
            new["additionalProperties"] = False
            if (
                "type" not in new
                and not {"const", "enum", "allOf", "$ref"} & new.keys()
                and not outer
            ):
                new["type"] = "object"
        return new

    def _rewrite_open(self, schema: Any, path: str) -> Any:
        """Rewrite a schema that describes its object together with others: the object stays open."""
        self._warnings.step()
        if isinstance(schema, bool):
            return schema
        new: Schema = {}
        for keyword, value in self._checked(schema, path).items():
            here = f"{path}.{keyword}"
            if keyword in ("properties", "patternProperties"):
                new[keyword] = {
                    name: self._rewrite(item, f"{here}.{name[:MAX_NAME_CHARS]}")
                    for name, item in value.items()
                }
            elif keyword in ("items", "additionalProperties"):
                new[keyword] = self._rewrite(value, here)
            elif keyword == "prefixItems":
                new[keyword] = [
                    self._rewrite(item, f"{here}[{index}]") for index, item in enumerate(value)
                ]
            elif keyword in ("allOf", *_UNIONS):
                new[keyword] = [
                    self._rewrite_open(item, f"{here}[{index}]") for index, item in enumerate(value)
                ]
            elif keyword == "$ref":
                new |= self._ref(value, path, is_open=True)
            else:
                new[keyword] = value
        return new

    def _checked(self, schema: Mapping[str, Any], path: str) -> Schema:
        """The enforceable keywords of a schema; warns of the others, or refuses them."""
        known = self._known.get(id(schema))
        if known is not None:
            return known[1]
        source, new = modern(schema), dict[str, Any]()
        for keyword, value in source.items():
            if keyword in UNENFORCED:
                if restricts(keyword, value):
                    self._ignore(keyword, path)
            elif (fits := SHAPES.get(keyword)) is not None:
                self._warnings.step(PROBE_STEPS if keyword in ("pattern", "multipleOf") else 0)
                if fits(value):
                    new[keyword] = value
                else:
                    self._ignore(keyword, path, value)
        # An object is closed as a whole unless it says otherwise: that is `False` here.
        unevaluated = new.pop("unevaluatedProperties", False)
        if unevaluated is not False:
            if unevaluated not in (True, {}):
                self._ignore("unevaluatedProperties", path)
            new.setdefault("additionalProperties", True)
        self._check_name_patterns(new, path)
        self._check_num_properties(new, path)
        self._known[id(schema)], self._known[id(new)] = (schema, new), (new, new)
        return new

    def _check_name_patterns(self, schema: Schema, path: str) -> None:
        """Drop patterns of property names that cannot be enforced."""
        patterns = schema.get("patternProperties", {})
        self._warnings.step(PROBE_STEPS * len(patterns))
        unread = [pattern for pattern in patterns if not is_pattern(pattern)]
        for pattern in unread:
            self._ignore("patternProperties", path, pattern)
        if unread:
            schema["patternProperties"] = {
                pattern: item for pattern, item in patterns.items() if pattern not in unread
            }

    def _check_num_properties(self, schema: Schema, path: str) -> None:
        """Drop bounds on the number of properties, where some of these are optional."""
        optional = schema.get("properties", {}).keys() - set(schema.get("required", ()))
        for keyword in ("minProperties", "maxProperties"):
            if optional and keyword in schema and schema[keyword] > 1:
                self._ignore(keyword, path)
                del schema[keyword]

    def _ignore(self, keyword: str, path: str, value: object = None) -> None:
        if self._checks_types and keyword == "type":
            for name in value if isinstance(value, list) else [value]:
                if isinstance(name, str) and name not in TYPES and name != "any":
                    raise ApiError(
                        400,
                        f"there is no type {name[:60]!r}; the types are {', '.join(sorted(TYPES))}",
                        param=f"{path}.type",
                    )
        shown = f"{keyword}: {value[:60]!r}" if isinstance(value, str) else keyword
        if self._strict:
            raise ApiError(
                400,
                f"{path}: {shown} cannot be enforced; leave it out, or leave out strict",
                param=f"{path}.{keyword}",
            )
        self._warnings.add(f"{path}: {shown} is not enforced")

    # -- references --------------------------------------------------------------------------

    def _conjuncts(self, schema: Schema, path: str) -> Iterator[Schema]:
        """A schema and all that must hold of the same value with it: `allOf`, `$ref`."""
        waiting, seen = [(schema, path)], set[int]()
        while waiting:
            part, path = waiting.pop()
            if id(part) in seen:
                continue
            seen.add(id(part))
            self._warnings.step()
            yield part
            nested = [
                (item, f"{path}.allOf[{index}]") for index, item in enumerate(part.get("allOf", ()))
            ]
            if part.get("$ref", "").startswith("#"):
                pointer = part["$ref"][1:]
                nested.append((self._target(pointer), self._path_of(pointer)))
            waiting += [
                (self._checked(item, place), place)
                for item, place in reversed(nested)
                if isinstance(item, Mapping)
            ]

    def _path_of(self, pointer: str) -> str:
        return self._where + pointer[: 4 * MAX_NAME_CHARS].replace("/", ".")

    def _ref(self, reference: str, path: str, *, is_open: bool) -> Schema:
        pointer = reference[1:]
        if not reference.startswith("#") or self._target(pointer) is None:
            self._ignore("$ref", path, reference)
            return {}
        key = (pointer, is_open)
        if key not in self._names:
            self._names[key] = f"{'open' if is_open else 'closed'}{len(self._names)}"
            self._waiting.append(key)
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def _target(self, pointer: str) -> Any:
        """The schema at a JSON pointer; None if there is none."""
        value: Any = self._root
        if not pointer:
            return value
        self._warnings.step(len(pointer) // 256)
        if not pointer.startswith("/"):
            return None
        for part in unquote(pointer[1:]).split("/"):
            self._warnings.step()
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, Mapping):
                value = value.get(name)
            elif isinstance(value, list) and name.isdecimal() and int(name[:9]) < len(value):
                value = value[int(name[:9])]
            else:
                return None
        return value if isinstance(value, bool | Mapping) else None
