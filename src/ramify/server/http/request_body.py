"""Decode request bodies: a byte order mark and `2.0` for an integer pass, errors name what is allowed.

A type with a pattern, `Annotated[str, Meta(pattern=..., description=...)]`, says in its description what
fits: that is in the error, in place of the pattern.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from ramify.errors import shortened
from ramify.server.errors import ApiError
from ramify.server.http.json_limits import check_json_limits

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_INTEGRAL = re.compile(rb"(-?[0-9]{1,19})\.0{1,20}")
_PATH_STEP = re.compile(r"\.([^.\[\]]+)|\[([^\]]*)\]")
_BEFORE_PATH = " - at `"
NUM_QUOTED = 100  # characters of a value

T = TypeVar("T")


def decode_body(body: bytes | bytearray, kind: type[T]) -> T:
    """Decode a JSON body to a type; a top-level float without fraction is an integer.

    Raises:
        ApiError: 400, it is not JSON, exceeds `json_limits`, or does not fit the type.
    """
    check_json_limits(body)
    body = without_mark(body)
    try:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError as error:
            integral = _with_integers(body) if "got `float`" in str(error) else None
            if integral is None:
                raise
            return msgspec.json.decode(integral, type=kind)
    except msgspec.ValidationError as error:
        raise validation_error(error, kind, partial(msgspec.json.decode, body)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None


def convert_value(value: object, kind: type[T], where: str = "") -> T:
    """Convert decoded JSON to a type.

    Args:
        where: path of the value in the body.

    Raises:
        ApiError: 400, it does not fit the type.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise validation_error(error, kind, lambda: value, where) from None


def decode_json_text(text: str, param: str) -> Any:
    """Decode JSON that is a string in a body, within `json_limits`.

    Raises:
        ApiError: 400, it is not JSON, or exceeds the limits.
    """
    check_json_limits(text.encode("utf-8", "surrogatepass"), what="its JSON", param=param)
    try:
        return json.loads(text)
    except ValueError as error:
        raise ApiError(400, f"it is not JSON: {error}", param=param) from error


def without_mark(body: bytes | bytearray) -> bytes | bytearray:
    """The body without a byte order mark; only a body that has one is copied."""
    return body.removeprefix(BYTE_ORDER_MARK) if body.startswith(BYTE_ORDER_MARK) else body


def extra_fields(body: bytes | bytearray, kind: type) -> dict[str, msgspec.Raw]:
    """The top-level fields of a valid body that a request type does not have, not decoded."""
    fields = _raw_fields(without_mark(body))
    known = {info.encode_name for info in msgspec.structs.fields(kind)}
    return {name: value for name, value in fields.items() if name not in known}


def _raw_fields(body: bytes | bytearray) -> dict[str, msgspec.Raw]:
    try:
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except UnicodeDecodeError as error:  # decoding to a type does not look at unknown names
        raise ApiError(400, f"the body is not JSON: {error}") from None


def _with_integers(body: bytes | bytearray) -> bytes | None:
    """The body with top-level `2.0` written as `2`; None if it has none."""
    fields = _raw_fields(body)
    integers = {
        name: msgspec.Raw(match[1])
        for name, value in fields.items()
        if (match := _INTEGRAL.fullmatch(memoryview(value)))
    }
    return msgspec.json.encode(fields | integers) if integers else None


def validation_error(
    error: msgspec.ValidationError, kind: type, read: Callable[[], object], where: str = ""
) -> ApiError:
    """The error for a value at `where` that does not fit a type; it says what fits an enum or a pattern.

    Args:
        read: decodes what was converted, so that the message can quote the value.
    """
    # The message may quote the value, the path has nothing that a client wrote: it is the last.
    message, _, path = str(error).rpartition(_BEFORE_PATH)
    message, path = (message, path.removesuffix("`")) if message else (path, "")
    path = path.removeprefix("key in ").removeprefix("$")
    if message.startswith("Invalid enum value"):
        choices = sorted(map(repr, allowed_values(kind, path)))
        message += f"; the values are {', '.join(choices)}" if choices else ""
    elif message.startswith("Expected `str` matching regex"):
        message = _wrong_text(kind, path, read) or message
    return ApiError(400, message, param=(where + path).lstrip(".") or None)


def allowed_values(kind: type, path: str) -> set[Any]:
    """The literals that a type allows at a path such as `.messages[0].role`."""
    return {
        value
        for info in _types_at(kind, path)
        if isinstance(info, inspect.LiteralType)
        for value in info.values
    }


def _wrong_text(kind: type, path: str, read: Callable[[], object]) -> str:
    """The text at a path, and what its type's description says of texts that fit; "" if it has none."""
    descriptions = {
        (info.extra_json_schema or {}).get("description", "")
        for info in _types_at(kind, path)
        if isinstance(info, inspect.Metadata)
    }
    text = _value_at(read, path)
    if len(descriptions) != 1 or not isinstance(text, str):
        return ""
    length = f", of {len(text)} characters," if len(text) > NUM_QUOTED else ""
    return f"{shortened(text, NUM_QUOTED)!r}{length} is not possible. {descriptions.pop()}"


def _value_at(read: Callable[[], Any], path: str) -> Any:
    """The value at a path; None if it cannot be read, or the path does not name its keys."""
    try:
        value = read()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # wrong behind the value, too
        return None
    for name, index in _PATH_STEP.findall(path):
        if name and isinstance(value, dict):
            value = value.get(name)
        elif index.isdecimal() and isinstance(value, list):
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
