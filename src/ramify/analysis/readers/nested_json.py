"""JSON that gateways store as a string inside JSON."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from ramify.analysis.readers.engines.python_literals import json_of_literal

MAX_LEVELS = 3
# Of an object, a list of objects or texts, or of such JSON in a text; as JSON or as Python writes it.
_BEGINNING = re.compile(r"""\s*+(?:[\[{]["']|\[\{|"[\[{])""")


def decode_json(data: bytes | str) -> Any:
    """A JSON value; NaN, lone surrogates and duplicate keys are taken as Python's decoder does.

    Raises:
        ValueError: the data is no JSON, no UTF-8, or nested too deeply.
    """
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError):
        pass
    except RecursionError:
        raise ValueError("nested too deeply") from None
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def is_cut_json(value: Any) -> bool:
    """Whether a text begins as an object or a list of objects and is no JSON: it was cut."""
    return (
        isinstance(value, str)
        and _BEGINNING.match(value) is not None
        and isinstance(decode_nested(value), str)
    )


def _decode_literal(text: str) -> Any:
    """The object or list that Python's `repr` has written; None if the text is none."""
    quotes = text.find("'"), text.find('"')
    written = json_of_literal(text) if 0 <= quotes[0] < quotes[1] or quotes[1] < 0 else None
    try:
        return None if written is None else decode_json(written)
    except ValueError:
        return None


def decode_nested(value: Any) -> Any:
    """The object or list that a string holds, as JSON or as Python writes it, at most MAX_LEVELS deep; other values as they are."""
    for _ in range(MAX_LEVELS):
        if not isinstance(value, str) or value.lstrip()[:1] not in {"{", "[", '"'}:
            break
        try:
            inner = decode_json(value)
        except ValueError:
            inner = _decode_literal(value)
        if not isinstance(inner, dict | list | str):
            break
        value = inner
    return value
