"""Errors of request bodies in the words of a request: the field, its value, what is possible.

msgspec's own messages name Python types and leave the value out: "Expected `int` >= 1".

A type with a pattern, `Annotated[str, Meta(pattern=..., description=...)]`, says in its description what
fits: that is in the error, in place of the pattern.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import inspect

from ramify.counts import counted
from ramify.server.errors import ApiError

_PATH_STEP = re.compile(r"\.([^.\[\]]+)|\[([^\]]*)\]")
_BEFORE_PATH = " - at `"
NUM_QUOTED = 100  # characters of a value
MAX_SHOWN = 2**53  # a bound beyond it is that of a machine's integer: not worth a word

# msgspec's name of a JSON type → the values that are possible, and a value that was sent.
_TYPES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "str": (("a string",), "a string"),
    "int": (("an integer",), "a number"),
    "float": (("a number",), "a number"),
    "bool": (("true", "false"), "a boolean"),
    "array": (("an array",), "an array"),
    "object": (("an object",), "an object"),
    "null": (("null",), "null"),
}
_WRONG_TYPE = re.compile(r"Expected `([a-z |]+)`, got `([a-z]+)`")
_WRONG_NUMBER = re.compile(r"Expected `(?:int|float)` (>=|<=|>|<) (\S+)")
_WRONG_LENGTH = re.compile(r"Expected `(str|array|object)` of length (>=|<=) ([0-9]+)")
_MISSING = re.compile(r"Object missing required field `(.+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.+)`", re.DOTALL)
_BOUNDS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}
_ITEMS = {"str": ("character", ""), "array": ("item", ""), "object": ("entry", "entries")}


class MissingFieldError(ApiError):
    """A field that a request must have is not there.

    Args:
        field: its path.
    """

    def __init__(self, field: str) -> None:
        super().__init__(400, "it is missing", param=field)


def validation_error(
    error: msgspec.ValidationError, kind: type, read: Callable[[], object], where: str = ""
) -> ApiError:
    """The error for a value at `where` that does not fit a type: 400, the value and what is possible.

    Args:
        read: decodes what was converted, so that the message can quote the value.
    """
    # The message may quote the value, the path has nothing that a client wrote: it is the last.
    message, _, path = str(error).rpartition(_BEFORE_PATH)
    message, path = (message, path.removesuffix("`")) if message else (path, "")
    is_key = path.startswith("key` in `")
    path = path.removeprefix("key` in `").removeprefix("$")
    field = (where + path).lstrip(".")
    if missing := _MISSING.fullmatch(message):
        field = f"{field}.{missing[1]}".lstrip(".")
        return MissingFieldError(field)
    if unknown := _UNKNOWN.fullmatch(message):
        field = f"{field}.{unknown[1]}".lstrip(".")
        return ApiError(400, "there is no such field; leave it out", param=field)
    value, types = None if is_key else _value_at(read, path), list(_types_at(kind, path))
    return ApiError(400, _reason(message, value, types, is_key, field), param=field or None)


def not_json(error: Exception, what: str = "the body", param: str | None = None) -> ApiError:
    """The error for text that cannot be decoded: 400, and where it is wrong."""
    if isinstance(error, UnicodeDecodeError):
        reason = "its text is not UTF-8"
    elif "truncated" in str(error):
        reason = "it ends too early"
    else:
        reason = str(error).removeprefix("JSON is malformed: ")
    return ApiError(400, f"{what} is not JSON: {reason}", param=param)


def _reason(
    message: str, value: object, types: list[inspect.Type], is_key: bool, field: str
) -> str:
    """What of a value is not possible, and what is."""
    if length := _WRONG_LENGTH.fullmatch(message):
        kind, sign, limit = length[1], length[2], int(length[3])
        if is_key:
            return f"a name in it has too many characters; it can have {_BOUNDS[sign]} {limit}"
        if isinstance(value, (str, list, dict)):
            is_or_has = f"has {counted(len(value), *_ITEMS[kind])}" if value else "is empty"
            return f"it {is_or_has}; it must have {_BOUNDS[sign]} {counted(limit, *_ITEMS[kind])}"
        return f"it must have {_BOUNDS[sign]} {counted(limit, *_ITEMS[kind])}"
    sent = _quoted(value, message)
    sent = sent if field else f"the body is {sent}, which"
    if number := _WRONG_NUMBER.fullmatch(message):
        return f"{sent} is not possible; it must be {_range(types, number[1], number[2])}"
    if wrong := _WRONG_TYPE.fullmatch(message):
        names = wrong[1].split(" | ")
        if "float" in names and "int" in names:
            names.remove("int")
        possible = [word for name in names for word in _TYPES.get(name, ((), ""))[0]]
        return f"{sent} is not possible; it must be {_alternatives(possible)}"
    if message.startswith("Invalid enum value"):
        choices = sorted({_json(choice) for info in types for choice in _literals(info)})
        return f"{sent} is not possible; it must be {_alternatives(choices)}"
    if message.startswith("Expected `str` matching regex") and (description := _description(types)):
        return f"{sent} is not possible. {description}"
    if "out of range" in message:
        return f"{sent} is not possible: the number is too large"
    return message


def _quoted(value: object, message: str) -> str:
    """A value as it was sent, shortened; its type if it is an array, an object, or cannot be read."""
    if isinstance(value, str) and len(value) > NUM_QUOTED:
        return f"{_json(value[: NUM_QUOTED - 3] + '...')}, of {len(value)} characters,"
    if isinstance(value, (str, int, float)):
        return _json(value)
    wrong = _WRONG_TYPE.fullmatch(message)
    return _TYPES[wrong[2]][1] if wrong and wrong[2] in _TYPES else "this value"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _alternatives(words: list[str]) -> str:
    """`a, b or c`."""
    *others, last = words or ["another one"]
    return f"{', '.join(others)} or {last}" if others else last


def _range(types: list[inspect.Type], sign: str, limit: str) -> str:
    """The numbers that a type allows: both bounds if both say something, else that at fault."""
    numbers = [
        info
        for outer in types
        for info in [outer.type if isinstance(outer, inspect.Metadata) else outer]
        if isinstance(info, (inspect.IntType, inspect.FloatType))
    ]
    if len(numbers) == 1:
        info = numbers[0]
        low, high = info.ge, info.le
        if low is not None and high is not None and max(abs(low), abs(high)) <= MAX_SHOWN:
            return f"between {low} and {high}"
        if info.gt is not None and high is not None:
            return f"more than {info.gt} and at most {high}"
    return f"{_BOUNDS[sign]} {limit.removesuffix('.0')}"


def _literals(info: inspect.Type) -> tuple[Any, ...]:
    return info.values if isinstance(info, inspect.LiteralType) else ()


def _description(types: list[inspect.Type]) -> str:
    """What the description of the types says of values that fit; "" if they have several or none."""
    descriptions = {
        (info.extra_json_schema or {}).get("description", "")
        for info in types
        if isinstance(info, inspect.Metadata)
    }
    return descriptions.pop() if len(descriptions) == 1 else ""


def _value_at(read: Callable[[], Any], path: str) -> Any:
    """The value at a path; None if it cannot be read, or the path does not name its keys.

    An object may have a name twice: then this is in the last of the values, and the fault in another.
    """
    try:
        value = read()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # wrong behind the value, too
        return None
    for name, index in _PATH_STEP.findall(path):
        if name and isinstance(value, dict):
            value = value.get(name)
        elif index.isdecimal() and isinstance(value, list) and int(index) < len(value):
            value = value[int(index)]
        else:
            return None
    return value


def _types_at(kind: type, path: str) -> list[inspect.Type]:
    """The types of values at a path; of a union, its members."""
    types = [_type_info(kind)]
    for name, _ in _PATH_STEP.findall(path):
        types = [inner for outer in types for inner in _step_into(outer, name)]
    return types


@lru_cache(64)
def _type_info(kind: type) -> inspect.Type:
    return inspect.type_info(kind)


def _step_into(outer: inspect.Type, name: str) -> Iterator[inspect.Type]:
    """The types of a field, or of the items if `name` is ""; a union's members one by one."""
    inner: list[inspect.Type] = []
    match outer:
        case inspect.Metadata():
            yield from _step_into(outer.type, name)
        case inspect.StructType() if name:
            inner = [item.type for item in outer.fields if item.encode_name == name]
        case inspect.ListType() if not name:
            inner = [outer.item_type]
        case inspect.DictType() if not name:
            inner = [outer.value_type]
        case _:
            pass
    for info in inner:
        yield from info.types if isinstance(info, inspect.UnionType) else (info,)
