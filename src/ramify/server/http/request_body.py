"""Decode request bodies: a byte order mark and `2.0` for an integer pass; see `body_errors` for errors."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any, TypeVar

import msgspec

from ramify.server.errors import ApiError
from ramify.server.http.body_errors import not_json, validation_error
from ramify.server.http.json_limits import check_json_limits

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_INTEGRAL = re.compile(rb"(-?[0-9]{1,19})\.0{1,20}")

T = TypeVar("T")


def decode_body(body: bytes | bytearray, kind: type[T]) -> T:
    """Decode a JSON body to a type; a top-level float without fraction is an integer.

    Raises:
        ApiError: 400, it is not JSON, exceeds `json_limits`, or does not fit the type.
    """
    check_json_limits(body)
    body = without_mark(body)
    if not body or body.isspace():
        raise ApiError(400, "the body is empty; send a JSON object")
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
        raise not_json(error) from None


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
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # in what no type has looked at
        raise not_json(error) from None


def _with_integers(body: bytes | bytearray) -> bytes | None:
    """The body with top-level `2.0` written as `2`; None if it has none."""
    fields = _raw_fields(body)
    integers = {
        name: msgspec.Raw(match[1])
        for name, value in fields.items()
        if (match := _INTEGRAL.fullmatch(memoryview(value)))
    }
    return msgspec.json.encode(fields | integers) if integers else None
