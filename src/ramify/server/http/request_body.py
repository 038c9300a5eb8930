"""Decode request bodies: a byte order mark and `2.0` for an integer pass, errors name what is allowed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from ramify.server.errors import ApiError
from ramify.server.http.json_limits import check_json_limits

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_INTEGRAL = re.compile(rb"(-?[0-9]{1,19})\.0{1,20}")
_PATH_STEP = re.compile(r"\.([^.\[\]]+)|\[[^\]]*\]")
_BEFORE_PATH = " - at `"

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
        raise validation_error(error, kind) from None
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
        raise validation_error(error, kind, where) from None


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


def validation_error(error: msgspec.ValidationError, kind: type, where: str = "") -> ApiError:
    """The error for a value at `where` that does not fit a type; lists the values of an enum."""
    # The message may quote the value, the path has nothing that a client wrote: it is the last.
    message, _, path = str(error).rpartition(_BEFORE_PATH)
    message, path = (message, path.removesuffix("`")) if message else (path, "")
    path = path.removeprefix("key in ").removeprefix("$")
    if message.startswith("Invalid enum value"):
        choices = sorted(map(repr, allowed_values(kind, path)))
        message += f"; the values are {', '.join(choices)}" if choices else ""
    return ApiError(400, message, param=(where + path).lstrip(".") or None)


def allowed_values(kind: type, path: str) -> set[Any]:
    """The literals that a type allows at a path such as `.messages[0].role`."""
    types = [_type_info(kind)]
    for step in _PATH_STEP.finditer(path):
        types = [inner for outer in types for inner in _step_into(outer, step[1])]
    return {
        value for info in types if isinstance(info, inspect.LiteralType) for value in info.values
    }


@lru_cache(64)
def _type_info(kind: type) -> inspect.Type:
    return inspect.type_info(kind)


def _step_into(outer: inspect.Type, name: str | None) -> Iterator[inspect.Type]:
    """The types of a field, or of the items if `name` is None; a union's members one by one."""
    inner: list[inspect.Type] = []
    match outer:
        case inspect.StructType() if name is not None:
            inner = [item.type for item in outer.fields if item.encode_name == name]
        case inspect.ListType() if name is None:
            inner = [outer.item_type]
        case inspect.DictType() if name is None:
            inner = [outer.value_type]
        case _:
            pass
    for info in inner:
        yield from info.types if isinstance(info, inspect.UnionType) else (info,)
